"""A server, from the dispatcher's side: a channel to the program `host.py` there, over ssh or to this machine itself.

One OpenSSH connection a server serves everything: the channel, and rsync for the results. What host.py needs is
copied to the server once (~/.cache/muster/), so a server needs only ssh, bash, tar and Python 3.10.
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
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed.files import KIT, write_file
from distributed.host.gpus import query_gpus
from distributed.jobs import config, host
from distributed.jobs.base_cache import Cache
from distributed.jobs.dispatcher import Event, NotStarted, Order, Refused, Unreachable
from distributed.jobs.job import Job, document
from distributed.jobs.panes import PLAIN_PYTHON
from distributed.jobs.placement import Room, Slot
from distributed.jobs.state import Attempt
from distributed.training.base_model import TRAINING, BaseModelError, hash_of

BEAT = 4.0  # seconds between two heartbeats
SILENCE = 15.0  # seconds without any, after which a connection is lost
CONNECT = 60.0  # seconds that connecting may take
COPY_TRIES = 3  # of a base model that was damaged on its way
COPY_POLL = 0.2  # seconds between two looks at whether another process has copied it
COPIES = 2  # rsyncs at once with a server, each way
TOGETHER = 100  # attempts whose results one rsync copies, at most
ENTRY = "scripts/lib/jobs_host.py"
RSYNC_SHELL = "scripts/lib/rsync_shell.py"
UPLOAD = "muster-upload"  # what a server prints that has not got the kit
NO_PYTHON = "muster-no-python"
USUAL, NO_RSYNC = 3, 4  # exit codes: ~/ml-customization is there; rsync is not
# What jobs/host.py and the supervisors that it forks need on a server. They take no samples of usage.
KIT_FILES = (
    "distributed/__init__.py", "distributed/exit_codes.py", "distributed/files.py", "distributed/metrics.py",
    "distributed/host/__init__.py", "distributed/host/gpus.py", "distributed/host/system.py",
    "distributed/host/process_scan.py",
    "distributed/jobs/__init__.py", "distributed/jobs/host.py", "distributed/jobs/panes.py",
    "distributed/launch/__init__.py", "distributed/launch/console.py", "distributed/launch/supervisor.py",
    "distributed/launch/usage.py",
    "distributed/training/__init__.py", "distributed/training/base_model.py",
    "scripts/lib/jobs_host.py", "scripts/lib/in_node_env.sh", "scripts/lib/common.bash",
    "scripts/lib/node_env.bash",
)  # fmt: skip
# Neither what git ignores, nor what runs leave: a copy is what a colleague would get by `git clone`.
NOT_COPIED = (
    "--exclude=/.git",
    "--exclude=/logs",
    "--exclude=/checkpoints",
    "--exclude=/experiments",
    "--filter=:- .gitignore",
)
# What ssh says when trying again would not help, and what does.
REMEDIES = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "if the server was reinstalled: `ssh-keygen -R HOST`",
    "Host key verification failed": "connect once by hand (`ssh HOST`) and check the fingerprint",
    "Permission denied (": "check user and ssh_key; `ssh HOST true` must work without a question",
    "Too many authentication failures": "name the key: ssh_key",
    "Could not resolve hostname": "check host, or add it to ~/.ssh/config",
    "not accessible": "check ssh_key",
}


@dataclass(frozen=True)
class Launch:
    """What all servers of a list share."""

    list_id: str
    cwd: Path
    script: str
    grace: float = 30.0  # seconds between SIGTERM and SIGKILL
    panes: bool = True
    sync: bool = False
    sockets: Path = Path()  # directory of ssh's sockets and configurations
    machines: dict[tuple[str, str], str] = field(default_factory=dict)  # (host name, boot id) -> server
    cache: Cache = field(default_factory=lambda: Cache(Path()))


def slots_of(server: config.ServerOptions) -> tuple[Slot, ...]:
    """Each GPU's slots one after the other; without GPUs slots_per_gpu slots."""
    gpus: list[int | None] = []
    if isinstance(server, config.Server):
        gpus += [gpu for gpu in server.devices for _ in range(server.slots_per_gpu)]
    return tuple(Slot(index, gpu) for index, gpu in enumerate(gpus or [None] * server.slots_per_gpu))


class Channel:
    """Requests to host.py, and what it replies and reports."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, post: Callable[[Event], None]) -> None:
        self._process, self._name, self._post = process, name, post
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next = 0
        self._heard = time.monotonic()
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []

    async def hello(self) -> dict[str, Any]:
        """The first line of host.py, behind whatever a login prints. Raises Unreachable and EOFError (its argument
        is what was printed instead)."""
        assert self._process.stdout
        printed: list[str] = []
        while line := await self._process.stdout.readline():
            text = line.decode(errors="replace").strip()
            with contextlib.suppress(ValueError):
                found = json.loads(text)
                if isinstance(found, dict) and found.get("protocol") == host.HELLO:
                    self._tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._beat())]
                    return found
            printed.append(text)
        raise EOFError("\n".join(printed))

    async def call(self, verb: str, **facts: Any) -> dict[str, Any]:
        """The reply. Raises Unreachable, and Refused or NotStarted's reason as HostSays."""
        if self.gone.done():
            raise Unreachable(self.gone.result())
        self._next += 1
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[self._next] = reply
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"id": self._next, "do": verb, **facts}).encode() + b"\n")
        found = await reply
        if "error" in found:
            raise HostSays(found["error"], found.get("kind", "server"))
        return found

    async def _read(self) -> None:
        assert self._process.stdout
        received = b""
        try:
            while block := await self._process.stdout.read(1 << 18):
                self._heard = time.monotonic()
                *lines, received = (received + block).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
        except (OSError, ValueError) as error:
            self._end(f"the connection is disturbed: {error}")
        self._end("the connection was closed")

    def _take(self, message: dict[str, Any]) -> None:
        if "reply" in message:
            future = self._waiting.pop(message.pop("reply"), None)
            if future and not future.done():
                future.set_result(message)
        elif (kind := message.pop("event")) != "beat":
            self._post(Event(kind, self._name, message))

    async def _beat(self) -> None:
        assert self._process.stdin
        while not self.gone.done():
            with contextlib.suppress(OSError):
                self._process.stdin.write(b"\n")
            await asyncio.sleep(BEAT)
            if (silent := time.monotonic() - self._heard) > SILENCE:
                self._end(f"no answer for {silent:.0f} s")

    def _end(self, reason: str) -> None:
        if not self.gone.done():
            self.gone.set_result(reason)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Unreachable(reason))
                future.exception()
        self._waiting.clear()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """End host.py; jobs go on."""
        self._end("closed")
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(ProcessLookupError):
            await self._process.wait()


class HostSays(Exception):
    """host.py refuses. kind: see NotStarted."""

    def __init__(self, reason: str, kind: str) -> None:
        super().__init__(reason)
        self.kind = kind


class HostServer:
    """What a server over ssh and this machine have in common."""

    def __init__(self, name: str, server: config.Server, launch: Launch) -> None:
        self.name, self.settings, self.launch = name, server, launch
        self.room = Room(name, slots_of(server), frozenset(server.labels))
        self.watches_gpus = any(slot.gpu is not None for slot in self.room.slots)
        self.queues_dependents = False
        self.shared = True  # its working directory is ours
        self.session = ""  # of tmux
        self.directory = self.workdir = ""  # on the server: of the list, and of the jobs
        self._channel: Channel | None = None

    # ---- connecting

    async def connect(self, post: Callable[[Event], None]) -> str:
        """See dispatcher.Server."""
        await self.disconnect()
        await self._prepare()
        try:
            return await asyncio.wait_for(self._connect(post), CONNECT)
        except BaseException as error:
            await self.disconnect()
            if isinstance(error, asyncio.TimeoutError):
                raise Unreachable(f"not connected within {CONNECT:.0f} s") from None
            if isinstance(error, HostSays):
                raise Refused(str(error)) from None
            raise

    async def _connect(self, post: Callable[[Event], None]) -> str:
        self._channel = await self._open_channel(post)
        opened = await self._channel.call(
            "open", server=self.name, list=self.launch.list_id, workdir=self._workdir_asked(),
            default_workdir=str(self.launch.cwd), script=self.launch.script,
            python=self.settings.python or self._python(), remote=isinstance(self, SshServer),
            slots=[f"{self.name}:{slot.index}" for slot in self.room.slots], panes=self.launch.panes,
        )  # fmt: skip
        self.workdir, self.directory, self.session = opened["workdir"], opened["directory"], opened["session"]
        self.room.bases = set(opened["bases"])
        if self.watches_gpus:
            self._check_gpus(await self._channel.call("gpus"))
        await self._after_open(opened)
        return "; ".join(filter(None, [self._attach_line(), opened["note"]]))

    def _workdir_asked(self) -> str:
        return self.settings.workdir or ""

    def _python(self) -> str:
        return ""

    async def _prepare(self) -> None:
        """What may take longer than connecting."""

    async def _open_channel(self, post: Callable[[Event], None]) -> Channel:
        raise NotImplementedError

    async def _after_open(self, opened: Mapping[str, Any]) -> None:
        """Further checks."""

    def _attach_line(self) -> str:
        return f"watch: tmux attach -t {self.session}" if self.session else ""

    def _check_gpus(self, found: Mapping[str, Any]) -> None:
        there = [gpu["index"] for gpu in found["gpus"]]
        missing = [gpu for gpu in self.settings.devices if gpu not in there]
        if found["problem"]:
            raise Refused(found["problem"])
        if missing:
            raise Refused(
                f"GPU {', '.join(map(str, missing))}: not there: {self.name} has {len(there)} "
                f"GPU{'s' * (len(there) != 1)} ({', '.join(map(str, there)) or 'none'}); correct gpus or gpu_ids "
                "(gpus 0: CPU slots)"
            )

    def _is_new_machine(self, hello: Mapping[str, Any]) -> None:
        """One machine under two names would get twice as many jobs as it has slots."""
        other = self.launch.machines.setdefault((hello["host"], hello["boot_id"]), self.name)
        if other != self.name:
            raise Refused(f"is the same machine as {other}; list it once")

    async def lost(self) -> str:
        """See dispatcher.Server."""
        assert self._channel
        return await asyncio.shield(self._channel.gone)

    async def disconnect(self) -> None:
        """Give the channel up."""
        channel, self._channel = self._channel, None
        if channel:
            await channel.close()

    async def close(self, finished: bool) -> None:
        """See dispatcher.Server."""
        if finished and self._channel:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._call("close"), 5.0)
        await self.disconnect()

    async def _call(self, verb: str, **facts: Any) -> dict[str, Any]:
        if not self._channel:
            raise Unreachable("not connected")
        return await self._channel.call(verb, **facts)

    # ---- jobs

    async def look(self, attempts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """See dispatcher.Server."""
        try:
            reply = await self._call("look", attempts=dict(attempts), grace=self.launch.grace)
        except HostSays as error:
            raise Unreachable(str(error)) from None
        found: dict[str, dict[str, Any]] = reply["attempts"]
        return found

    async def start(self, order: Order) -> dict[str, Any]:
        """See dispatcher.Server."""
        options = order.job.options
        env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # as nvidia-smi numbers them, also where GPUs differ
        env |= {**options.env, "CUDA_VISIBLE_DEVICES": ",".join(map(str, order.gpus))}
        if digest := order.job.base or order.job.trains:
            env["MUSTER_BASE_MODEL_DIGEST"] = digest
        try:
            return await self._call(
                "start", attempt=order.attempt, job=order.job.owner, output=order.job.output, slots=list(order.slots),
                title=order.title, script=self.launch.script, arguments=list(order.arguments),
                setup=self.settings.setup, env={**env, "MUSTER_JOB": document(order.job)},
                timeout=options.timeout, grace=self.launch.grace, base=order.job.base,
            )  # fmt: skip
        except HostSays as error:
            raise NotStarted(str(error), error.kind) from None

    async def stop(self, attempt: str, kill: bool) -> None:
        """See dispatcher.Server."""
        await self._call("stop", attempt=attempt, kill=kill)

    async def gpus(self) -> list[dict[str, Any]]:
        """See dispatcher.Server."""
        found: list[dict[str, Any]] = (await self._call("gpus"))["gpus"]
        return found

    async def have_base(self, digest: str) -> int:
        """See dispatcher.Server."""
        copied = 0
        for _ in range(COPY_TRIES):
            found = await self._ask_for_base(digest)
            if found["state"] == "copy":
                found = await self._copy_base(digest, found["staging"])
                copied += found.get("bytes", 0)
            if found["state"] == "ready":
                return copied
            if found["state"] == "failed" or self.shared:
                break
        kind = "base" if self.shared and found["state"] == "damaged" else "server"
        raise NotStarted(f"base {hash_of(digest)}: {found['reason']}", kind)

    async def _ask_for_base(self, digest: str) -> dict[str, Any]:
        """What base() of host.py replies, when no other process copies it there any more."""
        manifest = await cached_manifest(self.launch.cache, digest)
        output = f"{TRAINING}/{hash_of(digest)}"
        while True:
            try:
                found = await self._call("base", digest=digest, manifest=manifest, output=output, shared=self.shared)
            except HostSays as error:
                raise NotStarted(str(error)) from None
            if found["state"] != "busy":
                return found
            await asyncio.sleep(COPY_POLL)

    async def _copy_base(self, digest: str, staging: str) -> dict[str, Any]:
        raise NotImplementedError

    async def remove_output(self, output: str) -> None:
        """See dispatcher.Server."""
        if not self.shared:
            await self._call("remove_output", output=output)

    async def bring(self, attempt: Attempt, job: Job) -> None:
        """Nothing where the files are ours already."""

    async def send(self, output: str) -> None:
        """Nothing where the files are ours already."""

    def follow_command(self, attempt: Attempt, once: bool = False) -> list[str]:
        """A program that prints the log of an attempt until its end; once: what is there now."""
        stem = os.path.join(self._list_directory(), attempt.name, f"node_{self.name}")
        end = "/" if once else f"{stem}.exit"
        return [sys.executable, *PLAIN_PYTHON, f"{KIT}/{ENTRY}", "follow", f"{stem}.log", end]

    def _list_directory(self) -> str:
        return self.directory or os.path.join(self.launch.cwd, "logs", "jobs", self.launch.list_id)


class LocalServer(HostServer):
    """This machine."""

    def _python(self) -> str:
        return sys.executable

    def _workdir_asked(self) -> str:
        return self.settings.workdir or str(self.launch.cwd)

    async def _open_channel(self, post: Callable[[Event], None]) -> Channel:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *PLAIN_PYTHON, f"{KIT}/{ENTRY}", "serve", cwd=self.launch.cwd,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24, start_new_session=True,
        )  # fmt: skip
        channel = Channel(process, self.name, post)
        await channel.hello()
        return channel


def local_server(launch: Launch, slots: int | None, gpus: list[int] | None = None) -> LocalServer:
    """This machine's GPUs or, without any, `slots` CPU slots (default: half as many as cores)."""
    devices = [gpu.index for gpu in query_gpus().devices] if gpus is None else gpus
    cpus = slots or max(1, len(os.sched_getaffinity(0)) // 2)
    said: dict[str, Any] = (
        {"gpu_ids": devices, "slots_per_gpu": slots or 1} if devices else {"gpus": 0, "slots_per_gpu": cpus}
    )
    return LocalServer("local", config.Server(host="localhost", **said), launch)


# ---------------------------------------------------------------- over ssh


class SshServer(HostServer):
    """A server over ssh."""

    def __init__(self, name: str, server: config.Server, launch: Launch) -> None:
        super().__init__(name, server, launch)
        self.shared = False
        self._bringing, self._sending = asyncio.Semaphore(COPIES), asyncio.Semaphore(COPIES)
        self._to_bring: list[tuple[list[str], asyncio.Future[None]]] = []  # directories that wait for an rsync
        self._synced = not launch.sync
        self._kit = kit_archive()
        self._config = launch.sockets / f"{name}.conf"

    @property
    def ssh(self) -> list[str]:
        """ssh with the configuration of this server."""
        return ["ssh", "-F", str(self._config)]

    async def _prepare(self) -> None:
        write_ssh_config(self._config, self.settings)
        if not self._synced:
            await self._sync()

    async def _open_channel(self, post: Callable[[Event], None]) -> Channel:
        for attempt in range(2):
            command = for_any_shell(f"cd; {self._host_program('serve')}")
            process = await asyncio.create_subprocess_exec(
                *self.ssh, "--", self.settings.host, command, stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=1 << 24, start_new_session=True,
            )  # fmt: skip
            channel = Channel(process, self.name, post)
            errors = asyncio.ensure_future(drained(process.stderr))
            try:
                self._is_new_machine(await channel.hello())
                return channel
            except EOFError as error:
                printed = str(error)
                code = await process.wait()
                said = await errors
            except BaseException:  # as when the time to connect is over
                await channel.close()
                raise
            if UPLOAD in printed and attempt == 0:
                await self._upload()
                continue
            if NO_PYTHON in printed:
                found = f"python {self.settings.python}: not" if self.settings.python else "no"
                raise Refused(f"{found} Python 3.10 or newer there: install one, or set python for this server")
            raise failure(said or printed, code, self.settings.host)
        raise Refused("the kit could not be copied to it")

    def _host_program(self, words: str) -> str:
        """Line of bash, in the home directory: run host.py of the kit there, or say what is missing."""
        workdir = self.settings.workdir or "~/ml-customization"
        own = [self.settings.python] if self.settings.python else []
        own += [f"{base}/{path}" for path in own for base in (workdir, self.launch.cwd) if path[0] not in "~/"]
        candidates = own or [f"{workdir}/.venv/bin/python", f"{self.launch.cwd}/.venv/bin/python", "python3"]
        pythons = " ".join(home_relative(each) for each in candidates)
        plain = " ".join(PLAIN_PYTHON)
        newer = shlex.quote("import sys; sys.exit(sys.version_info < (3, 10))")
        return (
            f'd="${{XDG_CACHE_HOME:-$HOME/.cache}}/muster/jobs-{self._kit[0]}"; '
            f'[ -e "$d/complete" ] || {{ echo {UPLOAD}; exit 0; }}; '
            f"for p in {pythons}; do "
            f'if "$p" {plain} -c {newer} 2>/dev/null; then exec "$p" {plain} "$d/{ENTRY}" {words}; fi; done; '
            f"echo {NO_PYTHON}"
        )

    async def _upload(self) -> None:
        line = (
            f'd="${{XDG_CACHE_HOME:-$HOME/.cache}}/muster"; mkdir -p "$d" && t=$(mktemp -d "$d/new-XXXXXX") && '
            f'tar -xf - -C "$t" && touch "$t/complete" && '
            f'{{ mv -T "$t" "$d/jobs-{self._kit[0]}" 2>/dev/null || rm -rf "$t"; }}'
        )
        code, said = await self._run([*self.ssh, "--", self.settings.host, for_any_shell(line)], self._kit[1])
        if code:
            raise failure(said, code, self.settings.host)

    async def _sync(self) -> None:
        """Copy the working directory there, as a first start needs it; nothing is deleted."""
        target = self.settings.workdir or str(self.launch.cwd)
        usual = "" if self.settings.workdir else f"[ ! -d ~/ml-customization ] || exit {USUAL}; "  # see find_workdir()
        line = f"command -v rsync >/dev/null || exit {NO_RSYNC}; {usual}mkdir -p -- {home_relative(target)}"
        self._refuse_without_rsync(there=True)
        code, said = await self._run([*self.ssh, "--", self.settings.host, for_any_shell(line)])
        self._refuse_without_rsync(there=code != NO_RSYNC)
        if code == USUAL:
            target = "ml-customization"
        elif code:
            raise failure(said, code, self.settings.host)
        target = target.removeprefix("~/")
        await self._rsync([*NOT_COPIED, f"{self.launch.cwd}/", f"server:{literal(target)}/"])
        self._synced = True

    async def _after_open(self, opened: Mapping[str, Any]) -> None:
        self.shared = await self._shares_files()
        if not self.shared:
            self._refuse_without_rsync(there=opened["rsync"])

    def _refuse_without_rsync(self, there: bool) -> None:
        if not there:
            raise Refused("rsync is not installed there, and files must be copied: install it (apt-get install rsync)")
        if not shutil.which("rsync"):
            raise Refused("rsync is not installed on this machine, and files must be copied: install it")

    async def _shares_files(self) -> bool:
        """Whether its working directory is ours: a file that we make here is seen there."""
        try:
            file, path = tempfile.mkstemp(prefix=".muster-", dir=self.launch.cwd)
        except OSError:
            return False
        try:
            os.close(file)
            return bool((await self._call("exists", path=os.path.basename(path)))["exists"])
        finally:
            os.unlink(path)

    def _attach_line(self) -> str:
        if not self.session:
            return ""
        user = f"{self.settings.user}@" if self.settings.user else ""
        port = f" -p {self.settings.port}" if self.settings.port else ""
        key = f" -i {shlex.quote(self.settings.ssh_key)}" if self.settings.ssh_key else ""
        return f"watch: ssh -t{port}{key} {user}{self.settings.host} tmux attach -t {self.session}"

    def follow_command(self, attempt: Attempt, once: bool = False) -> list[str]:
        """See HostServer."""
        write_ssh_config(self._config, self.settings)
        usual = f'w=~/ml-customization; [ -d "$w" ] || w={shlex.quote(str(self.launch.cwd))}'
        workdir = f"w={home_relative(self.settings.workdir)}" if self.settings.workdir else usual
        log = f'"$w"/{shlex.quote(f"logs/jobs/{self.launch.list_id}/{attempt.name}/node_{self.name}")}'
        end = "/" if once else f"{log}.exit"
        line = f"cd; {workdir}; {self._host_program(f'follow {log}.log {end}')}"
        return [*self.ssh, "--", self.settings.host, for_any_shell(line)]

    # ---- results

    async def bring(self, attempt: Attempt, job: Job) -> None:
        """See dispatcher.Server."""
        if self.shared:
            return
        try:
            host.refuse_other_owner(str(self.launch.cwd / job.output), job.owner, self.launch.script)
        except host.HostError as error:
            raise OSError(str(error)) from None
        log = f"logs/jobs/{self.launch.list_id}/{attempt.name}"
        brought: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._to_bring.append(([job.output, log], brought))
        async with self._bringing:
            if not brought.done():
                together, self._to_bring = self._to_bring[:TOGETHER], self._to_bring[TOGETHER:]
                await self._bring(together)
        await asyncio.shield(brought)

    async def _bring(self, together: Sequence[tuple[list[str], asyncio.Future[None]]]) -> None:
        """One rsync for all that wait: of short jobs more end than can be copied one by one."""
        directories = [directory for several, _ in together for directory in several]
        try:
            if directories:
                await self._copy(directories, f"server:{literal(self.workdir)}/", f"{self.launch.cwd}/")
        except (Unreachable, OSError) as error:
            if isinstance(error, OSError) and len(together) > 1:  # it may concern one of them alone
                for each in together:
                    await self._bring([each])
                return
            for _, brought in together:
                brought.set_exception(error)
        else:
            for _, brought in together:
                brought.set_result(None)

    async def _copy_base(self, digest: str, staging: str) -> dict[str, Any]:
        """Copy a base model of the cache here into a directory there, which is then verified and renamed."""
        failed = True
        try:
            async with self._sending:
                await self._rsync(
                    [f"{self.launch.cache.path(digest)}/", f"server:{literal(self.workdir)}/{literal(staging)}/"]
                )
            failed = False
        except OSError as error:
            return {"state": "failed", "reason": str(error)}
        finally:
            found = await self._call("publish_base", digest=digest, staging=staging, failed=failed)
        return found

    async def send(self, output: str) -> None:
        """See dispatcher.Server."""
        if not self.shared and (self.launch.cwd / output).is_dir():
            async with self._sending:
                await self._copy([output], f"{self.launch.cwd}/", f"server:{literal(self.workdir)}/")

    async def _copy(self, directories: Sequence[str], source: str, target: str) -> None:
        """Directories with all that is in them; their names are on standard input, where rsync takes them literally."""
        names = b"".join(os.fsencode(f"{name}/") + b"\0" for name in directories)
        await self._rsync(["--recursive", "--from0", "--files-from=-", source, target], names)

    async def _rsync(self, words: Sequence[str], data: bytes = b"") -> None:
        words_of_shell = [sys.executable, "-I", "-S", f"{KIT}/{RSYNC_SHELL}", str(self._config), self.settings.host]
        shell = " ".join("'" + word.replace("'", "''") + "'" for word in words_of_shell)  # as rsync reads them
        call = ["rsync", "--archive", "--protect-args", "--timeout=60", "-e", shell, *words]
        code, said = await self._run(call, data)
        if code in (12, 30, 35, 255):
            raise Unreachable(last_line(said) or f"rsync: exit code {code}")
        if code:
            cause = next((line for line in said.splitlines() if line.startswith("rsync:")), last_line(said))
            raise OSError(cause or f"rsync: exit code {code}")

    async def _run(self, words: Sequence[str], data: bytes = b"") -> tuple[int, str]:
        """(exit code, standard error)."""
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        try:
            _, said = await process.communicate(data)
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise
        return process.returncode or 0, said.decode(errors="replace").strip()


async def cached_manifest(cache: Cache, digest: str) -> dict[str, Any]:
    """Of a base model that is valid here. Raises NotStarted."""
    try:
        return await asyncio.to_thread(cache.verify, digest)
    except BaseModelError as error:
        raise NotStarted(f"base {hash_of(digest)}: {error}", "base") from None


async def drained(stream: asyncio.StreamReader | None) -> str:
    """What ssh says, the last of it."""
    assert stream
    text = b""
    while block := await stream.read(1 << 16):
        text = (text + block)[-8192:]
    return text.decode(errors="replace").strip()


def last_line(text: str) -> str:
    return text.splitlines()[-1] if text else ""


def failure(said: str, code: int, name: str) -> Exception:
    """What ssh's end means."""
    if "Temporary failure in name resolution" in said:  # no network here, perhaps; trying again may help
        return Unreachable(last_line(said))
    for words, remedy in REMEDIES.items():
        if words in said:
            line = next(line for line in said.splitlines() if words in line)
            return Refused(f"{line.strip().strip('@ ')}; {remedy.replace('HOST', name)}")
    return Unreachable(last_line(said) or f"ssh: exit code {code}")


def home_relative(path: str) -> str:
    """A word of bash for a path in which a leading ~/ is the home directory."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else "~" if path == "~" else shlex.quote(path)


def literal(path: str) -> str:
    """Escape a path on the server for rsync, which expands wildcards there; without any it keeps backslashes."""
    return re.sub(r"([*?\[\\])", r"\\\1", path) if set("*?[") & set(path) else path


PLAIN = frozenset(b'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./:,+@{}()[];$&|<>"*?~#^ -')


def for_any_shell(line: str) -> str:
    """A command that any login shell hands to bash unchanged: what a shell might change stands there as =XX.

    The same as for_any_shell of scripts/lib/ssh.bash.
    """
    coded = "".join(chr(byte) if byte in PLAIN else f"={byte:02X}" for byte in os.fsencode(line))
    return f"exec bash -c 'eval \"$(printf %b \"${{1//=/$2}}\")\"' bash '{coded}' '\\x'"


def write_ssh_config(path: Path, server: config.Server) -> None:
    """The kit's ssh_config, and above it what cluster_config.json says: ssh takes the first value it meets."""
    said = {
        "Port": server.port, "User": server.user, "ControlPath": f"{path.parent}/%C",
        "IdentityFile": server.ssh_key and f'"{server.ssh_key}"', "IdentitiesOnly": "yes" if server.ssh_key else None,
    }  # fmt: skip
    lines = [f"  {name} {value}" for name, value in said.items() if value is not None]
    text = "\n".join(["Host *", *lines, f'Include "{KIT}/scripts/lib/ssh_config"', ""])
    make_private(path.parent)
    write_file(str(path), text)


def make_private(directory: Path) -> None:
    """A directory that no other user can write to, as in /tmp anybody may have made it. Raises PermissionError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = directory.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise PermissionError(errno.EACCES, "others can write to it; remove it", str(directory))


def sockets_directory(list_id: str) -> Path:
    """For the sockets of a list's connections, the same each time; short, as ssh takes no long ones."""
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
    base = base if len(base) < 20 and not any(map(str.isspace, base)) and os.path.isdir(base) else "/tmp"
    return Path(base, f"muster-{os.getuid()}-{list_id}")


def remove_sockets(list_id: str) -> None:
    """The connections of a list take no new calls, and end with the last one that uses them."""
    directory = sockets_directory(list_id)
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.is_socket():
                stop = ["ssh", "-F", "none", "-O", "stop", "-S", str(path), "any"]
                with contextlib.suppress(subprocess.TimeoutExpired):
                    subprocess.run(stop, stdin=subprocess.DEVNULL, capture_output=True, timeout=5)
            path.unlink(missing_ok=True)
        directory.rmdir()


@functools.cache
def kit_archive() -> tuple[str, bytes]:
    """(name, tar archive) of what a server needs; the name follows from the contents."""
    buffer = io.BytesIO()
    digest = hashlib.sha256()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in KIT_FILES:
            path = Path(KIT, name)
            digest.update(name.encode() + b"\0" + path.read_bytes())
            archive.add(path, name)
    return digest.hexdigest()[:12], buffer.getvalue()
