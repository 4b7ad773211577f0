"""A checkpoint on the disk is whole, or skipped with its fault named; and at every moment there is one.

Bits flip, files are cut short, a run is killed between any two steps of publishing, two runs take the same
folder. What newest() then gives must be good to the last bit.
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
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forked
import pytest

from distributed.checkpoint import directory
from distributed.checkpoint.directory import (
    CheckpointError,
    CheckpointInfo,
    FileNotes,
    best,
    final_path,
    main,
    new_directory,
    newest,
    prune,
    publish,
    take_over,
    written,
)


def content_of(step: int, life: int = 0) -> dict[str, bytes]:
    """What the files of a step hold: another content for each step and each life of the run."""
    source = random.Random(f"{step} {life}")
    return {"state.pt": source.randbytes(50_000), "ranks.pt": source.randbytes(700)}


def keep_a_checkpoint(folder: Path, step: int, life: int = 0, score: float | None = None, keep: int = 9) -> Path:
    folder.mkdir(exist_ok=True)
    final = final_path(folder, step)
    writing, notes = new_directory(final), FileNotes()
    for name, content in content_of(step, life).items():
        with written(writing / name, notes) as file:
            file.write(content[:30_000])
            file.write(content[30_000:])
    manifest = {
        "step": step,
        "score": score,
        "ranks": 1,
        "sharded": False,
        "written": "2026-01-01T00:00:00+00:00",
        "facts": {"life": life, "model": {"layers": 2, "name": "größer"}},
        "files": notes,
    }
    publish(writing, final, manifest)
    prune(folder, step, keep)
    return final


def is_bit_for_bit(found: CheckpointInfo | None) -> bool:
    return found is not None and all(
        (found.path / name).read_bytes() == content
        for name, content in content_of(found.step, found.facts["life"]).items()
    )


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder where bringing a file to the disk costs nothing, for those who do it a thousand times."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield Path(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


# ---- files ----

BLOCK = 4 * directory.MIB
SIZES = [0, 1, 4095, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 4097]


def write_in_parts(file: Path, content: bytes) -> FileNotes:
    notes, source, start = FileNotes(), random.Random(len(content)), 0
    with written(file, notes) as stream:
        while start < len(content):
            start += stream.write(content[start : start + source.choice([1, 70, 5_000, BLOCK // 2, 2 * BLOCK])])
            assert stream.tell() == start
    return notes


def test_a_file_is_what_was_written_and_so_is_its_checksum(tmp_path: Path) -> None:
    for size in SIZES:
        content = random.Random(size).randbytes(size)
        file = tmp_path / f"{size}"
        notes = write_in_parts(file, content)
        assert file.read_bytes() == content
        assert notes == {f"{size}": {"bytes": size, "sha256": hashlib.sha256(content).hexdigest()}}


def test_a_new_file_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError), written(tmp_path / "file", FileNotes()):
        pass


def write_more_than_is_allowed(pipe: Connection, file: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK + 5_000, BLOCK + 5_000))
    try:
        write_in_parts(file, bytes(3 * BLOCK))
    except OSError as error:
        pipe.send(error.errno)


def test_a_write_that_was_cut_short_is_an_error(tmp_path: Path) -> None:
    with forked.running(write_more_than_is_allowed, tmp_path / "file") as (_, pipe):
        assert pipe.poll(forked.TIMEOUT)
        assert pipe.recv() == errno.EFBIG


# ---- damage ----


def flip(file: Path, place: float, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["state.pt", "ranks.pt", "manifest.json"])
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    keep_a_checkpoint(tmp_path, 1)
    file = keep_a_checkpoint(tmp_path, 2) / name
    sound, source = file.read_bytes(), random.Random(7)
    whole = CheckpointInfo.read(file.parent)
    for _ in range(200):
        flip(file, source.random(), source.randrange(8))
        caplog.clear()
        found = newest(tmp_path)
        assert is_bit_for_bit(found)
        # In JSON the other case of a hexadecimal digit or of an exponent says the same.
        if found != whole:
            assert found is not None and found.step == 1
            assert str(file) in caplog.text
        else:
            assert name == "manifest.json"
        file.write_bytes(sound)
    assert newest(tmp_path) == whole


@pytest.mark.parametrize("name", ["state.pt", "ranks.pt", "manifest.json"])
def test_a_file_cut_short_or_gone_is_found(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    keep_a_checkpoint(tmp_path, 1)
    file = keep_a_checkpoint(tmp_path, 2) / name
    sound, source = file.read_bytes(), random.Random(8)
    for length in [0, 1, len(sound) - 2, *(source.randrange(len(sound) - 1) for _ in range(30))]:
        file.write_bytes(sound[:length])
        caplog.clear()
        found = newest(tmp_path)
        assert found is not None and found.step == 1
        assert str(file) in caplog.text
    file.unlink()
    found = newest(tmp_path)
    assert found is not None and found.step == 1


def test_the_warning_says_what_is_wrong(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2, 3, 4):
        keep_a_checkpoint(tmp_path, step)
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
    assert "/step_00000002/manifest.json: not a manifest, it is damaged: KeyError('sha256')" in two


def test_where_there_is_no_checkpoint_none_is_found(tmp_path: Path) -> None:
    assert newest(tmp_path) is best(tmp_path) is None
    (tmp_path / "step_00000001.writing-node1-17").mkdir()  # never published
    assert newest(tmp_path) is best(tmp_path) is None
    assert newest(tmp_path / "never made") is None


# ---- checkpoints that exist and cannot be used ----


@contextmanager
def stub_of_open(*broken: Path, error: int) -> Iterator[None]:
    """Stands in for a disk or a server that fails: these files cannot be opened."""
    really_open = Path.open

    def fail_or_open(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path in broken:
            raise OSError(error, os.strerror(error), str(path))
        return really_open(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", fail_or_open)
        yield


@pytest.mark.parametrize("find", [newest, best])
@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_checkpoints_of_which_none_can_be_used_are_an_error_that_names_each(
    tmp_path: Path, error: int, find: Callable[[Path], CheckpointInfo | None]
) -> None:
    folder = tmp_path / "my checkpoints"
    for step in (1, 2, 3):
        keep_a_checkpoint(folder, step, score=1.0)
    flip(folder / "step_00000001/state.pt", 0.5, 1)
    state, manifest = folder / "step_00000002/state.pt", folder / "step_00000003/manifest.json"
    with stub_of_open(state, manifest, error=error), pytest.raises(CheckpointError) as refused:
        find(folder)
    assert str(refused.value).splitlines() == [
        f"{folder}: checkpoints exist, but none is usable:",
        f"    {manifest}: cannot be read: {os.strerror(error)}",
        f"    {state}: cannot be read: {os.strerror(error)}",
        f"    {folder}/step_00000001/state.pt: its checksum does not match: it is damaged",
        "To resume, make one of them readable. To start from step 0, use another checkpoint directory "
        f"(checkpoint.dir=PATH), or move this one: mv '{folder}' '{folder}'.unusable",
    ]


@pytest.mark.parametrize("name", ["state.pt", "manifest.json"])
def test_an_older_good_one_is_used_where_a_newer_one_cannot_be_read(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        keep_a_checkpoint(tmp_path, step)
    file = tmp_path / "step_00000002" / name
    with stub_of_open(file, error=errno.EIO):
        found = newest(tmp_path)
    assert found is not None and found.step == 1
    assert caplog.messages == [f"skipping a checkpoint: {file}: cannot be read: Input/output error"]


def find_as_nobody(pipe: Connection, folder: Path) -> None:
    """What newest() finds without the rights of root."""
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        pipe.send(newest(folder))
    except CheckpointError as error:
        pipe.send(str(error))


@pytest.mark.parametrize(
    ("mode", "expected"), [(0o000, "cannot list the checkpoints: Permission denied"), (0o755, "step_00000001")]
)
def test_a_directory_without_permission_is_not_one_without_checkpoints(memory: Path, mode: int, expected: str) -> None:
    folder = keep_a_checkpoint(memory / "checkpoints", 1).parent
    memory.chmod(0o755)
    folder.chmod(mode)
    try:
        with forked.running(find_as_nobody, folder) as (_, pipe):
            assert pipe.poll(forked.TIMEOUT)
            assert expected in str(pipe.recv())
    finally:
        folder.chmod(0o755)


def test_the_list_says_that_it_cannot_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stub_of_listdir(folder: Path) -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))

    monkeypatch.setattr(os, "listdir", stub_of_listdir)
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path}: cannot list the checkpoints: Input/output error\n"


def test_what_cannot_be_read_is_not_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = [keep_a_checkpoint(tmp_path, 1) / "state.pt", keep_a_checkpoint(tmp_path, 2) / "manifest.json"]
    keep_a_checkpoint(tmp_path, 3)
    with stub_of_open(*files, error=errno.EIO):
        keep_a_checkpoint(tmp_path, 4, keep=1)
    assert names(tmp_path) == ["step_00000001", "step_00000002", "step_00000004"]
    assert f"{tmp_path}/step_00000001: not removed: [Errno 5] Input/output error" in caplog.text


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 5):
        keep_a_checkpoint(tmp_path, step)
    found = newest(tmp_path)
    assert found is not None and found.step == 100_000_000


# ---- what stays ----

RETENTION: list[tuple[str, int, list[tuple[int, float | None]], list[int]]] = [
    ("the newest", 2, [(1, None), (2, None), (3, None)], [2, 3]),
    ("the newest and the best", 2, [(1, 0.1), (2, 0.9), (3, 0.8), (4, 0.7)], [1, 3, 4]),
    ("the best may be among the newest", 2, [(1, 0.9), (2, 0.8), (3, 0.1)], [2, 3]),
    ("the best changes", 1, [(1, 0.5), (2, 0.4), (3, 0.9), (4, 0.8)], [2, 4]),
    ("the newest of equals", 1, [(1, 0.5), (2, 0.5), (3, 0.9)], [2, 3]),
    ("not all have a score", 1, [(1, None), (2, 0.5), (3, None), (4, None)], [2, 4]),
    ("a run that went back: its own are kept apart", 2, [(50, None), (3, None), (4, None), (5, None)], [4, 5, 50]),
]


@pytest.mark.parametrize(("keep", "saved", "left"), [case[1:] for case in RETENTION], ids=[c[0] for c in RETENTION])
def test_what_stays(tmp_path: Path, keep: int, saved: list[tuple[int, float | None]], left: list[int]) -> None:
    for step, score in saved:
        keep_a_checkpoint(tmp_path, step, score=score, keep=keep)
    assert names(tmp_path) == [f"step_{step:08d}" for step in left]


def test_the_best_is_the_lowest_that_is_good(tmp_path: Path) -> None:
    for step, score in ((1, 0.5), (2, 0.1), (3, 0.3), (4, None)):
        keep_a_checkpoint(tmp_path, step, score=score)
    found = best(tmp_path)
    assert found is not None and found.step == 2
    flip(found.path / "state.pt", 0.9, 0)
    found = best(tmp_path)
    assert found is not None and found.step == 3


# ---- killed at any moment ----


def publish_and_die(folder: Path, moment: int) -> None:
    """Publish a step again, then another that makes room; killed before the given effect on the disk."""
    effects = 0

    def count() -> None:
        nonlocal effects
        effects += 1
        if effects == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def before(*args: Any) -> Any:
            count()
            return function(*args)

        return before

    disk = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree"}
    sys.addaudithook(lambda event, _: count() if event in disk else None)
    os.fsync = counted(os.fsync)
    directory.HashedFile.close = counted(directory.HashedFile.close)  # type: ignore[method-assign]
    with take_over(folder) or pytest.fail("there is no lock"):
        keep_a_checkpoint(folder, 2, life=1, keep=2)
        keep_a_checkpoint(folder, 3, life=1, keep=2)


def die_at_moments(pipe: Connection) -> None:
    """For each folder and moment that comes: whether the process was killed there."""
    while True:
        folder, moment = pipe.recv()
        if (child := os.fork()) == 0:
            publish_and_die(folder, moment)
            os._exit(0)
        pipe.send(os.WIFSIGNALED(os.waitpid(child, 0)[1]))


def test_killed_at_any_moment_there_is_a_good_one_and_the_next_run_cleans_up(memory: Path) -> None:
    with forked.running(die_at_moments) as (_, pipe):
        killed, moment = True, 0
        while killed:
            moment += 1
            folder = memory / f"{moment}"
            keep_a_checkpoint(folder, 1)
            keep_a_checkpoint(folder, 2)
            pipe.send((folder, moment))
            killed = pipe.recv()
            found = newest(folder)
            assert is_bit_for_bit(found), moment
            assert found is not None and found.step >= 2, moment
            with take_over(folder) or pytest.fail("the kernel did not free the lock"):
                left = names(folder)
            assert [name for name in left if directory.STEP.fullmatch(name)] == left, moment
            assert is_bit_for_bit(newest(folder)), moment
            keep_a_checkpoint(folder, 4, life=2, keep=1)
            assert names(folder) == ["step_00000004"], moment
    assert moment > 40, "the moments were not counted"


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut keeps what was synced, in any order: the name must come last."""
    log: list[str] = []
    rename = os.rename

    def named_now(source: Path, target: Path) -> None:
        log.append(f"name {target}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", lambda fd: log.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(os, "rename", named_now)
    final = keep_a_checkpoint(tmp_path, 1)
    named = log.index(f"name {final}")
    before = [Path(line).name for line in log[:named]]
    assert before[:-1] == ["state.pt", "ranks.pt", "manifest.json"]
    assert before[-1].startswith("step_00000001.writing-")
    assert log[named + 1] == str(tmp_path)


# ---- one writer a folder ----


def hold(pipe: Connection, folder: Path) -> None:
    """Hold the folder, and let a child of ours outlive us."""
    lock = take_over(folder)
    assert lock is not None
    child = os.fork()
    if child == 0:
        time.sleep(forked.TIMEOUT)
        os._exit(0)
    pipe.send(child)
    pipe.recv()


def test_a_second_run_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    with forked.running(hold, tmp_path) as (process, pipe):
        assert pipe.poll(forked.TIMEOUT)
        orphan = pipe.recv()
        with pytest.raises(CheckpointError, match=r"in use by another run \(.*\); wait for it") as refusal:
            take_over(tmp_path)
        assert f"process {process.pid} on " in str(refusal.value)
        assert str(tmp_path) in str(refusal.value)
    os.kill(orphan, 0)  # a data worker may live on for seconds: it must not keep the next run out
    with take_over(tmp_path) or pytest.fail("there is no lock"):
        os.kill(orphan, 9)


def test_a_filesystem_without_locks_gets_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_here(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", none_here)
    assert take_over(tmp_path) is None
    assert f"{tmp_path}: this file system has no locks" in caplog.text


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/checkpoints: cannot write checkpoints here: .*Not a dir"):
        take_over(tmp_path / "file" / "checkpoints")


def test_only_the_leftovers_of_the_dead_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here-1")
    dead = forked._context.Process()
    dead.start()
    dead.join()
    leftovers = {
        f"step_00000001.writing-here-1-{dead.pid}": False,
        f"step_00000001.removing-here-1-{dead.pid}": False,
        f"step_00000001.writing-here-1-{os.getpid()}": False,  # a container gives every life the same pid
        f"step_00000001.writing-here-1-{os.getppid()}": True,
        "step_00000001.writing-there-17": True,
        "step_00000002.writing-there-17": False,
        "step_00000003": True,
        "step_00000003.old": True,
        "step_notes": True,
    }
    for name in leftovers:
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.pt").write_text("half")
    long_ago = time.time() - 2 * directory.ABANDONED_AFTER
    for path in (tmp_path / "step_00000002.writing-there-17" / "state.pt", tmp_path / "step_00000002.writing-there-17"):
        os.utime(path, (long_ago, long_ago))
    os.utime(tmp_path / "step_00000001.writing-there-17", (long_ago, long_ago))  # its file is still written to
    with take_over(tmp_path) or pytest.fail("there is no lock"):
        assert names(tmp_path) == sorted(name for name, stays in leftovers.items() if stays)


# ---- for people ----


def test_the_list_names_every_checkpoint_and_its_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep_a_checkpoint(tmp_path, 1, score=0.25)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("score 0.25  good\n")
    flip(keep_a_checkpoint(tmp_path, 2) / "state.pt", 0.5, 1)
    (tmp_path / "step_00000003").mkdir()
    assert main([str(tmp_path)]) == 1
    three, two, one = capsys.readouterr().out.splitlines()
    assert "manifest.json: cannot be read" in three
    assert "checksum does not match" in two
    assert one.endswith("good")


def test_the_list_needs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main([str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


def test_the_manifest_is_for_people_too(tmp_path: Path) -> None:
    text = (keep_a_checkpoint(tmp_path, 1) / "manifest.json").read_text()
    body = json.loads(text)
    assert text == json.dumps(body, indent=2, sort_keys=True) + "\n"
    assert body["files"]["state.pt"]["bytes"] == 50_000
