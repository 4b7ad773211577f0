# shellcheck shell=bash
#
# All nodes through one pdsh: one client for all of them, in place of one ssh each.
#
# Sourced behind nodes.bash and ssh.bash, never run. pdsh gives all nodes the same words, and only says to each at which
# place of the list it stands; so the words hold what differs as a table. It gives them an open standard input for as
# long as it lives, and nothing comes through: that is their dead man's switch, but orders go over ssh.

need_pdsh() {
  type -P pdsh >/dev/null || die "there is no pdsh on this machine: install it, or use launch_torchrun_auto.sh"
}


start_by_pdsh() {
  start_client pdsh "${NODES[0]}" run_pdsh
}


# Runs until all nodes have ended. Orders come on standard input; its end means that the launcher is gone.
run_pdsh() {
  local pdsh status=0
  trap '' INT TERM HUP TSTP # it carries the nodes' last words, whatever ends us
  exec 3<&0
  PDSH_RCMD_TYPE=${PDSH_RCMD_TYPE:-ssh} PDSH_SSH_ARGS_APPEND="${SSH_OPTIONS[*]}" \
    pdsh -S -N -f "${#NODES[@]}" -w "$(all_addresses)" "$(for_any_shell "$(line_for_all)") %n" \
    </dev/null 2> >(hear_pdsh) 3<&- &
  pdsh=$!
  hand_on_orders "$pdsh" <&3 &
  join "$pdsh" || status=$?
  kill -KILL $! 2>/dev/null || true
  return $((status == 255 ? EXIT_UNFIT : status))
}


# What pdsh says itself: how nodes ended, the first badly of which ends the others. What it thinks of Ctrl-C is not
# passed on: that is not for it to handle.
hear_pdsh() {
  local line first=''
  while IFS= read -r line; do
    [[ ! $line =~ ^pdsh@.*(interrupt|\^Z|command in progress) ]] || continue
    printf '%s\n' "$line" >&2
    [[ $line =~ ^pdsh@[^:]*:\ ([^:]+):\ ssh\ exited\ with\ exit\ code\ ([0-9]+)$ ]] || continue
    ((BASH_REMATCH[2] != 255)) || lost "${BASH_REMATCH[1]}"
    ((BASH_REMATCH[2] == EXIT_STOPPED)) || first=${first:-now}
    if [[ $first == now ]]; then
      first=told
      end_all &
    fi
  done
}


# Agents of the kit have ended by themselves before that.
end_all() {
  order_all stop
  read -r -t "$HURRY" <> <(:) || true # sleeps without a child that would outlive us: nobody writes there
  order_all kill
}


hand_on_orders() { # <process id of pdsh>
  local order
  while read -r order; do
    order_all "$order"
  done
  kill -KILL "$1"
}


order_all() { # <stop or kill>
  local node
  for node in "${NODES[@]}"; do
    [[ -e $RUN/node_$node.lost ]] ||
      on_node "$node" "$KIT/scripts/lib/node.sh" --order "$1" --run "$RUN" --node "$node" </dev/null &
  done
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
    "exec $(quote "$KIT/scripts/lib/node.sh" --run "$RUN" --grace "$GRACE" --source "$(node_env)") --node \"\$node\" -- " \
    "$(quote "${AGENT_WORDS[@]}" --nnodes "${#NODES[@]}" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT") " \
    "--node-rank \"\$3\" --nproc-per-node \"\${nprocs[\$3]}\" --log-dir $(quote "$RUN/ranks/")\"\$node\" " \
    "$(quote "${SCRIPT_WORDS[@]}")"
}
