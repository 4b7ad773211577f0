# shellcheck shell=bash
#
# Job lists on the laboratory, for bats files. Sourced after nodes.bash, never run.
#
# A bats file calls start_servers N in setup_file, enter_list in setup and leave_list in teardown. A test
# writes a list with `cluster` and `job_list`, runs it with `dispatch` and checks results with `holds`. The jobs run
# job.py, whose settings are:
#
#   name      its name in `holds`, and in the file STARTED: "begin NAME NODE PID CUDA_VISIBLE_DEVICES", and "end NAME"
#   seconds   run time
#   until     a file: run until it exists
#   exit      exit code, by default 0
#   exit_once   a file: if it exists, exit with 0, otherwise create it and exit with `exit`
#   signal    send this signal to itself; "segfault" reads from address 0
#   ignore_sigterm, exit_on_sigterm   ignore SIGTERM, or exit with 0
#   alone     write "overlap" to STARTED if another job with this setting runs on the node
#   daemon    start a process in a separate session that ignores SIGTERM, and do not wait for it
#   memory    MiB to allocate
#   fill      a directory: write to it until the disk is full, then fail; ignored on a disk of 10 MB or more
#   big       MiB of results
#   quiet     write nothing to the output directory
#
# With mode base_only, the job uses the settings that start with base_, has the name base, and writes the files of a
# base model; base_mb is the size of its weights in MiB. An experiment writes "base NAME weights" to STARTED if it can
# read its base model.
#
# Nodes share all files with this machine, except for two directories: their home and APART.
# shellcheck disable=SC2034,SC2153,SC2154 # tests read variables of this file, which reads variables of bats

# shellcheck source=tests/lab/list_results.bash
source "$BATS_TEST_DIRNAME/lab/list_results.bash"


start_servers() { # <number of servers>
  local node
  export APART=$BATS_FILE_TMPDIR/apart HOMES=$BATS_FILE_TMPDIR/homes NODES=$1
  mkdir "$APART" "$HOMES"
  start_lab "$1" --private "$APART"
  for node in $(all_nodes); do
    set_up_home "$node"
  done
}


all_nodes() {
  local number
  for ((number = 1; number <= NODES; number++)); do
    echo "$PREFIX$number"
  done
}


# Give a node a separate home. Call it again after the node is restarted.
set_up_home() { # <node> [login shell]
  local home=$HOMES/$1
  mkdir -p "$home/bin"
  sed "s#^\(root:.*:\)[^:]*:[^:]*\$#\1$home:${2:-/bin/bash}#" /etc/passwd >"$home/passwd"
  printf '%s\n' "PATH='$home/bin':\$PATH" >"$home/.bashrc"
  on "$1" mount --bind "$home/passwd" /etc/passwd
}


enter_list() {
  enter_workdir
  DISPATCH=("$VIRTUAL_ENV/bin/python" "$KIT/scripts/jobs/run_distributed_training.py")
  STARTED=$BATS_TEST_TMPDIR/started
  : >"$STARTED"
  write_job_script
  LAUNCHER=''
}


# Kill all processes of this test. They are found by STARTED in their environment, independently of Muster.
leave_list() {
  local node file
  [ -n "${BATS_TEST_COMPLETED-}" ] || tail -n 50 "$WORK/out" "$BATS_TEST_TMPDIR/out" 2>/dev/null || true
  [ -z "$LAUNCHER" ] || kill -KILL "$LAUNCHER" 2>/dev/null || true
  for node in $(all_nodes); do
    lab heal "$node" >/dev/null 2>&1 || true
    TMUX_TMPDIR=$MUSTER_LAB/$node/tmux tmux kill-server 2>/dev/null || true
  done
  while read -r file; do
    kill -KILL "${file//[!0-9]/}" 2>/dev/null || true
  done < <(grep -lszF -e "STARTED=$STARTED" /proc/[0-9]*/environ)
}


# ---- a list

cluster() { # <node[:slots]...>: write cluster.json; servers have no GPUs, and 2 slots by default
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


dispatch() { # [option...]
  "${DISPATCH[@]}" --cluster-config cluster.json --jobs-config jobs.json --grace 3 "$@" 3>&-
}


# Start the list in the background, in its own process group. LAUNCHER is the dispatcher; it prints to "out".
start_list() { # [option...]
  start "$WORK/out" "${DISPATCH[@]}" --cluster-config cluster.json --jobs-config jobs.json --grace 3 "$@"
}


start_command() { # <subcommand> [argument...]: in the background, like start_list
  start "$WORK/out" "${DISPATCH[@]}" "$@"
}


# ---- processes of jobs

pid_of_job() { # <name>: the process id of its newest attempt
  awk -v name="$1" '$1 == "begin" && $2 == name { pid = $4 } END { print pid }' "$STARTED"
}


process_of_job() { # <supervisor, guard or command> <name>: the process id of this process of the job
  "$VIRTUAL_ENV/bin/python" -I - "$1" "$(pid_of_job "$2")" <<'END'
import glob, json, sys
records = [json.load(open(path)) for path in glob.glob("logs/jobs/*/*/node_*.pid")]
print(next(each[sys.argv[1]]["pid"] for each in records if each["command"]["pid"] == int(sys.argv[2])))
END
}


alive() { # <process id>
  [[ $(cat "/proc/$1/stat" 2>/dev/null) =~ \)\ [^ZX] ]]
}


# Check that a command shows a text on a terminal. Then type Ctrl-b d, which detaches tmux.
shows_on_terminal() { # <text> <command...>
  "$VIRTUAL_ENV/bin/python" -I - "$@" 3>&- <<'END'
import fcntl, os, pty, select, struct, sys, termios, time
pid, terminal = pty.fork()
if pid == 0:
    time.sleep(0.2)  # until the terminal has its size
    os.environ["TERM"] = "xterm"
    os.execvp(sys.argv[2], sys.argv[2:])
fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 67, 240, 0, 0))
output, end = b"", time.monotonic() + 30
try:
    while sys.argv[1].encode() not in output and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            output += os.read(terminal, 65536)
    os.write(terminal, b"\x02d")  # C-b d
    while time.monotonic() < end:
        output += os.read(terminal, 65536)
except OSError:  # the command exited
    pass
sys.exit(sys.argv[1].encode() not in output and repr(output[-3000:]))
END
}


write_job_script() {
  cat >job.py <<'END'
import ctypes, fcntl, json, os, signal, subprocess, sys, time

job, out, node = json.loads(os.environ["MUSTER_JOB"]), os.environ["MUSTER_OUTPUT_DIR"], os.uname().nodename
if job.get("mode") == "base_only":
    job = {"name": "base", "quiet": True, **{key.removeprefix("base_"): value for key, value in job.items()}}
name, gpus = job.get("name", job["id"]), os.environ["CUDA_VISIBLE_DEVICES"]


def record(*values):
    with open(os.environ["STARTED"], "a") as file:
        file.write(" ".join(map(str, values)) + "\n")


def metrics(**values):
    if not job.get("quiet"):
        with open(f"{out}/metrics.jsonl", "a") as file:
            file.write(json.dumps(values) + "\n")


if job.get("ignore_sigterm"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if job.get("exit_on_sigterm"):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if job.get("alone"):
    try:
        lock = open(os.environ["STARTED"] + f".{node}", "w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        record("overlap", name, node)
record("begin", name, node, os.getpid(), gpus or "-")
for gpu in filter(None, gpus.split(",")):  # the stub of nvidia-smi and other jobs read ~/gpu_N
    used = os.path.expanduser(f"~/gpu_{gpu}")
    if os.path.exists(used) and os.path.exists("/proc/" + open(used).read().strip()):
        record("overlap", name, node, gpu)
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
    record("base", name, open(os.environ["MUSTER_BASE_MODEL"] + "/best_base_model.pt", "rb").read()[-7:].decode())
metrics(step=10, loss=0.5)
record("end", name)
if not os.path.exists(job.get("exit_once", "nowhere")) and job.get("exit"):
    if "exit_once" in job:
        open(job["exit_once"], "w").close()
    sys.exit(f"{name} gives up" if job["exit"] == 1 else job["exit"])
END
}
