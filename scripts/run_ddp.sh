#!/usr/bin/env bash
#
# Train with N processes, in the SLURM allocation of this shell if there is one, otherwise on this machine.
#
# Usage: run_ddp.sh -n N [options] [-- ARGUMENT...]
#
#   -n N                 number of processes in total. On one machine, N may also be gpu (one per GPU), cpu (one per
#                        core) or auto (gpu if there are GPUs, else cpu)
#   -c CONFIG            settings file (default: Muster's config/quickstart.yaml); -: none
#   -l LEVEL             log level of train.py: debug, info, warning or error
#   ARGUMENT...          passed to the script unchanged; for train.py: section.key=value
#
#   --rendezvous-timeout SECONDS
#                        with LAUNCHER=torchrun: time for all nodes to join (default: 600)
#   (as launch_singlenode.sh except CONFIG NPROC)
#
# In an allocation, srun starts the processes: --agent has an effect only with LAUNCHER=torchrun, --master-port
# defaults to $MASTER_PORT, and --lease and --detach are refused. For LAUNCHER, CONTAINER and SRUN_ARGS see
# scripts/slurm/slurm_train.sh --help.
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
