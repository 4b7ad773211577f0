"""The copy of a state that a checkpoint is written from.

It is made in CPU memory (page-locked for CUDA tensors), in the same memory each time. What only an optimizer's
step changes, its parameters and moments, may be copied while the training computes the next gradients: the
step waits until it is done, and helps.

The bytes are moved piece by piece, each thread the next piece. torch's own threads would all wait for each
other after every tensor; on a busy node, where one of them is held up, that took ten times as long.
"""

from __future__ import annotations

import ctypes
import os
import queue
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from distributed.checkpoint.directory import CheckpointError

Place = tuple[object, ...]  # the keys that lead to a value: ("state", "model", "weight")

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
THREADS = min(4, len(os.sched_getaffinity(0)))  # as many as fill a memory bus
PIECE = 4 * 2**20  # bytes that a thread moves at once


@dataclass(frozen=True)
class Piece:
    """Some bytes of a tensor, on their way to its copy."""

    tensor: Tensor
    version: int  # of the tensor, which every change in place counts up
    source: int
    target: int
    bytes: int

    def move(self) -> bool:
        """Whether the tensor was still the same afterwards. Other threads run meanwhile."""
        ctypes.memmove(self.target, self.source, self.bytes)
        return self.tensor._version == self.version


class Snapshot:
    """Copies states, each into the memory of the one before.

    The first copy allocates that memory, which takes several times as long as a later one.
    """

    # Of the copy in the making:
    _copies: dict[object, Tensor]  # identity of the original -> its copy
    _taken: dict[Place, Tensor]  # memory of this copy
    _later: set[int] | None  # addresses of what may be moved after begin(); None: of everything
    _devices: set[torch.device]  # that copy to page-locked memory

    def __init__(self, sharded: bool = False, threads: ThreadPoolExecutor | None = None) -> None:
        """threads: idle ones that help with take()."""
        self._sharded, self._threads = sharded, threads
        self._memory: dict[Place, Tensor] = {}  # of the copy before
        self._pieces: queue.Queue[Piece] = queue.Queue()
        self._changed = False

    def take(self, state: Any, name: str = "state") -> Any:
        """The same nested dicts, lists and scalars, with every tensor copied; tied tensors stay tied.

        Of a sharded tensor it holds this rank's shard. Valid until the next copy. `name` is for errors.
        Raises CheckpointError for what `torch.load(weights_only=True)` would refuse to give back.
        """
        copy = self.begin(state, name)
        if self._threads is not None:
            for _ in range(THREADS - 1):
                self._threads.submit(self.finish)
        self.finish()
        return copy

    def begin(self, state: Any, name: str = "state", until: Optimizer | None = None) -> Any:
        """As take(), but complete only after finish(), on any thread.

        until: copy all but this optimizer's tensors now; its step must not come before finish().
        """
        self._copies, self._taken, self._devices = {}, {}, set()
        self._later = None if until is None else _addresses(until)
        self._pieces, self._changed = queue.Queue(), False
        copy = self._copy(state, (name,))
        for device in self._devices:
            torch.cuda.synchronize(device)
        self._memory = self._taken
        return copy

    def finish(self) -> None:
        """Move what is left, and wait for what others are moving.

        Raises CheckpointError when a tensor was changed that was not copied yet.
        """
        pieces = self._pieces
        with suppress(queue.Empty):
            while True:
                if not pieces.get_nowait().move():
                    self._changed = True
                pieces.task_done()
        pieces.join()
        if self._changed:
            raise CheckpointError(
                "the state was changed while it was copied, and not by the step of the optimizer that was named: "
                "save without naming one, or change the state after its next step"
            )

    def _copy(self, value: Any, place: Place) -> Any:
        if isinstance(value, Tensor):
            return self._copy_of(self._local(value.detach(), place), place)
        if isinstance(value, Mapping):
            return {self._key(key, place): self._copy(item, (*place, key)) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copy(item, (*place, i)) for i, item in enumerate(value))
        if type(value) in PLAIN:
            return value
        raise CheckpointError(
            f"{name_of(place)} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be loaded "
            f"again without running code: save tensors, numbers, strings, and lists and dicts of them"
        )

    def _key(self, key: object, place: Place) -> object:
        if type(key) is str or (type(key) is int and not self._sharded):
            return key
        wanted = "a string" if self._sharded else "a string or an int"
        raise CheckpointError(f"{name_of(place)} has the key {key!r}: a key must be {wanted}")

    def _local(self, tensor: Tensor, place: Place) -> Tensor:
        if hasattr(tensor, "to_local") and not self._sharded:
            raise CheckpointError(f"{name_of(place)} is sharded: Checkpoints needs sharded=True for fsdp")
        return _shard(tensor)

    def _copy_of(self, tensor: Tensor, place: Place) -> Tensor:
        identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if identity not in self._copies:
            memory = self._copies[identity] = self._taken[place] = self._memory_for(tensor, place)
            if self._may_be_moved(tensor, memory):
                for piece in _pieces(tensor, memory):
                    self._pieces.put(piece)
            else:
                memory.copy_(tensor, non_blocking=True)
        return self._copies[identity]

    def _memory_for(self, tensor: Tensor, place: Place) -> Tensor:
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        memory = self._memory.get(place)
        if memory is not None and memory.shape == tensor.shape and memory.dtype == tensor.dtype:
            return memory
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)

    def _may_be_moved(self, tensor: Tensor, memory: Tensor) -> bool:
        """Whether it may be copied later, and byte by byte: `memory` is dense."""
        if self._later is not None and tensor.data_ptr() not in self._later:
            return False
        plain = tensor.is_cpu and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
        return plain and tensor.stride() == memory.stride()


def _pieces(tensor: Tensor, memory: Tensor) -> Iterator[Piece]:
    source, target, version = tensor.data_ptr(), memory.data_ptr(), tensor._version
    for start in range(0, tensor.nbytes, PIECE):
        yield Piece(tensor, version, source + start, target + start, min(PIECE, tensor.nbytes - start))


def _addresses(optimizer: Optimizer) -> set[int]:
    """Of all that the optimizer's step changes, and nothing else does."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    moments = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return {_shard(tensor.detach()).data_ptr() for tensors in (parameters, moments) for tensor in tensors}


def _shard(tensor: Tensor) -> Tensor:
    """This rank's part of it, or all of it where it is not sharded."""
    if not hasattr(tensor, "to_local"):
        return tensor
    local: Tensor = tensor.to_local()
    return local


def name_of(place: Place) -> str:
    """As it is written in Python: state['model']['weight']."""
    return f"{place[0]}" + "".join(f"[{key!r}]" for key in place[1:])
