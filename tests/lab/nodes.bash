# shellcheck shell=bash
#
# Start a laboratory for a bats file: a simulated cluster on this machine (tests/lab/lab.sh). This file also has helpers
# for launches on the nodes.
#
# Sourced by a bats file that calls start_lab N [option...] in setup_file. Each test then has nodes N1, N2, N3 and a
# separate working directory WORK; with --slurm, SLURM_CONF is set. A file that needs another setup, teardown or
# teardown_file defines it, and calls enter_workdir, sweep_runs or stop_lab there.
# shellcheck disable=SC2016,SC2034,SC2153,SC2154 # inner shells expand $1; variables are shared with tests and bats

# shellcheck source=tests/lab/hanging_script.bash
source "$BATS_TEST_DIRNAME/lab/hanging_script.bash"
# shellcheck source=tests/lab/counting_script.bash
source "$BATS_TEST_DIRNAME/lab/counting_script.bash"
# shellcheck source=tests/lab/without_torch.bash
source "$BATS_TEST_DIRNAME/lab/without_torch.bash"


start_lab() { # <number of nodes> [option of lab.sh up...]
  [ "$(id -u)" -eq 0 ] || skip "starting nodes needs root"
  local conf
  export KIT PREFIX MUSTER_LAB VIRTUAL_ENV
  KIT=$(readlink -f "$BATS_TEST_DIRNAME/..")
  VIRTUAL_ENV=${VIRTUAL_ENV:-$KIT/.venv}
  PREFIX=t$(tr 0-9 a-j <<<"$$") # unique among the laboratories of this machine
  MUSTER_LAB=${MUSTER_TESTS:-$BATS_FILE_TMPDIR}/$PREFIX
  conf=$(lab up "$1" --prefix "$PREFIX" "${@:2}")
  [ -z "$conf" ] || export SLURM_CONF=$conf
}


stop_lab() {
  [ "$(id -u)" -eq 0 ] || return 0
  lab down
}


teardown_file() {
  stop_lab
}


setup() {
  enter_workdir
}


teardown() {
  lab heal "$N3" >/dev/null 2>&1 || true
  sweep_runs
}


enter_workdir() {
  N1=${PREFIX}1 N2=${PREFIX}2 N3=${PREFIX}3
  WORK=${WORK:-"$BATS_TEST_TMPDIR/my 'work'"}
  mkdir -p "$WORK"
  cd "$WORK" || return
}


# Stop the processes that runs in WORK have left on the nodes.
sweep_runs() {
  [[ ! ${BATS_TEST_COMPLETED-} || $(processes_left) != 0 ]] || return 0
  local run node
  for run in "$WORK"/logs/*/; do
    [ -d "$run" ] || continue
    for node in "$N1" "$N2" "$N3"; do
      supervisor sweep --dir "${run%/}" --name "$node"
    done
  done
}


supervisor() { # <command> <argument...>
  "$VIRTUAL_ENV/bin/python" -I -S "$KIT/scripts/lib/module.py" launch.supervisor "$@"
}


# Print the process id of the newest run's supervisor, guard or command on a node.
pid_of() { # <supervisor, guard or command> <node>
  python3 -c 'import json, sys; print(json.load(open(sys.argv[2]))[sys.argv[1]]["pid"])' "$1" "logs/latest/node_$2.pid"
}


on() { # <node> <command...>: run a command in the namespaces of a node
  nsenter --target "$(<"$MUSTER_LAB/$1/sshd.pid")" --net --uts --mount -- "${@:2}" 3>&-
}


address() { # <node>
  awk -v node="$1" '$2 == node { print $1 }' "$MUSTER_LAB/hosts"
}


start_second_sshd() { # <node> <port> <option of sshd...>
  on "$1" "$(type -P sshd || echo /usr/sbin/sshd)" -f "$MUSTER_LAB/sshd_config" -h "$MUSTER_LAB/$1/host_key" -p "$2" \
    -o PidFile=none "${@:3}"
  # sshd goes into the background before it listens.
  on "$1" timeout 20 bash -c 'until (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; do sleep 0.05; done' bash "$2"
}


# Run a command with the home directory ./home, set in both /etc/passwd and HOME: ssh uses HOME to find included files,
# and the entry in /etc/passwd for everything else.
with_home() { # <command...>
  sed "s#^\(root:.*:\)[^:]*\(:[^:]*\)#\1$PWD/home\2#" /etc/passwd >passwd
  unshare --mount -- sh -c 'mount --bind passwd /etc/passwd && HOME=$PWD/home exec "$@"' sh "$@" 3>&-
}


lab() { # <argument...>
  "$BATS_TEST_DIRNAME/lab/lab.sh" "$@" 3>&-
}


# Write "my script.py": a user's script, which imports nothing of Muster.
write_script() { # <body on standard input>
  {
    cat <<'END'
import os, socket, sys, time
import torch
import torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
END
    cat
  } >"my script.py"
}


# Check signals to LAUNCH's process group: ranks with a handler for a signal get it once; a signal without a handler
# stops the ranks.
check_signals_to_process_group() {
  cat >"my script.py" <<'END'
import os, signal, sys, time
rank = os.environ["RANK"]
signal.signal(signal.SIGUSR1, lambda *_: print("got USR1", file=open(f"got{rank}", "a")))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
open(f"got{rank}", "w").close()
while True:
    time.sleep(0.1)
END
  start out "$LAUNCH" --script "my script.py" - 1 "$N1" "$N2"
  timeout 60 sh -c 'until [ -e got0 ] && [ -e got1 ]; do sleep 0.1; done'
  kill -USR1 -- "-$LAUNCHER"
  timeout 60 sh -c 'until [ -s got0 ] && [ -s got1 ]; do sleep 0.1; done'
  kill -PROF -- "-$LAUNCHER"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 75 ] || { cat out && false; }
  [[ "$(<out)" == *"verdict: stopped: stopped by SIGPROF to the launcher, checkpoint written; run "* ]]
  [ "$(cat got0 got1)" = $'got USR1\ngot USR1' ]
  no_processes_within 10
}


# Write "my script.py", which prints "at work" and runs until it is stopped.
write_endless_script() {
  write_script <<'END'
dist.barrier()
if rank == 0:
    print("at work", flush=True)
while True:
    dist.all_reduce(torch.ones(1))
END
}


write_endless_plain_script() {
  write_plain_script <<'END'
if rank == 0:
    print("at work", flush=True)
while True:
    time.sleep(0.1)
END
}


# Start "my script.py" with LAUNCH in the background, and wait until its ranks are at work.
start_endless_script() { # <argument of LAUNCH...>
  start out "$LAUNCH" --script "my script.py" "$@"
  wait_for_line out "at work"
}


# Print settings of a run that trains the smallest model until it is stopped.
endless_settings() {
  cat <<'END'
model: {n_layer: 1, n_head: 1, n_embd: 8, block_size: 16}
train: {steps: 100000, batch_size: 4, evaluate_every: 0, evaluate_windows: 4}
checkpoint: {dir: "check points", every: 0}
logging: {every: 1, sample: 0}
END
}


# Start a command in the background in a separate process group, as an interactive shell does. Sets LAUNCHER.
start() { # <output file> <command...>
  : >"$1"
  set -m
  "${@:2}" >"$1" 2>&1 3>&- &
  LAUNCHER=$!
  set +m
}


wait_for_line() { # <file> <text>
  timeout 120 grep -qF -m1 -- "$2" <(tail -n +1 -F "$1" 2>/dev/null)
}


# Wait for a background process, and set status to its exit code.
wait_for_exit() { # <process id>
  wait "$1" && status=0 || status=$?
}


# Print the number of processes that belong to runs in WORK.
processes_left() {
  grep -lsz -- "^MUSTER_RUN_DIR=$WORK" /proc/[0-9]*/environ 2>/dev/null | wc -l
}


# Fail if processes of runs in WORK remain after this time.
no_processes_within() { # <seconds>
  timeout "$1" sh -c 'while grep -qsz -- "^MUSTER_RUN_DIR=$1" /proc/[0-9]*/environ; do sleep 0.1; done' sh "$WORK"
}


# Check that LAUNCH with these arguments exits with the code, prints the text and creates no run.
refused() { # <exit code> <expected text> <argument...>
  run "$LAUNCH" "${@:3}"
  [ "$status" -eq "$1" ] || { echo "status $status: $output" && return 1; }
  [[ "$output" == *"$2"* ]] || { echo "$output" && return 1; }
  [ ! -e logs ]
}
