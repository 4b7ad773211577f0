#!/usr/bin/env bash
#
# Start one training on several nodes with pdsh, from one place.
#
# Usage: launch_pdsh_multinode.sh [options] CONFIG NPROC NODE... [-- ARGUMENT...]
#
# As launch_torchrun_auto.sh, with the same options, for users of pdsh: it alone
# starts the processes, on all nodes at once however many they are, over ssh. With PDSH_RCMD_TYPE set it
# goes that way; the questions before the start (--no-preflight leaves them out) always go over ssh.
#
#   CONFIG               settings file, reaches the script as --config CONFIG; - passes nothing
#   NPROC                number of processes on each node; one a GPU where there are GPUs
#   NODE...              node1 user@node2 node[3-8,10] node9:4 (that one's own number of processes);
#                        their order is the order of node ranks, and the ranks meet at the first
#
#   --hostfile FILE      lines such as `node1 slots=4` in place of NODE...
#   --exclude NODES      leave these out
#   --script PATH        what to run (default: the kit's train.py)
#   -m MODULE            run a module in its place
#   --python PATH        default: the active venv or conda environment, .venv here, the kit's .venv, python3;
#                        on all nodes the same path
#   --agent fast|torchrun  fast: workers forked from one warm process; torchrun: the plain one
#   --master-port PORT   default: a free one of the first node
#   --rendezvous-timeout SECONDS  how long to wait until all nodes have joined (default: 600)
#   --env NAME=VALUE     environment of the processes, repeatable
#   --env-file FILE      the same, one NAME=VALUE a line
#   --max-restarts N     after a failure start again, up to N times (default: 0)
#   --hang-timeout S     end the run with 124 when it has not written a line or a metric for S seconds;
#                        0: never (default: 600 for a run that logs steps, when nothing can end the wait)
#   --log-dir DIR        where the run directory is made (default: logs)
#   --sync               copy the working directory and the kit to nodes that do not share them
#   --no-preflight       do not ask the nodes whether they are fit
#   --detach             run in the background, apart from this terminal
#   --dry-run            print what would run on which node, and run nothing
#   --quiet              no lines of the launcher's own
#   --help               show this
#
# ARGUMENTs go to the script untouched. Exit codes are those of launch_torchrun_auto.sh.
#
#   launch_pdsh_multinode.sh config/large_multinode.yaml 8 'node[1-40]'
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
# shellcheck source=scripts/lib/ssh.bash
source "$KIT/scripts/lib/ssh.bash"
# shellcheck source=scripts/lib/sync.bash
source "$KIT/scripts/lib/sync.bash"
# shellcheck source=scripts/lib/pdsh.bash
source "$KIT/scripts/lib/pdsh.bash"


main() {
  parse_options "$@"
  parse_config_nproc_nodes
  require_pdsh
  check_call_on_nodes "${POSITIONAL[@]:2}"
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    print_agent_commands
    return
  fi
  open_connections
  ((!SYNC)) || sync_nodes
  ssh_probe_nodes
  if ((DETACH)); then
    detach
    return
  fi
  open_run
  begin_run
  while true; do
    pdsh_start_nodes
    follow_logs
    wait_for_nodes
    collect_logs
    report_verdict
    should_restart || break
    prepare_restart
    archive_attempt_on_nodes
  done
  exit "$CODE"
}

main "$@"
