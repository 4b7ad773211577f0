"""Find slow nodes and slow links between nodes from the bandwidth of each pair of nodes.

The nodes exchange messages in rounds. In a round each node has at most one partner; n nodes need n-1 rounds, or n if n
is odd. This module does not use PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

SLOW_FACTOR = 3.0  # a slow link has at most a third of the usual bandwidth; a switch may cause smaller differences
SHOWN = 3  # links listed for a slow node


@dataclass(frozen=True)
class NodeLink:
    """The bandwidth between two nodes, per direction, with traffic in both directions. GB is 10^9 bytes."""

    one: str
    other: str
    gb_per_second: float

    def peer_of(self, node: str) -> str:
        return self.other if node == self.one else self.one


@dataclass(frozen=True)
class Bottleneck:
    """A slow node, or a node with a slow link."""

    node: str
    expected: str  # "9.8 GB/s"
    got: str
    text: str


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


def find_bottlenecks(links: Sequence[NodeLink]) -> list[Bottleneck]:
    """Return the nodes whose links are all slow, then the slow links between the other nodes."""
    nodes = list(dict.fromkeys(node for link in links for node in (link.one, link.other)))
    slow_nodes = [found for node in nodes if (found := slow_node(node, nodes, links))]
    slow_names = {found.node for found in slow_nodes}
    remaining = [link for link in links if not {link.one, link.other} & slow_names]
    return [*slow_nodes, *(found for link in remaining if (found := slow_link(link, remaining)))]


def slow_node(node: str, nodes: Sequence[str], links: Sequence[NodeLink]) -> Bottleneck | None:
    """Return a Bottleneck if the node's best link is slow compared with the best links of the others."""
    best = {name: max(bandwidths_of(name, links)) for name in nodes}
    usual = median(bandwidth for name, bandwidth in best.items() if name != node)
    if best[node] * SLOW_FACTOR > usual:
        return None
    own = sorted((link for link in links if node in (link.one, link.other)), key=lambda link: link.gb_per_second)
    slowest = ", ".join(f"{bandwidth_label(link.gb_per_second)} to {link.peer_of(node)}" for link in own[:SHOWN])
    text = f"{node}: {slowest}; the others have {bandwidth_label(usual)} among themselves"
    return Bottleneck(node, bandwidth_label(usual), bandwidth_label(best[node]), text)


def slow_link(link: NodeLink, links: Sequence[NodeLink]) -> Bottleneck | None:
    """Return a Bottleneck if the link is slow compared with the other links of both its nodes."""
    others = [other for other in links if other != link]
    ends = [bandwidths_of(node, others) for node in (link.one, link.other)]
    if not all(ends) or link.gb_per_second * SLOW_FACTOR > (usual := min(map(median, ends))):
        return None
    own, least = bandwidth_label(link.gb_per_second), bandwidth_label(usual)
    text = f"{link.one} and {link.other}: {own}; both have a median of {least} or more to other nodes"
    return Bottleneck(link.one, least, own, text)


def bandwidths_of(node: str, links: Iterable[NodeLink]) -> list[float]:
    return [link.gb_per_second for link in links if node in (link.one, link.other)]


def bandwidth_label(gb_per_second: float) -> str:
    """Format a bandwidth: 9.8 GB/s, 2.5 MB/s."""
    if gb_per_second >= 0.1:
        return f"{gb_per_second:.1f} GB/s"
    return f"{gb_per_second * 1e3:.1f} MB/s"
