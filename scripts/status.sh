#!/usr/bin/env bash
#
# Show the state of a run: of each rank its state, resource use and last line.
#
# Usage: status.sh [options] [RUN]
#        muster status ...
#
#     muster status
#     muster status --watch train-2026
#
#   RUN            a run: its directory, its name, a unique beginning of its name,
#                  the number of its SLURM job, or latest, the newest in DIR;
#                  runs that were started elsewhere are found too
#                  (default: latest)
#
#   --watch        refresh every 2 seconds until the run ends or Ctrl-C
#   --stacks       also print the Python stack of each rank; if py-spy is
#                  installed, the stacks of all its threads
#   --json         print one JSON object
#   --log-dir DIR  directory with the run directories (default: logs)
#   --python PATH  Python that runs this program (default: the first of these that
#                  exists: the active venv or conda environment (not base),
#                  ./.venv, Muster's .venv, python3)
#   --help         show this help
#
# It works from any terminal, also on another machine that shares the run
# directory, and changes nothing. A run in which a rank is suspended (SIGSTOP), or
# ranks wait and nothing is printed, is shown as "looks hung", with the reasons.
# After a minute or two without output of the run, this script reads the stacks of
# the ranks, to find the rank that the others wait for.
#
# Exit codes: 0 the run is active or has succeeded; 1 it failed, looks hung, or
# left processes running; 2 wrong call; 69 no fault is known, but a node could not
# be queried; 130 Ctrl-C.
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
source "$KIT/scripts/lib/options.bash"


main() {
  parse_options "$@"
  ((!WATCH || !JSON)) || die_usage "--watch and --json cannot be combined"
  parse_one_argument RUN latest
  pick_python "$PYTHON_OPTION"
  forward_options_except --python --log-dir
  exec_module runs.status "--program=$PROGRAM" "--log-dir=$LOG_DIR" "${FORWARDED_OPTIONS[@]}" -- "$ARGUMENT"
}

main "$@"
