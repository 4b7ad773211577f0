#!/usr/bin/env bash
#
# Write the HTML report of a run, or a page that compares runs. It prints the path of the page, which needs no network.
#
# Usage: report.sh [options] [RUN...]
#        muster report ...
#
#   RUN            run directory, its name in DIR, a shell pattern of such names, a SLURM job number, or the
#                  output directory of a job of a job list (default: latest)
#
#   --all          write DIR/index.html: all runs in DIR with links to their reports, and the job lists in DIR and in
#                  the working directory
#   --log-dir DIR  directory with the run directories (default: logs)
#   --python PATH  Python that runs this program (default: the first of these that exists: the active venv or conda
#                  environment (not base), ./.venv, Muster's .venv, python3)
#   --help         show this help
#
# Launchers write RUN/report.html when a run ends. Call this script to write the report earlier: from then on the
# launcher updates it, and the page reloads itself while it is open. Until the run ends, the report has no files from
# nodes that do not share the run directory, except their logs if the launcher got --sync. The comparison of several
# runs is DIR/comparison.html.
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
