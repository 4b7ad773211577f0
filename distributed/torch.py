"""Which process of the run am I, and how do I join the others?

torchrun and srun each tell a process its place through environment variables. `World.from_env` reads the whole
environment of *one* launcher, never variable by variable: half an environment is an error, not a guess.

    with process_group() as world:
        model = wrap(model.to(device(world)), "auto", world)

Try it: torchrun --nproc-per-node 2 -m distributed.torch
"""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from distributed.nodelist import NodeListError, expand, tasks_per_node

T = TypeVar("T")
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MASTER = ("MASTER_ADDR", "MASTER_PORT")
STEP = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"),
)
STRATEGIES = ("auto", "single", "dp", "ddp", "fsdp")
# SLURM numbers the batch script, the interactive step and the like downwards from here: they are no job steps.
FIRST_SPECIAL_STEP = 4_294_967_000


class WorldError(RuntimeError):
    """The environment does not say which process this is, or says it twice."""


@dataclass(frozen=True)
class World:
    """The place of this process among all processes of the run."""

    rank: int = 0  # 0 .. size-1
    size: int = 1
    local_rank: int = 0  # 0 .. local_size-1 on this node
    local_size: int = 1
    node_rank: int = 0  # 0 .. nodes-1
    nodes: int = 1
    master_addr: str | None = None  # None: a single process needs no meeting point
    master_port: int | None = None
    launcher: str = "single"  # who said so: torchrun, environment, slurm, single
    notes: tuple[str, ...] = ()  # what a person should know about how this was decided

    def __post_init__(self) -> None:
        for name, value, limit in (
            ("rank", self.rank, self.size),
            ("local rank", self.local_rank, self.local_size),
            ("node rank", self.node_rank, self.nodes),
        ):
            if not 0 <= value < limit:
                raise WorldError(
                    f"{name} {value} is not one of 0 to {limit - 1} (as {self.launcher} says): "
                    "the environment mixes two launches; start from a clean shell"
                )

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> World:
        """Read the place of this process from the environment of the launcher that started it.

        The first that applies: torchrun (also under srun), a complete RANK/WORLD_SIZE/LOCAL_RANK/MASTER_ADDR/
        MASTER_PORT, SLURM inside a real job step, a single process.

        Raises:
            WorldError: half an environment, a value that is no number, or two launchers that contradict.
        """
        given = {name: env[name] for name in PLACE if env.get(name)}
        missing = [name for name in PLACE if name not in given]
        if not missing:
            return _from_torchrun(env) if env.get("TORCHELASTIC_RUN_ID") else _from_complete(env)
        if in_job_step(env) and not given.keys() - set(MASTER):
            return _from_slurm(env)
        if given:
            raise WorldError(
                f"{_names(given)} set, but not {', '.join(missing)}: start this process with torchrun or srun, "
                f"or unset {' '.join(given)} to run it alone"
            )
        return cls(notes=_alone_in_an_allocation(env))


def _from_torchrun(env: Mapping[str, str]) -> World:
    return World(
        rank=_int(env, "RANK"),
        size=_int(env, "WORLD_SIZE"),
        local_rank=_int(env, "LOCAL_RANK"),
        local_size=_int(env, "LOCAL_WORLD_SIZE"),
        node_rank=_int(env, "GROUP_RANK"),
        nodes=_int(env, "GROUP_WORLD_SIZE"),
        master_addr=env["MASTER_ADDR"],
        master_port=_port(env),
        launcher="torchrun",
    )


def _from_complete(env: Mapping[str, str]) -> World:
    rank, size = _int(env, "RANK"), _int(env, "WORLD_SIZE", least=1)
    _refuse_stale_ranks(env, rank, size)
    notes: tuple[str, ...] = ()
    if env.get("LOCAL_WORLD_SIZE"):
        local_size = _int(env, "LOCAL_WORLD_SIZE", least=1)
    else:
        local_size = size
        notes = ("LOCAL_WORLD_SIZE is not set: taking all ranks to be on this node",)
    nodes = _int(env, "NNODES", least=1) if env.get("NNODES") else -(-size // local_size)
    node_rank = _int(env, "NODE_RANK") if env.get("NODE_RANK") else min(rank // local_size, nodes - 1)
    return World(
        rank=rank,
        size=size,
        local_rank=_int(env, "LOCAL_RANK"),
        local_size=local_size,
        node_rank=node_rank,
        nodes=nodes,
        master_addr=env["MASTER_ADDR"],
        master_port=_port(env),
        launcher="environment",
        notes=notes,
    )


def as_env(world: World) -> dict[str, str]:
    """The place in the words that scripts written for torchrun read."""
    words = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "NODE_RANK": world.node_rank,
        "NNODES": world.nodes,
        "MASTER_ADDR": world.master_addr or "127.0.0.1",
        "MASTER_PORT": world.master_port or 0,
    }
    return {name: str(value) for name, value in words.items()}


def _refuse_stale_ranks(env: Mapping[str, str], rank: int, size: int) -> None:
    """sbatch and srun hand on whatever the submitting shell exported: then every task believes to be one rank."""
    if not in_job_step(env):
        return
    task, tasks = _int(env, "SLURM_PROCID"), _step_size(env)
    if (rank, size) != (task, tasks):
        raise WorldError(
            f"RANK={rank} and WORLD_SIZE={size} are set, but SLURM says task {task} of {tasks}: "
            f"they are left over from another launch; unset {' '.join(PLACE)} before srun"
        )


def _from_slurm(env: Mapping[str, str]) -> World:
    """Only the step's variables are true: inside `srun -N1 -w n9` the others still describe the job."""
    node_rank = _int(env, "SLURM_NODEID")
    counts = _unfold(tasks_per_node, env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if node_rank >= len(counts):
        raise WorldError(
            f"SLURM_NODEID={node_rank}, but SLURM_STEP_TASKS_PER_NODE={env.get('SLURM_STEP_TASKS_PER_NODE')!r} "
            f"speaks of {len(counts)} node(s): the environment mixes two job steps; start from a clean shell"
        )
    size = _step_size(env)
    return World(
        rank=_int(env, "SLURM_PROCID"),
        size=size,
        local_rank=_int(env, "SLURM_LOCALID"),
        local_size=len(env["SLURM_GTIDS"].split(",")) if env.get("SLURM_GTIDS") else counts[node_rank],
        node_rank=node_rank,
        nodes=len(counts),
        master_addr=env.get("MASTER_ADDR") or _first_task_host(env),
        master_port=_port(env) if env.get("MASTER_PORT") else slurm_port(env),
        launcher="slurm",
    )


def in_job_step(env: Mapping[str, str] = os.environ) -> bool:
    """Whether srun started this process: the batch script and an salloc shell have a job, but no step."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < FIRST_SPECIAL_STEP and bool(env.get("SLURM_PROCID"))


def slurm_port(env: Mapping[str, str]) -> int:
    """A port below the ephemeral range (32768) that two jobs, and two steps of one job, seldom share."""
    return 20_000 + (_int(env, "SLURM_JOB_ID") + 997 * _int(env, "SLURM_STEP_ID")) % 10_000


def _step_size(env: Mapping[str, str]) -> int:
    return _int(env, "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS")


def _first_task_host(env: Mapping[str, str]) -> str:
    """The first host of the step, in the order of the job's components if it has several."""
    hosts = _unfold(expand, env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    if env.get("SLURM_DISTRIBUTION") == "arbitrary" and len(hosts) > 1:
        raise WorldError(
            "the host of task 0 is not known (distribution arbitrary, and SLURM_ARBITRARY_NODELIST is sorted): "
            "export MASTER_ADDR=<host of task 0> before srun"
        )
    return next((host for host in _hosts_of_components(env) if host in hosts), hosts[0])


def _hosts_of_components(env: Mapping[str, str]) -> list[str]:
    """Of a heterogeneous job, whose tasks are numbered component by component; SLURM sorts the step's list."""
    components = _int(env, "SLURM_HET_SIZE") if env.get("SLURM_HET_SIZE") else 0
    lists = [f"SLURM_JOB_NODELIST_HET_GROUP_{number}" for number in range(components)]
    return [host for name in lists if env.get(name) for host in _unfold(expand, env, name)]


def _unfold(unfold: Callable[[str], list[T]], env: Mapping[str, str], *names: str) -> list[T]:
    """The list that the first of these variables stands for."""
    name = next((name for name in names if env.get(name)), names[0])
    try:
        return unfold(_said(env, name))
    except NodeListError as error:
        raise WorldError(f"{name}: {error}") from None


def _alone_in_an_allocation(env: Mapping[str, str]) -> tuple[str, ...]:
    if not env.get("SLURM_JOB_ID"):
        return ()
    return (
        f"inside SLURM job {env['SLURM_JOB_ID']}, but not started by srun: running as one process; "
        "use `srun python ...` for all tasks",
    )


def _int(env: Mapping[str, str], name: str, least: int = 0) -> int:
    value = _said(env, name)
    if not value.isdecimal() or int(value) < least:
        wanted = f"a number from {least} up" if least else "a number"
        raise WorldError(f"{name}={value!r} is not {wanted}: unset it, or start this process with torchrun or srun")
    return int(value)


def _port(env: Mapping[str, str]) -> int:
    port = _int(env, "MASTER_PORT")
    if port > 65_535:
        raise WorldError(f"MASTER_PORT={port} is no port: the highest is 65535")
    return port


def _said(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise WorldError(f"{name} is not set, though other variables of its launcher are: start from a clean shell")
    return env[name]


def _names(given: Mapping[str, str]) -> str:
    words = [f"{name}={value}" for name, value in given.items()]
    return f"{', '.join(words)} {'is' if len(words) == 1 else 'are'}"


# ---------------------------------------------------------------- join and leave


def device(world: World, backend: str = "auto") -> torch.device:
    """The device of this rank: a rank is known by its local rank, its device is that modulo what it can see."""
    if backend == "gloo" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", world.local_rank % torch.cuda.device_count())


@contextmanager
def process_group(world: World | None = None, backend: str = "auto", timeout: float = 600.0) -> Iterator[World]:
    """Join the default process group, and leave it when all went well.

    After a failure the group is left as it is: saying goodbye would wait for ranks that are gone and hide the
    traceback. The process is about to end anyway.

    Args:
        backend: nccl, gloo, or auto for nccl where there is a GPU.
        timeout: seconds that joining, and each collective, may take.

    Raises:
        WorldError: the environment is unclear, or two ranks share a GPU.
    """
    world = World.from_env() if world is None else world
    backend = ("nccl" if torch.cuda.is_available() else "gloo") if backend == "auto" else backend
    if backend == "nccl" and not torch.cuda.is_available():
        raise WorldError("backend nccl needs a GPU, and PyTorch sees none: use gloo, or distributed.backend=auto")
    here = device(world, backend)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    limit = timedelta(seconds=timeout)
    store = _meet(world, limit)
    _call_the_roll(world, store, limit)
    if here.type == "cuda":
        refuse_shared_devices(_device_owners(world, here, store))
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("muster", store),
        rank=world.rank,
        world_size=world.size,
        timeout=limit,
        device_id=here if backend == "nccl" else None,
    )
    yield world
    dist.destroy_process_group()


def _meet(world: World, limit: timedelta) -> dist.Store:
    """The store at which all ranks meet. Only torchrun may already be running one."""
    if world.launcher == "torchrun":
        store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=limit))
        return store
    if world.master_addr is None or world.master_port is None:
        return dist.HashStore()
    return dist.TCPStore(
        world.master_addr, world.master_port, world.size, world.rank == 0, limit, wait_for_workers=False
    )


def _call_the_roll(world: World, store: dist.Store, limit: timedelta) -> None:
    """Wait until every rank is here, and say who is not: a group that fails to form names nobody."""
    store.set(f"here/{world.rank}", "")
    keys = [f"here/{rank}" for rank in range(world.size)]
    try:
        store.wait(keys, limit)
    except dist.DistStoreError:
        missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
        raise WorldError(
            f"rank(s) {missing} of {world.size} did not come within {limit.total_seconds():g} s: see in their own "
            f"output why, and whether they reach {world.master_addr}:{world.master_port}"
        ) from None


def _device_owners(world: World, here: torch.device, store: dist.Store) -> dict[int, tuple[str, str]]:
    identity = str(torch.cuda.get_device_properties(here).uuid)
    store.set(f"device/{world.rank}", f"{socket.gethostname()} {identity}")
    told = (store.get(f"device/{rank}").decode().split(" ", 1) for rank in range(world.size))
    return {rank: (host, identity) for rank, (host, identity) in enumerate(told)}


def refuse_shared_devices(owners: Mapping[int, tuple[str, str]]) -> None:
    """Refuse two ranks on one device.

    Args:
        owners: rank -> (host, identity of its device).

    Raises:
        WorldError: names both ranks, the host and the remedy.
    """
    first: dict[tuple[str, str], int] = {}
    for rank, place in owners.items():
        other = first.setdefault(place, rank)
        if other != rank:
            host, identity = place
            raise WorldError(
                f"rank {other} and rank {rank} share one GPU on {host} ({identity}): start no more processes on "
                f"{host} than it has GPUs, and give each task its own (CUDA_VISIBLE_DEVICES)"
            )


# ---------------------------------------------------------------- wrap a model


def resolve(strategy: str, world: World) -> str:
    """The strategy that `auto` stands for, and a refusal of those that do not fit the world."""
    if strategy not in STRATEGIES:
        raise WorldError(f"strategy {strategy!r} is not one of {', '.join(STRATEGIES)}")
    if strategy == "auto":
        return "ddp" if world.size > 1 else "single"
    if strategy in ("single", "dp") and world.size > 1:
        raise WorldError(
            f"strategy {strategy!r} is for one process, but there are {world.size}: "
            "start one process, or set distributed.strategy=ddp"
        )
    return strategy


def wrap(
    model: nn.Module,
    strategy: str,
    world: World,
    *,
    find_unused_parameters: bool = False,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Make the model train on all ranks. It must already be on its device, and inside a process group.

    Args:
        strategy: auto (ddp, or single for one process), single, dp (one process, all its GPUs), ddp, fsdp (FSDP2).
        find_unused_parameters: for ddp, when some parameters get no gradient in some steps.
        dtype: for fsdp, the type in which parameters are gathered and used; gradients are reduced in float32.

    Raises:
        WorldError: the strategy is unknown, or does not fit the world.
    """
    strategy = resolve(strategy, world)
    if strategy == "dp":
        return DataParallel(model)
    if strategy == "ddp":
        return DistributedDataParallel(
            model, find_unused_parameters=find_unused_parameters, gradient_as_bucket_view=True
        )
    if strategy == "fsdp":
        return _shard(model, world, dtype)
    return model


def _shard(model: nn.Module, world: World, dtype: torch.dtype | None) -> nn.Module:
    """Shard each repeated block by itself, so that one block at a time is gathered, then what is left."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def gradient_sync(model: nn.Module, on: bool) -> AbstractContextManager[None]:
    """Exchange gradients in the backward passes inside, or (off) only add them up on this rank."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)
    elif isinstance(model, DistributedDataParallel) and not on:
        return model.no_sync()
    return nullcontext()


def unwrap(model: nn.Module) -> nn.Module:
    """The model as it was before `wrap`."""
    return model.module if isinstance(model, (DataParallel, DistributedDataParallel)) else model


# ---------------------------------------------------------------- seeds


def seed(base: int, rank: int = 0) -> None:
    """Seed Python, NumPy (where it is loaded) and torch with base + rank: ranks differ, runs repeat."""
    random.seed(base + rank)
    torch.manual_seed(base + rank)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed((base + rank) % 2**32)


# ---------------------------------------------------------------- explain


def explain(world: World, env: Mapping[str, str] = os.environ) -> str:
    """Which rank this is and how that was decided, in a few lines."""
    sources = {
        "torchrun": (*PLACE, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
        "environment": (*PLACE, "LOCAL_WORLD_SIZE", "NODE_RANK", "NNODES"),
        "slurm": (*STEP, *MASTER),
        "single": (),
    }[world.launcher]
    meeting = f"{world.master_addr}:{world.master_port}" if world.master_addr else "none needed"
    lines = [
        f"rank {world.rank} of {world.size} on {socket.gethostname()}: "
        f"local rank {world.local_rank} of {world.local_size}, node {world.node_rank} of {world.nodes}",
        f"  decided by  {world.launcher}",
        f"  from        {' '.join(f'{name}={env[name]}' for name in sources if env.get(name)) or 'nothing set'}",
        f"  meeting at  {meeting}",
        f"  device      {device(world)}",
        *(f"  note        {note}" for note in world.notes),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the place of this process."""
    try:
        sys.stdout.write(explain(World.from_env()))
    except WorldError as error:
        sys.stderr.write(f"distributed.torch: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
