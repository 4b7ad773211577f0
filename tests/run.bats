#!/usr/bin/env bats
#
# tests/run.sh: its last line and its exit code must be true, above all when something goes wrong.
#
# It runs here in a kit of its own, with stand-ins for the runners that answer as they are told to.

bats_require_minimum_version 1.5.0


setup() {
  KIT="$BATS_TEST_TMPDIR/it's a kit"
  export CALLS="$BATS_TEST_TMPDIR/calls" ANSWERS="$BATS_TEST_TMPDIR/answers"
  mkdir -p "$KIT/scripts/lib" "$KIT/tests" "$ANSWERS" "$BATS_TEST_TMPDIR/bin"
  cp "$BATS_TEST_DIRNAME"/../scripts/lib/{common,venv}.bash "$KIT/scripts/lib"
  cp "$BATS_TEST_DIRNAME/run.sh" "$KIT/tests"
  touch "$KIT"/requirements{,-test,-trackers}.txt "$KIT/pyproject.toml" "$KIT/tests"/{a.bats,test_a.py}
  stand_ins
  PATH="$BATS_TEST_TMPDIR/bin:$PATH"
  bats_says 0 $'1..2\nok 1 works\nok 2 works too'
  pytest_says 0 '<testcase name="a" /><testcase name="b" />'
}


# Each notes its call; its exit status and report are files in $ANSWERS. Python is also pip and venv.
stand_ins() {
  cat >"$BATS_TEST_TMPDIR/bin/python3" <<'END'
#!/usr/bin/env bash
wait_for_ctrl_c() {
  trap 'echo "pytest is interrupted" >>"$CALLS"; exit 2' INT
  echo >"$ANSWERS/pytest.waits"
  while :; do sleep 0.01; done
}
case "$*" in
  --version) echo "Python 3.11.7" ;;
  "-m venv "*) mkdir -p "${@: -1}/bin" && cp -- "$0" "${@: -1}/bin/python" ;;
  "-m pip "* | "-m ensurepip "*) ;;
  "-m pytest --junitxml "*)
    echo "pytest ${*:4}" >>"$CALLS"
    echo "pytest speaks"
    [[ ! -p $ANSWERS/pytest.waits ]] || wait_for_ctrl_c
    cat "$ANSWERS/pytest.report" >"$4" 2>/dev/null
    exit "$(<"$ANSWERS/pytest")" ;;
  tests/changed.py) cat "$ANSWERS/changed"; exit "$(cat "$ANSWERS/changed.status" 2>/dev/null || echo 0)" ;;
  *) echo "${*:2}" >>"$CALLS"; exit "$(cat "$ANSWERS/$2" 2>/dev/null || echo 0)" ;;
esac
END
  cat >"$BATS_TEST_TMPDIR/bin/bats" <<'END'
#!/usr/bin/env bash
echo "bats $*" >>"$CALLS"
echo "bats speaks"
while [[ $1 != --output ]]; do shift; done
cat "$ANSWERS/bats.report" >"$2/report.tap"
exit "$(<"$ANSWERS/bats")"
END
  printf '#!/bin/sh\necho "shellcheck $*" >>"$CALLS"\n' >"$BATS_TEST_TMPDIR/bin/shellcheck"
  chmod +x "$BATS_TEST_TMPDIR/bin"/*
}


bats_says() { # <exit status> <tap>
  echo "$1" >"$ANSWERS/bats"
  echo "$2" >"$ANSWERS/bats.report"
}


pytest_says() { # <exit status> <test cases>
  echo "$1" >"$ANSWERS/pytest"
  echo "<testsuites><testsuite errors=\"0\">$2</testsuite></testsuites>" >"$ANSWERS/pytest.report"
}


run_sh() {
  run --separate-stderr "$KIT/tests/run.sh" "$@"
}


# The programs of this machine without these, and a person who is not root.
without() { # <program...>
  cp -rs /usr/bin "$BATS_TEST_TMPDIR/usr" 2>/dev/null || true
  (cd "$BATS_TEST_TMPDIR/usr" && rm -f -- "$@" id)
  printf '#!/bin/sh\necho "%s"\n' "${USER_ID:-1000}" >"$BATS_TEST_TMPDIR/usr/id"
  printf '#!/bin/sh\necho "apt-get $*" >>"$CALLS"\n' >"$BATS_TEST_TMPDIR/bin/apt-get"
  chmod +x "$BATS_TEST_TMPDIR/usr/id" "$BATS_TEST_TMPDIR/bin/apt-get"
  rm -f -- "${@/#/$BATS_TEST_TMPDIR/bin/}"
  PATH="$BATS_TEST_TMPDIR/bin:$BATS_TEST_TMPDIR/usr:/usr/sbin:/sbin"
}


@test "all is well: four linters, and what bats and pytest have counted" {
  run_sh
  [ "$status" -eq 0 ]
  [ "${lines[-1]}" = "Muster: 8 passed, 0 failed, 0 skipped" ]
}


@test "failed and skipped tests are counted, and the exit code is 1" {
  bats_says 1 $'1..4\nok 1 fine\nnot ok 2 bad\n# ok 9 only output\nok 3 later # skip no GPU\nok 4 fine'
  pytest_says 1 '<testcase name="a" /><testcase name="b"><failure message="&lt;skipped "></failure></testcase>
<testcase name="c"><skipped type="x"></skipped></testcase>
<testcase name="d"><error message="x"></error></testcase>'
  run_sh
  [ "$status" -eq 1 ]
  [ "${lines[-1]}" = "Muster: 7 passed, 3 failed, 2 skipped" ]
}


@test "a runner that dies without a report is one failure" {
  echo 139 >"$ANSWERS/pytest"
  rm "$ANSWERS/pytest.report"
  run_sh
  [ "$status" -eq 1 ]
  [ "${lines[-1]}" = "Muster: 6 passed, 1 failed, 0 skipped" ]
  [[ "$stderr" == *"pytest ended with 139"* ]]
}


@test "a runner that dies after tests that passed is one failure" {
  bats_says 1 $'1..9\nok 1 fine'
  run_sh
  [ "$status" -eq 1 ]
  [ "${lines[-1]}" = "Muster: 7 passed, 1 failed, 0 skipped" ]
}


@test "a linter that finds something is one failure, and the tests are run all the same" {
  echo 1 >"$ANSWERS/mypy"
  run_sh
  [ "$status" -eq 1 ]
  [ "${lines[-1]}" = "Muster: 7 passed, 1 failed, 0 skipped" ]
}


@test "only the files that are named, from the folder they are named in" {
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


@test "only the linters" {
  run_sh --lint
  [ "${lines[-1]}" = "Muster: 4 passed, 0 failed, 0 skipped" ]
  run ! grep -e ^pytest -e ^bats "$CALLS"
}


@test "--quick leaves out what is slow and what raises a laboratory, but for one launch by each launcher" {
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


@test "--changed: linters and the tests of what has changed, each with the reason" {
  touch "$KIT"/tests/{b.bats,test_b.py}
  printf '%s\n' "tests/b.bats: scripts/b.sh, train.py" "tests/test_b.py: train.py" >"$ANSWERS/changed"
  run_sh --changed
  [ "$status" -eq 0 ]
  [ "${lines[-1]}" = "Muster: 8 passed, 0 failed, 0 skipped" ]
  [[ "$output" == *"tests/b.bats: scripts/b.sh, train.py"$'\n'"tests/test_b.py: train.py"* ]]
  grep -qx "bats .* $KIT/tests/b.bats" "$CALLS"
  grep -qx "pytest .*--numprocesses 2 --no-loadscope-reorder tests/test_b.py" "$CALLS"
  rm "$CALLS"

  echo "everything: requirements.txt" >"$ANSWERS/changed"
  run_sh --changed
  grep -qx "bats .* $KIT/tests/a.bats $KIT/tests/b.bats" "$CALLS"
  grep -qx "pytest .* tests" "$CALLS"

  : >"$ANSWERS/changed"
  run_sh --changed
  [ "${lines[-1]}" = "Muster: 4 passed, 0 failed, 0 skipped" ]
  echo 69 >"$ANSWERS/changed.status"
  run_sh --changed
  [ "$status" -eq 69 ]
  for words in --quick --lint "$KIT/tests/a.bats"; do
    run_sh --changed "$words"
    [ "$status" -eq 2 ]
  done
}


@test "a file that is none, and an unknown option, are refused" {
  run_sh nothing.py
  [ "$status" -eq 2 ]
  [[ "$stderr" == *"no file 'nothing.py' in $PWD"* ]]
  run_sh "$KIT/pyproject.toml"
  [ "$status" -eq 2 ]
  run_sh --sock
  [ "$status" -eq 2 ]
  [ ! -e "$KIT/.venv" ]
}


@test "who is not root is told the one command, and nothing else happens" {
  without bats scontrol
  run_sh
  [ "$status" -eq 69 ]
  [[ "$stderr" == *"the tests call programs that are not here, an administrator can install them:"* ]]
  [[ "$stderr" == *$'\n'"  sudo apt-get install -y --no-install-recommends bats slurm-wlm" ]]
  [ ! -e "$CALLS" ]
  [ ! -e "$KIT/.venv" ]
}


@test "root gets what is missing installed, and only that" {
  USER_ID=0 without scontrol
  run_sh
  [ "$status" -eq 0 ]
  [ "$(grep ^apt-get "$CALLS")" = "\
apt-get update -q
apt-get install -y --no-install-recommends slurm-wlm -q -o DPkg::Lock::Timeout=600" ]
}


@test "Ctrl-C ends the run, not only the runner of the moment" {
  mkfifo "$BATS_TEST_TMPDIR/ready" "$ANSWERS/pytest.waits"
  cat >"$BATS_TEST_TMPDIR/bin/bats" <<'END'
#!/usr/bin/env bash
trap 'exit 1' INT
echo >"$ANSWERS/../ready"
while :; do sleep 0.01; done
END
  setsid env --default-signal=INT "$KIT/tests/run.sh" >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  read -r _ <"$ANSWERS/pytest.waits"
  read -r _ <"$BATS_TEST_TMPDIR/ready"
  kill -INT -- "-$!"
  wait $! || status=$?
  [ "$status" -eq 130 ]
  grep -qx "pytest is interrupted" "$CALLS"
  run ! grep "^Muster:" "$BATS_TEST_TMPDIR/out"
}


@test "TERM ends pytest, which runs beside the others" {
  mkfifo "$ANSWERS/pytest.waits"
  setsid "$KIT/tests/run.sh" "$KIT/tests/test_a.py" >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  read -r _ <"$ANSWERS/pytest.waits"
  kill -TERM $!
  wait $! || status=$?
  [ "$status" -eq 143 ]
  run ! pgrep -f -- "$BATS_TEST_TMPDIR.*pytest"
}


@test "TERM ends pytest also when it comes between two runners" {
  run_sh # what else it says is said when it has made .venv
  mkfifo "$BATS_TEST_TMPDIR/full" "$ANSWERS/pytest.waits"
  exec 9<>"$BATS_TEST_TMPDIR/full"
  head -c 65536 /dev/zero >&9 # all that a pipe holds: nothing more can be said
  setsid "$KIT/tests/run.sh" "$KIT/tests/test_a.py" >&9 2>&9 3>&- &
  read -r _ <"$ANSWERS/pytest.waits"
  kill -TERM $!
  wait $! || status=$?
  exec 9>&-
  [ "$status" -eq 143 ]
  run ! pgrep -f -- "$BATS_TEST_TMPDIR.*pytest"
}


@test "TERM ends what bats has started, which bats itself does not" {
  mkfifo "$BATS_TEST_TMPDIR/ready"
  cat >"$BATS_TEST_TMPDIR/bin/bats" <<'END'
#!/usr/bin/env bash
sleep 1000 &
echo $! >"$ANSWERS/../ready"
wait
END
  setsid "$KIT/tests/run.sh" "$KIT/tests/a.bats" >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  read -r child <"$BATS_TEST_TMPDIR/ready"
  kill -TERM $!
  wait $! || status=$?
  [ "$status" -eq 143 ]
  run ! grep -qs sleep "/proc/$child/cmdline" # it may still be a zombie
}


@test "what pytest said is shown in one piece, behind what bats said" {
  run_sh
  [[ "$output" == "bats speaks"$'\n'"pytest speaks"$'\n'"Muster: "* ]]
}


@test ".ci/run is tests/run.sh with CI=true" {
  mkdir "$KIT/.ci"
  cp "$BATS_TEST_DIRNAME/../.ci/run" "$KIT/.ci"
  printf '#!/usr/bin/env bash\necho "CI=$CI" "$@"; exit 7\n' >"$KIT/tests/run.sh"
  cd /
  run -7 bash "$KIT/.ci/run" --lint
  [ "$output" = "CI=true --lint" ]
}
