# shellcheck shell=bash
#
# Nodes while they run: start them, wait for the first failure, stop the others, determine the verdict, restart.
#
# Sourced, never run; it needs options.bash, nodes.bash and launch.bash (record). A launcher calls, after open_run:
#
#   begin_run
#   while true; do
#     start_node FUNCTION NODE COMMAND... for each node; wait_for_nodes; report_verdict
#     should_restart || break
#     prepare_restart
#   done
#   exit "$CODE"

# shellcheck disable=SC2034,SC2153 # other files use these variables
# A client is a local process that runs a node's supervisor, over ssh if the node is another machine; pdsh and SLURM
# have one for all nodes. Its standard input is the control channel of the supervisor; its exit code goes to EVENTS.
declare -A CLIENT=() CONTROL=() # of each node that has not ended: process id of the client, control channel
declare -A REACHED_BY=()        # node -> function that runs a command there
declare -A DEAD=()              # clients that have exited and whose exit code was not received
declare -A UNSTARTED=()         # nodes on which the supervisor could not be started -> exit code
declare -A SUPERVISED=()        # nodes started by start_node, which have a client of their own
SWEEPS=()                       # processes that end the remaining processes on lost nodes
TERMINALS=''                    # streams that are terminals, set by begin_run: 1, 2 or, if both are the same, 12
EVENTS=''                       # file descriptor of a pipe, opened for both directions: writers never block
BATCH_JOB=0                     # 1: the launcher is a batch script of SLURM
CODE=0                          # exit code of the run, set by report_verdict
STATUS=0                        # exit code of the first node that failed
SIGNAL=''                       # signal that requested a stop
SIGNAL_TIME=0                   # when, as $SECONDS
PASSED_SIGNAL=''                # signal that was passed on to the ranks
NEXT_REQUEST=''                 # what escalate does next: stop, kill or abandon; empty: no stop is in progress
NEXT_REQUEST_TIME=''            # time of the next request, as $SECONDS
HEARTBEAT_TIMEOUT=''            # seconds without a heartbeat of the launcher after which a node stops its command
RESTARTS=0                      # so far
ATTEMPT=0                       # number of the last archived attempt: restarts and requeues so far
STALLED=0                       # consecutive restarts without progress
LAST_STEP=''                    # last step that the run has logged
ATTEMPT_START=0                 # start of this attempt, as $SECONDS
MAX_STALLED=3                   # consecutive restarts without progress before giving up
PROGRESS_SECONDS=300            # an attempt that logs no steps has made progress when it ran this long
ALL_RANKS_HERE=1                # 0: other launchers start the other nodes of the run
DEFAULT_HANG_TIMEOUT=600        # of a run that logs steps, without --hang-timeout
HEARTBEATS=''                   # file descriptor; closing it stops the heartbeats
HANG_WATCHER='' HANG_CHANNEL='' # process of hang_watch.sh, file descriptor of its standard input
STOP_TIMEOUT=10                 # seconds between stop request and SIGKILL when a node has failed


# Call it after open_run, before the first node is started.
begin_run() {
  [[ ! -e $RUN/metrics.jsonl ]] || LAST_STEP=$(kit_python metrics "$RUN/metrics.jsonl")
  find_terminals
  exec {EVENTS}<> <(:)
  # distributed/agent/attempt.py passes these to the ranks. A requeued job continues to count.
  ENVIRONMENT+=("TORCHELASTIC_MAX_RESTARTS=$MAX_RESTARTS" "TORCHELASTIC_RESTART_COUNT=$ATTEMPT")
  watch_signals
}


# Set TERMINALS.
find_terminals() {
  TERMINALS=''
  [[ ! -t 1 ]] || TERMINALS+=1
  [[ ! -t 2 ]] || TERMINALS+=2
  [[ $TERMINALS != 12 || /dev/fd/1 -ef /dev/fd/2 ]] || TERMINALS=''
}


# Run a command on this machine, in the environment with which the launcher was started.
run_here() { # <node> <command> [argument...]
  { (exec_in_environment 0 "${@:2}" 2>&9 9>&-); } 9>&2 2>/dev/null
}


set_supervisor() {
  SUPERVISOR=("$PYTHON" -I -S "$KIT/scripts/lib/supervisor.py")
}


start_node() { # <function that runs a command on a node> <node> <command...>
  set_supervisor
  REACHED_BY[$2]=$1
  start_client "$2" "$1" "$2" "${SUPERVISOR[@]}" run --dir "$RUN" --name "$2" --grace "$GRACE" --environment - \
    ${TERMINALS:+--terminals "$TERMINALS"} ${HEARTBEAT_TIMEOUT:+--heartbeat-timeout "$HEARTBEAT_TIMEOUT"} \
    --source "$(node_env)" --sample-usage -- "${@:3}"
  SUPERVISED[$2]=1
  { environment_block >&"${CONTROL[$2]}"; } 2>/dev/null || true # it may have exited
}


# Print FORWARDED and ENVIRONMENT for supervisor.py and in_node_env.sh. They are sent through a pipe, as all users can
# read arguments.
environment_block() {
  ((${#FORWARDED[@]} == 0)) || printf '%s\0' "${FORWARDED[@]}"
  printf '\0'
  ((${#ENVIRONMENT[@]} == 0)) || printf '%s\0' "${ENVIRONMENT[@]}"
  printf '\0'
}


start_client() { # <its name> <command...>
  local control
  start_with_pipe control run_client "$@"
  CLIENT[$1]=$! CONTROL[$1]=$control
  disown "$!" 2>/dev/null || true # bash would print a message when it is killed; it may have exited already
}


run_client() { # <its name> <command...>
  local status=0
  ignore_signals # requests come through the control channel
  close_control_channels
  "${@:2}" || status=$?
  echo "$1 $status" >&"$EVENTS"
}


# Background processes must not hold control channels: nodes would not notice that the launcher has exited.
close_control_channels() {
  local control
  for control in "${CONTROL[@]}"; do
    exec {control}>&-
  done
  [[ ! $HEARTBEATS ]] || exec {HEARTBEATS}>&-
}


# Wait until all nodes have ended. The first failure stops the other nodes.
wait_for_nodes() {
  local received partial='' client status
  STATUS=0
  [[ ! $SIGNAL ]] || send_request stop # received before a node was started
  [[ ! $HEARTBEAT_TIMEOUT ]] || start_with_pipe HEARTBEATS send_heartbeats
  start_hang_watch
  while ((${#CLIENT[@]})); do
    if IFS= read -r -t 0.5 -u "$EVENTS" received; then
      read -r client status <<<"$partial$received"
      partial=''
      if [[ $client == /hang_watch ]]; then # no node name contains a slash
        handle_hang_watch
      else
        handle_exit "$client" "$status"
      fi
    else
      partial+=$received # the timeout split a line
      notice_dead_clients
    fi
    if [[ $NEXT_REQUEST ]] && ((SECONDS >= NEXT_REQUEST_TIME)); then
      escalate
    fi
  done
  ((${#SWEEPS[@]} == 0)) || wait "${SWEEPS[@]}" || true
  SWEEPS=()
  stop_hang_watch
  [[ ! $HEARTBEATS ]] || exec {HEARTBEATS}>&-
  HEARTBEATS=''
}


# Handle the exit of clients that were killed: they report no exit code.
notice_dead_clients() {
  local node stat
  for node in "${!CLIENT[@]}"; do
    { read -r stat <"/proc/${CLIENT[$node]}/stat"; } 2>/dev/null || stat=') Z'
    [[ $stat == *') Z'* ]] || continue
    if [[ ${DEAD[$node]-} ]]; then
      record "$node: the launcher's client (process ${CLIENT[$node]}) was killed"
      handle_exit "$node" 137
    else
      DEAD[$node]=1 # its exit code may still be in EVENTS
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
  elif ((status == 126 || status == 127)) ||
    { ((status == EXIT_UNFIT)) && grep -qsF "$1: the login shell " "$RUN/node_$1.log"; }; then
    UNSTARTED[$1]=$status
  fi
  if ((status != 0 && STATUS == 0)); then
    STATUS=$status
    # A node that stopped with a checkpoint: the other nodes get 30 s for their checkpoints.
    [[ $NEXT_REQUEST ]] || schedule_request $((status == EXIT_STOPPED ? 30 : 0)) stop
  fi
}


# Print the notice in .hang_notice, even with --quiet. Stop a hung run: .hang.json has the reason. Neither if the run is
# already ending.
handle_hang_watch() {
  local notice
  [[ $STATUS == 0 && ! $NEXT_REQUEST ]] || return 0
  if notice=$(cat -- "$RUN/.hang_notice" 2>/dev/null); then
    rm -f -- "$RUN/.hang_notice"
    QUIET=0 record "$notice"
  fi
  [[ -e $RUN/.hang.json ]] || return 0
  mv -- "$RUN/.hang.json" "$RUN/hang.json"
  STATUS=$EXIT_TIMED_OUT
  record "the run hangs; stopping it"
  schedule_request 0 stop
}


# Whether the exit code may be the client's own, not the node's: ssh exits with 255 when the connection is lost, and
# codes above 128 mean that a signal ended the client. The supervisor writes the node's own exit code to node_NAME.exit.
is_connection_lost() { # <node> <exit code>
  [[ ${SUPERVISED[$1]-} && ! -e $RUN/node_$1.exit ]] && (($2 == 255 || ($2 > 128 && !${NEXT_REQUEST_TIME:-0})))
}


# A node that has lost its connection stops its command itself; sweep_lost_node waits for that.
handle_lost_node() { # <node>
  record "$1: connection to its supervisor lost; stopping the run"
  sweep_lost_node "$1" &
  SWEEPS+=($!)
}


sweep_lost_node() { # <node>
  ignore_signals
  close_control_channels
  set_supervisor
  REPLY_TIMEOUT=$((GRACE + STOP_TIMEOUT))
  "${REACHED_BY[$1]}" "$1" "${SUPERVISOR[@]}" sweep --dir "$RUN" --name "$1" --grace "$GRACE" \
    </dev/null >/dev/null 2>&1 ||
    : >"$RUN/node_$1.lost" # for the verdict
}


# Write the supervisor's files, for the verdict: the supervisor's interpreter could not be started (exit code 126 or
# 127), or the login shell did not start the supervisor (then ssh_call.py has written the reason to the log).
record_unstarted() {
  local node
  for node in "${!UNSTARTED[@]}"; do
    [[ ! -e $RUN/node_$node.exit ]] || continue
    if ((UNSTARTED[$node] != EXIT_UNFIT)); then
      printf '%s\n' "$PYTHON: cannot be started on $node; name an interpreter of that node with --python" \
        >>"$RUN/node_$node.log"
    fi
    printf '%s\n' "${UNSTARTED[$node]}" >"$RUN/node_$node.exit"
  done
  UNSTARTED=()
}


schedule_request() { # <seconds from now> <stop, kill or abandon>
  NEXT_REQUEST_TIME=$((SECONDS + $1)) NEXT_REQUEST=$2
}


escalate() {
  case $NEXT_REQUEST in
    stop) send_request stop; schedule_request "$STOP_TIMEOUT" kill ;;
    kill) send_request kill; schedule_request "$STOP_TIMEOUT" abandon ;;
    abandon) abandon_nodes ;;
  esac
}


send_request() { # <stop, kill or signal N>
  local control
  for control in "${CONTROL[@]}"; do
    echo "$1" >&"$control" || true # the client may have exited
  done 2>/dev/null
}


abandon_nodes() {
  local node note=''
  [[ ! $HEARTBEAT_TIMEOUT ]] || note=" (its processes exit after $HEARTBEAT_TIMEOUT s without heartbeats)"
  for node in "${!CLIENT[@]}"; do
    record "$node: still running after the stop request; giving up$note"
    : >"$RUN/node_$node.lost"
    kill -KILL "${CLIENT[$node]}" 2>/dev/null || true
    handle_exit "$node" 255
  done
}


# The first signal sends a stop request to the nodes, the second a kill request.
handle_signal() { # <signal>
  if [[ $SIGNAL ]]; then
    # A terminal sends HUP and QUIT to its whole process group, and a script in that group forwards them as well.
    [[ $1 != @(HUP|QUIT) ]] || ((SECONDS > SIGNAL_TIME + 1)) || return 0
    send_request kill
    schedule_request "$STOP_TIMEOUT" abandon
    return
  fi
  SIGNAL=$1 SIGNAL_TIME=$SECONDS
  [[ $1 != HUP || -f /dev/stderr ]] || exec >>"$RUN/launcher.log" 2>&1 # the terminal was closed
  [[ $1 == @(INT|TERM) ]] || record_signal "SIG$1"
  record "$1: stopping; up to $GRACE s to write a checkpoint, $1 again to kill at once"
  send_request stop
  schedule_request $((GRACE + STOP_TIMEOUT)) abandon # supervisors send SIGKILL after the grace period
}


# Pass a signal on to the ranks that have a handler. Supervisors without such a rank stop their command.
# Without subshells: bash may lose a signal that arrives while a trap waits for one.
pass_signal_on() { # <name> <number>
  PASSED_SIGNAL=SIG$1
  record "SIG$1: sending it to the ranks, or stopping them if they have no handler for it"
  record_signal "SIG$1"
  send_request "signal $2"
}


# Record a signal for the verdict.
record_signal() { # <its name>
  printf '{"signal": "%s", "sender": "to the launcher", "time": %(%s)T}\n' "$1" -1 \
    >"$RUN/errors/signal_launcher_$1.json" || true
}


watch_signals() {
  local name other others
  trap '' PIPE # a node may exit during a request, and the console may be closed
  for name in INT TERM HUP QUIT; do
    # shellcheck disable=SC2064
    trap "handle_signal $name" "$name"
  done
  mapfile -t others < <(kill -l "${PASSED_ON[@]}") # the number of each name, the name of each number
  for name in "${PASSED_ON[@]}"; do
    other=${others[0]} others=("${others[@]:1}")
    [[ $name != [0-9]* ]] || read -r name other <<<"$other $name"
    # shellcheck disable=SC2064
    trap "pass_signal_on $name $other" "$name"
  done
}


# Send heartbeats to all nodes until HEARTBEATS closes. A node that misses them stops its command.
send_heartbeats() {
  local control status
  ignore_signals
  while true; do
    read -r -t $((HEARTBEAT_TIMEOUT / 4)) _ && status=0 || status=$?
    ((status > 128)) || return 0
    for control in "${CONTROL[@]}"; do
      echo >&"$control" || true
    done
  done 2>/dev/null
}


# Watch for a hang until stop_hang_watch or until the launcher exits. Without --hang-timeout, a run is stopped only if
# it logs steps and no rank can make progress; any other run that looks hung is only reported.
start_hang_watch() {
  [[ $HANG_TIMEOUT != 0 ]] || return 0
  start_with_pipe HANG_CHANNEL run_hang_watch
  HANG_WATCHER=$!
}


run_hang_watch() {
  local options=()
  if [[ $HANG_TIMEOUT ]]; then
    options=(--timeout "$HANG_TIMEOUT")
  elif ((ALL_RANKS_HERE)); then
    options=(--timeout "$DEFAULT_HANG_TIMEOUT" --certain)
  fi
  ignore_signals
  trap - TERM # hang_watch.sh ends itself with it
  close_control_channels
  exec setsid "$KIT/scripts/lib/hang_watch.sh" --python "$PYTHON" "${options[@]}" "$RUN" \
    1>&"$EVENTS" 2>>"$RUN/launcher.log"
}


stop_hang_watch() {
  [[ $HANG_TIMEOUT != 0 ]] || return 0
  {
    exec {HANG_CHANNEL}>&-
    join "$HANG_WATCHER" || true
  } 2>/dev/null # bash would print "Terminated"
  rm -f -- "$RUN"/.hang{.json,_notice}
}


# Find the first failure, write the report, and set CODE.
report_verdict() {
  local options=() verdict
  record_unstarted
  case $SIGNAL in
    INT) options=(--exit-code "$EXIT_INTERRUPTED") ;;
    TERM | HUP | QUIT) options=(--exit-code "$EXIT_TERMINATED") ;;
    *) options=(--exit-code "$STATUS" --no-signal) ;;
  esac
  ((!BATCH_JOB)) || options+=(--resume '') # slurm_job.bash prints whether it requeues the job
  # Through a pipe, as a closed console must not change the exit code.
  verdict=$(kit_python runs.verdict "$RUN" --report "${options[@]}" 2>&1) && CODE=0 || CODE=$?
  printf '%s\n' "$verdict" >&2 || true
}


# Whether a restart may help: the call was valid, no stop was requested (a signal that was passed on may be one), the
# limit of restarts is not reached, and fewer than MAX_STALLED restarts in a row were without progress.
should_restart() {
  [[ ! $SIGNAL ]] && ((CODE != 0 && CODE != EXIT_WRONG_CALL && CODE != EXIT_STOPPED)) || return 1
  [[ ! $PASSED_SIGNAL ]] || ((CODE != EXIT_TERMINATED)) || return 1
  ((RESTARTS < MAX_RESTARTS)) || return 1
  if made_progress || ((RESTARTS == 0)); then
    STALLED=0
  else
    STALLED=$((STALLED + 1))
  fi
  ((STALLED < MAX_STALLED)) && return
  record "exit code $CODE: no progress${LAST_STEP:+ past step $LAST_STEP} in $STALLED restarts; giving up"
  return 1
}


# Whether the attempt logged a new step or, if the run logs no steps, ran for PROGRESS_SECONDS.
made_progress() {
  local before=$LAST_STEP
  LAST_STEP=$(kit_python metrics "$RUN/metrics.jsonl") || LAST_STEP=''
  if [[ $LAST_STEP ]]; then
    ((LAST_STEP > ${before:--1}))
  else
    ((SECONDS - ATTEMPT_START >= PROGRESS_SECONDS))
  fi
}


prepare_restart() {
  RESTARTS=$((RESTARTS + 1)) NEXT_REQUEST='' NEXT_REQUEST_TIME='' ATTEMPT_START=$SECONDS
  archive_attempt "$RUN"
  ENVIRONMENT+=("TORCHELASTIC_RESTART_COUNT=$ATTEMPT")
  record "exit code $CODE: restart $RESTARTS of $MAX_RESTARTS, from the newest valid checkpoint"
}


# Move the files of an attempt into the next attempt_<n>, and set ATTEMPT to n. Files of the whole run stay.
archive_attempt() { # <run directory>
  local file
  ATTEMPT=1
  while [[ -e $1/attempt_$ATTEMPT ]]; do
    ATTEMPT=$((ATTEMPT + 1))
  done
  mkdir -- "$1/attempt_$ATTEMPT"
  cp -p -- "$1/run.json" "$1/attempt_$ATTEMPT/"
  for file in "$1"/{errors,ranks,verdict.json,hang.json} "$1"/node_*; do
    [[ ! -e $file ]] || mv -- "$file" "$1/attempt_$ATTEMPT/"
  done
  mkdir -- "$1/errors" "$1/ranks"
}
