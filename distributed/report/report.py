"""Write RUN/report.html, a page with the outcome, charts and settings of a run.

The page can be written at any time, also during the run or after a failure: files may be missing, incomplete or of any
content. scripts/report.sh runs this module.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import math
import os
import re
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from distributed import metrics
from distributed.attempts import newest
from distributed.files import command_of, write_file
from distributed.records import integer, is_time, listed, mapping, node_changes, number, read_object, text
from distributed.report import charts, index, ranks
from distributed.report.charts import Line, Mark, compact
from distributed.report.history import MAX_EARLIER, History, Point, read_event_files, read_metrics
from distributed.report.page_parts import (
    Tile,
    anchor,
    card,
    document,
    folded,
    loss_text,
    plain,
    section,
    spans,
    tile_list,
)
from distributed.report.usage import Usage, read_usage
from distributed.runs import lookup
from distributed.runs.lookup import EXITED, REMOTE, RUNNING, RunLookupError, find, resolve
from distributed.terminal import duration, number_text
from distributed.trust import PRIVATE_DIRECTORY, foreign, make_directories, printable
from distributed.verdict.node_log import read_log

MAX_CHARTS = 24  # charts of values that a script has logged under its own names
MAX_LINES = 20  # of output
FILES = ("run.json", "metrics.jsonl")  # a directory with one of them belongs to a run or a job
MAX_LOGS = 64  # nodes with a link to their log
MAX_NAME = 28  # characters at a curve
MAX_RUNS = 20  # earlier runs of a run that was resumed several times


def write(run: Path, ended: bool = False) -> Path:
    """Write report.html to a run directory and return its path. Raises OSError.

    ended: the run has ended, although its launcher, which calls this function, still runs.
    """
    target, records = run / "report.html", read(run)
    write_file(target, page(replace(records, launcher=EXITED) if ended else records).encode(errors="replace"))
    return target


@dataclass(frozen=True)
class RunRecords:
    """The content of a run directory. Files that cannot be read count as empty."""

    name: str
    run_json: Mapping[str, Any]
    settings_json: Mapping[str, Any]
    verdict: Mapping[str, Any]  # verdict.json
    history: History
    usage: Usage
    notes: Sequence[str]  # about files that could not be read, and about nodes that joined or left
    nodes: Sequence[str]  # in the order of their node ranks
    started: datetime | None
    directory: Path  # absolute
    last_lines: Sequence[str] = ()  # of the output of the rank that failed
    origin: str = ""  # of the history, see metrics.ORIGINS; "": logged by the run
    launcher: str = EXITED  # its state, see runs.lookup

    def fact(self, section: str, key: str) -> Any:
        """A value of settings.json, or None."""
        return mapping(self.settings_json.get(section)).get(key)

    def setting(self, section: str, key: str) -> Any:
        """A value of the settings, or None."""
        return mapping(self.fact("settings", section)).get(key)

    @property
    def start(self) -> float:
        """Unix seconds of the launch; NaN if not recorded."""
        seconds = self.started.timestamp() if self.started else math.nan
        return seconds if is_time(seconds) else math.nan

    @property
    def live(self) -> bool:
        """Whether the run continues, as far as known."""
        return self.launcher == RUNNING or (self.launcher == REMOTE and not self.verdict)

    @property
    def size(self) -> int:
        """The number of ranks; 0 if not recorded."""
        known = number(self.fact("world", "size")), number(self.run_json.get("nproc"))
        return next((int(size) for size in known if size > 0), 0)


def read(directory: Path) -> RunRecords:
    """Read a run directory. Raises OSError if it does not exist."""
    directory = directory.resolve(strict=True)
    notes: list[str] = []
    run, settings = (read_object(directory / f"{name}.json", notes) for name in ("run", "settings"))
    verdict = read_object(Path(newest(directory), "verdict.json"), notes)
    notes += node_changes(run)
    found = Path(metrics.find(directory) or directory / "metrics.jsonl")
    history = read_metrics(found, notes)
    history.earlier = [*_resumed_from(directory, history), *history.earlier][-MAX_EARLIER:]
    started = None
    with contextlib.suppress(ValueError):
        started = datetime.fromisoformat(str(run.get("started")))
        started = started if started.tzinfo else started.replace(tzinfo=timezone.utc)
    launcher = EXITED
    with contextlib.suppress(OSError, OverflowError, TypeError, ValueError):  # not a run, or not of this version
        launcher = lookup.read(directory).launcher.state
    name, nodes = text(run.get("run")) or directory.name, [*map(str, listed(run.get("nodes")))]
    return RunRecords(
        name, run, settings, verdict, history, read_usage(directory), notes, nodes, started, directory,
        last_lines_of_failed(directory, verdict), metrics.ORIGINS[found.name], launcher,
    )  # fmt: skip


def last_lines_of_failed(directory: Path, verdict: Mapping[str, Any]) -> list[str]:
    """The last output lines of the failed rank, or of the failed program of a node, without the traceback."""
    node = text(verdict.get("node"))
    if not node or "/" in node:
        return []
    traceback = set(text(verdict.get("traceback")).splitlines())
    log = read_log(Path(newest(directory), f"node_{node}.log"), node)
    lines = [line.text for line in log.get(integer(verdict.get("rank")), [])]
    return [printable(line) for line in lines if line.strip() and line not in traceback][-MAX_LINES:]


def _resumed_from(directory: Path, history: History) -> list[History]:
    """The histories of the runs from which this run resumed, directly or indirectly, the oldest first."""
    found: list[History] = []
    seen = {directory}
    while event := next((event for event in history.events if event["event"] == "resume"), None):
        path = Path(str(event.get("run")))  # the directory of all runs may have been moved
        found_at = (
            one.resolve()
            for one in (path, directory.parent / path.name)
            if os.path.isdir(one) and not foreign(one, one.stat())
        )
        directory = next(found_at, directory)
        if directory in seen or len(seen) > MAX_RUNS:
            break
        seen.add(directory)
        history = read_metrics(directory / "metrics.jsonl", [])
        found[:0] = [*history.earlier, history]
    return found


def page(run: RunRecords) -> str:
    compute = run.history.by_rank("rank_seconds")
    compared = ranks.compare(compute, run.nodes)
    all_marks = event_marks(run.history)
    events = [mark for mark in all_marks if mark.style != "checkpoint"]
    notes = "".join(f"<p>{escape(note)}</p>" for note in run.notes)
    update = shlex.join([*command_of("report"), str(run.directory)])
    parts = [
        heading(run),
        failure(run),
        tile_list([*training_tiles(run), *run_tiles(run)]),
        ranks.warning(compared),
        section("Training", training_charts(run, all_marks, events)),
        section("Ranks", ranks.compute_chart(compute, compared, events) + waiting_chart(run.history, events)),
        section("Usage", usage_charts(run)),
        section("Settings", settings_tables(run)),
        section("Machine", machine_tables(run)),
        section("Command", command(run)),
        section("Logs", logs(run.directory)),
        f"<footer>{notes}<p>Update this page: <code>{escape(update)}</code></p></footer>",
    ]
    return document(run.name, parts, live=run.live)


OUTCOMES = {"finish": "ok", "stop": "stopped", "nonfinite": "failed", "fail": "failed"}  # event -> outcome


class Outcome(NamedTuple):
    """How a run ended."""

    kind: str  # finished, stopped, failed, running; open: no end is recorded
    sentence: str = ""


def outcome_of(run: RunRecords) -> Outcome:
    """Return the outcome according to the verdict; without a verdict, according to the last event."""
    event = run.history.last_event(*OUTCOMES, "resume", "start") or {}
    outcome, cause = run.verdict.get("outcome") or OUTCOMES.get(event.get("event", "")), run.verdict.get("cause")
    if outcome == "ok":
        return Outcome("finished")
    if outcome == "stopped":
        resume = "stopped on request, checkpoint written; run the same command again to resume"
        return Outcome("stopped", str(cause or resume))
    if not outcome and run.launcher == RUNNING:
        return Outcome("running", f"As of {moment(time.time(), run)}. This page is reloaded every 10 s.")
    if not outcome:
        return Outcome("open", "still running, or killed before it recorded its end")
    if cause:
        return Outcome("failed", str(cause))
    if not (event := run.history.last_event("nonfinite", "fail") or {}):
        return Outcome("failed", "No cause was recorded.")
    more = ", ".join(f"{key} {plain(value)}" for key, value in event.items() if key not in ("step", "time", "event"))
    problem = "Loss not finite" if event["event"] == "nonfinite" else "Failure"
    return Outcome("failed", f"{problem} at step {number_text(event['step'])}" + (f": {more}" if more else "."))


def heading(run: RunRecords) -> str:
    """Name, outcome, start, nodes and user."""
    kind, sentence = outcome_of(run)
    nodes = run.nodes if len(run.nodes) <= 3 else [run.nodes[0], "…", run.nodes[-1]]
    started = f"started {moment(run.start, run)}" if is_time(run.start) else ""
    facts = [started, ", ".join(nodes), f"by {run.run_json['user']}" if run.run_json.get("user") else ""]
    text = "no end recorded" if kind == "open" else kind
    below = f'<p class="sentence">{escape(sentence)}</p>\n' if sentence and kind != "failed" else ""
    return (
        f'<header>\n<p class="eyebrow">Training run</p>\n<h1>{escape(run.name)}</h1>\n'
        f'<p class="facts"><span class="state {kind}">{text}</span>{spans(facts)}</p>\n{below}</header>'
    )


def failure(run: RunRecords) -> str:
    """Cause, location and traceback of a failure; empty for other outcomes."""
    (kind, sentence), verdict = outcome_of(run), run.verdict
    if kind != "failed":
        return ""

    def location(failed: Mapping[str, Any]) -> list[str]:
        known = (("rank", failed.get("rank")), ("on", failed.get("node")))
        return [f"{prefix} {plain(value)}" for prefix, value in known if value is not None]

    code, time = verdict.get("exit_code"), number(verdict.get("time"))
    facts = [*location(verdict), "" if code is None else f"exit code {plain(code)}"]
    facts += [moment(time, run)] if is_time(time) else []
    error = ": ".join(str(verdict[key]) for key in ("exception", "message") if verdict.get(key))
    others = []
    for value in listed(verdict.get("collateral")):
        other = mapping(value)
        message = f": {plain(other['message'])}" if other.get("message") else ""
        others.append(" ".join(location(other)) + message if other else plain(value))
    parts = [
        f'<p class="cause">{escape(sentence)}</p>',
        f'<p class="facts">{spans(facts)}</p>',
        f"<pre>{escape(error)}</pre>" if error and error not in sentence else "",
        folded("Traceback", str(verdict.get("traceback") or ""), unfolded=True),
        folded("Last lines of its output", "\n".join(run.last_lines), unfolded=True),
        folded("Other failures", "\n".join(others)),
    ]
    return f'<aside class="failure">\n{"".join(parts)}\n</aside>'


def moment(seconds: float, run: RunRecords) -> str:
    """Unix seconds as date and time in the time zone of run.json."""
    zone = run.started.tzinfo if run.started else timezone.utc
    return datetime.fromtimestamp(seconds, zone).strftime("%Y-%m-%d %H:%M:%S %Z")


def training_tiles(run: RunRecords) -> Iterator[Tile]:
    """A tile for each known value: losses, throughput and steps."""
    history = run.history
    origin = f"{run.origin}, " * bool(run.origin)
    if losses := history.series("loss"):
        step, loss = losses[-1]
        shown = next((point for point in reversed(losses) if math.isfinite(point[1])), None)
        if shown and not math.isfinite(loss):
            yield "Training loss", "not finite", f"{loss_text(shown[1])} at step {number_text(shown[0])}"
        else:
            yield "Training loss", loss_text(loss), f"{origin}at step {number_text(step)}"
    if losses := history.held_out_losses():
        step, loss = losses[-1]
        best, best_step = min(((loss, step) for step, loss in losses if math.isfinite(loss)), default=(loss, step))
        note = (
            f"best {loss_text(best)} at step {number_text(best_step)}"
            if best < loss
            else f"at step {number_text(step)}"
        )
        yield "Held-out loss", loss_text(loss), note
    if rates := finite(history.series("tokens_per_second")):
        rate = statistics.median(rates)
        note = f"{compact(rate / run.size)} per rank" if run.size > 1 else "median of the run"
        yield "Tokens per second", compact(rate), note
    if lines := history.steps:
        step = lines[-1]["step"]
        planned = next((number(line["steps"]) for line in reversed(lines) if "steps" in line), math.nan)
        planned = planned if math.isfinite(planned) else number(run.setting("train", "steps"))
        yield (
            "Steps",
            number_text(step),
            origin
            + (
                f"of {number_text(planned)}"
                if step <= planned < math.inf
                else "done"
                if outcome_of(run).kind == "finished"
                else "so far"
            ),
        )


def run_tiles(run: RunRecords) -> Iterator[Tile]:
    """A tile for each known value: time, ranks, model and resource usage."""
    history, usage = run.history, run.usage
    times = [run.start, number(run.verdict.get("time")), *history.times(), *usage.attempts.values(), usage.last]
    if len(times := [time for time in times if is_time(time)]) > 1:
        seconds = finite(history.series("step_seconds"))
        note = f"{duration(statistics.median(seconds))} per step" if seconds else ""
        yield "Wall time", duration(max(times) - min(times)), note
    if run.size:
        nodes = number(run.fact("world", "nodes"))
        count = int(nodes) if nodes > 0 else len(run.nodes)
        nodes_text = f"on {count} node{'s' * (count != 1)}" if count else ""
        world = [plain(run.fact("world", key)) for key in ("strategy", "backend", "device") if run.fact("world", key)]
        yield "Ranks", number_text(run.size), ", ".join(filter(None, [nodes_text, *world]))
    parameters = number(run.fact("model", "parameters"))
    if math.isfinite(parameters):
        layers, width = run.setting("model", "n_layer"), run.setting("model", "n_embd")
        shape = f"{plain(layers)} layers, width {plain(width)}" if layers and width else ""
        yield "Parameters", compact(parameters), shape
    if waits := [value for _, row in history.by_rank("wait_share") for value in row if math.isfinite(value)]:
        yield "Waiting", f"{statistics.fmean(waits):.0%}", "of a step, for gradients of other ranks"
    gpu, cpu = (finite(chain(*usage.of(kind).values())) for kind in ("gpu", "cpu"))
    if gpu:
        yield "GPU use", f"{statistics.fmean(gpu):.0%}", "mean of all samples"
    elif cpu:
        yield "CPU", f"{statistics.fmean(cpu):.2f} cores", "per rank, mean of all samples"
    for kind, title in (("memory", "Memory"), ("gpu_memory", "GPU memory")):
        if peaks := {name: max(known) for name, points in usage.of(kind).items() if (known := finite(points))}:
            largest = max(peaks, key=lambda name: peaks[name])
            yield title, memory(peaks[largest]), f"largest sample, {largest}"


def finite(points: Iterable[Point]) -> list[float]:
    return [value for _, value in points if math.isfinite(value)]


def memory(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / 2**30:,.1f} GiB" if size > 0 else ""


# ---------------------------------------------------------------- charts

EVENTS = {  # event -> text and style of its mark
    "resume": ("resumed", "event"),
    "stop": ("stopped", "event"),
    "checkpoint": ("checkpoint", "checkpoint"),
    "nonfinite": ("not finite", "bad"),
    "fail": ("failed", "bad"),
}
VALUES = {  # key in metrics.jsonl -> title, unit, whether the y axis includes zero
    "lr": ("Learning rate", "", True),
    "grad_norm": ("Gradient norm", "before clipping", False),
    "tokens_per_second": ("Tokens per second", "all ranks", True),
    "mfu": ("Model FLOPs utilization (MFU)", "share of the GPUs' bf16 peak", True),
}
USAGE = {  # quantity -> title, unit, factor
    "gpu": ("GPU use", "% of the time in which a kernel ran", 100.0),
    "gpu_memory": ("GPU memory", "GiB in use on the GPUs of a rank", 2.0**-30),
    "cpu": ("CPU", "cores, including child processes", 1.0),
    "memory": ("Memory", "GiB resident, including child processes", 2.0**-30),
    "output": ("Output", "kB per second", 1e-3),
}


def event_marks(history: History) -> list[Mark]:
    """A mark for each event except start and finish."""
    known = [event for event in history.events if event["event"] not in ("start", "finish")]
    return [Mark(event["step"], *EVENTS.get(name := plain(event["event"]), (name, "event"))) for event in known]


def training_charts(run: RunRecords, all_marks: Sequence[Mark], events: Sequence[Mark]) -> str:
    """A wide chart of the losses, then small charts of the other values."""
    history = run.history
    earlier = [*earlier_lines(history, "loss"), *earlier_lines(history, "held_out_loss")]
    notes = ["nats per token"] if run.settings_json else []
    notes += [run.origin] if run.origin else []
    last = f"the last {MAX_EARLIER} " * (len(history.earlier) == MAX_EARLIER)
    notes += [f"dashed: {last}earlier attempts"] if earlier else []
    notes += ["ticks on the axis: checkpoints"] if len(all_marks) > len(events) else []
    losses = earlier + charts.smoothed(Line("training", history.series("loss"), "train", "training"))
    losses.append(Line("held-out", history.held_out_losses(), "held-out", "held-out"))
    loss = ""
    if any(line.points for line in losses):
        loss = card("Loss", " · ".join(notes), charts.lines(losses, all_marks, notes=True, buttons=True))
    known = {*VALUES, "loss", "held_out_loss", "step_seconds"}
    others = [name for name in history.names() if name not in known and finite(history.series(name))]
    small = []
    for key in [*VALUES, *others[:MAX_CHARTS]]:
        if not (points := history.series(key)):
            continue
        title, unit, zero = VALUES.get(key, (key, "", False))
        line = Line(title.lower(), points, key.replace("_", "-") if key in VALUES else "value-line")
        drawn = earlier_lines(history, key) + ([line] if key == "lr" else charts.smoothed(line))
        small.append(card(title, unit, charts.lines(drawn, events, width=ranks.SMALL, height=190, zero=zero)))
    if not loss and not small and run.live:
        return ""
    if not loss and not small:
        remedy = "Call metrics.log(step, loss=...), or describe the lines with steps by --progress REGEX."
        return f'<p class="nothing">No metrics were logged, and no step was found in the output. {remedy}</p>'
    return f"{loss}\n{side_by_side(small)}"


def earlier_lines(history: History, key: str) -> list[Line]:
    """The lines of earlier attempts, and of runs from which this run resumed."""
    found = []
    for n, earlier in enumerate(history.earlier, 1):
        points = earlier.held_out_losses() if key == "held_out_loss" else earlier.series(key)
        found.append(Line(f"earlier attempt {n}", charts.smoothed(Line("", points, ""))[-1].points, "earlier"))
    return [line for line in found if line.points]


def waiting_chart(history: History, events: Sequence[Mark]) -> str:
    """The share of a step that each rank waits; empty if not measured."""
    waits = history.by_rank("wait_share")
    if not any(math.isfinite(value) for _, row in waits for value in row):
        return ""
    by_rank = {
        f"rank {n}": charts.smooth([(step, row[n] * 100) for step, row in waits]) for n in range(len(waits[0][1]))
    }
    unit = "% of a step in which a rank has computed its gradients and waits for the all-reduce"
    return ranks.chart_of_ranks("Waiting for other ranks", unit, by_rank, events)


def usage_charts(run: RunRecords) -> str:
    """Resource usage of each rank over time."""
    begin = min((time for time in (run.start, *run.usage.attempts.values()) if is_time(time)), default=0.0)
    restarts = [Mark(time - begin, f"attempt {n}") for n, time in run.usage.attempts.items() if n > 1]
    small = []
    for kind, (title, unit, factor) in USAGE.items():
        by_rank = {
            name: [(time - begin, value * factor) for time, value in points]
            for name, points in run.usage.of(kind).items()
            if finite(points)
        }
        if any(len(points) > 1 for points in by_rank.values()):
            small.append(ranks.chart_of_ranks(title, unit, by_rank, restarts, width=ranks.SMALL, seconds=True))
    return side_by_side(small) if small else ""


def side_by_side(cards: Sequence[str]) -> str:
    return '<div class="three">\n' + "\n".join(cards) + "\n</div>"


# ---------------------------------------------------------------- tables


def settings_tables(run: RunRecords) -> str:
    """A table of settings for each section, and of the arguments of the script."""
    settings = mapping(run.settings_json.get("settings"))
    sections = {key: value for key, value in settings.items() if isinstance(value, Mapping)}
    others = {key: value for key, value in settings.items() if key not in sections}
    return tables({**sections, "": others, "arguments of the script": script_arguments(run)})


def script_arguments(run: RunRecords) -> dict[str, str]:
    """The options and other arguments of the script; {} if it recorded settings.

    An option has the value that follows it, or "set"; --lr 0.1, --lr=0.1 and lr=0.1 are the same.
    """
    found: dict[str, str] = {}
    option = ""
    for argument in map(plain, listed(run.run_json.get("arguments")) if not run.settings_json else ()):
        name, equals, value = argument.partition("=")
        if re.fullmatch(r"--?[A-Za-z][\w.-]*" if not equals else r"(--?)?[A-Za-z][\w.-]*", name):
            found[name.lstrip("-")] = value if equals else "set"
            option = "" if equals else name.lstrip("-")
        else:
            found[option or f"argument {sum(key.startswith('argument ') for key in found) + 1}"] = argument
            option = ""
    return found


def machine_tables(run: RunRecords) -> str:
    """Machine, versions, ranks and model."""
    machine = dict(mapping(run.settings_json.get("machine")))
    machine["memory"] = memory(number(machine.pop("memory_bytes", None)))
    machine["gpus"] = ", ".join(f"{n} × {name}" for name, n in Counter(map(plain, listed(machine.get("gpus")))).items())
    machine = {**mapping(run.run_json.get("versions")), **machine}
    world, model = (mapping(run.settings_json.get(key)) for key in ("world", "model"))
    return tables({
        "machine of rank 0": {key: value for key, value in machine.items() if value not in (None, "")},
        "ranks": {**world, **({"node names": ", ".join(run.nodes)} if run.nodes else {})},
        "model": model,
    })  # fmt: skip


def tables(groups: Mapping[str, Mapping[str, Any]]) -> str:
    """A table of names and values for each caption; "not set" stands for None."""
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


def command(run: RunRecords) -> str:
    """The command line, quoted for a shell, with its working directory and commit."""
    arguments = listed(run.run_json.get("command"))
    if not arguments:
        return ""
    cwd, git = run.run_json.get("cwd"), mapping(run.run_json.get("git"))
    changed = ", with uncommitted changes" if git.get("dirty") else ""
    facts = [f"in {plain(cwd)}" if cwd else "", f"commit {plain(git['commit'])}{changed}" if git.get("commit") else ""]
    text = escape(shlex.join(map(plain, arguments)))
    return f'<pre class="command card">{text}</pre><p class="facts">{spans(facts)}</p>'


def logs(directory: Path) -> str:
    """Links to the logs of a run."""
    names = [path.name for path in sorted(directory.glob("node_*.log"))[:MAX_LOGS]]
    names += [name for name in ("launcher.log", "attempts") if (directory / name).exists()]
    links = "".join(f"<span>{anchor(name, name)}</span>" for name in names)
    return f'<p class="facts">{links}</p>' if links else ""


# ---------------------------------------------------------------- several runs

STYLES = [f"rank{n}{dashes}" for dashes in ("", " dashed") for n in range(ranks.MAX_COLOURED)]  # of runs


def compare(runs: Sequence[RunRecords], target: Path) -> Path:
    """Write a page with the outcomes of runs, the settings that differ, and their curves. Raises OSError."""
    facts = [
        {"Outcome": outcome.kind, "Verdict": "ok" if outcome.kind == "finished" else outcome.sentence}
        | {name: value for name, value, _ in (*training_tiles(run), *run_tiles(run))}
        | ({"Metrics": run.origin} if run.origin else {})
        for run, outcome in ((run, outcome_of(run)) for run in runs)
    ]
    settings = [all_settings(run) for run in runs]
    differing = [{k: v for k, v in one.items() if any(v != other.get(k) for other in settings)} for one in settings]
    names = curve_names(runs, differing)
    parts = [
        f'<header>\n<p class="eyebrow">Comparison</p>\n<h1>{len(runs)} runs</h1>\n</header>',
        section("Outcomes", comparison_table(runs, target, facts)),
        section("Settings that differ", comparison_table(runs, target, differing) if any(differing) else ""),
        section("Over steps", comparison_charts(runs, names, seconds=False)),
        section("Over time", comparison_charts(runs, names, seconds=True)),
    ]
    write_file(target, document(f"{len(runs)} runs", parts).encode(errors="replace"))
    return target


def all_settings(run: RunRecords) -> dict[str, str]:
    """The command, config, commit and versions of a run, and its settings. Keys have the form section.key."""
    sections = {"run": {key: run.run_json.get(key) for key in ("config", "git", "versions")}}
    if "arguments" not in run.run_json:
        sections["run"]["command"] = shlex.join(map(plain, listed(run.run_json.get("command"))))
    sections |= mapping(run.settings_json.get("settings"))
    known = {f"{name}.{key}": plain(value) for name in sections for key, value in mapping(sections[name]).items()}
    return known | script_arguments(run)


def curve_names(runs: Sequence[RunRecords], differing: Sequence[Mapping[str, str]]) -> list[str]:
    """What differs, such as lr=0.1; the names of the runs if short texts of that kind are not different."""
    keys = [key for key in dict.fromkeys(chain(*differing)) if not key.startswith("run.")]
    for count in range(1, len(keys) + 1):
        names = [" ".join(f"{k.rpartition('.')[2]}={one[k]}" for k in keys[:count] if k in one) for one in differing]
        if len({*names, ""}) > len(runs) and max(map(len, names)) <= MAX_NAME:
            return names
    return [run.name if len(run.name) <= 18 else f"…{run.name[-16:]}" for run in runs]


def comparison_table(runs: Sequence[RunRecords], target: Path, columns: Sequence[Mapping[str, str]]) -> str:
    """A column for each run. target: path of the page, which has links to the reports of the runs."""
    rows = "<th></th>"
    for n, run in enumerate(runs):
        link = anchor(os.path.relpath(run.directory / "report.html", target.parent), run.name)
        dot = f'<span class="{STYLES[n % len(STYLES)]}">{"●○"[n // ranks.MAX_COLOURED % 2]}</span>'
        rows += f"<th>{dot} {link}</th>"
    for key in dict.fromkeys(key for column in columns for key in column):
        cells = "".join(f'<td class="text">{escape(column.get(key, "–"))}</td>' for column in columns)
        rows += f'</tr>\n<tr><td class="text">{escape(key)}</td>{cells}'
    return f'<div class="scroll card"><table class="jobs"><tr>{rows}</tr></table></div>'


def comparison_charts(runs: Sequence[RunRecords], names: Sequence[str], seconds: bool) -> str:
    """A wide chart of the training losses, and small charts of other values. seconds: over time instead of steps."""
    known = {"loss": ("Training loss", "", False), "held_out_loss": ("Held-out loss", "", False), **VALUES}
    others = [name for run in runs for name in run.history.names() if name not in known]
    cards: dict[int, list[str]] = {1032: [], ranks.SMALL: []}  # by width
    for key in [*known, *[*dict.fromkeys(others)][:MAX_CHARTS]]:
        title, unit, zero = known.get(key, (key, "", False))
        width, height = (1032, 320) if key == "loss" else (ranks.SMALL, 190)
        drawn = []
        for n, (run, name) in enumerate(zip(runs, names, strict=True)):
            logged = [line for line in (*run.history.steps, *run.history.held_out) if key in line]
            start = min(filter(is_time, (run.start, *run.history.times())), default=math.nan)
            xs = [number(line.get("time")) - start if seconds else line["step"] for line in logged]
            points = sorted((x, number(line[key])) for x, line in zip(xs, logged, strict=True) if math.isfinite(x))
            label = name if key == "loss" and len(runs) <= ranks.MAX_LINES else ""
            drawn += [Line(name, charts.smooth(points), STYLES[n % len(STYLES)], label)] if finite(points) else []
        if drawn:
            drawing = charts.lines(drawn, width=width, height=height, zero=zero, seconds=seconds, buttons=key == "loss")
            cards[width].append(card(title, unit, drawing))
    return "\n".join([*cards[1032], side_by_side(cards[ranks.SMALL])]) if any(cards.values()) else ""


def directories(argument: str, cwd: Path, logs: Path) -> list[Path]:
    """The directories of runs, or of jobs, that a RUN or a shell pattern names. Raises RunLookupError."""
    for base in (cwd, logs):
        named = [base / name for name in sorted(glob.glob(argument, root_dir=base))]
        if found := [resolve(one) for one in named if any(os.path.isfile(one / name) for name in FILES)]:
            break
    else:
        found = [find(argument, cwd, logs)]
    for directory in found:
        if problem := foreign(directory, directory.stat()):
            raise RunLookupError(problem)
    return found


def main(arguments: Sequence[str]) -> int:
    """Write the report and print its path. Returns 2 if there is no such run, 1 if the report cannot be written."""
    parser = argparse.ArgumentParser(
        prog="report.sh", allow_abbrev=False, description="Write RUN/report.html, a page about the run."
    )
    parser.add_argument("--all", action="store_true", help="write a page with all runs instead")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directory or name of a run, pattern, or SLURM job")
    parser.add_argument("--from", type=Path, default=Path(), dest="cwd", metavar="DIR", help="base of relative paths")
    parser.add_argument("--log-dir", type=Path, default=Path("logs"), metavar="DIR", help="the directory of all runs")
    options = parser.parse_args(arguments)
    logs = options.cwd / options.log_dir
    try:
        if options.all:
            print(index.write(logs, options.cwd))
            return 0
        found = [*dict.fromkeys(one for argument in options.runs for one in directories(argument, options.cwd, logs))]
    except RunLookupError as error:
        sys.stderr.write(f"report.sh: {printable(str(error))}\nTry: report.sh --help\n")
        return 2
    try:
        for run in found:
            read_event_files(run)
        if len(found) == 1:
            page = write(found[0])
        else:
            make_directories(str(logs), PRIVATE_DIRECTORY)
            page = compare([*map(read, found)], logs / "comparison.html")
        print(page)
    except OSError as error:
        sys.stderr.write(f"report.sh: cannot write the report: {error}\n")
        return 1
    return 0
