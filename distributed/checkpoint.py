"""Save behind the training's back; resume where it was.

save() stops the training only while it copies the state into memory that it keeps for that. A thread brings
the copy to the disk, whole or not at all (distributed/step_folder.py), and when that fails the run is told.
The thread calls no collective: those belong to the thread that trains.

    step_00000120/
        state.pt               the state, written by rank 0: `torch.load` reads it
        .metadata, *.distcp    or each rank's shards of it, where FSDP shards (distributed/shards.py)
        ranks.pt               what each rank keeps for itself, such as its random states
        manifest.json          step, score, facts about the run, and the checksums of all files

Nothing is loaded that could run code (`weights_only=True`), and what could not be loaded so is not saved.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distributed import step_folder
from distributed.ranks import Ranks
from distributed.step_folder import CheckpointError, FileNotes, Found

if TYPE_CHECKING:
    from distributed.shards import Part

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "Found",
    "random_state",
    "set_random_state",
]

Place = tuple[object, ...]  # the keys that lead to a value: ("state", "model", "weight")
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
Piece = tuple[int, int, int]  # where to, where from, bytes
PIECE = 4 * 2**20  # bytes that a thread copies at once
THREADS = min(4, len(os.sched_getaffinity(0)))  # as many as fill a memory bus
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


# ---- the copy that the training waits for ----


class Snapshot:
    """Copies states into CPU memory (page-locked for CUDA tensors), the same memory each time.

    The first copy allocates that memory, which takes several times as long as a later copy.
    """

    def __init__(self, sharded: bool = False, threads: ThreadPoolExecutor | None = None) -> None:
        """threads: idle ones that help to copy."""
        self._sharded, self._threads = sharded, threads
        self._memory: dict[Place, torch.Tensor] = {}

    def take(self, state: Any, name: str = "state") -> Any:
        """The same nested dicts, lists and scalars, with every tensor copied; tied tensors stay tied.

        Of a sharded tensor it holds this rank's shard. Valid until the next take(). `name` is for errors.
        Raises CheckpointError for what `torch.load(weights_only=True)` would refuse to give back.
        """
        self._copies: dict[object, torch.Tensor] = {}  # identity of the original -> its copy
        self._taken: dict[Place, torch.Tensor] = {}
        self._devices: set[torch.device] = set()
        self._pieces: deque[Piece] = deque()
        copy = self._copy(state, (name,))
        self._move_pieces()
        for device in self._devices:
            torch.cuda.synchronize(device)
        self._memory = self._taken
        return copy

    def _copy(self, value: Any, place: Place) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copy_of(self._local(value.detach(), place), place)
        if isinstance(value, Mapping):
            return {self._key(key, place): self._copy(item, (*place, key)) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copy(item, (*place, i)) for i, item in enumerate(value))
        if type(value) in PLAIN:
            return value
        raise CheckpointError(
            f"{_name(place)} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be loaded "
            f"again without running code: save tensors, numbers, strings, and lists and dicts of them"
        )

    def _key(self, key: object, place: Place) -> object:
        if type(key) is str or (type(key) is int and not self._sharded):
            return key
        wanted = "a string" if self._sharded else "a string or an int"
        raise CheckpointError(f"{_name(place)} has the key {key!r}: a key must be {wanted}")

    def _local(self, tensor: torch.Tensor, place: Place) -> torch.Tensor:
        if not hasattr(tensor, "to_local"):
            return tensor
        if not self._sharded:
            raise CheckpointError(f"{_name(place)} is sharded: Checkpoints needs sharded=True for fsdp")
        local: torch.Tensor = tensor.to_local()
        return local

    def _copy_of(self, tensor: torch.Tensor, place: Place) -> torch.Tensor:
        identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if identity not in self._copies:
            self._copies[identity] = self._taken[place] = memory = self._memory_for(tensor, place)
            if tensor.is_cuda:
                self._devices.add(tensor.device)
            if _is_laid_out_as(tensor, memory):
                self._pieces += _pieces(tensor, memory)
            else:
                memory.copy_(tensor, non_blocking=True)
        return self._copies[identity]

    def _memory_for(self, tensor: torch.Tensor, place: Place) -> torch.Tensor:
        memory = self._memory.get(place)
        if memory is not None and memory.shape == tensor.shape and memory.dtype == tensor.dtype:
            return memory
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)

    def _move_pieces(self) -> None:
        """Each thread the next piece; torch's own threads would wait for each other after every tensor."""
        helpers = [self._threads.submit(_move, self._pieces) for _ in range(THREADS - 1)] if self._threads else []
        _move(self._pieces)
        wait(helpers)


def _is_laid_out_as(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """Whether the bytes of one are those of the other. `memory` is dense."""
    return tensor.is_cpu and tensor.stride() == memory.stride() and not (tensor.is_conj() or tensor.is_neg())


def _pieces(tensor: torch.Tensor, memory: torch.Tensor) -> Iterator[Piece]:
    source, target = tensor.data_ptr(), memory.data_ptr()
    for start in range(0, tensor.nbytes, PIECE):
        yield target + start, source + start, min(PIECE, tensor.nbytes - start)


def _move(pieces: deque[Piece]) -> None:
    with suppress(IndexError):  # another thread took the last one
        while True:
            ctypes.memmove(*pieces.popleft())  # lets other threads run


def _name(place: Place) -> str:
    return f"{place[0]}" + "".join(f"[{key!r}]" for key in place[1:])


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
        self._leaving = threading.Event()
        self._lock: Any = None
        self.ranks.decide(self._take_over)

    def _take_over(self) -> None:
        self._lock = step_folder.take_over(self.folder)

    # -- saving

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        own: Any = None,
        facts: Mapping[str, Any] | None = None,
        score: float | None = None,
    ) -> None:
        """Copy the state and return; it is written behind. The write before is waited for.

        own: something small that is each rank's own, its random states say; every rank's is kept.
        facts: what made this checkpoint, as JSON: read from the manifest before anything is loaded.
        score: the lowest is the best.
        Raises CheckpointError when the write before failed on any rank, or the state could not be loaded again.
        """
        manifest = self._manifest(step, facts or {}, score)
        self.wait()
        owns = self.ranks.gather(Snapshot().take(own, "own"))
        if self.ranks.rank != 0 and not self.sharded:
            return
        final = step_folder.final_folder(self.folder, step)
        writing, part = self._planned(final, state) if self.sharded else (None, None)
        copy = self._snapshot.take(state)
        whole: dict[str, Any] = {} if self.ranks.rank != 0 else {"ranks.pt": owns}
        if not self.sharded:
            whole["state.pt"] = copy
        self._write = self._threads.submit(self._bring, _Job(final, manifest, whole, copy, part, writing))

    def failed(self) -> BaseException | None:
        """Why the write behind failed on this rank, or None. Cheap: ask at each step, and stop the run."""
        return self._write.exception() if self._write is not None and self._write.done() else None

    def wait(self) -> None:
        """Until the last save is published, on every rank. Raises CheckpointError with the cause."""
        write, self._write = self._write, None
        failure = write.exception() if write is not None else None
        reasons = self.ranks.everyone(None if failure is None else str(failure))
        if reason := next(filter(None, reasons), None):
            raise CheckpointError(reason) from failure

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
        shards = importlib.import_module("distributed.shards")
        writing = self.ranks.decide(lambda: step_folder.new_folder(final))
        return writing, shards.Part(writing, state, self.ranks)

    # -- on the thread behind

    def _bring(self, job: _Job) -> None:
        """Bring one checkpoint to the disk."""
        writing = job.writing
        try:
            writing = writing or step_folder.new_folder(job.final)
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
        for name, content in job.whole.items():
            with step_folder.written(writing / name, notes) as file:
                torch.save(content, file)
        if job.part is not None:
            job.part.write(job.copy)
            if self.ranks.rank != 0:
                return
            start = time.monotonic()
            notes |= job.part.collect(self.ranks.size, late=lambda: self._is_late(start))
        step_folder.publish(writing, job.final, {**job.manifest, "files": notes})
        step_folder.prune(self.folder, job.manifest["step"], self.keep)

    def _is_late(self, start: float) -> bool:
        """Whether rank 0 has waited long enough for the other ranks."""
        patience = min(self.patience, GRACE) if self._leaving.is_set() else self.patience
        return time.monotonic() - start > patience

    # -- resuming

    def newest(self) -> Found | None:
        """The newest good checkpoint, every byte checked by rank 0; on every rank the same."""
        return self.ranks.decide(lambda: step_folder.newest(self.folder))

    def best(self) -> Found | None:
        """The good checkpoint with the lowest score, or None where none has one; on every rank the same."""
        return self.ranks.decide(lambda: step_folder.best(self.folder))

    def load(self, found: Found, state: dict[str, Any]) -> dict[str, Any]:
        """The state of a checkpoint: on the CPU, or in the sharded tensors of `state`.

        state: of the same training as it is now. Its tensors must be in the checkpoint with the same shapes.
            When sharded (from torch.distributed.checkpoint.state_dict.get_state_dict), it is filled and
            returned, and the world may have another size than the one that saved.
        Raises CheckpointError when the two do not fit.
        """
        if found.sharded != self.sharded:
            was, now = ("in shards", "whole") if found.sharded else ("whole", "in shards")
            raise CheckpointError(
                f"{found.path} was written {was}, and this run reads and writes {now}: resume with the strategy "
                f"that wrote it, or start anew in another folder"
            )
        if self.sharded:
            importlib.import_module("distributed.shards").load(found.path, state)
            return state
        loaded: dict[str, Any] = self.ranks.load(found.path / "state.pt")
        if misfit := next(_misfits(loaded, state), None):
            raise CheckpointError(f"{found.path} does not fit this training: {misfit}")
        return loaded

    def load_own(self, found: Found) -> Any:
        """What this rank gave as `own`; None from rank found.ranks on, where a smaller world had saved."""
        owns = self.ranks.load(found.path / "ranks.pt")
        return owns[self.ranks.rank] if self.ranks.rank < len(owns) else None

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
            yield f"it has no {_name(place)}"
        elif saved.shape != tensor.shape:
            yield f"its {_name(place)} has the shape {tuple(saved.shape)}, and ours {tuple(tensor.shape)}"


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
