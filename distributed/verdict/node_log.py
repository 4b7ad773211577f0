"""Read the end of a node's log: the lines of each rank, and its last exception."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

from distributed.trust import regular_file

LOG_TAIL = 1 << 20  # bytes read from the end of a log
LAST_LINES = 30  # a rank that printed more lines after a traceback did not end because of it
FATAL = "Fatal Python error: "
TRACEBACK = "Traceback (most recent call last):"

# A log with an exception contains one of these texts. The other logs, most logs of a large run, need not be parsed.
EXCEPTIONS = (TRACEBACK, FATAL, "terminate called after throwing an instance of ")

_PREFIX = re.compile(r"\[([^\]\s:]*):(?:(\d{1,9})|[^\]\s]*)\] ?")
_RANK_MARK = re.compile(r"\[rank(\d{1,9})\]: ?")
_THROWN = re.compile(r"^terminate called after throwing an instance of '(.+)'\n +what\(\): +(.*)", re.MULTILINE)
_CHAIN = re.compile(
    r"(?<!\n)\n+(?:During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):\n+"
)


class LogLine(NamedTuple):
    """A line of a rank, without its prefixes."""

    text: str
    marked: bool  # had the prefix [rank0]:, which PyTorch prints before each line of an exception


Log = dict[int | None, list[LogLine]]  # rank -> its lines; None -> lines without a prefix, which the agent printed


def read_log(path: Path, node: str, containing: Sequence[str] = ()) -> Log:
    """The lines at the end of a node's log, by rank; empty if the log cannot be read.

    containing: if this is not empty, and the end of the log has none of these texts, the result is empty.
    """
    try:
        with open(path, "rb", opener=regular_file) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_TAIL))
            end = file.read()
    except (OSError, ValueError):  # the name of the node may be any text
        return {}
    if containing and not any(one.encode() in end for one in containing):
        return {}
    texts = end.decode(errors="replace").split("\n")[size > LOG_TAIL :]
    log: Log = {}
    for text in texts:
        rank: int | None = None
        if (found := _PREFIX.match(text)) and found[1] == node:
            text, rank = text[found.end() :], int(found[2]) if found[2] else None
        if marked := _RANK_MARK.match(text):
            text, rank = text[marked.end() :], int(marked[1]) if rank is None else rank
        log.setdefault(rank, []).append(LogLine(text.rstrip(), bool(marked)))
    return log


class LoggedException(NamedTuple):
    """An exception in a log or a failure record."""

    exception: str | None  # name of its class
    message: str
    traceback: str


def split_chain(traceback: str) -> list[str]:
    """The tracebacks of chained exceptions, in the order in which the exceptions were raised."""
    return _CHAIN.split(traceback)


def parse_exception(block: str) -> LoggedException:
    """Parse the exception of one traceback: `Class: message` after the last frame."""
    lines = block.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    rest = dropwhile(lambda line: line.startswith("  "), lines[frames[-1] + 1 :] if frames else lines)
    name, _, message = "\n".join(rest).strip().partition(": ")
    return LoggedException(_class_name(name), message, block)


def last_exception(lines: Sequence[LogLine]) -> LoggedException | None:
    """The last Python exception, unless many lines follow it; otherwise a C++ exception or fatal error; or None."""
    starts = [number for number, line in enumerate(lines) if line.text == TRACEBACK]
    if starts:
        begin = starts.pop()
        # A marked message ends before the first unmarked line, any other message at an empty line.
        end, marked = begin + 1, lines[begin].marked
        while end < len(lines) and lines[end].marked == marked and (marked or lines[end].text):
            end += 1
        if len(lines) - end <= LAST_LINES:
            while starts and _CHAIN.search("\n".join(line.text for line in lines[starts[-1] : begin + 1])):
                begin = starts.pop()
            trace = "\n".join(line.text for line in lines[begin:end])
            return parse_exception(split_chain(trace)[-1])._replace(traceback=trace)
    text = "\n".join(line.text for line in lines)
    if thrown := _THROWN.findall(text):  # an uncaught C++ exception
        return LoggedException(_class_name(thrown[-1][0]), thrown[-1][1], "")
    fatal = text.rfind(FATAL)  # faulthandler prints the stack when a signal kills Python
    return None if fatal < 0 else LoggedException(None, "", text[fatal:])


def _class_name(name: str) -> str:
    """The name without modules and namespaces: DistStoreError for c10::DistStoreError."""
    return re.split(r"\.|::", name)[-1]
