"""The user's options for the dispatcher, and the failures after which it starts no more jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from distributed.jobs.dispatch.recorder import Recorder
from distributed.jobs.journal.state import Attempt, JobState
from distributed.jobs.lists.job import Job

EARLY_FAILURE_SECONDS = 30.0  # a failure within this time suggests a fault of all jobs, such as a missing package
MAX_EARLY_FAILURES = 5  # consecutive early failures that pause the list


@dataclass(frozen=True)
class Policy:
    """The user's options for the dispatcher."""

    max_failures: int | None = None  # number of failed jobs that pauses the list; None: no limit
    fail_fast: bool = False
    lost_after: float = 600.0  # seconds without a connection after which the jobs of a server restart elsewhere
    gpu_free_mib: int | None = None  # MiB that must be free on a GPU; None: see connections.GPU_IN_USE_MIB
    drain: bool = False  # start no jobs; return when all requests to cancel are done


class Limits:
    """Counts failures, and pauses the list."""

    def __init__(
        self, recorder: Recorder, policy: Policy, jobs: Mapping[str, Job], cancel: Callable[[str, list[str]], None]
    ) -> None:
        """jobs: of the list, by id. cancel: called with the reason and the ids of the jobs that fail_fast cancels."""
        self._recorder, self._policy, self._jobs, self._cancel = recorder, policy, jobs, cancel
        self._early_failures = 0  # consecutive early failures
        self._failing: set[str] = set()  # failed jobs whose results are not copied yet

    def count(self, job: JobState, attempt: Attempt) -> None:
        """Count an attempt if it failed. Pause the list at a limit of failures.

        With fail_fast, a failed job pauses the list and cancels all other unfinished jobs. An ended attempt is counted
        before its results are copied, so that no other job starts meanwhile.
        """
        state = self._recorder.state
        fails = job.outcome(attempt, self._jobs.get(job.job.id))[0] == "failed"
        if fails:
            self._failing.add(job.job.id)
        if attempt in job.counted_failures() and attempt.failure != "cancelled":
            early = (attempt.seconds or 0.0) < EARLY_FAILURE_SECONDS
            self._early_failures = self._early_failures + 1 if early else 0
        elif not attempt.failure:
            self._early_failures = 0
        if state.paused:
            return
        if self._policy.fail_fast and fails:
            self.pause(f"--fail-fast: {job.job.name} failed")
            self._cancel("--fail-fast", [each.job.id for each in state.unfinished() if each is not job])
        elif fails:
            self.pause_at_max_failures()
        if self._early_failures >= MAX_EARLY_FAILURES:
            self.pause(
                f"{self._early_failures} attempts in a row failed within {EARLY_FAILURE_SECONDS:.0f} s each; the last: "
                f"{attempt.failure_text}; fix the cause, then run `retry failed` and `resume`"
            )

    def settled(self, job: JobState) -> None:
        """Note that the state counts the failure of a job now."""
        self._failing.discard(job.job.id)

    def pause_at_max_failures(self) -> None:
        """Pause the list if it is not paused yet and --max-failures is reached."""
        state, limit = self._recorder.state, self._policy.max_failures
        failed = state.counts["failed"] + len(self._failing)
        if limit is not None and failed >= limit and not state.paused:
            self.pause(f"--max-failures {limit}: {failed} job{'s' * (failed != 1)} failed")

    def pause(self, reason: str) -> None:
        """Start no more jobs until the list is resumed."""
        self._recorder.record("pause", reason=reason)
        self._early_failures = 0
        self._recorder.log(f"paused: {reason}")
        self._recorder.notify("pause", f"paused: {reason}", cause=reason)
