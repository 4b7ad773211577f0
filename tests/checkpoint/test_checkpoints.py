"""Checkpoints: saving neither changes nor blocks the training, and a failed write is never ignored.

A state that changes while it is written is saved as it was at save(). A failed background write stops the training and
leaves older checkpoints intact. States are loaded bit for bit on every rank, without running code from the file, and
a resumed run equals an uninterrupted run.
"""

from __future__ import annotations

import copy
import errno
import os
import pickle
import random
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from test_directory import stub_of_open
from torch import Tensor, nn

from distributed.checkpoint import directory, snapshot
from distributed.checkpoint.checkpoints import (
    CheckpointError,
    CheckpointInfo,
    Checkpoints,
    random_state,
    set_random_state,
)
from distributed.training import collectives


def same(first: Any, second: Any) -> bool:
    """Return whether both are equal to the bit, with the same types and shapes."""
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        alike = (first.dtype, first.shape) == (second.dtype, second.shape)
        return alike and torch.equal(bits(first), bits(second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return pickle.dumps(first) == pickle.dumps(second)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def plain(value: Any) -> Any:
    """Convert to the loaded form: parameters become tensors, ordered dicts become dicts."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def state_of(step: int, size: int = 1000) -> dict[str, Any]:
    weight = torch.randn(size, generator=torch.Generator().manual_seed(step))
    return {"model": {"weight": weight, "tied": weight}, "step": step, "moments": [weight * 2, weight * 3]}


def newest(checkpoints: Checkpoints) -> CheckpointInfo:
    found = checkpoints.newest()
    assert found is not None
    return found


@contextmanager
def blocked_writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Make the writer thread wait until the event is set."""
    go, write = threading.Event(), Checkpoints._write_job
    monkeypatch.setattr(Checkpoints, "_write_job", lambda *job: (go.wait(), write(*job)))
    try:
        yield go
    finally:
        go.set()


# ---- save and load ----

DTYPES = (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64)
STATES = {
    "plain numbers": {"a": 1, "b": -2.5, "c": float("inf"), "d": True, "e": None, "f": "größer", "g": b"\0"},
    "nested": {"a": [1, (2, [3.0, {"b": ()}])], "c": {"d": {}}, "e": []},
    "numbers as keys": {"state": {0: {"step": torch.tensor(3.0)}, 11: {}}},
    "every dtype": {str(dtype): torch.arange(-3, 4).to(dtype) for dtype in DTYPES},
    "no element": {"a": torch.empty(0), "b": torch.empty(3, 0)},
    "one element": {"a": torch.tensor(float("nan")), "b": torch.tensor(-0.0)},
    "not contiguous": {"a": torch.arange(12).reshape(3, 4).t(), "b": torch.arange(12)[::3]},
    "channels last": {"a": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)},
    "expanded": {"a": torch.arange(3).expand(4, 3)},
    "large": {"a": torch.arange(1_500_001), "b": torch.arange(8 * 2**20).to(torch.uint8)},
    "part of a larger one": {"a": torch.arange(1_000_000)[5:8]},
    "sizes and dtypes": {"a": torch.Size([2, 3]), "b": torch.float16, "c": torch.device("cpu")},
    "a parameter": {"a": nn.Parameter(torch.randn(3))},
    "an ordered dict": {"a": OrderedDict(b=1, c=torch.ones(2))},
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_state_is_loaded_bit_for_bit(tmp_path: Path, state: dict[str, Any]) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, state)
        checkpoints.wait()
        loaded = checkpoints.load(newest(checkpoints), state)
    assert same(plain(state), loaded)
    assert newest(checkpoints).bytes < 20_000 + sum(
        tensor.nbytes for tensor in state.values() if torch.is_tensor(tensor)
    )


def test_the_file_can_be_read_with_torch_load(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(1), per_rank="mine", facts={"layers": 2}, score=0.5)
    assert same(torch.load(tmp_path / "step_00000001/state.pt", weights_only=True), state_of(1))
    assert same(torch.load(tmp_path / "step_00000001/state.pt", weights_only=True, mmap=True), state_of(1))


def test_tied_tensors_stay_tied_and_are_stored_once(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": (shared := torch.randn(100_000)), "b": [shared, shared]})
        checkpoints.wait()
        loaded = checkpoints.load(newest(checkpoints), {})
    assert loaded["a"].data_ptr() == loaded["b"][0].data_ptr() == loaded["b"][1].data_ptr()
    assert newest(checkpoints).bytes < 1.1 * shared.nbytes


class Custom:
    pass


REFUSED: dict[str, tuple[dict[Any, Any], str]] = {
    "an object": ({"a": {"b": [Custom()]}}, r"state\['a'\]\['b'\]\[0\] is a test_checkpoints.Custom, which cannot"),
    "a function": ({"a": print}, r"state\['a'\] is a builtins.builtin_function_or_method"),
    "a set": ({"a": {1, 2}}, r"state\['a'\] is a builtins.set"),
    "a key": ({"a": {(1, 2): 3}}, r"state\['a'\] has the key \(1, 2\): a key must be a string or an int"),
    "a subclass": ({"a": type("Number", (float,), {})(1.0)}, r"Number, which cannot be loaded again without running"),
}


@pytest.mark.parametrize(("state", "message"), REFUSED.values(), ids=REFUSED)
def test_a_state_that_cannot_be_loaded_is_not_saved(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=message):
            checkpoints.save(1, state)
        with pytest.raises(CheckpointError, match=message.replace("state", "per_rank")):
            checkpoints.save(1, {}, per_rank=state)
        checkpoints.wait()
        assert checkpoints.newest() is None


@pytest.mark.parametrize(("facts", "score"), [({"a": Custom()}, None), ({}, float("nan"))])
def test_facts_and_score_must_be_json(tmp_path: Path, facts: dict[str, Any], score: float | None) -> None:
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="cannot be written as JSON"):
        checkpoints.save(1, {}, facts=facts, score=score)


def test_facts_are_read_without_loading_the_state(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state_of(1), facts={"layers": (1, 2)}, score=0.1)
        checkpoints.save(2, state_of(2), facts={"layers": (1, 2)}, score=0.9)
        checkpoints.save(3, state_of(3))
        checkpoints.wait()
        assert newest(checkpoints).step == 3
        found = checkpoints.best()
    assert found is not None
    assert (found.step, found.score, found.ranks, found.facts) == (1, 0.1, 1, {"layers": [1, 2]})


MISFITS = {
    "another shape": ({"model": {"weight": torch.zeros(7)}}, r"its state\['model'\]\['weight'\] has .* \(1000,\)"),
    "one more": ({"model": {"bias": torch.zeros(1)}}, r"it has no state\['model'\]\['bias'\]"),
    "a list": ({"moments": [torch.zeros(1000)] * 3}, r"it has no state\['moments'\]\[2\]"),
    "a tensor instead of a number": ({"step": torch.zeros(1)}, r"it has no state\['step'\]"),
}


@pytest.mark.parametrize(("state", "message"), MISFITS.values(), ids=MISFITS)
def test_a_state_that_does_not_fit_is_refused(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(1))
        checkpoints.wait()
        with pytest.raises(CheckpointError, match=f"step_00000001 does not fit this training: {message}"):
            checkpoints.load(newest(checkpoints), state)


def test_a_fresh_optimizer_without_moments_fits(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(1))
        checkpoints.wait()
        assert same(checkpoints.load(newest(checkpoints), {"moments": [], "new": 3}), state_of(1))


class Bomb:
    """Malicious content of a file: creates a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["state.pt", "ranks.pt"])
def test_code_in_a_checkpoint_is_not_run(tmp_path: Path, name: str) -> None:
    final, entries = tmp_path / "step_00000001", directory.FileEntries()
    owner = directory.take_over(tmp_path)
    incomplete = owner.new_directory(1)
    for file in ("state.pt", "ranks.pt"):
        with directory.open_hashed(incomplete / file, entries) as stream:
            torch.save([Bomb(tmp_path / "boom")] if file == name else {}, stream)
    manifest = {"step": 1, "score": None, "ranks": 1, "sharded": False, "written": "", "facts": {}, "files": entries}
    owner.publish(incomplete, manifest)
    owner.close()
    with Checkpoints(tmp_path) as checkpoints:
        found = newest(checkpoints)
        with pytest.raises(CheckpointError) as caught:
            checkpoints.load(found, {}) if name == "state.pt" else checkpoints.load_per_rank(found)
    assert str(caught.value) == (
        f"{final}/{name}: not loaded: it requests posix.mkdir, which no checkpoint needs; do not trust this file"
    )
    assert not (tmp_path / "boom").exists()


# ---- background writes ----


def test_changes_during_the_write_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(1)
    with blocked_writer(monkeypatch) as go, Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        assert checkpoints.failed() is None
        state["model"]["weight"].zero_()
        state["moments"].clear()
        assert checkpoints.newest() is None
        go.set()
        checkpoints.wait()
        assert same(checkpoints.load(newest(checkpoints), {}), state_of(1))


class SmallTraining:
    """A small training whose state has an optimizer, buffers, an average and a transposed view."""

    def __init__(self) -> None:
        self.linear = nn.Linear(2, 3)
        self.model = nn.Sequential(self.linear, nn.BatchNorm1d(3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.average = torch.ones(3)
        self.compute_gradients()
        self.optimizer.step()

    def compute_gradients(self) -> None:
        self.model(torch.randn(4, 2)).square().sum().backward()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average,
            "turned": self.linear.weight.t(),
        }


def test_the_optimizer_step_waits_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = SmallTraining()
    with blocked_writer(monkeypatch) as go, Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            before = copy.deepcopy(plain(training.state()))
            go.clear()
            checkpoints.save(step, training.state(), overlapped=training.optimizer)
            assert len(checkpoints._snapshot._pending) >= 12  # not copied yet: four tensors, two moments of each
            training.average += 1
            training.compute_gradients()
            training.optimizer.step()
            assert not same(before, plain(training.state()))
            go.set()
            checkpoints.wait()
            assert same(checkpoints.load(newest(checkpoints), {}), before)
        assert len(training.optimizer._optimizer_step_pre_hooks) == 1
    assert not training.optimizer._optimizer_step_pre_hooks


def test_the_time_that_an_optimizer_step_waits_counts_as_time_of_the_save(tmp_path: Path) -> None:
    training = SmallTraining()
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, training.state(), overlapped=training.optimizer)
            call = checkpoints.blocked[-1]
            training.compute_gradients()
            training.optimizer.step()
            assert len(checkpoints.blocked) == step
            assert checkpoints.blocked[-1] > call > 0


def test_the_step_waits_for_a_copy_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    training, copies, copy_ = SmallTraining(), snapshot.Snapshot(), torch.Tensor.copy_
    taken, go, stepped = threading.Event(), threading.Event(), threading.Event()

    def slowly(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        taken.set()
        go.wait()
        return copy_(memory, tensor)

    copies.take({"a": training.linear.weight}, overlapped=training.optimizer)
    monkeypatch.setattr(torch.Tensor, "copy_", slowly)
    writer = threading.Thread(target=copies.finish)
    writer.start()
    taken.wait()

    def wait_and_step() -> None:
        copies.finish()
        stepped.set()

    step = threading.Thread(target=wait_and_step)
    step.start()
    waited = not stepped.wait(0.05)
    go.set()
    writer.join()
    step.join()
    assert waited


def test_if_no_optimizer_step_follows_the_writer_thread_copies_the_tensors(tmp_path: Path) -> None:
    training = SmallTraining()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, training.state(), overlapped=training.optimizer)
        checkpoints.wait()
        assert same(checkpoints.load(newest(checkpoints), {}), plain(training.state()))


def test_a_change_outside_an_optimizer_step_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = SmallTraining()
    with blocked_writer(monkeypatch) as go, Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, training.state(), overlapped=training.optimizer)
        with torch.no_grad():
            training.linear.bias.zero_()
        go.set()
        with pytest.raises(CheckpointError, match="the state was changed while it was copied"):
            checkpoints.wait()
        assert checkpoints.newest() is None


def test_a_refused_state_does_not_affect_the_next_snapshot() -> None:
    copies, state = snapshot.Snapshot(), {"a": torch.zeros(3)}
    with pytest.raises(CheckpointError):
        copies.take({**state, "b": {1, 2}})
    state["a"] += 1
    assert same(copies.take(state), {"a": torch.ones(3)})


def test_the_end_of_the_with_block_waits_for_the_last_save_even_after_an_error(tmp_path: Path) -> None:
    def save_and_fail() -> None:
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, state_of(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save_and_fail()
    found = directory.newest(tmp_path)
    assert found is not None and found.step == 1


def test_the_end_of_the_with_block_raises_the_error_of_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_and_leave() -> None:
        with blocked_writer(monkeypatch) as go, Checkpoints(tmp_path / "here") as checkpoints:
            checkpoints.save(1, state_of(1))
            (tmp_path / "here").rename(tmp_path / "gone")
            go.set()

    with pytest.raises(CheckpointError, match="cannot write"):
        save_and_leave()


def send_whether_free(pipe: Connection, checkpoint_dir: Path) -> None:
    try:
        directory.take_over(checkpoint_dir).close()
        pipe.send(True)
    except CheckpointError:
        pipe.send(False)


def is_free(checkpoint_dir: Path) -> bool:
    """Return whether another process can lock the directory."""
    with forked.running(send_whether_free, checkpoint_dir) as (_, pipe):
        assert pipe.poll(forked.TIMEOUT)
        return bool(pipe.recv())


def test_the_directory_lock_is_released_at_the_end_of_the_with_block(tmp_path: Path) -> None:
    with Checkpoints(tmp_path):
        assert not is_free(tmp_path)
    assert is_free(tmp_path)


def test_snapshots_reuse_their_memory() -> None:
    copies = snapshot.Snapshot()
    first = copies.take(state_of(1))
    addresses = first["model"]["weight"].data_ptr(), first["moments"][1].data_ptr()
    second = copies.take(state_of(2))
    assert addresses == (second["model"]["weight"].data_ptr(), second["moments"][1].data_ptr())
    assert same(second, state_of(2))
    assert same(copies.take(state_of(3, size=10)), state_of(3, size=10))


class Cudart:
    """CUDA's runtime, as far as it locks pages. error: what a call returns."""

    def __init__(self, error: int) -> None:
        self.error, self.locked = error, dict[int, int]()  # address -> bytes

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.locked[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return self.error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_page_locked_memory_has_the_size_and_layout_of_its_tensor(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """CUDA's runtime is replaced. PyTorch's own page-locked memory would have 2 MiB or 4 MiB."""
    cudart = Cudart(error=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    tensor = torch.randn(3, 500, 900).to(dtype).transpose(0, 2)
    copies = [snapshot.page_locked(tensor).copy_(tensor) for _ in range(2)]
    assert all(torch.equal(copy, tensor) and copy.stride() == tensor.stride() for copy in copies)
    assert cudart.locked == {copy.data_ptr(): tensor.nbytes for copy in copies}
    assert all(copy.untyped_storage().nbytes() == tensor.nbytes for copy in copies), "torch.save() writes the storage"
    del copies
    assert cudart.locked == {}


def test_memory_that_cannot_be_locked_is_an_error_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(error=2))
    with pytest.raises(CheckpointError, match="cannot lock 1,600,000 bytes of CPU memory for the copy: CUDA error 2"):
        snapshot.page_locked(torch.zeros(400_000))


def test_a_failed_write_is_reported_at_the_next_step_and_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with blocked_writer(monkeypatch) as go, Checkpoints(tmp_path / "here") as checkpoints:
        checkpoints.save(1, state_of(1))
        (tmp_path / "here").rename(tmp_path / "gone")
        go.set()
        assert checkpoints._write is not None
        assert isinstance(checkpoints._write.exception(), CheckpointError)
        failure = checkpoints.failed()
        assert "cannot write" in str(failure) and "No such file or directory" in str(failure)
        with pytest.raises(CheckpointError, match=r"cannot write .*/step_00000001: .*No such file") as caught:
            checkpoints.save(2, state_of(2))
        assert caught.value.__cause__ is failure
        (tmp_path / "gone").rename(tmp_path / "here")
        checkpoints.save(3, state_of(3))  # the error is raised once; saving works when the cause is fixed


@contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """A separate file system; mounting it needs root."""
    with tempfile.TemporaryDirectory() as checkpoint_dir:
        mount = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", checkpoint_dir], capture_output=True
        )
        if mount.returncode != 0 and "CI" not in os.environ:
            pytest.skip("a small disk needs root")
        assert mount.returncode == 0, mount.stderr
        try:
            yield Path(checkpoint_dir)
        finally:
            subprocess.run(["umount", checkpoint_dir], check=True)


def test_a_full_disk_stops_the_run_and_keeps_the_older_checkpoint() -> None:
    with small_disk("8m") as disk:
        small = state_of(1, size=200_000)
        with Checkpoints(disk) as checkpoints:
            checkpoints.save(1, small)
            checkpoints.save(2, state_of(2, size=2_000_000))
            with pytest.raises(CheckpointError) as caught:
                checkpoints.wait()
        assert str(caught.value) == (
            f"cannot write {disk}/step_00000002: [Errno 28] No space left on device. Earlier checkpoints are intact: "
            "fix the cause, then run the same command to resume from the newest"
        )
        assert [path.name for path in disk.glob("step_*")] == ["step_00000001"]
        with Checkpoints(disk) as checkpoints:
            assert same(checkpoints.load(newest(checkpoints), {}), small)
            checkpoints.save(2, small)  # the incomplete checkpoint was removed: there is space again


def save_endlessly(pipe: Connection, checkpoint_dir: Path) -> None:
    with Checkpoints(checkpoint_dir, keep=2) as checkpoints:
        for step in range(1, 10**6):
            checkpoints.save(step, state_of(step, size=100_000))
            pipe.send(step)


def test_a_run_killed_during_a_save_resumes_from_a_valid_checkpoint(tmp_path: Path) -> None:
    source = random.Random(3)
    for _ in range(4):
        with forked.running(save_endlessly, tmp_path) as (_, pipe):
            for _ in range(source.randrange(2, 6)):
                assert pipe.poll(forked.TIMEOUT)
                pipe.recv()
            threading.Event().wait(source.random() / 20)  # so that the kill hits the next write
        with Checkpoints(tmp_path) as checkpoints:
            found = newest(checkpoints)
            assert same(checkpoints.load(found, {}), state_of(found.step, size=100_000))
            assert all(directory.STEP.fullmatch(path.name) for path in tmp_path.glob("step_*"))


def test_a_value_of_keep_below_1_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep: expected 1 or more, got 0"):
        Checkpoints(tmp_path, keep=0)


# ---- random states and resumed runs ----


def draws() -> list[Any]:
    drawn: list[Any] = [random.random(), random.gauss(0, 1), torch.randn(3).tolist()]
    if numpy := sys.modules.get("numpy"):
        drawn += [numpy.random.random(), numpy.random.standard_normal()]
    return drawn


def test_every_random_generator_is_restored(tmp_path: Path) -> None:
    draws()  # gauss() buffers a second number
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {}, per_rank=random_state())
        expected = draws()
        draws()
        checkpoints.wait()
        set_random_state(checkpoints.load_per_rank(newest(checkpoints)))
    assert draws() == expected


def test_numpy_state_is_saved_only_when_numpy_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    assert "numpy" not in random_state()
    restored: list[Any] = []
    keys = SimpleNamespace(tolist=lambda: [1, 2])
    generator = SimpleNamespace(get_state=lambda: ("MT19937", keys, 2, 0, 0.5), set_state=restored.append)
    monkeypatch.setitem(sys.modules, "numpy", SimpleNamespace(random=generator))
    set_random_state(random_state())
    assert restored == [("MT19937", [1, 2], 2, 0, 0.5)]


def train(checkpoint_dir: Path, first: int, last: int) -> dict[str, Any]:
    """Train a small model with dropout from its newest checkpoint, saving after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    with Checkpoints(checkpoint_dir) as checkpoints:
        if found := checkpoints.newest():
            state = checkpoints.load(found, {"model": model.state_dict()})
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            schedule.load_state_dict(state["schedule"])
            set_random_state(checkpoints.load_per_rank(found))
        for step in range(first, last + 1):
            model(torch.randn(5, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            state = {name: thing.state_dict() for name, thing in
                     (("model", model), ("optimizer", optimizer), ("schedule", schedule))}  # fmt: skip
            checkpoints.save(step, state, per_rank=random_state())
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "draws": draws()}


def test_the_generators_of_all_gpus_are_restored_beginning_with_the_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch is made to report GPUs. Strategy dp uses all of them; with ddp, a rank may move to another GPU."""
    generators: dict[int, torch.Tensor] = {}

    def gpus(own: int, *states: int) -> None:
        generators.clear()
        generators.update({gpu: torch.tensor([state]) for gpu, state in enumerate(states)})
        monkeypatch.setattr(torch.cuda, "current_device", lambda: own)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(generators))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda gpu="cuda": generators[gpu])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, gpu="cuda": generators.update({gpu: state}))
    gpus(0, 10, 11, 12)
    saved_by_dp = random_state()
    gpus(2, 10, 11, 12)
    saved_by_rank_2 = random_state()
    gpus(0, 0, 0, 0)
    set_random_state(saved_by_dp)
    assert {gpu: int(state) for gpu, state in generators.items()} == {0: 10, 1: 11, 2: 12}
    gpus(1, 0, 0)
    set_random_state(saved_by_rank_2)
    assert generators[1] == 12
    set_random_state({**saved_by_dp, "cuda": torch.tensor([13])})  # of an earlier version
    assert generators[1] == 13


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_a_resumed_run_equals_an_uninterrupted_run_bit_for_bit(tmp_path: Path) -> None:
    random.seed(0)
    whole = train(tmp_path / "whole", 1, 6)
    random.seed(0)
    for first, last in ((1, 2), (3, 3), (4, 6)):
        parts = train(tmp_path / "parts", first, last)
    assert same(parts["model"], whole["model"])
    assert same(parts["optimizer"], whole["optimizer"])
    assert parts["draws"][2] == whole["draws"][2]


def test_no_link_that_replaces_a_checkpoint_after_its_verification_is_followed(tmp_path: Path) -> None:
    """As another user can put it there who can write to the checkpoint directory."""
    with Checkpoints(tmp_path / "shared") as checkpoints:
        checkpoints.save(1, state_of(1))
        checkpoints.wait()
        found = newest(checkpoints)
        found.path.rename(tmp_path / "private")
        found.path.symlink_to(tmp_path / "private")
        with pytest.raises(CheckpointError, match="is a symbolic link, which is not followed"):
            checkpoints.load(found, state_of(0))
        with pytest.raises(CheckpointError, match="is a symbolic link, which is not followed"):
            checkpoints.load_per_rank(found)


# ---- several ranks ----


def save_on_ranks(rank: int, size: int, checkpoint_dir: Path) -> None:
    """Each rank has a separate directory, like nodes without shared storage; rank 0 writes."""
    with Checkpoints(checkpoint_dir / f"node{rank}", rank=rank, size=size) as checkpoints:
        for step in (1, 2):
            torch.manual_seed(rank)
            checkpoints.save(step, state_of(step), per_rank={"draws": torch.randn(3), **random_state()})
        checkpoints.wait()
        assert newest(checkpoints).step == 2


def load_on_ranks(rank: int, size: int, checkpoint_dir: Path) -> tuple[int, int, bool, Any]:
    """Return step, saved ranks, whether the state is that of step 2, and two draws if there is a random state."""
    collectives.PIECE = 1000  # sent in many pieces
    with Checkpoints(checkpoint_dir / f"node{rank}", rank=rank, size=size) as checkpoints:
        found = newest(checkpoints)
        is_state_2 = same(checkpoints.load(found, state_of(0)), state_of(2))
        per_rank = checkpoints.load_per_rank(found)
        if per_rank is None:
            return found.step, found.ranks, is_state_2, None
        set_random_state(per_rank)
        return found.step, found.ranks, is_state_2, (per_rank["draws"].tolist(), torch.randn(3).tolist())


def test_every_rank_gets_the_state_of_rank_0_and_its_own_per_rank_state(tmp_path: Path) -> None:
    forked.ranks(2, save_on_ranks, tmp_path)
    assert not (tmp_path / "node1").exists()
    expected = []
    for rank in range(2):
        torch.manual_seed(rank)
        expected.append((2, 2, True, (torch.randn(3).tolist(), torch.randn(3).tolist())))
    assert forked.ranks(3, load_on_ranks, tmp_path) == [*expected, (2, 2, True, None)]


def load_what_rank_0_cannot_read(rank: int, size: int, checkpoint_dir: Path) -> list[str]:
    collectives.PIECE = 1000
    errors = []
    with Checkpoints(checkpoint_dir / f"node{rank}", rank=rank, size=size) as checkpoints:
        found = newest(checkpoints)
        for load in (lambda: checkpoints.load(found, {}), lambda: checkpoints.load_per_rank(found)):
            files = [found.path / "state.pt", found.path / "ranks.pt"]
            with stub_of_open(*files, error=errno.EIO), pytest.raises(CheckpointError) as caught:
                load()
            errors.append(str(caught.value))
        manifests = found.path.parent.glob("*/manifest.json")
        with stub_of_open(*manifests, error=errno.EIO), pytest.raises(CheckpointError) as caught:
            checkpoints.newest()
        errors.append(str(caught.value))
    return errors


def test_a_read_error_on_rank_0_is_raised_on_every_rank(tmp_path: Path) -> None:
    forked.ranks(1, save_on_ranks, tmp_path)
    first, *others = forked.ranks(3, load_what_rank_0_cannot_read, tmp_path)
    assert [first] * 2 == others
    state, own, manifest = first
    assert f"{tmp_path}/node0/step_00000002/state.pt: cannot be read: [Errno 5] Input/output error" in state
    assert "step_00000002/ranks.pt: cannot be read: [Errno 5] Input/output error" in own
    assert "checkpoints exist, but none is usable" in manifest


def fail_on_ranks(rank: int, size: int, checkpoint_dir: Path) -> list[str]:
    messages = []
    with Checkpoints(checkpoint_dir, rank=rank, size=size) as checkpoints:
        if rank == 0:
            checkpoint_dir.rename(checkpoint_dir.with_name("gone"))
        checkpoints.save(1, state_of(1))
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(2, state_of(2))
        messages.append(str(caught.value))
        if rank == 0:
            checkpoint_dir.with_name("gone").rename(checkpoint_dir)
        assert checkpoints.newest() is None
    (checkpoint_dir / "file").touch()
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(checkpoint_dir / "file" / "checkpoints", rank=rank, size=size)
    return [*messages, str(caught.value)]


def test_a_write_error_on_rank_0_is_raised_on_every_rank(tmp_path: Path) -> None:
    first, second = forked.ranks(2, fail_on_ranks, tmp_path / "here")
    assert first == second
    assert "cannot write" in first[0] and "No such file" in first[0]
    assert "cannot write checkpoints here" in first[1]
