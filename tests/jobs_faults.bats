#!/usr/bin/env bats
#
# Faults while a job list runs: of the dispatcher, its connections, servers, supervisors and disks. No job runs twice or
# is lost, no failed job is reported as done, and an unreachable server is not treated as failed before --lost-after.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
# shellcheck source=tests/lab/nodes.bash
source "$BATS_TEST_DIRNAME/lab/nodes.bash"
# shellcheck source=tests/lab/job_lists.bash
source "$BATS_TEST_DIRNAME/lab/job_lists.bash"


setup_file() {
  start_servers 3
}


setup() {
  enter_list
}


teardown() {
  leave_list
  ! mountpoint -q "$BATS_TEST_TMPDIR/small" || umount --lazy "$BATS_TEST_TMPDIR/small"
}


# Write a list of three jobs, one on each server, that run until the file "go" exists.
three_jobs() {
  cluster "$N1:1" "$N2:1" "$N3:1"
  job_list <<END
{"name": "a", "until": "$PWD/go", "_retries": 0}
{"name": "b", "until": "$PWD/go", "_retries": 0}
{"name": "c", "until": "$PWD/go", "_retries": 0}
END
}


start_three_jobs() { # [option...]
  three_jobs
  start_list "$@"
  wait_until_started a
  wait_until_started b
  wait_until_started c
  eventually holds 'len(last) == 3' # results.json has an attempt of each job too
}


job_on() { # <node>: the name of the job that was started there last
  awk -v node="$1" '$1 == "begin" && $3 == node { name = $2 } END { print name }' "$STARTED"
}


# Wait for the end of the list, and check that all jobs are done in their first attempts.
all_done_without_retry() {
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ] || { cat out && return 1; }
  holds 'r["totals"]["done"] == r["totals"]["attempts"] == len(began) == len(job)'
}


mount_small_disk() { # <directory>: with 8 MiB
  mkdir -p "$1"
  mount -t tmpfs -o size=8m tmpfs "$1"
}


no_job_starts() { # for a second
  local before
  before=$(grep -c ^begin "$STARTED")
  sleep 1
  [ "$(grep -c ^begin "$STARTED")" -eq "$before" ]
}


fill() { # <directory>: fill its file system
  cat /dev/zero >"$1/fill" 2>/dev/null || true
}


# ---------------------------------------------------------------- the dispatcher


@test "after SIGKILL of the dispatcher, resume finds jobs that still run, and jobs that have ended" {
  three_jobs
  sed -i "s#\"name\": \"c\", \"until\": \"$PWD/go\"#\"name\": \"c\", \"until\": \"$PWD/go.c\"#" jobs.json
  start_list
  wait_until_started a
  wait_until_started b
  wait_until_started c
  kill -KILL "$LAUNCHER"
  : >go.c
  wait_for_line "$STARTED" "end c"
  pid=$(pid_of_job a)
  start_command resume
  wait_for_line out "done: $(values 'job["c"]["name"].split()') on "
  wait_for_line out " still runs"
  alive "$pid"
  : >go
  all_done_without_retry
}


@test "if one machine has two names, resume uses the name under which jobs run" {
  cluster "$N1:1" "$(address "$N1"):1"
  job_list <<<"{\"name\": \"a\", \"until\": \"$PWD/go\"}"
  start_list --lost-after 1
  wait_until_started a
  for number in 1 2 3; do
    wait_for_line out ": not used: is the same machine as"
    kill -KILL "$LAUNCHER"
    wait "$LAUNCHER" || true
    used=$(sed -n 's/.*is the same machine as \(.*\);.*/\1/p' out)
    if [ "$used" = "$N1" ]; then cluster "$(address "$N1"):1" "$N1:1"; else cluster "$N1:1" "$(address "$N1"):1"; fi
    start_command resume
    wait_for_line out "$used: $(values 'job["a"]["name"].split()') still runs" || { echo "resume $number" && return 1; }
  done
  : >go
  all_done_without_retry
}


# ---------------------------------------------------------------- connections


@test "when all connections are killed, jobs continue, and are found again on reconnect" {
  start_three_jobs
  connections=$(grep -lsaF "$(cat logs/jobs/*/sockets.*)/" /proc/[0-9]*/cmdline || true)
  [ "$(wc -l <<<"$connections")" -ge 6 ] # a master and a client for each server
  : >seen
  while read -r file; do
    kill -KILL "${file//[!0-9]/}" 2>>seen || true
  done <<<"$connections"
  for node in "$N1" "$N2" "$N3"; do
    wait_for_line out "$node: unreachable: "
    wait_for_line out "$node: $(values 'job["'"$(job_on "$node")"'"]["name"].split()') still runs"
  done
  : >go
  all_done_without_retry
}


@test "during a temporary network failure of a server, its job continues, and jobs on other servers do not wait" {
  three_jobs
  sed -i 's/}]$/},/' jobs.json
  printf '{"_env": {"STARTED": "%s"}, "name": "later", "_priority": -1}]\n' "$STARTED" >>jobs.json
  start_list
  wait_until_started a
  wait_until_started b
  wait_until_started c
  pid=$(pid_of_job "$(job_on "$N3")")
  lab cut "$N3"
  wait_for_line out "$N3: unreachable: "
  alive "$pid"
  run -0 list status
  lab heal "$N3"
  wait_for_line out "still runs"
  alive "$pid"
  : >go
  all_done_without_retry
}


# bats test_tags=soak
@test "no job fails on a temporarily frozen server, and a server frozen at the start does not delay the others" {
  lab freeze "$N2"
  three_jobs
  start_list
  wait_until_started a
  wait_until_started b
  wait_for_line out "$N2: unreachable: "
  lab freeze "$N3"
  wait_for_line out "$N3: unreachable: "
  lab heal "$N3"
  wait_for_line out "still runs"
  lab heal "$N2"
  wait_for_line out "$N2: connected"
  wait_until_started c
  : >go
  all_done_without_retry
}


# ---------------------------------------------------------------- servers


@test "jobs of a powered-off server run elsewhere without using a retry, and none runs again after the server is back" {
  start_three_jobs --lost-after 5
  lost=$(job_on "$N3")
  lab kill "$N3"
  wait_for_line out "retry: "
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  holds 'r["totals"]["done"] == 3 and len(began) == 4 and began.count("'"$lost"'") == 2'
  holds '[each["failure"] for each in job["'"$lost"'"]["attempts"]] == ["server lost", ""]'
  grep -q "$N3: lost; its jobs may still be running" out
  lab up "$NODES" --prefix "$PREFIX" --private "$APART" >/dev/null
  set_up_home "$N3"
  run -0 list cancel all
  echo "$output"
  run -0 list cancel all
  [[ "$output" == "nothing to cancel"* ]]
  holds 'len(began) == 4 and r["totals"]["done"] == 3'
}


@test "an attempt on a lost server is stopped when the server is back, before its slot is reused" {
  three_jobs
  sed -i -e 's/"_retries": 0/"alone": true, &/' -e 's/}]$/},/' jobs.json
  printf '{"_env": {"STARTED": "%s"}, "name": "later", "alone": true, "_priority": -1}]\n' "$STARTED" >>jobs.json
  start_list --lost-after 2
  wait_until_started a
  wait_until_started b
  wait_until_started c
  lost=$(job_on "$N3")
  pid=$(pid_of_job "$lost")
  lab cut "$N3"
  wait_for_line out "retry: " # the retry waits for a slot
  lab heal "$N3"
  wait_for_line out "was declared lost but still runs; killing it"
  wait_until_started later # on that server, as all other slots are in use
  run ! alive "$pid"
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  [ "$(node_of_job later)" = "$N3" ]
  holds 'r["totals"]["done"] == 4 and len(began) == 5 and not [words for words in started if words[0] == "overlap"]'
  no_process_left
}


# bats test_tags=soak
@test "if a lost server is reachable again after the end of the list, cancel all stops the attempt that runs there" {
  start_three_jobs --lost-after 2
  lost=$(job_on "$N3")
  pid=$(pid_of_job "$lost")
  kill -STOP "$pid" # so that the job does not end by itself
  lab cut "$N3"
  : >go
  wait_for_line out "another attempt writes there; retrying when it ends"
  # Replace the locked files by new files, as if a file server had released the locks of an unreachable machine.
  for file in experiments/*/.muster_job; do
    rm "$file" && touch "$file"
  done
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  grep -q "$N3: lost" out
  lab heal "$N3"
  run -0 list cancel all
  eventually eval '! alive "$pid"'
  no_process_left
}


@test "a server whose disk is full gets no new jobs, and the exit codes of its jobs are reported" {
  small=$HOMES/$N2/small
  mkdir "$small"
  on "$N2" mount -t tmpfs -o size=2m tmpfs "$small"
  lab ssh "$N2" tee "$small/job.py" <job.py >/dev/null
  cluster "$N1:2" "$N2:3"
  sed -i "s#{\"host\": \"$N2\"#&, \"workdir\": \"$small\", \"labels\": [\"small\"]#" cluster.json
  job_list <<END
{"name": "stays", "until": "$PWD/go", "quiet": true, "_labels": ["small"], "prefix": "p", "fold": 0, "_priority": 2}
{"name": "ends", "until": "$PWD/full", "quiet": true, "_labels": ["small"], "_priority": 2}
{"name": "fills", "fill": "$small", "_labels": ["small"], "_priority": 1, "_retries": 0}
{"name": "d", "until": "$PWD/full"}
{"name": "e", "until": "$PWD/full"}
{"name": "f", "_labels": ["small"]}
END
  start_list
  wait_until_started stays
  wait_until_started ends
  wait_for_line out "no space left on the disk with its log"
  : >full
  wait_for_line out "$N2: gets no new jobs: "
  run -0 list cancel p/fold0
  [[ "$output" == *"cancelled: p/fold0: cancelled on request; no process remains"* ]]
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 75 ]
  grep -q "paused: no usable server for the waiting jobs; see the reasons above" out
  holds '[job[name]["state"] for name in ("ends", "d", "e", "fills", "f")] == ["done"] * 3 + ["failed", "waiting"]'
  holds 'last["fills"]["reason"].startswith("exit code 1: ")'
  holds 'last["fills"]["exit_code"] == 1 and last["ends"]["exit_code"] == 0 and len(began) == 5'
  on "$N2" rm -- "$small/filling-fills"
  run -1 list resume # because of job "fills"
  holds 'job["f"]["state"] == "done" and len(began) == 6'
  on "$N2" umount "$small"
}


@test "a server whose home is full or read-only is not used, and nothing is left there" {
  mkdir -p "$HOMES/$N2/.cache" "$HOMES/$N3/.cache"
  on "$N2" mount -t tmpfs -o size=64k tmpfs "$HOMES/$N2/.cache"
  on "$N3" mount -t tmpfs -o ro tmpfs "$HOMES/$N3/.cache"
  cluster "$N1:1" "$N2:1" "$N3:1"
  job_list <<<"{\"name\": \"a\", \"until\": \"$PWD/go\"}"
  start_list
  wait_for_line out "$N2: not used: cannot copy Muster to it: tar: "
  wait_for_line out "$N3: not used: cannot copy Muster to it: mkdir: "
  grep "$N2: not used" out | grep -q "No space left on device; free space there, or set XDG_CACHE_HOME there$"
  grep "$N3: not used" out | grep -q "Read-only file system; make it writable, or set XDG_CACHE_HOME there$"
  [ -z "$(on "$N2" ls "$HOMES/$N2/.cache/muster")" ]
  on "$N2" umount "$HOMES/$N2/.cache"
  on "$N3" umount "$HOMES/$N3/.cache"
  : >go
  all_done_without_retry
}


@test "a job and its list end even if the disk is full before the process ids of the job are written" {
  small=$HOMES/$N2/small
  mkdir -p "$small"
  on "$N2" mount -t tmpfs -o size=2m tmpfs "$small"
  lab ssh "$N2" tee "$small/job.py" <job.py >/dev/null
  cluster "$N2:1"
  sed -i "s#{\"host\": \"$N2\"#&, \"workdir\": \"$small\"#" cluster.json
  job_list <<<"{\"name\": \"a\", \"until\": \"$PWD/go\", \"quiet\": true}"
  start_list
  wait_until_started a
  supervisor=$(on "$N2" sh -c "cat $small/logs/jobs/*/*/node_*.pid" |
    "$VIRTUAL_ENV/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["supervisor"]["pid"])')
  on "$N2" sh -c "rm $small/logs/jobs/*/*/node_*.pid $small/logs/jobs/*/*/node_*.reserved*; cat /dev/zero >$small/fill" || true
  kill -KILL "$LAUNCHER" "$supervisor"
  start_command resume
  wait_for_line out "retry: "
  wait_for_line out "files are missing or damaged"
  on "$N2" rm "$small/fill"
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  holds 'len(began) == 2 and job["a"]["attempts"][0]["failure"] == "supervisor killed"'
  on "$N2" umount "$small"
}


# ---------------------------------------------------------------- supervisors


@test "a job whose supervisor is killed leaves no process and is retried; a job whose guard is killed continues" {
  start_three_jobs
  kill -KILL "$(process_of_job supervisor a)"
  guard=$(process_of_job guard b)
  kill -KILL "$guard"
  kill -KILL "$(process_of_job supervisor c)" "$(process_of_job guard c)"
  pids="$(pid_of_job a) $(pid_of_job c)"
  wait_for_line out "retry: $(values 'job["a"]["name"].split()')"
  wait_for_line out "retry: $(values 'job["c"]["name"].split()')"
  for pid in $pids; do
    run ! alive "$pid"
  done
  [ "$(process_of_job guard b)" != "$guard" ]
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  holds 'sorted(began) == ["a", "a", "b", "c", "c"] and r["totals"]["done"] == 3'
  holds 'all(job[name]["attempts"][0]["failure"] == "supervisor killed" for name in "ac")'
}


# ---------------------------------------------------------------- results


@test "if the dispatcher's disk is full, running jobs continue, and results and new starts wait for space" {
  there=$APART/there
  lab ssh "$N1" mkdir -p "$there"
  lab ssh "$N1" tee "$there/job.py" <job.py >/dev/null
  cluster "$N1:1"
  sed -i "s#{\"host\": \"$N1\"#&, \"workdir\": \"$there\"#" cluster.json
  job_list <<END
{"name": "a", "until": "$APART/go", "big": 5, "_priority": 1}
$(printf '{"name": "b%s"}\n' {1..20})
END
  mount_small_disk "$BATS_TEST_TMPDIR/small"
  cp cluster.json jobs.json "$BATS_TEST_TMPDIR/small"
  WORK=$BATS_TEST_TMPDIR/small
  cd "$WORK"
  start "$BATS_TEST_TMPDIR/out" "${DISPATCH[@]}" --cluster-config cluster.json --jobs-config jobs.json
  wait_until_started a
  fill .
  lab ssh "$N1" touch "$APART/go"
  wait_for_line "$BATS_TEST_TMPDIR/out" "results.journal: No space left on device; no new jobs start until"
  eventually no_job_starts # jobs whose start is in the journal still start
  before=$(grep -c ^begin "$STARTED")
  ((before < 21))
  sleep 2 # there is no event to wait for
  [ "$(grep -c ^begin "$STARTED")" -eq "$before" ]
  rm fill
  head -c 3500000 /dev/zero >fill
  wait_for_line "$BATS_TEST_TMPDIR/out" "results.journal: writable again"
  wait_for_line "$BATS_TEST_TMPDIR/out" "cannot copy results: rsync: "
  wait_until_started b20
  rm fill
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  holds 'r["totals"]["done"] == len(began) == 21'
  lab ssh "$N1" cat "$there/$(values 'job["a"]["output"].split()')/big" | cmp - "$(values 'job["a"]["output"].split()')/big"
}


@test "a killed copy is repeated, and an incomplete file never has its final name" {
  WORK="$APART/my work"
  enter_workdir
  write_job_script
  cluster "$N1:1"
  job_list <<<'{"name": "a", "big": 2, "prefix": "p", "fold": 0, "until": "'"$PWD/go"'"}'
  start_list --sync
  wait_until_started a
  lab slow "$N1" 2000
  lab ssh "$N1" touch "$PWD/go"
  eventually eval 'compgen -G "experiments/.muster-*/experiments/p/fold0/.big.*"'
  [ ! -e experiments/p/fold0/big ]
  while read -r file; do
    kill -KILL "${file//[!0-9]/}" 2>>seen || true
  done < <(grep -lsa "^rsync.*$PWD" /proc/[0-9]*/cmdline)
  lab heal "$N1"
  wait_for_line out "p/fold0: cannot copy results: "
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  lab ssh "$N1" cat "$PWD/experiments/p/fold0/big" | cmp - experiments/p/fold0/big
  holds 'began == ["a"] and job["a"]["state"] == "done"'
}


@test "a job whose results can never be copied fails without a retry, and the list ends" {
  WORK="$APART/never"
  enter_workdir
  write_job_script
  printf '%s\n' 'import shutil' 'if "removes" in job:' '    shutil.rmtree(out)' >>job.py
  cluster "$N1:3"
  job_list <<END
{"name": "a", "prefix": "p", "fold": 0, "removes": true}
{"name": "b", "prefix": "p", "fold": 1, "big": 1, "until": "$PWD/go"}
{"name": "c", "prefix": "p", "fold": 2, "big": 1}
END
  start_list --sync
  wait_until_started b
  mkdir -p experiments/p/fold1/big/mine # a directory where the file "big" belongs
  touch experiments/p/fold1/.muster_job
  lab ssh "$N1" touch "$PWD/go"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 1 ]
  holds 'job["c"]["state"] == "done" and len(began) == 3'
  holds 'all(job[name]["state"] == "failed" and last[name]["failure"] == "results not copied" for name in "ab")'
  holds '"No such file or directory" in last["a"]["reason"] and "fold1/big" in last["b"]["reason"]'
  [ -s experiments/p/fold2/big ]
}


@test "a finished job whose server is lost before its results were copied runs elsewhere" {
  WORK="$APART/remote work"
  enter_workdir
  write_job_script
  cluster "$N3:1" "$N1:1"
  job_list <<<'{"name": "a", "big": 2, "prefix": "p", "fold": 0, "until": "'"$PWD/go"'", "_retries": 0}'
  start_list --sync --lost-after 3
  wait_until_started a
  first=$(node_of_job a)
  lab slow "$first" 1000
  lab ssh "$first" touch "$PWD/go"
  eventually eval 'compgen -G "experiments/.muster-*/experiments/p/fold0/.big.*"'
  lab kill "$first"
  wait_for_line out "before its results were copied"
  for node in "$N1" "$N3"; do
    [ "$node" = "$first" ] || lab ssh "$node" touch "$PWD/go"
  done
  wait_for_exit "$LAUNCHER"
  lab up "$NODES" --prefix "$PREFIX" --private "$APART" >/dev/null
  set_up_home "$first"
  [ "$status" -eq 0 ]
  holds 'began == ["a", "a"] and job["a"]["state"] == "done" and last["a"]["server"] != "'"$first"'"'
  [ "$(stat -c %s experiments/p/fold0/big)" -eq $((2 << 20)) ]
}


# ---------------------------------------------------------------- the configuration


@test "jobs of a server that was removed from the configuration run elsewhere after --lost-after" {
  start_three_jobs --lost-after 3
  kill -INT -- "-$LAUNCHER"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 130 ]
  cluster "$N1:2" "$N2:1"
  start_command resume
  wait_for_line out "$N3: no longer in the cluster config; its jobs restart elsewhere after 3 s"
  wait_for_line out "another attempt writes there; retrying when it ends" # the servers share the output directory
  holds 'len(began) == 3'
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  holds 'r["totals"]["done"] == 3 and len(began) == 4'
}
