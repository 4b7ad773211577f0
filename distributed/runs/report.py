"""What happened in a run, on one page: RUN/report.html.

The page can be written at any time, also of a run that failed, still goes on, or has only half of its files: every
file may be missing, cut short or hold anything. scripts/report.sh finds a run and calls this. Standard library only.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

from distributed.files import write_file
from distributed.runs import charts, ranks
from distributed.runs.charts import Line, Mark, compact, figure
from distributed.runs.history import History, Point, read_metrics
from distributed.runs.lookup import RunLookupError, find
from distributed.runs.page import Tile, card, document, duration, folded, loss_text, plain, section, spans, tile_list
from distributed.runs.records import is_time, listed, mapping, number, read_object
from distributed.runs.usage import Usage, read_usage

MOST_CHARTS = 24  # of values that a script has logged
MOST_RUNS = 20  # that are followed from one to the one that it resumed from


def write(run: Path) -> Path:
    """Write report.html into a run directory and return its path. Raises OSError when it cannot."""
    target = run / "report.html"
    write_file(target, page(read(run)).encode(errors="replace"))
    return target


# ---------------------------------------------------------------- the files of a run


@dataclass(frozen=True)
class Run:
    """One run directory."""

    name: str
    about: Mapping[str, Any]  # run.json
    setup: Mapping[str, Any]  # settings.json
    verdict: Mapping[str, Any]
    history: History
    usage: Usage
    notes: Sequence[str]  # what could not be read
    nodes: Sequence[str]  # in the order of their node ranks
    started: datetime | None

    def fact(self, section: str, key: str) -> Any:
        """A value of settings.json, or None."""
        return mapping(self.setup.get(section)).get(key)

    def setting(self, section: str, key: str) -> Any:
        """A value of the settings, or None."""
        return mapping(self.fact("settings", section)).get(key)

    @property
    def start(self) -> float:
        """Unix seconds of the launch; NaN when it is not recorded."""
        seconds = self.started.timestamp() if self.started else math.nan
        return seconds if is_time(seconds) else math.nan

    @property
    def size(self) -> int:
        """Number of ranks; 0 when it is not recorded."""
        known = number(self.fact("world", "size")), number(self.about.get("nproc"))
        return next((int(size) for size in known if size > 0), 0)


def read(directory: Path) -> Run:
    """Read a run directory. Raises OSError when the directory itself cannot be read."""
    directory = directory.resolve(strict=True)
    notes: list[str] = []
    about, setup, verdict = (read_object(directory / f"{name}.json", notes) for name in ("run", "settings", "verdict"))
    history = read_metrics(directory / "metrics.jsonl", notes)
    history.earlier[:0] = _resumed_from(directory, history)
    try:
        started = datetime.fromisoformat(str(about.get("started")))
        started = started if started.tzinfo else started.replace(tzinfo=timezone.utc)
    except ValueError:
        started = None
    return Run(
        name=about["run"] if isinstance(about.get("run"), str) and about["run"] else directory.name,
        about=about,
        setup=setup,
        verdict=verdict,
        history=history,
        usage=read_usage(directory),
        notes=notes,
        nodes=[*map(str, listed(about.get("nodes")))],
        started=started,
    )


def _resumed_from(directory: Path, history: History) -> list[History]:
    """What the run logged from whose checkpoint this one resumed, and the one before that, the oldest first."""
    found: list[History] = []
    seen = {directory}
    while event := next((event for event in history.events if event.get("event") == "resume"), None):
        path = Path(str(event.get("run")))  # as it was then: the directory of all runs may have been moved
        there = (place.resolve() for place in (path, directory.parent / path.name) if place.is_dir())
        directory = next(there, directory)
        if directory in seen or len(seen) > MOST_RUNS:
            break
        seen.add(directory)
        history = read_metrics(directory / "metrics.jsonl", [])
        found[:0] = [*history.earlier, history]
    return found


# ---------------------------------------------------------------- the page


def page(run: Run) -> str:
    """The whole page."""
    compute, waits = run.history.by_rank("rank_seconds"), run.history.by_rank("wait_share")
    compared = ranks.compare(compute, run.nodes)
    happened = marks(run.history)
    events = [mark for mark in happened if mark.style != "checkpoint"]
    notes = "".join(f"<p>{escape(note)}</p>" for note in run.notes)
    again = f"<p>Draw it again: <code>scripts/report.sh {escape(shlex.quote(run.name))}</code></p>"
    parts = [
        heading(run),
        failure(run),
        tile_list([*training_tiles(run), *run_tiles(run), *usage_tiles(run)]),
        ranks.warning(compared),
        section("Training", training_charts(run, happened, events)),
        section("Ranks", ranks.compute_chart(compute, compared, events) + waiting_chart(waits, events)),
        section("Usage", usage_charts(run)),
        section("Settings", settings_tables(run)),
        section("Machine", machine_tables(run)),
        section("Command", command(run)),
        f"<footer>{notes}{again}</footer>",
    ]
    return document(run.name, parts)


# ---------------------------------------------------------------- how it ended


@dataclass(frozen=True)
class State:
    """How a run ended, or that it did not."""

    kind: str  # finished, stopped, failed, open
    text: str
    sentence: str


def state(run: Run) -> State:
    """From the verdict; without one from the last event."""
    outcome = run.verdict.get("outcome")
    event = run.history.last_event("finish", "stop", "nonfinite", "fail", "resume", "start") or {}
    last = event.get("event")
    if outcome == "ok" or (not outcome and last == "finish"):
        return State("finished", "finished", "")
    if outcome == "stopped" or (not outcome and last == "stop"):
        return State("stopped", "stopped", "It stopped on request, with a checkpoint written. "
                     "The same command goes on from there.")  # fmt: skip
    if outcome or last in ("nonfinite", "fail"):
        return State("failed", "failed", cause(run))
    return State("open", "no end recorded", "It is still running, or was cut off without a word.")


def cause(run: Run) -> str:
    """The verdict's sentence, or what the last bad event says."""
    if run.verdict.get("cause"):
        return str(run.verdict["cause"])
    event = run.history.last_event("nonfinite", "fail")
    if not event:
        return "No cause was recorded."
    more = ", ".join(f"{key} {plain(value)}" for key, value in event.items() if key not in ("step", "time", "event"))
    what = "A loss that is not finite" if event["event"] == "nonfinite" else "A failure"
    return f"{what} at step {figure(event['step'])}" + (f": {more}" if more else ".")


def heading(run: Run) -> str:
    """Name, state, and when and where it ran."""
    now = state(run)
    nodes = run.nodes if len(run.nodes) <= 3 else [run.nodes[0], "…", run.nodes[-1]]
    started = f"started {moment(run.start, run)}" if is_time(run.start) else ""
    facts = [started, ", ".join(nodes), f"by {run.about['user']}" if run.about.get("user") else ""]
    sentence = f'<p class="sentence">{escape(now.sentence)}</p>\n' if now.sentence and now.kind != "failed" else ""
    return (
        f'<header>\n<p class="eyebrow">Training run</p>\n<h1>{escape(run.name)}</h1>\n'
        f'<p class="facts"><span class="state {now.kind}">{now.text}</span>{spans(facts)}</p>\n{sentence}</header>'
    )


def failure(run: Run) -> str:
    """Why it failed, where, and the traceback; nothing for a run that did not fail."""
    now, verdict = state(run), run.verdict
    if now.kind != "failed":
        return ""
    time = number(verdict.get("time"))
    places = [
        *_place(verdict),
        f"exit code {plain(verdict['exit_code'])}" if verdict.get("exit_code") is not None else "",
        moment(time, run) if is_time(time) else "",
    ]
    error = ": ".join(str(verdict[key]) for key in ("exception", "message") if verdict.get(key))
    followed = []
    for fault in listed(verdict.get("collateral")):
        facts = mapping(fault)
        message = f": {plain(facts['message'])}" if facts.get("message") else ""
        followed.append(" ".join(_place(facts)) + message if facts else plain(fault))
    parts = [
        f'<p class="cause">{escape(now.sentence)}</p>',
        f'<p class="facts">{spans(places)}</p>',
        f"<pre>{escape(error)}</pre>" if error and error not in now.sentence else "",
        folded("Traceback", str(verdict.get("traceback") or "")),
        folded("What failed because of it", "\n".join(followed)),
    ]
    return f'<aside class="failure">\n{"".join(filter(None, parts))}\n</aside>'


def _place(fault: Mapping[str, Any]) -> list[str]:
    """rank 3, on node2; as far as known."""
    known = (("rank", fault.get("rank")), ("on", fault.get("node")))
    return [f"{word} {plain(value)}" for word, value in known if value is not None]


def moment(seconds: float, run: Run) -> str:
    """Unix seconds as date and time in the zone in which the run was started."""
    zone = run.started.tzinfo if run.started else timezone.utc
    return datetime.fromtimestamp(seconds, zone).strftime("%Y-%m-%d %H:%M:%S %Z")


# ---------------------------------------------------------------- tiles: one that is not known is left out


def training_tiles(run: Run) -> list[Tile]:
    """Losses, speed, and how far it came."""
    tiles: list[Tile] = []
    if losses := run.history.series("loss"):
        step, loss = losses[-1]
        shown = next((point for point in reversed(losses) if math.isfinite(point[1])), None)
        if shown and not math.isfinite(loss):
            tiles.append(("Training loss", "not finite", f"{loss_text(shown[1])} at step {figure(shown[0])}"))
        else:
            tiles.append(("Training loss", loss_text(loss), f"at step {figure(step)}"))
    if losses := run.history.held_out_losses():
        step, loss = losses[-1]
        best, when = min(((loss, step) for step, loss in losses if math.isfinite(loss)), default=(loss, step))
        note = f"best {loss_text(best)} at step {figure(when)}" if best < loss else f"at step {figure(step)}"
        tiles.append(("Held-out loss", loss_text(loss), note))
    if rates := finite(run.history.series("tokens_per_second")):
        rate = statistics.median(rates)
        note = f"{compact(rate / run.size)} a rank" if run.size > 1 else "median of the run"
        tiles.append(("Tokens per second", compact(rate), note))
    if lines := run.history.steps:
        step = lines[-1]["step"]
        planned = next((number(line["steps"]) for line in reversed(lines) if "steps" in line), math.nan)
        planned = planned if math.isfinite(planned) else number(run.setting("train", "steps"))
        tiles.append(("Steps", figure(step), f"of {figure(planned)}" if step <= planned < math.inf else "done"))
    return tiles


def run_tiles(run: Run) -> list[Tile]:
    """Time, processes, and size of the model."""
    tiles: list[Tile] = []
    times = [run.start, number(run.verdict.get("time")), *run.history.times(), *run.usage.attempts, run.usage.last]
    if len(times := [time for time in times if is_time(time)]) > 1:
        steps = finite(run.history.series("step_seconds"))
        note = f"{duration(statistics.median(steps))} a step" if steps else ""
        tiles.append(("Wall time", duration(max(times) - min(times)), note))
    if run.size:
        nodes = number(run.fact("world", "nodes"))
        count = int(nodes) if nodes > 0 else len(run.nodes)
        place = f"on {count} node{'s' * (count != 1)}" if count else ""
        means = [plain(run.fact("world", key)) for key in ("strategy", "backend", "device") if run.fact("world", key)]
        tiles.append(("Ranks", figure(run.size), ", ".join(filter(None, [place, *means]))))
    parameters = number(run.fact("model", "parameters"))
    if math.isfinite(parameters):
        layers, width = run.setting("model", "n_layer"), run.setting("model", "n_embd")
        shape = f"{plain(layers)} layers, width {plain(width)}" if layers and width else ""
        tiles.append(("Parameters", compact(parameters), shape))
    return tiles


def usage_tiles(run: Run) -> list[Tile]:
    """How busy the ranks were, and how much memory the largest of them needed."""
    tiles: list[Tile] = []
    if waits := [value for _, row in run.history.by_rank("wait_share") for value in row if math.isfinite(value)]:
        tiles.append(("Waiting", f"{statistics.fmean(waits):.0%}", "of a step, for the gradients of other ranks"))
    gpu, cpu = (finite(chain(*run.usage.of(kind).values())) for kind in ("gpu", "cpu"))
    if gpu:
        tiles.append(("GPU use", f"{statistics.fmean(gpu):.0%}", "mean of all samples"))
    elif cpu:
        tiles.append(("CPU", f"{statistics.fmean(cpu):.2f} cores", "a rank, mean of all samples"))
    for kind, title in (("memory", "Memory"), ("gpu_memory", "GPU memory")):
        peaks = {name: max(known) for name, points in run.usage.of(kind).items() if (known := finite(points))}
        if peaks:
            largest = max(peaks, key=lambda name: peaks[name])
            tiles.append((title, memory(peaks[largest]), f"largest sample, {largest}"))
    return tiles


def finite(points: Iterable[Point]) -> list[float]:
    """The values that are finite."""
    return [value for _, value in points if math.isfinite(value)]


def memory(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / 2**30:,.1f} GiB" if size > 0 else ""


# ---------------------------------------------------------------- charts

EVENTS = {
    "resume": ("resumed", "event"),
    "stop": ("stopped", "event"),
    "checkpoint": ("checkpoint", "checkpoint"),
    "nonfinite": ("not finite", "bad"),
    "fail": ("failed", "bad"),
}
VALUES = {  # of train.py, by key: title, unit, whether the axis begins at zero
    "lr": ("Learning rate", "", True),
    "grad_norm": ("Gradient norm", "before clipping", False),
    "tokens_per_second": ("Tokens per second", "all ranks", True),
}
USAGE = {  # kind: title, unit, factor
    "gpu": ("GPU use", "% of the time in which a kernel ran", 100.0),
    "gpu_memory": ("GPU memory", "GiB in use on the GPUs of a rank", 2.0**-30),
    "cpu": ("CPU", "cores, with the rank's children", 1.0),
    "memory": ("Memory", "GiB resident, with the rank's children", 2.0**-30),
    "output": ("Output", "kB a second", 1e-3),
}


def marks(history: History) -> list[Mark]:
    """What happened on the way. A start and a finish are seen without a mark."""
    known = [event for event in history.events if event["event"] not in ("start", "finish")]
    return [Mark(event["step"], *EVENTS.get(name := plain(event["event"]), (name, "event"))) for event in known]


def training_charts(run: Run, happened: Sequence[Mark], events: Sequence[Mark]) -> str:
    """Losses over the whole width, then the other values."""
    history = run.history
    earlier = [*earlier_lines(history, "loss"), *earlier_lines(history, "held_out_loss")]
    notes = ["nats a token"] if run.setup else []
    notes += ["dashed: earlier attempts"] if earlier else []
    notes += ["ticks on the axis: checkpoints"] if len(happened) > len(events) else []
    losses = earlier + charts.smoothed(Line("training", history.series("loss"), "train", "training"))
    losses.append(Line("held-out", history.held_out_losses(), "held-out", "held-out"))
    loss = ""
    if any(line.points for line in losses):
        loss = card("Loss", " · ".join(notes), charts.lines(losses, happened, notes=True))
    known = {*VALUES, "loss", "held_out_loss", "step_seconds"}
    others = [name for name in history.names() if name not in known and finite(history.series(name))]
    small = []
    for key in [*VALUES, *others[:MOST_CHARTS]]:
        if not (points := history.series(key)):
            continue
        title, unit, zero = VALUES.get(key, (key, "", False))
        line = Line(title.lower(), points, key.replace("_", "-") if key in VALUES else "value-line")
        drawn = earlier_lines(history, key) + ([line] if key == "lr" else charts.smoothed(line))
        small.append(card(title, unit, charts.lines(drawn, events, width=ranks.SMALL, height=190, zero=zero)))
    if not loss and not small:
        return '<p class="nothing">No metrics were logged. metrics.log(step, loss=...) of the kit adds them.</p>'
    return f"{loss}\n{side_by_side(small)}"


def earlier_lines(history: History, key: str) -> list[Line]:
    """What earlier attempts logged and later ones have done again, and runs that this one resumed from."""
    found = []
    for n, earlier in enumerate(history.earlier, 1):
        points = earlier.held_out_losses() if key == "held_out_loss" else earlier.series(key)
        found.append(Line(f"earlier attempt {n}", charts.smoothed(Line("", points, ""))[-1].points, "earlier"))
    return [line for line in found if line.points]


def waiting_chart(waits: Sequence[tuple[float, Sequence[float]]], events: Sequence[Mark]) -> str:
    """The share of a step that each rank waits; nothing where that was not measured."""
    if not any(math.isfinite(value) for _, row in waits for value in row):
        return ""
    by_rank = {
        f"rank {n}": charts.smooth([(step, row[n] * 100) for step, row in waits]) for n in range(len(waits[0][1]))
    }
    unit = "% of a step in which a rank has all its own gradients and waits for their sum over all ranks"
    return ranks.chart_of_ranks("Waiting for other ranks", unit, by_rank, events)


def usage_charts(run: Run) -> str:
    """What each rank used over time, through all attempts."""
    begin = min((time for time in (run.start, *run.usage.attempts) if is_time(time)), default=0.0)
    restarts = [Mark(time - begin, f"attempt {n}") for n, time in enumerate(run.usage.attempts, 1) if n > 1]
    small = []
    for kind, (title, unit, factor) in USAGE.items():
        by_rank = {
            name: [(time - begin, value * factor) for time, value in points]
            for name, points in run.usage.of(kind).items()
            if finite(points)
        }
        if by_rank:
            small.append(ranks.chart_of_ranks(title, unit, by_rank, restarts, width=ranks.SMALL, seconds=True))
    return side_by_side(small) if small else ""


def side_by_side(cards: Sequence[str]) -> str:
    return '<div class="three">\n' + "\n".join(cards) + "\n</div>"


# ---------------------------------------------------------------- tables


def settings_tables(run: Run) -> str:
    """All settings, a table for each section."""
    settings = mapping(run.setup.get("settings"))
    sections = {key: value for key, value in settings.items() if isinstance(value, Mapping)}
    return tables(sections | {"": {key: value for key, value in settings.items() if key not in sections}})


def machine_tables(run: Run) -> str:
    """What it ran on, and with which versions."""
    machine = dict(mapping(run.setup.get("machine")))
    machine["memory"] = memory(number(machine.pop("memory_bytes", None)))
    machine["gpus"] = ", ".join(f"{n} × {name}" for name, n in Counter(map(plain, listed(machine.get("gpus")))).items())
    machine = {**mapping(run.about.get("versions")), **machine}
    groups = {
        "machine of rank 0": {key: value for key, value in machine.items() if value not in (None, "")},
        "ranks": {**mapping(run.setup.get("world")), **({"node names": ", ".join(run.nodes)} if run.nodes else {})},
        "model": mapping(run.setup.get("model")),
    }
    return tables(groups)


def tables(groups: Mapping[str, Mapping[str, Any]]) -> str:
    """Names and values under their captions; a value that is not set is faint."""
    found = []
    for title, rows in groups.items():
        lines = ""
        for key, value in rows.items():
            text = '<span class="none">not set</span>' if value is None else escape(plain(value))
            lines += f"<tr><th><span>{escape(str(key))}</span></th><td>{text}</td></tr>"
        caption = f"<caption>{escape(title)}</caption>" if title else ""
        if lines:
            found.append(f'<table class="card">{caption}<tbody>{lines}</tbody></table>')
    return '<div class="tables">\n' + "\n".join(found) + "\n</div>" if found else ""


def command(run: Run) -> str:
    """The command as a person can paste it, and where it was given."""
    words = listed(run.about.get("command"))
    if not words:
        return ""
    cwd, git = run.about.get("cwd"), mapping(run.about.get("git"))
    changed = ", with uncommitted changes" if git.get("dirty") else ""
    places = [f"in {plain(cwd)}" if cwd else "", f"commit {plain(git['commit'])}{changed}" if git.get("commit") else ""]
    text = escape(shlex.join(map(plain, words)))
    return f'<pre class="command card">{text}</pre><p class="facts">{spans(places)}</p>'


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
    directory = options.cwd / options.run
    if not any((directory / name).is_file() for name in ("run.json", "metrics.jsonl")):
        try:
            directory = find(options.run, options.cwd, options.cwd / options.log_dir)
        except RunLookupError as error:
            sys.stderr.write(f"report.sh: {error}\nTry: report.sh --help\n")
            return 2
    try:
        print(write(directory))
    except OSError as error:
        sys.stderr.write(f"report.sh: {directory}: cannot write the report: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
