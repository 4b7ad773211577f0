"""Small values that the ranks of a run exchange, and files that rank 0 reads for all.

Each method is a collective of the default process group: every rank calls it, in the same order, on the
thread that the training's own collectives run on. With one rank nothing is sent, and no group is needed.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
PIECE = 64 * 2**20  # bytes sent at once


@dataclass(frozen=True)
class Ranks:
    """This rank among the others."""

    rank: int = 0  # 0 .. size-1
    size: int = 1

    def call_on_rank_0(self, function: Callable[[], T]) -> T:
        """What the function returns, or raises, on rank 0, which alone calls it. The same on every rank."""
        if self.size == 1:
            return function()
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = function()
            except (OSError, ValueError, RuntimeError) as error:
                answer[1] = error
        dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise answer[1]
        result: T = answer[0]
        return result

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks, on rank 0; elsewhere an empty list."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size if self.rank == 0 else []
        dist.gather_object(value, values or None)
        return values

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def load(self, file: Path) -> Any:
        """Rank 0's file, loaded on the CPU of every rank: other nodes may have no such file, or an older one.

        Raises OSError when rank 0 cannot read the file, and what load_safely() raises; the same on every rank.
        """
        if self.size == 1:
            return load_safely(file)
        content = io.BytesIO()
        self._send(file, content)
        content.seek(0)
        return load_safely(content)

    def _send(self, file: Path, content: io.BytesIO) -> None:
        """Rank 0's file to every rank's memory, piece by piece."""
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        rest = self.call_on_rank_0(lambda: file.stat().st_size)
        while rest:
            piece = bytearray(min(rest, PIECE))
            self.call_on_rank_0(partial(_read_at, file, content.tell(), piece))
            here = torch.frombuffer(piece, dtype=torch.uint8)
            there = here.to(device)
            dist.broadcast(there, src=0)
            here.copy_(there)
            rest -= content.write(piece)


def _read_at(file: Path, place: int, piece: bytearray) -> None:
    """Fill the piece with the bytes of the file from that place on."""
    with file.open("rb") as stream:
        stream.seek(place)
        if stream.readinto(piece) < len(piece):
            raise OSError(f"{file} became shorter while it was read")


def load_safely(file: Path | IO[bytes]) -> Any:
    """What torch.save() wrote, on the CPU.

    Raises pickle.UnpicklingError when it is something else, or loading it could run code. PyTorch's own message would
    advise to load it all the same.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise pickle.UnpicklingError(refusal(named[1] if named else "code")) from None
    except (EOFError, RuntimeError) as error:
        raise pickle.UnpicklingError(f"torch.save() has not written this: {error}") from None


def refusal(what: str) -> str:
    """Why a pickle that needs that is not loaded."""
    return f"it asks for {what}, which no checkpoint needs: do not trust it"
