# shellcheck shell=bash
#
# Check over ssh that every node can connect to every other; distributed.launch.connectivity compares the results.
#
# Sourced, never run; it needs nodes.bash and ssh.bash.

# shellcheck disable=SC2153 # other files use these variables

# The results are in DIRECTORY/connecting, the addresses of the listeners in DIRECTORY/listening.
connect_all_pairs() { # <new directory>
  local addresses
  mkdir -p -- "$1/listening" "$1/connecting"
  start_listeners "$1/listening"
  mapfile -t addresses < <(kit_python launch.connectivity addresses "$1/listening" "${NODES[@]}")
  build_module_command launch.connectivity try "${addresses[@]}"
  run_on_nodes "$1/connecting" ssh_probe "$(remote_command_line "${COMMAND[@]}")"
  exec {LISTENING}>&- # the listeners read end of file and exit
  wait
}


# Start a listener on each node, and wait until each has printed its address or has exited.
start_listeners() { # <directory for the replies>
  local node command
  mkfifo -- "$1/until"
  build_module_command launch.connectivity listen "${NODES[@]}"
  command=$(remote_command_line "${COMMAND[@]}")
  for node in "${NODES[@]}"; do
    run_on_node "$1" "$node" ssh_run_line "$command" < <(environment_block && exec cat -- "$1/until") &
  done
  exec {LISTENING}>"$1/until" # opened after the forks, so that no child holds the writing end
  for node in "${NODES[@]}"; do
    until [[ -e $1/$node.code ]] || grep -qs '^muster-reply ' "$1/$node.out"; do
      read -r -t 0.05 <> <(:) || true
    done
  done
}
