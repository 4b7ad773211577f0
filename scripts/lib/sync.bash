# shellcheck shell=bash
#
# --sync, for nodes that do not share the working directory: copy it to the nodes, and copy the run directory back.
#
# Sourced, never run; it needs nodes.bash and ssh.bash. Functions named remote_* run on a node.

# shellcheck disable=SC2034 # other files use these variables
RSYNC_VANISHED=24 # exit code of rsync: files were removed while it copied their directory
FOLLOW_INTERVAL=2 # seconds between two copies of new log lines
FOLLOWER=''       # process that copies log lines while the nodes run
FAILED=()         # nodes for which a call of call_for_nodes failed
FETCHED=()        # nodes whose run directory was copied back


# ---------------------------------------------------------------- to the nodes

# Copy the working directory and Muster to every node that does not share them; see distributed/host/sync_list.py for
# the files. Nothing is deleted on the nodes.
sync_nodes() {
  type -P rsync >/dev/null || die "--sync: rsync: not found on this machine; install it"
  sync_directory "$PWD"
  [[ $PWD == "$KIT" ]] || sync_directory "$KIT"
}


sync_directory() { # <directory>
  local marker message apart files=$CONNECTIONS_DIR/files
  : >"$CONNECTIONS_DIR/apart"
  marker=$(mktemp -- "$1/.muster-XXXXXX") || die "--sync: cannot write to $1"
  call_for_nodes add_unless_shared "$1" "${marker##*/}" "${NODES[@]}"
  rm -f -- "$marker"
  mapfile -t apart <"$CONNECTIONS_DIR/apart"
  if ((${#FAILED[@]} == 0 && ${#apart[@]})); then
    message=$(kit_python host.sync_list "$1" 2>&1 >"$files") || die_with "$EXIT_UNFIT" "--sync: $message"
    call_for_nodes copy_files "$1" "$files" "${apart[@]}"
  fi
  ((${#FAILED[@]} == 0)) ||
    die_with "$EXIT_UNFIT" "--sync: $1 could not be copied to ${FAILED[*]}; see the messages above"
}


# Call a function for all these nodes at once. Sets FAILED to the nodes for which it failed.
call_for_nodes() { # <function> <directory> <file> <node...>
  local node
  local -A calls
  FAILED=()
  for node in "${@:4}"; do
    "$1" "$node" "$2" "$3" &
    calls[$node]=$!
  done
  for node in "${@:4}"; do
    wait "${calls[$node]}" || FAILED+=("$node")
  done
}


# Append the node to the file "apart" if it does not share the directory.
add_unless_shared() { # <node> <directory> <file in this machine's directory>
  local reply
  reply=$(ssh_call_function "$1" remote_is_shared "$2" "$3" </dev/null) || return
  [[ $reply == *"shared $3"* ]] || printf '%s\n' "$1" >>"$CONNECTIONS_DIR/apart"
}


copy_files() { # <node> <directory> <output of sync_list.py>
  local shell
  log "--sync: copying $2 to $1"
  printf -v shell "'%s' " "${PYTHON//"'"/"''"}" -I -S "${KIT//"'"/"''"}/scripts/lib/rsync_shell.py" # rsync's quoting
  rsync --archive --compress --sparse --keep-dirlinks --protect-args --recursive --from0 --files-from=- \
    --ignore-missing-args --exclude=.git -e "$shell ssh ${SSH_OPTIONS[*]} -- ${ADDRESS[$1]}" -- "$2/" "node:$2/" <"$3" ||
    (($? == RSYNC_VANISHED))
}


remote_is_shared() { # <directory> <name of a file>
  mkdir -p -- "$1" && cd -- "$1" || return
  if [[ -e $2 ]]; then
    echo "shared $2"
  fi
}


# ---------------------------------------------------------------- from the nodes

# Start a process that copies the logs of the nodes while they run.
follow_logs() {
  ((SYNC)) || return 0
  start_with_pipe FOLLOWING append_logs_repeatedly
  FOLLOWER=$!
}


# Ends at end of file on standard input: the run has ended, or the launcher has exited.
append_logs_repeatedly() {
  local node status REPLY_TIMEOUT=3
  ignore_signals
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


# Append the bytes that the log on the node has and the local copy lacks.
append_log() { # <node>
  local log=$RUN/node_$1.log size=0
  [[ ! -e $log ]] || size=$(stat -c %s -- "$log")
  ssh_call_function "$1" remote_print_log "$RUN" "node_$1.log" $((size + 1)) </dev/null >>"$log"
}


# A node with run.json shares the run directory and writes the log itself.
remote_print_log() { # <run directory> <log file> <first byte>
  cd -- "$1" && { [[ -e run.json ]] || tail -c +"$3" -- "$2"; }
}


# Copy the run directory of each node back, without checkpoints. Nodes with an exit code or a .lost file are skipped, as
# they share it or are unreachable, and nodes that did not start.
collect_logs() {
  local node fetching=()
  if [[ $FOLLOWER ]]; then
    exec {FOLLOWING}>&-
    join "$FOLLOWER" || true
    FOLLOWER=''
  fi
  FETCHED=()
  for node in "${NODES[@]}"; do
    if [[ ! -e $RUN/node_$node.exit && ! -e $RUN/node_$node.lost && ! ${UNSTARTED[$node]-} ]]; then
      FETCHED+=("$node")
      fetch_logs "$node" &
      fetching+=($!)
    fi
  done
  ((${#fetching[@]} == 0)) || wait "${fetching[@]}" || true
}


fetch_logs() { # <node>
  ((!SYNC)) || append_log "$1" 2>/dev/null || rm -f -- "$RUN/node_$1.log" # tar then copies the whole log
  ssh_call_function "$1" remote_pack "$RUN" </dev/null |
    tar -xf - --keep-newer-files --no-same-owner -C "$RUN" 2>/dev/null ||
    warn "$1: $RUN could not be copied back; look for it on the node"
}


remote_pack() { # <run directory>
  cd -- "$1" && TAR_OPTIONS='' tar -cf - --exclude=./checkpoints .
}


# Archive the last attempt on the nodes too, so that its files are not copied back as those of the next.
archive_attempt_on_nodes() {
  local node
  for node in "${FETCHED[@]}"; do
    ssh_call_function "$node" remote_archive "$RUN" "attempt_$ATTEMPT" </dev/null ||
      warn "$node: files of the last attempt in $RUN could not be moved"
  done
}


remote_archive() { # <run directory> <directory for an earlier attempt>
  cd -- "$1" && mkdir -p -- "$2" && mv errors ranks node_* "$2/"
}
