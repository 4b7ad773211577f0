# shellcheck shell=bash
#
# The steps that all launches share: is it a call that can work, the run directory, the agent's command line.
#
# Sourced, never run; it needs options.bash and nodes.bash. The nodes are started by ssh.bash, pdsh.bash, slurm.bash or
# watch.bash alone, and watch.bash waits for them.

# shellcheck disable=SC2034 # other files read and set what stands here
WORK=()                  # what each rank runs: a script, or -m and a module
SCRIPT_FILE=''           # the file of --script that Python begins with
PROGRAM_IS_LOCAL=1           # whether the Python of the ranks, and what it imports, can be looked at from here
CONFIG_ARGS=()           # --config CONFIG, or nothing
MASTER_ADDR=''           # where the ranks meet, with MASTER_PORT
FIRST_RANK=0             # the lowest rank of the first of NODES
PLAIN_AGENT=torch.distributed.run # with --agent torchrun
FAST_OPTIONS=()          # of the kit's own agent
REPLIES=''               # directory with what nodes replied to the preflight
EARLIER_RUN=''           # directory of the same run before SLURM started the job anew
SLURM_JOB=()             # number of the job that this launch is in, and its name as an element of an array


# ---------------------------------------------------------------- is it a call that can work?

# Pick the Python of the ranks, and say which one where the user may expect another. check_call finds out whether it
# works.
pick_rank_python() {
  local number line=''
  resolve_python "$PYTHON_OPTION"
  ((${#PYTHONS[@]} >= 2)) || return 0
  for ((number = 1; number < ${#PYTHONS[@]}; number++)); do
    line+="${line:+, }${PYTHONS[number]} (${PYTHON_ORIGINS[number]})"
  done
  log "Python: $PYTHON (${PYTHON_ORIGINS[0]}), not $line; --python names another"
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
  [[ -e ${WORK[0]} ]] || die_usage "--script '$SCRIPT': there is no such file (looked in $PWD)"
  [[ -e $SCRIPT_FILE ]] || die_usage "--script '$SCRIPT': a directory without a __main__.py"
  [[ -f $SCRIPT_FILE && -r $SCRIPT_FILE ]] || die_usage "--script '$SCRIPT': cannot be read as a file"
}


# CONFIG reaches the script as --config CONFIG; - passes nothing.
check_config() {
  [[ $CONFIG != - ]] || return 0
  [[ -e $CONFIG ]] || die_usage "CONFIG '$CONFIG': there is no such file (looked in $PWD); - stands for none"
  [[ -f $CONFIG && -r $CONFIG ]] || die_usage "CONFIG '$CONFIG': cannot be read as a file"
  CONFIG_ARGS=(--config "$CONFIG")
}


# CONFIG NPROC NODE...
parse_config_nproc_nodes() {
  local least=3
  [[ ! $HOSTFILE ]] || least=2
  ((${#POSITIONAL[@]} >= least)) ||
    die_usage "expected CONFIG, NPROC and NODE..., got: $(quote "${POSITIONAL[@]:-nothing}")"
  CONFIG=${POSITIONAL[0]} NPROC=${POSITIONAL[1]}
  is_nproc "$NPROC" || die_usage "NPROC: expected a number of processes from 1 to $MAX_NPROC, got '$NPROC'"
}


# All that Python must find out before anything is started, in one process: see scripts/lib/check_call.py.
check_call() { # <question of check_call.py...>
  is_count "$GRACE" || die_usage "MUSTER_GRACE: expected a whole number of seconds, got '$GRACE'"
  pick_rank_python
  check_script
  check_config
  if ((PROGRAM_IS_LOCAL)); then
    [[ ! $MODULE ]] || set -- "--module=$MODULE" "$@"
    # What the kit's own trainer will read is checked to the last key.
    [[ ! ${CONFIG_ARGS[*]-} || $MODULE || $SCRIPT ]] || set -- "--config=$CONFIG" "$@"
  fi
  run_checks "$@"
}


# The same, and set the nodes.
check_call_on_nodes() { # <node...>
  set_node_checks "$NPROC" "$@"
  check_call "${CHECKS[@]}"
  ENVIRONMENT+=("MUSTER_NODES=${NODES[*]}") # for the agents, which can then name each other
}


# In CHECKS, what lets check_call.py read names of nodes, --hostfile and --exclude.
set_node_checks() { # <processes on a node that does not say so itself> <node...>
  local names=("${@:2}")
  CHECKS=(--nodes "$1" ${HOSTFILE:+"--hostfile=$HOSTFILE"} ${EXCLUDE:+"--exclude=$EXCLUDE"} "${names[@]/#/--node=}")
}


# Ask check_call.py, and take its facts: the nodes, MASTER_ADDR, MASTER_PORT, what SLURM has allocated. Refuses a call
# that cannot work.
run_checks() { # <question...>
  local facts status=0 name value processes
  facts=$(trap '' INT && exec_in_environment "${#ENVIRONMENT[@]}" "${ENVIRONMENT[@]}" \
    "$PYTHON" "$KIT/scripts/lib/check_call.py" "$@" -- "${SCRIPT_ARGS[@]}") || status=$?
  while read -r name value processes; do
    case $name in
      node) add_node "${value#*@}" "$processes" "$value" ;;
      master) MASTER_ADDR=$value ;;
      port) MASTER_PORT=${MASTER_PORT:-$value} ;;
      cores-per-rank) CORES_PER_RANK=$value ;;
      cores-per-node) CORES_PER_NODE=$value ;;
      warning) warn "$value $processes" ;;
      usage) die_usage "$value $processes" ;;
      unfit) die_with "$EXIT_UNFIT" "$value $processes" ;;
      ok) return ;;
    esac
  done <<<"$facts"
  check_python # perhaps that is why
  exit $((status ? status : 1))
}


# ---------------------------------------------------------------- the run directory

# In COMPARE, what lets the replies of the nodes be compared; nothing where they were not asked.
set_compare_arguments() {
  local node
  COMPARE=()
  [[ $REPLIES ]] || return 0
  COMPARE=(compare --port "${MASTER_PORT:-0}" "$REPLIES")
  for node in "${NODES[@]}"; do
    COMPARE+=("$node:${NPROC_OF[$node]}")
  done
}


# Compare the replies, choose where the ranks meet, and make the run directory. Sets RUN, MASTER_ADDR and MASTER_PORT.
open_run() {
  local node opened places=() name=${MODULE:-${WORK[0]}}
  [[ ! -d $name ]] || name=$(cd -- "$name" && pwd)
  name=${name##*/}
  for node in "${NODES[@]}"; do
    [[ ! ${ADDRESS[$node]-} ]] || places+=("${ADDRESS[$node]}:${NPROC_OF[$node]}")
  done
  mask_call
  set_compare_arguments
  opened=$(kit_python launch.open_run "${COMPARE[@]}" \
    create --logs "$(absolute "$LOG_DIR")" --name "${name%.py}" --nproc "$RANKS" \
    --nodes "${NODES[@]}" ${places:+--places "${places[@]}"} --first-rank "$FIRST_RANK" --launcher $$ --grace "$GRACE" \
    ${EARLIER_RUN:+--again "$EARLIER_RUN"} ${SLURM_JOB:+--slurm-job "${SLURM_JOB[@]}"} \
    --script "${MODULE:-${WORK[0]}}" --config "${CONFIG_ARGS[1]:--}" --cwd "$PWD" --python "$PYTHON" \
    -- "${MASKED_CALL[@]}") || exit
  if [[ $REPLIES ]]; then
    read -r MASTER_ADDR MASTER_PORT <<<"${opened%%$'\n'*}"
    opened=${opened#*$'\n'}
  fi
  RUN=$opened
  record "run ${RUN##*/}: $(counted "$RANKS" process processes) on ${NODES[*]}"
  # The caller of a launcher may name a file that gets the path of the run directory.
  [[ ! ${MUSTER_RUN_FILE-} ]] || printf '%s\n' "$RUN" >"$MUSTER_RUN_FILE"
  unset MUSTER_RUN_FILE
}


# The launcher's own command line without the values of --env, in MASKED_CALL.
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


# A command for the eye, without the values of its environment.
masked_command() { # <command...>
  local entry shown=()
  for entry in "${ENVIRONMENT[@]}"; do
    shown+=("$(mask_value "$entry")")
  done
  quote ${shown:+env "${shown[@]}"} "$@"
}


absolute() { # <path>
  [[ $1 == /* ]] && printf '%s\n' "$1" || printf '%s\n' "$PWD/$1"
}


# What happens, for the person and for launcher.log.
record() { # <message...>
  log "$@"
  printf '%(%F %T)T %s\n' -1 "$*" >>"$RUN/launcher.log" || true
}


# ---------------------------------------------------------------- what runs

# In AGENT_PREFIX, what starts the agent; torchrun's options come between these and AGENT_SUFFIX.
build_agent_parts() {
  AGENT_PREFIX=("$PYTHON" "$KIT/scripts/lib/agent.py")
  if [[ $AGENT == fast ]]; then
    AGENT_PREFIX+=("${FAST_OPTIONS[@]}")
  else
    AGENT_PREFIX+=(--plain "$PLAIN_AGENT")
  fi
  [[ ! $RENDEZVOUS_TIMEOUT ]] || AGENT_PREFIX+=(--rdzv-conf "timeout=$RENDEZVOUS_TIMEOUT")
  # The -- keeps torchrun from taking the script's own arguments for (abbreviated) options.
  AGENT_SUFFIX=(--tee 3 ${MODULE:+-m} -- "${MODULE:-${WORK[0]}}" "${CONFIG_ARGS[@]}" "${SCRIPT_ARGS[@]}")
}


# The agent's command line on this machine, in COMMAND.
build_agent_command() { # <torchrun's options...>
  build_agent_parts
  COMMAND=("${AGENT_PREFIX[@]}" "$@" "${AGENT_SUFFIX[@]}")
}


# The same on one of NODES. Static rendezvous: node ranks are as the nodes were given.
build_agent_command_on() { # <node rank> <run directory>
  local node=${NODES[$1]}
  build_agent_command --rdzv-id "${2##*/}" --nnodes "${#NODES[@]}" --node-rank "$1" --nproc-per-node "${NPROC_OF[$node]}" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --log-dir "$2/ranks/$node"
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


# Start this very launcher once more, apart from the terminal, and return when it has a run directory.
detach() {
  local words=() word out child run_file
  set_compare_arguments
  [[ ! $REPLIES ]] || kit_python launch.open_run "${COMPARE[@]}" >/dev/null || exit # what can be refused, is
  for word in "${CALL[@]:0:${#CALL[@]}-${#SCRIPT_ARGS[@]}}"; do
    [[ $word == --detach ]] || words+=("$word")
  done
  mkdir -p -- "$LOG_DIR"
  out=$(mktemp -- "$LOG_DIR/detached-XXXXXX.log")
  run_file=$(mktemp)
  (exec_in_environment 1 MUSTER_RUN_FILE="$run_file" setsid "${words[@]}" "${SCRIPT_ARGS[@]}" </dev/null >"$out" 2>&1) &
  child=$!
  until [[ -s $run_file ]] || ! kill -0 "$child" 2>/dev/null; do
    sleep 0.05
  done
  RUN=$(<"$run_file")
  rm -f -- "$run_file"
  [[ $RUN ]] || { cat -- "$out" >&2 && wait "$child"; }
  log "run ${RUN##*/} goes on in the background, process $child:" \
    "$KIT/scripts/status.sh $(quote "$RUN") shows it, stop.sh stops it, its output is in $out"
}
