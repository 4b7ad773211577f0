"""Tests of World.from_env(), which reads the rank from the environment.

All values come from one launcher. An environment that is incomplete, stale or mixed from two launches is an error. A
task of srun for which a wrapper or container dropped some of SLURM's variables never silently becomes rank 0 of 1.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab.slurm_steps import positions

from distributed.world import LAYOUT_VARIABLES, TORCHRUN_VARIABLES, World, WorldError, as_env, slurm_port

KIT = Path(__file__).resolve().parents[1]
RECORDS = json.loads((KIT / "tests/slurm_environments.json").read_text())

COMPLETE = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
ONE_NODE = {**COMPLETE, "LOCAL_RANK": "3", "MASTER_ADDR": "127.0.0.1"}
TORCHRUN = {
    **COMPLETE, "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[08-10]", "SLURM_NODELIST": "n[08-10]", "SLURM_NTASKS": "7"}
STEP = {  # task 5 of 7, the second on the third node, with block distribution of 2(x3),1
    **JOB, "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "n[08-10],x1",
}  # fmt: skip
MASTER = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
OPEN_MPI = {  # rank 3 of 4, the second on n2; OMPI_COMM_WORLD_NODE_RANK is a local rank, not the rank of the node
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1", "PMIX_RANK": "3",
}  # fmt: skip
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
CRAY = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", "PALS_RANKID": "3"}
FLUX = {"PMI_RANK": "3", "PMI_SIZE": "4", "FLUX_TASK_RANK": "3", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "4"}
HOROVOD = {  # rank 9 of 32, the second on the second of four nodes
    "HOROVOD_RANK": "9", "HOROVOD_SIZE": "32", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "8",
}  # fmt: skip
DAEMON = {  # a daemon of mpirun in an allocation, or another process that starts the ranks of its node
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
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


RANKS: dict[str, tuple[Mapping[str, str], str]] = {
    "no launcher": ({}, "0 1 0 1 0 1 None single"),
    "torchrun": (TORCHRUN, "3 4 1 2 1 2 n1:29500 torchrun"),
    "torchrun under srun": ({**STEP, **TORCHRUN}, "3 4 1 2 1 2 n1:29500 torchrun"),
    "complete": (ONE_NODE, "3 4 3 4 0 1 127.0.0.1:29500 environment"),
    "two nodes": ({**COMPLETE, "LOCAL_WORLD_SIZE": "2"}, "3 4 1 2 1 2 n1:29500 environment"),
    "two nodes, node rank not in the order of the ranks": (
        {**COMPLETE, "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "NNODES": "2"}, "3 4 1 2 0 2 n1:29500 environment",
    ),
    "uneven nodes": ({**COMPLETE, "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "NODE_RANK": "1", "NNODES": "2"},
     "3 4 0 1 1 2 n1:29500 environment"),
    "DeepSpeed": ({**COMPLETE, "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2"},
     "3 4 1 2 1 2 n1:29500 environment"),
    "Ray Train": ({**COMPLETE, "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}, "3 4 1 2 1 2 n1:29500 environment"),
    "the node rank and the number of nodes": ({**COMPLETE, "GROUP_RANK": "1", "NNODES": "2"},
     "3 4 1 2 1 2 n1:29500 environment"),
    "cyclic on two nodes": ({**COMPLETE, "RANK": "2", "GROUP_WORLD_SIZE": "2"}, "2 4 1 2 0 2 n1:29500 environment"),
    "Open MPI, with the variables that the message names": (
        {**OPEN_MPI, **COMPLETE, "LOCAL_WORLD_SIZE": "2"}, "3 4 1 2 1 2 n1:29500 environment",
    ),
    "Flux, with the variables that the message names": (
        {**FLUX, **MASTER, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        "3 4 1 2 1 2 n1:29500 environment",
    ),
    "a single task of Flux": ({**FLUX, "PMI_RANK": "0", "PMI_SIZE": "1"}, "0 1 0 1 0 1 None single"),
    "mpirun -n 1": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}, "0 1 0 1 0 1 None single",
    ),
    "srun --mpi=pmi2": ({**STEP, "PMI_RANK": "5", "PMI_SIZE": "7"}, "5 7 1 2 2 4 n08:24711 slurm"),
    "ranks started by a task per node": ({**DAEMON, **COMPLETE}, "3 4 1 2 1 2 n1:29500 environment"),
    "ranks started by a single task": (
        {**JOB, **FIRST, **ONE_NODE, "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        "3 4 3 4 0 1 127.0.0.1:29500 environment",
    ),
    "step": (STEP, "5 7 1 2 2 4 n08:24711 slurm"),
    "step, the last node has fewer tasks": ({**STEP, "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"},
     "6 7 0 1 3 4 n08:24711 slurm"),
    "cyclic: the node is not rank // local size": ({**STEP, "SLURM_NODEID": "1", "SLURM_DISTRIBUTION": "cyclic"},
     "5 7 1 2 1 4 n08:24711 slurm"),
    "arbitrary: the host of task 0 is MASTER_ADDR": ({**STEP, "SLURM_DISTRIBUTION": "arbitrary", "MASTER_ADDR": "x1"},
     "5 7 1 2 2 4 x1:24711 slurm"),
    "SLURM_GTIDS lists the tasks of this node": ({**STEP, "SLURM_GTIDS": "1,3,5"}, "5 7 1 3 2 4 n08:24711 slurm"),
    "MASTER_ADDR alone": ({**STEP, "MASTER_ADDR": "n10"}, "5 7 1 2 2 4 n10:24711 slurm"),
    "MASTER_PORT alone": ({**STEP, "MASTER_PORT": "1234"}, "5 7 1 2 2 4 n08:1234 slurm"),
    "step whose wrapper or container also sets the rank variables": (
        {**STEP, "RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "2"},
        "5 7 1 2 2 4 n1:2 slurm",
    ),
    "cyclic step whose wrapper sets the ranks, each with a GPU of its own": (
        {**STEP, "SLURM_NODEID": "1", "LOCAL_WORLD_SIZE": "2", "RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "0",
         "MASTER_ADDR": "n1", "MASTER_PORT": "2"},
        "5 7 1 2 1 4 n1:2 slurm",
    ),
    "step whose wrapper sets some of the rank variables": (
        {**STEP, "RANK": "5", "WORLD_SIZE": "7", "MASTER_ADDR": "n1"}, "5 7 1 2 2 4 n1:24711 slurm",
    ),
    "four variables, block": (FOUR, "3 4 1 2 1 2 n1:29500 slurm"),
    "four variables, cyclic": ({**FOUR, "SLURM_PROCID": "2"}, "2 4 1 2 0 2 n1:29500 slurm"),
    "four variables, task 0": (FIRST_OF_FOUR, "0 4 0 2 0 2 n1:29500 slurm"),
    "four variables, one node": ({**FOUR, "SLURM_NODELIST": "n1", "SLURM_LOCALID": "3"}, "3 4 3 4 0 1 n1:29500 slurm"),
    "four variables, one task per node": ({**FOUR, "SLURM_NODELIST": "n[1-4]", "SLURM_LOCALID": "0"},
     "3 4 0 1 3 4 n1:29500 slurm"),
    "four variables and the name of the node": (
        {**FOUR, "SLURM_NTASKS": "6", "SLURM_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n2"},
        "3 6 1 2 1 3 n1:29500 slurm",
    ),
    "step without job ID": (without(STEP, "SLURM_JOB_ID"), "5 7 1 2 2 4 n08:29500 slurm"),
    "step without step ID": (without(STEP, "SLURM_STEP_ID"), "5 7 1 2 2 4 n08:24711 slurm"),
    "only task": ({**FIRST_OF_FOUR, "SLURM_NTASKS": "1"}, "0 1 0 1 0 1 None single"),
    "empty variables": (dict.fromkeys(TORCHRUN_VARIABLES, ""), "0 1 0 1 0 1 None single"),
}  # fmt: skip


@pytest.mark.parametrize(("env", "expected"), RANKS.values(), ids=RANKS)
def test_the_rank_comes_from_one_launcher(env: Mapping[str, str], expected: str) -> None:
    assert " ".join(map(str, values_of(env))) == expected


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
        pytest.param({**FIRST, "SLURM_STEP_NUM_TASKS": "1"}, NO_SRUN + IF_BY_SRUN,
         id="interactive step without step ID"),
        pytest.param({**FIRST, "SLURM_GTIDS": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, NO_SRUN,
         id="batch script of a job that was submitted inside a step"),
    ],
)  # fmt: skip
def test_a_process_not_started_by_srun_is_rank_0_of_1_with_a_note(extra: Mapping[str, str], note: str) -> None:
    assert values_of({**JOB, **extra}) == (0, 1, 0, 1, 0, 1, None, "single")
    assert World.from_env({**JOB, **extra}).notes == (note,)


@pytest.mark.parametrize("env", [{}, TORCHRUN, STEP, {**COMPLETE, "LOCAL_WORLD_SIZE": "2"}])
def test_from_env_reads_the_same_rank_from_the_variables_that_as_env_returns(env: Mapping[str, str]) -> None:
    world = World.from_env(env)
    passed_on = as_env(world, "run-1")
    assert values_of(passed_on)[:6] == values_of(env)[:6]
    assert as_env(World.from_env(passed_on), "run-1") == passed_on


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "LOCALHOST"])
def test_a_loopback_address_proves_that_all_ranks_are_on_this_node(address: str) -> None:
    hosts = [0, 0, 0, 0]
    truth = [position(hosts, rank) for rank in range(4)]
    assert derived([{**complete(at), "MASTER_ADDR": address} for at in truth]) == truth


@pytest.mark.parametrize("address", ["n1", "10.0.0.1", "localhost.example.org", "0.0.0.0"])
@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1], [0, 1, 0, 1], [0, 0]])
def test_without_a_layout_or_a_loopback_address_all_ranks_are_refused_alike(hosts: list[int], address: str) -> None:
    for rank in range(len(hosts)):
        message = error_message({**complete(position(hosts, rank)), "MASTER_ADDR": address})
        assert "is not known: export LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, as torchrun does" in message


def test_the_only_rank_needs_no_layout() -> None:
    assert World.from_env(complete(position([0], 0))).nodes == 1


def test_a_process_outside_an_allocation_or_started_by_srun_gets_no_note() -> None:
    assert World.from_env(ONE_NODE).notes == World.from_env({**ONE_NODE, "LOCAL_WORLD_SIZE": "4"}).notes == ()
    assert World.from_env({}).notes == World.from_env(TORCHRUN).notes == World.from_env(STEP).notes == ()


def test_rank_0_prints_a_note_once() -> None:
    code = "from distributed.world import World; World.from_env(); World.from_env()"
    for env, notes in (
        ({**ONE_NODE, "RANK": "0", "LOCAL_RANK": "0"}, 0),
        ({**JOB, **FIRST}, 1),
        ({}, 0),
    ):
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
STALE = "RANK=0 and WORLD_SIZE=4 are set, but SLURM reports"
NO_INTEGER = "is not a non-negative integer: unset it, or start this process with torchrun or srun"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        *((without(TORCHRUN, name), f"{name} {NOT_SET}") for name in ("LOCAL_WORLD_SIZE", "GROUP_RANK")),
        *((without(STEP, name), f"{name} {DROPPED}") for name in ("SLURM_LOCALID", "SLURM_PROCID")),
        *(
            ({**env, **extra}, f"SLURM_NODEID {DROPPED}")
            for env in (FOUR, FIRST_OF_FOUR, {**FIRST_OF_FOUR, "SLURM_JOB_ID": "4711"})
            for extra in ({"SLURM_NODELIST": "n[1-3]"}, {"SLURM_NODELIST": "n[1-3]", "SLURM_NTASKS": "6"})
        ),
        ({**FOUR, "SLURM_PROCID": "0"}, f"SLURM_NODEID {DROPPED}"),
        (without(STEP, "SLURM_STEP_TASKS_PER_NODE"), f"SLURM_TASKS_PER_NODE {DROPPED}"),
        (without(STEP, "SLURM_NODEID"), f"SLURM_NODEID {DROPPED}"),
        (without({**STEP, "SLURM_NODELIST": "n[08-12]", "SLURM_JOB_NODELIST": "n[08-12]"}, "SLURM_STEP_NODELIST"),
         "the host of task 0 is not known (SLURM_STEP_NODELIST is not set, and the step has 4 of the job's 5 nodes):"
         " let the wrapper or container pass it on, or export MASTER_ADDR=<host of task 0>"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "8"},
         "SLURM reports 8 tasks, but 2,2,2,1 on its nodes: the environment mixes two job steps; start from a clean"),
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
        *(
            ({**env, "MASTER_PORT": port}, f"MASTER_PORT={port} is not a port: give one from 1 to 65535")
            for env in (TORCHRUN, ONE_NODE, STEP)
            for port in ("0", "65536")
        ),
        ({**COMPLETE, "RANK": "4"}, "rank 4 is not one of 0 to 3 (source: environment): the environment mixes two"),
        ({**COMPLETE, "LOCAL_RANK": "4"}, "local rank 4 is not one of 0 to 3"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 is not one of 0 to 1 (source: torchrun)"),
        ({**TORCHRUN, "GROUP_RANK": "2"}, "node rank 2 is not one of 0 to 1"),
        ({**STEP, "SLURM_PROCID": "7"}, "rank 7 is not one of 0 to 6 (source: slurm)"),
        ({**STEP, "SLURM_NODEID": "3"}, "local rank 1 is not one of 0 to 0"),
        ({**STEP, "SLURM_NODEID": "4"}, "SLURM_NODEID=4, but the step has 4 nodes with 2,2,2,1 tasks: the environ"),
        ({**STEP, **COMPLETE},
         "RANK=3 and WORLD_SIZE=4 are set, but SLURM reports task 5 of 7: they are left over from another launch; "
         "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT before srun"),
        *(
            (
                {**COMPLETE, **extra},
                f"the node of rank 3 of 4 with local rank 1 is not known{given}: export {missing}, as",
            )
            for extra, given, missing in (
                ({}, "", "LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE"),
                ({"NODE_RANK": "1"}, " from node rank 1", "LOCAL_WORLD_SIZE, GROUP_WORLD_SIZE"),
                ({"LOCAL_WORLD_SIZE": "3"}, " from local size 3", "GROUP_RANK, GROUP_WORLD_SIZE"),
                ({"LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}, " from local size 2, node rank 0", "GROUP_WORLD_SIZE"),
            )
        ),
        ({**ONE_NODE, "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "NNODES": "2"},
         "rank 3 of 4 with local rank 3 does not fit local size 4, node rank 1, number of nodes 2: the environment"),
        ({**COMPLETE, "LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "4"}, "LOCAL_WORLD_SIZE=2 and LOCAL_SIZE=4 differ: the"),
        ({**STEP, "RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "3", **MASTER},
         "LOCAL_RANK=3, but SLURM_LOCALID=1: the environment mixes two launches; start from a clean shell"),
        *(
            (
                {**without(env, "SLURM_STEP_ID"), **COMPLETE, "RANK": "0", "LOCAL_RANK": "0"},
                f"{STALE} task {task}: they",
            )
            for env, task in ((STEP, "5 of 7"), (DAEMON, "1 of 2"), (FOUR | {"SLURM_NTASKS": "3"}, "3 of 3"))
        ),
        *(
            (
                {**env, **given},
                f"{rank}={env[rank]} and {size}={env[size]} are set, but not {missing}: export RANK=${rank}, "
                f"WORLD_SIZE=${size}, {local}{masters} in each process, or unset {rank} {size} to run it alone",
            )
            for env, rank, size, local in (
                (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                 "LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK, LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE"),
                (HYDRA, "PMI_RANK", "PMI_SIZE", "LOCAL_RANK=$MPI_LOCALRANKID, LOCAL_WORLD_SIZE=$MPI_LOCALNRANKS"),
                (CRAY, "PMI_RANK", "PMI_SIZE", "LOCAL_RANK=$PMI_LOCAL_RANK, LOCAL_WORLD_SIZE=$PMI_LOCAL_SIZE"),
                (HOROVOD, "HOROVOD_RANK", "HOROVOD_SIZE",
                 "LOCAL_RANK=$HOROVOD_LOCAL_RANK, LOCAL_WORLD_SIZE=$HOROVOD_LOCAL_SIZE"),
                ({**DAEMON, **HYDRA}, "PMI_RANK", "PMI_SIZE",
                 "LOCAL_RANK=$MPI_LOCALRANKID, LOCAL_WORLD_SIZE=$MPI_LOCALNRANKS"),
                (FLUX, "PMI_RANK", "PMI_SIZE",
                 "LOCAL_RANK=<rank on this node> and LOCAL_WORLD_SIZE=<ranks on this node>"),
            )
            for given, missing, masters in (
                (MASTER, "RANK, WORLD_SIZE, LOCAL_RANK", ""),
                ({}, ", ".join(TORCHRUN_VARIABLES), ", MASTER_ADDR=<host of rank 0>, MASTER_PORT=<a free port>"),
            )
        ),
        ({**COMPLETE, "RANK": "9", "WORLD_SIZE": "32", "NNODES": "4"},
         "the node of rank 9 of 32 with local rank 1 is not known from number of nodes 4: export GROUP_RANK, as"),
        (without({**HYDRA, **MASTER}, "PMI_SIZE"), f"PMI_SIZE {NOT_SET}"),
        *(
            ({name: "0"}, f"{name}=0 is set, but not {', '.join(TORCHRUN_VARIABLES)}: start this process with")
            for name in ("PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK")
        ),
        ({**STEP, "RANK": "5"}, "RANK=5 is set, but not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({**STEP, "SLURM_DISTRIBUTION": "arbitrary", "SLURM_ARBITRARY_NODELIST": "x1,n08"},
         "the host of task 0 is not known (distribution arbitrary, and SLURM_ARBITRARY_NODELIST is sorted): "
         "export MASTER_ADDR=<host of task 0> before srun"),
    ],
)  # fmt: skip
def test_contradictory_or_invalid_values_are_refused(env: Mapping[str, str], message: str) -> None:
    assert error_message(env).startswith(message)


def test_a_process_that_lacks_only_the_local_rank_may_export_it() -> None:
    env = without(COMPLETE, "LOCAL_RANK")
    exports = ", or export LOCAL_RANK=<rank on this node> and LOCAL_WORLD_SIZE=<ranks on this node>"
    assert error_message(env).endswith(exports)
    assert World.from_env({**env, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}).node_rank == 3


VALUES = st.sampled_from(
    ["", "0", "1", "2", "7", "x", "-1", "²", "٣", "2(x3),1", "0", "n1", "n[1-2]", "n[", "65536", "arbitrary"]
)
HET_GROUP_NODELIST = "SLURM_JOB_NODELIST_HET_GROUP_0"
NAMES = sorted(
    {
        *(*TORCHRUN, *STEP, *LAYOUT_VARIABLES, "SLURM_TASKS_PER_NODE", "SLURM_NNODES", "SLURM_GTIDS"),
        *("SLURM_DISTRIBUTION", "SLURM_HET_SIZE", HET_GROUP_NODELIST, "SLURMD_NODENAME", *OPEN_MPI, *HYDRA),
        *(*HOROVOD, *CRAY, *FLUX),
    }
)


@settings(deadline=None, max_examples=500)
@given(
    st.sampled_from([{}, COMPLETE, TORCHRUN, STEP, FOUR, DAEMON, OPEN_MPI, {**HYDRA, **MASTER}, HOROVOD]),
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


# ---------------------------------------------------------------- layouts derived from a few variables


def position(hosts: Sequence[int], rank: int) -> dict[str, int]:
    """The position of a rank. hosts: the host of each rank. Nodes are numbered in the order of their first ranks."""
    order = list(dict.fromkeys(hosts))
    return {
        "rank": rank,
        "size": len(hosts),
        "local_rank": hosts[:rank].count(hosts[rank]),
        "local_size": hosts.count(hosts[rank]),
        "node_rank": order.index(hosts[rank]),
        "nodes": len(order),
    }


def four_variables(at: Mapping[str, int], listed: int) -> dict[str, str]:
    """The variables of FOUR for the rank at a position. listed: the number of nodes in SLURM_NODELIST."""
    return {
        "SLURM_PROCID": str(at["rank"]), "SLURM_NTASKS": str(at["size"]), "SLURM_LOCALID": str(at["local_rank"]),
        "SLURM_NODELIST": f"n[1-{listed}]",
    }  # fmt: skip


def complete(at: Mapping[str, int], *extra: str) -> dict[str, str]:
    """The variables of COMPLETE for the rank at a position. extra: keys of the position that also become variables."""
    names = {"local_size": "LOCAL_WORLD_SIZE", "node_rank": "NODE_RANK", "nodes": "NNODES"}
    ranks = {"RANK": at["rank"], "WORLD_SIZE": at["size"], "LOCAL_RANK": at["local_rank"]}
    return {name: str(value) for name, value in (ranks | {names[key]: at[key] for key in extra}).items()} | MASTER


def derived(environments: Sequence[Mapping[str, str]]) -> list[dict[str, int] | None]:
    """The position that each rank derives; None if its environment is refused."""
    found: list[dict[str, int] | None] = []
    for env in environments:
        try:
            world = World.from_env(env)
        except WorldError:
            found.append(None)
        else:
            found.append({name: getattr(world, name) for name in position([0], 0)})
    return found


def distribute(counts: Sequence[int], plane: int) -> list[int]:
    """The host of each rank. Blocks of `plane` ranks are placed on one host after the other; 1 is cyclic."""
    left, hosts = list(counts), []
    while any(left):
        for host, free in enumerate(left):
            hosts += [host] * min(free, plane)
            left[host] -= min(free, plane)
    return hosts


LAYOUTS = [  # all distributions of SLURM except arbitrary, on all and on some of the job's nodes
    (distribute(counts, plane), listed)
    for listed in (1, 2, 3, 4)
    for used in range(1, listed + 1)
    for counts in product(range(1, 5), repeat=used)
    for plane in (1, 2, 3, 4)
]


def test_no_training_starts_with_a_wrong_layout_derived_from_four_variables_of_slurm() -> None:
    """In any distribution, all ranks derive their true positions, or at least one is refused."""
    accepted = 0
    for hosts, listed in LAYOUTS:
        truth = [position(hosts, rank) for rank in range(len(hosts))]
        found = derived([four_variables(at, listed) for at in truth])
        assert None in found or found == truth, hosts
        accepted += found == truth
    assert accepted > 10


@pytest.mark.parametrize("extra", [("nodes",), ("node_rank", "nodes"), ("local_size", "node_rank", "nodes")])
def test_no_training_starts_with_a_wrong_layout_derived_from_torchruns_variables(extra: tuple[str, ...]) -> None:
    for hosts, _ in LAYOUTS:
        truth = [position(hosts, rank) for rank in range(len(hosts))]
        found = derived([complete(at, *extra) for at in truth])
        assert None in found or found == truth, hosts


@pytest.mark.parametrize("nodes", range(1, 6))
@pytest.mark.parametrize("local_size", range(1, 6))
def test_all_ranks_in_block_or_cyclic_order_derive_their_positions_or_all_are_refused(
    nodes: int, local_size: int
) -> None:
    orders = [[rank // local_size for rank in range(nodes * local_size)], [*range(nodes)] * local_size]
    for hosts in orders:
        truth = [position(hosts, rank) for rank in range(len(hosts))]
        refused: list[None] = [None] * len(hosts)
        found = [
            derived([four_variables(at, nodes) for at in truth]),
            derived([complete(at, "local_size") for at in truth]),
        ]
        assert all(positions in (truth, refused) for positions in found) or len(hosts) == 1
        named = [{**four_variables(at, nodes), "SLURMD_NODENAME": f"n{at['node_rank'] + 1}"} for at in truth]
        assert derived(named) == truth or len(hosts) == 1
        if nodes < 3 or local_size == 1:
            assert found == [truth, truth]


def test_ranks_that_differ_from_slurms_are_refused_if_srun_passed_them_and_accepted_if_the_task_set_them() -> None:
    """The parent is a task of srun. Its child has rank variables that differ from SLURM's."""
    ranks = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", **MASTER, "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0"}
    task = {**DAEMON, "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    code = "from distributed.world import World; World.from_env()"
    # Without `exit`, the command would be the last one, and sh would exec it instead of staying its parent.
    started = 'SLURM_TASK_PID=$$ "$@"; exit'
    for exported in (True, False):
        result = subprocess.run(
            ["sh", "-c", started, "sh", "env", *(f"{name}={value}" for name, value in ranks.items()),
             sys.executable, "-S", "-c", code],
            env={**os.environ, **task, **(ranks if exported else {})}, cwd=KIT, capture_output=True, text=True,
        )  # fmt: skip
        assert (result.returncode != 0) == exported, result.stderr
        assert ("left over from another launch" in result.stderr) == exported


@pytest.mark.parametrize("name", ["slurm_script", "another_script"])
def test_a_batch_script_is_recognized_by_the_command_line_of_process_slurm_task_pid(name: str, tmp_path: Path) -> None:
    """A job that was submitted inside a step inherits the variables of that step.

    If the inherited variables agree with the variables of the job, they do not show that this is a batch script.
    """
    script = tmp_path / name
    script.write_text('export SLURM_TASK_PID=$$\n"$@"\nexit')
    code = "from distributed.world import World; print(World.from_env().size)"
    started = subprocess.run(
        ["sh", str(script), sys.executable, "-S", "-c", code], env={**DAEMON, **FIRST}, cwd=KIT, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert started.stdout == ("1\n" if name == "slurm_script" else "2\n")


# ---------------------------------------------------------------- recorded environments of a real SLURM


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["name"])
def test_recorded_slurm_environments_give_the_recorded_ranks(record: dict[str, Any]) -> None:
    environments = [{**record["common"], **process["environment"]} for process in record["processes"]]
    assert environments
    if record["expected"] == "positions":
        for env, position in zip(environments, positions_of(record), strict=True):
            world = World.from_env(env)
            assert {name: getattr(world, name) for name in position} == position
        assert len({World.from_env(env).master_port for env in environments}) == 1
    elif record["expected"] == "single process":
        (world,) = map(World.from_env, environments)
        assert (world.size, world.launcher, len(world.notes)) == (1, "single", 1)
    else:
        assert all(record["expected"] in error_message(env) for env in environments)


def positions_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [asdict(position) for position in positions([process["host"] for process in record["processes"]])]


TASKS = [
    ({**record["common"], **process["environment"]}, position)
    for record in RECORDS
    if record["expected"] == "positions" and "TORCHELASTIC_RUN_ID" not in record["common"]
    for process, position in zip(record["processes"], positions_of(record), strict=True)
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
