#!/usr/bin/env bash
#
# Stop one run and no other, and prove that nothing of it is left on any of its nodes.
#
# Usage: stop.sh [options] RUN
#
#   RUN            run directory, its name below logs, or the number of its SLURM job; latest is the newest
#
#   --now          end the processes at once: no time to write a checkpoint
#   --log-dir DIR  where a name is looked for (default: logs)
#   --python PATH  default: the active venv or conda environment, .venv here, the kit's .venv, python3
#   --quiet        only the proof
#   --help         show this
#
# Its launcher is asked to stop, as by kill: the ranks get the time to write a checkpoint that the
# launcher gives them (MUSTER_GRACE). Where the launcher is gone, or does not end, the run's processes
# are ended on each node. Whatever the case, every node is then asked what is left of this run. A run
# that has ended already is only asked about.
#
# Of a batch job, the batch script is asked; a job that waits is cancelled. It is not requeued.
#
# Exit codes: 0 nothing is left; 1 something is; 2 wrong call; 69 a node could not be asked.
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

SUMMARY=''      # that nothing is left, in a sentence
CHECK_TIMEOUT=15 # seconds in which a node must say what is left
END_TIMEOUT=15   # seconds that a launcher gets beside the grace: to end its nodes, to judge, to write its report
REPORT=5      # seconds between two lines that name what is waited for


# Two of us must not ask twice: for the launcher that means to end all at once.
lock_run() {
  exec {LOCK}<>"$RUN/run.json"
  if ! flock -n "$LOCK"; then
    log "another $PROGRAM is stopping $RUN: waiting for it"
    flock "$LOCK"
  fi
}


# ---------------------------------------------------------------- the launcher

# On a machine that shares the run directory: there it can be asked, and reaches its nodes as it did. Returns when that
# fails.
stop_from_launcher_host() {
  local status=0 words=("$KIT/scripts/stop.sh" --python "$RUN_PYTHON")
  ((!NOW)) || words+=(--now)
  [[ ${QUIET:-0} == 0 ]] || words+=(--quiet)
  log "$RUN: its launcher is on $LAUNCHER_HOST: stopping it from there"
  ssh_client -- "$LAUNCHER_HOST" "$(quote_for_any_shell "exec $(quote "${words[@]}" "$RUN_MARK")")" </dev/null || status=$?
  case $status in
    0 | 1 | "$EXIT_UNFIT") exit "$status" ;;
  esac
  warn "$LAUNCHER_HOST: cannot be asked (exit code $status); going to the nodes without the launcher"
}


stop_launcher() {
  launcher_is_running || return 0
  log "$RUN: asking its launcher, process $LAUNCHER_PID, to stop; $(describe_grace)"
  kill -TERM "$LAUNCHER_PID" 2>/dev/null || true
  kill -CONT "$LAUNCHER_PID" 2>/dev/null || true # one that is stopped would not hear it
  ((!NOW)) || sweep_nodes 0
  wait_for_launcher $((RUN_GRACE + END_TIMEOUT)) || kill_launcher
}


describe_grace() {
  ((NOW)) && echo "its processes are ended at once" || echo "up to $RUN_GRACE s to write a checkpoint"
}


wait_for_launcher() { # <seconds>
  await "$1" 0.1 describe_launcher launcher_ended
}


launcher_ended() {
  ! launcher_is_running
}


describe_launcher() {
  echo "process $LAUNCHER_PID, the launcher, to end"
}


# Until the condition holds; fails when the time is up.
await() { # <seconds> <seconds between two looks> <function that prints what is waited for> <function: the condition>
  local begun=$SECONDS reported=0 passed
  until "$4"; do
    passed=$((SECONDS - begun))
    ((passed < $1)) || return 1
    if ((passed >= reported + REPORT)); then
      reported=$passed
      log "waiting for $("$3"): $passed s, at most $1 s"
    fi
    sleep "$2"
  done
}


kill_launcher() {
  warn "process $LAUNCHER_PID, the launcher, does not end: ending its nodes without it"
  sweep_nodes 0
  wait_for_launcher 5 || kill -KILL "$LAUNCHER_PID"
}


# ---------------------------------------------------------------- a job of SLURM

job_without_run() { # <number>
  JOB=$1 RUN_GRACE=30 # not known yet
  stop_job
  exit
}


# Where the batch script does not end its job by itself, SLURM does.
stop_job() {
  if job_runs && ((!NOW)); then
    log "asking job $JOB to stop; $(describe_grace)"
    scancel --batch --signal=INT "$JOB"
    wait_for_job $((RUN_GRACE + END_TIMEOUT)) || log "job $JOB does not end: cancelling it"
  fi
  [[ ! $JOB_STATE ]] || scancel "$JOB"
  wait_for_job 120 || die "job $JOB is still ${JOB_STATE% *}: SLURM cannot end it; see scontrol show job $JOB"
  printf 'job %s has ended, and SLURM with it what it had on its nodes\n' "$JOB"
}


wait_for_job() { # <seconds>
  await "$1" 0.5 describe_job job_ended
}


job_ended() {
  JOB_STATE=$(state_of_job "$JOB")
  [[ ! $JOB_STATE ]]
}


describe_job() {
  echo "job $JOB, which is ${JOB_STATE% *}, to end"
}


# ---------------------------------------------------------------- the nodes

# End what is left, and ask again.
stop_nodes() {
  local code=0
  check_remaining || code=$?
  if ((code == 1)); then
    log "$RUN: processes are left on its nodes; $(describe_grace)"
    sweep_nodes $((NOW ? 0 : RUN_GRACE))
    code=0
    check_remaining || code=$?
  fi
  printf '%s\n' "$SUMMARY"
  return "$code"
}


check_remaining() {
  REPLY_TIMEOUT=$CHECK_TIMEOUT
  run_on_nodes "$VISIT_DIR" visit_status
  SUMMARY=$(kit_python runs.visit "$RUN" "$VISIT_DIR")
}


sweep_nodes() { # <seconds between the request to stop and the end>
  REPLY_TIMEOUT=$(($1 + CHECK_TIMEOUT))
  run_on_nodes "$VISIT_DIR" sweep_node "$1"
}


sweep_node() { # <node> <seconds>
  visit_node "$1" "$RUN_PYTHON" -I -S "$KIT/scripts/lib/supervisor.py" sweep --dir "$RUN_MARK" --name "$1" --grace "$2"
}


main() {
  parse_options "$@"
  parse_one_argument RUN ''
  [[ $ARGUMENT ]] || die_usage "RUN is missing: which run? For the newest: $PROGRAM latest"
  pick_python "$PYTHON_OPTION"
  open_connections
  find_run "$ARGUMENT"
  if [[ $JOB && ($LAUNCHER_STATE == job || ! $JOB_STATE || $JOB_STATE == PENDING*) ]]; then
    stop_job
    return
  fi
  [[ $LAUNCHER_STATE != elsewhere ]] || stop_from_launcher_host
  lock_run
  if [[ $LAUNCHER_STATE == gone ]]; then
    log "$RUN: its launcher has ended already"
  fi
  stop_launcher
  stop_nodes
  if [[ $LAUNCHER_STATE == elsewhere ]]; then
    die_with "$EXIT_UNFIT" "$LAUNCHER_HOST: could not be asked whether the launcher, process $LAUNCHER_PID, is still there;" \
      "with --max-restarts it would start the run again"
  fi
}

main "$@"
