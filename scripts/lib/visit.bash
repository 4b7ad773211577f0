# shellcheck shell=bash
#
# Find a run that was started before, perhaps elsewhere, and ask its nodes.
#
#   open_connections
#   find_run RUN; run_on_nodes "$REPLIES" visit_status --seconds 1
#
# Sourced, never run; it needs options.bash, nodes.bash and ssh.bash.

# shellcheck disable=SC2034 # other files read and set what stands here
RUN_MARK=''               # the run directory as its processes carry it in MUSTER_RUN_DIR
RUN_PYTHON=''         # interpreter of its ranks
LAUNCHER_STATE=''        # here, gone, elsewhere, or in the job: it is its batch script
LAUNCHER_HOST='' LAUNCHER_PID=0 LAUNCHER_START='' # where it was started, its process id there, and its start
RUN_GRACE=0           # seconds that it gives to ranks that are asked to stop
JOB=''                # number of its SLURM job
JOB_STATE=''          # as squeue has it, with the reason: RUNNING None, PENDING Resources; empty when it is over
declare -A FIRST_RANK_OF=() # of each node
VISIT_DIR=''            # directory for what the nodes reply


find_run() { # <RUN>
  local words
  VISIT_DIR=$(mktemp -d "$CONNECTIONS_DIR/replies-XXXXXX") # removed when the connections go
  look_up_run "$PWD" "$1" || look_up_run "$(directory_of_job "$1")" "$1" || refuse_missing_run "$1"
  mapfile -d '' words <"$VISIT_DIR/found"
  RUN=${words[0]} RUN_MARK=${words[1]} RUN_PYTHON=${words[2]}
  LAUNCHER_STATE=${words[3]} LAUNCHER_HOST=${words[4]} LAUNCHER_PID=${words[5]} LAUNCHER_START=${words[6]}
  RUN_GRACE=${words[7]} JOB=${words[8]}
  set -- "${words[@]:9}"
  while (($#)); do
    add_node "$1" "$3" "$2"
    FIRST_RANK_OF[$1]=$4
    shift 4
  done
  cd / # a directory that is everywhere: ssh_run goes where we are
  [[ ! $JOB ]] || update_job_state
}


# The same process, not one that has its number now.
launcher_is_running() {
  local stat fields
  [[ $LAUNCHER_STATE == here ]] && read -r stat 2>/dev/null <"/proc/$LAUNCHER_PID/stat" || return 1
  read -r -a fields <<<"${stat##*) }"
  [[ ${fields[0]} != Z && ${fields[19]} == "$LAUNCHER_START" ]]
}


look_up_run() { # <directory where a path begins> <RUN>
  [[ $1 ]] && kit_python runs.lookup --from "$1" --log-dir "$LOG_DIR" -- "$2" >"$VISIT_DIR/found" 2>"$VISIT_DIR/why"
}


# Where it was submitted, perhaps another directory than this one.
directory_of_job() { # <RUN>
  local shown
  is_job "$1" && shown=$(scontrol show job --oneliner "$1" 2>/dev/null) || return 0
  shown=${shown%%$'\n'*} # of an array, there is a line for each element
  [[ ! $shown =~ \ WorkDir=(.*)\ StdErr= ]] || printf '%s\n' "${BASH_REMATCH[1]}"
}


is_job() { # <RUN>
  [[ $1 =~ ^[0-9]+(_[0-9]+)?$ ]]
}


# A job that waits has no run yet, and one that was refused never had.
refuse_missing_run() { # <RUN>
  local shown
  if is_job "$1"; then
    type -P scontrol >/dev/null || die_usage "RUN '$1': no run of job $1 in $LOG_DIR, and there is no SLURM here to be" \
      "asked; call it where the job was submitted, or name its run directory"
    JOB_STATE=$(state_of_job "$1")
    [[ ! $JOB_STATE ]] || job_without_run "$1"
    shown=$(scontrol show job --oneliner "$1" 2>&1 || true)
    [[ ! $shown =~ JobState=([A-Z_]+).*\ ExitCode=([0-9]+).*\ StdErr=(.*)\ StdIn= ]] ||
      die "job $1 has ended before it had a run (${BASH_REMATCH[1]}, exit code ${BASH_REMATCH[2]}): see ${BASH_REMATCH[3]};" \
        "where that is missing, so was its directory"
    die_usage "RUN '$1': no run of job $1 in $LOG_DIR, and SLURM knows of none (${shown##*$'\n'}); of jobs that ended" \
      "long ago: sacct -j $1"
  fi
  die_usage "$(<"$VISIT_DIR/why")"
}


# A batch script is there as long as its job; and without the job there are no processes that could be asked about.
update_job_state() {
  JOB_STATE=$(state_of_job "$JOB")
  if ! job_runs; then
    LAUNCHER_STATE=gone
  elif [[ $LAUNCHER_STATE == elsewhere && " ${NODES[*]} " == *" $LAUNCHER_HOST "* ]]; then
    LAUNCHER_STATE=job
  fi
}


state_of_job() { # <number>
  squeue --noheader --jobs "$1" --format '%T %r' 2>/dev/null | head -n 1 || true
}


job_runs() {
  [[ $JOB_STATE == RUNNING* || $JOB_STATE == SUSPENDED* ]]
}


# Beside the tasks that are there, however busy the node is.
run_in_job() { # <node> <command...>
  (
    clear_slurm_environment
    exec ${REPLY_TIMEOUT:+timeout -s KILL "$REPLY_TIMEOUT"} srun --overlap --jobid "$JOB" --nodes 1 --ntasks 1 \
      --nodelist "$1" --input none --quiet "${@:2}"
  )
}


# Another one, that this shell may be in.
clear_slurm_environment() {
  local name
  for name in "${!SLURM_@}"; do
    [[ $name == SLURM_CONF ]] || unset "$name"
  done
}


# Run a command on a node of the run, wherever that is. What a job has left lies in its directory, which is shared.
visit_node() { # <node> <command...>
  if [[ $JOB ]] && job_runs; then
    run_in_job "$@"
  elif [[ $JOB ]]; then
    "${@:2}"
  elif [[ ${ADDRESS[$1]-} ]]; then
    ssh_run "$@"
  else
    "${@:2}"
  fi
}


# For run_on_nodes: what a node sees of the run.
visit_status() { # <node> [more options of runs.node_status...]
  visit_node "$1" "$RUN_PYTHON" "$KIT/scripts/lib/module.py" runs.node_status --run "$RUN_MARK" --node "$1" \
    --count "${NPROC_OF[$1]}" --first-rank "${FIRST_RANK_OF[$1]}" "${@:2}"
}
