"""What is true of this machine: the facts that the doctor judges, and that nodes can be compared by.

Only looking, no opinion: each function reads one corner of the machine and returns values. What cannot be
read is empty or None, never an exception.

Try it: python3 -m distributed.health.doctor --json
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distributed.host.dns import NameLookups, look_up_names
from distributed.host.gpus import Gpus, owner, query_gpus
from distributed.host.identity import user
from distributed.host.interpreter import (
    Interpreter,
    Package,
    Torch,
    find_shadows,
    probe_torch,
    required_packages,
    which_python,
)
from distributed.host.network import (
    address_towards,
    ephemeral_range,
    interface_to,
    listener,
    mtu_of_interface,
    port_is_free,
)
from distributed.host.replies import NodeFacts
from distributed.host.resources import (
    Cores,
    Limits,
    Memory,
    Space,
    read_cores,
    read_limits,
    read_memory,
    read_space,
)
from distributed.host.system import KIT, PROC, SYS, read, run_program

PROGRAMS = ("ssh", "rsync", "tmux", "pdsh", "srun")
# What torch, NCCL, gloo, OpenMP and Python's imports listen to, and nothing that could be a secret.
REPORTED_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|NODE_RANK|MASTER_(ADDR|PORT)|OMP_NUM_THREADS|PYTHONPATH"
    r"|(TORCHELASTIC|PET|CUDA|NCCL|TORCH_NCCL|GLOO)_\w+"
)


@dataclass(frozen=True)
class Port:
    number: int
    free: bool = True
    holder: str = ""  # "pid 12 (python train.py)", where that can be seen
    ephemeral: tuple[int, int] = (32768, 60999)


@dataclass(frozen=True)
class Clock:
    now: float  # unix seconds
    synchronised: bool | None = None  # None: nobody knows


@dataclass(frozen=True)
class RunProcesses:
    folder: str
    pids: tuple[int, ...]
    user: str = ""  # the owner of these processes
    recorded: bool = True  # run.json is there: status.sh and stop.sh take this folder


@dataclass(frozen=True)
class Facts:
    """Everything the checks judge; as JSON, what two nodes can be compared by."""

    kit: str
    folder: str  # the working folder
    container: bool
    interpreter: Interpreter
    torch: Torch
    packages: tuple[Package, ...]
    gpus: Gpus
    memory: Memory
    disks: tuple[Space, ...]
    shm: Space
    cores: Cores
    limits: Limits
    port: Port
    names: NameLookups
    interfaces: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)  # what speaks to torch, NCCL, gloo, OpenMP
    shadows: tuple[str, ...] = ()  # files that are imported in place of a library
    clock: Clock = Clock(0)
    programs: Mapping[str, str] = field(default_factory=dict)  # name -> path, empty: not here
    runs: tuple[RunProcesses, ...] = ()
    user: str = ""  # who asks


@dataclass(frozen=True)
class Route:
    """The way to the other nodes."""

    interface: str  # empty: unknown
    mtu: int  # bytes; 0: unknown
    speed: int  # Mbit/s, as the card has agreed with the switch; 0: unknown


@dataclass(frozen=True)
class FullNodeFacts(NodeFacts):
    """A machine as one node among others: what the doctor judges, and what nodes can be compared by."""

    facts: Facts
    kit: Mapping[str, str | None]  # of each file of the kit that ranks run: SHA-256
    route: Route
    now: float  # unix seconds, when it replied


def gather(folder: Path, logs: Path, port: int, env: Mapping[str, str] = os.environ) -> Facts:
    """All facts of this machine, as a launch from `folder` with logs in `logs` would meet them."""
    return Facts(
        kit=str(KIT),
        folder=str(folder),
        container=in_container(),
        interpreter=which_python(sys.executable, env),
        torch=probe_torch(sys.executable),
        packages=required_packages(KIT / "requirements.txt"),
        gpus=query_gpus(),
        memory=read_memory(),
        disks=(
            read_space("working folder", folder),
            read_space("logs", logs),
            read_space("/tmp", Path("/tmp")),
        ),
        shm=read_space("/dev/shm", Path("/dev/shm")),
        cores=read_cores(),
        limits=read_limits(),
        port=Port(port, port_is_free(port), listener(port), ephemeral_range()),
        names=look_up_names(),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        environment={name: value for name, value in sorted(env.items()) if REPORTED_VARIABLES.fullmatch(name)},
        shadows=find_shadows(folder, env.get("PYTHONPATH", "")),
        clock=Clock(time.time(), clock_is_synchronised()),
        programs={name: shutil.which(name) or "" for name in PROGRAMS},
        runs=find_runs(),
        user=user(),
    )


def route_to(nodes: Sequence[str]) -> Route:
    """The interface on the way to the first of the other nodes."""
    others = (node for node in nodes if node != socket.gethostname() and address_towards(node))
    name = next((found for found in map(interface_to, others) if found and found != "lo"), "")
    speed = read(SYS / "class/net" / name / "speed") if name else ""
    return Route(name, mtu_of_interface(name), int(speed) if speed.isdigit() else 0)  # -1: the card does not know


def in_container() -> bool:
    marks = Path("/.dockerenv"), Path("/run/.containerenv"), Path("/var/run/secrets/kubernetes.io")
    return "container" in os.environ or any(mark.exists() for mark in marks)


def clock_is_synchronised() -> bool | None:
    answer = run_program(["timedatectl", "show", "--property=NTPSynchronized", "--value"], 3).out.strip()
    return {"yes": True, "no": False}.get(answer)


def find_runs(proc: Path = PROC) -> tuple[RunProcesses, ...]:
    """Processes of runs of this kit: their launchers gave them MUSTER_RUN_DIR. Our own run is not counted."""
    found: dict[str, list[int]] = {}
    for process in proc.glob("[0-9]*"):
        if marker := re.search(r"(?:^|\0)MUSTER_RUN_DIR=([^\0]+)", read(process / "environ")):
            found.setdefault(marker[1], []).append(int(process.name))
    found.pop(os.environ.get("MUSTER_RUN_DIR", ""), None)
    return tuple(
        RunProcesses(
            folder, tuple(sorted(pids)), owner(pids[0], proc), os.path.isfile(os.path.join(folder, "run.json"))
        )
        for folder, pids in sorted(found.items())
    )
