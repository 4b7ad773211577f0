# shellcheck shell=bash
#
# One node of a launch that is started by hand on each node, with the same arguments except NODE_RANK. The agents
# connect to each other at MASTER_ADDR and exchange their exit codes.
#
# Sourced, never run; it needs options.bash and launch.bash.

# shellcheck disable=SC2034,SC2153 # other files use these variables
NNODES='' NODE_RANK=''


parse_node_arguments() {
  local port
  ((${#POSITIONAL[@]} == 5 || ${#POSITIONAL[@]} == 6)) ||
    die_usage "expected CONFIG NPROC NNODES NODE_RANK MASTER_ADDR [MASTER_PORT], got:" \
      "$(quote "${POSITIONAL[@]:-nothing}") (arguments of your script go after --)"
  CONFIG=${POSITIONAL[0]} NPROC=${POSITIONAL[1]} NNODES=${POSITIONAL[2]} NODE_RANK=${POSITIONAL[3]}
  MASTER_ADDR=${POSITIONAL[4]} port=${POSITIONAL[5]-}
  check_nproc NPROC "$NPROC" or_kind
  { is_count "$NNODES" && ((NNODES >= 1)); } || die_usage "NNODES: expected a number of nodes, 1 or more, got '$NNODES'"
  { is_count "$NODE_RANK" && ((NODE_RANK < NNODES)); } ||
    die_usage "NODE_RANK: with NNODES $NNODES, expected a number from 0 to $((NNODES - 1)), got '$NODE_RANK'"
  [[ ! $port || ! $MASTER_PORT ]] ||
    die_usage "MASTER_PORT $port and --master-port $MASTER_PORT cannot be combined; give one of the two"
  MASTER_PORT=${port:-$MASTER_PORT}
  use_port_from_environment
  MASTER_PORT=${MASTER_PORT:-29500}
  is_port "$MASTER_PORT" || die_usage "MASTER_PORT: expected a port from 1 to 65535, got '$MASTER_PORT'"
  count_processes_here
  add_node "$(uname -n)" "$NPROC"
}


check_manual_call() {
  local checks=(--torch --ranks 1) # the world size is unknown, as other nodes may have another NPROC
  if ((PREFLIGHT)); then
    checks+=(--gpus "$NPROC")
    ((NNODES == 1)) || checks+=("--master=$MASTER_ADDR" --node-rank "$NODE_RANK")
    ((NNODES == 1 || NODE_RANK)) || checks+=(--port "$MASTER_PORT")
  fi
  check_call "${checks[@]}"
}


# Run the agent of this node.
run_this_node() {
  set -- --first-rank $((NODE_RANK * NPROC)) # assumes the same NPROC on all nodes
  build_agent_command --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"
  # --part: ranks of this node may wait for ranks that other launchers started and that this launcher cannot inspect.
  ((NNODES == 1)) || set -- "$@" --part "--announce=$(announcement)"
  run_nodes local "$@"
}


# Print which nodes this node waits for, and where its output is.
announcement() {
  local others="node rank 1"
  ((NNODES == 2)) || others="node ranks 1 to $((NNODES - 1))"
  if ((NODE_RANK == 0)); then
    echo "waiting at $MASTER_ADDR:$MASTER_PORT for $others: run the same command on each, with its own NODE_RANK"
  else
    echo "joining the first node at $MASTER_ADDR:$MASTER_PORT, where rank 0 prints its output;" \
      "to follow the output of this node: tail -f {log}"
  fi
}
