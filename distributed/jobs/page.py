"""Write results.html, a page of the results of a job list, next to results.json.

The page is one file that needs no network, supports light and dark mode, and can be printed. It can be written while
the list runs. Metrics and settings come from the user, so any value is accepted.

Usage: python -m distributed.jobs.page RESULTS_JSON

Standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape, unescape
from pathlib import Path
from typing import Any

from distributed.files import KIT, user_file, write_file
from distributed.jobs.state import Attempt
from distributed.jobs.timeline import Span, Track, draw_tracks
from distributed.metrics import MAX_READ
from distributed.records import number
from distributed.report import charts, page_parts
from distributed.report.charts import Line
from distributed.report.history import History, read_metrics
from distributed.report.page_parts import Tile, card, document, folded, loss_text, plain, ranges, section, tile_list
from distributed.terminal import cut, duration, number_text
from distributed.trust import SHARED, printable, regular_file

FOLD = 200  # rows of the table shown at first; report.css hides the rest
MAX_FAILURES = 50  # failed jobs shown with their last lines
LAST_LINES = 40  # lines of output shown per failed job
MAX_CHARTS = 60  # jobs with their own chart
MAX_TRACKS = 256  # slots on the timeline
MAX_COLUMNS = 12  # columns of settings in the table, and as many of metrics
MAX_POINTS = 20_000  # in the chart of all jobs
MAX_LINES = 100_000  # lines read from all metrics files together, see history.read_metrics()
MIN_LINES = 200  # lines read from each metrics file, even if MAX_LINES is then exceeded
MAX_BYTES, MIN_BYTES = 1 << 30, 1 << 20  # the same in bytes
MAX_BYTES, MIN_BYTES = 1 << 30, 1 << 20  # the same in bytes
MAX_NOTES = 20
LABEL_LENGTH = 24  # characters of a job's name at its curve

LEGEND = {"done": "done", "failed": "failed", "lost": "server lost", "cancelled": "cancelled or no end recorded",
          "running": "running"}  # fmt: skip
STATE_STYLES = {"finished": "finished", "running": "open", "paused": "stopped", "interrupted": "stopped",
                "cancelled": "stopped"}  # fmt: skip


# ---------------------------------------------------------------- reading and writing


@dataclass(frozen=True)
class JobEntry:
    """A job in results.json; `position` counts from 1."""

    position: int
    id: str
    name: str
    state: str
    reason: str
    output: str
    settings: Mapping[str, Any]
    metrics: Mapping[str, Any]
    attempts: tuple[Attempt, ...]
    base: str  # the base model that it starts from; empty for none
    trains: str  # the base model that it trains; empty for none
    leak: str  # how the base model was trained on the job's held-out data; empty if it was not

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None


def jobs_of(results: Mapping[str, Any]) -> list[JobEntry]:
    """The jobs of results.json in their order."""
    return [
        JobEntry(
            position, job["id"], job["name"], job["state"], job["reason"], job["output"], job["settings"],
            job["metrics"], tuple(Attempt.of_public(job["id"], each) for each in job["attempts"]),
            str(job["options"].get("base_model_hash", "")), job.get("trains_base_model", ""),
            job.get("leak", ""),
        )
        for position, job in enumerate(results["jobs"], 1)
    ]  # fmt: skip


def outcome_of(attempt: Attempt, job: JobEntry) -> str:
    """The key of LEGEND for an attempt of a job."""
    if attempt.failure in ("cancelled", "server lost"):
        return attempt.failure.removeprefix("server ")
    if attempt.failure:
        return "failed"
    if attempt.end is not None:
        return "done"
    return "running" if job.state == "running" else "cancelled"


def location_of(attempt: Attempt) -> str:
    """Server and GPUs of an attempt, such as gpu1:0-3. MIG instances are named by UUID."""
    indices = ranges(sorted(gpu for gpu in attempt.gpus if isinstance(gpu, int)))
    gpus = ", ".join(filter(None, [indices, *(gpu for gpu in attempt.gpus if isinstance(gpu, str))]))
    return ":".join(filter(None, [attempt.server, gpus]))


def write(results: Path) -> Path:
    """Write the page next to results.json and return its path. Raises OSError, or ValueError for invalid results."""
    notes: list[str] = []
    with open(user_file(results), "rb", opener=regular_file) as file:
        text = file.read()
    try:
        facts = json.loads(text)  # not parse_json(), because a long list has long results
        jobs = jobs_of(facts)
        root = working_directory(results, jobs)
        markup = page(facts, read_curves(root, jobs, notes), notes, results.absolute(), root)
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"not the results of a job list ({error!r})") from None
    target = results.with_suffix(".html")
    write_file(user_file(target), markup.encode(errors="replace"), SHARED)
    return target


def read_curves(root: Path, jobs: Sequence[JobEntry], notes: list[str]) -> dict[str, History]:
    """Read the metrics files that exist. Returns metrics by job id, and appends read errors to `notes`."""
    curves = {}
    limit = max(MIN_LINES, MAX_LINES // max(1, len(jobs)))
    size = min(MAX_READ, max(MIN_BYTES, MAX_BYTES // max(1, len(jobs))))
    for job in jobs:
        path = os.path.join(root, job.output, "metrics.jsonl")
        if os.path.isfile(path):
            found: list[str] = []
            curves[job.id] = read_metrics(Path(path), found, limit, size)
            notes += [f"{job.output}/{note}" for note in found]
    return curves


def working_directory(results: Path, jobs: Iterable[JobEntry]) -> Path:
    """The working directory of the list: the closest parent of results.json that contains an output directory.

    If there is none, the current directory.
    """
    outputs = [job.output for job in jobs]
    parents = results.absolute().parents
    return next((path for path in parents if any(os.path.isdir(path / output) for output in outputs)), Path.cwd())


# ---------------------------------------------------------------- the page


def page(
    results: Mapping[str, Any], curves: Mapping[str, History], notes: Sequence[str] = (),
    path: Path = Path("results.json"), root: Path = Path(),
) -> str:  # fmt: skip
    """The HTML of the page.

    curves: metrics by job id. notes: see read_curves(). path: of results.json. root: working directory of the list.
    """
    jobs = jobs_of(results)
    charted = with_charts(jobs, curves)
    anchors = {job.position for job in charted}
    now = results["updated"]
    training, others = [job for job in jobs if job.trains], [job for job in jobs if not job.trains]
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    parts = [
        heading(results, path.stem),
        servers(results),
        tiles(results, jobs, curves),
        section("Failures", failures(jobs, anchors)),
        section("Timeline", timeline(results, jobs, now)),
        section("Base models", job_table(training, curves, anchors, now) if training else ""),
        section("Jobs", job_table(others, curves, anchors, now)),
        section("Loss curves", loss_curves(jobs, curves, charted)),
        footer(notes, path, root),
    ]
    count = results["totals"]["jobs"]
    return document(f"{path.stem}: {count:,} job{'s' * (count != 1)}", parts, script)


def heading(results: Mapping[str, Any], name: str) -> str:
    """State, time, script, backend and id of the list. name: of the results file."""
    state, failed = results["state"], results["totals"]["failed"]
    style = STATE_STYLES[state]
    if state == "finished" and failed:
        style, state = "failed", f"finished, {failed:,} failed"
    facts = [moment(results["created"]), results["script"], f"backend {results['backend']}", f"list {results['list']}"]
    sentences = [results["reason"]]
    if state == "running":
        sentences.append(f"As of {moment(results['updated'])}. The page is updated while the list runs.")
    return (
        f'<header>\n<p class="eyebrow">Job list</p>\n<h1>{escape(cut(name, 200))}</h1>\n'
        f'<p class="facts"><span class="state {style}">{escape(state)}</span>'
        f"{page_parts.spans(cut(fact, 200) for fact in facts)}</p>\n"
        + "".join(f'<p class="sentence">{escape(cut(text, 1000))}</p>\n' for text in sentences if text)
        + "</header>"
    )


def servers(results: Mapping[str, Any]) -> str:
    """The servers that get no jobs, and why."""
    texts = []
    for name, facts in results["servers"].items():
        state, why = facts["state"], facts["reason"]
        if why or state in ("unreachable", "unusable"):  # a ready server with a reason gets no new jobs
            subject = cut(name, 100) + ("" if state == "ready" else f" {state}")
            texts.append(subject + (f": {cut(why, 300)}" if why else ""))
    if len(texts) > MAX_NOTES:
        texts[MAX_NOTES:] = [f"{len(texts) - MAX_NOTES:,} more servers cannot be used."]
    return "\n".join(f'<p class="warning">{escape(text)}</p>' for text in texts)


# ---------------------------------------------------------------- tiles


def tiles(results: Mapping[str, Any], jobs: Sequence[JobEntry], curves: Mapping[str, History]) -> str:
    """The tiles at the top."""
    totals, running = results["totals"], results["state"] == "running"
    slots = sum(len(server["slots"]) for server in results["servers"].values())
    wall, used = totals["seconds"], totals["slot_seconds"]
    repeated = totals["attempts"] - sum(bool(job.attempts) for job in jobs)
    return tile_list([
        ("Done", f"{totals['done']:,}", f"of {totals['jobs']:,} jobs"),
        ("Failed", f"{totals['failed']:,}", f"{totals['cancelled']:,} cancelled" if totals["cancelled"] else ""),
        ("Waiting", f"{totals['waiting']:,}", f"{totals['running']:,} running"),
        ("Wall time", duration(wall), "so far" if running else ""),
        ("Slot utilisation", f"{100 * used / (slots * wall):.3g} %", f"{duration(used)} of slots used")
        if slots and wall > 0 else None,
        ("Slots", f"{slots:,}", f"on {len(results['servers']):,} server{'s' * (len(results['servers']) != 1)}"),
        ("Attempts", f"{totals['attempts']:,}", f"{repeated:,} repeated" if repeated else ""),
        best_tile([job for job in jobs if not job.trains], curves),
    ])  # fmt: skip


def best_tile(jobs: Sequence[JobEntry], curves: Mapping[str, History]) -> Tile | None:
    """The lowest held-out loss of any step; if there is none, the lowest final training loss."""
    title, found = "Best held-out loss", [(loss, job) for job in jobs for loss in held_out_losses(job, curves)]
    if not any(math.isfinite(loss) for loss, _ in found):
        title, found = "Best training loss", [(number(final(job, curves).get("loss")), job) for job in jobs]
    finite = [pair for pair in found if math.isfinite(pair[0])]
    if not finite:
        return None
    loss, job = min(finite, key=lambda pair: pair[0])
    return title, loss_text(loss), cut(job.name, 60)


def held_out_losses(job: JobEntry, curves: Mapping[str, History]) -> list[float]:
    history = curves.get(job.id)
    curve = [loss for _, loss in history.held_out_losses()] if history else []
    return [*curve, number(job.metrics.get("held_out_loss"))]


def final(job: JobEntry, curves: Mapping[str, History]) -> dict[str, Any]:
    """The last metrics of a job, from the results. Losses and step that are missing there come from its curve."""
    known: dict[str, Any] = {}
    if history := curves.get(job.id):
        for lines, key in ((history.steps, "loss"), (history.held_out, "held_out_loss")):
            if lines and key in lines[-1]:
                step = lines[-1]["step"]
                known |= {key: number(lines[-1][key]), "step": max(step, known.get("step", step))}
    return known | {key: value for key, value in job.metrics.items() if value is not None}


# ---------------------------------------------------------------- failures


def failures(jobs: Sequence[JobEntry], anchors: Container[int]) -> str:
    """Failed jobs with their last lines, then other attempts that failed; empty if there are none."""
    failed = [job for job in jobs if job.state == "failed"]
    others = [job for job in jobs if job.state != "failed"]
    repeated = [
        *((job, attempt) for job in failed for attempt in job.attempts[:-1] if attempt.failure),
        *((job, attempt) for job in others for attempt in job.attempts if attempt.failure not in ("", "cancelled")),
    ]
    parts = [f'<p class="sentence">{escape(summary(failed))}</p>'] if len(failed) > 1 else []
    parts += [failure(job, anchors) for job in failed[:MAX_FAILURES]]
    if len(failed) > MAX_FAILURES:
        parts.append(f'<p class="sentence">{len(failed) - MAX_FAILURES:,} more failed jobs: see the table of jobs, '
                     "sorted by state.</p>")  # fmt: skip
    lines = [failed_attempt_line(job, attempt) for job, attempt in repeated[:FOLD]]
    if len(repeated) > FOLD:
        lines.append(f"and {len(repeated) - FOLD:,} more")
    title = f"{len(repeated):,} other attempt{'s' * (len(repeated) != 1)} that failed"
    return "\n".join([*parts, *filter(None, [folded(title, "\n".join(lines))])])


def summary(failed: Sequence[JobEntry]) -> str:
    """How many jobs failed, how, and on which servers."""
    last = [job.last for job in failed if job.last]
    causes = Counter(cut(attempt.failure_name, 60) for attempt in last)
    servers = Counter(cut(attempt.server, 60) for attempt in last)
    parts = [f"{len(failed):,} jobs failed"]
    for counted in (causes, servers):
        common = [f"{name}: {n:,}" for name, n in counted.most_common(6)]
        parts.append(", ".join([*common, *(["…"] if len(counted) > 6 else [])]))
    return ". ".join(filter(None, parts)) + "."


def failure(job: JobEntry, anchors: Container[int]) -> str:
    """A failed job with its location, reason and last lines."""
    attempt = job.last
    reason = (attempt.reason if attempt else "") or job.reason
    facts = [attempt_of(job, attempt), location_of(attempt), attempt.failure_name] if attempt else ["never started"]
    ended = f"after {duration(attempt.seconds)}" if attempt and attempt.seconds is not None else ""
    parts = [
        f'<p class="cause">{link(job, anchors)}</p>',
        f'<p class="facts">{page_parts.spans(cut(fact, 200) for fact in [*facts, ended])}</p>',
        f'<p class="reason">{escape(cut(reason, 1000))}</p>' if reason else "",
        folded("Last lines", "\n".join(cut(line, 400) for line in attempt.lines[-LAST_LINES:])) if attempt else "",
    ]
    return f'<aside class="failure">\n{"".join(filter(None, parts))}\n</aside>'


def attempt_of(job: JobEntry, attempt: Attempt) -> str:
    """The number of an attempt, such as `attempt 2 of 3`."""
    return f"attempt {attempt.number}" + (f" of {len(job.attempts)}" if len(job.attempts) > 1 else "")


def failed_attempt_line(job: JobEntry, attempt: Attempt) -> str:
    """A line for a failed attempt, such as `exp1/fold0, attempt 1 of 2 on gpu1:0: SIGKILL: reason`."""
    subject = f"{cut(job.name, 100)}, {attempt_of(job, attempt)} on {cut(location_of(attempt), 60)}"
    return ": ".join(filter(None, [subject, cut(attempt.failure_name, 60), cut(attempt.reason, 200)]))


def link(job: JobEntry, anchors: Container[int]) -> str:
    """The name of a job, linked to its chart if it has one."""
    name = escape(cut(job.name, 200))
    return f'<a href="#curve-{job.position}">{name}</a>' if job.position in anchors else name


# ---------------------------------------------------------------- the timeline


def timeline(results: Mapping[str, Any], jobs: Sequence[JobEntry], now: float) -> str:
    """The attempts of each slot over time; empty if there are neither slots nor attempts."""
    found = tracks(results, jobs, now)
    if not found:
        return ""
    outcomes = {span.style for track in found for span in track.spans}
    more = f", the first {MAX_TRACKS} of {len(found):,}" if len(found) > MAX_TRACKS else ""
    title = f"one row per slot{more}; time since the first start"
    keys = {style: text for style, text in LEGEND.items() if style in outcomes}
    return card("Slots", title, draw_tracks(found[:MAX_TRACKS]) + legend(keys))


def legend(keys: Mapping[str, str]) -> str:
    """The meaning of colours. keys: style -> text."""
    shown = "".join(f'<span><i class="{style}"></i>{text}</span>' for style, text in keys.items())
    return f'<p class="legend">{shown}</p>' if keys else ""


def tracks(results: Mapping[str, Any], jobs: Iterable[JobEntry], now: float) -> list[Track]:
    """A track for each slot of a server, and for slots that occur only in attempts."""
    spans: dict[tuple[str, int], list[Span]] = {
        (server, n): [] for server, facts in results["servers"].items() for n in range(len(facts["slots"]))
    }
    for job in jobs:
        for attempt in job.attempts:
            for slot in attempt.slots:
                spans.setdefault((attempt.server, slot), []).append(span(job, attempt, now))
    order = sorted(spans, key=lambda slot: (natural_key(slot[0]), slot[1]))
    return [Track(server, str(n), spans[server, n]) for server, n in order]


def natural_key(name: str) -> list[tuple[int, str]]:
    """A key that sorts gpu2 before gpu10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,9})", name)]


def span(job: JobEntry, attempt: Attempt, now: float) -> Span:
    end = max(attempt.start, now if attempt.end is None else attempt.end)
    name = cut(job.name, 120)
    style, failure = outcome_of(attempt, job), cut(attempt.failure_name, 60)
    known = {"done": "done", "running": "running", "failed": f"failed: {failure}"}
    outcome, where = known.get(style) or failure or "no end recorded", cut(location_of(attempt), 60)
    facts = [f"{name}, {attempt_of(job, attempt)}", where, duration(end - attempt.start), outcome]
    return Span(attempt.start, end, style, ", ".join(filter(None, facts)), name, attempt.end is not None)


# ---------------------------------------------------------------- the table of jobs

Cell = tuple[str, float | None]  # markup; the number to sort by, None to sort by the text
Column = tuple[str, list[Cell]]  # title, cells
ALWAYS_SHOWN = ("job", "state", "loss", "held_out_loss")
NOTHING: Cell = ('<span class="none">–</span>', math.nan)


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


# ---------------------------------------------------------------- loss curves


def has_losses(history: History) -> bool:
    return bool(history.held_out) or any("loss" in line for line in history.steps)


def losses(history: History, kind: str) -> list[charts.Point]:
    """Held-out or training losses over steps."""
    return history.held_out_losses() if kind == "held-out" else history.series("loss")


def last_loss(history: History, *kinds: str) -> float:
    """The last finite loss of the first kind that has one; infinity if there is none."""
    finite = (loss for kind in kinds for _, loss in reversed(losses(history, kind)) if math.isfinite(loss))
    return next(finite, math.inf)


def with_charts(jobs: Sequence[JobEntry], curves: Mapping[str, History]) -> list[JobEntry]:
    """The jobs that get their own chart, in list order: at most MAX_CHARTS, those with the lowest last losses."""
    found = [job for job in jobs if job.id in curves and has_losses(curves[job.id])]
    if len(found) <= MAX_CHARTS:
        return found
    best = sorted(found, key=lambda job: last_loss(curves[job.id], "held-out", "training"))[:MAX_CHARTS]
    return sorted(best, key=lambda job: job.position)


def loss_curves(jobs: Sequence[JobEntry], curves: Mapping[str, History], charted: Sequence[JobEntry]) -> str:
    """A chart of all jobs, if there are several, followed by a chart of each job."""
    if not charted:
        return ""
    shown = [job_chart(job, curves[job.id]) for job in charted]
    with_losses = [job for job in jobs if job.id in curves and has_losses(curves[job.id])]
    note = ""
    if len(with_losses) > len(charted):
        note = (f'<p class="sentence">Of {len(with_losses):,} jobs with metrics, the {len(charted)} with the lowest '
                "last losses have their own chart.</p>\n")  # fmt: skip
    keys, all_jobs = legend({"train": "training", "held-out": "held-out"}), comparison(with_losses, curves)
    return f'{all_jobs}{note}<div class="three">\n{chr(10).join(shown)}\n</div>\n{keys}'


def comparison(jobs: Sequence[JobEntry], curves: Mapping[str, History]) -> str:
    """One chart with a curve of each job; empty if fewer than two jobs have a curve.

    A curve has at least two losses. The chart shows held-out losses if at least half of the jobs have a curve of
    held-out losses, otherwise training losses.
    """
    found = {kind: [job for job in jobs if len(losses(curves[job.id], kind)) > 1] for kind in ("held-out", "training")}
    kind = "held-out" if 2 * len(found["held-out"]) >= len(jobs) else "training"
    drawn = found[kind]
    if len(drawn) < 2:
        return ""
    drawings, few = [], len(drawn) <= 4
    best = min(drawn, key=lambda job: last_loss(curves[job.id], kind))
    columns = max(8, min(charts.COLUMNS, MAX_POINTS // (2 * len(drawn))))
    for n, job in enumerate(drawn):
        points = losses(curves[job.id], kind)
        smooth = kind == "training" and len(points) >= charts.MANY
        points = charts.smooth(points, columns) if smooth else charts.thin(points, columns)
        style = f"rank{n}" if few else "train" if job is best else "crowd"
        name = job.name if len(job.name) <= LABEL_LENGTH else job.name.rpartition("/")[2]
        label = cut(name, LABEL_LENGTH) if few or job is best else ""
        drawings.append(Line(cut(job.name, 60), points, style, label))
    drawings.sort(key=lambda line: line.style == "train")  # the best one is drawn last, on top
    unit = f"{kind} loss of {len(drawn):,} jobs" + ("" if few else "; labelled: the lowest final loss")
    return card("All jobs", unit, charts.lines(drawings)) + "\n"


def job_chart(job: JobEntry, history: History) -> str:
    """Training and held-out loss of one job."""
    lines = charts.smoothed(Line("training", history.series("loss"), "train"))
    lines.append(Line("held-out", history.held_out_losses(), "held-out"))
    drawing = charts.lines(lines, width=314, height=190)
    return card(cut(job.name, 80), job.state, drawing, f"curve-{job.position}")


def footer(notes: Sequence[str], path: Path, root: Path) -> str:
    """The notes of read_curves(), and the command that writes the page again."""
    shown = [cut(note, 300) for note in notes[:MAX_NOTES]]
    if len(notes) > MAX_NOTES:
        shown.append(f"{len(notes) - MAX_NOTES:,} more notes")
    text = "".join(f"<p>{escape(note)}</p>" for note in shown)
    command = shlex.join(["python3", f"{KIT}/scripts/lib/module.py", "jobs.page", str(path)])
    command = f"cd {shlex.quote(str(root))} && {command}"
    return f"<footer>{text}<p>Update this page: <code>{escape(command)}</code></p></footer>"


def moment(seconds: float) -> str:
    """A Unix time (seconds) as local date and time."""
    return datetime.fromtimestamp(seconds, timezone.utc).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


# ---------------------------------------------------------------- the program


def main(arguments: Sequence[str]) -> int:
    """Write the page and print its path. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="page", allow_abbrev=False, description="Write results.html, a page of a job list, next to results.json."
    )
    parser.add_argument("results", type=Path, metavar="RESULTS_JSON", help="the results.json of a job list")
    results = parser.parse_args(arguments).results
    if not results.is_file() or results.suffix == ".html":
        parser.error(f"RESULTS_JSON: expected the results.json of a job list, got {str(results)!r}")
    try:
        print(write(results))
    except (OSError, ValueError) as error:
        print(printable(f"page: {results}: cannot write the page: {error}"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
