#!/usr/bin/env bash
#
# Run a command in the environment of the ranks on this node.
#
# Usage: in_node_env.sh [--exec|--task] NODE_ENV COMMAND [ARGUMENT...]
#
#   NODE_ENV   shell script that is sourced first
#   --exec     replace this process by COMMAND; the caller ends background processes of NODE_ENV. Without an option,
#              this script ends these processes after COMMAND
#   --task     like --exec, in a task of srun: srun passes the environment, and COMMAND gets all of standard input
#
# Standard input starts with blocks of variables, so that no command line contains their values. Without an option there
# are two blocks: variables that NODE_ENV may change, then variables that override it. COMMAND gets the remaining input.
# With --exec there is only the second block, and COMMAND gets /dev/null. With --task there is no block. A block is a
# series of NAME=VALUE entries and an empty entry at its end; a NUL byte follows each entry.
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"
source "$KIT/scripts/lib/node_env.bash"


# Set MUSTER_NODE_ENV_ENTRIES. Variables in this file start with MUSTER_NODE_ENV_, because the user's environment and
# NODE_ENV may define any other variable. They may also define functions, so `builtin` precedes the commands of bash. The
# locale is C, because in UTF-8, bash's read loses the byte that follows an incomplete character.
read_entries() {
  builtin local LC_ALL=C TMOUT=0
  MUSTER_NODE_ENV_ENTRIES=()
  while IFS= builtin read -r -d '' MUSTER_NODE_ENV_ENTRY && [[ $MUSTER_NODE_ENV_ENTRY ]]; do
    MUSTER_NODE_ENV_ENTRIES+=("$MUSTER_NODE_ENV_ENTRY")
  done
}


export_entries() {
  for MUSTER_NODE_ENV_ENTRY in "${MUSTER_NODE_ENV_ENTRIES[@]}"; do
    export_entry "$MUSTER_NODE_ENV_ENTRY"
  done
}


main() {
  MUSTER_NODE_ENV_MODE=''
  if [[ $1 == --* ]]; then
    MUSTER_NODE_ENV_MODE=$1
    shift
  fi
  restore_environment
  if [[ $MUSTER_NODE_ENV_MODE == --task ]]; then
    trap '' "${PASSED_ON[@]}" # SLURM sends them to all processes of a task
    export MUSTER_NODE=$SLURMD_NODENAME
  fi
  { set +xv; } 2>/dev/null # ~/.bashrc may have set -x, which would print the values
  if [[ ! $MUSTER_NODE_ENV_MODE ]]; then
    read_entries 2>/dev/null # bash warns if the locale that it restores is not installed
    export_entries
  fi
  source_node_env "$1" kill_background </dev/null >&2
  builtin shift
  { builtin set +xv; } 2>/dev/null
  if [[ $MUSTER_NODE_ENV_MODE != --task ]]; then
    # Read the second block of variables. If NODE_ENV has replaced this shell, nothing reads that block, and the
    # supervisor detects this.
    read_entries 2>/dev/null
    [[ ! $MUSTER_NODE_ENV_MODE ]] || command exec </dev/null
    export_entries
  fi
  [[ ! $MUSTER_NODE_ENV_MODE && $(builtin jobs -pr) ]] || exec_by_env "$@"
  builtin trap kill_background EXIT
  (exec_by_env "$@")
}

main "$@"
