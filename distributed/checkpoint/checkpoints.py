"""Save a training in the background, and resume it.

save() stops the training only while the state is copied (distributed/checkpoint/snapshot.py). A thread writes the copy
to the disk and publishes it when it is complete (distributed/checkpoint/directory.py); the training is informed when
that fails. The thread calls no collective: those belong to the thread that trains.

    step_00000120/
        state.pt               the state, written by rank 0: `torch.load` reads it
        .metadata, *.distcp    or each rank's shards of it, where FSDP shards (distributed/checkpoint/sharded.py)
        ranks.pt               what differs between ranks, such as their random states
        manifest.json          step, score, facts about the run, and the checksums of all files

Nothing is loaded that could run code (`weights_only=True`), and what could not be loaded so is not saved.

Every method that reads raises CheckpointError, the same on every rank, when what is there cannot be used: end the
program then. To train from step 0 is right only when newest() returns None, which means that there is no checkpoint.
"""

from __future__ import annotations

import importlib
import json
import logging
import pickle
import random
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from distributed.checkpoint import directory
from distributed.checkpoint.directory import CheckpointError, CheckpointInfo, FileNotes
from distributed.checkpoint.snapshot import KeyPath, Snapshot, name_of
from distributed.training.collectives import Ranks

if TYPE_CHECKING:
    from distributed.checkpoint.sharded import ShardWriter

__all__ = [
    "CheckpointError",
    "CheckpointInfo",
    "Checkpoints",
    "random_state",
    "set_random_state",
]

log = logging.getLogger(__name__)
GRACE = 5.0  # seconds that rank 0 waits for other ranks' shards when the run ends with an error


# ---- random states ----


def random_state() -> dict[str, Any]:
    """Of all generators that this process uses: Python's, NumPy's where it is imported, torch's, this GPU's."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Bring all generators to a state of random_state(); a GPU's only where there is one."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        importlib.import_module("numpy").random.set_state(state["numpy"])


# ---- saving and loading ----


@dataclass(frozen=True)
class _PendingWrite:
    """One checkpoint that is to be written."""

    final: Path
    manifest: dict[str, Any]
    files: dict[str, Any]  # name -> what torch.save writes there
    copy: dict[str, Any]
    part: ShardWriter | None  # of a sharded state
    writing: Path | None  # the directory that is written, where planning needed it before
    begun: float  # when save() was called, as time.monotonic() has it


class Checkpoints:
    """The checkpoints of one training in one directory.

    Every rank makes one, and all ranks call its methods alike, on the thread that trains: they are
    collectives of the default process group. Only failed() is not.

        with Checkpoints(directory, rank=world.rank, size=world.size) as checkpoints:
            if found := checkpoints.newest():
                state = checkpoints.load(found, {"model": model.state_dict(), ...})
                model.load_state_dict(state["model"])
                ...
            checkpoints.save(step, {"model": model.state_dict(), ...}, per_rank=random_state())

    `distributed.checkpoint.checkpointer` does this for the objects of a training.
    """

    def __init__(
        self,
        path: Path,
        keep: int = 3,
        rank: int = 0,
        size: int = 1,
        sharded: bool = False,
        shard_timeout: float = 600.0,
    ) -> None:
        """Make the directory, lock it, and remove the unfinished checkpoints of runs that have ended.

        keep: how many of the newest stay; the best one stays besides.
        sharded: every rank writes its shards, into a directory that all nodes share. Otherwise rank 0 alone
            writes, and other nodes need not have the directory.
        shard_timeout: seconds that rank 0, done with its own shards, waits for the other ranks'.
        Raises CheckpointError when another run writes here.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}: the newest checkpoint at least must stay: say 1 or more")
        self.path, self.keep, self.sharded, self.shard_timeout = Path(path).absolute(), keep, sharded, shard_timeout
        self.ranks = Ranks(rank, size)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._snapshot = Snapshot(sharded)
        self._write: Future[None] | None = None
        self._hooks: dict[Optimizer, RemovableHandle] = {}
        self._leaving = threading.Event()
        self._lock: IO[str] | None = None
        self.ranks.call_on_rank_0(self._take_over)
        if sharded:
            # It takes half a second: now, and not at the first save.
            importlib.import_module("distributed.checkpoint.sharded")

    def _take_over(self) -> None:
        self._lock = directory.take_over(self.path)  # only on rank 0, and not sent to the others

    # -- saving

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        per_rank: Any = None,
        facts: Mapping[str, Any] | None = None,
        score: float | None = None,
        until: Optimizer | None = None,
    ) -> None:
        """Copy the state and return; a thread writes the copy. Waits for the write before.

        per_rank: a small state that differs between ranks, such as random states; every rank's is saved.
        facts: what made this checkpoint, as JSON: read from the manifest before anything is loaded.
        score: the lowest is the best.
        until: an optimizer, whose tensors are copied after save() has returned, while the next gradients are
            computed; its next step() waits for that. Nothing else may change them meanwhile.
        Raises CheckpointError when the write before failed on any rank, or the state could not be loaded again.
        """
        begun = time.monotonic()
        manifest = {
            "step": step,
            "score": score,
            "ranks": self.ranks.size,
            "sharded": self.sharded,
            "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "facts": facts or {},
        }
        try:
            manifest = json.loads(json.dumps(manifest, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"facts {facts!r} or score {score!r} cannot be written as JSON: {error}") from error
        states_per_rank = self._finish_write(Snapshot().take(per_rank, "per_rank"))
        if self.ranks.rank != 0 and not self.sharded:
            return

        final = directory.final_path(self.path, step)
        writing = part = None
        if self.sharded:
            from distributed.checkpoint.sharded import ShardWriter

            writing = self.ranks.call_on_rank_0(lambda: directory.new_directory(final))
            part = ShardWriter(writing, state, self.ranks)
        if until is not None and until not in self._hooks:
            self._hooks[until] = until.register_step_pre_hook(lambda *_: self._snapshot.finish())
        copy = self._snapshot.take(state, until=until)
        files: dict[str, Any] = {"ranks.pt": states_per_rank} if self.ranks.rank == 0 else {}
        if not self.sharded:
            files["state.pt"] = copy
        pending = _PendingWrite(final, manifest, files, copy, part, writing, begun)
        self._write = self._thread.submit(self._write_job, pending)
        log.debug(f"checkpoint {final.name}: the training went on after {time.monotonic() - begun:.3f} s")

    def failed(self) -> BaseException | None:
        """Why the last write failed on this rank, or None. Cheap: ask at each step, and stop the run."""
        return self._write.exception() if self._write is not None and self._write.done() else None

    def wait(self) -> None:
        """Until the last save is published, on every rank. Raises CheckpointError with the cause."""
        self._finish_write()

    def _finish_write(self, per_rank: Any = None) -> list[Any]:
        """Like wait(); returns the `per_rank` of every rank."""
        write, self._write = self._write, None
        failure = write.exception() if write is not None else None
        outcomes = self.ranks.all_gather((None if failure is None else str(failure), per_rank))
        if reason := next(filter(None, (reason for reason, _ in outcomes)), None):
            raise CheckpointError(reason) from failure
        return [state for _, state in outcomes]

    # -- on the writing thread

    def _write_job(self, job: _PendingWrite) -> None:
        writing = job.writing
        try:
            self._snapshot.finish()
            writing = writing or directory.new_directory(job.final)
            with _without_crc32():
                self._write_files(job, writing)
        except Exception as error:
            cause: BaseException = error  # torch.save follows a failed write with an error of its own
            while (earlier := cause.__cause__ or cause.__context__) is not None:
                cause = earlier
            if self.ranks.rank == 0 and writing is not None:
                shutil.rmtree(writing, ignore_errors=True)
            elif job.part is not None:
                job.part.give_up(cause)
            raise CheckpointError(
                f"cannot write {job.final}: {cause}. The checkpoints before it are whole: mend the cause, and "
                f"run again to go on from the newest"
            ) from error

    def _write_files(self, job: _PendingWrite, writing: Path) -> None:
        notes: FileNotes = {}
        copied = time.monotonic()
        for name, content in job.files.items():
            with directory.written(writing / name, notes) as file:
                torch.save(content, file)
        if job.part is not None:
            job.part.write(job.copy)
            if self.ranks.rank != 0:
                return
            start = time.monotonic()
            notes |= job.part.collect(self.ranks.size, late=lambda: self._is_late(start))
        complete = time.monotonic()
        directory.publish(writing, job.final, {**job.manifest, "files": notes})
        size = sum(note["bytes"] for note in notes.values())
        log.debug(
            f"checkpoint {job.final.name}: copied in {copied - job.begun:.3f} s, {size:,} bytes written in "
            f"{complete - copied:.3f} s, published in {time.monotonic() - complete:.3f} s"
        )
        directory.prune(self.path, job.manifest["step"], self.keep)

    def _is_late(self, start: float) -> bool:
        """Whether rank 0 has waited long enough for the other ranks."""
        timeout = min(self.shard_timeout, GRACE) if self._leaving.is_set() else self.shard_timeout
        return time.monotonic() - start > timeout

    # -- resuming

    def newest(self) -> CheckpointInfo | None:
        """The newest good checkpoint, every byte checked by rank 0, or None when there is none; the same on every rank.

        Raises CheckpointError when checkpoints exist and none can be used, or the directory cannot be listed.
        """
        return self.ranks.call_on_rank_0(lambda: directory.newest(self.path))

    def best(self) -> CheckpointInfo | None:
        """The good checkpoint with the lowest score; otherwise as newest()."""
        return self.ranks.call_on_rank_0(lambda: directory.best(self.path))

    def load(self, found: CheckpointInfo, state: dict[str, Any]) -> dict[str, Any]:
        """The state of a checkpoint: on the CPU, or in the sharded tensors of `state`.

        state: of the same training as it is now. Its tensors must be in the checkpoint with the same shapes.
            When sharded (from torch.distributed.checkpoint.state_dict.get_state_dict), it is filled and
            returned, and the world may have another size than the one that saved.
        Raises CheckpointError when the two do not fit, or the checkpoint cannot be read.
        """
        found.check_sharding(self.sharded)
        if self.sharded:
            from distributed.checkpoint import sharded

            sharded.load(found.path, state, self.ranks)
            return state
        loaded: dict[str, Any] = self._load(found.path / "state.pt")
        if misfit := next(_misfits(loaded, state), None):
            raise CheckpointError(f"{found.path} does not fit this training: {misfit}")
        return loaded

    def load_per_rank(self, found: CheckpointInfo) -> Any:
        """What this rank passed as `per_rank`; None for ranks that the saving run did not have.

        Raises CheckpointError when it cannot be read.
        """
        states_per_rank = self._load(found.path / "ranks.pt")
        return states_per_rank[self.ranks.rank] if self.ranks.rank < len(states_per_rank) else None

    def _load(self, file: Path) -> Any:
        try:
            return self.ranks.load(file)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{file}: not loaded: {error}") from None
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error

    # -- leaving

    def close(self) -> None:
        """Wait for the last save, and unlock the directory. Raises CheckpointError when that save failed."""
        try:
            self.wait()
        finally:
            self._leave()

    def _leave(self) -> None:
        """Finish this rank's write, and unlock the directory; no collective."""
        self._leaving.set()
        self._thread.shutdown(wait=True)
        for hook in self._hooks.values():
            hook.remove()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.close()
        else:
            self._leave()  # the other ranks may be gone: ask them nothing


def _misfits(loaded: Any, state: Any) -> Iterator[str]:
    """The tensors of `state` that `loaded` has not, or in another shape."""
    for path, tensor in _tensors(state, ("state",)):
        saved = loaded
        try:
            for key in path[1:]:
                saved = saved[key]
        except (KeyError, IndexError, TypeError):
            saved = None
        if not isinstance(saved, torch.Tensor):
            yield f"it has no {name_of(path)}"
        elif saved.shape != tensor.shape:
            yield f"its {name_of(path)} has the shape {tuple(saved.shape)}, and ours {tuple(tensor.shape)}"


def _tensors(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _tensors(item, (*path, key))


@contextmanager
def _without_crc32() -> Iterator[None]:
    """torch.save without its own checksums, for which it would stop the training's Python."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
