# shellcheck shell=bash
#
# What all launchers share: the common options, the folder of a run, starting nodes, and the verdict.
#
# Sourced behind common.bash, never run. A launcher's main reads as the story:
#
#   parse_options "$@"; set -- "${POSITIONAL[@]}"
#   check_script; check_config "$CONFIG" RANKS
#   open_run RANKS NODE...; run_nodes start_nodes, which calls start_node NODE COMMAND... for each

# shellcheck source=scripts/lib/watch.bash
source "$KIT/scripts/lib/watch.bash"

SCRIPT='' MODULE=''      # what to train: a file or a directory with a __main__.py, or a module
SCRIPT_FILE=''           # the file of SCRIPT that Python begins with
PORT_OF_ENVIRONMENT=${MASTER_PORT-} # see take_port_of_environment
MASTER_PORT=''
RENDEZVOUS_TIMEOUT=''    # seconds in which the agents of all nodes must have joined; empty is torchrun's own, 600
ENVIRONMENT=()           # NAME=VALUE for the ranks; never part of a command line, which every user can see
MAX_RESTARTS=0
LOG_DIR=logs
AGENT=fast
PLAIN_AGENT=torch.distributed.run # with --agent torchrun
FAST_OPTIONS=()                   # of the kit's own agent
PREFLIGHT=1 DETACH=0 SYNC=0
HOSTFILE='' EXCLUDE=''   # for launchers over several nodes
MAX_NPROC=1024           # on one machine: more is a slip of the finger
MANY_A_CORE=4            # ranks on one CPU core: more are worth a warning
GRACE=${MUSTER_GRACE:-8} # seconds to write a checkpoint when asked to stop
CONFIG_ARGS=() USER_ARGS=() POSITIONAL=()
ASKED_PYTHON=''
SIGNAL=''                # the one that asked us to stop
CALL=()                  # this launcher's own command line
PLACES=()                # of each node over ssh: [user@]name:processes
FIRST_RANK=0             # on the first of the nodes
AGAIN=''                 # folder of the same run before SLURM started it anew
SLURM_JOB=()             # names of the job that this is, its number first


# Split the words into options, POSITIONAL and, behind --, USER_ARGS.
# shellcheck disable=SC2034 # some are read by the launchers alone
parse_options() { # <word...>
  CALL=("$PROGRAM_FILE" "$@")
  while (($#)); do
    case $1 in
      --script=* | --python=* | --master-port=* | --env=* | --env-file=* | --max-restarts=* | --log-dir=* | --agent=* | \
        --rendezvous-timeout=* | --hang-timeout=* | --hostfile=* | --exclude=*)
        set -- "${1%%=*}" "${1#*=}" "${@:2}"
        continue
        ;;
      --script) need_value "$@"; SCRIPT=$2; shift ;;
      -m) need_value "$@"; MODULE=$2; shift ;;
      --python) need_value "$@"; ASKED_PYTHON=$2; shift ;;
      --master-port) need_value "$@"; MASTER_PORT=$2; shift ;;
      --env) need_value "$@"; add_environment --env "$2"; shift ;;
      --env-file) need_value "$@"; read_env_file "$2"; shift ;;
      --max-restarts) need_value "$@"; MAX_RESTARTS=$2; shift ;;
      --hang-timeout) need_value "$@"; HANG_TIMEOUT=$2; shift ;;
      --log-dir) need_value "$@"; LOG_DIR=$2; shift ;;
      --agent) need_value "$@"; AGENT=$2; shift ;;
      --rendezvous-timeout) need_value "$@"; RENDEZVOUS_TIMEOUT=$2; shift ;;
      --hostfile) need_value "$@"; HOSTFILE=$2; shift ;;
      --exclude) need_value "$@"; EXCLUDE=$2; shift ;;
      --sync) SYNC=1 ;;
      --no-preflight) PREFLIGHT=0 ;;
      --detach) DETACH=1 ;;
      --dry-run) DRY_RUN=1 ;;
      --quiet) QUIET=1 ;;
      --help | -h) usage; exit ;;
      --) USER_ARGS=("${@:2}"); break ;;
      -[!0-9]*) die_usage "$1: unknown option; arguments of the script go after --$(suggest_option "$1")" ;;
      *) POSITIONAL+=("$1") ;;
    esac
    shift
  done
  check_options
}


# The option that was meant: it differs from the given one in two letters in one place at most.
suggest_option() { # <unknown option>
  local known given=${1%%=*} same_start same_end
  for known in $(declare -f parse_options | grep -oE -- '--[a-z-]{3,}'); do
    same_start=0 same_end=0
    while ((same_start < ${#known})) && [[ ${given:same_start:1} == "${known:same_start:1}" ]]; do
      same_start=$((same_start + 1))
    done
    while ((same_end < ${#known} - same_start)) && [[ ${given: -1-same_end:1} == "${known: -1-same_end:1}" ]]; do
      same_end=$((same_end + 1))
    done
    if ((same_start + same_end >= (${#given} > ${#known} ? ${#given} : ${#known}) - 2)); then
      printf '; did you mean %s?\n' "$known"
      return
    fi
  done
}


check_options() {
  [[ ! $HOSTFILE$EXCLUDE && $SYNC == 0 ]] || declare -F name_nodes >/dev/null ||
    die_usage "--hostfile, --exclude and --sync are about other nodes, and this launcher asks for none"
  [[ ! $SCRIPT || ! $MODULE ]] || die_usage "--script '$SCRIPT' and -m '$MODULE': give one of the two"
  [[ $AGENT == fast || $AGENT == torchrun ]] || die_usage "--agent: expected fast or torchrun, got '$AGENT'"
  is_count "$MAX_RESTARTS" || die_usage "--max-restarts: expected a whole number, got '$MAX_RESTARTS'"
  [[ ! $HANG_TIMEOUT ]] || is_count "$HANG_TIMEOUT" ||
    die_usage "--hang-timeout: expected a whole number of seconds (0 = off), got '$HANG_TIMEOUT'"
  is_count "$GRACE" || die_usage "MUSTER_GRACE: expected a whole number of seconds, got '$GRACE'"
  [[ ! $MASTER_PORT ]] || is_port "$MASTER_PORT" ||
    die_usage "--master-port '$MASTER_PORT': a port is a number from 1 to 65535"
  [[ ! $RENDEZVOUS_TIMEOUT ]] || { is_count "$RENDEZVOUS_TIMEOUT" && ((RENDEZVOUS_TIMEOUT >= 1)); } ||
    die_usage "--rendezvous-timeout: expected a whole number of seconds, 1 or more, got '$RENDEZVOUS_TIMEOUT'"
  # Into a pipe Python would keep back what ranks print; the kit's own agent takes care of that itself.
  [[ $AGENT == fast ]] || ENVIRONMENT=(PYTHONUNBUFFERED=1 "${ENVIRONMENT[@]}")
}


is_nproc() { # <word>
  is_count "$1" && (($1 >= 1 && $1 <= MAX_NPROC))
}


is_count() { # <word>
  [[ $1 =~ ^[0-9]{1,9}$ && ! $1 =~ ^0[0-9] ]]
}


is_port() { # <word>
  is_count "$1" && (($1 >= 1 && $1 <= 65535))
}


# MASTER_PORT of the environment, where no option names a port. Beside RANK or MUSTER_RUN_DIR it is the port of another
# launch, of which this shell is a part, or which has left it there.
take_port_of_environment() {
  [[ ! $MASTER_PORT && $PORT_OF_ENVIRONMENT && ! ${RANK-}${MUSTER_RUN_DIR-} ]] || return 0
  is_port "$PORT_OF_ENVIRONMENT" || die_usage "MASTER_PORT='$PORT_OF_ENVIRONMENT' of the environment: expected a port" \
    "from 1 to 65535; unset it, or name a port with --master-port"
  MASTER_PORT=$PORT_OF_ENVIRONMENT
}


add_environment() { # <where from> <NAME=VALUE>
  [[ $2 =~ ^[A-Za-z_][A-Za-z_0-9]*= ]] || die_usage "$1: expected NAME=VALUE, got '$2'"
  case ${2%%=*} in
    MUSTER_RUN_DIR | MUSTER_METRICS | MUSTER_NODE | MUSTER_NODES | RANK | WORLD_SIZE | LOCAL_RANK | MASTER_ADDR | MASTER_PORT | \
      TORCHELASTIC_* | PET_*)
      die_usage "$1 '${2%%=*}': the launcher sets it; leave it out" ;;
  esac
  ENVIRONMENT+=("$2")
}


# One NAME=VALUE a line, taken as it stands; empty lines and lines that begin with # do not count.
read_env_file() { # <file>
  [[ -f $1 && -r $1 ]] || die_usage "--env-file '$1': cannot be read as a file (looked in $PWD)"
  local line number=0
  (($(wc -c <"$1") <= 1000000)) || die_usage "--env-file '$1': larger than 1 MB; name a file of NAME=VALUE lines"
  (($(tr -d '\0' <"$1" | wc -c) == $(wc -c <"$1"))) || die_usage "--env-file '$1': holds a NUL byte: no text file"
  while IFS= read -r line || [[ $line ]]; do
    number=$((number + 1))
    [[ $line != *$'\r' ]] || die_usage "--env-file '$1', line $number: ends with a carriage return, as files from" \
      "Windows have it; without them: tr -d '\\r' <old >new"
    [[ ! $line || $line == '#'* ]] || add_environment "--env-file '$1', line $number:" "$line"
  done <"$1"
}


# ---------------------------------------------------------------- is it a call that can work?

# Pick the Python of the ranks, and say which one where the user may expect another.
pick_rank_python() {
  pick_python "$ASKED_PYTHON"
  ((${#PYTHONS[@]} < 2)) || log "Python: $PYTHON (${PYTHON_ORIGINS[0]}), not $(not_picked); --python names another"
}


not_picked() {
  local number line=''
  for ((number = 1; number < ${#PYTHONS[@]}; number++)); do
    line+="${line:+, }${PYTHONS[number]} (${PYTHON_ORIGINS[number]})"
  done
  printf '%s\n' "$line"
}


# Set WORK, the words that name what each rank runs.
check_script() {
  if [[ $MODULE ]]; then
    WORK=(-m "$MODULE")
    short_python "$KIT/scripts/lib/find.py" "$MODULE" ||
      die_usage "-m '$MODULE': '$PYTHON' has no such module (looked in $PWD too)"
    return
  fi
  WORK=("${SCRIPT:-$KIT/train.py}")
  SCRIPT_FILE=${WORK[0]}
  [[ ! -d $SCRIPT_FILE ]] || SCRIPT_FILE+=/__main__.py
  [[ -e ${WORK[0]} ]] || die_usage "--script '$SCRIPT': there is no such file (looked in $PWD)"
  [[ -e $SCRIPT_FILE ]] || die_usage "--script '$SCRIPT': a directory without a __main__.py"
  [[ -f $SCRIPT_FILE && -r $SCRIPT_FILE ]] || die_usage "--script '$SCRIPT': cannot be read as a file"
}


# CONFIG reaches the script as --config CONFIG; - passes nothing. What the kit's own trainer will read is
# checked to the last key before anything starts.
check_config() { # <CONFIG> <number of ranks>
  [[ $1 != - ]] || return 0
  [[ -e $1 ]] || die_usage "CONFIG '$1': there is no such file (looked in $PWD); - stands for none"
  [[ -f $1 && -r $1 ]] || die_usage "CONFIG '$1': cannot be read as a file"
  CONFIG_ARGS=(--config "$1")
  if [[ ! $MODULE && ! $SCRIPT ]]; then
    short_python "$KIT/scripts/lib/config.py" "$2" --config "$1" "${USER_ARGS[@]}" || exit "$EXIT_USAGE"
  fi
}


check_torch() {
  short_python "$KIT/scripts/lib/find.py" torch ||
    die_usage "'$PYTHON' has no PyTorch; install it there, or name another Python with --python PATH"
}


give_environment() {
  local word
  for word in "${ENVIRONMENT[@]}"; do
    export "${word?}"
  done
}


# How many GPUs this machine offers; a rank needs one for itself where there are any.
check_gpus() { # <number of ranks on this machine>
  local gpus
  ((PREFLIGHT)) || return 0
  gpus=$(give_environment && count_gpus) || die "cannot count the GPUs: see the line above"
  ((gpus > 0 || $1 <= MANY_A_CORE)) || check_cores "$1"
  ((gpus == 0 || $1 <= gpus)) || die_usage "NPROC $1: this machine has $(counted "$gpus" GPU), and each process needs its own"
}


# Counting takes Python 0.1 s: not where there is neither nvidia-smi nor a device.
count_gpus() {
  if type -P nvidia-smi >/dev/null || compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
    kit_python host.gpus
  else
    echo 0
  fi
}


check_cores() { # <number of ranks on this machine>
  local cores
  cores=$(kit_python launch.threads) || die "cannot count the CPU cores: see the line above"
  (($1 <= MANY_A_CORE * cores)) || warn "NPROC $1: many for $(counted "$cores" "CPU core"), which they have to share"
}


check_port() {
  [[ $MASTER_PORT ]] && ((PREFLIGHT)) || return 0
  kit_python host.network "$MASTER_PORT" ||
    die_with "$EXIT_UNFIT" "--master-port $MASTER_PORT: in use on this machine; choose another, or leave it out"
}


# ---------------------------------------------------------------- the folder of the run

open_run() { # <number of ranks> <node...>
  local name=${MODULE:-${WORK[0]}}
  [[ ! -d $name ]] || name=$(cd -- "$name" && pwd)
  name=${name##*/}
  show_call
  RUN=$(kit_python runs.run_directory create --logs "$(absolute "$LOG_DIR")" --name "${name%.py}" --nproc "$1" \
    --nodes "${@:2}" ${PLACES:+--places "${PLACES[@]}"} --first-rank "$FIRST_RANK" --launcher $$ --grace "$GRACE" \
    ${AGAIN:+--again "$AGAIN"} ${SLURM_JOB:+--slurm-job "${SLURM_JOB[@]}"} \
    --script "${MODULE:-${WORK[0]}}" --config "${CONFIG_ARGS[1]:--}" --cwd "$PWD" --python "$PYTHON" \
    -- "${SHOWN_CALL[@]}") || exit
  record "run ${RUN##*/}: $(counted "$1" process processes) on ${*:2}"
  # Who calls a launcher may name a file in which to be told the folder.
  [[ ! ${MUSTER_RUN_FILE-} ]] || printf '%s\n' "$RUN" >"$MUSTER_RUN_FILE"
  unset MUSTER_RUN_FILE
}


# The launcher's own command line without the values of --env, in SHOWN_CALL.
show_call() {
  local word before=''
  SHOWN_CALL=()
  for word in "${CALL[@]}"; do
    if [[ $before != -- && $word == --env=*=* ]]; then
      word=${word%%=*}=$(name_alone "${word#*=}")
    elif [[ $before == --env ]]; then
      word=$(name_alone "$word")
    fi
    SHOWN_CALL+=("$word")
    [[ $before == -- ]] || before=$word
  done
}


name_alone() { # <NAME=VALUE>
  printf '%s\n' "${1%%=*}=..."
}


# A command for the eye, without the values of its environment.
shown() { # <command...>
  local entry shown=()
  for entry in "${ENVIRONMENT[@]}"; do
    shown+=("$(name_alone "$entry")")
  done
  quote ${shown:+env "${shown[@]}"} "$@"
}


absolute() { # <path>
  [[ $1 == /* ]] && printf '%s\n' "$1" || printf '%s\n' "$PWD/$1"
}


# What happens, for the person and for launcher.log.
record() { # <message...>
  log "$@"
  printf '%(%F %T)T %s\n' -1 "$*" >>"$RUN/launcher.log" || true
}


# ---------------------------------------------------------------- what runs

# The words that start the agent, in COMMAND: torchrun's options stand between AGENT_WORDS and SCRIPT_WORDS.
agent_command() { # <torchrun's options...>
  agent_words
  # shellcheck disable=SC2034 # it is for the caller
  COMMAND=("${AGENT_WORDS[@]}" "$@" "${SCRIPT_WORDS[@]}")
}


agent_words() {
  AGENT_WORDS=("$PYTHON" "$KIT/scripts/lib/agent.py")
  if [[ $AGENT == fast ]]; then
    AGENT_WORDS+=("${FAST_OPTIONS[@]}")
  else
    AGENT_WORDS+=(--plain "$PLAIN_AGENT")
  fi
  [[ ! $RENDEZVOUS_TIMEOUT ]] || AGENT_WORDS+=(--rdzv-conf "timeout=$RENDEZVOUS_TIMEOUT")
  # The -- keeps torchrun from taking the script's own words for (abbreviated) options.
  SCRIPT_WORDS=(--tee 3 ${MODULE:+-m} -- "${MODULE:-${WORK[0]}}" "${CONFIG_ARGS[@]}" "${USER_ARGS[@]}")
}


# Start this very launcher once more, apart from the terminal, and return when it has a folder for the run.
detach() {
  local words=() word out child told
  for word in "${CALL[@]:0:${#CALL[@]}-${#USER_ARGS[@]}}"; do
    [[ $word == --detach ]] || words+=("$word")
  done
  mkdir -p -- "$LOG_DIR"
  out=$(mktemp -- "$LOG_DIR/detached-XXXXXX.log")
  told=$(mktemp)
  MUSTER_RUN_FILE=$told setsid "${words[@]}" "${USER_ARGS[@]}" </dev/null >"$out" 2>&1 &
  child=$!
  until [[ -s $told ]] || ! kill -0 "$child" 2>/dev/null; do
    sleep 0.05
  done
  RUN=$(<"$told")
  rm -f -- "$told"
  [[ $RUN ]] || { cat -- "$out" >&2 && wait "$child"; }
  log "run ${RUN##*/} goes on in the background, process $child:" \
    "$KIT/scripts/status.sh $(quote "$RUN") shows it, stop.sh stops it, $out has what it says"
}
