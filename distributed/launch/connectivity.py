"""Check that every node can connect to every other node, for doctor.sh and test_distributed.sh.

Without a connection, ranks would wait and print nothing. Each node listens at the address that its ranks will use, then
connects to all other nodes at the same time. The launcher reads the replies and reports failed connections:

    node2 cannot connect to node3 (10.0.0.3): no reply within 3 s: a firewall between them?
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distributed.host.network import address_of_interface, address_towards
from distributed.host.replies import ADDRESS, Reply, format_reply
from distributed.nodelist import compact
from distributed.trust import one_line

if TYPE_CHECKING:
    from distributed.transport.commands import AnyTarget, Calls
    from distributed.transport.loop import Command

CONNECT_TIMEOUT = 3.0  # seconds; allows for one lost packet
MAX_PRINTED = 1 << 16  # bytes that a listener and its login shell print
END_TIMEOUT = 5.0  # seconds for a listener to exit
REMEDY = "open TCP between the nodes, on all ports above 1023 (firewall, security group, network policy)"

LISTENING = {"address": ADDRESS, "port": range(1, 1 << 16)}  # reply of `listen`
ERRORS = dict[str, str]  # reply of `try`


# ---------------------------------------------------------------- on each node


def listen(nodes: Sequence[str], env: Mapping[str, str] = os.environ) -> int:
    """Print the address and port of a listening socket, and listen until end of standard input."""
    address = listening_address(nodes, env)
    with socket.create_server(("", 0), backlog=1024) as server:  # the kernel completes connections without accept()
        sys.stdout.write(format_reply({"address": address, "port": server.getsockname()[1]}))
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
    except UnicodeError:
        return "not an address"
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
            if error and other != node and other in addresses:
                found[other, error] = (*found.get((other, error), ()), node)
    return [FailedConnection(nodes, to, addresses[to][0], error) for (to, error), nodes in found.items()]


@dataclass(frozen=True)
class ConnectionTest:
    """The replies of the nodes to the subcommands `listen` and `try` of this module."""

    listening: Mapping[str, Reply]
    connecting: Mapping[str, Reply]

    def missing(self) -> dict[str, str]:
        """Node -> why it has no reply."""
        kinds: list[tuple[Reply, object]] = [(reply, ERRORS) for reply in self.connecting.values()]
        kinds += [(reply, LISTENING) for reply in self.listening.values()]
        return {reply.node: reply.failure_message(kind) for reply, kind in kinds if reply.value(kind) is None}

    def failed(self) -> list[FailedConnection]:
        """Failed connections between nodes that replied."""
        results = {node: one_line(reply.value(ERRORS) or {}) for node, reply in self.connecting.items()}
        return failed_connections(results, addresses_of(self.listening))

    def faults(self) -> list[str]:
        """Messages about nodes without a reply or, if all nodes replied, about failed connections."""
        if missing := self.missing():
            return [f"{node}: {missing[node]}" for node in self.listening if node in missing]
        return [f"{failure}; {REMEDY}" for failure in self.failed()]


def addresses_of(listening: Mapping[str, Reply]) -> dict[str, tuple[str, int]]:
    """The address and port of each node that replied."""
    values = {node: reply.value(LISTENING) for node, reply in listening.items()}
    return {node: (value["address"], value["port"]) for node, value in values.items() if value}


def test_connections(
    calls: Calls,
    on_node: Callable[[AnyTarget, str, Sequence[str]], Command],
    nodes: Sequence[AnyTarget],
    block: bytes,
    log: Callable[[str], None],
) -> ConnectionTest:
    """Let every node connect to every other node that listens.

    Args:
        on_node: on_node(node, module, arguments) returns the local command that runs a module of the package on a node.
        block: environment variables that these commands read from standard input, see environment_block().
        log: see Calls.log_waiting().
    """
    names = [node.node for node in nodes]
    printed = {name: bytearray() for name in names}
    ended: dict[str, Reply] = {}

    def handle_end(reply: Reply) -> None:
        ended[reply.node] = reply

    listeners = [
        calls.call(
            node.node, on_node(node, "launch.connectivity", ["listen", *names]), handle_end, sent=block,
            keep_input=True, on_output=printed[node.node].extend, most=MAX_PRINTED,
        )
        for node in nodes
    ]  # fmt: skip

    def replies() -> dict[str, Reply]:
        known = {name: ended.get(name, Reply(name, 0, "", "")) for name in names}
        return {name: replace(reply, out=printed[name].decode(errors="replace")) for name, reply in known.items()}

    def waiting() -> list[str]:
        return [name for name, reply in replies().items() if name not in ended and reply.value() is None]

    calls.log_waiting(names, waiting, log)
    while waiting():
        calls.loop.wait()
    listening = replies()
    tries = ["try", *(f"{node}={host}:{port}" for node, (host, port) in addresses_of(listening).items())]
    reached = [node for node in nodes if listening[node.node].value(LISTENING) is not None]
    commands = {node: on_node(node, "launch.connectivity", tries) for node in reached}
    connecting = calls.call_all(commands, log, sent=block)
    for listener in listeners:
        listener.end_input()
        calls.loop.call_later(END_TIMEOUT, listener.kill)
    calls.wait(listeners)
    return ConnectionTest(listening, connecting)


# ---------------------------------------------------------------- command line


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand `listen` or `try` on a node. Returns 0."""
    options = _parse(arguments)
    if options.verb == "listen":
        return listen(options.nodes)
    sys.stdout.write(format_reply(asyncio.run(connect_to_all(dict(options.addresses)))))
    return 0


def _node_address(argument: str) -> tuple[str, tuple[str, int]]:
    """Parse node1=10.0.0.1:4711."""
    node, _, listening = argument.partition("=")
    address, _, port = listening.rpartition(":")
    return node, (address, int(port))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="connectivity", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    listening = verbs.add_parser("listen", help="listen, and print the address, until end of standard input")
    listening.add_argument("nodes", nargs="+", help="names of all nodes")
    connecting = verbs.add_parser("try", help="try to connect")
    connecting.add_argument("addresses", nargs="*", type=_node_address, help="NAME=ADDRESS:PORT")
    return parser.parse_args(arguments)
