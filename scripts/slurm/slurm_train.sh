#!/usr/bin/env bash
#
# Train on several nodes of a SLURM cluster, as a batch job.
#
# Usage: sbatch [sbatch's options] scripts/slurm/slurm_train.sh [options] [CONFIG...] [-- ARGUMENT...]
#
#   CONFIG               settings file, passed to the script as --config CONFIG; -: pass none (default: $CONFIG, else
#                        Muster's config/quickstart.yaml). For a job array: one file per element, or one name with %a,
#                        which is replaced by the index of the element
#   ARGUMENT...          passed to the script unchanged, except that %a is replaced in a job array; for train.py:
#                        section.key=value
#
#   --script PATH        script to run (default: $SCRIPT, else Muster's train.py)
#   --agent fast|torchrun
#                        agent on each node, with LAUNCHER=torchrun. fast (default): Muster's; torchrun: PyTorch's
#   --master-port PORT   port through which the ranks find each other (default: $MASTER_PORT, else a free port of the
#                        first node)
#   --grace SECONDS      after a stop request, give the ranks SECONDS to write a checkpoint, then kill them (default: 120)
#   --max-restarts N     restart the run up to N times within the job after a failure (default: 0)
#   --spares N           with --max-restarts and LAUNCHER=torchrun: keep the last N nodes of the job as spare nodes,
#                        which replace lost ones; submit with --no-kill, or SLURM requeues the job when it loses a node
#   --min-nodes N        with --max-restarts and LAUNCHER=torchrun: when a node is lost and no spare node is left,
#                        continue with fewer nodes, but at least N
#   --rendezvous-timeout SECONDS
#                        with LAUNCHER=torchrun: time for all nodes to join (default: 600)
#   --max-requeues N     how often the job may requeue itself (default: 100)
#   --dry-run            print the job and the command that would be started; start nothing
#   (as launch_singlenode.sh except NPROC --no-preflight --lease --detach)
#
# Environment variables:
#
#   LAUNCHER             srun (default): one task per rank; torchrun: one agent per node
#   MASTER_PORT          as --master-port
#   CONTAINER            container of the ranks: a command that runs its arguments in it, such as
#                        "apptainer exec --nv image.sif", or options of srun, such as
#                        "--container-image=nvcr.io#nvidia/pytorch:25.10-py3"
#   SRUN_ARGS            more options of srun
#   MUSTER_KIT           Muster's directory; needed if this script was copied out of it
#
# The #SBATCH lines of this file are defaults: change them, or override them with options of sbatch. The run has
# as many ranks as the job has tasks.
#
#SBATCH --job-name=train
#SBATCH --nodes=2                       # number of nodes
#SBATCH --ntasks-per-node=2             # processes per node: one per GPU
#SBATCH --gres=gpu:2                    # GPUs per node; --gres=none on a cluster without GPUs
#SBATCH --cpus-per-task=2               # cores per process, its data workers included
##SBATCH --mem=8G                       # memory per node, 0: all of it; if set, sbatch refuses --mem-per-cpu
#SBATCH --time=1-00:00:00               # days-hours:minutes:seconds; the job requeues itself before this limit
##SBATCH --partition=gpu                # sinfo lists the partitions
##SBATCH --account=project              # account to charge, if the cluster requires one
#SBATCH --output=logs/slurm-%j.out      # the directory must exist; %j is the job number
#SBATCH --error=logs/slurm-%j.err
#SBATCH --open-mode=append              # a requeued job appends to its output
#SBATCH --signal=USR2@120               # SIGUSR2 120 s before the time limit: ranks write a checkpoint
#SBATCH --requeue                       # requeue after a node failure or preemption

set -euo pipefail
[[ ${BASH_SOURCE[0]} != "$0" ]] || name=slurm_train.sh # otherwise slurm_train_single_node.sh has set it
kit=${MUSTER_KIT:-$(readlink -f -- "$0")} kit=${kit%/scripts/slurm/*}
if [[ ! -e $kit/scripts/lib/slurm_job.bash && ${SLURM_JOB_ID-} ]]; then # sbatch runs a copy of this script
  kit=$(scontrol show job "$SLURM_JOB_ID" | sed -nE "s|^ *Command=(.*)/scripts/slurm/$name( .*)?\$|\1|p")
  kit=${kit%%$'\n'*} # an array has one line per element
fi
if [[ ! -e $kit/scripts/lib/slurm_job.bash ]]; then
  echo "$name: cannot find Muster; submit the script in its directory, or export MUSTER_KIT=<its directory>" >&2
  exit 2
fi
# shellcheck source=scripts/lib/launcher.bash
source "$kit/scripts/lib/launcher.bash"
source "$KIT/scripts/lib/slurm_job.bash"


main() {
  PROGRAM=$name # SLURM runs a copy with another name
  drop_inherited_variables
  refuse_misplaced_options "$@"
  parse_options "$@"
  parse_job_arguments
  if [[ ! ${SLURM_JOB_ID-} && $DRY_RUN == 1 ]]; then
    print_submission
  else
    in_allocation || die_usage "not in a SLURM job; use: $(quote "${CALL[@]}") (--dry-run shows what it would do)"
    enter_node_env "$@"
    find_earlier_run
    trap '' "${PASSED_ON[@]}" # ignore these signals until distributed/launch/run.py handles them
  fi
  slurm_check_call 0
  slurm_run_nodes --max-requeues "$MAX_REQUEUES" "${EXISTING_RUN[@]}"
}

main "$@"
