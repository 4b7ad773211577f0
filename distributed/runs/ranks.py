"""The ranks of a run compared: which of them are slow, in words and as charts. Standard library only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby

from distributed.runs import charts
from distributed.runs.charts import Bar, Line, Mark, figure
from distributed.runs.history import Point, RankValues
from distributed.runs.page import card, ranges

SLOW = 1.15  # a rank that needs this many times the median of all ranks is a straggler
FEW = 16  # up to so many ranks each has a line and a bar of its own
FEWER = 4  # up to so many ranks each line has a colour and a label of its own
COLUMNS = 120  # of the charts of many ranks
SMALL = 314  # pixels: the width of one of three charts side by side


@dataclass(frozen=True)
class Rank:
    """How long one rank computes in a step, in seconds, before it waits for the others."""

    rank: int
    host: str | None
    median: float  # over all logged steps
    low: float  # of ten logged steps one is faster
    high: float  # of ten logged steps one is slower
    ratio: float  # its median through the lower median of all ranks: of two, through that of the faster one
    slow: bool  # whether the others wait for this one

    @property
    def name(self) -> str:
        return f"rank {self.rank}"


def compare(rows: RankValues, nodes: Sequence[str]) -> list[Rank]:
    """The ranks that have a finite time in `rows` (see History.by_rank), by rank. A host is known where every node
    runs as many ranks as the others."""
    by_rank = [sorted(filter(math.isfinite, values)) for values in zip(*(values for _, values in rows), strict=True)]
    medians = [statistics.median(seconds) for seconds in by_rank if seconds]
    each, rest = divmod(len(by_rank), len(nodes)) if nodes else (0, 0)
    found = []
    for rank, seconds in enumerate(by_rank):
        if not seconds:
            continue
        median, usual = statistics.median(seconds), statistics.median_low(medians)
        low, high = (seconds[round(share * (len(seconds) - 1))] for share in (0.1, 0.9))
        host = nodes[rank // each] if each and not rest else None
        slow = median > SLOW * statistics.median(medians) > 0
        found.append(Rank(rank, host, median, low, high, median / usual if usual > 0 else math.nan, slow))
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
    slow, usual = stragglers(ranks), "the other one" if len(ranks) == 2 else "the median"
    if not slow:
        slowest = max(ranks, key=lambda rank: rank.median)
        if slowest.ratio < 1.02:
            return "No straggler: the ranks keep pace, the slowest within 2 % of the others."
        return f"No straggler: the slowest, {slowest.name}, takes {times(slowest.ratio)} as long as {usual}."
    hosts = sorted({rank.host for rank in slow if rank.host})
    place = f" ({', '.join(hosts)})" if 0 < len(hosts) <= 3 else ""
    named = f"{'Ranks' if len(slow) > 1 else 'Rank'} {ranges(sorted(rank.rank for rank in slow))}{place}"
    if len(slow) == 1:
        return f"{named} is {times(slow[0].ratio)} slower than {usual}; every step waits for it."
    return (
        f"{named} are {times(slow[-1].ratio)} to {times(slow[0].ratio)} slower than {usual}; "
        f"every step waits for the slowest, {slow[0].name}."
    )


def times(ratio: float) -> str:
    """1.8×, and 1.17× where one digit would hide it."""
    return f"{ratio:.2f}×" if ratio < 1.25 else f"{ratio:,.1f}×"


# ---------------------------------------------------------------- own compute time as charts


def compute_charts(rows: RankValues, ranks: Sequence[Rank], events: Sequence[Mark]) -> str:
    """Each rank's own compute time: over steps, and side by side."""
    if not ranks:
        return ""
    usual = statistics.median_low([rank.median for rank in ranks])
    factor, unit = (1e3, "milliseconds a step") if usual < 1 else (1.0, "seconds a step")
    rows = [(step, [value * factor for value in values]) for step, values in rows]
    sentence = "" if stragglers(ranks) else f'<p class="sentence">{escape(comparison(ranks))}</p>\n'
    if len(rows[0][1]) > FEW:
        return sentence + _of_many(rows, ranks, events, unit)
    drawn = [_line(rank, rows, named=len(ranks) <= FEWER) for rank in sorted(ranks, key=lambda rank: rank.slow)]
    if len(ranks) == 1:
        return card("Own compute", unit, charts.lines(drawn, events, height=200, zero=True))
    height = 180 if len(ranks) <= FEWER else max(260, 20 * len(ranks))
    side_by_side = []
    for rank in ranks:
        text = figure(rank.median * factor) + (f"  {times(rank.ratio)}" if rank.slow else "")
        low, median, high = (value * factor for value in (rank.low, rank.median, rank.high))
        side_by_side.append(Bar(rank.name, median, low, high, text, rank.slow))
    rule = f"{'the faster one' if len(ranks) == 2 else 'median'} {figure(usual * factor)}"
    over_steps = charts.lines(drawn, events, width=488, height=height, zero=True)
    bars = charts.bars(side_by_side, usual * factor, rule, height=height)
    return (
        f'{sentence}<div class="two">\n'
        + card("Own compute over steps", unit, over_steps)
        + card("Ranks side by side", f"{unit} · median; thin line: 8 of 10 steps", bars)
        + "\n</div>"
    )


def _line(rank: Rank, rows: RankValues, named: bool) -> Line:
    """A slow one is red and named at its end, and so are all when they are few."""
    style = "slow" if rank.slow else f"rank{rank.rank}" if named else "usual"
    points = [(step, values[rank.rank]) for step, values in rows]
    *_, line = charts.smoothed(Line(rank.name, points, style, rank.name if named or rank.slow else ""))
    return replace(line, name=rank.name)


def _of_many(rows: RankValues, ranks: Sequence[Rank], events: Sequence[Mark], unit: str) -> str:
    """The range of all ranks with median and stragglers as lines, and a heat map in which a slow one is a stripe."""
    size = math.ceil(len(rows) / COLUMNS)
    table = []  # the last step of each group of steps, each rank's mean in it, and the median of all ranks
    for n in range(0, len(rows), size):
        some = rows[n : n + size]
        means = [_mean(values) for values in zip(*(values for _, values in some), strict=True)]
        table.append((some[-1][0], means, median_low(means)))
    finite = [(step, [*filter(math.isfinite, means)]) for step, means, _ in table]
    drawn = [Line("median of all ranks", [(step, median) for step, _, median in table], "usual", "median")]
    groups = _neighbours(stragglers(ranks))
    for slow, *_ in groups[:3]:
        drawn.append(Line(slow.name, [(step, means[slow.rank]) for step, means, _ in table], "slow", slow.name))
    band = [(step, min(values), max(values)) for step, values in finite if values]
    labels = []
    for group in groups[:12]:
        numbers = sorted(rank.rank for rank in group)
        name = group[0].name if len(group) == 1 else f"ranks {ranges(numbers)}"
        labels.append((numbers[len(numbers) // 2], f"{name}  {times(group[0].ratio)}"))
    ratios = [[mean / median if median > 0 else math.nan for mean in means] for _, means, median in table]
    by_rank = [*zip(*ratios, strict=True)]
    borders = [f"≤ {border:g}×" for border in charts.HEAT] + ["more"]
    keys = "".join(f'<span><i class="heat{n}"></i>{text}</span>' for n, text in enumerate(borders))
    heat = charts.heat([step for step, *_ in table], by_rank, sorted(labels)) + f'<p class="legend">{keys}</p>'
    over_steps = charts.lines(drawn, events, band=band, height=240, zero=True)
    shaded = f"{unit} · shaded: from the fastest to the slowest rank"
    stripes = card("Each rank against the median", "a slow rank is a stripe", heat)
    return card("Own compute over steps", shaded, over_steps) + stripes


def _neighbours(slow: Sequence[Rank]) -> list[list[Rank]]:
    """Stragglers with successive numbers, each group from its slowest on, and the group of the slowest first."""
    groups: list[list[Rank]] = []
    for rank in sorted(slow, key=lambda rank: rank.rank):
        if groups and rank.rank == groups[-1][-1].rank + 1:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return sorted(map(stragglers, groups), key=lambda group: -group[0].ratio)


def _mean(values: Iterable[float]) -> float:
    finite = [*filter(math.isfinite, values)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def median_low(values: Iterable[float]) -> float:
    """The lower median of what is finite, else NaN."""
    finite = [*filter(math.isfinite, values)]
    return statistics.median_low(finite) if finite else math.nan


# ---------------------------------------------------------------- any other value of all ranks


def chart_of_ranks(
    title: str,
    unit: str,
    by_rank: Mapping[str, Sequence[Point]],
    marks: Sequence[Mark],
    *,
    width: int = 1032,
    seconds: bool = False,
) -> str:
    """A line for each rank; of many ranks their median, and the range from the lowest to the highest."""
    band: charts.Band = []
    if len(by_rank) <= FEWER:
        drawn = [Line(name, points, f"rank{n}", name) for n, (name, points) in enumerate(by_rank.items())]
    elif len(by_rank) <= FEW:
        drawn = [Line(name, points, "crowd") for name, points in by_rank.items()]
    else:
        points = sorted((x, y) for line in by_rank.values() for x, y in line if math.isfinite(y))
        first, wide = points[0][0], (points[-1][0] - points[0][0]) / COLUMNS or 1.0
        columns = [[*group] for _, group in groupby(points, key=lambda point: int((point[0] - first) / wide))]
        table = [(column[-1][0], [y for _, y in column]) for column in columns]
        drawn = [Line("median of all ranks", [(x, median_low(values)) for x, values in table], "usual", "median")]
        band = [(x, min(values), max(values)) for x, values in table]
        unit += " · shaded: from the lowest to the highest rank"
    drawing = charts.lines(drawn, marks, band=band, width=width, height=190, zero=True, seconds=seconds)
    return card(title, unit, drawing)
