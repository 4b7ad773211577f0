# shellcheck shell=bash
#
# All nodes through one pdsh: one client for all of them, in place of one ssh each.
#
# Sourced behind nodes.bash and ssh.bash, never run. pdsh gives all nodes the same command, and only the position of each
# in the list; so the command holds what differs as a table. It gives them an open standard input for as long as it
# lives, through which nothing comes: its end is the end of the control channel, but requests and the environment go
# over ssh.

need_pdsh() {
  type -P pdsh >/dev/null || die "there is no pdsh on this machine: install it, or use launch_torchrun_auto.sh"
}


start_by_pdsh() {
  name_supervisor
  send_environment
  start_client pdsh run_pdsh
}


# To a file of each node that nobody else can read. Its supervisor removes it.
send_environment() {
  local node sending=()
  for node in "${NODES[@]}"; do
    line_on_node "$node" "mkdir -p -- $(quote "$RUN") && umask 077 && cat >$(quote "$RUN/node_$node.environment")" \
      < <(environment_block) &
    sending+=($!)
  done
  wait "${sending[@]}" || true # the supervisor of a node without the file reports that
}


# Runs until all nodes have ended. Requests come on standard input; its end means that the launcher is gone.
run_pdsh() {
  local pdsh status=0 errors reader
  trap '' INT TERM HUP TSTP # it carries the nodes' last output, whatever ends the launcher
  exec 3<&0
  pipe_into errors read_errors
  reader=$!
  PDSH_RCMD_TYPE=${PDSH_RCMD_TYPE:-ssh} PDSH_SSH_ARGS_APPEND="${SSH_OPTIONS[*]}" \
    pdsh -S -N -f "${#NODES[@]}" -w "$(all_addresses)" "$(for_any_shell "$(line_for_all)") %n" \
    </dev/null 2>&"$errors" 3<&- {errors}>&- &
  pdsh=$!
  exec {errors}>&-
  forward_requests "$pdsh" <&3 &
  join "$pdsh" || status=$?
  { kill -KILL $! && wait $!; } 2>/dev/null || true
  wait "$reader" || true
  return $((status == 255 ? EXIT_UNFIT : status))
}


# pdsh's standard error, which shows how nodes ended; the first failure stops the others. What pdsh prints about Ctrl-C
# is left out: that is not for it to handle.
read_errors() {
  local line first='' stopping='' pid
  while IFS= read -r line; do
    [[ ! $line =~ ^pdsh@.*(interrupt|\^Z|command in progress) ]] || continue
    printf '%s\n' "$line" >&2 || true
    [[ $line =~ ^pdsh@[^:]*:\ ([^:]+):\ ssh\ exited\ with\ exit\ code\ ([0-9]+)$ ]] || continue
    if ((BASH_REMATCH[2] == 255)) && [[ ! -e $RUN/node_${BASH_REMATCH[1]}.exit ]]; then
      lost "${BASH_REMATCH[1]}"
    fi
    ((BASH_REMATCH[2] == EXIT_STOPPED)) || first=${first:-now}
    if [[ $first == now ]]; then
      first=requested
      pipe_into stopping stop_all
      pid=$!
    fi
  done
  if [[ $stopping ]]; then
    exec {stopping}>&-
    wait "$pid" || true
  fi
  ((${#CLEARING[@]} == 0)) || wait "${CLEARING[@]}" || true
}


# SIGKILL for those that have not ended in time. When all have, which is the end of standard input, no request may be
# left on its way: it would reach the next attempt.
stop_all() {
  local status=0
  request_all stop
  read -r -t "$HURRY" _ || status=$?
  ((status <= 128)) || request_all kill
}


forward_requests() { # <process id of pdsh>
  local request
  while read -r request; do
    request_all "$request"
  done
  kill -KILL "$1"
}


request_all() { # <stop or kill>
  # shellcheck disable=SC2034 # call_ssh reads it
  local node requests=() ANSWER_WITHIN=5
  for node in "${NODES[@]}"; do
    if [[ ! -e $RUN/node_$node.lost ]]; then
      on_node "$node" "${SUPERVISOR[@]}" "$1" --dir "$RUN" --name "$node" </dev/null &
      requests+=($!)
    fi
  done
  ((${#requests[@]} == 0)) || wait "${requests[@]}" || true
}


all_addresses() {
  local node addresses=()
  for node in "${NODES[@]}"; do
    addresses+=("${ADDRESS[$node]}")
  done
  (IFS=, && printf '%s\n' "${addresses[*]}")
}


# The line that each node runs; its node rank comes behind it, as $3.
line_for_all() {
  local node counts=()
  for node in "${NODES[@]}"; do
    counts+=("${NPROC[$node]}")
  done
  agent_words
  # shellcheck disable=SC2016 # it is for the other side
  printf '%s' \
    "nodes=($(quote "${NODES[@]}")) nprocs=(${counts[*]}); node=\${nodes[\$3]}; " \
    "cd -- $(quote "$PWD") || exit $EXIT_UNFIT; " \
    "exec $(quote "${SUPERVISOR[@]}" run --dir "$RUN" --grace "$GRACE" --source "$(node_env)" --sample-usage) --name \"\$node\" " \
    "--environment $(quote "$RUN/node_")\"\$node\".environment -- " \
    "$(quote "${AGENT_WORDS[@]}" --rdzv-id "${RUN##*/}" --nnodes "${#NODES[@]}" --master-addr "$MASTER_ADDR") " \
    "--master-port $MASTER_PORT " \
    "--node-rank \"\$3\" --nproc-per-node \"\${nprocs[\$3]}\" --log-dir $(quote "$RUN/ranks/")\"\$node\" " \
    "$(quote "${SCRIPT_WORDS[@]}")"
}
