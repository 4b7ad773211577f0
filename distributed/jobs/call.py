"""The call of a program of job lists: its name, its errors and what it prints."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NoReturn

from distributed import terminal
from distributed.files import KIT
from distributed.trust import printable

PROGRAM = "run_distributed_training.py"
TWO_PHASE = "run_two_phase_training.py"
PROGRAMS = (PROGRAM, TWO_PHASE, "distributed_train_helper.py")


def command_line(arguments: str, log_file: Path) -> str:
    """A command of the running program, ready to paste into a shell."""
    start = f"python {shlex.quote(sys.argv[0])}" if Path(sys.argv[0]).name in PROGRAMS else PROGRAM
    option = "" if str(log_file) == "results.json" else f" --log-file {shlex.quote(str(log_file))}"
    return f"{start} {arguments}{option}"


def program_name() -> str:
    """The name of the running program, for messages."""
    name = Path(sys.argv[0]).name
    return name if name in PROGRAMS else PROGRAM


def say(line: str) -> None:
    """Print a line without control characters, which texts of servers and jobs may contain."""
    print(printable(line), flush=True)


def removed(words: Collection[str]) -> str:
    """The message for the first of these words that Muster no longer has; empty if there is none."""
    lines = Path(KIT, "scripts/lib/removed_words.txt").read_text().splitlines()
    return next((line for line in lines if line.partition(": ")[0] in words), "")


class CallError(Exception):
    """A wrong call."""


class CommandParser(argparse.ArgumentParser):
    """Raises CallError, where argparse would print and exit, also for words in scripts/lib/removed_words.txt."""

    def error(self, message: str) -> NoReturn:
        raise CallError(removed(re.findall(r"[\w-]+", message)) or message)


def journal_of(results: Path) -> Path:
    """The path of the journal of a list."""
    return results.with_suffix(".journal")


def show(rows: Sequence[Sequence[str]], below: Sequence[str] = ()) -> None:
    """Print a table whose first row is the header. below: a line to print under each row, if not empty."""
    for number, line in enumerate(terminal.table(rows)):
        terminal.show((line if number else terminal.paint(line, terminal.BOLD)) + "\n")
        if below and below[number]:
            say(below[number])


def absolute(path: Path) -> Path:
    """The absolute path, without `..`; a symbolic link in its last component is kept."""
    return path.parent.resolve() / path.name
