"""Run a program, or read a file of /proc or /sys, without raising OSError."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

KIT = Path(__file__).resolve().parents[2]  # Muster's installation directory
PROC, SYS = Path("/proc"), Path("/sys")
MIB, GIB = 2**20, 2**30  # bytes


@dataclass(frozen=True)
class ProgramOutput:
    """Output and exit code of a program."""

    code: int | None  # None: not found, or timed out
    out: str = ""
    error: str = ""


def run_program(command: Sequence[str], limit: float, env: dict[str, str] | None = None) -> ProgramOutput:
    """Run a program for at most `limit` seconds, then kill it. A process blocked in a driver is abandoned."""
    try:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        return ProgramOutput(None, "", f"{command[0]}: {error.strerror}")
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
        return ProgramOutput(None, "", f"no reply within {max(0.0, round(limit, 1)):g} s")
    return ProgramOutput(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


def read(path: Path) -> str:
    """The text of a file of /proc or /sys, without surrounding white space; "" if unreadable."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
