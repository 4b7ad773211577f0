"""Copies of a state, from which checkpoints are written.

Copies are in CPU memory (page-locked for CUDA tensors), which is reused. Parameters and optimizer state change only in
the optimizer's step. Therefore CPU tensors among them may be copied while the training computes the next gradients.
Before the next step, finish() copies the tensors that are not copied yet.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from distributed.checkpoint.directory import CheckpointError

KeyPath = tuple[object, ...]  # the keys that lead to a value: ("state", "model", "weight")

THREADS = min(4, len(os.sched_getaffinity(0)))  # 4 threads use all memory bandwidth of a CPU socket
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


class Snapshot:
    """Copies states, each into the memory of the previous copy.

    The first copy allocates that memory, which takes several times as long as a later one.
    """

    # These attributes describe the latest copy:
    _copies: dict[object, Tensor]  # identity of the original -> its copy
    _taken: dict[KeyPath, Tensor]  # key path -> memory that holds its copy
    _deferred: set[int] | None  # addresses of the CPU tensors to add to _pending; None: all CPU tensors
    _devices: set[torch.device]  # GPUs with copies in flight

    def __init__(self, sharded: bool = False) -> None:
        self._sharded = sharded
        self._memory: dict[KeyPath, Tensor] = {}  # memory of the previous copy
        self._pending: list[tuple[Tensor, Tensor, int]] = []  # source, destination, version of the source
        self._copying = threading.Lock()
        self._changed = False

    def take(self, state: Any, name: str = "state", overlapped: Optimizer | None = None) -> Any:
        """Return a copy of nested dicts, lists, scalars and tensors; tied tensors stay tied.

        A sharded tensor is copied as this rank's shard. The copy is valid until the next take().

        Args:
            name: name of the state in error messages.
            overlapped: an optimizer whose CPU tensors finish() copies later. finish() must run before its next step.

        Raises CheckpointError for objects that `torch.load(weights_only=True)` would refuse.
        """
        self._copies, self._taken, self._devices = {}, {}, set()
        self._pending, self._changed = [], False
        self._deferred = None if overlapped is None else _addresses(overlapped)
        copy = self._copy(state, (name,))
        if overlapped is None:
            with ThreadPoolExecutor(THREADS) as threads:
                list(threads.map(lambda each: each[1].copy_(each[0]), self._pending))
            self._pending = []
        for device in self._devices:
            torch.cuda.synchronize(device)
        self._memory = self._taken
        return copy

    def finish(self) -> None:
        """Copy the remaining tensors, or wait for the thread that copies them. May be called on any thread.

        Raises CheckpointError when a tensor was changed before it was copied.
        """
        with self._copying:
            while self._pending:
                tensor, copy, version = self._pending.pop()
                copy.copy_(tensor)
                self._changed = self._changed or tensor._version != version
        if self._changed:
            raise CheckpointError(
                "the state was changed while it was copied, other than by the optimizer's step; "
                "save without overlap= or overlapped=, or change the state after the next optimizer.step()"
            )

    def _copy(self, value: Any, path: KeyPath) -> Any:
        if isinstance(value, Tensor):
            return self._copy_of(self._local(value.detach(), path), path)
        if isinstance(value, Mapping):
            return {self._key(key, path): self._copy(item, (*path, key)) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copy(item, (*path, i)) for i, item in enumerate(value))
        if type(value) in PLAIN:
            return value
        raise CheckpointError(
            f"{name_of(path)} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be loaded "
            f"again without running code; save tensors, numbers, strings, and lists and dicts of them"
        )

    def _key(self, key: object, path: KeyPath) -> object:
        if type(key) is str or (type(key) is int and not self._sharded):
            return key
        expected = "a string" if self._sharded else "a string or an int"
        raise CheckpointError(f"{name_of(path)} has the key {key!r}: a key must be {expected}")

    def _local(self, tensor: Tensor, path: KeyPath) -> Tensor:
        if hasattr(tensor, "to_local") and not self._sharded:
            raise CheckpointError(f"{name_of(path)} is sharded: Checkpoints needs sharded=True for fsdp")
        return _shard(tensor)

    def _copy_of(self, tensor: Tensor, path: KeyPath) -> Tensor:
        identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if identity not in self._copies:
            memory = self._copies[identity] = self._taken[path] = self._memory_for(tensor, path)
            if tensor.is_cpu and (self._deferred is None or tensor.data_ptr() in self._deferred):
                self._pending.append((tensor, memory, tensor._version))
            else:
                memory.copy_(tensor, non_blocking=True)
        return self._copies[identity]

    def _memory_for(self, tensor: Tensor, path: KeyPath) -> Tensor:
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        memory = self._memory.get(path)
        if memory is not None and memory.shape == tensor.shape and memory.dtype == tensor.dtype:
            return memory
        return page_locked(tensor) if tensor.is_cuda else torch.empty_like(tensor, device="cpu")


def page_locked(tensor: Tensor) -> Tensor:
    """Allocate page-locked CPU memory for a copy of a tensor on a GPU.

    PyTorch rounds such memory up to a power of two, so a large tensor gets pages of its own. They are shared memory: a
    fork does not move them.
    """
    if tensor.nbytes < 2**20:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    layout = torch.empty_like(tensor, device="meta")
    pages = torch.frombuffer(mmap.mmap(-1, tensor.nbytes), dtype=torch.uint8)
    memory = pages.view(tensor.dtype).as_strided(layout.shape, layout.stride())
    cudart = torch.cuda.cudart()
    if error := int(cudart.cudaHostRegister(memory.data_ptr(), tensor.nbytes, 0)):
        raise CheckpointError(f"cannot lock {tensor.nbytes:,} bytes of CPU memory for the copy: CUDA error {error}")
    weakref.finalize(memory, cudart.cudaHostUnregister, memory.data_ptr())
    return memory


def _addresses(optimizer: Optimizer) -> set[int]:
    """Return the addresses of the optimizer's parameters and state tensors."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    moments = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return {_shard(tensor.detach()).data_ptr() for tensors in (parameters, moments) for tensor in tensors}


def _shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard, or the tensor itself when it is not sharded."""
    if not hasattr(tensor, "to_local"):
        return tensor
    local: Tensor = tensor.to_local()
    return local


def name_of(path: KeyPath) -> str:
    """Return the Python expression of a key path: state['model']['weight']."""
    return f"{path[0]}" + "".join(f"[{key!r}]" for key in path[1:])
