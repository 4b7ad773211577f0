#!/usr/bin/env bash
#
# Write the HTML report of a run, or a page that compares runs; print its path.
#
# Usage: report.sh [options] [RUN...]
#        muster report ...
#
#     muster report
#     muster report 'train-*'
#
#   RUN            a run: its directory, its name, a unique beginning of its name,
#                  the number of its SLURM job, or latest, the newest in DIR;
#                  runs that were started elsewhere are found too; or a shell
#                  pattern of names, or the output directory of a job of a job
#                  list (default: latest)
#
#   --all          write DIR/index.html: all runs in DIR with links to their
#                  reports, and the job lists in DIR and the working directory
#   --log-dir DIR  directory with the run directories (default: logs)
#   --python PATH  Python that runs this program (default: the first of these that
#                  exists: the active venv or conda environment (not base),
#                  ./.venv, Muster's .venv, python3)
#   --help         show this help
#
# Launchers write RUN/report.html when a run ends. Call this script to write the
# report earlier: from then on the launcher updates it, and the page reloads
# itself while it is open. Until the run ends, the report has no files from nodes
# that do not share the run directory, except their logs if the launcher got
# --sync. The comparison of several runs is DIR/comparison.html. Pages need no
# network.
#
# Exit codes: 0 the report was written, 1 it could not be written, 2 wrong call.
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
source "$KIT/scripts/lib/options.bash"


main() {
  parse_options "$@"
  ((!ALL || !${#POSITIONAL[@]})) || die_usage "--all and RUN cannot be combined"
  pick_python "$PYTHON_OPTION"
  local all=()
  ((!ALL)) || all=(--all)
  kit_python report.report "${all[@]}" --from "$PWD" --log-dir "$LOG_DIR" -- "${POSITIONAL[@]:-latest}"
}

main "$@"
