"""Find slow nodes and slow links between nodes, from the bandwidth of each pair.

In each round all nodes exchange messages in pairs at the same time; n nodes need n-1 rounds, or n if n is odd. Does
not use PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

SLOW_FACTOR = 3.0  # a slow link has less than a third of the usual bandwidth; smaller differences may be a switch
SHOWN = 3  # links in a text


@dataclass(frozen=True)
class NodeLink:
    """The bandwidth between two nodes, in each direction while both are in use. GB is 10^9 bytes."""

    one: str
    other: str
    gb_per_second: float

    def peer_of(self, node: str) -> str:
        return self.other if node == self.one else self.one


@dataclass(frozen=True)
class Bottleneck:
    """A slow node, or a node with a slow link."""

    node: str
    expected: float  # GB/s
    got: float  # GB/s
    text: str


def round_robin(count: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs of 0 .. count-1: each number at most once per round, each pair once (the circle method)."""
    even = count + count % 2
    ring = list(range(1, even))
    rounds = []
    for _ in ring:
        seats = [0, *ring]
        pairs = [(min(pair), max(pair)) for pair in zip(seats[: even // 2], reversed(seats[even // 2 :]), strict=True)]
        rounds.append([pair for pair in pairs if pair[1] < count])  # of an odd number, one has no partner
        ring = [ring[-1], *ring[:-1]]
    return rounds


def find_bottlenecks(links: Sequence[NodeLink]) -> list[Bottleneck]:
    """Nodes of which all links are slow, then slow links between other nodes."""
    nodes = list(dict.fromkeys(node for link in links for node in (link.one, link.other)))
    slow_nodes = [found for node in nodes if (found := slow_node(node, nodes, links))]
    named = {found.node for found in slow_nodes}
    remaining = [link for link in links if not {link.one, link.other} & named]
    return [*slow_nodes, *(found for link in remaining if (found := slow_link(link, remaining)))]


def slow_node(node: str, nodes: Sequence[str], links: Sequence[NodeLink]) -> Bottleneck | None:
    """A node whose best link is slow, compared with the best links of the others. With two nodes there is none."""
    best = {one: max(bandwidths_of(one, links)) for one in nodes}
    usual = median(bandwidth for one, bandwidth in best.items() if one != node)
    if best[node] * SLOW_FACTOR > usual:
        return None
    own = sorted((link for link in links if node in (link.one, link.other)), key=lambda link: link.gb_per_second)
    slowest = ", ".join(f"{bandwidth_label(link.gb_per_second)} to {link.peer_of(node)}" for link in own[:SHOWN])
    text = f"{node}: {slowest}; the others have {bandwidth_label(usual)} among themselves"
    return Bottleneck(node, usual, best[node], text)


def slow_link(link: NodeLink, links: Sequence[NodeLink]) -> Bottleneck | None:
    """A link that is slow compared with the other links of both its nodes."""
    others = [other for other in links if other != link]
    ends = [bandwidths_of(node, others) for node in (link.one, link.other)]
    if not all(ends) or link.gb_per_second * SLOW_FACTOR > (usual := min(map(median, ends))):
        return None
    own, others_have = bandwidth_label(link.gb_per_second), bandwidth_label(usual)
    text = f"{link.one} and {link.other}: {own}; both have {others_have} or more to other nodes"
    return Bottleneck(link.one, usual, link.gb_per_second, text)


def bandwidths_of(node: str, links: Iterable[NodeLink]) -> list[float]:
    return [link.gb_per_second for link in links if node in (link.one, link.other)]


def bandwidth_label(gb_per_second: float) -> str:
    """9.8 GB/s, 2.5 MB/s."""
    if gb_per_second >= 0.1:
        return f"{gb_per_second:.1f} GB/s"
    return f"{gb_per_second * 1e3:.1f} MB/s"
