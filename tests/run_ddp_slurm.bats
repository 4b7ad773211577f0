#!/usr/bin/env bats
#
# scripts/run_ddp.sh in a SLURM allocation on the laboratory: srun starts the processes, SLURM assigns the ranks, and
# run directory, verdict and exit code are as with every launcher.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
# shellcheck source=tests/lab/nodes.bash
source "$BATS_TEST_DIRNAME/lab/nodes.bash"
# shellcheck source=tests/lab/secrets.bash
source "$BATS_TEST_DIRNAME/lab/secrets.bash"
# shellcheck source=tests/lab/hostile_environment.bash
source "$BATS_TEST_DIRNAME/lab/hostile_environment.bash"


setup_file() {
  start_lab 2 --slurm --gpus 2
}


teardown() {
  sweep_runs
}


in_allocation() { # <argument of run_ddp.sh...>
  run timeout 120 salloc -Q -N2 -n3 "$KIT/scripts/run_ddp.sh" "$@"
}


@test "muster run uses the allocation of its shell: as many ranks as tasks, or N on each node" {
  write_script <<'END'
print("ranks", dist.get_world_size(), sys.argv[1:])
END
  run -0 --separate-stderr timeout 120 salloc -Q -N2 -n3 "$KIT/scripts/muster" run "my script.py" -n 9
  [ "$output" = "ranks 3 ['-n', '9']" ]
  run -0 --separate-stderr timeout 120 salloc -Q -N2 -n2 "$KIT/scripts/muster" run -n 1 "my script.py"
  [ "$output" = "ranks 2 []" ]
}


# bats test_tags=quick
@test "the trainer runs on the allocation, and secrets of --env-file do not leak" {
  cat >tiny.yaml <<'END'
model: {n_layer: 1, n_head: 1, n_embd: 8, block_size: 16}
train: {steps: 2, batch_size: 3, evaluate_windows: 3}
logging: {every: 1, sample: 0}
END
  make_secret
  watch_command_lines
  in_allocation -n 3 -c tiny.yaml --env-file secrets.env --env SEEN=yes
  [ "$status" -eq 0 ]
  secret_did_not_leak
  [[ "$output" == *"ddp on 3 x cpu"*"step 2/2"*"finished"* ]]
  [ -s logs/latest/report.html ]
  grep -q '"nodes": 2' logs/latest/settings.json
}


@test "variables, options and functions that bash and Python obey reach the ranks, and do not change a launch" {
  write_hostile_environment
  for launcher in srun torchrun; do
    LAUNCHER=$launcher run -7 timeout 120 salloc -Q -N2 -n2 \
      bash with_hostile_environment "$KIT/scripts/run_ddp.sh" -n 2 -c - --script compare.py
    [[ "$output" == *"differs: []"* && "$output" == *"exited with code 7"* && "$output" != *replaced* ]]
  done
  [ "$(sort -u modules)" = "loaded torch" ]
}


@test "GPUs are counted per node, and a job runs on nodes with different numbers of GPUs" {
  : >none.py
  run -2 timeout 120 salloc -Q -N2 --gpus=3 bash -c '"$0" --dry-run -n 3 --script none.py; "$0" -n 4 --script none.py' \
    "$KIT/scripts/run_ddp.sh"
  [[ $output == *"srun "*"--ntasks 3 "*"$N2: 2 processes, but 1 GPU allocated; request one per process"* ]]
  run -0 timeout 120 salloc -Q -N2 -n3 --gpus=3 "$KIT/scripts/run_ddp.sh" -n 3 --script none.py
  [[ $output == *"verdict: ok"* ]]
}


@test "on a terminal, a progress bar of rank 0 stays on one line, and results can be redirected" {
  printf '%s\n' 'import sys' 'for i in range(5): sys.stderr.write(f"\r{i}0%")' 'sys.stderr.write("\n")' \
    'print("result")' >bar.py
  command script -qec "salloc -Q -N2 -n3 $(printf '%q ' "$KIT/scripts/run_ddp.sh" -n 3 --script bar.py) >results" \
    /dev/null </dev/null >out
  grep -qF $'\e[J\e[?7l10%\e[?7h\r\e[J' out
  grep -qF $'\e[J40%\r' out
  [ "$(<results)" = result ]
}


@test "the run directory has the metrics of a script, and usage samples of each node" {
  cat >own.py <<'END'
import os, sys, time
sys.path.insert(0, os.environ["MUSTER_CHECKOUT"])
from distributed import metrics
metrics.log(3, steps=9, loss=0.5)
samples = f"{os.environ['MUSTER_RUN_DIR']}/newest/node_{os.environ['MUSTER_NODE']}.samples.jsonl"
end = time.monotonic() + 60
while not os.path.exists(samples) and time.monotonic() < end:
    time.sleep(0.1)
END
  in_allocation --script own.py -n 3 -c - --env MUSTER_CHECKOUT="$KIT"
  [ "$status" -eq 0 ]
  grep -q '"step": 3,.*"steps": 9, "loss": 0.5}' logs/latest/metrics.jsonl
  [ "$(wc -l <logs/latest/metrics.jsonl)" -eq 1 ]
  [ "$(cat logs/latest/newest/node_*.samples.jsonl | grep -o '"[0-9]": {"cpu' | sort | uniq | tr -d '\n')" = '"0": {"cpu"1": {"cpu' ]
  [ "$(find logs/latest/ -name '*.samples.jsonl' | wc -l)" -eq 2 ]
}


@test "SIGTERM reaches the tasks, which write a checkpoint; exit code 75" {
  write_plain_trainer
  salloc -Q -N2 -n3 "$KIT/scripts/run_ddp.sh" -n 3 --script "my script.py" -c - >out 2>&1 3>&- &
  salloc=$!
  wait_for_line out "step      3/100000"
  kill -TERM "$(sed -n 's/^ *"pid": \([0-9]*\),/\1/p' logs/latest/run.json)"
  wait_for_exit "$salloc"
  [ "$status" -eq 75 ] || { tail -n 20 out && return 1; }
  [ -e "saved by 0" ] && [ -e "saved by 1" ] && [ -e "saved by 2" ]
}


@test "run_ddp.sh and test_distributed.sh refuse to start in a job step, and name the command for one node" {
  run timeout 60 srun -Q -n1 "$KIT/scripts/run_ddp.sh" -n 1 -c - --script /dev/null
  [ "$status" -eq 2 ]
  [[ "$output" == *"not through srun; for this node alone: scripts/ssh/launch_singlenode.sh CONFIG NPROC"* ]]
  run -2 timeout 60 srun -Q -n1 "$KIT/scripts/test_distributed.sh" 2
  [[ "$output" == *"for this node alone: env -u SLURM_JOB_ID scripts/test_distributed.sh 2"* ]]
}


@test "in a job step, launch_singlenode.sh uses the task's node, as does test_distributed.sh without SLURM_JOB_ID" {
  write_script <<'END'
total = torch.ones(1)
dist.all_reduce(total)
names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
if rank == 0:
    print(int(total), socket.gethostname(), *(os.environ[name] for name in names), flush=True)
dist.destroy_process_group()
END
  # Task 0 stands for a Jupyter session, or for a shell of srun --pty bash. The second task exists so that SLURM's
  # variables describe two tasks.
  run -0 timeout 200 srun -Q -N2 --ntasks-per-node=1 --cpus-per-task=2 env -u OMP_NUM_THREADS bash -c '
    [[ $SLURM_PROCID == 0 ]] || exit 0
    exec "$0"/scripts/ssh/launch_singlenode.sh --script "my script.py" - 2' "$KIT"
  [[ $output == *"2 $N1 2 2 1 127.0.0.1 1"*"verdict: ok"* ]] || { echo "$output" && false; }
  run -0 timeout 200 srun -Q -n1 env -u SLURM_JOB_ID "$KIT/scripts/test_distributed.sh" --max-bytes 1K --seconds 0.1 2
  [[ $output == *"verdict: ok"* ]] || { echo "$output" && false; }
}


@test "salloc inside a job step of another job trains on the new allocation" {
  cat >ranks.py <<'END'
import os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
print("position", *(os.environ[name] for name in names), flush=True)
END
  run -0 timeout 200 srun -Q -N1 -n2 --cpus-per-task=1 bash -c '
    [[ $SLURM_PROCID == 1 ]] || exit 0
    salloc -Q -N2 -n3 "$0/scripts/run_ddp.sh" -n 3 -c - --script ranks.py' "$KIT"
  [[ $output == *"position 0 3 0 0"*"verdict: ok"* ]] || { echo "$output" && false; }
  grep -qF "position 2 3 0 1" logs/latest/node_"$N2".log
}


@test "--dry-run prints the srun line and runs nothing" {
  in_allocation -n 3 -c - --script "$KIT/train.py" --dry-run --env 'A=1 2' -- 'x y'
  [ "$status" -eq 0 ]
  [[ "$output" == *"--ntasks 3 --distribution block --cpus-per-task"*"train.py x\\ y"* && "$output" == "env A=... "* && "$output" != *"1\\ 2"* ]]
  [ ! -e logs ]
}


@test "a missing srun is reported" {
  mkdir bin
  for tool in bash readlink dirname env find stat ls sort; do
    ln -s "$(type -P "$tool")" bin/
  done
  SLURM_JOB_ID=7 PATH=$PWD/bin run -2 "$KIT/scripts/run_ddp.sh" -n 1
  [[ "$output" == *"srun is not on the PATH; load SLURM's module, or call this on a node of the cluster"* ]]
}
