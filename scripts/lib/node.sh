#!/usr/bin/env bash
#
# Run one command on this node for a launcher, and leave nothing behind.
#
# Usage: node.sh --run DIR --node NAME [--source FILE] [--grace SECONDS] [--patience SECONDS] -- COMMAND [WORD...]
#        node.sh --order stop|kill --run DIR --node NAME
#        node.sh --sweep --run DIR --node NAME [--grace SECONDS]
#
#   --run DIR        folder of the run: gets node_NAME.log, node_NAME.pid and node_NAME.exit; made where it
#                    is not shared with the launcher
#   --node NAME      what this node is called
#   --source FILE    shell script that is sourced before COMMAND starts
#   --grace SECONDS  time between the request to stop and KILL (default: 8)
#   --patience SECONDS  the launcher is also gone when nothing came from it for so long (default: never)
#   --order WORD     hand this to the node.sh that runs here for this run, where its standard input cannot
#   --sweep          only end what of this run is on this node; with a grace only if one is named
#
# COMMAND runs in a process group of its own. Its output goes to node_NAME.log and to standard output.
# Standard input is the dead man's switch: when it closes, the launcher is gone. Then, as on the line `stop` and on
# TERM and INT, COMMAND gets TERM, and after the grace its group gets KILL. The line `kill`, or a second signal,
# means KILL at once. Other lines only say that the launcher is there. Exits with COMMAND's own status.
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"

RUN='' NODE='' NODE_ENV='' GRACE='' PATIENCE='' SWEEP=0 ORDER='' COMMAND=()
AGENT='' # process id of COMMAND, and of its group
TEE=''   # of what writes the log
STOPPING=0
LAST_BREATH=1 # seconds between TERM and KILL for what COMMAND left behind


parse_args() { # <word...>
  while (($#)); do
    case $1 in
      --run) need_value "$@"; RUN=$2; shift 2 ;;
      --node) need_value "$@"; NODE=$2; shift 2 ;;
      --source) need_value "$@"; NODE_ENV=$2; shift 2 ;;
      --grace) need_value "$@"; GRACE=$2; shift 2 ;;
      --patience) need_value "$@"; PATIENCE=$2; shift 2 ;;
      --order) need_value "$@"; ORDER=$2; shift 2 ;;
      --sweep) SWEEP=1; shift ;;
      --help) usage; exit ;;
      --) shift; COMMAND=("$@"); break ;;
      *) die_usage "$1: not understood" ;;
    esac
  done
  [[ $RUN ]] || die_usage "--run is missing"
  [[ $NODE ]] || die_usage "--node is missing"
  [[ $GRACE ]] || GRACE=$((SWEEP ? 0 : 8))
  [[ $GRACE =~ ^[0-9]+$ ]] || die_usage "--grace '$GRACE': a whole number of seconds is wanted"
  [[ $PATIENCE =~ ^([1-9][0-9]*)?$ ]] || die_usage "--patience '$PATIENCE': a whole number of seconds is wanted"
  [[ ! $NODE_ENV || -r $NODE_ENV ]] || die_usage "--source '$NODE_ENV': cannot read it"
  [[ ! $ORDER || $ORDER == stop || $ORDER == kill ]] || die_usage "--order '$ORDER': stop or kill is wanted"
  ((SWEEP || ${#COMMAND[@]})) || [[ $ORDER ]] || die_usage "there is no command behind --"
}


# Everything that is printed from here on goes to the log as well. tee outlives signals meant for us.
log_everything() {
  local log
  pipe_into log tee_log
  TEE=$!
  exec 4>&1 >&"$log" 2>&1 {log}>&-
}


tee_log() {
  trap '' INT TERM HUP
  exec 3<&- tee -ap -- "$RUN/node_$NODE.log"
}


# It is complete when tee has seen the end of it.
close_log() {
  exec >&4 2>&4 4>&-
  wait "$TEE" 2>/dev/null || true
}


start() {
  exec 3<&0
  mkdir -p -- "$RUN/errors" "$RUN/ranks" || die "--run '$RUN': cannot be made on this node"
  log_everything
  forget_other_launches
  [[ ! $NODE_ENV ]] || source_node_env "$NODE_ENV" leave_early
  set -m # a process group for COMMAND, with SIGINT as it should be
  MUSTER_RUN_DIR=$RUN MUSTER_NODE=$NODE TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[$NODE:\${rank}] " \
    "${COMMAND[@]}" </dev/null 3<&- 4>&- &
  AGENT=$!
  set +m
  write_beside "$RUN/node_$NODE.pid" "$AGENT"
  watch_launcher &
  WATCHER=$!
}


# config/node_env.sh has ended us.
leave_early() {
  sweep
  close_log
}


watch_launcher() {
  trap - TERM INT HUP
  exec >/dev/null 2>&1 4>&-
  local order
  while read -r ${PATIENCE:+-t "$PATIENCE"} -u 3 order; do
    obey "$order" $$
  done
  kill -HUP $$
}


obey() { # <order> <process id of node.sh>
  case $1 in
    stop) kill -HUP "$2" ;;
    kill) kill -USR1 "$2" ;;
  esac
}


# The parent of COMMAND is the node.sh that started it, if COMMAND still is of this run.
hand_on() { # <order>
  local command
  read -r command 2>/dev/null <"$RUN/node_$NODE.pid" || return 0
  [[ " $(marked | tr '\n' ' ')" == *" $command "* ]] || return 0
  obey "$1" "$(ps -o ppid= -p "$command")"
}


# TERM first, so that a checkpoint can be written; KILL when the grace is over, or when asked again.
stop_or_kill() {
  if ((STOPPING)); then
    kill_now
  else
    stop
  fi
}


kill_now() {
  SIGNALLED=1
  kill_group KILL || true
}


stop() {
  SIGNALLED=1
  ((!STOPPING)) || return 0 # a bare `return` in a trap gives the status of the `wait` that it interrupted
  STOPPING=1
  kill -TERM "$AGENT" 2>/dev/null || true
  kill_later >/dev/null 2>&1 3<&- 4>&- &
  KILLER=$!
}


kill_later() {
  trap - TERM INT HUP
  read -r -t "$GRACE" <> <(:) || true # sleeps without a child that would outlive us: nobody writes there
  kill_group KILL
}


kill_group() { # <signal>
  [[ $AGENT ]] && kill "-$1" -- "-$AGENT" 2>/dev/null
}


# What COMMAND left in its group, what left the group but still carries our mark, and what config/node_env.sh left.
sweep() {
  local name
  for name in TERM KILL; do
    kill_group "$name" || true
    # shellcheck disable=SC2046 # a word each
    end_each "$name" $(marked) $(left_in_background "$TEE")
    someone_left || return 0
    wait_until_gone "$LAST_BREATH"
  done
}


someone_left() {
  kill_group 0 || [[ $(marked)$(left_in_background "$TEE") ]]
}


# TERM to those whom none of us has started: the agent, who tells its ranks, or ranks that have lost theirs.
ask_to_stop() {
  local pid pids
  pids=$(marked)
  for pid in $pids; do
    grep -qxF -- "$(parent_of "$pid")" <<<"$pids" || kill -TERM "$pid" 2>/dev/null || true
  done
  wait_until_gone "$GRACE"
}


parent_of() { # <process id>
  sed -n 's/^PPid:\t//p' "/proc/$1/status" 2>/dev/null || true
}


wait_until_gone() { # <seconds>
  local turns=$(($1 * 20))
  while someone_left && ((turns-- > 0)); do
    sleep 0.05
  done
}


end_each() { # <signal> <process id...>
  local pid
  for pid in "${@:2}"; do
    kill "-$1" "$pid" 2>/dev/null || true
  done
}


# Processes whose environment says that they belong to this run on this node.
marked() {
  local file
  for file in $(grep -lsFxz -- "MUSTER_RUN_DIR=$RUN" /proc/[0-9]*/environ 2>/dev/null || true); do
    grep -qsFxz -- "MUSTER_NODE=$NODE" "$file" 2>/dev/null && printf '%s\n' "${file//[!0-9]/}"
  done
  return 0
}


write_beside() { # <file> <text>
  printf '%s\n' "$2" >"$1.writing" && mv -f -- "$1.writing" "$1"
}


finish() {
  kill "$WATCHER" ${KILLER:+"$KILLER"} 2>/dev/null || true
  sweep
  write_beside "$RUN/node_$NODE.exit" "$STATUS" || warn "$RUN: cannot write node_$NODE.exit"
  close_log
}


main() {
  parse_args "$@"
  if [[ $ORDER ]]; then
    hand_on "$ORDER"
    return
  fi
  if ((SWEEP)); then
    ((GRACE == 0)) || ask_to_stop
    sweep # by our mark alone: the process id of then may be somebody else's by now
    return
  fi
  trap stop_or_kill TERM INT
  trap stop HUP
  trap kill_now USR1
  start
  STATUS=0
  join "$AGENT" || STATUS=$?
  trap '' TERM INT HUP USR1
  finish
  exit "$STATUS"
}

main "$@"
