"""Are these nodes fit to train together, and which of them is not like the others?

scripts/doctor.sh NODE... has run the node probe (host.probe) on each node and has let each try to connect to every
other. Here each node is judged as the doctor judges one machine, then they are compared. A finding that several nodes
have in common is printed once.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from distributed import terminal
from distributed.exit_codes import UNFIT
from distributed.health.checks import LEVELS, Finding, fault, judge, size
from distributed.health.differences import compare
from distributed.health.doctor import render, render_findings
from distributed.host.facts import Facts, FullNodeFacts, Route
from distributed.host.replies import Reply, read
from distributed.launch.connectivity import REMEDY, FailedConnection, read_failed_connections
from distributed.nodelist import fold


@dataclass(frozen=True)
class Cluster:
    """What is known of the nodes, each by its name, in the order of node ranks."""

    nodes: tuple[str, ...]
    facts: Mapping[str, FullNodeFacts]  # of each node that has replied
    ahead: Mapping[str, float]  # seconds by which the clock of each of these is ahead of ours
    silent: Mapping[str, str]  # why a node has not replied
    gaps: tuple[FailedConnection, ...]


# ---------------------------------------------------------------- what came back


def read_cluster(folder: Path, nodes: Sequence[str]) -> Cluster:
    """From the replies: FOLDER/looking has the facts; listening and trying, where there are any, the connections."""
    replies = {node: read(folder / "looking", node) for node in nodes}
    found = {node: facts_of(reply) for node, reply in replies.items()}
    facts = {node: one for node, one in found.items() if isinstance(one, FullNodeFacts)}
    return Cluster(
        nodes=tuple(nodes),
        facts=facts,
        ahead={node: one.now - replies[node].arrived for node, one in facts.items()},
        silent={node: one for node, one in found.items() if isinstance(one, str)},
        gaps=tuple(read_failed_connections(folder, tuple(facts))) if (folder / "trying").exists() else (),
    )


def facts_of(reply: Reply) -> FullNodeFacts | str:
    """What the node reported, or why there is nothing."""
    value = reply.value()
    if value is None:
        return reply.failure_message()
    try:
        return rebuilt(value)
    except (TypeError, KeyError) as error:
        return f"answers as another version of the kit does ({error}): give all nodes the same"


def rebuilt(value: Mapping[str, Any]) -> FullNodeFacts:
    """The value that the node had, from what JSON has made of it.

    Raises:
        TypeError, KeyError: parts are missing or unknown, as in the reply of an older kit.
    """
    facts, route = rebuilt_part(Facts, value["facts"]), Route(**value["route"])
    return FullNodeFacts(**{**value, "addresses": tuple(value["addresses"]), "facts": facts, "route": route})


def rebuilt_part(kind: Any, value: Any) -> Any:
    if get_origin(kind) is tuple:
        return tuple(rebuilt_part(get_args(kind)[0], part) for part in value)
    if isinstance(kind, type) and is_dataclass(kind):
        kinds = get_type_hints(kind)
        return kind(**{name: rebuilt_part(kinds[name], part) for name, part in value.items()})
    return value


# ---------------------------------------------------------------- judge


def judge_cluster(cluster: Cluster) -> dict[str, list[Finding]]:
    """What is wrong, or may be, on each node: by itself, and beside the others."""
    found = {node: [fault("ssh", cluster.silent[node])] if node in cluster.silent else [] for node in cluster.nodes}
    for node, one in cluster.facts.items():
        own = [finding for finding in judge(one.facts) if finding.level != "ok"]
        # The port is that of the first node, where ranks meet.
        found[node] += [finding for finding in own if finding.topic != "port" or node == cluster.nodes[0]]
    for gap in cluster.gaps:
        for node in gap.nodes:
            found[node].append(fault("reach", str(gap).removeprefix(f"{fold(gap.nodes)} "), REMEDY))
    for node, finding in compare(cluster.facts, cluster.ahead) if len(cluster.facts) > 1 else ():
        found[node].append(finding)
    return found


@dataclass(frozen=True)
class Block:
    """Findings that the same nodes have in common."""

    nodes: tuple[str, ...]
    findings: tuple[Finding, ...]
    alike: bool  # all but the figures; they are the first node's


def blocks(found: Mapping[str, Sequence[Finding]]) -> list[Block]:
    """Each finding once, with the nodes that have it; the worst comes last."""
    having: dict[Finding, dict[str, Finding]] = {}
    for node, findings in found.items():
        for finding in findings:
            having.setdefault(without_figures(finding, node), {})[node] = finding
    groups: dict[tuple[str, ...], list[list[Finding]]] = {}
    for by_node in having.values():
        groups.setdefault(tuple(by_node), []).append(list(by_node.values()))
    result = [
        Block(nodes, tuple(same[0] for same in group), alike=any(len(set(same)) > 1 for same in group))
        for nodes, group in groups.items()
    ]
    return sorted(result, key=lambda block: (max(map(severity, block.findings)), -len(block.nodes)))


def severity(finding: Finding) -> int:
    return LEVELS.index(finding.level)


def without_figures(finding: Finding, node: str) -> Finding:
    """Findings that nodes share may differ in figures and in the node's name; not in what is to be pasted.

    Nodes that cannot be reached are named and numbered: none of these is a figure.
    """
    if finding.topic == "reach":
        return finding
    fact, fix = (re.sub(r"[\d.]+", "0", text.replace(node, "")) for text in (finding.fact, finding.fix))
    return Finding(finding.level, finding.topic, fact, fix, finding.command)


# ---------------------------------------------------------------- text

COLUMNS = ("", "python", "torch", "GPUs", "cores", "memory", "network")


def row_of(node: FullNodeFacts) -> tuple[str, ...]:
    """What the table shows of a node."""
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
    """A row for all nodes that are alike."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, node in nodes.items():
        alike.setdefault(row_of(node), []).append(name)
    return terminal.table([COLUMNS, *((fold(names), *row) for row, names in alike.items())])


def render_cluster(cluster: Cluster, width: int | None = None) -> str:
    """The nodes side by side, what is wrong with some or all of them, and the sum of it.

    Args:
        width: of the terminal, in columns; None does not break lines.
    """
    found = judge_cluster(cluster)
    parts = [node_table(cluster.facts)] if cluster.facts else []
    parts += [list(render_block(block, cluster, width)) for block in blocks(found)]
    return "\n\n".join("\n".join(part) for part in [*parts, terminal.wrap(summary(cluster, found), width)]) + "\n"


def render_block(block: Block, cluster: Cluster, width: int | None) -> Iterator[str]:
    everybody = len(cluster.nodes) > 1 and block.nodes == cluster.nodes
    yield ("all nodes" if everybody else fold(block.nodes)) + (f" (figures of {block.nodes[0]})" if block.alike else "")
    yield from render_findings(block.findings, width)


def summary(cluster: Cluster, found: Mapping[str, Sequence[Finding]]) -> str:
    """How many are fit, and which are not."""
    unfit = [node for node, own in found.items() if any(one.level == "fault" for one in own)]
    parts = [f"{'all' if not unfit else len(found) - len(unfit) or 'none'} fit for training"]
    if not unfit and len(cluster.facts) > 1:
        parts.append("each can connect to every other")
    if unfit:
        parts.append(f"{fold(unfit)} {'is' if len(unfit) == 1 else 'are'} not")
    return f"{terminal.plural(len(cluster.nodes), 'node')}: {'; '.join(parts)}"


def as_json(cluster: Cluster) -> str:
    """Every fact of every node; of one that did not reply, why."""
    told = {
        node: {"silent": cluster.silent[node]}
        if node in cluster.silent
        else asdict(cluster.facts[node]) | {"unreached": [str(gap) for gap in cluster.gaps if node in gap.nodes]}
        for node in cluster.nodes
    }
    return json.dumps(told, indent=2, sort_keys=True) + "\n"


# ---------------------------------------------------------------- the program


def main(words: Sequence[str] | None = None) -> int:
    """0: fit; 1: a fault; UNFIT: a node has not replied."""
    parser = argparse.ArgumentParser(prog="cluster", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print the facts, judge nothing")
    parser.add_argument("folder", type=Path, help="holds the replies: looking/, listening/ and trying/")
    parser.add_argument("nodes", nargs="+", help="names, by node rank")
    options = parser.parse_args(words)
    cluster = read_cluster(options.folder, options.nodes)
    if options.json:
        sys.stdout.write(as_json(cluster))
    elif len(cluster.nodes) == 1 and cluster.facts:
        [(name, only)] = cluster.facts.items()
        terminal.show(render(judge(only.facts), name, terminal.width()))
    else:
        terminal.show(render_cluster(cluster, terminal.width()))
    if cluster.silent:
        return UNFIT
    faults = any(finding.level == "fault" for found in judge_cluster(cluster).values() for finding in found)
    return 1 if faults and not options.json else 0


if __name__ == "__main__":
    sys.exit(main())
