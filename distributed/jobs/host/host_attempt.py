"""One attempt of a job on its server: its files, its state and its end."""

from __future__ import annotations

import contextlib
import heapq
import os
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

from distributed import metrics
from distributed.files import is_locked, read_json, try_lock, write_file
from distributed.host import process_scan
from distributed.jobs.host.outputs import OWNER, Busy, HostError, claim_output, has_results
from distributed.launch import node_files
from distributed.launch.supervisor_options import SupervisorOptions
from distributed.training import base_model
from distributed.trust import PRIVATE_DIRECTORY, checked, regular_file, shown

LAST_LINES = 20  # lines of output that are reported for a failed attempt
TAIL = 16 * 1024  # bytes read from the end of a file
SETUP = "setup.sh"  # in the directory of an attempt: the setup lines of its server
LOCK_TIMEOUT = 2.0  # seconds; another process locks the file briefly when it checks whether the attempt is running
NOTHING_WRITTEN = "wrote nothing to its output directory ($MUSTER_OUTPUT_DIR)"
MAX_SEARCHES = 3  # maximum number of searches for new files that one serve process makes; see HostAttempt.note()
MAX_ENTRIES, SEARCH_SECONDS = 5000, 0.5  # limits of one search
NOT_SEARCHED = ("logs", base_model.CACHE)  # directories
LIST_FILES = (".log", ".out", "phase1_base_models.json", "phase2_experiments.json")  # suffixes of files of a list
MAX_LINE, MAX_TEXT = 500, 10_000  # characters of a line of output, and of other texts in a reply or an event
LATEST = 1e11  # seconds; times are earlier
# Facts in replies and events; see trust.checked().
END = {
    "code": int | None, "stop_requested": bool, "started": float | None, "ended": float | None,
    "peak_memory": int | None, "cause": str, "message": str, "lines": list[str], "metrics": dict,
    "note": str,
}  # fmt: skip
PROCESS = {"pid?": int, "start_time?": int, "boot_id?": str | None}


class HostAttempt:
    """One attempt of a job on this server."""

    searches = 0  # how many times this process has searched for new files, for all its attempts together

    def __init__(self, directory: str, server: str, output: str, grace: float) -> None:
        self.directory, self.output, self.grace = directory, output, grace
        self.name = os.path.basename(directory)
        self.files = node_files.Files(directory, server)
        self.kill_at = float("inf")  # time on Service's clock to kill a supervisor that ignores a stop request
        self.metrics: dict[str, Any] = {}
        self.sweep = ""  # state of Service._sweep(), which kills processes of the attempt: empty, running or done

    @property
    def workdir(self) -> str:
        """The working directory: see the docstring of this module."""
        return os.path.abspath(os.path.join(self.directory, *[os.pardir] * 4))

    @property
    def lock(self) -> str:
        return os.path.join(self.directory, "lock")

    def locked(self) -> bool:
        """Whether a supervisor runs, or is being started; False if the file system does not support locks."""
        try:
            return is_locked(self.lock)
        except OSError:
            return False

    def take_lock(self) -> int:
        """Lock the attempt until all copies of the returned file are closed. Raises Busy if another process has it."""
        file = regular_file(self.lock, os.O_RDWR | os.O_CREAT)
        if not try_lock(file, seconds=LOCK_TIMEOUT):
            os.close(file)
            raise Busy(f"{self.name}: already running")
        return file

    def create(self, job: str, script: str) -> int:
        """Create the directory of the attempt and claim the output directory. Returns the file of claim_output()."""
        os.mkdir(self.directory, PRIVATE_DIRECTORY)
        try:
            return claim_output(self.workdir, self.output, job, script)
        except (HostError, OSError):
            os.rmdir(self.directory)
            raise

    def write_setup(self, lines: Sequence[str]) -> None:
        """Write the setup lines of the server, if it has any. Raises OSError."""
        if lines:
            write_file(os.path.join(self.directory, SETUP), "\n".join(["set +e", *lines, ""]))  # +e: a line may fail

    def options(self, command: list[str], timeout: float | None, setup: bool) -> SupervisorOptions:
        """The options of the attempt's supervisor. timeout: in seconds. setup: whether the server has setup lines."""
        arguments = ["--dir", self.directory, "--name", self.files.name, "--lease", "0"]
        arguments += ["--source", os.path.join(self.directory, SETUP)] if setup else []
        options = SupervisorOptions([*arguments, "--", *command], self.grace)
        options.timeout = float("inf") if timeout is None else float(max(1, round(timeout)))
        return options

    def state(self) -> str:
        """absent (never started, or removed), running, ended, or killed (no supervisor, and no exit code)."""
        if node_files.read_code(self.files.exit) is not None:
            return "ended"
        if self.locked() or node_files.supervisor_of(self.files):  # its lock file may have been removed
            return "running"
        if node_files.read_code(self.files.exit) is not None:  # written since the first read
            return "ended"
        # On a full disk, the file of process ids is missing. The log is created before the command starts.
        started = os.path.exists(self.files.log) or process_scan.live_processes(self.files.environment)
        return "killed" if started else "absent"

    def facts(self) -> dict[str, Any]:
        """The process id, start time and boot id of a running attempt."""
        pids = read_json(self.files.pids)
        command = pids.get("command")
        known = {"boot_id": pids.get("boot_id"), **(command if isinstance(command, dict) else {})}
        return known_facts({name.rstrip("?"): kind for name, kind in PROCESS.items()}, known)

    def end(self) -> dict[str, Any]:
        """The facts of the event `ended`."""
        code = known_facts(END, {"code": node_files.read_code(self.files.exit)}).get("code")
        usage = known_facts(END, read_json(self.files.usage))
        record = known_facts(END, read_json(self.files.record))
        ended = usage.get("ended") or modification_time(self.files.exit)
        cause, message = record.get("cause", ""), record.get("message", "")
        if not cause and (self.sweep or code is None):
            fault = "files are missing or damaged" if os.path.isdir(self.directory) else "removed while the job ran"
            cause, message = "killed", f"{self.directory}: {fault}"
        return {
            "code": code,
            "stop_requested": os.path.exists(self.files.request),
            "started": usage.get("started") or modification_time(self.files.pids),
            "ended": ended,
            "peak_memory": usage.get("peak_memory"),
            "cause": cause,
            "message": message,
            "lines": last_lines(self.files.log) if code != 0 else [],
            "metrics": read_metrics(self.output),
            "note": self.note() if code == 0 else "",
        }

    def note(self) -> str:
        """A note that the attempt wrote no results, and where new files are instead; empty if there are results."""
        with contextlib.suppress(OSError):  # the job has removed the directory
            if has_results(self.output):
                return ""
            os.utime(self.output)  # an NFS client may have cached the listing
            if has_results(self.output):
                return ""
        # The time is read from a file, because modification times of other files also use the file system's clock.
        started = modification_time(os.path.join(self.output, OWNER))
        if started is None or HostAttempt.searches >= MAX_SEARCHES:
            return NOTHING_WRITTEN
        HostAttempt.searches += 1
        found = new_files(self.workdir, started)
        more = ", ..." if found[3:] else ""
        new = f"; new files elsewhere on {self.files.name}: {', '.join(found[:3])}{more}" if found else ""
        return NOTHING_WRITTEN + new


def checked_facts(kind: dict[str, Any], value: Any) -> dict[str, Any]:
    """Facts of the declared kind (see trust.checked()), with limits: long texts are cut. Raises ValueError."""
    facts: dict[str, Any] = checked(kind, value, "message")
    for name, each in facts.items():
        if name in ("started", "ended") and each is not None and not 0 <= each < LATEST:
            raise ValueError(f"{name}: expected a time, got {shown(each)}")
        if name == "lines":
            facts[name] = [line[:MAX_LINE] for line in each[-LAST_LINES:]]
        elif name == "metrics":
            valid = {
                key: one
                for key, one in each.items()
                if is_metric(one) or (one == "NaN" and key not in metrics.POSITIONS)
            }
            facts[name] = {key: valid[key] for key in islice(valid, metrics.MAX_METRICS) if len(key) <= MAX_LINE}
        elif isinstance(each, str):
            facts[name] = each[:MAX_TEXT]
    return facts


def is_metric(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < metrics.HUGE


def known_facts(kinds: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """The facts of these kinds in a file that a job may have changed; others are left out."""
    found: dict[str, Any] = {}
    for name in kinds.keys() & value.keys():
        with contextlib.suppress(ValueError):
            found |= checked_facts({name: kinds[name]}, {name: value[name]})
    return found


def new_files(workdir: str, since: float) -> list[str]:
    """Directories in workdir that have files changed since a time, and changed files of workdir itself; relative paths.

    Skips output directories of jobs, files of a list, hidden files and virtual environments. The newest directories
    come first. Files come last, because one of them may be the output of the dispatcher.
    """
    found: dict[str, bool] = {}  # path -> whether it is a file of the working directory
    root = os.stat(workdir)
    queued = {(root.st_dev, root.st_ino)}  # a symbolic link may lead back to a directory that was queued before
    queue, entries_left, deadline = [(0.0, "")], MAX_ENTRIES, time.monotonic() + SEARCH_SECONDS
    while queue and entries_left > 0:
        directory = heapq.heappop(queue)[1]
        with contextlib.suppress(OSError), os.scandir(os.path.join(workdir, directory)) as scan:
            entries = list(islice(scan, entries_left))
            entries_left -= len(entries)
            names = [entry.name for entry in entries]
            if OWNER in names or "pyvenv.cfg" in names:
                continue
            # If there is a results.journal, all files whose names start with `results.` belong to a list.
            results = tuple(name.removesuffix("journal") for name in names if name.endswith(".journal"))
            for entry in entries:
                path = os.path.join(directory, entry.name)
                skipped = entry.name.startswith((".", "__pycache__", *results)) or entry.name.endswith(LIST_FILES)
                if skipped or path in NOT_SEARCHED or not path.isprintable():
                    continue
                if time.monotonic() > deadline:
                    return sorted(found, key=found.__getitem__)
                with contextlib.suppress(OSError):  # removed meanwhile
                    facts = entry.stat()
                    if entry.is_dir() and (facts.st_dev, facts.st_ino) not in queued:
                        queued.add((facts.st_dev, facts.st_ino))
                        heapq.heappush(queue, (-facts.st_mtime, path))
                    elif entry.is_file() and facts.st_mtime >= since:
                        found[directory or path] = not directory
    return sorted(found, key=found.__getitem__)


def modification_time(path: str) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None


def tail(path: str) -> bytes:
    """The last bytes of a file; empty if it cannot be read."""
    try:
        with open(path, "rb", opener=regular_file) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            return file.read()
    except OSError:
        return b""


def last_lines(path: str) -> list[str]:
    """The last lines of a log. If the disk is full, the last line says so, as messages of the job may be missing."""
    lines = [line[:MAX_LINE] for line in tail(path).decode(errors="replace").splitlines()[-LAST_LINES:]]
    with contextlib.suppress(OSError):
        if not os.statvfs(os.path.dirname(path)).f_bavail:
            lines[-1:] = ["; ".join((*lines[-1:], "no space left on the disk with its log"))]
    return lines


def read_metrics(output: str) -> dict[str, Any]:
    """The newest value of each metric in metrics.jsonl; "NaN" for NaN and infinity."""
    return metrics.newest(os.path.join(output, "metrics.jsonl"))
