"""Write index.html, a page with a table of all runs in a directory and links to their reports."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

from distributed.files import write_file
from distributed.report.page_parts import anchor, document, section
from distributed.runs import status
from distributed.terminal import plain, plural

STYLES = {"ok": "text done", "failed": "text failed", "stopped": "text waiting"}  # outcome -> classes of its cell


def write(logs: Path, cwd: Path) -> Path:
    """Write the page with the runs in `logs`, the newest first, and return its path. Raises OSError.

    It also has links to the pages of job lists in `logs` and in `cwd`, where lists write their results by default.
    """
    rows, faults, target = "", 0, logs / "index.html"
    for directory in (logs / name for name in reversed(status.names_of_directories(logs))):
        if os.path.isfile(directory / "run.json"):
            try:
                cells = [*map(plain, status.row_of_run(directory)[0])]
            except (OSError, OverflowError, TypeError, ValueError):  # such as a file of another version
                faults += 1
                continue
            page = "report.html" if os.path.isfile(directory / "report.html") else ""
            row = [anchor(f"{directory.name}/{page}", directory.name), *map(escape, cells[1:])]
            styles = ["text"] * len(row)
            styles[2:5] = STYLES.get(cells[2].partition(":")[0], "text"), "number", "number"
            rows += "<tr>" + "".join(
                f'<td class="{style}">{cell}</td>' for style, cell in zip(styles, row, strict=True)
            )
    pages = [page for place in (logs, cwd) for page in sorted(place.glob("*.html"))]
    lists = [page for page in pages if page.with_suffix(".journal").exists()]
    heads = "".join(f"<th>{head}</th>" for head in status.ALL_COLUMNS)
    table = f'<div class="scroll card"><table class="jobs"><tr>{heads}</tr>{rows}</table></div>' if rows else ""
    title = plural(rows.count("<tr>"), "run")
    parts = [
        f'<header>\n<p class="eyebrow">{escape(os.path.abspath(logs))}</p>\n<h1>{title}</h1>\n</header>',
        section("Runs", table),
        section("Job lists", "".join(f"<p>{anchor(os.path.relpath(page, logs), page.stem)}</p>" for page in lists)),
        f"<footer>{plural(faults, 'run')} cannot be read: status.sh --all shows why.</footer>" if faults else "",
    ]
    write_file(target, document(title, parts).encode(errors="replace"))
    return target
