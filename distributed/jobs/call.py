"""The call of a program of job lists: its name, its errors and what it prints."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from distributed import terminal
from distributed.files import removed
from distributed.trust import printable

PROGRAM = "run_distributed_training.py"
TWO_PHASE = "run_two_phase_training.py"
RESULTS = Path("results.json")  # default of --log-file
PROGRAMS = (PROGRAM, TWO_PHASE, "distributed_train_helper.py")
VERB = os.environ.pop("MUSTER_VERB", "")  # with which scripts/muster has called this program; empty: called by its path


def command_line(arguments: str, log_file: Path) -> str:
    """A command of the running program, ready to paste into a shell."""
    start = f"python {shlex.quote(sys.argv[0])}" if Path(sys.argv[0]).name in PROGRAMS and not VERB else program_name()
    option = "" if log_file == RESULTS else f" --log-file {shlex.quote(str(log_file))}"
    return f"{start} {arguments}{option}"


def program_name() -> str:
    """The name of the running program, for messages."""
    name = Path(sys.argv[0]).name
    return f"muster {VERB}" if VERB else name if name in PROGRAMS else PROGRAM


def with_verbs(text: str) -> str:
    """A help text with what this call's user can type for the names of programs."""
    return text.replace(PROGRAM, "muster jobs").replace(TWO_PHASE, "muster two-phase") if VERB else text


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the known word that is most like it, if one is like it."""
    return "".join(f"; did you mean {each}?" for each in difflib.get_close_matches(word, known, n=1))


def say(line: str) -> None:
    """Print a line without control characters, which texts of servers and jobs may contain."""
    print(printable(line), flush=True)


class CallError(Exception):
    """A wrong call."""


class CommandParser(argparse.ArgumentParser):
    """Raises CallError, where argparse would print and exit, also for words in scripts/lib/removed_words.list."""

    def error(self, message: str) -> NoReturn:
        words = re.findall(r"[\w-]+", message)
        if unknown := re.match(r"unrecognized arguments: (-[\w-]*)", message):
            message += did_you_mean(unknown[1], re.findall(r"--[\w-]+", self.format_help()))
        raise CallError(removed(words) or message)


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


# ---------------------------------------------------------------- the options of a list


def results_file(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".json" or path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file name that ends with .json, got {text!r}")
    return path


def positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def non_negative(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a non-negative integer, got {text!r}")
    return int(text)


def option(default: Any = None, **details: Any) -> Any:
    """A field of ListOptions with details for add_argument() of argparse."""
    return field(default=default, metadata=details)


@dataclass(frozen=True)
class ListOptions:
    """The options of a call that runs a list; see the help of commands and of two_phase."""

    cluster_config: str | None = None
    jobs_config: str | None = None
    log_file: Path = field(default=RESULTS, metadata={"type": results_file})
    backend: str = option("ssh", choices=("ssh", "local", "slurm"))
    script: str | None = None
    slots: int | None = option(type=positive)
    sync: bool = False
    retries: int | None = option(type=non_negative)
    max_failures: int | None = option(type=positive)
    fail_fast: bool = False
    notify: str = ""
    gpu_free_mib: int | None = option(type=non_negative)
    lost_after: int = option(600, type=non_negative)
    grace: int = option(30, type=non_negative)
    no_tmux: bool = False
    plan: bool = False
    skip_phase1: bool = False
    refuse_leaks: bool = False
    two_phase: bool = False  # the program is run_two_phase_training.py
    base_models: str | None = None  # of a list that an earlier version started; see list_plan.with_bases()

    def stored(self) -> dict[str, Any]:
        """The options that `resume` restores."""
        return {name: value for name, value in vars(self).items() if name not in ("plan", "log_file")}

    @classmethod
    def of_stored(cls, stored: Mapping[str, Any], log_file: Path) -> ListOptions:
        """The inverse of stored(). Options that this version does not have are ignored."""
        return cls(log_file=log_file, **{each.name: stored[each.name] for each in fields(cls) if each.name in stored})
