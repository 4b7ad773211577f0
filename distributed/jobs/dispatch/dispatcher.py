"""Run a job list: place jobs on servers, monitor them, and return when no job is left to run.

A single asyncio task reads the event queue and handles every event. Each decision is a record: it is applied to the
state, committed to the journal, and only then executed. The jobs of an unreachable server are treated as running for
`lost_after` seconds; then they restart on other servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributed.jobs.journal.journal import Journal, Record, request_id
from distributed.jobs.journal.state import NOT_COPIED, UNLISTED, Attempt, JobState, ListState, classify_end, job_records
from distributed.jobs.lists.job import Job
from distributed.jobs.schedule import backend
from distributed.jobs.schedule.backend import Event, JobServer, NotStarted, ServerLink, ServerUnusable, Unreachable
from distributed.jobs.schedule.base_cache import Cache
from distributed.jobs.schedule.placement import JobQueue, mean_seconds
from distributed.jobs.schedule.waiting import WaitingJobs
from distributed.training.base_model import BaseModelError, hash_of

POLL_INTERVAL = 0.5  # seconds between checks of timeouts and of the journal
EARLY_FAILURE_SECONDS = 30.0  # a failure within this time suggests a fault of all jobs, such as a missing package
MAX_EARLY_FAILURES = 5  # consecutive early failures that pause the list
RETRY_DELAYS = (1.0, 2.0, 5.0, 10.0, 15.0)  # seconds before connecting, or copying results, is retried
FIRST_TIMEOUT = 60.0  # seconds in which servers that run jobs of a resumed list connect before the others
MAX_FAILED_COPIES = 6  # consecutive failures after which the results of an attempt are no longer copied
MAX_LOST_COPIES = 50  # used instead of MAX_FAILED_COPIES if the last failure is a lost connection
NO_SPACE = ("No space left on device", "Disk quota exceeded")  # errors after which copying is retried without a limit
# Seconds for which a server gets no new jobs, multiplied by the number of its failed starts. Also the seconds until a
# job is queued again after a NotStarted error of the kind "busy".
COOLDOWN = 10.0
GPU_INTERVAL = 10.0  # seconds between queries of GPU memory
SHOWN = 5  # maximum number of names in a message
GPU_IN_USE_MIB = 1000  # if more is in use on a GPU without a job of this list, another process uses the GPU


@dataclass(frozen=True)
class Policy:
    """The user's options for the dispatcher."""

    max_failures: int | None = None  # number of failed jobs that pauses the list; None: no limit
    fail_fast: bool = False
    lost_after: float = 600.0  # seconds without a connection after which the jobs of a server restart elsewhere
    gpu_free_mib: int | None = None  # MiB that must be free on a GPU; None: see GPU_IN_USE_MIB
    drain: bool = False  # start no jobs; return when all requests to cancel are done
    evict: bool = False  # remove the output directory of a training once its base model is in the cache


class Dispatcher:
    """The dispatcher of one job list."""

    def __init__(
        self, journal: Journal, state: ListState, jobs: Sequence[Job], links: Mapping[str, ServerLink], policy: Policy,
        *, log: Callable[[str], None] = lambda _: None, on_change: Callable[[], None] = lambda: None,
        cache: Cache | None = None, read_added: Callable[[list[Job], str], list[Job]] = lambda *_: [],
        notify: Callable[..., None] = lambda *_, **__: None,
    ) -> None:  # fmt: skip
        """log: prints a line. on_change: called after each change of state. cache: required for base models.

        read_added: takes the jobs and the path of a jobs file; returns the jobs to add. Raises ValueError and OSError.
        notify: see launch.notify: Notifier.send().
        """
        self.journal, self.state, self.policy = journal, state, policy
        self.jobs = {job.id: job for job in jobs}
        self.links = links
        self.pools = {name: link.server.pool for name, link in links.items()}
        self.queue = JobQueue()
        self.interrupted = ""
        self.journal_error = ""  # why the journal cannot be written
        self._log, self._on_change, self._read_added, self._notify = log, on_change, read_added, notify
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._actions: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._started_at = time.monotonic()
        self._others_connect = asyncio.Event()  # servers that run no jobs of this list yet may connect
        self._unlisted_servers: set[str] = set()  # with running or ending jobs, but not in the cluster config
        self._early_failures = 0  # consecutive early failures
        self._failing: set[str] = set()  # failed jobs whose results are not copied yet
        self._mean_seconds = mean_seconds(jobs)
        self._avoided: dict[str, frozenset[str]] = {}  # job -> servers on which it failed
        self._placement_due = True  # whether _place() may find a job that can start
        self._starting: set[str] = set()  # attempts being started; the reply to a query may not include them yet
        self._stopping: set[str] = set()  # attempts with a stop request
        self._slot_holders: defaultdict[str, dict[str, Attempt]] = defaultdict(dict)  # attempts by server, then by name
        self._cancellation_due = True  # whether _cancel_waiting() may find a job to cancel
        self.cache = cache
        self._waiting = WaitingJobs(
            state, links, cache, log=log, record=self._record, enqueue=self._enqueue, spawn=self._spawn, post=self.post
        )
        self._busy_logged: set[str] = set()  # jobs for which a NotStarted error of the kind "busy" was logged

    # ---------------------------------------------------------------- event loop

    async def run(self) -> None:
        """Run until no job is left to run, until the list is paused and no job runs, or until interrupt() is called.

        With drain, return when all cancel requests are done, even if other jobs still run.
        """
        for attempt in self._unended_attempts():
            self._occupy_slots(attempt)
        for job in list(self.state.unfinished()):
            if job.job.trains and not self.policy.drain:
                self._waiting.claim(job.job.trains)
            if job.state == "waiting":
                self._enqueue(job)
            elif job.state == "ending" and job.last:
                self._count_failure(job, job.last)
                self._after_end(job, job.last)
        self._handle_requests()
        servers = {each.server for each in self.state.open.values()}
        servers |= {job.last.server for job in self.state.unfinished() if job.state == "ending" and job.last}
        self._unlisted_servers = servers - set(self.links)
        for server in sorted(self._unlisted_servers):
            restart = f"its jobs restart elsewhere after {self.policy.lost_after:.0f} s"
            self._log(f"{server}: no longer in the cluster config; {restart}")
        unended = {attempt.server for attempt in self._unended_attempts()}
        first_links = [link for name, link in self.links.items() if name in unended]
        self._spawn(self._wait_for(first_links))
        for link in self.links.values():
            self._spawn(self._keep_connected(link, first=link in first_links))
        try:
            while not self._finished():
                self._step()
                if not self._finished():
                    await self._wait_for_events()
        finally:
            await self._close()

    def interrupt(self, reason: str) -> None:
        """Make run() return; running jobs continue."""
        self.interrupted = self.interrupted or reason
        self.post(Event("wake"))

    def post(self, event: Event) -> None:
        """Add an event to the queue."""
        self._events.put_nowait(event)

    async def _wait_for_events(self) -> None:
        events = []
        with contextlib.suppress(asyncio.TimeoutError):
            events.append(await asyncio.wait_for(self._events.get(), POLL_INTERVAL))
        while not self._events.empty():
            events.append(self._events.get_nowait())
        for event in events:
            getattr(self, f"_on_{event.kind}")(event)

    def _on_wake(self, event: Event) -> None:
        pass

    def _step(self) -> None:
        """Handle requests and timeouts, place jobs, then commit and execute the decisions."""
        self._handle_requests()
        self._check_timeouts()
        self._cancel_waiting()
        if self._waiting.check():
            self._pause_at_max_failures()
        if self._placement_due and not (self.state.paused or self.policy.drain or self.interrupted):
            self._place()
        self._commit()

    def _commit(self) -> None:
        try:
            self.journal.commit()
        except OSError as error:
            if not self.journal_error:
                self._log(f"{self.journal.path}: {error.strerror}; no new jobs start until it is writable")
            self.journal_error = f"{self.journal.path}: {error.strerror}"
            return
        if self.journal_error:
            self._log(f"{self.journal.path}: writable again")
            self.journal_error = ""
        actions, self._actions = self._actions, []
        for action in actions:
            self._spawn(action())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._events.put_nowait(Event("task_failed", facts={"error": error}))

    def _on_task_failed(self, event: Event) -> None:
        raise event.facts["error"]

    def _record(self, event: str, **facts: Any) -> None:
        self.state.apply(self.journal.add(event, **facts))
        self._on_change()

    async def _close(self) -> None:
        """Commit the last decisions, if the journal is writable, and disconnect."""
        with contextlib.suppress(OSError):
            self.journal.commit()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(link.server.close() for link in self.links.values()), return_exceptions=True)

    def _finished(self) -> bool:
        if self.interrupted:
            return True
        if self.journal.pending or self._actions:
            return False
        counts = self.state.counts
        busy = counts["running"] + counts["ending"]
        if self.policy.drain:
            servers = {each.server for each in self.state.lost_attempts()} & set(self.links)
            stopping = any(self.links[server].state in ("connecting", "ready") for server in servers)
            return not stopping and not any(job.cancel for job in self.state.unfinished())
        return not busy and (bool(self.state.paused) or not counts["waiting"])

    # ---------------------------------------------------------------- servers

    async def _wait_for(self, first_links: Sequence[ServerLink]) -> None:
        """Let the other servers connect after these ones, or after FIRST_TIMEOUT: one may hang while it connects."""
        limit = time.monotonic() + FIRST_TIMEOUT
        while waited := [link.server.name for link in first_links if link.state == "connecting"]:
            if time.monotonic() > limit:
                self._log(f"{', '.join(waited)}: still connecting after {FIRST_TIMEOUT:.0f} s; using other servers")
                break
            await asyncio.sleep(0.1)
        self._others_connect.set()

    async def _keep_connected(self, link: ServerLink, first: bool) -> None:
        """Connect and reconnect; post the outcome as events.

        first: connect before the other servers, because jobs of this list already run on this one. If two names refer
        to one machine, only the first to connect is used.
        """
        server, failures = link.server, 0
        if not first:
            await self._others_connect.wait()
        while True:
            try:
                note = await server.connect(self.post)
                attempts = [each for each in self._unended_attempts() if each.server == server.name]
                states = await server.query({each.name: self.state.jobs[each.job].job.output for each in attempts})
            except ServerUnusable as error:
                self.post(Event("unusable", server.name, {"reason": str(error)}))
                return
            except (Unreachable, OSError) as error:
                self.post(Event("unreachable", server.name, {"reason": str(error)}))
                await asyncio.sleep(RETRY_DELAYS[min(failures, len(RETRY_DELAYS) - 1)])
                failures += 1
                continue
            failures = 0
            self.post(Event("connected", server.name, {"note": note, "attempts": states}))
            watching = asyncio.ensure_future(self._watch_gpus(link)) if server.watches_gpus else None
            try:
                reason = await server.wait_until_lost()
            finally:
                if watching:
                    watching.cancel()
            self.post(Event("unreachable", server.name, {"reason": reason}))

    def _unended_attempts(self) -> list[Attempt]:
        """The attempts that may still run on their servers, including lost ones."""
        return [*self.state.open.values(), *self.state.lost_attempts()]

    def _job_name(self, attempt: Attempt) -> str:
        return self.state.jobs[attempt.job].job.name

    async def _watch_gpus(self, link: ServerLink) -> None:
        with contextlib.suppress(Unreachable):
            while True:
                link.server.pool.freed.clear()
                self.post(Event("gpus", link.server.name, {"gpus": await link.server.query_gpus()}))
                await asyncio.sleep(GPU_INTERVAL)

    def _on_connected(self, event: Event) -> None:
        link = self.links[event.server]
        link.state, link.reason, link.failed_starts = "ready", "", 0
        self._log("; ".join(filter(None, [f"{event.server}: connected", event.facts["note"]])))
        for name, reply in event.facts["attempts"].items():
            self._reconcile(link, name, reply)
        self._update_pool(link)
        self._on_change()

    def _reconcile(self, link: ServerLink, name: str, reply: Mapping[str, Any]) -> None:
        """Update an attempt from the reply of a server that was just connected."""
        attempt = self.state.attempt(name)
        if attempt is None or attempt.state == "ended" or attempt.server != link.server.name:  # ended: see _on_ended()
            return
        if attempt.state == "lost":  # see _give_up_server()
            if reply["state"] == "running":
                self._log(f"{link.server.name}: {self._job_name(attempt)} was declared lost but still runs; killing it")
                self._stop(attempt, kill=True)
            else:
                self._record_lost_ended(attempt)
        elif reply["state"] == "running":
            self._record_running(attempt, reply)
            state = "runs" if attempt.process else "waits in the queue"
            self._log(f"{link.server.name}: {self._job_name(attempt)} still {state}")
            self._stopping.discard(name)  # an earlier stop request may not have reached the server
            if self.state.jobs[attempt.job].cancel:
                self._stop(attempt)
        elif reply["state"] == "ended":
            self._end(attempt, reply)
        elif name in self._starting:  # the reply to the start request follows
            pass
        elif attempt.state == "starting":
            self._free_slots(attempt)
            self._record("not_started", attempt=name, reason="the connection was lost before the start")
            self._enqueue(self.state.jobs[attempt.job])
        else:
            self._lose(
                attempt, "server lost", f"none of its files is on {link.server.name}; removed, or workdir changed"
            )
            self._record_lost_ended(attempt)

    def _record_lost_ended(self, attempt: Attempt) -> None:
        self._record("lost_ended", attempt=attempt.name)
        self._free_slots(attempt)

    def _on_unreachable(self, event: Event) -> None:
        link = self.links[event.server]
        if link.state != "unreachable":
            self._log(f"{event.server}: unreachable: {event.facts['reason']}; retrying")
        if link.state == "ready":
            link.disconnected_at = time.monotonic()
        link.state, link.reason, link.gpus_known = "unreachable", event.facts["reason"], False
        self._update_pool(link)
        self._on_change()

    def _on_unusable(self, event: Event) -> None:
        link = self.links[event.server]
        link.state, link.reason = "unusable", event.facts["reason"]
        self._log(f"{event.server}: not used: {link.reason}")
        self._update_pool(link)
        self._on_change()

    def _on_gpus(self, event: Event) -> None:
        link, pool = self.links[event.server], self.links[event.server].server.pool
        # The query may have seen the processes of jobs that have ended since it began.
        used = {slot.gpu for slot in pool.slots if slot.index not in pool.free} | pool.freed
        lost = {gpu["index"]: gpu["lost"] for gpu in event.facts["gpus"] if "lost" in gpu}
        known = [gpu for gpu in event.facts["gpus"] if "lost" not in gpu]
        blocked = {gpu["index"] for gpu in known if gpu["index"] not in used and self._in_use(gpu)}
        listed = {slot.gpu for slot in pool.slots if slot.gpu is not None}
        for gpu in sorted((lost.keys() - pool.lost) & listed, key=str):
            self._log(f"{event.server}: GPU {gpu}: not used: {lost[gpu]}")
        if new := sorted((blocked - pool.blocked) & listed, key=str):
            self._log(f"{event.server}: GPU {', '.join(map(str, new))}: in use by another process; waiting")
        if freed := sorted((pool.blocked | pool.lost) - blocked - lost.keys() & listed, key=str):
            self._log(f"{event.server}: GPU {', '.join(map(str, freed))}: free again")
        pool.blocked, pool.lost = frozenset(blocked), frozenset(lost)
        link.gpus_known = True
        self._update_pool(link)

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

    def _update_pool(self, link: ServerLink) -> None:
        ready = link.state == "ready" and link.usable and time.monotonic() >= link.paused_until
        link.server.pool.open = ready and (link.gpus_known or not link.server.watches_gpus)
        self._placement_due = True
        self._update_avoided_servers()

    # ---------------------------------------------------------------- starting

    def _place(self) -> None:
        self._placement_due = False
        for job_id, server, slots in self.queue.place(self.pools):
            job = self.state.jobs[job_id]
            self._avoided.pop(job_id, None)
            gpus = [slot.gpu for slot in slots if slot.gpu is not None]
            name = f"{job_id}.{job.next_number}"
            training = self._waiting.running_training(self.jobs[job_id])
            more = {"after": training} if training else {}
            self._record("start", attempt=name, server=server, slots=[slot.index for slot in slots], gpus=gpus, **more)
            attempt = job.attempts[-1]
            self._occupy_slots(attempt)
            self._actions.append(partial(self._start, attempt))

    async def _start(self, attempt: Attempt) -> None:
        if attempt.name not in self.state.open:  # lost or requeued while the journal could not be written
            return
        server, job = self.links[attempt.server].server, self.jobs[attempt.job]
        needed = [each for each in self.state.predecessors(job) if not each.job.trains]
        sources = [*self.state.jobs[job.id].attempts, *(each.last for each in needed if each.last)]
        jobs_elsewhere = sorted({each.job for each in sources if each.server != attempt.server})
        self._starting.add(attempt.name)
        try:
            try:
                if jobs_elsewhere:
                    await server.send_results([self.state.jobs[each].job for each in jobs_elsewhere])
                if job.base and not attempt.queued_after:  # if set, the training is still queued there
                    await self._ensure_base(server, job.base)
            except Unreachable as error:  # before the start request, so the attempt was not started
                raise NotStarted(str(error)) from None
            reply = await server.start(attempt, job, [each.job.output for each in needed])
        except (NotStarted, OSError) as error:
            refusal = error if isinstance(error, NotStarted) else NotStarted(str(error))
            self.post(Event("not_started", attempt.server, refusal.facts(attempt.name)))
        except Unreachable:
            pass  # the query after the reconnect shows whether it was started
        else:
            self.post(Event("started", attempt.server, {"attempt": attempt.name, **reply}))
        finally:
            self._starting.discard(attempt.name)

    def _on_claimed(self, event: Event) -> None:
        self._waiting.handle_claim(event.facts["digest"], event.facts["outcome"])

    def _on_started(self, event: Event) -> None:
        attempt = self.state.open.get(event.facts["attempt"])
        self.links[event.server].failed_starts = 0
        if attempt is None:
            return
        if event.facts["state"] == "ended":
            self._end(attempt, event.facts)
        elif self._record_running(attempt, event.facts) and self.state.jobs[attempt.job].cancel:
            self._stop(attempt)

    def _record_running(self, attempt: Attempt, facts: Mapping[str, Any]) -> bool:
        """Record that an attempt runs, or that it waits in its server's queue. Returns False if recorded before."""
        process = {key: facts[key] for key in ("pid", "start_time", "boot_id", "host") if key in facts}
        changed = attempt.state != "running" or bool(process and not attempt.process)
        if changed:
            self._record("running", attempt=attempt.name, process=process)
        return changed

    def _on_waits(self, event: Event) -> None:
        if attempt := self.state.open.get(event.facts["attempt"]):
            self._record("waits", attempt=attempt.name, reason=event.facts["reason"])

    def _on_not_started(self, event: Event) -> None:
        attempt = self.state.open.get(event.facts["attempt"])
        if attempt is None:
            return
        reason, kind, job = event.facts["reason"], event.facts["kind"], self.state.jobs[attempt.job]
        self._free_slots(attempt)
        if kind == "job":
            self._record("ended", attempt=attempt.name, failure="refused", reason=reason)
            self._count_failure(job, attempt)
            self._after_end(job, attempt)
            return
        self._record("not_started", attempt=attempt.name, reason=f"{event.server}: {reason}")
        self._cancellation_due = True
        if kind != "busy" or job.job.id not in self._busy_logged:
            self._log(f"{event.server}: {self._job_name(attempt)} was not started: {reason}")
        if kind == "busy":
            self._busy_logged.add(job.job.id)
            requeue = Event("requeue", facts={"job": job.job.id})
            asyncio.get_running_loop().call_later(COOLDOWN, self.post, requeue)
        elif kind == "base":
            if self._waiting.claimed.get(job.job.base) == "ready":
                del self._waiting.claimed[job.job.base]
            self._enqueue(job)
        else:
            self._enqueue(job)
            self._count_failed_start(self.links[event.server], reason, permanent=kind == "unusable")

    def _on_requeue(self, event: Event) -> None:
        job = self.state.jobs[event.facts["job"]]
        if job.state == "waiting" and job.job.id not in self.queue:
            self._enqueue(job)

    def _count_failed_start(self, link: ServerLink, reason: str, permanent: bool) -> None:
        """Place no jobs on a server for a while. After MAX_FAILED_STARTS, or if permanent, wait until it reconnects."""
        if link.usable and time.monotonic() >= link.paused_until:  # simultaneous failures count once
            link.failed_starts = backend.MAX_FAILED_STARTS if permanent else link.failed_starts + 1
            link.paused_until = time.monotonic() + COOLDOWN * link.failed_starts
            if link.failed_starts >= backend.MAX_FAILED_STARTS:
                link.reason = f"gets no new jobs: {reason}"
                self._log(f"{link.server.name}: {link.reason}")
        self._update_pool(link)

    def _enqueue(self, job: JobState) -> None:
        """Queue a job, or hold it until the jobs it needs are done; cancel it if it was removed from the list."""
        if job.job.id not in self.jobs:
            self._record("settle", job=job.job.id, state="cancelled", reason=UNLISTED)
            return
        self._cancellation_due |= job.cancel
        avoid = self._servers_to_avoid(job)
        if job.attempts:
            self._avoided[job.job.id] = avoid
        listed = self.jobs[job.job.id]
        if (digest := listed.trains or listed.base) and not self.policy.drain:
            self._waiting.claim(digest)
        if self._waiting.hold(job, listed):
            return
        self.queue.put(listed, job.number, self._mean_seconds, avoid)
        self._placement_due = True

    def _servers_to_avoid(self, job: JobState) -> frozenset[str]:
        """The servers on which a job failed; empty if no other server can run it."""
        failed = frozenset(each.server for each in job.attempts[job.attempts_before_retry :] if each.failure)
        others = failed and any(name not in failed and self._could_run(job.job, name) for name in self.pools)
        return failed if others else frozenset()

    def _could_run(self, job: Job, server: str) -> bool:
        fits = self.pools[server].fits(job.options.gpus, frozenset(job.options.labels))
        return fits and self.links[server].usable

    def _update_avoided_servers(self) -> None:
        """Update the queued jobs for which _servers_to_avoid() has changed."""
        for job_id, avoid in list(self._avoided.items()):
            if job_id in self.queue and self._servers_to_avoid(self.state.jobs[job_id]) != avoid:
                self.queue.remove(job_id)
                self._enqueue(self.state.jobs[job_id])

    # ---------------------------------------------------------------- ending

    def _on_ended(self, event: Event) -> None:
        attempt = self.state.attempt(event.facts["attempt"])
        if attempt is None or attempt.server != event.server:  # a server reports only its own attempts
            return
        if attempt.state == "lost":
            self._record_lost_ended(attempt)
        elif attempt.open:
            self._end(attempt, event.facts)

    def _on_progress(self, event: Event) -> None:
        attempt = self.state.open.get(event.facts["attempt"])
        if attempt and attempt.server == event.server:
            metrics = event.facts["metrics"]
            step, first = metrics.get("step"), attempt.first_report
            # The first report may still contain the last step of an earlier attempt. A lower step then replaces it.
            if step is not None and (first is None or step < first[0]):
                attempt.first_report = (step, time.time())
            self.state.jobs[attempt.job].add_metrics(metrics)
            self._on_change()

    def _end(self, attempt: Attempt, end: Mapping[str, Any]) -> None:
        job = self.state.jobs[attempt.job]
        if self._waiting.training_failed(attempt, end) and not job.cancel:
            self._free_slots(attempt)
            self._record("not_started", attempt=attempt.name, reason="its base model was not trained")
            self._enqueue(job)
            return
        failure, reason = classify_end(end, job.cancel)
        kept = {key: end[key] for key in ("code", "started", "ended", "peak_memory", "lines", "metrics") if key in end}
        self._free_slots(attempt)
        self._record("ended", attempt=attempt.name, failure=failure, reason=reason, **kept)
        self._count_failure(job, attempt)
        self._after_end(job, attempt)

    def _lose(self, attempt: Attempt, failure: str, reason: str) -> None:
        """Mark an attempt as lost. If it was open, its slots stay occupied until its server reports its end."""
        known = {"ended": attempt.end, "code": attempt.code, "peak_memory": attempt.peak_memory, "lines": attempt.lines}
        self._record("lost", attempt=attempt.name, failure=failure, reason=reason, **known)
        self._after_end(self.state.jobs[attempt.job], attempt)

    def _after_end(self, job: JobState, attempt: Attempt) -> None:
        """Copy the results, then settle the job."""
        if attempt.state == "lost" or attempt.failure == "refused":
            self._settle(job, attempt)
        else:
            self._actions.append(partial(self._fetch_results, job, attempt))

    async def _fetch_results(self, job: JobState, attempt: Attempt) -> None:
        link, publishes = self.links.get(attempt.server), bool(job.job.trains and not attempt.failure)
        logged = note = failure = reason = ""
        failures = 0
        while job.state == "ending" and job.last is attempt:
            if not link or link.state != "ready":
                failures = 0
                await asyncio.sleep(1.0)
                continue
            if publishes and job.job.trains not in self._waiting.claimed:  # another list may be training this model
                await asyncio.sleep(POLL_INTERVAL)
                continue
            try:
                if attempt.failure == "cancelled":
                    note = await self._cancellation_result(link.server, attempt)
                self._log_left_out(attempt, job.job.output, await link.server.fetch_results(attempt, job.job))
                if publishes:
                    await self._publish(link.server, job, attempt)
                break
            except BaseModelError as error:
                failure, reason = "no base model", str(error)
                break
            except (Unreachable, OSError) as error:
                failures += 1
                if gives_up_copying(error, failures):
                    failure, reason = NOT_COPIED, str(error)
                    break
                if str(error) != logged:
                    logged = str(error)
                    self._log(f"{self._job_name(attempt)}: cannot copy results: {logged}; retrying")
            await asyncio.sleep(RETRY_DELAYS[min(failures, len(RETRY_DELAYS)) - 1])
        facts = {"job": job.job.id, "attempt": attempt.name, "note": note, "failure": failure, "reason": reason}
        self.post(Event("results_fetched", attempt.server, facts))

    def _log_left_out(self, attempt: Attempt, output: str, names: Sequence[str]) -> None:
        """Log files that were not copied. names: relative to the output directory."""
        if names:
            shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if names[SHOWN:] else "")
            rule = "only files, directories and links inside of it are copied, but none of git"
            self._log(f"{attempt.server}: not copied to {output}: {shown}; {rule}")

    async def _cancellation_result(self, server: JobServer, attempt: Attempt) -> str:
        """Return a text for the log: that no process remains, and how much memory of the attempt's GPUs is in use.

        No process remains, because the supervisor waits for all processes of the attempt, and it has exited.
        """
        gpus = await server.query_gpus() if attempt.gpus else []
        used = {gpu["index"]: gpu.get("used") for gpu in gpus}
        shown = [f"GPU {gpu}: {used[gpu]} MiB in use" for gpu in attempt.gpus if used.get(gpu) is not None]
        return "; ".join(filter(None, ["no process remains", ", ".join(shown)]))

    def _on_results_fetched(self, event: Event) -> None:
        job = self.state.jobs[event.facts["job"]]
        if job.state == "ending" and job.last and job.last.name == event.facts["attempt"]:
            failure, reason, note = (event.facts[name] for name in ("failure", "reason", "note"))
            if failure and job.last.failure:  # the attempt keeps its failure
                note = "; ".join(filter(None, [note, f"{failure}: {reason}"]))
            elif failure:
                reason = "; ".join(filter(None, [reason, job.last.reason]))
                self._record("rejected", attempt=job.last.name, failure=failure, reason=reason)
                self._count_failure(job, job.last)
            self._settle(job, job.last, note)

    def _settle(self, job: JobState, attempt: Attempt, note: str = "") -> None:
        state, reason = job.outcome(attempt, self.jobs.get(job.job.id))
        reason = "; ".join(filter(None, [reason, note]))
        self._record("settle", job=job.job.id, state=state, reason=reason)
        self._log_outcome(job, attempt, state, reason)
        if state == "failed" and self.state.counts["failed"] == 1:
            self._notify("first failure", f"{job.job.name} failed: {reason}", cause=reason, host=attempt.server)
        if state == "waiting":
            self._enqueue(job)
        self._cancellation_due |= job.cancel
        self._failing.discard(job.job.id)

    def _count_failure(self, job: JobState, attempt: Attempt) -> None:
        """Count an attempt if it failed. Pause the list at a limit of failures.

        With fail_fast, a failed job pauses the list and cancels all other unfinished jobs. An ended attempt is counted
        before its results are copied, so that no other job starts meanwhile.
        """
        fails = job.outcome(attempt, self.jobs.get(job.job.id))[0] == "failed"
        if fails:
            self._failing.add(job.job.id)
        if attempt in job.counted_failures() and attempt.failure != "cancelled":
            early = (attempt.seconds or 0.0) < EARLY_FAILURE_SECONDS
            self._early_failures = self._early_failures + 1 if early else 0
        elif not attempt.failure:
            self._early_failures = 0
        if self.state.paused:
            return
        if self.policy.fail_fast and fails:
            self._pause(f"--fail-fast: {job.job.name} failed")
            others = [each.job.id for each in self.state.unfinished() if each is not job]
            self._apply_request("--fail-fast", "cancel", others)
        elif fails:
            self._pause_at_max_failures()
        if self._early_failures >= MAX_EARLY_FAILURES:
            self._pause(
                f"{self._early_failures} attempts in a row failed within {EARLY_FAILURE_SECONDS:.0f} s each; the last: "
                f"{attempt.failure_text}; fix the cause, then run `retry failed` and `resume`"
            )

    def _pause_at_max_failures(self) -> None:
        """Pause the list if it is not paused yet and --max-failures is reached."""
        limit, failed = self.policy.max_failures, self.state.counts["failed"] + len(self._failing)
        if limit is not None and failed >= limit and not self.state.paused:
            self._pause(f"--max-failures {limit}: {failed} job{'s' * (failed != 1)} failed")

    def _pause(self, reason: str) -> None:
        self._record("pause", reason=reason)
        self._early_failures = 0
        self._log(f"paused: {reason}")
        self._notify("pause", f"paused: {reason}", cause=reason)

    def _log_outcome(self, job: JobState, attempt: Attempt, state: str, reason: str) -> None:
        took = f" after {attempt.seconds:.1f} s" if attempt.seconds is not None else ""
        cause = {"done": "", "cancelled": f": {reason}"}.get(state, f": {attempt.failure_text}")
        if state == "waiting":
            self._log(f"retry: {job.job.name}: attempt {attempt.number} on {attempt.server}{took}{cause}")
        else:
            self._log(f"{state}: {job.job.name} on {attempt.location}{took}{cause}")

    # ---------------------------------------------------------------- requests to cancel, retry and add jobs

    def _handle_requests(self) -> None:
        self.journal.records = []  # the state has their requests
        for request in self.journal.requests():
            self.state.apply(request)
        for request in self.state.unhandled_requests():
            if request["event"] == "add":
                self._add(request)
                continue
            try:
                jobs = self.state.select_jobs(request["event"], request["jobs"])
            except ValueError as error:
                self._log(str(error))
                jobs = []
            self._apply_request(request_id(request), request["event"], jobs)

    def _apply_request(self, request: str, what: str, jobs: list[str]) -> None:
        """Cancel unfinished jobs, or retry failed and cancelled jobs. request: its id. what: cancel or retry."""
        jobs = self.state.with_related(jobs) if what == "retry" else jobs
        ended = {job for job in jobs if self.state.jobs[job].state in ("failed", "cancelled")}
        self._record("request_handled", request=request, what=what, jobs=jobs)
        for job in map(self.state.jobs.__getitem__, jobs):
            if what == "retry" and job.job.id in ended:
                self._enqueue(job)
            elif what == "cancel" and job.cancel:
                self._cancellation_due = True
                for attempt in [each for each in job.attempts if each.state == "running"]:
                    self._stop(attempt)

    def _add(self, request: Record) -> None:
        """Add the jobs of a file to the list; refuse the file if one of them is invalid."""
        (file,), jobs, refusal = request["jobs"], [], {}
        try:
            jobs = self._read_added(list(self.jobs.values()), file)
        except (ValueError, OSError) as error:
            refusal = {"refused": str(error)}
        self._record("added", request=request_id(request), jobs=job_records(jobs), **refusal)
        self._log(f"{file}: " + (f"not added: {refusal['refused']}" if refusal else f"jobs added: {len(jobs)}"))
        self.jobs |= {job.id: job for job in jobs}
        for job in jobs:
            if self.state.jobs[job.id].state == "waiting":
                self._enqueue(self.state.jobs[job.id])
            if self._waiting.claimed.get(job.trains) == "ready":  # claimed before this job was added
                self.post(Event("claimed", facts={"digest": job.trains, "outcome": "ready"}))

    def _cancel_waiting(self) -> None:
        if not self._cancellation_due:
            return
        self._cancellation_due = False
        for job in [each for each in self.state.unfinished() if each.cancel and each.state == "waiting"]:
            self.queue.remove(job.job.id)
            self._record("settle", job=job.job.id, state="cancelled", reason="cancelled on request")
            self._log(f"cancelled: {job.job.name} while it was waiting")

    def _stop(self, attempt: Attempt, kill: bool = False) -> None:
        if attempt.name not in self._stopping:
            self._stopping.add(attempt.name)
            self._actions.append(partial(self._send_stop, attempt, kill))

    async def _send_stop(self, attempt: Attempt, kill: bool) -> None:
        try:
            await self.links[attempt.server].server.stop(attempt.name, kill)
        except Unreachable:  # repeated after the reconnect
            self._stopping.discard(attempt.name)

    # ---------------------------------------------------------------- base models

    async def _publish(self, server: JobServer, job: JobState, attempt: Attempt) -> None:
        """Publish a job's trained base model to the cache. Raises BaseModelError, OSError and Unreachable."""
        assert self.cache
        digest = job.job.trains
        facts = {"settings": dict(job.job.settings), "server": attempt.server, "seconds": attempt.seconds,
                 "created": attempt.end}  # fmt: skip
        await asyncio.to_thread(self.cache.publish, digest, job.job.output, **facts)
        self._waiting.claimed[digest] = "ready"
        server.pool.bases.add(digest)
        if self.policy.evict:
            try:
                await self._ensure_base(server, digest)
                await server.remove_output(job.job.output)
            except NotStarted as error:
                self._log(f"{server.name}: {job.job.output} not removed: {error}")

    async def _ensure_base(self, server: JobServer, digest: str) -> None:
        start = time.monotonic()
        copied = await server.ensure_base(digest)
        server.pool.bases.add(digest)
        if copied:
            took = time.monotonic() - start
            self._log(f"{server.name}: received base {hash_of(digest)} ({copied / 1e6:.1f} MB in {took:.1f} s)")

    # ---------------------------------------------------------------- timeouts and slots

    def _check_timeouts(self) -> None:
        now = time.monotonic()
        for link in self.links.values():
            if link.state == "ready" and 0 < link.paused_until <= now:
                link.paused_until = 0.0
                self._update_pool(link)
            seconds = now - link.disconnected_at
            if link.state in ("unreachable", "unusable") and seconds > self.policy.lost_after:
                fault = f"could not be {'used' if link.state == 'unusable' else 'reached'} for {seconds:.0f} s"
                self._give_up_server(link.server.name, fault, f": {link.reason}")
        if self._unlisted_servers and now - self._started_at > self.policy.lost_after:
            for server in self._unlisted_servers:
                self._give_up_server(server, "is no longer in the cluster config")
            self._unlisted_servers = set()
        self._pause_without_servers()

    def _give_up_server(self, server: str, fault: str, cause: str = "") -> None:
        """Restart the jobs of a lost server elsewhere, even if a job succeeded but its results were not copied."""
        for attempt in [each for each in self.state.open.values() if each.server == server]:
            self._lose(attempt, "server lost", f"{server} {fault}{cause}")
        for job in [each for each in self.state.unfinished() if each.state == "ending"]:
            last = job.last
            if last and last.server == server and last.failure:
                self._settle(job, last)
            elif last and last.server == server:
                self._lose(last, "server lost", f"{server} {fault} before its results were copied{cause}")

    def _pause_without_servers(self) -> None:
        if self.state.paused or self.policy.drain or not self.state.counts["waiting"]:
            return
        if self.state.counts["running"] or self.state.counts["ending"]:
            return
        waiting = (each.job for each in self.state.unfinished() if each.state == "waiting")
        if not any(self._could_run(job, name) for job in waiting for name in self.links):
            self._pause("no usable server for the waiting jobs; see the reasons above")

    def _occupy_slots(self, attempt: Attempt) -> None:
        self._slot_holders[attempt.server][attempt.name] = attempt
        if pool := self.pools.get(attempt.server):
            pool.free -= pool.slots_of(attempt.slots, attempt.gpus)

    def _free_slots(self, attempt: Attempt) -> None:
        holders = self._slot_holders[attempt.server]
        if holders.pop(attempt.name, None) and (pool := self.pools.get(attempt.server)):
            others = [pool.slots_of(each.slots, each.gpus) for each in holders.values()]
            pool.free |= pool.slots_of(attempt.slots, attempt.gpus).difference(*others)
            pool.freed.update(attempt.gpus)
        self._placement_due = True


def gives_up_copying(error: Exception, failures: int) -> bool:
    """Whether to stop copying the results of an attempt. failures: number of consecutive errors, including `error`."""
    limit = MAX_LOST_COPIES if isinstance(error, Unreachable) else MAX_FAILED_COPIES
    return failures >= limit and not any(sign in str(error) for sign in NO_SPACE)
