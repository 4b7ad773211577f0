# shellcheck shell=bash
#
# What all launchers share: the common options, the folder of a run, starting nodes, and the verdict.
#
# Sourced behind common.bash, never run. A launcher's main reads as the story:
#
#   parse_options "$@"; set -- "${POSITIONAL[@]}"
#   check_script; check_config "$CONFIG" RANKS
#   open_run RANKS NODE...; run_nodes start_nodes, which calls start_node NODE COMMAND... for each

SCRIPT='' MODULE=''      # what to train: a file, or a module
MASTER_PORT=''
ENVIRONMENT=()           # NAME=VALUE words for the ranks
MAX_RESTARTS=0
LOG_DIR=logs
AGENT=fast
PREFLIGHT=1 DETACH=0
HOSTFILE='' EXCLUDE=''   # for launchers over several nodes
MAX_NPROC=1024           # on one machine: more is a slip of the finger
GRACE=${MUSTER_GRACE:-8} # seconds to write a checkpoint when asked to stop
CONFIG_ARGS=() USER_ARGS=() POSITIONAL=()
ASKED_PYTHON=''
SIGNAL=''                # the one that asked us to stop
CALL=()                  # this launcher's own command line


# Split the words into options, POSITIONAL and, behind --, USER_ARGS.
# shellcheck disable=SC2034 # some are read by the launchers alone
parse_options() { # <word...>
  CALL=("$PROGRAM_FILE" "$@")
  while (($#)); do
    case $1 in
      --script=* | --python=* | --master-port=* | --env=* | --env-file=* | --max-restarts=* | --log-dir=* | --agent=* | \
        --hostfile=* | --exclude=*)
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
      --log-dir) need_value "$@"; LOG_DIR=$2; shift ;;
      --agent) need_value "$@"; AGENT=$2; shift ;;
      --hostfile) need_value "$@"; HOSTFILE=$2; shift ;;
      --exclude) need_value "$@"; EXCLUDE=$2; shift ;;
      --no-preflight) PREFLIGHT=0 ;;
      --detach) DETACH=1 ;;
      --dry-run) DRY_RUN=1 ;;
      --quiet) QUIET=1 ;;
      --help | -h) usage; exit ;;
      --) USER_ARGS=("${@:2}"); break ;;
      -[!0-9]*) die_usage "$1: unknown option" ;;
      *) POSITIONAL+=("$1") ;;
    esac
    shift
  done
  check_options
}


check_options() {
  [[ ! $HOSTFILE$EXCLUDE ]] || declare -F name_nodes >/dev/null ||
    die_usage "--hostfile and --exclude name nodes, and this launcher asks for none"
  [[ ! $SCRIPT || ! $MODULE ]] || die_usage "--script '$SCRIPT' and -m '$MODULE': give one of the two"
  [[ $AGENT == fast || $AGENT == torchrun ]] || die_usage "--agent '$AGENT': fast or torchrun is wanted"
  is_count "$MAX_RESTARTS" || die_usage "--max-restarts '$MAX_RESTARTS': a whole number is wanted"
  is_count "$GRACE" || die_usage "MUSTER_GRACE='$GRACE': a whole number of seconds is wanted"
  [[ ! $MASTER_PORT ]] || { is_count "$MASTER_PORT" && ((MASTER_PORT >= 1 && MASTER_PORT <= 65535)); } ||
    die_usage "--master-port '$MASTER_PORT': a port is a number from 1 to 65535"
}


is_nproc() { # <word>
  is_count "$1" && (($1 >= 1 && $1 <= MAX_NPROC))
}


is_count() { # <word>
  [[ $1 =~ ^[0-9]{1,9}$ && ! $1 =~ ^0[0-9] ]]
}


add_environment() { # <where from> <NAME=VALUE>
  [[ $2 =~ ^[A-Za-z_][A-Za-z_0-9]*= ]] || die_usage "$1 '$2': NAME=VALUE is wanted"
  ENVIRONMENT+=("$2")
}


# One NAME=VALUE a line, taken as it stands; empty lines and lines that begin with # do not count.
read_env_file() { # <file>
  [[ -r $1 && ! -d $1 ]] || die_usage "--env-file '$1': cannot read it (looked in $PWD)"
  local line number=0
  (($(tr -d '\0' <"$1" | wc -c) == $(wc -c <"$1"))) || die_usage "--env-file '$1': holds a NUL byte: no text file"
  while IFS= read -r line || [[ $line ]]; do
    number=$((number + 1))
    [[ $line != *$'\r' ]] || die_usage "--env-file '$1', line $number: ends with a carriage return, as files from" \
      "Windows have it; without them: tr -d '\\r' <old >new"
    [[ ! $line || $line == '#'* ]] || add_environment "--env-file '$1', line $number:" "$line"
  done <"$1"
}


# ---------------------------------------------------------------- is it a call that can work?

# Set WORK, the words that name what each rank runs.
check_script() {
  if [[ $MODULE ]]; then
    WORK=(-m "$MODULE")
    "$PYTHON" "$KIT/scripts/lib/find.py" "$MODULE" ||
      die_usage "-m '$MODULE': '$PYTHON' has no such module (looked in $PWD too)"
    return
  fi
  WORK=("${SCRIPT:-$KIT/train.py}")
  [[ -e ${WORK[0]} ]] || die_usage "--script '$SCRIPT': there is no such file (looked in $PWD)"
  [[ -f ${WORK[0]} && -r ${WORK[0]} ]] || die_usage "--script '$SCRIPT': cannot be read as a file"
}


# CONFIG reaches the script as --config CONFIG; - passes nothing. What the kit's own trainer will read is
# checked to the last key before anything starts.
check_config() { # <CONFIG> <number of ranks>
  [[ $1 != - ]] || return 0
  [[ -e $1 ]] || die_usage "CONFIG '$1': there is no such file (looked in $PWD); - stands for none"
  [[ -f $1 && -r $1 ]] || die_usage "CONFIG '$1': cannot be read as a file"
  CONFIG_ARGS=(--config "$1")
  if [[ ! $MODULE && ! $SCRIPT ]]; then
    "$PYTHON" "$KIT/scripts/lib/config.py" "$2" --config "$1" "${USER_ARGS[@]}" || exit "$EXIT_USAGE"
  fi
}


check_torch() {
  "$PYTHON" "$KIT/scripts/lib/find.py" torch ||
    die_usage "'$PYTHON' has no PyTorch: activate your virtual environment, or name another with --python PATH"
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
  gpus=$(give_environment && kit_python doctor --gpus) || die "cannot count the GPUs: see the line above"
  ((gpus > 0 || $1 <= 4 * $(nproc))) || warn "NPROC $1: many for $(nproc) CPU core(s), which they will have to share"
  ((gpus == 0 || $1 <= gpus)) || die_usage "NPROC $1: this machine has $gpus GPU(s), and each process needs its own"
}


check_port() {
  [[ $MASTER_PORT ]] && ((PREFLIGHT)) || return 0
  kit_python doctor --port-free "$MASTER_PORT" ||
    die_usage "--master-port $MASTER_PORT: in use on this machine; name another, or leave it out"
}


# ---------------------------------------------------------------- the folder of the run

open_run() { # <number of ranks> <node...>
  local name=${MODULE:-${WORK[0]##*/}}
  RUN=$(kit_python run_folder create --logs "$(absolute "$LOG_DIR")" --name "${name%.py}" --nproc "$1" \
    --nodes "${@:2}" --script "${MODULE:-${WORK[0]}}" --config "${CONFIG_ARGS[1]:--}" --cwd "$PWD" \
    --python "$PYTHON" -- "${CALL[@]}") || exit
  tell "run ${RUN##*/}: $1 process(es) on ${*:2}"
}


absolute() { # <path>
  [[ $1 == /* ]] && printf '%s\n' "$1" || printf '%s\n' "$PWD/$1"
}


# What happens, for the person and for launcher.log.
tell() { # <message...>
  log "$@"
  printf '%(%F %T)T %s\n' -1 "$*" >>"$RUN/launcher.log" || true
}


# ---------------------------------------------------------------- start, wait, judge

# Every node has a client: here the process that runs node.sh, with ssh the one that talks to the node. Its standard
# input is the node's dead man's switch, through which it is also told to stop; how it ended comes through EVENTS.
declare -A CLIENT=() SWITCH=() # of each node that has not ended: its process, the switch
CONSOLES=()                    # processes that show what nodes say
STATUS=0                       # of the first node that ended badly
PATIENCE=''                    # seconds without a word of the launcher after which a node gives it up
HURRY=5                        # seconds between the request to stop and the order to end, when a node has failed


# Run a command with its words on a node; a launcher over ssh has a door of its own.
on_node() { # <node> <command> [word...]
  "${@:2}"
}


# The words that start the agent: torchrun's options, then the script.
agent_command() { # <torchrun's options...>
  local agent=("$KIT/scripts/lib/agent.py") fresh=()
  if [[ $AGENT == torchrun ]]; then
    agent=(-m torch.distributed.run)
    fresh=(PYTHONUNBUFFERED=1)
  fi
  COMMAND=()
  if ((${#ENVIRONMENT[@]} + ${#fresh[@]})); then
    COMMAND=(env "${fresh[@]}" "${ENVIRONMENT[@]}")
  fi
  # The -- keeps torchrun from taking the script's own words for (abbreviated) options.
  COMMAND+=("$PYTHON" "${agent[@]}" "$@" --tee 3 ${MODULE:+-m} -- "${MODULE:-${WORK[0]}}" "${CONFIG_ARGS[@]}" "${USER_ARGS[@]}")
}


start_node() { # <node> <command...>
  local console switch
  pipe_into console show_rank_0 "$1"
  CONSOLES+=($!)
  pipe_into switch tell_end "$1" on_node "$1" "$KIT/scripts/lib/node.sh" --run "$RUN" --node "$1" --grace "$GRACE" \
    ${PATIENCE:+--patience "$PATIENCE"} --source "$(node_env)" -- "${@:2}" >&"$console" 2>&1
  CLIENT[$1]=$! SWITCH[$1]=$switch
  exec {console}>&-
}


# The console shows rank 0 as it speaks; what the agent says of itself goes to stderr. The log has everybody.
show_rank_0() { # <node>
  trap '' INT TERM HUP TSTP
  let_go_of_switches
  exec stdbuf -oL sed -n -e "s/^\[$1:0\] //p;t" -e "/^\[$1:[0-9]*\] /!w /dev/stderr"
}


tell_end() { # <node> <command...>
  local status=0
  trap : TERM HUP # not ignored: node.sh has a use for them
  let_go_of_switches
  "${@:2}" || status=$?
  echo "$1 $status" >&"$EVENTS"
}


# What runs beside the launcher must hold no node's switch: else that node would not notice that the launcher is gone.
let_go_of_switches() {
  local switch
  for switch in "${SWITCH[@]}"; do
    exec {switch}>&-
  done
}


# config/node_env.sh of the working folder, else of the kit.
node_env() {
  if [[ -e config/node_env.sh ]]; then
    absolute config/node_env.sh
  else
    printf '%s\n' "$KIT/config/node_env.sh"
  fi
}


# To the last node's end. The first that ends badly ends all the others.
wait_for_nodes() {
  local node status
  while ((${#CLIENT[@]})); do
    if read -r -t 0.5 -u "$EVENTS" node status; then
      ended "$node" "$status"
    fi
    if [[ $DEADLINE ]] && ((SECONDS >= DEADLINE)); then
      press_on
    fi
  done
  wait "${CONSOLES[@]}" || true
  CONSOLES=()
}


ended() { # <node> <status>
  local switch=${SWITCH[$1]}
  exec {switch}>&-
  unset "CLIENT[$1]" "SWITCH[$1]"
  if (($2 != 0 && STATUS == 0)); then
    STATUS=$(($2 == 255 ? EXIT_UNFIT : $2)) # 255: ssh has lost the node
    [[ $DEADLINE ]] || next_order $(($2 == EXIT_STOPPED ? 30 : 0)) stop # who stops with a checkpoint may still write
  fi
}


# What is said to the nodes that are left when the time has come: stop, then kill, then nothing more.
next_order() { # <seconds from now> <order>
  DEADLINE=$((SECONDS + $1)) ORDER=$2
}


press_on() {
  case $ORDER in
    stop) order stop; next_order "$HURRY" kill ;;
    kill) order kill; next_order "$HURRY" abandon ;;
    abandon) abandon ;;
  esac
}


order() { # <stop or kill>
  local switch
  for switch in "${SWITCH[@]}"; do
    echo "$1" >&"$switch" || true # it may just have ended
  done 2>/dev/null
}


# A node that does not answer: it ends its processes by itself when it has not heard of us for a while.
abandon() {
  local node
  for node in "${!CLIENT[@]}"; do
    tell "$node does not answer; what runs there ends ${PATIENCE:-0} s after it last heard from here"
    kill -KILL "${CLIENT[$node]}" 2>/dev/null || true
    ended "$node" "$EXIT_UNFIT"
  done
}


# A person, or the system, asks us to stop: the nodes are told, and told again when we are.
interrupted() { # <signal>
  if [[ $SIGNAL ]]; then
    order kill
    next_order "$HURRY" abandon
    return
  fi
  SIGNAL=$1
  tell "$1: stopping; up to $GRACE s to write a checkpoint, once more $1 to end at once"
  order stop
  next_order $((GRACE + HURRY)) abandon # a node keeps the grace itself
}


watch_signals() {
  local name
  trap '' PIPE # a node may end while it is told something
  for name in INT TERM HUP; do
    # shellcheck disable=SC2064
    trap "interrupted $name" "$name"
  done
}


# A word to each node every few seconds, as long as this shell lives: by its silence a node knows that it is cut off.
keep_company() {
  local switch status
  trap '' INT TERM HUP TSTP PIPE
  while true; do
    read -r -t $((PATIENCE / 4)) _ && status=0 || status=$?
    ((status > 128)) || return 0
    for switch in "${SWITCH[@]}"; do
      echo >&"$switch" || true
    done
  done 2>/dev/null
}


# Whose failure came first, and the exit code of it all in CODE.
judge() {
  local asked=()
  case $SIGNAL in
    INT) asked=(--exit-code "$EXIT_INTERRUPTED") ;;
    TERM | HUP) asked=(--exit-code "$EXIT_TERMINATED") ;;
    *) asked=(--exit-code "$STATUS") ;;
  esac
  kit_python verdict "$RUN" "${asked[@]}" && CODE=0 || CODE=$?
  if [[ -e $RUN/metrics.jsonl ]]; then
    kit_python report "$RUN" >/dev/null || warn "$RUN/report.html: could not be written"
  fi
}


# Whether the failure is one that another try may mend: not a wrong call, and nobody asked us to stop.
may_restart() {
  [[ ! $SIGNAL ]] && ((CODE != 0 && CODE != EXIT_USAGE && CODE != EXIT_STOPPED && RESTARTS < MAX_RESTARTS))
}


# Keep what the failed try left, and make room for the next.
next_try() {
  RESTARTS=$((RESTARTS + 1))
  mkdir -- "$RUN/try_$RESTARTS"
  mv -- "$RUN/errors" "$RUN/ranks" "$RUN/verdict.json" "$RUN"/node_* "$RUN/try_$RESTARTS/"
  mkdir -- "$RUN/errors" "$RUN/ranks"
  tell "exit code $CODE: starting again, $RESTARTS of $MAX_RESTARTS, from the newest good checkpoint"
}


# Start the nodes, wait, judge; again while --max-restarts allows it. Sets CODE.
run_nodes() { # <function that starts them> [its words...]
  RESTARTS=0
  open_events
  watch_signals
  while true; do
    STATUS=0 DEADLINE='' ORDER=''
    "$@"
    [[ ! $PATIENCE ]] || pipe_into COMPANY keep_company
    wait_for_nodes
    [[ ! $PATIENCE ]] || exec {COMPANY}>&-
    judge
    may_restart || break
    next_try
  done
}


# Both ends in one: who tells of his end never waits for a reader.
open_events() {
  local folder
  folder=$(mktemp -d)
  mkfifo -- "$folder/pipe"
  exec {EVENTS}<>"$folder/pipe"
  rm -r -- "$folder"
}


# Start this very launcher once more, apart from the terminal, and return.
detach() {
  local words=() word out
  for word in "${CALL[@]:0:${#CALL[@]}-${#USER_ARGS[@]}}"; do
    [[ $word == --detach ]] || words+=("$word")
  done
  mkdir -p -- "$LOG_DIR"
  out=$(mktemp -- "$LOG_DIR/detached-XXXXXX.log")
  setsid "${words[@]}" "${USER_ARGS[@]}" </dev/null >"$out" 2>&1 &
  log "started in the background, process $!: watch $out and $LOG_DIR/latest; stop with: kill $!"
}
