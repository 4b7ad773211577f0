"""The checkpoints in a directory: write, publish, find, remove.

A checkpoint is a directory, `step_00000120/`. Its manifest.json holds the SHA-256 of every other file and of its own
content. The directory is written as `step_00000120.writing-<host>-<pid>`, synced to disk, and renamed. So a published
checkpoint is complete, and the checksums show later damage. A damaged or unreadable checkpoint is skipped if another
one is valid. If checkpoints exist but none is usable, that is an error; it is never treated as "no checkpoint".

Standard library only.

Try it: python -m distributed.checkpoint.directory DIRECTORY    lists the checkpoints and checks every byte
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import io
import json
import logging
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

STEP = re.compile(r"step_(\d{8,})(\.old)?")
LEFTOVER = re.compile(r"step_\d{8,}\.(?:writing|removing)-(?P<host>.+)-(?P<pid>\d+)")
MIB = 2**20
ABANDONED_AFTER = 3600.0  # seconds without a change to the unfinished checkpoint of another host
# Errors of a file system that has no locks, or that cannot sync a directory.
UNSUPPORTED = {errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}

FileEntries = dict[str, dict[str, Any]]  # file name -> {"bytes", "sha256"}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or used."""


# ---- finding ----


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint as its manifest describes it."""

    path: Path
    step: int
    score: float | None  # lower is better, for example the held-out loss
    ranks: int  # world size of the run that wrote it
    sharded: bool
    written: str  # ISO 8601 with zone
    facts: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]  # name -> {"bytes", "sha256"}

    @classmethod
    def read(cls, path: Path) -> CheckpointInfo:
        """Read the manifest only. Raises CheckpointError when it is missing, unreadable or damaged."""
        file = path / "manifest.json"
        fields = ("step", "score", "ranks", "sharded", "written", "facts", "files")
        try:
            manifest = json.loads(file.read_bytes())
            checksum = manifest.pop("sha256")
            found = cls(path, **{field: manifest[field] for field in fields})
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{file}: damaged: not a valid manifest: {error!r}") from error
        if checksum != _checksum(manifest):
            raise CheckpointError(f"{file}: its checksum does not match: it is damaged")
        return found

    @property
    def bytes(self) -> int:
        """Size of all files except the manifest."""
        return sum(file["bytes"] for file in self.files.values())

    def check_sharding(self, sharded: bool) -> None:
        """Raise CheckpointError if the checkpoint is sharded and this run's are not, or the reverse."""
        if self.sharded != sharded:
            was, now = ("sharded", "unsharded") if self.sharded else ("unsharded", "sharded")
            raise CheckpointError(
                f"{self.path} is {was}, but this run uses {now} checkpoints; resume with the strategy "
                f"of the run that wrote it, or set another checkpoint directory"
            )

    def fault(self) -> str | None:
        """Return the first fault of its files, or None. Reads every byte, several files at once."""
        with ThreadPoolExecutor() as pool:
            return next(filter(None, pool.map(self._fault_of, self.files)), None)

    def _fault_of(self, name: str) -> str | None:
        file, expected = self.path / name, self.files[name]
        try:
            if (size := file.stat().st_size) != expected["bytes"]:
                return f"{file}: {size} bytes instead of {expected['bytes']}: it was cut short or overwritten"
            if _sha256(file) != expected["sha256"]:
                return f"{file}: its checksum does not match: it is damaged"
        except OSError as error:
            return f"{file}: cannot be read: {error.strerror or error}"
        return None

    def check_readable(self) -> None:
        """Raise OSError when one of its files cannot be opened and read. Reads one byte of each."""
        for name in self.files:
            with (self.path / name).open("rb") as stream:
                stream.read(1)


def newest(directory: Path) -> CheckpointInfo | None:
    """Return the newest valid checkpoint, every byte verified; None when the directory holds no checkpoint.

    Logs a warning for each other one that it finds damaged or unreadable.
    Raises CheckpointError when checkpoints exist and none is usable, or the directory cannot be listed.
    """
    return _first_good(directory, lambda found: -found.step)


def best(directory: Path) -> CheckpointInfo | None:
    """Return the valid checkpoint with the lowest score, the newest of equals; otherwise like newest()."""
    return _first_good(directory, _score)


def _first_good(directory: Path, order: Callable[[CheckpointInfo], float]) -> CheckpointInfo | None:
    candidates, faults = _read_all(directory)
    for found in sorted(candidates, key=order):
        fault = found.fault()
        if fault is None:
            _warn(faults)
            return found
        faults[found.path] = fault
    if faults:
        raise CheckpointError(_none_usable(directory, faults))
    return None


def list_checkpoints(directory: Path) -> list[CheckpointInfo]:
    """Return the checkpoints with an intact manifest, newest first; log a warning for each other one.

    Raises CheckpointError when the directory cannot be listed.
    """
    found, faults = _read_all(directory)
    _warn(faults)
    return found


def _read_all(directory: Path) -> tuple[list[CheckpointInfo], dict[Path, str]]:
    """Return the checkpoints with an intact manifest, newest first, and the faults of the others."""
    found, faults = [], {}
    for path in step_directories(directory):
        try:
            found.append(CheckpointInfo.read(path))
        except CheckpointError as error:
            faults[path] = str(error)
    return found, faults


def _warn(faults: Mapping[Path, str]) -> None:
    for path in sorted(faults, reverse=True):
        log.warning("skipping a checkpoint: %s", faults[path])


def _none_usable(directory: Path, faults: Mapping[Path, str]) -> str:
    quoted = shlex.quote(str(directory))
    return "\n".join([
        f"{directory}: checkpoints exist, but none is usable:",
        *(f"    {faults[path]}" for path in sorted(faults, reverse=True)),
        "To resume, make one of them readable. To start from step 0, use another checkpoint directory "
        f"(checkpoint.dir=PATH), or move this one: mv {quoted} {quoted}.unusable",
    ])  # fmt: skip


def step_directories(directory: Path) -> list[Path]:
    """Return the published checkpoints, newest first. `.old` marks the previous version of the same step.

    Raises CheckpointError when the directory exists and cannot be listed.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot list the checkpoints: {error.strerror or error}") from error
    matches = filter(None, map(STEP.fullmatch, names))
    return [directory / match[0] for match in sorted(matches, key=lambda match: (-int(match[1]), match[2] is not None))]


def _score(found: CheckpointInfo) -> float:
    return float("inf") if found.score is None else found.score


def _sha256(file: Path) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(4 * MIB))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# ---- writing ----


class HashedFile(io.FileIO):
    """A new file that computes the SHA-256 of its content. close() syncs it to disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "xb")
        self._sha256, self._written = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        """Write all of `data`. Releases the GIL while hashing and writing."""
        rest = memoryview(data).cast("B")
        count = rest.nbytes
        self._sha256.update(rest)
        while rest:
            rest = rest[super().write(rest) :]
        self._written += count
        return count

    def close(self) -> None:
        """Sync the file to disk and close it."""
        if not self.closed:
            try:
                os.fsync(self.fileno())
            finally:
                super().close()

    def manifest_entry(self) -> dict[str, Any]:
        """Return the size and checksum of what was written."""
        return {"bytes": self._written, "sha256": self._sha256.hexdigest()}


@contextmanager
def open_hashed(file: Path, entries: FileEntries) -> Iterator[HashedFile]:
    """Open a new file; when the block succeeds, sync the file to disk and add its manifest entry to `entries`."""
    with HashedFile(file) as stream:
        yield stream
    entries[file.name] = stream.manifest_entry()


def final_path(directory: Path, step: int) -> Path:
    """Return the path of the published checkpoint of a step."""
    return directory / f"step_{step:08d}"


def new_directory(final: Path) -> Path:
    """Make the directory in which a checkpoint is written before it is published."""
    writing = final.with_name(f"{final.name}.writing-{_host_and_pid()}")
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir()
    return writing


def publish(writing: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest and rename the directory to its final name.

    When the step was already published, one of the two versions exists at every moment.
    """
    text = json.dumps({**manifest, "sha256": _checksum(manifest)}, indent=2, sort_keys=True)
    with open_hashed(writing / "manifest.json", {}) as stream:
        stream.write(f"{text}\n".encode())
    _sync_directory(writing)
    old = final.with_name(f"{final.name}.old")
    if final.exists():
        remove(old)
        os.rename(final, old)
    os.rename(writing, final)
    _sync_directory(final.parent)
    remove(old)


def prune(directory: Path, step: int, keep: int) -> None:
    """Remove old checkpoints up to this step, except the newest `keep` and the best one.

    Later steps belong to another run and are kept. Unreadable checkpoints are kept: the cause may be temporary.
    """
    try:
        candidates = [found for found in list_checkpoints(directory) if found.step <= step]
    except CheckpointError as error:
        log.warning("old checkpoints are not removed: %s", error)
        return
    best_one = min((found for found in candidates if found.score is not None), key=_score, default=None)
    for found in candidates[keep:]:
        if found is not best_one:
            try:
                found.check_readable()
                remove(found.path)
            except OSError as error:
                log.warning("%s: not removed: %s", found.path, error)


def remove(path: Path) -> None:
    """Rename, then delete: a partly deleted checkpoint never has the name of a published one."""
    if path.exists():
        removing = path.with_name(f"{path.name.removesuffix('.old')}.removing-{_host_and_pid()}")
        shutil.rmtree(removing, ignore_errors=True)
        os.rename(path, removing)
        shutil.rmtree(removing)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


# ---- locking: only one run writes to a directory ----


def take_over(directory: Path) -> io.TextIOWrapper | None:
    """Make the directory, lock it, and remove the unfinished checkpoints of runs that have ended.

    Returns the lock, which is released when it is closed; None where the file system has no locks.
    Raises CheckpointError when another run holds the lock, or the directory cannot be written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = _lock(directory)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot write checkpoints here: {error}") from error
    for leftover in filter(_abandoned, directory.glob("step_*")):
        shutil.rmtree(leftover, ignore_errors=True)
    return lock


def _lock(directory: Path) -> io.TextIOWrapper | None:
    """Lock with lockf(3): unlike a flock(2), it is released when this process ends, even if forked data workers run."""
    lock = (directory / ".lock").open("a+")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        with lock:
            if error.errno not in UNSUPPORTED:
                lock.seek(0)
                raise CheckpointError(
                    f"{directory}: in use by another run ({lock.read().strip()}); "
                    f"wait for it, stop it, or set another checkpoint directory"
                ) from error
        log.warning("%s: this file system has no locks; make sure that no other run writes here", directory)
        return None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


def _abandoned(leftover: Path) -> bool:
    """Return whether its process has exited or, on another host, nothing has changed for ABANDONED_AFTER seconds."""
    match = LEFTOVER.fullmatch(leftover.name)
    if match is None:
        return False
    if match["host"] == socket.gethostname():  # in a container, an exited process may have had the pid of this one
        return int(match["pid"]) == os.getpid() or not os.path.exists(f"/proc/{match['pid']}")
    with suppress(FileNotFoundError):
        return max(path.stat().st_mtime for path in (leftover, *leftover.iterdir())) < time.time() - ABANDONED_AFTER
    return False


def _host_and_pid() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def main(arguments: list[str]) -> int:
    """List the checkpoints in a directory. Returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m distributed.checkpoint.directory",
        description="List the checkpoints in a directory and check every byte.",
        epilog="Exit codes: 0: all are valid. 1: no checkpoints, or one is not valid. 2: directory cannot be listed.",
    )
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args(arguments).directory
    if not directory.is_dir():
        parser.error(f"'{directory}': not a directory")
    try:
        paths = step_directories(directory)
    except CheckpointError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    faults = []
    for path in paths:
        try:
            found = CheckpointInfo.read(path)
            faults.append(found.fault())
            score = "" if found.score is None else f"  score {found.score:g}"
            print(f"{path}  {found.bytes / 1e6:.1f} MB  {found.written}{score}  {faults[-1] or 'good'}")
        except CheckpointError as error:
            faults.append(str(error))
            print(f"{path}  {error}")
    return 0 if faults and not any(faults) else 1


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    sys.exit(main(sys.argv[1:]))
