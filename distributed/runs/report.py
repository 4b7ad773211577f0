"""What happened in a run, on one page that opens anywhere: RUN/report.html.

The page needs no network, follows the light or dark of the reader's screen, and prints. It can be written
at any time, also of a run that failed, is still going on, or left only half of its files.

scripts/report.sh finds a run and calls this.

Standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from distributed.runs import charts
from distributed.runs.charts import Band, Bar, Line, Mark, compact, figure
from distributed.runs.history import (
    History,
    Rank,
    Run,
    compare,
    fold,
    is_time,
    mapping,
    number,
    read,
    started,
    stragglers,
    zone,
)
from distributed.runs.lookup import NoRun, find

FEW = 16  # up to so many ranks each has a line and a bar of its own
FEWER = 4  # up to so many ranks each line has a colour and a label of its own
MOST_CHARTS = 24  # of values that a script has logged
NARROW = 360  # pixels that a chart has on a telephone
HEAT_COLUMNS = 120
HEAT_ROWS = 512  # beyond it several ranks share a row, which shows the slowest of them


Row = tuple[float, Sequence[float]]  # step, each rank's own compute time


def write(run: Path) -> Path:
    """Write report.html into a run folder and return its path. Raises OSError when it cannot."""
    return publish(run / "report.html", page(read(run)))


def publish(target: Path, text: str) -> Path:
    """Write a page beside its path, rename it, and return the path: a reader sees the old page or the new one."""
    beside = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8", errors="replace")
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
    return target


def page(run: Run) -> str:
    """The whole page."""
    rows, waits = run.history.rank_seconds(), run.history.waiting()
    ranks = compare(run, rows)
    parts = [
        heading(run),
        failure(run),
        tiles(run),
        warning(ranks),
        section("Training", training_charts(run)),
        section("Ranks", rank_charts(run, rows, ranks) + waiting_chart(run, waits)),
        section("Usage", usage_charts(run)),
        section("Settings", settings_tables(run)),
        section("Machine", machine(run)),
        section("Command", command(run)),
        footer(run),
    ]
    return document(run.name, parts)


def document(title: str, parts: Iterable[str], script: str = "") -> str:
    """A page of these parts that needs no network; empty parts are left out. script: more JavaScript for it."""
    style, code = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, parts))
        + f"\n</main>\n<script>\n{code}{script}</script>\n</body>\n</html>\n"
    )


def section(title: str, content: str) -> str:
    """A part of the page with its heading; nothing where there is no content."""
    name = title.lower().replace(" ", "-")
    return f'<section id="{name}">\n<h2>{title}</h2>\n{content}\n</section>' if content else ""


# ---------------------------------------------------------------- how it ended


@dataclass(frozen=True)
class State:
    """How a run stands."""

    kind: str  # finished, stopped, failed, open
    word: str
    sentence: str


def state(run: Run) -> State:
    """From the verdict; without one from the last event."""
    outcome, history = run.verdict.get("outcome") or _outcome_of(run.verdict.get("exit_code")), run.history
    last = (history.last_event("finish", "stop", "nonfinite", "fail", "resume", "start") or {}).get("event")
    if outcome == "ok" or (not outcome and last == "finish"):
        return State("finished", "finished", "")
    if outcome == "stopped" or (not outcome and last == "stop"):
        return State("stopped", "stopped", "It stopped on request, with a checkpoint written. "
                     "The same command goes on from there.")  # fmt: skip
    if outcome or last in ("nonfinite", "fail"):
        return State("failed", "failed", cause(run))
    return State("open", "no end recorded", "It is still running, or was cut off without a word.")


def _outcome_of(code: Any) -> str | None:
    return None if code is None else {0: "ok", 75: "stopped"}.get(code if isinstance(code, int) else -1, "failed")


def cause(run: Run) -> str:
    """The verdict's sentence, or what the last bad event says."""
    if run.verdict.get("cause"):
        return str(run.verdict["cause"])
    event = run.history.last_event("nonfinite", "fail")
    if not event:
        return "No cause was recorded."
    known = {"step", "time", "event"}
    more = ", ".join(f"{key} {plain(value)}" for key, value in event.items() if key not in known)
    what = "A loss that is not finite" if event["event"] == "nonfinite" else "A failure"
    return f"{what} at step {figure(event['step'])}" + (f": {more}" if more else ".")


def heading(run: Run) -> str:
    """Name, state, and when and where it ran."""
    now = state(run)
    nodes = run.nodes if len(run.nodes) <= 3 else [run.nodes[0], "…", run.nodes[-1]]
    user, begun = run.about.get("user"), started(run)
    facts = [f"started {moment(begun, run)}" if is_time(begun) else "", ", ".join(nodes), f"by {user}" if user else ""]
    sentence = f'<p class="sentence">{escape(now.sentence)}</p>\n' if now.sentence and now.kind != "failed" else ""
    return (
        f'<header>\n<p class="eyebrow">Training run</p>\n<h1>{escape(run.name)}</h1>\n'
        f'<p class="facts"><span class="state {now.kind}">{now.word}</span>'
        f"{''.join(f'<span>{escape(fact)}</span>' for fact in facts if fact)}</p>\n{sentence}</header>"
    )


def failure(run: Run) -> str:
    """Why it failed, where, and the traceback; nothing for a run that did not fail."""
    now = state(run)
    if now.kind != "failed":
        return ""
    verdict = run.verdict
    rank, node, code, time = (verdict.get(key) for key in ("rank", "node", "exit_code", "time"))
    places = [
        f"rank {plain(rank)}" if rank is not None else "",
        f"on {plain(node)}" if node is not None else "",
        f"exit code {plain(code)}" if code is not None else "",
        moment(number(time), run) if is_time(number(time)) else "",
    ]
    said = ": ".join(str(verdict[key]) for key in ("exception", "message") if verdict.get(key))
    parts = [
        f'<p class="cause">{escape(now.sentence)}</p>',
        f'<p class="facts">{"".join(f"<span>{escape(place)}</span>" for place in places if place)}</p>',
        f"<pre>{escape(said)}</pre>" if said and said not in now.sentence else "",
        folded("Traceback", str(verdict.get("traceback") or "")),
        folded("What failed because of it", "\n".join(map(_collateral, listed(verdict.get("collateral"))))),
    ]
    return f'<aside class="failure">\n{"".join(filter(None, parts))}\n</aside>'


def _collateral(fault: Any) -> str:
    facts = mapping(fault)
    if not facts:
        return plain(fault)
    rank, node, code = (facts.get(name) for name in ("rank", "node", "exit_code"))
    who = [f"rank {plain(rank)}" if rank is not None else "", f"on {plain(node)}" if node is not None else ""]
    rest = [plain(value) for name, value in facts.items() if name in ("exception", "message", "cause") and value]
    return " ".join(filter(None, [*who, f"(exit code {plain(code)})" if code is not None else ""])) + (
        ": " + ": ".join(rest) if rest else ""
    )


def folded(title: str, text: str) -> str:
    """Text behind a line to click on; nothing for no text."""
    return f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>" if text.strip() else ""


# ---------------------------------------------------------------- the figures one wants first


def tiles(run: Run) -> str:
    """A row of figures; one that is not known has no tile."""
    return tile_list([loss_tile(run), *held_out_tiles(run), rate_tile(run), steps_tile(run), time_tile(run),
                      ranks_tile(run), size_tile(run), *usage_tiles(run)])  # fmt: skip


def tile_list(found: Sequence[Tile | None]) -> str:
    """Tiles side by side."""
    rows = (
        f'<div class="tile"><dt>{label}</dt><dd class="value">{escape(value)}</dd>'
        f'<dd class="note">{escape(note)}</dd></div>'
        for label, value, note in filter(None, found)
    )
    return f'<dl class="tiles">\n{chr(10).join(rows)}\n</dl>' if any(found) else ""


Tile = tuple[str, str, str]  # what, how much, and a word more


def loss_tile(run: Run) -> Tile | None:
    """The last training loss."""
    losses = run.history.series("loss")
    if not losses:
        return None
    finite = [point for point in losses if math.isfinite(point[1])]
    if math.isfinite(losses[-1][1]) or not finite:
        return "Training loss", loss_text(losses[-1][1]), f"at step {figure(losses[-1][0])}"
    return "Training loss", "not finite", f"{loss_text(finite[-1][1])} at step {figure(finite[-1][0])}"


def held_out_tiles(run: Run) -> list[Tile]:
    """The last held-out loss, and what it means."""
    losses = run.history.held_out_losses()
    if not losses:
        return []
    step, loss = losses[-1]
    best, when = min(((loss, step) for step, loss in losses if math.isfinite(loss)), default=(loss, step))
    note = f"best {loss_text(best)} at step {figure(when)}" if best < loss else f"at step {figure(step)}"
    if is_bytes(run):
        meaning = ("Bits per byte", loss_text(loss / math.log(2)), "held out")
    else:
        meaning = ("Perplexity", figure(math.exp(loss) if loss < 300 else math.inf), "held out, per token")
    return [("Held-out loss", loss_text(loss), note), meaning]


def loss_text(loss: float) -> str:
    """Three decimals, as losses are compared."""
    return f"{loss:.3f}" if 0.01 <= abs(loss) < 1000 else figure(loss)


def is_bytes(run: Run) -> bool:
    """Whether a token is a byte: text needs no model.vocab_size, token files do."""
    known = bool(mapping(run.setup.get("settings")).get("data"))
    return known and (run.setting("data", "path") is None or run.setting("model", "vocab_size") is None)


def rate_tile(run: Run) -> Tile | None:
    """Tokens per second of all ranks, the median over the run."""
    rates = [rate for _, rate in run.history.series("tokens_per_second") if math.isfinite(rate)]
    if not rates:
        return None
    rate, size = statistics.median(rates), world_size(run)
    return "Tokens per second", compact(rate), f"{compact(rate / size)} a rank" if size > 1 else "median of the run"


def steps_tile(run: Run) -> Tile | None:
    """How far it came."""
    if not run.history.steps:
        return None
    logged = next((number(line["steps"]) for line in reversed(run.history.steps) if "steps" in line), math.nan)
    asked = logged if math.isfinite(logged) else number(run.setting("train", "steps"))
    step = run.history.steps[-1]["step"]
    return "Steps", figure(step), f"of {figure(asked)}" if step <= asked < math.inf else "done"


def time_tile(run: Run) -> Tile | None:
    """From launch to end, and how long a step took."""
    seconds = run.seconds()
    if seconds is None:
        return None
    steps = [value for _, value in run.history.series("step_seconds") if math.isfinite(value)]
    return "Wall time", duration(seconds), f"{duration(statistics.median(steps))} a step" if steps else ""


def ranks_tile(run: Run) -> Tile | None:
    """How many processes, on how many nodes, by which means."""
    size = world_size(run)
    if not size:
        return None
    nodes = number(run.fact("world", "nodes"))
    count = int(nodes) if nodes > 0 else len(run.nodes)
    means = [plain(run.fact("world", key)) for key in ("strategy", "backend", "device") if run.fact("world", key)]
    place = f"on {count} node{'s' * (count != 1)}" if count else ""
    return "Ranks", figure(size), ", ".join(filter(None, [place, *means]))


def size_tile(run: Run) -> Tile | None:
    """Parameters of the model."""
    parameters = number(run.fact("model", "parameters"))
    if math.isnan(parameters):
        return None
    layers, width = run.setting("model", "n_layer"), run.setting("model", "n_embd")
    shape = f"{plain(layers)} layers, width {plain(width)}" if layers and width else ""
    return "Parameters", compact(parameters), shape


def usage_tiles(run: Run) -> list[Tile]:
    """How busy the ranks were, and how much memory the largest of them needed."""
    found: list[Tile] = []
    if waits := [value for _, row in run.history.waiting() for value in row if math.isfinite(value)]:
        found.append(("Waiting", f"{statistics.fmean(waits):.0%}", "of a step, for the gradients of other ranks"))
    mean = {kind: statistics.fmean(values) for kind in ("gpu", "cpu") if (values := values_of(run, kind))}
    if "gpu" in mean:
        found.append(("GPU use", f"{mean['gpu']:.0%}", "mean of all samples"))
    elif "cpu" in mean:
        found.append(("CPU", f"{mean['cpu']:.2f} cores", "a rank, mean of all samples"))
    for kind, title in (("memory", "Memory"), ("gpu_memory", "GPU memory")):
        peaks = {name: max(known) for name, points in run.usage.of(kind).items() if (known := finite(points))}
        if peaks:
            largest = max(peaks, key=lambda name: peaks[name])
            found.append((title, memory(peaks[largest]), f"largest sample, {largest}"))
    return found


def values_of(run: Run, kind: str) -> list[float]:
    """All finite samples of all ranks."""
    return [value for points in run.usage.of(kind).values() for value in finite(points)]


def finite(points: Iterable[tuple[float, float]]) -> list[float]:
    """The values that are finite."""
    return [value for _, value in points if math.isfinite(value)]


def world_size(run: Run) -> int:
    """Ranks of the run; 0 when nobody wrote it down."""
    told = number(run.fact("world", "size")), number(run.about.get("nproc"))
    return next((int(size) for size in told if size > 0), 0)


# ---------------------------------------------------------------- charts of the training


def training_charts(run: Run) -> str:
    """Loss over the whole width, then what belongs to it."""
    history, happened = run.history, marks(run)
    events = [mark for mark in happened if mark.style != "checkpoint"]
    losses = [*earlier_lines(history, "loss"), *earlier_lines(history, "held_out_loss")]
    notes = [f"nats a {'byte' if is_bytes(run) else 'token'}"] if run.setup else []
    notes += ["dashed: earlier attempts"] if losses else []
    notes += ["ticks on the axis: checkpoints"] if any(mark.style == "checkpoint" for mark in happened) else []
    losses += charts.smoothed(Line("training", history.series("loss"), "train", "training"))
    losses.append(Line("held-out", history.held_out_losses(), "held-out", "held-out"))
    known = {
        "lr": ("Learning rate", "", True),
        "grad_norm": ("Gradient norm", "before clipping", False),
        "tokens_per_second": ("Tokens per second", "all ranks", True),
    }
    others = [name for name in history.names() if name not in {*known, "loss", "held_out_loss", "step_seconds"}]
    cards = [small_chart(run, events, key, *known[key]) for key in known]
    cards += [small_chart(run, events, key, key, "", False) for key in others[:MOST_CHARTS]]
    charts_below = "\n".join(filter(None, cards))
    loss = ""
    if any(line.points for line in losses):
        loss = card(
            "Loss", " · ".join(notes), responsive(lambda w: charts.lines(losses, happened, notes=True, width=w))
        )
    elif not charts_below:
        return '<p class="nothing">No metrics were logged. metrics.log(step, loss=...) of the kit adds them.</p>'
    return f'{loss}\n<div class="three">\n{charts_below}\n</div>'


def earlier_lines(history: History, key: str) -> list[Line]:
    """What earlier attempts logged and later ones have done again, and runs that this one resumed from."""
    found = []
    for n, earlier in enumerate(history.earlier, 1):
        points = earlier.held_out_losses() if key == "held_out_loss" else earlier.series(key)
        found.append(Line(f"earlier attempt {n}", charts.smoothed(Line("", points, ""))[-1].points, "earlier"))
    return [line for line in found if line.points]


def responsive(draw: Callable[[int], str], wide: int = 1032) -> str:
    """A drawing for wide pages and one for narrow ones, of which a reader sees one."""
    return f'<div class="on-wide">{draw(wide)}</div><div class="on-narrow">{draw(NARROW)}</div>'


def small_chart(run: Run, happened: Sequence[Mark], key: str, title: str, unit: str, zero: bool) -> str:
    """One value of the metrics over steps; nothing where it was never a number."""
    points = run.history.series(key)
    if not points or not (finite(points) or title != key):
        return ""
    style = key.replace("_", "-") if title != key else "value-line"
    line = Line(title.lower(), points, style)
    drawn = earlier_lines(run.history, key) + ([line] if key == "lr" else charts.smoothed(line))
    return card(title, unit, charts.lines(drawn, happened, width=314, height=190, zero=zero))


def card(title: str, unit: str, drawing: str, anchor: str = "") -> str:
    """A chart with its title; the read-out is filled by the pointer. anchor: the id that links lead to."""
    name = f' id="{escape(anchor)}"' if anchor else ""
    return (
        f'<figure class="card"{name}>\n<figcaption><b>{escape(title)}</b> <span>{escape(unit)}</span>'
        f'<output class="readout"></output></figcaption>\n{drawing}\n</figure>'
    )


EVENTS = {
    "resume": ("resumed", "event"),
    "stop": ("stopped", "event"),
    "checkpoint": ("checkpoint", "checkpoint"),
    "nonfinite": ("not finite", "bad"),
    "fail": ("failed", "bad"),
}


def marks(run: Run) -> list[Mark]:
    """What happened on the way. A start and a finish are seen without a mark."""
    known = [event for event in run.history.events if event["event"] not in ("start", "finish")]
    return [Mark(event["step"], *EVENTS.get(name := plain(event["event"]), (name, "event"))) for event in known]


# ---------------------------------------------------------------- charts of the ranks


def warning(ranks: Sequence[Rank]) -> str:
    """A straggler, named above all charts."""
    return f'<p class="warning"><a href="#ranks">{escape(comparison(ranks))}</a></p>' if stragglers(ranks) else ""


def all_is_well(ranks: Sequence[Rank]) -> str:
    """That there is no straggler; nothing where the warning names one."""
    return "" if stragglers(ranks) else f'<p class="sentence">{escape(comparison(ranks))}</p>\n'


def comparison(ranks: Sequence[Rank]) -> str:
    """Who is slow, in words."""
    slow, usual = stragglers(ranks), "the other one" if len(ranks) == 2 else "the median"
    if not slow:
        slowest = max(ranks, key=lambda rank: rank.median)
        if slowest.ratio < 1.02:
            return "No straggler: the ranks keep pace, the slowest within 2 % of the others."
        return f"No straggler: the slowest, rank {slowest.rank}, takes {times(slowest.ratio)} as long as {usual}."
    if len(slow) == 1:
        return f"{named(slow)} is {times(slow[0].ratio)} slower than {usual}; every step waits for it."
    return (
        f"{named(slow)} are {times(slow[-1].ratio)} to {times(slow[0].ratio)} slower than {usual}; "
        f"every step waits for the slowest, rank {slow[0].rank}."
    )


def named(slow: Sequence[Rank]) -> str:
    """Ranks 8-15 (node2)."""
    hosts = sorted({rank.host for rank in slow if rank.host})
    place = f" ({', '.join(hosts)})" if 0 < len(hosts) <= 3 else ""
    return f"{'Ranks' if len(slow) > 1 else 'Rank'} {fold(sorted(rank.rank for rank in slow))}{place}"


def times(ratio: float) -> str:
    """1.8×, and 1.17× where one digit would hide it."""
    return f"{ratio:.2f}×" if ratio < 1.25 else f"{ratio:,.1f}×"


def rank_charts(run: Run, rows: Sequence[Row], ranks: Sequence[Rank]) -> str:
    """Each rank's own compute time: over steps, and side by side."""
    if not ranks:
        return ""
    usual = statistics.median_low([rank.median for rank in ranks])
    factor, unit = (1e3, "milliseconds a step") if usual < 1 else (1.0, "seconds a step")
    rows = [(step, [value * factor for value in values]) for step, values in rows]
    events = [mark for mark in marks(run) if mark.style != "checkpoint"]
    if len(rows[0][1]) > FEW:
        return many_ranks(rows, ranks, events, unit)
    if len(ranks) == 1:
        drawn = rank_lines(rows, ranks)
        return card(
            "Own compute", unit, responsive(lambda w: charts.lines(drawn, events, width=w, height=200, zero=True))
        )
    name = "the faster one" if len(ranks) == 2 else "median"
    height = 180 if len(ranks) <= 4 else max(260, 20 * len(ranks))
    drawn, bars = rank_lines(rows, ranks), [rank_bar(rank, factor) for rank in ranks]
    rule = f"{name} {figure(usual * factor)}"
    over_steps = responsive(lambda w: charts.lines(drawn, events, width=w, height=height, zero=True), 488)
    side_by_side = responsive(lambda w: charts.bars(bars, usual * factor, rule, width=w, height=height), 488)
    return (
        f'{all_is_well(ranks)}<div class="two">\n'
        + card("Own compute over steps", unit, over_steps)
        + card("Ranks side by side", f"{unit} · median; thin line: 8 of 10 steps", side_by_side)
        + "\n</div>"
    )


def rank_lines(rows: Sequence[Row], ranks: Sequence[Rank]) -> list[Line]:
    """A line for each rank; slow ones are named at their end, and so are all when they are few."""
    few = len(ranks) <= 4
    drawn = []
    for rank in ranks:
        name = f"rank {rank.rank}"
        style = "slow" if rank.slow else f"rank{rank.rank}" if few else "usual"
        points = [(step, values[rank.rank]) for step, values in rows]
        *_, line = charts.smoothed(Line(name, points, style, name if few or rank.slow else ""))
        drawn.append(replace(line, name=name))
    return sorted(drawn, key=lambda line: line.style == "slow")


def rank_bar(rank: Rank, factor: float) -> Bar:
    """A rank beside the others, slow ones with how slow."""
    text = figure(rank.median * factor) + (f"  {times(rank.ratio)}" if rank.slow else "")
    name = f"rank {rank.rank}"
    return Bar(name, rank.median * factor, rank.low * factor, rank.high * factor, text, rank.slow)


def many_ranks(rows: Sequence[Row], ranks: Sequence[Rank], happened: Sequence[Mark], unit: str) -> str:
    """The room of all ranks with median and stragglers as lines, and a heat map in which a slow one is a stripe."""
    table = columns(rows, HEAT_COLUMNS)
    middles = [(step, median_low(values)) for step, values in table]
    band = [(step, min(finite), max(finite)) for step, values in table if (finite := [*filter(math.isfinite, values)])]
    drawn = [Line("median of all ranks", middles, "usual", "median")]
    groups = neighbours(stragglers(ranks))
    for rank in [group[0] for group in groups][:3]:
        points = [(step, values[rank.rank]) for step, values in table]
        drawn.append(Line(f"rank {rank.rank}", points, "slow", f"rank {rank.rank}"))
    over_steps = responsive(lambda w: charts.lines(drawn, happened, band=Band(band), width=w, height=240, zero=True))
    together = math.ceil(len(table[0][1]) / HEAT_ROWS)
    labels = sorted(heat_label(group, together) for group in groups[:12])
    ratios = heat_rows([(values, middle) for (_, values), (_, middle) in zip(table, middles, strict=True)], together)
    steps = [step for step, _ in table]
    heat = responsive(lambda w: charts.heat(steps, ratios, labels, together=together, width=w))
    return (
        all_is_well(ranks)
        + card("Own compute over steps", f"{unit} · shaded: from the fastest to the slowest rank", over_steps)
        + card("Each rank against the median", "a slow rank is a stripe", heat + legend())
    )


# ---------------------------------------------------------------- waiting, and what was sampled


def waiting_chart(run: Run, waits: Sequence[Row]) -> str:
    """The share of a step that each rank waits; nothing where that was not measured."""
    if not any(math.isfinite(value) for _, row in waits for value in row):
        return ""
    names = [f"rank {rank}" for rank in range(len(waits[0][1]))]
    by_rank = {name: [(step, row[n] * 100) for step, row in waits] for n, name in enumerate(names)}
    unit = "% of a step in which a rank has all its own gradients and waits for their sum over all ranks"
    return chart_of_ranks(
        "Waiting for other ranks", unit, by_rank, [mark for mark in marks(run) if mark.style != "checkpoint"]
    )


USAGE = {  # kind: title, unit, factor
    "gpu": ("GPU use", "% of the time in which a kernel ran", 100.0),
    "gpu_memory": ("GPU memory", "GiB in use on the GPUs of a rank", 2.0**-30),
    "cpu": ("CPU", "cores, with the rank's children", 1.0),
    "memory": ("Memory", "GiB resident, with the rank's children", 2.0**-30),
    "output": ("Output", "kB a second", 1e-3),
}


def usage_charts(run: Run) -> str:
    """What each rank used over time, through all attempts."""
    begin = min(run.usage.attempts, default=0.0)
    begin = min(begin, started(run)) if is_time(started(run)) else begin
    restarts = [Mark(time - begin, f"attempt {n}") for n, time in enumerate(run.usage.attempts, 1) if n > 1]
    cards = []
    for kind, (title, unit, factor) in USAGE.items():
        by_rank = {
            name: [(time - begin, value * factor) for time, value in points]
            for name, points in run.usage.of(kind).items()
            if finite(points)
        }
        if by_rank:
            cards.append(chart_of_ranks(title, unit, by_rank, restarts, width=314, seconds=True))
    return f'<div class="three">\n{chr(10).join(cards)}\n</div>' if cards else ""


def chart_of_ranks(
    title: str,
    unit: str,
    by_rank: Mapping[str, Sequence[tuple[float, float]]],
    happened: Sequence[Mark],
    *,
    width: int = 1032,
    seconds: bool = False,
) -> str:
    """A line for each rank; of many ranks their median, and the room from the lowest to the highest."""
    band = None
    if len(by_rank) <= FEWER:
        drawn = [Line(name, points, f"rank{n}", name) for n, (name, points) in enumerate(by_rank.items())]
    elif len(by_rank) <= FEW:
        drawn = [Line(name, points, "crowd") for name, points in by_rank.items()]
    else:
        table = together(by_rank.values())
        drawn = [Line("median of all ranks", [(x, median_low(values)) for x, values in table], "usual", "median")]
        band = Band([(x, min(values), max(values)) for x, values in table])
        unit += " · shaded: from the lowest to the highest rank"

    def draw(wide: int) -> str:
        return charts.lines(drawn, happened, band=band, width=wide, height=190, zero=True, seconds=seconds)

    return card(title, unit, responsive(draw, width) if width > NARROW else draw(width))


def together(lines: Iterable[Sequence[tuple[float, float]]]) -> list[tuple[float, list[float]]]:
    """At most HEAT_COLUMNS places, and the finite values of all lines that are near to each."""
    points = sorted((x, y) for line in lines for x, y in line if math.isfinite(y))
    width = (points[-1][0] - points[0][0]) / HEAT_COLUMNS or 1.0
    groups = groupby(points, key=lambda point: int((point[0] - points[0][0]) / width))
    return [((group := [*found])[-1][0], [y for _, y in group]) for _, found in groups]


# ---------------------------------------------------------------- stragglers, and all ranks side by side


def neighbours(slow: Sequence[Rank]) -> list[list[Rank]]:
    """Stragglers that stand side by side, each group from its slowest on, and the group of the slowest first."""
    groups: list[list[Rank]] = []
    for rank in sorted(slow, key=lambda rank: rank.rank):
        if groups and rank.rank == groups[-1][-1].rank + 1:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return sorted(map(stragglers, groups), key=lambda group: -group[0].ratio)


def heat_label(group: Sequence[Rank], together: int) -> tuple[int, str]:
    """The row in the middle of a group, and its name."""
    ranks = sorted(rank.rank for rank in group)
    name = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {fold(ranks)}"
    return ranks[len(ranks) // 2] // together, f"{name}  {times(group[0].ratio)}"


def columns(rows: Sequence[Row], count: int) -> list[tuple[float, list[float]]]:
    """The steps in at most `count` groups: the last step of each group and each rank's mean in it."""
    size = math.ceil(len(rows) / count)
    groups = [rows[n : n + size] for n in range(0, len(rows), size)]
    by_rank = [zip(*(values for _, values in group), strict=True) for group in groups]
    return [(group[-1][0], [*map(_mean, ranks)]) for group, ranks in zip(groups, by_rank, strict=True)]


def _mean(values: Iterable[float]) -> float:
    finite = [*filter(math.isfinite, values)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def median_low(values: Iterable[float]) -> float:
    """The lower median of what is finite, else NaN."""
    finite = [*filter(math.isfinite, values)]
    return statistics.median_low(finite) if finite else math.nan


def heat_rows(table: Sequence[tuple[Sequence[float], float]], together: int) -> list[list[float]]:
    """[row][column]: how many times the column's median the slowest of the row's ranks took."""
    columns = [[value / middle if middle > 0 else math.nan for value in values] for values, middle in table]
    by_rank = list(zip(*columns, strict=True))
    rows = [by_rank[n : n + together] for n in range(0, len(by_rank), together)]
    return [[max(filter(math.isfinite, cell), default=math.nan) for cell in zip(*row, strict=True)] for row in rows]


def legend() -> str:
    """What the colours of the heat map mean."""
    borders = [f"≤ {border:g}×" for border in charts.HEAT] + ["more"]
    return '<p class="legend">' + "".join(
        f'<span><i class="heat{n}"></i>{text}</span>' for n, text in enumerate(borders)
    ) + "</p>"  # fmt: skip


# ---------------------------------------------------------------- tables


ORDER = ("model", "data", "train", "distributed", "checkpoint", "logging")  # as a person thinks of them


def settings_tables(run: Run) -> str:
    """All settings, a table for each section."""
    settings = mapping(run.setup.get("settings"))
    loose = {key: value for key, value in settings.items() if not isinstance(value, Mapping)}
    sections = {key: value for key, value in settings.items() if isinstance(value, Mapping)}
    order = sorted(sections, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    tables = [table(name, sections[name].items()) for name in order if sections[name]]
    tables += [table("", loose.items())] if loose else []
    return f'<div class="tables">\n{chr(10).join(tables)}\n</div>' if tables else ""


def table(title: str, rows: Iterable[tuple[str, Any]]) -> str:
    """Names and values."""
    lines = "".join(f"<tr><th><span>{escape(str(key))}</span></th><td>{cell(value)}</td></tr>" for key, value in rows)
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    return f'<table class="card">{caption}<tbody>{lines}</tbody></table>'


def cell(value: Any) -> str:
    """A value of a table; what is not set is faint."""
    return '<span class="none">not set</span>' if value is None else escape(plain(value))


def plain(value: Any) -> str:
    """A value as text: as it would stand in a settings file."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def machine(run: Run) -> str:
    """What it ran on, and with which versions."""
    facts, versions, world = (mapping(part) for part in (run.setup.get("machine"), run.about.get("versions"),
                                                         run.setup.get("world")))  # fmt: skip
    hardware = {
        "host of rank 0": facts.get("host"),
        "processor": facts.get("cpu"),
        "cores": facts.get("cores"),
        "memory": memory(number(facts.get("memory_bytes"))),
        "GPUs": ", ".join(f"{n} × {name}" for name, n in Counter(map(plain, listed(facts.get("gpus")))).items()),
        "nodes": ", ".join(run.nodes),
    }
    software = {
        "Python": facts.get("python") or versions.get("python"),
        "PyTorch": facts.get("torch") or versions.get("torch"),
        "system": facts.get("platform"),
    }
    model = mapping(run.setup.get("model"))
    groups = {"hardware": hardware, "software": software, "ranks": dict(world), "model": dict(model)}
    tables = [table(name, known(rows)) for name, rows in groups.items() if known(rows)]
    return f'<div class="tables">\n{chr(10).join(tables)}\n</div>' if tables else ""


def known(rows: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The rows that have a value."""
    return [(key, value) for key, value in rows.items() if value not in (None, "")]


def commit(git: Mapping[str, Any]) -> str:
    """The commit, and whether the files were those of it."""
    if not git.get("commit"):
        return ""
    return f"commit {plain(git['commit'])}" + (", with uncommitted changes" if git.get("dirty") else "")


def command(run: Run) -> str:
    """The command as a person can paste it, and where it was given."""
    words = listed(run.about.get("command"))
    if not words:
        return ""
    cwd, git = run.about.get("cwd"), mapping(run.about.get("git"))
    places = [f"in {plain(cwd)}" if cwd else "", commit(git)]
    spans = "".join(f"<span>{escape(place)}</span>" for place in places if place)
    return f'<pre class="command card">{escape(shlex.join(map(plain, words)))}</pre><p class="facts">{spans}</p>'


def footer(run: Run) -> str:
    """What the page could not read, and how to draw it again."""
    notes = "".join(f"<p>{escape(note)}</p>" for note in run.notes)
    return (
        f"<footer>{notes}<p>Draw it again: <code>scripts/report.sh {escape(shlex.quote(run.name))}</code></p></footer>"
    )


# ---------------------------------------------------------------- words for values


def listed(value: Any) -> list[Any]:
    """The value where it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def moment(seconds: float, run: Run) -> str:
    """Unix seconds as date and time in the zone in which the run was started."""
    return datetime.fromtimestamp(seconds, zone(run)).strftime("%Y-%m-%d %H:%M:%S %Z")


def duration(seconds: float) -> str:
    """81 ms, 4.2 s, 3 min 20 s, 5 h 2 min, 3 d 4 h."""
    if seconds < 1:
        return f"{figure(float(f'{seconds * 1000:.3g}'))} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size:,} {unit} {whole % size // part} {smaller}"
    return f"{seconds:.3g} s"


def memory(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / 2**30:,.1f} GiB" if size > 0 else ""


# ---------------------------------------------------------------- the program


def main(words: Sequence[str]) -> int:
    """Write the report and print its path."""
    parser = argparse.ArgumentParser(
        prog="report.sh", allow_abbrev=False, description="Write RUN/report.html, a page about the run."
    )
    parser.add_argument("run", metavar="RUN", help="run directory, its name below logs, or a SLURM job's number")
    parser.add_argument("--from", type=Path, default=Path(), dest="cwd", metavar="DIR", help="where a path begins")
    parser.add_argument("--log-dir", type=Path, default=Path("logs"), metavar="DIR", help="where a name is looked for")
    options = parser.parse_args(words)
    folder = options.cwd / options.run
    if not any((folder / name).is_file() for name in ("run.json", "metrics.jsonl")):
        try:
            folder = find(options.run, options.cwd, options.cwd / options.log_dir)
        except NoRun as error:
            sys.stderr.write(f"report.sh: {error}\nTry: report.sh --help\n")
            return 2
    try:
        print(write(folder))
    except OSError as error:
        sys.stderr.write(f"report.sh: {folder}: cannot write the report: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
