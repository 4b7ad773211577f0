#!/usr/bin/env bash
#
# Start one training on this machine, with NPROC processes.
#
# Usage: launch_singlenode.sh [options] CONFIG NPROC [-- WORD...]
#
#   CONFIG               settings file, reaches the script as --config CONFIG; - passes nothing
#   NPROC                number of processes; one a GPU where there are GPUs
#   WORD...              go to the script untouched, for the kit's trainer: section.key=value
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
#   --log-dir DIR        where the folder of the run is made (default: logs)
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
# shellcheck source=scripts/lib/launcher.bash
source "$KIT/scripts/lib/launcher.bash"


parse_args() { # <word...>
  parse_options "$@"
  ((${#POSITIONAL[@]} == 2)) || die_usage "expected CONFIG and NPROC, got: $(quote "${POSITIONAL[@]:-nothing}")" \
    "(arguments of the script go after --)"
  CONFIG=${POSITIONAL[0]} NPROC=${POSITIONAL[1]}
  [[ ! $RENDEZVOUS_TIMEOUT ]] || die_usage "--rendezvous-timeout: on one machine no other node has to join; leave it out"
  is_nproc "$NPROC" || die_usage "NPROC: expected a number of processes from 1 to $MAX_NPROC, got '$NPROC'"
}


check() {
  pick_rank_python
  check_torch
  check_script
  check_config "$CONFIG" "$NPROC"
  check_gpus "$NPROC"
  check_port
}


# A port of our own choice would be a race; torchrun takes a free one itself when it is given none.
rendezvous() {
  if [[ $MASTER_PORT ]]; then
    printf '%s\n' --master-addr 127.0.0.1 --master-port "$MASTER_PORT"
  else
    printf '%s\n' --standalone --local-addr 127.0.0.1
  fi
}


main() {
  local node meeting
  parse_args "$@"
  check
  node=$(uname -n)
  mapfile -t meeting < <(rendezvous)
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    agent_command "${meeting[@]}" --nproc-per-node "$NPROC" --log-dir "$LOG_DIR/<run>/ranks/$node"
    printf '%s: %s\n' "$node" "$(shown "${COMMAND[@]}")"
    return
  fi
  if ((DETACH)); then
    detach
    return
  fi
  open_run "$NPROC" "$node"
  agent_command "${meeting[@]}" --nproc-per-node "$NPROC" --log-dir "$RUN/ranks/$node"
  run_nodes start_node "$node" "${COMMAND[@]}"
  exit "$CODE"
}

main "$@"
