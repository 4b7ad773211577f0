"""Stop all ranks at the same step, after a signal or a failure of one rank.

A signal handler only sets a flag: a rank that stopped alone would leave the others waiting in a collective. After each
step the ranks all-reduce a small vector: the loss, stop requests, and one flag per rank for a loss that is not finite
or a failure outside the step. All ranks read the same sums, so all stop at the same step.

Scripts use this module through `distributed.checkpoint.checkpointer`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

from distributed.host import signals

# Before a time limit, SLURM sends the signal given with --signal: by default USR2 with Muster, USR1 with Lightning.
STOP_SIGNALS = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
    signal.SIGPWR,
)  # fmt: skip
NOT_FINITE, FAILED = 1, 2  # bits of a rank's flag


class NonFiniteLoss(RuntimeError):
    """This rank's loss, or a weight, became NaN or infinite."""


class PeerFailed(RuntimeError):
    """Another rank failed, so this rank stops too. Never the first cause of a failed run."""


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Within the block the stop signals set the event and do nothing else.

    After a signal, a rank of a run keeps the handlers until it exits: its supervisor may receive the same signal later,
    and would stop a rank that has no handler.
    """
    requested = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        requested.set()

    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield requested
    finally:
        if not (requested.is_set() and "MUSTER_RUN_DIR" in os.environ):
            for number, handler in before.items():
                signal.signal(number, handler)
            signals.protect()


@dataclass(frozen=True)
class StepStatus:
    """The state of all ranks after one step."""

    step: int
    loss: float  # mean over all ranks, that is over the global batch
    stop: bool  # a stop was requested on some rank
    not_finite: tuple[int, ...]  # ranks whose loss is NaN or infinite
    failed: tuple[int, ...]  # ranks with a failure outside the step, such as a checkpoint that could not be written

    def raise_for(self, rank: int, cause: BaseException | None, hosts: list[str]) -> None:
        """Raise on every rank when a rank failed: its own error on that rank, PeerFailed on the others.

        rank: this rank. cause: its failure outside the step, if any. hosts: the host name of each rank.
        """
        if self.failed:
            if cause is not None:
                raise cause
            raise PeerFailed(f"{_names(self.failed, hosts)} failed at step {self.step}; stopping this rank")
        if self.not_finite:
            problem = f"the loss of {_names(self.not_finite, hosts)} is not finite (NaN or inf) at step {self.step}"
            remedy = "; no checkpoint of this step was written. Lower the learning rate, or check that rank's data"
            raise (NonFiniteLoss if rank in self.not_finite else PeerFailed)(problem + remedy)


def _names(ranks: tuple[int, ...], hosts: list[str]) -> str:
    return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)


class StatusExchange:
    """One all-reduce per step. On a GPU the result is read a step later, so that the host does not wait for the GPU."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.delay = 1 if device.type == "cuda" else 0  # steps
        self._sent: deque[tuple[int, torch.Tensor, torch.cuda.Event | None]] = deque()

    def send(self, step: int, loss: torch.Tensor, stop: bool, failed: bool) -> None:
        """Start the all-reduce of one step. Collective. loss: the mean loss of this rank, a scalar on the device."""
        flags = torch.zeros(2 + self.size, device=self.device)
        flags[0] = loss
        flags[1] = float(stop)
        flags[2 + self.rank] = (~torch.isfinite(loss)) * float(NOT_FINITE) + float(FAILED * failed)
        if self.size > 1:
            dist.all_reduce(flags)
        copied = None
        if self.device.type == "cuda":
            flags = torch.empty(flags.shape, pin_memory=True).copy_(flags, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._sent.append((step, flags, copied))

    def receive(self, include_latest: bool = False) -> list[StepStatus]:
        """Return the status of each step that was sent, oldest first. All ranks get the same list.

        On a GPU, the latest step is left for the next call, unless `include_latest` is set.
        """
        keep = 0 if include_latest else self.delay
        return [self._status(*self._sent.popleft()) for _ in range(len(self._sent) - keep)]

    def _status(self, step: int, flags: torch.Tensor, copied: torch.cuda.Event | None) -> StepStatus:
        if copied is not None:
            copied.synchronize()
        loss, stop, *rank_flags = flags.tolist()
        return StepStatus(
            step=step,
            loss=loss / self.size,
            stop=stop > 0,
            not_finite=tuple(rank for rank, flag in enumerate(rank_flags) if int(flag) & NOT_FINITE),
            failed=tuple(rank for rank, flag in enumerate(rank_flags) if int(flag) & FAILED),
        )
