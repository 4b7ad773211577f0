"""Runs a job list: places jobs on servers, watches them, and ends when nothing is left to do.

Everything that happens is an event in one queue, and one task handles them: what it decides becomes records, the
records are applied to the state and committed to the journal, and only then the decisions are carried out. A server
that does not answer is unknown, not dead: its jobs are waited for, for `lost_after` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from distributed.jobs.base_cache import Cache
from distributed.jobs.job import Job, arguments
from distributed.jobs.journal import Journal
from distributed.jobs.placement import Queue, Room, usual_seconds
from distributed.jobs.state import (
    FINAL,
    FINAL_FAILURES,
    MOST_LOST,
    UNLISTED,
    Attempt,
    JobState,
    State,
    chosen,
    judge,
    request_id,
    unanswered,
)
from distributed.training.base_model import BaseModelError, hash_of

TICK = 0.5  # seconds between two looks at the clock and the journal
EARLY = 30.0  # seconds; what fails sooner may have failed because of the list, not of the job
EARLY_FAILURES = 5  # in a row, that pause the list
BACKOFF = (1.0, 2.0, 5.0, 10.0, 15.0)  # seconds before the next try to connect, or to copy results
STRIKES = 3  # starts that a server refuses, one after the other, before it gets no more jobs
COOLING = 10.0  # seconds without jobs after such a start
LOCKED = 1.0  # seconds between two tries to lock a base model
GPU_LOOK = 10.0  # seconds between two looks at who uses the GPUs
USED_BY_OTHERS = 1000  # MiB on a GPU, from which on somebody else uses it


class Unreachable(Exception):
    """The connection to a server failed or was lost: what runs there is unknown."""


class Refused(Exception):
    """A server cannot be used until a person has changed something: problem and remedy."""


class NotStarted(Exception):
    """A server did not start an attempt.

    kind: server (for a reason of its own, and perhaps later), useless (it would start no job at all), job (no server
    would start this one), busy (another attempt writes to the output directory), or base (the base model of the job is
    missing or damaged here, on the dispatcher's side).
    """

    def __init__(self, reason: str, kind: str = "server") -> None:
        super().__init__(reason)
        self.kind = kind

    def facts(self, attempt: str) -> dict[str, Any]:
        """Of the event `not_started`."""
        return {"attempt": attempt, "reason": str(self), "kind": self.kind}


@dataclass(frozen=True)
class Order:
    """What a server needs to start an attempt."""

    attempt: str
    job: Job
    slots: Sequence[int]
    gpus: Sequence[int]
    arguments: Sequence[str]  # of the script
    title: str
    after: str = ""  # the attempt that trains its base model, and has to succeed first


class Server(Protocol):
    """What the dispatcher needs of a server; each call raises Unreachable when the connection is lost."""

    name: str
    room: Room
    watches_gpus: bool
    queues_dependents: bool  # whether it takes an attempt whose base model is still trained there

    async def connect(self, post: Callable[[Event], None]) -> str:
        """Be ready for the other calls; later events are posted. Returns a note for people. Raises Refused."""

    async def lost(self) -> str:
        """Return, with the reason, when the connection is lost."""

    async def look(self, attempts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """The state of attempts (name -> output directory), and watch those that run."""

    async def start(self, order: Order) -> dict[str, Any]:
        """Raises NotStarted."""

    async def stop(self, attempt: str, kill: bool) -> None:
        """The event `ended` follows."""

    async def have_base(self, digest: str) -> int:
        """Have a base model of the cache there, verified. Returns the bytes copied. Raises NotStarted and OSError."""

    async def remove_output(self, output: str) -> None:
        """Remove an output directory there, where it is not the one here. Raises OSError."""

    async def bring(self, attempt: Attempt, job: Job) -> None:
        """Copy the results here. Raises OSError."""

    async def send(self, output: str) -> None:
        """Copy the results of an earlier attempt there. Raises OSError."""

    async def gpus(self) -> list[dict[str, Any]]:
        """Memory and processes of the GPUs, in MiB."""

    async def close(self, finished: bool) -> None:
        """Give the connection up. finished: the list is, too."""

    def follow_command(self, attempt: Attempt, once: bool = False) -> list[str]:
        """A program that prints the log of an attempt until its end; once: what is there now."""


@dataclass(frozen=True)
class Event:
    """Something that happened."""

    kind: str
    server: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Policy:
    """What a person chose."""

    max_failures: int | None = None
    fail_fast: bool = False
    lost_after: float = 600.0  # seconds without a connection, after which the jobs of a server run elsewhere
    gpu_free_mib: int | None = None
    drain: bool = False  # start nothing; end when all requests to cancel are settled
    barrier: bool = False  # no experiment starts before all base models are trained
    evict: bool = False  # base models that are in the cache leave the output directory in which they were trained


@dataclass
class Link:
    """The dispatcher's knowledge of a server."""

    server: Server
    state: str = "connecting"  # connecting, ready, unreachable, refused
    reason: str = ""
    since: float = field(default_factory=time.monotonic)  # of this state
    strikes: int = 0
    closed_until: float = 0.0
    gpus_seen: bool = False
    note: str = ""

    @property
    def usable(self) -> bool:
        """Whether it may get jobs, now or when it is connected."""
        return self.state != "refused" and self.strikes < STRIKES


class Dispatcher:
    """One job list, from now to its end."""

    def __init__(
        self, journal: Journal, state: State, jobs: Sequence[Job], servers: Sequence[Server], policy: Policy,
        *, say: Callable[[str], None] = lambda _: None, changed: Callable[[], None] = lambda: None,
        cache: Cache | None = None,
    ) -> None:  # fmt: skip
        """say: print a line for people. changed: the state has changed. cache: needed for jobs with base models."""
        self.journal, self.state, self.policy = journal, state, policy
        self.jobs = {job.id: job for job in jobs}
        self.links = {server.name: Link(server) for server in servers}
        self.rooms = {server.name: server.room for server in servers}
        self.queue = Queue()
        self.interrupted = ""
        self.trouble = ""  # why nothing can be written here
        self._say, self._changed = say, changed
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._actions: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._began = time.monotonic()
        self._connecting: list[Link] = []  # to servers that have jobs of an earlier dispatcher
        self._unlisted: set[str] = set()  # servers of running jobs that are not in the cluster config any more
        self._early = 0  # failures in a row
        self._failing: set[str] = set()  # jobs that have failed, and whose results are still to be copied
        self._usual = usual_seconds(jobs)
        self._avoided: dict[str, frozenset[str]] = {}
        self._placing = True  # something has changed that may let a job start
        self._starting: set[str] = set()  # attempts whose start is under way: what a server knows of them is old
        self._stopping: set[str] = set()  # attempts that were told to stop
        self._seated: defaultdict[str, dict[str, Attempt]] = defaultdict(dict)  # server -> attempts that hold slots
        self._cancelling = True  # a job that waits may have to be cancelled
        self.cache = cache
        self._claiming: set[str] = set()  # digests of base models for whose lock is asked
        self._claimed: dict[str, str] = {}  # digest -> ready (in the cache) or train (this list is to train it)
        # Jobs that wait for a base model, by its digest and their ids.
        self._waiting_for_base: defaultdict[str, dict[str, JobState]] = defaultdict(dict)
        self._busy: set[str] = set()  # jobs of which was said that another attempt writes to their output directory

    # ---------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Until nothing is left to do, or interrupt()."""
        for attempt in self._left_behind():
            self._occupy(attempt)
        for job in list(self.state.unfinished()):
            if job.job.trains:
                self._claim(job.job.trains)
            if job.state == "waiting":
                self._enqueue(job)
            elif job.state == "ending" and job.last:
                self._count(job, job.last)
                self._after_end(job, job.last)
        self._answer_requests()
        self._unlisted = self._unlisted_servers()
        for server in sorted(self._unlisted):
            self._say(
                f"{server}: no longer in the cluster config; its jobs run elsewhere in {self.policy.lost_after:.0f} s"
            )
        busy = {attempt.server for attempt in self._left_behind()}
        self._connecting = [link for name, link in self.links.items() if name in busy]
        for link in self.links.values():
            self._spawn(self._keep_connected(link, first=link in self._connecting))
        try:
            while not self._over():
                self._step()
                if not self._over():  # with what was just committed
                    await self._take_events()
        finally:
            await self._leave()

    def interrupt(self, reason: str) -> None:
        """End soon; jobs go on."""
        self.interrupted = self.interrupted or reason
        self.post(Event("wake"))

    def post(self, event: Event) -> None:
        """Add an event."""
        self._events.put_nowait(event)

    async def _take_events(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            self._handle(await asyncio.wait_for(self._events.get(), TICK))
        while not self._events.empty():
            self._handle(self._events.get_nowait())

    def _handle(self, event: Event) -> None:
        getattr(self, f"_on_{event.kind}")(event)

    def _on_wake(self, event: Event) -> None:
        pass

    def _step(self) -> None:
        """Requests, the clock, new starts; then everything is committed and carried out."""
        self._answer_requests()
        self._look_at_clock()
        self._cancel_waiting()
        self._look_at_bases()
        if self._placing and not (self.state.paused or self.policy.drain or self.interrupted):
            self._place()
        self._commit()

    def _commit(self) -> None:
        try:
            self.journal.commit()
        except OSError as error:
            if not self.trouble:
                self._say(f"{self.journal.path}: {error.strerror}: nothing new is started until it can be written")
            self.trouble = f"{self.journal.path}: {error.strerror}"
            return
        if self.trouble:
            self._say(f"{self.journal.path}: written again")
            self.trouble = ""
        actions, self._actions = self._actions, []
        for action in actions:
            self._spawn(action())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._events.put_nowait(Event("broken", facts={"error": error}))

    def _on_broken(self, event: Event) -> None:
        raise event.facts["error"]

    def _record(self, event: str, **facts: Any) -> None:
        self.state.apply(self.journal.add(event, **facts))
        self._changed()

    async def _leave(self) -> None:
        """Give up the connections; whatever was decided is in the journal."""
        with contextlib.suppress(OSError):
            self.journal.commit()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        finished = not any(True for _ in self.state.unfinished())
        closing = [link.server.close(finished) for link in self.links.values()]
        await asyncio.gather(*closing, return_exceptions=True)

    def _over(self) -> bool:
        if self.interrupted:
            return True
        if self.journal.pending or self._actions:
            return False
        counts = self.state.counts
        busy = counts["running"] + counts["ending"]
        if self.policy.drain:
            servers = {each.server for each in self.state.given_up()} & set(self.links)
            ending = any(self.links[server].state in ("connecting", "ready") for server in servers)
            return not ending and not any(job.cancel for job in self.state.unfinished())
        if not counts["waiting"] and not busy:
            return True
        return bool(self.state.paused) and not busy

    # ---------------------------------------------------------------- servers

    async def _keep_connected(self, link: Link, first: bool) -> None:
        """Connect, again and again; posts what comes of it.

        Servers that have jobs of ours come first: of two names of one machine, only one is used.
        """
        server, failures = link.server, 0
        while not first and any(each.state == "connecting" for each in self._connecting):
            await asyncio.sleep(0.1)
        while True:
            try:
                note = await server.connect(self.post)
                mine = {each.name: self.state.jobs[each.job].job.output for each in self._attempts_on(server.name)}
                found = await server.look(mine)
            except Refused as error:
                self.post(Event("refused", server.name, {"reason": str(error)}))
                return
            except (Unreachable, OSError) as error:
                self.post(Event("unreachable", server.name, {"reason": str(error)}))
                await asyncio.sleep(BACKOFF[min(failures, len(BACKOFF) - 1)])
                failures += 1
                continue
            failures = 0
            self.post(Event("connected", server.name, {"note": note, "attempts": found}))
            watching = asyncio.ensure_future(self._watch_gpus(link)) if server.watches_gpus else None
            try:
                reason = await server.lost()
            finally:
                if watching:
                    watching.cancel()
            self.post(Event("unreachable", server.name, {"reason": reason}))

    def _left_behind(self) -> list[Attempt]:
        """Attempts that may still be on their servers."""
        return [*self.state.open.values(), *self.state.given_up()]

    def _attempts_on(self, server: str) -> list[Attempt]:
        return [attempt for attempt in self._left_behind() if attempt.server == server]

    async def _watch_gpus(self, link: Link) -> None:
        with contextlib.suppress(Unreachable):
            while True:
                self.post(Event("gpus", link.server.name, {"gpus": await link.server.gpus()}))
                await asyncio.sleep(GPU_LOOK)

    def _on_connected(self, event: Event) -> None:
        link = self.links[event.server]
        link.state, link.reason, link.since, link.strikes = "ready", "", time.monotonic(), 0
        link.note = event.facts["note"]
        self._say(f"{event.server}: connected" + (f"; {link.note}" if link.note else ""))
        for name, found in event.facts["attempts"].items():
            self._adopt(link, name, found)
        self._open_room(link)
        self._changed()

    def _adopt(self, link: Link, name: str, found: Mapping[str, Any]) -> None:
        """What a server knows of an attempt, after a time in which nobody asked."""
        attempt = self.state.attempt(name)
        if attempt is None or attempt.state == "ended":  # reported a moment before
            return
        if attempt.state == "lost":  # given up while the server could not be reached
            if found["state"] == "running":
                self._say(f"{link.server.name}: {self._name(attempt)} still ran there: stopping it, as it was given up")
                self._stop(attempt, kill=True)
            else:
                self._gone(attempt)
        elif found["state"] == "running":
            self._note_running(attempt, found)
            self._say(f"{link.server.name}: {self._name(attempt)} still {'runs' if attempt.process else 'waits there'}")
            self._stopping.discard(name)  # an older host.py was told; this one has to see to it
            if self.state.jobs[attempt.job].cancel:
                self._stop(attempt)
        elif found["state"] == "ended":
            self._end(attempt, found)
        elif name in self._starting:  # its reply follows
            pass
        elif attempt.state == "starting":
            self._free(attempt)
            self._record("not_started", attempt=name, reason="the connection was lost before it was started")
            self._enqueue(self.state.jobs[attempt.job])
        else:
            self._lose(attempt, "server lost", f"nothing of it is left on {link.server.name}: were its files removed?")
            self._gone(attempt)

    def _gone(self, attempt: Attempt) -> None:
        self._record("gone", attempt=attempt.name)
        self._free(attempt)

    def _on_unreachable(self, event: Event) -> None:
        link = self.links[event.server]
        if link.state != "unreachable":
            self._say(f"{event.server}: unreachable: {event.facts['reason']}; trying again")
            link.since = time.monotonic() if link.state == "ready" else link.since
        link.state, link.reason, link.gpus_seen = "unreachable", event.facts["reason"], False
        self._open_room(link)
        self._changed()

    def _on_refused(self, event: Event) -> None:
        link = self.links[event.server]
        link.state, link.reason = "refused", event.facts["reason"]
        self._say(f"{event.server}: not used: {link.reason}")
        self._open_room(link)
        self._changed()

    def _on_gpus(self, event: Event) -> None:
        link = self.links[event.server]
        used = {slot.gpu for slot in link.server.room.slots if slot.index not in link.server.room.free}
        blocked = {gpu["index"] for gpu in event.facts["gpus"] if gpu["index"] not in used and self._is_used(gpu)}
        if blocked != link.server.room.blocked:
            self._say_gpus(link, blocked)
            link.server.room.blocked = frozenset(blocked)
        link.gpus_seen = True
        self._open_room(link)

    def _is_used(self, gpu: Mapping[str, Any]) -> bool:
        if self.policy.gpu_free_mib is not None:
            return bool(gpu["memory"] - gpu["used"] < self.policy.gpu_free_mib)
        return bool(gpu["used"] > USED_BY_OTHERS)

    def _say_gpus(self, link: Link, blocked: set[int]) -> None:
        ours = {slot.gpu for slot in link.server.room.slots if slot.gpu is not None}
        if new := sorted((blocked - link.server.room.blocked) & ours):
            self._say(f"{link.server.name}: GPU {', '.join(map(str, new))}: used by somebody else; waiting for it")
        if gone := sorted((link.server.room.blocked - blocked) & ours):
            self._say(f"{link.server.name}: GPU {', '.join(map(str, gone))}: free again")

    def _open_room(self, link: Link) -> None:
        ready = link.state == "ready" and link.usable and time.monotonic() >= link.closed_until
        link.server.room.open = ready and (link.gpus_seen or not link.server.watches_gpus)
        self._placing = True
        self._requeue_avoided()

    # ---------------------------------------------------------------- starting

    def _place(self) -> None:
        self._placing = False
        for job_id, server, slots in self.queue.place(self.rooms):
            job = self.state.jobs[job_id]
            self._avoided.pop(job_id, None)
            gpus = [slot.gpu for slot in slots if slot.gpu is not None]
            name = f"{job_id}.{job.next_number}"
            more = {"after": after} if (after := self._training_of(self.jobs[job_id])) else {}
            self._record("start", attempt=name, server=server, slots=[slot.index for slot in slots], gpus=gpus, **more)
            attempt = job.attempts[-1]
            self._occupy(attempt)
            self._actions.append(lambda attempt=attempt: self._start(attempt))  # type: ignore[misc]

    async def _start(self, attempt: Attempt) -> None:
        if attempt.name not in self.state.open:  # given back while the journal could not be written
            return
        self._starting.add(attempt.name)
        try:
            await self._start_there(attempt)
        finally:
            self._starting.discard(attempt.name)

    async def _start_there(self, attempt: Attempt) -> None:
        server, job = self.links[attempt.server].server, self.jobs[attempt.job]
        order = Order(
            attempt.name, job, attempt.slots, attempt.gpus,
            arguments(job, "cuda:0" if attempt.gpus else "cpu"), self._title(attempt), attempt.after,
        )  # fmt: skip
        try:
            if any(earlier.server != attempt.server for earlier in self.state.jobs[job.id].attempts):
                try:
                    await server.send(job.output)
                except Unreachable as error:  # so it was not started for certain
                    raise NotStarted(str(error)) from None
            if job.base and not attempt.after:
                await self._have_base(server, job.base)
            found = await server.start(order)
        except NotStarted as error:
            self.post(Event("not_started", attempt.server, error.facts(attempt.name)))
        except OSError as error:
            self.post(Event("not_started", attempt.server, NotStarted(str(error)).facts(attempt.name)))
        except Unreachable:
            pass  # whether it was started is asked for when the server is there again
        else:
            self.post(Event("started", attempt.server, {"attempt": attempt.name, **found}))

    def _on_started(self, event: Event) -> None:
        attempt = self.state.open.get(event.facts["attempt"])
        link = self.links[event.server]
        link.strikes = 0
        if attempt is None:
            return
        if event.facts["state"] == "ended":
            self._end(attempt, event.facts)
        elif self._note_running(attempt, event.facts) and self.state.jobs[attempt.job].cancel:
            self._stop(attempt)

    def _note_running(self, attempt: Attempt, found: Mapping[str, Any]) -> bool:
        """Whether that is news. An attempt that waits in a queue of its server has no process yet."""
        process = process_of(found)
        news = attempt.state != "running" or bool(process and not attempt.process)
        if news:
            self._record("running", attempt=attempt.name, process=process)
        return news

    def _on_waits(self, event: Event) -> None:
        if attempt := self.state.open.get(event.facts["attempt"]):
            self._record("waits", attempt=attempt.name, reason=event.facts["reason"])

    def _on_not_started(self, event: Event) -> None:
        attempt = self.state.open.get(event.facts["attempt"])
        if attempt is None:
            return
        reason, kind, job = event.facts["reason"], event.facts["kind"], self.state.jobs[attempt.job]
        self._free(attempt)
        if kind == "job":
            self._record("ended", attempt=attempt.name, failure="refused", reason=reason)
            self._count(job, attempt)
            self._after_end(job, attempt)
            return
        self._record("not_started", attempt=attempt.name, reason=f"{event.server}: {reason}")
        self._cancelling = True
        if kind != "busy" or job.job.id not in self._busy:
            self._say(f"{event.server}: {self._name(attempt)} was not started: {reason}")
        if kind == "busy":
            self._busy.add(job.job.id)
            self._spawn(self._enqueue_later(job))
        elif kind == "base":
            if self._claimed.get(job.job.base) == "ready":
                del self._claimed[job.job.base]
            self._enqueue(job)
        else:
            self._enqueue(job)
            self._strike(self.links[event.server], reason, always=kind == "useless")

    async def _enqueue_later(self, job: JobState) -> None:
        await asyncio.sleep(COOLING)
        self.post(Event("again", facts={"job": job.job.id}))

    def _on_again(self, event: Event) -> None:
        job = self.state.jobs[event.facts["job"]]
        if job.state == "waiting" and job.job.id not in self.queue:
            self._enqueue(job)

    def _strike(self, link: Link, reason: str, always: bool) -> None:
        """No jobs for a while, and none any more after STRIKES; what runs there goes on."""
        if link.usable and time.monotonic() >= link.closed_until:  # jobs that were refused together count as one
            link.strikes = STRIKES if always else link.strikes + 1
            link.closed_until = time.monotonic() + COOLING * link.strikes
            if link.strikes >= STRIKES:
                link.reason = f"gets no more jobs: {reason}"
                self._say(f"{link.server.name}: {link.reason}")
        self._open_room(link)

    def _enqueue(self, job: JobState) -> None:
        """Let it wait for a slot; it ends here when it is no longer in the list."""
        if job.job.id not in self.jobs:
            self._record("settle", job=job.job.id, state="cancelled", reason=UNLISTED)
            return
        self._cancelling |= job.cancel
        avoid = self._to_avoid(job)
        if job.attempts:
            self._avoided[job.job.id] = avoid
        real = self.jobs[job.job.id]
        if self._must_wait(real):
            return
        self.queue.put(real, job.number, self._usual, avoid)
        self._placing = True

    def _to_avoid(self, job: JobState) -> frozenset[str]:
        """Servers on which it has failed, where it could run on another one."""
        failed = frozenset(each.server for each in job.attempts[job.forgiven :] if each.failure)
        others = failed and any(name not in failed and self._could_run(job.job, name) for name in self.rooms)
        return failed if others else frozenset()

    def _could_run(self, job: Job, server: str) -> bool:
        room = self.rooms[server]
        fits = frozenset(job.options.labels) <= room.labels and job.options.gpus <= room.capacity()
        return fits and self.links[server].usable

    def _requeue_avoided(self) -> None:
        """Whether another server could take a job that has failed may have changed."""
        for job_id, avoid in list(self._avoided.items()):
            if job_id in self.queue and self._to_avoid(self.state.jobs[job_id]) != avoid:
                self.queue.remove(job_id)
                self._enqueue(self.state.jobs[job_id])

    # ---------------------------------------------------------------- ending

    def _on_ended(self, event: Event) -> None:
        attempt = self.state.attempt(event.facts["attempt"])
        if attempt is None:
            return
        if attempt.state == "lost":
            self._gone(attempt)
        elif attempt.open:
            self._end(attempt, event.facts)

    def _on_progress(self, event: Event) -> None:
        attempt = self.state.open.get(event.facts["attempt"])
        if attempt:
            self.state.jobs[attempt.job].metrics |= event.facts["metrics"]
            self._changed()

    def _end(self, attempt: Attempt, end: Mapping[str, Any]) -> None:
        job = self.state.jobs[attempt.job]
        if self._base_training_failed(attempt, end) and not job.cancel:
            self._free(attempt)
            self._record("not_started", attempt=attempt.name, reason="its base model was not trained")
            self._enqueue(job)
            return
        failure, reason = judge(end, job.cancel)
        kept = {key: end[key] for key in ("code", "started", "ended", "peak_memory", "lines", "metrics") if key in end}
        self._free(attempt)
        self._record("ended", attempt=attempt.name, failure=failure, reason=reason, **kept)
        self._count(job, attempt)
        self._after_end(job, attempt)

    def _lose(self, attempt: Attempt, failure: str, reason: str) -> None:
        """Give an attempt up. Its slots stay taken until its server says that it is gone."""
        known = {"ended": attempt.end, "code": attempt.code, "peak_memory": attempt.peak_memory, "lines": attempt.lines}
        self._record("lost", attempt=attempt.name, failure=failure, reason=reason, **known)
        self._after_end(self.state.jobs[attempt.job], attempt)

    def _after_end(self, job: JobState, attempt: Attempt) -> None:
        """Its results are copied, then it is decided how it goes on."""
        if attempt.state == "lost" or attempt.failure == "refused":
            self._settle(job, attempt)
        else:
            self._actions.append(lambda: self._bring(job, attempt))

    async def _bring(self, job: JobState, attempt: Attempt) -> None:
        link = self.links.get(attempt.server)
        told = proof = fault = ""
        tries = 0
        while job.state == "ending" and job.last is attempt:
            if not link:
                await asyncio.sleep(1.0)
            elif link.state == "ready":
                try:
                    publishes = bool(job.job.trains and not attempt.failure)
                    if publishes and job.job.trains not in self._claimed:  # another list may write this directory now
                        await asyncio.sleep(TICK)
                        continue
                    await link.server.bring(attempt, job.job)
                    if publishes:
                        await self._publish(link.server, job, attempt)
                    if attempt.failure == "cancelled":
                        proof = await self._proof(link.server, attempt)
                    break
                except BaseModelError as error:
                    fault = str(error)
                    break
                except (Unreachable, OSError) as error:
                    if str(error) != told:
                        told = str(error)
                        self._say(f"{self._name(attempt)}: its results cannot be copied: {told}; trying again")
                await asyncio.sleep(BACKOFF[min(tries, len(BACKOFF) - 1)])
                tries += 1
            else:
                await asyncio.sleep(1.0)
        facts = {"job": job.job.id, "attempt": attempt.name, "proof": proof, "fault": fault}
        self.post(Event("brought", attempt.server, facts))

    async def _proof(self, server: Server, attempt: Attempt) -> str:
        """That nothing of a cancelled attempt is left: its supervisor has ended only when no process was."""
        if not (attempt.gpus and server.watches_gpus):
            return "no process of it is left"
        used = {gpu["index"]: gpu["used"] for gpu in await server.gpus()}
        shown = ", ".join(f"GPU {gpu}: {used[gpu]} MiB in use" for gpu in attempt.gpus if gpu in used)
        return f"no process of it is left; {shown}"

    def _on_brought(self, event: Event) -> None:
        job = self.state.jobs[event.facts["job"]]
        if job.state == "ending" and job.last and job.last.name == event.facts["attempt"]:
            if event.facts["fault"]:
                self._record("unfit", attempt=job.last.name, failure="no base model", reason=event.facts["fault"])
                self._count(job, job.last)
            self._settle(job, job.last, event.facts["proof"])

    def _settle(self, job: JobState, attempt: Attempt, proof: str = "") -> None:
        state, reason = self._verdict(job, attempt)
        if proof:
            reason = f"{reason}; {proof}"
        self._record("settle", job=job.job.id, state=state, reason=reason)
        self._tell(job, attempt, state, reason)
        if state == "waiting":
            self._enqueue(job)
        self._cancelling |= job.cancel
        self._failing.discard(job.job.id)

    def _verdict(self, job: JobState, attempt: Attempt) -> tuple[str, str]:
        """(state, reason) of a job after an attempt."""
        if not attempt.failure:
            return "done", ""
        if job.cancel and attempt.state == "lost":
            return "cancelled", f"cancelled on request, but {attempt.reason}: what ran there may still run"
        if job.cancel or attempt.failure == "cancelled":
            return "cancelled", "cancelled on request"
        retries = self.jobs[job.job.id].options.retries if job.job.id in self.jobs else 0
        reason = f"attempt {attempt.number} on {attempt.server}: {attempt.how}"
        final = attempt.failure in FINAL_FAILURES
        if final or len(job.failures()) > retries or len(job.lost()) >= MOST_LOST:
            return "failed", reason
        if job.job.id not in self.jobs:
            return "cancelled", UNLISTED
        return "waiting", reason

    def _count(self, job: JobState, attempt: Attempt) -> None:
        """Failures that stop the whole list: before the slot of this one is used again."""
        fails = self._verdict(job, attempt)[0] == "failed"
        if fails:
            self._failing.add(job.job.id)
        if attempt in job.failures() and attempt.failure != "cancelled":
            early = (attempt.seconds or 0.0) < EARLY
            self._early = self._early + 1 if early else 0
        elif not attempt.failure:
            self._early = 0
        if self.state.paused:
            return
        failed = self.state.counts["failed"] + len(self._failing)
        if self.policy.fail_fast and fails:
            self._pause(f"--fail-fast: {job.job.name} failed")
            others = [each.job.id for each in self.state.unfinished() if each is not job]
            self._ask("--fail-fast", "cancel", others)
        elif fails and self._too_many_failures(failed):
            pass
        elif self._early >= EARLY_FAILURES:
            self._pause(
                f"{self._early} attempts in a row failed within {EARLY:.0f} s, the last: "
                f"{attempt.how}; mend the cause, then `retry failed` and `resume`"
            )

    def _too_many_failures(self, failed: int) -> bool:
        """Whether so many failed jobs pause the list."""
        most = self.policy.max_failures
        if most is None or failed < most or self.state.paused:
            return False
        self._pause(f"--max-failures {most}: {failed} job{'s' * (failed != 1)} failed")
        return True

    def _pause(self, reason: str) -> None:
        self._record("pause", reason=reason)
        self._early = 0
        self._say(f"paused: {reason}")

    def _tell(self, job: JobState, attempt: Attempt, state: str, reason: str) -> None:
        took = f" after {attempt.seconds:.1f} s" if attempt.seconds is not None else ""
        if state == "done":
            self._say(f"done: {job.job.name} on {self._title_place(attempt)}{took}")
        elif state == "waiting":
            self._say(f"retry: {job.job.name}: attempt {attempt.number} on {attempt.server}{took}: {attempt.how}")
        elif state == "cancelled":
            self._say(f"cancelled: {job.job.name} on {self._title_place(attempt)}{took}: {reason}")
        else:
            self._say(f"failed: {job.job.name} on {self._title_place(attempt)}{took}: {attempt.how}")

    # ---------------------------------------------------------------- cancelling

    def _answer_requests(self) -> None:
        new = [*self.journal.records, *self.journal.requests()]
        self.journal.records = []
        for request in unanswered(self.state, new):
            try:
                jobs = chosen(self.state, request["event"], request["jobs"])
            except ValueError as error:
                self._say(str(error))
                jobs = []
            self._ask(request_id(request), request["event"], jobs)

    def _ask(self, request: str, what: str, jobs: list[str]) -> None:
        """Cancel jobs that have not ended, or retry jobs that have."""
        jobs = self._with_bases(jobs) if what == "retry" else jobs
        final = {job for job in jobs if self.state.jobs[job].state in FINAL}
        self._record("asked", request=request, what=what, jobs=jobs)
        for job in map(self.state.jobs.__getitem__, jobs):
            if what == "retry" and job.job.id in final and job.state == "waiting":
                self._enqueue(job)
            elif what == "cancel" and job.cancel:
                self._cancelling = True
                for attempt in [each for each in job.attempts if each.state == "running"]:
                    self._stop(attempt)

    def _cancel_waiting(self) -> None:
        if not self._cancelling:
            return
        self._cancelling = False
        for job in [each for each in self.state.unfinished() if each.cancel and each.state == "waiting"]:
            self.queue.remove(job.job.id)
            self._record("settle", job=job.job.id, state="cancelled", reason="cancelled on request")
            self._say(f"cancelled: {job.job.name} before it was started")

    def _stop(self, attempt: Attempt, kill: bool = False) -> None:
        if attempt.name not in self._stopping:
            self._stopping.add(attempt.name)
            self._actions.append(lambda: self._send_stop(attempt, kill))

    async def _send_stop(self, attempt: Attempt, kill: bool) -> None:
        try:
            await self.links[attempt.server].server.stop(attempt.name, kill)
        except Unreachable:  # asked again when the server is there
            self._stopping.discard(attempt.name)

    # ---------------------------------------------------------------- base models

    def _must_wait(self, job: Job) -> bool:
        """Whether a job waits for its base model, or one that trains a base model for its lock."""
        digest = job.trains or job.base
        if not digest:
            return False
        self._claim(digest)
        if job.trains:
            return self._claimed.get(digest) != "train"
        if self._claimed.get(digest) == "ready" and not self._blocked_by_barrier():
            return False
        if self._training_of(job):
            return False
        self._waiting_for_base[digest][job.id] = self.state.jobs[job.id]
        return True

    def _training_of(self, job: Job) -> str:
        """The attempt that trains its base model now, where a server takes the job already; else empty."""
        trainer = self.state.trainers.get(job.base)
        if not trainer or not trainer.last or self._claimed.get(job.base) == "ready" or self.policy.barrier:
            return ""
        last, link = trainer.last, self.links.get(trainer.last.server)
        waits = last.state == "running" and link is not None and link.server.queues_dependents
        return last.name if waits and not trainer.cancel else ""

    def _base_training_failed(self, attempt: Attempt, end: Mapping[str, Any]) -> bool:
        """Whether it never ran, as the attempt that was to train its base model has failed."""
        training = self.state.attempt(attempt.after) if attempt.after else None
        never_ran = end.get("code") is None and not attempt.process
        return training is not None and never_ran and (training.open or bool(training.failure))

    def _blocked_by_barrier(self) -> bool:
        unfinished = (each for each in self.state.trainers.values() if each.state not in FINAL)
        return self.policy.barrier and any(True for _ in unfinished)

    def _claim(self, digest: str) -> None:
        """Lock a base model, to use or to train it; the event `claimed` follows."""
        if digest not in self._claiming and digest not in self._claimed and not self.policy.drain:
            self._claiming.add(digest)
            self._spawn(self._ask_for_lock(digest))

    async def _ask_for_lock(self, digest: str) -> None:
        assert self.cache
        reported = ""
        while True:
            try:
                found = await asyncio.to_thread(self.cache.claim, digest)
            except OSError as error:
                found, reason = "busy", f"{error.filename}: {error.strerror}"
            else:
                reason = "locked by another list, which trains or copies it"
            if found != "busy":
                break
            if reason != reported:
                reported = reason
                self._say(f"base {hash_of(digest)}: {reason}; waiting")
            await asyncio.sleep(LOCKED)
        self.post(Event("claimed", facts={"digest": digest, "found": found}))

    def _on_claimed(self, event: Event) -> None:
        digest, found = event.facts["digest"], event.facts["found"]
        self._claiming.discard(digest)
        self._claimed[digest] = found
        trainer = self.state.trainers.get(digest)
        if trainer is None:
            return
        if found == "ready" and trainer.state == "waiting":
            self._record("settle", job=trainer.job.id, state="done", reason="its base model was in the cache")
            self._say(f"done: {trainer.job.name}: its base model was in the cache")
        elif found == "train" and trainer.state == "done":
            self._record("again", job=trainer.job.id, reason="its base model is missing or damaged")
            self._say(f"base {hash_of(digest)}: missing or damaged; training it again")
            self._enqueue(trainer)
        elif found == "train" and trainer.state == "waiting":
            self._enqueue(trainer)

    def _look_at_bases(self) -> None:
        """Let experiments go on whose base model is there, and fail those whose base model cannot come."""
        for digest, trainer in self.state.trainers.items():
            if trainer.state in ("failed", "cancelled") and self._claimed.pop(digest, ""):
                assert self.cache
                self.cache.release(digest)
        for digest in [digest for digest, jobs in self._waiting_for_base.items() if jobs]:
            found, known = self._claimed.get(digest), self.state.trainers.get(digest)
            first = next(iter(self._waiting_for_base[digest].values())).job
            if (found == "ready" and not self._blocked_by_barrier()) or self._training_of(first):
                for job in self._take_waiting_for(digest):
                    self._enqueue(job)
            elif known and known.state in ("failed", "cancelled"):
                self._fail_waiting_for(digest, f"base {hash_of(digest)} {known.state}")
            elif not known and found == "train":
                self._fail_waiting_for(
                    digest, f"base {hash_of(digest)} is missing or damaged; train it without --skip-phase1"
                )

    def _take_waiting_for(self, digest: str) -> list[JobState]:
        """The jobs that wait for a base model, and were not cancelled meanwhile."""
        return [job for job in self._waiting_for_base.pop(digest).values() if job.state == "waiting" and not job.cancel]

    def _fail_waiting_for(self, digest: str, reason: str) -> None:
        for job in self._take_waiting_for(digest):
            self._record("settle", job=job.job.id, state="failed", reason=reason)
            self._say(f"failed: {job.job.name}: {reason}")
        self._too_many_failures(self.state.counts["failed"] + len(self._failing))

    def _with_bases(self, jobs: list[str]) -> list[str]:
        """A retry of jobs is also one of the jobs that train their base models, and the other way round."""
        failed = {job for job in jobs if self.state.jobs[job].state in ("failed", "cancelled")}
        digests = {self.state.jobs[job].job.trains or self.state.jobs[job].job.base for job in failed} - {""}
        again = set(jobs)
        for digest in digests:
            trainer = self.state.trainers.get(digest)
            if trainer and trainer.state in ("failed", "cancelled"):
                again.add(trainer.job.id)
                waited = f"base {hash_of(digest)} {trainer.state}"
                again |= {each.job.id for each in self.state.jobs.values() if each.reason == waited}
        return [job for job in self.state.jobs if job in again]

    async def _publish(self, server: Server, job: JobState, attempt: Attempt) -> None:
        """Take what a job has trained into the cache. Raises BaseModelError, OSError and Unreachable."""
        assert self.cache
        digest = job.job.trains
        facts = {"settings": dict(job.job.settings), "server": attempt.server, "seconds": attempt.seconds,
                 "created": attempt.end}  # fmt: skip
        await asyncio.to_thread(self.cache.publish, digest, job.job.output, **facts)
        self._claimed[digest] = "ready"
        server.room.bases.add(digest)  # it need not be copied there
        if self.policy.evict:
            try:
                await self._have_base(server, digest)
                await server.remove_output(job.job.output)
            except NotStarted as error:
                self._say(f"{server.name}: {job.job.output} stays there: {error}")

    async def _have_base(self, server: Server, digest: str) -> None:
        began = time.monotonic()
        copied = await server.have_base(digest)
        server.room.bases.add(digest)
        if copied:
            took = time.monotonic() - began
            self._say(f"{server.name}: base {hash_of(digest)} copied there ({copied / 1e6:.1f} MB in {took:.1f} s)")

    # ---------------------------------------------------------------- the clock and the slots

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        for link in self.links.values():
            if link.state == "ready" and 0 < link.closed_until <= now:
                link.closed_until = 0.0
                self._open_room(link)
            if link.state in ("unreachable", "refused") and now - link.since > self.policy.lost_after:
                self._give_up_on(link.server.name, f"could not be reached for {now - link.since:.0f} s")
        if self._unlisted and now - self._began > self.policy.lost_after:
            for server in self._unlisted:
                self._give_up_on(server, "is no longer in the cluster config")
            self._unlisted = set()
        self._give_up_without_servers()

    def _give_up_on(self, server: str, reason: str) -> None:
        """Its jobs run elsewhere, also those that have ended and whose results are still there."""
        for attempt in [each for each in self.state.open.values() if each.server == server]:
            self._lose(attempt, "server lost", f"{server} {reason}")
        for job in [each for each in self.state.unfinished() if each.state == "ending"]:
            last = job.last
            if last and last.server == server and last.failure:
                self._settle(job, last)
            elif last and last.server == server:
                self._lose(last, "server lost", f"{server} {reason}, and the results are there")

    def _unlisted_servers(self) -> set[str]:
        busy = {each.server for each in self.state.open.values()}
        busy |= {job.last.server for job in self.state.unfinished() if job.state == "ending" and job.last}
        return busy - set(self.links)

    def _give_up_without_servers(self) -> None:
        if self.state.paused or self.policy.drain or not self.state.counts["waiting"]:
            return
        if self.state.counts["running"] or self.state.counts["ending"]:
            return
        waiting = (each.job for each in self.state.unfinished() if each.state == "waiting")
        if not any(self._could_run(job, name) for job in waiting for name in self.links):
            self._pause("no server can be used for the jobs that wait; see the reasons above")

    def _occupy(self, attempt: Attempt) -> None:
        self._seated[attempt.server][attempt.name] = attempt
        if room := self.rooms.get(attempt.server):
            room.free -= room.taken_by(attempt.slots, attempt.gpus)

    def _free(self, attempt: Attempt) -> None:
        seated = self._seated[attempt.server]
        if seated.pop(attempt.name, None) and (room := self.rooms.get(attempt.server)):
            others = [room.taken_by(each.slots, each.gpus) for each in seated.values()]
            room.free |= room.taken_by(attempt.slots, attempt.gpus).difference(*others)
        self._placing = True

    # ---------------------------------------------------------------- names

    def _name(self, attempt: Attempt) -> str:
        return self.state.jobs[attempt.job].job.name

    def _title_place(self, attempt: Attempt) -> str:
        return f"{attempt.server}:{','.join(map(str, attempt.gpus or attempt.slots))}"

    def _title(self, attempt: Attempt) -> str:
        device = f"GPU {','.join(map(str, attempt.gpus))}" if attempt.gpus else f"slot {attempt.slots[0]}"
        again = f", attempt {attempt.number}" if attempt.number > 1 else ""
        return f"{self._name(attempt)} ({device}{again})"


def process_of(found: Mapping[str, Any]) -> dict[str, Any]:
    return {key: found[key] for key in ("pid", "start_time", "boot_id", "host") if key in found}
