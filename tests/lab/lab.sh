#!/usr/bin/env bash
#
# Start a cluster of nodes on this Linux machine, without containers. Needs root.
#
# Usage: lab.sh up N [options]            start node1 .. nodeN; if they run already, restart dead nodes, heal the others
#        lab.sh down                      remove the laboratory and everything it created
#        lab.sh status                    print a line per node: name, address, state, process id of its sshd
#        lab.sh ssh NODE [ARGUMENT...]    open a shell on the node, or run a command there with unchanged arguments
#        lab.sh cut NODE                  drop all packets to and from the node; connections stay open but idle
#        lab.sh freeze NODE               stop all processes of the node (SIGSTOP)
#        lab.sh slow NODE KBIT            limit the node's bandwidth to KBIT kbit/s in each direction
#        lab.sh heal NODE                 undo cut, freeze and slow
#        lab.sh kill NODE                 power the node off: kill all its processes without closing connections; up
#                                         starts it again
#
# Options of up:
#   --private DIR     give each node its own DIR, initially empty; may be given several times
#   --slurm           start SLURM and print the SLURM_CONF to use. Jobs in partition urgent preempt and requeue jobs
#                     in lab, the default partition
#   --gpus G          simulate G GPUs per node in SLURM
#   --prefix PREFIX   name the nodes PREFIX1 .. PREFIXN, for a second laboratory on this machine
#
# Each node has its own address, host name, /etc/hosts and sshd. The nodes share all other files, including /tmp and
# /dev/shm, and all process ids with this machine. `ssh node1` works on this machine and on every node.
# All nodes share the cores of this machine. sshd therefore sets OMP_NUM_THREADS to the number of cores divided by the
# number of ranks: one rank per simulated GPU, or one per node without GPUs. SLURM does so in jobs that do not set it.
# The state of a node is up, slow, frozen, cut or dead. MUSTER_LAB (default: /run/muster-lab) is the directory of the
# laboratory. Its file bashrc, initially empty, replaces root's ~/.bashrc on the nodes.
#
#   tests/lab/lab.sh up 3
#   ssh node2 hostname
#   tests/lab/lab.sh down
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../../scripts/lib/common.bash"

PATH=$PATH:/usr/sbin:/sbin
MARK="# Muster's laboratory"
UNFINISHED_SETTINGS=.muster-lab-settings
SSH_CONFIG=/etc/ssh/ssh_config
LOCK=/run/muster-lab.lock
SSHD_DIRECTORY=/run/sshd # sshd does not start unless this empty directory exists
STEP_TIMEOUT=20          # seconds for starting the nodes, and for each step of stopping
KILL_WAIT=5              # seconds between SIGTERM and SIGKILL of a SLURM job, for writing a checkpoint
MAX_NODES=64

NODES=0 # number of nodes
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
  # The fastest key exchange: a login takes a third less time.
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
# The laboratory may be below /tmp.
StrictModes no
UsePAM no
PrintLastLog no
PrintMotd no
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
CONF
}


# What sshd sets on a node. tmux's own directory of sockets is in /tmp, where another user could make it.
environment_of() { # <node>
  echo "OMP_NUM_THREADS=$(threads_per_rank) TMUX_TMPDIR=$LAB/$1/tmux XDG_STATE_HOME=$LAB/$1/state" \
    ${SLURM:+"SLURM_CONF=$LAB/slurm.conf"}
}


threads_per_rank() { # for one rank per simulated GPU, or one rank per node without GPUs
  local cores ranks=$((GPUS > 0 ? NODES * GPUS : NODES))
  cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # nproc obeys both variables
  echo $((cores > ranks ? cores / ranks : 1))
}


# SLURM runs this script before each task and batch script. Its output sets their environment variables.
task_prolog() {
  cat <<END
#!/bin/sh
[ -n "\$OMP_NUM_THREADS" ] || echo export OMP_NUM_THREADS=$(threads_per_rank)
END
}


hosts() {
  local node
  echo "127.0.0.1 localhost"
  echo "::1 localhost ip6-localhost ip6-loopback"
  echo "$(host_address) $(hostname)"
  for node in $(all_nodes); do
    echo "$(address "$node") $node"
    # PyTorch's store looks up its clients by IPv4-mapped IPv6 address, which the line above does not answer. This line
    # has another name, because the node's name must have only one address.
    echo "::ffff:$(address "$node") $node.mapped"
  done
}


slurm_conf() {
  local second
  IFS=. read -r _ second _ < <(network_prefix)
  cat <<CONF
ClusterName=lab
SlurmctldHost=localhost($(host_address))
# slurmctld listens on every address of this machine, so each laboratory needs its own port.
SlurmctldPort=$((7000 + second))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until its credential expires: 5 s is SLURM's minimum, 120 s its default.
AuthInfo=socket=$LAB/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$LAB/slurmctld
SlurmctldPidFile=$LAB/slurmctld.pid
SlurmctldLogFile=$LAB/slurmctld.log
SlurmdSpoolDir=$LAB/%n/slurmd
SlurmdPidFile=$LAB/%n/slurmd.pid
SlurmdLogFile=$LAB/%n/slurmd.log
MailProg=/bin/true
# These settings work without cgroups, and with more CPUs than this machine has.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog=$LAB/task_prolog
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
# scontrol must show a job until its test file ends: the default is 300 s.
MinJobAge=3600
# Longer than Muster's heartbeat timeout.
SlurmdTimeout=30
# Schedule every second.
SchedulerParameters=bf_interval=1,sched_interval=1
JobRequeue=1
KillWait=$KILL_WAIT
# A preempted job receives the signal that its option --signal names, or SIGTERM. The job is killed after
# KillWait (5 s) plus MessageTimeout (10 s), because GraceTime is shorter.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
LaunchParameters=use_interactive_step
GresTypes=gpu
NodeName=${PREFIX}[1-$NODES] NodeAddr=$(network_prefix).[1-$NODES] CPUs=8 RealMemory=64000 Gres=gpu:$GPUS
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


network_prefix() { # the first three numbers of every address
  cat -- "$LAB/net"
}


address() { # <node>
  echo "$(network_prefix).${1#"$PREFIX"}"
}


host_address() {
  echo "$(network_prefix).254"
}


link_name() { # name of the interface between this machine and the switch
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
  if is_up; then
    [[ $(settings) == "$(cat -- "$LAB/settings")" ]] ||
      die "$LAB: a laboratory with other settings is up ($(load_settings && all_nodes | xargs)); remove it with" \
        "$PROGRAM down"
    repair
  else
    (down)
    create
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
  ssh_includes_config_directory ||
    die_with "$EXIT_UNFIT" "$SSH_CONFIG: does not include $SSH_CONFIG.d; add the line 'Include $SSH_CONFIG.d/*.conf'"
}


need_program() { # <program> <Debian package>
  [[ -x $(type -P "$1") ]] || die_with "$EXIT_UNFIT" "$1: not installed; run: apt-get install $2"
}


ssh_includes_config_directory() {
  grep -qsiE "^[[:space:]]*Include[[:space:]].*($SSH_CONFIG\.d|[[:space:]]ssh_config\.d)/\*" "$SSH_CONFIG"
}


create() {
  check_prefix_is_free
  trap 'show_logs; down' EXIT
  mkdir -m 700 -- "$LAB"
  settings >"$LAB/$UNFINISHED_SETTINGS"
  mv -- "$LAB/$UNFINISHED_SETTINGS" "$LAB/settings" # atomically
  free_network >"$LAB/net"
  ssh_config >"$(ssh_config_file)"
  write_files
  create_switch
  [[ ! $SLURM ]] || start_slurm
  # shellcheck disable=SC2046  # names without blanks
  start_nodes $(all_nodes)
  : >"$LAB/complete"
  trap - EXIT
}


check_prefix_is_free() {
  local owner
  owner=$(head -n 1 "$(ssh_config_file)" 2>/dev/null) || return 0
  owner=${owner#"$MARK in "}
  # After a reboot, the owner's directory does not exist.
  [[ $owner == "$LAB" || ! -e $owner ]] ||
    die "${PREFIX}1: already a node of the laboratory in $owner; choose other names with --prefix"
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


free_network() {
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
  if [[ ! -e $SSHD_DIRECTORY ]]; then
    : >"$LAB/made_sshd_directory"
    mkdir -m 755 -- "$SSHD_DIRECTORY"
  fi
}


# The switch is in a separate network namespace, where this machine's firewall does not apply.
create_switch() {
  create_network "$LAB/switch"
  in_switch ip link add switch up type bridge
  ip -batch - <<LINKS
link add $(link_name) type veth peer name uplink netns $LAB/switch
address add $(host_address)/24 dev $(link_name)
link set $(link_name) up
LINKS
  in_switch ip link set uplink master switch up
}


create_network() { # <file for its bind mount>
  : >"$1"
  unshare --net="$1" true
}


in_switch() { # <command...>
  nsenter --net="$LAB/switch" "$@"
}


start_nodes() { # <node...>
  local node pid starting=()
  for node; do
    create_node "$node"
    nsenter --net="$LAB/$node/net" unshare --uts --mount -- "$PROGRAM_FILE" start-node "$node" &
    starting+=($!)
  done
  for pid in "${starting[@]}"; do
    wait "$pid" || die "a node failed to start"
  done
  wait_until "$STEP_TIMEOUT" are_alive "$@" || die "the nodes are not ready after $STEP_TIMEOUT s"
  [[ ! $SLURM ]] || wait_until "$STEP_TIMEOUT" all_available || die "SLURM's nodes are not ready after $STEP_TIMEOUT s"
}


# A killed node keeps its keys and private directories.
create_node() { # <node>
  local directory=$LAB/$1
  mkdir -p -- "$directory" "${PRIVATE[@]/#/"$directory/private"}"
  if [[ ! -e $directory/host_key.pub ]]; then
    ssh-keygen -q -t ed25519 -N '' -C "$1" -f "$directory/host_key"
    echo "$1,$(address "$1") $(cat -- "$directory/host_key.pub")" >>"$LAB/known_hosts"
  fi
  create_network "$directory/net"
  in_switch ip link add "$1" master switch up type veth \
    peer name eth0 address "$(hardware_address "$1")" netns "$directory/net"
}


# A restarted node must have the same address as before, because other nodes have it in their ARP caches.
hardware_address() { # <node>
  printf '02:00:00:00:00:%02d\n' "${1#"$PREFIX"}"
}


# Runs in the node's namespaces. The host name and the mounts of the node exist as long as its processes.
start_node() { # <node>
  local directory
  hostname "$1"
  ip -batch - <<LINKS
link set lo up
address add $(address "$1")/24 dev eth0
link set eth0 up
LINKS
  mount --bind -- "$LAB/hosts" /etc/hosts
  mount --bind -- "$LAB/shadow" /etc/shadow
  # Commands in root's ~/.bashrc must not be killed halfway by lab.sh kill.
  [[ ! -e ~root/.bashrc ]] || mount --bind -- "$LAB/bashrc" ~root/.bashrc
  for directory in "${PRIVATE[@]}"; do
    mount --bind -- "$LAB/$1/private$directory" "$directory"
  done
  mkdir -p -- "$LAB/$1/tmux"
  [[ ! $SLURM ]] || slurmd -f "$LAB/slurm.conf" -N "$1" 9<&-
  exec "$(type -P sshd)" -f "$LAB/sshd_config" -h "$LAB/$1/host_key" -o PidFile="$LAB/$1/sshd.pid" \
    -o SetEnv="$(environment_of "$1")" -E "$LAB/$1/sshd.log" 9<&-
}


start_slurm() {
  local gpu
  mkdir -- "$LAB/slurmctld"
  slurm_conf >"$LAB/slurm.conf"
  task_prolog >"$LAB/task_prolog"
  chmod +x -- "$LAB/task_prolog"
  for ((gpu = 0; gpu < GPUS; gpu++)); do
    mknod -- "$LAB/gpu$gpu" c 1 3 # SLURM needs a device file: another /dev/null
  done
  ((GPUS == 0)) || echo "NodeName=${PREFIX}[1-$NODES] Name=gpu File=$LAB/gpu[0-$((GPUS - 1))]" >"$LAB/gres.conf"
  (umask 077 && head -c 128 /dev/urandom >"$LAB/munge.key")
  munged --key-file="$LAB/munge.key" --socket="$LAB/munge.socket" --pid-file="$LAB/munged.pid" \
    --log-file="$LAB/munged.log" --seed-file="$LAB/munged.seed" --force 9<&-
  slurmctld -f "$LAB/slurm.conf" 9<&-
}


all_available() { # all nodes of SLURM are idle or run jobs
  local states
  states=$(SLURM_CONF=$LAB/slurm.conf timeout 5 sinfo --noheader --Node --format=%T 2>/dev/null) || return 1
  [[ $states ]] && ! grep -qvxE 'idle|mixed|allocated|completing' <<<"$states"
}


is_up() ( # with any settings
  load_settings && [[ -e $LAB/complete && -e /sys/class/net/$(link_name) ]] && { [[ ! $SLURM ]] || slurm_runs; }
)


slurm_runs() {
  [[ $(daemons munged) && $(daemons slurmctld) ]]
}


repair() {
  local node dead=()
  for node in $(all_nodes); do
    if is_alive "$node"; then
      heal "$node"
    else
      power_off "$node"
      # The old network namespace may still be mounted in other nodes: delete the interface by name.
      in_switch ip link del "$node" 2>/dev/null || true
      remove_network "$LAB/$node/net"
      dead+=("$node")
    fi
  done
  ((${#dead[@]} == 0)) || start_nodes "${dead[@]}"
}


# ---- processes and state of a node ----

processes_of() { # <node>; prints all processes in its network namespace
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


# ---- faults ----

cut() { # <node>
  in_switch bridge link set dev "$1" state disabled
}


freeze() { # <node>
  local processes stopped=
  # A process may have forked before it stopped: repeat until there are no new processes.
  until processes=$(processes_of "$1") && [[ $processes == "$stopped" ]]; do
    signal STOP "$processes"
    stopped=$processes
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
  is_alive "$1" || die "$1: is dead; restart it with $PROGRAM up"
  unlimit "$LAB/switch" "$1"
  unlimit "$LAB/$1/net" eth0
  signal CONT "$(processes_of "$1")"
  in_switch bridge link set dev "$1" state forwarding
}


unlimit() { # <network> <device>
  nsenter --net="$1" tc qdisc del dev "$2" root 2>/dev/null || true # no limit was set
}


# Freeze all processes before killing them: as in a power failure, none can record the death of another.
kill_node() { # <node>
  cut "$1"
  freeze "$1"
  power_off "$1"
}


power_off() { # <node>
  wait_until "$STEP_TIMEOUT" kill_processes "$1" ||
    die "$1: processes $(processes_of "$1" | xargs) did not exit after SIGKILL"
}


# Kill children first: when a parent dies, the kernel continues its stopped children, which could still act.
kill_processes() { # <node>; succeeds when none is left
  local processes
  processes=$(processes_of "$1" | sort -rn)
  signal KILL "$processes"
  [[ ! $processes ]]
}


signal() { # <name> <process ids, one per line; some may have exited>
  # shellcheck disable=SC2086  # a list of numbers
  [[ ! $2 ]] || kill -"$1" $2 2>/dev/null || true
}


# ---- down ----

down() {
  local node
  remove_ssh_config
  rm -f -- "$LAB/$UNFINISHED_SETTINGS"
  [[ -e $LAB ]] && ! rmdir -- "$LAB" 2>/dev/null || return 0
  load_settings || die_usage "MUSTER_LAB='$LAB': not created by $PROGRAM; choose another directory"
  rm -f -- "$LAB/complete"
  [[ ! $SLURM ]] || cancel_jobs
  for node in $(all_nodes); do
    signal KILL "$(processes_of "$node")"
  done
  for node in $(all_nodes); do
    power_off "$node"
    remove_network "$LAB/$node/net"
  done
  [[ ! $SLURM ]] || stop_slurm
  ip link del "$(link_name)" 2>/dev/null || true
  remove_network "$LAB/switch" # and with it all links to the nodes
  remove_files
}


remove_ssh_config() {
  local file
  for file in "$SSH_CONFIG.d"/muster-lab*.conf; do
    [[ $(head -n 1 -- "$file" 2>/dev/null) != "$MARK in $LAB" ]] || rm -f -- "$file"
  done
}


# scancel also ends an srun on this machine, which would otherwise wait for the killed nodes.
cancel_jobs() {
  local -x SLURM_CONF=$LAB/slurm.conf
  local jobs
  jobs=$(timeout 5 squeue --noheader --format=%A 2>/dev/null) && [[ $jobs ]] || return 0
  # shellcheck disable=SC2086  # a list of numbers
  timeout 5 scancel $jobs || true
  wait_until $((KILL_WAIT + 2)) no_jobs || true # jobs on a cut node remain
}


no_jobs() {
  [[ ! $(timeout 5 squeue --noheader 2>/dev/null) ]]
}


remove_network() { # <file of its bind mount>
  umount -- "$1" 2>/dev/null || true
}


# The settings are removed last: if down is interrupted, the next down recognizes the directory by them.
remove_files() {
  if [[ -e $LAB/made_sshd_directory ]] && ! pgrep -x --runstates D,R,S,T sshd >/dev/null; then
    rmdir -- "$SSHD_DIRECTORY" 2>/dev/null || true
  fi
  find "$LAB" -xdev -mindepth 1 ! -path "$LAB/settings" -delete
  rm -- "$LAB/settings"
  rmdir -- "$LAB"
}


# SIGKILL, because SLURM's state is not needed any more.
stop_slurm() {
  wait_until "$STEP_TIMEOUT" kill_slurm_daemons ||
    die "processes $(daemons munged slurmctld | xargs) did not exit after SIGKILL"
}


kill_slurm_daemons() { # succeeds when none is left
  local processes
  processes=$(daemons munged slurmctld)
  signal KILL "$processes"
  [[ ! $processes ]]
}


daemons() { # <program...>; prints the ids of their processes for this laboratory
  local program pid arguments
  while read -r pid arguments; do
    for program; do
      [[ $arguments != "$program "*" $LAB/"* && $arguments != "$program "*"=$LAB/"* ]] || echo "$pid"
    done
  done < <(ps -eww -o pid=,args=)
}


# ---- commands and their arguments ----

status() {
  local node pid
  for node in $(all_nodes); do
    pid=-
    ! runs_on "$node" sshd || pid=$(pid_in "$LAB/$node/sshd.pid")
    echo "$node $(address "$node") $(state "$node") $pid"
  done
}


ssh_to() { # <node> [argument...]; quoted, because ssh joins arguments and the node's shell splits them
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


# Only one lab.sh at a time changes laboratories on this machine. No other user can open the lock file. Daemons are
# started without descriptor 9, because they would keep the lock.
lock() {
  (umask 077 && : >>"$LOCK")
  exec 9<"$LOCK"
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
      *) set_node_count "$1" ;;
    esac
    shift
  done
  ((NODES > 0)) || die_usage "up: the number of nodes is missing"
  [[ $PREFIX =~ ^[a-z]{1,8}$ ]] || die_usage "--prefix: expected 1 to 8 lower-case letters, got '$PREFIX'"
  [[ $GPUS =~ ^(0|[1-9][0-9]?)$ ]] || die_usage "--gpus: expected a number from 0 to 99, got '$GPUS'"
  [[ $SLURM ]] || ((GPUS == 0)) || die_usage "--gpus: GPUs are simulated in SLURM only; add --slurm"
}


set_node_count() { # <number>
  ((NODES == 0)) || die_usage "up: expected one number of nodes, got '$NODES' and '$1'"
  if [[ ! $1 =~ ^[1-9][0-9]?$ ]] || (($1 > MAX_NODES)); then
    die_usage "up: expected a number of nodes from 1 to $MAX_NODES, got '$1'"
  fi
  NODES=$1
}


add_private() { # <directory>
  local directory
  [[ -d $1 ]] || die_usage "--private: no directory '$1'"
  directory=$(readlink -f -- "$1")
  [[ $directory != *$'\n'* ]] || die_usage "--private: '$1' contains a line break"
  [[ $LAB/ != "${directory%/}"/* ]] ||
    die_usage "--private: '$1' would hide the laboratory in $LAB; set MUSTER_LAB to another directory"
  PRIVATE+=("$directory")
}


need_root() {
  ((EUID == 0)) || die_with "$EXIT_UNFIT" "needs root; run it with sudo"
}


need_lab() {
  need_root
  load_settings || die "$LAB: no laboratory is up; start one with $PROGRAM up 3"
}


need_node() { # <node>
  need_lab
  grep -qxF -- "$1" <<<"$(all_nodes)" || die_usage "no node '$1'; the nodes are: $(all_nodes | xargs)"
}


need_arguments() { # <expected names> <expected number> <argument...>
  (($# - 2 == $2)) || die_usage "$COMMAND: expected $1, got '${*:3}'"
}


change_node() { # <node> [kbit]
  need_node "$1"
  lock
  if [[ $COMMAND == kill ]]; then
    kill_node "$1"
  else
    "$COMMAND" "$@"
  fi
}


main() {
  COMMAND=${1-}
  LAB=$(readlink -m -- "${MUSTER_LAB:-/run/muster-lab}")
  [[ $LAB != *[[:space:]]* ]] || die_usage "MUSTER_LAB='$LAB': contains white space; choose another directory"
  shift $(($# > 0))
  case $COMMAND in
    -h | --help) usage ;;
    up)
      parse_up "$@"
      need_root
      lock
      up
      ;;
    down)
      need_arguments "no arguments" 0 "$@"
      need_root
      lock
      down
      ;;
    status)
      need_arguments "no arguments" 0 "$@"
      need_lab
      status
      ;;
    ssh)
      (($# > 0)) || die_usage "ssh: expected NODE [ARGUMENT...]"
      need_node "$1"
      ssh_to "$@"
      ;;
    cut | freeze | heal | kill)
      need_arguments "NODE" 1 "$@"
      change_node "$1"
      ;;
    slow)
      need_arguments "NODE KBIT" 2 "$@"
      [[ $2 =~ ^[1-9][0-9]{0,7}$ ]] || die_usage "slow: expected kbit/s as a positive whole number, got '$2'"
      change_node "$@"
      ;;
    start-node)
      need_lab
      start_node "$1"
      ;;
    '') die_usage "no command" ;;
    *) die_usage "unknown command '$COMMAND'" ;;
  esac
}

main "$@"
