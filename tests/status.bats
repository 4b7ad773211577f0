#!/usr/bin/env bats
#
# scripts/status.sh and scripts/stop.sh on the laboratory: from any terminal, directory and machine, status.sh
# shows each rank and names one that hangs; stop.sh stops one run and no other, with time for a checkpoint, and no
# process remains.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
# shellcheck source=tests/lab/nodes.bash
source "$BATS_TEST_DIRNAME/lab/nodes.bash"


setup_file() {
  export LAUNCH STATUS STOP
  LAUNCH=$BATS_TEST_DIRNAME/../scripts/ssh/launch_torchrun_auto.sh
  STATUS=$BATS_TEST_DIRNAME/../scripts/status.sh STOP=$BATS_TEST_DIRNAME/../scripts/stop.sh
  start_lab 3
}


setup() {
  enter_workdir
  cat >"my script.py" <<'END'
import os, signal, sys, time
def save(*_):
    time.sleep(1.5)  # as long as a checkpoint takes
    open("saved " + os.environ["RANK"] + " " + sys.argv[1], "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("at work as", sys.argv[1], flush=True)
while True:
    time.sleep(0.1)
END
}


teardown() {
  [ "${BATS_TEST_COMPLETED-}" ] || tail -n 30 "$WORK"/out* "$WORK"/logs/*/*.log
  lab heal "$N3" >/dev/null 2>&1 || true
  tmux -L "$PREFIX" kill-server 2>/dev/null || true
  sweep_runs
}


# Start a run in the background; set LAUNCHER and RUN when all its ranks print "at work".
start_run() { # <name> <number of ranks> <argument...>
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
ranks = [rank for node in json.load(sys.stdin)["nodes"] for rank in node["status"]["ranks"]]
print(next(rank["pid"] for rank in ranks if rank["rank"] == int(sys.argv[1])))' "$1"
}


pid_in() { # <supervisor, guard or command> <node>
  python3 -c 'import json, sys; print(json.load(open(sys.argv[2]))[sys.argv[1]]["pid"])' "$1" "$RUN/node_$2.pid"
}


count_processes() { # <run>
  grep -lsFxz -- "MUSTER_RUN_DIR=$1" /proc/[0-9]*/environ 2>/dev/null | wc -l
}


@test "status.sh shows each rank and reports a suspended rank as hung, and stop.sh stops only the given run" {
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
  [ "$output" = "$N1: no process of this run remains"$'\n'"$N2: no process of this run remains" ]
  [ "$(count_processes "$one")" -eq 0 ]
  wait "$one_launcher" && status=0 || status=$?
  [ "$status" -eq 75 ]
  [ -e "saved 0 one" ] && [ -e "saved 1 one" ]
  run -0 "$STATUS" "$one"
  [[ "${lines[0]}" == *": ended after "* ]]
  run -0 "$STOP" "$one"
  [[ "$output" == *"has already exited"*"$N2: no process of this run remains"* ]]

  "$STATUS" --watch >watched 3>&- &
  watcher=$!
  timeout 60 sh -c 'until [ "$(grep -c "^$1: running for" watched)" -ge 2 ]; do sleep 0.1; done' sh "${two##*/}"
  run -0 "$STOP" --now latest
  [[ "$output" == *"$N3: no process of this run remains"* ]]
  wait "$watcher" || true
  grep -q "^${two##*/}: ended after" watched
  wait "$two_launcher" && status=0 || status=$?
  [ "$status" -ne 0 ]
  [ "$(count_processes "$two")" -eq 0 ]
}


@test "processes that remain after the launcher was killed and a supervisor was suspended are shown and stopped" {
  use_agent_without_torch
  start_run one 2 "$N1" "$N2"
  kill -STOP "$(pid_in supervisor "$N2")"
  kill -KILL "$LAUNCHER"
  timeout 20 sh -c 'while grep -qsFxz -- "MUSTER_NODE=$1" $(grep -lsFxz -- "MUSTER_RUN_DIR=$2" /proc/[0-9]*/environ); do sleep 0.1; done' sh "$N1" "$RUN"
  run -1 "$STATUS"
  [[ "$output" == *"without a launcher"*"the launcher has exited, but processes remain on $N2"*"scripts/stop.sh"* ]]
  run -0 --separate-stderr "$STOP" latest
  [ "$output" = "$N1: no process of this run remains"$'\n'"$N2: no process of this run remains" ]
  [ -e "saved 1 one" ]
  [ "$(count_processes "$RUN")" -eq 0 ]
}


@test "on a machine that shares only the run directory, status.sh names the launcher's node, stop.sh stops the run" {
  use_agent_without_torch
  lab ssh "$N1" sh -c 'cd "$1" && exec "$2" --python "$3/bin/python" --script "my script.py" - 1 "$4" -- one' \
    sh "$WORK" "$LAUNCH" "$VIRTUAL_ENV" "$N2" >"out one" 2>&1 3>&- &
  timeout 120 grep -qF -m1 "at work" <(tail -n +1 -F "out one" 2>/dev/null)
  run -0 "$STATUS"
  [[ "${lines[0]}" == *": running for "* ]]
  [[ "$output" == *"at work as one"*"the launcher is process "*" on $N1; this machine cannot check whether it runs"* ]]
  run -0 "$STOP" latest
  [[ "$output" == *"launcher is on $N1"*"$N2: no process of this run remains"* ]]
  [ -e "saved 0 one" ]
  run -0 "$STATUS"
  [[ "${lines[0]}" == *": ended after "* ]]
}


# bats test_tags=soak
@test "a disconnected node is reported with the reason, and not as free of processes" {
  use_agent_without_torch
  start_run one 2 "$N1" "$N3"
  lab cut "$N3"
  run -69 "$STATUS"
  [[ "$output" == *"$N3: cannot be reached ("*"ssh $N3 true"* ]]
  run -69 "$STOP" latest
  [[ "$output" == *"$N1: no process of this run remains"*"$N3: cannot be reached ("*"exit when heartbeats time out; then check again"* ]]
  lab heal "$N3"
  timeout 20 sh -c 'while grep -qsFxz -- "MUSTER_RUN_DIR=$1" /proc/[0-9]*/environ; do sleep 0.1; done' sh "$RUN"
  run -0 "$STOP" latest
}


# Print the current content of the pane.
screen() {
  tmux -L "$PREFIX" capture-pane -p
}


on_screen() { # <extended regular expression for a line>
  timeout 60 bash -c 'until tmux -L "$1" capture-pane -p | grep -qE -- "$2"; do sleep 0.1; done' bash "$PREFIX" "$1" ||
    { screen && return 1; }
}


@test "--watch leaves the last table on the terminal, above the prompt, after Ctrl-C and at the end" {
  use_agent_without_torch
  type -P tmux >/dev/null || skip "needs tmux"
  LAUNCH=${LAUNCH/torchrun_auto/singlenode} start_run one 1
  tmux -L "$PREFIX" -f /dev/null new-session -d -x 120 -y 40 'PS1="ready> " exec bash --norc --noprofile'
  on_screen "^ready>"
  tmux -L "$PREFIX" send-keys "clear; echo before; $(printf %q "$STATUS") --watch" Enter
  on_screen ": running for"
  sleep 3 # two refreshes, each of which overwrites the table before
  [ "$(screen | grep -c ": running for ")" -eq 1 ] || { screen && false; }
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


@test "for an unknown run, status.sh and stop.sh exit with 2, and list the newest runs" {
  use_agent_without_torch
  run -2 "$STATUS"
  [[ "$output" == *"RUN 'latest': no such run, and no runs in $WORK/logs"* ]]
  run -2 "$STOP"
  [[ "$output" == *"RUN: missing"* ]]
  mkdir -p logs/train-1
  run -2 "$STOP" logs/train-1
  [[ "$output" == *"not a run directory: no run.json in it"* ]]
  echo '{}' >logs/train-1/run.json
  run -2 "$STOP" nix
  [[ "$output" == *"RUN 'nix': no such run; newest in $WORK/logs: train-1"* ]]
  run -2 "$STOP" train-1
  [[ "$output" == *"written by an older version of Muster"* ]]
  mkdir bin
  type -P bash readlink dirname env find stat ls sort | xargs ln -s -t bin
  PATH=$PWD/bin run -2 "$STATUS" 99
  [[ "${lines[0]}" == "status.sh: RUN '99': no run of job 99 in logs, and scontrol is not on this machine; run status.sh where"* ]]
  run -2 "$STATUS" one two
  run -2 "$STATUS" --watch --json
}
