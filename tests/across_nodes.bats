#!/usr/bin/env bats
#
# doctor.sh and test_distributed.sh on several nodes: they name a node that differs, an unreachable node, a pair that
# cannot connect and a slow node, and do not hang.

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
  [[ ${lines[2]} == "working directory not found (bash: line 1: cd: $PRIVATE/own: "*"); share it between the nodes, or launch with --sync" ]]
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
