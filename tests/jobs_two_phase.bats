#!/usr/bin/env bats
#
# Base models on real servers: each is trained once and copied once to each server that needs it, even if processes
# are killed, and no experiment starts from an incomplete base model.

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
  DISPATCH[1]=$KIT/scripts/jobs/run_two_phase_training.py
  CACHE=experiments/base_models
}


teardown() {
  leave_list
}


# Change to a working directory that is private on this machine and on each server.
enter_private_workdir() {
  WORK="$APART/my $BATS_TEST_NUMBER work"
  enter_workdir
  write_job_script
}


# Write cluster.json as cluster() does, and add a section base_models: the settings of job.py that start with base_
# determine the base model.
two_phase_cluster() { # <node[:slots]...>
  cluster "$@"
  local base='["base_seconds", "base_until", "base_exit", "base_exit_once", "base_mb"]'
  local experiment='["name", "seconds", "until", "exit", "exit_once", "daemon"]'
  sed -i "1s#^{#{\"base_models\": {\"base\": $base, \"experiment\": $experiment}, #" cluster.json
}


experiments() { # <count> [settings of their base model]: print jobs e1, e2, ... that share a base model
  local number
  for ((number = 1; number <= $1; number++)); do
    echo "{\"name\": \"e$number\", \"mode\": \"full_fine_tuning\", \"participants\": [\"a\", \"b\"], \"fold\": 0, \
\"prefix\": \"e$number\", \"base_participants\": [\"b\"], ${2:-\"base_mb\": 1}}"
  done
}


trainings() { # print how many base trainings have started
  grep -c '^begin base ' "$STARTED" || true
}


copies() { # print how many copies the dispatcher reported
  grep -c ': received base ' out || true
}


wait_until_done() {
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ] || { cat out && return 1; }
  holds 'r["totals"]["done"] == len(job) + len([each for each in r["jobs"] if "name" not in each["settings"]]) - 1'
}


hash() { # print the hash of the only base model
  ls "$CACHE"
}


# ---------------------------------------------------------------- without faults


@test "without shared files each base model is trained once and copied once to each server" {
  enter_private_workdir
  set_up_home "$N2" "$(type -P fish)"
  set_up_home "$N3" "$(type -P tcsh)"
  two_phase_cluster "$N1:2" "$N2:2" "$N3:2"
  { experiments 9 '"base_mb": 1'; experiments 6 '"base_mb": 2' | sed 's/"e/"f/g'; } | job_list
  start_list --sync
  wait_until_done
  [ "$(trainings)" -eq 2 ]
  holds 'len(began) == 17 and len(r["jobs"]) == 17'
  all_valid "$N1" "$N2" "$N3"
  [ "$(find experiments/base_training -mindepth 1 -maxdepth 1 | wc -l)" -eq 2 ]
  # The server that trained a base model needs no copy.
  for base in "$CACHE"/*; do
    [ "$(grep -c "received base ${base##*/} " out)" -le 2 ]
  done
  grep -q '"held_out_loss"' phase1_base_models.json || grep -q '"state": "done"' phase1_base_models.json
  [ "$(grep -c '"id"' phase2_experiments.json)" -eq 15 ]
  # Another list trains and copies nothing.
  start_list --log-file again.json
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  set_up_home "$N2"
  set_up_home "$N3"
  [ "$(trainings)" -eq 2 ]
  [ "$(copies)" -eq 0 ]
}


@test "servers with shared files need no copies, and experiments wait only for their own base model" {
  WORK=$APART/shared
  mkdir -p "$BATS_TEST_TMPDIR/shared"
  enter_workdir
  write_job_script
  for node in "$N1" "$N2" "$N3"; do
    on "$node" mkdir -p "$WORK"
    on "$node" mount --bind "$BATS_TEST_TMPDIR/shared" "$WORK"
  done
  two_phase_cluster "$N1:2" "$N2:2" "$N3:2"
  { experiments 6 '"base_mb": 1'; experiments 1 "\"base_until\": \"$WORK/go\"" | sed 's/"e/"f/g'; } | job_list
  start_list --sync
  wait_for_line "$STARTED" "end e6"
  run ! grep "begin f1" "$STARTED"
  lab ssh "$N1" touch "$WORK/go"
  wait_until_done
  [ "$(trainings)" -eq 2 ]
  [ "$(copies)" -eq 0 ] # the server that trained a base model published it in the shared cache
  for node in "$N1" "$N2" "$N3"; do
    on "$node" umount "$WORK"
  done
}


@test "two concurrent dispatchers train a base model once and copy it once to each server" {
  enter_private_workdir
  two_phase_cluster "$N1:1"
  experiments 2 "\"base_until\": \"$WORK/go\"" | job_list
  start_list --sync
  eventually eval '[ "$(trainings)" -eq 1 ]'
  first=$LAUNCHER
  two_phase_cluster "$N2:2"
  start "$WORK/second" "${DISPATCH[@]}" --cluster-config cluster.json --jobs-config jobs.json --log-file second.json --sync
  wait_for_line second "another list, which trains or copies it; waiting"
  lab ssh "$N1" touch "$WORK/go"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ] || { cat second && false; }
  LAUNCHER=$first
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  [ "$(trainings)" -eq 1 ]
  [ "$(copies)" -eq 0 ]
  [ "$(grep -c ': received base ' second)" -eq 1 ]
  all_valid "$N1" "$N2"
}


# ---------------------------------------------------------------- a user's script that refuses unknown arguments

# Change to a directory that is private on this machine and on each server. On all of them it contains the script. On
# this machine it also contains the programs of Muster and a cluster configuration.
enter_example() { # <name of the script>
  local node
  WORK="$APART/my $BATS_TEST_NUMBER example"
  enter_workdir
  ln -s "$KIT"/scripts/jobs/*.py .
  cp "$KIT/tests/jobs/oct1_train.py" "$1"
  for node in "$N1" "$N2" "$N3"; do
    on "$node" mkdir -p "$WORK"
    on "$node" cp "$KIT/tests/jobs/oct1_train.py" "$WORK/$1"
  done
  printf '{"defaults": {"gpus": 0, "slots_per_gpu": 2, "python": "%s"}, "servers": [{"host": "%s"}, {"host": "%s"}, ' \
    "$VIRTUAL_ENV/bin/python" "$N1" "$N2" >cluster_config.json
  printf '{"host": "%s"}]}' "$N3" >>cluster_config.json
}


example() { # <program> [argument...]
  run "$VIRTUAL_ENV/bin/python" "$@" 3>&-
  echo "$output"
}


@test "15 jobs share a base model, and a job is marked if its base model was trained on its held-out participant" {
  enter_example oct1_train.py
  for fold in 0 1 2; do
    for share in 0.1 0.25 0.5 0.75 1.0; do
      echo "{\"prefix\": \"batch$share\", \"fold\": $fold, \"target_batch_pct\": $share, \"mode\": \"full_fine_tuning\", \
\"participants\": [\"01\", \"02\", \"03\"]}"
    done
  done | job_list
  mv jobs.json jobs_config.json
  example distributed_train_helper.py jobs_config.json
  [ "$status" -eq 0 ]
  [[ "$output" == *"script             train.py; "*"leaks              15 jobs"* ]]
  example distributed_train_helper.py jobs_config.json --script "$PWD/oct1_train.py"
  base=$(grep -oE '^[0-9a-f]{12}' <<<"$output")
  two_phase=(run_two_phase_training.py --cluster-config cluster_config.json --jobs-config jobs_config.json
    --script oct1_train.py)
  example "${two_phase[@]}" --refuse-leaks
  [ "$status" -eq 2 ]
  [ ! -e results.journal ]
  example "${two_phase[@]}"
  [ "$status" -eq 0 ]
  [[ "$output" == *"warning: batch0.1/fold0_01: holds out 01, and its base model $base is trained on it"* ]]
  holds 'r["totals"]["done"] == 16 and r["totals"]["attempts"] == 16'
  holds '[each["trains_base_model"] for each in r["jobs"] if "trains_base_model" in each] == ["'"$base"'"]'
  holds 'all(each["leak"].endswith("its base model '"$base"' is trained on it") for each in r["jobs"][1:])'
  [ "$(grep -c '"leak": "holds out 0' phase2_experiments.json)" -eq 15 ]
  grep -q 'holds out 03, and its base model' results.html
  [ "$(grep -l 'trained on 01 02 03' experiments/batch*/fold*/result.json | wc -l)" -eq 15 ]
  [ "$(grep -l "\"_base_model_hash\": \"$base\"" experiments/batch*/fold*/result.json | wc -l)" -eq 15 ]
}


@test "a list with a train.py of the user, which is not Muster's, runs, and its results are copied back" {
  enter_example train.py
  for fold in 0 1 2; do
    echo "{\"prefix\": \"exp1\", \"fold\": $fold}"
  done | job_list
  mv jobs.json jobs_config.json
  one_phase=(run_distributed_training.py --cluster-config cluster_config.json --jobs-config jobs_config.json)
  example "${one_phase[@]}"
  [ "$status" -eq 0 ]
  [[ "$output" == *"finished: 3 of 3 done"* && "$output" != *"without results"* ]]
  [ "$(cat experiments/exp1/fold{0,1,2}/result.json | wc -c)" -gt 0 ]
  # A script that writes somewhere else is reported.
  sed -i 's/exp1/exp2/' jobs_config.json
  for node in "$N1" "$N2" "$N3"; do
    printf 'import os\nos.makedirs("experiments/of the user", exist_ok=True)\nopen("experiments/of the user/a", "w")\n' |
      on "$node" tee "$WORK/train.py"
  done
  example "${one_phase[@]}" --log-file second.json
  [ "$status" -eq 0 ]
  [[ "$output" == *"done without results: 3 jobs; exp2/fold"*" on $PREFIX"*": experiments/of the user"* ]]
}


# ---------------------------------------------------------------- faults


@test "a copy that is killed on either side is never used as a base model" {
  enter_private_workdir
  two_phase_cluster "$N1:1"
  experiments 1 '"base_mb": 1' | job_list
  dispatch --sync
  base=$CACHE/$(hash)
  for side in here there; do
    two_phase_cluster "$N2:2"
    experiments 2 '"base_mb": 1' | sed "s/\"e/\"$side/g" | job_list
    lab slow "$N2" 2000
    start_list --sync --log-file "$side.json"
    eventually copied 50
    ! on "$N2" test -e "$WORK/$base" || all_valid "$N2" # on a busy machine the copy may be complete
    kill_rsync "$side"
    lab heal "$N2"
    wait_for_exit "$LAUNCHER"
    [ "$status" -eq 0 ] || { cat out && false; }
    all_valid "$N2"
    [ "$(grep -c "^base $side. weights" "$STARTED")" -eq 2 ]
    run ! on "$N2" sh -c "ls -A $(printf %q "$WORK/$CACHE") | grep incomplete"
    on "$N2" rm -r "$WORK/$CACHE"
  done
  [ "$(trainings)" -eq 1 ]
}


copied() { # <percent>: check that at least this part of the base model is on N2
  local size
  size=$(on "$N2" sh -c "du -sb $(printf %q "$WORK/$CACHE")/.*.incomplete-* 2>/dev/null" | sort -n | tail -n 1 | cut -f 1)
  [ "${size:-0}" -ge $(($1 * 10486)) ] || on "$N2" test -e "$WORK/$base"
}


kill_rsync() { # <here or there>: kill the sender on this machine, or the receiver on the server
  local file role=sender
  while read -r file; do
    tr '\0' ' ' <"$file" | grep -q -- '--server' && role=there || role=here
    [ "$role" != "$1" ] || kill -KILL "${file//[!0-9]/}" 2>/dev/null || true
  done < <(grep -lsa "^rsync.*incomplete" /proc/[0-9]*/cmdline)
}


@test "a base model is copied again if it is damaged on a server, and trained again if it is damaged here" {
  enter_private_workdir
  two_phase_cluster "$N1:1"
  experiments 1 | job_list
  dispatch --sync
  flip="printf x | dd of=$(printf %q "$WORK/$CACHE/$(hash)/best_base_model.pt") bs=1 seek=4096 conv=notrunc status=none"
  two_phase_cluster "$N2:1"
  experiments 1 | sed 's/"e1/"e2/g' | job_list
  start_list --sync --log-file there.json
  wait_for_exit "$LAUNCHER"
  on "$N2" sh -c "$flip"
  experiments 1 | sed 's/"e1/"e3/g' | job_list
  start_list --log-file there-again.json
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  [ "$(copies)" -eq 1 ]
  [ "$(trainings)" -eq 1 ]
  all_valid "$N2"
  sh -c "$flip"
  run "$KIT/scripts/doctor.sh"
  [[ "$output" == *"warning  base models"*"damaged"*"scripts/muster"*" two-phase cache prune"* ]]
  experiments 1 | sed 's/"e1/"e4/g' | job_list
  run -2 dispatch --log-file skip.json --skip-phase1
  [[ "$output" == *"base $(hash) of 1 job, the first e4/"*"damaged"* ]]
  start_list --log-file here.json
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  [ "$(trainings)" -eq 2 ]
  all_valid "$N2"
}


@test "a server without space for a base model gets no experiment that needs it" {
  enter_private_workdir
  two_phase_cluster "$N1:1"
  experiments 1 '"base_mb": 4' | job_list
  dispatch --sync
  on "$N2" mkdir -p "$WORK/$CACHE"
  on "$N2" mount -t tmpfs -o size=2m tmpfs "$WORK/$CACHE"
  two_phase_cluster "$N2:2" "$N3:1"
  experiments 3 '"base_mb": 4' | sed 's/"e/"g/g' | job_list
  start_list --sync --log-file full.json
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ] || { cat out && false; }
  grep -q "$N2: g./fold0_a was not started: base $(hash): .*: No space left on device: [0-9]* MiB free, [0-9]* MiB needed" out
  [ "$(grep -c "begin g. $N3" "$STARTED")" -eq 3 ]
  on "$N2" umount "$WORK/$CACHE"
}


@test "a server that has no space for a base model removes the outputs of finished trainings" {
  enter_private_workdir
  on "$N1" mkdir -p "$WORK/experiments"
  on "$N1" mount -t tmpfs -o size=6m tmpfs "$WORK/experiments"
  two_phase_cluster "$N1:1"
  experiments 1 '"base_mb": 4' | job_list
  run -0 dispatch --sync
  [[ "$output" == *"$N1: base $(hash): "*": No space left on device"*"; experiments/base_training/$(hash) is removed there"* ]]
  run ! on "$N1" test -e "$WORK/experiments/base_training/$(hash)"
  [ -e "experiments/base_training/$(hash)" ]
  all_valid "$N1"
  on "$N1" umount "$WORK/experiments"
}


@test "a failed base training is retried; if all retries fail, only its own experiments fail" {
  two_phase_cluster "$N1:2" "$N2:1"
  {
    experiments 2 "\"base_exit\": 3, \"base_exit_once\": \"$WORK/tried\""
    experiments 2 '"base_exit": 4' | sed 's/"e/"f/g'
  } | job_list
  run -1 dispatch --retries 1
  holds '[job[name]["state"] for name in ("e1", "e2", "f1", "f2")] == ["done", "done", "failed", "failed"]'
  holds 'job["f1"]["reason"].startswith("base ") and job["f1"]["reason"].endswith(" failed") and not job["f1"]["attempts"]'
  sed -i '/^job, out, node/a job.pop("base_exit", None)' job.py # fix the cause
  run -0 list retry failed
  [[ "$output" == "requeued 3 jobs"* ]]
  run -0 list resume
  holds 'r["totals"]["done"] == 6'
}


@test "resume after SIGKILL during a base training and during a copy trains no second base model" {
  enter_private_workdir
  two_phase_cluster "$N1:1" "$N2:1"
  experiments 2 "\"base_mb\": 4, \"base_until\": \"$WORK/go\"" | job_list
  start_list --sync
  eventually eval '[ "$(trainings)" -eq 1 ]'
  kill -KILL "$LAUNCHER"
  lab slow "$N1" 8000
  lab slow "$N2" 8000
  start_command resume
  wait_for_line out "still runs"
  for node in "$N1" "$N2"; do
    lab ssh "$node" touch "$WORK/go"
  done
  eventually eval '[ -e "$CACHE/$(hash)/manifest.json" ]'
  node=$N1
  [ "$(node_of_job base)" = "$N2" ] || node=$N2
  eventually on "$node" sh -c "ls -A $(printf %q "$WORK/$CACHE") | grep incomplete"
  kill -KILL "$LAUNCHER"
  lab heal "$N1"
  lab heal "$N2"
  start_command resume
  wait_until_done
  [ "$(trainings)" -eq 1 ]
  all_valid "$N1" "$N2"
}
