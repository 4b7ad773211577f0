"""Parts of an HTML page without external resources, for light and dark screens and for print.

Used for the report of a run and the results of a job list.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from distributed import nodelist
from distributed.terminal import number_text

Tile = tuple[str, str, str]  # name, value, note


def document(title: str, parts: Iterable[str], script: str = "", live: bool = False) -> str:
    """A page with these parts; empty parts are left out. script: JavaScript in addition to report.js.

    live: the page reloads itself while it is open.
    """
    style, code = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body{' data-live' * live}>\n<main>\n"
        + "\n".join(filter(None, parts))
        + f"\n</main>\n<script>\n{code}{script}</script>\n</body>\n</html>\n"
    )


def section(title: str, content: str) -> str:
    """A section with a heading; empty without content."""
    name = title.lower().replace(" ", "-")
    return f'<section id="{name}">\n<h2>{title}</h2>\n{content}\n</section>' if content else ""


def card(title: str, unit: str, drawing: str, anchor: str = "") -> str:
    """A chart with a title and an empty read-out that report.js fills. anchor: its id, for links."""
    name = f' id="{escape(anchor)}"' if anchor else ""
    return (
        f'<figure class="card"{name}>\n<figcaption><b>{escape(title)}</b> <span>{escape(unit)}</span>'
        f'<output class="readout"></output></figcaption>\n{drawing}\n</figure>'
    )


def tile_list(tiles: Sequence[Tile | None]) -> str:
    """Tiles side by side; None is left out."""
    rows = [
        f'<div class="tile"><dt>{label}</dt><dd class="value">{escape(value)}</dd>'
        f'<dd class="note">{escape(note)}</dd></div>'
        for label, value, note in filter(None, tiles)
    ]
    return "\n".join(['<dl class="tiles">', *rows, "</dl>"]) if rows else ""


def anchor(path: str, text: str) -> str:
    """A link to a file. path: relative to the directory of the page."""
    return f'<a href="{quote(os.fsencode(path))}">{escape(text)}</a>'


def spans(texts: Iterable[str]) -> str:
    """Texts side by side; empty texts are left out."""
    return "".join(f"<span>{escape(text)}</span>" for text in texts if text)


def folded(title: str, text: str, unfolded: bool = False) -> str:
    """A block of text that can be folded; empty without text. unfolded: it is open at first."""
    tag = "details open" if unfolded else "details"
    return f"<{tag}><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>" if text.strip() else ""


def plain(value: Any) -> str:
    """A value as text: a string unchanged, any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def loss_text(loss: float) -> str:
    return f"{loss:.3f}" if 0.01 <= abs(loss) < 1000 else number_text(loss)


def ranges(numbers: Iterable[int]) -> str:
    """Rising numbers as text: 0-3, 7."""
    return nodelist.ranges(map(str, numbers)).replace(",", ", ")
