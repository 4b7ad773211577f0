"""Slow nodes and slow links are found and distinguished, and noise is ignored."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.smoke.bandwidth import NodeLink, bandwidth_label, find_bottlenecks, round_robin


@given(count=st.integers(min_value=2, max_value=40))
def test_each_pair_of_numbers_is_in_one_round_and_no_round_has_a_number_twice(count: int) -> None:
    rounds = round_robin(count)
    for pairs in rounds:
        numbers = list(itertools.chain(*pairs))
        assert len(numbers) == len(set(numbers)) == count - count % 2
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(count), 2))
    assert len(rounds) == count - 1 + count % 2


def links(count: int, fast: float = 10.0, **slow: float) -> list[NodeLink]:
    """Return the links between all nodes. slow: GB/s of one link (_1_2=0.9), or of all links of a node (_3=0.9)."""
    found = []
    for one, two in itertools.combinations(range(1, count + 1), 2):
        speeds = [slow.get(f"_{one}_{two}"), slow.get(f"_{one}"), slow.get(f"_{two}"), fast]
        found.append(NodeLink(f"node{one}", f"node{two}", next(gb for gb in speeds if gb is not None)))
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
def test_slow_nodes_and_links_are_found(measured: list[NodeLink], texts: list[str]) -> None:
    found = [one.text for one in find_bottlenecks(measured)]
    assert len(found) == len(texts), found
    assert all(text.startswith(beginning) for text, beginning in zip(found, texts, strict=True)), found


@pytest.mark.parametrize(("gb_per_second", "label"), [(98.04, "98.0 GB/s"), (0.1, "0.1 GB/s"), (0.0025, "2.5 MB/s")])
def test_a_bandwidth_label_has_a_fitting_unit(gb_per_second: float, label: str) -> None:
    assert bandwidth_label(gb_per_second) == label
