"""The server's side of a job list: start jobs, monitor them, and reply to the dispatcher.

usage: module.py jobs.host serve
       module.py jobs.host view DIR SLOT       show the output of a slot; see panes.py
       module.py jobs.host follow LOG EXIT     print LOG, and lines added to it, until the file EXIT exists

serve reads requests from standard input and writes replies and events to standard output, one JSON object per line.
The first event is `hello`; its key `protocol` has the value HELLO. serve exits when its standard input ends, because
the dispatcher has exited or the connection is lost, or when no heartbeats arrive. Jobs continue under their own
supervisors. A server runs one serve process per job list. A new process waits until the older one exits for lack of
heartbeats. If the older one still gets heartbeats, the new process replies to `open` with an error.

WORKDIR/logs/jobs/LIST/ATTEMPT/ holds the files of an attempt's supervisor, and `lock`. This file is locked from before
the supervisor is forked until it exits, so that a later serve process knows whether the attempt runs. Servers may share
a file system, so the files of each server are in LIST/servers/NAME/.

Standard library only: it runs on servers without packages.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import heapq
import json
import os
import pwd
import select
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, islice
from typing import Any

with contextlib.suppress(ImportError):  # imported once here for all forked supervisors
    import ctypes  # noqa: F401
    import resource  # noqa: F401

from distributed import metrics
from distributed.exit_codes import WRONG_CALL
from distributed.files import foreign_directory, is_locked, read_json, try_lock, write_file
from distributed.host import process_scan, signals
from distributed.host.clock import RunningClock
from distributed.host.gpus import query_gpus
from distributed.jobs import panes
from distributed.launch import supervisor
from distributed.launch.node_reports import HEARTBEAT_TIMEOUT
from distributed.training import base_model
from distributed.training.base_model import BaseModelError
from distributed.trust import (
    PRIVATE,
    PRIVATE_DIRECTORY,
    checked,
    foreign,
    make_directories,
    make_own_directory,
    parse_json,
    parts_of,
    planted,
    read_text,
    regular_file,
    shown,
    user_name,
    writable_by_others,
)

HELLO = "muster-jobs-host"
# Seconds without a heartbeat after which a serve process exits. A new serve process waits until the old one has exited,
# and must reply before HEARTBEAT_TIMEOUT, after which the dispatcher closes the channel.
CONNECTION_TIMEOUT = HEARTBEAT_TIMEOUT - 3.0
POLL_INTERVAL = 0.2  # seconds between checks of running attempts
PROGRESS_INTERVAL = 2.0  # seconds between reads of the metrics of running jobs
LAST_LINES = 20  # lines of output that are reported for a failed attempt
TAIL = 16 * 1024  # bytes read from the end of a file
SETUP = "setup.sh"  # in the directory of an attempt: the setup lines of its server
LOCK_TIMEOUT = 2.0  # seconds; another process locks the file briefly when it checks whether the attempt is running
AFTER = "MUSTER_AFTER"  # variable with the output directories of the jobs that _after names, one per line
OWNER = ".muster_job"  # file in an output directory with the name of its job; locked while an attempt writes there
NOTHING_WRITTEN = "wrote nothing to its output directory ($MUSTER_OUTPUT_DIR)"
MAX_SEARCHES = 3  # maximum number of searches for new files that one serve process makes; see HostAttempt.note()
MAX_ENTRIES, SEARCH_SECONDS = 5000, 0.5  # limits of one search
NOT_SEARCHED = ("logs", base_model.CACHE)  # directories
LIST_FILES = (".log", ".out", "phase1_base_models.json", "phase2_experiments.json")  # suffixes of files of a list
REMEDIES = {  # errors of files and programs on a server; {} is a setting that avoids the error
    "No space left on device": "free space there, or set {}",
    "Disk quota exceeded": "free space there, or set {}",
    "Read-only file system": "make it writable, or set {}",
    "Permission denied": "change its permissions, or set {}",
    "Not a directory": "remove the file there, or set {}",
    "File exists": "remove the file there, or set {}",
    "cd: ": "create the home directory, or set {}",
    "command not found": "install it there",
    "": "correct this on the server",
}
MAX_LINE, MAX_TEXT = 500, 10_000  # characters of a line of output, and of other texts in a reply or an event
LATEST = 1e11  # seconds; times are earlier
# Facts in replies and events; see trust.checked().
END = {
    "code": int | None, "stop_requested": bool, "started": float | None, "ended": float | None,
    "peak_memory": int | None, "cause": str, "message": str, "lines": list[str], "metrics": dict,
    "note": str,
}  # fmt: skip
PROCESS = {"pid?": int, "start_time?": int, "boot_id?": str | None}
CHILD_KILLED = "a child process of jobs.host was killed; check the memory of the server"

Request = dict[str, Any]
Reply = dict[str, Any]
ResultHandler = Callable[[Reply], None]


class HostError(Exception):
    """A request failed. The message states problem and remedy."""

    kind = "server"  # see backend.NotStarted


class JobRefused(HostError):
    """No server can start the job."""

    kind = "job"


class Busy(HostError):
    """Another attempt writes to the output directory, or the attempt is already running."""

    kind = "busy"


class HostAttempt:
    """One attempt of a job on this server."""

    searches = 0  # how many times this process has searched for new files, for all its attempts together

    def __init__(self, directory: str, server: str, output: str, grace: float) -> None:
        self.directory, self.output, self.grace = directory, output, grace
        self.name = os.path.basename(directory)
        self.files = supervisor.Files(directory, server)
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

    def options(self, command: list[str], timeout: float | None, setup: bool) -> supervisor.SupervisorOptions:
        """The options of the attempt's supervisor. timeout: in seconds. setup: whether the server has setup lines."""
        arguments = ["--dir", self.directory, "--name", self.files.name, "--lease", "0"]
        arguments += ["--source", os.path.join(self.directory, SETUP)] if setup else []
        options = supervisor.SupervisorOptions([*arguments, "--", *command], self.grace)
        options.timeout = float("inf") if timeout is None else float(max(1, round(timeout)))
        return options

    def state(self) -> str:
        """absent (never started, or removed), running, ended, or killed (no supervisor, and no exit code)."""
        if supervisor.read_code(self.files.exit) is not None:
            return "ended"
        if self.locked() or supervisor.supervisor_of(self.files):  # its lock file may have been removed
            return "running"
        if supervisor.read_code(self.files.exit) is not None:  # written since the first read
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
        code = known_facts(END, {"code": supervisor.read_code(self.files.exit)}).get("code")
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


def has_results(output: str) -> bool:
    """Whether an output directory contains more than OWNER. Raises OSError."""
    return bool(set(os.listdir(output)) - {OWNER})


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


def with_remedy(errors: str, setting: str) -> str:
    """A line of `errors` and its remedy, by the first match in REMEDIES. setting: replaces {} in the remedy."""
    lines = errors.splitlines()
    found = ((line, remedy) for sign, remedy in REMEDIES.items() for line in lines if sign in line)
    return next((f"{line.strip()}; {remedy.format(setting)}" for line, remedy in found), "")


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


# ---------------------------------------------------------------- one serve process per job list


def list_directory(workdir: str, list_id: str) -> str:
    """Create the private directory of a list, and return its path. Raises OSError if others own it or can replace it.

    The user may have replaced `logs` by a link.
    """
    path = os.path.join(workdir, "logs", "jobs", list_id)
    make_own_directory(os.path.join(workdir, "logs"), workdir)
    make_own_directory(path, workdir, PRIVATE_DIRECTORY)
    make_private(path)
    return path


def make_private(path: str) -> None:
    """Create a private directory, and those above it. Raises OSError if others own it or can write to it."""
    make_directories(path, PRIVATE_DIRECTORY)
    facts = os.lstat(path)
    if problem := foreign(path, facts) if stat.S_ISDIR(facts.st_mode) else "not a directory":
        raise PermissionError(errno.EACCES, problem.removeprefix(f"{path}: "), path)
    os.chmod(path, PRIVATE_DIRECTORY)  # earlier versions created it with the umask of the user


def lock_list(directory: str) -> int:
    """Become the only serve process of this list on this server. Returns the locked file.

    Waits until an older process exits for lack of heartbeats. Raises HostError if that process still gets heartbeats.
    """
    make_directories(directory, PRIVATE_DIRECTORY)
    path = os.path.join(directory, "serve")
    file = regular_file(path, os.O_RDWR | os.O_CREAT)
    if not try_lock(file, seconds=CONNECTION_TIMEOUT + 1.0, required=True):
        os.close(file)
        raise HostError(f"{path}: locked by another process; is another machine running this list?")
    os.ftruncate(file, os.write(file, f"{os.uname().nodename} {os.getpid()}\n".encode()))  # raises if the disk is full
    return file


def expect_heartbeat() -> None:
    """End this process, even if it is blocked, if this function is not called again within CONNECTION_TIMEOUT."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, CONNECTION_TIMEOUT)


# ---------------------------------------------------------------- the program


class Service:
    """The program `serve`: reads requests, writes replies and events."""

    def __init__(self) -> None:
        self.workdir = self.server = self.directory = self.server_directory = ""
        self.python: list[str] = []
        self.slots: list[str] = []
        self.attempts: dict[str, HostAttempt] = {}  # by name; attempts that have not ended
        self.list_lock = -1
        self.bases: dict[str, list[list[int]]] = {}  # digest of a verified base model -> its signature
        self.base_locks: dict[str, int] = {}  # digest of a base model being verified or copied -> locked file
        self._children: dict[int, tuple[Request | None, ResultHandler, bytearray]] = {}  # by the pipe from the child
        self._received = b""
        self._clock, self._progress_at = RunningClock(), 0.0
        self._signals = signals.catch({signal.SIGCHLD})

    def run(self) -> int:
        """Serve until the end of standard input. Returns the exit code."""
        self.send(event="hello", protocol=HELLO, host=os.uname().nodename, boot_id=supervisor.boot_id())
        while self._wait():
            self._report()
        return 0

    def send(self, **facts: Any) -> None:
        """Write one line. Exits if the reader has closed the pipe."""
        data = json.dumps(facts).encode() + b"\n"
        try:
            while data:
                data = data[os.write(1, data) :]
        except OSError:
            os._exit(0)

    def _wait(self) -> bool:
        poll = select.poll()
        for file in (0, self._signals[0], *self._children):
            poll.register(file, select.POLLIN)
        for file, _ in poll.poll(1000 * POLL_INTERVAL if self.attempts else 5000):
            if file == 0:
                block = os.read(0, 1 << 20)
                if not block:
                    return False
                *lines, self._received = (self._received + block).split(b"\n")
                for line in lines:
                    self._handle_line(line)
            elif file == self._signals[0]:
                os.read(file, 4096)
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
            elif file in self._children:
                self._read_child(file)
        return True

    def _handle_line(self, line: bytes) -> None:
        if not line.strip():
            if self.list_lock >= 0:
                expect_heartbeat()
            self.send(event="heartbeat")
            return
        request = json.loads(line)
        handlers: dict[str, Callable[[Request], Reply | None]] = {
            "open": self.open, "query": self.query, "start": self.start, "stop": self.stop, "gpus": self.gpus,
            "exists": self.exists, "claim": self.claim, "base": self.base, "publish_base": self.publish_base,
            "remove_output": self.remove_output, "remove_session": self.remove_session,
        }  # fmt: skip
        try:
            reply = handlers[request["do"]](request)
        except HostError as error:
            self.send(reply=request["id"], error=str(error), kind=error.kind)
        except OSError as error:
            reason = f"{error.filename or self.server_directory or self.workdir}: {error.strerror}"
            self.send(reply=request["id"], error=with_remedy(reason, "another workdir"))
        else:
            if reply is not None:
                self.send(reply=request["id"], **reply)

    # ---- requests

    def open(self, request: Request) -> Reply:
        """Find the working directory, check the requirements of jobs, and lock the list."""
        if request["remote"] and ends_at_logout():
            raise HostError("systemd would kill the jobs at logout (KillUserProcesses); run loginctl enable-linger")
        self.server = request["server"]
        self.workdir = find_workdir(request["workdir"], request["default_workdir"], owner_here(request))
        if request["script"]:  # empty: no job will be started
            if not os.path.isfile(os.path.join(self.workdir, request["script"])):
                raise HostError(
                    f"script {request['script']}: not in {self.workdir}; copy it there (--sync does if git lists it), "
                    "or set workdir"
                )
            owners = request["owners"] if request["user"] == os.geteuid() else ()
            self.trusted = {0, os.geteuid(), os.stat(self.workdir).st_uid, *owners}
            self._refuse_planted(request["script"], request["python"])
            self.python = find_python(request["python"], self.workdir)
        self.directory = list_directory(self.workdir, request["list"])
        self.server_directory = panes.server_directory(self.directory, self.server)
        self.list_lock = lock_list(self.server_directory)
        expect_heartbeat()
        self.slots = request["slots"]
        session, note = panes.ensure(self.server_directory, self.slots) if request["panes"] else ("", "")
        return {
            "workdir": self.workdir, "rsync": bool(shutil.which("rsync")), "session": session, "note": note,
            "bases": base_model.digests_in(self._cache),
        }  # fmt: skip

    def exists(self, request: Request) -> Reply:
        """Whether a file exists in the working directory: the dispatcher's test for a shared file system."""
        return {"exists": os.path.exists(os.path.join(self.workdir, request["path"]))}

    def query(self, request: Request) -> Reply:
        """Return the state of these attempts, and monitor the running ones from now on."""
        found: dict[str, Any] = {}
        for name, output in request["attempts"].items():
            attempt = self._attempt(name, output, request.get("grace", 8.0))
            state = attempt.state()
            found[name] = {"state": state}
            if state in ("running", "killed"):
                self.attempts[name] = attempt
                found[name] = {"state": "running", **attempt.facts()}
            elif state == "ended":
                found[name] |= attempt.end()
            elif os.path.isdir(attempt.directory):
                # Left by a serve process that was killed before it forked the supervisor.
                os.rename(attempt.directory, f"{attempt.directory}.unused-{os.getpid()}-{time.time_ns()}")
        return {"attempts": found}

    def start(self, request: Request) -> Reply:
        """Start an attempt once; if its directory exists already, reply with its state."""
        attempt = self._attempt(request["attempt"], request["output"], request["grace"])
        if os.path.exists(attempt.directory):
            again = {"attempts": {attempt.name: request["output"]}, "grace": request["grace"]}
            return self.query(again)["attempts"][attempt.name]
        output_lock = attempt.create(request["job"], request["script_name"])
        try:
            return self._start(attempt, request)
        except (HostError, OSError):
            shutil.rmtree(attempt.directory, ignore_errors=True)
            raise
        finally:
            os.close(output_lock)  # the supervisor has inherited it

    def _start(self, attempt: HostAttempt, request: Request) -> Reply:
        base = self._base_path(request["base"]) if request.get("base") else ""
        server_variables = job_variables(attempt.output, self.workdir, request.get("needs", ()), base)
        threads = max(1, len(os.sched_getaffinity(0)) // max(1, len(self.slots)))
        defaults = default_variables(str(threads))
        inherited = {name: value for name, value in defaults.items() if name not in os.environ}
        inherited |= request.get("inherited", {})
        attempt.write_setup(request.get("setup", ()))
        self._refuse_planted(request["script"], *self.python)
        command = [*program(self.python, request["script"], self.workdir), *request["arguments"]]
        options = attempt.options(command, request.get("timeout"), bool(request.get("setup")))
        lock = attempt.take_lock()
        blocks = block_of(inherited), block_of(request["env"] | server_variables)
        reason = supervisor.supervise_detached(options, *blocks, self._enter_supervisor)
        os.close(lock)  # the supervisor has inherited it
        if reason:
            raise HostError(reason)
        self.attempts[attempt.name] = attempt
        for slot in request["slots"]:
            panes.show(self.server_directory, slot, request["title"], attempt.files.log, attempt.files.exit)
        return {"state": "running", **attempt.facts()}

    def _refuse_planted(self, script: str, python: str) -> None:
        """Raise HostError if another user has made the script or the Python where all users can create files."""
        for path in (script, *([python] if "/" in python else [])):
            with contextlib.suppress(FileNotFoundError):
                if problem := planted(os.path.join(self.workdir, os.path.expanduser(path)), self.trusted):
                    raise HostError(f"{problem}; it is not used")

    def stop(self, request: Request) -> Reply:
        """Ask the supervisor of an attempt to stop it; the event `ended` follows when no process remains."""
        if attempt := self.attempts.get(request["attempt"]):
            grace = 0.0 if request["kill"] else attempt.grace
            attempt.kill_at = min(attempt.kill_at, self._clock.now() + grace + supervisor.UNRESPONSIVE_TIMEOUT)
            supervisor.request(attempt.files, "kill" if request["kill"] else "stop")
        return {}

    def gpus(self, request: Request) -> None:
        """Reply with memory (MiB or null) and number of processes of each GPU and MIG instance, and the lost GPUs."""

        def read_gpus() -> Reply:
            found = query_gpus()
            devices: list[Reply] = []
            for gpu in found.devices:
                if gpu.fault:
                    devices.append({"index": gpu.index, "lost": gpu.fault})
                    continue
                used = None if gpu.memory_used is None else gpu.memory_used >> 20
                instances = [instance.uuid for instance in gpu.instances]
                devices.append({"index": gpu.index, "uuid": gpu.uuid, "memory": gpu.memory >> 20, "used": used,
                                "processes": len(gpu.processes), "instances": instances,
                                "desktop": gpu.display and not gpu.processes})  # fmt: skip
                for instance in gpu.instances:
                    count = len(instance.processes)
                    devices.append({"index": instance.uuid, "memory": 0, "used": None, "processes": count})
            devices += [{"index": gpu.index, "lost": gpu.reason} for gpu in found.lost]
            return {"gpus": devices, "problem": found.error}

        self._in_child(read_gpus, request)

    # ---- base models

    @property
    def _cache(self) -> str:
        return os.path.join(self.workdir, base_model.CACHE)

    def _base_path(self, digest: str) -> str:
        return os.path.join(self._cache, base_model.hash_of(digest))

    def base(self, request: Request) -> Reply | None:
        """Reply with the state of a base model: ready, busy, copy, damaged or failed.

        busy: another process has locked the base model. copy: this process has locked it; the dispatcher copies the
        base model to the directory `staging`, then sends publish_base. A base model that was trained on this server is
        published from its output directory instead. If `shared` is true, the server uses the dispatcher's cache:
        nothing is copied, and an invalid base model has the state damaged.
        """
        digest, manifest = request["digest"], request["manifest"]
        signature = base_model.signature(self._base_path(digest))
        if signature and self.bases.get(digest) == signature:
            return {"state": "ready"}
        file = None if request["shared"] else base_model.lock(self._cache, digest, exclusive=True)
        if file is not None:
            self.base_locks[digest] = file

        def verify() -> Reply:
            try:
                base_model.verify(self._base_path(digest), digest)
                return {"state": "ready"}
            except BaseModelError as error:
                if file is None:
                    return {"state": "damaged" if request["shared"] else "busy", "reason": str(error)}
            return self._prepare_copy(digest, manifest, request["output"])

        def handle_result(found: Reply) -> None:
            if found["state"] == "ready":
                self.bases[digest] = base_model.signature(self._base_path(digest))
            if file is not None and found["state"] != "copy":
                os.close(self.base_locks.pop(digest))

        self._in_child(verify, request, handle_result)
        return None

    def _prepare_copy(self, digest: str, manifest: dict[str, Any], output: str) -> Reply:
        """Publish a base model if this server has trained it; otherwise create a directory to which it is copied."""
        base_model.remove_staging(self._cache, digest)
        trained = os.path.join(self.workdir, output)
        with contextlib.suppress(BaseModelError):
            base_model.check_files(trained, manifest)
            base_model.publish(self._cache, digest, base_model.stage(self._cache, trained, manifest))
            return {"state": "ready"}
        found = os.statvfs(self._cache)
        free, size = found.f_bavail * found.f_frsize, base_model.size_of(manifest)
        if size > free:
            return {"state": "failed", "reason": f"{self._cache}: {free >> 20} MiB free, {size >> 20} MiB needed"}
        staging = base_model.new_staging(self._cache, digest)
        return {"state": "copy", "staging": os.path.relpath(staging, self.workdir)}

    def publish_base(self, request: Request) -> None:
        """Publish a base model from the directory `staging`. If `failed` is true, only remove this directory."""
        digest, staging = request["digest"], os.path.join(self.workdir, request["staging"])

        def publish() -> Reply:
            if request["failed"]:
                base_model.discard(staging)
                return {}
            return {"state": "ready", "bytes": base_model.size_of(base_model.publish(self._cache, digest, staging))}

        def unlock(_: Reply) -> None:
            if (file := self.base_locks.pop(digest, None)) is not None:
                os.close(file)

        self._in_child(publish, request, unlock)

    def claim(self, request: Request) -> Reply:
        """Claim the output directory of a job before its results are copied to it from the dispatcher."""
        output = os.path.join(self.workdir, request["output"])
        os.close(claim_output(self.workdir, output, request["job"], request["script"]))
        return {}

    def remove_output(self, request: Request) -> None:
        """Remove the output directory of an ended job."""

        output = os.path.join(self.workdir, request["output"])
        self._in_child(lambda: shutil.rmtree(output, ignore_errors=True), request)

    def remove_session(self, request: Request) -> Reply:
        """Remove the tmux session of the list."""
        return {"session": panes.remove(self.server_directory)}

    # ---- attempts

    def _attempt(self, name: str, output: str, grace: float) -> HostAttempt:
        directory = os.path.join(self.directory, name)
        return HostAttempt(directory, self.server, os.path.join(self.workdir, output), grace)

    def _enter_supervisor(self) -> None:
        self._close_inherited()
        os.chdir(self.workdir)

    def _close_inherited(self, *files: int) -> None:
        """In a child process: close the files of serve, so that its connection and locks end when serve exits."""
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        signal.set_wakeup_fd(-1)
        for file in (null, self.list_lock, *self._signals, *self._children, *self.base_locks.values(), *files):
            with contextlib.suppress(OSError):
                os.close(file)

    def _in_child(
        self, work: Callable[[], Any], request: Request | None = None, handle_result: ResultHandler = lambda _: None
    ) -> None:
        """Call `work`, which may take seconds, in a child process. _read_child() handles its result."""
        source, target = os.pipe()
        if os.fork() == 0:
            try:
                self._close_inherited(source)
                try:
                    result = work() or {}
                except BaseModelError as error:
                    result = {"state": "damaged", "reason": str(error)}
                except OSError as error:
                    result = {"state": "failed", "reason": f"{error.filename}: {error.strerror}"}
                text = json.dumps(result).encode()
                while text:
                    text = text[os.write(target, text) :]
            finally:
                os._exit(0)
        os.close(target)
        self._children[source] = request, handle_result, bytearray()

    def _read_child(self, file: int) -> None:
        request, handle_result, output = self._children[file]
        block = os.read(file, 1 << 16)
        output.extend(block)
        if not block:
            os.close(file)
            del self._children[file]
            try:
                result = checked(dict, parse_json(output))
            except ValueError:  # the output is empty or truncated
                result = {"state": "failed", "reason": CHILD_KILLED, "gpus": [], "problem": CHILD_KILLED}
            handle_result(result)
            if request:
                self.send(reply=request["id"], **result)

    def _report(self) -> None:
        """Report ended attempts and, every PROGRESS_INTERVAL, the metrics of running ones."""
        now = self._clock.now()
        progress = now >= self._progress_at
        if progress:
            self._progress_at = now + PROGRESS_INTERVAL
        for attempt in list(self.attempts.values()):
            if attempt.sweep == "running":
                continue
            if (attempt.sweep or os.path.exists(attempt.files.exit)) and not attempt.locked():
                del self.attempts[attempt.name]
                end = attempt.end()
                if end["code"]:
                    self.bases.clear()  # a damaged base model may be the cause: verify each again
                self.send(event="ended", attempt=attempt.name, **end)
            elif now >= attempt.kill_at or (progress and attempt.state() in ("killed", "absent")):
                attempt.kill_at = now + 2 * supervisor.UNRESPONSIVE_TIMEOUT
                self._sweep(attempt)
            elif progress and (metrics := read_metrics(attempt.output)) != attempt.metrics:
                attempt.metrics = metrics
                self.send(event="progress", attempt=attempt.name, metrics=metrics)

    def _sweep(self, attempt: HostAttempt) -> None:
        """Kill the remaining processes of an attempt. Then write its exit code, unless the disk is full."""

        def handle_result(error: Reply) -> None:
            attempt.sweep = "" if error else "done"  # empty: try again

        attempt.sweep = "running"
        self._in_child(lambda: supervisor.sweep(attempt.files, 0), handle_result=handle_result)


def ends_at_logout(etc: str = "/etc/systemd", linger: str = "/var/lib/systemd/linger") -> bool:
    """Whether systemd-logind kills a user's processes at logout; see logind.conf(5)."""
    paths = sorted(glob.glob(os.path.join(etc, "logind.conf.d", "*.conf")), key=os.path.basename)
    kills = False
    for path in (os.path.join(etc, "logind.conf"), *paths):  # a later file overrides earlier ones
        with contextlib.suppress(OSError), open(path) as file:
            for line in file:
                name, _, value = (word.strip() for word in line.partition("="))
                kills = value.lower() in ("yes", "true", "on", "1") if name == "KillUserProcesses" else kills
    user = pwd.getpwuid(os.getuid()).pw_name
    return kills and user != "root" and not os.path.exists(os.path.join(linger, user))  # root is exempt


def home() -> str:
    return os.path.expanduser("~")


def owner_here(request: Request) -> int:
    """The user id of the owner of the dispatcher's working directory; 0 if ids mean other people on that machine."""
    owner: int = request["owner"] if request["user"] == os.geteuid() else 0
    return owner


def find_workdir(requested: str, default: str, owner: int) -> str:
    """The absolute path of the requested working directory.

    If none is requested, uses ~/ml-customization or, if that does not exist, the default. Another user may have made
    that: it and the links to it must belong to this user, root or `owner`, as on the dispatcher's machine, and others
    must not be able to write to it. Raises HostError.
    """
    is_default = not requested
    if not requested:
        conventional = os.path.join(home(), "ml-customization")
        requested = conventional if os.path.isdir(conventional) else default
    found = os.path.join(home(), os.path.expanduser(requested))
    if not os.path.isdir(found):
        raise HostError(f"workdir {requested}: no such directory on {os.uname().nodename}; set workdir, or use --sync")
    if not os.access(found, os.W_OK | os.X_OK):
        raise HostError(f"workdir {requested}: not writable by this user; set another workdir")
    if is_default and (problem := foreign_workdir(found, (os.geteuid(), 0, owner))):
        raise HostError(f"workdir {requested}: {problem}; if you trust its files, set workdir to it")
    return os.path.realpath(found)


def foreign_workdir(path: str, owners: Collection[int]) -> str:
    """That others own a directory or a link to it, or can write to it; "" if only these owners do and can."""
    directory = os.stat(path)
    links = [facts for part in parts_of(path) if stat.S_ISLNK((facts := os.lstat(part)).st_mode)]
    for one in (directory, *links):
        if one.st_uid not in owners:
            return f"belongs to {user_name(one.st_uid)}"
    return "other users can write to it" if directory.st_mode & stat.S_IWOTH else ""


def find_python(requested: str, workdir: str) -> list[str]:
    """The command of the Python interpreter for scripts. Raises HostError."""
    venv = os.path.join(workdir, ".venv", "bin", "python")
    path = os.path.join(workdir, os.path.expanduser(requested)) if "/" in requested else requested
    path = path or (venv if os.path.exists(venv) else "python3")
    if path == venv and not requested:
        refuse_foreign_venv(workdir)
    try:
        version = subprocess.run([path, "--version"], capture_output=True, timeout=30, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise HostError(f"python {path}: {error.strerror}; set python for this server") from None
    except subprocess.TimeoutExpired:
        raise HostError(f"python {path}: no reply within 30 s; set python for this server") from None
    if version.returncode:
        raise HostError(f"python {path}: exits with code {version.returncode}; set python for this server")
    return [path]


def refuse_foreign_venv(workdir: str) -> None:
    """Raise HostError if another user than the owner of the working directory has made .venv, or can write to it.

    The same is true of its directories of programs and packages, and of the programs; links may lead out of it.
    """
    directory, owners = os.path.join(workdir, ".venv"), (os.geteuid(), 0, os.stat(workdir).st_uid)
    problem = planted(os.path.join(directory, "bin", "python"), owners)
    if not problem and (problem := foreign_workdir(directory, owners)):
        problem = f"{directory}: {problem}"
    inside = (glob.glob(glob.escape(directory) + names) for names in ("/bin/", "", "/*", "/*/*", "/*/*/*-packages"))
    for path in () if problem else chain.from_iterable(inside):
        facts = os.lstat(path)
        if facts.st_uid not in owners:
            problem = f"{path}: belongs to {user_name(facts.st_uid)}"
        elif not stat.S_ISLNK(facts.st_mode) and writable_by_others(path, facts):
            problem = f"{path}: other users can write to it"
    if problem:
        raise HostError(f"{problem}; set python for this server")


def program(python: list[str], script: str, workdir: str) -> list[str]:
    """The command that runs a script: with the interpreter for .py, otherwise directly."""
    return [*python, script] if script.endswith(".py") else [os.path.join(workdir, script)]


def owner_of(output: str) -> str:
    """The owner_name() of the job whose results are in a directory; empty if there are no results."""
    try:
        owner = read_text(os.path.join(output, OWNER)).strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise not_a_file(error) from None
    return owner if has_results(output) else ""


def not_a_file(error: OSError) -> Exception:
    """The exception for an error of regular_file() on an owner file. A job may have replaced it by a link or FIFO."""
    refused = error.errno in (errno.ELOOP, errno.EINVAL)
    return JobRefused(f"{error.filename}: {error.strerror}; remove it") if refused else error


def owner_name(job: str, script: str) -> str:
    return f"{job} of {os.path.normpath(script)}"


def default_variables(threads: str) -> dict[str, str]:
    """The variables that a job gets if they are not set otherwise."""
    return {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads}


def job_variables(output: str, workdir: str, needs: Iterable[str], base: str) -> dict[str, str]:
    """The variables of a job that depend on its server. needs: see JobServer.start(). base: path of its base model."""
    after = "\n".join(os.path.join(workdir, each) for each in needs)
    found = {"MUSTER_OUTPUT_DIR": output, "MUSTER_METRICS": os.path.join(output, "metrics.jsonl")}
    return found | ({AFTER: after} if after else {}) | ({"MUSTER_BASE_MODEL": base} if base else {})


def block_of(environment: dict[str, str]) -> bytes:
    """Variables as NAME=VALUE entries, each terminated by a NUL.

    environment_block() in transport/commands.py also ends each block with an empty entry; this function does not.
    """
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())


def holds_foreign_files(output: str) -> bool:
    """Whether an output directory contains files or links that no job wrote: a job always writes OWNER first."""
    if os.path.lexists(f"{output}/{OWNER}"):
        return False
    found = (os.path.join(top, name) for top, directories, files in os.walk(output) for name in (*files, *directories))
    holds = any(os.path.islink(path) or not os.path.isdir(path) for path in found)
    return holds or (os.path.lexists(output) and not os.path.isdir(output))


def refuse_obstacle(output: str) -> None:
    """Raise JobRefused if an output directory cannot be created because a path above it is not a directory."""
    parent = os.path.dirname(output)
    while parent and not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if parent and not os.path.isdir(parent):
        raise JobRefused(f"{parent}: not a directory; move it away, or give this job another prefix")


def refuse_foreign_files(output: str) -> None:
    """Raise JobRefused if an output directory holds files that no job wrote."""
    if holds_foreign_files(output):
        raise JobRefused(
            f"{output} contains files that no job wrote; move it away, give this job another prefix, or let the job "
            f"use these files: touch {shlex.quote(os.path.join(output, OWNER))}"
        )


def refuse_other_owner(output: str, job: str, script: str) -> None:
    """Raise JobRefused if a directory holds the results of another job."""
    owner = owner_of(output)
    if owner and owner != owner_name(job, script):
        raise JobRefused(f"{output} holds the results of job {owner}; move it away, or give this job another prefix")


def claim_output(workdir: str, output: str, job: str, script: str) -> int:
    """Lock an output directory in a working directory for an attempt, and write the name of its job to OWNER.

    Returns a file that stays locked as long as any process has it open. Raises JobRefused or Busy.
    """
    refuse_obstacle(output)
    refuse_foreign_files(output)
    try:
        make_own_directory(output, workdir)
    except PermissionError as error:
        if error.errno != errno.EPERM:
            raise
        remedy = "use another working directory, or give this job another prefix"
        raise JobRefused(f"{error.filename}: {error.strerror}; {remedy}") from None
    if problem := foreign_directory(output):
        raise JobRefused(f"{problem}, or give this job another prefix")
    try:
        file = regular_file(os.path.join(output, OWNER), os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise not_a_file(error) from None
    try:
        os.fchmod(file, PRIVATE)  # otherwise others could lock it; earlier versions created it with mode 0644
        if not try_lock(file):
            raise Busy(f"{output}: another attempt writes there; retrying when it ends")
        refuse_other_owner(output, job, script)
        os.ftruncate(file, os.write(file, f"{owner_name(job, script)}\n".encode()))  # write first: the disk may be full
    except (HostError, OSError):
        os.close(file)
        raise
    return file


def follow(log: str, exit_file: str) -> int:
    """Print a log, and lines added to it, until the exit code file exists. Returns 0."""
    position = 0
    while True:
        ended = os.path.exists(exit_file)
        position = panes.print_new(log, position)
        if ended:
            return 0
        time.sleep(POLL_INTERVAL)


def main(arguments: list[str]) -> int:
    """Run a command of this program. Returns the exit code."""
    try:
        if arguments == ["serve"]:
            return Service().run()
        if arguments[:1] == ["view"] and len(arguments) == 3:
            return panes.view(arguments[1], int(arguments[2]))
        if arguments[:1] == ["follow"] and len(arguments) == 3:
            return follow(arguments[1], arguments[2])
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
    except OSError as error:
        if error.errno == errno.EPIPE:
            return 0
        if arguments[:1] != ["follow"]:
            raise
        sys.stderr.write(f"{error.filename}: {error.strerror}\n")  # a job has replaced its log by a link or FIFO
        return 1
    sys.stderr.write(__doc__ or "")
    return 0 if arguments == ["--help"] else WRONG_CALL
