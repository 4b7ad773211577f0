"""Find a run: its directory, its nodes, and whether its launcher still runs.

RUN is a run directory, its name or a unique beginning of it, or the number of its SLURM job; the index leads to runs
that were started in other directories. All other facts are in run.json, so any machine that shares the directory can
find the run. The programs that use them run its Python and stop its processes, so a directory that another user owns or
can write to is refused.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distributed import index
from distributed.host.identity import machine
from distributed.host.process_scan import start_time
from distributed.runs.call import Call
from distributed.trust import checked, foreign, parse_json, printable, read_bytes, user_name
from distributed.verdict.user_code import launched_package

# States of a launcher. REMOTE: on another machine, state unknown. IN_JOB: the batch script of a running SLURM job.
RUNNING, EXITED, REMOTE, IN_JOB = "running", "exited", "remote", "job"
LATEST = "latest"  # the newest run of a directory: the link that run_directory.link_to() makes
NEWEST = 5  # number of runs, or of directories, listed in an error
JOB = re.compile(r"\d+(_\d+)?", re.ASCII)  # number of a SLURM job, such as 17, or of an array element, such as 17_3
# The parts of run.json that are read here.
NODE = {"node": str, "address": str | None, "processes": range(1 << 20), "first_rank": range(1 << 30)}
RUN_JSON: dict[str, object] = {
    "directory": str, "python": str, "user": str, "started": str, "command": list[str], "layout": [NODE],
    "launcher": {"host": str, "pid": range(1, 1 << 22), "since": int | None, "machine": str, "grace": range(1 << 30)},
    "slurm_job?": str | None, "lease?": int | None, "cwd?": str, "spares?": [NODE], "changes?": [dict],
    "options?": list[list[str]], "rest?": list[str],
}  # fmt: skip


class RunLookupError(ValueError):
    """The run does not exist, its run.json cannot be used, or another user could have written it."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))  # it may have names of other users' files


@dataclass(frozen=True)
class RunNode:
    """A node of a run."""

    node: str
    address: str  # [user@]host for ssh; empty: this machine
    processes: int
    first_rank: int


@dataclass(frozen=True)
class Launcher:
    host: str
    pid: int
    since: int | None  # start time, in clock ticks since boot
    state: str  # RUNNING, EXITED, REMOTE or IN_JOB
    grace: int  # seconds from a stop request to SIGKILL


@dataclass(frozen=True)
class Run:
    directory: Path
    directory_at_launch: str  # MUSTER_RUN_DIR of its processes
    python: str  # the interpreter of the ranks
    user: str
    started: str
    command: tuple[str, ...]
    launcher: Launcher
    nodes: tuple[RunNode, ...]
    job: str = ""  # number of its SLURM job
    launched: str = ""  # see user_code.launched_package()
    lease: int | None = None  # 0: the nodes continue without the launcher
    cwd: str = ""
    spares: tuple[RunNode, ...] = ()  # spare nodes, which may replace lost ones
    changes: tuple[dict[str, object], ...] = ()  # nodes that joined or left, see launch.spares
    call: Call | None = None  # the parts of the command; None for a run of an older version


def find(argument: str, cwd: Path, logs: Path) -> Path:
    """Return the directory of a run: of this path, name, unique beginning of a name, or number of a SLURM job.

    Runs in `logs` precede those elsewhere, which the index has. `latest` is the newest run in `logs`. Raises
    RunLookupError if there is no such run, or if several match; the message lists runs, or where runs are.
    """
    if os.path.isfile(cwd / argument / "run.json"):  # False if another user's directory is private
        return resolve(cwd / argument)
    indexed = [Path(one) for one in index.directories() if one != os.path.realpath(logs)]
    elsewhere = [] if argument == LATEST else indexed
    for directories, runs_of in itertools.product(([logs], elsewhere), (_named, _beginning_with)):
        found = [*dict.fromkeys(resolve(one) for directory in directories for one in runs_of(argument, directory))]
        if len(found) == 1:
            return found[0]
        if found:
            candidates = " ".join(map(str, found[:NEWEST])) + " ..." * (len(found) > NEWEST)
            raise RunLookupError(f"RUN '{argument}': several runs match, give more of the name: {candidates}")
    if os.path.isdir(cwd / argument):
        raise RunLookupError(f"RUN '{argument}': not a run directory: no run.json in it")
    if names := own_runs(logs):
        newest = " ".join(names[: -NEWEST - 1 : -1])
        raise RunLookupError(f"RUN '{argument}': no such run; newest in {logs}: {newest}")
    known = " ".join(itertools.islice((str(one) for one in indexed if own_runs(one)), NEWEST))
    where = f"your runs are in {known}; name one of these" if known else "name its directory"
    raise RunLookupError(f"RUN '{argument}': no such run, and no runs in {logs}; {where} with --log-dir")


def _named(argument: str, logs: Path) -> list[Path]:
    """The run with this name or SLURM job number."""
    names = [argument, *([f"slurm-{argument}"] if JOB.fullmatch(argument) else [])]
    return [logs / name for name in names if os.path.isfile(logs / name / "run.json")][:1]


def _beginning_with(argument: str, logs: Path) -> list[Path]:
    """The runs whose names begin with this text, the newest first."""
    if argument in ("", LATEST) or JOB.fullmatch(argument):
        return []
    return [logs / name for name in reversed(own_runs(logs, argument))]


def own_runs(logs: Path, beginning: str = "") -> list[str]:
    """The names of this user's runs in a directory, the newest last."""
    found = []
    with contextlib.suppress(OSError), os.scandir(logs) as entries:
        for entry in entries:
            if entry.name.startswith(beginning) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):  # no run, or it has been removed
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        found.append((os.stat(f"{entry.path}/run.json").st_mtime, entry.name))
    return [name for _, name in sorted(found)]


def resolve(path: Path) -> Path:
    """Where a path leads. Raises RunLookupError if it is a link, such as logs/latest, of another user than root."""
    if path.is_symlink() and (owner := path.lstat().st_uid) not in (0, os.geteuid()):
        raise RunLookupError(f"{path}: this symbolic link belongs to {user_name(owner)}; name the directory of the run")
    return Path(os.path.realpath(path))


def read(directory: Path, created: bool = False) -> Run:
    """Read run.json and check whether the launcher still runs. Raises RunLookupError if run.json must not be used.

    created: this process has created the directory, so its owner and mode are not checked.
    """
    if not created and (problem := foreign(directory, directory.stat())):
        raise RunLookupError(problem)
    try:
        facts = parse_json(read_bytes(directory / "run.json", own=not created))
    except (OSError, ValueError) as error:
        raise RunLookupError(f"{directory}/run.json: cannot be read ({error})") from None
    if not isinstance(facts, dict) or not {"directory", "launcher", "layout", "python"} <= facts.keys():
        raise RunLookupError(f"{directory}/run.json: incomplete, or written by an older version of Muster")
    try:
        return _from_json(directory, facts)
    except (KeyError, ValueError) as error:
        raise RunLookupError(f"{directory}/run.json: damaged ({type(error).__name__}: {error})") from None


def _from_json(directory: Path, content: dict[str, Any]) -> Run:
    """content: that of run.json."""
    known = {name.rstrip("?") for name in RUN_JSON}
    facts = checked(RUN_JSON, {name: value for name, value in content.items() if name in known}, "run.json")
    launcher, job = facts["launcher"], facts.get("slurm_job") or ""
    state = state_of_launcher(launcher["host"], launcher["machine"], launcher["pid"], launcher["since"])
    local = launcher["host"] if state == REMOTE else ""  # address of nodes on the launcher's machine
    if job and not JOB.fullmatch(job):
        raise ValueError(f"slurm_job: expected a number, got {job!r}")

    def nodes(entries: list[dict[str, Any]]) -> tuple[RunNode, ...]:
        if any("/" in one["node"] for one in entries):
            raise ValueError("node: expected a name without a slash")
        return tuple(RunNode(**one | {"address": one["address"] or local}) for one in entries)

    return Run(
        directory=directory,
        directory_at_launch=facts["directory"],
        python=facts["python"],
        user=facts["user"],
        started=facts["started"],
        command=tuple(facts["command"]),
        launcher=Launcher(launcher["host"], launcher["pid"], launcher["since"], state, launcher["grace"]),
        nodes=nodes(facts["layout"]),
        job=job,
        launched=launched_package(content),
        lease=facts.get("lease"),
        cwd=facts.get("cwd", ""),
        spares=nodes(facts.get("spares", [])),
        changes=tuple(facts.get("changes", ())),
        call=_call_of(facts),
    )


def state_of_launcher(host: str, launcher_machine: str, pid: int, started: int | None) -> str:
    """Return RUNNING, EXITED or REMOTE. A later process with the same pid has another start time."""
    if launcher_machine == machine():
        return RUNNING if started is not None and started == start_time(pid) else EXITED
    boot_id, earlier_boot_id = (identifier.partition("net:")[0] for identifier in (machine(), launcher_machine))
    rebooted = host == os.uname().nodename and boot_id != earlier_boot_id
    return EXITED if rebooted else REMOTE


def _call_of(facts: dict[str, Any]) -> Call | None:
    if "options" not in facts or "rest" not in facts:
        return None
    call = Call((), tuple(map(tuple, facts["options"])), tuple(facts["rest"]))
    return replace(call, program=tuple(facts["command"][: len(facts["command"]) - len(call.words)]))
