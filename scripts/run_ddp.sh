#!/usr/bin/env bash
#
# Train with N processes: on the SLURM allocation this shell is in, else on this machine.
#
# Usage: run_ddp.sh -n N [options] [-- ARGUMENT...]
#
#   -n N                 number of processes in total
#   -c CONFIG            settings file (default: the kit's config/quickstart.yaml); - passes nothing
#   -l LEVEL             how much the kit's trainer prints: debug, info, warning or error, in any case; refused
#                        with --script and -m, as it is an argument of the trainer's
#   ARGUMENT...          go to the script untouched, for the kit's trainer: section.key=value
#
#   --script PATH        what to run (default: the kit's train.py)
#   -m MODULE            run a module in its place
#   --python PATH        default: the active venv or conda environment, .venv here, the kit's .venv, python3
#   --agent fast|torchrun  fast: workers forked from one warm process; torchrun: the plain one
#   --master-port PORT   default: a free one; inside an allocation, that of the environment before
#   --env NAME=VALUE     environment of the processes, repeatable
#   --env-file FILE      the same, one NAME=VALUE a line
#   --max-restarts N     after a failure start again, up to N times (default: 0)
#   --hang-timeout S     end the run with 124 when it has not written a line or a metric for S seconds;
#                        0: never (default: 600 for a run that logs steps, when nothing can end the wait)
#   --log-dir DIR        where the run directory is made (default: logs)
#   --rendezvous-timeout SECONDS  with LAUNCHER=torchrun: how long to wait until all nodes have joined (default: 600)
#   --no-preflight       do not check GPUs and port
#   --detach             run in the background, apart from this terminal; refused inside an allocation
#   --dry-run            print what would run, and run nothing
#   --quiet              no lines of the launcher's own
#   --help               show this
#
# Inside an allocation srun starts the processes: --agent counts with LAUNCHER=torchrun alone. LAUNCHER, CONTAINER and
# SRUN_ARGS: see scripts/slurm/slurm_train.sh --help.
#
#   run_ddp.sh -n 2
#   salloc -N2 --gpus-per-node=8 scripts/run_ddp.sh -n 16 -c config/gpt2_124m.yaml
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
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
# shellcheck source=scripts/lib/slurm.bash
source "$KIT/scripts/lib/slurm.bash"


parse_arguments() {
  ((${#POSITIONAL[@]} == 0)) || die_usage "not understood: $(quote "${POSITIONAL[@]}")"
  [[ $NPROC ]] || die_usage "-n N is missing: how many processes?"
  [[ $NPROC =~ ^[1-9][0-9]{0,8}$ ]] || die_usage "-n: expected a number of processes, 1 or more, got '$NPROC'"
  CONFIG=${CONFIG:-$KIT/config/quickstart.yaml}
  [[ $LEVEL ]] || return 0
  [[ ${LEVEL,,} =~ ^(debug|info|warning|error)$ ]] || die_usage "-l: expected debug, info, warning or error, got '$LEVEL'"
  [[ ! $SCRIPT$MODULE || $SCRIPT -ef $KIT/train.py ]] || die_usage "-l '$LEVEL': is for the kit's train.py; give your own script its arguments" \
    "behind --, such as -- --log-level ${LEVEL,,}"
  SCRIPT_ARGS+=(--log-level "${LEVEL,,}")
}


main() {
  parse_options "$@"
  parse_arguments
  if ! in_allocation; then
    [[ ! $RENDEZVOUS_TIMEOUT ]] || die_usage "--rendezvous-timeout: on one machine no other node has to join; leave it out"
    forward_options_except -n -c -l
    exec_in_environment 0 "$KIT/scripts/ssh/launch_singlenode.sh" "${FORWARDED_OPTIONS[@]}" "$CONFIG" "$NPROC" -- "${SCRIPT_ARGS[@]}"
  fi
  enter_node_env "$@"
  slurm_check_call "$NPROC"
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    slurm_print_step
    return
  fi
  slurm_choose_port
  open_run
  begin_run
  while true; do
    slurm_start_step
    wait_for_nodes
    report_verdict
    should_restart || break
    prepare_restart
  done
  exit "$CODE"
}

main "$@"
