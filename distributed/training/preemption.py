"""Stop together: signals only set a flag, and the ranks agree on what it means at a step boundary.

A rank that stops alone leaves the others waiting in a collective. So once a step all ranks add up one small ballot:
the loss, who was asked to stop, whose loss is not finite, who has failed behind the scenes. Every rank reads the same
sums and therefore decides the same at the same step.

    with stop_signals() as asked:
        for step in ...:
            ...
            ballots.cast(step, loss, stop=asked.is_set(), failed=False)
            for outcome in ballots.settle(): ...
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
NOT_FINITE, FAILED = 1, 2  # what a rank says of itself on the ballot


class NonFiniteLoss(RuntimeError):
    """This rank's loss became NaN or infinite."""


class PeerFailed(RuntimeError):
    """Another rank failed, and this one stops with it: never the first cause."""


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """While inside, SIGTERM, SIGINT and SIGUSR2 set the event and do nothing else."""
    asked = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        asked.set()

    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Outcome:
    """What all ranks together said of one step."""

    step: int
    loss: float  # mean over all ranks, that is over the global batch
    stop: bool  # somebody was asked to stop
    not_finite: tuple[int, ...]  # ranks whose loss is NaN or infinite
    failed: tuple[int, ...]  # ranks with a failure outside of the step, such as a checkpoint that cannot be written

    def raise_for(self, rank: int, cause: BaseException | None, hosts: list[str]) -> None:
        """Raise on every rank when one of them cannot go on: the culprits their cause, the others PeerFailed."""
        if self.failed:
            if cause is not None:
                raise cause
            raise PeerFailed(f"{_who(self.failed, hosts)} failed at step {self.step}: stopping with it")
        if self.not_finite:
            text = f"the loss of {_who(self.not_finite, hosts)} is not finite (NaN or inf) at step {self.step}"
            remedy = "; no checkpoint was written of this step. Lower the learning rate, or look at that rank's data"
            raise (NonFiniteLoss if rank in self.not_finite else PeerFailed)(text + remedy)


def _who(ranks: tuple[int, ...], hosts: list[str]) -> str:
    return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)


class Ballots:
    """One all-reduce a step, read without making a GPU wait: there, a step late."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.late = 1 if device.type == "cuda" else 0
        self._cast: deque[tuple[int, torch.Tensor, torch.cuda.Event | None]] = deque()

    def cast(self, step: int, loss: torch.Tensor, stop: bool, failed: bool) -> None:
        """Add this rank's ballot. Collective. `loss` is a scalar on the device: this rank's mean."""
        ballot = torch.zeros(2 + self.size, device=self.device)
        ballot[0] = loss
        ballot[1] = float(stop)
        ballot[2 + self.rank] = (~torch.isfinite(loss)) * float(NOT_FINITE) + float(FAILED * failed)
        dist.all_reduce(ballot)
        self._cast.append((step, *self._fetch(ballot)))

    def settle(self, now: bool = False) -> list[Outcome]:
        """The outcomes that are ready, oldest first; with `now`, of all steps so far. The same on every rank."""
        keep = 0 if now else self.late
        return [self._read(*self._cast.popleft()) for _ in range(len(self._cast) - keep)]

    def _fetch(self, ballot: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        if self.device.type != "cuda":
            return ballot, None
        copy = torch.empty(ballot.shape, pin_memory=True).copy_(ballot, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return copy, copied

    def _read(self, step: int, ballot: torch.Tensor, copied: torch.cuda.Event | None) -> Outcome:
        if copied is not None:
            copied.synchronize()
        loss, stop, *said = ballot.tolist()
        return Outcome(
            step=step,
            loss=loss / self.size,
            stop=stop > 0,
            not_finite=tuple(rank for rank, word in enumerate(said) if int(word) & NOT_FINITE),
            failed=tuple(rank for rank, word in enumerate(said) if int(word) & FAILED),
        )
