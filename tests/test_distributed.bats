#!/usr/bin/env bats
#
# scripts/test_distributed.sh prints one report on standard output, its exit code agrees with the report, and wrong
# arguments start nothing.

bats_require_minimum_version 1.5.0


setup() {
  KIT=$(readlink -f "$BATS_TEST_DIRNAME/..")
  TEST_DISTRIBUTED=$KIT/scripts/test_distributed.sh
  export VIRTUAL_ENV=${VIRTUAL_ENV:-$KIT/.venv} GLOO_SOCKET_IFNAME=lo
  export TMPDIR="$BATS_TEST_TMPDIR/it's temporary"
  mkdir -- "$TMPDIR" "$BATS_TEST_TMPDIR/it's a directory"
  cd -- "$BATS_TEST_TMPDIR/it's a directory" || return
}


# Run test_distributed.sh with small messages and short measurements, and with a timeout that suits a busy machine.
quick() { # <option or N...>
  "$TEST_DISTRIBUTED" --quiet --max-bytes 4K --seconds 0.1 --timeout 120 "$@"
}


field() { # <name> <file>; print a field of the JSON object in a file
  "$VIRTUAL_ENV/bin/python" -c 'import json, sys; print(json.load(open(sys.argv[2]))[sys.argv[1]])' "$@"
}


# bats test_tags=slow,quick
@test "two processes: standard output is the report" {
  run --separate-stderr quick 2
  [[ $status == 0 ]]
  [[ ${lines[0]} == "smoke test: 2 ranks on 1 node, gloo, torch "* ]]
  [[ ${lines[-1]} == "verdict: ok, 2 ranks passed all checks" ]]
  [[ $output == *"  ok      all_reduce "* ]]
  [[ $output == *"bus bandwidth, GB/s"* ]]
  run ! grep -q 'FAULT' <<<"$output"
}


# bats test_tags=slow
@test "--json prints one object and nothing else, also with torchrun's agent" {
  quick --json --agent torchrun 1 >report.json
  [[ $(field verdict report.json) == ok ]]
  [[ $(field world report.json) == *"'size': 1"* ]]
  [[ -e logs/latest/run.json ]]
}


# bats test_tags=slow
@test "a failed check is in the report and in the exit code" {
  run --separate-stderr quick --json --timeout 20 --env GLOO_SOCKET_IFNAME=none0 2
  [[ $status == 1 ]]
  printf '%s' "$output" >report.json
  [[ $(field verdict report.json) == fault ]]
  [[ $(field checks report.json) == *"'name': 'join', "*"2 ranks"* ]]
}


@test "wrong arguments are refused with a reason and start nothing" {
  while IFS='|' read -r arguments message; do
    # shellcheck disable=SC2086
    run --separate-stderr "$TEST_DISTRIBUTED" $arguments
    [[ $status == 2 ]] || { echo "$arguments: exit code $status"; false; }
    [[ -z $output ]] || { echo "$arguments: $output"; false; }
    # shellcheck disable=SC2154
    [[ ${stderr_lines[0]} == "test_distributed.sh: $message"* ]] || { echo "$arguments: $stderr"; false; }
    [[ ${stderr_lines[1]} == "Try: test_distributed.sh --help" ]]
  done <<'END'
0|NPROC: expected a number of processes from 1 to 1024, got '0'
-1|NPROC: expected a number of processes from 1 to 1024, got '-1'
abc|NPROC: expected a number of processes from 1 to 1024, got 'abc'
2.5|NPROC: expected a number of processes from 1 to 1024, got '2.5'
02|NPROC: expected a number of processes from 1 to 1024, got '02'
|NPROC: missing; give the number of processes
9999|NPROC: expected a number of processes from 1 to 1024, got '9999'
2 --exclude node1|--exclude 'node1': requires NODE... or --hostfile
--nproc 2|--nproc: unknown option; give NPROC without an option: test_distributed.sh [options] NPROC [NODE...]
--max-bytes 3Q 2|--max-bytes: expected a size such as 1024, 64K, 16M or 1G, at least 1K, got '3Q'
--max-bytes 1023 2|--max-bytes: expected a size such as 1024, 64K, 16M or 1G, at least 1K, got '1023'
--min-bytes 8 2|--min-bytes: leave it out; the smallest message has 1K
--min-bytes=8 2|--min-bytes: leave it out; the smallest message has 1K
--seconds 0 2|--seconds: expected a number of seconds above 0, got '0'
--timeout soon 2|--timeout: expected a number of seconds above 0, got 'soon'
--backend mpi 2|--backend: expected auto, nccl or gloo, got 'mpi'
2 --seconds|--seconds needs a value
--python /nowhere/python 2|no Python at '/nowhere/python'
END
  [[ -z $(ls -A) ]]
}


@test "more processes than GPUs are refused (with a stub of nvidia-smi)" {
  mkdir stub
  cat >stub/nvidia-smi <<'END'
#!/usr/bin/env bash
# Stub: prints what nvidia-smi prints with --format=csv,noheader,nounits.
case $* in *query-gpu*) echo "0, GPU-aa, 580.65.06, 81920, 4, Disabled, Default, Disabled, STUB" ;; esac
END
  chmod +x stub/nvidia-smi
  PATH=$PWD/stub:$PATH run --separate-stderr "$TEST_DISTRIBUTED" 2
  [[ $status == 2 && -z $output ]]
  [[ $stderr == *"NPROC 2: this machine has 1 GPU; start at most one process per GPU"* ]]
  [[ ! -e logs ]]
}


@test "--dry-run prints the command and runs nothing" {
  run --separate-stderr "$TEST_DISTRIBUTED" --dry-run --backend gloo --max-bytes 1M 3
  [[ $status == 0 ]]
  [[ $output == *"--nproc-per-node 3 "*"/scripts/lib/smoke.py --backend gloo --max-bytes 1048576 "* ]]
  run -0 "$TEST_DISTRIBUTED" --dry-run --backend nccl 8
  [[ -z $(ls -A) && -z $(ls -A "$TMPDIR") ]]
}


@test "--dry-run with several nodes prints the command of each and connects to none" {
  printf 'node1 slots=4\nnode2\nnode3\n' >hosts
  run --separate-stderr "$TEST_DISTRIBUTED" --dry-run --hostfile hosts --exclude node3 2
  [[ $status == 0 ]]
  [[ ${lines[0]} == "node1: "*" --nproc-per-node 4 "*"/scripts/lib/smoke.py "*" --json-file smoke.json" ]]
  [[ ${lines[1]} == "node2: "*" --node-rank 1 --nproc-per-node 2 "* ]]
  [[ ${#lines[@]} == 2 && ! -e logs ]]
}


# bats test_tags=slow
@test "SIGTERM stops all processes and removes temporary files" {
  set -m
  "$TEST_DISTRIBUTED" --seconds 300 2 2>stderr 3>&- &
  test=$!
  set +m
  timeout 60 bash -c 'until compgen -G "logs/latest/ranks/*/*" >/dev/null; do sleep 0.1; done' # the agent has started
  kill -TERM "$test"
  wait "$test" && status=0 || status=$?
  [[ $status == 143 ]]
  run ! grep -lsz -- "^MUSTER_RUN_DIR=$PWD" /proc/[0-9]*/environ
  [[ -z $(ls -A "$TMPDIR") ]]
}
