#!/usr/bin/env bash
#
# Start a run on several nodes over SSH, from one machine.
#
# Usage: launch_torchrun_auto.sh [options] CONFIG NPROC NODE... [-- ARGUMENT...]
#        muster ssh ...
#
#   CONFIG               settings file, passed to the script as --config CONFIG; -: pass none
#   NPROC                number of processes per node: at most one per GPU; any number without GPUs;
#                        gpu: one per GPU; cpu: one per core; auto: gpu on nodes with GPUs, else cpu
#   NODE...              node1 user@node2 node[3-8,10] node9:4 (with 4 processes instead of NPROC); node ranks
#                        follow this order; the first node is the master
#   ARGUMENT...          passed to the script unchanged; for train.py: section.key=value
#
#   --hostfile FILE      read the nodes from FILE, one per line: `node1 slots=4`; `node5 spare` is a spare node
#   --exclude NODES      exclude these nodes
#   --python PATH        Python of the ranks, with the same path on all nodes (default: the first of these that exists
#                        here: the active venv or conda environment (not base), ./.venv, Muster's .venv, python3)
#   --master-port PORT   port through which the ranks find each other (default: a free port of the first node)
#   --rendezvous-timeout SECONDS
#                        time for all nodes to join (default: 600)
#   --spares NODES       with --max-restarts: spare nodes, which replace lost ones: node5,node6
#   --min-nodes N        with --max-restarts: when a node is lost and no spare node is left, continue with fewer nodes,
#                        but at least N; the script must be able to train with fewer ranks
#   --sync               first copy the working directory and Muster to nodes that do not share these directories: files
#                        that git tracks, and untracked files that are neither ignored nor in logs, checkpoints or
#                        experiments. Nothing is deleted on the nodes. Files that the run writes only there are named
#                        at the end
#   --fetch PATTERN      with --sync: at the end, copy new files that match from the nodes, such as 'out/*.npy', or out
#                        for all files below it; they replace older files here, but none that --sync copies; repeatable
#   --no-preflight       skip the checks of the nodes
#   --lease SECONDS      stop the ranks when this launcher dies or loses its connections, and also when it has sent no
#                        heartbeat for SECONDS (default: 20); 0: let them continue in these cases
#   (as launch_singlenode.sh)
#
# ARGUMENTs are passed to the script unchanged. Nodes need the working directory and Muster under the
# same paths: on a shared file system, or copied by --sync. Your ~/.ssh/config applies; ssh must not prompt.
#
# Exit codes: 0 success, 2 wrong call or settings, 69 a node is unreachable or unfit, 75 stopped with a
# checkpoint (the same call resumes), 130 SIGINT and 143 SIGTERM without a new checkpoint, 124 hung or not all
# nodes joined in time, otherwise that of the rank that failed first.
#
#   launch_torchrun_auto.sh config/large_multinode.yaml 8 'node[1-4]'
#   launch_torchrun_auto.sh --script my_train.py - 2 node1 node2 -- --lr 3e-4
#
set -euo pipefail
# shellcheck source=scripts/lib/launcher.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../lib/launcher.bash"


main() {
  parse_options "$@"
  parse_config_nproc_nodes
  check_call_on_nodes "${POSITIONAL[@]:2}"
  ssh_run_nodes ssh
}

main "$@"
