# shellcheck shell=bash
#
# One node of several, each of which a person starts by hand with the same words and another NODE_RANK.
#
# Sourced behind launcher.bash, never run. The agents find each other at MASTER_ADDR, and tell each other of their end.


# CONFIG NPROC NNODES NODE_RANK MASTER_ADDR [MASTER_PORT]
parse_args() { # <word...>
  parse_options "$@"
  ((${#POSITIONAL[@]} == 5 || ${#POSITIONAL[@]} == 6)) ||
    die_usage "expected CONFIG, NPROC, NNODES, NODE_RANK, MASTER_ADDR and perhaps MASTER_PORT, got:" \
      "$(quote "${POSITIONAL[@]:-nothing}") (arguments of the script go after --)"
  CONFIG=${POSITIONAL[0]} NPROC=${POSITIONAL[1]} NNODES=${POSITIONAL[2]} NODE_RANK=${POSITIONAL[3]}
  MASTER_ADDR=${POSITIONAL[4]}
  is_nproc "$NPROC" || die_usage "NPROC: expected a number of processes from 1 to $MAX_NPROC, got '$NPROC'"
  { is_count "$NNODES" && ((NNODES >= 1)); } || die_usage "NNODES: expected a number of nodes, 1 or more, got '$NNODES'"
  { is_count "$NODE_RANK" && ((NODE_RANK < NNODES)); } ||
    die_usage "NODE_RANK: with NNODES $NNODES, expected a number from 0 to $((NNODES - 1)), got '$NODE_RANK'"
  take_port "${POSITIONAL[5]-}"
}


take_port() { # [MASTER_PORT]
  [[ ! ${1-} || ! $MASTER_PORT ]] || die_usage "MASTER_PORT $1 and --master-port $MASTER_PORT: give one of the two"
  MASTER_PORT=${1:-$MASTER_PORT}
  take_port_of_environment
  MASTER_PORT=${MASTER_PORT:-29500}
  is_port "$MASTER_PORT" || die_usage "MASTER_PORT '$MASTER_PORT': a port is a number from 1 to 65535"
}


check() {
  pick_rank_python
  check_torch
  check_script
  check_config "$CONFIG" 1 # other nodes may have another NPROC: whether the batch divides is for the ranks to say
  check_gpus "$NPROC"
  check_meeting_point
}


# The first node may know itself by an address at which no other would find it.
check_meeting_point() {
  ((PREFLIGHT && NNODES > 1)) || return 0
  ((NODE_RANK)) || check_port
  MASTER_ADDR=$(kit_python launch.master_address --node-rank "$NODE_RANK" "$MASTER_ADDR") || exit
}


agent_here() { # <folder of the run>
  agent_command --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --log-dir "$1/ranks/$(uname -n)"
}


launch_by_hand() { # <word...>
  parse_args "$@"
  check
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    agent_here "$LOG_DIR/<run>"
    printf '%s: %s\n' "$(uname -n)" "$(shown "${COMMAND[@]}")"
    return
  fi
  if ((DETACH)); then
    detach
    return
  fi
  # Ranks elsewhere, which cannot be seen from here, may be why those of this node wait.
  # shellcheck disable=SC2034 # watch.bash reads it
  ((NNODES == 1)) || HANG_TIMEOUT=${HANG_TIMEOUT:-0}
  # shellcheck disable=SC2034 # open_run writes it down; as good as can be known from here
  FIRST_RANK=$((NODE_RANK * NPROC))
  open_run "$NPROC" "$(uname -n)"
  agent_here "$RUN"
  ((!NODE_RANK)) || log "rank 0 speaks on the first node; what is said here: tail -f $RUN/node_$(uname -n).log"
  run_nodes start_node "$(uname -n)" "${COMMAND[@]}"
  exit "$CODE"
}
