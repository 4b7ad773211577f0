#!/usr/bin/env bash
#
# Do N processes, on this machine or on each of several, compute together, how fast, and who is slow?
#
# Usage: test_distributed.sh [options] N [NODE...]
#
#   N                    number of processes on each node; one a GPU where there are GPUs
#   NODE...              node1 user@node2 node[3-8,10] node9:4 (that one's own number of processes),
#                        over ssh; without them, the SLURM allocation this shell is in, where SLURM lays
#                        the N times as many processes out as it has allocated them, else this machine
#
# Checks that each collective that training uses gives the right result on every rank (all_reduce,
# broadcast, all_gather, reduce_scatter, all_to_all, point to point, barrier), measures the bus
# bandwidth by message size as nccl-tests do, refuses two ranks on one GPU, and names a rank that is
# slow, frozen or missing. Of several nodes it first sees whether each can connect to every other, and
# ends with 69 where one cannot; it measures each link between two, and names a slow node and a slow link.
# The report goes to standard output, all else to standard error.
#
#   --hostfile FILE      lines such as `node1 slots=4` in place of NODE...
#   --exclude NODES      leave these out
#   --sync               copy the working directory and the kit to nodes that do not share them first
#   --json               one JSON object in place of the report for people; none where nodes cannot connect (69)
#   --backend BACKEND    auto, nccl or gloo (default: nccl where there are GPUs, else gloo)
#   --min-bytes SIZE     smallest message, such as 1024, 64K, 16M or 1G (default: 1K)
#   --max-bytes SIZE     largest message; each is 4 times the one before (default: 64M, on GPUs 1G)
#   --seconds S          time for the bandwidth table (default: 10)
#   --timeout S          how long one rank waits for another (default: 60)
#   --python PATH        default: the active venv or conda environment, .venv here, the kit's .venv, python3
#   --agent fast|torchrun  fast: workers forked from one warm process; torchrun: the plain one
#   --master-port PORT   default: a free one
#   --rendezvous-timeout SECONDS  how long to wait until all nodes have joined (default: 600)
#   --env NAME=VALUE     environment of the processes, repeatable
#   --env-file FILE      the same, one NAME=VALUE a line
#   --log-dir DIR        where the run directory is made (default: logs)
#   --no-preflight       do not check GPUs and port, or ask the nodes whether they are fit
#   --dry-run            print what would run, and run nothing
#   --quiet              no lines of the launcher's own
#   --help               show this
#
# Exit codes: 0 all is well, 1 a check failed, 2 wrong call, 69 a node cannot be reached or is not
# fit, 130 Ctrl-C, 143 TERM.
#
#   test_distributed.sh 2
#   test_distributed.sh 8 'node[1-4]'
#   test_distributed.sh --json --max-bytes 1M 8 | jq .verdict
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
# shellcheck source=scripts/lib/options.bash
source "$KIT/scripts/lib/options.bash"
# shellcheck source=scripts/lib/node_env.bash
source "$KIT/scripts/lib/node_env.bash"
# shellcheck source=scripts/lib/nodes.bash
source "$KIT/scripts/lib/nodes.bash"
# shellcheck source=scripts/lib/launch.bash
source "$KIT/scripts/lib/launch.bash"
# shellcheck source=scripts/lib/watch.bash
source "$KIT/scripts/lib/watch.bash"
# shellcheck source=scripts/lib/ssh.bash
source "$KIT/scripts/lib/ssh.bash"
# shellcheck source=scripts/lib/sync.bash
source "$KIT/scripts/lib/sync.bash"
# shellcheck source=scripts/lib/connectivity.bash
source "$KIT/scripts/lib/connectivity.bash"
# shellcheck source=scripts/lib/slurm.bash
source "$KIT/scripts/lib/slurm.bash"

LAUNCH=()            # options and arguments of the launcher
SMOKE=()             # options of the test itself
FORM=()              # options of the program that prints the report
STARTER=''           # the launcher


# N NODE...
parse_arguments() {
  ((${#POSITIONAL[@]} >= 1)) || die_usage "expected N, the number of processes; nothing was given"
  NPROC=${POSITIONAL[0]}
  is_nproc "$NPROC" || die_usage "N: expected a number of processes from 1 to $MAX_NPROC, got '$NPROC'"
  if [[ ${POSITIONAL[1]-}$HOSTFILE ]]; then
    STARTER=$KIT/scripts/ssh/launch_torchrun_auto.sh
    return
  fi
  [[ ! $EXCLUDE ]] || die_usage "--exclude '$EXCLUDE': from which nodes? name them"
  ((!SYNC)) || die_usage "--sync: to which nodes? name them"
  if in_allocation; then
    STARTER=$KIT/scripts/run_ddp.sh
    return
  fi
  [[ ! $RENDEZVOUS_TIMEOUT ]] || die_usage "--rendezvous-timeout: on one machine no other node has to join; leave it out"
  STARTER=$KIT/scripts/ssh/launch_singlenode.sh
}


uses_nodes() {
  [[ $STARTER == *auto.sh ]]
}


uses_allocation() {
  [[ $STARTER == *run_ddp.sh ]]
}


# What the ranks would refuse, each for itself, is refused before they are started.
check_smoke() {
  check_size --min-bytes "$MIN_BYTES"
  SMOKE=(--backend "$BACKEND" --min-bytes "$MIN_BYTES")
  if [[ $MAX_BYTES ]]; then
    check_size --max-bytes "$MAX_BYTES"
    (($(bytes "$MIN_BYTES") <= $(bytes "$MAX_BYTES"))) ||
      die_usage "--max-bytes '$MAX_BYTES': less than --min-bytes, $MIN_BYTES"
    SMOKE+=(--max-bytes "$MAX_BYTES")
  fi
  check_seconds --seconds "$SECONDS_FOR_TABLE"
  check_seconds --timeout "$TIMEOUT"
  [[ $BACKEND =~ ^(auto|nccl|gloo)$ ]] || die_usage "--backend: expected auto, nccl or gloo, got '$BACKEND'"
  uses_nodes || uses_allocation || check_backend_here
}


check_size() { # <option> <value>
  [[ $2 =~ ^[1-9][0-9]{0,11}[KMGkmg]?$ ]] ||
    die_usage "$1: expected a size in bytes such as 1024, 64K, 16M or 1G, got '$2'"
}


check_seconds() { # <option> <value, if it was given>
  [[ $2 ]] || return 0
  [[ $2 =~ ^[0-9]+([.][0-9]+)?$ && $2 =~ [1-9] ]] ||
    die_usage "$1: expected a number of seconds above 0, got '$2'"
  SMOKE+=("$1" "$2")
}


check_backend_here() {
  case $BACKEND in
    nccl) (($(kit_python host.gpus) > 0)) || die_usage "--backend nccl: there is no GPU here; use gloo" ;;
    gloo) LAUNCH+=(--no-preflight) ;; # on the CPU there may be more processes than GPUs
  esac
}


bytes() { # <size>
  numfmt --from=iec -- "${1^^}"
}


# Ranks on nodes that cannot connect to each other would wait for each other in silence.
test_connections() {
  set_node_checks "$NPROC" "${POSITIONAL[@]:1}"
  run_checks "${CHECKS[@]}"
  open_connections
  ((!SYNC)) || sync_nodes
  connect_all_pairs "$CONNECTIONS_DIR/replies"
  kit_python launch.connectivity judge "$CONNECTIONS_DIR/replies" "${NODES[@]}" || exit
  log "each of $(counted ${#NODES[@]} node) can connect to every other"
}


# What the launcher and the ranks say is not the answer: the answer is the report.
test_ranks() {
  local code=0 run
  run_forwarding_signals exec_in_environment 1 MUSTER_RUN_FILE="$SCRATCH/run" "$STARTER" "${LAUNCH[@]}" >&2 || code=$?
  [[ -s $SCRATCH/run ]] || exit "$code" # it was not even begun
  run=$(<"$SCRATCH/run")
  if [[ -e $run/smoke.json ]]; then
    kit_python smoke.report "${FORM[@]}" "$run/smoke.json" || ((code)) || code=$?
  elif ((!code)); then
    die "no rank wrote a report; see node_*.log in $run"
  fi
  exit "$code"
}


main() {
  parse_options "$@"
  parse_arguments
  if uses_allocation; then
    enter_node_env "$@"
    use_port_from_environment
    LAUNCH+=(${MASTER_PORT:+--master-port "$MASTER_PORT"})
  fi
  pick_rank_python
  check_python
  check_smoke
  ((!JSON)) || FORM=(--json)
  LOG_DIR=$(absolute "$LOG_DIR")
  forward_options_except --json --backend --min-bytes --max-bytes --seconds --timeout --python --log-dir --master-port --dry-run
  LAUNCH+=("${FORWARDED_OPTIONS[@]}" --python "$PYTHON" --log-dir "$LOG_DIR" --script "$KIT/scripts/lib/smoke.py")
  if uses_allocation; then
    LAUNCH+=(-c - -n $((NPROC * SLURM_JOB_NUM_NODES)))
  else
    LAUNCH+=(${MASTER_PORT:+--master-port "$MASTER_PORT"} - "$NPROC" "${POSITIONAL[@]:1}")
  fi
  LAUNCH+=(-- "${SMOKE[@]}" --json-file smoke.json)
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    exec_in_environment 0 "$STARTER" --dry-run "${LAUNCH[@]}"
  fi
  SCRATCH=$(mktemp -d)
  trap 'rm -rf -- "$SCRATCH"' EXIT
  if uses_nodes; then
    test_connections
  fi
  test_ranks
}

main "$@"
