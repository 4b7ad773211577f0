#!/usr/bin/env bash
#
# Start a run again: the same call in the same directory, with options changed.
#
# Usage: rerun.sh [options] RUN [OPTION...]
#        muster rerun ...
#
#     muster rerun latest
#     muster rerun my_train-20250102-030405-9f3a -n 4 --env TOKEN=secret
#
#   RUN            a run: its directory, its name, a unique beginning of its name,
#                  the number of its SLURM job, or latest, the newest in DIR
#   OPTION...      options of the launcher, in place of those that are recorded
#
#   --log-dir DIR  directory with the run directories (default: logs)
#   --python PATH  Python that runs this program (default: chosen as for ranks)
#   --dry-run      print the command, run nothing
#   --help         show this help
#
# The launcher prints what differs from the earlier run: commit, uncommitted
# changes, Python, packages. Values of --env and --notify are not recorded: give
# them again. Arguments of the script cannot be changed; call the launcher.
#
# Exit codes: those of the launcher; 2 wrong call; 1 the run cannot be repeated.
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
source "$KIT/scripts/lib/options.bash"


take_run() { # <RUN> <OPTION...>
  RUN=$1 CHANGES=("${@:2}")
  [[ ${CHANGES-} != @(--|[!-]*) && " ${CHANGES[*]} " != *" -- "* ]] ||
    die_usage "'$(quote "${CHANGES[@]}")': expected options of the launcher; arguments of the script cannot be changed"
}


main() {
  RUN='' CHANGES=()
  parse_options_before take_run "$@"
  [[ $RUN ]] || die_usage "RUN: missing; for the newest run use: $PROGRAM latest"
  [[ $DRY_RUN != 1 ]] || CHANGES+=(--dry-run)
  pick_python "$PYTHON_OPTION"
  exec_module runs.rerun "--program=$PROGRAM" "--log-dir=$LOG_DIR" -- "$RUN" "${CHANGES[@]}"
}

main "$@"
