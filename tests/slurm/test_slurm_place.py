"""A process that a real SLURM started knows its place: its rank of how many, its node, and the master address.

SLURM sets some twenty variables that contradict each other: some describe the job and some the step, some are left over
from the shell. So real steps are started in every way a person starts them, and the result is compared with where the
processes really ran.
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
from lab.slurm_steps import ALONE, PLACES, STEPS, Observed, StepCase, places, start

from distributed.world import World, WorldError

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "tests/lab/lab.sh"
RECORDS = json.loads((ROOT / "tests/slurm_environments.json").read_text())


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A real SLURM with three nodes, up for the tests of this file."""
    if not os.environ.get("CI") and (os.geteuid() != 0 or not shutil.which("slurmctld")):
        pytest.skip("a real SLURM can be raised by root alone, where slurm-wlm is installed: tests/run.sh says how")
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
    """What was observed of the processes of each step; the steps run side by side."""
    with ThreadPoolExecutor(6) as pool:
        yield {step.name: pool.submit(start, step) for step in STEPS}


def steps(answer: str | None = None) -> pytest.MarkDecorator:
    """All steps with this answer; without one, all that are to be refused."""
    chosen = [step for step in STEPS if (step.answer == answer if answer else step.answer not in (PLACES, ALONE))]
    return pytest.mark.parametrize("step", chosen, ids=lambda step: step.name)


@steps(PLACES)
def test_every_process_knows_its_place(step: StepCase, observations: dict[str, Future[list[Observed]]]) -> None:
    observed = observations[step.name].result()
    worlds = [asdict(World.from_env(process.environment)) for process in observed]
    expected = [asdict(place) for place in places(observed)]
    assert [{key: world[key] for key in expected[0]} for world in worlds] == expected


@steps(PLACES)
def test_all_processes_have_the_same_master_port(
    step: StepCase, observations: dict[str, Future[list[Observed]]]
) -> None:
    worlds = [World.from_env(process.environment) for process in observations[step.name].result()]
    assert len({world.master_port for world in worlds}) == 1
    assert 1024 < (worlds[0].master_port or 0) < 65536


@steps(ALONE)
def test_python_by_hand_in_a_job_is_one_process_and_is_warned(
    step: StepCase, observations: dict[str, Future[list[Observed]]]
) -> None:
    (process,) = observations[step.name].result()
    world = World.from_env(process.environment)
    assert (world.rank, world.size, world.nodes, world.launcher) == (0, 1, 1, "single")
    assert f"inside SLURM job {process.environment['SLURM_JOB_ID']}" in world.notes[0]
    assert "srun" in world.notes[0]


@steps()
def test_what_cannot_be_known_is_refused(step: StepCase, observations: dict[str, Future[list[Observed]]]) -> None:
    observed = observations[step.name].result()
    assert observed
    for process in observed:
        with pytest.raises(WorldError, match=step.answer):
            World.from_env(process.environment)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["name"])
def test_the_record_is_of_the_step_as_it_is_started_today(record: dict[str, object]) -> None:
    (step,) = (step for step in STEPS if step.name == record["name"])
    assert record["command"] == step.command.replace(sys.executable, "python")
    assert record["answer"] == step.answer


def test_every_step_is_recorded() -> None:
    assert [record["name"] for record in RECORDS] == [step.name for step in STEPS]


# As a wrapper or a container that passes on no more than these.
FOUR = """exec env -i "PYTHONPATH=$PYTHONPATH" "SLURM_PROCID=$SLURM_PROCID" \\
  "SLURM_NTASKS=$SLURM_NTASKS" "SLURM_LOCALID=$SLURM_LOCALID" "SLURM_NODELIST=$SLURM_NODELIST" "$@" """


def test_tasks_that_keep_four_variables_are_refused(slurm: None) -> None:
    """Each would train alone as rank 0 of 1."""
    code = "from distributed.world import World; World.from_env()"
    ended = subprocess.run(
        ["srun", "-N2", "-n2", "sh", "-c", FOUR, "sh", sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert ended.returncode != 0
    assert ended.stderr.count("WorldError: SLURM_NODEID is not set") == 2, ended.stderr
