# shellcheck shell=bash
#
# Steps before the nodes start, shared by all launchers: check the call, make the run directory, build the command line
# of the agent.
#
# Sourced, never run; it needs options.bash and nodes.bash. watch.bash, with ssh.bash, pdsh.bash or slurm.bash, starts
# the nodes.

# shellcheck disable=SC2034 # other files use these variables
WORK=()                  # command of each rank: a script, or -m and a module
SCRIPT_FILE=''           # the file that Python runs: --script, or the __main__.py in it
PROGRAM_IS_LOCAL=1       # 0: the Python of the ranks and its modules are in a container, and cannot be checked here
PACKAGES=()              # that the ranks need besides PyTorch; checked on the nodes
CONFIG_ARGS=()           # --config CONFIG, or empty
MASTER_ADDR=''           # address of the first node, with MASTER_PORT
FIRST_RANK=0             # lowest rank of the first of NODES
PLAIN_AGENT=torch.distributed.run # module for --agent torchrun
FAST_OPTIONS=()          # options of Muster's own agent
REPLIES=''               # directory with the replies of the nodes to the preflight
EARLIER_RUN=''           # run directory of this job before it was requeued
SLURM_JOB=()             # SLURM job id; in an array also ARRAY_INDEX, such as 123_4


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


# Set WORK.
check_script() {
  if [[ $MODULE ]]; then
    WORK=(-m "$MODULE")
    return
  fi
  WORK=("${SCRIPT:-$KIT/train.py}")
  SCRIPT_FILE=${WORK[0]}
  [[ ! -d $SCRIPT_FILE ]] || SCRIPT_FILE+=/__main__.py
  [[ -e ${WORK[0]} ]] || die_usage "--script '$SCRIPT': no such file (in $PWD)"
  [[ -e $SCRIPT_FILE ]] || die_usage "--script '$SCRIPT': a directory without a __main__.py"
  [[ -f $SCRIPT_FILE && -r $SCRIPT_FILE ]] || die_usage "--script '$SCRIPT': not a readable file"
}


# Set CONFIG_ARGS.
check_config() {
  [[ $CONFIG != - ]] || return 0
  [[ -e $CONFIG ]] || die_usage "CONFIG '$CONFIG': no such file (in $PWD); use - for none"
  [[ -f $CONFIG && -r $CONFIG ]] || die_usage "CONFIG '$CONFIG': not a readable file"
  CONFIG_ARGS=(--config "$CONFIG")
}


# CONFIG NPROC NODE...
parse_config_nproc_nodes() {
  local least=3
  [[ ! $HOSTFILE ]] || least=2
  ((${#POSITIONAL[@]} >= least)) ||
    die_usage "expected CONFIG, NPROC and NODE..., got: $(quote "${POSITIONAL[@]:-nothing}")"
  CONFIG=${POSITIONAL[0]} NPROC=${POSITIONAL[1]}
  check_nproc NPROC "$NPROC" or_kind
  ((PREFLIGHT)) || ! is_processor_kind "$NPROC" ||
    die_usage "NPROC $NPROC: only the preflight counts the processors of a node;" \
      "leave out --no-preflight, or give a number"
}


# Set NPROC to a number, if it is auto, gpu or cpu.
count_processes_here() {
  local kind=$NPROC
  is_processor_kind "$kind" || return 0
  QUIET=1 pick_rank_python
  check_python
  NPROC=$(
    ((${#ENVIRONMENT[@]} == 0)) || export "${ENVIRONMENT[@]?}" # CUDA_VISIBLE_DEVICES may be there
    kit_python host.processes "$kind"
  ) || exit
  ((NPROC)) || die_usage "NPROC $kind: no GPU is visible on this machine; give a number, cpu or auto"
}


# Set NPROC_OF the nodes for which it is auto, gpu or cpu, from REPLIES.
count_processes_of_nodes() {
  local node processes
  is_processor_kind "$NPROC" || return 0
  while read -r node processes; do
    is_processor_kind "${NPROC_OF[$node]}" || continue
    ((processes)) || die_with "$EXIT_UNFIT" "$node: NPROC $NPROC: no GPU is visible there; give a number, cpu or auto"
    NPROC_OF["$node"]=$processes RANKS=$((RANKS + processes))
  done < <(kit_python host.processes "$NPROC" "$REPLIES" "${NODES[@]}")
}


# Check the call before anything is started.
check_call() { # <option of check_call.py...>
  is_count "$GRACE" || die_usage "MUSTER_GRACE: expected a whole number of seconds, got '$GRACE'"
  pick_rank_python
  check_script
  check_config
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


# Like check_call, and set the nodes.
check_call_on_nodes() { # <node...>
  set_node_checks "$NPROC" "$@"
  check_call --forward "${CHECKS[@]}"
  ENVIRONMENT+=("MUSTER_NODES=${NODES[*]}") # agents print these names
}


# Set CHECKS, the options with which check_call.py reads node names, --hostfile and --exclude.
set_node_checks() { # <processes on a node without its own number> <node...>
  local names=("${@:2}")
  CHECKS=(--nodes "$1" ${HOSTFILE:+"--hostfile=$HOSTFILE"} ${EXCLUDE:+"--exclude=$EXCLUDE"} "${names[@]/#/--node=}")
}


# Run check_call.py, and set the variables that it prints: the nodes, MASTER_ADDR, MASTER_PORT, cores of the SLURM
# allocation, FORWARDED. Exits when a check fails.
run_checks() { # <option of check_call.py...>
  local facts status=0 name value processes forwarded=()
  # In the environment of the ranks, where Python finds their modules; but it must exit, and print UTF-8.
  facts=$(trap '' INT && exec_in_environment $((${#ENVIRONMENT[@]} + 2)) "${ENVIRONMENT[@]}" \
    PYTHONINSPECT= PYTHONIOENCODING= \
    "$PYTHON" "$KIT/scripts/lib/check_call.py" "$@" -- "${SCRIPT_ARGS[@]}") || status=$?
  while read -r name value processes; do
    case $name in
      node) add_node "${value#*@}" "$processes" "$value" ;;
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


# Set FORWARDED to the variables with these names, as this script was started with them. --env overrides them.
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


# ---------------------------------------------------------------- the run directory

# Set COMPARE, the arguments with which launch.open_run compares the replies of the nodes; empty without a preflight.
set_compare_arguments() {
  local node
  COMPARE=()
  [[ $REPLIES ]] || return 0
  COMPARE=(compare --port "${MASTER_PORT:-0}" "$REPLIES")
  for node in "${NODES[@]}"; do
    COMPARE+=("$node:${NPROC_OF[$node]}")
  done
}


# Compare the replies, choose the master address, and make the run directory. Sets RUN, MASTER_ADDR and MASTER_PORT.
open_run() {
  local node opened addresses=() name=${MODULE:-${WORK[0]}}
  [[ ! -d $name ]] || name=$(cd -- "$name" && pwd)
  name=${name##*/}
  for node in "${NODES[@]}"; do
    [[ ! ${ADDRESS[$node]-} ]] || addresses+=("${ADDRESS[$node]}:${NPROC_OF[$node]}")
  done
  mask_call
  set_compare_arguments
  opened=$(kit_python launch.open_run "${COMPARE[@]}" \
    create --logs "$(absolute "$LOG_DIR")" --name "${name%.py}" --nproc "$RANKS" \
    --nodes "${NODES[@]}" ${addresses:+--addresses "${addresses[@]}"} --first-rank "$FIRST_RANK" \
    --launcher $$ --grace "$GRACE" ${EARLIER_RUN:+--again "$EARLIER_RUN"} ${SLURM_JOB:+--slurm-job "${SLURM_JOB[@]}"} \
    --script "${MODULE:-${WORK[0]}}" --config "${CONFIG_ARGS[1]:--}" --cwd "$PWD" --python "$PYTHON" \
    -- "${MASKED_CALL[@]}") || exit
  if [[ $REPLIES ]]; then
    read -r MASTER_ADDR MASTER_PORT <<<"${opened%%$'\n'*}"
    opened=${opened#*$'\n'}
  fi
  RUN=$opened
  record "run ${RUN##*/}: $(counted "$RANKS" process processes) on ${NODES[*]}"
  # Write the path of the run directory to the file that the caller of this launcher named.
  [[ ! ${MUSTER_RUN_FILE-} ]] || printf '%s\n' "$RUN" >"$MUSTER_RUN_FILE"
  unset MUSTER_RUN_FILE
}


# Set MASKED_CALL to the launcher's command line without the values of --env.
mask_call() {
  local argument before=''
  MASKED_CALL=()
  for argument in "${CALL[@]}"; do
    if [[ $before != -- && $argument == --env=*=* ]]; then
      argument=${argument%%=*}=$(mask_value "${argument#*=}")
    elif [[ $before == --env ]]; then
      argument=$(mask_value "$argument")
    fi
    MASKED_CALL+=("$argument")
    [[ $before == -- ]] || before=$argument
  done
}


mask_value() { # <NAME=VALUE>
  printf '%s\n' "${1%%=*}=..."
}


# Print a command line with the names of FORWARDED and ENVIRONMENT, without their values.
masked_command() { # <command...>
  local entry masked=()
  for entry in "${FORWARDED[@]}" "${ENVIRONMENT[@]}"; do
    masked+=("$(mask_value "$entry")")
  done
  quote ${masked:+env "${masked[@]}"} "$@"
}


absolute() { # <path>
  [[ $1 == /* ]] && printf '%s\n' "$1" || printf '%s\n' "$PWD/$1"
}


# Print a message and append it to launcher.log.
record() { # <message...>
  log "$@"
  printf '%(%F %T)T %s\n' -1 "$*" >>"$RUN/launcher.log" || true
}


# ---------------------------------------------------------------- the agent's command line

# Set AGENT_PREFIX and AGENT_SUFFIX, the command line of the agent before and after torchrun's options.
build_agent_parts() {
  AGENT_PREFIX=("$PYTHON" "$KIT/scripts/lib/agent.py")
  if [[ $AGENT == fast ]]; then
    AGENT_PREFIX+=("${FAST_OPTIONS[@]}")
  else
    AGENT_PREFIX+=(--plain "$PLAIN_AGENT")
  fi
  [[ ! $RENDEZVOUS_TIMEOUT ]] || AGENT_PREFIX+=(--rdzv-conf "timeout=$RENDEZVOUS_TIMEOUT")
  # Without the --, torchrun would parse the script's arguments as abbreviated options.
  AGENT_SUFFIX=(--tee 3 ${MODULE:+-m} -- "${MODULE:-${WORK[0]}}" "${CONFIG_ARGS[@]}" "${SCRIPT_ARGS[@]}")
}


# Set COMMAND to the agent's command line.
build_agent_command() { # <torchrun's options...>
  build_agent_parts
  COMMAND=("${AGENT_PREFIX[@]}" "$@" "${AGENT_SUFFIX[@]}")
}


# Set COMMAND for the node with this node rank.
build_agent_command_on() { # <node rank> <run directory>
  local node=${NODES[$1]}
  build_agent_command --rdzv-id "${2##*/}" --nnodes "${#NODES[@]}" --node-rank "$1" \
    --nproc-per-node "${NPROC_OF[$node]}" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    --log-dir "$2/ranks/$node"
}


# For --dry-run.
print_command() {
  printf '%s: %s\n' "${NODES[0]}" "$(masked_command "${COMMAND[@]}")"
}


# For --dry-run.
print_agent_commands() {
  local rank
  MASTER_ADDR=${NODES[0]} MASTER_PORT=${MASTER_PORT:-<a free port of ${NODES[0]}>}
  for rank in "${!NODES[@]}"; do
    build_agent_command_on "$rank" "$LOG_DIR/<run>"
    printf '%s: %s\n' "${NODES[rank]}" "$(masked_command "${COMMAND[@]}")"
  done
}


# Start this launcher again without --detach and without a terminal, and return when it has made its run directory.
detach() {
  local command=() argument out child directory
  set_compare_arguments
  [[ ! $REPLIES ]] || kit_python launch.open_run "${COMPARE[@]}" >/dev/null || exit # refuse unfit nodes here
  for argument in "${CALL[@]:0:${#CALL[@]}-${#SCRIPT_ARGS[@]}}"; do
    [[ $argument == --detach ]] || command+=("$argument")
  done
  { mkdir -p -- "$LOG_DIR" && out=$(mktemp -- "$LOG_DIR/detached-XXXXXX.log"); } 2>/dev/null ||
    die "--log-dir '$LOG_DIR': cannot be written (in $PWD); choose another directory"
  make_temporary_directory directory
  (exec_in_environment 1 MUSTER_RUN_FILE="$directory/run" setsid "${command[@]}" "${SCRIPT_ARGS[@]}" \
    </dev/null >"$out" 2>&1) &
  child=$!
  until [[ -s $directory/run ]] || ! kill -0 "$child" 2>/dev/null; do
    sleep 0.05
  done
  RUN=$(cat -- "$directory/run" 2>/dev/null || true)
  rm -rf -- "$directory"
  [[ $RUN ]] || { cat -- "$out" >&2 && wait "$child"; }
  log "run ${RUN##*/} started in the background, process $child: output in $(absolute "$out");" \
    "to see its state: $(quote "$KIT/scripts/status.sh" "$RUN"); to stop it: $(quote "$KIT/scripts/stop.sh" "$RUN")"
}
