"""attach.sh on a terminal, and for runs that it cannot show."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed.files import KIT
from distributed.runs import run_directory
from distributed.runs.lookup import RunNode

ATTACH = KIT + "/scripts/attach.sh"


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a launcher."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.fixture
def run(tmp_path: Path, launcher: subprocess.Popen[bytes]) -> Path:
    made = run_directory.create(
        str(tmp_path / "my logs"), "train", nodes=[RunNode("n1", "", 2, 0)], script="train.py", config=None, cwd="/",
        python="python3", command=["/k/scripts/run.sh"], launcher=launcher.pid, grace=1,
    )  # fmt: skip
    return Path(made)


@pytest.fixture
def terminal(run: Path) -> Iterator[Callable[[str, str], subprocess.Popen[bytes]]]:
    """A function that types keys after attach.sh has printed a text."""
    ours, theirs = pty.openpty()
    call = [ATTACH, str(run)]
    with subprocess.Popen(call, stdin=theirs, stdout=theirs, stderr=theirs) as attached:
        os.close(theirs)
        output = b""

        def type_after(text: str, keys: str) -> subprocess.Popen[bytes]:
            nonlocal output
            while not re.search(text.encode(), output):
                output += os.read(ours, 4096)
            if keys == "Ctrl-C":
                attached.send_signal(2)
            else:
                os.write(ours, keys.encode())
            return attached

        yield type_after
        attached.kill()
    os.close(ours)


def write_log(run: Path) -> None:
    (run / "launcher.log").write_text("2025-01-02 03:04:05 started\n")
    (run / "attempts/1/node_n1.log").write_text("[n1:0] of rank 0\n[n1:1] of rank 1\nof the agent\n")


def test_ctrl_c_asks_whether_to_stop_the_run_and_enter_leaves_it(
    run: Path, terminal: Callable[[str, str], subprocess.Popen[bytes]], launcher: subprocess.Popen[bytes]
) -> None:
    write_log(run)
    terminal("started(.|\\s)*of rank 0", "Ctrl-C")
    attached = terminal("s and Enter stops it", "\n")
    terminal("left; the run goes on", "")
    assert attached.wait(timeout=60) == 130
    assert launcher.poll() is None


def test_s_stops_the_run_with_stop_sh(
    run: Path, terminal: Callable[[str, str], subprocess.Popen[bytes]], launcher: subprocess.Popen[bytes]
) -> None:
    write_log(run)
    terminal("of rank 0", "Ctrl-C")
    attached = terminal("s and Enter stops it", "s\n")
    terminal("n1: no process of this run remains", "")
    assert launcher.wait(timeout=60) == -15
    assert attached.wait(timeout=60) == 1  # no verdict


def test_a_second_ctrl_c_leaves_the_run(
    run: Path, terminal: Callable[[str, str], subprocess.Popen[bytes]], launcher: subprocess.Popen[bytes]
) -> None:
    write_log(run)
    terminal("of rank 0", "Ctrl-C")
    attached = terminal("s and Enter stops it", "Ctrl-C")
    terminal("left; the run goes on", "")
    assert attached.wait(timeout=60) == 130
    assert launcher.poll() is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"host": "head", "machine": "other"}, "its launcher is process [0-9]+ on head; attach there, or follow its"),
        ({"pid": 1, "since": 1}, "its launcher has exited without a verdict; start it again: .*/rerun.sh train-"),
    ],
)
def test_a_run_that_cannot_be_shown_is_refused_with_what_to_do(run: Path, changes: dict[str, Any], reason: str) -> None:
    facts = json.loads((run / "run.json").read_text())
    facts["launcher"] |= changes
    (run / "run.json").write_text(json.dumps(facts))
    done = subprocess.run([ATTACH, run], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and re.search(f"run {run.name}: {reason}", done.stderr), done.stderr


def test_a_damaged_verdict_is_named(run: Path, launcher: subprocess.Popen[bytes]) -> None:
    launcher.kill()
    launcher.wait()
    (run / "attempts/1/verdict.json").write_text("{}")
    done = subprocess.run([ATTACH, run], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "verdict.json: cannot be read, or is damaged" in done.stderr
