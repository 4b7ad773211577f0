"""What a person sees while a job list runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import islice

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from distributed.jobs.dispatcher import Link
from distributed.jobs.state import Attempt, JobState, State
from distributed.report import duration

AROUND = 4  # lines of a terminal that the table leaves: its heading, what it does not show, the totals, the cursor
STYLES = {"done": "green", "failed": "red", "paused": "yellow", "retry": "yellow", "cancelled": "yellow"}


class Terminal(Console):
    """A terminal that may go away at any time: that is no reason to end."""

    def on_broken_pipe(self) -> None:
        """Write nowhere from now on. rich would end the program."""
        self.quiet = True
        give_up_output()


def give_up_output() -> None:
    """Standard output goes nowhere from now on."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


class Screen:
    """Lines, and below them, on a terminal, the table. Output that is closed, or on a full disk, disturbs nothing."""

    def __init__(self, state: State, links: Mapping[str, Link]) -> None:
        self._console = Terminal(highlight=False, soft_wrap=True)
        self._state, self._links = state, links
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._table,
                console=self._console,
                auto_refresh=False,  # it would draw in a thread of its own, while the state changes
                vertical_overflow="ellipsis",
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
        if self._live:
            try:
                self._live.refresh()
            except OSError:
                self._console.on_broken_pipe()

    def say(self, line: str) -> None:
        """One line for people."""
        kind = line.partition(":")[0]
        stamp = time.strftime("%H:%M:%S")
        if not self._live:
            return self.put(f"{stamp}  {line}")
        try:
            self._console.print(Text.assemble((stamp + "  ", "dim"), (line, STYLES.get(kind, ""))))
        except OSError:
            self._console.on_broken_pipe()

    def put(self, line: str) -> None:
        """One line of plain text."""
        try:
            print(line, flush=True)
        except OSError as error:
            if error.errno != errno.ENOSPC:  # otherwise it is kept, and written when there is space
                give_up_output()

    def end(self) -> None:
        """Write what is kept, or give it up."""
        try:
            print(end="", flush=True)
        except OSError:
            give_up_output()

    def _table(self) -> RenderableType:
        return Group(*overview(self._state, self._links, max(1, self._console.height - AROUND)))


def overview(state: State, links: Mapping[str, Link], most: int) -> list[RenderableType]:
    """A row for each slot, but at most so many, and a line of totals."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("slot", "job", "progress", "time", "left"):
        table.add_column(heading, no_wrap=True, overflow="ellipsis", ratio=3 if heading == "job" else None)
    rows = slot_rows(state, links)
    for cells in islice(rows, most):
        table.add_row(*cells)
    left = sum(1 for _ in rows)
    more = [Text(f"... and {left} more lines: make the terminal higher, or see `status`", style="dim")] if left else []
    slots = sum(len(link.server.room.slots) for link in links.values())
    return [table, *more, Text(totals(state, slots), style="bold")]


def slot_rows(state: State, links: Mapping[str, Link]) -> Iterator[tuple[str | Text, ...]]:
    """Servers that are not ready, and slots."""
    running = {(each.server, slot): each for each in state.open.values() for slot in each.slots}
    for name, link in links.items():
        if link.state != "ready" or not link.usable:
            yield name, Text(f"{link.state}: {link.reason}" if link.reason else link.state, style="yellow")
        for slot in link.server.room.slots:
            where = f"{name}:{slot.index}" if slot.gpu is None else f"{name} GPU {slot.gpu}"
            attempt = running.get((name, slot.index))
            if attempt:
                yield where, *row(state.jobs[attempt.job], attempt)
            elif link.state == "ready":
                waits = "used by somebody else" if slot.gpu in link.server.room.blocked else "idle"
                yield where, Text(waits, style="dim")


def row(job: JobState, attempt: Attempt) -> tuple[str, str, str, str]:
    """Job, progress, time, time left."""
    if attempt.state == "starting":
        return job.job.name, "starting", "", ""
    passed = time.time() - attempt.start
    left = remaining(job, attempt)
    return job.job.name, progress(job), duration(passed), "" if left is None else duration(left)


def progress(job: JobState) -> str:
    """step 40/200, loss 2.31."""
    step, steps = job.metrics.get("step"), job.metrics.get("steps")
    said = [] if step is None else [f"step {step:,.0f}" + (f"/{steps:,.0f}" if steps else "")]
    losses = [(name, job.metrics[name]) for name in ("loss", "held_out_loss") if name in job.metrics]
    return ", ".join(said + [f"{name.replace('_', '-')} {value:.3f}" for name, value in losses])


def remaining(job: JobState, attempt: Attempt) -> float | None:
    """Seconds until the job ends, by its steps or by what its list says."""
    passed = time.time() - attempt.start
    step, steps = job.metrics.get("step"), job.metrics.get("steps")
    if step and steps and passed > 0:
        return float(max(0.0, passed * (steps - step) / step))
    expected = job.job.options.expected_seconds
    return None if expected is None else max(0.0, expected - passed)


def totals(state: State, slots: int) -> str:
    """12 of 40 done, 1 failed, 8 running, 19 waiting; about 12 min left."""
    counts = state.counts
    parts = [f"{counts['done']} of {len(state.jobs)} done"]
    if counts["failed"]:
        parts.append(f"{counts['failed']} failed")
    if counts["cancelled"]:
        parts.append(f"{counts['cancelled']} cancelled")
    parts += [f"{counts['running'] + counts['ending']} running", f"{counts['waiting']} waiting"]
    left = list_remaining(state, slots)
    return ", ".join(parts) + (f"; about {duration(left)} left" if left else "") + (
        f"; paused: {state.paused}" if state.paused else ""
    )  # fmt: skip


def list_remaining(state: State, slots: int) -> float | None:
    """Seconds until the list has ended, by the mean time of jobs that are done."""
    took = [job.last.seconds for job in state.jobs.values() if job.state == "done" and job.last and job.last.seconds]
    mean = sum(took) / len(took) if took else None
    left = 0.0
    for job in state.unfinished():
        known = remaining(job, job.last) if job.state == "running" and job.last else job.job.options.expected_seconds
        known = mean if known is None else known
        if known is None:
            return None
        left += known
    return left / max(1, slots)
