"""Show a table of runs and job lists, the newest first, from their files and squeue; no node is queried.

    name                                   state               age     step    loss  where
    train-20261121-122942-0a81             running           12 min     120  2.3125  node1 node2
    train-20261120-101500-93be             failed: hung     1 d 2 h   1,500  1.5000  node1 node2
    results.json                           3 of 10 done    2 h 5 min                 gpu1 gpu2

scripts/ls.sh executes this program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from distributed import index, metrics, terminal
from distributed.attempts import newest
from distributed.exit_codes import STOPPED, TIMED_OUT
from distributed.files import is_locked
from distributed.host.signals import signal_name
from distributed.records import integer, is_time, mapping, number, read_object, text
from distributed.runs.lookup import EXITED, REMOTE, RUNNING, RunLookupError, read
from distributed.runs.query import job_states
from distributed.terminal import DIM, GREEN, RED, YELLOW, duration, paint
from distributed.trust import foreign, printable

COLUMNS = ("name", "state", "age", "step", "loss", "where")
STAMP = r"\d{8}-\d{6}"  # date and time in the names of runs
LONGEST_NAME = 40  # characters of the name of a run; the last 20 are date, time and a number
ROWS = 50  # runs and lists that are shown
MAX_FAULTS = 5  # messages about runs that are not shown
END_BYTES = 4096  # read from each end of metrics.jsonl
REASONS = {0: "", STOPPED: "with checkpoint", TIMED_OUT: "hung"}  # exit code -> reason in the table
COLOURS = {"ok": GREEN, "finished": GREEN, "failed": RED, RUNNING: ""}  # of states; others are yellow


@dataclass(frozen=True)
class Row:
    """A run or a job list."""

    kind: str  # run or list
    name: str
    directory: str
    state: str  # ok, stopped, failed; running, remote, unknown, or the state of the SLURM job; state of a list
    reason: str  # of the state
    started: float  # Unix seconds
    seconds: float | None  # until now, or until the end; None: unknown
    step: int | None = None
    epoch: float | None = None
    loss: float | str | None = None  # "NaN" for NaN and infinity
    guessed: bool = False  # step and loss were found in the output
    where: tuple[str, ...] = ()  # nodes or servers
    job: str = ""  # number of the SLURM job

    def cells(self, now: float, with_directory: bool) -> list[str]:
        name = self.name if len(self.name) <= LONGEST_NAME else f"{self.name[:19]}…{self.name[-20:]}"
        state = f"{self.state}: {self.reason}" if self.reason else self.state
        step = f"{self.step:,}" if self.step is not None else f"epoch {self.epoch:g}" if self.epoch is not None else ""
        step = "~" * bool(self.guessed and step) + step
        loss = "" if self.loss is None else f"{float(self.loss):.4f}"
        directory = os.path.join("~", os.path.relpath(os.path.dirname(self.directory), os.path.expanduser("~")))
        directory = os.path.dirname(self.directory) if "/../" in directory else directory
        where = f"{directory}: " * with_directory + " ".join(self.where)
        age = duration(max(0, round(now - self.started)))
        name, state, *rest = map(printable, (name, state, age, step, loss, where))
        return [name, paint(state, COLOURS.get(self.state, YELLOW)), *rest]


class Listing:
    """The newest runs and lists of some directories."""

    def __init__(self, directories: Iterable[Path], most: int) -> None:
        """most: the number of runs and lists to read."""
        found = sorted(one for directory in dict.fromkeys(directories) for one in _found(directory))
        self.rows, self.faults = list[Row](), list[str]()
        while found and len(self.rows) + len(self.faults) < most:
            path = Path(found.pop()[1])
            if path.suffix != ".journal" and not os.path.isfile(path / "run.json"):  # False for a private directory
                continue
            try:
                self.rows.append(row_of_list(path) if path.suffix == ".journal" else row_of_run(path))
            except (RunLookupError, TypeError, ValueError, OverflowError) as error:  # such as of another version
                about = "" if isinstance(error, RunLookupError) else f"{path}: "
                self.faults.append(printable(f"not shown: {about}{error}"))
                with contextlib.suppress(OSError):  # directories of others use up no rows
                    most += os.lstat(path).st_uid != os.geteuid()
        self.older = sum(re.match(STAMP, key) is not None for key, _ in found)
        states = job_states([row.job for row in self.rows if row.job and row.state == REMOTE])
        for place, row in enumerate(self.rows):
            if row.job and row.state == REMOTE:  # no state: the job has ended
                self.rows[place] = replace(row, state=states.get(row.job, "unknown").lower())

    def lines(self, width: int | None, with_directory: bool = False) -> list[str]:
        """The table and notes on what it leaves out."""
        now = time.time()
        cells = [[paint(head, DIM) for head in COLUMNS], *(row.cells(now, with_directory) for row in self.rows)]
        lines = list[str]()
        for count in range(len(COLUMNS), 2, -1) if self.rows else ():  # a narrow terminal shows the first columns
            lines = terminal.table([row[:count] for row in cells], (2, 3, 4), width if count > 3 else None)
            if width is None or max(map(terminal.columns, lines)) <= width:
                break
        lines += self.faults[:MAX_FAULTS]
        if self.faults[MAX_FAULTS:]:
            lines.append(f"not shown: {len(self.faults)} runs in all")
        if self.older:
            older = "older run is" if self.older == 1 else "older runs are"
            rows = len(self.rows) + len(self.faults) + self.older
            lines.append(f"{self.older:,} {older} not shown; to show all: --rows {rows}")
        return lines


def _found(directory: Path) -> list[tuple[str, str]]:
    """The directories, and the journals of lists, each with a key that sorts the newest last. No file is read."""
    found = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found.append((entry.name[-20:], entry.path))  # date, time and a number
            elif entry.name.endswith(".journal") and entry.is_file(follow_symlinks=False):
                written = time.localtime(entry.stat(follow_symlinks=False).st_mtime)
                found.append((time.strftime("%Y%m%d-%H%M%S", written), entry.path))
    return found


def row_of_run(directory: Path) -> Row:
    """Raises RunLookupError."""
    found = metrics.find(directory)
    run, known = read(directory), metrics.newest(found, END_BYTES)
    state, reason, started, end = run.launcher.state, "", datetime.fromisoformat(run.started).timestamp(), time.time()
    if verdict := read_object(path := Path(newest(directory), "verdict.json"), []):
        state, code, end = str(verdict.get("outcome")), int(verdict.get("exit_code", 1)), path.stat().st_mtime
        exception = str(verdict.get("exception") or "").rpartition(".")[2]
        reason = exception or signal_name(code) or REASONS.get(code, f"code {code}")
    return Row(
        kind="run", name=directory.name, directory=str(directory), state="unknown" if state == EXITED else state,
        reason=reason, started=started, seconds=end - started if verdict or state == RUNNING else None,
        step=int(known["step"]) if "step" in known else None, epoch=known.get("epoch"),
        loss=known.get("loss"), guessed=found.endswith(metrics.FROM_OUTPUT),
        where=tuple(node.node for node in run.nodes), job=run.job,
    )  # fmt: skip


def row_of_list(journal: Path) -> Row:
    """Raises RunLookupError."""
    if problem := foreign(journal, journal.lstat()):
        raise RunLookupError(problem)
    path, running = journal.with_suffix(".json"), False
    results = read_object(path, notes := list[str]())
    if not results:
        raise RunLookupError((notes or [f"{path}: missing; the list has written no results"])[0])
    with contextlib.suppress(OSError):
        running = is_locked(journal)
    totals = mapping(results.get("totals"))
    reason = f"{integer(totals.get('done'))} of {integer(totals.get('jobs'))} done"
    reason += f", {failed} failed" if (failed := integer(totals.get("failed"))) else ""
    if not is_time(started := number(results.get("created"))):
        raise RunLookupError(f"{path}: its list has no time")
    state = text(results.get("state")) if running or results.get("state") != RUNNING else "interrupted"
    return Row(
        kind="list", name=path.name, directory=str(path), state=RUNNING if running else state, reason=reason,
        started=started, seconds=metrics.finite_or_none(number(totals.get("seconds"))),
        where=tuple(map(str, mapping(results.get("servers")))),
    )  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="ls", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("--log-dir", type=Path, required=True, metavar="DIR", help="the directory of all runs")
    parser.add_argument("--all", action="store_true", help="those of all directories of this user")
    parser.add_argument("--rows", type=int, default=ROWS, help="the number of runs and lists that are shown")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    here, elsewhere = [Path(os.path.realpath(options.log_dir)), Path.cwd()], [*map(Path, index.directories())]
    listing = Listing([*here, *elsewhere] if options.all else here, options.rows)
    if options.json:
        facts = {"rows": [asdict(row) for row in listing.rows], "faults": listing.faults, "older": listing.older}
        sys.stdout.write(json.dumps(facts, indent=2, sort_keys=True) + "\n")
        return 0
    lines = listing.lines(terminal.width(), options.all)
    if not lines:
        elsewhere = [one for one in elsewhere if one not in here]
        hint = "; --all shows those of other directories" if elsewhere and not options.all else ""
        lines = [f"no runs in {here[0]}{hint}"]
    terminal.show("".join(f"{line}\n" for line in lines))
    return 0
