# shellcheck shell=bash
#
# Option parser of all scripts.
#
# A script accepts the options listed in its opening comment: lines that begin with the option and, if it takes a value,
# the name of the value. --help, -h and --version need no line.
#
# Sourced, never run.

# shellcheck disable=SC2034 # other files use these variables
# Save these environment variables, because variables below have the same names.
CONFIG_FROM_ENVIRONMENT=${CONFIG-} SCRIPT_FROM_ENVIRONMENT=${SCRIPT-} PORT_FROM_ENVIRONMENT=${MASTER_PORT-}

declare -A VALUE_NAME=() # option of this script -> name of its value; "none" for a flag
CALL=()                  # this program and its arguments
GIVEN_OPTIONS=() GIVEN_VALUES=() # options in CALL and their values
POSITIONAL=()            # positional arguments in CALL
SCRIPT_ARGS=()           # arguments after --, for the user's script
REST=()                  # arguments in CALL from -- on or, if TAKE_SCRIPT is set, from the first that is no option
TAKE_SCRIPT=''           # function that takes the first positional argument and all that follow; empty: none

# Option -> the variable that it sets; a flag sets it to 1. set_option handles the others.
declare -A VARIABLE_OF=(
  [--script]=SCRIPT [-m]=MODULE [--python]=PYTHON_OPTION [--agent]=AGENT [--log-dir]=LOG_DIR
  [--master-port]=MASTER_PORT [--rendezvous-timeout]=RENDEZVOUS_TIMEOUT [--hang-timeout]=HANG_TIMEOUT
  [--progress]=PROGRESS [--console-rank]=CONSOLE_RANK [--spares]=SPARES [--min-nodes]=MIN_NODES
  [--grace]=GRACE [--max-restarts]=MAX_RESTARTS [--max-requeues]=MAX_REQUEUES [--hostfile]=HOSTFILE [--exclude]=EXCLUDE
  [-n]=NPROC [-c]=CONFIG [-l]=LEVEL
  [--backend]=BACKEND [--max-bytes]=MAX_BYTES [--seconds]=TABLE_SECONDS [--timeout]=TIMEOUT
  [--sync]=SYNC [--lease]=LEASE [--notify]=NOTIFY [--detach]=DETACH [--dry-run]=DRY_RUN
  [--json]=JSON [--watch]=WATCH [--stacks]=STACKS [--now]=NOW [--certain]=CERTAIN [--fresh]=FRESH [--all]=ALL
  [--rows]=ROWS [--quiet]=QUIET [-f]=FOLLOW [--follow]=FOLLOW [--template]=TEMPLATE
  [--rank]=SHOWN_RANK [--node]=SHOWN_NODE [--since]=SINCE
  [--nproc]=NPROC [--nproc-per-node]=NPROC [--on]=ON [--slurm]=SLURM_NODES [--pdsh]=PDSH
  [--module]=MODULE
)
# Option of torchrun, srun, mpirun, accelerate, deepspeed or train.py -> Muster's names for the value of this option:
# variables of VARIABLE_OF, or arguments in usage lines.
declare -A FAMILIAR=(
  [--nproc]=NPROC [--nproc-per-node]=NPROC [--ntasks]=NPROC [--ntasks-per-node]=NPROC [-n]=NPROC
  [--np]=NPROC [--num-accelerators]=NPROC [--num-processes]=NPROC [--num-gpus]=NPROC [--gpus]=NPROC [--gpus-per-node]=NPROC
  [--nnodes]="NNODES NODE" [--nodes]="NNODES NODE" [--num-nodes]="NNODES NODE" [-N]="NNODES NODE"
  [--nodelist]=NODE [--hosts]=NODE [--host]=NODE [-H]=NODE [-w]=NODE
  [--node-rank]=NODE_RANK [--machine-rank]=NODE_RANK [--master-addr]=MASTER_ADDR [--main-process-ip]=MASTER_ADDR
  [--main-process-port]=MASTER_PORT [-p]=MASTER_PORT [--module]=MODULE
  [--config]=CONFIG [--config-path]=CONFIG [--config-file]=CONFIG [-c]=CONFIG
  [--log-level]=LEVEL [--loglevel]=LEVEL [-l]=LEVEL
)
SCRIPT='' MODULE='' # SCRIPT: a file, or a directory with a __main__.py
PYTHON_OPTION='' AGENT=fast LOG_DIR=logs MASTER_PORT='' HOSTFILE='' EXCLUDE=''
RENDEZVOUS_TIMEOUT='' # seconds; empty: torchrun's default, 600
HANG_TIMEOUT=''       # seconds; 0: never; empty: the default
PROGRESS=''           # a regular expression, or off; empty: common formats
CONSOLE_RANK=auto     # a rank, last, or auto: see distributed/launch/shown_ranks.py
GRACE=''              # seconds from the stop request to SIGKILL; empty: 8, in batch jobs 120
MAX_RESTARTS=0 MAX_REQUEUES=100
SPARES=''             # nodes that replace lost nodes
MIN_NODES=''          # fewest nodes with which a run continues; empty: all nodes
LEASE=''              # seconds; 0: none; empty: the default
ATTACH=${MUSTER_ATTACH-} # the run to follow instead of starting one; attach.sh sets it
NOTIFY=${MUSTER_NOTIFY-} # command that is called when the run restarts, ends or has a fault; may contain a secret
NPROC='' CONFIG='' LEVEL='' ROWS='' SHOWN_RANK='' SHOWN_NODE='' SINCE=''
ON='' SLURM_NODES='' PDSH=''
BACKEND=auto MAX_BYTES='' TABLE_SECONDS='' TIMEOUT=''
SYNC=0 DETACH=0 JSON=0 WATCH=0 STACKS=0 NOW=0 CERTAIN=0 FRESH=0 ALL=0 FOLLOW=0 TEMPLATE=0 PREFLIGHT=1
FORWARDED=()          # NAME=VALUE of inherited variables that are passed to the nodes, in the same way as ENVIRONMENT
FETCHED=()            # --fetch: patterns of files to copy from the nodes
ENVIRONMENT=()        # --env, --env-file: NAME=VALUE; not passed in command lines, which all users can read

MAX_NPROC=1024        # per machine


# Like parse_options, for a program whose options stand before the first positional argument: call a function with this
# argument and all that follow.
parse_options_before() { # <function> <argument...>
  TAKE_SCRIPT=$1
  parse_options "${@:2}"
}


# Set the variables above from the arguments of this program.
parse_options() { # <argument...>
  local name
  [[ $PWD -ef . || $(readlink "/proc/$$/cwd") != *' (deleted)' ]] ||
    die_usage "the working directory '$PWD' was removed; change to one that exists"
  CALL=("$PROGRAM_FILE" "$@")
  read_help
  while (($#)); do
    case $1 in
      --help | -h) show_help; exit ;;
      --help-all) [[ ${VALUE_NAME[--help-all]-} ]] || refuse_option "$1"; usage; exit ;;
      --version) show_version; exit ;;
      --)
        REST=("$@")
        [[ ! $TAKE_SCRIPT ]] || { "$TAKE_SCRIPT" "${@:2}" && break; }
        [[ ${VALUE_NAME[--]-} ]] || die_usage "--: unknown option"
        SCRIPT_ARGS=("${@:2}")
        break
        ;;
      --*=*)
        name=${1%%=*}
        [[ ! $TAKE_SCRIPT ]] || name=${name//_/-}
        [[ ${VALUE_NAME[$name]-none} != none ]] || refuse_option "$1"
        set -- "$name" "${1#*=}" "${@:2}"
        continue
        ;;
      -[!0-9]*)
        [[ ! $TAKE_SCRIPT ]] || set -- "${1//_/-}" "${@:2}"
        [[ ${VALUE_NAME[$1]-} ]] || refuse_option "$1"
        GIVEN_OPTIONS+=("$1")
        if [[ ${VALUE_NAME[$1]} == none ]]; then
          GIVEN_VALUES+=('')
          set_option "$1" 1
        else
          need_value "$@"
          GIVEN_VALUES+=("$2")
          set_option "$1" "$2"
          [[ ! $TAKE_SCRIPT || ${VARIABLE_OF[$1]-} != MODULE ]] ||
            { REST=("${@:3}") && "$TAKE_SCRIPT" "${@:3}" && break; }
          shift
        fi
        ;;
      *)
        [[ ! $TAKE_SCRIPT ]] || { REST=("$@") && "$TAKE_SCRIPT" "$@" && break; }
        POSITIONAL+=("$1")
        ;;
    esac
    shift
  done
  check_kit
  check_options
}


# Set VALUE_NAME; it has an entry for `--` if the usage line has one.
read_help() {
  local line
  while IFS= read -r line; do
    if [[ $line =~ ^\ {2,}(-[a-z]|--[a-z][a-z-]+)(\ ([^ ]+))?($|\ \ ) ]]; then
      VALUE_NAME[${BASH_REMATCH[1]}]=${BASH_REMATCH[3]:-none}
    elif [[ $line == Usage:*'[-- '* ]]; then
      VALUE_NAME[--]=none
    fi
  done < <(usage)
}


set_option() { # <option> <its value, or 1 for a flag>
  case $1 in
    --no-preflight) PREFLIGHT=0 ;;
    --env) add_environment --env "$2" ;;
    --env-file) read_env_file "$2" ;;
    --fetch) FETCHED+=("$2") ;;
    *)
      if [[ ${VARIABLE_OF[$1]-} ]]; then
        printf -v "${VARIABLE_OF[$1]}" '%s' "$2"
      else
        take_unlisted_option "$1" "$2" # of place.bash
      fi
      ;;
  esac
}


# Print the help without the part behind `More options:`, which --help-all prints too.
show_help() {
  usage | sed '/^More options/,$d'
}


refuse_option() { # <option>
  local hint
  refuse_removed "${1%%=*}"
  refuse_removed "${PROGRAM_FILE##*/} ${1%%=*}"
  [[ ! $TAKE_SCRIPT ]] || refuse_option_of_others "${1%%=*}"
  hint=$(explain_familiar_option "$1")
  if [[ ! $hint ]]; then
    hint=$(did_you_mean "${1%%=*}" "${!VALUE_NAME[@]}")
    [[ ! ${VALUE_NAME[--]-} ]] || hint="; arguments of your script go after --$hint"
    [[ ! $TAKE_SCRIPT || $hint ]] || hint='; options of your script go behind its name'
  fi
  die_usage "$1: unknown option$hint"
}


# Refuse the call if an option or variable is one that Muster, or this program, no longer has.
refuse_removed() { # <option or variable; or a program and its option>
  local line
  while IFS= read -r line; do
    [[ $line != "$1: "* ]] || die_usage "$line"
  done <"$KIT/scripts/lib/removed_words.list"
}


# Refuse an option of another launcher with what to do instead.
refuse_option_of_others() { # <option, with dashes>
  local names remedy
  while IFS= read -r remedy; do
    names=${remedy%%: *}
    # shellcheck disable=SC2053 # names are patterns
    [[ $1 != @($names) ]] || die_usage "$1: ${remedy#"$names: "}"
  done <"$KIT/scripts/lib/other_launchers.list"
}


# If another program, such as torchrun, has the unknown option, print what to write for it in this script.
explain_familiar_option() { # <unknown option>
  local option=${1%%=*} known line meaning
  option=${option//_/-}
  [[ $option != -[!-]?* ]] || option=${option:0:2} # -N2 becomes -N, -np becomes -n
  [[ ${VALUE_NAME[$option]-none} == none || $1 == --* ]] || { printf '; write %s %s\n' "$option" "${1:2}" && return; }
  line=$(usage | grep '^Usage: ') || true
  for meaning in ${FAMILIAR[$option]-}; do
    for known in "${!VALUE_NAME[@]}"; do
      [[ ${VARIABLE_OF[$known]-} != "$meaning" ]] || { printf '; use %s\n' "$known" && return; }
    done
    [[ ! $line =~ [^A-Z_]$meaning([^A-Z_]|$) ]] ||
      { printf '; give %s without an option: %s\n' "$meaning" "${line#Usage: }" && return; }
    [[ $meaning != LEVEL || ! ${VALUE_NAME[--]-} ]] ||
      { printf '; arguments of train.py and of your script go after --\n' && return; }
  done
}


check_options() {
  local config=${POSITIONAL[0]-$CONFIG}
  [[ $config != *.py || ! ${VALUE_NAME[--script]-} || $SCRIPT$MODULE$SCRIPT_FROM_ENVIRONMENT ]] ||
    die_usage "CONFIG '$config': not a settings file; to run this script," \
      "give --script $(quote "$config"), and - as CONFIG"
  [[ ! $SCRIPT || ! $MODULE ]] ||
    die_usage "--script '$SCRIPT' and -m '$MODULE' cannot be combined; give one of the two"
  [[ $AGENT == fast || $AGENT == torchrun ]] || die_usage "--agent: expected fast or torchrun, got '$AGENT'"
  [[ ! ${MUSTER_GRACE-} || ! ${VALUE_NAME[--grace]-} ]] || refuse_removed MUSTER_GRACE
  [[ ! $GRACE ]] || is_count "$GRACE" || die_usage "--grace: expected a whole number of seconds, got '$GRACE'"
  is_count "$MAX_RESTARTS" || die_usage "--max-restarts: expected a non-negative integer, got '$MAX_RESTARTS'"
  [[ ! $MIN_NODES ]] || { is_count "$MIN_NODES" && ((MIN_NODES >= 1)); } ||
    die_usage "--min-nodes: expected a number of nodes, 1 or more, got '$MIN_NODES'"
  [[ ! $SPARES$MIN_NODES ]] || check_replacement
  is_count "$MAX_REQUEUES" || die_usage "--max-requeues: expected a non-negative integer, got '$MAX_REQUEUES'"
  [[ $CONSOLE_RANK == @(auto|last) ]] || is_count "$CONSOLE_RANK" ||
    die_usage "--console-rank: expected the number of a rank, last or auto, got '$CONSOLE_RANK'"
  [[ ! $HANG_TIMEOUT ]] || is_count "$HANG_TIMEOUT" ||
    die_usage "--hang-timeout: expected a whole number of seconds (0 = off), got '$HANG_TIMEOUT'"
  [[ ! $LEASE ]] || is_count "$LEASE" ||
    die_usage "--lease: expected a whole number of seconds (0 = none), got '$LEASE'"
  ((!${#FETCHED[@]} || SYNC)) || die_usage "--fetch: nodes share the working directory unless --sync copies it; add --sync"
  [[ ! $MASTER_PORT ]] || is_port "$MASTER_PORT" ||
    die_usage "--master-port: expected a port from 1 to 65535, got '$MASTER_PORT'"
  [[ ! $RENDEZVOUS_TIMEOUT ]] || { is_count "$RENDEZVOUS_TIMEOUT" && ((RENDEZVOUS_TIMEOUT >= 1)); } ||
    die_usage "--rendezvous-timeout: expected a whole number of seconds, 1 or more, got '$RENDEZVOUS_TIMEOUT'"
  # A dry run may print commands for another machine, so it does not check GPUs, ports and addresses.
  [[ $DRY_RUN != 1 && ! $ATTACH ]] || PREFLIGHT=0 # a run to follow uses its GPUs and port itself
  # Python buffers output to a pipe; Muster's own agent disables that itself.
  [[ $AGENT == fast ]] || ENVIRONMENT=(PYTHONUNBUFFERED=1 "${ENVIRONMENT[@]}")
}


# Check that lost nodes can be replaced.
check_replacement() {
  ((MAX_RESTARTS)) ||
    die_usage "--spares and --min-nodes: a lost node is replaced when the run is restarted; give --max-restarts too"
  [[ $LEASE != 0 ]] || die_usage "--lease 0: lost nodes are not replaced; leave out --spares and --min-nodes"
  [[ $AGENT == fast ]] ||
    die_usage "--agent torchrun: lost nodes are not replaced; leave out --spares and --min-nodes"
}


check_nproc() { # <name of the argument> <value> [or_kind: accept also auto, gpu and cpu]
  [[ ! ${3-} ]] || ! is_processor_kind "$2" || return 0
  { is_count "$2" && (($2 >= 1 && $2 <= MAX_NPROC)); } ||
    die_usage "$1: expected a number of processes from 1 to $MAX_NPROC${3:+, auto, gpu or cpu}, got '$2'"
}


# Whether this NPROC is one of torchrun's names for one process per GPU or core, or `default`, which place.bash sets.
is_processor_kind() { # <NPROC>
  [[ $1 == @(auto|gpu|cpu|default) ]]
}


is_count() { # <argument>
  [[ $1 =~ ^[0-9]{1,9}$ && ! $1 =~ ^0[0-9] ]]
}


is_port() { # <argument>
  is_count "$1" && (($1 >= 1 && $1 <= 65535))
}


# Use MASTER_PORT from the environment if no option gives a port. If RANK or MUSTER_RUN_DIR is also set, MASTER_PORT
# belongs to another launch and is ignored.
use_port_from_environment() {
  [[ ! $MASTER_PORT && $PORT_FROM_ENVIRONMENT && ! ${RANK-}${MUSTER_RUN_DIR-} ]] || return 0
  is_port "$PORT_FROM_ENVIRONMENT" ||
    die_usage "MASTER_PORT='$PORT_FROM_ENVIRONMENT' of the environment: expected a port" \
      "from 1 to 65535; unset it, or give a port with --master-port"
  MASTER_PORT=$PORT_FROM_ENVIRONMENT
}


add_environment() { # <origin> <NAME=VALUE>
  local got=", got '$2'"
  [[ $1 == --env ]] || got='; the line may be a secret, so it is not shown'
  [[ $2 =~ ^[A-Za-z_][A-Za-z_0-9]*= ]] || die_usage "$1: expected NAME=VALUE$got"
  case ${2%%=*} in
    MUSTER_RUN_DIR | MUSTER_METRICS | MUSTER_NODE | MUSTER_NODES | RANK | WORLD_SIZE | LOCAL_RANK | \
      MASTER_ADDR | MASTER_PORT | TORCHELASTIC_* | PET_*)
      die_usage "$1 '${2%%=*}': the launcher sets it; leave it out" ;;
  esac
  # Only the program `env` could set it, whose arguments all users can read.
  [[ ${2%%=*} != @($NOT_EXPORTABLE) ]] || die_usage "$1 '${2%%=*}': bash cannot set this variable; choose another name"
  ENVIRONMENT+=("$2")
}


# Add the NAME=VALUE of each line, not expanded. Empty lines and lines that begin with # are ignored.
read_env_file() { # <file>
  [[ -f $1 && -r $1 ]] || die_usage "--env-file '$1': not a readable file (in $PWD)"
  local line number=0
  (($(wc -c <"$1") <= 1000000)) || die_usage "--env-file '$1': larger than 1 MB; expected NAME=VALUE lines"
  (($(tr -d '\0' <"$1" | wc -c) == $(wc -c <"$1"))) ||
    die_usage "--env-file '$1': contains a NUL byte; expected NAME=VALUE lines"
  while IFS= read -r line || [[ $line ]]; do
    number=$((number + 1))
    [[ $line != *$'\r' ]] || die_usage "--env-file '$1', line $number: ends with a carriage return (Windows);" \
      "remove them with: tr -d '\\r' <old >new"
    [[ ! $line || $line == '#'* ]] || add_environment "--env-file '$1', line $number" "$line"
  done <"$1"
}


# Set ARGUMENT, for scripts with at most one argument.
parse_one_argument() { # <name of the argument> <default>
  ((${#POSITIONAL[@]} <= 1)) || die_usage "expected one $1, got: $(quote "${POSITIONAL[@]}")"
  ARGUMENT=${POSITIONAL[0]:-$2}
}


# Set FORWARDED_OPTIONS to the options in CALL and their values, without the options that this function is called with.
forward_options_except() { # <option to leave out...>
  local number
  FORWARDED_OPTIONS=()
  for number in "${!GIVEN_OPTIONS[@]}"; do
    [[ " $* " != *" ${GIVEN_OPTIONS[number]} "* ]] || continue
    FORWARDED_OPTIONS+=("${GIVEN_OPTIONS[number]}")
    [[ ${VALUE_NAME[${GIVEN_OPTIONS[number]}]} == none ]] || FORWARDED_OPTIONS+=("${GIVEN_VALUES[number]}")
  done
}
