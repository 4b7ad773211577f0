"""Collect facts of this machine for doctor.sh and for the comparison of nodes.

Each function reads one kind of facts and returns values without judging them. Unreadable facts are empty or None, never
an exception.

Try it: python3 -m distributed.health.doctor --json
"""

from __future__ import annotations

import os
import re
import socket
import sys
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
    this_python,
)
from distributed.host.network import interface_to, listener, mtu_of_interface, nccl_interfaces, port_is_free
from distributed.host.replies import NodeFacts
from distributed.host.resources import Cores, Memory, Space, read_cores, read_memory, read_space
from distributed.host.system import KIT, PROC, SYS, read

# Variables read by torch, NCCL, gloo and Python's import system. None of them contains a secret.
REPORTED_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|NODE_RANK|MASTER_(ADDR|PORT)|PYTHONPATH"
    r"|(TORCHELASTIC|PET|CUDA|NCCL|TORCH_NCCL|GLOO)_\w+"
)


@dataclass(frozen=True)
class Port:
    number: int
    free: bool = True
    holder: str = ""  # "pid 12 (python train.py)" if visible


@dataclass(frozen=True)
class RunProcesses:
    directory: str  # run directory
    pids: tuple[int, ...]
    user: str = ""  # owner of the processes
    recorded: bool = True  # run.json exists: status.sh and stop.sh accept this directory


@dataclass(frozen=True)
class Facts:
    """Input of the health checks. Field names are keys of the JSON that nodes and `doctor.sh --json` print."""

    kit: str  # Muster's installation directory
    directory: str  # working directory
    container: bool
    interpreter: Interpreter
    torch: Torch
    packages: tuple[Package, ...]
    gpus: Gpus
    memory: Memory
    disks: tuple[Space, ...]
    shm: Space
    cores: Cores
    infiniband: bool  # the machine has an InfiniBand card
    port: Port
    names: NameLookups
    interfaces: tuple[str, ...]
    nccl_interfaces: tuple[str, ...] = ()  # see network.nccl_interfaces()
    environment: Mapping[str, str] = field(default_factory=dict)  # REPORTED_VARIABLES that are set
    shadows: tuple[str, ...] = ()  # see find_shadows()
    runs: tuple[RunProcesses, ...] = ()
    user: str = ""  # of this process


@dataclass(frozen=True)
class Route:
    """The route to another node."""

    interface: str  # "": unknown
    mtu: int  # bytes; 0: unknown
    speed: int  # Mbit/s, negotiated with the switch; 0: unknown


@dataclass(frozen=True)
class FullNodeFacts(NodeFacts):
    """The reply of a node to the doctor."""

    facts: Facts
    kit: Mapping[str, str | None]  # file of Muster that the ranks run -> SHA-256
    route: Route
    now: float  # Unix seconds at the time of the reply


def gather(directory: Path, logs: Path, port: int, env: Mapping[str, str] = os.environ) -> Facts:
    """All facts of this machine for a launch from `directory` with run directories in `logs`."""
    return Facts(
        kit=str(KIT),
        directory=str(directory),
        container=in_container(),
        interpreter=this_python(sys.executable),
        torch=probe_torch(sys.executable),
        packages=required_packages(KIT / "requirements.txt"),
        gpus=query_gpus(),
        memory=read_memory(),
        disks=(read_space("working directory", directory), read_space("logs", logs), read_space("/tmp", Path("/tmp"))),
        shm=read_space("/dev/shm", Path("/dev/shm")),
        cores=read_cores(),
        infiniband=any(SYS.glob("class/infiniband/*")),
        port=Port(port, port_is_free(port), listener(port)),
        names=look_up_names(),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        nccl_interfaces=tuple(nccl_interfaces()),
        environment={name: value for name, value in sorted(env.items()) if REPORTED_VARIABLES.fullmatch(name)},
        shadows=find_shadows(directory, env.get("PYTHONPATH", "")),
        runs=find_runs(),
        user=user(),
    )


def route_to(nodes: Sequence[str]) -> Route:
    """The route to the first of the other nodes that is reached through an interface other than loopback."""
    others = (node for node in nodes if node != socket.gethostname())
    name = next((found for found in map(interface_to, others) if found not in ("", "lo")), "")
    speed = read(SYS / "class/net" / name / "speed") if name else ""
    return Route(name, mtu_of_interface(name), int(speed) if speed.isdigit() else 0)  # -1 in /sys: unknown


def in_container() -> bool:
    files = Path("/.dockerenv"), Path("/run/.containerenv"), Path("/var/run/secrets/kubernetes.io")
    return "container" in os.environ or any(file.exists() for file in files)


def find_runs(proc: Path = PROC) -> tuple[RunProcesses, ...]:
    """The runs that have processes on this machine, found by their MUSTER_RUN_DIR, without the run of this process."""
    found: dict[str, list[int]] = {}
    for process in proc.glob("[0-9]*"):
        if marker := re.search(r"(?:^|\0)MUSTER_RUN_DIR=([^\0]+)", read(process / "environ")):
            found.setdefault(marker[1], []).append(int(process.name))
    found.pop(os.environ.get("MUSTER_RUN_DIR", ""), None)
    return tuple(
        RunProcesses(run, tuple(sorted(pids)), owner(pids[0], proc), os.path.isfile(os.path.join(run, "run.json")))
        for run, pids in sorted(found.items())
    )
