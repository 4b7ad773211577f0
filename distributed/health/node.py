"""A machine as one node among others: its facts, and those that matter only where there are several.

`look` runs on the node, asked over ssh; at home `of_answer` makes the same value of what came back.

Standard library only: nothing else need be there.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from distributed.host.facts import Facts, gather
from distributed.host.identity import machine
from distributed.host.interpreter import KIT
from distributed.host.network import address_of, address_towards, interface_to, mtu_of_interface, own_addresses
from distributed.host.probe import SYS, read
from distributed.host.replies import framed
from distributed.launch.survey import checksum

RUN_BY_RANKS = ("train.py", "distributed/**/*.py", "scripts/lib/*")  # of the kit: what must be the same on all nodes


@dataclass(frozen=True)
class Route:
    """The way to the other nodes."""

    interface: str  # empty: unknown
    mtu: int  # bytes; 0: unknown
    speed: int  # Mbit/s, as the card has agreed with the switch; 0: unknown


@dataclass(frozen=True)
class Member:
    """What a node finds."""

    facts: Facts
    machine: str  # the same for two names of one machine
    kernel: str
    kit: Mapping[str, str | None]  # of each file that ranks run: its checksum
    addresses: tuple[str, ...]  # its own
    ssh_address: str  # the one at which it was reached
    master: str  # the address it finds for the first node's name; empty when it finds none
    route: Route
    now: float  # unix seconds, when it answered


# ---------------------------------------------------------------- on the node


def look(nodes: Sequence[str], facts: Facts, env: Mapping[str, str] = os.environ) -> Member:
    """This machine among the nodes of these names, the first of which is where ranks meet."""
    return Member(
        facts=facts,
        machine=machine(),
        kernel=os.uname().release,
        kit={file: checksum(KIT / file) for file in files_of(KIT)},
        addresses=own_addresses(),
        ssh_address=(env.get("SSH_CONNECTION", "").split() + [""] * 3)[2],
        master=address_of(nodes[0]),
        route=route_to(nodes),
        now=time.time(),
    )


def files_of(kit: Path) -> list[str]:
    found = (path for pattern in RUN_BY_RANKS for path in kit.glob(pattern) if path.is_file())
    return sorted(str(path.relative_to(kit)) for path in found)


def route_to(nodes: Sequence[str], sys_folder: Path = SYS) -> Route:
    """The interface on the way to the first of the other nodes."""
    ways = (interface_to(node) for node in nodes if node != socket.gethostname() and address_towards(node))
    name = next((way for way in ways if way and way != "lo"), "")
    speed = read(sys_folder / "class/net" / name / "speed") if name else ""
    return Route(name, mtu_of_interface(name), int(speed) if speed.isdigit() else 0)  # -1: the card does not know


def main(words: Sequence[str] | None = None) -> int:
    """Print what this node finds, as an answer."""
    parser = argparse.ArgumentParser(prog="node", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="the working folder of the launch")
    parser.add_argument("--log-dir", type=Path, required=True, help="where runs will be logged")
    parser.add_argument("--master-port", type=int, required=True)
    parser.add_argument("nodes", nargs="+", help="names of all nodes")
    options = parser.parse_args(words)
    facts = gather(options.folder, options.log_dir, options.master_port)
    sys.stdout.write(framed(asdict(look(options.nodes, facts))))
    return 0


# ---------------------------------------------------------------- on the launching side


def of_answer(value: Any) -> Member:
    """A node's answer as the value that it was there.

    Raises:
        TypeError: it lacks something, as the answer of an older kit.
    """
    member: Member = rebuilt(Member, value)
    return member


def rebuilt(kind: Any, value: Any) -> Any:
    """A value of this type, from what JSON has made of it."""
    if get_origin(kind) is UnionType:
        return None if value is None else rebuilt(get_args(kind)[0], value)
    if get_origin(kind) is tuple:
        return tuple(rebuilt(get_args(kind)[0], part) for part in value)
    if isinstance(kind, type) and is_dataclass(kind):
        kinds = get_type_hints(kind)
        return kind(**{name: rebuilt(kinds[name], part) for name, part in value.items() if name in kinds})
    return value


if __name__ == "__main__":
    sys.exit(main())
