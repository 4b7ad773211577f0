# shellcheck shell=bash
#
# What every script of the kit shares: messages, refusals, which Python, and where things are.
#
# Sourced, never run; it defines, and lets Ctrl-C end the script with 130. A script of scripts/ begins like this, so
# that it also works through a symbolic link and from any directory:
#
#   set -euo pipefail
#   # shellcheck source=scripts/lib/common.bash
#   source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
#
# Settings it reads: QUIET=1 silences log, DRY_RUN=1 makes run show its command and not run it.

# Exit codes have one meaning in the whole kit. Any other is the first failing rank's own.
# shellcheck disable=SC2034  # they are for those who source this file
{
  EXIT_USAGE=2         # wrong call or wrong config
  EXIT_UNFIT=69        # a node cannot be reached, or is not fit
  EXIT_STOPPED=75      # stopped on request with a checkpoint written: run again to go on
  EXIT_GAVE_UP=124     # gave up waiting
  EXIT_INTERRUPTED=130 # Ctrl-C
  EXIT_TERMINATED=143  # TERM
}

PROGRAM=${0##*/}                       # the name it was called by
PROGRAM_FILE=$(readlink -f -- "$0")    # the script itself, whatever directory it goes to later
KIT=$(readlink -f -- "${BASH_SOURCE[0]}")
KIT=${KIT%/scripts/lib/*}              # root of the repository, absolute, symbolic links resolved

trap 'exit "$EXIT_INTERRUPTED"' INT


# Report what happens. A closed standard error (a terminal that is gone, `| head`) is no reason to exit.
log() { # <message...>
  [[ ${QUIET:-0} == 1 ]] || printf '%s: %s\n' "$PROGRAM" "$*" >&2 || true
}


warn() { # <message...>
  printf '%s: warning: %s\n' "$PROGRAM" "$*" >&2 || true
}


# 1 node, 2 nodes.
counted() { # <number> <noun> [its plural]
  if (($1 == 1)); then
    echo "1 $2"
  else
    echo "$1 ${3:-$2s}"
  fi
}


# End the script. A message has the subject, the problem, the value and the remedy.
die() { # <message...>
  die_with 1 "$@"
}


die_with() { # <exit code> <message...>
  printf '%s: %s\n' "$PROGRAM" "${*:2}" >&2
  exit "$1"
}


# Refuse a wrong call.
die_usage() { # <message...>
  printf '%s: %s\nTry: %s --help\n' "$PROGRAM" "$*" "$PROGRAM" >&2
  exit "$EXIT_USAGE"
}


# Refuse an option that came last without its value, or with an empty one (often a variable that is not set):
# need_value "$@"
need_value() { # <option> [value] [rest...]
  [[ ${2-} ]] || die_usage "$1 needs a value"
}


# The opening comment of the script is its help.
usage() {
  local line number=0
  while IFS= read -r line && [[ $line == '#' || $line == '# '* || $line == '#!'* ]]; do
    number=$((number + 1))
    ((number > 2)) || [[ $line == '# '* ]] || continue # the shebang, and the line below it
    line=${line#'#'}
    printf '%s\n' "${line# }"
  done <"$PROGRAM_FILE"
}


# Print arguments as one line that a shell reads back as the same arguments.
quote() { # <argument...>
  (($# > 0)) || return 0
  local line
  printf -v line '%q ' "$@"
  printf '%s\n' "${line% }"
}


# Show a command as it can be pasted.
show() { # <command...>
  printf '+ %s\n' "$(quote "$@")" >&2
}


# Show a command that changes something, then run it.
run() { # <command...>
  show "$@"
  if [[ ${DRY_RUN:-0} != 1 ]]; then
    "$@"
  fi
}


# Run a program to its end and return its status. Ctrl-C reaches it by itself, and a TERM that was meant
# for us is handed on to it; INTERRUPTED then says which of the two it was.
run_forwarding_signals() { # <exec or exec_in_environment> <its arguments...>
  local child='' status=0
  INTERRUPTED=
  trap 'SIGNALLED=1 INTERRUPTED=INT' INT
  trap 'SIGNALLED=1 INTERRUPTED=TERM; [[ ! $child ]] || kill -TERM "$child"' TERM
  (trap - INT TERM && "$@") <&0 &
  child=$!
  [[ $INTERRUPTED != TERM ]] || kill -TERM "$child" # it came before there was a child
  join "$child" || status=$?
  trap - TERM
  trap 'exit "$EXIT_INTERRUPTED"' INT
  return "$status"
}


# Run a command of which bash reports nothing: it would print the whole line when the command is killed.
run_unreported() { # <command> [argument...]
  { "$@" 2>&9 9>&-; } 9>&2 2>/dev/null
}


# Wait for a child to its very end and return its own status. `wait` alone returns early when a trap runs:
# a trap that may run meanwhile says so with SIGNALLED=1.
join() { # <process id>
  # `wait` also returns 127 when it has reported the child before, and -1 (bash 5.2) when the child ended in the very
  # moment in which the trap ran: then its last status counts, 128 and the signal.
  local status=127 latest
  while true; do
    SIGNALLED=
    wait "$1" 2>/dev/null && latest=0 || latest=$?
    ((latest == 127 || latest < 0)) || status=$latest
    [[ $SIGNALLED ]] || return "$status"
  done
}


# Set PYTHON, absolute: the one asked for, else the first that list_pythons finds, else python3. Refuses what is not
# there or older than 3.10.
pick_python() { # [value of --python]
  resolve_python "${1-}"
  check_python
}


# The same, but for the version.
resolve_python() { # [value of --python]
  PYTHONS=() PYTHON_ORIGINS=()
  [[ ${1-} ]] || list_pythons
  local python=${1:-${PYTHONS[0]:-python3}}
  PYTHON_ORIGIN=${PYTHON_ORIGINS[0]:-PATH}
  [[ ! ${1-} ]] || PYTHON_ORIGIN=--python
  PYTHON=$(type -P -- "$python") || die_usage "no Python at '$python' (from $PYTHON_ORIGIN): name another with --python PATH"
  # Not resolved further: the link itself is what tells Python its virtual environment.
  [[ $PYTHON == /* ]] || PYTHON=$PWD/$PYTHON
}


check_python() {
  local version
  version=$("$PYTHON" --version 2>&1) || true
  [[ $version =~ ^Python\ ([0-9]+)\.([0-9]+) ]] ||
    die_usage "'$PYTHON' (from $PYTHON_ORIGIN) does not run as Python: name another with --python PATH"
  ((BASH_REMATCH[1] * 1000 + BASH_REMATCH[2] >= 3010)) ||
    die_usage "'$PYTHON' (from $PYTHON_ORIGIN) is $version, older than 3.10: name another with --python PATH"
}


# In PYTHONS the Pythons that could be meant, first the one to take, and in PYTHON_ORIGINS where each comes from. conda
# activates its base environment in every shell, so that is no choice of the user's: it counts as python3.
list_pythons() {
  local conda=${CONDA_PREFIX-}
  PYTHONS=() PYTHON_ORIGINS=()
  [[ ! ${VIRTUAL_ENV-} ]] || list_python "$VIRTUAL_ENV/bin/python" "the active virtual environment"
  if [[ $conda && ${CONDA_DEFAULT_ENV-} != base ]]; then
    list_python "$conda/bin/python" "the active conda environment"
  fi
  [[ ! -e .venv && ! -L .venv ]] || list_python "$PWD/.venv/bin/python" ".venv of the working directory"
  if [[ -x $KIT/.venv/bin/python && ! -e $KIT/.venv/unfinished ]]; then
    list_python "$KIT/.venv/bin/python" "the kit's .venv"
  fi
  if [[ $conda && ${CONDA_DEFAULT_ENV-} == base ]]; then
    list_python python3 "PATH, conda's base environment"
  fi
}


list_python() { # <path or name> <where it comes from>
  local known
  for known in "${PYTHONS[@]}"; do
    [[ ! ${known%/*} -ef ${1%/*} ]] || return 0
  done
  PYTHONS+=("$1") PYTHON_ORIGINS+=("$2")
}


# Run a module of distributed/ that takes a moment, with $PYTHON. The working directory becomes KIT, so paths among the
# arguments must be absolute; an installed Dask (also "distributed") is then never picked up.
kit_python() { # <module> [argument...]
  (trap '' INT && cd -- "$KIT" && unset PYTHONSAFEPATH && exec "$PYTHON" -m "distributed.$1" "${@:2}")
}


# Start a command in the background that reads from a pipe, of which this shell holds the only writing
# end: when the shell is gone, by whatever way, the command reads the end of its input.
# Its process id is in $! afterwards.
start_with_pipe() { # <variable for the file descriptor> <command...>
  local pipe
  exec {pipe}<> <(:) # one that has no name
  {
    exec <"/dev/fd/$pipe" {pipe}>&-
    "${@:2}"
  } &
  exec {PIPE_END}>"/dev/fd/$pipe" {pipe}>&-
  printf -v "$1" '%s' "$PIPE_END"
}


# What another launch left in the environment must not reach this one: PET_* even changes torchrun's options.
clear_launch_environment() {
  unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR MASTER_PORT
  unset "${!PET_@}" "${!TORCHELASTIC_@}"
}


# Give exported variables the values back with which this script was started: it uses some of these names for itself.
# What it has unset stays so, and so does what it exports of SLURM's.
restore_environment() {
  local - inherited inherited_name
  set +u
  while IFS= read -r -d '' inherited; do
    inherited_name=${inherited%%=*}
    [[ $inherited_name =~ ^[A-Za-z_][A-Za-z_0-9]*$ ]] || continue
    [[ $inherited_name != @(_|PWD|OLDPWD|SHLVL|SLURM_*|inherited|inherited_name) ]] || continue
    [[ ${!inherited_name@a} == *x* && ${!inherited_name@a} != *r* ]] || continue
    unset -v "$inherited_name" # it may be an array now
    export "${inherited?}"
  done <"/proc/$$/environ"
}


# Become a command, in the environment with which this script was started, and with these entries.
exec_in_environment() { # <number of entries> <NAME=VALUE...> <command...>
  restore_environment
  while (($1)); do
    export "${2?}"
    set -- $(($1 - 1)) "${@:3}"
  done
  exec "${@:2}"
}
