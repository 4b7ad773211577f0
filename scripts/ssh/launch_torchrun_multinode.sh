#!/usr/bin/env bash
#
# Start this node's part of a run on several nodes. Call it on each node.
#
# Usage: launch_torchrun_multinode.sh [options] CONFIG NPROC NNODES NODE_RANK MASTER_ADDR [MASTER_PORT] [-- ARGUMENT...]
#        muster node ...
#
#   CONFIG               settings file, passed to the script as --config CONFIG; -: pass none
#   NPROC                number of processes on this node: at most one per GPU; any number without GPUs;
#                        gpu: one per GPU; cpu: one per core; auto: gpu if there are GPUs, else cpu
#   NNODES               number of nodes
#   NODE_RANK            rank of this node, from 0
#   MASTER_ADDR          name or address of the node with NODE_RANK 0
#   MASTER_PORT          port through which the ranks find each other (default: --master-port, else $MASTER_PORT,
#                        else 29500)
#   ARGUMENT...          passed to the script unchanged; for train.py: section.key=value
#
#   --master-port PORT   the same as MASTER_PORT
#   --rendezvous-timeout SECONDS
#                        time for all nodes to join (default: 600)
#   --max-restarts N     restart the run up to N times after a failure (default: 0); give it on all nodes, as
#                        a failure on one node stops all of them
#   --hang-timeout S     stop the run when the ranks of this node write no output and no metrics for S seconds
#                        (exit code 124); 0: never. Default with several nodes: only report a run that looks hung
#   --no-preflight       skip the checks of GPUs, MASTER_ADDR and port
#   (as launch_singlenode.sh except --lease)
#
# ARGUMENTs are passed to the script unchanged. The first node prints which nodes are missing. With --agent torchrun, a
# node does not notice failures of other nodes.
#
# Exit codes are those of launch_singlenode.sh. 124 also means that not all nodes joined in time. 69 also means that
# the connection to a node was lost, or that the first node refused this one, because PyTorch, script, CONFIG or
# NNODES differ, NODE_RANK is taken, or another run uses the port.
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
