#!/usr/bin/env bash
#
# Runs beside a launcher, for its own run: asks the nodes now and then whether the run still makes progress.
#
# Usage: hang_watch.sh [options] RUN
#
#   --python PATH      the interpreter
#   --timeout SECONDS  without progress after which a run hangs
#   --certain          silence alone is no hang; see distributed/runs/hang_decision.py
#
# A run that makes progress is asked about once per timeout. When it hangs, that is in .hang.json of the run directory,
# the line "/hang 0" is printed, and this program exits. It exits, too, when its standard input ends: the launcher holds
# the other end.
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"
# shellcheck source=scripts/lib/options.bash
source "$KIT/scripts/lib/options.bash"
# shellcheck source=scripts/lib/nodes.bash
source "$KIT/scripts/lib/nodes.bash"
# shellcheck source=scripts/lib/ssh.bash
source "$KIT/scripts/lib/ssh.bash"
# shellcheck source=scripts/lib/visit.bash
source "$KIT/scripts/lib/visit.bash"

LATE=5       # seconds that a pause may take longer; after more, the machine or this program was stopped meanwhile
WATCHED=0    # since then no rank can have been silent: the start, or the end of such a stop


# With all of this program's process group, also in the middle of a question. Not by a trap: a signal that comes just
# before a pause would be handled after it.
end_with_launcher() {
  {
    read -r _ || true
    kill -TERM -- "-$$"
    kill -KILL "$$" # where TERM was ignored when the launcher started
  } <&0 &
}


pause() { # <seconds>
  local before=$SECONDS
  read -r -t "$1" <> <(:) || true # sleeps without a child: nothing writes there
  ((SECONDS - before <= $1 + LATE)) || WATCHED=$SECONDS
}


# Print what is to be done next: "hung", "stacks" or "wait SECONDS".
decide() { # [--stacks]
  [[ ! $JOB ]] || update_job_state
  local certain=() sample=0
  ((!CERTAIN)) || certain=(--certain)
  [[ ! ${1-} ]] || sample=$((CERTAIN ? 5 : 1)) # seconds for which the use of the CPU is measured before a run is said to hang
  run_on_nodes "$VISIT_DIR" visit_status --seconds "$sample" "$@"
  kit_python runs.hang_decision --timeout "$TIMEOUT" --watched $((SECONDS - WATCHED)) "${certain[@]}" "$@" "$RUN" "$VISIT_DIR"
}


main() {
  local decision
  parse_options "$@"
  QUIET=1
  parse_one_argument RUN ''
  [[ $TIMEOUT && $ARGUMENT ]] || die_usage "--timeout and RUN are missing"
  end_with_launcher
  pause "$TIMEOUT"
  pick_python "$PYTHON_OPTION"
  open_connections
  find_run "$ARGUMENT"
  while true; do
    REPLY_TIMEOUT=15
    decision=$(decide)
    if [[ $decision == stacks ]]; then
      REPLY_TIMEOUT=60
      decision=$(decide --stacks)
    fi
    [[ $decision != hung ]] || break
    pause "${decision#wait }"
  done
  echo "/hang 0"
}

main "$@"
