# shellcheck shell=bash
#
# The nodes of a run, and asking all of them something at once.
#
# Sourced, never run.

# shellcheck disable=SC2034 # other files read and set what stands here
RUN=''                # run directory
NODES=()              # names, by node rank
declare -A ADDRESS=() # of each node that is reached over ssh: [user@]name
declare -A NPROC_OF=() # of each node: how many ranks
RANKS=0               # of all nodes


add_node() { # <name> <processes> [how ssh reaches it: [user@]name]
  NODES+=("$1")
  NPROC_OF[$1]=$2
  RANKS=$((RANKS + $2))
  [[ ! ${3-} ]] || ADDRESS[$1]=$3
}


# Run a function for every node at once, and wait for the last one. What NODE prints is in DIRECTORY/NODE.out and
# NODE.err, and the function's status in NODE.code: distributed.host.replies reads them.
run_on_nodes() { # <directory> <function> [argument...]: runs FUNCTION NODE ARGUMENT...
  local node asked=()
  rm -f -- "$1"/*.code
  for node in "${NODES[@]}"; do
    run_on_node "$1" "$node" "${@:2}" &
    asked+=($!)
  done
  log_waiting "$1" &
  wait "${asked[@]}" || true
  kill $! 2>/dev/null || true
}


run_on_node() { # <directory> <node> <function> [argument...]
  local code=0
  "$3" "$2" "${@:4}" >"$1/$2.out" 2>"$1/$2.err" || code=$?
  echo "$code" >"$1/$2.code"
}


# Every few seconds: which nodes have not replied yet.
log_waiting() { # <directory>
  local node begun=$SECONDS missing
  while ! read -r -t 5 <> <(:); do # sleeps without a child that would outlive us: nothing writes there
    missing=()
    for node in "${NODES[@]}"; do
      [[ -e $1/$node.code ]] || missing+=("$node")
    done
    # bash lets a background process ignore Ctrl-C: it ends with the script.
    ((${#missing[@]})) && kill -0 "$$" 2>/dev/null || return 0
    log "$((${#NODES[@]} - ${#missing[@]})) of ${#NODES[@]} nodes answered, waiting for ${missing[*]}," \
      "$((SECONDS - begun)) s"
  done
}
