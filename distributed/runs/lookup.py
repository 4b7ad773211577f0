"""Find a run: its directory, its nodes, and whether its launcher is still there.

A person names a run by its directory or by its name below logs; run.json has the rest, also in another terminal, on
another day and on another machine that shares the directory. Standard library only.

Try it: python -m distributed.runs.lookup --from "$PWD" logs/latest | tr '\\0' '\\n'
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed.host.identity import machine, user
from distributed.host.process_scan import start_time

HERE, GONE, ELSEWHERE = "here", "gone", "elsewhere"  # where the launcher is, seen from this machine
IN_JOB = "job"  # it is the batch script of a job that runs
NEWEST = 5  # how many runs a refusal names
JOB = re.compile(r"\d+(_\d+)?")  # as SLURM calls one, or an element of an array


class NoRun(ValueError):
    """There is no such run, or nothing can be asked about it."""


@dataclass(frozen=True)
class Place:
    """A node of the run."""

    node: str
    address: str  # as ssh is called; empty: this machine
    processes: int
    first_rank: int


@dataclass(frozen=True)
class Launcher:
    host: str
    pid: int
    since: int | None  # its start, in clock ticks of its machine
    where: str  # HERE, GONE or ELSEWHERE
    grace: int  # seconds that it gives to ranks after a stop request


@dataclass(frozen=True)
class Run:
    folder: Path
    mark: str  # MUSTER_RUN_DIR of its processes: the directory, as its nodes know it
    python: str  # the interpreter of the ranks
    user: str
    started: str
    command: tuple[str, ...]
    launcher: Launcher
    places: tuple[Place, ...]
    job: str = ""  # the number of its SLURM job


def find(word: str, cwd: Path, logs: Path) -> Path:
    """The directory of a run: word is a path, a name below logs, or the number of a SLURM job.

    Raises NoRun, which names the runs that are there instead.
    """
    jobs = [logs / f"slurm-{word}"] if JOB.fullmatch(word) else []
    for directory in (cwd / word, logs / word, *jobs):
        if (directory / "run.json").is_file():
            return Path(os.path.realpath(directory))
    if (cwd / word).is_dir():
        raise NoRun(f"RUN '{word}': this is no run directory, it has no run.json")
    there = sorted(logs.glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    names = [path.parent.name for path in there if not path.parent.is_symlink()]
    if names:
        raise NoRun(f"RUN '{word}': there is no such run; the newest in {logs}: {' '.join(names[: -NEWEST - 1 : -1])}")
    raise NoRun(f"RUN '{word}': there is no such run, and none at all in {logs}: name another place with --log-dir")


def read(folder: Path) -> Run:
    """The run by its run.json, and where its launcher is now. Raises NoRun when run.json is not complete."""
    try:
        facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise NoRun(f"{folder}/run.json: cannot be read ({error})") from None
    if not isinstance(facts, dict) or not {"folder", "launcher", "places", "python"} <= facts.keys():
        raise NoRun(f"{folder}/run.json: does not tell where the run is, an older version of the kit wrote it")
    launcher = facts["launcher"]
    where = seen(launcher["host"], launcher["machine"], launcher["pid"], launcher["since"])
    home = launcher["host"] if where == ELSEWHERE else ""
    places = [
        Place(one["node"], one["address"] or home, one["processes"], one["first_rank"]) for one in facts["places"]
    ]
    return Run(
        folder=folder,
        mark=facts["folder"],
        python=facts["python"],
        user=facts["user"],
        started=facts["started"],
        command=tuple(facts["command"]),
        launcher=Launcher(launcher["host"], launcher["pid"], launcher["since"], where, launcher["grace"]),
        places=tuple(places),
        job=facts.get("slurm_job") or "",
    )


def seen(host: str, its_machine: str, pid: int, its_since: int | None) -> str:
    """Where a launcher is. Its number alone is not enough: it may be another process by now."""
    if its_machine == machine():
        return HERE if its_since is not None and its_since == start_time(pid) else GONE
    restarted = host == os.uname().nodename and boot(its_machine) != boot(machine())
    return GONE if restarted else ELSEWHERE


def boot(a_machine: str) -> str:
    return a_machine.partition("net:")[0]


def main(words: Sequence[str] | None = None) -> int:
    """Print, each ended by a NUL: directory, mark, python, the launcher's where, host, pid, since and grace, job; then
    of each node its name, address, number of ranks and first rank.

    Returns 2 when there is no such run, or another user has started it.
    """
    parser = argparse.ArgumentParser(prog="lookup", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("--from", type=Path, required=True, dest="cwd", metavar="DIR", help="where a path begins")
    parser.add_argument("--log-dir", type=Path, default=Path("logs"), metavar="DIR", help="where a name is looked for")
    parser.add_argument("run", metavar="RUN")
    options = parser.parse_args(words)
    try:
        run = read(find(options.run, options.cwd, options.cwd / options.log_dir))
        refuse_others(run, user(), os.geteuid())
    except NoRun as error:
        sys.stderr.write(f"{error}\n")
        return 2
    launcher = run.launcher
    fields = [run.folder, run.mark, run.python, launcher.where, launcher.host, launcher.pid, launcher.since]
    fields += [launcher.grace, run.job]
    for place in run.places:
        fields += [place.node, place.address, place.processes, place.first_rank]
    sys.stdout.buffer.write(b"".join(os.fsencode(str(field)) + b"\0" for field in fields))
    return 0


def refuse_others(run: Run, me: str, uid: int) -> None:
    if uid != 0 and run.user != me:
        raise NoRun(f"{run.folder}: {run.user} has started it, and you are {me}: processes of others cannot be seen")


if __name__ == "__main__":
    sys.exit(main())
