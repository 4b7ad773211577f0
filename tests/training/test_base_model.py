"""The cache of base models: a published base model is complete and verified.

Every damage is detected. A copy is visible only when complete, also after SIGKILL at any time. One process trains a
base model when several claim it. A base model in use is not removed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distributed.jobs.schedule.base_cache import Cache, cached, prune
from distributed.training import base_model
from distributed.training.base_model import CACHE, FILES, MANIFEST, WEIGHTS, BaseModelError

DIGEST = "ab" * 32
NAME = DIGEST[:12]
SAME_NAME = NAME + "cd" * 26  # another digest, whose first characters are the same
OTHER = "ef" * 32
TIMEOUT = 60.0  # seconds

_context = multiprocessing.get_context("spawn")  # pytest has threads, which a fork would lose


def trained(directory: Path, text: str = "weights") -> str:
    """Create the output directory of a job that has trained a base model; return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (directory / name).write_text(f"{name} {text} {'x' * 500}")
    return str(directory)


def published(cache: Path, digest: str = DIGEST, text: str = "weights") -> Path:
    source = trained(cache.parent / f"trained-{digest[:4]}", text)
    manifest = base_model.manifest_of(source, digest, seconds=7.5)
    base_model.publish(str(cache), digest, base_model.stage(str(cache), source, manifest))
    return cache / base_model.hash_of(digest)


def staging_directories(cache: Path) -> list[str]:
    """Return the names of incomplete copies."""
    return [path.name for path in cache.iterdir() if ".incomplete-" in path.name]


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# ---------------------------------------------------------------- verify


def test_a_manifest_contains_the_digest_facts_and_the_size_and_checksum_of_each_file(cache: Path) -> None:
    manifest = base_model.verify(str(published(cache)), DIGEST)
    assert manifest["digest"] == DIGEST
    assert manifest["seconds"] == 7.5
    assert set(manifest["files"]) == set(FILES)
    assert manifest["files"][WEIGHTS]["bytes"] == (cache / NAME / WEIGHTS).stat().st_size
    assert base_model.size_of(manifest) == sum((cache / NAME / name).stat().st_size for name in FILES)
    assert base_model.verify(str(cache / NAME)) == manifest


@pytest.mark.parametrize("missing", FILES)
def test_an_output_directory_that_lacks_a_file_is_refused_and_the_file_is_named(missing: str, tmp_path: Path) -> None:
    source = Path(trained(tmp_path / "out"))
    (source / missing).unlink()
    with pytest.raises(BaseModelError, match=f"{missing}: No such file or directory: a job with mode base_only must"):
        base_model.manifest_of(str(source), DIGEST)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthened(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_file(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.touch()


def as_link_to_nothing(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.symlink_to("nowhere")


# Damage to one file, and the message.
FILE_DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (Path.unlink, "cannot be read: No such file or directory"),
    (lambda path: path.write_bytes(b""), r"damaged: it has 0 bytes, expected 5\d\d"),
    (truncated, r"damaged: it has 5\d\d bytes, expected 5\d\d"),
    (lengthened, r"damaged: it has 5\d\d bytes, expected 5\d\d"),
    (lambda path: flip(path, 0), "damaged: its checksum is not the one in manifest.json"),
    (lambda path: flip(path, -1, 7), "damaged: its checksum is not the one in manifest.json"),
    (as_directory, "damaged: it has|cannot be read"),
]
DIRECTORY_DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (shutil.rmtree, "there is no base model"),
    (as_file, "cannot be read: Not a directory"),
    (lambda path: (path / MANIFEST).unlink(), "there is no base model"),
    (lambda path: as_directory(path / MANIFEST), "cannot be read: not a regular file"),
]
DAMAGES = DIRECTORY_DAMAGES + [
    (lambda directory, name=name, change=change: change(directory / name), message)
    for name in FILES
    for change, message in FILE_DAMAGES
]


@pytest.mark.parametrize(("loss", "kept"), [("1.5", 1.5), ("2", 2), ('"x"', None), ("NaN", None), ("[1.0]", None)])
def test_a_manifest_has_a_loss_that_is_a_number_or_none(tmp_path: Path, loss: str, kept: float | None) -> None:
    """Each server that needs the base model gets its manifest."""
    source = trained(tmp_path)
    (Path(source) / "base_metrics.json").write_text(f'{{"held_out_loss": {loss}}}')
    assert base_model.manifest_of(source, DIGEST)["held_out_loss"] == kept


def test_a_very_large_manifest_is_refused(tmp_path: Path) -> None:
    found = published(tmp_path)
    (found / MANIFEST).write_bytes(b" " * (1 << 20) + (found / MANIFEST).read_bytes())
    with pytest.raises(BaseModelError, match="cannot be read"):
        base_model.read_manifest(str(found))


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_every_damage_is_detected_and_named(damage: Callable[[Path], Any], message: str, cache: Path) -> None:
    directory = published(cache)
    damage(directory)
    with pytest.raises(BaseModelError, match=message) as refused:
        base_model.verify(str(directory), DIGEST)
    assert str(refused.value).startswith(str(directory))
    assert "\n" not in str(refused.value)


ENTRIES = {name: {"bytes": 1, "sha256": "0" * 64} for name in FILES}


def manifest(**changed: Any) -> str:
    return json.dumps({"digest": DIGEST, "files": ENTRIES, **changed})


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "7", '"text"', "{}", "[" * 100_000, '{"digest": "\xff',
        manifest(digest=None), manifest(digest=7), manifest(digest=NAME), manifest(digest="G" * 64),
        manifest(files=None), manifest(files=[]), manifest(files={}), manifest(files=dict.fromkeys(FILES)),
        manifest(files={name: {"bytes": 1, "sha256": "0" * 64} for name in FILES[1:]}),
        manifest(files={name: {"bytes": "1", "sha256": "0" * 64} for name in FILES}),
        manifest(files={name: {"bytes": 1, "sha256": None} for name in FILES}),
        manifest(files=ENTRIES | {"extra": {"bytes": "x"}}), manifest(files=ENTRIES | {"extra": [1]}),
    ],
)  # fmt: skip
def test_an_invalid_manifest_is_a_damage(text: str, cache: Path) -> None:
    directory = published(cache)
    (directory / MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(BaseModelError, match=f"damaged; remove {directory} and train the base model again"):
        base_model.verify(str(directory), DIGEST)
    assert base_model.digests_in(str(cache)) == []


def test_a_digest_with_the_same_prefix_is_another_base_model(cache: Path) -> None:
    directory = published(cache)
    with pytest.raises(BaseModelError, match=f"holds the base model {DIGEST}, expected {SAME_NAME}"):
        base_model.verify(str(directory), SAME_NAME)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_manifest_is_detected_or_changes_neither_digest_nor_files(
    position: int, bit: int, tmp_path: Path
) -> None:
    directory = tmp_path / "cache" / NAME
    if not directory.exists():
        published(tmp_path / "cache")
        shutil.copy(directory / MANIFEST, tmp_path / "good")
    shutil.copy(tmp_path / "good", directory / MANIFEST)
    good = base_model.read_manifest(str(directory))
    flip(directory / MANIFEST, position % (directory / MANIFEST).stat().st_size, bit)
    try:
        found = base_model.verify(str(directory), DIGEST)
    except BaseModelError:
        return
    assert (found["digest"], found["files"]) == (good["digest"], good["files"])


# ---------------------------------------------------------------- stage and publish


def test_a_copy_is_not_visible_before_it_is_published(cache: Path, tmp_path: Path) -> None:
    source = trained(tmp_path / "out")
    staging = base_model.stage(str(cache), source, base_model.manifest_of(source, DIGEST))
    assert base_model.names_in(str(cache)) == base_model.digests_in(str(cache)) == []
    assert base_model.names_in(str(cache), base_model.STAGED) == [NAME]
    base_model.publish(str(cache), DIGEST, staging)
    assert base_model.names_in(str(cache)) == [NAME]
    assert base_model.digests_in(str(cache)) == [DIGEST]
    assert base_model.names_in(str(cache), base_model.STAGED) == []
    assert (cache / NAME).stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize(
    "change", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:9]), lambda path: flip(path, 20)]
)
def test_an_incomplete_or_damaged_copy_is_not_published_and_is_removed(
    name: str, change: Callable[[Path], object], cache: Path, tmp_path: Path
) -> None:
    source = trained(tmp_path / "out")
    staging = base_model.stage(str(cache), source, base_model.manifest_of(source, DIGEST))
    change(Path(staging, name))
    with pytest.raises(BaseModelError):
        base_model.publish(str(cache), DIGEST, staging)
    assert list(cache.iterdir()) == []


def test_a_copy_of_another_base_model_is_not_published(cache: Path, tmp_path: Path) -> None:
    source = trained(tmp_path / "out")
    staging = base_model.stage(str(cache), source, base_model.manifest_of(source, OTHER))
    with pytest.raises(BaseModelError, match=f"holds the base model {OTHER}, expected {DIGEST}"):
        base_model.publish(str(cache), DIGEST, staging)
    assert list(cache.iterdir()) == []


def test_a_source_that_has_changed_since_its_manifest_was_made_is_not_published(cache: Path, tmp_path: Path) -> None:
    source = trained(tmp_path / "out")
    known = base_model.manifest_of(source, DIGEST)
    flip(Path(source, WEIGHTS), 100)
    with pytest.raises(BaseModelError, match="its checksum is not the one in"):
        base_model.publish(str(cache), DIGEST, base_model.stage(str(cache), source, known))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip(path / WEIGHTS, 3),
        lambda path: (path / MANIFEST).unlink(),
        lambda path: (path / MANIFEST).write_text(manifest(digest=SAME_NAME)),
        as_file,
        as_link_to_nothing,
    ],
)
def test_publishing_over_a_damaged_base_model_replaces_it(damage: Callable[[Path], object], cache: Path) -> None:
    damage(published(cache))
    published(cache)
    base_model.verify(str(cache / NAME), DIGEST)
    assert staging_directories(cache) == []


def test_a_copy_that_fails_on_a_full_disk_is_removed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = trained(tmp_path / "out")
    known = base_model.manifest_of(source, DIGEST)

    def full(_: object, copy: IO[bytes], length: int) -> None:
        copy.write(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left on device"):
        base_model.stage(str(cache), source, known)
    assert list(cache.iterdir()) == []


def test_remove_deletes_only_the_named_base_model(cache: Path) -> None:
    published(cache)
    published(cache, OTHER)
    base_model.remove(str(cache), NAME)
    base_model.remove(str(cache), NAME)  # it does not exist
    assert [path.name for path in cache.iterdir()] == [OTHER[:12]]
    base_model.verify(str(cache / OTHER[:12]), OTHER)


def test_staging_directories_of_one_base_model_are_removed(cache: Path) -> None:
    for digest in (DIGEST, DIGEST, OTHER):
        base_model.new_staging(str(cache), digest)
    base_model.remove_staging(str(cache), DIGEST)
    (cache / ".\x1b]0;owned\x07\x1b[.incomplete-x").mkdir()  # of another user
    assert base_model.names_in(str(cache), base_model.STAGED) == [OTHER[:12]]


def test_a_missing_cache_is_empty(cache: Path) -> None:
    assert base_model.names_in(str(cache)) == base_model.names_in(str(cache), base_model.STAGED) == []
    assert base_model.digests_in(str(cache)) == []
    assert base_model.signature(str(cache / NAME)) == []


# ---------------------------------------------------------------- killed and concurrent processes


def in_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call the function in a process that may fork, and return its result."""
    with _context.Pool(1) as pool:
        return pool.apply_async(function, args).get(TIMEOUT)


def forked(work: Callable[[], object], kill_at: int | None = None) -> int:
    """Call work() in a child; return its pid.

    kill_at: number of the audit event (open, mkdir, ...) at which the child kills itself with SIGKILL.
    """
    child = os.fork()
    if child:
        return child
    events = itertools.count()

    def count(*_: object) -> None:
        if next(events) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        if kill_at is not None:
            sys.addaudithook(count)
        work()
        os._exit(0)
    finally:
        os._exit(1)


def code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def publish_and_be_killed(cache: Path, initial_state: str) -> tuple[int, list[str]]:
    """Publish in child processes that are killed, each at a later audit event. Return (number of kills, faults).

    initial_state: the state of the cache before each child publishes: nothing, valid or damaged.
    """
    faults = []
    for number in itertools.count():
        shutil.rmtree(cache, ignore_errors=True)
        if initial_state != "nothing":
            published(cache, text="before")
        if initial_state == "damaged":
            flip(cache / NAME / WEIGHTS, 3)
        source = trained(cache.parent / "out", "after")
        known = base_model.manifest_of(source, DIGEST)

        def work(known: dict[str, Any] = known, source: str = source) -> None:
            base_model.publish(str(cache), DIGEST, base_model.stage(str(cache), source, known))

        code = code_of(forked(work, kill_at=number))
        if (state := state_of(cache)) not in {"nothing": ("nothing", "valid"), "valid": ("valid",)}.get(
            initial_state, ("nothing", "valid", "damaged")
        ):
            faults.append(f"killed at {number}: {state}")
        if code != -signal.SIGKILL:
            return number, faults + ([] if code == 0 and state == "valid" else [f"exit code {code}"])
        work()  # publish again, as the next process does
        base_model.remove_staging(str(cache), DIGEST)
        if state_of(cache) != "valid" or staging_directories(cache):
            faults.append(f"killed at {number}: afterwards {state_of(cache)}, left {staging_directories(cache)}")
    raise AssertionError


def state_of(cache: Path) -> str:
    if not (cache / NAME).exists():
        return "nothing"
    try:
        base_model.verify(str(cache / NAME), DIGEST)
        return "valid"
    except BaseModelError:
        return "damaged"


@pytest.mark.parametrize("initial_state", ["nothing", "valid", "damaged"])
def test_a_process_killed_at_any_audit_event_damages_no_base_model(initial_state: str, cache: Path) -> None:
    kills, faults = in_process(publish_and_be_killed, cache, initial_state)
    assert not faults
    assert kills > 20


def publish_large_and_be_killed(cache: Path, seconds: float) -> tuple[str, str]:
    """Return the state of the cache after the kill, and after publishing again."""
    source = trained(cache.parent / "out")
    Path(source, WEIGHTS).write_bytes(os.urandom(1 << 20) * 24)
    known = base_model.manifest_of(source, DIGEST)

    def work() -> None:
        base_model.publish(str(cache), DIGEST, base_model.stage(str(cache), source, known))

    child = forked(work)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    code_of(child)
    after = state_of(cache)
    work()
    return after, state_of(cache)


def test_a_process_killed_while_it_copies_leaves_nothing_or_a_valid_base_model(cache: Path) -> None:
    with _context.Pool(1) as pool:
        for milliseconds in (0, 2, 5, 10, 20, 40, 80):
            shutil.rmtree(cache, ignore_errors=True)
            call = pool.apply_async(publish_large_and_be_killed, (cache, milliseconds / 1000))
            after, again = call.get(TIMEOUT)
            assert after in ("nothing", "valid")
            assert again == "valid"


def publish_concurrently(cache: Path) -> list[int]:
    codes = []
    sources = [trained(cache.parent / f"out{number}") for number in range(3)]
    for _ in range(20):
        shutil.rmtree(cache, ignore_errors=True)
        staged = [base_model.stage(str(cache), each, base_model.manifest_of(each, DIGEST)) for each in sources]
        ready, go = os.pipe()

        def work(staging: str, ready: int = ready, go: int = go) -> None:
            os.close(go)
            os.read(ready, 1)  # returns when all children have started
            base_model.publish(str(cache), DIGEST, staging)

        children = [forked(lambda staging=staging: work(staging)) for staging in staged]  # type: ignore[misc]
        os.close(go)
        os.close(ready)
        codes += [code_of(child) for child in children]
        base_model.verify(str(cache / NAME), DIGEST)
        codes += [len(staging_directories(cache))]
    return codes


def test_concurrent_publishing_leaves_one_valid_base_model(cache: Path) -> None:
    assert not any(in_process(publish_concurrently, cache))


def claim_concurrently(cwd: Path) -> list[int]:
    """Return the number of trainings in each round."""
    output = trained(cwd / "out")
    rounds = []
    for number in range(5):
        digest = f"{number:064x}"[::-1]
        log = os.open(cwd / f"trained{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def work(digest: str = digest, log: int = log) -> None:
            models = Cache(cwd)
            while (claim := models.claim(digest)) == "busy":
                time.sleep(0.001 * (1 + os.getpid() % 7))
            if claim == "train":
                os.write(log, b"x")
                models.publish(digest, output)
            base_model.verify(models.path(digest), digest)

        children = [forked(work) for _ in range(4)]
        assert [code_of(child) for child in children] == [0] * 4
        rounds.append((cwd / f"trained{number}").stat().st_size)
    return rounds


def test_concurrent_claims_train_a_base_model_once(tmp_path: Path) -> None:
    assert in_process(claim_concurrently, tmp_path) == [1] * 5


# ---------------------------------------------------------------- locks


class OtherProcess:
    """A process with a separate Cache on the same directory."""

    def __init__(self, cwd: Path) -> None:
        self._pipe, child_end = _context.Pipe()
        self._process = _context.Process(target=serve, args=(child_end, cwd))
        self._process.start()
        child_end.close()

    def __call__(self, method: str, *args: Any) -> Any:
        self._pipe.send((method, args))
        assert self._pipe.poll(TIMEOUT)
        return self._pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def serve(pipe: Connection, cwd: Path) -> None:
    models = Cache(cwd)
    while True:
        method, args = pipe.recv()
        pipe.send(getattr(models, method)(*args))


@pytest.fixture
def other(tmp_path: Path) -> Iterator[OtherProcess]:
    started = OtherProcess(tmp_path)
    yield started
    started.kill()


def test_a_lock_is_either_shared_or_exclusive(cache: Path) -> None:
    first, second = (base_model.lock(str(cache), DIGEST, exclusive=False) for _ in range(2))
    assert first is not None and second is not None
    assert base_model.lock(str(cache), DIGEST, exclusive=True) is None
    os.close(first)
    assert base_model.lock(str(cache), DIGEST, exclusive=True) is None
    os.close(second)
    alone = base_model.lock(str(cache), DIGEST, exclusive=True)
    assert alone is not None
    assert base_model.lock(str(cache), DIGEST, exclusive=True) is None
    assert base_model.lock(str(cache), DIGEST, exclusive=False) is None
    free = base_model.lock(str(cache), OTHER, exclusive=True)
    assert free is not None
    os.close(alone)
    os.close(free)


def test_one_process_trains_a_base_model_and_prune_keeps_it_while_in_use(tmp_path: Path, other: OtherProcess) -> None:
    models, output = Cache(tmp_path), trained(tmp_path / "out")
    assert models.claim(DIGEST) == "train"
    assert models.claim(DIGEST) == "train"
    assert other("claim", DIGEST) == "busy"
    models.publish(DIGEST, output, seconds=1)
    assert models.verify(DIGEST)["seconds"] == 1
    assert other("claim", DIGEST) == models.claim(DIGEST) == "ready"
    assert prune(tmp_path, keep=()) == ([], [NAME])
    models.release(DIGEST)
    assert prune(tmp_path, keep=()) == ([], [NAME])
    other("release", DIGEST)
    assert prune(tmp_path, keep=()) == ([NAME], [])
    assert other("claim", DIGEST) == "train"


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
def test_the_permissions_of_a_base_model_follow_the_umask(mask: int, cache: Path) -> None:
    before = os.umask(mask)
    try:
        directory = published(cache)
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o755 & ~mask
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o644 & ~mask}


@pytest.mark.parametrize("mask", [0, 0o002, 0o022])
def test_nobody_else_can_write_to_a_base_model_whatever_the_umask_is_unless_others_can_write_to_the_cache(
    mask: int, cache: Path
) -> None:
    before = os.umask(mask)
    try:
        os.close(base_model.lock(str(cache), DIGEST, exclusive=True) or -1)
        directory = published(cache)
        assert not any(path.stat().st_mode & 0o022 for path in (cache.parent, cache, directory, *directory.iterdir()))
        lock = cache / f".{NAME}.lock"
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600
        lock.chmod(0o644)  # as earlier versions created it
        os.close(base_model.lock(str(cache), DIGEST, exclusive=True) or -1)
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600
        shutil.rmtree(cache)
        cache.mkdir()
        cache.chmod(0o777)
        os.close(base_model.lock(str(cache), DIGEST, exclusive=True) or -1)
        assert {stat.S_IMODE(path.stat().st_mode) for path in published(cache).iterdir()} == {0o666 & ~mask}
        assert stat.S_IMODE(lock.stat().st_mode) == 0o666
    finally:
        os.umask(before)


def test_a_link_that_replaces_a_new_staging_directory_is_not_followed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another user can put it there who can write to the cache."""
    (private := cache.parent / "private").mkdir()
    new_staging = base_model.new_staging

    def replaced(*arguments: Any) -> str:
        staging = Path(new_staging(*arguments))
        staging.rename(cache / "moved")
        staging.symlink_to(private)
        return str(staging)

    monkeypatch.setattr(base_model, "new_staging", replaced)
    with pytest.raises(NotADirectoryError):
        published(cache)
    assert not any(private.iterdir())


def test_a_link_that_replaces_a_directory_for_removal_is_not_followed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another user can put it there who can write to the cache."""
    (private := cache.parent / "private").mkdir()
    published(cache)
    really_mkdir = os.mkdir

    def make_and_replace(path: str, *arguments: Any) -> None:
        really_mkdir(path, *arguments)
        Path(path).rename(cache / "moved")
        Path(path).symlink_to(private)

    monkeypatch.setattr(os, "mkdir", make_and_replace)
    with contextlib.suppress(NotADirectoryError):
        base_model.remove(str(cache), NAME)
    assert not any(private.iterdir())


def test_a_link_is_no_base_model(cache: Path) -> None:
    directory = published(cache)
    directory.rename(cache.parent / "private")
    directory.symlink_to(cache.parent / "private")
    with pytest.raises(BaseModelError, match="is a symbolic link, which is not followed"):
        base_model.verify(str(directory), DIGEST)
    with pytest.raises(BaseModelError, match="is a symbolic link, which is not followed"):
        base_model.check_files(str(directory), base_model.read_manifest(str(cache.parent / "private")))


def test_publishing_waits_for_no_fifo_that_replaces_a_verified_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another user can put it there who can write to the cache."""
    verify = base_model.verify

    def verify_and_replace(directory: str, digest: str) -> dict[str, Any]:
        manifest = verify(directory, digest)
        Path(directory, base_model.WEIGHTS).unlink()
        os.mkfifo(Path(directory, base_model.WEIGHTS))
        return manifest

    monkeypatch.setattr(base_model, "verify", verify_and_replace)
    with pytest.raises(OSError, match="not a regular file"):
        published(cache)


@pytest.mark.parametrize("name", [NAME, f".{NAME}.incomplete-x"])
def test_a_private_directory_that_another_user_has_renamed_is_not_removed(cache: Path, name: str) -> None:
    (private := cache / name).mkdir(parents=True)
    (private / "thesis.tex").write_text("keep")
    base_model.remove(str(cache), NAME)
    base_model.remove_staging(str(cache), DIGEST)
    assert [path.read_text() for path in cache.rglob("thesis.tex")] == ["keep"]


def test_deeply_nested_directories_of_another_user_stay_and_stop_neither_a_list_nor_prune(
    tmp_path: Path, nest: Callable[[Path, str], None]
) -> None:
    cache = tmp_path / CACHE
    nest(cache / f".{NAME}.incomplete-x", NAME)
    nest(cache / NAME, NAME)
    assert prune(tmp_path) == ([NAME], [])
    assert Cache(tmp_path).claim(DIGEST) == "train"
    assert len(staging_directories(cache)) == 2


def test_a_file_that_another_user_has_moved_to_the_place_of_a_lock_stays_as_it_is() -> None:
    if os.geteuid():
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as top:
        os.chmod(top, 0o755)
        cache = Path(top, base_model.CACHE)
        cache.mkdir(parents=True)
        for path in (cache, cache.parent):
            os.chown(path, -1, 12345)
            path.chmod(0o2770)
        (token := cache.parent / "token").write_text("secret")
        token.chmod(0o600)
        os.chown(token, -1, 0)
        lock = cache / f".{NAME}.lock"
        with token.open() as opened:
            before = os.fstat(opened.fileno())
            user = ["setpriv", "--reuid", "23456", "--regid", "12345", "--clear-groups"]
            subprocess.run([*user, "mv", token, lock], check=True)
            file = base_model.lock(str(cache), DIGEST, exclusive=True)
            assert file is not None
            after = os.fstat(opened.fileno())
            assert (after.st_mode, after.st_gid, opened.read()) == (before.st_mode, before.st_gid, "secret")
        assert (stat.S_IMODE(lock.stat().st_mode), lock.stat().st_gid) == (0o660, 12345)
        assert base_model.lock(str(cache), DIGEST, exclusive=False) is None
        lock.chmod(0o644)  # as an earlier version makes it; it is not replaced while it is locked
        assert base_model.lock(str(cache), DIGEST, exclusive=True) is None
        os.close(file)
        os.close(base_model.lock(str(cache), DIGEST, exclusive=True) or -1)
        assert stat.S_IMODE(lock.stat().st_mode) == 0o660


def use_as_another_user(pipe: Connection, cache: Path) -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    locked = []
    for path in cache.glob(".*.lock"):
        with contextlib.suppress(PermissionError):
            locked.append(os.open(path, os.O_RDONLY))
    file = base_model.lock(str(cache), DIGEST, exclusive=False)
    found = base_model.verify(str(cache / NAME), DIGEST)["digest"]
    pipe.send((locked, file is not None, found, Cache(cache.parents[1]).claim(DIGEST)))
    signal.pause()


def test_another_user_can_use_a_base_model_and_cannot_lock_it(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as top:  # pytest's directory is private
        os.chmod(top, 0o755)
        cache = Path(top, base_model.CACHE)
        os.close(base_model.lock(str(cache), DIGEST, exclusive=True) or -1)
        published(cache)
        receiver, sender = _context.Pipe()
        other = _context.Process(target=use_as_another_user, args=(sender, cache))
        other.start()
        sender.close()
        try:
            assert receiver.poll(TIMEOUT)
            assert receiver.recv() == ([], True, DIGEST, "ready")
            file = base_model.lock(str(cache), DIGEST, exclusive=True)
            assert file is not None
            os.close(file)
        finally:
            other.kill()
            other.join()


def lock_as_another_user(pipe: Connection, cache: Path) -> None:
    os.close(base_model.lock(str(cache), OTHER, exclusive=True) or -1)  # imports what the user may not read
    os.setgroups([])
    os.setgid(12345)
    os.setuid(34567)
    try:
        base_model.lock(str(cache), DIGEST, exclusive=True)
        pipe.send("")
    except PermissionError as error:
        pipe.send(error.filename)
    pipe.send(prune(cache.parents[1]))


def test_a_lock_that_another_user_lets_nobody_open_is_no_lock_of_the_user() -> None:
    if os.geteuid():
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as top:
        os.chmod(top, 0o755)
        cache = Path(top, base_model.CACHE)
        cache.mkdir(parents=True)
        os.chown(cache, -1, 12345)
        cache.chmod(0o2770)
        (lock := cache / f".{NAME}.lock").touch(0o600)
        os.chown(lock, 23456, 12345)
        (cache / f".{NAME}.incomplete-x").mkdir()
        receiver, sender = _context.Pipe()
        other = _context.Process(target=lock_as_another_user, args=(sender, cache))
        other.start()
        sender.close()
        try:
            assert receiver.poll(TIMEOUT)
            assert receiver.recv() == str(lock)
            assert receiver.recv() == ([], [NAME]), "it may be in use"
        finally:
            other.join()


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
@pytest.mark.parametrize("name", [base_model.WEIGHTS, base_model.MANIFEST])
def test_a_base_model_with_a_link_or_a_special_file_is_refused(cache: Path, kind: str, name: str) -> None:
    directory = published(cache)
    file = (directory / name).rename(cache / "elsewhere")
    if kind == "link":
        (directory / name).symlink_to(file)
    elif kind == "fifo":
        os.mkfifo(directory / name)
    else:
        (directory / name).mkdir()
    with pytest.raises(BaseModelError, match=re.escape(str(directory / name))):
        base_model.verify(str(directory), DIGEST)


def test_a_script_may_write_links_and_a_fifo_in_its_output_is_refused(tmp_path: Path, cache: Path) -> None:
    output = Path(trained(tmp_path / "out"))
    (output / base_model.WEIGHTS).rename(output / "last.pt")
    (output / base_model.WEIGHTS).symlink_to("last.pt")
    manifest = base_model.manifest_of(str(output), DIGEST)
    base_model.publish(str(cache), DIGEST, base_model.stage(str(cache), str(output), manifest))
    assert not (cache / NAME / base_model.WEIGHTS).is_symlink()
    (output / base_model.WEIGHTS).unlink()
    (output / base_model.WEIGHTS).symlink_to(Path(trained(tmp_path / "outside"), base_model.WEIGHTS))
    with pytest.raises(BaseModelError, match="is a symbolic link that leads out of its directory"):
        base_model.manifest_of(str(output), DIGEST)
    with pytest.raises(OSError, match="is a symbolic link that leads out of its directory"):
        base_model.stage(str(cache), str(output), manifest)
    (output / base_model.WEIGHTS).unlink()
    os.mkfifo(output / base_model.WEIGHTS)
    with pytest.raises(BaseModelError, match="not a regular file"):
        base_model.manifest_of(str(output), DIGEST)


def test_a_lock_is_released_when_its_process_exits(tmp_path: Path, other: OtherProcess) -> None:
    models = Cache(tmp_path)
    assert other("claim", DIGEST) == "train"
    assert models.claim(DIGEST) == "busy"
    other.kill()
    assert models.claim(DIGEST) == "train"


def test_a_claim_removes_a_damaged_base_model_but_not_while_another_process_uses_it(
    tmp_path: Path, other: OtherProcess
) -> None:
    models, path = Cache(tmp_path), published(tmp_path / CACHE)
    base_model.new_staging(models.directory, DIGEST)  # of a process that was killed
    assert other("claim", DIGEST) == models.claim(DIGEST) == "ready"
    flip(path / WEIGHTS, 3)
    assert models.claim(DIGEST) == "busy"
    assert path.exists()
    other.kill()
    assert models.claim(DIGEST) == "train"
    assert not path.exists()
    assert staging_directories(path.parent) == []


def test_publishing_over_an_existing_base_model_keeps_it_and_makes_the_lock_shared(
    tmp_path: Path, other: OtherProcess
) -> None:
    models = Cache(tmp_path)
    assert models.claim(DIGEST) == "train"
    before = published(tmp_path / CACHE, text="first").stat().st_ino
    models.publish(DIGEST, trained(tmp_path / "out", "second"))
    assert (tmp_path / CACHE / NAME).stat().st_ino == before
    assert staging_directories(tmp_path / CACHE) == []
    assert other("claim", DIGEST) == models.claim(DIGEST) == "ready"


def test_publishing_an_output_directory_that_lacks_a_file_fails_and_keeps_the_lock(tmp_path: Path) -> None:
    models, output = Cache(tmp_path), trained(tmp_path / "out")
    Path(output, FILES[2]).unlink()
    assert models.claim(DIGEST) == "train"
    with pytest.raises(BaseModelError, match=FILES[2]):
        models.publish(DIGEST, output)
    assert models.claim(DIGEST) == "train"
    assert base_model.names_in(models.directory) == []


# ---------------------------------------------------------------- verification and the list of a cache


def test_a_base_model_is_read_again_only_after_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models, path = Cache(tmp_path), published(tmp_path / CACHE)
    read: list[str] = []
    real = base_model.sha256

    def counted(path: str) -> str:
        read.append(path)
        return real(path)

    monkeypatch.setattr(base_model, "sha256", counted)
    first = models.verify(DIGEST)
    assert models.verify(DIGEST) == first
    assert len(read) == len(FILES)
    (path / FILES[1]).write_bytes((path / FILES[1]).read_bytes())
    models.verify(DIGEST)
    assert len(read) == 2 * len(FILES)
    flip(path / WEIGHTS, 9)
    for _ in range(2):
        with pytest.raises(BaseModelError, match="its checksum is not"):
            models.verify(DIGEST)


def test_the_digest_of_a_name_is_returned_only_if_its_base_model_is_valid(tmp_path: Path) -> None:
    models = Cache(tmp_path)
    with pytest.raises(BaseModelError, match="there is no base model"):
        models.digest_of(NAME)
    path = published(tmp_path / CACHE)
    assert models.digest_of(NAME) == DIGEST
    path.rename(path.with_name(OTHER[:12]))
    with pytest.raises(BaseModelError, match=f"{OTHER[:12]}: holds the base model {NAME}"):
        models.digest_of(OTHER[:12])
    flip(published(tmp_path / CACHE) / WEIGHTS, 3)
    with pytest.raises(BaseModelError, match="its checksum is not"):
        models.digest_of(NAME)


def test_the_list_of_base_models_reports_flipped_bits_only_if_verified_but_other_damage_always(tmp_path: Path) -> None:
    cache = tmp_path / CACHE
    flip(published(cache) / WEIGHTS, 3)
    good = published(cache, OTHER)
    shutil.copytree(good, cache / ("1" * 12))
    shutil.copytree(good, cache / ("2" * 12))
    (cache / ("2" * 12) / MANIFEST).write_text('{"digest": 1, "files": {"a": 1}}')
    (cache / "notes").mkdir()
    base_model.new_staging(str(cache), DIGEST)
    faults = {each.name: each.fault for each in cached(tmp_path, verify=False)}
    assert {name for name, fault in faults.items() if fault} == {"1" * 12, "2" * 12}
    assert faults["1" * 12].endswith(f"holds the base model {OTHER[:12]}; remove it")
    found = {each.name: each for each in cached(tmp_path, verify=True)}
    assert {name for name, each in found.items() if each.fault} == {"1" * 12, "2" * 12, NAME}
    assert found[OTHER[:12]].size == sum((good / name).stat().st_size for name in FILES)
    assert found["2" * 12].size == 0


def test_prune_keeps_the_named_base_models_unless_damaged(tmp_path: Path) -> None:
    cache = tmp_path / CACHE
    for digest in (DIGEST, OTHER, "1" * 64):
        published(cache, digest)
    base_model.new_staging(str(cache), OTHER)
    base_model.new_staging(str(cache), "2" * 64)
    assert prune(tmp_path) == ([], [])
    assert staging_directories(cache) == []
    flip(cache / NAME / WEIGHTS, 3)
    assert prune(tmp_path) == ([NAME], [])
    assert prune(tmp_path, keep=["1" * 12, "3" * 12]) == ([OTHER[:12]], [])
    assert base_model.names_in(str(cache)) == ["1" * 12]
