"""Numbers as SVG: lines over steps or seconds, ranks as bars, ranks over steps as a heat map.

Every chart is a string of SVG that a page holds as it is. It names CSS classes only: colours and fonts come from
report.css, so that one drawing serves light, dark and paper. Standard library only.

Try it: python -c "from distributed.runs.charts import *; print(lines([Line('loss', [(1, 3.2), (2, 2.9)], 'train')]))"
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from operator import itemgetter

Point = tuple[float, float]  # x, y; a y that is NaN is a gap

COLUMNS = 400  # a long line is drawn with at most two points for each of so many columns
MANY = 60  # points from which on a smooth line is drawn over the raw one
LOG_RATIO = 20.0  # values that span more than this are drawn on a logarithmic axis
TINY = 1e-100  # what is nearer to zero is drawn as zero
LETTER = 6.2  # width of a letter of the labels, pixels


# ---------------------------------------------------------------- numbers as text


def figure(value: float) -> str:
    """Four digits, thousands separated: 12,346  2.313  0.0003  3e-5."""
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return _short_exponent(f"{value:.3g}" if size < 1 else f"{value:.4g}")
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def compact(value: float) -> str:
    """12,346 stays; from a million on 10.8 M, 1.5 G, 2 T."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if size <= abs(value) < 1e15:
            return f"{value / size:,.3g} {letter}"
    return figure(value)


def cut(text: str, length: int) -> str:
    """The text, shortened to a length."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _short_exponent(text: str) -> str:
    """3e-5 of 3e-05."""
    mantissa, mark, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if mark else text


def _tick_text(value: float, step: float) -> str:
    """A tick with as many decimals as its distance to the next one requires."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6:
        return compact(value)
    if step < 1e-4:
        return _short_exponent(f"{value:.3g}")
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


# ---------------------------------------------------------------- scales


@dataclass(frozen=True)
class Scale:
    """Data to pixels: `low` falls on `start`, `high` on `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    step: float = 0.0  # between ticks; 0: as many as fit

    def __call__(self, value: float) -> float:
        """The pixel of a value; a value outside of the scale is drawn on the border."""
        inside = min(max(value, self.low), self.high)
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, inside))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self, count: int) -> list[tuple[float, str]]:
        """About `count` values and their texts: 1, 2 or 5 times a power of ten.

        On a logarithmic scale: all of these where there is room, else every power of ten, every second, ...
        """
        if not self.log:
            return even_ticks(self.low, self.high, self.step or nice_step(self.high - self.low, count))
        first, last = math.floor(math.log10(self.low) + 1e-9), math.ceil(math.log10(self.high) - 1e-9)
        for digits, every in (((1, 2, 5), 1), *(((1,), every) for every in range(1, last - first + 1))):
            powers = range(math.ceil(first / every) * every, last + 1, every)
            values = [digit * 10.0**power for power in powers for digit in digits]
            ticks = [(v, _tick_text(v, v)) for v in values if self.low * (1 - 1e-9) <= v <= self.high * (1 + 1e-9)]
            if len(ticks) <= 2 * count + 1:
                break
        return ticks


def nice_step(span: float, count: int) -> float:
    """The smallest of 1, 2, 5 x 10^n that divides a span into at most `count` parts."""
    power = 10.0 ** math.floor(math.log10(span / count))
    return next(m * power for m in (1, 2, 5, 10, 20) if m * power * count >= span * (1 - 1e-9))


def even_ticks(low: float, high: float, step: float) -> list[tuple[float, str]]:
    """All multiples of `step` from low to high, and their texts."""
    values = [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return [(value, _tick_text(value, step)) for value in values]


TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)  # seconds


def time_ticks(seconds: float, count: int) -> list[tuple[float, str]]:
    """At most about `count` times from 0 on and their texts: 0, 30 s, 1 min, 1 min 30 s."""
    if seconds < count:
        ticks = even_ticks(0, seconds, nice_step(seconds, count))
        return [(value, f"{text} s" if value else text) for value, text in ticks]
    days = 86400 * max(1.0, nice_step(seconds / 86400, count))
    step = next((step for step in TIME_STEPS if step * count >= seconds), days)
    return [(n * step, _time_text(n * step)) for n in range(math.floor(seconds / step + 1e-9) + 1)]


def _time_text(seconds: float) -> str:
    parts = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            parts.append(f"{int(seconds // size):,} {unit}")
            seconds %= size
    return " ".join(parts) or "0"


def step_scale(xs: Iterable[float], start: float, end: float) -> Scale:
    """A scale from the first to the last step."""
    low, high = _extent(xs)
    return Scale(low, high, start, end) if _apart(low, high) else Scale(low - 1, high + 1, start, end)


def value_scale(ys: Iterable[float], start: float, end: float, *, zero: bool, count: int = 4) -> Scale:
    """A scale that ends on ticks; from zero if requested, logarithmic where the values span much."""
    low, high = _extent(ys)
    if not zero and low > TINY and high / low > LOG_RATIO:
        powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
        borders = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        below = max(border for border in borders if border <= low * (1 + 1e-9))
        above = min(border for border in borders if border >= high * (1 - 1e-9))
        return Scale(below, above, start, end, log=True)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if not _apart(low, high):
        low, high = low - (abs(low) / 10 or 1) * (not zero), high + (abs(high) / 10 or 1)
    step = nice_step(high - low, count)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Scale(low, high, start, end, step=step)


def _extent(values: Iterable[float]) -> Point:
    finite = [value for value in values if math.isfinite(value)]
    return min(finite), max(finite)


def _apart(low: float, high: float) -> bool:
    return high - low > max(TINY, 1e-9 * max(abs(low), abs(high)))


# ---------------------------------------------------------------- fewer points, the same picture


def thin(points: Sequence[Point], columns: int = COLUMNS) -> list[Point]:
    """Few points that look the same: of each column the smallest, the largest and one gap, if it has one."""
    if len(points) <= 2 * columns:
        return list(points)
    kept = [points[0]]
    for column in _columns(points, columns):
        finite, gaps = _finite(column), [point for point in column if not math.isfinite(point[1])]
        extremes = {min(finite, key=itemgetter(1)), max(finite, key=itemgetter(1))} if finite else set()
        kept += sorted({*extremes, *gaps[:1]}, key=itemgetter(0))
    kept.append(points[-1])
    return [point for point, _ in groupby(kept)]


def smooth(points: Sequence[Point], columns: int = COLUMNS) -> list[Point]:
    """The running mean. Its window grows from the first point on, so that a steep beginning stays steep."""
    means = [_mean(column) for column in _columns(points, columns)]
    means[0], means[-1] = (points[0][0], means[0][1]), (points[-1][0], means[-1][1])
    widest = max(2, len(means) // 40)
    smoothed = []
    for n, (x, y) in enumerate(means):
        half = min(n, widest)
        smoothed.append((x, _mean(means[n - half : n + half + 1])[1] if math.isfinite(y) else math.nan))
    return smoothed


def _finite(points: Iterable[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[1])]


def _mean(points: Sequence[Point]) -> Point:
    x, y = (math.fsum(values) / len(values) for values in zip(*(_finite(points) or points), strict=True))
    return x, y


def _columns(points: Sequence[Point], columns: int) -> Iterator[list[Point]]:
    """The points of each column of equal width; every point its own when there are few."""
    if len(points) <= columns:
        yield from ([point] for point in points)
        return
    first, width, begin = points[0][0], (points[-1][0] - points[0][0]) / columns, 0
    for border in (*(first + width * n for n in range(1, columns)), math.inf):
        end = bisect_left(points, border, begin, key=itemgetter(0))
        if end > begin:
            yield list(points[begin:end])
        begin = end


# ---------------------------------------------------------------- parts of a drawing


@dataclass(frozen=True)
class Box:
    """The area of a drawing in which values are drawn, pixels."""

    width: float
    height: float
    left: float = 52
    right: float = 14
    top: float = 12
    bottom: float = 24

    @property
    def end(self) -> float:
        """The right border."""
        return self.width - self.right

    @property
    def floor(self) -> float:
        """The lower border."""
        return self.height - self.bottom


def svg(box: Box, parts: Iterable[str], style: str) -> str:
    """A drawing. On narrow screens a wide one is scrolled, see report.css."""
    size = f'viewBox="0 0 {px(box.width)} {px(box.height)}" style="max-width:{px(box.width * 1.5)}px"'
    style += " wide" if box.width > 700 else ""
    return f'<svg class="{style}" role="img" {size}>{"".join(parts)}</svg>'


def px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def text_at(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{px(x)}" y="{px(y)}" class="{style}">{escape(text)}</text>'


def _x_axis(box: Box, x: Scale, seconds: bool = False) -> Iterator[str]:
    """The axis of steps, or of seconds from 0 on."""
    count = max(2, int((box.end - box.left) / 56))
    if seconds:
        ticks = time_ticks(max(x.high, 1e-3), count)
    else:
        (first, text), *rest = replace(x, step=max(1.0, nice_step(x.high - x.low, count))).ticks(count)
        ticks = [(first, f"step {text}"), *rest]
    yield f'<path class="axis" d="M{px(box.left)} {px(box.floor)}H{px(box.end)}"/>'
    for value, text in ticks:
        at = x(value)
        yield f'<path class="axis" d="M{px(at)} {px(box.floor)}v4"/>'
        if at > box.end - 20:  # the last one
            yield text_at(min(at + 8, box.width - 2), box.floor + 17, text, "tick end")
        else:
            yield text_at(at, box.floor + 17, text, "tick mid")


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Rising places, moved as little as possible to stand `gap` apart, from low to high."""
    out: list[float] = []
    for place in places:
        out.append(max(place, out[-1] + gap if out else low))
    ceiling = high
    for n in reversed(range(len(out))):
        out[n] = min(out[n], ceiling)
        ceiling = out[n] - gap
    return out


# ---------------------------------------------------------------- lines over steps


@dataclass(frozen=True)
class Line:
    """Values over steps."""

    name: str  # in the read-out under the pointer
    points: Sequence[Point]  # by rising x
    style: str  # class that gives the colour
    label: str = ""  # written at its end
    raw: bool = False  # only the faint background of a smoothed one


Band = Sequence[tuple[float, float, float]]  # x, low, high: the area between a lower and an upper line


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step."""

    x: float
    text: str
    style: str = "event"  # or "bad" or "checkpoint"


def smoothed(line: Line) -> list[Line]:
    """A line as it is or, when it has many points, smooth over faint raw values."""
    if len(line.points) < MANY:
        return [line]
    mean = replace(line, name=f"{line.name}, smoothed", points=smooth(line.points))
    return [replace(line, raw=True, label=""), mean]


def lines(
    drawn: Sequence[Line],
    marks: Sequence[Mark] = (),
    *,
    band: Band = (),
    width: int = 1032,
    height: int = 320,
    zero: bool = False,
    notes: bool = False,
    seconds: bool = False,
) -> str:
    """Lines over steps as SVG, with the numbers for the read-out beside it.

    zero: the axis of values begins at zero. notes: marks get their text, and not only when pointed at. seconds: the
    x axis shows seconds from 0 on, not steps, and a value that is not finite is unknown.
    Without one finite value: a sentence that says so.
    """
    drawn = [replace(line, points=thin(line.points, min(COLUMNS, width // 2))) for line in drawn if line.points]
    values = [y for line in drawn for _, y in _finite(line.points)] + [y for _, *pair in band for y in pair]
    if not values:
        return '<p class="nothing">No finite value was logged.</p>'
    longest = max((len(line.label) for line in drawn), default=0)
    box = Box(width, height, right=longest * LETTER + 20, top=28 if notes and marks else 12)
    x = step_scale([x for line in drawn for x, _ in line.points] + [0.0] * seconds, box.left, box.end)
    count = max(2, int((box.floor - box.top) / 45))
    y = value_scale(values, box.floor, box.top, zero=zero, count=count)
    parts = []
    for value, text in y.ticks(count):
        parts.append(f'<path class="grid" d="M{px(box.left)} {px(y(value))}H{px(box.end)}"/>')
        parts.append(text_at(box.left - 8, y(value) + 4, text, "tick end"))
    parts += _x_axis(box, x, seconds)
    parts += _marks(box, x, marks, notes, seconds)
    if band:
        corners = [(a, high) for a, _, high in band] + [(a, low) for a, low, _ in reversed(band)]
        parts.append(f'<path class="band" d="M{" ".join(f"{px(x(a))},{px(y(b))}" for a, b in corners)}Z"/>')
    for line in drawn:
        parts += _line(line, x, y, box, seconds)
    parts += _end_labels(drawn, y, box)
    return svg(box, parts, "lines") + _readout([line for line in drawn if not line.raw], x, y, seconds)


def _line(line: Line, x: Scale, y: Scale, box: Box, seconds: bool) -> Iterator[str]:
    """Its finite stretches, and dots for single points and for the few of held-out losses."""
    runs = [list(run) for finite, run in groupby(line.points, lambda p: math.isfinite(p[1])) if finite]
    path = "".join("M" + " ".join(f"{px(x(a))},{px(y(b))}" for a, b in run) for run in runs if len(run) > 1)
    if path:
        yield f'<path class="line {line.style}{" raw" if line.raw else ""}" d="{path}"/>'
    if line.raw:
        return
    sparse = len(line.points) <= 40 and line.style == "held-out"
    dots = _finite(line.points) if sparse else [run[0] for run in runs if len(run) == 1]
    if dots:
        spots = "".join(f"M{px(x(a))},{px(y(b))}h0" for a, b in dots)
        yield f'<path class="dot {line.style}" d="{spots}"/>'
    lost = sorted({round(x(a)) for a, b in line.points if not math.isfinite(b)})
    if lost and not seconds:  # a red wedge on the lower border
        wedges = "".join(f"M{at - 4} {px(box.floor)}l4-7l4 7z" for at in lost)
        yield f'<path class="lost" d="{wedges}"><title>{escape(line.name)}: not finite</title></path>'


def _end_labels(drawn: Sequence[Line], y: Scale, box: Box) -> Iterator[str]:
    """Each label beside the last finite value of its line, none over another."""
    ends = [(y(_finite(line.points)[-1][1]), line) for line in drawn if line.label and _finite(line.points)]
    ends.sort(key=itemgetter(0))
    places = spread([end for end, _ in ends], 14, box.top + 4, box.floor)
    for at, (_, line) in zip(places, ends, strict=True):
        yield text_at(box.end + 8, at + 4, line.label, f"label {line.style}")


def _marks(box: Box, x: Scale, marks: Sequence[Mark], notes: bool, seconds: bool) -> Iterator[str]:
    """A vertical line where something happened. With notes: one text for all marks that stand close together."""
    inside = sorted((mark for mark in marks if x.low <= mark.x <= x.high), key=lambda mark: mark.x)
    for (at, style), group in groupby(inside, key=lambda mark: (round(x(mark.x) / 3) * 3, mark.style)):
        texts = [
            f"{mark.text} after {_time_text(round(mark.x))}" if seconds else f"{mark.text} at step {figure(mark.x)}"
            for mark in group
        ]
        title = "; ".join([*dict.fromkeys(texts)][:9])
        top = box.floor - 6 if style == "checkpoint" else box.top - 10 if notes else box.top
        yield f'<path class="mark {style}" d="M{at} {px(top)}V{px(box.floor)}"><title>{escape(title)}</title></path>'
    groups: list[list[Mark]] = []
    for mark in inside if notes else ():
        if mark.style == "checkpoint":
            continue
        if groups and x(mark.x) - x(groups[-1][0].x) < 120:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    for close in groups:
        start = x(close[0].x)
        at_end = start > box.width - 160
        counts = Counter(mark.text for mark in close)
        text = ", ".join(f"{text} ×{count}" if count > 1 else text for text, count in counts.items())
        style = "note" + " end" * at_end + " bad" * any(mark.style == "bad" for mark in close)
        yield text_at(start - 5 if at_end else start + 5, box.top - 4, cut(text, 40), style)


def _readout(drawn: Sequence[Line], x: Scale, y: Scale, seconds: bool) -> str:
    """What report.js needs to show the values under the pointer. NaN is left out."""
    facts = {
        "x": [x.low, x.high, x.start, x.end],
        "y": [y.low, y.high, y.start, y.end, int(y.log)],
        "seconds": int(seconds),
        "lines": [
            {
                "name": line.name,
                "style": line.style,
                "points": [[float(f"{value:.5g}") for value in point] for point in _finite(line.points)],
            }
            for line in drawn
        ],
    }
    text = json.dumps(facts, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


# ---------------------------------------------------------------- ranks


@dataclass(frozen=True)
class Bar:
    """One rank: its usual value and the range of most of its values."""

    name: str
    value: float
    low: float
    high: float
    text: str  # behind the bar
    bad: bool = False


def bars(ranks: Sequence[Bar], usual: float, usual_text: str, *, width: int = 488, height: int = 280) -> str:
    """Bars from zero, a thin line from low to high, and a rule at what is usual, as SVG."""
    row = min((height - 36) / len(ranks), 44.0)
    tall = min(20.0, row * 0.64)
    left = max(len(bar.name) for bar in ranks) * LETTER + 16
    right = max(len(bar.text) for bar in ranks) * LETTER + 22
    box = Box(width, height, left, right, top=(height - 26 - row * len(ranks)) / 2)
    floor = box.top + row * len(ranks)
    x = value_scale([bar.high for bar in ranks], box.left, box.end, zero=True)
    parts = []
    for n, bar in enumerate(ranks):
        middle, bad, end = box.top + row * (n + 0.5), " bad" * bar.bad, x(bar.value)
        size = f'x="{px(x.start)}" y="{px(middle - tall / 2)}" height="{px(tall)}"'
        parts += [
            text_at(x.start - 8, middle + 4, bar.name, f"label end{bad}"),
            f'<rect class="bar{bad}" {size} rx="2" width="{px(max(1.0, end - x.start))}"/>',
            f'<path class="whisker" d="M{px(x(bar.low))} {px(middle)}H{px(x(bar.high))}"/>',
            text_at(max(end, x(bar.high)) + 8, middle + 4, bar.text, f"label value{bad}"),
        ]
    parts.append(f'<path class="rule" d="M{px(x(usual))} {px(box.top - 2)}V{px(floor + 4)}"/>')
    parts.append(text_at(x(usual), floor + 20, usual_text, "tick mid"))
    return svg(box, parts, "bars")


HEAT = (1.05, 1.15, 1.3, 1.6, 2.0)  # the upper borders of all levels but the last


def heat(steps: Sequence[float], rows: Sequence[Sequence[float]], labels: Sequence[tuple[int, str]]) -> str:
    """Ratios as colours: a row for each rank, a column for each step. NaN stays empty.

    labels: (row, text) of the rows that are named at the right, by rising row.
    """
    longest = max((len(text) for _, text in labels), default=0)
    tall = max(1, round(320 / len(rows)))
    box = Box(1032, tall * len(rows) + 36, right=longest * LETTER + 20, top=6)
    wide = (box.end - box.left) / len(steps)
    strokes: list[list[str]] = [[] for _ in range(len(HEAT) + 1)]  # of each level; neighbours in a row are one
    for row, ratios in enumerate(rows):
        column = 0
        levels = [sum(ratio > border for border in HEAT) if math.isfinite(ratio) else None for ratio in ratios]
        for level, cells in groupby(levels):
            length = len(list(cells))
            if level is not None:
                start = f"M{px(box.left + column * wide)} {px(box.top + tall * (row + 0.5))}"
                strokes[level].append(f"{start}h{px(length * wide)}")
            column += length
    parts = [
        f'<path class="heat{level}" stroke-width="{tall}" d="{"".join(paths)}"/>'
        for level, paths in enumerate(strokes)
        if paths
    ]
    every = 1 << max(0, math.ceil(math.log2(len(rows) / 9)))  # at most nine of them are numbered
    for row in range(0, len(rows), every):
        text = f"{row:,}" if row else "rank 0"
        parts.append(text_at(box.left - 8, box.top + tall * (row + 0.5) + 4, text, "tick end"))
    parts += _x_axis(box, step_scale(steps, box.left, box.end))
    places = spread([box.top + tall * (row + 0.5) for row, _ in labels], 14, box.top + 4, box.floor)
    for at, (_, text) in zip(places, labels, strict=True):
        parts.append(text_at(box.end + 8, at + 4, text, "label bad"))
    return svg(box, parts, "heat")
