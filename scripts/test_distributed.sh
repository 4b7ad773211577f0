#!/usr/bin/env bash
#
# Do N processes on this machine compute together, how fast, and is one of them slow?
#
# Usage: test_distributed.sh [options] N
#
#   N                    number of processes; one a GPU where there are GPUs
#
# Checks that each collective that training uses gives the right result on every rank (all_reduce,
# broadcast, all_gather, reduce_scatter, all_to_all, point to point, barrier), measures the bus
# bandwidth by message size as nccl-tests do, refuses two ranks on one GPU, and names a rank that is
# slow, frozen or missing. The report goes to standard output, all else to standard error.
#
#   --json               one JSON object in place of the report for people
#   --backend BACKEND    auto, nccl or gloo (default: nccl where there are GPUs, else gloo)
#   --min-bytes SIZE     smallest message, such as 1024, 64K, 16M or 1G (default: 1K)
#   --max-bytes SIZE     largest message; each is 4 times the one before (default: 64M, on GPUs 1G)
#   --seconds S          time for the bandwidth table (default: 10)
#   --timeout S          how long one rank waits for another (default: 60)
#   --quiet              no lines of the launcher's own
#   --help               show this
#
# The launcher's --python, --agent, --master-port, --env, --env-file, --log-dir, --no-preflight and
# --dry-run are understood too: see scripts/ssh/launch_singlenode.sh --help.
#
# Exit codes: 0 all is well, 1 a check failed, 2 wrong call, 130 Ctrl-C, 143 TERM.
#
#   test_distributed.sh 2
#   test_distributed.sh --json --max-bytes 1M 8 | jq .verdict
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"

SMOKE=()             # words for the test itself
LAUNCH=()            # words for the launcher
TELL=()              # words for the report
ASKED_PYTHON='' LOG_DIR=$PWD/logs NPROC='' BACKEND=auto MIN_BYTES=1K MAX_BYTES=''


parse_args() { # <word...>
  local positional=()
  while (($#)); do
    case $1 in
      --json) TELL=(--json) ;;
      --min-bytes) need_value "$@"; check_size "$@"; MIN_BYTES=$2; shift ;;
      --max-bytes) need_value "$@"; check_size "$@"; MAX_BYTES=$2; shift ;;
      --seconds | --timeout) need_value "$@"; check_seconds "$@"; SMOKE+=("$1" "$2"); shift ;;
      --backend) need_value "$@"; BACKEND=$2; shift ;;
      --python) need_value "$@"; ASKED_PYTHON=$2; shift ;;
      --log-dir) need_value "$@"; LOG_DIR=$(absolute "$2"); shift ;;
      --env-file) need_value "$@"; LAUNCH+=("$1" "$(absolute "$2")"); shift ;;
      --agent | --master-port | --env) need_value "$@"; LAUNCH+=("$1" "$2"); shift ;;
      --no-preflight | --quiet) LAUNCH+=("$1") ;;
      --dry-run) DRY_RUN=1 ;;
      --help | -h) usage; exit ;;
      -*[!0-9]*) die_usage "$1: unknown option" ;;
      *) positional+=("$1") ;;
    esac
    shift
  done
  ((${#positional[@]} == 1)) || die_usage "one N, the number of processes, is wanted: '${positional[*]}'"
  NPROC=${positional[0]}
  [[ $NPROC =~ ^[1-9][0-9]{0,4}$ ]] || die_usage "N '$NPROC': a number of processes, 1 or more, is wanted"
}


check_size() { # <option> <value> [rest...]
  [[ $2 =~ ^[1-9][0-9]{0,11}[KMGkmg]?$ ]] ||
    die_usage "$1 '$2': a size in bytes is wanted, such as 1024, 64K, 16M or 1G"
}


check_seconds() { # <option> <value> [rest...]
  [[ $2 =~ ^[0-9]+([.][0-9]+)?$ && $2 =~ [1-9] ]] ||
    die_usage "$1 '$2': a number of seconds above 0 is wanted"
}


# What the ranks would refuse, each for itself, is refused before they are started.
check_smoke() {
  SMOKE+=(--backend "$BACKEND" --min-bytes "$MIN_BYTES")
  if [[ $MAX_BYTES ]]; then
    (($(bytes "$MIN_BYTES") <= $(bytes "$MAX_BYTES"))) ||
      die_usage "--max-bytes '$MAX_BYTES': less than --min-bytes, $MIN_BYTES"
    SMOKE+=(--max-bytes "$MAX_BYTES")
  fi
  case $BACKEND in
    auto) ;;
    nccl) (($(kit_python doctor --gpus) > 0)) || die_usage "--backend nccl: there is no GPU here; use gloo" ;;
    gloo) LAUNCH+=(--no-preflight) ;; # on the CPU there may be more processes than GPUs
    *) die_usage "--backend '$BACKEND': auto, nccl or gloo is wanted" ;;
  esac
}


bytes() { # <size>
  numfmt --from=iec -- "${1^^}"
}


absolute() { # <path>
  if [[ $1 == /* ]]; then printf '%s\n' "$1"; else printf '%s\n' "$PWD/$1"; fi
}


# What the launcher and the ranks say is not the answer: the answer is the report.
test_ranks() {
  local code=0 report
  FOLDER=$(mktemp -d)
  trap 'rm -rf -- "$FOLDER"' EXIT
  report=$FOLDER/report.json
  wait_for scripts/ssh/launch_singlenode.sh "${LAUNCH[@]}" "$report" >&2 || code=$?
  if [[ -e $report ]]; then
    kit_python smoke_report "${TELL[@]}" "$report" || ((code)) || code=$?
  elif ((code == 0)); then
    die "no rank wrote a report: look into $LOG_DIR/latest"
  fi
  exit "$code"
}


main() {
  parse_args "$@"
  pick_python "$ASKED_PYTHON"
  check_smoke
  cd -- "$KIT" # the package is found from here alone
  LAUNCH+=(--python "$PYTHON" --log-dir "$LOG_DIR" -m distributed.smoke
    - "$NPROC" -- "${SMOKE[@]}" --json-file)
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    exec scripts/ssh/launch_singlenode.sh --dry-run "${LAUNCH[@]}" "<report>"
  fi
  test_ranks
}

main "$@"
