#!/usr/bin/env bash
#
# Start this node's part of a training on several nodes, by hand on each of them.
#
# Usage: launch_torchrun_multinode.sh [options] CONFIG NPROC NNODES NODE_RANK MASTER_ADDR [MASTER_PORT] [-- ARGUMENT...]
#
#   CONFIG               settings file, reaches the script as --config CONFIG; - passes nothing
#   NPROC                number of processes on this node; one a GPU where there are GPUs
#   NNODES               number of nodes
#   NODE_RANK            which of them this is, from 0
#   MASTER_ADDR          name or address of the node with NODE_RANK 0, where the ranks meet
#   MASTER_PORT          default: --master-port, else that of the environment, else 29500
#
#   --script PATH        what to run (default: the kit's train.py)
#   -m MODULE            run a module in its place
#   --python PATH        default: the active venv or conda environment, .venv here, the kit's .venv, python3
#   --agent fast|torchrun  fast: workers forked from one warm process; torchrun: the plain one, which
#                        does not know when another node has failed
#   --master-port PORT   the same as MASTER_PORT
#   --rendezvous-timeout SECONDS  how long to wait until all nodes have joined (default: 600)
#   --env NAME=VALUE     environment of the processes, repeatable
#   --env-file FILE      the same, one NAME=VALUE a line
#   --max-restarts N     after a failure start again, up to N times (default: 0); give it on all
#                        nodes: a failure on one of them ends all
#   --hang-timeout S     end the run with 124 when the ranks of this node have not written a line or a
#                        metric for S seconds (default: 0, off)
#   --log-dir DIR        where the run directory is made (default: logs)
#   --no-preflight       do not check GPUs, MASTER_ADDR and port
#   --detach             run in the background, apart from this terminal
#   --dry-run            print what would run, and run nothing
#   --quiet              no lines of the launcher's own
#   --help               show this
#
# ARGUMENTs go to the script untouched. The first node prints which nodes are missing. Exit codes are
# those of launch_singlenode.sh; besides, 69: the connection to a node was lost, or this node was refused
# (PyTorch, script, CONFIG or NNODES differ from those of the first node, its NODE_RANK is taken, or the
# port belongs to another run); 124: not all nodes joined in time, or the run hung.
#
#   node1$ launch_torchrun_multinode.sh config/large_multinode.yaml 8 2 0 node1
#   node2$ launch_torchrun_multinode.sh config/large_multinode.yaml 8 2 1 node1
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../lib/common.bash"
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
# shellcheck source=scripts/lib/by_hand.bash
source "$KIT/scripts/lib/by_hand.bash"


main() {
  parse_options "$@"
  parse_node_arguments
  check_manual_call
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    build_manual_agent_command "$LOG_DIR/<run>"
    print_command
    return
  fi
  if ((DETACH)); then
    detach
    return
  fi
  open_run
  ((!NODE_RANK)) || log "rank 0 prints on the first node; what is printed here: tail -f $RUN/node_${NODES[0]}.log"
  begin_run
  while true; do
    build_manual_agent_command "$RUN"
    start_node run_here "${NODES[0]}" "${COMMAND[@]}"
    wait_for_nodes
    report_verdict
    should_restart || break
    prepare_restart
  done
  exit "$CODE"
}

main "$@"
