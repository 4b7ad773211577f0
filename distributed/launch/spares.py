"""The nodes of a run after some are lost: spares take their places, or the run continues with fewer nodes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distributed.runs.lookup import RunNode


@dataclass(frozen=True)
class Change:
    """A node that joins or leaves the run. An entry of "changes" in run.json."""

    node: str  # the lost node; "": none
    by: str  # the node that takes its place; "": none
    node_rank: int
    reason: str
    time: float  # Unix seconds

    @property
    def message(self) -> str:
        if not self.node:
            return f"{self.by} joins the run as node rank {self.node_rank}: {self.reason}"
        ending = f"{self.by} takes its place as node rank {self.node_rank}" if self.by else "continuing without it"
        return f"{self.node} is lost ({self.reason}): {ending}"


def arrange(
    nodes: Sequence[RunNode], lost: Mapping[str, str], spares: Sequence[RunNode], size: int, minimum: int
) -> tuple[list[RunNode], list[Change]]:
    """The nodes of the next attempt, by node rank, and what changes.

    A spare takes the node rank and the number of processes of the lost node. If there is no spare, the run continues
    without the lost node. If fewer than `minimum` nodes would remain, the node keeps its place and may return. A run
    with fewer nodes than `size` grows again when there are spares.

    Args:
        nodes: those of the last attempt. lost: name of a lost node -> reason.
        spares: spare nodes that are ready.
        size: number of nodes with which the run began.
        minimum: smallest number of nodes; 0: `size`.
    """
    free, now, changes = list(spares), time.time(), []
    places: list[RunNode | None] = []
    for rank, node in enumerate(nodes):
        if node.node in lost:
            spare = free.pop(0) if free else None
            changes.append(Change(node.node, spare.node if spare else "", rank, lost[node.node], now))
            places.append(replace(spare, processes=node.processes) if spare else None)
        else:
            places.append(node)
    remaining = [node for node in places if node]
    if len(remaining) < (minimum or size) and None in places:
        places = [place or node for place, node in zip(places, nodes, strict=True)]
        return [node for node in places if node], [change for change in changes if change.by]
    while len(remaining) < size and free:
        remaining.append(free.pop(0))
        changes.append(Change("", remaining[-1].node, len(remaining) - 1, "it is ready again", now))
    return remaining, changes
