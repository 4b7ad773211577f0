# shellcheck shell=bash
#
# A SLURM batch job and its requeues: it requeues itself at the time limit, and SLURM requeues it after a node failure
# or preemption. All attempts share one run directory; logs/slurm-<job> is a link to it.
#
# Sourced by the scripts of scripts/slurm, never run; it needs slurm.bash and the files that slurm.bash needs.

# shellcheck disable=SC2034 # other files use these variables
REQUEUES=0 # including requeues by SLURM


# Set CONFIG and the options of the job, from the arguments or the environment of sbatch.
parse_job_arguments() {
  BATCH_JOB=1 REQUEUES=${SLURM_RESTART_COUNT:-0}
  CALL=(sbatch "$KIT/scripts/slurm/$PROGRAM" "${CALL[@]:1}")
  GRACE=${MUSTER_GRACE:-120} # SLURM's KillWait, usually shorter, ends the remaining processes
  [[ $SCRIPT$MODULE ]] || SCRIPT=$SCRIPT_FROM_ENVIRONMENT
  ((${#POSITIONAL[@]})) || POSITIONAL=("${CONFIG_FROM_ENVIRONMENT:-$KIT/config/quickstart.yaml}")
  choose_config "${POSITIONAL[@]}"
}


refuse_misplaced_options() { # <argument...>
  while (($#)); do
    case $1 in
      --) return ;;
      --detach) die_usage "--detach: batch jobs are always detached; leave it out" ;;
      --nodes* | --ntasks* | --gres* | --gpus* | --time* | --mem* | --cpus-per-task* | \
        --partition* | --account* | --array* | -N* | -n* | -p* | -A* | -t* | -w* | -c*)
        die_usage "$1: put options of sbatch before the script: sbatch $1 ... $PROGRAM"
        ;;
    esac
    shift
  done
}


# Choose the CONFIG of this array element, and replace %a by its index.
choose_config() { # <CONFIG...>
  local number=$((${SLURM_ARRAY_TASK_ID:-0} - ${SLURM_ARRAY_TASK_MIN:-0}))
  if (($# > 1)) && [[ ! ${SLURM_ARRAY_TASK_ID-} ]]; then
    die_usage "$# CONFIGs require an array of $# elements: sbatch --array=0-$(($# - 1))" \
      "(arguments of your script go after --)"
  fi
  (($# == 1 || number < $#)) ||
    die_usage "array element $SLURM_ARRAY_TASK_ID: no CONFIG;" \
      "the array starts at $SLURM_ARRAY_TASK_MIN and $# CONFIGs are given"
  (($# == 1)) || shift "$number"
  CONFIG=$1
  if [[ ${SLURM_ARRAY_TASK_ID-} ]]; then
    CONFIG=${CONFIG//%a/$SLURM_ARRAY_TASK_ID}
    SCRIPT_ARGS=("${SCRIPT_ARGS[@]//%a/$SLURM_ARRAY_TASK_ID}")
  fi
}


# ---------------------------------------------------------------- --dry-run

# Print the #SBATCH lines, and set the variables of an allocation as these lines request it.
print_submission() {
  local nodes tasks cores
  nodes=$(sbatch_default nodes) tasks=$(sbatch_default ntasks-per-node) cores=$(sbatch_default cpus-per-task)
  grep '^#SBATCH ' -- "$PROGRAM_FILE"
  [[ $nodes$tasks$cores =~ ^[0-9]+$ ]] ||
    die "$PROGRAM_FILE: expected a number in its #SBATCH lines for --nodes," \
      "--ntasks-per-node and --cpus-per-task; correct them"
  export SLURM_JOB_ID=0 SLURM_JOB_NODELIST="node[1-$nodes]" SLURM_TASKS_PER_NODE="$tasks(x$nodes)" \
    SLURM_JOB_CPUS_PER_NODE="$((tasks * cores))(x$nodes)" SLURM_NTASKS=$((nodes * tasks)) SLURM_CPUS_PER_TASK=$cores
}


sbatch_default() { # <option of sbatch>
  sed -nE "s/^#SBATCH --$1=([^ ]+).*/\1/p" -- "$PROGRAM_FILE"
}


# ---------------------------------------------------------------- requeue

# Set EARLIER_RUN to the run directory of a requeued job. Exits if that run has succeeded.
find_earlier_run() {
  local before
  ((REQUEUES)) && before=$(readlink -e -- "$LOG_DIR/slurm-$SLURM_JOB_ID") || return 0
  log "job $SLURM_JOB_ID was requeued $(counted "$REQUEUES" time); resuming in ${before##*/}"
  if grep -qsF '"outcome": "ok"' "$before/verdict.json"; then
    log "the run has already succeeded; nothing to do"
    exit
  fi
  EARLIER_RUN=$before
}


# Requeue the job if SLURM stopped it or a node was lost, but not if the user stopped it or a rank failed.
requeue_if_stopped() {
  if ! is_batch_script || ! { stopped_by_slurm || lost_a_node; }; then
    ((CODE != EXIT_STOPPED)) || record "submit the same job to resume"
    return 0
  fi
  if ((REQUEUES >= MAX_REQUEUES)); then
    record "requeued $(counted "$REQUEUES" time), and --max-requeues is $MAX_REQUEUES;" \
      "not requeueing: submit the same job to resume"
  elif requeued_without_progress; then
    record "no progress${LAST_STEP:+ past step $LAST_STEP} in $MAX_STALLED attempts;" \
      "not requeueing: submit the same job to resume"
  else
    record "requeueing job $SLURM_JOB_ID${LAST_STEP:+ at step $LAST_STEP}, to resume from the newest checkpoint"
    scontrol requeue "${SLURM_JOB[-1]}" || record "scontrol requeue failed: submit the same job to resume"
  fi
}


# Whether SLURM announced the time limit with a signal to the ranks or (B:) to this script, or preempted the job.
# Preemption signals both: ranks without a handler are killed by SIGTERM, and ranks that exit with 0 may not have
# finished. A job that scancel ends is not running any more, and stop.sh sends SIGINT.
stopped_by_slurm() {
  local job
  if [[ ! $SIGNAL ]] && ((CODE == EXIT_STOPPED)); then
    return
  fi
  ((CODE == EXIT_STOPPED || CODE == EXIT_TERMINATED)) || [[ $SIGNAL && $CODE == 0 ]] || return 1
  job=$(scontrol show job --oneliner "${SLURM_JOB[-1]}")
  [[ $job == *" PreemptTime="[0-9]* ]] ||
    [[ $job == *" JobState=RUNNING "* && $SIGNAL != INT && $CODE == "$EXIT_STOPPED" ]]
}


lost_a_node() {
  [[ ! $SIGNAL ]] && ((CODE == EXIT_UNFIT)) && compgen -G "$RUN/node_*.lost" >/dev/null
}


# In the shell of salloc, SLURM_TASK_PID is another process.
is_batch_script() {
  [[ ${SLURM_TASK_PID-} == "$$" ]]
}


# Whether the last MAX_STALLED attempts made no progress. The file stalled_attempts counts them.
requeued_without_progress() {
  local stalled=0
  if ! made_progress; then
    stalled=$(($(cat -- "$RUN/stalled_attempts" 2>/dev/null || echo 0) + 1))
  fi
  echo "$stalled" >"$RUN/stalled_attempts"
  ((stalled >= MAX_STALLED))
}
