"""Which process of the run am I?

torchrun and srun each tell a process its place through environment variables. `World.from_env` reads the whole
environment of *one* launcher, never variable by variable: half an environment is an error, not a guess. Standard
library only: who starts a process must not import PyTorch to know its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from distributed.nodelist import NodeListError, expand, tasks_per_node

T = TypeVar("T")
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MASTER = ("MASTER_ADDR", "MASTER_PORT")
STEP = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"),
)
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
