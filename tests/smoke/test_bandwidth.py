"""A slow node is not taken for slow links of all others, nor a slow link for two slow nodes, nor noise for either."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.smoke.bandwidth import Link, rounds, slow, speed


@given(count=st.integers(min_value=2, max_value=40))
def test_each_meets_every_other_once_and_nobody_two_at_a_time(count: int) -> None:
    met = rounds(count)
    for pairs in met:
        seats = list(itertools.chain(*pairs))
        assert len(seats) == len(set(seats)) == count - count % 2
    assert sorted(itertools.chain(*met)) == list(itertools.combinations(range(count), 2))
    assert len(met) == count - 1 + count % 2


def links(count: int, fast: float = 10.0, **other: float) -> list[Link]:
    """All links among node1, node2, ...; some of them with another speed: _1_2=0.9, or _3=0.9 for all of node3."""
    found = []
    for one, two in itertools.combinations(range(1, count + 1), 2):
        own = [other.get(f"_{one}_{two}"), other.get(f"_{one}"), other.get(f"_{two}"), fast]
        found.append(Link(f"node{one}", f"node{two}", next(gb for gb in own if gb is not None)))
    return found


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (links(2, 0.001), []),  # nothing to compare it with
        (links(5), []),
        (links(4, _2_3=4.0, _1=8.0), []),  # some are always slower than others
        (links(4, _3=4.0, _1_3=1.5), []),  # by what the slower of its ends has to others
        (links(3, _3=0.9), ["node3: 0.9 GB/s to node1, 0.9 GB/s to node2; the others have 10.0 GB/s among themselves"]),
        (links(3, _1=0.0025), ["node1: 2.5 MB/s to node2, 2.5 MB/s to node3; the others have 10.0 GB/s among thems"]),
        (links(6, _4=0.9), ["node4: 0.9 GB/s to node1, 0.9 GB/s to node2, 0.9 GB/s to node3; the others have 10.0"]),
        (links(3, _2_3=0.9), ["node2 and node3: 0.9 GB/s; both have 10.0 GB/s or more to others"]),
        (links(5, _1_2=0.9, _3_5=2.0), ["node1 and node2: 0.9 GB/s; both", "node3 and node5: 2.0 GB/s; both have"]),
        (links(5, _5=0.9, _1_2=0.9), ["node5: 0.9 GB/s to node1", "node1 and node2: 0.9 GB/s; both have 10.0 GB/s"]),
        (links(5, _4=0.9, _5=0.8), ["node4: 0.9 GB/s to node1, 0.9", "node5: 0.8 GB/s to node1, 0.8"]),
    ],
)  # fmt: skip
def test_who_is_slow_is_named_and_nobody_else(measured: list[Link], said: list[str]) -> None:
    found = [one.said for one in slow(measured)]
    assert len(found) == len(said), found
    assert all(own.startswith(beginning) for own, beginning in zip(found, said, strict=True)), found


@pytest.mark.parametrize(("figure", "told"), [(98.04, "98.0 GB/s"), (0.1, "0.1 GB/s"), (0.0025, "2.5 MB/s")])
def test_speeds_are_told_in_the_unit_that_fits(figure: float, told: str) -> None:
    assert speed(figure) == told
