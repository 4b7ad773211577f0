#!/usr/bin/env bats
#
# scripts/ssh/launch_singlenode.sh, and run_ddp.sh on one machine: any script runs with unchanged arguments, the exit
# code is that of the rank that failed first, the verdict names this rank, no process remains after any process is
# killed, and wrong arguments start and write nothing.

bats_require_minimum_version 1.5.0
# shellcheck source=tests/lab/secrets.bash
source "$BATS_TEST_DIRNAME/lab/secrets.bash"
# shellcheck source=tests/lab/hanging_script.bash
source "$BATS_TEST_DIRNAME/lab/hanging_script.bash"
# shellcheck source=tests/lab/hostile_environment.bash
source "$BATS_TEST_DIRNAME/lab/hostile_environment.bash"
# shellcheck source=tests/lab/counting_script.bash
source "$BATS_TEST_DIRNAME/lab/counting_script.bash"
# shellcheck source=tests/lab/environments.bash
source "$BATS_TEST_DIRNAME/lab/environments.bash"
# shellcheck source=tests/lab/without_torch.bash
source "$BATS_TEST_DIRNAME/lab/without_torch.bash"


setup() {
  KIT=$(readlink -f "$BATS_TEST_DIRNAME/..")
  LAUNCH=$KIT/scripts/ssh/launch_singlenode.sh
  WRAPPER=() # a command that starts the launcher
  export VIRTUAL_ENV=${VIRTUAL_ENV:-$KIT/.venv}
  WORK="$BATS_TEST_TMPDIR/my 'work'"
  mkdir -p "$WORK"
  cd "$WORK" || return
}


teardown() {
  [[ ! ${BATS_TEST_COMPLETED-} || $(processes_left) != 0 ]] || return 0
  local log
  for log in "$WORK"/logs/*/; do
    [ -d "$log" ] || continue
    "$VIRTUAL_ENV/bin/python" -I -S "$KIT/scripts/lib/module.py" launch.supervisor sweep --dir "${log%/}" --name "$(uname -n)"
  done
}


pid_of() { # <supervisor, guard or command>: its process id in the newest run
  python3 -c 'import json, sys; print(json.load(open(sys.argv[2]))[sys.argv[1]]["pid"])' "$1" logs/latest/node_*.pid
}


# Write "my script.py": a user's script, which imports nothing of Muster.
write_script() { # <body on standard input>
  {
    cat <<'END'
import os, sys, time
rank = int(os.environ["RANK"])
END
    cat
  } >"my script.py"
}


# Start LAUNCH in the background in a separate process group, as an interactive shell does. Sets LAUNCHER.
start() { # <argument...>
  : >out
  set -m
  # GNU parallel, which runs the bats files, ignores SIGALRM.
  env --default-signal=ALRM "${WRAPPER[@]}" "$LAUNCH" "$@" >out 2>&1 3>&- &
  LAUNCHER=$!
  set +m
}


wait_for_line() { # <text>
  timeout 60 grep -qF -m1 -- "$1" <(tail -n +1 -F out 2>/dev/null)
}


wait_for_exit() {
  wait "$LAUNCHER" && status=0 || status=$?
}


processes_left() {
  grep -lsz -- "^MUSTER_RUN_DIR=$WORK" /proc/[0-9]*/environ 2>/dev/null | wc -l
}


@test "variables, options and functions that bash and Python obey reach the ranks, and do not change a launch" {
  write_hostile_environment
  run -7 timeout 120 bash with_hostile_environment "$LAUNCH" --script compare.py --max-restarts 1 - 1
  [[ "$output" == *"differs: []"* ]]
  [[ "$output" == *"restart 1 of 1"*"exited with code 7"* ]]
  [[ "$output" != *replaced* ]]
  [ "$(sort -u modules)" = "loaded torch" ]
}


@test "a user's script runs with unchanged arguments, and the console shows only rank 0" {
  arguments=("a b" "c'd\"e" '$HOME `x`; exit' $'new\nline' 'ünïcode' '' '${local_rank}')
  write_script <<'END'
open(f"arguments_{rank}", "w").write("".join(argument + "\0" for argument in sys.argv[1:]))
print(f"I am rank {rank}")
END
  arguments+=(--run --log -- --nproc-per-node 7 -m)
  run --separate-stderr "$LAUNCH" --script "my script.py" - 2 -- "${arguments[@]}"
  [ "$status" -eq 0 ]
  [ "$output" = "I am rank 0" ]
  printf '%s\0' "${arguments[@]}" | cmp - arguments_0
  printf '%s\0' "${arguments[@]}" | cmp - arguments_1
  # The run directory is complete.
  node=$(uname -n)
  [ -f logs/latest/run.json ] && [ -d logs/latest/errors ] && [ -f logs/latest/verdict.json ]
  [ "$(cat "logs/latest/node_$node.exit")" = 0 ]
  grep -qxF "[$node:0] I am rank 0" "logs/node_$node.log"
  grep -qxF "[$node:1] I am rank 1" "logs/node_$node.log"
  grep -q "2 processes" logs/latest/launcher.log
}


# bats test_tags=slow
@test "run_ddp.sh passes CONFIG and settings to Muster's train.py, and a report is written" {
  cat >tiny.yaml <<'END'
model: {n_layer: 1, n_head: 1, n_embd: 8, block_size: 16}
train: {steps: 3, batch_size: 4}
logging: {every: 1}
END
  run "$KIT/scripts/run_ddp.sh" -n 2 -c tiny.yaml -- train.steps=2
  [ "$status" -eq 0 ]
  [[ "$output" == *"step 2/2"* ]]
  # The report is written once, by the launcher.
  [[ "$(grep -c '^report ' <<<"$output")" == 1 && "$(tail -n 1 <<<"$output")" == "report "*/report.html ]]
  [ -s logs/latest/report.html ]
  [ "$(wc -l <logs/latest/metrics.jsonl)" -gt 2 ]
}


@test "a directory with a __main__.py runs as a script, and the run has its name" {
  use_agent_without_torch
  mkdir -p program
  echo 'import os, sys; print(__file__, sys.path[0], sys.argv)' >program/__main__.py
  run --separate-stderr "$LAUNCH" --script program/ - 1 -- one
  [ "$status" -eq 0 ]
  [ "$output" = "$PWD/program/__main__.py $PWD/program/ ['program/', 'one']" ]
  [[ "$(readlink logs/latest)" == *program-* ]]
}


# bats test_tags=slow
@test "run_ddp.sh outside a SLURM allocation runs the same command as launch_singlenode.sh" {
  printf 'train: {steps: 1, batch_size: 4}\n' >tiny.yaml
  run "$KIT/scripts/run_ddp.sh" -n 2 --dry-run -c tiny.yaml -l WARNING -- 'train.steps=3'
  [ "$status" -eq 0 ]
  [ "$output" = "$("$LAUNCH" --dry-run tiny.yaml 2 -- train.steps=3 --log-level warning)" ]
  run "$KIT/scripts/run_ddp.sh" -n 2 --dry-run --script "$KIT/train.py" -c - -- 'a b'
  [ "$status" -eq 0 ]
  [[ "$output" == *"train.py a\\ b"* ]]
  run -2 "$KIT/scripts/run_ddp.sh" -n 2 --dry-run --script tiny.yaml -c - -l info
  [[ "${lines[0]}" == "run_ddp.sh: -l 'info': only for Muster's train.py; pass arguments of your own script after --, such as -- --log-level info" ]]
}


# bats test_tags=slow
@test "a run goes on when its logs are emptied" {
  use_agent_without_torch
  cat >steps.py <<'END'
import os, time
for step in range(10**6):
    print("line", step, flush=True)
    time.sleep(0.01)
    if os.path.exists("go") and os.path.getsize("go"):
        print("the end", flush=True)
        break
END
  start --script steps.py - 2
  wait_for_line "line 20"
  eval "$(grep -h '^find -L logs/latest/ ' "$KIT/LAUNCH_GUIDE.md")"
  [ "$(stat -c %s logs/latest/node_*.log)" -lt 400 ]
  echo >go
  wait_for_exit
  [ "$status" -eq 0 ]
  grep -q "the end" out
  grep -q "the end" logs/latest/node_*.log
}


@test "--env, --env-file, -m and --agent torchrun work together, secrets do not leak, and one rank uses all cores" {
  local cores
  printf 'import os, sys\nprint(*(os.environ[name] for name in "A B OMP_NUM_THREADS".split()), sys.argv[1:])\n' >mod.py
  printf 'assert os.environ["SECRET"] == open("secret").read()\n' >>mod.py
  printf '# a comment\nB=from a file $x\n' >env.txt
  make_secret
  watch_command_lines
  cores=$(cd "$KIT" && "$VIRTUAL_ENV/bin/python" -c 'from distributed.host.resources import read_cores
print(max(1, int(read_cores().usable)))')
  unset OMP_NUM_THREADS
  run --separate-stderr "$LAUNCH" --agent torchrun --env 'A=1 2' --env-file env.txt --env SEEN=yes \
    --env-file secrets.env -m mod - 1 -- 'x y'
  [ "$status" -eq 0 ]
  [ "$output" = "1 2 from a file \$x $cores ['x y']" ]
  secret_did_not_leak
  [ "$(grep -c "^OMP_NUM_THREADS=$cores for each of 1 rank on $cores core" <<<"$stderr")" -eq 1 ]
}


# bats test_tags=slow
@test "the exit code is that of the rank that failed first, and the verdict names this rank" {
  write_script <<<'
import torch.distributed as dist
dist.init_process_group("gloo")
if rank == 1: raise ValueError("boom")
dist.barrier()'
  run "$LAUNCH" --script "my script.py" - 2
  [ "$status" -eq 1 ]
  [[ "$output" == *"rank 1 on $(uname -n) raised ValueError: boom"* ]]
  grep -q '"rank": 1' logs/latest/verdict.json
  write_script <<<'
import torch.distributed as dist
dist.init_process_group("gloo")
if rank == 1: os._exit(42)
dist.barrier()'
  run "$LAUNCH" --agent torchrun --script "my script.py" - 2
  [ "$status" -eq 42 ]
  [[ "$output" == *"rank 1 on"*"42"* ]]
}


# bats test_tags=slow
@test "a killed rank: the exit code is 137, the other ranks are stopped, and no process remains" {
  use_agent_without_torch
  write_script <<<'
if rank == 0: os.kill(os.getpid(), 9)
time.sleep(300)'
  run "$LAUNCH" --script "my script.py" - 2
  [ "$status" -eq 137 ]
  [[ "$output" == *"rank 0 on"*"SIGKILL"* ]]
  [ "$(processes_left)" -eq 0 ]
}


# bats test_tags=slow
@test "the launcher prints stdout of rank 0 to stdout, and stderr of rank 0 and its own messages to stderr" {
  use_agent_without_torch
  local code=0
  write_script <<'END'
print('{"loss": ', end="", flush=True)
time.sleep(0.5)
print(f'"{rank}"}}')
print(f"warning of rank {rank}", file=sys.stderr)
sys.stdout.buffer.write(b"\xff \0" + 100_000 * b"x" + b"\nno line break")
sys.stdout.flush()
if rank == 0:
    raise ValueError("no more data")
END
  "$LAUNCH" --script "my script.py" - 2 >out 2>err || code=$?
  [ "$code" -eq 1 ]
  printf '{"loss": "0"}\n\xff \0%s\nno line break\n' "$(printf 'x%.0s' {1..100000})" | cmp - out
  grep -qx "warning of rank 0" err
  run ! grep "of rank 1\|loss\|xxxx" err
  grep -q "^launch_singlenode.sh: run " err
  sed '/^verdict: failed/,$d' err | grep -qx "ValueError: no more data"
  [ "$(grep -ac "warning of rank" logs/latest/node_*.log)" -eq 2 ]

  printf '%s\n' 'import sys' 'print("result")' 'sys.exit("reason")' >two.py
  code=0
  "$LAUNCH" --agent torchrun --script two.py - 2 >out 2>err || code=$?
  [ "$code" -eq 1 ]
  [ "$(<out)" = result ]
  [ "$(grep -cx reason err)" -eq 1 ]
}


@test "if the last rank alone prints steps, the console shows them, and status has the last one" {
  use_agent_without_torch
  write_script <<'END'
for step in range(1, 10):
    if rank == 1 or sys.argv[1:]:
        print(f"rank {rank} iteration {step}/9 lm loss: {9 / step}")
    time.sleep(0.5)
END
  "$LAUNCH" --script "my script.py" - 2 >out 2>err
  [[ "$(head -n 1 out)" == "rank 1 iteration "[1-8]"/9 lm loss: "* ]] # those of the first two seconds are not shown
  [ "$(tail -n 1 out)" = "rank 1 iteration 9/9 lm loss: 1.0" ]
  [[ "$("$KIT/scripts/status.sh" latest)" == *", step 9 of 9, loss 1.0000 (from the output)"* ]]
  "$LAUNCH" --script "my script.py" - 2 -- all >out 2>err
  [ "$(grep -c '^rank 0' out) $(tail -n 1 out)" = "9 rank 0 iteration 9/9 lm loss: 1.0" ]
}


@test "--console-rank shows the output of another rank, or of the last one" {
  use_agent_without_torch
  echo 'import os; print("rank", os.environ["RANK"])' >rank.py
  for rank in 1 2 last; do
    "$LAUNCH" --console-rank "$rank" --script rank.py - 3 >out 2>err
    [ "$(<out)" = "rank ${rank/last/2}" ]
  done
  with_torch run -2 "$LAUNCH" --console-rank 3 --script rank.py - 3
  [ "$output" = "launch_singlenode.sh: --console-rank 3: the last rank is 2" ]
  run -2 "$LAUNCH" --console-rank -1 --script rank.py - 3
  [[ "$output" == *"--console-rank: expected the number of a rank, last or auto, got '-1'"* ]]
}


# bats test_tags=slow
@test "on a terminal, a progress bar of rank 0 stays on one line, and the log has its last state" {
  use_agent_without_torch
  printf '%s\n' 'import sys' 'for i in range(5): sys.stderr.write(f"\r{i}0%")' 'sys.stderr.write("\n")' >bar.py
  command script -qec "$(printf '%q ' "$LAUNCH" --script bar.py - 1)" /dev/null </dev/null >out
  grep -qF $'0%\e[?7h\r\e[J\e[?7l10%\e[?7h\r\e[J' out
  grep -qF $'\e[J40%\r' out
  run grep '%' logs/latest/node_*.log
  [ "$output" = "[$(uname -n):0] 40%" ]
  # If standard output goes to a file, the bar stays on the terminal.
  echo 'print("result")' >>bar.py
  command script -qec "$(printf '%q ' "$LAUNCH" --script bar.py - 1) >results" /dev/null </dev/null >out
  grep -qF $'\e[J40%\r' out
  [ "$(<results)" = result ]
}


# bats test_tags=slow
@test "on a terminal, rich draws the bars of rank 0 at its width; status has the step, and the log the last state" {
  use_agent_without_torch
  write_script <<'END'
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
rate = TextColumn("0:00:01 • 0:00:05 14.50it/s v_num: 0.000 train_loss: 2.5")
with Progress(TextColumn("{task.description}"), BarColumn(4), MofNCompleteColumn(), rate) as progress:
    bars = [progress.add_task(name, total=300) for name in ("Epoch 0/1", "Validation")]
    progress.console.print(f"rank {rank} has a [bold]bar[/]")
    for _ in range(300):
        for bar in bars:
            progress.update(bar, advance=1, refresh=True)
print(rank, os.environ.get("COLUMNS"), os.environ.get("TTY_INTERACTIVE"), os.environ.get("TTY_COMPATIBLE"))
END
  command script -qec "stty cols 90; $(printf '%q ' "$LAUNCH" --script "my script.py" --env TTY_INTERACTIVE=yes - 2)" \
    /dev/null </dev/null >out
  grep -qF $'\r\e[1A\r\e[J' out # the bars are drawn again
  run grep -cF 'rank 1' out
  [ "$output" = 0 ]
  run sed -E 's/\[[^]]*:/[/; s/\r$//' logs/latest/node_*.log
  [[ "$output" == *"[0] rank 0 has a bar"$'\n'*"[0] Epoch 0/1 "*" 300/300 "*$'\n'"[0] Validation "*"[0] 0 90 yes 1"* ]]
  [[ "$output" == *"[1] 1 None yes None"* ]]
  run grep -c . <<<"$output"
  ((output < 12))
  grep -q '"step": 300, ' logs/latest/metrics_from_output.jsonl
}


# bats test_tags=slow
@test "with torchrun's agent, the verdict after SIGTERM names the error of a rank whose process a thread kept alive" {
  write_script <<'END'
import threading
if rank == 1:
    threading.Thread(target=time.sleep, args=(1000,)).start()
    raise ValueError("boom")
time.sleep(1000)
END
  start --agent torchrun --script "my script.py" - 2
  timeout 60 sh -c 'until grep -qs "ValueError: boom" logs/latest/node_*.log; do sleep 0.1; done'
  kill -TERM "$LAUNCHER"
  wait_for_exit
  [ "$status" -eq 1 ]
  grep -F "verdict: failed: rank 1 on $(uname -n) raised ValueError: boom" out
}


# bats test_tags=slow
@test "the verdict names a rank that raised KeyboardInterrupt if the launcher received no Ctrl-C" {
  use_agent_without_torch
  echo 'import os, time; time.sleep(300 * (os.environ["RANK"] == "0")); raise KeyboardInterrupt' >"my script.py"
  run "$LAUNCH" --script "my script.py" - 2
  [ "$status" -eq 130 ]
  [[ "$output" == *"verdict: stopped: rank 1 on $(uname -n) raised KeyboardInterrupt; no rank had failed before"* ]]
}


@test "without handlers, Ctrl-C exits with 130, and SIGTERM exits with 143 even if SIGINT and SIGHUP are ignored" {
  use_agent_without_torch
  write_script <<<'print("at work", flush=True); time.sleep(300)'
  start --script "my script.py" - 2
  wait_for_line "at work"
  kill -INT -- "-$LAUNCHER" # to the foreground process group, as a terminal does
  wait_for_exit
  [ "$status" -eq 130 ]
  [ "$(processes_left)" -eq 0 ]
  WRAPPER=(nohup env --ignore-signal=INT) # as `nohup launch... &` in a script
  start --script "my script.py" - 2
  wait_for_line "at work"
  SECONDS=0
  kill -HUP "$LAUNCHER"
  kill -TERM "$LAUNCHER"
  wait_for_exit
  [ "$status" -eq 143 ]
  run ! ls logs/latest/errors/signal_launcher_SIGHUP.json # nohup has made the launcher ignore it
  ((SECONDS < 60)) # the script would run for 300 s
  [ "$(processes_left)" -eq 0 ]
}


# Write a script that handles SIGUSR1 and SIGTERM, and prints one line for each.
write_signal_script() {
  write_script <<'END'
import signal
signal.signal(signal.SIGUSR1, lambda *_: print("got USR1", flush=True))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("at work", flush=True)
while True:
    time.sleep(0.1)
END
}


# bats test_tags=slow
@test "a signal to the launcher, alone or with its group, or to the supervisor reaches the ranks' handlers once" {
  use_agent_without_torch
  local agent
  write_signal_script
  for agent in fast torchrun; do
    start --script "my script.py" --agent "$agent" - 1
    wait_for_line "at work"
    kill -USR1 "$LAUNCHER"
    wait_for_line "got USR1"
    kill -USR1 -- "-$LAUNCHER"
    timeout 60 bash -c 'until (($(grep -c "got USR1" out) == 2)); do sleep 0.1; done'
    kill -USR1 "$(pid_of supervisor)"
    timeout 60 bash -c 'until (($(grep -c "got USR1" out) == 3)); do sleep 0.1; done'
    kill -TERM "$LAUNCHER"
    wait_for_exit
    [[ $status == 75 || $agent == torchrun ]] # torchrun has its own exit code
    [ "$(grep -c "got USR1" out)" -eq 3 ] || { cat out && false; }
  done
}


@test "if no rank has a handler for a signal to the launcher or supervisor, the ranks stop with a checkpoint" {
  use_agent_without_torch
  local name
  write_signal_script
  for name in USR2 ALRM QUIT HUP XCPU ABRT RTMIN+3; do
    start --script "my script.py" --max-restarts 1 - 1
    wait_for_line "at work"
    kill -s "$name" -- "-$LAUNCHER"
    wait_for_exit
    [ "$status" -eq 75 ] || { cat out && false; }
    [[ "$(<logs/latest/verdict.json)" == *"stopped by SIG$name to the launcher, checkpoint written"* ]]
  done
  for name in USR2 QUIT; do
    start --script "my script.py" --max-restarts 1 - 1
    wait_for_line "at work"
    kill -s "$name" "$(pid_of supervisor)"
    wait_for_exit
    [ "$status" -eq 75 ] || { cat out && false; }
    [[ "$(<out)" == *"verdict: stopped: stopped by SIG$name to the supervisor on "* ]] || { cat out && false; }
  done
}


@test "a signal stops a rank without a handler even if its child has one; a child does not run a handler it inherited" {
  use_agent_without_torch
  local agent
  for agent in fast torchrun; do
    write_script <<'END'
import signal, subprocess
signal.signal(signal.SIGTERM, lambda *_: sys.exit("checkpoint"))
child = "import signal, time; signal.signal(signal.SIGUSR1, print); print('at work', flush=True); time.sleep(300)"
subprocess.run([sys.executable, "-c", child])
END
    start --script "my script.py" --agent "$agent" - 1
    wait_for_line "at work"
    kill -USR1 "$LAUNCHER"
    wait_for_exit
    [ "$status" -ne 0 ]
    grep -qx "checkpoint" out || { cat out && false; }
    write_script <<'END'
import signal
signal.signal(signal.SIGUSR1, lambda *_: print("got USR1", flush=True))
if os.fork():
    print("at work", flush=True)
for _ in range(3000):
    time.sleep(0.1)
END
    start --script "my script.py" --agent "$agent" - 1
    wait_for_line "at work"
    kill -USR1 "$LAUNCHER"
    wait_for_line "got USR1"
    kill -TERM "$LAUNCHER"
    wait_for_exit
    [ "$(grep -c "got USR1" out)" -eq 1 ] || { cat out && false; }
  done
}


@test "a rank that is killed because a signal stops the run is not restarted, and the verdict names the signal" {
  use_agent_without_torch
  echo 'import time; print("at work", flush=True); time.sleep(300)' >"my script.py"
  start --script "my script.py" --max-restarts 1 - 1
  wait_for_line "at work"
  kill -USR1 "$LAUNCHER"
  wait_for_exit
  [ "$status" -eq 143 ]
  [[ "$(<out)" == *"verdict: stopped: interrupted by SIGUSR1 to the launcher; no rank had failed"* ]]
}


@test "Ctrl-C exits with 75 after a checkpoint, the same command resumes, and a stop after the last step exits with 0" {
  cat >tiny.yaml <<'END'
model: {n_layer: 1, n_head: 1, n_embd: 8, block_size: 16}
train: {steps: 100000, batch_size: 4, evaluate_every: 0, evaluate_windows: 4}
checkpoint: {dir: "check points", every: 0}
logging: {every: 1, sample: 0}
END
  start tiny.yaml 2
  wait_for_line "step      3/100000"
  kill -INT -- "-$LAUNCHER"
  wait_for_exit
  [ "$status" -eq 75 ]
  grep -q "run the same command to resume" out
  [ "$(processes_left)" -eq 0 ]
  step=$(find "check points" -name 'step_*' -printf '%f' | sed 's/step_0*//')
  run "$LAUNCH" tiny.yaml 2 -- train.steps=$((step + 1))
  [ "$status" -eq 0 ]
  [[ "$output" == *"resuming from"*"step $((step + 1))/$((step + 1))"* ]]
  start tiny.yaml 2 -- train.steps=$((step + 2)) logging.sample=1000000
  wait_for_line "step $((step + 2))/$((step + 2))"
  "$KIT/scripts/stop.sh" latest
  wait_for_exit
  [ "$status" -eq 0 ] || { cat out && false; }
  grep -q "verdict: stopped: stopped on request; all ranks exited with 0" out
  rm -r logs
  refused "is of another model: model.n_embd=16 (checkpoint: 8)" tiny.yaml 2 -- model.n_embd=16
  refused "checkpoint.resume=never, but" tiny.yaml 2 -- checkpoint.resume=never
  refused "is unsharded, but this run uses sharded checkpoints" tiny.yaml 2 -- distributed.strategy=fsdp
}


# bats test_tags=slow
@test "SIGKILL of the launcher's process group, of its supervisor or of its agent leaves no process" {
  use_agent_without_torch
  write_script <<<'
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("at work", flush=True); time.sleep(300)'
  start --grace 1 --script "my script.py" - 2
  wait_for_line "at work"
  [ "$(processes_left)" -gt 2 ]
  kill -KILL -- "-$LAUNCHER" # as timeout does
  timeout 10 sh -c 'while grep -qsz -- "^MUSTER_RUN_DIR=$1" /proc/[0-9]*/environ; do sleep 0.1; done' sh "$WORK"
  [ "$(processes_left)" -eq 0 ]
  run -1 "$KIT/scripts/status.sh"
  [[ "$output" == *"verdict: failed: the launcher on $(uname -n) died of SIGKILL"* ]]
  start --script "my script.py" - 2
  wait_for_line "at work"
  kill -KILL "$(pid_of supervisor)"
  wait_for_exit
  [ "$status" -eq 137 ]
  grep -q "verdict: failed: the supervisor on $(uname -n) died of SIGKILL" out
  run ! grep -q "write a checkpoint" out
  [ "$(processes_left)" -eq 0 ]
  start --script "my script.py" - 2
  wait_for_line "at work"
  kill -KILL "$(pid_of command)"
  wait_for_exit
  [ "$status" -eq 137 ]
  [ "$(processes_left)" -eq 0 ]
}


# bats test_tags=slow
@test "if the console is closed or full, the run succeeds and its log is complete" {
  use_agent_without_torch
  write_script <<<'
for number in range(20000):
    print("line", number)'
  ("$LAUNCH" --max-restarts 3 --script "my script.py" - 2; echo "$?" >code) 2>&1 | head -n 1 >shown
  [ "$(<code)" -eq 0 ]
  [ -s shown ]
  [ "$(grep -c "line 19999" logs/latest/node_*.log)" -eq 2 ]
  [ ! -e logs/latest/attempts/2 ]
  "$LAUNCH" --max-restarts 3 --script "my script.py" - 2 >&- 2>/dev/full
  [ "$(grep -c "line 19999" logs/latest/node_*.log)" -eq 2 ]
  grep -q '"outcome": "ok"' logs/latest/verdict.json
  [ ! -e logs/latest/attempts/2 ]
}


# bats test_tags=slow
@test "--max-restarts restarts the run, and keeps the files of the failed attempt" {
  use_agent_without_torch
  write_script <<<'
if rank == 0: print("{\"step\": 5, \"steps\": 9}", file=open(os.environ["MUSTER_METRICS"], "a"))
if not os.path.exists("failed"):
    if rank == 0: open("failed", "w")
    sys.exit(3)
print("second attempt")'
  run "$LAUNCH" --max-restarts 2 --script "my script.py" - 1
  [ "$status" -eq 0 ]
  [[ "$output" == *"restart 1 of 2"*"second attempt"* ]]
  grep -q '"exit_code": 3' logs/latest/attempts/1/verdict.json
  [ -s logs/latest/report.html ]
  run "${LAUNCH%/ssh/*}/status.sh"
  [[ "$output" == *"step 5 of 9"* ]]
}


# bats test_tags=slow
@test "ranks see the number of restarts, their maximum and one run id, with either agent, with and without a port" {
  use_agent_without_torch
  local options
  write_counting_script
  for options in "" "--master-port $((20000 + RANDOM % 9000)) --agent torchrun"; do
    # shellcheck disable=SC2086 # several options
    "$LAUNCH" $options --max-restarts 4 --script "my script.py" - 2 -- 2 2 3>&-
    all_ranks_saw 2 "0 4" "1 4" "2 4"
  done
  "$LAUNCH" --script "my script.py" - 2 -- 0 2 3>&-
  all_ranks_saw 2 "0 0"
}


# bats test_tags=slow
@test "a rank that exits with 255 is not reported as a lost connection" {
  use_agent_without_torch
  write_script <<<'sys.exit(255)'
  run "$LAUNCH" --script "my script.py" - 1
  [ "$status" -eq 255 ]
  [[ "$output" == *"verdict: failed: rank 0 on "*" exited with code 255"* && "$output" != *"connection"* ]]
}


# bats test_tags=slow
@test "--max-restarts gives up when three restarts have made no progress" {
  use_agent_without_torch
  write_script <<<'
run = os.environ["MUSTER_RUN_DIR"]
earlier = len(os.listdir(run + "/attempts")) - 1
print("{\"step\": %d}" % min(5 + earlier, 6), file=open(run + "/metrics.jsonl", "a"))
sys.exit(3)'
  run "$LAUNCH" --max-restarts 9 --script "my script.py" - 1
  [ "$status" -eq 3 ]
  [[ "$output" == *"exit code 3: no progress past step 6 in 3 restarts; giving up"* ]]
  [ -e logs/latest/attempts/5 ] && [ ! -e logs/latest/attempts/6 ]
}


# bats test_tags=slow
@test "--max-restarts measures progress with the steps that a script prints, if it logs none" {
  use_agent_without_torch
  write_script <<<'
earlier = len(os.listdir(os.environ["MUSTER_RUN_DIR"] + "/attempts")) - 1
print(f"iter {10 * (earlier // 2)}: loss {2 - earlier / 10}")
sys.exit(3)'
  run "$LAUNCH" --max-restarts 4 --script "my script.py" - 1
  [ "$status" -eq 3 ] && [ -e logs/latest/attempts/5 ]
  [[ "$output" != *"giving up"* ]]
  [ "$(grep -c '"step": 10' logs/latest/metrics_from_output.jsonl)" -eq 2 ]
  "$KIT/scripts/status.sh" >shown || true
  grep "step 20, loss 1.6000 (from the output)" shown
  run "$LAUNCH" --progress off --max-restarts 4 --script "my script.py" - 1
  [[ "$output" == *"exit code 3: no progress in 3 restarts; giving up"* ]]
}


# Set WITHOUT_PY_SPY to a command prefix under which py-spy is not found.
hide_py_spy() {
  mkdir -p venv/bin
  cp "$VIRTUAL_ENV/pyvenv.cfg" venv
  ln -s "$VIRTUAL_ENV/lib" venv/lib
  ln -s "$VIRTUAL_ENV/bin/python" venv/bin/python
  WITHOUT_PY_SPY=(env PATH=/usr/bin:/bin VIRTUAL_ENV="$WORK/venv")
}


# bats test_tags=slow
@test "a rank is in an endless loop: status.sh names the rank and its line without py-spy" {
  local line file
  write_hanging_script
  hide_py_spy
  line=$(grep -n "while True" "my script.py" | cut -d: -f1)
  WRAPPER=("${WITHOUT_PY_SPY[@]}")
  start --script "my script.py" - 2
  timeout 60 sh -c 'until [ "$(cat logs/latest/node_*.log 2>/dev/null | grep -c "at work")" -eq 2 ]; do sleep 0.1; done'
  "${WITHOUT_PY_SPY[@]}" "$KIT/scripts/status.sh" --stacks >stacks
  grep -A 3 "^rank 1 on " stacks | grep -F "main (my 'work'/my script.py:$line)"
  grep -A 3 "^rank 0 on " stacks | grep -F "all_reduce (distributed/distributed_c10d.py:"
  for file in logs/latest/ranks/*/*/attempt_0/*/std*.log; do
    touch -d "-200 seconds" "$file"
  done
  COLUMNS=1000 run -1 "${WITHOUT_PY_SPY[@]}" "$KIT/scripts/status.sh"
  [[ "$output" == *"looks hung: no output for "*" s; rank 1 on $(uname -n) is not in a collective"* ]]
  [[ "$output" == *"the other waits for it; it is at my script.py:$line in main()"* ]]
  kill -TERM "$LAUNCHER"
  wait_for_exit
}


# bats test_tags=slow
@test "--hang-timeout ends a hung run with 124 and names the rank, and --max-restarts restarts it" {
  write_hanging_script
  hide_py_spy
  run timeout 120 "${WITHOUT_PY_SPY[@]}" "$LAUNCH" --hang-timeout 3 --max-restarts 1 --script "my script.py" - 2
  [ "$status" -eq 124 ]
  [[ "$output" == *"the run hangs; stopping it"*"exit code 124: restart 1 of 1"*"the run hangs; stopping it"* ]]
  [[ "$output" == *"verdict: failed: hung: no output for "*" s (--hang-timeout 3); rank 1 on "*" is not in a collective"*", in main"* ]]
  grep -q '"exit_code": 124' logs/latest/attempts/1/verdict.json
  [ -e logs/latest/attempts/1/hang.json ] && [ -e logs/latest/newest/hang.json ]
}


# bats test_tags=slow
@test "PyTorch's flight recorder names the rank that has not called a collective, with both agents" {
  # With NCCL, a thread of PyTorch does what reply() does, with the same kind of record.
  cat >"my script.py" <<'END'
import os, threading, time

at_work = threading.Event()


def show_progress():  # until the ranks are at work: a slow start is not a hang
    while not at_work.wait(0.3):
        print(".", flush=True)


threading.Thread(target=show_progress, daemon=True).start()
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

rank = os.environ["RANK"]
pipe = f"{os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}{rank}.pipe"


def reply():
    while True:
        with open(pipe, "rb") as requests:
            requests.read(1)
        with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank, "wb") as file:
            file.write(_dump_fr_trace(True, False, False))


os.mkfifo(pipe)
threading.Thread(target=reply, daemon=True).start()
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
at_work.set()
if rank == "0":
    dist.broadcast(torch.ones(1), 1)
time.sleep(1000)
END
  for agent in fast torchrun; do
    COLUMNS=1000 run timeout 120 "$LAUNCH" --agent "$agent" --hang-timeout 3 --script "my script.py" - 2
    [ "$status" -eq 124 ]
    echo "$output"
    [[ "$output" == *"; rank 1 has not called broadcast, collective 2 of the group default_pg; rank 0 waits in it (PyTorch's flight recorder)"* ]]
    [ "$(echo logs/latest/ranks/*/collectives_[01])" != "logs/latest/ranks/*/collectives_[01]" ]
  done
}


# bats test_tags=slow
@test "a run that looks hung is reported on the console and in launcher.log, even if it logs no steps" {
  use_agent_without_torch
  cat >"my script.py" <<'END'
import os, time
if os.environ["RANK"] == "1":
    print("at work", flush=True)
    time.sleep(1000)
END
  start --quiet --script "my script.py" - 2
  timeout 120 grep -qm1 "looks hung" <(tail -n +1 -F out)
  touch logs/latest/ranks/*/*/attempt_0/1/stdout.log logs/latest/node_*.log
  timeout 180 grep -qm1 "no longer looks hung" <(tail -n +1 -F out)
  kill -TERM "$LAUNCHER"
  wait_for_exit
  cat out
  [ "$(grep -c "looks hung" out)" -eq 2 ]
  grep -E "^launch_singlenode.sh: the run looks hung: no output for [0-9]+ s; no rank used CPU in [0-9.]+ s; rank 1 on .* is at my script.py:4; rank 0 on .* ended with exit code 0; it is not stopped automatically$" out
  [ "$(grep -c "looks hung" logs/latest/launcher.log)" -eq 2 ]
  [ ! -e logs/latest/.hang_notice ]
}


# bats test_tags=slow
@test "two concurrent launches do not connect to each other" {
  write_script <<<$'import torch.distributed as dist\ndist.init_process_group("gloo"); dist.barrier(); print("connected")'
  start --script "my script.py" - 2
  run "$LAUNCH" --script "my script.py" - 2
  [ "$status" -eq 0 ]
  wait_for_exit
  [ "$status" -eq 0 ]
  [ "$(find logs -maxdepth 1 -name 'my-script-*' | wc -l)" -eq 2 ]
}


# bats test_tags=slow
@test "--detach returns at once, and the run continues" {
  use_agent_without_torch
  write_script <<<'print("at work", flush=True); time.sleep(1); open("done", "w")'
  TMPDIR=/nowhere run "$LAUNCH" --detach --script "my script.py" - 1
  [ "$status" -eq 0 ]
  [[ "$output" == *"run my-script-"*" started in the background, process "*"/my-script-"*"/console.log"* ]]
  [[ "$output" == *"/scripts/attach.sh my-script-"*"/scripts/status.sh my-script-"*"/scripts/stop.sh my-script-"* ]]
  timeout 60 sh -c 'until [ -e done ]; do sleep 0.1; done'
  launcher=${output##*process } launcher=${launcher%%:*}
  timeout 30 tail -f --pid="$launcher" /dev/null
  [ "$(processes_left)" -eq 0 ]
}


@test "--dry-run prints the command, and writes nothing" {
  write_script <<<''
  run --separate-stderr "$LAUNCH" --dry-run --env 'A=1 2' --script "my script.py" - 4 -- 'a b'
  [ "$status" -eq 0 ]
  [[ "$output" == *"--nproc-per-node 4"*'my\ script.py a\ b' ]]
  [[ "$output" == *": env A=... "* && "$output" != *"1\ 2"* ]]
  [ ! -e logs ]
}


# ---------------------------------------------------------------- wrong arguments


refused() { # <expected text> <argument...>
  run "$LAUNCH" "${@:2}"
  [ "$status" -eq 2 ] || { echo "status $status of: ${*:2}" && return 1; }
  [[ "$output" == *"$1"* ]] || { echo "$output" && return 1; }
  [ ! -e logs ]
}


@test "in a working directory that was removed, or removed and created again, nothing starts" {
  mkdir gone && cd gone && rmdir ../gone
  refused "the working directory '$WORK/gone' was removed; change to one that exists" - 1
  run -2 "$KIT/scripts/status.sh"
  [[ "$output" == *"status.sh: the working directory '$WORK/gone' was removed"* && ! -e $WORK/gone ]]
  mkdir ../gone
  refused "was removed" - 1
}


@test "wrong arguments are refused with 2 and named, and nothing is written" {
  write_script <<<''
  printf 'train: {steps: 1, batch_size: 3}\n' >odd.yaml
  printf 'train: {stepz: 1, batch_size: 4}\n' >typo.yaml
  printf 'train: {steps: [1\n' >broken.yaml
  printf 'train: {steps: 1, batch_size: 4}\n' >right.yaml
  printf 'A=1\nB=2\r\n' >windows.env
  printf 'A=1\nexport KEY=k3pt\n' >shell.env
  printf 'MUSTER_NODE_ENV_KEY=k3pt\n' >internal.env
  printf 'A=\0x\n' >nul.env
  head -c 1000001 /dev/zero | tr '\0' '#' >large.env
  echo 'x y' >broken.py
  : >empty.txt
  refused "expected CONFIG and NPROC"
  refused "CONFIG 'my script.py': not a settings file; to run this script, give --script my\\ script.py, and - as CONFIG" "my script.py" 2
  refused "CONFIG 'train.py': not a settings file; to run this script" train.py
  refused "CONFIG 'nix.py': no such file" --script "my script.py" nix.py 2
  refused "'nix.yaml'" nix.yaml 2
  refused "did you mean train.steps" typo.yaml 2
  refused "broken.yaml, line" broken.yaml 2
  printf 'model: {name: resnet}\nlr: 1\n' >own.yaml
  refused "did you mean train.learning_rate?" own.yaml 2
  refused "own.yaml: contains no setting of Muster's train.py; to run another script, add --script" own.yaml 2
  refused "unknown key; did you mean train.steps?" typo.yaml 2
  [[ "$output" != *"--script"* ]]
  refused "--epochs: unknown option; arguments of your script go after --" --epochs 3 right.yaml 2
  refused "--hang-timout=60: unknown option; arguments of your script go after --; did you mean --hang-timeout?" \
    --hang-timout=60 right.yaml 2
  refused "train.batch_size=3 is not divisible by 2" odd.yaml 2
  refused "data.path='empty.txt': the file is empty" right.yaml 2 -- data.path=empty.txt
  refused "unrecognized arguments: --quiet" right.yaml 2 -- --quiet
  refused "NPROC: expected a number of processes from 1 to 1024, auto, gpu or cpu, got '0'" odd.yaml 0
  refused "NPROC: expected a number of processes from 1 to 1024, auto, gpu or cpu, got 'two'" odd.yaml two
  refused "NPROC: expected a number of processes from 1 to 1024, auto, gpu or cpu, got '1025'" --script "my script.py" - 1025
  refused "NPROC: expected a number of processes from 1 to 1024, auto, gpu or cpu, got '-1'" --script "my script.py" - -1
  refused "got: nothing"
  refused "contains a NUL byte" --env-file nul.env - 2
  refused "'nix.py'" --script nix.py - 2
  refused "'nix.py'" --script=nix.py - 2
  refused "not a Python script (it begins with #!/usr/bin/env bash); ranks run Python: start" --script "$LAUNCH" - 2
  refused "line 1: invalid syntax; correct it" --script broken.py - 2
  refused "'.': not a readable file" . 2
  refused "'.': a directory without a __main__.py" --script . - 2
  refused "-m 'nix.trainer': " -m nix.trainer - 2
  refused "-m 'os.json': " -m os.json - 2
  refused "-m '__main__': " -m __main__ - 2
  refused "--bad" --bad - 2
  refused "--hostfile: unknown option" --hostfile hosts --script "my script.py" - 2
  refused "--agent: expected fast or torchrun, got 'slow'" --agent slow - 2
  refused "--master-port: expected a port from 1 to 65535, got '99999'" --master-port 99999 - 2
  refused "--env: expected NAME=VALUE, got 'NOVALUE'" --env NOVALUE - 2
  refused "--env-file 'nix'" --env-file nix - 2
  refused "larger than 1 MB" --env-file large.env - 2
  refused "line 2: ends with a carriage return" --env-file windows.env - 2
  refused "--env-file 'shell.env', line 2: expected NAME=VALUE; the line may be a secret, so it is not shown" \
    --env-file shell.env - 2
  refused "--env-file 'internal.env', line 1 'MUSTER_NODE_ENV_KEY': bash cannot set this variable; choose another name" \
    --env-file internal.env - 2
  [[ $output != *k3pt* ]]
  refused "--max-restarts: expected a non-negative integer, got 'x'" --max-restarts x - 2
  refused "--grace: expected a whole number of seconds, got '-1'" --grace=-1 - 2
  MUSTER_GRACE=9 refused "MUSTER_GRACE: replaced by the option --grace SECONDS; unset the variable" - 2
  refused "--hang-timeout: expected a whole number of seconds (0 = off), got '1.5'" --hang-timeout=1.5 - 2
  refused "--progress '(': not a regular expression of Python: missing )" --progress "(" - 2
  refused "--progress '(?P<stop>.)': unknown group 'stop'" --progress "(?P<stop>.)" - 2
  refused "'/nix/python'" --python /nix/python - 2
  refused "has no PyTorch" --python /usr/bin/python3 --script "my script.py" - 2
  refused "give one of the two" --script "my script.py" -m os - 2
  refused "--log-dir 'empty.txt/logs': cannot be written (in $WORK); choose another directory" \
    --detach --log-dir empty.txt/logs right.yaml 2
}


@test "a tracker without its package and an unusable checkpoint directory are refused before the start" {
  make_environment_without wandb tensorboard
  printf 'train: {steps: 2, batch_size: 4}\n' >tiny.yaml
  VIRTUAL_ENV=$PWD/venv refused "logging.wandb=offline, but the package wandb is not installed: python -m pip install" \
    tiny.yaml 2 -- logging.wandb=offline
  VIRTUAL_ENV=$PWD/venv refused "logging.tensorboard=true, but the package tensorboard is not installed" \
    tiny.yaml 2 -- logging.tensorboard=true
  run -0 "$LAUNCH" --dry-run tiny.yaml 2 -- logging.wandb=offline checkpoint.dir=new/er
  refused "tiny.yaml/new: cannot list the checkpoints: Not a directory" tiny.yaml 2 -- checkpoint.dir=tiny.yaml/new
  [ "$(id -u)" -eq 0 ] || skip "mounting a file system needs root"
  mkdir fixed
  # shellcheck disable=SC2016 # the inner shell expands it
  run -2 unshare --mount sh -c 'mount -t tmpfs -o ro none fixed && exec "$@"' sh "$LAUNCH" tiny.yaml 2 -- checkpoint.dir=fixed/new
  [[ "$output" == *"/fixed/new\": cannot write checkpoints there: $PWD/fixed is not writable"* ]]
}


@test "an option that is known from torchrun, srun or train.py is refused with the way to give it here" {
  # shellcheck disable=SC2034 # named in the table
  local name arguments remedy ddp=$KIT/scripts/run_ddp.sh by_hand=$KIT/scripts/ssh/launch_torchrun_multinode.sh
  local local_usage="launch_singlenode.sh [options] CONFIG NPROC [-- ARGUMENT...]"
  while IFS='|' read -r name arguments remedy; do
    # shellcheck disable=SC2086 # a list of arguments
    run --separate-stderr "${!name}" $arguments
    [ "$status" -eq 2 ]
    echo "${stderr_lines[0]}"
    [ "${stderr_lines[0]}" = "$(basename "${!name}"): $remedy" ]
  done <<END
ddp|-n 2 --log-level DEBUG|--log-level: unknown option; use -l
ddp|-n 2 --log_level=debug|--log_level=debug: unknown option; use -l
ddp|--nproc 2|--nproc: unknown option; use -n
ddp|--nproc_per_node=2|--nproc_per_node=2: unknown option; use -n
ddp|--ntasks 2|--ntasks: unknown option; use -n
ddp|-n2|-n2: unknown option; write -n 2
ddp|-n 2 --config x.yaml|--config: unknown option; use -c
ddp|-n 2 -N 2|-N: unknown option; arguments of your script go after --
LAUNCH|--nproc-per-node 2 x.py|--nproc-per-node: unknown option; give NPROC without an option: $local_usage
LAUNCH|-np 2 x.py|-np: unknown option; give NPROC without an option: $local_usage
LAUNCH|--config x.yaml 2|--config: unknown option; give CONFIG without an option: $local_usage
LAUNCH|--module x|--module: unknown option; use -m
LAUNCH|--log-level debug|--log-level: unknown option; arguments of train.py and of your script go after --
LAUNCH|--epochs 3|--epochs: unknown option; arguments of your script go after --
END
  run -2 "$by_hand" --nnodes=2
  [[ "$output" == *"; give NNODES without an option: launch_torchrun_multinode.sh [options] CONFIG NPROC NNODES "* ]]
  run -2 "$by_hand" --master_addr n1
  [[ "$output" == *"--master_addr: unknown option; give MASTER_ADDR without an option: "* ]]
  run -2 "$KIT/scripts/ssh/launch_torchrun_auto.sh" -H n1,n2
  [[ "$output" == *"-H: unknown option; give NODE without an option: launch_torchrun_auto.sh "*" NODE... "* ]]
}


@test "more than 4 processes per core are accepted, with a warning" {
  use_agent_without_torch
  write_script <<<''
  # OpenMP's variables do not change the number of cores, although nproc obeys them.
  OMP_NUM_THREADS=64 run --separate-stderr taskset --cpu-list 0 "$LAUNCH" --script="my script.py" - 5
  [ "$status" -eq 0 ]
  [[ "$stderr" == *"warning: NPROC 5: more than 4 per CPU core (this machine has 1)"* ]]
}


# bats test_tags=slow
@test "the launcher starts no more than four Python programs, and passes its environment on unchanged" {
  write_script <<<'import os; assert [os.environ[name] for name in "LOG_DIR AGENT node checks".split()] == list("abcd")'
  cat >python <<END
#!/bin/sh
{ printf '%s|' "\$@"; echo; } >>"$PWD/calls"
exec "$VIRTUAL_ENV/bin/python" "\$@"
END
  chmod +x python
  LOG_DIR=a AGENT=b node=c checks=d run -0 "$LAUNCH" --python ./python --script "my script.py" - 1
  # Ignore the call of host.identity: Muster asks a Python that is not its own, such as this stub, for its versions.
  [ "$(sed -E '/host\.identity/d; s/^(-[^|]*\|)*[^|]*\/([a-z_]+)\.py\|([^|]*)\|.*/\2 \3/' calls)" = "check_call --script=my script.py
module launch.run
module launch.supervisor
agent --standalone" ] || { cat calls && false; }
}


@test "a port in use is refused with 69 and the name of the run that uses it" {
  write_script <<<''
  MUSTER_RUN_DIR=/logs/train-1 python3 -c '
import socket, time
with socket.create_server(("", 0)) as server:
    print(server.getsockname()[1], flush=True)
    time.sleep(60)' >port 3>&- &
  local holder=$! # not %1, which is the timer of bats for the test timeout
  timeout 20 sh -c 'until [ -s port ]; do sleep 0.05; done'
  run -0 "$LAUNCH" --dry-run --master-port "$(cat port)" --script "my script.py" - 2
  run "$LAUNCH" --master-port "$(cat port)" --script "my script.py" - 2
  kill "$holder"
  [ "$status" -eq 69 ]
  [[ "$output" == *"--master-port $(cat port): in use on this machine by pid $holder ("*") of run train-1"*"; choose another, or leave it out" ]]
  [ ! -e logs ]
}


@test "a launch is refused if other users can write in Muster's directory, and root may use that of another user" {
  cp -r "$KIT"/{scripts,distributed,config,VERSION,train.py} .
  local path program launch=(scripts/ssh/launch_singlenode.sh --dry-run --script distributed/__init__.py - 1)
  mkdir -p .venv/lib/python3/site-packages
  for path in . distributed distributed/agent scripts/lib/common.bash distributed/launch/watch.py scripts/status.sh \
    train.py .venv .venv/lib/python3/site-packages; do
    chmod o+w "$path"
    run -69 "${launch[@]}"
    [[ "$output" == "launch_singlenode.sh: $WORK"*": other users can write it (mode "*"); call: chmod -R go-w $(printf %q "$WORK")" ]]
    for program in status.sh stop.sh report.sh doctor.sh jobs/run_distributed_training.py jobs/distributed_train_helper.py; do
      run -69 "scripts/$program"
      [[ "$output" == "${program##*/}: $WORK"*": other users can write it (mode "*"); call: chmod -R go-w $(printf %q "$WORK")" ]]
    done
    run -0 scripts/ssh/launch_singlenode.sh --help
    chmod o-w "$path"
  done
  mkdir -p .git/{info,hooks,objects,refs} benchmarks tests/jobs logs data argparse
  touch requirements.{txt,lock} pyproject.toml benchmarks/run.py tests/jobs/a.py .git/{config,index,info/attributes} \
    .git/hooks/post-checkout argparse.py argparse/__init__.py data/file
  for path in VERSION config config/quickstart.yaml requirements.{txt,lock} pyproject.toml benchmarks benchmarks/run.py \
    tests tests/jobs/a.py .git .git/config .git/info .git/info/attributes .git/hooks .git/hooks/post-checkout \
    argparse.py argparse/__init__.py; do
    chmod o+w "$path"
    run -69 scripts/status.sh
    [[ "$output" == "status.sh: $WORK/$path: other users can write it (mode "*"); call: chmod -R go-w $(printf %q "$WORK")" ]]
    chmod o-w "$path"
  done
  rm -r argparse argparse.py
  chmod o+w .git/{objects,refs,index} logs data data/file # neither run nor read by programs of Muster
  run -0 "${launch[@]}"
  for path in . distributed .venv/lib/python3/site-packages; do # the sticky bit does not keep modules of others out
    chmod 1777 "$path"
    run -69 scripts/status.sh
    [[ "$output" == "status.sh: $WORK"*": other users can write it (mode 1777); call: chmod -R go-w $(printf %q "$WORK")" ]]
    chmod 755 "$path"
  done
  # Muster's directories may be links; what they lead to is checked too.
  mv benchmarks elsewhere
  ln -s elsewhere benchmarks
  chmod o+w elsewhere/run.py
  run -69 scripts/status.sh
  chmod o-w elsewhere/run.py
  ((EUID)) || chown -R 23456 .
  run -0 "${launch[@]}"
}


@test "no other user can write to caches of Muster's modules, whatever the umask is" {
  cp -r "$KIT"/{scripts,distributed,config,VERSION,train.py} .
  find . -name __pycache__ -prune -exec rm -r {} +
  (umask 000 && scripts/ls.sh && scripts/ssh/launch_singlenode.sh --dry-run --script train.py - 1)
  [ -d distributed/training/__pycache__ ]
  [ ! "$(find scripts distributed -type d -perm /022)" ]
  run -0 scripts/ls.sh
}


@test "the directories of a run are private, and ranks have the user's umask" {
  use_agent_without_torch
  write_script <<<'open(os.environ["MUSTER_RUN_DIR"] + f"/../../of rank {rank}", "w")'
  local agent
  for agent in fast torchrun; do
    (umask 000 && "$LAUNCH" --agent "$agent" --script "my script.py" - 2)
    [ ! "$(find -L logs/latest -perm /077)" ]
    [ "$(stat -c %a "of rank 1")" = 666 ]
    rm of*
  done
}


@test "a BASH_ENV that turns tracing on prints no value of --env-file" {
  use_agent_without_torch
  write_script <<<'print("secret in rank:", os.environ["TOKEN"] == "hunter2", flush=True)'
  echo TOKEN=hunter2 >secrets
  echo 'set -xv' >tracing
  BASH_ENV=$PWD/tracing run -0 "$LAUNCH" --env-file secrets --script "my script.py" - 1
  [[ "$output" == *"secret in rank: True"* && "$output" != *hunter2* ]]
}


# Write a stub: it prints what nvidia-smi prints with --format=csv,noheader,nounits.
write_nvidia_smi() { # <number of GPUs>
  mkdir -p stub
  cat >stub/nvidia-smi <<END
#!/bin/sh
case \$* in *query-gpu*) for gpu in $(seq -s ' ' 0 $(($1 - 1))); do
  echo "\$gpu, GPU-a\$gpu, 580.65.06, 81920, 4, Disabled, Default, Disabled, STUB"
done ;; esac
END
  chmod +x stub/nvidia-smi
}


@test "more processes than GPUs are refused (with a stub of nvidia-smi)" {
  write_script <<<''
  write_nvidia_smi 1
  PATH="$WORK/stub:$PATH" run -0 "$LAUNCH" --dry-run --script "my script.py" - 2
  PATH="$WORK/stub:$PATH" refused "NPROC 2: this machine has 1 GPU" --script "my script.py" - 2
}


@test "GPUs that PyTorch cannot use: train.py is refused, other scripts get one warning (with a stub of nvidia-smi)" {
  write_nvidia_smi 2
  cat >tiny.yaml <<'END'
model: {n_layer: 1, n_head: 1, n_embd: 8, block_size: 16}
train: {steps: 2, batch_size: 4}
END
  PATH="$WORK/stub:$PATH" run -2 "$LAUNCH" tiny.yaml 2
  [[ "$output" == *"train.py: PyTorch cannot use the GPUs of $(uname -n) (2): Torch not compiled with CUDA enabled; "* ]]
  [[ "$output" == *"install a build with CUDA, "*"; to train on the CPU: distributed.device=cpu"* ]]
  PATH="$WORK/stub:$PATH" run -0 "$LAUNCH" tiny.yaml 2 -- distributed.device=cpu
  [[ "$output" != *"PyTorch cannot use"* ]]
  write_script <<'END'
while rank == 0 and "warning: " not in open(os.environ["MUSTER_RUN_DIR"] + f"/node_{os.uname().nodename}.log").read():
    time.sleep(0.01)
END
  local agent
  for agent in fast torchrun; do
    PATH="$WORK/stub:$PATH" run -0 timeout 60 "$LAUNCH" --agent $agent --script "my script.py" - 2
    [ "$(grep -c "warning: PyTorch cannot use the GPUs of $(uname -n) (2): Torch not compiled" <<<"$output")" -eq 1 ]
  done
}


@test "a launch does not wait for nvidia-smi where the driver lists its GPUs (with stubs of both)" {
  [ "$(id -u)" -eq 0 ] || skip "a mount namespace needs root"
  mkdir stub
  mkfifo never # nvidia-smi hangs; only the samples of the use of GPUs may call it
  printf '#!/bin/sh\ncase $* in *utilization*) ;; *) echo >called ;; esac\nread -r _ <never\n' >stub/nvidia-smi
  chmod +x stub/nvidia-smi
  write_script <<<'os._exit(0)'
  PATH="$WORK/stub:$PATH" run -0 timeout 60 "$KIT/tests/lab/with_gpus.sh" 8 "$LAUNCH" --script "my script.py" - 2
  PATH="$WORK/stub:$PATH" run -2 timeout 60 "$KIT/tests/lab/with_gpus.sh" 8 "$LAUNCH" --script "my script.py" - 9
  [[ "$output" == *"NPROC 9: this machine has 8 GPUs"* ]]
  PATH="$WORK/stub:$PATH" nproc_is 8 "$KIT/tests/lab/with_gpus.sh" 8 "$LAUNCH" --dry-run --script "my script.py" - gpu
  [ ! -e called ]
}


nproc_is() { # <number> <command...>
  run "${@:2}"
  [ "$status" -eq 0 ] || { echo "$output" && return 1; }
  [[ "$output" == *" --nproc-per-node $1 "* ]] || { echo "$output" && return 1; }
}


@test "NPROC auto, gpu and cpu: as many processes as this machine has visible GPUs or usable cores" {
  local by_hand=$KIT/scripts/ssh/launch_torchrun_multinode.sh
  write_script <<<''
  nproc_is 1 taskset --cpu-list 0 "$LAUNCH" --dry-run --script "my script.py" - auto
  nproc_is 1 taskset --cpu-list 0 "$by_hand" --dry-run --script "my script.py" - cpu 1 0 localhost
  nproc_is 1 taskset --cpu-list 0 "$KIT/scripts/run_ddp.sh" --dry-run --script "my script.py" -c - -n auto
  refused "NPROC gpu: no GPU is visible on this machine; give a number, cpu or auto" --script "my script.py" - gpu
  refused "NPROC: expected a number of processes from 1 to 1024, auto, gpu or cpu, got 'all'" --dry-run --script "my script.py" - all
  write_nvidia_smi 3
  export PATH=$WORK/stub:$PATH
  nproc_is 3 "$LAUNCH" --dry-run --script "my script.py" - auto
  nproc_is 3 "$LAUNCH" --dry-run --script "my script.py" --agent torchrun - gpu
  nproc_is 2 "$LAUNCH" --dry-run --script "my script.py" --env CUDA_VISIBLE_DEVICES=0,2 - gpu
  nproc_is 1 taskset --cpu-list 0 "$LAUNCH" --dry-run --script "my script.py" - cpu
  CUDA_VISIBLE_DEVICES=2 nproc_is 1 "$by_hand" --dry-run --script "my script.py" - gpu 1 0 localhost
}


@test "Ctrl-C while Python starts in the launcher exits with 130, without a traceback" {
  # Python imports sitecustomize when it starts.
  echo 'import os, signal; os.killpg(0, signal.SIGINT)' >sitecustomize.py
  echo >t.py
  PYTHONPATH=$PWD run -130 setsid --wait env --default-signal=INT "$LAUNCH" --script t.py - 1
  [ -z "$output" ]
  [ ! -e logs ]
}


@test "--notify is called at a restart and at the end, and a failed call is one line in launcher.log" {
  use_agent_without_torch
  write_script <<'END'
sys.exit(3 if rank else 0)
END
  run -3 "$LAUNCH" --max-restarts 1 --notify 'cat >"note.$$"; echo no server >&2; exit 7' --script "my script.py" - 2
  [ "$(cat note.* | grep -c '"exit_code": 3')" -eq 2 ]
  [ "$(cat note.* | grep -cE '"event": "(restart|end)"')" -eq 2 ]
  cat note.* | grep -F '"cause": "rank 1 on '
  cat note.* | grep -F "\"report\": \"$WORK/logs/"
  [ "$(grep -cE 'notify: (restart|end): the command failed: exit code 7: no server' logs/latest/launcher.log)" -eq 2 ]
  run -1 grep -rF 'no server' logs/latest/run.json
}


@test "MUSTER_NOTIFY is the default of --notify, and a run that succeeds is reported too" {
  use_agent_without_torch
  write_script </dev/null
  MUSTER_NOTIFY='cat >note' run -0 "$LAUNCH" --script "my script.py" - 2
  grep -F '"verdict": "ok"' note
  MUSTER_NOTIFY='cat >other' run -0 "$LAUNCH" --dry-run --notify 'cat >dry' --script "my script.py" - 2
  [ ! -e other ] && [ ! -e dry ]
}
