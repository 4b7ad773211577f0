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


setup_file() {
  start_lab 2 --slurm --gpus 2
}


teardown_file() {
  stop_lab
}


setup() {
  enter_workdir
}


teardown() {
  sweep_runs
}


in_allocation() { # <argument of run_ddp.sh...>
  run timeout 120 salloc -Q -N2 -n3 "$KIT/scripts/run_ddp.sh" "$@"
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


@test "GPUs are counted per node, and a job with different numbers runs" {
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
  grep -qF $'\e[K\e[?7l10%\e[?7h\r\e[K' out
  grep -qF $'\e[K40%\r' out
  [ "$(<results)" = result ]
}


@test "the run directory has the metrics of a script, and usage samples of each node" {
  cat >own.py <<'END'
import os, sys, time
sys.path.insert(0, os.environ["MUSTER_CHECKOUT"])
from distributed import metrics
metrics.log(3, steps=9, loss=0.5)
samples = f"{os.environ['MUSTER_RUN_DIR']}/node_{os.environ['MUSTER_NODE']}.samples.jsonl"
end = time.monotonic() + 60
while not os.path.exists(samples) and time.monotonic() < end:
    time.sleep(0.1)
END
  in_allocation --script own.py -n 3 -c - --env MUSTER_CHECKOUT="$KIT"
  [ "$status" -eq 0 ]
  grep -q '"step": 3,.*"steps": 9, "loss": 0.5}' logs/latest/metrics.jsonl
  [ "$(wc -l <logs/latest/metrics.jsonl)" -eq 1 ]
  [ "$(cat logs/latest/node_*.samples.jsonl | grep -o '"[0-9]": {"cpu' | sort | uniq | tr -d '\n')" = '"0": {"cpu"1": {"cpu' ]
  [ "$(find logs/latest/ -name '*.samples.jsonl' | wc -l)" -eq 2 ]
}


@test "SIGTERM reaches the tasks, which write a checkpoint; exit code 75" {
  cat >tiny.yaml <<'END'
model: {n_layer: 1, n_head: 1, n_embd: 8, block_size: 16}
train: {steps: 100000, batch_size: 3, evaluate_every: 0}
checkpoint: {dir: checkpoints, every: 0}
logging: {every: 1, sample: 0}
END
  salloc -Q -N2 -n3 "$KIT/scripts/run_ddp.sh" -n 3 -c tiny.yaml >out 2>&1 3>&- &
  salloc=$!
  wait_for_line out "step      3/100000"
  kill -TERM "$(pgrep -f -o "^bash $KIT/scripts/run_ddp.sh -n 3 -c tiny.yaml")"
  wait_for_exit "$salloc"
  [ "$status" -eq 75 ] || { tail -n 20 out && return 1; }
  ls -d checkpoints/step_*
}


@test "a call inside a job step is refused" {
  run timeout 60 srun -Q -n1 "$KIT/scripts/run_ddp.sh" -n 1 -c - --script /dev/null
  [ "$status" -eq 2 ]
  [[ "$output" == *"not through srun"* ]]
}


@test "--dry-run prints the srun line and runs nothing" {
  in_allocation -n 3 -c - --script "$KIT/train.py" --dry-run --env 'A=1 2' -- 'x y'
  [ "$status" -eq 0 ]
  [[ "$output" == *"--ntasks 3 --distribution block --cpus-per-task"*"train.py x\\ y"* && "$output" == "env A=... "* && "$output" != *"1\\ 2"* ]]
  [ ! -e logs ]
}


@test "a missing srun is reported" {
  mkdir bin
  for tool in bash readlink dirname env; do
    ln -s "$(type -P "$tool")" bin/
  done
  SLURM_JOB_ID=7 PATH=$PWD/bin run -2 "$KIT/scripts/run_ddp.sh" -n 1
  [[ "$output" == *"srun is not on the PATH; load SLURM's module, or call this on a node of the cluster"* ]]
}
