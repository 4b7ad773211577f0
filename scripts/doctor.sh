#!/usr/bin/env bash
#
# Is this machine fit for training, or are these nodes, and what is to be done when not?
#
# Usage: doctor.sh [options] [NODE...]
#
#   NODE...              node1 user@node2 node[3-8,10]: look at these, over ssh, in place of this machine
#
# Run it in the directory you would launch from. It looks at Python and PyTorch, GPUs and who uses them,
# memory, disk, /dev/shm, cores and limits, the master port, name resolution, leftovers in the shell's
# environment, and runs that are still going on. It changes nothing.
#
# Each line is ok, a warning (training works, but ...) or a fault (training will fail), with the fix:
# in words, or behind a $ as a command to paste. The worst stands last, above the prompt.
#
# Several nodes are asked at once, try to connect to each other, and are compared: who differs from
# most of the others is named, with both values. What they have in common is said once, and nothing
# of what is ok.
#
#   --hostfile FILE      lines such as `node1 slots=4` in place of NODE...
#   --exclude NODES      leave these out
#   --sync               copy the working directory and the kit to nodes that do not share them first
#   --python PATH        look at this Python
#                        (default: the active venv or conda environment, .venv here, the kit's .venv, python3)
#   --master-port PORT   the port at which ranks will meet (default 29500)
#   --log-dir DIR        where runs will be logged (default logs)
#   --json               print the facts as JSON instead, and judge nothing
#   --dry-run            print the command that would look, and look at nothing
#   --quiet              do not say which nodes are still waited for
#   --help               print this
#
# Exit codes: 0 no fault, 1 a fault, 2 wrong call, 69 a node cannot be asked.
#
#   doctor.sh
#   doctor.sh 'node[1-4]'
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
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
# shellcheck source=scripts/lib/connectivity.bash
source "$KIT/scripts/lib/connectivity.bash"

FORM=()  # options for the program that prints


# ---------------------------------------------------------------- this machine

check_this_machine() {
  if [[ ! $PYTHON_OPTION && $JSON == 0 ]]; then
    find_python
  fi
  pick_python "$PYTHON_OPTION"
  set -- health.doctor "${FORM[@]}" --folder "$PWD" --log-dir "$LOG_DIR" --master-port "${MASTER_PORT:-29500}"
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    quote "$PYTHON" -m "distributed.$1" "${@:2}"
  else
    (cd -- "$KIT" && exec "$PYTHON" "$KIT/scripts/lib/module.py" "$@") # not kit_python: Ctrl-C ends it at once
  fi
}


# No Python that we can use is no wrong call, when none was named: it is the first fault of this machine.
find_python() {
  local trouble
  if ! trouble=$(pick_python 2>&1); then
    trouble=${trouble%%$'\n'*}
    printf 'fault    python    %s\n' "${trouble#"$PROGRAM: "}"
    printf '                   %s\n' 'or install Python 3.10 or newer, on a cluster perhaps: module load python'
    printf '\n%s is not fit for training: 1 fault, nothing else was looked at\n' "$(uname -n)"
    exit 1
  fi
}


# ---------------------------------------------------------------- nodes

check_nodes() {
  local replies
  pick_python "$PYTHON_OPTION"
  set_node_checks 1 "${POSITIONAL[@]}"
  run_checks "${CHECKS[@]}"
  build_module_command host.probe --folder "$PWD" --log-dir "$LOG_DIR" --port "${MASTER_PORT:-29500}" -- "${NODES[@]}"
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    printf '%s: %s\n' "${NODES[*]}" "$(quote "${COMMAND[@]}")"
    return
  fi
  open_connections
  ((!SYNC)) || sync_nodes
  replies=$CONNECTIONS_DIR/replies
  mkdir -p -- "$replies/looking"
  run_on_nodes "$replies/looking" ssh_probe "$(remote_command_line "${COMMAND[@]}")"
  check_connections "$replies"
  kit_python health.cluster "${FORM[@]}" "$replies" "${NODES[@]}"
}


check_connections() { # <directory of the replies>
  local node there=()
  for node in "${NODES[@]}"; do
    (($(<"$1/looking/$node.code") != 0)) || there+=("$node")
  done
  if ((${#there[@]} > 1)); then
    local NODES=("${there[@]}")
    connect_all_pairs "$1"
  fi
}


main() {
  parse_options "$@"
  LOG_DIR=$(realpath -m -- "$LOG_DIR")
  ((!JSON)) || FORM=(--json)
  if [[ ${POSITIONAL[*]-}$HOSTFILE ]]; then
    check_nodes
    return
  fi
  [[ ! $EXCLUDE ]] || die_usage "--exclude '$EXCLUDE': from which nodes? name them"
  ((!SYNC)) || die_usage "--sync: to which nodes? name them"
  check_this_machine
}

main "$@"
