#!/usr/bin/env bats
#
# scripts/quickstart.sh installs packages once, repairs an interrupted installation on the next call, and writes nothing
# when it refuses a call.
#
# A stub of Python records its command lines, so nothing is downloaded.

bats_require_minimum_version 1.5.0


setup() {
  KIT="$BATS_TEST_TMPDIR/it's a \"kit\" & more"
  export CALLS="$BATS_TEST_TMPDIR/calls"
  : >"$CALLS"
  mkdir -p "$KIT/scripts/lib" "$KIT/scripts/ssh" "$BATS_TEST_TMPDIR/bin"
  cp "$BATS_TEST_DIRNAME"/../scripts/lib/{environment,common,options,venv}.bash "$KIT/scripts/lib"
  cp "$BATS_TEST_DIRNAME"/../scripts/quickstart.sh "$KIT/scripts"
  printf 'torch==2.13.0\nrich>=13.7,<16\n' >"$KIT/requirements.txt"
  echo 'rich==15.0.0 --hash=sha256:0' >"$KIT/requirements.lock"
  stub_python "$BATS_TEST_TMPDIR/bin/python3"
  stub_launcher "$KIT/scripts/ssh/launch_singlenode.sh"
  REAL_PYTHON=$(realpath "$(type -P python3)")
  export REAL_PYTHON
  PATH="$BATS_TEST_TMPDIR/bin:$PATH"
  unset VIRTUAL_ENV
}


# The environment variables VERSION, GPUS, PIP_FAILS, NO_PIP and PIP_WAITS=FIFO set the behavior of the stub.
stub_python() { # <path>
  cat >"$1" <<'END'
#!/usr/bin/env bash
[[ $1 != -I || $2 != -c ]] || exec "$REAL_PYTHON" "$@"
printf '%s\n' "$*" >>"$CALLS"
case "$*" in
  --version) echo "Python ${VERSION:-3.11.7}" ;;
  "-m ensurepip --version" | "-m pip --version") [[ ! ${NO_PIP-} ]] ;;
  "-m venv "*) mkdir -p "${@: -1}/bin" && cp -- "$0" "${@: -1}/bin/python" ;;
  "-m pip install "*)
    if [[ ${PIP_WAITS-} && $* == *--require-hashes* ]]; then
      trap 'exit 1' INT
      echo started >"$PIP_WAITS"
      read -r _ <"$PIP_WAITS.go"
    fi
    [[ ! ${PIP_FAILS-} ]] || { echo "ERROR: no matching distribution"; exit 1; }
    ;;
  "-I "*"/scripts/lib/module.py host.processes gpu") [[ ${GPUS-} != unknown ]] && echo "${GPUS:-0}" ;;
  *) echo "unexpected: $*" >&2; exit 99 ;;
esac
END
  chmod +x "$1"
}


stub_launcher() { # <path>
  cat >"$1" <<'END'
#!/usr/bin/env bash
printf 'launch'; printf ' <%s>' "$@"; printf ' in <%s>\n' "$PWD"
if [[ ${LAUNCH_WAITS-} ]]; then
  trap 'echo "the launcher got TERM"; exit 75' TERM
  echo started >"$LAUNCH_WAITS"
  sleep 60 & wait; kill $!
fi
exit "${LAUNCH_EXIT:-0}"
END
  chmod +x "$1"
}


quickstart() {
  run --separate-stderr "$KIT/scripts/quickstart.sh" "$@"
}


installations() {
  grep -c '^-m pip install torch' "$CALLS"
}


@test "the first call creates .venv, installs, trains with two processes and prints the next commands" {
  quickstart
  [ "$status" -eq 0 ]
  [ "$(grep -v -e --version -e host.processes "$CALLS")" = "\
-m venv --without-pip $KIT/.venv
-m pip install --require-hashes --requirement=requirements.lock
-m pip install torch==2.13.0" ]
  [ "${lines[0]}" = "launch <--python> <$KIT/.venv/bin/python> <config/quickstart.yaml> <2> in <$KIT>" ]
  [[ "$output" == *"What to do next:"*"scripts/test_distributed.sh 2"* ]]
}


@test "other users cannot write to a new .venv, whatever the umask is" {
  umask 000
  quickstart
  [ "$status" -eq 0 ]
  [ ! "$(find "$KIT/.venv" ! -type l -perm /022)" ]
}


@test "other users cannot write to what a new .venv gets, also with a default access control list" {
  printf '%s\n' '# user::rwx, group::r-x, group:12345:rwx, mask::rwx, other::r-x' 'import os, struct, sys' \
    'entries = ((1, 7, -1), (4, 5, -1), (8, 7, 12345), (16, 7, -1), (32, 5, -1))' \
    'data = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *one) for one in entries)' \
    'os.setxattr(sys.argv[1], "system.posix_acl_default", data)' >"$BATS_TEST_TMPDIR/list.py"
  "$REAL_PYTHON" "$BATS_TEST_TMPDIR/list.py" "$KIT" || skip "no access control lists here"
  mkdir "$KIT/control"
  [ "$(stat -c %a "$KIT/control")" = 775 ]
  quickstart
  [ "$status" -eq 0 ]
  [ ! "$(find "$KIT/.venv" ! -type l -perm /022)" ]
  "$REAL_PYTHON" "$BATS_TEST_TMPDIR/list.py" "$KIT/.venv/bin" # of an older version
  echo '# changed' >>"$KIT/requirements.lock"
  quickstart
  [ "$status" -eq 0 ]
  mkdir "$KIT/.venv/bin/package"
  [ "$(stat -c %a "$KIT/.venv/bin/package")" = 755 ]
}


@test "nothing is installed from a lock file or into a .venv that others can write" {
  quickstart
  local path
  for path in requirements.lock .venv; do
    ((EUID)) || chgrp 12345 "$KIT/$path"
    chmod "$( ((EUID)) && echo o+w || echo g+w)" "$KIT/$path"
    echo '# changed' >>"$KIT/requirements.lock"
    quickstart --python "$BATS_TEST_TMPDIR/bin/python3"
    [ "$status" -eq 69 ]
    [[ "$stderr" == "quickstart.sh: $KIT/$path: other users can write it (mode "*"); call: chmod -R go-w "* ]]
    [ "$(installations)" -eq 1 ]
    chmod go-w "$KIT/$path"
  done
}


@test "the second call installs nothing" {
  quickstart
  quickstart
  [ "$status" -eq 0 ]
  [ "$(installations)" -eq 1 ]
  [[ "$stderr" != *pip* ]]
}


@test "a changed lock file or version of PyTorch is installed into the existing .venv" {
  quickstart
  echo 'numpy==2.4.6 --hash=sha256:0' >>"$KIT/requirements.lock"
  quickstart
  [ "$(installations)" -eq 2 ]
  sed -i 's/2.13.0/2.13.1/' "$KIT/requirements.txt"
  quickstart
  [ "$(installations)" -eq 3 ]
  [[ "$(<"$CALLS")" == *"-m pip install torch==2.13.1"* ]]
  [ "$(grep -c '^-m venv' "$CALLS")" -eq 1 ]
}


@test "after SIGKILL during the installation the next call creates .venv again" {
  export PIP_WAITS="$BATS_TEST_TMPDIR/pip"
  mkfifo "$PIP_WAITS" "$PIP_WAITS.go"
  setsid "$KIT/scripts/quickstart.sh" 2>/dev/null 3>&- &
  read -r _ <"$PIP_WAITS"
  kill -KILL -- "-$!"
  touch "$KIT/.venv/half-written"
  unset PIP_WAITS
  quickstart
  [ "$status" -eq 0 ]
  [ ! -e "$KIT/.venv/half-written" ]
  [[ "$stderr" == *"the last installation was interrupted; creating it again"* ]]
}


@test "Ctrl-C stops the installation, and the next call creates .venv again" {
  export PIP_WAITS="$BATS_TEST_TMPDIR/pip"
  mkfifo "$PIP_WAITS" "$PIP_WAITS.go"
  setsid env --default-signal=INT "$KIT/scripts/quickstart.sh" >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  read -r _ <"$PIP_WAITS"
  kill -INT -- "-$!"
  wait $! || status=$?
  [ "$status" -eq 130 ]
  run ! grep launch "$BATS_TEST_TMPDIR/out"
  unset PIP_WAITS
  quickstart
  [ "$status" -eq 0 ]
  [[ "$stderr" == *"the last installation was interrupted; creating it again"* ]]
}


@test "a failed installation shows pip's last lines, and the next call installs again" {
  PIP_FAILS=1 quickstart
  [ "$status" -eq 1 ]
  [[ "$stderr" == *"ERROR: no matching distribution"*"pip failed; its last lines are above, all of its output is in $KIT/.venv/install.log"* ]]
  [[ "$output" != *launch* ]]
  quickstart
  [ "$status" -eq 0 ]
  [ "$(grep -c '^-m venv' "$CALLS")" -eq 1 ]
}


@test "a .venv whose Python does not exist is created again" {
  quickstart
  rm "$KIT/.venv/bin/python"
  ln -s /nowhere/python3.9 "$KIT/.venv/bin/python"
  quickstart
  [ "$status" -eq 0 ]
  [[ "$stderr" == *"its Python does not run; creating it again"* ]]
  [ "$(installations)" -eq 2 ]
}


@test "two calls at the same time install once" {
  export PIP_WAITS="$BATS_TEST_TMPDIR/pip"
  mkfifo "$PIP_WAITS" "$PIP_WAITS.go" "$BATS_TEST_TMPDIR/second"
  "$KIT/scripts/quickstart.sh" >/dev/null 2>&1 3>&- &
  first=$!
  read -r _ <"$PIP_WAITS"
  "$KIT/scripts/quickstart.sh" 2>"$BATS_TEST_TMPDIR/second" >/dev/null 3>&- &
  second=$!
  [ "$(stat -c %a "$KIT/.venv.lock")" = 600 ] # other users cannot lock it
  exec 4<>"$BATS_TEST_TMPDIR/second" # otherwise the writer gets SIGPIPE after the line that is read here
  until [[ "$line" == *"waiting for another installation"* ]]; do read -r line <&4; done
  echo >"$PIP_WAITS.go"
  wait "$first"
  wait "$second"
  [ "$(installations)" -eq 1 ]
}


@test "a Python without ensurepip and pip is refused with the command that installs them" {
  NO_PIP=1 quickstart
  [ "$status" -eq 69 ]
  [[ "$stderr" == *"neither ensurepip nor pip"*"apt-get install python3-venv"* ]]
  [ ! -e "$KIT/.venv" ]
}


@test "a Python that is too old is refused before anything is written" {
  VERSION=3.9.18 quickstart
  [ "$status" -eq 2 ]
  [[ "$stderr" == *"Python 3.9.18, older than 3.10; choose another with --python PATH"* ]]
  [ "$(ls -A "$KIT")" = "$(printf '%s\n' requirements.lock requirements.txt scripts)" ]
}


@test "a failed training gives its exit code and no next command" {
  LAUNCH_EXIT=139 quickstart
  [ "$status" -eq 139 ]
  [[ "$output" != *"What to do next"* && "$stderr" != *"to resume"* ]]
}


@test "after a stop the command to resume is printed, also with --fresh" {
  LAUNCH_EXIT=75 quickstart --fresh
  [ "$status" -eq 75 ]
  [[ "${stderr_lines[-1]}" == *"to resume: "*"launch_singlenode.sh"*" checkpoint.dir=checkpoints/"* ]]
}


@test "SIGTERM is passed to the launcher, whose exit code is returned" {
  quickstart
  export LAUNCH_WAITS="$BATS_TEST_TMPDIR/launch"
  mkfifo "$LAUNCH_WAITS"
  "$KIT/scripts/quickstart.sh" >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  read -r _ <"$LAUNCH_WAITS"
  kill -TERM $!
  wait $! || status=$?
  [ "$status" -eq 75 ]
  grep -q "the launcher got TERM" "$BATS_TEST_TMPDIR/out"
}


@test "one process per GPU is started, and the batch size is a multiple of the number of processes" {
  GPUS=3 quickstart
  [[ "$output" == *"<config/quickstart.yaml> <3> <--> <train.batch_size=48>"* ]]
}


@test "an unknown number of GPUs is an error" {
  GPUS=unknown quickstart
  [ "$status" -eq 1 ]
  [[ "$output" != *launch* ]]
}


@test "--fresh uses a new checkpoint directory, and settings are passed on unchanged" {
  quickstart --fresh -- "data.path=a b's" train.steps=3
  [[ "$output" == *" <--> <checkpoint.dir=checkpoints/"*"> <data.path=a b's> <train.steps=3>"* ]]
}


@test "the next commands fit the caller's working directory and active Python" {
  cd "$KIT"
  quickstart
  [[ "$output" != *"  cd "* && "$output" != *activate* ]]
  cd /
  VIRTUAL_ENV=/another quickstart --fresh
  eval "$(grep '^  cd ' <<<"$output")"
  [ "$PWD" = "$KIT" ]
  [[ "$output" == *"  source .venv/bin/activate"* ]]
  [[ "$output" == *"launch_singlenode.sh config/quickstart.yaml 2 -- checkpoint.dir=checkpoints/"* ]]
  SHELL=/usr/bin/fish VIRTUAL_ENV=/another quickstart
  [[ "$output" == *"  source .venv/bin/activate.fish"$'\n'* ]]
}


@test "the next command trains for more steps than the last" {
  quickstart
  [[ "$output" == *"quickstart.yaml 2 -- train.steps=3000"$'\n'* ]]
  quickstart -- train.steps=50
  [[ "$output" == *"quickstart.yaml 2 -- train.steps=3000"$'\n'* ]]
  quickstart -- train.steps=50 "data.path=a train.steps=1" data.path=b
  [[ "$output" == *"quickstart.yaml 2 -- data.path=b train.steps=3000"$'\n'* ]]
  quickstart -- train.steps=4000
  [[ "$output" == *"quickstart.yaml 2 -- train.steps=8000"$'\n'* ]]
}


@test "--dry-run prints all commands and writes nothing" {
  quickstart --dry-run
  [[ "$stderr" == *"+ $(printf %q "$KIT/.venv/bin/python") -m pip install --require-hashes --requirement=requirements.lock"$'\n'* ]]
  [[ "$stderr" == *"-m pip install torch==2.13.0"$'\n'* ]]
  [ "$status" -eq 0 ]
  [[ "$stderr" == *"-m venv "*"-m pip install "*"launch_singlenode.sh --python "* ]]
  [ -z "$output" ]
  [ "$(ls -A "$KIT")" = "$(printf '%s\n' requirements.lock requirements.txt scripts)" ]
}


@test "a call through a symbolic link from another directory works" {
  ln -s "$KIT/scripts/quickstart.sh" "$BATS_TEST_TMPDIR/link"
  cd /
  run --separate-stderr "$BATS_TEST_TMPDIR/link"
  [ "$status" -eq 0 ]
  [[ "$output" == *" in <$KIT>"* ]]
}


@test "an unknown argument and an option without value are refused" {
  quickstart train.steps=3
  [ "$status" -eq 2 ]
  [[ "$stderr" == *"'train.steps=3': unknown argument"*"Try: quickstart.sh --help" ]]
  quickstart --python
  [ "$status" -eq 2 ]
  [[ "$stderr" == *"--python needs a value"* ]]
}
