"""Split the output of a node into lines, and choose the lines that the console shows.

Lines of a rank have a prefix with node and rank, as in `[node1:3] loss 2.5`. A line that the rank's next line
overwrites, as in a progress bar, is called an update. In this module, an update ends with CR LF, and VT separates its
lines if there are several. The log has the lines of all ranks, without updates. Of a long line, only the start is kept.
Standard library only.
"""

from __future__ import annotations

import re
from functools import lru_cache

from distributed.launch.node_reports import ERROR, REPORT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Set

OUTPUT, ERRORS = 1, 2  # standard output and standard error: their numbers as file descriptors
_PREFIX = re.compile(rb"\[[^\]: \n]*:(\d{1,9})")  # prefix of a rank's line, without the closing "] "
_UPDATE = re.compile(rb"^\[[^\]: \n]*:\d{1,9}\] [^\n]*\r\n", re.MULTILINE)
_EMPTY_UPDATE = re.compile(rb"^\r\n", re.MULTILINE)
LONGEST = 1 << 20  # bytes of a line that are kept if the line is cut
MARGIN = 1 << 12  # a line is cut if it is longer by this: the supervisor must not cut what the agent has cut and marked
_MARK = b" [%d bytes of this line are left out]"
_COLOUR = re.compile(rb"\x1b\[[\d;]*m")
_CLEAR = b"\r\x1b[J"  # move to the start of the line, and clear it and the lines below
# How rich starts and ends a live display, and erases its lines: before it draws them again, or after a transient end.
_LIVE = re.compile(rb"\x1b\[\?25(?:l|h(?:\r(?:\x1b\[1A\x1b\[2K)+)?)|\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)*")
_START, _END, _ERASED, _ERASING = b"\x1b[?25l", b"\x1b[?25h", b"\x1b[2K", b"\r\x1b[12AK"
_CUT, _WRAP = b"\x1b[?7l", b"\x1b[?7h"  # cut off or wrap lines wider than the terminal


class Lines:
    """Complete lines of a stream. An incomplete line is held back, and long lines are cut."""

    def __init__(self) -> None:
        self._partial = bytearray()
        self._left_out = 0  # bytes of the incomplete line after those of _partial

    def feed(self, output: bytes, last: bool = False) -> bytes:
        """Returns complete lines. last: the stream has ended, so a line break completes the last line."""
        if last and not output.endswith(b"\n") and (output or self._partial):
            output += b"\n"
        lines, end = b"", output.rfind(b"\n") + 1
        if end:
            lines = _cut(bytes(self._partial) + output[:end], self._left_out)
            self._partial, self._left_out = bytearray(), 0
        self._partial += output[end:]
        self._left_out += max(0, len(self._partial) - LONGEST - MARGIN - 1)
        del self._partial[LONGEST + MARGIN + 1 :]
        return lines


class RankLines(Lines):
    """Complete lines and updates of what a rank writes: a CR without LF ends an update, and becomes CR LF."""

    def __init__(self) -> None:
        super().__init__()
        self._final_cr = b""  # may be half of a CR LF
        self._follows_update = False  # the incomplete line follows an update
        self._returned = b""  # the incomplete line or frame, if it was already returned as an update
        self._live = 0  # a live display of rich: 1 has started, 2 has been drawn again
        self._frame = b""  # the lines that it has drawn or printed since it erased the display

    def feed(self, output: bytes, last: bool = False) -> bytes:
        """Returns complete lines. If `output` is empty, returns the incomplete line, but only if it is an update.

        Most progress bars write the CR before an update. Without a call with an empty `output`, an update would appear
        only when the next update is written.
        """
        arrived = output
        if self._live or self._frame or _START in output:
            output = self._without_frames(output, last)
        if not (arrived or output or last):
            return self._latest_update()
        output = self._final_cr + output
        self._final_cr = b"\r" if output.endswith(b"\r") else b""
        output = output.removesuffix(b"\r")
        if b"\r" in output:
            output = output.replace(b"\r\n", b"\n").replace(b"\r", b"\r\n")
        lines = super().feed(output, last)
        if not lines:
            return b""
        self._follows_update = lines.endswith(b"\r\n")
        if b"\r" in lines:
            lines = _EMPTY_UPDATE.sub(b"", lines).removeprefix(self._returned + b"\r\n")
        self._returned = b""
        return lines

    def _latest_update(self) -> bytes:
        is_update = self._final_cr or self._follows_update
        latest = bytes(self._partial if is_update else b"")
        if self._live == 2:
            latest = _LIVE.sub(b"", self._frame).replace(b"\n", b"\v")
        if not latest or latest == self._returned:
            return b""
        self._returned = latest
        return self._returned + b"\r\n"

    def _without_frames(self, output: bytes, last: bool) -> bytes:
        """Make an update of each frame of a live display when rich erases it, which tells how many lines it has."""
        may_continue = output and not last
        output, ready, start = self._frame + output, b"", 0
        end = _start_of_mark(output) if may_continue else len(output)
        for mark in _LIVE.finditer(output, 0, end):
            text, erased = output[start : mark.start()], mark[0].count(_ERASED)
            shows, start = mark[0].startswith(b"\r"), mark.end()
            if erased:
                lines = text.split(b"\n")[: None if shows else -1]
                frame = b"\v".join(lines[-erased:]) + b"\r\r"  # with one CR, feed() would wait for more
                text = b"\n".join([*lines[:-erased], frame])
            self._live = 2 * bool(self._live) if shows else int(mark[0] == _START)
            ready += text
        if self._live < 2 or last or len(output) - start > 1 << 16:
            ready, start = ready + output[start:end], end
        self._frame = output[start:]
        return ready


def _start_of_mark(output: bytes) -> int:
    """The position of the end or erasure of a live display with which the output ends, and which may be incomplete."""
    erasing = len(output.rstrip(_ERASING))
    found = erasing - len(_END) if output.endswith(_END, 0, erasing) else output.find(b"\r", erasing)
    return len(output) if found < 0 else found


class Console:
    """Splits lines into those of shown ranks, without the prefix, and those of no rank. Drops lines of other ranks.

    Lines of ranks stay on the stream to which the rank wrote them; lines of no rank are for standard error.
    """

    def __init__(self, terminals: str = "", ranks: Set[int] = frozenset({0})) -> None:
        """terminals: the streams that are terminals, where a progress bar stays on one line: "1", "2" or, if both are
        the same terminal, "12". With "12", all lines are for standard error, which preserves their order.
        """
        self._ranks = ranks
        self._terminals = [int(number) for number in terminals]
        self._bars: set[int] = set()  # streams whose cursor is on a progress bar
        self._updates: dict[int, bytes | None] = {}  # stream -> the last line that was shown, if it was an update

    def feed(self, lines: bytes, stream: int) -> tuple[bytes, bytes]:
        """Returns what to write to standard output and to standard error. stream: to which the lines were written."""
        lines = without_marks(lines)
        output: list[bytes] = []
        errors: list[bytes] = []
        of_errors = stream == ERRORS or len(self._terminals) == 2
        of_rank, shown_on = (errors, ERRORS) if of_errors else (output, OUTPUT)
        for line in lines.split(b"\n")[:-1]:
            prefix, bracket, text = line.partition(b"] ")
            rank = _rank(prefix) if bracket else None
            if rank is None:
                errors.append(line.removesuffix(b"\r"))
            elif rank in self._ranks:
                state = text.removesuffix(b"\r")
                # Outside a terminal, an update is shown as a line. Skip the next update or line if it is equal.
                if state != self._updates.get(stream) or shown_on in self._terminals:
                    of_rank.append(text)
                self._updates[stream] = state if text.endswith(b"\r") else None
        return self._render(output, OUTPUT), self._render(errors, ERRORS)

    def message(self, line: bytes) -> bytes:
        """Returns a message that is not part of the output, for standard error. Clears a progress bar first."""
        return self._render([line.removesuffix(b"\n")], ERRORS)

    def end(self) -> tuple[bytes, bytes]:
        """Returns what to write to standard output and to standard error after the last line."""
        output, errors = (b"\n\x1b[J" if stream in self._bars else b"" for stream in (OUTPUT, ERRORS))
        self._bars.clear()
        return output, errors

    def _render(self, lines: list[bytes], stream: int) -> bytes:
        if stream not in self._terminals:
            return b"\n".join([*lines, b""]).replace(b"\r\n", b"\n") if lines else b""
        text = bytearray()
        for line in lines:
            text += _CLEAR if stream in self._bars else b""
            if line.endswith(b"\r"):
                # Back to the first line: another program may write next, and does not know how many there are.
                back = b"\r\x1b[%dA" % line.count(b"\v") if b"\v" in line else b""
                text += _CUT + line[:-1].replace(b"\v", b"\r\n") + _WRAP + back
                self._bars.add(stream)
            else:
                text += line + b"\n"
                self._bars.discard(stream)
        return bytes(text)


def _cut(lines: bytes, left_out: int) -> bytes:
    """Cut long lines. left_out: bytes of the first line that `lines` does not have; that line must be long."""
    parts, start = [], 0
    while len(lines) > start + LONGEST + MARGIN:
        end = lines.rfind(b"\n", start, start + LONGEST + MARGIN + 1) + 1
        if end:
            parts.append(lines[start:end])
        else:
            end = lines.index(b"\n", start) + 1
            ending = b"\r\n" if lines.endswith(b"\r\n", start, end) else b"\n"
            mark = _MARK % (left_out + end - len(ending) - start - LONGEST)
            parts.append(lines[start : start + LONGEST] + mark + ending)
        start, left_out = end, 0
    return b"".join([*parts, lines[start:]])


def with_prefix(prefix: bytes, lines: bytes) -> bytes:
    """Put the prefix before each of the complete lines."""
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n" if lines else b""


def without_marks(lines: bytes) -> bytes:
    """Remove the bytes that mark reports and standard error for the launcher, so that no output can imitate them."""
    return lines.translate(None, REPORT + ERROR) if REPORT in lines or ERROR in lines else lines


def without_updates(lines: bytes, colours: bool = True) -> bytes:
    """Remove updates, for the log, and colours unless `colours`: rich prints them for a terminal only."""
    lines = _UPDATE.sub(b"", lines) if b"\r\n" in lines else lines
    return lines if colours else _COLOUR.sub(b"", lines)


def rank_of(line: bytes) -> int | None:
    """The rank that has printed a line; None if it does not begin with the prefix of a rank."""
    prefix, bracket, _ = line.partition(b"] ")
    return _rank(prefix) if bracket else None


@lru_cache(maxsize=1024)  # several times faster than a match
def _rank(prefix: bytes) -> int | None:
    found = _PREFIX.fullmatch(prefix)
    return int(found[1]) if found else None
