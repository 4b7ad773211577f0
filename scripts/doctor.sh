#!/usr/bin/env bash
#
# Is this machine fit for training, and what is to be done when it is not?
#
# Usage: doctor.sh [options]
#
# Run it in the folder you would launch from. It looks at Python and PyTorch, GPUs and who uses them,
# memory, disk, /dev/shm, cores and limits, the master port, name resolution, leftovers in the shell's
# environment, and runs that are still going on. It changes nothing.
#
# Each line is ok, a warning (training works, but ...) or a fault (training will fail), with the fix:
# in words, or behind a $ as a command to paste. The worst stands last, above the prompt.
#
# Options:
#   --python PATH        look at this Python; default: the active virtual environment,
#                        then .venv of the working folder, then python3
#   --master-port PORT   the port at which ranks will meet (default 29500)
#   --log-dir DIR        where runs will be logged (default logs)
#   --json               print the facts as JSON instead, and judge nothing
#   --dry-run            print the command that would look, and look at nothing
#   --help               print this
#
# Exit codes: 0 no fault, 1 a fault, 2 wrong call.
#
# On another machine: ssh NODE 'cd FOLDER && scripts/doctor.sh'
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"


main() {
  parse_args "$@"
  if [[ ! $ASKED_PYTHON && ${QUESTIONS[*]} != *--json* ]]; then
    find_python
  fi
  pick_python "$ASKED_PYTHON"
  set -- doctor --folder "$PWD" "${QUESTIONS[@]}"
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    quote "$PYTHON" -m "distributed.$1" "${@:2}"
  else
    kit_python "$@"
  fi
}


parse_args() { # <argument...>
  ASKED_PYTHON=''
  QUESTIONS=()
  while (($# > 0)); do
    case $1 in
      --help | -h) usage; exit 0 ;;
      --python) need_value "$@"; ASKED_PYTHON=$2; shift 2 ;;
      --master-port) need_value "$@"; QUESTIONS+=("$1" "$2"); shift 2 ;;
      --log-dir) need_value "$@"; QUESTIONS+=("$1" "$(realpath -m -- "$2")"); shift 2 ;;
      --json) QUESTIONS+=("$1"); shift ;;
      --dry-run) DRY_RUN=1; shift ;;
      -*) die_usage "there is no option '$1'" ;;
      *) die_usage "unexpected word '$1': it looks at the machine it runs on, so run it there" ;;
    esac
  done
}


# No Python that we can use is no wrong call, when none was named: it is the first fault of this machine.
find_python() {
  local trouble
  if ! trouble=$(pick_python 2>&1); then
    trouble=${trouble%%$'\n'*}
    printf 'fault    python    %s\n' "${trouble#"$PROGRAM: "}"
    printf '                   %s\n' 'or install Python 3.10 or newer, on a cluster perhaps: module load python'
    printf '\n%s is not fit for training: 1 fault, nothing else was looked at\n' "$(uname -n)"
    exit 1
  fi
}


main "$@"
