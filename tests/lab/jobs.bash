# shellcheck shell=bash
#
# Batch jobs on the laboratory's SLURM, for bats files. Sourced behind nodes.bash, never run.
# shellcheck disable=SC2154 # WORK is nodes.bash's, status bats'

JOBS=()


# Submit one of the kit's batch scripts, in the state of a project that uses the kit. Sets JOB.
submit() { # [sbatch's options...] <its name below scripts/slurm> <word...>
  mkdir -p logs
  local option options=()
  while [[ $1 == -* ]]; do
    options+=("$1") && shift
  done
  option=$KIT/scripts/slurm/$1
  JOB=$(sbatch --parsable --cpus-per-task=1 "${options[@]}" "$option" "${@:2}")
  JOBS+=("$JOB")
}


# The same, with the working script of nodes.bash, until its ranks are at work.
submit_endless_script() { # [sbatch's options...]
  write_endless_script
  SCRIPT="my script.py" submit --ntasks-per-node=1 "$@" slurm_train.sh -
  wait_for_line "logs/slurm-$JOB.out" "at work"
}


cancel_jobs() {
  ((${#JOBS[@]} == 0)) || scancel --quiet "${JOBS[@]}" || true
  wait_for_jobs
}


# shellcheck disable=SC2016 # the inner shell is to expand it
wait_for_jobs() {
  ((${#JOBS[@]} == 0)) || local IFS=,
  timeout 90 bash -c 'while squeue --noheader --jobs "$1" 2>/dev/null | grep -q .; do sleep 0.2; done' bash "${JOBS[*]}"
}


# Wait for its end, and set status to the exit code of the batch script.
# shellcheck disable=SC2016,SC2034 # the inner shell is to expand it; it is for the tests
wait_for_job_exit() { # <number>
  local told ends='COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|PREEMPTED'
  timeout 120 bash -c 'until scontrol show job "$1" | grep -qE "JobState=($2)"; do sleep 0.2; done' bash "$1" "$ends"
  told=$(scontrol show job "$1")
  [[ $told =~ ExitCode=([0-9]+): ]]
  status=${BASH_REMATCH[1]}
}


# What is in the log of a job, and not when the test goes well.
shows() { # <out or err> <text>
  grep -qF -- "$2" "logs/slurm-$JOB.$1" || { tail -n 40 "logs/slurm-$JOB".{out,err} && return 1; }
}


wait_for_requeue() { # <number of restarts>
  wait_for_line "logs/slurm-$JOB.err" "was requeued $1 time"
}
