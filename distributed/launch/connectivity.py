"""Can every node connect to every other? Asked before anything is started: ranks that cannot would wait in silence.

Each node listens at the address at which its ranks will, then each tries to connect to all others at once; the
launching side reads the replies:

    node2 cannot connect to node3 (10.0.0.3): no answer within 3 s: a firewall between them?

scripts/lib/connectivity.bash goes through these steps.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed.exit_codes import UNFIT
from distributed.host.network import address_of_interface, address_towards
from distributed.host.replies import format_reply, read
from distributed.nodelist import fold

CONNECT_TIMEOUT = 3.0  # for a connection: a packet may be lost once
REMEDY = "open TCP between the nodes, on all ports above 1023 (firewall, security group, network policy)"


# ---------------------------------------------------------------- on each node


def listen(nodes: Sequence[str], env: Mapping[str, str] = os.environ) -> int:
    """Listen until standard input ends. The reply is the address and the port."""
    address = listening_address(nodes, env)
    with socket.create_server(("", 0), backlog=1024) as server:  # nobody need accept: a connection is the answer
        sys.stdout.write(format_reply([address, server.getsockname()[1]]))
        sys.stdout.flush()
        sys.stdin.read()
    return 0


def listening_address(nodes: Sequence[str], env: Mapping[str, str]) -> str:
    """The address of this node at which ranks meet: of gloo's interface where one is named, else of the one on the
    way to another node; where the names of nodes lead nowhere, the one at which ssh reached it."""
    if found := address_of_interface(env.get("GLOO_SOCKET_IFNAME", "")):
        return found
    ways = (address_towards(node) for node in nodes if node != socket.gethostname())
    at_ssh = (env.get("SSH_CONNECTION", "").split() + [""] * 3)[2]
    return next((address for address in ways if address and not address.startswith("127.")), at_ssh)


async def connect_to_all(places: Mapping[str, tuple[str, int]], seconds: float = CONNECT_TIMEOUT) -> dict[str, str]:
    """For each of these places why no connection was made; empty when it was."""
    errors = await asyncio.gather(*(connection_error(host, port, seconds) for host, port in places.values()))
    return dict(zip(places, errors, strict=True))


async def connection_error(host: str, port: int, seconds: float) -> str:
    try:
        _, connection = await asyncio.wait_for(asyncio.open_connection(host, port), seconds)
    except asyncio.TimeoutError:
        return f"no answer within {seconds:g} s"
    except OSError as error:
        return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
    connection.close()
    return ""


# ---------------------------------------------------------------- on the launching side


@dataclass(frozen=True)
class FailedConnection:
    """Nodes that cannot connect to another one, all for the same reason."""

    nodes: tuple[str, ...]
    to: str
    address: str
    error: str

    def __str__(self) -> str:
        firewall = ": a firewall between them?" if self.error.startswith("no answer") else ""
        return f"{fold(self.nodes)} cannot connect to {self.to} ({self.address}): {self.error}{firewall}"


def failed_connections(
    tried: Mapping[str, Mapping[str, str]], places: Mapping[str, tuple[str, int]]
) -> list[FailedConnection]:
    """Every connection that was not made.

    Args:
        tried: node -> the other node -> why no connection was made, empty when it was.
    """
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for node, errors in tried.items():
        for other, error in errors.items():
            if error and other != node:
                found[other, error] = (*found.get((other, error), ()), node)
    return [FailedConnection(nodes, to, places[to][0], error) for (to, error), nodes in found.items()]


def read_addresses(folder: Path, nodes: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Where each node that replied listens."""
    values = {node: read(folder, node).value() for node in nodes}
    return {node: (value[0], value[1]) for node, value in values.items() if value}


def read_failed_connections(folder: Path, nodes: Sequence[str]) -> list[FailedConnection]:
    """The failed_connections between the nodes that replied: FOLDER/listening and FOLDER/trying hold the replies."""
    tried = {node: read(folder / "trying", node).value() or {} for node in nodes}
    return failed_connections(tried, read_addresses(folder / "listening", nodes))


def judge(folder: Path, nodes: Sequence[str]) -> list[str]:
    """Each node that has not replied, with the reason; when all have, each gap."""
    replies = [read(folder / question, node) for node in nodes for question in ("listening", "trying")]
    if silent := {reply.node: reply.failure_message() for reply in reversed(replies) if reply.value() is None}:
        return [f"{node}: {silent[node]}" for node in nodes if node in silent]
    return [f"{gap}; {REMEDY}" for gap in read_failed_connections(folder, nodes)]


# ---------------------------------------------------------------- the program


def main(words: Sequence[str] | None = None) -> int:
    """`listen` and `try` on a node, `places` and `judge` on the launching side. Returns 0, or UNFIT."""
    options = _parse(words)
    if options.verb == "listen":
        return listen(options.nodes)
    if options.verb == "try":
        sys.stdout.write(format_reply(asyncio.run(connect_to_all(dict(options.places)))))
    elif options.verb == "judge":
        faults = judge(options.folder, options.nodes)
        sys.stderr.write("".join(f"connectivity: {fault}\n" for fault in faults))
        return UNFIT if faults else 0
    else:
        for node, (address, port) in read_addresses(options.folder, options.nodes).items():
            print(f"{node}={address}:{port}")
    return 0


def _place(word: str) -> tuple[str, tuple[str, int]]:
    """node1=10.0.0.1:4711"""
    node, _, place = word.partition("=")
    address, _, port = place.rpartition(":")
    return node, (address, int(port))


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="connectivity", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    listening = verbs.add_parser("listen", help="reply where this node listens, until standard input ends")
    listening.add_argument("nodes", nargs="+", help="names of all nodes")
    trying = verbs.add_parser("try", help="try to connect")
    trying.add_argument("places", nargs="*", type=_place, help="NAME=ADDRESS:PORT")
    places = verbs.add_parser("places", help="print where each node listens, as arguments of try")
    places.add_argument("folder", type=Path, help="holds NODE.out, NODE.err and NODE.code")
    places.add_argument("nodes", nargs="+")
    judging = verbs.add_parser("judge", help="print who cannot connect to whom, and nodes without a reply")
    judging.add_argument("folder", type=Path, help="holds the replies: listening/ and trying/")
    judging.add_argument("nodes", nargs="+")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
