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
# shellcheck source=scripts/lib/options.bash
source "$KIT/scripts/lib/options.bash"


main() {
  parse_options "$@"
  parse_one_argument RUN latest
  pick_python "$PYTHON_OPTION"
  kit_python runs.report --from "$PWD" --log-dir "$LOG_DIR" -- "$ARGUMENT"
}

main "$@"
