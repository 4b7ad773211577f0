#!/usr/bin/env bats
#
# What goes wrong while a training runs on several nodes: ranks and agents that die, hang or leave, a terminal that is
# closed, a disk that is full, a neighbour. Each time the verdict names the host, the rank and the cause, the exit code is
# the first failing rank's own, a death is seen within a second, and 10 seconds later nothing of the run is left.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
# shellcheck source=tests/lab/nodes.bash
source "$BATS_TEST_DIRNAME/lab/nodes.bash"


setup_file() {
  export LAUNCH=$BATS_TEST_DIRNAME/../scripts/ssh/launch_torchrun_auto.sh
  export SMALL_DISK=$BATS_FILE_TMPDIR/small # before the nodes, which then share it
  mkdir "$SMALL_DISK"
  mount -t tmpfs -o size=200k tmpfs "$SMALL_DISK"
  raise_nodes 40
}


teardown_file() {
  lower_nodes
  ! mountpoint -q "$SMALL_DISK" || umount --lazy "$SMALL_DISK"
}


setup() {
  enter_work
}


# Whatever a failed test has left: the marks of the product are not to be trusted here. Other files run meanwhile.
teardown() {
  local file
  tmux -L "$PREFIX" kill-server 2>/dev/null || true
  while read -r file; do
    kill -KILL "${file//[!0-9]/}" || true
  done < <(grep -lsz -e "^MUSTER_RUN_DIR=$BATS_TEST_TMPDIR/" -e "^MUSTER_RUN_DIR=$SMALL_DISK/" /proc/[0-9]*/environ)
}


# FAULT RANK [FAULT RANK]: when all ranks are there, the first named one suffers it, then, when that one is gone, the
# second; all others wait for good, or until there is a file "go". No PyTorch.
faulty_script() {
  cat >"my script.py" <<'END'
import ctypes, os, signal, sys, time

run, rank, ranks = os.environ["MUSTER_RUN_DIR"], int(os.environ["RANK"]), range(int(os.environ["WORLD_SIZE"]))

def wait_for(*files):
    while not all(os.path.exists(file) for file in files):
        time.sleep(0.02)

def fail(fault):
    with open(f"{run}/moment", "w") as moment:
        moment.write(f"{time.time()}")
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "segfault":
        ctypes.string_at(0)
    elif fault == "raises":
        raise ValueError("boom")
    elif fault == "fills":
        while True:
            print(1000 * "x")
    else:
        sys.exit(int(fault))

open(f"{run}/here_{rank}", "w").close()
wait_for(*(f"{run}/here_{rank}" for rank in ranks))
print("at work", flush=True)
for fault, who in zip(sys.argv[1::2], sys.argv[2::2]):
    if rank == int(who):
        fail(fault)
wait_for(f"{run}/go")
END
}


# One that trains with PyTorch, and of which rank 1 does what stands on standard input.
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


# Start in the background with its own process group, as a terminal does; wait until the ranks are at work.
start() { # <word...>
  : >out
  set -m
  "$LAUNCH" --script "my script.py" "$@" >out 2>&1 3>&- &
  LAUNCHER=$!
  set +m
  wait_for_line "at work" out
}


wait_for_line() { # <text> <file>
  timeout 120 grep -qF -m1 -- "$1" <(tail -n +1 -F "$2" 2>/dev/null)
}


status_of_launcher() {
  wait "$LAUNCHER" && status=0 || status=$?
}


nothing_left_within() { # <seconds>
  timeout "$1" sh -c 'while grep -qsz -- "^MUSTER_RUN_DIR=$1" /proc/[0-9]*/environ; do sleep 0.1; done' sh "$WORK"
}


# The agent of a node has seen the death of its rank soon after the moment that the rank wrote down.
seen_within() { # <seconds> <node>
  python3 -c '
import json, sys
deaths = json.load(open(f"logs/latest/errors/node_{sys.argv[2]}.json"))["deaths"]
took = min(death["time"] for death in deaths) - float(open("logs/latest/moment").read())
sys.exit(0 if took <= float(sys.argv[1]) else f"seen after {took:.2f} s")' "$@"
}


verdict_of() { # <exit code> <words of the verdict> <word of the launcher...>
  run timeout 90 "$LAUNCH" --script "my script.py" - 1 "${@:3}"
  [ "$status" -eq "$1" ] || { echo "status $status: $output" && return 1; }
  [[ "$output" == *"verdict: failed: $2"* ]] || { echo "$output" && return 1; }
  nothing_left_within 10
}


@test "rank 0 is killed, on the node where all meet" {
  faulty_script
  verdict_of 137 "rank 0 on $N1 died of SIGKILL" "$N1" "$N2" -- killed 0
  seen_within 1 "$N1"
}


@test "an innocent rank reports first: the verdict names the one that failed" {
  training_script <<'END'
for number in range(3, 200):  # as when it is dying slowly: the others lose it
    with contextlib.suppress(OSError):
        line = socket.socket(fileno=os.dup(number))
        line.getpeername()
        line.shutdown(socket.SHUT_RDWR)
while not os.path.exists(f"{os.environ['MUSTER_RUN_DIR']}/errors/rank_0.json"):
    time.sleep(0.02)
os._exit(42)
END
  verdict_of 42 "rank 1 on $N2 exited with code 42" "$N1" "$N2"
}


@test "a rank hangs: when the others give up waiting, the verdict names it" {
  training_script <<'END'
time.sleep(1000)
END
  verdict_of 1 "rank 1 on $N2 was missing in a collective: it alone reported nothing; rank " "$N1:1" "$N2:2"
}


@test "a rank in an endless loop: --hang-timeout ends the run and names it, its line and its stack" {
  hanging_script
  verdict_of 124 "hung: no output for " --hang-timeout 3 "$N1" "$N2"
  [[ "$output" == *"rank 1 on $N2 is not in a collective, the other waits for it; it is at my script.py:"*" in main()"* ]]
  [[ "$output" == *"line "*", in main"*"meanwhile: rank 0 on $N1: waited in a collective at my script.py:"* ]]
}


# bats test_tags=soak
@test "a rank leaves early, without an error" {
  training_script <<'END'
os._exit(0)
END
  verdict_of 1 "rank 1 on $N2 ended with exit code 0 while rank " "$N1:1" "$N2:2"
  [[ "$output" == *" was in a collective at my script.py:"* ]]
  verdict_of 1 "rank 1 on $N2 ended with exit code 0 while rank 0 on $N1 was in a collective" "$N1" "$N2"
}


# bats test_tags=soak
@test "a segmentation fault, an exit code, an exception" {
  faulty_script
  verdict_of 139 "rank 1 on $N2 died of SIGSEGV" "$N1" "$N2" -- segfault 1
  seen_within 1 "$N2"
  verdict_of 42 "rank 1 on $N2 exited with code 42" "$N1" "$N2" -- 42 1
  seen_within 1 "$N2"
  verdict_of 1 "rank 2 on $N2 raised ValueError: boom" "$N1" "$N2:2" -- raises 2
  seen_within 1 "$N2"
}


@test "an agent is killed: so are its ranks, and the verdict says who died" {
  faulty_script
  start - 1 "$N1" "$N2"
  kill -KILL "$(pid_of command "$N2")"
  status_of_launcher
  [ "$status" -eq 137 ]
  grep -q "verdict: failed: the agent on $N2 died of SIGKILL" out
  nothing_left_within 10
}


# bats test_tags=soak
@test "the agent of the first node, where all meet, is killed" {
  faulty_script
  start - 1 "$N1" "$N2"
  kill -KILL "$(pid_of command "$N1")"
  status_of_launcher
  [ "$status" -eq 137 ]
  grep -q "verdict: failed: the agent on $N1 died of SIGKILL" out
  nothing_left_within 10
}


# bats test_tags=soak
@test "the port is taken between the check and the start" {
  faulty_script
  lab ssh "$N1" python3 -c '
import socket, time
with socket.create_server(("", 29500)):
    print("listening", flush=True)
    time.sleep(60)' >port &
  local holder=$!
  wait_for_line listening port
  verdict_of 69 "the agent on $N1 could not go on: port 29500: in use by another program; choose another " \
    --no-preflight "$N1" "$N2"
  kill "$holder"
}


@test "a supervisor on a node is killed: the others end, and the verdict names it and its host" {
  faulty_script
  start - 1 "$N1" "$N2"
  kill -KILL "$(pid_of supervisor "$N2")"
  status_of_launcher
  [ "$status" -eq 137 ]
  grep -q "verdict: failed: the supervisor on $N2 died of SIGKILL" out
  nothing_left_within 10
}


@test "the ssh client of a node is killed: a connection was lost, nobody asked to stop, and the run is restarted" {
  faulty_script
  start --max-restarts 1 - 1 "$N1" "$N2"
  kill -KILL "$(pgrep -f "^ssh .*supervisor.py run .*--name $N2 ")"
  wait_for_line "restart 1 of 1" out
  : >logs/latest/go
  status_of_launcher
  [ "$status" -eq 0 ]
  grep -q "verdict: failed: $N2: connection lost: control channel closed" out
  run ! grep -w Killed out # so bash would begin, with the whole command
  grep -q '"exit_code": 69' logs/latest/try_1/verdict.json
}


@test "a closed terminal ends its run as TERM does, and touches no other on the same nodes" {
  faulty_script
  mkdir neighbour
  cp "my script.py" neighbour
  cd neighbour || return
  start - 1 "$N1" "$N2"
  cd "$WORK" || return
  tmux -L "$PREFIX" -f /dev/null new-session -d -- "$LAUNCH" --script "my script.py" - 1 "$N1" "$N2"
  wait_for_line "at work" "logs/latest/node_$N2.log"
  tmux -L "$PREFIX" kill-server
  timeout 10 sh -c 'while grep -qsz -- "^MUSTER_RUN_DIR=$1/logs" /proc/[0-9]*/environ; do sleep 0.1; done' sh "$WORK"
  wait_for_line '"exit_code": 143' logs/latest/verdict.json
  : >neighbour/logs/latest/go
  status_of_launcher
  [ "$status" -eq 0 ]
}


@test "a disk runs full under the logs: the run ends with the rank's own code, and the disk is named" {
  faulty_script
  run timeout 90 "$LAUNCH" --log-dir "$SMALL_DISK" --script "my script.py" - 1 "$N1" "$N2" -- fills 1
  [ "$status" -eq 1 ]
  [[ "$output" == *"agent: rank 1 (pid "*") ended with exit code 1"*"verdict: failed: "* ]]
  [[ "$output" == *"cannot write $SMALL_DISK/my-script-"*"No space left on device"* ]]
  [[ "$output" != *Traceback* ]]
  run ! grep -qsz "^MUSTER_RUN_DIR=$SMALL_DISK" /proc/[0-9]*/environ
}


# A real meeting of 40, without PyTorch: the nodes start this in place of the agent, and each waits for all others.
# pdsh starts 32 at once if nobody says otherwise, and the user's own FANOUT says 8: then none would ever end.
@test "40 nodes named to pdsh all run at once" {
  cat >python <<END
#!/bin/sh
case \$1 in
  */agent.py) : >"here_\$MUSTER_NODE"; while [ "\$(ls -d here_* | wc -l)" -lt 40 ]; do sleep 0.3; done ;;
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
