#!/usr/bin/env bash
#
# Watch a run until it hangs, and report when it looks hung. A launcher runs it in the background.
#
# Usage: hang_watch.sh [options] RUN
#
#   --python PATH      the interpreter
#   --timeout SECONDS  time without progress after which a run hangs (default: never)
#   --certain          require proof that no rank can make progress; see distributed/runs/hang_decision.py
#
# A run that looks hung to status.sh is reported in the file .hang_notice of the run directory; when it hangs, this
# program writes .hang.json there and exits. For each file it prints "/hang_watch 0" (an event for watch.bash). It also
# exits at the end of its standard input, which the launcher holds open.
#
# status.sh needs 60 seconds without output, so a run is checked that often: by its files on this machine, then, if they
# show no recent output, by querying its nodes. A run that stays without output is queried after 60, 120, 240 ... s.
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"
source "$KIT/scripts/lib/options.bash"
source "$KIT/scripts/lib/nodes.bash"
source "$KIT/scripts/lib/ssh.bash"
source "$KIT/scripts/lib/query.bash"

NOTICE_TIME=60  # seconds; IDLE_TIMEOUT of distributed/runs/hang_analysis.py
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


# Print the next step: "hung", "wait SECONDS", or "query" and options of query_node.
decide() { # [option of query_node...]
  local options=(--watched $((SECONDS - WATCHED_SINCE)) ${TIMEOUT:+--timeout "$TIMEOUT"})
  ((!CERTAIN)) || options+=(--certain)
  if (($#)); then
    [[ ! $JOB ]] || update_job_state
    REPLY_TIMEOUT=15
    [[ " $* " != *" --stacks "* ]] || REPLY_TIMEOUT=60
    run_on_nodes "$QUERY_DIR" query_node "$@"
  fi
  kit_python runs.hang_decision "${options[@]}" "$@" "$RUN" "$QUERY_DIR"
}


main() {
  local decision query
  parse_options "$@"
  QUIET=1
  parse_one_argument RUN ''
  [[ $ARGUMENT ]] || die_usage "RUN is required"
  end_with_launcher
  pause $((${TIMEOUT:-NOTICE_TIME} < NOTICE_TIME ? TIMEOUT : NOTICE_TIME))
  pick_python "$PYTHON_OPTION"
  open_connections
  find_run "$ARGUMENT"
  while true; do
    decision=$(decide)
    while [[ $decision == query* ]]; do
      read -r -a query <<<"${decision#query}"
      decision=$(decide "${query[@]}")
    done
    [[ $decision != hung ]] || break
    [[ ! -e $RUN/.hang_notice ]] || echo "/hang_watch 0"
    pause "${decision#wait }"
  done
  echo "/hang_watch 0"
}

main "$@"
