#!/usr/bin/env bash
#
# Stop a run, and check that none of its processes remains on any node.
#
# Usage: stop.sh [options] RUN
#
#   RUN            run directory, its name in DIR, or the number of its SLURM job; latest: the newest run
#
#   --now          kill the processes immediately, without time to write a checkpoint
#   --log-dir DIR  directory with the run directories (default: logs)
#   --python PATH  default: the active venv or conda environment, else ./.venv, Muster's .venv, python3
#   --quiet        print only the result
#   --help         show this help
#
# The launcher receives SIGTERM: ranks have the launcher's MUSTER_GRACE seconds to write a checkpoint. If the
# launcher has exited, or does not exit in time, the processes are ended on each node. Then every node is
# checked for processes of this run. A run that has already ended is only checked.
#
# For a batch job, the batch script is signalled; a pending job is cancelled. SLURM then ends all processes. The
# job is not requeued.
#
# Exit codes: 0 no process remains; 1 a process remains; 2 wrong call; 69 a node could not be checked.
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
source "$KIT/scripts/lib/options.bash"
source "$KIT/scripts/lib/nodes.bash"
source "$KIT/scripts/lib/ssh.bash"
source "$KIT/scripts/lib/query.bash"

SUMMARY=''          # one sentence: which processes remain, if any
CHECK_TIMEOUT=15    # seconds for a node to report the remaining processes
END_TIMEOUT=15      # seconds after the grace period for the launcher to stop its nodes and write the report
PROGRESS_INTERVAL=5 # seconds between two messages while waiting
AWAITED=''          # what await waits for, set by its condition


# A second SIGTERM makes the launcher kill its ranks, so only one stop.sh may send it.
lock_run() {
  exec {LOCK}<>"$RUN/run.json"
  if ! flock -n "$LOCK"; then
    log "another $PROGRAM is stopping $RUN: waiting for it"
    flock "$LOCK"
  fi
}


# ---------------------------------------------------------------- the launcher

# Run stop.sh on the launcher's host, which shares the run directory. Returns only when that fails.
stop_from_launcher_host() {
  local status=0 command=("$KIT/scripts/stop.sh" --python "$RUN_PYTHON")
  ((!NOW)) || command+=(--now)
  [[ $QUIET == 0 ]] || command+=(--quiet)
  log "$RUN: its launcher is on $LAUNCHER_HOST; running stop.sh there"
  ssh_client "$LAUNCHER_HOST" \
    "$(quote_for_any_shell "$STARTED; exec $(quote "${command[@]}" "$RUN_DIR_ON_NODES")")" </dev/null || status=$?
  case $status in
    0 | 1 | "$EXIT_UNFIT") exit "$status" ;;
  esac
  warn "$LAUNCHER_HOST: stop.sh cannot be run there (exit code $status); stopping the nodes without the launcher"
}


stop_launcher() {
  launcher_is_running || return 0
  log "$RUN: stopping its launcher, process $LAUNCHER_PID; $(describe_grace)"
  kill -TERM "$LAUNCHER_PID" 2>/dev/null || true
  kill -CONT "$LAUNCHER_PID" 2>/dev/null || true # a suspended process handles no signal
  ((!NOW)) || sweep_nodes 0
  await $((RUN_GRACE + END_TIMEOUT)) 0.1 launcher_ended && return
  warn "the launcher (process $LAUNCHER_PID) does not exit; stopping its nodes without it"
  sweep_nodes 0
  await 5 0.1 launcher_ended || kill -KILL "$LAUNCHER_PID"
}


describe_grace() {
  ((NOW)) && echo "killing its processes immediately" || echo "up to $RUN_GRACE s to write a checkpoint"
}


launcher_ended() {
  AWAITED="the launcher (process $LAUNCHER_PID) to exit"
  ! launcher_is_running
}


# Wait until the condition holds; fail on timeout.
await() { # <timeout in seconds> <seconds between checks> <function: condition>
  local start=$SECONDS reported=0 passed
  until "$3"; do
    passed=$((SECONDS - start))
    ((passed < $1)) || return 1
    if ((passed >= reported + PROGRESS_INTERVAL)); then
      reported=$passed
      log "waiting for $AWAITED: $passed s, at most $1 s"
    fi
    sleep "$2"
  done
}


# ---------------------------------------------------------------- a SLURM job

job_without_run() { # <number>
  JOB=$1 RUN_GRACE=30 # the job's own value is unknown without a run directory
  stop_job
  exit
}


# Signal the batch script; cancel the job if it does not end in time.
stop_job() {
  if job_runs && ((!NOW)); then
    log "stopping job $JOB; $(describe_grace)"
    scancel --batch --signal=INT "$JOB"
    await $((RUN_GRACE + END_TIMEOUT)) 0.5 job_ended || log "job $JOB does not end; cancelling it"
  fi
  [[ ! $JOB_STATE ]] || scancel "$JOB"
  await 120 0.5 job_ended || die "job $JOB: still ${JOB_STATE% *} after scancel; see scontrol show job $JOB"
  printf 'job %s has ended; SLURM has ended its processes on all nodes\n' "$JOB"
}


job_ended() {
  JOB_STATE=$(state_of_job "$JOB")
  AWAITED="job $JOB (${JOB_STATE% *}) to end"
  [[ ! $JOB_STATE ]]
}


# ---------------------------------------------------------------- the nodes

# End the remaining processes and check again.
stop_nodes() {
  local code
  check_remaining && code=0 || code=$?
  if ((code == 1)); then
    log "$RUN: processes remain on its nodes; $(describe_grace)"
    sweep_nodes $((NOW ? 0 : RUN_GRACE))
    check_remaining && code=0 || code=$?
  fi
  printf '%s\n' "$SUMMARY"
  return "$code"
}


check_remaining() {
  REPLY_TIMEOUT=$CHECK_TIMEOUT
  run_on_nodes "$QUERY_DIR" query_node
  SUMMARY=$(kit_python runs.query "$RUN" "$QUERY_DIR")
}


sweep_nodes() { # <seconds between stop request and SIGKILL>
  REPLY_TIMEOUT=$(($1 + CHECK_TIMEOUT))
  run_on_nodes "$QUERY_DIR" sweep_node "$1"
}


sweep_node() { # <node> <seconds>
  command_on_node "$1" "$RUN_PYTHON" -I -S "$KIT/scripts/lib/module.py" launch.supervisor sweep \
    --dir "$RUN_DIR_ON_NODES" --name "$1" --grace "$2"
}


main() {
  parse_options "$@"
  parse_one_argument RUN ''
  [[ $ARGUMENT ]] || die_usage "RUN: missing; for the newest run use: $PROGRAM latest"
  pick_python "$PYTHON_OPTION"
  open_connections
  find_run "$ARGUMENT"
  if [[ $JOB && ($LAUNCHER_STATE == job || ! $JOB_STATE || $JOB_STATE == PENDING*) ]]; then
    stop_job
    return
  fi
  [[ $LAUNCHER_STATE != remote ]] || stop_from_launcher_host
  lock_run
  if [[ $LAUNCHER_STATE == exited ]]; then
    log "$RUN: its launcher has already exited"
  fi
  stop_launcher
  stop_nodes
  if [[ $LAUNCHER_STATE == remote ]]; then
    die_with "$EXIT_UNFIT" "$LAUNCHER_HOST: the launcher (process $LAUNCHER_PID) could not be stopped;" \
      "if it still runs there, it may restart the run (--max-restarts)"
  fi
}

main "$@"
