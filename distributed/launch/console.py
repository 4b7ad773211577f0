"""Select the part of a node's output that is shown on the console; the log has all of it.

Lines of a rank have a prefix with node and rank, as in `[node1:3] loss 2.5`. A line that the rank's next line
overwrites, as in a progress bar, ends with CR LF. Standard library only.
"""

from __future__ import annotations

import re
from functools import lru_cache

_PREFIX = re.compile(rb"\[[^\]: \n]*:(\d+)")  # prefix of a rank's line, without the closing "] "
_UPDATE = re.compile(rb"^\[[^\]: \n]*:\d+\] [^\n]*\r\n", re.MULTILINE)  # a line that the rank's next one overwrites
_CLEAR = b"\r\x1b[K"  # move to the start of the line and clear it
_CUT, _WRAP = b"\x1b[?7l", b"\x1b[?7h"  # cut off or wrap lines wider than the terminal


class Console:
    """Splits output into lines of rank 0, without the prefix, and lines of no rank. Drops lines of other ranks."""

    def __init__(self, terminal: bool = False) -> None:
        """terminal: stdout and stderr are the same terminal, so a progress bar of rank 0 can stay on one line."""
        self._terminal = terminal
        self._bar = False  # the cursor is on a progress bar
        self._partial = b""  # an incomplete line

    def feed(self, output: bytes, last: bool = False) -> tuple[bytes, bytes]:
        """Returns complete lines for standard output and for standard error. last: also an incomplete line."""
        output = self._partial + output
        if last and output and not output.endswith(b"\n"):
            output += b"\n"
        complete, newline, self._partial = output.rpartition(b"\n")
        shown: list[bytes] = []
        plain: list[bytes] = []
        for line in (complete + newline).split(b"\n")[:-1]:
            prefix, bracket, text = line.partition(b"] ")
            rank = rank_of(prefix) if bracket else None
            if rank is None:
                plain.append(line)
            elif rank == 0:
                shown.append(text)
        return self._of_rank_0(shown, last), self._of_no_rank(plain)

    def message(self, line: bytes) -> bytes:
        """Returns a message that is not part of the output, for standard error. Clears a progress bar first."""
        return self._of_no_rank([line.removesuffix(b"\n")])

    def _of_rank_0(self, lines: list[bytes], last: bool) -> bytes:
        if not self._terminal:
            return _joined([line.removesuffix(b"\r") for line in lines])
        text = b""
        for line in lines:
            update = line.endswith(b"\r")
            text += _CLEAR if self._bar else b""
            text += _CUT + line[:-1] + _WRAP if update else line + b"\n"
            self._bar = update
        if last and self._bar:
            text += b"\n"
        return text

    def _of_no_rank(self, lines: list[bytes]) -> bytes:
        clear = _CLEAR if lines and self._bar else b""  # the next update prints the bar again
        self._bar = self._bar and not lines
        return clear + _joined(lines)


def without_updates(output: bytes) -> bytes:
    """Remove complete lines that the rank's next line overwrites. For the log."""
    return _UPDATE.sub(b"", output)


@lru_cache(maxsize=1024)  # several times faster than a match
def rank_of(prefix: bytes) -> int | None:
    """The rank in a line's text before "] "; None if it is not the prefix of a rank."""
    found = _PREFIX.fullmatch(prefix)
    return int(found[1]) if found else None


def _joined(lines: list[bytes]) -> bytes:
    return b"\n".join([*lines, b""]) if lines else b""
