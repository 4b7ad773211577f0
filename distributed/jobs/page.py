"""The results of a job list on one page that opens anywhere: results.html beside results.json.

The page needs no network, follows the light or dark of the reader's screen, and prints. It can be written at any time,
also while the list runs, or from files of which half is missing.

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

FOLD = 200  # rows of the table that are shown at first; report.css hides the rest
FAILURES = 50  # failed jobs with their last lines
LAST_LINES = 40  # of each of them
CURVES = 60  # jobs with a chart of their own
TRACKS = 256  # slots on the timeline
COLUMNS = 12  # settings, and metrics, that have a column of the table
POINTS = 20_000  # of all jobs in the chart that compares them
LINES = 100_000  # of all metrics files together, of each kind; a job has at least ENOUGH
ENOUGH = 200
NOTES = 20
LABEL = 24  # letters of a job's name beside its curve

STATES = ("done", "failed", "running", "waiting", "cancelled")
LEGEND = {"done": "done", "failed": "failed", "lost": "server lost", "cancelled": "cancelled or no end recorded",
          "running": "running"}  # fmt: skip
KINDS = {"finished": "finished", "running": "open", "paused": "stopped", "interrupted": "stopped",
         "cancelled": "stopped"}  # fmt: skip


# ---------------------------------------------------------------- results.json as values


@dataclass(frozen=True)
class Attempt:
    """One start of a job on a server. Times are Unix seconds; NaN where unknown."""

    number: str
    server: str
    slots: tuple[int, ...]
    place: str  # gpu1:0-3
    start: float
    end: float
    seconds: float
    peak_memory: float  # bytes
    how: str  # it failed: "exit code 1", "SIGKILL", "timeout"; empty where it did not
    reason: str
    last_lines: tuple[str, ...]
    outcome: str  # a key of LEGEND


@dataclass(frozen=True)
class Job:
    """One job; `position` counts from 1."""

    position: int
    id: str
    name: str
    state: str
    reason: str
    output: str
    settings: Mapping[str, Any]
    metrics: Mapping[str, Any]
    attempts: tuple[Attempt, ...]
    base: str  # the base model that it starts from; empty where it starts from none
    trains: str  # the base model that it trains

    @property
    def last(self) -> Attempt | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None


def jobs_of(results: Mapping[str, Any]) -> list[Job]:
    """The jobs of a results.json in its order; what is no object is left out."""
    found = [mapping(job) for job in listed(results.get("jobs"))]
    return [_job(n, job) for n, job in enumerate(filter(None, found), 1)]


def _job(position: int, facts: Mapping[str, Any]) -> Job:
    state = as_text(facts.get("state"))
    attempts = [mapping(attempt) for attempt in listed(facts.get("attempts"))]
    return Job(
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


def _attempt(position: int, facts: Mapping[str, Any], state: str) -> Attempt:
    server, gpus = as_text(facts.get("server")), whole_numbers(facts.get("gpus"))
    start, end, seconds = (number(facts.get(key)) for key in ("start", "end", "seconds"))
    if not is_time(start):
        start = math.nan
    if not is_time(end):
        end = start + seconds
    return Attempt(
        as_text(facts.get("number")) or str(position),
        server,
        whole_numbers(facts.get("slots")),
        ":".join(filter(None, [server, ranges(sorted(set(gpus))) if gpus else ""])),
        start,
        end,
        seconds if seconds >= 0 else end - start,
        number(facts.get("peak_memory")),
        _how(facts),
        as_text(facts.get("reason")),
        tuple(as_text(line) for line in listed(facts.get("last_lines"))[-LAST_LINES:]),
        _outcome(facts, state, math.isfinite(end)),
    )


def _how(facts: Mapping[str, Any]) -> str:
    """How an attempt failed; empty where it did not."""
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
    if _how(facts):
        return "failed"
    if not ended and facts.get("exit_code") is None:
        return "running" if state == "running" else "cancelled"
    return "done"


def as_text(value: Any) -> str:
    """A value as text; empty for none."""
    return "" if value is None else plain(value)


def whole_numbers(value: Any) -> tuple[int, ...]:
    """The numbers of a list that can count slots or GPUs."""
    return tuple(n for n in listed(value) if isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 10**6)


def latest(results: Mapping[str, Any], jobs: Iterable[Job]) -> float:
    """Unix seconds at which the results were written, or the last time that they name; NaN for none."""
    updated = number(results.get("updated"))
    if is_time(updated):
        return updated
    times = [time for job in jobs for attempt in job.attempts for time in (attempt.start, attempt.end)]
    return max(filter(math.isfinite, times), default=math.nan)


# ---------------------------------------------------------------- reading and writing


def write(results: Path) -> Path:
    """Write results.html beside results.json and return its path. Raises OSError when it cannot."""
    notes: list[str] = []
    facts = read_results(results, notes)
    curves = read_curves(results, jobs_of(facts), notes)
    target = results.with_suffix(".html")
    write_file(target, page(facts, curves, notes).encode(errors="replace"))
    return target


def read_results(path: Path, notes: list[str]) -> Mapping[str, Any]:
    """The object of a results.json; where there is none, an empty one and a note. Raises OSError."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name} cannot be read: expected an object, got a {type(value).__name__}")
        return {}
    return value


def read_curves(results: Path, jobs: Sequence[Job], notes: list[str]) -> dict[str, History]:
    """The metrics files that are there, by the ids of their jobs."""
    root, curves = launch_directory(results, jobs), {}
    most = max(ENOUGH, LINES // max(1, len(jobs)))
    for job in jobs:
        path = os.path.join(root, job.output, "metrics.jsonl")
        if job.output and job.id not in curves and os.path.isfile(path):
            found: list[str] = []
            curves[job.id] = read_metrics(Path(path), found, most)
            notes += [f"{job.output}/{note}" for note in found]
    return curves


def launch_directory(results: Path, jobs: Iterable[Job]) -> Path:
    """The directory that output directories are relative to: the next one above results.json that holds one of them.

    Where none does, the working directory.
    """
    outputs = [job.output for job in jobs if job.output]
    above = results.absolute().parents
    return next((place for place in above if any(os.path.isdir(place / output) for output in outputs)), Path())


# ---------------------------------------------------------------- the page


def page(results: Mapping[str, Any], curves: Mapping[str, History], notes: Sequence[str] = ()) -> str:
    """The whole page. curves: metrics by the ids of the jobs. notes: what could not be read."""
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
    """The id of the list."""
    return as_text(results.get("list")) or "Job list"


def heading(results: Mapping[str, Any], jobs: Sequence[Job], now: float) -> str:
    """Id, state, when, with which script and backend."""
    state, failed = as_text(results.get("state")) or "no state recorded", count(results, jobs, "failed")
    kind, created = KINDS.get(state, "open"), number(results.get("created"))
    if state == "finished" and failed:
        kind, state = "failed", f"finished, {failed:,} failed"
    facts = [
        moment(created) if is_time(created) else "",
        as_text(results.get("script")),
        f"backend {as_text(results.get('backend'))}" if results.get("backend") else "",
    ]
    sentences = [as_text(results.get("reason"))]
    if results.get("state") == "running" and is_time(now):
        sentences.append(f"As of {moment(now)}. The page is written again while the list runs.")
    return (
        f'<header>\n<p class="eyebrow">Job list</p>\n<h1>{escape(cut(list_name(results), 200))}</h1>\n'
        f'<p class="facts"><span class="state {kind}">{escape(cut(state, 60))}</span>'
        f"{''.join(f'<span>{escape(cut(fact, 200))}</span>' for fact in facts if fact)}</p>\n"
        + "".join(f'<p class="sentence">{escape(cut(text, 1000))}</p>\n' for text in sentences if text)
        + "</header>"
    )


def servers(results: Mapping[str, Any]) -> str:
    """The servers that jobs cannot be started on, and why."""
    texts = []
    for name, facts in mapping(results.get("servers")).items():
        state, why = (as_text(mapping(facts).get(key)) for key in ("state", "reason"))
        if why or state in ("unreachable", "refused"):  # a ready one with a reason gets no more jobs
            place = cut(name, 100) + ("" if state == "ready" else f" {cut(state, 60)}")
            texts.append(place + (f": {cut(why, 300)}" if why else ""))
    if len(texts) > NOTES:
        texts[NOTES:] = [f"{len(texts) - NOTES:,} more servers cannot be used."]
    return "\n".join(f'<p class="warning">{escape(text)}</p>' for text in texts)


# ---------------------------------------------------------------- tiles


def tiles(results: Mapping[str, Any], jobs: Sequence[Job], curves: Mapping[str, History], now: float) -> str:
    """A row of figures; one that is not known has no tile."""
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


def count(results: Mapping[str, Any], jobs: Sequence[Job], key: str) -> int:
    """A number of the totals: "jobs", "attempts", or the jobs of a state; counted where it is missing."""
    known = number(mapping(results.get("totals")).get(key))
    if known >= 0:
        return int(known)
    if key == "attempts":
        return sum(len(job.attempts) for job in jobs)
    return len(jobs) if key == "jobs" else sum(job.state == key for job in jobs)


def wall_seconds(results: Mapping[str, Any], now: float) -> float:
    """How long the list has run; NaN where nobody knows."""
    known = number(mapping(results.get("totals")).get("seconds"))
    return known if known >= 0 else now - number(results.get("created"))


def time_tile(results: Mapping[str, Any], now: float) -> Tile | None:
    """From the launch to the end, or so far."""
    seconds = wall_seconds(results, now)
    if not seconds >= 0:
        return None
    return "Wall time", duration(seconds), "so far" if results.get("state") == "running" else ""


def slot_count(results: Mapping[str, Any]) -> int:
    """Slots of all servers."""
    return sum(len(listed(mapping(server).get("slots"))) for server in mapping(results.get("servers")).values())


def utilisation_tile(results: Mapping[str, Any], jobs: Sequence[Job], now: float) -> Tile | None:
    """Seconds in which slots had a job, of those in which they could have had one."""
    slots, wall = slot_count(results), wall_seconds(results, now)
    used = number(mapping(results.get("totals")).get("slot_seconds"))
    if not used >= 0:
        times = [attempt.seconds * max(1, len(attempt.slots)) for job in jobs for attempt in job.attempts]
        used = math.fsum(time for time in times if time > 0)
    if not slots or not wall > 0:
        return None
    return "Slot utilisation", f"{100 * used / (slots * wall):.3g} %", f"{duration(used)} of slots used"


def slots_tile(results: Mapping[str, Any]) -> Tile | None:
    """Slots and servers."""
    slots, hosts = slot_count(results), len(mapping(results.get("servers")))
    return ("Slots", f"{slots:,}", f"on {hosts:,} server{'s' * (hosts != 1)}") if hosts else None


def best_tile(jobs: Sequence[Job], curves: Mapping[str, History]) -> Tile | None:
    """The lowest held-out loss of any step; without one the lowest last training loss."""
    title, found = "Best held-out loss", [(loss, job) for job in jobs for loss in held_out_losses(job, curves)]
    if not any(math.isfinite(loss) for loss, _ in found):
        title, found = "Best training loss", [(number(final(job, curves).get("loss")), job) for job in jobs]
    finite = [pair for pair in found if math.isfinite(pair[0])]
    if not finite:
        return None
    loss, job = min(finite, key=lambda pair: pair[0])
    return title, loss_text(loss), cut(job.name, 60)


def held_out_losses(job: Job, curves: Mapping[str, History]) -> list[float]:
    """All that are known of a job."""
    history = curves.get(job.id)
    curve = [loss for _, loss in history.held_out_losses()] if history else []
    return [*curve, number(job.metrics.get("held_out_loss"))]


def final(job: Job, curves: Mapping[str, History]) -> dict[str, Any]:
    """The last metrics of a job: those of the results, and what its curve has beyond them."""
    known: dict[str, Any] = {}
    if history := curves.get(job.id):
        for lines, key in ((history.steps, "loss"), (history.held_out, "held_out_loss")):
            if lines and key in lines[-1]:
                step = lines[-1]["step"]
                known |= {key: number(lines[-1][key]), "step": max(step, known.get("step", step))}
    return known | {key: value for key, value in job.metrics.items() if value is not None}


# ---------------------------------------------------------------- failures


def failures(jobs: Sequence[Job], anchors: Container[int]) -> str:
    """Failed jobs with their last lines, then attempts that failed and were repeated; nothing without any."""
    failed = [job for job in jobs if job.state == "failed"]
    ended_well = [job for job in jobs if job.state != "failed"]
    repeated = [
        *((job, attempt) for job in failed for attempt in job.attempts[:-1] if attempt.how),
        *((job, attempt) for job in ended_well for attempt in job.attempts if attempt.outcome in ("failed", "lost")),
    ]
    parts = [f'<p class="sentence">{escape(summary(failed))}</p>'] if len(failed) > 1 else []
    parts += [failure(job, anchors) for job in failed[:FAILURES]]
    if len(failed) > FAILURES:
        parts.append(f'<p class="sentence">{len(failed) - FAILURES:,} more failed jobs: see the table of all jobs, '
                     "sorted by state.</p>")  # fmt: skip
    lines = [attempt_line(job, attempt) for job, attempt in repeated[:FOLD]]
    if len(repeated) > FOLD:
        lines.append(f"and {len(repeated) - FOLD:,} more")
    title = f"{len(repeated):,} other attempt{'s' * (len(repeated) != 1)} that failed"
    return "\n".join([*parts, *filter(None, [folded(title, "\n".join(lines))])])


def summary(failed: Sequence[Job]) -> str:
    """How many jobs failed, how, and on which servers."""
    last = [job.last for job in failed if job.last]
    hows = Counter(cut(attempt.how, 60) or "no cause recorded" for attempt in last)
    places = Counter(cut(attempt.server, 60) for attempt in last if attempt.server)
    parts = [f"{len(failed):,} jobs failed"]
    for counted in (hows, places):
        common = [f"{name}: {n:,}" for name, n in counted.most_common(6)]
        parts.append(", ".join([*common, *(["…"] if len(counted) > 6 else [])]))
    return ". ".join(filter(None, parts)) + "."


def failure(job: Job, anchors: Container[int]) -> str:
    """A failed job: which, where, why, and what it printed last."""
    attempt = job.last
    reason = (attempt.reason if attempt else "") or job.reason
    places = [attempt_of(job, attempt), attempt.place, attempt.how] if attempt else ["never started"]
    ended = f"after {duration(attempt.seconds)}" if attempt and attempt.seconds >= 0 else ""
    spans = "".join(f"<span>{escape(cut(place, 200))}</span>" for place in [*places, ended] if place)
    parts = [
        f'<p class="cause">{link(job, anchors)}</p>',
        f'<p class="facts">{spans}</p>',
        f'<p class="reason">{escape(cut(reason, 1000))}</p>' if reason else "",
        folded("Last lines", "\n".join(cut(line, 400) for line in attempt.last_lines)) if attempt else "",
    ]
    return f'<aside class="failure">\n{"".join(filter(None, parts))}\n</aside>'


def attempt_of(job: Job, attempt: Attempt) -> str:
    """attempt 2 of 3."""
    return f"attempt {cut(attempt.number, 20)}" + (f" of {len(job.attempts)}" if len(job.attempts) > 1 else "")


def attempt_line(job: Job, attempt: Attempt) -> str:
    """exp1/fold0, attempt 1 of 2 on gpu1:0: SIGKILL: reason."""
    place = f" on {cut(attempt.place, 60)}" if attempt.place else ""
    parts = [f"{cut(job.name, 100)}, {attempt_of(job, attempt)}{place}", cut(attempt.how, 60), cut(attempt.reason, 200)]
    return ": ".join(filter(None, parts))


def link(job: Job, anchors: Container[int]) -> str:
    """The name of a job, linked to its chart where it has one."""
    name = escape(cut(job.name, 200))
    return f'<a href="#curve-{job.position}">{name}</a>' if job.position in anchors else name


# ---------------------------------------------------------------- the timeline


def timeline(results: Mapping[str, Any], jobs: Sequence[Job], now: float) -> str:
    """What each slot did; nothing where there is neither a slot nor an attempt."""
    found = tracks(results, jobs, now)
    if not found:
        return ""
    outcomes = {span.style for track in found for span in track.spans}
    more = f", the first {TRACKS} of {len(found):,}" if len(found) > TRACKS else ""
    title = f"one row a slot{more}; time since the first start"
    keys = "".join(f'<span><i class="{name}"></i>{text}</span>' for name, text in LEGEND.items() if name in outcomes)
    legend = f'<p class="legend">{keys}</p>' if keys else ""
    return card("Slots", title, draw_tracks(found[:TRACKS]) + legend)


def tracks(results: Mapping[str, Any], jobs: Iterable[Job], now: float) -> list[Track]:
    """A track for each slot: first those of the servers, then those that only attempts name."""
    names: dict[tuple[str, int], str] = {}
    for server, facts in mapping(results.get("servers")).items():
        for n, slot in enumerate(listed(mapping(facts).get("slots"))):
            name = as_text(mapping(slot).get("name")) or str(n)
            names[str(server), n] = name.removeprefix(f"{server}:")
    spans: dict[tuple[str, int], list[Span]] = {place: [] for place in names}
    for job in jobs:
        for attempt in job.attempts:
            if math.isfinite(attempt.start):
                for slot in attempt.slots or (-1,):
                    spans.setdefault((attempt.server, slot), []).append(span(job, attempt, now))
    order = sorted(spans, key=lambda place: (natural_key(place[0]), place[1]))
    return [Track(server, names.get((server, n), str(n) if n >= 0 else ""), spans[server, n]) for server, n in order]


def natural_key(name: str) -> list[tuple[int, str]]:
    """A key that sorts gpu2 before gpu10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,9})", name)]


def span(job: Job, attempt: Attempt, now: float) -> Span:
    """An attempt on the timeline."""
    ended = math.isfinite(attempt.end)
    end = max(attempt.start, attempt.end if ended else now if math.isfinite(now) else attempt.start)
    name = cut(job.name, 120)
    known = {"done": "done", "running": "running", "failed": f"failed: {cut(attempt.how, 60)}"}
    how = known.get(attempt.outcome) or cut(attempt.how, 60) or "no end recorded"
    facts = [f"{name}, {attempt_of(job, attempt)}", cut(attempt.place, 60), duration(end - attempt.start), how]
    return Span(attempt.start, end, attempt.outcome, ", ".join(filter(None, facts)), name, ended)


# ---------------------------------------------------------------- the table of all jobs

Cell = tuple[str, float | None]  # markup; its number, where the column is sorted by one
NOTHING: Cell = ('<span class="none">–</span>', math.nan)


def job_table(jobs: Sequence[Job], curves: Mapping[str, History], anchors: Container[int], now: float) -> str:
    """All jobs, with the settings in which they differ, and their last metrics."""
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
        *((key, [setting_cell(job.settings, key) for job in jobs]) for key in differing[:COLUMNS]),
        ("server:GPU", [(escape(cut(job.last.place, 60)) if job.last else "", None) for job in jobs]),
        ("attempts", [(f"{len(job.attempts):,}", len(job.attempts)) for job in jobs]),
        ("duration", [duration_cell(job.last, now) for job in jobs]),
        ("peak memory", [memory_cell(job.last) for job in jobs]),
        *(
            (f"last {key}" if key in settings else key, [metric_cell(found, key) for found in metrics])
            for key in metric_keys(metrics)
        ),
    ]
    more = f"Other settings that differ: {name_list(differing[COLUMNS:])}." if len(differing) > COLUMNS else ""
    sentences = filter(None, [same_sentence(same, len(jobs)), more])
    above = "".join(f'<p class="sentence">{escape(sentence)}</p>\n' for sentence in sentences)
    return above + show_all(jobs) + f'<div class="scroll card">{sortable_table(columns)}</div>'


def sortable_table(columns: Sequence[tuple[str, Sequence[Cell]]]) -> str:
    """Columns as a table that page.js sorts; numbers are aligned to the right."""
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
    """data-v is what a column is sorted by: a number, nothing where none is known, without it the text."""
    markup, value = cell
    key = "" if value is None else f' data-v="{value:.9g}"' if math.isfinite(value) else ' data-v=""'
    return f'<td class="{style}"{key}>{markup}</td>'


def show_all(jobs: Sequence[Job]) -> str:
    """A box that shows the rows beyond FOLD."""
    label, name = f"Show all {len(jobs):,} jobs, not only {FOLD}", f"all{jobs[0].position}"
    box = f'<input type="checkbox" class="all" id="{name}"><label for="{name}">{label}</label>\n'
    return box if len(jobs) > FOLD else ""


def settings_of(jobs: Sequence[Job]) -> tuple[dict[str, str], list[str]]:
    """The settings that are equal in all jobs, and the names of those that are not."""
    same, differing = {}, []
    for key in dict.fromkeys(key for job in jobs for key in job.settings):
        values = {plain(job.settings[key]) if key in job.settings else None for job in jobs}
        if len(values) == 1:
            same[key] = values.pop() or ""
        else:
            differing.append(key)
    return same, differing


def same_sentence(same: Mapping[str, str], jobs: int) -> str:
    """The same in all jobs: epochs 10, lr 0.001."""
    if not same:
        return ""
    return f"{'The same in all jobs' if jobs > 1 else 'Settings'}: " + name_list(
        [f"{cut(key, 40)} {cut(value, 60)}" for key, value in same.items()]
    )


def name_list(names: Sequence[str]) -> str:
    """a, b, c … of many."""
    return ", ".join(cut(name, 110) for name in names[:40]) + (f" … ({len(names):,} in all)" if len(names) > 40 else "")


def setting_cell(settings: Mapping[str, Any], key: str) -> Cell:
    """A setting as its job has it."""
    if key not in settings:
        return NOTHING
    value = number(settings[key])
    return escape(cut(plain(settings[key]), 60)), value if math.isfinite(value) else None


def state_cell(job: Job) -> Cell:
    """The state in its colour."""
    style = job.state if job.state in STATES else ""
    return f'<span class="{style}">{escape(cut(job.state, 40))}</span>', None


def duration_cell(attempt: Attempt | None, now: float) -> Cell:
    """How long an attempt took, or has taken so far."""
    if not attempt:
        return NOTHING
    seconds = now - attempt.start if attempt.outcome == "running" else attempt.seconds
    return (escape(duration(seconds)), seconds) if seconds >= 0 else NOTHING


def memory_cell(attempt: Attempt | None) -> Cell:
    """Peak memory of an attempt."""
    size = attempt.peak_memory if attempt else math.nan
    return (memory(size), size) if size > 0 else NOTHING


def memory(size: float) -> str:
    """Bytes as MiB or GiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.3g} MiB"


def metric_keys(metrics: Iterable[Mapping[str, Any]]) -> list[str]:
    """The metrics that have a column: step and losses first."""
    found = dict.fromkeys(key for line in metrics for key in line)
    first = [key for key in ("step", "loss", "held_out_loss") if key in found]
    return [*first, *(key for key in found if key not in {*first, "steps", "time", "event"})][:COLUMNS]


def metric_cell(metrics: Mapping[str, Any], key: str) -> Cell:
    """The last value of a metric."""
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
    """Whether a loss was logged."""
    return bool(history.held_out) or any("loss" in line for line in history.steps)


def losses(history: History, kind: str) -> list[charts.Point]:
    """Held-out or training losses over steps."""
    return history.held_out_losses() if kind == "held-out" else history.series("loss")


def last_loss(history: History, *kinds: str) -> float:
    """The last finite loss of the first kind that has one; infinite for none."""
    finite = (loss for kind in kinds for _, loss in reversed(losses(history, kind)) if math.isfinite(loss))
    return next(finite, math.inf)


def with_charts(jobs: Sequence[Job], curves: Mapping[str, History]) -> list[Job]:
    """The jobs that have a chart of their own: of many those with the lowest last losses, in the order of the list."""
    found = [job for job in jobs if job.id in curves and has_losses(curves[job.id])]
    if len(found) <= CURVES:
        return found
    best = sorted(found, key=lambda job: last_loss(curves[job.id], "held-out", "training"))[:CURVES]
    return sorted(best, key=lambda job: job.position)


def loss_curves(jobs: Sequence[Job], curves: Mapping[str, History], charted: Sequence[Job]) -> str:
    """One chart of all jobs where there are several, then one of each."""
    if not charted:
        return ""
    shown = [job_chart(job, curves[job.id]) for job in charted]
    having = [job for job in jobs if job.id in curves and has_losses(curves[job.id])]
    rest = ""
    if len(having) > len(charted):
        rest = (f'<p class="sentence">Of {len(having):,} jobs with metrics, the {len(charted)} with the lowest last '
                "losses have a chart of their own.</p>\n")  # fmt: skip
    keys = "".join(
        f'<span><i class="{style}"></i>{text}</span>'
        for style, text in (("train", "training"), ("held-out", "held-out"))
    )
    together = comparison(having, curves)
    return f'{together}{rest}<div class="three">\n{chr(10).join(shown)}\n</div>\n<p class="legend">{keys}</p>'


def comparison(jobs: Sequence[Job], curves: Mapping[str, History]) -> str:
    """The losses of all jobs over each other: held-out ones where at least half of the jobs have a curve of them.

    A curve has two points: train.py may measure the held-out loss only at its end.
    """
    found = {kind: [job for job in jobs if len(losses(curves[job.id], kind)) > 1] for kind in ("held-out", "training")}
    kind = "held-out" if 2 * len(found["held-out"]) >= len(jobs) else "training"
    drawn = found[kind]
    if len(drawn) < 2:
        return ""
    drawings, few = [], len(drawn) <= 4
    best = min(drawn, key=lambda job: last_loss(curves[job.id], kind))
    columns = max(8, min(charts.COLUMNS, POINTS // (2 * len(drawn))))
    for n, job in enumerate(drawn):
        points = losses(curves[job.id], kind)
        smooth = kind == "training" and len(points) >= charts.MANY
        points = charts.smooth(points, columns) if smooth else charts.thin(points, columns)
        style = f"rank{n}" if few else "train" if job is best else "crowd"
        name = job.name if len(job.name) <= LABEL else job.name.rpartition("/")[2]
        label = cut(name, LABEL) if few or job is best else ""
        drawings.append(Line(cut(job.name, 60), points, style, label))
    drawings.sort(key=lambda line: line.style == "train")  # the best one is drawn over the others
    unit = f"{kind} loss of {len(drawn):,} jobs" + ("" if few else "; named: the lowest last one")
    return card("All jobs", unit, charts.lines(drawings)) + "\n"


def job_chart(job: Job, history: History) -> str:
    """Training and held-out loss of one job."""
    lines = charts.smoothed(Line("training", history.series("loss"), "train"))
    lines.append(Line("held-out", history.held_out_losses(), "held-out"))
    drawing = charts.lines(lines, width=314, height=190)
    return card(cut(job.name, 80), job.state if job.state in STATES else "", drawing, f"curve-{job.position}")


def footer(notes: Sequence[str]) -> str:
    """What could not be read, and how to write the page again."""
    shown = [cut(note, 300) for note in notes[:NOTES]]
    if len(notes) > NOTES:
        shown.append(f"{len(notes) - NOTES:,} more notes")
    text = "".join(f"<p>{escape(note)}</p>" for note in shown)
    return f"<footer>{text}<p>Write it again: <code>python -m distributed.jobs.page RESULTS_JSON</code></p></footer>"


def moment(seconds: float) -> str:
    """Unix seconds as date and time of this machine's zone."""
    return datetime.fromtimestamp(seconds, timezone.utc).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


# ---------------------------------------------------------------- the program


def main(arguments: Sequence[str]) -> int:
    """Write the page and print its path."""
    parser = argparse.ArgumentParser(
        prog="page", allow_abbrev=False, description="Write results.html beside results.json, a page of a job list."
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
