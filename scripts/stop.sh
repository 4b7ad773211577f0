#!/usr/bin/env bash
#
# Stop a run, and check that none of its processes remains on any node.
#
# Usage: stop.sh [options] RUN
#        muster stop ...
#
#     muster stop latest
#     muster stop --now train-2026
#
#   RUN            a run: its directory, its name, a unique beginning of its name,
#                  the number of its SLURM job, or latest, the newest in DIR;
#                  runs that were started elsewhere are found too
#
#   --now          kill the processes immediately; they write no checkpoint
#   --log-dir DIR  directory with the run directories (default: logs)
#   --python PATH  Python that runs this program (default: the active venv or
#                  conda environment (not base), ./.venv, Muster's .venv, python3)
#   --quiet        print only the result
#   --help         show this help
#
# The launcher of the run receives SIGTERM, and gives the ranks time to write a
# checkpoint: the seconds of its option --grace. If the launcher has exited, or
# does not exit in time, the processes are ended on each node. Then every node is
# checked for processes of this run; of a run that has ended, this is all.
#
# For a batch job, the batch script is signalled, and SLURM then ends all
# processes; a pending job is cancelled. The job is not requeued.
#
# Exit codes: 0 no process remains; 1 a process remains; 2 wrong call; 69 a node
# could not be checked.
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
source "$KIT/scripts/lib/options.bash"


main() {
  parse_options "$@"
  parse_one_argument RUN ''
  [[ $ARGUMENT ]] || die_usage "RUN: missing; for the newest run use: $PROGRAM latest"
  pick_python "$PYTHON_OPTION"
  forward_options_except --python --log-dir
  exec_module runs.stop "--program=$PROGRAM" "--log-dir=$LOG_DIR" "${FORWARDED_OPTIONS[@]}" -- "$ARGUMENT"
}

main "$@"
