#!/usr/bin/env bats
#
# The start-up file of the login shell on a node (~/.bashrc) may read standard input, start another shell, wait, exit or
# print. In these cases a launch works, or exits with 69 and names the file. The standard input that the launch sends to
# the node is never printed.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
# shellcheck source=tests/lab/nodes.bash
source "$BATS_TEST_DIRNAME/lab/nodes.bash"
# shellcheck source=tests/lab/secrets.bash
source "$BATS_TEST_DIRNAME/lab/secrets.bash"


setup_file() {
  export SSH_LAUNCH=$BATS_TEST_DIRNAME/../scripts/ssh/launch_torchrun_auto.sh
  export PDSH_LAUNCH=$BATS_TEST_DIRNAME/../scripts/ssh/launch_pdsh_multinode.sh
  start_lab 9
  use_agent_without_torch
}


setup() {
  enter_workdir
  make_secret
  export MUSTER_LOGIN_TIMEOUT=6
  LAUNCH=$SSH_LAUNCH
  cat >script.py <<'PYTHON'
import os
assert os.environ["SECRET"] == open("secret").read()
print("finished", os.environ["RANK"])
PYTHON
}


teardown() {
  : >"$MUSTER_LAB/bashrc"
  sweep_runs
}


# Set the .bashrc of the second node, the third, and so on. The first one has an empty .bashrc.
set_bashrc() { # <commands...>
  local number=1 commands
  echo 'case $(uname -n) in' >"$MUSTER_LAB/bashrc"
  for commands in "$@"; do
    number=$((number + 1))
    printf '*%s)\n%s\n;;\n' "$number" "$commands" >>"$MUSTER_LAB/bashrc"
  done
  echo 'esac' >>"$MUSTER_LAB/bashrc"
}


# Launch on the nodes 1 to <number of nodes>, and check that the secret of --env-file is neither printed nor logged.
launch() { # <number of nodes> <option...>
  run timeout 100 "$LAUNCH" --env-file secrets.env --script script.py "${@:2}" - 1 "${PREFIX}[1-$1]" </dev/null
  echo "$output"
  ! grep -F -f secret <<<"$output" || return 1
  [ ! -e logs ] || ! grep -rlF -f secret logs || return 1
}


@test "a launch exits with 69 and names the file if a login shell reads input, waits, exits or starts another shell" {
  set_bashrc 'exec fish' 'exec tcsh' 'exec bash --norc' 'echo Password; cat' 'read -r line' 'yes' 'exit 0' \
    'set -e; echo "module: not found"; false'
  launch 9
  [ "$status" -eq 69 ]
  for number in 2 3 4 6 7; do
    [[ "$output" == *"preflight: $PREFIX$number: the login shell has not started Muster's command within 6 s"* ]]
  done
  [[ "$output" == *"${PREFIX}5: the login shell has not started Muster's command within 6 s (it printed: Password);"* ]]
  [[ "$output" == *"${PREFIX}7: "*" (it printed: y); its start-up file there (bash: ~/.bashrc, zsh: "* ]]
  [[ "$output" == *"${PREFIX}8: the login shell ended with exit code 0 before it started Muster's command; its"* ]]
  [[ "$output" == *"${PREFIX}9: the login shell ended with exit code 1 before it"*" (it printed: module: not found); "* ]]
  [[ "$output" != *"preflight: $N1:"* ]]
  [ ! -e logs ]
}


@test "what a node prints when it refuses commands is shown" {
  set_bashrc 'echo "Access denied: no job of yours runs here" >&2; exit 1' 'PATH=/nowhere'
  launch 3
  [ "$status" -eq 69 ]
  local reason="before it started Muster's command (standard error:"
  [[ "$output" == *"$N2: the login shell ended with exit code 1 $reason Access denied: no job of yours runs here); its "* ]]
  [[ "$output" == *"$N3: the login shell ended with exit code 127 $reason "*"bash: "*"not found); its start-up file "* ]]
}


@test "without a preflight, the verdict names the login shell, over ssh and with pdsh" {
  for LAUNCH in "$SSH_LAUNCH" "$PDSH_LAUNCH"; do
    set_bashrc 'exec fish'
    launch 2 --no-preflight
    [ "$status" -eq 69 ]
    [[ "$output" == *$'\n'"verdict: failed: $N2: the login shell has not started Muster's command within 6 s; its"* ]]
    set_bashrc '' 'exit 0'
    launch 3 --no-preflight
    [ "$status" -eq 69 ]
    [[ "$output" == *$'\n'"verdict: failed: $N3: the login shell ended with exit code 0 before it started "* ]]
    [[ "$output" != *warning* ]]
    [ "$(grep -c "^$N3: the login shell" <<<"$output")" -eq 1 ]
    run ! ls logs/latest/node_*.environment
  done
}


@test "a login shell that prints, traces, changes directory or starts bash again does not affect a launch" {
  set_bashrc 'set -xv; cd /; trap "echo bye" EXIT' 'export SHELLOPTS TMOUT=1; set -x; stty -a; head -c 1000000 /dev/zero' \
    '[ "$AGAIN" ] || AGAIN=1 exec bash -c "$BASH_EXECUTION_STRING"' \
    '[ "$AGAIN" ] || { export AGAIN=1; exec fish -c "$BASH_EXECUTION_STRING"; }' \
    'set -eu; set +H; echo -n "Enter a number: "; exec 2>/dev/null'
  for LAUNCH in "$SSH_LAUNCH" "$PDSH_LAUNCH"; do
    launch 6
    [ "$status" -eq 0 ]
    [[ "$output" == *"finished 0"*"verdict: ok"* ]]
  done
}


@test "config/node_env.sh can neither print nor read values of --env-file, even if it traces or reads standard input" {
  mkdir config
  echo 'set -xv; cat' >config/node_env.sh
  launch 2
  [ "$status" -eq 0 ]
}
