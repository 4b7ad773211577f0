#!/usr/bin/env bats
#
# The way to the nodes is the user's own: what stands in his ssh_config decides how they are reached, and what would
# break a launch there does not. No host key is accepted unseen and no question is asked; nodes that cannot be reached or
# do not fit together are refused, all at once, each with its remedy.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
# shellcheck source=tests/lab/nodes.bash
source "$BATS_TEST_DIRNAME/lab/nodes.bash"


setup_file() {
  export LAUNCH=$BATS_TEST_DIRNAME/../scripts/ssh/launch_torchrun_auto.sh
  start_lab 4
}


teardown_file() {
  stop_lab
}


setup() {
  WORK=$BATS_TEST_TMPDIR
  enter_workdir
  N4=${PREFIX}4
  mkdir -p home/.ssh
  : >script.py
}


# ssh finds what is a user's by /etc/passwd, and what is included by HOME: this command alone sees another home.
at_home() { # <command...>
  sed "s#^\(root:.*:\)[^:]*\(:[^:]*\)#\1$PWD/home\2#" /etc/passwd >passwd
  unshare --mount -- sh -c 'mount --bind passwd /etc/passwd && HOME=$PWD/home exec "$@"' sh "$@"
}


on() { # <node> <command...>: in its network and with its files
  nsenter --target "$(<"$MUSTER_LAB/$1/sshd.pid")" --net --uts --mount -- "${@:2}"
}


second_sshd() { # <node> <port> <option...>
  on "$1" "$(type -P sshd || echo /usr/sbin/sshd)" -f "$MUSTER_LAB/sshd_config" -h "$MUSTER_LAB/$1/host_key" -p "$2" \
    -o PidFile=none "${@:3}" 3>&-
  # It has gone into the background before it listens.
  timeout 20 nsenter --target "$(<"$MUSTER_LAB/$1/sshd.pid")" --net -- \
    bash -c 'until (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; do sleep 0.05; done' bash "$2" 3>&-
}


address() { # <node>
  awk -v node="$1" '$2 == node { print $1 }' "$MUSTER_LAB/hosts"
}


# Where a node's file differs from that of all others: only this node sees it.
differs() { # <node> <file> <what stands there>
  printf '%s\n' "$3" >"$BATS_TEST_TMPDIR/$1-${2##*/}"
  on "$1" mount --bind "$BATS_TEST_TMPDIR/$1-${2##*/}" "$2"
}


@test "the user's ssh_config is honoured: port, jump host, key, alias; and what would break a launch does not" {
  second_sshd "$N1" 2222
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
  run at_home timeout 60 "$LAUNCH" --script script.py - 1 box1 box2
  : >"$MUSTER_LAB/bashrc"
  echo "$output"
  [ "$status" -eq 0 ]
  [[ "$output" == *"verdict: ok"* ]]
  grep -q "box1 $(address "$N3") [0-9]* $(address "$N1") 2222" logs/latest/node_box1.log
}


@test "no host key is accepted unseen, no password asked, and each fault has its line" {
  second_sshd "$N3" 2222 -o PubkeyAuthentication=no -o PasswordAuthentication=yes
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
  run at_home "$LAUNCH" --script script.py - 1 "$N2" unknown changed password refuses someone silent < <(yes yes)
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


@test "another PyTorch, another script and a slow resolver are reported, by node" {
  # Of PyTorch there is only what says which it is: nobody gets as far as to run it.
  "$VIRTUAL_ENV/bin/python" -m venv --without-pip env
  packages=$(echo "$PWD"/env/lib/python3*/site-packages)
  mkdir "$packages/torch" "$packages/torch-2.13.0.dist-info" other other/torch-2.1.0.dist-info
  : >"$packages/torch/__init__.py"
  on "$N2" mount --bind "$PWD/other" "$packages"
  differs "$N3" "$PWD/script.py" "print('another')"
  # A name server that never answers, and stands before /etc/hosts.
  on "$N4" ip neigh add "$(address "$N1" | sed 's/[0-9]*$/250/')" lladdr 02:00:00:00:00:fa dev eth0
  differs "$N4" /etc/resolv.conf "nameserver $(address "$N1" | sed 's/[0-9]*$/250/')
options timeout:2 attempts:1"
  differs "$N4" /etc/nsswitch.conf "hosts: dns files
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
