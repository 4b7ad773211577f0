# shellcheck shell=bash
#
# Messages, errors, choice of Python, paths of the installation: shared by all scripts.
#
# Sourced, never run. It defines functions and makes Ctrl-C end the script with 130. A script in scripts/ starts like
# this, and therefore works through a symbolic link and from any directory:
#
#   set -euo pipefail
#   # shellcheck source=scripts/lib/common.bash
#   source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
#
# A script sets QUIET=1 to disable log(), and DRY_RUN=1 to let run() print its command without running it. Environment
# variables with these names have no effect.

# shellcheck source=scripts/lib/environment.bash
source "${BASH_SOURCE[0]%/*}/environment.bash"

# Exit codes of launchers. Any other code is that of the rank that failed first.
# shellcheck disable=SC2034  # used by files that source this one
{
  EXIT_WRONG_CALL=2    # wrong call or wrong config
  EXIT_UNFIT=69        # a node is unreachable or unfit
  EXIT_STOPPED=75      # stopped on request with a checkpoint: run again to resume
  EXIT_TIMED_OUT=124   # timed out
  EXIT_INTERRUPTED=130 # SIGINT
  EXIT_TERMINATED=143  # SIGTERM
}

# Signals other than INT, TERM, HUP and QUIT that SLURM or a user may send and that end a process by default; 34 to 64
# are the real-time signals. A launcher passes all these signals on to the ranks. distributed/host/signals.py has the
# same list.
PASSED_ON=(USR1 USR2 ABRT ALRM VTALRM PROF XCPU IO PWR STKFLT {34..64})

PROGRAM=${0##*/}                       # name in messages
VERB=${MUSTER_VERB-}                   # with which scripts/muster has called this program; empty: called by its path
unset -v MUSTER_VERB
[[ ! $VERB ]] || PROGRAM="muster $VERB"
PROGRAM_FILE=$(readlink -f -- "$0")    # absolute path of the script
KIT=$(readlink -f -- "${BASH_SOURCE[0]}")
KIT=${KIT%/scripts/lib/*}              # root of the repository: absolute, symbolic links resolved
MUSTER_NODE_ENV_KIT=$KIT               # the same, when the user's variable KIT is restored

DRY_RUN=0 QUIET=0                     # --dry-run, --quiet

trap 'exit "$EXIT_INTERRUPTED"' INT


# A closed standard error (terminal closed, `| head`) must not end the script.
log() { # <message...>
  [[ $QUIET == 1 ]] || printf '%s: %s\n' "$PROGRAM" "$*" >&2 || true
}


warn() { # <message...>
  local yellow='' plain=''
  [[ ! -t 2 || ${NO_COLOR-} || ${TERM-} == dumb ]] || yellow=$'\e[33m' plain=$'\e[0m'
  printf '%s%s: warning: %s%s\n' "$yellow" "$PROGRAM" "$*" "$plain" >&2 || true
}


die() { # <message...>
  die_with 1 "$@"
}


die_with() { # <exit code> <message...>
  printf '%s: %s\n' "$PROGRAM" "${*:2}" >&2
  exit "$1"
}


die_usage() { # <message...>
  printf '%s: %s\nTry: %s --help\n' "$PROGRAM" "$*" "$PROGRAM" >&2
  exit "$EXIT_WRONG_CALL"
}


# Set FOREIGN to why another user can change Muster's directory or one of these files and directories, because of its
# owner or mode, as OpenSSH's StrictModes does; empty if only the caller, root and the owner of Muster's directory can.
# Entries of a directory with the sticky bit, such as /tmp, are safe, but Python would import what others add to
# Muster's directories or a .venv. A link counts as well as its target: its owner could lead it elsewhere after this
# check. Used where the user's variables, such as KIT, and those that bash obeys are restored.
find_foreign() { # <path...>
  local facts targets fact number private='' safe=' ' owner='' uid gid mode user path kit=$MUSTER_NODE_ENV_KIT
  local paths=("$kit" "$@")
  FOREIGN=''
  mapfile -t facts <<<"$(stat -c %u:%g:%A -- "${paths[@]}" 2>/dev/null)" # %A: such as drwxrwxrwt
  if [[ ${facts[*]} == *:l* ]]; then
    mapfile -t targets <<<"$(stat -L -c %u:%g:%A -- "${paths[@]}" 2>/dev/null)"
    facts+=("${targets[@]}") paths+=("${paths[@]}")
  fi
  if ((${#facts[@]} != ${#paths[@]})); then # or it appears while it is used
    for path in "${paths[@]}"; do [[ -e $path ]] || break; done
    FOREIGN="$path: missing, or another program changes it"
    type -P stat >/dev/null || FOREIGN="stat: not on the PATH, so the owner of $kit cannot be checked"
    return 0
  fi
  for number in "${!facts[@]}"; do
    fact=${facts[number]} path=${paths[number]}
    [[ $safe != *" $fact "* ]] || continue
    uid=${fact%%:*} gid=${fact#*:} mode=${fact##*:}
    gid=${gid%:*} owner=${owner:-$uid}
    [[ $owner != 65534 || $(</proc/self/uid_map) == *' 4294967295' ]] || owner=0 # see is_unmapped
    if [[ $uid != @("$owner"|"$EUID"|0) ]] && ! is_unmapped "$uid" "$path"; then
      user=$(id -nu -- "$uid" 2>/dev/null) || user=UNKNOWN
      FOREIGN="$path: belongs to $user (user id $uid), who could run commands as you; use a copy of your own"
    elif [[ $mode == [!l]@(????w*|???????w?) && ($mode != *[tT] || $path/ == @("$kit"|*/.venv)/*) ]] &&
      { [[ $mode == ????????w? ]] || ! is_private_group "$uid" "$gid"; }; then
      FOREIGN="$path: other users can write it (mode $(stat -L -c %a -- "$path")); call: chmod go-w $(quote "$path")"
      [[ $path/ != "$kit"/* ]] || FOREIGN="${FOREIGN%% call: *} call: chmod -R go-w $(quote "$kit")"
    fi
    [[ ! $FOREIGN ]] || return 0
    [[ $uid == 65534 || $mode == *[tT] ]] || safe+="$fact "
  done
}


# The same for these files, the entries of these directories, and those three levels below; of .git, site-packages, and
# links in .venv/bin, only for themselves. A path that ends with a slash is left out unless it is a link. The first path
# is `scripts` or `.venv`, which must exist; the others may be missing.
find_foreign_below() { # <path...>
  local line link path own paths=() list=(ls -ldn --quoting-style=c --time-style=+) foreign=(! -uid "$EUID" ! -uid 0)
  # Each link of Muster, by its inode, and one path for each mode (with + if there is an access control list), user and
  # group that could be a problem. This is faster than find_foreign with all paths. A failure is a path without a file.
  local links='"$@" || echo \"/ls failed\"'
  local others="{ $links; } | LC_ALL=C sort -bu -k 1,1 -k 3,4 || echo '\"/sort failed\"'"
  for path; do
    [[ $path == */ && ! -L ${path%/} ]] || paths+=("$path")
    [[ ! -L $path ]] || paths+=("$path/")
  done
  own=(! -path '*/.venv/bin/*' \( ! -path '*/.venv/*' -o -lname '*/*' \)) # lib64 leads to lib, which is looked at
  line=$(find "${paths[@]}" -maxdepth 4 \( ! -name .git ! -name site-packages -o -prune \) \
    \( -name "${1##*/}" -printf 'found\n' , \
    -type l \( "${foreign[@]}" -o "${own[@]}" \) -exec /bin/sh -c "$links" - "${list[@]}" -i {} + -o \
    ! -type l \( -perm /022 -o "${foreign[@]}" \) -exec /bin/sh -c "$others" - "${list[@]}" {} + \) 2>/dev/null) || :
  FOREIGN="find: not on the PATH, so the owners of $1 cannot be checked"
  [[ $line ]] || return 0
  paths=("$1")
  while IFS= read -r line; do
    [[ $line != found ]] || continue
    line=${line#*\"} line=${line%\"} path=${line%%'" -> "'*} link=${line#"$path"}
    printf -v path %b "${path//'\"'/'"'}"
    printf -v link %b "${link//'\"'/'"'}"
    paths+=("$path")
    add_links "${path%/*}" "${link#'" -> "'}"
  done <<<"$line"
  find_foreign "${paths[@]}"
}


# Add to `paths` each link of another user on the way to where a path leads.
add_links() { # <directory> <path; relative to the directory, or absolute>
  local link at=$1 rest=$2/
  [[ $2 != /* ]] || at=''
  while [[ $rest ]]; do
    at+=/${rest%%/*} rest=${rest#*/}
    [[ -L $at && -e $at ]] || continue # a loop of links does not exist
    link=$(find "$at" -maxdepth 0 -printf '%U %l')
    [[ $link == @("$EUID"|0)\ * ]] || paths+=("$at")
    add_links "${at%/*}" "${link#* }"
  done
}


# Exit with EXIT_UNFIT if another user can change a file that Muster runs, reads, imports or installs from, or the
# directories and programs of its .venv. Of .git, that is what names programs which git runs.
check_kit() {
  local path paths=("$KIT"/{scripts,VERSION,*.py,*.so,*/__init__.*,benchmarks,config,distributed,src,tests})
  paths+=("$KIT"/{__pycache__,.ci,requirements*,pyproject.toml,.git,.git/{config,info,hooks}})
  [[ ${PYTHON_OPTION-} ]] || paths+=("$KIT/.venv"{,/bin,/lib*/{,py*/{,site-packages/}}})
  find_foreign_below "${paths[@]}"
  # Of an installed Muster, also the package `muster`, in which it is.
  [[ $FOREIGN || $KIT != */muster/_kit ]] || find_foreign "${KIT%/*}" "${KIT%/*}"/*.py
  [[ $FOREIGN || $KIT != */muster/_kit || ! -e ${KIT%/*}/__pycache__ ]] || find_foreign_below "${KIT%/*}/__pycache__"
  [[ ! $FOREIGN ]] || die_with "$EXIT_UNFIT" "$FOREIGN"
  # Python would make these directories with the umask, or an access control list.
  for path in "$KIT"/distributed/{,*[!_]/,*/*[!_]/} "$KIT/scripts/lib/"; do
    # shellcheck disable=SC2174 # the directory above exists
    [[ -e ${path}__pycache__ || ! -w $path ]] || mkdir -p -m 755 -- "${path}__pycache__"
  done
}


# Exit if another user can change a program of Muster, or the directories above it in Muster's. A program that only
# passes its call on calls this before; the other one calls check_kit.
check_program() { # <file>
  find_foreign "$KIT/scripts" "${1%/*}" "$1"
  [[ ! $FOREIGN ]] || die_with "$EXIT_UNFIT" "$FOREIGN"
}


# Whether the group has only this user, as on systems that set umask 002. No access control list, which ls marks with +,
# may let more users write to one of the `paths`; else `path` is set to it.
is_private_group() { # <user id> <group id>
  local name uid gid shell lists
  [[ " $* " != *' 65534 '* ]] || return 1 # stands for many users and groups in a container
  [[ $private != "$*" ]] || return 0
  IFS=: read -r name _ _ gid _ < <(getent passwd "$1" 2>/dev/null) && [[ $gid == "$2" ]] &&
    [[ $(getent group "$2" 2>/dev/null) == "$name":*:@(|"$name") ]] || return
  while IFS=: read -r _ _ uid gid _ _ shell || [[ $uid ]]; do # on some systems, accounts without a login have group 0
    [[ $gid != "$2" || $uid == "$1" || $gid$shell == 0*/@(nologin|false|sync|halt|shutdown) ]] || return
  done </etc/passwd
  lists=$(ls -ldnL -- "${paths[@]}" 2>/dev/null) && [[ $'\n'$lists != *$'\n'?????w????+* ]] && private="$*" && return
  for path in "${paths[@]}"; do
    [[ $(ls -ldnL -- "$path" 2>/dev/null) == @(?????[!w]|??????????[!+])* ]] || return
  done
  return 1
}


# Whether a container shows this user id for root and all other users whom its user namespace does not contain, and not
# all of them could have made the path.
is_unmapped() { # <user id> <path>
  [[ $1 == 65534 && $(</proc/self/uid_map) != *' 4294967295' && $(stat -L -c %A -- "$(dirname -- "$2")") != *w? ]]
}


# Exit when the value of an option is missing or empty (often an unset variable).
need_value() { # <option> [value] [rest...]
  [[ ${2-} ]] || die_usage "$1 needs a value"
  [[ $2 != --[a-z]* || $1 == --sbatch ]] || die_usage "$1 needs a value, got the option '$2'"
}


# Print the opening comment of a script, as the script was called: by its path, or by its verb. A line `(as NAME except A
# --b)` stands for the arguments and options of the script NAME, except A, --b and those that are printed above this line.
usage() { # [file; default: this program]
  local line file number=0 listed='' lines=()
  while IFS= read -r line && [[ $line == '#' || $line == '# '* || $line == '#!'* ]]; do
    number=$((number + 1))
    ((number > 2)) || [[ $line == '# '* ]] || continue # skip the shebang and the line below it
    if [[ $line =~ ^'#   (as '([^ ]+)(' except '(.+))?')'$ ]]; then
      # The path begins with KIT, because SLURM runs a copy of the program in another directory.
      for file in "$KIT"/scripts/{,*/}"${BASH_REMATCH[1]}"; do
        [[ ! -e $file ]] || mapfile -t lines < <(print_arguments_of "$file" "$listed ${BASH_REMATCH[3]}")
      done
      printf '%s\n' "${lines[@]}"
      for line in "${lines[@]}"; do
        [[ ! $line =~ ^'  '([^ ]+) ]] || listed+=" ${BASH_REMATCH[1]}"
      done
    else
      [[ ! $line =~ ^'#   '([^ ]+) ]] || listed+=" ${BASH_REMATCH[1]}"
      line=${line#'#'} line=${line# }
      if [[ $VERB && ! ${1-} ]]; then
        [[ $line != *' muster '*' ...' ]] || continue
        line=${line/${PROGRAM_FILE##*/}/$PROGRAM}
      fi
      printf '%s\n' "$line"
    fi
  done <"${1:-$PROGRAM_FILE}"
}


# Print the end of a message about an unknown word: the known word that is like it. Both begin and end alike, except for
# at most two adjacent letters.
did_you_mean() { # <unknown word> <known word...>
  local known word=${1#-} other start end longer
  word=${word#-}
  for known in "${@:2}"; do
    other=${known#-} start=0 end=0
    other=${other#-}
    while ((start < ${#other})) && [[ ${word:start:1} == "${other:start:1}" ]]; do
      start=$((start + 1))
    done
    while ((end < ${#other} - start)) && [[ ${word: -1-end:1} == "${other: -1-end:1}" ]]; do
      end=$((end + 1))
    done
    longer=$((${#word} > ${#other} ? ${#word} : ${#other}))
    if ((start + end >= longer - 2 && 2 * (start + end) >= longer - 1 && ${#other} > 1)); then
      printf '; did you mean %s?\n' "$known"
      return
    fi
  done
}


show_version() {
  printf 'Muster %s\n' "$(<"$KIT/VERSION")"
}


# Print the part of an opening comment from the first indented line to --help.
print_arguments_of() { # <file> <arguments and options to leave out>
  local line left_out=1
  while IFS= read -r line && [[ $line != '  --help'* ]]; do
    if [[ $line =~ ^'  '([^ ]+) ]]; then # not a continuation line
      left_out=0
      [[ " $2 " != *" ${BASH_REMATCH[1]} "* ]] || left_out=1
    fi
    ((left_out)) || printf '%s\n' "$line"
  done < <(usage "$1" 2>/dev/null) # the reader stops early
  [[ $line != '  --help'* ]] || printf '%s\n' "$line"
}


# Print arguments as one line, quoted for bash.
quote() { # <argument...>
  (($# > 0)) || return 0
  local line
  printf -v line '%q ' "$@"
  printf '%s\n' "${line% }"
}


show() { # <command...>
  printf '+ %s\n' "$(quote "$@")" >&2
}


# Print a command, then run it unless DRY_RUN=1.
run() { # <command...>
  show "$@"
  [[ $DRY_RUN == 1 ]] || "$@"
}


# Run a program and return its status. A terminal sends SIGINT to the program directly; SIGTERM and other signals are
# forwarded. Sets INTERRUPTED to INT, TERM or nothing.
run_forwarding_signals() { # <exec or exec_in_environment> <its arguments...>
  local child='' status=0 name pending=()
  INTERRUPTED=
  trap 'SIGNALLED=1 INTERRUPTED=INT' INT
  for name in TERM HUP QUIT "${PASSED_ON[@]}"; do
    # shellcheck disable=SC2064
    trap "forward_signal $name" "$name"
  done
  (trap - INT TERM QUIT && "$@") <&0 &
  child=$!
  for name in "${pending[@]}"; do
    forward_signal "$name"
  done
  join "$child" || status=$?
  trap - TERM HUP QUIT "${PASSED_ON[@]}"
  trap 'exit "$EXIT_INTERRUPTED"' INT
  return "$status"
}


forward_signal() { # <name of the signal>
  SIGNALLED=1
  # shellcheck disable=SC2034 # callers of run_forwarding_signals read it
  [[ $1 != TERM ]] || INTERRUPTED=TERM
  if [[ $child ]]; then
    kill -s "$1" "$child"
  else
    pending+=("$1")
  fi
}


# Wait until a child has exited and return its status. `wait` alone returns early when a trap runs; traps that can run
# meanwhile must set SIGNALLED=1.
join() { # <process id>
  # `wait` returns 127 when it has already reported the child, and -1 (bash 5.2) when the child exits while the trap
  # runs. The previous status is then the right one.
  local status=127 latest
  while true; do
    SIGNALLED=
    wait "$1" 2>/dev/null && latest=0 || latest=$?
    ((latest == 127 || latest < 0)) || status=$latest
    [[ $SIGNALLED ]] || return "$status"
  done
}


# Set PYTHON to an absolute path: the value of --python, else the first of list_pythons, else python3. Exits when this
# Python does not exist or is older than 3.10.
pick_python() { # [value of --python]
  resolve_python "${1-}"
  check_python
}


# Like pick_python, but without the check of the version.
resolve_python() { # [value of --python]
  PYTHONS=() PYTHON_ORIGINS=()
  [[ ${1-} ]] || list_pythons
  local python=${1:-${PYTHONS[0]:-python3}}
  PYTHON_ORIGIN=${PYTHON_ORIGINS[0]:-PATH}
  [[ ! ${1-} ]] || PYTHON_ORIGIN=--python
  PYTHON=$(type -P -- "$python") ||
    die_usage "no Python at '$python' (from $PYTHON_ORIGIN); choose another with --python PATH"
  # The symbolic link is not resolved: Python finds its virtual environment by it.
  [[ $PYTHON == /* ]] || PYTHON=$PWD/$PYTHON
}


check_python() {
  local version
  version=$("$PYTHON" --version 2>&1) || true
  [[ $version =~ ^Python\ ([0-9]+)\.([0-9]+) ]] ||
    die_usage "'$PYTHON' (from $PYTHON_ORIGIN) is not a working Python; choose another with --python PATH"
  ((BASH_REMATCH[1] * 1000 + BASH_REMATCH[2] >= 3010)) ||
    die_usage "'$PYTHON' (from $PYTHON_ORIGIN) is $version, older than 3.10; choose another with --python PATH"
}


# Set PYTHONS, the candidates in order of preference, and PYTHON_ORIGINS, a description of each. conda activates its
# base environment in every shell, so it has the lowest priority, like python3.
list_pythons() {
  local conda=${CONDA_PREFIX-}
  PYTHONS=() PYTHON_ORIGINS=()
  [[ ! ${VIRTUAL_ENV-} ]] || list_python "$VIRTUAL_ENV/bin/python" "the active virtual environment"
  if [[ $conda && ${CONDA_DEFAULT_ENV-} != base ]]; then
    list_python "$conda/bin/python" "the active conda environment"
  fi
  # A link to Muster's .venv is left out: another user could lead it elsewhere, and its target follows.
  if [[ (-e .venv || -L .venv) && ! (-L .venv && .venv -ef $KIT/.venv) ]]; then
    refuse_foreign_venv
    list_python "$PWD/.venv/bin/python" ".venv of the working directory"
  fi
  if [[ -x $KIT/.venv/bin/python && ! -e $KIT/.venv/unfinished ]]; then
    list_python "$KIT/.venv/bin/python" "Muster's .venv"
  fi
  if [[ $KIT == */lib/python*/site-packages/muster/_kit && -d ${KIT%/muster/_kit}/torch ]]; then
    list_python "${KIT%/lib/python*}/bin/python" "the environment in which Muster is installed"
  fi
  if [[ $conda && ${CONDA_DEFAULT_ENV-} == base ]]; then
    list_python python3 "PATH, conda's base environment"
  fi
}


# Exit if another user has made the .venv of the working directory, or can write to it: its Python would run as the
# caller.
refuse_foreign_venv() {
  [[ ! $PWD -ef $KIT ]] || return 0
  find_foreign_below "$PWD/.venv"{,/bin,/lib*/{,py*/{,site-packages/}}}
  case $FOREIGN in
    '') ;;
    *'; call: '*) die_with "$EXIT_UNFIT" "${FOREIGN%; call: *}; call: chmod -R go-w $(quote "$PWD/.venv")" ;;
    *) die_with "$EXIT_UNFIT" "${FOREIGN%; use *}; if you trust it: --python $(quote "$PWD/.venv/bin/python")" ;;
  esac
}


# Add a candidate unless it is already listed.
list_python() { # <path or name> <origin>
  local known
  for known in "${PYTHONS[@]}"; do
    [[ ! ${known%/*} -ef ${1%/*} ]] || return 0
  done
  PYTHONS+=("$1") PYTHON_ORIGINS+=("$2")
}


# Run a short-lived module of distributed/ with $PYTHON and the standard library alone. Of the signals that may reach
# the process group, only SIGTERM ends the module. The working directory is KIT: paths in arguments must be absolute.
kit_python() { # <module> [argument...]
  (trap '' INT HUP QUIT TSTP PIPE "${PASSED_ON[@]}" && trap - TERM && cd -- "$KIT" &&
    exec "$PYTHON" -I "$KIT/scripts/lib/module.py" "$@")
}


# Replace this process by a module of distributed/, in the environment with which this script was started.
exec_module() { # <module> [argument...]
  exec_in_environment 0 "$PYTHON" -I "$KIT/scripts/lib/module.py" "$@"
}
