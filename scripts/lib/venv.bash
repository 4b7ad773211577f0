# shellcheck shell=bash
#
# Muster's virtual environment, $KIT/.venv: created when missing, updated when a lock file has changed, created again
# when an installation was interrupted. Sourced after common.bash.

# shellcheck disable=SC2034 # other files use these variables
VENV=$KIT/.venv


# Install the packages of the lock files (paths relative to $KIT) and PyTorch into $VENV, and set PYTHON to its Python.
# If a dry run would create or update $VENV, PYTHON is the Python with which $VENV would be created.
ensure_venv() { # <value of --python, may be empty> <lock file...>
  [[ $KIT != */muster/_kit ]] ||
    die_usage "this program installs packages only in a clone of Muster's repository, not into $KIT"
  PYTHON_OPTION='' check_kit # with .venv, which is used also if --python is given
  if ! venv_is_current "${@:2}"; then
    base_python "$1"
    if [[ $DRY_RUN == 1 ]]; then
      show "$PYTHON" -m venv "$VENV"
      install_with show "${@:2}"
      return
    fi
    (umask 077 && : >>"$VENV.lock")
    build_venv "${@:2}" 9>>"$VENV.lock"
  fi
  PYTHON=$VENV/bin/python
}


# Each installed lock file has a stamp: the version of Python, and a checksum of the file and of PyTorch's version.
venv_is_current() { # <lock file...>
  local file
  [[ -x $VENV/bin/python && ! -e $VENV/unfinished ]] || return
  for file; do
    [[ -f $VENV/$file.stamp && $(<"$VENV/$file.stamp") == "$(stamp "$file")" ]] || return
  done
}


stamp() { # <lock file>
  "$VENV/bin/python" --version && { required_torch && cat -- "$KIT/$1"; } | sha256sum
}


required_torch() {
  grep '^torch==' -- "$KIT/requirements.txt"
}


# Set PYTHON to the Python that creates $VENV, never to the Python in $VENV.
base_python() { # <value of --python, may be empty>
  resolve_python "${1:-python3}"
  [[ $1 ]] || PYTHON_ORIGIN=PATH
  check_python
  [[ ! ${PYTHON%/*} -ef $VENV/bin ]] || PYTHON=$(readlink -f -- "$PYTHON")
}


# Descriptor 9 holds a lock, which other users cannot open: a concurrent call waits and then has nothing to install.
build_venv() ( # <lock file...>
  cd -- "$KIT" || exit
  umask g-w,o-w
  chmod go= -- "$VENV.lock" 2>/dev/null || true
  flock --nonblock 9 || { log "waiting for another installation into $VENV" && flock 9; }
  if ! venv_is_current "$@"; then
    clear_broken_venv
    create_venv
    install_packages "$@"
  fi
)


clear_broken_venv() {
  if [[ -e $VENV/unfinished ]]; then
    log "$VENV: the last installation was interrupted; creating it again"
  elif [[ -e $VENV || -L $VENV ]] && ! "$VENV/bin/python" --version &>/dev/null; then
    log "$VENV: its Python does not run; creating it again"
  else
    return 0
  fi
  run rm -rf -- "$VENV"
}


# ensure_pip needs either ensurepip, which is in a separate package on Debian, or the pip of $PYTHON.
create_venv() {
  [[ ! -e $VENV ]] || { obey_umask && return; }
  "$PYTHON" -m ensurepip --version &>/dev/null || "$PYTHON" -m pip --version &>/dev/null ||
    die_with "$EXIT_UNFIT" "'$PYTHON' has neither ensurepip nor pip;" \
      "install one (Debian, Ubuntu: sudo apt-get install python3-venv) and run this again"
  obey_umask
  run "$PYTHON" -m venv --without-pip "$VENV"
}


# Make $VENV if it is missing. Without default access control lists there, which would replace the umask: with them,
# other users could write to the directories of packages.
obey_umask() {
  "$PYTHON" -I -c '
import os, sys
os.path.isdir(sys.argv[1]) or os.mkdir(sys.argv[1], 0o755)
for directory, _, _ in os.walk(sys.argv[1]):
    if "system.posix_acl_default" in os.listxattr(directory):
        os.removexattr(directory, "system.posix_acl_default")' "$VENV"
}


# The file "unfinished" remains when the installer is killed; clear_broken_venv then removes $VENV.
install_packages() { # <lock file...>
  local file
  trap 'exit "$EXIT_INTERRUPTED"' INT
  log "installing $*: takes minutes the first time; output: tail -f $(quote "$VENV/install.log")"
  install_with show "$@"
  : >"$VENV/unfinished"
  { ensure_pip && install_with run "$@"; } >"$VENV/install.log" 2>&1 || report_pip_failure
  for file; do
    stamp "$file" >"$VENV/$file.stamp"
  done
  rm -- "$VENV/unfinished"
}


# PyTorch has no hash, because builds for several kinds of GPU and for CPUs have the same version. All packages that it
# needs, except CUDA's libraries, are in the lock files and are therefore installed first.
install_with() { # <show or run> <lock file...>
  local install=("$VENV/bin/python" -m pip install) locks=("${@:2}")
  "$1" "${install[@]}" --require-hashes "${locks[@]/#/--requirement=}" &&
    "$1" "${install[@]}" "$(required_torch)"
}


ensure_pip() {
  "$VENV/bin/python" -m pip --version ||
    "$VENV/bin/python" -m ensurepip ||
    "$PYTHON" -m pip --python "$VENV/bin/python" install pip
}


report_pip_failure() {
  rm -- "$VENV/unfinished"
  tail -n 20 -- "$VENV/install.log" >&2
  die "pip failed; its last lines are above, all of its output is in $VENV/install.log;" \
    "fix the cause and run this again"
}
