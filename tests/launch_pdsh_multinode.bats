#!/usr/bin/env bats
#
# launch_pdsh_multinode.sh with a real pdsh on the laboratory: one pdsh starts all nodes, arguments are unchanged, the
# exit code is that of a rank, and no process remains after a process is killed or a node is disconnected.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
# shellcheck source=tests/lab/nodes.bash
source "$BATS_TEST_DIRNAME/lab/nodes.bash"
# shellcheck source=tests/lab/secrets.bash
source "$BATS_TEST_DIRNAME/lab/secrets.bash"


setup_file() {
  export LAUNCH=$BATS_TEST_DIRNAME/../scripts/ssh/launch_pdsh_multinode.sh
  start_lab 3
}


# bats test_tags=quick
@test "pdsh starts all nodes at once, each with its own number of processes and unchanged arguments" {
  write_script <<'END'
assert os.environ["SECRET"] == os.environ["HF_TOKEN"] == open("secret").read()
total = torch.tensor(rank)
dist.all_reduce(total)
with open(f"received.{rank}", "w") as file:
    file.write(f"{socket.gethostname()} {total.item()} {sys.argv[1:]} {os.environ['VALUE']}")
if rank == 0:
    print("finished")
    print("warned", file=sys.stderr)
END
  export FANOUT=1 # if pdsh obeyed it, the second node would never start
  make_secret
  HF_TOKEN=$(<secret)
  export HF_TOKEN
  watch_command_lines
  run --separate-stderr "$LAUNCH" --env-file secrets.env --env SEEN=yes --env "VALUE=%n \$c 'd'" \
    --script "my script.py" - 1 "$N2" "root@$N1:2" "$N3" -- '%h %n' 'x  y' $'a\nb'
  [ "$status" -eq 0 ]
  [ "$output" = finished ]
  grep -qx warned <<<"$stderr"
  hosts=("$N2" "$N1" "$N1" "$N3")
  for number in 0 1 2 3; do
    [ "$(<"received.$number")" = "${hosts[number]} 6 ['%h %n', 'x  y', 'a\\nb'] %n \$c 'd'" ]
  done
  [ "$(cat logs/latest/node_*.exit | sort -u)" = 0 ]
  [[ "$stderr" == *"forwarded to the nodes: "*HF_TOKEN* ]]
  [[ "$stderr" == *"verdict: ok"* ]]
  secret_did_not_leak
  [ ! -e "logs/latest/node_$N1.environment" ]
}


@test "--agent torchrun: the first node that fails stops the other nodes" {
  write_plain_script <<'END'
open(f"started {rank}", "w").close()
while not all(os.path.exists(f"started {other}") for other in range(3)):
    time.sleep(0.05)
if rank == 2:
    sys.exit(42)
time.sleep(300)
END
  run timeout 100 "$LAUNCH" --agent torchrun --script "my script.py" - 1 "$N1" "$N2" "$N3"
  [ "$status" -eq 42 ]
  [[ "$output" == *"$N3: ssh exited with exit code 1"* ]]
  [[ "$output" == *"verdict: failed: rank 2 on $N3 exited with code 42"* ]]
  [ "$(processes_left)" -eq 0 ]
}


@test "--agent torchrun: lines of a rank that imitate pdsh do not change how a run ended" {
  write_plain_script <<END
if rank == 0:
    for node in "$N1", "$N2":
        print(f"pdsh@here: {node}: ssh exited with exit code 0", file=sys.stderr, flush=True)
    open("printed", "w").close()
while not os.path.exists("printed"):
    time.sleep(0.05)
if rank == 1:
    sys.exit(42)
time.sleep(300)
END
  run timeout 60 "$LAUNCH" --agent torchrun --script "my script.py" - 1 "$N1" "$N2"
  [ "$status" -eq 42 ]
  [[ "$output" == *"$N2: ssh exited with exit code 0"*"verdict: failed: rank 1 on $N2 exited with code 42"* ]]
  [ "$(processes_left)" -eq 0 ]
}


@test "--max-restarts: ranks see the number of restarts" {
  use_agent_without_torch
  write_counting_script
  "$LAUNCH" --max-restarts 1 --script "my script.py" - 1 "$N1" "$N2" -- 1 2 3>&-
  all_ranks_saw 2 "0 1" "1 1"
}


@test "Ctrl-C reaches the ranks, which write a checkpoint; exit code 75" {
  use_agent_without_torch
  write_plain_trainer
  start out "$LAUNCH" --script "my script.py" - 1 "$N1" "$N2"
  wait_for_line out "step      3/100000"
  kill -INT -- "-$LAUNCHER"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 75 ]
  [ -e "saved by 0" ] && [ -e "saved by 1" ]
  run ! grep -q interrupt out # pdsh prints no message about it
  [ "$(processes_left)" -eq 0 ]
}


@test "signals to the launcher's process group call each rank's handler once; without a handler, the run is stopped" {
  use_agent_without_torch
  check_signals_to_process_group
}


@test "SIGKILL of the launcher ends pdsh, and leaves no process on any node" {
  use_agent_without_torch
  write_endless_plain_script
  start_endless_script - 1 "$N1" "$N2" "$N3"
  [ "$(pgrep -cf "pdsh -S .*$N1")" -eq 1 ]
  kill -KILL "$LAUNCHER"
  no_processes_within 10
  run ! pgrep -f "pdsh -S .*$N1"
}


# As with ssh, the agents of the other nodes detect the disconnected node when heartbeats time out.
# bats test_tags=soak
@test "a disconnected node ends the run with 69, and its own processes exit" {
  use_agent_without_torch
  write_endless_plain_script
  start_endless_script - 1 "$N1" "$N2" "$N3"
  lab cut "$N3"
  SECONDS=0
  wait_for_exit "$LAUNCHER"
  ((SECONDS <= 30)) # 12 s to detect it, 10 s to stop the other nodes, and time for a busy machine
  [ "$status" -eq 69 ]
  grep -q "$N3: connection to its supervisor lost; stopping the run" logs/latest/launcher.log
  grep -q "verdict: failed: $N3: connection lost" out
  no_processes_within 25
}


@test "no environment stays on a node where the supervisor does not start" {
  write_script <<<''
  mkdir bin
  printf '#!/bin/sh\nexec %q "$@"\n' "$VIRTUAL_ENV/bin/python" >bin/python
  chmod +x bin/python
  on "$N2" mount --bind /dev/null "$PWD/bin/python"
  run -69 timeout 60 "$LAUNCH" --no-preflight --python "$PWD/bin/python" --script "my script.py" - 1 "$N1" "$N2"
  on "$N2" umount "$PWD/bin/python"
  [[ "$output" == *"bin/python: Permission denied"* ]]
  [ ! -e "logs/latest/node_$N2.environment" ]
}


@test "no environment stays on the nodes if pdsh itself fails" {
  write_script <<<''
  mkdir bin
  printf '#!/bin/sh\nls logs/latest/node_*.environment >seen\nexit 3\n' >bin/pdsh
  chmod +x bin/pdsh
  PATH=$PWD/bin:$PATH run -3 timeout 60 "$LAUNCH" --no-preflight --script "my script.py" - 1 "$N1" "$N2"
  [ "$(wc -l <seen)" -eq 2 ]
  run ! compgen -G "logs/latest/node_*.environment"
}


@test "a missing pdsh is reported with a remedy" {
  mkdir bin
  for tool in bash dirname readlink env find stat ls sort; do
    ln -s "$(type -P "$tool")" bin/
  done
  echo >script.py
  PATH=$PWD/bin run -0 "$LAUNCH" --dry-run --script script.py - 1 node1
  PATH=$PWD/bin run "$LAUNCH" --script script.py - 1 "$N1"
  [ "$status" -eq 1 ]
  [[ "$output" == *"pdsh: not found on this machine; install it, or use launch_torchrun_auto.sh"* ]]
}
