"""Jobs of a list that wait for other jobs or for base models, and the list's claims of base models.

Of all job lists that use a cache, one claims a missing base model to train it; the others wait until it is published.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from itertools import chain
from typing import Any

from distributed.jobs.journal.state import FINAL, Attempt, JobState, ListState
from distributed.jobs.lists.job import Job
from distributed.jobs.schedule.backend import Event, ServerLink
from distributed.jobs.schedule.base_cache import Cache
from distributed.training.base_model import hash_of

LOCK_INTERVAL = 1.0  # seconds between attempts to lock a base model


class WaitingJobs:
    """The waiting jobs of one list."""

    def __init__(
        self, state: ListState, links: Mapping[str, ServerLink], cache: Cache | None, *, log: Callable[[str], None],
        record: Callable[..., None], enqueue: Callable[[JobState], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None], post: Callable[[Event], None],
    ) -> None:  # fmt: skip
        """cache: required for base models. The functions are methods of the dispatcher."""
        self._state, self._links, self._cache = state, links, cache
        self._log, self._record, self._enqueue, self._spawn, self._post = log, record, enqueue, spawn, post
        self._claiming: set[str] = set()  # digests of base models that are being claimed
        self.claimed: dict[str, str] = {}  # digest -> ready (in the cache) or train (this list trains it)
        # Job or base model, as returned by _awaited() -> the jobs that wait for it, by id.
        self._held: defaultdict[str, dict[str, JobState]] = defaultdict(dict)

    def _awaited(self, job: Job) -> str:
        """The id of the job or the digest of the base model that a job waits for; empty if it can be queued."""
        for needed in self._state.predecessors(job):
            if needed.state != "done" and not needed.job.trains:
                return needed.job.id
        digest = job.trains or job.base
        ready = self.claimed.get(digest) == ("train" if job.trains else "ready")
        return "" if not digest or ready or self.running_training(job) else digest

    def running_training(self, job: Job) -> str:
        """The name of the attempt that trains the base model of `job`, if `job` can be queued while this attempt runs.

        Otherwise empty. The server of the attempt must accept such jobs (`queues_dependents`).
        """
        trainer = self._state.trainers.get(job.base)
        if not trainer or not trainer.last or self.claimed.get(job.base) == "ready":
            return ""
        last, link = trainer.last, self._links.get(trainer.last.server)
        queues = last.state == "running" and link is not None and link.server.queues_dependents
        return last.name if queues and not trainer.cancel else ""

    def training_failed(self, attempt: Attempt, end: Mapping[str, Any]) -> bool:
        """Whether an attempt never ran because the training of its base model failed.

        A training without a recorded end counts as failed, because the record of its failure may follow.
        """
        training = self._state.attempt(attempt.queued_after) if attempt.queued_after else None
        never_ran = end.get("code") is None and not attempt.process
        return training is not None and never_ran and (training.open or bool(training.failure))

    def claim(self, digest: str) -> None:
        """Claim a base model, to use or train it. The event `claimed` follows; handle_claim() handles it."""
        if digest not in self._claiming and digest not in self.claimed:
            self._claiming.add(digest)
            self._spawn(self._wait_for_claim(digest))

    async def _wait_for_claim(self, digest: str) -> None:
        assert self._cache
        reported = ""
        while True:
            try:
                outcome = await asyncio.to_thread(self._cache.claim, digest)
            except OSError as error:
                outcome, reason = "busy", f"{error.filename}: {error.strerror}"
            else:
                reason = "locked by another list, which trains or copies it"
            if outcome != "busy":
                break
            if reason != reported:
                reported = reason
                self._log(f"base {hash_of(digest)}: {reason}; waiting")
            await asyncio.sleep(LOCK_INTERVAL)
        self._post(Event("claimed", facts={"digest": digest, "outcome": outcome}))

    def handle_claim(self, digest: str, outcome: str) -> None:
        """Handle the event `claimed`. outcome: ready or train; see Cache.claim()."""
        self._claiming.discard(digest)
        self.claimed[digest] = outcome
        trainer = self._state.trainers.get(digest)
        if trainer is None:
            return
        if outcome == "ready" and trainer.state == "waiting":
            self._record("settle", job=trainer.job.id, state="done", reason="its base model was in the cache")
            self._log(f"done: {trainer.job.name}: its base model was in the cache")
        elif outcome == "train" and trainer.state == "done":
            self._record("requeued", job=trainer.job.id, reason="its base model is missing or damaged")
            self._log(f"base {hash_of(digest)}: missing or damaged; retraining it")
            self._enqueue(trainer)
        elif outcome == "train" and trainer.state == "waiting":
            self._enqueue(trainer)

    def hold(self, job: JobState, listed: Job) -> bool:
        """Hold a job that must wait for another job or for a base model.

        Returns False if the job can be queued. listed: the job as the current jobs file defines it.
        """
        awaited = self._awaited(listed)
        if awaited and not listed.trains:  # a job that trains is queued by handle_claim()
            self._held[awaited][listed.id] = job
        return bool(awaited)

    def check(self) -> bool:
        """Queue held jobs that can start now, and fail those whose predecessors will never be done.

        Returns whether jobs have failed.
        """
        failed: list[str] = []
        for digest, trainer in self._state.trainers.items():
            if trainer.state in ("failed", "cancelled") and self.claimed.pop(digest, ""):
                assert self._cache
                self._cache.release(digest)
        awaited = [each for each, jobs in self._held.items() if jobs]
        for each in chain(awaited, failed):  # the loop extends `failed`
            held, needed = self._held.get(each), self._state.jobs.get(each)
            if not held or (needed and needed.state not in FINAL):
                continue
            needed = needed or self._state.trainers.get(each)
            if self._awaited(next(iter(held.values())).job) != each:
                for job in self._pop(each):
                    self._enqueue(job)
            elif needed and needed.state in ("failed", "cancelled"):
                failed += self._fail(each, needed.reason_of_dependents)
            elif not needed and self.claimed.get(each) == "train":
                remedy = "run without --skip-phase1 to train it"
                failed += self._fail(each, f"base {hash_of(each)} is missing or damaged; {remedy}")
        return bool(failed)

    def _pop(self, awaited: str) -> list[JobState]:
        """Remove the jobs held for a job or base model. Returns those that still wait and are not cancelled."""
        return [job for job in self._held.pop(awaited).values() if job.state == "waiting" and not job.cancel]

    def _fail(self, awaited: str, reason: str) -> list[str]:
        """Fail the jobs that wait for a job or base model. Returns their ids."""
        jobs = self._pop(awaited)
        for job in jobs:
            self._record("settle", job=job.job.id, state="failed", reason=reason)
            self._log(f"failed: {job.job.name}: {reason}")
        return [job.job.id for job in jobs]
