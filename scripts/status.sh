#!/usr/bin/env bash
#
# Show the state of a run: for each rank of each node its state, resource use and last line of output.
#
# Usage: status.sh [options] [RUN]
#
#   RUN            run directory, its name in DIR, or the number of its SLURM job (default: latest)
#
#   --watch        refresh every 2 seconds until the run ends or Ctrl-C
#   --stacks       also print the Python stack of each rank; with py-spy installed, of all its threads
#   --json         print one JSON object
#   --log-dir DIR  directory with the run directories (default: logs)
#   --python PATH  default: the active venv or conda environment, else ./.venv, Muster's .venv, python3
#   --help         show this help
#
# It works from any terminal, also on another machine that shares the run directory, and changes nothing.
# A run without progress is shown as "looks hung", with the reasons. After a minute or two without output
# it reads the stacks of the ranks, to find the rank that the others wait for.
#
# Exit codes: 0 the run is active or has succeeded; 1 it failed, looks hung, or left processes running;
# 2 wrong call; 69 no fault is known, but a node could not be queried; 130 Ctrl-C.
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
source "$KIT/scripts/lib/options.bash"
source "$KIT/scripts/lib/nodes.bash"
source "$KIT/scripts/lib/ssh.bash"
source "$KIT/scripts/lib/query.bash"

REFRESH_INTERVAL=2 # seconds
SAMPLE_SECONDS=1   # of CPU use
TABLE_OPTIONS=()


# If the run has had no recent output, query it again with stacks: they show the rank that others wait for.
show_status() {
  local status=0
  if ((STACKS)); then
    query_status --stacks || status=$?
  else
    query_status --first || status=$?
    [[ $(cat -- "$QUERY_DIR/state" 2>/dev/null) != needs-stacks ]] || { status=0 && query_status '' || status=$?; }
  fi
  return "$status"
}


# Check the launcher before the nodes: if it exited in between, running processes would be shown as remaining ones.
query_status() { # <--first, --stacks, or nothing: read the stacks without showing them>
  local options=(--seconds "$SAMPLE_SECONDS")
  [[ $1 == --first ]] || options+=(--stacks)
  [[ $LAUNCHER_STATE != running ]] || launcher_is_running || LAUNCHER_STATE=exited
  [[ ! $JOB ]] || update_job_state
  run_on_nodes "$QUERY_DIR" query_node "${options[@]}"
  kit_python runs.status "${TABLE_OPTIONS[@]}" ${1:+"$1"} --launcher "$LAUNCHER_STATE" --job-state "$JOB_STATE" \
    --state "$QUERY_DIR/state" "$RUN" "$QUERY_DIR"
}


job_without_run() { # <number>
  log "job $1 has not started a run; its state is ${JOB_STATE% *} (${JOB_STATE##* })"
  exit
}


# Refresh the table; a terminal shows it on its alternate screen.
watch_run() {
  local status
  REPLY_TIMEOUT=5 QUIET=1
  if [[ -t 1 ]]; then
    TABLE_OPTIONS=(--in-place)
    printf '\e[?1049h\e[2J'
    trap leave_screen EXIT
  fi
  while true; do
    show_status && status=0 || status=$?
    (trap '' INT && exec cp -rT -- "$QUERY_DIR" "$QUERY_DIR.last")
    [[ $(<"$QUERY_DIR/state") != ended ]] || break
    read -r -t $((REFRESH_INTERVAL - SAMPLE_SECONDS)) <> <(:) || true # sleep without a child process
  done
  exit "$status"
}


# Print the last complete table again on the normal screen.
leave_screen() {
  local replies=$QUERY_DIR.last
  [[ -e $replies ]] || replies=$QUERY_DIR # of the first query
  printf '\e[?1049l'
  [[ ! -e $replies/state ]] ||
    kit_python runs.status --launcher "$LAUNCHER_STATE" --job-state "$JOB_STATE" "$RUN" "$replies" || true
}


main() {
  parse_options "$@"
  ((!WATCH || !JSON)) || die_usage "--watch and --json cannot be combined"
  ((!JSON)) || TABLE_OPTIONS=(--json)
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
