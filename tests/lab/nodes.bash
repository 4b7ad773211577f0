# shellcheck shell=bash
#
# A laboratory for a bats file, and what its tests say of launches on it.
#
# Sourced by a bats file that calls start_lab N [option...] in setup_file, stop_lab in teardown_file, enter_workdir in
# setup and sweep_runs in teardown. A test then has nodes N1, N2, N3 and a working folder WORK of its own, and with
# --slurm the SLURM_CONF to use.
# shellcheck disable=SC2034,SC2153,SC2154 # what it sets is for the tests, and what run sets for it

# shellcheck source=tests/lab/hanging_script.bash
source "$BATS_TEST_DIRNAME/lab/hanging_script.bash"


start_lab() { # <how many> [lab.sh's options...]
  [ "$(id -u)" -eq 0 ] || skip "raising nodes needs root"
  local conf
  export KIT PREFIX MUSTER_LAB VIRTUAL_ENV
  KIT=$(readlink -f "$BATS_TEST_DIRNAME/..")
  VIRTUAL_ENV=${VIRTUAL_ENV:-$KIT/.venv}
  PREFIX=t$(tr 0-9 a-j <<<"$$") # so that no other laboratory on this machine has it
  MUSTER_LAB=${MUSTER_TESTS:-$BATS_FILE_TMPDIR}/$PREFIX
  conf=$(lab up "$1" --prefix "$PREFIX" "${@:2}")
  [ -z "$conf" ] || export SLURM_CONF=$conf
}


stop_lab() {
  [ "$(id -u)" -eq 0 ] || return 0
  lab down
}


enter_workdir() {
  N1=${PREFIX}1 N2=${PREFIX}2 N3=${PREFIX}3
  WORK=${WORK:-"$BATS_TEST_TMPDIR/my 'work'"}
  mkdir -p "$WORK"
  cd "$WORK" || return
}


sweep_runs() {
  local run node
  for run in "$WORK"/logs/*/; do
    [ -d "$run" ] || continue
    for node in "$N1" "$N2" "$N3"; do
      supervisor sweep --dir "${run%/}" --name "$node"
    done
  done
}


supervisor() { # <verb> <argument...>
  "$VIRTUAL_ENV/bin/python" -I -S "$KIT/scripts/lib/supervisor.py" "$@"
}


# Of a process that watches over the newest run, or is watched over.
pid_of() { # <supervisor, guard or command> <node>
  python3 -c 'import json, sys; print(json.load(open(sys.argv[2]))[sys.argv[1]]["pid"])' "$1" "logs/latest/node_$2.pid"
}


lab() { # <word...>
  "$BATS_TEST_DIRNAME/lab/lab.sh" "$@" 3>&-
}


# A script of the user's, that knows nothing of us. The words of a launch that runs it: --script "my script.py".
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


# One that is at work until somebody ends it.
write_endless_script() {
  write_script <<'END'
dist.barrier()
if rank == 0:
    print("at work", flush=True)
while True:
    dist.all_reduce(torch.ones(1))
END
}


# Start my script.py with LAUNCH in the background, and wait until its ranks are at work.
start_endless_script() { # <word...>
  start out "$LAUNCH" --script "my script.py" "$@"
  wait_for_line out "at work"
}


# Settings of a training that goes on until it is stopped, with the least of everything.
endless_settings() {
  cat <<'END'
model: {n_layer: 1, n_head: 1, n_embd: 8, block_size: 16}
train: {steps: 100000, batch_size: 4, evaluate_every: 0, evaluate_windows: 4}
checkpoint: {dir: "check points", every: 0}
logging: {every: 1, sample: 0}
END
}


# Start in the background with its own process group, as a terminal does.
start() { # <file for its output> <command...>
  : >"$1"
  set -m
  "${@:2}" >"$1" 2>&1 3>&- &
  LAUNCHER=$!
  set +m
}


wait_for_line() { # <file> <text>
  timeout 120 grep -qF -m1 -- "$2" <(tail -n +1 -F "$1" 2>/dev/null)
}


wait_for_exit() { # <process id>
  wait "$1" && status=0 || status=$?
}


processes_left() {
  grep -lsz -- "^MUSTER_RUN_DIR=$WORK" /proc/[0-9]*/environ 2>/dev/null | wc -l
}


# shellcheck disable=SC2016 # the inner shell is to expand it
no_processes_within() { # <seconds>
  timeout "$1" sh -c 'while grep -qsz -- "^MUSTER_RUN_DIR=$1" /proc/[0-9]*/environ; do sleep 0.1; done' sh "$WORK"
}


# Called with these words, LAUNCH says so, and has begun nothing.
refused() { # <exit code> <what the line must name> <word...>
  run "$LAUNCH" "${@:3}"
  [ "$status" -eq "$1" ] || { echo "status $status: $output" && return 1; }
  [[ "$output" == *"$2"* ]] || { echo "$output" && return 1; }
  [ ! -e logs ]
}
