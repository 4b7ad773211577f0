"""Tests of the process group, the strategies and the seeds.

A single process needs no rendezvous address and opens no store. Wrapped models exchange the expected gradients. An
error inside the process group keeps its traceback. `python -m distributed.torch` prints the rank and its source.
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
from collections.abc import Callable, Iterator, Mapping
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

from distributed import torch as muster_torch
from distributed.torch import STRATEGIES, check_no_shared_devices, process_group
from distributed.world import World, WorldError

KIT = Path(__file__).parents[1]

# ---------------------------------------------------------------- python -m distributed.torch


def run_main(monkeypatch: pytest.MonkeyPatch, env: Mapping[str, str]) -> int:
    for name in (*TORCHRUN, *STEP):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return muster_torch.main([])


def test_the_rank_and_its_source_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, TORCHRUN) == 0
    first, *details = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"rank 3 of 4 on \S+: local rank 1 of 2, node 1 of 2", first)
    assert details[:3] == [
        "  decided by  torchrun",
        "  from        RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=n1 MASTER_PORT=29500 LOCAL_WORLD_SIZE=2 "
        "GROUP_RANK=1 GROUP_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none",
        "  rendezvous  n1:29500",
    ]
    assert run_main(monkeypatch, JOB) == 0
    assert "  note        inside SLURM job 4711, but not started by srun" in capsys.readouterr().out
    assert run_main(monkeypatch, {}) == 0
    assert "  from        nothing set\n  rendezvous  none needed\n" in capsys.readouterr().out


def test_an_error_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, {"RANK": "1"}) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("distributed.torch: RANK=1 is set, but not WORLD_SIZE")
    assert err.count("\n") == 1


# ---------------------------------------------------------------- one process, one device


def ports_on_all_interfaces() -> set[int]:
    """Ports on which this process listens on all interfaces."""
    connections = psutil.Process().net_connections()
    return {each.laddr.port for each in connections if each.laddr.ip in ("0.0.0.0", "::")}


def test_a_single_process_needs_no_address_and_opens_no_store() -> None:
    before = ports_on_all_interfaces()  # a store of another test listens until it is garbage-collected
    with process_group(World()) as world:
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [1.0, 1.0]
        assert dist.get_world_size() == world.size == 1
        assert not ports_on_all_interfaces() - before, "a store listens on all interfaces"
    assert not dist.is_initialized()


@pytest.mark.parametrize(("code", "destroyed"), [(75, True), (1, False)])
def test_sys_exit_destroys_the_group_only_with_code_75(code: int, destroyed: bool) -> None:
    """After any other code, some ranks may have exited already."""
    with pytest.raises(SystemExit), process_group(World()):
        sys.exit(code)
    assert dist.is_initialized() != destroyed
    if not destroyed:
        dist.destroy_process_group()


EXIT_WHILE_GLOO_HOLDS_TENSORS = """
import sys
import torch
import torch.distributed as dist
from distributed.torch import leave, process_group
from distributed.world import World

def main():
    global group
    with process_group(World()):
        group = dist.group.WORLD  # as DDP and DTensor hold it
        sys.setswitchinterval(1000)  # delays gloo's thread, so it still holds the tensors at exit
        for _ in range(3):
            dist.all_reduce(torch.ones(3), async_op=True)
    return 3

print("written")
leave(main())
"""


def test_gloo_does_not_abort_a_process_that_exits_with_leave() -> None:
    command = [sys.executable, "-c", EXIT_WHILE_GLOO_HOLDS_TENSORS]
    result = subprocess.run(command, cwd=KIT, timeout=60, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (3, "written\n", "")


def test_two_ranks_on_one_gpu_are_refused() -> None:
    """The identifiers are made up, as this machine may have no GPU."""
    check_no_shared_devices({0: ("a", "GPU-1"), 1: ("a", "GPU-2"), 2: ("b", "GPU-1")})
    with pytest.raises(WorldError) as error:
        check_no_shared_devices({0: ("a", "GPU-1"), 1: ("b", "GPU-2"), 2: ("b", "GPU-3"), 3: ("b", "GPU-2")})
    assert str(error.value) == (
        "rank 1 and rank 3 share one GPU on b (GPU-2): start no more processes on b than it has GPUs, and give each "
        "task its own GPU (CUDA_VISIBLE_DEVICES)"
    )


def test_the_gpu_index_is_the_local_rank_modulo_the_number_of_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch is made to report two GPUs."""
    world = World(rank=7, size=8, local_rank=3, local_size=4, node_rank=1, nodes=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert muster_torch.device(world) == torch.device("cuda", 1)
    assert muster_torch.device(world, "gloo") == torch.device("cpu")
    assert muster_torch.device(world, name="cpu") == torch.device("cpu")
    assert muster_torch.device(world, name="cuda") == torch.device("cuda", 1)
    assert muster_torch.device(world, name="cuda:0") == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert muster_torch.device(world) == torch.device("cpu")


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("Torch not compiled with CUDA enabled"),
        RuntimeError("cudaGetDeviceCount(). Error 802: system not yet initialized"),
    ],
)
def test_gpus_that_pytorch_cannot_use_are_an_error_unless_the_cpu_is_meant(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """nvidia-smi is a stub that lists two GPUs. The initialization of CUDA is made to fail."""
    row = "GPU-aa, 580.65.06, 81920, 4, Disabled, Default, Disabled, STUB"
    rows = f"0, {row}\\n1, {row}\\n"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncase $* in *query-gpu*) printf '{rows}' ;; esac\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS"):
        monkeypatch.delenv(name, raising=False)

    def fail() -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "init", fail)
    two, three = (World(rank=1, size=count, local_rank=1, local_size=count) for count in (2, 3))
    with pytest.raises(WorldError) as refusal:
        muster_torch.device(two)
    assert str(error) in str(refusal.value)
    for world, backend, name in ((three, "auto", "auto"), (two, "gloo", "auto"), (two, "auto", "cpu")):
        assert muster_torch.device(world, backend, name) == torch.device("cpu")
    with monkeypatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "")
        assert muster_torch.device(two) == torch.device("cpu")
    monkeypatch.setenv("SLURM_STEP_GPUS", "0,1")
    with pytest.raises(WorldError):
        muster_torch.device(three)


@pytest.mark.parametrize(
    ("name", "gpus", "message"),
    [
        ("cuda:2", 2, "device cuda:2: not available: PyTorch sees 2 GPUs here; use cuda:0 to cuda:1, or cpu"),
        ("cuda:0", 0, "device cuda:0: not available: PyTorch sees 0 GPUs here; use cpu"),
        ("cuda", 0, "device cuda: not available: PyTorch sees 0 GPUs here; use cpu"),
    ],
)
def test_a_device_that_is_not_available_is_refused(
    name: str, gpus: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(WorldError, match=re.escape(message)):
        muster_torch.device(World(), name=name)


# ---------------------------------------------------------------- strategies and seeds

ONE, TWO = World(), World(size=2)


@pytest.mark.parametrize(
    ("strategy", "world", "expected"),
    [
        ("auto", ONE, "single"), ("auto", TWO, "ddp"), ("single", ONE, "single"), ("dp", ONE, "dp"),
        ("ddp", ONE, "ddp"), ("ddp", TWO, "ddp"), ("fsdp", ONE, "fsdp"), ("fsdp", TWO, "fsdp"),
    ],
)  # fmt: skip
def test_strategies_that_match_the_number_of_processes_are_accepted(strategy: str, world: World, expected: str) -> None:
    assert muster_torch.resolve(strategy, world) == expected


@pytest.mark.parametrize(
    "function", [muster_torch.resolve, lambda strategy, world: muster_torch.wrap(nn.Linear(1, 1), strategy, world)]
)
@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("single", "strategy 'single' is for one process, but there are 2: start one process, or set distributed"),
        ("dp", "strategy 'dp' is for one process, but there are 2"),
        ("deepspeed", f"strategy 'deepspeed' is not one of {', '.join(STRATEGIES)}"),
    ],
)
def test_a_strategy_that_is_unknown_or_for_another_number_of_processes_is_refused(
    function: Callable[[str, World], object], strategy: str, message: str
) -> None:
    with pytest.raises(WorldError) as error:
        function(strategy, TWO)
    assert str(error.value).startswith(message)


def test_one_process_needs_no_wrapper_except_for_dp() -> None:
    model = nn.Linear(2, 1)
    assert muster_torch.wrap(model, "auto", ONE) is model
    parallel = muster_torch.wrap(model, "dp", ONE)
    assert isinstance(parallel, nn.DataParallel)
    assert muster_torch.unwrap(parallel) is muster_torch.unwrap(model) is model


def random_numbers(base: int, rank: int) -> tuple[float, float, float]:
    muster_torch.seed(base, rank)
    return random.random(), float(np.random.random()), torch.rand(1).item()


def test_seeds_differ_between_ranks_and_repeat_between_runs() -> None:
    assert random_numbers(7, 0) == random_numbers(7, 0)
    for first, second in zip(random_numbers(7, 0), random_numbers(7, 1), strict=True):
        assert first != second


# ---------------------------------------------------------------- several ranks


@pytest.fixture
def deterministic_afterwards_off() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


@pytest.mark.usefixtures("deterministic_afterwards_off")
def test_deterministic_algorithms_and_their_variables_are_set() -> None:
    env: dict[str, str] = {"NCCL_ALGO": "Tree,Ring"}
    muster_torch.make_deterministic(env)
    assert env == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "Tree,Ring"}
    assert torch.are_deterministic_algorithms_enabled() and torch._inductor.config.deterministic
    with pytest.raises(RuntimeError, match=r"put_.* does not have a deterministic implementation"):
        torch.zeros(3).put_(torch.tensor([1, 1]), torch.ones(2))
    muster_torch.make_deterministic(env := {})
    assert env["NCCL_ALGO"] == "^NVLS", "as PyTorch does"


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("CUBLAS_WORKSPACE_CONFIG=:0:0", "CUBLAS_WORKSPACE_CONFIG=:4096:8"),
        ("NCCL_NVLS_ENABLE=1", "NCCL_NVLS_ENABLE=0"),
        ("NCCL_ALGO=Ring,NVLS", "NCCL_ALGO=^NVLS"),
        ("NCCL_ALGO=allreduce:nvlstree", "NCCL_ALGO=^NVLS"),
    ],
)
def test_a_variable_that_prevents_equal_bits_is_refused(setting: str, remedy: str) -> None:
    name, value = setting.split("=")
    with pytest.raises(
        WorldError, match=re.escape(f"{setting}: results may differ between runs; unset it, or set {remedy}")
    ):
        muster_torch.make_deterministic({name: value})
    assert not torch.are_deterministic_algorithms_enabled()


class Net(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.sum()


def full(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def gradients(model: nn.Module) -> list[list[float] | None]:
    return [None if p.grad is None else full(p.grad).flatten().tolist() for p in model.parameters()]


def record_gradients(rank: int, directory: Path) -> None:
    """Write the rank and its gradients to a file."""
    with process_group(timeout=60) as world:
        record: dict[str, Any] = {"rank": [world.rank, world.size, world.local_rank, world.launcher]}
        torch.manual_seed(1)
        plain = Net()
        batches = torch.randn(world.size, 2, 2, 3)[rank]  # of this rank: 2 micro-batches of 2 windows of 3 values

        # The gradients of this rank, summed over its micro-batches, and then their mean over the ranks.
        (plain(batches[0]) + plain(batches[1])).backward()
        record["own"] = gradients(plain)
        for p in plain.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= world.size
        record["mean"] = gradients(plain)
        plain.zero_grad()

        for strategy in ("ddp", "fsdp"):
            record[strategy] = wrapped_gradients(plain, strategy, world, batches)
        record["auto"] = type(muster_torch.wrap(plain, "auto", world)).__name__
        plain(batches[0]).backward()
        record["first micro-batch"] = gradients(plain)
    record["destroyed"] = not dist.is_initialized()
    (directory / f"rank_{rank}.json").write_text(json.dumps(record))


def wrapped_gradients(plain: Net, strategy: str, world: World, batches: Tensor) -> dict[str, Any]:
    """Gradients after the first micro-batch, without synchronization, and after both, with synchronization."""
    inner = copy.deepcopy(plain)
    model = muster_torch.wrap(inner, strategy, world)
    with muster_torch.gradient_sync(model, on=False):
        model(batches[0]).backward()
    unsynchronized = gradients(model)
    with muster_torch.gradient_sync(model, on=True):
        model(batches[1]).backward()
    return {
        "unsynchronized": unsynchronized,
        "synchronized": gradients(model),
        "unwrapped": muster_torch.unwrap(model) is inner,
        "sharded": [p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor)],
        "blocks": [isinstance(block, FSDPModule) for block in inner.blocks],
    }


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What record_gradients() has written on two ranks."""
    directory = tmp_path_factory.mktemp("two_ranks")
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    with forked.launched(2, record_gradients, directory, env=torchrun) as launch:
        results = launch.results()
    assert [result.code for result in results.values()] == [0, 0], results
    return [json.loads((directory / f"rank_{rank}.json").read_text()) for rank in range(2)]


def test_each_rank_reads_torchruns_variables_and_destroys_the_group(records: list[dict[str, Any]]) -> None:
    assert [record["rank"] for record in records] == [[rank, 2, rank, "torchrun"] for rank in range(2)]
    assert all(record["destroyed"] and record["auto"] == "DistributedDataParallel" for record in records)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_are_the_mean_over_the_ranks(records: list[dict[str, Any]], strategy: str) -> None:
    assert records[0]["own"] != records[1]["own"]
    for record in records:
        for gradient, mean in zip(record[strategy]["synchronized"], record["mean"], strict=True):
            assert gradient == pytest.approx(mean, rel=1e-5)
    assert records[0][strategy]["synchronized"] == records[1][strategy]["synchronized"]
    assert all(record[strategy]["unwrapped"] for record in records)


def test_without_synchronization_each_rank_has_its_own_gradients(records: list[dict[str, Any]]) -> None:
    for record in records:
        for gradient, own in zip(record["ddp"]["unsynchronized"], record["first micro-batch"], strict=True):
            assert gradient == pytest.approx(own, rel=1e-5)
        assert record["fsdp"]["unsynchronized"] == [None, None], "FSDP sets gradients only after the last micro-batch"
    assert records[0]["ddp"]["unsynchronized"] != records[1]["ddp"]["unsynchronized"]


def test_fsdp_shards_each_block_separately(records: list[dict[str, Any]]) -> None:
    assert [record["fsdp"]["blocks"] for record in records] == [[True, True]] * 2
    assert [record["fsdp"]["sharded"] for record in records] == [[6, 6], [3, 3]]  # 3 x 3 weights; rank 0 has two rows
    assert [record["ddp"]["sharded"] for record in records] == [[], []]


def step_with_an_overflow(rank: int, size: int) -> tuple[float, bool]:
    """Return the loss scale and whether the weights are unchanged after an overflow in rank 1's shard alone."""
    world = World(rank=rank, size=size, local_rank=rank, local_size=size)
    model = muster_torch.wrap(nn.Linear(4, 4), "fsdp", world, dtype=torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = [full(parameter.detach()).tolist() for parameter in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(2, 4)).mean()).backward()
    if rank == 1:
        next(model.parameters()).grad.to_local()[0, 0] = float("inf")  # type: ignore[union-attr]
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), [full(parameter.detach()).tolist() for parameter in model.parameters()] == before


def test_every_rank_of_fsdp_skips_a_step_in_which_one_shard_overflows() -> None:
    assert forked.ranks(2, step_with_an_overflow) == [(512.0, True)] * 2


class IrregularModel(nn.Module):
    """A sparse embedding, a frozen layer, and layers used in another order than registered."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 1)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.first = nn.Linear(32, 64)
        self.embedding = nn.Embedding(10, 32, sparse=True)
        self.norm = nn.BatchNorm1d(64, momentum=0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.dropout(self.norm(self.first(self.embedding(tokens))), 0.5, self.training)
        return self.last(torch.tanh(self.frozen(hidden))).sum()


def sum_gradients_twice(rank: int, size: int) -> tuple[bool, list[str]]:
    """Compute the same step twice.

    Returns whether wrap() left the model and the random state unchanged, and the names of gradients that differ.
    """
    torch.manual_seed(1)
    plain = IrregularModel()
    before, random_state = copy.deepcopy(plain.state_dict()), torch.get_rng_state()
    model = muster_torch.wrap(plain, "ddp", World(rank=rank, size=size))
    unchanged = torch.equal(random_state, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())
    unchanged &= all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())

    summed: list[dict[str, Tensor]] = []
    for _ in range(2):
        torch.manual_seed(rank)
        model(torch.randint(10, (5,))).backward()
        summed.append({name: p.grad.to_dense().clone() for name, p in plain.named_parameters() if p.grad is not None})
        model.zero_grad()
    assert len(summed[0]) == 7
    return unchanged, [name for name, gradient in summed[0].items() if not torch.equal(gradient, summed[1][name])]


def test_the_first_step_sums_gradients_in_the_same_order_as_later_ones() -> None:
    assert forked.ranks(3, sum_gradients_twice) == [(True, [])] * 3


def all_reduce_without_rank_1(rank: int, directory: Path, ranks: int) -> None:
    """Join with a timeout of 2 s; rank 1 calls no collective."""
    (directory / f"{rank}").touch()
    while len(list(directory.iterdir())) < ranks:  # excludes the start of the processes from the timeout
        time.sleep(0.01)
    with process_group(backend="gloo", timeout=2):
        if rank == 1:
            signal.pause()
        dist.all_reduce(torch.ones(1))


def test_a_collective_ends_at_the_timeout(tmp_path: Path) -> None:
    with forked.launched(2, all_reduce_without_rank_1, tmp_path, 2) as launch:
        result = launch.results(1)[0]
    assert result.code == 1 and "all_reduce" in result.err
    assert "Timed out waiting 2000ms for recv operation to complete" in result.err


def test_joining_ends_at_the_timeout(tmp_path: Path) -> None:
    with forked.launched(2, all_reduce_without_rank_1, tmp_path, 1, only=[0]) as launch:
        result = launch.results()[0]
    assert result.code == 1
    assert "WorldError: rank 1 of 2 did not join within 2 s; read the output of the missing ranks" in result.err


LISTENING = """
import json, os, socket
from pathlib import Path
import torch.distributed as dist
from distributed.torch import process_group
with process_group(backend="gloo") as world:
    if world.rank == 0:
        inodes = {os.readlink(file)[8:-1] for file in Path("/proc/self/fd").iterdir() if file.is_socket()}
        lines = [line.split() for file in ("tcp", "tcp6") for line in open(f"/proc/self/net/{file}").readlines()[1:]]
        print({fields[1].partition(":")[0] for fields in lines if fields[3] == "0A" and fields[9] in inodes})
    dist.barrier()
"""


def test_the_store_of_ranks_on_one_node_listens_on_loopback_only(tmp_path: Path) -> None:
    """Without an agent, rank 0 has the store. No name server knows the master address."""
    (tmp_path / "listening.py").write_text(LISTENING)
    env = {"MASTER_ADDR": "node1.invalid"}
    with forked.launched(2, forked.script, str(tmp_path / "listening.py"), env=env) as launch:
        results = launch.results()
    assert results[0].code == results[1].code == 0, results
    assert results[0].out == "{'0100007F'}\n"


FAILING = """
import torch, torch.distributed as dist
from distributed.torch import process_group
with process_group(backend="gloo") as world:
    dist.barrier()
    if world.rank == 1:
        raise ValueError("the data of rank 1 is broken")
    dist.all_reduce(torch.ones(1))
"""


def test_an_error_inside_the_group_keeps_its_traceback_and_ends_the_collective_of_other_ranks(tmp_path: Path) -> None:
    """No agent stops the other rank, and the timeout of its collective is ten minutes."""
    (tmp_path / "failing.py").write_text(FAILING)
    with forked.launched(2, forked.script, str(tmp_path / "failing.py")) as launch:
        results = launch.results()
    assert [results[rank].code for rank in range(2)] == [1, 1], results
    error = results[1].err.strip()
    assert re.search(r"line 7, in <module>\n.*\n(\[rank1\]: )?ValueError: the data of rank 1 is broken$", error)
    assert "ValueError" not in results[0].err
    assert "all_reduce" in results[0].err
