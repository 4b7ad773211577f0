#!/usr/bin/env bash
#
# Train with N processes: on the SLURM allocation this shell is in, else on this machine.
#
# Usage: run_ddp.sh -n N [-c CONFIG] [-l LEVEL] [options] [-- WORD...]
#
#   -n N          number of processes in total
#   -c CONFIG     settings file (default: the kit's config/quickstart.yaml); - passes nothing
#   -l LEVEL      how much is told: debug, info, warning or error
#   WORD...       go to the script untouched, for the kit's trainer: section.key=value
#   options       those of scripts/ssh/launch_singlenode.sh; inside an allocation --agent and
#                 --master-port have no meaning: srun starts the processes, SLURM names their ranks
#   --help        show this
#
#   run_ddp.sh -n 2
#   salloc -N2 --gpus-per-node=8 scripts/run_ddp.sh -n 16 -c config/gpt2_124m.yaml
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
# shellcheck source=scripts/lib/launcher.bash
source "$KIT/scripts/lib/launcher.bash"

NPROC='' CONFIG=$KIT/config/quickstart.yaml LEVEL=''
COMMON=() BEHIND=() # words for the launcher: its options, and those behind --


parse_args() { # <word...>
  local call=("$PROGRAM_FILE" "$@")
  while (($#)); do
    case $1 in
      -n) need_value "$@"; NPROC=$2; shift ;;
      -c) need_value "$@"; CONFIG=$2; shift ;;
      -l) need_value "$@"; LEVEL=$2; shift ;;
      --help | -h) usage; exit ;;
      --) BEHIND=("${@:2}"); break ;;
      *) COMMON+=("$1") ;;
    esac
    shift
  done
  parse_options "${COMMON[@]}" -- "${BEHIND[@]}"
  CALL=("${call[@]}")
  ((${#POSITIONAL[@]} == 0)) || die_usage "not understood: $(quote "${POSITIONAL[@]}")"
  [[ $NPROC ]] || die_usage "-n N is missing: how many processes?"
  [[ $NPROC =~ ^[1-9][0-9]{0,8}$ ]] || die_usage "-n '$NPROC': a number of processes, 1 or more, is wanted"
  [[ ! $LEVEL || $LEVEL =~ ^(debug|info|warning|error)$ ]] ||
    die_usage "-l '$LEVEL': debug, info, warning or error is wanted"
}


in_allocation() {
  [[ ${SLURM_JOB_ID-} ]] || return 1
  [[ ! ${SLURM_STEP_ID-} ]] || ((SLURM_STEP_ID > 4294967000)) ||
    die_usage "this is task ${SLURM_PROCID-} of a job step: call it from the salloc shell or the batch script, not through srun"
}


on_this_machine() {
  exec "$KIT/scripts/ssh/launch_singlenode.sh" "${COMMON[@]}" "$CONFIG" "$NPROC" -- "${USER_ARGS[@]}"
}


# Each task needs its share of the cores said again: srun does not take it over from sbatch or salloc.
cores_a_task() {
  local cores=$((${SLURM_CPUS_ON_NODE:-1} * ${SLURM_JOB_NUM_NODES:-1} / NPROC))
  printf '%s\n' "${SLURM_CPUS_PER_TASK:-$((cores > 0 ? cores : 1))}"
}


on_the_allocation() {
  ((!DETACH)) || die_usage "--detach: inside an allocation the run ends with it; use sbatch to leave the terminal"
  pick_python "$ASKED_PYTHON"
  check_torch
  check_script
  check_config "$CONFIG" "$NPROC"
  COMMAND=(env "${ENVIRONMENT[@]}" "$KIT/scripts/lib/srun.sh"
    --ntasks "$NPROC" --cpus-per-task "$(cores_a_task)" --kill-on-bad-exit=1
    "$PYTHON" -u "$KIT/scripts/lib/task.py" "${WORK[@]}" "${CONFIG_ARGS[@]}" "${USER_ARGS[@]}")
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    quote "${COMMAND[@]}"
    return
  fi
  open_run "$NPROC" slurm
  run_nodes start_node slurm "${COMMAND[@]}"
  exit "$CODE"
}


main() {
  parse_args "$@"
  [[ ! $LEVEL ]] || USER_ARGS+=(--log-level "$LEVEL")
  if in_allocation; then
    on_the_allocation
  else
    on_this_machine
  fi
}

main "$@"
