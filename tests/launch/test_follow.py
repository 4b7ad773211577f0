"""launch.follow shows the output of a command with --lease 0, passes requests on, and reports how the command ended."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from test_supervisor import SUPERVISOR, TIMEOUT, WITH_CHILDREN, SupervisedRun, kill, run, wait_until

from distributed.launch.node_reports import REPORT, parse_report

__all__ = ["run"]  # a fixture

WAITS = "trap 'exit 7' TERM; trap 'echo \"[n1:0] got USR1\"' USR1; echo '[n1:0] ready'; while true; do sleep 0.1; done"


def follow(run: SupervisedRun, *options: str) -> list[str]:
    return [*SUPERVISOR[:-1], "launch.follow", "--dir", run.files.directory, "--name", "n1", *options]


def start(run: SupervisedRun, script: str) -> None:
    """Start a command with a follower that exits at once, and wait until the command has printed "ready"."""
    command = follow(run, "--sample-usage", "--", "bash", "-c", script)
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=TIMEOUT, check=True)
    wait_until(lambda: "ready" in run.log)


def read_report(follower: Any) -> dict[str, Any]:
    report = parse_report(follower.stdout.readline().removeprefix(REPORT))
    assert abs(report.pop("time") - time.time()) < TIMEOUT
    return report


@contextmanager
def following(run: SupervisedRun, *options: str) -> Iterator[Any]:
    command = follow(run, "--report", *options)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as follower:
        assert read_report(follower) == {"node": "n1", "following": True}
        yield follower


@pytest.mark.parametrize(("request_", "code"), [(b"stop\n", 7), (b"kill\n", 137)])
def test_output_after_an_offset_is_shown_and_a_stop_request_is_passed_on(
    run: SupervisedRun, request_: bytes, code: int
) -> None:
    start(run, WAITS)
    with following(run, "--offset", "0") as follower:
        assert follower.stdout.readline() == b"ready\n"
        follower.stdin.write(request_)
        assert read_report(follower) == {"node": "n1", "exit_code": code}
        assert follower.wait(TIMEOUT) == code
    assert run.code == code


def test_a_signal_is_passed_on_and_old_output_is_not_shown(run: SupervisedRun) -> None:
    start(run, WAITS)
    with following(run) as follower:
        follower.stdin.write(b"\nsignal 10\n")
        assert follower.stdout.readline() == b"got USR1\n"


def test_the_command_continues_when_a_follower_loses_its_launcher(run: SupervisedRun) -> None:
    start(run, WAITS)
    with following(run) as follower:
        follower.stdin.close()
        assert follower.wait(TIMEOUT) == 0
        assert follower.stdout.read() == b""
    assert run.state["state"] == "running"
    kill(run.pid("supervisor"))
    wait_until(lambda: run.code == 137)
    with following(run) as follower:
        assert follower.wait(TIMEOUT) == 137


def test_if_the_supervisor_was_killed_its_processes_are_ended_and_exit_code_137_is_reported(run: SupervisedRun) -> None:
    start(run, WITH_CHILDREN)
    kill(run.pid("guard"), run.pid("supervisor"))
    with following(run) as follower:
        assert read_report(follower) == {"node": "n1", "exit_code": 137}
        assert follower.wait(TIMEOUT) == 137
    assert not run.remaining()


def test_a_run_that_does_not_exist_is_reported(run: SupervisedRun) -> None:
    done = subprocess.run(follow(run), stdin=subprocess.PIPE, capture_output=True, text=True, check=False)
    assert done.returncode == 69
    assert done.stderr.endswith(": no command was started\n")
    done = subprocess.run(follow(run, "--offset", "x"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("supervisor: --offset: expected a number of bytes, got 'x'\n")
