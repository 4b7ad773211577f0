"""Checkpointer: a user's script resumes bit for bit and stops on request.

Training from restored objects gives the same weights as uninterrupted training, with DDP, FSDP2 and one process. Every
rank reads a stop request at the same step. Non-finite weights are not saved. Objects missing from a checkpoint are
named. The example of LAUNCH_GUIDE.md writes a checkpoint and exits with 75 when it receives a signal, and resumes from
that checkpoint.
"""

from __future__ import annotations

import logging
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from test_docs import example
from torch import Tensor, nn

from distributed.checkpoint import directory
from distributed.checkpoint.checkpointer import Checkpointer
from distributed.checkpoint.checkpoints import CheckpointError
from distributed.training.preemption import NonFiniteLoss

KIT = Path(__file__).resolve().parents[2]


class Loader:
    """Yields the samples of one rank; its state is the position."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def next(self) -> Tensor:
        self.position += 1
        return torch.full((4, 6), float(self.position + 10 * self.rank)).sin()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "rank": self.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == self.rank
        self.position = state["position"]


class Training:
    """A model with dropout, plain or wrapped in DDP or FSDP2, with AdamW, a scheduler and a loader."""

    def __init__(self, kind: str, rank: int) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        if kind == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.model)
        elif kind == "fsdp":
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.loader = Loader(rank)
        torch.manual_seed(rank)

    def checkpointer(self, path: Path) -> Checkpointer:
        objects = {"scheduler": self.scheduler, "per_rank": {"loader": self.loader}}
        return Checkpointer(path, self.model, self.optimizer, **objects)  # type: ignore[arg-type]

    def learn(self) -> Tensor:
        loss: Tensor = self.model(self.loader.next()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss

    def weights(self) -> list[list[float]]:
        tensors = (getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in self.model.parameters())
        return [tensor.flatten().tolist() for tensor in tensors]


# ---------------------------------------------------------------- resume


def resumes_bit_for_bit(rank: int, size: int, kind: str, path: Path) -> bool:
    uninterrupted = Training(kind, rank)
    for _ in range(6):
        uninterrupted.learn()

    first = Training(kind, rank)
    with first.checkpointer(path) as checkpointer:
        assert checkpointer.restore() == 0
        for step in range(1, 4):
            assert not checkpointer.should_stop(step, first.learn())
        checkpointer.save(3)

    second = Training(kind, rank)
    with second.checkpointer(path) as checkpointer:
        assert checkpointer.restore() == 3
        for _ in range(3):
            second.learn()
    assert second.optimizer.param_groups[0]["lr"] == uninterrupted.optimizer.param_groups[0]["lr"] == 0.0125
    assert second.loader.position == 6
    return second.weights() == uninterrupted.weights() != first.weights()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_training_from_restored_objects_equals_uninterrupted_training_bit_for_bit(tmp_path: Path, kind: str) -> None:
    assert forked.ranks(2, resumes_bit_for_bit, kind, tmp_path) == [True, True]


def test_one_process_needs_no_process_group(tmp_path: Path) -> None:
    assert resumes_bit_for_bit(0, 1, "plain", tmp_path)


Uses = tuple[bool | None, bool]


def scales_after_resume(rank: int, size: int, kind: str, path: Path) -> dict[Uses, tuple[float, bool]]:
    """Return the loss scale after a resume and whether the weights are the saved ones, by the use of a scaler.

    The keys are: whether the scaler was enabled in the saving run (None: there was no scaler), and in this run.
    """
    found: dict[Uses, tuple[float, bool]] = {}
    for before in (None, False, True):
        saved, saved_scaler = Training(kind, rank), torch.amp.GradScaler("cpu", 32.0, enabled=bool(before))
        objects = {} if before is None else {"scaler": saved_scaler}
        with Checkpointer(path / str(before), saved.model, saved.optimizer, **objects) as checkpointer:  # type: ignore[arg-type]
            saved.learn()
            checkpointer.save(1)
        for now in (False, True):
            training, scaler = Training(kind, rank), torch.amp.GradScaler("cpu", 8.0, enabled=now)
            with Checkpointer(path / str(before), training.model, training.optimizer, scaler=scaler) as checkpointer:
                assert checkpointer.restore() == 1
            found[before, now] = scaler.get_scale(), training.weights() == saved.weights()
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_scaler_that_was_not_in_use_starts_anew(tmp_path: Path, kind: str) -> None:
    fresh, restored, disabled = (8.0, True), (32.0, True), (1.0, True)
    expected = {
        (None, False): disabled, (None, True): fresh, (False, False): disabled, (False, True): fresh,
        (True, False): disabled, (True, True): restored,
    }  # fmt: skip
    assert forked.ranks(2, scales_after_resume, kind, tmp_path) == [expected] * 2


def compiled(training: Training) -> Training:
    training.model = torch.compile(training.model, backend="eager")  # type: ignore[assignment]
    return training


@pytest.mark.parametrize("before", [compiled, lambda training: training])
@pytest.mark.parametrize("now", [compiled, lambda training: training])
def test_a_compiled_model_and_the_same_model_resume_from_each_other(
    tmp_path: Path, before: Callable[[Training], Training], now: Callable[[Training], Training]
) -> None:
    saved, resumed = before(Training("plain", 0)), now(Training("plain", 0))
    with saved.checkpointer(tmp_path) as checkpointer:
        saved.learn()
        checkpointer.save(1)
    with resumed.checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore() == 1
    for training in (saved, resumed):
        torch.manual_seed(1)
        training.learn()
    assert resumed.weights() == saved.weights()


def test_restore_names_the_objects_missing_from_the_checkpoint(tmp_path: Path) -> None:
    training = Training("plain", 0)
    with Checkpointer(tmp_path, training.model, training.optimizer) as checkpointer:
        checkpointer.save(1)
    with (
        training.checkpointer(tmp_path) as checkpointer,
        pytest.raises(CheckpointError, match="does not fit this training: it has no scheduler"),
    ):
        checkpointer.restore()
    only_per_rank = Checkpointer(tmp_path, training.model, training.optimizer, per_rank={"loader": training.loader})
    with only_per_rank, pytest.raises(CheckpointError, match="it has no loader"):
        only_per_rank.restore()


def save_on_rank(rank: int, size: int, path: Path) -> None:
    with Training("ddp", rank).checkpointer(path) as checkpointer:
        checkpointer.save(1)


def test_per_rank_objects_are_not_restored_if_the_number_of_ranks_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    forked.ranks(2, save_on_rank, tmp_path)
    training = Training("plain", 0)
    training.loader.position = 7
    with training.checkpointer(tmp_path) as checkpointer, caplog.at_level(logging.WARNING):
        assert checkpointer.restore() == 1
    assert training.loader.position == 7
    assert "loader is not restored: " in caplog.text and " is from 2 ranks, this run has 1" in caplog.text


# ---------------------------------------------------------------- stop


def should_stop_on_rank(rank: int, size: int, path: Path) -> list[bool]:
    """Return should_stop() after each step; rank 1 receives SIGTERM before step 3."""
    training = Training("ddp", rank)
    with training.checkpointer(path) as checkpointer:
        found = []
        for step in range(1, 5):
            if (rank, step) == (1, 3):
                signal.raise_signal(signal.SIGTERM)
            found.append(checkpointer.should_stop(step))
        return found


def test_all_ranks_report_a_stop_request_at_the_same_step(tmp_path: Path) -> None:
    assert forked.ranks(3, should_stop_on_rank, tmp_path) == [[False, False, True, True]] * 3


def test_mean_loss_averages_over_all_ranks(tmp_path: Path) -> None:
    assert forked.ranks(2, mean_loss, tmp_path) == [1.5, 1.5]


def mean_loss(rank: int, size: int, path: Path) -> float:
    with Training("ddp", rank).checkpointer(path) as checkpointer:
        checkpointer.should_stop(1, torch.tensor(1.0 + rank))
        return checkpointer.mean_loss()


def test_non_finite_weights_are_not_saved(tmp_path: Path) -> None:
    training = Training("plain", 0)
    with training.checkpointer(tmp_path) as checkpointer:
        nn.init.constant_(next(training.model.parameters()), float("nan"))
        with pytest.raises(NonFiniteLoss, match=r"the weights are not finite .* after step 1"):
            checkpointer.save(1)
        assert checkpointer.newest() is None


def test_a_failed_checkpoint_write_replaces_exit_code_75_by_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(*_: object) -> None:
        raise OSError("no space left")

    def stop() -> None:
        with Training("plain", 0).checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1)
            sys.exit(75)

    monkeypatch.setattr(directory.Owner, "publish", publish)
    with pytest.raises(CheckpointError, match="no space left"):
        stop()


def test_the_guide_example_stops_on_request_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "distributed").symlink_to(KIT / "distributed")
    script = tmp_path / "my_train.py"
    script.write_text(example().replace("STEPS = 300", "STEPS = 1_000_000_000"))
    with forked.launched(2, forked.script, str(script)) as training:
        training.wait_for("step 100: loss ")
        training.signal(signal.SIGTERM, 1)
        results = training.results()
    assert [rank.code for rank in results.values()] == [75, 75], results
    stopped = int(re.findall(r"^step (\d+): loss", results[0].out, re.MULTILINE)[-1])
    assert stopped > 100
    last = (stopped // 100 + 1) * 100
    script.write_text(example().replace("STEPS = 300", f"STEPS = {last}"))
    with forked.launched(2, forked.script, str(script)) as training:
        results = training.results()
    assert [rank.code for rank in results.values()] == [0, 0], results
    assert re.findall(r"^step (\d+): loss", results[0].out, re.MULTILINE) == [str(last)]
