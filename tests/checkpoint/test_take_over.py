"""Ranks of an attempt publish nothing, and report why, after a later attempt has taken over the checkpoint directory.

The file operations of a take-over are tested in test_directory.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from test_directory import names, set_attempt
from test_sharded import Training, opened

from distributed.checkpoint import directory, sharded
from distributed.checkpoint.checkpoints import CheckpointError, Checkpoints

TAKEN_OVER = r"/checkpoints: taken over by process \d+ on .*, attempt 2 of run train-1; attempt 1 of run train-1 "


def test_wait_raises_the_error_of_a_save_after_a_take_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_attempt(monkeypatch, 0)
    with Checkpoints(tmp_path / "checkpoints") as lost:
        lost.save(1, {"weight": torch.ones(3)})
        lost.wait()
        set_attempt(monkeypatch, 1)
        with Checkpoints(tmp_path / "checkpoints") as later:
            set_attempt(monkeypatch, 0)
            lost.save(2, {"weight": torch.ones(3)})
            assert lost._write is not None and isinstance(lost._write.exception(), CheckpointError)
            later.save(3, {"weight": torch.zeros(3)})
        assert names(tmp_path / "checkpoints") == ["step_00000001", "step_00000003"]
        with pytest.raises(CheckpointError, match=TAKEN_OVER):
            lost.wait()


def take_over_while_a_rank_writes(rank: int, size: int, checkpoint_dir: Path, taker: int) -> str:
    """Rank `taker` takes the directory over, as a later attempt does, and then writes its own shard."""
    write: Any = sharded.ShardWriter.write
    monkeypatch = pytest.MonkeyPatch()  # never undone: this process exits with the test
    set_attempt(monkeypatch, 0)

    def take_over_and_write(writer: sharded.ShardWriter, copy: Any) -> None:
        if rank == taker:
            set_attempt(monkeypatch, 1)
            directory.take_over(checkpoint_dir)
            set_attempt(monkeypatch, 0)
        write(writer, copy)

    with opened(checkpoint_dir, rank, size) as checkpoints:
        training = Training()
        training.learn(1)
        checkpoints.save(1, training.state())
        checkpoints.wait()
        monkeypatch.setattr(sharded.ShardWriter, "write", take_over_and_write)
        checkpoints.save(2, training.state())
        with pytest.raises(CheckpointError, match=TAKEN_OVER):
            checkpoints.wait()
        with pytest.raises(CheckpointError, match=TAKEN_OVER) as caught:
            checkpoints.save(3, training.state())
    return str(caught.value)


@pytest.mark.parametrize("taker", [0, 1])
def test_shards_written_after_a_take_over_are_not_published(tmp_path: Path, taker: int) -> None:
    first, second = forked.ranks(2, take_over_while_a_rank_writes, tmp_path / "checkpoints", taker)
    assert first == second
    published = [path.name for path in directory.step_directories(tmp_path / "checkpoints")]
    assert published == ["step_00000001"]
