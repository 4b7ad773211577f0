#!/usr/bin/env bash
#
# Train with N processes, in the SLURM allocation of this shell if there is one, otherwise on this machine.
#
# Usage: run_ddp.sh -n N [options] [-- ARGUMENT...]
#
#   -n N                 number of processes in total; on one machine also auto, gpu or cpu
#   -c CONFIG            settings file (default: Muster's config/quickstart.yaml); -: none
#   -l LEVEL             log level: debug, info, warning or error; only for train.py
#   ARGUMENT...          passed to the script unchanged; for train.py: section.key=value
#
#   --script PATH        script to run (default: Muster's train.py)
#   -m MODULE            run a module instead of a script
#   --python PATH        default: the active venv or conda environment, else ./.venv, Muster's .venv, python3
#   --agent fast|torchrun  fast (default): Muster's agent, which imports PyTorch once; torchrun: PyTorch's own
#   --master-port PORT   default: a free port; in an allocation $MASTER_PORT, if set
#   --env NAME=VALUE     set an environment variable for the ranks; repeatable
#   --env-file FILE      the same from a file, one NAME=VALUE per line
#   --max-restarts N     restart up to N times after a failure (default: 0)
#   --hang-timeout S     stop a run that writes no output or metrics for S seconds, with exit code 124; 0: never.
#                        Default: stop after 600 s in which no rank could progress, if it logs steps (metrics.jsonl)
#   --notify COMMAND     command that gets events of the run as JSON on standard input (default: $MUSTER_NOTIFY)
#   --progress REGEX     how rank 0 prints a step, as in 'done (?P<step>[0-9]+)'; off: do not look for steps there
#   --log-dir DIR        directory for run directories (default: logs)
#   --rendezvous-timeout SECONDS  with LAUNCHER=torchrun: how long to wait for all nodes to join (default: 600)
#   --no-preflight       skip the checks of GPUs and port
#   --lease SECONDS      0: run on when this launcher dies (default: stop at once); N: stop also when it has been
#                        silent for N seconds
#   --attach RUN         follow a run of --lease 0 whose launcher has died; all other arguments as at its start
#   --detach             run in the background, detached from this terminal; refused in an allocation
#   --dry-run            print the command, run nothing
#   --quiet              print no progress lines of the launcher
#   --help               show this help
#
# In an allocation srun starts the processes, and --agent has an effect only with LAUNCHER=torchrun. For LAUNCHER,
# CONTAINER and SRUN_ARGS see scripts/slurm/slurm_train.sh --help.
#
#   run_ddp.sh -n 2
#   salloc -N2 --gpus-per-node=8 scripts/run_ddp.sh -n 16 -c config/gpt2_124m.yaml
#
set -euo pipefail
# shellcheck source=scripts/lib/launcher.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/launcher.bash"


parse_arguments() {
  ((${#POSITIONAL[@]} == 0)) ||
    die_usage "$(quote "${POSITIONAL[@]}"): unexpected; arguments of your script go after --"
  [[ $NPROC ]] || die_usage "-n N: missing; give the number of processes"
  [[ $NPROC =~ ^[1-9][0-9]{0,8}$ ]] || is_processor_kind "$NPROC" ||
    die_usage "-n: expected a number of processes, 1 or more, auto, gpu or cpu, got '$NPROC'"
  CONFIG=${CONFIG:-$KIT/config/quickstart.yaml}
  [[ $LEVEL ]] || return 0
  [[ ${LEVEL,,} =~ ^(debug|info|warning|error)$ ]] ||
    die_usage "-l: expected debug, info, warning or error, got '$LEVEL'"
  [[ ! $SCRIPT$MODULE || $SCRIPT -ef $KIT/train.py ]] ||
    die_usage "-l '$LEVEL': only for Muster's train.py; pass arguments of your own script after --," \
      "such as -- --log-level ${LEVEL,,}"
  SCRIPT_ARGS+=(--log-level "${LEVEL,,}")
}


main() {
  drop_inherited_variables
  parse_options "$@"
  parse_arguments
  if ! in_allocation; then
    [[ ! $RENDEZVOUS_TIMEOUT ]] || die_usage "--rendezvous-timeout: there is only one node; leave it out"
    forward_options_except -n -c -l
    exec_in_environment 0 "$KIT/scripts/ssh/launch_singlenode.sh" "${FORWARDED_OPTIONS[@]}" \
      "$CONFIG" "$NPROC" -- "${SCRIPT_ARGS[@]}"
  fi
  ! is_processor_kind "$NPROC" || die_usage "-n $NPROC: only for one machine; in an allocation give the number of ranks"
  enter_node_env "$@"
  slurm_check_call "$NPROC"
  slurm_run_nodes
}

main "$@"
