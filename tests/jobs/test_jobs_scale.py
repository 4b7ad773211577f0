"""Optimizations for lists of many thousand jobs do not change the results, and the benchmarks can be started."""

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

from distributed.jobs.journal.state import Attempt, ListState, job_records
from distributed.jobs.lists import config
from distributed.jobs.lists.job import Job, Options, job_of
from distributed.jobs.schedule.backend import NotStarted, Unreachable
from distributed.jobs.servers.channel import HostReplyError
from distributed.jobs.servers.host_server import ListContext
from distributed.jobs.servers.ssh_server import MAX_ATTEMPTS_PER_RSYNC, MAX_RSYNCS, SshServer
from distributed.jobs.show.results import Results, entry

KIT = Path(__file__).resolve().parents[2]
SECONDS = 60.0
JOBS = [job_of({"n": number}, Options()) for number in range(4)]


@pytest.fixture
def state() -> ListState:
    made = ListState()
    made.apply({"event": "list", "time": 1e9, "list": "abc", "script": "x.py", "jobs": job_records(JOBS)})
    return made


def start(state: ListState, number: int, attempt: int = 1) -> None:
    name = f"{JOBS[number].id}.{attempt}"
    state.apply({"event": "start", "time": 2e9, "attempt": name, "server": "gpu1", "slots": [number], "gpus": []})


def end(state: ListState, number: int, outcome: str, attempt: int = 1, **facts: Any) -> None:
    name = f"{JOBS[number].id}.{attempt}"
    state.apply({"event": "ended", "time": 3e9, "attempt": name, "reason": "", "code": 0, **facts})
    state.apply({"event": "settle", "time": 3e9, "job": JOBS[number].id, "state": outcome, "reason": facts["failure"]})


def refuse(state: ListState, number: int, attempt: int, reason: str) -> None:
    start(state, number, attempt)
    state.apply({"event": "not_started", "attempt": f"{JOBS[number].id}.{attempt}", "reason": reason})


def steps(state: ListState) -> list[Any]:
    """Functions, each of which makes one change of a job. results.json shows all these changes."""
    return [
        lambda: start(state, 0),
        lambda: state.jobs[JOBS[0].id].metrics.update(step=1),
        lambda: state.jobs[JOBS[0].id].metrics.update(step=2),
        lambda: end(state, 0, "done", failure="", metrics={"loss": 2.5}),
        lambda: refuse(state, 1, 1, "its disk is full"),
        lambda: refuse(state, 1, 2, "its GPU has failed"),  # started and refused between two writes
        lambda: start(state, 1, attempt=3),
        lambda: end(state, 1, "failed", attempt=3, failure="exit code", lines=["one", "two"]),
        lambda: state.apply({"event": "request_handled", "request": "r", "what": "retry", "jobs": [JOBS[1].id]}),
        lambda: start(state, 1, attempt=4),
        lambda: state.apply(
            {"event": "lost", "time": 4e9, "attempt": f"{JOBS[1].id}.4", "failure": "server lost", "reason": "cut"}
        ),
        lambda: state.apply({"event": "settle", "job": JOBS[1].id, "state": "waiting", "reason": "server lost"}),
        lambda: state.apply({"event": "settle", "job": JOBS[2].id, "state": "cancelled", "reason": "on request"}),
    ]


def test_incrementally_written_results_equal_a_new_document(state: ListState, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results = Results(path, state, {})
    for step in [lambda: None, *steps(state)]:
        step()
        results.changed, results._next, results._next_page = True, 0.0, float("inf")
        results.write()
        text = path.read_text()
        document = json.loads(text)
        entries = [entry(job, state.reason_of(job)) for job in state.jobs.values()]
        assert document["jobs"] == json.loads(json.dumps(entries))
        assert text == json.dumps(document, indent=2, sort_keys=True) + "\n"


def test_the_page_is_written_in_the_background(state: ListState, tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json", state, {})
    results.write()
    assert not (tmp_path / "results.html").exists()
    deadline = time.monotonic() + SECONDS
    while not (tmp_path / "results.html").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    results.write("finished", last=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.html", "results.json"]


# ---------------------------------------------------------------- results copied by one rsync


class RecordingServer(SshServer):
    """A server that records rsync calls instead of running them."""

    def __init__(self, directory: Path, errors: Mapping[str, Exception]) -> None:
        super().__init__("gpu1", config.Server(host="gpu1"), ListContext("abc", directory, "x.py"))
        self.copied: list[int] = []  # number of attempts in each call of rsync
        self.errors = errors

    async def _rsync(self, arguments: Sequence[str], data: bytes = b"", options: Sequence[str] = ()) -> None:
        names = data.decode().split("\0")
        self.copied.append(sum(name.startswith("logs/") for name in names))
        await asyncio.sleep(0.01)
        for name, error in self.errors.items():
            if f"{name}/" in names:
                raise error


def fetched(server: RecordingServer, count: int) -> list[BaseException | Sequence[str]]:
    """Fetch the results of `count` attempts at once; return the error of each, or the names of files left out."""
    attempts = [Attempt(f"job{number}", 1, "gpu1", [], [], 0.0) for number in range(count)]

    async def fetch_all() -> list[BaseException | Sequence[str]]:
        jobs = [Job(each.job, {}, Options(), each.job) for each in attempts]
        return await asyncio.gather(*map(server.fetch_results, attempts, jobs), return_exceptions=True)

    return asyncio.run(fetch_all())


def test_results_of_attempts_that_end_together_are_copied_by_one_rsync(tmp_path: Path) -> None:
    server = RecordingServer(tmp_path, {})
    assert fetched(server, 250) == [[]] * 250
    assert sum(server.copied) == 250
    assert max(server.copied) <= MAX_ATTEMPTS_PER_RSYNC
    assert len(server.copied) <= MAX_RSYNCS + 3


def test_an_error_of_one_result_does_not_fail_the_rest_of_its_batch(tmp_path: Path) -> None:
    error = OSError("job5: Permission denied")
    found = fetched(RecordingServer(tmp_path, {"job5": error}), 20)
    assert found == [error if number == 5 else [] for number in range(20)]


def test_a_lost_connection_fails_the_whole_batch(tmp_path: Path) -> None:
    server = RecordingServer(tmp_path, {f"job{number}": Unreachable("cut") for number in range(10, 20)})
    found = fetched(server, 20)
    assert all(isinstance(each, Unreachable) for each in found[10:])
    assert len(server.copied) < 20


def test_results_are_not_sent_to_a_directory_that_the_job_cannot_claim(tmp_path: Path) -> None:
    class Refusing(RecordingServer):
        async def _call(self, verb: str, **facts: Any) -> dict[str, Any]:
            assert (verb, facts["output"], facts["job"]) == ("claim", "job0", "job0")
            raise HostReplyError("job0 contains files that no job wrote", "job")

    (tmp_path / "job0").mkdir()
    server = Refusing(tmp_path, {})
    with pytest.raises(NotStarted, match="contains files that no job wrote") as refused:
        asyncio.run(server.send_results([Job("job0", {}, Options(), "job0")]))
    assert (refused.value.kind, server.copied) == ("job", [])


@pytest.mark.parametrize(("code", "expected"), [(24, None), (23, "file has vanished: x"), (12, "file has vanished: x")])
def test_an_exit_code_of_rsync_is_an_error_unless_it_means_that_files_vanished_during_the_copy(
    code: int, expected: str | None, tmp_path: Path
) -> None:
    class Vanishing(SshServer):
        async def _run(self, *arguments: Any, **options: Any) -> tuple[int, str]:
            return code, "file has vanished: x"

    server = Vanishing("gpu1", config.Server(host="gpu1"), ListContext("abc", tmp_path, "x.py"))
    try:
        found = asyncio.run(server._rsync([]))
    except (Unreachable, OSError) as error:
        found = str(error)
    assert found == expected


# ---------------------------------------------------------------- the benchmarks


@pytest.mark.parametrize("name", ["jobs", "jobs_makespan", "jobs_scale"])
def test_benchmarks_of_job_lists_have_a_help_text(name: str) -> None:
    arguments = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    result = subprocess.run(arguments, cwd=KIT, capture_output=True, text=True, check=True, timeout=SECONDS)
    assert result.stdout.startswith(f"usage: {name}.py")


def test_the_scale_benchmark_runs_a_small_list(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "benchmarks.jobs_scale", "--servers", "3", "--slots", "2", "--jobs", "20"]
    arguments += ["--seconds", "0.1", "--directory", str(tmp_path)]
    result = subprocess.run(arguments, cwd=KIT, capture_output=True, text=True, check=True, timeout=SECONDS)
    assert "finished: 20 of 20 done" in result.stdout
    assert "ms of CPU per job" in result.stdout
    assert not list(tmp_path.iterdir())
