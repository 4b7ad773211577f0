"""Read metrics.jsonl. When a restart or a resumed run repeats steps, their earlier lines are kept apart.

The file may be missing, incomplete or of any content.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import Any

from distributed.files import KIT
from distributed.metrics import MAX_METRICS, MAX_READ, RESERVED, STEP_LIMIT, last_lines
from distributed.records import is_time, listed, number

EVENT_FILES_TIMEOUT = 60.0  # seconds
MAX_LINES = 20_000  # of one file
BYTES = 1000  # of a line, on average
LONGEST_TEXT = 4096  # characters, as in a path
MAX_EARLIER = 20  # attempts whose replaced lines are kept, the last ones
SHORTEST = len('{"step":0}')  # no shorter line is valid
VALUES = b"0123456789.eE+-, \t\r\n"  # what may differ between lines of one kind
GOLDEN_RATIO = (math.sqrt(5) + 1) / 2
NOT_PLOTTED = {"step", "time", "steps", "held_out_loss"}

Point = tuple[float, float]  # step, value; the value is NaN if it was not a number
RankValues = list[tuple[float, list[float]]]  # step, a value of each rank
MetricsLine = dict[str, Any]


@dataclass
class History:
    """The valid lines of metrics.jsonl, sorted by step."""

    steps: list[MetricsLine] = field(default_factory=list)
    held_out: list[MetricsLine] = field(default_factory=list)
    events: list[MetricsLine] = field(default_factory=list)  # not sorted: in the order of the file
    earlier: list[History] = field(default_factory=list)  # replaced lines, and runs from which this run resumed
    _lines_of: dict[str, list[MetricsLine]] = field(default_factory=dict, repr=False, compare=False)  # key -> its steps

    def add(self, line: MetricsLine) -> None:
        """Add the next line of the file. Lines of one step are joined: the last value of a key counts, except null.

        A run that resumes at a step replaces the lines after that step.
        """
        step = line["step"]
        if "event" in line:
            self.events.append(line)
            if line["event"] == "resume":
                self._go_back_to(step)
            return
        if "held_out_loss" in line:
            while self.held_out and self.held_out[-1]["step"] >= step:
                self.held_out.pop()
            self.held_out.append(line)
        if keys := line.keys() - NOT_PLOTTED:
            of_keys = [self._lines_of.setdefault(key, []) for key in keys]
            if any(lines and lines[-1]["step"] > step for lines in of_keys):
                self._go_back_to(step)
            at = bisect_left(self.steps, step, key=_step)  # not always the end: other keys may have higher steps
            if at == len(self.steps) or self.steps[at]["step"] != step:
                self.steps.insert(at, {"step": step})
            joined = self.steps[at]
            for key, lines in zip(keys, of_keys, strict=True):
                if key not in joined:
                    lines.append(joined)
            joined |= {key: value for key, value in line.items() if value is not None or key not in joined}

    def _forget(self, lines: Iterable[MetricsLine]) -> None:
        for line in lines:
            for key in line.keys() & self._lines_of.keys():
                of_key = self._lines_of[key]
                del of_key[bisect_left(of_key, line["step"], key=_step)]

    def _go_back_to(self, step: float) -> None:
        undone = History()
        self._forget(reversed(self.steps[bisect_right(self.steps, step, key=_step) :]))  # from the ends of the lists
        for lines, others in ((self.steps, undone.steps), (self.held_out, undone.held_out)):
            keep = bisect_right(lines, step, key=_step)
            if keep < len(lines):
                others += lines[max(0, keep - 1) :]  # with the last common step
                del lines[keep:]
        if undone.steps or undone.held_out:
            self.earlier = [*self.earlier[1 - MAX_EARLIER :], undone]

    def names(self) -> list[str]:
        """The names of all logged values, in the order of their first line."""
        keys = dict.fromkeys(key for line in self.steps for key in line)
        return [key for key in keys if key not in ("step", "steps", *RESERVED)]

    def series(self, key: str) -> list[Point]:
        """The values of one key over steps."""
        return [(line["step"], number(line[key])) for line in self.steps if key in line]

    def held_out_losses(self) -> list[Point]:
        """Held-out loss over steps, in nats per token."""
        return [(line["step"], number(line["held_out_loss"])) for line in self.held_out]

    def by_rank(self, key: str) -> RankValues:
        """A value of each rank over steps. Steps with another number of ranks than the last step are left out.

        key: "rank_seconds", the seconds that a rank computes in a step; "wait_share", the share of a step in which it
        waits for the gradients of other ranks.
        """
        lines = [(line["step"], values) for line in self.steps if (values := listed(line.get(key)))]
        size = len(lines[-1][1]) if lines else 0
        return [(step, [*map(number, values)]) for step, values in lines if len(values) == size]

    def last_event(self, *names: str) -> MetricsLine | None:
        """The newest event with one of these names."""
        return next((event for event in reversed(self.events) if event["event"] in names), None)

    def times(self) -> list[float]:
        """Unix seconds of all lines that have a time."""
        times = (number(line.get("time")) for line in (*self.steps, *self.held_out, *self.events))
        return [time for time in times if is_time(time)]


def _step(line: MetricsLine) -> float:
    return float(line["step"])


def read_event_files(directory: Path) -> None:
    """If a run has no metrics.jsonl, copy scalars from its TensorBoard event files to the run directory.

    Without TensorBoard, nothing is copied.
    """
    if not (directory / "metrics.jsonl").exists():
        command = [sys.executable, "-I", f"{KIT}/scripts/lib/module.py", "training.event_files", str(directory)]
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, capture_output=True, timeout=EVENT_FILES_TIMEOUT)


def read_metrics(path: Path, notes: list[str], most: int = MAX_LINES, size: int | None = None) -> History:
    """Read metrics.jsonl, of a large file the end. Appends notes about what was left out and read errors to `notes`.

    most: read at most about this many lines, see _Selection. size: bytes at the end of the file; default: MAX_READ.
    """
    history, names, too_many = History(), {"loss", "event", *NOT_PLOTTED, *RESERVED}, False
    selection, invalid = _select(path, most, MAX_READ if size is None else size, notes)
    for text in (selected := selection.lines()):
        line = _parse(text.decode(errors="replace"))
        invalid += line is None and text.endswith(b"\n")  # an incomplete last line is normal after SIGKILL
        if line:
            names.update(islice((key for key in line if key not in names), max(0, MAX_METRICS - len(names))))
            known = {key: value for key, value in line.items() if key in names and _is_plain(value)}
            too_many = too_many or len(known) < len(line)
            history.add(known)
    if len(selected) < selection.count:
        notes.append(f"{path.name}: {len(selected):,} of {selection.count:,} lines are shown, evenly spaced")
    if too_many:
        notes.append(f"{path.name}: only the first {MAX_METRICS:,} names are read")
    if invalid:
        notes.append(f"{path.name}: ignored {invalid} invalid line{'s' * (invalid > 1)}")
    return history


def _is_plain(value: object) -> bool:
    """Whether the page may use a value: a number, a short text, or a list of numbers."""
    if isinstance(value, list):
        return all(isinstance(one, (int, float, NoneType)) for one in value)
    return isinstance(value, (int, float, NoneType)) or (isinstance(value, str) and len(value) <= LONGEST_TEXT)


def _select(path: Path, most: int, size: int, notes: list[str]) -> tuple[_Selection, int]:
    """The selection of the lines that may be valid, and the number of others: empty lines and objects."""
    selection, others = _Selection(most), 0
    try:
        for text in last_lines(path, size):
            if len(text) >= SHORTEST:
                selection.add(text)
            else:
                others += text.endswith(b"\n")
        if os.path.getsize(path) > size:
            notes.append(f"{path.name}: only its last {size >> 20} MiB are read")
    except FileNotFoundError:
        pass
    except OSError as error:
        notes.append(f"{path.name}: cannot be read further ({error.strerror})")
    return selection, others


class _Selection:
    """At most `most` lines of a file, of BYTES each on average, and the last line of each kind.

    All lines of rare kinds are kept.

    Lines of one kind have the same names and events, as far as this shows without parsing. Of a kind with many lines,
    evenly spaced ones are kept: line n if the fractional part of n times the golden ratio is below the share of the
    kind. Every 2nd, 4th or 8th line would leave out a name that differs in its digits, such as loss_1 and loss_2 in
    turn.
    """

    def __init__(self, most: int) -> None:
        self.count = 0  # of all lines
        self._most, self._kept, self._bytes = most, 0, 0
        self._kinds: dict[bytes, list[tuple[float, int, bytes]]] = {}  # fractional part, number and text of each line
        self._shares: dict[bytes, float] = {}
        self._last: dict[bytes, tuple[int, bytes]] = {}

    def add(self, text: bytes) -> None:
        """Add the next line of the file."""
        kind = text.translate(None, VALUES)
        if kind not in self._kinds and len(self._kinds) >= MAX_METRICS:
            kind = b""
        kept = self._kinds.setdefault(kind, [])
        self._last[kind] = self.count, text
        part = (self.count + 1) * GOLDEN_RATIO % 1.0  # never 0
        if part < self._shares.setdefault(kind, 1.0):
            kept.append((part, self.count, text))
            self._kept += 1
            self._bytes += len(text)
            while self._kept > self._most or self._bytes > self._most * BYTES:
                self._halve(max(self._kinds, key=lambda one: len(self._kinds[one])))
        self.count += 1

    def _halve(self, kind: bytes) -> None:
        self._shares[kind] /= 2
        kept = [line for line in self._kinds[kind] if line[0] < self._shares[kind]]
        self._kept += len(kept) - len(self._kinds[kind])
        self._bytes += sum(len(line[2]) for line in kept) - sum(len(line[2]) for line in self._kinds[kind])
        self._kinds[kind] = kept

    def lines(self) -> list[bytes]:
        """The selected lines, in the order of the file."""
        selected = {n: text for lines in self._kinds.values() for _, n, text in lines} | dict(self._last.values())
        return [selected[n] for n in sorted(selected)]


def _parse(text: str) -> MetricsLine | None:
    """The line with its step as a float; {} if it has `steps` or `epoch`, but no `step`; None if it is invalid."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(line, dict) and not line.keys().isdisjoint({"steps", "epoch"}) and "step" not in line:
        return {}
    if not isinstance(line, dict) or not abs(step := number(line.get("step"))) < STEP_LIMIT:
        return None
    return line | {"step": step}
