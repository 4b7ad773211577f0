"""What was decided about a job list, written down before it is done: one JSON object a line, only ever appended.

    with Journal.open(path) as journal:            # the only dispatcher of this list
        journal.add("start", attempt="3fa2b1c09d.1", server="gpu1")
        journal.commit()                           # on the disk now; act after this

Other programs add requests (`cancel`, `retry`) with `request`; the dispatcher reads them by `requests()`. A line
without an end was cut off by a crash or a full disk: it is left out, as what it announced was never done. Whoever
writes next ends it with CUT. Nothing is ever removed, as somebody else may have written behind it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

REQUESTS = ("cancel", "retry")
CUT = b"\x18"  # the last character of a line that was cut off; JSON has none
MOMENT = 0.5  # seconds in which the lock must be free

Record = dict[str, Any]


class JournalError(Exception):
    """The journal cannot be used: subject, problem, value, remedy."""


class Journal:
    """The file, held open and locked by the dispatcher."""

    def __init__(self, path: Path, file: int, records: list[Record], size: int) -> None:
        self.path, self.records = path, records
        self._file = file
        self._size = size  # bytes read so far
        self._pending: list[Record] = []
        self._unsynced = False  # something is written, and perhaps not on the disk
        self._requests: list[Record] = []

    @classmethod
    def open(cls, path: Path) -> Journal:
        """Take the journal, and read what it holds. Raises JournalError and OSError."""
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not locked(file):
            os.close(file)
            raise JournalError(
                f"{path}: a dispatcher is working on this list already; see it by `status`, or end that one first"
            )
        try:
            return cls(path, file, *read(path))
        except BaseException:
            os.close(file)
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the list free."""
        os.close(self._file)

    def add(self, event: str, **facts: Any) -> Record:
        """Remember a record for the next commit."""
        record = {"event": event, "time": round(time.time(), 3), **facts}
        self._pending.append(record)
        return record

    @property
    def pending(self) -> bool:
        """Whether there is something to commit."""
        return bool(self._pending) or self._unsynced

    def commit(self) -> None:
        """Write and fsync what was added. Raises OSError; the next call goes on with what was not written."""
        while self._pending:
            lines = [line(record) for record in self._pending]
            start = self._read_requests()
            left = os.write(self._file, start + b"".join(lines)) - len(start)
            self._unsynced = True
            whole = 0
            while whole < len(lines) and left >= len(lines[whole]):  # on a full disk not all of them
                left -= len(lines[whole])
                whole += 1
            del self._pending[:whole]
        if self._unsynced:
            os.fdatasync(self._file)
            self._unsynced = False
            self._read_requests()

    def requests(self) -> list[Record]:
        """What others have asked for since the last call."""
        self._read_requests()
        found, self._requests = self._requests, []
        return found

    def _read_requests(self) -> bytes:
        """From all that was written behind what is known: a request may stand before this process's own records.

        Returns what must be written before the next record.
        """
        size = os.fstat(self._file).st_size
        if size <= self._size:
            return b""
        data = os.pread(self._file, size - self._size, self._size)
        whole, end, rest = data.rpartition(b"\n")
        self._size += len(whole + end)
        self._requests += requests_in(whole)
        return CUT + b"\n" if rest else b""


def locked(file: int) -> bool:
    """Lock it for this process. dispatcher_runs() of others holds it for moments."""
    end = time.monotonic() + MOMENT
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
        time.sleep(0.02)


def line(record: Record) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def requests_in(data: bytes) -> Iterator[Record]:
    beginnings = tuple(line({"event": event})[:-2] for event in REQUESTS)
    for text in data.split(b"\n"):
        if text.startswith(beginnings) and not text.endswith(CUT):
            with contextlib.suppress(ValueError):
                yield json.loads(text)


def read(path: Path) -> tuple[list[Record], int]:
    """All records, and the bytes of the complete lines. Raises JournalError where a complete line is not a record."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    records = []
    for number, text in enumerate(whole.split(b"\n")[:-1], 1):
        if text.endswith(CUT):
            continue
        try:
            record = json.loads(text)
            if not isinstance(record, dict) or not isinstance(record.get("event"), str):
                raise ValueError
        except (ValueError, RecursionError):
            raise JournalError(
                f"{path}, line {number}: damaged; what was started is not known for certain. Restore the file, or use "
                "another --log-file"
            ) from None
        records.append(record)
    return records, len(whole)


def begun(path: Path) -> bool:
    """Whether a list was written down: its dispatcher may have ended before that. Raises OSError."""
    with path.open("rb") as file:
        return any(text.startswith(b'{"event":"list"') and text.endswith(b"}\n") for text in file)


def request(path: Path, event: str, jobs: Sequence[str]) -> None:
    """Ask the dispatcher of this list for something; the next one, where none runs. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_APPEND)
    try:
        size = os.fstat(file).st_size
        whole = size == 0 or os.pread(file, 1, size - 1) == b"\n"
        data = line({"event": event, "time": round(time.time(), 3), "jobs": list(jobs)})
        data = data if whole else CUT + b"\n" + data
        if os.write(file, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(file)
    finally:
        os.close(file)


def dispatcher_runs(path: Path) -> bool:
    """Whether a dispatcher works on this list."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
