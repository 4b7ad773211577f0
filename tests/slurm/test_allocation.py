"""The allocation is read from SLURM's variables: uneven nodes, GPUs, jobs without --ntasks, inconsistent numbers.

The environments are those of batch scripts under SLURM 22.05, with other node names.
"""

from __future__ import annotations

import socket

import pytest

from distributed.host.network import PORTS
from distributed.slurm import allocation
from distributed.slurm.allocation import PORT_STRIDE, Allocation, AllocationError

EVEN = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "n[08-09]",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_CPUS_PER_TASK": "2",
    "SLURM_GPUS_ON_NODE": "2",
}
UNEVEN = EVEN | {"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "4,1", "SLURM_JOB_CPUS_PER_NODE": "4,1"}
UNEVEN = {name: value for name, value in UNEVEN.items() if name not in ("SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE")}
NO_TASKS = {name: EVEN[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST")} | {
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_CPUS_PER_NODE": "1(x2)",
}


@pytest.mark.parametrize(
    ("env", "ranks", "tasks", "cores"),
    [
        (EVEN, 0, (2, 2), 2),
        (UNEVEN, 0, (4, 1), 1),
        (UNEVEN, 5, (4, 1), 1),
        (UNEVEN, 2, (1, 1), 1),
        (EVEN | {"SLURM_NTASKS": "3"}, 0, (2, 1), 2),  # with --ntasks-per-node, SLURM sets 2(x2) for 3 tasks
        (EVEN, 3, (2, 1), 2),
        (EVEN, 2, (1, 1), 4),
        (NO_TASKS, 0, (1, 1), 1),
        (NO_TASKS | {"SLURM_GPUS_ON_NODE": "2"}, 0, (2, 2), 0),
        (NO_TASKS, 16, (8, 8), 0),
    ],
)
def test_ranks_are_distributed_as_allocated(
    env: dict[str, str], ranks: int, tasks: tuple[int, ...], cores: int
) -> None:
    found = Allocation.from_env(env, ranks)
    assert (found.nodes, found.tasks, found.cores_per_task) == (("n08", "n09"), tasks, cores)


@pytest.mark.parametrize(
    ("env", "ranks", "fault"),
    [
        (
            {},
            0,
            "SLURM_JOB_NODELIST is not set: not in a SLURM allocation; run this in a batch",
        ),
        (EVEN, 1, "1 process for 2 allocated nodes; request at least 2"),
        (EVEN, 6, r"n08: 3 processes, but 2 GPUs allocated.*--gres=gpu:3.*--ntasks-per-node=2"),
        (EVEN | {"SLURM_TASKS_PER_NODE": "2(x"}, 0, "SLURM's variables cannot be read: .*2\\(x"),
    ],
)
def test_an_allocation_that_does_not_fit_is_refused(env: dict[str, str], ranks: int, fault: str) -> None:
    with pytest.raises(AllocationError, match=fault):
        Allocation.from_env(env, ranks)


@pytest.mark.parametrize(
    ("env", "ranks", "note"),
    [
        (EVEN, 2, "n08: 1 of 2 GPUs used; use all with --ntasks-per-node=2"),
        (NO_TASKS, 4, "fewer CPU cores than processes allocated; request more with --cpus-per-task"),
        (EVEN | {"SLURM_HET_SIZE": "2"}, 0, "heterogeneous job with 2 components; only nodes of the first one"),
    ],
)
def test_unused_and_scarce_resources_are_reported(env: dict[str, str], ranks: int, note: str) -> None:
    (found,) = Allocation.from_env(env, ranks).warnings(env)
    assert note in found


SHOWN = """JobId=16 ArrayJobId=17 ArrayTaskId=1 JobName=wrap
     Nodes=n[08-09] CPU_IDs=0-1 Mem=0 GRES=gpu:8(IDX:0-7)

JobId=17 ArrayJobId=17 ArrayTaskId=2 JobName=wrap
   NumNodes=2 NumCPUs=3 NumTasks=3 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
     Nodes=n08 CPU_IDs=0-1 Mem=0 GRES=gpu:2(IDX:0-1)
     Nodes=n09 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)
   TresPerJob=gres:gpu:3
"""


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:2(IDX:0-1)", 2),
        ("gpu:a100:2(IDX:0,3)", 2),
        ("gpu:3g.20gb:1(IDX:0),gpu:1g.5gb:2(IDX:1-2)", 3),
        ("shard:4(0/4),gpu:1(IDX:0)", 1),
        ("", 0),
    ],
)
def test_gpus_in_the_output_of_scontrol_are_counted(gres: str, gpus: int) -> None:
    shown = f"JobId=17 JobName=wrap\n     Nodes=n[08-09] CPU_IDs=6-7 Mem=0 GRES={gres}\n"
    assert allocation.gpus_of_nodes(shown, "17") == {"n08": gpus, "n09": gpus}


def test_gpus_are_counted_on_every_node() -> None:
    uneven = UNEVEN | {"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1"}
    assert Allocation.from_env(uneven, job_info=SHOWN).gpus == (2, 1)
    with pytest.raises(AllocationError, match=r"n09: 2 processes, but 1 GPU allocated"):
        Allocation.from_env(EVEN, job_info=SHOWN)
    assert Allocation.from_env(NO_TASKS, job_info=SHOWN).tasks == (2, 1), "one process for each GPU"


def test_jobs_with_consecutive_ids_try_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def fifth_is_free(port: int) -> bool:
        tried.append(port)
        return len(tried) % 5 == 0

    monkeypatch.setattr(allocation, "port_is_free", fifth_is_free)
    for job in range(9_995, 10_005):
        allocation.free_port(job)
    assert len(tried) == len(set(tried)) == 50
    assert all(port in PORTS for port in tried)


def test_a_port_in_use_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    job = 4711
    with socket.create_server(("", PORTS[job])):
        assert allocation.main([str(job)]) == 0
        assert int(capsys.readouterr().out) == PORTS[(job + PORT_STRIDE) % len(PORTS)]
