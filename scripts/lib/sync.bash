# shellcheck shell=bash
#
# Nodes that do not share the working directory (--sync): what they need is copied there, what they write is copied
# back.
#
# Sourced, never run; it needs nodes.bash and ssh.bash. The functions that run on a node have `there` in their names.

# shellcheck disable=SC2034 # other files read and set what stands here
# Neither what git ignores, nor what runs and checkpoints leave: a copy is what a colleague would get by `git clone`.
RSYNC_EXCLUDES=(--exclude=/.git --exclude=/logs --exclude=/checkpoints --filter=':- .gitignore')
FOLLOW_INTERVAL=2 # seconds between two copies of what is new in the nodes' logs
FOLLOWER=''    # the process that copies them, while the nodes run
FETCHED=()     # nodes whose part of the run directory was copied back


# ---------------------------------------------------------------- there

# Copy the working directory, and the kit when it lies elsewhere, to every node that does not see ours. Nothing is
# deleted.
sync_nodes() {
  local directory
  type -P rsync >/dev/null || die "--sync: there is no rsync on this machine: install it"
  for directory in "$PWD" "$KIT"; do
    [[ $directory == "$KIT" && $PWD/ == "$KIT"/* ]] || sync_directory "$directory"
  done
}


sync_directory() { # <directory>
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


copy_unless_shared() { # <node> <directory> <name of a file that is in ours>
  local reply
  reply=$(ssh_call_function "$1" remote_is_shared "$2" "$3" </dev/null) || return
  [[ $reply != *"shared $3"* ]] || return 0
  log "--sync: copying $2 to $1"
  rsync --archive --compress --protect-args --exclude="/$3" "${RSYNC_EXCLUDES[@]}" \
    -e "ssh ${SSH_OPTIONS[*]}" -- "$2/" "${ADDRESS[$1]}:$2/" </dev/null
}


remote_is_shared() { # <directory> <name of a file>
  mkdir -p -- "$1" && cd -- "$1" || return
  if [[ -e $2 ]]; then
    echo "shared $2"
  fi
}


# ---------------------------------------------------------------- and back

# Copy the logs of the nodes while they run.
follow_logs() {
  ((SYNC)) || return 0
  start_with_pipe FOLLOWING append_logs_repeatedly
  FOLLOWER=$!
}


# To the end of the input: then the run, or the launcher, has ended.
append_logs_repeatedly() {
  local node status REPLY_TIMEOUT=3
  trap '' INT TERM HUP TSTP PIPE
  close_control_channels
  while true; do
    read -r -t "$FOLLOW_INTERVAL" _ && status=0 || status=$?
    ((status > 128)) || return 0
    for node in "${NODES[@]}"; do
      append_log "$node" 2>/dev/null &
    done
    wait
  done
}


# Append what is new in the log of a node to ours, which holds the same bytes so far.
append_log() { # <node>
  local log=$RUN/node_$1.log size=0
  [[ ! -e $log ]] || size=$(stat -c %s -- "$log")
  ssh_call_function "$1" remote_print_log "$RUN" "node_$1.log" $((size + 1)) </dev/null >>"$log"
}


# A node that shares the run directory, and so has run.json, writes our log itself.
remote_print_log() { # <run directory> <log file> <first byte>
  cd -- "$1" && { [[ -e run.json ]] || tail -c +"$3" -- "$2"; }
}


# What is not here yet of each node's part of the run directory; checkpoints stay where they are.
collect_logs() {
  local node fetching=()
  if [[ $FOLLOWER ]]; then
    exec {FOLLOWING}>&-
    join "$FOLLOWER" || true
    FOLLOWER=''
  fi
  FETCHED=()
  for node in "${NODES[@]}"; do
    if [[ ! -e $RUN/node_$node.exit && ! -e $RUN/node_$node.lost ]]; then
      FETCHED+=("$node")
      fetch_logs "$node" &
      fetching+=($!)
    fi
  done
  ((${#fetching[@]} == 0)) || wait "${fetching[@]}" || true
}


fetch_logs() { # <node>
  ((!SYNC)) || append_log "$1" 2>/dev/null || rm -f -- "$RUN/node_$1.log" # then all of it comes with the rest
  ssh_call_function "$1" remote_pack "$RUN" </dev/null |
    tar -xf - --keep-newer-files --no-same-owner -C "$RUN" 2>/dev/null ||
    warn "$1: its part of $RUN could not be copied back; it may still be there"
}


remote_pack() { # <run directory>
  cd -- "$1" && tar -cf - --exclude=./checkpoints .
}


# The files of the last attempt make room on the nodes too, so that they are not copied back as the next one's.
archive_attempt_on_nodes() {
  local node
  for node in "${FETCHED[@]}"; do
    ssh_call_function "$node" remote_archive "$RUN" "try_$ATTEMPT" </dev/null ||
      warn "$node: $RUN could not be tidied up there"
  done
}


remote_archive() { # <run directory> <directory for an earlier attempt>
  cd -- "$1" && mkdir -p -- "$2" && mv errors ranks node_* "$2/"
}
