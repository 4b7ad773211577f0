#!/usr/bin/env bash
#
# For the tests: run a command the way the launchers do, with the same quoting.
#
# Usage: run_remote.sh ssh NODE COMMAND [ARGUMENT...]
#        run_remote.sh login SHELL COMMAND [ARGUMENT...]
#
# ssh uses scripts/lib/ssh.bash. login runs on this machine: SHELL gets the command line that it would get as a login
# shell from sshd.
set -euo pipefail
# shellcheck source=scripts/lib/launcher.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../scripts/lib/launcher.bash"


main() { # <ssh or login> <node or shell> <command...>
  if [[ $1 == login ]]; then
    exec "$2" -c "$(quote_for_any_shell "exec $(quote "${@:3}")")"
  fi
  # shellcheck disable=SC2034 # ssh.bash reads it
  ADDRESS=(["$2"]="$2")
  pick_python ''
  open_connections
  ssh_run "${@:2}" </dev/null
}

main "$@"
