#!/usr/bin/env bash
#
# Start this node's part of a run on several nodes. Call it on each node.
#
# Usage: launch_torchrun_multinode.sh [options] CONFIG NPROC NNODES NODE_RANK MASTER_ADDR [MASTER_PORT] [-- ARGUMENT...]
#        muster node ...
#
#   CONFIG               settings file, passed to the script as --config CONFIG; -: none
#   NPROC                number of processes on this node: at most one per GPU; any number without GPUs;
#                        gpu: one per GPU; cpu: one per core; auto: gpu if there are GPUs, else cpu
#   NNODES               number of nodes
#   NODE_RANK            rank of this node, from 0
#   MASTER_ADDR          name or address of the node with NODE_RANK 0
#   MASTER_PORT          default: --master-port, else $MASTER_PORT, else 29500
#
#   --script PATH        script to run (default: Muster's train.py)
#   -m MODULE            run a module instead of a script
#   --python PATH        default: the active venv or conda environment, else ./.venv, Muster's .venv, python3
#   --agent fast|torchrun  fast (default): Muster's agent, which imports PyTorch once; torchrun: PyTorch's own,
#                        which does not notice failures of other nodes
#   --master-port PORT   sets MASTER_PORT
#   --rendezvous-timeout SECONDS  how long to wait for all nodes to join (default: 600)
#   --env NAME=VALUE     set an environment variable for the ranks; repeatable
#   --env-file FILE      the same from a file, one NAME=VALUE per line
#   --max-restarts N     restart up to N times after a failure (default: 0); give it on all nodes: a
#                        failure on one node stops all of them
#   --hang-timeout S     stop the run when the ranks of this node wrote no output or metrics for S seconds,
#                        with exit code 124; 0: never; default with several nodes: only report that it looks hung
#   --notify COMMAND     command that gets events of the run as JSON on standard input (default: $MUSTER_NOTIFY)
#   --progress REGEX     how rank 0 prints a step, as in 'done (?P<step>[0-9]+)'; off: do not look for steps there
#   --log-dir DIR        directory for run directories (default: logs)
#   --no-preflight       skip the checks of GPUs, MASTER_ADDR and port
#   --detach             run in the background, detached from this terminal
#   --dry-run            print the command, run nothing
#   --quiet              print no progress lines of the launcher
#   --help               show this help
#
# ARGUMENTs are passed to the script unchanged. The first node prints which nodes are missing.
#
# Exit codes are those of launch_singlenode.sh; 69 also means: the connection to a node was lost, or this node
# was refused (its PyTorch, script, CONFIG or NNODES differ from those of the first node, its NODE_RANK is
# taken, or the port is used by another run); 124 also: not all nodes joined in time.
#
#   node1$ launch_torchrun_multinode.sh config/large_multinode.yaml 8 2 0 node1
#   node2$ launch_torchrun_multinode.sh config/large_multinode.yaml 8 2 1 node1
#
set -euo pipefail
# shellcheck source=scripts/lib/launcher.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../lib/launcher.bash"


main() {
  parse_options "$@"
  parse_node_arguments
  check_manual_call
  run_this_node
}

main "$@"
