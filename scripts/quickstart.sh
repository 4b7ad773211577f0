#!/usr/bin/env bash
#
# Create .venv, install the requirements, train a small model, and print what to run next.
#
# Usage: scripts/quickstart.sh [options] [-- KEY=VALUE...]
#
#   KEY=VALUE       change a setting of the training: train.steps=100
#
#   --fresh         start from step 0 with a new checkpoint directory (default: resume from the checkpoint of
#                   the previous call)
#   --python PATH   Python 3.10 or newer for .venv (default: python3)
#   --dry-run       print the commands, run nothing
#   --help          show this help
#
# It trains with the settings in config/quickstart.yaml, with one process per GPU, or with two processes if there is no
# GPU. All files are in Muster's directory: packages in .venv, runs in logs, models in checkpoints. Packages are
# installed again only when requirements.lock has changed.
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
source "$KIT/scripts/lib/options.bash"
source "$KIT/scripts/lib/venv.bash"

LAUNCH=scripts/ssh/launch_singlenode.sh
SETTINGS=() # arguments of the trainer


# Set CONFIG, NPROC and SETTINGS. The global batch has 16 windows (training sequences) per GPU, because its size must be
# divisible by the number of processes.
choose_settings() {
  local gpus
  CONFIG=config/quickstart.yaml NPROC=2
  gpus=$(kit_python host.processes gpu)
  if ((gpus > 0)); then
    NPROC=$gpus
    SETTINGS+=("train.batch_size=$((16 * gpus))")
    log "training on GPUs, one process per GPU: $gpus"
  else
    log "training on the CPU with $NPROC processes: no GPU is visible"
  fi
  ((!FRESH)) || SETTINGS+=("checkpoint.dir=checkpoints/quickstart-$(date +%Y%m%d-%H%M%S)")
  SETTINGS+=("${SCRIPT_ARGS[@]}")
}


# Print the setting that makes the next training longer than this one.
longer_training() {
  local argument steps=1500 # so that the default is 3000 steps; config/quickstart.yaml has 1200
  for argument in "${SCRIPT_ARGS[@]}"; do
    [[ $argument != train.epochs=* ]] || return 0
    [[ ! $argument =~ ^train\.steps=([1-9][0-9]*)$ ]] || steps=${BASH_REMATCH[1]}
  done
  printf 'train.steps=%d\n' $((steps < 1500 ? 3000 : 2 * steps))
}


# Set EFFECTIVE to these settings. Of several settings with the same key, only the last is kept.
choose_effective_settings() { # <KEY=VALUE...>
  EFFECTIVE=()
  while (($#)); do
    [[ $(printf '\n%s' "${@:2}") == *$'\n'"${1%%=*}="* ]] || EFFECTIVE+=("$1")
    shift
  done
}


train() {
  local command=("$LAUNCH" --python "$VENV/bin/python" "$CONFIG" "$NPROC" ${SETTINGS:+--} "${SETTINGS[@]}")
  show "${command[@]}"
  if [[ $DRY_RUN != 1 ]]; then
    run_forwarding_signals exec_in_environment 0 "${command[@]}" || report_failure $? "${command[@]}"
  fi
}


report_failure() { # <exit code> <command...>
  [[ $1 != "$EXIT_STOPPED" ]] || log "to resume: $(quote "${@:2}")"
  exit "$1"
}


# Print commands that work in the caller's directory and with the active Python.
print_next_steps() {
  local more fish=''
  [[ ${SHELL-} != */fish ]] || fish=.fish
  mapfile -t more < <(longer_training)
  choose_effective_settings "${SETTINGS[@]}" "${more[@]}"
  printf '\nWhat to do next:\n\n'
  [[ $CALLER -ef $KIT ]] || printf '  cd %s\n' "$(quote "$KIT")"
  list_pythons
  [[ ${PYTHONS[0]%/*} -ef $VENV/bin ]] || printf '  source .venv/bin/activate%s\n' "$fish"
  cat <<END
  # see the results: open logs/latest/report.html, or
  tail -n 3 logs/latest/metrics.jsonl

  # continue this training; or start from step 0
  $(quote "$LAUNCH" "$CONFIG" "$NPROC" -- "${EFFECTIVE[@]}")
  scripts/quickstart.sh --fresh

  # check this machine, and measure communication between processes
  scripts/doctor.sh
  scripts/test_distributed.sh $NPROC

  # your own script, unchanged
  scripts/run.sh -n $NPROC YOURS.py
END
}


main() {
  CALLER=$PWD
  parse_options "$@"
  ((${#POSITIONAL[@]} == 0)) ||
    die_usage "'${POSITIONAL[0]}': unknown argument; settings go after --, such as -- train.steps=100"
  cd -- "$KIT"
  ensure_venv "$PYTHON_OPTION" requirements.lock
  choose_settings
  train
  [[ $DRY_RUN == 1 ]] || print_next_steps
}


main "$@"
