"""Slow nodes, ranks and links are found and distinguished, and noise is ignored."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.smoke.bandwidth import Link, bandwidth_label, find_bottlenecks, rank_rounds, round_robin


@given(count=st.integers(min_value=2, max_value=40))
def test_each_pair_of_numbers_is_in_one_round_and_no_round_has_a_number_twice(count: int) -> None:
    rounds = round_robin(count)
    for pairs in rounds:
        numbers = list(itertools.chain(*pairs))
        assert len(numbers) == len(set(numbers)) == count - count % 2
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(count), 2))
    assert len(rounds) == count - 1 + count % 2


@given(sizes=st.lists(st.integers(min_value=1, max_value=9), min_size=2, max_size=40))
def test_each_rank_reaches_other_nodes_and_one_rank_of_a_node_sends_at_a_time(sizes: list[int]) -> None:
    starts = list(itertools.accumulate(sizes, initial=0))
    nodes = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=False)]
    node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
    rounds = rank_rounds(nodes)
    for pairs in rounds:
        busy = [node_of[rank] for rank in itertools.chain(*pairs)]
        assert len(busy) == len(set(busy))
    assert set(itertools.chain(*itertools.chain(*rounds))) == set(node_of)
    for one, other in itertools.chain(*rounds):
        local_ranks = [rank - starts[node_of[rank]] for rank in (one, other)]
        assert local_ranks[0] == local_ranks[1] or sorted(sizes)[-2] <= max(local_ranks)
    assert len(rounds) <= max(32 + 32, 32 + 3 * max(sizes))


def links(count: int, fast: float = 10.0, **slow: float) -> list[Link]:
    """Return the links between all nodes. slow: GB/s of one link (_1_2=0.9), or of all links of a node (_3=0.9)."""
    found = []
    for one, two in itertools.combinations(range(1, count + 1), 2):
        speeds = [slow.get(f"_{one}_{two}"), slow.get(f"_{one}"), slow.get(f"_{two}"), fast]
        found.append(Link(f"node{one}", f"node{two}", next(gb for gb in speeds if gb is not None)))
    return found


@pytest.mark.parametrize(
    ("measured", "texts"),
    [
        (links(2, 0.001), []),  # no other link to compare with
        (links(5), []),
        (links(4, _2_3=4.0, _1=8.0), []),  # not slow enough
        (links(4, _3=4.0, _1_3=1.5), []),  # compared with the other links of the slower node
        (links(3, _3=0.9), ["node3: 0.9 GB/s to node1, 0.9 GB/s to node2; the others have 10.0 GB/s among themselves"]),
        (links(3, _1=0.0025), ["node1: 2.5 MB/s to node2, 2.5 MB/s to node3; the others have 10.0 GB/s among thems"]),
        (links(6, _4=0.9), ["node4: 0.9 GB/s to node1, 0.9 GB/s to node2, 0.9 GB/s to node3; the others have 10.0"]),
        (links(3, _2_3=0.9), ["node2 and node3: 0.9 GB/s; both have a median of 10.0 GB/s or more to other nodes"]),
        (links(5, _1_2=0.9, _3_5=2.0), ["node1 and node2: 0.9 GB/s; both", "node3 and node5: 2.0 GB/s; both have"]),
        (links(5, _5=0.9, _1_2=0.9), ["node5: 0.9 GB/s to node1", "node1 and node2: 0.9 GB/s; both have a median"]),
        (links(5, _4=0.9, _5=0.8), ["node4: 0.9 GB/s to node1, 0.9", "node5: 0.8 GB/s to node1, 0.8"]),
    ],
)  # fmt: skip
def test_slow_nodes_and_links_are_found(measured: list[Link], texts: list[str]) -> None:
    found = [
        one.text for one in find_bottlenecks(measured, {f"node{number}": f"node{number}" for number in range(1, 7)})
    ]
    assert len(found) == len(texts), found
    assert all(text.startswith(beginning) for text, beginning in zip(found, texts, strict=True)), found


def rank_links(nodes: int, *slow: str, local_ranks: int = 2) -> list[Link]:
    """Return the links of ranks named 1a, 1b (node 1), 2a... slow: a rank, or both ranks of a link (2b3b)."""
    pairs = [
        (f"{one}{letter}", f"{two}{letter}")
        for letter in "abcdefgh"[:local_ranks]
        for one, two in itertools.combinations(range(1, nodes + 1), 2)
    ]
    return [Link(*ends, 0.9 if {*ends, "".join(ends)} & set(slow) else 10.0) for ends in pairs]


@pytest.mark.parametrize(
    ("measured", "texts"),
    [
        (rank_links(2), []),
        ([Link("1a", "1b", 0.9)], []),  # two nodes with one name
        (rank_links(4), []),
        (rank_links(4, local_ranks=8), []),
        # Both ends have no other link.
        (rank_links(2, "2b"), ["1b and 2b: 0.9 GB/s; the others have 10.0 GB/s among themselves"]),
        (rank_links(2, "1c", "2f", local_ranks=8), ["1c and 2c: 0.9 GB/s; the others", "1f and 2f: 0.9 GB/s; the oth"]),
        (rank_links(3, "3b"), ["3b: 0.9 GB/s to 1b, 0.9 GB/s to 2b; the others have 10.0 GB/s among themselves"]),
        (rank_links(4, "2b", "3b"), ["2b: 0.9 GB/s to 1b, 0.9 GB/s to 3b, 0.9 GB/s to 4b; the oth", "3b: 0.9"]),
        (rank_links(3, "2b3b"), ["2b and 3b: 0.9 GB/s; both have a median of 10.0 GB/s or more to other nodes"]),
        # Two of three ranks are slow, or all: each link is slow, and none shows which end is.
        (rank_links(3, "2b", "3b"), ["1b and 2b: 0.9", "1b and 3b: 0.9", "2b and 3b: 0.9"]),
        # All ranks of a node are slow, so the node is.
        (rank_links(3, "3a", "3b"), ["3: 0.9 GB/s to 1, 0.9 GB/s to 2; the others have 10.0 GB/s among themselves"]),
        (rank_links(4, "4a", "4b", "1b"), ["4: 0.9 GB/s to 1, ", "1b: 0.9 GB/s to 2b, 0.9 GB/s to 3b; the others"]),
        # Node 1 has a third rank. A rank with another fast link is not the cause.
        ([*rank_links(2), Link("1c", "2a", 0.9)], ["1c: 0.9 GB/s to 2a; the others have 10.0 GB/s among themselves"]),
        ([*rank_links(2, "2a"), Link("1c", "2a", 0.9)], ["1a and 2a: 0.9 GB/s; the others", "1c and 2a: 0.9 GB/s;"]),
        # A rank is not slow because its only peer is.
        ([Link("1a", "2a", 9), Link("2a", "3a", 0.9), Link("3a", "4a", 0.9), Link("2b", "3b", 9), Link("3b", "4b", 9)],
         ["3a: 0.9 GB/s to 2a, 0.9 GB/s to 4a; the others have 9.0 GB/s among themselves"]),
    ],
)  # fmt: skip
def test_slow_ranks_are_found(measured: list[Link], texts: list[str]) -> None:
    names = {name: name[0] for link in measured for name in (link.one, link.other)}
    found = [one.text for one in find_bottlenecks(measured, names)]
    assert len(found) == len(texts), found
    assert all(text.startswith(beginning) for text, beginning in zip(found, texts, strict=True)), found


@pytest.mark.parametrize(("gb_per_second", "label"), [(98.04, "98.0 GB/s"), (0.1, "0.1 GB/s"), (0.0025, "2.5 MB/s")])
def test_a_bandwidth_label_has_a_fitting_unit(gb_per_second: float, label: str) -> None:
    assert bandwidth_label(gb_per_second) == label
