"""The table of jobs on the page of a list."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from html import escape, unescape
from typing import Any

from distributed.jobs.journal.state import Attempt
from distributed.jobs.show.entries import JobEntry, final, location_of, outcome_of
from distributed.records import number
from distributed.report.history import History
from distributed.report.page_parts import loss_text, plain
from distributed.terminal import cut, duration, number_text

FOLD = 200  # rows of the table shown at first; report.css hides the rest
MAX_COLUMNS = 12  # columns of settings in the table, and as many of metrics

Cell = tuple[str, float | None]  # markup; the number to sort by, None to sort by the text
Column = tuple[str, list[Cell]]  # title, cells
ALWAYS_SHOWN = ("job", "state", "loss", "held_out_loss")
NOTHING: Cell = ('<span class="none">–</span>', math.nan)


def attempt_of(job: JobEntry, attempt: Attempt) -> str:
    """The number of an attempt, such as `attempt 2 of 3`."""
    return f"attempt {attempt.number}" + (f" of {len(job.attempts)}" if len(job.attempts) > 1 else "")


def link(job: JobEntry, anchors: Container[int]) -> str:
    """The name of a job, linked to its chart if it has one."""
    name = escape(cut(job.name, 200))
    return f'<a href="#curve-{job.position}">{name}</a>' if job.position in anchors else name


def job_table(jobs: Sequence[JobEntry], curves: Mapping[str, History], anchors: Container[int], now: float) -> str:
    """The jobs with the settings in which they differ, and their last metrics."""
    if not jobs:
        return '<p class="nothing">The list has no jobs.</p>'
    same, differing = settings_of(jobs)
    settings = {*same, *differing}
    metrics = [final(job, curves) for job in jobs]
    bases: list[Column] = [("base model", [(escape(cut(job.base, 20)), None) for job in jobs])]
    leaks: list[Column] = [("leak", [(escape(cut(job.leak, 200)), None) for job in jobs])]
    reasons = [job.reason if job.state == "done" else "" for job in jobs]  # such as: it wrote no results
    notes: list[Column] = [("note", [(escape(cut(reason, 300)), None) for reason in reasons])]
    columns: list[Column] = [
        ("job", [(link(job, anchors), None) for job in jobs]),
        ("state", [(f'<span class="{escape(job.state)}">{escape(job.state)}</span>', None) for job in jobs]),
        *(bases if any(job.base for job in jobs) else []),
        *(leaks if any(job.leak for job in jobs) else []),
        *(notes if any(reasons) else []),
        *((key, [setting_cell(job.settings, key) for job in jobs]) for key in differing[:MAX_COLUMNS]),
        ("server:GPU", [(escape(cut(location_of(job.last), 60)) if job.last else "", None) for job in jobs]),
        ("attempts", [(f"{len(job.attempts):,}", len(job.attempts)) for job in jobs]),
        ("duration", [duration_cell(job, now) for job in jobs]),
        ("peak memory", [memory_cell(job.last) for job in jobs]),
        *(
            (f"last {key}" if key in settings else key, [metric_cell(found, key) for found in metrics])
            for key in metric_keys(metrics)
        ),
    ]
    more = f"Other settings that differ: {name_list(differing[MAX_COLUMNS:])}." if len(differing) > MAX_COLUMNS else ""
    columns, equal = split_equal(columns)
    sentences = filter(None, [same_sentence(same, len(jobs)), f"Equal in all jobs: {equal}." if equal else "", more])
    above = "".join(f'<p class="sentence">{escape(sentence)}</p>\n' for sentence in sentences)
    return above + show_all(jobs) + f'<div class="scroll card">{sortable_table(columns)}</div>'


def split_equal(columns: Sequence[Column]) -> tuple[list[Column], str]:
    """The columns in which jobs differ, and the other columns as text, such as `attempts 1, step 100 of 100`.

    The table of a usual list fits the page only if columns that are equal in all jobs are omitted. Jobs, states and
    losses are always shown.
    """
    shown, equal = [], []
    for title, cells in columns:
        if len(cells) > 1 and len(set(cells)) == 1 and title not in ALWAYS_SHOWN:
            equal += [f"{cut(title, 40)} {unescape(cells[0][0])}"] if cells[0][0] and cells[0] != NOTHING else []
        else:
            shown.append((title, cells))
    return shown, name_list(equal)


def sortable_table(columns: Sequence[Column]) -> str:
    """A table that page.js sorts; numbers are aligned to the right."""
    styles = ["text" if any(value is None for _, value in cells) else "number" for _, cells in columns]
    head = "".join(
        f'<th scope="col" class="{style}"><button type="button">{_wrapped(title)}</button></th>'
        for style, (title, _) in zip(styles, columns, strict=True)
    )
    rows = (
        "".join(_cell(cell, style) for style, cell in zip(styles, row, strict=True))
        for row in zip(*(cells for _, cells in columns), strict=True)
    )
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return f'<table class="jobs"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>'


def _wrapped(title: str) -> str:
    """A title that may be wrapped after each underscore, so that a long title does not widen a column of numbers."""
    return escape(cut(title, 40)).replace("_", "_<wbr>")


def _cell(cell: Cell, style: str) -> str:
    """page.js sorts by data-v, which is empty for an unknown number; a cell without data-v is sorted by its text."""
    markup, value = cell
    key = "" if value is None else f' data-v="{value:.9g}"' if math.isfinite(value) else ' data-v=""'
    return f'<td class="{style}"{key}>{markup}</td>'


def show_all(jobs: Sequence[JobEntry]) -> str:
    """A checkbox that shows the rows after the first FOLD rows; empty if there are none."""
    label, name = f"Show all {len(jobs):,} jobs, not only {FOLD}", f"all{jobs[0].position}"
    box = f'<input type="checkbox" class="all" id="{name}"><label for="{name}">{label}</label>\n'
    return box if len(jobs) > FOLD else ""


def settings_of(jobs: Sequence[JobEntry]) -> tuple[dict[str, str], list[str]]:
    """The settings that are equal in all jobs, and the names of the others."""
    same, differing = {}, []
    for key in dict.fromkeys(key for job in jobs for key in job.settings):
        values = {plain(job.settings[key]) if key in job.settings else None for job in jobs}
        if len(values) == 1:
            same[key] = values.pop() or ""
        else:
            differing.append(key)
    return same, differing


def same_sentence(same: Mapping[str, str], jobs: int) -> str:
    """A list such as `Settings of all jobs: epochs 10, lr 0.001`; empty if there are none."""
    if not same:
        return ""
    return f"{'Settings of all jobs' if jobs > 1 else 'Settings'}: " + name_list(
        [f"{cut(key, 40)} {cut(value, 60)}" for key, value in same.items()]
    )


def name_list(names: Sequence[str]) -> str:
    """The first 40 names, such as `a, b, c … (100 in all)`."""
    return ", ".join(cut(name, 110) for name in names[:40]) + (f" … ({len(names):,} in all)" if len(names) > 40 else "")


def setting_cell(settings: Mapping[str, Any], key: str) -> Cell:
    if key not in settings:
        return NOTHING
    value = number(settings[key])
    return escape(cut(plain(settings[key]), 60)), value if math.isfinite(value) else None


def duration_cell(job: JobEntry, now: float) -> Cell:
    """The duration of the last attempt, until now if it is running."""
    if not job.last:
        return NOTHING
    seconds = now - job.last.start if outcome_of(job.last, job) == "running" else job.last.seconds
    return NOTHING if seconds is None or seconds < 0 else (escape(duration(seconds)), seconds)


def memory_cell(attempt: Attempt | None) -> Cell:
    if not attempt or not attempt.peak_memory:
        return NOTHING
    size = attempt.peak_memory
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.3g} MiB", size


def metric_keys(metrics: Iterable[Mapping[str, Any]]) -> list[str]:
    """The metrics that get a column; step and losses come first."""
    found = dict.fromkeys(key for line in metrics for key in line)
    first = [key for key in ("step", "loss", "held_out_loss") if key in found]
    return [*first, *(key for key in found if key not in {*first, "steps", "time", "event"})][:MAX_COLUMNS]


def metric_cell(metrics: Mapping[str, Any], key: str) -> Cell:
    if key not in metrics:
        return NOTHING
    value = number(metrics[key])
    if metrics[key] == "NaN":
        return "NaN", math.nan
    if isinstance(metrics[key], bool) or not isinstance(metrics[key], (int, float)):
        return escape(cut(plain(metrics[key]), 60)), None
    text = loss_text(value) if key.endswith("loss") else number_text(value)
    if key == "step" and number(metrics.get("steps")) > 0:
        text += f" of {number_text(number(metrics['steps']))}"
    return escape(text), value
