# shellcheck shell=bash
#
# Nodes while they run: start them, wait for the first failure, stop the others, judge, restart.
#
# Sourced, never run; it needs options.bash, nodes.bash and launch.bash (record). A launcher calls, after open_run:
#
#   begin_run
#   while true; do
#     start_node FUNCTION NODE COMMAND... for each node; wait_for_nodes; judge
#     should_restart || break
#     prepare_restart
#   done
#   exit "$CODE"

# shellcheck disable=SC2034,SC2153 # other files read and set what stands here
# Every node has a client: a process that runs the node's supervisor, with ssh the one that is connected to the node.
# Its standard input is the control channel of the supervisor; its exit code comes through EVENTS.
declare -A CLIENT=() CONTROL=() # of each node that has not ended: its process, and the control channel
declare -A REACHED_BY=()        # of each node: the function that runs a command there
declare -A DEAD=()              # clients that have ended, perhaps with an exit code that is still to come
declare -A UNSTARTED=()         # nodes on which not even a supervisor could be started, with the exit code
declare -A SUPERVISED=()        # nodes with a client of their own, and with an exit code in node_NAME.exit
SWEEPS=()                     # processes that end what is left on nodes whose client was lost
EVENTS=''                       # file descriptor of a pipe, both ends: a client never waits for a reader
CODE=0                          # of the run, when it is judged
STATUS=0                        # of the first node that failed
SIGNAL=''                       # the one that asked us to stop
DEADLINE='' REQUEST=''          # when nodes that still run get the next request, and which
HEARTBEAT_TIMEOUT=''            # seconds without a heartbeat of the launcher after which a node stops its command
RESTARTS=0                      # so far
ATTEMPT=0                       # number of the last attempt that was archived
STALLED=0                       # consecutive restarts without progress
LAST_STEP=''                     # the last step that the run has logged
ATTEMPT_START=0                         # when this attempt began, as $SECONDS
MAX_STALLED=3                  # consecutive restarts without progress before giving up
PROGRESS_SECONDS=300                     # seconds after which a failure is no longer one of the start
DEFAULT_HANG_TIMEOUT=600               # HANG_TIMEOUT of a run that logs steps, without --hang-timeout
HEARTBEATS=''                   # file descriptor: its end ends the heartbeats
HANG_WATCHER='' HANG_CHANNEL='' # process that watches for a hang, and the end of its standard input
STOP_TIMEOUT=10                        # seconds between the request to stop and SIGKILL, when a node has failed


# To be called when there is a run directory, and before anything is started.
begin_run() {
  [[ ! -e $RUN/metrics.jsonl ]] || LAST_STEP=$(kit_python metrics "$RUN/metrics.jsonl")
  exec {EVENTS}<> <(:)
  watch_signals
}


# Run a command on this machine, in the environment with which the launcher was started. Bash reports nothing of it.
run_here() { # <node> <command> [argument...]
  { (exec_in_environment 0 "${@:2}" 2>&9 9>&-); } 9>&2 2>/dev/null
}


# The program that runs commands on nodes, in SUPERVISOR.
set_supervisor() {
  SUPERVISOR=("$PYTHON" -I -S "$KIT/scripts/lib/supervisor.py")
}


start_node() { # <function that runs a command on a node> <node> <command...>
  local terminal=()
  [[ ! -t 1 || ! -t 2 ]] || terminal=(--terminal)
  set_supervisor
  REACHED_BY[$2]=$1
  start_client "$2" "$1" "$2" "${SUPERVISOR[@]}" run --dir "$RUN" --name "$2" --grace "$GRACE" --environment - \
    "${terminal[@]}" ${HEARTBEAT_TIMEOUT:+--heartbeat-timeout "$HEARTBEAT_TIMEOUT"} --source "$(node_env)" \
    --sample-usage -- "${@:3}"
  SUPERVISED[$2]=1
  { environment_block >&"${CONTROL[$2]}"; } 2>/dev/null || true # it may have ended
}


# The environment of the ranks as supervisor.py and in_node_env.sh read it. Through a pipe, as others can see arguments.
environment_block() {
  ((${#ENVIRONMENT[@]} == 0)) || printf '%s\0' "${ENVIRONMENT[@]}"
  printf '\0'
}


start_client() { # <its name> <command...>
  local control
  start_with_pipe control run_client "$@"
  CLIENT[$1]=$! CONTROL[$1]=$control
  disown "$!" 2>/dev/null || true # bash would print it when it is killed, as it may have been already
}


run_client() { # <its name> <command...>
  local status=0
  trap '' INT TERM HUP TSTP USR2 # requests come through the control channel
  close_control_channels
  "${@:2}" || status=$?
  echo "$1 $status" >&"$EVENTS"
}


# A process that runs beside the launcher must not hold a control channel: the node would not notice that the launcher
# is gone.
close_control_channels() {
  local control
  for control in "${CONTROL[@]}"; do
    exec {control}>&-
  done
  [[ ! $HEARTBEATS ]] || exec {HEARTBEATS}>&-
}


# To the end of the last node. The first failure stops all the others.
wait_for_nodes() {
  local received begun='' node status
  STATUS=0
  [[ ! $SIGNAL ]] || send_request stop # it came before there was a node
  [[ ! $HEARTBEAT_TIMEOUT ]] || start_with_pipe HEARTBEATS send_heartbeats
  start_hang_watch
  while ((${#CLIENT[@]})); do
    if IFS= read -r -t 0.5 -u "$EVENTS" received; then
      read -r node status <<<"$begun$received"
      begun=''
      if [[ $node == /hang ]]; then
        handle_hang
      else
        handle_exit "$node" "$status"
      fi
    else
      begun+=$received # the timeout came in the middle of a line
      notice_dead_clients
    fi
    if [[ $DEADLINE ]] && ((SECONDS >= DEADLINE)); then
      escalate
    fi
  done
  ((${#SWEEPS[@]} == 0)) || wait "${SWEEPS[@]}" || true
  SWEEPS=()
  stop_hang_watch
  [[ ! $HEARTBEATS ]] || exec {HEARTBEATS}>&-
  HEARTBEATS=''
}


# A client that was killed reports no exit code.
notice_dead_clients() {
  local node stat
  for node in "${!CLIENT[@]}"; do
    { read -r stat <"/proc/${CLIENT[$node]}/stat"; } 2>/dev/null || stat=') Z'
    [[ $stat == *') Z'* ]] || continue
    if [[ ${DEAD[$node]-} ]]; then
      record "$node: process ${CLIENT[$node]}, the launcher's connection to it, was killed"
      handle_exit "$node" 137
    else
      DEAD[$node]=1 # its exit code may still be on its way
    fi
  done
}


handle_exit() { # <node> <exit code of its client>
  local control=${CONTROL[$1]} status=$2
  exec {control}>&-
  unset "CLIENT[$1]" "CONTROL[$1]" "DEAD[$1]"
  if is_connection_lost "$1" "$status"; then
    [[ -e $RUN/node_$1.lost ]] || handle_lost_node "$1"
    ((status != 255)) || status=$EXIT_UNFIT
  elif ((status == 126 || status == 127)); then
    UNSTARTED[$1]=$status
  fi
  if ((status != 0 && STATUS == 0)); then
    STATUS=$status
    [[ $DEADLINE ]] || schedule_request $((status == EXIT_STOPPED ? 30 : 0)) stop # checkpoints may still be being written
  fi
}


# The run makes no progress; why, is in .hang.json. Nothing follows from that when the run is ending already.
handle_hang() {
  [[ $STATUS == 0 && ! $DEADLINE && -e $RUN/.hang.json ]] || return 0
  mv -- "$RUN/.hang.json" "$RUN/hang.json"
  STATUS=$EXIT_GAVE_UP
  record "the run hangs; stopping it"
  schedule_request 0 stop
}


# Whether this may be the client's own exit code, not the node's: ssh ends with 255 when the connection is lost, and
# above 128 a signal has ended it. Where the run directory is shared, the node's own is in node_NAME.exit.
is_connection_lost() { # <node> <exit code>
  [[ ${SUPERVISED[$1]-} && ! -e $RUN/node_$1.exit ]] && (($2 == 255 || ($2 > 128 && !${DEADLINE:-0})))
}


# Without its connection a node stops its command by itself. Wait for that, and for what the node reports of it.
handle_lost_node() { # <node>
  record "$1: connection to its supervisor lost; stopping the run"
  sweep_lost_node "$1" &
  SWEEPS+=($!)
}


sweep_lost_node() { # <node>
  trap '' INT TERM HUP TSTP
  close_control_channels
  set_supervisor
  if ! REPLY_TIMEOUT=$((GRACE + STOP_TIMEOUT)) "${REACHED_BY[$1]}" "$1" "${SUPERVISOR[@]}" sweep --dir "$RUN" --name "$1" --grace "$GRACE" \
    </dev/null >/dev/null 2>&1; then
    : >"$RUN/node_$1.lost" # for the verdict
  fi
}


# A shell ends with 126 or 127 where there is no interpreter to be started. The verdict reads that where it reads
# what supervisors write.
record_unstarted() {
  local node
  for node in "${!UNSTARTED[@]}"; do
    [[ ! -e $RUN/node_$node.exit ]] || continue
    printf '%s\n' "$PYTHON: cannot be started on $node; name an interpreter that is there with --python" \
      >>"$RUN/node_$node.log"
    printf '%s\n' "${UNSTARTED[$node]}" >"$RUN/node_$node.exit"
  done
  UNSTARTED=()
}


# What the remaining nodes are asked for when the time has come: stop, kill, then nothing more.
schedule_request() { # <seconds from now> <request>
  DEADLINE=$((SECONDS + $1)) REQUEST=$2
}


escalate() {
  case $REQUEST in
    stop) send_request stop; schedule_request "$STOP_TIMEOUT" kill ;;
    kill) send_request kill; schedule_request "$STOP_TIMEOUT" abandon ;;
    abandon) abandon_nodes ;;
  esac
}


send_request() { # <stop or kill>
  local control
  for control in "${CONTROL[@]}"; do
    echo "$1" >&"$control" || true # it may just have ended
  done 2>/dev/null
}


abandon_nodes() {
  local node
  for node in "${!CLIENT[@]}"; do
    record "$node does not answer; its processes end without the launcher${HEARTBEAT_TIMEOUT:+ after $HEARTBEAT_TIMEOUT s}"
    : >"$RUN/node_$node.lost"
    kill -KILL "${CLIENT[$node]}" 2>/dev/null || true
    handle_exit "$node" 255
  done
}


# A person, or the system, asks the launcher to stop. The nodes are asked to, and asked to kill the second time.
handle_signal() { # <signal>
  if [[ $SIGNAL ]]; then
    send_request kill
    schedule_request "$STOP_TIMEOUT" abandon
    return
  fi
  SIGNAL=$1
  [[ $1 != HUP ]] || exec >>"$RUN/launcher.log" 2>&1 # the terminal is gone
  record "$1: stopping; up to $GRACE s to write a checkpoint, once more $1 to end at once"
  send_request stop
  schedule_request $((GRACE + STOP_TIMEOUT)) abandon # a node keeps the grace itself
}


watch_signals() {
  local name
  trap '' PIPE # a node may end while it is asked for something, and a console may be closed
  for name in INT TERM HUP; do
    # shellcheck disable=SC2064
    trap "handle_signal $name" "$name"
  done
}


# To each node every few seconds, as long as this shell lives. A node that misses them stops its command.
send_heartbeats() {
  local control status
  trap '' INT TERM HUP TSTP PIPE
  while true; do
    read -r -t $((HEARTBEAT_TIMEOUT / 4)) _ && status=0 || status=$?
    ((status > 128)) || return 0
    for control in "${CONTROL[@]}"; do
      echo >&"$control" || true
    done
  done 2>/dev/null
}


# Watch for a hang until stop_hang_watch, or until the launcher is gone. Without --hang-timeout only a run that logs
# steps can hang, and only when it is certain that nothing will end the silence.
start_hang_watch() {
  [[ $HANG_TIMEOUT != 0 ]] || return 0
  start_with_pipe HANG_CHANNEL run_hang_watch
  HANG_WATCHER=$!
}


run_hang_watch() {
  local options=(--timeout "${HANG_TIMEOUT:-$DEFAULT_HANG_TIMEOUT}")
  [[ $HANG_TIMEOUT ]] || options+=(--certain)
  trap '' INT HUP TSTP USR2
  close_control_channels
  exec setsid "$KIT/scripts/lib/hang_watch.sh" --python "$PYTHON" "${options[@]}" "$RUN" \
    1>&"$EVENTS" 2>>"$RUN/launcher.log"
}


stop_hang_watch() {
  [[ $HANG_TIMEOUT != 0 ]] || return 0
  {
    exec {HANG_CHANNEL}>&-
    join "$HANG_WATCHER" || true
  } 2>/dev/null # bash would print that it was terminated
  rm -f -- "$RUN/.hang.json"
}


# Whose failure came first, the exit code of it all in CODE, and the report.
report_verdict() {
  local asked=() verdict
  record_unstarted
  case $SIGNAL in
    INT) asked=(--exit-code "$EXIT_INTERRUPTED") ;;
    TERM | HUP) asked=(--exit-code "$EXIT_TERMINATED") ;;
    *) asked=(--exit-code "$STATUS") ;;
  esac
  # It writes into a pipe: that this launcher's own console is closed must not change its exit code.
  verdict=$(kit_python runs.verdict "$RUN" --report "${asked[@]}" 2>&1) && CODE=0 || CODE=$?
  printf '%s\n' "$verdict" >&2 || true
}


# Whether a restart may help: the call was valid, no stop was requested, and the last restarts made progress.
should_restart() {
  [[ ! $SIGNAL ]] && ((CODE != 0 && CODE != EXIT_USAGE && CODE != EXIT_STOPPED && RESTARTS < MAX_RESTARTS)) || return 1
  if made_progress || ((RESTARTS == 0)); then
    STALLED=0
  else
    STALLED=$((STALLED + 1))
  fi
  ((STALLED < MAX_STALLED)) && return
  record "exit code $CODE: no progress${LAST_STEP:+ past step $LAST_STEP} in $STALLED restarts; giving up"
  return 1
}


# By the steps that the script has logged; where it logs none, by its having run for minutes.
made_progress() {
  local before=$LAST_STEP
  LAST_STEP=$(kit_python metrics "$RUN/metrics.jsonl") || LAST_STEP=''
  if [[ $LAST_STEP ]]; then
    ((LAST_STEP > ${before:--1}))
  else
    ((SECONDS - ATTEMPT_START >= PROGRESS_SECONDS))
  fi
}


# Keep what the failed attempt left, and make room for the next.
prepare_restart() {
  RESTARTS=$((RESTARTS + 1)) DEADLINE='' REQUEST='' ATTEMPT_START=$SECONDS
  archive_attempt "$RUN"
  record "exit code $CODE: restart $RESTARTS of $MAX_RESTARTS, from the newest valid checkpoint"
}


# Move what an attempt leaves into the next try_<n>, whose number is then in ATTEMPT. What belongs to the whole run
# stays.
archive_attempt() { # <run directory>
  local file
  ATTEMPT=1
  while [[ -e $1/try_$ATTEMPT ]]; do
    ATTEMPT=$((ATTEMPT + 1))
  done
  mkdir -- "$1/try_$ATTEMPT"
  cp -p -- "$1/run.json" "$1/try_$ATTEMPT/"
  for file in "$1"/{errors,ranks,verdict.json,hang.json} "$1"/node_*; do
    [[ ! -e $file ]] || mv -- "$file" "$1/try_$ATTEMPT/"
  done
  mkdir -- "$1/errors" "$1/ranks"
}
