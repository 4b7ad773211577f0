#!/usr/bin/env bash
#
# Print the output of a run's ranks, also while it runs.
#
# Usage: logs.sh [options] [RUN]
#        muster logs ...
#
#     muster logs -f
#     muster logs --rank all --since 10m train-2026
#
#   RUN            a run: its directory, its name, a unique beginning of its name,
#                  the number of its SLURM job, or latest, the newest in DIR;
#                  runs that were started elsewhere are found too
#                  (default: latest)
#
#   -f             follow new output until the run has ended or Ctrl-C, which does
#                  not stop the run
#   --follow       the same
#   -n LINES       print only the last lines of each node's log
#   --rank N|all   print the output of this rank only, or of all ranks, each line
#                  after its node and rank (default: the rank that the console
#                  shows, with the messages of Muster on its node)
#   --node NODE    print the output of all ranks of this node
#   --since 10m|HH:MM|attempt
#                  print what was written in this time (units s, m, h, d), since
#                  this time of day, or in the newest attempt
#   --log-dir DIR  directory with the run directories (default: logs)
#   --python PATH  Python that runs this program (default: the first of these that
#                  exists: the active venv or conda environment (not base),
#                  ./.venv, Muster's .venv, python3)
#   --help         show this help
#
# Without -n and --since, the whole output of all attempts is printed, node after
# node. Logs of nodes that do not share the run directory are read on the nodes.
# Lines have no times; --since knows when they were written to about a second, and
# in long runs to about a 250th of the run.
#
# Exit codes: 0 the output was printed; 2 wrong call; 69 a log could not be read,
# as a message says; 130 Ctrl-C.
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
source "$KIT/scripts/lib/options.bash"


main() {
  parse_options "$@"
  parse_one_argument RUN latest
  [[ ! $NPROC ]] || is_count "$NPROC" || die_usage "-n: expected a number of lines, got '$NPROC'" # the value of -n
  pick_python "$PYTHON_OPTION"
  forward_options_except --python --log-dir
  exec_module launch.logs "--program=$PROGRAM" "--log-dir=$LOG_DIR" "${FORWARDED_OPTIONS[@]}" -- "$ARGUMENT"
}

main "$@"
