"""A process started by a real SLURM determines its rank, world size, node and master address.

SLURM sets about twenty variables that may contradict each other: some describe the job, some the step, some come from
the shell. So real steps are started in all usual ways, and results are compared with the nodes on which processes ran.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
from lab.slurm_steps import POSITIONS, SINGLE, STEPS, Observed, StepCase, clean_environment, positions, start

from distributed.world import World, WorldError

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "tests/lab/lab.sh"
RECORDS = json.loads((ROOT / "tests/slurm_environments.json").read_text())


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A real SLURM with three nodes for the tests of this file."""
    if not os.environ.get("CI") and (os.geteuid() != 0 or not shutil.which("slurmctld")):
        pytest.skip("a real SLURM needs root and package slurm-wlm; tests/run.sh explains the installation")
    prefix = "p" + str(os.getpid()).translate(str.maketrans("0123456789", "abcdefghij"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUSTER_LAB", str(tmp_path_factory.mktemp("slurm") / "lab"))
        up = [str(LAB), "up", "3", "--slurm", "--gpus", "2", "--prefix", prefix]
        conf = subprocess.run(up, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        patch.setenv("SLURM_CONF", conf)
        yield
        subprocess.run([LAB, "down"], check=True)


@pytest.fixture(scope="module")
def observations(slurm: None) -> Iterator[dict[str, Future[list[Observed]]]]:
    """The observed processes of each step, by its name. The steps run concurrently."""
    with ThreadPoolExecutor(6) as pool:
        environment = clean_environment()
        yield {step.name: pool.submit(start, step, environment) for step in STEPS}


def steps(expected: str | None = None) -> pytest.MarkDecorator:
    """Run a test for each step with this expectation; by default, for each step that must be refused."""
    refused = [step for step in STEPS if step.expected not in (POSITIONS, SINGLE)]
    chosen = [step for step in STEPS if step.expected == expected] if expected else refused
    return pytest.mark.parametrize("step", chosen, ids=lambda step: step.name)


@steps(POSITIONS)
def test_every_process_determines_its_position(step: StepCase, observations: dict[str, Future[list[Observed]]]) -> None:
    observed = observations[step.name].result()
    worlds = [asdict(World.from_env(process.environment)) for process in observed]
    expected = [asdict(position) for position in positions([process.host for process in observed])]
    assert [{key: world[key] for key in expected[0]} for world in worlds] == expected


@steps(POSITIONS)
def test_all_processes_have_the_same_master_port(
    step: StepCase, observations: dict[str, Future[list[Observed]]]
) -> None:
    worlds = [World.from_env(process.environment) for process in observations[step.name].result()]
    assert len({world.master_port for world in worlds}) == 1
    assert 1024 < (worlds[0].master_port or 0) < 65536


@steps(SINGLE)
def test_python_without_srun_in_a_job_is_a_single_process_with_a_warning(
    step: StepCase, observations: dict[str, Future[list[Observed]]]
) -> None:
    (process,) = observations[step.name].result()
    world = World.from_env(process.environment)
    assert (world.rank, world.size, world.nodes, world.launcher) == (0, 1, 1, "single")
    assert f"inside SLURM job {process.environment['SLURM_JOB_ID']}" in world.notes[0]
    assert "srun" in world.notes[0]


@steps()
def test_ambiguous_environments_are_refused(step: StepCase, observations: dict[str, Future[list[Observed]]]) -> None:
    observed = observations[step.name].result()
    assert observed
    for process in observed:
        with pytest.raises(WorldError, match=step.expected):
            World.from_env(process.environment)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["name"])
def test_each_record_has_the_current_command_and_expectation(record: dict[str, object]) -> None:
    (step,) = (step for step in STEPS if step.name == record["name"])
    assert record["command"] == step.command.replace(sys.executable, "python")
    assert record["expected"] == step.expected


def test_every_step_is_recorded() -> None:
    assert [record["name"] for record in RECORDS] == [step.name for step in STEPS]


# Simulates a wrapper or container that passes only four variables of SLURM to a task. The task then checks that World
# derives the value of SLURM_NODEID, which is not passed, and prints the local size and the number of nodes.
FOUR_VARIABLES = """id=$SLURM_NODEID; exec env -i "PYTHONPATH=$PYTHONPATH" "SLURM_PROCID=$SLURM_PROCID" \\
  "SLURM_NTASKS=$SLURM_NTASKS" "SLURM_LOCALID=$SLURM_LOCALID" "SLURM_NODELIST=$SLURM_NODELIST" "$@" "$id" """
COMPARE = """import sys; from distributed.world import World
world = World.from_env(); assert str(world.node_rank) == sys.argv[1], world; print(world.local_size, world.nodes)"""


def start_with_four_variables(*options: str) -> subprocess.CompletedProcess[str]:
    command = ["srun", *options, "sh", "-c", FOUR_VARIABLES, "sh", sys.executable, "-c", COMPARE]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ("-N2 -n2", "1 2\n" * 2),
        ("-N2 --ntasks-per-node=2", "2 2\n" * 4),
        ("-N2 --ntasks-per-node=2 -m cyclic", "2 2\n" * 4),
        ("-N3 --ntasks-per-node=2 -m cyclic", "2 3\n" * 6),
        ("-N1 -n3", "3 1\n" * 3),
    ],
)
def test_tasks_with_only_four_variables_determine_their_node_rank_in_block_and_cyclic_distributions(
    slurm: None, options: str, printed: str
) -> None:
    """On three nodes, a task needs its host name to choose one of the two distributions."""
    ended = start_with_four_variables(*options.split())
    assert (ended.returncode, ended.stdout) == (0, printed), ended.stderr


def test_tasks_with_only_four_variables_and_uneven_nodes_are_refused(slurm: None) -> None:
    """Otherwise each task would train separately as rank 0 of 1."""
    ended = start_with_four_variables("-N2", "-n3")
    assert ended.returncode != 0
    assert ended.stderr.count("WorldError: SLURM_NODEID is not set") == 3, ended.stderr
