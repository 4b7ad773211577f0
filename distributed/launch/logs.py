"""Print the output of a run's ranks, from the logs of its nodes, and follow them while the run is active.

The logs of all attempts are in the run directory. The log of a node that does not share this directory is read on the
node, until the launcher has copied it. Each line of a rank has a prefix with its node and rank. Logs have no times, but
the samples of resource usage have the size of the log at their times.

scripts/logs.sh executes this program.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from distributed import attempts
from distributed.exit_codes import UNFIT, WRONG_CALL
from distributed.files import file_time
from distributed.host.replies import Reply
from distributed.launch.output_lines import Lines, rank_of
from distributed.launch.shown_ranks import ShownRanks, choice
from distributed.records import integer, mapping, number
from distributed.runs.lookup import IN_JOB, REMOTE, RUNNING, Run, RunLookupError, RunNode, read
from distributed.runs.query import JobWithoutRun, RunQuery, find_run, parser_of
from distributed.transport.commands import Messages, TransportError
from distributed.trust import MAX_BYTES, MAX_TEXT, bounded, parse_json, printable, read_bytes, regular_file

# For sh on a node. $1: run directory, $2: file, $3: first byte. Prints nothing if the node shares the directory.
PRINT_FILE = '[ -e "$1/run.json" ] || [ ! -e "$1/$2" ] || tail -c +"$3" -- "$1/$2"'
BLOCK = 1 << 20  # bytes that are read at once
SEARCHED = 8 << 20  # bytes of a log in which the shown ranks are searched
FAST, SLOW = 0.5, 2.0  # seconds between two looks for new output: in files here, and with calls of nodes or of SLURM
NODE_TIMEOUT, STATUS_TIMEOUT = 300.0, 5.0  # seconds for the log and for the status of a node
RESTART_SECONDS = 10.0  # within this time after a verdict, a launcher on another machine may restart the run
ATTEMPT, ALL = "attempt", "all"  # values of --since and --rank
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}  # seconds


class NodeLog:
    """The log of a node in one attempt."""

    def __init__(self, attempt: Path, node: RunNode) -> None:
        self.node, self.path = node, attempt / f"node_{node.node}.log"
        self.offset = -1  # bytes that have been read or are skipped; -1: not known yet
        self.problem = ""  # why it could not be read
        self.lines = Lines()


class LogReader:
    """Reads and prints the logs of a run."""

    def __init__(self, query: RunQuery, options: argparse.Namespace, messages: Messages) -> None:
        """Raises TransportError."""
        self._query, self._options, self._messages = query, options, messages
        self._since = parse_since(options.since, time.time())
        self._ranks = chosen_ranks(query.run, options.rank, options.node)  # None: all
        self.logs: list[NodeLog] = []
        self._attempts = 0  # number of attempts whose logs are in self.logs
        self._calls_nodes = False
        if options.since == ATTEMPT:
            self._attempts = len(attempts.directories(query.run.directory)) - 1
        self._add_attempts()
        if not self.logs:
            nodes = ", ".join(
                f"{node.node} ({node.processes} ranks from {node.first_rank})" for node in query.run.nodes
            )
            raise TransportError(WRONG_CALL, f"--node, --rank: the run has no such node or rank; it has {nodes}")

    def _add_attempts(self) -> None:
        for attempt in attempts.directories(self._query.run.directory)[self._attempts :]:
            nodes = self._query.run.nodes
            try:
                nodes = read(attempt).nodes
            except RunLookupError:
                if attempt.parent.name == attempts.NAME:  # it is being made
                    return
            self._attempts += 1
            for node in nodes:
                is_chosen = self._ranks is None or not self._ranks.isdisjoint(ranks_of(node))
                if is_chosen and self._options.node in ("", node.node):
                    self.logs.append(NodeLog(attempt, node))

    # ---- reading

    def print_new(self, limit: int | None = None, last: bool = False) -> None:
        """Print the output since the last call. limit: number of lines of each node. last: also an incomplete line."""
        for log in self.logs:
            printed = deque[str](maxlen=limit)

            def take(block: bytes, log: NodeLog = log, printed: deque[str] = printed) -> None:
                printed.extend(self._selected(log.node, log.lines.feed(block)))
                if limit is None:
                    self._write(printed)

            if log.offset < 0:
                log.offset = self._start(log)
                if limit is not None:
                    self._read_end(log, printed, take)
            self._read(log, take)
            if last:
                printed.extend(self._selected(log.node, log.lines.feed(b"", last=True)))
            self._write(printed)

    def _read_end(self, log: NodeLog, printed: deque[str], take: Callable[[bytes], None]) -> None:
        """Read a log here from its end, and more of it until there are enough lines."""
        with contextlib.suppress(OSError):
            first, size, span = log.offset, log.path.stat().st_size, BLOCK
            while True:
                printed.clear()
                log.lines, log.offset = Lines(), max(first, size - span)
                if log.offset > first:  # skip the rest of a line
                    with open(log.path, "rb", opener=regular_file) as file:
                        file.seek(log.offset)
                        log.offset += len(file.readline(span))
                self._read(log, take)
                if len(printed) == printed.maxlen or span >= size - first:
                    return
                span *= 16

    def _read(self, log: NodeLog, take: Callable[[bytes], None]) -> None:
        """Read what was added to a log."""

        def receive(block: bytes) -> None:
            log.offset += len(block)
            take(block)

        problem = ""
        try:
            with open(log.path, "rb", opener=regular_file) as file:
                file.seek(log.offset)
                while block := file.read(BLOCK):
                    receive(block)
        except FileNotFoundError:
            reply = self._call(log, log.path.name, log.offset + 1, receive)
            if reply.code:
                problem = f"its log cannot be read: {bounded(reply.failure_message())}"
            elif not log.offset and not self._options.follow:
                problem = f"no log of attempt {log.path.parent.name}: it has not started, or it is lost"
        except OSError as error:
            problem = f"its log cannot be read: {error.strerror}"
        if problem and problem != log.problem:
            self._messages.print(f"{log.node.node}: {problem}")
        log.problem = problem

    def _call(self, log: NodeLog, name: str, first: int, on_output: Callable[[bytes], None] | None = None) -> Reply:
        """Print a file of an attempt on the node, which may be private. An empty reply for a node that is here."""
        run, replies = self._query.run, list[Reply]()
        if not log.node.address and not run.job:
            return Reply(log.node.node, 0, "", "")
        self._calls_nodes = True
        path = os.path.relpath(log.path.parent / name, run.directory)
        line = ["sh", "-c", PRINT_FILE, "sh", run.directory_at_launch, path, str(first)]
        command = self._query.commands.command(log.node, line, "/", timeout=NODE_TIMEOUT)
        most = MAX_BYTES if on_output else MAX_TEXT
        call = self._query.calls.call(
            log.node.node, command, replies.append, timeout=NODE_TIMEOUT, on_output=on_output, most=most
        )
        self._query.calls.wait({call})
        return replies[0]

    def _start(self, log: NodeLog) -> int:
        """The position in a log at the time of --since."""
        if self._since is None:
            return 0
        name = log.path.with_suffix(".samples.jsonl").name
        try:
            if log.path.stat().st_mtime < self._since:
                return log.path.stat().st_size
            return size_at(read_bytes(log.path.with_name(name)).decode(errors="replace"), self._since)
        except FileNotFoundError:
            return size_at(self._call(log, name, 1).out, self._since)

    # ---- printing

    def _selected(self, node: RunNode, lines: bytes) -> Iterator[str]:
        """The chosen lines. A node has only lines of its own ranks; other lines are messages of Muster on the node."""
        for line in lines.split(b"\n")[:-1]:
            rank = rank_of(line)
            rank = rank if rank in ranks_of(node) else None
            if self._ranks is None:
                line = line if rank is not None else f"[{node.node}] ".encode() + line
            elif rank in self._ranks:
                line = line.partition(b"] ")[2]
            elif rank is not None or self._options.rank:
                continue
            yield printable(line.decode(errors="replace"), "\t") + "\n"

    def _write(self, lines: deque[str]) -> None:
        sys.stdout.writelines(lines)
        sys.stdout.flush()
        lines.clear()

    # ---- following

    def follow(self) -> None:
        """Print new output until the run has ended."""
        is_active = True
        while is_active:
            is_active = self._is_active()  # before reading, so that the last output is not missed
            self._add_attempts()
            self.print_new(last=not is_active)
            time.sleep((SLOW if self._calls_nodes or self._query.run.job else FAST) if is_active else 0)

    def _is_active(self) -> bool:
        self._query.update()
        run = self._query.run
        if run.launcher.state in (RUNNING, IN_JOB):
            return True
        with contextlib.suppress(FileNotFoundError):
            age = file_time(run.directory) - Path(attempts.newest(run.directory), "verdict.json").stat().st_mtime
            return run.launcher.state == REMOTE and age < RESTART_SECONDS
        self._calls_nodes = True
        return any(one.status and one.status.processes for one in self._query.query([], STATUS_TIMEOUT))


def ranks_of(node: RunNode) -> range:
    return range(node.first_rank, node.first_rank + node.processes)


def chosen_ranks(run: Run, rank: str, node: str) -> set[int] | None:
    """The ranks whose output is printed; None: all. Raises TransportError for another value of --rank."""
    if rank.isascii() and rank.isdecimal():
        return {int(rank)}
    if rank not in ("", ALL):
        raise TransportError(WRONG_CALL, f"--rank: expected the number of a rank or all, got '{rank}'")
    if rank == ALL or node:
        return None
    chosen = run.call.value("--console-rank", "auto") if run.call else "auto"
    shown = ShownRanks(choice(chosen, run.nodes[-1]), 0.0)
    log = Path(attempts.newest(run.directory), f"node_{run.nodes[-1].node}.log")
    with contextlib.suppress(OSError), open(log, "rb", opener=regular_file) as file:
        shown.look(file.read(SEARCHED))
    return shown.ranks


def parse_since(text: str, now: float) -> float | None:
    """The Unix time of a value of --since; None: from the start. Raises TransportError."""
    if text in ("", ATTEMPT):
        return None
    if re.fullmatch(r"([0-9]{1,6}[smhd])+", text):
        return now - sum(int(one[:-1]) * UNITS[one[-1]] for one in re.findall(r"[0-9]+.", text))
    with contextlib.suppress(ValueError):
        clock, today = time.strptime(text, "%H:%M:%S" if text.count(":") == 2 else "%H:%M"), time.localtime(now)
        found = time.mktime((*today[:3], *clock[3:6], 0, 0, -1))
        return found if found <= now else found - UNITS["d"]  # of yesterday
    raise TransportError(WRONG_CALL, f"--since: expected a duration such as 10m, HH:MM or attempt, got '{text}'")


def size_at(samples: str, since: float) -> int:
    """The size of a log at a time, according to its node's samples; 0 without a sample that has it."""
    size = 0
    for line in samples.splitlines():
        with contextlib.suppress(ValueError):
            sample = mapping(parse_json(line))
            if number(sample.get("time")) <= since:
                size = integer(sample.get("log")) or size
    return min(max(size, 0), MAX_BYTES)


def main(arguments: Sequence[str]) -> int:
    """Print the logs. Returns 0, UNFIT if a log could not be read, 2 for a wrong call."""
    parser = parser_of("logs", str(__doc__))
    parser.add_argument("-f", "--follow", action="store_true", help="follow new output until the run has ended")
    parser.add_argument("--rank", default="", help="a rank or all (default: the rank that the console shows)")
    parser.add_argument("--node", default="", help="only this node; by default all its ranks")
    parser.add_argument("--since", default="", help="a duration, HH:MM, or attempt: the newest attempt")
    parser.add_argument("-n", type=int, dest="lines", metavar="LINES", help="the last lines of each node's log")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    messages = Messages(options.program)
    try:
        query = RunQuery(find_run(options.run, options.log_dir, options.program), messages)
        reader = LogReader(query, options, messages)
        reader.print_new(options.lines, last=not options.follow)
        if options.follow:
            reader.follow()
        return UNFIT if any(log.problem for log in reader.logs) else 0
    except JobWithoutRun as job:
        messages.print(f"job {job.job} has not started a run; its state is {job.state}")
        return 0
    except TransportError as error:
        return messages.print_error(error)
