#!/usr/bin/env bash
#
# srun, with every line of a task prefixed as in all node logs: [NODE:RANK], and srun's own exit status.
#
# Usage: srun.sh SRUN-OPTION... COMMAND [WORD...]
#
#   --help     show this
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"


prefix_ranks() {
  trap '' INT TERM
  exec sed -u -E "s/^ *0*([0-9]+): /[${MUSTER_NODE:-slurm}:\1] /"
}


case ${1-} in
  '') die_usage "there is no command" ;;
  --help | -h) usage; exit ;;
esac
type -P srun >/dev/null || die_usage "srun is not on the PATH: this is no SLURM machine"
exec srun --label "$@" > >(prefix_ranks) 2>&1
