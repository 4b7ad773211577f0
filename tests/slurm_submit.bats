#!/usr/bin/env bats
#
# scripts/slurm/submit.sh on SLURM: it submits a job, follows it, and exits with the exit code of the job. Ctrl-C leaves
# the job running. What SLURM would refuse, submit.sh refuses.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
load lab/nodes.bash
load lab/jobs.bash


setup_file() {
  start_lab 2 --slurm --gpus 2
}


setup() {
  SUBMIT=$KIT/scripts/slurm/submit.sh
  enter_workdir
  JOBS=()
}


# shellcheck disable=SC2034 # cancel_jobs reads JOBS
teardown() {
  mapfile -t JOBS < <(squeue --noheader --format=%i)
  cancel_jobs
}


@test "muster run --slurm submits a job, follows it, and passes options of sbatch on" {
  write_position_script 0
  run -0 --separate-stderr "$KIT/scripts/muster" run --slurm 2 -n 2 --time 5 --sbatch --comment=mine "my script.py" \
    --time x
  grep -qx "rank 0 0 2 4 $N1 --time x" <<<"$output"
  [[ "$stderr" == *"muster run: job "*": COMPLETED"* ]] || { echo "$stderr" && false; }
  job=$(scontrol show job "$(sed -n 's/^job: //p' <<<"$output")")
  [[ "$job" == *"TimeLimit=00:05:00"*"Comment=mine"* ]]
}


@test "inside another job, submit.sh calls sbatch with the same options as on a login node" {
  run -0 srun --quiet --ntasks 1 --gres gpu:1 "$SUBMIT" --dry-run --notify 'cat >note' --script "$KIT/train.py" - 2 2
  [[ "$output" == "sbatch --parsable --nodes=2 --ntasks-per-node=2 --gres=gpu:2 --cpus-per-task=4 "* ]]
  [[ "$output" != *note* ]]
}


as_command() { # <argument...>: print the command as submit.sh prints it
  python3 -c 'import shlex, sys; print(shlex.join(sys.argv[1:]))' "$@"
}


# Write a script in which each rank prints its position, node and arguments. In the first run of the script, rank 0
# exits with this code; in later runs, with 0.
write_position_script() { # <exit code>
  echo "$1" >code
  cat >"my script.py" <<'END'
import os, socket, sys
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
print("rank", *(os.environ[name] for name in names), socket.gethostname(), *sys.argv[1:], flush=True)
if os.environ["RANK"] == "0":
    code = int(open("code").read())
    open("code", "w").write("0")
    sys.exit(code)
END
}


# Set JOB to a job that runs until it is stopped, and that submit.sh follows.
follow_endless_job() {
  write_endless_plain_script
  start out "$SUBMIT" --follow --script "my script.py" - 1 1
  wait_for_line out "at work"
  JOB=$(sed -n 's/^job: //p' out)
}


# bats test_tags=quick
@test "a job gets GPUs and cores of its nodes; --follow prints its states and output, and exits with its code" {
  write_position_script 9
  run -9 --separate-stderr "$SUBMIT" --follow --time 10 --comment='a b' --notify 'cat >note.$$' \
    --script "my script.py" - 2 2 -- 'x  y' --lr 3
  JOB=$(sed -n 's/^job: //p' <<<"$output")
  [[ "$output" == *$'\noutput: logs/slurm-'"$JOB.out logs/slurm-$JOB.err"$'\n'"status: $(as_command "$KIT/scripts/status.sh" "$JOB")"$'\n'* ]]
  [[ "$output" == *"rank 0 0 2 4 $N1 x  y --lr 3" ]]
  [[ "$stderr" == *"verdict: failed: rank 0 on $N1 exited with code 9"*"submit.sh: job $JOB: FAILED" ]] ||
    { echo "$stderr" && false; }
  job=$(scontrol show job "$JOB")
  [[ "$job" == *" NumCPUs=16 NumTasks=4 CPUs/Task=4 "*"TresPerNode=gres:gpu:2"* ]] || { echo "$job" && false; }
  [[ "$job" == *"TimeLimit=00:10:00"*"Comment=a b"* && "$job" != *note* ]]
  grep -qF '"exit_code": 9' note.*
}


@test "--follow prints why a job waits, and then its output until the job ends" {
  write_position_script 0
  start out "$SUBMIT" --hold --follow --script "my script.py" --log-dir "my logs" - 1 1
  wait_for_line out "PENDING (JobHeldUser)"
  JOB=$(sed -n 's/^job: //p' out)
  scontrol release "$JOB"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ] || { cat out && false; }
  grep -qF "rank 0 0 1 1 $N1" out
  grep -qF "status: $(as_command "$KIT/scripts/status.sh" --log-dir 'my logs' "$JOB")" out
  run -0 "$KIT/scripts/status.sh" --log-dir 'my logs' "$JOB"
}


@test "Ctrl-C leaves the job running, and prints how to stop it" {
  follow_endless_job
  wait_for_line out "submit.sh: job $JOB: RUNNING"
  kill -INT -- "-$LAUNCHER"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 130 ]
  [ "$(tail -n 1 out)" = "submit.sh: job $JOB continues; to stop it: $(as_command "$KIT/scripts/stop.sh" "$JOB")" ]
  [ "$(squeue --noheader --format=%T --job "$JOB")" = RUNNING ]
}


@test "submit.sh follows a requeued job to its end, and exits with 143 if the job is cancelled" {
  follow_endless_job
  scontrol requeue "$JOB"
  wait_for_line out "PENDING (BeginTime)"
  timeout 120 sh -c 'until [ "$(grep -c "at work" out)" -eq 2 ]; do sleep 0.2; done'
  scancel "$JOB"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 143 ] || { cat out && false; }
  grep -qF "job $JOB: CANCELLED" out
}


@test "--template prints a job script of at most 30 lines that starts all ranks, and requeues itself after code 75" {
  write_position_script 75
  "$SUBMIT" --template --comment "it's #1" --script "my script.py" - 2 2 -- "it's" >job.sh
  [ "$(wc -l <job.sh)" -le 30 ]
  [ -z "$(squeue --noheader)" ]
  mkdir logs
  JOB=$(sbatch --parsable job.sh)
  scontrol show job "$JOB" | grep -qF "Comment=it's #1"
  timeout 120 sh -c 'until [ "$(grep -c "^rank 0 " "logs/slurm-$0.out")" = 2 ]; do sleep 0.2; done' "$JOB"
  wait_for_job_exit "$JOB"
  [ "$status" -eq 0 ]
  [ "$(tail -n 4 "logs/slurm-$JOB.out" | sort)" = "rank 0 0 2 4 $N1 it's
rank 1 1 2 4 $N1 it's
rank 2 0 2 4 $N2 it's
rank 3 1 2 4 $N2 it's" ]
}


refuses() { # <text of the message> <argument...>
  run -2 --separate-stderr "$SUBMIT" "${@:2}"
  [[ "$stderr" == *"$1"* ]] || { echo "$stderr" && return 1; }
  [ -z "$output" ]
  [ -z "$(squeue --noheader)" ]
}


@test "--sbatch passes any option of sbatch on: an array of jobs with output files of their own" {
  write_position_script 0
  run -0 "$SUBMIT" --sbatch --array=0-1 --sbatch="--output=own %a.out" --script "my script.py" - 1 1
  [[ "$output" == "job: "*$'\n'"options: --array=0-1 '--output=own %a.out'"$'\n'"status: "* ]]
  wait_for_line "own 0.out" "rank 0 0 1 1 "
  wait_for_line "own 1.out" "rank 0 0 1 1 "
  refuses "--array: this program sets it, or relies on its default; to pass it on: --sbatch OPTION" \
    --array 0-1 - 1 1
  refuses "--follow: cannot follow a job with --array=0-1; leave one of them out" --follow --sbatch --array=0-1 - 1 1
  refuses "--sbatch: expected an option, such as --array=0-3, got 'array'" --sbatch array - 1 1
}


@test "what SLURM or the batch script would refuse is refused" {
  refuses "submit.sh: NPROC 3, NNODES 2: not among the nodes that sinfo lists (lab*|2|8|gpu:2 " - 3 2
  refuses "not among the nodes that sinfo lists (none); request fewer, or another partition" --partition nope - 1 1
  refuses "Requested node configuration is not available"$'\n'"submit.sh: refused by SLURM, see its message above; sinfo" \
    --mem 100G - 1 1
  refuses "submit.sh: CONFIG 'none.yaml': no such file" none.yaml 1 1
  refuses "submit.sh: CONFIG 'train.py': not a settings file; to run this script, give --script train.py" train.py 1 1
  refuses "train.batch_size=7 is not divisible by 2 ranks" "$KIT/config/quickstart.yaml" 1 2 -- train.batch_size=7
  refuses "--nodes: unknown option; give NNODES without an option" --nodes 2 - 1 1
  refuses "--scrpt: unknown option" --scrpt x - 1 1
  echo 'no configuration' >slurm.conf
  SLURM_CONF=$PWD/slurm.conf refuses $'\n'"submit.sh: sinfo failed, see its message above; call this on a login node" - 1 1
  refuses "submit.sh: --time needs a value, got the option '--dry-run'"$'\n'"Try: submit.sh --help" --time --dry-run - 1 1
  refuses "submit.sh: script 'none.py': no such file" --script none.py - 1 1
  refuses "expected CONFIG, NPROC and NNODES, got: - 1" - 1
  refuses "NNODES: expected a number of nodes, 1 or more, got '$N1'" - 1 "$N1"
}
