#!/usr/bin/env bash
#
# Runs on a node of a SLURM job, as one task of srun: prepares the environment and becomes the task.
#
# Usage: task.sh NODE_ENV COMMAND [WORD...]
#
#   NODE_ENV   shell script that is sourced before, as on every node of the kit
#
set -euo pipefail

NODE_ENV=$1
shift

trap '' USR2 # SLURM's word that the time is nearly up, for who knows what to do
export MUSTER_NODE=$SLURMD_NODENAME
set +eu # it is not ours
# shellcheck disable=SC1090
source "$NODE_ENV" </dev/null >&2
set -eu
exec "$@"
