"""Write index.html, a page with a table of the runs and job lists of a directory and links to their pages."""

from __future__ import annotations

import os
import time
from html import escape
from pathlib import Path

from distributed.files import write_file
from distributed.report.page_parts import anchor, document, section
from distributed.runs.listing import COLUMNS, Listing, Row
from distributed.terminal import plain, plural

STYLES = {"ok": "text done", "finished": "text done", "failed": "text failed", "stopped": "text waiting"}  # of states
MOST = 10_000  # runs and lists


def write(logs: Path, cwd: Path) -> Path:
    """Write the page with the runs and lists in `logs`, and the lists in `cwd`, and return its path. Raises OSError."""
    listing, target, now = Listing([logs, cwd], MOST), logs / "index.html", time.time()
    rows = ""
    for row in listing.rows:
        _, *cells = map(plain, row.cells(now, with_directory=False))
        styles = ["text", STYLES.get(row.state, "text"), "number", "number", "number", "text"]
        shown = [_link(row, logs), *map(escape, cells)]
        cells = [f'<td class="{style}">{cell}</td>' for style, cell in zip(styles, shown, strict=True)]
        rows += f"<tr>{''.join(cells)}</tr>"
    heads = "".join(f"<th>{head}</th>" for head in COLUMNS)
    table = f'<div class="scroll card"><table class="jobs"><tr>{heads}</tr>{rows}</table></div>' if rows else ""
    title = plural(sum(row.kind == "run" for row in listing.rows), "run")
    faults = f"not shown: {len(listing.faults)}; muster ls shows why"
    parts = [
        f'<header>\n<p class="eyebrow">{escape(os.path.abspath(logs))}</p>\n<h1>{title}</h1>\n</header>',
        section("Runs and job lists", table),
        f"<footer>{faults}</footer>" if listing.faults else "",
    ]
    write_file(target, document(title, parts).encode(errors="replace"))
    return target


def _link(row: Row, logs: Path) -> str:
    """A link to the page of a run or list; if it has none, to the directory of the run."""
    path = Path(row.directory)
    page = path / "report.html" if row.kind == "run" else path.with_suffix(".html")
    if os.path.isfile(page):
        return anchor(os.path.relpath(page, logs), row.name)
    return anchor(f"{os.path.relpath(path, logs)}/", row.name) if row.kind == "run" else escape(row.name)
