#!/usr/bin/env bash
#
# Train with N processes: on the SLURM allocation this shell is in, else on this machine.
#
# Usage: run_ddp.sh -n N [-c CONFIG] [-l LEVEL] [options] [-- WORD...]
#
#   -n N          number of processes in total
#   -c CONFIG     settings file (default: the kit's config/quickstart.yaml); - passes nothing
#   -l LEVEL      how much the kit's trainer prints: debug, info, warning or error, in any case; refused with
#                 --script and -m, as it is an argument of the trainer's
#   WORD...       go to the script untouched, for the kit's trainer: section.key=value
#   options       those of scripts/ssh/launch_singlenode.sh; inside an allocation srun starts the
#                 processes: --agent counts with LAUNCHER=torchrun alone, --detach is refused.
#                 LAUNCHER, CONTAINER and SRUN_ARGS: see scripts/slurm/slurm_train.sh --help
#   --help        show this
#
#   run_ddp.sh -n 2
#   salloc -N2 --gpus-per-node=8 scripts/run_ddp.sh -n 16 -c config/gpt2_124m.yaml
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
# shellcheck source=scripts/lib/launcher.bash
source "$KIT/scripts/lib/launcher.bash"
# shellcheck source=scripts/lib/slurm.bash
source "$KIT/scripts/lib/slurm.bash"

NPROC='' CONFIG=$KIT/config/quickstart.yaml LEVEL=''
COMMON=() BEHIND=() # words for the launcher: its options, and those behind --


parse_args() { # <word...>
  local call=("$PROGRAM_FILE" "$@")
  while (($#)); do
    case $1 in
      -n) need_value "$@"; NPROC=$2; shift ;;
      -c) need_value "$@"; CONFIG=$2; shift ;;
      -l) need_value "$@"; LEVEL=$2; shift ;;
      --help | -h) usage; exit ;;
      --) BEHIND=("${@:2}"); break ;;
      *) COMMON+=("$1") ;;
    esac
    shift
  done
  parse_options "${COMMON[@]}" -- "${BEHIND[@]}"
  CALL=("${call[@]}")
  ((${#POSITIONAL[@]} == 0)) || die_usage "not understood: $(quote "${POSITIONAL[@]}")"
  [[ $NPROC ]] || die_usage "-n N is missing: how many processes?"
  [[ $NPROC =~ ^[1-9][0-9]{0,8}$ ]] || die_usage "-n: expected a number of processes, 1 or more, got '$NPROC'"
  check_level
}


check_level() {
  [[ $LEVEL ]] || return 0
  [[ ${LEVEL,,} =~ ^(debug|info|warning|error)$ ]] || die_usage "-l: expected debug, info, warning or error, got '$LEVEL'"
  [[ ! $SCRIPT$MODULE || $SCRIPT -ef $KIT/train.py ]] || die_usage "-l '$LEVEL': is for the kit's train.py; give your own script its arguments" \
    "behind --, such as -- --log-level ${LEVEL,,}"
  USER_ARGS+=(--log-level "${LEVEL,,}")
}


on_this_machine() {
  exec "$KIT/scripts/ssh/launch_singlenode.sh" "${COMMON[@]}" "$CONFIG" "$NPROC" -- "${USER_ARGS[@]}"
}


main() {
  parse_args "$@"
  if in_allocation; then
    enter_node_env "$@"
    launch_on_allocation "$CONFIG" "$NPROC"
    exit "$CODE"
  else
    on_this_machine
  fi
}

main "$@"
