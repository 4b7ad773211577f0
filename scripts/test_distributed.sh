#!/usr/bin/env bash
#
# Test communication between NPROC processes per node: correct results, bandwidth,
# slow or hung ranks.
#
# Usage: test_distributed.sh [options] NPROC [NODE...]
#        muster test ...
#
#     muster test 2
#     muster test 8 'node[1-4]'
#
#   NPROC                number of processes per node: at most one per GPU; any
#                        number without GPUs
#   NODE...              nodes to test over SSH: node1 user@node2 node[3-8,10]
#                        node9:4 (with 4 processes there). Default: the SLURM
#                        allocation of this shell, else this machine
#
#   --hostfile FILE      read the nodes from FILE, one per line: `node1 slots=4`
#   --exclude NODES      exclude these nodes
#   --sync               first copy this directory and Muster to the nodes
#   --json               print one JSON object instead of the report, or nothing
#                        if nodes cannot connect (exit code 69)
#   --backend BACKEND    auto, nccl or gloo (default: nccl with GPUs, else gloo)
#   --max-bytes SIZE     largest message, such as 1024, 64K, 16M or 1G; sizes grow
#                        from 1K by a factor of 4 (default: 64M, on GPUs 1G)
#   --seconds S          seconds for the bandwidth table (default: 10)
#   --timeout S          seconds that a rank waits for the others (default: 60)
#   --log-dir DIR        where run directories are created (default: logs)
#   --dry-run            print the command, run nothing
#   --help               show this help
#   --help-all           show all options, what is tested, and the exit codes
#
# More options:
#   --python PATH        Python of the ranks (default: the active environment's)
#   --agent fast|torchrun
#                        program that starts the ranks. fast (default): Muster's
#                        agent; torchrun: PyTorch's agent
#   --master-port PORT   port through which the ranks find each other (default: a
#                        free port)
#   --rendezvous-timeout SECONDS
#                        time for all nodes to join (default: 600)
#   --env NAME=VALUE     set an environment variable for the ranks; repeatable
#   --env-file FILE      set the variables of a file, one NAME=VALUE per line
#   --no-preflight       skip the checks of GPUs, port and nodes
#   --quiet              print no progress lines of the launcher
#
# It checks the result of each collective on every rank (all_reduce, broadcast,
# all_gather, reduce_scatter, all_to_all, point to point, barrier), measures the
# bus bandwidth by message size as nccl-tests do, refuses two ranks on one GPU, and
# names slow, hung and missing ranks. With several nodes it first checks that each
# can connect to every other (exit code 69 if not), then measures the links of each
# rank to other nodes and names slow nodes, ranks and links. The report is written
# to standard output, everything else to standard error.
#
# Exit codes: 0 success, 1 a check failed, 2 wrong call, 69 a node is unreachable
# or unfit, 130 SIGINT, 143 SIGTERM.
#
# shellcheck disable=SC2034,SC2153 # the files that launcher.bash sources use these variables
set -euo pipefail
# shellcheck source=scripts/lib/launcher.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/launcher.bash"

LAUNCHER_ARGUMENTS=()
SMOKE_OPTIONS=()     # options of the test itself
OUTPUT_OPTIONS=()    # options of the program that prints the report
LAUNCHER_FILE=''


parse_arguments() {
  ((${#POSITIONAL[@]} >= 1)) || die_usage "NPROC: missing; give the number of processes"
  NPROC=${POSITIONAL[0]}
  check_nproc NPROC "$NPROC"
  if [[ ${POSITIONAL[1]-}$HOSTFILE ]]; then
    LAUNCHER_FILE=$KIT/scripts/ssh/launch_torchrun_auto.sh
    return
  fi
  [[ ! $EXCLUDE ]] || die_usage "--exclude '$EXCLUDE': requires NODE... or --hostfile"
  ((!SYNC)) || die_usage "--sync: requires NODE... or --hostfile"
  # In a task of srun, in_allocation exits with an error message that names this command.
  COMMAND_IN_STEP="env -u SLURM_JOB_ID scripts/test_distributed.sh $NPROC"
  if in_allocation; then
    LAUNCHER_FILE=$KIT/scripts/run_ddp.sh
    return
  fi
  [[ ! $RENDEZVOUS_TIMEOUT ]] || die_usage "--rendezvous-timeout: there is only one node; leave it out"
  LAUNCHER_FILE=$KIT/scripts/ssh/launch_singlenode.sh
}


uses_allocation() {
  [[ $LAUNCHER_FILE == *run_ddp.sh ]]
}


# Check the options of the test before the start: otherwise each rank would refuse them.
check_smoke() {
  SMOKE_OPTIONS=(--backend "$BACKEND")
  if [[ $MAX_BYTES ]]; then
    local bytes=0
    [[ ! $MAX_BYTES =~ ^[1-9][0-9]{0,11}[KMGkmg]?$ ]] || bytes=$(numfmt --from=iec -- "${MAX_BYTES^^}")
    ((bytes >= 1024)) ||
      die_usage "--max-bytes: expected a size such as 1024, 64K, 16M or 1G, at least 1K, got '$MAX_BYTES'"
    SMOKE_OPTIONS+=(--max-bytes "$bytes")
  fi
  check_seconds --seconds "$TABLE_SECONDS"
  check_seconds --timeout "$TIMEOUT"
  [[ $BACKEND =~ ^(auto|nccl|gloo)$ ]] || die_usage "--backend: expected auto, nccl or gloo, got '$BACKEND'"
  [[ $LAUNCHER_FILE != *launch_singlenode.sh ]] || check_backend_here
}


check_seconds() { # <option> <value, if it was given>
  [[ $2 ]] || return 0
  [[ $2 =~ ^[0-9]+([.][0-9]+)?$ && $2 =~ [1-9] ]] ||
    die_usage "$1: expected a number of seconds above 0, got '$2'"
  SMOKE_OPTIONS+=("$1" "$2")
}


check_backend_here() {
  case $BACKEND in
    nccl)
      [[ $DRY_RUN == 1 ]] || (($(kit_python host.processes gpu) > 0)) ||
        die_usage "--backend nccl: no GPU on this machine; use gloo"
      ;;
    gloo) LAUNCHER_ARGUMENTS+=(--no-preflight) ;; # with gloo, more processes than GPUs are allowed
  esac
}


# Run the launcher with its output on standard error, and print the report. The launcher tests the connections between
# nodes first, because ranks that cannot connect to each other would wait without a message.
test_ranks() {
  local code=0 run pipe
  exec {pipe}<> <(:) # an anonymous pipe
  run_forwarding_signals exec_in_environment 1 MUSTER_SMOKE_TEST="/proc/$$/fd/$pipe" "$LAUNCHER_FILE" \
    "${LAUNCHER_ARGUMENTS[@]}" >&2 || code=$?
  read -r -t 0 -u "$pipe" || exit "$code" # the launcher has made no run directory
  read -r -u "$pipe" run
  if [[ -e $run/smoke.json ]]; then
    kit_python smoke.summary "${OUTPUT_OPTIONS[@]}" "$run/smoke.json" || ((code)) || code=$?
  elif ((!code)); then
    die "no rank wrote a report; see node_*.log in $run"
  fi
  exit "$code"
}


main() {
  drop_inherited_variables
  parse_options "$@"
  parse_arguments
  if uses_allocation; then
    enter_node_env "$@"
    use_port_from_environment
  fi
  pick_rank_python
  check_python
  check_smoke
  ((!JSON)) || OUTPUT_OPTIONS=(--json)
  [[ $LOG_DIR == /* ]] || LOG_DIR=$PWD/$LOG_DIR
  forward_options_except --json --backend --max-bytes --seconds --timeout \
    --python --log-dir --master-port --dry-run
  LAUNCHER_ARGUMENTS+=("${FORWARDED_OPTIONS[@]}" --python "$PYTHON" --log-dir "$LOG_DIR"
    ${MASTER_PORT:+--master-port "$MASTER_PORT"} --script "$KIT/scripts/lib/smoke.py")
  if uses_allocation; then
    LAUNCHER_ARGUMENTS+=(-c - -n $((NPROC * SLURM_JOB_NUM_NODES)))
  else
    LAUNCHER_ARGUMENTS+=(- "$NPROC" "${POSITIONAL[@]:1}")
  fi
  LAUNCHER_ARGUMENTS+=(-- "${SMOKE_OPTIONS[@]}" --json-file smoke.json)
  if [[ $DRY_RUN == 1 ]]; then
    exec_in_environment 0 "$LAUNCHER_FILE" --dry-run "${LAUNCHER_ARGUMENTS[@]}"
  fi
  test_ranks
}

main "$@"
