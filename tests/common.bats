#!/usr/bin/env bats
#
# scripts/lib/common.bash and node_env.bash, which the other scripts source. They must work with any names of
# directories, through symbolic links, and from any working directory.

bats_require_minimum_version 1.5.0


setup() {
  KIT="$BATS_TEST_TMPDIR/a 'kit' & \"more\" \$HOME"
  mkdir -p "$KIT/scripts/lib" "$KIT/distributed" "$BATS_TEST_TMPDIR/elsewhere"
  cp "$BATS_TEST_DIRNAME"/../scripts/lib/{environment.bash,common.bash,node_env.bash,module.py} "$KIT/scripts/lib"
  unset VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV
}


# Write a script with this body into the copy of Muster. Sets SCRIPT.
script() { # <body on standard input>
  SCRIPT="$KIT/scripts/do_it.sh"
  {
    cat <<'END'
#!/usr/bin/env bash
#
# Do it.
#
# Usage: do_it.sh [options] WHAT
#   --fast   in a hurry
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/common.bash"
# shellcheck source=scripts/lib/node_env.bash
source "$KIT/scripts/lib/node_env.bash"
END
    cat
  } >"$SCRIPT"
  chmod +x "$SCRIPT"
}


# Write an executable that prints this reply to --version, as Python or another program would.
python() { # <path> <reply to --version>
  mkdir -p "$(dirname "$1")"
  printf '#!/bin/sh\necho "%s"\n' "$2" >"$1"
  chmod +x "$1"
}


@test "sourcing common.bash and node_env.bash prints nothing" {
  script </dev/null
  run "$SCRIPT"
  [ "$status" -eq 0 ]
  [ -z "$output" ]
}


@test "KIT is the root of the repository, also through a chain of symbolic links" {
  script <<<'printf "%s\n" "$KIT"; usage'
  ln -s "$SCRIPT" "$BATS_TEST_TMPDIR/elsewhere/first"
  ln -s first "$BATS_TEST_TMPDIR/elsewhere/second"
  cd "$BATS_TEST_TMPDIR"
  CDPATH=/tmp:/ run --separate-stderr elsewhere/second
  [ "${lines[0]}" = "$KIT" ]
  [ "${lines[1]}" = "Do it." ]
}


@test "messages go to standard error, and log prints nothing with QUIET=1" {
  script <<<'log said; warn warned'
  run --separate-stderr "$SCRIPT"
  [ -z "$output" ]
  [ "$stderr" = $'do_it.sh: said\ndo_it.sh: warning: warned' ]
  script <<<'QUIET=1; log said; warn warned'
  run --separate-stderr "$SCRIPT"
  [ "$stderr" = 'do_it.sh: warning: warned' ]
}


@test "die exits with 1, die_with with the given code, and die_usage with 2 and a hint" {
  script <<<'die "node7: unreachable"; echo still here'
  run -1 --separate-stderr "$SCRIPT"
  [ "$stderr" = 'do_it.sh: node7: unreachable' ]
  [ -z "$output" ]
  script <<<'die_with "$EXIT_UNFIT" "node7: unreachable"'
  run -69 "$SCRIPT"
  script <<<'die_usage "NPROC is '"'zero'"'"'
  run -2 --separate-stderr "$SCRIPT"
  [ "$stderr" = $'do_it.sh: NPROC is \'zero\'\nTry: do_it.sh --help' ]
}


@test "need_value refuses an option whose value is missing, empty or another option" {
  script <<<'need_value "$@"; echo "$2"'
  run -2 "$SCRIPT" --python ''
  run -2 "$SCRIPT" --python
  [ "${lines[0]}" = 'do_it.sh: --python needs a value' ]
  run -2 "$SCRIPT" --log-dir --dry-run
  [ "${lines[0]}" = "do_it.sh: --log-dir needs a value, got the option '--dry-run'" ]
}


@test "quote: the shell parses a quoted command to the same arguments" {
  script <<<'quote "$@"'
  local arguments=(plain 'a b' "it's" '"' '$HOME' '`id`' '*' '' '~' 'a\b' $'two\nlines' 'ends in blank ')
  arguments+=('#x' '!' 'ü' '&&' -n)
  eval "read_back=($("$SCRIPT" "${arguments[@]}"))"
  [ "${#read_back[@]}" -eq "${#arguments[@]}" ]
  for i in "${!arguments[@]}"; do
    [ "${read_back[i]}" = "${arguments[i]}" ]
  done
  run "$SCRIPT"
  [ -z "$output" ]
}


@test "run shows the command, runs it and returns its exit code" {
  script <<<'run sh -c "echo \$1; exit 7" - "a b"'
  run -7 --separate-stderr "$SCRIPT"
  [ "$output" = "a b" ]
  [ "$stderr" = '+ sh -c echo\ \$1\;\ exit\ 7 - a\ b' ]
}


@test "with DRY_RUN=1, run only shows the command" {
  script <<<'DRY_RUN=1; run touch "$KIT/made"; echo on'
  run -0 "$SCRIPT"
  [ "${lines[1]}" = on ]
  [ ! -e "$KIT/made" ]
}


@test "DRY_RUN and QUIET in the environment do not change a script, and reach its programs" {
  script <<<'log said; run touch "$KIT/made"; exec_in_environment 0 env'
  DRY_RUN=1 QUIET=1 run -0 "$SCRIPT"
  [ -e "$KIT/made" ]
  [[ "$output" == 'do_it.sh: said'* ]]
  grep -qx DRY_RUN=1 <<<"$output"
  grep -qx QUIET=1 <<<"$output"
}


@test "run_forwarding_signals returns the exit code of the program, which can read standard input" {
  script <<<'run_forwarding_signals exec sh -c "read -r x; echo got \$x; exit 9" || echo $?-$INTERRUPTED'
  run "$SCRIPT" <<<word
  [ "$output" = $'got word\n9-' ]
}


@test "run_forwarding_signals forwards SIGTERM and waits until the program exits" {
  mkfifo "$BATS_TEST_TMPDIR/ready"
  script <<'END'
program='trap "echo saved; exit 75" TERM; echo >"$1"; while :; do sleep 0.01; done'
run_forwarding_signals exec bash -c "$program" - "$1" || echo $?-$INTERRUPTED
END
  "$SCRIPT" "$BATS_TEST_TMPDIR/ready" >"$BATS_TEST_TMPDIR/out" 3>&- &
  read -r _ <"$BATS_TEST_TMPDIR/ready"
  kill -TERM $!
  wait $!
  [ "$(<"$BATS_TEST_TMPDIR/out")" = $'saved\n75-TERM' ]
}


@test "run_forwarding_signals also forwards signals such as SIGHUP and SIGUSR1, and still waits for the program" {
  local name
  mkfifo "$BATS_TEST_TMPDIR/ready"
  script <<'END'
program='trap "echo got; exit 75" "$2"; echo >"$1"; while :; do sleep 0.01; done'
run_forwarding_signals exec bash -c "$program" - "$@" || echo $?-$INTERRUPTED
END
  for name in HUP QUIT USR1 ALRM RTMIN; do
    env --default-signal=QUIT,ALRM "$SCRIPT" "$BATS_TEST_TMPDIR/ready" "$name" >"$BATS_TEST_TMPDIR/out" 3>&- &
    read -r _ <"$BATS_TEST_TMPDIR/ready"
    kill -s "$name" $!
    wait $!
    [ "$(<"$BATS_TEST_TMPDIR/out")" = $'got\n75-' ]
  done
}


@test "Ctrl-C ends a program that run_forwarding_signals waits for" {
  mkfifo "$BATS_TEST_TMPDIR/ready"
  script <<'END'
run_forwarding_signals exec sh -c 'echo >"$1"; while :; do sleep 0.01; done' - "$1" || echo $?-$INTERRUPTED
END
  setsid env --default-signal=INT "$SCRIPT" "$BATS_TEST_TMPDIR/ready" >"$BATS_TEST_TMPDIR/out" 3>&- &
  read -r _ <"$BATS_TEST_TMPDIR/ready"
  kill -INT -- "-$!"
  wait $!
  [ "$(<"$BATS_TEST_TMPDIR/out")" = 130-INT ]
}


@test "pick_python prefers --python, then the active environment, ./.venv, Muster's .venv and python3, in this order" {
  script <<<'pick_python "${1-}"; printf "%s\n" "$PYTHON"'
  cd "$BATS_TEST_TMPDIR/elsewhere"
  python "$BATS_TEST_TMPDIR/path/python3" 'Python 3.13.0'
  PATH="$BATS_TEST_TMPDIR/path:$PATH"
  [ "$("$SCRIPT")" = "$BATS_TEST_TMPDIR/path/python3" ]
  python "$KIT/.venv/bin/python" 'Python 3.10.2'
  [ "$("$SCRIPT")" = "$KIT/.venv/bin/python" ]
  python .venv/bin/python 'Python 3.10.1'
  [ "$("$SCRIPT")" = "$PWD/.venv/bin/python" ]
  python conda/bin/python 'Python 3.12.2'
  export CONDA_PREFIX=$PWD/conda
  [ "$(CONDA_DEFAULT_ENV=train "$SCRIPT")" = "$PWD/conda/bin/python" ]
  [ "$(CONDA_DEFAULT_ENV=base "$SCRIPT")" = "$PWD/.venv/bin/python" ]
  python "it's active/bin/python" 'Python 3.12.1'
  [ "$(CONDA_DEFAULT_ENV=train VIRTUAL_ENV="$PWD/it's active" "$SCRIPT")" = "$PWD/it's active/bin/python" ]
  python mine/python 'Python 3.11.1'
  [ "$(VIRTUAL_ENV=$PWD/active "$SCRIPT" mine/python)" = "$PWD/mine/python" ]
  [ "$("$SCRIPT" python3)" = "$BATS_TEST_TMPDIR/path/python3" ]
}


@test "all candidate Pythons are listed once, with their origin" {
  script <<<'pick_python "${1-}"; ((!${#PYTHONS[@]})) || printf "%s\n" "${PYTHON_ORIGINS[@]}"'
  cd "$KIT"
  python .venv/bin/python 'Python 3.10.1'
  python conda/bin/python 'Python 3.10.1'
  ln -s .venv active
  export VIRTUAL_ENV=$PWD/active CONDA_PREFIX=$PWD/conda
  [ "$("$SCRIPT")" = $'the active virtual environment\nthe active conda environment' ]
  [ "$(CONDA_DEFAULT_ENV=base "$SCRIPT")" = "the active virtual environment"$'\n'"PATH, conda's base environment" ]
  cd conda
  [ "$(VIRTUAL_ENV='' "$SCRIPT")" = $'the active conda environment\nMuster\'s .venv' ]
  [ -z "$("$SCRIPT" bin/python)" ]
}


@test "pick_python does not resolve the symbolic link bin/python of a virtual environment" {
  script <<<'pick_python; printf "%s\n" "$PYTHON"'
  cd "$BATS_TEST_TMPDIR/elsewhere"
  python "$BATS_TEST_TMPDIR/real/python" 'Python 3.12.1'
  mkdir -p .venv/bin
  ln -s "$BATS_TEST_TMPDIR/real/python" .venv/bin/python
  [ "$("$SCRIPT")" = "$PWD/.venv/bin/python" ]
}


@test "a Python that is missing, broken or too old is refused in one line with its origin" {
  script <<<'pick_python "${1-}"'
  cd "$BATS_TEST_TMPDIR/elsewhere"
  run -2 "$SCRIPT" /nowhere/python
  [ "${lines[0]}" = "do_it.sh: no Python at '/nowhere/python' (from --python); choose another with \
--python PATH" ]
  VIRTUAL_ENV=/gone run -2 "$SCRIPT"
  [[ "${lines[0]}" == "do_it.sh: no Python at '/gone/bin/python' (from the active virtual environment)"* ]]
  CONDA_PREFIX=/gone CONDA_DEFAULT_ENV=tools run -2 "$SCRIPT"
  [[ "${lines[0]}" == "do_it.sh: no Python at '/gone/bin/python' (from the active conda environment)"* ]]
  mkdir .venv
  run -2 "$SCRIPT"
  [[ "${lines[0]}" == *"no Python at '$PWD/.venv/bin/python' (from .venv of the working directory)"* ]]
  python old 'Python 3.9.18'
  run -2 "$SCRIPT" ./old
  [[ "${lines[0]}" == *"old' (from --python) is Python 3.9.18, older than 3.10"* ]]
  python old 'Python 2.7.18'
  run -2 "$SCRIPT" ./old
  python odd 'command not found'
  run -2 "$SCRIPT" ./odd
  [[ "${lines[0]}" == *"odd' (from --python) is not a working Python"* ]]
  [ "${#lines[@]}" -eq 2 ]
}


@test "kit_python runs a module of Muster, whatever the working directory and PYTHONPATH are" {
  script <<<'pick_python "$1"; kit_python where "a b" c'
  touch "$KIT/distributed/__init__.py"
  echo 'import os; main = lambda arguments: print(os.getcwd(), arguments)' >"$KIT/distributed/where.py"
  mkdir -p "$BATS_TEST_TMPDIR/elsewhere/distributed"
  touch "$BATS_TEST_TMPDIR/elsewhere/distributed/__init__.py"
  cd "$BATS_TEST_TMPDIR/elsewhere"
  touch typing.py
  PYTHONSAFEPATH=1 PYTHONPATH=$PWD PYTHONINSPECT=1 PYTHONWARNINGS=error run -0 "$SCRIPT" python3
  [ "$output" = "$KIT ['a b', 'c']" ]
}


# Functions like those of environment modules and conda, which fail under `set -e` and `set -u`.
modules() {
  cat <<'END'
[ -n "$NOT_SET" ] && echo interactive
false
module() {
  local x=$NOT_SET
  false
  eval "$(printf 'false\nexport LOADED=%s\n' "$2")"
  [ "$2" != none ] || return 3
}
conda() { [ "$1" = activate ] && __conda_activate "$2"; }
__conda_activate() { local rc; [ -d "$NOT_SET" ]; rc=$?; test "$rc" -eq 0 || export CONDA_DEFAULT_ENV=$1; }
true
END
}


@test "exec_in_environment runs a command in the caller's environment, without the script's variables" {
  script <<<'AGENT=fast NODES=(a b); declare -A ADDRESS=([a]=b); unset RANK; MINE=1; exec_in_environment 2 "A=1 2" AGENT2= env'
  AGENT=ppo NODES=3 ADDRESS=x RANK=7 run env -u _ "$SCRIPT"
  for entry in AGENT=ppo NODES=3 ADDRESS=x "A=1 2" AGENT2=; do
    grep -qxF -- "$entry" <<<"$output"
  done
  run ! grep -E "^(RANK|MINE)=" <<<"$output"
}


@test "exported functions, of whatever name, reach a program byte for byte and never replace a command of a script" {
  script <<<'cd / && log said; exec_in_environment 2 A=1 B=2 "$KIT/a=b" -0'
  cp "$(type -P env)" "$KIT/a=b"
  local name options=('BASH_FUNC_set%%=() {   return 1; }') # `set` is the first command of each script
  for name in builtin unset shift declare export eval env exec local read cd log printf trap nice command; do
    options+=("BASH_FUNC_$name%%=() {   echo replaced; return 1; }")
  done
  cd "$BATS_TEST_TMPDIR"
  timeout 20 env -u _ "${options[@]}" "$SCRIPT" >out 2>err
  tr '\0' '\n' <out >lines
  for name in "${options[@]}" A=1 B=2; do
    grep -qxF -- "$name" lines || { echo "$name" && return 1; }
  done
  run ! grep -x replaced lines
  [ "$(cat err)" = 'do_it.sh: said' ]
}


@test "exported functions can be called in node_env.sh, and replace no command that a script runs later" {
  script <<'END'
cat >node_env.sh <<<'module torch; "${CHANGE[@]-true}"'
restore_environment
source_node_env "$PWD/node_env.sh" >&2
export_entry A=1
exec_by_env env
END
  local name options=("BASH_FUNC_module%%=() {  echo loaded \$1; }")
  for name in set unset shift declare export eval exec trap env builtin command; do
    options+=("BASH_FUNC_$name%%=() {   return 1; }")
  done
  cd "$BATS_TEST_TMPDIR"
  run -0 --separate-stderr timeout 20 env "${options[@]}" "$SCRIPT"
  [ "$stderr" = 'loaded torch' ]
  for name in "${options[@]}" A=1; do
    grep -qxF -- "$name" <<<"$output" || { echo "$name" && return 1; }
  done
}


@test "functions that node_env.sh changes, adds or removes reach the program as it leaves them" {
  script <<'END'
cat >node_env.sh <<<'old() { echo new; }; added() { echo added; }; export -f added; unset -f gone'
restore_environment
source_node_env "$PWD/node_env.sh"
exec_by_env bash -c 'old; added; ! command -V gone; kept'
END
  cd "$BATS_TEST_TMPDIR"
  run -0 --separate-stderr env 'BASH_FUNC_old%%=() { echo old; }' 'BASH_FUNC_gone%%=() { echo gone; }' \
    'BASH_FUNC_kept%%=() { echo kept; }' "$SCRIPT"
  [ "$output" = $'new\nadded\nkept' ]
}


@test "a node_env.sh whose functions and files fail under set -e is sourced to its end" {
  script <<<'source_node_env "$1"; echo "${LOADED-} ${CONDA_DEFAULT_ENV-} $-$(set -o | grep pipefail)"'
  cd "$BATS_TEST_TMPDIR"
  modules >modules.sh
  printf '%s\n' 'source ./modules.sh' 'module load cuda/12' 'conda activate train' 'none && true' 'if none; then :; fi' \
    'none || true' 'none | true' 'x=$NOT_SET' '[[ -d /none ]] && export X=1' >env.sh
  run --separate-stderr -0 "$SCRIPT" "$PWD/env.sh"
  [[ "$output" == "cuda/12 train ehuB"*on ]]
}


@test "a command of node_env.sh that fails is reported with its line and ends the process with 69" {
  local line failing=(
    "3: 'module load none' failed with exit code 3" 'source ./modules.sh' ' ' '  module load none'
    "1: 'module load x' failed with exit code 127" 'module load x' 'true'
    "1: 'source /none/conda.sh' failed with exit code 1" 'source /none/conda.sh' ' '
    "2: 'module load none' failed with exit code 3" 'source ./modules.sh' "module load \\" " none"
    "4: 'grep -q x /dev/null' failed with exit code 1" 'set +e' 'none' 'set -e' 'grep -q x /dev/null'
  )
  script <<<'source_node_env "$1" echo cleaned up; echo NOT REACHED'
  cd "$BATS_TEST_TMPDIR"
  modules >modules.sh
  while IFS= read -r line; do
    if [[ $line == [0-9]:* ]]; then
      [[ ! -e env.sh ]] || reports_failure
      expected=$line
      : >env.sh
    else
      printf '%s\n' "$line" >>env.sh
    fi
  done < <(printf '%s\n' "${failing[@]}" 0:)
}


reports_failure() {
  local command=${expected#*\'}
  command=${command%\'*}
  MUSTER_NODE=node2 run --separate-stderr "$SCRIPT" "$PWD/env.sh"
  [ "$status" -eq 69 ]
  [ "$output" = "cleaned up" ]
  [ "${stderr_lines[-1]}" = "node2: $PWD/env.sh: line $expected; fix it, or write '$command || true'" ]
}


@test "set +e in node_env.sh lets commands below it fail" {
  script <<<'source_node_env "$1"; echo reached'
  printf '%s\n' '# mine' 'set +e' none false >"$BATS_TEST_TMPDIR/env.sh"
  run --separate-stderr -0 "$SCRIPT" "$BATS_TEST_TMPDIR/env.sh"
  [ "$output" = reached ]
}


@test "a node_env.sh that exits, or that bash cannot read to its end, ends the process with 69" {
  script <<<'source_node_env "$1"; echo NOT REACHED'
  echo 'exit 0' >"$BATS_TEST_TMPDIR/env.sh"
  run -69 "$SCRIPT" "$BATS_TEST_TMPDIR/env.sh"
  [ "$output" = "$BATS_TEST_TMPDIR/env.sh: exited with code 0, so nothing was started; it is sourced and must neither exit nor exec a command" ]
  printf 'true\nif then\n' >"$BATS_TEST_TMPDIR/env.sh"
  run -69 "$SCRIPT" "$BATS_TEST_TMPDIR/env.sh"
  [[ "${lines[-1]}" == "$BATS_TEST_TMPDIR/env.sh: line 2: syntax error near unexpected token"* ]]
}


@test "a node_env.sh that replaces the ERR trap is refused; a failure in one that redirects stderr is still reported" {
  script <<<'source_node_env "$1"; echo reached; echo heard >&2'
  cd "$BATS_TEST_TMPDIR"
  for trap in "trap 'echo mine' ERR" 'trap - ERR'; do
    printf '%s\n' "$trap" false >env.sh
    run -69 "$SCRIPT" "$PWD/env.sh"
    [ "${lines[-1]}" = "$PWD/env.sh: changes the ERR trap, which detects failing commands; do not set or remove it" ]
  done
  printf '%s\n' 'exec >/dev/null 2>&1' false >env.sh
  run -69 "$SCRIPT" "$PWD/env.sh"
  [ "$output" = "$PWD/env.sh: line 2: 'false' failed with exit code 1; fix it, or write 'false || true'" ]
  printf '%s\n' 'exec 2>/dev/null' >env.sh
  run --separate-stderr -0 "$SCRIPT" "$PWD/env.sh"
  [ "$output" = reached ]
  [ "$stderr" = heard ]
}


@test "a node_env.sh that other users can change is refused with the path and the remedy, and is not sourced" {
  script <<<'restore_environment; source_node_env "$1" echo cleaned up'
  local top="$BATS_TEST_TMPDIR/my work" file
  mkdir -p "$top/config"
  file="$top/config/node_env.sh"
  echo 'echo SOURCED' >"$file"
  run -0 "$SCRIPT" "$file"
  [ "$output" = SOURCED ]
  chmod 666 "$file"
  MUSTER_NODE=node1 run -69 "$SCRIPT" "$file"
  [ "$output" = "node1: $file: other users can write it (mode 666); call: chmod go-w ${file/ /\\ }"$'\n''cleaned up' ]
  IFS=6: POSIXLY_CORRECT=1 LC_ALL=none run -69 "$SCRIPT" "$file"
  [[ "$output" != *SOURCED* ]]
  chmod 602 "$file"
  run -69 "$SCRIPT" "$file"
  chmod 644 "$file"
  ln -s "$file" "$BATS_TEST_TMPDIR/link.sh"
  local directory
  for directory in "$top/config/" "$top/"; do
    chmod 777 "$directory"
    for name in "$file" "$BATS_TEST_TMPDIR/link.sh"; do
      run -69 "$SCRIPT" "$name"
      [ "${lines[0]}" = "$name: $directory: other users can write it (mode 777); call: chmod go-w ${directory/ /\\ }" ]
    done
    chmod 1777 "$directory" # like /tmp: others cannot replace the entries
    run -0 "$SCRIPT" "$file"
    chmod 755 "$directory"
  done
}


@test "node_env.sh may belong to the caller, root and the owner of Muster's directory, and not to another user" {
  ((!EUID)) || skip "only root can give files to other users"
  script <<<'source_node_env "$1"'
  mkdir -p "$BATS_TEST_TMPDIR/config"
  local file="$BATS_TEST_TMPDIR/config/node_env.sh" path
  echo 'echo SOURCED' >"$file"
  for path in "$file" "${file%/*}/"; do
    chown 23456 "$path"
    run -69 "$SCRIPT" "$file"
    [[ "$output" == *"$path: belongs to UNKNOWN (user id 23456), who could run commands as you; use a copy of your own" ]]
    chown -R 23456 "$KIT"
    run -0 "$SCRIPT" "$file"
    chown -R 0 "$KIT"
    chown 0 "$path"
  done
  # Another user calls it: root's file is accepted, the file of a third user is not.
  chmod 755 "$BATS_TEST_TMPDIR" "$BATS_RUN_TMPDIR" "${BATS_TEST_TMPDIR%/*}"
  run -0 setpriv --reuid=23456 --regid=23456 --clear-groups "$SCRIPT" "$file"
  chown 34567 "$file"
  run -69 setpriv --reuid=23456 --regid=23456 --clear-groups "$SCRIPT" "$file"
}


# Another user could move the file away during the check, and back before it is sourced.
@test "a node_env.sh that is missing while it is checked is refused" {
  script <<<'stat() { command stat "$@" | sed 1d; }; source_node_env "$1"; echo NOT REACHED'
  mkdir -p "$BATS_TEST_TMPDIR/config"
  touch "$BATS_TEST_TMPDIR/config/node_env.sh"
  run -69 "$SCRIPT" "$BATS_TEST_TMPDIR/config/node_env.sh"
  [[ "$output" == *"missing, or another program changes it"* ]]
}


@test "the .venv of the working directory is not used if another user has made it" {
  ((!EUID)) || skip "only root can give files to other users"
  script <<<'pick_python "$@"; echo "$PYTHON"'
  mkdir -p "$BATS_TEST_TMPDIR/project/.venv/bin"
  cd "$BATS_TEST_TMPDIR/project"
  ln -s "$(type -P python3)" .venv/bin/python
  run -0 env -u VIRTUAL_ENV "$SCRIPT"
  [ "$output" = "$PWD/.venv/bin/python" ]
  chown 23456 .venv
  run -69 env -u VIRTUAL_ENV "$SCRIPT"
  [[ "$output" == *"$PWD/.venv: belongs to UNKNOWN (user id 23456), who could run commands as you; if you trust it: --python $PWD/.venv/bin/python" ]]
  run -0 env -u VIRTUAL_ENV "$SCRIPT" "$PWD/.venv/bin/python"
  # A link to Muster's .venv is not used itself: another user could lead it elsewhere.
  mv .venv "$KIT/.venv"
  chown -R 0 "$KIT/.venv"
  ln -s "$KIT/.venv" .venv
  chown -h 23456 .venv
  run -0 env -u VIRTUAL_ENV "$SCRIPT"
  [ "$output" = "$KIT/.venv/bin/python" ]
  rm .venv
  mv "$KIT/.venv" .venv
  # A link of another user, such as to /tmp, and a directory to which others can write.
  mv .venv theirs
  chown 0 theirs
  ln -s theirs .venv
  run -0 env -u VIRTUAL_ENV "$SCRIPT"
  chown -h 23456 .venv
  run -69 env -u VIRTUAL_ENV "$SCRIPT"
  chown -h 0 .venv
  local path
  mkdir -p theirs/lib/python3/site-packages
  for path in bin lib/python3/site-packages; do # the sticky bit keeps nothing out that Python imports
    chmod 1777 "theirs/$path"
    run -69 env -u VIRTUAL_ENV "$SCRIPT"
    [[ "$output" == *"$PWD/.venv/$path: other users can write it (mode 1777); call: chmod -R go-w $PWD/.venv" ]]
    chgrp 23456 "theirs/$path"
    chmod 775 "theirs/$path"
    run -69 env -u VIRTUAL_ENV "$SCRIPT"
    chmod 755 "theirs/$path"
  done
  chown -h 23456 theirs/bin/python
  run -69 env -u VIRTUAL_ENV "$SCRIPT"
  [[ "$output" == *"$PWD/.venv/bin/python: belongs to UNKNOWN (user id 23456), who could run commands as you; if you trust"* ]]
  cp "$(type -P true)" theirs/bin/copy
  mv theirs/bin/copy theirs/bin/python
  chown 23456 theirs/bin/python
  run -69 env -u VIRTUAL_ENV "$SCRIPT"
  # Python itself may be that of another user, to which the caller has made a link.
  mkdir software
  printf '#!/bin/sh\necho Python 3.12.0\n' >software/python
  chmod 755 software/python
  chown -R 23456 software
  ln -sf ../../software/python theirs/bin/python
  run -0 env -u VIRTUAL_ENV "$SCRIPT"
  # Another user's link may vanish for the time of the check.
  chown -h 23456 .venv
  mkdir bin
  printf '#!/bin/sh\ncase "$*" in *.venv*) exit 1; esac\nexec %s "$@"\n' "$(type -P stat)" >bin/stat
  chmod +x bin/stat
  PATH=$PWD/bin:$PATH run -69 env -u VIRTUAL_ENV "$SCRIPT"
  [[ "$output" == *"$PWD/.venv"*": missing, or another program changes it; if you trust it: --python "* ]]
  printf '#!/bin/sh\n' >bin/find
  chmod +x bin/find
  PATH=$PWD/bin:$PATH run -69 env -u VIRTUAL_ENV "$SCRIPT"
  [[ "$output" == *"find: not on the PATH, so the owners of $PWD/.venv cannot be checked; if you trust it: --python "* ]]
}


@test "a link of another user is found on the way to where the caller's links lead" {
  ((!EUID)) || skip "only root can give files to other users"
  script <<<'pick_python; check_kit; source_node_env "$PWD/config/node_env.sh"; echo "$PYTHON"'
  mkdir -p "$BATS_TEST_TMPDIR/project/real/config"
  cd "$BATS_TEST_TMPDIR/project"
  touch real/config/node_env.sh
  ln -s "$PWD/real" 'the "irs" -> '
  ln -s './/the "irs" -> ' first
  local venv target path
  for venv in "$PWD/.venv" "$KIT/.venv"; do
    for target in 'the "irs" -> ' first 'first/../the "irs" -> /' 'the "irs" -> /../real'; do
      for path in .venv .venv/lib config config/node_env.sh; do
        rm -rf .venv "$KIT/.venv" config real/bin real/lib
        mkdir -p real/{bin,lib} "$venv/bin" config
        touch config/node_env.sh
        ln -s "$(type -P python3)" real/bin/python
        ln -s "$(type -P python3)" "$venv/bin/python"
        case $path in
          .venv) rm -r "$venv" && ln -s "$PWD/$target" "$venv" ;;
          .venv/lib) ln -s "$PWD/$target/lib" "$venv/lib" ;;
          config) rm -r config && ln -s "$target/config" config ;;
          *) ln -sf "../$target/config/node_env.sh" config ;;
        esac
        run -0 "$SCRIPT"
        [ "$output" = "$venv/bin/python" ]
        chown -h 23456 'the "irs" -> '
        run -69 "$SCRIPT"
        [[ "$output" == *'/the "irs" -> : belongs to UNKNOWN (user id 23456), who could run commands as you; '* ]]
        chown -h 0 'the "irs" -> '
      done
    done
  done
}


@test "a directory of a .venv that others can write is found behind the caller's links" {
  script <<<'pick_python; check_kit; echo "$PYTHON"'
  mkdir "$BATS_TEST_TMPDIR/project"
  cd "$BATS_TEST_TMPDIR/project"
  local venv path link
  for venv in "$PWD/.venv" "$KIT/.venv"; do
    mkdir -p libs/python3/real "$venv/bin"
    ln -s "$(type -P python3)" "$venv/bin/python"
    ln -s "$PWD/libs" "$venv/lib"
    ln -s lib "$venv/lib64"
    ln -s "$PWD/libs/python3" libs/python3.12
    ln -s ../python3/real libs/python3/site-packages
    : >settings
    ln -s "$PWD/settings" "$venv/pyvenv.cfg"
    run -0 "$SCRIPT"
    [ "$output" = "$venv/bin/python" ]
    for path in libs:lib/ libs/python3:lib/python3 libs/python3/real:lib/python3.12/real settings:pyvenv.cfg; do
      link=${path#*:} path=${path%:*}
      chmod o+w "$path"
      run -69 "$SCRIPT"
      [[ "$output" == *": $venv/$link: other users can write it (mode "[67]*"; call: "* ]]
      chmod o-w "$path"
    done
    # Distributions such as Fedora import from lib64 too.
    ln -sfn "$PWD/more" "$venv/lib64"
    mkdir -p more/python3/site-packages
    run -0 "$SCRIPT"
    chmod 1777 more/python3/site-packages
    run -69 "$SCRIPT"
    [[ "$output" == *": $venv/lib64/python3/site-packages: other users can write it (mode 1777); call: "* ]]
    rm -r "$venv" libs more
  done
}


@test "a link to config that another user has made is refused: he could lead it elsewhere" {
  ((!EUID)) || skip "only root can make links of other users"
  script <<<'source_node_env "$1"'
  mkdir -p "$BATS_TEST_TMPDIR/mine" "$BATS_TEST_TMPDIR/project"
  echo 'echo SOURCED' >"$BATS_TEST_TMPDIR/mine/node_env.sh"
  local config="$BATS_TEST_TMPDIR/project/config"
  ln -s ../mine "$config"
  run -0 "$SCRIPT" "$config/node_env.sh"
  [ "$output" = SOURCED ]
  chown -h 23456 "$config"
  run -69 "$SCRIPT" "$config/node_env.sh"
  [[ "$output" == *"$config/node_env.sh: $config: belongs to UNKNOWN (user id 23456), who could run commands as you;"* ]]
  rm "$config"
  mkdir "$config"
  ln -s ../../mine/node_env.sh "$config/node_env.sh"
  run -0 "$SCRIPT" "$config/node_env.sh"
  chown -h 23456 "$config/node_env.sh"
  run -69 "$SCRIPT" "$config/node_env.sh"
  [[ "$output" == *"$config/node_env.sh: belongs to UNKNOWN (user id 23456), who could run commands as you;"* ]]
  chown -h 0 "$config/node_env.sh"
  chmod 666 "$BATS_TEST_TMPDIR/mine/node_env.sh"
  run -69 "$SCRIPT" "$config/node_env.sh"
  [[ "$output" == *"node_env.sh: other users can write it (mode 666); "* ]]
}


@test "a group that only has the owner may write node_env.sh, and any other group may not" {
  ((!EUID)) || skip "only root can create users and groups"
  script <<<'source_node_env "$1"'
  mkdir -p "$BATS_TEST_TMPDIR/config"
  local file="$BATS_TEST_TMPDIR/config/node_env.sh"
  echo : >"$file"
  chmod 664 "$file"
  shared=/nowhere run -0 "$SCRIPT" "$file" # root's group is root
  chgrp daemon "$file"
  run -69 "$SCRIPT" "$file"
  [[ "$output" == *"$file: other users can write it (mode 664); call: chmod go-w $file" ]]
  # A private group with a second member is not private.
  printf '#!/bin/sh\necho root:x:0:bob\n' >"$BATS_TEST_TMPDIR/getent"
  chmod +x "$BATS_TEST_TMPDIR/getent"
  chgrp root "$file"
  PATH="$BATS_TEST_TMPDIR:$PATH" run -69 "$SCRIPT" "$file"
}


@test "a group that only has the owner may not write Muster's files if an access control list names more" {
  ((!EUID)) || skip "only root has a private group on each machine"
  script <<<'check_kit; echo checked'
  local file="$KIT/scripts/lib/module.py" lists='
import os, struct, sys # user::rw-, group::r--, group:12345:rw-, mask::rw-, other::r--
entries = ((1, 6, -1), (4, 4, -1), (8, 6, 12345), (16, 6, -1), (32, 4, -1))
data = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *one) for one in entries)
os.setxattr(sys.argv[1], "system.posix_acl_access", data)'
  chmod -R g+w "$KIT"
  run -0 "$SCRIPT"
  [ "$output" = checked ]
  python3 -c "$lists" "$file" || skip "no access control lists here"
  run -69 "$SCRIPT"
  [[ "$output" == *"$file: other users can write it (mode 664); call: chmod -R go-w $(printf %q "$KIT")" ]]
  mkdir "$BATS_TEST_TMPDIR/bin"
  local program
  for program in ls sort; do
    printf '#!/bin/sh\nexit 1\n' >"$BATS_TEST_TMPDIR/bin/$program"
    chmod +x "$BATS_TEST_TMPDIR/bin/$program"
    PATH="$BATS_TEST_TMPDIR/bin:$PATH" run -69 "$SCRIPT"
    rm "$BATS_TEST_TMPDIR/bin/$program"
  done
  chmod -R g-w "$KIT"
  run -0 "$SCRIPT"
}


@test "a group that is also the primary group of another account may not write Muster's files" {
  ((!EUID)) || skip "only root can mount another /etc/passwd"
  script <<<'check_kit; echo checked'
  cd "$BATS_TEST_TMPDIR"
  chmod -R g+w "$KIT"
  chown -R 23456:23456 "$KIT"
  getent passwd root >accounts
  echo ada:x:23456:23456::/: >>accounts
  echo ada:x:23456: >group
  local mounted='mount --bind accounts /etc/passwd && mount --bind group /etc/group && exec "$1"'
  run -0 unshare --mount sh -c "$mounted" sh "$SCRIPT"
  [ "$output" = checked ]
  local account
  for account in bob:x:34567:23456::/: bob:x:34567:23456::/:/sbin/nologin; do
    printf '%s' "$account" | cat accounts - >more_accounts # the last line ends without a line break
    run -69 unshare --mount sh -c "${mounted/accounts/more_accounts}" sh "$SCRIPT"
    [[ "$output" == *": other users can write it (mode "* ]]
  done
  # On some systems, system accounts that nobody can log in to have root's group.
  chown -R 0:0 "$KIT"
  for account in sync:x:5:0::/sbin:/bin/sync operator:x:11:0::/root:/sbin/nologin o:x:11:0::/:/usr/bin/false; do
    echo "$account" | cat accounts - >more_accounts
    run -0 unshare --mount sh -c "${mounted/accounts/more_accounts}" sh "$SCRIPT"
  done
  for account in bob:x:34567:0::/:/bin/bash bob:x:34567:0::/: toor:x:34567:0::/:/opt/nologin/sh; do
    printf '%s' "$account" | cat accounts - >more_accounts
    run -69 unshare --mount sh -c "${mounted/accounts/more_accounts}" sh "$SCRIPT"
  done
}


@test "one of Muster's files that others can write is found whatever its name is" {
  script <<<'check_kit; echo checked'
  local name
  for name in 'a b' $'a\nb' 'a"b' "a'b" 'a\b' $'a\\' 'a" -> "b' 'jörg' $'a\tb' '$a' '*'; do
    : >"$KIT/scripts/lib/$name"
    chmod 666 "$KIT/scripts/lib/$name"
    run -69 "$SCRIPT"
    [[ "$output" == *"$KIT/scripts/lib/$name: other users can write it (mode 666); "* ]]
    rm "$KIT/scripts/lib/$name"
  done
  run -0 "$SCRIPT"
}


@test "Muster does not run if others can write to its __pycache__ or .ci" {
  script <<<'check_kit'
  mkdir -p "$KIT/__pycache__" "$KIT/.ci"
  : >"$KIT/.ci/run"
  local path
  for path in __pycache__ .ci/run; do
    run -0 "$SCRIPT"
    chmod o+w "$KIT/$path"
    run -69 "$SCRIPT"
    [[ "$output" == *"$KIT/$path: other users can write it "* ]]
    chmod o-w "$KIT/$path"
  done
}


@test "the group of all users whom a container does not know is no private group" {
  ((!EUID)) || skip "only root can give files to other users"
  script <<<'check_kit'
  printf '#!/bin/sh\necho nobody:x:65534:\n' >"$BATS_TEST_TMPDIR/getent"
  chmod +x "$BATS_TEST_TMPDIR/getent"
  chown -R 65534:65534 "$KIT"
  PATH="$BATS_TEST_TMPDIR:$PATH" run -0 "$SCRIPT"
  chmod g+w "$KIT/scripts/lib/module.py"
  PATH="$BATS_TEST_TMPDIR:$PATH" run -69 "$SCRIPT"
  [[ "$output" == *"module.py: other users can write it "* ]]
}


@test "other users cannot write to Muster's new __pycache__, also with a default access control list" {
  script <<<'check_kit'
  mkdir "$KIT/distributed/runs"
  python3 -c '
import os, struct, sys # user::rwx, group::r-x, group:12345:rwx, mask::rwx, other::r-x
entries = ((1, 7, -1), (4, 5, -1), (8, 7, 12345), (16, 7, -1), (32, 5, -1))
data = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *one) for one in entries)
for path in sys.argv[1:]:
    os.setxattr(path, "system.posix_acl_default", data)' "$KIT"/{distributed,distributed/runs,scripts/lib} ||
    skip "no access control lists here"
  (umask 000 && "$SCRIPT")
  [ "$(stat -c %a "$KIT"/{distributed,distributed/runs,scripts/lib}/__pycache__ | sort -u)" = 755 ]
}


@test "in a container whose user namespace does not contain root, directories of root are accepted" {
  unshare --user true 2>/dev/null || skip "no user namespaces"
  ((!EUID)) || skip "only root can give files to other users"
  script <<<'source_node_env "$1"; echo "$(stat -c %u "$1")"'
  mkdir -p "$BATS_TEST_TMPDIR/config"
  echo : >"$BATS_TEST_TMPDIR/config/node_env.sh"
  chmod 755 "$BATS_TEST_TMPDIR" "$BATS_RUN_TMPDIR" "${BATS_TEST_TMPDIR%/*}"
  run -0 setpriv --reuid=23456 --regid=23456 --clear-groups unshare --user --map-user=23456 \
    "$SCRIPT" "$BATS_TEST_TMPDIR/config/node_env.sh"
  [ "$output" = 65534 ]
}


@test "functions, aliases and options that BASH_ENV sets do not change a script, and are restored for node_env.sh" {
  cat >"$BATS_TEST_TMPDIR/bash_env" <<'END'
module() { echo "loaded $1"; }
log() { echo "log was replaced"; }
cd() { echo "cd was replaced"; }
shopt -s nullglob expand_aliases nocasematch
alias printf="echo replaced"
set -f
END
  script <<'END'
for name in /nowhere/*; do log "$name"; done
[[ a != A ]]
[[ $(cd / && echo /et*) == /etc ]]
! command -V module 2>/dev/null
cat >node_env.sh <<<'module torch; export LOADED=1'
restore_environment
source_node_env "$PWD/node_env.sh"
echo "$LOADED $BASH_ENV"
END
  builtin cd "$BATS_TEST_TMPDIR"
  BASH_ENV=$BATS_TEST_TMPDIR/bash_env run -0 "$SCRIPT"
  [ "$output" = "\
do_it.sh: /nowhere/*
loaded torch
1 $BATS_TEST_TMPDIR/bash_env" ]
}


@test "no variable that bash obeys changes how a script reads, matches, counts and formats" {
  script <<'END'
exec {pipe}<> <(:)
(sleep "${DELAY:-0}" && echo "a  b" >&"$pipe") &
read -r first second <&"$pipe"
nested() { (($1 == 0)) || nested $(($1 - 1)); }
nested 3
[[ a != A && z =~ ^[a-z]$ && $SECONDS -lt 60 ]]
touch -- A b .c
printf '%s\n' "$first" "$second" * "$(printf '%.1f' 1.5)" "$(echo 'x\ty')"
cd -- sub && pwd
END
  mkdir -p "$BATS_TEST_TMPDIR/empty/sub" "$BATS_TEST_TMPDIR/sub"
  cd "$BATS_TEST_TMPDIR/empty"
  local expected variable locale
  export LOCPATH=$BATS_TEST_TMPDIR/locales
  mkdir "$LOCPATH"
  for locale in de_DE et_EE; do # de_DE writes 1.5 as 1,5; et_EE sorts z before t
    localedef -i "$locale" -f UTF-8 "$LOCPATH/$locale.UTF-8" 2>&1 || true # the sources may not be installed
  done
  expected=$(env -u LANG -u LC_ALL "$SCRIPT")
  for variable in "DELAY=1.5 TMOUT=1" IFS=a POSIXLY_CORRECT=1 CDPATH=.. GLOBIGNORE='*' FUNCNEST=1 SECONDS=900 BASH_COMPAT=31 \
    SHELLOPTS=noglob:noclobber:physical SHELLOPTS=keyword BASHOPTS=nocasematch:dotglob:xpg_echo:nullglob LC_ALL=C LANG=xx_XX \
    LC_NUMERIC=de_DE.UTF-8 LC_ALL=de_DE.UTF-8 LANG=et_EE.UTF-8; do
    # shellcheck disable=SC2086 # one word per variable
    run -0 --separate-stderr env $variable "$SCRIPT"
    [ "$output" = "$expected" ] || { echo "$variable: $output" && return 1; }
  done
}


@test "variables that bash assigns, obeys or rejects reach a program unchanged; bash prints at most its own warning" {
  script <<<'nested() { exec_in_environment 1 A=1 env; }; bash -c true; (bash -c true); read -r <<<x; nested'
  local variable
  export LOCPATH=$BATS_TEST_TMPDIR
  for variable in REPLY=mine FUNCNEST=1 SHELLOPTS=keyword LC_ALL=xx_XX.UTF-8 LANG=xx_XX.UTF-8; do
    run -0 --separate-stderr env "$variable" "$SCRIPT"
    grep -qx -- "${variable%keyword}.*" <<<"$output" || { echo "$variable: $output" && return 1; }
    grep -qx A=1 <<<"$output"
    [[ "$variable" == LC_ALL=* && "${#stderr_lines[@]}" -eq 1 || ! "$stderr" ]] || { echo "$stderr" && return 1; }
  done
}


@test "in a PID namespace without its own /proc, scripts start nothing and exit with 69" {
  ((EUID == 0)) || skip "only root can create a PID namespace"
  script <<<'echo "runs as $$"'
  run -69 unshare --pid --fork "$SCRIPT"
  [ "$output" = "do_it.sh: /proc is missing, or is that of another PID namespace; mount it (unshare: give --mount-proc)" ]
  run -0 unshare --pid --fork --mount-proc "$SCRIPT"
  [ "$output" = "runs as 1" ]
}
