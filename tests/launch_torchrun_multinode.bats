#!/usr/bin/env bats
#
# launch_torchrun_multinode.sh and launch_multinode.sh, started by hand on each node of the laboratory: missing nodes
# are reported, agents detect failures of other nodes without a common launcher, and all nodes have the same verdict.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
# shellcheck source=tests/lab/nodes.bash
source "$BATS_TEST_DIRNAME/lab/nodes.bash"


setup_file() {
  export LAUNCH=$BATS_TEST_DIRNAME/../scripts/ssh/launch_torchrun_multinode.sh
  start_lab 3
  use_agent_without_torch
}


setup() {
  enter_workdir
  PORT=$((20000 + RANDOM % 9000))
}


# Start a launcher on a node, with output to out.<number>. NODE_RANK in arguments is replaced by the number.
by_hand() { # <node> <launcher> <number> <argument...>
  local arguments=("${@:4}")
  start "out.$3" lab ssh "$1" env "WORK=$WORK" bash -c 'cd -- "$WORK" && exec "$@"' bash \
    "$KIT/scripts/ssh/$2" --python "$VIRTUAL_ENV/bin/python" "${arguments[@]//NODE_RANK/$3}"
  PIDS[$3]=$LAUNCHER
}


# bats test_tags=quick
@test "by hand on three nodes: each node prints what it waits for, and arguments are unchanged" {
  VIRTUAL_ENV=$WITH_TORCH
  write_script <<'END'
total = torch.tensor(rank)
dist.all_reduce(total)
with open(f"received.{rank}", "w") as file:
    file.write(f"{socket.gethostname()} {total.item()} {sys.argv[1:]} {os.environ['VALUE']}")
END
  arguments=(--env "VALUE=a 'b' \$c" --script "my script.py" - 1 3 NODE_RANK "$N1" "$PORT" -- 'x  y' '*' $'a\nb' '')
  by_hand "$N2" launch_torchrun_multinode.sh 1 "${arguments[@]}"
  by_hand "$N1" launch_torchrun_multinode.sh 0 "${arguments[@]}"
  wait_for_line out.0 "waiting at $N1:$PORT for node ranks 1 to 2: run the same command on each, with its own NODE_RANK"
  wait_for_line out.1 "joining the first node at $N1:$PORT, where rank 0 prints"
  wait_for_line out.0 "agent: 2 of 3 nodes joined, waiting for node rank 2, "
  wait_for_line out.1 "agent: 2 of 3 nodes joined, waiting for node rank 2, "
  by_hand "$N3" launch_torchrun_multinode.sh 2 "${arguments[@]}"
  for number in 0 1 2; do
    wait_for_exit "${PIDS[number]}"
    [ "$status" -eq 0 ]
    [ "$(<"received.$number")" = "${PREFIX}$((number + 1)) 3 ['x  y', '*', 'a\\nb', ''] a 'b' \$c" ]
    run=$(grep -o "run [^ :]*: " out.0)
    grep "agent: all 3 nodes joined: $N1, $N2, $N3; the first node's ${run/run /run is }" <(sed 's/$/: /' "out.$number")
  done
}


@test "a rank that fails on one node stops all nodes, with the same verdict and exit code" {
  write_plain_script <<'END'
if rank == 2:
    raise ValueError("boom")
time.sleep(300)
END
  arguments=(--script "my script.py" - 1 3 NODE_RANK "$N1" "$PORT")
  for number in 0 1 2; do
    by_hand "${PREFIX}$((number + 1))" launch_multinode.sh "$number" "${arguments[@]}"
  done
  for number in 0 1 2; do
    wait_for_exit "${PIDS[number]}"
    [ "$status" -eq 1 ]
    grep -q "verdict: failed: rank 2 on $N3 raised ValueError: boom" "out.$number"
    grep -q 'File ".*my script.py", line 4' "out.$number"
  done
  [ "$(processes_left)" -eq 0 ]
}


@test "the other nodes report a disconnected node and exit with 69, and its ranks stop" {
  write_endless_plain_script
  arguments=(--script "my script.py" - 1 3 NODE_RANK "$N1" "$PORT")
  for number in 0 1 2; do
    by_hand "${PREFIX}$((number + 1))" launch_torchrun_multinode.sh "$number" "${arguments[@]}"
  done
  wait_for_line out.0 "at work"
  lab cut "$N3"
  SECONDS=0
  for number in 0 1; do
    wait_for_line "out.$number" "agent: $N3: connection lost; stopping the ranks of this node"
    ((SECONDS <= 16))
  done
  no_processes_within 25 # also on the node that is still disconnected
  lab heal "$N3"
  for number in 0 1; do
    wait_for_exit "${PIDS[number]}"
    [ "$status" -eq 69 ]
    grep -q "verdict: failed: $N3: connection lost" "out.$number"
  done
}


@test "after a stop request on one node, the nodes write one checkpoint together, and all exit with 75" {
  VIRTUAL_ENV=$WITH_TORCH
  endless_settings >tiny.yaml
  by_hand "$N1" launch_torchrun_multinode.sh 0 tiny.yaml 1 2 0 "$N1" "$PORT"
  by_hand "$N2" launch_torchrun_multinode.sh 1 tiny.yaml 1 2 1 "$N1" "$PORT"
  wait_for_line out.0 "step      3/100000"
  run=$(grep -om 1 "run [^ :]*" out.1 | cut -d' ' -f2)
  supervisor stop --dir "$WORK/logs/$run" --name "$N2"
  for number in 0 1; do
    wait_for_exit "${PIDS[number]}"
    [ "$status" -eq 75 ]
  done
  [ "$(find "check points" -maxdepth 1 -name 'step_*' | wc -l)" -eq 1 ]
  [ "$(processes_left)" -eq 0 ]
}


@test "a node with a different script is refused, the message has both checksums, and the first node keeps waiting" {
  write_plain_script <<<''
  cp "my script.py" "other.py"
  echo "# newer" >>other.py
  by_hand "$N1" launch_torchrun_multinode.sh 0 --script "my script.py" - 1 2 0 "$N1" "$PORT"
  by_hand "$N2" launch_torchrun_multinode.sh 1 --script other.py - 1 2 1 "$N1" "$PORT"
  wait_for_exit "${PIDS[1]}"
  [ "$status" -eq 69 ]
  grep -q "agent: $N1:$PORT: in use by run .*: the script sha256 .*, but sha256 .* on $N1; make them equal, or " out.1
  wait_for_line out.0 "agent: refused $N2: the script sha256 "
  by_hand "$N2" launch_torchrun_multinode.sh 1 --script "my script.py" - 1 2 1 "$N1" "$PORT"
  for number in 0 1; do
    wait_for_exit "${PIDS[number]}"
    [ "$status" -eq 0 ]
  done
}


@test "later launches on the same port are refused with the name of the running run, which continues" {
  write_plain_script <<'END'
if rank == 0:
    print("at work", flush=True)
while not os.path.exists("go"):
    time.sleep(0.1)
END
  arguments=(--no-preflight --script "my script.py" - 1)
  by_hand "$N1" launch_torchrun_multinode.sh 0 "${arguments[@]}" 2 0 "$N1" "$PORT"
  by_hand "$N2" launch_torchrun_multinode.sh 1 "${arguments[@]}" 2 1 "$N1" "$PORT"
  wait_for_line out.0 "at work"
  by_hand "$N3" launch_torchrun_multinode.sh 2 "${arguments[@]}" 2 1 "$N1" "$PORT"
  by_hand "$N1" launch_torchrun_multinode.sh 3 "${arguments[@]}" 2 0 "$N1" "$PORT"
  for number in 2 3; do
    wait_for_exit "${PIDS[number]}"
    [ "$status" -eq 69 ]
  done
  run_of="in use by run $(grep -o -m1 'my-script-[^ :]*' out.0) (first node $N1, started "
  grep -F "agent: $N1:$PORT: $run_of" out.2 | grep -q "NODE_RANK 1 is taken by $N2; choose another NODE_RANK to join this run"
  grep -F "agent: port $PORT: $run_of" out.3 | grep -q "choose another --master-port"
  : >go
  for number in 0 1; do
    wait_for_exit "${PIDS[number]}"
    [ "$status" -eq 0 ]
  done
}


@test "--max-restarts by hand: after a failure, all nodes join again, and ranks see the number of restarts" {
  local agent
  write_counting_script
  # The script expects two numbers as its arguments, but launch_multinode.sh also passes --local-rank=N.
  sed 's/^failures, ranks.*/failures, ranks = 1, 2/' -i "my script.py"
  for agent in fast torchrun; do
    arguments=(--agent "$agent" --max-restarts 1 --script "my script.py" - 1 2 NODE_RANK "$N1" "$PORT")
    by_hand "$N1" launch_multinode.sh 0 "${arguments[@]}"
    first=$(wait_for_line out.0 ": run " && sed -nE 's/.*: run ([^ ]+): .*/\1/p' out.0)
    by_hand "$N2" launch_multinode.sh 1 "${arguments[@]}"
    for number in 0 1; do
      wait_for_exit "${PIDS[number]}"
      [ "$status" -eq 0 ]
      grep -q "restart 1 of 1" "out.$number"
    done
    [ "$agent" = fast ] || first=none
    RUN_ID=$first all_ranks_saw 2 "0 1" "1 1"
  done
}


@test "a launcher that the user starts again on the second node gets the number of restarts from the first node" {
  write_counting_script
  arguments=(--script "my script.py" - 1 2 NODE_RANK "$N1" "$PORT" -- 1 2)
  by_hand "$N1" launch_torchrun_multinode.sh 0 --max-restarts 3 "${arguments[@]}"
  first=$(wait_for_line out.0 ": run " && sed -nE 's/.*: run ([^ ]+): .*/\1/p' out.0)
  by_hand "$N2" launch_torchrun_multinode.sh 1 "${arguments[@]}"
  wait_for_exit "${PIDS[1]}"
  [ "$status" -eq 3 ]
  by_hand "$N2" launch_torchrun_multinode.sh 1 "${arguments[@]}"
  for number in 0 1; do
    wait_for_exit "${PIDS[number]}"
    [ "$status" -eq 0 ]
  done
  RUN_ID=$first all_ranks_saw 2 "0 3" "1 3"
}


# bats test_tags=quick
@test "launch_multinode.sh passes --local-rank to the script, with either agent" {
  echo 'import sys; print(*sys.argv[1:], file=open(sys.argv[-1], "a"))' >old.py
  run "$KIT/scripts/ssh/launch_multinode.sh" --script old.py - 2 1 0 localhost "$PORT" -- --lr 1 received
  [ "$status" -eq 0 ]
  run "$KIT/scripts/ssh/launch_multinode.sh" --agent torchrun --script old.py - 2 1 0 localhost "$PORT" -- --lr 1 received
  [ "$status" -eq 0 ]
  [ "$(sort received)" = "$(printf -- '--local-rank=%s --lr 1 received\n' 0 0 1 1)" ]
}


@test "wrong arguments are refused before the start, with the value and the remedy" {
  write_plain_script <<<''
  refused 2 "NPROC NNODES NODE_RANK MASTER_ADDR [MASTER_PORT], got:" - 1 2 0
  refused 2 "NNODES: expected a number of nodes, 1 or more, got '0'" --script "my script.py" - 1 0 0 "$N1"
  refused 2 "NODE_RANK: with NNODES 2, expected a number from 0 to 1, got '2'" --script "my script.py" - 1 2 2 "$N1"
  refused 2 "MASTER_PORT: expected a port from 1 to 65535, got '99999'" --script "my script.py" - 1 2 0 "$N1" 99999
  MASTER_PORT=x refused 2 "MASTER_PORT='x' of the environment: expected a port" --script "my script.py" - 1 2 0 "$N1"
  refused 2 "give one of the two" --master-port 1234 --script "my script.py" - 1 2 0 "$N1" 4321
  refused 2 "--sync: unknown option" --sync --script "my script.py" - 1 2 0 "$N1"
  refused 69 "MASTER_ADDR 'nix': cannot be resolved on this node" --script "my script.py" - 1 2 0 nix
  refused 69 "is not an address of this node" --script "my script.py" - 1 2 0 192.0.2.1
  refused 69 "127.0.0.1 is this node (node rank 1); give the address of node rank 0" --script "my script.py" - 1 2 1 localhost
}


@test "--dry-run prints the command of this node, and starts nothing" {
  VIRTUAL_ENV=$WITH_TORCH
  write_plain_script <<<''
  # --dry-run does not check MASTER_ADDR: 192.0.2.1 is no address of this machine, and a1 cannot be resolved.
  run -0 "$KIT/scripts/ssh/launch_multinode.sh" --dry-run --script "my script.py" - 4 2 0 192.0.2.1
  run "$KIT/scripts/ssh/launch_torchrun_multinode.sh" --dry-run --script "my script.py" - 4 2 1 a1 -- 'x y'
  [ "$status" -eq 0 ]
  [[ "$output" == "$(uname -n): "*"--nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr a1 --master-port 29500 "* ]]
  [[ "$output" == *" -- my\\ script.py x\\ y" ]]
  MASTER_PORT=31000 run "$KIT/scripts/ssh/launch_torchrun_multinode.sh" --dry-run --script "my script.py" - 4 2 1 a1
  [[ "$output" == *" --master-port 31000 "* ]]
  MASTER_PORT=31000 run "$KIT/scripts/ssh/launch_torchrun_multinode.sh" --dry-run --script "my script.py" - 4 2 1 a1 32000
  [[ "$output" == *" --master-port 32000 "* ]]
  [ ! -e logs ]
}


@test "--rendezvous-timeout limits how long a node waits for other nodes, with either agent" {
  write_plain_script <<<''
  arguments=(--rendezvous-timeout 1 --no-preflight --script "my script.py" - 1 2 0 127.0.0.1 "$PORT")
  run "$KIT/scripts/ssh/launch_torchrun_multinode.sh" "${arguments[@]}"
  [ "$status" -eq 124 ]
  [[ "$output" == *"waiting for node rank 1; gave up after 1 s"* ]]
  run "$KIT/scripts/ssh/launch_torchrun_multinode.sh" --agent torchrun "${arguments[@]}"
  [ "$status" -eq 1 ]
  [[ "$output" == *"DistStoreError"* ]]
}
