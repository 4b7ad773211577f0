# shellcheck shell=bash
#
# Sourced on every node before a training starts: what your machines need. A config/node_env.sh in the working
# directory takes the place of this one. A command that fails ends the launch with 69, unless it is followed by
# `|| true`, or stands below a line `set +e`. What it leaves in the background ends with the run. Nothing is set by
# default; examples:
#
#   module load cuda/12.8
#   source /opt/conda/etc/profile.d/conda.sh
#   conda activate train
#   export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
#   export NCCL_DEBUG=WARN TORCH_FR_DUMP_TEMP_FILE=/scratch/ada/collectives_
