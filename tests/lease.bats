#!/usr/bin/env bats
#
# --lease 0: a run outlives its launcher, and attach.sh follows it again, with restarts, verdict and exit code as if the
# launcher had never ended. With a lease, all processes of the run exit when the launcher exits or is suspended.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
# shellcheck source=tests/lab/nodes.bash
source "$BATS_TEST_DIRNAME/lab/nodes.bash"


setup_file() {
  export SCRIPTS=$BATS_TEST_DIRNAME/../scripts
  export SINGLE=$SCRIPTS/ssh/launch_singlenode.sh AUTO=$SCRIPTS/ssh/launch_torchrun_auto.sh
  start_lab 3
  use_agent_without_torch
}


setup() {
  enter_workdir
  # Prints "at work" when all ranks of the attempt are; runs until a file `finish` or, in the first attempt, `fail` exists.
  cat >"my script.py" <<'END'
import glob, os, signal, sys, time
rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
attempt = "at_work_" + os.path.basename(os.environ["MUSTER_RUN_DIR"]) + "_" + restarts
def save(*_):
    open(f"saved{rank}", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, lambda *_: print("got USR1", flush=True))
open(f"{attempt}_{rank}", "w").close()
while len(glob.glob(f"{attempt}_*")) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.1)
print("at work, restart", restarts, flush=True)
while not os.path.exists("finish"):
    if os.path.exists("fail") and restarts == "0" and rank == "1":
        sys.exit(3)
    time.sleep(0.1)
print("finished after", sys.argv[1:], flush=True)
END
}


# Also end the runs that a failed test leaves: without a lease, nothing else ends them.
teardown() {
  lab heal "$N3" >/dev/null 2>&1 || true
  [ "${BATS_TEST_COMPLETED-}" ] || tail -n 30 out* again* logs/*/*.log
  local run
  for run in logs/*/; do
    [ ! -d "$run" ] || supervisor sweep --dir "$run" --name "$(uname -n)"
  done
  sweep_runs
}


# Start a run without a lease with the command in CALL, wait until it is at work, kill its launcher, and set RUN.
start_and_kill_launcher() {
  start out "${CALL[@]}"
  wait_for_line out "at work"
  kill -KILL -- "-$LAUNCHER"
  wait "$LAUNCHER" || true
  RUN=$(readlink -f logs/latest)
  sleep 1
  [ "$(processes_left)" -gt 2 ]
}


# Attach again in the background, with the output in `again`, and wait until the launcher follows the nodes.
attach() {
  rm -f again # clients of a killed launcher may still write to it
  start again "$SCRIPTS/attach.sh" "$RUN"
  wait_for_line again "attached"
}


# Check that attaching is refused with the text, and that the run continues.
refused() { # <text>
  run -2 "$SCRIPTS/attach.sh"
  [[ "$output" == *"$1"* ]] || { echo "$output" && return 1; }
  [ "$(processes_left)" -gt 2 ]
}


# bats test_tags=quick
@test "one machine: a run without a lease outlives its launcher, and is followed again to its verdict" {
  VIRTUAL_ENV=$WITH_TORCH
  CALL=("$SINGLE" --lease 0 --script "my script.py" - 2 -- "a b" c)
  start_and_kill_launcher
  run -0 "$SCRIPTS/status.sh"
  [[ "$output" == *"the launcher has exited, and the run continues on $(uname -n)"* ]]
  command=$(sed -n 's/^  \$ //p' <<<"$output" | head -n 1)
  [[ "$command" == */attach.sh* ]]
  start again bash -c "cd / && $command"
  wait_for_line again attached
  kill -USR1 "$LAUNCHER"
  wait_for_line again "got USR1"
  run -0 "$SCRIPTS/status.sh"
  [[ "${lines[0]}" == *": running for "* ]]
  touch finish
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ] || { cat again && false; }
  grep -qxF "finished after ['a b', 'c']" again
  run ! grep "at work" again
  grep -q "verdict: ok" again
  [ -s "$RUN/verdict.json" ]
  no_processes_within 5
  run -0 "$SCRIPTS/attach.sh"
  [ "$output" = "verdict: ok: all ranks exited with 0" ]
}


@test "three nodes: a run without a lease outlives its launcher, twice, and is followed again to its verdict" {
  printf '%s\n' "$N1" "$N2" "$N3" >hosts
  CALL=("$AUTO" --lease 0 --hostfile hosts --script "my script.py" - 1 --)
  start_and_kill_launcher
  printf '%s\n' "$N1" "$N2" >hosts
  refused "was started with the nodes $N1 $N2 $N3; got $N1 $N2"
  printf '%s\n' "$N1" "$N2" "$N3" >hosts
  attach
  kill -KILL -- "-$LAUNCHER"
  wait "$LAUNCHER" || true
  attach
  touch finish
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ] || { cat again && false; }
  grep -qxF "finished after []" again
  grep -q "verdict: ok" again
  [ "$(cat "$RUN"/node_*.exit)" = $'0\n0\n0' ]
  no_processes_within 5
  # The call is repeated from another directory.
  cd /
  run -0 "$SCRIPTS/rerun.sh" "$RUN" --hostfile "$WORK/hosts" --grace=5
  [[ "$output" == *": 3 processes on $N1 $N2 $N3"*"finished after []"*"verdict: ok"* ]] || { echo "$output" && false; }
}


@test "with a lease, all processes on all nodes exit when the launcher is suspended or killed" {
  CALL=("$AUTO" --lease 5 --script "my script.py" - 1 "$N1" "$N2" --)
  start out "${CALL[@]}"
  wait_for_line out "at work"
  kill -STOP -- "-$LAUNCHER"
  no_processes_within 20
  grep -q "no heartbeat from the launcher for 5 s; stopping" logs/latest/node_*.log
  kill -KILL -- "-$LAUNCHER"
  wait "$LAUNCHER" || true
  rm saved*
  start out "${CALL[@]}"
  wait_for_line out "at work"
  kill -KILL -- "-$LAUNCHER"
  no_processes_within 10
  [ -e saved0 ] && [ -e saved1 ]
}


@test "a launcher attaches only if no other launcher runs" {
  CALL=("$SINGLE" --lease 0 --max-restarts 2 --script "my script.py" - 2 -- x)
  start out "${CALL[@]}"
  wait_for_line out "at work"
  kill -KILL -- "-$LAUNCHER"
  wait "$LAUNCHER" || true
  flock --no-fork logs/latest/attach.lock sleep 60 3>&- &
  until ! flock --nonblock logs/latest/attach.lock true; do sleep 0.05; done
  refused "another launcher has just attached to it"
  kill "$!" && wait "$!" || true
  run -2 "$SCRIPTS/attach.sh" nothing
  [[ "$output" == *"no such run"* ]]
  run -2 "${CALL[0]}" --attach latest "${CALL[@]:1}"
  [[ "$output" == *"--attach: replaced by"*"muster attach RUN"* ]]
  RUN=$(readlink -f logs/latest)
  attach
  # Ctrl-C stops the run.
  kill -INT "$LAUNCHER"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 75 ] || { cat again && false; }
  [ -e saved0 ] && [ -e saved1 ]
  no_processes_within 5
}


@test "values of --env are not recorded, so attach.sh refuses a run that has --env and --max-restarts" {
  CALL=("$SINGLE" --lease 0 --max-restarts 1 --env A=1 --script "my script.py" - 2 --)
  start_and_kill_launcher
  refused "--env"
  run -0 "$SCRIPTS/stop.sh" latest
  no_processes_within 5
  CALL=("$SINGLE" --lease 0 --env A=1 --script "my script.py" - 2 --)
  start_and_kill_launcher
  attach
  touch finish
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ] || { cat again && false; }
}


@test "attach.sh finds at once that the run failed while it had no launcher, and restarts it if that is allowed" {
  VIRTUAL_ENV=$WITH_TORCH
  mkdir scratch && ln -s scratch logs
  CALL=("$AUTO" --lease 0 --script "my script.py" - 1 "$N1" "$N2" --)
  start_and_kill_launcher
  touch fail
  no_processes_within 20
  attach
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 3 ] || { cat again && false; }
  grep -q "verdict: failed: rank 1 on $N2 exited with code 3" again
  rm fail
  CALL=("$AUTO" --lease 0 --max-restarts 1 --script "my script.py" - 1 "$N1" "$N2" --)
  start_and_kill_launcher
  touch fail
  no_processes_within 20
  attach
  wait_for_line again "at work, restart 1"
  grep -q "restart 1 of 1" again
  # MUSTER_RUN_DIR of the restarted processes also contains the symbolic link, so status.sh finds them.
  run -0 "$SCRIPTS/status.sh"
  [[ "${lines[0]}" == *": running for "* && "$output" != *"not running"* ]] || { echo "$output" && false; }
  kill -KILL -- "-$LAUNCHER" # the restarted attempt has no lease either
  wait "$LAUNCHER" || true
  attach
  touch finish
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ] || { cat again && false; }
}


@test "if a supervisor was killed while the run had no launcher, attach.sh stops its processes and reports the failure" {
  CALL=("$AUTO" --lease 0 --script "my script.py" - 1 "$N1" "$N2" --)
  start_and_kill_launcher
  kill -KILL "$(pid_of supervisor "$N2")" "$(pid_of guard "$N2")"
  attach
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 137 ] || { cat again && false; }
  grep -q "verdict: failed: the supervisor on $N2 died of SIGKILL" again
  no_processes_within 5
}


@test "stop.sh stops a run without a lease, with and without a launcher" {
  CALL=("$AUTO" --lease 0 --script "my script.py" - 1 "$N1" "$N2" --)
  start_and_kill_launcher
  run -0 "$SCRIPTS/stop.sh" latest
  [ -e saved0 ] && [ -e saved1 ]
  [[ "$output" == *"$N2: no process of this run remains"* ]]
  rm saved*
  start_and_kill_launcher
  attach
  run -0 "$SCRIPTS/stop.sh" latest
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 75 ] || { cat again && false; }
  [ -e saved0 ] && [ -e saved1 ]
  no_processes_within 5
}


@test "a run without a lease survives the end of its terminal" {
  CALL=("$SINGLE" --lease 0 --script "my script.py" - 2 --)
  start out "${CALL[@]}"
  wait_for_line out "at work"
  kill -HUP "$LAUNCHER"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 129 ]
  [ "$(processes_left)" -gt 2 ]
  RUN=$(readlink -f logs/latest)
  attach
  touch finish
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ] || { cat again && false; }
}


@test "a node without a lease runs on without a connection, and is followed again by the same launcher" {
  CALL=("$AUTO" --lease 0 --script "my script.py" - 1 "$N3" --)
  start out "${CALL[@]}"
  wait_for_line out "at work"
  lab cut "$N3"
  wait_for_line out "$N3: connection to its supervisor lost; it runs on, connecting again"
  lab heal "$N3"
  wait_for_line out "$N3: connected again"
  touch finish
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ] || { cat out && false; }
  grep -q "verdict: ok" out
}


@test "--lease is refused where no launcher can follow a run again, and a run with a lease ends with its launcher" {
  run -2 "$SCRIPTS/ssh/launch_pdsh_multinode.sh" --lease 0 --script "my script.py" - 1 "$N1"
  [[ "$output" == *"--lease: not possible with pdsh; use launch_torchrun_auto.sh"* ]]
  run -2 "$SCRIPTS/ssh/launch_torchrun_auto.sh" --lease x --script "my script.py" - 1 "$N1"
  [[ "$output" == *"--lease: expected a whole number of seconds (0 = none), got 'x'"* ]]
  start out "$SINGLE" --script "my script.py" - 1
  wait_for_line out "at work"
  kill -KILL -- "-$LAUNCHER"
  wait "$LAUNCHER" || true
  run -1 "$SCRIPTS/attach.sh"
  [[ "$output" == *": its launcher has exited without a verdict; start it again: "*"/rerun.sh my-script-"* ]]
  no_processes_within 10
}


@test "a run whose launcher runs is shown until it ends; Ctrl-C leaves it running, and a new launcher takes over" {
  CALL=("$AUTO" --lease 0 --detach --script "my script.py" - 1 "$N1" "$N2" -- x)
  run -0 "${CALL[@]}"
  RUN=$(readlink -f logs/latest)
  for verb in attach status stop; do
    [[ "$output" == *"/$verb.sh ${RUN##*/}"* ]] || { echo "$output" && false; }
  done
  start again "$SCRIPTS/attach.sh"
  wait_for_line again "at work"
  kill -INT "$LAUNCHER"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 130 ]
  grep -q "left; the run goes on; to stop it: .*/stop.sh ${RUN##*/}" again
  [ "$(processes_left)" -gt 2 ]
  start again "$SCRIPTS/attach.sh"
  wait_for_line again "at work"
  run ! grep "attached to the run" again
  kill -KILL "$(sed -nE 's/^ *"pid": ([0-9]+),/\1/p' "$RUN/run.json")"
  wait_for_line again "attached to the run"
  touch finish
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ] || { cat again && false; }
  grep -qxF "finished after ['x']" again
  grep -q "verdict: ok" again
  no_processes_within 5
}


@test "the failure of a run that is shown is printed as its verdict, with its exit code" {
  run -0 "$SINGLE" --detach --script "my script.py" - 2
  start again "$SCRIPTS/attach.sh"
  wait_for_line again "at work"
  touch fail
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 3 ] || { cat again && false; }
  grep -q "verdict: failed: rank 1 on .* exited with code 3" again
}
