"""Compare the compute time of a run's ranks: find slow ranks and draw charts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from distributed.report import charts
from distributed.report.charts import Line, Mark
from distributed.report.history import Point, RankValues
from distributed.report.page_parts import card, ranges

SLOW_FACTOR = 1.15  # a straggler takes more than this many times the median of all ranks
MAX_LINES = 16  # with more ranks, a chart shows their median and range instead of a line for each rank
MAX_COLOURED = 4  # with more ranks, all lines have the same colour and no labels
MAX_STRAGGLERS = 3  # with more than MAX_LINES ranks, at most this many stragglers have a line of their own
COLUMNS = 120  # with more than MAX_LINES ranks, the x axis has this many sections, each with one median and one range
SMALL = 314  # width of a small chart, pixels; three fit side by side


@dataclass(frozen=True)
class RankTiming:
    """The seconds that a rank computes in a step, without the time in which it waits for other ranks."""

    rank: int
    host: str | None
    median: float  # seconds, over all logged steps
    ratio: float  # `median` divided by median_low() of the medians of all ranks; with two ranks, by that of the faster
    slow: bool  # a straggler

    @property
    def name(self) -> str:
        return f"rank {self.rank}"


def compare(rows: RankValues, nodes: Sequence[str]) -> list[RankTiming]:
    """Return the timing of each rank that has a finite time. rows: see History.by_rank.

    The host of a rank is known only if the ranks can be divided equally among the nodes.
    """
    by_rank = [[*filter(math.isfinite, values)] for values in zip(*(values for _, values in rows), strict=True)]
    medians = {rank: statistics.median(seconds) for rank, seconds in enumerate(by_rank) if seconds}
    each, rest = divmod(len(by_rank), len(nodes)) if nodes else (0, 0)
    if not medians:
        return []
    usual, limit = statistics.median_low(medians.values()), SLOW_FACTOR * statistics.median(medians.values())
    found = []
    for rank, median in medians.items():
        slow = median > limit > 0
        host = nodes[rank // each] if each and not rest else None
        found.append(RankTiming(rank, host, median, median / usual if usual > 0 else math.nan, slow))
    return found


def stragglers(ranks: Iterable[RankTiming]) -> list[RankTiming]:
    """The slow ranks, the slowest first."""
    return sorted((rank for rank in ranks if rank.slow), key=lambda rank: -rank.ratio)


def warning(ranks: Sequence[RankTiming]) -> str:
    """A paragraph for the top of the page that names the stragglers; empty without stragglers."""
    return f'<p class="warning"><a href="#ranks">{escape(comparison(ranks))}</a></p>' if stragglers(ranks) else ""


def comparison(ranks: Sequence[RankTiming]) -> str:
    """A sentence that names the stragglers, or the slowest rank if there is no straggler."""
    slow = stragglers(ranks)
    if not slow:
        slowest = max(ranks, key=lambda rank: rank.median)
        return f"No straggler: the slowest, {slowest.name}, takes {times(slowest.ratio)} as long as the median."
    hosts = sorted({rank.host for rank in slow if rank.host})
    on_hosts = f" ({', '.join(hosts)})" if 0 < len(hosts) <= 3 else ""
    numbers, factor = ranges(sorted(rank.rank for rank in slow)), times(slow[0].ratio)
    if len(slow) == 1:
        return f"Rank {numbers}{on_hosts} takes {factor} as long as the median; every step waits for it."
    factor = f"{times(slow[-1].ratio)} to {factor}"
    return f"Ranks {numbers}{on_hosts} take {factor} as long as the median; every step waits for {slow[0].name}."


def times(ratio: float) -> str:
    """A ratio as text, such as 1.8×. A ratio below 1.25 has two decimals, such as 1.17×."""
    return f"{ratio:.2f}×" if ratio < 1.25 else f"{ratio:,.1f}×"


def compute_chart(rows: RankValues, ranks: Sequence[RankTiming], events: Sequence[Mark]) -> str:
    """The compute time of each rank over steps, stragglers in red."""
    if not ranks:
        return ""
    milliseconds = min(rank.median for rank in ranks) < 1
    unit, factor = ("milliseconds per step", 1e3) if milliseconds else ("seconds per step", 1.0)
    by_rank = {
        rank.name: charts.smooth([(step, values[rank.rank] * factor) for step, values in rows]) for rank in ranks
    }
    slow = [rank.name for rank in stragglers(ranks)]
    sentence = "" if slow or len(ranks) == 1 else f'<p class="sentence">{escape(comparison(ranks))}</p>\n'
    return sentence + chart_of_ranks("Compute time", unit, by_rank, events, slow=slow)


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
    """A line for each rank; for many ranks their median, their range, and lines for stragglers only.

    slow: names of the stragglers, the slowest first; their lines are red and labelled. seconds: see charts.lines.
    """
    band: charts.Band = []
    drawn = []
    if len(by_rank) > MAX_LINES:
        points = sorted((x, y) for line in by_rank.values() for x, y in line if math.isfinite(y))
        first, wide = points[0][0], (points[-1][0] - points[0][0]) / COLUMNS or 1.0
        columns = [[*group] for _, group in groupby(points, key=lambda point: int((point[0] - first) / wide))]
        table = [(column[-1][0], [y for _, y in column]) for column in columns]
        medians = [(x, statistics.median_low(values)) for x, values in table]
        drawn = [Line("median of all ranks", medians, "usual", "median")]
        band = [(x, min(values), max(values)) for x, values in table]
        by_rank = {name: by_rank[name] for name in [*slow][:MAX_STRAGGLERS]}
        unit += " · shaded: lowest to highest rank"
    for n, (name, line) in enumerate(by_rank.items()):
        style = "slow" if name in slow else f"rank{n}" if len(by_rank) <= MAX_COLOURED else "crowd"
        drawn.append(Line(name, line, style, "" if style == "crowd" else name))
    drawn.sort(key=lambda line: line.style == "slow")  # drawn on top
    return card(title, unit, charts.lines(drawn, marks, band=band, width=width, height=190, zero=True, seconds=seconds))
