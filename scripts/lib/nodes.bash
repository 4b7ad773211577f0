# shellcheck shell=bash
#
# The nodes of a run; run a function for all of them in parallel.
#
# Sourced, never run.

# shellcheck disable=SC2034 # other files use these variables
RUN=''                # run directory
NODES=()              # names, in the order of node ranks
declare -A ADDRESS=() # node -> [user@]name for ssh
declare -A NPROC_OF=() # node -> number of ranks; auto, gpu or cpu before the node was probed
RANKS=0               # world size


add_node() { # <name> <processes> [address for ssh: [user@]name]
  NODES+=("$1")
  NPROC_OF[$1]=$2
  is_processor_kind "$2" || RANKS=$((RANKS + $2))
  [[ ! ${3-} ]] || ADDRESS[$1]=$3
}


# Call FUNCTION NODE ARGUMENT... for all nodes in parallel, and wait until all have returned. DIRECTORY gets the output
# in NODE.out and NODE.err, and the status in NODE.code; distributed.host.replies reads them.
run_on_nodes() { # <directory> <function> [argument...]
  local node pids=()
  rm -f -- "$1"/*.code
  for node in "${NODES[@]}"; do
    run_on_node "$1" "$node" "${@:2}" &
    pids+=($!)
  done
  log_waiting "$1" &
  wait "${pids[@]}" || true
  kill $! 2>/dev/null || true
}


run_on_node() { # <directory> <node> <function> [argument...]
  local code=0
  "$3" "$2" "${@:4}" >"$1/$2.out" 2>"$1/$2.err" || code=$?
  echo "$code" >"$1/$2.code"
}


# Print every 5 seconds which nodes have not replied yet.
log_waiting() { # <directory>
  local node start=$SECONDS missing
  while ! read -r -t 5 <> <(:); do # sleep without a child process, which would outlive this script
    missing=()
    for node in "${NODES[@]}"; do
      [[ -e $1/$node.code ]] || missing+=("$node")
    done
    # Background processes of bash ignore Ctrl-C, so check whether the script still runs.
    ((${#missing[@]})) && kill -0 "$$" 2>/dev/null || return 0
    log "$((${#NODES[@]} - ${#missing[@]})) of ${#NODES[@]} nodes replied, waiting for ${missing[*]}," \
      "$((SECONDS - start)) s"
  done
}
