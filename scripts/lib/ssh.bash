# shellcheck shell=bash
#
# Run commands on nodes with OpenSSH and the user's configuration. All calls of a script share one connection per node:
#
#   open_connections
#   ssh_run NODE COMMAND [ARGUMENT...]
#
# Sourced, never run; it needs nodes.bash, and for launches also launch.bash and watch.bash.

# shellcheck disable=SC2034 # other files use these variables
CONNECTIONS_DIR=''  # control sockets of ssh and other temporary files; removed when this script exits
SSH_OPTIONS=()
REPLY_TIMEOUT=''    # seconds after which a command on a node is killed; empty: never


# The path must be short: ssh allows 90 bytes for a control socket and uses 41 of them. ssh_config is passed as a link
# in this directory, because ssh (for ProxyJump), rsync and pdsh split paths at blanks. ControlPersist closes unused
# connections.
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


# Not a trap, which would not run after SIGKILL, and not a child of this script, for which `wait` would wait.
remove_when_script_exits() { # <directory>
  remove_at_end_of_input "$1" <&0 >/dev/null 2>&1 &
}


remove_at_end_of_input() { # <directory>
  trap '' INT TERM HUP TSTP
  read -r _ || true
  rm -rf -- "$1"
}


# ---------------------------------------------------------------- one command on one node

# Run ssh in its own session, so that Ctrl-C on the terminal does not reach it.
ssh_client() { # <ssh's arguments...>
  run_unreported setsid --wait ${REPLY_TIMEOUT:+timeout -s KILL "$REPLY_TIMEOUT"} ssh "${SSH_OPTIONS[@]}" "$@"
}


# Run a command on a node in the working directory of this script. Returns the command's status, or 255 when the node is
# unreachable or the connection is lost.
ssh_run() { # <node> <command> [argument...]
  ssh_run_line "$1" "$(remote_command_line "${@:2}")"
}


# Run a function of this script on a node.
ssh_call_function() { # <node> <function> [argument...]
  ssh_run_line "$1" "$(quote_for_any_shell "$(declare -f "$2")"$'\n'"$(quote "${@:2}")")"
}


# For callers that send one line to many nodes, so that it is quoted only once.
ssh_run_line() { # <node> <output of remote_command_line or quote_for_any_shell>
  ssh_client -- "${ADDRESS[$1]}" "$2"
}


remote_command_line() { # <command> [argument...]
  quote_for_any_shell "cd -- $(quote "$PWD") || exit $EXIT_UNFIT; exec $(quote "$@")"
}


# ssh joins its arguments with blanks, and the login shell of the user, which may be any shell, parses them again. Print
# a line that every shell passes to bash unchanged: characters that a shell or pdsh could interpret are written as =XX.
# shellcheck disable=SC2016 # expanded on the node
quote_for_any_shell() { # <lines for bash>
  local LC_ALL=C line=${1//=/=3D} special code
  while [[ $line =~ [^]A-Za-z0-9_./:,+@{}\(\)\[\;\$\&\|\<\>\"\*\?\~\#\^\ =-] ]]; do
    special=${BASH_REMATCH[0]}
    printf -v code '=%02X' "'$special"
    line=${line//"$special"/$code}
  done
  printf "exec bash -c 'eval \"\$(printf %%b \"\${1//=/\$2}\")\"' bash '%s' '\\\\x'\\n" "$line"
}


# ---------------------------------------------------------------- a launch over ssh

require_ssh() {
  type -P ssh >/dev/null || die "ssh: not found on this machine; install the OpenSSH client"
}


# For run_on_nodes: run a line with the environment block on its standard input.
ssh_probe() { # <node> <output of remote_command_line>
  ssh_run_line "$@" < <(environment_block)
}


# Set COMMAND to run a module of the package in the environment of the ranks. It first reads an environment block from
# its standard input.
build_module_command() { # <module> [argument...]
  COMMAND=("$KIT/scripts/lib/in_node_env.sh" "$(node_env)" "$PYTHON" "$KIT/scripts/lib/module.py" "$@")
}


# Probe all nodes for the preflight and set REPLIES. Without a preflight set MASTER_ADDR and MASTER_PORT.
ssh_probe_nodes() {
  local files=("${CONFIG_ARGS[@]:1}")
  if ((!PREFLIGHT)); then
    MASTER_ADDR=${NODES[0]} MASTER_PORT=${MASTER_PORT:-29500}
    return
  fi
  REPLIES=$(mktemp -d "$CONNECTIONS_DIR/replies-XXXXXX")
  [[ $MODULE ]] || files+=("$SCRIPT_FILE")
  build_module_command host.probe --port "${MASTER_PORT:-0}" "${files[@]/#/--file=}" \
    "${PACKAGES[@]/#/--package=}" -- "${NODES[@]}"
  run_on_nodes "$REPLIES" ssh_probe "$(remote_command_line "${COMMAND[@]}")"
}


ssh_start_nodes() {
  local rank
  for rank in "${!NODES[@]}"; do
    build_agent_command_on "$rank" "$RUN"
    start_node ssh_run "${NODES[rank]}" "${COMMAND[@]}"
  done
}
