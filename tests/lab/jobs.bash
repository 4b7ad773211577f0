# shellcheck shell=bash
#
# Batch jobs on the laboratory's SLURM, for bats files. Sourced after nodes.bash, never run.

JOBS=()


# Submit a batch script of scripts/slurm from the working directory. Sets JOB.
submit() { # [option of sbatch...] <file name of the script> <argument...>
  mkdir -p logs
  local options=()
  while [[ $1 == -* ]]; do
    options+=("$1") && shift
  done
  JOB=$(sbatch --parsable --cpus-per-task=1 "${options[@]}" "$KIT/scripts/slurm/$1" "${@:2}")
  JOBS+=("$JOB")
}


# Submit the endless script of nodes.bash without PyTorch, and wait until its ranks are at work.
submit_endless_script() { # [option of sbatch...]
  write_endless_plain_script
  SCRIPT="my script.py" submit --ntasks-per-node=1 "$@" slurm_train.sh -
  wait_for_line "logs/slurm-$JOB.out" "at work"
}


cancel_jobs() {
  ((${#JOBS[@]} == 0)) || scancel --quiet "${JOBS[@]}" || true
  wait_for_jobs
}


# shellcheck disable=SC2016 # the inner shell expands $1
wait_for_jobs() {
  ((${#JOBS[@]} == 0)) || local IFS=,
  timeout 90 bash -c 'while squeue --noheader --jobs "$1" 2>/dev/null | grep -q .; do sleep 0.2; done' bash "${JOBS[*]}"
}


# Wait until a job has ended, and set status to the exit code of its batch script.
# shellcheck disable=SC2016,SC2034 # the inner shell expands $1; the tests read status
wait_for_job_exit() { # <job id>
  local job ends='COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|PREEMPTED'
  timeout 120 bash -c 'until scontrol show job "$1" | grep -qE "JobState=($2)"; do sleep 0.2; done' bash "$1" "$ends"
  job=$(scontrol show job "$1")
  [[ $job =~ ExitCode=([0-9]+): ]]
  status=${BASH_REMATCH[1]}
}


# Check that a log of JOB contains a text; print the logs when it does not.
shows() { # <out or err> <text>
  grep -qF -- "$2" "logs/slurm-$JOB.$1" || { tail -n 40 "logs/slurm-$JOB".{out,err} && return 1; }
}


wait_for_requeue() { # <number of restarts>
  wait_for_line "logs/slurm-$JOB.err" "was requeued $1 time" ||
    { scontrol show job "$JOB" && tail -n 40 "logs/slurm-$JOB".{out,err} && return 1; }
}
