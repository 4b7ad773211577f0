"""Collectives for small Python values, and for files that rank 0 reads.

Each method is a collective of the default process group: every rank must call it, in the same order, on the training
thread. With one rank no process group is needed.
"""

from __future__ import annotations

import io
import itertools
import pickle
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist

from distributed.trust import file_in

T = TypeVar("T")
PIECE = 64 * 2**20  # bytes sent at once
MIN_DELAY, MAX_DELAY = 0.001, 0.25  # seconds between two looks at the store
_meetings = itertools.count()  # all ranks make the same calls in the same order


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and collectives for Python values."""

    rank: int = 0  # 0 .. size-1
    size: int = 1

    def meet(self) -> None:
        """Wait until every rank has called, however long that takes. Precedes a collective, which has a timeout."""
        if self.size == 1:
            return
        store, key = dist.distributed_c10d._get_default_store(), f"muster/{next(_meetings)}"
        if store.add(key, 1) == self.size:
            store.set(f"{key}/all", "")
        delay = MIN_DELAY
        while not store.check([f"{key}/all"]):  # store.wait() has a timeout, and prints when it is over
            time.sleep(delay)
            delay = min(2 * delay, MAX_DELAY)

    def call_on_rank_0(self, function: Callable[[], T]) -> T:
        """Call the function on rank 0 only. Every rank returns its result, or raises its exception.

        The other ranks wait for as long as the function takes.
        Exceptions other than OSError, ValueError and RuntimeError are raised on rank 0 only.
        """
        if self.size == 1:
            return function()
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = function()
            except (OSError, ValueError, RuntimeError) as error:
                answer[1] = error
        self.meet()
        dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise answer[1]
        result: T = answer[0]
        return result

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks in rank order on rank 0, and [] on other ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size if self.rank == 0 else []
        dist.gather_object(value, values or None)
        return values

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def load(self, file: Path, opener: Any = file_in) -> Any:
        """Load rank 0's file into CPU memory on every rank. opener: of open(), by default one that follows no link.

        Rank 0 sends the bytes, because other nodes may not have the file, or may have an older one. Raises OSError when
        rank 0 cannot read the file, and the exceptions of load_safely(). Every rank raises the same exception.
        """
        if self.size == 1:
            with open(file, "rb", opener=opener) as stream:
                return load_safely(stream)
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        content, rest = io.BytesIO(), self.call_on_rank_0(lambda: file.stat().st_size)
        while rest:
            piece = bytearray(min(rest, PIECE))
            self.call_on_rank_0(partial(_read_at, file, opener, content.tell(), piece))
            on_cpu = torch.frombuffer(piece, dtype=torch.uint8)
            on_device = on_cpu.to(device)
            dist.broadcast(on_device, src=0)
            on_cpu.copy_(on_device)
            rest -= content.write(piece)
        content.seek(0)
        return load_safely(content)


def _read_at(file: Path, opener: Any, offset: int, piece: bytearray) -> None:
    """Fill the piece with the bytes of the file at the offset."""
    with open(file, "rb", opener=opener) as stream:
        stream.seek(offset)
        if stream.readinto(piece) < len(piece):
            raise OSError(f"{file} became shorter while it was read")


def load_safely(file: Path | IO[bytes]) -> Any:
    """Load a file of torch.save() on the CPU, without running code from it.

    Raises pickle.UnpicklingError when torch.save() did not write the file, or when loading the file would run code. The
    message replaces PyTorch's, which suggests loading the file anyway.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise pickle.UnpicklingError(refusal(named[1] if named else "code")) from None
    except (EOFError, RuntimeError) as error:
        raise pickle.UnpicklingError(f"not a file that torch.save() wrote: {error}") from None


def refusal(what: str) -> str:
    """Return the message for a pickle that requests the object named `what`."""
    return f"it requests {what}, which no checkpoint needs; do not trust this file"
