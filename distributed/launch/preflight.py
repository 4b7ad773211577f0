"""Can these nodes train together? Asked of all of them at once, before anything is started.

Each node writes down what it finds (survey), in one call and within tenths of a second; on the launching side `judge`
compares the answers, names each fault with its remedy, and chooses where the ranks will meet.

    node1: 2 processes, but 1 GPU: start fewer there (node1:1)
    node3: PyTorch 2.12.0, the others have 2.13.0: install the same on all

Standard library only: nothing else need be there.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from distributed.exit_codes import UNFIT
from distributed.host.replies import Answer, read

SLOW = 1.0  # seconds for a look-up


@dataclass(frozen=True)
class Look:
    """What a node finds."""

    python: str
    torch: str | None
    files: Mapping[str, str | None]  # of each file the ranks will read: SHA-256, None when it cannot be read
    gpus: int
    gpu_error: str
    machine: str  # the same for two names of one machine
    addresses: tuple[str, ...]  # its own
    ssh_address: str  # the one at which it was reached; empty when not through ssh
    master: str  # the address it finds for the first node's name; empty when it finds none
    seconds: float  # that this took
    port: int  # a free one
    holder: str | None  # who has the one that was asked for; None when it is free


@dataclass(frozen=True)
class Node:
    """A node, how many processes it is to run, and what came back from it."""

    name: str
    nproc: int
    answer: Answer


# ---------------------------------------------------------------- when all have answered


def judge(nodes: Sequence[Node], port: int | None) -> tuple[list[str], list[str], str]:
    """Faults, warnings, and where to meet as "ADDRESS PORT", empty when there is a fault."""
    looks, faults = {}, []
    for node in nodes:
        answer = answer_of(node)
        if isinstance(answer, Look):
            looks[node.name] = answer
        else:
            faults.append(f"{node.name}: {answer}")
    if not faults:
        faults += [f"{name}: {fault}" for name, fault in misfits(nodes, looks)]
    master = nodes[0].name
    address = "" if faults else meeting_point(master, looks)
    if not faults and not address:
        faults.append(no_meeting_point(master, looks))
    if not faults and looks[master].holder is not None:
        faults.append(
            f"{master}: port {port} is taken{looks[master].holder and f' by {looks[master].holder}'}: "
            "name another with --master-port, or leave it out"
        )
    warnings = [
        f"{name}: looking up '{master}' took {found.seconds:.1f} s, and every connection asks: mend its resolver, "
        f"or put {master} into /etc/hosts"
        for name, found in looks.items()
        if found.seconds > SLOW
    ]
    return faults, warnings, "" if faults else f"{address} {looks[master].port}"


def answer_of(node: Node) -> Look | str:
    """What the node found, or why there is no answer, and what to do."""
    found = node.answer.value()
    return node.answer.why_none() if found is None else Look(**found)


def misfits(nodes: Sequence[Node], looks: Mapping[str, Look]) -> Iterator[tuple[str, str]]:
    """What keeps a node from working with the others."""
    yield from odd_ones(looks, lambda found: f"Python {minor(found.python)}", "use the same on all")
    yield from odd_ones(looks, lambda found: found.torch and f"PyTorch {found.torch}", "install the same on all")
    for file in looks[nodes[0].name].files:
        yield from other_files(looks, file)
    seen: dict[str, str] = {}
    for node in nodes:
        found = looks[node.name]
        if found.torch is None:
            yield (
                node.name,
                "has no PyTorch: install it for that Python, or name another with --python",
            )
        if found.gpu_error:
            yield node.name, f"its GPUs cannot be counted ({found.gpu_error}): ssh {node.name} nvidia-smi"
        elif found.gpus != 0 and node.nproc > found.gpus:
            yield (
                node.name,
                f"{node.nproc} processes, but {found.gpus} GPU{'s' * (found.gpus != 1)}: start fewer there "
                f"({node.name}:{found.gpus})",
            )
        if (first := seen.setdefault(found.machine, node.name)) != node.name:
            yield node.name, f"is the same machine as {first}: name it once"
    yield from odd_ones(looks, lambda found: "no GPU" if found.gpus == 0 else "GPUs", "leave out what differs")


def odd_ones(looks: Mapping[str, Look], what: Callable[[Look], str | None], remedy: str) -> Iterator[tuple[str, str]]:
    """Who differs from most of the others."""
    said = {name: what(found) for name, found in looks.items()}
    usual = Counter(said.values()).most_common(1)[0][0]
    for name, value in said.items():
        if value is not None and usual is not None and value != usual:
            yield name, f"{value}, but {usual} elsewhere: {remedy}"


def other_files(looks: Mapping[str, Look], file: str) -> Iterator[tuple[str, str]]:
    """Who does not have the file, or has another of that name."""
    usual = Counter(found.files[file] for found in looks.values()).most_common(1)[0][0]
    for name, found in looks.items():
        if found.files[file] is None:
            yield (
                name,
                f"has no file '{file}' to read: share its folder between the nodes, or launch with --sync",
            )
        elif found.files[file] != usual:
            yield name, f"'{file}' differs from that of the other nodes; make them the same, or launch with --sync"


def minor(version: str) -> str:
    """3.11 of 3.11.7: worlds may differ in the last number."""
    return ".".join(version.split(".")[:2])


class Findable(Protocol):
    """What is to be known of a node to meet there."""

    @property
    def addresses(self) -> tuple[str, ...]: ...
    @property
    def ssh_address(self) -> str: ...
    @property
    def master(self) -> str: ...


def meeting_point(master: str, looks: Mapping[str, Findable]) -> str:
    """An address of the first node that all others find for it; else the one at which ssh reached it.

    A node that is alone, such as an alias of ssh for this machine, needs none.
    """
    own = looks[master].addresses
    found = {other.master for name, other in looks.items() if name != master} or {looks[master].master}
    if len(found) == 1 and found <= set(own):
        return found.pop()
    if looks[master].ssh_address in own:
        return looks[master].ssh_address
    return "" if len(looks) > 1 else "127.0.0.1"


def no_meeting_point(master: str, looks: Mapping[str, Findable]) -> str:
    found = ", ".join(f"{name} finds {other.master or 'nothing'}" for name, other in looks.items() if name != master)
    return (
        f"{master}: no address at which the others could meet it (for '{master}' {found}; its own are "
        f"{', '.join(looks[master].addresses) or 'none but loopback'}): correct the names in /etc/hosts or DNS"
    )


# ---------------------------------------------------------------- the program


def main(words: Sequence[str] | None = None) -> int:
    """Print the faults, or where to meet. Returns 0, or UNFIT."""
    parser = argparse.ArgumentParser(prog="preflight", description=__doc__, allow_abbrev=False)
    parser.add_argument("--port", type=int, default=0, help="the one to meet at; 0: any")
    parser.add_argument("folder", type=Path, help="holds the answers: NODE.out, NODE.err and NODE.code")
    parser.add_argument("nodes", nargs="+", help="NAME:PROCESSES")
    options = parser.parse_args(words)
    faults, warnings, meeting = judge([_read(options.folder, word) for word in options.nodes], options.port or None)
    sys.stderr.write("".join(f"preflight: warning: {line}\n" for line in warnings))
    sys.stderr.write("".join(f"preflight: {line}\n" for line in faults))
    if faults:
        return UNFIT
    print(meeting)
    return 0


def _read(folder: Path, word: str) -> Node:
    name, _, nproc = word.rpartition(":")
    return Node(name, int(nproc), read(folder, name))


if __name__ == "__main__":
    sys.exit(main())
