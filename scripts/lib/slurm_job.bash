# shellcheck shell=bash
#
# A batch job of SLURM, which may be started several times: it requeues itself when its time is up, and SLURM requeues
# it when a node is lost or another job is more urgent. All starts have one run directory, which logs/slurm-<job> points
# to.
#
# Sourced by the scripts of scripts/slurm, never run; it needs slurm.bash and all that slurm.bash needs.

# shellcheck disable=SC2034 # other files read and set what stands here
REQUEUES=${SLURM_RESTART_COUNT:-0} # so far, those by SLURM included


# CONFIG, and the options of the job, from the arguments or from the environment in which sbatch was called.
parse_job_arguments() {
  CALL=(sbatch "$KIT/scripts/slurm/$PROGRAM" "${CALL[@]:1}")
  GRACE=${MUSTER_GRACE:-120} # SLURM's own KillWait is mostly shorter, and ends what is left
  [[ $SCRIPT$MODULE ]] || SCRIPT=$SCRIPT_FROM_ENVIRONMENT
  ((${#POSITIONAL[@]})) || POSITIONAL=("${CONFIG_FROM_ENVIRONMENT:-$KIT/config/quickstart.yaml}")
  choose_config "${POSITIONAL[@]}"
}


refuse_misplaced_options() { # <argument...>
  while (($#)); do
    case $1 in
      --) return ;;
      --detach) die_usage "--detach: sbatch leaves the terminal by itself" ;;
      --nodes* | --ntasks* | --gres* | --gpus* | --time* | --mem* | --cpus-per-task* | --partition* | --account* | --array* | \
        -N* | -n* | -p* | -A* | -t* | -w* | -c*)
        die_usage "$1: options of sbatch stand before the script: sbatch $1 ... $PROGRAM"
        ;;
    esac
    shift
  done
}


# An element of an array has a CONFIG of its own, and its number stands for %a.
choose_config() { # <CONFIG...>
  local number=$((${SLURM_ARRAY_TASK_ID:-0} - ${SLURM_ARRAY_TASK_MIN:-0}))
  if (($# > 1)) && [[ ! ${SLURM_ARRAY_TASK_ID-} ]]; then
    die_usage "$# CONFIGs are for an array of $# elements: sbatch --array=0-$(($# - 1)) (arguments of the script go after --)"
  fi
  (($# == 1 || number < $#)) ||
    die_usage "element $SLURM_ARRAY_TASK_ID has no CONFIG: the array begins at $SLURM_ARRAY_TASK_MIN, and $# are given"
  (($# == 1)) || shift "$number"
  CONFIG=$1
  if [[ ${SLURM_ARRAY_TASK_ID-} ]]; then
    CONFIG=${CONFIG//%a/$SLURM_ARRAY_TASK_ID}
    SCRIPT_ARGS=("${SCRIPT_ARGS[@]//%a/$SLURM_ARRAY_TASK_ID}")
  fi
}


# ---------------------------------------------------------------- before it is submitted

# What sbatch reads; then the allocation becomes just that, so that it can be shown what would run.
print_submission() {
  local nodes tasks cores
  nodes=$(sbatch_default nodes) tasks=$(sbatch_default ntasks-per-node) cores=$(sbatch_default cpus-per-task)
  grep '^#SBATCH ' -- "$PROGRAM_FILE"
  [[ $nodes$tasks$cores =~ ^[0-9]+$ ]] || die "$PROGRAM_FILE: expected a number in its #SBATCH lines for --nodes, --ntasks-per-node and --cpus-per-task; correct them"
  export SLURM_JOB_ID=0 SLURM_JOB_NODELIST="node[1-$nodes]" SLURM_TASKS_PER_NODE="$tasks(x$nodes)" \
    SLURM_JOB_CPUS_PER_NODE="$((tasks * cores))(x$nodes)" SLURM_NTASKS=$((nodes * tasks)) SLURM_CPUS_PER_TASK=$cores
}


sbatch_default() { # <option of sbatch>
  sed -nE "s/^#SBATCH --$1=([^ ]+).*/\1/p" -- "$PROGRAM_FILE"
}


# ---------------------------------------------------------------- when the job is started again

# The directory in which the job has left its run, in EARLIER_RUN. A run that has ended well stays so.
find_earlier_run() {
  local before
  ((REQUEUES)) && before=$(readlink -e -- "$LOG_DIR/slurm-$SLURM_JOB_ID") || return 0
  log "job $SLURM_JOB_ID was requeued $(counted "$REQUEUES" time): going on in ${before##*/}"
  if grep -qsF '"outcome": "ok"' "$before/verdict.json"; then
    log "the run has ended well before: nothing is left to do"
    exit
  fi
  EARLIER_RUN=$before
}


# When SLURM has stopped the ranks, or a node was lost; not when a person has stopped the launcher, or a rank has
# failed.
requeue_if_stopped() {
  is_batch_script && { stopped_by_slurm || lost_a_node; } || return 0
  if ((REQUEUES >= MAX_REQUEUES)); then
    record "requeued $(counted "$REQUEUES" time), and --max-requeues is $MAX_REQUEUES: not requeueing; submit the same job to go on"
  elif requeued_without_progress; then
    record "no progress${LAST_STEP:+ past step $LAST_STEP} in the last $MAX_STALLED turns: not requeueing; submit the same job to go on"
  else
    record "requeueing job $SLURM_JOB_ID${LAST_STEP:+ at step $LAST_STEP}, to go on from the newest checkpoint"
    scontrol requeue "${SLURM_JOB[-1]}" || record "SLURM does not requeue it: submit the same job to go on"
  fi
}


# The ranks were signalled, not the launcher. Both are when a job is preempted: then ranks without a handler die of it,
# and ranks that exit with 0 may not have finished.
stopped_by_slurm() {
  if [[ ! $SIGNAL ]] && ((CODE == EXIT_STOPPED)); then
    return
  fi
  ((CODE == EXIT_STOPPED || CODE == EXIT_TERMINATED)) || [[ $SIGNAL && $CODE == 0 ]] || return 1
  [[ $(scontrol show job --oneliner "${SLURM_JOB[-1]}") == *" PreemptTime="[0-9]* ]]
}


lost_a_node() {
  [[ ! $SIGNAL ]] && ((CODE == EXIT_UNFIT)) && compgen -G "$RUN/node_*.lost" >/dev/null
}


# SLURM runs it as the task of its own that a batch script is; in the shell of salloc there is nothing to requeue.
is_batch_script() {
  [[ ${SLURM_TASK_PID-} == "$$" ]]
}


# Whether the last starts made no progress, one after the other; counted beside the run.
requeued_without_progress() {
  local vain=0
  if ! made_progress; then
    vain=$(($(cat -- "$RUN/turns_in_vain" 2>/dev/null || echo 0) + 1))
  fi
  echo "$vain" >"$RUN/turns_in_vain"
  ((vain >= MAX_STALLED))
}
