# shellcheck shell=bash
#
# Ask nodes a question over ssh, all of them at once.
#
# Sourced by nodes.bash, never run. What NODE answers is in FOLDER/NODE.out, NODE.err and NODE.code, which
# distributed.host.replies reads.


# Ask all NODES the same, and wait for the last of them.
ask_nodes() { # <folder for the answers> <command> [word...]
  local node question asked=()
  question=$(for_nodes "${@:2}")
  for node in "${NODES[@]}"; do
    ask_node "$1" "$node" "$question" < <(environment_block) &
    asked+=($!)
  done
  show_waiting "$1" &
  wait "${asked[@]}" || true
  kill $! 2>/dev/null || true
}


ask_node() { # <folder for the answers> <node> <what for_nodes wrote>
  local code=0
  say_to_node "$2" "$3" >"$1/$2.out" 2>"$1/$2.err" || code=$?
  echo "$code" >"$1/$2.code"
}


# Every few seconds: which nodes have not answered yet.
show_waiting() { # <folder for the answers>
  local node begun=$SECONDS missing
  while ! read -r -t 5 <> <(:); do # sleeps without a child that would outlive us: nobody writes there
    missing=()
    for node in "${NODES[@]}"; do
      [[ -e $1/$node.code ]] || missing+=("$node")
    done
    ((${#missing[@]})) || return 0
    log "$((${#NODES[@]} - ${#missing[@]})) of ${#NODES[@]} nodes answered, waiting for ${missing[*]}," \
      "$((SECONDS - begun)) s"
  done
}


# In COMMAND, what runs a module of the package on a node in the environment that ranks will have there; it reads an
# environment block from its standard input first.
module_as_ranks() { # <module> [word...]
  COMMAND=("$KIT/scripts/lib/in_node_env.sh" "$(node_env)")
  COMMAND+=("$PYTHON" "$KIT/scripts/lib/module.py" "$@")
}
