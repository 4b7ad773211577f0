#!/usr/bin/env bats
#
# Allocation and environment are translated to arguments of srun, or refused. The tests do not need SLURM: they set its
# variables, and --dry-run prints the command.

bats_require_minimum_version 1.5.0


setup() {
  KIT=$(readlink -f "$BATS_TEST_DIRNAME/..")
  TRAIN=$KIT/scripts/slurm/slurm_train.sh
  export VIRTUAL_ENV=${VIRTUAL_ENV:-$KIT/.venv}
  cd "$BATS_TEST_TMPDIR" || return
}


# Run a command with the variables of a batch job on two nodes, with eight cores and one task per node.
in_job() { # [NAME=VALUE...] <command...>
  run env SLURM_JOB_ID=7 SLURM_JOB_NODELIST='n[1-2]' SLURM_JOB_CPUS_PER_NODE='8(x2)' SLURM_TASKS_PER_NODE='1(x2)' \
    SLURM_NTASKS=2 "$@"
}


refuses() { # <expected text>
  [ "$status" -eq 2 ] || { echo "status $status: $output" && return 1; }
  [[ "$output" == *"$1"* ]] || { echo "$output" && return 1; }
  [ ! -e logs ]
}


@test "CONTAINER precedes Python, also with LAUNCHER=torchrun" {
  in_job CONTAINER="apptainer exec 'my image.sif'" LAUNCHER=torchrun "$TRAIN" --dry-run --python /opt/python -
  [ "$status" -eq 0 ]
  [[ "$output" == *" apptainer exec my\\ image.sif /opt/python "*" agent "*" /opt/python $(printf %q "$KIT")/scripts/lib/agent.py "* ]]
}


@test "each rank sees all GPUs of its node, also with --gpus-per-task, unless SLURM_GPU_BIND or SRUN_ARGS bind GPUs" {
  in_job SLURM_GPUS_PER_TASK=1 "$TRAIN" --dry-run -
  [[ "$output" == *" --gpus-per-task 1 --gpu-bind=none "* ]]
  in_job SLURM_NTASKS_PER_GPU=1 "$TRAIN" --dry-run -
  [[ "$output" == *" --gpu-bind=none "* ]]
  in_job SLURM_GPUS_PER_TASK=1 SRUN_ARGS=--gpu-bind=closest "$TRAIN" --dry-run -
  [[ "$output" == *" --gpu-bind=none "*"--gpu-bind=closest "* ]] # the last one counts
  in_job SLURM_GPUS_PER_TASK=1 SLURM_GPU_BIND=closest "$TRAIN" --dry-run -
  [[ "$output" == *" --gpus-per-task 1 "* && "$output" != *"--gpu-bind"* ]]
  in_job "$TRAIN" --dry-run -
  [[ "$output" != *"--gpu-bind"* ]]
}


@test "options of srun that would break the launch are refused, in every spelling, in SRUN_ARGS and in CONTAINER" {
  local options streams="the launcher needs the streams of srun; leave it out: the output of rank 0 is in"
  local layout="the launcher places the ranks on the nodes of the job; leave it out, and "
  for options in --output=x "--output x" --out=x -ox "-o x" -vox --error=none -e0 --input=none --in=all -i0 --label \
    --lab -l -vl -Ql --pty --unbuffered -u; do
    in_job SRUN_ARGS="--cpu-bind=cores $options" "$TRAIN" --dry-run -
    refuses "SRUN_ARGS: ${options%% *}: $streams"
  done
  for options in --nodes=1 -N1 "-n 4" --ntasks=4 --ntasks-per-node=1 -wn1 --nodelist=n1 "-x n1" -r1 --multi-prog \
    --het-group=0 --jobid=1 -Z -mcyclic "-m plane=2" --distribution=arbitrary "--dist cyclic:block"; do
    in_job SRUN_ARGS="$options" "$TRAIN" --dry-run -
    refuses "SRUN_ARGS: ${options%% *}: $layout"
  done
  for options in --export=NONE "--export A,B" --exp=A=1; do
    in_job SRUN_ARGS="$options" "$TRAIN" --dry-run -
    refuses "SRUN_ARGS: ${options%% *}: the ranks need the launcher's environment; leave it out, or use --export=ALL,"
  done
  for options in --bcast=/tmp/x -D/tmp --chdir=/tmp --test-only --help -h -V; do
    in_job SRUN_ARGS="$options" "$TRAIN" --dry-run -
    refuses "SRUN_ARGS: $options: with it, srun would not start the ranks"
  done
  in_job CONTAINER="--container-image=i --label" "$TRAIN" --dry-run -
  refuses "CONTAINER: --label: $streams"
  in_job SRUN_ARGS="hostname" "$TRAIN" --dry-run -
  refuses "SRUN_ARGS: expected options of srun, got 'hostname'"
  in_job SRUN_ARGS="-v -- hostname" "$TRAIN" --dry-run -
  refuses "SRUN_ARGS: --: the launcher names the command; leave it out"
  in_job SRUN_ARGS=--label "$KIT/scripts/run_ddp.sh" -n 2 -c - --dry-run
  refuses "SRUN_ARGS: --label: $streams"
}


@test "other options of srun are passed on" {
  options="-v -K0 -k -W5 -c2 -t5 -Jname -vJlabel -O -m block:cyclic --distribution=block --export=ALL,A=1 --export A=1,ALL"
  options+=" --quiet --open-mode=append --mem=0 --overlap --exclusive --mpi=none --gres=none --container-image=i -Q -X"
  in_job SRUN_ARGS="$options" "$TRAIN" --dry-run -
  [ "$status" -eq 0 ] || { echo "$output" && false; }
  [[ "$output" == *" $options "* ]] || { echo "$output" && false; }
}


@test "a CONTAINER of white space is ignored" {
  in_job CONTAINER=" " "$TRAIN" --dry-run -
  [ "$status" -eq 0 ]
  [[ "$output" == *"/node_env.sh python3 "* ]]
}


@test "config/node_env.sh is sourced before Python is chosen; when it fails, the exit code is 69" {
  mkdir -p config env/bin
  printf '#!/bin/sh\nexec %q "$@"\n' "$VIRTUAL_ENV/bin/python" >env/bin/python
  chmod +x env/bin/python
  echo "activate() { unset VIRTUAL_ENV; export CONDA_PREFIX=$PWD/env CONDA_DEFAULT_ENV=train; }; sleep 60 & activate" \
    >config/node_env.sh
  in_job "$TRAIN" --dry-run -
  [ "$status" -eq 0 ]
  [[ "$output" == *"Python: $PWD/env/bin/python (the active conda environment), not "* ]]
  [[ "$output" == *"/config/node_env.sh $PWD/env/bin/python "* ]]
  in_job "$KIT/scripts/run_ddp.sh" -n 2 -c - --dry-run
  [[ "$output" == *"/config/node_env.sh $PWD/env/bin/python "* ]]
  in_job SLURM_JOB_NUM_NODES=2 "$KIT/scripts/test_distributed.sh" --dry-run 1
  [[ "$output" == *"/config/node_env.sh $PWD/env/bin/python "* ]]
  echo "module load python" >config/node_env.sh
  in_job "$TRAIN" --dry-run -
  [ "$status" -eq 69 ]
  [[ "$output" == *"$PWD/config/node_env.sh: line 1: 'module load python' failed with exit code 127; fix it, or "* ]]
}


@test "MASTER_PORT of the environment is the default of --master-port, but is ignored if RANK is also set" {
  in_job MASTER_PORT=29999 "$TRAIN" --dry-run -
  [[ "$output" == "env MASTER_PORT=29999 srun "* ]]
  in_job MASTER_PORT=29999 "$TRAIN" --dry-run --master-port 28888 -
  [[ "$output" == "env MASTER_PORT=28888 srun "* ]]
  in_job RANK=0 MASTER_PORT=1 "$TRAIN" --dry-run -
  [[ "$output" == "env MASTER_PORT="*"free"* ]]
  in_job SLURM_JOB_NUM_NODES=2 MASTER_PORT=29999 "$KIT/scripts/test_distributed.sh" --dry-run 1
  [[ "$output" == "env MASTER_PORT=29999 srun "* ]]
  in_job MASTER_PORT=abc "$TRAIN" --dry-run -
  refuses "MASTER_PORT='abc' of the environment: expected a port from 1 to 65535; unset it, or give a port with --master-port"
}


@test "--rendezvous-timeout is passed to agents, and refused without agents" {
  in_job LAUNCHER=torchrun "$TRAIN" --dry-run --rendezvous-timeout 30 -
  [[ "$output" == *"/agent.py --rdzv-conf timeout=30 -- "* ]]
  in_job "$TRAIN" --dry-run --rendezvous-timeout 30 -
  refuses "--rendezvous-timeout: requires LAUNCHER=torchrun; "
  in_job LAUNCHER=torchrun "$TRAIN" --dry-run --rendezvous-timeout=0 -
  refuses "--rendezvous-timeout: expected a whole number of seconds, 1 or more, got '0'"
  run "$KIT/scripts/run_ddp.sh" --rendezvous-timeout 30 -n 1 -c -
  refuses "--rendezvous-timeout: there is only one node; leave it out"
}


@test "--spares N makes the last N nodes of the job spare nodes, and needs agents, restarts and a remaining node" {
  in_job LAUNCHER=torchrun "$TRAIN" --dry-run --max-restarts 1 --spares 1 -
  [[ "$output" == *" srun "*"--nodes 2 --no-kill --kill-on-bad-exit=0 --ntasks 2 "* ]]
  in_job "$TRAIN" --dry-run --max-restarts 1 --spares 1 -
  refuses "--spares and --min-nodes: require LAUNCHER=torchrun; a task of srun cannot be replaced"
  in_job LAUNCHER=torchrun "$TRAIN" --dry-run --max-restarts 1 --spares 2 -
  refuses "--spares 2: the job has only 2 nodes; one or more must remain"
  in_job LAUNCHER=torchrun "$TRAIN" --dry-run --max-restarts 1 --spares node2 -
  refuses "--spares: in a job, expected a number of nodes, got 'node2'"
  in_job LAUNCHER=torchrun "$TRAIN" --dry-run --max-restarts 1 --spares 1 --min-nodes 2 -
  refuses "--min-nodes 2: this run has fewer nodes (1)"
}


@test "--dry-run outside a job shows the script's own #SBATCH options, not SLURM variables" {
  SLURM_NTASKS=7 SLURM_CPUS_PER_TASK=9 run -0 "$TRAIN" --dry-run --script "$KIT/train.py" -
  [[ "$output" == *"--ntasks 4 "*"--cpus-per-task 2 "* ]]
}


@test "%a in CONFIG is the index of the array task" {
  touch run_4.yaml mine.py
  in_job SLURM_ARRAY_TASK_ID=4 SLURM_ARRAY_TASK_MIN=3 "$TRAIN" --dry-run --script mine.py run_%a.yaml
  [[ "$output" == *" mine.py --config run_4.yaml" ]]
}


@test "--detach and --lease are refused inside an allocation" {
  in_job "$KIT/scripts/run_ddp.sh" -n 2 --detach
  refuses "--detach: not possible in an allocation, which ends with this shell; use sbatch"
  in_job "$KIT/scripts/run_ddp.sh" -n 2 --lease 0
  refuses "--lease: not possible in an allocation, where SLURM ends the run"
}


@test "fewer processes than nodes are refused" {
  in_job "$KIT/scripts/run_ddp.sh" -n 1 --dry-run
  refuses "1 process for 2 allocated nodes; request at least 2, one per node"
}


@test "unused GPUs, too few cores and heterogeneous jobs give a warning" {
  in_job SLURM_GPUS_ON_NODE=4 "$TRAIN" --dry-run -
  [ "$status" -eq 0 ]
  [[ "$output" == *"warning: n1: 1 of 4 GPUs used; use all with --ntasks-per-node=4"* ]]
  in_job SLURM_JOB_CPUS_PER_NODE='1(x2)' SLURM_TASKS_PER_NODE='2(x2)' SLURM_NTASKS=4 "$TRAIN" --dry-run -
  [[ "$output" == *"warning: fewer CPU cores than processes allocated"*" --overcommit "* ]]
  in_job SLURM_HET_SIZE=2 "$TRAIN" --dry-run -
  [[ "$output" == *"warning: heterogeneous job with 2 components; only nodes of the first one are used"* ]]
}


@test "SLURM_JOB_ID without an allocation is refused" {
  run env SLURM_JOB_ID=7 "$KIT/scripts/run_ddp.sh" -n 2
  refuses "SLURM_JOB_NODELIST is not set: not in a SLURM allocation; run this in a batch script or in the shell of salloc"
}


@test "when srun cannot get a free port from the first node, node and srun's error are printed" {
  mkdir bin
  printf '#!/bin/sh\necho "srun: error: no" >&2\nexit 1\n' >bin/srun
  chmod +x bin/srun
  in_job PATH="$PWD/bin:$PATH" "$KIT/scripts/run_ddp.sh" -n 2
  [ "$status" -eq 1 ]
  [[ "$output" == *"srun: error: no"*"n1: cannot find a free port; see the messages of srun above, or give one with --master-port" ]]
  [ ! -e logs ]
}


@test "stop.sh waits until SLURM has ended the job, and prints its state" {
  mkdir bin
  printf '%s\n' '#!/bin/sh' '[ -e ended ] || echo COMPLETING None' >bin/squeue
  printf '%s\n' '#!/bin/sh' 'echo "$@" >>cancelled' >bin/scancel
  chmod +x bin/*
  PATH=$PWD/bin:$PATH "$KIT/scripts/stop.sh" 7 >out 2>&1 3>&- &
  until grep -q 'waiting for' out; do
    sleep 0.1
  done
  touch ended
  wait $!
  [[ "$(<out)" == "stop.sh: waiting for job 7 (COMPLETING) to end: "*" s, at most 120 s"$'\n'"job 7 has ended"* ]]
}


@test "a requeued job does not follow a link to its run that another user has made" {
  ((!EUID)) || skip "only root can give files to other users"
  local command=(bash -euo pipefail -c 'source "$0/scripts/lib/launcher.bash"; source "$0/scripts/lib/slurm_job.bash"
    REQUEUES=1 LOG_DIR=logs SLURM_JOB_ID=7; find_earlier_run; echo "${EXISTING_RUN[@]}"' "$KIT")
  mkdir -p logs/run
  ln -s run logs/slurm-7
  mkfifo logs/run/verdict.json
  run -0 timeout 20 "${command[@]}"
  [[ "$output" == *"--existing-run $PWD/logs/run" ]]
  rm logs/run/verdict.json
  echo '{"outcome": "ok"}' >logs/run/verdict.json
  chown -h 23456 logs/slurm-7
  run -69 "${command[@]}"
  [[ "$output" == *"logs/slurm-7: belongs to another user"* ]]
  chown -h 0 logs/slurm-7
  chown 23456 logs/run
  run -69 "${command[@]}"
}
