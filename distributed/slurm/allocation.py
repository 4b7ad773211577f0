"""What has SLURM really allocated to this job: which nodes, how many ranks on each, how many cores for each rank?

Read from the variables of the batch script or the shell of salloc. They do not tell the GPUs of each node, and in the
shell of salloc not even those of the first: scontrol does. Standard library only.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from distributed.host.network import PORTS, port_is_free
from distributed.host.system import run_program
from distributed.nodelist import NodeListError, expand, tasks_per_node

PORT_STRIDE = 997  # between two ports that a job tries; jobs with neighbouring numbers begin at neighbouring ports
SCONTROL_TIMEOUT = 10.0  # seconds


class AllocationError(ValueError):
    """What is allocated does not fit what is asked for."""


@dataclass(frozen=True)
class Allocation:
    """The nodes of a job, by node rank, and what each has of it."""

    job: int
    nodes: tuple[str, ...]
    tasks: tuple[int, ...]  # ranks on each
    cores: tuple[int, ...]  # on each
    cores_per_task: int  # 0: fewer than tasks
    gpus: tuple[int, ...] = ()  # on each; 0: none

    @classmethod
    def from_env(cls, env: Mapping[str, str], ranks: int = 0, job: str = "") -> Allocation:
        """ranks: in all; 0 for as many as were allocated: SLURM's tasks or, where it was given none, one a GPU.

        job: what scontrol shows of it; without it, all nodes are taken to have as many GPUs as the first.

        Raises:
            AllocationError: no allocation, or one that these ranks do not fit.
        """
        try:
            nodes = tuple(expand(_required(env, "SLURM_JOB_NODELIST")))
            cores = tuple(tasks_per_node(_required(env, "SLURM_JOB_CPUS_PER_NODE")))
            of_node = gpus_of_nodes(job, env.get("SLURM_JOB_ID", ""))
            first = int(env.get("SLURM_GPUS_ON_NODE") or 0)
            gpus = tuple(of_node.get(node, first) for node in nodes)
            tasks = _layout(env, gpus, ranks)
        except NodeListError as error:
            raise AllocationError(f"SLURM's variables cannot be read: {error}") from None
        for node, count, there in zip(nodes, tasks, gpus, strict=True):
            if 0 < there < count:
                raise AllocationError(
                    f"{count} processes on {node}, and {there} GPU{'s' * (there > 1)} allocated there: each process "
                    f"needs its own; ask for them with --gres=gpu:{count}, or for fewer processes with "
                    f"--ntasks-per-node={there}"
                )
        share = min(have // need for have, need in zip(cores, tasks, strict=True) if need)
        if ranks in (0, int(env.get("SLURM_NTASKS") or 0)):
            share = int(env.get("SLURM_CPUS_PER_TASK") or share)
        return cls(int(_required(env, "SLURM_JOB_ID")), nodes, tasks, cores, share, gpus)

    def notes(self, env: Mapping[str, str]) -> Iterator[str]:
        """What a person may want to know before it begins."""
        for node, count, there in zip(self.nodes, self.tasks, self.gpus, strict=True):
            if there > count:
                yield f"{there} GPUs on {node}, and {count} of them used: --ntasks-per-node={there} uses all"
                break
        if not self.cores_per_task:
            yield "fewer CPU cores are allocated than processes, which have to share them: --cpus-per-task gives more"
        if int(env.get("SLURM_HET_SIZE") or 1) > 1:
            yield f"this job has {env['SLURM_HET_SIZE']} components: only the nodes of the first are used"


def read(ranks: int) -> Allocation:
    """The allocation that this process is in; ranks as for from_env. Raises AllocationError."""
    job = run_program(["scontrol", "show", "job", "--details", os.environ.get("SLURM_JOB_ID", "")], SCONTROL_TIMEOUT)
    return Allocation.from_env(os.environ, ranks, job.out)


def gpus_of_nodes(shown: str, job: str) -> dict[str, int]:
    """The GPUs allocated to a job on each node, from what `scontrol show job --details` prints.

    Of an array's last element it also shows the other elements, whose nodes may be the same.
    """
    found: dict[str, int] = {}
    for part in re.split(r"\n\s*\n", shown):
        if re.match(rf"\s*JobId={re.escape(job)}\b", part):
            for names, gres in re.findall(r"^\s+Nodes=(\S+) .*?\bGRES=(\S*)", part, re.MULTILINE):
                count = sum(map(int, re.findall(r"\bgpu(?::[^:,(]+)??:(\d+)(?=[(,]|$)", gres)))
                found |= dict.fromkeys(expand(names), count)
    return found


def _layout(env: Mapping[str, str], gpus: Sequence[int], ranks: int) -> tuple[int, ...]:
    """How many ranks on each node: as SLURM has laid them out, else as evenly as can be, the first ones more."""
    given = int(env.get("SLURM_NTASKS") or 0)
    laid_out = tuple(tasks_per_node(_required(env, "SLURM_TASKS_PER_NODE")))
    if given and ranks in (0, given) and sum(laid_out) == given:  # --ntasks with --ntasks-per-node: it may not be so
        return laid_out
    if not ranks and not given:
        return tuple(count or 1 for count in gpus)
    nodes, ranks = len(gpus), ranks or given
    if ranks < nodes:
        raise AllocationError(
            f"{ranks} process{'es' * (ranks != 1)} for the {nodes} nodes of the allocation: each gets at least one, "
            f"ask for {nodes}"
        )
    return tuple(ranks // nodes + (node < ranks % nodes) for node in range(nodes))


def _required(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise AllocationError(
            f"{name} is not set: not in a SLURM allocation; call this from a batch script or the shell of salloc"
        )
    return env[name]


def ports(job: int) -> Iterator[int]:
    """Outside the ephemeral range, in an order that no two neighbouring jobs share."""
    return (PORTS[(job + PORT_STRIDE * turn) % len(PORTS)] for turn in itertools.count())


def free_port(job: int) -> int:
    """Where the ranks of this job can meet, tested on this machine."""
    return next(port for port in itertools.islice(ports(job), len(PORTS)) if port_is_free(port))


def main(words: Sequence[str]) -> int:
    """Print a free port of this machine for the job whose number is given."""
    print(free_port(int(words[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
