#!/usr/bin/env bash
#
# Start a run on several nodes over SSH, from one machine.
#
# Usage: launch_torchrun_auto.sh [options] CONFIG NPROC NODE... [-- ARGUMENT...]
#        muster ssh ...
#
#   CONFIG               settings file, passed to the script as --config CONFIG; -: none
#   NPROC                number of processes per node: at most one per GPU; any number without GPUs;
#                        auto: one per GPU of the node, else per core; gpu, cpu: one per GPU, per core
#   NODE...              node1 user@node2 node[3-8,10] node9:4 (:4 overrides NPROC); node ranks follow this
#                        order; the first node is the master
#
#   --hostfile FILE      read the nodes from FILE, one per line: `node1 slots=4`, or `node5 spare`
#   --exclude NODES      exclude these nodes
#   --script PATH        script to run (default: Muster's train.py)
#   -m MODULE            run a module instead of a script
#   --python PATH        default: the active venv or conda environment, else ./.venv, Muster's .venv, python3;
#                        the same path on all nodes
#   --agent fast|torchrun  fast (default): Muster's agent, which imports PyTorch once; torchrun: PyTorch's own
#   --master-port PORT   default: a free port of the first node
#   --rendezvous-timeout SECONDS  how long to wait for all nodes to join (default: 600)
#   --env NAME=VALUE     set an environment variable for the ranks; repeatable
#   --env-file FILE      the same from a file, one NAME=VALUE per line
#   --max-restarts N     restart up to N times after a failure (default: 0)
#   --spares NODES       with --max-restarts: nodes that wait, and take the places of lost ones: node5,node6
#   --min-nodes N        with --max-restarts: without a spare, continue with at least N nodes, if the script can
#   --hang-timeout S     stop a run that writes no output or metrics for S seconds, with exit code 124; 0: never.
#                        Default: stop after 600 s in which no rank could progress, if it logs steps (metrics.jsonl)
#   --notify COMMAND     command that gets events of the run as JSON on standard input (default: $MUSTER_NOTIFY)
#   --progress REGEX     how rank 0 prints a step, as in 'done (?P<step>[0-9]+)'; off: do not look for steps there
#   --log-dir DIR        directory for run directories (default: logs)
#   --sync               first copy the working directory and Muster (the files that git tracks or does not ignore)
#                        to nodes that do not share them
#   --no-preflight       skip the checks of the nodes
#   --lease SECONDS      0: run on when this launcher dies or loses its connections; N: stop at once then, and when
#                        it has been silent for N seconds (default: 20)
#   --attach RUN         follow a run of --lease 0 whose launcher has died; all other arguments as at its start
#   --detach             run in the background, detached from this terminal
#   --dry-run            print the command of each node, run nothing
#   --quiet              print no progress lines of the launcher
#   --help               show this help
#
# ARGUMENTs are passed to the script unchanged. Nodes need the working directory and Muster under the
# same paths: on a shared file system, or copied by --sync. Your ~/.ssh/config applies; ssh must not prompt.
#
# Exit codes: 0 success, 2 wrong call or config, 69 a node is unreachable or unfit, 75 stopped with a
# checkpoint (run again to resume), 124 hung or not all nodes joined in time, 130 SIGINT, 143 SIGTERM,
# otherwise that of the rank that failed first.
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
  [[ $DRY_RUN == 1 ]] || type -P ssh >/dev/null || die "ssh: not found on this machine; install the OpenSSH client"
  ssh_run_nodes ssh
}

main "$@"
