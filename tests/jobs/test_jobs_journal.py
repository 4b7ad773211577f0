"""The journal of a job list survives kills, full disks and concurrent writers.

Readers of a journal get only its committed records. The dispatcher gets each request once. The state read from a
journal equals the state of the dispatcher that wrote it.
"""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.jobs.journal import journal
from distributed.jobs.journal.journal import Journal, JournalError, Record
from distributed.jobs.journal.state import ListState, job_records
from distributed.jobs.lists.job import Options, job_of

KIT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.journal"


def numbers(records: list[Record]) -> list[int]:
    return [record["n"] for record in records if record["event"] == "x"]


def add(book: Journal, *which: int) -> None:
    for number in which:
        book.add("x", n=number)


def pending(book: Journal) -> bool:
    return book.pending


# ---------------------------------------------------------------- committed records


def test_only_committed_records_are_read(path: Path) -> None:
    with Journal.open(path) as book:
        add(book, 1, 2)
        book.commit()
        assert not pending(book)
        add(book, 3)
        assert pending(book)
        assert numbers(journal.read(path)[0]) == [1, 2]
        book.commit()
        add(book, 4)
    with Journal.open(path) as book:
        assert numbers(book.records) == [1, 2, 3]


TEXT = ["", "a\nb\r\n\u2028\x18\0", "é日本", '"\\', "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")]


def test_a_record_may_contain_any_text(path: Path) -> None:
    with Journal.open(path) as book:
        book.add("x", n=0, text=TEXT)
        book.commit()
    assert journal.read(path)[0][0]["text"] == TEXT
    assert path.read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("cut", [1, 5, -2, -1])
def test_a_truncated_line_is_ignored_and_later_lines_are_read(path: Path, cut: int) -> None:
    whole = journal.encode({"event": "x", "n": 1})
    path.write_bytes(whole + journal.encode({"event": "x", "n": 2})[:cut])
    for number in (3, 4):
        with Journal.open(path) as book:
            add(book, number)
            book.commit()
    assert numbers(journal.read(path)[0]) == [1, 3, 4]


def test_the_state_of_a_list_does_not_keep_the_records(path: Path) -> None:
    """A list of 50,000 jobs has 200,000 records."""
    many = [journal.encode({"event": "of a newer version", "n": n, "text": "x" * 200}) for n in range(20_000)]
    path.write_bytes(b"".join(many))
    journal.request(path, "retry", ["a"])
    tracemalloc.start()
    try:
        state = ListState.of(journal.records(path))
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
    assert gc.isenabled()
    assert [request["jobs"] for request in state.unhandled_requests()] == [["a"]]
    assert list(journal.records(path)) == journal.read(path)[0]


def test_a_request_after_a_truncated_line_is_read(path: Path) -> None:
    path.write_bytes(journal.encode({"event": "x", "n": 1}) + b'{"event":"x","n":2')
    journal.request(path, "cancel", ["a"])
    with Journal.open(path) as book:
        assert [record["event"] for record in book.records] == ["x", "cancel"]
        assert book.requests() == []  # book.records already contains the request


DAMAGED = [b'{"event": "x", "n"', b"null", b"[]", b'{"n": 1}', b'{"event": 1}', b"", b"[" * 99_999]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_is_reported_with_its_number(path: Path, line: bytes) -> None:
    path.write_bytes(b'{"event":"x","n":1}\n' + line + b'\n{"event":"x","n":2}\n')
    message = r"results\.journal, line 2: damaged; .* Restore the file, or use another"
    with pytest.raises(JournalError, match=message), Journal.open(path):
        pass


def test_a_damaged_journal_is_not_left_locked(path: Path) -> None:
    path.write_bytes(b"damaged\n")
    for _ in range(2):  # the failed call has released the lock
        with pytest.raises(JournalError, match="line 1: damaged"), Journal.open(path):
            pass


# ---------------------------------------------------------------- a full disk


class LimitedDisk:
    """os.write and os.fdatasync as on a disk with `left` free bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 1 << 40
        self.syncs = True
        self._write, self._sync = os.write, os.fdatasync
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "fdatasync", self.sync)

    def write(self, file: int, data: bytes) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(file, data[: self.left])
        self.left -= written
        return written

    def sync(self, file: int) -> None:
        if not self.syncs:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._sync(file)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> LimitedDisk:
    return LimitedDisk(monkeypatch)


@pytest.mark.parametrize("left", [0, 1, 50, 100, 150])
def test_a_full_disk_during_a_commit_neither_loses_nor_repeats_records(
    path: Path, disk: LimitedDisk, left: int
) -> None:
    with Journal.open(path) as book:
        add(book, 1)
        book.commit()
        add(book, 2, 3, 4, 5)
        disk.left = left
        with pytest.raises(OSError, match="No space left"):
            book.commit()
        assert pending(book)
        for left in (1, 2, 30):  # each time a little space is free
            disk.left = left
            with pytest.raises(OSError, match="No space left"):
                book.commit()
            read = numbers(journal.read(path)[0])
            assert read == [1, 2, 3, 4, 5][: len(read)]
        disk.left = 1 << 40
        add(book, 6)
        book.commit()
        assert not pending(book)
    assert numbers(journal.read(path)[0]) == [1, 2, 3, 4, 5, 6]


def test_a_failed_sync_is_repeated_by_the_next_commit(path: Path, disk: LimitedDisk) -> None:
    with Journal.open(path) as book:
        add(book, 1)
        disk.syncs = False
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error"):
                book.commit()
            assert pending(book)  # the dispatcher must not act on the record yet
        disk.syncs = True
        book.commit()
        assert not pending(book)
    assert numbers(journal.read(path)[0]) == [1]


@pytest.mark.parametrize("left", [0, 1, 20])
def test_a_request_on_a_full_disk_fails_without_damage(path: Path, disk: LimitedDisk, left: int) -> None:
    with Journal.open(path) as book:
        add(book, 1)
        book.commit()
        disk.left = left
        with pytest.raises(OSError, match="No space left"):
            journal.request(path, "cancel", ["a"])
        disk.left = 1 << 40
        journal.request(path, "retry", ["b"])
        add(book, 2)
        book.commit()
        assert [request["jobs"] for request in book.requests()] == [["b"]]
    assert [record.get("n", record.get("jobs")) for record in journal.read(path)[0]] == [1, ["b"], 2]


def test_no_record_is_lost_on_a_real_full_disk(tmp_path: Path, mount: Callable[[Path, str], None]) -> None:
    disk = tmp_path / "disk"
    mount(disk, "64k")
    ballast, path = disk / "ballast", disk / "results.journal"
    with Journal.open(path) as book:
        ballast.write_bytes(b"x" * 40_000)
        book.add("x", n=1, text="y" * 40_000)
        add(book, 2)
        with pytest.raises(OSError, match="No space left"):
            book.commit()
        ballast.unlink()
        journal.request(path, "cancel", ["a"])
        book.commit()
        assert [request["jobs"] for request in book.requests()] == [["a"]]
    assert numbers(journal.read(path)[0]) == [1, 2]


# ---------------------------------------------------------------- several processes


def test_only_one_dispatcher_can_open_the_journal(path: Path) -> None:
    assert not journal.dispatcher_is_running(path)
    with Journal.open(path):
        assert journal.dispatcher_is_running(path)
        message = "a dispatcher already runs this list; check it with `status`"
        with pytest.raises(JournalError, match=message), Journal.open(path):
            pass
    assert not journal.dispatcher_is_running(path)
    with Journal.open(path):
        pass


def test_checking_for_a_dispatcher_does_not_prevent_a_dispatcher_from_starting(path: Path) -> None:
    path.touch()
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            journal.dispatcher_is_running(path)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(100):
            with Journal.open(path):
                pass
    finally:
        ended.set()
        thread.join()


ASK = """
import sys
from pathlib import Path
from distributed.jobs.journal import journal
for number in range(int(sys.argv[2])):
    journal.request(Path(sys.argv[1]), "cancel", [f"{sys.argv[3]}{number}"])
"""


def test_concurrent_requests_are_each_read_once(path: Path) -> None:
    count = 150
    with Journal.open(path) as book:
        command = [sys.executable, "-c", ASK, str(path), str(count)]
        others = [subprocess.Popen([*command, name], cwd=KIT) for name in ("a", "b")]
        read: list[str] = []
        written = 0
        while any(other.poll() is None for other in others) or written < 50:
            add(book, written, -written)
            written += 1
            book.commit()
            read += [job for request in book.requests() for job in request["jobs"]]
        read += [job for request in book.requests() for job in request["jobs"]]
        assert all(other.wait() == 0 for other in others)
    expected = sorted(f"{name}{number}" for name in ("a", "b") for number in range(count))
    assert sorted(read) == expected
    records = journal.read(path)[0]
    assert numbers(records) == [number for each in range(written) for number in (each, -each)]
    assert sorted(job for record in records if record["event"] == "cancel" for job in record["jobs"]) == expected


def test_requests_written_during_a_commit_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are written just before the write or the sync of a commit."""
    write, sync = os.write, os.fdatasync

    def patched(name: str, call: Any) -> Any:
        def patch(*arguments: Any) -> Any:
            if moment == name and not asked:
                asked.append(name)
                journal.request(path, "cancel", [name])
            return call(*arguments)

        return patch

    monkeypatch.setattr(os, "write", patched("write", write))
    monkeypatch.setattr(os, "fdatasync", patched("sync", sync))
    with Journal.open(path) as book:
        for number, moment in enumerate(["write", "sync", "write", "sync"]):
            asked: list[str] = []
            add(book, number)
            book.commit()
            assert [request["jobs"] for request in book.requests()] == [[moment]]
            assert book.requests() == []
    assert numbers(journal.read(path)[0]) == [0, 1, 2, 3]


# ---------------------------------------------------------------- the state read from a journal

JOBS = [job_of({"n": number}, Options(retries=number % 3, labels=("x",) * (number % 2))) for number in range(4)]
COMMANDS = st.lists(
    st.tuples(
        st.sampled_from(
            ["start", "running", "not_started", "ended", "lost", "lost_ended", "settle", "request_handled", "pause",
             "list", "added", "unknown", "cancel"]
        ),
        st.integers(0, 3), st.integers(0, 9), st.sampled_from(["", "exit code", "server lost", "cancelled"]),
    ),
    max_size=40,
)  # fmt: skip


def possible(state: ListState, which: int, number: int, failure: str) -> dict[str, dict[str, Any]]:
    """The records that a dispatcher could write in this state: event -> facts."""
    records: dict[str, dict[str, Any]] = {
        "list": {"list": "abc", "jobs": job_records(JOBS[which:])},
        "added": {"request": f"a{number}", "jobs": job_records(JOBS[: number % 4])},
        "pause": {"reason": f"because of {number}"},
        "unknown": {"of": "a newer version"},
        "cancel": {"jobs": [JOBS[which].id]},
    }
    job = state.jobs.get(JOBS[which].id)
    if not job:
        return records
    jobs = state.select_jobs("cancel", [job.job.id])
    records["request_handled"] = {"request": f"r{number}", "what": "cancel" if number % 2 else "retry", "jobs": jobs}
    verdict = ["done", "failed", "waiting", "cancelled"][number % 4]
    if job.state == "ending" or (job.state == "waiting" and verdict == "cancelled"):
        records["settle"] = {"job": job.job.id, "state": verdict, "reason": failure}
    if job.state == "waiting":
        name = f"{job.job.id}.{job.next_number}"
        records["start"] = {"attempt": name, "server": f"s{number % 2}", "slots": [number], "gpus": []}
    if job.last and job.last.open:
        attempt = {"attempt": job.last.name}
        end = attempt | {"failure": failure, "reason": failure, "code": number, "metrics": {"loss": number / 3}}
        records |= {"running": attempt | {"process": {"pid": number}}, "ended": end, "lost": end}
        if job.last.state == "starting":
            records["not_started"] = attempt | {"reason": failure}
    elif job.last and job.last.state == "lost":
        records["lost_ended"] = {"attempt": job.last.name}
    return records


def facts_of(state: ListState) -> dict[str, Any]:
    known = dict(vars(state)) | {"jobs": {name: dataclasses.asdict(each) for name, each in state.jobs.items()}}
    return known | {"open": {name: dataclasses.asdict(each) for name, each in state.open.items()}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journal")


@given(COMMANDS)
def test_the_state_read_from_a_journal_equals_that_of_its_dispatcher(
    directory: Path, commands: list[tuple[str, int, int, str]]
) -> None:
    path = directory / "results.journal"
    path.unlink(missing_ok=True)
    with Journal.open(path) as book:
        live = ListState()
        live.apply(book.add("list", list="abc", jobs=job_records(JOBS)))
        for what, which, number, failure in commands:
            if facts := possible(live, which, number, failure).get(what):
                live.apply(book.add(what, **facts))
        book.commit()
    restored = ListState.of(journal.read(path)[0])
    assert facts_of(restored) == facts_of(live)
    counted = {state: [each.state for each in live.jobs.values()].count(state) for state in live.counts}
    assert counted == live.counts
    assert sorted(live.open) == sorted(a.name for each in live.jobs.values() for a in each.attempts if a.open)
    assert restored.open.keys() <= {a.name for each in restored.jobs.values() for a in each.attempts}
    assert all(
        restored.open[name] is restored.attempt(name) for name in restored.open
    )  # one object, not two that are equal


def test_a_journal_of_a_newer_version_can_be_read(path: Path) -> None:
    lines = [
        {"event": "list", "time": 1.0, "list": "abc", "jobs": job_records(JOBS), "more": 1},
        {"event": "moved", "time": 2.0, "attempt": "x.1"},
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert list(ListState.of(journal.read(path)[0]).jobs) == [job.id for job in JOBS]
