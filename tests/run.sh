#!/usr/bin/env bash
#
# The one test command: provide what the tests need, then run them all.
#
# Usage: tests/run.sh [options] [FILE...]
#
#   FILE            only this one: a pytest file (or FILE::TEST) or a bats file; then no linters
#   --lint          only the linters: ruff, mypy, shellcheck
#   --soak          also the tests marked soak, for which a quarter of an hour is too short
#   --quick         a first answer within four minutes: linters, what needs no launch, and one launch by each launcher.
#                   Left out are all faults on nodes, SLURM, training and the agent, and all job lists but one
#   --changed       linters, and the tests of what has changed on this branch since it left main, or is not committed
#   --python PATH   the Python, 3.10 or newer, to make .venv from (default: python3)
#   --help          show this
#
# Python packages go into .venv. System packages are installed with apt-get by root; for anyone else
# the command to give to an administrator is printed, and that is the end (exit code 69).
#
# pytest runs beside the linters and bats, and its output is shown when they have ended.
#
# The last line adds up what the runners counted, where each linter is one:
#
#   Muster: 143 passed, 0 failed, 2 skipped
#
# Exit code: 0 when all passed, 1 when something failed, 2 for a wrong call.
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../scripts/lib/common.bash"
# shellcheck source=scripts/lib/venv.bash
source "$KIT/scripts/lib/venv.bash"

# What the tests call, and the Debian package that has it.
TOOLS=(
  bats:bats parallel:parallel shellcheck:shellcheck g++:g++ ps:procps
  scontrol:slurm-wlm munged:munge
  ip:iproute2 /usr/sbin/iptables:iptables ssh:openssh-client /usr/sbin/sshd:openssh-server
  pdsh:pdsh rsync:rsync tmux:tmux fish:fish tcsh:tcsh
)

REQUIREMENTS=(requirements.txt requirements-trackers.txt requirements-test.txt)
WHAT=all # or files, changed, linters
SOAK=
QUICK=
CHANGED=
BASE_PYTHON=
PYTEST=() # files to give to pytest
BATS=()   # files to give to bats
PYTEST_COMMAND=()
PYTEST_RUNS='' # its process id
PASSED=0
FAILED=0
SKIPPED=0


parse_args() { # <argument...>
  while (($# > 0)); do
    case $1 in
      --lint) WHAT=linters ;;
      --soak) SOAK=1 ;;
      --quick) QUICK=1 ;;
      --changed) CHANGED=1 ;;
      --python) need_value "$@" && BASE_PYTHON=$2 && shift ;;
      --help | -h) usage && exit ;;
      -*) die_usage "unknown option '$1'" ;;
      *) choose_file "$1" ;;
    esac
    shift
  done
  ((${#SOAK} + ${#QUICK} + ${#CHANGED} <= 1)) || die_usage "--soak, --quick and --changed: give one of the three"
  if [[ $CHANGED ]]; then
    [[ $WHAT == all ]] || die_usage "--changed: chooses the files itself; give neither FILE nor --lint with it"
    WHAT=changed
  elif [[ $WHAT == all ]]; then
    choose_all
  fi
}


choose_all() {
  PYTEST=(tests)
  BATS=("$KIT"/tests/*.bats)
}


# The caller names it from the folder he is in, which we leave later.
choose_file() { # <file, or file::test>
  local file name=${1%%::*}
  [[ -f $name ]] || die_usage "no file '$name' in $PWD"
  file=$(readlink -f -- "$name")
  case $file in
    *.bats) BATS+=("$file") ;;
    *.py) PYTEST+=("$file${1#"$name"}") ;;
    *) die_usage "'$name' is neither a .py nor a .bats file" ;;
  esac
  WHAT=files
}


choose_changed() {
  local line lines
  lines=$("$PYTHON" tests/changed.py)
  while read -r line; do
    printf '%s\n' "$line"
    case ${line%%: *} in
      everything) choose_all ;;
      *.bats) BATS+=("$KIT/${line%%: *}") ;;
      *.py) PYTEST+=("${line%%: *}") ;;
    esac
  done <<<"$lines"
}


provide_system_packages() {
  local tool missing=()
  for tool in "${TOOLS[@]}"; do
    type -P "${tool%:*}" >/dev/null || missing+=("${tool#*:}")
  done
  if ((${#missing[@]} == 0)); then
    return
  fi
  local install=(apt-get install -y --no-install-recommends "${missing[@]}")
  if [[ $(id -u) != 0 ]] || ! type -P apt-get >/dev/null; then
    die_with "$EXIT_UNFIT" "the tests call programs that are not here, an administrator can install them:" \
      $'\n'"  sudo $(quote "${install[@]}")"
  fi
  run apt-get update -q
  DEBIAN_FRONTEND=noninteractive run "${install[@]}" -q -o DPkg::Lock::Timeout=600
}


# The programs under test find the Python that a person with an active environment would use, and no help of ours:
# with PYTHONUNBUFFERED a line that they keep back would not be noticed.
activate_venv() {
  unset PYTHONUNBUFFERED
  export VIRTUAL_ENV=$VENV PATH="$VENV/bin:$PATH"
}


# Run a program and set STATUS to its exit status. Who interrupts it ends the whole run.
runner() { # <program> [argument...]
  STATUS=0
  wait_for exec "$@" || STATUS=$?
  case $INTERRUPTED in
    INT) end_pytest INT && exit "$EXIT_INTERRUPTED" ;;
    TERM) end_pytest TERM && exit "$EXIT_TERMINATED" ;;
  esac
}


# A runner that ends badly without naming a failed test has crashed, and that is a failure.
add_up() { # <runner> <passed> <failed> <skipped>
  local failed=$3
  if ((STATUS != 0 && failed == 0)); then
    warn "$1 ended with $STATUS"
    failed=1
  fi
  PASSED=$((PASSED + $2)) FAILED=$((FAILED + failed)) SKIPPED=$((SKIPPED + $4))
}


occurrences() { # <pattern> <file, may be missing>
  { grep -oE -- "$1" "$2" 2>/dev/null || true; } | wc -l
}


lint() { # <name> <command...>
  show "${@:2}"
  runner "${@:2}"
  add_up "$1" "$((STATUS == 0))" 0 0
}


run_linters() {
  lint ruff "$PYTHON" -m ruff check .
  lint mypy flock pyproject.toml "$PYTHON" -m mypy # two at once break its cache
  local files
  mapfile -d '' files < <(sources -name '*.sh' -o -name '*.bash' -o -path .ci/run)
  lint shellcheck shellcheck -x "${files[@]}"
  # In bats a test is a subshell, run sets variables, and quoted source text is what we test with.
  mapfile -d '' files < <(sources -name '*.bats')
  lint shellcheck shellcheck -x --exclude SC2016,SC2030,SC2031,SC2154 "${files[@]}"
}


sources() { # <find's words for the names>
  find .ci scripts tests config benchmarks \( "$@" \) -print0 2>/dev/null || true
}


run_bats() { # <file...>
  local report=$RESULTS/report.tap skipped
  local options=(--print-output-on-failure --report-formatter tap --output "$RESULTS")
  options+=(--jobs 3 --no-parallelize-within-files) # three files at once: they wait much, above all for SLURM
  [[ $SOAK ]] || options+=(--filter-tags "!soak${QUICK:+,!slow,!laboratory}")
  [[ ! $QUICK ]] || options+=(--filter-tags quick) # or one of these
  show bats "${options[@]}" "$@"
  runner bats "${options[@]}" "$@"
  skipped=$(occurrences '^ok [0-9]+ .* # skip' "$report")
  add_up bats $(($(occurrences '^ok ' "$report") - skipped)) "$(occurrences '^not ok ' "$report")" "$skipped"
}


# Beside the others: where they wait, it computes, and the other way round.
start_pytest() { # <file...>
  PYTEST_COMMAND=("$PYTHON" -m pytest --junitxml "$RESULTS/pytest.xml")
  [[ ! $SOAK ]] || PYTEST_COMMAND+=(-m '')
  [[ ! $QUICK ]] || PYTEST_COMMAND+=(-m 'not soak and not slow')
  [[ ! -t 1 ]] || PYTEST_COMMAND+=(--color yes)
  [[ $WHAT == files ]] || PYTEST_COMMAND+=(--numprocesses 2 --no-loadscope-reorder) # tests/conftest.py says which apart
  PYTEST_COMMAND+=("$@")
  env --default-signal=INT,QUIT "${PYTEST_COMMAND[@]}" >"$RESULTS/pytest.log" 2>&1 &
  PYTEST_RUNS=$!
}


# Show what pytest has said, and what it still says, to its end.
finish_pytest() {
  local report=$RESULTS/pytest.xml
  show "${PYTEST_COMMAND[@]}"
  runner tail -n +1 -f -s 0.1 --pid "$PYTEST_RUNS" -- "$RESULTS/pytest.log"
  STATUS=0
  join "$PYTEST_RUNS" || STATUS=$?
  PYTEST_RUNS=''
  add_up pytest "$(occurrences '<testcase [^>]*/>' "$report")" \
    "$(occurrences '<(failure|error) ' "$report")" "$(occurrences '<skipped ' "$report")"
}


# Ctrl-C has reached it too; a TERM was meant for us alone, and would leave its laboratories behind.
end_pytest() { # <INT or TERM>
  [[ $PYTEST_RUNS ]] || return 0
  [[ $1 == INT ]] || kill -INT "$PYTEST_RUNS" 2>/dev/null || true
  join "$PYTEST_RUNS" || true
  PYTEST_RUNS=''
}


# bats hands no signal on, and leaves its laboratories behind.
end_bats() {
  local file lab
  while read -r file; do
    kill -KILL "${file//[!0-9]/}" 2>/dev/null || true
  done < <(grep -lsFxz -- "MUSTER_TESTS=$MUSTER_TESTS" /proc/[0-9]*/environ)
  for lab in "$MUSTER_TESTS"/*/; do
    [[ ! -d $lab ]] || MUSTER_LAB=${lab%/} "$KIT/tests/lab/lab.sh" down || true
  done
}


# Also when a signal comes between two runners.
leave() {
  trap '' INT TERM
  end_pytest TERM
  end_bats
  rm -rf -- "$RESULTS"
}


main() {
  parse_args "$@"
  cd -- "$KIT"
  provide_system_packages
  provide_venv "$BASE_PYTHON" "${REQUIREMENTS[@]}"
  activate_venv
  RESULTS=$(mktemp -d)
  export MUSTER_TESTS=$RESULTS/labs # for laboratories, and the mark of all that runs on our behalf
  mkdir -- "$MUSTER_TESTS"
  trap leave EXIT
  export BATS_TEST_TIMEOUT=300
  [[ $WHAT != changed ]] || choose_changed
  ((${#PYTEST[@]} == 0)) || start_pytest "${PYTEST[@]}"
  [[ $WHAT == files ]] || run_linters
  ((${#BATS[@]} == 0)) || run_bats "${BATS[@]}"
  ((${#PYTEST[@]} == 0)) || finish_pytest
  printf 'Muster: %d passed, %d failed, %d skipped\n' "$PASSED" "$FAILED" "$SKIPPED"
  ((FAILED == 0))
}


main "$@"
