#!/usr/bin/env bats
#
# Failures of jobs on SLURM: a rank fails, a node or its daemon is lost, scancel or the time limit ends the job. Each
# has a verdict and exit code, no process remains, and a requeued job resumes from its checkpoint.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
load lab/nodes.bash
load lab/jobs.bash


# The last node runs jobs that are requeued several times, concurrently with the tests, because each requeue takes 5 s.
# The node is reserved, because some tests mark nodes DOWN.
setup_file() {
  start_lab 4 --slurm
  export SBATCH_GRES=none
  scontrol create reservation reservationname=requeues nodes="${PREFIX}4" users=root starttime=now duration=infinite
  SBATCH_RESERVATION=requeues submit_background_jobs
  set -m
  SBATCH_RESERVATION=requeues preempt_five_times >"$BATS_FILE_TMPDIR/five.log" 2>&1 3>&- &
  echo $! >"$BATS_FILE_TMPDIR/five.pid"
  set +m
}


teardown_file() {
  kill -- "-$(<"$BATS_FILE_TMPDIR/five.pid")" 2>/dev/null || true
  stop_lab
}


setup() {
  enter_workdir
  JOBS=()
}


teardown() {
  lab up 4 --prefix "$PREFIX" --slurm >/dev/null # restarts and heals nodes
  cancel_jobs
}


# Write a script in which rank R fails when a file failR exists.
failing_script() {
  write_plain_script <<'END'
if rank == 0:
    print("at work", flush=True)
while True:
    time.sleep(0.05)
    if os.path.exists(f"fail{rank}"):
        raise ValueError("boom")
END
}


wait_for_second_start() {
  timeout 120 sh -c 'until [ "$(grep -cF "2 processes on " "$1")" -eq 2 ]; do sleep 0.2; done' sh "logs/slurm-$JOB.err"
}


# Print the process id of the slurmstepd of JOB's step, not of its batch script.
stepd_on() { # <node>
  local pid
  for pid in $(pgrep -f "^slurmstepd: \[$JOB\.0\]"); do
    [[ ! /proc/$pid/ns/net -ef $MUSTER_LAB/$1/net ]] || echo "$pid"
  done
}


@test "a rank raises: the other ranks stop, and the verdict names the rank, with srun and with torchrun" {
  use_agent_without_torch
  local launcher
  for launcher in srun torchrun; do
    rm -f fail1
    failing_script
    LAUNCHER=$launcher SCRIPT="my script.py" submit --ntasks-per-node=1 slurm_train.sh -
    wait_for_line "logs/slurm-$JOB.out" "at work"
    touch fail1
    wait_for_job_exit "$JOB"
    [ "$status" -eq 1 ]
    shows err "verdict: failed: rank 1 on $N2 raised ValueError: boom"
    shows err "ValueError: boom"
    no_processes_within 10
  done
}


@test "a rank raises and a thread keeps it alive: it is killed and its error named, with srun and with torchrun" {
  use_agent_without_torch
  local launcher
  for launcher in srun torchrun; do
    write_plain_script <<'END'
import threading
if rank == 1:
    threading.Thread(target=time.sleep, args=(1000,)).start()
    raise ValueError("boom")
time.sleep(1000)
END
    LAUNCHER=$launcher SCRIPT="my script.py" submit --ntasks-per-node=1 slurm_train.sh -
    wait_for_job_exit "$JOB"
    [ "$status" -eq 1 ]
    shows err "failed and does not exit: a thread, an exit handler or a destructor holds it; killing it"
    shows err "verdict: failed: rank 1 on $N2 raised ValueError: boom"
    no_processes_within 10
  done
}


@test "a rank is in an endless loop: --hang-timeout ends the job, and the verdict names the rank" {
  write_hanging_script
  SCRIPT="my script.py" submit --ntasks-per-node=1 slurm_train.sh --hang-timeout 3 -
  wait_for_job_exit "$JOB"
  [ "$status" -eq 124 ]
  shows err "rank 1 on $N2 is not in a collective, the other waits for it; it is at my script.py:"
  no_processes_within 10
}


@test "a slurmstepd is killed: the connection to its node is lost, and its ranks exit by themselves" {
  submit_endless_script --no-requeue
  kill -KILL "$(stepd_on "$N2")"
  wait_for_job_exit "$JOB"
  [ "$status" -eq 69 ]
  shows err "verdict: failed: $N2: connection lost"
  shows err "scontrol requeue failed: submit the same job to resume"
  no_processes_within 10
}


@test "a cut-off node is detected before SLURM detects it, its ranks exit, and the job is requeued on other nodes" {
  submit_endless_script
  lab cut "$N2"
  wait_for_line "logs/slurm-$JOB.err" "verdict: "
  shows err "step: $N2: no heartbeat for 12 s; stopping the other nodes"
  shows err "verdict: failed: $N2: connection lost"
  no_processes_within 10
  wait_for_requeue 1
  wait_for_second_start
  run ! grep -F "\"$N2\"" "logs/slurm-$JOB/run.json"
}


@test "SLURM marks a node DOWN: the verdict names it, and the job is requeued and resumes" {
  local second
  endless_settings >tiny.yaml
  submit --ntasks-per-node=1 slurm_train.sh tiny.yaml -- checkpoint.every=1
  wait_for_line "logs/slurm-$JOB.out" "step      3/100000"
  second=$(sed -n 's/.*2 processes on .* //p' "logs/slurm-$JOB.err")
  scontrol update "nodename=$second" state=drain reason=test # without drain it would return to service at once
  scontrol update "nodename=$second" state=down reason=test
  wait_for_line "logs/slurm-$JOB.err" "verdict: failed: $second: connection lost: node failure reported by SLURM"
  wait_for_requeue 1
  wait_for_line "logs/slurm-$JOB.out" "resuming from"
  [ -e "logs/slurm-$JOB/attempts/1/verdict.json" ]
  scontrol update "nodename=$second" state=resume
}


@test "SIGUSR2 is repeated until a rank has its handler" {
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
  wait_for_job_exit "$JOB"
  [ "$status" -eq 75 ]
  shows err "and --max-requeues is 0; not requeueing"
}


# Write a script that counts the signals that it handles, for 20 s.
write_signal_counter() {
  cat >"my script.py" <<'END'
import signal, time
numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU, signal.SIGALRM, signal.SIGRTMIN)
count = dict.fromkeys(numbers, 0)
for number in numbers:
    assert signal.getsignal(number) == signal.SIG_DFL  # otherwise Lightning would install no handler
    signal.signal(number, lambda number, frame: count.update({number: count[number] + 1}))
print("at work", flush=True)
time.sleep(20)
print("counts", *count.values(), flush=True)
END
}


@test "every signal of SLURM, to the tasks or to the batch script, reaches a rank's handler once, also with torchrun" {
  use_agent_without_torch
  local launcher number
  write_signal_counter
  for launcher in srun torchrun; do
    LAUNCHER=$launcher SCRIPT="my script.py" submit --nodes=1 --ntasks-per-node=1 slurm_train.sh -
    wait_for_line "logs/slurm-$JOB.out" "at work"
    for number in USR1 XCPU ALRM; do
      scancel --signal="$number" "$JOB"
    done
    scancel --batch --signal=USR2 "$JOB"
    scancel --full --signal=34 "$JOB"
    if [ "$launcher" = srun ]; then # torchrun's agent handles these signals, and stops its ranks
      scancel --signal=HUP "$JOB"
      scancel --signal=QUIT "$JOB"
    fi
    wait_for_job_exit "$JOB"
    [ "$status" -eq 0 ] || { cat logs/slurm-*.err && false; }
    shows out "counts 1 1 $([ "$launcher" = srun ] && echo 1 1 || echo 0 0) 1 1 1"
  done
}


@test "a signal of SLURM to the tasks or to the batch script gives a checkpoint and a requeue" {
  local number=0 options
  write_plain_trainer
  SCRIPT="my script.py" submit --ntasks-per-node=1 --nodes=1 slurm_train.sh -
  for options in --signal=USR1 --signal=XCPU "--batch --signal=USR1" "--batch --signal=TERM"; do
    number=$((number + 1))
    timeout 120 bash -c 'until "$@"; do sleep 0.1; done' bash is_training "$number" "logs/slurm-$JOB.out"
    # shellcheck disable=SC2086
    scancel $options "$JOB"
    wait_for_requeue "$number" || { tail -n 60 logs/slurm-*.{out,err} && false; }
  done
  shows err "verdict: stopped: stopped by SIGUSR1 from SLURM (--signal or scancel), checkpoint written"
  shows err "verdict: stopped: stopped by SIGUSR1 to the launcher, checkpoint written"
}


@test "a signal that no rank handles ends no process of Muster, and the verdict names the signal" {
  local launcher
  cat >"my script.py" <<'END'
import subprocess, sys, time
child = """
import signal, time
for number in signal.SIGUSR1, signal.SIGUSR2:
    signal.signal(number, lambda *_: None)  # not in the rank itself
print("at work", flush=True)
time.sleep(1000)
"""
subprocess.run([sys.executable, "-c", child])
time.sleep(1000)
END
  for launcher in srun torchrun; do
    LAUNCHER=$launcher SCRIPT="my script.py" submit --no-requeue --ntasks-per-node=1 slurm_train.sh -
    wait_for_line "logs/slurm-$JOB.out" "at work"
    scancel --signal=USR1 "$JOB"
    scancel --signal=USR2 "$JOB"
    scancel --signal=ALRM "$JOB"
    wait_for_job_exit "$JOB"
    [ "$status" -eq 142 ]
    shows err " died of SIGALRM; " # one rank or both: the launcher may stop the other rank before SLURM signals it
    shows err "SIGALRM from SLURM (--signal or scancel) was received "
    LAUNCHER=$launcher SCRIPT="my script.py" submit --no-requeue --ntasks-per-node=1 slurm_train.sh -
    wait_for_line "logs/slurm-$JOB.out" "at work"
    scancel --batch --signal=USR1 "$JOB"
    wait_for_job_exit "$JOB"
    [ "$status" -eq 143 ]
    shows err "verdict: stopped: interrupted by SIGUSR1 to the launcher; no rank had failed"
  done
  no_processes_within 10
}


@test "scancel --full: SIGUSR2 to all processes of the batch script also requeues the job" {
  write_plain_trainer
  SCRIPT="my script.py" submit --ntasks-per-node=1 slurm_train.sh -
  wait_for_line "logs/slurm-$JOB.out" "step      3/100000"
  scancel --full --signal=USR2 "$JOB"
  wait_for_requeue 1
}


@test "after a supervisor or srun is killed, no rank remains" {
  local program
  printf 'import time\nprint("at work", flush=True)\ntime.sleep(1000)\n' >"my script.py"
  for program in "$VIRTUAL_ENV/bin/python -I -S $KIT/scripts/lib/module.py slurm.task rank" "srun --export ALL "; do
    SCRIPT="my script.py" submit --no-requeue --nodes=2 --ntasks-per-node=1 slurm_train.sh -
    wait_for_line "logs/slurm-$JOB.out" "at work"
    kill -KILL "$(pgrep -f "^$program.* $WORK/logs/" | while read -r pid; do
      [[ ! /proc/$pid/ns/net -ef $MUSTER_LAB/$N1/net ]] || echo "$pid"
    done | head -n 1)" # the oldest: a guard has the same arguments
    wait_for_job_exit "$JOB"
    [ "$status" -ne 0 ]
    shows err "verdict: failed: $([[ $program == srun* ]] || echo "the supervisor on $N1 died of SIGKILL")"
    no_processes_within 10
  done
}


@test "a detached child process of a rank is killed after the rank has exited" {
  cat >"my script.py" <<'END'
import os, subprocess
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
child.returncode = 0  # not waited for
END
  SCRIPT="my script.py" submit --nodes=1 --ntasks-per-node=1 slurm_train.sh -
  wait_for_job_exit "$JOB"
  [ "$status" -eq 0 ]
  no_processes_within 10
}


@test "a node_env.sh fails on a node: the verdict names node and line" {
  mkdir config
  echo '[[ ! ${SLURM_STEP_ID-} ]] || none' >config/node_env.sh
  touch "my script.py"
  SCRIPT="my script.py" submit --nodes=1 --ntasks-per-node=1 slurm_train.sh -
  wait_for_job_exit "$JOB"
  [ "$status" -eq 69 ]
  shows err "verdict: failed: $N1: $WORK/config/node_env.sh: line 1: '[[ ! "
  shows err "|| none' failed with exit code 127; fix it, or write "
}


@test "scancel: the ranks write a checkpoint, and the job is not requeued" {
  write_plain_trainer
  SCRIPT="my script.py" submit --ntasks-per-node=1 slurm_train.sh -
  wait_for_line "logs/slurm-$JOB.out" "step      3/100000"
  scancel "$JOB"
  wait_for_job_exit "$JOB"
  [ "$status" -eq 75 ]
  shows err "verdict: stopped: stopped on request, checkpoint written"
  shows err "submit the same job to resume"
  [ -e "saved by 0" ] && [ -e "saved by 1" ]
  run ! grep -E "requeue|run the same command" "logs/slurm-$JOB.err"
  no_processes_within 10
}


# SLURM sends the signal one minute after the start. An earlier signal would stop ranks that have no handler yet, and
# the job would not be requeued.
# bats test_tags=soak
@test "before its time limit a job writes a checkpoint, is requeued and resumes" {
  endless_settings >tiny.yaml
  local option
  for option in USR2@60 USR1@60 B:USR1@60 B:TERM@60; do
    submit --ntasks-per-node=1 --time=2 --signal="$option" slurm_train.sh tiny.yaml -- checkpoint.dir="$option"
  done
  for JOB in "${JOBS[@]}"; do
    wait_for_requeue 1
    shows err "requeueing job $JOB at step"
    wait_for_line "logs/slurm-$JOB.out" "resuming from"
  done
}


@test "a preempted job is requeued and resumes" {
  write_plain_trainer
  SCRIPT="my script.py" submit --ntasks-per-node=1 --exclusive --nodes=3 slurm_train.sh -
  wait_for_line "logs/slurm-$JOB.out" "step      3/100000"
  JOBS+=("$(sbatch --parsable --partition=urgent --nodes=3 --exclusive --output=urgent --wrap 'echo here')")
  wait_for_requeue 1
  wait_for_line "logs/slurm-$JOB.out" "resuming from"
  run ! grep -E "run the same command|submit the same job" "logs/slurm-$JOB.err"
  [ -s urgent ]
}


@test "a preempted job is requeued also when its ranks have no signal handler" {
  submit_endless_script --signal=TERM@60 --exclusive --nodes=3
  JOBS+=("$(sbatch --parsable --partition=urgent --nodes=3 --exclusive --output=urgent --wrap 'echo here')")
  wait_for_requeue 1
  [ -s urgent ]
}


@test "restarts and requeues of a job are counted together, with srun and with torchrun" {
  use_agent_without_torch
  local launcher
  for launcher in srun torchrun; do
    write_counting_script
    cat >>"my script.py" <<'END'
import subprocess
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    if os.environ["RANK"] == "0":
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]])
    time.sleep(1000)
elif attempt == 3:
    sys.exit(4)
END
    LAUNCHER=$launcher SCRIPT="my script.py" submit --ntasks-per-node=1 slurm_train.sh --max-restarts 1 - -- 1 2
    wait_for_job_exit "$JOB"
    [ "$status" -eq 0 ] || { cat "logs/slurm-$JOB.err" && false; }
    # The first attempt fails and is restarted in the job. The second is requeued. The third fails and is restarted.
    all_ranks_saw 2 "0 1" "1 1" "2 1" "3 1"
  done
}


@test "with LAUNCHER=torchrun, agents stay for the next attempt; when one has died, all start anew" {
  use_agent_without_torch
  cat >"my script.py" <<'END'
import os, signal, sys, time
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
with open(f"agent.{attempt}.{rank}.part", "w") as file:
    file.write(str(os.getppid()))
os.rename(file.name, file.name.removesuffix(".part"))
while not all(os.path.exists(f"agent.{attempt}.{one}") for one in range(2)):
    time.sleep(0.02)
if attempt == "0" and rank == "1":
    sys.exit(3)
if attempt == "1" and rank == "1":
    os.kill(os.getppid(), signal.SIGKILL)
if attempt == "1":
    time.sleep(300)
END
  LAUNCHER=torchrun SCRIPT="my script.py" submit --nodes=2 --ntasks-per-node=1 slurm_train.sh --max-restarts 2 -
  wait_for_job_exit "$JOB"
  [ "$status" -eq 0 ] || { cat "logs/slurm-$JOB.err" && false; }
  [ "$(cat agent.0.0)" = "$(cat agent.1.0)" ] && [ "$(cat agent.0.1)" = "$(cat agent.1.1)" ]
  [ "$(cat agent.1.0)" != "$(cat agent.2.0)" ] && [ "$(cat agent.1.1)" != "$(cat agent.2.1)" ]
  grep -qF "rank 1 on " logs/latest/attempts/1/verdict.json
}


@test "a job that is suspended for longer than any heartbeat timeout continues afterwards, with srun and with torchrun" {
  local job
  write_script <<'END'
while not os.path.exists("finish"):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
    print("at work", flush=True)
    done = torch.tensor([float(os.path.exists("finish"))])
    dist.all_reduce(done)
    if done:
        break
END
  for launcher in srun torchrun; do
    LAUNCHER=$launcher SCRIPT="my script.py" submit --oversubscribe --ntasks-per-node=1 slurm_train.sh -
  done
  for job in "${JOBS[@]}"; do
    wait_for_line "logs/slurm-$job.out" "at work"
  done
  scontrol suspend "${JOBS[0]}"
  scontrol suspend "${JOBS[1]}"
  sleep 25
  scontrol resume "${JOBS[0]}"
  scontrol resume "${JOBS[1]}"
  touch finish
  for JOB in "${JOBS[@]}"; do
    wait_for_job_exit "$JOB"
    [ "$status" -eq 0 ] || { tail -n 40 "logs/slurm-$JOB".{out,err} && false; }
  done
}


@test "with LAUNCHER=torchrun, a spare node of the job takes the place of a lost one" {
  use_agent_without_torch
  cat >"my script.py" <<'END'
import os, time
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
with open(f"node.{attempt}.{rank}.part", "w") as file:
    file.write(os.environ["MUSTER_NODE"])
os.rename(file.name, file.name.removesuffix(".part"))
while not os.path.exists("go"):
    time.sleep(0.05)
END
  LAUNCHER=torchrun SCRIPT="my script.py" submit --no-kill --nodes=3 --ntasks-per-node=1 slurm_train.sh \
    --max-restarts 2 --spares 1 -
  timeout 100 sh -c 'until [ -e node.0.0 ] && [ -e node.0.1 ]; do sleep 0.1; done' || { cat logs/slurm-"$JOB".*; squeue; false; }
  lost=$(<node.0.1)
  lab cut "$lost"
  timeout 100 sh -c 'until [ -e node.1.0 ] && [ -e node.1.1 ]; do sleep 0.1; done' || { cat "logs/slurm-$JOB.err" && false; }
  lab heal "$lost"
  : >go
  wait_for_job_exit "$JOB"
  [ "$status" -eq 0 ] || { cat "logs/slurm-$JOB.err" && false; }
  [ "$(<node.1.0)" = "$(<node.0.0)" ]
  grep -qF "$lost is lost (no heartbeat): $(<node.1.1) takes its place as node rank 1" "logs/slurm-$JOB.err"
}


@test "a requeue during a checkpoint resumes from the last complete one" {
  endless_settings >tiny.yaml
  submit --ntasks-per-node=1 slurm_train.sh tiny.yaml -- checkpoint.every=1 checkpoint.keep=2
  wait_for_line "logs/slurm-$JOB.out" "step      5/100000"
  scontrol requeue "$JOB" # at an arbitrary moment, while checkpoints are being written
  wait_for_requeue 1
  wait_for_line "logs/slurm-$JOB.out" "resuming from"
  run ! grep -F "skipping a checkpoint" "logs/slurm-$JOB.err"
}


# Submit two jobs that exit with 75 without progress, and a job whose ranks exit at different times.
submit_background_jobs() {
  mkdir "$BATS_FILE_TMPDIR/background"
  cd "$BATS_FILE_TMPDIR/background" || return
  echo 'import sys; sys.exit(75)' >"my script.py"
  SCRIPT="my script.py" submit --nodelist="${PREFIX}4" --nodes=1 --ntasks-per-node=1 slurm_train.sh --max-requeues 1 -
  SCRIPT="my script.py" submit --nodelist="${PREFIX}4" --nodes=1 --ntasks-per-node=1 slurm_train.sh -
  echo 'import os, time; time.sleep(20 * int(os.environ["RANK"]))' >uneven.py
  SCRIPT=uneven.py submit --nodelist="${PREFIX}4" --nodes=1 slurm_train.sh -
  printf '%s\n' "${JOBS[@]}" >numbers
}


enter_background_job() { # <1, 2 or 3>
  cd "$BATS_FILE_TMPDIR/background" || return
  JOB=$(sed -n "$1p" numbers)
}


# Succeed when this attempt has printed four training steps. Before that, SLURM may not have a job step yet to which it
# can send a signal.
is_training() { # <attempt> <output of rank 0>
  [ -e "$2" ] && awk -v "attempt=$1" '/resuming from/ { resumed++; steps = 0 } /^step / { steps++ }
    END { exit !(resumed == attempt - 1 && steps >= 4) }' "$2"
}
export -f is_training


# Train once without interruption, with one task per rank, and once with five preemptions, slow steps and one agent per
# node.
preempt_five_times() {
  local attempt
  mkdir "$BATS_FILE_TMPDIR/five"
  cd "$BATS_FILE_TMPDIR/five" || return
  endless_settings | sed 's/100000/60/' >tiny.yaml
  cat >slow.py <<END
import runpy, sys, time
sys.path.insert(0, "$KIT")
import torch
step = torch.optim.AdamW.step
torch.optim.AdamW.step = lambda *args, **kwargs: (time.sleep(0.3), step(*args, **kwargs))[1]
runpy.run_path("$KIT/train.py", run_name="__main__")
END
  submit --nodelist="${PREFIX}4" --nodes=1 slurm_train.sh tiny.yaml -- checkpoint.dir=unstopped
  LAUNCHER=torchrun SCRIPT=slow.py submit --nodelist="${PREFIX}4" --nodes=1 slurm_train.sh tiny.yaml -- checkpoint.dir=stopped
  echo "$JOB" >job
  for attempt in {1..5}; do
    timeout 120 bash -c 'until "$@"; do sleep 0.1; done' bash is_training "$attempt" "logs/slurm-$JOB.out"
    scancel --signal=USR2 "$JOB"
    wait_for_requeue "$attempt"
  done
}


@test "after five preemptions the weights are identical to those of an uninterrupted training" {
  cd "$BATS_FILE_TMPDIR/five"
  timeout 240 tail --pid "$(<../five.pid)" -f /dev/null
  JOB=$(<job)
  wait_for_job_exit "$JOB"
  [ "$status" -eq 0 ] || { cat ../five.log logs/slurm-*.err && false; }
  [ "$(grep -c 'resuming from' "logs/slurm-$JOB.out")" -eq 5 ] || { cat ../five.log logs/slurm-"$JOB".* && false; }
  run -0 "$VIRTUAL_ENV/bin/python" - <<'END'
import torch
unstopped, stopped = (torch.load(f"{directory}/step_00000060/state.pt") for directory in ("unstopped", "stopped"))
assert unstopped["model"].keys() == stopped["model"].keys()
for name in unstopped["model"]:
    assert torch.equal(unstopped["model"][name], stopped["model"][name]), name
END
  scontrol requeue "$JOB"
  wait_for_line "logs/slurm-$JOB.err" "the run has already succeeded; nothing to do"
}


@test "a job is not requeued after --max-requeues requeues, or after three attempts without progress" {
  enter_background_job 1
  wait_for_job_exit "$JOB"
  [ "$status" -eq 75 ]
  shows err "requeued 1 time, and --max-requeues is 1; not requeueing"
  enter_background_job 2
  wait_for_job_exit "$JOB"
  [ "$status" -eq 75 ]
  shows err "no progress in 3 attempts; not requeueing"
}


@test "a rank may exit with 0 long before the other ranks" {
  enter_background_job 3
  wait_for_job_exit "$JOB"
  [ "$status" -eq 0 ] || { cat logs/slurm-"$JOB".err && false; }
}


@test "a job with --no-requeue exits with 75 and prints how to resume" {
  echo 'import sys; sys.exit(75)' >"my script.py"
  SCRIPT="my script.py" submit --nodes=1 --ntasks-per-node=1 --no-requeue slurm_train.sh -
  wait_for_job_exit "$JOB"
  [ "$status" -eq 75 ]
  shows err "scontrol requeue failed: submit the same job to resume"
}
