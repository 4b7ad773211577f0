#!/usr/bin/env bats
#
# Job lists on a real SLURM: all attempts that can start are submitted as one job array, results are the same as over
# ssh, and after any failure no job runs twice and none is lost. scancel, preemption, time limits and node failures are
# distinguished.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
load lab/nodes.bash
load lab/list_results.bash
load lab/secrets.bash


setup_file() {
  start_lab 4 --slurm --gpus 2
}


setup() {
  enter_workdir
  DISPATCH=("$VIRTUAL_ENV/bin/python" "$KIT/scripts/jobs/run_distributed_training.py")
  STARTED=$BATS_TEST_TMPDIR/started
  : >"$STARTED"
  LAUNCHER=''
  write_job_script
}


teardown() {
  [ -z "$LAUNCHER" ] || kill -KILL "$LAUNCHER" 2>/dev/null || true
  slurmctld_runs || start_slurmctld
  lab up 4 --prefix "$PREFIX" --slurm --gpus 2 >/dev/null # repairs the laboratory after a test
  scancel --user=root
  eventually queue_is_empty
}


# ---- lists

cluster() { # <JSON members of the entry in `servers`> [option of sbatch...]
  local option options=''
  for option in "${@:2}"; do
    options+="${options:+, }\"$option\""
  done
  echo "{\"script_path\": \"job.py\", \"servers\": [{\"host\": \"slurm\", $1}], \"sbatch\": [$options]}" >cluster.json
}


OPTIONS=(--backend slurm --cluster-config cluster.json --jobs-config jobs.json --grace 3)


dispatch() { # [option...]
  "${DISPATCH[@]}" "${OPTIONS[@]}" "$@" 3>&-
}


# Start the dispatcher in the background. LAUNCHER is its process id. Its output is written to the file "out".
start_list() {
  start out "${DISPATCH[@]}" "${OPTIONS[@]}"
}


kill_dispatcher() {
  kill -KILL "$LAUNCHER"
  wait_for_exit "$LAUNCHER"
  LAUNCHER=''
}


# Check that no job specification remains: it contains the environment of a job.
no_specification_left() {
  ! find logs -name 'order*' -o -name 'taken*' -o -name '.order' | grep .
}


write_job_script() {
  cat >job.py <<'END'
import json, os, signal, subprocess, sys, time

job, out = json.loads(os.environ["MUSTER_JOB"]), os.environ["MUSTER_OUTPUT_DIR"]
if job.get("mode") == "base_only":
    job = {"name": "base", **{key.removeprefix("base_"): value for key, value in job.items()}}
name = job.get("name", job["id"])


def record(*values):
    with open(os.environ["STARTED"], "a") as file:
        file.write(" ".join(map(str, values)) + "\n")


def metrics(**values):
    with open(f"{out}/metrics.jsonl", "a") as file:
        file.write(json.dumps(values) + "\n")


if job.get("ignore_sigterm"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
record("begin", name, os.uname().nodename, os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"] or "-")
print("arguments", *sys.argv[1:], flush=True)
metrics(steps=10)
end = time.monotonic() + job.get("seconds", 0)
while time.monotonic() < end or not os.path.exists(job.get("until", "/")):
    time.sleep(0.05)
if job.get("daemon"):
    subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 1; done"], start_new_session=True)
if "signal" in job:
    os.kill(os.getpid(), getattr(signal, job["signal"]))
with open(f"{out}/result", "w") as file:
    file.write(f"{name}\n")
if job.get("mode") == "base_only":
    for part in ("best_base_model.pt", "base_metrics.json", "base_losses.json", "base_config.json"):
        with open(f"{out}/{part}", "w") as file:
            file.write('{"held_out_loss": 1.5}')
if "MUSTER_BASE_MODEL" in os.environ:
    record("base", name, os.listdir(os.environ["MUSTER_BASE_MODEL"]))
metrics(step=10, loss=0.5)
record("end", name)
if not os.path.exists(job.get("exit_once", "nowhere")) and job.get("exit"):
    if "exit_once" in job:
        open(job["exit_once"], "w").close()
    sys.exit(f"{name} gives up" if job["exit"] == 1 else job["exit"])
END
}


# ---- SLURM

queue_is_empty() {
  ! squeue --noheader --array | grep .
}


element_of() { # <name>: print the SLURM job id (<array>_<index>) of the newest attempt of this job
  local id attempt
  id=$("$VIRTUAL_ENV/bin/python" -c '
import json, sys
print(next(each["id"] for each in json.load(open("results.json"))["jobs"] if each["settings"]["name"] == sys.argv[1]))
' "$1")
  for attempt in logs/jobs/*/"$id".*; do
    squeue --noheader --array --states=all --format='%F_%K %j' | awk -v "array=$(array_of "$attempt")" \
      -v "index_=$(index_of "$attempt")" '$2 ~ array"$" && $1 ~ "_"index_"$" { print $1 }'
  done | tail -n 1
}


array_of() { # <directory of an attempt>
  local file
  file=$(grep -lx "${1##*/}" "${1%/*}"/array-*/attempts | tail -n 1)
  file=${file%/attempts}
  echo "${file##*array-}"
}


index_of() { # <directory of an attempt>
  echo $(($(grep -nx "${1##*/}" "${1%/*}/array-$(array_of "$1")/attempts" | cut -d: -f1) - 1))
}


arrays() { # print the number of arrays of this list
  squeue --noheader --array --states=all --format=%j | grep "^muster-$(basename logs/jobs/*)-" | sort -u | wc -l
}


pid_of_slurmctld() {
  cat "$MUSTER_LAB/slurmctld.pid"
}


slurmctld_runs() {
  [[ $(cat "/proc/$(pid_of_slurmctld)/stat" 2>/dev/null) =~ \(slurmctld\)\ [^ZX] ]]
}


start_slurmctld() {
  slurmctld -f "$SLURM_CONF" 3>&-
  eventually squeue
}


# ---------------------------------------------------------------- a list


@test "nine jobs are one SLURM job array, each runs once on its own GPU, and all output is the same as over ssh" {
  cluster '"gpus": 1'
  for fold in 0 1 2 3 4 5 6 7 8; do
    echo "{\"name\": \"f$fold\", \"fold\": $fold, \"prefix\": \"exp1\", \"seconds\": 1, \"texts\": [\"it's\", \"\$x;\"]}"
  done | job_list
  run -0 dispatch
  [[ "$output" == *"slurm: connected; SLURM "*"up to 9 jobs in its queue"* ]]
  [[ "$output" == *"finished: 9 of 9 done"* ]]
  holds 'r["state"] == "finished" and r["backend"] == "slurm" and r["totals"]["attempts"] == 9'
  holds 'sorted(began) == sorted(job) and all(each["state"] == "done" for each in r["jobs"])'
  holds 'all(1 <= each["seconds"] < 20 and each["peak_memory"] > 5e6 and each["exit_code"] == 0 for each in last.values())'
  holds 'all(each["metrics"]["step"] == each["metrics"]["steps"] == 10 for each in r["jobs"])'
  holds '{words[4] for words in started if words[0] == "begin"} == {"0", "1"}'
  holds 'len({tuple(words[2:5:2]) for words in started if words[0] == "begin"}) == 8' # four nodes with two GPUs
  [ "$(arrays)" -eq 1 ]
  for fold in 0 1 2 3 4 5 6 7 8; do
    grep -qx "f$fold" "experiments/exp1/fold$fold/result"
  done
  grep -q '<svg' results.html
  run -0 list logs fold3
  [[ "$output" == *"arguments --name f3 --fold 3 --prefix exp1 --seconds 1 --texts it's \$x; --device cuda:0"* ]]
  run -0 list why fold3
  [[ "$output" == *"exp1/fold3: done"*"attempt 1 on slurm:"*" ($PREFIX"*"done"* ]]
  no_specification_left
  run -0 list resume # nothing to do
  holds 'len(began) == 9'
}


@test "an added job that requests 2 GPUs starts after the job that it needs, even if the list began with one slot" {
  cluster '"gpus": 2'
  job_list <<<"{\"name\": \"a\", \"until\": \"$PWD/go\", \"prefix\": \"a\"}"
  start_list
  wait_until_started a
  mv jobs.json original.json
  job_list <<<'{"name": "b", "_after": "a", "_gpus": 2}'
  mv jobs.json more.json
  mv original.json jobs.json
  run -0 list add more.json
  eventually holds 'len(job) == 2'
  run -0 list why "$(values '[job["b"]["id"]]')"
  [[ "$output" == *": waiting: waits for a/"*": running"* ]]
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  holds 'began == ["a", "b"] and r["totals"]["done"] == 2'
}


@test "failures are classified in the same way as over ssh, a failed job is retried, and no process remains" {
  cluster '"gpus": 0'
  job_list <<END
{"name": "fails", "exit": 7, "_retries": 0}
{"name": "gives-up", "exit": 1, "_retries": 0}
{"name": "killed", "signal": "SIGKILL", "_retries": 0}
{"name": "once", "exit": 1, "exit_once": "$PWD/failed once"}
{"name": "daemon", "daemon": true}
END
  run -1 dispatch
  holds 'last["fails"]["exit_code"] == 7 and last["fails"]["failure"] == "exit code"'
  holds 'last["gives-up"]["last_lines"][-1] == "gives-up gives up"'
  holds 'last["killed"]["failure"] == "signal" and last["killed"]["signal"] == "SIGKILL"'
  holds '[each["failure"] for each in job["once"]["attempts"]] == ["exit code", ""] and job["once"]["state"] == "done"'
  holds 'job["daemon"]["state"] == "done" and began.count("once") == 2 and len(began) == 6'
  holds 'all(words[4] == "-" for words in started if words[0] == "begin")' # no GPU
  grep -qh "arguments --name fails --exit 7 --device cpu" logs/jobs/*/*/node_slurm.log
  no_process_left
  no_specification_left
}


@test "a job that exceeds _timeout is stopped, by SIGKILL if it ignores SIGTERM" {
  cluster '"gpus": 0'
  job_list <<END
{"name": "slow", "seconds": 60, "_timeout": 1, "_retries": 0}
{"name": "ignores", "seconds": 60, "ignore_sigterm": true, "_timeout": 1, "_retries": 0}
END
  run -1 dispatch
  holds 'all(each["failure"] == "timeout" and "(_timeout)" in each["reason"] for each in last.values())'
  holds 'last["ignores"]["signal"] == "SIGKILL" and len(began) == 2'
  no_process_left
  no_specification_left
}


@test "resources of a job are requested from SLURM; a refusal of one job, or of the whole list, is reported" {
  cluster '"gpus": 1'
  job_list <<END
{"name": "one", "seconds": 1}
{"name": "two", "seconds": 1, "_gpus": 2, "_timeout": 100}
{"name": "labels", "_labels": ["nosuch"], "_retries": 0}
END
  run -1 dispatch
  holds 'job["labels"]["state"] == "failed" and last["labels"]["failure"] == "refused"'
  holds '"Invalid feature specification" in last["labels"]["reason"]'
  holds '[words[4] for words in started if words[:2] == ["begin", "two"]] == ["0,1"]'
  [ "$(arrays)" -eq 2 ]
  run -0 scontrol show job "$(element_of two)"
  [[ "$output" == *"TimeLimit=00:03:00"*"Requeue=0"* || "$output" == *"Requeue=0"*"TimeLimit=00:03:00"* ]]
  cluster '"gpus": 1' --partition=nosuch
  job_list <<'END'
{"name": "plain"}
{"name": "timed", "_timeout": 100}
END
  run -75 dispatch --log-file other.json
  [[ "$output" == *"slurm: gets no new jobs: sbatch: "*"invalid partition specified: nosuch"*"; correct sbatch in"* ]]
  [[ "$output" == *"paused: 0 of 2 done, 2 waiting"* ]]
  holds 'sorted(began) == ["one", "two"]'
  no_specification_left
  cluster '"gpus": 1' --array=0-3
  run -2 dispatch --log-file third.json
  [[ "$output" == *"sbatch: '--array=0-3': is reserved for Muster; remove it"* ]]
}


@test "jobs in SLURM's queue are shown as queued, a log can be followed, and setup lines run" {
  cluster "\"gpus\": 0, \"setup\": [\"module load none\", \"export FROM_SETUP=yes\"]" --exclusive
  job_list <<END
{"name": "a", "until": "$PWD/go", "_priority": 1}
{"name": "b", "until": "$PWD/go", "_priority": 1}
{"name": "c", "until": "$PWD/go", "_priority": 1}
{"name": "d", "until": "$PWD/go", "_priority": 1}
{"name": "waits"}
END
  sed -i 's/^print("arguments"/print(os.environ.get("FROM_SETUP"), flush=True)\n&/' job.py
  start_list
  wait_until_started c
  eventually holds 'job["waits"]["reason"] == "in SLURM'"'"'s queue"'
  run list status
  [[ "$output" == *"in SLURM's queue"* ]]
  start followed "${DISPATCH[@]}" logs "$(values '[job["a"]["id"]]')" --follow
  wait_for_line followed "arguments --name a"
  grep -qx yes followed
  : >go
  wait "$LAUNCHER"
  eventually holds 'r["state"] == "finished" and r["totals"]["done"] == 5'
  holds 'last["waits"]["seconds"] < 5' # without the time in the queue
  LAUNCHER=''
}


# ---------------------------------------------------------------- cancel


@test "cancel stops running and queued jobs, and no process and no job in SLURM remains" {
  cluster '"gpus": 0' --exclusive
  job_list <<END
{"name": "a", "seconds": 600}
{"name": "ignores", "seconds": 600, "ignore_sigterm": true}
{"name": "c", "seconds": 600}
{"name": "d", "seconds": 600}
{"name": "waits", "seconds": 600}
{"name": "waits-too", "seconds": 600}
END
  start_list
  wait_until_started c
  wait_until_started ignores
  eventually holds 'job["waits"]["reason"] == "in SLURM'"'"'s queue"'
  run -0 list cancel "$(values '[job["waits"]["id"]]')"
  [[ "$output" == *"cancelled: "*"no process remains"* ]]
  eventually holds 'job["waits"]["state"] == "cancelled"'
  run -0 list cancel all
  wait_for_exit "$LAUNCHER"
  [ "$status" -ne 0 ]
  holds 'all(each["state"] == "cancelled" and each["reason"].startswith("cancelled on request") for each in r["jobs"])'
  holds 'last["ignores"]["signal"] == "SIGKILL" and len(began) == 4'
  queue_is_empty
  no_process_left
  no_specification_left
}


@test "cancel without a running dispatcher stops running and queued jobs" {
  cluster '"gpus": 0' --exclusive
  printf '{"name": "%s", "seconds": 600}\n' a b c d e f | job_list
  start_list
  wait_until_started c
  kill_dispatcher
  run -0 list cancel all
  holds 'all(each["state"] == "cancelled" for each in r["jobs"]) and len(began) == 4'
  queue_is_empty
  no_process_left
  no_specification_left
}


# ---------------------------------------------------------------- a killed dispatcher


@test "if the dispatcher is killed, resume finds running and waiting jobs, and none runs twice" {
  cluster '"gpus": 0' --exclusive
  {
    printf '{"name": "%s", "seconds": 1}\n' a b c d e f1 f2
    echo "{\"name\": \"g\", \"until\": \"$PWD/go\"}"
    echo '{"name": "h", "exit": 3, "_retries": 0}'
  } | job_list
  start_list
  wait_until_started b
  kill_dispatcher # some jobs run, some wait
  eventually grep -q '^begin g ' "$STARTED" # SLURM starts further jobs
  start_list
  wait_for_line out "still runs"
  kill_dispatcher
  start_list
  wait_for_line out "still runs"
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 1 ]
  LAUNCHER=''
  holds 'sorted(began) == sorted(job) and all(len(each["attempts"]) == 1 for each in r["jobs"])'
  holds 'all(each["state"] == "done" for name, each in job.items() if name != "h")'
  holds 'job["h"]["state"] == "failed" and last["h"]["exit_code"] == 3 and last["a"]["seconds"] < 10'
  [ "$(arrays)" -eq 1 ]
  no_specification_left
}


@test "a list whose dispatcher is killed after various journal records has the results of an uninterrupted list" {
  local number
  cluster '"gpus": 0'
  for number in {1..24}; do
    echo "{\"name\": \"j$number\", \"seconds\": 0.5}"
  done | job_list
  sed -i '1s/^{/{"max_queued": 6, /' cluster.json # so several arrays are submitted
  for number in 1 2 4 7 8 11 14 18 23 29 36 44 53 63 74; do
    start_list
    timeout 60 bash -c 'until [ "$(wc -l 2>/dev/null <results.journal)" -ge "$1" ]; do sleep 0.01; done' bash "$number"
    kill_dispatcher
  done
  run -0 dispatch
  holds 'sorted(began) == sorted(job) and all(each["state"] == "done" for each in r["jobs"])'
  no_specification_left
}


# Install an sbatch whose first call waits for the file "submit".
stub_sbatch() {
  mkdir bin
  cat >bin/sbatch <<END
#!/bin/sh
if mkdir "$PWD/called" 2>/dev/null; then
  until [ -e "$PWD/submit" ]; do sleep 0.05; done
fi
exec $(type -P sbatch) "\$@"
END
  chmod +x bin/sbatch
}


@test "if sbatch outlives its dispatcher and submits attempts that resume has submitted already, none runs twice" {
  cluster '"gpus": 0'
  printf '{"name": "%s", "until": "'"$PWD"'/go"}\n' a b c | job_list
  stub_sbatch
  PATH=$PWD/bin:$PATH start_list
  eventually [ -e called ]
  kill_dispatcher
  PATH=$PWD/bin:$PATH start_list
  wait_until_started a
  wait_until_started b
  wait_until_started c
  : >submit
  eventually two_arrays
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  LAUNCHER=''
  eventually queue_is_empty
  holds 'sorted(began) == ["a", "b", "c"] and r["totals"]["done"] == r["totals"]["attempts"] == 3'
  grep -q "nothing to do" logs/jobs/*/array-*/*.out
  no_specification_left
}


two_arrays() {
  [ "$(arrays)" -eq 2 ]
}


# ---------------------------------------------------------------- failures from outside a job


@test "a running or waiting job that is cancelled by scancel fails with that reason and is not retried" {
  cluster '"gpus": 0' --exclusive
  {
    printf '{"name": "%s", "until": "'"$PWD"'/go"}\n' a b c d
    echo '{"name": "waits"}'
    echo '{"name": "last"}'
  } | job_list
  start_list
  wait_until_started c
  eventually holds '"queue" in job["waits"]["reason"]'
  scancel "$(element_of a)" "$(element_of waits)"
  eventually holds 'job["a"]["state"] == job["waits"]["state"] == "failed"'
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 1 ]
  LAUNCHER=''
  holds 'last["a"]["failure"] == last["waits"]["failure"] == "cancelled outside" and last["a"]["signal"] == "SIGTERM"'
  holds '"cancelled by scancel before it started" in last["waits"]["reason"]'
  holds 'r["totals"]["done"] == 4 and r["totals"]["attempts"] == 6 and "waits" not in began'
  no_specification_left
}


@test "a job that exceeds SLURM's time limit fails with a timeout" {
  cluster '"gpus": 0' --time=5
  echo '{"name": "a", "seconds": 600, "_retries": 0}' | job_list
  start_list
  wait_until_started a
  eventually scontrol update "jobid=$(element_of a)" EndTime=now # SLURM refuses it in the job's first second
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 1 ]
  LAUNCHER=''
  holds 'last["a"]["failure"] == "timeout" and "SLURM'"'"'s time limit" in last["a"]["reason"]'
  no_process_left
}


@test "a job that is preempted by a job in partition urgent is restarted, and this is not counted as a retry" {
  cluster '"gpus": 0' --exclusive
  echo "{\"name\": \"a\", \"until\": \"$PWD/go\", \"_retries\": 0}" | job_list
  start_list
  wait_until_started a
  sbatch --partition=urgent --nodes=4 --exclusive --output=urgent --wrap 'echo here'
  wait_for_line out "preempted: SLURM gave its node to a job of higher priority"
  wait_for_second_start a
  [ -s urgent ]
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  LAUNCHER=''
  holds '[each["failure"] for each in job["a"]["attempts"]] == ["preempted", ""]'
}


@test "a job on a node that is marked DOWN is restarted elsewhere, and this is not counted as a retry" {
  local node
  cluster '"gpus": 0'
  echo "{\"name\": \"a\", \"until\": \"$PWD/go\", \"_retries\": 0}" | job_list
  start_list
  wait_until_started a
  node=$(node_of_job a)
  scontrol update "nodename=$node" state=drain reason=test
  scontrol update "nodename=$node" state=down reason=test
  wait_for_second_start a
  [ "$(node_of_job a)" != "$node" ]
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  LAUNCHER=''
  holds '[each["failure"] for each in job["a"]["attempts"]] == ["server lost", ""]'
  scontrol update "nodename=$node" state=resume
}


wait_for_second_start() { # <name>
  timeout 200 bash -c 'until [ "$(grep -c "^begin $2 " "$1")" -eq 2 ]; do sleep 0.2; done' bash "$STARTED" "$1"
}


count_processes() { # <name>: print the number of processes of the job
  grep -lszF -e "STARTED=$STARTED" /proc/[0-9]*/environ | while read -r file; do
    tr '\0' ' ' <"${file%environ}cmdline"
  done | grep -cF -- "job.py --name $1 "
}


slurm_marks_nodes_down_after() { # <seconds>
  sed -i "s/^SlurmdTimeout=.*/SlurmdTimeout=$1/" "$SLURM_CONF"
  scontrol reconfigure
}


@test "jobs of a powered-off node, and of a node that SLURM cannot reach, run elsewhere, and never twice at once" {
  local lost unreachable
  cluster '"gpus": 0' --exclusive
  printf '{"name": "%s", "until": "'"$PWD"'/go", "_retries": 0}\n' a b | job_list
  start_list
  wait_until_started a
  wait_until_started b
  lost=$(node_of_job a) unreachable=$(node_of_job b)
  slurm_marks_nodes_down_after 8
  lab kill "$lost"
  lab cut "$unreachable"
  until grep -q "^begin b .*" <(grep -v " $unreachable " "$STARTED"); do
    [ "$(count_processes b)" -le 1 ] || touch two
    sleep 0.1
  done
  [ ! -e two ]
  wait_for_second_start a
  run ! grep -E "^begin . ($lost|$unreachable) " <(tail -n 2 "$STARTED")
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  LAUNCHER=''
  holds '[each["failure"] for each in job["a"]["attempts"]] == ["server lost", ""]'
  holds '"has failed" in job["a"]["attempts"][0]["reason"] and len(job["b"]["attempts"]) == 2'
  slurm_marks_nodes_down_after 30
}


@test "while slurmctld is stopped, jobs continue, the list waits, and nothing is treated as lost" {
  cluster '"gpus": 0'
  {
    printf '{"name": "%s", "seconds": 2}\n' a b
    echo "{\"name\": \"c\", \"until\": \"$PWD/go\"}"
  } | job_list
  start_list
  wait_until_started c
  kill "$(pid_of_slurmctld)" # not SIGKILL: slurmctld would lose its state and start jobs twice
  wait_for_line out "slurm: unreachable: "
  grep -q "Unable to contact slurm controller" out
  : >go
  wait_until_started a
  start_slurmctld
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  LAUNCHER=''
  holds 'sorted(began) == ["a", "b", "c"] and r["totals"]["attempts"] == r["totals"]["done"] == 3'
}


@test "the job of a killed supervisor is killed and retried" {
  local pid
  cluster '"gpus": 0'
  echo "{\"name\": \"a\", \"until\": \"$PWD/go\", \"_retries\": 0}" | job_list
  start_list
  wait_until_started a
  pid=$("$VIRTUAL_ENV/bin/python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["supervisor"]["pid"])' \
    logs/jobs/*/*/node_slurm.pid)
  kill -KILL "$pid"
  wait_for_second_start a
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  LAUNCHER=''
  holds '[each["failure"] for each in job["a"]["attempts"]] == ["supervisor killed", ""]'
}


# ---------------------------------------------------------------- secrets


@test "a secret reaches the job but no command line, file or output of SLURM, and no file has it after the list ends" {
  make_secret
  cluster '"gpus": 0' --exclusive
  {
    printf '{"name": "%s", "until": "'"$PWD"'/go"}\n' a b c d
    echo '{"name": "waits"}'
  } | job_list
  sed -i "s/\"_env\": {/&\"SECRET\": \"$(<secret)\", /" jobs.json
  sed -i 's/^record("begin"/assert os.environ["SECRET"] == open("secret").read(), os.environ["SECRET"]\n&/' job.py
  watch_command_lines
  SEEN=yes CALLER_SECRET=$(<secret) start_list
  for name in a b c d; do
    wait_until_started "$name"
  done
  eventually holds '"queue" in job["waits"]["reason"]'
  [ "$(stat -c %a "$(find logs -name 'order.*')")" = 600 ]
  {
    scontrol show job --details
    squeue --array --format='%all'
    scontrol write batch_script "$(element_of a)" -
    scontrol write batch_script "$(element_of waits)" -
  } >shown
  grep -q array_task.sh shown
  run ! grep -F -f secret shown
  run ! grep -rlaF -f secret "$MUSTER_LAB/slurmctld" "$MUSTER_LAB"/*/slurmd
  run ! grep -rlF -f secret results.json results.journal
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  LAUNCHER=''
  stop_watching
  run ! grep -F -f secret seen
  run ! grep -rlF -f secret logs experiments results.json results.html results.journal
}


# ---------------------------------------------------------------- base models

# Three experiments from one base model, whose training runs until the file "go" exists.
three_experiments() { # [more settings of the base model]
  local number
  DISPATCH[1]=$KIT/scripts/jobs/run_two_phase_training.py
  cluster '"gpus": 1'
  sed -i "s#^{#{\"base_models\": {\"base\": [\"base_until\", \"base_exit\", \"base_exit_once\"], \"experiment\": [\"name\"]}, #" \
    cluster.json
  for number in 1 2 3; do
    echo "{\"name\": \"e$number\", \"mode\": \"full_fine_tuning\", \"base_participants\": [\"b\"], \"prefix\": \"e$number\", \
\"base_until\": \"$WORK/go\"${1:+, $1}}"
  done | job_list
}


waiting_for_base() { # <number>: check that this many experiments wait in SLURM's queue for their base model
  [ "$(squeue --noheader --array --states=PENDING --format='%E' | grep -c '^afterok:')" -eq "$1" ]
}


@test "experiments wait in SLURM's queue for their base model, and start without a dispatcher" {
  three_experiments
  start_list
  wait_until_started base
  eventually waiting_for_base 3
  eventually holds 'all(job[name]["reason"].endswith("queue: Dependency") for name in ("e1", "e2", "e3"))'
  kill_dispatcher
  : >go
  for name in e1 e2 e3; do
    wait_for_line "$STARTED" "end $name"
  done
  run -0 list resume
  holds 'r["totals"]["done"] == r["totals"]["attempts"] == len(began) == 4'
  [ "$(grep -c "base e. .*manifest.json" "$STARTED")" -eq 3 ]
  all_valid
}


@test "if a base training fails, its experiments leave SLURM's queue; a retry of it queues them again, without a retry they fail" {
  three_experiments "\"base_exit\": 3, \"base_exit_once\": \"$WORK/tried\""
  start_list
  wait_until_started base
  eventually waiting_for_base 3
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ] || { cat out && false; }
  holds 'began.count("base") == 2 and all(len(job[name]["attempts"]) == 1 for name in ("e1", "e2", "e3"))'
  rm -r experiments go
  three_experiments '"base_exit": 4'
  start out "${DISPATCH[@]}" "${OPTIONS[@]}" --retries 0 --log-file failing.json
  eventually waiting_for_base 3
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 1 ]
  [ "$(grep -c '"reason": "base [0-9a-f]* failed"' failing.json)" -eq 3 ]
  [ "$(grep -c '^begin e' "$STARTED")" -eq 3 ]
}
