#!/usr/bin/env bash
#
# Start this node's part of a run on several nodes, for scripts that require --local-rank=N.
#
# Like launch_torchrun_multinode.sh, but the first argument of each rank is --local-rank=N, as with
# torch.distributed.launch, torchrun's predecessor. With --agent torchrun, ranks are started by torch.distributed.launch
# instead of torchrun.
#
# Usage: launch_multinode.sh [options] CONFIG NPROC NNODES NODE_RANK MASTER_ADDR [MASTER_PORT] [-- ARGUMENT...]
#
#   (as launch_torchrun_multinode.sh)
#
#   node1$ launch_multinode.sh --script old_train.py - 8 2 0 node1
#   node2$ launch_multinode.sh --script old_train.py - 8 2 1 node1
#
set -euo pipefail
# shellcheck source=scripts/lib/launcher.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../lib/launcher.bash"


main() {
  parse_options "$@"
  # shellcheck disable=SC2034 # launch.bash reads them
  PLAIN_AGENT=torch.distributed.launch FAST_OPTIONS=(--pass-local-rank)
  parse_node_arguments
  check_manual_call
  run_this_node
}

main "$@"
