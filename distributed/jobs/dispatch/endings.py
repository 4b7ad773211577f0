"""The end of attempts: the record of an end, the copy of the results, and what follows for the job."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from distributed.jobs.dispatch.connections import RETRY_DELAYS
from distributed.jobs.dispatch.events import POLL_INTERVAL, EventQueue
from distributed.jobs.dispatch.limits import Limits
from distributed.jobs.dispatch.recorder import Recorder
from distributed.jobs.dispatch.starts import Starts
from distributed.jobs.journal.state import NOT_COPIED, Attempt, JobState, classify_end
from distributed.jobs.lists.job import Job
from distributed.jobs.schedule.backend import Event, JobServer, ServerLink, Unreachable
from distributed.jobs.schedule.base_cache import Cache
from distributed.training.base_model import BaseModelError

MAX_FAILED_COPIES = 6  # consecutive failures after which the results of an attempt are no longer copied
MAX_LOST_COPIES = 50  # used instead of MAX_FAILED_COPIES if the last failure is a lost connection
NO_SPACE = ("No space left on device", "Disk quota exceeded")
SHOWN = 5  # maximum number of names in a message


class Endings:
    """The attempts of a list that have ended, until their jobs are settled."""

    def __init__(
        self, recorder: Recorder, events: EventQueue, jobs: Mapping[str, Job], links: Mapping[str, ServerLink],
        starts: Starts, limits: Limits, cache: Cache | None,
    ) -> None:  # fmt: skip
        """jobs: of the list, by id. cache: required for base models."""
        self._recorder, self._state, self._events = recorder, recorder.state, events
        self._jobs, self._links, self._starts, self._limits = jobs, links, starts, limits
        self._cache = cache

    # ---- the end of an attempt

    def on_ended(self, event: Event) -> None:
        attempt = self._state.attempt(event.facts["attempt"])
        if attempt is None or attempt.server != event.server:  # a server reports only its own attempts
            return
        if attempt.state == "lost":
            self.record_lost_ended(attempt)
        elif attempt.open:
            self.end(attempt, event.facts)

    def end(self, attempt: Attempt, end: Mapping[str, Any]) -> None:
        """Record the end that the server of an attempt reports."""
        job = self._state.jobs[attempt.job]
        if self._starts.waiting.training_failed(attempt, end) and not job.cancel:
            self._starts.free_slots(attempt)
            self._recorder.record("not_started", attempt=attempt.name, reason="its base model was not trained")
            self._starts.enqueue(job)
            return
        failure, reason = classify_end(end, job.cancel)
        kept = {key: end[key] for key in ("code", "started", "ended", "peak_memory", "lines", "metrics") if key in end}
        self._record_end(attempt, failure, reason, **kept)

    def refuse(self, attempt: Attempt, reason: str) -> None:
        """Record the end of an attempt that no server can start."""
        self._record_end(attempt, "refused", reason)

    def _record_end(self, attempt: Attempt, failure: str, reason: str, **facts: Any) -> None:
        job = self._state.jobs[attempt.job]
        self._starts.free_slots(attempt)
        self._recorder.record("ended", attempt=attempt.name, failure=failure, reason=reason, **facts)
        self._limits.count(job, attempt)
        self._after_end(job, attempt)

    def lose(self, attempt: Attempt, failure: str, reason: str) -> None:
        """Mark an attempt as lost. If it was open, its slots stay occupied until its server reports its end."""
        known = {"ended": attempt.end, "code": attempt.code, "peak_memory": attempt.peak_memory, "lines": attempt.lines}
        self._recorder.record("lost", attempt=attempt.name, failure=failure, reason=reason, **known)
        self._after_end(self._state.jobs[attempt.job], attempt)

    def record_lost_ended(self, attempt: Attempt) -> None:
        """Record that a lost attempt does not run."""
        self._recorder.record("lost_ended", attempt=attempt.name)
        self._starts.free_slots(attempt)

    def give_up_server(self, server: str, fault: str, cause: str) -> None:
        """Restart the jobs of a lost server elsewhere, even if a job succeeded but its results were not copied."""
        for attempt in [each for each in self._state.open.values() if each.server == server]:
            self.lose(attempt, "server lost", f"{server} {fault}{cause}")
        for job in [each for each in self._state.unfinished() if each.state == "ending"]:
            last = job.last
            if last and last.server == server and last.failure:
                self._settle(job, last)
            elif last and last.server == server:
                self.lose(last, "server lost", f"{server} {fault} before its results were copied{cause}")

    def resume(self, job: JobState, attempt: Attempt) -> None:
        """Continue with the last attempt of a job, whose end an earlier dispatcher recorded."""
        self._limits.count(job, attempt)
        self._after_end(job, attempt)

    def _after_end(self, job: JobState, attempt: Attempt) -> None:
        """Copy the results, then settle the job."""
        if attempt.state == "lost" or attempt.failure == "refused":
            self._settle(job, attempt)
        else:
            self._recorder.execute(self._fetch_results, job, attempt)

    # ---- results

    async def _fetch_results(self, job: JobState, attempt: Attempt) -> None:
        link, publishes = self._links.get(attempt.server), bool(job.job.trains and not attempt.failure)
        logged = note = failure = reason = ""
        failures = 0
        while job.state == "ending" and job.last is attempt:
            if not link or link.state != "ready":
                failures = 0
                await asyncio.sleep(1.0)
                continue
            if publishes and job.job.trains not in self._starts.waiting.claimed:  # another list may be training it
                await asyncio.sleep(POLL_INTERVAL)
                continue
            try:
                if attempt.failure == "cancelled":
                    note = await cancellation_result(link.server, attempt)
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
                    self._recorder.log(f"{job.job.name}: cannot copy results: {logged}; retrying")
            await asyncio.sleep(RETRY_DELAYS[min(failures, len(RETRY_DELAYS)) - 1])
        facts = {"job": job.job.id, "attempt": attempt.name, "note": note, "failure": failure, "reason": reason}
        self._events.post(Event("results_fetched", attempt.server, facts))

    def _log_left_out(self, attempt: Attempt, output: str, names: Sequence[str]) -> None:
        """Log files that were not copied. names: relative to the output directory."""
        if names:
            shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if names[SHOWN:] else "")
            rule = "only files, directories and links inside of it are copied, but none of git"
            self._recorder.log(f"{attempt.server}: not copied to {output}: {shown}; {rule}")

    async def _publish(self, server: JobServer, job: JobState, attempt: Attempt) -> None:
        """Publish a job's trained base model to the cache. Raises BaseModelError, OSError and Unreachable."""
        assert self._cache
        digest = job.job.trains
        facts = {"settings": dict(job.job.settings), "server": attempt.server, "seconds": attempt.seconds,
                 "created": attempt.end}  # fmt: skip
        await asyncio.to_thread(self._cache.publish, digest, job.job.output, **facts)
        self._starts.waiting.claimed[digest] = "ready"
        server.pool.bases.add(digest)

    def on_results_fetched(self, event: Event) -> None:
        job = self._state.jobs[event.facts["job"]]
        if job.state == "ending" and job.last and job.last.name == event.facts["attempt"]:
            failure, reason, note = (event.facts[name] for name in ("failure", "reason", "note"))
            if failure and job.last.failure:  # the attempt keeps its failure
                note = "; ".join(filter(None, [note, f"{failure}: {reason}"]))
            elif failure:
                reason = "; ".join(filter(None, [reason, job.last.reason]))
                self._recorder.record("rejected", attempt=job.last.name, failure=failure, reason=reason)
                self._limits.count(job, job.last)
            self._settle(job, job.last, note)

    # ---- the job

    def _settle(self, job: JobState, attempt: Attempt, note: str = "") -> None:
        """End a job, or enqueue it again."""
        state, reason = job.outcome(attempt, self._jobs.get(job.job.id))
        reason = "; ".join(filter(None, [reason, note]))
        self._recorder.record("settle", job=job.job.id, state=state, reason=reason)
        self._log_outcome(job, attempt, state, reason)
        if state == "failed" and self._state.counts["failed"] == 1:
            text = f"{job.job.name} failed: {reason}"
            self._recorder.notify("first failure", text, cause=reason, host=attempt.server)
        if state == "waiting":
            self._starts.enqueue(job)
        self._limits.settled(job)

    def _log_outcome(self, job: JobState, attempt: Attempt, state: str, reason: str) -> None:
        took = f" after {attempt.seconds:.1f} s" if attempt.seconds is not None else ""
        cause = {"done": "", "cancelled": f": {reason}"}.get(state, f": {attempt.failure_text}")
        if state == "waiting":
            text = f"retry: {job.job.name}: attempt {attempt.number} on {attempt.server}"
        else:
            text = f"{state}: {job.job.name} on {attempt.location}"
        self._recorder.log(f"{text}{took}{cause}")


async def cancellation_result(server: JobServer, attempt: Attempt) -> str:
    """Return a text for the log: that no process remains, and how much memory of the attempt's GPUs is in use.

    No process remains, because the supervisor waits for all processes of the attempt, and it has exited.
    """
    gpus = await server.query_gpus() if attempt.gpus else []
    used = {gpu["index"]: gpu.get("used") for gpu in gpus}
    shown = [f"GPU {gpu}: {used[gpu]} MiB in use" for gpu in attempt.gpus if used.get(gpu) is not None]
    return "; ".join(filter(None, ["no process remains", ", ".join(shown)]))


def gives_up_copying(error: Exception, failures: int) -> bool:
    """Whether to stop copying the results of an attempt. failures: number of consecutive errors, including `error`."""
    limit = MAX_LOST_COPIES if isinstance(error, Unreachable) else MAX_FAILED_COPIES
    return failures >= limit and not lacks_space(error)


def lacks_space(error: Exception) -> bool:
    return any(sign in str(error) for sign in NO_SPACE)
