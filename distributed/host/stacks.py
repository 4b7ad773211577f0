"""Where a rank is: the Python stack of its main thread, asked for from outside, without a tool and without its help.

A rank registers SIGNAL with faulthandler before its script begins. The signal makes it write the stack to a file beside
its output; it costs nothing until then, and the script goes on. Only the main thread's: to walk the stacks of threads
that run is not safe, and the main thread is the one that waits in collectives.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

SIGNAL = signal.SIGRTMIN + 9  # a real-time signal that neither Python, NCCL nor SLURM uses
FILE = "stacks.log"
MIN_FILE_DESCRIPTOR = 500  # of its file descriptor: a script's own files have the numbers of a fresh interpreter
MAX_FILE_BYTES = 1 << 20  # in the file; then it begins anew
STACK_TIMEOUT = 2.0  # for the stack to come: a process that waits for a disk cannot answer
STABLE_TIME = 0.15  # seconds without growth after which it is complete
HEADING = "(most recent call first):"
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str


def register(directory: str) -> None:
    """In a rank: let SIGNAL write the stack of the main thread to directory/stacks.log."""
    import faulthandler

    with suppress(OSError):  # a full disk, or few file descriptors: then its stack cannot be asked for
        file = os.open(os.path.join(directory, FILE), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            number = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, MIN_FILE_DESCRIPTOR)
        finally:
            os.close(file)
        faulthandler.register(SIGNAL, number, all_threads=False, chain=False)


def stack_of(pid: int, directory: str) -> tuple[Frame, ...]:
    """The frames of a rank's main thread, the innermost first; none when it has not registered, or does not answer."""
    path = os.path.join(directory, FILE)
    with suppress(OSError):
        if writes_stack_to(pid, path):
            with open(path, "r+b", buffering=0) as file:
                if file.seek(0, os.SEEK_END) > MAX_FILE_BYTES:
                    file.truncate(0)
                begin = file.seek(0, os.SEEK_END)
                os.kill(pid, SIGNAL)
                wait_until_complete(file.fileno(), begin)
                file.seek(begin)
                return parse_frames(file.read().decode(errors="replace"))
    return ()


def writes_stack_to(pid: int, path: str) -> bool:
    """Whether SIGNAL makes it write there. It would end a process that has no handler, and one that has closed the file
    would write into the next that got its number."""
    with open(f"/proc/{pid}/status") as status:
        caught = next(line for line in status if line.startswith("SigCgt:"))
    if not int(caught.split()[1], 16) >> (SIGNAL - 1) & 1:
        return False
    wanted = os.stat(path)
    for number in os.listdir(f"/proc/{pid}/fd"):
        if int(number) >= MIN_FILE_DESCRIPTOR:
            with suppress(FileNotFoundError):  # closed meanwhile, or no file
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), wanted):
                    return True
    return False


def wait_until_complete(file: int, begin: int) -> None:
    end = time.monotonic() + STACK_TIMEOUT
    size, since = begin, time.monotonic()
    while (now := time.monotonic()) < end and (size == begin or now - since < STABLE_TIME):
        time.sleep(0.01)
        if (grown := os.fstat(file).st_size) != size:
            size, since = grown, time.monotonic()


def parse_frames(dump: str) -> tuple[Frame, ...]:
    """Of the first stack that begins in what faulthandler has written, without what is below the script."""
    lines = iter(dump.partition(HEADING)[2].splitlines()[1:])
    found = []
    for line in lines:
        if not (match := FRAME.fullmatch(line)):
            break  # the next stack, or a line that is being written
        found.append(Frame(match[1], int(match[2]), match[3]))
    return script_frames(found)


def script_frames(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Without those in which the kit runs the script."""
    ours = [place for place, frame in enumerate(frames) if frame.file.endswith("distributed/agent/worker.py")]
    return tuple(frames[: ours[0]] if ours else frames)


def format_traceback(frames: Sequence[Frame]) -> str:
    """As Python prints it: the innermost last."""
    lines = [f'  File "{frame.file}", line {frame.line}, in {frame.function}\n' for frame in reversed(frames)]
    return "".join(["Stack (most recent call last):\n", *lines]) if frames else ""
