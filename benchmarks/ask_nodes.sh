#!/usr/bin/env bash
#
# Ask nodes as the launchers do, and nothing else: what benchmarks/fan_out.py measures.
#
# Usage: ask_nodes.sh true NODE...        run `true` on all nodes at once
#        ask_nodes.sh preflight NODE...   ask them whether they are fit, and judge
#
set -euo pipefail
# shellcheck source=scripts/lib/launcher.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../scripts/lib/launcher.bash"


main() { # <true or preflight> <node...>
  local node
  pick_python ''
  for node in "${@:2}"; do
    add_node "$node" 1 "$node"
  done
  open_connections
  case $1 in
    true) run_on_nodes "$CONNECTIONS_DIR" ssh_run true ;;
    preflight)
      check_script
      ssh_probe_nodes
      "$PYTHON" -I -c 'import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path
from distributed.launch.preflight import compare
faults, _, _ = compare(Path(sys.argv[2]), dict.fromkeys(sys.argv[3:], 1), "")
sys.exit(bool(faults))' "$KIT" "$REPLIES" "${NODES[@]}"
      ;;
  esac
}

main "$@"
