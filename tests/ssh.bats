#!/usr/bin/env bats
#
# Launches use the user's ssh_config; its options that would break a launch have no effect. No unknown host key is
# accepted, and no password is asked for. A launch fails if nodes are unreachable or differ from the others, and reports
# all of these nodes, each with a remedy.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
# shellcheck source=tests/lab/nodes.bash
source "$BATS_TEST_DIRNAME/lab/nodes.bash"


setup_file() {
  export LAUNCH=$BATS_TEST_DIRNAME/../scripts/ssh/launch_torchrun_auto.sh
  start_lab 4
  use_agent_without_torch
}


setup() {
  WORK=$BATS_TEST_TMPDIR
  enter_workdir
  N4=${PREFIX}4
  mkdir -p home/.ssh
  : >script.py
}


replace_file() { # <node> <file> <content>: on this node only
  printf '%s\n' "$3" >"$BATS_TEST_TMPDIR/$1-${2##*/}"
  on "$1" mount --bind "$BATS_TEST_TMPDIR/$1-${2##*/}" "$2"
}


@test "port, jump host, key and alias of ssh_config are used, and options that would break a launch have no effect" {
  start_second_sshd "$N1" 2222
  cp -- "$MUSTER_LAB/id" home/key
  cat >home/.ssh/config <<END
Host box1
  HostName $(address "$N1")
  Port 2222
  ProxyJump $N3
  HostKeyAlias $N1
Host box2
  HostName $(address "$N2")
  HostKeyAlias $N2
Host box*
  User root
  IdentityFile $PWD/home/key
  UserKnownHostsFile $MUSTER_LAB/known_hosts
  RemoteCommand cat
  RequestTTY force
  LocalForward 127.0.0.1:1 127.0.0.1:22
  ExitOnForwardFailure yes
  ControlMaster no
  ControlPath $PWD/home/control
  PermitLocalCommand yes
  LocalCommand echo noise
  SendEnv *
  LogLevel QUIET
END
  echo 'echo noise' >"$MUSTER_LAB/bashrc"
  cat >script.py <<'END'
import os
print(os.environ["MUSTER_NODE"], os.environ["SSH_CONNECTION"])
END
  run with_home timeout 60 "$LAUNCH" --script script.py - 1 box1 box2
  : >"$MUSTER_LAB/bashrc"
  echo "$output"
  [ "$status" -eq 0 ]
  [[ "$output" == *"verdict: ok"* ]]
  grep -q "box1 $(address "$N3") [0-9]* $(address "$N1") 2222" logs/latest/node_box1.log
}


@test "no unknown host key is accepted, no password is asked for, and each fault is reported" {
  start_second_sshd "$N3" 2222 -o PubkeyAuthentication=no -o PasswordAuthentication=yes
  : >home/known
  sed "s/^$N2,[^ ]*/changed/" "$MUSTER_LAB/known_hosts" >home/other
  cat >home/.ssh/config <<END
Host unknown changed
  HostName $(address "$N1")
  CheckHostIP no
Host unknown
  UserKnownHostsFile $PWD/home/known
Host changed
  HostKeyAlias changed
  UserKnownHostsFile $PWD/home/other
Host password refuses someone
  HostName $(address "$N3")
  HostKeyAlias $N3
  UserKnownHostsFile $MUSTER_LAB/known_hosts
Host password
  Port 2222
Host refuses
  Port 1
Host someone
  User nobody
Host silent
  HostName $(address "$N4")
END
  cp -r home/.ssh/config config.before
  lab cut "$N4"
  SECONDS=0
  run with_home "$LAUNCH" --script script.py - 1 "$N2" unknown changed password refuses someone silent < <(yes yes)
  ((SECONDS <= 20))
  lab heal "$N4"
  echo "$output"
  [ "$status" -eq 69 ]
  [[ "$output" == *"unknown: host key unknown"*"ssh unknown"* ]]
  [[ "$output" == *"changed: host key has changed"*"ssh-keygen -R changed"* ]]
  [[ "$output" == *"password: login without a password refused"*"ssh-copy-id password"* ]]
  [[ "$output" == *"someone: login without a password refused (nobody@"* ]]
  [[ "$output" == *"refuses: cannot be reached ("*"Connection refused"* ]]
  [[ "$output" == *"silent: cannot be reached ("* ]]
  [[ "$output" != *"preflight: $N2:"* ]]
  [ ! -s home/known ]
  [ "$(ls home/.ssh)" = config ]
  [ ! -e logs ]
}


@test "a different PyTorch, a different script and a slow resolver are reported with the node" {
  # The package torch is empty and has only a version, as the launch is refused before PyTorch is imported.
  "$WITH_TORCH/bin/python" -m venv --without-pip env
  packages=$(echo "$PWD"/env/lib/python3*/site-packages)
  mkdir "$packages/torch" "$packages/torch-2.13.0.dist-info" other other/torch-2.1.0.dist-info
  : >"$packages/torch/__init__.py"
  on "$N2" mount --bind "$PWD/other" "$packages"
  replace_file "$N3" "$PWD/script.py" "print('another')"
  # A name server that never answers, and is queried before /etc/hosts.
  on "$N4" ip neigh add "$(address "$N1" | sed 's/[0-9]*$/250/')" lladdr 02:00:00:00:00:fa dev eth0
  replace_file "$N4" /etc/resolv.conf "nameserver $(address "$N1" | sed 's/[0-9]*$/250/')
options timeout:2 attempts:1"
  replace_file "$N4" /etc/nsswitch.conf "hosts: dns files
passwd: files"
  run "$LAUNCH" --python env/bin/python --script script.py - 1 "$N1" "$N2" "$N3" "$N4"
  echo "$output"
  [ "$status" -eq 69 ]
  [[ "$output" == *"preflight: $N2: PyTorch 2.1.0, but PyTorch 2.13.0 elsewhere; install the same version on all nodes"* ]]
  [[ "$output" == *"preflight: $N3: 'script.py' differs from that on the other nodes; make them equal"* ]]
  [[ "$output" =~ "preflight: warning: $N4: looking up '$N1' took "[2-9]\.[0-9]" s" ]]
  [[ "$output" != *"preflight: $N1:"* && "$output" != *"preflight: $N4:"* ]]
  [ ! -e logs ]
}
