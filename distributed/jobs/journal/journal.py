"""The write-ahead log of a job list: one JSON object per line, append-only.

    with Journal.open(path) as journal:            # locks the file: a list has only one dispatcher
        journal.add("start", attempt="3fa2b1c09d.1", server="gpu1")
        journal.commit()                           # writes and syncs the record; now the attempt may be started

Other processes append requests (`cancel`, `retry`, `add`) with request(); the dispatcher reads them with
Journal.requests(). A line without a newline was truncated by a crash or a full disk. The line can be ignored, because
the dispatcher carries out a decision only after its record was written completely. The next writer terminates the line
with TRUNCATED. The line is not removed, because another process may have appended lines after it.

A journal names programs and configurations, which its readers use. So only its owner may use it, and it is private.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from distributed.files import is_locked, try_lock, user_file
from distributed.trust import PRIVATE, checked, foreign, parse_json, regular_file

REQUESTS = ("cancel", "retry", "add")
REQUEST = {"event": str, "time": float, "jobs": list[str]}  # see trust.checked()
TRUNCATED = b"\x18"  # the last character of a truncated line; never part of JSON
LOCK_TIMEOUT = 0.5  # seconds; dispatcher_is_running() holds the lock briefly

Record = dict[str, Any]


class JournalError(Exception):
    """The journal cannot be used. The message states problem and remedy."""


class Journal:
    """The journal, opened and locked by the dispatcher."""

    def __init__(self, path: Path, file: int, records: list[Record], size: int) -> None:
        self.path, self.records = path, records
        self._file = file
        self._size = size  # bytes read so far
        self._pending: list[Record] = []
        self._unsynced = False  # whether written records are not synced yet
        self._requests: list[Record] = []

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path) -> Iterator[Journal]:
        """Lock and read the journal; close and unlock it at the end. Raises JournalError and OSError."""
        file = open_journal(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            os.fchmod(file, PRIVATE)  # otherwise others could lock it; earlier versions created it with mode 0644
            if not try_lock(file, seconds=LOCK_TIMEOUT, required=True):
                raise JournalError(
                    f"{path}: a dispatcher already runs this list; check it with `status`, or stop it first"
                )
            yield cls(path, file, *read(path))
        finally:
            os.close(file)

    def add(self, event: str, **facts: Any) -> Record:
        """Return a new record, which the next commit writes."""
        record = {"event": event, "time": round(time.time(), 3), **facts}
        self._pending.append(record)
        return record

    @property
    def pending(self) -> bool:
        """Whether records are not committed yet."""
        return bool(self._pending) or self._unsynced

    def commit(self) -> None:
        """Write and sync the added records. Raises OSError; the next call then continues with the unwritten records."""
        while self._pending:
            lines = [encode(record) for record in self._pending]
            start = self._read_appended()
            left = os.write(self._file, start + b"".join(lines)) - len(start)
            self._unsynced = True
            complete = 0
            while complete < len(lines) and left >= len(lines[complete]):  # a full disk may have truncated the write
                left -= len(lines[complete])
                complete += 1
            del self._pending[:complete]
        if self._unsynced:
            os.fdatasync(self._file)
            self._unsynced = False
            self._read_appended()

    def requests(self) -> list[Record]:
        """The requests that other processes have appended since the last call."""
        self._read_appended()
        found, self._requests = self._requests, []
        return found

    def _read_appended(self) -> bytes:
        """Read the requests in the bytes appended since the last call, which include this process's own records.

        Returns the bytes to write before the next record: they terminate a truncated line, and are empty without one.
        """
        size = os.fstat(self._file).st_size
        if size <= self._size:
            return b""
        data = os.pread(self._file, size - self._size, self._size)
        complete, end, truncated = data.rpartition(b"\n")
        self._size += len(complete + end)
        self._requests += requests_in(complete)
        return TRUNCATED + b"\n" if truncated else b""


def open_journal(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a journal. Raises JournalError if others own it or can write to it, and OSError."""
    found = user_file(path)
    try:
        file = regular_file(found, flags)
    except PermissionError:
        if problem := foreign(path, os.stat(found)):
            raise JournalError(problem) from None
        raise
    if problem := foreign(path, os.fstat(file)):
        os.close(file)
        raise JournalError(problem)
    return file


def encode(record: Record) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def requests_in(data: bytes) -> Iterator[Record]:
    beginnings = tuple(encode({"event": event})[:-2] for event in REQUESTS)  # without the closing brace
    for text in data.split(b"\n"):
        if text.startswith(beginnings) and not text.endswith(TRUNCATED):
            with contextlib.suppress(ValueError):
                yield checked(REQUEST, parse_json(text))


def read(path: Path) -> tuple[list[Record], int]:
    """Return all records, and the size of the complete lines in bytes. Raises JournalError for an invalid line."""
    with open(open_journal(path), "rb") as file:
        data = file.read()
    return list(_parsed(path, io.BytesIO(data))), data.rfind(b"\n") + 1


def records(path: Path) -> Iterator[Record]:
    """Yield all records, without keeping them in memory. Raises JournalError for an invalid line."""
    with open(open_journal(path), "rb") as file:
        yield from _parsed(path, file)


def _parsed(path: Path, file: BinaryIO) -> Iterator[Record]:
    for number, text in enumerate(file, 1):
        if text.endswith(TRUNCATED + b"\n") or not text.endswith(b"\n"):
            continue
        try:
            record = json.loads(text.decode())  # not parse_json(), because a long list has many records
            if not isinstance(record, dict) or not isinstance(record.get("event"), str):
                raise ValueError
        except (ValueError, RecursionError):
            raise JournalError(
                f"{path}, line {number}: damaged; cannot tell which jobs were started. Restore the file, or use "
                "another --log-file"
            ) from None
        yield record


def has_list(path: Path) -> bool:
    """Whether the journal has a `list` record: a dispatcher may have been killed before writing it. Raises OSError."""
    with open(open_journal(path), "rb") as file:
        return any(text.startswith(b'{"event":"list"') and text.endswith(b"}\n") for text in file)


def request(path: Path, event: str, jobs: Sequence[str]) -> Record:
    """Append a request for the dispatcher of this list; if none runs, the next one handles it. Raises OSError.

    jobs: ids. For `add`: the path of the jobs file instead, as the journal must not contain values of _env.
    """
    record = {"event": event, "time": round(time.time(), 3), "jobs": list(jobs)}
    file = open_journal(path, os.O_RDWR | os.O_APPEND)
    try:
        size, data = os.fstat(file).st_size, encode(record)
        if size and os.pread(file, 1, size - 1) != b"\n":
            data = TRUNCATED + b"\n" + data
        if os.write(file, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(file)
    finally:
        os.close(file)
    return record


def request_id(request: Record) -> str:
    return f"{request['event']} {request['time']} {' '.join(request['jobs'])}"


def dispatcher_is_running(path: Path) -> bool:
    """Whether a dispatcher runs this list."""
    return is_locked(user_file(path))
