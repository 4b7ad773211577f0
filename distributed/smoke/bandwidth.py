"""Find slow nodes, ranks and links from the bandwidth between ranks of different nodes.

The ranks exchange messages in rounds. In a round one rank of a node has at most one partner, on another node. Ranks
that share a network adapter are therefore measured one after another, and all bandwidths are comparable. This module
does not use PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

SLOW_FACTOR = 3.0  # a slow link has at most a third of the usual bandwidth; a switch may cause smaller differences
SHOWN = 3  # links listed for a slow node or rank
MAX_ROUNDS = 32  # of local rank 0, and of the others together; some pairs of more than 32 nodes are not measured
MIN_ROUNDS = 3  # of each local rank


@dataclass(frozen=True)
class Link:
    """The bandwidth between two nodes or ranks, per direction, with traffic in both directions. GB is 10^9 bytes."""

    one: str
    other: str
    gb_per_second: float

    def peer_of(self, end: str) -> str:
        return self.other if end == self.one else self.one


@dataclass(frozen=True)
class Bottleneck:
    """A slow node or rank, or the slow link of a node or rank."""

    end: str  # the name of the node or rank
    links: list[Link]  # those that are slow
    expected: str  # "9.8 GB/s"
    got: str
    text: str


def rank_rounds(nodes: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Pair ranks with the same local rank. If only one node has a local rank, this rank is paired with any local rank.

    nodes: the ranks of each node, in the order of their local ranks.
    """
    largest = max(map(len, nodes))
    rounds = []
    for local_rank in range(largest):
        having = [ranks for ranks in nodes if local_rank < len(ranks)]
        members = having if len(having) > 1 else nodes
        ends = [ranks[local_rank % len(ranks)] for ranks in members]
        limit = max(MIN_ROUNDS, MAX_ROUNDS // largest) if local_rank else MAX_ROUNDS
        for pairs in round_robin(len(members))[:limit]:
            useful = [pair for pair in pairs if any(local_rank < len(members[end]) for end in pair)]
            rounds.append([(ends[one], ends[other]) for one, other in useful])
    return rounds


def round_robin(count: int) -> list[list[tuple[int, int]]]:
    """Pair the numbers 0 .. count-1 by the circle method: each pair is in one round, no number is twice in a round."""
    even = count + count % 2
    ring = list(range(1, even))
    rounds = []
    for _ in ring:
        seats = [0, *ring]
        pairs = [(min(pair), max(pair)) for pair in zip(seats[: even // 2], reversed(seats[even // 2 :]), strict=True)]
        rounds.append([pair for pair in pairs if pair[1] < count])  # if count is odd, one number has no partner
        ring = [ring[-1], *ring[:-1]]
    return rounds


def find_bottlenecks(links: Sequence[Link], node_of: Mapping[str, str]) -> list[Bottleneck]:
    """Return the slow nodes and links between nodes, then the slow ranks and links of ranks on the other links.

    links: one for each pair of ranks. The bandwidth between two nodes is that of their fastest link.
    node_of: name of a rank -> name of its node.
    """
    nodes_of = {link: (node_of[link.one], node_of[link.other]) for link in links}
    ascending = sorted(links, key=lambda link: link.gb_per_second)
    best = {nodes_of[link]: link.gb_per_second for link in ascending}
    found = compare([Link(*nodes, best[nodes]) for nodes in dict.fromkeys(nodes_of.values())])
    slow = {(link.one, link.other) for one in found for link in one.links}
    return [*found, *compare([link for link in links if nodes_of[link] not in slow])]


def compare(links: Sequence[Link]) -> list[Bottleneck]:
    """Return the slow ends, then the slow links between the other ends.

    An end is a suspect if its fastest link is slow compared with the fastest links of the others. It is slow if it has
    a link to an end that is no suspect; a slow link between two other suspects may be slow because of either.
    """
    links_of: dict[str, list[Link]] = {}
    for link in links:
        links_of.setdefault(link.one, []).append(link)
        links_of.setdefault(link.other, []).append(link)
    best = {end: max(link.gb_per_second for link in own) for end, own in links_of.items()}
    usual = {end: median([gb for other, gb in best.items() if other != end] or [0.0]) for end in best}
    suspects = {end for end in best if best[end] * SLOW_FACTOR <= usual[end]}
    slow = [end for end in best if end in suspects and any(link.peer_of(end) not in suspects for link in links_of[end])]
    found = [slow_end(end, links_of[end], usual[end]) for end in slow]
    rest = [link for link in links if not {link.one, link.other} & set(slow)]
    for link in rest:
        others = [
            [one.gb_per_second for one in links_of[end] if one != link and one.peer_of(end) not in slow]
            for end in (link.one, link.other)
        ]
        if link.one in suspects:
            found.append(slow_link(link, usual[link.one], "the others have {} among themselves"))
        elif all(others) and link.gb_per_second * SLOW_FACTOR <= (least := min(map(median, others))):
            found.append(slow_link(link, least, "both have a median of {} or more to other nodes"))
    return found


def slow_end(end: str, links: Sequence[Link], usual: float) -> Bottleneck:
    own = sorted(links, key=lambda link: link.gb_per_second)
    slowest = ", ".join(f"{bandwidth_label(link.gb_per_second)} to {link.peer_of(end)}" for link in own[:SHOWN])
    text = f"{end}: {slowest}; the others have {bandwidth_label(usual)} among themselves"
    return Bottleneck(end, own, bandwidth_label(usual), bandwidth_label(own[-1].gb_per_second), text)


def slow_link(link: Link, usual: float, comparison: str) -> Bottleneck:
    got, expected = bandwidth_label(link.gb_per_second), bandwidth_label(usual)
    text = f"{link.one} and {link.other}: {got}; {comparison.format(expected)}"
    return Bottleneck(link.one, [link], expected, got, text)


def bandwidth_label(gb_per_second: float) -> str:
    """Format a bandwidth: 9.8 GB/s, 2.5 MB/s."""
    if gb_per_second >= 0.1:
        return f"{gb_per_second:.1f} GB/s"
    return f"{gb_per_second * 1e3:.1f} MB/s"
