#!/usr/bin/env bats
#
# launch.supervisor runs one command, records its exit code and leaves no process, whatever happens to the
# command, the supervisor or the launcher, which holds the control channel open. test_supervisor.py also kills the
# supervisor and its guard.

bats_require_minimum_version 1.5.0


setup() {
  SUPERVISOR=("${VIRTUAL_ENV:-$BATS_TEST_DIRNAME/../.venv}/bin/python" -I -S "$BATS_TEST_DIRNAME/../scripts/lib/module.py" launch.supervisor)
  RUN="$BATS_TEST_TMPDIR/a 'run'"
  mkdir -p "$RUN"
  mkfifo "$BATS_TEST_TMPDIR/control"
}


teardown() {
  exec {CONTROL}>&- || true
  "${SUPERVISOR[@]}" sweep --dir "$RUN" --name n1
}


# Start a supervisor as a launcher does. It stops when CONTROL is closed.
start() { # <argument...>
  "${SUPERVISOR[@]}" run --dir "$RUN" --name n1 "$@" <"$BATS_TEST_TMPDIR/control" >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  NODE=$!
  exec {CONTROL}>"$BATS_TEST_TMPDIR/control"
}


wait_for_line() { # <text>
  timeout 20 grep -qF -m1 -- "$1" <(tail -n +1 -F "$RUN/node_n1.log" 2>/dev/null)
}


status_of_node() {
  wait "$NODE" && status=0 || status=$?
}


# Wait for the supervisor and check that no process started by node_env.sh remains.
exits_with() { # <exit code>
  timeout 20 tail -f --pid "$NODE" /dev/null
  status_of_node
  [ "$status" -eq "$1" ]
  run ! grep -lsFxz -- "COMPANION=$RUN" /proc/[0-9]*/environ
  run ! pgrep -f -- "--source $BATS_TEST_TMPDIR/env.sh"
}


# Print the number of processes of this run.
remaining() {
  grep -lsFxz -- "MUSTER_RUN_DIR=$RUN" /proc/[0-9]*/environ | wc -l
}


@test "exit code, output and log are those of the command" {
  start -- sh -c 'echo out; echo err >&2; exit 42'
  status_of_node
  [ "$status" -eq 42 ]
  [ "$(cat "$RUN/node_n1.exit")" = 42 ]
  [ "$(sort "$RUN/node_n1.log")" = $'err\nout' ]
  [ "$(sort "$BATS_TEST_TMPDIR/out")" = $'err\nout' ]
}


@test "arguments arrive byte for byte" {
  arguments=("a b" "c'd\"e" '$HOME `x`; exit' $'new\nline' 'ünïcode' '' '*')
  start -- sh -c 'printf "%s\0" "$@" >"$MUSTER_RUN_DIR/arguments"' sh "${arguments[@]}"
  status_of_node
  [ "$status" -eq 0 ]
  printf '%s\0' "${arguments[@]}" | cmp - "$RUN/arguments"
}


@test "stale variables of another launch do not reach the command, but TORCHELASTIC_ERROR_FILE does" {
  export RANK=3 WORLD_SIZE=8 PET_NNODES=2 TORCHELASTIC_USE_AGENT_STORE=True MASTER_ADDR=old
  export TORCHELASTIC_ERROR_FILE=errors.json
  start -- sh -c 'env | grep -E "^(RANK|WORLD_SIZE|PET_|MASTER_|TORCHELASTIC_(USE|ERROR))" | sort'
  status_of_node
  [ "$(cat "$RUN/node_n1.log")" = TORCHELASTIC_ERROR_FILE=errors.json ]
}


@test "children that outlive the command are killed, also in another session" {
  start -- bash -c 'sleep 300 & setsid sleep 300 & exit 0'
  status_of_node
  [ "$status" -eq 0 ]
  [ "$(remaining)" -eq 0 ]
}


@test "SIGTERM reaches the command, which can write a checkpoint and choose its exit code" {
  start -- bash -c 'trap "echo saved; exit 75" TERM; echo ready; while :; do sleep 0.1; done'
  wait_for_line ready
  kill -TERM "$NODE"
  status_of_node
  [ "$status" -eq 75 ]
  grep -qx saved "$RUN/node_n1.log"
  [ "$(remaining)" -eq 0 ]
}


@test "a second SIGTERM kills the command at once" {
  start --grace 600 -- bash -c 'trap "echo received" TERM; echo ready; while :; do sleep 0.1; done'
  wait_for_line ready
  kill -TERM "$NODE"
  wait_for_line received
  kill -TERM "$NODE"
  status_of_node
  [ "$status" -eq 137 ]
  [ "$(remaining)" -eq 0 ]
}


@test "config/node_env.sh is sourced before the command" {
  echo 'export FROM_NODE_ENV="a b"; unset_variable=$NOT_SET' >"$BATS_TEST_TMPDIR/env.sh"
  start --source "$BATS_TEST_TMPDIR/env.sh" -- sh -c 'echo "$FROM_NODE_ENV"'
  status_of_node
  [ "$status" -eq 0 ]
  [ "$(cat "$RUN/node_n1.log")" = "a b" ]
}


@test "a failing node_env.sh is reported, and cd in node_env.sh does not affect the command" {
  printf 'true\nmodule load cuda\n' >"$BATS_TEST_TMPDIR/env.sh"
  start --source "$BATS_TEST_TMPDIR/env.sh" -- touch "$RUN/ran"
  status_of_node
  [ "$status" -eq 69 ]
  [ ! -e "$RUN/ran" ]
  grep -qF "n1: $BATS_TEST_TMPDIR/env.sh: line 2: 'module load cuda' failed with exit code 127; fix it" "$BATS_TEST_TMPDIR/out"
  exec {CONTROL}>&-
  echo 'cd /' >"$BATS_TEST_TMPDIR/env.sh"
  cd "$RUN"
  start --source "$BATS_TEST_TMPDIR/env.sh" -- pwd
  status_of_node
  [ "$(tail -n 1 "$RUN/node_n1.log")" = "$RUN" ]
}


@test "background processes of node_env.sh end with the command, or when node_env.sh exits" {
  local background="export COMPANION='$RUN'; while sleep 60; do :; done & setsid sleep 300 & sleep 300 &"
  echo "$background" >"$BATS_TEST_TMPDIR/env.sh"
  start --source "$BATS_TEST_TMPDIR/env.sh" -- sh -c 'exit 42'
  exits_with 42
  exec {CONTROL}>&-
  echo "$background exit 3" >"$BATS_TEST_TMPDIR/env.sh"
  start --source "$BATS_TEST_TMPDIR/env.sh" -- true
  exits_with 69
}


@test "a full disk under the log does not stop the command" {
  [ "$(id -u)" -eq 0 ] || skip "needs root to mount a small filesystem"
  small="$BATS_TEST_TMPDIR/small"
  mkdir "$small"
  mount -t tmpfs -o size=64k,mode=700 tmpfs "$small"
  RUN=$small
  start -- sh -c 'i=0; while [ $i -lt 3000 ]; do echo "line $i, long enough to fill a small disk"; i=$((i+1)); done; exit 7'
  status_of_node
  umount "$small"
  [ "$status" -eq 7 ]
  grep -q "line 2999" "$BATS_TEST_TMPDIR/out"
}


@test "a stop request in a file reaches only the supervisor of that run and node" {
  start -- sh -c 'trap "exit 7" TERM; echo up; while true; do sleep 1 & wait $!; done'
  wait_for_line up
  "${SUPERVISOR[@]}" stop --dir "$RUN-2" --name n1
  "${SUPERVISOR[@]}" stop --dir "$RUN" --name n2
  [ ! -e "$RUN-2" ] && [ ! -e "$RUN/node_n2.stop" ]
  kill -0 "$NODE"
  "${SUPERVISOR[@]}" stop --dir "$RUN" --name n1
  status_of_node
  [ "$status" -eq 7 ]
}


@test "a missing run directory is created, as on a node that does not share it" {
  RUN=$BATS_TEST_TMPDIR/not/yet
  start -- true
  status_of_node
  [ "$status" -eq 0 ]
  [ "$(<"$RUN/node_n1.exit")" = 0 ]
  [ -d "$RUN/errors" ]
}


@test "wrong arguments exit with 2 and start nothing" {
  run -2 "${SUPERVISOR[@]}" run --name n1 -- true
  run -2 "${SUPERVISOR[@]}" run --bad
  run -2 "${SUPERVISOR[@]}" wait --dir "$RUN" --name n1
  run -2 "${SUPERVISOR[@]}" run --dir "$RUN" --name n1
  run -2 "${SUPERVISOR[@]}" run --dir "$RUN" --name n1 --grace soon -- true
  [[ "$output" == "supervisor: --grace: expected a whole number of seconds, got 'soon'"* ]]
  [ -z "$(ls "$RUN")" ]
}
