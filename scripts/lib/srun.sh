#!/usr/bin/env bash
#
# srun, with every line of a task prefixed as in all node logs: [NODE:RANK], and srun's own exit status.
# TERM is handed to the tasks, which may write a checkpoint; srun by itself would kill them.
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


# The step is found by a name of its own.
# shellcheck disable=SC2317 # called by a trap
hand_on_term() {
  SIGNALLED=1
  local step
  for step in $(squeue -hs -j "$SLURM_JOB_ID" -o '%i %j' | sed -n "s/ muster-$$\$//p"); do
    scancel --signal=TERM "$step" || kill -TERM "$SRUN"
  done
}


main() {
  case ${1-} in
    '') die_usage "there is no command" ;;
    --help | -h) usage; exit ;;
  esac
  type -P srun >/dev/null || die_usage "srun is not on the PATH: this is no SLURM machine"
  exec > >(prefix_ranks) 2>&1
  trap hand_on_term TERM
  srun --label --job-name "muster-$$" "$@" &
  SRUN=$!
  STATUS=0
  join "$SRUN" || STATUS=$?
  exit "$STATUS"
}

main "$@"
