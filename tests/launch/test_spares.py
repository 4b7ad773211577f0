"""Spares replace lost nodes, or the run continues with fewer nodes."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.launch.run import number_ranks
from distributed.launch.spares import arrange
from distributed.runs.lookup import RunNode


def nodes(names: str, processes: int = 2) -> list[RunNode]:
    return [RunNode(name, name, processes, 0) for name in names.split()]


@pytest.mark.parametrize(
    ("before", "lost", "spares", "minimum", "after", "changes"),
    [
        ("a b c", "", "s", 0, "a b c", []),
        ("a b c", "b", "s", 0, "a s c", [("b", "s", 1)]),
        ("a b c", "a", "s t", 0, "s b c", [("a", "s", 0)]),
        ("a b c", "a c", "s", 2, "s b", [("a", "s", 0), ("c", "", 2)]),
        ("a b c", "c", "", 2, "a b", [("c", "", 2)]),
        # Too few nodes would remain: lost nodes stay in the run.
        ("a b c", "c", "", 0, "a b c", []),
        ("a b c", "b c", "", 2, "a b c", []),
        ("a b c", "b c", "s", 3, "a s c", [("b", "s", 1)]),
        # A smaller run grows again.
        ("a b", "", "c", 2, "a b c", [("", "c", 2)]),
        ("a b", "b", "c d", 2, "a c d", [("b", "c", 1), ("", "d", 2)]),
        # If all nodes are lost, all stay in the run.
        ("a b c", "a b c", "", 1, "a b c", []),
    ],
)
def test_spares_take_the_places_of_lost_nodes(
    before: str, lost: str, spares: str, minimum: int, after: str, changes: list[Any]
) -> None:
    missing = dict.fromkeys(lost.split(), "connection lost")
    found, made = arrange(nodes(before), missing, nodes(spares), 3, minimum)
    assert " ".join(node.node for node in found) == after
    assert [(change.node, change.by, change.node_rank) for change in made] == changes


def test_a_spare_gets_as_many_processes_as_the_lost_node_and_the_message_names_both_and_the_reason() -> None:
    uneven = [RunNode("a", "a", 1, 0), RunNode("b", "b", 4, 1)]
    found, [change] = arrange(uneven, {"b": "connection lost"}, nodes("s", 8), 2, 0)
    assert number_ranks(found, 0) == [uneven[0], RunNode("s", "s", 4, 1)]
    assert change.message == "b is lost (connection lost): s takes its place as node rank 1"
    assert number_ranks(nodes("a b"), 4)[1].first_rank == 6
