#!/usr/bin/env bash
#
# Write the report of a run, a page that needs no network, and print its path.
#
# Usage: report.sh [options] [RUN]
#
#   RUN            run directory, its name below logs, or the number of its SLURM job (default: latest)
#
#   --log-dir DIR  where a name is looked for (default: logs)
#   --python PATH  default: the active venv or conda environment, .venv here, the kit's .venv, python3
#   --help         show this
#
# Launchers write RUN/report.html when a run ends. This writes it at any time, also while the run goes on, and from any
# directory. Of nodes that share nothing (--sync), it shows what was brought home when an attempt ended.
#
# Exit codes: 0 the report is written, 1 it cannot be written, 2 wrong call.
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"

LOG_DIR=logs ASKED_PYTHON='' WORD=''


parse_args() { # <word...>
  while (($#)); do
    case $1 in
      --log-dir) need_value "$@"; LOG_DIR=$2; shift ;;
      --python) need_value "$@"; ASKED_PYTHON=$2; shift ;;
      --help | -h) usage; exit ;;
      -*) die_usage "$1: unknown option" ;;
      *)
        [[ ! $WORD ]] || die_usage "expected one RUN, got: $(quote "$WORD" "$1")"
        WORD=$1
        ;;
    esac
    shift
  done
}


main() {
  parse_args "$@"
  pick_python "$ASKED_PYTHON"
  kit_python runs.report --from "$PWD" --log-dir "$LOG_DIR" -- "${WORD:-latest}"
}

main "$@"
