"""What a person sees of a job list: the live table, and an output that must never hold the list up.

The table shows each slot in one line that fits the terminal, and what does not fit is counted. A terminal that takes
nothing (Ctrl-S), a pipe that nobody reads, a full disk: jobs go on all the same.
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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast
from unittest import mock

import pytest

from distributed.jobs import console
from distributed.jobs.dispatcher import JobServer, ServerLink
from distributed.jobs.placement import Slot, SlotPool
from distributed.jobs.state import ListState

PROGRAM = Path(__file__).resolve().parents[2] / "scripts/jobs/run_distributed_training.py"
SECONDS = 60  # after which something counts as hanging
NOW = 1.9e9  # in the tests of the table


# ---------------------------------------------------------------- the table


@dataclass
class Place:
    """What the table asks of a server."""

    name: str
    pool: SlotPool


def link(name: str, gpus: int, state: str = "ready", reason: str = "") -> ServerLink:
    slots = tuple(Slot(index, index) for index in range(gpus))
    return ServerLink(cast(JobServer, Place(name, SlotPool(name, slots))), state, reason)


def running(*places: tuple[str, int], waiting: int = 0) -> ListState:
    """A job at each of these places."""
    jobs = [f"{number:010x}" for number in range(len(places) + waiting)]
    records: list[dict[str, Any]] = [
        {"event": "list", "time": NOW, "list": "l", "jobs": [
            {"id": job, "settings": {}, "options": {}, "output": f"experiments/medium/fold{number}_special-methods"}
            for number, job in enumerate(jobs)
        ]}
    ]  # fmt: skip
    for job, (server, gpu) in zip(jobs, places, strict=False):
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


def test_a_slot_has_its_job_its_progress_and_the_time_left() -> None:
    gpu1 = link("gpu1", 3)
    gpu1.server.pool.blocked = frozenset({2})
    heading, slot, idle, used, totals = shown(running(("gpu1", 0), waiting=2), gpu1)[1:]
    assert heading.split() == ["slot", "job", "step", "loss", "held-out", "time", "left"]
    assert slot.split() == ["gpu1:0", "medium/fold0_special-methods", "30/1,200", "2.500", "2.250", "1:30", "58:30"]
    assert idle == "gpu1:1  idle"
    assert used == "gpu1:2  used by somebody else"
    assert totals == "0 of 3 done, 1 running, 2 waiting"


def test_the_number_of_a_gpu_is_never_cut_off() -> None:
    hosts = ["a-host-with-a-long-name-1.cluster.example.org", "a-host-with-a-long-name-1.other.example.org"]
    lines = shown(running((hosts[0], 7), (hosts[1], 7)), *(link(host, 8) for host in hosts))
    assert sum(bool(re.match(r"a-host\S*:7 +medium/fold[01]", line)) for line in lines) == 2
    assert shown(running(("gpu2.example.org", 0)), link("gpu2.example.org", 1))[2].startswith("gpu2:0 ")
    assert shown(running(("10.0.0.7", 0)), link("10.0.0.7", 1))[2].startswith("10.0.0.7:0 ")


def test_a_server_that_cannot_be_used_says_why_and_hides_no_job() -> None:
    reason = "ssh: connect to host gpu2 port 22: Connection timed out, and more than fits into one line of the terminal"
    lines = shown(running(("gpu2", 0)), link("gpu2", 2, "unreachable", reason))
    assert lines[2].startswith("gpu2    unreachable: ssh: connect to host gpu2 port 22")
    assert lines[3].startswith("gpu2:0  medium/fold0")
    assert len(lines) == 5, "a free slot of it is not called idle"


@pytest.mark.parametrize("height", [8, 12, 24])
def test_what_does_not_fit_is_counted_idle_slots_first_and_the_totals_stay(height: int) -> None:
    state = running(*((f"gpu{server}", 0) for server in range(10)))
    lines = shown(state, *(link(f"gpu{server}", 4) for server in range(10)), height=height)
    assert lines[-1] == "0 of 10 done, 10 running; about 58 min 30 s left", "as long as the job that takes longest"
    rows = [line for line in lines if re.match(r"gpu\d:", line)]
    assert len(rows) == height - console.AROUND
    assert sum("medium" in row for row in rows) == min(10, len(rows)), "those that run, before those that do not"
    numbers = [int(number) for number in re.findall(r"(\d+) more", lines[-2])]
    assert len(rows) + sum(numbers) == 40


def test_of_what_does_not_fit_only_what_there_is_is_counted() -> None:
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
def test_losses_have_a_column_from_the_first_value_in_the_list_on(metrics: dict[str, float], titles: list[str]) -> None:
    state = running(("gpu1", 0), waiting=1)
    here, elsewhere = state.jobs.values()
    here.metrics, elsewhere.metrics = {}, metrics  # a column stays when another job begins
    heading, row, _ = shown(state, link("gpu1", 1), width=80)[1:]
    assert heading.split() == ["slot", "job", *titles]
    assert row.startswith("gpu1:0  medium/fold0_special-methods ")
    assert row.endswith("   1:30")


# ---------------------------------------------------------------- the output


SLEEPER = "import sys, time; print('x'); time.sleep(0.2)"


def call_of(folder: Path, jobs: int) -> list[str]:
    """A call that runs so many short jobs, whose names fill an output that nobody reads."""
    (folder / "job.py").write_text(SLEEPER)
    long = "a-long-name-" * 15
    (folder / "jobs.json").write_text(json.dumps([{"prefix": f"{long}{number}"} for number in range(jobs)]))
    words = ["--backend", "local", "--slots", "4", "--script", "job.py", "--jobs-config", "jobs.json", "--no-tmux"]
    return [sys.executable, str(PROGRAM), *words]


def done(folder: Path) -> int:
    try:
        return int(json.loads((folder / "results.json").read_text())["totals"]["done"])
    except FileNotFoundError:
        return 0


def wait_until_done(folder: Path, jobs: int) -> None:
    end = time.monotonic() + SECONDS
    while done(folder) < jobs:
        assert time.monotonic() < end, f"{done(folder)} of {jobs} done within {SECONDS} s"
        time.sleep(0.1)


def run_to_its_end(folder: Path, output: int) -> int:
    process = subprocess.Popen(call_of(folder, 30), cwd=folder, stdout=output)
    try:
        wait_until_done(folder, 30)
        return process.wait(timeout=SECONDS)
    finally:
        process.kill()
        process.wait()


def test_a_pipe_that_nobody_reads_does_not_hold_the_list_up(tmp_path: Path) -> None:
    source, target = os.pipe()
    fcntl.fcntl(target, fcntl.F_SETPIPE_SZ, 4096)
    assert run_to_its_end(tmp_path, target) == 0, "and its end waits only for a while"
    os.close(target)
    os.close(source)


def test_a_terminal_that_is_stopped_does_not_hold_the_list_up(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    termios.tcflow(slave, termios.TCOOFF)  # what Ctrl-S does
    assert run_to_its_end(tmp_path, slave) == 0
    os.close(slave)
    os.close(master)


def test_output_that_is_closed_does_not_end_the_list(tmp_path: Path) -> None:
    line = " ".join(f"'{word}'" for word in call_of(tmp_path, 3))
    assert subprocess.run(["bash", "-c", f"{line} >&-"], cwd=tmp_path, timeout=SECONDS, check=False).returncode == 0
    assert done(tmp_path) == 3


class Disk:
    """A file on a disk that is full at first."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.source, self.target = os.pipe()

    def fileno(self) -> int:
        return self.target

    def isatty(self) -> bool:
        return False


def test_what_a_full_disk_does_not_take_is_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, free, write = Disk(), [False], os.write
    tried: list[bytes] = []

    def try_to_write(file: int, data: bytes) -> int:
        if file == disk.target and not free[0]:
            tried.append(data)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", try_to_write)
    monkeypatch.setattr(console, "FULL", 0.01)
    monkeypatch.setattr(sys, "stdout", cast("IO[str]", disk))
    output = console.Output()
    output.write("first\n")
    while not tried:
        time.sleep(0.01)
    output.write("second\n")
    free[0] = True
    output.end(SECONDS)
    assert os.read(disk.source, 100) == b"first\nsecond\n"
