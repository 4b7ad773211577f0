#!/usr/bin/env bash
#
# Raise a real SLURM on this machine alone: munged, slurmctld, and one slurmd for each of three nodes.
#
# Usage: slurm_one_node.sh up [FOLDER]      prints the SLURM_CONF to use
#        slurm_one_node.sh down [FOLDER]    ends all jobs and daemons, and removes FOLDER
#
# The nodes n08, n09 and n10 have host names of their own (and find each other by them), 8 CPUs and
# 2 pretended GPUs each, but share this machine's network, files and processes. Needs root.
# FOLDER holds everything; the default is muster-slurm in TMPDIR or /tmp. Both verbs may be repeated.
#
#   export SLURM_CONF=$(tests/lab/slurm_one_node.sh up)
#   srun -N3 --ntasks-per-node=2 hostname
#   tests/lab/slurm_one_node.sh down
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../../scripts/lib/common.bash"

NODES=(n08 n09 n10)
PATIENCE=10 # seconds that starting, and each part of stopping, may take


slurm_conf() { # <folder> <first of four free ports>
  cat <<CONF
# Muster's laboratory
ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$2
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$1/munge.socket
CredType=cred/munge
StateSaveLocation=$1/state
SlurmdSpoolDir=$1/spool-%n
SlurmctldPidFile=$1/slurmctld.pid
SlurmdPidFile=$1/slurmd-%n.pid
SlurmctldLogFile=$1/slurmctld.log
SlurmdLogFile=$1/slurmd-%n.log
MailProg=/bin/true
# As an ordinary user's machine can have it: no cgroups, more CPUs than there are.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
# Jobs of several components wait for the backfill scheduler: let it look every second.
SchedulerParameters=bf_interval=1
KillWait=1
LaunchParameters=use_interactive_step
GresTypes=gpu
NodeName=n[08-10] NodeAddr=127.0.0.1 Port=[$(($2 + 1))-$(($2 + 3))] CPUs=8 RealMemory=1000 Gres=gpu:2
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
}


up() { # <folder>
  if is_up "$1"; then
    echo "$1/slurm.conf"
    return
  fi
  check_machine
  down "$1"
  trap 'show_logs "$FOLDER"; down "$FOLDER"' EXIT
  write_files "$1"
  start_daemons "$1"
  wait_until "$PATIENCE" all_idle "$1" || die "the nodes of $1 are not ready after $PATIENCE s"
  trap - EXIT
  echo "$1/slurm.conf"
}


check_machine() {
  local program
  ((EUID == 0)) || die_with "$EXIT_UNFIT" "only root can give each slurmd a host name of its own: run it with sudo"
  for program in munged slurmctld slurmd srun unshare; do
    type -P "$program" >/dev/null ||
      die_with "$EXIT_UNFIT" "no program '$program': apt-get install slurm-wlm munge util-linux"
  done
}


write_files() { # <folder>
  local port gpu
  port=$(free_ports)
  mkdir -m 700 -- "$1"
  slurm_conf "$1" "$port" >"$1/slurm.conf"
  mkdir -- "$1/state"
  for gpu in gpu0 gpu1; do
    mknod -- "$1/$gpu" c 1 3 # SLURM wants a device file: each is one more /dev/null
  done
  echo "NodeName=n[08-10] Name=gpu File=$1/gpu[0-1]" >"$1/gres.conf"
  { cat /etc/hosts && echo "127.0.0.1 ${NODES[*]}"; } >"$1/hosts"
  (umask 077 && head -c 128 /dev/urandom >"$1/munge.key")
}


free_ports() { # prints the first of four, below the ephemeral ports
  local first
  for _ in {1..50}; do
    first=$((10000 + RANDOM % 2500 * 4))
    if ! answers "$first" && ! answers $((first + 1)) && ! answers $((first + 2)) && ! answers $((first + 3)); then
      echo "$first"
      return
    fi
  done
  die "no four free ports in a row between 10000 and 20000: end what listens there"
}


answers() { # <port>
  (: <>"/dev/tcp/127.0.0.1/$1") 2>/dev/null
}


start_daemons() { # <folder>
  local node
  munged --key-file="$1/munge.key" --socket="$1/munge.socket" --pid-file="$1/munged.pid" \
    --log-file="$1/munged.log" --seed-file="$1/munged.seed" --force
  slurmctld -f "$1/slurm.conf"
  for node in "${NODES[@]}"; do
    unshare --mount --uts -- "$PROGRAM_FILE" start-node "$1" "$node"
  done
}


# Runs in a mount and host name space of its own, which last as long as the slurmd and its jobs.
start_node() { # <folder> <node>
  hostname "$2"
  mount --bind -- "$1/hosts" /etc/hosts
  exec slurmd -f "$1/slurm.conf" -N "$2"
}


down() { # <folder>
  [[ -e $1 ]] || return 0
  is_ours "$1" || die_usage "'$1' was not made by this script: name another folder"
  end_jobs "$1"
  local file
  for file in "$1"/slurmd-*.pid "$1/slurmctld.pid" "$1/munged.pid"; do
    end_daemon "$1" "$file"
  done
  rm -rf -- "$1"
}


is_ours() { # <folder>
  [[ $(head -n 1 -- "$1/slurm.conf" 2>/dev/null) == "# Muster's laboratory" ]]
}


end_jobs() { # <folder>
  local -x SLURM_CONF=$1/slurm.conf
  local jobs
  jobs=$(timeout 5 squeue --noheader --format=%A 2>/dev/null) || return 0
  [[ $jobs ]] || return 0
  # shellcheck disable=SC2086  # a list of numbers
  scancel $jobs
  wait_until "$PATIENCE" no_jobs || warn "jobs $jobs do not end: their processes may stay"
}


no_jobs() {
  [[ ! $(squeue --noheader) ]]
}


# The pid file may be stale: only a daemon that was started for this folder is ended.
end_daemon() { # <folder> <pid file>
  local pid
  pid=$(cat -- "$2" 2>/dev/null) || return 0
  runs_for "$1" "$pid" || return 0
  kill -TERM "$pid"
  wait_until "$PATIENCE" has_ended "$1" "$pid" || kill -KILL "$pid"
}


runs_for() { # <folder> <pid>
  [[ $(ps -ww -o args= -p "$2") == *"$1/"* ]]
}


has_ended() { # <folder> <pid>
  ! runs_for "$@" # true for a zombie too, whose words are gone
}


is_up() { # <folder>
  is_ours "$1" && all_idle "$1"
}


all_idle() { # <folder>; a node with jobs is well too
  local states
  states=$(SLURM_CONF=$1/slurm.conf timeout 5 sinfo --noheader --Node --format=%T 2>/dev/null) || return 1
  [[ $states ]] && ! grep -qvxE 'idle|mixed|allocated|completing' <<<"$states"
}


wait_until() { # <seconds> <command...>
  local end=$((SECONDS + $1))
  until "${@:2}"; do
    ((SECONDS < end)) || return 1
    sleep 0.05
  done
}


show_logs() { # <folder>
  tail -n 20 -- "$1"/*.log >&2 || true
}


main() {
  case ${1-} in
    -h | --help) usage ;;
    up | down)
      (($# <= 2)) || die_usage "too many words: '${*:3}'"
      FOLDER=$(readlink -m -- "${2:-${TMPDIR:-/tmp}/muster-slurm}")
      [[ $FOLDER != *[[:space:]]* ]] || die_usage "'$FOLDER' has a blank, which slurm.conf cannot hold: name another"
      "$1" "$FOLDER"
      ;;
    start-node) start_node "$2" "$3" ;;
    *) die_usage "'${1-}' is neither up nor down" ;;
  esac
}

main "$@"
