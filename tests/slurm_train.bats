#!/usr/bin/env bats
#
# The batch scripts on SLURM: they run CONFIG or SCRIPT with their arguments on all allocated nodes, and create the same
# kind of run directory as all launchers. status.sh and stop.sh accept the job id.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
load lab/nodes.bash
load lab/jobs.bash
load lab/hostile_environment.bash


setup_file() {
  start_lab 3 --slurm --gpus 2
}


setup() {
  enter_workdir
  JOBS=()
}


teardown() {
  cancel_jobs
}


# Write a script in which each rank writes its rank, sizes, host and arguments to positions/RANK, and
# torchrun's variables to variables.RANK. The script does not use PyTorch.
write_position_script() {
  mkdir -p positions
  cat >"my script.py" <<'END'
import os, socket, sys
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
position = [os.environ[name] for name in names] + [socket.gethostname(), *sys.argv[1:]]
with open(f"positions/{position[0]}", "w") as file:
    print(*position, file=file)
prefixes = ("RANK", "WORLD", "LOCAL", "GROUP", "ROLE", "MASTER", "TORCHELASTIC", "TORCH_NCCL")
with open(f"variables.{position[0]}", "w") as file:
    for name, value in sorted(os.environ.items()):
        if name.startswith(prefixes):
            print(name, "" if name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID") else value, file=file)
END
}


# Write a script in which each rank writes the number of ranks and the port to a file.
write_collective_script() {
  write_script <<'END'
total = torch.ones(1)
dist.all_reduce(total)
open(f"{rank}", "w").write(f"{int(total)} ranks at {os.environ['MASTER_PORT']}")
dist.destroy_process_group()
END
}


positions_are() { # <expected line of each rank...>
  local rank=0 line
  for line; do
    [ "$(<"positions/$rank")" = "$line" ] || { head positions/* && cat logs/slurm-*.err && return 1; }
    rank=$((rank + 1))
  done
  [ ! -e "positions/$rank" ]
}


# bats test_tags=quick
@test "a job trains on its nodes, and creates the same kind of run directory as all launchers" {
  endless_settings | sed 's/100000/2/' >tiny.yaml
  export RANK=7 MASTER_ADDR=nowhere MASTER_PORT=1 # as from another launch; sbatch passes them on
  submit slurm_train.sh tiny.yaml -- logging.level=info
  wait_for_job_exit "$JOB"
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
  [ "$output" = "job $JOB has ended; SLURM has ended its processes on all nodes" ]
}


@test "variables, options and functions that sbatch passes on reach the ranks, and do not change the job" {
  write_hostile_environment
  mkdir logs
  JOB=$(bash with_hostile_environment sbatch --parsable --nodes=1 --ntasks-per-node=1 --cpus-per-task=1 \
    "$KIT/scripts/slurm/slurm_train.sh" --script compare.py -)
  JOBS=("$JOB")
  wait_for_job_exit "$JOB"
  [ "$status" -eq 7 ] || { cat logs/slurm-*.err && false; }
  shows out "differs: [b'ENVIRONMENT']" # SLURM sets it to BATCH
  run ! grep -q replaced logs/slurm-"$JOB".out logs/slurm-"$JOB".err
}


@test "CONFIG and SCRIPT select the program, its arguments are unchanged, and launcher options apply" {
  write_position_script
  CONFIG=- SCRIPT="my script.py" submit --nodes=1 --ntasks-per-node=1 slurm_train.sh --env 'A=1 2' -- 'x  y' "it's" '$HOME'
  wait_for_job_exit "$JOB"
  [ "$status" -eq 0 ] || { cat logs/slurm-*.err && false; }
  positions_are "0 0 1 1 $N1 x  y it's \$HOME"
  grep -q '"A=\.\.\."' "logs/slurm-$JOB/run.json"
  run ! grep -rF 'A=1 2' "logs/slurm-$JOB/"
}


@test "jobs that are submitted inside another job run as if they were submitted from a login node" {
  local job
  cat >"my script.py" <<'END'
import os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
print("position", *(os.environ[name] for name in names), flush=True)
END
  cat >submit.sh <<'END'
[ "${SLURM_PROCID-0}" = 0 ] || exit 0
options=(--parsable --cpus-per-task=1 --nodes=2 --gres=none --output=logs/slurm-%j.out --error=logs/slurm-%j.err)
for launcher in srun torchrun; do
  LAUNCHER=$launcher SCRIPT="my script.py" sbatch "${options[@]}" --ntasks-per-node=1 \
    "$KIT/scripts/slurm/slurm_train.sh" - >>submitted
done
sbatch "${options[@]}" --ntasks=2 --wrap '"$KIT/scripts/run_ddp.sh" -n 2 -c - --script "my script.py"' >>submitted
END
  mkdir logs
  srun -Q -N1 -n2 --cpus-per-task=2 --mem-per-cpu=10 -m cyclic --gpus-per-task=1 bash submit.sh
  srun -Q -n1 sh -c 'sed "/#SBATCH --ntasks/d" "$0" >one_per_node.sh; MUSTER_KIT=$1 SCRIPT="my script.py" \
    sbatch --parsable --gres=none one_per_node.sh - >>submitted' "$KIT/scripts/slurm/slurm_train.sh" "$KIT"
  salloc -Q -n3 bash submit.sh
  sbatch -Q -W -o /dev/null --array=7 --gpus-per-task=1 -N1 -n1 --wrap 'bash submit.sh'
  mapfile -t JOBS <submitted
  [ "${#JOBS[@]}" -eq 10 ]
  for job in "${JOBS[@]}"; do
    wait_for_job_exit "$job"
    [ "$status" -eq 0 ] || { cat "logs/slurm-$job".{out,err} && false; }
    grep -qF "position 0 2 0 0" "logs/slurm-$job/node_$N1.log" "logs/slurm-$job/node_$N2.log"
    grep -qE "position 1 2 0 1" "logs/slurm-$job/node_$N2.log" "logs/slurm-$job/node_$N3.log"
    grep -qE "\"slurm_job\".*\"$job\"" "logs/slurm-$job/run.json" || { cat "logs/slurm-$job/run.json" && false; }
  done
}


@test "on nodes with different numbers of tasks, srun and torchrun set the same variables for each rank" {
  use_agent_without_torch
  local launcher
  write_position_script
  mkdir config
  echo "unset OMP_NUM_THREADS" >config/node_env.sh # set by the laboratory
  for launcher in srun torchrun; do
    rm -f positions/*
    LAUNCHER=$launcher SCRIPT="my script.py" submit --nodes=2 --ntasks=3 --gres=none slurm_train.sh -
    wait_for_job_exit "$JOB"
    [ "$status" -eq 0 ] || { cat logs/slurm-*.err && false; }
    positions_are "0 0 2 3 $N1" "1 1 2 3 $N1" "2 0 1 3 $N2"
    grep -hvE "(PIPE|ERROR)_FILE|LOG_LINE_PREFIX|SIGNALS_TO_HANDLE|USE_AGENT_STORE" variables.? >"variables of $launcher"
    [ "$(cat "logs/slurm-$JOB".{out,err} | grep -c "^OMP_NUM_THREADS=1 for each of 2 ranks on [12] core")" -eq 1 ]
  done
  diff variables\ of\ *
}


@test "one node: a copy of the batch script in another project works with MUSTER_KIT" {
  write_position_script
  cp "$KIT/scripts/slurm/slurm_train_single_node.sh" "my job.sh"
  mkdir logs
  JOB=$(MUSTER_KIT=$KIT LAUNCHER=torchrun SCRIPT="my script.py" sbatch --parsable "my job.sh" -)
  JOBS+=("$JOB")
  wait_for_job_exit "$JOB"
  [ "$status" -eq 0 ] || { cat logs/slurm-*.err && false; }
  positions_are "0 0 2 2 $N1" "1 1 2 2 $N1"
}


@test "standard error stays standard error, and a progress bar is shown while it is drawn, with srun and torchrun" {
  use_agent_without_torch
  local launcher
  cat >"my script.py" <<'END'
import os, sys, time
print("result", flush=True)
print("warning", file=sys.stderr, flush=True)
for step in range(1, 4):
    sys.stderr.write(f"\rstep {step}")
    sys.stderr.flush()
    while not os.path.exists(f"shown {step}"):
        time.sleep(0.05)
sys.stderr.write("\n")
END
  for launcher in srun torchrun; do
    rm -f shown*
    LAUNCHER=$launcher SCRIPT="my script.py" submit --nodes=2 --ntasks-per-node=1 --gres=none slurm_train.sh -
    for step in 1 2 3; do
      wait_for_line "logs/slurm-$JOB.err" "step $step"
      touch "shown $step"
    done
    wait_for_job_exit "$JOB"
    [ "$status" -eq 0 ] || { cat logs/slurm-*.err && false; }
    [ "$(<"logs/slurm-$JOB.out")" = result ]
    grep -qx warning "logs/slurm-$JOB.err"
    [ "$(grep -c "^step" "logs/slurm-$JOB.err")" -eq 3 ]
    [ "$(grep -c "step" "logs/slurm-$JOB/node_$N1.log")" -eq 1 ]
  done
}


@test "each array task has its own CONFIG, and %a is replaced by the index of the task" {
  mkdir results
  cat >"my script.py" <<'END'
import sys
open(f"results/{sys.argv[-1]}", "w").write(" ".join(sys.argv[1:]))
END
  touch a.yaml "b c.yaml"
  SCRIPT="my script.py" submit --array=4-5 --nodes=1 --ntasks-per-node=1 slurm_train.sh a.yaml "b c.yaml" -- seed=%a %a
  wait_for_job_exit "${JOB}_4"
  wait_for_job_exit "${JOB}_5"
  [ "$status" -eq 0 ]
  [ "$(<results/4)" = "--config a.yaml seed=4 4" ]
  [ "$(<results/5)" = "--config b c.yaml seed=5 5" ]
  run -0 "$KIT/scripts/status.sh" "${JOB}_4"
  [[ "$output" == *"verdict: ok"* ]]
}


@test "wrong arguments are refused with a remedy before anything starts" {
  endless_settings >tiny.yaml
  run -2 "$KIT/scripts/slurm/slurm_train.sh" tiny.yaml
  [[ "$output" == *"not in a SLURM job; use: sbatch $(printf %q "$KIT")/scripts/slurm/slurm_train.sh tiny.yaml"* ]]
  run -2 "$KIT/scripts/slurm/slurm_train.sh" a.yaml b.yaml
  [[ "$output" == *"2 CONFIGs require an array of 2 elements: sbatch --array=0-1"* ]]
  run -2 "$KIT/scripts/slurm/slurm_train.sh" --max-requeues often
  [[ "$output" == *"--max-requeues: expected a non-negative integer, got 'often'"* ]]
  run -2 "$KIT/scripts/slurm/slurm_train.sh" --nodes=4 tiny.yaml
  [[ "$output" == *"--nodes=4: put options of sbatch before the script: sbatch --nodes=4 ... slurm_train.sh"* ]]
  run -2 env MUSTER_KIT=/nope "$KIT/scripts/slurm/slurm_train.sh" tiny.yaml
  [[ "$output" == *"cannot find Muster; submit the script in its directory, or export MUSTER_KIT=<its directory>"* ]]
  run -2 "$KIT/scripts/slurm/slurm_train.sh" --detach tiny.yaml
  [[ "$output" == *"batch jobs are always detached; leave it out"* ]]
  run -2 salloc -Q -n2 env LAUNCHER=mpirun "$KIT/scripts/slurm/slurm_train.sh" tiny.yaml
  [[ "$output" == *"LAUNCHER: expected srun or torchrun, got 'mpirun'"* ]]
  run -2 salloc -Q -n2 env CONTAINER="apptainer exec 'half" "$KIT/scripts/slurm/slurm_train.sh" tiny.yaml
  [[ "$output" == *"unclosed quote; quote as in a shell"* ]]
  run -2 salloc -Q -N1 -n1 "$KIT/scripts/slurm/slurm_train.sh" tiny.yaml -- train.stepz=1
  [[ "$output" == *"train.stepz: unknown key; did you mean train.steps?"* ]]
  [ ! -e logs ]
}


@test "a refused batch job prints the reason to its .err file and exits with 2" {
  endless_settings >tiny.yaml
  submit --nodes=1 --ntasks-per-node=3 slurm_train.sh tiny.yaml
  wait_for_job_exit "$JOB"
  [ "$status" -eq 2 ]
  shows err "$N1: 3 processes, but 2 GPUs allocated"
  run -1 "$KIT/scripts/status.sh" "$JOB"
  [[ "$output" == *"job $JOB: ended before its run started (FAILED, exit code 2); see $WORK/logs/slurm-$JOB.err"* ]]
  submit --array=0-2 --nodes=1 slurm_train.sh tiny.yaml tiny.yaml
  wait_for_job_exit "${JOB}_2"
  [ "$status" -eq 2 ]
  grep -qF "array element 2: no CONFIG; the array starts at 0 and 2 CONFIGs are given" logs/slurm-*.err || { head -n 50 logs/slurm-*.err && false; }
}


@test "--dry-run prints the #SBATCH lines and the srun command, on a login node and in a job" {
  touch "my script.py"
  run -0 "$KIT/scripts/slurm/slurm_train.sh" --dry-run --script "my script.py" - -- 'x y'
  [[ "$output" == *"#SBATCH --ntasks-per-node=2 "*"srun "*"--nodes 2 --ntasks 4 "*"--cpus-per-task 2 "*"my\\ script.py x\\ y" ]]
  [ ! -e logs ]
  CONTAINER="--container-image=nvcr.io#nvidia/pytorch --container-mounts=/data" SRUN_ARGS="--cpu-bind=cores" \
    run -0 salloc -Q -N2 -n3 "$KIT/scripts/slurm/slurm_train.sh" --dry-run --script "my script.py" -
  [[ "$output" == *"--ntasks 3 "*"--container-image=nvcr.io#nvidia/pytorch --container-mounts=/data --cpu-bind=cores "*" python3 "* ]]
  [ ! -e logs ]
}


@test "ranks have the right positions in a container with another host name and without munge" {
  write_position_script
  CONTAINER="unshare --mount --uts sh -c 'mount -t tmpfs none /etc/munge && hostname inside && exec \"\$@\"' sh" \
    SCRIPT="my script.py" submit --ntasks-per-node=1 slurm_train.sh --python "$VIRTUAL_ENV/bin/python" -
  wait_for_job_exit "$JOB"
  [ "$status" -eq 0 ] || { cat logs/slurm-*.err && false; }
  positions_are "0 0 1 2 inside" "1 0 1 2 inside"
}


@test "ranks have the right positions if a hook of the container sets RANK and other variables in each SLURM task" {
  local hook='export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID MASTER_PORT=${MASTER_PORT-1}'
  write_position_script
  CONTAINER="sh -c '$hook MASTER_ADDR=\${MASTER_ADDR-\$0}; exec \"\$@\"' $N1" SCRIPT="my script.py" \
    submit --nodes=2 --ntasks=3 --gres=none slurm_train.sh --python "$VIRTUAL_ENV/bin/python" -
  wait_for_job_exit "$JOB"
  [ "$status" -eq 0 ] || { cat logs/slurm-*.err && false; }
  positions_are "0 0 2 3 $N1" "1 1 2 3 $N1" "2 0 1 3 $N2"
  grep -qx "GROUP_RANK 1" variables.2
}


@test "with a container, the host needs only Python" {
  local inside=$VIRTUAL_ENV/bin/python
  endless_settings | sed 's/100000/2/' >tiny.yaml
  python3 -m venv --without-pip bare
  VIRTUAL_ENV=$PWD/bare CONTAINER="unshare --mount" submit --nodes=1 --ntasks-per-node=1 slurm_train.sh \
    --python "$inside" tiny.yaml
  wait_for_job_exit "$JOB"
  [ "$status" -eq 0 ] || { cat logs/slurm-*.err && false; }
  shows out "step 2/2"
}


@test "status.sh shows a running job on all nodes; stop.sh stops it with a checkpoint and no requeue" {
  write_plain_trainer
  SCRIPT="my script.py" submit --ntasks-per-node=1 slurm_train.sh -
  wait_for_line "logs/slurm-$JOB.out" "step      3/100000"
  cd /
  run -0 "$KIT/scripts/status.sh" "$JOB"
  [[ "$output" == *": running for "*"$N1 "*" 0 "*"$N2 "*" 1 "* ]]
  run -0 "$KIT/scripts/stop.sh" --log-dir "$WORK/logs" "$JOB"
  [[ "$output" == *"job $JOB has ended"* ]]
  cd "$WORK"
  wait_for_job_exit "$JOB"
  [ "$status" -eq 75 ]
  [ -e "saved by 0" ] && [ -e "saved by 1" ]
  run ! grep requeue "logs/slurm-$JOB.err"
  SCRIPT="my script.py" submit --ntasks-per-node=1 slurm_train.sh - -- 0
  wait_for_line "logs/slurm-$JOB.out" "resuming from"
  "$KIT/scripts/stop.sh" "$JOB"
  wait_for_job_exit "$JOB"
  [ "$status" -eq 0 ]
  shows err "verdict: stopped: stopped on request; all ranks exited with 0"
  no_processes_within 10
}


@test "with each option and each variable of sbatch for memory, the job gets the requested memory and runs" {
  local requested expected options
  printf 'print("at work")\n' >"my script.py"
  while read -r requested expected; do
    options=(--nodes=1 --ntasks-per-node=1)
    [[ $requested != --* ]] || options+=("$requested")
    [[ $requested == --* ]] || export "${requested?}"
    submit "${options[@]}" slurm_train.sh --script "my script.py" -
    [[ $requested == --* ]] || unset "${requested%%=*}"
    wait_for_job_exit "$JOB"
    [ "$status" -eq 0 ] || { cat logs/slurm-*.err && false; }
    [[ "$(scontrol show job "$JOB")" == *"$expected"* ]] || { scontrol show job "$JOB" && false; }
  done <<'END'
--mem=90M MinMemoryNode=90M
--mem-per-cpu=90M MinMemoryCPU=90M
--mem-per-gpu=90M MemPerTres=gres:gpu:90
SBATCH_MEM_PER_NODE=90M MinMemoryNode=90M
SBATCH_MEM_PER_CPU=90M MinMemoryCPU=90M
SBATCH_MEM_PER_GPU=90M MemPerTres=gres:gpu:90
END
}


@test "variables that redirect or label the streams of srun have no effect on a job and its status" {
  write_plain_trainer
  export SLURM_LABELIO=1 SLURM_STDINMODE=none SLURM_STDOUTMODE=$WORK/taken SLURM_STDERRMODE=$WORK/taken
  export SRUN_INPUT=none SRUN_OUTPUT=none SRUN_ERROR=none SLURM_UNBUFFEREDIO=1 SLURM_EXPORT_ENV=NONE
  export SLURM_BCAST=$WORK/copy SLURM_REMOTE_CWD=/ SLURM_WORKING_DIR=/ SLURM_NO_KILL=1 SLURM_OPEN_MODE=a
  SCRIPT="my script.py" submit --ntasks-per-node=1 slurm_train.sh -
  wait_for_line "logs/slurm-$JOB.out" "step      3/100000" || { cat logs/slurm-*.err && false; }
  run -0 "$KIT/scripts/status.sh" "$JOB"
  [[ "$output" == *": running for "*"$N1 "*" 0 "*"$N2 "*" 1 "* ]] || { echo "$output" && false; }
  "$KIT/scripts/stop.sh" "$JOB"
  wait_for_job_exit "$JOB"
  [ "$status" -eq 75 ]
  [ ! -e taken ]
}


@test "GPU options of sbatch work with --gres=none" {
  local option
  printf 'print("at work")\n' >"my script.py"
  for option in --gpus=1 --gpus-per-node=1 --gpus-per-task=1; do
    submit "$option" --gres=none --nodes=1 --ntasks-per-node=1 slurm_train.sh --script "my script.py" -
    wait_for_job_exit "$JOB"
    [ "$status" -eq 0 ] || { cat logs/slurm-*.err && false; }
  done
}


@test "status.sh and stop.sh work on a pending job" {
  touch "my script.py"
  SCRIPT="my script.py" submit --begin=now+1hour slurm_train.sh -
  run -0 "$KIT/scripts/status.sh" "$JOB"
  [[ "$output" == *"job $JOB has not started a run; its state is PENDING (BeginTime)"* ]]
  run -0 "$KIT/scripts/stop.sh" "$JOB"
  [[ "$output" == *"job $JOB has ended"* ]]
  run -2 "$KIT/scripts/status.sh" 4711
  [[ "$output" == *"RUN '4711': no run of job 4711 in logs, and SLURM has no such job ("*"Invalid job id specified); for "* ]]
}


@test "two concurrent jobs on one node use different ports" {
  local first
  write_collective_script
  mkdir -p one/logs two/logs
  SCRIPT="$PWD/my script.py" submit --chdir="$WORK/one" --nodelist="$N1" --nodes=1 --gres=none slurm_train.sh -
  first=$JOB
  SCRIPT="$PWD/my script.py" submit --chdir="$WORK/two" --nodelist="$N1" --nodes=1 --gres=none slurm_train.sh -
  wait_for_job_exit "$first"
  [ "$status" -eq 0 ]
  wait_for_job_exit "$JOB"
  [ "$status" -eq 0 ]
  [[ "$(<one/1)" == "2 ranks at "* && "$(<two/1)" == "2 ranks at "* && "$(<one/1)" != "$(<two/1)" ]]
}


@test "the batch script trains in the shell of salloc, without requeue" {
  write_plain_trainer
  salloc -Q -N2 -n2 "$KIT/scripts/slurm/slurm_train.sh" --script "my script.py" - >out 2>&1 3>&- &
  salloc=$!
  wait_for_line out "step      3/100000"
  scancel --signal=USR2 "$(squeue --noheader --format=%i)"
  wait_for_exit "$salloc"
  [ "$status" -eq 75 ] || { tail out && false; }
  [ -e "saved by 0" ] && [ -e "saved by 1" ]
  run ! grep requeue out
}
