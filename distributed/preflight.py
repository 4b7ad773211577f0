"""Can these nodes train together? Asked of all of them at once, before anything is started.

On each node `look` writes down what it finds, in one call and within tenths of a second; on the launching side `judge`
compares the answers, names each fault with its remedy, and chooses where the ranks will meet.

    node1: 2 processes, but 1 GPU: start fewer there (node1:1)
    node3: PyTorch 2.12.0, the others have 2.13.0: install the same on all

Standard library only: nothing else need be there.
"""

from __future__ import annotations

import argparse
import hashlib
import ipaddress
import os
import random
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from distributed.answers import UNFIT, Answer, framed, read
from distributed.facts import ephemeral_range, listener, look_at_gpus, port_is_free, visible
from distributed.run_folder import machine, versions

PORTS = range(20_000, 30_000)  # to choose from; below the usual ephemeral ones
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


# ---------------------------------------------------------------- on each node


def look(files: Sequence[str], master: str, port: int | None, env: Mapping[str, str] = os.environ) -> Look:
    """Look around on this node. port: the one to meet at, or None for any."""
    gpus = look_at_gpus()
    begun = time.monotonic()
    address = address_of(master)
    seconds = time.monotonic() - begun
    found = versions()
    return Look(
        python=str(found["python"]),
        torch=found["torch"],
        files={file: checksum(Path(file)) for file in files},
        gpus=len(visible(env.get("CUDA_VISIBLE_DEVICES"), gpus.devices)),
        gpu_error=gpus.error,
        machine=machine(),
        addresses=own_addresses(),
        ssh_address=(env.get("SSH_CONNECTION", "").split() + [""] * 3)[2],
        master=address,
        seconds=seconds,
        port=port or free_port(),
        holder=None if port is None or port_is_free(port) else listener(port),
    )


def checksum(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def address_of(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def own_addresses(proc: Path = Path("/proc/net")) -> tuple[str, ...]:
    """IPv4 and IPv6 addresses of this node, but for loopback."""
    found = set()
    try:
        for entry in re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", (proc / "fib_trie").read_text()):
            found.add(entry)
        for line in (proc / "if_inet6").read_text().splitlines():
            found.add(str(ipaddress.IPv6Address(int(line.split()[0], 16))))
    except OSError:
        pass  # a kernel without IPv6 has no if_inet6
    return tuple(sorted(address for address in found if not ipaddress.ip_address(address).is_loopback))


def free_port() -> int:
    """One of PORTS that is free, outside the range that the kernel gives to connections."""
    low, high = ephemeral_range()
    return next(port for port in random.sample(PORTS, len(PORTS)) if not low <= port <= high and port_is_free(port))


# ---------------------------------------------------------------- on the launching side


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
    yield from odd_ones(looks, lambda found: f"PyTorch {found.torch}", "install the same on all")
    for file in looks[nodes[0].name].files:
        yield from other_files(looks, file)
    seen: dict[str, str] = {}
    for node in nodes:
        found = looks[node.name]
        if found.gpu_error:
            yield node.name, f"its GPUs cannot be counted ({found.gpu_error}): ssh {node.name} nvidia-smi"
        elif found.gpus != 0 and node.nproc > found.gpus:
            yield (
                node.name,
                f"{node.nproc} processes, but {found.gpus} GPU(s): start fewer there ({node.name}:{found.gpus})",
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
            yield name, f"its '{file}' is another than elsewhere: make them the same"


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
    """An address of the first node that all others find for it; else the one at which ssh reached it."""
    own = looks[master].addresses
    found = {other.master for name, other in looks.items() if name != master} or {looks[master].master}
    if len(found) == 1 and found <= set(own):
        return found.pop()
    return looks[master].ssh_address if looks[master].ssh_address in own else ""


def no_meeting_point(master: str, looks: Mapping[str, Findable]) -> str:
    found = ", ".join(f"{name} finds {other.master or 'nothing'}" for name, other in looks.items() if name != master)
    return (
        f"{master}: no address at which the others could meet it (for '{master}' {found}; its own are "
        f"{', '.join(looks[master].addresses) or 'none but loopback'}): correct the names in /etc/hosts or DNS"
    )


# ---------------------------------------------------------------- for one that is started by hand


def place(master: str, node_rank: int, found: str, own: Sequence[str]) -> tuple[str, str]:
    """MASTER_ADDR as this node is to use it, and what speaks against it; one of the two is empty.

    found: the address this node has for it, empty for none. own: this node's addresses, without loopback.
    """
    said = f"MASTER_ADDR '{master}'"
    if not found:
        return "", f"{said}: this node finds no address for it: mend the name, or give the address of node rank 0"
    here = found in own or ipaddress.ip_address(found).is_loopback
    if node_rank and here:
        return "", f"{said} is {found}, this node itself, but node rank 0 is what it has to name"
    if not node_rank and not here:
        return (
            "",
            f"{said} is {found}, no address of this node ({', '.join(own)}), but node rank 0 is what it has to name",
        )
    if node_rank or found in own:
        return master, ""
    reachable = [address for address in own if ipaddress.ip_address(address).version == 4]
    if len(reachable) == 1:
        return reachable[0], ""  # its own name is 127.0.1.1, as Debian has it
    return "", f"{said} is {found}, where no other node finds it: give an address of this node ({', '.join(own)})"


# ---------------------------------------------------------------- the program


def main(words: Sequence[str] | None = None) -> int:
    """`look` on a node, `judge` at home; `place` when nobody looks at all. Returns 0, or UNFIT."""
    options = _parse(words)
    if options.verb == "place":
        address, fault = place(options.master, options.node_rank, address_of(options.master), own_addresses())
        print(address) if address else sys.stderr.write(f"preflight: {fault}\n")
        return 0 if address else UNFIT
    port = options.port or None
    if options.verb == "look":
        sys.stdout.write(framed(asdict(look(options.files, options.master, port))))
        return 0
    nodes = [_read(options.folder, word) for word in options.nodes]
    faults, warnings, meeting = judge(nodes, port)
    sys.stderr.write("".join(f"preflight: warning: {line}\n" for line in warnings))
    sys.stderr.write("".join(f"preflight: {line}\n" for line in faults))
    if faults:
        return UNFIT
    print(meeting)
    return 0


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="preflight", description=__doc__, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    on_node = verbs.add_parser("look", help="print what this node finds")
    on_node.add_argument("--master", required=True, help="name of the first node")
    on_node.add_argument("files", nargs="*", help="what the ranks will read")
    at_home = verbs.add_parser("judge", help="compare the answers")
    at_home.add_argument("folder", type=Path, help="holds NODE.out, NODE.err and NODE.code")
    at_home.add_argument("nodes", nargs="+", help="NAME:PROCESSES")
    by_hand = verbs.add_parser("place", help="print the address at which to meet")
    by_hand.add_argument("master", help="MASTER_ADDR")
    by_hand.add_argument("--node-rank", type=int, required=True)
    for verb in (on_node, at_home):
        verb.add_argument("--port", type=int, default=0, help="the one to meet at; 0: any")
    return parser.parse_args(words)


def _read(folder: Path, word: str) -> Node:
    name, _, nproc = word.rpartition(":")
    return Node(name, int(nproc), read(folder, name))


if __name__ == "__main__":
    sys.exit(main())
