# shellcheck shell=bash
#
# Where a run of run.sh or train.sh starts: on this machine, on nodes over SSH, in the SLURM allocation of this shell, or
# as a new SLURM job.
#
# Sourced, never run; it needs launcher.bash.

# shellcheck disable=SC2034 # other files use these variables
SBATCH_OPTIONS=() # options of sbatch
# Options of torchrun that mean here what they mean there, and that the help does not list; names of their values.
# other_launchers.list has those that are refused.
declare -A TORCHRUN_OPTIONS=(
  [--standalone]=none [--nnodes]=N [--node-rank]=RANK [--master-addr]=ADDRESS [--local-addr]=ADDRESS
  [--tee]=STREAMS [-t]=STREAMS [--redirects]=STREAMS [-r]=STREAMS [--local-ranks-filter]=RANKS
  [--duplicate-stdout-filters]=TEXT [--duplicate-stderr-filters]=TEXT [--rdzv-backend]=NAME [--rdzv-endpoint]=ADDRESS
  [--rdzv-id]=ID [--rdzv-conf]=CONF [--start-method]=NAME [--monitor-interval]=SECONDS [--role]=NAME
)
# Options of sbatch that need no --sbatch.
SBATCH_NAMES=(--time --partition --account --qos --mem --gpus-per-node --constraint --reservation --job-name)


# Accept options that the help does not list: those of torchrun, of sbatch, and of the form with CONFIG and NPROC.
accept_unlisted_options() {
  local name
  VALUE_NAME[--script]=PATH VALUE_NAME[--module]=MODULE
  for name in "${!TORCHRUN_OPTIONS[@]}"; do
    VALUE_NAME["$name"]=${TORCHRUN_OPTIONS[$name]}
  done
  for name in "${SBATCH_NAMES[@]}"; do
    VALUE_NAME["$name"]=VALUE
  done
}


# Pass an option of sbatch on. Do what an option of torchrun means, or refuse its value.
take_unlisted_option() { # <option> <value, or 1>
  local one_machine="this call starts one machine; to name the nodes: --on NODE,NODE...; to start each node by hand:"
  one_machine+=" muster node"
  if [[ " --sbatch ${SBATCH_NAMES[*]} " == *" $1 "* ]]; then
    [[ $1 == --sbatch ]] || set -- "$1" "$1=$2"
    SBATCH_OPTIONS+=("--sbatch=$2")
    return
  fi
  case $1 in
    --tee | -t | --redirects | -r | --local-ranks-filter | --duplicate-std*)
      log "$1: the output of all ranks is in the run directory; --console-rank chooses the rank that is shown" ;;
    --nnodes) [[ $2 == @(1|1:1) ]] || die_usage "$1 $2: $one_machine" ;;
    --node-rank) [[ $2 == 0 ]] || die_usage "$1 $2: $one_machine" ;;
    --master-addr) [[ $2 == @(localhost|127.0.0.1|::1) ]] || die_usage "$1 $2: $one_machine" ;;
    --rdzv-endpoint)
      [[ $2 == @(localhost|127.0.0.1|0.0.0.0|'[::1]'|::1|)?(:*([0-9])) ]] || die_usage "$1 $2: $one_machine" ;;
    *) ;; # what Muster does, or has no need for: the launcher chooses how ranks find each other
  esac
}


# Take SCRIPT and its arguments, and end the options. With -m, all arguments are those of the module. A leading -- is
# taken away. A call of the form CONFIG NPROC is passed to its own program.
take_script() { # <argument...>
  if [[ $# -ge 2 && ($1 == - || ! $MODULE && $1 == *.y?(a)ml) ]] && { is_count "$2" || is_processor_kind "$2"; }; then
    check_program "$KIT/scripts/ssh/launch_singlenode.sh"
    exec_in_environment 1 "MUSTER_VERB=$VERB" "$KIT/scripts/ssh/launch_singlenode.sh" "${CALL[@]:1}"
  fi
  [[ ! $SCRIPT ]] || die_usage "--script '$SCRIPT': write SCRIPT without --script, behind the options"
  if [[ ! $MODULE ]]; then
    SCRIPT=${1-}
    set -- "${@:2}"
  fi
  [[ ${1-} != -- ]] || shift
  SCRIPT_ARGS=("$@")
}


# Take the defaults of muster.toml: of the user's configuration directory, and before it that of the working directory.
# Options of the command line and MUSTER_NOTIFY count before both.
take_defaults() {
  local number file files=() entries=()
  for file in "${XDG_CONFIG_HOME:-${HOME-}/.config}/muster/muster.toml" "$PWD/muster.toml"; do
    [[ -e $file || -L $file ]] || continue
    check_defaults "$file"
    files+=("$file")
  done
  ((${#files[@]})) || return 0
  resolve_python "$PYTHON_OPTION"
  mapfile -d '' -t entries < <(kit_python launch.defaults "${files[@]}")
  [[ ${entries[0]-} != usage ]] || die_usage "${entries[1]}"
  [[ ${entries[*]: -1} == ok ]] || die_with "$EXIT_UNFIT" "muster.toml: $PYTHON could not read it"
  for ((number = 0; number + 2 < ${#entries[@]}; number += 3)); do
    take_default "${entries[@]:number:3}"
  done
}


# Exit with EXIT_UNFIT if another user can change the file: it may name a program that runs as the caller.
check_defaults() { # <muster.toml>
  local paths=("$1" "${1%/*}/")
  [[ ! -L $1 ]] || paths+=("$(readlink -f -- "$1")")
  add_links "${1%/*}" "${1##*/}"
  find_foreign "${paths[@]}"
  [[ ! $FOREIGN ]] || die_with "$EXIT_UNFIT" "$1: ${FOREIGN#"$1: "}"
}


take_default() { # <option, or --env NAME> <value> <file>
  local shown="$1 $2" given=" ${GIVEN_OPTIONS[*]-} "
  case $1 in
    --env\ *)
      shown=$1 # the value may be a secret
      [[ " ${ENVIRONMENT[*]%%=*} " != *" ${1#* } "* ]] || return 0
      add_environment "$3: env" "${1#* }=$2"
      set -- --env "${ENVIRONMENT[-1]}" "$3"
      ;;
    --on) [[ $given != *' '@(--on|--hostfile|--slurm|--standalone)' '* ]] && ! in_allocation || return 0 ;;
    --nproc) [[ ! $NPROC ]] || return 0 ;;
    --notify)
      shown=$1 # the same
      [[ ! $NOTIFY ]] || return 0
      ;;
    --python) [[ ! $PYTHON_OPTION ]] || return 0 ;;
    *) [[ $SLURM_NODES && $given != *" $1 "* ]] || return 0 ;;
  esac
  [[ $1 == --env ]] || set_option "$1" "$2"
  GIVEN_OPTIONS+=("$1") GIVEN_VALUES+=("$2")
  [[ $DRY_RUN != 1 ]] || log "$shown: default of $3"
}


# Refuse the options that the place does not have.
refuse_options() { # <the place, and what to do> <option...>
  local given
  for given in "${GIVEN_OPTIONS[@]}"; do
    [[ " ${*:2} " != *" $given "* ]] || die_usage "$given: $1"
  done
}


check_place() {
  local nodes=(--sync --fetch --spares --min-nodes --exclude --pdsh --rendezvous-timeout)
  local job=(--sbatch "${SBATCH_NAMES[@]}")
  [[ ! $ON || ! $HOSTFILE ]] || die_usage "--on and --hostfile: both name the nodes; give one of the two"
  [[ ! $SLURM_NODES || ! $ON$HOSTFILE ]] || die_usage "--slurm and ${ON:+--on}${HOSTFILE:+--hostfile}: give one of the two"
  if [[ $SLURM_NODES ]]; then
    refuse_options "not in a job of --slurm; leave it out" "${nodes[@]}" --lease --detach --no-preflight
  else
    refuse_options "only for a job of --slurm" "${job[@]}"
  fi
  if [[ ! $SLURM_NODES$ON$HOSTFILE ]]; then
    refuse_options "only for nodes over SSH; name them with --on or --hostfile" --sync --fetch --exclude --pdsh
    in_allocation || refuse_options "there is only one machine; name more with --on or --hostfile" \
      --spares --min-nodes --rendezvous-timeout
  fi
  [[ ! $PDSH || ! $LEASE ]] || die_usage "--lease: not possible with --pdsh; leave --pdsh out"
}


# Start the run. Callers must not have local variables, see run_nodes.
run_at_place() {
  take_defaults
  check_place
  NPROC=${NPROC:-default}
  check_nproc -n "$NPROC" or_kind
  if [[ $SLURM_NODES ]]; then
    submit_job
  elif [[ $ON$HOSTFILE ]]; then
    check_call_on_nodes ${ON:+"$ON"}
    [[ $PDSH ]] || ssh_run_nodes ssh # replaces this process
    check_pdsh
    ssh_run_nodes pdsh
  elif in_allocation; then
    enter_node_env "${CALL[@]:1}"
    ! is_processor_kind "$NPROC" || [[ $NPROC == default ]] ||
      die_usage "-n $NPROC: only for machines without SLURM; in an allocation give a number, or leave -n out"
    [[ $NPROC != default ]] || NPROC=0
    slurm_check_call $((NPROC * ${SLURM_JOB_NUM_NODES:-1}))
    slurm_run_nodes
  else
    run_on_this_machine
  fi
}


# Submit the batch job, and follow it.
submit_job() {
  [[ $NPROC != default ]] || die_usage "-n N: missing; with --slurm, give the number of processes per node"
  forward_options_except -n --nproc --nproc-per-node --slurm --script -m "${!TORCHRUN_OPTIONS[@]}" "${SBATCH_NAMES[@]}" \
    --sbatch
  exec_in_environment 1 "MUSTER_VERB=$VERB" "$KIT/scripts/slurm/submit.sh" --follow \
    "${SBATCH_OPTIONS[@]}" "${FORWARDED_OPTIONS[@]}" ${SCRIPT:+--script "$SCRIPT"} ${MODULE:+-m "$MODULE"} \
    "$CONFIG" "$NPROC" "$SLURM_NODES" -- "${SCRIPT_ARGS[@]}"
}
