# shellcheck shell=bash
#
# The kit's door to other nodes: OpenSSH's own client, with the person's own configuration.
#
# Sourced behind common.bash, never run; nodes.bash says who the nodes are. One connection a node serves all
# calls of one launch:
#
#   open_connections
#   on_node NODE COMMAND [WORD...]


# One folder of sockets for each launch, short enough for a socket's name (ssh takes 90 bytes, 41 of them its own). The
# kit's ssh_config is called by a name in it, as ssh (for ProxyJump), rsync and pdsh take a blank in a path for its end.
# It goes when we do; the connections themselves end when nobody has used them for a few seconds.
open_connections() {
  SOCKETS=$(mktemp -d "${XDG_RUNTIME_DIR:-/tmp}/muster-XXXXXX")
  if ((${#SOCKETS} > 45)) || [[ $SOCKETS == *[[:space:]]* ]]; then
    rmdir -- "$SOCKETS"
    SOCKETS=$(mktemp -d /tmp/muster-XXXXXX)
  fi
  ln -s -- "$KIT/scripts/lib/ssh_config" "$SOCKETS/config"
  SSH_OPTIONS=(-F "$SOCKETS/config" -o ControlPath="$SOCKETS/%C")
  pipe_into CONNECTIONS remove_later "$SOCKETS"
}


# Not by a trap, which SIGKILL would not run; and by nobody's child, for whom we might wait.
remove_later() { # <folder>
  remove_at_end_of_input "$1" <&0 >/dev/null 2>&1 &
}


remove_at_end_of_input() { # <folder>
  trap '' INT TERM HUP TSTP
  read -r _ || true
  rm -rf -- "$1"
}


# In a session of its own: Ctrl-C is for us to handle, and ssh would not let itself be told to ignore it.
call_ssh() { # <ssh's words...>
  unreported setsid --wait ${ANSWER_WITHIN:+timeout -s KILL "$ANSWER_WITHIN"} ssh "${SSH_OPTIONS[@]}" "$@"
}


# Run a command in the working folder of a node, with its standard input and output.
# Ends with the command's own status, or with 255 when the node cannot be reached or is lost.
on_node() { # <node> <command> [word...]
  say_to_node "$1" "$(for_nodes "${@:2}")"
}


line_on_node() { # <node> <line for bash>
  say_to_node "$1" "$(for_any_shell "$2")"
}


# Who says the same to many nodes writes it once.
say_to_node() { # <node> <what for_nodes or for_any_shell wrote>
  call_ssh -- "${ADDRESS[$1]}" "$2"
}


for_nodes() { # <command> [word...]
  for_any_shell "cd -- $(quote "$PWD") || exit $EXIT_UNFIT; exec $(quote "$@")"
}


# ssh joins its words with blanks, and the login shell of the person parses them again: it may be any shell. So it gets
# one word that all shells leave as it is, and hands it to bash: what a shell, or pdsh, would change stands there as =XX.
# shellcheck disable=SC2016 # what it holds is for the other side
for_any_shell() { # <line for bash>
  local LC_ALL=C line=${1//=/=3D} strange code
  while [[ $line =~ [^]A-Za-z0-9_./:,+@{}\(\)\[\;\$\&\|\<\>\"\*\?\~\#\^\ =-] ]]; do
    strange=${BASH_REMATCH[0]}
    printf -v code '=%02X' "'$strange"
    line=${line//"$strange"/$code}
  done
  printf "exec bash -c 'eval \"\$(printf %%b \"\${1//=/\$2}\")\"' bash '%s' '\\\\x'\\n" "$line"
}
