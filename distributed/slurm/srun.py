"""The launcher's side of a job step: run srun, watch its tasks and record how they end.

srun runs as a child in a separate session, because the launcher handles Ctrl-C. srun's standard input is the control
channel of all tasks, and its standard output carries their lines and reports (distributed/slurm/task.py). This module
writes the files that agents and supervisors write in launches without srun: errors/node_<name>.json, node_<name>.exit
and, for a lost node, node_<name>.lost. The first failed task stops the others. Standard library only.
"""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from distributed.exit_codes import STOPPED, TERMINATED, UNFIT
from distributed.files import write_file, write_json
from distributed.launch.console import Console, Lines
from distributed.launch.reports import ReportParser
from distributed.nodelist import expand
from distributed.slurm.task import ERROR, HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT

STOP_GRACE = 5.0  # seconds between stop request and kill request after a failed task
CHECKPOINT_GRACE = 30.0  # seconds between a task's exit with a checkpoint and the stop request
SRUN_GRACE = 5.0  # seconds for srun to exit after its tasks; with a lost node srun would wait for SLURM's timeout
FIRST_WARNING = 10.0  # seconds until the first warning about missing nodes; repeated whenever the time has doubled
NODE_FAILURE = re.compile(r"Node failure on (\S+)")  # printed by srun
CONTROL = 0  # file descriptor of the launcher's requests
SRUN = "srun"  # name in node_srun.log and node_srun.exit

Json = dict[str, Any]


@dataclass
class StepNode:
    """The state of a node while the step runs."""

    name: str
    tasks: int
    last_report: float | None = None  # time.monotonic(); None: the node has not joined
    ends: list[Json] = field(default_factory=list)  # final reports of its tasks, in order of arrival
    lost: bool = False

    @property
    def ended(self) -> bool:
        return self.lost or len(self.ends) == self.tasks

    @property
    def exit_code(self) -> int:
        """The exit code of the node's first failed task; 0 if none failed. A failed task may be the last to exit."""
        failed = [end for end in self.ends if end["exit_code"]]
        return min(failed, key=lambda end: end["time"])["exit_code"] if failed else 0


class JobStep:
    """Watches srun and its tasks until srun exits."""

    def __init__(
        self, run: Path, nodes: Sequence[StepNode], srun: subprocess.Popen[bytes], terminals: str = ""
    ) -> None:
        """srun: the process, with pipes to its three standard streams. terminals: as of Console."""
        self.run = run
        self.nodes = {node.name: node for node in nodes}
        self.code = 0  # of the first failed task
        self._step = ""  # step id, as reported by tasks
        self._due: list[tuple[float, Callable[[], None]]] = []  # scheduled actions
        self._started = self._checked = time.monotonic()  # _checked: last call of check_clock()
        self._warn_at = self._started + FIRST_WARNING
        self._lines, self._messages = Lines(), Lines()  # of the tasks, and of srun itself
        self._srun_log = (run / f"node_{SRUN}.log").open("ab", buffering=0)
        self._srun = srun
        self._parser = ReportParser()
        self._console = Console(terminals)

    # ---- events

    def watch(self) -> int:
        """Watch until srun exits. Returns the exit code of the step.

        The end of srun's output does not show that srun has exited: srun may close its output and continue, and a child
        of srun may keep the pipes open after srun has exited.
        """
        with self._srun, self._srun_log, selectors.DefaultSelector() as channels:
            channels.register(self._srun.stdout, selectors.EVENT_READ, self.handle_output)  # type: ignore[arg-type]
            channels.register(self._srun.stderr, selectors.EVENT_READ, self.handle_errors)  # type: ignore[arg-type]
            channels.register(CONTROL, selectors.EVENT_READ, self.handle_requests)
            threading.Thread(target=self.send_heartbeats, daemon=True).start()
            outputs = {self._srun.stdout, self._srun.stderr}  # those still open
            silent = False  # whether the last iteration read nothing
            while self._srun.poll() is None or not silent:
                silent = True
                if not outputs:
                    with suppress(subprocess.TimeoutExpired):
                        self._srun.wait(HEARTBEAT_INTERVAL / 4)
                for key, _ in channels.select(HEARTBEAT_INTERVAL / 4 if outputs else 0):
                    received = os.read(key.fd, 65536)
                    key.data(received)
                    if received:
                        silent = False
                    else:
                        channels.unregister(key.fileobj)
                        outputs.discard(key.fileobj)
                self.check_clock()
            self.show(b"", last=True)
            self.write(self._console.end())
        return self.record_missing_ends()

    def handle_output(self, received: bytes) -> None:
        for item in self._parser.feed(received):
            if isinstance(item, bytes):
                self.show(item)
            elif item["node"] in self.nodes:
                self.handle_report(self.nodes[item["node"]], item)

    def show(self, output: bytes, last: bool = False) -> None:
        lines = self._lines.feed(output, last).split(b"\n")[:-1]
        for of_errors, group in groupby(lines, lambda line: line.startswith(ERROR)):
            text = b"".join([line.removeprefix(ERROR) + b"\n" for line in group])
            self.write(self._console.feed(text, 2 if of_errors else 1))

    def write(self, texts: tuple[bytes, bytes]) -> None:
        for file, text in zip((1, 2), texts, strict=True):
            write_console(file, text)

    def handle_errors(self, received: bytes) -> None:
        """Log srun's messages. Show them until all tasks have reported their end."""
        messages = self._messages.feed(received, last=not received)
        if messages and not all(len(node.ends) == node.tasks for node in self.nodes.values()):
            write_console(2, self._console.message(messages))
        with suppress(OSError):
            self._srun_log.write(received)
        for failed in NODE_FAILURE.findall(messages.decode(errors="replace")):
            for name in expand(failed):
                if name in self.nodes and not self.nodes[name].ended:
                    self.mark_lost(self.nodes[name], "node failure reported by SLURM")

    def handle_requests(self, received: bytes) -> None:
        for request in received.decode().splitlines():
            if request:
                self.request(request)
        if not received:  # the launcher has exited
            self.close_channel()

    def handle_report(self, node: StepNode, report: Json) -> None:
        node.last_report = time.monotonic()
        self._step = report.get("step") or self._step
        node.tasks = report.get("tasks") or node.tasks  # SLURM may have distributed them differently
        self.task_ended(report.get("failed", 0))
        if end := report.get("end"):
            node.ends.append(end)
            self.task_ended(end["exit_code"])
            if node.ended:
                self.record_node(node)
        self.close_channel_if_all_ended()

    # ---- reactions

    def task_ended(self, code: int) -> None:
        """Stop the step after a failed task, which may not have exited, or a lost node.

        TERMINATED is a consequence: a later code replaces it.
        """
        if code and self.code in (0, TERMINATED):
            stopping, self.code = self.code, code
            if stopping:
                return
            seconds = CHECKPOINT_GRACE if code == STOPPED else 0.0
            self.schedule(seconds, lambda: self.request("stop"))
            self.schedule(seconds + STOP_GRACE, lambda: self.request("kill"))
            self.schedule(seconds + 2 * STOP_GRACE, self.close_channel)

    def schedule(self, seconds: float, action: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, action))

    def check_clock(self) -> None:
        now = time.monotonic()
        # While a disk or a terminal blocks this process, it reads no heartbeats: extend the timeout.
        blocked, self._checked = max(0.0, now - self._checked - HEARTBEAT_INTERVAL), now
        due, self._due = [item for item in self._due if item[0] <= now], [item for item in self._due if item[0] > now]
        for _, action in due:
            action()
        for node in self.nodes.values():
            if node.last_report is not None and not node.ended:
                node.last_report += blocked
                if now - node.last_report > HEARTBEAT_TIMEOUT:
                    self.mark_lost(node)
        if now > self._warn_at:
            self._warn_at = now + (now - self._started)
            self.warn_of_missing(now - self._started)

    def warn_of_missing(self, seconds: float) -> None:
        missing = [node.name for node in self.nodes.values() if node.last_report is None]
        if missing:
            joined = f"{len(self.nodes) - len(missing)} of {len(self.nodes)} nodes joined"
            self.print(f"{joined}, waiting for {', '.join(missing)}, {seconds:.0f} s")

    def mark_lost(self, node: StepNode, reason: str = "") -> None:
        """reason: "" for a heartbeat timeout."""
        node.lost = True
        write(self.run / f"node_{node.name}.lost", f"{reason}\n")
        self.print(f"{node.name}: {reason or f'no heartbeat for {HEARTBEAT_TIMEOUT:.0f} s'}; stopping the other nodes")
        self.task_ended(UNFIT)
        self.close_channel_if_all_ended()

    # ---- control channel of the tasks

    def send_heartbeats(self) -> None:
        """Send the heartbeats without which tasks stop. Runs in a thread, because a disk may block the main thread."""
        while not self._srun.stdin.closed:  # type: ignore[union-attr]
            self.request("")
            time.sleep(HEARTBEAT_INTERVAL)

    def request(self, request: str) -> None:
        """Send a request to all tasks."""
        assert self._srun.stdin
        with suppress(OSError, ValueError):  # srun has exited, or the channel is closed
            self._srun.stdin.write(f"{request}\n".encode())

    def close_channel_if_all_ended(self) -> None:
        if all(node.ended for node in self.nodes.values()):
            self.close_channel()

    def close_channel(self) -> None:
        """Close the control channel, so that all tasks exit. Cancels and kills srun if srun does not exit."""
        assert self._srun.stdin
        if not self._srun.stdin.closed:
            with suppress(OSError):
                self._srun.stdin.close()
            if any(node.lost for node in self.nodes.values()):
                self.cancel()
                self.schedule(1.0, self._srun.kill)
            else:
                self.schedule(SRUN_GRACE, self.cancel)
                self.schedule(2 * SRUN_GRACE, self._srun.kill)

    def cancel(self) -> None:
        if self._step:
            subprocess.Popen(["scancel", "--quiet", self._step], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    # ---- records

    def record_node(self, node: StepNode) -> None:
        """Write the exit code of a node and, if the step failed, how its ranks ended, in the format that agents use."""
        ranks = [end for end in node.ends if end["rank"] is not None]
        failures = [end for end in ranks if end["exit_code"]]
        succeeded = [end["rank"] for end in ranks if not end["exit_code"] and not end.get("ended_by_agent")]
        if self.code and (failures or succeeded):
            record = {"node": node.name, "failures": failures, "succeeded": succeeded}
            write(self.run / "errors" / f"node_{node.name}.json", record)
        write(self.run / f"node_{node.name}.exit", f"{node.exit_code}\n")

    def record_missing_ends(self) -> int:
        """Complete the records after srun's exit: some tasks may not have reported their end. Returns the exit code."""
        for node in self.nodes.values():
            if self.code and node.ended and not node.lost:  # a node that ended before the failure has no failure record
                self.record_node(node)
        missing = [node for node in self.nodes.values() if not node.ended]
        if not missing:
            return self.code
        if len(missing) == len(self.nodes) and all(node.last_report is None for node in missing):
            code = self._srun.returncode
            code = (128 - code if code < 0 else code) or UNFIT
            write(self.run / f"node_{SRUN}.exit", f"{code}\n")
            return code
        for node in missing:
            if node.ends:
                self.record_node(node)
            if not self.code or not node.ends:
                self.mark_lost(node, "srun exited before its tasks")
        return self.code

    def print(self, message: str) -> None:
        write_console(2, self._console.message(f"step: {message}".encode()))


def write_console(file: int, text: bytes) -> None:
    """Write to the console. Ignores errors, such as a closed terminal."""
    with suppress(OSError):
        while text:
            text = text[os.write(file, text) :]


def write(path: Path, content: str | Json) -> None:
    """Write text or JSON. Prints errors, such as a full disk, instead of raising them."""
    try:
        if isinstance(content, str):
            write_file(path, content)
        else:
            write_json(path, content)
    except OSError as error:
        sys.stderr.write(f"step: cannot write {path}: {error.strerror}\n")


def watch(run: str, terminals: str, nodes: str, srun: subprocess.Popen[bytes]) -> int:
    """Watch a job step until srun exits. Returns the exit code of the step.

    terminals: the streams that are terminals: "", "1", "2" or, if both are the same, "12".
    nodes: NAME:TASKS, separated by commas.
    srun: the process, with pipes to its three standard streams.
    """
    fields = (node.rpartition(":") for node in nodes.split(","))
    return JobStep(Path(run), [StepNode(name, int(tasks)) for name, _, tasks in fields], srun, terminals).watch()
