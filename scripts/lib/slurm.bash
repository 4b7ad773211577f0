# shellcheck shell=bash
#
# A launch with srun on all nodes of the SLURM allocation of this shell.
#
# Sourced, never run; it needs options.bash, node_env.bash and launch.bash.
#
# Environment variables: LAUNCHER: srun (one task per rank) or torchrun (one agent per node); CONTAINER: a command
# prefix for Python on the nodes, or options of srun; SRUN_ARGS: more options of srun.

# shellcheck disable=SC2034 # other files use these variables
LAUNCHER=${LAUNCHER:-srun}
CORES_PER_RANK=0       # 0: fewer cores than ranks
CORES_PER_NODE=1       # minimum of all nodes
CONTAINER_COMMAND=()   # command prefix for Python
SRUN_OPTIONS=()        # from SRUN_ARGS and CONTAINER
# Options of srun that SRUN_ARGS and CONTAINER must not contain, grouped by reason.
STREAM_OPTIONS=(--input --output --error --label --pty --unbuffered)
LAYOUT_OPTIONS=(--nodes --ntasks --ntasks-per-node --ntasks-per-gpu --nodelist --nodefile --exclude --relative
  --multi-prog --het-group --pack-group --jobid --no-allocate)
OTHER_REFUSED_OPTIONS=(--chdir --bcast --bcast-exclude --test-only --help --usage --version)
declare -A LONG_OPTION=([i]=--input [o]=--output [e]=--error [l]=--label [u]=--unbuffered [N]=--nodes [n]=--ntasks
  [w]=--nodelist [F]=--nodefile [x]=--exclude [r]=--relative [Z]=--no-allocate [m]=--distribution [D]=--chdir [h]=--help
  [V]=--version)
RANK_PYTHON=''
# For an error message: what to run instead in a task of srun. The command uses only the node of the task.
COMMAND_IN_STEP='scripts/ssh/launch_singlenode.sh CONFIG NPROC'


# Whether this is the shell of salloc or a batch script. Exits in a task of srun.
in_allocation() {
  [[ ${SLURM_JOB_ID-} ]] || return 1
  [[ ! ${SLURM_STEP_ID-} ]] || ((SLURM_STEP_ID > 4294967000)) ||
    die_usage "this is task ${SLURM_PROCID-} of a job step:" \
      "call it from the salloc shell or the batch script, not through srun; for this node alone: $COMMAND_IN_STEP"
}


# If this job was submitted inside another job, in a step (Jupyter, `srun --pty bash`) or a batch script, unset the
# variables of the other job. SLURM replaces only variables that it sets for this job. Has no effect in a task of srun.
drop_inherited_variables() {
  local job command details tasks=''
  [[ ${SLURM_JOB_ID-} && ${SLURM_TASK_PID-} ]] || return 0
  # SLURM_TASK_PID is the first process of this batch script. In the shell of salloc, it is a process of the other job.
  job=$(process_file environ | sed -n 's/^SLURM_JOB_ID=//p')
  command=$(process_file cmdline)
  if [[ $job != "$SLURM_JOB_ID" ]]; then
    [[ $job ]] || return 0
    unset SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_GTIDS SLURM_TASK_PID
  elif [[ $command != */slurm_script* ]]; then
    return
  fi
  if [[ ${SLURM_STEP_ID-} ]] && ((SLURM_STEP_ID < 4294967000)); then
    tasks=${SLURM_STEP_NUM_TASKS-}
    unset "${!SLURM_STEP@}" "${!SLURM_SRUN_@}" "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_PER_@}" SLURMD_TRES_BIND \
      SLURM_LAUNCH_NODE_IPADDR SLURM_DISTRIBUTION SRUN_DEBUG
  fi
  [[ $tasks${SLURM_ARRAY_JOB_ID-}${SLURM_RESTART_COUNT-}${SLURM_GPUS_PER_TASK-} ]] || return 0
  details=$(scontrol show job --oneliner "$SLURM_JOB_ID" | grep -E "^JobId=$SLURM_JOB_ID ") || return 0
  [[ $details == *" ArrayTaskId="* ]] || unset "${!SLURM_ARRAY_@}"
  [[ $details != *" Restarts=0 "* ]] || unset SLURM_RESTART_COUNT
  [[ $details == *" TresPerTask="* ]] || unset SLURM_GPUS_PER_TASK
  # In a job without --ntasks, SLURM_NTASKS and SLURM_NPROCS are those of the other job.
  [[ ! $tasks || ${SLURM_NTASKS-} != "$tasks" || $details == *" NumTasks=$tasks "* ]] || unset SLURM_NTASKS SLURM_NPROCS
}


# Print a file of the process that SLURM started, one entry per line; nothing if it is not readable.
process_file() { # <environ or cmdline>
  { tr '\0' '\n' <"/proc/$SLURM_TASK_PID/$1"; } 2>/dev/null || true
}


# Source config/node_env.sh and restart the script, so that modules and environments loaded there determine the Python.
# Each node sources the file itself.
enter_node_env() { # <argument of the script...>
  if [[ ${MUSTER_ENTERED-} ]]; then
    unset MUSTER_ENTERED
    return
  fi
  set -- "$(node_env)" "$VERB" "$PROGRAM_FILE" "$@"
  restore_environment
  source_node_env "$1" kill_background </dev/null >&2
  kill_background
  builtin export MUSTER_ENTERED=1 "MUSTER_VERB=$2"
  exec_by_env bash "${@:3}"
}


# ---------------------------------------------------------------- checks

check_slurm_settings() {
  [[ $LAUNCHER == srun || $LAUNCHER == torchrun ]] || die_usage "LAUNCHER: expected srun or torchrun, got '$LAUNCHER'"
  type -P srun >/dev/null ||
    die_usage "srun is not on the PATH; load SLURM's module, or call this on a node of the cluster"
  [[ ! $RENDEZVOUS_TIMEOUT || $LAUNCHER == torchrun ]] ||
    die_usage "--rendezvous-timeout: requires LAUNCHER=torchrun;" \
      "with srun the script sets the timeout (train.py: distributed.timeout)"
  local lines arguments
  lines=$(split_arguments SRUN_ARGS)
  [[ ! $lines ]] || mapfile -t SRUN_OPTIONS <<<"$lines"
  lines=$(split_arguments CONTAINER)
  [[ ! $lines ]] || mapfile -t arguments <<<"$lines"
  refuse_srun_options SRUN_ARGS "${SRUN_OPTIONS[@]}"
  if [[ $lines == -* ]]; then
    refuse_srun_options CONTAINER "${arguments[@]}"
    SRUN_OPTIONS=("${arguments[@]}" "${SRUN_OPTIONS[@]}")
  elif [[ $lines ]]; then
    CONTAINER_COMMAND=("${arguments[@]}")
  fi
}


# Exit when these arguments are not options of srun, or one of them would break the launch.
refuse_srun_options() { # <name of the variable> <argument...>
  local variable=$1 option
  shift
  (($# == 0)) || [[ $1 == -?* && $1 != -- ]] || die_usage "$variable: expected options of srun, got '$1'"
  while (($#)); do
    case $1 in
      --) die_usage "$variable: --: the launcher names the command; leave it out" ;;
      --*=*) refuse_srun_option "$variable" "$1" "${1%%=*}" "${1#*=}" ;;
      --*) refuse_srun_option "$variable" "$1" "$1" "${2-}" ;;
      -*)
        option=${1#-}
        while [[ $option == [EHIKOQXZhklsuvV]* && ! ${LONG_OPTION[${option::1}]-} ]]; do # options without a value
          option=${option:1}
        done
        [[ ! $option || ! ${LONG_OPTION[${option::1}]-} ]] ||
          refuse_srun_option "$variable" "$1" "${LONG_OPTION[${option::1}]}" "${option:1}${2-}"
        ;;
    esac
    shift
  done
}


# Exit when srun, which accepts abbreviated options, would take this option for a refused one.
refuse_srun_option() { # <name of the variable> <argument> <option, perhaps abbreviated> <its value, or next argument>
  if [[ " ${STREAM_OPTIONS[*]}" == *" $3"* ]]; then
    die_usage "$1: $2: the launcher needs the streams of srun; leave it out:" \
      "the output of rank 0 is in the job's output, that of each node in node_<name>.log of the run directory"
  elif [[ " ${LAYOUT_OPTIONS[*]}" == *" $3"* ]] || [[ " --distribution" == *" $3"* && $4 != block* ]]; then
    die_usage "$1: $2: the launcher places the ranks on the nodes of the job; leave it out, and request nodes and" \
      "tasks with sbatch or salloc"
  elif [[ " --export" == *" $3"* && ,$4, != *,ALL,* ]]; then
    die_usage "$1: $2: the ranks need the launcher's environment; leave it out, or use --export=ALL,NAME=VALUE"
  elif [[ " ${OTHER_REFUSED_OPTIONS[*]}" == *" $3"* ]]; then
    die_usage "$1: $2: with it, srun would not start the ranks, or would start them in another directory; leave it out"
  fi
}


# Remove variables that act like the refused options.
unset_srun_variables() {
  unset SLURM_STDINMODE SLURM_STDOUTMODE SLURM_STDERRMODE SLURM_LABELIO SLURM_UNBUFFEREDIO SLURM_EXPORT_ENV \
    SLURM_BCAST SLURM_BCAST_EXCLUDE SLURM_SEND_LIBS SLURM_REMOTE_CWD SLURM_WORKING_DIR SLURM_HOSTFILE \
    SLURM_NO_KILL SLURM_KILL_BAD_EXIT SLURM_WAIT SRUN_INPUT SRUN_OUTPUT SRUN_ERROR SRUN_EXPORT_ENV
}


# Split a variable at blanks outside of quotes, and print one argument per line.
split_arguments() { # <name of a variable>
  local line=${!1-}
  [[ ! $line ]] || xargs -n 1 printf '%s\n' <<<"$line" 2>/dev/null ||
    die_usage "$1=\"$line\": unclosed quote; quote as in a shell"
}


# Set the nodes, the script and the cores per rank. The Python and the modules in a container are not checked; with a
# container, the Python of this machine need not have PyTorch.
slurm_check_call() { # <number of ranks; 0: as many as are allocated>
  local torch=(--torch) container_python=${PYTHON_OPTION:-python3}
  [[ ! $LEASE ]] || die_usage "--lease: not possible in an allocation, where SLURM ends the run"
  ((!DETACH)) || die_usage "--detach: not possible in an allocation, which ends with this shell; use sbatch"
  check_slurm_settings
  use_port_from_environment
  if [[ ${CONTAINER-} ]]; then
    PYTHON_OPTION='' torch=() PROGRAM_IS_LOCAL=0
  fi
  check_call "${torch[@]}" --allocation "$1"
  set_aside_spares
  RANK_PYTHON=$PYTHON
  [[ ! ${CONTAINER-} ]] || RANK_PYTHON=$container_python
  SLURM_JOB=("$SLURM_JOB_ID")
  [[ ! ${SLURM_ARRAY_JOB_ID-} ]] || SLURM_JOB+=("${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID")
}


# Make the last nodes of the allocation spare nodes.
set_aside_spares() {
  local number node processes
  [[ $SPARES$MIN_NODES ]] || return 0
  [[ $LAUNCHER == torchrun ]] ||
    die_usage "--spares and --min-nodes: require LAUNCHER=torchrun; a task of srun cannot be replaced"
  is_count "${SPARES:-0}" || die_usage "--spares: in a job, expected a number of nodes, got '$SPARES'"
  number=$((${#NODES[@]} - ${SPARES:-0}))
  ((number >= 1)) || die_usage "--spares $SPARES: the job has only ${#NODES[@]} nodes; one or more must remain"
  ((${MIN_NODES:-0} <= number)) || die_usage "--min-nodes $MIN_NODES: this run has fewer nodes ($number)"
  SPARE_NODES=("${NODES[@]:number}")
  NODES=("${NODES[@]::number}")
  for node in "${SPARE_NODES[@]}"; do
    processes=${NPROC_OF[$node]}
    RANKS=$((RANKS - processes))
  done
}


# Set MASTER_PORT to a free port of the first node, which may be another machine than that of this shell.
slurm_choose_port() {
  [[ ! $MASTER_PORT ]] || return 0
  # Without --gres none, the step of a job with --gpus would ask for all of its GPUs on this one node.
  MASTER_PORT=$(unset_srun_variables &&
    srun --overlap --gres none --nodes 1 --ntasks 1 --nodelist "${NODES[0]}" --input none \
      "$PYTHON" -I "$KIT/scripts/lib/module.py" slurm.allocation "$SLURM_JOB_ID") ||
    die "${NODES[0]}: cannot find a free port; see the messages of srun above, or give one with --master-port"
}


# ---------------------------------------------------------------- the job step

# Set BEFORE and AFTER: the parts of the srun command line before and after the argument for the run directory.
build_srun_command() {
  local resources all=("${NODES[@]}" "${SPARE_NODES[@]}")
  local srun=(srun --export ALL --kill-on-bad-exit=1 --nodes "${#all[@]}")
  local task=("$KIT/scripts/lib/in_node_env.sh" --task "$(node_env)" "${CONTAINER_COMMAND[@]}" "$RANK_PYTHON" -I -S
    "$KIT/scripts/lib/module.py" slurm.task)
  local node counts=()
  for node in "${all[@]}"; do
    counts+=("${NPROC_OF[$node]}")
  done
  [[ ! $SPARES$MIN_NODES ]] || srun+=(--no-kill --kill-on-bad-exit=0)
  mapfile -t resources < <(rank_resources)
  if [[ $LAUNCHER == torchrun ]]; then
    PYTHON=$RANK_PYTHON build_agent_command
    AFTER=("$GRACE" "$(IFS=, && printf '%s' "${counts[*]}")" "${BEFORE[@]}" -- "${AFTER[@]}")
    BEFORE=(env MASTER_ADDR="${NODES[0]}" MASTER_PORT="$MASTER_PORT"
      "${srun[@]}" --ntasks "${#all[@]}" --ntasks-per-node 1 --cpus-per-task "$CORES_PER_NODE"
      "${SRUN_OPTIONS[@]}" "${task[@]}" agent)
  else
    BEFORE=(env MASTER_PORT="$MASTER_PORT" "${srun[@]}" --ntasks "$RANKS" --distribution block "${resources[@]}"
      "${SRUN_OPTIONS[@]}" "${task[@]}" rank)
    AFTER=("$GRACE" "${WORK[@]}" "${CONFIG_ARGS[@]}" "${SCRIPT_ARGS[@]}")
  fi
}


# Print options of sbatch that srun does not inherit. With --cpus-per-task, SLURM binds each task to its own cores, if
# the cluster is configured for that. --gpus-per-task and --ntasks-per-gpu also bind each task to its own GPU (srun(1),
# --gpu-bind): a rank then sees one GPU instead of GPU LOCAL_RANK of the node, and NCCL cannot open the memory of others
# where cgroups hide them. So no GPU is bound unless the user asks for that.
rank_resources() {
  [[ $(printf '%s\n' "${NPROC_OF[@]}" | sort -u | wc -l) != 1 ]] ||
    printf '%s\n' --ntasks-per-node "${NPROC_OF[${NODES[0]}]}"
  if ((CORES_PER_RANK)); then
    printf '%s\n' --cpus-per-task "$CORES_PER_RANK"
  else
    printf '%s\n' --overcommit
  fi
  [[ ! ${SLURM_GPUS_PER_TASK-} ]] || printf '%s\n' --gpus-per-task "$SLURM_GPUS_PER_TASK"
  [[ ! ${SLURM_GPUS_PER_TASK-}${SLURM_NTASKS_PER_GPU-} || ${SLURM_GPU_BIND-} ]] || printf '%s\n' --gpu-bind=none
}


# Run srun on all nodes.
slurm_run_nodes() { # [option of distributed/launch/run.py...]
  set -- --slurm-job "${SLURM_JOB[@]}" "$@"
  [[ $LAUNCHER == srun ]] || set -- "$@" --task-per-node
  if [[ $DRY_RUN == 1 ]]; then
    MASTER_PORT=${MASTER_PORT:-<a free port of ${NODES[0]}>}
  else
    slurm_choose_port
  fi
  build_srun_command
  set -- "$@" --master "${NODES[0]}" "$MASTER_PORT"
  # Another launch may have left these variables. PET_* would change torchrun's options.
  unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR MASTER_PORT \
    "${!PET_@}" "${!TORCHELASTIC_@}"
  unset_srun_variables
  unset SLURM_NTASKS_PER_NODE SLURM_GPUS_PER_TASK SLURM_DISTRIBUTION # arguments of srun replace them
  run_nodes srun "$@"
}
