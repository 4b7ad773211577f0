"""What may start: queued jobs, the slots of servers, and who occupies them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from distributed.jobs.dispatch.events import EventQueue
from distributed.jobs.dispatch.recorder import Recorder
from distributed.jobs.journal.state import UNLISTED, Attempt, JobState
from distributed.jobs.lists.job import Job
from distributed.jobs.schedule.backend import ServerLink
from distributed.jobs.schedule.base_cache import Cache
from distributed.jobs.schedule.placement import JobQueue, mean_seconds
from distributed.jobs.schedule.waiting import WaitingJobs


class Starts:
    """The waiting jobs of a list, and the slots on which they may start."""

    def __init__(
        self, recorder: Recorder, events: EventQueue, jobs: Mapping[str, Job], links: Mapping[str, ServerLink],
        cache: Cache | None, drain: bool,
    ) -> None:  # fmt: skip
        """jobs: of the list, by id. cache: required for base models. drain: see Policy."""
        self._recorder, self._state, self._jobs, self._links = recorder, recorder.state, jobs, links
        self._drain = drain
        self._pools = {name: link.server.pool for name, link in links.items()}
        self.queue = JobQueue()
        self.waiting = WaitingJobs(
            self._state, links, cache, log=recorder.log, record=recorder.record, enqueue=self.enqueue,
            spawn=events.spawn, post=events.post,
        )  # fmt: skip
        self.cancellation_due = True  # whether cancel_waiting() may find a job to cancel
        self._placement_due = True  # whether place() may find a job that can start
        self._mean_seconds = mean_seconds(jobs.values())
        self._avoided: dict[str, frozenset[str]] = {}  # job -> servers on which it failed
        self._slot_holders: defaultdict[str, dict[str, Attempt]] = defaultdict(dict)  # attempts by server, then by name

    def enqueue(self, job: JobState) -> None:
        """Queue a job, or hold it until the jobs it needs are done; cancel it if it was removed from the list."""
        if job.job.id not in self._jobs:
            self._recorder.record("settle", job=job.job.id, state="cancelled", reason=UNLISTED)
            return
        self.cancellation_due |= job.cancel
        avoid = self._servers_to_avoid(job)
        if job.attempts:
            self._avoided[job.job.id] = avoid
        listed = self._jobs[job.job.id]
        if (digest := listed.trains or listed.base) and not self._drain:
            self.waiting.claim(digest)
        if self.waiting.hold(job, listed):
            return
        self.queue.put(listed, job.number, self._mean_seconds, avoid)
        self._placement_due = True

    def _servers_to_avoid(self, job: JobState) -> frozenset[str]:
        """The servers on which a job failed; empty if no other server can run it."""
        failed = frozenset(each.server for each in job.attempts[job.attempts_before_retry :] if each.failure)
        others = failed and any(name not in failed and self._could_run(job.job, name) for name in self._pools)
        return failed if others else frozenset()

    def _could_run(self, job: Job, server: str) -> bool:
        fits = self._pools[server].fits(job.options.gpus, frozenset(job.options.labels))
        return fits and self._links[server].usable

    def servers_changed(self) -> None:
        """Note that servers can be used, or can no longer be used. Updates the servers that queued jobs avoid."""
        self._placement_due = True
        for job_id, avoid in list(self._avoided.items()):
            if job_id in self.queue and self._servers_to_avoid(self._state.jobs[job_id]) != avoid:
                self.queue.remove(job_id)
                self.enqueue(self._state.jobs[job_id])

    def place(self) -> list[Attempt]:
        """Record the start of the jobs that can start now, and return their attempts."""
        if not self._placement_due or self._state.paused or self._drain:
            return []
        self._placement_due = False
        attempts = []
        for job_id, server, slots in self.queue.place(self._pools):
            job = self._state.jobs[job_id]
            self._avoided.pop(job_id, None)
            gpus = [slot.gpu for slot in slots if slot.gpu is not None]
            name = f"{job_id}.{job.next_number}"
            training = self.waiting.running_training(self._jobs[job_id])
            more = {"after": training} if training else {}
            indices = [slot.index for slot in slots]
            self._recorder.record("start", attempt=name, server=server, slots=indices, gpus=gpus, **more)
            attempts.append(job.attempts[-1])
            self.occupy_slots(job.attempts[-1])
        return attempts

    def cancel_waiting(self) -> None:
        """End the waiting jobs that are to be cancelled."""
        if not self.cancellation_due:
            return
        self.cancellation_due = False
        for job in [each for each in self._state.unfinished() if each.cancel and each.state == "waiting"]:
            self.queue.remove(job.job.id)
            self._recorder.record("settle", job=job.job.id, state="cancelled", reason="cancelled on request")
            self._recorder.log(f"cancelled: {job.job.name} while it was waiting")

    def have_no_server(self) -> bool:
        """Whether jobs wait, none runs, and no server can run any of them."""
        counts = self._state.counts
        if self._state.paused or self._drain or not counts["waiting"] or counts["running"] or counts["ending"]:
            return False
        waiting = (each.job for each in self._state.unfinished() if each.state == "waiting")
        return not any(self._could_run(job, name) for job in waiting for name in self._links)

    def occupy_slots(self, attempt: Attempt) -> None:
        """Start no other job on the slots of an attempt."""
        self._slot_holders[attempt.server][attempt.name] = attempt
        if pool := self._pools.get(attempt.server):
            pool.free -= pool.slots_of(attempt.slots, attempt.gpus)

    def free_slots(self, attempt: Attempt) -> None:
        """Let other jobs start on the slots of an attempt."""
        holders = self._slot_holders[attempt.server]
        if holders.pop(attempt.name, None) and (pool := self._pools.get(attempt.server)):
            others = [pool.slots_of(each.slots, each.gpus) for each in holders.values()]
            pool.free |= pool.slots_of(attempt.slots, attempt.gpus).difference(*others)
            pool.freed.update(attempt.gpus)
        self._placement_due = True
