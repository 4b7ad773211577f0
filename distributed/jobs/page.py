"""Write results.html, a page of the results of a job list, next to results.json.

The page is one file that needs no network, supports light and dark mode, and can be printed. It can be written while
the list runs, and from incomplete or damaged files.

Usage: python -m distributed.jobs.page RESULTS_JSON

Standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import Any

from distributed.files import write_file
from distributed.jobs.timeline import Span, Track, draw_tracks
from distributed.runs import charts
from distributed.runs.charts import Line, cut, figure
from distributed.runs.history import History, read_metrics
from distributed.runs.page import Tile, card, document, duration, folded, loss_text, plain, ranges, section, tile_list
from distributed.runs.records import is_time, listed, mapping, number

FOLD = 200  # rows of the table shown at first; report.css hides the rest
MAX_FAILURES = 50  # failed jobs shown with their last lines
LAST_LINES = 40  # per failed job
MAX_CHARTS = 60  # jobs with their own chart
MAX_TRACKS = 256  # slots on the timeline
MAX_COLUMNS = 12  # settings, and metrics, in the table
MAX_POINTS = 20_000  # in the chart of all jobs
MAX_LINES = 100_000  # read from all metrics files together, of each kind
MIN_LINES = 200  # read from each metrics file
MAX_NOTES = 20
LABEL_LENGTH = 24  # characters of a job's name at its curve

STATES = ("done", "failed", "running", "waiting", "cancelled")
LEGEND = {"done": "done", "failed": "failed", "lost": "server lost", "cancelled": "cancelled or no end recorded",
          "running": "running"}  # fmt: skip
STATE_STYLES = {"finished": "finished", "running": "open", "paused": "stopped", "interrupted": "stopped",
         "cancelled": "stopped"}  # fmt: skip


# ---------------------------------------------------------------- parsing results.json


@dataclass(frozen=True)
class AttemptEntry:
    """An attempt in results.json. Times are Unix seconds; unknown numbers are NaN."""

    number: str
    server: str
    slots: tuple[int, ...]
    location: str  # server and GPUs: gpu1:0-3
    start: float
    end: float
    seconds: float
    peak_memory: float  # bytes
    failure: str  # "exit code 1", "SIGKILL", "timeout"; empty if it did not fail
    reason: str
    last_lines: tuple[str, ...]
    outcome: str  # a key of LEGEND


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
    attempts: tuple[AttemptEntry, ...]
    base: str  # the base model that it starts from; empty for none
    trains: str  # the base model that it trains; empty for none

    @property
    def last(self) -> AttemptEntry | None:
        return self.attempts[-1] if self.attempts else None


def jobs_of(results: Mapping[str, Any]) -> list[JobEntry]:
    """The jobs of results.json in their order; entries that are not objects are skipped."""
    found = [mapping(job) for job in listed(results.get("jobs"))]
    return [_job(n, job) for n, job in enumerate(filter(None, found), 1)]


def _job(position: int, facts: Mapping[str, Any]) -> JobEntry:
    state = as_text(facts.get("state"))
    attempts = [mapping(attempt) for attempt in listed(facts.get("attempts"))]
    return JobEntry(
        position,
        as_text(facts.get("id")),
        as_text(facts.get("name")) or as_text(facts.get("id")) or f"job {position}",
        state,
        as_text(facts.get("reason")),
        as_text(facts.get("output")),
        mapping(facts.get("settings")),
        mapping(facts.get("metrics")),
        tuple(_attempt(n, attempt, state) for n, attempt in enumerate(filter(None, attempts), 1)),
        as_text(mapping(facts.get("options")).get("base_model_hash")),
        as_text(facts.get("trains_base_model")),
    )


def _attempt(position: int, facts: Mapping[str, Any], state: str) -> AttemptEntry:
    server, gpus = as_text(facts.get("server")), whole_numbers(facts.get("gpus"))
    start, end, seconds = (number(facts.get(key)) for key in ("start", "end", "seconds"))
    if not is_time(start):
        start = math.nan
    if not is_time(end):
        end = start + seconds
    return AttemptEntry(
        as_text(facts.get("number")) or str(position),
        server,
        whole_numbers(facts.get("slots")),
        ":".join(filter(None, [server, ranges(sorted(set(gpus))) if gpus else ""])),
        start,
        end,
        seconds if seconds >= 0 else end - start,
        number(facts.get("peak_memory")),
        _failure(facts),
        as_text(facts.get("reason")),
        tuple(as_text(line) for line in listed(facts.get("last_lines"))[-LAST_LINES:]),
        _outcome(facts, state, math.isfinite(end)),
    )


def _failure(facts: Mapping[str, Any]) -> str:
    """The failure of an attempt; empty if it did not fail."""
    failure, code, signal = as_text(facts.get("failure")), facts.get("exit_code"), as_text(facts.get("signal"))
    if failure in ("signal", "") and signal:
        return signal
    if failure in ("exit code", "") and code not in (None, 0):
        return f"exit code {as_text(code)}"
    return failure


def _outcome(facts: Mapping[str, Any], state: str, ended: bool) -> str:
    """A key of LEGEND."""
    failure = as_text(facts.get("failure"))
    if failure in ("cancelled", "server lost"):
        return "lost" if failure == "server lost" else "cancelled"
    if _failure(facts):
        return "failed"
    if not ended and facts.get("exit_code") is None:
        return "running" if state == "running" else "cancelled"
    return "done"


def as_text(value: Any) -> str:
    """A value as text; empty for None."""
    return "" if value is None else plain(value)


def whole_numbers(value: Any) -> tuple[int, ...]:
    """The elements of a list that can be indices of slots or GPUs."""
    return tuple(n for n in listed(value) if isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 10**6)


def latest(results: Mapping[str, Any], jobs: Iterable[JobEntry]) -> float:
    """When the results were written, in Unix seconds; else the latest time of an attempt; NaN if there is none."""
    updated = number(results.get("updated"))
    if is_time(updated):
        return updated
    times = [time for job in jobs for attempt in job.attempts for time in (attempt.start, attempt.end)]
    return max(filter(math.isfinite, times), default=math.nan)


# ---------------------------------------------------------------- reading and writing


def write(results: Path) -> Path:
    """Write results.html next to results.json and return its path. Raises OSError."""
    notes: list[str] = []
    facts = read_results(results, notes)
    curves = read_curves(results, jobs_of(facts), notes)
    target = results.with_suffix(".html")
    write_file(target, page(facts, curves, notes).encode(errors="replace"))
    return target


def read_results(path: Path, notes: list[str]) -> Mapping[str, Any]:
    """The object in results.json; if it is damaged, an empty object, and a note. Raises OSError."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        notes.append(f"cannot read {path.name}: {error}")
        return {}
    if not isinstance(value, dict):
        notes.append(f"cannot read {path.name}: expected an object, got a {type(value).__name__}")
        return {}
    return value


def read_curves(results: Path, jobs: Sequence[JobEntry], notes: list[str]) -> dict[str, History]:
    """The metrics files that exist, by job id."""
    root, curves = working_directory(results, jobs), {}
    limit = max(MIN_LINES, MAX_LINES // max(1, len(jobs)))
    for job in jobs:
        path = os.path.join(root, job.output, "metrics.jsonl")
        if job.output and job.id not in curves and os.path.isfile(path):
            found: list[str] = []
            curves[job.id] = read_metrics(Path(path), found, limit)
            notes += [f"{job.output}/{note}" for note in found]
    return curves


def working_directory(results: Path, jobs: Iterable[JobEntry]) -> Path:
    """The working directory of the list: the closest parent of results.json that contains an output directory.

    If there is none, the current directory.
    """
    outputs = [job.output for job in jobs if job.output]
    parents = results.absolute().parents
    return next((path for path in parents if any(os.path.isdir(path / output) for output in outputs)), Path())


# ---------------------------------------------------------------- the page


def page(results: Mapping[str, Any], curves: Mapping[str, History], notes: Sequence[str] = ()) -> str:
    """The HTML of the page. curves: metrics by job id. notes: files that could not be read."""
    jobs = jobs_of(results)
    charted = with_charts(jobs, curves)
    anchors = {job.position for job in charted}
    now = latest(results, jobs)
    training, others = [job for job in jobs if job.trains], [job for job in jobs if not job.trains]
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    parts = [
        heading(results, jobs, now),
        servers(results),
        tiles(results, jobs, curves, now),
        section("Failures", failures(jobs, anchors)),
        section("Timeline", timeline(results, jobs, now)),
        section("Base models", job_table(training, curves, anchors, now) if training else ""),
        section("Jobs", job_table(others, curves, anchors, now)),
        section("Loss curves", loss_curves(jobs, curves, charted)),
        footer(notes),
    ]
    return document(cut(list_name(results), 200), parts, script)


def list_name(results: Mapping[str, Any]) -> str:
    return as_text(results.get("list")) or "Job list"


def heading(results: Mapping[str, Any], jobs: Sequence[JobEntry], now: float) -> str:
    """Id, state, time, script and backend of the list."""
    state, failed = as_text(results.get("state")) or "no state recorded", count(results, jobs, "failed")
    style, created = STATE_STYLES.get(state, "open"), number(results.get("created"))
    if state == "finished" and failed:
        style, state = "failed", f"finished, {failed:,} failed"
    facts = [
        moment(created) if is_time(created) else "",
        as_text(results.get("script")),
        f"backend {as_text(results.get('backend'))}" if results.get("backend") else "",
    ]
    sentences = [as_text(results.get("reason"))]
    if results.get("state") == "running" and is_time(now):
        sentences.append(f"As of {moment(now)}. The page is updated while the list runs.")
    return (
        f'<header>\n<p class="eyebrow">Job list</p>\n<h1>{escape(cut(list_name(results), 200))}</h1>\n'
        f'<p class="facts"><span class="state {style}">{escape(cut(state, 60))}</span>'
        f"{''.join(f'<span>{escape(cut(fact, 200))}</span>' for fact in facts if fact)}</p>\n"
        + "".join(f'<p class="sentence">{escape(cut(text, 1000))}</p>\n' for text in sentences if text)
        + "</header>"
    )


def servers(results: Mapping[str, Any]) -> str:
    """The servers that get no jobs, and why."""
    texts = []
    for name, facts in mapping(results.get("servers")).items():
        state, why = (as_text(mapping(facts).get(key)) for key in ("state", "reason"))
        if why or state in ("unreachable", "refused"):  # a ready server with a reason gets no more jobs
            subject = cut(name, 100) + ("" if state == "ready" else f" {cut(state, 60)}")
            texts.append(subject + (f": {cut(why, 300)}" if why else ""))
    if len(texts) > MAX_NOTES:
        texts[MAX_NOTES:] = [f"{len(texts) - MAX_NOTES:,} more servers cannot be used."]
    return "\n".join(f'<p class="warning">{escape(text)}</p>' for text in texts)


# ---------------------------------------------------------------- tiles


def tiles(results: Mapping[str, Any], jobs: Sequence[JobEntry], curves: Mapping[str, History], now: float) -> str:
    """The tiles at the top; unknown numbers have none."""
    total = count(results, jobs, "jobs")
    done, failed, waiting, running, cancelled = (
        count(results, jobs, state) for state in ("done", "failed", "waiting", "running", "cancelled")
    )
    attempts = count(results, jobs, "attempts")
    repeated = attempts - sum(1 for job in jobs if job.attempts)
    return tile_list([
        ("Done", f"{done:,}", f"of {total:,} jobs"),
        ("Failed", f"{failed:,}", f"{cancelled:,} cancelled" if cancelled else ""),
        ("Waiting", f"{waiting:,}", f"{running:,} running"),
        time_tile(results, now),
        utilisation_tile(results, jobs, now),
        slots_tile(results),
        ("Attempts", f"{attempts:,}", f"{repeated:,} repeated" if repeated > 0 else ""),
        best_tile([job for job in jobs if not job.trains], curves),
    ])  # fmt: skip


def count(results: Mapping[str, Any], jobs: Sequence[JobEntry], key: str) -> int:
    """A number of the totals, counted if it is missing. key: "jobs", "attempts" or a state of jobs."""
    known = number(mapping(results.get("totals")).get(key))
    if known >= 0:
        return int(known)
    if key == "attempts":
        return sum(len(job.attempts) for job in jobs)
    return len(jobs) if key == "jobs" else sum(job.state == key for job in jobs)


def wall_seconds(results: Mapping[str, Any], now: float) -> float:
    """Seconds that the list has run; NaN if unknown."""
    known = number(mapping(results.get("totals")).get("seconds"))
    return known if known >= 0 else now - number(results.get("created"))


def time_tile(results: Mapping[str, Any], now: float) -> Tile | None:
    seconds = wall_seconds(results, now)
    if not seconds >= 0:
        return None
    return "Wall time", duration(seconds), "so far" if results.get("state") == "running" else ""


def slot_count(results: Mapping[str, Any]) -> int:
    return sum(len(listed(mapping(server).get("slots"))) for server in mapping(results.get("servers")).values())


def utilisation_tile(results: Mapping[str, Any], jobs: Sequence[JobEntry], now: float) -> Tile | None:
    """The time for which slots had a job, relative to the wall time of all slots."""
    slots, wall = slot_count(results), wall_seconds(results, now)
    used = number(mapping(results.get("totals")).get("slot_seconds"))
    if not used >= 0:
        times = [attempt.seconds * max(1, len(attempt.slots)) for job in jobs for attempt in job.attempts]
        used = math.fsum(time for time in times if time > 0)
    if not slots or not wall > 0:
        return None
    return "Slot utilisation", f"{100 * used / (slots * wall):.3g} %", f"{duration(used)} of slots used"


def slots_tile(results: Mapping[str, Any]) -> Tile | None:
    slots, hosts = slot_count(results), len(mapping(results.get("servers")))
    return ("Slots", f"{slots:,}", f"on {hosts:,} server{'s' * (hosts != 1)}") if hosts else None


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
    """The last metrics of a job: those of the results, and metrics that only its curve has."""
    known: dict[str, Any] = {}
    if history := curves.get(job.id):
        for lines, key in ((history.steps, "loss"), (history.held_out, "held_out_loss")):
            if lines and key in lines[-1]:
                step = lines[-1]["step"]
                known |= {key: number(lines[-1][key]), "step": max(step, known.get("step", step))}
    return known | {key: value for key, value in job.metrics.items() if value is not None}


# ---------------------------------------------------------------- failures


def failures(jobs: Sequence[JobEntry], anchors: Container[int]) -> str:
    """Failed jobs with their last lines, then failed attempts that were retried; empty if there are none."""
    failed = [job for job in jobs if job.state == "failed"]
    others = [job for job in jobs if job.state != "failed"]
    repeated = [
        *((job, attempt) for job in failed for attempt in job.attempts[:-1] if attempt.failure),
        *((job, attempt) for job in others for attempt in job.attempts if attempt.outcome in ("failed", "lost")),
    ]
    parts = [f'<p class="sentence">{escape(summary(failed))}</p>'] if len(failed) > 1 else []
    parts += [failure(job, anchors) for job in failed[:MAX_FAILURES]]
    if len(failed) > MAX_FAILURES:
        parts.append(f'<p class="sentence">{len(failed) - MAX_FAILURES:,} more failed jobs: see the table of jobs, '
                     "sorted by state.</p>")  # fmt: skip
    lines = [attempt_line(job, attempt) for job, attempt in repeated[:FOLD]]
    if len(repeated) > FOLD:
        lines.append(f"and {len(repeated) - FOLD:,} more")
    title = f"{len(repeated):,} other attempt{'s' * (len(repeated) != 1)} that failed"
    return "\n".join([*parts, *filter(None, [folded(title, "\n".join(lines))])])


def summary(failed: Sequence[JobEntry]) -> str:
    """How many jobs failed, how, and on which servers."""
    last = [job.last for job in failed if job.last]
    causes = Counter(cut(attempt.failure, 60) or "no cause recorded" for attempt in last)
    servers = Counter(cut(attempt.server, 60) for attempt in last if attempt.server)
    parts = [f"{len(failed):,} jobs failed"]
    for counted in (causes, servers):
        common = [f"{name}: {n:,}" for name, n in counted.most_common(6)]
        parts.append(", ".join([*common, *(["…"] if len(counted) > 6 else [])]))
    return ". ".join(filter(None, parts)) + "."


def failure(job: JobEntry, anchors: Container[int]) -> str:
    """A failed job with its location, reason and last lines."""
    attempt = job.last
    reason = (attempt.reason if attempt else "") or job.reason
    facts = [attempt_of(job, attempt), attempt.location, attempt.failure] if attempt else ["never started"]
    ended = f"after {duration(attempt.seconds)}" if attempt and attempt.seconds >= 0 else ""
    spans = "".join(f"<span>{escape(cut(fact, 200))}</span>" for fact in [*facts, ended] if fact)
    parts = [
        f'<p class="cause">{link(job, anchors)}</p>',
        f'<p class="facts">{spans}</p>',
        f'<p class="reason">{escape(cut(reason, 1000))}</p>' if reason else "",
        folded("Last lines", "\n".join(cut(line, 400) for line in attempt.last_lines)) if attempt else "",
    ]
    return f'<aside class="failure">\n{"".join(filter(None, parts))}\n</aside>'


def attempt_of(job: JobEntry, attempt: AttemptEntry) -> str:
    """attempt 2 of 3."""
    return f"attempt {cut(attempt.number, 20)}" + (f" of {len(job.attempts)}" if len(job.attempts) > 1 else "")


def attempt_line(job: JobEntry, attempt: AttemptEntry) -> str:
    """exp1/fold0, attempt 1 of 2 on gpu1:0: SIGKILL: reason."""
    location = f" on {cut(attempt.location, 60)}" if attempt.location else ""
    subject = f"{cut(job.name, 100)}, {attempt_of(job, attempt)}{location}"
    return ": ".join(filter(None, [subject, cut(attempt.failure, 60), cut(attempt.reason, 200)]))


def link(job: JobEntry, anchors: Container[int]) -> str:
    """The name of a job, linked to its chart if it has one."""
    name = escape(cut(job.name, 200))
    return f'<a href="#curve-{job.position}">{name}</a>' if job.position in anchors else name


# ---------------------------------------------------------------- the timeline


def timeline(results: Mapping[str, Any], jobs: Sequence[JobEntry], now: float) -> str:
    """The attempts of each slot over time; empty without slots and attempts."""
    found = tracks(results, jobs, now)
    if not found:
        return ""
    outcomes = {span.style for track in found for span in track.spans}
    more = f", the first {MAX_TRACKS} of {len(found):,}" if len(found) > MAX_TRACKS else ""
    title = f"one row per slot{more}; time since the first start"
    keys = "".join(f'<span><i class="{name}"></i>{text}</span>' for name, text in LEGEND.items() if name in outcomes)
    legend = f'<p class="legend">{keys}</p>' if keys else ""
    return card("Slots", title, draw_tracks(found[:MAX_TRACKS]) + legend)


def tracks(results: Mapping[str, Any], jobs: Iterable[JobEntry], now: float) -> list[Track]:
    """A track for each slot of a server, and for slots that occur only in attempts."""
    names: dict[tuple[str, int], str] = {}
    for server, facts in mapping(results.get("servers")).items():
        for n, slot in enumerate(listed(mapping(facts).get("slots"))):
            name = as_text(mapping(slot).get("name")) or str(n)
            names[str(server), n] = name.removeprefix(f"{server}:")
    spans: dict[tuple[str, int], list[Span]] = {slot: [] for slot in names}
    for job in jobs:
        for attempt in job.attempts:
            if math.isfinite(attempt.start):
                for slot in attempt.slots or (-1,):
                    spans.setdefault((attempt.server, slot), []).append(span(job, attempt, now))
    order = sorted(spans, key=lambda slot: (natural_key(slot[0]), slot[1]))
    return [Track(server, names.get((server, n), str(n) if n >= 0 else ""), spans[server, n]) for server, n in order]


def natural_key(name: str) -> list[tuple[int, str]]:
    """A key that sorts gpu2 before gpu10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,9})", name)]


def span(job: JobEntry, attempt: AttemptEntry, now: float) -> Span:
    ended = math.isfinite(attempt.end)
    end = max(attempt.start, attempt.end if ended else now if math.isfinite(now) else attempt.start)
    name = cut(job.name, 120)
    known = {"done": "done", "running": "running", "failed": f"failed: {cut(attempt.failure, 60)}"}
    outcome = known.get(attempt.outcome) or cut(attempt.failure, 60) or "no end recorded"
    facts = [f"{name}, {attempt_of(job, attempt)}", cut(attempt.location, 60), duration(end - attempt.start), outcome]
    return Span(attempt.start, end, attempt.outcome, ", ".join(filter(None, facts)), name, ended)


# ---------------------------------------------------------------- the table of jobs

Cell = tuple[str, float | None]  # markup; the number to sort by, None to sort by the text
NOTHING: Cell = ('<span class="none">–</span>', math.nan)


def job_table(jobs: Sequence[JobEntry], curves: Mapping[str, History], anchors: Container[int], now: float) -> str:
    """The jobs with the settings in which they differ, and their last metrics."""
    if not jobs:
        return '<p class="nothing">The list has no jobs.</p>'
    same, differing = settings_of(jobs)
    settings = {*same, *differing}
    metrics = [final(job, curves) for job in jobs]
    bases: list[tuple[str, list[Cell]]] = [("base model", [(escape(cut(job.base, 20)), None) for job in jobs])]
    columns: list[tuple[str, list[Cell]]] = [
        ("job", [(link(job, anchors), None) for job in jobs]),
        ("state", [state_cell(job) for job in jobs]),
        *(bases if any(job.base for job in jobs) else []),
        *((key, [setting_cell(job.settings, key) for job in jobs]) for key in differing[:MAX_COLUMNS]),
        ("server:GPU", [(escape(cut(job.last.location, 60)) if job.last else "", None) for job in jobs]),
        ("attempts", [(f"{len(job.attempts):,}", len(job.attempts)) for job in jobs]),
        ("duration", [duration_cell(job.last, now) for job in jobs]),
        ("peak memory", [memory_cell(job.last) for job in jobs]),
        *(
            (f"last {key}" if key in settings else key, [metric_cell(found, key) for found in metrics])
            for key in metric_keys(metrics)
        ),
    ]
    more = f"Other settings that differ: {name_list(differing[MAX_COLUMNS:])}." if len(differing) > MAX_COLUMNS else ""
    sentences = filter(None, [same_sentence(same, len(jobs)), more])
    above = "".join(f'<p class="sentence">{escape(sentence)}</p>\n' for sentence in sentences)
    return above + show_all(jobs) + f'<div class="scroll card">{sortable_table(columns)}</div>'


def sortable_table(columns: Sequence[tuple[str, Sequence[Cell]]]) -> str:
    """A table that page.js sorts; numbers are aligned to the right."""
    styles = ["text" if any(value is None for _, value in cells) else "number" for _, cells in columns]
    head = "".join(
        f'<th scope="col" class="{style}"><button type="button">{escape(cut(title, 40))}</button></th>'
        for style, (title, _) in zip(styles, columns, strict=True)
    )
    rows = (
        "".join(_cell(cell, style) for style, cell in zip(styles, row, strict=True))
        for row in zip(*(cells for _, cells in columns), strict=True)
    )
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return f'<table class="jobs"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>'


def _cell(cell: Cell, style: str) -> str:
    """page.js sorts by data-v; it is empty for an unknown number, and missing to sort by the text."""
    markup, value = cell
    key = "" if value is None else f' data-v="{value:.9g}"' if math.isfinite(value) else ' data-v=""'
    return f'<td class="{style}"{key}>{markup}</td>'


def show_all(jobs: Sequence[JobEntry]) -> str:
    """A checkbox that shows the rows after FOLD; empty if there are none."""
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
    """Settings of all jobs: epochs 10, lr 0.001."""
    if not same:
        return ""
    return f"{'Settings of all jobs' if jobs > 1 else 'Settings'}: " + name_list(
        [f"{cut(key, 40)} {cut(value, 60)}" for key, value in same.items()]
    )


def name_list(names: Sequence[str]) -> str:
    """a, b, c … (100 in all)"""
    return ", ".join(cut(name, 110) for name in names[:40]) + (f" … ({len(names):,} in all)" if len(names) > 40 else "")


def setting_cell(settings: Mapping[str, Any], key: str) -> Cell:
    if key not in settings:
        return NOTHING
    value = number(settings[key])
    return escape(cut(plain(settings[key]), 60)), value if math.isfinite(value) else None


def state_cell(job: JobEntry) -> Cell:
    style = job.state if job.state in STATES else ""
    return f'<span class="{style}">{escape(cut(job.state, 40))}</span>', None


def duration_cell(attempt: AttemptEntry | None, now: float) -> Cell:
    """The duration of an attempt, until now if it is running."""
    if not attempt:
        return NOTHING
    seconds = now - attempt.start if attempt.outcome == "running" else attempt.seconds
    return (escape(duration(seconds)), seconds) if seconds >= 0 else NOTHING


def memory_cell(attempt: AttemptEntry | None) -> Cell:
    size = attempt.peak_memory if attempt else math.nan
    return (memory(size), size) if size > 0 else NOTHING


def memory(size: float) -> str:
    """Bytes as MiB or GiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.3g} MiB"


def metric_keys(metrics: Iterable[Mapping[str, Any]]) -> list[str]:
    """The metrics with a column: step and losses first."""
    found = dict.fromkeys(key for line in metrics for key in line)
    first = [key for key in ("step", "loss", "held_out_loss") if key in found]
    return [*first, *(key for key in found if key not in {*first, "steps", "time", "event"})][:MAX_COLUMNS]


def metric_cell(metrics: Mapping[str, Any], key: str) -> Cell:
    if key not in metrics:
        return NOTHING
    value = number(metrics[key])
    if isinstance(metrics[key], bool) or not isinstance(metrics[key], (int, float)):
        return escape(cut(plain(metrics[key]), 60)), None
    text = loss_text(value) if key.endswith("loss") else figure(value)
    if key == "step" and number(metrics.get("steps")) > 0:
        text += f" of {figure(number(metrics['steps']))}"
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
    having = [job for job in jobs if job.id in curves and has_losses(curves[job.id])]
    rest = ""
    if len(having) > len(charted):
        rest = (f'<p class="sentence">Of {len(having):,} jobs with metrics, the {len(charted)} with the lowest last '
                "losses have their own chart.</p>\n")  # fmt: skip
    keys = "".join(
        f'<span><i class="{style}"></i>{text}</span>'
        for style, text in (("train", "training"), ("held-out", "held-out"))
    )
    together = comparison(having, curves)
    return f'{together}{rest}<div class="three">\n{chr(10).join(shown)}\n</div>\n<p class="legend">{keys}</p>'


def comparison(jobs: Sequence[JobEntry], curves: Mapping[str, History]) -> str:
    """One chart with the losses of all jobs: held-out losses if at least half of the jobs have a curve of them.

    A curve has at least two points; train.py may measure the held-out loss only once.
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
    return card(cut(job.name, 80), job.state if job.state in STATES else "", drawing, f"curve-{job.position}")


def footer(notes: Sequence[str]) -> str:
    """Files that could not be read, and the command that writes the page."""
    shown = [cut(note, 300) for note in notes[:MAX_NOTES]]
    if len(notes) > MAX_NOTES:
        shown.append(f"{len(notes) - MAX_NOTES:,} more notes")
    text = "".join(f"<p>{escape(note)}</p>" for note in shown)
    command = "python -m distributed.jobs.page RESULTS_JSON"
    return f"<footer>{text}<p>To update this page: <code>{command}</code></p></footer>"


def moment(seconds: float) -> str:
    """Unix seconds as local date and time."""
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
    except OSError as error:
        print(f"page: {results}: cannot write the page: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
