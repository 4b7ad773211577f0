"""Tables, colours, line wrapping and numbers as text.

Texts contain colours; show() removes them in a pipe, with NO_COLOR and in a dumb terminal. This module does not use
rich, which is not installed on every node.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Collection, Sequence
from typing import TextIO

from distributed.trust import LAYOUT, printable

RED, GREEN, YELLOW, BOLD, DIM = "1;31", "32", "33", "1", "2"
GAP = "  "  # between the columns of a table
MIN_WIDTH = 8  # of the last column of a table


def paint(text: str, colour: str) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if text and colour else text


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def number_text(value: float) -> str:
    """About four significant digits, with thousands separators: 12,346  2.313  0.0003  3e-5."""
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return short_exponent(f"{value:.3g}" if size < 1 else f"{value:.4g}")
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """0 s, 81 ms, 4.2 s, 3 min 20 s, 5 h 2 min, 3 d 4 h."""
    if 0 < seconds < 1:
        return f"{number_text(float(f'{seconds * 1000:.3g}'))} ms"
    whole = round(seconds)
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size and seconds >= 60:
            return f"{whole // size:,} {unit} {whole % size // part} {smaller}"
    return f"{seconds:.3g} s"


def short_exponent(text: str) -> str:
    """3e-5 for 3e-05."""
    mantissa, mark, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if mark else text


def plain(text: str) -> str:
    """The text without colours."""
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def has_colours(stream: TextIO) -> bool:
    """Whether a stream is a terminal that supports colours, and the user has not refused them."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def show(text: str, in_place: bool = False) -> None:
    """Print a text without control sequences, with colours if standard output is a terminal that supports them.

    in_place: overwrite the screen of the terminal.
    """
    colours = has_colours(sys.stdout)
    codes = "|".join((RED, GREEN, YELLOW, BOLD, DIM, "0"))
    parts = re.split(rf"(\x1b\[(?:{codes})m)", text)  # every second part is a colour
    parts[::2] = [printable(part, LAYOUT) for part in parts[::2]]
    text = "".join(parts if colours else parts[::2])
    sys.stdout.write("\x1b[H" + text.replace("\n", "\x1b[K\n") + "\x1b[J" if in_place else text)
    sys.stdout.flush()


def width() -> int | None:
    """Columns of the terminal; None if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def columns(text: str) -> int:
    """The number of columns that the text has in a terminal."""
    if text.isascii() and text.isprintable():
        return len(text)
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in plain(text)
    )


def cut(text: str, most: int) -> str:
    """The text, cut to at most this many columns. It must not contain colours."""
    if columns(text) <= most:
        return text
    kept, used = "", 1  # one column for the ellipsis
    for character in text:
        used += columns(character)
        if used > most:
            break
        kept += character
    return f"{kept}…"


def pad(text: str, min_columns: int, right: bool = False) -> str:
    """The text, padded to at least this many columns. right: align it to the right."""
    fill = " " * (min_columns - columns(text))
    return fill + text if right else text + fill


def wrap(text: str, most: int | None, indent: str = "") -> list[str]:
    """Lines of at most this many characters (None: any number). All but the first are indented. No word is broken."""
    if most is None:
        return [text]
    return textwrap.wrap(text, most, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent)


def table(rows: Sequence[Sequence[str]], right: Collection[int] = (), most: int | None = None) -> list[str]:
    """The rows as lines with aligned cells.

    right: indices of cells that are aligned to the right. most: maximum width of a line. The last cell is cut to fit;
    it must not contain colours.
    """
    if not rows:
        return []
    widths = [max(map(columns, column)) for column in zip(*rows, strict=True)]
    if most is not None:
        widths[-1] = min(widths[-1], max(MIN_WIDTH, most - sum(width + len(GAP) for width in widths[:-1])))
        rows = [[*row[:-1], cut(row[-1], widths[-1])] for row in rows]
    return [
        GAP.join(pad(cell, widths[column], column in right) for column, cell in enumerate(row)).rstrip() for row in rows
    ]
