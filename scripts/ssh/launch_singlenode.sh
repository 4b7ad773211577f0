#!/usr/bin/env bash
#
# Start training on this machine, with NPROC processes.
#
# Usage: launch_singlenode.sh [options] CONFIG NPROC [-- ARGUMENT...]
#
#   CONFIG               settings file, passed to the script as --config CONFIG; -: pass none
#   NPROC                number of processes: at most one per GPU; any number without GPUs;
#                        gpu: one per GPU; cpu: one per core; auto: gpu if there are GPUs, else cpu
#   ARGUMENT...          passed to the script unchanged; for train.py: section.key=value
#
#   --script PATH        script to run (default: Muster's train.py)
#   -m MODULE            run a module instead of a script
#   --python PATH        Python of the ranks (default: the first of these that exists: the active venv or conda
#                        environment (not base), ./.venv, Muster's .venv, python3)
#   --agent fast|torchrun
#                        program that starts the ranks. fast (default): Muster's agent, which imports PyTorch once and
#                        forks the ranks; torchrun: PyTorch's agent
#   --master-port PORT   port through which the ranks find each other (default: a free port)
#   --env NAME=VALUE     set an environment variable for the ranks; repeatable
#   --env-file FILE      set the variables of a file, one NAME=VALUE per line
#   --grace SECONDS      after a stop request, give the ranks SECONDS to write a checkpoint, then kill them (default: 8)
#   --max-restarts N     restart the run up to N times after a failure (default: 0)
#   --hang-timeout S     stop a run that writes no output and no metrics for S seconds (exit code 124); 0: never.
#                        Default: stop a run that logs steps (metrics.jsonl) once no rank has been able to progress for
#                        600 s; never stop a run that logs none
#   --notify COMMAND     run COMMAND when the run looks hung, loses a node, restarts or ends, with the event as JSON on
#                        its standard input (default: $MUSTER_NOTIFY)
#   --progress REGEX     regular expression of Python for the lines in which a rank prints a step, as in
#                        'done (?P<step>[0-9]+)'; off: take no steps from the output (default: common formats)
#   --console-rank RANK  the rank whose output is printed; last: the last one; auto (default): rank 0, and the last one if
#                        it alone prints steps and losses
#   --log-dir DIR        directory in which run directories are created (default: logs)
#   --no-preflight       skip the checks of GPUs and port
#   --lease SECONDS      stop the ranks when this launcher dies, and also when it has sent no heartbeat for SECONDS
#                        (default: only when it dies); 0: let them continue in these cases
#   --detach             run in the background, detached from this terminal
#   --dry-run            print the command, run nothing
#   --quiet              print no progress lines of the launcher
#   --help               show this help
#
# Exit codes: 0 success, 2 wrong call or settings, 69 this machine is unfit (a check failed), 75 stopped with a
# checkpoint (the same call resumes), 130 SIGINT and 143 SIGTERM without a new checkpoint, 124 hung, otherwise that of
# the rank that failed first.
#
#   launch_singlenode.sh config/quickstart.yaml 2
#   launch_singlenode.sh --script my_train.py - 8 -- --lr 3e-4
#

# shellcheck disable=SC2034,SC2153 # the files that launcher.bash sources use these variables
set -euo pipefail
# shellcheck source=scripts/lib/launcher.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../lib/launcher.bash"


main() {
  parse_options "$@"
  ((${#POSITIONAL[@]} == 2)) || die_usage "expected CONFIG and NPROC, got: $(quote "${POSITIONAL[@]:-nothing}")" \
    "(arguments of your script go after --)"
  CONFIG=${POSITIONAL[0]} NPROC=${POSITIONAL[1]}
  check_nproc NPROC "$NPROC" or_kind
  run_on_this_machine
}

main "$@"
