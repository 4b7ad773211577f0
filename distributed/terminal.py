"""What programs print for people: tables, colours, lines as wide as the terminal.

Texts carry their colours, and `show` leaves these out where they do not belong: in a pipe, with NO_COLOR, in a dumb
terminal. Plain text alone, without rich: it is the same wherever the launchers run. Standard library only.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Collection, Sequence

RED, GREEN, YELLOW, BOLD, DIM = "1;31", "32", "33", "1", "2"
GAP = "  "  # between two columns of a table
NARROWEST = 8  # columns of the terminal that are left to the last column of a table


def paint(text: str, colour: str) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if text and colour else text


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def plain(text: str) -> str:
    """Without colours."""
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def show(text: str) -> None:
    """Print it, in colours if this is a terminal that wants them."""
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    sys.stdout.write(text if colours else plain(text))
    sys.stdout.flush()


def width() -> int | None:
    """Of the terminal, in columns; None: the output is none, and its lines may have any length."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def columns(text: str) -> int:
    """How many a terminal takes for it."""
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in plain(text)
    )


def cut(text: str, most: int) -> str:
    """At most so many columns of a text without colours."""
    if columns(text) <= most:
        return text
    kept, taken = "", 1  # for the mark
    for letter in text:
        taken += columns(letter)
        if taken > most:
            break
        kept += letter
    return f"{kept}…"


def pad(text: str, to: int, right: bool = False) -> str:
    """At least so many columns. right: the text stands at the right."""
    fill = " " * (to - columns(text))
    return fill + text if right else text + fill


def wrap(text: str, most: int | None, indent: str = "") -> list[str]:
    """Lines of at most so many columns, the later ones indented; words are never broken."""
    if most is None:
        return [text]
    return textwrap.wrap(text, most, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent)


def table(rows: Sequence[Sequence[str]], right: Collection[int] = (), most: int | None = None) -> list[str]:
    """Rows of cells as lines in which columns stand one below the other.

    Args:
        right: columns, counted from 0, of which the cells stand at the right.
        most: columns of the terminal that a line may take; the last cell, which then has no colour, is cut.
    """
    if not rows:
        return []
    widths = [max(map(columns, column)) for column in zip(*rows, strict=True)]
    if most is not None:
        widths[-1] = min(widths[-1], max(NARROWEST, most - sum(width + len(GAP) for width in widths[:-1])))
        rows = [[*row[:-1], cut(row[-1], widths[-1])] for row in rows]
    return [
        GAP.join(pad(cell, widths[column], column in right) for column, cell in enumerate(row)).rstrip() for row in rows
    ]
