"""Draw a timeline as SVG: a row for each slot, a bar for each attempt. Standard library only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from distributed.report.charts import LETTER, Box, Point, Scale, px, svg, text_at, time_ticks
from distributed.terminal import columns, cut

NARROW = 3.0  # pixels; narrower bars of a crowded timeline share one path
CROWDED = 4000  # a timeline with more bars is crowded
TRACK_HEIGHTS = ((24, 22.0), (64, 16.0))  # (largest number of tracks, height of a track in pixels)
MIN_HEIGHT = 11.0  # pixels, if there are more tracks; their bars have no labels
GROUP_GAP = 6.0  # pixels between groups
LETTER_IN_BAR = 7.0  # width of a letter in a bar, pixels


@dataclass(frozen=True)
class Span:
    """A period, in seconds."""

    start: float
    end: float  # the current time if it has not ended
    style: str  # CSS class with the colour
    title: str  # tooltip
    label: str = ""  # drawn in the bar if it fits; otherwise the part after the last slash, if that fits
    ended: bool = True


@dataclass(frozen=True)
class Track:
    """A row of a timeline. Consecutive tracks of a group share one label."""

    group: str
    name: str
    spans: Sequence[Span]


def draw_tracks(tracks: Sequence[Track]) -> str:
    """The SVG of a timeline, or a sentence if there are no spans. The axis starts with the first span."""
    spans = [span for track in tracks for span in track.spans]
    if not spans:
        return '<p class="nothing">Nothing has started yet.</p>'
    begin, end = min(span.start for span in spans), max(span.end for span in spans)
    height = next((height for count, height in TRACK_HEIGHTS if len(tracks) <= count), MIN_HEIGHT)
    names = max(columns(cut(track.name, 12)) for track in tracks) * LETTER
    groups = max(columns(cut(track.group, 24)) for track in tracks) * LETTER
    tops = [6.0]  # y of each track
    for above, below in pairwise(tracks):
        tops.append(tops[-1] + height + GROUP_GAP * (above.group != below.group))
    box = Box(1032, tops[-1] + height + 30, left=names + groups + 24, right=28, bottom=26)
    x = Scale(begin, max(end, begin + 1e-3), box.left, box.end)
    parts = [f'<path class="axis" d="M{px(box.left)} {px(box.floor)}H{px(box.end)}"/>']
    for seconds, text in time_ticks(x.high - x.low, max(2, int((box.end - box.left) / 90))):
        at = x(x.low + seconds)
        parts.append(f'<path class="grid" d="M{px(at)} {px(box.top - 6)}V{px(box.floor)}"/>')
        parts.append(text_at(at, box.floor + 17, text, "tick mid"))
    parts += _track_names(tracks, tops, height, box.left - 8 - names)
    lanes = "".join(f"M{px(box.left)} {px(top + height / 2)}H{px(box.end)}" for top in tops)
    parts.append(f'<path class="lane" stroke-width="{px(height - 2)}" d="{lanes}"/>')
    parts += _bars(tracks, tops, height, x, crowded=len(spans) > CROWDED)
    return svg(box, parts, "timeline")


def _track_names(tracks: Sequence[Track], tops: Sequence[float], height: float, left: float) -> Iterator[str]:
    """The name of each group next to its first track, and track names as far as they do not overlap."""
    interval, index = math.ceil(14 / height), 0  # index: of the track in its group
    for before, track, top in zip((None, *tracks), tracks, tops, strict=False):
        index = index + 1 if before and before.group == track.group else 0
        at = top + height / 2 + 4
        if index == 0:
            yield text_at(left - 10, at, cut(track.group, 24), "label end")
        if index % interval == 0 and track.name:
            yield text_at(left, at, cut(track.name, 12), "tick")


def _bars(tracks: Sequence[Track], tops: Sequence[float], height: float, x: Scale, *, crowded: bool) -> Iterator[str]:
    """The bars. Rare styles, such as failures, are drawn last, on top. crowded: narrow bars share a path per style."""
    strokes: dict[str, list[str]] = {}
    counts = Counter(span.style for track in tracks for span in track.spans)
    for track, top in zip(tracks, tops, strict=True):
        narrow: dict[str, list[Point]] = {}  # by style; bars less than a pixel apart are merged
        for span in sorted(track.spans, key=lambda span: (-counts[span.style], span.start)):
            start, end = x(span.start), x(span.end)
            if not crowded or end - start >= NARROW:
                yield from _bar(span, start, end, top + 1, height - 2)
                continue
            merged = narrow.setdefault(span.style, [])
            if merged and start - merged[-1][1] < 1:
                merged[-1] = merged[-1][0], max(merged[-1][1], end)
            else:
                merged.append((start, max(end, start + 1)))
        for style, merged in narrow.items():
            row = [f"M{px(a)} {px(top + height / 2)}h{px(b - a)}" for a, b in merged]
            strokes.setdefault(style, []).extend(row)
    for style in sorted(strokes, key=lambda style: -counts[style]):
        path = "".join(strokes[style])
        yield f'<path class="periods {escape(style)}" stroke-width="{px(height - 2)}" d="{path}"/>'


def _bar(span: Span, start: float, end: float, top: float, height: float) -> Iterator[str]:
    """A rectangle, or an arrow if the span has not ended, and its label if it fits."""
    width = max(2.0, end - start - 1)  # with a gap of one pixel to the next bar
    style, title = escape(f"period {span.style}"), f"<title>{escape(span.title)}</title>"
    if span.ended or width < 10:
        size = f'x="{px(start)}" y="{px(top)}" width="{px(width)}" height="{px(height)}" rx="2"'
        yield f'<rect class="{style}" {size}>{title}</rect>'
    else:
        outline = f"M{px(start)} {px(top)}h{px(width - 6)}l6 {px(height / 2)}l-6 {px(height / 2)}h{px(6 - width)}z"
        yield f'<path class="{style}" d="{outline}">{title}</path>'
    for label in (span.label, span.label.rpartition("/")[2]) if height > MIN_HEIGHT else ():
        if label and columns(label) * LETTER_IN_BAR + 14 <= width:
            yield text_at(start + 6, top + height / 2 + 4, label, "inside")
            break
