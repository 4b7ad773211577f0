"""Join the process group, and wrap a model for distributed training.

    with process_group() as world:
        model = wrap(model.to(device(world)), "auto", world)

Try it: torchrun --nproc-per-node 2 -m distributed.torch
"""

from __future__ import annotations

import logging
import os
import random
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from distributed.agent.gpu_check import unusable_gpus
from distributed.agent.membership import tcp_store
from distributed.agent.worker import shut_down
from distributed.exit_codes import STOPPED
from distributed.world import (
    LAYOUT_VARIABLES,
    MASTER_VARIABLES,
    SLURM_VARIABLES,
    TORCHRUN_VARIABLES,
    World,
    WorldError,
)

log = logging.getLogger(__name__)
STRATEGIES = ("auto", "single", "dp", "ddp", "fsdp")


# ---------------------------------------------------------------- join and leave


def device(world: World, backend: str = "auto", name: str = "auto") -> torch.device:
    """Return the device of this rank.

    Args:
        name: cpu, cuda, cuda:N for GPU N, or auto: a GPU if PyTorch sees one and the backend is not gloo, else cpu.
            If the name has no GPU number, the number is the local rank modulo the number of visible GPUs.

    Raises:
        WorldError: PyTorch does not see the device or, for auto, cannot use the GPUs of this machine.
    """
    if name == "cpu" or (name == "auto" and (backend == "gloo" or not torch.cuda.is_available())):
        if name == "auto" and backend != "gloo" and (problem := unusable_gpus(world.local_size)):
            raise WorldError(f"{problem}; to train on the CPU: distributed.device=cpu, or the backend gloo")
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(name.partition(":")[2] or world.local_rank % max(count, 1))
    if index >= count:
        remedy = f"use cuda:0 to cuda:{count - 1}, or cpu" if count else "use cpu"
        raise WorldError(f"device {name}: not available: PyTorch sees {count} GPU{'s' * (count != 1)} here; {remedy}")
    return torch.device("cuda", index)


@contextmanager
def process_group(
    world: World | None = None, backend: str = "auto", timeout: float = 600.0, name: str = "auto"
) -> Iterator[World]:
    """Join the default process group, and destroy it at the end of the block.

    After an exception the group is not destroyed: the destruction would wait for ranks that have exited, and hide the
    traceback. After sys.exit(75) the group is destroyed, because all ranks stop together on request.

    Args:
        world: default: World.from_env().
        backend: nccl, gloo, or auto: nccl when the device is a GPU, otherwise gloo.
        timeout: seconds for joining, and for each collective.
        name: name of the device, see device().

    Raises:
        WorldError: the environment is incomplete or contradictory, the device is not available, two ranks share a GPU,
            or a rank did not join in time.
    """
    world = World.from_env() if world is None else world
    own_device = device(world, backend, name)
    if backend == "nccl" and not torch.cuda.is_available():
        raise WorldError("backend nccl needs a GPU, and PyTorch sees none: use gloo, or distributed.backend=auto")
    backend = ("nccl" if own_device.type == "cuda" else "gloo") if backend == "auto" else backend
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    limit = timedelta(seconds=timeout)
    log.debug(f"rendezvous: {explain(world, own_device).rstrip()}")
    start = time.perf_counter()
    store = _rendezvous_store(world, limit)
    _wait_for_all_ranks(world, store, limit)
    complete = time.perf_counter()
    if own_device.type == "cuda":
        check_no_shared_devices(_device_owners(world, own_device, store))
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("muster", store),
        rank=world.rank,
        world_size=world.size,
        timeout=limit,
        device_id=own_device if backend == "nccl" else None,
    )
    ranks = f"{world.size} rank{'s' * (world.size > 1)}"
    joined = time.perf_counter() - complete
    log.debug(f"rendezvous: {ranks} joined in {complete - start:.2f} s, {backend} initialized in {joined:.2f} s")
    try:
        yield world
    except SystemExit as leaving:
        if leaving.code == STOPPED:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def leave(code: int | None) -> NoReturn:
    """Exit like sys.exit(code), but without finalizing the interpreter.

    During finalization a gloo thread that still holds a tensor aborts the process, even after success
    (https://github.com/pytorch/pytorch/pull/179291). Ranks of Muster's agent always exit this way.
    """
    os._exit(shut_down(code or 0))


def _rendezvous_store(world: World, limit: timedelta) -> dist.Store:
    """Return the rendezvous store: that of torchrun's agent if there is one, otherwise a new store on rank 0."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=limit))
        return store
    if world.master_addr is None or world.master_port is None:
        return dist.HashStore()
    return tcp_store(world.master_addr, world.master_port, world.nodes, world.rank == 0, limit)


def _wait_for_all_ranks(world: World, store: dist.Store, limit: timedelta) -> None:
    """Wait until every rank has joined. The error names the missing ranks; init_process_group does not name them."""
    store.set(f"joined/{world.rank}", "")
    keys = [f"joined/{rank}" for rank in range(world.size)]
    try:
        store.wait(keys, limit)
    except dist.DistStoreError:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise WorldError(
            f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} of {world.size} did not join within "
            f"{limit.total_seconds():g} s; read the output of the missing ranks, and check that they can reach "
            f"{world.master_addr}:{world.master_port}"
        ) from None


def _device_owners(world: World, gpu: torch.device, store: dist.Store) -> dict[int, tuple[str, str]]:
    identity = str(torch.cuda.get_device_properties(gpu).uuid)
    store.set(f"device/{world.rank}", f"{socket.gethostname()} {identity}")
    owners = (store.get(f"device/{rank}").decode().split(" ", 1) for rank in range(world.size))
    return {rank: (host, identity) for rank, (host, identity) in enumerate(owners)}


def check_no_shared_devices(owners: Mapping[int, tuple[str, str]]) -> None:
    """Raise WorldError when two ranks use one GPU. owners: rank -> (host, UUID of its GPU)."""
    first: dict[tuple[str, str], int] = {}
    for rank, gpu in owners.items():
        other = first.setdefault(gpu, rank)
        if other != rank:
            host, identity = gpu
            raise WorldError(
                f"rank {other} and rank {rank} share one GPU on {host} ({identity}): start no more processes on "
                f"{host} than it has GPUs, and give each task its own GPU (CUDA_VISIBLE_DEVICES)"
            )


# ---------------------------------------------------------------- wrap a model


def resolve(strategy: str, world: World) -> str:
    """Return the strategy; auto becomes ddp or single. Raises WorldError for an unknown or unsuitable strategy."""
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
    """Wrap a model so that it trains on all ranks. The model must be on its device, and the process group must exist.

    After a resume with the same number of ranks, gradients are summed in the same order as without an interruption, so
    the next step is bitwise identical on the CPU, and on GPUs after make_deterministic(). For ddp, this call therefore
    all-reduces zero gradients once; hooks that are already registered on parameters see these gradients. Gradients are
    reduced in the reverse order of registration, so register the layers of a model in the order of their use.

    Args:
        strategy: auto (ddp, or single for one process), single, dp (one process, all its GPUs), ddp, fsdp (FSDP2).
        find_unused_parameters: for ddp, when some parameters get no gradient in some steps.
        dtype: for fsdp, the dtype in which parameters are gathered and used; gradients are reduced in float32.

    Raises:
        WorldError: the strategy is unknown, or does not fit the number of processes.
    """
    strategy = resolve(strategy, world)
    if strategy == "dp":
        model = DataParallel(model)
    elif strategy == "ddp":
        model = DistributedDataParallel(
            model, find_unused_parameters=find_unused_parameters, gradient_as_bucket_view=True
        )
        _fix_bucket_layout(model)
    elif strategy == "fsdp":
        model = _shard(model, world, dtype)
    log.debug(f"strategy: {strategy}, {_layout(model)}")
    return model


def _layout(model: nn.Module) -> str:
    """Describe a wrapped model and its parameters for the log."""
    parameters = list(model.parameters())
    text = f"{type(model).__name__} of {sum(p.numel() for p in parameters):,} parameters in {len(parameters)} tensors"
    if isinstance(model, DistributedDataParallel):
        return f"{text}, gradients in buckets of at most {model.bucket_bytes_cap:,} bytes"
    if isinstance(model, FSDPModule):
        units = sum(isinstance(module, FSDPModule) for module in model.modules())
        shard = sum(p.to_local().numel() for p in parameters if isinstance(p, DTensor))
        return f"{text}, {units} FSDP units; {shard:,} parameters on this rank"
    return text


def _fix_bucket_layout(replicated: DistributedDataParallel) -> None:
    """Make DDP rebuild its gradient buckets now, so that the first step of a process rounds like any later step.

    DDP starts with one bucket, and rebuilds its buckets after the first backward pass, in the order in which gradients
    were ready. An all-reduce over three or more ranks adds the values of an element in an order that depends on the
    element's position in its bucket. Without this function the first step of each process would round differently, and
    a resumed run would not equal an uninterrupted one. This function runs the first backward pass without data: all
    gradients are zero, and become ready in the reverse order of registration. With find_unused_parameters DDP never
    rebuilds its buckets.
    """
    if replicated.find_unused_parameters:
        return
    model = replicated.module
    replicated.module = _SumOfParameters(model)
    try:
        with torch.enable_grad():
            total = replicated()
            total.backward(torch.zeros_like(total))
    finally:
        replicated.module = model
    replicated.zero_grad(set_to_none=True)


class _SumOfParameters(nn.Module):
    """Sums all trainable parameters of a model. In its backward pass the parameter registered last is ready first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model  # DDP reads the model's buffers
        self.trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.sparse = {
            id(module.weight)
            for module in model.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        }

    def forward(self) -> torch.Tensor:
        """Return the sum, a scalar."""
        total = torch.zeros((), device=self.trainable[0].device)
        for parameter in self.trainable:
            if id(parameter) in self.sparse:  # DDP expects a sparse gradient
                first = torch.zeros(1, dtype=torch.long, device=parameter.device)
                total = total + nn.functional.embedding(first, parameter, sparse=True).sum()
            else:
                total = total + parameter.sum()
        return total


def _shard(model: nn.Module, world: World, dtype: torch.dtype | None) -> nn.Module:
    """Shard each block of a ModuleList as one unit, and all other parameters as another: FSDP gathers unit by unit."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def gradient_sync(model: nn.Module, on: bool) -> AbstractContextManager[None]:
    """Return a context in which backward passes reduce gradients over all ranks only if `on` is true.

    FSDP keeps this setting after the end of the context. While it is off, each GPU holds all gradients of the model.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)
    elif isinstance(model, DistributedDataParallel) and not on:
        return model.no_sync()
    return nullcontext()


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside a DistributedDataParallel or DataParallel, or any other model unchanged."""
    return model.module if isinstance(model, (DataParallel, DistributedDataParallel)) else model


# ---------------------------------------------------------------- seeds


def seed(base: int, rank: int = 0) -> None:
    """Seed Python, NumPy (if imported) and torch with base + rank."""
    random.seed(base + rank)
    torch.manual_seed(base + rank)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed((base + rank) % 2**32)


# Variable -> the value for equal results, and the values that permit them. NVLink's switches (NVLS, NVLSTree) add in
# any order (https://github.com/NVIDIA/nccl/issues/1497); PyTorch itself only sets NCCL_ALGO, which permits NVLSTree.
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", r":4096:8|:16:8"),
    "NCCL_NVLS_ENABLE": ("0", "0"),
    "NCCL_ALGO": ("^NVLS", r"\^.*|((?!NVLS).)*"),
}


def make_deterministic(env: MutableMapping[str, str] = os.environ) -> None:
    """Let runs on the same GPUs and software have the same results, bit for bit. Call it before process_group().

    An operation without a deterministic implementation then raises RuntimeError. torch.compile chooses no kernels by
    their speed. Raises WorldError when a variable prevents equal results.
    """
    for name, (value, permitted) in DETERMINISTIC.items():
        if not re.fullmatch(permitted, env.setdefault(name, value), re.IGNORECASE):
            raise WorldError(f"{name}={env[name]}: results may differ between runs; unset it, or set {name}={value}")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # only finds errors


# ---------------------------------------------------------------- explain


def explain(world: World, own_device: torch.device, env: Mapping[str, str] = os.environ) -> str:
    """Describe this rank and the environment variables that determine it, in a few lines."""
    sources = {
        "torchrun": (*TORCHRUN_VARIABLES, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
        "environment": (*TORCHRUN_VARIABLES, *LAYOUT_VARIABLES),
        "slurm": (*SLURM_VARIABLES, *MASTER_VARIABLES),
        "single": (),
    }[world.launcher]
    rendezvous = f"{world.master_addr}:{world.master_port}" if world.master_addr else "none needed"
    lines = [
        f"rank {world.rank} of {world.size} on {socket.gethostname()}: "
        f"local rank {world.local_rank} of {world.local_size}, node {world.node_rank} of {world.nodes}",
        f"  decided by  {world.launcher}",
        f"  from        {' '.join(f'{name}={env[name]}' for name in sources if env.get(name)) or 'nothing set'}",
        f"  rendezvous  {rendezvous}",
        f"  device      {own_device}",
        *(f"  note        {note}" for note in world.notes),
    ]
    return "\n".join(lines) + "\n"


def main(_: Sequence[str]) -> int:
    """Print this rank and the variables that determine it. Returns the exit code."""
    try:
        sys.stdout.write(explain(world := World.from_env(), device(world)))
    except WorldError as error:
        sys.stderr.write(f"distributed.torch: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
