#!/usr/bin/env bats
#
# scripts/test_distributed.sh: the question of anyone who has just got a machine. Its answer must be one
# report on standard output, and its exit code must say what the report says; a wrong call starts nothing.

bats_require_minimum_version 1.5.0


setup() {
  KIT=$(readlink -f "$BATS_TEST_DIRNAME/..")
  TEST_DISTRIBUTED=$KIT/scripts/test_distributed.sh
  export VIRTUAL_ENV=${VIRTUAL_ENV:-$KIT/.venv} GLOO_SOCKET_IFNAME=lo
  export TMPDIR="$BATS_TEST_TMPDIR/it's temporary"
  mkdir -- "$TMPDIR" "$BATS_TEST_TMPDIR/it's a folder"
  cd -- "$BATS_TEST_TMPDIR/it's a folder" || return
}


# Small enough for a busy machine.
quick() { # <option or N...>
  "$TEST_DISTRIBUTED" --quiet --max-bytes 4K --seconds 0.1 --timeout 120 "$@"
}


field() { # <name> <file>: a field of the one JSON object in a file
  "$VIRTUAL_ENV/bin/python" -c 'import json, sys; print(json.load(open(sys.argv[2]))[sys.argv[1]])' "$@"
}


# bats test_tags=slow,quick
@test "two processes: the report is the answer, the launcher's words are not" {
  run --separate-stderr quick 2
  [[ $status == 0 ]]
  [[ ${lines[0]} == "smoke test: 2 ranks on 1 node, gloo, torch "* ]]
  [[ ${lines[-1]} == "verdict: ok, 2 ranks work together as they should" ]]
  [[ $output == *"  ok      all_reduce "* ]]
  [[ $output == *"bus bandwidth, GB/s"* ]]
  run ! grep -q 'FAULT' <<<"$output"
}


# bats test_tags=slow
@test "--json prints one object and nothing else, from any folder, whichever agent starts the ranks" {
  quick --json --agent torchrun 1 >report.json
  [[ $(field verdict report.json) == ok ]]
  [[ $(field world report.json) == *"'size': 1"* ]]
  [[ -e logs/latest/run.json ]]
}


# bats test_tags=slow
@test "a check that fails is in the report and in the exit code" {
  run --separate-stderr quick --json --timeout 20 --env GLOO_SOCKET_IFNAME=none0 2
  [[ $status == 1 ]]
  printf '%s' "$output" >report.json
  [[ $(field verdict report.json) == fault ]]
  [[ $(field checks report.json) == *"'name': 'join', "*"2 ranks that meet"* ]]
}


@test "a wrong call is refused in one line, and nothing is started" {
  while IFS='|' read -r words says; do
    # shellcheck disable=SC2086
    run --separate-stderr "$TEST_DISTRIBUTED" $words
    [[ $status == 2 ]] || { echo "$words: exit code $status"; false; }
    [[ -z $output ]] || { echo "$words: $output"; false; }
    # shellcheck disable=SC2154
    [[ ${stderr_lines[0]} == "test_distributed.sh: $says"* ]] || { echo "$words: $stderr"; false; }
    [[ ${stderr_lines[1]} == "Try: test_distributed.sh --help" ]]
  done <<'END'
0|N: expected a number of processes from 1 to 1024, got '0'
-1|N: expected a number of processes from 1 to 1024, got '-1'
abc|N: expected a number of processes from 1 to 1024, got 'abc'
2.5|N: expected a number of processes from 1 to 1024, got '2.5'
02|N: expected a number of processes from 1 to 1024, got '02'
|expected N, the number of processes; nothing was given
9999|N: expected a number of processes from 1 to 1024, got '9999'
2 --exclude node1|--exclude 'node1': from which nodes? name them
--no-such-option 2|--no-such-option: unknown option
--max-bytes 3Q 2|--max-bytes: expected a size in bytes such as 1024, 64K, 16M or 1G, got '3Q'
--max-bytes 512 2|--max-bytes '512': less than --min-bytes, 1K
--seconds 0 2|--seconds: expected a number of seconds above 0, got '0'
--timeout soon 2|--timeout: expected a number of seconds above 0, got 'soon'
--backend mpi 2|--backend: expected auto, nccl or gloo, got 'mpi'
2 --seconds|--seconds needs a value
--python /nowhere/python 2|no Python at '/nowhere/python'
END
  [[ -z $(ls -A) ]]
}


@test "more processes than GPUs are refused (a stub of nvidia-smi: there is no GPU here)" {
  mkdir stub
  cat >stub/nvidia-smi <<'END'
#!/usr/bin/env bash
# Stub: answers as nvidia-smi does with --format=csv,noheader,nounits.
case $* in *query-gpu*) echo "0, GPU-aa, 580.65.06, 81920, 4, Enabled, Disabled, 0, Default, STUB" ;; esac
END
  chmod +x stub/nvidia-smi
  PATH=$PWD/stub:$PATH run --separate-stderr "$TEST_DISTRIBUTED" 2
  [[ $status == 2 && -z $output ]]
  [[ $stderr == *"NPROC 2: this machine has 1 GPU; start at most one process per GPU"* ]]
  [[ ! -e logs ]]
}


@test "--dry-run prints what would run, and runs nothing" {
  run --separate-stderr "$TEST_DISTRIBUTED" --dry-run --backend gloo --max-bytes 1M 3
  [[ $status == 0 ]]
  [[ $output == *"--nproc-per-node 3 "*"/scripts/lib/smoke.py --backend gloo --min-bytes 1K --max-bytes 1M "* ]]
  [[ -z $(ls -A) && -z $(ls -A "$TMPDIR") ]]
}


@test "--dry-run over several nodes shows what each would run, and asks none" {
  printf 'node1 slots=4\nnode2\nnode3\n' >hosts
  run --separate-stderr "$TEST_DISTRIBUTED" --dry-run --hostfile hosts --exclude node3 2
  [[ $status == 0 ]]
  [[ ${lines[0]} == "node1: "*" --nproc-per-node 4 "*"/scripts/lib/smoke.py "*" --json-file smoke.json" ]]
  [[ ${lines[1]} == "node2: "*" --node-rank 1 --nproc-per-node 2 "* ]]
  [[ ${#lines[@]} == 2 && ! -e logs ]]
}


# bats test_tags=slow
@test "TERM ends everything, and nothing is left of it" {
  set -m
  "$TEST_DISTRIBUTED" --seconds 300 2 2>said 3>&- &
  test=$!
  set +m
  timeout 60 bash -c 'until compgen -G "logs/latest/ranks/*/*" >/dev/null; do sleep 0.1; done' # the agent's own
  kill -TERM "$test"
  wait "$test" && status=0 || status=$?
  [[ $status == 143 ]]
  run ! grep -lsz -- "^MUSTER_RUN_DIR=$PWD" /proc/[0-9]*/environ
  [[ -z $(ls -A "$TMPDIR") ]]
}
