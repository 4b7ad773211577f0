"""--notify: the command gets each event as JSON, delays nothing, and a failed call is one line of a log.

launch_singlenode.bats tests the events of a run that restarts and ends, test_jobs_again.py the events of a job list.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_watch import Scripts

from distributed.host import process_scan
from distributed.launch import notify
from distributed.launch.hang_check import HangCheck
from distributed.launch.hang_decision import RECOVERED, HangWatch, Wait
from distributed.launch.notify import Notifier
from distributed.launch.watch import Watch
from distributed.runs.lookup import RunNode, read
from distributed.runs.run_directory import create


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(
        create(
            str(tmp_path / "logs"), "train", nodes=[RunNode("n1", "", 1, 0), RunNode("n2", "", 1, 1)],
            script="train.py", config=None, cwd="/", python="python3", command=["x"], launcher=os.getpid(),
        )
    )  # fmt: skip


def notices(directory: Path) -> list[dict[str, Any]]:
    """What the command `cat >note.$$` has received, in the order of the events."""
    return sorted((json.loads(path.read_text()) for path in directory.glob("note.*")), key=lambda one: one["time"])


def test_the_command_gets_one_json_object_for_each_event(tmp_path: Path) -> None:
    failures: list[str] = []
    notifier = Notifier(f"cat >{tmp_path}/note.$$", failures.append, "train-1", run="/logs/train-1")
    before = time.time()
    notifier.send("restart", "restart 1 of 2", host=None, seconds=3)
    notifier.send("end", "ok", host="n1")
    notifier.wait()
    first, second = notices(tmp_path)
    assert before <= first.pop("time") <= second.pop("time") <= time.time()
    run = "/logs/train-1"
    assert first == {"event": "restart", "message": "train-1: restart 1 of 2", "run": run, "host": None, "seconds": 3}
    assert second == {"event": "end", "message": "train-1: ok", "run": run, "host": "n1"}
    assert failures == []


def test_no_process_has_the_command_in_its_arguments(tmp_path: Path) -> None:
    command = f"""cat /proc/$$/cmdline >'{tmp_path}/arguments'; : "it's a secret" """
    failures: list[str] = []
    notifier = Notifier(command, failures.append, "train-1")
    notifier.send("end", "ok")
    notifier.wait()
    assert failures == []
    arguments = (tmp_path / "arguments").read_text()
    assert arguments.startswith("/bin/sh") and "secret" not in arguments


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("echo no server >&2; echo; exit 7", "exit code 7: no server"),
        ("exit 3", "exit code 3"),
        ("no_such_program_ 2>/dev/null", "exit code 127"),
        ("kill -TERM $$", "exit code -15"),
    ],
)
def test_a_failed_call_is_reported_in_one_line(command: str, problem: str) -> None:
    failures: list[str] = []
    notifier = Notifier(command, failures.append, "train-1")
    notifier.send("end", "ok")
    notifier.wait()
    assert failures == [f"notify: end: the command failed: {problem}"]


def test_a_command_that_does_not_end_is_killed_with_its_descendants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "LIMIT", 1.0)
    failures: list[str] = []
    notifier = Notifier(f"sleep 300 & echo $! >{tmp_path}/pid; echo waiting; wait", failures.append, "train-1")
    notifier.send("end", "ok")
    notifier.wait()
    assert failures == ["notify: end: the command failed: killed after 1 s: waiting"]
    pid = int((tmp_path / "pid").read_text())
    while process_scan.start_time(pid) is not None:  # until init has reaped it
        time.sleep(0.01)


def test_without_a_command_nothing_is_called() -> None:
    notifier = Notifier("", pytest.fail, "train-1")
    notifier.send("end", "ok")
    notifier.wait()


@pytest.fixture
def notifying_watch(directory: Path, new_watch: Callable[..., Watch]) -> Watch:
    """The watch of a run whose node n1 loses its connection and does not reply. Notices are in the run directory."""
    watch = new_watch(directory, Scripts({"n1": "exit 255", "n2": "read -r request; exit 143"}, b""))
    watch.notifier = Notifier(f"cat >{directory}/note.$$", watch.console.append, directory.name, run=str(directory))
    return watch


def test_a_lost_node_causes_one_notification(directory: Path, notifying_watch: Watch) -> None:
    notifying_watch.options = replace(notifying_watch.options, python="false")  # so that no program replies on n1
    notifying_watch.attempt()
    notifying_watch.notifier.wait()
    (notice,) = notices(directory)
    assert notice.pop("time") > 0
    assert notice == {
        "event": "lost node", "message": f"{directory.name}: n1 is lost: connection lost", "host": "n1",
        "run": str(directory),
    }  # fmt: skip


def test_a_suspected_hang_and_its_end_are_events(directory: Path, notifying_watch: Watch) -> None:
    check = HangCheck(notifying_watch, HangWatch(read(directory), 600.0, True), time.monotonic())
    for notice in ("the run looks hung: no output for 61 s; it is not stopped automatically", RECOVERED, ""):
        check.handle(Wait(60.0), notice)
    notifying_watch.notifier.wait()
    assert [one["event"] for one in notices(directory)] == ["hang", "recovery"]
    assert notices(directory)[0]["message"].startswith(f"{directory.name}: the run looks hung: no output for 61 s")
