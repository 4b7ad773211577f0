"""Slots over time as SVG: a row for each slot, a bar for each attempt. Standard library only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from unicodedata import east_asian_width

from distributed.runs.charts import LETTER, Box, Point, Scale, cut, px, svg, text_at, time_ticks

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


def draw_tracks(tracks: Sequence[Track], *, width: int = 1032) -> str:
    """Periods as bars, a row for each track, as SVG; the axis begins at the first start.

    Without a period: a sentence that says so.
    """
    spans = [span for track in tracks for span in track.spans]
    if not spans:
        return '<p class="nothing">Nothing has started yet.</p>'
    begin, end = min(span.start for span in spans), max(span.end for span in spans)
    tall = next((tall for count, tall in TALL if len(tracks) <= count), LOW)
    names = max(_letters(cut(track.name, 12)) for track in tracks) * LETTER
    groups = max(_letters(cut(track.group, 24)) for track in tracks) * LETTER
    tops = [6.0]  # the upper border of each track
    for one, other in pairwise(tracks):
        tops.append(tops[-1] + tall + APART * (one.group != other.group))
    box = Box(width, tops[-1] + tall + 30, left=names + groups + 24, right=28, bottom=26)
    x = Scale(begin, max(end, begin + 1e-3), box.left, box.end)
    parts = [f'<path class="axis" d="M{px(box.left)} {px(box.floor)}H{px(box.end)}"/>']
    for seconds, text in time_ticks(x.high - x.low, max(2, int((box.end - box.left) / 90))):
        at = x(x.low + seconds)
        parts.append(f'<path class="grid" d="M{px(at)} {px(box.top - 6)}V{px(box.floor)}"/>')
        parts.append(text_at(at, box.floor + 17, text, "tick mid"))
    parts += _track_names(tracks, tops, tall, box.left - 8 - names)
    lanes = "".join(f"M{px(box.left)} {px(top + tall / 2)}H{px(box.end)}" for top in tops)
    parts.append(f'<path class="lane" stroke-width="{px(tall - 2)}" d="{lanes}"/>')
    parts += _bars(tracks, tops, tall, x, crowded=len(spans) > CROWD)
    return svg(box, parts, "timeline")


def _letters(text: str) -> int:
    """Width of a text in letters."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def _track_names(tracks: Sequence[Track], tops: Sequence[float], tall: float, left: float) -> Iterator[str]:
    """The name of each group beside its first track; of low tracks not every one has room for its own name."""
    every, n = math.ceil(14 / tall), 0
    for before, track, top in zip((None, *tracks), tracks, tops, strict=False):
        n = n + 1 if before and before.group == track.group else 0
        at = top + tall / 2 + 4
        if n == 0:
            yield text_at(left - 10, at, cut(track.group, 24), "label end")
        if n % every == 0 and track.name:
            yield text_at(left, at, cut(track.name, 12), "tick")


def _bars(tracks: Sequence[Track], tops: Sequence[float], tall: float, x: Scale, *, crowded: bool) -> Iterator[str]:
    """Rare styles are drawn last, over the rest: failures. Narrow bars of a crowded timeline are one path per style."""
    strokes: dict[str, list[str]] = {}
    counts = Counter(span.style for track in tracks for span in track.spans)
    for track, top in zip(tracks, tops, strict=True):
        narrow: dict[str, list[Point]] = {}  # of each style; those less than a pixel apart are one
        for span in sorted(track.spans, key=lambda span: (-counts[span.style], span.start)):
            start, end = x(span.start), x(span.end)
            if not crowded or end - start >= NARROW:
                yield from _bar(span, start, end, top + 1, tall - 2)
                continue
            places = narrow.setdefault(span.style, [])
            if places and start - places[-1][1] < 1:
                places[-1] = places[-1][0], max(places[-1][1], end)
            else:
                places.append((start, max(end, start + 1)))
        for style, places in narrow.items():
            row = [f"M{px(a)} {px(top + tall / 2)}h{px(b - a)}" for a, b in places]
            strokes.setdefault(style, []).extend(row)
    for style in sorted(strokes, key=lambda style: -counts[style]):
        path = "".join(strokes[style])
        yield f'<path class="periods {escape(style)}" stroke-width="{px(tall - 2)}" d="{path}"/>'


def _bar(span: Span, start: float, end: float, top: float, tall: float) -> Iterator[str]:
    """A rectangle, or an arrow where the period has not ended; with its label where that fits."""
    long = max(2.0, end - start - 1)  # a pixel between neighbours
    style, title = escape(f"period {span.style}"), f"<title>{escape(span.title)}</title>"
    if span.ended or long < 10:
        size = f'x="{px(start)}" y="{px(top)}" width="{px(long)}" height="{px(tall)}" rx="2"'
        yield f'<rect class="{style}" {size}>{title}</rect>'
    else:
        outline = f"M{px(start)} {px(top)}h{px(long - 6)}l6 {px(tall / 2)}l-6 {px(tall / 2)}h{px(6 - long)}z"
        yield f'<path class="{style}" d="{outline}">{title}</path>'
    for label in (span.label, span.label.rpartition("/")[2]) if tall > LOW else ():
        if label and _letters(label) * INSIDE + 14 <= long:
            yield text_at(start + 6, top + tall / 2 + 4, label, "inside")
            break
