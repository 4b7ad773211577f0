#!/usr/bin/env bash
#
# Show a table of runs and job lists, the newest first; it queries no node.
#
# Usage: ls.sh [options]
#        muster ls ...
#
#     muster ls
#     muster ls --all --rows 10
#
#   --all          also those that you have started in other directories
#   --rows N       number of runs and lists; older ones are not read (default: 50)
#   --json         print one JSON object; docs/AGENTS.md describes it
#   --log-dir DIR  directory with the run directories (default: logs)
#   --python PATH  Python that runs this program (default: the first of these that
#                  exists: the active venv or conda environment (not base),
#                  ./.venv, Muster's .venv, python3)
#   --help         show this help
#
# Job lists are those of the working directory. The state of a run that has ended
# is its verdict. Otherwise it is running, remote (its launcher is on another
# machine), unknown (its launcher has exited: status queries its nodes), or the
# state of its SLURM job. A step with ~ was found in the output.
#
# Exit codes: 0 the table was printed; 2 wrong call.
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
source "$KIT/scripts/lib/options.bash"


main() {
  parse_options "$@"
  ((!${#POSITIONAL[@]})) || die_usage "expected no argument, got: $(quote "${POSITIONAL[@]}"); to show a run: status"
  [[ ! $ROWS ]] || { is_count "$ROWS" && ((ROWS >= 1)); } || die_usage "--rows: expected 1 or more runs, got '$ROWS'"
  pick_python "$PYTHON_OPTION"
  forward_options_except --python --log-dir
  exec_module runs.listing "--log-dir=$LOG_DIR" "${FORWARDED_OPTIONS[@]}"
}

main "$@"
