"""The ranks of a run compared: which of them are slow, in words and as charts. Standard library only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from distributed.runs import charts
from distributed.runs.charts import Line, Mark
from distributed.runs.history import Point, RankValues
from distributed.runs.page import card, ranges

SLOW = 1.15  # a rank that needs this many times the median of all ranks is a straggler
FEW = 16  # up to so many ranks each has a line of its own
FEWER = 4  # up to so many ranks each line has a colour and a label of its own
LABELLED = 3  # slow ranks among many that have a line of their own
COLUMNS = 120  # of the charts of many ranks
SMALL = 314  # pixels: the width of one of three charts side by side


@dataclass(frozen=True)
class Rank:
    """How long one rank computes in a step, in seconds, before it waits for the others."""

    rank: int
    host: str | None
    median: float  # over all logged steps
    ratio: float  # its median through the lower median of all ranks: of two, through that of the faster one
    slow: bool  # whether the others wait for this one

    @property
    def name(self) -> str:
        return f"rank {self.rank}"


def compare(rows: RankValues, nodes: Sequence[str]) -> list[Rank]:
    """The ranks that have a finite time in `rows` (see History.by_rank), by rank. A host is known where every node
    runs as many ranks as the others."""
    by_rank = [[*filter(math.isfinite, values)] for values in zip(*(values for _, values in rows), strict=True)]
    medians = [statistics.median(seconds) for seconds in by_rank if seconds]
    each, rest = divmod(len(by_rank), len(nodes)) if nodes else (0, 0)
    found = []
    for rank, seconds in enumerate(by_rank):
        if not seconds:
            continue
        median, usual = statistics.median(seconds), statistics.median_low(medians)
        host = nodes[rank // each] if each and not rest else None
        slow = median > SLOW * statistics.median(medians) > 0
        found.append(Rank(rank, host, median, median / usual if usual > 0 else math.nan, slow))
    return found


def stragglers(ranks: Iterable[Rank]) -> list[Rank]:
    """The slow ranks, the slowest first."""
    return sorted((rank for rank in ranks if rank.slow), key=lambda rank: -rank.ratio)


# ---------------------------------------------------------------- in words


def warning(ranks: Sequence[Rank]) -> str:
    """The stragglers, named above all charts."""
    return f'<p class="warning"><a href="#ranks">{escape(comparison(ranks))}</a></p>' if stragglers(ranks) else ""


def comparison(ranks: Sequence[Rank]) -> str:
    """One sentence: which ranks are slow."""
    slow = stragglers(ranks)
    if not slow:
        slowest = max(ranks, key=lambda rank: rank.median)
        return f"No straggler: the slowest, {slowest.name}, takes {times(slowest.ratio)} as long as the median."
    hosts = sorted({rank.host for rank in slow if rank.host})
    place = f" ({', '.join(hosts)})" if 0 < len(hosts) <= 3 else ""
    numbers, factor = ranges(sorted(rank.rank for rank in slow)), times(slow[0].ratio)
    if len(slow) == 1:
        return f"Rank {numbers}{place} is {factor} slower than the median; every step waits for it."
    factor = f"{times(slow[-1].ratio)} to {factor}"
    return f"Ranks {numbers}{place} are {factor} slower than the median; every step waits for {slow[0].name}."


def times(ratio: float) -> str:
    """1.8×, and 1.17× where one digit would hide it."""
    return f"{ratio:.2f}×" if ratio < 1.25 else f"{ratio:,.1f}×"


# ---------------------------------------------------------------- as charts


def compute_chart(rows: RankValues, ranks: Sequence[Rank], events: Sequence[Mark]) -> str:
    """Each rank's own compute time over steps, the stragglers in red."""
    if not ranks:
        return ""
    unit, factor = ("milliseconds a step", 1e3) if min(rank.median for rank in ranks) < 1 else ("seconds a step", 1.0)
    by_rank = {
        rank.name: charts.smooth([(step, values[rank.rank] * factor) for step, values in rows]) for rank in ranks
    }
    slow = [rank.name for rank in stragglers(ranks)]
    sentence = "" if slow or len(ranks) == 1 else f'<p class="sentence">{escape(comparison(ranks))}</p>\n'
    return sentence + chart_of_ranks("Own compute", unit, by_rank, events, slow=slow)


def chart_of_ranks(
    title: str,
    unit: str,
    by_rank: Mapping[str, Sequence[Point]],
    marks: Sequence[Mark],
    *,
    slow: Collection[str] = (),
    width: int = 1032,
    seconds: bool = False,
) -> str:
    """A line for each rank; of many ranks their median, the range from the lowest to the highest, and the slowest.

    slow: the ranks that are red and named, the slowest first. width: pixels. seconds: as for charts.lines.
    """
    band: charts.Band = []
    drawn = []
    if len(by_rank) > FEW:
        points = sorted((x, y) for line in by_rank.values() for x, y in line if math.isfinite(y))
        first, wide = points[0][0], (points[-1][0] - points[0][0]) / COLUMNS or 1.0
        columns = [[*group] for _, group in groupby(points, key=lambda point: int((point[0] - first) / wide))]
        table = [(column[-1][0], [y for _, y in column]) for column in columns]
        medians = [(x, statistics.median_low(values)) for x, values in table]
        drawn = [Line("median of all ranks", medians, "usual", "median")]
        band = [(x, min(values), max(values)) for x, values in table]
        by_rank = {name: by_rank[name] for name in [*slow][:LABELLED]}
        unit += " · shaded: from the lowest to the highest rank"
    for n, (name, line) in enumerate(by_rank.items()):
        style = "slow" if name in slow else f"rank{n}" if len(by_rank) <= FEWER else "crowd"
        drawn.append(Line(name, line, style, "" if style == "crowd" else name))
    drawn.sort(key=lambda line: line.style == "slow")  # over the others
    return card(title, unit, charts.lines(drawn, marks, band=band, width=width, height=190, zero=True, seconds=seconds))
