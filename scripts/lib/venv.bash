# shellcheck shell=bash
#
# The kit's own virtual environment, $KIT/.venv: made when it is missing, filled when the requirements
# have changed, made anew when an installation was cut short. Sourced after common.bash.

# shellcheck disable=SC2034 # other files read and set what stands here
VENV=$KIT/.venv


# After this $VENV holds what the requirement files (names in KIT) ask for, and PYTHON is its Python;
# in a dry run, where there is no $VENV yet, the one it would be made from.
ensure_venv() { # <value of --python, may be empty> <requirement file...>
  local files=("${@:2}")
  files=("${files[@]/#/--requirement=}")
  if ! venv_is_current "${@:2}"; then
    base_python "$1"
    if [[ ${DRY_RUN:-0} == 1 ]]; then
      show "$PYTHON" -m venv "$VENV"
      show "$VENV/bin/python" -m pip install "${files[@]}"
      return
    fi
    build_venv "${@:2}" 9>>"$VENV.lock"
  fi
  PYTHON=$VENV/bin/python
}


# Each file that was installed has left a stamp: with which Python, and which checksum it had.
venv_is_current() { # <requirement file...>
  local file
  [[ -x $VENV/bin/python && ! -e $VENV/unfinished ]] || return
  for file; do
    [[ -f $VENV/$file.stamp && $(<"$VENV/$file.stamp") == "$(stamp "$file")" ]] || return
  done
}


stamp() { # <requirement file>
  "$VENV/bin/python" --version && sha256sum <"$KIT/$1"
}


# Set PYTHON to the one to build on, which is never the one of the environment being built.
base_python() { # <value of --python, may be empty>
  resolve_python "${1:-python3}"
  [[ $1 ]] || PYTHON_ORIGIN=PATH
  check_python
  if [[ ${PYTHON%/*} -ef $VENV/bin ]]; then
    PYTHON=$(readlink -f -- "$PYTHON")
  fi
}


# One at a time: the second to come finds the work done. Descriptor 9 holds the lock.
build_venv() ( # <requirement file...>
  cd -- "$KIT" || exit
  flock --nonblock 9 || { log "waiting for another installation into $VENV" && flock 9; }
  if ! venv_is_current "$@"; then
    clear_broken_venv
    create_venv
    install_requirements "$@"
  fi
)


clear_broken_venv() {
  if [[ -e $VENV/unfinished ]]; then
    log "an installation into $VENV was cut short: making it anew"
  elif [[ -e $VENV || -L $VENV ]] && ! "$VENV/bin/python" --version &>/dev/null; then
    log "the Python of $VENV does not run any more: making it anew"
  else
    return 0
  fi
  run rm -rf -- "$VENV"
}


# pip comes from ensurepip, which Debian packs apart from Python, or else from a pip that is there.
create_venv() {
  if [[ -e $VENV ]]; then
    return
  fi
  "$PYTHON" -m ensurepip --version &>/dev/null || "$PYTHON" -m pip --version &>/dev/null ||
    die_with "$EXIT_UNFIT" "'$PYTHON' has neither ensurepip nor pip to fill a virtual environment with:" \
      "sudo apt-get install python3-venv (Debian, Ubuntu), then run this again"
  run "$PYTHON" -m venv --without-pip "$VENV"
}


# "unfinished" stays behind when the installer is killed: nobody can say then what is half written.
install_requirements() { # <requirement file...>
  local file install=("$VENV/bin/python" -m pip install "${@/#/--requirement=}")
  trap 'exit "$EXIT_INTERRUPTED"' INT
  log "installing $*: minutes, the first time (to follow it: tail -f $(quote "$VENV/install.log"))"
  show "${install[@]}"
  : >"$VENV/unfinished"
  { ensure_pip && "${install[@]}"; } >"$VENV/install.log" 2>&1 || report_pip_failure
  for file; do
    stamp "$file" >"$VENV/$file.stamp"
  done
  rm -- "$VENV/unfinished"
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
