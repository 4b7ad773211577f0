"""Get the Python stack of a rank's main thread from outside, without a debugger.

A rank registers SIGNAL with faulthandler before its script starts. On the signal, it writes the stack to a file next to
its output and continues. Only the main thread is dumped, because it is the one that waits in collectives, and because
walking the stacks of running threads is not safe.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from distributed.host import process_scan
from distributed.trust import regular_file

SIGNAL = signal.SIGRTMIN + 9  # a real-time signal that neither Python, NCCL nor SLURM uses
FILE = "stacks.log"
MIN_FILE_DESCRIPTOR = 500  # high, so that the script's files get the same descriptors as in a fresh interpreter
MAX_FILE_BYTES = 1 << 20  # a longer file is truncated
STACK_TIMEOUT = 2.0  # seconds; a process that waits for a disk cannot reply
STABLE_TIME = 0.15  # seconds without growth after which the stack is complete
HEADING = "(most recent call first):"
FRAME = re.compile(r'  File "(.*)", line (\d{1,9}) in (.*)')


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str
    code: str = ""  # source line, set only in the innermost frame; it may call a C function, which has no frame


def register(directory: str) -> None:
    """In a rank: make SIGNAL write the stack of the main thread to directory/stacks.log."""
    import faulthandler

    with suppress(OSError):  # a full disk, or too few file descriptors: the stack is then not available
        file = regular_file(os.path.join(directory, FILE), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            number = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, MIN_FILE_DESCRIPTOR)
        finally:
            os.close(file)
        faulthandler.register(SIGNAL, number, all_threads=False, chain=False)


def stack_of(pid: int, directory: str) -> tuple[Frame, ...]:
    """The frames of a rank's main thread, innermost first; () if it has not registered or does not reply."""
    path = os.path.join(directory, FILE)
    with suppress(OSError):
        if writes_stack_to(pid, path):
            with open(path, "r+b", buffering=0, opener=regular_file) as file:
                if file.seek(0, os.SEEK_END) > MAX_FILE_BYTES:
                    file.truncate(0)
                start = file.seek(0, os.SEEK_END)
                os.kill(pid, SIGNAL)
                wait_until_complete(file.fileno(), start)
                file.seek(start)
                return parse_frames(file.read().decode(errors="replace"))
    return ()


def writes_stack_to(pid: int, path: str) -> bool:
    """Whether the process handles SIGNAL and still has this file open.

    Without a handler, the signal would kill the process. If the process has closed the file, faulthandler would write
    into another file that has the same descriptor.
    """
    if not process_scan.handles(pid, SIGNAL):
        return False
    expected = os.stat(path)
    for number in os.listdir(f"/proc/{pid}/fd"):
        if int(number) >= MIN_FILE_DESCRIPTOR:
            with suppress(FileNotFoundError):  # closed meanwhile, or not a file
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), expected):
                    return True
    return False


def wait_until_complete(file: int, start: int) -> None:
    end = time.monotonic() + STACK_TIMEOUT
    size, changed_at = start, time.monotonic()
    while (now := time.monotonic()) < end and (size == start or now - changed_at < STABLE_TIME):
        time.sleep(0.01)
        if (grown := os.fstat(file).st_size) != size:
            size, changed_at = grown, time.monotonic()


def parse_frames(dump: str) -> tuple[Frame, ...]:
    """The frames of the script in the first stack of faulthandler's output."""
    lines = iter(dump.partition(HEADING)[2].splitlines()[1:])
    found = []
    for line in lines:
        if not (match := FRAME.fullmatch(line)):
            break  # the next stack, or a line that is being written
        found.append(Frame(match[1], int(match[2]), match[3]))
    return script_frames(found)


def script_frames(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames of the script: those before the frames of distributed.agent.worker, which calls it."""
    worker = [index for index, frame in enumerate(frames) if frame.file.endswith("distributed/agent/worker.py")]
    return tuple(frames[: worker[0]] if worker else frames)


def with_code(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames, with the source line of the innermost one if this machine has the file."""
    import linecache  # not at the top: this module is imported in every rank

    if not frames or not os.path.isfile(frames[0].file):  # a rank may name any file, such as a FIFO
        return tuple(frames)
    code = linecache.getline(frames[0].file, frames[0].line).strip()
    return (replace(frames[0], code=code), *frames[1:])


def format_traceback(frames: Sequence[Frame]) -> str:
    """The stack as Python prints it, innermost frame last; "" without frames."""
    lines = [f'  File "{frame.file}", line {frame.line}, in {frame.function}\n' for frame in reversed(frames)]
    return "".join(["Stack (most recent call last):\n", *lines]) if frames else ""
