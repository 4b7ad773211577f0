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
# shellcheck source=scripts/lib/launcher.bash
source "$KIT/scripts/lib/launcher.bash"
# shellcheck source=scripts/lib/ssh.bash
source "$KIT/scripts/lib/ssh.bash"
# shellcheck source=scripts/lib/nodes.bash
source "$KIT/scripts/lib/nodes.bash"


main() { # <true or preflight> <node...>
  local node
  pick_python ''
  for node in "${@:2}"; do
    NODES+=("$node") NPROC[$node]=1 ADDRESS[$node]=$node
  done
  open_connections
  SCRIPT_FILE=$KIT/train.py
  case $1 in
    true) ask_nodes "$SOCKETS" true ;;
    preflight) check_nodes ;;
  esac
}

main "$@"
