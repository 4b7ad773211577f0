"""Muster from Python: log metrics, and save checkpoints, in a script that Muster or torchrun runs.

    import muster

    muster.log(step, steps=1200, loss=loss)
    with muster.checkpointer("checkpoints/net", model, optimizer) as checkpointer:
        first = checkpointer.restore() + 1

Ranks that Muster starts can import this package; nothing needs to be installed in their environment. The import takes
no time: PyTorch is imported by checkpointer().
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Mapping
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import threading

    from torch import Tensor, nn
    from torch.distributed.checkpoint.stateful import Stateful
    from torch.optim import Optimizer

__all__ = ["Checkpointer", "checkpointer", "log"]

# Muster's directory. In an installed Muster, it is beside this file; a copy of this package is in each of the two.
KIT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_kit")
KIT = KIT if os.path.isdir(KIT) else os.path.dirname(os.path.dirname(os.path.dirname(KIT)))


class Checkpointer(Protocol):
    """The checkpoints of one training, and its stop requests, see checkpointer().

    All methods are collectives of the default process group. In its `with` block, signals such as SIGTERM only request
    a stop. The end of the block waits until the last checkpoint is published.
    """

    def restore(self) -> int:
        """Restore all objects and random states from the newest checkpoint. Returns its step; 0 if there is none.

        Raises CheckpointError, a RuntimeError, on all ranks if checkpoints exist and none is usable.
        """

    def should_stop(self, step: int, loss: Tensor | None = None) -> bool:
        """Whether a stop was requested on any rank; the same on all ranks. Call it once after each step.

        loss: this rank's, a tensor of one element. Raises NonFiniteLoss if it is NaN or infinite on a rank.
        """

    def mean_loss(self) -> float:
        """The mean over all ranks of the last loss that should_stop() got. Waits for the GPU."""

    def save(
        self, step: int, *, facts: Mapping[str, Any] | None = None, score: float | None = None, overlap: bool = False
    ) -> None:
        """Copy the state of all objects and return; a thread writes the copy and publishes it when it is complete.

        step: number of completed steps. facts: JSON values for the manifest. score: lower is better; the best
        checkpoint is kept. overlap: copy while the next gradients are computed.

        Raises NonFiniteLoss if a weight is not finite, CheckpointError if the previous save has failed.
        """

    def wait(self) -> None:
        """Wait until the last save is published. Raises CheckpointError if it could not be written."""

    def __enter__(self) -> Checkpointer: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def log(step: int, **values: Any) -> None:
    """On rank 0, append the values of one step to the run's metrics. Elsewhere, only check the arguments.

    step: integer from 0 on; the steps count as progress. values: numbers, or tensors of one element. `steps` is the
    number of steps of the whole training. Without a run of Muster, nothing is written.

    Raises:
        ValueError: a step is not an integer from 0 to 2**53 - 1, a name is reserved, or a value is not a number.
    """
    _metrics().log(step, **values)


def checkpointer(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    keep: int = 3,
    per_rank: Mapping[str, Stateful] | None = None,
    stop_requested: threading.Event | None = None,
    **shared: Stateful,
) -> Checkpointer:
    """Save checkpoints of a model and its optimizer, complete or not at all, and stop on request.

    All ranks make the same calls, after they have joined the default process group, if there is one.

    Args:
        directory: created if missing. Only one run can use it at a time.
        model: plain, in DistributedDataParallel, or sharded by fully_shard; then all nodes must share the directory.
        keep: number of newest checkpoints to keep, 1 or more; the one with the best score is kept in addition.
        per_rank: objects whose state differs between ranks, such as the position of a data loader, by name.
        stop_requested: an event that the caller sets to request a stop; then no signal is handled.
        shared: other objects whose state is the same on all ranks, such as a scheduler.

    Raises:
        CheckpointError: another run uses the directory. It is a RuntimeError.
        ValueError: keep is below 1.
        ImportError: PyTorch is missing, or another package `distributed`, such as Dask's, is imported.
    """
    loaded = sys.modules.get("distributed")
    if loaded is not None and not str(loaded.__file__).startswith(os.path.join(KIT, "")):
        raise ImportError(f"muster.checkpointer: {loaded.__file__} is imported, which has the name of a part of Muster")
    made: Checkpointer = _load("checkpoint.checkpointer").Checkpointer(
        directory, model, optimizer, keep=keep, per_rank=per_rank or {}, stop_requested=stop_requested, **shared
    )
    return made


@functools.cache
def _metrics() -> ModuleType:
    """The module that writes metrics. Afterwards `import distributed` finds what it would have found before."""
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "distributed"}
    try:
        return _load("metrics")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "distributed"]:
            del sys.modules[name]
        sys.modules.update(others)


def _load(name: str) -> ModuleType:
    sys.path.insert(0, KIT)
    try:
        return importlib.import_module(f"distributed.{name}")
    finally:
        sys.path.remove(KIT)
