"""One attempt of a job list on SLURM, from the dispatcher's side: an element of an array, seen through its files.

The working directory is shared, so the files of an attempt are those that array_task.py and the supervisor write on a
compute node. The exit code is the truth. What SLURM shows only says that an element waits, or that it can write nothing
any more; and then a heartbeat that goes on says that SLURM is wrong.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

from distributed.exit_codes import KILLED
from distributed.files import read_json, write_file
from distributed.jobs import host
from distributed.jobs.array_task import ATTEMPTS, ELEMENT, NEW, ORDER, SERVER, TAKEN, move, order_path, remove
from distributed.jobs.sbatch import Entry, Needs, Queue, end_without_code
from distributed.launch import supervisor

LATE = 30.0  # seconds without a heartbeat, after which nothing is there any more; more than it may take to here
SOON = 6.0  # seconds that an exit code may take to here
LOCKED = 180.0  # seconds for which a lock alone, without a heartbeat, means that the supervisor is there

EXPLAIN = 10.0  # seconds that SLURM may take to say that it was the cause
SIGNALS = (128 + signal.SIGTERM, KILLED)  # exit codes of what SLURM ends
OF_SLURM = ("CANCELLED", "DEADLINE", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")

Facts = dict[str, Any]


class Element(host.Attempt):
    """One attempt, which is an element of an array or will be."""

    def __init__(self, directory: str, output: str, grace: float) -> None:
        super().__init__(directory, SERVER, output, grace)
        self.array, self.index = "", -1
        self.entry: Entry | None = None
        self.since = math.inf  # when it was submitted, or told to end: what squeue showed before says nothing
        self.begun = False  # its element has been seen to begin
        self.cancelled = False  # its order was taken back
        self.shown = ""  # why it waits, as it was reported last
        self.cancel_at = math.inf  # when scancel is called
        self._gone_at: float | None = None
        self._ended_at: float | None = None
        self._beat = self._beat_at = 0.0
        self._reported = False

    # ---- files

    def names(self) -> list[str]:
        """Of its files. To list a directory makes an NFS client forget what it thinks is not there."""
        try:
            return os.listdir(self.directory)
        except FileNotFoundError:
            return []

    def end(self) -> Facts:
        """How it ended: on another machine, so that its boot id says nothing."""
        record = read_json(self.files.record)
        return super().end() | {"cause": record.get("cause", ""), "message": record.get("message", "")}

    def locked(self) -> bool:
        """Whether a supervisor runs, as far as the file system knows locks."""
        try:
            return super().locked()
        except OSError:
            return False

    def has_ended(self) -> bool:
        return supervisor.read_code(self.files.exit) is not None and not self.locked()

    def element(self) -> Facts:
        """What its element has written about itself; empty where none has begun."""
        return read_json(os.path.join(self.directory, ELEMENT))

    def process(self) -> Facts:
        """What it is known by when its command runs; else empty."""
        if not os.path.exists(self.files.pids):
            return {}
        return self.facts() | {"host": self.element().get("host", "")}

    def void(self) -> bool:
        """Take the order back, whichever array it belongs to. False: an element has taken it."""
        for _ in range(10):  # it may just be handed to an array
            orders = [name for name in self.names() if name == ORDER or name.startswith(f"{ORDER}.")]
            if any(remove(os.path.join(self.directory, name)) for name in orders):
                return True
            if not orders:
                return False
        return False

    def forget_order(self) -> None:
        """Nobody is to start it any more."""
        for name in self.names():
            if name == NEW or name.startswith((ORDER, TAKEN)):
                remove(os.path.join(self.directory, name))

    def output_of_element(self) -> str:
        return os.path.join(os.path.dirname(self.directory), f"array-{self.array}", f"{self.index}.out")

    # ---- looks

    def find(self) -> str:
        """absent, ended, held (in no array yet) or there; for a dispatcher that has not seen it start."""
        if ORDER in self.names():
            return "held"
        known, ended = self.locate(), self.has_ended()
        if ended and (self._says_all() or not known):
            return "ended"
        if not known:
            self.forget_order()
            return "absent"
        self.since = -math.inf
        return "there"

    def locate(self) -> bool:
        """Find out which element of which array it is. False: of none."""
        known = [name.partition(".")[2] for name in self.names() if name.startswith((f"{ORDER}.", f"{TAKEN}."))]
        self.array = known[0] if known else str(self.element().get("array", ""))
        self.index = index_in(os.path.dirname(self.output_of_element()), self.name)
        return bool(self.array)

    def look(self, queue: Queue, now: float, progress: bool) -> Iterator[tuple[str, Facts]]:
        """What has happened, as kinds of events and their facts: waits, started, progress, ended; held: SLURM has never
        got it."""
        current = queue.began > self.since
        self.entry = queue.entries.get((self.array, self.index)) if current else self.entry
        if self.cancelled:
            if current and not (self.entry and not self.entry.ended):
                yield "ended", never_started()
        elif self.entry and self.entry.waits and not self.begun:
            yield from self._wait(self.entry)
        elif self.has_ended():
            if self._is_explained(queue, now):
                yield from self._run(now, progress=False)
                yield "ended", self._last()
        else:
            yield from self._run(now, progress)
            if current and (self.entry is None or self.entry.ended):
                yield from self._conclude(now)
            else:
                self._gone_at = None

    def _wait(self, entry: Entry) -> Iterator[tuple[str, Facts]]:
        if entry.waiting_reason != self.shown:
            self.shown = entry.waiting_reason
            yield "waits", {"reason": self.shown}

    def _run(self, now: float, progress: bool) -> Iterator[tuple[str, Facts]]:
        self.begun = self.begun or os.path.exists(os.path.join(self.directory, ELEMENT))
        if not self.begun:
            return
        if not self._reported and (process := self.process()):
            self._reported = True
            yield "started", {"state": "running", **process}
        if progress:
            self._look_at_heartbeat(now)
        if progress and (metrics := host.read_metrics(self.output)) != self.metrics:
            self.metrics = metrics
            yield "progress", {"metrics": metrics}

    def _conclude(self, now: float) -> Iterator[tuple[str, Facts]]:
        """SLURM is done with it, and there is no exit code."""
        names = self.names()
        if self.has_ended():  # seen by the next look
            return
        taken = not any(name.startswith(f"{ORDER}.") for name in names)
        if not taken and not self.entry and not os.path.exists(job_path(os.path.dirname(self.output_of_element()))):
            if move(order_path(self.directory, self.array), order_path(self.directory)):
                self.array, self.index, self.since = "", -1, math.inf
                yield "held", {}
            return
        if not taken and self.void():
            yield "ended", self._without_code(taken=False)
            return
        if self._is_silent(now):
            self.forget_order()
            yield "ended", self._without_code(taken=True)

    def _is_silent(self, now: float) -> bool:
        """Whether nothing has been heard of its supervisor for long enough."""
        if self._gone_at is None:
            self._gone_at = now
            self._beat_at = self._beat_at or now
        if self._look_at_heartbeat(now) and now > self._gone_at and self.entry:  # it goes on, and SLURM does not know
            self._ask("kill")
        return now - self._beat_at > (LOCKED if self.locked() else LATE) and now - self._gone_at > SOON

    def _look_at_heartbeat(self, now: float) -> bool:
        """Whether there was one since the last look; by this machine's clock."""
        beat = host.modified(self.files.heartbeat) or 0.0
        news, self._beat = beat != self._beat, beat
        if news:
            self._beat_at = now
        return news

    def _is_explained(self, queue: Queue, now: float) -> bool:
        """A command that a signal has ended may have been ended by SLURM, which then says so a moment later."""
        if self._ended_at is None:
            self._ended_at = now
        known = queue.began > self.since and (self.entry is None or self.entry.ended)
        return self._says_all() or known or now - self._ended_at > EXPLAIN

    def _says_all(self) -> bool:
        """Whether SLURM has nothing to add to what its files say about its end."""
        return supervisor.read_code(self.files.exit) not in SIGNALS or bool(read_json(self.files.record))

    def _last(self) -> Facts:
        with contextlib.suppress(OSError):  # what an element prints is of use only when it cannot begin
            if os.path.getsize(self.output_of_element()) == 0:
                os.unlink(self.output_of_element())
        end = self.end()
        if end["code"] in SIGNALS and not end["cause"] and self.entry and self.entry.state in OF_SLURM:
            end["cause"], end["message"] = end_without_code(self.entry, taken=True, begun=True)
        return end

    def _without_code(self, taken: bool) -> Facts:
        printed = host.last_lines(self.output_of_element())
        begun = os.path.exists(self.files.pids)
        cause, message = end_without_code(self.entry, taken, begun, printed[-1] if printed else "")
        now = time.time()
        return {
            "code": None, "started": self.element().get("time", now), "ended": now, "cause": cause, "message": message,
            "lines": host.last_lines(self.files.log) or printed, "metrics": host.read_metrics(self.output),
        }  # fmt: skip

    # ---- end

    def stop(self, kill: bool) -> None:
        """Take the order back, or ask the supervisor, wherever it runs."""
        if self.void():
            self.cancelled = True
            self.since = time.monotonic()
            self.cancel_at = self.since
        elif not self.has_ended():
            asked = self._ask("kill" if kill else "stop")
            wait = (0.0 if kill else self.grace) + 2 * supervisor.UNRESPONSIVE_TIMEOUT if asked else 0.0
            self.cancel_at = min(self.cancel_at, time.monotonic() + wait)

    def _ask(self, request: str) -> bool:
        """Whether the request could be written: on a full disk it cannot, and SLURM sends SIGTERM instead."""
        try:
            write_file(self.files.request, request + "\n")
        except OSError:
            return False
        return True


def never_started() -> Facts:
    now = time.time()
    return {"code": None, "started": now, "ended": now, "lines": []}


def index_in(array: str, name: str) -> int:
    """Which element of an array an attempt is; -1 where that is not known."""
    try:
        with open(os.path.join(array, ATTEMPTS)) as file:
            return file.read().split().index(name)
    except (OSError, ValueError):
        return -1


def job_path(array: str) -> str:
    """In the directory of an array: SLURM's number of it, written when SLURM has accepted it."""
    return os.path.join(array, "job")


# ---------------------------------------------------------------- the files of an array


def assign(path: str, array: str, elements: Sequence[Element]) -> None:
    """Make the directory of an array, and hand it their orders. An order that was taken back meanwhile stays so."""
    os.mkdir(path, 0o777)
    write_file(os.path.join(path, ATTEMPTS), "".join(f"{each.name}\n" for each in elements))
    for each in elements:
        move(order_path(each.directory), order_path(each.directory, array))


def take_back(path: str, array: str, elements: Sequence[Element]) -> None:
    """SLURM has not taken the array: the orders belong to none again."""
    for each in elements:
        move(order_path(each.directory, array), order_path(each.directory))
    shutil.rmtree(path, ignore_errors=True)


def discard(path: str, elements: Sequence[Element]) -> None:
    """SLURM refuses them."""
    for each in elements:
        each.forget_order()
    shutil.rmtree(path, ignore_errors=True)


def needs_of(element: Element) -> Needs:
    """Of an order that belongs to no array."""
    with open(order_path(element.directory)) as file:
        gpus, minutes, labels, *after = json.load(file)["needs"]
    return Needs(gpus, minutes, tuple(labels), *after)
