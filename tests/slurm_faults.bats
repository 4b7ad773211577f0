#!/usr/bin/env bats
#
# What can happen to a job on SLURM: a rank fails, a node or its daemon is lost, a person or the time ends it. Each time
# there is a verdict and an exit code, nothing is left running, and what can go on goes on where it was.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
load lab/nodes.bash
load lab/jobs.bash


# On the last node: turns, each of which SLURM lets wait for 5 s. They take their time beside the other tests, of which
# some set nodes down: this one is reserved.
setup_file() {
  raise_nodes 4 --slurm
  export SBATCH_GRES=none
  scontrol create reservation reservationname=turns nodes="${PREFIX}4" users=root starttime=now duration=infinite
  SBATCH_RESERVATION=turns begin_bounded_jobs
  set -m
  SBATCH_RESERVATION=turns preempt_five_times >"$BATS_FILE_TMPDIR/five.log" 2>&1 3>&- &
  echo $! >"$BATS_FILE_TMPDIR/five.pid"
  set +m
}


teardown_file() {
  kill -- "-$(<"$BATS_FILE_TMPDIR/five.pid")" 2>/dev/null || true
  lower_nodes
}


setup() {
  enter_work
  JOBS=()
}


teardown() {
  lab up 4 --prefix "$PREFIX" --slurm >/dev/null # mends what a test has broken
  cancel_jobs
}


# A rank that fails when it is told to by a file.
failing_script() {
  script <<'END'
if rank == 0:
    print("at work", flush=True)
while True:
    dist.all_reduce(torch.ones(1))
    if os.path.exists(f"fail{rank}"):
        raise ValueError("boom")
END
}


wait_for_second_run() {
  timeout 120 sh -c 'until [ "$(grep -cF "2 processes on " "$1")" -eq 2 ]; do sleep 0.2; done' sh "logs/slurm-$JOB.err"
}


# Of the step, not of the batch script.
stepd_on() { # <node>
  local pid
  for pid in $(pgrep -f "^slurmstepd: \[$JOB\.0\]"); do
    [[ ! /proc/$pid/ns/net -ef $MUSTER_LAB/$1/net ]] || echo "$pid"
  done
}


@test "a rank that raises ends the others, and is named with its own exit code, under srun and under torchrun" {
  local launcher
  for launcher in srun torchrun; do
    rm -f fail1
    failing_script
    LAUNCHER=$launcher SCRIPT="my script.py" submit --ntasks-per-node=1 slurm_train.sh -
    wait_for_line "logs/slurm-$JOB.out" "at work"
    touch fail1
    status_of_job "$JOB"
    [ "$status" -eq 1 ]
    shows err "verdict: failed: rank 1 on $N2 raised ValueError: boom"
    shows err "ValueError: boom"
    nothing_left_within 10
  done
}


@test "a rank in an endless loop: --hang-timeout ends the job and names it" {
  hanging_script
  SCRIPT="my script.py" submit --ntasks-per-node=1 slurm_train.sh --hang-timeout 3 -
  status_of_job "$JOB"
  [ "$status" -eq 124 ]
  shows err "rank 1 on $N2 is not in a collective, the other waits for it; it is at my script.py:"
  nothing_left_within 10
}


@test "a node whose slurmstepd is killed is given up, and its ranks end by themselves" {
  submit_work --no-requeue
  kill -KILL "$(stepd_on "$N2")"
  status_of_job "$JOB"
  [ "$status" -eq 69 ]
  shows err "verdict: failed: $N2: connection lost"
  shows err "SLURM does not requeue it: submit the same job to go on"
  nothing_left_within 10
}


@test "a node that is cut off is given up before SLURM does, its ranks end there, and the job goes on on other nodes" {
  submit_work
  lab cut "$N2"
  wait_for_line "logs/slurm-$JOB.err" "verdict: "
  shows err "step: $N2: no heartbeat for 12 s; stopping the other nodes"
  shows err "verdict: failed: $N2: connection lost"
  nothing_left_within 10
  wait_for_turn 1
  wait_for_second_run
  run ! grep -F "\"$N2\"" "logs/slurm-$JOB/run.json"
}


@test "a node that SLURM sets down is named, and the job goes on in a next turn when there are nodes again" {
  local second
  endless_training >tiny.yaml
  submit --ntasks-per-node=1 slurm_train.sh tiny.yaml -- checkpoint.every=1
  wait_for_line "logs/slurm-$JOB.out" "step      3/100000"
  second=$(sed -n 's/.*2 processes on .* //p' "logs/slurm-$JOB.err")
  scontrol update "nodename=$second" state=drain reason=test # else it would come back at once, half forgotten
  scontrol update "nodename=$second" state=down reason=test
  wait_for_line "logs/slurm-$JOB.err" "verdict: failed: $second: connection lost: node failure reported by SLURM"
  wait_for_turn 1
  wait_for_line "logs/slurm-$JOB.out" "going on from"
  [ -e "logs/slurm-$JOB/try_1/verdict.json" ]
  scontrol update "nodename=$second" state=resume
}


@test "SLURM's word that the time is up waits for a rank that is not ready for it" {
  cat >"my script.py" <<'END'
import signal, sys, time
print("at work", flush=True)
time.sleep(2)
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))
time.sleep(60)
END
  SCRIPT="my script.py" submit --nodes=1 --ntasks-per-node=1 slurm_train.sh --max-requeues 0 -
  wait_for_line "logs/slurm-$JOB.out" "at work"
  scancel --signal=USR2 "$JOB"
  status_of_job "$JOB"
  [ "$status" -eq 75 ]
  shows err "and --max-requeues is 0: not requeueing"
}


@test "all processes of the batch script may hear that the time is up, and the job still goes on in a next turn" {
  endless_training >tiny.yaml
  submit --ntasks-per-node=1 slurm_train.sh tiny.yaml
  wait_for_line "logs/slurm-$JOB.out" "step      3/100000"
  scancel --full --signal=USR2 "$JOB"
  wait_for_turn 1
}


@test "a supervisor that is killed takes its rank along, and so does the process of the launcher that watches srun" {
  local who
  printf 'import time\nprint("at work", flush=True)\ntime.sleep(1000)\n' >"my script.py"
  for who in "srun_task.py rank" step.py; do
    SCRIPT="my script.py" submit --no-requeue --nodes=2 --ntasks-per-node=1 slurm_train.sh -
    wait_for_line "logs/slurm-$JOB.out" "at work"
    kill -KILL "$(pgrep -f "^$VIRTUAL_ENV/bin/python -I -S $KIT/scripts/lib/$who $WORK/logs/" | while read -r pid; do
      [[ ! /proc/$pid/ns/net -ef $MUSTER_LAB/$N1/net ]] || echo "$pid"
    done | head -n 1)" # the oldest: a guard has the same arguments
    status_of_job "$JOB"
    [ "$status" -ne 0 ]
    shows err "verdict: failed: $([[ $who == step.py ]] || echo "the supervisor on $N1 died of SIGKILL")"
    nothing_left_within 10
  done
}


@test "a process that went away from its rank by itself is ended with it" {
  cat >"my script.py" <<'END'
import os, subprocess
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
child.returncode = 0  # not waited for
END
  SCRIPT="my script.py" submit --nodes=1 --ntasks-per-node=1 slurm_train.sh -
  status_of_job "$JOB"
  [ "$status" -eq 0 ]
  nothing_left_within 10
}


@test "a node_env.sh that fails on a node is named" {
  mkdir config
  echo '[[ ! ${SLURM_STEP_ID-} ]] || none' >config/node_env.sh
  touch "my script.py"
  SCRIPT="my script.py" submit --nodes=1 --ntasks-per-node=1 slurm_train.sh -
  status_of_job "$JOB"
  [ "$status" -eq 69 ]
  shows err "verdict: failed: $N1: $WORK/config/node_env.sh: line 1: '[[ ! "
  shows err "|| none' failed with exit code 127; mend it, or write "
}


@test "scancel gives the ranks the time to write a checkpoint, and there is no next turn" {
  endless_training >tiny.yaml
  submit --ntasks-per-node=1 slurm_train.sh tiny.yaml
  wait_for_line "logs/slurm-$JOB.out" "step      3/100000"
  scancel "$JOB"
  status_of_job "$JOB"
  [ "$status" -eq 75 ]
  shows err "verdict: stopped: stopped on request, a checkpoint is written"
  ls -d "check points"/step_*
  run ! grep requeue "logs/slurm-$JOB.err"
  nothing_left_within 10
}


# SLURM counts in minutes.
# bats test_tags=soak
@test "a job whose time is nearly up writes a checkpoint, and goes on in a next turn" {
  endless_training >tiny.yaml
  submit --ntasks-per-node=1 --time=1 --signal=USR2@30 slurm_train.sh tiny.yaml
  wait_for_turn 1
  shows err "requeueing job $JOB at step"
  wait_for_line "logs/slurm-$JOB.out" "going on from"
}


@test "a job that is pushed out by a more urgent one comes again, and goes on where it was" {
  endless_training >tiny.yaml
  submit --ntasks-per-node=1 --exclusive --nodes=3 slurm_train.sh tiny.yaml -- train.batch_size=3
  wait_for_line "logs/slurm-$JOB.out" "step      3/100000"
  JOBS+=("$(sbatch --parsable --partition=urgent --nodes=3 --exclusive --output=urgent --wrap 'echo here')")
  wait_for_turn 1
  wait_for_line "logs/slurm-$JOB.out" "going on from"
  [ -s urgent ]
}


@test "ranks that know no signal die of it when their job is pushed out, and it comes again all the same" {
  submit_work --signal=TERM@60 --exclusive --nodes=3
  JOBS+=("$(sbatch --parsable --partition=urgent --nodes=3 --exclusive --output=urgent --wrap 'echo here')")
  wait_for_turn 1
  [ -s urgent ]
}


@test "a requeue in the midst of a checkpoint goes on from the last that is whole" {
  endless_training >tiny.yaml
  submit --ntasks-per-node=1 slurm_train.sh tiny.yaml -- checkpoint.every=1 checkpoint.keep=2
  wait_for_line "logs/slurm-$JOB.out" "step      5/100000"
  scontrol requeue "$JOB" # at a step of which nobody knows, with one checkpoint after the other being written
  wait_for_turn 1
  wait_for_line "logs/slurm-$JOB.out" "going on from"
  run ! grep -F "nothing good" "logs/slurm-$JOB.err"
}


# Two jobs that stop with 75 at once, and never come any further; and one whose ranks do not end together.
begin_bounded_jobs() {
  mkdir "$BATS_FILE_TMPDIR/bounded"
  cd "$BATS_FILE_TMPDIR/bounded" || return
  echo 'import sys; sys.exit(75)' >"my script.py"
  SCRIPT="my script.py" submit --nodelist="${PREFIX}4" --nodes=1 --ntasks-per-node=1 slurm_train.sh --max-requeues 1 -
  SCRIPT="my script.py" submit --nodelist="${PREFIX}4" --nodes=1 --ntasks-per-node=1 slurm_train.sh -
  echo 'import os, time; time.sleep(20 * int(os.environ["RANK"]))' >uneven.py
  SCRIPT=uneven.py submit --nodelist="${PREFIX}4" --nodes=1 slurm_train.sh -
  printf '%s\n' "${JOBS[@]}" >numbers
}


look_at_bounded_job() { # <1, 2 or 3>
  cd "$BATS_FILE_TMPDIR/bounded" || return
  JOB=$(sed -n "$1p" numbers)
}


# Four steps behind the place where it began: a signal that comes before would find no step of the job.
is_at_work_in_turn() { # <number> <what rank 0 says>
  [ -e "$2" ] && awk -v "turn=$1" '/going on from/ { gone++; steps = 0 } /^step / { steps++ }
    END { exit !(gone == turn - 1 && steps >= 4) }' "$2"
}
export -f is_at_work_in_turn


# The same training twice: never stopped, and stopped five times after some steps, which are slow enough to count. Once
# with one task a rank, once with one agent a node.
preempt_five_times() {
  local turn
  mkdir "$BATS_FILE_TMPDIR/five"
  cd "$BATS_FILE_TMPDIR/five" || return
  endless_training | sed 's/100000/60/' >tiny.yaml
  cat >slow.py <<END
import runpy, sys, time
sys.path.insert(0, "$KIT")
import torch
step = torch.optim.AdamW.step
torch.optim.AdamW.step = lambda *words, **more: (time.sleep(0.3), step(*words, **more))[1]
runpy.run_path("$KIT/train.py", run_name="__main__")
END
  submit --nodelist="${PREFIX}4" --nodes=1 slurm_train.sh tiny.yaml -- checkpoint.dir=unstopped
  LAUNCHER=torchrun SCRIPT=slow.py submit --nodelist="${PREFIX}4" --nodes=1 slurm_train.sh tiny.yaml -- checkpoint.dir=stopped
  echo "$JOB" >job
  for turn in {1..5}; do
    timeout 120 bash -c 'until "$@"; do sleep 0.1; done' bash is_at_work_in_turn "$turn" "logs/slurm-$JOB.out"
    scancel --signal=USR2 "$JOB"
    wait_for_turn "$turn"
  done
}


@test "preempted five times, a training ends with the weights of one that was never stopped, bit for bit" {
  cd "$BATS_FILE_TMPDIR/five"
  timeout 240 tail --pid "$(<../five.pid)" -f /dev/null
  JOB=$(<job)
  status_of_job "$JOB"
  [ "$status" -eq 0 ] || { cat ../five.log logs/slurm-*.err && false; }
  [ "$(grep -c 'going on from' "logs/slurm-$JOB.out")" -eq 5 ] || { cat ../five.log logs/slurm-"$JOB".* && false; }
  run -0 "$VIRTUAL_ENV/bin/python" - <<'END'
import torch
one, other = (torch.load(f"{folder}/step_00000060/state.pt") for folder in ("unstopped", "stopped"))
assert one["model"].keys() == other["model"].keys()
for name in one["model"]:
    assert torch.equal(one["model"][name], other["model"][name]), name
END
  scontrol requeue "$JOB"
  wait_for_line "logs/slurm-$JOB.err" "the run has ended well before: nothing is left to do"
}


@test "a job does not requeue itself for ever: not more often than it may, and not when it comes no further" {
  look_at_bounded_job 1
  status_of_job "$JOB"
  [ "$status" -eq 75 ]
  shows err "requeued 1 time, and --max-requeues is 1: not requeueing"
  look_at_bounded_job 2
  status_of_job "$JOB"
  [ "$status" -eq 75 ]
  shows err "no progress in the last 3 turns: not requeueing"
}


@test "a rank may end well long before the others" {
  look_at_bounded_job 3
  status_of_job "$JOB"
  [ "$status" -eq 0 ] || { cat logs/slurm-"$JOB".err && false; }
}


@test "a job that SLURM may not requeue ends with its checkpoint, and says how it goes on" {
  echo 'import sys; sys.exit(75)' >"my script.py"
  SCRIPT="my script.py" submit --nodes=1 --ntasks-per-node=1 --no-requeue slurm_train.sh -
  status_of_job "$JOB"
  [ "$status" -eq 75 ]
  shows err "SLURM does not requeue it: submit the same job to go on"
}
