#!/usr/bin/env bash
#
# Submit a batch job to SLURM: NPROC processes on each of NNODES nodes.
#
# Usage: submit.sh [options] CONFIG NPROC NNODES [-- ARGUMENT...]
#        muster submit ...
#
#   CONFIG               settings file, passed to the script as --config CONFIG; -: pass none
#   NPROC                number of processes per node: one per GPU; on nodes without GPUs, at most one per core
#   NNODES               number of nodes
#   ARGUMENT...          passed to the script unchanged; for train.py: section.key=value
#
#   --follow             print the state of the job, then its output; exit with its exit code. Ctrl-C leaves the job
#                        running
#   --template           submit nothing; print a plain batch script for you to edit and keep. It starts the script
#                        with srun, without Muster
#   --sbatch OPTION      pass any option of sbatch on, unchecked, such as --sbatch --array=0-3; repeatable
#   (as slurm_train.sh)
#
# All other options are those of sbatch in their long form: --time, --partition, --account, --qos, --mem, --signal, ...
# They override the partition, GPUs and cores that this program chooses from the list of sinfo. --array, and options
# that this program sets, such as --nodes and --output, are only passed on with --sbatch. The job runs slurm_train.sh,
# whose environment variables, such as LAUNCHER, apply. The directory of --log-dir is created; one in which all users
# can create files is refused.
#
# Exit codes: 0 success; 2 wrong call, or refused by SLURM; with --follow that of the job, or 130 after Ctrl-C.
#
#   submit.sh --time 2-0 --follow --script my_train.py - 8 2 -- --lr 3e-4
#
set -euo pipefail
# shellcheck source=scripts/lib/launcher.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../lib/launcher.bash"

# Options of sbatch that this script sets, or that change what sbatch prints.
RESERVED="nodes|ntasks|ntasks-per-node|array|output|error|chdir|wrap|wait|parsable|test-only"
OWN_ARGUMENTS=()  # options and arguments of this script
SBATCH_OPTIONS=() # --NAME=VALUE or --NAME
MODE=submit       # or follow, template, dry-run


# Set OWN_ARGUMENTS and SBATCH_OPTIONS.
take_sbatch_options() { # <argument...>
  local name known # options of sbatch, such as: --time= --hold
  known=$(sbatch --help 2>/dev/null | sed -nE 's/^ {2}(-[A-Za-z],?| {3}) {1,2}(--[a-z-]+=?).*/\2/p') || true
  known=" $(grep -vxE -- "--($RESERVED)=?" <<<"$known" | xargs) "
  read_help
  while (($#)) && [[ $1 != -- ]]; do
    name=${1%%=*}
    if [[ $name == --sbatch ]]; then
      [[ $1 == *=* ]] || set -- "--sbatch=${2-}" "${@:3}"
      [[ $1 == --sbatch=-* ]] || die_usage "--sbatch: expected an option, such as --array=0-3, got '${1#*=}'"
      SBATCH_OPTIONS+=("${1#*=}")
    elif [[ $name =~ ^--($RESERVED)$ && $name != --nodes ]]; then
      die_usage "$name: this program sets it, or relies on its default; to pass it on: --sbatch OPTION"
    elif [[ ${VALUE_NAME[$name]-} || $known != *" $name"[\ =]* ]]; then
      OWN_ARGUMENTS+=("$1")
    elif [[ $1 == *=* || $known == *" $name "* ]]; then
      SBATCH_OPTIONS+=("$1")
    else
      need_value "$@"
      SBATCH_OPTIONS+=("$1=$2")
      shift
    fi
    shift
  done
  OWN_ARGUMENTS+=("$@")
}


main() {
  take_sbatch_options "$@"
  parse_options "${OWN_ARGUMENTS[@]}"
  type -P sbatch >/dev/null || die_with "$EXIT_UNFIT" "sbatch: not found; call this on a login node of the cluster"
  ((${#POSITIONAL[@]} == 3)) ||
    die_usage "expected CONFIG, NPROC and NNODES, got: $(quote "${POSITIONAL[@]:-nothing}")"
  CONFIG=${POSITIONAL[0]} NPROC=${POSITIONAL[1]} NNODES=${POSITIONAL[2]}
  check_nproc NPROC "$NPROC"
  [[ $NNODES =~ ^[1-9][0-9]{0,5}$ ]] || die_usage "NNODES: expected a number of nodes, 1 or more, got '$NNODES'"
  QUIET=1 pick_rank_python
  check_script
  check_config
  forward_options_except --follow --template --dry-run --notify
  set -- "${FORWARDED_OPTIONS[@]}" "$CONFIG" -- "${SCRIPT_ARGS[@]}"
  # A dry run of the batch script checks its arguments. If this shell runs in a SLURM job, the variables of that job
  # must not affect the dry run.
  (unset "${!SLURM_STEP@}" "${!SLURM_TASK@}" "${!SLURM_GPUS@}" "${!SLURM_ARRAY@}" SLURM_CPUS_PER_TASK SLURM_RESTART_COUNT
    exec_in_environment 5 SLURM_JOB_ID=0 "SLURM_JOB_NODELIST=node[1-$NNODES]" "SLURM_NTASKS=$((NPROC * NNODES))" \
    "SLURM_TASKS_PER_NODE=$NPROC(x$NNODES)" "SLURM_JOB_CPUS_PER_NODE=$NPROC(x$NNODES)" \
    "$KIT/scripts/slurm/slurm_train.sh" --dry-run "$@" >/dev/null) || exit
  WORK=("$PYTHON" "${WORK[@]}" "${CONFIG_ARGS[@]}" "${SCRIPT_ARGS[@]}")
  ((!FOLLOW)) || MODE=follow
  ((!TEMPLATE)) || MODE=template
  [[ $DRY_RUN != 1 ]] || MODE=dry-run
  # --notify may contain a secret, and all users can read arguments: pass it as a variable, which sbatch passes on.
  exec_in_environment 1 "MUSTER_NOTIFY=$NOTIFY" "$PYTHON" -I "$KIT/scripts/lib/module.py" slurm.submit \
    "$PROGRAM" "$LOG_DIR" "$MODE" "$NPROC" "$NNODES" "${SBATCH_OPTIONS[@]/#/--sbatch=}" \
    "${WORK[@]/#/--command=}" "${@/#/--argument=}"
}

main "$@"
