# shellcheck shell=bash
#
# Nodes while they run: start them, wait for the first that ends badly, end the others, judge, try again.
#
# Sourced by launcher.bash, never run.

# Every node has a client: here the process that runs node.sh, with ssh the one that talks to the node. Its standard
# input is the node's dead man's switch, through which it is also told to stop; how it ended comes through EVENTS.
declare -A CLIENT=() SWITCH=() # of each node that has not ended: its process, the switch
declare -A DEAD=()             # clients that have gone, perhaps with a word that is still to come
CONSOLES=()                    # processes that show what nodes say
STATUS=0                       # of the first node that ended badly
PATIENCE=''                    # seconds without a word of the launcher after which a node gives it up
MOST_VAIN=3                    # restarts that came no further, one after the other, before giving up
MINUTES=300                    # seconds after which a failure is no longer one of the start
HURRY=10                       # seconds between the request to stop and the order to end, when a node has failed


# Run a command with its words on a node; a launcher over ssh has a door of its own.
on_node() { # <node> <command> [word...]
  "${@:2}"
}


# What nodes that share no folder with us have written; such a launcher knows how to get it.
bring_home() {
  :
}


put_away() { # <folder for an earlier try>
  :
}


start_node() { # <node> <command...>
  start_client "$1" "$1" on_node "$1" "$KIT/scripts/lib/node.sh" --run "$RUN" --node "$1" --grace "$GRACE" \
    ${PATIENCE:+--patience "$PATIENCE"} --source "$(node_env)" -- "${@:2}"
}


start_client() { # <its name> <node whose rank 0 is shown, if it has it> <command...>
  local console switch
  pipe_into console show_rank_0 "$2"
  CONSOLES+=($!)
  pipe_into switch tell_end "$1" "${@:3}" >&"$console" 2>&1
  CLIENT[$1]=$! SWITCH[$1]=$switch
  exec {console}>&-
}


# The console shows rank 0 as it speaks; what agents say goes to stderr. The log has everybody.
show_rank_0() { # <node>
  trap '' INT TERM HUP TSTP USR2
  let_go_of_switches
  exec stdbuf -oL sed -n -e "s/^\[$1:0\] //p;t" -e '/^\[[^]: ]*:[0-9]*\] /!w /dev/stderr'
}


tell_end() { # <node> <command...>
  local status=0
  trap : TERM HUP # not ignored: node.sh has a use for them
  trap '' USR2
  let_go_of_switches
  "${@:2}" || status=$?
  echo "$1 $status" >&"$EVENTS"
}


# What runs beside the launcher must hold no node's switch: else that node would not notice that the launcher is gone.
let_go_of_switches() {
  local switch
  for switch in "${SWITCH[@]}"; do
    exec {switch}>&-
  done
}


# config/node_env.sh of the working folder, else of the kit.
node_env() {
  if [[ -e config/node_env.sh ]]; then
    absolute config/node_env.sh
  else
    printf '%s\n' "$KIT/config/node_env.sh"
  fi
}


# To the last node's end. The first that ends badly ends all the others.
wait_for_nodes() {
  local words begun='' node status
  while ((${#CLIENT[@]})); do
    if IFS= read -r -t 0.5 -u "$EVENTS" words; then
      read -r node status <<<"$begun$words"
      begun=''
      ended "$node" "$status"
    else
      begun+=$words # the time was up amid the line
      notice_dead_clients
    fi
    if [[ $DEADLINE ]] && ((SECONDS >= DEADLINE)); then
      press_on
    fi
  done
  wait "${CONSOLES[@]}" || true
  CONSOLES=()
}


# A client that somebody has killed tells nothing of its end.
notice_dead_clients() {
  local node stat
  for node in "${!CLIENT[@]}"; do
    { read -r stat <"/proc/${CLIENT[$node]}/stat"; } 2>/dev/null || stat=') Z'
    [[ $stat == *') Z'* ]] || continue
    if [[ ${DEAD[$node]-} ]]; then
      tell "$node: process ${CLIENT[$node]}, through which we speak to it, was killed"
      ended "$node" 137
    else
      DEAD[$node]=1 # what it has told may still be on its way
    fi
  done
}


ended() { # <node> <status>
  local switch=${SWITCH[$1]} status=$2
  exec {switch}>&-
  unset "CLIENT[$1]" "SWITCH[$1]" "DEAD[$1]"
  if ((status == 255)) && ! grep -qsx 255 "$RUN/node_$1.exit"; then # ssh's word for a lost node, unless it is its own
    status=$EXIT_UNFIT
    lost "$1"
  fi
  if ((status != 0 && STATUS == 0)); then
    STATUS=$status
    [[ $DEADLINE ]] || next_order $((status == EXIT_STOPPED ? 30 : 0)) stop # who stops with a checkpoint may still write
  fi
}


# For the verdict as well: whatever that node thinks, we have lost it.
lost() { # <node>
  : >"$RUN/node_$1.lost"
  tell "$1: the connection to it is lost: ending the others"
}


# What is said to the nodes that are left when the time has come: stop, then kill, then nothing more.
next_order() { # <seconds from now> <order>
  DEADLINE=$((SECONDS + $1)) ORDER=$2
}


press_on() {
  case $ORDER in
    stop) order stop; next_order "$HURRY" kill ;;
    kill) order kill; next_order "$HURRY" abandon ;;
    abandon) abandon ;;
  esac
}


order() { # <stop or kill>
  local switch
  for switch in "${SWITCH[@]}"; do
    echo "$1" >&"$switch" || true # it may just have ended
  done 2>/dev/null
}


# A node that does not answer: it ends its processes by itself when it has not heard of us for a while.
abandon() {
  local node
  for node in "${!CLIENT[@]}"; do
    tell "$node does not answer; what runs there ends when it notices that nobody is here any more"
    kill -KILL "${CLIENT[$node]}" 2>/dev/null || true
    ended "$node" 255
  done
}


# A person, or the system, asks us to stop: the nodes are told, and told again when we are.
interrupted() { # <signal>
  if [[ $SIGNAL ]]; then
    order kill
    next_order "$HURRY" abandon
    return
  fi
  SIGNAL=$1
  [[ $1 != HUP ]] || exec >>"$RUN/launcher.log" 2>&1 # the terminal is gone
  tell "$1: stopping; up to $GRACE s to write a checkpoint, once more $1 to end at once"
  order stop
  next_order $((GRACE + HURRY)) abandon # a node keeps the grace itself
}


watch_signals() {
  local name
  trap '' PIPE # a node may end while it is told something
  for name in INT TERM HUP; do
    # shellcheck disable=SC2064
    trap "interrupted $name" "$name"
  done
}


# A word to each node every few seconds, as long as this shell lives: by its silence a node knows that it is cut off.
keep_company() {
  local switch status
  trap '' INT TERM HUP TSTP PIPE
  while true; do
    read -r -t $((PATIENCE / 4)) _ && status=0 || status=$?
    ((status > 128)) || return 0
    for switch in "${SWITCH[@]}"; do
      echo >&"$switch" || true
    done
  done 2>/dev/null
}


# Whose failure came first, and the exit code of it all in CODE.
judge() {
  local asked=()
  case $SIGNAL in
    INT) asked=(--exit-code "$EXIT_INTERRUPTED") ;;
    TERM | HUP) asked=(--exit-code "$EXIT_TERMINATED") ;;
    *) asked=(--exit-code "$STATUS") ;;
  esac
  kit_python verdict "$RUN" "${asked[@]}" && CODE=0 || CODE=$?
  if [[ -e $RUN/metrics.jsonl ]]; then
    kit_python report "$RUN" >/dev/null || warn "$RUN/report.html: could not be written"
  fi
}


# Whether the failure is one that another try may mend: not a wrong call, nobody asked us to stop, and the last restarts
# were not in vain.
may_restart() {
  [[ ! $SIGNAL ]] && ((CODE != 0 && CODE != EXIT_USAGE && CODE != EXIT_STOPPED && RESTARTS < MAX_RESTARTS)) || return 1
  if came_further || ((RESTARTS == 0)); then
    VAIN=0
  else
    VAIN=$((VAIN + 1))
  fi
  ((VAIN < MOST_VAIN)) && return
  tell "exit code $CODE: the last $VAIN restarts came no further${FURTHEST:+ than step $FURTHEST}: not trying again"
  return 1
}


# By the steps that the script has logged; of one that logs none, by its having worked for minutes.
came_further() {
  local before=$FURTHEST
  FURTHEST=$(kit_python progress "$RUN") || FURTHEST=''
  if [[ $FURTHEST ]]; then
    ((FURTHEST > ${before:--1}))
  else
    ((SECONDS - BEGUN >= MINUTES))
  fi
}


# Keep what the failed try left, and make room for the next.
next_try() {
  RESTARTS=$((RESTARTS + 1))
  put_try_away "$RUN"
  put_away "try_$TRIES"
  tell "exit code $CODE: starting again, $RESTARTS of $MAX_RESTARTS, from the newest good checkpoint"
}


# Into the next try_<n>, in TRIES: all that a try leaves, but for what goes on with the run.
put_try_away() { # <folder of the run>
  local file
  TRIES=1
  while [[ -e $1/try_$TRIES ]]; do
    TRIES=$((TRIES + 1))
  done
  mkdir -- "$1/try_$TRIES"
  cp -p -- "$1/run.json" "$1/try_$TRIES/"
  for file in "$1"/{errors,ranks,verdict.json} "$1"/node_*; do
    [[ ! -e $file ]] || mv -- "$file" "$1/try_$TRIES/"
  done
  mkdir -- "$1/errors" "$1/ranks"
}


# Start the nodes, wait, judge; again while --max-restarts allows it. Sets CODE.
run_nodes() { # <function that starts them> [its words...]
  RESTARTS=0 VAIN=0 FURTHEST=''
  [[ ! -e $RUN/metrics.jsonl ]] || FURTHEST=$(kit_python progress "$RUN")
  open_events
  watch_signals
  while true; do
    STATUS=0 DEADLINE='' ORDER='' BEGUN=$SECONDS
    "$@"
    [[ ! $PATIENCE ]] || pipe_into COMPANY keep_company
    wait_for_nodes
    [[ ! $PATIENCE ]] || exec {COMPANY}>&-
    bring_home
    judge
    may_restart || break
    next_try
  done
}


# Both ends in one: who tells of his end never waits for a reader.
open_events() {
  exec {EVENTS}<> <(:)
}
