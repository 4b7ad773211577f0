#!/usr/bin/env bats
#
# Failures during a run on several nodes: ranks and agents that crash, hang or exit early, a closed terminal, a full
# disk. The verdict names node, rank and cause, the exit code is that of the first failed rank, the failure is detected
# within a second, and 10 seconds later no process of the run remains.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
# shellcheck source=tests/lab/nodes.bash
source "$BATS_TEST_DIRNAME/lab/nodes.bash"


setup_file() {
  export LAUNCH=$BATS_TEST_DIRNAME/../scripts/ssh/launch_torchrun_auto.sh
  export SMALL_DISK=$BATS_FILE_TMPDIR/small # before the nodes start, so that they share it
  mkdir "$SMALL_DISK"
  mount -t tmpfs -o size=200k tmpfs "$SMALL_DISK"
  start_lab 40
}


teardown_file() {
  stop_lab
  ! mountpoint -q "$SMALL_DISK" || umount --lazy "$SMALL_DISK"
}


# Kill the processes that a failed test left. Processes of other test files, which run concurrently, must survive.
teardown() {
  local file
  tmux -L "$PREFIX" kill-server 2>/dev/null || true
  while read -r file; do
    kill -KILL "${file//[!0-9]/}" || true
  done < <(grep -lsz -e "^MUSTER_RUN_DIR=$BATS_TEST_TMPDIR/" -e "^MUSTER_RUN_DIR=$SMALL_DISK/" /proc/[0-9]*/environ)
}


# Write a script with arguments FAULT RANK: when all ranks have started, RANK fails in this way; other ranks wait until
# the file "go" exists. The script does not use PyTorch.
faulty_script() {
  cat >"my script.py" <<'END'
import ctypes, os, signal, sys, threading, time

run, rank, ranks = os.environ["MUSTER_RUN_DIR"], int(os.environ["RANK"]), range(int(os.environ["WORLD_SIZE"]))

def wait_for(*files):
    while not all(os.path.exists(file) for file in files):
        time.sleep(0.02)

def fail(fault):
    with open(f"{run}/failed_at", "w") as file:
        file.write(f"{time.time()}")
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "segfault":
        ctypes.string_at(0)
    elif fault == "raises":
        raise ValueError("boom")
    elif fault == "remains":
        threading.Thread(target=time.sleep, args=(1000,)).start()
        raise ValueError("boom")
    elif fault == "fills":
        for _ in range(1000):
            print(1000 * "x", flush=True)
    elif fault == "fills_and_needs":
        for _ in range(1000):
            print(1000 * "x", flush=True)
        with open(f"{run}/needed", "w") as file:
            file.write(100_000 * "x")
    else:
        sys.exit(int(fault))

open(f"{run}/started_{rank}", "w").close()
wait_for(*(f"{run}/started_{rank}" for rank in ranks))
print("at work", flush=True)
if sys.argv[2:] == [str(rank)]:
    fail(sys.argv[1])
wait_for(f"{run}/go")
END
}


# Write a script that uses PyTorch; standard input is the code of rank 1.
training_script() {
  {
    cat <<'END'
import contextlib, datetime, os, socket, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
dist.barrier()
if dist.get_rank() == 1:
END
    sed 's/^/    /'
    echo 'dist.all_reduce(torch.ones(1))'
  } >"my script.py"
}


# Start "my script.py" in the background, and wait until its ranks are at work.
launch() { # <argument of LAUNCH...>
  start out "$LAUNCH" --script "my script.py" "$@"
  wait_for_line out "at work"
}


# Check that the agent of a node detected the failure within this time after the rank recorded that it fails.
detected_within() { # <seconds> <node>
  python3 -c '
import json, sys
failures = json.load(open(f"logs/latest/errors/node_{sys.argv[2]}.json"))["failures"]
took = min(failure["time"] for failure in failures) - float(open("logs/latest/failed_at").read())
sys.exit(0 if took <= float(sys.argv[1]) else f"detected after {took:.2f} s")' "$@"
}


fails_with() { # <exit code> <text of the verdict> <argument of LAUNCH...>
  run timeout 90 "$LAUNCH" --script "my script.py" - 1 "${@:3}"
  [ "$status" -eq "$1" ] || { echo "status $status: $output" && return 1; }
  [[ "$output" == *"verdict: failed: $2"* ]] || { echo "$output" && return 1; }
  no_processes_within 10
}


@test "rank 0 is killed on the first node, which hosts the rendezvous: the verdict names the rank and its signal" {
  faulty_script
  fails_with 137 "rank 0 on $N1 died of SIGKILL" "$N1" "$N2" -- killed 0
  detected_within 1 "$N1"
}


@test "a rank raises and a thread keeps it alive: the failure is detected at once, the rank killed and its error named" {
  use_agent_without_torch
  faulty_script
  fails_with 1 "rank 1 on $N2 raised ValueError: boom" "$N1" "$N2" -- remains 1
  detected_within 1 "$N2"
  [[ "$output" == *"agent: $N2: rank 1 failed with exit code 1; stopping the ranks of this node"* ]]
  [[ "$output" == *"failed and does not exit: a thread, an exit handler or a destructor holds it; killing it"* ]]
}


@test "a rank that lost its peer reports first: the verdict names the peer that failed" {
  training_script <<'END'
for number in range(3, 200):  # the other ranks lose their connections before this rank exits
    with contextlib.suppress(OSError):
        connection = socket.socket(fileno=os.dup(number))
        connection.getpeername()
        connection.shutdown(socket.SHUT_RDWR)
while not os.path.exists(f"{os.environ['MUSTER_RUN_DIR']}/errors/rank_0.json"):
    time.sleep(0.02)
os._exit(42)
END
  fails_with 42 "rank 1 on $N2 exited with code 42" "$N1" "$N2"
}


@test "a rank hangs: the other ranks time out, and the verdict names the hung rank" {
  training_script <<'END'
time.sleep(1000)
END
  fails_with 1 "rank 1 on $N2 was missing from a collective: only this rank reported nothing; rank " "$N1:1" "$N2:2"
}


@test "a rank is in an endless loop: --hang-timeout ends the run, and names the rank, its line and its stack" {
  write_hanging_script
  fails_with 124 "hung: no output for " --hang-timeout 3 "$N1" "$N2"
  [[ "$output" == *"rank 1 on $N2 is not in a collective, the other waits for it; it is at my script.py:"*" in main()"* ]]
  [[ "$output" == *"line "*", in main"*"other ranks: rank 0 on $N1: waited in a collective at my script.py:"* ]]
}


@test "a supervisor or an agent gets SIGSTOP before its ranks end: --hang-timeout ends the run, and names the node" {
  use_agent_without_torch
  local program
  for program in supervisor command; do
    cat >"my script.py" <<END
import json, os, signal
with open(f"{os.environ['MUSTER_RUN_DIR']}/node_{os.environ['MUSTER_NODE']}.pid") as file:
    os.kill(json.load(file)["$program"]["pid"], signal.SIGSTOP)
END
    fails_with 124 "hung: no output for " --hang-timeout 3 "$N1"
    [[ "$output" == *"; process $(pid_of "$program" "$N1") on $N1 is stopped (state T)"* ]]
  done
}


# bats test_tags=soak
@test "a rank exits early with 0, and the verdict names it" {
  training_script <<'END'
os._exit(0)
END
  fails_with 1 "rank 1 on $N2 ended with exit code 0 while rank " "$N1:1" "$N2:2"
  [[ "$output" == *" was in a collective at my script.py:"* ]]
  fails_with 1 "rank 1 on $N2 ended with exit code 0 while rank 0 on $N1 was in a collective" "$N1" "$N2"
}


# bats test_tags=soak
@test "the verdict names a rank with a segmentation fault, an exit code or an exception" {
  faulty_script
  fails_with 139 "rank 1 on $N2 died of SIGSEGV" "$N1" "$N2" -- segfault 1
  detected_within 1 "$N2"
  fails_with 42 "rank 1 on $N2 exited with code 42" "$N1" "$N2" -- 42 1
  detected_within 1 "$N2"
  fails_with 1 "rank 2 on $N2 raised ValueError: boom" "$N1" "$N2:2" -- raises 2
  detected_within 1 "$N2"
}


@test "an agent is killed: its ranks are killed, and the verdict names the agent" {
  use_agent_without_torch
  faulty_script
  launch - 1 "$N1" "$N2"
  kill -KILL "$(pid_of command "$N2")"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 137 ]
  grep -q "verdict: failed: the agent on $N2 died of SIGKILL" out
  no_processes_within 10
}


# bats test_tags=soak
@test "the agent of the first node, which hosts the rendezvous, is killed: the verdict names the agent" {
  faulty_script
  launch - 1 "$N1" "$N2"
  kill -KILL "$(pid_of command "$N1")"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 137 ]
  grep -q "verdict: failed: the agent on $N1 died of SIGKILL" out
  no_processes_within 10
}


# bats test_tags=soak
@test "a port is in use by another program, and preflight is skipped: the verdict names the port" {
  faulty_script
  lab ssh "$N1" python3 -c '
import socket, time
with socket.create_server(("", 29500)):
    print("listening", flush=True)
    time.sleep(60)' >port &
  local holder=$!
  wait_for_line port listening
  fails_with 69 "the agent on $N1 failed: port 29500: in use by another program; choose another " \
    --no-preflight "$N1" "$N2"
  kill "$holder"
}


@test "a firewall drops or rejects connections to the rendezvous: the run ends early and names address and port" {
  use_agent_without_torch
  local port=29611 rule reason
  echo 'print("at work")' >"my script.py"
  for rule in "DROP no answer" "REJECT --reject-with icmp-host-prohibited No route to host"; do
    reason=${rule#* } && reason=${reason#--reject-with icmp-host-prohibited }
    # shellcheck disable=SC2086 # one word per option
    lab ssh "$N1" iptables -A INPUT ! -i lo -p tcp --dport "$port" -j ${rule%" $reason"}
    run timeout 60 "$LAUNCH" --master-port "$port" --script "my script.py" - 1 "$N1" "$N2"
    lab ssh "$N1" iptables -F INPUT
    [ "$status" -eq 69 ] || { echo "$output" && false; }
    [[ "$output" == *"verdict: failed: "*"$N2 cannot connect to the first node at "*":$port ($reason): a firewall between them?"* ]]
    no_processes_within 10
  done
}


@test "a supervisor is killed: the other nodes stop, and the verdict names supervisor and node" {
  use_agent_without_torch
  faulty_script
  launch - 1 "$N1" "$N2"
  kill -KILL "$(pid_of supervisor "$N2")"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 137 ]
  grep -q "verdict: failed: the supervisor on $N2 died of SIGKILL" out
  no_processes_within 10
}


@test "the ssh client of a node is killed: the verdict names it, and the run is restarted" {
  use_agent_without_torch
  faulty_script
  launch --max-restarts 1 - 1 "$N1" "$N2"
  client=$(pgrep -f "^ssh .*launch.supervisor.* run .*--name $N2 ")
  kill -KILL "$client"
  wait_for_line out "restart 1 of 1"
  : >logs/latest/go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  grep -qx "ssh (process $client) was killed by signal 9" out
  grep -q "verdict: failed: $N2: connection lost: its ssh client on the launching side (process .*) was killed by SIG" out
  run ! grep -w Killed out # bash's own message about the killed job
  grep -q '"exit_code": 69' logs/latest/attempts/1/verdict.json
}


@test "closing a terminal ends its run as SIGTERM does, and does not end another run on the same nodes" {
  use_agent_without_torch
  faulty_script
  mkdir other_run
  cp "my script.py" other_run
  cd other_run || return
  launch - 1 "$N1" "$N2"
  cd "$WORK" || return
  tmux -L "$PREFIX" -f /dev/null new-session -d -- "$LAUNCH" --script "my script.py" - 1 "$N1" "$N2"
  wait_for_line "logs/latest/node_$N2.log" "at work"
  tmux -L "$PREFIX" kill-server
  timeout 10 sh -c 'while grep -qsz -- "^MUSTER_RUN_DIR=$1/logs" /proc/[0-9]*/environ; do sleep 0.1; done' sh "$WORK"
  wait_for_line logs/latest/verdict.json '"exit_code": 143'
  : >other_run/logs/latest/go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
}


@test "the disk with the logs is full: the training that needs no logs goes on, and lost output is counted" {
  use_agent_without_torch
  faulty_script
  rm -rf "${SMALL_DISK:?}"/*
  timeout 90 "$LAUNCH" --log-dir "$SMALL_DISK" --script "my script.py" - 1 "$N1" "$N2" -- fills 1 >out 2>&1 &
  LAUNCHER=$!
  wait_for_line out "/attempt_0/0/stdout.log: No space left on device: output is lost"
  : >"$(readlink -f "$SMALL_DISK/latest")/go"
  wait_for_exit "$LAUNCHER"
  cat out
  [ "$status" -eq 0 ]
  grep -q "^rank 1: [0-9,]* bytes of its output are lost$" out
  grep -q "^verdict: ok: all ranks exited with 0" out
  [ "$(grep -c "output is lost" out)" -le 4 ] # once for each rank and node
}


@test "the disk with the logs is full: a rank that needs it fails, and the verdict names the disk" {
  use_agent_without_torch
  faulty_script
  rm -rf "${SMALL_DISK:?}"/*
  run timeout 90 "$LAUNCH" --log-dir "$SMALL_DISK" --script "my script.py" - 1 "$N1" "$N2" -- fills_and_needs 1
  [ "$status" -eq 1 ]
  [[ "$output" == *"rank 1: exit code 1, OSError: [Errno 28] No space left on device; cannot write $SMALL_DISK/my-script-"* ]]
  [[ "$output" == *"verdict: failed: "*"$SMALL_DISK"*": No space left on device"* ]]
  [[ "$output" != *Traceback* ]]
  run ! grep -qsz "^MUSTER_RUN_DIR=$SMALL_DISK" /proc/[0-9]*/environ
}


@test "a node that cannot write run directories is refused before the start, and named" {
  faulty_script
  local program
  rm -rf "${SMALL_DISK:?}"/*
  head -c 1M /dev/zero >"$SMALL_DISK/filler" || true
  for program in "$LAUNCH" "$KIT/scripts/ssh/launch_pdsh_multinode.sh"; do
    run timeout 90 "$program" --log-dir "$SMALL_DISK" --script "my script.py" - 1 "$N1" "$N2"
    [ "$status" -eq 69 ]
    [[ "$output" == *"preflight: $N2: no run directory can be written there: $SMALL_DISK: No space left on device; choose another --log-dir"* ]]
    [ ! -e "$SMALL_DISK/latest" ]
  done
  rm "$SMALL_DISK/filler"
}


# Print the processes that a process has started, and those that these have started.
descendants() { # <process id>
  local pid
  for pid in $(pgrep -P "$1"); do
    echo "$pid"
    descendants "$pid"
  done
}


@test "a run that is suspended on all machines for longer than any heartbeat timeout continues afterwards" {
  local file processes RUN
  write_script <<'END'
for step in range(30):
    dist.all_reduce(torch.ones(1))
    print("at work", flush=True)
    time.sleep(0.1)
END
  launch - 1 "$N1" "$N2"
  mapfile -t processes < <(descendants "$LAUNCHER")
  RUN=$(readlink logs/latest)
  while read -r file; do
    processes+=("${file//[!0-9]/}")
  done < <(grep -lsz "/${RUN##*/}" /proc/[0-9]*/{environ,cmdline})
  kill -STOP "$LAUNCHER" "${processes[@]}"
  sleep 25
  kill -CONT "${processes[@]}" "$LAUNCHER"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ] || { cat out && false; }
  run ! grep -E "lost|heartbeat" out logs/latest/node_*.log
}


# A script replaces Python on the nodes: instead of running the agent, it waits until all 40 nodes have started. With
# pdsh's default of 32 connections, or the user's FANOUT of 8, no node would finish.
@test "40 nodes of pdsh run concurrently" {
  cat >python <<END
#!/bin/sh
case \$1 in
  */agent.py) : >"started_\$MUSTER_NODE"; while [ "\$(ls -d started_* | wc -l)" -lt 40 ]; do sleep 0.3; done ;;
  *) exec "$VIRTUAL_ENV/bin/python" "\$@" ;;
esac
END
  chmod +x python
  : >"my script.py"
  FANOUT=8 run timeout 120 "$KIT/scripts/ssh/launch_pdsh_multinode.sh" --no-preflight --python ./python \
    --script "my script.py" - 1 "${PREFIX}[1-40]"
  [ "$status" -eq 0 ]
  [[ "$output" == *"verdict: ok"* ]]
  [ "$(cat logs/latest/node_*.exit | sort | uniq -c)" = "     40 0" ]
}
