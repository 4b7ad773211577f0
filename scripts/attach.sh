#!/usr/bin/env bash
#
# Show the output of a run until it ends, and exit with its exit code.
#
# Usage: attach.sh [options] [RUN]
#        muster attach ...
#
#     muster attach
#     muster attach my_train-20250102-030405-9f3a
#
#   RUN            a run: its directory, its name, a unique beginning of its name,
#                  the number of its SLURM job, or latest, the newest in DIR
#                  (default: latest)
#
#   --log-dir DIR  directory with the run directories (default: logs)
#   --python PATH  Python that runs this program (default: chosen as for ranks)
#   --help         show this help
#
# It shows what the launcher of the run shows, in another terminal or after
# --detach. Ctrl-C asks whether to stop the run; otherwise the run goes on.
#
# If a run of --lease 0 has lost its launcher, a new launcher takes over, with
# the recorded call: it restarts the run after a failure, and Ctrl-C stops it.
# Of a run that has ended, the verdict is shown.
#
# Exit codes: that of the run; 2 wrong call; 130 left with Ctrl-C; 1 the run has
# no verdict, or its launcher runs on another machine.
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
source "$KIT/scripts/lib/options.bash"


main() {
  parse_options "$@"
  parse_one_argument RUN latest
  pick_python "$PYTHON_OPTION"
  exec_module launch.attach "--program=$PROGRAM" "--log-dir=$LOG_DIR" -- "$ARGUMENT"
}

main "$@"
