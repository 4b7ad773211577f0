"""Check whether several nodes are fit to train together, and print how they differ.

scripts/doctor.sh NODE... executes this program, which runs the node probe (host.probe) on each node, tests the
connections between all nodes, checks each node as doctor checks a single machine, and compares the nodes. A finding
that several nodes share is printed once.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from distributed import terminal
from distributed.exit_codes import UNFIT
from distributed.health.checks import LEVELS, Finding, fault, judge, size
from distributed.health.differences import compare
from distributed.health.doctor import render, render_findings
from distributed.host.facts import FullNodeFacts
from distributed.host.replies import Reply
from distributed.launch.connectivity import REMEDY, ConnectionTest, FailedConnection, test_connections
from distributed.nodelist import compact
from distributed.transport.commands import (
    Calls,
    Messages,
    SshCommands,
    TransportError,
    environment_block,
    exit_on_signals,
    in_node_env,
    quote,
    read_lists,
)
from distributed.transport.loop import Command
from distributed.transport.sync import sync_nodes
from distributed.trust import one_line


class Node(NamedTuple):
    """A node to check. address: [user@]host for ssh."""

    node: str
    address: str


@dataclass(frozen=True)
class ClusterFacts:
    """The facts of the nodes, by name, in the order of node ranks."""

    nodes: tuple[str, ...]
    facts: Mapping[str, FullNodeFacts]  # of the nodes that replied
    ahead: Mapping[str, float]  # seconds by which their clocks are ahead of this machine's
    failed: Mapping[str, str]  # node without a usable reply -> reason
    failed_connections: tuple[FailedConnection, ...]


# ---------------------------------------------------------------- the replies


def cluster_facts(replies: Mapping[str, Reply], test: ConnectionTest | None) -> ClusterFacts:
    """Collect the facts and failures of all nodes from their replies to the probe and from the connection test.

    test: None if the connections were not tested.
    """
    found = {node: facts_of(reply) for node, reply in replies.items()}
    facts = {node: value for node, value in found.items() if isinstance(value, FullNodeFacts)}
    failed = {node: value for node, value in found.items() if isinstance(value, str)}
    return ClusterFacts(
        nodes=tuple(replies),
        facts=facts,
        ahead={node: value.now - replies[node].arrived for node, value in facts.items()},
        failed=failed | ({node: why for node, why in test.missing().items() if node in facts} if test else {}),
        failed_connections=tuple(test.failed()) if test else (),
    )


def facts_of(reply: Reply) -> FullNodeFacts | str:
    """The facts in a reply, or why it has none."""
    facts: FullNodeFacts | None = one_line(reply.value(FullNodeFacts))
    return facts or reply.failure_message(FullNodeFacts)


# ---------------------------------------------------------------- judge


def judge_cluster(cluster: ClusterFacts) -> dict[str, list[Finding]]:
    """The warnings and faults of each node: from its own checks, and from the comparison with the other nodes."""
    found = {
        node: [fault(cluster.failed[node], topic="ssh")] if node in cluster.failed else [] for node in cluster.nodes
    }
    for node, node_facts in cluster.facts.items():
        own = [finding for finding in judge(node_facts.facts) if finding.level != "ok"]
        # Only the first node listens on the master port.
        found[node] += [finding for finding in own if finding.topic != "port" or node == cluster.nodes[0]]
    for failure in cluster.failed_connections:
        for node in failure.nodes:
            found[node].append(fault(str(failure).removeprefix(f"{compact(failure.nodes)} "), REMEDY, topic="reach"))
    for node, finding in compare(cluster.facts, cluster.ahead) if len(cluster.facts) > 1 else ():
        found[node].append(finding)
    return found


# Nodes, and the findings that they share. Each shared finding is a list, with one Finding for each of the nodes.
SharedFindings = tuple[tuple[str, ...], list[list[Finding]]]


def group_findings(found: Mapping[str, Sequence[Finding]]) -> list[SharedFindings]:
    """Group the findings by the nodes that share them. The group with the worst finding is last."""
    by_text: dict[Finding, dict[str, Finding]] = {}
    for node, findings in found.items():
        for finding in findings:
            by_text.setdefault(without_numbers(finding, node), {})[node] = finding
    by_nodes: dict[tuple[str, ...], list[list[Finding]]] = {}
    for by_node in by_text.values():
        by_nodes.setdefault(tuple(by_node), []).append(list(by_node.values()))

    def severity(group: SharedFindings) -> tuple[int, int]:
        nodes, shared = group
        return max(LEVELS.index(same[0].level) for same in shared), -len(nodes)

    return sorted(by_nodes.items(), key=severity)


def without_numbers(finding: Finding, node: str) -> Finding:
    """Remove numbers and the node's name from a finding, so that equal findings of several nodes can be grouped.

    The shell command of the finding (Finding.command) is not changed. A finding about connections is not changed at
    all: its numbers are parts of node names and addresses.
    """
    if finding.topic == "reach":
        return finding
    fact, fix = (re.sub(r"[\d.]+", "0", text.replace(node, "")) for text in (finding.fact, finding.fix))
    return replace(finding, fact=fact, fix=fix)


# ---------------------------------------------------------------- text

COLUMNS = ("", "python", "torch", "GPUs", "cores", "memory", "network")
WIDEST = 60  # columns of a cell


def row_of(node: FullNodeFacts) -> tuple[str, ...]:
    facts = node.facts
    count = Counter(gpu.name.removeprefix("NVIDIA ") for gpu in facts.gpus.devices)
    gpus = ", ".join(f"{number} x {name}" for name, number in count.items())
    return (
        facts.interpreter.version,
        facts.torch.version or "none",
        gpus or "none",
        f"{facts.cores.usable:g}",
        size(facts.memory.total),
        node.route.interface or "-",
    )


def node_table(nodes: Mapping[str, FullNodeFacts]) -> list[str]:
    """One row for all nodes that have the same values."""
    nodes_of: dict[tuple[str, ...], list[str]] = {}
    for name, node in nodes.items():
        nodes_of.setdefault(row_of(node), []).append(name)
    cells = ((compact(names), *(terminal.cut(cell, WIDEST) for cell in row)) for row, names in nodes_of.items())
    return terminal.table([COLUMNS, *cells])


def render_cluster(cluster: ClusterFacts, width: int | None = None) -> str:
    """A table of the nodes, their findings, and a summary.

    Args:
        width: columns of the terminal; None does not break lines.
    """
    found = judge_cluster(cluster)
    parts = [node_table(cluster.facts)] if cluster.facts else []
    for nodes, shared in group_findings(found):
        names = "all nodes" if len(cluster.nodes) > 1 and nodes == cluster.nodes else compact(nodes)
        names += f" (values of {nodes[0]})" if any(len(set(same)) > 1 for same in shared) else ""
        parts.append([names, *render_findings([same[0] for same in shared], width)])
    return "\n\n".join("\n".join(part) for part in [*parts, terminal.wrap(summary(cluster, found), width)]) + "\n"


def summary(cluster: ClusterFacts, found: Mapping[str, Sequence[Finding]]) -> str:
    """How many nodes are fit, and which are not."""
    unfit = [node for node, findings in found.items() if any(finding.level == "fault" for finding in findings)]
    parts = [f"{'all' if not unfit else len(found) - len(unfit) or 'none'} fit for training"]
    if not unfit and len(cluster.facts) > 1:
        parts.append("each can connect to every other")
    if unfit:
        parts.append(f"{compact(unfit)} {'is' if len(unfit) == 1 else 'are'} not")
    return f"{terminal.plural(len(cluster.nodes), 'node')}: {'; '.join(parts)}"


def as_json(cluster: ClusterFacts) -> str:
    """The facts of each node; for a node without a usable reply, the reason."""
    facts = {
        node: {"error": cluster.failed[node]}
        if node in cluster.failed
        else asdict(cluster.facts[node])
        | {"unreached": [str(failure) for failure in cluster.failed_connections if node in failure.nodes]}
        for node in cluster.nodes
    }
    return json.dumps(facts, indent=2, sort_keys=True) + "\n"


# ---------------------------------------------------------------- the program


def query_nodes(options: argparse.Namespace, lists: Mapping[str, Sequence[bytes]], messages: Messages) -> ClusterFacts:
    """Probe all nodes, and test the connections between those that replied. Raises TransportError."""
    commands, log = SshCommands(messages.print, options.cwd if options.sync else ""), messages.log
    calls, nodes = Calls(), [Node(*pair) for pair in options.nodes]
    block = environment_block(lists["inherited"], lists["environment"])
    if options.sync:
        sync_nodes(calls, commands, nodes, log)

    def on_node(node: Node, module: str, arguments: Sequence[str]) -> Command:
        command = in_node_env(options.node_env, options.python, module, *arguments)
        return commands.command(node, command, options.cwd)

    probes = {node: on_node(node, "host.probe", probe_arguments(options)) for node in nodes}
    replies = calls.call_all(probes, log, sent=block)
    reachable = [node for node in nodes if not replies[node.node].code]
    test = test_connections(calls, on_node, reachable, block, log) if len(reachable) > 1 else None
    return cluster_facts(replies, test)


def probe_arguments(options: argparse.Namespace) -> list[str]:
    names = [name for name, _ in options.nodes]
    where = ["--directory", options.cwd, "--log-dir", options.log_dir]
    return [*where, "--port", options.master_port, "--", *names]


def main(arguments: Sequence[str]) -> int:
    """Return UNFIT if a node has no usable reply, 1 if there is a fault and no --json, otherwise 0."""
    parser = argparse.ArgumentParser(prog="cluster", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--json", action="store_true", help="print the facts as JSON, without findings")
    add("--node", required=True, nargs=2, action="append", metavar=("NAME", "ADDRESS"), dest="nodes")
    add("--program", required=True, help="name of the script in messages")
    add("--cwd", required=True, metavar="DIR", help="working directory on the nodes")
    add("--log-dir", required=True, metavar="DIR", help="the directory of all runs")
    add("--python", required=True, metavar="PATH", help="interpreter of the nodes")
    add("--node-env", required=True, metavar="FILE")
    add("--master-port", required=True, metavar="PORT")
    add("--sync", action="store_true", help="copy the working directory to the nodes")
    add("--dry-run", action="store_true", help="print the command of the nodes, run nothing")
    add("--quiet", action="store_true")
    options = parser.parse_args(arguments)
    exit_on_signals()
    messages = Messages(options.program, options.quiet)
    lists = read_lists()
    if options.dry_run:
        command = in_node_env(options.node_env, options.python, "host.probe", *probe_arguments(options))
        print(f"{' '.join(name for name, _ in options.nodes)}: {quote(command)}")
        return 0
    try:
        cluster = query_nodes(options, lists, messages)
    except TransportError as error:
        return messages.print_error(error)
    return show(cluster, options.json)


def show(cluster: ClusterFacts, in_json: bool) -> int:
    """Print the findings, or the facts as JSON. Returns the exit code of the program."""
    if in_json:
        sys.stdout.write(as_json(cluster))
    elif len(cluster.nodes) == 1 and cluster.facts:
        [(name, only)] = cluster.facts.items()
        terminal.show(render(judge(only.facts), name, terminal.width()))
    else:
        terminal.show(render_cluster(cluster, terminal.width()))
    if cluster.failed:
        return UNFIT
    faults = any(finding.level == "fault" for found in judge_cluster(cluster).values() for finding in found)
    return 1 if faults and not in_json else 0
