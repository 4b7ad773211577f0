# shellcheck shell=bash
#
# Run commands on nodes with OpenSSH and the user's configuration. All calls of a script share one connection per node:
#
#   open_connections
#   ssh_run NODE COMMAND [ARGUMENT...]
#
# Sourced, never run; it needs nodes.bash, and for launches also launch.bash.

# shellcheck disable=SC2034 # other files use these variables
CONNECTIONS_DIR=''  # control sockets of ssh and other temporary files; removed when this script exits
SSH_OPTIONS=()
REPLY_TIMEOUT=''    # seconds after which a command on a node is killed; empty: never
LOGIN_TIMEOUT=${MUSTER_LOGIN_TIMEOUT:-60} # seconds within which the login shell must start a command


# ssh_config is passed as a link in this directory, whose path has no blanks. ControlPersist closes unused connections.
open_connections() {
  { is_count "$LOGIN_TIMEOUT" && ((LOGIN_TIMEOUT >= 1)); } ||
    die_usage "MUSTER_LOGIN_TIMEOUT: expected a whole number of seconds, 1 or more, got '$LOGIN_TIMEOUT'"
  make_temporary_directory CONNECTIONS_DIR
  ln -s -- "$KIT/scripts/lib/ssh_config" "$CONNECTIONS_DIR/config"
  SSH_OPTIONS=(-F "$CONNECTIONS_DIR/config" -o ControlPath="$CONNECTIONS_DIR/%C")
  start_with_pipe CONNECTIONS remove_when_script_exits "$CONNECTIONS_DIR"
}


# Not a trap, which would not run after SIGKILL, and not a child of this script, for which `wait` would wait.
remove_when_script_exits() { # <directory>
  remove_at_end_of_input "$1" <&0 >/dev/null 2>&1 &
}


remove_at_end_of_input() { # <directory>
  ignore_signals
  read -r _ || true
  rm -rf -- "$1"
}


# ---------------------------------------------------------------- one command on one node

# The first command on a node: see distributed/host/ssh_call.py.
STARTED="printf '\\nmuster-ready\\n'; TMOUT=0 read -r _ || exit $EXIT_UNFIT"


# Run ssh in its own session, so that Ctrl-C on the terminal does not reach it. ssh_call sends standard input only
# after the command has started on the node.
ssh_client() { # <address> <output of quote_for_any_shell>
  local within=$LOGIN_TIMEOUT
  [[ ! $REPLY_TIMEOUT ]] || within=$((REPLY_TIMEOUT <= LOGIN_TIMEOUT ? REPLY_TIMEOUT - 1 : LOGIN_TIMEOUT))
  run_unreported run_with_removed setsid --wait ${REPLY_TIMEOUT:+timeout -s KILL "$REPLY_TIMEOUT"} \
    "$PYTHON" -I -S "$KIT/scripts/lib/module.py" host.ssh_call --within "$within" \
    "${1#*@}" ssh "${SSH_OPTIONS[@]}" -- "$1" "$2"
}


# Run a command on a node in the working directory of this script. Returns the command's status, or 255 when the node is
# unreachable or the connection is lost.
ssh_run() { # <node> <command> [argument...]
  ssh_run_line "$1" "$(remote_command_line "${@:2}")"
}


# Run a function of this script on a node.
ssh_call_function() { # <node> <function> [argument...]
  ssh_run_line "$1" "$(quote_for_any_shell "$STARTED"$'\n'"$(declare -f "$2")"$'\n'"$(quote "${@:2}")")"
}


# For callers that send one line to many nodes, so that it is quoted only once.
ssh_run_line() { # <node> <output of remote_command_line>
  ssh_client "${ADDRESS[$1]}" "$2"
}


remote_command_line() { # <command> [argument...]
  quote_for_any_shell "$STARTED; cd -- $(quote "$PWD") || exit $EXIT_UNFIT; exec $(quote "$@")"
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
  printf "exec bash -pc 'eval \"\$(printf %%b \"\${1//=/\$2}\")\"' bash '%s' '\\\\x'\\n" "$line"
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
  count_processes_of_nodes
}


# Run the agents on all nodes over ssh. REPLIES gives the master address.
ssh_run_nodes() { # <ssh or pdsh>
  build_agent_command
  set -- "$1" --connections "$CONNECTIONS_DIR" --login-timeout "$LOGIN_TIMEOUT"
  ((!SYNC)) || set -- "$@" --sync
  run_nodes "$@"
}
