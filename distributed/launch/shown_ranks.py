"""The ranks whose output a launcher shows: one that the user names, or rank 0 and, if it prints steps, the last rank.

Megatron-LM and other programs print steps on the last rank alone. If other ranks of its node print steps too, it is not
shown. Standard library only.
"""

from __future__ import annotations

import time

from distributed.launch.output_lines import rank_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distributed.runs.lookup import RunNode

MOST_LINES = 5000  # lines in which steps are searched
NEEDED, SECONDS = 3, 2.0  # steps that the last rank alone must have printed, and time since the first of them


def choice(chosen: str, last_node: RunNode) -> str:
    """What class ShownRanks expects. chosen: a value of --console-rank."""
    last = last_node.first_rank + last_node.processes - 1
    if chosen == "auto":
        return f"auto:{last}" if last_node.processes > 1 else "0"
    return str(last) if chosen == "last" else chosen


class ShownRanks:
    """The ranks that are shown on the console of a node, and in whose output steps are found."""

    def __init__(self, chosen: str, seconds: float = SECONDS) -> None:
        """chosen: the number of a rank; or auto:N, where N is the last rank, which is not the first one of its node.

        seconds: since the first step of the last rank; 0 for output that was read from a log.
        """
        self._seconds = seconds
        kind, _, last = chosen.partition(":")
        self.ranks = {0 if kind == "auto" else int(kind)}
        self._last = int(last or 0)  # 0: the choice is final
        self._steps: set[float] = set()
        self._since = 0.0  # time of the first step
        self._lines = MOST_LINES

    def look(self, lines: bytes) -> None:
        """Find out which ranks of this node print steps. lines: complete lines of all ranks of the node.

        Lines of different ranks arrive in any order. The choice is undone if another rank prints steps after it.
        """
        if not self._last:
            return
        from distributed.launch.output_metrics import HINT, parse, plain

        for line in lines.split(b"\n"):
            rank = rank_of(line) if HINT.search(line) else None
            if rank is None or (rank == self._last and rank in self.ranks):
                continue
            self._lines -= 1
            values, _ = parse(plain(line)) or ({}, 0)
            if not {"step", "loss"} <= values.keys():
                continue
            if rank != self._last:
                self.ranks.discard(self._last)
                self._lines = 0
                break
            self._since = self._since or time.monotonic()
            self._steps.add(values["step"])
            if len(self._steps) >= NEEDED and time.monotonic() >= self._since + self._seconds:
                self.ranks.add(rank)
        if self._lines <= 0:
            self._last = 0
