#!/usr/bin/env bash
#
# How is that run? Each rank on each node: alive or not, what it uses, and what it last said.
#
# Usage: status.sh [options] [RUN]
#
#   RUN            folder of a run, its name below logs, or the number of its SLURM job (default: latest)
#
#   --watch        again every 2 seconds, in place, until the run has ended or Ctrl-C
#   --stacks       also where each rank is: its Python stack, with py-spy that of every thread
#   --json         print the facts as one JSON object
#   --log-dir DIR  where a name is looked for (default: logs)
#   --python PATH  default: the active venv or conda environment, .venv here, the kit's .venv, python3
#   --help         show this
#
# It may be called from any terminal, also on another machine that shares the folder of the run, and
# changes nothing. "looks hung" is said, with the facts, when nothing has moved; a run that has been
# silent for a minute or two is asked for its stacks, which show who waits for whom.
#
# Exit codes: 0 the run goes on, or has ended well; 1 it failed, looks hung, or has left processes
# behind; 2 wrong call; 69 nothing is known to be wrong, but a node could not be asked; 130 Ctrl-C.
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
# shellcheck source=scripts/lib/ssh.bash
source "$KIT/scripts/lib/ssh.bash"
# shellcheck source=scripts/lib/visit.bash
source "$KIT/scripts/lib/visit.bash"

EVERY=2    # seconds between two looks
LOOK=1     # seconds for which the use of the CPU is measured
WATCH=0 STACKS=0 HOW=() WORD=''


parse_args() { # <word...>
  while (($#)); do
    case $1 in
      --watch) WATCH=1 ;;
      --stacks) STACKS=1 ;;
      --json) HOW=(--json) ;;
      --log-dir | --python) take_common_option "$@"; shift ;;
      --help | -h) usage; exit ;;
      -*) die_usage "$1: unknown option" ;;
      *)
        [[ ! $WORD ]] || die_usage "expected one RUN, got: $(quote "$WORD" "$1")"
        WORD=$1
        ;;
    esac
    shift
  done
  ((!WATCH || ${#HOW[@]} == 0)) || die_usage "--watch is for people, and --json for programs: give one of the two"
}


# Once more with the stacks where the run has been quiet for long: they tell who waits for whom.
look_once() {
  local status=0
  if ((STACKS)); then
    look_with --stacks || status=$?
  else
    look_with --first || status=$?
    [[ $(cat -- "$ANSWERS/state" 2>/dev/null) != needs-stacks ]] || { status=0 && look_with '' || status=$?; }
  fi
  return "$status"
}


# The launcher first: what the nodes saw before it ended would look like left behind.
look_with() { # <--first, --stacks, or nothing: ask for the stacks and do not show them>
  local words=(--seconds "$LOOK")
  [[ $1 == --first ]] || words+=(--stacks)
  [[ $LAUNCHER_IS != here ]] || launcher_lives || LAUNCHER_IS=gone
  [[ ! $JOB ]] || look_for_job
  ask_nodes look_at "${words[@]}"
  kit_python runs.status "${HOW[@]}" ${1:+"$1"} --launcher "$LAUNCHER_IS" --job-state "$JOB_STATE" \
    --state "$ANSWERS/state" "$RUN" "$ANSWERS"
}


job_without_run() { # <number>
  log "job $1 has no run yet, in the queue it is ${JOB_STATE% *} (${JOB_STATE##* }): ask again when it runs"
  exit
}


# On a screen of its own.
watch_run() {
  local status
  ANSWER_WITHIN=5
  if [[ -t 1 ]]; then
    HOW=(--in-place)
    printf '\e[?1049h\e[2J'
    trap leave_screen EXIT
  fi
  while true; do
    look_once && status=0 || status=$?
    (trap '' INT && exec cp -rT -- "$ANSWERS" "$ANSWERS.last")
    [[ $(<"$ANSWERS/state") != ended ]] || break
    read -r -t $((EVERY - LOOK)) <> <(:) || true # sleeps without a child: nobody writes there
  done
  exit "$status"
}


# The last complete look stays below the command, and the prompt comes below that.
leave_screen() {
  local answers=$ANSWERS.last
  [[ -e $answers ]] || answers=$ANSWERS # of the first look
  printf '\e[?1049l'
  [[ ! -e $answers/state ]] ||
    kit_python runs.status --launcher "$LAUNCHER_IS" --job-state "$JOB_STATE" "$RUN" "$answers" || true
}


main() {
  parse_args "$@"
  pick_python "$ASKED_PYTHON"
  open_connections
  find_run "${WORD:-latest}"
  ANSWER_WITHIN=$((STACKS ? 60 : 20))
  if ((WATCH)); then
    watch_run
  else
    look_once
  fi
}

main "$@"
