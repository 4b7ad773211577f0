# shellcheck shell=bash
#
# --sync, for nodes that do not share the working directory: copy it to the nodes. distributed/launch/node_logs.py copies
# the run directory back.
#
# Sourced, never run; it needs nodes.bash and ssh.bash. Functions named remote_* run on a node.

# shellcheck disable=SC2034 # other files use these variables
RSYNC_VANISHED=24 # exit code of rsync: files were removed while it copied their directory
FAILED=()         # nodes for which a call of call_for_nodes failed


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
