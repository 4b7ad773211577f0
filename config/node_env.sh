# shellcheck shell=bash
#
# Sourced on every node before a training starts. A config/node_env.sh in the working directory replaces this file. A
# command that fails ends the launch with exit code 69, unless `|| true` or an earlier `set +e` allows it. Background
# processes end with the run. Nothing is set by default. Examples:
#
#   module load cuda/12.8
#   source /opt/conda/etc/profile.d/conda.sh
#   conda activate train
#   export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
#   export NCCL_DEBUG=WARN TORCH_FR_DUMP_TEMP_FILE=/scratch/ada/collectives_
