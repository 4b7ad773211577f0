#!/usr/bin/env bash
#
# Runs on a node of a SLURM job, as one task of srun: prepares the environment and becomes the task.
#
# Usage: task.sh NODE_ENV COMMAND [WORD...]
#
#   NODE_ENV   shell script that is sourced before, as on every node of the kit
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"
# shellcheck source=scripts/lib/node_env.bash
source "$KIT/scripts/lib/node_env.bash"

node_env=$1
shift

trap '' USR2 # SLURM's word that the time is nearly up, for who knows what to do
export MUSTER_NODE=$SLURMD_NODENAME
source_node_env "$node_env" </dev/null >&2
exec "$@"
