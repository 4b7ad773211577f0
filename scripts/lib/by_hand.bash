# shellcheck shell=bash
#
# One node of several, each of which a person starts by hand with the same arguments and another NODE_RANK. The agents
# find each other at MASTER_ADDR, and report their end to each other.
#
# Sourced, never run; it needs options.bash, nodes.bash and launch.bash.

# shellcheck disable=SC2034,SC2153 # other files read and set what stands here
NNODES='' NODE_RANK=''


# CONFIG NPROC NNODES NODE_RANK MASTER_ADDR [MASTER_PORT]
parse_node_arguments() {
  local port
  ((${#POSITIONAL[@]} == 5 || ${#POSITIONAL[@]} == 6)) ||
    die_usage "expected CONFIG, NPROC, NNODES, NODE_RANK, MASTER_ADDR and perhaps MASTER_PORT, got:" \
      "$(quote "${POSITIONAL[@]:-nothing}") (arguments of the script go after --)"
  CONFIG=${POSITIONAL[0]} NPROC=${POSITIONAL[1]} NNODES=${POSITIONAL[2]} NODE_RANK=${POSITIONAL[3]}
  MASTER_ADDR=${POSITIONAL[4]} port=${POSITIONAL[5]-}
  is_nproc "$NPROC" || die_usage "NPROC: expected a number of processes from 1 to $MAX_NPROC, got '$NPROC'"
  { is_count "$NNODES" && ((NNODES >= 1)); } || die_usage "NNODES: expected a number of nodes, 1 or more, got '$NNODES'"
  { is_count "$NODE_RANK" && ((NODE_RANK < NNODES)); } ||
    die_usage "NODE_RANK: with NNODES $NNODES, expected a number from 0 to $((NNODES - 1)), got '$NODE_RANK'"
  [[ ! $port || ! $MASTER_PORT ]] || die_usage "MASTER_PORT $port and --master-port $MASTER_PORT: give one of the two"
  MASTER_PORT=${port:-$MASTER_PORT}
  use_port_from_environment
  MASTER_PORT=${MASTER_PORT:-29500}
  is_port "$MASTER_PORT" || die_usage "MASTER_PORT '$MASTER_PORT': a port is a number from 1 to 65535"
  add_node "$(uname -n)" "$NPROC"
  FIRST_RANK=$((NODE_RANK * NPROC)) # as good as can be known from here
  # Ranks elsewhere, which cannot be seen from here, may be why those of this node wait.
  ((NNODES == 1)) || HANG_TIMEOUT=${HANG_TIMEOUT:-0}
}


# The first node may know itself by an address at which no other would find it.
check_manual_call() {
  local checks=(--torch --ranks 1) # other nodes may have another NPROC: whether the batch divides is for the ranks to say
  if ((PREFLIGHT)); then
    checks+=(--gpus "$NPROC")
    ((NNODES == 1)) || checks+=("--master=$MASTER_ADDR" --node-rank "$NODE_RANK")
    ((NNODES == 1 || NODE_RANK)) || checks+=(--port "$MASTER_PORT")
  fi
  check_call "${checks[@]}"
}


# The agent's command line, in COMMAND.
build_manual_agent_command() { # <run directory>
  build_agent_command --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --log-dir "$1/ranks/${NODES[0]}"
}
