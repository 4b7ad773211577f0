# shellcheck shell=bash
#
# Other nodes, through OpenSSH's own client with the user's own configuration. One connection to each node serves all
# calls of a script:
#
#   open_connections
#   ssh_run NODE COMMAND [ARGUMENT...]
#
# Sourced, never run. nodes.bash has the nodes; a launch over ssh needs launch.bash and watch.bash as well.

# shellcheck disable=SC2034 # other files read and set what stands here
CONNECTIONS_DIR=''       # directory for the sockets of the connections, and for what else must not outlive this script
SSH_OPTIONS=()
REPLY_TIMEOUT='' # seconds after which a command on a node is killed; empty: never


# A directory for each call, short enough for a socket's name (ssh takes 90 bytes, 41 of them its own). ssh_config is
# called by a name in it, as ssh (for ProxyJump), rsync and pdsh take a blank in a path for its end. The directory is
# removed when this script ends; the connections themselves end when nothing has used them for a few seconds.
open_connections() {
  CONNECTIONS_DIR=$(mktemp -d "${XDG_RUNTIME_DIR:-/tmp}/muster-XXXXXX")
  if ((${#CONNECTIONS_DIR} > 45)) || [[ $CONNECTIONS_DIR == *[[:space:]]* ]]; then
    rmdir -- "$CONNECTIONS_DIR"
    CONNECTIONS_DIR=$(mktemp -d /tmp/muster-XXXXXX)
  fi
  ln -s -- "$KIT/scripts/lib/ssh_config" "$CONNECTIONS_DIR/config"
  SSH_OPTIONS=(-F "$CONNECTIONS_DIR/config" -o ControlPath="$CONNECTIONS_DIR/%C")
  start_with_pipe CONNECTIONS remove_when_script_exits "$CONNECTIONS_DIR"
}


# Not by a trap, which SIGKILL would not run; and not in a child, for which `wait` would wait.
remove_when_script_exits() { # <directory>
  remove_at_end_of_input "$1" <&0 >/dev/null 2>&1 &
}


remove_at_end_of_input() { # <directory>
  trap '' INT TERM HUP TSTP
  read -r _ || true
  rm -rf -- "$1"
}


# ---------------------------------------------------------------- one command on one node

# In a session of its own: Ctrl-C is for this script to handle.
ssh_client() { # <ssh's arguments...>
  run_unreported setsid --wait ${REPLY_TIMEOUT:+timeout -s KILL "$REPLY_TIMEOUT"} ssh "${SSH_OPTIONS[@]}" "$@"
}


# Run a command in the working directory of a node, with our standard input and output. Returns the command's own
# status, or 255 when the node is unreachable or the connection is lost.
ssh_run() { # <node> <command> [argument...]
  ssh_run_line "$1" "$(remote_command_line "${@:2}")"
}


# Run one of our functions on a node.
ssh_call_function() { # <node> <function> [argument...]
  ssh_run_line "$1" "$(quote_for_any_shell "$(declare -f "$2")"$'\n'"$(quote "${@:2}")")"
}


# What is sent to many nodes is written once.
ssh_run_line() { # <node> <what remote_command_line or quote_for_any_shell printed>
  ssh_client -- "${ADDRESS[$1]}" "$2"
}


remote_command_line() { # <command> [argument...]
  quote_for_any_shell "cd -- $(quote "$PWD") || exit $EXIT_UNFIT; exec $(quote "$@")"
}


# ssh joins its arguments with blanks, and the user's login shell parses them again: it may be any shell. So it gets one
# argument that all shells leave as it is, and hands it to bash: what a shell, or pdsh, would change stands there as
# =XX.
# shellcheck disable=SC2016 # what it holds is for the other side
quote_for_any_shell() { # <lines for bash>
  local LC_ALL=C line=${1//=/=3D} strange code
  while [[ $line =~ [^]A-Za-z0-9_./:,+@{}\(\)\[\;\$\&\|\<\>\"\*\?\~\#\^\ =-] ]]; do
    strange=${BASH_REMATCH[0]}
    printf -v code '=%02X' "'$strange"
    line=${line//"$strange"/$code}
  done
  printf "exec bash -c 'eval \"\$(printf %%b \"\${1//=/\$2}\")\"' bash '%s' '\\\\x'\\n" "$line"
}


# ---------------------------------------------------------------- a launch over ssh

require_ssh() {
  type -P ssh >/dev/null || die "there is no ssh on this machine: install OpenSSH's client"
}


# For run_on_nodes: what remote_command_line printed, with the environment of the ranks on its standard input.
ssh_probe() { # <node> <what remote_command_line printed>
  ssh_run_line "$@" < <(environment_block)
}


# In COMMAND, what runs a module of the package on a node in the environment of the ranks; it reads an environment block
# from its standard input first.
build_module_command() { # <module> [argument...]
  COMMAND=("$KIT/scripts/lib/in_node_env.sh" "$(node_env)" "$PYTHON" "$KIT/scripts/lib/module.py" "$@")
}


# Ask all nodes what the preflight compares, in REPLIES. Without a preflight, the ranks meet at the first node.
ssh_probe_nodes() {
  local files=("${CONFIG_ARGS[@]:1}")
  if ((!PREFLIGHT)); then
    MASTER_ADDR=${NODES[0]} MASTER_PORT=${MASTER_PORT:-29500}
    return
  fi
  REPLIES=$(mktemp -d "$CONNECTIONS_DIR/replies-XXXXXX")
  [[ $MODULE ]] || files+=("$SCRIPT_FILE")
  build_module_command host.probe --port "${MASTER_PORT:-0}" "${files[@]/#/--file=}" -- "${NODES[@]}"
  run_on_nodes "$REPLIES" ssh_probe "$(remote_command_line "${COMMAND[@]}")"
}


ssh_start_nodes() {
  local rank
  for rank in "${!NODES[@]}"; do
    build_agent_command_on "$rank" "$RUN"
    start_node ssh_run "${NODES[rank]}" "${COMMAND[@]}"
  done
}
