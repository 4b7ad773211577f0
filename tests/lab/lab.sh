#!/usr/bin/env bash
#
# No cluster? Make one: real nodes on this one Linux machine, without containers. Needs root.
#
# Usage: lab.sh up N [options]     raise node1 .. nodeN, or mend them where they have suffered
#        lab.sh down               remove every trace
#        lab.sh status             a line a node: name, address, state, process id of its sshd
#        lab.sh ssh NODE [WORD...] a shell on the node, or a command of these very words
#        lab.sh cut NODE           pull its network cable: no packet in or out, connections go silent
#        lab.sh freeze NODE        stop all its processes (SIGSTOP)
#        lab.sh slow NODE KBIT     let only KBIT kbit/s through, each way
#        lab.sh heal NODE          undo cut, freeze and slow
#        lab.sh kill NODE          power off: all its processes die, and nobody is told; up raises it again
#
# Options of up:
#   --private DIR   each node has a folder of its own in place of DIR; may be given several times
#   --slurm         with SLURM; prints the SLURM_CONF to use. A job in its partition urgent pushes out
#                   those in lab, the default, which come again later
#   --gpus G        SLURM gives out G pretended GPUs a node
#   --prefix WORD   call the nodes WORD1 .. WORDN, for a second laboratory beside the first
#
# A node has an address, a host name, an /etc/hosts and an sshd of its own; files, /tmp, /dev/shm and process
# ids are those of this machine, as with a shared file system. `ssh node1` works here and on every node.
# The nodes share the cores of this machine, and each sees them all: so OMP_NUM_THREADS is set on them, by sshd and
# by SLURM, to what a rank of each node (one for each pretended GPU) has of the cores; a value of your own stays.
# A state is up, slow, frozen, cut or dead. Everything lies in MUSTER_LAB (default: /run/muster-lab), also
# the file bashrc, empty at first, that the nodes have in place of root's ~/.bashrc.
#
#   tests/lab/lab.sh up 3
#   ssh node2 hostname
#   tests/lab/lab.sh down
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../../scripts/lib/common.bash"

PATH=$PATH:/usr/sbin:/sbin
MARK="# Muster's laboratory"
UNFINISHED=.muster-lab-settings
SSH_CONFIG=/etc/ssh/ssh_config
SSHD_FOLDER=/run/sshd # sshd does not start without this empty folder
PATIENCE=20           # seconds that starting, and each part of stopping, may take
KILL_WAIT=5           # seconds that SLURM leaves a job between TERM and KILL, to write a checkpoint
MOST_NODES=64

NODES=0 # how many
PREFIX=node
SLURM=
GPUS=0
PRIVATE=()


ssh_config() {
  local node
  echo "$MARK in $LAB"
  for node in $(all_nodes); do
    cat <<CONF
Host $node $(address "$node")
  HostName $(address "$node")
  User root
  IdentityFile $LAB/id
  IdentitiesOnly yes
  UserKnownHostsFile $LAB/known_hosts
  StrictHostKeyChecking yes
  # Of those that sshd offers, the one that costs least: a login takes two thirds of the time.
  KexAlgorithms curve25519-sha256
CONF
  done
}


sshd_config() {
  cat <<CONF
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
AuthorizedKeysFile $LAB/id.pub
# The laboratory may lie below /tmp.
StrictModes no
UsePAM no
PrintLastLog no
PrintMotd no
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
CONF
  # One line: sshd obeys the first.
  echo "SetEnv OMP_NUM_THREADS=$(threads)${SLURM:+ SLURM_CONF=$LAB/slurm.conf}"
}


threads() { # of each rank, when each node has one for each pretended GPU
  local cores ranks=$((GPUS > 0 ? NODES * GPUS : NODES))
  cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # which obeys them
  echo $((cores > ranks ? cores / ranks : 1))
}


# SLURM runs it before each task and batch script, and adds what it prints to the environment.
task_prolog() {
  cat <<END
#!/bin/sh
[ -n "\$OMP_NUM_THREADS" ] || echo export OMP_NUM_THREADS=$(threads)
END
}


hosts() {
  local node
  echo "127.0.0.1 localhost"
  echo "::1 localhost ip6-localhost ip6-loopback"
  echo "$(address_of_this_side) $(hostname)"
  for node in $(all_nodes); do
    echo "$(address "$node") $node"
    # PyTorch's store asks for the names of its clients by their addresses as IPv6 has them, which is no other name for
    # the lines above. A name of its own: else looking up the node would find two addresses.
    echo "::ffff:$(address "$node") $node.mapped"
  done
}


slurm_conf() {
  local second
  IFS=. read -r _ second _ < <(net)
  cat <<CONF
ClusterName=lab
SlurmctldHost=localhost($(address_of_this_side))
# It listens on every address of this machine, where another laboratory's has another port.
SlurmctldPort=$((7000 + second))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits as long as a credential lasts: 5 s is the least that SLURM takes, 120 s its default.
AuthInfo=socket=$LAB/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$LAB/slurmctld
SlurmctldPidFile=$LAB/slurmctld.pid
SlurmctldLogFile=$LAB/slurmctld.log
SlurmdSpoolDir=$LAB/%n/slurmd
SlurmdPidFile=$LAB/%n/slurmd.pid
SlurmdLogFile=$LAB/%n/slurmd.log
MailProg=/bin/true
# As an ordinary user's machine can have it: no cgroups, more CPUs than there are.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog=$LAB/task_prolog
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
# An ended job stays known for as long as a test file may take: the default is 300 s.
MinJobAge=3600
# Longer than the kit takes to give a silent node up.
SlurmdTimeout=30
# What can start is looked for every second.
SchedulerParameters=bf_interval=1,sched_interval=1
JobRequeue=1
KillWait=$KILL_WAIT
# A job in lab that one in urgent pushes out gets the signal of its --signal, or else TERM, and has 15 s:
# not GraceTime, which is less, but KillWait and MessageTimeout.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
LaunchParameters=use_interactive_step
GresTypes=gpu
NodeName=${PREFIX}[1-$NODES] NodeAddr=$(net).[1-$NODES] CPUs=8 RealMemory=64000 Gres=gpu:$GPUS
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=5
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
CONF
}


# ---- names and addresses ----

all_nodes() {
  local number
  for ((number = 1; number <= NODES; number++)); do
    echo "$PREFIX$number"
  done
}


net() { # the first three numbers of every address
  cat -- "$LAB/net"
}


address() { # <node>
  echo "$(net).${1#"$PREFIX"}"
}


address_of_this_side() {
  echo "$(net).254"
}


link_name() { # of the cable from this side to the switch
  echo "muster-$PREFIX"
}


ssh_config_file() {
  local name=muster-lab
  [[ $PREFIX == node ]] || name+=-$PREFIX
  echo "$SSH_CONFIG.d/$name.conf"
}


# ---- up ----

up() {
  check_programs
  if is_whole; then
    [[ $(settings) == "$(cat -- "$LAB/settings")" ]] ||
      die "a laboratory with other settings is up in $LAB ($(load_settings && all_nodes | xargs)): $PROGRAM down ends it"
    mend
  else
    (down)
    raise
  fi
  log "$NODES nodes are up: ssh ${PREFIX}1"
  [[ ! $SLURM ]] || echo "$LAB/slurm.conf"
}


check_programs() {
  need_program ip iproute2
  need_program bridge iproute2
  need_program tc iproute2
  need_program ssh openssh-client
  need_program ssh-keygen openssh-client
  need_program sshd openssh-server
  need_program nsenter util-linux
  [[ ! $SLURM ]] || need_program slurmctld slurmctld
  [[ ! $SLURM ]] || need_program slurmd slurmd
  [[ ! $SLURM ]] || need_program sinfo slurm-client
  [[ ! $SLURM ]] || need_program munged munge
  ssh_reads_our_settings ||
    die_with "$EXIT_UNFIT" "$SSH_CONFIG does not include $SSH_CONFIG.d: add the line 'Include $SSH_CONFIG.d/*.conf'"
}


need_program() { # <program> <Debian package>
  [[ -x $(type -P "$1") ]] || die_with "$EXIT_UNFIT" "no program '$1': apt-get install $2"
}


ssh_reads_our_settings() {
  grep -qsiE "^[[:space:]]*Include[[:space:]].*($SSH_CONFIG\.d|[[:space:]]ssh_config\.d)/\*" "$SSH_CONFIG"
}


raise() {
  check_names_are_free
  trap 'show_logs; down' EXIT
  mkdir -m 700 -- "$LAB"
  settings >"$LAB/$UNFINISHED"
  mv -- "$LAB/$UNFINISHED" "$LAB/settings" # whole, or not at all
  free_net >"$LAB/net"
  ssh_config >"$(ssh_config_file)"
  write_files
  raise_switch
  [[ ! $SLURM ]] || start_slurm
  # shellcheck disable=SC2046  # names without blanks
  start_nodes $(all_nodes)
  : >"$LAB/whole"
  trap - EXIT
}


check_names_are_free() {
  local owner
  owner=$(head -n 1 "$(ssh_config_file)" 2>/dev/null) || return 0
  owner=${owner#"$MARK in "}
  # The owner may have gone without a word, when the machine went down.
  [[ $owner == "$LAB" || ! -e $owner ]] ||
    die "${PREFIX}1 is a node of the laboratory in $owner: name yours with --prefix"
}


settings() {
  printf '%s\n' "$MARK" "$NODES" "$PREFIX" "$SLURM" "$GPUS" "${PRIVATE[@]}"
}


load_settings() {
  local mark
  {
    read -r mark && [[ $mark == "$MARK" ]] || return 1
    read -r NODES && read -r PREFIX && read -r SLURM && read -r GPUS
    mapfile -t PRIVATE
  } 2>/dev/null <"$LAB/settings"
}


free_net() {
  local second
  for second in {201..254}; do
    if [[ ! $(ip -4 route show table all root "10.$second.0.0/16") ]]; then
      echo "10.$second.0"
      return
    fi
  done
  die "no free network between 10.201.0.0 and 10.254.0.0"
}


write_files() {
  ssh-keygen -q -t ed25519 -N '' -C "laboratory" -f "$LAB/id"
  sshd_config >"$LAB/sshd_config"
  hosts >"$LAB/hosts"
  : >"$LAB/bashrc"
  # An sshd without PAM refuses the root of Ubuntu, whose password is locked.
  (umask 077 && sed 's/^root:!/root:*/' /etc/shadow >"$LAB/shadow")
  if [[ ! -e $SSHD_FOLDER ]]; then
    : >"$LAB/made_sshd_folder"
    mkdir -m 755 -- "$SSHD_FOLDER"
  fi
}


# The switch has a network namespace of its own, where this machine's firewall has no say.
raise_switch() {
  new_network "$LAB/switch"
  in_switch ip link add switch up type bridge
  ip -batch - <<LINKS
link add $(link_name) type veth peer name uplink netns $LAB/switch
address add $(address_of_this_side)/24 dev $(link_name)
link set $(link_name) up
LINKS
  in_switch ip link set uplink master switch up
}


new_network() { # <file that keeps it>
  : >"$1"
  unshare --net="$1" true
}


in_switch() { # <command...>
  nsenter --net="$LAB/switch" "$@"
}


start_nodes() { # <node...>
  local node starting=()
  for node; do
    make_node "$node"
    nsenter --net="$LAB/$node/net" unshare --uts --mount -- "$PROGRAM_FILE" start-node "$node" &
    starting+=($!)
  done
  for node in "${starting[@]}"; do
    wait "$node" || die "a node does not start"
  done
  wait_until "$PATIENCE" are_alive "$@" || die "the nodes are not ready after $PATIENCE s"
  [[ ! $SLURM ]] || wait_until "$PATIENCE" all_idle || die "SLURM's nodes are not ready after $PATIENCE s"
}


# A node that was killed keeps its keys and its private folders.
make_node() { # <node>
  local folder=$LAB/$1 folders=("${PRIVATE[@]/#/"$LAB/$1/private"}")
  mkdir -p -- "$folder" "${folders[@]}"
  if [[ ! -e $folder/host_key.pub ]]; then
    ssh-keygen -q -t ed25519 -N '' -C "$1" -f "$folder/host_key"
    echo "$1,$(address "$1") $(cat -- "$folder/host_key.pub")" >>"$LAB/known_hosts"
  fi
  new_network "$folder/net"
  in_switch ip link add "$1" master switch up type veth \
    peer name eth0 address "$(hardware_address "$1")" netns "$folder/net"
}


# The same after power was off: the others remember it.
hardware_address() { # <node>
  printf '02:00:00:00:00:%02d\n' "${1#"$PREFIX"}"
}


# Runs on the node: the host name and the mounts last as long as its processes.
start_node() { # <node>
  local folder
  hostname "$1"
  ip -batch - <<LINKS
link set lo up
address add $(address "$1")/24 dev eth0
link set eth0 up
LINKS
  mount --bind -- "$LAB/hosts" /etc/hosts
  mount --bind -- "$LAB/shadow" /etc/shadow
  # A node may lose its power at any moment: not while it runs what somebody does at each login of his own.
  [[ ! -e ~root/.bashrc ]] || mount --bind -- "$LAB/bashrc" ~root/.bashrc
  for folder in "${PRIVATE[@]}"; do
    mount --bind -- "$LAB/$1/private$folder" "$folder"
  done
  [[ ! $SLURM ]] || slurmd -f "$LAB/slurm.conf" -N "$1" 9<&-
  exec "$(type -P sshd)" -f "$LAB/sshd_config" -h "$LAB/$1/host_key" -o PidFile="$LAB/$1/sshd.pid" \
    -E "$LAB/$1/sshd.log" 9<&-
}


start_slurm() {
  local gpu
  mkdir -- "$LAB/slurmctld"
  slurm_conf >"$LAB/slurm.conf"
  task_prolog >"$LAB/task_prolog"
  chmod +x -- "$LAB/task_prolog"
  for ((gpu = 0; gpu < GPUS; gpu++)); do
    mknod -- "$LAB/gpu$gpu" c 1 3 # SLURM wants a device file: each is one more /dev/null
  done
  ((GPUS == 0)) || echo "NodeName=${PREFIX}[1-$NODES] Name=gpu File=$LAB/gpu[0-$((GPUS - 1))]" >"$LAB/gres.conf"
  (umask 077 && head -c 128 /dev/urandom >"$LAB/munge.key")
  munged --key-file="$LAB/munge.key" --socket="$LAB/munge.socket" --pid-file="$LAB/munged.pid" \
    --log-file="$LAB/munged.log" --seed-file="$LAB/munged.seed" --force 9<&-
  slurmctld -f "$LAB/slurm.conf" 9<&-
}


all_idle() { # a node with jobs is well too
  local states
  states=$(SLURM_CONF=$LAB/slurm.conf timeout 5 sinfo --noheader --Node --format=%T 2>/dev/null) || return 1
  [[ $states ]] && ! grep -qvxE 'idle|mixed|allocated|completing' <<<"$states"
}


is_whole() ( # whatever settings were asked for
  load_settings && [[ -e $LAB/whole && -e /sys/class/net/$(link_name) ]] && { [[ ! $SLURM ]] || slurm_runs; }
)


slurm_runs() {
  [[ $(daemons munged) && $(daemons slurmctld) ]]
}


mend() {
  local node dead=()
  for node in $(all_nodes); do
    if is_alive "$node"; then
      heal "$node"
    else
      power_off "$node"
      # The other nodes' mounts keep the old network alive: its cable goes by name.
      in_switch ip link del "$node" 2>/dev/null || true
      remove_network "$LAB/$node/net"
      dead+=("$node")
    fi
  done
  ((${#dead[@]} == 0)) || start_nodes "${dead[@]}"
}


# ---- what runs on a node ----

processes_of() { # <node>; also those that somebody else started there
  local link
  for link in /proc/[0-9]*/ns/net; do
    if [[ $link -ef $LAB/$1/net ]]; then
      link=${link#/proc/}
      echo "${link%/ns/net}"
    fi
  done
}


are_alive() { # <node...>
  local node
  for node; do
    is_alive "$node" || return 1
  done
}


is_alive() { # <node>
  runs_on "$1" sshd && { [[ ! $SLURM ]] || runs_on "$1" slurmd; }
}


runs_on() { # <node> <daemon>
  local pid
  pid=$(pid_in "$LAB/$1/$2.pid") && [[ /proc/$pid/ns/net -ef $LAB/$1/net ]]
}


pid_in() { # <file>
  local pid
  { read -r pid <"$1"; } 2>/dev/null && echo "$pid"
}


state() { # <node>
  if ! is_alive "$1"; then
    echo dead
  elif is_cut "$1"; then
    echo cut
  elif is_frozen "$1"; then
    echo frozen
  elif is_slow "$1"; then
    echo slow
  else
    echo up
  fi
}


is_cut() { # <node>
  [[ $(in_switch bridge link show dev "$1") == *" state disabled "* ]]
}


is_frozen() { # <node>
  [[ $(cat "/proc/$(pid_in "$LAB/$1/sshd.pid")/stat" 2>/dev/null) == *") T "* ]]
}


is_slow() { # <node>
  [[ $(in_switch tc qdisc show dev "$1") == *" tbf "* ]]
}


# ---- what can happen to a node ----

cut() { # <node>
  in_switch bridge link set dev "$1" state disabled
}


freeze() { # <node>
  local now seen=
  # A process may have had a child before it stopped: look again until nothing is new.
  until now=$(processes_of "$1") && [[ $now == "$seen" ]]; do
    signal STOP "$now"
    seen=$now
  done
}


slow() { # <node> <kbit>
  limit "$LAB/switch" "$1" "$2"
  limit "$LAB/$1/net" eth0 "$2"
}


limit() { # <network> <device> <kbit>
  local burst=$(($3 * 1000 / 8 / 100)) # bytes in 10 ms
  nsenter --net="$1" tc qdisc replace dev "$2" root tbf rate "$3kbit" latency 200ms \
    burst $((burst > 3200 ? burst : 3200))
}


heal() { # <node>
  is_alive "$1" || die "$1 is dead: $PROGRAM up raises it again"
  unlimit "$LAB/switch" "$1"
  unlimit "$LAB/$1/net" eth0
  signal CONT "$(processes_of "$1")"
  in_switch bridge link set dev "$1" state forwarding
}


unlimit() { # <network> <device>
  nsenter --net="$1" tc qdisc del dev "$2" root 2>/dev/null || true # it had no limit
}


kill_node() { # <node>
  cut "$1"
  power_off "$1"
}


power_off() { # <node>
  wait_until "$PATIENCE" has_nothing_left "$1" || die "$1: processes $(processes_of "$1" | xargs) do not die"
}


has_nothing_left() { # <node>; sees to it
  local left
  left=$(processes_of "$1")
  signal KILL "$left"
  [[ ! $left ]]
}


signal() { # <name> <process ids, a line each>; some may have ended meanwhile
  # shellcheck disable=SC2086  # a list of numbers
  [[ ! $2 ]] || kill -"$1" $2 2>/dev/null || true
}


# ---- down ----

down() {
  local node
  forget_names
  rm -f -- "$LAB/$UNFINISHED"
  [[ -e $LAB ]] && ! rmdir -- "$LAB" 2>/dev/null || return 0
  load_settings || die_usage "'$LAB' was not made by this script: name another folder"
  rm -f -- "$LAB/whole"
  [[ ! $SLURM ]] || end_jobs
  for node in $(all_nodes); do
    signal KILL "$(processes_of "$node")"
  done
  for node in $(all_nodes); do
    power_off "$node"
    remove_network "$LAB/$node/net"
  done
  [[ ! $SLURM ]] || end_slurm
  ip link del "$(link_name)" 2>/dev/null || true
  remove_network "$LAB/switch" # and with it all its cables
  remove_files
}


forget_names() {
  local file
  for file in "$SSH_CONFIG.d"/muster-lab*.conf; do
    [[ $(head -n 1 -- "$file" 2>/dev/null) != "$MARK in $LAB" ]] || rm -f -- "$file"
  done
}


# An srun on this side ends with its job, and would wait for a node that falls silent.
end_jobs() {
  local -x SLURM_CONF=$LAB/slurm.conf
  local jobs
  jobs=$(timeout 5 squeue --noheader --format=%A 2>/dev/null) && [[ $jobs ]] || return 0
  # shellcheck disable=SC2086  # a list of numbers
  timeout 5 scancel $jobs || true
  wait_until $((KILL_WAIT + 2)) no_jobs || true # those on a node that is cut off stay, until all ends
}


no_jobs() {
  [[ ! $(timeout 5 squeue --noheader 2>/dev/null) ]]
}


remove_network() { # <file that keeps it>
  umount -- "$1" 2>/dev/null || true
}


# The settings go last: they say whose folder this is, should we be stopped in between.
remove_files() {
  if [[ -e $LAB/made_sshd_folder ]] && ! pgrep -x --runstates D,R,S,T sshd >/dev/null; then
    rmdir -- "$SSHD_FOLDER" 2>/dev/null || true
  fi
  find "$LAB" -xdev -mindepth 1 ! -path "$LAB/settings" -delete
  rm -- "$LAB/settings"
  rmdir -- "$LAB"
}


# Nothing of SLURM's is to be kept, so that it need not end in order.
end_slurm() {
  wait_until "$PATIENCE" has_no_slurm_left || die "processes $(daemons munged slurmctld | xargs) do not die"
}


has_no_slurm_left() { # sees to it
  local left
  left=$(daemons munged slurmctld)
  signal KILL "$left"
  [[ ! $left ]]
}


daemons() { # <program...>; process ids of those that this side runs for the laboratory
  local program pid words
  while read -r pid words; do
    for program; do
      [[ $words != "$program "*" $LAB/"* && $words != "$program "*"=$LAB/"* ]] || echo "$pid"
    done
  done < <(ps -eww -o pid=,args=)
}


# ---- the rest ----

status() {
  local node pid
  for node in $(all_nodes); do
    pid=-
    ! runs_on "$node" sshd || pid=$(pid_in "$LAB/$node/sshd.pid")
    echo "$node $(address "$node") $(state "$node") $pid"
  done
}


log_in() { # <node> [word...]; ssh would join the words, and the node's shell part them elsewhere
  local command=()
  (($# == 1)) || command=("$(quote "${@:2}")")
  exec ssh "$1" "${command[@]}"
}


wait_until() { # <seconds> <command...>
  local end=$((SECONDS + $1))
  until "${@:2}"; do
    ((SECONDS < end)) || return 1
    sleep 0.02
  done
}


show_logs() {
  tail -n 20 -- "$LAB"/*.log "$LAB"/*/*.log >&2 2>/dev/null || true
}


# One call at a time on this machine, and no file to leave behind: the lock is on a folder.
# Daemons are started without descriptor 9, which would keep it for ever.
lock() {
  exec 9<"${SSH_CONFIG%/*}"
  flock 9
}


parse_up() { # <argument...>
  while (($# > 0)); do
    case $1 in
      --slurm) SLURM=1 ;;
      --gpus) need_value "$@" && GPUS=$2 && shift ;;
      --prefix) need_value "$@" && PREFIX=$2 && shift ;;
      --private) need_value "$@" && add_private "$2" && shift ;;
      -*) die_usage "unknown option '$1'" ;;
      *) set_nodes "$1" ;;
    esac
    shift
  done
  ((NODES > 0)) || die_usage "up needs the number of nodes"
  [[ $PREFIX =~ ^[a-z]{1,8}$ ]] || die_usage "--prefix '$PREFIX' is not a word of one to eight small letters"
  [[ $GPUS =~ ^(0|[1-9][0-9]?)$ ]] || die_usage "--gpus '$GPUS' is not a number from 0 to 99"
  [[ $SLURM ]] || ((GPUS == 0)) || die_usage "the GPUs are pretended, and only SLURM believes in them: add --slurm"
}


set_nodes() { # <word>
  ((NODES == 0)) || die_usage "up takes one number of nodes, not also '$1'"
  if [[ ! $1 =~ ^[1-9][0-9]?$ ]] || (($1 > MOST_NODES)); then
    die_usage "'$1' is not a number of nodes from 1 to $MOST_NODES"
  fi
  NODES=$1
}


add_private() { # <folder>
  local folder
  [[ -d $1 ]] || die_usage "--private '$1' is not a folder"
  folder=$(readlink -f -- "$1")
  [[ $folder != *$'\n'* ]] || die_usage "--private '$1' has a line break"
  [[ $LAB/ != "${folder%/}"/* ]] || die_usage "--private '$1' would hide the laboratory in $LAB: set MUSTER_LAB"
  PRIVATE+=("$folder")
}


need_root() {
  ((EUID == 0)) || die_with "$EXIT_UNFIT" "only root can give a node an address and a name of its own: run it with sudo"
}


enter() { # the laboratory that is up
  need_root
  load_settings || die "no laboratory is up in $LAB: $PROGRAM up 3 raises one"
}


enter_node() { # <node>
  enter
  grep -qxF -- "$1" <<<"$(all_nodes)" || die_usage "'$1' is not one of the nodes: $(all_nodes | xargs)"
}


need_words() { # <what they are> <how many> <word...>
  (($# - 2 == $2)) || die_usage "$VERB takes $1, not '${*:3}'"
}


act() { # <node> [kbit]
  enter_node "$1"
  lock
  if [[ $VERB == kill ]]; then
    kill_node "$1"
  else
    "$VERB" "$@"
  fi
}


main() {
  VERB=${1-}
  LAB=$(readlink -m -- "${MUSTER_LAB:-/run/muster-lab}")
  [[ $LAB != *[[:space:]]* ]] || die_usage "MUSTER_LAB '$LAB' has a blank, which ssh_config cannot hold: name another"
  shift $(($# > 0))
  case $VERB in
    -h | --help) usage ;;
    up)
      parse_up "$@"
      need_root
      lock
      up
      ;;
    down)
      need_words "no words" 0 "$@"
      need_root
      lock
      down
      ;;
    status)
      need_words "no words" 0 "$@"
      enter
      status
      ;;
    ssh)
      (($# > 0)) || die_usage "ssh takes a node"
      enter_node "$1"
      log_in "$@"
      ;;
    cut | freeze | heal | kill)
      need_words "a node" 1 "$@"
      act "$1"
      ;;
    slow)
      need_words "a node and a number" 2 "$@"
      [[ $2 =~ ^[1-9][0-9]{0,7}$ ]] || die_usage "'$2' is not a number of kbit/s"
      act "$@"
      ;;
    start-node)
      enter
      start_node "$1"
      ;;
    '') die_usage "say what to do" ;;
    *) die_usage "unknown verb '$VERB'" ;;
  esac
}

main "$@"
