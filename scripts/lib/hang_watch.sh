#!/usr/bin/env bash
#
# Query the nodes of a run periodically until the run hangs. A launcher runs it in the background.
#
# Usage: hang_watch.sh [options] RUN
#
#   --python PATH      the interpreter
#   --timeout SECONDS  time without progress after which a run hangs
#   --certain          require proof that no rank can make progress; see distributed/runs/hang_decision.py
#
# A run that makes progress is queried once per timeout. When it hangs, this program writes .hang.json in the run
# directory, prints "/hang_watch 0" (an event for watch.bash) and exits. It also exits at the end of its standard input,
# which the launcher holds open.
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"
source "$KIT/scripts/lib/options.bash"
source "$KIT/scripts/lib/nodes.bash"
source "$KIT/scripts/lib/ssh.bash"
source "$KIT/scripts/lib/query.bash"

MAX_DELAY=5     # seconds; when a pause takes longer, the machine or this program was suspended
WATCHED_SINCE=0 # start of the watch, or end of the last suspension: time before that is not counted


# Kill the process group when the launcher exits, also during a query. A trap would run only after a pause.
end_with_launcher() {
  {
    read -r _ || true
    kill -TERM -- "-$$"
    kill -KILL "$$" # if the launcher was started with SIGTERM ignored
  } <&0 &
}


pause() { # <seconds>
  local before=$SECONDS
  read -r -t "$1" <> <(:) || true # sleep without a child process
  ((SECONDS - before <= $1 + MAX_DELAY)) || WATCHED_SINCE=$SECONDS
}


# Print the next step: "hung", "stacks" or "wait SECONDS".
decide() { # [--stacks]
  [[ ! $JOB ]] || update_job_state
  local certain=() sample=0
  ((!CERTAIN)) || certain=(--certain)
  [[ ! ${1-} ]] || sample=$((CERTAIN ? 5 : 1)) # seconds of CPU use
  run_on_nodes "$QUERY_DIR" query_node --seconds "$sample" "$@"
  kit_python runs.hang_decision --timeout "$TIMEOUT" --watched $((SECONDS - WATCHED_SINCE)) "${certain[@]}" "$@" \
    "$RUN" "$QUERY_DIR"
}


main() {
  local decision
  parse_options "$@"
  QUIET=1
  parse_one_argument RUN ''
  [[ $TIMEOUT && $ARGUMENT ]] || die_usage "--timeout and RUN are required"
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
  echo "/hang_watch 0"
}

main "$@"
