"""Tests of World.from_env(), which reads the rank from the environment.

All values come from one launcher. An environment that is incomplete, stale or mixed from two launches is an error. A
task of srun for which a wrapper or container dropped some of SLURM's variables never silently becomes rank 0 of 1.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed.world import TORCHRUN_VARIABLES, World, WorldError, as_env, slurm_port

KIT = Path(__file__).resolve().parents[1]
RECORDS = json.loads((KIT / "tests/slurm_environments.json").read_text())

COMPLETE = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
TORCHRUN = {
    **COMPLETE, "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[08-10]", "SLURM_NODELIST": "n[08-10]", "SLURM_NTASKS": "7"}
STEP = {  # task 5 of 7, the second on the third node, with block distribution of 2(x3),1
    **JOB, "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "n[08-10],x1",
}  # fmt: skip
FIRST = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
# The variables of task 3 of 4, the second on n2, that remain after a wrapper or container dropped the others.
FOUR = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODELIST": "n[1-2]"}
FIRST_OF_FOUR = {**FOUR, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


def without(env: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def values_of(env: Mapping[str, str]) -> tuple[object, ...]:
    """(rank, size, local rank, local size, node rank, nodes, rendezvous, launcher)."""
    world = World.from_env(env)
    rendezvous = f"{world.master_addr}:{world.master_port}" if world.master_addr else None
    return (
        *(world.rank, world.size, world.local_rank, world.local_size, world.node_rank, world.nodes),
        *(rendezvous, world.launcher),
    )


# ---------------------------------------------------------------- ranks


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({}, (0, 1, 0, 1, 0, 1, None, "single"), id="no launcher"),
        pytest.param(TORCHRUN, (3, 4, 1, 2, 1, 2, "n1:29500", "torchrun"), id="torchrun"),
        pytest.param({**STEP, **TORCHRUN}, (3, 4, 1, 2, 1, 2, "n1:29500", "torchrun"), id="torchrun under srun"),
        pytest.param(COMPLETE, (3, 4, 1, 4, 0, 1, "n1:29500", "environment"), id="complete"),
        pytest.param(
            {**COMPLETE, "LOCAL_WORLD_SIZE": "2"}, (3, 4, 1, 2, 1, 2, "n1:29500", "environment"), id="two nodes"
        ),
        pytest.param(
            {**COMPLETE, "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"},
            (3, 4, 1, 2, 0, 2, "n1:29500", "environment"),
            id="two nodes, node rank not in the order of the ranks",
        ),
        pytest.param(
            {**COMPLETE, "LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": "0"},
            (3, 4, 0, 3, 1, 2, "n1:29500", "environment"),
            id="uneven nodes",
        ),
        pytest.param(STEP, (5, 7, 1, 2, 2, 4, "n08:24711", "slurm"), id="step"),
        pytest.param(
            {**STEP, "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"},
            (6, 7, 0, 1, 3, 4, "n08:24711", "slurm"),
            id="step, the last node has fewer tasks",
        ),
        pytest.param(
            {**STEP, "SLURM_NODEID": "1", "SLURM_DISTRIBUTION": "cyclic"},
            (5, 7, 1, 2, 1, 4, "n08:24711", "slurm"),
            id="cyclic: the node is not rank // local size",
        ),
        pytest.param(
            {**STEP, "SLURM_DISTRIBUTION": "arbitrary", "MASTER_ADDR": "x1"},
            (5, 7, 1, 2, 2, 4, "x1:24711", "slurm"),
            id="arbitrary: the host of task 0 is MASTER_ADDR",
        ),
        pytest.param(
            {**STEP, "SLURM_GTIDS": "1,3,5"},
            (5, 7, 1, 3, 2, 4, "n08:24711", "slurm"),
            id="SLURM_GTIDS lists the tasks of this node",
        ),
        pytest.param({**STEP, "MASTER_ADDR": "n10"}, (5, 7, 1, 2, 2, 4, "n10:24711", "slurm"), id="MASTER_ADDR alone"),
        pytest.param({**STEP, "MASTER_PORT": "1234"}, (5, 7, 1, 2, 2, 4, "n08:1234", "slurm"), id="MASTER_PORT alone"),
        pytest.param(
            {**STEP, "RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "2"},
            (5, 7, 1, 7, 0, 1, "n1:2", "environment"),
            id="step whose script also sets the rank variables",
        ),
        pytest.param(without(STEP, "SLURM_JOB_ID"), (5, 7, 1, 2, 2, 4, "n08:29500", "slurm"), id="step without job ID"),
        pytest.param(
            without(STEP, "SLURM_STEP_ID"), (5, 7, 1, 2, 2, 4, "n08:24711", "slurm"), id="step without step ID"
        ),
        pytest.param({**FIRST_OF_FOUR, "SLURM_NTASKS": "1"}, (0, 1, 0, 1, 0, 1, None, "single"), id="only task"),
        pytest.param(dict.fromkeys(TORCHRUN_VARIABLES, ""), (0, 1, 0, 1, 0, 1, None, "single"), id="empty variables"),
    ],
)
def test_the_rank_comes_from_one_launcher(env: Mapping[str, str], expected: tuple[object, ...]) -> None:
    assert values_of(env) == expected


NO_SRUN = "inside SLURM job 4711, but not started by srun: running as one process; use `srun python ...` for all tasks"
IF_BY_SRUN = " (if srun did start it: let the wrapper or container pass SLURM_STEP_ID on)"


@pytest.mark.parametrize(
    ("extra", "note"),
    [
        pytest.param({}, NO_SRUN, id="salloc shell"),
        pytest.param({**FIRST, "SLURM_NTASKS": ""}, NO_SRUN, id="batch script"),
        pytest.param(FIRST, NO_SRUN + IF_BY_SRUN, id="batch script with -n"),
        pytest.param({**FIRST, "SLURM_STEP_ID": "4294967290"}, NO_SRUN, id="interactive step"),
        pytest.param({**FIRST, "SLURM_STEP_ID": "4294967291"}, NO_SRUN, id="batch step"),
        pytest.param(
            {**FIRST, "SLURM_STEP_NUM_TASKS": "1"}, NO_SRUN + IF_BY_SRUN, id="interactive step without step ID"
        ),
    ],
)
def test_a_process_not_started_by_srun_is_rank_0_of_1_with_a_note(extra: Mapping[str, str], note: str) -> None:
    assert values_of({**JOB, **extra}) == (0, 1, 0, 1, 0, 1, None, "single")
    assert World.from_env({**JOB, **extra}).notes == (note,)


@pytest.mark.parametrize("env", [{}, TORCHRUN, STEP, {**COMPLETE, "LOCAL_WORLD_SIZE": "2"}])
def test_as_env_passes_the_rank_on_in_torchruns_variables(env: Mapping[str, str]) -> None:
    world = World.from_env(env)
    passed_on = as_env(world, "run-1")
    assert values_of(passed_on)[:6] == values_of(env)[:6]
    assert as_env(World.from_env(passed_on), "run-1") == passed_on


def test_an_assumed_local_world_size_is_noted() -> None:
    assert World.from_env(COMPLETE).notes == ("LOCAL_WORLD_SIZE is not set: assuming that all ranks are on this node",)
    assert World.from_env({**COMPLETE, "LOCAL_WORLD_SIZE": "4"}).notes == ()
    assert World.from_env({}).notes == World.from_env(TORCHRUN).notes == World.from_env(STEP).notes == ()


def test_rank_0_prints_a_note_once() -> None:
    """In a separate interpreter with its own environment."""
    code = "from distributed.world import World; World.from_env(); World.from_env()"
    for env, notes in ((COMPLETE, 0), ({**COMPLETE, "RANK": "0"}, 1), ({**JOB, **FIRST}, 1), ({}, 0)):
        result = subprocess.run(
            [sys.executable, "-S", "-c", code], env=env, cwd=KIT, capture_output=True, text=True, check=True
        )
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == notes
        assert result.stderr == "" or result.stderr.startswith("warning: ")


SUBSETS = [subset for size in range(1, len(TORCHRUN_VARIABLES)) for subset in combinations(TORCHRUN_VARIABLES, size)]


@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_incomplete_torchrun_variables_are_an_error_that_names_the_missing_ones(subset: tuple[str, ...]) -> None:
    missing = ", ".join(name for name in TORCHRUN_VARIABLES if name not in subset)
    message = error_message({name: COMPLETE[name] for name in subset})
    assert f"set, but not {missing}: start this process with torchrun or srun, or unset {' '.join(subset)}" in message
    assert all(f"{name}={COMPLETE[name]}" in message for name in subset)


@pytest.mark.parametrize("subset", [subset for subset in SUBSETS if not set(subset) <= {"MASTER_ADDR", "MASTER_PORT"}])
def test_slurm_variables_do_not_complete_torchrun_variables(subset: tuple[str, ...]) -> None:
    assert "set, but not " in error_message({**STEP, **{name: COMPLETE[name] for name in subset}})


def error_message(env: Mapping[str, str]) -> str:
    with pytest.raises(WorldError) as error:
        World.from_env(env)
    return str(error.value)


NOT_SET = "is not set, though other variables of its launcher are: start from a clean shell"
DROPPED = "is not set, though other variables of its launcher are: let the wrapper or container pass on all of SLURM's"
NO_INTEGER = "is not a non-negative integer: unset it, or start this process with torchrun or srun"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        *((without(TORCHRUN, name), f"{name} {NOT_SET}") for name in ("LOCAL_WORLD_SIZE", "GROUP_RANK")),
        *((without(STEP, name), f"{name} {DROPPED}") for name in ("SLURM_LOCALID", "SLURM_PROCID")),
        *((env, f"SLURM_NODEID {DROPPED}") for env in (FOUR, FIRST_OF_FOUR, {**FIRST_OF_FOUR, "SLURM_JOB_ID": "4711"})),
        (without(STEP, "SLURM_STEP_TASKS_PER_NODE"), f"SLURM_TASKS_PER_NODE {DROPPED}"),
        (without(STEP, "SLURM_NODEID"), f"SLURM_NODEID {DROPPED}"),
        (
            without({**STEP, "SLURM_NODELIST": "n[08-12]", "SLURM_JOB_NODELIST": "n[08-12]"}, "SLURM_STEP_NODELIST"),
            "the host of task 0 is not known (SLURM_STEP_NODELIST is not set, and the step has 4 of the job's 5 nodes):"
            " let the wrapper or container pass it on, or export MASTER_ADDR=<host of task 0>",
        ),
        (
            {**STEP, "SLURM_STEP_NUM_TASKS": "8"},
            "SLURM reports 8 tasks, but 2,2,2,1 on its nodes: the environment mixes two job steps; start from a clean",
        ),
        *(
            ({**TORCHRUN, name: "x"}, f"{name}='x' {NO_INTEGER}")
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        ),
        *(({**COMPLETE, "RANK": value}, f"RANK={value!r} {NO_INTEGER}") for value in ("-1", "1.0", " 1", "²", "0x1")),
        ({**COMPLETE, "NODE_RANK": "x"}, f"NODE_RANK='x' {NO_INTEGER}"),
        *(({**STEP, name: "x"}, f"{name}='x' {NO_INTEGER}") for name in ("SLURM_PROCID", "SLURM_NODEID")),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x"}, "SLURM_STEP_TASKS_PER_NODE: '2(x' is not a number of tasks: "),
        ({**STEP, "SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST: 'n[1-': its brackets do not match: "),
        ({**COMPLETE, "WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not a positive integer"),
        ({**COMPLETE, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0' is not a positive integer"),
        ({**COMPLETE, "MASTER_PORT": "x"}, f"MASTER_PORT='x' {NO_INTEGER}"),
        ({**TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT=65536 is not a port: the highest is 65535"),
        ({**COMPLETE, "RANK": "4"}, "rank 4 is not one of 0 to 3 (source: environment): the environment mixes two"),
        ({**COMPLETE, "LOCAL_RANK": "4"}, "local rank 4 is not one of 0 to 3"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 is not one of 0 to 1 (source: torchrun)"),
        ({**TORCHRUN, "GROUP_RANK": "2"}, "node rank 2 is not one of 0 to 1"),
        ({**STEP, "SLURM_PROCID": "7"}, "rank 7 is not one of 0 to 6 (source: slurm)"),
        ({**STEP, "SLURM_NODEID": "3"}, "local rank 1 is not one of 0 to 0"),
        ({**STEP, "SLURM_NODEID": "4"}, "SLURM_NODEID=4, but the step has 4 nodes with 2,2,2,1 tasks: the environ"),
        (
            {**STEP, **COMPLETE},
            "RANK=3 and WORLD_SIZE=4 are set, but SLURM reports task 5 of 7: they are left over from another launch; "
            "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT before srun",
        ),
        ({**STEP, "RANK": "5"}, "RANK=5 is set, but not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        (
            {**STEP, "SLURM_DISTRIBUTION": "arbitrary", "SLURM_ARBITRARY_NODELIST": "x1,n08"},
            "the host of task 0 is not known (distribution arbitrary, and SLURM_ARBITRARY_NODELIST is sorted): "
            "export MASTER_ADDR=<host of task 0> before srun",
        ),
    ],
)
def test_contradictory_or_invalid_values_are_refused(env: Mapping[str, str], message: str) -> None:
    assert error_message(env).startswith(message)


VALUES = st.sampled_from(
    ["", "0", "1", "2", "7", "x", "-1", "²", "٣", "2(x3),1", "0", "n1", "n[1-2]", "n[", "65536", "arbitrary"]
)
HET_GROUP_NODELIST = "SLURM_JOB_NODELIST_HET_GROUP_0"
NAMES = sorted(
    {
        *(*TORCHRUN, *STEP, "NODE_RANK", "SLURM_TASKS_PER_NODE", "SLURM_NNODES", "SLURM_GTIDS"),
        *("SLURM_DISTRIBUTION", "SLURM_HET_SIZE", HET_GROUP_NODELIST),
    }
)


@settings(deadline=None, max_examples=500)
@given(
    st.sampled_from([{}, COMPLETE, TORCHRUN, STEP, FOUR]),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6),
)
def test_any_environment_gives_a_valid_rank_or_an_error(base: dict[str, str], extra: dict[str, str]) -> None:
    env = {**base, **extra}
    try:
        world = World.from_env(env)
    except WorldError as error:
        assert re.search(r": \S|; unset|before srun", str(error)), "the message has a remedy"  # noqa: PT017
    else:
        assert 0 <= world.rank < world.size
        assert 0 <= world.local_rank < world.local_size
        assert 0 <= world.node_rank < world.nodes
        assert world.master_addr or world.size == 1
        assert world.size > 1 or env.get("SLURM_PROCID", "0") in ("", "0") or world.launcher != "single"


# ---------------------------------------------------------------- recorded environments of a real SLURM


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["name"])
def test_recorded_slurm_environments_give_the_recorded_ranks(record: dict[str, Any]) -> None:
    environments = [{**record["common"], **process["environment"]} for process in record["processes"]]
    assert environments
    if record["expected"] == "positions":
        for env, process in zip(environments, record["processes"], strict=True):
            world = World.from_env(env)
            assert {name: getattr(world, name) for name in process["position"]} == process["position"]
        assert len({World.from_env(env).master_port for env in environments}) == 1
    elif record["expected"] == "single process":
        (world,) = map(World.from_env, environments)
        assert (world.size, world.launcher, len(world.notes)) == (1, "single", 1)
    else:
        assert all(record["expected"] in error_message(env) for env in environments)


TASKS = [
    ({**record["common"], **process["environment"]}, process["position"])
    for record in RECORDS
    for process in record["processes"]
    if record["expected"] == "positions" and "TORCHELASTIC_RUN_ID" not in record["common"]
]


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_a_subset_of_a_tasks_environment_gives_its_rank_or_an_error(data: st.DataObject) -> None:
    env, expected = data.draw(st.sampled_from(TASKS))
    selected = data.draw(st.sets(st.sampled_from(sorted(env))))
    subset = {name: env[name] for name in (selected if data.draw(st.booleans()) else env.keys() - selected)}
    try:
        world = World.from_env(subset)
    except WorldError:
        return
    if world.launcher == "single":
        assert subset.get("SLURM_PROCID", "0") == "0"
        return
    assert (world.rank, world.size, world.local_rank) == (expected["rank"], expected["size"], expected["local_rank"])


def port(job: int, step: int) -> int:
    return slurm_port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})


@given(st.integers(1, 10**9), st.integers(0, 10**6))
def test_the_port_of_a_step_is_below_the_ephemeral_range(job: int, step: int) -> None:
    assert 20_000 <= port(job, step) < 30_000


@given(st.integers(1, 10**9), st.integers(0, 10**6))
def test_concurrent_jobs_and_steps_have_different_ports(job: int, step: int) -> None:
    neighbours = [(job, step), *((job + next_job, step) for next_job in range(1, 10)), (job, step + 1), (job, step + 2)]
    assert len({port(*neighbour) for neighbour in neighbours}) == len(neighbours)
