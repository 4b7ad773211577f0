#!/usr/bin/env bash
#
# Start one training on this machine, with NPROC processes.
#
# Usage: launch_singlenode.sh [options] CONFIG NPROC [-- ARGUMENT...]
#
#   CONFIG               settings file, reaches the script as --config CONFIG; - passes nothing
#   NPROC                number of processes; one a GPU where there are GPUs
#   ARGUMENT...          go to the script untouched, for the kit's trainer: section.key=value
#
#   --script PATH        what to run (default: the kit's train.py)
#   -m MODULE            run a module in its place
#   --python PATH        default: the active venv or conda environment, .venv here, the kit's .venv, python3
#   --agent fast|torchrun  fast: workers forked from one warm process; torchrun: the plain one
#   --master-port PORT   default: a free one
#   --env NAME=VALUE     environment of the processes, repeatable
#   --env-file FILE      the same, one NAME=VALUE a line
#   --max-restarts N     after a failure start again, up to N times (default: 0)
#   --hang-timeout S     end the run with 124 when it has not written a line or a metric for S seconds;
#                        0: never (default: 600 for a run that logs steps, when nothing can end the wait)
#   --log-dir DIR        where the run directory is made (default: logs)
#   --no-preflight       do not check GPUs and port
#   --detach             run in the background, apart from this terminal
#   --dry-run            print what would run, and run nothing
#   --quiet              no lines of the launcher's own
#   --help               show this
#
# Exit codes: 0 all is well, 2 wrong call or config, 75 stopped with a checkpoint written (run again
# to go on), 124 hung, 130 Ctrl-C, 143 TERM, otherwise the first failing rank's own.
#
#   launch_singlenode.sh config/quickstart.yaml 2
#   launch_singlenode.sh --script my_train.py - 8 -- --lr 3e-4
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../lib/common.bash"
# shellcheck source=scripts/lib/options.bash
source "$KIT/scripts/lib/options.bash"
# shellcheck source=scripts/lib/node_env.bash
source "$KIT/scripts/lib/node_env.bash"
# shellcheck source=scripts/lib/nodes.bash
source "$KIT/scripts/lib/nodes.bash"
# shellcheck source=scripts/lib/launch.bash
source "$KIT/scripts/lib/launch.bash"
# shellcheck source=scripts/lib/watch.bash
source "$KIT/scripts/lib/watch.bash"


parse_arguments() {
  ((${#POSITIONAL[@]} == 2)) || die_usage "expected CONFIG and NPROC, got: $(quote "${POSITIONAL[@]:-nothing}")" \
    "(arguments of the script go after --)"
  CONFIG=${POSITIONAL[0]} NPROC=${POSITIONAL[1]}
  is_nproc "$NPROC" || die_usage "NPROC: expected a number of processes from 1 to $MAX_NPROC, got '$NPROC'"
  add_node "$(uname -n)" "$NPROC"
}


# The agent's command line, in COMMAND. Without --master-port torchrun takes a free port itself: a port that is chosen
# before may be taken meanwhile.
build_local_agent_command() { # <run directory>
  local rendezvous=(--standalone --local-addr 127.0.0.1)
  [[ ! $MASTER_PORT ]] || rendezvous=(--master-addr 127.0.0.1 --master-port "$MASTER_PORT")
  build_agent_command "${rendezvous[@]}" --nproc-per-node "$NPROC" --log-dir "$1/ranks/${NODES[0]}"
}


main() {
  parse_options "$@"
  parse_arguments
  local checks=(--torch --ranks "$NPROC")
  ((!PREFLIGHT)) || checks+=(--gpus "$NPROC" ${MASTER_PORT:+--port "$MASTER_PORT"})
  check_call "${checks[@]}"
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    build_local_agent_command "$LOG_DIR/<run>"
    print_command
    return
  fi
  if ((DETACH)); then
    detach
    return
  fi
  open_run
  begin_run
  while true; do
    build_local_agent_command "$RUN"
    start_node run_here "${NODES[0]}" "${COMMAND[@]}"
    wait_for_nodes
    report_verdict
    should_restart || break
    prepare_restart
  done
  exit "$CODE"
}

main "$@"
