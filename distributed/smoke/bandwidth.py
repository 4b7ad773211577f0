"""How fast are the links between nodes, and is one of them, or one node's, clearly slower than the others?

Two nodes exchange messages at a time, others beside them, so that in one round less than there are nodes each has met
every other; `slow` says who stands out. Nothing here knows PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

SLOWER = 3.0  # times; below it may be another switch on the way
SHOWN = 3  # links in a sentence


@dataclass(frozen=True)
class Link:
    """Between two nodes. GB is 10^9 bytes, each way while the other way is as busy."""

    one: str
    other: str
    gb_per_second: float

    def to(self, node: str) -> str:
        return self.other if node == self.one else self.one


@dataclass(frozen=True)
class Slow:
    """A node, or a link of it, and how fast it should be."""

    node: str
    expected: float  # GB/s
    got: float
    said: str


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Who meets whom among 0 .. count-1, a list of pairs a round: everybody once a round, each pair once in all.

    One stands still and the others turn around it (the circle method); of an odd number, one rests.
    """
    even = count + count % 2
    ring = list(range(1, even))
    found = []
    for _ in ring:
        seats = [0, *ring]
        pairs = [(min(pair), max(pair)) for pair in zip(seats[: even // 2], reversed(seats[even // 2 :]), strict=True)]
        found.append([pair for pair in pairs if pair[1] < count])
        ring = [ring[-1], *ring[:-1]]
    return found


def slow(links: Sequence[Link]) -> list[Slow]:
    """Nodes of which every link is slow, then links between other nodes."""
    nodes = list(dict.fromkeys(node for link in links for node in (link.one, link.other)))
    slow_nodes = [found for node in nodes if (found := slow_node(node, nodes, links))]
    named = {found.node for found in slow_nodes}
    left = [link for link in links if not {link.one, link.other} & named]
    return [*slow_nodes, *(found for link in left if (found := slow_link(link, left)))]


def slow_node(node: str, nodes: Sequence[str], links: Sequence[Link]) -> Slow | None:
    """Even its best link is much slower than the best of the others. Of two nodes nobody can say whose fault it is."""
    best = {one: max(speeds_of(one, links)) for one in nodes}
    others = [speed for one, speed in best.items() if one != node]
    if best[node] * SLOWER > (usual := median(others)):
        return None
    own = sorted((link for link in links if node in (link.one, link.other)), key=lambda link: link.gb_per_second)
    told = ", ".join(f"{speed(link.gb_per_second)} to {link.to(node)}" for link in own[:SHOWN])
    return Slow(node, usual, best[node], f"{node}: {told}; the others have {speed(usual)} among themselves")


def slow_link(link: Link, links: Sequence[Link]) -> Slow | None:
    """Much slower than what both its ends have to others."""
    beside = [other for other in links if other != link]
    ends = [speeds_of(node, beside) for node in (link.one, link.other)]
    if not all(ends) or link.gb_per_second * SLOWER > (usual := min(map(median, ends))):
        return None
    said = f"{link.one} and {link.other}: {speed(link.gb_per_second)}; both have {speed(usual)} or more to others"
    return Slow(link.one, usual, link.gb_per_second, said)


def speeds_of(node: str, links: Iterable[Link]) -> list[float]:
    return [link.gb_per_second for link in links if node in (link.one, link.other)]


def speed(gb_per_second: float) -> str:
    """For people: 9.8 GB/s, 2.5 MB/s."""
    if gb_per_second >= 0.1:
        return f"{gb_per_second:.1f} GB/s"
    return f"{gb_per_second * 1e3:.1f} MB/s"
