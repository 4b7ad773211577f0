#!/usr/bin/env bats
#
# doctor.sh and test_distributed.sh on several nodes: they name a node that differs, an unreachable node, a pair that
# cannot connect, a slow node, and a rank whose own network interface is slow or broken, and do not hang.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
# shellcheck source=tests/lab/nodes.bash
source "$BATS_TEST_DIRNAME/lab/nodes.bash"


setup_file() {
  export PRIVATE=$BATS_FILE_TMPDIR/private
  mkdir -p "$PRIVATE/own"
  start_lab 3 --private "$PRIVATE"
  python3 -m venv --without-pip "$BATS_FILE_TMPDIR/bare" # without PyTorch, doctor.sh takes less time
}


setup() {
  unset CUDA_VISIBLE_DEVICES
  enter_workdir
}


teardown() {
  lab heal "$N3" >/dev/null 2>&1 || true
  lab ssh "$N2" ip link set eth0 mtu 1500
  lab ssh "$N2" iptables -F INPUT
  : >"$MUSTER_LAB/bashrc"
  local node
  for node in "$N1" "$N2" "$N3"; do
    on "$node" ip link del eth1 2>/dev/null || true
  done
}


# N3 cannot connect to N2; all other connections work.
block_connections_from_3_to_2() {
  lab ssh "$N2" iptables -A INPUT -s "$(lab ssh "$N3" hostname -I | cut -d' ' -f1)" -p tcp -m tcp --syn -j DROP
}


smoke_test() { # <argument of test_distributed.sh...>
  "$KIT/scripts/test_distributed.sh" --max-bytes 64K --seconds 0.2 "$@" 3>&-
}


@test "doctor.sh groups nodes without differences, and checks that each can connect to every other" {
  run --separate-stderr "$KIT/scripts/doctor.sh" --quiet "${PREFIX}[1-3]"
  [ "$status" -eq 0 ]
  [[ ${lines[0]} == *" python "*" torch "*" cores "*" network" ]]
  [[ ${lines[1]} == "${PREFIX}[1-3]  3."*" eth0" ]]
  [[ ${lines[-1]} == "3 nodes: all fit for training; each can connect to every other"* ]]
  [[ -z $stderr ]]
}


@test "doctor.sh names a node that differs, one that others cannot connect to, and one that is unreachable" {
  lab ssh "$N2" ip link set eth0 mtu 1400
  block_connections_from_3_to_2
  echo 'echo "Welcome to $(uname -n)!"' >"$MUSTER_LAB/bashrc"
  mkdir config
  echo '[[ $(uname -n) != *3 ]] || export NCCL_IB_DISABLE=1' >config/node_env.sh
  run --separate-stderr "$KIT/scripts/doctor.sh" --python "$BATS_FILE_TMPDIR/bare/bin/python" "$N1" "$N2" "$N3" nowhere
  [ "$status" -eq 69 ]
  [ "$(grep -c "PyTorch is not installed" <<<"$output")" -eq 1 ]
  # Other findings about this machine change the width of columns.
  [[ $(tr -s ' ' <<<"$output") == *$'\n'"$N2"$'\n'*"warning MTU 1400 bytes, but 1500 bytes on ${PREFIX}[1,3]"$'\n'* ]]
  [[ $(tr -s ' ' <<<"$output") == *$'\n'"$N3"$'\n'*"warning NCCL NCCL_IB_DISABLE=1 is set, but nothing is set on ${PREFIX}[1-2]"$'\n'* ]]
  [[ $(tr -s ' ' <<<"$output") == *"fault reach cannot connect to $N2 ("*"): no reply within 3 s: a firewall between them?"* ]]
  [[ $output == *$'\n'"nowhere"$'\n'"fault    ssh  cannot be reached (ssh: Could not resolve hostname nowhere: "* ]]
  [[ ${lines[-1]} == "4 nodes: none fit for training; ${PREFIX}[1-3],nowhere are not" ]]
}


@test "doctor.sh does not wait for background processes of node_env.sh, and names a node on which node_env.sh fails" {
  mkdir config
  echo "export COMPANION='$PWD'; while sleep 60; do :; done & case \$(uname -n) in *2) none ;; esac" >config/node_env.sh
  run --separate-stderr timeout 60 \
    "$KIT/scripts/doctor.sh" --python "$BATS_FILE_TMPDIR/bare/bin/python" "$N1" "$N2"
  [ "$status" -eq 69 ]
  [[ $(tr -s ' ' <<<"$output") == *$'\n'"$N2"$'\n'*"config/node_env.sh: line 1: '"*"' failed with exit code 127; fix it, or write '"* ]]
  [[ $output != *"Muster not found"* ]]
  run ! grep -lsFxz -- "COMPANION=$PWD" /proc/[0-9]*/environ
}


@test "doctor.sh names a node without the working directory, and reports the facts of the other nodes" {
  local node
  for node in "$N1" "$N2"; do
    lab ssh "$node" mkdir -p "$PRIVATE/own"
  done
  cd "$PRIVATE/own"
  "$KIT/scripts/doctor.sh" --json --python "$BATS_FILE_TMPDIR/bare/bin/python" "${PREFIX}[1-3]" >"$BATS_TEST_TMPDIR/facts" &&
    status=0 || status=$?
  [ "$status" -eq 69 ]
  run -0 python3 -c 'import json, sys
for node, found in json.load(open(sys.argv[1])).items(): print(found.get("error") or found["facts"]["directory"])' \
    "$BATS_TEST_TMPDIR/facts"
  [[ ${lines[0]} == "$PRIVATE/own" && ${lines[1]} == "$PRIVATE/own" ]]
  [[ ${lines[2]} == "working directory not found (cd: $PRIVATE/own: "*"); share it between the nodes, or launch with --sync" ]]
}


@test "test_distributed.sh names a pair of nodes that cannot connect, and starts no rank" {
  block_connections_from_3_to_2
  run --separate-stderr smoke_test 1 "${PREFIX}[1-3]"
  [ "$status" -eq 69 ]
  [[ $stderr == *"connectivity: $N3 cannot connect to $N2 ("*"): no reply within 3 s: a firewall between them?; open TCP "* ]]
  [[ -z $output ]]
  [ ! -e logs ]
  run --separate-stderr smoke_test 1 "$N1" nowhere
  [ "$status" -eq 69 ]
  [[ $stderr == *"connectivity: nowhere: cannot be reached (ssh: Could not resolve hostname nowhere: "* && -z $output ]]
}


@test "test_distributed.sh names a slow node and the bandwidths, and writes the report to the run directory too" {
  lab slow "$N3" 20000
  smoke_test --json --quiet 1 "${PREFIX}[1-3]" >report.json && status=0 || status=$?
  [ "$status" -eq 1 ]
  cmp report.json logs/latest/smoke.json
  run -0 "$VIRTUAL_ENV/bin/python" -c 'import json
report = json.load(open("report.json"))
print(report["world"]["size"], report["world"]["nodes"], *(rank["host"] for rank in report["ranks"]))
print(*(check["summary"] for check in report["checks"] if check["status"] == "fault"), sep="\n")'
  [[ ${lines[0]} == "3 3 $N1 $N2 $N3" ]]
  [[ ${lines[1]} =~ ^"$N3: "[0-9.]+" MB/s to ${PREFIX}"[12]", "[0-9.]+" MB/s to ${PREFIX}"[12]"; the others have "[0-9.]+" "[GM]"B/s among themselves"$ ]]
  [[ ${#lines[@]} -eq 2 ]]
}


# bats test_tags=soak
@test "test_distributed.sh finds no fault on two healthy nodes, one with two ranks" {
  run --separate-stderr smoke_test 1 "$N1" "$N2:2"
  [ "$status" -eq 0 ]
  [[ ${lines[0]} == "smoke test: 3 ranks on 2 nodes, gloo, torch "* ]]
  [[ $output == *"  ok      links           no slow node and no slow link between nodes"* ]]
  [[ ${lines[-1]} == "verdict: ok, 3 ranks passed all checks" ]]
}


# Give each node a second interface, in a second network.
add_second_interfaces() { # <node...>
  local node
  for node; do
    nsenter --net="$MUSTER_LAB/switch" ip link add "${node}b" master switch up type veth \
      peer name eth1 netns "$MUSTER_LAB/$node/net"
    on "$node" ip address add "$(address "$node" | sed 's/\.0\.\([0-9]*\)$/.1.\1/')/24" dev eth1
    on "$node" ip link set eth1 up
  done
}


# Test two ranks per node. The second rank uses the second interface, as ranks use the network adapter near their GPU.
# The rank BREAKS loses all messages to its interface from its first message to another node on.
test_two_interfaces() { # <timeout> <node...>
  local nodes=("${@:2}") rank ranks=$((2 * ($# - 1))) pids=()
  cat >breaks_a_link.py <<'PYTHON'
import os, subprocess, sys
sys.path.insert(0, os.environ["KIT"])
from distributed.smoke import collective_checks
begin = collective_checks.RankContext.begin
def begin_and_break(context, step, expected=0.0):
    begin(context, step, expected)
    if step.startswith("link to") and str(context.world.rank) == os.environ["BREAKS"]:
        subprocess.run(["iptables", "-I", "INPUT", "-i", "eth1", "-j", "DROP"], check=True)
collective_checks.RankContext.begin = begin_and_break
sys.exit(collective_checks.main(sys.argv[1:]))
PYTHON
  for ((rank = 0; rank < ranks; rank++)); do
    local node=${nodes[rank / 2]}
    on "$node" env MUSTER_NODE="$node" RANK=$rank WORLD_SIZE=$ranks LOCAL_RANK=$((rank % 2)) LOCAL_WORLD_SIZE=2 \
      NODE_RANK=$((rank / 2)) NNODES=$((ranks / 2)) MASTER_ADDR="$(address "${nodes[0]}")" MASTER_PORT=29876 \
      GLOO_SOCKET_IFNAME=eth$((rank % 2)) BREAKS="${BREAKS-}" "$VIRTUAL_ENV/bin/python" "$PWD/breaks_a_link.py" \
      --max-bytes 1048576 --seconds 0.2 --timeout "$1" >"out$rank" 2>&1 &
    pids+=($!)
  done
  wait "${pids[@]}" || status=$?
  cat out*
}


# Slow the second interface of a node down, in both directions.
slow_second_interface() { # <node>
  local limit=(root tbf rate 20mbit latency 200ms burst 25kb)
  on "$1" tc qdisc add dev eth1 "${limit[@]}"
  nsenter --net="$MUSTER_LAB/switch" tc qdisc add dev "${1}b" "${limit[@]}"
}


@test "the smoke test names the rank whose own interface is slow" {
  add_second_interfaces "$N1" "$N2" "$N3"
  slow_second_interface "$N3"
  run test_two_interfaces 60 "$N1" "$N2" "$N3"
  echo "$output"
  [[ $output =~ "FAULT   links           rank 5 on $N3 (eth1): "[0-9.]+" MB/s to rank "[13]" on ${PREFIX}"[12]" (eth1), "[0-9.]+" MB/s to rank "[13]" on ${PREFIX}"[12]" (eth1); the others have "[0-9.]+" "[GM]"B/s among themselves"$'\n'" "*"-> " ]]
  [[ $output == *"verdict: FAULT in links"* ]]
}


# bats test_tags=soak
@test "the smoke test names the pair of ranks if the interface of either could be slow" {
  add_second_interfaces "$N1" "$N2" "$N3"
  slow_second_interface "$N3"
  run test_two_interfaces 60 "$N2" "$N3"
  echo "$output"
  [[ $output =~ "FAULT   links           rank 1 on $N2 (eth1) and rank 3 on $N3 (eth1): "[0-9.]+" MB/s; the others have "[0-9.]+" "[GM]"B/s among themselves"$'\n'" "*"-> " ]]
  run test_two_interfaces 60 "$N1" "$N2"
  echo "$output"
  [[ $output == *"verdict: ok, 4 ranks passed all checks"* ]]
}


# bats test_tags=soak
@test "the smoke test names the two ranks whose link breaks, before the ranks that wait for them" {
  add_second_interfaces "$N1" "$N2" "$N3"
  BREAKS=5 run test_two_interfaces 30 "$N1" "$N2" "$N3"
  echo "$output"
  [[ $output =~ "FAULT   links           rank "[13]" on ${PREFIX}"[12]" (link to rank 5 on $N3 (eth1)): expected a result, got RuntimeError: "[^$'\n']*$'\n'" "+"rank 5 on $N3 (link to rank "[13]" on ${PREFIX}"[12]" (eth1)): " ]]
}


# Compile a library that sets the clock of a process ahead by SHIFT seconds, and converts times back for waits.
make_shifted_clock() {
  g++ -shared -fPIC -O1 -o "$BATS_FILE_TMPDIR/shifted_clock.so" -x c++ - <<'CPP'
#include <cstdlib>
#include <dlfcn.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>
static time_t shift() {
  const char *seconds = getenv("SHIFT");
  return seconds ? atoi(seconds) : 0;
}
extern "C" int clock_gettime(clockid_t clock, struct timespec *now) noexcept {
  int result = syscall(SYS_clock_gettime, clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += shift();
  return result;
}
extern "C" int gettimeofday(struct timeval *now, void *) noexcept {
  struct timespec exact;
  int result = clock_gettime(CLOCK_REALTIME, &exact);
  *now = {exact.tv_sec, exact.tv_nsec / 1000};
  return result;
}
extern "C" time_t time(time_t *result) noexcept {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (result) *result = exact.tv_sec;
  return exact.tv_sec;
}
extern "C" int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *end) {
  using Wait = int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  static Wait wait = reinterpret_cast<Wait>(dlsym(RTLD_NEXT, "pthread_cond_timedwait"));
  struct timespec shifted = {end->tv_sec - shift(), end->tv_nsec};
  return wait(condition, mutex, &shifted);
}
CPP
}


@test "the rank that failed first is named, although the clock of its node is 5 s ahead or behind" {
  cat >fails_first.py <<'PYTHON'
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(200):
    if step == 10 and dist.get_rank() == int(sys.argv[1]):
        raise SystemExit(3)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        time.sleep(1)  # the scheduler decides which of two agents is first to see exits within milliseconds
        raise SystemExit(4) from None
    time.sleep(0.02)
PYTHON
  make_shifted_clock
  local seconds launch
  for seconds in 5 -5; do
    echo "case \$(uname -n) in *2) export SHIFT=$seconds LD_PRELOAD='$BATS_FILE_TMPDIR/shifted_clock.so' ;; esac" \
      >"$MUSTER_LAB/bashrc"
    launch=(timeout 100 "$KIT/scripts/ssh/launch_torchrun_auto.sh" --script fails_first.py - 1 "$N1" "$N2"
      -- "$((seconds > 0))")
    run -3 "${launch[@]}" </dev/null
    echo "$output"
    [[ $output == *"verdict: failed: rank $((seconds > 0)) on "*" exited with code 3"* ]]
    grep -q "\"first\": \"$PREFIX$((1 + (seconds > 0)))\"" logs/latest/errors/node_"$N2".json
    # torchrun records whole seconds.
    run "${launch[@]:0:3}" --agent torchrun "${launch[@]:3}" </dev/null
    echo "$output"
    [[ $output == *"verdict: failed: "*"rank $((seconds > 0)) on "*" exited with code 3"* ]]
  done
}
