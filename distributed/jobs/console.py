"""What a person sees while a job list runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import errno
import io
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

from distributed.jobs.dispatcher import ServerLink
from distributed.jobs.state import Attempt, JobState, ListState
from distributed.runs.page import duration
from distributed.terminal import GAP, columns, cut, pad

BACKLOG = 1 << 20  # bytes kept for an output that does not take them
CHUNK = 4096  # bytes written at once
FULL = 1.0  # seconds between two tries to write to a full disk
PATIENCE = 3.0  # seconds that the output has for what is left at the end
STYLES = {"done": "green", "failed": "red", "paused": "yellow", "retry": "yellow", "cancelled": "yellow"}
LONGEST_SLOT = 24  # columns
# The columns behind `slot` and `job`, each as wide as what it mostly holds.
NUMBERS = {"step": 11, "loss": 6, "held-out": 8, "time": 7, "left": 7}
LOSSES = {"loss": "loss", "held-out": "held_out_loss"}  # columns, and the metrics in them
AROUND = 5  # lines beside the slots: empty, headings, those that do not fit, totals, the cursor


class Output(io.TextIOBase):
    """Standard output, written by a thread: one that is slow, stopped (Ctrl-S), closed or full holds nothing up.

    What a full disk does not take is kept, but not more than BACKLOG: then lines are lost, and the results have all.
    """

    def __init__(self) -> None:
        self._file = sys.stdout  # before rich takes its place
        self._pending = b""
        self._changed = threading.Condition()
        self._ending = False
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def behind(self) -> bool:
        """Whether something is not written yet."""
        return bool(self._pending)

    def isatty(self) -> bool:
        """See io.IOBase."""
        return bool(self._file and self._file.isatty())

    def write(self, text: str) -> int:
        """Returns at once."""
        with self._changed:
            if len(self._pending) < BACKLOG:
                self._pending += text.encode(getattr(self._file, "encoding", None) or "utf-8", "replace")
            self._changed.notify()
        return len(text)

    def end(self, seconds: float) -> None:
        """Wait until all is written, but not longer."""
        with self._changed:
            self._ending = True
            self._changed.wait_for(lambda: not self._pending, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending)
                block = self._pending[:CHUNK]
            try:
                written = os.write(self._file.fileno(), block)
            except (OSError, ValueError, AttributeError) as error:  # closed, or not there
                full = getattr(error, "errno", 0) == errno.ENOSPC and not self._ending
                written = 0 if full else len(block)
            with self._changed:
                self._pending = self._pending[written:]
                self._changed.notify_all()
            if not written:
                time.sleep(FULL)


class Screen:
    """Lines, and below them, on a terminal, the table. Output that is slow, closed or full disturbs nothing."""

    def __init__(self, state: ListState, links: Mapping[str, ServerLink]) -> None:
        self._output = Output()
        self._console = Console(file=cast("IO[str]", self._output), highlight=False, soft_wrap=True)
        self._state, self._links = state, links
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._table,
                console=self._console,
                auto_refresh=False,  # it would draw in a thread of its own, while the state changes
                transient=True,
                vertical_overflow="crop",
            )

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def refresh(self) -> None:
        """Draw the table again."""
        if self._live and not self._output.behind:
            self._live.refresh()

    def say(self, line: str) -> None:
        """One line for people."""
        kind = line.partition(":")[0]
        stamp = time.strftime("%H:%M:%S")
        if self._live:
            self._console.print(Text.assemble((stamp + "  ", "dim"), (line, STYLES.get(kind, ""))))
        else:
            self.put(f"{stamp}  {line}")

    def put(self, line: str) -> None:
        """One line of plain text."""
        self._output.write(line + "\n")

    def end(self) -> None:
        """Write what is left, or give it up."""
        self._output.end(PATIENCE)

    def _table(self) -> RenderableType:
        return Group(*overview(self._state, self._links, *self._console.size))


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Row:
    """A slot, or a server that cannot be used."""

    kind: str  # trouble, running or idle
    where: str
    job: str
    numbers: Sequence[str] = ()


def overview(state: ListState, links: Mapping[str, ServerLink], width: int, height: int) -> list[Text]:
    """A row for each slot, as many as fit into so many columns and lines, and a line of totals."""
    every = list(rows(state, links))
    shown, rest = fitting(every, height - AROUND)
    slot = max([len("slot"), *(columns(row.where) for row in every)])
    sizes = shown_numbers(state)
    job = max(10, width - slot - sum(sizes.values()) - len(GAP) * (len(sizes) + 1))
    lines = [Text(), Text(laid_out("slot", "job", list(NUMBERS), slot, job, sizes), style="dim")]
    for row in shown:
        if row.numbers:
            lines.append(Text(laid_out(row.where, row.job, row.numbers, slot, job, sizes)))
        else:
            style = "yellow" if row.kind == "trouble" else "dim"
            lines.append(Text(pad(row.where, slot) + GAP + row.job, style=style))
    if rest:
        lines.append(Text(f"and {rest}", style="dim"))
    usable = sum(len(link.server.pool.slots) for link in links.values() if link.state == "ready")
    lines.append(Text(totals(state, usable), style="bold"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def shown_numbers(state: ListState) -> dict[str, int]:
    """NUMBERS without losses that no job of the list has reported yet: a column appears once, and stays."""
    reported = {name for name, key in LOSSES.items() if any(key in job.metrics for job in state.jobs.values())}
    return {name: size for name, size in NUMBERS.items() if name not in LOSSES or name in reported}


def rows(state: ListState, links: Mapping[str, ServerLink]) -> Iterator[Row]:
    """In the order of the servers."""
    running = {(each.server, slot): each for each in state.open.values() for slot in each.slots}
    called = short_names(list(links))
    for name, link in links.items():
        if link.state != "ready" or not link.usable:
            yield Row("trouble", called[name], f"{link.state}: {link.reason}" if link.reason else link.state)
        for slot in link.server.pool.slots:
            where = f"{called[name]}:{slot.index if slot.gpu is None else slot.gpu}"
            attempt = running.get((name, slot.index))
            if attempt:
                job = state.jobs[attempt.job]
                yield Row("running", where, job.job.name, numbers(job, attempt))
            elif link.state == "ready" and link.usable:
                blocked = slot.gpu in link.server.pool.blocked
                yield Row("idle", where, "used by somebody else" if blocked else "idle")


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Without their domain where they differ without it, and not longer than a column may be."""
    short = {name: name if name.replace(".", "").isdecimal() else name.partition(".")[0] for name in names}
    if len(set(short.values())) < len(names):
        short = {name: name for name in names}
    return {name: cut(each, LONGEST_SLOT - 4) for name, each in short.items()}


def fitting(every: Sequence[Row], most: int) -> tuple[list[Row], str]:
    """The rows that fit, those that say most before the others; and what the others are."""
    shown = list(every)
    left_out = []
    for kind in ("idle", "running", "trouble"):
        if len(shown) > most:
            before = [row for row in shown if row.kind == kind]
            keep = max(0, most - (len(shown) - len(before)))
            gone = {id(row) for row in before[keep:]}
            shown = [row for row in shown if id(row) not in gone]
            if gone:
                left_out.append(plural(len(gone), "more server") if kind == "trouble" else f"{len(gone)} more {kind}")
    return shown, ", ".join(left_out)


def laid_out(
    where: str, job: str, numbers: Sequence[str], slot_width: int, job_width: int, sizes: Mapping[str, int]
) -> str:
    right = [pad(text, sizes[name], right=True) for name, text in zip(NUMBERS, numbers, strict=True) if name in sizes]
    return GAP.join([pad(where, slot_width), pad(cut(job, job_width), job_width), *right])


def numbers(job: JobState, attempt: Attempt) -> list[str]:
    """Step, loss, held-out loss, time, time left."""
    if attempt.state == "starting":
        return ["starting", "", "", "", ""]
    if not attempt.process:
        return ["queued", "", "", "", ""]
    left = remaining(job, attempt)
    return [*measured(job), clock(time.time() - attempt.start), "" if left is None else clock(left)]


def measured(job: JobState) -> list[str]:
    """Step, loss, held-out loss; empty where the job tells none."""
    step, steps = job.metrics.get("step"), job.metrics.get("steps")
    said = "" if step is None else f"{step:,.0f}" + (f"/{steps:,.0f}" if steps else "")
    return [said, *(figure(job.metrics[name]) if name in job.metrics else "" for name in LOSSES.values())]


def figure(value: float) -> str:
    """With three decimals, so that the points of a column stand one below the other; tiny and large ones with e."""
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 1000 else f"{value:.2g}"


def clock(seconds: float) -> str:
    """0:07, 12:30, 1:02:30."""
    minutes, seconds = divmod(round(max(0.0, seconds)), 60)
    return f"{minutes}:{seconds:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def remaining(job: JobState, attempt: Attempt) -> float | None:
    """Seconds until the job ends, by its steps or by what its list says."""
    passed = time.time() - attempt.start
    step, steps = job.metrics.get("step"), job.metrics.get("steps")
    if step and steps and passed > 0:
        return float(max(0.0, passed * (steps - step) / step))
    expected = job.job.options.expected_seconds
    return None if expected is None else max(0.0, expected - passed)


# ---------------------------------------------------------------- totals


def totals(state: ListState, slots: int = 0) -> str:
    """12 of 40 done, 1 failed, 8 running, 19 waiting; about 12 min left. slots: 0 for no guess of the time."""
    counts = state.counts
    parts = [f"{counts['done']} of {len(state.jobs)} done"]
    going = {**counts, "running": counts["running"] + counts["ending"]}
    parts += [f"{going[name]} {name}" for name in ("failed", "cancelled", "running", "waiting") if going[name]]
    left = list_remaining(state, slots) if slots else None
    return ", ".join(parts) + (f"; about {duration(max(1.0, round(left)))} left" if left else "") + (
        f"; paused: {state.paused}" if state.paused else ""
    )  # fmt: skip


def list_remaining(state: ListState, slots: int) -> float | None:
    """Seconds until the list has ended, by the mean time of jobs that are done."""
    took = [job.last.seconds for job in state.jobs.values() if job.state == "done" and job.last and job.last.seconds]
    mean = sum(took) / len(took) if took else None
    every = longest = 0.0
    for job in state.unfinished():
        known = remaining(job, job.last) if job.state == "running" and job.last else job.job.options.expected_seconds
        known = mean if known is None else known
        if known is None:
            return None
        every, longest = every + known, max(longest, known)
    return max(longest, every / max(1, slots))


def plural(number: int, noun: str) -> str:
    """1 job, 2 jobs."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
