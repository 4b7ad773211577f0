"""Can every node connect to every other? Asked before anything is started: ranks that cannot would wait in silence.

Each node listens at the address at which its ranks will, and then tries all others at once; at home the answers are
laid side by side:

    node2 cannot connect to node3 (10.0.0.3): no answer within 3 s: a firewall between them?

scripts/lib/connectivity.bash leads them through it. Standard library only: nothing else need be there.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed.exit_codes import UNFIT
from distributed.files import write_json
from distributed.host.identity import versions
from distributed.host.network import address_of_interface, address_towards
from distributed.host.replies import framed, read
from distributed.nodelist import fold
from distributed.smoke.report import Fault, Measured, summarise

SECONDS = 3.0  # for a connection: a packet may be lost once
PROVED = "every node can connect to every other"


# ---------------------------------------------------------------- on each node


def listen(nodes: Sequence[str], env: Mapping[str, str] = os.environ) -> int:
    """Say where this node listens, and do so until the launching side has heard enough."""
    address = meeting_address(nodes, env)
    with socket.create_server(("", 0), backlog=1024) as server:  # nobody need accept: a connection is the answer
        sys.stdout.write(framed([address, server.getsockname()[1]]))
        sys.stdout.flush()
        sys.stdin.read()
    return 0


def meeting_address(nodes: Sequence[str], env: Mapping[str, str]) -> str:
    """The address of this node at which ranks meet: of gloo's interface where one is named, else of the one on the
    way to another node; where the names of nodes lead nowhere, the one at which ssh came in."""
    if found := address_of_interface(env.get("GLOO_SOCKET_IFNAME", "")):
        return found
    ways = (address_towards(node) for node in nodes if node != socket.gethostname())
    at_ssh = (env.get("SSH_CONNECTION", "").split() + [""] * 3)[2]
    return next((address for address in ways if address and not address.startswith("127.")), at_ssh)


async def try_all(places: Mapping[str, tuple[str, int]], seconds: float = SECONDS) -> dict[str, str]:
    """What is in the way to each of these places; empty when a connection came about."""
    troubles = await asyncio.gather(*(trouble_to(host, port, seconds) for host, port in places.values()))
    return dict(zip(places, troubles, strict=True))


async def trouble_to(host: str, port: int, seconds: float) -> str:
    try:
        _, connection = await asyncio.wait_for(asyncio.open_connection(host, port), seconds)
    except asyncio.TimeoutError:
        return f"no answer within {seconds:g} s"
    except OSError as error:
        if error.errno == errno.EINVAL:  # what the kernel says of a route of the kind `blackhole`
            return "its route there leads nowhere"
        return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
    connection.close()
    return ""


# ---------------------------------------------------------------- on the launching side


@dataclass(frozen=True)
class Gap:
    """Nodes that cannot connect to another one, all for the same reason."""

    nodes: tuple[str, ...]
    to: str
    address: str
    trouble: str

    def __str__(self) -> str:
        firewall = ": a firewall between them?" if self.trouble.startswith("no answer") else ""
        return f"{fold(self.nodes)} cannot connect to {self.to} ({self.address}): {self.trouble}{firewall}"


def gaps(tried: Mapping[str, Mapping[str, str]], places: Mapping[str, tuple[str, int]]) -> list[Gap]:
    """Every connection that did not come about.

    Args:
        tried: node -> the other node -> what is in the way, empty when nothing is.
    """
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for node, troubles in tried.items():
        for other, trouble in troubles.items():
            if trouble and other != node:
                found[other, trouble] = (*found.get((other, trouble), ()), node)
    return [Gap(nodes, to, places[to][0], trouble) for (to, trouble), nodes in found.items()]


def report(found: Sequence[Gap], ranks: Mapping[str, int]) -> dict[str, object]:
    """As the smoke test would tell it, had it got so far.

    Args:
        ranks: node -> how many it was to have, by node rank.
    """
    first = {node: sum(list(ranks.values())[:place]) for place, node in enumerate(ranks)}
    launch = {
        "size": sum(ranks.values()),
        "nodes": len(ranks),
        "launcher": "none",
        "backend": "nothing started",
        "torch": versions()["torch"],
    }
    faults = [
        Fault("reach", first[gap.nodes[0]], fold(gap.nodes), f"a connection to {gap.to}", gap.trouble, said=str(gap))
        for gap in found
    ]
    return summarise(launch, {"reach": PROVED}, {}, Measured(), faults)


# ---------------------------------------------------------------- the program


def read_places(folder: Path, nodes: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Where each node that answers listens."""
    answers = {node: read(folder, node).value() for node in nodes}
    return {node: (value[0], value[1]) for node, value in answers.items() if value}


def read_gaps(folder: Path, nodes: Sequence[str]) -> list[Gap]:
    """What the nodes found: FOLDER/listening and FOLDER/trying hold their answers."""
    tried = {node: read(folder / "trying", node).value() or {} for node in nodes}
    return gaps(tried, read_places(folder / "listening", nodes))


def unheard(folder: Path, nodes: Sequence[str]) -> Iterator[str]:
    """A line for each node that did not answer."""
    for node in nodes:
        answers = [read(folder / question, node) for question in ("listening", "trying")]
        silent = [answer for answer in answers if answer.value() is None]
        yield from (f"{node}: {answer.why_none()}" for answer in silent[:1])


def main(words: Sequence[str] | None = None) -> int:
    """`listen` and `try` on a node; `places` and `judge` at home. Returns 0, 1 for a gap, or UNFIT."""
    options = _parse(words)
    if options.verb == "listen":
        return listen(options.nodes)
    if options.verb == "try":
        sys.stdout.write(framed(asyncio.run(try_all(dict(map(_place, options.places))))))
        return 0
    if options.verb == "places":
        places = read_places(options.folder, options.nodes)
        print("".join(f"{node}={address}:{port}\n" for node, (address, port) in places.items()), end="")
        return 0
    ranks = {word.rpartition(":")[0]: int(word.rpartition(":")[2]) for word in options.nodes}
    if silent := list(unheard(options.folder, tuple(ranks))):
        sys.stderr.write("".join(f"reach: {line}\n" for line in silent))
        return UNFIT
    found = read_gaps(options.folder, tuple(ranks))
    if found:
        write_json(options.report, report(found, ranks))
    return 1 if found else 0


def _place(word: str) -> tuple[str, tuple[str, int]]:
    """node1=10.0.0.1:4711"""
    node, _, place = word.partition("=")
    address, _, port = place.rpartition(":")
    return node, (address, int(port))


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="connectivity", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    listening = verbs.add_parser("listen", help="say where this node listens, until standard input ends")
    listening.add_argument("nodes", nargs="+", help="names of all nodes")
    trying = verbs.add_parser("try", help="try to connect")
    trying.add_argument("places", nargs="*", help="NAME=ADDRESS:PORT")
    places = verbs.add_parser("places", help="print who listens where, as try wants it")
    places.add_argument("folder", type=Path, help="holds NODE.out, NODE.err and NODE.code")
    places.add_argument("nodes", nargs="+")
    judging = verbs.add_parser("judge", help="name the pairs that cannot connect")
    judging.add_argument(
        "--report", type=Path, required=True, help="where they are written, as the smoke test's report"
    )
    judging.add_argument("folder", type=Path, help="holds the answers: listening/ and trying/")
    judging.add_argument("nodes", nargs="+", help="NAME:PROCESSES")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
