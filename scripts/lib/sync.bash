# shellcheck shell=bash
#
# Nodes that share no folder with this machine: what they need is copied there, what they wrote is brought home.
#
# Sourced behind nodes.bash and ssh.bash, never run.

# Neither what git ignores, nor what runs and checkpoints leave: a copy is what a colleague would get by `git clone`.
NOT_COPIED=(--exclude=/.git --exclude=/logs --exclude=/checkpoints --filter=':- .gitignore')
FOLLOW_EVERY=2 # seconds between two looks at the nodes' logs
FOLLOWER=''    # the process that brings them, while the nodes run
FETCHED=() # nodes whose part of the run's folder was brought home


# ---------------------------------------------------------------- there

# Copy the working folder, and the kit when it lies elsewhere, to every node that does not see ours. Nothing is deleted.
sync_nodes() {
  local folder
  type -P rsync >/dev/null || die "--sync: there is no rsync on this machine: install it"
  for folder in "$PWD" "$KIT"; do
    [[ $folder == "$KIT" && $PWD/ == "$KIT"/* ]] || sync_folder "$folder"
  done
}


sync_folder() { # <folder>
  local node mark copying=() failed=()
  mark=$(mktemp -- "$1/.muster-XXXXXX") || die "--sync: cannot write into $1"
  for node in "${NODES[@]}"; do
    copy_unless_shared "$node" "$1" "${mark##*/}" &
    copying+=($!)
  done
  for node in "${!copying[@]}"; do
    wait "${copying[node]}" || failed+=("${NODES[node]}")
  done
  rm -f -- "$mark"
  ((${#failed[@]} == 0)) || die_with "$EXIT_UNFIT" "--sync: $1 could not be copied to ${failed[*]}: see the lines above"
}


copy_unless_shared() { # <node> <folder> <name of a file that is in ours>
  local answer
  answer=$(line_on_node "$1" "mkdir -p -- $(quote "$2") && cd -- $(quote "$2") && if test -e $3; then echo shared $3;
    else echo apart $3; fi" </dev/null) || return
  case $answer in
    *"shared $3"*) ;;
    *) copy "$@" ;;
  esac
}


copy() { # <node> <folder> <file that is only a mark>
  log "--sync: copying $2 to $1"
  rsync --archive --compress --protect-args --exclude="/$3" "${NOT_COPIED[@]}" \
    -e "ssh ${SSH_OPTIONS[*]}" -- "$2/" "${ADDRESS[$1]}:$2/" </dev/null
}


# ---------------------------------------------------------------- and back

# With --sync, bring the logs of the nodes while they run.
follow_logs() {
  ((SYNC)) || return 0
  pipe_into FOLLOWING append_logs_repeatedly
  FOLLOWER=$!
}


# To the end of the input: then the run, or the launcher, has ended.
append_logs_repeatedly() {
  # shellcheck disable=SC2034 # call_ssh reads it
  local node status ANSWER_WITHIN=3
  trap '' INT TERM HUP TSTP PIPE
  close_control_channels
  while true; do
    read -r -t "$FOLLOW_EVERY" _ && status=0 || status=$?
    ((status > 128)) || return 0
    for node in "${NODES[@]}"; do
      append_log "$node" 2>/dev/null &
    done
    wait
  done
}


# Append what is new in the log of a node to ours, which holds the same bytes so far. A node that shares the run
# directory, and so has run.json, writes ours itself.
append_log() { # <node>
  local log=$RUN/node_$1.log size=0
  [[ ! -e $log ]] || size=$(stat -c %s -- "$log")
  line_on_node "$1" "cd -- $(quote "$RUN") && { test -e run.json || tail -c +$((size + 1)) -- $(quote "node_$1.log"); }" \
    </dev/null >>"$log"
}


stop_following() {
  [[ $FOLLOWER ]] || return 0
  exec {FOLLOWING}>&-
  join "$FOLLOWER" || true
  FOLLOWER=''
}


# What is not here yet of each node's part of the run's folder; checkpoints stay where they are.
bring_home() {
  local node fetching=()
  stop_following
  FETCHED=()
  for node in "${NODES[@]}"; do
    if [[ ! -e $RUN/node_$node.exit && ! -e $RUN/node_$node.lost ]]; then
      FETCHED+=("$node")
      fetch "$node" &
      fetching+=($!)
    fi
  done
  ((${#fetching[@]} == 0)) || wait "${fetching[@]}" || true
}


fetch() { # <node>
  ((!SYNC)) || append_log "$1" 2>/dev/null || rm -f -- "$RUN/node_$1.log" # then all of it comes with the rest
  line_on_node "$1" "cd -- $(quote "$RUN") && tar -cf - --exclude=./checkpoints ." </dev/null |
    tar -xf - --keep-newer-files --no-same-owner -C "$RUN" 2>/dev/null ||
    warn "$1: its part of $RUN could not be brought here; it may still be there"
}


# An earlier try's files make room there too, so that they are not brought as the next one's.
put_away() { # <folder for them>
  local node
  for node in "${FETCHED[@]}"; do
    line_on_node "$node" "cd -- $(quote "$RUN") && mkdir -p $1 && mv errors ranks node_* $1/" </dev/null ||
      warn "$node: $RUN could not be tidied up there"
  done
}
