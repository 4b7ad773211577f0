#!/usr/bin/env bats
#
# Events in scripts/lib/watch.bash whose timing a launch cannot control.

bats_require_minimum_version 1.5.0

# shellcheck source=scripts/lib/options.bash
source "$BATS_TEST_DIRNAME/../scripts/lib/options.bash"
# shellcheck source=scripts/lib/nodes.bash
source "$BATS_TEST_DIRNAME/../scripts/lib/nodes.bash"
# shellcheck source=scripts/lib/watch.bash
source "$BATS_TEST_DIRNAME/../scripts/lib/watch.bash"


record() { # <message...>
  echo "$@" >>recorded
}


KIT=$(readlink -f "$BATS_TEST_DIRNAME/..")


# The state at the start of an attempt. Requests to the nodes are discarded.
setup() {
  cd "$BATS_TEST_TMPDIR" || return
  # shellcheck disable=SC2034 # wait_for_nodes reads them
  NEXT_REQUEST='' NEXT_REQUEST_TIME='' HANG_TIMEOUT=0
  RUN=$PWD
  declare -gA CLIENT=() CONTROL=() DEAD=()
  exec {EVENTS}<> <(:)
  : >recorded
}


add_client() { # <node>
  sleep 1000 3>&- &
  local control
  CLIENT[$1]=$!
  exec {control}>/dev/null
  CONTROL[$1]=$control
}


teardown() {
  kill -KILL "${CLIENT[@]}" 2>/dev/null || true
}


@test "an exit code may arrive in several pieces" {
  add_client node1
  add_client node2
  local clients=("${CLIENT[@]}")
  { printf 'no' && sleep 0.7 && printf 'de1 ' && sleep 0.7 && printf '75\nnode2 0\n'; } >&"$EVENTS" 3>&- &
  wait_for_nodes
  kill -KILL "${clients[@]}"
  [ ! -s recorded ]
  [ "$STATUS" -eq 75 ]
}


@test "the launcher does not wait for the exit code of a killed client" {
  add_client node1
  local client=${CLIENT[node1]}
  kill -KILL "$client"
  wait_for_nodes
  [ "$(<recorded)" = "node1: the launcher's client (process $client) was killed" ]
  [ "$STATUS" -eq 137 ]
  [ ${#DEAD[@]} -eq 0 ] # otherwise the launcher would not wait for a report of the next attempt's client
}


@test "a hang ends the run with 124, unless the run is already ending or the hang was in an earlier attempt" {
  # shellcheck disable=SC2034 # handle_hang reads it
  EXIT_TIMED_OUT=124
  add_client node1
  printf '%s\n' "/hang_watch 0" "node1 0" >&"$EVENTS"
  wait_for_nodes
  [ "$STATUS" -eq 0 ]
  [ ! -s recorded ]

  add_client node1
  echo '{}' >.hang.json
  printf '%s\n' "/hang_watch 0" "node1 143" >&"$EVENTS"
  wait_for_nodes
  [ "$STATUS" -eq 124 ]
  [ -e hang.json ] && [ ! -e .hang.json ]
  [ "$(<recorded)" = "the run hangs; stopping it" ]
  rm hang.json

  STATUS=0 NEXT_REQUEST=''
  add_client node1
  add_client node2
  echo '{}' >.hang.json
  printf '%s\n' "node1 1" "/hang_watch 0" "node2 1" >&"$EVENTS"
  wait_for_nodes
  [ "$STATUS" -eq 1 ]
  [ ! -e hang.json ]
}


@test "a run that looks hung is reported, also with --quiet, but not when it is already ending" {
  record() { # <message...>
    echo "${QUIET:-0} $*" >>recorded
  }
  # shellcheck disable=SC2034 # record reads it
  QUIET=1
  add_client node1
  printf 'the run looks hung: no output' >.hang_notice
  printf '%s\n' "/hang_watch 0" "/hang_watch 0" "node1 0" >&"$EVENTS"
  wait_for_nodes
  [ "$(<recorded)" = "0 the run looks hung: no output" ]
  [ "$STATUS" -eq 0 ] && [ ! -e .hang_notice ]

  add_client node1
  add_client node2
  printf 'the run looks hung: no output' >.hang_notice
  printf '%s\n' "node1 1" "/hang_watch 0" "node2 1" >&"$EVENTS"
  wait_for_nodes
  [ "$(wc -l <recorded)" -eq 1 ]
}


@test "hang_watch.sh exits with the launcher, also during a query" {
  mkfifo launcher
  trap '' TERM # a parent of the launcher may have set this
  setsid "$KIT/scripts/lib/hang_watch.sh" --python python3 --timeout 1000 nowhere <launcher 3>&- &
  local watcher=$! control
  trap - TERM
  disown
  exec {control}>launcher
  timeout 20 sh -c 'until [ "$(wc -w <"/proc/$1/task/$1/children")" -ge 1 ]; do sleep 0.05; done' sh "$watcher"
  exec {control}>&-
  timeout 20 sh -c 'while pgrep -s "$1"; do sleep 0.05; done' sh "$watcher"
}


# In a separate shell, because bash prints such lines only in scripts.
@test "when a client or its command is killed, the console shows no command of the launcher" {
  cat >launcher.sh <<'END'
for part in common options nodes watch; do
  source "$KIT/scripts/lib/$part.bash"
done
record() { echo "$@"; }
RUN=$PWD HANG_TIMEOUT=0
begin_run
start_client node1 run_here node1 bash -c 'echo of the command >&2; kill -KILL $$'
wait_for_nodes
start_client node2 run_here node2 bash -c 'kill -KILL $PPID'
wait_for_nodes
END
  KIT=$BATS_TEST_DIRNAME/.. bash launcher.sh >out 2>&1
  cat out
  [ "$(grep -vc "^node2: the launcher's client (process [0-9]*) was killed" out)" -eq 1 ]
  grep -qx "of the command" out
}
