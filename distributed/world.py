"""Rank and world size of this process, from environment variables.

torchrun and srun describe each process by environment variables. `World.from_env` reads the variables of one launcher
and never mixes two launchers: an incomplete environment is an error that names the missing variables. Standard library
only, so that launchers need not import PyTorch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from distributed.nodelist import NodeListError, expand, tasks_per_node

T = TypeVar("T")
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MASTER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
SLURM_VARIABLES = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    *("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
)
# SLURM reserves step IDs from this one up for the batch script, the interactive step and other steps without srun.
FIRST_SPECIAL_STEP = 4_294_967_000
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
    notes: tuple[str, ...] = ()  # assumptions, printed as warnings

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
        WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; srun; none (a single process). When env is os.environ,
        rank 0 prints each note once to stderr.

        Raises:
            WorldError: the environment is incomplete or contradictory, or a value is invalid.
        """
        world = _read(env)
        if env is os.environ and world.rank == 0:
            _print_once(world.notes)
        return world


def _read(env: Mapping[str, str]) -> World:
    given = {name: env[name] for name in TORCHRUN_VARIABLES if env.get(name)}
    missing = [name for name in TORCHRUN_VARIABLES if name not in given]
    if not missing:
        return _from_torchrun(env) if env.get("TORCHELASTIC_RUN_ID") else _from_complete(env)
    if not given.keys() - set(MASTER_VARIABLES) and _is_task(env):
        return _from_slurm(env)
    if given:
        values = ", ".join(f"{name}={value}" for name, value in given.items())
        raise WorldError(
            f"{values} {'is' if len(given) == 1 else 'are'} set, but not {', '.join(missing)}: "
            f"start this process with torchrun or srun, or unset {' '.join(given)} to run it alone"
        )
    return World(notes=_alone_in_an_allocation(env))


_printed: set[str] = set()


def _print_once(notes: tuple[str, ...]) -> None:
    for note in notes:
        if note not in _printed:
            _printed.add(note)
            sys.stderr.write(f"warning: {note}\n")


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
    rank, size = _int(env, "RANK"), _int(env, "WORLD_SIZE", positive=True)
    _refuse_stale_ranks(env, rank, size)
    local_size = _int(env, "LOCAL_WORLD_SIZE", positive=True) if env.get("LOCAL_WORLD_SIZE") else size
    assumed = "LOCAL_WORLD_SIZE is not set: assuming that all ranks are on this node"
    nodes = _int(env, "NNODES", positive=True) if env.get("NNODES") else -(-size // local_size)
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
        notes=() if env.get("LOCAL_WORLD_SIZE") else (assumed,),
    )


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


def _refuse_stale_ranks(env: Mapping[str, str], rank: int, size: int) -> None:
    """Raise WorldError for ranks exported by the submitting shell: sbatch and srun pass them to every task."""
    if not in_job_step(env):
        return
    task, tasks = _int(env, "SLURM_PROCID"), _step_size(env)
    if (rank, size) != (task, tasks):
        raise WorldError(
            f"RANK={rank} and WORLD_SIZE={size} are set, but SLURM reports task {task} of {tasks}: "
            f"they are left over from another launch; unset {' '.join(TORCHRUN_VARIABLES)} before srun"
        )


# ---------------------------------------------------------------- a task of srun


def in_job_step(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether srun started this process. The batch script and an salloc shell have a job, but no step."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < FIRST_SPECIAL_STEP and bool(env.get("SLURM_PROCID"))


def _is_task(env: Mapping[str, str]) -> bool:
    """Return whether this is a task of srun, even if a wrapper or a container removed some of SLURM's variables.

    Outside a step, SLURM sets PROCID, LOCALID and NODEID only in the batch script, all to 0, together with JOB_ID.
    """
    numbers = {env[name] for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID") if env.get(name)}
    if numbers - {"0"}:
        return True
    if step := env.get("SLURM_STEP_ID"):
        return not step.isdecimal() or int(step) < FIRST_SPECIAL_STEP
    if env.get("SLURM_STEP_NUM_TASKS"):
        return env["SLURM_STEP_NUM_TASKS"] != "1"
    could_be_batch_script = env.get("SLURM_JOB_ID") and env.get("SLURM_NODEID")
    return bool(env.get("SLURM_PROCID")) and (env.get("SLURM_NTASKS") or "1") != "1" and not could_be_batch_script


def _from_slurm(env: Mapping[str, str]) -> World:
    """Prefer the variables of the step to those of the job, which may have more nodes, as in `srun -N1 -w n9`."""
    size, node_rank = _step_size(env), _int(env, "SLURM_NODEID")
    counts = _tasks_of_nodes(env, size)
    if node_rank >= len(counts):
        raise WorldError(
            f"SLURM_NODEID={node_rank}, but the step has {len(counts)} node{'s' * (len(counts) != 1)} with "
            f"{_joined(counts)} tasks: the environment mixes two job steps; start from a clean shell"
        )
    return World(
        rank=_int(env, "SLURM_PROCID"),
        size=size,
        local_rank=_int(env, "SLURM_LOCALID"),
        local_size=len(env["SLURM_GTIDS"].split(",")) if env.get("SLURM_GTIDS") else counts[node_rank],
        node_rank=node_rank,
        nodes=len(counts),
        master_addr=env.get("MASTER_ADDR") or _first_task_host(env, len(counts)),
        master_port=_port(env) if env.get("MASTER_PORT") else slurm_port(env),
        launcher="slurm",
    )


def _tasks_of_nodes(env: Mapping[str, str], size: int) -> list[int]:
    """Return the number of tasks on each node of the step."""
    counts = _unfold(tasks_per_node, env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if sum(counts) != size:
        raise WorldError(
            f"SLURM reports {size} tasks, but {_joined(counts)} on its nodes: the environment mixes two job steps; "
            "start from a clean shell"
        )
    return counts


def slurm_port(env: Mapping[str, str]) -> int:
    """Return a port from 20000 to 29999, below the ephemeral range, that two jobs or job steps seldom share."""
    if not env.get("SLURM_JOB_ID"):
        return DEFAULT_PORT
    step = _int(env, "SLURM_STEP_ID") if env.get("SLURM_STEP_ID") else 0
    return 20_000 + (_int(env, "SLURM_JOB_ID") + 997 * step) % 10_000


def _step_size(env: Mapping[str, str]) -> int:
    return _int(env, "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS", positive=True)


def _first_task_host(env: Mapping[str, str], nodes: int) -> str:
    """Return the host of task 0: the first of the step's hosts. A heterogeneous job orders them by component."""
    hosts = _unfold(expand, env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
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
    """Return the hosts of a heterogeneous job in the order of its tasks: SLURM sorts the step's list by name."""
    components = _int(env, "SLURM_HET_SIZE") if env.get("SLURM_HET_SIZE") else 0
    lists = [f"SLURM_JOB_NODELIST_HET_GROUP_{number}" for number in range(components)]
    return [host for name in lists if env.get(name) for host in _unfold(expand, env, name)]


def _unfold(parse: Callable[[str], list[T]], env: Mapping[str, str], *names: str) -> list[T]:
    """Parse the first of these variables that is set. If none is set, the error names the last one."""
    name = next((name for name in names if env.get(name)), names[-1])
    try:
        return parse(_value(env, name))
    except NodeListError as error:
        raise WorldError(f"{name}: {error}") from None


def _alone_in_an_allocation(env: Mapping[str, str]) -> tuple[str, ...]:
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


def _port(env: Mapping[str, str]) -> int:
    port = _int(env, "MASTER_PORT")
    if port > 65_535:
        raise WorldError(f"MASTER_PORT={port} is not a port: the highest is 65535")
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


def _joined(counts: list[int]) -> str:
    return ",".join(map(str, counts))
