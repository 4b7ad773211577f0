#!/usr/bin/env bash
#
# Start a run on several nodes with pdsh, from one machine.
#
# Usage: launch_pdsh_multinode.sh [options] CONFIG NPROC NODE... [-- ARGUMENT...]
#        muster pdsh ...
#
# Like launch_torchrun_auto.sh, but pdsh starts the processes on all nodes, over ssh or the transport in PDSH_RCMD_TYPE.
# Stop requests, and the checks before the start (skipped with --no-preflight), always use ssh. Of the options below,
# --lease is refused: a run stops when its launcher dies.
#
#   (as launch_torchrun_auto.sh)
#
# ARGUMENTs are passed to the script unchanged. Exit codes are those of launch_torchrun_auto.sh.
#
#   launch_pdsh_multinode.sh config/large_multinode.yaml 8 'node[1-40]'
#
set -euo pipefail
# shellcheck source=scripts/lib/launcher.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../lib/launcher.bash"


main() {
  parse_options "$@"
  [[ ! $LEASE ]] || die_usage "--lease: not possible with pdsh; use launch_torchrun_auto.sh"
  parse_config_nproc_nodes
  check_call_on_nodes "${POSITIONAL[@]:2}"
  check_pdsh
  ssh_run_nodes pdsh
}

main "$@"
