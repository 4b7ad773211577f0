# shellcheck shell=bash
#
# Find a run that somebody has started, perhaps elsewhere, and ask its nodes: all at once, each over one connection.
#
# Sourced behind common.bash and ssh.bash, never run.
#
#   open_connections
#   find_run RUN; ask_nodes look_at --seconds 1

LOG_DIR=logs
ASKED_PYTHON=''

RUN=''                # folder of the run
MARK=''               # the same, as its processes carry it in MUSTER_RUN_DIR
RUN_PYTHON=''         # interpreter of its ranks
LAUNCHER_IS=''        # here, gone, elsewhere, or in the job: it is its batch script
LAUNCHER_HOST='' LAUNCHER=0 LAUNCHER_SINCE='' # where it was started, its process id there, and its start
RUN_GRACE=0           # seconds that it gives to ranks that are asked to stop
JOB=''                # number of its SLURM job
JOB_STATE=''          # as squeue has it, with the reason: RUNNING None, PENDING Resources; empty when it is over
NODES=()
declare -A ADDRESS=() # of the nodes that are reached over ssh
declare -A COUNT=() FIRST_RANK=() # of each node: how many ranks, and which is the first
ANSWERS=''            # folder: NODE.out, NODE.err and NODE.code


# Take an option that all have who look for a run.
# shellcheck disable=SC2034 # pick_python is called by who sources this
take_common_option() { # <option> [value...]
  need_value "$@"
  case $1 in
    --log-dir) LOG_DIR=$2 ;;
    --python) ASKED_PYTHON=$2 ;;
  esac
}


# shellcheck disable=SC2034 # some are read by who sources this alone
find_run() { # <RUN>
  local words
  ANSWERS=$(mktemp -d "$SOCKETS/answers-XXXXXX") # goes when the connections go
  where_is "$PWD" "$1" || where_is "$(folder_of_job "$1")" "$1" || no_run "$1"
  mapfile -d '' words <"$ANSWERS/whereabouts"
  RUN=${words[0]} MARK=${words[1]} RUN_PYTHON=${words[2]}
  LAUNCHER_IS=${words[3]} LAUNCHER_HOST=${words[4]} LAUNCHER=${words[5]} LAUNCHER_SINCE=${words[6]}
  RUN_GRACE=${words[7]} JOB=${words[8]}
  set -- "${words[@]:9}"
  while (($#)); do
    NODES+=("$1")
    [[ ! $2 ]] || ADDRESS[$1]=$2
    COUNT[$1]=$3 FIRST_RANK[$1]=$4
    shift 4
  done
  cd / # a folder that is everywhere: on_node goes where we are
  [[ ! $JOB ]] || look_for_job
}


# The same process, not one that has its number now.
launcher_lives() {
  local stat fields
  [[ $LAUNCHER_IS == here ]] && read -r stat 2>/dev/null <"/proc/$LAUNCHER/stat" || return 1
  read -r -a fields <<<"${stat##*) }"
  [[ ${fields[0]} != Z && ${fields[19]} == "$LAUNCHER_SINCE" ]]
}


where_is() { # <folder where a path begins> <RUN>
  [[ $1 ]] && kit_python runs.lookup --from "$1" --log-dir "$LOG_DIR" -- "$2" >"$ANSWERS/whereabouts" 2>"$ANSWERS/why"
}


# In which somebody has submitted it, perhaps another than that in which we are asked.
folder_of_job() { # <RUN>
  local told
  is_job "$1" && told=$(scontrol show job --oneliner "$1" 2>/dev/null) || return 0
  told=${told%%$'\n'*} # of an array, there is a line for each element
  [[ ! $told =~ \ WorkDir=(.*)\ StdErr= ]] || printf '%s\n' "${BASH_REMATCH[1]}"
}


is_job() { # <RUN>
  [[ $1 =~ ^[0-9]+(_[0-9]+)?$ ]]
}


# A job that waits has no run yet, and one that was refused never had.
no_run() { # <RUN>
  local told
  if is_job "$1"; then
    type -P scontrol >/dev/null || die_usage "RUN '$1': no run of job $1 in $LOG_DIR, and there is no SLURM here to be" \
      "asked; call it where the job was submitted, or name its run directory"
    JOB_STATE=$(state_of_job "$1")
    [[ ! $JOB_STATE ]] || job_without_run "$1"
    told=$(scontrol show job --oneliner "$1" 2>&1 || true)
    [[ ! $told =~ JobState=([A-Z_]+).*\ ExitCode=([0-9]+).*\ StdErr=(.*)\ StdIn= ]] ||
      die "job $1 has ended before it had a run (${BASH_REMATCH[1]}, exit code ${BASH_REMATCH[2]}): see ${BASH_REMATCH[3]};" \
        "where that is missing, so was its folder"
    die_usage "RUN '$1': no run of job $1 in $LOG_DIR, and SLURM knows of none (${told##*$'\n'}); of jobs that ended" \
      "long ago: sacct -j $1"
  fi
  die_usage "$(<"$ANSWERS/why")"
}


# A batch script is there as long as its job; and without the job there are no processes that could be asked about.
look_for_job() {
  JOB_STATE=$(state_of_job "$JOB")
  if ! job_runs; then
    LAUNCHER_IS=gone
  elif [[ $LAUNCHER_IS == elsewhere && " ${NODES[*]} " == *" $LAUNCHER_HOST "* ]]; then
    LAUNCHER_IS=job
  fi
}


state_of_job() { # <number>
  squeue --noheader --jobs "$1" --format '%T %r' 2>/dev/null | head -n 1 || true
}


job_runs() {
  [[ $JOB_STATE == RUNNING* || $JOB_STATE == SUSPENDED* ]]
}


# Beside the tasks that are there, however busy the node is.
in_job() { # <node> <command...>
  (
    forget_job
    exec ${ANSWER_WITHIN:+timeout -s KILL "$ANSWER_WITHIN"} srun --overlap --jobid "$JOB" --nodes 1 --ntasks 1 \
      --nodelist "$1" --input none --quiet "${@:2}"
  )
}


# Another one, that this shell may be in.
forget_job() {
  local name
  for name in "${!SLURM_@}"; do
    [[ $name == SLURM_CONF ]] || unset "$name"
  done
}


# Run a command on a node of the run, wherever that is. What a job has left lies in its folder, which is shared.
visit() { # <node> <command...>
  if [[ $JOB ]] && job_runs; then
    in_job "$@"
  elif [[ $JOB ]]; then
    "${@:2}"
  elif [[ ${ADDRESS[$1]-} ]]; then
    on_node "$@"
  else
    "${@:2}"
  fi
}


# Run a function for every node at once; what came of it is in ANSWERS.
ask_nodes() { # <function> [its words, behind the node...]
  local node asked=()
  rm -f -- "$ANSWERS"/*.code
  for node in "${NODES[@]}"; do
    ask_node "$1" "$node" "${@:2}" &
    asked+=($!)
  done
  wait "${asked[@]}" || true
}


ask_node() { # <function> <node> [words...]
  local code=0
  "$@" </dev/null >"$ANSWERS/$2.out" 2>"$ANSWERS/$2.err" || code=$?
  echo "$code" >"$ANSWERS/$2.code"
}


look_at() { # <node> [more of look's options...]
  visit "$1" "$RUN_PYTHON" "$KIT/scripts/lib/module.py" runs.node_status --run "$MARK" --node "$1" \
    --count "${COUNT[$1]}" --first-rank "${FIRST_RANK[$1]}" "${@:2}"
}
