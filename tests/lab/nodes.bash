# shellcheck shell=bash
#
# A laboratory for a bats file, and what its tests say of launches on it.
#
# Sourced by a bats file that calls raise_nodes N [option...] in setup_file, lower_nodes in teardown_file, enter_work in
# setup and leave_work in teardown. A test then has nodes N1, N2, N3 and a working folder WORK of its own.
# shellcheck disable=SC2034 # what it sets is for the tests


raise_nodes() { # <how many> [lab.sh's options...]
  [ "$(id -u)" -eq 0 ] || skip "raising nodes needs root"
  export KIT PREFIX MUSTER_LAB VIRTUAL_ENV
  KIT=$(readlink -f "$BATS_TEST_DIRNAME/..")
  VIRTUAL_ENV=${VIRTUAL_ENV:-$KIT/.venv}
  PREFIX=t$(tr 0-9 a-j <<<"$$") # so that no other laboratory on this machine has it
  MUSTER_LAB=$BATS_FILE_TMPDIR/lab
  lab up "$1" --prefix "$PREFIX" "${@:2}"
}


lower_nodes() {
  [ "$(id -u)" -eq 0 ] || return 0
  lab down
}


enter_work() {
  N1=${PREFIX}1 N2=${PREFIX}2 N3=${PREFIX}3
  export OMP_NUM_THREADS=1 # the nodes share the cores of one machine
  WORK=${WORK:-"$BATS_TEST_TMPDIR/my 'work'"}
  mkdir -p "$WORK"
  cd "$WORK" || return
}


leave_work() {
  local run node
  for run in "$WORK"/logs/*/; do
    [ -d "$run" ] || continue
    for node in "$N1" "$N2" "$N3"; do
      "$KIT/scripts/lib/node.sh" --sweep --run "${run%/}" --node "$node"
    done
  done
}


lab() { # <word...>
  "$BATS_TEST_DIRNAME/lab/lab.sh" "$@" 3>&-
}


# A script of the user's, that knows nothing of us. The words of a launch that runs it: --script "my script.py".
script() { # <body on standard input>
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
working_script() {
  script <<'END'
dist.barrier()
if rank == 0:
    print("at work", flush=True)
while True:
    dist.all_reduce(torch.ones(1))
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


status_of() { # <process id>
  wait "$1" && status=0 || status=$?
}


left() {
  grep -lsz -- "^MUSTER_RUN_DIR=$WORK" /proc/[0-9]*/environ 2>/dev/null | wc -l
}


# shellcheck disable=SC2016 # the inner shell is to expand it
nothing_left_within() { # <seconds>
  timeout "$1" sh -c 'while grep -qsz -- "^MUSTER_RUN_DIR=$1" /proc/[0-9]*/environ; do sleep 0.1; done' sh "$WORK"
}
