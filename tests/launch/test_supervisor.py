"""If processes are killed, or consoles and disks are full, no process of a command remains and its end is recorded.

The processes are real. The command is a shell with child processes. supervisor.bats has the tests in which neither
the supervisor nor its guard is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from distributed.files import read_json, write_json
from distributed.host import process_scan, signals
from distributed.launch import console_stream, node_environment, node_files, node_processes, node_requests, supervisor
from distributed.launch.node_environment import read_block
from distributed.launch.node_files import Files, SupervisorError
from distributed.launch.node_reports import REPORT, parse_report
from distributed.launch.supervisor_options import SupervisorOptions
from distributed.metrics import FROM_OUTPUT

KIT = Path(__file__).resolve().parents[2]
SUPERVISOR = [sys.executable, "-I", "-S", str(KIT / "scripts/lib/module.py"), "launch.supervisor"]
TIMEOUT = 60.0  # seconds for events that take milliseconds on an idle machine
WITH_CHILDREN = "setsid sleep 300 & sleep 300 & echo ready; wait"  # one child in a separate session
IGNORES_TERM = "trap '' TERM; echo ready; while true; do sleep 0.1; done"


class SupervisedRun:
    """A supervisor, started as a launcher does."""

    def __init__(self, directory: Path) -> None:
        self.files = Files(str(directory), "n1")
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, verb: str, *arguments: str) -> list[str]:
        return [*SUPERVISOR, *verb.split(), "--dir", self.files.directory, "--name", "n1", *arguments]

    def start(self, script: str, *options: str, block: bytes | None = None, **popen: Any) -> subprocess.Popen[bytes]:
        """Run a shell script; return when it has printed "ready" or exited."""
        from_stdin = ["--environment", "-"] if block is not None else []
        command = self.command("run", *options, *from_stdin, "--", "bash", "-c", script)
        popen = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "bufsize": 0} | popen
        process: Any = subprocess.Popen(command, stdin=subprocess.PIPE, **popen)
        self.process = process
        if block is not None:
            self.control.write(b"\0" + block)  # the first of the two blocks of --environment is empty
        wait_until(lambda: "ready" in self.log or self.code is not None)
        return process

    @property
    def control(self) -> IO[bytes]:
        assert self.process and self.process.stdin
        return self.process.stdin

    @property
    def log(self) -> str:
        return Path(self.files.log).read_text() if os.path.exists(self.files.log) else ""

    @property
    def code(self) -> int | None:
        return node_files.read_code(self.files.exit)

    def pid(self, name: str) -> int:
        return int(read_json(self.files.pids)[name]["pid"])  # type: ignore[index]

    def remaining(self) -> list[int]:
        return process_scan.live_processes(self.files.environment)

    def call(self, verb: str, *options: str) -> str:
        command = self.command(verb, *options)
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT).stdout

    @property
    def state(self) -> dict[str, Any]:
        return dict(json.loads(self.call("status")))


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SupervisedRun]:
    run = SupervisedRun(tmp_path / "my 'run'")
    yield run
    run.call("sweep")
    if run.process:
        run.control.close()
        run.process.wait(TIMEOUT)


def kill(*pids: int, group: bool = False) -> None:
    for pid in pids:
        (os.killpg if group else os.kill)(pid, signal.SIGKILL)


# ---------------------------------------------------------------- killed processes


@pytest.mark.parametrize("group", [False, True], ids=["alone", "with its group"])
@pytest.mark.parametrize(
    ("killed", "record"),
    [("supervisor", "killed"), ("command", None), ("guard supervisor", "killed"), ("guard command", None)],
)
def test_no_process_remains_and_the_exit_code_is_recorded_whichever_process_is_killed(
    run: SupervisedRun, killed: str, record: str | None, group: bool
) -> None:
    process = run.start(WITH_CHILDREN)
    for name in killed.split():
        pid = run.pid(name)
        kill(pid, group=group)
        if name == "guard":
            wait_until(lambda: run.pid("guard") != pid)  # noqa: B023 (called in this iteration only)
    wait_until(lambda: run.code is not None)
    assert run.code == 137
    assert not run.remaining()
    assert process.wait(TIMEOUT) in (137, -signal.SIGKILL)
    assert read_json(run.files.record).get("cause") == record
    if record:
        assert f"process {process.pid} was killed" in run.log


def test_sweep_ends_the_remaining_processes_when_supervisor_and_guard_are_killed_together(run: SupervisedRun) -> None:
    process = run.start(WITH_CHILDREN)
    kill(process.pid, run.pid("guard"))
    wait_until(lambda: not (found := process_scan.process(run.pid("command"))) or not found.alive)
    run.call("sweep")
    assert not run.remaining()
    assert (run.code, read_json(run.files.record)["cause"]) == (137, "killed")


def test_sweep_records_a_reboot_as_the_cause(run: SupervisedRun) -> None:
    process = run.start(WITH_CHILDREN)
    kill(process.pid, run.pid("guard"))
    write_json(run.files.pids, read_json(run.files.pids) | {"boot_id": "another one"})
    heartbeat = Path(run.files.heartbeat)  # of --lease 0: a later failure of a rank is no cause
    heartbeat.touch()
    os.utime(heartbeat, (1.7e9, 1.7e9))
    run.call("sweep")
    assert (run.code, read_json(run.files.record)["cause"]) == (137, "rebooted")
    assert read_json(run.files.record)["time"] == 1.7e9


def test_a_guard_stopped_by_sigstop_does_not_delay_the_end_of_the_supervisor(run: SupervisedRun) -> None:
    process = run.start("echo ready; sleep 300")
    os.kill(run.pid("guard"), signal.SIGSTOP)
    kill(run.pid("command"))
    assert process.wait(TIMEOUT) == 137
    assert not run.remaining()


def test_a_killed_guard_is_replaced_and_the_command_continues(run: SupervisedRun) -> None:
    process = run.start("trap 'exit 7' TERM; echo ready; while true; do sleep 0.1; done")
    for _ in range(3):
        guard = run.pid("guard")
        kill(guard)
        wait_until(lambda: run.pid("guard") != guard)  # noqa: B023 (called in this iteration only)
    run.control.write(b"stop\n")
    assert process.wait(TIMEOUT) == 7
    assert not os.path.exists(run.files.record)


def test_a_zombie_is_not_waited_for(run: SupervisedRun) -> None:
    """Zombies remain in a container whose process 1 does not reap them."""
    process = run.start("sleep 300 & echo ready; exec sleep 300")
    zombie = os.fork()
    if zombie == 0:
        os.execve(
            "/bin/sh", ["sh", "-c", "exit 0"], node_environment.parse_environment(b"\0".join(run.files.environment))
        )
    wait_until(lambda: (found := process_scan.process(zombie)) and not found.alive)
    run.control.write(b"kill\n")
    assert process.wait(TIMEOUT) == 137
    assert run.remaining() == []
    os.waitpid(zombie, 0)


# ---------------------------------------------------------------- launcher, console and connection


def test_a_lost_launcher_is_recorded_and_logged_as_the_cause(run: SupervisedRun) -> None:
    process = run.start("trap 'exit 75' TERM; echo ready; while true; do sleep 0.1; done")
    run.control.close()
    assert process.wait(TIMEOUT) == 75
    assert not run.remaining()
    record = read_json(run.files.record)
    assert (record["node"], record["cause"], record["host"]) == ("n1", "launcher lost", os.uname().nodename)
    assert "control channel closed" in run.log


def test_the_launcher_is_lost_when_heartbeats_time_out(run: SupervisedRun) -> None:
    process = run.start(WITH_CHILDREN, "--lease", "1")
    assert process.wait(TIMEOUT) == 143
    assert "no heartbeat from the launcher for 1 s" in str(read_json(run.files.record)["message"])


LOG_MAY_BE_A_PIPE = f"""
import os, sys
sys.path.insert(0, {str(KIT)!r})
from distributed.launch import command_output, supervisor
command_output.regular_file = os.open
sys.exit(supervisor.main(sys.argv[1:]))
"""


def test_unread_heartbeats_prevent_a_timeout(run: SupervisedRun) -> None:
    """A slow disk blocks the supervisor for longer than the timeout. Here the log file is a pipe."""
    os.makedirs(run.files.directory)
    os.mkfifo(run.files.log)
    log = os.open(run.files.log, os.O_RDONLY | os.O_NONBLOCK)
    script = "yes | head -c 300000; exec sleep 300"
    command = run.command("run", "--lease", "1", "--", "bash", "-c", script)
    command = [sys.executable, "-c", LOG_MAY_BE_A_PIPE, *command[command.index("launch.supervisor") + 1 :]]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0)
    wait_until(lambda: struct.unpack("i", fcntl.ioctl(log, termios.FIONREAD, bytes(4)))[0] >= 1 << 16)
    assert process.stdin
    for _ in range(3):
        time.sleep(0.5)
        process.stdin.write(b"\n")
    process.stdin.write(b"stop\n")
    os.set_blocking(log, True)
    while os.read(log, 1 << 20):
        pass
    assert process.wait(TIMEOUT) == 143
    assert not os.path.exists(run.files.record)
    process.stdin.close()
    os.close(log)


def test_a_supervisor_answers_over_the_control_channel(run: SupervisedRun) -> None:
    process = run.start("echo ready; exec sleep 60", "--report", stdout=subprocess.PIPE)
    assert process.stdout
    with process.stdout as reports:
        for _ in range(2):  # the first one reports the start
            report = parse_report(reports.readline().removeprefix(REPORT))
            assert report.keys() == {"node", "time"}
            run.control.write(b"report\n")


def test_one_stop_request_among_heartbeats_leads_to_sigkill_after_the_grace_time(run: SupervisedRun) -> None:
    process = run.start(IGNORES_TERM, "--grace", "1")
    run.control.write(b"\n\nstop\n")
    assert process.wait(TIMEOUT) == 137
    assert not run.remaining()
    assert read_json(run.files.record)["cause"] == "unresponsive"


def ignore_signals() -> None:
    """Ignore signals, as nohup does for its command and as a shell does for the background jobs of a script."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.parametrize("target", ["supervisor", "command"])
def test_signals_that_were_ignored_at_the_start_are_handled(run: SupervisedRun, target: str) -> None:
    process = run.start("trap 'exit 7' INT TERM; echo ready; while true; do sleep 0.1; done", preexec_fn=ignore_signals)
    os.kill(run.pid(target), signal.SIGINT)
    assert process.wait(TIMEOUT) == 7


def test_signals_that_were_blocked_at_the_start_are_handled(run: SupervisedRun) -> None:
    blocked = {signal.SIGCHLD, signal.SIGINT}
    process = run.start(
        "trap 'exit 7' INT TERM; echo ready; while true; do sleep 0.1; done",
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, blocked),
    )
    os.kill(run.pid("supervisor"), signal.SIGINT)
    assert process.wait(TIMEOUT) == 7


OTHER_SIGNALS = ["USR1", "ALRM", "XCPU", "ABRT", "RTMIN+20"]
HANDLES_ANY = "import signal, sys, time; signal.signal({}, lambda *_: print('got it')); print('ready'); time.sleep(300)"


def number_of(name: str) -> int:
    return signal.SIGRTMIN + int(name[5:] or 0) if name.startswith("RTMIN") else getattr(signal, f"SIG{name}")


@pytest.mark.parametrize("name", OTHER_SIGNALS)
@pytest.mark.parametrize("way", ["supervisor", "control channel", "command line"])
def test_a_signal_reaches_the_handler_once_and_ends_none_of_musters_processes(
    run: SupervisedRun, name: str, way: str
) -> None:
    number = number_of(name)
    command = shlex.join([sys.executable, "-u", "-c", HANDLES_ANY.format(number)])
    process = run.start(f"exec {command}", "--sample-usage")
    if way == "control channel":
        run.control.write(f"signal {number}\n".encode())
    elif way == "command line":  # the verb `signal`
        run.call(f"signal {number}")
    else:  # to the supervisor and the guard, but not to the command
        os.kill(run.pid("guard"), number)
        os.kill(process.pid, number)
    wait_until(lambda: "got it" in run.log)
    run.control.write(b"stop\n")
    assert process.wait(TIMEOUT) == 143
    assert run.log.count("got it") == 1


def test_a_signal_to_a_forked_helper_is_not_taken_for_one_to_the_supervisor() -> None:
    """A helper shares the supervisor's pipe for signals until isolate() is called."""
    before = signal.getsignal(signal.SIGUSR1)
    ends = signals.catch({signal.SIGUSR1})
    try:
        helper = node_processes.fork()
        if helper == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            node_processes.isolate()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1]) == 0
        # An earlier test in this process may have left a handler of SIGCHLD.
        assert not select.select(ends[:1], [], [], 0)[0] or os.read(ends[0], 9) == bytes([signal.SIGCHLD])
        os.kill(os.getpid(), signal.SIGUSR1)
        assert os.read(ends[0], 9) == bytes([signal.SIGUSR1])
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR1, before)
        for end in ends:
            os.close(end)


@pytest.mark.parametrize("name", [*OTHER_SIGNALS, "QUIT", "HUP"])
def test_a_signal_without_a_handler_stops_the_command(run: SupervisedRun, name: str) -> None:
    process = run.start("trap 'exit 75' TERM; echo ready; while true; do sleep 0.1; done")
    os.kill(run.pid("supervisor"), number_of(name))
    assert process.wait(TIMEOUT) == 75
    record = read_json(Path(run.files.record).with_name(f"signal_n1_SIG{name}.json"))
    assert (record["signal"], record["sender"]) == (f"SIG{name}", "to the supervisor on n1")
    assert not run.remaining()


HANDLES = "import signal, time; signal.signal(signal.SIGUSR1, print); print('ready'); time.sleep(300)"
CHILD = shlex.join([sys.executable, "-u", "-c", HANDLES])
FORKS = """
import os, signal, time
signal.signal(signal.SIGUSR1, lambda *_: print("got it"))
if os.fork():
    print("ready")
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize("child", [CHILD, f"setsid --fork {CHILD}", f"env -u TORCHELASTIC_RUN_ID {CHILD}"])
def test_a_signal_stops_a_rank_without_a_handler_even_if_a_child_process_of_the_rank_has_one(
    run: SupervisedRun, child: str
) -> None:
    rank = f"trap 'exit 75' TERM; {child} & while true; do sleep 0.1; done"
    agent = f"trap '' USR1; TORCHELASTIC_RUN_ID=1 setsid env --default-signal=USR1 bash -c {shlex.quote(rank)} & "
    process = run.start(f'{agent} trap "kill $!; wait $!; exit" TERM; wait')
    os.kill(run.pid("supervisor"), signal.SIGUSR1)
    assert process.wait(TIMEOUT) == 75
    assert "no process has a handler for it; stopping" in run.log


@pytest.mark.parametrize("agent", ["exec {}", "TORCHELASTIC_RUN_ID=1 setsid {} & wait"], ids=["no agent", "agent"])
def test_a_handler_that_a_child_has_inherited_runs_once(run: SupervisedRun, agent: str) -> None:
    process = run.start(agent.format(shlex.join([sys.executable, "-u", "-c", FORKS])))
    os.kill(run.pid("supervisor"), signal.SIGUSR1)
    wait_until(lambda: "got it" in run.log)
    time.sleep(0.5)  # a second call would be logged in this time
    run.control.write(b"stop\n")
    assert process.wait(TIMEOUT) == 143
    assert run.log.count("got it") == 1


LINES = 'for i in $(seq 20000); do echo "[n1:0] line $i"; echo "agent $i" >&2; done; echo ready'


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("how", ["closed before", "closed meanwhile", "full"])
def test_a_broken_console_changes_neither_log_nor_exit_code(run: SupervisedRun, stream: str, how: str) -> None:
    popen: dict[str, Any]
    if how == "full":
        with open("/dev/full", "wb") as full:
            popen = {stream: full}
            process = run.start(LINES, **popen)
    elif how == "closed before":
        process = run.start(LINES, preexec_fn=lambda: os.close(1 if stream == "stdout" else 2))
    else:
        source, target = os.pipe()
        os.close(source)
        popen = {stream: target}
        process = run.start(LINES, **popen)
        os.close(target)
    assert process.wait(TIMEOUT) == 0
    assert run.log.count("\n") == 40001


def test_a_blocked_console_delays_neither_requests_nor_the_log(run: SupervisedRun) -> None:
    source, target = os.pipe()
    process = run.start(f"{LINES}; sleep 300", stdout=target, stderr=target)
    wait_until(lambda: "ready" in run.log)
    run.control.write(b"kill\n")
    wait_until(lambda: run.code is not None)
    run.control.write(b"kill\n")
    assert process.wait(TIMEOUT) == 137
    os.close(source)
    os.close(target)


def test_the_console_shows_the_output_of_rank_0_and_the_output_without_a_rank_prefix(run: SupervisedRun) -> None:
    process = run.start(
        "echo '[n1:0] loss 1'; echo '[n1:1] loss 2'; echo '[n1:10] x'; echo plain; printf '[n1:0] no end'",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.communicate(timeout=TIMEOUT) == (b"loss 1\nno end\n", b"plain\n")
    assert run.log == "[n1:0] loss 1\n[n1:1] loss 2\n[n1:10] x\nplain\n[n1:0] no end\n"


MIXED = """
for i in $(seq 500); do
  printf '[n1:0] result %s' $i; printf '[n1:0] warning %s' $i >&2; printf '\\n'; printf '\\n' >&2
done
echo '[n1:1] other' >&2; printf '[n1:0] traceback' >&2
"""


def test_the_console_keeps_both_streams_of_rank_0_apart_and_the_log_has_whole_lines_of_each(run: SupervisedRun) -> None:
    process = run.start(MIXED, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = process.communicate(timeout=TIMEOUT)
    assert output.decode() == "".join(f"result {i}\n" for i in range(1, 501))
    assert errors.decode() == "".join(f"warning {i}\n" for i in range(1, 501)) + "traceback\n"
    for stream, last in (("result", 500), ("warning", 500)):
        lines = [line for line in run.log.splitlines() if stream in line]
        assert lines == [f"[n1:0] {stream} {i}" for i in range(1, last + 1)]
    assert run.log.count("\n") == 1002
    assert run.log.splitlines()[-1] == "[n1:0] traceback"


def test_a_blocked_standard_output_delays_no_message_on_standard_error(run: SupervisedRun, tmp_path: Path) -> None:
    """This happens in `launcher | less`, when a rank fails."""
    source, target = os.pipe()
    script = f"yes '[n1:0] line' & echo ready >&2; until [[ -e '{tmp_path}/go' ]]; do sleep 0.1; done; echo failed >&2"
    process = run.start(f"{script}; sleep 300", stdout=target, stderr=subprocess.PIPE)
    assert process.stderr
    assert process.stderr.readline() == b"ready\n"
    wait_until(lambda: os.path.getsize(run.files.log) > console_stream.BACKLOG)
    (tmp_path / "go").touch()
    assert select.select([process.stderr], [], [], TIMEOUT)[0]
    assert process.stderr.readline() == b"failed\n"
    run.control.write(b"kill\n")
    wait_until(lambda: run.code is not None)
    run.control.write(b"kill\n")
    assert process.wait(TIMEOUT) == 137
    process.stderr.close()
    os.close(source)
    os.close(target)


def test_a_line_without_an_end_is_cut_and_takes_little_memory(run: SupervisedRun) -> None:
    script = "head -c 200M /dev/zero | tr '\\0' x; echo; echo ready; sleep 300"
    run.start(script)
    marked = f"[{(200 << 20) - (1 << 20)} bytes of this line are left out]"
    assert run.log == "x" * (1 << 20) + f" {marked}\nready\n"
    assert peak_memory(run.pid("supervisor")) < 60


def peak_memory(pid: int) -> float:
    """In MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def test_without_a_console_the_log_gets_the_bytes_of_both_streams_in_order_and_immediately(run: SupervisedRun) -> None:
    script = "for i in $(seq 200); do echo out $i; echo err $i >&2; done; echo ready; printf '\\r10%%'; sleep 300"
    run.start(script, "--lease", "0")
    lines = [f"{stream} {i}\n" for i in range(1, 201) for stream in ("out", "err")]
    wait_until(lambda: "10%" in run.log)
    assert Path(run.files.log).read_bytes().decode() == "".join(lines) + "ready\n\r10%"


# ---------------------------------------------------------------- environment


def test_environment_values_reach_the_command_but_no_command_line_or_file(run: SupervisedRun, tmp_path: Path) -> None:
    env = tmp_path / "node_env.sh"
    env.write_text("export SECRET=of-node-env; SEEN=$OTHER\n")
    block = b"SECRET=s3cr3t 1\nline 2\0OTHER=o\0\0"
    run.start('printf "%s|" "$SECRET" "$OTHER"; echo ready; sleep 300', "--source", str(env), block=block)
    assert "s3cr3t 1\nline 2|o|ready" in run.log
    command_lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has exited
            command_lines.append(path.read_bytes())
    assert not [line for line in command_lines if b"s3cr3t" in line]
    assert not [path for path in Path(run.files.directory).glob("*.pid") if "s3cr3t" in path.read_text()]


@pytest.mark.parametrize("node_env", ["exec true", "trap : EXIT; exit 0"])
def test_the_exit_code_is_69_if_node_env_exits_or_replaces_the_shell(
    run: SupervisedRun, tmp_path: Path, node_env: str
) -> None:
    env = tmp_path / "node_env.sh"
    env.write_text(node_env)
    run.start("echo ready", "--source", str(env), block=b"\0")
    wait_until(lambda: run.code is not None)
    assert run.code == 69
    message = "exited with code 0, so nothing was started; it is sourced and must neither exit nor exec a command"
    assert run.log == f"n1: {env}: {message}\n"


@pytest.mark.parametrize("block", [b"\0", b"MUSTER_METRICS=/out/metrics.jsonl\0\0"], ids=["of a run", "of a job"])
def test_the_command_gets_the_path_of_its_metrics(
    run: SupervisedRun, monkeypatch: pytest.MonkeyPatch, block: bytes
) -> None:
    monkeypatch.setenv("MUSTER_METRICS", "/of/another/launch")
    run.start("echo ready $MUSTER_METRICS", block=block)
    expected = f"{run.files.directory}/metrics.jsonl" if block == b"\0" else "/out/metrics.jsonl"
    assert run.log == f"ready {expected}\n"


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        ("", [{"step": 7, "loss": 2.5}]),
        (r"done (?P<step>\d+)", [{"step": 12}]),
        ("off", []),
    ],
)
def test_metrics_are_read_in_the_output_of_rank_0(
    run: SupervisedRun, progress: str, expected: list[dict[str, float]]
) -> None:
    lines = r"[n1:0] step 7 loss 2.5\n[n1:1] step 9 loss 1.0\n[n1:0] done 12\n[n1:1] done 13\nready\n"
    run.start(f"printf '{lines}'", block=f"MUSTER_PROGRESS={progress}\0\0".encode())
    wait_until(lambda: run.code is not None)
    path = Path(run.files.directory) / FROM_OUTPUT
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert [{name: line[name] for name in line if name != "time"} for line in found] == expected


def test_an_environment_file_is_removed_after_reading(run: SupervisedRun, tmp_path: Path) -> None:
    file = tmp_path / "block"
    file.write_bytes(b"A=0\0B=1\0\0A=1\0\0")
    run.start("echo $A $B ready", "--environment", str(file))
    assert run.log == "1 1 ready\n"
    assert not file.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_an_environment_file_of_another_user_or_beside_his_run_directory_is_not_used(
    run: SupervisedRun, tmp_path: Path
) -> None:
    (file := tmp_path / "block").write_bytes(b"\0A=1\0\0")
    command = run.command("run", "--environment", str(file), "--", "touch", str(tmp_path / "started"))
    os.makedirs(run.files.directory, exist_ok=True)
    for path, expected in ((run.files.directory, run.files.directory), (file, f"--environment '{file}': {file}")):
        os.chown(path, 65534, 65534)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, f"{expected}: belongs to nobody" in done.stderr) == (69, True)
        assert file.exists() == (path != file)  # not even read
        os.chown(path, 0, 0) if file.exists() else None
    assert not (tmp_path / "started").exists()


def test_an_incomplete_environment_block_starts_nothing(run: SupervisedRun) -> None:
    command = run.command("run", "--environment", "-", "--", "true")
    done = subprocess.run(command, input=b"\0A=1\0", capture_output=True, check=False)
    assert done.returncode == 69
    assert b"environment block incomplete" in done.stderr
    assert not os.path.exists(run.files.pids)


@pytest.mark.parametrize(
    ("received", "block", "rest"),
    [
        (b"\0stop\n", b"", b"stop\n"),
        (b"A=1\0\0", b"A=1\0", b""),
        (b"A=1\0B=\n\0\0kill\n\n", b"A=1\0B=\n\0", b"kill\n\n"),
    ],
)
def test_an_environment_block_ends_with_an_empty_entry(received: bytes, block: bytes, rest: bytes) -> None:
    source, target = os.pipe()
    os.write(target, received)
    assert read_block(source) == (block, rest)
    os.close(source)
    os.close(target)


# ---------------------------------------------------------------- detached


def test_a_detached_command_outlives_its_caller_and_can_be_stopped(run: SupervisedRun) -> None:
    assert run.state["state"] == "absent"
    script = "echo $A; trap 'exit 7' TERM; echo ready; while true; do sleep 0.1; done"
    command = run.command("run", "--lease", "0", "--environment", "-", "--", "bash", "-c", script)
    # If the command inherited the pipes, this would wait until it exits.
    done = subprocess.run(command, input=b"A=1\0\0\0", capture_output=True, timeout=TIMEOUT, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")
    wait_until(lambda: run.log == "1\nready\n")
    state = run.state
    assert state["state"] == "running"
    assert abs(time.time() - state["heartbeat"]) < TIMEOUT
    assert os.getsid(state["supervisor"]["pid"]) == state["supervisor"]["pid"]
    run.call("stop")
    wait_until(lambda: run.code is not None)
    assert run.state["state"] == "ended"
    assert run.state["exit_code"] == 7


def test_a_detached_command_that_cannot_be_started_is_reported(run: SupervisedRun, tmp_path: Path) -> None:
    Path(run.files.directory).mkdir()
    Path(run.files.log).mkdir()  # cannot be written, as on a full disk
    done = subprocess.run(run.command("run", "--lease", "0", "--", "true"), capture_output=True, text=True, check=False)
    assert done.returncode == 69
    assert "the command was not started: " in done.stderr
    assert "Is a directory" in done.stderr


def test_a_killed_detached_supervisor_leaves_an_exit_code_and_no_process(run: SupervisedRun) -> None:
    command = run.command("run", "--lease", "0", "--", "bash", "-c", WITH_CHILDREN)
    subprocess.run(command, stdin=subprocess.DEVNULL, timeout=TIMEOUT, check=True)
    wait_until(lambda: "ready" in run.log)
    kill(run.pid("supervisor"))
    wait_until(lambda: run.code == 137)
    assert not run.remaining()


def detach(run: SupervisedRun, *command: str, options: tuple[str, ...] = ()) -> None:
    """Run a detached command and wait until it has exited."""
    call = run.command("run", "--lease", "0", *options, "--", *command)
    subprocess.run(call, stdin=subprocess.DEVNULL, timeout=TIMEOUT, check=True)
    wait_until(lambda: run.code is not None)


ALLOCATE = f"'{sys.executable}' -I -S -c 'x = bytearray(200 << 20)'"  # uses 200 MiB


@pytest.mark.parametrize(
    "script", [f"exec {ALLOCATE}", f"{ALLOCATE}; true", f"{ALLOCATE} & wait", f"({ALLOCATE}); exit 3"]
)
def test_the_times_and_peak_memory_of_a_detached_command_are_recorded(run: SupervisedRun, script: str) -> None:
    before = time.time()
    detach(run, "bash", "-c", script)
    usage: dict[str, Any] = read_json(run.files.usage)
    assert sorted(usage) == ["ended", "peak_memory", "started"]
    assert before <= usage["started"] <= usage["ended"] <= time.time()
    assert 200 << 20 <= usage["peak_memory"] < 300 << 20  # bytes


def test_the_peak_memory_of_a_small_command_is_small(run: SupervisedRun) -> None:
    detach(run, "true")
    peak = read_json(run.files.usage)["peak_memory"]
    assert isinstance(peak, int)
    assert 100_000 < peak < 100 << 20


# ---------------------------------------------------------------- timeout


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("trap 'exit 75' TERM; echo ready; while true; do sleep 0.1; done", 75),
        ("echo ready; sleep 300", 143),
        ("trap 'exit 0' TERM; echo ready; while true; do sleep 0.1; done", 0),
        (IGNORES_TERM, 137),
        (WITH_CHILDREN, 143),
    ],
    ids=["saves", "sleeps", "succeeds", "ignores SIGTERM", "with children"],
)
def test_a_command_that_exceeds_its_timeout_is_stopped_and_the_cause_is_recorded(
    run: SupervisedRun, script: str, code: int
) -> None:
    process = run.start(script, "--timeout", "1", "--grace", "1")
    assert process.wait(TIMEOUT) == code
    assert not run.remaining()
    record = read_json(run.files.record)
    assert (record["cause"], record["message"]) == ("timeout", "the command has run for 1 s (--timeout)")
    assert "supervisor: the command has run for 1 s (--timeout); stopping\n" in run.log


def test_a_detached_command_that_exceeds_its_timeout_is_stopped(run: SupervisedRun) -> None:
    detach(run, "sleep", "300", options=("--timeout", "1"))
    assert run.code == 143
    assert read_json(run.files.record)["cause"] == "timeout"
    usage: dict[str, Any] = read_json(run.files.usage)
    assert 0.9 < usage["ended"] - usage["started"] < TIMEOUT


def test_leftover_processes_do_not_count_for_the_timeout(run: SupervisedRun) -> None:
    process = run.start("(trap '' TERM; sleep 300) & echo ready; sleep 0.5", "--timeout", "1")
    assert process.wait(TIMEOUT) == 0
    assert not run.remaining()
    assert not os.path.exists(run.files.record)


def test_a_timeout_after_a_stop_request_is_not_recorded(run: SupervisedRun) -> None:
    process = run.start("trap 'sleep 1.5; exit 7' TERM; echo ready; while true; do sleep 0.1; done", "--timeout", "1")
    run.control.write(b"stop\n")
    assert process.wait(TIMEOUT) == 7
    assert not os.path.exists(run.files.record)


def test_the_cause_is_recorded_even_if_the_errors_directory_does_not_exist(run: SupervisedRun) -> None:
    os.makedirs(run.files.directory)
    arguments = ["--dir", run.files.directory, "--name", "n1", "--grace", "8", "--timeout", "1", "--lease", "0"]
    options = SupervisorOptions([*arguments, "--", "sleep", "300"])
    if (pid := os.fork()) == 0:  # as the server of a job list does
        os._exit(supervisor.supervise(options, b"", b"") != 128 + signal.SIGTERM)
    assert os.waitpid(pid, 0)[1] == 0
    assert read_json(run.files.record)["cause"] == "timeout"


# ---------------------------------------------------------------- sweep


def test_sweep_respects_the_grace_time_and_leaves_other_processes_alone(run: SupervisedRun) -> None:
    bystander = subprocess.Popen(["sleep", "300"])
    process = run.start("trap 'echo saved; exit 75' TERM; echo ready; while true; do sleep 0.1; done")
    run.call("sweep", "--grace", "8")
    assert process.wait(TIMEOUT) == 75
    assert "saved" in run.log
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_sweep_continues_a_supervisor_stopped_by_sigstop(run: SupervisedRun) -> None:
    process = run.start(WITH_CHILDREN)
    os.kill(process.pid, signal.SIGSTOP)
    run.call("sweep", "--grace", "8")
    assert not run.remaining()
    assert process.wait(TIMEOUT) == 143


# ---------------------------------------------------------------- progress bars and wrong calls

BAR = (
    b"[n1:0]  10%\r\n[n1:1] other\n[n1:0]  20%\r\n[n1:0] 100%\n[n1:0] loss 2\n[n1:0]  30%\r\nnode line\n[n1:0] 40%\r\n"
)


def test_the_log_has_no_overwritten_updates_of_a_progress_bar(run: SupervisedRun) -> None:
    printed = BAR.decode().replace("\r", "\\r").replace("\n", "\\n").replace("%", "%%")
    process = run.start(f"printf '{printed}ready\\n'; printf 'raw\\r\\n'")
    process.wait(TIMEOUT)
    assert Path(run.files.log).read_bytes() == (b"[n1:1] other\n[n1:0] 100%\n[n1:0] loss 2\nnode line\nready\nraw\r\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--dir and --name are required"),
        (["--dir", "d", "--name"], "--name: needs a value"),
        (["--dir", "d", "--name", "a/b"], "--name: expected a name without a slash, got 'a/b'"),
        (["--dir", "d", "--name", "n", "--grace", "-1"], "--grace: expected a whole number of seconds, got '-1'"),
        (["--dir", "d", "--name", "n", "--timeout", "1.5"], "--timeout: expected a whole number of seconds, got '1.5'"),
        (["--dir", "d", "--name", "n", "--timeout"], "--timeout: needs a value"),
        (["--dir", "d", "--name", "n", "--source", "/nix"], "--source '/nix': cannot read file"),
        (["--bad"], "--bad: unknown option"),
    ],
)
def test_a_wrong_call_names_the_option_and_the_value(arguments: list[str], message: str) -> None:
    with pytest.raises(SupervisorError) as refused:
        SupervisorOptions(arguments)
    assert refused.value.args == (2, message)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_request_of_another_user_who_has_replaced_the_run_directory_is_ignored(tmp_path: Path) -> None:
    files = Files(str(tmp_path), "n1")
    assert node_requests.request(files, "stop") == 0 and not Path(files.request).exists()
    Path(files.request).write_text('attempt {"environment": {"LD_PRELOAD": "/tmp/evil.so"}}\n')
    assert supervisor._requested(files).startswith(b"attempt ")
    os.chown(files.request, 65534, 65534)
    assert supervisor._requested(files) == b""
