# shellcheck shell=bash
#
# Find an existing run, perhaps started on another machine, and run commands on its nodes.
#
#   open_connections
#   find_run RUN; run_on_nodes "$QUERY_DIR" query_node --seconds 1
#
# Sourced, never run; it needs options.bash, nodes.bash and ssh.bash.

# shellcheck disable=SC2034 # other files use these variables
RUN_DIR_ON_NODES=''   # run directory in MUSTER_RUN_DIR of the run's processes
RUN_PYTHON=''         # interpreter of its ranks
LAUNCHER_STATE=''     # running, exited, remote (not known), or job: the launcher is the batch script of JOB
LAUNCHER_HOST='' LAUNCHER_PID=0 LAUNCHER_START='' # host, process id and start time (clock ticks since boot)
RUN_GRACE=0           # its MUSTER_GRACE, in seconds
JOB=''                # number of its SLURM job
JOB_STATE=''          # state and reason from squeue, such as PENDING Resources; empty: the job has ended
declare -A FIRST_RANK_OF=() # of each node
QUERY_DIR=''          # directory for the replies of the nodes


# Set the variables above, RUN and NODES. Exits when there is no such run.
find_run() { # <RUN>
  local found
  QUERY_DIR=$(mktemp -d "$CONNECTIONS_DIR/replies-XXXXXX")
  look_up_run "$PWD" "$1" || look_up_run "$(directory_of_job "$1")" "$1" || refuse_missing_run "$1"
  mapfile -d '' found <"$QUERY_DIR/found"
  RUN=${found[0]} RUN_DIR_ON_NODES=${found[1]} RUN_PYTHON=${found[2]}
  LAUNCHER_STATE=${found[3]} LAUNCHER_HOST=${found[4]} LAUNCHER_PID=${found[5]} LAUNCHER_START=${found[6]}
  RUN_GRACE=${found[7]} JOB=${found[8]}
  set -- "${found[@]:9}"
  while (($#)); do
    add_node "$1" "$3" "$2"
    FIRST_RANK_OF[$1]=$4
    shift 4
  done
  cd / # ssh_run changes to the working directory, which must exist on every node
  [[ ! $JOB ]] || update_job_state
}


# The start time is compared too, because the process id may have been reused.
launcher_is_running() {
  local stat fields
  [[ $LAUNCHER_STATE == running ]] && read -r stat 2>/dev/null <"/proc/$LAUNCHER_PID/stat" || return 1
  read -r -a fields <<<"${stat##*) }"
  [[ ${fields[0]} != Z && ${fields[19]} == "$LAUNCHER_START" ]]
}


look_up_run() { # <base of relative paths> <RUN>
  [[ $1 ]] && kit_python runs.lookup --from "$1" --log-dir "$LOG_DIR" -- "$2" >"$QUERY_DIR/found" 2>"$QUERY_DIR/why"
}


# Print the directory in which the job was submitted.
directory_of_job() { # <RUN>
  local job
  is_job "$1" && job=$(scontrol show job --oneliner "$1" 2>/dev/null) || return 0
  job=${job%%$'\n'*} # an array has one line per element
  [[ ! $job =~ \ WorkDir=(.*)\ StdErr= ]] || printf '%s\n' "${BASH_REMATCH[1]}"
}


is_job() { # <RUN>
  [[ $1 =~ ^[0-9]+(_[0-9]+)?$ ]]
}


# A pending job has no run directory yet; a job whose call was refused never had one.
refuse_missing_run() { # <RUN>
  local job
  if is_job "$1"; then
    type -P scontrol >/dev/null ||
      die_usage "RUN '$1': no run of job $1 in $LOG_DIR, and scontrol is not on this machine;" \
        "run $PROGRAM where the job was submitted, or name its run directory"
    JOB_STATE=$(state_of_job "$1")
    [[ ! $JOB_STATE ]] || job_without_run "$1"
    job=$(scontrol show job --oneliner "$1" 2>&1 || true)
    [[ ! $job =~ JobState=([A-Z_]+).*\ ExitCode=([0-9]+).*\ StdErr=(.*)\ StdIn= ]] ||
      die "job $1: ended before its run started (${BASH_REMATCH[1]}, exit code ${BASH_REMATCH[2]});" \
        "see ${BASH_REMATCH[3]};" \
        "if that file is missing, its directory did not exist"
    die_usage "RUN '$1': no run of job $1 in $LOG_DIR, and SLURM has no such job (${job##*$'\n'}); for older" \
      "jobs: sacct -j $1"
  fi
  die_usage "$(<"$QUERY_DIR/why")"
}


# The batch script runs as long as its job; without the job no process of the run exists.
update_job_state() {
  JOB_STATE=$(state_of_job "$JOB")
  if ! job_runs; then
    LAUNCHER_STATE=exited
  elif [[ $LAUNCHER_STATE == remote && " ${NODES[*]} " == *" $LAUNCHER_HOST "* ]]; then
    LAUNCHER_STATE=job
  fi
}


state_of_job() { # <number>
  squeue --noheader --jobs "$1" --format '%T %r' 2>/dev/null | head -n 1 || true
}


job_runs() {
  [[ $JOB_STATE == RUNNING* || $JOB_STATE == SUSPENDED* ]]
}


# Run a command as a job step that shares the resources of the running tasks.
run_in_job() { # <node> <command...>
  (
    clear_slurm_environment
    exec ${REPLY_TIMEOUT:+timeout -s KILL "$REPLY_TIMEOUT"} srun --overlap --jobid "$JOB" --nodes 1 --ntasks 1 \
      --nodelist "$1" --input none --quiet "${@:2}"
  )
}


# Remove the variables of another job, if this shell is in one, and those that act like options of srun.
clear_slurm_environment() {
  local name
  for name in "${!SLURM_@}" "${!SRUN_@}"; do
    [[ $name == SLURM_CONF ]] || unset "$name"
  done
}


# Run a command on a node of the run. Files of an ended job are read here, as its run directory is shared.
command_on_node() { # <node> <command...>
  if [[ $JOB ]] && job_runs; then
    run_in_job "$@"
  elif [[ ! $JOB && ${ADDRESS[$1]-} ]]; then
    ssh_run "$@"
  else
    "${@:2}"
  fi
}


# For run_on_nodes: print the state of the run on a node.
query_node() { # <node> [option of runs.node_status...]
  command_on_node "$1" "$RUN_PYTHON" -I "$KIT/scripts/lib/module.py" runs.node_status --run "$RUN_DIR_ON_NODES" \
    --node "$1" --count "${NPROC_OF[$1]}" --first-rank "${FIRST_RANK_OF[$1]}" "${@:2}"
}
