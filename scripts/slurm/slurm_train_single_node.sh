#!/usr/bin/env bash
#
# Train on one node of a SLURM cluster, as a batch job.
#
# Usage: sbatch [sbatch's options] scripts/slurm/slurm_train_single_node.sh [options] [CONFIG...] [-- ARGUMENT...]
#
#   CONFIG               settings file, reaches the script as --config CONFIG; - passes nothing (default: $CONFIG, else
#                        the kit's config/quickstart.yaml). For an array, one for each element, or one with %a, which
#                        becomes the element's number
#   ARGUMENT...          go to the script untouched, for the kit's trainer: section.key=value; %a as above
#
#   --script PATH        what to run (default: $SCRIPT, else the kit's train.py)
#   -m MODULE            run a module in its place
#   --python PATH        default: the active venv or conda environment, .venv here, the kit's .venv, python3
#   --agent fast|torchrun  with LAUNCHER=torchrun. fast: workers forked from one warm process
#   --master-port PORT   default: that of the environment, else a free one of the first node
#   --env NAME=VALUE     environment of the processes, repeatable
#   --env-file FILE      the same, one NAME=VALUE a line
#   --max-restarts N     after a failure start again in the same job, up to N times (default: 0)
#   --hang-timeout S     end the run with 124 when it has not written a line or a metric for S seconds;
#                        0: never (default: 600 for a run that logs steps, when nothing can end the wait)
#   --log-dir DIR        where the run directory is made (default: logs)
#   --rendezvous-timeout SECONDS  with LAUNCHER=torchrun: how long to wait until the agent has begun (default: 600)
#   --max-requeues N     how often the job may requeue itself when its time is up (default: 100)
#   --dry-run            print what would be submitted and run, and do neither; on a login node too
#   --quiet              no lines of the launcher's own
#   --help               show this
#
# From the environment, where sbatch is called:
#
#   LAUNCHER             srun (default): one task a rank; torchrun: one agent, and PyTorch is imported once
#   MASTER_PORT          where the ranks meet, as --master-port (default: a free port of the first node)
#   CONTAINER            words that run a command in a container, such as "apptainer exec --nv image.sif", or options
#                        of srun, such as "--container-image=nvcr.io#nvidia/pytorch:25.10-py3"
#   SRUN_ARGS            more options of srun
#   MUSTER_KIT           where the kit is, for a copy of this script that lies elsewhere
#
# The lines below are defaults: change them, or give sbatch the same options, which come before. Whatever is
# allocated in the end is used whole: one process for each task.
#
#SBATCH --job-name=train
#SBATCH --nodes=1                       # machines; for more there is slurm_train.sh
#SBATCH --ntasks-per-node=2             # processes: one a GPU
#SBATCH --gres=gpu:2                    # GPUs; none for a cluster without
#SBATCH --cpus-per-task=2               # cores for each process, which also reads and prepares the data
#SBATCH --mem=8G                        # memory; 0 is all of the node's
#SBATCH --time=1-00:00:00               # days-hours:minutes:seconds; when they are over, it goes on in a new turn
##SBATCH --partition=gpu                # which part of the cluster; sinfo shows what there is
##SBATCH --account=project              # who pays, where that is asked
#SBATCH --output=logs/slurm-%j.out      # the directory must be there before; %j is the number of the job
#SBATCH --error=logs/slurm-%j.err
#SBATCH --open-mode=append              # a new turn writes behind the last one
#SBATCH --signal=USR2@120               # seconds before the end that the processes hear of it: write a checkpoint
#SBATCH --requeue                       # after the loss of a node, or for a job that is more urgent

set -euo pipefail
name=slurm_train_single_node.sh
kit=${MUSTER_KIT:-$(readlink -f -- "$0")} kit=${kit%/scripts/slurm/*}
if [[ ! -e $kit/scripts/lib/slurm_job.bash && ${SLURM_JOB_ID-} ]]; then # sbatch runs a copy of this file
  kit=$(scontrol show job "$SLURM_JOB_ID" | sed -nE "s|^ *Command=(.*)/scripts/slurm/$name( .*)?\$|\1|p")
  kit=${kit%%$'\n'*} # of an array, there is one for each element
fi
if [[ ! -e $kit/scripts/lib/slurm_job.bash ]]; then
  echo "$name: cannot find the kit: submit the script that lies in it, or export MUSTER_KIT=<its directory> before" >&2
  exit 2
fi
# shellcheck source=scripts/lib/common.bash
source "$kit/scripts/lib/common.bash"
# shellcheck source=scripts/lib/options.bash
source "$KIT/scripts/lib/options.bash"
# shellcheck source=scripts/lib/node_env.bash
source "$KIT/scripts/lib/node_env.bash"
# shellcheck source=scripts/lib/nodes.bash
source "$KIT/scripts/lib/nodes.bash"
# shellcheck source=scripts/lib/launch.bash
source "$KIT/scripts/lib/launch.bash"
# shellcheck source=scripts/lib/watch.bash
source "$KIT/scripts/lib/watch.bash"
# shellcheck source=scripts/lib/slurm.bash
source "$KIT/scripts/lib/slurm.bash"
# shellcheck source=scripts/lib/slurm_job.bash
source "$KIT/scripts/lib/slurm_job.bash"


main() {
  PROGRAM=$name # SLURM runs a copy that has another
  refuse_misplaced_options "$@"
  parse_options "$@"
  parse_job_arguments
  if [[ ! ${SLURM_JOB_ID-} && ${DRY_RUN:-0} == 1 ]]; then
    print_submission
  else
    in_allocation || die_usage "this is for sbatch: $(quote "${CALL[@]}") (--dry-run shows what that would do)"
    enter_node_env "$@"
    find_earlier_run
    trap 'send_request stop' USR2 # where SLURM sends it to the batch script too
  fi
  slurm_check_call 0
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    slurm_print_step
    return
  fi
  slurm_choose_port
  [[ ! $EARLIER_RUN ]] || archive_attempt "$EARLIER_RUN"
  open_run
  begin_run
  while true; do
    slurm_start_step
    wait_for_nodes
    report_verdict
    should_restart || break
    prepare_restart
  done
  requeue_if_stopped
  exit "$CODE"
}

main "$@"
