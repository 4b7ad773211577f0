# shellcheck shell=bash
#
# Variables that a user may export and that bash, its tools or Python obey: our scripts ignore them, the ranks get them.
#
# TMOUT ends every `read`, SHELLOPTS and POSIXLY_CORRECT change options, LC_ALL changes number formats and ranges such
# as [a-z], an exported function replaces the command of its name, PYTHONINSPECT keeps Python from exiting. This file
# removes them from the shell, and also functions, aliases and options that BASH_ENV has set; the user's encoding of
# characters is kept. exec_in_environment restores everything for the program that it starts: a program of the user, or
# one of ours that starts ssh, which may be configured to send variables. Functions are restored in the shell only while
# it sources config/node_env.sh, which may call functions of the cluster, such as `module`.
#
# Sourced by common.bash before anything else, never run.

POSIXLY_CORRECT=1 # in POSIX mode, no function can replace the builtin `unset`
\unset -f builtin command
# Turn tracing off, which SHELLOPTS or BASH_ENV may have turned on: bash would print the values below.
{ builtin set +xv; } 2>/dev/null
builtin set +k +o posix # also unsets POSIXLY_CORRECT
builtin unset -v FUNCNEST

INHERITED=()          # NAME=VALUE of all variables with which this script was started
REMOVED_FUNCTIONS=''  # functions that this file has removed, as source text for node_env.sh
BY_ENV=()             # NAME=VALUE of functions, and of variables that bash cannot export: the program `env` sets them
# Read-only variables, and FUNCNEST, which limits the nesting of function calls.
NOT_EXPORTABLE='SHELLOPTS|BASHOPTS|BASH_VERSINFO|UID|EUID|PPID|FUNCNEST'
NOT_EXPORTABLE+='|MUSTER_NODE_ENV_*|NOT_EXPORTABLE|BY_ENV|INHERITED|REMOVED|REMOVED_FUNCTIONS' # variables of ours
NOT_EXPORTABLE+='|inherited|inherited_name|removed_name'

# Patterns of names. SQUEUE_* and SLURM_TIME_FORMAT change the output of SLURM's commands.
OBEYED='TMOUT|IFS|POSIXLY_CORRECT|POSIX_PEDANTIC|BASH_ENV|ENV|BASH_COMPAT|CDPATH|EXECIGNORE|GLOBIGNORE'
OBEYED+='|GLOBSORT|SECONDS|LANG|LANGUAGE|LC_*|GREP_OPTIONS|GREP_COLOR|GREP_COLORS|TAR_OPTIONS|_POSIX2_VERSION|RSYNC_*'
OBEYED+='|SQUEUE_*|SLURM_TIME_FORMAT|PYTHONINSPECT|PYTHONSTARTUP|PYTHONWARNINGS|PYTHONVERBOSE|PYTHONDEVMODE'
OBEYED+='|PYTHONSAFEPATH|PYTHONIOENCODING|PYTHONUTF8|PYTHONINTMAXSTRDIGITS|PYTHONPROFILEIMPORTTIME|PYTHONTRACEMALLOC'

# Options that bash enables by default in a script. BASHOPTS can only enable others.
DEFAULT_OPTIONS='checkwinsize|cmdhist|complete_fullquote|extquote|force_fignore|globasciiranges|globskipdots'
DEFAULT_OPTIONS+='|hostcomplete|interactive_comments|patsub_replacement|progcomp|promptvars|sourcepath'

# Process ids would name other processes, which Muster could end.
if [[ ! "/proc/$BASHPID" -ef /proc/self ]]; then
  builtin printf '%s: /proc is missing, or is that of another PID namespace; mount it (unshare: give --mount-proc)\n' \
    "${0##*/}" >&2
  builtin exit 69
fi
builtin mapfile -d '' -t INHERITED </proc/self/environ
for REPLY in "${INHERITED[@]}"; do
  [[ $REPLY != BASH_FUNC_*%%=* ]] || BY_ENV+=("$REPLY")
done
if [[ ${BY_ENV-} || ${BASH_ENV-} ]]; then
  [[ ${BASH_ENV-} ]] && REPLY=F || REPLY=Fx # BASH_ENV may define functions that are not exported
  REMOVED_FUNCTIONS=$(builtin declare "-${REPLY/F/f}")
  REMOVED_FUNCTIONS=${REMOVED_FUNCTIONS//$'\n'declare -f/$'\n'builtin declare -f}
  while builtin read -r REPLY; do
    builtin unset -f "${REPLY##* }"
  done < <(builtin declare "-$REPLY")
fi
REPLY=''
declare -A REMOVED=() # variables that this file has removed from the shell -> value
builtin set -euo pipefail # an inherited function may have replaced the script's `set`


remove_variables() {
  local entry encoding=${LC_ALL:-${LC_CTYPE:-${LANG-}}}
  for entry in "${INHERITED[@]}"; do
    if [[ ${entry%%=*} == @($OBEYED) ]]; then
      REMOVED[${entry%%=*}]=${entry#*=}
    elif [[ ${entry%%=*} == @($NOT_EXPORTABLE) ]]; then
      BY_ENV+=("$entry")
    fi
  done
  unset -v "${!REMOVED[@]}"
  [[ ! $encoding ]] || export LC_CTYPE=$encoding
  # Every bash that we start would complain about a locale that is not installed.
  [[ ! $encoding || ! $({ LC_CTYPE=$encoding; } 2>&1) ]] || LC_CTYPE=C.UTF-8
  LC_COLLATE=C LC_MESSAGES=C LC_NUMERIC=C LC_TIME=C # bash would keep the old locale if these were only unset
  export -n SHELLOPTS BASHOPTS
  SECONDS=0
} 2>/dev/null # a locale may not be installed


remove_options() {
  local option
  for option in ${BASHOPTS//:/ }; do
    [[ $option == @($DEFAULT_OPTIONS) ]] || shopt -u "$option"
  done
  unalias -a
  set +afkmCP
  [[ ${BY_ENV[*]} != *SHELLOPTS=* ]] || set +ET
}


remove_variables
remove_options


# Restore what this file has removed.
restore_removed() {
  local removed_name
  unset -v LC_COLLATE LC_CTYPE LC_MESSAGES LC_NUMERIC LC_TIME
  for removed_name in "${!REMOVED[@]}"; do
    export "$removed_name=${REMOVED[$removed_name]}"
  done
} 2>/dev/null


# Restore functions to the shell, for node_env.sh. Afterwards, call builtins only with `builtin`; call `exec` with
# `command`, because redirections of `builtin exec` do not last.
restore_functions() {
  builtin eval "$REMOVED_FUNCTIONS"
  REMOVED_FUNCTIONS=$(builtin declare -fx)
}


# If node_env.sh has changed functions, export those of this shell instead of the inherited ones in BY_ENV.
keep_changed_functions() {
  [[ $REMOVED_FUNCTIONS != "$(builtin declare -fx)" ]] || builtin return 0
  for MUSTER_NODE_ENV_ENTRY in "${!BY_ENV[@]}"; do
    [[ ${BY_ENV[MUSTER_NODE_ENV_ENTRY]} != BASH_FUNC_*%%=* ]] || builtin unset -v "BY_ENV[MUSTER_NODE_ENV_ENTRY]"
  done
}


# Restore exported variables to the values with which this script was started, because our scripts assign other values
# to variables of the same names. Variables that the script has unset stay unset; SLURM_* are not changed.
restore_environment() {
  local inherited inherited_name
  set +u # not `local -`: on return, it would also unset the POSIXLY_CORRECT that restore_removed has exported
  for inherited in "${INHERITED[@]}"; do
    inherited_name=${inherited%%=*}
    [[ $inherited_name =~ ^[A-Za-z_][A-Za-z_0-9]*$ ]] || continue
    [[ $inherited_name != @(_|PWD|OLDPWD|SHLVL|SLURM_*|$NOT_EXPORTABLE) ]] || continue
    [[ ${!inherited_name@a} == *x* && ${!inherited_name@a} != *r* ]] || continue
    unset -v "$inherited_name" # may be an array
    export "${inherited?}"
  done
  restore_removed
}


export_entry() { # <NAME=VALUE>
  if [[ ${1%%=*} == @($NOT_EXPORTABLE) ]]; then
    BY_ENV+=("$1")
  else
    builtin export "${1?}"
  fi
}


# Replace this process by a command, in the environment with which this script was started plus these entries.
exec_in_environment() { # <number of entries> <NAME=VALUE...> <command...>
  restore_environment
  while (($1)); do
    export_entry "$2"
    set -- $(($1 - 1)) "${@:3}"
  done
  shift
  exec_by_env "$@"
}


# Replace this process by a command, with the entries in BY_ENV.
exec_by_env() { # <command> [argument...]
  if ((${#BY_ENV[@]})); then
    [[ $1 != *=* ]] || builtin set -- nice -n 0 "$@" # env would take the path of the command for an entry
    builtin set -- env "${BY_ENV[@]}" "$@"
  fi
  builtin exec "$@"
}
