"""A supervisor whose command keeps running between attempts reports the end of each attempt, and leaves no process.

The processes are real. The command is a shell that speaks the protocol of agents (launch/node_reports.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from distributed import attempts
from distributed.agent.attempt import AttemptPipes
from distributed.files import read_json
from distributed.host import process_scan
from distributed.launch import node_files
from distributed.launch.node_files import Files
from distributed.launch.node_reports import ATTEMPT_PIPES, ReportParser
from distributed.metrics import FROM_OUTPUT

KIT = Path(__file__).resolve().parents[2]
SUPERVISOR = [sys.executable, "-I", "-S", str(KIT / "scripts/lib/module.py"), "launch.supervisor"]
TIMEOUT = 60.0  # seconds for events that take milliseconds on an idle machine
# This agent ends each attempt with the exit code in the file "code", and prints the facts of the next attempt. SIGTERM
# ends an attempt with 143, and is ignored between attempts.
AGENT = r"""
read -r out in _ <<<"${MUSTER_ATTEMPT_PIPES//:*([0-9])/}"
while true; do
  trap 'echo stopped; echo 143 >code' TERM
  echo "attempt $((++n))"
  until [ -e code ]; do sleep 0.02; done
  trap '' TERM
  code=$(<code) && rm code
  echo "ends with $code"
  echo "$code" >&"$out"
  facts=
  until [ "$facts" ]; do IFS= read -r -u "$in" facts || exit "${code%% *}"; done
  echo "got $facts"
done
"""


PRINTS_A_STEP = AGENT.replace('echo "attempt', 'echo "[n1:0] step $((5 * (n + 1))) loss 1.0"; echo "attempt')


class Supervised:
    """A supervisor, started as a launcher does, and its reports."""

    def __init__(self, directory: Path, *options: str, command: str = AGENT) -> None:
        self.directory, self.files = directory, Files(str(directory / "run"), "n1")
        self.attempt = len(attempts.numbers(self.files.directory)) + 1
        self.files.use(attempts.path_of(self.files.directory, str(self.attempt)))
        call = [*SUPERVISOR, "run", "--dir", self.files.directory, "--name", "n1", "--attempt", str(self.attempt)]
        call += ["--report", "--restarts", *options]
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [*call, "--", "bash", "-O", "extglob", "-c", command],
            cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
        )  # fmt: skip
        assert self.process.stdout
        os.set_blocking(self.process.stdout.fileno(), False)
        self._parser = ReportParser()
        self.reports: list[dict[str, Any]] = []

    @property
    def control(self) -> IO[bytes]:
        assert self.process.stdin
        return self.process.stdin

    def request(self, line: str) -> None:
        self.control.write(f"{line}\n".encode())

    def call(self, *request: str) -> None:
        """Send a request through the request file."""
        subprocess.run([*SUPERVISOR, *request, "--dir", self.files.directory, "--name", "n1"], check=True)

    def end_attempt(self, code: str) -> None:
        part = self.directory / "code.part"
        part.write_text(f"{code}\n")
        part.rename(self.directory / "code")

    def report(self) -> dict[str, Any]:
        """Wait for the next report."""
        wait_until(self._read)
        return self.reports.pop(0)

    def _read(self) -> list[dict[str, Any]]:
        assert self.process.stdout
        for item in self._parser.feed(self.process.stdout.read() or b""):
            if isinstance(item, dict):
                del item["time"]
                self.reports += [item] if item != {"node": "n1"} else []  # the first report: the supervisor has started
        return self.reports

    @property
    def log(self) -> str:
        return Path(self.files.log).read_text() if os.path.exists(self.files.log) else ""

    def pid(self, name: str) -> int:
        return int(read_json(self.files.pids)[name]["pid"])  # type: ignore[index]

    def remaining(self) -> list[int]:
        return process_scan.live_processes(self.files.environment)


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    started: list[Supervised] = []

    def start_one(*options: str, command: str = AGENT) -> Supervised:
        started.append(Supervised(tmp_path, *options, command=command))
        wait_until(lambda: "attempt 1" in started[-1].log)
        return started[-1]

    yield start_one
    for run in started:
        subprocess.run([*SUPERVISOR, "sweep", "--dir", run.files.directory, "--name", "n1"], check=True)
        run.control.close()
        run.process.wait(TIMEOUT)
        assert run.process.stdout
        run.process.stdout.close()


def start_next_attempt(run: Supervised, **facts: str) -> None:
    run.request(f"attempt {json.dumps({'attempt': '2'} | facts)}")
    run.files.use(attempts.path_of(run.files.directory, "2"))
    wait_until(lambda: "attempt 2" in run.log)


def test_the_command_runs_the_next_attempt_with_new_files(start: Callable[..., Supervised]) -> None:
    run = start()
    agent = run.pid("command")
    run.end_attempt("3 node9")
    assert run.report() == {"node": "n1", "exit_code": 3, "waiting": True, "lost": "node9"}
    assert node_files.read_code(run.files.exit) == 3
    earlier = Path(run.files.log)
    start_next_attempt(run, a="1")
    assert (run.log.splitlines()[0], run.pid("command")) == ('got {"attempt": "2", "a": "1"}', agent)
    assert earlier.read_text().endswith("ends with 3 node9\n")
    assert not os.path.exists(run.files.exit)
    assert os.path.samefile(run.directory / "run/errors", os.path.dirname(run.files.record))
    run.end_attempt("4")
    assert run.report() == {"node": "n1", "exit_code": 4, "waiting": True}
    run.request("end")
    assert run.report() == {"node": "n1", "exit_code": 4}
    assert (run.process.wait(TIMEOUT), node_files.read_code(run.files.exit)) == (4, 4)
    assert not run.remaining()


def test_the_newest_step_in_the_output_of_an_attempt_is_recorded_before_its_end_is_reported(
    start: Callable[..., Supervised],
) -> None:
    run = start(command=PRINTS_A_STEP)
    for count in (1, 2):
        run.end_attempt("3")
        run.report()
        lines = (run.directory / "run" / FROM_OUTPUT).read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [5, 10][:count]
        if count == 1:
            start_next_attempt(run)


def test_processes_of_an_attempt_end_before_it_is_reported(start: Callable[..., Supervised]) -> None:
    leftover = "(setsid sleep 300 &) ; (trap '' TERM; setsid sleep 300 &); "
    run = start(command=leftover + AGENT)
    wait_until(lambda: len(run.remaining()) >= 3)
    run.end_attempt("3")
    run.report()
    alive = [pid for pid in run.remaining() if Path(f"/proc/{pid}/comm").read_text() == "sleep\n"]
    assert not [pid for pid in alive if "300" in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.mark.parametrize("how", ["stop", "kill", "end", "the launcher exits", "SIGTERM"])
def test_a_command_that_waits_for_the_next_attempt_ends_when_it_is_stopped_or_the_launcher_exits(
    start: Callable[..., Supervised], how: str
) -> None:
    run = start()
    run.end_attempt("3")
    assert run.report()["waiting"]
    if how == "the launcher exits":
        run.control.close()
    elif how == "SIGTERM":
        run.process.send_signal(signal.SIGTERM)
    elif how == "kill":  # ignored on the control channel after the end of the attempt
        run.request("kill")
        run.call("kill")
    else:
        run.request(how)
    assert run.process.wait(TIMEOUT) == 3
    assert not run.remaining()
    assert not os.path.exists(run.files.record)  # nothing failed


def test_a_command_that_was_killed_is_not_reported_as_waiting(start: Callable[..., Supervised]) -> None:
    run = start()
    run.end_attempt("3")
    run.report()
    os.kill(run.pid("command"), signal.SIGKILL)
    assert run.report() == {"node": "n1", "exit_code": 3}
    assert run.process.wait(TIMEOUT) == 3


def test_a_command_that_is_killed_in_its_second_attempt_has_exit_code_137(start: Callable[..., Supervised]) -> None:
    run = start()
    run.end_attempt("3")
    run.report()
    start_next_attempt(run)
    os.kill(run.pid("command"), signal.SIGKILL)
    assert run.report() == {"node": "n1", "exit_code": 137}
    assert (run.process.wait(TIMEOUT), node_files.read_code(run.files.exit)) == (137, 137)


def test_a_fail_request_ends_only_its_attempt_and_not_the_command(start: Callable[..., Supervised]) -> None:
    run = start("--grace", "60")
    run.request("fail")
    assert run.report() == {"node": "n1", "exit_code": 143, "waiting": True}
    run.request("fail")  # arrives after the end of the attempt
    start_next_attempt(run)
    run.end_attempt("5")
    assert run.report()["exit_code"] == 5


def test_the_ranks_are_killed_before_a_command_that_cannot_stop_them(start: Callable[..., Supervised]) -> None:
    rank = "setsid bash -c \"trap '' TERM; echo rank; while true; do sleep 0.1; done\" & rank=$!; "
    run = start("--grace", "60", command=rank + AGENT.replace("echo stopped;", "wait $rank;"))
    wait_until(lambda: "rank" in run.log)
    run.request("fail")
    assert run.report() == {"node": "n1", "exit_code": 143, "waiting": True}


def test_a_signal_does_not_end_a_command_that_waits_for_the_next_attempt(start: Callable[..., Supervised]) -> None:
    run = start()
    run.end_attempt("3")
    run.report()
    run.request(f"signal {signal.SIGUSR1.value}")
    start_next_attempt(run)


def test_processes_of_the_second_attempt_end_when_the_command_is_killed(start: Callable[..., Supervised]) -> None:
    run = start(command="setsid sleep 300 & " + AGENT.replace('echo "got', 'setsid sleep 301 & echo "got'))
    run.end_attempt("3")
    run.report()
    start_next_attempt(run)
    os.kill(run.pid("command"), signal.SIGKILL)
    assert run.report() == {"node": "n1", "exit_code": 137}
    assert not run.remaining()


def test_an_unfinished_line_is_in_the_log_of_its_attempt(start: Callable[..., Supervised]) -> None:
    run = start(command=AGENT.replace('echo "ends with $code"', 'printf "unfinished $code"'))
    run.end_attempt("3")
    run.report()
    wait_until(lambda: "unfinished 3" in run.log)


def test_a_command_that_does_not_end_its_attempt_after_fail_is_killed(start: Callable[..., Supervised]) -> None:
    run = start("--grace", "1", command="trap '' TERM; echo attempt 1; while true; do sleep 0.1; done")
    run.request("fail")
    assert run.report() == {"node": "n1", "exit_code": 137}
    assert read_json(run.files.record)["cause"] == "unresponsive"


def test_the_processes_of_an_attempt_whose_connection_was_lost_end_before_the_next_one_starts(
    start: Callable[..., Supervised],
) -> None:
    old = start()
    old.end_attempt("3")
    assert old.report()["waiting"]
    command = old.pid("command")
    os.kill(old.process.pid, signal.SIGSTOP)  # the old supervisor cannot notice that its connection is lost
    run = start()
    assert run.pid("command") != command
    found = process_scan.process(command)
    assert found is None or not found.alive
    os.kill(old.process.pid, signal.SIGCONT)
    assert old.process.wait(TIMEOUT) == 3
    run.end_attempt("4")
    assert run.report() == {"node": "n1", "exit_code": 4, "waiting": True}


def test_a_node_that_is_cut_off_writes_no_file_of_the_next_attempt(start: Callable[..., Supervised]) -> None:
    """The node may share the run directory with nodes that run the next attempt."""
    run = start()
    following = Path(attempts.make(run.files.directory, "2"))
    run.control.close()
    run.process.wait(TIMEOUT)
    assert "control channel closed" in run.log and os.path.exists(run.files.exit)
    assert not [path for path in following.rglob("*") if path.is_file()]


@pytest.mark.parametrize("killed", ["supervisor", "guard"])
def test_the_end_of_a_killed_supervisor_is_recorded_in_its_attempt(
    start: Callable[..., Supervised], killed: str
) -> None:
    run = start()
    run.end_attempt("3")
    run.report()
    first = Path(run.files.exit)
    start_next_attempt(run)
    if killed == "guard":  # the next guard must know the attempt, too
        guard = run.pid("guard")
        os.kill(guard, signal.SIGKILL)
        wait_until(lambda: run.pid("guard") != guard)
    os.kill(run.process.pid, signal.SIGKILL)
    wait_until(lambda: node_files.read_code(run.files.exit) == 137)
    assert node_files.read_code(str(first)) == 3


def test_after_a_stop_request_the_command_exits(start: Callable[..., Supervised]) -> None:
    run = start("--grace", "60")
    run.request("stop")
    assert run.report() == {"node": "n1", "exit_code": 143}
    assert run.process.wait(TIMEOUT) == 143


def test_requests_through_the_file_act_as_those_on_the_control_channel(start: Callable[..., Supervised]) -> None:
    run = start()

    run.call("fail")
    assert run.report()["exit_code"] == 143
    run.call("attempt", json.dumps({"attempt": "2", "a": "b c"}))
    run.files.use(attempts.path_of(run.files.directory, "2"))
    wait_until(lambda: '"a": "b c"}' in run.log)
    assert not os.path.exists(run.files.request)
    run.call("end")
    run.end_attempt("6")
    assert run.report() == {"node": "n1", "exit_code": 6}


def test_the_command_of_a_spare_node_waits_without_an_exit_code(start: Callable[..., Supervised]) -> None:
    run = start(command=AGENT.replace("until [ -e code ]", "[ $n -gt 1 ] || echo >code; until [ -e code ]"))
    assert run.report() == {"node": "n1", "exit_code": 0, "waiting": True}
    assert not os.path.exists(run.files.exit)
    start_next_attempt(run)
    run.end_attempt("3")
    assert run.report() == {"node": "n1", "exit_code": 3, "waiting": True}


def test_an_agent_ignores_pipes_that_another_program_has_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = os.pipe()
    inode = os.fstat(source).st_ino
    for end in ("", " restarts", " restarts signals"):
        monkeypatch.setenv(ATTEMPT_PIPES, f"{target}:{inode} {source}:{inode}{end}")
        pipes = AttemptPipes.take()
        assert pipes and pipes.restarts == bool(end)
        assert ATTEMPT_PIPES not in os.environ
    for value in (f"{target}:{inode + 1} {source}:{inode}", "x", f"{target} {source}", f"9999:{inode} 9998:{inode}"):
        monkeypatch.setenv(ATTEMPT_PIPES, value)
        assert AttemptPipes.take() is None
    os.close(source)
    os.close(target)
