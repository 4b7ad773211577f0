"""The end of a node's log: the lines of each rank, and the exception that they end with. Standard library only."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

LOG_TAIL = 1 << 20  # bytes at the end of a log that are read
LAST_LINES = 30  # a traceback with more output of its rank behind it was not the end of the rank
FATAL = "Fatal Python error: "
TRACEBACK = "Traceback (most recent call last):"

_RANK_MARK = re.compile(r"\[rank(\d{1,9})\]: ?")
_THROWN = re.compile(r"^terminate called after throwing an instance of '(.+)'\n +what\(\): +(.*)", re.MULTILINE)
_CHAIN = re.compile(
    r"\n+(?:During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):\n+"
)


class Line(NamedTuple):
    """A line of one rank, without the marks in front of it."""

    text: str
    marked: bool  # [rank0]: was there, which PyTorch puts before each line of an exception


Log = dict[int | None, list[Line]]  # the lines of each rank; under None those without a mark, the agent's own


def read_log(path: Path, node: str) -> Log:
    """The end of a node's log, by rank; empty when there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_TAIL))
            texts = file.read().decode(errors="replace").split("\n")[size > LOG_TAIL :]
    except OSError:
        return {}
    prefix = re.compile(rf"\[{re.escape(node)}:(?:(\d{{1,9}})|[^\]\s]*)\] ?")
    log: Log = {}
    for text in texts:
        rank: int | None = None
        if found := prefix.match(text):
            text, rank = text[found.end() :], int(found[1]) if found[1] else None
        if marked := _RANK_MARK.match(text):
            text, rank = text[marked.end() :], int(marked[1]) if rank is None else rank
        log.setdefault(rank, []).append(Line(text.rstrip(), bool(marked)))
    return log


# ---------------------------------------------------------------- exceptions


class Raised(NamedTuple):
    """An exception as a log or a failure record has it."""

    exception: str | None  # name of its class
    message: str
    traceback: str


def blocks(traceback: str) -> list[str]:
    """The parts of a traceback, one for each exception that it chains, in the order in which they were raised."""
    return _CHAIN.split(traceback)


def exception_of(block: str) -> Raised:
    """What follows the last frame of a traceback: Class: message."""
    lines = block.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    rest = lines[frames[-1] + 1 :] if frames else lines
    while rest and rest[0].startswith("  "):
        del rest[0]
    name, _, message = "\n".join(rest).strip().partition(": ")
    return Raised(_class_name(name), message, block)


def last_exception(lines: Sequence[Line]) -> Raised | None:
    """The exception that these lines end with: Python's, or what native code prints of its end. None: there is none."""
    starts = [number for number, line in enumerate(lines) if line.text == TRACEBACK]
    if starts:
        begin = starts.pop()
        end, marked = begin + 1, lines[begin].marked  # behind the message: the end of the marks, else an empty line
        while end < len(lines) and lines[end].marked == marked and (marked or lines[end].text):
            end += 1
        if len(lines) - end <= LAST_LINES:
            while starts and _CHAIN.search("\n".join(line.text for line in lines[starts[-1] : begin + 1])):
                begin = starts.pop()
            trace = "\n".join(line.text for line in lines[begin:end])
            return exception_of(blocks(trace)[-1])._replace(traceback=trace)
    text = "\n".join(line.text for line in lines)
    if thrown := _THROWN.findall(text):  # C++, and nothing caught it
        return Raised(_class_name(thrown[-1][0]), thrown[-1][1], "")
    fatal = text.rfind(FATAL)  # the stack that Python prints when it dies of a signal
    return None if fatal < 0 else Raised(None, "", text[fatal:])


def _class_name(name: str) -> str:
    """torch.distributed.DistStoreError and c10::DistStoreError are DistStoreError."""
    return re.split(r"\.|::", name)[-1]
