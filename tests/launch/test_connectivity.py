"""Who cannot connect to whom is known before a rank waits for it: in which direction, and why.

Connections are real ones of this machine; that a firewall between two nodes is named is held by across_nodes.bats.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from distributed.host.replies import format_reply
from distributed.launch.connectivity import connect_to_all, failed_connections, listening_address, main

PLACES = {f"node{number}": (f"10.0.0.{number}", 4000) for number in (1, 2, 3)}
LATE = "no answer within 3 s"


def test_what_answers_and_what_refuses_are_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        places = {"node1": server.getsockname(), "node2": free.getsockname()}
        assert asyncio.run(connect_to_all(places)) == {"node1": "", "node2": "connection refused"}


def test_what_does_not_answer_is_given_up() -> None:
    """A listener whose queue is full lets the next one wait, as a firewall does that drops what it does not want."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, socket.socket() as first:
        first.connect(server.getsockname())
        found = asyncio.run(connect_to_all({"node2": server.getsockname()}, seconds=0.2))
    assert found == {"node2": "no answer within 0.2 s"}


@pytest.mark.parametrize(
    ("tried", "said"),
    [
        ({"node1": {"node1": "", "node2": ""}, "node2": {"node1": ""}}, []),
        ({"node1": {"node1": "refused"}}, []),  # itself: its own doctor's matter
        (
            {"node1": {"node2": "", "node3": ""}, "node2": {"node3": LATE}, "node3": {"node2": ""}},
            [f"node2 cannot connect to node3 (10.0.0.3): {LATE}: a firewall between them?"],
        ),
        (
            {"node1": {"node3": "no route to host"}, "node2": {"node3": "no route to host"}},
            ["node[1-2] cannot connect to node3 (10.0.0.3): no route to host"],
        ),
        (
            {"node2": {"node3": LATE}, "node3": {"node2": "connection refused"}},
            [
                f"node2 cannot connect to node3 (10.0.0.3): {LATE}: a firewall between them?",
                "node3 cannot connect to node2 (10.0.0.2): connection refused",
            ],
        ),
    ],
)
def test_each_connection_that_did_not_come_about_is_said_once(
    tried: dict[str, dict[str, str]], said: list[str]
) -> None:
    assert list(map(str, failed_connections(tried, PLACES))) == said


def test_ranks_meet_at_the_interface_that_gloo_is_given_else_on_the_way_to_another_node() -> None:
    ssh = {"SSH_CONNECTION": "10.0.0.9 5 10.0.0.1 22"}
    assert listening_address(["localhost"], {"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    assert listening_address(["no-such-name.invalid", "localhost"], ssh) == "10.0.0.1", "loopback is no way to others"


def test_as_a_program_it_says_who_listens_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for node, place in {"node1": ["10.0.0.1", 4000], "node2": ["10.0.0.2", 4000]}.items():
        (tmp_path / f"{node}.out").write_text(f"Welcome!\n{format_reply(place)}")
    assert main(["places", str(tmp_path), "node1", "node2"]) == 0
    assert capsys.readouterr().out == "node1=10.0.0.1:4000\nnode2=10.0.0.2:4000\n"


def test_a_gap_and_a_node_without_a_reply_make_the_nodes_unfit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: dict[str, dict[str, object]] = {
        "listening": {"node1": ["10.0.0.1", 4000], "node2": ["10.0.0.2", 4000]},
        "trying": {"node1": {"node1": "", "node2": LATE}, "node2": {"node1": "", "node2": ""}},
    }
    for question, replies in said.items():
        (tmp_path / question).mkdir()
        for node, reply in replies.items():
            (tmp_path / question / f"{node}.out").write_text(f"Welcome!\n{format_reply(reply)}")
    words = ["judge", str(tmp_path), "node1", "node2"]
    assert main(words) == 69
    assert capsys.readouterr().err.startswith(f"connectivity: node1 cannot connect to node2 (10.0.0.2): {LATE}")
    (tmp_path / "trying/node1.out").write_text(format_reply({"node1": "", "node2": ""}))
    assert main(words) == 0
    (tmp_path / "trying/node2.out").write_text("Welcome!\n")
    (tmp_path / "trying/node2.code").write_text("255\n")
    (tmp_path / "trying/node2.err").write_text("Host key verification failed.\n")
    assert main(words) == 69
    assert capsys.readouterr().err.startswith("connectivity: node2: host key unknown; log in once")
