#!/usr/bin/env bash
#
# How is that run? Each rank on each node: alive or not, what it uses, and what it last said.
#
# Usage: status.sh [options] [RUN]
#
#   RUN            run directory, its name below logs, or the number of its SLURM job (default: latest)
#
#   --watch        again every 2 seconds, in place, until the run has ended or Ctrl-C
#   --stacks       also where each rank is: its Python stack, with py-spy that of every thread
#   --json         print the facts as one JSON object
#   --log-dir DIR  where a name is looked for (default: logs)
#   --python PATH  default: the active venv or conda environment, .venv here, the kit's .venv, python3
#   --help         show this
#
# It may be called from any terminal, also on another machine that shares the run directory, and
# changes nothing. "looks hung" is said, with the facts, when nothing has moved; a run that has been
# silent for a minute or two is asked for its stacks, which show who waits for whom.
#
# Exit codes: 0 the run goes on, or has ended well; 1 it failed, looks hung, or has left processes
# behind; 2 wrong call; 69 nothing is known to be wrong, but a node could not be asked; 130 Ctrl-C.
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
# shellcheck source=scripts/lib/options.bash
source "$KIT/scripts/lib/options.bash"
# shellcheck source=scripts/lib/nodes.bash
source "$KIT/scripts/lib/nodes.bash"
# shellcheck source=scripts/lib/ssh.bash
source "$KIT/scripts/lib/ssh.bash"
# shellcheck source=scripts/lib/visit.bash
source "$KIT/scripts/lib/visit.bash"

EVERY=2    # seconds between two looks at the run
SAMPLE=1   # seconds for which the use of the CPU is measured
HOW=()     # options for the table


# Once more with the stacks where the run has been quiet for long: they show who waits for whom.
show_status() {
  local status=0
  if ((STACKS)); then
    query_status --stacks || status=$?
  else
    query_status --first || status=$?
    [[ $(cat -- "$VISIT_DIR/state" 2>/dev/null) != needs-stacks ]] || { status=0 && query_status '' || status=$?; }
  fi
  return "$status"
}


# The launcher first: what the nodes saw before it ended would look like left behind.
query_status() { # <--first, --stacks, or nothing: ask for the stacks and do not show them>
  local words=(--seconds "$SAMPLE")
  [[ $1 == --first ]] || words+=(--stacks)
  [[ $LAUNCHER_STATE != here ]] || launcher_is_running || LAUNCHER_STATE=gone
  [[ ! $JOB ]] || update_job_state
  run_on_nodes "$VISIT_DIR" visit_status "${words[@]}"
  kit_python runs.status "${HOW[@]}" ${1:+"$1"} --launcher "$LAUNCHER_STATE" --job-state "$JOB_STATE" \
    --state "$VISIT_DIR/state" "$RUN" "$VISIT_DIR"
}


job_without_run() { # <number>
  log "job $1 has no run yet, in the queue it is ${JOB_STATE% *} (${JOB_STATE##* }): ask again when it runs"
  exit
}


# On a screen of its own.
watch_run() {
  local status
  REPLY_TIMEOUT=5 QUIET=1
  if [[ -t 1 ]]; then
    HOW=(--in-place)
    printf '\e[?1049h\e[2J'
    trap leave_screen EXIT
  fi
  while true; do
    show_status && status=0 || status=$?
    (trap '' INT && exec cp -rT -- "$VISIT_DIR" "$VISIT_DIR.last")
    [[ $(<"$VISIT_DIR/state") != ended ]] || break
    read -r -t $((EVERY - SAMPLE)) <> <(:) || true # sleeps without a child: nothing writes there
  done
  exit "$status"
}


# The last complete table stays below the command, and the prompt comes below that.
leave_screen() {
  local replies=$VISIT_DIR.last
  [[ -e $replies ]] || replies=$VISIT_DIR # of the first look
  printf '\e[?1049l'
  [[ ! -e $replies/state ]] ||
    kit_python runs.status --launcher "$LAUNCHER_STATE" --job-state "$JOB_STATE" "$RUN" "$replies" || true
}


main() {
  parse_options "$@"
  ((!WATCH || !JSON)) || die_usage "--watch is for people, and --json for programs: give one of the two"
  ((!JSON)) || HOW=(--json)
  parse_one_argument RUN latest
  pick_python "$PYTHON_OPTION"
  open_connections
  find_run "$ARGUMENT"
  REPLY_TIMEOUT=$((STACKS ? 60 : 20))
  if ((WATCH)); then
    watch_run
  else
    show_status
  fi
}

main "$@"
