"""The server's side of a job list: start jobs, monitor them, and reply to the dispatcher.

usage: module.py jobs.host.service serve
       module.py jobs.host.service view DIR SLOT       show the output of a slot; see panes.py
       module.py jobs.host.service follow LOG EXIT     print LOG, and lines added to it, until the file EXIT exists

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
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

with contextlib.suppress(ImportError):  # imported once here for all forked supervisors
    import ctypes  # noqa: F401
    import resource  # noqa: F401

from distributed.exit_codes import WRONG_CALL
from distributed.files import try_lock
from distributed.host import signals
from distributed.host.clock import RunningClock
from distributed.host.gpus import query_gpus
from distributed.jobs.host import panes
from distributed.jobs.host.checks import (
    ends_at_logout,
    find_python,
    find_workdir,
    list_directory,
    owner_here,
    program,
    with_remedy,
)
from distributed.jobs.host.host_attempt import HostAttempt, read_metrics
from distributed.jobs.host.outputs import HostError, block_of, claim_output, default_variables, job_variables
from distributed.launch import node_files, node_requests, supervisor
from distributed.launch.node_reports import HEARTBEAT_TIMEOUT
from distributed.training import base_model
from distributed.training.base_model import BaseModelError
from distributed.trust import PRIVATE_DIRECTORY, checked, make_directories, parse_json, planted, regular_file

HELLO = "muster-jobs-host"
# Seconds without a heartbeat after which a serve process exits. A new serve process waits until the old one has exited,
# and must reply before HEARTBEAT_TIMEOUT, after which the dispatcher closes the channel.
CONNECTION_TIMEOUT = HEARTBEAT_TIMEOUT - 3.0
POLL_INTERVAL = 0.2  # seconds between checks of running attempts
PROGRESS_INTERVAL = 2.0  # seconds between reads of the metrics of running jobs
CHILD_KILLED = "a child process of jobs.host was killed; check the memory of the server"

Request = dict[str, Any]
Reply = dict[str, Any]
ResultHandler = Callable[[Reply], None]


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
        """Serve until the end of standard input. Returns the exit code. Not with asyncio, as this process forks."""
        self.send(event="hello", protocol=HELLO, host=os.uname().nodename, boot_id=node_files.boot_id())
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
            attempt.kill_at = min(attempt.kill_at, self._clock.now() + grace + node_requests.UNRESPONSIVE_TIMEOUT)
            node_requests.request(attempt.files, "kill" if request["kill"] else "stop")
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
            reason = f"{self._cache}: {os.strerror(errno.ENOSPC)}: {free >> 20} MiB free, {size >> 20} MiB needed"
            return {"state": "failed", "reason": reason}
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
                attempt.kill_at = now + 2 * node_requests.UNRESPONSIVE_TIMEOUT
                self._sweep(attempt)
            elif progress and (metrics := read_metrics(attempt.output)) != attempt.metrics:
                attempt.metrics = metrics
                self.send(event="progress", attempt=attempt.name, metrics=metrics)

    def _sweep(self, attempt: HostAttempt) -> None:
        """Kill the remaining processes of an attempt. Then write its exit code, unless the disk is full."""

        def handle_result(error: Reply) -> None:
            attempt.sweep = "" if error else "done"  # empty: try again

        attempt.sweep = "running"
        self._in_child(lambda: node_requests.sweep(attempt.files, 0), handle_result=handle_result)


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
