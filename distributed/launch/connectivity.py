"""Check before a launch that every node can connect to every other node.

Without a connection, ranks would wait and print nothing. Each node listens at the address that its ranks will use, then
connects to all other nodes at the same time. The launcher reads the replies and reports failed connections:

    node2 cannot connect to node3 (10.0.0.3): no reply within 3 s: a firewall between them?

scripts/lib/connectivity.bash runs these steps.
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
from distributed.nodelist import compact

CONNECT_TIMEOUT = 3.0  # seconds; allows for one lost packet
REMEDY = "open TCP between the nodes, on all ports above 1023 (firewall, security group, network policy)"


# ---------------------------------------------------------------- on each node


def listen(nodes: Sequence[str], env: Mapping[str, str] = os.environ) -> int:
    """Print the address and port of a listening socket, and listen until end of standard input."""
    address = listening_address(nodes, env)
    with socket.create_server(("", 0), backlog=1024) as server:  # the kernel completes connections without accept()
        sys.stdout.write(format_reply([address, server.getsockname()[1]]))
        sys.stdout.flush()
        sys.stdin.read()
    return 0


def listening_address(nodes: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the address of this node that its ranks will use; "" if there is none.

    It is the address of the interface GLOO_SOCKET_IFNAME, else the first non-loopback source address on a route to
    another node, else the address of the ssh connection.
    """
    if found := address_of_interface(env.get("GLOO_SOCKET_IFNAME", "")):
        return found
    routed = (address_towards(node) for node in nodes if node != socket.gethostname())
    of_ssh = (env.get("SSH_CONNECTION", "").split() + [""] * 3)[2]
    return next((address for address in routed if address and not address.startswith("127.")), of_ssh)


async def connect_to_all(addresses: Mapping[str, tuple[str, int]], seconds: float = CONNECT_TIMEOUT) -> dict[str, str]:
    """Connect to all addresses at the same time. Returns the error of each connection; "" without an error."""
    errors = await asyncio.gather(*(connection_error(host, port, seconds) for host, port in addresses.values()))
    return dict(zip(addresses, errors, strict=True))


async def connection_error(host: str, port: int, seconds: float) -> str:
    try:
        _, connection = await asyncio.wait_for(asyncio.open_connection(host, port), seconds)
    except asyncio.TimeoutError:
        return f"no reply within {seconds:g} s"
    except OSError as error:
        return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
    connection.close()
    return ""


# ---------------------------------------------------------------- in the launcher


@dataclass(frozen=True)
class FailedConnection:
    """Nodes that cannot connect to another node, all with the same error."""

    nodes: tuple[str, ...]
    to: str
    address: str
    error: str

    def __str__(self) -> str:
        firewall = ": a firewall between them?" if self.error.startswith("no reply") else ""
        return f"{compact(self.nodes)} cannot connect to {self.to} ({self.address}): {self.error}{firewall}"


def failed_connections(
    results: Mapping[str, Mapping[str, str]], addresses: Mapping[str, tuple[str, int]]
) -> list[FailedConnection]:
    """Return the failed connections, grouped by target and error.

    Args:
        results: node -> other node -> error of the connection; "" without an error.
    """
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for node, errors in results.items():
        for other, error in errors.items():
            if error and other != node:
                found[other, error] = (*found.get((other, error), ()), node)
    return [FailedConnection(nodes, to, addresses[to][0], error) for (to, error), nodes in found.items()]


def read_addresses(directory: Path, nodes: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Return the address and port of each node that replied."""
    values = {node: read(directory, node).value() for node in nodes}
    return {node: (value[0], value[1]) for node, value in values.items() if value}


def read_failed_connections(directory: Path, nodes: Sequence[str]) -> list[FailedConnection]:
    """Return failed connections between nodes that replied. directory: contains listening/ and connecting/."""
    results = {node: read(directory / "connecting", node).value() or {} for node in nodes}
    return failed_connections(results, read_addresses(directory / "listening", nodes))


def judge(directory: Path, nodes: Sequence[str]) -> list[str]:
    """Return messages about nodes without a reply or, if all nodes replied, about failed connections."""
    replies = [read(directory / kind, node) for node in nodes for kind in ("listening", "connecting")]
    if missing := {reply.node: reply.failure_message() for reply in reversed(replies) if reply.value() is None}:
        return [f"{node}: {missing[node]}" for node in nodes if node in missing]
    return [f"{failure}; {REMEDY}" for failure in read_failed_connections(directory, nodes)]


# ---------------------------------------------------------------- command line


def main(arguments: Sequence[str]) -> int:
    """`listen` and `try` run on a node, `addresses` and `judge` in the launcher. Returns 0 or UNFIT."""
    options = _parse(arguments)
    if options.verb == "listen":
        return listen(options.nodes)
    if options.verb == "try":
        sys.stdout.write(format_reply(asyncio.run(connect_to_all(dict(options.addresses)))))
    elif options.verb == "judge":
        faults = judge(options.directory, options.nodes)
        sys.stderr.write("".join(f"connectivity: {fault}\n" for fault in faults))
        return UNFIT if faults else 0
    else:
        for node, (address, port) in read_addresses(options.directory, options.nodes).items():
            print(f"{node}={address}:{port}")
    return 0


def _node_address(argument: str) -> tuple[str, tuple[str, int]]:
    """Parse node1=10.0.0.1:4711."""
    node, _, listening = argument.partition("=")
    address, _, port = listening.rpartition(":")
    return node, (address, int(port))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="connectivity", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    listening = verbs.add_parser("listen", help="listen, and print the address, until end of standard input")
    listening.add_argument("nodes", nargs="+", help="names of all nodes")
    connecting = verbs.add_parser("try", help="try to connect")
    connecting.add_argument("addresses", nargs="*", type=_node_address, help="NAME=ADDRESS:PORT")
    addresses = verbs.add_parser("addresses", help="print the addresses of the nodes, as arguments for try")
    addresses.add_argument("directory", type=Path, help="contains NODE.out, NODE.err and NODE.code")
    addresses.add_argument("nodes", nargs="+")
    judging = verbs.add_parser("judge", help="print failed connections, and nodes without a reply")
    judging.add_argument("directory", type=Path, help="contains the replies: listening/ and connecting/")
    judging.add_argument("nodes", nargs="+")
    return parser.parse_args(arguments)
