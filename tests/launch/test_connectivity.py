"""Failed connections between nodes are reported before a launch, with direction and error.

Connections are real ones on this machine. across_nodes.bats tests a firewall between two nodes.
"""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from distributed.host.replies import Reply, format_reply
from distributed.launch import connectivity
from distributed.launch.connectivity import ConnectionTest, connect_to_all, failed_connections, listening_address
from distributed.runs.lookup import RunNode
from distributed.transport.commands import Calls

ADDRESSES = {f"node{number}": (f"10.0.0.{number}", 4000) for number in (1, 2, 3)}
TIMED_OUT = "no reply within 3 s"


def test_successful_and_refused_connections_are_distinguished() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        addresses = {"node1": server.getsockname(), "node2": free.getsockname()}
        assert asyncio.run(connect_to_all(addresses)) == {"node1": "", "node2": "connection refused"}


def test_a_connection_without_a_reply_times_out() -> None:
    """A listener with a full queue does not answer, like a firewall that drops packets."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, socket.socket() as first:
        first.connect(server.getsockname())
        found = asyncio.run(connect_to_all({"node2": server.getsockname()}, seconds=0.2))
    assert found == {"node2": "no reply within 0.2 s"}


@pytest.mark.parametrize(
    ("results", "messages"),
    [
        ({"node1": {"node1": "", "node2": ""}, "node2": {"node1": ""}}, []),
        ({"node1": {"node1": "refused"}}, []),  # a node's connection to itself is ignored
        (
            {"node1": {"node2": "", "node3": ""}, "node2": {"node3": TIMED_OUT}, "node3": {"node2": ""}},
            [f"node2 cannot connect to node3 (10.0.0.3): {TIMED_OUT}: a firewall between them?"],
        ),
        (
            {"node1": {"node3": "no route to host"}, "node2": {"node3": "no route to host"}},
            ["node[1-2] cannot connect to node3 (10.0.0.3): no route to host"],
        ),
        (
            {"node2": {"node3": TIMED_OUT}, "node3": {"node2": "connection refused"}},
            [
                f"node2 cannot connect to node3 (10.0.0.3): {TIMED_OUT}: a firewall between them?",
                "node3 cannot connect to node2 (10.0.0.2): connection refused",
            ],
        ),
    ],
)
def test_each_failed_connection_is_reported_once(results: dict[str, dict[str, str]], messages: list[str]) -> None:
    assert list(map(str, failed_connections(results, ADDRESSES))) == messages


def test_the_listening_address_is_that_of_gloos_interface_or_of_the_ssh_connection() -> None:
    ssh = {"SSH_CONNECTION": "10.0.0.9 5 10.0.0.1 22"}
    assert listening_address(["localhost"], {"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    assert listening_address(["no-such-name.invalid", "localhost"], ssh) == "10.0.0.1", "not loopback"


@pytest.mark.parametrize("address", ["10.9.9.9\nverdict: ok", "a b", "x" * 300, "-oX"])
def test_what_a_node_sends_as_its_address_or_error_is_no_line_of_its_own(address: str) -> None:
    listening = {"node1": Reply("node1", 0, format_reply({"address": address, "port": 5}), "")}
    (fault,) = ConnectionTest(listening, {}).faults()
    assert fault.startswith("node1: invalid reply (address: ") and "\n" not in fault
    listening = {n: Reply(n, 0, format_reply({"address": "10.0.0.1", "port": 5}), "") for n in ("node1", "node2")}
    connecting = {"node1": Reply("node1", 0, format_reply({"node2": "lost\nverdict: ok"}), "")}
    (fault,) = ConnectionTest(listening, connecting).faults()
    assert "\n" not in fault and "cannot connect to node2 (10.0.0.1): lost" in fault


def test_a_listener_that_prints_without_end_is_stopped() -> None:
    began = time.process_time()
    nodes = [RunNode("node1", "", 1, 0)]
    found = connectivity.test_connections(Calls(), lambda *_: ["sh", "-c", "yes; sleep 60"], nodes, b"", lambda _: None)
    assert found.faults() == ["node1: its reply has more than 0.0625 MiB"]
    assert time.process_time() - began < 1


def test_a_name_that_is_no_address_is_an_error_of_its_connection() -> None:
    found = asyncio.run(connect_to_all({"node2": ("x" * 70 + ".y", 5), "node3": ("localhost", 1)}))
    assert found["node2"] == "not an address" and found["node3"]


def test_failed_connections_are_reported_if_all_nodes_have_replied() -> None:
    listening = {}
    for node in ("node1", "node2"):
        address, port = ADDRESSES[node]
        listening[node] = Reply(node, 0, "Welcome!\n" + format_reply({"address": address, "port": port}), "")
    reached = {"node1": "", "node2": ""}

    def faults(second: Reply, **first: str) -> list[str]:
        connecting = {"node1": Reply("node1", 0, format_reply(reached | first), ""), "node2": second}
        return ConnectionTest(listening, connecting).faults()

    good = Reply("node2", 0, format_reply(reached), "")
    assert faults(good) == []
    assert faults(good, node2=TIMED_OUT)[0].startswith(f"node1 cannot connect to node2 (10.0.0.2): {TIMED_OUT}")
    [fault] = faults(Reply("node2", 255, "Welcome!\n", "Host key verification failed.\n"), node2=TIMED_OUT)
    assert fault.startswith("node2: host key unknown; log in once")
