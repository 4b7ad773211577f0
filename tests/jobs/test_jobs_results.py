"""results.json is valid whenever it is read, and contains all facts but no values of environment variables.

Runs real lists with --backend local and reads results.json repeatedly while they run.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from dispatchers import DispatcherCall, Dispatchers, dispatchers

from distributed.jobs.journal.state import ListState, job_records
from distributed.jobs.lists.job import Options, job_of
from distributed.jobs.show import page
from distributed.jobs.show.results import Results, document

SECONDS = 60.0
TOKEN = "s3cr3t-7f1d'\n$x"
SCRIPT = """#!/bin/sh
cd "$MUSTER_OUTPUT_DIR" || exit
printf %s "$TOKEN" | sha256sum >token
echo '{"step": 1, "steps": 2, "loss": 2.5}' >metrics.jsonl
case $2 in
  quick) ;;
  good)
    until [ -e "$OLDPWD/go" ]; do sleep 0.1; done
    sleep 0.5; echo '{"step": 2, "loss": 1.5, "held_out_loss": 3}' >>metrics.jsonl ;;
  bad) echo '{"step": 2, "loss": NaN, "x": Infinity}' >>metrics.jsonl; echo "one"; echo "two" >&2; exit 3 ;;
  killed) kill -KILL $$ ;;
  slow) sleep 60 ;;
  absent) exec /no/such/program ;;
esac
"""
JOBS: list[dict[str, Any]] = [
    {"kind": "good", "lr": [1, 2.5], "_env": {"TOKEN": TOKEN}, "_expected_seconds": 3, "_labels": []},
    {"kind": "bad", "prefix": "e", "fold": 1},
    {"kind": "killed", "_retries": 0, "_env": {"TOKEN": TOKEN}},
    {"kind": "slow", "_timeout": 1, "_retries": 0},
    {"kind": "absent", "_retries": 0},
]
RUN = ("--backend", "local", "--slots", "3", "--no-tmux", "--script", "job.sh", "--jobs-config", "jobs.json")


@pytest.fixture(scope="module")
def forked() -> Iterator[Dispatchers]:
    with dispatchers() as server:
        yield server


def prepared(directory: Path, jobs: list[dict[str, Any]]) -> Path:
    (directory / "jobs.json").write_text(json.dumps(jobs))
    (directory / "job.sh").write_text(SCRIPT)
    (directory / "job.sh").chmod(0o755)
    return directory


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_contract(results: dict[str, Any]) -> None:
    """Check that the results have the names and types that LAUNCH_GUIDE.md documents."""
    assert sorted(results) == sorted(
        ["list", "created", "updated", "state", "reason", "script", "backend", "totals", "servers", "jobs"]
    )
    assert results["state"] in ("running", "paused", "finished", "interrupted", "cancelled")
    assert is_number(results["created"]) and is_number(results["updated"])
    for server in results["servers"].values():
        assert sorted(server) == ["reason", "slots", "state"]
        assert all(sorted(slot) == ["gpu", "name"] for slot in server["slots"])
    for job in results["jobs"]:
        assert sorted(job) == sorted(
            ["id", "name", "settings", "options", "state", "reason", "output", "metrics", "attempts"]
        )
        assert job["state"] in ("waiting", "running", "done", "failed", "cancelled")
        for attempt in job["attempts"]:
            check_attempt(attempt)
    totals = results["totals"]
    states = [job["state"] for job in results["jobs"]]
    assert {name: totals[name] for name in ("waiting", "running", "done", "failed", "cancelled")} == {
        name: states.count(name) for name in ("waiting", "running", "done", "failed", "cancelled")
    }
    assert totals["jobs"] == len(states)
    assert totals["attempts"] == sum(len(job["attempts"]) for job in results["jobs"])
    assert sorted(set(totals) - {"jobs", "waiting", "running", "done", "failed", "cancelled", "attempts"}) == [
        "seconds", "slot_seconds",
    ]  # fmt: skip


def check_attempt(attempt: dict[str, Any]) -> None:
    assert sorted(attempt) == sorted(
        ["number", "server", "slots", "gpus", "start", "end", "seconds", "exit_code", "signal", "peak_memory",
         "failure", "reason", "last_lines"]
    )  # fmt: skip
    assert is_number(attempt["start"])
    assert (attempt["end"] is None) == (attempt["seconds"] is None)
    assert attempt["end"] is None or attempt["end"] >= attempt["start"]


Observed = tuple[Path, list[dict[str, Any]], list[str]]


@pytest.fixture(scope="module")
def observed(forked: Dispatchers, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """A finished list: its directory, and the versions of results.json and the command lines read while it ran.

    The first job waits until results.json has shown it as running.
    """
    directory = prepared(tmp_path_factory.mktemp("list"), JOBS)
    path = directory / "results.json"
    documents: list[dict[str, Any]] = []
    lines: set[str] = set()
    with ThreadPoolExecutor(1) as pool:
        running: Future[int] = pool.submit(forked.run, DispatcherCall(directory, RUN))
        while not running.done():
            if path.exists():
                documents.append(json.loads(path.read_text()))
                lines |= set(command_lines())
                if any("job.sh" in line and "good" in line for line in lines) and running_jobs(documents[-1]):
                    (directory / "go").touch()
    assert running.result() == 1  # some jobs failed
    documents.append(json.loads(path.read_text()))
    return directory, documents, sorted(lines)


def running_jobs(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [job for job in results["jobs"] if job["state"] == "running" and job["attempts"]]


def command_lines() -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                yield (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:  # the process has exited
                continue


# ---------------------------------------------------------------- while the list runs


def test_results_are_valid_whenever_they_are_read(observed: Observed) -> None:
    _, documents, _ = observed
    for found in documents:
        check_contract(found)
    assert len({found["updated"] for found in documents}) > 1
    assert (documents[0]["state"], documents[-1]["state"]) == ("running", "finished")
    updated = [found["updated"] for found in documents]
    assert updated == sorted(updated)


def test_a_running_job_is_in_the_results(observed: Observed) -> None:
    _, documents, _ = observed
    running = [job for found in documents for job in running_jobs(found)]
    assert running
    assert all(attempt["end"] is None for job in running[:1] for attempt in job["attempts"])


def test_no_value_of_the_environment_is_in_a_file_or_a_command_line(observed: Observed) -> None:
    directory, documents, lines = observed
    assert documents[-1]["jobs"][0]["options"]["env"] == ["TOKEN"]
    output = directory / documents[-1]["jobs"][0]["output"]
    assert (output / "token").read_text().split()[0] == hashlib.sha256(TOKEN.encode()).hexdigest()  # it reached the job
    assert any("job.sh" in line and "good" in line for line in lines)  # command lines were read while the job ran
    assert not [line for line in lines if TOKEN[:12] in line]
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != "jobs.json"]
    assert len(files) > 20
    assert not [path for path in files if TOKEN[:12].encode() in path.read_bytes()]


# ---------------------------------------------------------------- content


def test_each_job_has_its_settings_state_and_output(observed: Observed) -> None:
    _, documents, _ = observed
    for entry, job in zip(JOBS, documents[-1]["jobs"], strict=True):
        settings = {key: value for key, value in entry.items() if not key.startswith("_")}
        made = job_of(settings, Options())
        assert (job["id"], job["settings"], job["output"], job["name"]) == (made.id, settings, made.output, made.name)
    states = {job["settings"]["kind"]: job["state"] for job in documents[-1]["jobs"]}
    assert states == {"good": "done", "bad": "failed", "killed": "failed", "slow": "failed", "absent": "failed"}
    assert documents[-1]["jobs"][0]["metrics"] == {"step": 2, "steps": 2, "loss": 1.5, "held_out_loss": 3}
    assert documents[-1]["jobs"][1]["metrics"] == {"step": 2, "steps": 2, "loss": "NaN", "x": "NaN"}
    assert documents[-1]["jobs"][0]["options"] == {"env": ["TOKEN"], "expected_seconds": 3.0}
    assert documents[-1]["servers"]["local"]["state"] == "ready"


def test_status_shows_that_the_last_loss_is_not_finite(forked: Dispatchers, observed: Observed) -> None:
    assert forked.run(DispatcherCall(observed[0], ("status",))) == 1
    lines = (observed[0] / "printed").read_text().splitlines()
    assert any(re.search(r"e/fold1 +failed.* 2/2 +nan *$", line) for line in lines), "\n".join(lines)


def test_each_attempt_has_its_failure(observed: Observed) -> None:
    _, documents, _ = observed
    attempts = {job["settings"]["kind"]: job["attempts"] for job in documents[-1]["jobs"]}
    fields = ("number", "server", "exit_code", "signal", "failure", "reason", "last_lines")
    ended = {kind: [tuple(each[name] for name in fields) for each in found] for kind, found in attempts.items()}
    assert ended["good"] == [(1, "local", 0, None, "", "", [])]
    bad = ("local", 3, None, "exit code", "exit code 3: two", ["one", "two"])
    assert ended["bad"] == [(1, *bad), (2, *bad)]
    assert ended["killed"][0][2:5] == (137, "SIGKILL", "signal")
    assert ended["slow"][0][2:6] == (143, "SIGTERM", "timeout", "the command has run for 1 s (_timeout)")
    (absent,) = ended["absent"]
    assert absent[2:5] == (127, None, "exit code")
    assert "/no/such/program" in absent[5]
    for found in attempts.values():
        for each in found:
            assert each["peak_memory"] > 100_000
            assert each["seconds"] == pytest.approx(each["end"] - each["start"])
    assert 0.5 <= attempts["good"][0]["seconds"] < SECONDS
    assert 1.0 <= attempts["slow"][0]["seconds"] < SECONDS


def test_totals_include_all_attempts(observed: Observed) -> None:
    directory, documents, _ = observed
    totals = documents[-1]["totals"]
    assert (totals["jobs"], totals["done"], totals["failed"], totals["attempts"]) == (5, 1, 4, 6)
    used = sum(attempt["seconds"] for job in documents[-1]["jobs"] for attempt in job["attempts"])
    assert totals["slot_seconds"] == pytest.approx(used, abs=0.01)
    end = max(attempt["end"] for job in documents[-1]["jobs"] for attempt in job["attempts"])
    assert totals["seconds"] == pytest.approx(end - documents[-1]["created"], abs=0.01)
    assert "results.json" in (directory / "printed").read_text()
    assert (directory / "results.html").stat().st_size > 1000


def test_resuming_a_finished_list_does_not_change_its_totals_and_page(forked: Dispatchers, tmp_path: Path) -> None:
    directory = prepared(tmp_path, [{"kind": "quick"}])
    documents = []
    for arguments in (RUN, ("resume",)):
        assert forked.run(DispatcherCall(directory, arguments)) == 0
        documents.append(json.loads((directory / "results.json").read_text()))
    first, second = documents
    assert second["updated"] > first["updated"]
    assert second["totals"] == first["totals"]
    assert "warning" not in (directory / "results.html").read_text().partition("<body>")[2]


ATTEMPT = "0000000001.1"
START = {"event": "start", "time": 1e9 + 10, "attempt": ATTEMPT, "server": "a", "slots": [0, 1], "gpus": [0, 1]}
ENDED = {"event": "ended", "time": 1e9 + 40, "attempt": ATTEMPT, "failure": "", "reason": ""}


@pytest.mark.parametrize(
    ("outcome", "records", "seconds"),
    [
        ("running", [], 100),
        ("running", [START, ENDED], 100),
        ("interrupted", [START], 100),  # the job continues
        ("interrupted", [START, ENDED], 40),
        ("paused", [START, ENDED], 40),
        ("finished", [START, ENDED], 40),
        ("cancelled", [], 0),
    ],
)
def test_the_wall_time_ends_with_the_last_attempt_if_nothing_runs(
    outcome: str, records: list[dict[str, Any]], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9 + 100)
    listed = {"id": ATTEMPT[:-2], "settings": {}, "options": {}, "output": "x"}
    state = ListState.of([{"event": "list", "time": 1e9, "list": "abc", "jobs": [listed]}, *records])
    assert document(state, {}, outcome)["totals"]["seconds"] == seconds


# ---------------------------------------------------------------- writing


@pytest.fixture
def state() -> ListState:
    made = ListState()
    jobs = [job_of({"n": number}, Options(env={"TOKEN": TOKEN})) for number in range(3)]
    made.apply({"event": "list", "time": 1e9, "list": "abc", "script": "x.py", "jobs": job_records(jobs)})
    return made


def test_changed_results_are_written_after_a_minimum_interval_and_the_last_ones_at_once(
    tmp_path: Path, state: ListState
) -> None:
    path = tmp_path / "results.json"
    results = Results(path, state, {})
    results.write()
    first = path.stat().st_mtime_ns
    results.write()
    results.changed = True
    results.write()  # too early
    assert path.stat().st_mtime_ns == first
    results.write("finished", last=True)
    assert json.loads(path.read_text())["state"] == "finished"
    assert [entry.name for entry in sorted(tmp_path.iterdir())] == ["results.html", "results.json"]


def test_a_failed_write_keeps_the_old_results_and_is_retried(
    tmp_path: Path, state: ListState, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    results = Results(path, state, {})
    results.write(last=True)
    before = path.read_text()

    def full(path: str, text: str, mode: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("distributed.jobs.show.results.write_file", full)
        results.write("finished", last=True)
    assert results.error == f"{path}: No space left on device"
    assert path.read_text() == before
    results.write("finished", last=True)
    assert (results.error, json.loads(path.read_text())["state"]) == ("", "finished")


def test_a_failed_write_of_the_page_does_not_stop_the_list(
    tmp_path: Path, state: ListState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(page, "write", full)
    Results(tmp_path / "results.json", state, {}).write(last=True)
    assert (tmp_path / "results.json").exists()


@pytest.mark.parametrize("exists", [False, True])
def test_results_page_and_journal_are_written_through_symbolic_links(
    exists: bool, forked: Dispatchers, tmp_path: Path
) -> None:
    for name in ("list", "disk"):
        (tmp_path / name).mkdir()
    directory = prepared(tmp_path / "list", [{"kind": "good"}])
    names = ("my.json", "my.html", "my.journal")
    for name in names:
        (directory / name).symlink_to(f"../disk/{name}")
        if exists:
            (tmp_path / "disk" / name).touch()
    (directory / "go").touch()
    assert forked.run(DispatcherCall(directory, (*RUN, "--log-file", "my.json"))) == 0
    assert all((directory / name).readlink() == Path(f"../disk/{name}") for name in names)
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == sorted(names)
    assert json.loads((tmp_path / "disk" / "my.json").read_text())["totals"]["done"] == 1
    assert "</html>" in (tmp_path / "disk" / "my.html").read_text()
    call = DispatcherCall(directory, ("status", "--log-file", "my.json"))
    assert (forked.run(call), "1 done" in call.printed) == (0, True)
