"""Record SLURM's variables in each process of a step, for all usual ways to start a step, on a real SLURM.

Each command starts processes of record_process.sh, which write their host and environment to a file. The hosts
determine what World.from_env must return. Needs the SLURM_CONF that `lab.sh up 3 --slurm --gpus 2` prints.

Usage: python tests/lab/slurm_steps.py tests/slurm_environments.json   (replaces the records)
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# In all commands, TELL stands for the path of record_process.sh.
TORCHRUN = """PORT=$((10000 + RANDOM % 10000)) srun -w $N1,$N2 --ntasks-per-node=1 sh -c '
  "$PYTHON" -m torch.distributed.run --nnodes=2 --node-rank=$SLURM_NODEID \\
    --nproc-per-node=2 --master-addr=$N1 --master-port=$PORT --no-python TELL'"""
TELL = Path(__file__).resolve().with_name("record_process.sh")
STALE = "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=old MASTER_PORT=29500"

# Like a container whose hook sets these variables for every task.
HOOK = """sh -c '
  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID MASTER_ADDR=$N1 MASTER_PORT=29500
  exec TELL'"""

_LAUNCHER_VARIABLE = re.compile(
    r"SLURM_(STEP|TASK|NODE|NTASKS|NNODES|NPROCS|PROC|LOCAL|GTIDS|DIST|ARBITRARY|HET|JOB_(ID|NODE|NUM)|RESTART)\w*"
    r"|SLURMD_NODENAME|SLURM_LAUNCH_NODE_IPADDR|CUDA_VISIBLE_DEVICES"
    r"|RANK|WORLD_SIZE|(MASTER|LOCAL|GROUP|ROLE|TORCHELASTIC)_\w+"
)

# Expected result of World.from_env: positions of ranks, a single process, or (any other text) the error message.
POSITIONS, SINGLE = "positions", "single process"

_TIMED_OUT = 124  # exit code of coreutils' timeout


@dataclass(frozen=True)
class StepCase:
    """One way to start processes under SLURM on nodes $N1, $N2 and $N3."""

    name: str
    command: str
    expected: str = POSITIONS


STEPS = [
    StepCase("two tasks on each of three nodes", "srun -N3 --ntasks-per-node=2 TELL"),
    StepCase("one task", "srun -n1 TELL"),
    StepCase("more tasks on the first node", "srun -N3 -n5 TELL"),
    StepCase("cyclic", "srun -N3 --ntasks-per-node=2 -m cyclic TELL"),
    StepCase("plane", "srun -N2 --ntasks-per-node=3 -m plane=2 TELL"),
    StepCase("nodes named backwards", "srun -w $N3,$N1 -n3 TELL"),
    StepCase("one GPU a task", "srun -N2 --ntasks-per-node=2 --gpus-per-task=1 TELL"),
    StepCase("all GPUs for each task", "srun -N2 --ntasks-per-node=2 --gres=gpu:2 TELL"),
    StepCase("one node of a job", "salloc -Q -N3 --ntasks-per-node=2 srun -N1 -w $N2 -n2 TELL"),
    StepCase(
        "the last two nodes of a cyclic job",
        "salloc -Q -N3 --ntasks-per-node=2 -m cyclic srun -N2 -n4 -r1 TELL",
    ),
    StepCase("fewer tasks than the job", "salloc -Q -N3 --ntasks-per-node=2 srun -N2 -n3 TELL"),
    StepCase("srun in the batch script", "sbatch -Q -W -o /dev/null -N2 -n3 --wrap 'srun TELL'"),
    StepCase("srun in an element of an array", "sbatch -Q -W -o /dev/null --array=3 -N2 -n3 --wrap 'srun TELL'"),
    StepCase("srun in a batch script without -n", "sbatch -Q -W -o /dev/null -N2 --wrap 'srun TELL'"),
    StepCase("two components of a job", "salloc -Q -w $N1 -n2 : -w $N2 -n1 srun --het-group=0,1 TELL"),
    StepCase(
        "two components, the second on earlier nodes",
        "salloc -Q -w $N3 -n2 : -w $N1,$N2 -n3 srun --het-group=0,1 TELL",
    ),
    StepCase(
        "the last two of three components", "salloc -Q -w $N3 -n1 : -w $N2 -n2 : -w $N1 -n1 srun --het-group=1,2 TELL"
    ),
    StepCase("MASTER_ADDR and MASTER_PORT given", "env MASTER_ADDR=$N2 MASTER_PORT=29500 srun -w $N2,$N3 -n2 TELL"),
    StepCase("torchrun on each of two nodes", TORCHRUN),
    StepCase("ranks set in each task", f"srun -w $N1,$N2 --ntasks-per-node=2 -m cyclic {HOOK}"),
    StepCase("ranks set in each task, 3 and 1 on two nodes", f"srun -w $N1,$N2 -n4 -m plane=3 {HOOK}"),
    StepCase(
        "srun in a batch script that was submitted inside a step",
        "srun -N1 -n1 sbatch -Q -W -o /dev/null -N2 -n3 --wrap 'srun TELL'",
    ),
    StepCase("arbitrary, on one node", "srun -m arbitrary -w $N3,$N3 -n2 TELL"),
    StepCase("arbitrary, by -w", "srun -m arbitrary -w $N3,$N1,$N3 -n3 TELL", "host of task 0 is not known"),
    StepCase(
        "arbitrary, in a job that was arbitrary in another order",
        "salloc -Q -m arbitrary -w $N3,$N1 -n2 srun -n2 -m arbitrary -w $N3,$N1 TELL",
        "host of task 0 is not known",
    ),
    StepCase(
        "block, in a job that was arbitrary",
        "salloc -Q -m arbitrary -w $N3,$N1 -n2 srun -N2 -n2 -m block TELL",
    ),
    StepCase("stale ranks exported", f"env {STALE} srun -n2 TELL", "left over from another launch"),
    StepCase("a stale RANK exported", "env RANK=0 srun -n2 TELL", "RANK=0 is set, but not"),
    StepCase("by hand in salloc", "salloc -Q -N2 -n3 TELL", SINGLE),
    StepCase(
        "by hand in the shell that salloc opens on a node",
        "script -qec 'env SHELL=TELL salloc -Q -N2 -n3' /dev/null </dev/null",
        SINGLE,
    ),
    StepCase("by hand in the batch script", "sbatch -Q -W -o /dev/null -N2 --wrap TELL", SINGLE),
    StepCase("by hand in a batch script with -n", "sbatch -Q -W -o /dev/null -N2 -n3 --wrap TELL", SINGLE),
    StepCase(
        "by hand in a batch script that was submitted inside a step",
        "srun -N1 -n2 sh -c 'test $SLURM_PROCID = 1 || sbatch -Q -W -o /dev/null -N2 -n3 --wrap TELL'",
        SINGLE,
    ),
    StepCase("by hand in salloc inside a step", "srun -N1 -n1 salloc -Q -N2 -n3 TELL", SINGLE),
]


@dataclass(frozen=True)
class RankPosition:
    """The position of a process, derived from the hosts of all processes."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    nodes: int
    master_addr: str


@dataclass(frozen=True)
class Observed:
    """Host and environment of a process."""

    host: str
    environment: dict[str, str]


def clean_environment() -> dict[str, str]:
    """Return the environment without variables of a launcher.

    Call this function only in the main thread: pytest changes os.environ in that thread, so reading it in another
    thread could fail.
    """
    return {name: value for name, value in os.environ.items() if not _LAUNCHER_VARIABLE.fullmatch(name)}


def start(step: StepCase, environment: Mapping[str, str]) -> list[Observed]:
    """Run the step on the SLURM of SLURM_CONF. Returns its processes by rank."""
    try:
        return _start(step, environment)
    except subprocess.CalledProcessError as error:
        if error.returncode != _TIMED_OUT:
            raise
        # salloc hung in 1 of about 6,000 calls. A step runs no code of Muster, so this retry hides no fault of Muster.
        return _start(step, environment)


def _start(step: StepCase, environment: Mapping[str, str]) -> list[Observed]:
    with tempfile.TemporaryDirectory() as directory:
        files = Path(directory, "files")
        files.mkdir()
        tell = Path(directory, "record_process.sh")  # a path without spaces, for the nested shells of a command
        tell.symlink_to(TELL)
        subprocess.run(
            # timeout sends SIGTERM first, on which salloc and srun release their allocation. After SIGKILL alone, the
            # allocation would stay and block later steps.
            ["timeout", "--kill-after=10", "60", "bash", "-c", step.command.replace("TELL", str(tell))],
            env={**environment, **node_variables(), "RECORDS": str(files), "PYTHON": sys.executable},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return sorted((_observed(file.read_text()) for file in files.iterdir()), key=_rank)


def node_variables() -> dict[str, str]:
    """Return the variables N1, N2 and so on: the nodes of the SLURM of SLURM_CONF."""
    nodes = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--partition=lab", "--format=%N"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.split()
    return {f"N{number}": node for number, node in enumerate(nodes, 1)}


def _observed(text: str) -> Observed:
    host, _, environment = text.partition("\n")
    return Observed(host, dict(entry.split("=", 1) for entry in environment.split("\0") if entry))


def positions(hosts: list[str]) -> list[RankPosition]:
    """Return the positions of the processes of a step; hosts has the host of each rank."""
    nodes = list(dict.fromkeys(hosts))
    return [
        RankPosition(
            rank=rank,
            size=len(hosts),
            local_rank=hosts[:rank].count(host),
            local_size=Counter(hosts)[host],
            node_rank=nodes.index(host),
            nodes=len(nodes),
            master_addr=hosts[0],
        )
        for rank, host in enumerate(hosts)
    ]


def _rank(process: Observed) -> int:
    env = process.environment
    return int(env["RANK"] if "TORCHELASTIC_RUN_ID" in env else env.get("SLURM_PROCID", "0"))


# --- recording ---------------------------------------------------------------------------------------

_MACHINE_VARIABLE = re.compile(r"SLURM_(TASK_PID|STEP_LAUNCHER_PORT|NODE_ALIASES\w*|\w+_PACK_GROUP_\d)")


def recorded(step: StepCase) -> dict[str, object]:
    """Return the step as a record: variables common to all processes, then those of each process."""
    observed = start(step, clean_environment())
    environments = [_worth_keeping(process.environment) for process in observed]
    common = dict(set.intersection(*(set(environment.items()) for environment in environments)))
    processes = [
        {"environment": {name: value for name, value in environment.items() if name not in common}}
        | ({"host": process.host} if step.expected == POSITIONS else {})
        for environment, process in zip(environments, observed, strict=True)
    ]
    described = {"name": step.name, "command": step.command, "expected": step.expected}
    return {**described, "common": common, "processes": processes}


def _worth_keeping(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables set by launchers, without paths, ports and other facts of this machine."""
    return {
        name: value
        for name, value in environment.items()
        if _LAUNCHER_VARIABLE.fullmatch(name) and not _MACHINE_VARIABLE.fullmatch(name) and "/" not in value
    }


def record(path: Path) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps([recorded(step) for step in STEPS], indent=1, sort_keys=True) + "\n")
    os.replace(new, path)


if __name__ == "__main__":
    record(Path(sys.argv[1]))
