"""A process that does not know its place trains the wrong thing, or waits for ever.

Held here: the place is read from the whole environment of one launcher. An incomplete environment, a stale one or one
of two launches is an error that names what is missing. So is a part of SLURM's variables, where a wrapper or a
container has dropped the rest: such a process never becomes rank 0 of 1 silently.
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
STEP = {  # task 5 of 7, the third node's second, as 2(x3),1 lays them out in blocks
    **JOB, "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "n[08-10],x1",
}  # fmt: skip
FIRST = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
# What a wrapper or container passes on that drops the rest: here of task 3 of 4, the second one on n2.
FOUR = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODELIST": "n[1-2]"}
FIRST_OF_FOUR = {**FOUR, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


def without(env: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def place(env: Mapping[str, str]) -> tuple[object, ...]:
    """(rank, size, local rank, local size, node rank, nodes, rendezvous, launcher)."""
    world = World.from_env(env)
    rendezvous = f"{world.master_addr}:{world.master_port}" if world.master_addr else None
    return (
        *(world.rank, world.size, world.local_rank, world.local_size, world.node_rank, world.nodes),
        *(rendezvous, world.launcher),
    )


# ---------------------------------------------------------------- which process am I?


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({}, (0, 1, 0, 1, 0, 1, None, "single"), id="alone"),
        pytest.param(TORCHRUN, (3, 4, 1, 2, 1, 2, "n1:29500", "torchrun"), id="torchrun"),
        pytest.param({**STEP, **TORCHRUN}, (3, 4, 1, 2, 1, 2, "n1:29500", "torchrun"), id="torchrun under srun"),
        pytest.param(COMPLETE, (3, 4, 1, 4, 0, 1, "n1:29500", "environment"), id="complete"),
        pytest.param(
            {**COMPLETE, "LOCAL_WORLD_SIZE": "2"}, (3, 4, 1, 2, 1, 2, "n1:29500", "environment"), id="two nodes"
        ),
        pytest.param(
            {**COMPLETE, "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"},
            (3, 4, 1, 2, 0, 2, "n1:29500", "environment"),
            id="two nodes, not in the order of the ranks",
        ),
        pytest.param(
            {**COMPLETE, "LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": "0"},
            (3, 4, 0, 3, 1, 2, "n1:29500", "environment"),
            id="uneven nodes",
        ),
        pytest.param(STEP, (5, 7, 1, 2, 2, 4, "n08:24711", "slurm"), id="a step"),
        pytest.param(
            {**STEP, "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"},
            (6, 7, 0, 1, 3, 4, "n08:24711", "slurm"),
            id="a step, the last and smaller node",
        ),
        pytest.param(
            {**STEP, "SLURM_NODEID": "1", "SLURM_DISTRIBUTION": "cyclic"},
            (5, 7, 1, 2, 1, 4, "n08:24711", "slurm"),
            id="cyclic: the node is not rank // local size",
        ),
        pytest.param(
            {**STEP, "SLURM_DISTRIBUTION": "arbitrary", "MASTER_ADDR": "x1"},
            (5, 7, 1, 2, 2, 4, "x1:24711", "slurm"),
            id="arbitrary: only a person knows where task 0 is",
        ),
        pytest.param(
            {**STEP, "SLURM_GTIDS": "1,3,5"}, (5, 7, 1, 3, 2, 4, "n08:24711", "slurm"), id="the tasks of this very node"
        ),
        pytest.param({**STEP, "MASTER_ADDR": "n10"}, (5, 7, 1, 2, 2, 4, "n10:24711", "slurm"), id="MASTER_ADDR alone"),
        pytest.param({**STEP, "MASTER_PORT": "1234"}, (5, 7, 1, 2, 2, 4, "n08:1234", "slurm"), id="MASTER_PORT alone"),
        pytest.param(
            {**STEP, "RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "2"},
            (5, 7, 1, 7, 0, 1, "n1:2", "environment"),
            id="a step whose script sets what SLURM says as well",
        ),
        pytest.param(
            without(STEP, "SLURM_JOB_ID"), (5, 7, 1, 2, 2, 4, "n08:29500", "slurm"), id="a step without its job"
        ),
        pytest.param(
            without(STEP, "SLURM_STEP_ID"), (5, 7, 1, 2, 2, 4, "n08:24711", "slurm"), id="a step without its number"
        ),
        pytest.param({**FIRST_OF_FOUR, "SLURM_NTASKS": "1"}, (0, 1, 0, 1, 0, 1, None, "single"), id="the only task"),
        pytest.param(dict.fromkeys(TORCHRUN_VARIABLES, ""), (0, 1, 0, 1, 0, 1, None, "single"), id="set, but empty"),
    ],
)
def test_the_place_is_that_of_one_launcher(env: Mapping[str, str], expected: tuple[object, ...]) -> None:
    assert place(env) == expected


ALONE = "inside SLURM job 4711, but not started by srun: running as one process; use `srun python ...` for all tasks"
PERHAPS = " (if srun did start it: let the wrapper or container pass SLURM_STEP_ID on)"


@pytest.mark.parametrize(
    ("more", "note"),
    [
        pytest.param({}, ALONE, id="in an salloc shell"),
        pytest.param({**FIRST, "SLURM_NTASKS": ""}, ALONE, id="in a batch script"),
        pytest.param(FIRST, ALONE + PERHAPS, id="in a batch script with -n"),
        pytest.param({**FIRST, "SLURM_STEP_ID": "4294967290"}, ALONE, id="in an interactive step"),
        pytest.param({**FIRST, "SLURM_STEP_ID": "4294967291"}, ALONE, id="in the batch step"),
        pytest.param(
            {**FIRST, "SLURM_STEP_NUM_TASKS": "1"}, ALONE + PERHAPS, id="in an interactive step without its number"
        ),
    ],
)
def test_by_hand_in_an_allocation_is_one_process_and_a_note(more: Mapping[str, str], note: str) -> None:
    assert place({**JOB, **more}) == (0, 1, 0, 1, 0, 1, None, "single")
    assert World.from_env({**JOB, **more}).notes == (note,)


@pytest.mark.parametrize("env", [{}, TORCHRUN, STEP, {**COMPLETE, "LOCAL_WORLD_SIZE": "2"}])
def test_a_place_can_be_passed_on_in_torchruns_variables(env: Mapping[str, str]) -> None:
    world = World.from_env(env)
    passed_on = as_env(world, "run-1")
    assert place(passed_on)[:6] == place(env)[:6]
    assert as_env(World.from_env(passed_on), "run-1") == passed_on


def test_a_guess_is_noted() -> None:
    assert World.from_env(COMPLETE).notes == ("LOCAL_WORLD_SIZE is not set: taking all ranks to be on this node",)
    assert World.from_env({**COMPLETE, "LOCAL_WORLD_SIZE": "4"}).notes == ()
    assert World.from_env({}).notes == World.from_env(TORCHRUN).notes == World.from_env(STEP).notes == ()


def test_rank_0_prints_a_note_once() -> None:
    """In an interpreter of its own: the notes are those of its own environment."""
    code = "from distributed.world import World; World.from_env(); World.from_env()"
    for env, notes in ((COMPLETE, 0), ({**COMPLETE, "RANK": "0"}, 1), ({**JOB, **FIRST}, 1), ({}, 0)):
        ended = subprocess.run(
            [sys.executable, "-S", "-c", code], env=env, cwd=KIT, capture_output=True, text=True, check=True
        )
        assert ended.stdout == ""
        assert len(ended.stderr.splitlines()) == notes
        assert ended.stderr == "" or ended.stderr.startswith("warning: ")


HALVES = [half for size in range(1, len(TORCHRUN_VARIABLES)) for half in combinations(TORCHRUN_VARIABLES, size)]


@pytest.mark.parametrize("half", HALVES, ids="+".join)
def test_half_an_environment_names_the_missing_half(half: tuple[str, ...]) -> None:
    missing = ", ".join(name for name in TORCHRUN_VARIABLES if name not in half)
    message = refusal({name: COMPLETE[name] for name in half})
    assert f"set, but not {missing}: start this process with torchrun or srun, or unset {' '.join(half)}" in message
    assert all(f"{name}={COMPLETE[name]}" in message for name in half)


@pytest.mark.parametrize("half", [half for half in HALVES if not set(half) <= {"MASTER_ADDR", "MASTER_PORT"}])
def test_half_an_environment_is_not_mended_by_slurm(half: tuple[str, ...]) -> None:
    assert "set, but not " in refusal({**STEP, **{name: COMPLETE[name] for name in half}})


def refusal(env: Mapping[str, str]) -> str:
    with pytest.raises(WorldError) as refused:
        World.from_env(env)
    return str(refused.value)


CLEAN_SHELL = "is not set, though other variables of its launcher are: start from a clean shell"
DROPPED = "is not set, though other variables of its launcher are: let the wrapper or container pass on all of SLURM's"
NO_NUMBER = "is not a number: unset it, or start this process with torchrun or srun"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        *((without(TORCHRUN, name), f"{name} {CLEAN_SHELL}") for name in ("LOCAL_WORLD_SIZE", "GROUP_RANK")),
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
            "SLURM says 8 tasks, but 2,2,2,1 on its nodes: the environment mixes two job steps; start from a clean",
        ),
        *(
            ({**TORCHRUN, name: "x"}, f"{name}='x' {NO_NUMBER}")
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        ),
        *(({**COMPLETE, "RANK": value}, f"RANK={value!r} {NO_NUMBER}") for value in ("-1", "1.0", " 1", "²", "0x1")),
        ({**COMPLETE, "NODE_RANK": "x"}, f"NODE_RANK='x' {NO_NUMBER}"),
        *(({**STEP, name: "x"}, f"{name}='x' {NO_NUMBER}") for name in ("SLURM_PROCID", "SLURM_NODEID")),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x"}, "SLURM_STEP_TASKS_PER_NODE: '2(x' is not a number of tasks: "),
        ({**STEP, "SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST: 'n[1-': its brackets do not match: "),
        ({**COMPLETE, "WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not a number from 1 up"),
        ({**COMPLETE, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0' is not a number from 1 up"),
        ({**COMPLETE, "MASTER_PORT": "x"}, f"MASTER_PORT='x' {NO_NUMBER}"),
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
            "RANK=3 and WORLD_SIZE=4 are set, but SLURM says task 5 of 7: they are left over from another launch; "
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
def test_what_cannot_be_right_is_refused(env: Mapping[str, str], message: str) -> None:
    assert refusal(env).startswith(message)


SOME_VALUE = st.sampled_from(
    ["", "0", "1", "2", "7", "x", "-1", "²", "٣", "2(x3),1", "0", "n1", "n[1-2]", "n[", "65536", "arbitrary"]
)
COMPONENT = "SLURM_JOB_NODELIST_HET_GROUP_0"
NAMES = sorted(
    {
        *(*TORCHRUN, *STEP, "NODE_RANK", "SLURM_TASKS_PER_NODE", "SLURM_NNODES", "SLURM_GTIDS"),
        *("SLURM_DISTRIBUTION", "SLURM_HET_SIZE", COMPONENT),
    }
)


@settings(deadline=None, max_examples=500)
@given(
    st.sampled_from([{}, COMPLETE, TORCHRUN, STEP, FOUR]),
    st.dictionaries(st.sampled_from(NAMES), SOME_VALUE, max_size=6),
)
def test_any_environment_is_a_place_or_a_refusal(base: dict[str, str], more: dict[str, str]) -> None:
    env = {**base, **more}
    try:
        world = World.from_env(env)
    except WorldError as refused:
        assert re.search(r": \S|; unset|before srun", str(refused)), "it has a remedy"  # noqa: PT017
    else:
        assert 0 <= world.rank < world.size
        assert 0 <= world.local_rank < world.local_size
        assert 0 <= world.node_rank < world.nodes
        assert world.master_addr or world.size == 1
        assert world.size > 1 or env.get("SLURM_PROCID", "0") in ("", "0") or world.launcher != "single"


# ---------------------------------------------------------------- environments of a real SLURM, recorded


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["name"])
def test_the_environments_of_a_real_slurm_are_understood(record: dict[str, Any]) -> None:
    environments = [{**record["common"], **process["environment"]} for process in record["processes"]]
    assert environments
    if record["answer"] == "places":
        for env, process in zip(environments, record["processes"], strict=True):
            world = World.from_env(env)
            assert {name: getattr(world, name) for name in process["place"]} == process["place"]
        assert len({World.from_env(env).master_port for env in environments}) == 1
    elif record["answer"] == "alone":
        (world,) = map(World.from_env, environments)
        assert (world.size, world.launcher, len(world.notes)) == (1, "single", 1)
    else:
        assert all(record["answer"] in refusal(env) for env in environments)


TASKS = [
    ({**record["common"], **process["environment"]}, process["place"])
    for record in RECORDS
    for process in record["processes"]
    if record["answer"] == "places" and "TORCHELASTIC_RUN_ID" not in record["common"]
]


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_a_part_of_a_tasks_environment_gives_its_rank_or_a_refusal(data: st.DataObject) -> None:
    """Whatever part of it a wrapper passes on."""
    env, true = data.draw(st.sampled_from(TASKS))
    some = data.draw(st.sets(st.sampled_from(sorted(env))))
    rest = {name: env[name] for name in (some if data.draw(st.booleans()) else env.keys() - some)}
    try:
        world = World.from_env(rest)
    except WorldError:
        return
    if world.launcher == "single":
        assert rest.get("SLURM_PROCID", "0") == "0"
        return
    assert (world.rank, world.size, world.local_rank) == (true["rank"], true["size"], true["local_rank"])


def port(job: int, step: int) -> int:
    return slurm_port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})


@given(st.integers(1, 10**9), st.integers(0, 10**6))
def test_the_port_of_a_step_lies_below_the_ephemeral_ones(job: int, step: int) -> None:
    assert 20_000 <= port(job, step) < 30_000


@given(st.integers(1, 10**9), st.integers(0, 10**6))
def test_jobs_and_steps_that_run_side_by_side_have_ports_of_their_own(job: int, step: int) -> None:
    neighbours = [(job, step), *((job + next_job, step) for next_job in range(1, 10)), (job, step + 1), (job, step + 2)]
    assert len({port(*neighbour) for neighbour in neighbours}) == len(neighbours)
