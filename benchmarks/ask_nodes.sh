#!/usr/bin/env bash
#
# Ask nodes as the launchers do, and nothing else: what benchmarks/fan_out.py measures.
#
# Usage: ask_nodes.sh true NODE...        run `true` on all nodes at once
#        ask_nodes.sh preflight NODE...   ask them whether they are fit, and judge
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../scripts/lib/common.bash"
# shellcheck source=scripts/lib/options.bash
source "$KIT/scripts/lib/options.bash"
# shellcheck source=scripts/lib/node_env.bash
source "$KIT/scripts/lib/node_env.bash"
# shellcheck source=scripts/lib/nodes.bash
source "$KIT/scripts/lib/nodes.bash"
# shellcheck source=scripts/lib/launch.bash
source "$KIT/scripts/lib/launch.bash"
# shellcheck source=scripts/lib/watch.bash
source "$KIT/scripts/lib/watch.bash"
# shellcheck source=scripts/lib/ssh.bash
source "$KIT/scripts/lib/ssh.bash"


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
      set_compare_arguments
      kit_python launch.open_run "${COMPARE[@]}"
      ;;
  esac
}

main "$@"
