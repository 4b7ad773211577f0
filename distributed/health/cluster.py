"""Are these nodes fit to train together, and which of them is not like the others?

Each node has been asked for its facts, and has tried to connect to every other; scripts/doctor.sh NODE... leads them
through it and keeps their answers. Here each is judged as the doctor judges one machine, then they are compared. What
several nodes have in common is said once.

Standard library only: nothing else need be there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from distributed.exit_codes import UNFIT
from distributed.health.checks import LEVELS, Line, fault, judge, size
from distributed.health.comparison import differences
from distributed.health.doctor import plural, render, rows, terminal, wrap
from distributed.health.node import Member, of_answer
from distributed.host.replies import Answer, read
from distributed.launch.connectivity import Gap, read_gaps
from distributed.nodelist import fold
from distributed.smoke.report import REMEDY


@dataclass(frozen=True)
class Cluster:
    """What is known of the nodes, each by its name, in the order of node ranks."""

    nodes: tuple[str, ...]
    members: Mapping[str, Member]
    ahead: Mapping[str, float]  # seconds by which the clock of each member goes before ours
    silent: Mapping[str, str]  # why a node has not answered
    gaps: tuple[Gap, ...]


# ---------------------------------------------------------------- what came back


def heard(folder: Path, nodes: Sequence[str]) -> Cluster:
    """From the answers: FOLDER/looking has the facts; listening and trying, where there are any, the connections."""
    answers = {node: read(folder / "looking", node) for node in nodes}
    found = {node: member_of(answer) for node, answer in answers.items()}
    members = {node: one for node, one in found.items() if isinstance(one, Member)}
    return Cluster(
        nodes=tuple(nodes),
        members=members,
        ahead={node: member.now - answers[node].arrived for node, member in members.items()},
        silent={node: one for node, one in found.items() if isinstance(one, str)},
        gaps=tuple(read_gaps(folder, tuple(members))) if (folder / "trying").exists() else (),
    )


def member_of(answer: Answer) -> Member | str:
    """What the node found, or why there is no answer."""
    try:
        value = answer.value()
        return answer.why_none() if value is None else of_answer(value)
    except (TypeError, ValueError) as error:
        return f"answers as another version of the kit does ({error}): give all nodes the same"


# ---------------------------------------------------------------- judge


def judged(cluster: Cluster) -> dict[str, list[Line]]:
    """What is wrong, or may be, on each node: by itself, and beside the others."""
    lines = {node: [fault("ssh", why)] for node, why in cluster.silent.items()}
    for node, member in cluster.members.items():
        lines[node] = [line for line in judge(member.facts) if line.level != "ok" and concerns(line, node, cluster)]
    for gap in cluster.gaps:
        for node in gap.nodes:
            lines[node].append(fault("reach", str(gap).removeprefix(f"{fold(gap.nodes)} "), REMEDY["reach"]))
    for node, line in unlike(cluster):
        lines[node].append(line)
    return {node: lines[node] for node in cluster.nodes}


def unlike(cluster: Cluster) -> list[tuple[str, Line]]:
    """Who differs from the others, and in what."""
    return differences(cluster.members, cluster.ahead) if len(cluster.members) > 1 else []


def concerns(line: Line, node: str, cluster: Cluster) -> bool:
    """The port is that of the first node, where ranks meet."""
    return line.topic != "port" or node == cluster.nodes[0]


@dataclass(frozen=True)
class Block:
    """Lines that the same nodes have in common."""

    nodes: tuple[str, ...]
    lines: tuple[Line, ...]
    alike: bool  # all but the figures; they are the first node's

    @property
    def worst(self) -> int:
        return max(LEVELS.index(line.level) for line in self.lines)


def blocks(lines: Mapping[str, Sequence[Line]]) -> list[Block]:
    """Each line once, with those that have it; what is worst comes last."""
    having: dict[Line, list[tuple[str, Line]]] = {}
    for node, own in lines.items():
        for line in own:
            having.setdefault(without_figures(line, node), []).append((node, line))
    groups: dict[tuple[str, ...], list[list[Line]]] = {}
    for each in having.values():
        groups.setdefault(tuple(node for node, _ in each), []).append([line for _, line in each])
    found = [
        Block(nodes, tuple(said[0] for said in group), alike=any(len(set(said)) > 1 for said in group))
        for nodes, group in groups.items()
    ]
    return sorted(found, key=lambda block: (block.worst, -len(block.nodes)))


def without_figures(line: Line, node: str) -> Line:
    """A line that two nodes share may differ in its figures and in the node's name; not in what is to be pasted."""

    def plain(text: str) -> str:
        return re.sub(r"[\d.]+", "0", text.replace(node, ""))

    return Line(line.level, line.topic, plain(line.fact), plain(line.fix), line.command)


# ---------------------------------------------------------------- tell

# What the table shows of each node.
COLUMNS: dict[str, Callable[[Member], str]] = {
    "python": lambda member: member.facts.interpreter.version,
    "torch": lambda member: member.facts.torch.version or "none",
    "GPUs": lambda member: gpus(member) or "none",
    "cores": lambda member: f"{member.facts.cores.usable:g}",
    "memory": lambda member: size(member.facts.memory.total),
    "network": lambda member: member.route.interface or "-",
}


def gpus(member: Member) -> str:
    count = Counter(gpu.name.removeprefix("NVIDIA ") for gpu in member.facts.gpus.devices)
    return ", ".join(f"{number} x {name}" for name, number in count.items())


def table(members: Mapping[str, Member]) -> list[str]:
    """A row for all nodes that are alike."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for node, member in members.items():
        alike.setdefault(tuple(show(member) for show in COLUMNS.values()), []).append(node)
    cells = [("", *COLUMNS), *((fold(nodes), *row) for row, nodes in alike.items())]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def tell(cluster: Cluster, width: int | None = None, colour: bool = False) -> str:
    """The nodes side by side, what is wrong with some or all of them, and the sum of it.

    Args:
        width: of the terminal, in characters; None does not break lines.
    """
    lines = judged(cluster)
    parts = [table(cluster.members)] if cluster.members else []
    parts += [list(block_rows(block, cluster, width, colour)) for block in blocks(lines)]
    return "\n\n".join("\n".join(part) for part in [*parts, wrap(summary(cluster, lines), width, 0)]) + "\n"


def block_rows(block: Block, cluster: Cluster, width: int | None, colour: bool) -> Iterator[str]:
    everybody = len(cluster.nodes) > 1 and block.nodes == cluster.nodes
    yield ("all nodes" if everybody else fold(block.nodes)) + (f" (figures of {block.nodes[0]})" if block.alike else "")
    column = max(len(line.topic) for line in block.lines) + 2
    for line in sorted(block.lines, key=lambda line: LEVELS.index(line.level)):
        yield from rows(line, column, width, colour)


def summary(cluster: Cluster, lines: Mapping[str, Sequence[Line]]) -> str:
    """How many are fit, who is not and in what, and who is but differs."""
    unfit = by_topics((node, line) for node, own in lines.items() for line in own if line.level == "fault")
    differing = by_topics((node, line) for node, line in unlike(cluster) if line.level == "warning")
    fit = len(cluster.nodes) - sum(map(len, unfit.values()))
    said = [f"{('all' if not unfit else fit or 'none')} fit for training"]
    if not unfit and len(cluster.members) > 1:
        said.append("each can connect to every other")
    said += [f"{fold(nodes)} {'is' if len(nodes) == 1 else 'are'} not: {topics}" for topics, nodes in unfit.items()]
    said += [f"{fold(nodes)} differ{'s' * (len(nodes) == 1)}: {topics}" for topics, nodes in differing.items()]
    return f"{plural(len(cluster.nodes), 'node')}: {'; '.join(said)}"


def by_topics(lines: Iterable[tuple[str, Line]]) -> dict[str, list[str]]:
    """Topics, such as "torch, MTU" -> the nodes that have just these."""
    topics: dict[str, list[str]] = {}
    for node, line in lines:
        topics.setdefault(node, []).append(line.topic)
    found: dict[str, list[str]] = {}
    for node, own in topics.items():
        found.setdefault(", ".join(dict.fromkeys(own)), []).append(node)
    return found


def as_json(cluster: Cluster) -> str:
    """Every fact of every node; of one that did not answer, why."""
    told = {
        node: {"silent": cluster.silent[node]}
        if node in cluster.silent
        else asdict(cluster.members[node]) | {"unreached": [str(gap) for gap in cluster.gaps if node in gap.nodes]}
        for node in cluster.nodes
    }
    return json.dumps(told, indent=2, sort_keys=True) + "\n"


# ---------------------------------------------------------------- the program


def main(words: Sequence[str] | None = None) -> int:
    """0: fit; 1: a fault; UNFIT: a node has not answered."""
    parser = argparse.ArgumentParser(prog="cluster", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print the facts, judge nothing")
    parser.add_argument("folder", type=Path, help="holds the answers: looking/, listening/ and trying/")
    parser.add_argument("nodes", nargs="+", help="names, by node rank")
    options = parser.parse_args(words)
    cluster = heard(options.folder, options.nodes)
    width, colour = terminal()
    alone = cluster.members[cluster.nodes[0]].facts if len(cluster.nodes) == len(cluster.members) == 1 else None
    if options.json:
        sys.stdout.write(as_json(cluster))
    elif alone:
        sys.stdout.write(render(judge(alone), cluster.nodes[0], width, colour))
    else:
        sys.stdout.write(tell(cluster, width, colour))
    if cluster.silent:
        return UNFIT
    faults = any(line.level == "fault" for own in judged(cluster).values() for line in own)
    return 1 if faults and not options.json else 0


if __name__ == "__main__":
    sys.exit(main())
