# shellcheck shell=bash
#
# Start all nodes with one pdsh: one client for all nodes instead of one per node.
#
# Sourced, never run; it needs nodes.bash, ssh.bash, launch.bash and watch.bash. pdsh runs the same command on all nodes
# and passes each node its position in the list, so values that differ between nodes are passed as lists. pdsh keeps the
# standard input of the nodes open without writing to it; when pdsh exits, their control channels close. Requests and
# the environment are sent over ssh.

# shellcheck disable=SC2034,SC2153 # other files use these variables
require_pdsh() {
  type -P pdsh >/dev/null || die "pdsh: not found on this machine; install it, or use launch_torchrun_auto.sh"
}


pdsh_start_nodes() {
  local node
  set_supervisor
  build_agent_parts
  for node in "${NODES[@]}"; do
    REACHED_BY["$node"]=ssh_run
  done
  start_client pdsh run_pdsh
}


# Write the environment to a file of mode 0600 on each node. The supervisor removes it. If the login shell of a node
# does not start that command, it would not start the supervisor either: then the files are removed, and this fails.
pdsh_send_environment() {
  local node status sending=() sent=() START_LOG
  for node in "${NODES[@]}"; do
    START_LOG=$RUN/node_$node.log
    ssh_call_function "$node" remote_store_environment "$RUN" "$RUN/node_$node.environment" < <(environment_block) &
    sending+=($!)
  done
  for node in "${!sending[@]}"; do
    wait "${sending[node]}" && status=0 || status=$? # the supervisor of a node without the file reports that
    if ((status == EXIT_UNFIT)); then
      printf '%s\n' "$status" >"$RUN/node_${NODES[node]}.exit"
    else
      sent+=("${NODES[node]}")
    fi
  done
  ((${#sent[@]} < ${#NODES[@]})) || return 0
  for node in "${sent[@]}"; do
    ssh_run "$node" rm -f -- "$RUN/node_$node.environment" </dev/null &
  done
  wait
  return 1
}


remote_store_environment() { # <run directory> <file>
  mkdir -p -- "$1" && umask 077 && cat >"$2"
}


# Run pdsh until all nodes have ended. Requests are read from standard input; end of file means that the launcher has
# exited.
run_pdsh() {
  local pdsh status=0 errors reader node addresses=() counts=() supervisor arguments lines
  ignore_signals # pdsh must survive signals to the launcher, to forward the nodes' last output
  pdsh_send_environment </dev/null || return "$EXIT_UNFIT"
  exec 3<&0
  start_with_pipe errors read_errors
  reader=$!
  for node in "${NODES[@]}"; do
    addresses+=("${ADDRESS[$node]}") counts+=("${NPROC_OF[$node]}")
  done
  supervisor=("${SUPERVISOR[@]}" run --dir "$RUN" --grace "$GRACE" --source "$(node_env)" --sample-usage)
  arguments=("$PWD" "$RUN" "$MASTER_ADDR" "$MASTER_PORT" "${#NODES[@]}" "${NODES[@]}" "${counts[@]}"
    "${#supervisor[@]}" "${supervisor[@]}" "${#AGENT_PREFIX[@]}" "${AGENT_PREFIX[@]}" "${AGENT_SUFFIX[@]}")
  lines=$(declare -f remote_supervise && echo "remote_supervise \"\$3\" $(quote "${arguments[@]}")")
  PDSH_RCMD_TYPE=${PDSH_RCMD_TYPE:-ssh} PDSH_SSH_ARGS_APPEND="${SSH_OPTIONS[*]}" exec_with_removed \
    pdsh -S -N -f "${#NODES[@]}" -w "$(IFS=, && printf '%s' "${addresses[*]}")" "$(quote_for_any_shell "$lines") %n" \
    </dev/null 2>&"$errors" 3<&- {errors}>&- &
  pdsh=$!
  exec {errors}>&-
  forward_requests "$pdsh" <&3 &
  join "$pdsh" || status=$?
  { kill -KILL $! && wait $!; } 2>/dev/null || true
  wait "$reader" || true
  return $((status == 255 ? EXIT_UNFIT : status))
}


# Replace this process by the supervisor of the agent. The nodes are preceded by their number, the
# supervisor and the agent by their lengths.
remote_supervise() { # <node rank> <working directory> <run directory> <master address> <port> <nodes...> <processes...>
  #                   <supervisor...> <agent...> <script...>
  local rank=$1 directory=$2 run=$3 address=$4 port=$5 nodes counts supervisor agent
  shift 5
  nodes=("${@:2:$1}") counts=("${@:$1+2:$1}")
  shift $(($1 * 2 + 1))
  supervisor=("${@:2:$1}")
  shift $(($1 + 1))
  agent=("${@:2:$1}")
  shift $(($1 + 1))
  cd -- "$directory" || exit 69
  exec "${supervisor[@]}" --name "${nodes[rank]}" --environment "$run/node_${nodes[rank]}.environment" -- \
    "${agent[@]}" --rdzv-id "${run##*/}" --nnodes "${#nodes[@]}" --node-rank "$rank" \
    --nproc-per-node "${counts[rank]}" --master-addr "$address" --master-port "$port" \
    --log-dir "$run/ranks/${nodes[rank]}" "$@"
}


# Read the exit codes of the nodes from pdsh's standard error, which also carries that of the nodes; the first failure
# stops the other nodes. Lines of pdsh about Ctrl-C, which the launcher handles, are dropped.
read_errors() {
  local line first='' stopping='' pid
  while IFS= read -r line; do
    if [[ $line != pdsh@* ]]; then # of a node, which may print many; matching them with =~ takes three times as long
      printf '%s\n' "$line" >&2 || true
      continue
    fi
    [[ ! $line =~ ^pdsh@.*(interrupt|\^Z|command in progress) ]] || continue
    printf '%s\n' "$line" >&2 || true
    [[ $line =~ ^pdsh@[^:]*:\ ([^:]+):\ ssh\ exited\ with\ exit\ code\ ([0-9]+)$ ]] || continue
    if ((BASH_REMATCH[2] == 255)) && [[ ! -e $RUN/node_${BASH_REMATCH[1]}.exit ]]; then
      handle_lost_node "${BASH_REMATCH[1]}"
    fi
    ((BASH_REMATCH[2] == EXIT_STOPPED)) || first=${first:-now}
    if [[ $first == now ]]; then
      first=requested
      start_with_pipe stopping stop_all
      pid=$!
    fi
  done
  if [[ $stopping ]]; then
    exec {stopping}>&-
    wait "$pid" || true
  fi
  ((${#SWEEPS[@]} == 0)) || wait "${SWEEPS[@]}" || true
}


# Send a stop request, and a kill request after STOP_TIMEOUT, unless standard input ends first: then all nodes have
# ended. The caller waits for this process, because a late request would reach the next attempt.
stop_all() {
  local status=0
  send_request_to_all stop
  read -r -t "$STOP_TIMEOUT" _ || status=$?
  ((status <= 128)) || send_request_to_all kill
}


forward_requests() { # <process id of pdsh>
  local request
  while read -r -a request; do
    send_request_to_all "${request[@]}"
  done
  kill -KILL "$1"
}


send_request_to_all() { # <stop, kill or signal N>
  local node requests=() REPLY_TIMEOUT=5
  [[ $1 != signal ]] || REPLY_TIMEOUT=30 # a stop request is repeated, a signal is not
  for node in "${NODES[@]}"; do
    if [[ ! -e $RUN/node_$node.lost ]]; then
      ssh_run "$node" "${SUPERVISOR[@]}" "$@" --dir "$RUN" --name "$node" </dev/null &
      requests+=($!)
    fi
  done
  ((${#requests[@]} == 0)) || wait "${requests[@]}" || true
}
