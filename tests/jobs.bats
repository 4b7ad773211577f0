#!/usr/bin/env bats
#
# Job lists over SSH on the laboratory: results are recorded and copied back, unusable servers are reported, and a list
# can be watched, interrupted, cancelled and resumed. Faults of programs, connections and servers: jobs_faults.bats.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
# shellcheck source=tests/lab/nodes.bash
source "$BATS_TEST_DIRNAME/lab/nodes.bash"
# shellcheck source=tests/lab/job_lists.bash
source "$BATS_TEST_DIRNAME/lab/job_lists.bash"
# shellcheck source=tests/lab/secrets.bash
source "$BATS_TEST_DIRNAME/lab/secrets.bash"


setup_file() {
  start_servers 3
}


setup() {
  enter_list
}


teardown() {
  leave_list
}


# Install a stub of nvidia-smi. Each line of ~/gpus describes a GPU: "unknown", "lost", "mig", or the MiB that other
# processes use; job.py uses 9000 MiB more. ~/apps lists the processes.
stub_nvidia_smi() { # <node> <line for each GPU...>
  printf '%s\n' "${@:2}" >"$HOMES/$1/gpus"
  cat >"$HOMES/$1/bin/nvidia-smi" <<'END'
#!/usr/bin/env bash
case $1 in
  --query-compute-apps=*) cat ~/apps 2>/dev/null ;;
  -L) printf '%s\n' 'GPU 0: Stub (UUID: GPU-0)' '  MIG 3g Device 0: (UUID: MIG-a)' '  MIG 3g Device 1: (UUID: MIG-b)' ;;
esac
[[ $1 == --query-gpu=* ]] || exit 0
index=0
while read -r used; do
  case $used in
    lost) echo "$index$(printf ', [GPU is lost]%.0s' {1..8})" ;;
    unknown) echo "$index, GPU-$index, 550.0, [N/A], [N/A], [N/A], Default, Disabled, Stub" ;;
    mig) echo "$index, GPU-$index, 550.0, 80000, [N/A], Enabled, Default, Disabled, Stub" ;;
  esac
  [[ $used == [0-9]* ]] || { index=$((index + 1)) && continue; }
  [[ ! -e ~/gpu_$index || ! -e /proc/$(<~/gpu_$index) ]] || used=$((used + 9000))
  echo "$index, GPU-$index, 550.0, 80000, $used, Disabled, Default, Disabled, Stub"
  index=$((index + 1))
done <~/gpus
END
  chmod +x "$HOMES/$1/bin/nvidia-smi"
}


panes() { # <node> <format>: a line for each pane of the session
  lab ssh "$1" tmux list-panes -s -t "=ml_training" -F "$2"
}


pane_shows() { # <node> <index of the pane> <text>
  lab ssh "$1" tmux capture-pane -p -t "$(panes "$1" '#{pane_id}' | sed -n "$(($2 + 1))p")" | grep -F -- "$3"
}


pane_changes() { # <node> <index of the pane> <text>: lines with this text change
  local before
  before=$(pane_shows "$@")
  sleep 1
  [ "$before" != "$(pane_shows "$@")" ]
}


# ---------------------------------------------------------------- a list


# bats test_tags=quick
@test "nine jobs on three servers run once each; the results, the HTML page, status, logs and why show them" {
  cluster "$N1:2" "$N2:1" "$N3:1"
  for fold in 0 1 2 3 4 5 6 7 8; do
    echo "{\"name\": \"f$fold\", \"fold\": $fold, \"prefix\": \"exp1\", \"seconds\": 0.5, \"texts\": [\"it's\", \"\$x;\"]}"
  done | job_list
  run -0 dispatch
  [[ "$output" == *"finished: 9 of 9 done"* ]]
  [ -z "$(find logs/jobs -name 'sockets.*')" ]
  holds 'r["state"] == "finished" and r["totals"]["done"] == r["totals"]["attempts"] == 9'
  holds 'sorted(began) == sorted(job) and all(each["state"] == "done" for each in r["jobs"])'
  holds '{last[name]["server"] for name in job} == {"'"$N1"'", "'"$N2"'", "'"$N3"'"}'
  holds 'all([words[1:3] for words in started].count([name, last[name]["server"]]) == 1 for name in job)'
  holds 'all(0.5 <= each["seconds"] < 20 and each["peak_memory"] > 5e6 and each["exit_code"] == 0 for each in last.values())'
  holds 'all(each["metrics"]["step"] == each["metrics"]["steps"] == 10 for each in r["jobs"])'
  for fold in 0 1 2 3 4 5 6 7 8; do
    grep -q "^f$fold on " "experiments/exp1/fold$fold/result"
  done
  grep -q '<svg' results.html
  run -0 list status
  [ "$(grep -c ' done ' <<<"$output")" -eq 9 ]
  run -0 list logs fold3
  [[ "$output" == *"arguments --name f3 --fold 3 --prefix exp1 --seconds 0.5 --texts it's \$x; --device cpu"* ]]
  [[ "$output" == *"f3-tick-1"* ]]
  run -0 list why fold3
  [[ "$output" == *"exp1/fold3: done"*"attempt 1 on $PREFIX"*": done"* ]]
  run -0 list resume # all jobs are done
  holds 'len(began) == 9'
}


@test "jobs share no GPU, use none that is in use by another process, and with _gpus 2 get two GPUs of one server" {
  stub_nvidia_smi "$N1" 0 0 70000 0
  stub_nvidia_smi "$N2" 0 0
  cluster "$N1" "$N2" "$N3"
  sed -i -e "s/{\"host\": \"$N1\"/&, \"gpu_ids\": [0, 2, 3], \"slots_per_gpu\": 1/" \
    -e "s/{\"host\": \"$N2\"/&, \"gpus\": 2, \"slots_per_gpu\": 1/" \
    -e "s/{\"host\": \"$N3\"/&, \"gpus\": 1/" cluster.json
  job_list <<END
{"name": "a", "seconds": 1}
{"name": "b", "seconds": 1}
{"name": "c", "seconds": 1}
{"name": "d", "seconds": 1}
{"name": "e", "seconds": 1}
{"name": "two", "seconds": 1, "_gpus": 2}
{"name": "long", "until": "$PWD/go", "_priority": 1}
END
  start_list
  wait_for_line out "$N3: not used: GPU 0: not found: $N3 has 0 GPUs"
  wait_for_line out "$N1: GPU 2: in use by another process; waiting"
  eventually holds 'r["totals"]["done"] == 6'
  holds 'not [words for words in started if words[0] == "overlap"]'
  holds '("'"$N1"'", "2") not in [(words[2], words[4]) for words in started if words[0] == "begin"]'
  sed -i 's/70000/300/' "$HOMES/$N1/gpus"
  eventually grep -q "$N1: GPU 2: free again" out
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  grep -q "arguments --name a --seconds 1 --device cuda:0" logs/jobs/*/*/node_*.log
  holds '[words[4] for words in started if words[0] == "begin" and words[1] == "two"] in (["0,1"], ["0,3"])'
  holds 'all(len(words[4].split(",")) == 1 for words in started if words[0] == "begin" and words[1] != "two")'
  holds 'last["two"]["gpus"] in ([0, 1], [0, 3]) and len(began) == 7'
}


@test "jobs use no lost GPU, and use a MIG instance or a GPU with unknown memory if it is free, also with _gpus all" {
  stub_nvidia_smi "$N1" 0 lost unknown
  echo "GPU-2, 4194305, [N/A], python" >"$HOMES/$N1/apps"
  stub_nvidia_smi "$N2" mig
  echo "MIG-a, 4194305, [N/A], python" >"$HOMES/$N2/apps"
  stub_nvidia_smi "$N3" mig
  cluster "$N1" "$N2" "$N3"
  sed -i -e "s/{\"host\": \"$N1\"/&, \"gpus\": 3, \"slots_per_gpu\": 1, \"labels\": [\"large\"]/" \
    -e "s/{\"host\": \"$N2\"/&, \"gpu_ids\": [\"MIG-a\", \"MIG-b\"], \"slots_per_gpu\": 1, \"labels\": [\"mig\"]/" \
    -e "s/{\"host\": \"$N3\"/&, \"gpus\": 1/" cluster.json
  job_list <<END
{"name": "all", "_gpus": "all", "_labels": ["large"]}
{"name": "one", "_labels": ["large"], "_priority": 1}
{"name": "b", "_labels": ["mig"]}
{"name": "c", "_labels": ["mig"]}
END
  start_list
  wait_for_line out "$N1: GPU 1: not used: GPU is lost; reboot the machine"
  wait_for_line out "$N1: GPU 2: in use by another process; waiting"
  wait_for_line out "$N2: GPU MIG-a: in use by another process; waiting"
  wait_for_line out "$N3: connected; "
  grep -q "$N3: connected; .*GPU 0: MIG is on, .*: MIG-a, MIG-b$" out
  eventually holds 'r["totals"]["done"] == 3'
  [ "$(awk '$1 == "begin" { print $2, $5 }' "$STARTED" | sort | xargs)" = "b MIG-b c MIG-b one GPU-0" ]
  rm "$HOMES/$N1/apps"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  holds 'last["all"]["gpus"] == [0, 2] and last["b"]["gpus"] == ["MIG-b"]'
  grep -q "^begin all $N1 [0-9]* GPU-0,GPU-2$" "$STARTED"
}


@test "a failed job is recorded with its failure and last lines, retried on another server, and leaves no process" {
  cluster "$N1:4" "$N2:4"
  job_list <<END
{"name": "fails", "exit": 1, "_retries": 0}
{"name": "slow", "seconds": 60, "_timeout": 1, "_retries": 0}
{"name": "ignores", "seconds": 60, "ignore_sigterm": true, "_timeout": 1, "_retries": 0}
{"name": "killed", "signal": "SIGKILL", "_retries": 0}
{"name": "fault", "signal": "segfault", "_retries": 0}
{"name": "daemon", "daemon": true}
{"name": "large", "memory": 80}
{"name": "moves", "exit": 3, "exit_once": "$PWD/once", "_priority": 1}
END
  run -1 dispatch
  holds '{name for name in job if job[name]["state"] == "done"} == {"daemon", "large", "moves"}'
  holds 'last["fails"]["failure"] == "exit code" and last["fails"]["exit_code"] == 1'
  holds 'last["fails"]["last_lines"][-1] == "fails gives up" and "fails gives up" in job["fails"]["reason"]'
  holds 'last["slow"]["failure"] == last["ignores"]["failure"] == "timeout"'
  holds 'last["slow"]["signal"] == "SIGTERM" and last["ignores"]["signal"] == "SIGKILL"'
  holds '1 <= last["slow"]["seconds"] < 5 and 3.5 < last["ignores"]["seconds"] < 15'
  holds 'last["killed"]["failure"] == "signal" and last["killed"]["signal"] == "SIGKILL"'
  holds 'last["fault"]["failure"] == "signal" and last["fault"]["signal"] == "SIGSEGV"'
  holds 'last["large"]["peak_memory"] > 80 * 2**20 > last["daemon"]["peak_memory"]'
  holds '[each["exit_code"] for each in job["moves"]["attempts"]] == [3, 0]'
  holds 'job["moves"]["attempts"][0]["server"] != last["moves"]["server"]'
  no_process_left
  [[ "$output" == *"show the cause:  "*"run_distributed_training.py"*" why "*"run them again:  "*"run_distributed_training.py"*" retry failed"* ]]
  run list why slow
  [ "$status" -eq 2 ] # "name" is an argument of job.py; Muster names a job by its prefix, and this job has none
  run -0 list why "$(values '[job["fault"]["id"]]')"
  [[ "$output" == *": failed"*"attempt 1 on "*": signal: killed by SIGSEGV"* ]]
}


@test "a job cannot overwrite the results of another job, and gets its arguments byte for byte" {
  cluster "$N1"
  cat >job.py <<'END'
import os, sys
open(os.environ["MUSTER_OUTPUT_DIR"] + "/arguments", "wb").write(b"\0".join(map(os.fsencode, sys.argv[1:])))
END
  long=$(head -c 90000 /dev/zero | tr '\0' x)
  cat >jobs.json <<END
[{"q": "it's \"\$HOME\" \`id\`; exit\r\n\t\\\\x é \u2028", "empty": "", "long": "$long", "flag": true, "no": false,
  "list": ["-1", "--x", "*"], "none": null, "number": 0.00001, "opt": {"lr": [1E-5, null]},
  "_nested": "json"}]
END
  run -0 dispatch
  printf '%s\0' --q $'it\'s "$HOME" `id`; exit\r\n\t\\x é \xe2\x80\xa8' --empty '' --long "$long" --flag --list -1 --x '*' \
    --number 0.00001 --opt '{"lr": [1E-5, null]}' --device >expected
  printf cpu >>expected
  cmp expected experiments/*/arguments
  printf '[{"another": 1, "prefix": "p", "fold": 0}]\n' >jobs.json
  mkdir -p experiments/p/fold0
  echo 0123456789 of job.py >experiments/p/fold0/.muster_job
  touch experiments/p/fold0/result
  run -2 dispatch --log-file other.json
  [[ "$output" == *"holds the results of job 0123456789 of job.py; move it away"* ]]
  [ ! -e experiments/p/fold0/arguments ] && [ ! -e other.json ]
  rm experiments/p/fold0/result # without results, the directory's .muster_job does not matter
  run -0 dispatch --log-file other.json
  [ -e experiments/p/fold0/arguments ]
}


@test "a value of _env reaches the job, and is in no command line, journal, log or result" {
  make_secret
  watch_command_lines
  cluster "$N1"
  cat >job.py <<'END'
import os, time
assert os.environ["SECRET"] == os.environ["WANDB_API_KEY"] == open("secret").read()
time.sleep(0.5)  # long enough for its command line to be read
END
  printf '[{"seen": "=yes", "_env": {"SECRET": "%s"}}]\n' "$(<secret)" >jobs.json
  sed -i 's/SEEN=yes/--seen/' patterns
  WANDB_API_KEY=$(<secret)
  export WANDB_API_KEY
  run -0 dispatch
  [[ "$output" == *"forwarded to the jobs: "*WANDB_API_KEY*"; MUSTER_FORWARD changes the list"* ]]
  stop_watching
  grep -qx -- --seen seen
  run ! grep -F -f secret seen
  run ! grep -rlF -f secret logs experiments results.json results.html results.journal
  grep -q SECRET results.journal # the name of the variable
}


@test "results are copied back from servers without shared files, and a retry on another server continues from them" {
  WORK="$APART/my 'work' [k]" # shells and rsync treat "[k]", and "[p]" in the prefix below, as wildcards
  enter_workdir
  write_job_script
  cat >>job.py <<'END'
with open(f"{out}/diary", "a") as file:
    file.write(f"{node}\n")
if "twice" in job and len(open(f"{out}/diary").readlines()) < 2:
    sys.exit(4)
END
  cluster "$N1:1" "$N2:1"
  lab ssh "$N1" mkdir -p "$APART/my 'work' k"
  lab ssh "$N2" mkdir -p "$APART/my 'work' k"
  job_list <<END
{"name": "a", "twice": true, "prefix": "p", "fold": 0, "_priority": 1}
{"name": "b", "big": 3, "prefix": "[p]", "fold": 0, "until": "$PWD/go"}
END
  run dispatch
  [[ "$output" == *"$N1: not used: script job.py: not in $WORK; copy it there (--sync does if git lists it), or set workdir"* ||
    "$output" == *"$N1: not used: workdir $WORK: no such directory on $N1; set workdir, or use --sync"* ]]
  [ "$status" -eq 75 ]
  start_list --sync
  wait_until_started b
  run -0 list logs "[p]/fold0" # uses the same connection, and must not close it
  [[ "$output" == *"b-tick-1"* ]]
  lab ssh "$N1" touch "$PWD/go"
  lab ssh "$N2" touch "$PWD/go"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  run ! grep "cannot be copied" out
  holds 'all(each["state"] == "done" for each in r["jobs"]) and len(job["a"]["attempts"]) == 2'
  [ "$(sort experiments/p/fold0/diary)" = "$(printf '%s\n' "$N1" "$N2")" ]
  lab ssh "$(node_of_job b)" cat "$WORK/experiments/[p]/fold0/big" | cmp - "experiments/[p]/fold0/big"
  [ "$(cat logs/jobs/*/*.1/node_*.exit logs/jobs/*/*.2/node_*.exit | sort | xargs)" = "0 0 4" ]
}


@test "with --sync, a working directory of another user on a server is refused, and no file is copied there" {
  WORK="$APART/of another user"
  enter_workdir
  write_job_script
  lab ssh "$N1" mkdir "$WORK"
  lab ssh "$N1" chown 65534 "$WORK"
  cluster "$N1:1"
  job_list <<<'{"name": "a"}'
  start_list --sync
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 75 ]
  [[ "$(<out)" == *"$N1: not used: cannot create workdir $WORK: $WORK: belongs to another user"* ]]
  run ! lab ssh "$N1" test -e "$WORK/job.py"
}


@test "files that no job wrote are not overwritten on a server, and links to other disks stay" {
  WORK="$APART/foreign"
  enter_workdir
  write_job_script
  cluster "$N1:1"
  job_list <<END
{"name": "a", "prefix": "p", "fold": 0, "_priority": 1}
{"name": "b", "prefix": "q", "fold": 0}
END
  mkdir disk
  ln -s disk experiments
  lab ssh "$N1" mkdir -p "$WORK/experiments/p/fold0" "$WORK/far"
  lab ssh "$N1" touch "$WORK/experiments/p/fold0/result"
  lab ssh "$N1" ln -s ../far "$WORK/experiments/q"
  run -1 dispatch --sync
  [[ "$output" == *"$WORK/experiments/p/fold0 contains files that no job wrote; move it away, "* ]]
  holds 'job["b"]["state"] == "done" and job["a"]["attempts"][0]["failure"] == "refused"'
  run -0 lab ssh "$N1" ls -A -s "$WORK/experiments/p/fold0" "$WORK/far/fold0"
  [[ "$output" == *"0 result"*.muster_job* ]]
  [ -L experiments ] && [ ! -e experiments/p ] && [ "$(cat disk/q/fold0/result)" = "b on $N1" ]
}


@test "--sync copies the files that git lists, to ~/ml-customization if it exists, and follows symbolic links there" {
  local usual="$HOMES/$N1/ml-customization"
  WORK="$APART/usual"
  enter_workdir
  write_job_script
  cluster "$N1:1"
  job_list <<<'{"name": "a"}'
  git init -q
  printf '%s\n' '*.csv' '!keep.csv' >.gitignore
  mkdir data "$usual" "$usual-disk"
  touch a.csv keep.csv data/forced.csv
  truncate -s 100M data/sparse
  git add -f data/forced.csv
  ln -s "$usual-disk" "$usual/data"
  run dispatch --sync
  synced=$(ls "$usual" "$usual/data/")
  size=$(du -k "$usual/data/sparse" | cut -f 1)
  [ -L "$usual/data" ]
  rm -r "$usual"
  echo "$output"
  [ "$status" -eq 0 ]
  [[ "$synced" == *job.py* && "$synced" == *experiments* && "$synced" == *keep.csv*forced.csv* && "$synced" != *a.csv* ]]
  [ "$size" -lt 1000 ]
  run ! lab ssh "$N1" test -e "$WORK/job.py"
  holds 'job["a"]["state"] == "done"'
  grep -q arguments experiments/*/result || grep -q arguments logs/jobs/*/*/node_*.log # copied back
}


# ---------------------------------------------------------------- tmux


@test "the printed tmux command shows a live pane with the job's name for each slot" {
  cluster "$N1:8" "$N2:16"
  sed -i "s#{\"host\": \"$N1\"#&, \"labels\": [\"eight\"]#" cluster.json
  for number in {1..12}; do # each server gets at least one job, whichever server connects first
    options=$([ "$number" -gt 1 ] || echo ', "_labels": ["eight"], "_priority": 1')
    echo "{\"name\": \"job$number\", \"prefix\": \"p$number\", \"fold\": 0, \"until\": \"$PWD/go\"$options}"
  done | job_list
  start_list
  wait_for_line out "$N1: connected; watch: ssh -t $N1 tmux attach -t ml_training"
  wait_for_line out "$N2: connected; watch: ssh -t $N2 tmux attach -t ml_training"
  eventually holds 'len(began) == 12'
  [ "$(panes "$N1" x | wc -l)" -eq 8 ]
  [ "$(panes "$N2" x | wc -l)" -eq 16 ]
  eventually holds 'len(last) == 12'
  for node in "$N1" "$N2"; do
    read -r slot name < <(values 'next((each["slots"][0], name) for name, each in last.items() if each["server"] == "'"$node"'")')
    eventually pane_shows "$node" "$slot" "$name-tick-"
    eventually pane_changes "$node" "$slot" "$name-tick-"
    panes "$node" '#{pane_title}' | sed -n "$((slot + 1))p" | grep -qxF "p${name#job}/fold0 (slot $slot)"
  done
  [ "$(panes "$N2" '#{pane_title}' | grep -c ': idle$')" -ge 4 ]
  shows_on_terminal "$name-tick-" ssh -tt "$node" tmux attach -t ml_training
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  eventually pane_shows "$node" "$slot" "--- ended with exit code 0" # the session stays open for the user
  run -0 list status
  [[ "$output" == *"12 done"* && "$output" != *running* ]]
  run -0 list cancel all
  [ "$output" = "nothing to cancel: no job is waiting or running" ]
  lab cut "$N1"
  run -1 list close
  [[ "$output" == *"$N1: "* && "$output" == *"$N2: removed tmux session ml_training"* ]]
  lab heal "$N1"
  run -0 list close
  [ "$(sort <<<"$output")" = "$N1: removed tmux session ml_training"$'\n'"$N2: no tmux session of this list" ]
  run ! panes "$N1" x
  run ! panes "$N2" x
}


@test "jobs continue when tmux is killed, and an existing session is not touched" {
  lab ssh "$N1" tmux new-session -d -s ml_training -x 80 -y 24 "sleep 600"
  existing=$(panes "$N1" '#{pane_pid} #{session_created} #{pane_width}')
  cluster "$N1" "$N2"
  job_list <<END
{"name": "a", "until": "$PWD/go"}
{"name": "b", "until": "$PWD/go"}
{"name": "c", "until": "$PWD/go"}
END
  start_list
  wait_for_line out "$N1: connected; watch: ssh -t $N1 tmux attach -t ml_training_2; tmux session ml_training is in use; this one is ml_training_2"
  eventually holds 'len(began) == 3'
  [ "$existing" = "$(panes "$N1" '#{pane_pid} #{session_created} #{pane_width}')" ]
  lab ssh "$N2" tmux kill-server
  pids=$(awk '{ print $4 }' "$STARTED")
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  holds 'len(began) == 3 and r["totals"]["done"] == 3'
  [ "$pids" = "$(awk '$1 == "begin" { print $4 }' "$STARTED")" ]
  [ "$existing" = "$(panes "$N1" '#{pane_pid} #{session_created} #{pane_width}')" ]
  lab ssh "$N1" tmux has-session -t =ml_training_2
  job_list <<<"{\"name\": \"d\", \"until\": \"$PWD/end\"}"
  start_list --log-file other.json
  wait_for_line out "; this one is ml_training_2" # the session of this list replaces that of the finished list
  : >end
  wait_for_exit "$LAUNCHER"
  run -0 list close
  [[ "$output" == *"$N1: no tmux session of this list"* ]]
  lab ssh "$N1" tmux has-session -t =ml_training_2
  run -0 list close --log-file other.json
  [[ "$output" == *"$N1: removed tmux session ml_training_2"* ]]
  run ! lab ssh "$N1" tmux has-session -t =ml_training_2
  [ "$existing" = "$(panes "$N1" '#{pane_pid} #{session_created} #{pane_width}')" ]
}


@test "two concurrent lists on the same servers do not interfere" {
  cluster "$N1" "$N2"
  job_list <<<"{\"name\": \"a\", \"until\": \"$PWD/go.a\"}"
  start_list --log-file a.json
  first=$LAUNCHER
  wait_for_line out "$N2: connected"
  wait_until_started a
  mv out out.a
  job_list <<<"{\"name\": \"b\", \"until\": \"$PWD/go.b\"}"
  start_list --log-file b.json
  wait_for_line out "$N1: connected; watch: ssh -t $N1 tmux attach -t ml_training_2"
  wait_until_started b
  : >go.b
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  [ "$(panes "$N1" x | wc -l)" -eq 2 ] # the panes of list a
  run -2 list close --log-file a.json
  [[ "$output" == *"a.journal: a dispatcher already runs this list"* ]]
  : >go.a
  wait_for_exit "$first"
  [ "$status" -eq 0 ]
  grep -q "finished: 1 of 1 done" out.a
}


# ---------------------------------------------------------------- servers that cannot be used


@test "unusable servers are reported with a remedy, no password is asked for, and other servers are used" {
  WORK="$APART/unusable 'work'"
  enter_workdir
  write_job_script
  mkdir -p home/.ssh
  start_second_sshd "$N2" 2222 -o PubkeyAuthentication=no -o PasswordAuthentication=yes
  ssh-keygen -q -t ed25519 -N '' -f home/other
  : >home/unknown
  sed "s/^$N3,[^ ]*/changed/" "$MUSTER_LAB/known_hosts" >home/changed
  # Other forms of one address: ssh would use a connection to the same name again, without a check of keys.
  IFS=. read -r one two three four <<<"$(address "$N1")"
  cat >home/.ssh/config <<END
Host good twin
  HostName $(address "$N1")
Host wrongkey
  HostName $one.$two.$((256 * three + four))
Host unknown
  HostName $one.$((65536 * two + 256 * three + four))
Host changed
  HostName $(printf '0x%02x%02x%02x%02x' "$one" "$two" "$three" "$four")
Host password
  HostName $(address "$N2")
Host good twin wrongkey
  HostKeyAlias $N1
Host unknown
  CheckHostIP no
  UserKnownHostsFile "$PWD/home/unknown"
Host changed
  HostKeyAlias changed
  UserKnownHostsFile "$PWD/home/changed"
Host password
  HostKeyAlias $N2
Host good twin password wrongkey
  UserKnownHostsFile $MUSTER_LAB/known_hosts
Host good twin unknown changed password
  User root
  IdentityFile $MUSTER_LAB/id
END
  for node in "$N1" "$N3"; do
    lab ssh "$node" mkdir -p "$WORK"
    lab ssh "$node" tee "$WORK/job.py" <job.py >/dev/null
  done
  : >"$BATS_TEST_TMPDIR/nothing"
  on "$N1" mount --bind "$BATS_TEST_TMPDIR/nothing" "$(type -P tmux)"
  on "$N3" mount --bind "$BATS_TEST_TMPDIR/nothing" "$(type -P rsync)"
  cat >cluster.json <<END
{"script_path": "job.py", "defaults": {"gpus": 0, "slots_per_gpu": 2, "python": "$VIRTUAL_ENV/bin/python"}, "servers": [
  {"host": "good"}, {"host": "twin"}, {"host": "$N1", "user": "nobody"}, {"host": "wrongkey", "ssh_key": "$PWD/home/other"},
  {"host": "unknown"}, {"host": "changed"}, {"host": "password", "port": 2222}, {"host": "$N2", "workdir": "/nix/work"},
  {"host": "$(address "$N2")", "python": "/nix/python"}, {"host": "$N3"}, {"host": "nix.invalid"}]}
END
  job_list <<<'{"name": "a", "seconds": 0.2}'
  SECONDS=0
  run with_home "${DISPATCH[@]}" --cluster-config cluster.json --jobs-config jobs.json < <(yes yes)
  ((SECONDS <= 20))
  on "$N1" umount "$(type -P tmux)"
  on "$N3" umount "$(type -P rsync)"
  echo "$output"
  [ "$status" -eq 0 ]
  [[ "$output" =~ (good|twin)": connected; tmux is not installed; no live view of its slots; to get one" ]]
  [[ "$output" =~ (good|twin)": not used: is the same machine as "(good|twin)"; list it once" ]]
  [[ "$output" == *"$N1: not used: login without a password refused (nobody@"*"Permission denied"*"; install your key: ssh-copy-id $N1"* ]]
  [[ "$output" == *"wrongkey: not used: "*"Permission denied"*"; install your key: ssh-copy-id wrongkey"* ]]
  [[ "$output" == *"unknown: not used: host key unknown; log in once and check its fingerprint: ssh unknown"* ]]
  [[ "$output" == *"changed: not used: host key has changed, possibly an attack; "*"ssh-keygen -R changed"* ]]
  [[ "$output" == *"password-2222: not used: "*"Permission denied"* ]]
  [[ "$output" == *"$N2: not used: workdir /nix/work: no such directory on $N2; set workdir, or use --sync"* ]]
  [[ "$output" == *"$(address "$N2"): not used: python /nix/python: no Python 3.10 or newer; install it"* ]]
  [[ "$output" == *"$N3: not used: rsync is not installed there"*"install it"* ]]
  [[ "$output" == *"nix.invalid: not used: "*"Could not resolve hostname"*"; try: ssh nix.invalid true"* ]]
  holds 'job["a"]["state"] == "done" and len(began) == 1'
  grep -q "^a on $N1" experiments/*/result
  [ ! -s home/unknown ]
  [ "$(ls home/.ssh)" = config ]
}


@test "fish and tcsh work as login shells, .bashrc may print, and RemoteCommand and RequestTTY have no effect" {
  WORK="$APART/loud"
  enter_workdir
  write_job_script
  mkdir -p home/.ssh
  set_up_home "$N2" "$(type -P fish)"
  set_up_home "$N3" "$(type -P tcsh)"
  echo 'echo "a noisy .bashrc"; echo {}; echo muster >&2' >>"$HOMES/$N1/.bashrc"
  cat >home/.ssh/config <<END
Host *
  RemoteCommand cat
  RequestTTY force
  ControlMaster no
  ControlPath $PWD/home/control
  LocalForward 127.0.0.1:1 127.0.0.1:22
  ExitOnForwardFailure yes
END
  cluster "$N1:1" "$N2:1" "$N3:1"
  job_list <<'END'
{"name": "a", "seconds": 1, "big": 1}
{"name": "b", "seconds": 1, "big": 1}
{"name": "c", "seconds": 1, "big": 1}
END
  run with_home timeout 100 "${DISPATCH[@]}" --cluster-config cluster.json --jobs-config jobs.json --sync
  set_up_home "$N1"
  set_up_home "$N2"
  set_up_home "$N3"
  echo "$output"
  [ "$status" -eq 0 ]
  holds 'sorted(each["server"] for each in last.values()) == ["'"$N1"'", "'"$N2"'", "'"$N3"'"]'
  [ "$(cat experiments/*/big | wc -c)" -eq $((3 << 20)) ]
  [[ "$output" != *"cannot be copied"* ]]
}


@test "a server whose login shell does not start a command is not used; the message names the start-up file" {
  echo 'exit 0' >"$HOMES/$N2/.bashrc"
  cluster "$N1:1" "$N2:1"
  echo '{"name": "a"}' | job_list
  run dispatch
  set_up_home "$N2"
  echo "$output"
  [ "$status" -eq 0 ]
  [[ "$output" == *"$N2: not used: the login shell ended with exit code 0 before it started Muster's command; its start-up file there (bash: ~/.bashrc"* ]]
}


# ---------------------------------------------------------------- failures that stop a list


@test "five consecutive early failures pause the list; --max-failures and --fail-fast stop it earlier" {
  cluster "$N1:1"
  for number in {1..9}; do
    echo "{\"name\": \"j$number\", \"exit\": 1, \"_retries\": 0}"
  done | job_list
  run -75 dispatch
  [[ "$output" == *"paused: 5 attempts in a row failed within 30 s each; the last: exit code 1: "*"gives up; fix the cause"* ]]
  [[ "$output" == *"paused: 0 of 9 done, 5 failed, 4 waiting"*"continue: "*"run_distributed_training.py"*" resume"* ]]
  holds 'len(began) == 5 and r["state"] == "paused"'
  run list status
  [[ "$output" == *"no dispatcher is running; to continue"* ]]
  sed -i 's/"exit": 1/"exit": 0/' jobs.json # a job with other settings has another id
  run -2 dispatch
  [[ "$output" == *"none of them in this list; use another --log-file"* ]]
  sed -i 's/"exit": 0/"exit": 1/' jobs.json
  run -75 dispatch --max-failures 2 --log-file two.json
  [[ "$output" == *"paused: --max-failures 2: 2 jobs failed"* ]]
  run -1 dispatch --fail-fast --log-file fast.json
  [[ "$output" == *"finished: 0 of 9 done, 1 failed, 8 cancelled"* ]]
}


@test "a paused list resumes after the cause is fixed: failed jobs rerun, finished jobs do not, new jobs are added" {
  cluster "$N1:1"
  cat >>job.py <<END
if job.get("needs") and not os.path.exists("$PWD/fixed"):
    sys.exit("not fixed")
END
  {
    echo '{"name": "good"}'
    for number in 1 2 3 4 5 6; do
      echo "{\"name\": \"j$number\", \"needs\": true, \"_retries\": 0, \"_priority\": -1}"
    done
  } | job_list
  run -75 dispatch
  holds 'job["good"]["state"] == "done" and len(began) == 6'
  : >fixed
  "$VIRTUAL_ENV/bin/python" -I - "$STARTED" <<'END'
import json, sys
jobs = [each for each in json.load(open("jobs.json")) if each["name"] != "j5"]
jobs.append({"name": "new", "_env": {"STARTED": sys.argv[1]}})
json.dump(jobs, open("jobs.json", "w"))
END
  run -0 list retry failed
  [[ "$output" == "requeued "*"; to start: "*"run_distributed_training.py"*" resume" ]]
  run -0 list resume
  holds 'began.count("good") == 1 and began.count("new") == 1'
  holds 'all(began.count(f"j{number}") == 2 for number in range(1, 5)) and began.count("j6") == 1'
  holds '[job["new"]["state"], job["j1"]["state"], job["j4"]["state"]] == ["done"] * 3'
  holds 'job["j5"]["state"] == "cancelled" and job["j5"]["reason"] == "no longer in the list" and began.count("j5") == 1'
}


@test "a job that is added to a running list finds the output of the job it needs, which another server wrote" {
  WORK="$APART/my added list"
  enter_workdir
  write_job_script
  cat >>job.py <<'END'
for output in filter(None, os.environ.get("MUSTER_AFTER", "").split("\n")):
    record("found", name, node, *open(f"{output}/result").read().split())
END
  cluster "$N1:1" "$N2:1"
  sed -i "s/{\"host\": \"$PREFIX\([12]\)\"/&, \"labels\": [\"server\1\"]/" cluster.json
  job_list <<<"{\"name\": \"first\", \"until\": \"$PWD/go\", \"prefix\": \"[f]\", \"_labels\": [\"server1\"]}"
  start_list --sync
  wait_until_started first
  mv jobs.json original.json
  job_list <<END
{"name": "second", "_after": "[f]", "_labels": ["server2"]}
{"name": "third", "_after": ["[f]", "p"], "_labels": ["server1"]}
{"name": "other", "prefix": "p", "_labels": ["server2"], "big": 1}
END
  mv jobs.json more.json
  mv original.json jobs.json
  run -0 list add more.json
  [ "$output" = "added 3 new jobs" ]
  eventually holds 'job["other"]["state"] == "done"'
  run -0 list status
  [ "$(grep -c 'waits for \[f\]/[0-9a-f]*: running' <<<"$output")" -eq 2 ]
  kill -KILL "$LAUNCHER"
  wait_for_exit "$LAUNCHER"
  lab ssh "$N1" touch "$PWD/go"
  run -0 list resume
  [[ "$output" == *"finished: 4 of 4 done"* ]]
  [ "$(grep '^found second' "$STARTED")" = "found second $N2 first on $N1" ]
  [ "$(grep '^found third' "$STARTED")" = "$(printf '%s\n' "found third $N1 first on $N1" "found third $N1 other on $N2")" ]
  holds 'sorted(began) == ["first", "other", "second", "third"]'
}


# ---------------------------------------------------------------- interactive use


@test "while a list runs, logs and status work and a second dispatcher is refused; Ctrl-C stops only the dispatcher" {
  cluster "$N1" "$N2"
  job_list <<END
{"name": "a", "until": "$PWD/go", "prefix": "x", "fold": 0}
{"name": "b", "until": "$PWD/go", "prefix": "x", "fold": 1}
END
  start_list
  wait_until_started a
  wait_until_started b
  run -2 dispatch
  [[ "$output" == *"a dispatcher already runs this list"* ]]
  run -0 list status
  [[ "$output" == *"x/fold0"*" running "*"a dispatcher is running this list"* ]]
  run -0 list logs fold0
  [[ "$output" == *"a-tick-1"* ]]
  kill -INT -- "-$LAUNCHER"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 130 ]
  grep -q "interrupted: 0 of 2 done; 2 still running" out
  grep -q "continue: .*run_distributed_training.py.* resume" out
  grep -q "cancel the list: .*run_distributed_training.py.* cancel all" out
  alive "$(pid_of_job a)"
  run -0 list why fold1
  [[ "$output" == *"no dispatcher is running; to continue: "* ]]
  cd /
  start_command resume --log-file "$WORK/results.json" # from another directory
  cd "$WORK"
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  holds 'len(began) == 2 and r["totals"]["attempts"] == r["totals"]["done"] == 2'
}


@test "logs --follow prints a log to its end, and a dispatcher whose standard output is closed completes its list" {
  cluster "$N1"
  job_list <<END
{"name": "a", "until": "$PWD/go", "prefix": "x", "fold": 0}
END
  "${DISPATCH[@]}" --cluster-config cluster.json --jobs-config jobs.json > >(head -n 1 >first) 2>&1 3>&- &
  LAUNCHER=$!
  wait_until_started a
  list logs fold0 --follow >followed 3>&- &
  follower=$!
  eventually grep -q a-tick-3 followed
  eventually grep -q "1 job; results: results.json" first
  : >go
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  holds 'job["a"]["state"] == "done"'
  wait_for_exit "$follower"
  [ "$status" -eq 0 ]
  cmp followed logs/jobs/*/*/node_*.log
}


@test "cancel all from another terminal stops all jobs, even if they ignore SIGTERM, and verifies that none remains" {
  stub_nvidia_smi "$N1" 5 5
  cluster "$N1" "$N2"
  sed -i "s/{\"host\": \"$N1\"/&, \"gpus\": 2, \"slots_per_gpu\": 1/" cluster.json
  job_list <<END
{"name": "a", "until": "$PWD/go"}
{"name": "b", "until": "$PWD/go", "ignore_sigterm": true}
{"name": "c", "until": "$PWD/go", "exit_on_sigterm": true}
{"name": "d", "until": "$PWD/go", "ignore_sigterm": true}
{"name": "e", "until": "$PWD/go"}
{"name": "f", "until": "$PWD/go"}
END
  start_list
  eventually holds 'len(began) == 4'
  run -0 list cancel all
  echo "$output"
  [ "$(grep -c '^cancelled: ' <<<"$output")" -eq 6 ]
  [[ "$output" == *"cancelled on request; no process remains; GPU 0: 5 MiB in use"* ]]
  [ "$(grep -c 'no process remains' <<<"$output")" -eq 4 ]
  no_process_left
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 1 ]
  grep -q "cancelled: 0 of 6 done, 6 cancelled" out
  run -0 list cancel all
  [[ "$output" == "nothing to cancel"* ]]
  run -0 list retry all
  : >go
  run -0 list resume
  holds 'r["totals"]["done"] == 6 and len(began) == 10'
}


@test "cancel stops jobs when no dispatcher runs" {
  cluster "$N1" "$N2"
  job_list <<END
{"name": "a", "until": "$PWD/go", "ignore_sigterm": true}
{"name": "b", "until": "$PWD/go"}
END
  start_list
  wait_until_started a
  wait_until_started b
  kill -KILL "$LAUNCHER"
  eventually process_of_job supervisor a
  kill -STOP "$(process_of_job supervisor a)"
  run -0 list cancel all
  echo "$output"
  no_process_left
  [[ "$output" == *"cancelled: 0 of 2 done, 2 cancelled"* ]]
  holds 'r["state"] == "cancelled" and len(began) == 2'
}
