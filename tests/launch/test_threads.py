"""The ranks of a machine share its usable cores, unless OMP_NUM_THREADS is set.

The cases are machines, containers and SLURM allocations; tests/launch_singlenode.bats tests real ranks.
"""

from __future__ import annotations

import os

import pytest

from distributed.host.resources import Cores, read_cores
from distributed.launch.threads import share_cores

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_CPUS_PER_TASK": "1", "SLURM_CPUS_ON_NODE": "8"}


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [
        (Cores(8, 8), 2, "OMP_NUM_THREADS=4 for each of 2 ranks on 8 cores"),
        (Cores(8, 8), 3, "OMP_NUM_THREADS=2 for each of 3 ranks on 8 cores"),
        (Cores(2, 2), 4, "OMP_NUM_THREADS=1 for each of 4 ranks on 2 cores"),
        (Cores(64, 6), 2, "OMP_NUM_THREADS=3 for each of 2 ranks on 6 cores"),  # taskset, or a cpuset
        (Cores(64, 64, quota=6.0), 2, "OMP_NUM_THREADS=3 for each of 2 ranks on 6 cores"),  # docker --cpus 6
        (Cores(64, 4, quota=6.0), 2, "OMP_NUM_THREADS=2 for each of 2 ranks on 4 cores"),
        (Cores(64, 64, quota=3.5), 2, "OMP_NUM_THREADS=1 for each of 2 ranks on 3.5 cores"),
        (Cores(1, 1, quota=0.5), 1, "OMP_NUM_THREADS=1 for each of 1 rank on 0.5 cores"),
    ],
)
def test_an_agent_divides_the_cores_among_its_ranks(cores: Cores, ranks: int, expected: str) -> None:
    env: dict[str, str] = {}
    line = share_cores(ranks, env=env, cores=cores)
    assert line == expected + "\n"
    assert line.startswith(f"OMP_NUM_THREADS={env['OMP_NUM_THREADS']} ")


@pytest.mark.parametrize(
    ("env", "cores", "ranks", "tasks", "chosen"),
    [
        pytest.param({**STEP, "SLURM_CPUS_PER_TASK": "2"}, Cores(64, 64), 4, 4, 2, id="tasks that are not bound"),
        pytest.param({**STEP, "SLURM_CPUS_PER_TASK": "2"}, Cores(64, 2), 4, 4, 2, id="tasks bound to 2 cores each"),
        pytest.param({**STEP, "SLURM_CPUS_PER_TASK": "8"}, Cores(64, 2), 4, 4, 2, id="tasks bound to fewer"),
        pytest.param({**STEP, "SLURM_CPUS_PER_TASK": "2"}, Cores(2, 2), 2, 2, 1, id="more allocated than present"),
        pytest.param({**STEP, "SLURM_CPUS_PER_TASK": "4"}, Cores(2, 2), 1, 1, 2, id="one task, more allocated"),
        pytest.param({**STEP, "SLURM_CPUS_ON_NODE": "2"}, Cores(64, 64), 4, 4, 1, id="--overcommit"),
        pytest.param(STEP, Cores(8, 8), 4, 4, 2, id="no cores in SLURM's variables"),
        pytest.param({**STEP, "SLURM_CPUS_PER_TASK": "x"}, Cores(8, 8), 4, 4, 2, id="not a number"),
        pytest.param({**STEP, "SLURM_CPUS_PER_TASK": "16"}, Cores(64, 64), 4, 1, 4, id="the agent of a node"),
        pytest.param(BATCH, Cores(64, 64), 4, 1, 2, id="an agent started in the batch script"),
        pytest.param({"SLURM_CPUS_PER_TASK": "1"}, Cores(8, 8), 2, 1, 4, id="stale variable without a job"),
    ],
)
def test_ranks_use_no_more_cores_than_slurm_has_allocated(
    env: dict[str, str], cores: Cores, ranks: int, tasks: int, chosen: int
) -> None:
    env = dict(env)
    assert share_cores(ranks, tasks, env, cores)
    assert env["OMP_NUM_THREADS"] == str(chosen)


def test_a_value_set_by_the_user_is_not_changed() -> None:
    env = {"OMP_NUM_THREADS": "7"}
    assert share_cores(4, env=env, cores=Cores(8, 8)) == ""
    assert env == {"OMP_NUM_THREADS": "7"}


def test_the_number_of_cores_does_not_depend_on_omp_num_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    assert read_cores().affinity == 12
