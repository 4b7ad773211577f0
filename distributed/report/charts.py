"""Draw line charts over steps or seconds as SVG.

A chart is a string of SVG for a page. Colours and fonts come from CSS classes in report.css, for light and dark screens
and for print.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from operator import itemgetter

from distributed.terminal import cut, number_text, short_exponent

Point = tuple[float, float]  # x, y; NaN as y is a gap

COLUMNS = 400  # vertical strips of equal width in a chart; a long line has about two points in each
MANY = 60  # a line with at least this many points is smoothed
TINY = 1e-100  # smaller values are drawn as zero
LETTER, LABEL_LETTER = 6.2, 8.2  # width of a letter in a text, and of a bold one in a wide font, pixels
WIDE, NARROW = 1032, 340  # widths of a chart that fills the page, on wide and on narrow screens, pixels
NARROW_LABEL = 11  # characters of a label on narrow screens


def compact(value: float) -> str:
    """12,346  10.8 M  1.5 G  2 T."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if size <= abs(value) < 1e15:
            return f"{value / size:,.3g} {letter}"
    return number_text(value)


# ---------------------------------------------------------------- scales


@dataclass(frozen=True)
class Scale:
    """Maps values to pixels: `low` to `start`, `high` to `end`."""

    low: float
    high: float
    start: float
    end: float
    step: float = 1.0  # between ticks

    def __call__(self, value: float) -> float:
        """The pixel of a value; values outside the scale are drawn on its border."""
        inside = min(max(value, self.low), self.high)
        return self.start + (inside - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """The multiples of `step` from low to high, and their labels with the decimals that the step needs."""
        decimals = max(0, -math.floor(math.log10(self.step) + 1e-9))
        found = []
        for number in range(math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9) + 1):
            value = number * self.step
            if abs(value) >= 1e6:
                text = compact(value)
            elif value and self.step < 1e-4:
                text = short_exponent(f"{value:.3g}")
            else:
                text = f"{value:,.{decimals if value else 0}f}"
            found.append((value, text))
        return found


def nice_step(span: float, count: int) -> float:
    """The smallest 1, 2 or 5 x 10^n that divides a span into at most `count` parts."""
    power = 10.0 ** math.floor(math.log10(span / count))
    return next(m * power for m in (1, 2, 5, 10, 20) if m * power * count >= span * (1 - 1e-9))


TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)  # seconds


def time_ticks(seconds: float, count: int) -> list[tuple[float, str]]:
    """About `count` points in time, starting at 0, and their labels: 0, 30 s, 1 min, 1 min 30 s."""
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
    """A scale from the lowest to the highest of these steps or seconds."""
    low, high, apart = _extent(xs)
    if not apart:
        low, high = low - 1, high + 1
    return Scale(low, high, start, end, max(1.0, nice_step(high - low, _tick_count(start, end))))


def _tick_count(start: float, end: float) -> int:
    """The number of ticks that fit on an x axis."""
    return max(2, int((end - start) / 56))


def value_scale(ys: Iterable[float], start: float, end: float, *, zero: bool, count: int) -> Scale:
    """A scale with about `count` ticks, which begins and ends at a tick. zero: include zero."""
    low, high, apart = _extent([*ys, 0.0] if zero else ys)
    if not apart:
        low, high = low - (abs(low) / 10 or 1) * (not zero), high + (abs(high) / 10 or 1)
    step = nice_step(high - low, count)
    return Scale(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, start, end, step)


def _extent(values: Iterable[float]) -> tuple[float, float, bool]:
    """The lowest and the highest finite value, and whether they differ."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite), max(finite)
    return low, high, high - low > max(TINY, 1e-9 * max(abs(low), abs(high)))


# ---------------------------------------------------------------- reducing the number of points


def thin(points: Sequence[Point], columns: int = COLUMNS) -> list[Point]:
    """Keep points that suffice for the same drawing: both ends, and minimum, maximum and one gap of each column."""
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
    """The running mean of the points; fewer than MANY points are returned unchanged.

    The window shrinks towards the first point, so that a steep start stays steep.
    """
    if len(points) < MANY:
        return list(points)
    means = [_mean(column) for column in _columns(points, columns)]
    means[0], means[-1] = (points[0][0], means[0][1]), (points[-1][0], means[-1][1])
    widest = max(2, len(means) // 40)
    windows = (means[n - min(n, widest) : n + min(n, widest) + 1] for n in range(len(means)))
    return [
        (x, _mean(window)[1] if math.isfinite(y) else math.nan) for (x, y), window in zip(means, windows, strict=True)
    ]


def _finite(points: Iterable[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[1])]


def _mean(points: Sequence[Point]) -> Point:
    x, y = (math.fsum(values) / len(values) for values in zip(*(_finite(points) or points), strict=True))
    return x, y


def _columns(points: Sequence[Point], columns: int) -> Iterator[list[Point]]:
    """Yield the points of each column. Columns have equal widths, or one point each if there are few points."""
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
    """The size and margins of a chart, pixels."""

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
    """The SVG of a chart."""
    size = f'viewBox="0 0 {px(box.width)} {px(box.height)}" style="max-width:{px(box.width * 1.5)}px"'
    style += " wide" if box.width > 700 else ""
    edges = " ".join(map(px, (box.left, box.end, box.floor, box.top)))
    return f'<svg class="{style}" role="img" {size} data-edges="{edges}">{"".join(parts)}</svg>'


def px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def text_at(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{px(x)}" y="{px(y)}" class="{style}">{escape(text)}</text>'


def _x_axis(box: Box, x: Scale, seconds: bool) -> Iterator[str]:
    """The x axis of steps, or of seconds that start at 0."""
    if seconds:
        ticks = time_ticks(max(1.0, x.high), _tick_count(box.left, box.end))  # all times may be before the start
    else:
        ticks = x.ticks()
        ticks[:1] = [(value, f"step {text}") for value, text in ticks[:1]]  # none between the steps 0.1 and 0.4
    yield f'<path class="axis" d="M{px(box.left)} {px(box.floor)}H{px(box.end)}"/>'
    for value, text in ticks:
        at = x(value)
        yield f'<path class="axis" d="M{px(at)} {px(box.floor)}v4"/>'
        if at > box.end - 20:  # the last label must not leave the chart
            yield text_at(min(at + 8, box.width - 2), box.floor + 17, text, "tick end")
        else:
            yield text_at(at, box.floor + 17, text, "tick mid")


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move rising positions so that they are at least `gap` apart and between low and high."""
    moved: list[float] = []
    for position in positions:
        moved.append(max(position, moved[-1] + gap if moved else low))
    ceiling = high
    for n in reversed(range(len(moved))):
        moved[n] = min(moved[n], ceiling)
        ceiling = moved[n] - gap
    return moved


@dataclass(frozen=True)
class Line:
    name: str  # shown in the read-out, which shows the values under the pointer
    points: Sequence[Point]  # by rising x
    style: str  # CSS class of the colour
    label: str = ""  # at the end of the line
    raw: bool = False  # drawn faintly, behind the line of its running mean


Band = Sequence[tuple[float, float, float]]  # x, low, high: a shaded area


@dataclass(frozen=True)
class Mark:
    x: float  # the step, or seconds, of an event
    text: str
    style: str = "event"  # or "bad" or "checkpoint"


def smoothed(line: Line) -> list[Line]:
    """Return the line itself, or, if it has many points, the raw line and the line of its running mean."""
    if len(line.points) < MANY:
        return [line]
    mean = replace(line, name=f"{line.name}, smoothed", points=smooth(line.points))
    return [replace(line, raw=True, label=""), mean]


def lines(
    drawn: Sequence[Line],
    marks: Sequence[Mark] = (),
    *,
    band: Band = (),
    width: int = WIDE,
    height: int = 320,
    zero: bool = False,
    notes: bool = False,
    seconds: bool = False,
    buttons: bool = False,
) -> str:
    """A chart as SVG with its data for report.js; a paragraph if no value is finite.

    A chart of the full width has a second drawing for narrow screens. zero: the y axis includes zero. notes: print the
    texts of marks in addition to their tooltips. seconds: the x axis shows seconds from 0 instead of steps, and values
    that are not finite are gaps without a mark. buttons: report.js adds those for a logarithmic axis and for smoothing.
    """
    drawn = [replace(line, points=thin(line.points, min(COLUMNS, width // 2))) for line in drawn if line.points]
    values = [y for line in drawn for _, y in _finite(line.points)] + [y for _, *pair in band for y in pair]
    if not values:
        return '<p class="nothing">No finite value was logged.</p>'
    found = ""
    for size in (WIDE, NARROW) if width == WIDE else (width,):
        labels = [cut(line.label, NARROW_LABEL) if size == NARROW else line.label for line in drawn]
        fitting = [replace(line, label=label) for line, label in zip(drawn, labels, strict=True)]
        if size == NARROW:
            fitting = [replace(line, points=thin(line.points, size // 2)) for line in fitting]
        right = max(map(len, labels), default=0) * LABEL_LETTER + 14
        box = Box(size, min(height, 230) if size == NARROW else height, right=right, top=28 if notes and marks else 12)
        x = step_scale([x for line in drawn for x, _ in line.points] + [0.0] * seconds, box.left, box.end)
        y = value_scale(values, box.floor, box.top, zero=zero, count=max(2, int((height - box.top) / 50)))
        parts = _drawing(fitting, _marks(box, x, marks, notes, seconds), band, box, x, y, seconds)
        found += svg(box, parts, "lines narrow" if size == NARROW else "lines")
    return found + _data(drawn, marks, x, y, seconds=seconds, zoom=not band, buttons=buttons)


def _drawing(
    drawn: Sequence[Line], marks: Iterable[str], band: Band, box: Box, x: Scale, y: Scale, seconds: bool
) -> Iterator[str]:
    for value, text in y.ticks():
        yield f'<path class="grid" d="M{px(box.left)} {px(y(value))}H{px(box.end)}"/>'
        yield text_at(box.left - 8, y(value) + 4, text, "tick end")
    yield from _x_axis(box, x, seconds)
    yield from marks
    if band:
        corners = [(a, high) for a, _, high in band] + [(a, low) for a, low, _ in reversed(band)]
        yield f'<path class="band" d="M{" ".join(f"{px(x(a))},{px(y(b))}" for a, b in corners)}Z"/>'
    for line in drawn:
        yield from _line(line, x, y, box, seconds)
    yield from _end_labels(drawn, y, box)


def _line(line: Line, x: Scale, y: Scale, box: Box, seconds: bool) -> Iterator[str]:
    """The finite parts of a line, dots for single points and sparse held-out losses, wedges for values not finite."""
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
    if lost and not seconds:  # red wedges on the x axis
        wedges = "".join(f"M{at - 4} {px(box.floor)}l4-7l4 7z" for at in lost)
        yield f'<path class="lost" d="{wedges}"><title>{escape(line.name)}: not finite</title></path>'


def _end_labels(drawn: Sequence[Line], y: Scale, box: Box) -> Iterator[str]:
    """Labels beside the last finite values of the lines, without overlaps."""
    ends = [(y(_finite(line.points)[-1][1]), line) for line in drawn if line.label and _finite(line.points)]
    ends.sort(key=itemgetter(0))
    positions = spread([end for end, _ in ends], 14, box.top + 4, box.floor)
    for at, (_, line) in zip(positions, ends, strict=True):
        yield text_at(box.end + 8, at + 4, line.label, f"label {line.style}")


def _marks(box: Box, x: Scale, marks: Sequence[Mark], notes: bool, seconds: bool) -> Iterator[str]:
    """A vertical line for each event. notes: add the text of an event, unless it would overlap the previous text."""
    inside = sorted((mark for mark in marks if x.low <= mark.x <= x.high), key=lambda mark: mark.x)
    free = box.left
    for (at, style), group in groupby(inside, key=lambda mark: (round(x(mark.x) / 3) * 3, mark.style)):
        close = list(group)
        texts = [
            f"{mark.text} after {_time_text(round(mark.x))}"
            if seconds
            else f"{mark.text} at step {number_text(mark.x)}"
            for mark in close
        ]
        title = "; ".join([*dict.fromkeys(texts)][:9])
        top = box.floor - 6 if style == "checkpoint" else box.top - 10 if notes else box.top
        yield f'<path class="mark {style}" d="M{at} {px(top)}V{px(box.floor)}"><title>{escape(title)}</title></path>'
        if notes and style != "checkpoint" and at >= free:
            free = at + 120
            at_end = free > box.width
            note = "note" + " end" * at_end + " bad" * (style == "bad")
            yield text_at(at - 5 if at_end else at + 5, box.top - 4, cut(close[0].text, 18), note)


def _data(
    drawn: Sequence[Line], marks: Sequence[Mark], x: Scale, y: Scale, *, seconds: bool, zoom: bool, buttons: bool
) -> str:
    """The lines and marks as JSON, for report.js; null stands for a value that is not finite."""
    facts = {
        "x": [x.low, x.high],
        "y": [y.low, y.high],
        "seconds": seconds,
        "zoom": zoom,
        "buttons": buttons,
        "marks": [[mark.x, mark.text, mark.style] for mark in marks if math.isfinite(mark.x)],
        "lines": [
            {
                "name": line.name,
                "style": line.style,
                "label": line.label,
                "raw": line.raw,
                "points": [
                    [float(f"{x:.7g}"), float(f"{y:.5g}") if math.isfinite(y) else None] for x, y in line.points
                ],
            }
            for line in drawn
        ],
    }
    text = json.dumps(facts, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'
