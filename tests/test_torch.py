"""A process that does not know its place trains the wrong thing, or waits for ever.

Held here: the place is read from the whole environment of one launcher, and half an environment, a stale one or one
of two launches is an error that names what is missing, never a guess; a process alone needs no address and opens no
store; wrapped models exchange exactly what they should; an error inside the process group keeps its traceback.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import forked
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from distributed import torch as ours
from distributed.torch import STRATEGIES, process_group, refuse_shared_devices
from distributed.world import PLACE, World, WorldError, as_env, slurm_port

KIT = Path(__file__).resolve().parents[1]
RECORDS = json.loads((KIT / "tests/slurm_environments.json").read_text())
SECONDS = 120  # after which a process counts as hanging

COMPLETE = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
TORCHRUN = {
    **COMPLETE, "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[08-10]", "SLURM_NODELIST": "n[08-10]", "SLURM_NTASKS": "7"}
STEP = {  # task 5 of 7, the third node's first but one, as 2(x3),1 lays them out in blocks
    **JOB, "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "n[08-10],x1",
}  # fmt: skip


def without(env: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def place(env: Mapping[str, str]) -> tuple[object, ...]:
    """(rank, size, local rank, local size, node rank, nodes, meeting point, launcher)."""
    world = World.from_env(env)
    meeting = f"{world.master_addr}:{world.master_port}" if world.master_addr else None
    return (
        *(world.rank, world.size, world.local_rank, world.local_size, world.node_rank, world.nodes),
        *(meeting, world.launcher),
    )


# ---------------------------------------------------------------- which process am I?


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({}, (0, 1, 0, 1, 0, 1, None, "single"), id="alone"),
        pytest.param(TORCHRUN, (3, 4, 1, 2, 1, 2, "n1:29500", "torchrun"), id="torchrun"),
        pytest.param({**STEP, **TORCHRUN}, (3, 4, 1, 2, 1, 2, "n1:29500", "torchrun"), id="torchrun under srun"),
        pytest.param(COMPLETE, (3, 4, 1, 4, 0, 1, "n1:29500", "environment"), id="complete"),
        pytest.param(
            {**COMPLETE, "LOCAL_WORLD_SIZE": "2"}, (3, 4, 1, 2, 1, 2, "n1:29500", "environment"), id="two nodes"
        ),
        pytest.param(
            {**COMPLETE, "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"},
            (3, 4, 1, 2, 0, 2, "n1:29500", "environment"),
            id="two nodes, not in the order of the ranks",
        ),
        pytest.param(
            {**COMPLETE, "LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": "0"},
            (3, 4, 0, 3, 1, 2, "n1:29500", "environment"),
            id="uneven nodes",
        ),
        pytest.param(STEP, (5, 7, 1, 2, 2, 4, "n08:24711", "slurm"), id="a step"),
        pytest.param(
            {**STEP, "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"},
            (6, 7, 0, 1, 3, 4, "n08:24711", "slurm"),
            id="a step, the last and smaller node",
        ),
        pytest.param(
            {**STEP, "SLURM_NODEID": "1", "SLURM_DISTRIBUTION": "cyclic"},
            (5, 7, 1, 2, 1, 4, "n08:24711", "slurm"),
            id="cyclic: the node is not rank // local size",
        ),
        pytest.param(
            {**STEP, "SLURM_DISTRIBUTION": "arbitrary", "MASTER_ADDR": "x1"},
            (5, 7, 1, 2, 2, 4, "x1:24711", "slurm"),
            id="arbitrary: only a person knows where task 0 is",
        ),
        pytest.param(
            {**STEP, "SLURM_GTIDS": "1,3,5"}, (5, 7, 1, 3, 2, 4, "n08:24711", "slurm"), id="the tasks of this very node"
        ),
        pytest.param({**STEP, "MASTER_ADDR": "n10"}, (5, 7, 1, 2, 2, 4, "n10:24711", "slurm"), id="MASTER_ADDR alone"),
        pytest.param({**STEP, "MASTER_PORT": "1234"}, (5, 7, 1, 2, 2, 4, "n08:1234", "slurm"), id="MASTER_PORT alone"),
        pytest.param(
            {**STEP, "RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "2"},
            (5, 7, 1, 7, 0, 1, "n1:2", "environment"),
            id="a step whose script sets what SLURM says as well",
        ),
        pytest.param(dict.fromkeys(PLACE, ""), (0, 1, 0, 1, 0, 1, None, "single"), id="set, but empty"),
    ],
)
def test_the_place_is_that_of_one_launcher(env: Mapping[str, str], expected: tuple[object, ...]) -> None:
    assert place(env) == expected


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="in an salloc shell"),
        pytest.param({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}, id="in the batch script"),
        pytest.param({**STEP, "SLURM_STEP_ID": "4294967290"}, id="in an interactive step"),
        pytest.param({**STEP, "SLURM_STEP_ID": "4294967291"}, id="in the batch step"),
    ],
)
def test_by_hand_in_an_allocation_is_one_process_and_a_note(more: Mapping[str, str]) -> None:
    world = World.from_env({**JOB, **more})
    assert place({**JOB, **more}) == (0, 1, 0, 1, 0, 1, None, "single")
    assert world.notes == (
        "inside SLURM job 4711, but not started by srun: running as one process; use `srun python ...` for all tasks",
    )


@pytest.mark.parametrize("env", [{}, TORCHRUN, STEP, {**COMPLETE, "LOCAL_WORLD_SIZE": "2"}])
def test_a_place_can_be_handed_on_in_torchruns_words(env: Mapping[str, str]) -> None:
    world = World.from_env(env)
    assert place(as_env(world))[:6] == place(env)[:6]
    assert as_env(World.from_env(as_env(world))) == as_env(world)


def test_a_guess_is_noted() -> None:
    assert World.from_env(COMPLETE).notes == ("LOCAL_WORLD_SIZE is not set: taking all ranks to be on this node",)
    assert World.from_env({**COMPLETE, "LOCAL_WORLD_SIZE": "4"}).notes == ()
    assert World.from_env({}).notes == World.from_env(TORCHRUN).notes == World.from_env(STEP).notes == ()


HALVES = [half for size in range(1, len(PLACE)) for half in combinations(PLACE, size)]


@pytest.mark.parametrize("half", HALVES, ids="+".join)
def test_half_an_environment_names_the_missing_half(half: tuple[str, ...]) -> None:
    missing = ", ".join(name for name in PLACE if name not in half)
    message = refusal({name: COMPLETE[name] for name in half})
    assert f"set, but not {missing}: start this process with torchrun or srun, or unset {' '.join(half)}" in message
    assert all(f"{name}={COMPLETE[name]}" in message for name in half)


@pytest.mark.parametrize("half", [half for half in HALVES if not set(half) <= {"MASTER_ADDR", "MASTER_PORT"}])
def test_half_an_environment_is_not_mended_by_slurm(half: tuple[str, ...]) -> None:
    assert "set, but not " in refusal({**STEP, **{name: COMPLETE[name] for name in half}})


def refusal(env: Mapping[str, str]) -> str:
    with pytest.raises(WorldError) as refused:
        World.from_env(env)
    return str(refused.value)


CLEAN_SHELL = "is not set, though other variables of its launcher are: start from a clean shell"
NO_NUMBER = "is not a number: unset it, or start this process with torchrun or srun"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        *((without(TORCHRUN, name), f"{name} {CLEAN_SHELL}") for name in ("LOCAL_WORLD_SIZE", "GROUP_RANK")),
        *((without(STEP, name), f"{name} {CLEAN_SHELL}") for name in ("SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID")),
        (without(STEP, "SLURM_STEP_TASKS_PER_NODE"), f"SLURM_STEP_TASKS_PER_NODE {CLEAN_SHELL}"),
        *(
            ({**TORCHRUN, name: "x"}, f"{name}='x' {NO_NUMBER}")
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        ),
        *(({**COMPLETE, "RANK": value}, f"RANK={value!r} {NO_NUMBER}") for value in ("-1", "1.0", " 1", "²", "0x1")),
        ({**COMPLETE, "NODE_RANK": "x"}, f"NODE_RANK='x' {NO_NUMBER}"),
        *(({**STEP, name: "x"}, f"{name}='x' {NO_NUMBER}") for name in ("SLURM_PROCID", "SLURM_NODEID")),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x"}, "SLURM_STEP_TASKS_PER_NODE: '2(x', character 1: "),
        ({**STEP, "SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST: 'n[1-', character 2: "),
        ({**COMPLETE, "WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not a number from 1 up"),
        ({**COMPLETE, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0' is not a number from 1 up"),
        ({**COMPLETE, "MASTER_PORT": "x"}, f"MASTER_PORT='x' {NO_NUMBER}"),
        ({**TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT=65536 is no port: the highest is 65535"),
        ({**COMPLETE, "RANK": "4"}, "rank 4 is not one of 0 to 3 (as environment says): the environment mixes two"),
        ({**COMPLETE, "LOCAL_RANK": "4"}, "local rank 4 is not one of 0 to 3"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 is not one of 0 to 1 (as torchrun says)"),
        ({**TORCHRUN, "GROUP_RANK": "2"}, "node rank 2 is not one of 0 to 1"),
        ({**STEP, "SLURM_PROCID": "7"}, "rank 7 is not one of 0 to 6 (as slurm says)"),
        ({**STEP, "SLURM_NODEID": "3"}, "local rank 1 is not one of 0 to 0"),
        ({**STEP, "SLURM_NODEID": "4"}, "SLURM_NODEID=4, but SLURM_STEP_TASKS_PER_NODE='2(x3),1' speaks of 4 node(s)"),
        (
            {**STEP, **COMPLETE},
            "RANK=3 and WORLD_SIZE=4 are set, but SLURM says task 5 of 7: they are left over from another launch; "
            "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT before srun",
        ),
        ({**STEP, "RANK": "5"}, "RANK=5 is set, but not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        (
            {**STEP, "SLURM_DISTRIBUTION": "arbitrary", "SLURM_ARBITRARY_NODELIST": "x1,n08"},
            "the host of task 0 is not known (distribution arbitrary, and SLURM_ARBITRARY_NODELIST is sorted): "
            "export MASTER_ADDR=<host of task 0> before srun",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(env: Mapping[str, str], message: str) -> None:
    assert refusal(env).startswith(message)


SOME_VALUE = st.sampled_from(
    ["", "0", "1", "2", "7", "x", "-1", "²", "٣", "2(x3),1", "0", "n1", "n[1-2]", "n[", "65536", "arbitrary"]
)
COMPONENT = "SLURM_JOB_NODELIST_HET_GROUP_0"
NAMES = sorted(
    {*TORCHRUN, *STEP, "NODE_RANK", "SLURM_TASKS_PER_NODE", "SLURM_DISTRIBUTION", "SLURM_HET_SIZE", COMPONENT}
)


@settings(deadline=None, max_examples=500)
@given(st.sampled_from([{}, COMPLETE, TORCHRUN, STEP]), st.dictionaries(st.sampled_from(NAMES), SOME_VALUE, max_size=6))
def test_any_environment_is_a_place_or_a_refusal(base: dict[str, str], more: dict[str, str]) -> None:
    try:
        world = World.from_env({**base, **more})
    except WorldError as refused:
        assert re.search(r": \S|; unset|before srun", str(refused)), "it says what to do"  # noqa: PT017
    else:
        assert 0 <= world.rank < world.size
        assert 0 <= world.local_rank < world.local_size
        assert 0 <= world.node_rank < world.nodes
        assert world.master_addr or world.size == 1


# ---------------------------------------------------------------- SLURM, as it was recorded


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["name"])
def test_what_a_real_slurm_said_is_understood(record: dict[str, Any]) -> None:
    environments = [{**record["common"], **process["environment"]} for process in record["processes"]]
    assert environments
    if record["answer"] == "places":
        for env, process in zip(environments, record["processes"], strict=True):
            world = World.from_env(env)
            assert {name: getattr(world, name) for name in process["place"]} == process["place"]
        assert len({World.from_env(env).master_port for env in environments}) == 1
    elif record["answer"] == "alone":
        (world,) = map(World.from_env, environments)
        assert (world.size, world.launcher, len(world.notes)) == (1, "single", 1)
    else:
        assert all(record["answer"] in refusal(env) for env in environments)


def port(job: int, step: int) -> int:
    return slurm_port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})


@given(st.integers(1, 10**9), st.integers(0, 10**6))
def test_the_port_of_a_step_lies_below_the_ephemeral_ones(job: int, step: int) -> None:
    assert 20_000 <= port(job, step) < 30_000


@given(st.integers(1, 10**9), st.integers(0, 10**6))
def test_jobs_and_steps_that_run_side_by_side_have_ports_of_their_own(job: int, step: int) -> None:
    neighbours = [(job, step), *((job + next_job, step) for next_job in range(1, 10)), (job, step + 1), (job, step + 2)]
    assert len({port(*neighbour) for neighbour in neighbours}) == len(neighbours)


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


def test_it_runs_as_a_program() -> None:
    env = {**without(os.environ, *TORCHRUN, *STEP), "WORLD_SIZE": "2", "PYTHONPATH": str(KIT)}
    answer = subprocess.run(
        [sys.executable, "-m", "distributed.torch"],
        env=env, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "distributed.torch: WORLD_SIZE=2 is set, but not RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT" in answer.stderr


# ---------------------------------------------------------------- one process, one device


def test_a_process_alone_needs_no_address_and_opens_no_store() -> None:
    with process_group(World()) as world:
        total = torch.ones(2)
        dist.all_reduce(total)
        everywhere = [here.laddr for here in psutil.Process().net_connections() if here.laddr.ip in ("0.0.0.0", "::")]
        assert total.tolist() == [1.0, 1.0]
        assert dist.get_world_size() == world.size == 1
        assert not everywhere, "a store listens on all interfaces"
    assert not dist.is_initialized()


def test_two_ranks_on_one_gpu_are_refused() -> None:
    """A stub: the identities stand for those of real GPUs."""
    refuse_shared_devices({0: ("a", "GPU-1"), 1: ("a", "GPU-2"), 2: ("b", "GPU-1")})
    with pytest.raises(WorldError) as refused:
        refuse_shared_devices({0: ("a", "GPU-1"), 1: ("b", "GPU-2"), 2: ("b", "GPU-3"), 3: ("b", "GPU-2")})
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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ours.device(world) == torch.device("cpu")


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
        ends = launch.told()
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
        told = launch.told()
    assert [told[rank].code for rank in range(2)] == [1, 1], told
    error = told[1].err.strip()
    assert re.search(r"line 7, in <module>\n.*\n(\[rank1\]: )?ValueError: the data of rank 1 is broken$", error)
    assert "ValueError" not in told[0].err
    assert "all_reduce" in told[0].err
