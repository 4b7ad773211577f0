"""Write results.html, a page of the results of a job list, next to results.json.

The page is one file that needs no network, supports light and dark mode, and can be printed. It can be written while
the list runs. Metrics and settings come from the user, so any value is accepted.

Usage: python -m distributed.jobs.show.page RESULTS_JSON

Standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import sys
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import Any

from distributed.files import KIT, user_file, write_file
from distributed.jobs.journal.state import Attempt
from distributed.jobs.show.entries import (
    JobEntry,
    final,
    has_losses,
    held_out_losses,
    jobs_of,
    location_of,
    outcome_of,
    read_curves,
    working_directory,
)
from distributed.jobs.show.job_table import FOLD, attempt_of, job_table, link
from distributed.jobs.show.timeline import Span, Track, draw_tracks
from distributed.records import number
from distributed.report import charts, page_parts
from distributed.report.charts import Line
from distributed.report.history import History
from distributed.report.page_parts import Tile, card, document, folded, loss_text, section, tile_list
from distributed.terminal import cut, duration
from distributed.trust import SHARED, printable, regular_file

MAX_FAILURES = 50  # failed jobs shown with their last lines
LAST_LINES = 40  # lines of output shown per failed job
MAX_CHARTS = 60  # jobs with their own chart
MAX_TRACKS = 256  # slots on the timeline
MAX_POINTS = 20_000  # in the chart of all jobs
MAX_NOTES = 20
LABEL_LENGTH = 24  # characters of a job's name at its curve
LEGEND = {"done": "done", "failed": "failed", "lost": "server lost", "cancelled": "cancelled or no end recorded",
          "running": "running"}  # fmt: skip
STATE_STYLES = {"finished": "finished", "running": "open", "paused": "stopped", "interrupted": "stopped",
                "cancelled": "stopped"}  # fmt: skip


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


def failed_attempt_line(job: JobEntry, attempt: Attempt) -> str:
    """A line for a failed attempt, such as `exp1/fold0, attempt 1 of 2 on gpu1:0: SIGKILL: reason`."""
    subject = f"{cut(job.name, 100)}, {attempt_of(job, attempt)} on {cut(location_of(attempt), 60)}"
    return ": ".join(filter(None, [subject, cut(attempt.failure_name, 60), cut(attempt.reason, 200)]))


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
    command = shlex.join(["python3", f"{KIT}/scripts/lib/module.py", "jobs.show.page", str(path)])
    command = f"cd {shlex.quote(str(root))} && {command}"
    return f"<footer>{text}<p>Update this page: <code>{escape(command)}</code></p></footer>"


def moment(seconds: float) -> str:
    """A Unix time (seconds) as local date and time."""
    return datetime.fromtimestamp(seconds, timezone.utc).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


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
