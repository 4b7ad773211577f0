"""The output of the command of a supervisor: it is copied to log and console, and metrics are read from it."""

from __future__ import annotations

import contextlib
import os
import select

from distributed.launch.console_stream import BACKLOG, CHUNK, ConsoleStream
from distributed.launch.node_environment import BLOCK
from distributed.trust import regular_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distributed.launch.node_environment import Environment
    from distributed.launch.node_files import Files
    from distributed.launch.output_lines import Console, Lines
    from distributed.launch.output_metrics import OutputMetrics
    from distributed.launch.shown_ranks import ShownRanks
    from distributed.launch.supervisor_options import SupervisorOptions

PROGRESS = b"MUSTER_PROGRESS"  # variable with the value of --progress


class CommandOutput:
    """Copies the output of a command, and the messages of its supervisor."""

    def __init__(self, files: Files, options: SupervisorOptions) -> None:
        self.files, self.options = files, options
        self.pipes: dict[int, int] = {}  # pipes that the command writes to -> 1 (standard output) or 2 (error)
        self.ended = False
        self.unlogged = b""  # the last lines of the command that could not be logged
        self.streams = [ConsoleStream(1), ConsoleStream(2)] if options.lease else []
        self._lines: dict[int, Lines] = {}  # by stream, 1 or 2
        self._log = regular_file(files.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._log_failed = False
        self._terminal = False  # a rank prints for a terminal
        self._metrics, self._progress = "", ""  # path of metrics.jsonl, and the value of --progress
        self._forget_attempt()

    def _forget_attempt(self) -> None:
        self._console: Console | None = None
        self._shown: ShownRanks | None = None
        self._output_metrics: OutputMetrics | None = None

    def use(self, env: Environment) -> None:
        """Read the variables of the command that describe its output."""
        self._metrics, self._progress = (os.fsdecode(env.get(name, b"")) for name in (b"MUSTER_METRICS", PROGRESS))
        self._terminal = b"MUSTER_TERMINAL" in env

    def open(self, env: Environment) -> tuple[int, int]:
        """Open standard output and standard error of the command. Without a console, one pipe preserves their order."""
        self.use(env)
        output = self._open_pipe(1)
        return output, self._open_pipe(2) if self.streams else output

    def _open_pipe(self, stream: int) -> int:
        source, output = os.pipe()
        self.pipes[source] = stream
        with contextlib.suppress(OSError):
            import fcntl

            fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, BLOCK)
        return output

    def readable(self, waits: bool) -> list[int]:
        """The pipes to read. waits: a slow console makes the command wait."""
        return [pipe for pipe, stream in self.pipes.items() if self.can_read(stream, waits)]

    def can_read(self, stream: int, waits: bool) -> bool:
        shown_on = self.streams if stream == 1 else self.streams[-1:]
        return not self.ended and not (waits and any(len(one.pending) > BACKLOG for one in shown_on))

    def read(self, pipe: int) -> None:
        stream = self.pipes[pipe]
        block = os.read(pipe, BLOCK)
        if not block:
            del self.pipes[pipe]
            self.ended = not self.pipes
        # Progress bars are shown on a console, and metrics are read from the output of ranks: both need complete lines.
        if self.streams or self.options.sample_usage:
            block = self._complete_lines(block, stream)
        self.log_and_show(block, stream)
        if self.ended:
            self._end_console()

    def _complete_lines(self, block: bytes, stream: int) -> bytes:
        if stream not in self._lines:
            from distributed.launch.output_lines import Lines

            self._lines[stream] = Lines()
        return self._lines[stream].feed(block, last=not block)

    def log_and_show(self, lines: bytes, stream: int) -> None:
        logged = lines
        if b"\r\n" in lines or (self._terminal and b"\x1b" in lines):
            from distributed.launch.output_lines import without_updates

            logged = without_updates(lines, colours=not self._terminal)
        self.write_log(logged)
        if not self._shown:
            from distributed.launch.shown_ranks import ShownRanks

            self._shown = ShownRanks(self.options.console_rank)
        self._shown.look(lines)
        if lines and self._progress != "off" and (self.streams or self.options.sample_usage):
            if not self._output_metrics:
                from distributed.launch.output_metrics import OutputMetrics

                self._output_metrics = OutputMetrics(self._metrics, self._progress, self._shown.ranks)
            self._output_metrics.feed(lines)
        self.show(lines, stream)

    def write_log(self, block: bytes) -> None:
        try:
            while block:
                block = block[os.write(self._log, block) :]
        except OSError as error:  # usually a full disk: the command continues
            if not self._log_failed:
                self._log_failed = True
                message = os.fsencode(f"supervisor: {self.files.log}: {error.strerror}: output is lost\n")
                self.show_message(message)
                self.unlogged += message
            lines = [line for line in block.splitlines(keepends=True) if not line.startswith(b"[")]  # not of ranks
            self.unlogged = (self.unlogged + b"".join(lines))[-CHUNK:]

    def show(self, lines: bytes, stream: int) -> None:
        if not self.streams or not self._shown:
            return
        if not self._console:
            from distributed.launch.output_lines import Console

            self._console = Console(self.options.terminals, self._shown.ranks)
        self._put(self._console.feed(lines, stream))

    def _end_console(self) -> None:
        if self._console:
            self._put(self._console.end())

    def _put(self, texts: tuple[bytes, bytes]) -> None:
        for stream, text in zip(self.streams, texts, strict=True):
            stream.put(text)

    def read_metrics(self, last: bool = False) -> None:
        if self._output_metrics:
            self._output_metrics.read(last)

    def end_attempt(self) -> None:
        """Copy what is left: the processes of the attempt have ended, and the command waits."""
        while ready := select.select(list(self.pipes), [], [], 0)[0]:
            for pipe in ready:
                self.read(pipe)
        for stream, lines in self._lines.items():
            self.log_and_show(lines.feed(b"", last=True), stream)
        self._end_console()
        self.read_metrics(last=True)

    def begin_attempt(self) -> None:
        """Continue with the log of the next attempt."""
        try:
            log = regular_file(self.files.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        except OSError as error:
            self.print_message(f"{self.files.log}: {error.strerror}: output is added to the log of the last attempt")
        else:
            os.close(self._log)
            self._log = log
        self._forget_attempt()
        self._log_failed, self.unlogged = False, b""

    def close(self) -> None:
        os.close(self._log)

    def print_message(self, message: str) -> None:
        self.print_line(f"supervisor: {message}")

    def print_line(self, message: str) -> None:
        line = os.fsencode(f"{message}\n")
        self.write_log(line)
        self.show_message(line)

    def show_message(self, line: bytes) -> None:
        for stream in self.streams[1:]:
            stream.put(self._console.message(line) if self._console else line)
