"""What the ranks of a run tell each other: small things, on the main thread.

Each method is a collective of the default process group: every rank calls it, in the same order, on the
thread that the training's own collectives run on. With one rank nothing is sent, and no group is needed.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
PIECE = 64 * 2**20  # bytes sent at once


@dataclass(frozen=True)
class Ranks:
    """This rank among the others."""

    rank: int = 0  # 0 .. size-1
    size: int = 1

    def decide(self, function: Callable[[], T]) -> T:
        """Rank 0 alone calls it; its answer, or its error, is every rank's."""
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

    def everyone(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def load(self, file: Path) -> Any:
        """Rank 0's file, loaded on the CPU of every rank: other nodes may hold none there, or an older one."""
        if self.size == 1:
            return torch.load(file, map_location="cpu", weights_only=True)
        content = io.BytesIO()
        self._send(file, content)
        content.seek(0)
        return torch.load(content, map_location="cpu", weights_only=True)

    def _send(self, file: Path, content: io.BytesIO) -> None:
        """Rank 0's file to every rank's memory, piece by piece."""
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        rest = self.decide(lambda: file.stat().st_size)
        with file.open("rb") if self.rank == 0 else nullcontext() as stream:
            while rest:
                piece = bytearray(min(rest, PIECE))
                if stream is not None:
                    stream.readinto(piece)
                here = torch.frombuffer(piece, dtype=torch.uint8)
                there = here.to(device)
                dist.broadcast(there, src=0)
                here.copy_(there)
                rest -= content.write(piece)
