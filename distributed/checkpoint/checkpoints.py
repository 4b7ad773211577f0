"""Save a training in the background, and resume it.

save() stops the training only while the state is copied (distributed/checkpoint/snapshot.py). A thread writes the copy
to the disk and publishes it when it is complete (distributed/checkpoint/directory.py); the training is informed when
that fails. The thread calls no collective: those belong to the thread that trains.

    step_00000120/
        state.pt               the state, written by rank 0: `torch.load` reads it
        .metadata, *.distcp    or each rank's shards of it, where FSDP shards (distributed/checkpoint/sharded.py)
        ranks.pt               what each rank keeps for itself, such as its random states
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
from distributed.checkpoint.directory import CheckpointError, FileNotes, Found
from distributed.checkpoint.snapshot import THREADS, Place, Snapshot, name_of
from distributed.training.collectives import Ranks

if TYPE_CHECKING:
    from distributed.checkpoint.sharded import Part

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "Found",
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
class _Job:
    """One checkpoint on its way to the disk."""

    final: Path
    manifest: dict[str, Any]
    whole: dict[str, Any]  # file name -> what torch.save writes there
    copy: dict[str, Any]
    part: Part | None  # of a sharded state
    writing: Path | None  # the folder beside, where it had to be made before planning
    begun: float  # when save() was called, as time.monotonic() has it


class Checkpoints:
    """The checkpoints of one training in one folder.

    Every rank makes one, and all ranks call its methods alike, on the thread that trains: they are
    collectives of the default process group. Only failed() is not.

        with Checkpoints(folder, rank=world.rank, size=world.size) as checkpoints:
            if found := checkpoints.newest():
                state = checkpoints.load(found, {"model": model.state_dict(), ...})
                model.load_state_dict(state["model"])
                ...
            checkpoints.save(step, {"model": model.state_dict(), ...}, own=random_state())
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 3,
        rank: int = 0,
        size: int = 1,
        sharded: bool = False,
        patience: float = 600.0,
    ) -> None:
        """Take the folder over: make it, lock it, remove what dead runs left half done.

        keep: how many of the newest stay; the best one stays besides.
        sharded: every rank writes its shards, into a folder that all nodes share. Otherwise rank 0 alone
            writes, and other nodes need not have the folder.
        patience: seconds that rank 0, done with its own shards, waits for the other ranks'.
        Raises CheckpointError when another run writes here.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}: the newest checkpoint at least must stay: say 1 or more")
        self.folder, self.keep, self.sharded, self.patience = Path(folder).absolute(), keep, sharded, patience
        self.ranks = Ranks(rank, size)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint")
        self._snapshot = Snapshot(sharded, self._threads)
        self._write: Future[None] | None = None
        self._hooks: dict[Optimizer, RemovableHandle] = {}
        self._leaving = threading.Event()
        self._lock: IO[str] | None = None
        self.ranks.decide(self._take_over)
        if sharded:
            # It takes half a second: now, and not at the first save.
            importlib.import_module("distributed.checkpoint.sharded")

    def _take_over(self) -> None:
        self._lock = directory.take_over(self.folder)

    # -- saving

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        own: Any = None,
        facts: Mapping[str, Any] | None = None,
        score: float | None = None,
        until: Optimizer | None = None,
    ) -> None:
        """Copy the state and return; it is written behind. The write before is waited for.

        own: something small that is each rank's own, its random states say; every rank's is kept.
        facts: what made this checkpoint, as JSON: read from the manifest before anything is loaded.
        score: the lowest is the best.
        until: an optimizer, whose tensors are copied after save() has returned, while the next gradients are
            computed; its next step() waits for that. Nothing else may change them meanwhile.
        Raises CheckpointError when the write before failed on any rank, or the state could not be loaded again.
        """
        begun = time.monotonic()
        manifest = self._manifest(step, facts or {}, score)
        owns = self._settle(Snapshot().take(own, "own"))
        if self.ranks.rank != 0 and not self.sharded:
            return
        final = directory.final_folder(self.folder, step)
        writing, part = self._planned(final, state) if self.sharded else (None, None)
        copy = self._copy(state, until)
        whole: dict[str, Any] = {} if self.ranks.rank != 0 else {"ranks.pt": owns}
        if not self.sharded:
            whole["state.pt"] = copy
        self._write = self._threads.submit(self._bring, _Job(final, manifest, whole, copy, part, writing, begun))
        log.debug(f"checkpoint {final.name}: the training went on after {time.monotonic() - begun:.3f} s")

    def _copy(self, state: Mapping[str, Any], until: Optimizer | None) -> dict[str, Any]:
        if until is None:
            return self._snapshot.take(state)
        if until not in self._hooks:
            self._hooks[until] = until.register_step_pre_hook(lambda *_: self._snapshot.finish())
        return self._snapshot.begin(state, until=until)

    def failed(self) -> BaseException | None:
        """Why the write behind failed on this rank, or None. Cheap: ask at each step, and stop the run."""
        return self._write.exception() if self._write is not None and self._write.done() else None

    def wait(self) -> None:
        """Until the last save is published, on every rank. Raises CheckpointError with the cause."""
        self._settle()

    def _settle(self, own: Any = None) -> list[Any]:
        """wait(), and what every rank gave."""
        write, self._write = self._write, None
        failure = write.exception() if write is not None else None
        told = self.ranks.everyone((None if failure is None else str(failure), own))
        if reason := next(filter(None, (reason for reason, _ in told)), None):
            raise CheckpointError(reason) from failure
        return [own for _, own in told]

    def _manifest(self, step: int, facts: Mapping[str, Any], score: float | None) -> dict[str, Any]:
        manifest = {
            "step": step,
            "score": score,
            "ranks": self.ranks.size,
            "sharded": self.sharded,
            "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "facts": facts,
        }
        try:
            return dict(json.loads(json.dumps(manifest, allow_nan=False)))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"facts {facts!r} or score {score!r} cannot be written as JSON: {error}") from error

    def _planned(self, final: Path, state: Mapping[str, Any]) -> tuple[Path, Part]:
        from distributed.checkpoint import sharded

        writing = self.ranks.decide(lambda: directory.new_folder(final))
        return writing, sharded.Part(writing, state, self.ranks)

    # -- on the thread behind

    def _bring(self, job: _Job) -> None:
        """Bring one checkpoint to the disk."""
        writing = job.writing
        try:
            self._snapshot.finish()
            writing = writing or directory.new_folder(job.final)
            with _without_crc32():
                self._write_files(job, writing)
        except Exception as error:
            cause = _first_cause(error)
            if self.ranks.rank == 0 and writing is not None:
                shutil.rmtree(writing, ignore_errors=True)
            elif job.part is not None:
                job.part.give_up(cause)
            raise CheckpointError(
                f"cannot write {job.final}: {cause}. The checkpoints before it are whole: mend the cause, and "
                f"run again to go on from the newest"
            ) from error

    def _write_files(self, job: _Job, writing: Path) -> None:
        notes: FileNotes = {}
        copied = time.monotonic()
        for name, content in job.whole.items():
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
        directory.prune(self.folder, job.manifest["step"], self.keep)

    def _is_late(self, start: float) -> bool:
        """Whether rank 0 has waited long enough for the other ranks."""
        patience = min(self.patience, GRACE) if self._leaving.is_set() else self.patience
        return time.monotonic() - start > patience

    # -- resuming

    def newest(self) -> Found | None:
        """The newest good checkpoint, every byte checked by rank 0, or None when there is none; the same on every rank.

        Raises CheckpointError when checkpoints exist and none can be used, or the directory cannot be listed.
        """
        return self.ranks.decide(lambda: directory.newest(self.folder))

    def best(self) -> Found | None:
        """The good checkpoint with the lowest score; otherwise as newest()."""
        return self.ranks.decide(lambda: directory.best(self.folder))

    def load(self, found: Found, state: dict[str, Any]) -> dict[str, Any]:
        """The state of a checkpoint: on the CPU, or in the sharded tensors of `state`.

        state: of the same training as it is now. Its tensors must be in the checkpoint with the same shapes.
            When sharded (from torch.distributed.checkpoint.state_dict.get_state_dict), it is filled and
            returned, and the world may have another size than the one that saved.
        Raises CheckpointError when the two do not fit, or the checkpoint cannot be read.
        """
        found.refuse_other_form(self.sharded)
        if self.sharded:
            from distributed.checkpoint import sharded

            sharded.load(found.path, state, self.ranks)
            return state
        loaded: dict[str, Any] = self._load(found.path / "state.pt")
        if misfit := next(_misfits(loaded, state), None):
            raise CheckpointError(f"{found.path} does not fit this training: {misfit}")
        return loaded

    def load_own(self, found: Found) -> Any:
        """What this rank gave as `own`; None from rank found.ranks on, where a smaller world had saved.

        Raises CheckpointError when it cannot be read.
        """
        owns = self._load(found.path / "ranks.pt")
        return owns[self.ranks.rank] if self.ranks.rank < len(owns) else None

    def _load(self, file: Path) -> Any:
        try:
            return self.ranks.load(file)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{file}: not loaded: {error}") from None
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error

    # -- leaving

    def close(self) -> None:
        """Wait for the last save, and give the folder back. Raises CheckpointError when that save failed."""
        try:
            self.wait()
        finally:
            self._leave()

    def _leave(self) -> None:
        """Finish this rank's write and give the folder back; no collective."""
        self._leaving.set()
        self._threads.shutdown(wait=True)
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
    for place, tensor in _tensors(state, ("state",)):
        saved = _value_at(loaded, place[1:])
        if not isinstance(saved, torch.Tensor):
            yield f"it has no {name_of(place)}"
        elif saved.shape != tensor.shape:
            yield f"its {name_of(place)} has the shape {tuple(saved.shape)}, and ours {tuple(tensor.shape)}"


def _tensors(value: Any, place: Place) -> Iterator[tuple[Place, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _tensors(item, (*place, key))


def _value_at(value: Any, place: Place) -> Any:
    """The value at a place of a state, or None."""
    for key in place:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _first_cause(error: BaseException) -> BaseException:
    """torch.save follows a failed write with an error of its own; the first one tells the cause."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return error


@contextmanager
def _without_crc32() -> Iterator[None]:
    """torch.save without its own checksums, for which it would stop the training's Python."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
