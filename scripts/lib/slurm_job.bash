# shellcheck shell=bash
#
# A SLURM batch job: its arguments, its array element and, after a requeue, its earlier run directory. The link
# logs/slurm-<job> leads to that directory. distributed/launch/requeue.py requeues the job.
#
# Sourced by the scripts of scripts/slurm, never run; it needs slurm.bash and the files that slurm.bash needs.

# shellcheck disable=SC2034 # other files use these variables
REQUEUES=0      # including requeues by SLURM
EXISTING_RUN=() # option of distributed/launch/run.py for a requeued job


# Set CONFIG and the options of the job, from the arguments or the environment of sbatch.
parse_job_arguments() {
  REQUEUES=${SLURM_RESTART_COUNT:-0}
  CALL=(sbatch "$KIT/scripts/slurm/$PROGRAM" "${CALL[@]:1}")
  GRACE=${GRACE:-120} # if SLURM itself ends the job, it sends SIGKILL after KillWait, usually less than GRACE
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
  (($# == 1)) || [[ ${SLURM_ARRAY_TASK_ID-} ]] ||
    die_usage "$# CONFIGs require an array of $# elements: sbatch --array=0-$(($# - 1))" \
      "(arguments of your script go after --)"
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


# If the job was requeued, set EXISTING_RUN, which names its run directory. Exits if that run has succeeded.
find_earlier_run() {
  local directory times="$REQUEUES times"
  ((REQUEUES != 1)) || times="1 time"
  ((REQUEUES)) && directory=$(readlink -e -- "$LOG_DIR/slurm-$SLURM_JOB_ID") || return 0
  # In a log directory to which others can write, the link and the directory may be theirs.
  [[ -O $directory && $(stat -c %u -- "$LOG_DIR/slurm-$SLURM_JOB_ID") == "$EUID" ]] ||
    die_with "$EXIT_UNFIT" "$LOG_DIR/slurm-$SLURM_JOB_ID: belongs to another user"
  log "job $SLURM_JOB_ID was requeued $times; resuming in ${directory##*/}"
  if [[ -f $directory/verdict.json ]] && grep -qsF '"outcome": "ok"' "$directory/verdict.json"; then
    log "the run has already succeeded; nothing to do"
    exit
  fi
  EXISTING_RUN=(--existing-run "$directory")
}
