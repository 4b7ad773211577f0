"""Set OMP_NUM_THREADS, the number of threads per rank, which PyTorch reads when it is imported.

More threads than cores slow down a small model tenfold, and torchrun sets 1 thread if there are several ranks. Here the
ranks of a machine share the cores that they may use.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from distributed.host.resources import Cores, read_cores
from distributed.world import in_job_step

NAME = "OMP_NUM_THREADS"


def cores_of_ranks(tasks: int, env: Mapping[str, str], cores: Cores) -> float:
    """The total number of cores for the ranks of this machine, limited to those that SLURM has allocated.

    Args:
        tasks: processes of this launch on this machine. They see the same cores unless SLURM has bound each to its own.
        cores: as seen by this process.
    """
    bound = tasks > 1 and cores.affinity < cores.present
    usable = cores.usable * tasks if bound else cores.usable
    allotted = 0
    if in_job_step(env) and env.get("SLURM_CPUS_PER_TASK"):
        allotted = _number(env["SLURM_CPUS_PER_TASK"]) * tasks
    elif env.get("SLURM_JOB_ID"):
        allotted = _number(env.get("SLURM_CPUS_ON_NODE", ""))
    return min(usable, allotted or usable)


def _number(value: str) -> int:
    """The value as a number, or 0 if the value is not a non-negative integer."""
    return int(value) if value.isdecimal() else 0


def share_cores(
    ranks: int, tasks: int = 1, env: MutableMapping[str, str] = os.environ, cores: Cores | None = None
) -> str:
    """Set OMP_NUM_THREADS for the ranks on this machine, unless it is set.

    Args:
        tasks: processes that start these ranks: 1 for an agent; with srun, one per rank.

    Returns:
        A line to print; "" if the variable was set already.
    """
    if env.get(NAME):
        return ""
    shared = cores_of_ranks(tasks, env, cores or read_cores())
    env[NAME] = str(max(1, int(shared // ranks)))
    return f"{NAME}={env[NAME]} for each of {_count(ranks, 'rank')} on {_count(shared, 'core')}\n"


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'' if number == 1 else 's'}"
