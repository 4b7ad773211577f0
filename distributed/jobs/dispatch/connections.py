"""The connections to servers: which servers may get jobs, and which are lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distributed.jobs.dispatch.events import EventQueue
from distributed.jobs.dispatch.limits import Policy
from distributed.jobs.dispatch.recorder import Recorder
from distributed.jobs.dispatch.starts import Starts
from distributed.jobs.journal.state import Attempt
from distributed.jobs.schedule.backend import MAX_FAILED_STARTS, Event, ServerLink, ServerUnusable, Unreachable
from distributed.trust import one_line

RETRY_DELAYS = (1.0, 2.0, 5.0, 10.0, 15.0)  # seconds before connecting, or copying results, is retried
FIRST_TIMEOUT = 60.0  # seconds in which servers that run jobs of a resumed list connect before the others
# Seconds for which a server gets no new jobs, multiplied by the number of its failed starts. Also the seconds until a
# job is queued again after a NotStarted error of the kind "busy".
COOLDOWN = 10.0
GPU_INTERVAL = 10.0  # seconds between queries of GPU memory
GPU_IN_USE_MIB = 1000  # if more is in use on a GPU without a job of this list, another process uses the GPU


class Connections:
    """The connections of one dispatcher."""

    def __init__(
        self, recorder: Recorder, events: EventQueue, links: Mapping[str, ServerLink], policy: Policy, starts: Starts
    ) -> None:
        self.policy = policy
        self._recorder, self._events, self._links, self._starts = recorder, events, links, starts
        self._started_at = time.monotonic()
        self._others_connect = asyncio.Event()  # servers that run no jobs of this list yet may connect
        self._unlisted: set[str] = set()  # with running or ending jobs, but not in the cluster config

    def unended_attempts(self) -> list[Attempt]:
        """The attempts that may still run on their servers, including lost ones."""
        return [*self._recorder.state.open.values(), *self._recorder.state.lost_attempts()]

    # ---- connecting

    def open(self) -> None:
        """Connect to all servers, and stay connected. Servers that may run jobs of a resumed list come first."""
        state = self._recorder.state
        servers = {each.server for each in state.open.values()}
        servers |= {job.last.server for job in state.unfinished() if job.state == "ending" and job.last}
        self._unlisted = servers - set(self._links)
        for server in sorted(self._unlisted):
            restart = f"its jobs restart elsewhere after {self.policy.lost_after:.0f} s"
            self._recorder.log(f"{server}: no longer in the cluster config; {restart}")
        unended = {attempt.server for attempt in self.unended_attempts()}
        first_links = [link for name, link in self._links.items() if name in unended]
        self._events.spawn(self._wait_for(first_links))
        for link in self._links.values():
            self._events.spawn(self._keep_connected(link, first=link in first_links))

    async def close(self) -> None:
        """Disconnect."""
        await asyncio.gather(*(link.server.close() for link in self._links.values()), return_exceptions=True)

    async def _wait_for(self, first_links: Sequence[ServerLink]) -> None:
        """Let the other servers connect after these ones, or after FIRST_TIMEOUT: one may hang while it connects."""
        limit = time.monotonic() + FIRST_TIMEOUT
        while waited := [link.server.name for link in first_links if link.state == "connecting"]:
            if time.monotonic() > limit:
                names = ", ".join(waited)
                self._recorder.log(f"{names}: still connecting after {FIRST_TIMEOUT:.0f} s; using other servers")
                break
            await asyncio.sleep(0.1)
        self._others_connect.set()

    async def _keep_connected(self, link: ServerLink, first: bool) -> None:
        """Connect and reconnect; post the outcome as events.

        first: connect before the other servers, because jobs of this list already run on this one. If two names refer
        to one machine, only the first to connect is used.
        """
        server, failures, post = link.server, 0, self._events.post
        if not first:
            await self._others_connect.wait()
        while True:
            try:
                note = await server.connect(post)
                attempts = [each for each in self.unended_attempts() if each.server == server.name]
                jobs = self._recorder.state.jobs
                states = await server.query({each.name: jobs[each.job].job.output for each in attempts})
            except ServerUnusable as error:
                post(Event("unusable", server.name, {"reason": one_line(str(error))}))
                return
            except (Unreachable, OSError) as error:
                post(Event("unreachable", server.name, {"reason": one_line(str(error))}))
                await asyncio.sleep(RETRY_DELAYS[min(failures, len(RETRY_DELAYS) - 1)])
                failures += 1
                continue
            failures = 0
            post(Event("connected", server.name, {"note": one_line(note), "attempts": states}))
            watching = asyncio.ensure_future(self._watch_gpus(link)) if server.watches_gpus else None
            try:
                reason = await server.wait_until_lost()
            finally:
                if watching:
                    watching.cancel()
            post(Event("unreachable", server.name, {"reason": one_line(reason)}))

    async def _watch_gpus(self, link: ServerLink) -> None:
        with contextlib.suppress(Unreachable):
            while True:
                link.server.pool.freed.clear()
                self._events.post(Event("gpus", link.server.name, {"gpus": await link.server.query_gpus()}))
                await asyncio.sleep(GPU_INTERVAL)

    # ---- events

    def on_connected(self, event: Event) -> None:
        link = self._links[event.server]
        link.state, link.reason, link.failed_starts = "ready", "", 0
        self._recorder.log("; ".join(filter(None, [f"{event.server}: connected", event.facts["note"]])))

    def on_unreachable(self, event: Event) -> None:
        link = self._links[event.server]
        if link.state != "unreachable":
            self._recorder.log(f"{event.server}: unreachable: {event.facts['reason']}; retrying")
        if link.state == "ready":
            link.disconnected_at = time.monotonic()
        link.state, link.reason, link.gpus_known = "unreachable", event.facts["reason"], False
        self.update_pool(link)
        self._recorder.changed()

    def on_unusable(self, event: Event) -> None:
        link = self._links[event.server]
        link.state, link.reason = "unusable", event.facts["reason"]
        self._recorder.log(f"{event.server}: not used: {link.reason}")
        self.update_pool(link)
        self._recorder.changed()

    def on_gpus(self, event: Event) -> None:
        link, pool, log = self._links[event.server], self._links[event.server].server.pool, self._recorder.log
        # The query may have seen the processes of jobs that have ended since it began.
        used = {slot.gpu for slot in pool.slots if slot.index not in pool.free} | pool.freed
        lost = {gpu["index"]: gpu["lost"] for gpu in event.facts["gpus"] if "lost" in gpu}
        known = [gpu for gpu in event.facts["gpus"] if "lost" not in gpu]
        blocked = {gpu["index"] for gpu in known if gpu["index"] not in used and self._in_use(gpu)}
        listed = {slot.gpu for slot in pool.slots if slot.gpu is not None}
        for gpu in sorted((lost.keys() - pool.lost) & listed, key=str):
            log(f"{event.server}: GPU {gpu}: not used: {lost[gpu]}")
        if new := sorted((blocked - pool.blocked) & listed, key=str):
            log(f"{event.server}: GPU {', '.join(map(str, new))}: in use by another process; waiting")
        if freed := sorted((pool.blocked | pool.lost) - blocked - lost.keys() & listed, key=str):
            log(f"{event.server}: GPU {', '.join(map(str, freed))}: free again")
        pool.blocked, pool.lost = frozenset(blocked), frozenset(lost)
        link.gpus_known = True
        self.update_pool(link)

    def _in_use(self, gpu: Mapping[str, Any]) -> bool:
        """Whether another process uses a GPU. Called only for GPUs on which no job of this list runs.

        If the memory that the decision needs is unknown, one process is enough.
        """
        limit = self.policy.gpu_free_mib
        if limit is None and gpu.get("desktop"):
            return False
        if gpu["used"] is None or (limit is not None and not gpu["memory"]):
            return bool(gpu["processes"])
        return bool(gpu["used"] > GPU_IN_USE_MIB if limit is None else gpu["memory"] - gpu["used"] < limit)

    # ---- servers that get no jobs

    def update_pool(self, link: ServerLink) -> None:
        """Let jobs start on a server, or stop that, as its link says."""
        ready = link.state == "ready" and link.usable and time.monotonic() >= link.paused_until
        link.server.pool.open = ready and (link.gpus_known or not link.server.watches_gpus)
        self._starts.servers_changed()

    def count_failed_start(self, server: str, reason: str, permanent: bool) -> None:
        """Place no jobs on a server for a while. After MAX_FAILED_STARTS, or if permanent, wait until it reconnects."""
        link = self._links[server]
        if link.usable and time.monotonic() >= link.paused_until:  # simultaneous failures count once
            link.failed_starts = MAX_FAILED_STARTS if permanent else link.failed_starts + 1
            link.paused_until = time.monotonic() + COOLDOWN * link.failed_starts
            if link.failed_starts >= MAX_FAILED_STARTS:
                link.reason = f"gets no new jobs: {reason}"
                self._recorder.log(f"{server}: {link.reason}")
        self.update_pool(link)

    def lost_servers(self) -> Iterator[tuple[str, str, str]]:
        """The servers that were not connected for `lost_after` seconds: name, fault and cause. Ends their pauses."""
        now = time.monotonic()
        for link in self._links.values():
            if link.state == "ready" and 0 < link.paused_until <= now:
                link.paused_until = 0.0
                self.update_pool(link)
            seconds = now - link.disconnected_at
            if link.state in ("unreachable", "unusable") and seconds > self.policy.lost_after:
                fault = f"could not be {'used' if link.state == 'unusable' else 'reached'} for {seconds:.0f} s"
                yield link.server.name, fault, f": {link.reason}"
        if self._unlisted and now - self._started_at > self.policy.lost_after:
            unlisted, self._unlisted = self._unlisted, set()
            for server in unlisted:
                yield server, "is no longer in the cluster config", ""
