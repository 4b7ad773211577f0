"""Ask a program, or read a file of the machine: what does not answer says so, and nothing is ever raised.

The standard library is enough.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC, SYS = Path("/proc"), Path("/sys")
MIB, GIB = 2**20, 2**30  # bytes


@dataclass(frozen=True)
class Reply:
    code: int | None  # None: the program is not there, or gave no answer in time
    out: str = ""
    error: str = ""


def ask(words: Sequence[str], limit: float) -> Reply:
    """Run a program for at most `limit` seconds.

    One that waits inside a broken driver cannot be killed: it is left alone.
    """
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        return Reply(None, "", f"{words[0]}: {error.strerror}")
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
        return Reply(None, "", f"no answer within {limit:g} s")
    return Reply(process.returncode, out, err)


def read(path: Path) -> str:
    """The text of a file of /proc or /sys, empty when it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
