# shellcheck shell=bash
#
# Source config/node_env.sh, the user's setup of each node: modules, conda, NCCL settings.
#
# Sourced, never run.

MUSTER_NODE_ENV_FILE=''       # the file that is being sourced
MUSTER_NODE_ENV_CLEANUP=()    # command to run before this process exits with a failure
MUSTER_NODE_ENV_STDERR=''     # copy of standard error, which the file may redirect
MUSTER_NODE_ENV_DIRECTORY=''  # working directory, which the file may change
MUSTER_NODE_ENV_STATUS=''     # exit code of the last command in the file


# Print the path of config/node_env.sh in the working directory, else in Muster's directory.
node_env() {
  if [[ -e config/node_env.sh ]]; then
    printf '%s\n' "$PWD/config/node_env.sh"
  else
    printf '%s\n' "$KIT/config/node_env.sh"
  fi
}


# Source the file. A failing command in it ends this process with EXIT_UNFIT, by the rules of `set -e`. Failures inside
# functions, and inside files that it sources, are ignored, because conda and Lmod are not written for `set -e`.
source_node_env() { # <config/node_env.sh> [cleanup command...]
  # These variables are global, because a local variable would hide a variable of the same name that the file sets.
  MUSTER_NODE_ENV_FILE=$1 MUSTER_NODE_ENV_CLEANUP=("${@:2}") MUSTER_NODE_ENV_DIRECTORY=$PWD
  exec {MUSTER_NODE_ENV_STDERR}>&2
  check_node_env
  trap 'node_env_exited "$?"' EXIT
  trap 'node_env_failed "$?" "$LINENO"' ERR
  set +eu +o pipefail
  restore_functions
  # shellcheck disable=SC1090
  builtin source "$1"
  MUSTER_NODE_ENV_STATUS=$?
  builtin set -euo pipefail
  keep_changed_functions
  [[ $(builtin trap -p ERR) == *node_env_failed* ]] ||
    node_env_unfit "$MUSTER_NODE_ENV_FILE: changes the ERR trap, which detects failing commands;" \
      "do not set or remove it"
  builtin trap - ERR EXIT
  ((MUSTER_NODE_ENV_STATUS == 0)) || check_node_env_syntax
  command exec 2>&"$MUSTER_NODE_ENV_STDERR" {MUSTER_NODE_ENV_STDERR}>&-
  builtin cd -- "$MUSTER_NODE_ENV_DIRECTORY"
}


# Exit with EXIT_UNFIT if another user can change the file: its commands run as the caller.
check_node_env() {
  local path paths=("$MUSTER_NODE_ENV_FILE")
  [[ ! -L $MUSTER_NODE_ENV_FILE && ! -L ${MUSTER_NODE_ENV_FILE%/*} ]] ||
    paths+=("$(readlink -f -- "$MUSTER_NODE_ENV_FILE")")
  for path in "${paths[@]}"; do
    paths+=("${path%/*}/" "${path%/*/*}/")
  done
  set -- "${MUSTER_NODE_ENV_FILE%/*/*}"
  add_links "$1" "${MUSTER_NODE_ENV_FILE:${#1}+1}"
  find_foreign "${paths[@]}"
  [[ ! $FOREIGN ]] || node_env_unfit "$MUSTER_NODE_ENV_FILE: ${FOREIGN#"$MUSTER_NODE_ENV_FILE: "}"
}


# Exit with EXIT_UNFIT if the file has a syntax error. A failure of `source` does not prove a syntax error, because
# `source` also fails if the last command of the file fails.
check_node_env_syntax() {
  local fault
  fault=$(bash -p -O extglob -n -- "$MUSTER_NODE_ENV_FILE" 2>&1) || node_env_unfit "${fault%%$'\n'*}"
}


node_env_exited() { # <exit code>
  node_env_unfit "$MUSTER_NODE_ENV_FILE: exited with code $1, so nothing was started;" \
    "it is sourced and must neither exit nor exec a command"
}


node_env_failed() { # <exit code> <line>
  [[ ${BASH_SOURCE[1]} == "$MUSTER_NODE_ENV_FILE" && ${FUNCNAME[1]} == source ]] || return 0
  ! node_env_may_fail "$2" || return 0
  local command
  command=$(sed -n -e "$2"'{:more' -e '/\\$/{N;s/\\\n[[:blank:]]*//;b more' \
    -e '};s/^[[:blank:]]*//;s/\r$//;p;}' -- "$MUSTER_NODE_ENV_FILE")
  node_env_unfit "$MUSTER_NODE_ENV_FILE: line $2: '$command' failed with exit code $1;" \
    "fix it, or write '$command || true'"
}


# Whether the last `set -e` or `set +e` above this line is `set +e`. $- does not show it, because
# source_node_env turns `e` off: with `e`, a failure inside a function would end this process too.
node_env_may_fail() { # <line>
  [[ $(head -n "$1" -- "$MUSTER_NODE_ENV_FILE" | grep -oE '^[[:blank:]]*set [-+]e' | tail -n 1) == *+e ]]
}


node_env_unfit() { # <message...>
  builtin trap - ERR EXIT
  command exec 2>&"$MUSTER_NODE_ENV_STDERR"
  builtin printf '%s\n' "${MUSTER_NODE:+$MUSTER_NODE: }$*" >&2
  "${MUSTER_NODE_ENV_CLEANUP[@]}"
  builtin exit "$EXIT_UNFIT"
}


# Stop the background processes of this shell and their descendants, which would hold its output open.
kill_background() {
  builtin local pid IFS=$' \t\n'
  for pid in $(builtin jobs -pr); do
    # shellcheck disable=SC2046 # split into process ids
    builtin kill $(process_tree "$pid") 2>/dev/null || builtin true
  done
}


# Print the ids of a process and its descendants.
process_tree() { # <process id>
  builtin local children child
  builtin printf '%s\n' "$1"
  builtin read -r -d '' -a children < <(builtin command cat "/proc/$1/task/"*/children 2>/dev/null) || builtin true
  for child in "${children[@]}"; do
    process_tree "$child"
  done
}
