"""Sharded checkpoints: a published checkpoint has the full state, which any number of ranks can load.

Every rank writes. If a rank fails, is late, or runs on a node that does not share the directory, no checkpoint is
published. Shards are uneven if a size is not divisible by the number of ranks. Unlike PyTorch's reader, Muster runs no
code from the file.
"""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import shutil
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from test_directory import stub_of_open
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from distributed.checkpoint import directory, sharded
from distributed.checkpoint.checkpoints import CheckpointError, CheckpointInfo, Checkpoints

WIDTHS = (5, 7, 1)  # sharded over 2 or 3 ranks: shards are uneven, some are empty


class Training:
    """An FSDP training with tied weights, a buffer, and AdamW."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS, extra: bool = False) -> None:
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        layers = [nn.Linear(here, there) for here, there in itertools.pairwise(widths)]
        self.model = nn.Sequential(nn.Linear(widths[0], widths[0], bias=False), *layers)
        self.model.append(nn.Linear(1, 1) if extra else nn.Identity())
        self.model.tied = nn.Module()
        self.model.tied.weight = self.model[0].weight
        self.batches = torch.zeros(())
        self.model.register_buffer("batches", self.batches)
        self.model.forward = self._forward  # type: ignore[method-assign]
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def _forward(self, inputs: Tensor) -> Tensor:
        for layer in list(self.model.children())[:-1]:
            inputs = layer(inputs)
        return inputs

    def learn(self, step: int) -> None:
        inputs = torch.randn(4, WIDTHS[0], generator=torch.Generator().manual_seed(step))
        self.model(inputs).square().mean().backward()
        self.batches += 1
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "more": {"list": [1, {"a": 2.5}], "pair": (1, "x"), "none": None},
        }

    def restore(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def unsharded(self) -> dict[str, Tensor]:
        """Return every tensor of the state, unsharded, by name."""
        state = self.state()
        tensors = dict(state["model"])
        for name, moments in state["optimizer"]["state"].items():
            tensors |= {f"{name} {moment}": tensor for moment, tensor in moments.items()}
        return {name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
                for name, tensor in tensors.items()}  # fmt: skip


def opened(checkpoint_dir: Path, rank: int, size: int, shard_timeout: float = 60.0) -> Checkpoints:
    return Checkpoints(checkpoint_dir, rank=rank, size=size, sharded=True, shard_timeout=shard_timeout)


def newest(checkpoints: Checkpoints) -> CheckpointInfo:
    found = checkpoints.newest()
    assert found is not None
    return found


def save(rank: int, size: int, checkpoint_dir: Path) -> dict[str, Tensor]:
    training = Training()
    with opened(checkpoint_dir, rank, size) as checkpoints:
        for step in (1, 2):
            training.learn(step)
            checkpoints.save(step, training.state(), per_rank=f"rank {rank}", overlapped=training.optimizer)
        saved = training.unsharded()
        training.learn(3)  # while step 2 is written
    return saved


@dataclass(frozen=True)
class Loaded:
    """State of a resumed rank at step 2 and one step later."""

    unsharded: dict[str, Tensor]
    more: dict[str, Any]
    per_rank: str | None
    tied: bool
    step_later: dict[str, Tensor]


def load(rank: int, size: int, checkpoint_dir: Path) -> Loaded:
    training = Training()
    with opened(checkpoint_dir, rank, size) as checkpoints:
        found = newest(checkpoints)
        state = checkpoints.load(found, training.state())
        training.restore(state)
        per_rank = checkpoints.load_per_rank(found)
    parameters = dict(training.model.named_parameters(remove_duplicate=False))
    tied, unsharded = parameters["tied.weight"] is parameters["0.weight"], training.unsharded()
    training.learn(3)
    return Loaded(unsharded, state["more"], per_rank, tied, training.unsharded())


def train_without_stop(rank: int, size: int) -> dict[str, Tensor]:
    training = Training()
    for step in (1, 2, 3):
        training.learn(step)
    return training.unsharded()


@dataclass(frozen=True)
class Saved:
    """A directory with the checkpoints of steps 1 and 2, and every tensor of step 2."""

    checkpoint_dir: Path
    unsharded: dict[str, Tensor]


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    checkpoint_dir = tmp_path_factory.mktemp("saved_by_two")
    return Saved(checkpoint_dir, forked.ranks(2, save, checkpoint_dir)[0])


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def check_loaded(saved: Saved, saving_ranks: int, loading_ranks: int) -> None:
    for rank, loaded in enumerate(forked.ranks(loading_ranks, load, saved.checkpoint_dir)):
        assert equal(loaded.unsharded, saved.unsharded)
        assert loaded.more == {"list": [1, {"a": 2.5}], "pair": (1, "x"), "none": None}
        assert loaded.per_rank == (f"rank {rank}" if rank < saving_ranks else None)
        assert loaded.tied


def test_a_checkpoint_of_two_ranks_has_every_tensor(saved_by_two: Saved) -> None:
    parameters = ["0.weight", "1.weight", "1.bias", "2.weight", "2.bias"]
    moments = [f"{name} {moment}" for name in parameters for moment in ("step", "exp_avg", "exp_avg_sq")]
    assert sorted(saved_by_two.unsharded) == sorted(["batches", "tied.weight", *parameters, *moments])
    assert sorted(path.name for path in (saved_by_two.checkpoint_dir / "step_00000002").iterdir()) == [
        ".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "ranks.pt",
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_of_two_ranks_is_loaded_on_fewer_or_more(saved_by_two: Saved, ranks: int) -> None:
    check_loaded(saved_by_two, saving_ranks=2, loading_ranks=ranks)


def test_a_checkpoint_of_one_rank_is_loaded_on_two(tmp_path: Path) -> None:
    check_loaded(Saved(tmp_path, forked.ranks(1, save, tmp_path)[0]), saving_ranks=1, loading_ranks=2)


def test_a_resumed_run_equals_an_uninterrupted_run_bit_for_bit(saved_by_two: Saved) -> None:
    resumed = forked.ranks(2, load, saved_by_two.checkpoint_dir)[0]
    assert equal(resumed.step_later, forked.ranks(2, train_without_stop)[0])


def test_dcp_to_torch_save_reads_a_checkpoint(saved_by_two: Saved, tmp_path: Path) -> None:
    dcp_to_torch_save(saved_by_two.checkpoint_dir / "step_00000002", tmp_path / "all.pt")
    read = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(read["model"]["1.weight"], saved_by_two.unsharded["1.weight"])


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__1_0.distcp", "ranks.pt", "manifest.json"])
def test_damage_to_any_file_is_detected(saved_by_two: Saved, tmp_path: Path, name: str) -> None:
    shutil.copytree(saved_by_two.checkpoint_dir, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "step_00000002" / name
    intact = file.read_bytes()
    for position in range(0, len(intact), len(intact) // 7):
        for damaged in (intact[:position], intact[:position] + bytes([intact[position] ^ 4]) + intact[position + 1 :]):
            file.write_bytes(damaged)
            found = directory.newest(tmp_path)
            assert found is not None and found.step == 1, position
    file.write_bytes(intact)
    found = directory.newest(tmp_path)
    assert found is not None and found.step == 2


# ---- incompatible states ----


def load_misfits(rank: int, size: int, checkpoint_dir: Path) -> list[str]:
    messages = []
    with opened(checkpoint_dir, rank, size) as checkpoints:
        for widths, extra in (((5, 6, 1), False), (WIDTHS, True), ((5, 1), False)):
            state = Training(widths, extra).state()
            with pytest.raises(CheckpointError) as caught:
                checkpoints.load(newest(checkpoints), state)
            messages.append(str(caught.value))
    with Checkpoints(checkpoint_dir, rank=rank, size=size) as unsharded, pytest.raises(CheckpointError) as caught:
        unsharded.load(newest(unsharded), {})
    return [*messages, str(caught.value)]


def test_another_model_and_another_strategy_are_refused_on_every_rank(saved_by_two: Saved) -> None:
    first, second = forked.ranks(2, load_misfits, saved_by_two.checkpoint_dir)
    shape, missing, surplus, strategy = first
    assert first == second
    assert all(
        f"{saved_by_two.checkpoint_dir}/step_00000002 does not fit this training: " in message for message in first[:3]
    )
    assert "Size mismatch" in shape and "model.1.weight" in shape
    assert "Missing key" in missing and "3.weight" in missing
    assert surplus.endswith("it has tensors that this training lacks (8, such as model.2.bias)")
    assert "is sharded, but this run uses unsharded checkpoints; resume with the strategy" in strategy


def load_what_rank_1_cannot_read(rank: int, size: int, checkpoint_dir: Path) -> list[str]:
    errors = []
    with opened(checkpoint_dir, rank, size) as checkpoints:
        found = newest(checkpoints)
        for name in (".metadata", "__0_0.distcp"):
            broken = [found.path / name] if rank == 1 else []
            with stub_of_open(*broken, error=errno.ESTALE), pytest.raises(CheckpointError) as caught:
                checkpoints.load(found, Training().state())
            errors.append(str(caught.value))
        checkpoints.load(found, Training().state())
    return errors


def test_a_read_error_on_one_rank_is_raised_on_every_rank(saved_by_two: Saved) -> None:
    first, second = forked.ranks(2, load_what_rank_1_cannot_read, saved_by_two.checkpoint_dir)
    assert first == second
    assert all("cannot be read on rank 1: [Errno 116] Stale file handle" in error for error in first)


def save_keys_that_are_numbers(rank: int, size: int, checkpoint_dir: Path) -> None:
    with (
        opened(checkpoint_dir, rank, size) as checkpoints,
        pytest.raises(CheckpointError, match="a key must be a string"),
    ):
        checkpoints.save(1, {"a": {1: torch.ones(2)}})


def test_keys_must_be_strings(tmp_path: Path) -> None:
    forked.ranks(1, save_keys_that_are_numbers, tmp_path)


def save_shards_as_a_whole(rank: int, size: int, checkpoint_dir: Path) -> None:
    with (
        Checkpoints(checkpoint_dir) as checkpoints,
        pytest.raises(CheckpointError, match=r"is sharded: .* sharded=True"),
    ):
        checkpoints.save(1, Training().state())


def test_an_unsharded_checkpoint_refuses_shards(tmp_path: Path) -> None:
    forked.ranks(1, save_shards_as_a_whole, tmp_path)


# ---- untrusted files ----


class Bomb:
    """Malicious content of a file: creates a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def load_bombs(rank: int, size: int, checkpoint_dir: Path) -> list[str]:
    messages = []
    with opened(checkpoint_dir, rank, size) as checkpoints:
        found = newest(checkpoints)
        metadata = found.path / ".metadata"
        intact = metadata.read_bytes()
        metadata.write_bytes(pickle.dumps(Bomb(checkpoint_dir / "boom")))
        with pytest.raises(CheckpointError) as caught:
            checkpoints.load(found, Training().state())
        messages.append(str(caught.value))
        metadata.write_bytes(intact)
        checkpoints.load(found, Training().state())
    with opened(checkpoint_dir / "numbers", rank, size) as checkpoints:
        checkpoints.save(1, {"more": {"number": 1.5}})  # PyTorch loads a number with weights_only=False
        checkpoints.wait()
        bomb = checkpoint_dir / "bomb.pt"
        torch.save(Bomb(checkpoint_dir / "boom"), bomb)
        pytest.MonkeyPatch().setattr(FileSystemReader, "_slice_file", lambda *_: bomb.open("rb"))
        with pytest.raises(CheckpointError) as caught:
            checkpoints.load(newest(checkpoints), {"more": {"number": 0.0}})
        messages.append(str(caught.value))
    assert not (checkpoint_dir / "boom").exists()
    return messages


def test_code_in_a_checkpoint_is_not_run(saved_by_two: Saved, tmp_path: Path) -> None:
    shutil.copytree(saved_by_two.checkpoint_dir, tmp_path, dirs_exist_ok=True)
    metadata, item = forked.ranks(1, load_bombs, tmp_path)[0]
    for text in (metadata, item):
        assert "step_0000000" in text
        assert text.endswith(": not loaded: it requests posix.mkdir, which no checkpoint needs; do not trust this file")


def load_names_and_links(rank: int, size: int, checkpoint_dir: Path) -> list[str]:
    messages = []
    with opened(checkpoint_dir, rank, size) as checkpoints:
        found = newest(checkpoints)
        metadata, shard = found.path / ".metadata", found.path / "__0_0.distcp"
        intact = metadata.read_bytes()
        elsewhere = sharded._unpickle(intact)
        next(iter(elsewhere.storage_data.values())).relative_path = "../__0_0.distcp"
        for content in (pickle.dumps(elsewhere), b"", pickle.dumps(5), b"damaged"):
            metadata.write_bytes(content)
            with pytest.raises(CheckpointError) as caught:
                checkpoints.load(found, Training().state())
            messages.append(str(caught.value))
        metadata.write_bytes(intact)
        shard.rename(checkpoint_dir / shard.name)
        for make in (lambda: shard.symlink_to(checkpoint_dir / shard.name), lambda: os.mkfifo(shard)):
            make()
            with pytest.raises(CheckpointError) as caught:
                checkpoints.load(found, Training().state())
            messages.append(str(caught.value))
            shard.unlink()
    return messages


def test_shards_outside_of_a_checkpoint_links_and_fifos_are_not_read(saved_by_two: Saved, tmp_path: Path) -> None:
    shutil.copytree(saved_by_two.checkpoint_dir, tmp_path, dirs_exist_ok=True)
    outside, *damaged, link, fifo = forked.ranks(1, load_names_and_links, tmp_path)[0]
    assert outside.endswith("/.metadata: not loaded: it names a file that is not in the checkpoint")
    assert all("/.metadata: not loaded: " in message for message in damaged)
    assert "is a symbolic link, which is not followed" in link
    assert "not a regular file" in fifo


class Attribute:
    """Is pickled as a call of getattr, the form in which Python 3.11.0 to 3.11.3 pickle a member of an enumeration."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        return getattr, self.arguments


def test_getattr_in_a_pickle_reads_only_enumeration_members() -> None:
    kind = _MEM_FORMAT_ENCODING
    assert sharded._unpickle(pickle.dumps(Attribute(kind, "TORCH_CHANNELS_LAST"))) is kind.TORCH_CHANNELS_LAST
    for owner, name in ((Metadata, "__init__"), (kind, "__init__"), (torch.Size, "__class__")):
        with pytest.raises(pickle.UnpicklingError, match=f"it requests {name} of"):
            sharded._unpickle(pickle.dumps(Attribute(owner, name)))


# ---- a rank that fails ----


def fail_on_rank_1(rank: int, size: int, checkpoint_dir: Path, failure: str) -> str:
    training = Training()
    with opened(checkpoint_dir, rank, size, shard_timeout=0.5 if failure == "silent" else 60.0) as checkpoints:
        training.learn(1)
        checkpoints.save(1, training.state())
        checkpoints.wait()
        if rank == 1:
            break_writes(failure)
        checkpoints.save(2, training.state())
        with pytest.raises(CheckpointError) as caught:
            checkpoints.wait()
        assert newest(checkpoints).step == 1
    return str(caught.value)


def break_writes(failure: str) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    patch = pytest.MonkeyPatch()  # never undone: this process exits with the test
    if failure == "silent":
        patch.setattr(sharded, "write_file", lambda *_: None)
    else:
        patch.setattr(directory.HashedFile, "write", full)
    if failure == "full, and the file that reports the failure stays empty":
        patch.setattr(sharded, "write_file", full)
    elif failure == "full, and the file that reports the failure is written slowly":
        patch.setattr(os, "replace", replace_slowly)


def replace_slowly(old: str, new: Path) -> None:
    time.sleep(10 * sharded.POLL_INTERVAL)
    os.rename(old, new)


FAILURES = {
    "full": "rank 1: [Errno 28] No space left on device",
    "full, and the file that reports the failure stays empty": "rank 1: could not write its shard",
    "full, and the file that reports the failure is written slowly": "rank 1: [Errno 28] No space left on device",
    "silent": "rank 1: timed out waiting for its shard",
}


@pytest.mark.parametrize(("failure", "message"), FAILURES.items(), ids=FAILURES)
def test_a_failed_rank_leaves_no_checkpoint_and_every_rank_raises(tmp_path: Path, failure: str, message: str) -> None:
    first, second = forked.ranks(2, fail_on_rank_1, tmp_path, failure)
    assert first == second
    assert first.startswith(f"cannot write {tmp_path}/step_00000002: {message}. Earlier checkpoints are intact")
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000001"]


def test_a_link_is_no_sharded_checkpoint(saved_by_two: Saved, tmp_path: Path) -> None:
    (link := tmp_path / "step_00000002").symlink_to(saved_by_two.checkpoint_dir / "step_00000002")
    assert "is a symbolic link, which is not followed" in str(sharded._SafeReader(link).fault(0))
    with pytest.raises(OSError, match="is a symbolic link, which is not followed"):
        os.close(directory.checkpoint_file(link / "__0_0.distcp"))


@pytest.mark.parametrize("outcome", ["done", "failed"])
@pytest.mark.parametrize(("kind", "message"), [("link", "is a symbolic link"), ("FIFO", "not a regular file")])
def test_no_link_or_fifo_in_place_of_the_file_of_a_rank_is_read(
    tmp_path: Path, outcome: str, kind: str, message: str
) -> None:
    (secret := tmp_path / "secret").write_text("secret")
    planted = tmp_path / f"rank_1.{outcome}"
    planted.symlink_to(secret) if kind == "link" else os.mkfifo(planted)
    writer = sharded.ShardWriter.__new__(sharded.ShardWriter)
    writer._writer = SimpleNamespace(path=tmp_path)  # type: ignore[assignment]
    with pytest.raises(OSError, match=message):
        writer._wait_for_rank(1, must_stop=lambda: False)


def save_where_rank_1_does_not_see_the_directory(rank: int, size: int, checkpoint_dir: Path) -> str:
    sharded.VISIBILITY_TIMEOUT = 0.2
    if rank == 1:
        pytest.MonkeyPatch().setattr(Path, "is_dir", lambda _: False)
    with opened(checkpoint_dir, rank, size) as checkpoints:
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(1, Training().state())
        return str(caught.value)


def test_the_error_names_a_node_that_does_not_share_the_directory(tmp_path: Path) -> None:
    first, second = forked.ranks(2, save_where_rank_1_does_not_see_the_directory, tmp_path)
    assert first == second
    assert first.startswith("rank 1 on ") and "fsdp needs a checkpoint directory that all nodes share" in first


def resume_from_a_slow_disk(rank: int, size: int, checkpoint_dir: Path, is_sharded: bool) -> list[str]:
    """Collectives have a timeout of a second; rank 0 needs more for a file. Returns the files that were verified."""
    import torch.distributed as dist

    verify, write, verified = directory._sha256, directory.HashedFile.write, []

    def verify_slowly(file: Path, *more: Any) -> str:
        verified.append(file.name)
        time.sleep(2.5 * (rank == 0))
        return verify(file, *more)

    def write_slowly(file: directory.HashedFile, data: Any) -> int:
        time.sleep(2.5 * (rank == 0 and Path(str(file.name)).name == "ranks.pt" and file.tell() == 0))
        return write(file, data)

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    patch = pytest.MonkeyPatch()  # never undone: this process exits with the test
    patch.setattr(directory, "_sha256", verify_slowly)
    patch.setattr(directory.HashedFile, "write", write_slowly)
    training = Training()
    with Checkpoints(checkpoint_dir, rank=rank, size=size, sharded=is_sharded) as checkpoints:
        training.learn(1)
        checkpoints.save(1, training.state() if is_sharded else {"weights": torch.ones(3)})
        checkpoints.wait()
        found = newest(checkpoints)
        checkpoints.load(found, training.state() if is_sharded else {"weights": torch.zeros(3)})
    return verified


@pytest.mark.parametrize("is_sharded", [True, False])
def test_no_rank_waits_in_a_collective_for_the_disk_of_rank_0(tmp_path: Path, is_sharded: bool) -> None:
    first, second = forked.ranks(2, resume_from_a_slow_disk, tmp_path, is_sharded)
    names = [".metadata", "__0_0.distcp", "__1_0.distcp", "ranks.pt"] if is_sharded else ["ranks.pt", "state.pt"]
    assert sorted([*first, *second]) == names
    assert len(second) == (2 if is_sharded else 0)  # all ranks share the work
