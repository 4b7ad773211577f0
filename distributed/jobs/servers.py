"""Servers of a job list: a channel to the program `host.py` on each server (over ssh) or on this machine.

The channel and rsync share one OpenSSH connection per server. The dispatcher copies host.py and the modules that it
imports to ~/.cache/muster/ of each server, so a server needs only ssh, bash, tar, Python 3.10 and, unless it shares
files with this machine, rsync.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distributed.files import KIT, write_file
from distributed.host import sync_list
from distributed.host.clock import RunningClock
from distributed.host.gpus import query_gpus
from distributed.host.replies import ssh_failure
from distributed.host.ssh_call import LOGIN_SHELL, login_failure
from distributed.jobs import config, host
from distributed.jobs.backend import Event, JobServer, NotStarted, ServerUnusable, Unreachable
from distributed.jobs.base_cache import Cache
from distributed.jobs.bases import script_name
from distributed.jobs.job import Job, arguments, environment
from distributed.jobs.panes import ENTRY, HOST, PLAIN_PYTHON, SESSIONS, host_command
from distributed.jobs.placement import GpuId, Slot, SlotPool
from distributed.jobs.state import Attempt
from distributed.launch.node_reports import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT
from distributed.terminal import plural
from distributed.training.base_model import TRAINING, BaseModelError, hash_of
from distributed.transport.commands import VANISHED, TransportError, call_ssh, rsync_shell, temporary_directory
from distributed.transport.owners import EXIT_IF_FOREIGN, FOREIGN, MAKE_BELOW, MAKE_TARGET, owners_above, owners_here
from distributed.trust import (
    MAX_TEXT,
    PRIVATE_DIRECTORY,
    checked,
    make_own_directory,
    parse_json,
    place,
    read_bytes,
    shown,
)

CONNECT_TIMEOUT = 60.0  # seconds
REPLY_TIMEOUT = 60.0  # seconds; host.py exits if a request that is not one of SLOW blocks it for CONNECTION_TIMEOUT
SLOW = ("base", "publish_base", "remove_output")  # they read, copy or remove any number of bytes
LOGIN_TIMEOUT = 50.0  # seconds within which the login shell must start a command
MAX_COPIES = 3  # how often a base model is copied if the copies are damaged
COPY_POLL_INTERVAL = 0.2  # seconds between checks whether another process has unlocked a base model
MAX_RSYNCS = 2  # concurrent rsyncs with a server, in each direction
MAX_ATTEMPTS_PER_RSYNC = 100
NOT_INSTALLED = "muster-upload"  # printed by a server without the files of KIT_FILES
NO_PYTHON = "muster-no-python"  # printed by a server without Python 3.10 or newer
# Exit codes: ~/ml-customization exists; rsync is missing; a command has failed on the server, see reporting_error().
DEFAULT_WORKDIR_EXISTS, NO_RSYNC, FAILED = 3, 4, 5
LOST_CONNECTION = (12, 30, 35, 255)  # exit codes of rsync
# For bash, after FOREIGN, with the directory of Muster's copy in $d: fails if another user could replace it.
CHECK_CACHE = f'([ -z "${{XDG_CACHE_HOME-}}" ] || {{ owners="$(id -u) 0"; cd -- "$d" || exit; {EXIT_IF_FOREIGN}; }})'
# Options of rsync. Results are received in a new directory without links to directories, see SshServer._receive().
SENDING = ("--archive", "--sparse")
RECEIVING = ("--links", "--perms", "--times", "--sparse", "--chmod=Du+rwx,Fu+rw,go-w", f"--exclude={host.OWNER}")
FILES_FROM = ("--recursive", "--from0", "--files-from=-")  # the standard input of rsync has the paths, ended by NUL
MAX_GREETING = 1 << 20  # bytes that a login shell may print before jobs.host starts
# Messages of jobs.host; see trust.checked(). A server may send anything else: then the connection is treated as lost.
STATE: dict[str, Any] = {"state": str, **host.PROCESS}
GPU = {"index": int | str, "uuid?": str, "memory": int, "used": int | None, "processes": int, "instances?": list[str],
       "desktop?": bool}  # fmt: skip
LOST_GPU = {"index": int | str, "lost": str}
BASE = {"state": str, "reason?": str, "staging?": str, "bytes?": int}
GREETING = {"event": str, "protocol": str, "host": str, "boot_id": str}
EVENTS: dict[str, dict[str, Any]] = {
    "heartbeat": {}, "ended": {"attempt": str, **host.END}, "progress": {"attempt": str, "metrics": dict},
}  # fmt: skip
HOST_ERRORS = re.compile("server|job|busy")  # kinds of NotStarted that a host may report
REPLIES: dict[str, dict[str, Any]] = {
    "open": {"workdir": re.compile("/.*", re.DOTALL), "rsync": bool, "session": str, "note": str, "bases": list[str]},
    "query": {"attempts": dict[str, object]},
    "start": {"state": str} | {f"{name.rstrip('?')}?": kind for name, kind in {**host.PROCESS, **host.END}.items()},
    "gpus": {"gpus": list[object], "problem": str, "state?": str, "reason?": str}, "exists": {"exists": bool},
    "base": BASE, "publish_base": {f"{name.rstrip('?')}?": kind for name, kind in BASE.items()},
    "remove_session": {"session": str}, "remove_output": {"state?": str, "reason?": str},
}  # fmt: skip
# The files that jobs/host.py and its supervisors need on a server. The list leaves out distributed/runs/, because
# usage_sampler.py imports it only to take samples, and supervisors of jobs take none.
KIT_FILES = (
    "distributed/__init__.py", "distributed/exit_codes.py", "distributed/files.py", "distributed/metrics.py",
    "distributed/trust.py",
    "distributed/host/__init__.py", "distributed/host/clock.py", "distributed/host/collectives.py",
    "distributed/host/gpus.py", "distributed/host/process_scan.py", "distributed/host/signals.py",
    "distributed/host/system.py",
    "distributed/jobs/__init__.py", "distributed/jobs/host.py", "distributed/jobs/panes.py",
    "distributed/launch/__init__.py", "distributed/launch/output_lines.py", "distributed/launch/node_reports.py",
    "distributed/launch/output_metrics.py", "distributed/launch/shown_ranks.py",
    "distributed/launch/supervisor.py", "distributed/launch/usage_sampler.py",
    "distributed/training/__init__.py", "distributed/training/base_model.py",
    "scripts/lib/module.py", "scripts/lib/in_node_env.sh", "scripts/lib/environment.bash",
    "scripts/lib/common.bash", "scripts/lib/node_env.bash",
)  # fmt: skip


@dataclass(frozen=True)
class ListContext:
    """The settings that all servers of a list share."""

    list_id: str
    cwd: Path
    script: str
    grace: float = 30.0  # seconds between SIGTERM and SIGKILL
    panes: bool = True
    sync: bool = False
    forwarded: Mapping[str, str] = field(default_factory=dict)  # the dispatcher's variables that jobs over ssh inherit
    machines: dict[tuple[str, str], str] = field(default_factory=dict)  # (host name, boot id) -> server
    cache: Cache = field(default_factory=lambda: Cache(Path()))

    @property
    def script_name(self) -> str:
        """The path of the script as Muster writes it to the file .muster_job in an output directory."""
        return script_name(self.script)


def slots_of(server: config.Server) -> tuple[Slot, ...]:
    """The slots of a server: slots_per_gpu for each GPU or, without GPUs, slots_per_gpu CPU slots."""
    gpus = [gpu for gpu in server.devices for _ in range(server.slots_per_gpu)]
    return tuple(Slot(index, gpu) for index, gpu in enumerate(gpus or [None] * server.slots_per_gpu))


class Channel:
    """Send requests to host.py; receive replies and events."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, post: Callable[[Event], None]) -> None:
        self._process, self._name, self._post = process, name, post
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next = 0
        self._clock = RunningClock()
        self._last_received = self._clock.now()
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []

    async def hello(self) -> dict[str, Any]:
        """Return the first message of host.py. Skips the output of a login shell.

        Raises EOFError with the output if host.py did not start, and ServerUnusable if the output is too long.
        """
        assert self._process.stdout
        printed = ""
        while len(printed) < MAX_GREETING:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # longer than the limit of the stream
                break
            if not line:
                raise EOFError(printed.strip())
            text = line.decode(errors="replace").strip()
            with contextlib.suppress(ValueError):
                message = parse_json(text)
                if isinstance(message, dict) and message.get("protocol") == host.HELLO:
                    self._tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._send_heartbeats())]
                    return self._checked(GREETING, message)
            printed += text + "\n"
        raise ServerUnusable(f"prints more than {MAX_GREETING >> 20} MiB before Muster starts; correct its login shell")

    async def call(self, verb: str, **facts: Any) -> dict[str, Any]:
        """Send a request and return the reply. Raises Unreachable and HostReplyError."""
        if self.closed.done():
            raise Unreachable(self.closed.result())
        self._next += 1
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[self._next] = future
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"id": self._next, "do": verb, **facts}).encode() + b"\n")
        try:
            reply = await asyncio.wait_for(future, None if verb in SLOW else REPLY_TIMEOUT)
        except asyncio.TimeoutError:
            self._end(f"no reply to {verb} within {REPLY_TIMEOUT:.0f} s")
            raise Unreachable(self.closed.result()) from None
        if "error" in reply:
            reply = self._checked({"error": str, "kind?": HOST_ERRORS}, reply)
            raise HostReplyError(reply["error"], reply.get("kind", "server"))
        reply = self._checked(REPLIES.get(verb, {}), reply)
        if verb == "query":
            return {"attempts": {name: self._state(each) for name, each in self._requested(reply, facts).items()}}
        for gpu in reply["gpus"] if verb == "gpus" else ():
            self._checked(LOST_GPU if isinstance(gpu, dict) and "lost" in gpu else GPU, gpu)
        return reply

    def _requested(self, reply: dict[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
        """The states of attempts in a reply to a query, which are those in the request."""
        return self._checked(dict.fromkeys(facts["attempts"], object), reply["attempts"])

    def _state(self, value: Any) -> dict[str, Any]:
        ended = isinstance(value, dict) and value.get("state") == "ended"
        return self._checked({**STATE, **host.END} if ended else STATE, value)

    def _checked(self, kind: dict[str, Any], value: Any) -> dict[str, Any]:
        """A message of the declared kind; see trust.checked(). Otherwise, close the connection; raises Unreachable."""
        try:
            found = host.checked_facts(kind, value)
        except ValueError as error:
            self._end(f"invalid reply ({error})")
            raise Unreachable(self.closed.result()) from None
        return found

    async def _read(self) -> None:
        assert self._process.stdout
        received = bytearray()  # an incomplete line
        try:
            while block := await self._process.stdout.read(1 << 18):
                self._last_received = self._clock.now()
                *lines, rest = block.split(b"\n")
                for line in lines:
                    self._handle(parse_json(received + line))
                    received.clear()
                received += rest
                if len(received) > MAX_TEXT:
                    raise ValueError(f"more than {MAX_TEXT >> 20} MiB without a line break")
        except OSError as error:
            self._end(f"connection failed: {error}")
        except ValueError as error:
            self._end(f"invalid reply ({error})")
        self._end("connection closed")

    def _handle(self, message: Any) -> None:
        """Handle a reply or an event. Raises ValueError if it is invalid."""
        facts: dict[str, Any] = checked(dict, message, "message")
        if "reply" in facts:
            future = self._waiting.pop(checked(int, facts.pop("reply"), "reply"), None)
            if future and not future.done():
                future.set_result(facts)
            return
        kind = checked(str, facts.pop("event", None), "event")
        if kind not in EVENTS:
            raise ValueError(f"unknown event {shown(kind)}")
        facts = host.checked_facts(EVENTS[kind], facts)
        if kind != "heartbeat":
            self._post(Event(kind, self._name, facts))

    async def _send_heartbeats(self) -> None:
        assert self._process.stdin
        while not self.closed.done():
            with contextlib.suppress(OSError):
                self._process.stdin.write(b"\n")
            await asyncio.sleep(HEARTBEAT_INTERVAL)
            if (elapsed := self._clock.now() - self._last_received) > HEARTBEAT_TIMEOUT:
                self._end(f"no heartbeat for {elapsed:.0f} s")

    def _end(self, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(reason)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Unreachable(reason))
                future.exception()
        self._waiting.clear()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """Stop host.py; running jobs continue."""
        self._end("closed")
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(ProcessLookupError):
            await self._process.wait()


class HostReplyError(NotStarted):
    """host.py replied with an error."""


class HostServer(JobServer):
    """A server that runs host.py: the base class of SshServer and LocalServer. JobServer describes the methods."""

    python = ""  # used if the setting `python` is missing; empty: the server chooses

    def __init__(self, name: str, server: config.Server, context: ListContext) -> None:
        self.name, self.settings, self.context = name, server, context
        self.pool = SlotPool(name, slots_of(server), frozenset(server.labels))
        self.watches_gpus = any(slot.gpu is not None for slot in self.pool.slots)
        self.shared = True  # whether it shares the working directory with this machine
        self.note = ""  # why GPUs of this machine are not used
        self.session = ""  # name of the tmux session; empty without one
        self.workdir = ""  # the working directory of its jobs, on the server
        self._channel: Channel | None = None
        self._gpus: list[dict[str, Any]] = []  # the newest reply to query_gpus()

    # ---- connecting

    async def connect(self, post: Callable[[Event], None]) -> str:
        await self.close()
        await self._prepare()
        try:
            return await asyncio.wait_for(self._connect(post), CONNECT_TIMEOUT)
        except BaseException as error:
            await self.close()
            if isinstance(error, asyncio.TimeoutError):
                raise Unreachable(f"not connected within {CONNECT_TIMEOUT:.0f} s") from None
            if isinstance(error, HostReplyError):
                raise ServerUnusable(str(error)) from None
            raise

    async def _connect(self, post: Callable[[Event], None]) -> str:
        self._channel = await self._open_channel(post)
        remote, cwd = isinstance(self, SshServer), str(self.context.cwd)
        opened = await self._channel.call(
            "open", server=self.name, list=self.context.list_id, default_workdir=cwd, script=self.context.script,
            workdir=self.settings.workdir or ("" if remote else cwd), remote=remote, panes=self.context.panes,
            python=self.settings.python or self.python, slots=[f"{self.name}:{slot.index}" for slot in self.pool.slots],
            owner=os.stat(cwd).st_uid, user=os.geteuid(), owners=sorted(self._owners_here),
        )  # fmt: skip
        self.workdir = opened["workdir"]
        self.session = opened["session"] if opened["session"] in SESSIONS else ""  # part of a command that is printed
        self.pool.bases = set(opened["bases"])
        note = self._check_gpus(await self._channel.call("gpus")) if self.watches_gpus else ""
        await self._after_open(opened)
        return "; ".join(filter(None, [self._attach_command(), opened["note"], note, self.note]))

    @functools.cached_property  # another user may have made them since, when it reconnects
    def _owners_here(self) -> set[int]:
        """Who owns the script and the Python on this machine, and may therefore own them on the server."""
        python = os.path.expanduser(self.settings.python or self.python)
        paths = [self.context.script, *([python] if python.startswith("/") else [])]
        return owners_here(os.path.join(self.context.cwd, path) for path in paths)

    async def _prepare(self) -> None:
        """Preparations that may take longer than CONNECT_TIMEOUT."""

    async def _open_channel(self, post: Callable[[Event], None]) -> Channel:
        raise NotImplementedError

    async def _after_open(self, opened: Mapping[str, Any]) -> None:
        """Checks after connecting."""

    def _attach_command(self) -> str:
        return f"watch: tmux attach -t {self.session}" if self.session else ""

    def _check_gpus(self, reply: Mapping[str, Any]) -> str:
        """Return a note for the log. Raises ServerUnusable if a configured GPU does not exist, or if all are lost."""
        self._gpus, devices = reply["gpus"], self.settings.devices
        present = [gpu["index"] for gpu in self._gpus if isinstance(gpu["index"], int)]
        instances = [gpu["index"] for gpu in self._gpus if isinstance(gpu["index"], str)]
        lost = {gpu["index"]: gpu["lost"] for gpu in self._gpus if "lost" in gpu}
        missing = [gpu for gpu in devices if gpu not in present + instances]
        if reply["problem"]:
            raise ServerUnusable(reply["problem"])
        if any(isinstance(gpu, str) for gpu in missing):
            uuids = ", ".join(gpu for gpu in missing if isinstance(gpu, str))
            raise ServerUnusable(
                f"MIG instance {uuids}: not found: {self.name} has {', '.join(instances) or 'none'}; correct gpu_ids"
            )
        if missing:
            raise ServerUnusable(
                f"GPU {', '.join(map(str, missing))}: not found: {self.name} has {plural(len(present), 'GPU')} "
                f"({', '.join(map(str, present)) or 'none'}); correct gpus or gpu_ids; gpus 0 gives CPU slots"
            )
        if lost.keys() >= set(devices):
            raise ServerUnusable("; ".join(f"GPU {gpu}: {lost[gpu]}" for gpu in devices))
        divided = [gpu for gpu in self._gpus if gpu["index"] in devices and gpu.get("instances")]
        return "; ".join(
            f"GPU {gpu['index']}: MIG is on, so a job uses only its first instance; to use all, name them in gpu_ids: "
            f"{', '.join(gpu['instances'])}" for gpu in divided
        )  # fmt: skip

    def _refuse_same_machine(self, hello: Mapping[str, Any]) -> None:
        """Raise ServerUnusable if another server of the list is the same machine: its slots would be used twice."""
        other = self.context.machines.setdefault((hello["host"], hello["boot_id"]), self.name)
        if other != self.name:
            raise ServerUnusable(f"is the same machine as {other}; list it once")

    async def wait_until_lost(self) -> str:
        assert self._channel
        return await asyncio.shield(self._channel.closed)

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel:
            await channel.close()

    async def remove_session(self) -> str:
        """Connect, remove the tmux session of the list, and disconnect. Returns the session's name; empty without one.

        Script, Python and GPUs are not checked: the server may no longer be able to run jobs.
        """
        self.context, self.watches_gpus = replace(self.context, script=""), False
        try:
            await self.connect(lambda _: None)
            return str((await self._call("remove_session"))["session"])
        finally:
            await self.close()

    async def _call(self, verb: str, **facts: Any) -> dict[str, Any]:
        if not self._channel:
            raise Unreachable("not connected")
        try:
            return await self._channel.call(verb, **facts)
        except HostReplyError as error:
            if verb in ("query", "stop", "gpus", "remove_session"):  # requests that start nothing
                raise Unreachable(str(error)) from None
            raise

    # ---- jobs

    async def query(self, attempts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        reply = await self._call("query", attempts=dict(attempts), grace=self.context.grace)
        states: dict[str, dict[str, Any]] = reply["attempts"]
        return states

    async def start(self, attempt: Attempt, job: Job, needs: Sequence[str]) -> dict[str, Any]:
        device = f"GPU {','.join(map(str, attempt.gpus))}" if attempt.gpus else f"slot {attempt.slots[0]}"
        retry = f", attempt {attempt.number}" if attempt.number > 1 else ""
        env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # the order of nvidia-smi, also for GPUs of different types
        env |= {**environment(job), "CUDA_VISIBLE_DEVICES": self._cuda_devices(attempt.gpus)}
        return await self._call(
            "start", attempt=attempt.name, job=job.owner, output=job.output, slots=attempt.slots,
            title=f"{job.name} ({device}{retry})", script=self.context.script, setup=self.settings.setup,
            script_name=self.context.script_name, arguments=arguments(job, "cuda:0" if attempt.gpus else "cpu"),
            env=env, timeout=job.options.timeout, grace=self.context.grace, needs=list(needs), base=job.base,
            inherited=dict(self.context.forwarded) if isinstance(self, SshServer) else {},
        )  # fmt: skip

    def _cuda_devices(self, gpus: Sequence[GpuId]) -> str:
        """CUDA_VISIBLE_DEVICES for GPUs: UUIDs if a GPU is lost, as CUDA may then number the others differently."""
        lost = any("lost" in gpu for gpu in self._gpus)
        uuids = {gpu["index"]: gpu["uuid"] for gpu in self._gpus if lost and "uuid" in gpu}
        return ",".join(str(uuids.get(gpu, gpu)) for gpu in gpus)

    async def stop(self, attempt: str, kill: bool) -> None:
        await self._call("stop", attempt=attempt, kill=kill)

    async def query_gpus(self) -> list[dict[str, Any]]:
        reply = await self._call("gpus")
        if not reply["problem"]:
            self._gpus = reply["gpus"]
        return self._gpus

    async def ensure_base(self, digest: str) -> int:
        copied = 0
        for _ in range(MAX_COPIES):
            reply = await self._request_base(digest)
            if reply["state"] == "copy":
                reply = {"state": "failed"} | await self._copy_base(digest, reply.get("staging", ""))
                copied += reply.get("bytes", 0)
            if reply["state"] == "ready":
                return copied
            if reply["state"] == "failed" or self.shared:
                break
        raise NotStarted(f"base {hash_of(digest)}: {reply.get('reason', reply['state'])}")

    async def _request_base(self, digest: str) -> dict[str, Any]:
        """Request a base model until the reply of host.Service.base() is not `busy`; return the reply."""
        manifest = await cached_manifest(self.context.cache, digest)
        output = f"{TRAINING}/{hash_of(digest)}"
        while True:
            reply = await self._call("base", digest=digest, manifest=manifest, output=output, shared=self.shared)
            if reply["state"] != "busy":
                return reply
            await asyncio.sleep(COPY_POLL_INTERVAL)

    async def _copy_base(self, digest: str, staging: str) -> dict[str, Any]:
        raise NotImplementedError

    async def remove_output(self, output: str) -> None:
        if not self.shared:
            await self._call("remove_output", output=output)


class LocalServer(HostServer):
    """This machine."""

    python = sys.executable

    async def _open_channel(self, post: Callable[[Event], None]) -> Channel:
        process = await asyncio.create_subprocess_exec(
            *host_command("serve"), cwd=self.context.cwd, stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, limit=1 << 24, start_new_session=True,
        )  # fmt: skip
        channel = Channel(process, self.name, post)
        await channel.hello()
        return channel


def local_server(context: ListContext, slots: int | None) -> LocalServer:
    """This machine: `slots` slots per GPU (default 1) or, without GPUs, `slots` CPU slots (default half the cores)."""
    devices: list[GpuId] = []
    gpus = query_gpus()
    faults = {gpu.index: gpu.reason for gpu in gpus.lost}
    faults |= {gpu.index: gpu.fault for gpu in gpus.devices if gpu.fault}
    for gpu in gpus.devices:
        if not gpu.fault:
            devices += [instance.uuid for instance in gpu.instances] or [gpu.index]
    cpus = slots or max(1, len(os.sched_getaffinity(0)) // 2)
    resources: dict[str, Any] = (
        {"gpu_ids": devices, "slots_per_gpu": slots or 1} if devices else {"gpus": 0, "slots_per_gpu": cpus}
    )
    server = LocalServer("local", config.Server(host="localhost", **resources), context)
    notes = [gpus.error, *(f"GPU {index}: not used: {fault}" for index, fault in sorted(faults.items()))]
    notes.append("jobs run without GPUs" if any(notes) and not devices else "")
    server.note = "; ".join(filter(None, notes))
    return server


# ---------------------------------------------------------------- over ssh


class SshServer(HostServer):
    """A server over ssh."""

    def __init__(self, name: str, server: config.Server, context: ListContext) -> None:
        super().__init__(name, server, context)
        self.shared = False
        self._fetching, self._sending = asyncio.Semaphore(MAX_RSYNCS), asyncio.Semaphore(MAX_RSYNCS)
        # (directories, names of files left out) of each attempt whose results are to be fetched
        self._to_fetch: list[tuple[list[str], asyncio.Future[list[str]]]] = []
        self._fetched_partly: set[str] = set()  # output directories of attempts whose results will be fetched again
        self._synced = not context.sync
        self._archive_name, self._archive = kit_archive()
        self._config = Path()  # of ssh

    def _ssh(self, line: str) -> list[str]:
        """The command that runs a line of bash on the server. Standard input is held back until the line starts."""
        return call_ssh(self._ssh_to_server(), self.settings.host, line, LOGIN_TIMEOUT)

    def _ssh_to_server(self) -> list[str]:
        return ["ssh", "-F", str(self._config), "--", self.settings.host]

    def _write_config(self) -> None:
        self._config = sockets_directory(self.context.cwd, self.context.list_id) / f"{self.name}.conf"
        write_ssh_config(self._config, self.settings)

    async def _prepare(self) -> None:
        self._write_config()
        if not self._synced:
            await self._sync()

    async def _open_channel(self, post: Callable[[Event], None]) -> Channel:
        for _ in range(2):
            process = await asyncio.create_subprocess_exec(
                *self._ssh(f"cd; {self._host_program('serve')}"), stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=1 << 24, start_new_session=True,
            )  # fmt: skip
            channel = Channel(process, self.name, post)
            errors = asyncio.ensure_future(read_tail(process.stderr))
            try:
                self._refuse_same_machine(await channel.hello())
                return channel
            except EOFError as error:
                printed = str(error)
                code = await process.wait()
                stderr = await errors
            except BaseException:  # such as a cancellation after CONNECT_TIMEOUT
                await channel.close()
                raise
            if NOT_INSTALLED in printed:
                await self._upload()
                continue
            if NO_PYTHON in printed:
                setting = f"python {self.settings.python}: " if self.settings.python else ""
                raise ServerUnusable(f"{setting}no Python 3.10 or newer; install it, or set python for this server")
            raise ssh_error(stderr or printed, code, self.settings.host)
        raise ServerUnusable("cannot copy Muster to it: the copy was removed at once; correct this on the server")

    def _host_program(self, arguments: str) -> str:
        """A line of bash that runs host.py, or prints NOT_INSTALLED or NO_PYTHON. Must run in the home directory."""
        python, workdir = self.settings.python or "", self.settings.workdir
        bases = [workdir] if workdir else ["~/ml-customization", str(self.context.cwd)]
        below = [] if python.startswith(("~", "/")) else [f"{base}/{python or '.venv/bin/python'}" for base in bases]
        candidates = [python, *below] if python else [*below, "python3"]
        unnamed = [] if python and workdir else below
        # Another user may have made a directory or link of this name, or could replace it.
        check = f'(cd -- "${{p%/*}}" || exit; {EXIT_IF_FOREIGN}) 2>/dev/null && [ ! "$(foreign planted "$p")" ]'
        names, pythons = "|".join(map(quoted_path, unnamed)), " ".join(map(quoted_path, candidates))
        own = f"case $p in {names}) {check} || continue ;; esac; " if unnamed else ""
        # A setting may name what another user has made where all users can create files. Who owns a workdir is trusted.
        owner = f" $(stat -L -c %u -- {quoted_path(workdir)} 2>/dev/null)" if workdir else ""
        refuse = '[ ! -e "$p" ] || { r=$(foreign planted "$p"); [ ! "$r" ]; } || { echo "$r" >&2; exit 69; }'
        own += f"case $p in */*) {refuse} ;; esac; "
        plain = " ".join(PLAIN_PYTHON)
        newer = shlex.quote("import sys; sys.exit(sys.version_info < (3, 10))")
        return (
            f"{FOREIGN}; open= owners={shlex.quote(owners_above(str(self.context.cwd), self._owners_here))}"
            f'"{owner}"; d="${{XDG_CACHE_HOME:-$HOME/.cache}}/muster/jobs-{self._archive_name}"; '
            f'[ -e "$d/complete" ] || {{ echo {NOT_INSTALLED}; exit 0; }}; '
            f'[ -O "$d" ] || {{ echo "$d belongs to another user" >&2; exit 69; }}; {CHECK_CACHE} || exit; '
            f"for p in {pythons}; do {own}"
            f'if "$p" {plain} -c {newer} 2>/dev/null; then '
            f'exec "$p" {plain} "$d/{ENTRY}" {HOST} {arguments}; fi; done; '
            f"echo {NO_PYTHON}"
        )

    def _upload_line(self) -> str:
        """A line of bash that copies Muster from its standard input to the server."""
        return reporting_error(
            f'{FOREIGN}; d="${{XDG_CACHE_HOME:-$HOME/.cache}}/muster"; n="$d/jobs-{self._archive_name}"; '
            'umask 077; { [ "${XDG_CACHE_HOME-}" ] || cd; } && mkdir -p -- "$d" && chmod go-w -- "$d" && '
            f"{CHECK_CACHE} && "
            't=$(mktemp -d "$d/new-XXXXXX") && { '
            'tar -xf - -C "$t" && touch "$t/complete" && '
            '{ mv -T "$t" "$n" 2>/dev/null || [ -e "$n/complete" ] || { rm -rf "$n" && mv -T "$t" "$n"; }; }; '
            's=$?; rm -rf "$t"; [ "$s" = 0 ]; }'
        )

    async def _upload(self) -> None:
        code, stderr = await self._run(self._ssh(self._upload_line()), self._archive)
        if code == FAILED:
            raise ServerUnusable(f"cannot copy Muster to it: {reported_error(stderr, 'XDG_CACHE_HOME there')}")
        if code:
            raise ssh_error(stderr, code, self.settings.host)

    async def _sync(self) -> None:
        """Copy the files of the working directory to the server; nothing is deleted."""
        try:
            names = await asyncio.to_thread(sync_list.names_of, str(self.context.cwd))
            below = await asyncio.to_thread(sync_list.directory_list, str(self.context.cwd), names)
        except (sync_list.SyncError, OSError) as error:
            raise ServerUnusable(f"--sync: {error}") from None
        target = self.settings.workdir or str(self.context.cwd)
        # Without a setting, an existing ~/ml-customization is used, as by find_workdir() in host.py.
        enter = f"make_target {quoted_path(target)}; {EXIT_IF_FOREIGN}"
        usual = "[ -d ~/ml-customization ]"
        if not self.settings.workdir:
            enter = f"if {usual}; then cd ~/ml-customization || exit; else {enter}; fi"
        line = f"command -v rsync >/dev/null || exit {NO_RSYNC}; " + reporting_error(
            f"{FOREIGN}; {MAKE_TARGET}; {MAKE_BELOW}; owners={shlex.quote(owners_above(str(self.context.cwd)))}; "
            f"umask 022; {enter}; make_below"
        )
        if not self.settings.workdir:
            line += f"; ! {usual} || exit {DEFAULT_WORKDIR_EXISTS}"
        self._refuse_without_rsync(on_server=True)
        code, stderr = await self._run(self._ssh(line), below, seconds=CONNECT_TIMEOUT)
        self._refuse_without_rsync(on_server=code != NO_RSYNC)
        if code == DEFAULT_WORKDIR_EXISTS:
            target = "ml-customization"
        elif code == FAILED:
            raise ServerUnusable(f"cannot create workdir {target}: {reported_error(stderr, 'another workdir')}")
        elif code:
            raise ssh_error(stderr, code, self.settings.host)
        target = target.removeprefix("~/")
        options = [*FILES_FROM, *write_through_links(), "--ignore-missing-args", "--exclude=.git"]
        arguments = [*options, "--", f"{self.context.cwd}/", f"server:{rsync_literal(target)}/"]
        try:
            await self._rsync(arguments, sync_list.file_list(names))
        except OSError as error:
            reason = host.with_remedy(str(error), "another workdir")
            raise ServerUnusable(f"cannot copy the working directory to it: {reason}") from None
        self._synced = True

    async def _after_open(self, opened: Mapping[str, Any]) -> None:
        self.shared = await self._shares_files()
        if not self.shared:
            self._refuse_without_rsync(on_server=opened["rsync"])

    def _refuse_without_rsync(self, on_server: bool) -> None:
        if not on_server:
            raise ServerUnusable("rsync is not installed there; install it (apt-get install rsync)")
        if not shutil.which("rsync"):
            raise ServerUnusable("rsync is not installed on this machine; install it (apt-get install rsync)")

    async def _shares_files(self) -> bool:
        """Whether a file created in the working directory here also exists in the server's working directory."""
        try:
            file, path = tempfile.mkstemp(prefix=".muster-", dir=self.context.cwd)
        except OSError:
            return False
        try:
            os.close(file)
            return bool((await self._call("exists", path=os.path.basename(path)))["exists"])
        finally:
            os.unlink(path)

    def _attach_command(self) -> str:
        if not self.session:
            return ""
        user = f"{self.settings.user}@" if self.settings.user else ""
        port = f" -p {self.settings.port}" if self.settings.port else ""
        key = f" -i {shlex.quote(self.settings.ssh_key)}" if self.settings.ssh_key else ""
        return f"watch: ssh -t{port}{key} {user}{self.settings.host} tmux attach -t {self.session}"

    def follow_command(self, attempt: Attempt, once: bool) -> list[str]:
        """The command that prints the log of an attempt until the attempt ends. once: only the current content."""
        self._write_config()
        default = f'w=~/ml-customization; [ -d "$w" ] || w={shlex.quote(str(self.context.cwd))}'
        workdir = f"w={quoted_path(self.settings.workdir)}" if self.settings.workdir else default
        log = f'"$w"/{shlex.quote(f"logs/jobs/{self.context.list_id}/{attempt.name}/node_{self.name}")}'
        end = "/" if once else f"{log}.exit"  # `follow` returns once this path exists
        line = f"cd; {workdir}; {self._host_program(f'follow {log}.log {end}')}"
        return self._ssh(line)

    # ---- results

    async def fetch_results(self, attempt: Attempt, job: Job) -> Sequence[str]:
        if self.shared:
            return ()
        try:
            cwd, script = str(self.context.cwd), self.context.script_name
            os.close(host.claim_output(cwd, os.path.join(cwd, job.output), job.owner, script))
        except host.HostError as error:
            raise (Unreachable if error.kind == "busy" else OSError)(str(error)) from None
        log = f"logs/jobs/{self.context.list_id}/{attempt.name}"
        fetched: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._to_fetch.append(([job.output, log], fetched))
        async with self._fetching:
            if not fetched.done():
                batch, self._to_fetch = self._to_fetch[:MAX_ATTEMPTS_PER_RSYNC], self._to_fetch[MAX_ATTEMPTS_PER_RSYNC:]
                await self._fetch(batch)
        return await asyncio.shield(fetched)

    async def _fetch(self, batch: Sequence[tuple[list[str], asyncio.Future[list[str]]]]) -> None:
        """Copy the results of several attempts with one rsync: one rsync per attempt is too slow for short jobs."""
        if not batch:
            return
        self._fetched_partly |= {several[0] for several, _ in batch}
        try:
            staging = self._staging()
            await self._receive([directory for several, _ in batch for directory in several], staging)
            left_out = await asyncio.to_thread(self._place, staging, [several for several, _ in batch])
        except (Unreachable, OSError) as error:
            if isinstance(error, OSError) and len(batch) > 1:  # the error may concern only one attempt
                for each in batch:
                    await self._fetch([each])
                return
            for _, fetched in batch:
                fetched.set_exception(error)
        else:
            for (_, fetched), names in zip(batch, left_out, strict=True):
                fetched.set_result(names)
            self._fetched_partly -= {several[0] for several, _ in batch}
            if not self._fetched_partly:  # remove also what the server has sent without a request
                os.rename(staging, unused := f"{staging}.{os.urandom(4).hex()}")
                asyncio.get_running_loop().run_in_executor(None, shutil.rmtree, unused, True)

    def _staging(self) -> str:
        """Create the private directory that receives results, on the disk of the results. Raises OSError.

        An interrupted copy leaves complete files there, which the next one does not copy again.
        """
        parent = os.path.realpath(self.context.cwd / "experiments")
        path = os.path.join(parent, f".muster-{self.context.list_id}-{self.name}")
        host.make_private(path)
        return path

    async def _receive(self, directories: Sequence[str], staging: str) -> None:
        """Copy directories from the server, except files that are unchanged since an earlier copy."""
        arguments = [*FILES_FROM, f"--compare-dest={self.context.cwd}", "--"]
        arguments += [f"server:{rsync_literal(self.workdir)}/", f"{staging}/"]
        await self._rsync(arguments, names_for_rsync(directories), RECEIVING)

    def _place(self, staging: str, batch: Sequence[Sequence[str]]) -> list[list[str]]:
        """Move the results of attempts to their places. Returns for each attempt what was left out of its output.

        batch: output and log directory of each attempt. The user may have replaced these directories, and those above
        them, by links. Other links are not followed.
        """
        resolved, found = functools.cache(os.path.realpath), []
        for directories in batch:
            left_out = []
            for directory, mask in zip(directories, (0o755, PRIVATE_DIRECTORY), strict=True):
                source, target = os.path.join(staging, directory), os.path.join(self.context.cwd, directory)
                above = os.path.dirname(source)
                if resolved(above) != above or os.path.islink(source):
                    raise OSError(errno.ELOOP, "the server has replaced it by a link", directory)
                if os.path.isdir(source):  # otherwise removed while it was copied
                    target = os.path.join(resolved(os.path.dirname(target)), os.path.basename(target))
                    target = resolved(target) if os.path.islink(target) else target
                    left_out.append(place(source, target, mask, keeps_newer=False))
                    for name in left_out[-1]:
                        is_file = stat.S_ISREG(os.lstat(os.path.join(source, name)).st_mode)
                        if is_file and os.path.isdir(os.path.join(target, name)):
                            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.path.join(target, name))
            found.append(left_out[0] if left_out else [])
        return found

    async def _copy_base(self, digest: str, staging: str) -> dict[str, Any]:
        """Copy a base model to a staging directory on the server. host.py then verifies the copy and renames it."""
        failed = True
        try:
            async with self._sending:
                target = f"server:{rsync_literal(self.workdir)}/{rsync_literal(staging)}/"
                await self._rsync([*write_through_links(), "--", f"{self.context.cache.path(digest)}/", target])
            failed = False
        except OSError as error:
            return {"state": "failed", "reason": str(error)}
        finally:
            reply = await self._call("publish_base", digest=digest, staging=staging, failed=failed)
        return reply

    async def send_results(self, jobs: Sequence[Job]) -> None:
        present = [job for job in jobs if (self.context.cwd / job.output).is_dir()]
        if self.shared or not present:
            return
        for job in present:
            make_own_directory(str(self.context.cwd / job.output), str(self.context.cwd))
            await self._call("claim", output=job.output, job=job.owner, script=self.context.script_name)
        async with self._sending:
            names = names_for_rsync([job.output for job in present])
            target = f"server:{rsync_literal(self.workdir)}/"
            await self._rsync([*FILES_FROM, *write_through_links(), "--", f"{self.context.cwd}/", target], names)

    async def _rsync(self, arguments: Sequence[str], data: bytes = b"", options: Sequence[str] = SENDING) -> None:
        options = [*options, "--protect-args", "--timeout=60"]
        call = ["rsync", *options, "-e", rsync_shell(self._ssh_to_server()), *arguments]
        code, stderr = await self._run(call, data)
        if code in (0, VANISHED):
            return
        errors = [line for line in stderr.splitlines() if not line.startswith("rsync error:")]  # without the summary
        cause = next((line for line in errors if line.startswith("rsync:")), "".join(errors[-1:]))
        lost = code in LOST_CONNECTION or "connection unexpectedly closed" in cause
        if lost and "No space left on device" not in cause:
            raise Unreachable(last_line(stderr) or f"rsync: exit code {code}")
        raise OSError(cause[: host.MAX_TEXT] or f"rsync: exit code {code}")

    async def _run(self, command: Sequence[str], data: bytes = b"", seconds: float | None = None) -> tuple[int, str]:
        """Run a command with this standard input; return (exit code, standard error)."""
        code, _, stderr = await run_program(command, data, seconds=seconds)
        return code, stderr.strip()


async def run_program(
    command: Sequence[str], data: bytes = b"", env: Mapping[str, str] | None = None, seconds: float | None = None
) -> tuple[int, str, str]:
    """Run a command with this standard input; return (exit code, standard output, standard error).

    Raises Unreachable if it does not exit within `seconds`.
    """
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True
        )
    except ValueError as error:  # a path of a server has a NUL, or is no valid text
        raise OSError(errno.EINVAL, f"{command[0]}: {error}") from None
    assert process.stdin and process.stdout and process.stderr
    process.stdin.write(data)
    process.stdin.close()
    ended = asyncio.gather(read_output(process.stdout), read_output(process.stderr), process.wait())
    try:
        out, err, code = await asyncio.wait_for(ended, seconds)
    except ValueError as error:
        raise Unreachable(f"{command[0]}: {error}") from None
    except asyncio.TimeoutError:
        _kill_group(process)
        with contextlib.suppress(asyncio.TimeoutError):  # a child of it has the pipes
            await asyncio.wait_for(process.communicate(), 1.0)  # closes the pipes
        raise Unreachable(f"{command[0]}: no reply within {seconds:.0f} s") from None
    finally:  # also if the task was cancelled
        _kill_group(process)
    return code, out.decode(errors="replace"), err.decode(errors="replace")


def _kill_group(process: asyncio.subprocess.Process) -> None:
    """Kill a process that has not exited, which leads a process group, with its children, such as ssh of rsync."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def cached_manifest(cache: Cache, digest: str) -> dict[str, Any]:
    """The manifest of a base model in the dispatcher's cache, verified. Raises NotStarted."""
    try:
        return await asyncio.to_thread(cache.verify, digest)
    except BaseModelError as error:
        raise NotStarted(f"base {hash_of(digest)}: {error}", "base") from None


async def read_output(stream: asyncio.StreamReader) -> bytes:
    """The output of a command. Raises ValueError if it is longer than MAX_TEXT."""
    output = bytearray()
    while block := await stream.read(1 << 18):
        output += block
        if len(output) > MAX_TEXT:
            raise ValueError(f"prints more than {MAX_TEXT >> 20} MiB")
    return bytes(output)


async def read_tail(stream: asyncio.StreamReader | None) -> str:
    """The last 8 KiB of a stream."""
    assert stream
    text = b""
    while block := await stream.read(1 << 16):
        text = (text + block)[-8192:]
    return text.decode(errors="replace").strip()


@functools.cache
def write_through_links() -> tuple[str, ...]:
    """The options with which rsync writes through a symbolic link to a directory; see transport/rsync_shell.py."""
    known = subprocess.run(["rsync", "--insecure-links", "--version"], stdin=subprocess.DEVNULL, capture_output=True)
    return ("--keep-dirlinks", *(["--insecure-links"] if known.returncode == 0 else []))


def names_for_rsync(directories: Sequence[str]) -> bytes:
    """The standard input of rsync with FILES_FROM, for whole directories."""
    return b"".join(os.fsencode(f"{name}/") + b"\0" for name in directories)


def last_line(text: str) -> str:
    return text.splitlines()[-1][: host.MAX_TEXT] if text else ""


def ssh_error(stderr: str, code: int, name: str) -> Exception:
    """The exception for a failed ssh command: ServerUnusable if a retry is useless, otherwise Unreachable."""
    if "Temporary failure in name resolution" in stderr:  # this machine may have no network: retry
        return Unreachable(last_line(stderr))
    if LOGIN_SHELL in stderr:
        return ServerUnusable(login_failure(stderr))
    if error := ssh_failure(" ".join(stderr.split()), name):
        return ServerUnusable(error)
    return Unreachable(last_line(stderr) or f"ssh: exit code {code}")


def reporting_error(line: str) -> str:
    """A line of bash that runs `line`; on failure, it prints the errors in one line and exits with FAILED."""
    report = f"printf '%s\\n' \"${{e//$'\\n'/$'\\t'}}\" >&2; exit {FAILED}"
    return f"export LC_ALL=C; e=$({{ {line}; }} 2>&1) || {{ {report}; }}"


def reported_error(stderr: str, setting: str) -> str:
    """An error that reporting_error() has printed, and its remedy. setting: a setting that avoids the error."""
    return host.with_remedy(last_line(stderr).replace("\t", "\n"), setting)


def quoted_path(path: str) -> str:
    """Quote a path for bash; a leading ~/ remains the home directory."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else "~" if path == "~" else shlex.quote(path)


def rsync_literal(path: str) -> str:
    """Escape a remote path for rsync if it contains wildcards; rsync does not unescape a path without them."""
    return re.sub(r"([*?\[\\])", r"\\\1", path) if set("*?[") & set(path) else path


def write_ssh_config(path: Path, server: config.Server) -> None:
    """Write the server's settings, then those of scripts/lib/ssh_config: ssh uses the first value of an option."""
    options = {
        "Port": server.port, "User": server.user, "ControlPath": f"{path.parent}/%C",
        "IdentityFile": server.ssh_key and f'"{server.ssh_key}"', "IdentitiesOnly": "yes" if server.ssh_key else None,
    }  # fmt: skip
    lines = [f"  {name} {value}" for name, value in options.items() if value is not None]
    common = Path(KIT, "scripts/lib/ssh_config").read_text()  # Include could not name each path of Muster
    write_file(path, "\n".join(["Host *", *lines, common]))


def sockets_record(cwd: Path, list_id: str) -> Path:
    """The file with the path of sockets_directory(). Machines that share the working directory have one each."""
    return Path(cwd, "logs", "jobs", list_id, f"sockets.{os.uname().nodename}")


def recorded_sockets(cwd: Path, list_id: str) -> Path | None:
    """The sockets_directory() of a list if it exists, and only this user can write to it and to its record."""
    try:
        found = Path(os.fsdecode(read_bytes(sockets_record(cwd, list_id), own=True)))
        facts = found.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077
    return found if private and re.fullmatch("muster-[0-9a-f]{8}", found.name) else None


def sockets_directory(cwd: Path, list_id: str) -> Path:
    """The directory of ssh's control sockets and configurations for a list. Creates it unless it exists.

    Its name is random, as another user could create a directory of a known name first. Raises OSError.
    """
    host.list_directory(str(cwd), list_id)
    if found := recorded_sockets(cwd, list_id):
        return found
    try:
        made = temporary_directory(lambda _: None)
    except TransportError as error:
        raise OSError(str(error)) from None
    write_file(sockets_record(cwd, list_id), made)
    return Path(made)


def remove_sockets(cwd: Path, list_id: str) -> None:
    """Close the SSH connections of a list, each when its last session has ended, and remove their sockets."""
    if not (directory := recorded_sockets(cwd, list_id)):
        return
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            is_socket = stat.S_ISSOCK(path.lstat().st_mode)
            if is_socket:
                stop = ["ssh", "-F", "none", "-O", "stop", "-S", str(path), "--", "any"]
                with contextlib.suppress(subprocess.TimeoutExpired):
                    subprocess.run(stop, stdin=subprocess.DEVNULL, capture_output=True, timeout=5)
            if is_socket or ".conf" in path.name:
                path.unlink(missing_ok=True)
        directory.rmdir()
        sockets_record(cwd, list_id).unlink()


@functools.cache
def kit_archive() -> tuple[str, bytes]:
    """(name, tar archive) of KIT_FILES; the name is a hash of the contents."""
    buffer = io.BytesIO()
    digest = hashlib.sha256()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in KIT_FILES:
            path = Path(KIT, name)
            digest.update(name.encode() + b"\0" + path.read_bytes())
            archive.add(path, name)
    return digest.hexdigest()[:12], buffer.getvalue()
