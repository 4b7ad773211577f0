"""Checkpoint directories: a damaged checkpoint is skipped with a warning, and a valid one always exists.

Faults: flipped bits, truncated files, a kill between any two steps of publishing, two runs with one directory. The
checkpoint that newest() returns must be bit for bit as written.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forked
import pytest

from distributed.checkpoint import directory
from distributed.checkpoint.directory import (
    CheckpointError,
    CheckpointInfo,
    FileEntries,
    Owner,
    best,
    by_descriptor,
    final_path,
    main,
    newest,
    open_hashed,
    take_over,
)


def files_of(step: int, attempt: int = 0) -> dict[str, bytes]:
    """Return the content of each file; it differs for each step and attempt."""
    source = random.Random(f"{step} {attempt}")
    return {"state.pt": source.randbytes(50_000), "ranks.pt": source.randbytes(700)}


def write_checkpoint(
    checkpoint_dir: Path,
    step: int,
    attempt: int = 0,
    score: float | None = None,
    keep: int = 9,
    owner: Owner | None = None,
) -> Path:
    if owner is None:
        with take_over(checkpoint_dir) as owner:
            return write_checkpoint(checkpoint_dir, step, attempt, score, keep, owner)
    incomplete, entries = owner.new_directory(step), FileEntries()
    with by_descriptor(incomplete) as here:
        for name, content in files_of(step, attempt).items():
            with open_hashed(here / name, entries) as file:
                file.write(content[:30_000])
                file.write(content[30_000:])
    manifest = {
        "step": step,
        "score": score,
        "ranks": 1,
        "sharded": False,
        "written": "2026-01-01T00:00:00+00:00",
        "facts": {"attempt": attempt, "model": {"layers": 2, "name": "größer"}},
        "files": entries,
    }
    owner.publish(incomplete, manifest)
    owner.prune(step, keep)
    return final_path(checkpoint_dir, step)


def is_bit_for_bit(checkpoint: CheckpointInfo | None) -> bool:
    return checkpoint is not None and all(
        (checkpoint.path / name).read_bytes() == content
        for name, content in files_of(checkpoint.step, checkpoint.facts["attempt"]).items()
    )


@pytest.fixture
def ram_disk() -> Iterator[Path]:
    """A directory in RAM if possible: fsync is cheap there, and some tests call it a thousand times."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as checkpoint_dir:
        yield Path(checkpoint_dir)


def names(checkpoint_dir: Path) -> list[str]:
    return sorted(path.name for path in checkpoint_dir.iterdir() if path.name != ".lock")


# ---- files ----

BLOCK = 4 * directory.MIB
SIZES = [0, 1, 4095, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 4097]


def write_in_chunks(file: Path, content: bytes) -> FileEntries:
    entries, source, start = FileEntries(), random.Random(len(content)), 0
    with open_hashed(file, entries) as stream:
        while start < len(content):
            start += stream.write(content[start : start + source.choice([1, 70, 5_000, BLOCK // 2, 2 * BLOCK])])
            assert stream.tell() == start
    return entries


def test_a_file_has_the_written_content_and_its_checksum(tmp_path: Path) -> None:
    for size in SIZES:
        content = random.Random(size).randbytes(size)
        file = tmp_path / f"{size}"
        entries = write_in_chunks(file, content)
        assert file.read_bytes() == content
        assert entries == {f"{size}": {"bytes": size, "sha256": hashlib.sha256(content).hexdigest()}}


class WaitingHash:
    """Instead of hashing the first block, waits for what must happen at the same time."""

    def __init__(self, happened: Callable[[], bool]) -> None:
        self._happened = happened

    def update(self, block: bytes) -> None:
        end = time.monotonic() + forked.TIMEOUT
        while not self._happened():
            assert time.monotonic() < end, "the thread waits for the hash of the block"
            time.sleep(0.001)

    def hexdigest(self) -> str:
        return "hashed"


def test_a_large_block_is_hashed_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "state.pt"
    monkeypatch.setattr(hashlib, "sha256", lambda: WaitingHash(lambda: file.stat().st_size == 1 << 20))
    with open_hashed(file, {}) as stream:
        stream.write(bytes(1 << 20))


def test_without_a_thread_the_checksum_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the exit of the interpreter, no thread can be started; the last checkpoint is written there."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    content, entries = random.Random(1).randbytes(3 << 20), FileEntries()
    with open_hashed(tmp_path / "file", entries) as stream:
        stream.write(content)
    assert entries["file"]["sha256"] == hashlib.sha256(content).hexdigest()


def test_the_progress_of_a_long_verification_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(directory, "PROGRESS_INTERVAL", 0.0)
    with open_hashed(tmp_path / "file", entries := FileEntries()) as stream:
        stream.write(bytes(5 << 20))
    found = CheckpointInfo(tmp_path, 1, None, 1, False, "", {}, entries)
    assert found.fault() is None
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{tmp_path.name}: verified 0.0 of 0.0 GB" and len(lines) == 2


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError), open_hashed(tmp_path / "file", FileEntries()):
        pass


def write_past_the_file_size_limit(pipe: Connection, file: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK + 5_000, BLOCK + 5_000))
    try:
        write_in_chunks(file, bytes(3 * BLOCK))
    except OSError as error:
        pipe.send(error.errno)


def test_a_short_write_is_an_error(tmp_path: Path) -> None:
    with forked.running(write_past_the_file_size_limit, tmp_path / "file") as (_, pipe):
        assert pipe.poll(forked.TIMEOUT)
        assert pipe.recv() == errno.EFBIG


# ---- damage ----


def flip(file: Path, position: float, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[int(position * len(content))] ^= 1 << bit
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["state.pt", "ranks.pt", "manifest.json"])
def test_a_flipped_bit_is_detected_at_any_position(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path, 1)
    file = write_checkpoint(tmp_path, 2) / name
    intact, source = file.read_bytes(), random.Random(7)
    whole = CheckpointInfo.read(file.parent)
    for _ in range(200):
        flip(file, source.random(), source.randrange(8))
        caplog.clear()
        found = newest(tmp_path)
        assert is_bit_for_bit(found)
        # In JSON, a bit that changes the case of a hexadecimal digit or of an exponent does not change the value.
        if found != whole:
            assert found is not None and found.step == 1
            assert str(file) in caplog.text
        else:
            assert name == "manifest.json"
        file.write_bytes(intact)
    assert newest(tmp_path) == whole


@pytest.mark.parametrize("name", ["state.pt", "ranks.pt", "manifest.json"])
def test_a_truncated_or_missing_file_is_detected(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path, 1)
    file = write_checkpoint(tmp_path, 2) / name
    intact, source = file.read_bytes(), random.Random(8)
    for length in [0, 1, len(intact) - 2, *(source.randrange(len(intact) - 1) for _ in range(30))]:
        file.write_bytes(intact[:length])
        caplog.clear()
        found = newest(tmp_path)
        assert found is not None and found.step == 1
        assert str(file) in caplog.text
    file.unlink()
    found = newest(tmp_path)
    assert found is not None and found.step == 1


def test_the_warning_names_the_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2, 3, 4):
        write_checkpoint(tmp_path, step)
    (tmp_path / "step_00000004/state.pt").write_bytes(b"short")
    flip(tmp_path / "step_00000003/ranks.pt", 0.5, 3)
    (tmp_path / "step_00000002/manifest.json").write_text("{}")
    found = newest(tmp_path)
    assert found is not None and found.step == 1
    four, three, two = (record.getMessage() for record in caplog.records)
    assert four == (
        f"skipping a checkpoint: {tmp_path}/step_00000004/state.pt: 5 bytes instead of 50000: "
        f"it was cut short or overwritten"
    )
    assert three.endswith("/step_00000003/ranks.pt: its checksum does not match: it is damaged")
    assert "/step_00000002/manifest.json: damaged: not a valid manifest: KeyError('sha256')" in two


def test_a_directory_without_checkpoints_has_no_newest_or_best(tmp_path: Path) -> None:
    assert newest(tmp_path) is best(tmp_path) is None
    (tmp_path / "step_00000001.writing-node1-17").mkdir()  # never published
    assert newest(tmp_path) is best(tmp_path) is None
    assert newest(tmp_path / "never made") is None


# ---- checkpoints that exist and cannot be used ----


@contextmanager
def stub_of_open(*broken: Path, error: int) -> Iterator[None]:
    """Simulate a failing disk or file server: opening these files raises the error."""
    really_open = os.open

    def fail_or_open(path: Path | str, *args: Any, **kwargs: Any) -> int:
        if Path(os.path.realpath(path)) in broken:
            raise OSError(error, os.strerror(error), str(path))
        return really_open(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", fail_or_open)
        yield


@pytest.mark.parametrize("find", [newest, best])
@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_an_error_names_each_checkpoint_when_none_is_usable(
    tmp_path: Path, error: int, find: Callable[[Path], CheckpointInfo | None]
) -> None:
    checkpoint_dir = tmp_path / "my checkpoints"
    for step in (1, 2, 3):
        write_checkpoint(checkpoint_dir, step, score=1.0)
    flip(checkpoint_dir / "step_00000001/state.pt", 0.5, 1)
    state, manifest = checkpoint_dir / "step_00000002/state.pt", checkpoint_dir / "step_00000003/manifest.json"
    with stub_of_open(state, manifest, error=error), pytest.raises(CheckpointError) as refused:
        find(checkpoint_dir)
    assert str(refused.value).splitlines() == [
        f"{checkpoint_dir}: checkpoints exist, but none is usable:",
        f"    {manifest}: cannot be read: {os.strerror(error)}",
        f"    {state}: cannot be read: {os.strerror(error)}",
        f"    {checkpoint_dir}/step_00000001/state.pt: its checksum does not match: it is damaged",
        "To resume, make one of them readable. To start from step 0, use another checkpoint directory "
        f"(checkpoint.dir=PATH), or move this one: mv '{checkpoint_dir}' '{checkpoint_dir}'.unusable",
    ]


@pytest.mark.parametrize("name", ["state.pt", "manifest.json"])
def test_an_older_checkpoint_is_used_when_the_newest_cannot_be_read(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path, step)
    file = tmp_path / "step_00000002" / name
    with stub_of_open(file, error=errno.EIO):
        found = newest(tmp_path)
    assert found is not None and found.step == 1
    assert caplog.messages == [f"skipping a checkpoint: {file}: cannot be read: Input/output error"]


def find_unprivileged(pipe: Connection, checkpoint_dir: Path) -> None:
    """Send the result of newest(), called without root privileges."""
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        pipe.send(newest(checkpoint_dir))
    except CheckpointError as error:
        pipe.send(str(error))


@pytest.mark.parametrize(
    ("mode", "expected"), [(0o000, "cannot list the checkpoints: Permission denied"), (0o755, "step_00000001")]
)
def test_a_directory_without_read_permission_is_an_error(ram_disk: Path, mode: int, expected: str) -> None:
    checkpoint_dir = write_checkpoint(ram_disk / "checkpoints", 1).parent
    ram_disk.chmod(0o755)
    checkpoint_dir.chmod(mode)
    try:
        with forked.running(find_unprivileged, checkpoint_dir) as (_, pipe):
            assert pipe.poll(forked.TIMEOUT)
            assert expected in str(pipe.recv())
    finally:
        checkpoint_dir.chmod(0o755)


def test_the_list_of_checkpoints_reports_an_unreadable_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stub_of_iterdir(checkpoint_dir: Path) -> list[Path]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(checkpoint_dir))

    monkeypatch.setattr(Path, "iterdir", stub_of_iterdir)
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path}: cannot list the checkpoints: Input/output error\n"


def test_unreadable_checkpoints_are_not_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = [write_checkpoint(tmp_path, 1) / "state.pt", write_checkpoint(tmp_path, 2) / "manifest.json"]
    write_checkpoint(tmp_path, 3)
    with stub_of_open(*files, error=errno.EIO):
        write_checkpoint(tmp_path, 4, keep=1)
    assert names(tmp_path) == ["step_00000001", "step_00000002", "step_00000004"]
    assert f"{tmp_path}/step_00000001: not removed: [Errno 5] Input/output error" in caplog.text


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 5):
        write_checkpoint(tmp_path, step)
    found = newest(tmp_path)
    assert found is not None and found.step == 100_000_000


def test_no_manifest_is_read_that_is_older_than_the_newest_valid_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifests = [write_checkpoint(tmp_path, step) / "manifest.json" for step in (1, 2, 3)]
    flip(tmp_path / "step_00000003/state.pt", 0.5, 1)
    with stub_of_open(manifests[0], error=errno.EIO):
        found = newest(tmp_path)
    assert found is not None and found.step == 2
    assert caplog.messages == [
        f"skipping a checkpoint: {tmp_path}/step_00000003/state.pt: its checksum does not match: it is damaged"
    ]
    with stub_of_open(*manifests[:2], error=errno.EIO):
        assert directory.newest_intact(tmp_path) == CheckpointInfo.read(tmp_path / "step_00000003")


# ---- retention ----

RETENTION: list[tuple[str, int, list[tuple[int, float | None]], list[int]]] = [
    ("the newest", 2, [(1, None), (2, None), (3, None)], [2, 3]),
    ("the newest and the best", 2, [(1, 0.1), (2, 0.9), (3, 0.8), (4, 0.7)], [1, 3, 4]),
    ("the best may be among the newest", 2, [(1, 0.9), (2, 0.8), (3, 0.1)], [2, 3]),
    ("the best changes", 1, [(1, 0.5), (2, 0.4), (3, 0.9), (4, 0.8)], [2, 4]),
    ("the newest of equals", 1, [(1, 0.5), (2, 0.5), (3, 0.9)], [2, 3]),
    ("not all have a score", 1, [(1, None), (2, 0.5), (3, None), (4, None)], [2, 4]),
    ("a run that restarted from an older step", 2, [(50, None), (3, None), (4, None), (5, None)], [4, 5, 50]),
]


@pytest.mark.parametrize(("keep", "saved", "retained"), [case[1:] for case in RETENTION], ids=[c[0] for c in RETENTION])
def test_prune_retains_the_newest_and_the_best(
    tmp_path: Path, keep: int, saved: list[tuple[int, float | None]], retained: list[int]
) -> None:
    for step, score in saved:
        write_checkpoint(tmp_path, step, score=score, keep=keep)
    assert names(tmp_path) == [f"step_{step:08d}" for step in retained]


@pytest.mark.parametrize(("keep", "saved", "retained"), [case[1:] for case in RETENTION], ids=[c[0] for c in RETENTION])
def test_prune_by_one_owner_retains_the_same_and_reads_each_older_manifest_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keep: int,
    saved: list[tuple[int, float | None]],
    retained: list[int],
) -> None:
    reads: list[Path] = []
    really_read = CheckpointInfo.read

    def read(path: Path) -> CheckpointInfo:
        reads.append(path)
        return really_read(path)

    monkeypatch.setattr(CheckpointInfo, "read", read)
    with take_over(tmp_path) as owner:
        for step, score in saved:
            write_checkpoint(tmp_path, step, score=score, keep=keep, owner=owner)
    assert names(tmp_path) == [f"step_{step:08d}" for step in retained]
    assert len(reads) == len(set(reads)), "no manifest was read twice"


def test_prune_reads_nothing_while_nothing_is_to_be_removed(tmp_path: Path) -> None:
    manifests = [write_checkpoint(tmp_path, step) / "manifest.json" for step in (1, 2, 3)]
    with take_over(tmp_path) as owner, stub_of_open(*manifests, error=errno.EIO):
        owner.prune(3, keep=3)
    assert names(tmp_path) == ["step_00000001", "step_00000002", "step_00000003"]


def test_prune_removes_nothing_when_the_newest_manifest_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with take_over(tmp_path) as owner:
        for step in (1, 2, 3):
            write_checkpoint(tmp_path, step, owner=owner)
        owner.prune(3, keep=3)
        (tmp_path / "step_00000003/manifest.json").write_text("{}")
        owner.prune(3, keep=1)
    assert names(tmp_path) == ["step_00000001", "step_00000002", "step_00000003"]
    assert "old checkpoints are not removed: " in caplog.text


def test_prune_sees_the_score_of_a_step_that_was_published_again(tmp_path: Path) -> None:
    with take_over(tmp_path) as owner:
        for step, score in ((1, 0.1), (2, 0.5), (3, 0.6), (1, 0.9), (4, 0.7)):
            write_checkpoint(tmp_path, step, score=score, keep=2, owner=owner)
    assert names(tmp_path) == ["step_00000002", "step_00000003", "step_00000004"]


def test_the_best_is_the_intact_checkpoint_with_the_lowest_score(tmp_path: Path) -> None:
    for step, score in ((1, 0.5), (2, 0.1), (3, 0.3), (4, None)):
        write_checkpoint(tmp_path, step, score=score)
    found = best(tmp_path)
    assert found is not None and found.step == 2
    flip(found.path / "state.pt", 0.9, 0)
    found = best(tmp_path)
    assert found is not None and found.step == 3


# ---- SIGKILL ----


def call_before_operation(operation: int, function: Callable[[], None]) -> None:
    """Call the function before the n-th file operation of this process."""
    operations = 0

    def count() -> None:
        nonlocal operations
        operations += 1
        if operations == operation:
            function()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def before(*args: Any) -> Any:
            count()
            return function(*args)

        return before

    disk = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree"}
    sys.addaudithook(lambda event, _: count() if event in disk else None)
    os.fsync = counted(os.fsync)
    directory.HashedFile.close = counted(directory.HashedFile.close)  # type: ignore[method-assign]


def publish_and_be_killed(checkpoint_dir: Path, operation: int) -> None:
    """Publish step 2 again, then step 3 with pruning; SIGKILL before the given file operation."""
    call_before_operation(operation, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with take_over(checkpoint_dir) as owner:
        write_checkpoint(checkpoint_dir, 2, attempt=1, keep=2, owner=owner)
        write_checkpoint(checkpoint_dir, 3, attempt=1, keep=2, owner=owner)


def kill_before_each_operation(pipe: Connection) -> None:
    """For each directory and operation number received, send whether the process was killed."""
    while True:
        checkpoint_dir, operation = pipe.recv()
        if (child := os.fork()) == 0:
            publish_and_be_killed(checkpoint_dir, operation)
            os._exit(0)
        pipe.send(os.WIFSIGNALED(os.waitpid(child, 0)[1]))


def test_a_kill_before_any_file_operation_leaves_a_valid_checkpoint_and_the_next_run_cleans_up(ram_disk: Path) -> None:
    with forked.running(kill_before_each_operation) as (_, pipe):
        killed, operation = True, 0
        while killed:
            operation += 1
            checkpoint_dir = ram_disk / f"{operation}"
            write_checkpoint(checkpoint_dir, 1)
            write_checkpoint(checkpoint_dir, 2)
            pipe.send((checkpoint_dir, operation))
            killed = pipe.recv()
            found = newest(checkpoint_dir)
            assert is_bit_for_bit(found), operation
            assert found is not None and found.step >= 2, operation
            take_over(checkpoint_dir).close()
            left = names(checkpoint_dir)
            assert [name for name in left if directory.STEP.fullmatch(name)] == left, operation
            assert is_bit_for_bit(newest(checkpoint_dir)), operation
            write_checkpoint(checkpoint_dir, 4, attempt=2, keep=1)
            assert names(checkpoint_dir) == ["step_00000004"], operation
    assert operation > 40, "the operations were not counted"


def test_all_files_are_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut only synced files are certain to exist, so the rename must come last."""
    log: list[str] = []
    rename = os.rename

    def logged_rename(source: Path, target: Path, **descriptors: int) -> None:
        log.append(f"name {target}")
        rename(source, target, **descriptors)

    monkeypatch.setattr(os, "fsync", lambda fd: log.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(os, "rename", logged_rename)
    final = write_checkpoint(tmp_path, 1)
    named = log.index(f"name {final}")
    before = [Path(line).name for line in log[:named]]
    assert before[-4:] == ["state.pt", "ranks.pt", "manifest.json", "step_00000001"]
    assert log[named + 1] == str(tmp_path)


# ---- what others can write ----


@pytest.mark.parametrize("name", ["state.pt", "manifest.json"])
@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_a_checkpoint_with_a_link_or_a_fifo_is_skipped(
    tmp_path: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, 1)
    file = write_checkpoint(tmp_path, 2) / name
    content = file.rename(tmp_path / "content")
    if kind == "link":
        file.symlink_to(content)
    else:
        os.mkfifo(file)
    found = newest(tmp_path)
    assert found is not None and found.step == 1
    assert caplog.messages[0].startswith(f"skipping a checkpoint: {file}: ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", "2"), ("step", -1), ("score", "x"), ("ranks", [1]), ("sharded", 1), ("written", 5), ("facts", []),
        ("files", []), ("files", {"state.pt": {"bytes": "1", "sha256": ""}}), ("files", {"state.pt": 5}),
        *(("files", {name: {"bytes": 0, "sha256": ""}}) for name in ("../a", "/etc/passwd", "..", "", "\x1b[31m")),
    ],
)  # fmt: skip
def test_a_manifest_with_another_type_or_name_is_damaged_even_if_its_checksum_matches(
    tmp_path: Path, key: str, value: object
) -> None:
    file = write_checkpoint(tmp_path, 2) / "manifest.json"
    manifest = json.loads(file.read_text()) | {key: value}
    del manifest["sha256"]
    file.write_text(json.dumps(manifest | {"sha256": directory._checksum(manifest)}))
    with pytest.raises(CheckpointError, match="none is usable") as refused:
        newest(tmp_path)
    assert f"{file}: damaged: not a valid manifest: " in str(refused.value)
    assert "\x1b" not in str(refused.value)


def test_a_deeply_nested_manifest_is_damaged_and_such_a_lock_is_empty(tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path, 2) / "manifest.json"
    file.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"not a valid manifest: ValueError\('nested more than 40 levels deep'\)"):
        CheckpointInfo.read(file.parent)
    for record in ("[" * 100_000, '{"run": 5}', '{"attempt": "x", "run": "train-1"}', "5"):
        (tmp_path / ".lock").write_text(record)
        take_over(tmp_path).close()


@pytest.mark.parametrize("mask", [0, 0o002, 0o022, 0o077])
def test_nobody_else_can_write_to_checkpoints_or_open_the_lock_whatever_the_umask_is(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        found = write_checkpoint(tmp_path / "new" / "checkpoints", 1)
    finally:
        os.umask(before)
    directories, files = (found, found.parent, found.parent.parent), list(found.iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in directories} == {0o755 & ~mask}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o644 & ~mask}
    assert stat.S_IMODE((found.parent / ".lock").stat().st_mode) == 0o600


@pytest.mark.parametrize("mask", [0, 0o002, 0o022, 0o077])
def test_the_lock_of_a_group_is_open_to_the_group_and_to_no_other_user(tmp_path: Path, mask: int) -> None:
    (tmp_path / ".lock").touch()
    if os.geteuid() == 0:
        os.chown(tmp_path, -1, 12345)
    tmp_path.chmod(0o775)
    before = os.umask(mask)
    try:
        owner = take_over(tmp_path)
        facts = (tmp_path / ".lock").stat()
        assert (stat.S_IMODE(facts.st_mode), facts.st_gid) == (0o660, tmp_path.stat().st_gid)
        owner.close()
    finally:
        os.umask(before)


def test_users_who_share_a_directory_on_purpose_can_write_to_its_checkpoints(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    before = os.umask(0)
    try:
        found = write_checkpoint(tmp_path, 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(found.stat().st_mode) == 0o777
    assert {stat.S_IMODE(path.stat().st_mode) for path in (*found.iterdir(), tmp_path / ".lock")} == {0o666}


def lock_as_another_user(pipe: Connection, path: Path) -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    try:
        with path.open("rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            pipe.send("locked")
            pipe.recv()
    except OSError as error:
        pipe.send(error.strerror)


def test_another_user_who_can_read_checkpoints_cannot_lock_the_directory(ram_disk: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can become another user")
    ram_disk.chmod(0o755)
    checkpoint_dir = write_checkpoint(ram_disk / "checkpoints", 1).parent
    with forked.running(lock_as_another_user, checkpoint_dir / ".lock") as (_, pipe):
        assert pipe.poll(forked.TIMEOUT)
        assert pipe.recv() == "Permission denied"
        take_over(checkpoint_dir).close()


# ---- a directory that a group shares: another user may create, rename and replace entries ----


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A directory of the victim, beside the checkpoint directory, with a checkpoint directory of its own."""
    write_checkpoint(tmp_path / "private", 7)
    staged = tmp_path / "private" / "writing-host-1-01234567" / "step_00000008.old"
    staged.mkdir(parents=True)
    (staged / "state.pt").write_text("keep")
    (tmp_path / "private" / "thesis.tex").write_text("keep")
    return tmp_path / "private"


def content(top: Path) -> dict[str, bytes]:
    return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}


@pytest.mark.parametrize("planted", ["writing-x-1-deadbeef", "writing-x-1-deadbeef/writing-y-2-deadbeef"])
def test_a_planted_link_in_place_of_a_staging_directory_is_removed_and_not_followed(
    tmp_path: Path, private: Path, planted: str
) -> None:
    (link := tmp_path / "shared" / planted).parent.mkdir(parents=True)
    link.symlink_to(private)
    before = content(private)
    take_over(tmp_path / "shared").close()
    assert content(private) == before
    assert names(tmp_path / "shared") == []


def test_a_planted_file_in_place_of_a_directory_is_removed(tmp_path: Path) -> None:
    (tmp_path / "writing-x-1-deadbeef").write_text("")
    os.mkfifo(tmp_path / "writing-y-1-deadbeef")
    os.mkfifo(tmp_path / "step_00000001")
    write_checkpoint(tmp_path, 1)
    assert names(tmp_path) == ["step_00000001"]
    assert is_bit_for_bit(newest(tmp_path))


@pytest.fixture
def project(ram_disk: Path) -> Path:
    """A directory, and one for checkpoints in it, in which a group can create and rename files (no sticky bit)."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    ram_disk.chmod(0o755)
    for path in (made := ram_disk / "project", made / "checkpoints"):
        path.mkdir()
        os.chown(path, -1, GROUP)
        path.chmod(0o2770)
    return made


GROUP = 12345


def call_as_member(*command: str | Path) -> None:
    """Call a command as another user of the group."""
    subprocess.run(["setpriv", "--reuid", "23456", "--regid", str(GROUP), "--clear-groups", *command], check=True)


def test_a_file_that_another_user_has_moved_to_the_place_of_the_lock_stays_as_it_is(project: Path) -> None:
    (token := project / "token").write_text("secret")
    token.chmod(0o600)
    os.chown(token, -1, 0)
    with token.open() as opened:
        before = os.fstat(opened.fileno())
        call_as_member("mv", token, project / "checkpoints" / ".lock")
        take_over(project / "checkpoints").close()
        after = os.fstat(opened.fileno())
        assert (after.st_mode, after.st_gid, opened.read()) == (before.st_mode, before.st_gid, "secret")
    facts = (project / "checkpoints" / ".lock").stat()
    assert (stat.S_IMODE(facts.st_mode), facts.st_gid) == (0o660, GROUP)


@pytest.mark.parametrize("name", ["writing-host-1-00000000", "step_00000002", "the staging directory"])
def test_a_private_directory_that_another_user_has_renamed_is_not_removed(project: Path, name: str) -> None:
    write_checkpoint(project / "checkpoints", 1)
    (private := project / "checkpoints" / "private").mkdir(0o700)
    (private / "thesis").mkdir()
    for path in (private / "thesis.tex", private / "thesis" / "state.pt"):
        path.write_text("keep")
    before = content(private)
    with suppress(OSError, CheckpointError), take_over(project / "checkpoints") as owner:
        path = project / "checkpoints" / name
        if name == "the staging directory":
            path = owner.staging
            call_as_member("mv", path, path.with_name("moved"))
        call_as_member("mv", "-T", private, path)
        if name.startswith("step_"):
            write_checkpoint(project / "checkpoints", 2, owner=owner)
            assert is_bit_for_bit(newest(project / "checkpoints"))
    take_over(project / "checkpoints").close()
    (found,) = [path for path in (project / "checkpoints").iterdir() if (path / "thesis.tex").exists()]
    assert (content(found), stat.S_IMODE(found.stat().st_mode) & 0o777) == (before, 0o700)
    assert found.name.startswith("not-removed-")
    take_over(project / "checkpoints").close()
    assert content(found) == before, "a second run moves it again"


@pytest.mark.parametrize("name", ["0", "00000000"])  # unknown to Muster, and one that it gives
def test_deeply_nested_directories_of_another_user_are_set_aside(
    tmp_path: Path, nest: Callable[[Path, str], None], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = tmp_path / "checkpoints"
    nest(checkpoints / "writing-x-1-00000000", name)
    nest(checkpoints / "step_00000001", name)
    assert directory.step_directories(checkpoints) == [checkpoints / "step_00000001"]
    with take_over(checkpoints) as owner:
        write_checkpoint(checkpoints, 1, owner=owner)
    assert is_bit_for_bit(newest(checkpoints))
    kept = "not-removed-"
    assert [found.rstrip("0123456789abcdef") for found in names(checkpoints)] == [kept, kept, "step_"]
    assert f"not removed, because it holds '{name}', which Muster has not made" in caplog.text


def test_a_checkpoint_with_files_of_the_user_is_removed(tmp_path: Path) -> None:
    (write_checkpoint(tmp_path, 1) / "notes.txt").write_text("")
    write_checkpoint(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["step_00000002"]


@pytest.mark.parametrize("step", [7, 1])
def test_a_link_is_no_checkpoint(tmp_path: Path, private: Path, step: int, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path / "shared", 3)
    (tmp_path / "shared" / f"step_{step:08d}").symlink_to(private / "step_00000007")
    assert is_bit_for_bit(found := newest(tmp_path / "shared")) and found is not None and found.step == 3
    for path in (tmp_path / "shared" / "step_00000003").iterdir():
        path.unlink()
    with pytest.raises(CheckpointError, match="is a symbolic link, which is not followed"):
        newest(tmp_path / "shared")


def test_no_link_above_the_old_version_of_a_checkpoint_is_followed(tmp_path: Path) -> None:
    """As another user can put it there after the search."""
    staging = tmp_path / "private" / "writing-x-1-deadbeef"
    write_checkpoint(tmp_path / "private", 7).rename(staging.with_name("moved"))
    staging.mkdir()
    (staging.with_name("moved")).rename(old := staging / "step_00000007.old")
    found = CheckpointInfo.read(old)
    assert found.fault() is None
    staging.rename(tmp_path / "elsewhere")
    staging.symlink_to(tmp_path / "elsewhere")
    assert "is a symbolic link, which is not followed" in str(found.fault())
    with pytest.raises(CheckpointError, match="is a symbolic link, which is not followed"):
        CheckpointInfo.read(old)


def test_a_checkpoint_directory_may_be_a_link_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "scratch")
    for step in (1, 2, 2):
        write_checkpoint(tmp_path / "checkpoints", step, keep=1)
    assert names(tmp_path / "scratch") == ["step_00000002"]
    assert is_bit_for_bit(newest(tmp_path / "checkpoints"))


def test_a_link_that_replaces_a_new_staging_directory_gets_no_lock(
    tmp_path: Path, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_mkdir = os.mkdir

    def make_and_replace(path: Any, *arguments: Any, **named: Any) -> None:
        really_mkdir(path, *arguments, **named)
        if Path(path).name.startswith("writing-"):
            put_link(Path(path), private)

    before = private.stat()
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", make_and_replace)
        with pytest.raises(CheckpointError, match="is a symbolic link, which is not followed"):
            take_over(tmp_path / "shared")
    assert private.stat().st_mtime_ns == before.st_mtime_ns, "a file was created in it"


def put_link(path: Path, target: Path) -> None:
    path.rename(path.with_name(f"moved-{path.name}"))
    path.symlink_to(target)


@pytest.mark.parametrize("target", ["private", "theirs", "private/thesis"])
def test_no_link_that_replaces_a_staging_directory_during_a_take_over_is_followed(ram_disk: Path, target: str) -> None:
    """The link is put there before each operation in turn, in place of each staging directory that there is."""
    with forked.running(put_links_before_each_operation) as (_, pipe):
        count = 0
        while True:
            count += 1
            top = ram_disk / f"{count}"
            write_checkpoint(top / "shared", 1)
            (top / "shared" / "writing-x-1-deadbeef" / "step_00000007").mkdir(parents=True)
            (top / "shared" / "writing-x-1-deadbeef" / "step_00000007" / "state.pt").write_text("planted")
            for step in (2, 7):
                write_checkpoint(top / "private", step)
            (top / "private" / "writing-host-1-01234567" / "step_00000008.old").mkdir(parents=True)
            (top / "private" / "writing-host-1-01234567" / "step_00000008.old" / "state.pt").write_text("keep")
            (top / "private" / "thesis.tex").write_text("keep")
            (top / "private" / "thesis").mkdir()
            (top / "theirs").mkdir()  # where links lead
            (top / "theirs" / "step_00000002").symlink_to("../private/thesis")
            before = content(top / "private")
            pipe.send((top, target, count))
            assert pipe.poll(forked.TIMEOUT)
            answer = pipe.recv()
            after = content(top / "private")
            assert after == before, count
            if not answer:
                break
    assert count > 20, "the operations were not counted"


def put_links_before_each_operation(pipe: Connection) -> None:
    """For each directory and operation received, take over and write; send whether there was such an operation."""
    while True:
        top, target, operation = pipe.recv()
        if (child := os.fork()) == 0:
            os._exit(write_beside_links(top, target, operation))
        pipe.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def write_beside_links(top: Path, target: str, operation: int) -> int:
    found = []

    def put_links() -> None:
        for directory_path, below, _ in os.walk(top / "shared", topdown=False):
            for name in below:
                path = Path(directory_path, name)
                unpublished = name.startswith("step_") and path.parent.parent == top / "shared"
                planted = unpublished if target == "private/thesis" else not name.startswith("step_")
                if planted and not path.is_symlink():
                    put_link(path, top / target)
        found.append(operation)

    call_before_operation(operation, put_links)
    with suppress(OSError, CheckpointError), take_over(top / "shared") as owner:
        write_checkpoint(top / "shared", 2, owner=owner)
        write_checkpoint(top / "shared", 2, attempt=1, keep=1, owner=owner)
    return len(found)


def test_links_to_directories_are_no_staging_directories_of_a_search(tmp_path: Path, private: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "writing-loop-1-deadbee1").symlink_to("/")
    (tmp_path / "shared" / "writing-x-1-deadbee1").symlink_to(private)
    assert newest(tmp_path / "shared") is None
    assert directory.step_directories(tmp_path / "shared") == []


def test_names_in_a_shared_directory_are_printed_without_control_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    damaged = tmp_path / "writing-\x1b]0;owned\x07\x1b[31mgood\r-1-deadbeef" / "step_00000001.old"
    damaged.mkdir(parents=True)
    (damaged / "manifest.json").write_text("[1,2]")
    assert main([str(tmp_path)]) == 1
    with pytest.raises(CheckpointError) as caught:
        newest(tmp_path)
    assert directory.newest_intact(tmp_path) is None
    for text in (capsys.readouterr().out, str(caught.value), caplog.text):
        assert "-1-deadbeef/step_00000001.old" in text
        assert text.replace("\n", "").isprintable()


# ---- one writer per directory ----


def hold_lock(pipe: Connection, checkpoint_dir: Path, run: str = "") -> None:
    """Lock the directory, and start a child that outlives this process."""
    os.environ |= {"MUSTER_RUN_DIR": run, "TORCHELASTIC_RESTART_COUNT": "0"}
    owner = take_over(checkpoint_dir)
    child = os.fork()
    if child == 0:
        time.sleep(forked.TIMEOUT)
        os._exit(0)
    pipe.send(child)
    pipe.recv()
    owner.close()


def test_a_second_run_is_refused_until_the_first_has_exited(tmp_path: Path) -> None:
    with forked.running(hold_lock, tmp_path) as (process, pipe):
        assert pipe.poll(forked.TIMEOUT)
        orphan = pipe.recv()
        with pytest.raises(CheckpointError, match=r"in use by .*; wait for it") as refusal:
            take_over(tmp_path)
        assert f"process {process.pid} on " in str(refusal.value)
        assert str(tmp_path) in str(refusal.value)
    os.kill(orphan, 0)  # a data worker may outlive the run by seconds; it must not block the next run
    with take_over(tmp_path):
        os.kill(orphan, 9)


def test_a_filesystem_without_locks_gets_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    take_over(tmp_path).close()
    assert f"{tmp_path}: this file system has no locks" in caplog.text


def test_the_error_names_a_directory_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/checkpoints: cannot write checkpoints here: .*Not a dir"):
        take_over(tmp_path / "file" / "checkpoints")


# ---- a lost attempt continues after another one has taken over ----


def set_attempt(monkeypatch: pytest.MonkeyPatch, attempt: int, run: str = "train-1") -> None:
    monkeypatch.setenv("MUSTER_RUN_DIR", f"/logs/{run}")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))


def write_and_pause(pipe: Connection, checkpoint_dir: Path, operation: int) -> None:
    """Publish step 2 again, then step 3, as attempt 0; pause before the given file operation. Send the error."""
    os.environ |= {"MUSTER_RUN_DIR": "/logs/train-1", "TORCHELASTIC_RESTART_COUNT": "0"}

    def pause() -> None:
        pipe.send("paused")
        pipe.recv()

    error, owner = "", None
    call_before_operation(operation, pause)
    try:
        owner = take_over(checkpoint_dir)
        for step in (2, 3):
            write_checkpoint(checkpoint_dir, step, attempt=1, keep=2, owner=owner)
        owner.close()
    except (OSError, CheckpointError) as caught:
        error = str(caught) if owner is None else directory.taken_over(owner.staging) or repr(caught)
    pipe.send(f"ended {error}")


def pause_before_each_operation(pipe: Connection) -> None:
    """For each directory and operation received, run write_and_pause() in a child."""
    while True:
        checkpoint_dir, operation = pipe.recv()
        if (child := os.fork()) == 0:
            write_and_pause(pipe, checkpoint_dir, operation)
            os._exit(0)
        os.waitpid(child, 0)


def test_a_paused_attempt_changes_nothing_after_a_take_over(ram_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_attempt(monkeypatch, 1)
    refused, operation = 0, 0
    with forked.running(pause_before_each_operation) as (_, pipe):
        while True:
            operation += 1
            checkpoint_dir = ram_disk / f"{operation}"
            write_checkpoint(checkpoint_dir, 1)
            write_checkpoint(checkpoint_dir, 2)
            pipe.send((checkpoint_dir, operation))
            assert pipe.poll(forked.TIMEOUT)
            if (answer := pipe.recv()) != "paused":
                break
            was_published = final_path(checkpoint_dir, 3).exists()
            with take_over(checkpoint_dir) as owner:
                assert is_bit_for_bit(newest(checkpoint_dir)), operation
                write_checkpoint(checkpoint_dir, 2, attempt=7, owner=owner)
                write_checkpoint(checkpoint_dir, 3, attempt=7, owner=owner)
                incomplete = owner.new_directory(4)
                before = names(checkpoint_dir)
                pipe.send("continue")
                assert pipe.poll(forked.TIMEOUT)
                answer = pipe.recv()
                assert names(checkpoint_dir) == before, operation
                for found in map(CheckpointInfo.read, directory.step_directories(checkpoint_dir)):
                    assert is_bit_for_bit(found), operation
                    assert found.facts["attempt"] == (7 if found.step > 1 else 0), operation
                assert incomplete.is_dir(), operation
            if answer != "ended " or not was_published:
                owner_now = f"process {os.getpid()} on {socket.gethostname()}, attempt 2 of run train-1"
                assert answer.startswith(
                    (
                        f"ended {checkpoint_dir}: in use by {owner_now}; wait for it, ",
                        f"ended {checkpoint_dir}: taken over by {owner_now}; attempt 1 of run train-1 writes no more "
                        "checkpoints here. Leave the training to the other process, ",
                    )
                ), operation
                refused += 1
    assert answer == "ended "
    assert refused > 40, "the operations were not counted"


def test_open_handles_of_a_lost_attempt_are_useless_after_a_take_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of a network file system may still have the handle of a directory that was renamed."""
    set_attempt(monkeypatch, 0)
    lost = take_over(tmp_path)
    lost.new_directory(1)
    handle = os.open(lost.staging, os.O_RDONLY)
    set_attempt(monkeypatch, 1)
    with take_over(tmp_path):
        with pytest.raises(FileNotFoundError):
            os.rename("step_00000001", final_path(tmp_path, 1), src_dir_fd=handle)
        with pytest.raises(FileNotFoundError):
            os.mkdir("step_00000002", dir_fd=handle)
    os.close(handle)
    lost.close()
    assert names(tmp_path) == []


def test_the_lock_of_a_lost_attempt_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process of that attempt may be frozen, or its file server may keep the lock."""
    with forked.running(hold_lock, tmp_path, "/logs/train-1") as (process, pipe):
        assert pipe.poll(forked.TIMEOUT)
        orphan = pipe.recv()
        set_attempt(monkeypatch, 1, run="train-2")
        with pytest.raises(CheckpointError, match="in use by process"):
            take_over(tmp_path)
        set_attempt(monkeypatch, 1)
        with take_over(tmp_path):
            assert f"{tmp_path}: taken over from process {process.pid} on " in caplog.text
            with forked.running(hold_lock, tmp_path) as (_, second):
                assert second.poll(forked.TIMEOUT)
                with pytest.raises(EOFError):  # refused
                    second.recv()
        os.kill(orphan, 9)


# ---- the list of checkpoints that main() prints ----


def test_the_list_of_checkpoints_shows_every_checkpoint_and_its_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path, 1, score=0.25)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("score 0.25  good\n")
    flip(write_checkpoint(tmp_path, 2) / "state.pt", 0.5, 1)
    (tmp_path / "step_00000003").mkdir()
    assert main([str(tmp_path)]) == 1
    three, two, one = capsys.readouterr().out.splitlines()
    assert "manifest.json: cannot be read" in three
    assert "checksum does not match" in two
    assert one.endswith("good")


@pytest.mark.parametrize(
    ("argument", "code", "text"),
    [("none", 2, "'none': not a directory\n"), ("--help", 0, "usage: python -m distributed.checkpoint.directory")],
)
def test_the_list_of_checkpoints_needs_a_directory(
    argument: str, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([argument])
    assert ended.value.code == code
    assert text in "".join(capsys.readouterr())


def test_the_manifest_is_indented_and_sorted(tmp_path: Path) -> None:
    text = (write_checkpoint(tmp_path, 1) / "manifest.json").read_text()
    body = json.loads(text)
    assert text == json.dumps(body, indent=2, sort_keys=True) + "\n"
    assert body["files"]["state.pt"]["bytes"] == 50_000
