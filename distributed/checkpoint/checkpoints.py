"""Save a training in the background, and resume it.

save() stops the training only while the state is copied (distributed/checkpoint/snapshot.py). A thread writes the copy
to disk and publishes it when it is complete (distributed/checkpoint/directory.py). If the thread fails, the next save()
or wait() raises its error. The thread calls no collectives: only the training thread does.

    step_00000120/
        state.pt               the state, written by rank 0: `torch.load` reads it
        .metadata, *.distcp    or, with FSDP, the shards of each rank (distributed/checkpoint/sharded.py)
        ranks.pt               state that differs between ranks, such as random states
        manifest.json          step, score, facts about the run, and the checksums of all files

Loading never runs code from a file (`weights_only=True`); save() refuses a state that could not be loaded this way.

newest() and best() raise the same CheckpointError on every rank when checkpoints exist and none is usable; load() and
load_per_rank() raise it when the given checkpoint cannot be used. The program must then end: training from step 0 is
right only when newest() returns None, which means "no checkpoint".
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from distributed.checkpoint import directory
from distributed.checkpoint.directory import CheckpointError, CheckpointInfo, FileEntries, Owner
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
    """Return the states of Python's, torch's and the GPUs' generators, and of NumPy's when it is imported."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if gpus := _gpus():
        state["cuda"] = [torch.cuda.get_rng_state(gpu) for gpu in gpus]
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore all generators from a result of random_state(). States of GPUs that are not used here are ignored."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    saved = state.get("cuda", [])  # version 0.1.0 saved one tensor
    for gpu, generator in zip(_gpus(), saved if isinstance(saved, list) else [saved], strict=False):
        torch.cuda.set_rng_state(generator, gpu)
    if "numpy" in state:
        importlib.import_module("numpy").random.set_state(state["numpy"])


def _gpus() -> list[int]:
    """Return this rank's GPU, then the others (dp uses them); none if CUDA is not in use, as asking initializes it."""
    if not torch.cuda.is_initialized():
        return []
    own, count = torch.cuda.current_device(), torch.cuda.device_count()
    return [(own + offset) % count for offset in range(count)]


# ---- saving and loading ----


@dataclass(frozen=True)
class _PendingWrite:
    """One checkpoint that the thread will write."""

    final: Path
    manifest: dict[str, Any]
    files: dict[str, Any]  # name -> what torch.save writes there
    copy: dict[str, Any]  # copy of the state: written by `shards` or, without shards, as one of `files`
    shards: ShardWriter | None  # None: not sharded
    unpublished: Path  # directory of the files until they are published; without shards, the thread creates it
    start: float  # time.monotonic() at the call of save()


@dataclass(frozen=True)
class _Candidate:
    """A checkpoint that all ranks verify."""

    found: CheckpointInfo


class Checkpoints:
    """The checkpoints of one training in one directory.

    Every rank creates a Checkpoints object and makes the same calls, on the training thread: all methods except
    failed() are collectives of the default process group.

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
        """Create the directory, lock it, and remove the incomplete checkpoints of earlier runs and attempts.

        keep: number of newest checkpoints to keep; the best one is kept in addition.
        sharded: every rank writes its shards, to a directory that all nodes share. Otherwise only rank 0 writes, and
            other nodes do not need the directory.
        shard_timeout: seconds that rank 0 waits for the shards of other ranks after writing its own.
        Raises CheckpointError when another run or a later attempt holds the lock, or the directory cannot be written
        to; raises ValueError when keep is below 1.
        """
        if keep < 1:
            raise ValueError(f"keep: expected 1 or more, got {keep}")
        self.path, self.keep, self.sharded, self.shard_timeout = Path(path).absolute(), keep, sharded, shard_timeout
        self.ranks = Ranks(rank, size)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._snapshot = Snapshot(sharded)
        self._write: Future[None] | None = None
        self._hooks: dict[Optimizer, RemovableHandle] = {}
        self._leaving = threading.Event()
        self.blocked: list[float] = []  # seconds that each save has blocked the training of this rank
        self._owner: Owner | None = None  # only on rank 0
        self.ranks.call_on_rank_0(self._take_over)
        if sharded:
            # The import takes half a second, which would otherwise stop the training at the first save.
            importlib.import_module("distributed.checkpoint.sharded")

    def _take_over(self) -> None:
        self._owner = directory.take_over(self.path)

    # -- saving

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        per_rank: Any = None,
        facts: Mapping[str, Any] | None = None,
        score: float | None = None,
        overlapped: Optimizer | None = None,
    ) -> None:
        """Copy the state and return; a thread writes the copy. Waits for the previous write.

        per_rank: a small state that differs between ranks, such as random states; saved for every rank.
        facts: JSON values about the run, readable from the manifest without loading tensors.
        score: lower is better.
        overlapped: an optimizer whose tensors are copied after save() returns, while the next gradients are computed.
            Its next step() waits for the copy. Until then nothing else may change these tensors.
        Raises CheckpointError when the previous write failed on any rank, when load() would refuse the state, or when
        facts or score cannot be written as JSON.
        """
        start = time.monotonic()
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
            self.blocked.append(time.monotonic() - start)
            return

        final = directory.final_path(self.path, step)
        shards = None
        if self.sharded:
            from distributed.checkpoint.sharded import ShardWriter

            unpublished = self.ranks.call_on_rank_0(lambda: self._new_directory(step))
            shards = ShardWriter(unpublished, state, self.ranks)
        else:
            unpublished = directory.final_path(self._owner_here.staging, step)
        if overlapped is not None and overlapped not in self._hooks:
            self._hooks[overlapped] = overlapped.register_step_pre_hook(lambda *_: self._finish_copy())
        copy = self._snapshot.take(state, overlapped=overlapped)
        files: dict[str, Any] = {"ranks.pt": states_per_rank} if self.ranks.rank == 0 else {}
        if not self.sharded:
            files["state.pt"] = copy
        pending = _PendingWrite(final, manifest, files, copy, shards, unpublished, start)
        self._write = self._thread.submit(self._write_job, pending)
        self.blocked.append(time.monotonic() - start)
        log.debug(f"checkpoint {final.name}: training resumed after {self.blocked[-1]:.3f} s")

    def _finish_copy(self) -> None:
        """Wait for the copy of the optimizer's tensors; called before each of its steps."""
        start = time.monotonic()
        self._snapshot.finish()
        self.blocked[-1] += time.monotonic() - start

    @property
    def _owner_here(self) -> Owner:
        """The Owner object with which this attempt writes to the directory. It exists only on rank 0."""
        assert self._owner is not None
        return self._owner

    def _new_directory(self, step: int) -> Path:
        """Make the unpublished directory of a step.

        Only on rank 0. Raises CheckpointError when another attempt has taken over the directory.
        """
        try:
            return self._owner_here.new_directory(step)
        except OSError as error:
            reason = directory.taken_over(self._owner_here.staging)
            raise CheckpointError(reason or f"cannot write step {step} to {self.path}: {error}") from error

    def failed(self) -> BaseException | None:
        """Return the error of the last write on this rank, or None.

        The call is cheap enough for every step, and not collective.
        """
        return self._write.exception() if self._write is not None and self._write.done() else None

    def wait(self) -> None:
        """On every rank, wait until the last save is published. Raises CheckpointError with the cause."""
        self._finish_write()

    def _finish_write(self, per_rank: Any = None) -> list[Any]:
        """Like wait(); returns the `per_rank` of every rank."""
        write, self._write = self._write, None
        failure = write.exception() if write is not None else None
        self.ranks.meet()
        outcomes = self.ranks.all_gather((None if failure is None else str(failure), per_rank))
        if reason := next(filter(None, (reason for reason, _ in outcomes)), None):
            raise CheckpointError(reason) from failure
        return [state for _, state in outcomes]

    # -- on the writing thread

    def _write_job(self, job: _PendingWrite) -> None:
        try:
            self._snapshot.finish()
            if job.shards is None:
                self._owner_here.new_directory(job.manifest["step"])
            with _without_crc32():
                self._write_files(job)
        except Exception as error:
            cause: BaseException = error  # after a failed write, torch.save raises another error: find the first
            while (earlier := cause.__cause__ or cause.__context__) is not None:
                cause = earlier
            if self.ranks.rank == 0:
                self._owner_here.discard(job.unpublished)
            elif job.shards is not None:
                job.shards.report_failure(cause)
            if reason := directory.taken_over(job.unpublished.parent):
                raise CheckpointError(reason) from error
            raise CheckpointError(
                f"cannot write {job.final}: {cause}. Earlier checkpoints are intact: fix the cause, then "
                f"run the same command to resume from the newest"
            ) from error

    def _write_files(self, job: _PendingWrite) -> None:
        entries: FileEntries = {}
        copied = time.monotonic()
        with directory.by_descriptor(job.unpublished) as here:
            for name, content in job.files.items():
                with directory.open_hashed(here / name, entries) as file:
                    torch.save(content, file)
        if job.shards is not None:
            job.shards.write(job.copy)
            if self.ranks.rank != 0:
                return
            start = time.monotonic()
            entries |= job.shards.collect(self.ranks.size, must_stop=lambda: self._must_stop(start, job.unpublished))
        complete = time.monotonic()
        self._owner_here.publish(job.unpublished, {**job.manifest, "files": entries})
        size = sum(entry["bytes"] for entry in entries.values())
        log.debug(
            f"checkpoint {job.final.name}: copied in {copied - job.start:.3f} s, {size:,} bytes written in "
            f"{complete - copied:.3f} s, published in {time.monotonic() - complete:.3f} s"
        )
        self._owner_here.prune(job.manifest["step"], self.keep)

    def _must_stop(self, start: float, unpublished: Path) -> bool:
        """Return whether rank 0 must stop waiting for other ranks: on a timeout, or when another attempt took over."""
        timeout = min(self.shard_timeout, GRACE) if self._leaving.is_set() else self.shard_timeout
        return time.monotonic() - start > timeout or not os.path.exists(unpublished)

    # -- resuming

    def newest(self) -> CheckpointInfo | None:
        """Return the newest valid checkpoint, or None when none exists. Every byte is verified.

        Raises CheckpointError, on every rank, when checkpoints exist and none is usable, or the directory cannot be
        listed.
        """
        return self._find(directory.newest)

    def best(self) -> CheckpointInfo | None:
        """Return the valid checkpoint with the lowest score; if none has a score, the newest. Raises like newest()."""
        return self._find(directory.best)

    def _find(self, find: Callable[..., CheckpointInfo | None]) -> CheckpointInfo | None:
        """Call directory.newest() or best() on rank 0, and verify each candidate with all ranks."""
        if self.ranks.rank == 0:
            return self.ranks.call_on_rank_0(lambda: find(self.path, self._fault_of_candidate))
        while True:
            answer: Any = self.ranks.call_on_rank_0(lambda: None)
            if not isinstance(answer, _Candidate):
                return cast("CheckpointInfo | None", answer)
            self._fault(answer.found)

    def _fault_of_candidate(self, found: CheckpointInfo) -> str | None:
        """On rank 0: make the other ranks call _fault() too, and return its result."""
        self.ranks.call_on_rank_0(lambda: _Candidate(found))
        return self._fault(found)

    def _fault(self, found: CheckpointInfo) -> str | None:
        """The first fault of the files, or None. All ranks share the work, if they see the directory."""
        names = sorted(found.files) if self.ranks.rank == 0 or found.sharded else []
        fault = found.fault(names[self.ranks.rank :: self.ranks.size] if found.sharded else names)
        self.ranks.meet()
        return next(filter(None, self.ranks.all_gather(fault)), None)

    def load(self, found: CheckpointInfo, state: dict[str, Any], optional: Iterable[str] = ()) -> dict[str, Any]:
        """Return the state of a checkpoint: on the CPU or, if sharded, in the tensors of `state`.

        state: the current state of the training. The checkpoint must hold its tensors with the same shapes. If sharded,
            `state` must hold results of torch.distributed.checkpoint.state_dict.get_state_dict, and its tensors are
            overwritten; the number of ranks may differ from that of the saving run.
        optional: the keys of `state` whose values the checkpoint may lack.
        Raises CheckpointError when the checkpoint does not fit `state`, or cannot be read.
        """
        found.check_sharding(self.sharded)
        if self.sharded:
            from distributed.checkpoint import sharded

            sharded.load(found.path, state, self.ranks, optional)
            return state
        loaded: dict[str, Any] = self._load(found.path / "state.pt")
        if mismatch := next(_mismatches(loaded, state), None):
            raise CheckpointError(f"{found.path} does not fit this training: {mismatch}")
        return loaded

    def load_per_rank(self, found: CheckpointInfo) -> Any:
        """Return what this rank passed to save() as `per_rank`; None for ranks that the saving run did not have.

        Raises CheckpointError when the file cannot be read.
        """
        states_per_rank = self._load(found.path / "ranks.pt")
        return states_per_rank[self.ranks.rank] if self.ranks.rank < len(states_per_rank) else None

    def _load(self, file: Path) -> Any:
        try:
            return self.ranks.load(file, directory.checkpoint_file)
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
        """Finish this rank's write and unlock the directory. Not collective."""
        self._leaving.set()
        self._thread.shutdown(wait=True)
        for hook in self._hooks.values():
            hook.remove()
        if self._owner is not None:
            self._owner.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.close()
        else:
            self._leave()  # other ranks may have exited: no collectives


def _mismatches(loaded: Any, state: Any) -> Iterator[str]:
    """Yield one message for each tensor of `state` that `loaded` lacks or holds in another shape."""
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
            yield f"its {name_of(path)} has the shape {tuple(saved.shape)}, expected {tuple(tensor.shape)}"


def _tensors(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _tensors(item, (*path, key))


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Disable torch.save's checksums: it computes them while it holds the GIL, which would stop the training."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
