"""Running attempts: their start on a server, what the server reports of them, and requests to stop them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from distributed.jobs.dispatch import connections
from distributed.jobs.dispatch.connections import Connections
from distributed.jobs.dispatch.endings import Endings, lacks_space
from distributed.jobs.dispatch.events import EventQueue
from distributed.jobs.dispatch.recorder import Recorder
from distributed.jobs.dispatch.starts import Starts
from distributed.jobs.journal.state import Attempt
from distributed.jobs.lists.job import Job
from distributed.jobs.schedule.backend import Event, JobServer, NotStarted, ServerLink, Unreachable
from distributed.training.base_model import hash_of


class RunningAttempts:
    """The attempts of a list on their servers, from the request to start one to the report that it has ended."""

    def __init__(
        self, recorder: Recorder, events: EventQueue, jobs: Mapping[str, Job], links: Mapping[str, ServerLink],
        connections: Connections, starts: Starts, endings: Endings,
    ) -> None:  # fmt: skip
        """jobs: of the list, by id."""
        self._recorder, self._state, self._events = recorder, recorder.state, events
        self._jobs, self._links, self._connections = jobs, links, connections
        self._starts, self._endings = starts, endings
        self._starting: set[str] = set()  # attempts being started; the reply to a query may not include them yet
        self._stopping: set[str] = set()  # attempts with a stop request
        self._busy_logged: set[str] = set()  # jobs for which a NotStarted error of the kind "busy" was logged

    # ---- starting

    async def start(self, attempt: Attempt) -> None:
        """Ask the server of an attempt to start it; one of the events `started` and `not_started` follows."""
        if attempt.name not in self._state.open:  # lost or requeued while the journal could not be written
            return
        server, job = self._links[attempt.server].server, self._jobs[attempt.job]
        needed = [each for each in self._state.predecessors(job) if not each.job.trains]
        sources = [*self._state.jobs[job.id].attempts, *(each.last for each in needed if each.last)]
        jobs_elsewhere = sorted({each.job for each in sources if each.server != attempt.server})
        self._starting.add(attempt.name)
        try:
            try:
                if jobs_elsewhere:
                    await server.send_results([self._state.jobs[each].job for each in jobs_elsewhere])
                if job.base and not attempt.queued_after:  # if set, the training is still queued there
                    await self._ensure_base(server, job.base)
            except Unreachable as error:  # before the start request, so the attempt was not started
                raise NotStarted(str(error)) from None
            reply = await server.start(attempt, job, [each.job.output for each in needed])
        except (NotStarted, OSError) as error:
            refusal = error if isinstance(error, NotStarted) else NotStarted(str(error))
            self._events.post(Event("not_started", attempt.server, refusal.facts(attempt.name)))
        except Unreachable:
            pass  # the query after the reconnect shows whether it was started
        else:
            self._events.post(Event("started", attempt.server, {"attempt": attempt.name, **reply}))
        finally:
            self._starting.discard(attempt.name)

    async def _ensure_base(self, server: JobServer, digest: str) -> None:
        """Copy a base model to a server, unless a valid one is there. Raises NotStarted, OSError and Unreachable.

        If there is no space, the server's copies of the outputs of the list's trainings, of which this machine has
        copies, are removed first.
        """
        start = time.monotonic()
        try:
            copied = await server.ensure_base(digest)
        except NotStarted as error:
            trained = [each for each in self._state.jobs.values() if each.job.trains and each.state == "done"]
            spare = [each for each in trained if any(attempt.server == server.name for attempt in each.attempts)]
            if not (spare and lacks_space(error)):
                raise
            for each in spare:
                self._recorder.log(f"{server.name}: {error}; {each.job.output} is removed there")
                await server.remove_output(each.job.output)
            copied = await server.ensure_base(digest)
        server.pool.bases.add(digest)
        if copied:
            took = time.monotonic() - start
            size = f"{copied / 1e6:.1f} MB in {took:.1f} s"
            self._recorder.log(f"{server.name}: received base {hash_of(digest)} ({size})")

    def on_started(self, event: Event) -> None:
        attempt = self._state.open.get(event.facts["attempt"])
        self._links[event.server].failed_starts = 0
        if attempt is None:
            return
        if event.facts["state"] == "ended":
            self._endings.end(attempt, event.facts)
        elif self._record_running(attempt, event.facts) and self._state.jobs[attempt.job].cancel:
            self.stop(attempt)

    def on_not_started(self, event: Event) -> None:
        attempt = self._state.open.get(event.facts["attempt"])
        if attempt is None:
            return
        reason, kind, job = event.facts["reason"], event.facts["kind"], self._state.jobs[attempt.job]
        if kind == "job":
            self._endings.refuse(attempt, reason)
            return
        self._starts.free_slots(attempt)
        self._recorder.record("not_started", attempt=attempt.name, reason=f"{event.server}: {reason}")
        self._starts.cancellation_due = True
        if kind != "busy" or job.job.id not in self._busy_logged:
            self._recorder.log(f"{event.server}: {job.job.name} was not started: {reason}")
        if kind == "busy":
            self._busy_logged.add(job.job.id)
            requeue = Event("requeue", facts={"job": job.job.id})
            asyncio.get_running_loop().call_later(connections.COOLDOWN, self._events.post, requeue)
            return
        if kind == "base" and self._starts.waiting.claimed.get(job.job.base) == "ready":
            del self._starts.waiting.claimed[job.job.base]
        self._starts.enqueue(job)
        if kind != "base":
            self._connections.count_failed_start(event.server, reason, permanent=kind == "unusable")

    def on_requeue(self, event: Event) -> None:
        job = self._state.jobs[event.facts["job"]]
        if job.state == "waiting" and job.job.id not in self._starts.queue:
            self._starts.enqueue(job)

    # ---- running

    def _record_running(self, attempt: Attempt, facts: Mapping[str, Any]) -> bool:
        """Record that an attempt runs, or that it waits in its server's queue. Returns False if recorded before."""
        process = {key: facts[key] for key in ("pid", "start_time", "boot_id", "host") if key in facts}
        changed = attempt.state != "running" or bool(process and not attempt.process)
        if changed:
            self._recorder.record("running", attempt=attempt.name, process=process)
        return changed

    def on_connected(self, event: Event) -> None:
        """Compare the attempts of a server with its reply."""
        for name, reply in event.facts["attempts"].items():
            attempt = self._state.attempt(name)
            # For ended attempts, see Endings.on_ended().
            if attempt and attempt.state != "ended" and attempt.server == event.server:
                self._compare(attempt, reply)

    def _compare(self, attempt: Attempt, reply: Mapping[str, Any]) -> None:
        """Update an attempt from the reply of its server, which was just connected."""
        job, log = self._state.jobs[attempt.job], self._recorder.log
        if attempt.state == "lost":  # see Endings.give_up_server()
            if reply["state"] == "running":
                log(f"{attempt.server}: {job.job.name} was declared lost but still runs; killing it")
                self.stop(attempt, kill=True)
            else:
                self._endings.record_lost_ended(attempt)
        elif reply["state"] == "running":
            self._record_running(attempt, reply)
            state = "runs" if attempt.process else "waits in the queue"
            log(f"{attempt.server}: {job.job.name} still {state}")
            self._stopping.discard(attempt.name)  # an earlier stop request may not have reached the server
            if job.cancel:
                self.stop(attempt)
        elif reply["state"] == "ended":
            self._endings.end(attempt, reply)
        elif attempt.name in self._starting:  # the reply to the start request follows
            pass
        elif attempt.state == "starting":
            self._starts.free_slots(attempt)
            reason = "the connection was lost before the start"
            self._recorder.record("not_started", attempt=attempt.name, reason=reason)
            self._starts.enqueue(job)
        else:
            cause = f"none of its files is on {attempt.server}; removed, or workdir changed"
            self._endings.lose(attempt, "server lost", cause)
            self._endings.record_lost_ended(attempt)

    def on_waits(self, event: Event) -> None:
        if attempt := self._state.open.get(event.facts["attempt"]):
            self._recorder.record("waits", attempt=attempt.name, reason=event.facts["reason"])

    def on_progress(self, event: Event) -> None:
        attempt = self._state.open.get(event.facts["attempt"])
        if attempt and attempt.server == event.server:
            metrics = event.facts["metrics"]
            step, first = metrics.get("step"), attempt.first_report
            # The first report may still contain the last step of an earlier attempt. A lower step then replaces it.
            if step is not None and (first is None or step < first[0]):
                attempt.first_report = (step, time.time())
            self._state.jobs[attempt.job].add_metrics(metrics)
            self._recorder.changed()

    # ---- stopping

    def stop(self, attempt: Attempt, kill: bool = False) -> None:
        """Ask the server of an attempt to stop it, unless it was asked before. kill: without a grace period."""
        if attempt.name not in self._stopping:
            self._stopping.add(attempt.name)
            self._recorder.execute(self._send_stop, attempt, kill)

    async def _send_stop(self, attempt: Attempt, kill: bool) -> None:
        try:
            await self._links[attempt.server].server.stop(attempt.name, kill)
        except Unreachable:  # repeated after the reconnect
            self._stopping.discard(attempt.name)
