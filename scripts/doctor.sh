#!/usr/bin/env bash
#
# Check whether this machine, or a list of nodes, is ready to train. It prints how
# to repair what is not, and changes nothing without --sync.
#
# Usage: doctor.sh [options] [NODE...]
#        muster doctor ...
#
#     muster doctor
#     muster doctor 'node[1-4]'
#
#   NODE...              check these nodes over SSH instead of this machine:
#                        node1 user@node2 node[3-8,10]
#
#   --hostfile FILE      read the nodes from FILE, one per line: `node1 slots=4`
#   --exclude NODES      exclude these nodes
#   --sync               first copy this directory and Muster to the nodes
#   --python PATH        Python to check (default: the active venv or conda
#                        environment (not base), ./.venv, Muster's .venv, python3)
#   --master-port PORT   port to check (default: 29500)
#   --log-dir DIR        directory with the run directories (default: logs)
#   --json               print the facts as JSON, without findings
#   --dry-run            print the command that collects the facts, run nothing
#   --quiet              do not print which nodes have not replied yet
#   --help               show this help
#
# Run it in the directory from which you launch. It checks Python and PyTorch,
# GPUs and who uses them, memory, disk, /dev/shm, the master port, names of hosts,
# variables of other launches, runs that are active and, without NODE, the files
# of all base models here. Each line is ok, a warning (training works, with
# limits) or a fault (training will fail), with the fix: a sentence, or a command
# after a $. The most severe finding is printed last. A node that differs from
# most of the others is listed with its value and theirs.
#
# Exit codes: 0 no fault (or --json), 1 a fault, 2 wrong call, 69 a node cannot be
# checked.
#
set -euo pipefail
# shellcheck source=scripts/lib/launcher.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/launcher.bash"


# ---------------------------------------------------------------- this machine

check_this_machine() {
  [[ $PYTHON_OPTION || $JSON == 1 ]] || report_unusable_python
  pick_python "$PYTHON_OPTION"
  set -- health.doctor --directory "$PWD" --log-dir "$LOG_DIR" --master-port "${MASTER_PORT:-29500}"
  ((!JSON)) || set -- "$@" --json
  if [[ $DRY_RUN == 1 ]]; then
    quote "$PYTHON" -m "distributed.$1" "${@:2}"
  else
    (cd -- "$KIT" && exec "$PYTHON" "$KIT/scripts/lib/module.py" "$@") # kit_python would ignore Ctrl-C
  fi
}


# Without --python, an unusable Python is a fault of this machine, not a wrong call.
report_unusable_python() {
  local message
  if ! message=$(pick_python 2>&1); then
    message=${message%%$'\n'*}
    printf 'fault    python    %s\n' "${message#"$PROGRAM: "}"
    printf '                   %s\n' 'or install Python 3.10 or newer, on a cluster perhaps: module load python'
    printf '\n%s is not fit for training: 1 fault, nothing else was checked\n' "$(uname -n)"
    exit 1
  fi
}


# ---------------------------------------------------------------- nodes

check_nodes() {
  pick_python "$PYTHON_OPTION"
  set_node_checks 1 "${POSITIONAL[@]}"
  run_checks --forward "${CHECKS[@]}"
  forward_options_except --hostfile --exclude --python --master-port --log-dir
  set -- "${FORWARDED_OPTIONS[@]}" "--program=$PROGRAM" "--cwd=$PWD" "--log-dir=$LOG_DIR" "--python=$PYTHON" \
    "--node-env=$(node_env)" "--master-port=${MASTER_PORT:-29500}"
  # shellcheck disable=SC2153 # launch.bash sets it
  for NODE in "${NODES[@]}"; do
    set -- "$@" --node "$NODE" "${ADDRESS[$NODE]}"
  done
  exec_module health.cluster "$@" < <(print_environment)
}


main() {
  parse_options "$@"
  LOG_DIR=$(realpath -m -- "$LOG_DIR")
  if [[ ${POSITIONAL[*]-}$HOSTFILE ]]; then
    check_nodes
    return
  fi
  [[ ! $EXCLUDE ]] || die_usage "--exclude '$EXCLUDE': requires NODE... or --hostfile"
  ((!SYNC)) || die_usage "--sync: requires NODE... or --hostfile"
  check_this_machine
}

main "$@"
