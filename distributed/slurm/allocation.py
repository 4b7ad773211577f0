"""The allocation of a SLURM job: its nodes, the ranks on each, and the cores and GPUs for them.

They are read from the environment of the batch script or of salloc's shell. The environment of a batch script has the
number of GPUs of the first node only; that of salloc's shell has no number of GPUs. `scontrol show job` lists the GPUs
of all nodes. Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from distributed.host.network import PORTS, port_is_free
from distributed.host.system import run_program
from distributed.nodelist import NodeListError, expand, tasks_per_node

PORT_STRIDE = 997  # between the ports that a job tries; jobs with consecutive ids start at consecutive ports
SCONTROL_TIMEOUT = 10.0  # seconds


class AllocationError(ValueError):
    """There is no allocation, or the allocation does not fit the requested ranks."""


@dataclass(frozen=True)
class Allocation:
    """The resources of a job, by node rank."""

    job: int  # job id
    nodes: tuple[str, ...]
    tasks: tuple[int, ...]  # ranks on each node
    cores: tuple[int, ...]  # on each node
    cores_per_task: int  # 0 if a node has fewer cores than tasks
    gpus: tuple[int, ...] = ()  # on each node

    @classmethod
    def from_env(cls, env: Mapping[str, str], ranks: int = 0, job_info: str = "") -> Allocation:
        """Read the allocation from the environment.

        Args:
            ranks: total number of ranks. 0: SLURM's number of tasks. If the job has no number of tasks, each node has
                one rank per GPU, or one rank if it has no GPU.
            job_info: output of `scontrol show job`. A node that it does not list is assumed to have as many GPUs as
                the first node.

        Raises:
            AllocationError: there is no allocation, or the allocation does not fit these ranks.
        """
        try:
            nodes = tuple(expand(_required(env, "SLURM_JOB_NODELIST")))
            cores = tuple(tasks_per_node(_required(env, "SLURM_JOB_CPUS_PER_NODE")))
            of_node = gpus_of_nodes(job_info, env.get("SLURM_JOB_ID", ""))
            first = int(env.get("SLURM_GPUS_ON_NODE") or 0)
            gpus = tuple(of_node.get(node, first) for node in nodes)
            tasks = _layout(env, gpus, ranks)
        except NodeListError as error:
            raise AllocationError(f"SLURM's variables cannot be read: {error}") from None
        for node, count, allocated in zip(nodes, tasks, gpus, strict=True):
            if 0 < allocated < count:
                raise AllocationError(
                    f"{node}: {count} processes, but {allocated} GPU{'s' * (allocated > 1)} allocated; request one per "
                    f"process with --gres=gpu:{count}, or fewer processes with --ntasks-per-node={allocated}"
                )
        share = min(have // need for have, need in zip(cores, tasks, strict=True) if need)
        if ranks in (0, int(env.get("SLURM_NTASKS") or 0)):
            share = int(env.get("SLURM_CPUS_PER_TASK") or share)
        return cls(int(_required(env, "SLURM_JOB_ID")), nodes, tasks, cores, share, gpus)

    def warnings(self, env: Mapping[str, str]) -> Iterator[str]:
        """Warnings about unused or scarce resources."""
        for node, count, allocated in zip(self.nodes, self.tasks, self.gpus, strict=True):
            if allocated > count:
                yield f"{node}: {count} of {allocated} GPUs used; use all with --ntasks-per-node={allocated}"
                break
        if not self.cores_per_task:
            yield "fewer CPU cores than processes allocated; request more with --cpus-per-task"
        if int(env.get("SLURM_HET_SIZE") or 1) > 1:
            yield f"heterogeneous job with {env['SLURM_HET_SIZE']} components; only nodes of the first one are used"


def read(ranks: int) -> Allocation:
    """Read the allocation of this process. See Allocation.from_env() for `ranks` and AllocationError."""
    job = run_program(["scontrol", "show", "job", "--details", os.environ.get("SLURM_JOB_ID", "")], SCONTROL_TIMEOUT)
    return Allocation.from_env(os.environ, ranks, job.out)


def gpus_of_nodes(shown: str, job: str) -> dict[str, int]:
    """Return the number of GPUs allocated to a job on each node. shown: output of `scontrol show job --details`.

    For the last task of a job array the output includes the other tasks, which may run on the same nodes. Their GPUs
    are not counted.
    """
    found: dict[str, int] = {}
    for block in re.split(r"\n\s*\n", shown):
        if re.match(rf"\s*JobId={re.escape(job)}\b", block):
            for names, gres in re.findall(r"^\s+Nodes=(\S+) .*?\bGRES=(\S*)", block, re.MULTILINE):
                count = sum(map(int, re.findall(r"\bgpu(?::[^:,(]+)??:(\d+)(?=[(,]|$)", gres)))
                found |= dict.fromkeys(expand(names), count)
    return found


def _layout(env: Mapping[str, str], gpus: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the ranks on each node: SLURM's layout if it fits; one per GPU if no number of ranks was requested.

    Otherwise the ranks are distributed evenly, with more ranks on the first nodes.
    """
    requested = int(env.get("SLURM_NTASKS") or 0)
    layout = tuple(tasks_per_node(_required(env, "SLURM_TASKS_PER_NODE")))
    # With both --ntasks and --ntasks-per-node the sum may differ from --ntasks.
    if requested and ranks in (0, requested) and sum(layout) == requested:
        return layout
    if not ranks and not requested:
        return tuple(count or 1 for count in gpus)
    nodes, ranks = len(gpus), ranks or requested
    if ranks < nodes:
        raise AllocationError(
            f"{ranks} process{'es' * (ranks != 1)} for {nodes} allocated nodes; request at least {nodes}, one per node"
        )
    return tuple(ranks // nodes + (node < ranks % nodes) for node in range(nodes))


def _required(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise AllocationError(
            f"{name} is not set: not in a SLURM allocation; run this in a batch script or in the shell of salloc"
        )
    return env[name]


def free_port(job: int) -> int:
    """Return a rendezvous port for this job that is free on this machine, outside the usual ephemeral range."""
    ports = (PORTS[(job + PORT_STRIDE * attempt) % len(PORTS)] for attempt in range(len(PORTS)))
    return next(filter(port_is_free, ports))


def main(arguments: Sequence[str]) -> int:
    """Print a free port of this machine for the job with the given id."""
    print(free_port(int(arguments[0])))
    return 0
