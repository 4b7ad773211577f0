# shellcheck shell=bash
#
# Several nodes at once, over ssh: which they are, whether they are fit, and what each of them runs.
#
# Sourced behind launcher.bash and ssh.bash, never run. A launcher on several nodes is one call:
#
#   launch_on_nodes FUNCTION-THAT-LOOKS-FOR-TOOLS FUNCTION-THAT-STARTS-THEM "$@"

# shellcheck source=scripts/lib/ask.bash
source "$KIT/scripts/lib/ask.bash"

NODES=()              # names, by node rank
# shellcheck disable=SC2034 # ssh.bash calls by it
declare -A ADDRESS=() # of each node: [user@]name, as ssh is to be called
declare -A NPROC=()   # of each node: how many processes
RANKS=0               # of all
MASTER_ADDR=''


# Set NODES, NPROC and RANKS from words of the node grammar, or from --hostfile.
name_nodes() { # <processes on a node that does not say so itself> [node...]
  local options=() lines line name
  [[ ! $HOSTFILE ]] || options+=(--hostfile "$(absolute "$HOSTFILE")")
  [[ ! $EXCLUDE ]] || options+=(--exclude "$EXCLUDE")
  lines=$(kit_python nodelist "${options[@]}" -- "${@:2}") || exit "$EXIT_USAGE"
  while read -r line; do
    name=${line#*@} name=${name%:*}
    NODES+=("$name")
    # shellcheck disable=SC2034
    ADDRESS[$name]=${line%:*}
    NPROC[$name]=$1
    [[ $line != *:* ]] || NPROC[$name]=${line##*:}
    PLACES+=("${ADDRESS[$name]}:${NPROC[$name]}")
    RANKS=$((RANKS + NPROC[$name]))
  done <<<"$lines"
  ENVIRONMENT+=("MUSTER_NODES=${NODES[*]}") # for the agents, who can then call each other by name
}


# ---------------------------------------------------------------- are they fit?

# Ask all nodes at once; refuse them with one line for each fault, or set MASTER_ADDR and MASTER_PORT.
check_nodes() {
  ANSWERS=$(mktemp -d "$SOCKETS/answers-XXXXXX") # goes when the connections go
  local node files=("${CONFIG_ARGS[@]:1}") words=() meeting
  [[ $MODULE ]] || files+=("$SCRIPT_FILE")
  module_as_ranks host.probe --port "${MASTER_PORT:-0}" "${files[@]/#/--file=}" -- "${NODES[@]}"
  ask_nodes "$ANSWERS" "${COMMAND[@]}"
  for node in "${NODES[@]}"; do
    words+=("$node:${NPROC[$node]}")
  done
  meeting=$(kit_python launch.preflight --port "${MASTER_PORT:-0}" "$ANSWERS" "${words[@]}") || exit
  read -r MASTER_ADDR MASTER_PORT <<<"$meeting"
}


# Where the ranks meet, in MASTER_ADDR and MASTER_PORT.
find_meeting_point() {
  if ((PREFLIGHT)); then
    check_nodes
  else
    MASTER_ADDR=${NODES[0]} MASTER_PORT=${MASTER_PORT:-29500}
  fi
}


# ---------------------------------------------------------------- what runs there

# The agent's words on one of the nodes, in COMMAND. Static rendezvous: node ranks are as the nodes were given.
agent_on() { # <node rank> <folder of the run>
  local node=${NODES[$1]}
  agent_command --rdzv-id "${2##*/}" --nnodes "${#NODES[@]}" --node-rank "$1" --nproc-per-node "${NPROC[$node]}" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --log-dir "$2/ranks/$node"
}


need_ssh() {
  type -P ssh >/dev/null || die "there is no ssh on this machine: install OpenSSH's client"
}


start_by_ssh() {
  local rank
  for rank in "${!NODES[@]}"; do
    agent_on "$rank" "$RUN"
    start_node "${NODES[rank]}" "${COMMAND[@]}"
  done
}


show_commands() {
  local rank
  for rank in "${!NODES[@]}"; do
    agent_on "$rank" "$LOG_DIR/<run>"
    printf '%s: %s\n' "${NODES[rank]}" "$(shown "${COMMAND[@]}")"
  done
}


# ---------------------------------------------------------------- the whole of a launch

parse_args() { # <word...>
  parse_options "$@"
  local least=3
  [[ ! $HOSTFILE ]] || least=2
  ((${#POSITIONAL[@]} >= least)) ||
    die_usage "expected CONFIG, NPROC and NODE..., got: $(quote "${POSITIONAL[@]:-nothing}")"
  CONFIG=${POSITIONAL[0]}
  is_nproc "${POSITIONAL[1]}" ||
    die_usage "NPROC: expected a number of processes from 1 to $MAX_NPROC, got '${POSITIONAL[1]}'"
}


check() {
  pick_rank_python
  name_nodes "${POSITIONAL[@]:1}"
  check_script
  check_config "$CONFIG" "$RANKS"
}


launch_on_nodes() { # <function that looks for tools> <function that starts the nodes> <word...>
  parse_args "${@:3}"
  "$1"
  check
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    MASTER_ADDR=${NODES[0]} MASTER_PORT=${MASTER_PORT:-<a free port of ${NODES[0]}>}
    show_commands
    return
  fi
  open_connections
  ((!SYNC)) || sync_nodes
  find_meeting_point
  if ((DETACH)); then
    detach # what can be refused has been
    return
  fi
  open_run "$RANKS" "${NODES[@]}"
  run_nodes "$2"
  # shellcheck disable=SC2153 # run_nodes sets it
  exit "$CODE"
}
