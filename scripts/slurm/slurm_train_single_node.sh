#!/usr/bin/env bash
#
# Train on one node of a SLURM cluster, as a batch job.
#
# Usage: sbatch [sbatch's options] scripts/slurm/slurm_train_single_node.sh [options] [CONFIG...] [-- ARGUMENT...]
#
#   (as slurm_train.sh except --spares --min-nodes)
#
# Environment variables:
#
#   LAUNCHER             srun (default): one task per rank; torchrun: one agent for all ranks
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
#SBATCH --nodes=1                       # for more nodes use slurm_train.sh
#SBATCH --ntasks-per-node=2             # processes: one per GPU
#SBATCH --gres=gpu:2                    # GPUs; --gres=none on a cluster without GPUs
#SBATCH --cpus-per-task=2               # cores per process, its data workers included
##SBATCH --mem=8G                       # memory, 0: all of the node; if set, sbatch refuses --mem-per-cpu
#SBATCH --time=1-00:00:00               # days-hours:minutes:seconds; the job requeues itself before this limit
##SBATCH --partition=gpu                # sinfo lists the partitions
##SBATCH --account=project              # account to charge, if the cluster requires one
#SBATCH --output=logs/slurm-%j.out      # the directory must exist; %j is the job number
#SBATCH --error=logs/slurm-%j.err
#SBATCH --open-mode=append              # a requeued job appends to its output
#SBATCH --signal=USR2@120               # SIGUSR2 120 s before the time limit: ranks write a checkpoint
#SBATCH --requeue                       # requeue after a node failure or preemption

set -euo pipefail
name=slurm_train_single_node.sh
kit=${MUSTER_KIT:-$(readlink -f -- "$0")} kit=${kit%/scripts/slurm/*}
if [[ ! -e $kit/scripts/lib/slurm_job.bash && ${SLURM_JOB_ID-} ]]; then # sbatch runs a copy of this script
  kit=$(scontrol show job "$SLURM_JOB_ID" | sed -nE "s|^ *Command=(.*)/scripts/slurm/$name( .*)?\$|\1|p")
  kit=${kit%%$'\n'*} # an array has one line per element
fi
if [[ ! -e $kit/scripts/lib/slurm_job.bash ]]; then
  echo "$name: cannot find Muster; submit the script in its directory, or export MUSTER_KIT=<its directory>" >&2
  exit 2
fi
# All steps are those of slurm_train.sh.
# shellcheck source=scripts/slurm/slurm_train.sh
source "$kit/scripts/slurm/slurm_train.sh"
