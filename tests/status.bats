#!/usr/bin/env bats
#
# scripts/status.sh and scripts/stop.sh on the laboratory cluster: from any terminal, folder and machine, each rank of a
# run is seen where it is; what does not move is named; one run is stopped and no other, with the time to write a
# checkpoint; and what is said to be gone is gone.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
# shellcheck source=tests/lab/nodes.bash
source "$BATS_TEST_DIRNAME/lab/nodes.bash"


setup_file() {
  export LAUNCH STATUS STOP
  LAUNCH=$BATS_TEST_DIRNAME/../scripts/ssh/launch_torchrun_auto.sh
  STATUS=$BATS_TEST_DIRNAME/../scripts/status.sh STOP=$BATS_TEST_DIRNAME/../scripts/stop.sh
  raise_nodes 3
}


teardown_file() {
  lower_nodes
}


setup() {
  enter_work
  cat >"my script.py" <<'END'
import os, signal, sys, time
def leave(*_):
    time.sleep(1.5)  # as a checkpoint takes its time
    open("saved " + os.environ["RANK"] + " " + sys.argv[1], "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, leave)
print("at work as", sys.argv[1], flush=True)
while True:
    time.sleep(0.1)
END
}


teardown() {
  [ "${BATS_TEST_COMPLETED-}" ] || tail -n 30 "$WORK"/out* "$WORK"/logs/*/*.log
  lab heal "$N3" >/dev/null 2>&1 || true
  tmux -L "$PREFIX" kill-server 2>/dev/null || true
  leave_work
}


# Start a run in the background that is called so; sets LAUNCHER and RUN when all its ranks are at work.
start_run() { # <name> <number of ranks> <word...>
  "$LAUNCH" --script "my script.py" - 1 "${@:3}" -- "$1" >"out $1" 2>&1 3>&- &
  LAUNCHER=$!
  timeout 120 grep -qF -m1 "at work" <(tail -n +1 -F "out $1" 2>/dev/null)
  RUN=$WORK/logs/$(sed -n 's/.*: run \([^:]*\): .*/\1/p' "out $1")
  timeout 60 sh -c 'until [ "$(grep -hs "at work as $2" "$1"/node_*.log | wc -l)" -eq "$3" ]; do sleep 0.1; done' \
    sh "$RUN" "$1" "$2"
}


pid_of() { # <rank> <run>
  "$STATUS" --json "$2" | "$VIRTUAL_ENV/bin/python" -c '
import json, sys
ranks = [rank for one in json.load(sys.stdin)["nodes"] for rank in one["look"]["ranks"]]
print(next(rank["pid"] for rank in ranks if rank["rank"] == int(sys.argv[1])))' "$1"
}


pid_in() { # <supervisor, guard or command> <node>
  python3 -c 'import json, sys; print(json.load(open(sys.argv[2]))[sys.argv[1]]["pid"])' "$1" "$RUN/node_$2.pid"
}


left() { # <run>
  grep -lsFxz -- "MUSTER_RUN_DIR=$1" /proc/[0-9]*/environ 2>/dev/null | wc -l
}


@test "every rank is shown where it is, a stopped one looks hung, stop.sh ends this run and no other" {
  start_run one 2 "$N1" "$N2"
  one=$RUN one_launcher=$LAUNCHER
  start_run two 2 "$N2" "$N3"
  two=$RUN two_launcher=$LAUNCHER

  cd /
  COLUMNS=80 run -0 "$STATUS" "$one"
  [[ "${lines[0]}" == "${one##*/}: running for "* ]]
  [[ "$output" == *"$N1 "*" 0 "*"at work as one"*"$N2 "*" 1 "*"at work as one"* ]]
  [[ "$output" != *"as two"* ]]
  for line in "${lines[@]}"; do
    ((${#line} <= 80))
  done
  run -0 "$STATUS" --stacks "$one"
  [[ "$output" == *"rank 0 on $N1, process "*"my script.py:9)"*"rank 1 on $N2, process "*"my script.py:9)"* ]]

  pid=$(pid_of 1 "$one")
  kill -STOP "$pid"
  run -1 "$STATUS" "$one"
  [[ "$output" == *"looks hung: rank 1 on $N2 is stopped (state T)"*"kill -CONT $pid"*"STOPPED"* ]]
  kill -CONT "$pid"

  cd "$WORK"
  run -0 --separate-stderr "$STOP" "${one##*/}"
  [ "$output" = "$N1: nothing of this run is left"$'\n'"$N2: nothing of this run is left" ]
  [ "$(left "$one")" -eq 0 ]
  wait "$one_launcher" && status=0 || status=$?
  [ "$status" -eq 75 ]
  [ -e "saved 0 one" ] && [ -e "saved 1 one" ]
  run -0 "$STATUS" "$one"
  [[ "${lines[0]}" == *": ended after "* ]]
  run -0 "$STOP" "$one"
  [[ "$output" == *"has ended already"*"$N2: nothing of this run is left"* ]]

  "$STATUS" --watch >watched 3>&- &
  watcher=$!
  timeout 60 sh -c 'until [ "$(grep -c "^$1: running for" watched)" -ge 2 ]; do sleep 0.1; done' sh "${two##*/}"
  run -0 "$STOP" --now latest
  [[ "$output" == *"$N3: nothing of this run is left"* ]]
  wait "$watcher" || true
  grep -q "^${two##*/}: ended after" watched
  wait "$two_launcher" && status=0 || status=$?
  [ "$status" -ne 0 ]
  [ "$(left "$two")" -eq 0 ]
}


@test "what outlived launcher and supervisor is found, said to be left behind, and ended" {
  start_run one 2 "$N1" "$N2"
  kill -STOP "$(pid_in supervisor "$N2")"
  kill -KILL "$LAUNCHER"
  timeout 20 sh -c 'while grep -qsFxz -- "MUSTER_NODE=$1" $(grep -lsFxz -- "MUSTER_RUN_DIR=$2" /proc/[0-9]*/environ); do sleep 0.1; done' sh "$N1" "$RUN"
  run -1 "$STATUS"
  [[ "$output" == *"left behind"*"the launcher is gone, but processes are left on $N2"*"scripts/stop.sh"* ]]
  run -0 --separate-stderr "$STOP" latest
  [ "$output" = "$N1: nothing of this run is left"$'\n'"$N2: nothing of this run is left" ]
  [ -e "saved 1 one" ]
  [ "$(left "$RUN")" -eq 0 ]
}


@test "on a machine that only shares the folder: the launcher is named, and stopped from there" {
  lab ssh "$N1" sh -c 'cd "$1" && exec "$2" --python "$3/bin/python" --script "my script.py" - 1 "$4" -- one' \
    sh "$WORK" "$LAUNCH" "$VIRTUAL_ENV" "$N2" >"out one" 2>&1 3>&- &
  timeout 120 grep -qF -m1 "at work" <(tail -n +1 -F "out one" 2>/dev/null)
  run -0 "$STATUS"
  [[ "${lines[0]}" == *": running for "* ]]
  [[ "$output" == *"at work as one"*"the launcher is process "*" on $N1, and cannot be seen from here"* ]]
  run -0 "$STOP" latest
  [[ "$output" == *"its launcher is on $N1"*"$N2: nothing of this run is left"* ]]
  [ -e "saved 0 one" ]
  run -0 "$STATUS"
  [[ "${lines[0]}" == *": ended after "* ]]
}


# bats test_tags=soak
@test "a node that is cut off is named with the reason, and nothing is claimed of it" {
  start_run one 2 "$N1" "$N3"
  lab cut "$N3"
  run -69 "$STATUS"
  [[ "$output" == *"$N3: cannot be reached ("*"ssh $N3 true"* ]]
  run -69 "$STOP" latest
  [[ "$output" == *"$N1: nothing of this run is left"*"$N3: cannot be reached ("*"ends when it is alone: ask again"* ]]
  lab heal "$N3"
  timeout 20 sh -c 'while grep -qsFxz -- "MUSTER_RUN_DIR=$1" /proc/[0-9]*/environ; do sleep 0.1; done' sh "$RUN"
  run -0 "$STOP" latest
}


# Its pane as it looks now.
screen() {
  tmux -L "$PREFIX" capture-pane -p
}


on_screen() { # <extended regular expression for a line>
  timeout 60 bash -c 'until tmux -L "$1" capture-pane -p | grep -qE -- "$2"; do sleep 0.1; done' bash "$PREFIX" "$1" ||
    { screen && return 1; }
}


@test "--watch leaves the last state on the terminal, and the prompt below it, at Ctrl-C and at the end" {
  type -P tmux >/dev/null || skip "needs tmux"
  LAUNCH=${LAUNCH/torchrun_auto/singlenode} start_run one 1
  tmux -L "$PREFIX" -f /dev/null new-session -d -x 120 -y 40 'PS1="ready> " exec bash --norc --noprofile'
  on_screen "^ready>"
  tmux -L "$PREFIX" send-keys "clear; echo before; $(printf %q "$STATUS") --watch" Enter
  on_screen ": running for"
  tmux -L "$PREFIX" send-keys C-c
  on_screen "^ready> *$"
  [[ "$(screen)" == *before*"my-script-"*": running for "*"at work as one"*"ready>"* ]] || { screen && false; }
  tmux -L "$PREFIX" send-keys "clear; $(printf %q "$STATUS") --watch" Enter
  on_screen ": running for"
  "$STOP" --now "$RUN"
  on_screen "^ready> *$"
  [[ "$(screen)" == *": ended after "*"ready>"* ]]
  [ "$(screen | grep -c ": ended after ")" -eq 1 ]
  tmux -L "$PREFIX" kill-server
  wait "$LAUNCHER" || true
}


@test "a run that is not there is refused with 2, and what is there is named" {
  run -2 "$STATUS"
  [[ "$output" == *"RUN 'latest': there is no such run, and none at all in $WORK/logs"* ]]
  run -2 "$STOP"
  [[ "$output" == *"RUN is missing"* ]]
  mkdir -p logs/train-1
  run -2 "$STOP" logs/train-1
  [[ "$output" == *"it has no run.json"* ]]
  echo '{}' >logs/train-1/run.json
  run -2 "$STOP" nix
  [[ "$output" == *"RUN 'nix': there is no such run; the newest in $WORK/logs: train-1"* ]]
  run -2 "$STOP" train-1
  [[ "$output" == *"an older version of the kit wrote it"* ]]
  mkdir bin
  type -P bash readlink dirname sed mktemp ln rm rmdir cat | xargs ln -s -t bin
  PATH=$PWD/bin run -2 "$STATUS" 99
  [[ "${lines[0]}" == "status.sh: RUN '99': no run of job 99 in logs, and scontrol is not on this machine; run status.sh where"* ]]
  run -2 "$STATUS" one two
  run -2 "$STATUS" --watch --json
}
