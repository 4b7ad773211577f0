"""What the user of a launcher sees, and launcher.log."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from functools import partial
from pathlib import Path

from distributed.launch.console_stream import BACKLOG, ConsoleStream
from distributed.trust import LAYOUT, printable, regular_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distributed.transport.loop import Loop


_COLOURED = re.compile(r"verdict: (?P<outcome>ok|failed|stopped)\b|([\w.-]+: ){0,2}warning: ")


class LauncherConsole:
    """Standard output and standard error of the launcher, and launcher.log. A slow console must not block the watch."""

    def __init__(self, program: str, quiet: bool) -> None:
        self._program, self._quiet = program, quiet
        self.streams = {1: ConsoleStream(1), 2: ConsoleStream(2)}
        self.log: Path | None = None

    def show(self, data: bytes, stream: int) -> None:
        self.streams[stream].put(data)

    def show_lines(self, text: str) -> None:
        """Show lines of the launcher itself on standard error: a verdict is red or green, a warning yellow."""
        text = printable(text, LAYOUT)
        if found := _COLOURED.match(text):
            from distributed import terminal  # on use, as it takes time to import

            if terminal.has_colours(sys.stderr):
                colour = {"ok": terminal.GREEN, "failed": terminal.RED}.get(found["outcome"], terminal.YELLOW)
                line, *rest = text.split("\n", 1)
                text = "\n".join([terminal.paint(line, colour), *rest])
        self.show(text.encode(), 2)

    def print(self, message: str, always: bool = False) -> None:
        """Print a message, unless --quiet was given."""
        if always or not self._quiet:
            self.show_lines(f"{self._program}: {message}\n")

    def record(self, message: str, always: bool = False) -> None:
        """Print a message and append it to launcher.log."""
        self.print(message, always)
        self.append(message)

    def append(self, message: str) -> None:
        """Append a message to launcher.log."""
        if self.log:
            with contextlib.suppress(OSError), open(self.log, "ab", opener=regular_file) as log:
                log.write(f"{time.strftime('%F %T')} {printable(message, LAYOUT)}\n".encode())

    def leave_terminal(self) -> None:
        """The terminal was closed: write to launcher.log, unless standard error is a file."""
        if self.log and not os.path.isfile("/dev/fd/2"):
            with contextlib.suppress(OSError):
                log = regular_file(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.close(log)

    @property
    def is_slow(self) -> bool:
        return any(len(stream.pending) > BACKLOG for stream in self.streams.values())

    def flush_with(self, loop: Loop) -> None:
        """Let the loop write what is pending, when the streams are ready."""
        for stream in self.pending:
            loop.on_writable(stream.number, partial(self._flush, loop, stream))

    def _flush(self, loop: Loop, stream: ConsoleStream) -> None:
        stream.flush()
        if not stream.pending:
            loop.forget(stream.number)

    @property
    def pending(self) -> list[ConsoleStream]:
        return [stream for stream in self.streams.values() if stream.pending]
