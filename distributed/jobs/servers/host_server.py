"""Servers of a job list that run the program jobs.host.service, such as this machine."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distributed.host.gpus import query_gpus
from distributed.jobs.host.panes import SESSIONS, host_command
from distributed.jobs.journal.state import Attempt
from distributed.jobs.lists import config
from distributed.jobs.lists.bases import script_name
from distributed.jobs.lists.job import GpuId, Job, arguments, environment
from distributed.jobs.schedule.backend import Event, JobServer, NotStarted, ServerUnusable, Unreachable
from distributed.jobs.schedule.base_cache import Cache
from distributed.jobs.schedule.placement import Slot, SlotPool
from distributed.jobs.servers.channel import Channel, HostReplyError
from distributed.terminal import plural
from distributed.training.base_model import TRAINING, BaseModelError, hash_of
from distributed.transport.owners import owners_here

CONNECT_TIMEOUT = 60.0  # seconds
MAX_COPIES = 3  # how often a base model is copied if the copies are damaged
COPY_POLL_INTERVAL = 0.2  # seconds between checks whether another process has unlocked a base model


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


class HostServer(JobServer):
    """The base class of SshServer and LocalServer. JobServer describes the methods."""

    remote = False  # whether it is reached over ssh
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
        remote, cwd = self.remote, str(self.context.cwd)
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
            inherited=dict(self.context.forwarded) if self.remote else {},
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


async def cached_manifest(cache: Cache, digest: str) -> dict[str, Any]:
    """The manifest of a base model in the dispatcher's cache, verified. Raises NotStarted."""
    try:
        return await asyncio.to_thread(cache.verify, digest)
    except BaseModelError as error:
        raise NotStarted(f"base {hash_of(digest)}: {error}", "base") from None
