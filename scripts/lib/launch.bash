# shellcheck shell=bash
#
# Steps shared by all launchers: check the call, build the command line of the agent, run it on the nodes.
#
# Sourced, never run; it needs options.bash.

# shellcheck disable=SC2034 # other files use these variables
WORK=()                  # command of each rank: a script, or -m and a module
SCRIPT_FILE=''           # the file that Python runs: --script, or __main__.py if --script is a directory
PROGRAM_IS_LOCAL=1       # 0: the Python of the ranks and its modules are in a container, and cannot be checked here
PACKAGES=()              # packages that the ranks need besides PyTorch; checked on the nodes
CONFIG_ARGS=()           # --config CONFIG, or empty
MASTER_ADDR=''           # name or address of the first node; the other nodes connect to its port MASTER_PORT
PLAIN_AGENT=torch.distributed.run # module for --agent torchrun
FAST_OPTIONS=()          # options of Muster's own agent
BEFORE=() AFTER=()       # command line of the agent or of srun, before and after options that launch.run inserts
RUN_OPTIONS=()           # distributed/launch/run.py or takeover.py, and its options
NODES=()                 # names, in the order of node ranks
SPARE_NODES=()           # names of nodes that replace lost nodes
declare -A ADDRESS=()    # node -> [user@]name for ssh
declare -A NPROC_OF=()   # node -> number of ranks, or auto, gpu or cpu if the preflight determines the number
RANKS=0                  # world size
ONE_PROCESS=''           # why the run has one process; empty if the user has chosen it


# ---------------------------------------------------------------- check the call

# Set the Python of the ranks, and print it when several are available. check_call finds out whether it works.
pick_rank_python() {
  local number line=''
  resolve_python "$PYTHON_OPTION"
  ((${#PYTHONS[@]} >= 2)) || return 0
  for ((number = 1; number < ${#PYTHONS[@]}; number++)); do
    line+="${line:+, }${PYTHONS[number]} (${PYTHON_ORIGINS[number]})"
  done
  log "Python: $PYTHON (${PYTHON_ORIGINS[0]}), not $line; --python chooses another"
}


# Set WORK and SCRIPT_FILE.
check_script() {
  if [[ $MODULE ]]; then
    WORK=(-m "$MODULE")
    return
  fi
  WORK=("${SCRIPT:-$KIT/train.py}")
  SCRIPT_FILE=${WORK[0]}
  [[ ! -d $SCRIPT_FILE ]] || SCRIPT_FILE+=/__main__.py
  [[ -e ${WORK[0]} ]] || die_usage "script '$SCRIPT': no such file (in $PWD)"
  [[ -e $SCRIPT_FILE ]] || die_usage "script '$SCRIPT': a directory without a __main__.py"
  [[ -f $SCRIPT_FILE && -r $SCRIPT_FILE ]] || die_usage "script '$SCRIPT': not a readable file"
}


# Set CONFIG_ARGS.
check_config() {
  [[ $CONFIG != - ]] || return 0
  [[ -e $CONFIG ]] || die_usage "CONFIG '$CONFIG': no such file (in $PWD); use - for none"
  [[ -f $CONFIG && -r $CONFIG ]] || die_usage "CONFIG '$CONFIG': not a readable file"
  CONFIG_ARGS=(--config "$CONFIG")
}


parse_config_nproc_nodes() {
  local least=3
  [[ ! $HOSTFILE ]] || least=2
  ((${#POSITIONAL[@]} >= least)) ||
    die_usage "expected CONFIG, NPROC and NODE..., got: $(quote "${POSITIONAL[@]:-nothing}")"
  CONFIG=${POSITIONAL[0]} NPROC=${POSITIONAL[1]}
  check_nproc NPROC "$NPROC" or_kind
  ((PREFLIGHT)) || [[ $ATTACH ]] || ! is_processor_kind "$NPROC" ||
    die_usage "NPROC $NPROC: only the preflight counts the processors of a node;" \
      "leave out --no-preflight, or give a number"
}


# If NPROC is auto, gpu or cpu, set it to a number.
count_processes_here() {
  local kind=$NPROC
  is_processor_kind "$kind" || return 0
  QUIET=1 pick_rank_python
  check_python
  NPROC=$(
    ((${#ENVIRONMENT[@]} == 0)) || export "${ENVIRONMENT[@]?}" # --env may set CUDA_VISIBLE_DEVICES
    kit_python host.processes "${kind/default/gpu}"
  ) || exit
  [[ $kind != default ]] || ((NPROC)) || NPROC=1 ONE_PROCESS="1 process, because no GPU is visible; -n N starts more"
  ((NPROC)) || die_usage "NPROC $kind: no GPU is visible on this machine; give a number, cpu or auto"
}


# Check the call before anything is started.
check_call() { # <option of check_call.py...>
  GRACE=${GRACE:-8}
  pick_rank_python
  check_script
  check_config
  [[ ! $PROGRESS ]] || set -- "--progress=$PROGRESS" "$@"
  if ((!PROGRAM_IS_LOCAL)); then
    [[ ! $SCRIPT ]] || set -- "--foreign-script=$SCRIPT_FILE" "$@"
  else
    [[ ! $SCRIPT ]] || set -- "--script=$SCRIPT_FILE" "$@"
    [[ ! $MODULE ]] || set -- "--module=$MODULE" "$@"
    # For train.py all settings are checked.
    [[ ! ${CONFIG_ARGS[*]-} || $MODULE || $SCRIPT ]] || set -- "--config=$CONFIG" "$@"
  fi
  run_checks "$@"
}


# Check the call like check_call. Also sets NODES and SPARE_NODES.
check_call_on_nodes() { # <node...>
  set_node_checks "$NPROC" "$@"
  check_call --forward "${CHECKS[@]}"
  [[ ! $MIN_NODES ]] || ((MIN_NODES <= ${#NODES[@]})) ||
    die_usage "--min-nodes $MIN_NODES: this run has fewer nodes (${#NODES[@]})"
  ((! ${#SPARE_NODES[@]})) || check_replacement
  ENVIRONMENT+=("MUSTER_NODES=${NODES[*]}") # agents print these names
}


# Set CHECKS, the options with which check_call.py reads node names, --hostfile and --exclude.
set_node_checks() { # <default number of processes of a node> <node...>
  local names=("${@:2}")
  CHECKS=(--nodes "$1" ${HOSTFILE:+"--hostfile=$HOSTFILE"} ${EXCLUDE:+"--exclude=$EXCLUDE"}
    ${VALUE_NAME[--spares]:+--replace} ${SPARES:+"--spares=$SPARES"} "${names[@]/#/--node=}")
}


add_node() { # <name> <processes> [address for ssh: [user@]name]
  NODES+=("$1")
  NPROC_OF[$1]=$2
  is_processor_kind "$2" || RANKS=$((RANKS + $2))
  [[ ! ${3-} ]] || ADDRESS[$1]=$3
}


# Run check_call.py, and set the variables that it prints: the nodes, MASTER_ADDR, MASTER_PORT, cores of the SLURM
# allocation, FORWARDED. Exits when a check fails.
run_checks() { # <option of check_call.py...>
  local facts status=0 name value processes forwarded=()
  # check_call.py looks for modules of the ranks, so it runs in their environment. The two empty variables replace the
  # user's values, with which Python might wait for input instead of exiting, or might not print UTF-8.
  facts=$(trap '' INT && exec_in_environment $((${#ENVIRONMENT[@]} + 2)) "${ENVIRONMENT[@]}" \
    PYTHONINSPECT= PYTHONIOENCODING= \
    "$PYTHON" "$KIT/scripts/lib/check_call.py" "$@" -- "${SCRIPT_ARGS[@]}") || status=$?
  while read -r name value processes; do
    case $name in
      node) add_node "${value#*@}" "$processes" "$value" ;;
      spare) SPARE_NODES+=("${value#*@}") NPROC_OF[${value#*@}]=$processes ADDRESS[${value#*@}]=$value ;;
      master) MASTER_ADDR=$value ;;
      port) MASTER_PORT=${MASTER_PORT:-$value} ;;
      package) PACKAGES+=("$value") ;;
      cores-per-rank) CORES_PER_RANK=$value ;;
      cores-per-node) CORES_PER_NODE=$value ;;
      warning) warn "$value $processes" ;;
      usage) die_usage "$value $processes" ;;
      unfit) die_with "$EXIT_UNFIT" "$value $processes" ;;
      forward) forwarded+=("$value") ;;
      ok) set_forwarded "${forwarded[@]}"; return ;;
    esac
  done <<<"$facts"
  check_python # the Python may be too old for check_call.py
  exit $((status ? status : 1))
}


# Set FORWARDED to these variables, with the values that this script inherited, without variables that --env sets.
set_forwarded() { # <name...>
  local entry names=()
  (($# > 0)) || return 0
  for entry in "${INHERITED[@]}"; do
    if [[ " $* " == *" ${entry%%=*} "* && " ${ENVIRONMENT[*]%%=*} " != *" ${entry%%=*} "* ]]; then
      FORWARDED+=("$entry") names+=("${entry%%=*}")
    fi
  done
  ((${#names[@]} == 0)) || log "forwarded to the nodes: ${names[*]}; MUSTER_FORWARD changes the list"
}


# ---------------------------------------------------------------- the run

# Run NPROC processes on this machine. Without --master-port, torchrun itself binds a free port: a port chosen here could
# be in use when torchrun starts.
run_on_this_machine() {
  count_processes_here
  add_node "$(uname -n)" "$NPROC"
  set -- --torch --ranks "$NPROC"
  ((!PREFLIGHT)) || set -- "$@" --gpus "$NPROC" ${MASTER_PORT:+--port "$MASTER_PORT"}
  check_call "$@"
  [[ ! $ONE_PROCESS ]] || log "$ONE_PROCESS"
  set -- --standalone --local-addr 127.0.0.1
  [[ ! $MASTER_PORT ]] || set -- --master-addr 127.0.0.1 --master-port "$MASTER_PORT"
  build_agent_command "$@" --nproc-per-node "$NPROC"
  run_nodes local ${MASTER_PORT:+--run-id}
}


check_pdsh() {
  [[ $DRY_RUN == 1 ]] || type -P pdsh >/dev/null ||
    die "pdsh: not found on this machine; install it, or use launch_torchrun_auto.sh"
}


# Set BEFORE and AFTER, the command line of the agent before and after the options that depend on the node.
# shellcheck disable=SC2120 # other files pass arguments
build_agent_command() { # [torchrun's options that are the same for all nodes...]
  BEFORE=("$PYTHON" "$KIT/scripts/lib/agent.py")
  if [[ $AGENT == fast ]]; then
    BEFORE+=("${FAST_OPTIONS[@]}")
  else
    BEFORE+=(--plain "$PLAIN_AGENT")
  fi
  BEFORE+=(${RENDEZVOUS_TIMEOUT:+--rdzv-conf "timeout=$RENDEZVOUS_TIMEOUT"} "$@")
  # Without the --, torchrun would parse the script's arguments as abbreviated options.
  AFTER=(--tee 3 ${MODULE:+-m} -- "${MODULE:-${WORK[0]}}" "${CONFIG_ARGS[@]}" "${SCRIPT_ARGS[@]}")
}


# Run the agents on all nodes over ssh.
ssh_run_nodes() { # <ssh or pdsh>
  # shellcheck disable=SC2119
  build_agent_command
  set -- "$1"
  ((!SYNC)) || set -- "$@" --sync "${FETCHED[@]/#/--fetch=}"
  if ((PREFLIGHT)); then
    [[ $MODULE ]] || set -- "$@" "--file=$SCRIPT_FILE"
    set -- "$@" --preflight ${CONFIG_ARGS:+"--file=$CONFIG"} "${PACKAGES[@]/#/--package=}"
  elif [[ $DRY_RUN != 1 ]]; then
    MASTER_ADDR=${NODES[0]} MASTER_PORT=${MASTER_PORT:-29500}
  fi
  run_nodes "$@"
}


# Replace this process by the program that connects to the nodes, makes the run directory, runs the command on all
# nodes, restarts it after a failure, and exits with the exit code of the run. With --dry-run it only prints the command
# of each node. Callers of this function must not have local variables: a local variable would hide the user's variable
# of the same name from the ranks.
run_nodes() { # <local, ssh, pdsh or srun> [option of distributed/launch/run.py...]
  set_run_options "$@"
  exec_module "${RUN_OPTIONS[@]}" < <(print_lists)
}


# Set RUN_OPTIONS. This is a separate function because run_nodes must not have local variables.
set_run_options() { # <argument of run_nodes...>
  local node program=launch.run name=${MODULE:-${WORK[0]}}
  [[ ! $ATTACH ]] || program=launch.takeover
  [[ ! -d $name ]] || name=$(cd -- "$name" && pwd)
  name=${name##*/}
  RUN_OPTIONS=("$program" "$@" "--program=$PROGRAM" "--cwd=$PWD" "--log-dir=$LOG_DIR" "--name=${name%.py}"
    "--script=${MODULE:-${WORK[0]}}" ${CONFIG_ARGS:+"--config=$CONFIG"} "--python=$PYTHON" "--node-env=$(node_env)"
    --grace "$GRACE" --max-restarts "$MAX_RESTARTS" ${HANG_TIMEOUT:+--hang-timeout "$HANG_TIMEOUT"}
    --console-rank "$CONSOLE_RANK" ${PROGRESS:+"--progress=$PROGRESS"}
    ${LEASE:+--lease "$LEASE"})
  [[ ! ${MASTER_ADDR-}${MASTER_PORT-} ]] || RUN_OPTIONS+=(--master "${MASTER_ADDR-}" "${MASTER_PORT-}")
  for node in "${NODES[@]}"; do
    RUN_OPTIONS+=(--node "$node" "${NPROC_OF[$node]}" "${ADDRESS[$node]-}")
  done
  for node in "${SPARE_NODES[@]}"; do
    RUN_OPTIONS+=(--spare "$node" "${NPROC_OF[$node]}" "${ADDRESS[$node]-}")
  done
  [[ ! $MIN_NODES ]] || RUN_OPTIONS+=(--min-nodes "$MIN_NODES")
  ((!DETACH)) || RUN_OPTIONS+=(--detach)
  [[ $DRY_RUN != 1 ]] || RUN_OPTIONS+=(--dry-run)
  [[ $QUIET != 1 ]] || RUN_OPTIONS+=(--quiet)
}


# Print the lists that distributed/launch/run.py reads from standard input. They are not arguments, because all users
# of a machine can read the arguments of a process.
print_lists() {
  print_environment
  print_list call "${CALL[@]}"
  print_list options "${GIVEN_OPTIONS[@]}"
  print_list values "${GIVEN_VALUES[@]}"
  print_list rest "${POSITIONAL[@]}" "${REST[@]}"
  print_list before "${BEFORE[@]}"
  print_list after "${AFTER[@]}"
  print_list arguments "${SCRIPT_ARGS[@]}"
  print_list notify "$NOTIFY"
}


print_environment() {
  print_list inherited "${FORWARDED[@]}"
  print_list environment "${ENVIRONMENT[@]}"
}


print_list() { # <name> <entry...>
  printf '%s\0' "$1" $(($# - 1)) "${@:2}"
}
