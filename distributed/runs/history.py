"""What a run left behind, as values: its files read, its steps in order, its ranks compared.

    run = read(Path("logs/latest"))
    run.history.series("loss")    ->  [(10.0, 2.31), (20.0, 2.2), ...]
    compare(run, run.history.rank_seconds())  ->  [Rank(rank=0, host="node1", median=0.05, ...), ...]

Every file may be missing, cut short or not what it should be: what cannot be read is left out and named in
`notes`. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone, tzinfo
from itertools import pairwise
from pathlib import Path
from typing import Any

Point = tuple[float, float]  # step, value; the value is NaN where it was none

SLOW = 1.15  # a rank that needs this many times the median of all ranks is a straggler
NO_VALUES = {"step", "time", "steps", "event", "rank_seconds", "wait_share"}  # keys of lines
MOST_RUNS = 20  # that are followed from one to the one that it resumed from
BOUND = 1e100  # beyond it a number is as good as infinite: sums and scales stay finite below it


@dataclass
class History:
    """The lines of metrics.jsonl that still count, each kind by rising step."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    held_out: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)  # in the order of the file
    earlier: list[History] = field(default_factory=list)  # what later attempts have done again; runs resumed from

    def add(self, line: dict[str, Any]) -> None:
        """Take the next line of the file. Going back to a step, a resumed run takes back what came after it."""
        step = line["step"]
        if "event" in line:
            self.events.append(line)
            if line["event"] == "resume":
                self._go_back_to(step)
            return
        if "held_out_loss" in line:
            _append(self.held_out, line)
        if keys := line.keys() - {"step", "time", "steps", "held_out_loss"}:
            before = next((one for one in reversed(self.steps) if not keys.isdisjoint(one)), None)
            if before and before["step"] > step:
                self._go_back_to(step)
            same = bisect_left(self.steps, step, key=_step)
            self.steps[same:] = [one for one in self.steps[same:] if one["step"] > step or keys.isdisjoint(one)]
            insort(self.steps, line, key=_step)  # another program may log an earlier step late

    def _go_back_to(self, step: float) -> None:
        undone = History()
        for lines, others in ((self.steps, undone.steps), (self.held_out, undone.held_out)):
            keep = bisect_right(lines, step, key=_step)
            if keep < len(lines):
                others += lines[max(0, keep - 1) :]  # from where the two part
                del lines[keep:]
        if undone.steps or undone.held_out:
            self.earlier.append(undone)

    def names(self) -> list[str]:
        """Of all values, in the order in which they were first logged."""
        return list(dict.fromkeys(key for line in self.steps for key in line if key not in NO_VALUES))

    def series(self, key: str) -> list[Point]:
        """The values of one key over steps."""
        return [(line["step"], number(line[key])) for line in self.steps if key in line]

    def held_out_losses(self) -> list[Point]:
        """Held-out loss over steps, in nats a token."""
        return [(line["step"], number(line["held_out_loss"])) for line in self.held_out]

    def rank_seconds(self) -> list[tuple[float, list[float]]]:
        """Each rank's own compute seconds over steps, of as many ranks as the run last had."""
        return self._of_ranks("rank_seconds")

    def waiting(self) -> list[tuple[float, list[float]]]:
        """The share of a step in which each rank waits for the gradients of others, over steps, as rank_seconds()."""
        return self._of_ranks("wait_share")

    def _of_ranks(self, key: str) -> list[tuple[float, list[float]]]:
        lines = [(line["step"], line[key]) for line in self.steps if _is_list(line, key)]
        size = len(lines[-1][1]) if lines else 0
        return [(step, [number(value) for value in values]) for step, values in lines if len(values) == size]

    def last_event(self, *names: str) -> dict[str, Any] | None:
        """The newest event of one of these names."""
        return next((event for event in reversed(self.events) if event["event"] in names), None)

    def span(self) -> tuple[float, float] | None:
        """Unix seconds of the first and the last line that say when they were written."""
        lines = (*self.steps, *self.held_out, *self.events)
        times = [time for line in lines if math.isfinite(time := number(line.get("time")))]
        return (min(times), max(times)) if times else None


def _step(line: Mapping[str, Any]) -> float:
    step: float = line["step"]
    return step


def _append(lines: list[dict[str, Any]], line: dict[str, Any]) -> None:
    while lines and lines[-1]["step"] >= line["step"]:
        lines.pop()
    lines.append(line)


def _is_list(line: Mapping[str, Any], key: str) -> bool:
    return isinstance(line.get(key), list) and bool(line[key])


@dataclass(frozen=True)
class Run:
    """One run folder."""

    name: str
    about: dict[str, Any]  # run.json
    setup: dict[str, Any]  # settings.json
    verdict: dict[str, Any]
    history: History
    notes: list[str]  # what could not be read
    usage: Usage

    def fact(self, section: str, key: str) -> Any:
        """A value of settings.json, or None."""
        return mapping(self.setup.get(section)).get(key)

    def setting(self, section: str, key: str) -> Any:
        """A value of the settings, or None."""
        return mapping(mapping(self.setup.get("settings")).get(section)).get(key)

    @property
    def nodes(self) -> list[str]:
        """The hosts that were asked for, in the order of their node ranks."""
        nodes = self.about.get("nodes")
        return [str(node) for node in nodes] if isinstance(nodes, list) else []

    def host_of(self, rank: int, size: int) -> str | None:
        """The host of a rank where every node runs as many ranks as the others."""
        each = size // len(self.nodes) if self.nodes else 0
        return self.nodes[rank // each] if each and each * len(self.nodes) == size else None

    def seconds(self) -> float | None:
        """From the launch, or the first line that says when, to the last sign of life."""
        span = self.history.span()
        known = (started(self), number(self.verdict.get("time")), *(span or ()), *self.usage.attempts, self.usage.last)
        signs = [time for time in known if is_time(time)]
        return max(signs) - min(signs) if len(signs) > 1 else None


def started(run: Run) -> float:
    """Unix seconds of the launch; NaN when nobody wrote it down."""
    launch = _launch(run)
    return launch.timestamp() if launch else math.nan


def zone(run: Run) -> tzinfo:
    """The zone in which the launch was written down, else UTC."""
    return getattr(_launch(run), "tzinfo", None) or timezone.utc


def _launch(run: Run) -> datetime | None:
    try:
        launch = datetime.fromisoformat(str(run.about.get("started")))
    except ValueError:
        return None
    return launch if launch.tzinfo else launch.replace(tzinfo=timezone.utc)


def is_time(value: float) -> bool:
    """Whether a calendar knows these Unix seconds."""
    return math.isfinite(value) and 0 < value < 253_000_000_000


# ---------------------------------------------------------------- reading


def read(folder: Path) -> Run:
    """Read a run folder. Raises OSError when the folder itself cannot be read."""
    folder = folder.resolve(strict=True)
    notes: list[str] = []
    about, setup, verdict = (_object(folder / name, notes) for name in ("run.json", "settings.json", "verdict.json"))
    history = read_metrics(folder / "metrics.jsonl", notes)
    history.earlier[:0] = _runs_before(folder, history)
    name = about.get("run")
    return Run(
        name if isinstance(name, str) and name else folder.name,
        about,
        setup,
        verdict,
        history,
        notes,
        read_usage(folder),
    )


def _runs_before(folder: Path, history: History) -> list[History]:
    """Of a run that resumed from the checkpoint of another one: what that one logged, and so on, the oldest first."""
    found: list[History] = []
    seen = {folder}
    while event := next((event for event in history.events if event.get("event") == "resume"), None):
        place = Path(str(event.get("run")))
        folder = next((path.resolve() for path in (place, folder.parent / place.name) if path.is_dir()), folder)
        if folder in seen or len(seen) > MOST_RUNS:
            break
        seen.add(folder)
        history = read_metrics(folder / "metrics.jsonl", [])
        found[:0] = [*history.earlier, history]
    return found


def _object(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read and is left out: {error}")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name} is left out: expected an object, got a {type(value).__name__}")
        return {}
    return value


def read_metrics(path: Path, notes: list[str], most: int = 0) -> History:
    """The lines of a metrics.jsonl; what cannot be read is named in `notes`.

    most: of a longer file, read about so many lines of each kind (steps, held-out losses, events), evenly spread.
    """
    history, faulty, cut = History(), 0, False
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for text in _spread(list(lines), most, path.name, notes) if most else lines:
                line = _line(text)
                faulty, cut = faulty + (line is None), line is None and not text.endswith("\n")
                if line:
                    history.add(line)
    except FileNotFoundError:
        pass
    except OSError as error:
        notes.append(f"{path.name} cannot be read further: {error.strerror}")
    if faulty - cut:  # a last line without an end is a run that was cut off, and no fault
        wrong = "1 line holds" if faulty - cut == 1 else f"{faulty - cut} lines hold"
        notes.append(f"{path.name}: {wrong} no object with a step: left out")
    return history


def _spread(lines: list[str], most: int, name: str, notes: list[str]) -> list[str]:
    """At most about `most` lines of each kind, the last of each among them."""
    if len(lines) <= most:
        return lines
    kinds: dict[tuple[bool, ...], list[int]] = {}
    for n, text in enumerate(lines):
        kinds.setdefault(('"event"' in text, '"held_out_loss"' in text), []).append(n)
    kept = {n for kind in kinds.values() for n in (*kind[:: math.ceil(len(kind) / most)], kind[-1])}
    if len(kept) < len(lines):
        notes.append(f"{name}: {len(kept):,} of {len(lines):,} lines are shown, evenly spread")
    return [lines[n] for n in sorted(kept)]


def _line(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(line, dict) and "steps" in line and "step" not in line:
        return {}  # the number of steps that are planned
    if not isinstance(line, dict) or not abs(step := number(line.get("step"))) < 2**53:
        return None
    return line | {"step": step}


def number(value: Any) -> float:
    """A float; NaN for what is no number, infinite, or as good as infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value) if -BOUND < value < BOUND else math.nan


def mapping(value: Any) -> Mapping[str, Any]:
    """The value where it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


# ---------------------------------------------------------------- what the ranks used

SAMPLES = 200  # of each rank and attempt are enough for a chart


@dataclass
class Usage:
    """What each rank used over time, sampled beside it; see distributed/launch/usage.py."""

    attempts: list[float] = field(default_factory=list)  # Unix seconds of the first sample of each
    last: float = math.nan  # Unix seconds of the last sample of all
    # Over Unix seconds, by what is measured and by "rank 3" (or "node1 GPU 0", where its rank is not known):
    # "cpu" (cores), "memory" (bytes), "output" (bytes a second), "gpu" (share of time), "gpu_memory" (bytes).
    series: dict[str, dict[str, list[Point]]] = field(default_factory=dict)

    def of(self, kind: str) -> dict[str, list[Point]]:
        return self.series.get(kind, {})

    def add(self, kind: str, name: str, points: Sequence[Point]) -> None:
        """The next attempt's. Between two attempts is a gap."""
        line = self.series.setdefault(kind, {}).setdefault(name, [])
        line += [(points[0][0], math.nan)] * bool(line and points) + [*points]


def read_usage(folder: Path) -> Usage:
    """All attempts of a run, the oldest first. A sample that cannot be read is left out."""
    usage = Usage()
    attempts = sorted(folder.glob("try_*"), key=lambda path: (len(path.name), path.name))
    for attempt in [*attempts, folder]:
        about = _object(attempt / "run.json", [])
        places = [mapping(place) for place in about.get("places") or [] if isinstance(about.get("places"), list)]
        first = {str(place.get("node")): number(place.get("first_rank")) for place in places}
        times = []
        for path in sorted(attempt.glob("node_*.samples.jsonl")):
            node = path.name.removeprefix("node_").removesuffix(".samples.jsonl")
            if samples := _samples(path):
                times += [sample["time"] for sample in samples]
                _add_ranks(usage, node, first.get(node, math.nan), samples)
                _add_gpus(usage, node, first.get(node, math.nan), samples)
        if times:
            usage.attempts.append(min(times))
            usage.last = max(times)
    return usage


def _samples(path: Path) -> list[Mapping[str, Any]]:
    """Those that say when they were taken, evenly spread."""
    found: list[Mapping[str, Any]] = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                sample = mapping(json.loads(line))
                if is_time(number(sample.get("time"))) and not (found and sample["time"] <= found[-1]["time"]):
                    found.append(sample)
    return found[:: math.ceil(len(found) / SAMPLES) or 1]


def _name(node: str, first: float, local_rank: Any) -> str:
    """Of a rank, as far as its number is known."""
    known = math.isfinite(first) and str(local_rank).isdecimal()
    return f"rank {int(first) + int(local_rank)}" if known else f"{node} rank {local_rank}"


def _add_ranks(usage: Usage, node: str, first: float, samples: Sequence[Mapping[str, Any]]) -> None:
    by_rank: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
    for sample in samples:
        for rank, values in mapping(sample.get("ranks")).items():
            by_rank.setdefault(rank, []).append((sample["time"], mapping(values)))
    for rank, values in sorted(by_rank.items(), key=lambda item: (len(item[0]), item[0])):
        name = _name(node, first, rank)
        usage.add("memory", name, [(time, number(one.get("memory"))) for time, one in values])
        for kind in ("cpu", "output"):
            counts = [(time, number(one.get(kind))) for time, one in values]
            rates = [(b, (y - x) / (b - a)) for (a, x), (b, y) in pairwise(counts)]
            rates = [(time, 0.0 if rate < 0 else rate) for time, rate in rates]  # a child has ended unseen
            if rates:
                usage.add(kind, name, rates)


def _add_gpus(usage: Usage, node: str, first: float, samples: Sequence[Mapping[str, Any]]) -> None:
    """A GPU belongs to the rank that computes on it; where none is known on this node, it has its own name."""
    seen = [
        (sample["time"], index, mapping(gpu))
        for sample in samples
        for index, gpu in mapping(sample.get("gpus")).items()
    ]
    known = any(gpu.get("ranks") for _, _, gpu in seen)
    lines: dict[tuple[str, str], dict[float, list[float]]] = {}
    for time, index, gpu in seen:
        ranks = gpu.get("ranks")
        names = [_name(node, first, rank) for rank in ranks] if isinstance(ranks, list) else []
        for name in names if known else [f"{node} GPU {index}"]:
            lines.setdefault(("gpu", name), {}).setdefault(time, []).append(number(gpu.get("use")) / 100)
            lines.setdefault(("gpu_memory", name), {}).setdefault(time, []).append(number(gpu.get("memory")))
    for (kind, name), values in lines.items():
        join = math.fsum if kind == "gpu_memory" else statistics.fmean
        usage.add(kind, name, [(time, join(several)) for time, several in values.items()])


# ---------------------------------------------------------------- the ranks compared


@dataclass(frozen=True)
class Rank:
    """How long one rank computes in a step, in seconds, before it waits for the others."""

    rank: int
    host: str | None
    median: float  # over all logged steps
    low: float  # of ten logged steps one is faster
    high: float  # of ten logged steps one is slower
    ratio: float  # its median through the lower median of all ranks: of two, through that of the faster one
    slow: bool  # whether the others wait for this one


def compare(run: Run, rows: Sequence[tuple[float, Sequence[float]]]) -> list[Rank]:
    """The ranks of a run that have a finite time in `rows` (see History.rank_seconds), by rank."""
    by_rank = zip(*(seconds for _, seconds in rows), strict=True)
    columns = [sorted(filter(math.isfinite, column)) for column in by_rank]
    medians = [statistics.median(column) for column in columns if column]
    return [_rank(run, rank, columns, medians) for rank, column in enumerate(columns) if column]


def _rank(run: Run, rank: int, columns: Sequence[Sequence[float]], medians: Sequence[float]) -> Rank:
    seconds, usual = columns[rank], statistics.median_low(medians)
    median = statistics.median(seconds)
    low, high = (seconds[round(share * (len(seconds) - 1))] for share in (0.1, 0.9))
    ratio = median / usual if usual > 0 else math.nan
    slow = median > SLOW * statistics.median(medians) > 0
    return Rank(rank, run.host_of(rank, len(columns)), median, low, high, ratio, slow)


def stragglers(ranks: Iterable[Rank]) -> list[Rank]:
    """The slow ones, the slowest first."""
    return sorted((rank for rank in ranks if rank.slow), key=lambda rank: -rank.ratio)


def fold(numbers: Iterable[int]) -> str:
    """0-3, 7: rising numbers as people write them."""
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in _stretches(numbers))


def _stretches(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    first = last = None
    for value in numbers:
        if first is None or last is None:
            first = value
        elif value != last + 1:
            yield first, last
            first = value
        last = value
    if first is not None and last is not None:
        yield first, last
