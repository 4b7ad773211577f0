#!/usr/bin/env bash
#
# Install what the tests need, then run the linters and the tests.
#
# Usage: tests/run.sh [options] [FILE...]
#
#   FILE            run only this file, without linters: a pytest file (or FILE::TEST) or a bats file
#   --lint          run only the linters: ruff, mypy, shellcheck
#   --soak          also run the long tests, marked soak
#   --quick         run the linters, one launch per launcher, one job list, and the tests that start no ranks, agents
#                   or nodes; takes six minutes on two cores
#   --changed       run the linters, and the tests that depend on files that are uncommitted or differ from main
#   --python PATH   create .venv with this Python, 3.10 or newer (default: python3)
#   --help          show this help
#
# Python packages are installed in .venv. System packages are installed with apt-get if you are root; otherwise the
# apt-get command is printed, and the exit code is 69.
#
# pytest runs in parallel with the linters and bats; its output is shown after theirs. The last line adds up all
# results; each run of a linter counts as one test:
#
#   Muster: 143 passed, 0 failed, 2 skipped
#
# Exit codes: 0 all passed, 1 something failed, 2 wrong arguments, 69 packages are missing.
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../scripts/lib/common.bash"
source "$KIT/scripts/lib/venv.bash"

# Programs that the tests call, each with its Debian package.
TOOLS=(
  bats:bats parallel:parallel shellcheck:shellcheck g++:g++ ps:procps
  scontrol:slurm-wlm munged:munge
  ip:iproute2 /usr/sbin/iptables:iptables ssh:openssh-client /usr/sbin/sshd:openssh-server
  pdsh:pdsh rsync:rsync tmux:tmux fish:fish tcsh:tcsh zsh:zsh
)

SCOPE=all # or files, changed, linters
SOAK=
QUICK=
CHANGED=
BASE_PYTHON=
PYTEST=() # files for pytest
BATS=()   # files for bats
PYTEST_COMMAND=()
PYTEST_PID=''
PASSED=0
FAILED=0
SKIPPED=0
FAILED_RUNNERS=() # linters, and runners that failed without a failed test


parse_arguments() { # <argument...>
  while (($# > 0)); do
    case $1 in
      --lint) SCOPE=linters ;;
      --soak) SOAK=1 ;;
      --quick) QUICK=1 ;;
      --changed) CHANGED=1 ;;
      --python) need_value "$@" && BASE_PYTHON=$2 && shift ;;
      --help | -h) usage && exit ;;
      -*) die_usage "unknown option '$1'" ;;
      *) select_file "$1" ;;
    esac
    shift
  done
  ((${#SOAK} + ${#QUICK} + ${#CHANGED} <= 1)) || die_usage "--soak, --quick and --changed: give only one of them"
  if [[ $CHANGED ]]; then
    [[ $SCOPE == all ]] || die_usage "--changed: selects the files itself; leave out FILE and --lint"
    SCOPE=changed
  elif [[ $SCOPE == all ]]; then
    select_all
  fi
}


select_all() {
  PYTEST=(tests)
  mapfile -t BATS < <(ls -S -- "$KIT"/tests/*.bats) # the largest files take longest, so they start first
}


# A relative path is resolved here, before main changes the directory.
select_file() { # <file, or file::test>
  local file name=${1%%::*}
  [[ -f $name ]] || die_usage "FILE: no file '$name' in $PWD"
  file=$(readlink -f -- "$name")
  case $file in
    *.bats) BATS+=("$file") ;;
    *.py) PYTEST+=("$file${1#"$name"}") ;;
    *) die_usage "FILE: expected a .py or .bats file, got '$name'" ;;
  esac
  SCOPE=files
}


select_changed() {
  local line lines
  lines=$("$PYTHON" tests/changed.py)
  while read -r line; do
    printf '%s\n' "$line"
    case ${line%%: *} in
      everything) select_all ;;
      *.bats) BATS+=("$KIT/${line%%: *}") ;;
      *.py) PYTEST+=("${line%%: *}") ;;
    esac
  done <<<"$lines"
}


install_system_packages() {
  local tool missing=()
  for tool in "${TOOLS[@]}"; do
    type -P "${tool%:*}" >/dev/null || missing+=("${tool#*:}")
  done
  if ((${#missing[@]} == 0)); then
    return
  fi
  local install=(apt-get install -y --no-install-recommends "${missing[@]}")
  if [[ $(id -u) != 0 ]] || ! type -P apt-get >/dev/null; then
    die_with "$EXIT_UNFIT" "programs for the tests are missing; install them:" $'\n'"  sudo $(quote "${install[@]}")"
  fi
  run apt-get update -q
  DEBIAN_FRONTEND=noninteractive run "${install[@]}" -q -o DPkg::Lock::Timeout=600
}


# The programs under test use the Python of the active environment. PYTHONUNBUFFERED would hide missing flushes in them.
activate_venv() {
  unset PYTHONUNBUFFERED
  export VIRTUAL_ENV=$VENV PATH="$VENV/bin:$PATH"
}


# Run a program and set STATUS to its exit code. SIGINT and SIGTERM stop the whole test run.
run_and_wait() { # <program> [argument...]
  STATUS=0
  run_forwarding_signals exec "$@" || STATUS=$?
  case $INTERRUPTED in
    INT) stop_pytest INT && exit "$EXIT_INTERRUPTED" ;;
    TERM) stop_pytest TERM && exit "$EXIT_TERMINATED" ;;
  esac
}


# A runner that fails without a failed test (a linter, or a runner that has crashed) counts as one failure.
add_results() { # <runner> <passed> <failed> <skipped>
  local failed=$3
  if ((STATUS != 0 && failed == 0)); then
    FAILED_RUNNERS+=("$1: failed: exit code $STATUS")
    failed=1
  fi
  PASSED=$((PASSED + $2)) FAILED=$((FAILED + failed)) SKIPPED=$((SKIPPED + $4))
}


count_matches() { # <pattern> <file, may be missing>
  { grep -oE -- "$1" "$2" 2>/dev/null || true; } | wc -l
}


# Run a linter on the files of the project that match the patterns; see list_sources.
lint() { # <name> <pattern>,... <command...>
  local patterns files
  IFS=, read -r -a patterns <<<"$2"
  mapfile -d '' files < <(list_sources "${patterns[@]}")
  printf '+ %s (%d files)\n' "$(quote "${@:3}")" "${#files[@]}" >&2
  run_and_wait "${@:3}" "${files[@]}"
  add_results "$1" "$((STATUS == 0))" 0 0
}


run_linters() {
  lint ruff '*.py' "$PYTHON" -m ruff check
  # Under a lock, because concurrent runs corrupt the cache of mypy. Other users cannot open its file.
  (umask 077 && mkdir -p .mypy_cache && : >>.mypy_cache/lock)
  lint mypy '*distributed/*.py,*scripts/*.py,*tests/*.py,*train.py' flock .mypy_cache/lock "$PYTHON" -m mypy
  lint shellcheck '*.sh,*.bash,*.ci/run,*scripts/muster,*scripts/activate' shellcheck -x
  # In bats, each test is a subshell, and run sets variables; many tests contain quoted source text.
  lint shellcheck '*.bats' shellcheck -x --exclude SC2016,SC2030,SC2031,SC2154
}


# Print the matching files, each followed by a NUL byte. In a checkout, files that git does not track are left out,
# because they belong to the user.
list_sources() { # <pattern...>
  local pattern file matches=()
  for pattern; do
    matches+=(-o -path "$pattern")
  done
  if [[ -e .git ]]; then
    git ls-files -z -- "$@"
  else
    find ./* .ci \( "${matches[@]:1}" \) -print0 2>/dev/null
  fi | while IFS= read -r -d '' file; do
    [[ ! -e $file ]] || printf '%s\0' "$file"
  done
}


run_bats() { # <file...>
  local report=$RESULTS/report.tap skipped
  local options=(--print-output-on-failure --report-formatter tap --output "$RESULTS")
  options+=(--jobs 3 --no-parallelize-within-files) # three files at once: the tests mostly wait
  [[ $SOAK ]] || options+=(--filter-tags "!soak${QUICK:+,!slow,!laboratory}")
  [[ ! $QUICK ]] || options+=(--filter-tags quick) # bats selects tests that match either filter
  show bats "${options[@]}" "$@"
  run_and_wait bats "${options[@]}" "$@"
  skipped=$(count_matches '^ok [0-9]+ .* # skip' "$report")
  add_results bats $(($(count_matches '^ok ' "$report") - skipped)) "$(count_matches '^not ok ' "$report")" "$skipped"
}


# Runs in parallel with bats, whose tests mostly wait.
start_pytest() { # <file...>
  PYTEST_COMMAND=("$PYTHON" -m pytest --junitxml "$RESULTS/pytest.xml")
  [[ ! $SOAK ]] || PYTEST_COMMAND+=(-m '')
  [[ ! $QUICK ]] || PYTEST_COMMAND+=(-m 'not soak and not slow')
  [[ ! -t 1 ]] || PYTEST_COMMAND+=(--color yes)
  [[ $SCOPE == files ]] || PYTEST_COMMAND+=(--numprocesses 2 --no-loadscope-reorder) # see tests/conftest.py
  PYTEST_COMMAND+=("$@")
  env --default-signal=INT,QUIT "${PYTEST_COMMAND[@]}" >"$RESULTS/pytest.log" 2>&1 &
  PYTEST_PID=$!
}


# Show pytest's output so far, and follow it until pytest ends.
finish_pytest() {
  local report=$RESULTS/pytest.xml
  show "${PYTEST_COMMAND[@]}"
  run_and_wait tail -n +1 -f -s 0.1 --pid "$PYTEST_PID" -- "$RESULTS/pytest.log"
  STATUS=0
  join "$PYTEST_PID" || STATUS=$?
  PYTEST_PID=''
  add_results pytest "$(count_matches '<testcase [^>]*/>' "$report")" \
    "$(count_matches '<(failure|error) ' "$report")" "$(count_matches '<skipped ' "$report")"
}


# Wait until pytest has exited. Ctrl-C also reaches pytest. SIGTERM reaches only this script, which then sends SIGINT to
# pytest, because SIGTERM would end pytest before laboratories are stopped.
stop_pytest() { # <INT or TERM>
  [[ $PYTEST_PID ]] || return 0
  [[ $1 == INT ]] || kill -INT "$PYTEST_PID" 2>/dev/null || true
  join "$PYTEST_PID" || true
  PYTEST_PID=''
}


# bats forwards no signals: kill its tests and remove their laboratories here.
kill_bats() {
  local file lab
  while read -r file; do
    kill -KILL "${file//[!0-9]/}" 2>/dev/null || true
  done < <(grep -lsFxz -- "MUSTER_TESTS=$MUSTER_TESTS" /proc/[0-9]*/environ)
  for lab in "$MUSTER_TESTS"/*/; do
    [[ ! -d $lab ]] || MUSTER_LAB=${lab%/} "$KIT/tests/lab/lab.sh" down || true
  done
}


clean_up() {
  trap '' INT TERM
  stop_pytest TERM
  kill_bats
  rm -rf -- "$RESULTS"
}


main() {
  parse_arguments "$@"
  cd -- "$KIT"
  install_system_packages
  ensure_venv "$BASE_PYTHON" requirements.lock requirements-test.lock
  activate_venv
  RESULTS=$(mktemp -d)
  # The directory of laboratories. In the environment, it identifies the processes of this test run.
  export MUSTER_TESTS=$RESULTS/labs
  mkdir -- "$MUSTER_TESTS"
  trap clean_up EXIT
  # Threads of OpenMP sleep while they wait: on busy cores, spinning threads use most of the time of a training.
  export BATS_TEST_TIMEOUT=300 GOMP_SPINCOUNT=0
  [[ $SCOPE != changed ]] || select_changed
  ((${#PYTEST[@]} == 0)) || start_pytest "${PYTEST[@]}"
  [[ $SCOPE == files ]] || run_linters
  ((${#BATS[@]} == 0)) || run_bats "${BATS[@]}"
  ((${#PYTEST[@]} == 0)) || finish_pytest
  # pytest lists its failures at its end; those of the others are far above.
  sed -n 's/^not ok \([0-9]* .*\)/bats: failed: \1/p' "$RESULTS/report.tap" 2>/dev/null || true
  ((${#FAILED_RUNNERS[@]} == 0)) || printf '%s\n' "${FAILED_RUNNERS[@]}"
  printf 'Muster: %d passed, %d failed, %d skipped\n' "$PASSED" "$FAILED" "$SKIPPED"
  ((FAILED == 0))
}


main "$@"
