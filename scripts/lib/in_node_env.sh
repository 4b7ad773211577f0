#!/usr/bin/env bash
#
# Run a command in the environment of the ranks on this node.
#
# Usage: in_node_env.sh [--exec|--task] NODE_ENV COMMAND [ARGUMENT...]
#
#   NODE_ENV   shell script that is sourced first
#   --exec     replace this process by COMMAND; the caller ends background processes of NODE_ENV. Without --exec, they
#              are ended after COMMAND
#   --task     like --exec, in a task of srun: srun passes the environment, and COMMAND gets all of standard input
#
# Standard input starts with NAME=VALUE entries, each ended by a NUL byte, up to an empty entry; so no value is in a
# command line. Without --exec, another such block precedes it, for variables that NODE_ENV may change. The rest is the
# standard input of COMMAND; with --exec, that is /dev/null.
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"
source "$KIT/scripts/lib/node_env.bash"


# In the C locale: in UTF-8, bash's read loses the byte that follows an incomplete character.
read_environment() {
  local entry LC_ALL=C
  ENVIRONMENT=()
  while IFS= read -r -d '' entry && [[ $entry ]]; do
    ENVIRONMENT+=("$entry")
  done
}


export_environment() {
  local entry
  for entry in "${ENVIRONMENT[@]}"; do
    export "${entry?}"
  done
}


main() {
  local mode=''
  if [[ $1 == --* ]]; then
    mode=$1
    shift
  fi
  if [[ $mode == --task ]]; then
    trap '' USR2 # SLURM sends it to all processes of a task before the time limit
    export MUSTER_NODE=$SLURMD_NODENAME
  fi
  { set +xv; } 2>/dev/null # of ~/.bashrc, then of NODE_ENV: bash would print the values
  if [[ ! $mode ]]; then
    read_environment
    export_environment
  fi
  source_node_env "$1" kill_background </dev/null >&2
  shift
  [[ $mode != --task ]] || exec "$@"
  { set +xv; } 2>/dev/null
  read_environment # only now: an unread block shows supervisor.py that NODE_ENV has replaced this shell
  [[ ! $mode ]] || exec </dev/null
  export_environment
  [[ ! $mode && $(jobs -pr) ]] || exec "$@"
  trap kill_background EXIT
  "$@"
}

main "$@"
