# shellcheck shell=bash
#
# Job lists on the laboratory, for bats files. Sourced behind nodes.bash, never run.
#
# A bats file calls raise_servers N in setup_file, lower_servers in teardown_file, enter_list in setup and leave_list in
# teardown. A test then writes a list with `cluster` and `job_list`, runs it with `dispatch`, and looks at what came of it
# with `holds`. The jobs run job.py, which does what their settings say:
#
#   name      its name in `holds`, and in the file STARTED: "begin NAME NODE PID CUDA_VISIBLE_DEVICES", and "end NAME"
#   seconds   how long it takes
#   until     a file: it takes until that is there
#   exit      its exit code; with exit_once only where this file is not there yet, and otherwise 0
#   signal    the signal that it sends to itself; "segfault" reads from address 0
#   deaf      it ignores SIGTERM
#   polite    it exits with 0 on SIGTERM
#   alone     it notes "overlap" when another such job runs on the same node
#   daemon    it leaves a process behind, in a session of its own, that ignores SIGTERM
#   memory    MiB that it allocates
#   fill      a directory that it writes into until the disk is full, and then fails; not on a disk of 10 MB or more
#   big       MiB of its results
#   quiet     it writes nothing into its output directory
#
# With mode base_only, its settings are those that begin with base_, its name is base, and it writes the files of a base
# model; `mb` are the MiB of its weights. An experiment notes "base NAME weights" when it can read its base model.
#
# All nodes share the files of this machine but for a home, a directory of tmux's sockets, and APART.
# shellcheck disable=SC2034,SC2153,SC2154 # what it sets is for the tests, and what run sets for it


raise_servers() { # <how many>
  local node
  export APART=$BATS_FILE_TMPDIR/apart HOMES=$BATS_FILE_TMPDIR/homes NODES=$1
  mkdir "$APART" "$HOMES"
  mkdir -p "$TMUX_SOCKETS" && chmod 700 "$TMUX_SOCKETS"
  start_lab "$1" --private "$APART"
  for node in $(all_nodes); do
    furnish "$node"
  done
}


TMUX_SOCKETS=/tmp/tmux-$(id -u)


lower_servers() {
  stop_lab
}


all_nodes() {
  local number
  for ((number = 1; number <= NODES; number++)); do
    echo "$PREFIX$number"
  done
}


# Give a node a home of its own, without a place where tmux would meet that of other nodes. Again when it was killed.
furnish() { # <node> [login shell]
  local home=$HOMES/$1
  mkdir -p "$home/bin" "$home/tmux"
  chmod 700 "$home/tmux"
  sed "s#^\(root:.*:\)[^:]*:[^:]*\$#\1$home:${2:-/bin/bash}#" /etc/passwd >"$home/passwd"
  printf '%s\n' "PATH='$home/bin':\$PATH" >"$home/.bashrc"
  on "$1" mount --bind "$home/passwd" /etc/passwd
  on "$1" mount --bind "$home/tmux" "$TMUX_SOCKETS"
}


on() { # <node> <command...>: in its network and with its files
  nsenter --target "$(<"$MUSTER_LAB/$1/sshd.pid")" --net --uts --mount -- "${@:2}" 3>&-
}


address() { # <node>
  awk -v node="$1" '$2 == node { print $1 }' "$MUSTER_LAB/hosts"
}


enter_list() {
  enter_workdir
  DISPATCH=("$VIRTUAL_ENV/bin/python" "$KIT/scripts/jobs/run_distributed_training.py")
  STARTED=$BATS_TEST_TMPDIR/started
  : >"$STARTED"
  write_job_script
  LAUNCHER=''
}


# Whatever a failed test has left: the marks of the product are not to be trusted here. Other files run meanwhile.
leave_list() {
  local node file
  [ -n "${BATS_TEST_COMPLETED-}" ] || tail -n 50 "$WORK/out" "$BATS_TEST_TMPDIR/out" 2>/dev/null || true
  [ -z "$LAUNCHER" ] || kill -KILL "$LAUNCHER" 2>/dev/null || true
  for node in $(all_nodes); do
    lab heal "$node" >/dev/null 2>&1 || true
    on "$node" tmux kill-server 2>/dev/null || true
  done
  while read -r file; do
    kill -KILL "${file//[!0-9]/}" 2>/dev/null || true
  done < <(grep -lszF -e "STARTED=$STARTED" /proc/[0-9]*/environ)
}


# ---- a list

cluster() { # <node[:slots]...>: servers without GPUs, with so many slots (default: 2)
  local node comma=''
  {
    printf '{"script_path": "job.py", "defaults": {"gpus": 0, "slots_per_gpu": 2, "python": "%s"}, "servers": [' \
      "$VIRTUAL_ENV/bin/python"
    for node; do
      printf '%s\n  {"host": "%s"' "$comma" "${node%%:*}"
      [[ $node != *:* ]] || printf ', "slots_per_gpu": %s' "${node#*:}"
      printf '}' && comma=,
    done
    printf ']}\n'
  } >cluster.json
}


job_list() { # on standard input: objects without the comma between them, a line each; each gets STARTED as a variable
  sed -e "s#^{#{\"_env\": {\"STARTED\": \"$STARTED\"}, #" -e '1s/^/[/' -e '$!s/$/,/' -e '$s/$/]/' >jobs.json
}


dispatch() { # [option...]
  "${DISPATCH[@]}" --cluster-config cluster.json --jobs-config jobs.json --grace 3 "$@" 3>&-
}


list() { # <command> [word...]
  "${DISPATCH[@]}" "$@" 3>&-
}


# In the background, as a terminal would: LAUNCHER is the dispatcher, "out" what it prints.
start_list() { # [option...]
  start "$WORK/out" "${DISPATCH[@]}" --cluster-config cluster.json --jobs-config jobs.json --grace 3 "$@"
}


start_command() { # <command> [word...]
  start "$WORK/out" "${DISPATCH[@]}" "$@"
}


# ---- what came of it

holds() { # <Python expression: r is results.json, job its jobs by name, last their last attempts, and began are all
  # names that stand in STARTED, started its lines>
  look holds "$1"
}


tell() { # <Python expression of several values>
  look tell "$1"
}


look() { # <holds or tell> <expression>
  "$VIRTUAL_ENV/bin/python" -I - "$STARTED" "$@" <<'END'
import json, sys
r = json.load(open("results.json"))
job = {each["settings"].get("name"): each for each in r["jobs"]}
last = {name: each["attempts"][-1] for name, each in job.items() if each["attempts"]}
started = [line.split() for line in open(sys.argv[1])]
began = [words[1] for words in started if words[0] == "begin"]
found = eval(sys.argv[3])
if sys.argv[2] == "tell":
    print(*found)
elif not found:
    print(json.dumps(r, indent=1), *map(" ".join, started), f"does not hold: {sys.argv[3]}", sep="\n")
    sys.exit(1)
END
}


eventually() { # <command...>: it succeeds within a minute
  local end=$((SECONDS + 60))
  until "$@" >"$BATS_TEST_TMPDIR/eventually" 2>&1; do
    if ((SECONDS >= end)); then
      echo "not within a minute: $*" && cat "$BATS_TEST_TMPDIR/eventually"
      tail -n 50 out 2>/dev/null
      return 1
    fi
    sleep 0.1
  done
}


begun() { # <name>: the job has begun
  wait_for_line "$STARTED" "begin $1 "
}


pid_of_job() { # <name>, of its newest start
  awk -v name="$1" '$1 == "begin" && $2 == name { pid = $4 } END { print pid }' "$STARTED"
}


node_of_job() { # <name>
  awk -v name="$1" '$1 == "begin" && $2 == name { node = $3 } END { print node }' "$STARTED"
}


supervised() { # <supervisor, guard or command> <name of a job>: process id
  "$VIRTUAL_ENV/bin/python" -I - "$1" "$(pid_of_job "$2")" <<'END'
import glob, json, sys
found = [json.load(open(path)) for path in glob.glob("logs/jobs/*/*/node_*.pid")]
print(next(each[sys.argv[1]]["pid"] for each in found if each["command"]["pid"] == int(sys.argv[2])))
END
}


alive() { # <process id>
  [[ $(cat "/proc/$1/stat" 2>/dev/null) =~ \)\ [^ZX] ]]
}


# Processes of any attempt of this test, wherever they have gone.
nothing_left() {
  ! grep -qszF -e "STARTED=$STARTED" /proc/[0-9]*/environ
}


# A pseudo terminal shows what the text is in, as a person would see it who calls this command.
shows_on_terminal() { # <text> <command...>
  "$VIRTUAL_ENV/bin/python" -I - "$@" 3>&- <<'END'
import fcntl, os, pty, select, struct, sys, termios, time
pid, terminal = pty.fork()
if pid == 0:
    time.sleep(0.2)  # until the terminal has its size
    os.environ["TERM"] = "xterm"
    os.execvp(sys.argv[2], sys.argv[2:])
fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 67, 240, 0, 0))
seen, end = b"", time.monotonic() + 30
try:
    while sys.argv[1].encode() not in seen and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 65536)
    os.write(terminal, b"\x02d")  # C-b d
    while time.monotonic() < end:
        seen += os.read(terminal, 65536)
except OSError:  # it has ended
    pass
sys.exit(sys.argv[1].encode() not in seen and repr(seen[-3000:]))
END
}


write_job_script() {
  cat >job.py <<'END'
import ctypes, fcntl, json, os, signal, subprocess, sys, time

job, out, node = json.loads(os.environ["MUSTER_JOB"]), os.environ["MUSTER_OUTPUT_DIR"], os.uname().nodename
if job.get("mode") == "base_only":
    job = {"name": "base", "quiet": True, **{key.removeprefix("base_"): value for key, value in job.items()}}
name, gpus = job.get("name", job["id"]), os.environ["CUDA_VISIBLE_DEVICES"]


def note(*words):
    with open(os.environ["STARTED"], "a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def metrics(**values):
    if not job.get("quiet"):
        with open(f"{out}/metrics.jsonl", "a") as file:
            file.write(json.dumps(values) + "\n")


if job.get("deaf"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if job.get("polite"):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if job.get("alone"):
    try:
        lock = open(os.environ["STARTED"] + f".{node}", "w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note("overlap", name, node)
note("begin", name, node, os.getpid(), gpus or "-")
for gpu in filter(None, gpus.split(",")):  # for the stub of nvidia-smi, and a job that has the same GPU
    used = os.path.expanduser(f"~/gpu_{gpu}")
    if os.path.exists(used) and os.path.exists("/proc/" + open(used).read().strip()):
        note("overlap", name, node, gpu)
    open(used, "w").write(str(os.getpid()))
print("arguments", *sys.argv[1:], flush=True)
metrics(steps=10)
block = bytearray(os.urandom(1 << 20) * job.get("memory", 0))
end = time.monotonic() + job.get("seconds", 0)
step = 0
while time.monotonic() < end or not os.path.exists(job.get("until", "/")):
    step += 1
    metrics(step=step, loss=10 / step)
    print(f"{name}-tick-{step}", flush=True)
    time.sleep(0.1)
if job.get("daemon"):
    subprocess.Popen(
        [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"],
        start_new_session=True,
    )
if "fill" in job and os.statvfs(job["fill"]).f_blocks * os.statvfs(job["fill"]).f_frsize < 10**7:
    with open(f"{job['fill']}/filling-{name}", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
if job.get("signal") == "segfault":
    ctypes.string_at(0)
if "signal" in job:
    os.kill(os.getpid(), getattr(signal, job["signal"]))
if not job.get("quiet"):
    with open(f"{out}/big", "wb") as file:
        file.write(os.urandom(1 << 20) * job.get("big", 0))
    with open(f"{out}/result", "w") as file:
        file.write(f"{name} on {node}\n")
if job.get("mode") == "base_only" and "exit" not in job or os.path.exists(job.get("exit_once", "nowhere")):
    for part in ("metrics", "losses", "config"):
        with open(f"{out}/base_{part}.json", "w") as file:
            file.write('{"held_out_loss": 1.5}')
    with open(f"{out}/best_base_model.pt", "wb") as file:
        file.write(os.urandom(1 << 20) * job.get("mb", 0) + b"weights")
if "MUSTER_BASE_MODEL" in os.environ:
    note("base", name, open(os.environ["MUSTER_BASE_MODEL"] + "/best_base_model.pt", "rb").read()[-7:].decode())
metrics(step=10, loss=0.5)
note("end", name)
if not os.path.exists(job.get("exit_once", "nowhere")) and job.get("exit"):
    if "exit_once" in job:
        open(job["exit_once"], "w").close()
    sys.exit(f"{name} gives up" if job["exit"] == 1 else job["exit"])
END
}
