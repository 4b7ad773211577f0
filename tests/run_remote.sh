#!/usr/bin/env bash
#
# For the tests: run a command the way the launchers do, with the same quoting.
#
# Usage: run_remote.sh ssh NODE COMMAND [ARGUMENT...]
#        run_remote.sh pdsh NODE PYTHON FILE [OPTION...] -- [ARGUMENT...]
#        run_remote.sh login SHELL COMMAND [ARGUMENT...]
#
# ssh and pdsh use scripts/lib/ssh.bash and pdsh.bash. login runs on this machine: SHELL gets the command line that it
# would get as a login shell from sshd.
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../scripts/lib/common.bash"
for part in options node_env nodes launch watch ssh pdsh; do
  # shellcheck disable=SC1090
  source "$KIT/scripts/lib/$part.bash"
done


# shellcheck disable=SC2034 # pdsh.bash reads them
through_pdsh() { # <node> <python> <script> [argument...]
  add_node "$1" 1 "$1"
  MASTER_ADDR=$1 MASTER_PORT=29500 PYTHON=$2
  AGENT_PREFIX=("${@:2:2}") AGENT_SUFFIX=("${@:4}")
  RUN=$(mktemp -d "$CONNECTIONS_DIR/run-XXXXXX")
  set_supervisor
  run_pdsh <> <(:) # standard input stays open: end of file would mean that the launcher has exited
}


main() { # <ssh, pdsh or login> <node or shell> <command...>
  if [[ $1 == login ]]; then
    exec "$2" -c "$(quote_for_any_shell "exec $(quote "${@:3}")")"
  fi
  # shellcheck disable=SC2034 # ssh.bash reads it
  ADDRESS=(["$2"]="$2")
  pick_python ''
  open_connections
  case $1 in
    ssh) ssh_run "${@:2}" </dev/null ;;
    pdsh) through_pdsh "${@:2}" ;;
  esac
}

main "$@"
