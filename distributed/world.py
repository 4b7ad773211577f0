"""Rank and world size of this process, from environment variables.

torchrun and srun describe each process by environment variables. `World.from_env` reads the variables of one launcher
and never mixes two launchers: an incomplete environment is an error that names the missing variables. A node
rank that the variables do not determine is an error, too. Standard library only, so that launchers need not import
PyTorch.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from distributed.nodelist import NodeListError, expand, tasks_per_node

T = TypeVar("T")
Layout = tuple[int, int, int]  # local size, node rank, nodes
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MASTER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
# The variables of the step come first: the job may have more tasks and nodes.
STEP_SIZE_VARIABLES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
TASKS_PER_NODE_VARIABLES = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
NODE_LIST_VARIABLES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
SLURM_VARIABLES = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS"),
    *STEP_SIZE_VARIABLES,
    *TASKS_PER_NODE_VARIABLES,
    *("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURMD_NODENAME"),
    *NODE_LIST_VARIABLES,
)
# Variables of the layout. Each of torchrun, Lightning, Ray Train and DeepSpeed sets some of them in addition to
# TORCHRUN_VARIABLES. SLURM has its own variables.
LOCAL_SIZE_VARIABLES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
NODE_RANK_VARIABLES = ("GROUP_RANK", "NODE_RANK", "CROSS_RANK")
NODES_VARIABLES = ("GROUP_WORLD_SIZE", "NNODES", "CROSS_SIZE")
LAYOUT_VARIABLES = (*LOCAL_SIZE_VARIABLES, *NODE_RANK_VARIABLES, *NODES_VARIABLES)
# RANK_VARIABLES of Open MPI, MVAPICH, MPICH and Intel MPI, Cray PALS, and horovodrun. They do
# not determine a World: no launcher of MPI sets MASTER_ADDR and the node rank. An error message says what to export.
MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
)
RANKS_ALONE = ("PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK")  # of PMIx, Cray PALS and Flux, without a size
# SLURM reserves step IDs from this one up for the batch script, the interactive step and other steps without srun.
FIRST_SPECIAL_STEP = 4_294_967_000
LOCAL_VALUES = "LOCAL_RANK=<rank on this node> and LOCAL_WORLD_SIZE=<ranks on this node>"
DEFAULT_PORT = 29_500  # torchrun's


class WorldError(RuntimeError):
    """The environment is incomplete or contradictory, or this process cannot join the other ranks as requested."""


@dataclass(frozen=True)
class World:
    """Rank, local rank and node rank of this process, and the number of processes and nodes."""

    rank: int = 0  # 0 .. size-1
    size: int = 1
    local_rank: int = 0  # 0 .. local_size-1 on this node
    local_size: int = 1
    node_rank: int = 0  # 0 .. nodes-1
    nodes: int = 1
    master_addr: str | None = None  # None: a single process needs no rendezvous
    master_port: int | None = None
    launcher: str = "single"  # the source: torchrun, environment, slurm, single
    notes: tuple[str, ...] = ()  # printed as warnings

    def __post_init__(self) -> None:
        for name, value, limit in (
            ("rank", self.rank, self.size),
            ("local rank", self.local_rank, self.local_size),
            ("node rank", self.node_rank, self.nodes),
        ):
            if not 0 <= value < limit:
                raise WorldError(
                    f"{name} {value} is not one of 0 to {limit - 1} (source: {self.launcher}): "
                    "the environment mixes two launches; start from a clean shell"
                )

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> World:
        """Read the world from the variables of the launcher that started this process.

        The launcher is the first that applies: torchrun (also under srun); any launcher that sets all of RANK,
        WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; srun; none (a single process). If RANK and
        WORLD_SIZE equal the rank and size of this task of srun, the layout is SLURM's, except with torchrun. When env
        is os.environ, rank 0 prints each note once to stderr, and the host name and the environment in which SLURM
        started the task are used as well.

        Raises:
            WorldError: the environment is incomplete or contradictory, or a value is invalid.
        """
        world = _read(env)
        if env is os.environ and world.rank == 0:
            for note in world.notes:
                _print_once(note)
        return world


def _read(env: Mapping[str, str]) -> World:
    given = {name: env[name] for name in TORCHRUN_VARIABLES if env.get(name)}
    missing = [name for name in TORCHRUN_VARIABLES if name not in given]
    if not missing and env.get("TORCHELASTIC_RUN_ID"):
        return _from_torchrun(env)
    if _has_ranks_of_slurm(env):
        return _with_layout_of_slurm(env)
    if not missing:
        return _from_complete(env)
    if given.keys() <= set(MASTER_VARIABLES):
        names = _mpi_variables(env)
        if _is_task(env) and not (names and _starts_ranks_in_task(env, names)):
            return _from_slurm(env)
        if names:
            return _alone_under_mpirun(env, names)
    if given:
        values = ", ".join(f"{name}={value}" for name, value in given.items())
        raise WorldError(
            f"{values} {'is' if len(given) == 1 else 'are'} set, but not {', '.join(missing)}: "
            f"start this process with torchrun or srun, or unset {' '.join(given)} to run it alone"
            + (f", or export {LOCAL_VALUES}" if missing == ["LOCAL_RANK"] else "")
        )
    if name := _first_set(env, *RANKS_ALONE):
        raise WorldError(
            f"{name}={env[name]} is set, but not {', '.join(TORCHRUN_VARIABLES)}: start this process with torchrun "
            f"or srun, or export these and LOCAL_WORLD_SIZE, or unset {name} to run it alone"
        )
    return World(notes=_alone_in_an_allocation(env))


@functools.cache
def _print_once(note: str) -> None:
    sys.stderr.write(f"warning: {note}\n")


def _from_torchrun(env: Mapping[str, str]) -> World:
    size = _int(env, "WORLD_SIZE")
    return World(
        rank=_int(env, "RANK"),
        size=size,
        local_rank=_int(env, "LOCAL_RANK"),
        local_size=_int(env, "LOCAL_WORLD_SIZE"),
        node_rank=_int(env, "GROUP_RANK"),
        nodes=_int(env, "GROUP_WORLD_SIZE"),
        master_addr=env["MASTER_ADDR"],
        master_port=_port(env, size),
        launcher="torchrun",
    )


def _from_complete(env: Mapping[str, str]) -> World:
    rank, size, local_rank = _int(env, "RANK"), _int(env, "WORLD_SIZE", positive=True), _int(env, "LOCAL_RANK")
    hints = _hints(env)
    task = _position_in_step(env)
    if task and task[1] > 1:
        _refuse_stale_ranks(env, rank, size, local_rank, task)
        if hints == Hints() and _one_task_per_node(env, task[1]):
            hints = Hints(node_rank=task[0], nodes=task[1])  # each task has started the ranks of its node
    return _with_layout(
        World(
            rank=rank, size=size, local_rank=local_rank, local_size=size,
            master_addr=env["MASTER_ADDR"], master_port=_port(env, size), launcher="environment",
        ),
        hints,
    )  # fmt: skip


def as_env(world: World, run: str) -> dict[str, str]:
    """Return the variables that torchrun, without its agent store, sets for a rank. run: the run ID."""
    variables = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "GROUP_RANK": world.node_rank,
        "GROUP_WORLD_SIZE": world.nodes,
        "ROLE_RANK": world.rank,
        "ROLE_WORLD_SIZE": world.size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": world.master_addr or "127.0.0.1",
        "MASTER_PORT": world.master_port or 0,
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": False,
    }
    return {name: str(value) for name, value in variables.items()}


# ---------------------------------------------------------------- the layout: ranks on nodes


class Hints(NamedTuple):
    """The parts of the layout that the environment gives; None: not given."""

    local_size: int | None = None
    node_rank: int | None = None
    nodes: int | None = None


def _hints(env: Mapping[str, str]) -> Hints:
    local_size = _agreed(env, LOCAL_SIZE_VARIABLES, positive=True)
    return Hints(local_size, _agreed(env, NODE_RANK_VARIABLES), _agreed(env, NODES_VARIABLES, positive=True))


def _agreed(env: Mapping[str, str], names: Sequence[str], positive: bool = False) -> int | None:
    """Return the value of these variables, or None if none is set. Raises WorldError if they differ."""
    values = {name: _int(env, name, positive) for name in names if env.get(name)}
    if len(set(values.values())) > 1:
        given = " and ".join(f"{name}={value}" for name, value in values.items())
        raise WorldError(f"{given} differ: the environment mixes two launches; start from a clean shell")
    return next(iter(values.values()), None)


def _with_layout(world: World, hints: Hints) -> World:
    """Return the world with the layout that the hints determine.

    Raises:
        WorldError: the hints contradict each other or do not determine the layout.
    """
    rank, size, local_rank = world.rank, world.size, world.local_rank
    replace(world, local_size=hints.local_size or size, nodes=hints.nodes or size)  # raises if out of range
    all_here = size == 1 or _is_loopback(world.master_addr or "")  # no other node could reach a loopback address
    if all_here and hints.nodes is None and hints.local_size is None and rank == local_rank and not hints.node_rank:
        return world
    if layout := _layout(rank, size, local_rank, hints):
        local_size, node_rank, nodes = layout
        return replace(world, local_size=local_size, node_rank=node_rank, nodes=nodes)
    names = {"local size": "LOCAL_WORLD_SIZE", "node rank": "GROUP_RANK", "number of nodes": "GROUP_WORLD_SIZE"}
    given = ", ".join(f"{name} {value}" for name, value in zip(names, hints, strict=True) if value is not None)
    missing = [name for name, value in zip(names.values(), hints, strict=True) if value is None]
    if _node_rank_suffices(rank, size, local_rank, hints):
        missing = ["GROUP_RANK"]
    if not missing:
        raise WorldError(
            f"rank {rank} of {size} with local rank {local_rank} does not fit {given}: "
            "the environment mixes two launches; start from a clean shell"
        )
    raise WorldError(
        f"the node of rank {rank} of {size} with local rank {local_rank} is not known"
        f"{f' from {given}' if given else ''}: "
        f"export {', '.join(missing)}, as torchrun does, or start this process with torchrun or srun"
    )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address.lower() == "localhost"


def _layout(rank: int, size: int, local_rank: int, hints: Hints, host: int | None = None) -> Layout | None:
    """Return the layout if the hints determine it, else None.

    With all three hints, nodes may have different numbers of ranks. Otherwise each node must have the same number, with
    ranks in block order (0, 1 on the first node) or cyclic order (0, 2 on the first of two nodes). Each rank decides
    from its own numbers. With uneven nodes, or with SLURM's plane distribution, at least one rank gets None, so that no
    training starts with a wrong layout.

    Args:
        host: position of this host in the list of nodes, where it is known.
    """
    local_size, node_rank, nodes = hints
    if local_size and node_rank is not None and nodes:
        fits = local_rank <= rank and node_rank < nodes and local_size + nodes - 1 <= size
        fits_single_node = nodes > 1 or (local_size, local_rank) == (size, rank)  # a single node has all ranks
        return (local_size, node_rank, nodes) if fits and fits_single_node else None
    known = nodes or local_size
    if not known or size % known:
        return None
    nodes = nodes or size // known
    if local_rank >= size // nodes or local_size not in (None, size // nodes):
        return None
    possible = _possible_nodes(rank, local_rank, size, nodes)
    if node_rank is None:
        node_rank = host
    if node_rank is None and len(possible) == 1 and _order_is_evident(size, nodes):
        (node_rank,) = possible
    return (size // nodes, node_rank, nodes) if node_rank in possible else None


def _node_rank_suffices(rank: int, size: int, local_rank: int, hints: Hints) -> bool:
    """Return whether the hints would determine the layout if they included the node rank."""
    known = hints.nodes or hints.local_size
    if hints.node_rank is not None or not known or size % known:
        return False
    possible = _possible_nodes(rank, local_rank, size, hints.nodes or size // known)
    return any(_layout(rank, size, local_rank, hints._replace(node_rank=node)) for node in possible)


def _possible_nodes(rank: int, local_rank: int, size: int, nodes: int) -> set[int]:
    """Return the nodes on which a rank with this local rank may be, in block or in cyclic order."""
    local_size = size // nodes
    block, cyclic = divmod(rank, local_size), divmod(rank, nodes)[::-1]
    return {node for node, position in (block, cyclic) if position == local_rank}


def _order_is_evident(size: int, nodes: int) -> bool:
    """Return whether a rank and its local rank always determine the node, whether the order is block or cyclic.

    All ranks must get the same result. Otherwise, some ranks would wait for others that an error has ended.
    """
    return all(
        len(_possible_nodes(rank, local_rank, size, nodes)) < 2
        for rank in range(size)
        for local_rank in (rank % (size // nodes), rank // nodes)
    )


# ---------------------------------------------------------------- a process of mpirun


def _mpi_variables(env: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the names for rank, size, local rank and local size that the launcher of this process sets, if any."""
    found = [names for names in MPI_VARIABLES if any(env.get(name) for name in names[:2])]
    return next((names for names in found if env.get(names[2])), found[0] if found else None)


def _starts_ranks_in_task(env: Mapping[str, str], names: Sequence[str]) -> bool:
    """Return whether mpirun has started several ranks in the tasks of a job step, as MPICH's mpirun (Hydra) does.

    With srun --mpi=pmi2, SLURM sets PMI_RANK and PMI_SIZE to the rank and size of the task.
    """
    position = (_int(env, names[0]), _int(env, names[1], positive=True))
    return position[1] > 1 and position != _position_in_step(env)


def _alone_under_mpirun(env: Mapping[str, str], names: Sequence[str]) -> World:
    """Return the world of a single process. Raises WorldError if there are more: see MPI_VARIABLES."""
    rank, size = _int(env, names[0]), _int(env, names[1], positive=True)
    if size == 1:
        return replace(World(rank=rank), notes=_alone_in_an_allocation(env))
    sources = {name: env.get(source) and source for name, source in zip(RANK_VARIABLES, names, strict=True)}
    exports = [f"{name}=${source}" for name, source in sources.items() if source]
    exports += [LOCAL_VALUES] if len(exports) < len(sources) else []
    masters = {"MASTER_ADDR": "<host of rank 0>", "MASTER_PORT": "<a free port>"}
    exports += [f"{name}={value}" for name, value in masters.items() if not env.get(name)]
    missing = [name for name in TORCHRUN_VARIABLES if not env.get(name)]
    raise WorldError(
        f"{names[0]}={rank} and {names[1]}={size} are set, but not {', '.join(missing)}: "
        f"export {', '.join(exports)} in each process, or unset {names[0]} {names[1]} to run it alone"
    )


# ---------------------------------------------------------------- a task of srun


def in_job_step(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether srun started this process. The batch script and an salloc shell have a job, but no step."""
    step = env.get("SLURM_STEP_ID", "")
    is_step = step.isdecimal() and int(step) < FIRST_SPECIAL_STEP and bool(env.get("SLURM_PROCID"))
    return is_step and not _is_shell_of_job(env)


def _is_task(env: Mapping[str, str]) -> bool:
    """Return whether this is a task of srun, even if a wrapper or a container removed some of SLURM's variables.

    Outside a step, SLURM sets PROCID, LOCALID and NODEID only in the batch script, all to 0, together with JOB_ID.
    """
    numbers = {env[name] for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID") if env.get(name)}
    if _is_shell_of_job(env):
        return False
    if numbers - {"0"}:
        return True
    if step := env.get("SLURM_STEP_ID"):
        return not step.isdecimal() or int(step) < FIRST_SPECIAL_STEP
    if env.get("SLURM_STEP_NUM_TASKS"):
        return env["SLURM_STEP_NUM_TASKS"] != "1"
    could_be_batch_script = env.get("SLURM_JOB_ID") and env.get("SLURM_NODEID")
    return bool(env.get("SLURM_PROCID")) and (env.get("SLURM_NTASKS") or "1") != "1" and not could_be_batch_script


def _is_shell_of_job(env: Mapping[str, str]) -> bool:
    """Return whether this process is known to be in a batch script or a shell of salloc.

    If the job was submitted inside a step of another job, its shell inherits the variables of that step. In the shell,
    SLURM_STEP_NUM_TASKS and SLURM_NTASKS may then differ, and so may the numbers of nodes.
    """
    if not env.get("SLURM_JOB_ID"):
        return False
    if env is os.environ:
        job = _started_with(env).get("SLURM_JOB_ID", env["SLURM_JOB_ID"])
        if job != env["SLURM_JOB_ID"] or any(word.endswith("/slurm_script") for word in _read_task(env, "cmdline")):
            return True
    pairs = (("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"))
    differ = any(env.get(step) and env.get(job) and env[step] != env[job] for step, job in pairs)
    return differ and all(
        env.get(name) == "0" for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS")
    )


def _started_with(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which SLURM started this task or batch script; {} if unknown, as in a container."""
    return {name: value for name, _, value in (entry.partition("=") for entry in _read_task(env, "environ"))}


def _read_task(env: Mapping[str, str], file: str) -> list[str]:
    """Return the entries of a file in /proc of the process that SLURM started."""
    try:
        content = Path(f"/proc/{_int(env, 'SLURM_TASK_PID')}/{file}").read_bytes()
    except (OSError, WorldError):
        return []
    return os.fsdecode(content).split("\0")


def _position_in_step(env: Mapping[str, str]) -> tuple[int, int] | None:
    """Return SLURM's rank and size of this task, or None if this is no task or the variables are missing."""
    if not _is_task(env) or not env.get("SLURM_PROCID"):
        return None
    return (_int(env, "SLURM_PROCID"), _step_size(env)) if _first_set(env, *STEP_SIZE_VARIABLES) else None


def _refuse_stale_ranks(env: Mapping[str, str], rank: int, size: int, local_rank: int, task: tuple[int, int]) -> None:
    """Raise WorldError if RANK and WORLD_SIZE are from the submitting shell: sbatch and srun pass them to every task.

    RANK and WORLD_SIZE are valid if the task itself has set them for ranks that it started. The environment with which
    SLURM started the task shows this. If that environment is unknown, there must be one task per node, and the ranks
    must be in the order of the tasks.
    """
    number, tasks = task
    started_with = _started_with(env) if env is os.environ else {}
    if started_with and all(started_with.get(name) == env.get(name) for name in ("SLURM_JOB_ID", "SLURM_PROCID")):
        stale = all(started_with.get(name) == env[name] for name in ("RANK", "WORLD_SIZE"))
    else:
        spread = not size % tasks and divmod(rank, size // tasks) == (number, local_rank)
        stale = not (spread and _one_task_per_node(env, tasks))
    if stale or size == 1:
        raise WorldError(
            f"RANK={rank} and WORLD_SIZE={size} are set, but SLURM reports task {number} of {tasks}: "
            f"they are left over from another launch; unset {' '.join(TORCHRUN_VARIABLES)} before srun "
            "(if this task has started its own ranks: unset SLURM_PROCID for them)"
        )


def _has_ranks_of_slurm(env: Mapping[str, str]) -> bool:
    """Return whether RANK and WORLD_SIZE are those of this task: enroot, pyxis or a wrapper has set them.

    Other variables, such as MASTER_ADDR, may be missing.
    """
    if not (env.get("RANK") and env.get("WORLD_SIZE")):
        return False
    rank, size = _int(env, "RANK"), _int(env, "WORLD_SIZE", positive=True)
    return size > 1 and _position_in_step(env) == (rank, size)


def _with_layout_of_slurm(env: Mapping[str, str]) -> World:
    """Return the world of a task of srun. A wrapper that gives each task one GPU may set LOCAL_RANK=0."""
    world = _from_slurm(env)
    if env.get("LOCAL_RANK") and _int(env, "LOCAL_RANK") not in (0, world.local_rank):
        raise WorldError(
            f"LOCAL_RANK={env['LOCAL_RANK']}, but SLURM_LOCALID={world.local_rank}: "
            "the environment mixes two launches; start from a clean shell"
        )
    return world


def _from_slurm(env: Mapping[str, str]) -> World:
    """Prefer the variables of the step to those of the job, which may have more nodes, as in `srun -N1 -w n9`."""
    rank, size = _int(env, "SLURM_PROCID"), _step_size(env)
    local_size, node_rank, nodes = _layout_of_task(env, rank, size)
    return World(
        rank=rank,
        size=size,
        local_rank=_int(env, "SLURM_LOCALID"),
        local_size=local_size,
        node_rank=node_rank,
        nodes=nodes,
        master_addr=env.get("MASTER_ADDR") or _first_task_host(env, nodes),
        master_port=_port(env, size) if env.get("MASTER_PORT") else slurm_port(env),
        launcher="slurm",
    )


def _layout_of_task(env: Mapping[str, str], rank: int, size: int) -> Layout:
    complete = env.get("SLURM_NODEID") and _first_set(env, *TASKS_PER_NODE_VARIABLES)
    if not complete and (layout := _derived_layout(env, rank, size)):
        return layout
    node_rank, counts = _int(env, "SLURM_NODEID"), _tasks_of_nodes(env, size)
    if node_rank >= len(counts):
        raise WorldError(
            f"SLURM_NODEID={node_rank}, but the step has {len(counts)} node{'s' * (len(counts) != 1)} with "
            f"{','.join(map(str, counts))} tasks: the environment mixes two job steps; start from a clean shell"
        )
    local_size = len(env["SLURM_GTIDS"].split(",")) if env.get("SLURM_GTIDS") else counts[node_rank]
    return local_size, node_rank, len(counts)


def _derived_layout(env: Mapping[str, str], rank: int, size: int) -> Layout | None:
    """Return the layout of a task if a wrapper or container removed SLURM_NODEID or TASKS_PER_NODE_VARIABLES.

    All nodes of the job step must have the same number of tasks.
    """
    if not _first_set(env, *NODE_LIST_VARIABLES) or not env.get("SLURM_LOCALID"):
        return None
    hosts = _unfold(expand, env, *NODE_LIST_VARIABLES)
    if _first_set(env, *TASKS_PER_NODE_VARIABLES) and len(set(_tasks_of_nodes(env, size))) > 1:
        return None
    nodes = _int(env, "SLURM_NNODES", positive=True) if env.get("SLURM_NNODES") else len(hosts)
    node_rank = _int(env, "SLURM_NODEID") if env.get("SLURM_NODEID") else None
    here = env.get("SLURMD_NODENAME") or (os.uname().nodename.partition(".")[0] if env is os.environ else "")
    host = hosts.index(here) if hosts.count(here) == 1 and len(hosts) == nodes else None
    return _layout(rank, size, _int(env, "SLURM_LOCALID"), Hints(None, node_rank, nodes), host)


def _tasks_of_nodes(env: Mapping[str, str], size: int) -> list[int]:
    """Return the number of tasks on each node of the step."""
    counts = _unfold(tasks_per_node, env, *TASKS_PER_NODE_VARIABLES)
    if sum(counts) != size:
        raise WorldError(
            f"SLURM reports {size} tasks, but {','.join(map(str, counts))} on its nodes: "
            "the environment mixes two job steps; start from a clean shell"
        )
    return counts


def _one_task_per_node(env: Mapping[str, str], size: int) -> bool:
    return bool(_first_set(env, *TASKS_PER_NODE_VARIABLES)) and _tasks_of_nodes(env, size) == [1] * size


def slurm_port(env: Mapping[str, str]) -> int:
    """Return a port from 20000 to 29999, below the ephemeral range, that two jobs or job steps seldom share."""
    if not env.get("SLURM_JOB_ID"):
        return DEFAULT_PORT
    step = _int(env, "SLURM_STEP_ID") if env.get("SLURM_STEP_ID") else 0
    return 20_000 + (_int(env, "SLURM_JOB_ID") + 997 * step) % 10_000


def _step_size(env: Mapping[str, str]) -> int:
    return _int(env, _first_set(env, *STEP_SIZE_VARIABLES) or "SLURM_NTASKS", positive=True)


def _first_task_host(env: Mapping[str, str], nodes: int) -> str:
    """Return the host of task 0.

    This is the first host of the step or, in a heterogeneous job, the first host of the step's first component.
    """
    hosts = _unfold(expand, env, *NODE_LIST_VARIABLES)
    if len(hosts) != nodes:
        raise WorldError(
            f"the host of task 0 is not known (SLURM_STEP_NODELIST is not set, and the step has {nodes} of the job's "
            f"{len(hosts)} nodes): let the wrapper or container pass it on, or export MASTER_ADDR=<host of task 0>"
        )
    if env.get("SLURM_DISTRIBUTION") == "arbitrary" and len(hosts) > 1:
        raise WorldError(
            "the host of task 0 is not known (distribution arbitrary, and SLURM_ARBITRARY_NODELIST is sorted): "
            "export MASTER_ADDR=<host of task 0> before srun"
        )
    return next((host for host in _hosts_of_components(env) if host in hosts), hosts[0])


def _hosts_of_components(env: Mapping[str, str]) -> list[str]:
    """Return the hosts of a heterogeneous job in the order of its tasks.

    The node list of the step does not have this order, because SLURM sorts it by name.
    """
    components = _int(env, "SLURM_HET_SIZE") if env.get("SLURM_HET_SIZE") else 0
    lists = [f"SLURM_JOB_NODELIST_HET_GROUP_{number}" for number in range(components)]
    return [host for name in lists if env.get(name) for host in _unfold(expand, env, name)]


def _unfold(parse: Callable[[str], list[T]], env: Mapping[str, str], *names: str) -> list[T]:
    """Parse the first of these variables that is set. If none is set, the error names the last one."""
    name = _first_set(env, *names) or names[-1]
    try:
        return parse(_value(env, name))
    except NodeListError as error:
        raise WorldError(f"{name}: {error}") from None


def _first_set(env: Mapping[str, str], *names: str) -> str | None:
    return next((name for name in names if env.get(name)), None)


def _alone_in_an_allocation(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return a warning for a single process that runs in a SLURM job; nothing outside of a job."""
    if not env.get("SLURM_JOB_ID"):
        return ()
    note = (
        f"inside SLURM job {env['SLURM_JOB_ID']}, but not started by srun: running as one process; "
        "use `srun python ...` for all tasks"
    )
    if env.get("SLURM_PROCID") and not env.get("SLURM_STEP_ID") and (env.get("SLURM_NTASKS") or "1") != "1":
        note += " (if srun did start it: let the wrapper or container pass SLURM_STEP_ID on)"
    return (note,)


# ---------------------------------------------------------------- reading variables


def _int(env: Mapping[str, str], name: str, positive: bool = False) -> int:
    value = _value(env, name)
    if not value.isdecimal() or int(value) < positive:
        expected = "a positive integer" if positive else "a non-negative integer"
        raise WorldError(f"{name}={value!r} is not {expected}: unset it, or start this process with torchrun or srun")
    return int(value)


def _port(env: Mapping[str, str], size: int) -> int:
    port = _int(env, "MASTER_PORT")
    if port > 65_535 or (port == 0 and size > 1):  # as_env() gives 0 to a single process
        raise WorldError(f"MASTER_PORT={port} is not a port: give one from 1 to 65535")
    return port


def _value(env: Mapping[str, str], name: str) -> str:
    if env.get(name):
        return env[name]
    remedy = (
        "let the wrapper or container pass on all of SLURM's variables, or start this process with srun"
        if name.startswith("SLURM_")
        else "start from a clean shell"
    )
    raise WorldError(f"{name} is not set, though other variables of its launcher are: {remedy}")
