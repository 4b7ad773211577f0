"""The live table of a job list, and an output that never blocks the list.

Each slot is one line that fits the terminal; hidden rows are counted. Jobs continue when the terminal is stopped
(Ctrl-S), the pipe is not read, or the disk is full.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import re
import subprocess
import sys
import termios
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast
from unittest import mock

import pytest

from distributed.jobs.journal.state import ListState
from distributed.jobs.schedule.backend import JobServer, ServerLink
from distributed.jobs.schedule.placement import Slot, SlotPool
from distributed.jobs.show import console

PROGRAM = Path(__file__).resolve().parents[2] / "scripts/jobs/run_distributed_training.py"
SECONDS = 60  # timeout of a list
NOW = 1.9e9  # Unix time in the tests of the table


# ---------------------------------------------------------------- the table


@dataclass
class FakeServer:
    """The attributes of a server that the table uses."""

    name: str
    pool: SlotPool


def link(name: str, gpus: int, state: str = "ready", reason: str = "") -> ServerLink:
    slots = tuple(Slot(index, index) for index in range(gpus))
    return ServerLink(cast(JobServer, FakeServer(name, SlotPool(name, slots))), state, reason)


def running(*locations: tuple[str, int], waiting: int = 0) -> ListState:
    """A list with a running job on each (server, GPU) and this number of waiting jobs."""
    jobs = [f"{number:010x}" for number in range(len(locations) + waiting)]
    records: list[dict[str, Any]] = [
        {"event": "list", "time": NOW, "list": "l", "jobs": [
            {"id": job, "settings": {}, "options": {}, "output": f"experiments/medium/fold{number}_special-methods"}
            for number, job in enumerate(jobs)
        ]}
    ]  # fmt: skip
    for job, (server, gpu) in zip(jobs, locations, strict=False):
        about = {"server": server, "slots": [gpu], "gpus": [gpu]}
        records.append({"event": "start", "time": NOW - 90, "attempt": f"{job}.1", **about})
        records.append({"event": "running", "time": NOW, "attempt": f"{job}.1", "process": {"pid": 1}})
    state = ListState.of(records)
    for number, known in enumerate(state.jobs.values()):
        if known.state == "running":
            known.metrics = {"step": 30 + number, "steps": 1200, "loss": 2.5, "held_out_loss": 2.25}
    return state


def shown(state: ListState, *links: ServerLink, width: int = 100, height: int = 30) -> list[str]:
    with mock.patch.object(time, "time", return_value=NOW):
        table = console.overview(state, {each.server.name: each for each in links}, width, height)
    lines = [line.plain for line in table]
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    return [line.rstrip() for line in lines]


def test_a_slot_shows_job_progress_and_time_left() -> None:
    gpu1 = link("gpu1", 3)
    gpu1.server.pool.blocked = frozenset({2})
    heading, slot, idle, used, totals = shown(running(("gpu1", 0), waiting=2), gpu1)[1:]
    assert heading.split() == ["slot", "job", "step", "loss", "held-out", "time", "left"]
    assert slot.split() == ["gpu1:0", "medium/fold0_special-methods", "30/1,200", "2.500", "2.250", "1:30", "58:30"]
    assert idle == "gpu1:1  idle"
    assert used == "gpu1:2  in use by another process"
    assert totals == "0 of 3 done, 1 running, 2 waiting"


@pytest.mark.parametrize(("step", "left"), [(900, []), (950, ["1:00"])])
def test_the_time_left_of_a_resumed_job_depends_on_its_steps_since_the_resume(step: int, left: list[str]) -> None:
    state = running(("gpu1", 0))
    [job] = state.jobs.values()
    job.attempts[:0] = [replace(job.attempts[0], number=0, state="ended")]
    job.attempts[-1].first_report = (900, NOW - 60)
    job.metrics |= {"step": step, "steps": 1000}
    assert shown(state, link("gpu1", 1))[2].split()[-1 - len(left) :] == ["1:30", *left]


def test_a_loss_that_is_not_finite_is_shown() -> None:
    state = running(("gpu1", 0))
    next(iter(state.jobs.values())).metrics |= {"loss": "NaN"}
    assert shown(state, link("gpu1", 1))[2].split()[2:] == ["30/1,200", "nan", "2.250", "1:30", "58:30"]


def test_the_index_of_a_gpu_is_never_truncated() -> None:
    hosts = ["a-host-with-a-long-name-1.cluster.example.org", "a-host-with-a-long-name-1.other.example.org"]
    lines = shown(running((hosts[0], 7), (hosts[1], 7)), *(link(host, 8) for host in hosts))
    assert sum(bool(re.match(r"a-host\S*:7 +medium/fold[01]", line)) for line in lines) == 2
    assert shown(running(("gpu2.example.org", 0)), link("gpu2.example.org", 1))[2].startswith("gpu2:0 ")
    assert shown(running(("10.0.0.7", 0)), link("10.0.0.7", 1))[2].startswith("10.0.0.7:0 ")


def test_an_unusable_server_shows_its_reason_and_its_jobs() -> None:
    reason = "ssh: connect to host gpu2 port 22: Connection timed out, and more than fits into one line of the terminal"
    lines = shown(running(("gpu2", 0)), link("gpu2", 2, "unreachable", reason))
    assert lines[2].startswith("gpu2    unreachable: ssh: connect to host gpu2 port 22")
    assert lines[3].startswith("gpu2:0  medium/fold0")
    assert len(lines) == 5, "its free slot is not shown as idle"


@pytest.mark.parametrize("height", [8, 12, 24])
def test_idle_slots_are_hidden_first_and_counted(height: int) -> None:
    state = running(*((f"gpu{server}", 0) for server in range(10)))
    lines = shown(state, *(link(f"gpu{server}", 4) for server in range(10)), height=height)
    assert lines[-1] == "0 of 10 done, 10 running; about 58 min 30 s left", "the time of the longest job"
    rows = [line for line in lines if re.match(r"gpu\d:", line)]
    assert len(rows) == height - console.OTHER_LINES
    assert sum("medium" in row for row in rows) == min(10, len(rows)), "running ones first"
    numbers = [int(number) for number in re.findall(r"(\d+) more", lines[-2])]
    assert len(rows) + sum(numbers) == 40


def test_the_line_of_hidden_rows_does_not_mention_idle_rows_if_none_is_hidden() -> None:
    state = running(*((f"gpu{server}", 0) for server in range(10)))
    assert shown(state, *(link(f"gpu{server}", 1) for server in range(10)), height=9)[-2] == "and 6 more running"


@pytest.mark.parametrize(
    ("metrics", "titles"),
    [
        ({}, ["step", "time", "left"]),
        ({"loss": 2.5}, ["step", "loss", "time", "left"]),
        ({"held_out_loss": 2.5}, ["step", "held-out", "time", "left"]),
    ],
)
def test_the_column_of_a_loss_appears_when_a_job_has_reported_it(metrics: dict[str, float], titles: list[str]) -> None:
    state = running(("gpu1", 0), waiting=1)
    running_job, waiting_job = state.jobs.values()
    running_job.metrics, waiting_job.metrics = {}, metrics  # a job that is not running keeps the column in the table
    heading, row, _ = shown(state, link("gpu1", 1), width=80)[1:]
    assert heading.split() == ["slot", "job", *titles]
    assert row.startswith("gpu1:0  medium/fold0_special-methods ")
    assert row.endswith("   1:30")


# ---------------------------------------------------------------- the output


SLEEPER = "import sys, time; print('x'); time.sleep(0.2)"


def call_of(directory: Path, jobs: int) -> list[str]:
    """A call that runs short jobs with long names, which fill an output that is not read."""
    (directory / "job.py").write_text(SLEEPER)
    long = "a-long-name-" * 15
    (directory / "jobs.json").write_text(json.dumps([{"prefix": f"{long}{number}"} for number in range(jobs)]))
    options = ["--backend", "local", "--slots", "4", "--script", "job.py", "--jobs-config", "jobs.json", "--no-tmux"]
    return [sys.executable, str(PROGRAM), *options]


def done(directory: Path) -> int:
    try:
        return int(json.loads((directory / "results.json").read_text())["totals"]["done"])
    except FileNotFoundError:
        return 0


def wait_until_done(directory: Path, jobs: int) -> None:
    end = time.monotonic() + SECONDS
    while done(directory) < jobs:
        assert time.monotonic() < end, f"{done(directory)} of {jobs} done within {SECONDS} s"
        time.sleep(0.1)


def run_to_its_end(directory: Path, output: int) -> int:
    process = subprocess.Popen(call_of(directory, 30), cwd=directory, stdout=output)
    try:
        wait_until_done(directory, 30)
        return process.wait(timeout=SECONDS)
    finally:
        process.kill()
        process.wait()


def test_an_unread_pipe_does_not_block_the_list(tmp_path: Path) -> None:
    source, target = os.pipe()
    fcntl.fcntl(target, fcntl.F_SETPIPE_SZ, 4096)
    assert run_to_its_end(tmp_path, target) == 0
    os.close(target)
    os.close(source)


def test_a_stopped_terminal_does_not_block_the_list(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    termios.tcflow(slave, termios.TCOOFF)  # what Ctrl-S does
    assert run_to_its_end(tmp_path, slave) == 0
    os.close(slave)
    os.close(master)


def test_a_closed_output_does_not_stop_the_list(tmp_path: Path) -> None:
    line = " ".join(f"'{argument}'" for argument in call_of(tmp_path, 3))
    assert subprocess.run(["bash", "-c", f"{line} >&-"], cwd=tmp_path, timeout=SECONDS, check=False).returncode == 0
    assert done(tmp_path) == 3


class FileOnFullDisk:
    """A file on a disk that is full at first."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.source, self.target = os.pipe()

    def fileno(self) -> int:
        return self.target

    def isatty(self) -> bool:
        return False


def test_a_long_text_is_cut_to_the_size_of_the_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "out", "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        output = console.BufferedOutput()
        output.write("x" * (2 * console.MAX_BUFFERED))
        output.drain(SECONDS)
    assert (tmp_path / "out").stat().st_size == console.MAX_BUFFERED


def test_output_to_a_full_disk_is_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, free, write = FileOnFullDisk(), [False], os.write
    tried: list[bytes] = []

    def try_to_write(file: int, data: bytes) -> int:
        if file == disk.target and not free[0]:
            tried.append(data)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", try_to_write)
    monkeypatch.setattr(console, "DISK_FULL_DELAY", 0.01)
    monkeypatch.setattr(sys, "stdout", cast("IO[str]", disk))
    output = console.BufferedOutput()
    output.write("first\n")
    while not tried:
        time.sleep(0.01)
    output.write("second\n")
    free[0] = True
    output.drain(SECONDS)
    assert os.read(disk.source, 100) == b"first\nsecond\n"
