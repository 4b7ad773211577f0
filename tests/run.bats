#!/usr/bin/env bats
#
# tests/run.sh: its last line and its exit code are right, also when a runner crashes or is interrupted.
#
# It runs in a copy of the repository, with stubs in place of Python, bats and shellcheck.

bats_require_minimum_version 1.5.0


setup() {
  KIT="$BATS_TEST_TMPDIR/it's a copy"
  export CALLS="$BATS_TEST_TMPDIR/calls" STUBS="$BATS_TEST_TMPDIR/stubs"
  mkdir -p "$KIT/scripts/lib" "$KIT/tests" "$STUBS" "$BATS_TEST_TMPDIR/bin"
  cp "$BATS_TEST_DIRNAME"/../scripts/lib/{environment,common,venv}.bash "$KIT/scripts/lib"
  cp "$BATS_TEST_DIRNAME/run.sh" "$KIT/tests"
  touch "$KIT"/requirements{,-test}.lock "$KIT/pyproject.toml" "$KIT/tests"/{a.bats,test_a.py}
  echo 'torch==2.13.0' >"$KIT/requirements.txt"
  write_stubs
  PATH="$BATS_TEST_TMPDIR/bin:$PATH"
  stub_bats 0 $'1..2\nok 1 works\nok 2 works too'
  stub_pytest 0 '<testcase name="a" /><testcase name="b" />'
}


# Each stub appends its arguments to $CALLS; its exit code and report are files in $STUBS. The stub of
# Python also replaces pip and venv.
write_stubs() {
  cat >"$BATS_TEST_TMPDIR/bin/python3" <<'END'
#!/usr/bin/env bash
wait_for_ctrl_c() {
  trap 'echo "pytest: interrupted" >>"$CALLS"; exit 2' INT
  echo >"$STUBS/pytest.waits"
  while :; do sleep 0.01; done
}
case "$*" in
  --version) echo "Python 3.11.7" ;;
  "-m venv "*) mkdir -p "${@: -1}/bin" && cp -- "$0" "${@: -1}/bin/python" ;;
  "-m pip "* | "-m ensurepip "* | "-I -c "*) ;;
  "-m pytest --junitxml "*)
    echo "pytest ${*:4}" >>"$CALLS"
    echo "pytest output"
    [[ ! -p $STUBS/pytest.waits ]] || wait_for_ctrl_c
    cat "$STUBS/pytest.report" >"$4" 2>/dev/null
    exit "$(<"$STUBS/pytest")" ;;
  tests/changed.py) cat "$STUBS/changed"; exit "$(cat "$STUBS/changed.status" 2>/dev/null || echo 0)" ;;
  *) echo "${*:2}" >>"$CALLS"; exit "$(cat "$STUBS/$2" 2>/dev/null || echo 0)" ;;
esac
END
  cat >"$BATS_TEST_TMPDIR/bin/bats" <<'END'
#!/usr/bin/env bash
echo "bats $*" >>"$CALLS"
echo "bats output"
while [[ $1 != --output ]]; do shift; done
cat "$STUBS/bats.report" >"$2/report.tap"
exit "$(<"$STUBS/bats")"
END
  printf '#!/bin/sh\necho "shellcheck $*" >>"$CALLS"\n' >"$BATS_TEST_TMPDIR/bin/shellcheck"
  chmod +x "$BATS_TEST_TMPDIR/bin"/*
}


stub_bats() { # <exit code> <tap>
  echo "$1" >"$STUBS/bats"
  echo "$2" >"$STUBS/bats.report"
}


stub_pytest() { # <exit code> <test cases>
  echo "$1" >"$STUBS/pytest"
  echo "<testsuites><testsuite errors=\"0\">$2</testsuite></testsuites>" >"$STUBS/pytest.report"
}


run_sh() {
  run --separate-stderr "$KIT/tests/run.sh" "$@"
}


# Hide these programs of this machine, and stub id and apt-get. The user id is USER_ID, by default not root.
without() { # <program...>
  cp -rs /usr/bin "$BATS_TEST_TMPDIR/usr" 2>/dev/null || true
  (cd "$BATS_TEST_TMPDIR/usr" && rm -f -- "$@" id)
  printf '#!/bin/sh\necho "%s"\n' "${USER_ID:-1000}" >"$BATS_TEST_TMPDIR/usr/id"
  printf '#!/bin/sh\necho "apt-get $*" >>"$CALLS"\n' >"$BATS_TEST_TMPDIR/bin/apt-get"
  chmod +x "$BATS_TEST_TMPDIR/usr/id" "$BATS_TEST_TMPDIR/bin/apt-get"
  rm -f -- "${@/#/$BATS_TEST_TMPDIR/bin/}"
  PATH="$BATS_TEST_TMPDIR/bin:$BATS_TEST_TMPDIR/usr:/usr/sbin:/sbin"
}


@test "the last line counts four linter runs, the bats tests and the pytest tests" {
  run_sh
  [ "$status" -eq 0 ]
  [ "${lines[-1]}" = "Muster: 8 passed, 0 failed, 0 skipped" ]
}


@test "failed and skipped tests are counted; exit code 1" {
  stub_bats 1 $'1..4\nok 1 fine\nnot ok 2 bad\n# ok 9 only output\nok 3 later # skip no GPU\nok 4 fine'
  stub_pytest 1 '<testcase name="a" /><testcase name="b"><failure message="&lt;skipped "></failure></testcase>
<testcase name="c"><skipped type="x"></skipped></testcase>
<testcase name="d"><error message="x"></error></testcase>'
  run_sh
  [ "$status" -eq 1 ]
  [ "${lines[-2]}" = "bats: failed: 2 bad" ]
  [ "${lines[-1]}" = "Muster: 7 passed, 3 failed, 2 skipped" ]
}


@test "nothing is installed or run if others can write a lock file" {
  chmod 666 "$KIT/requirements-test.lock"
  run_sh
  [ "$status" -eq 69 ]
  [[ "$stderr" == "run.sh: $KIT/requirements-test.lock: other users can write it (mode 666); call: chmod -R go-w "* ]]
  [ ! -e "$CALLS" ]
}


@test "a runner that crashes without a report is one failure" {
  echo 139 >"$STUBS/pytest"
  rm "$STUBS/pytest.report"
  run_sh
  [ "$status" -eq 1 ]
  [ "${lines[-1]}" = "Muster: 6 passed, 1 failed, 0 skipped" ]
  [ "${lines[-2]}" = "pytest: failed: exit code 139" ]
}


@test "a runner that crashes after passed tests is one failure" {
  stub_bats 1 $'1..9\nok 1 fine'
  run_sh
  [ "$status" -eq 1 ]
  [ "${lines[-1]}" = "Muster: 7 passed, 1 failed, 0 skipped" ]
}


@test "a linter that fails is one failure, which is named at the end, and the tests still run" {
  echo 1 >"$STUBS/mypy"
  run_sh
  [ "$status" -eq 1 ]
  [ "${lines[-2]}" = "mypy: failed: exit code 1" ]
  [ "${lines[-1]}" = "Muster: 7 passed, 1 failed, 0 skipped" ]
}


@test "linters read only files that git tracks; in a copy without git they read all" {
  cd "$KIT"
  touch mine.py "scripts/my own.sh"
  run_sh --lint
  grep -F "mine.py" "$CALLS"
  grep -F "my own.sh" "$CALLS"
  rm mine.py scripts/*.sh "$CALLS"
  git init --quiet && git add .
  touch mine.py "scripts/my own.sh" out.txt
  rm tests/test_a.py
  run_sh --lint
  [ "$status" -eq 0 ]
  grep "^shellcheck .*common.bash" "$CALLS"
  run ! grep -E "mine.py|my own.sh|test_a.py" "$CALLS"
}


@test "with FILE, only that file runs; a relative path starts at the current directory" {
  cd "$KIT/tests"
  run_sh a.bats
  [[ "$(<"$CALLS")" == "bats "*" $KIT/tests/a.bats" ]]
  rm "$CALLS"
  run_sh ./test_a.py::test_one
  [[ "$(<"$CALLS")" == pytest*" $KIT/tests/test_a.py::test_one" ]]
}


@test "the programs under test find the Python of .venv" {
  printf '#!/bin/sh\necho "$VIRTUAL_ENV" "$(command -v python)" >"$CALLS"\n' >"$BATS_TEST_TMPDIR/bin/bats"
  run_sh "$KIT/tests/a.bats"
  [ "$(<"$CALLS")" = "$KIT/.venv $KIT/.venv/bin/python" ]
}


@test "--lint runs only the linters" {
  run_sh --lint
  [ "${lines[-1]}" = "Muster: 4 passed, 0 failed, 0 skipped" ]
  run ! grep -e ^pytest -e ^bats "$CALLS"
}


@test "--quick omits slow tests and laboratories, except tests with the tag quick" {
  run_sh --quick
  [ "$status" -eq 0 ]
  [ "${lines[-1]}" = "Muster: 8 passed, 0 failed, 0 skipped" ]
  grep -qx "pytest .* -m not soak and not slow .*--numprocesses 2 .*tests" "$CALLS"
  grep -qx "bats .*--filter-tags !soak,!slow,!laboratory --filter-tags quick $KIT/tests/a.bats" "$CALLS"
  rm "$CALLS"
  run_sh
  grep -qx "bats .*--filter-tags !soak $KIT/tests/a.bats" "$CALLS"
  run_sh --quick --soak
  [ "$status" -eq 2 ]
}


@test "--changed runs linters and the affected tests, and shows the reason for each" {
  touch "$KIT"/tests/{b.bats,test_b.py}
  printf '%s\n' "tests/b.bats: scripts/b.sh, train.py" "tests/test_b.py: train.py" >"$STUBS/changed"
  run_sh --changed
  [ "$status" -eq 0 ]
  [ "${lines[-1]}" = "Muster: 8 passed, 0 failed, 0 skipped" ]
  [[ "$output" == *"tests/b.bats: scripts/b.sh, train.py"$'\n'"tests/test_b.py: train.py"* ]]
  grep -qx "bats .* $KIT/tests/b.bats" "$CALLS"
  grep -qx "pytest .*--numprocesses 2 --no-loadscope-reorder tests/test_b.py" "$CALLS"
  rm "$CALLS"

  echo "everything: requirements.txt" >"$STUBS/changed"
  run_sh --changed
  grep -qx "bats .* $KIT/tests/a.bats $KIT/tests/b.bats" "$CALLS"
  grep -qx "pytest .* tests" "$CALLS"

  : >"$STUBS/changed"
  run_sh --changed
  [ "${lines[-1]}" = "Muster: 4 passed, 0 failed, 0 skipped" ]
  echo 69 >"$STUBS/changed.status"
  run_sh --changed
  [ "$status" -eq 69 ]
  for argument in --quick --lint "$KIT/tests/a.bats"; do
    run_sh --changed "$argument"
    [ "$status" -eq 2 ]
  done
}


@test "missing files, files of other kinds and unknown options are refused" {
  run_sh nothing.py
  [ "$status" -eq 2 ]
  [[ "$stderr" == *"no file 'nothing.py' in $PWD"* ]]
  run_sh "$KIT/pyproject.toml"
  [ "$status" -eq 2 ]
  run_sh --sock
  [ "$status" -eq 2 ]
  [ ! -e "$KIT/.venv" ]
}


@test "without root, the command that installs missing programs is printed, and nothing runs" {
  without bats scontrol
  run_sh
  [ "$status" -eq 69 ]
  [[ "$stderr" == *"programs for the tests are missing; install them:"* ]]
  [[ "$stderr" == *$'\n'"  sudo apt-get install -y --no-install-recommends bats slurm-wlm" ]]
  [ ! -e "$CALLS" ]
  [ ! -e "$KIT/.venv" ]
}


@test "as root, only the missing programs are installed" {
  USER_ID=0 without scontrol
  run_sh
  [ "$status" -eq 0 ]
  [ "$(grep ^apt-get "$CALLS")" = "\
apt-get update -q
apt-get install -y --no-install-recommends slurm-wlm -q -o DPkg::Lock::Timeout=600" ]
}


@test "Ctrl-C stops the whole run, not only the current runner" {
  mkfifo "$BATS_TEST_TMPDIR/ready" "$STUBS/pytest.waits"
  cat >"$BATS_TEST_TMPDIR/bin/bats" <<'END'
#!/usr/bin/env bash
trap 'exit 1' INT
echo >"$STUBS/../ready"
while :; do sleep 0.01; done
END
  setsid env --default-signal=INT "$KIT/tests/run.sh" >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  read -r _ <"$STUBS/pytest.waits"
  read -r _ <"$BATS_TEST_TMPDIR/ready"
  kill -INT -- "-$!"
  wait $! || status=$?
  [ "$status" -eq 130 ]
  grep -qx "pytest: interrupted" "$CALLS"
  run ! grep "^Muster:" "$BATS_TEST_TMPDIR/out"
}


@test "SIGTERM stops pytest, which runs in the background" {
  mkfifo "$STUBS/pytest.waits"
  setsid "$KIT/tests/run.sh" "$KIT/tests/test_a.py" >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  read -r _ <"$STUBS/pytest.waits"
  kill -TERM $!
  wait $! || status=$?
  [ "$status" -eq 143 ]
  run ! pgrep -f -- "$BATS_TEST_TMPDIR.*pytest"
}


@test "SIGTERM stops pytest also while run.sh itself prints" {
  run_sh # creates .venv: the next call prints less
  mkfifo "$BATS_TEST_TMPDIR/full" "$STUBS/pytest.waits"
  exec 9<>"$BATS_TEST_TMPDIR/full"
  head -c 65536 /dev/zero >&9 # fills the pipe: run.sh blocks when it prints
  setsid "$KIT/tests/run.sh" "$KIT/tests/test_a.py" >&9 2>&9 3>&- &
  read -r _ <"$STUBS/pytest.waits"
  kill -TERM $!
  wait $! || status=$?
  exec 9>&-
  [ "$status" -eq 143 ]
  run ! pgrep -f -- "$BATS_TEST_TMPDIR.*pytest"
}


@test "SIGTERM kills the processes that bats started" {
  mkfifo "$BATS_TEST_TMPDIR/ready"
  cat >"$BATS_TEST_TMPDIR/bin/bats" <<'END'
#!/usr/bin/env bash
sleep 1000 &
echo $! >"$STUBS/../ready"
wait
END
  setsid "$KIT/tests/run.sh" "$KIT/tests/a.bats" >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  read -r child <"$BATS_TEST_TMPDIR/ready"
  kill -TERM $!
  wait $! || status=$?
  [ "$status" -eq 143 ]
  run ! grep -qs sleep "/proc/$child/cmdline" # the process may still be a zombie
}


@test "pytest's output is shown in one piece, after that of bats" {
  run_sh
  [[ "$output" == "bats output"$'\n'"pytest output"$'\n'"Muster: "* ]]
}


@test ".ci/run is tests/run.sh with CI=true" {
  mkdir "$KIT/.ci"
  cp "$BATS_TEST_DIRNAME/../.ci/run" "$KIT/.ci"
  printf '#!/usr/bin/env bash\necho "CI=$CI" "$@"; exit 7\n' >"$KIT/tests/run.sh"
  cd /
  run -7 bash "$KIT/.ci/run" --lint
  [ "$output" = "CI=true --lint" ]
}
