#!/usr/bin/env bats
#
# The batch scripts on a real SLURM: they train what CONFIG, SCRIPT and words say, on all that was really allocated, and
# leave a run like every launcher's. A job is found, watched and stopped by its number.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
load lab/nodes.bash
load lab/jobs.bash


setup_file() {
  raise_nodes 3 --slurm --gpus 2
}


teardown_file() {
  lower_nodes
}


setup() {
  enter_work
  JOBS=()
}


teardown() {
  cancel_jobs
}


# Writes what each rank knows of its place, a line each, into places/. Without PyTorch: that is quicker.
placing_script() {
  mkdir -p places
  cat >"my script.py" <<'END'
import os, socket, sys
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
words = [os.environ[name] for name in names] + [socket.gethostname(), *sys.argv[1:]]
with open(f"places/{words[0]}", "w") as file:
    print(*words, file=file)
prefixes = ("RANK", "WORLD", "LOCAL", "GROUP", "ROLE", "MASTER", "TORCHELASTIC", "TORCH_NCCL")
with open(f"variables.{words[0]}", "w") as file:
    for name, value in sorted(os.environ.items()):
        if name.startswith(prefixes):
            print(name, "" if name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID") else value, file=file)
END
}


# Ranks that meet, and write how many they are.
meeting_script() {
  script <<'END'
total = torch.ones(1)
dist.all_reduce(total)
open(f"{rank}", "w").write(f"{int(total)} at {os.environ['MASTER_PORT']}")
dist.destroy_process_group()
END
}


places() { # <expected line for each rank...>
  local rank=0 line
  for line; do
    [ "$(<"places/$rank")" = "$line" ] || { head places/* && cat logs/slurm-*.err && return 1; }
    rank=$((rank + 1))
  done
  [ ! -e "places/$rank" ]
}


# bats test_tags=quick
@test "a job trains on its nodes, and leaves a run like every launcher's" {
  endless_training | sed 's/100000/2/' >tiny.yaml
  export RANK=7 MASTER_ADDR=nowhere MASTER_PORT=1 # of another launch, that sbatch takes along
  submit slurm_train.sh tiny.yaml -- logging.level=info
  status_of_job "$JOB"
  [ "$status" -eq 0 ] || { cat logs/slurm-*.err && false; }
  shows out "ddp on 4 x cpu"
  shows out "step 2/2"
  shows err "4 processes on $N1 $N2"
  shows err "verdict: ok"
  [ "$(readlink "logs/slurm-$JOB")" = "$(readlink logs/latest)" ]
  grep -q "^\[$N1:0\] .*step 2/2" logs/latest/node_"$N1".log
  [ -e logs/latest/ranks/"$N2"/slurm/attempt_0/1/stdout.log ]
  [ -s logs/latest/report.html ]
  run -0 "$KIT/scripts/status.sh" "$JOB"
  [[ "$output" == *"ended after"*"verdict: ok"* ]]
  run -0 "$KIT/scripts/stop.sh" "$JOB"
  [ "$output" = "job $JOB has ended, and SLURM with it what it had on its nodes" ]
}


@test "CONFIG and SCRIPT choose the work, words go to it untouched, and so do options of the launchers" {
  placing_script
  CONFIG=- SCRIPT="my script.py" submit --nodes=1 --ntasks-per-node=1 slurm_train.sh --env 'A=1 2' -- 'x  y' "it's" '$HOME'
  status_of_job "$JOB"
  [ "$status" -eq 0 ] || { cat logs/slurm-*.err && false; }
  places "0 0 1 1 $N1 x  y it's \$HOME"
  grep -q '"A=\.\.\."' "logs/slurm-$JOB/run.json"
  run ! grep -rF 'A=1 2' "logs/slurm-$JOB/"
}


@test "uneven nodes have the ranks that were allocated, with one task a rank and with one agent a node" {
  local launcher
  placing_script
  mkdir config
  echo "unset OMP_NUM_THREADS" >config/node_env.sh # the laboratory's
  for launcher in srun torchrun; do
    rm -f places/*
    LAUNCHER=$launcher SCRIPT="my script.py" submit --nodes=2 --ntasks=3 --gres=none slurm_train.sh -
    status_of_job "$JOB"
    [ "$status" -eq 0 ] || { cat logs/slurm-*.err && false; }
    places "0 0 2 3 $N1" "1 1 2 3 $N1" "2 0 1 3 $N2"
    grep -hvE "ERROR_FILE|LOG_LINE_PREFIX|SIGNALS_TO_HANDLE|USE_AGENT_STORE" variables.? >"variables of $launcher"
    [ "$(cat "logs/slurm-$JOB".{out,err} | grep -c "^OMP_NUM_THREADS=1 for each of 2 ranks on [12] core")" -eq 1 ]
  done
  diff variables\ of\ *
}


@test "one node: the agent imports PyTorch once, and the same script may be in a project elsewhere" {
  placing_script
  cp "$KIT/scripts/slurm/slurm_train_single_node.sh" "my job.sh"
  mkdir logs
  JOB=$(MUSTER_KIT=$KIT LAUNCHER=torchrun SCRIPT="my script.py" sbatch --parsable "my job.sh" -)
  JOBS+=("$JOB")
  status_of_job "$JOB"
  [ "$status" -eq 0 ] || { cat logs/slurm-*.err && false; }
  places "0 0 2 2 $N1" "1 1 2 2 $N1"
}


@test "each element of an array has a CONFIG of its own, and its number for %a" {
  mkdir places
  cat >"my script.py" <<'END'
import sys
open(f"places/{sys.argv[-1]}", "w").write(" ".join(sys.argv[1:]))
END
  touch a.yaml "b c.yaml"
  SCRIPT="my script.py" submit --array=4-5 --nodes=1 --ntasks-per-node=1 slurm_train.sh a.yaml "b c.yaml" -- seed=%a %a
  status_of_job "${JOB}_4"
  status_of_job "${JOB}_5"
  [ "$status" -eq 0 ]
  [ "$(<places/4)" = "--config a.yaml seed=4 4" ]
  [ "$(<places/5)" = "--config b c.yaml seed=5 5" ]
  run -0 "$KIT/scripts/status.sh" "${JOB}_4"
  [[ "$output" == *"verdict: ok"* ]]
}


@test "what cannot work is refused with the remedy, before anything starts" {
  endless_training >tiny.yaml
  run -2 "$KIT/scripts/slurm/slurm_train.sh" tiny.yaml
  [[ "$output" == *"this is for sbatch: sbatch $(printf %q "$KIT")/scripts/slurm/slurm_train.sh tiny.yaml"* ]]
  run -2 "$KIT/scripts/slurm/slurm_train.sh" a.yaml b.yaml
  [[ "$output" == *"2 CONFIGs are for an array of 2 elements: sbatch --array=0-1"* ]]
  run -2 "$KIT/scripts/slurm/slurm_train.sh" --max-requeues often
  [[ "$output" == *"--max-requeues: expected a whole number, got 'often'"* ]]
  run -2 "$KIT/scripts/slurm/slurm_train.sh" --nodes=4 tiny.yaml
  [[ "$output" == *"--nodes=4: options of sbatch stand before the script: sbatch --nodes=4 ... slurm_train.sh"* ]]
  run -2 env MUSTER_KIT=/nope "$KIT/scripts/slurm/slurm_train.sh" tiny.yaml
  [[ "$output" == *"cannot find the kit: submit the script that lies in it, or export MUSTER_KIT=<its directory> before"* ]]
  run -2 "$KIT/scripts/slurm/slurm_train.sh" --detach tiny.yaml
  [[ "$output" == *"sbatch leaves the terminal by itself"* ]]
  run -2 salloc -Q -n2 env LAUNCHER=mpirun "$KIT/scripts/slurm/slurm_train.sh" tiny.yaml
  [[ "$output" == *"LAUNCHER: expected srun or torchrun, got 'mpirun'"* ]]
  run -2 salloc -Q -n2 env CONTAINER="apptainer exec 'half" "$KIT/scripts/slurm/slurm_train.sh" tiny.yaml
  [[ "$output" == *"a quote is not closed; quote as in a shell"* ]]
  run -2 salloc -Q -N1 -n1 "$KIT/scripts/slurm/slurm_train.sh" tiny.yaml -- train.stepz=1
  [[ "$output" == *"train.stepz: unknown key; did you mean train.steps?"* ]]
  [ ! -e logs ]
}


@test "a batch script that is refused says why in its .err, and ends with 2" {
  endless_training >tiny.yaml
  submit --nodes=1 --ntasks-per-node=3 slurm_train.sh tiny.yaml
  status_of_job "$JOB"
  [ "$status" -eq 2 ]
  shows err "$N1: 3 processes, but 2 GPUs allocated"
  run -1 "$KIT/scripts/status.sh" "$JOB"
  [[ "$output" == *"job $JOB has ended before it had a run (FAILED, exit code 2): see $WORK/logs/slurm-$JOB.err"* ]]
  submit --array=0-2 --nodes=1 slurm_train.sh tiny.yaml tiny.yaml
  status_of_job "${JOB}_2"
  [ "$status" -eq 2 ]
  grep -qF "element 2 has no CONFIG: the array begins at 0, and 2 are given" logs/slurm-*.err || { head -n 50 logs/slurm-*.err && false; }
}


@test "--dry-run shows what sbatch reads and the line of srun, on a login node and in a job" {
  touch "my script.py"
  run -0 "$KIT/scripts/slurm/slurm_train.sh" --dry-run --script "my script.py" - -- 'x y'
  [[ "$output" == *"#SBATCH --ntasks-per-node=2 "*"srun "*"--nodes 2 --ntasks 4 "*"--cpus-per-task 2 "*"my\\ script.py x\\ y" ]]
  [ ! -e logs ]
  CONTAINER="--container-image=nvcr.io#nvidia/pytorch --container-mounts=/data" SRUN_ARGS="--cpu-bind=cores" \
    run -0 salloc -Q -N2 -n3 "$KIT/scripts/slurm/slurm_train.sh" --dry-run --script "my script.py" -
  [[ "$output" == *"--ntasks 3 "*"--container-image=nvcr.io#nvidia/pytorch --container-mounts=/data --cpu-bind=cores "*" python3 "* ]]
  [ ! -e logs ]
}


@test "a container has another host name and no munge, and the ranks know their places" {
  placing_script
  CONTAINER="unshare --mount --uts sh -c 'mount -t tmpfs none /etc/munge && hostname inside && exec \"\$@\"' sh" \
    SCRIPT="my script.py" submit --ntasks-per-node=1 slurm_train.sh --python "$VIRTUAL_ENV/bin/python" -
  status_of_job "$JOB"
  [ "$status" -eq 0 ] || { cat logs/slurm-*.err && false; }
  places "0 0 1 2 inside" "1 0 1 2 inside"
}


@test "outside of a container there need be no more than Python" {
  local inside=$VIRTUAL_ENV/bin/python
  endless_training | sed 's/100000/2/' >tiny.yaml
  python3 -m venv --without-pip bare
  VIRTUAL_ENV=$PWD/bare CONTAINER="unshare --mount" submit --nodes=1 --ntasks-per-node=1 slurm_train.sh \
    --python "$inside" tiny.yaml
  status_of_job "$JOB"
  [ "$status" -eq 0 ] || { cat logs/slurm-*.err && false; }
  shows out "step 2/2"
}


@test "a running job is seen on all its nodes, and stops with a checkpoint when a person asks: that is no next turn" {
  endless_training >tiny.yaml
  submit --ntasks-per-node=1 slurm_train.sh tiny.yaml
  wait_for_line "logs/slurm-$JOB.out" "step      3/100000"
  cd /
  run -0 "$KIT/scripts/status.sh" "$JOB"
  [[ "$output" == *": running for "*"$N1 "*" 0 "*"$N2 "*" 1 "* ]]
  run -0 "$KIT/scripts/stop.sh" --log-dir "$WORK/logs" "$JOB"
  [[ "$output" == *"job $JOB has ended"* ]]
  cd "$WORK"
  status_of_job "$JOB"
  [ "$status" -eq 75 ]
  ls -d "check points"/step_*
  run ! grep requeue "logs/slurm-$JOB.err"
  steps=$(($(find "check points" -name 'step_*' -printf '%f\n' | sort | tail -n 1 | sed 's/step_0*//') + 1))
  submit --ntasks-per-node=1 slurm_train.sh tiny.yaml -- train.steps=$steps logging.sample=1000000
  wait_for_line "logs/slurm-$JOB.out" "step $steps/$steps" # and then the sample
  "$KIT/scripts/stop.sh" "$JOB"
  status_of_job "$JOB"
  [ "$status" -eq 0 ]
  shows err "verdict: stopped: stopped on request, and every rank ended well"
  nothing_left_within 10
}


@test "a job that waits is seen in the queue, and is stopped there" {
  touch "my script.py"
  SCRIPT="my script.py" submit --begin=now+1hour slurm_train.sh -
  run -0 "$KIT/scripts/status.sh" "$JOB"
  [[ "$output" == *"job $JOB has no run yet, in the queue it is PENDING (BeginTime)"* ]]
  run -0 "$KIT/scripts/stop.sh" "$JOB"
  [[ "$output" == *"job $JOB has ended"* ]]
  run -2 "$KIT/scripts/status.sh" 4711
  [[ "$output" == *"RUN '4711': no run of job 4711 in logs, and SLURM knows of none ("*"Invalid job id specified); of "* ]]
}


@test "two jobs on one node at once meet at ports of their own" {
  local first
  meeting_script
  mkdir -p one/logs two/logs
  SCRIPT="$PWD/my script.py" submit --chdir="$WORK/one" --nodelist="$N1" --nodes=1 --gres=none slurm_train.sh -
  first=$JOB
  SCRIPT="$PWD/my script.py" submit --chdir="$WORK/two" --nodelist="$N1" --nodes=1 --gres=none slurm_train.sh -
  status_of_job "$first"
  [ "$status" -eq 0 ]
  status_of_job "$JOB"
  [ "$status" -eq 0 ]
  [[ "$(<one/1)" == "2 at "* && "$(<two/1)" == "2 at "* && "$(<one/1)" != "$(<two/1)" ]]
}


@test "in the shell of salloc the same script trains, and there is no next turn" {
  endless_training >tiny.yaml
  salloc -Q -N2 -n2 "$KIT/scripts/slurm/slurm_train.sh" tiny.yaml >out 2>&1 3>&- &
  salloc=$!
  wait_for_line out "step      3/100000"
  scancel --signal=USR2 "$(squeue --noheader --format=%i)"
  status_of "$salloc"
  [ "$status" -eq 75 ] || { tail out && false; }
  ls -d "check points"/step_*
  run ! grep requeue out
}
