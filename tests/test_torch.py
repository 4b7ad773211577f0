"""Joining the other ranks, and training with them.

Held here: a process alone needs no address and opens no store; wrapped models exchange exactly what they should; an
error inside the process group keeps its traceback; a person is shown which rank this is, and why.
"""

from __future__ import annotations

import copy
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import forked
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from test_world import JOB, STEP, TORCHRUN
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from distributed import torch as ours
from distributed.torch import STRATEGIES, check_no_shared_devices, process_group
from distributed.world import World, WorldError

KIT = Path(__file__).parents[1]

# ---------------------------------------------------------------- explained to a person


def explained(monkeypatch: pytest.MonkeyPatch, env: Mapping[str, str]) -> int:
    for name in (*TORCHRUN, *STEP):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return ours.main()


def test_a_place_and_its_reasons_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explained(monkeypatch, TORCHRUN) == 0
    first, *reasons = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"rank 3 of 4 on \S+: local rank 1 of 2, node 1 of 2", first)
    assert reasons[:3] == [
        "  decided by  torchrun",
        "  from        RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=n1 MASTER_PORT=29500 LOCAL_WORLD_SIZE=2 "
        "GROUP_RANK=1 GROUP_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none",
        "  meeting at  n1:29500",
    ]
    assert explained(monkeypatch, JOB) == 0
    assert "  note        inside SLURM job 4711, but not started by srun" in capsys.readouterr().out
    assert explained(monkeypatch, {}) == 0
    assert "  from        nothing set\n  meeting at  none needed\n" in capsys.readouterr().out


def test_a_refusal_is_printed_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explained(monkeypatch, {"RANK": "1"}) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("distributed.torch: RANK=1 is set, but not WORLD_SIZE")
    assert err.count("\n") == 1


# ---------------------------------------------------------------- one process, one device


def listening_everywhere() -> set[int]:
    """Ports of this process that are open on all interfaces."""
    return {here.laddr.port for here in psutil.Process().net_connections() if here.laddr.ip in ("0.0.0.0", "::")}


def test_a_process_alone_needs_no_address_and_opens_no_store() -> None:
    before = listening_everywhere()  # a store of another test lives until it is collected
    with process_group(World()) as world:
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [1.0, 1.0]
        assert dist.get_world_size() == world.size == 1
        assert not listening_everywhere() - before, "a store listens on all interfaces"
    assert not dist.is_initialized()


@pytest.mark.parametrize(("code", "left"), [(75, True), (1, False)])
def test_of_processes_that_exit_only_one_that_stops_on_request_leaves_the_group(code: int, left: bool) -> None:
    """After another exit the other ranks may be gone."""
    with pytest.raises(SystemExit), process_group(World()):
        sys.exit(code)
    assert dist.is_initialized() != left
    if not left:
        dist.destroy_process_group()


ENDS_WHILE_GLOO_HOLDS_TENSORS = """
import sys
import torch
import torch.distributed as dist
from distributed.torch import leave, process_group
from distributed.world import World

def main():
    global group
    with process_group(World()):
        group = dist.group.WORLD  # as DDP and DTensor hold it
        sys.setswitchinterval(1000)  # the thread of gloo has to wait before it can let go of the tensors
        for _ in range(3):
            dist.all_reduce(torch.ones(3), async_op=True)
    return 3

print("written")
leave(main())
"""


def test_a_process_that_leaves_is_not_aborted_by_gloo() -> None:
    words = [sys.executable, "-c", ENDS_WHILE_GLOO_HOLDS_TENSORS]
    ended = subprocess.run(words, cwd=KIT, timeout=60, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "written\n", "")


def test_two_ranks_on_one_gpu_are_refused() -> None:
    """A stub: the identities stand for those of real GPUs."""
    check_no_shared_devices({0: ("a", "GPU-1"), 1: ("a", "GPU-2"), 2: ("b", "GPU-1")})
    with pytest.raises(WorldError) as refused:
        check_no_shared_devices({0: ("a", "GPU-1"), 1: ("b", "GPU-2"), 2: ("b", "GPU-3"), 3: ("b", "GPU-2")})
    assert str(refused.value) == (
        "rank 1 and rank 3 share one GPU on b (GPU-2): start no more processes on b than it has GPUs, and give each "
        "task its own (CUDA_VISIBLE_DEVICES)"
    )


def test_the_device_is_the_local_rank_modulo_what_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub of two GPUs."""
    world = World(rank=7, size=8, local_rank=3, local_size=4, node_rank=1, nodes=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ours.device(world) == torch.device("cuda", 1)
    assert ours.device(world, "gloo") == torch.device("cpu")
    assert ours.device(world, name="cpu") == torch.device("cpu")
    assert ours.device(world, name="cuda") == torch.device("cuda", 1)
    assert ours.device(world, name="cuda:0") == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ours.device(world) == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "there", "message"),
    [
        ("cuda:2", 2, "device cuda:2: not available: PyTorch sees 2 GPUs here; give cuda:0 to cuda:1, or cpu"),
        ("cuda:0", 0, "device cuda:0: not available: PyTorch sees 0 GPUs here; give cpu"),
        ("cuda", 0, "device cuda: not available: PyTorch sees 0 GPUs here; give cpu"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    name: str, there: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    with pytest.raises(WorldError, match=re.escape(message)):
        ours.device(World(), name=name)


# ---------------------------------------------------------------- strategies and seeds

ONE, TWO = World(), World(size=2)


@pytest.mark.parametrize(
    ("strategy", "world", "expected"),
    [
        ("auto", ONE, "single"), ("auto", TWO, "ddp"), ("single", ONE, "single"), ("dp", ONE, "dp"),
        ("ddp", ONE, "ddp"), ("ddp", TWO, "ddp"), ("fsdp", ONE, "fsdp"), ("fsdp", TWO, "fsdp"),
    ],
)  # fmt: skip
def test_a_strategy_that_fits(strategy: str, world: World, expected: str) -> None:
    assert ours.resolve(strategy, world) == expected


@pytest.mark.parametrize("use", [ours.resolve, lambda strategy, world: ours.wrap(nn.Linear(1, 1), strategy, world)])
@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("single", "strategy 'single' is for one process, but there are 2: start one process, or set distributed"),
        ("dp", "strategy 'dp' is for one process, but there are 2"),
        ("deepspeed", f"strategy 'deepspeed' is not one of {', '.join(STRATEGIES)}"),
    ],
)
def test_a_strategy_that_does_not_fit(use: Callable[[str, World], object], strategy: str, message: str) -> None:
    with pytest.raises(WorldError) as refused:
        use(strategy, TWO)
    assert str(refused.value).startswith(message)


def test_one_process_needs_no_wrapping() -> None:
    model = nn.Linear(2, 1)
    assert ours.wrap(model, "auto", ONE) is model
    parallel = ours.wrap(model, "dp", ONE)
    assert isinstance(parallel, nn.DataParallel)
    assert ours.unwrap(parallel) is ours.unwrap(model) is model


def draws(base: int, rank: int) -> tuple[float, float, float]:
    ours.seed(base, rank)
    return random.random(), float(np.random.random()), torch.rand(1).item()


def test_seeds_differ_between_ranks_and_repeat_between_runs() -> None:
    assert draws(7, 0) == draws(7, 0)
    for one, other in zip(draws(7, 0), draws(7, 1), strict=True):
        assert one != other


# ---------------------------------------------------------------- two ranks, as the agent starts them


class Net(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.sum()


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def gradients(model: nn.Module) -> list[list[float] | None]:
    return [None if p.grad is None else whole(p.grad).flatten().tolist() for p in model.parameters()]


def look_around(rank: int, folder: Path) -> None:
    """Write down where this rank is, and what gradients it gets."""
    with process_group(timeout=60) as world:
        found: dict[str, Any] = {"place": [world.rank, world.size, world.local_rank, world.launcher]}
        torch.manual_seed(1)
        plain = Net()
        batches = torch.randn(world.size, 2, 2, 3)[rank]  # this rank's: two micro-batches of two windows of three

        # What each rank adds up by itself, and the mean of that over the ranks.
        (plain(batches[0]) + plain(batches[1])).backward()
        found["own"] = gradients(plain)
        for p in plain.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= world.size
        found["mean"] = gradients(plain)
        plain.zero_grad()

        for strategy in ("ddp", "fsdp"):
            found[strategy] = exchange(plain, strategy, world, batches)
        found["auto"] = type(ours.wrap(plain, "auto", world)).__name__
        plain(batches[0]).backward()
        found["first alone"] = gradients(plain)
    found["left"] = not dist.is_initialized()
    (folder / f"rank_{rank}.json").write_text(json.dumps(found))


def exchange(plain: Net, strategy: str, world: World, batches: Tensor) -> dict[str, Any]:
    """Gradients of the first micro-batch, without exchange, and of both, with it."""
    inner = copy.deepcopy(plain)
    model = ours.wrap(inner, strategy, world)
    with ours.gradient_sync(model, on=False):
        model(batches[0]).backward()
    alone = gradients(model)
    with ours.gradient_sync(model, on=True):
        model(batches[1]).backward()
    return {
        "alone": alone,
        "together": gradients(model),
        "unwrapped": ours.unwrap(model) is inner,
        "sharded": [p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor)],
        "blocks": [isinstance(block, FSDPModule) for block in inner.blocks],
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("two_ranks")
    torchruns = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    with forked.launched(2, look_around, folder, env=torchruns) as launch:
        ends = launch.results()
    assert [end.code for end in ends.values()] == [0, 0], ends
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


def test_each_rank_knows_its_place_and_leaves_the_group(told: list[dict[str, Any]]) -> None:
    assert [found["place"] for found in told] == [[rank, 2, rank, "torchrun"] for rank in range(2)]
    assert all(found["left"] and found["auto"] == "DistributedDataParallel" for found in told)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_are_the_mean_over_the_ranks(told: list[dict[str, Any]], strategy: str) -> None:
    assert told[0]["own"] != told[1]["own"]
    for found in told:
        for gradient, mean in zip(found[strategy]["together"], found["mean"], strict=True):
            assert gradient == pytest.approx(mean, rel=1e-5)
    assert told[0][strategy]["together"] == told[1][strategy]["together"]
    assert all(found[strategy]["unwrapped"] for found in told)


def test_without_exchange_gradients_only_add_up(told: list[dict[str, Any]]) -> None:
    for found in told:
        for gradient, own in zip(found["ddp"]["alone"], found["first alone"], strict=True):
            assert gradient == pytest.approx(own, rel=1e-5)
        assert found["fsdp"]["alone"] == [None, None], "not sharded before the last micro-batch"
    assert told[0]["ddp"]["alone"] != told[1]["ddp"]["alone"]


def test_each_block_is_sharded_by_itself(told: list[dict[str, Any]]) -> None:
    assert [found["fsdp"]["blocks"] for found in told] == [[True, True]] * 2
    assert [found["fsdp"]["sharded"] for found in told] == [[6, 6], [3, 3]]  # 3 x 3, of which rank 0 has two rows
    assert [found["ddp"]["sharded"] for found in told] == [[], []]


class Odd(nn.Module):
    """A sparse embedding, a frozen layer, and layers registered in another order than they are used in."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 1)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.first = nn.Linear(32, 64)
        self.words = nn.Embedding(10, 32, sparse=True)
        self.norm = nn.BatchNorm1d(64, momentum=0.5)

    def forward(self, words: Tensor) -> Tensor:
        hidden = torch.dropout(self.norm(self.first(self.words(words))), 0.5, self.training)
        return self.last(torch.tanh(self.frozen(hidden))).sum()


def sum_gradients_twice(rank: int, size: int) -> tuple[bool, list[str]]:
    """Whether wrap() leaves the model and the random state as they are, and the gradients that are not the same when
    the same step is computed twice."""
    torch.manual_seed(1)
    plain = Odd()
    before, random_state = copy.deepcopy(plain.state_dict()), torch.get_rng_state()
    model = ours.wrap(plain, "ddp", World(rank=rank, size=size))
    untouched = torch.equal(random_state, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())
    untouched &= all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())

    summed: list[dict[str, Tensor]] = []
    for _ in range(2):
        torch.manual_seed(rank)
        model(torch.randint(10, (5,))).backward()
        summed.append({name: p.grad.to_dense().clone() for name, p in plain.named_parameters() if p.grad is not None})
        model.zero_grad()
    assert len(summed[0]) == 7
    return untouched, [name for name, gradient in summed[0].items() if not torch.equal(gradient, summed[1][name])]


def test_three_ranks_sum_the_first_gradients_like_all_later_ones() -> None:
    assert forked.ranks(3, sum_gradients_twice) == [(True, [])] * 3


def wait_for_rank_1(rank: int, folder: Path, ranks: int) -> None:
    """For launched(): these ranks meet within 2 s, and rank 1 comes to no collective."""
    (folder / f"{rank}").touch()
    while len(list(folder.iterdir())) < ranks:  # what a busy machine needs to start them does not count
        time.sleep(0.01)
    with process_group(backend="gloo", timeout=2):
        if rank == 1:
            signal.pause()
        dist.all_reduce(torch.ones(1))


def test_a_rank_waits_in_a_collective_no_longer_than_the_timeout(tmp_path: Path) -> None:
    with forked.launched(2, wait_for_rank_1, tmp_path, 2) as launch:
        told = launch.results(1)[0]
    assert told.code == 1 and "all_reduce" in told.err
    assert "Timed out waiting 2000ms for recv operation to complete" in told.err


def test_a_rank_waits_for_the_others_to_join_no_longer_than_the_timeout(tmp_path: Path) -> None:
    with forked.launched(2, wait_for_rank_1, tmp_path, 1, only=[0]) as launch:
        told = launch.results()[0]
    assert told.code == 1
    assert "WorldError: rank 1 of 2 did not join within 2 s; read the output of the missing ranks" in told.err


FAILING = """
import torch, torch.distributed as dist
from distributed.torch import process_group
with process_group(backend="gloo") as world:
    dist.barrier()
    if world.rank == 1:
        raise ValueError("the data of rank 1 is broken")
    dist.all_reduce(torch.ones(1))
"""


def test_an_error_inside_the_group_keeps_its_traceback_and_nobody_waits_for_the_timeout(tmp_path: Path) -> None:
    """With nobody who would end the other one; a collective may take ten minutes."""
    (tmp_path / "failing.py").write_text(FAILING)
    with forked.launched(2, forked.script, str(tmp_path / "failing.py")) as launch:
        told = launch.results()
    assert [told[rank].code for rank in range(2)] == [1, 1], told
    error = told[1].err.strip()
    assert re.search(r"line 7, in <module>\n.*\n(\[rank1\]: )?ValueError: the data of rank 1 is broken$", error)
    assert "ValueError" not in told[0].err
    assert "all_reduce" in told[0].err
