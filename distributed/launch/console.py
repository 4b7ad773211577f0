"""What of a node's output a person sees while a run goes on; the log has all of it.

A rank's lines carry its node and its rank, as in `[node1:3] loss 2.5`. Standard library only.
"""

from __future__ import annotations

import re

_PREFIX = re.compile(rb"\[[^\]: ]*:(\d+)")  # of a rank's line, up to the bracket that ends it


class Console:
    """Parts output into rank 0's lines, without the prefix, and those that no rank wrote. Other ranks' are left out."""

    def __init__(self) -> None:
        self._begun = b""  # a line that is not at its end
        self._rank_0: set[bytes] = set()  # prefixes that were met: to look them up is quicker than to match them
        self._others: set[bytes] = set()

    def feed(self, output: bytes, last: bool = False) -> tuple[bytes, bytes]:
        """What is for standard output and for standard error, in whole lines. last: also a line that has no end."""
        whole, newline, self._begun = (self._begun + output).rpartition(b"\n")
        lines = whole.split(b"\n") if newline else []
        if last and self._begun:
            lines.append(self._begun)
            self._begun = b""
        shown: list[bytes] = []
        plain: list[bytes] = []
        for line in lines:
            prefix, bracket, text = line.partition(b"] ")
            if bracket and prefix in self._rank_0:
                shown.append(text)
            elif not bracket or prefix not in self._others:
                if bracket and (found := _PREFIX.fullmatch(prefix)):
                    if found[1] == b"0":
                        self._rank_0.add(prefix)
                        shown.append(text)
                    else:
                        self._others.add(prefix)
                else:
                    plain.append(line)
        return _joined(shown), _joined(plain)


def _joined(lines: list[bytes]) -> bytes:
    return b"\n".join([*lines, b""]) if lines else b""
