#!/usr/bin/env bats
#
# scripts/ssh/launch_torchrun_auto.sh on the laboratory: any script runs on several nodes with unchanged arguments, the
# verdict names the node and rank that failed first, a launch that cannot work is refused before it starts, and no
# process remains after a process is killed or a node is disconnected or frozen.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
# shellcheck source=tests/lab/nodes.bash
source "$BATS_TEST_DIRNAME/lab/nodes.bash"
# shellcheck source=tests/lab/environments.bash
source "$BATS_TEST_DIRNAME/lab/environments.bash"
# shellcheck source=tests/lab/secrets.bash
source "$BATS_TEST_DIRNAME/lab/secrets.bash"
# shellcheck source=tests/lab/hostile_environment.bash
source "$BATS_TEST_DIRNAME/lab/hostile_environment.bash"


setup_file() {
  export LAUNCH=$BATS_TEST_DIRNAME/../scripts/ssh/launch_torchrun_auto.sh
  start_lab 3
}


# bats test_tags=quick
@test "muster run starts nodes over SSH and with pdsh, with the words after the script unchanged" {
  write_script <<'END'
dist.barrier()
print("ranks", dist.get_world_size(), sys.argv[1:])
END
  run -0 --separate-stderr "$KIT/scripts/muster" run -n 1 --on "$N1,$N2:2" "my script.py" --on x -- --sync
  [ "$output" = "ranks 3 ['--on', 'x', '--', '--sync']" ]
  printf '%s slots=2\n%s\n' "$N1" "$N3" >hosts
  run -0 --separate-stderr "$KIT/scripts/muster" run --nproc 1 --pdsh --hostfile hosts "my script.py"
  [ "$output" = "ranks 3 []" ]
  [[ "$stderr" == *"muster run: run my-script-"* ]]
  # Without -n: one process on each node, because none has a GPU.
  run -0 --separate-stderr "$KIT/scripts/muster" run --on "$N1,$N2" "my script.py"
  [ "$output" = "ranks 2 []" ]
}


# bats test_tags=quick
@test "a user's script runs on three nodes with unchanged arguments, and secrets do not leak" {
  write_script <<'END'
assert os.environ["SECRET"] == open("secret").read()
total = torch.tensor(rank)
dist.all_reduce(total)
for writer in range(dist.get_world_size()):
    dist.barrier()
    if writer == rank:
        open("received", "ab").write(f"{rank} {socket.gethostname()} {total.item()} ".encode()
                                 + b"|".join(os.fsencode(a) for a in sys.argv[1:])
                                 + b"|" + os.environb[b"VALUE"] + b"\n\n")
if rank == 0:
    print("finished")
    print("warned", file=sys.stderr)
END
  arguments=("it's" '$HOME `id` "x"' $'two\nlines' 'é; exit 3' $'\x80\xff' '' '*' '%h %n' '!x' '--' 'a\b')
  value=$'a "b" $c \x80'
  make_secret
  watch_command_lines
  run --separate-stderr "$LAUNCH" --env-file secrets.env --env SEEN=yes --env "VALUE=$value" \
    --script "my script.py" - 1 "${PREFIX}[2,1]" "$N3:2" -- "${arguments[@]}"
  [ "$status" -eq 0 ]
  [ "$output" = finished ]
  grep -qx warned <<<"$stderr"
  line=$(IFS='|' && printf '%s' "${arguments[*]}|$value")
  for rank_and_node in "0 $N2" "1 $N1" "2 $N3" "3 $N3"; do
    printf '%s 6 %s\n\n' "$rank_and_node" "$line"
  done >expected
  cmp received expected
  for node in "$N1" "$N2" "$N3"; do
    [ "$(<"logs/latest/node_$node.exit")" = 0 ]
  done
  grep -q "verdict: ok" <<<"$stderr"
  secret_did_not_leak
}


@test "variables that frameworks read are forwarded, also after a restart and with --detach; no file has their values" {
  make_secret
  mkdir config
  echo 'export GLOO_LOG=node NCCL_ALGO=${NCCL_ALGO:-unset}' >config/node_env.sh
  cat >script.py <<'PYTHON'
import os, sys
names = ("NCCL_DEBUG", "NCCL_ALGO", "HF_TOKEN", "GLOO_LOG", "OMP_SCHEDULE", "MY_FLAG", "HF_HOME", "OTHER", "TWO_LINES",
         "CUDA_VISIBLE_DEVICES", "WORLD_SIZE")
values = [os.environ.get(name, "-") for name in names]
values[2] = "token" if values[2] == open("secret").read() else "wrong"
open(f"seen.{sys.argv[1]}.{os.environ['RANK']}", "wb").write(os.fsencode("|".join(values)))
if not os.path.exists(f"tried.{sys.argv[1]}"):
    open(f"tried.{sys.argv[1]}", "w").close()
    sys.exit(5)
PYTHON
  export NCCL_DEBUG=INFO NCCL_ALGO=Ring HF_TOKEN GLOO_LOG=launcher OMP_SCHEDULE=static CUDA_VISIBLE_DEVICES=7 OTHER=1
  export MY_FLAG='$x "y"' HF_HOME=/of/this/machine TWO_LINES=$'a\nb\x80' RANK=5 WORLD_SIZE=9
  export MUSTER_FORWARD='MY_*,TWO_LINES -HF_HOME'
  HF_TOKEN=$(<secret)
  watch_command_lines
  launch() { # <argument of the script> <option...>
    run --separate-stderr "$LAUNCH" "${@:2}" --env SEEN=yes --env OMP_SCHEDULE=dynamic --env-file secrets.env \
      --max-restarts 1 --script script.py - 1 "$N1" "$N2" -- "$1"
    echo "$stderr"
    [ "$status" -eq 0 ]
    line=$(grep 'forwarded to the nodes: ' <<<"$stderr")
    names=${line#*: *: }
    [ "$(tr ' ' '\n' <<<"${names%;*}" | sort | grep -v '^OMP_NUM\|^CUDA_DEV' | xargs)" = \
      "GLOO_LOG HF_TOKEN MY_FLAG NCCL_ALGO NCCL_DEBUG TWO_LINES" ]
  }
  launch run
  use_agent_without_torch
  launch background --detach
  timeout 100 sh -c 'until grep -qs "verdict: ok" logs/latest/console.log; do sleep 0.1; done'
  for rank in 0 1; do
    for run in run background; do
      printf 'INFO|Ring|token|node|dynamic|$x "y"|-|-|a\nb\x80|-|2' | cmp - "seen.$run.$rank"
    done
  done
  secret_did_not_leak
  run -0 "$LAUNCH" --dry-run --script script.py - 1 "$N1"
  [[ "$output" == *" HF_TOKEN=... "*" MY_FLAG=... "* ]]
  MUSTER_FORWARD='-* NCCL_DEBUG' run -0 "$LAUNCH" --dry-run --script script.py - 1 "$N1"
  [[ "$output" == *"forwarded to the nodes: NCCL_DEBUG; MUSTER_FORWARD changes the list"* ]]
  MUSTER_FORWARD='a=b' run -2 "$LAUNCH" --dry-run --script script.py - 1 "$N1"
  [[ "$output" == *"MUSTER_FORWARD: expected NAME, PREFIX*, -NAME or -PREFIX*, got 'a=b'"* ]]
}


@test "Ctrl-C writes one checkpoint and exits with 75, and the same command resumes" {
  endless_settings >tiny.yaml
  start out "$LAUNCH" tiny.yaml 1 "$N1" "$N2"
  wait_for_line out "step      3/100000"
  kill -INT -- "-$LAUNCHER"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 75 ]
  grep -q "^stopped on request at step" out
  [ "$(processes_left)" -eq 0 ]
  step=$(find "check points" -name 'step_*' -printf '%f' | sed 's/step_0*//')
  run "$LAUNCH" tiny.yaml 1 "$N1" "$N2" -- train.steps=$((step + 1))
  [ "$status" -eq 0 ]
  [[ "$output" == *"resuming from"*"step $((step + 1))/$((step + 1))"* ]]
}


@test "signals to the launcher's process group call each rank's handler once; without a handler, the run is stopped" {
  use_agent_without_torch
  check_signals_to_process_group
}


@test "SIGKILL of the launcher leaves no process on any node" {
  use_agent_without_torch
  write_endless_plain_script
  start_endless_script - 1 "$N1" "$N2" "$N3"
  kill -KILL "$LAUNCHER"
  no_processes_within 10
}


@test "a disconnected node ends the run with 69, and no process of the run remains on it" {
  use_agent_without_torch
  write_endless_plain_script
  start_endless_script - 1 "$N1" "$N2" "$N3"
  lab cut "$N3"
  SECONDS=0
  wait_for_exit "$LAUNCHER"
  ((SECONDS <= 25)) # 12 s to detect it, 10 s to stop the other nodes, and time for a busy machine
  [ "$status" -eq 69 ]
  grep -q "verdict: failed: $N3: connection lost" out
  lab heal "$N3"
  no_processes_within 10
}


# bats test_tags=soak
@test "a frozen node ends the run with 69, and no process of the run remains when the node continues" {
  use_agent_without_torch
  write_endless_plain_script
  start_endless_script - 1 "$N1" "$N3"
  lab freeze "$N3"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 69 ]
  grep -q "verdict: failed: $N3: connection lost" out
  lab heal "$N3"
  no_processes_within 10
}


@test "--max-restarts starts all nodes again, and ranks see the number of restarts, with either agent" {
  use_agent_without_torch
  local agent
  write_counting_script
  for agent in fast torchrun; do
    run "$LAUNCH" --agent "$agent" --max-restarts 1 --script "my script.py" - 1 "$N1" "$N2" -- 1 2
    [ "$status" -eq 0 ]
    [[ "$output" == *"verdict: failed: rank "*"restart 1 of 1"*"verdict: ok"* ]]
    all_ranks_saw 2 "0 1" "1 1"
  done
}


@test "variables, options and functions that bash and Python obey do not change a launch, a status or a stop" {
  write_hostile_environment
  echo : >config/node_env.sh # replaces a file that calls the function `module`, which the nodes do not have
  run -7 timeout 120 bash with_hostile_environment "$LAUNCH" --script compare.py - 1 "$N1" "$N2"
  [[ "$output" == *"differs: "*"exited with code 7"* && "$output" != *replaced* ]]
  write_endless_script
  start_endless_script - 1 "$N1" "$N2"
  run -0 bash with_hostile_environment "$KIT/scripts/status.sh" latest
  [[ "$output" == *"$N1"*"$N2"* && "$output" != *replaced* ]]
  run -0 bash with_hostile_environment "$KIT/scripts/stop.sh" latest
  [[ "$output" == *"$N2: no process of this run remains"* && "$output" != *replaced* ]]
}


@test "with TMOUT exported, status.sh finds the nodes of a run that takes longer than TMOUT, and the run is restarted" {
  use_agent_without_torch
  write_plain_script <<'END'
if os.path.exists("tried"):
    sys.exit(os.environ["TMOUT"] != "2")
if rank == 0:
    print("at work", flush=True)
while not os.path.exists("fail"):
    time.sleep(0.1)
time.sleep(0.2)  # until both ranks have seen the file
open("tried", "w").close()
sys.exit(5)
END
  export TMOUT=2
  start out "$LAUNCH" --max-restarts 1 --env TMOUT=2 --script "my script.py" - 1 "$N1" "$N2"
  wait_for_line out "at work"
  sleep 4 # more than TMOUT, without input
  run -0 "$KIT/scripts/status.sh" latest
  [[ "$output" == *"$N1"*"$N2"* ]]
  touch fail
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  grep -q "exit code 5" out
  grep -q "restart 1 of 1" out
}


@test "launch, status, stop and doctor work when XDG_RUNTIME_DIR and TMPDIR name no directory, and warn once" {
  use_agent_without_torch
  write_endless_plain_script
  export XDG_RUNTIME_DIR=/nowhere TMPDIR=/nowhere
  run -0 "$LAUNCH" --detach --script "my script.py" - 1 "$N1" "$N2"
  [ "$(grep -c "warning: XDG_RUNTIME_DIR='/nowhere': .* using /tmp" <<<"$output")" -eq 1 ]
  wait_for_line logs/latest/console.log "at work"
  for program in status.sh stop.sh; do
    run -0 "$KIT/scripts/$program" latest
    [ "$(grep -c "$program: warning: XDG_RUNTIME_DIR='/nowhere': .* using /tmp" <<<"$output")" -eq 1 ]
  done
  run "$KIT/scripts/doctor.sh" "$N1"
  [[ "$output" == *"warning: XDG_RUNTIME_DIR='/nowhere': "*"$N1"* && "$output" != *mktemp* ]]
}


# bats test_tags=soak
@test "checkpoints of a restarted run on three nodes are identical to those of an uninterrupted run" {
  cat >"my script.py" <<END
import os, runpy, signal, sys
sys.path.insert(0, "$KIT")
sys.argv[0] = "$KIT/train.py"
from distributed.training import data
fetch, count = data.Windows.__getitem__, [0]
def killed_once(self, indices):
    count[0] += 1
    if os.environ["RANK"] == "1" and count[0] == 5 and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return fetch(self, indices)
data.Windows.__getitem__ = killed_once
runpy.run_path(sys.argv[0], run_name="__main__")
END
  endless_settings >tiny.yaml
  train=("$LAUNCH" --max-restarts 1 --script "my script.py" tiny.yaml 1 "$N1" "$N2" "$N3" -- train.steps=8
    train.batch_size=15 checkpoint.every=1)
  run "${train[@]}"
  [ "$status" -eq 0 ]
  [[ "$output" == *"resuming from"* ]]
  run "${train[@]}" checkpoint.dir=undisturbed # no rank is killed, because the file "killed" exists
  [ "$status" -eq 0 ]
  [[ "$output" != *"resuming from"* ]]
  cmp undisturbed/step_00000008/state.pt "check points/step_00000008/state.pt"
  cmp undisturbed/step_00000008/ranks.pt "check points/step_00000008/ranks.pt"
}


# bats test_tags=soak
@test "two concurrent launches on the same nodes do not connect to each other" {
  write_script <<'END'
total = torch.ones(1)
dist.all_reduce(total)
print(f"sum {total.item()}")
END
  "$LAUNCH" --script "my script.py" - 1 "$N1" "$N2" >one 2>&1 3>&- &
  run "$LAUNCH" --script "my script.py" - 1 "$N2" "$N1"
  wait $!
  [ "$status" -eq 0 ]
  grep -q "sum 2.0" one
  [[ "$output" == *"sum 2.0"* ]]
}


@test "nodes connect to each other even if /etc/hosts maps their names to 127.0.1.1, as on Debian" {
  write_script <<'END'
total = torch.ones(1)
dist.all_reduce(total)
print(f"sum {total.item()}")
END
  cp -- "$MUSTER_LAB/hosts" hosts
  { printf '127.0.1.1 %s %s\n' "$N1" "$N2" && cat hosts; } >"$MUSTER_LAB/hosts"
  run timeout 60 "$LAUNCH" --script "my script.py" - 1 "$N1" "$N2"
  cat hosts >"$MUSTER_LAB/hosts"
  [ "$status" -eq 0 ]
  [[ "$output" == *"sum 2.0"* ]]
}


@test "wrong arguments and unreachable nodes are refused before the start, with node and remedy" {
  write_script <<<''
  refused 2 "expected CONFIG, NPROC and NODE..." - 2
  refused 2 "named twice" --script "my script.py" - 2 "$N1" "$N1"
  refused 2 "NPROC: expected a number of processes from 1 to 1024, auto, gpu or cpu, got 'two'" --script "my script.py" - two "$N1"
  refused 2 "no such file" --script nix.py - 2 "$N1"
  refused 2 "RANK': the launcher sets it; leave it out" --env RANK=3 --script "my script.py" - 2 "$N1"
  refused 2 "hosts" --hostfile hosts --script "my script.py" - 2
  refused 69 "nix: cannot be reached (" --script "my script.py" - 1 "$N1" nix
  refused 69 "ssh-copy-id $N2" --script "my script.py" - 1 "$N1" "nobody@$N2"
  lab freeze "$N3"
  refused 69 "$N3: cannot be reached (" --script "my script.py" - 1 "$N1" "$N3"
}


@test "the package of a tracker, such as wandb, must be installed on the nodes, but not on the launching machine" {
  make_environment_without wandb
  printf 'train: {steps: 1, batch_size: 4}\nlogging: {wandb: offline}\n' >tiny.yaml
  refused 69 "$N2: the package wandb is not installed, and the settings enable this tracker; install it for that Python" \
    --python "$PWD/venv/bin/python" tiny.yaml 1 "$N1" "$N2"
}


@test "of two concurrent launches with one port, one is refused with the name of the other run, which continues" {
  use_agent_without_torch
  write_plain_script <<'END'
while not os.path.exists("go"):
    time.sleep(0.1)
END
  arguments=(--no-preflight --master-port $((20000 + RANDOM % 9000)) --script "my script.py" - 1 "$N1" "$N2")
  start out.1 "$LAUNCH" "${arguments[@]}"
  first=$LAUNCHER
  start out.2 "$LAUNCH" "${arguments[@]}"
  wait -n "$first" "$LAUNCHER" && status=0 || status=$?
  [ "$status" -eq 69 ]
  : >go
  wait_for_exit "$first"
  statuses=$status
  wait_for_exit "$LAUNCHER"
  [[ "$statuses $status" == "69 0" || "$statuses $status" == "0 69" ]]
  refused=$(grep -l "agent: .*: in use by run " out.?) # any node of the refused launch may print this
  winner=out.$((3 - ${refused#out.}))
  grep -q "in use by run $(grep -o -m1 'my-script-[^ :]*' "$winner") (first node $N1, started .*; choose another" "$refused"
  [ "$(processes_left)" -eq 0 ]
}


@test "a port that is in use on the first node is refused with the name of the node" {
  write_script <<<''
  "$BATS_TEST_DIRNAME/lab/lab.sh" ssh "$N2" python3 -c '
import socket, time
with socket.create_server(("", 29123)):
    print("listening", flush=True)
    time.sleep(60)' >port 3>&- &
  local holder=$!
  timeout 20 grep -q -m1 listening <(tail -n +1 -F port 2>/dev/null)
  refused 69 "$N2: port 29123: in use" --master-port 29123 --script "my script.py" - 1 "$N2" "$N1"
  kill "$holder"
}


@test "NPROC auto and gpu: each node has as many processes as GPUs (with a stub of nvidia-smi) or cores" {
  use_agent_without_torch
  mkdir -p config stub
  echo 'import os; open(os.environ["MUSTER_NODE"], "a").write(os.environ["LOCAL_WORLD_SIZE"])' >t.py
  echo 'taskset --pid --cpu-list 0 $$ >/dev/null' >config/node_env.sh
  "$LAUNCH" --script t.py - auto "$N1" "$N2:2" 3>&-
  [ "$(cat "$N1"):$(cat "$N2")" = 1:22 ]
  run "$LAUNCH" --script t.py - gpu "$N1" "$N2" 3>&-
  [ "$status" -eq 69 ]
  [[ "$output" == *"$N1: NPROC gpu: no GPU is visible there; give a number, cpu or auto"* ]]
  cat >stub/nvidia-smi <<'END'
#!/bin/sh
case $* in *query-gpu*) for gpu in 0 1; do
  echo "$gpu, GPU-a$gpu, 580.65.06, 81920, 4, Disabled, Default, Disabled, STUB"
done ;; esac
END
  chmod +x stub/nvidia-smi
  echo 'PATH=$PWD/stub:$PATH; [ "$(uname -n)" != '"$N2"' ] || export CUDA_VISIBLE_DEVICES=1' >config/node_env.sh
  rm "$N1" "$N2"
  "$LAUNCH" --script t.py - gpu "$N1" "$N2" 3>&-
  [ "$(cat "$N1"):$(cat "$N2")" = 22:1 ]
  run "$LAUNCH" --no-preflight --script t.py - gpu "$N1"
  [ "$status" -eq 2 ]
  [[ "$output" == *"NPROC gpu: only the preflight counts the processors of a node; leave out --no-preflight"* ]]
}


@test "--dry-run prints the command of each node, and connects to none" {
  write_script <<<''
  printf '%s\n' '# a comment' 'a1 slots=4' b2 c3 >hosts
  run "$LAUNCH" --dry-run --hostfile hosts --exclude c3 --script "my script.py" - 2 -- 'x y'
  [ "$status" -eq 0 ]
  [ "${#lines[@]}" -eq 2 ]
  [[ "${lines[0]}" == "a1: "*"--nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr a1 "*"my\\ script.py x\\ y" ]]
  [[ "${lines[1]}" == "b2: "*"--node-rank 1 --nproc-per-node 2 "* ]]
  [ ! -e logs ]
}
