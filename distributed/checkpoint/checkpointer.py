"""Save and restore the objects of a training, and stop it on request.

    with process_group() as world:
        model = wrap(Net().to(device(world)), "auto", world)
        optimizer = torch.optim.AdamW(model.parameters())
        with Checkpointer("checkpoints/net", model, optimizer) as checkpointer:
            for step in range(checkpointer.restore() + 1, STEPS + 1):
                ...  # forward, backward, optimizer.step()
                stop = checkpointer.should_stop(step, loss)
                if stop or step % 100 == 0:
                    checkpointer.save(step)
                if stop:
                    sys.exit(STOPPED)

`distributed.checkpoint.checkpoints` is the layer below, which saves state dicts.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from distributed.checkpoint.checkpoints import (
    CheckpointError,
    CheckpointInfo,
    Checkpoints,
    random_state,
    set_random_state,
)
from distributed.exit_codes import STOPPED
from distributed.torch import unwrap
from distributed.training.preemption import NonFiniteLoss, StatusExchange, StepStatus, stop_signals

log = logging.getLogger(__name__)
NOTHING: Mapping[str, Any] = {}


class Checkpointer:
    """The checkpoints of one training, and its stop requests.

    Every rank creates one and makes the same calls: all methods are collectives of the default process group. Within
    its `with` block the signals of preemption.STOP_SIGNALS only request a stop. The end of the block waits until the
    last checkpoint is published, also after sys.exit(75).
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer,
        *,
        keep: int = 3,
        per_rank: Mapping[str, Stateful] = NOTHING,
        stop_requested: threading.Event | None = None,
        **shared: Stateful,
    ) -> None:
        """Lock the directory. Raises CheckpointError when another run has locked it, ValueError when keep is below 1.

        A later attempt of the same run takes the directory over; the earlier one then raises CheckpointError.

        Args:
            model: the model that is trained: plain, in DistributedDataParallel, or sharded by fully_shard, which needs
                a directory that all nodes share.
            keep: number of newest checkpoints to keep; the one with the lowest score is kept in addition.
            per_rank: objects whose state differs between ranks, such as the position of a data loader.
            stop_requested: an event that the caller sets to request a stop. If it is given, the Checkpointer handles no
                signals.
            shared: other objects whose state is the same on all ranks, such as a scheduler or a gradient scaler.
        """
        grouped = dist.is_available() and dist.is_initialized()
        rank, size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        parameters = list(model.parameters())
        sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
        self._model, self._optimizer, self._shared, self._per_rank = model, optimizer, shared, per_rank
        self._scalers = [name for name, stateful in shared.items() if isinstance(stateful, torch.amp.GradScaler)]
        self._checkpoints = Checkpoints(Path(directory), keep=keep, rank=rank, size=size, sharded=sharded)
        self._hosts = self._checkpoints.ranks.all_gather(socket.gethostname())
        self._exchange = StatusExchange(rank, size, parameters[0].device)
        self._stop, self._loss = False, math.nan
        self._signals = ExitStack()
        self._catches_signals = stop_requested is None
        self.stop_requested = stop_requested or threading.Event()

    def restore(self, found: CheckpointInfo | None = None) -> int:
        """Restore all objects and random states from `found`, by default the newest checkpoint.

        Returns the step of the checkpoint; 0 when there is none. With more ranks than the saving run had, the
        additional ranks keep their random states. With fewer or more ranks, `per_rank` objects are not restored. A
        gradient scaler that the saving run did not use starts anew.

        Raises CheckpointError when checkpoints exist and none is usable, or the checkpoint does not fit the objects.
        """
        found = found or self.newest()
        if found is None:
            return 0
        state = self.load(found)
        new = {name for name in self._scalers if not state.get(name)}
        if missing := [name for name in self._shared if name not in state and name not in new]:
            raise CheckpointError(f"{found.path} does not fit this training: it has no {', '.join(missing)}")
        set_state_dict(
            unwrap(self._model), self._optimizer,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )  # fmt: skip
        for name, stateful in self._shared.items():
            if name not in new:
                stateful.load_state_dict(state[name])
            elif stateful.state_dict():
                log.info(f"{name} starts anew: it was not in use when {found.path} was written")
        if saved := self._checkpoints.load_per_rank(found):
            self._restore_per_rank(saved, found)
        return found.step

    def _restore_per_rank(self, saved: Mapping[str, Any], found: CheckpointInfo) -> None:
        set_random_state(saved)
        size = self._checkpoints.ranks.size
        for name, stateful in self._per_rank.items():
            if found.ranks != size:
                log.warning(f"{name} is not restored: {found.path} is from {found.ranks} ranks, this run has {size}")
            elif name in saved.get("objects", {}):
                stateful.load_state_dict(saved["objects"][name])
            else:
                raise CheckpointError(f"{found.path} does not fit this training: it has no {name}")

    def should_stop(self, step: int, loss: Tensor | None = None) -> bool:
        """Return whether a stop was requested on any rank; the same on all ranks. Call it once after each step.

        On a GPU the result is one step late, so that the host does not wait for the GPU. loss: this rank's, a scalar.

        Raises NonFiniteLoss on ranks whose loss is NaN or infinite, CheckpointError on ranks whose last checkpoint
        could not be written, and PeerFailed, which names those ranks, on all others.
        """
        loss = torch.zeros((), device=self._exchange.device) if loss is None else loss.detach()
        failed = self._checkpoints.failed() is not None
        self._exchange.send(step, loss, stop=self.stop_requested.is_set(), failed=failed)
        self._read(self._exchange.receive())
        return self._stop

    def mean_loss(self) -> float:
        """Return the mean over all ranks of the last loss passed to should_stop(). Waits for the GPU.

        Raises as should_stop() does.
        """
        self._read(self._exchange.receive(include_latest=True))
        return self._loss

    def _read(self, received: list[StepStatus]) -> None:
        for status in received:
            status.raise_for(self._checkpoints.ranks.rank, self._checkpoints.failed(), self._hosts)
            self._stop, self._loss = self._stop or status.stop, status.loss

    def save(
        self, step: int, *, facts: Mapping[str, Any] | None = None, score: float | None = None, overlap: bool = False
    ) -> None:
        """Copy the state of all objects and return; a thread writes the copy and publishes it when it is complete.

        Args:
            step: number of completed steps.
            facts: JSON values for the manifest, readable without loading tensors.
            score: lower is better, for example the held-out loss.
            overlap: copy parameters and optimizer state after save() returns, while the next gradients are computed.
                The next optimizer.step() waits for the copy. Before that step, the caller must not change these
                tensors; for example, it must not load other weights for an evaluation.

        Raises NonFiniteLoss when a weight is NaN or infinite, without writing a checkpoint; CheckpointError when the
        previous save failed, or the state holds objects that cannot be loaded safely; otherwise as should_stop() does.
        """
        self._read(self._exchange.receive(include_latest=True))
        start = time.monotonic()
        # A finite loss is not enough: the loss of this step was computed before optimizer.step() changed the weights.
        norm = nn.utils.get_total_norm(self._model.parameters())
        if not math.isfinite(norm.full_tensor() if isinstance(norm, DTensor) else norm):
            raise NonFiniteLoss(
                f"the weights are not finite (NaN or inf) after step {step}; no checkpoint was written. "
                "Lower the learning rate, and run again to resume from the newest checkpoint"
            )
        objects = {name: stateful.state_dict() for name, stateful in self._per_rank.items()}
        state = self._state()
        prepared = time.monotonic() - start
        self._checkpoints.save(
            step, state, per_rank={**random_state(), "objects": objects}, facts=facts, score=score,
            overlapped=self._optimizer if overlap else None,
        )  # fmt: skip
        self.blocked[-1] += prepared

    @property
    def blocked(self) -> list[float]:
        """Seconds that each save has blocked the training of this rank.

        With overlap, they include the time for which optimizer.step() has waited for the copy.
        """
        return self._checkpoints.blocked

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(unwrap(self._model), self._optimizer)
        return {
            "model": model, "optimizer": optimizer,
            **{name: stateful.state_dict() for name, stateful in self._shared.items()},
        }  # fmt: skip

    def newest(self) -> CheckpointInfo | None:
        """Return the newest valid checkpoint, or None if there are none. Raises CheckpointError if all are invalid."""
        return self._checkpoints.newest()

    def best(self) -> CheckpointInfo | None:
        """Return the valid checkpoint with the lowest score, or None. Raises as newest() does."""
        return self._checkpoints.best()

    def load(self, found: CheckpointInfo) -> dict[str, Any]:
        """Return the state of a checkpoint, on the CPU.

        If the model is sharded, the checkpoint is instead loaded into the tensors of the model and the optimizer.

        Raises CheckpointError when the checkpoint cannot be read, or does not fit the model and the optimizer.
        """
        return self._checkpoints.load(found, self._state(), optional=self._scalers)

    def wait(self) -> None:
        """Wait until the last save is published. Raises CheckpointError when it could not be written."""
        self._checkpoints.wait()

    def __enter__(self) -> Checkpointer:
        if self._catches_signals:
            self.stop_requested = self._signals.enter_context(stop_signals())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # All ranks exit with STOPPED at the same step, so they can still wait for each other.
        stopped = isinstance(error, SystemExit) and error.code == STOPPED
        with self._signals:
            self._checkpoints.__exit__(None if stopped else kind, error, trace)
