#!/usr/bin/env bash
#
# Run a command in the environment that ranks have on this node.
#
# Usage: in_node_env.sh [--exec|--task] NODE_ENV COMMAND [ARGUMENT...]
#
#   NODE_ENV   shell script that is sourced first
#   --exec     become COMMAND: the caller ends what NODE_ENV has left in the background. Without it, that ends with
#              COMMAND
#   --task     the same in a task of srun, which hands on the environment, and whose standard input is for COMMAND alone
#
# Standard input begins with NAME=VALUE entries for the environment, each ended by a NUL byte, up to an empty entry: so
# no value is in a command line. The rest of it is for COMMAND; with --exec that reads from /dev/null.
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"
# shellcheck source=scripts/lib/node_env.bash
source "$KIT/scripts/lib/node_env.bash"


# In the C locale: in UTF-8, bash's read loses the byte that follows an incomplete character.
read_environment() {
  local entry LC_ALL=C
  ENVIRONMENT=()
  while IFS= read -r -d '' entry && [[ $entry ]]; do
    ENVIRONMENT+=("$entry")
  done
}


main() {
  local mode='' entry
  if [[ $1 == --* ]]; then
    mode=$1
    shift
  fi
  if [[ $mode == --task ]]; then
    trap '' USR2 # SLURM sends it to every process of a task when the time limit is near
    export MUSTER_NODE=$SLURMD_NODENAME
  fi
  source_node_env "$1" kill_background </dev/null >&2
  shift
  [[ $mode != --task ]] || exec "$@"
  read_environment # not before: by that supervisor.py knows that NODE_ENV has not replaced this shell
  [[ ! $mode ]] || exec </dev/null
  for entry in "${ENVIRONMENT[@]}"; do
    export "${entry?}"
  done
  [[ ! $mode && $(jobs -pr) ]] || exec "$@"
  trap kill_background EXIT
  "$@"
}

main "$@"
