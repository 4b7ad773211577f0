"""What of a node's output a person sees while a run goes on; the log has all of it.

A rank's lines carry its node and its rank, as in `[node1:3] loss 2.5`. One that the rank's next line overwrites, as in
a progress bar, ends with a carriage return before its line break. Standard library only.
"""

from __future__ import annotations

import re

_RANK_0 = re.compile(rb"\[[^\]: \n]*:0\] ")  # what its lines begin with
_UPDATE = re.compile(rb"^\[[^\]: \n]*:\d+\] [^\n]*\r\n", re.MULTILINE)  # a line that the rank's next one overwrites
_OF_OTHERS = re.compile(rb"^\[[^\]: \n]*:(?!0\])\d+\] [^\n]*\n", re.MULTILINE)  # a line of a rank that is not rank 0
_CLEAR = b"\r\x1b[K"  # go to the begin of the line, and empty it
_CUT, _WRAP = b"\x1b[?7l", b"\x1b[?7h"  # what is wider than the terminal


class Console:
    """Parts output into rank 0's lines, without the prefix, and those that no rank wrote. Other ranks' are left out."""

    def __init__(self, terminal: bool = False) -> None:
        """terminal: both outputs are one, so that a progress bar of rank 0 can stay on one line."""
        self._terminal = terminal
        self._bar = False  # the line with the cursor is a progress bar
        self._begun = b""  # a line that is not at its end

    def feed(self, output: bytes, last: bool = False) -> tuple[bytes, bytes]:
        """What is for standard output and for standard error, in whole lines. last: also a line that has no end."""
        output = self._begun + output
        if last and output and not output.endswith(b"\n"):
            output += b"\n"
        whole, newline, self._begun = output.rpartition(b"\n")
        shown: list[bytes] = []
        plain: list[bytes] = []
        for line in without_other_ranks(whole + newline).split(b"\n")[:-1]:
            if prefix := _RANK_0.match(line):
                shown.append(line[prefix.end() :])
            else:
                plain.append(line)
        return self._of_rank_0(shown, last), self._of_no_rank(plain)

    def aside(self, line: bytes) -> bytes:
        """For standard error: a whole line that is not of the output. No bar stands before it."""
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
        clear = _CLEAR if lines and self._bar else b""  # the bar comes again with its next update
        self._bar = self._bar and not lines
        return clear + _joined(lines)


def without_updates(output: bytes) -> bytes:
    """For a log: the output of ranks without the lines that the next one overwrites, as far as they are whole."""
    return _UPDATE.sub(b"", output)


def without_other_ranks(lines: bytes) -> bytes:
    """For a console elsewhere: whole lines, without those that it would leave out."""
    return _OF_OTHERS.sub(b"", lines)


def _joined(lines: list[bytes]) -> bytes:
    return b"\n".join([*lines, b""]) if lines else b""
