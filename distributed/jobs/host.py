"""The server's side of a job list: start jobs, watch them, answer the dispatcher.

usage: jobs_host.py serve
       jobs_host.py view DIR SLOT       see panes.py
       jobs_host.py follow LOG EXIT     print LOG, and what is added to it until EXIT exists

serve reads requests from standard input and writes replies and events to standard output, one JSON object a line, the
first of them HELLO. The end of standard input means that the dispatcher or the connection is gone: serve ends, and
the jobs go on, as each has a supervisor of its own. Of one job list only one serve works on a server: a new one
ends an older one that still waits for a connection that is lost.

Everything about an attempt is in WORKDIR/logs/jobs/LIST/ATTEMPT/: the files of its supervisor, and `lock`, which
is locked from before its supervisor is forked until that has ended. So a later serve knows for certain whether an
attempt was started. What belongs to one server, as others may share its files, is in LIST/servers/NAME/.

Standard library only: it runs on servers on which nothing is installed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import pwd
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

with contextlib.suppress(ImportError):  # a supervisor wants them: so each one that is forked here has them already
    import ctypes  # noqa: F401
    import resource  # noqa: F401

from distributed import metrics
from distributed.exit_codes import WRONG_CALL
from distributed.files import read_json, try_lock, write_file
from distributed.host.gpus import query_gpus
from distributed.jobs import panes
from distributed.launch import supervisor
from distributed.training import base_model
from distributed.training.base_model import BaseModelError

HELLO = "muster-jobs-host"
POLL = 0.2  # seconds between two looks at what an older serve has started
PROGRESS = 2.0  # seconds between two looks at the metrics of running jobs
FENCE = 3.0  # seconds that an older serve has to end by itself
START = 30.0  # seconds in which a supervisor has started its command
LAST_LINES = 20  # of the output of an attempt that failed
TAIL = 16 * 1024  # bytes read from the end of a file
OWNER = ".muster_job"  # in an output directory: whose it is; locked while an attempt writes there
OLDEST = (3, 10)  # Python

Request = dict[str, Any]


class HostError(Exception):
    """What the dispatcher is to show: problem and remedy."""

    kind = "server"  # of dispatcher.NotStarted


class JobRefused(HostError):
    """The job cannot be started on any server."""

    kind = "job"


class Busy(HostError):
    """Another attempt writes to the output directory."""

    kind = "busy"


class Attempt:
    """One attempt of a job on this server."""

    def __init__(self, directory: str, server: str, output: str, grace: float) -> None:
        self.directory, self.output, self.grace = directory, output, grace
        self.name = os.path.basename(directory)
        self.files = supervisor.Files(directory, server)
        self.kill_at = float("inf")  # when the supervisor that was told to stop is given up
        self.metrics: dict[str, Any] = {}

    @property
    def lock(self) -> str:
        return os.path.join(self.directory, "lock")

    def locked(self) -> bool:
        """Whether a supervisor runs, or is about to."""
        try:
            file = os.open(self.lock, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False

    def state(self) -> str:
        """absent: never started; running; ended; killed: its supervisor has died, and nothing has been written."""
        if supervisor.read_code(self.files.exit) is not None:
            return "ended"
        if self.locked():
            return "running"
        if supervisor.read_code(self.files.exit) is not None:  # written between both looks
            return "ended"
        return "killed" if os.path.exists(self.files.pids) else "absent"

    def facts(self) -> dict[str, Any]:
        """What a running attempt is known by: process id, start time, boot id."""
        pids = read_json(self.files.pids)
        command = pids.get("command")
        return {"boot_id": pids.get("boot_id"), **(command if isinstance(command, dict) else {})}

    def end(self) -> dict[str, Any]:
        """How it ended."""
        code = supervisor.read_code(self.files.exit)
        usage = read_json(self.files.usage)
        record = read_json(self.files.record)
        ended = usage.get("ended") or modified(self.files.exit)
        cause = record.get("cause", "")
        boot = read_json(self.files.pids).get("boot_id", supervisor.boot_id())
        return {
            "code": code,
            "asked": os.path.exists(self.files.request),  # to stop
            "started": usage.get("started") or modified(self.files.pids),
            "ended": ended,
            "peak_memory": usage.get("peak_memory"),
            "cause": "rebooted" if cause == "killed" and boot != supervisor.boot_id() else cause,
            "message": record.get("message", ""),
            "lines": last_lines(self.files.log) if code else [],
            "metrics": read_metrics(self.output),
        }


def modified(path: str) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None


def tail(path: str) -> bytes:
    """The last bytes of a file; empty when it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            return file.read()
    except OSError:
        return b""


def last_lines(path: str) -> list[str]:
    """The last lines of a log. When its disk is full, the last one says so: the job's own message may be lost."""
    lines = [line[:500] for line in tail(path).decode(errors="replace").splitlines()[-LAST_LINES:]]
    with contextlib.suppress(OSError):
        if not os.statvfs(os.path.dirname(path)).f_bavail:
            lines[-1:] = ["; ".join((*lines[-1:], "no space is left on the disk with its log"))]
    return lines


def read_metrics(output: str) -> dict[str, Any]:
    """The newest value of each number that the job wrote into its metrics.jsonl."""
    found = metrics.newest(os.path.join(output, "metrics.jsonl"))
    return {key: value for key, value in found.items() if value is not None}


# ---------------------------------------------------------------- one serve a job list


def take_fence(directory: str) -> int:
    """The only serve of this list on this server. Returns the locked file; raises HostError."""
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, "serve")
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    end = time.monotonic() + 2 * FENCE
    asked = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = supervisor.live_pid(read_json(path))
            if time.monotonic() > end:
                os.close(file)
                raise HostError(f"{path} is held by another process: is the list used from another machine?") from None
            if holder and not asked and time.monotonic() > end - FENCE:
                asked = True
                supervisor.send_signal(signal.SIGKILL, [holder])
            time.sleep(0.05)
    os.ftruncate(file, 0)
    os.write(file, json.dumps(supervisor.process_identity(os.getpid())).encode())
    return file


# ---------------------------------------------------------------- the program


class Serve:
    """Requests in, replies and events out."""

    def __init__(self) -> None:
        self.workdir = self.server = self.directory = self.own = self.session = ""
        self.python: list[str] = []
        self.slots: list[str] = []
        self.attempts: dict[str, Attempt] = {}  # that have not ended
        self.fence = -1
        self.bases: dict[str, list[list[int]]] = {}  # digest of a base model that was verified -> its signature
        self.copying: dict[str, int] = {}  # digest of a base model that is looked at or copied -> its locked file
        self._children: dict[int, Callable[[str], None]] = {}  # pipe -> what to do with what a child writes to it
        self._texts: dict[int, bytes] = {}
        self._received = b""
        self._progress_at = 0.0
        source, target = os.pipe()
        os.set_blocking(source, False)
        os.set_blocking(target, False)
        signal.set_wakeup_fd(target, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._signals = (source, target)

    def run(self) -> int:
        """Until standard input ends."""
        self.send(
            event="hello", protocol=HELLO, host=os.uname().nodename, boot_id=supervisor.boot_id(), home=home(),
            python=list(sys.version_info[:3]), user=os.getuid(),
        )  # fmt: skip
        while self._wait():
            self._look()
        return 0

    def send(self, **facts: Any) -> None:
        """One line out. Where nobody reads any more, this program has no use."""
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
        for file, _ in poll.poll(1000 * POLL if self.attempts else 5000):
            if file == 0:
                block = os.read(0, 1 << 20)
                if not block:
                    return False
                *lines, self._received = (self._received + block).split(b"\n")
                for line in lines:
                    self._answer(line)
            elif file == self._signals[0]:
                os.read(file, 4096)
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
            elif file in self._children:
                self._read_child(file)
        return True

    def _answer(self, line: bytes) -> None:
        if not line.strip():
            self.send(event="beat")
            return
        request = json.loads(line)
        verbs: dict[str, Callable[[Request], dict[str, Any] | None]] = {
            "open": self.open, "look": self.look, "start": self.start, "stop": self.stop, "gpus": self.gpus,
            "exists": self.exists, "close": self.close, "base": self.base, "publish_base": self.publish_base,
            "remove_output": self.remove_output,
        }  # fmt: skip
        try:
            reply = verbs[request["do"]](request)
        except HostError as error:
            self.send(reply=request["id"], error=str(error), kind=error.kind)
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
            self.send(reply=request["id"], error=reason)
        else:
            if reply is not None:
                self.send(reply=request["id"], **reply)

    # ---- requests

    def open(self, request: Request) -> dict[str, Any]:
        """Find the working directory, check what jobs need, and become the only serve of this list here."""
        if sys.version_info[:2] < OLDEST:
            raise HostError(f"Python {sys.version.split()[0]}: 3.10 or newer is needed; set python for this server")
        if request["remote"] and ends_at_logout():
            raise HostError(
                "systemd would end the jobs with the connection (KillUserProcesses): loginctl enable-linger"
            )
        self.server = request["server"]
        self.workdir = find_workdir(request["workdir"], request["default_workdir"])
        script = os.path.join(self.workdir, request["script"])
        if not os.path.isfile(script):
            raise HostError(
                f"script {request['script']}: not in {self.workdir}; copy it there (--sync does), or set workdir"
            )
        self.python = find_python(request["python"], self.workdir)
        self.directory = os.path.join(self.workdir, "logs", "jobs", request["list"])
        self.own = panes.own_directory(self.directory, self.server)
        self.fence = take_fence(self.own)
        self.slots = request["slots"]
        self.session, note = panes.ensure(self.own, self.slots) if request["panes"] else ("", "")
        return {
            "workdir": self.workdir, "directory": self.directory, "rsync": bool(shutil.which("rsync")),
            "session": self.session, "note": note, "cores": len(os.sched_getaffinity(0)),
            "bases": base_model.digests_in(self._cache),
        }  # fmt: skip

    def exists(self, request: Request) -> dict[str, Any]:
        """Whether a file of the working directory is there: it is when both sides share the file system."""
        return {"exists": os.path.exists(os.path.join(self.workdir, request["path"]))}

    def look(self, request: Request) -> dict[str, Any]:
        """The state of attempts that the dispatcher knows of; those that run are watched from now on."""
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
                # Made by a serve that was killed before it forked: no supervisor can come any more.
                os.rename(attempt.directory, f"{attempt.directory}.unused-{os.getpid()}-{time.time_ns()}")
        return {"attempts": found}

    def start(self, request: Request) -> dict[str, Any] | None:
        """Start an attempt, once: where its directory is there already, its state is the reply."""
        attempt = self._attempt(request["attempt"], request["output"], request["grace"])
        try:
            os.mkdir(attempt.directory, 0o777)
        except FileExistsError:
            return self.look({"attempts": {attempt.name: request["output"]}})["attempts"][attempt.name]
        try:
            claimed = claim(attempt.output, request["job"], request["script"])
        except (HostError, OSError):
            os.rmdir(attempt.directory)
            raise
        try:
            return self._start(attempt, request)
        finally:
            os.close(claimed)  # the supervisor holds it

    def _start(self, attempt: Attempt, request: Request) -> dict[str, Any]:
        words = ["--dir", attempt.directory, "--name", self.server, "--grace", f"{request['grace']:.0f}", "--detach"]
        if request.get("timeout"):
            words += ["--timeout", f"{max(1, round(request['timeout']))}"]
        env = request["env"] | {
            "MUSTER_OUTPUT_DIR": attempt.output,
            "MUSTER_METRICS": os.path.join(attempt.output, "metrics.jsonl"),
        }
        if base := request.get("base"):
            env["MUSTER_BASE_MODEL"] = self._base_path(base)
        defaults = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(self._threads())}
        defaults = {name: value for name, value in defaults.items() if name not in os.environ}
        if request.get("setup"):
            setup = os.path.join(attempt.directory, "setup.sh")
            first = [f"export {name}={value}" for name, value in defaults.items()]  # these, setup lines may change
            write_file(setup, "\n".join(["set +e", *first, *request["setup"], ""]))  # a line may fail
            words += ["--source", setup]
        else:
            env = defaults | env
        command = [*program(self.python, request["script"], self.workdir), *request["arguments"]]
        options = supervisor.SupervisorOptions([*words, "--", *command])
        block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
        self._fork_supervisor(attempt, options, block)
        self.attempts[attempt.name] = attempt
        for slot in request["slots"]:
            panes.show(self.own, slot, request["title"], attempt.files.log, attempt.files.exit)
        return {"state": "running", **attempt.facts()}

    def stop(self, request: Request) -> dict[str, Any]:
        """Ask the supervisor of an attempt to end it; the event `ended` follows when nothing of it is left."""
        attempt = self.attempts.get(request["attempt"])
        if attempt:
            grace = 0.0 if request["kill"] else attempt.grace
            attempt.kill_at = min(attempt.kill_at, time.monotonic() + grace + supervisor.UNRESPONSIVE_TIMEOUT)
            try:
                supervisor.request(attempt.files, "kill" if request["kill"] else "stop")
            except OSError:  # a full disk, most often; SIGTERM means stop, too, and kill comes by kill_at
                supervisor.send_signal(signal.SIGTERM, list(filter(None, [supervisor.supervisor_of(attempt.files)])))
        return {"known": attempt is not None}

    def gpus(self, request: Request) -> None:
        """Memory of the GPUs, in MiB; nvidia-smi may take seconds, so a child asks it."""

        def ask() -> str:
            found = query_gpus()
            devices = [
                {"index": gpu.index, "memory": gpu.memory >> 20, "used": gpu.memory_used >> 20,
                 "processes": [[process.pid, process.user, process.memory >> 20] for process in gpu.processes]}
                for gpu in found.devices
            ]  # fmt: skip
            return json.dumps({"gpus": devices, "problem": found.error})

        self._in_child(
            ask, lambda text: self.send(reply=request["id"], **json.loads(text or '{"gpus": [], "problem": ""}'))
        )

    # ---- base models

    @property
    def _cache(self) -> str:
        return os.path.join(self.workdir, base_model.CACHE)

    def _base_path(self, digest: str) -> str:
        return os.path.join(self._cache, base_model.hash_of(digest))

    def base(self, request: Request) -> None:
        """Whether a base model is here: ready, busy (another process copies or trains it), damaged, or `copy`.

        copy: it is now locked for this serve, and expected in the directory `staging`; then comes publish_base. A job
        that has trained it here has left it already. With `shared`, the cache is the dispatcher's, and nothing is
        copied. Reading it may take seconds, so a child does it.
        """
        digest, manifest = request["digest"], request["manifest"]
        signature = base_model.signature(self._base_path(digest))
        if signature and self.bases.get(digest) == signature:
            self.send(reply=request["id"], state="ready")
            return
        file = None if request["shared"] else base_model.lock(self._cache, digest, exclusive=True)
        if file is not None:
            self.copying[digest] = file

        def look() -> str:
            try:
                base_model.verify(self._base_path(digest), digest)
                return json.dumps({"state": "ready"})
            except BaseModelError as error:
                reason = str(error)
            if file is None:
                return json.dumps({"state": "damaged" if request["shared"] else "busy", "reason": reason})
            return json.dumps(self._prepare_copy(digest, manifest, request["output"]))

        def then(text: str) -> None:
            found = json.loads(text or '{"state": "failed", "reason": "the base model could not be looked at"}')
            if found["state"] == "ready":
                self.bases[digest] = base_model.signature(self._base_path(digest))
            if file is not None and found["state"] != "copy":
                os.close(self.copying.pop(digest))
            self.send(reply=request["id"], **found)

        self._in_child(look, then)

    def _prepare_copy(self, digest: str, manifest: dict[str, Any], output: str) -> dict[str, Any]:
        """Take a base model from the output directory of the job that has trained it here, else wait for a copy."""
        try:
            base_model.remove_staging(self._cache, digest)
            trained = os.path.join(self.workdir, output)
            with contextlib.suppress(BaseModelError):
                base_model.refuse_other_files(trained, manifest)
                base_model.publish(self._cache, digest, base_model.stage(self._cache, trained, manifest))
                return {"state": "ready"}
            found = os.statvfs(self._cache)
            free, size = found.f_bavail * found.f_frsize, base_model.size_of(manifest)
            if size > free:
                return {"state": "failed", "reason": f"{self._cache}: {free >> 20} MiB free, {size >> 20} MiB needed"}
            staging = base_model.new_staging(self._cache, digest)
            return {"state": "copy", "staging": os.path.relpath(staging, self.workdir)}
        except OSError as error:
            return {"state": "failed", "reason": f"{error.filename}: {error.strerror}"}

    def publish_base(self, request: Request) -> None:
        """What was copied is complete, or (`failed`) is not needed any more."""
        digest, staging = request["digest"], os.path.join(self.workdir, request["staging"])

        def publish() -> str:
            try:
                if request["failed"]:
                    shutil.rmtree(staging, ignore_errors=True)
                else:
                    size = base_model.size_of(base_model.publish(self._cache, digest, staging))
                    return json.dumps({"state": "ready", "bytes": size})
            except BaseModelError as error:
                return json.dumps({"state": "damaged", "reason": str(error)})
            except OSError as error:
                return json.dumps({"state": "failed", "reason": f"{error.filename}: {error.strerror}"})
            return json.dumps({"state": "ready"})

        def then(text: str) -> None:
            if (file := self.copying.pop(digest, None)) is not None:
                os.close(file)
            self.send(
                reply=request["id"], **json.loads(text or '{"state": "failed", "reason": "it was not published"}')
            )

        self._in_child(publish, then)

    def remove_output(self, request: Request) -> None:
        """Remove the output directory of a job that has ended."""
        output = os.path.join(self.workdir, request["output"])

        def remove() -> str:
            shutil.rmtree(output, ignore_errors=True)
            return "{}"

        self._in_child(remove, lambda text: self.send(reply=request["id"]))

    def close(self, request: Request) -> dict[str, Any]:
        """The list has ended here: its tmux session is not needed any more."""
        panes.remove(self.own)
        return {}

    # ---- attempts

    def _attempt(self, name: str, output: str, grace: float) -> Attempt:
        directory = os.path.join(self.directory, name)
        return Attempt(directory, self.server, os.path.join(self.workdir, output), grace)

    def _threads(self) -> int:
        return max(1, len(os.sched_getaffinity(0)) // max(1, len(self.slots)))

    def _fork_supervisor(self, attempt: Attempt, options: supervisor.SupervisorOptions, block: bytes) -> None:
        lock = os.open(attempt.lock, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        source, target = os.pipe()
        if os.fork() == 0:
            try:
                self._leave(source)
                os.chdir(self.workdir)
                supervisor.supervise(options, block, started=lambda: os.close(target))
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.write(target, os.fsencode(f"{error.filename or attempt.directory}: {error.strerror}"))
            finally:
                os._exit(0)
        os.close(lock)
        os.close(target)
        if failed := read_until_closed(source, START):
            raise HostError(os.fsdecode(failed))

    def _leave(self, *files: int) -> None:
        """In a child: give up what belongs to serve, so that its connection and its fence end with it."""
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        signal.set_wakeup_fd(-1)
        for file in (null, self.fence, *self._signals, *self._children, *self.copying.values(), *files):
            with contextlib.suppress(OSError):
                os.close(file)

    def _in_child(self, work: Callable[[], str], then: Callable[[str], None]) -> None:
        source, target = os.pipe()
        if os.fork() == 0:
            try:
                self._leave(source)
                text = work().encode()
                while text:
                    text = text[os.write(target, text) :]
            finally:
                os._exit(0)
        os.close(target)
        self._children[source], self._texts[source] = then, b""

    def _read_child(self, file: int) -> None:
        block = os.read(file, 1 << 16)
        self._texts[file] += block
        if not block:
            os.close(file)
            self._children.pop(file)(self._texts.pop(file).decode())

    def _look(self) -> None:
        """Report what has ended, and now and then how far the others have come."""
        now = time.monotonic()
        progress = now >= self._progress_at
        if progress:
            self._progress_at = now + PROGRESS
        for attempt in list(self.attempts.values()):
            if os.path.exists(attempt.files.exit) and not attempt.locked():
                del self.attempts[attempt.name]
                end = attempt.end()
                if end["code"]:
                    self.bases.clear()  # perhaps as its base model is damaged: each is read again
                self.send(event="ended", attempt=attempt.name, **end)
            elif now >= attempt.kill_at or (progress and attempt.state() == "killed"):
                attempt.kill_at = now + 2 * supervisor.UNRESPONSIVE_TIMEOUT
                self._in_child(partial(sweep, attempt.files), lambda _: None)
            elif progress and (metrics := read_metrics(attempt.output)) != attempt.metrics:
                attempt.metrics = metrics
                self.send(event="progress", attempt=attempt.name, metrics=metrics)


def sweep(files: supervisor.Files) -> str:
    """End what is left of an attempt; its exit code is written then."""
    return str(supervisor.sweep(files, 0))


def read_until_closed(file: int, seconds: float) -> bytes:
    """What is written to a pipe until all its writers have closed it."""
    text, end = b"", time.monotonic() + seconds
    poll = select.poll()
    poll.register(file, select.POLLIN)
    while poll.poll(1000 * max(0.0, end - time.monotonic())):
        block = os.read(file, 4096)
        if not block:
            break
        text += block
    os.close(file)
    return text


def ends_at_logout(etc: str = "/etc/systemd", linger: str = "/var/lib/systemd/linger") -> bool:
    """Whether systemd-logind ends a user's processes when the last connection is closed; see logind.conf(5)."""
    paths = sorted(glob.glob(os.path.join(etc, "logind.conf.d", "*.conf")), key=os.path.basename)
    kills = False
    for path in (os.path.join(etc, "logind.conf"), *paths):  # the last one wins
        with contextlib.suppress(OSError), open(path) as file:
            for line in file:
                name, _, value = (word.strip() for word in line.partition("="))
                kills = value.lower() in ("yes", "true", "on", "1") if name == "KillUserProcesses" else kills
    user = pwd.getpwuid(os.getuid()).pw_name
    return kills and user != "root" and not os.path.exists(os.path.join(linger, user))  # root: KillExcludeUsers


def home() -> str:
    return os.path.expanduser("~")


def find_workdir(asked: str, default: str) -> str:
    """Absolute. asked: the server's own; else ~/ml-customization, else the dispatcher's working directory."""
    if not asked:
        usual = os.path.join(home(), "ml-customization")
        asked = usual if os.path.isdir(usual) else default
    found = os.path.join(home(), os.path.expanduser(asked))
    if not os.path.isdir(found):
        raise HostError(f"workdir {asked}: no such directory on {os.uname().nodename}; set workdir, or use --sync")
    if not os.access(found, os.W_OK | os.X_OK):
        raise HostError(f"workdir {asked}: not writable by this user; set another workdir")
    return os.path.realpath(found)


def find_python(asked: str, workdir: str) -> list[str]:
    """The interpreter for scripts in Python."""
    own = os.path.join(workdir, ".venv", "bin", "python")
    path = os.path.join(workdir, os.path.expanduser(asked)) if "/" in asked else asked
    path = path or (own if os.path.exists(own) else "python3")
    try:
        asked_version = subprocess.run([path, "--version"], capture_output=True, timeout=30, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise HostError(f"python {path}: {error.strerror}; set python for this server") from None
    except subprocess.TimeoutExpired:
        raise HostError(f"python {path}: no answer within 30 s; set python for this server") from None
    if asked_version.returncode:
        raise HostError(f"python {path}: ends with exit code {asked_version.returncode}; set python for this server")
    return [path]


def program(python: list[str], script: str, workdir: str) -> list[str]:
    """A script in Python is run by the server's interpreter, another program by itself."""
    return [*python, script] if script.endswith(".py") else [os.path.join(workdir, script)]


def owner_of(output: str) -> str:
    """The job that has written into a directory, as owner_mark() names it; empty when none has."""
    try:
        with open(os.path.join(output, OWNER)) as mark:
            owner = mark.read().strip()
    except FileNotFoundError:
        return ""
    return owner if set(os.listdir(output)) - {OWNER} else ""


def owner_mark(job: str, script: str) -> str:
    return f"{job} of {os.path.normpath(script)}"


def refuse_other_owner(output: str, job: str, script: str) -> None:
    """Results of one job never come over those of another. Raises JobRefused."""
    owner = owner_of(output)
    if owner and owner != owner_mark(job, script):
        raise JobRefused(f"{output} holds the results of job {owner}; move it away, or give this job another prefix")


def claim(output: str, job: str, script: str) -> int:
    """Two jobs never write into one directory, and neither do two attempts at once, not even those of two lists.

    Returns the file that stays locked as long as a process has it open. Raises JobRefused and Busy.
    """
    os.makedirs(output, exist_ok=True)
    file = os.open(os.path.join(output, OWNER), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not try_lock(file):
            raise Busy(f"{output}: another attempt writes there; trying again when it has ended")
        refuse_other_owner(output, job, script)
        os.ftruncate(file, os.write(file, f"{owner_mark(job, script)}\n".encode()))  # in this order on a full disk
    except (HostError, OSError):
        os.close(file)
        raise
    return file


def follow(log: str, end: str) -> int:
    """Print a log and what is added to it, until the attempt has ended."""
    position = 0
    while True:
        ended = os.path.exists(end)
        try:
            with open(log, "rb") as file:
                file.seek(position)
                while block := file.read(1 << 16):
                    position += len(block)
                    sys.stdout.buffer.write(block)
            sys.stdout.buffer.flush()
        except FileNotFoundError:
            pass
        if ended:
            return 0
        time.sleep(POLL)


def main(words: list[str]) -> int:
    """The verbs."""
    try:
        if words == ["serve"]:
            return Serve().run()
        if words[:1] == ["view"] and len(words) == 3:
            return panes.view(words[1], int(words[2]))
        if words[:1] == ["follow"] and len(words) == 3:
            return follow(words[1], words[2])
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
    except OSError as error:
        if error.errno == errno.EPIPE:
            return 0
        raise
    sys.stderr.write(__doc__ or "")
    return 0 if words == ["--help"] else WRONG_CALL
