"""What makes a list of many thousand jobs cheap changes nothing that it writes; and its benchmarks start.

A real dispatcher, journal, results and page; the servers are those of benchmarks/jobs_scale.py, which simulates them.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from distributed.jobs import config
from distributed.jobs.dispatcher import Unreachable
from distributed.jobs.job import Job, Options, job_of
from distributed.jobs.results import Results, entry
from distributed.jobs.servers import COPIES, TOGETHER, Launch, SshServer
from distributed.jobs.state import Attempt, State, listed

KIT = Path(__file__).resolve().parents[2]
SECONDS = 60.0
JOBS = [job_of({"n": number}, Options()) for number in range(4)]


@pytest.fixture
def state() -> State:
    made = State()
    made.apply({"event": "list", "time": 1e9, "list": "abc", "script": "x.py", "jobs": listed(JOBS)})
    return made


def start(state: State, number: int, attempt: int = 1) -> None:
    name = f"{JOBS[number].id}.{attempt}"
    state.apply({"event": "start", "time": 2e9, "attempt": name, "server": "gpu1", "slots": [number], "gpus": []})


def end(state: State, number: int, outcome: str, attempt: int = 1, **facts: Any) -> None:
    name = f"{JOBS[number].id}.{attempt}"
    state.apply({"event": "ended", "time": 3e9, "attempt": name, "reason": "", "code": 0, **facts})
    state.apply({"event": "settle", "time": 3e9, "job": JOBS[number].id, "state": outcome, "reason": facts["failure"]})


def refuse(state: State, number: int, attempt: int, reason: str) -> None:
    start(state, number, attempt)
    state.apply({"event": "not_started", "attempt": f"{JOBS[number].id}.{attempt}", "reason": reason})


def steps(state: State) -> list[Any]:
    """Everything that changes what results.json says of a job."""
    return [
        lambda: start(state, 0),
        lambda: state.jobs[JOBS[0].id].metrics.update(step=1),
        lambda: state.jobs[JOBS[0].id].metrics.update(step=2),
        lambda: end(state, 0, "done", failure="", metrics={"loss": 2.5}),
        lambda: refuse(state, 1, 1, "its disk is full"),
        lambda: refuse(state, 1, 2, "its GPU is gone"),  # between two writes
        lambda: start(state, 1, attempt=3),
        lambda: end(state, 1, "failed", attempt=3, failure="exit code", lines=["one", "two"]),
        lambda: state.apply({"event": "asked", "request": "r", "what": "retry", "jobs": [JOBS[1].id]}),
        lambda: start(state, 1, attempt=4),
        lambda: state.apply(
            {"event": "lost", "time": 4e9, "attempt": f"{JOBS[1].id}.4", "failure": "server lost", "reason": "cut"}
        ),
        lambda: state.apply({"event": "settle", "job": JOBS[1].id, "state": "waiting", "reason": "server lost"}),
        lambda: state.apply({"event": "settle", "job": JOBS[2].id, "state": "cancelled", "reason": "on request"}),
    ]


def test_results_say_at_every_step_what_a_whole_new_document_would_say(state: State, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results = Results(path, state, {})
    for step in [lambda: None, *steps(state)]:
        step()
        results.changed, results._next, results._next_page = True, 0.0, float("inf")
        results.write()
        text = path.read_text()
        found = json.loads(text)
        assert found["jobs"] == json.loads(json.dumps([entry(job) for job in state.jobs.values()]))
        assert text == json.dumps(found, indent=2, sort_keys=True) + "\n"


def test_the_page_is_written_while_the_list_runs_and_nobody_waits_for_it(state: State, tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json", state, {})
    results.write()
    assert not (tmp_path / "results.html").exists()
    deadline = time.monotonic() + SECONDS
    while not (tmp_path / "results.html").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    results.write("finished", last=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.html", "results.json"]


# ---------------------------------------------------------------- results that are copied together


class Copying(SshServer):
    """A server whose rsync is not run, but recorded."""

    def __init__(self, directory: Path, bad: Mapping[str, Exception]) -> None:
        super().__init__("gpu1", config.Server(host="gpu1"), Launch("abc", directory, "x.py", sockets=directory))
        self.copied: list[int] = []  # attempts of each rsync
        self.bad = bad

    async def _rsync(self, words: Sequence[str], data: bytes = b"") -> None:
        names = data.decode().split("\0")
        self.copied.append(sum(name.startswith("logs/") for name in names))
        await asyncio.sleep(0.01)
        for name, error in self.bad.items():
            if f"{name}/" in names:
                raise error


def brought(server: Copying, count: int) -> list[BaseException | None]:
    """What comes of it when the results of so many attempts are to be copied at once."""
    attempts = [Attempt(f"job{number}", 1, "gpu1", [], [], 0.0) for number in range(count)]

    async def bring_all() -> list[BaseException | None]:
        jobs = [Job(each.job, {}, Options(), each.job) for each in attempts]
        return await asyncio.gather(*map(server.bring, attempts, jobs), return_exceptions=True)

    return asyncio.run(bring_all())


def test_attempts_that_end_together_are_copied_together(tmp_path: Path) -> None:
    server = Copying(tmp_path, {})
    assert brought(server, 250) == [None] * 250
    assert sum(server.copied) == 250
    assert max(server.copied) <= TOGETHER
    assert len(server.copied) <= COPIES + 3


def test_results_that_cannot_be_copied_do_not_keep_back_those_that_were_copied_with_them(tmp_path: Path) -> None:
    error = OSError("job5: Permission denied")
    found = brought(Copying(tmp_path, {"job5": error}), 20)
    assert found == [error if number == 5 else None for number in range(20)]


def test_a_connection_that_is_lost_is_lost_for_all_that_were_copied_together(tmp_path: Path) -> None:
    server = Copying(tmp_path, {f"job{number}": Unreachable("cut") for number in range(10, 20)})
    found = brought(server, 20)
    assert all(isinstance(each, Unreachable) for each in found[10:])
    assert len(server.copied) < 20


# ---------------------------------------------------------------- the benchmarks


@pytest.mark.parametrize("name", ["jobs", "jobs_makespan", "jobs_scale"])
def test_a_benchmark_of_job_lists_explains_itself(name: str) -> None:
    words = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    answer = subprocess.run(words, cwd=KIT, capture_output=True, text=True, check=True, timeout=SECONDS)
    assert answer.stdout.startswith(f"usage: {name}.py")


def test_a_small_list_on_simulated_servers_is_measured(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.jobs_scale", "--servers", "3", "--slots", "2", "--jobs", "20"]
    words += ["--seconds", "0.1", "--directory", str(tmp_path)]
    answer = subprocess.run(words, cwd=KIT, capture_output=True, text=True, check=True, timeout=SECONDS)
    assert "finished: 20 of 20 done" in answer.stdout
    assert "ms of CPU per job" in answer.stdout
    assert not list(tmp_path.iterdir())
