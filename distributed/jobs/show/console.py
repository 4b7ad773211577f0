"""The output while a job list runs: messages, and on a terminal a live table."""

from __future__ import annotations

import errno
import io
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from distributed.jobs.journal.state import Attempt, JobState, ListState
from distributed.jobs.schedule.backend import ServerLink
from distributed.terminal import GAP, columns, cut, duration, pad, plural
from distributed.trust import printable

MAX_BUFFERED = 1 << 20  # bytes
CHUNK = 4096  # bytes per write
DISK_FULL_DELAY = 1.0  # seconds before writing to a full disk is retried
FLUSH_TIMEOUT = 3.0  # seconds at the end
STYLES = {"done": "green", "failed": "red", "paused": "yellow", "retry": "yellow", "cancelled": "yellow"}
LONGEST_SLOT = 24  # columns
# Widths of the columns after `slot` and `job`.
COLUMN_WIDTHS = {"step": 11, "loss": 6, "held-out": 8, "time": 7, "left": 7}
LOSSES = {"loss": "loss", "held-out": "held_out_loss"}  # column -> metric
OTHER_LINES = 5  # lines other than slots: empty line, header, "and N more", totals, cursor


class BufferedOutput(io.TextIOBase):
    """Standard output, written by a thread, so that a slow, stopped (Ctrl-S) or closed output never blocks the caller.

    Writing to a full disk is retried. Text beyond MAX_BUFFERED is dropped.
    """

    def __init__(self) -> None:
        self._file = sys.stdout  # before rich replaces it
        self._buffer = bytearray()
        self._changed = threading.Condition()
        self._ending = False
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def pending(self) -> bool:
        """Whether the buffer is not empty."""
        return bool(self._buffer)

    def isatty(self) -> bool:
        return bool(self._file and self._file.isatty())

    def write(self, text: str) -> int:
        """Add a text to the buffer. Does not block."""
        with self._changed:
            if len(self._buffer) < MAX_BUFFERED:
                encoding = getattr(self._file, "encoding", None) or "utf-8"
                self._buffer += text[:MAX_BUFFERED].encode(encoding, "replace")
            self._changed.notify()
        return len(text)

    def drain(self, timeout: float) -> None:
        """Wait until the buffer is empty, at most `timeout` seconds. Writes to a full disk are no longer retried."""
        with self._changed:
            self._ending = True
            self._changed.wait_for(lambda: not self._buffer, timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._buffer)
                block = bytes(self._buffer[:CHUNK])
            try:
                written = os.write(self._file.fileno(), block)
            except (OSError, ValueError, AttributeError) as error:  # closed, or sys.stdout is None
                full = getattr(error, "errno", 0) == errno.ENOSPC and not self._ending
                written = 0 if full else len(block)
            with self._changed:
                del self._buffer[:written]
                self._changed.notify_all()
            if not written:
                time.sleep(DISK_FULL_DELAY)


class ListConsole:
    """Prints messages and, on a terminal, a live table below them."""

    def __init__(self, state: ListState, links: Mapping[str, ServerLink]) -> None:
        self._output = BufferedOutput()
        self._console = Console(file=cast("IO[str]", self._output), highlight=False, soft_wrap=True)
        self._state, self._links = state, links
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(  # auto_refresh would draw in a thread while the state changes
                get_renderable=self._table, console=self._console, auto_refresh=False, transient=True,
                vertical_overflow="crop",
            )  # fmt: skip

    def __enter__(self) -> ListConsole:
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def refresh(self) -> None:
        """Redraw the table."""
        if self._live and not self._output.pending:
            self._live.refresh()

    def log(self, line: str) -> None:
        """Print a message with the time."""
        line = printable(line)
        kind = line.partition(":")[0]
        stamp = time.strftime("%H:%M:%S")
        if self._live:
            self._console.print(Text.assemble((stamp + "  ", "dim"), (line, STYLES.get(kind, ""))))
        else:
            self.write_line(f"{stamp}  {line}")

    def write_line(self, line: str) -> None:
        """Print a line without the time."""
        self._output.write(printable(line) + "\n")

    def flush(self) -> None:
        """Wait until all lines are written, for FLUSH_TIMEOUT at most."""
        self._output.drain(FLUSH_TIMEOUT)

    def _table(self) -> RenderableType:
        return Group(*overview(self._state, self._links, *self._console.size))


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class SlotRow:
    """A row of the table: a slot, or a server that cannot be used."""

    kind: str  # unusable, running or idle
    slot: str
    job: str
    numbers: Sequence[str] = ()


def overview(state: ListState, links: Mapping[str, ServerLink], width: int, height: int) -> list[Text]:
    """The lines of the table: header, slots, totals. width, height: columns and lines of the terminal."""
    all_rows = list(rows(state, links))
    shown, hidden = select_rows(all_rows, height - OTHER_LINES)
    slot_width = max([len("slot"), *(columns(row.slot) for row in all_rows)])
    widths = shown_columns(state)
    job_width = max(10, width - slot_width - sum(widths.values()) - len(GAP) * (len(widths) + 1))
    lines = [Text(), Text(format_row("slot", "job", list(COLUMN_WIDTHS), slot_width, job_width, widths), style="dim")]
    for row in shown:
        if row.numbers:
            lines.append(Text(format_row(row.slot, row.job, row.numbers, slot_width, job_width, widths)))
        else:
            style = "yellow" if row.kind == "unusable" else "dim"
            lines.append(Text(pad(row.slot, slot_width) + GAP + row.job, style=style))
    if hidden:
        lines.append(Text(f"and {hidden}", style="dim"))
    usable = sum(len(link.server.pool.slots) for link in links.values() if link.state == "ready")
    lines.append(Text(totals(state, usable), style="bold"))
    for line in lines:
        line.plain = printable(line.plain)
        line.truncate(width, overflow="ellipsis")
    return lines


def shown_columns(state: ListState) -> dict[str, int]:
    """COLUMN_WIDTHS without losses that no job has reported yet."""
    reported = {name for name, key in LOSSES.items() if any(key in job.metrics for job in state.jobs.values())}
    return {name: size for name, size in COLUMN_WIDTHS.items() if name not in LOSSES or name in reported}


def rows(state: ListState, links: Mapping[str, ServerLink]) -> Iterator[SlotRow]:
    """All rows, in the order of the servers."""
    running = {(each.server, slot): each for each in state.open.values() for slot in each.slots}
    shown = short_names(list(links))
    for name, link in links.items():
        if link.state != "ready" or not link.usable:
            yield SlotRow("unusable", shown[name], f"{link.state}: {link.reason}" if link.reason else link.state)
        for slot in link.server.pool.slots:
            label = f"{shown[name]}:{slot.index if slot.gpu is None else slot.gpu}"
            attempt = running.get((name, slot.index))
            if attempt:
                job = state.jobs[attempt.job]
                yield SlotRow("running", label, job.job.name, numbers(job, attempt))
            elif link.state == "ready" and link.usable:
                blocked = slot.gpu in link.server.pool.blocked
                yield SlotRow("idle", label, "in use by another process" if blocked else "idle")


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Name of a server -> its truncated name in the table, without the domain if all names are distinct without it."""
    short = {name: name if name.replace(".", "").isdecimal() else name.partition(".")[0] for name in names}
    if len(set(short.values())) < len(names):
        short = {name: name for name in names}
    return {name: cut(each, LONGEST_SLOT - 4) for name, each in short.items()}


def select_rows(all_rows: Sequence[SlotRow], count: int) -> tuple[list[SlotRow], str]:
    """At most `count` rows, and a text that counts the others. Idle rows are left out first, then running ones."""
    shown = list(all_rows)
    hidden = []
    for kind in ("idle", "running", "unusable"):
        if len(shown) > count:
            candidates = [row for row in shown if row.kind == kind]
            keep = max(0, count - (len(shown) - len(candidates)))
            dropped = {id(row) for row in candidates[keep:]}
            shown = [row for row in shown if id(row) not in dropped]
            if dropped:
                number = len(dropped)
                hidden.append(plural(number, "more server") if kind == "unusable" else f"{number} more {kind}")
    return shown, ", ".join(hidden)


def format_row(
    slot: str, job: str, numbers: Sequence[str], slot_width: int, job_width: int, widths: Mapping[str, int]
) -> str:
    named = zip(COLUMN_WIDTHS, numbers, strict=True)
    cells = [pad(text, widths[name], right=True) for name, text in named if name in widths]
    return GAP.join([pad(slot, slot_width), pad(cut(job, job_width), job_width), *cells])


def numbers(job: JobState, attempt: Attempt) -> list[str]:
    """The cells of the columns in COLUMN_WIDTHS."""
    if attempt.state == "starting":
        return ["starting", "", "", "", ""]
    if not attempt.process:
        return ["queued", "", "", "", ""]
    left = remaining(job, attempt)
    return [*measured(job), clock(time.time() - attempt.start), "" if left is None else clock(left)]


def measured(job: JobState) -> list[str]:
    """Step, loss and held-out loss; each is empty until the job reports it."""
    step, steps = job.metrics.get("step"), job.metrics.get("steps")
    progress = "" if step is None else f"{step:,.0f}" + (f"/{steps:,.0f}" if steps else "")
    return [
        progress,
        *(aligned_number(float(job.metrics[name])) if name in job.metrics else "" for name in LOSSES.values()),
    ]


def aligned_number(value: float) -> str:
    """Three decimals, to align the decimal points of a column; two significant digits for small and large values."""
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 1000 else f"{value:.2g}"


def clock(seconds: float) -> str:
    """0:07, 12:30, 1:02:30."""
    minutes, seconds = divmod(round(max(0.0, seconds)), 60)
    return f"{minutes}:{seconds:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def remaining(job: JobState, attempt: Attempt) -> float | None:
    """Estimated seconds until the job ends; None if unknown.

    The estimate is based on the steps of this attempt or, if they or their total are unknown, on _expected_seconds.
    An attempt after the first may resume from a checkpoint, so only its steps after its first report count.
    """
    now, step, steps = time.time(), job.metrics.get("step"), job.metrics.get("steps")
    first, first_at = (0.0, attempt.start) if len(job.attempts) == 1 else attempt.first_report or (math.inf, now)
    if step and steps and step > first and now > first_at:
        return float(max(0.0, (now - first_at) * (steps - step) / (step - first)))
    expected = job.job.options.expected_seconds
    return None if expected is None else max(0.0, expected - (now - attempt.start))


# ---------------------------------------------------------------- totals


def totals(state: ListState, slots: int = 0) -> str:
    """12 of 40 done, 1 failed, 8 running, 19 waiting; about 12 min left. slots: 0 omits the time left."""
    counts = state.counts
    parts = [f"{counts['done']} of {len(state.jobs)} done"]
    counts = {**counts, "running": counts["running"] + counts["ending"]}
    parts += [f"{counts[name]} {name}" for name in ("failed", "cancelled", "running", "waiting") if counts[name]]
    left = list_remaining(state, slots) if slots else None
    return ", ".join(parts) + (f"; about {duration(max(1.0, round(left)))} left" if left else "") + (
        f"; paused: {state.paused}" if state.paused else ""
    )  # fmt: skip


def list_remaining(state: ListState, slots: int) -> float | None:
    """Estimated seconds until all jobs have ended; None if unknown.

    A job without an estimate is expected to take as long as the mean of the done jobs.
    """
    done = [job.last.seconds for job in state.jobs.values() if job.state == "done" and job.last and job.last.seconds]
    mean = sum(done) / len(done) if done else None
    total = longest = 0.0
    for job in state.unfinished():
        estimate = remaining(job, job.last) if job.state == "running" and job.last else job.job.options.expected_seconds
        estimate = mean if estimate is None else estimate
        if estimate is None:
            return None
        total, longest = total + estimate, max(longest, estimate)
    return max(longest, total / max(1, slots))
