#!/usr/bin/env bats
#
# --max-restarts: agents stay for the next attempt where they can, spare nodes take the places of lost nodes, or the run
# goes on with fewer nodes.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
# shellcheck source=tests/lab/nodes.bash
source "$BATS_TEST_DIRNAME/lab/nodes.bash"


setup_file() {
  export SSH=$BATS_TEST_DIRNAME/../scripts/ssh
  start_lab 4
  use_agent_without_torch
}


setup() {
  enter_workdir
  N4=${PREFIX}4
  LAUNCH=$SSH/launch_torchrun_auto.sh
}


teardown() {
  lab heal "$N1" >/dev/null 2>&1 || true
  lab heal "$N3" >/dev/null 2>&1 || true
  lab up 4 --prefix "$PREFIX" >/dev/null
  sweep_runs
}


# Write "my script.py": each rank writes its process id and that of its agent to attempt.<number>.<rank>, and runs until
# the file "go" exists. With an argument, the ranks exchange data.
write_steady_script() {
  write_plain_script <<'END'
def ends():
    return os.path.exists("go")
if sys.argv[1:]:
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    def ends():
        dist.all_reduce(stop := torch.tensor([float(os.path.exists("go"))]), op=dist.ReduceOp.MIN)
        return stop.item()
name = f"attempt.{os.environ['TORCHELASTIC_RESTART_COUNT']}.{rank}"
with open(f"{name}.part", "w") as file:
    print(os.getpid(), os.getppid(), os.environ["MUSTER_NODE"], file=file)
os.rename(f"{name}.part", name)
print("rank", rank, "of attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
while not ends():
    time.sleep(0.01)
END
}


# Start "my script.py", and wait until the ranks of its first attempt are at work.
launch() { # <number of ranks> <argument of LAUNCH...>
  write_steady_script
  start out "$LAUNCH" --max-restarts 3 --script "my script.py" "${@:2}"
  ranks_at_work 0 "$1"
}


ranks_at_work() { # <attempt> <number of ranks>
  local rank
  for ((rank = 0; rank < $2; rank++)); do
    # shellcheck disable=SC2016
    timeout 120 sh -c 'until [ -e "$1" ]; do sleep 0.02; done' sh "attempt.$1.$rank" || { cat out && return 1; }
  done
}


# Let the run end, and check that it succeeded and left nothing.
succeeds() {
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ] || { cat out && return 1; }
  no_processes_within 10
}


rank_of() { # <attempt> <rank>: its process id
  awk '{ print $1 }' "attempt.$1.$2"
}


agent_of() { # <attempt> <rank>: the process id of its agent
  awk '{ print $2 }' "attempt.$1.$2"
}


node_of() { # <attempt> <rank>
  awk '{ print $3 }' "attempt.$1.$2"
}


@test "on one machine, the agent stays, and each attempt has its own log files, verdict and restart count" {
  LAUNCH=$SSH/launch_singlenode.sh
  launch 2 - 2
  kill -KILL "$(rank_of 0 1)"
  ranks_at_work 1 2
  kill -SEGV "$(rank_of 1 0)"
  ranks_at_work 2 2
  [ ! -e logs/latest/report.html ] # no attempt waits for it
  succeeds
  [[ "$(grep -c '^report ' out)" == 1 && "$(tail -n 1 out)" == "report "*/report.html && -s logs/latest/report.html ]]
  [ "$(agent_of 0 0)" = "$(agent_of 2 1)" ]
  node=$(uname -n)
  grep -qF "rank 1 on $node died of SIGKILL" logs/latest/attempts/1/verdict.json
  grep -qF "rank 0 on $node died of SIGSEGV" logs/latest/attempts/2/verdict.json
  [ "$(<"logs/latest/attempts/1/node_$node.exit")" -ne 0 ] # the code depends on which failure the agent noticed first
  [ "$(<"logs/latest/node_$node.exit")" -eq 0 ]
  [ -d "logs/latest/attempts/2/ranks/$node" ] && [ -d "logs/latest/ranks/$node" ]
}


@test "over ssh, all agents stay for the next attempt" {
  with_torch launch 3 - 1 "$N1" "$N2" "$N3" -- exchange
  kill -KILL "$(rank_of 0 2)"
  ranks_at_work 1 3
  succeeds
  for rank in 0 1 2; do
    [ "$(agent_of 0 $rank)" = "$(agent_of 1 $rank)" ]
  done
  grep -qF "rank 2 on $N3 died of SIGKILL" logs/latest/attempts/1/verdict.json
}


@test "if an agent, a fork server or a supervisor dies, only its node gets a new agent" {
  local attempt=0 victim
  launch 2 - 1 "$N1" "$N2"
  for kind in agent fork_server supervisor; do
    case $kind in
      agent) victim=$(agent_of $attempt 1) ;;
      fork_server)
        victim=$(pgrep -P "$(agent_of $attempt 1)" -f agent)
        kill -KILL "$(rank_of $attempt 1)"
        ;;
      supervisor) victim=$(pid_of supervisor "$N2") ;;
    esac
    kill -KILL "$victim"
    attempt=$((attempt + 1))
    ranks_at_work $attempt 2
    [ "$(agent_of $((attempt - 1)) 0)" = "$(agent_of $attempt 0)" ]
    [ "$(agent_of $((attempt - 1)) 1)" != "$(agent_of $attempt 1)" ]
  done
  succeeds
}


@test "with pdsh, all agents stay for the next attempt" {
  LAUNCH=$SSH/launch_pdsh_multinode.sh
  launch 2 - 1 "$N1" "$N2"
  kill -KILL "$(rank_of 0 1)"
  ranks_at_work 1 2
  succeeds
  [ "$(agent_of 0 0) $(agent_of 0 1)" = "$(agent_of 1 0) $(agent_of 1 1)" ]
}


@test "nodes that are started by hand keep their agents for the next attempt" {
  LAUNCH=$SSH/launch_torchrun_multinode.sh
  write_steady_script
  call=(env -C "$PWD" "$LAUNCH" --max-restarts 1 --script "my script.py" - 1 2)
  start out1 on "$N1" "${call[@]}" 0 "$(address "$N1")"
  first=$LAUNCHER
  start out on "$N2" "${call[@]}" 1 "$(address "$N1")"
  ranks_at_work 0 2
  kill -KILL "$(rank_of 0 1)"
  ranks_at_work 1 2
  succeeds
  wait_for_exit "$first"
  [ "$status" -eq 0 ]
  [ "$(agent_of 0 0) $(agent_of 0 1)" = "$(agent_of 1 0) $(agent_of 1 1)" ]
}


@test "processes that a rank has left behind are gone before the next attempt" {
  LAUNCH=$SSH/launch_singlenode.sh
  cat >"my script.py" <<'END'
import os, subprocess, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    with open("left", "w") as file:
        print(subprocess.Popen(["sleep", "300"], start_new_session=True).pid, file=file)
    sys.exit(3)
with open("left") as file:
    state = f"/proc/{int(file.read())}"
sys.exit("it still runs" if os.path.exists(state) else 0)
END
  "$LAUNCH" --max-restarts 1 --script "my script.py" - 1 3>&-
}


@test "a stop request, or the death of the launcher, ends a run whose agents have stayed for a second attempt" {
  launch 2 - 1 "$N1" "$N2"
  kill -KILL "$(rank_of 0 1)"
  ranks_at_work 1 2
  kill -TERM "$LAUNCHER"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 143 ]
  no_processes_within 10
  rm attempt.*
  launch 2 - 1 "$N1" "$N2"
  kill -KILL "$(rank_of 0 1)"
  ranks_at_work 1 2
  kill -KILL "$LAUNCHER"
  no_processes_within 20
}


# The ranks of the other nodes lose their connections, whether the script handles that or not. The case without an
# error in its line uses PyTorch.
@test "a signal to the supervisor or agent of one node stops the run, which is not restarted" {
  local option launcher role error
  while IFS=, read -r option launcher role error; do
    local with=()
    [ "$error" ] || with=(with_torch)
    [ "$error" ] || write_script <<'END'
print("at work", flush=True)
while True:
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        raise ValueError("a rank is gone")
END
    [ ! "$error" ] || write_plain_script <<END
own, other = (f"{os.environ['MUSTER_RUN_DIR']}/pid_{one}" for one in (rank, 1 - rank))
with open(f"{own}.part", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{own}.part", own)
while not os.path.exists(other):
    time.sleep(0.01)
print("at work", flush=True)
while True:
    time.sleep(0.01)
    try:
        os.kill(int(open(other).read()), 0)
    except ProcessLookupError:
        raise $error from None
END
    # shellcheck disable=SC2086 # an option and its value
    "${with[@]}" start out "$SSH/launch_$launcher.sh" $option --script "my script.py" - 1 "$N1" "$N2"
    wait_for_line out "at work"
    kill -TERM "$(pid_of "$role" "$N2")"
    wait_for_exit "$LAUNCHER"
    [ "$status" -eq 143 ] || { cat out && false; }
    grep -q "verdict: stopped: interrupted by SIGTERM to the ${role/command/agent} on $N2" out || { cat out && false; }
    run ! grep -E "restart|missing" out
    no_processes_within 10
  done <<'END'
--max-restarts 3,torchrun_auto,supervisor,RuntimeError("Connection closed by peer")
--max-restarts 3,torchrun_auto,command,ValueError("a rank is gone")
--max-restarts 3,pdsh_multinode,supervisor,ValueError("a rank is gone")
--max-restarts 3,pdsh_multinode,command,RuntimeError("Connection closed by peer")
--lease 0,torchrun_auto,supervisor,
--lease 0,torchrun_auto,command,RuntimeError("Connection closed by peer")
,torchrun_auto,command,RuntimeError("Connection closed by peer")
END
}


@test "when the restarts are used up, the agents exit, with the code of the first failure" {
  for launcher in singlenode torchrun_auto pdsh_multinode; do
    nodes=("$N1" "$N2")
    [ $launcher != singlenode ] || nodes=()
    echo 'import sys; sys.exit(3)' >"my script.py"
    run -3 "$SSH/launch_$launcher.sh" --max-restarts 1 --script "my script.py" - 1 "${nodes[@]}" 3>&-
    [[ "$output" == *"restart 1 of 1"* ]]
    no_processes_within 10
  done
}


@test "a spare node takes the place of a node that was cut off, even if that is the first node" {
  with_torch launch 3 --spares "$N4" - 1 "$N1" "$N2" "$N3" -- exchange
  lab cut "$N1"
  ranks_at_work 1 3
  [ "$(node_of 1 0)" = "$N4" ]
  lab heal "$N1"
  succeeds
  grep -qF "$N1 is lost (connection lost): $N4 takes its place as node rank 0" logs/latest/launcher.log
  grep -qF "$N4 takes its place" logs/latest/verdict.json
  grep -qF "$N4 takes its place" logs/latest/report.html
  [[ "$("$SSH/../status.sh" latest)" == *"$N4 takes its place"* ]]
}


# pdsh exits with the code of the lost node, but the outcome of the last attempt comes from its nodes.
@test "with pdsh, a spare node takes the place of a node that lost power, or the run goes on with fewer nodes" {
  local nodes
  LAUNCH=$SSH/launch_pdsh_multinode.sh
  for nodes in "$N1 $N4" "$N1"; do
    rm -rf attempt.* go
    [ "$nodes" = "$N1" ] && set -- --min-nodes 1 || set -- --spares "$N4"
    launch 2 "$@" - 1 "$N1" "$N3"
    lab kill "$N3"
    ranks_at_work 1 "$(wc -w <<<"$nodes")"
    [ "$(cat attempt.1.* | awk '{ print $3 }' | xargs)" = "$nodes" ]
    wait_for_line out "$N3: ssh exited with exit code 255"
    succeeds
    grep -qF "verdict: ok" out && run ! grep "restart 2" out
    lab up 4 --prefix "$PREFIX" >/dev/null
  done
}


# bats test_tags=soak
@test "a node that is frozen and cut off during a save cannot publish its checkpoint when the run went on without it" {
  cat >tiny.yaml <<END
model: {n_layer: 1, n_head: 2, n_embd: 16, block_size: 16}
train: {steps: 12, batch_size: 12, learning_rate: 1e-2, evaluate_every: 0}
data: {path: text.txt}
checkpoint: {dir: checkpoints, every: 4, keep: 3}
logging: {every: 1, sample: 0}
END
  head -c 4000 /dev/zero | tr '\0' a >text.txt
  local train=(--script "$BATS_TEST_DIRNAME/lab/faulty_train.py" tiny.yaml 1 "$N1" "$N2")
  "$LAUNCH" "${train[@]}" -- checkpoint.dir=undisturbed
  : >hold
  start out "$LAUNCH" --max-restarts 3 --lease 120 --spares "$N4" "${train[@]}"
  timeout 60 sh -c 'until [ -d checkpoints/writing-*/step_00000004 ]; do sleep 0.02; done'
  local frozen published=checkpoints/step_00000004/state.pt inode
  mapfile -t frozen < <(grep -lsz "^MUSTER_NODE=$N1$" /proc/[0-9]*/environ | cut -d / -f 3; pid_of supervisor "$N1")
  kill -STOP "${frozen[@]}"
  lab cut "$N1"
  timeout 90 sh -c 'until [ -e "$1" ]; do sleep 0.1; done' sh "$published" # the second attempt publishes it
  inode=$(stat -c %i "$published")
  mv hold released
  kill -CONT "${frozen[@]}"
  lab heal "$N1"
  succeeds
  [ "$(stat -c %i "$published")" = "$inode" ]
  grep -qF "$N1 is lost (connection lost): $N4 takes its place as node rank 0" logs/latest/launcher.log
  [ "$(ls checkpoints)" = "$(ls undisturbed)" ]
  cmp checkpoints/step_00000012/state.pt undisturbed/step_00000012/state.pt
}


@test "--min-nodes goes on with fewer nodes, and a node that replies again takes part after the next failure" {
  launch 3 --min-nodes 2 --console-rank last - 1 "$N1" "$N2" "$N3"
  wait_for_line out "rank 2 of attempt 0"
  lab cut "$N3"
  ranks_at_work 1 2
  grep -qF "$N3 is lost (connection lost): continuing without it" out
  lab heal "$N3"
  wait_for_line out "$N3: ready as a spare node"
  kill -KILL "$(rank_of 1 1)"
  ranks_at_work 2 3
  [ "$(node_of 2 2)" = "$N3" ]
  succeeds
  [ "$(grep -x 'rank . of attempt .' out)" = "$(printf 'rank %s\n' '2 of attempt 0' '1 of attempt 1' '2 of attempt 2')" ]
}


@test "a wrong use of --spares and --min-nodes is refused" {
  echo 1 >"my script.py"
  refused 2 "give --max-restarts too" --spares "$N4" --script "my script.py" - 1 "$N1"
  refused 2 "give --max-restarts too" --min-nodes 1 --script "my script.py" - 1 "$N1"
  refused 2 "--min-nodes 2: this run has fewer nodes (1)" --max-restarts 1 --min-nodes 2 --script "my script.py" - 1 "$N1"
  refused 2 "$N1 is already a node of this run" --max-restarts 1 --spares "$N1" --script "my script.py" - 1 "$N1"
  refused 2 "expected a number of nodes" --max-restarts 1 --min-nodes x --script "my script.py" - 1 "$N1"
  refused 69 "nowhere: " --max-restarts 1 --spares nowhere --script "my script.py" - 1 "$N1"
}
