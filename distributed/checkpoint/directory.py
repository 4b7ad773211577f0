"""The checkpoints in a directory: write, publish, find, remove.

A checkpoint is a directory, `step_00000120/`. Its manifest.json holds the SHA-256 of every other file and of its own
content. The directory is written inside `writing-<host>-<pid>-<random>`, synced to disk, and moved out with a rename.
So a published checkpoint is complete, and the checksums show later damage. A damaged or unreadable checkpoint is
skipped if another one is valid. If checkpoints exist but none is usable, that is an error; it is never treated as "no
checkpoint".

Only one attempt of one run writes to a directory: the one that `.lock` records. When an attempt takes the directory
over from a lost attempt, it removes the `writing-...` of the lost one, which then cannot publish anything: see Owner.

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
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from distributed.trust import (
    allowed_mode,
    checked,
    file_in,
    is_lock_file,
    lock_file,
    make_directories,
    not_too_deep,
    opened,
    parse_json,
    printable,
    read_bytes,
    regular_file,
    remove_made,
)

log = logging.getLogger(__name__)

STEP = re.compile(r"step_(\d{8,})(\.old)?")
STAGING = re.compile(r"writing-.+-\d+-[0-9a-f]{8}")  # the staging directory of an Owner
# All names in a staging directory and in the checkpoints there, also those of network file systems.
MADE = re.compile(
    rf"{STEP.pattern}|{STAGING.pattern}|[0-9a-f]{{8}}|lock|(state|ranks)\.pt|\.metadata(\.tmp)?|.+\.distcp|manifest\.json"
    r"|rank_\d+\.(done|failed)(\.[0-9a-f]{8})?|\.nfs.*"
)
MIB = 2**20
PROGRESS_INTERVAL = 30.0  # seconds
MIN_THREADED = MIB // 2  # bytes; hashing fewer costs less than a thread
ENTRY: Any = {"bytes": range(1 << 63), "sha256": str}
MANIFEST: Any = {  # see CheckpointInfo
    "step": range(1 << 63), "score": float | None, "ranks": range(1, 1 << 31), "sharded": bool, "written": str,
    "facts": dict, "files": Mapping[str, ENTRY],
}  # fmt: skip
LOCK: Any = {"owner": str, "process": int, "host": str, "run": str, "attempt": int}  # the record in a lock file
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
        try:
            with by_descriptor(path) as here:
                manifest = parse_json(read_bytes(here / file.name))
            checksum = manifest.pop("sha256")
            found = cls(path, **{field: checked(kind, manifest[field], field) for field, kind in MANIFEST.items()})
            for name in found.files:
                if "/" in name or name in ("", ".", "..") or not name.isprintable():
                    raise ValueError(f"{name!r}: not the name of a file")
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file}: damaged: not a valid manifest: {error!r}") from error
        if checksum != _checksum(manifest):
            raise CheckpointError(f"{file}: its checksum does not match: it is damaged")
        return found

    @property
    def bytes(self) -> int:
        """Size of all files except the manifest."""
        return sum(file["bytes"] for file in self.files.values())

    def check_sharding(self, sharded: bool) -> None:
        """Raise CheckpointError if this checkpoint is sharded and those of this run are not, or the reverse."""
        if self.sharded != sharded:
            was, now = ("sharded", "unsharded") if self.sharded else ("unsharded", "sharded")
            raise CheckpointError(
                f"{self.path} is {was}, but this run uses {now} checkpoints; resume with the strategy "
                f"of the run that wrote it, or set another checkpoint directory"
            )

    def fault(self, names: Iterable[str] | None = None) -> str | None:
        """Return the first fault of its files, or None. Reads every byte, several files at once. names: only these."""
        part = list(self.files if names is None else names)
        progress = VerificationProgress(self.path.name, sum(self.files[name]["bytes"] for name in part))
        with ThreadPoolExecutor() as pool:
            return next(filter(None, pool.map(partial(self._fault_of, progress), part)), None)

    def _fault_of(self, progress: VerificationProgress, name: str) -> str | None:
        file, expected = self.path / name, self.files[name]
        try:
            if (size := file.lstat().st_size) != expected["bytes"]:
                return f"{file}: {size} bytes instead of {expected['bytes']}: it was cut short or overwritten"
            if _sha256(file, progress) != expected["sha256"]:
                return f"{file}: its checksum does not match: it is damaged"
        except OSError as error:
            return f"{file}: cannot be read: {error.strerror or error}"
        return None

    def check_readable(self) -> None:
        """Raise OSError when one of its files cannot be opened and read. Reads one byte of each."""
        for name in self.files:
            with open(self.path / name, "rb", opener=checkpoint_file) as stream:
                stream.read(1)


Check = Callable[[CheckpointInfo], "str | None"]  # returns the first fault of a checkpoint


def newest(directory: Path, check: Check = CheckpointInfo.fault) -> CheckpointInfo | None:
    """Return the newest valid checkpoint, every byte verified; None when the directory holds no checkpoint.

    Logs a warning for each checkpoint that it finds damaged or unreadable.
    Raises CheckpointError when checkpoints exist and none is usable, or the directory cannot be listed.
    """
    faults: dict[Path, str] = {}
    return _first_good(directory, _intact(step_directories(directory), faults), faults, check)


def best(directory: Path, check: Check = CheckpointInfo.fault) -> CheckpointInfo | None:
    """Return the valid checkpoint with the lowest score, the newest of equals. Apart from that, like newest()."""
    faults: dict[Path, str] = {}
    found = sorted(_intact(step_directories(directory), faults), key=_score)
    return _first_good(directory, found, faults, check)


def _first_good(
    directory: Path, candidates: Iterable[CheckpointInfo], faults: dict[Path, str], check: Check
) -> CheckpointInfo | None:
    for found in candidates:
        fault = check(found)
        if fault is None:
            _warn(faults)
            return found
        faults[found.path] = fault
    if faults:
        raise CheckpointError(_none_usable(directory, faults))
    return None


def newest_intact(directory: Path) -> CheckpointInfo | None:
    """Return the newest checkpoint with an intact manifest; log a warning for each newer one.

    Raises CheckpointError when the directory cannot be listed.
    """
    faults: dict[Path, str] = {}
    found = next(_intact(step_directories(directory), faults), None)
    _warn(faults)
    return found


def _intact(paths: Iterable[Path], faults: dict[Path, str]) -> Iterator[CheckpointInfo]:
    """Yield the checkpoints with an intact manifest; add the faults of the others to `faults`."""
    for path in paths:
        try:
            yield CheckpointInfo.read(path)
        except CheckpointError as error:
            faults[path] = str(error)


def _warn(faults: Mapping[Path, str]) -> None:
    for path in sorted(faults, reverse=True):
        log.warning("skipping a checkpoint: %s", printable(faults[path]))


def _none_usable(directory: Path, faults: Mapping[Path, str]) -> str:
    quoted = shlex.quote(str(directory))
    return "\n".join([
        f"{directory}: checkpoints exist, but none is usable:",
        *(f"    {printable(faults[path])}" for path in sorted(faults, reverse=True)),
        "To resume, make one of them readable. To start from step 0, use another checkpoint directory "
        f"(checkpoint.dir=PATH), or move this one: mv {quoted} {quoted}.unusable",
    ])  # fmt: skip


def step_directories(directory: Path) -> list[Path]:
    """Return the published checkpoints, newest first, and also each `.old` version that Owner.publish() is replacing.

    Raises CheckpointError when the directory exists and cannot be listed.
    """
    try:
        paths = list(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot list the checkpoints: {error.strerror or error}") from error
    for staging in [path for path in paths if STAGING.fullmatch(path.name) and not path.is_symlink()]:
        found = not_too_deep(os.walk(staging))
        paths += [Path(parent, name) for parent, below, _ in found for name in below if name[-4:] == ".old"]
    published = [(path, match) for path in paths if (match := STEP.fullmatch(path.name))]
    return [path for path, match in sorted(published, key=lambda pair: (-int(pair[1][1]), pair[1][2] is not None))]


def _score(found: CheckpointInfo) -> float:
    return float("inf") if found.score is None else found.score


def _sha256(file: Path, progress: VerificationProgress) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(4 * MIB))
    with open(file, "rb", buffering=0, opener=checkpoint_file) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            progress.add(count)
    return digest.hexdigest()


class VerificationProgress:
    """Prints every PROGRESS_INTERVAL seconds how many bytes this rank has verified."""

    def __init__(self, name: str, total: int) -> None:
        """name: of the checkpoint. total: in bytes."""
        self._name, self._total, self._bytes = name, total, 0
        self._next, self._lock = time.monotonic() + PROGRESS_INTERVAL, threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            if time.monotonic() >= self._next:
                self._next += PROGRESS_INTERVAL
                print(f"{self._name}: verified {self._bytes / 1e9:.1f} of {self._total / 1e9:.1f} GB", flush=True)


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# ---- writing ----


@contextmanager
def _hashing(digest: Any, data: memoryview) -> Iterator[None]:
    """Hash the data: if there is much, in a thread, while the caller's block runs."""
    thread = threading.Thread(target=digest.update, args=(data,))
    with suppress(RuntimeError):  # the interpreter exits, or there are too many threads
        if data.nbytes >= MIN_THREADED:
            thread.start()
    if not thread.ident:
        digest.update(data)
    try:
        yield
    finally:
        if thread.ident:
            thread.join()


class HashedFile(io.FileIO):
    """A new file that computes the SHA-256 of its content. close() syncs it to disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "xb", opener=partial(regular_file, mode=allowed_mode(path.parent) & 0o666))
        self._sha256, self._written = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        """Write all of `data`, and hash it at the same time. Releases the GIL while hashing and writing."""
        rest = memoryview(data).cast("B")
        count = rest.nbytes
        with _hashing(self._sha256, rest):
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


@contextmanager
def _opened_below(path: str | Path) -> Iterator[int]:
    """A descriptor of a checkpoint or staging directory. Raises OSError for a link below the checkpoint directory."""
    path = Path(path)
    staged = [above.parent for above in (path, *path.parents) if STAGING.fullmatch(above.name)]
    top = staged[-1] if staged else path.parent
    with opened(f"{top}/.") as directory, opened(path.relative_to(top), directory) as descriptor:
        yield descriptor


@contextmanager
def by_descriptor(path: Path) -> Iterator[Path]:
    """A path of a checkpoint that stays the same, whatever others put in its place. Raises OSError for a link."""
    with _opened_below(path) as descriptor:
        yield Path(f"/proc/self/fd/{descriptor}")


checkpoint_file = partial(file_in, opens=_opened_below)  # opens a file of a checkpoint


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


# ---- owning: only one attempt of one run writes to a directory ----


@dataclass(frozen=True)
class Owner:
    """The attempt that writes checkpoints to a directory, until it is closed or another attempt takes over.

    Every change of a checkpoint is one rename into or out of the owner's staging directory. Taking over removes that
    directory: then all later changes of the earlier owner fail, however long it was frozen or disconnected.
    """

    directory: Path
    staging: Path  # for incomplete and replaced checkpoints
    lock: IO[str]
    known: dict[Path, CheckpointInfo] = field(default_factory=dict)  # what prune() has read

    def new_directory(self, step: int) -> Path:
        """Make the directory in which the checkpoint of a step is written. Raises OSError."""
        unpublished = final_path(self.staging, step)
        with opened(self.staging) as staging:
            with suppress(FileNotFoundError):
                self._delete(unpublished.name, staging)
            os.mkdir(unpublished.name, allowed_mode(self.staging), dir_fd=staging)
        return unpublished

    def publish(self, unpublished: Path, manifest: Mapping[str, Any]) -> None:
        """Write the manifest and move the directory to its final path. Raises OSError.

        When the step was already published, one of the two versions exists at every moment.
        """
        text = json.dumps({**manifest, "sha256": _checksum(manifest)}, indent=2, sort_keys=True)
        with by_descriptor(unpublished) as here:
            with open_hashed(here / "manifest.json", {}) as stream:
                stream.write(f"{text}\n".encode())
            _sync_directory(here)
        final = self.directory / unpublished.name
        self.known.pop(final, None)
        with opened(self.staging) as staging:
            old = Path(f"/proc/self/fd/{staging}/{unpublished.name}.old")
            if os.path.lexists(final):
                self._remove(old)
                os.rename(final, old)
            os.rename(unpublished.name, final, src_dir_fd=staging)
            _sync_directory(self.directory)
            self._remove(old)

    def discard(self, unpublished: Path) -> None:
        """Remove an incomplete checkpoint, as far as that is possible."""
        with suppress(OSError), opened(self.staging) as staging:
            self._delete(unpublished.name, staging)

    def prune(self, step: int, keep: int) -> None:
        """Remove old checkpoints up to this step, except the newest `keep` and the best one.

        Later steps belong to another run and are kept. Unreadable checkpoints are kept: the cause may be temporary.
        Nothing is removed unless the manifest of this step is intact. Each older manifest is read once.
        """
        try:
            paths = step_directories(self.directory)
            if len(paths) <= keep:
                return
            self.known[final_path(self.directory, step)] = CheckpointInfo.read(final_path(self.directory, step))
        except CheckpointError as error:
            log.warning("old checkpoints are not removed: %s", error)
            return
        faults: dict[Path, str] = {}
        self.known.update((found.path, found) for found in _intact(set(paths) - self.known.keys(), faults))
        _warn(faults)
        candidates = [self.known[path] for path in paths if path in self.known and self.known[path].step <= step]
        best_one = min((found for found in candidates if found.score is not None), key=_score, default=None)
        for found in candidates[keep:]:
            if found is not best_one:
                try:
                    found.check_readable()
                    self._remove(found.path)
                    del self.known[found.path]
                except OSError as error:
                    log.warning("%s: not removed: %s", found.path, error)

    def _remove(self, path: Path) -> None:
        """Rename, then delete: a partly deleted checkpoint never has the name of a published one."""
        if os.path.lexists(path):
            removing = _random()
            with opened(self.staging) as staging:
                os.rename(path, removing, dst_dir_fd=staging)
                self._delete(removing, staging)

    def _delete(self, name: str, parent: int) -> None:
        """Delete an entry of a staging directory, or set it aside if Muster has not made it. Raises OSError."""
        try:
            remove_made(name, parent, MADE)
        except OSError as error:
            if error.errno != errno.EPERM:
                raise
            os.rename(name, kept := self.directory / f"not-removed-{_random()}", src_dir_fd=parent)
            log.warning("%s: %s", kept, error.strerror)

    def remove_others(self) -> None:
        """Remove the staging directories of all earlier owners, with incomplete checkpoints. Raises OSError."""
        with opened(self.staging) as staging:
            for name in filter(STAGING.fullmatch, os.listdir(self.directory)):
                if name != self.staging.name:
                    os.rename(self.directory / name, name, dst_dir_fd=staging)
            while any(self._take_apart(name, parent, staging) for name, parent in _directories(staging, STAGING)):
                pass  # search again: the earlier owner may have made another entry
            self._restore_replaced(staging)
            _sync_directory(self.directory)
            for name in os.listdir(staging):
                with suppress(OSError):
                    self._delete(name, staging)

    def _take_apart(self, name: str, parent: int, staging: int) -> bool:
        """Move the entries of a staging directory to another directory, and remove it.

        On a network file system, an earlier owner may still write to it, although the directory was renamed.
        """
        content = _random()
        os.mkdir(content, allowed_mode(self.staging), dir_fd=staging)
        with opened(name, parent) as taken, opened(content, staging) as target:
            entries = os.listdir(taken)
            if not all(map(MADE.fullmatch, entries)):
                self._delete(name, parent)
                return True
            for entry in entries:
                os.rename(entry, entry, src_dir_fd=taken, dst_dir_fd=target)
        try:
            os.rmdir(name, dir_fd=parent)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        return True

    def _restore_replaced(self, staging: int) -> None:
        """Move the old version of a step back when the new one was not published."""
        for name, parent in _directories(staging, STEP):
            if name.endswith(".old") and not (final := self.directory / name.removesuffix(".old")).exists():
                os.rename(name, final, src_dir_fd=parent)

    def close(self) -> None:
        """Remove the staging directory, and release the lock."""
        with self.lock, suppress(OSError), opened(self.staging) as staging:
            self._restore_replaced(staging)
            _remove_staging(self.staging)

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _remove_staging(staging: Path) -> None:
    """Remove the staging directory of this process, unless others have put another directory there."""
    with suppress(OSError), opened(f"{staging.parent}/.") as directory:
        remove_made(staging.name, directory, MADE)


def take_over(directory: Path) -> Owner:
    """Make the directory, lock it, and remove the incomplete checkpoints of earlier owners.

    A lock that an earlier attempt of this run still holds is replaced: its node was declared lost.

    Raises CheckpointError when another run or a later attempt holds the lock, or the directory cannot be written to.
    """
    staging = directory / f"writing-{socket.gethostname()}-{os.getpid()}-{_random()}"
    with ExitStack() as on_error:
        on_error.callback(_remove_staging, staging)
        try:
            make_directories(directory)
            staging.mkdir(allowed_mode(directory))
            owner = Owner(directory, staging, _lock(staging))
            on_error.callback(owner.close)
            while True:
                try:
                    owner.remove_others()
                    break
                except FileNotFoundError:  # an earlier owner removes its directory at the same time
                    if not staging.exists():
                        raise
        except OSError as error:
            reason = taken_over(staging) if isinstance(error, FileNotFoundError) else None
            raise CheckpointError(reason or f"{directory}: cannot write checkpoints here: {error}") from error
        on_error.pop_all()
    return owner


def _lock(staging: Path) -> IO[str]:
    """Replace the lock file by one that records this process, and lock it.

    A lock of lockf(3), unlike one of flock(2), is released when this process ends, even if forked data workers run. It
    is also released when this process closes any descriptor of the same file. Users who cannot write to the directory
    cannot open the file: with any lock on it they could block the owner.
    """
    directory, path = staging.parent, staging.with_name(".lock")
    opener = partial(lock_file, directory=directory)
    run, attempt = _this_attempt()
    with open(path, "a+", opener=opener) as previous:
        locks = free = True
        try:
            fcntl.lockf(previous, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = os.path.samestat(os.fstat(previous.fileno()), path.stat())  # False: it was replaced meanwhile
        except OSError as error:
            locks = error.errno not in UNSUPPORTED
            free = not locks
        previous.seek(0)
        recorded = _record(previous)
        earlier_attempt = run and recorded.get("run") == run and recorded.get("attempt", 0) < attempt
        if not free and not earlier_attempt:
            raise CheckpointError(
                f"{directory}: in use by {_describe(recorded)}; "
                f"wait for it, stop it, or set another checkpoint directory"
            )
        if not free:
            log.warning(f"{directory}: taken over from {_describe(recorded)}, which has not exited")
        if not locks:
            log.warning(f"{directory}: this file system has no locks; make sure that no other run writes here")
        record = {"process": os.getpid(), "host": socket.gethostname(), "run": run, "attempt": attempt}
        text = json.dumps({"owner": staging.name, **record}) + "\n"
        # This record lets a later attempt take over even before the rename below.
        if free and is_lock_file(previous.fileno(), directory):
            previous.truncate(0)
            previous.write(text)
            previous.flush()
        with by_descriptor(staging) as here:
            lock = open(here / "lock", "x", opener=opener)  # noqa: SIM115 - closing it would release the lock
            if locks:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.write(text)
            lock.flush()
            os.fsync(lock.fileno())
            os.rename(here / "lock", path)
        _sync_directory(directory)
    return lock


def taken_over(staging: Path) -> str | None:
    """Return the error message if another process has taken the checkpoint directory over; otherwise None.

    staging: the staging directory of this process's attempt.
    """
    if os.path.exists(staging):  # reading the lock file would release the lock
        return None
    try:
        with open(staging.with_name(".lock"), opener=regular_file) as lock:
            recorded = _record(lock)
    except OSError:
        return None
    if recorded.get("owner") == staging.name:
        return None
    run, attempt = _this_attempt()
    this = f"attempt {attempt} of run {run}" if run else f"process {os.getpid()}"
    return (
        f"{staging.parent}: taken over by {_describe(recorded)}; {this} writes no more checkpoints here. "
        "Leave the training to the other process, or stop that one and run the same command to resume"
    )


def _record(lock: IO[str]) -> dict[str, Any]:
    """Return the record in a lock file; {} if it is empty or damaged."""
    try:
        record: dict[str, Any] = checked(LOCK, parse_json(lock.read(MIB)))
    except ValueError:
        return {}
    return record


def _describe(recorded: Mapping[str, Any]) -> str:
    attempt = f", attempt {recorded['attempt']} of run {recorded['run']}" if recorded.get("run") else ""
    return printable(f"process {recorded.get('process', '?')} on {recorded.get('host', '?')}{attempt}")


def _this_attempt() -> tuple[str, int]:
    """Return the name of Muster's run ("" if there is none), and the number of this attempt, which starts at 1."""
    run, count = (os.environ.get(name, "") for name in ("MUSTER_RUN_DIR", "TORCHELASTIC_RESTART_COUNT"))
    return os.path.basename(run), int(count) + 1 if count.isdecimal() else 1


def _directories(top: int, pattern: re.Pattern[str]) -> Iterator[tuple[str, int]]:
    """Directories below an open one, each with a descriptor of its parent. No link is followed."""
    for _, below, _, parent in not_too_deep(os.fwalk(".", dir_fd=top)):
        for name in filter(pattern.fullmatch, below):
            if not os.path.islink(f"/proc/self/fd/{parent}/{name}"):
                yield name, parent


def _random() -> str:
    return os.urandom(4).hex()


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
        sys.stderr.write(f"{printable(str(error))}\n")
        return 2
    faults = []
    for path in paths:
        try:
            found = CheckpointInfo.read(path)
            faults.append(found.fault())
            score = "" if found.score is None else f"  score {found.score:g}"
            facts = f"{found.bytes / 1e6:.1f} MB  {found.written}{score}  {faults[-1] or 'good'}"
        except CheckpointError as error:
            faults.append(facts := str(error))
        print(printable(f"{path}  {facts}"))
    return 0 if faults and not any(faults) else 1


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    sys.exit(main(sys.argv[1:]))
