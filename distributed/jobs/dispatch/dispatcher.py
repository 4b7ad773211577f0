"""Run a job list: place jobs on servers, monitor them, and return when no job is left to run.

A single asyncio task reads the event queue and handles every event. Each decision is a record: it is applied to the
state, committed to the journal, and only then executed. The jobs of an unreachable server are treated as running for
`lost_after` seconds; then they restart on other servers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from distributed.jobs.dispatch.connections import Connections
from distributed.jobs.dispatch.endings import Endings
from distributed.jobs.dispatch.events import EventQueue
from distributed.jobs.dispatch.limits import Limits, Policy
from distributed.jobs.dispatch.recorder import Recorder
from distributed.jobs.dispatch.running import RunningAttempts
from distributed.jobs.dispatch.starts import Starts
from distributed.jobs.journal.journal import Record, request_id
from distributed.jobs.journal.state import job_records
from distributed.jobs.lists.job import Job
from distributed.jobs.schedule.backend import Event, ServerLink
from distributed.jobs.schedule.base_cache import Cache


class Dispatcher:
    """The dispatcher of one job list."""

    def __init__(
        self, recorder: Recorder, jobs: Sequence[Job], links: Mapping[str, ServerLink], policy: Policy, *,
        cache: Cache | None = None, read_added: Callable[[list[Job], str], list[Job]] = lambda *_: [],
    ) -> None:  # fmt: skip
        """cache: required for base models.

        read_added: takes the jobs and the path of a jobs file; returns the jobs to add. Raises ValueError and OSError.
        """
        self.interrupted = ""
        self._recorder, self._state, self._links, self._policy = recorder, recorder.state, links, policy
        self._jobs = {job.id: job for job in jobs}  # shared with the objects below
        self._read_added = read_added
        self._events = events = EventQueue()
        self._limits = Limits(recorder, policy, self._jobs, self._cancel)
        self.starts = Starts(recorder, events, self._jobs, links, cache, policy.drain)
        self._endings = Endings(recorder, events, self._jobs, links, self.starts, self._limits, cache)
        self.connections = Connections(recorder, events, links, policy, self.starts)
        self._running = RunningAttempts(
            recorder, events, self._jobs, links, self.connections, self.starts, self._endings
        )
        self._handlers: dict[str, Callable[[Event], None]] = {
            "wake": lambda _: None,
            "task_failed": self._on_task_failed,
            "connected": self._on_connected,
            "unreachable": self.connections.on_unreachable,
            "unusable": self.connections.on_unusable,
            "gpus": self.connections.on_gpus,
            "claimed": self._on_claimed,
            "started": self._running.on_started,
            "not_started": self._running.on_not_started,
            "requeue": self._running.on_requeue,
            "waits": self._running.on_waits,
            "progress": self._running.on_progress,
            "ended": self._endings.on_ended,
            "results_fetched": self._endings.on_results_fetched,
        }

    async def run(self) -> None:
        """Run until no job is left to run, until the list is paused and no job runs, or until interrupt() is called.

        With drain, return when all cancel requests are done, even if other jobs still run.
        """
        for attempt in self.connections.unended_attempts():
            self.starts.occupy_slots(attempt)
        for job in list(self._state.unfinished()):
            if job.job.trains and not self._policy.drain:
                self.starts.waiting.claim(job.job.trains)
            if job.state == "waiting":
                self.starts.enqueue(job)
            elif job.state == "ending" and job.last:
                self._endings.resume(job, job.last)
        self._handle_requests()
        self.connections.open()
        try:
            while not self._finished():
                self._step()
                if not self._finished():
                    for event in await self._events.wait():
                        self._handlers[event.kind](event)
        finally:
            self._recorder.close()
            await self._events.close()
            await self.connections.close()

    def interrupt(self, reason: str) -> None:
        """Make run() return; running jobs continue."""
        self.interrupted = self.interrupted or reason
        self._events.post(Event("wake"))

    def _step(self) -> None:
        """Handle requests and timeouts, place jobs, then commit and execute the decisions."""
        self._handle_requests()
        for lost in self.connections.lost_servers():
            self._endings.give_up_server(*lost)
        if self.starts.have_no_server():
            self._limits.pause("no usable server for the waiting jobs; see the reasons above")
        self.starts.cancel_waiting()
        if self.starts.waiting.check():
            self._limits.pause_at_max_failures()
        for attempt in () if self.interrupted else self.starts.place():
            self._recorder.execute(self._running.start, attempt)
        for action in self._recorder.commit():
            self._events.spawn(action())

    def _finished(self) -> bool:
        if self.interrupted:
            return True
        if self._recorder.pending:
            return False
        counts = self._state.counts
        busy = counts["running"] + counts["ending"]
        if self._policy.drain:
            servers = {each.server for each in self._state.lost_attempts()} & set(self._links)
            stopping = any(self._links[server].state in ("connecting", "ready") for server in servers)
            return not stopping and not any(job.cancel for job in self._state.unfinished())
        return not busy and (bool(self._state.paused) or not counts["waiting"])

    # ---- events

    def _on_task_failed(self, event: Event) -> None:
        raise event.facts["error"]

    def _on_connected(self, event: Event) -> None:
        self.connections.on_connected(event)
        self._running.on_connected(event)
        self.connections.update_pool(self._links[event.server])
        self._recorder.changed()

    def _on_claimed(self, event: Event) -> None:
        self.starts.waiting.handle_claim(event.facts["digest"], event.facts["outcome"])

    # ---- requests to cancel, retry and add jobs

    def _handle_requests(self) -> None:
        for request in self._recorder.requests():
            if request["event"] == "add":
                self._add(request)
                continue
            try:
                jobs = self._state.select_jobs(request["event"], request["jobs"])
            except ValueError as error:
                self._recorder.log(str(error))
                jobs = []
            if request["event"] == "retry":
                self._retry(request_id(request), self._state.with_related(jobs))
            else:
                self._cancel(request_id(request), jobs)

    def _retry(self, request: str, jobs: list[str]) -> None:
        """Run failed and cancelled jobs again. request: its id."""
        ended = [job for job in jobs if self._state.jobs[job].state in ("failed", "cancelled")]
        self._recorder.record("request_handled", request=request, what="retry", jobs=jobs)
        for job in ended:
            self.starts.enqueue(self._state.jobs[job])

    def _cancel(self, request: str, jobs: list[str]) -> None:
        """Cancel unfinished jobs. request: its id."""
        self._recorder.record("request_handled", request=request, what="cancel", jobs=jobs)
        for job in map(self._state.jobs.__getitem__, jobs):
            if job.cancel:
                self.starts.cancellation_due = True
                for attempt in [each for each in job.attempts if each.state == "running"]:
                    self._running.stop(attempt)

    def _add(self, request: Record) -> None:
        """Add the jobs of a file to the list; refuse the file if one of them is invalid."""
        (file,), jobs, refusal = request["jobs"], [], {}
        try:
            jobs = self._read_added(list(self._jobs.values()), file)
        except (ValueError, OSError) as error:
            refusal = {"refused": str(error)}
        self._recorder.record("added", request=request_id(request), jobs=job_records(jobs), **refusal)
        result = f"not added: {refusal['refused']}" if refusal else f"jobs added: {len(jobs)}"
        self._recorder.log(f"{file}: {result}")
        self._jobs |= {job.id: job for job in jobs}
        for job in jobs:
            if self._state.jobs[job.id].state == "waiting":
                self.starts.enqueue(self._state.jobs[job.id])
            if self.starts.waiting.claimed.get(job.trains) == "ready":  # claimed before this job was added
                self._events.post(Event("claimed", facts={"digest": job.trains, "outcome": "ready"}))
