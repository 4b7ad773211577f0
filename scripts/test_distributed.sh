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
# it measures each link between two: a pair that cannot talk, a slow node and a slow link are named.
# The report goes to standard output, all else to standard error.
#
#   --hostfile FILE      lines such as `node1 slots=4` in place of NODE...
#   --exclude NODES      leave these out
#   --sync               copy the working directory and the kit to nodes that do not share them first
#   --json               one JSON object in place of the report for people
#   --backend BACKEND    auto, nccl or gloo (default: nccl where there are GPUs, else gloo)
#   --min-bytes SIZE     smallest message, such as 1024, 64K, 16M or 1G (default: 1K)
#   --max-bytes SIZE     largest message; each is 4 times the one before (default: 64M, on GPUs 1G)
#   --seconds S          time for the bandwidth table (default: 10)
#   --timeout S          how long one rank waits for another (default: 60)
#   --quiet              no lines of the launcher's own
#   --help               show this
#
# The launchers' --python, --agent, --master-port, --rendezvous-timeout, --env, --env-file, --log-dir, --no-preflight and
# --dry-run are understood too: see scripts/ssh/launch_singlenode.sh --help.
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
# shellcheck source=scripts/lib/launcher.bash
source "$KIT/scripts/lib/launcher.bash" # for what nodes.bash asks of it
# shellcheck source=scripts/lib/ssh.bash
source "$KIT/scripts/lib/ssh.bash"
# shellcheck source=scripts/lib/nodes.bash
source "$KIT/scripts/lib/nodes.bash"
# shellcheck source=scripts/lib/sync.bash
source "$KIT/scripts/lib/sync.bash"
# shellcheck source=scripts/lib/reach.bash
source "$KIT/scripts/lib/reach.bash"
# shellcheck source=scripts/lib/slurm.bash
source "$KIT/scripts/lib/slurm.bash"

SMOKE=()             # words for the test itself
LAUNCH=()            # words for the launcher
TELL=()              # words for the report
WORDS=()             # nodes, as they were given
STARTER=$KIT/scripts/ssh/launch_singlenode.sh
LOG_DIR=$PWD/logs PROCESSES='' BACKEND=auto MIN_BYTES=1K MAX_BYTES=''


parse_args() { # <word...>
  local positional=()
  while (($#)); do
    case $1 in
      --sync) SYNC=1; LAUNCH+=("$1") ;;
      --json) TELL=(--json) ;;
      --min-bytes) need_value "$@"; check_size "$@"; MIN_BYTES=$2; shift ;;
      --max-bytes) need_value "$@"; check_size "$@"; MAX_BYTES=$2; shift ;;
      --seconds | --timeout) need_value "$@"; check_seconds "$@"; SMOKE+=("$1" "$2"); shift ;;
      --backend) need_value "$@"; BACKEND=$2; shift ;;
      --hostfile) need_value "$@"; HOSTFILE=$(absolute "$2"); shift ;;
      --exclude) need_value "$@"; EXCLUDE=$2; shift ;;
      --python) need_value "$@"; ASKED_PYTHON=$2; shift ;;
      --log-dir) need_value "$@"; LOG_DIR=$(absolute "$2"); shift ;;
      --env-file) need_value "$@"; read_env_file "$2"; LAUNCH+=("$1" "$(absolute "$2")"); shift ;;
      --env) need_value "$@"; add_environment "$1" "$2"; LAUNCH+=("$1" "$2"); shift ;;
      --agent | --master-port | --rendezvous-timeout) need_value "$@"; LAUNCH+=("$1" "$2"); shift ;;
      --no-preflight) LAUNCH+=("$1") ;;
      --quiet) LAUNCH+=("$1"); QUIET=1 ;;
      --dry-run) DRY_RUN=1 ;;
      --help | -h) usage; exit ;;
      -*[!0-9]*) die_usage "$1: unknown option" ;;
      *) positional+=("$1") ;;
    esac
    shift
  done
  ((${#positional[@]} >= 1)) || die_usage "expected N, the number of processes; nothing was given"
  PROCESSES=${positional[0]} WORDS=("${positional[@]:1}")
  is_nproc "$PROCESSES" || die_usage "N: expected a number of processes from 1 to $MAX_NPROC, got '$PROCESSES'"
  if [[ ${WORDS[*]-}$HOSTFILE ]]; then
    STARTER=$KIT/scripts/ssh/launch_torchrun_auto.sh
    [[ ! $HOSTFILE ]] || LAUNCH+=(--hostfile "$HOSTFILE")
    [[ ! $EXCLUDE ]] || LAUNCH+=(--exclude "$EXCLUDE")
  else
    [[ ! $EXCLUDE ]] || die_usage "--exclude '$EXCLUDE': from which nodes? name them"
    ((!SYNC)) || die_usage "--sync: to which nodes? name them"
    ! in_allocation || STARTER=$KIT/scripts/run_ddp.sh
  fi
}


on_several_nodes() {
  [[ $STARTER == *auto.sh ]]
}


on_the_allocation() {
  [[ $STARTER == *run_ddp.sh ]]
}


check_size() { # <option> <value> [rest...]
  [[ $2 =~ ^[1-9][0-9]{0,11}[KMGkmg]?$ ]] ||
    die_usage "$1: expected a size in bytes such as 1024, 64K, 16M or 1G, got '$2'"
}


check_seconds() { # <option> <value> [rest...]
  [[ $2 =~ ^[0-9]+([.][0-9]+)?$ && $2 =~ [1-9] ]] ||
    die_usage "$1: expected a number of seconds above 0, got '$2'"
}


# What the ranks would refuse, each for itself, is refused before they are started.
check_smoke() {
  SMOKE+=(--backend "$BACKEND" --min-bytes "$MIN_BYTES")
  if [[ $MAX_BYTES ]]; then
    (($(bytes "$MIN_BYTES") <= $(bytes "$MAX_BYTES"))) ||
      die_usage "--max-bytes '$MAX_BYTES': less than --min-bytes, $MIN_BYTES"
    SMOKE+=(--max-bytes "$MAX_BYTES")
  fi
  [[ $BACKEND =~ ^(auto|nccl|gloo)$ ]] || die_usage "--backend: expected auto, nccl or gloo, got '$BACKEND'"
  on_several_nodes || on_the_allocation || check_backend_here
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
  local node words=() code=0
  open_connections
  name_nodes "$PROCESSES" "${WORDS[@]}"
  ((!SYNC)) || sync_nodes
  try_all_pairs "$SOCKETS/answers"
  for node in "${NODES[@]}"; do
    words+=("$node:${NPROC[$node]}")
  done
  kit_python smoke.connections --report "$FOLDER/report" "$SOCKETS/answers" "${words[@]}" || code=$?
  ((code == 0)) || show_report "$FOLDER/report" "$code"
  log "each of $(counted ${#NODES[@]} node) can connect to every other"
}


# What the launcher and the ranks say is not the answer: the answer is the report.
test_ranks() {
  local code=0 run
  MUSTER_RUN_FILE=$FOLDER/run wait_for "$STARTER" "${LAUNCH[@]}" >&2 || code=$?
  [[ -s $FOLDER/run ]] || exit "$code" # it was not even begun
  run=$(<"$FOLDER/run")
  [[ -e $run/smoke.json ]] || ((code)) || die "no rank wrote a report; see node_*.log in $run"
  show_report "$run/smoke.json" "$code"
}


show_report() { # <report> <exit code, where the report is missing or good>
  local code=$2
  if [[ -e $1 ]]; then
    kit_python smoke.report "${TELL[@]}" "$1" || ((code)) || code=$?
  fi
  exit "$code"
}


main() {
  parse_args "$@"
  if on_the_allocation; then
    enter_node_env "$@"
    take_port_of_environment
    LAUNCH=(${MASTER_PORT:+--master-port "$MASTER_PORT"} "${LAUNCH[@]}")
  fi
  pick_rank_python
  check_smoke
  LAUNCH+=(--python "$PYTHON" --log-dir "$LOG_DIR" --script "$KIT/scripts/lib/smoke.py")
  if on_the_allocation; then
    LAUNCH+=(-c - -n $((PROCESSES * SLURM_JOB_NUM_NODES)))
  else
    LAUNCH+=(- "$PROCESSES" "${WORDS[@]}")
  fi
  LAUNCH+=(-- "${SMOKE[@]}" --json-file smoke.json)
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    exec "$STARTER" --dry-run "${LAUNCH[@]}"
  fi
  FOLDER=$(mktemp -d)
  trap 'rm -rf -- "$FOLDER"' EXIT
  if on_several_nodes; then
    test_connections
  fi
  test_ranks
}

main "$@"
