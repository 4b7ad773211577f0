#!/usr/bin/env bash
#
# From a fresh clone to a trained model: make .venv, install, train, say what to run next.
#
# Usage: scripts/quickstart.sh [options] [-- KEY=VALUE...]
#
#   --fresh         train anew, into a checkpoint directory of its own; without it a second call
#                   goes on from the checkpoint of the first
#   --python PATH   the Python, 3.10 or newer, to make .venv from (default: python3)
#   --dry-run       show what would be run, and run nothing
#   --help          show this
#
# Trains config/quickstart.yaml, with one process a GPU, or two on a machine without a GPU.
# KEY=VALUE changes a setting, as in: scripts/quickstart.sh -- train.steps=100
#
# Everything stays in this directory: packages in .venv, which is filled again only when
# requirements.txt has changed, runs in logs, models in checkpoints.
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
# shellcheck source=scripts/lib/options.bash
source "$KIT/scripts/lib/options.bash"
# shellcheck source=scripts/lib/venv.bash
source "$KIT/scripts/lib/venv.bash"

LAUNCH=scripts/ssh/launch_singlenode.sh
SETTINGS=() # arguments of the trainer


# The global batch must divide by the number of processes: 16 windows for each GPU.
choose_settings() {
  local gpus
  CONFIG=config/quickstart.yaml NPROC=2
  gpus=$(kit_python host.gpus)
  if ((gpus > 0)); then
    NPROC=$gpus
    SETTINGS+=("train.batch_size=$((16 * gpus))")
    log "training on the GPUs, one process on each: $gpus"
  else
    log "training on the CPU with $NPROC processes: no GPU is visible"
  fi
  if ((FRESH)); then
    SETTINGS+=("checkpoint.dir=checkpoints/quickstart-$(date +%Y%m%d-%H%M%S)")
  fi
  SETTINGS+=("${SCRIPT_ARGS[@]}")
}


# What makes the next training longer than this one.
longer_training() {
  local word steps=1500 # the file says 1200
  for word in "${SCRIPT_ARGS[@]}"; do
    [[ $word != train.epochs=* ]] || return 0 # the caller knows how long
    [[ ! $word =~ ^train\.steps=([1-9][0-9]*)$ ]] || steps=${BASH_REMATCH[1]}
  done
  printf 'train.steps=%d\n' $((steps < 1500 ? 3000 : 2 * steps))
}


train() {
  local words=("$LAUNCH" --python "$VENV/bin/python" "$CONFIG" "$NPROC")
  if ((${#SETTINGS[@]} > 0)); then
    words+=(-- "${SETTINGS[@]}")
  fi
  show "${words[@]}"
  if [[ ${DRY_RUN:-0} != 1 ]]; then
    run_forwarding_signals exec_in_environment 0 "${words[@]}" || report_failure $? "${words[@]}"
  fi
}


report_failure() { # <exit code> <command...>
  [[ $1 != "$EXIT_STOPPED" ]] || log "to go on: $(quote "${@:2}")"
  exit "$1"
}


# Commands that work as they stand, from where the caller is and with the Python he has active.
print_next_steps() {
  local more fish=''
  [[ ${SHELL-} != */fish ]] || fish=.fish
  mapfile -t more < <(longer_training)
  printf '\nWhat to do next:\n\n'
  [[ $CALLER -ef $KIT ]] || printf '  cd %s\n' "$(quote "$KIT")"
  list_pythons
  [[ ${PYTHONS[0]%/*} -ef $VENV/bin ]] || printf '  source .venv/bin/activate%s\n' "$fish"
  cat <<END
  # look at this training: open logs/latest/report.html, or
  tail -n 3 logs/latest/metrics.jsonl

  # train on, from where it ended; or anew
  $(quote "$LAUNCH" "$CONFIG" "$NPROC" -- "${SETTINGS[@]}" "${more[@]}")
  scripts/quickstart.sh --fresh

  # is this machine fit, and do processes exchange their results right and fast?
  scripts/doctor.sh
  scripts/test_distributed.sh $NPROC

  # your own script, unchanged
  $LAUNCH --script YOURS.py - $NPROC
END
}


main() {
  CALLER=$PWD
  parse_options "$@"
  ((${#POSITIONAL[@]} == 0)) ||
    die_usage "unknown argument '${POSITIONAL[0]}': settings stand behind a --, as in: -- train.steps=100"
  cd -- "$KIT"
  ensure_venv "$PYTHON_OPTION" requirements.txt
  choose_settings
  train
  [[ ${DRY_RUN:-0} == 1 ]] || print_next_steps
}


main "$@"
