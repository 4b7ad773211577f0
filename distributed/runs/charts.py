"""Numbers as SVG: lines over steps, ranks as bars, ranks over steps as a heat map, slots over time as a timeline.

Every chart is a string of SVG that a page holds as it is. Colours and fonts are the page's: a drawing only
names classes, so that one serves light, dark and paper. Standard library only.

Try it: python -c "from distributed.runs.charts import *; print(lines([Line('loss', [(1, 3.2), (2, 2.9)], 'train')]))"
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby, pairwise
from operator import itemgetter
from unicodedata import east_asian_width

Point = tuple[float, float]  # x, y; a y that is NaN is a gap

COLUMNS = 400  # a long line is drawn with at most two points for each of so many columns
MANY = 60  # points from which on a smooth line is drawn over the raw one
LOG_RATIO = 20.0  # values that span more than this are drawn on a logarithmic axis
TINY = 1e-100  # what is nearer to zero is drawn as zero
LETTER = 6.2  # width of a letter of the labels, pixels


# ---------------------------------------------------------------- numbers as people read them


def figure(value: float) -> str:
    """Four digits, thousands separated: 12,346  2.313  0.0003  3e-5."""
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return _exponent(f"{value:.3g}" if size < 1 else f"{value:.4g}")
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def compact(value: float) -> str:
    """12,346 stays; from a million on 10.8 M, 1.5 G, 2 T."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if size <= abs(value) < 1e15:
            return f"{value / size:,.3g} {letter}"
    return figure(value)


def _exponent(text: str) -> str:
    mantissa, mark, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if mark else text


def _tick_text(value: float, step: float) -> str:
    """A tick with as many decimals as its distance to the next one asks for."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6:
        return compact(value)
    if step < 1e-4:
        return _exponent(f"{value:.3g}")
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
        """The pixel of a value; what lies outside is drawn on the border."""
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, self._inside(value)))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def _inside(self, value: float) -> float:
        return min(max(value, self.low), self.high)

    def ticks(self, count: int) -> list[tuple[float, str]]:
        """About `count` values and their texts: 1, 2 or 5 times a power of ten."""
        if self.log:
            return _log_ticks(self.low, self.high, count)
        return _even_ticks(self.low, self.high, self.step or nice_step(self.high - self.low, count))


def nice_step(span: float, count: int) -> float:
    """The smallest of 1, 2, 5 x 10^n that divides a span into at most `count` parts."""
    power = 10.0 ** math.floor(math.log10(span / count))
    return next(m * power for m in (1, 2, 5, 10, 20) if m * power * count >= span * (1 - 1e-9))


def _even_ticks(low: float, high: float, step: float) -> list[tuple[float, str]]:
    values = [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return [(value, _tick_text(value, step)) for value in values]


def _log_ticks(low: float, high: float, count: int) -> list[tuple[float, str]]:
    """1, 2 and 5 of every power of ten where there is room for them, else 1 of every power or every few."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    for digits, every in (((1, 2, 5), 1), *(((1,), every) for every in range(1, last - first + 1))):
        powers = range(math.ceil(first / every) * every, last + 1, every)
        values = [digit * 10.0**power for power in powers for digit in digits]
        ticks = [(v, _tick_text(v, v)) for v in values if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]
        if len(ticks) <= 2 * count + 1:
            break
    return ticks


def step_scale(xs: Iterable[float], start: float, end: float) -> Scale:
    """A scale from the first to the last step."""
    low, high = _extent(xs)
    return Scale(low, high, start, end) if _apart(low, high) else Scale(low - 1, high + 1, start, end)


def value_scale(ys: Iterable[float], start: float, end: float, *, zero: bool, count: int = 4) -> Scale:
    """A scale that ends on ticks; from zero where asked, logarithmic where the values span much."""
    low, high = _extent(ys)
    if not zero and low > TINY and high / low > LOG_RATIO:
        return Scale(_log_border(low, math.floor), _log_border(high, math.ceil), start, end, log=True)
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


def _log_border(value: float, rounded: Callable[[float], int]) -> float:
    """The next 1, 2 or 5 x 10^n below or above."""
    power = 10.0 ** math.floor(math.log10(value))
    borders = [digit * power for digit in (1, 2, 5, 10)]
    if rounded is math.floor:
        return max((border for border in borders if border <= value * (1 + 1e-9)), default=power)
    return min((border for border in borders if border >= value * (1 - 1e-9)), default=10 * power)


# ---------------------------------------------------------------- fewer points, the same picture


def thin(points: Sequence[Point], columns: int = COLUMNS) -> list[Point]:
    """Few points that look the same: of each column the smallest, the largest and one gap, if it has one."""
    if len(points) <= 2 * columns:
        return list(points)
    kept = [points[0]]
    for column in _columns(points, columns):
        kept += _extremes(column)
    kept.append(points[-1])
    return [point for point, _ in groupby(kept)]


def _extremes(points: Sequence[Point]) -> list[Point]:
    finite = [point for point in points if math.isfinite(point[1])]
    picked = [next((point for point in points if not math.isfinite(point[1])), None)]
    if finite:
        picked += [min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])]
    return sorted({point for point in picked if point}, key=lambda point: point[0])


def smooth(points: Sequence[Point], columns: int = COLUMNS) -> list[Point]:
    """The running mean. Its window grows from the first point on, so that a steep beginning stays steep."""
    means = [_mean(column) for column in _columns(points, columns)]
    means[0], means[-1] = (points[0][0], means[0][1]), (points[-1][0], means[-1][1])
    widest = max(2, len(means) // 40)
    return [(x, _window(means, n, widest)) for n, (x, _) in enumerate(means)]


def _window(points: Sequence[Point], n: int, widest: int) -> float:
    half = min(n, widest)
    return _mean(points[n - half : n + half + 1])[1] if math.isfinite(points[n][1]) else math.nan


def _mean(points: Sequence[Point]) -> Point:
    finite = [point for point in points if math.isfinite(point[1])]
    x, y = (math.fsum(values) / len(values) for values in zip(*(finite or points), strict=True))
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


# ---------------------------------------------------------------- lines over steps


@dataclass(frozen=True)
class Line:
    """Values over steps."""

    name: str  # in the read-out under the pointer
    points: Sequence[Point]  # by rising x
    style: str  # class that gives the colour
    label: str = ""  # written at its end
    raw: bool = False  # only the faint background of a smoothed one


@dataclass(frozen=True)
class Band:
    """The room between a lower and an upper line."""

    points: Sequence[tuple[float, float, float]]  # x, low, high


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step."""

    x: float
    text: str
    style: str = "event"  # or "bad" or "checkpoint"


@dataclass(frozen=True)
class Box:
    """Where in a drawing the values go, pixels."""

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
    band: Band | None = None,
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
    values = [y for line in drawn for _, y in line.points if math.isfinite(y)]
    values += [y for _, *pair in (band.points if band else ()) for y in pair]
    if not values:
        return '<p class="nothing">No finite value was logged.</p>'
    longest = max((len(line.label) for line in drawn), default=0)
    box = Box(width, height, right=longest * LETTER + 20, top=28 if notes and marks else 12)
    xs = [x for line in drawn for x, _ in line.points] + [0.0] * seconds
    x = step_scale(xs, box.left, box.end)
    y = value_scale(values, box.floor, box.top, zero=zero, count=_room(box))
    parts = [
        *_grid(box, y),
        *(_seconds(box, x) if seconds else _steps(box, x)),
        *_marks(box, x, marks, notes, seconds),
        *([_area(band, x, y)] if band else []),
        *(part for line in drawn for part in _line(line, x, y)),
        *(part for line in drawn if not seconds for part in _gaps(line, box, x)),
        *_labels(box, [line for line in drawn if line.label], y),
    ]
    return _svg(box, parts, "lines") + _readout([line for line in drawn if not line.raw], x, y, seconds)


def _svg(box: Box, parts: Iterable[str], style: str) -> str:
    size = f'viewBox="0 0 {_px(box.width)} {_px(box.height)}" style="max-width:{_px(box.width * 1.5)}px"'
    style += " wide" if box.width > 700 else ""
    return f'<svg class="{style}" role="img" {size}>{"".join(parts)}</svg>'


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{_px(x)}" y="{_px(y)}" class="{style}">{escape(text)}</text>'


def _room(box: Box) -> int:
    """How many ticks an axis of values has room for."""
    return max(2, int((box.floor - box.top) / 45))


def _grid(box: Box, y: Scale) -> Iterator[str]:
    for value, text in y.ticks(_room(box)):
        at = _px(y(value))
        yield f'<path class="grid" d="M{_px(box.left)} {at}H{_px(box.end)}"/>'
        yield _text(box.left - 8, y(value) + 4, text, "tick end")


def _steps(box: Box, x: Scale) -> Iterator[str]:
    yield f'<path class="axis" d="M{_px(box.left)} {_px(box.floor)}H{_px(box.end)}"/>'
    count = max(2, int((box.end - box.left) / 56))
    ticks = replace(x, step=max(1.0, nice_step(x.high - x.low, count))).ticks(count)
    for n, (value, text) in enumerate(ticks):
        last = n == len(ticks) - 1
        yield f'<path class="axis" d="M{_px(x(value))} {_px(box.floor)}v4"/>'
        style = "tick end" if last and x(value) > box.end - 16 else "tick mid"
        at = min(x(value) + 8, box.width - 2) if style == "tick end" else x(value)
        yield _text(at, box.floor + 17, f"step {text}" if n == 0 else text, style)


def _seconds(box: Box, x: Scale) -> Iterator[str]:
    yield f'<path class="axis" d="M{_px(box.left)} {_px(box.floor)}H{_px(box.end)}"/>'
    for value, text in time_ticks(max(x.high, 1e-3), max(2, int((box.end - box.left) / 56))):
        yield f'<path class="axis" d="M{_px(x(value))} {_px(box.floor)}v4"/>'
        end = x(value) > box.end - 24
        yield _text(box.end + 4 if end else x(value), box.floor + 17, text, "tick end" if end else "tick mid")


def _line(line: Line, x: Scale, y: Scale) -> Iterator[str]:
    runs = [list(run) for finite, run in groupby(line.points, lambda p: math.isfinite(p[1])) if finite]
    path = "".join("M" + " ".join(f"{_px(x(a))},{_px(y(b))}" for a, b in run) for run in runs if len(run) > 1)
    if path:
        yield f'<path class="line {line.style}{" raw" if line.raw else ""}" d="{path}"/>'
    sparse = len(line.points) <= 40 and line.style == "held-out"
    dots = line.points if sparse else [run[0] for run in runs if len(run) == 1]
    spots = "".join(f"M{_px(x(a))},{_px(y(b))}h0" for a, b in dots if math.isfinite(b))
    if spots and not line.raw:
        yield f'<path class="dot {line.style}" d="{spots}"/>'


def _area(band: Band, x: Scale, y: Scale) -> str:
    upper = [f"{_px(x(a))},{_px(y(high))}" for a, _, high in band.points]
    lower = [f"{_px(x(a))},{_px(y(low))}" for a, low, _ in reversed(band.points)]
    return f'<path class="band" d="M{" ".join(upper + lower)}Z"/>'


def _gaps(line: Line, box: Box, x: Scale) -> Iterator[str]:
    """A small red wedge on the lower border where a value was not finite."""
    lost = sorted({round(x(a)) for a, b in line.points if not math.isfinite(b)})
    if lost and not line.raw:
        path = "".join(f"M{at - 4} {_px(box.floor)}l4-7l4 7z" for at in lost)
        yield f'<path class="lost" d="{path}"><title>{escape(line.name)}: not finite</title></path>'


def _labels(box: Box, labelled: Sequence[Line], y: Scale) -> Iterator[str]:
    ends = [(next((b for _, b in reversed(line.points) if math.isfinite(b)), math.nan), line) for line in labelled]
    ends = sorted(((b, line) for b, line in ends if math.isfinite(b)), key=lambda end: -end[0])
    places = spread([y(b) for b, _ in ends], 14, box.top + 4, box.floor)
    for at, (_, line) in zip(places, ends, strict=True):
        yield _text(box.end + 8, at + 4, line.label, f"label {line.style}")


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Rising places, moved as little as needs be to stand `gap` apart, from low to high."""
    out: list[float] = []
    for place in places:
        out.append(max(place, out[-1] + gap if out else low))
    ceiling = high
    for n in reversed(range(len(out))):
        out[n] = min(out[n], ceiling)
        ceiling = out[n] - gap
    return out


def _marks(box: Box, x: Scale, marks: Sequence[Mark], notes: bool, seconds: bool) -> Iterator[str]:
    inside = sorted((mark for mark in marks if x.low <= mark.x <= x.high), key=lambda mark: mark.x)
    for (at, style), group in groupby(inside, key=lambda mark: (round(x(mark.x) / 3) * 3, mark.style)):
        texts = list(dict.fromkeys(f"{mark.text} {_where(mark, seconds)}" for mark in group))
        top = box.floor - 6 if style == "checkpoint" else box.top - 10 if notes else box.top
        title = escape("; ".join(texts[:9]))
        yield f'<path class="mark {style}" d="M{at} {_px(top)}V{_px(box.floor)}"><title>{title}</title></path>'
    if notes:
        yield from _mark_texts(box, x, [mark for mark in inside if mark.style != "checkpoint"])


def _where(mark: Mark, seconds: bool) -> str:
    return f"after {_clock(round(mark.x))}" if seconds else f"at step {figure(mark.x)}"


def _mark_texts(box: Box, x: Scale, marks: Sequence[Mark]) -> Iterator[str]:
    """One text for all marks that stand too near to each other."""
    groups: list[list[Mark]] = []
    for mark in marks:
        if groups and x(mark.x) - x(groups[-1][0].x) < 120:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    for group in groups:
        at, end = x(group[0].x), x(group[0].x) > box.width - 160
        counts = {text: sum(mark.text == text for mark in group) for text in dict.fromkeys(m.text for m in group)}
        text = ", ".join(f"{text} ×{count}" if count > 1 else text for text, count in counts.items())
        bad = " bad" if any(mark.style == "bad" for mark in group) else ""
        yield _text(at - 5 if end else at + 5, box.top - 4, cut(text, 40), f"note{' end' if end else ''}{bad}")


def cut(text: str, length: int) -> str:
    """The text, shortened to a length."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _readout(drawn: Sequence[Line], x: Scale, y: Scale, seconds: bool) -> str:
    """What the script of the page needs to show the values under the pointer. NaN is left out."""
    finite = [[(a, b) for a, b in line.points if math.isfinite(b)] for line in drawn]
    facts = {
        "x": [x.low, x.high, x.start, x.end],
        "y": [y.low, y.high, y.start, y.end, int(y.log)],
        "seconds": int(seconds),
        "lines": [
            {"name": line.name, "style": line.style, "points": [[float(f"{v:.5g}") for v in p] for p in points]}
            for line, points in zip(drawn, finite, strict=True)
        ],
    }
    text = json.dumps(facts, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


# ---------------------------------------------------------------- ranks


@dataclass(frozen=True)
class Bar:
    """One rank: its usual value and the room in which most of its values lie."""

    name: str
    value: float
    low: float
    high: float
    text: str  # behind the bar
    bad: bool = False


def bars(ranks: Sequence[Bar], usual: float, usual_text: str, *, width: int = 488, height: int = 280) -> str:
    """Bars from zero, a thin line from low to high, and a rule at what is usual, as SVG."""
    row = min((height - 36) / len(ranks), 44.0)
    left = max(len(bar.name) for bar in ranks) * LETTER + 16
    right = max(len(bar.text) for bar in ranks) * LETTER + 22
    box = Box(width, height, left, right, top=(height - 26 - row * len(ranks)) / 2)
    floor = box.top + row * len(ranks)
    x = value_scale([bar.high for bar in ranks], box.left, box.end, zero=True)
    rows = [_bar(bar, box.top + row * (n + 0.5), row, x) for n, bar in enumerate(ranks)]
    rule = f'<path class="rule" d="M{_px(x(usual))} {_px(box.top - 2)}V{_px(floor + 4)}"/>'
    return _svg(box, [*rows, rule, _text(x(usual), floor + 20, usual_text, "tick mid")], "bars")


def _bar(bar: Bar, middle: float, row: float, x: Scale) -> str:
    bad, tall = " bad" if bar.bad else "", min(20.0, row * 0.64)
    return (
        _text(x.start - 8, middle + 4, bar.name, f"label end{bad}")
        + f'<rect class="bar{bad}" x="{_px(x.start)}" y="{_px(middle - tall / 2)}" height="{_px(tall)}" rx="2" '
        + f'width="{_px(max(1.0, x(bar.value) - x.start))}"/>'
        + f'<path class="whisker" d="M{_px(x(bar.low))} {_px(middle)}H{_px(x(bar.high))}"/>'
        + _text(max(x(bar.value), x(bar.high)) + 8, middle + 4, bar.text, f"label value{bad}")
    )


HEAT = (1.05, 1.15, 1.3, 1.6, 2.0)  # the upper borders of all levels but the last


def heat(
    steps: Sequence[float],
    rows: Sequence[Sequence[float]],
    labels: Sequence[tuple[int, str]],
    *,
    together: int = 1,
    width: int = 1032,
) -> str:
    """Ratios as colours: a row for each rank, a column for each step. NaN stays empty.

    labels: (row, text) of the rows that are named at the right. together: ranks that share a row.
    """
    longest = max((len(text) for _, text in labels), default=0)
    tall = max(1, round(320 / len(rows)))
    box = Box(width, tall * len(rows) + 36, right=longest * LETTER + 20, top=6)
    y = Scale(0, len(rows), box.top, box.top + tall * len(rows))
    x = step_scale(steps, box.left, box.end)
    wide = (box.end - box.left) / len(steps)
    paths = [_level(rows, level, tall, wide, box) for level in range(len(HEAT) + 1)]
    parts = [*paths, *_rank_ticks(len(rows), together, box, tall), *_steps(box, x)]
    places = spread([y(row + 0.5) for row, _ in labels], 14, box.top + 4, box.floor)
    parts += [_text(box.end + 8, at + 4, text, "label bad") for at, (_, text) in zip(places, labels, strict=True)]
    return _svg(box, parts, "heat")


def _level(rows: Sequence[Sequence[float]], level: int, tall: float, wide: float, box: Box) -> str:
    """All cells of one colour as one path: neighbours in a row are one stroke."""
    strokes = []
    for row, ratios in enumerate(rows):
        column = 0
        for here, run in groupby(ratios, key=_level_of):
            length = len(list(run))
            if here == level:
                at = box.top + tall * (row + 0.5)
                strokes.append(f"M{_px(box.left + column * wide)} {_px(at)}h{_px(length * wide)}")
            column += length
    return f'<path class="heat{level}" stroke-width="{tall}" d="{"".join(strokes)}"/>' if strokes else ""


def _level_of(ratio: float) -> int:
    """Index of a ratio's colour; -1 for none."""
    return sum(ratio > border for border in HEAT) if math.isfinite(ratio) else -1


def _rank_ticks(count: int, together: int, box: Box, tall: float) -> Iterator[str]:
    for row in range(0, count, 2 ** max(0, math.ceil(math.log2(count / 9)))):
        text = f"{row * together:,}" if row else "rank 0"
        yield _text(box.left - 8, box.top + tall * (row + 0.5) + 4, text, "tick end")


# ---------------------------------------------------------------- a timeline

TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)  # seconds
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
NARROW = 3.0  # pixels; narrower bars of a crowded timeline are drawn as one
CROWD = 4000  # bars from which on a timeline is crowded
TALL = ((24, 22.0), (64, 16.0))  # up to so many tracks each is so many pixels high
LOW = 11.0  # pixels of a track beyond that; its bars have no labels
APART = 6.0  # pixels between groups
INSIDE = 7.0  # width of a letter inside a bar, pixels


@dataclass(frozen=True)
class Span:
    """A period, in seconds."""

    start: float
    end: float  # so far, where it has not ended
    style: str  # class that gives the colour
    title: str  # shown when the pointer is on it
    label: str = ""  # written into the bar where it fits; else what is behind its last slash, where that fits
    ended: bool = True


@dataclass(frozen=True)
class Track:
    """A row of a timeline. Neighbours of one group share its name."""

    group: str
    name: str
    spans: Sequence[Span]


def timeline(tracks: Sequence[Track], *, width: int = 1032) -> str:
    """Periods as bars, a row for each track, as SVG; the axis begins at the first start.

    Without a period: a sentence that says so.
    """
    spans = [span for track in tracks for span in track.spans]
    if not spans:
        return '<p class="nothing">Nothing has started yet.</p>'
    begin, end = min(span.start for span in spans), max(span.end for span in spans)
    tall = next((tall for count, tall in TALL if len(tracks) <= count), LOW)
    names = _wide(max((cut(track.name, 12) for track in tracks), key=_wide)) * LETTER
    groups = _wide(max((cut(track.group, 24) for track in tracks), key=_wide)) * LETTER
    tops = _tops(tracks, tall, 6)
    box = Box(width, tops[-1] + tall + 30, left=names + groups + 24, right=28, bottom=26)
    x = Scale(begin, max(end, begin + 1e-3), box.left, box.end)
    parts = [
        *_time_axis(box, x),
        *_track_names(tracks, tops, tall, box.left - 8 - names),
        *_lanes(box, tops, tall),
        *_bars_of_tracks(tracks, tops, tall, x, crowded=len(spans) > CROWD),
    ]
    return _svg(box, parts, "timeline")


def _wide(text: str) -> int:
    """Width of a text in letters."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def _tops(tracks: Sequence[Track], tall: float, top: float) -> list[float]:
    """The upper border of each track."""
    out = [top]
    for one, other in pairwise(tracks):
        out.append(out[-1] + tall + APART * (one.group != other.group))
    return out


def time_ticks(seconds: float, count: int) -> list[tuple[float, str]]:
    """At most about `count` times since the begin and their texts: 0, 30 s, 1 min, 1 min 30 s."""
    if seconds < count:
        step = nice_step(seconds, count)
        return [(value, f"{text} s" if value else text) for value, text in _even_ticks(0, seconds, step)]
    days = 86400 * max(1.0, nice_step(seconds / 86400, count))
    step = next((step for step in TIME_STEPS if step * count >= seconds), days)
    return [(n * step, _clock(n * step)) for n in range(math.floor(seconds / step + 1e-9) + 1)]


def _clock(seconds: float) -> str:
    parts = []
    for size, unit in UNITS:
        if seconds >= size:
            parts.append(f"{int(seconds // size):,} {unit}")
            seconds %= size
    return " ".join(parts) or "0"


def _time_axis(box: Box, x: Scale) -> Iterator[str]:
    yield f'<path class="axis" d="M{_px(box.left)} {_px(box.floor)}H{_px(box.end)}"/>'
    for seconds, text in time_ticks(x.high - x.low, max(2, int((box.end - box.left) / 90))):
        at = x(x.low + seconds)
        yield f'<path class="grid" d="M{_px(at)} {_px(box.top - 6)}V{_px(box.floor)}"/>'
        yield _text(at, box.floor + 17, text, "tick mid")


def _track_names(tracks: Sequence[Track], tops: Sequence[float], tall: float, middle: float) -> Iterator[str]:
    """The name of each group beside its first track; of low tracks not every one has room for its own name."""
    every, n = math.ceil(14 / tall), 0
    for before, track, top in zip((None, *tracks), tracks, tops, strict=False):
        n = n + 1 if before and before.group == track.group else 0
        at = top + tall / 2 + 4
        if n == 0:
            yield _text(middle - 10, at, cut(track.group, 24), "label end")
        if n % every == 0 and track.name:
            yield _text(middle, at, cut(track.name, 12), "tick")


def _lanes(box: Box, tops: Sequence[float], tall: float) -> Iterator[str]:
    path = "".join(f"M{_px(box.left)} {_px(top + tall / 2)}H{_px(box.end)}" for top in tops)
    yield f'<path class="lane" stroke-width="{_px(tall - 2)}" d="{path}"/>'


def _bars_of_tracks(
    tracks: Sequence[Track], tops: Sequence[float], tall: float, x: Scale, *, crowded: bool
) -> Iterator[str]:
    """What is rare is drawn last, over the rest: failures."""
    strokes: dict[str, list[str]] = {}
    counts = Counter(span.style for track in tracks for span in track.spans)
    for track, top in zip(tracks, tops, strict=True):
        narrow: dict[str, list[Point]] = {}
        for span in sorted(track.spans, key=lambda span: (-counts[span.style], span.start)):
            start, end = x(span.start), x(span.end)
            if crowded and end - start < NARROW:
                narrow.setdefault(span.style, []).append((start, end))
            else:
                yield from _period(span, start, end, top + 1, tall - 2)
        for style, places in narrow.items():
            row = [f"M{_px(a)} {_px(top + tall / 2)}h{_px(b - a)}" for a, b in _joined(places)]
            strokes.setdefault(style, []).extend(row)
    for style in sorted(strokes, key=lambda style: -counts[style]):
        path = "".join(strokes[style])
        yield f'<path class="periods {escape(style)}" stroke-width="{_px(tall - 2)}" d="{path}"/>'


def _joined(places: Iterable[Point]) -> list[Point]:
    """Rising places, each at least a pixel wide; those less than a pixel apart are one."""
    out: list[Point] = []
    for start, end in places:
        if out and start - out[-1][1] < 1:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((start, max(end, start + 1)))
    return out


def _period(span: Span, start: float, end: float, top: float, tall: float) -> Iterator[str]:
    long = max(2.0, end - start - 1)  # a pixel between neighbours
    style = f"period {span.style}"
    title = f"<title>{escape(span.title)}</title>"
    if span.ended or long < 10:
        size = f'x="{_px(start)}" y="{_px(top)}" width="{_px(long)}" height="{_px(tall)}" rx="2"'
        yield f'<rect class="{escape(style)}" {size}>{title}</rect>'
    else:  # an arrow
        outline = f"M{_px(start)} {_px(top)}h{_px(long - 6)}l6 {_px(tall / 2)}l-6 {_px(tall / 2)}h{_px(6 - long)}z"
        yield f'<path class="{escape(style)}" d="{outline}">{title}</path>'
    for label in (span.label, span.label.rpartition("/")[2]) if tall > LOW else ():
        if label and _wide(label) * INSIDE + 14 <= long:
            yield _text(start + 6, top + tall / 2 + 4, label, "inside")
            break
