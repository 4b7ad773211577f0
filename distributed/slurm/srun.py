"""A job step from the launcher's side: srun, what its tasks report, and their silence.

srun runs as a child, in a session of its own: Ctrl-C is for the launcher to handle. Through its standard input the
tasks hear that the launcher is there, and its orders; through its standard output they report
(distributed/slurm/task.py). From the reports come the files that agents write elsewhere: errors/node_<name>.json,
node_<name>.exit and, of a node that falls silent, node_<name>.lost. The first task that ends badly ends the others.
Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed.exit_codes import STOPPED, UNFIT
from distributed.launch.console import Console
from distributed.nodelist import expand
from distributed.slurm.task import BEAT, PATIENCE, REPORT

TOLD = 128 + signal.SIGTERM
HURRY = 5.0  # seconds between the request to stop and the order to end, when a task has failed
CHECKPOINT = 30.0  # seconds that the others get when one has stopped with a checkpoint
FAREWELL = 5.0  # seconds for srun to end when its tasks have; it would wait for a lost node as long as SLURM does
IMPATIENCE = 10.0  # seconds after which it is said which nodes have not begun; then twice as many, and so on
NODE_FAILURE = re.compile(r"Node failure on (\S+)")  # in srun's words
ORDERS = 0  # file descriptor through which the launcher speaks
SRUN = "srun"  # what it says is kept as if it were a node: node_srun.log

Json = dict[str, Any]


@dataclass
class Node:
    """What is known of a node while the step runs."""

    name: str
    tasks: int
    heard: float | None = None  # when; None: it has not begun
    ends: list[Json] = field(default_factory=list)  # of its tasks, as they came
    lost: bool = False

    @property
    def ended(self) -> bool:
        return self.lost or len(self.ends) == self.tasks

    @property
    def exit_code(self) -> int:
        """Of the first task that ended badly."""
        return next((code for code in map(code_of, self.ends) if code), 0)


def code_of(end: Mapping[str, Any]) -> int:
    """128+n for a signal."""
    code = int(end["exit_code"])
    return code if code >= 0 else 128 - code


# ---------------------------------------------------------------- what comes through srun


class Stream:
    """srun's output, parted into words for the console and reports, also where one comes amid the other."""

    def __init__(self) -> None:
        self._begun = b""

    def feed(self, words: bytes) -> Iterator[bytes | Json]:
        self._begun += words
        while self._begun:
            plain, mark, rest = self._begun.partition(REPORT)
            if plain:
                yield plain
            told, end, rest = rest.partition(b"\n")
            if mark and not end:
                self._begun = mark + told
                return
            self._begun = rest
            if mark:
                yield report_in(told) or mark + told + end


def report_in(told: bytes) -> Json:
    """Empty when a rank has printed our mark itself."""
    with suppress(ValueError):
        report = json.loads(told)
        if isinstance(report, dict) and "node" in report:
            return report
    return {}


# ---------------------------------------------------------------- the step


class Step:
    """srun and its tasks, until the last one has ended."""

    def __init__(self, run: Path, nodes: Sequence[Node], srun: subprocess.Popen[bytes]) -> None:
        self.run = run
        self.nodes = {node.name: node for node in nodes}
        self.code = 0  # of the first that ended badly
        self._step = ""  # its id, as its tasks tell it
        self._due: list[tuple[float, Callable[[], None]]] = []  # what is to be done, and when
        self._begun = time.monotonic()
        self._complain = self._begun + IMPATIENCE
        self._looked = self._begun  # at the clock
        self._line_of_srun = b""  # begun, and not at its end
        self._said_of_srun = (run / f"node_{SRUN}.log").open("ab", buffering=0)
        self._srun = srun
        self._stream = Stream()
        self._console = Console()

    @property
    def all_heard(self) -> bool:
        """Every task has told of its end."""
        return all(len(node.ends) == node.tasks for node in self.nodes.values())

    # ---- what comes in

    def watch(self) -> int:
        """To the end of srun. Returns the exit code of it all."""
        with self._srun, self._said_of_srun, selectors.DefaultSelector() as channels:
            channels.register(self._srun.stdout, selectors.EVENT_READ, self.hear)  # type: ignore[arg-type]
            channels.register(self._srun.stderr, selectors.EVENT_READ, self.hear_srun)  # type: ignore[arg-type]
            channels.register(ORDERS, selectors.EVENT_READ, self.hand_on)
            threading.Thread(target=self.keep_company, daemon=True).start()
            while any(key.data != self.hand_on for key in channels.get_map().values()):
                self.listen(channels)
                self.look_at_the_clock()
        return self.settle()

    def listen(self, channels: selectors.BaseSelector) -> None:
        for key, _ in channels.select(BEAT / 4):
            words = os.read(key.fd, 65536)
            key.data(words)
            if not words:
                channels.unregister(key.fileobj)

    def hear(self, words: bytes) -> None:
        for word in self._stream.feed(words):
            if isinstance(word, bytes):
                self.show(word)
            elif word["node"] in self.nodes:
                self.note(self.nodes[word["node"]], word)
        if not words:
            self.show(b"", last=True)

    def show(self, words: bytes, last: bool = False) -> None:
        for file, text in zip((1, 2), self._console.feed(words, last), strict=True):
            put(file, text)

    def hear_srun(self, words: bytes) -> None:
        """Kept in any case. What it says of tasks that have been heard to their end is no news."""
        if not self.all_heard:
            put(2, words)
        with suppress(OSError):
            self._said_of_srun.write(words)
        *lines, self._line_of_srun = (self._line_of_srun + words).split(b"\n")
        for failed in NODE_FAILURE.findall(b"\n".join(lines).decode(errors="replace")):
            for name in expand(failed):
                if name in self.nodes and not self.nodes[name].ended:
                    self.lose(self.nodes[name], "SLURM says that this node has failed")

    def hand_on(self, words: bytes) -> None:
        """The launcher's orders; its end is an order too."""
        for order in words.decode().split():
            self.tell(order)
        if not words:
            self.leave()

    # ---- what follows

    def note(self, node: Node, report: Json) -> None:
        node.heard = time.monotonic()
        self._step = report.get("step") or self._step
        node.tasks = report.get("tasks") or node.tasks  # SLURM may have laid them out in another way
        if end := report.get("end"):
            node.ends.append(end)
            self.ended(code_of(end))
            if node.ended:
                self.write_down(node)
        self.leave_when_all_have_ended()

    def ended(self, code: int) -> None:
        """A task has, or its node. That one was told to end comes of another's end."""
        if code and self.code in (0, TOLD):
            begun, self.code = self.code, code
            if begun:
                return
            patience = CHECKPOINT if code == STOPPED else 0.0
            self.later(patience, lambda: self.tell("stop"))
            self.later(patience + HURRY, lambda: self.tell("kill"))
            self.later(patience + 2 * HURRY, self.leave)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, action))

    def look_at_the_clock(self) -> None:
        now = time.monotonic()
        self.forgive(now - self._looked - BEAT)
        self._looked = now
        due, self._due = [one for one in self._due if one[0] <= now], [one for one in self._due if one[0] > now]
        for _, action in due:
            action()
        for node in self.nodes.values():
            if node.heard is not None and now - node.heard > PATIENCE and not node.ended:
                self.lose(node)
        if now > self._complain:
            self.complain(now)

    def forgive(self, seconds: float) -> None:
        """Who could not listen for so long, because a disk or a terminal let us wait, must not blame the nodes."""
        for node in self.nodes.values():
            if node.heard is not None:
                node.heard += max(0.0, seconds)

    def keep_company(self) -> None:
        """Say now and then that we are there. In a thread, as a disk may let us wait."""
        while not self._srun.stdin.closed:  # type: ignore[union-attr]
            self.tell("")
            time.sleep(BEAT)

    def lose(self, node: Node, why: str = "") -> None:
        """why: more than its silence."""
        node.lost = True
        write(self.run / f"node_{node.name}.lost", f"{why}\n")
        self.say(f"{node.name}: {why or f'nothing was heard of it for {PATIENCE:.0f} s'}: ending the others")
        self.ended(UNFIT)
        self.leave_when_all_have_ended()

    def complain(self, now: float) -> None:
        """Who has not begun, while others wait for him."""
        missing = [node.name for node in self.nodes.values() if node.heard is None]
        if missing:
            total = len(self.nodes)
            self.say(
                f"{total - len(missing)} of {total} nodes joined, waiting for {', '.join(missing)}, "
                f"{now - self._begun:.0f} s"
            )
        self._complain = now + (now - self._begun)

    def tell(self, order: str) -> None:
        """All tasks that can hear it."""
        assert self._srun.stdin
        with suppress(OSError, ValueError):  # srun has ended, or we have left
            self._srun.stdin.write(f"{order}\n".encode())

    def leave_when_all_have_ended(self) -> None:
        if all(node.ended for node in self.nodes.values()):
            self.leave()

    def leave(self) -> None:
        """Tasks that have been heard may go, others have to; where srun does not end by that, it is ended."""
        assert self._srun.stdin
        if not self._srun.stdin.closed:
            with suppress(OSError):
                self._srun.stdin.close()
            if any(node.lost for node in self.nodes.values()):
                self.cancel()
                self.later(1.0, self._srun.kill)
            else:
                self.later(FAREWELL, self.cancel)
                self.later(2 * FAREWELL, self._srun.kill)

    def cancel(self) -> None:
        if self._step:
            subprocess.Popen(["scancel", "--quiet", self._step], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    # ---- what is written

    def write_down(self, node: Node) -> None:
        """As agents do it: how the ranks of a node ended, when one of the run failed, and the exit code of it all."""
        ranks = [end for end in node.ends if end["rank"] is not None]
        deaths = [end for end in ranks if end["exit_code"]]
        ended_well = [end["rank"] for end in ranks if not end["exit_code"] and not end.get("ended_by_agent")]
        if self.code and (deaths or ended_well):
            record = {"node": node.name, "deaths": deaths, "ended_well": ended_well}
            write(self.run / "errors" / f"node_{node.name}.json", json_of(record))
        write(self.run / f"node_{node.name}.exit", f"{node.exit_code}\n")

    def settle(self) -> int:
        """srun has ended: what it says of tasks that did not."""
        for node in self.nodes.values():
            if self.code and node.ended and not node.lost:  # what ended well is of interest only now
                self.write_down(node)
        silent = [node for node in self.nodes.values() if not node.ended]
        if not silent:
            return self.code
        if all(node.heard is None for node in silent) and len(silent) == len(self.nodes):
            code = self._srun.returncode
            code = (128 - code if code < 0 else code) or UNFIT
            write(self.run / f"node_{SRUN}.exit", f"{code}\n")
            return code
        for node in silent:
            if node.ends:
                self.write_down(node)
            if not self.code or not node.ends:
                self.lose(node, "srun has ended before its tasks")
        return self.code

    def say(self, words: str) -> None:
        put(2, f"step: {words}\n".encode())


def put(file: int, words: bytes) -> None:
    """On the console: that it was closed, or is full, is no reason to end."""
    with suppress(OSError):
        while words:
            words = words[os.write(file, words) :]


def json_of(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def write(path: Path, text: str) -> None:
    """Whole or not at all; a full disk is told, no more."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        sys.stderr.write(f"step: cannot write {path}: {error.strerror}\n")


# ---------------------------------------------------------------- the whole


def watch(run: str, nodes: str, srun: subprocess.Popen[bytes]) -> int:
    """To the end of srun. Returns the exit code of the first task that ended badly.

    nodes: name:tasks of each, with commas between. srun: with pipes to all its standard files.
    """
    return Step(Path(run), [node_of(word) for word in nodes.split(",")], srun).watch()


def node_of(word: str) -> Node:
    name, _, tasks = word.rpartition(":")
    return Node(name, int(tasks))
