#!/usr/bin/env bash
#
# Run a script on this machine, over SSH, or on SLURM.
#
# Usage: run.sh [options] SCRIPT [ARGUMENT...]
#        run.sh [options] -m MODULE [ARGUMENT...]
#        muster run ...
#
#     muster run my_train.py --lr 3e-4
#     muster run -n 2 --on node1,node2 my_train.py --lr 3e-4
#
# Options stand before SCRIPT; what follows SCRIPT is passed to it unchanged.
# A file muster.toml has defaults of options. `muster status` shows the run.
#
# What to run:
#   -n N                 processes on this machine, or on each node: a number;
#                        gpu: one per GPU; cpu: one per core; auto: gpu, or cpu
#                        without GPUs (default: one per GPU, one without GPUs)
#   --nproc N            the same as -n
#   --nproc-per-node N   the same as -n, as with torchrun
#   -m MODULE            run a module instead of a script
#   --env NAME=VALUE     set an environment variable for the ranks; repeatable
#   --python PATH        Python of the ranks (default: the active environment's)
#
# Where (default: this machine, or the SLURM allocation of this shell):
#   --on NODES           over SSH: node1,user@node2,node[3-8],node9:4 (node9 with
#                        4 processes instead of N)
#   --hostfile FILE      over SSH, on the nodes of FILE: lines `node1 slots=4`
#   --sync               first copy this directory and Muster to the nodes
#   --pdsh               start the nodes with one pdsh instead of ssh
#   --slurm N            submit a job for N nodes to SLURM, and follow it
#
# When it fails or stops:
#   --max-restarts N     restart the run up to N times after a failure (default 0)
#   --grace SECONDS      time for a checkpoint after a stop request (default: 8)
#
# Output:
#   --console-rank RANK  the rank whose output is printed: a number, last or auto
#   --log-dir DIR        where run directories are created (default: logs)
#   --detach             run in the background, detached from this terminal
#   --dry-run            print the command, run nothing
#   --help               show this help
#   --help-all           show all options and the exit codes
#
# More options:
#   --sbatch OPTION      with --slurm: pass any option of sbatch on, unchecked, such as --sbatch --array=0-3; repeatable.
#                        --time, --partition, --account, --qos, --mem, --gpus-per-node, --constraint, --reservation and
#                        --job-name need no --sbatch
#   (as launch_torchrun_auto.sh except CONFIG NPROC NODE... ARGUMENT... --script)
#
# Options of torchrun have torchrun's meaning, or are refused with what to write instead.
#
# Exit codes: 0 success, 2 wrong call, 69 a node is unreachable or unfit, 75 stopped with a checkpoint (the same call
# resumes), 130 SIGINT and 143 SIGTERM without a new checkpoint, 124 hung or not all nodes joined in time, otherwise that
# of the rank that failed first.
#
set -euo pipefail
# shellcheck source=scripts/lib/launcher.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/launcher.bash"
source "$KIT/scripts/lib/place.bash"


main() {
  drop_inherited_variables
  accept_unlisted_options
  parse_options_before take_script "$@"
  [[ $SCRIPT$MODULE ]] || die_usage "SCRIPT: missing; name your script, or a module with -m"
  CONFIG=-
  run_at_place
}

main "$@"
