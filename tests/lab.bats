#!/usr/bin/env bats
#
# tests/lab/lab.sh: nodes behave like those of a cluster, each fault has exactly the documented effect, and the command
# `lab.sh down` removes everything, whatever the state of the nodes.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0


setup() {
  [ "$(id -u)" -eq 0 ] || skip "starting nodes needs root"
  export MUSTER_LAB=$BATS_TEST_TMPDIR/lab
  PREFIX=$(tr 0-9 a-j <<<"$$") # unique among the laboratories of this machine
  N1=${PREFIX}1 N2=${PREFIX}2 N3=${PREFIX}3
}


teardown() {
  [ "$(id -u)" -eq 0 ] || return 0
  lab down
}


lab() { # <argument...>
  "$BATS_TEST_DIRNAME/lab/lab.sh" "$@" 3>&-
}


up() { # <option...>
  lab up 3 --prefix "$PREFIX" "$@"
}


state() { # <node>
  lab status | awk -v node="$1" '$1 == node { print $3 }'
}


processes_on() { # <node>
  local network
  network=$(readlink "/proc/$(lab status | awk -v node="$1" '$1 == node { print $4 }')/ns/net")
  processes_in "$network"
}


processes_in() { # <network namespace>
  find /proc/[0-9]*/ns/net -maxdepth 0 -lname "${1//[/\\[}" 2>/dev/null | cut -d/ -f3
}


wait_until() { # <command...>
  timeout 20 bash -c 'until "$@"; do sleep 0.02; done' bash "$@"
}


# Print everything that the laboratory has created on this machine and not removed.
traces() {
  ip -brief link | grep -F "muster-$PREFIX " || true
  ip route | grep -F "muster-$PREFIX " || true
  grep -F "$MUSTER_LAB" /proc/self/mounts || true
  grep -lrF "$MUSTER_LAB" /etc/ssh || true
  pgrep -af -- "$MUSTER_LAB" || true
  find "$MUSTER_LAB" 2>/dev/null || true
}


# Start cat on a node over ssh, so that the node echoes each line that it receives.
connect() { # <argument of ssh...>
  coproc ECHO { exec ssh "$@" cat 3>&- 2>"$BATS_TEST_TMPDIR/connection"; }
  echoes first
}


echoes() { # <text>
  local line
  echo "$1" >&"${ECHO[1]}"
  read -r -t 20 line <&"${ECHO[0]}"
  [ "$line" = "$1" ]
}


# Send a line, and check that the node does not echo it within 0.5 s.
is_idle() {
  local line
  echo delayed >&"${ECHO[1]}"
  run read -r -t 0.5 line <&"${ECHO[0]}"
  [ "$status" -gt 128 ] # timeout; a closed connection would give 1
}


delayed_line_arrives() {
  local line
  read -r -t 20 line <&"${ECHO[0]}"
  [ "$line" = delayed ]
}


milliseconds_for() { # <command...>
  local before=${EPOCHREALTIME/./}
  "$@"
  echo $(((${EPOCHREALTIME/./} - before) / 1000))
}


# 100 kB take 0.8 s at 1000 kbit/s.
send() {
  head -c 100000 /dev/urandom | ssh "$N1" 'cat >/dev/null'
}


receive() {
  ssh "$N1" 'head -c 100000 /dev/urandom' >/dev/null
}


@test "nodes have host names, and reach each other by them" {
  up
  for node in "$N1" "$N2" "$N3"; do
    [ "$(ssh "$node" hostname)" = "$node" ]
  done
  [ "$(ssh "$N1" ssh "$N2" ssh "$N3" hostname)" = "$N3" ]
  address=$(lab status | awk 'NR == 1 { print $2 }')
  for node in "$N1" "$N3"; do
    [ "$(lab ssh "$node" getent hosts "$N1" | xargs)" = "$address $N1" ]
  done
  [ "$(hostname)" != "$N3" ]
}


@test "OMP_NUM_THREADS is the number of cores divided by that of GPUs, over SSH and under SLURM, unless it is set" {
  local cores threads
  cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
  threads=$((cores >= 12 ? cores / 6 : 1)) # three nodes with two ranks each
  unset OMP_NUM_THREADS
  SLURM_CONF=$(up --slurm --gpus 2)
  export SLURM_CONF
  [ "$(ssh "$N2" printenv OMP_NUM_THREADS)" = "$threads" ]
  [ "$(ssh "$N2" printenv SLURM_CONF)" = "$SLURM_CONF" ]
  [ "$(srun --nodelist="$N2" printenv OMP_NUM_THREADS)" = "$threads" ]
  [ "$(OMP_NUM_THREADS=7 srun --nodelist="$N2" printenv OMP_NUM_THREADS)" = 7 ]
  sbatch --quiet --wait --output="$BATS_TEST_TMPDIR/out" --wrap 'printenv OMP_NUM_THREADS'
  [ "$(<"$BATS_TEST_TMPDIR/out")" = "$threads" ]
}


@test "pdsh reaches all nodes" {
  up
  [ "$(PDSH_RCMD_TYPE=ssh pdsh -S -w "${PREFIX}[1-3]" hostname 2>/dev/null | sort)" = "$N1: $N1
$N2: $N2
$N3: $N3" ]
}


@test "ssh passes arguments unchanged, and returns the exit code" {
  up
  [ "$(lab ssh "$N2" printf '<%s>' 'a  b' '$HOME' "it's")" = "<a  b><\$HOME><it's>" ]
  run lab ssh "$N2" sh -c 'exit 42'
  [ "$status" -eq 42 ]
}


@test "up may be repeated, but not with other settings" {
  up
  before=$(lab status)
  up
  [ "$(lab status)" = "$before" ]
  run lab up 2 --prefix "$PREFIX"
  [ "$status" -eq 1 ]
  [[ "$output" == *"$MUSTER_LAB: a laboratory with other settings is up ($N1 $N2 $N3); remove it with lab.sh down"* ]]
  [ "$(lab status)" = "$before" ]
}


@test "cut stops traffic without closing a connection, and heal restores it" {
  up
  connect "$N1"
  lab cut "$N1"
  [ "$(state "$N1")" = cut ]
  is_idle
  run lab ssh "$N2" timeout 0.3 bash -c ": </dev/tcp/$N1/22"
  [ "$status" -eq 124 ]
  lab heal "$N1"
  delayed_line_arrives
  echoes again
  [ "$(state "$N1")" = up ]
}


@test "freeze stops all processes of the node, including daemons, and heal continues them" {
  up
  connect "$N1"
  ssh "$N1" 'setsid sleep 300 </dev/null >/dev/null 2>&1 &'
  lab freeze "$N1"
  [ "$(state "$N1")" = frozen ]
  is_idle
  mapfile -t processes < <(processes_on "$N1")
  [ "$(ps -o comm= -p "${processes[*]}" | grep -cx sleep)" -eq 1 ]
  [ "$(ps -o stat= -p "${processes[*]}" | cut -c1 | sort -u)" = T ]
  [ "$(ssh "$N2" hostname)" = "$N2" ]
  lab heal "$N1"
  delayed_line_arrives
  [ "$(state "$N1")" = up ]
}


@test "slow limits bandwidth in both directions" {
  up
  lab slow "$N1" 1000
  [ "$(state "$N1")" = slow ]
  sent=$(milliseconds_for send)
  received=$(milliseconds_for receive)
  lab heal "$N1"
  [ "$(state "$N1")" = up ]
  echo "sent in $sent ms, received in $received ms"
  [ "$sent" -ge 750 ]
  [ "$received" -ge 750 ]
  [ "$(milliseconds_for send)" -lt "$sent" ]
}


@test "kill leaves no process on the node, and closes no connection to it" {
  up
  ssh "$N1" 'setsid sleep 300 </dev/null >/dev/null 2>&1 &'
  connect "$N2" ssh "$N1"
  network=$(readlink "/proc/$(lab status | awk 'NR == 1 { print $4 }')/ns/net")
  address=$(lab status | awk 'NR == 1 { print $2 }')
  [ -n "$(processes_in "$network")" ]
  lab kill "$N1"
  [ -z "$(processes_in "$network")" ]
  [ "$(state "$N1")" = dead ]
  is_idle
  [ "$(ssh "$N2" ss --no-header --tcp state established dst "$address" | wc -l)" -eq 1 ]
  run lab heal "$N1"
  [ "$status" -eq 1 ]
  [[ "$output" == *"$N1: is dead; restart it with lab.sh up"* ]]
}


@test "up restarts a killed node with its keys, and heals other nodes" {
  up
  second=$(lab status | sed -n 2p)
  lab kill "$N1"
  lab cut "$N2"
  lab slow "$N3" 100
  up
  [ "$(lab status | awk '{ print $3 }' | xargs)" = "up up up" ]
  [ "$(lab status | sed -n 2p)" = "$second" ]
  [ "$(ssh "$N1" ssh "$N2" ssh "$N1" hostname)" = "$N1" ]
}


@test "--private: each node has its own directory, which survives kill" {
  directory="$BATS_TEST_TMPDIR/a directory"
  mkdir "$directory"
  touch "$directory/here"
  up --private "$directory"
  lab ssh "$N1" touch "$directory/one" "$BATS_TEST_TMPDIR/shared"
  [ "$(lab ssh "$N1" ls "$directory")" = one ]
  [ -z "$(lab ssh "$N2" ls "$directory")" ]
  [ "$(ls "$directory")" = here ]
  lab ssh "$N2" test -e "$BATS_TEST_TMPDIR/shared"
  lab kill "$N1"
  up --private "$directory"
  [ "$(lab ssh "$N1" ls "$directory")" = one ]
}


@test "--slurm: srun reaches the nodes, and each task gets its own GPU" {
  SLURM_CONF=$(up --slurm --gpus 2)
  export SLURM_CONF
  [ "$(srun -N3 hostname | sort | xargs)" = "$N1 $N2 $N3" ]
  devices=$(srun -N3 --ntasks-per-node=2 --gres=gpu:2 --gpus-per-task=1 printenv SLURMD_NODENAME CUDA_VISIBLE_DEVICES)
  [ "$(grep -cx 0 <<<"$devices") $(grep -cx 1 <<<"$devices") $(grep -cx "$N2" <<<"$devices")" = "3 3 2" ]
  [ "$(ssh "$N2" srun -w "$N3" hostname)" = "$N3" ]
  lab kill "$N2"
  [ "$(up --slurm --gpus 2)" = "$SLURM_CONF" ]
  [ "$(srun -N3 hostname | sort | xargs)" = "$N1 $N2 $N3" ]
}


@test "--slurm: two jobs share a node, and srun --overlap and squeue reach a running job" {
  SLURM_CONF=$(up --slurm --gpus 2)
  export SLURM_CONF
  mkfifo "$BATS_TEST_TMPDIR/go"
  job=$(sbatch --parsable --open-mode=append --output="$BATS_TEST_TMPDIR/out" --nodelist="$N1,$N2" --nodes=2 \
    --gpus-per-node=1 --mem=8G --cpus-per-task=2 --wrap "srun --ntasks-per-node=1 hostname; cat '$BATS_TEST_TMPDIR/go'")
  timeout 20 grep -q -m2 "^$PREFIX" <(tail -n +1 -F "$BATS_TEST_TMPDIR/out" 2>/dev/null)
  [ "$(srun --nodelist="$N1" --gpus=1 --mem=8G --cpus-per-task=2 printenv CUDA_VISIBLE_DEVICES)" = 1 ]
  [ "$(srun --overlap --jobid="$job" --nodelist="$N2" --nodes=1 --ntasks=1 hostname)" = "$N2" ]
  [ "$(ssh "$N3" squeue --noheader --format=%T --jobs="$job")" = RUNNING ]
  echo go >"$BATS_TEST_TMPDIR/go"
  wait_until grep -qx go "$BATS_TEST_TMPDIR/out"
  [ "$(grep -vx go "$BATS_TEST_TMPDIR/out" | sort | xargs)" = "$N1 $N2" ]
}


@test "--slurm: a job receives the signal of --signal and is requeued, if a job in partition urgent preempts it" {
  SLURM_CONF=$(up --slurm)
  export SLURM_CONF
  cat >"$BATS_TEST_TMPDIR/job" <<'END'
#!/bin/bash
srun bash -c 'trap "echo warned" USR2; echo "attempt ${SLURM_RESTART_COUNT-0}"; while :; do sleep 0.1; done'
END
  follow() { # <line>; waits for it
    timeout 60 grep -qx -m1 -- "$1" <(tail -n +1 -F "$BATS_TEST_TMPDIR/out" 2>/dev/null)
  }
  sbatch --open-mode=append --output="$BATS_TEST_TMPDIR/out" --nodes=3 --exclusive --signal=USR2 "$BATS_TEST_TMPDIR/job"
  follow "attempt 0"
  [ "$(srun --partition=urgent --nodes=1 --exclusive --quiet printenv SLURM_JOB_PARTITION)" = urgent ]
  [ "$(grep -cx warned "$BATS_TEST_TMPDIR/out")" -eq 3 ]
  follow "attempt 1"
}


@test "--slurm: down ends jobs, and kills an srun process that waits for its job" {
  SLURM_CONF=$(up --slurm)
  export SLURM_CONF
  srun --nodes=3 bash -c 'trap "" TERM; echo here; while :; do sleep 0.1; done' >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  job=$!
  wait_until grep -qx here "$BATS_TEST_TMPDIR/out"
  lab down
  [ -z "$(traces)" ]
  wait "$job" && status=0 || status=$?
  [ "$status" -eq 137 ]
}


@test "down removes everything, also with cut and frozen nodes, and may be repeated" {
  [ -z "$(traces)" ]
  up
  [ "$(traces | grep -cF -e "muster-$PREFIX" -e /etc/ssh -e sshd -e "$MUSTER_LAB/id.pub")" -ge 6 ]
  mapfile -t networks < <(for node in "$N1" "$N2" "$N3"; do readlink "/proc/$(processes_on "$node" | head -n 1)/ns/net"; done)
  for node in "$N1" "$N2" "$N3"; do
    ssh "$node" 'setsid sleep 300 </dev/null >/dev/null 2>&1 &'
  done
  connect "$N1"
  lab cut "$N1"
  lab freeze "$N2"
  lab down
  [ -z "$(traces)" ]
  for network in "${networks[@]}"; do
    [ -z "$(processes_in "$network")" ]
  done
  lab down
  run lab status
  [ "$status" -eq 1 ]
  [[ "$output" == *"$MUSTER_LAB: no laboratory is up; start one with lab.sh up 3"* ]]
}


@test "up and down work after an up that was killed halfway" {
  for file in settings switch "$N3/sshd.pid"; do
    "$BATS_TEST_DIRNAME/lab/lab.sh" up 3 --prefix "$PREFIX" 3>&- &
    wait_until test -e "$MUSTER_LAB/$file"
    kill -KILL $! || true
    wait $! || true
    up
    [ "$(ssh "$N3" hostname)" = "$N3" ]
    lab down
    [ -z "$(traces)" ]
  done
}


@test "SIGTERM during up removes everything" {
  "$BATS_TEST_DIRNAME/lab/lab.sh" up 3 --prefix "$PREFIX" 3>&- &
  wait_until test -e "$MUSTER_LAB/$N1"
  kill -TERM $!
  wait $! || true
  [ -z "$(traces)" ] || [ "$(lab status | grep -c ' up ')" -eq 3 ] # unless up had already finished
}


@test "a second laboratory is separate from the first, and must have another prefix" {
  up
  first=$MUSTER_LAB
  MUSTER_LAB=$BATS_TEST_TMPDIR/other
  run up
  [ "$status" -eq 1 ]
  [[ "$output" == *"$N1: already a node of the laboratory in $first; choose other names with --prefix"* ]]
  [ ! -e "$MUSTER_LAB" ]
  lab up 1 --prefix "${PREFIX}x"
  [ "$(ssh "${PREFIX}x1" hostname)" = "${PREFIX}x1" ]
  run ssh "${PREFIX}x1" ssh "$N1" true
  [ "$status" -eq 255 ]
  lab down
  MUSTER_LAB=$first
  [ "$(ssh "$N1" hostname)" = "$N1" ]
}


@test "wrong arguments are refused, and nothing is created" {
  refused_with() { # <text> <argument...>
    run lab "${@:2}"
    [ "$status" -eq 2 ]
    [[ "$output" == *"$1"*"Try: lab.sh --help"* ]]
  }
  refused_with "no command"
  refused_with "unknown command 'fly'" fly
  refused_with "up: the number of nodes is missing" up
  refused_with "expected a number of nodes from 1 to 64, got '0'" up 0
  refused_with "got '65'" up 65
  refused_with "expected one number of nodes, got '3' and '4'" up 3 4
  refused_with "--gpus needs a value" up 3 --slurm --gpus
  refused_with "--gpus: expected a number from 0 to 99, got 'two'" up 3 --slurm --gpus two
  refused_with "add --slurm" up 3 --gpus 2
  refused_with "--prefix: expected 1 to 8 lower-case letters, got 'n1'" up 3 --prefix n1
  refused_with "unknown option '--fast'" up 3 --fast
  refused_with "--private: no directory '/no/such'" up 3 --private /no/such
  refused_with "would hide the laboratory" up 3 --private "$BATS_TEST_TMPDIR"
  refused_with "down: expected no arguments, got 'all'" down all
  refused_with "cut: expected NODE, got ''" cut
  refused_with "slow: expected kbit/s as a positive whole number, got 'fast'" slow node1 fast
  [ -z "$(traces)" ]
  mkdir "$MUSTER_LAB"
  touch "$MUSTER_LAB/mine"
  refused_with "MUSTER_LAB='$MUSTER_LAB': not created by lab.sh" down
  [ -e "$MUSTER_LAB/mine" ]
  rm -r "$MUSTER_LAB"
}


@test "an unknown node is refused" {
  up
  run lab cut "${PREFIX}4"
  [ "$status" -eq 2 ]
  [[ "$output" == *"no node '${PREFIX}4'; the nodes are: $N1 $N2 $N3"* ]]
}


@test "a missing configuration, program or privilege is reported with a remedy" {
  reports() { # <text>
    [ "$status" -eq 69 ]
    [[ "$output" == *"$1"* ]]
    [ -z "$(traces)" ]
  }
  without() { # <file>
    run unshare --mount -- bash -c 'mount --bind /dev/null "$1" && exec "${@:2}"' bash "$1" \
      "$BATS_TEST_DIRNAME/lab/lab.sh" up 3 --prefix "$PREFIX"
  }
  without /etc/ssh/ssh_config
  reports "add the line 'Include /etc/ssh/ssh_config.d/*.conf'"
  without "$(type -P ssh-keygen)"
  reports "ssh-keygen: not installed; run: apt-get install openssh-client"
  run unshare --user -- "$BATS_TEST_DIRNAME/lab/lab.sh" up 3 --prefix "$PREFIX"
  reports "run it with sudo"
}
