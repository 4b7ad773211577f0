"""The launcher's side of a job step: start srun, follow its tasks and record how they end.

srun's standard input is the control channel of all tasks, and its standard output carries their lines and reports
(distributed/slurm/task.py). This module writes the files that agents and supervisors write in launches without srun:
errors/node_<name>.json, node_<name>.exit and, for a lost node, node_<name>.lost.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from distributed.exit_codes import UNFIT
from distributed.files import write_file, write_json
from distributed.launch.node_reports import ERROR, HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT
from distributed.launch.node_states import State
from distributed.launch.output_lines import Console, Lines
from distributed.launch.shown_ranks import ShownRanks
from distributed.launch.watch import Local, Watch
from distributed.nodelist import NodeListError, expand
from distributed.transport.commands import JobCommands
from distributed.transport.loop import Client
from distributed.trust import printable, regular_file

SRUN_GRACE = 5.0  # seconds for srun to exit after its tasks; with a lost node srun would wait for SLURM's timeout
FIRST_WARNING = 10.0  # seconds until the first warning about missing nodes; another one whenever the time has doubled
NODE_FAILURE = re.compile(r"^srun: error: Node failure on (\S+)$", re.MULTILINE)
SRUN = "srun"  # name in node_srun.log and node_srun.exit

Json = dict[str, Any]


@dataclass
class StepNode:
    """The state of a node while the step runs."""

    name: str
    tasks: int
    last_report: float | None = None  # on the clock of the loop; None: the node has not joined
    ends: list[Json] = field(default_factory=list)  # final reports of its tasks, in order of arrival
    lost: bool = False
    waits: bool = False  # its agent waits for the next attempt

    @property
    def ended(self) -> bool:
        return self.lost or len(self.ends) == self.tasks

    @property
    def exit_code(self) -> int:
        """The exit code of the node's first failed task; 0 if none failed. Tasks may report in another order."""
        failed = [end for end in self.ends if end["exit_code"]]
        return min(failed, key=lambda end: end.get("time", 0.0))["exit_code"] if failed else 0


class Srun(Local):
    """Starts all tasks with one srun."""

    lease = int(HEARTBEAT_TIMEOUT)
    clients_are_nodes = False

    def __init__(self, before: Sequence[str], after: Sequence[str], job: str, task_per_rank: bool) -> None:
        """before, after: the command of srun, up to the run directory and after it. job: number of the SLURM job."""
        super().__init__(JobCommands(job))
        self.before, self.after = before, after
        self._step: JobStep
        self._task_per_rank, self.starts_agents = task_per_rank, not task_per_rank

    def start(self, watch: Watch) -> None:
        run = os.fsencode(watch.directory)
        # srun passes its environment to the tasks.
        environment = {b"MUSTER_RUN_DIR": run, b"MUSTER_METRICS": run + b"/metrics.jsonl"}
        for name, _, value in (entry.partition(b"=") for entry in watch.node_start.entries()):
            environment[name] = value
        if watch.continues:  # all agents wait: if only some had waited, Watch.attempt() would have ended them
            self._step.start_next_attempt()
            return
        all_nodes = [*watch.run.nodes, *watch.spares]
        nodes = [StepNode(node.node, node.processes if self._task_per_rank else 1) for node in all_nodes]
        self._step = JobStep(watch, nodes)
        self._step.start([*self.before, str(watch.directory), *self.after], environment)

    def request(self, watch: Watch, request: str) -> None:
        if request == "end":
            self._step.close_channel()
        else:
            super().request(watch, request)

    def abandon(self, watch: Watch) -> None:
        attempt = watch.attempts

        def give_up() -> None:
            if attempt == watch.attempts:  # the attempt has not ended: a blocked console may be the cause
                watch.kill_clients()

        self._step.close_channel()
        watch.loop.call_later(3 * SRUN_GRACE, give_up)


class JobStep:
    """Follows srun and its tasks until srun has exited."""

    def __init__(self, watch: Watch, nodes: Sequence[StepNode]) -> None:
        self.nodes = {node.name: node for node in nodes}
        self._watch = watch
        self._step = ""  # step id, as reported by tasks
        self._closed = False  # whether the control channel is closed
        self._clock = watch.loop.clock
        self._started = self._checked = self._clock.now()  # _checked: last call of check_clock()
        self._warn_at = self._started + FIRST_WARNING
        self._lines, self._messages = Lines(), Lines()  # of the tasks, and of srun itself
        self._shown = ShownRanks(watch.node_start.console_rank)
        self._console = Console(watch.terminals, self._shown.ranks)

    @property
    def code(self) -> int:
        """The exit code of the first failed task; 0 if none has failed."""
        return self._watch.stopping.status

    # ---- events

    def start(self, command: list[str], environment: dict[bytes, bytes]) -> None:
        self._client = self._watch.start_client(
            SRUN, command, sent=b"", on_text=self.show, on_report=self.handle_report, on_errors=self.handle_errors,
            on_exit=self.handle_exit, environment=environment,
        )  # fmt: skip
        self.check_clock()

    def start_next_attempt(self) -> None:
        """Start an attempt with the agents, which all wait for it."""
        for node in self._nodes_of_attempt():
            node.ends, node.waits = [], False
        self._client.send(self._watch.node_start.next_attempt())

    def show(self, output: bytes, last: bool = False) -> None:
        self._shown.look(complete := self._lines.feed(output, last))
        lines = complete.split(b"\n")[:-1]
        for of_errors, group in groupby(lines, lambda line: line.startswith(ERROR)):
            text = b"".join([line.removeprefix(ERROR) + b"\n" for line in group])
            self._write(self._console.feed(text, 2 if of_errors else 1))

    def _write(self, texts: tuple[bytes, bytes]) -> None:
        for stream, text in zip((1, 2), texts, strict=True):
            self._watch.console.show(text, stream)

    def handle_errors(self, received: bytes) -> None:
        """Log srun's messages. Show them until all tasks have reported their end.

        Only the message that nodes have failed has a meaning here. A task has the same standard error as srun, and a
        rank can open it and imitate this message.
        """
        messages = self._messages.feed(received, last=not received)
        if messages and not all(len(node.ends) == node.tasks for node in self._nodes_of_attempt()):
            self._watch.console.show(self._console.message(messages), 2)
        with suppress(OSError), open(self._watch.file_of(SRUN, "log"), "ab", opener=regular_file) as log:
            log.write(received)
        for failed in NODE_FAILURE.findall(messages.decode(errors="replace")):
            with suppress(NodeListError):
                for name in sorted(self.nodes.keys() & expand(failed)):
                    if not self.nodes[name].ended:
                        self.mark_lost(self.nodes[name], "node failure reported by SLURM")

    def handle_exit(self, client: Client) -> None:
        self._closed = True
        for name in self._watch.nodes.waiting:
            self._watch.nodes[name].become(State.ENDED)
        self.show(b"", last=True)
        self._write(self._console.end())
        self.record_missing_ends(client.code)

    def handle_report(self, report: Json) -> None:
        if not (node := self.nodes.get(report["node"])):
            return
        node.last_report = self._clock.now()
        if re.fullmatch(rf"{self._watch.run.job}\.\d+", report.get("step", ""), re.ASCII):
            self._step = report["step"]
        node.tasks = report.get("tasks") or node.tasks  # SLURM may have distributed them differently
        if self._watch.is_spare(node.name):
            if report.get("waiting"):
                self._watch.spare_is_ready(node.name)
            elif report.get("end"):
                self._watch.spare_is_lost(node.name)
            return
        if node not in self._nodes_of_attempt():  # it was lost and replaced
            return
        self._watch.stopping.node_failed(report.get("failed", 0))
        if end := report.get("end"):
            node.ends.append(end)
            node.waits = report.get("waiting", False)
            self._watch.stopping.node_failed(end["exit_code"])
            if node.ended:
                self.record_node(node)
        self.close_channel_if_all_ended()

    # ---- reactions

    def check_clock(self) -> None:
        """Check for nodes without heartbeats and for missing nodes, repeatedly until srun exits."""
        if self._closed:
            return
        self._watch.loop.call_later(HEARTBEAT_INTERVAL / 4, self.check_clock)
        now = self._clock.now()
        passed, self._checked = now - self._checked, now
        # While a slow console blocks srun's output, no heartbeats are read: extend the timeout.
        blocked = passed if self._watch.console.is_slow else 0.0
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
        """Declare a node lost, and stop the others. reason: "" for a heartbeat timeout."""
        node.lost = True
        if self._watch.is_spare(node.name):
            self._watch.spare_is_lost(node.name)
            return
        self._watch.lost_nodes.notify_lost(node.name, reason or "no heartbeat")
        self._write_file(f"node_{node.name}.lost", f"{reason}\n")
        self.print(f"{node.name}: {reason or f'no heartbeat for {HEARTBEAT_TIMEOUT:.0f} s'}; stopping the other nodes")
        self._watch.stopping.node_failed(UNFIT)
        self.close_channel_if_all_ended()

    # ---- control channel of the tasks

    def close_channel_if_all_ended(self) -> None:
        """When all tasks have reported their end, let them exit, unless all agents wait for the next attempt."""
        nodes = self._nodes_of_attempt()
        if not all(node.ended for node in nodes):
            return
        waiting = [node for node in nodes if node.waits]
        if not all(node.waits or (node.lost and self._watch.replaces) for node in nodes) or not waiting:
            self.close_channel()
        elif self._watch.nodes.unended:
            for node in waiting:
                self.record_node(node)
                self._watch.nodes[node.name].become(State.WAITING)

    def _nodes_of_attempt(self) -> list[StepNode]:
        """The nodes of the step without spare nodes, and without lost ones that were replaced."""
        return [self.nodes[node.node] for node in self._watch.run.nodes]

    def close_channel(self) -> None:
        """Close the control channel, so that all tasks exit. If srun does not exit, cancel the step and kill srun."""
        if self._closed:
            return
        self._closed = True
        self._client.end_input()
        if any(node.lost for node in self.nodes.values()):
            self._cancel()
            self._watch.loop.call_later(1.0, self._client.kill)
        else:
            self._watch.loop.call_later(SRUN_GRACE, self._cancel)
            self._watch.loop.call_later(2 * SRUN_GRACE, self._client.kill)

    def _cancel(self) -> None:
        if self._step and self._client.is_running:
            scancel = ["scancel", "--quiet", "--", self._step]
            with suppress(OSError):
                subprocess.Popen(scancel, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    # ---- records

    def record_node(self, node: StepNode) -> None:
        """Write the exit code of a node and, if the step failed, how its ranks ended, in the format that agents use."""
        ranks = [end for end in node.ends if end["rank"] is not None]
        failures = [end for end in ranks if end["exit_code"]]
        succeeded = [end["rank"] for end in ranks if not end["exit_code"] and not end.get("ended_by_agent")]
        if self.code and (failures or succeeded):
            record = {"node": node.name, "failures": failures, "succeeded": succeeded}
            self._write_file(f"errors/node_{node.name}.json", record)
        self._write_file(f"node_{node.name}.exit", f"{node.exit_code}\n")

    def record_missing_ends(self, code: int) -> None:
        """Complete the records after srun's exit: some tasks may not have reported their end.

        code: the exit code of srun.
        """
        for node in self.nodes.values():
            if self.code and node.ended and not node.lost:  # a node that ended before the failure has no failure record
                self.record_node(node)
        missing = [node for node in self._nodes_of_attempt() if not node.ended]
        if missing and all(node.last_report is None for node in self.nodes.values()):
            code = code or UNFIT
            self._write_file(f"node_{SRUN}.exit", f"{code}\n")
            self._watch.stopping.node_failed(code)
            return
        for node in missing:
            if node.ends:
                self.record_node(node)
            if not self.code or not node.ends:
                self.mark_lost(node, "srun exited before its tasks")

    def print(self, message: str) -> None:
        self._watch.console.show(self._console.message(f"step: {printable(message)}".encode()), 2)

    def _write_file(self, name: str, content: str | Json) -> None:
        """Write text or JSON. Prints errors, such as a full disk, instead of raising them."""
        try:
            if isinstance(content, str):
                write_file(self._watch.attempt_directory / name, content)
            else:
                write_json(self._watch.attempt_directory / name, content)
        except OSError as error:
            self.print(f"cannot write {self._watch.attempt_directory / name}: {error.strerror}")
