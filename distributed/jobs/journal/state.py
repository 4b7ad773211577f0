"""The state of a job list, derived from the records of its journal.

Every change of state is a record. A record is applied when it is added to the journal, before it is written to disk,
and again when a restarted dispatcher reads the journal.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed import metrics
from distributed.host.signals import signal_name
from distributed.jobs.journal.journal import REQUESTS, Record, request_id
from distributed.jobs.lists.job import GpuId, Job, JsonFloat, Options, json_text, matching
from distributed.training.base_model import hash_of

FINAL = ("done", "failed", "cancelled")
UNLISTED = "no longer in the list"  # reason of a cancelled job
# Failures that do not count against retries. After MAX_INFRASTRUCTURE_FAILURES of them the job fails: it may be their
# cause.
INFRASTRUCTURE_FAILURES = ("server lost", "server restarted", "supervisor killed")
MAX_INFRASTRUCTURE_FAILURES = 5
UNLIMITED_FAILURES = ("preempted",)  # do not count against retries either, and never fail the job
NOT_COPIED = "results not copied"  # failure of an attempt that exited with 0
FINAL_FAILURES = ("cancelled outside", "refused", NOT_COPIED)  # never retried
OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory", "MemoryError")


@dataclass
class Attempt:
    """One attempt of a job, on one server."""

    job: str
    number: int
    server: str
    slots: list[int]
    gpus: list[GpuId]
    start: float  # Unix time of the decision to start it, later replaced by the start time of its command
    queued_after: str = ""  # name of the attempt that trains its base model; empty if the base model was ready
    state: str = "starting"  # starting, running (or waiting in its server's queue), ended, lost
    process: dict[str, Any] = field(default_factory=dict)  # pid, start_time, boot_id; on SLURM also host
    end: float | None = None
    code: int | None = None
    peak_memory: int | None = None  # bytes, of its largest process
    failure: str = ""
    reason: str = ""
    lines: list[str] = field(default_factory=list)
    first_report: tuple[float, float] | None = None  # (step, Unix time) when it first reported a step; not stored

    @property
    def name(self) -> str:
        return f"{self.job}.{self.number}"

    @property
    def location(self) -> str:
        """The server and the GPUs or, without GPUs, the slots of the attempt, such as gpu1:0,1."""
        return f"{self.server}:{','.join(map(str, self.gpus or self.slots))}"

    @property
    def open(self) -> bool:
        """Whether it has neither ended nor been lost."""
        return self.state in ("starting", "running")

    @property
    def failure_text(self) -> str:
        """Failure and reason, for messages."""
        return self.reason if self.reason.startswith(self.failure) else f"{self.failure}: {self.reason}"

    @property
    def failure_name(self) -> str:
        """The failure in one or two words, such as `exit code 1`, `SIGKILL` or `timeout`; empty without a failure."""
        return {"exit code": f"exit code {self.code}", "signal": signal_name(self.code)}.get(self.failure, self.failure)

    @property
    def seconds(self) -> float | None:
        return None if self.end is None else max(0.0, self.end - self.start)

    def public(self) -> dict[str, Any]:
        """The attempt in results.json."""
        return {
            "number": self.number, "server": self.server, "slots": self.slots, "gpus": self.gpus, "start": self.start,
            "end": self.end, "seconds": self.seconds, "exit_code": self.code, "signal": signal_name(self.code) or None,
            "peak_memory": self.peak_memory, "failure": self.failure, "reason": self.reason, "last_lines": self.lines,
        }  # fmt: skip

    @classmethod
    def of_public(cls, job: str, public: Mapping[str, Any]) -> Attempt:
        """The inverse of public(), except for state and process."""
        names = ("number", "server", "slots", "gpus", "start", "end", "peak_memory", "failure", "reason")
        return cls(job, **{name: public[name] for name in names}, code=public["exit_code"], lines=public["last_lines"])


@dataclass
class JobState:
    """The state of one job."""

    job: Job
    number: int  # position in the list
    state: str = "waiting"  # waiting, running, ending (results are being copied), done, failed, cancelled
    reason: str = ""
    cancel: bool = False
    attempts: list[Attempt] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    attempts_before_retry: int = 0  # len(attempts) when the job was last retried on request, listed again or requeued
    next_number: int = 1  # of the next attempt; the number of an attempt that was not started is not reused

    def add_metrics(self, new: Mapping[str, Any]) -> None:
        """Update the metrics. Above MAX_METRICS, only known ones are updated."""
        for key, value in new.items():
            if key in self.metrics or len(self.metrics) < metrics.MAX_METRICS:
                self.metrics[key] = value

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def label(self) -> str:
        """The name of this job or, if it trains a base model, `base HASH`, for messages about jobs that wait for it."""
        return f"base {hash_of(self.job.trains)}" if self.job.trains else self.job.name

    @property
    def reason_of_dependents(self) -> str:
        """The failure reason of the jobs that wait for this job, after it has failed or was cancelled."""
        return f"{self.label} {self.state}"

    @property
    def unlisted(self) -> bool:
        """Whether it was removed from the list before it was done."""
        return self.state == "cancelled" and self.reason == UNLISTED

    def counted_failures(self) -> list[Attempt]:
        """The failed attempts that count against the retries."""
        uncounted = ("", *INFRASTRUCTURE_FAILURES, *UNLIMITED_FAILURES)
        return [each for each in self.attempts[self.attempts_before_retry :] if each.failure not in uncounted]

    def infrastructure_failures(self) -> list[Attempt]:
        """The attempts with one of INFRASTRUCTURE_FAILURES."""
        recent = self.attempts[self.attempts_before_retry :]
        return [each for each in recent if each.failure in INFRASTRUCTURE_FAILURES]

    def outcome(self, attempt: Attempt, listed: Job | None) -> tuple[str, str]:
        """(state, reason) after its last attempt. listed: the job in the list; None if it was removed."""
        if not attempt.failure:
            return "done", attempt.reason
        if self.cancel and attempt.state == "lost":
            return "cancelled", f"cancelled on request, but {attempt.reason}; its processes may still be running"
        if self.cancel or attempt.failure == "cancelled":
            return "cancelled", "cancelled on request"
        reason = f"attempt {attempt.number} on {attempt.server}: {attempt.failure_text}"
        retries = listed.options.retries if listed else 0
        too_many = len(self.infrastructure_failures()) >= MAX_INFRASTRUCTURE_FAILURES
        if attempt.failure in FINAL_FAILURES or too_many or len(self.counted_failures()) > retries:
            return "failed", reason
        return ("waiting", reason) if listed else ("cancelled", UNLISTED)


class ListState:
    """The state of a job list."""

    def __init__(self) -> None:
        self.id = ""
        self.created = 0.0
        self.list_record: dict[str, Any] = {}  # the newest `list` record, without its jobs
        self.jobs: dict[str, JobState] = {}
        self.paused = ""  # why no new jobs start; empty if they do
        self.requests: list[Record] = []
        self.handled_requests: set[str] = set()  # ids of requests
        self.open: dict[str, Attempt] = {}  # attempts by name; see Attempt.open
        self.trainers: dict[str, JobState] = {}  # jobs that train base models, by digest
        self.counts = {"waiting": 0, "running": 0, "ending": 0, "done": 0, "failed": 0, "cancelled": 0}

    @classmethod
    def of(cls, records: Iterable[Record]) -> ListState:
        """The state after all records of a journal. Garbage collection would take half of the time."""
        state = cls()
        gc.disable()
        try:
            for record in records:
                state.apply(record)
        finally:
            gc.enable()
        return state

    def attempt(self, name: str) -> Attempt | None:
        """Look up an attempt by its name, JOB.NUMBER."""
        job, _, number = name.rpartition(".")
        known = self.jobs.get(job)
        return next((each for each in known.attempts if str(each.number) == number), None) if known else None

    def unfinished(self) -> Iterator[JobState]:
        """Jobs that are not done, failed or cancelled, in list order."""
        return (each for each in self.jobs.values() if each.state not in FINAL)

    def lost_attempts(self) -> list[Attempt]:
        """The lost attempts, which may still run."""
        return [attempt for job in self.jobs.values() for attempt in job.attempts if attempt.state == "lost"]

    def predecessors(self, job: Job) -> Iterator[JobState]:
        """The jobs that must be done before `job` starts: those of its _after, then the one that trains its base model.

        The base model must also be in the cache; see WaitingJobs._awaited().
        """
        yield from (self.jobs[each] for each in job.options.after if each in self.jobs)
        if trainer := self.trainers.get(job.base):
            yield trainer

    def waits_for(self, job: JobState) -> JobState | None:
        """The first predecessor that is not done; None if all are done, or if `job` is running or ending."""
        waits = job.state not in ("running", "ending")
        return next((each for each in self.predecessors(job.job) if waits and each.state != "done"), None)

    def reason_of(self, job: JobState) -> str:
        """Why a job is in its state; empty if there is nothing to explain."""
        needed = self.waits_for(job) if job.state == "waiting" else None
        return f"waits for {needed.label}: {needed.state}" if needed else job.reason

    # ---- requests

    def unhandled_requests(self) -> list[Record]:
        """The requests that no dispatcher has handled."""
        return [each for each in self.requests if request_id(each) not in self.handled_requests]

    def select_jobs(self, what: str, selectors: Iterable[str]) -> list[str]:
        """The ids of the jobs that a request names by `all`, `failed`, ids, prefixes of ids, or names.

        what: cancel or retry; for cancel, `all` selects only the unfinished jobs. Raises ValueError if an id or name
        matches no job, or several.
        """
        found: list[str] = []
        for selector in selectors:
            if selector == "all":
                found += [job for job, each in self.jobs.items() if what != "cancel" or each.state not in FINAL]
            elif selector == "failed":
                found += [job for job, each in self.jobs.items() if each.state == "failed"]
            else:
                found.append(self.find_job(selector).job.id)
        return list(dict.fromkeys(found))

    def find_job(self, selector: str) -> JobState:
        """The only job that matches; see job.matching(). Raises ValueError if no job matches, or several."""
        if not selector:
            raise ValueError("job: expected an id or a name, got an empty string")
        found = matching((each.job for each in self.jobs.values()), selector)
        if len(found) == 1:
            return self.jobs[found[0].id]
        if not found:
            raise ValueError(f"job {selector}: not in this list; `status` shows all jobs")
        shown = ", ".join(f"{job.id} ({job.name})" for job in found[:5])
        raise ValueError(f"job {selector}: matches {len(found)} jobs; give one id: {shown}")

    def with_related(self, jobs: Iterable[str]) -> list[str]:
        """These jobs, their failed or cancelled predecessors, and jobs that failed because of them, in list order."""
        failed = {job: each for job, each in self.jobs.items() if each.state in ("failed", "cancelled")}
        dependents: dict[str, list[str]] = {}
        for job, each in failed.items():
            dependents.setdefault(each.reason, []).append(job)
        related = dict.fromkeys(jobs)
        to_follow = [failed[job] for job in related if job in failed]
        for each in to_follow:  # the loop extends this list
            linked = [needed.job.id for needed in self.predecessors(each.job)]
            linked += dependents.get(each.reason_of_dependents, [])
            new = dict.fromkeys(job for job in linked if job in failed and job not in related)
            related |= new
            to_follow += [failed[job] for job in new]
        return [job for job in self.jobs if job in related]

    # ---- records

    def apply(self, record: Record) -> None:
        """Apply a record. A request itself changes no job; a later record `request_handled` or `added` applies it."""
        event = record["event"]
        if event in REQUESTS:
            self.requests.append(record)
        else:
            getattr(self, f"_apply_{event}", lambda _: None)(record)  # records of newer versions are ignored

    def _apply_list(self, record: Record) -> None:
        self.list_record = {key: value for key, value in record.items() if key not in ("event", "time", "jobs")}
        self.id = self.id or record["list"]
        self.created = self.created or record["time"]
        self.paused = ""
        listed = {each["id"] for each in record["jobs"]}
        self._list_jobs(record, 0)
        for removed in [each for each in self.jobs.values() if each.job.id not in listed]:
            if removed.state == "waiting" and removed.next_number == 1:
                self.counts["waiting"] -= 1
                del self.jobs[removed.job.id]
            elif removed.state in ("failed", "cancelled"):
                self._move(removed, "cancelled", UNLISTED)
        self.jobs = dict(sorted(self.jobs.items(), key=lambda item: item[1].number))
        self.trainers = {each.job.trains: each for each in self.jobs.values() if each.job.trains}

    def _apply_added(self, record: Record) -> None:
        """Jobs were added to the list, behind the others."""
        self.handled_requests.add(record["request"])
        self._list_jobs(record, 1 + max((each.number for each in self.jobs.values()), default=-1))

    def _list_jobs(self, record: Record, first: int) -> None:
        """Add the jobs of a record, or update known jobs. first: list position of the first job of the record."""
        for number, each in enumerate(record["jobs"], first):
            written = each.get("written")
            settings = json.loads(written, parse_float=JsonFloat) if written else each["settings"]
            job = Job(
                each["id"], settings, Options.of_public(each["options"]), each["output"],
                each.get("base", ""), each.get("trains", ""), each.get("leak", ""), each.get("file", ""),
            )  # fmt: skip
            if known := self.jobs.get(job.id):
                known.job, known.number = job, number
                if known.unlisted:
                    known.attempts_before_retry = len(known.attempts)
                    self._move(known, "waiting")
            else:
                self.jobs[job.id] = JobState(job, number)
                self.counts["waiting"] += 1
            if job.trains:
                self.trainers[job.trains] = self.jobs[job.id]

    def _move(self, job: JobState, state: str, reason: str = "") -> None:
        self.counts[job.state] -= 1
        self.counts[state] += 1
        job.state, job.reason = state, reason

    def _apply_start(self, record: Record) -> None:
        job_id, _, number = record["attempt"].rpartition(".")
        job = self.jobs[job_id]
        attempt = Attempt(
            job_id, int(number), record["server"], record["slots"], record["gpus"], record["time"],
            record.get("after", ""),
        )  # fmt: skip
        job.attempts.append(attempt)
        job.next_number = attempt.number + 1
        self.open[attempt.name] = attempt
        self._move(job, "running")

    def _apply_running(self, record: Record) -> None:
        if attempt := self.attempt(record["attempt"]):
            if attempt.state == "running":  # its second `running` record: it has left its server's queue
                attempt.start = record["time"]
            attempt.state, attempt.process = "running", record["process"]
            self.jobs[attempt.job].reason = ""

    def _apply_waits(self, record: Record) -> None:
        """The attempt waits in its server's queue."""
        if attempt := self.attempt(record["attempt"]):
            self.jobs[attempt.job].reason = record["reason"]

    def _apply_not_started(self, record: Record) -> None:
        """The server did not start the attempt: remove it."""
        if attempt := self.attempt(record["attempt"]):
            self.open.pop(attempt.name, None)
            job = self.jobs[attempt.job]
            job.attempts.remove(attempt)
            self._move(job, "waiting", record["reason"])

    def _apply_ended(self, record: Record) -> None:
        """The attempt has ended, or is lost and may still run."""
        if attempt := self.attempt(record["attempt"]):
            self.open.pop(attempt.name, None)
            attempt.state = record["event"]
            attempt.start = record.get("started") or attempt.start
            attempt.end = record.get("ended") or record["time"]
            attempt.code, attempt.peak_memory = record.get("code"), record.get("peak_memory")
            attempt.failure, attempt.reason = record["failure"], record["reason"]
            attempt.lines = record.get("lines", [])
            self.jobs[attempt.job].add_metrics(record.get("metrics", {}))
            self._move(self.jobs[attempt.job], "ending")

    _apply_lost = _apply_ended

    def _apply_rejected(self, record: Record) -> None:
        """An attempt exited with 0, but wrote no valid base model, or its results could not be copied."""
        if attempt := self.attempt(record["attempt"]):
            attempt.failure, attempt.reason = record["failure"], record["reason"]

    _apply_base_rejected = _apply_rejected  # in journals of earlier versions

    def _apply_requeued(self, record: Record) -> None:
        """The base model that a finished job trained is missing or damaged: run the job again."""
        job = self.jobs[record["job"]]
        job.attempts_before_retry = len(job.attempts)
        self._move(job, "waiting", record["reason"])

    def _apply_lost_ended(self, record: Record) -> None:
        """A lost attempt was confirmed to have ended."""
        if attempt := self.attempt(record["attempt"]):
            attempt.state = "ended"

    def _apply_settle(self, record: Record) -> None:
        job = self.jobs[record["job"]]
        self._move(job, record["state"], record["reason"])
        if record["state"] in FINAL:
            job.cancel = False

    def _apply_request_handled(self, record: Record) -> None:
        self.handled_requests.add(record["request"])
        for job in map(self.jobs.__getitem__, record["jobs"]):
            if record["what"] == "cancel" and job.state not in FINAL:
                job.cancel = True
            elif record["what"] == "retry" and job.state in ("failed", "cancelled"):
                job.attempts_before_retry = len(job.attempts)
                self._move(job, "waiting", "retry requested")
        if record["what"] == "retry":
            self.paused = ""

    def _apply_pause(self, record: Record) -> None:
        self.paused = record["reason"]


def job_records(jobs: Iterable[Job]) -> list[dict[str, Any]]:
    """The jobs of a `list` or `added` record.

    `written` has the settings of an added job as JSON, in which numbers keep their spelling.
    """
    return [
        {"id": job.id, "settings": dict(job.settings), "options": job.options.public(), "output": job.output}
        | {name: text for name in ("base", "trains", "leak", "file") if (text := getattr(job, name))}
        | ({"written": json_text(dict(job.settings))} if job.file else {})
        for job in jobs
    ]


def classify_end(end: Mapping[str, Any], cancelled: bool) -> tuple[str, str]:
    """(failure, reason) of an ended attempt; ("", note) if it succeeded. end: see host.HostAttempt.end()."""
    code, cause, message = end.get("code"), end.get("cause", ""), end.get("message", "")
    if code == 0 and not cause and not (cancelled and end.get("stop_requested")):
        return "", end.get("note", "")
    if cancelled:
        return "cancelled", "cancelled on request"
    if cause:
        failure, reason = CAUSES.get(cause, ("stopped", ""))
        return failure, reason or message.replace("--timeout", "_timeout") or cause
    return _failure(code, end.get("lines") or [])


# Cause recorded by a supervisor or server -> (failure, reason). If the reason is empty, the recorded message is used.
CAUSES = {
    "rebooted": ("server restarted", "the server rebooted while the job ran"),
    "killed": ("supervisor killed", ""),
    "timeout": ("timeout", ""),
    "cancelled outside": ("cancelled outside", ""),
    "preempted": ("preempted", ""),
    "node failed": ("server lost", ""),
    "out of memory": ("out of memory", ""),
    "not started": ("not started", ""),
}


def _failure(code: int | None, lines: list[str]) -> tuple[str, str]:
    last = next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
    memory = next((line[:300] for line in lines if any(sign in line for sign in OUT_OF_MEMORY)), "")
    if memory:
        return "out of memory", memory
    if name := signal_name(code):
        hint = ", possibly by the kernel's OOM killer (see dmesg)" if name == "SIGKILL" else ""
        return "signal", f"killed by {name}{hint}"
    return "exit code", f"exit code {code}" + (f": {last}" if last else "")
