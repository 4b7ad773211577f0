"""The state of a job list: what the records of its journal make of it, one after the other.

Every change is a record that is applied here, when it happens and when the journal is read again: so a dispatcher that
was killed and started again knows what the first one knew.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed.jobs.job import Job, Options
from distributed.jobs.journal import REQUESTS, Record

FINAL = ("done", "failed", "cancelled")
UNLISTED = "no longer in the list"  # why a job was cancelled
# Failures that say nothing about the job. A job that has many of them may still be their cause.
NOT_THE_JOB = ("server lost", "server restarted", "supervisor killed", "preempted")
MOST_LOST = 5
ORDINARY = ("preempted",)  # so often as SLURM likes
FINAL_FAILURES = ("cancelled outside", "refused")  # another attempt would not be wanted, or be refused, too
OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory", "MemoryError")


@dataclass
class Attempt:
    """One try of a job on one server."""

    job: str
    number: int
    server: str
    slots: list[int]
    gpus: list[int]
    start: float  # Unix seconds: when it was decided, then when its command was started
    after: str = ""  # the attempt that trains its base model, for which it waits in a queue of its server
    state: str = "starting"  # starting, running, ended, lost
    process: dict[str, Any] = field(default_factory=dict)  # pid, start_time, boot_id
    end: float | None = None
    code: int | None = None
    peak_memory: int | None = None  # bytes, of its largest process
    failure: str = ""
    reason: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.job}.{self.number}"

    @property
    def open(self) -> bool:
        """Whether it may be running."""
        return self.state in ("starting", "running")

    @property
    def how(self) -> str:
        """How it failed, in a sentence."""
        return self.reason if self.reason.startswith(self.failure) else f"{self.failure}: {self.reason}"

    @property
    def seconds(self) -> float | None:
        return None if self.end is None else max(0.0, self.end - self.start)


@dataclass
class JobState:
    """One job, and how far it has come."""

    job: Job
    number: int  # place in the list
    state: str = "waiting"  # waiting, running, ending (its results are copied), done, failed, cancelled
    reason: str = ""
    cancel: bool = False
    attempts: list[Attempt] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    forgiven: int = 0  # attempts before the last request to retry
    next_number: int = 1  # of an attempt; none is used twice, not even that of one that was not started

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def dropped(self) -> bool:
        """Whether it was taken out of the list before it was done."""
        return self.state == "cancelled" and self.reason == UNLISTED

    def failures(self) -> list[Attempt]:
        """Attempts that count against the job's retries."""
        return [each for each in self.attempts[self.forgiven :] if each.failure and each.failure not in NOT_THE_JOB]

    def lost(self) -> list[Attempt]:
        """Attempts that failed for another reason than the job."""
        known = set(NOT_THE_JOB).difference(ORDINARY)
        return [each for each in self.attempts[self.forgiven :] if each.failure in known]


class State:
    """All jobs of a list."""

    def __init__(self) -> None:
        self.id = ""
        self.created = 0.0
        self.about: dict[str, Any] = {}  # what the newest `list` record says
        self.jobs: dict[str, JobState] = {}
        self.paused = ""  # why nothing new is started
        self.answered: set[str] = set()  # ids of requests
        self.open: dict[str, Attempt] = {}  # attempts that may be running, by name
        self.trainers: dict[str, JobState] = {}  # jobs that train base models, by digest
        self.counts = {"waiting": 0, "running": 0, "ending": 0, "done": 0, "failed": 0, "cancelled": 0}

    @classmethod
    def of(cls, records: Iterable[Record]) -> State:
        """What a journal tells."""
        state = cls()
        for record in records:
            state.apply(record)
        return state

    def attempt(self, name: str) -> Attempt | None:
        """By its name, JOB.NUMBER."""
        job, _, number = name.rpartition(".")
        known = self.jobs.get(job)
        return next((each for each in known.attempts if str(each.number) == number), None) if known else None

    def unfinished(self) -> Iterator[JobState]:
        """Jobs that are neither done nor failed nor cancelled, in the order of the list."""
        return (each for each in self.jobs.values() if each.state not in FINAL)

    def given_up(self) -> list[Attempt]:
        """Attempts that may still run on servers that were lost."""
        return [attempt for job in self.jobs.values() for attempt in job.attempts if attempt.state == "lost"]

    def waits_for(self, job: JobState) -> JobState | None:
        """The job that trains the base model of this one, as long as that is to come."""
        trainer = self.trainers.get(job.job.base)
        return trainer if trainer and trainer.state != "done" and job.state not in ("running", "ending") else None

    # ---- records

    def apply(self, record: Record) -> None:
        """Change the state as a record says; a request changes nothing before it is answered by `asked`."""
        event = record["event"]
        if event not in REQUESTS:
            getattr(self, f"_{event}", self._unknown)(record)

    def _unknown(self, record: Record) -> None:
        """Of a newer version: ignored."""

    def _list(self, record: Record) -> None:
        self.about = {key: value for key, value in record.items() if key not in ("event", "time", "jobs")}
        self.id = self.id or record["list"]
        self.created = self.created or record["time"]
        self.paused = ""
        listed = {each["id"] for each in record["jobs"]}
        for number, each in enumerate(record["jobs"]):
            job = Job(
                each["id"], each["settings"], Options.of_public(each["options"]), each["output"],
                each.get("base", ""), each.get("trains", ""),
            )  # fmt: skip
            if known := self.jobs.get(job.id):
                known.job, known.number = job, number
                if known.dropped:
                    known.forgiven = len(known.attempts)
                    self._move(known, "waiting")
            else:
                self.jobs[job.id] = JobState(job, number)
                self.counts["waiting"] += 1
        for gone in [each for each in self.jobs.values() if each.job.id not in listed]:
            if gone.state == "waiting" and gone.next_number == 1:
                self.counts["waiting"] -= 1
                del self.jobs[gone.job.id]
            elif gone.state in ("failed", "cancelled"):
                self._move(gone, "cancelled", UNLISTED)
        self.jobs = dict(sorted(self.jobs.items(), key=lambda item: item[1].number))
        self.trainers = {each.job.trains: each for each in self.jobs.values() if each.job.trains}

    def _move(self, job: JobState, state: str, reason: str = "") -> None:
        self.counts[job.state] -= 1
        self.counts[state] += 1
        job.state, job.reason = state, reason

    def _start(self, record: Record) -> None:
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

    def _running(self, record: Record) -> None:
        if attempt := self.attempt(record["attempt"]):
            if attempt.state == "running":  # it has waited in a queue of its server
                attempt.start = record["time"]
            attempt.state, attempt.process = "running", record["process"]
            self.jobs[attempt.job].reason = ""

    def _waits(self, record: Record) -> None:
        """Its server has taken the attempt, and has not started its command yet."""
        if attempt := self.attempt(record["attempt"]):
            self.jobs[attempt.job].reason = record["reason"]

    def _not_started(self, record: Record) -> None:
        """For a reason of the server: the attempt never was one."""
        if attempt := self.attempt(record["attempt"]):
            self.open.pop(attempt.name, None)
            job = self.jobs[attempt.job]
            job.attempts.remove(attempt)
            self._move(job, "waiting", record["reason"])

    def _ended(self, record: Record) -> None:
        if attempt := self.attempt(record["attempt"]):
            self._end(attempt, record)
            job = self.jobs[attempt.job]
            job.metrics |= record.get("metrics", {})
            self._move(job, "ending")

    def _lost(self, record: Record) -> None:
        if attempt := self.attempt(record["attempt"]):
            self._end(attempt, record)
            attempt.state = "lost"
            self._move(self.jobs[attempt.job], "ending")

    def _end(self, attempt: Attempt, record: Record) -> None:
        self.open.pop(attempt.name, None)
        attempt.state = "ended"
        attempt.start = record.get("started") or attempt.start
        attempt.end = record.get("ended") or record["time"]
        attempt.code, attempt.peak_memory = record.get("code"), record.get("peak_memory")
        attempt.failure, attempt.reason = record["failure"], record["reason"]
        attempt.lines = record.get("lines", [])

    def _unfit(self, record: Record) -> None:
        """An attempt that seemed to succeed did not leave what it was to make."""
        if attempt := self.attempt(record["attempt"]):
            attempt.failure, attempt.reason = record["failure"], record["reason"]

    def _again(self, record: Record) -> None:
        """What a job that was done has made is lost or damaged."""
        job = self.jobs[record["job"]]
        job.forgiven = len(job.attempts)
        self._move(job, "waiting", record["reason"])

    def _gone(self, record: Record) -> None:
        """An attempt that was given up as lost has been ended."""
        if attempt := self.attempt(record["attempt"]):
            attempt.state = "ended"

    def _settle(self, record: Record) -> None:
        job = self.jobs[record["job"]]
        self._move(job, record["state"], record["reason"])
        if record["state"] in FINAL:
            job.cancel = False

    def _asked(self, record: Record) -> None:
        self.answered.add(record["request"])
        for job in map(self.jobs.__getitem__, record["jobs"]):
            if record["what"] == "cancel" and job.state not in FINAL:
                job.cancel = True
            elif record["what"] == "retry" and job.state in ("failed", "cancelled"):
                job.forgiven = len(job.attempts)
                self._move(job, "waiting", "retry was asked for")
        if record["what"] == "retry":
            self.paused = ""

    def _pause(self, record: Record) -> None:
        self.paused = record["reason"]


def listed(jobs: Iterable[Job]) -> list[dict[str, Any]]:
    """Jobs as a `list` record has them."""
    return [
        {"id": job.id, "settings": dict(job.settings), "options": job.options.public(), "output": job.output}
        | {name: digest for name, digest in (("base", job.base), ("trains", job.trains)) if digest}
        for job in jobs
    ]


def unanswered(state: State, requests: Iterable[Record]) -> list[Record]:
    """Of these records the requests that no dispatcher has dealt with."""
    return [each for each in requests if each["event"] in REQUESTS and request_id(each) not in state.answered]


def request_id(request: Record) -> str:
    return f"{request['event']} {request['time']} {' '.join(request['jobs'])}"


def chosen(state: State, what: str, words: Iterable[str]) -> list[str]:
    """The ids of the jobs that a request is about: `all`, `failed`, ids, their beginnings, or names.

    Raises:
        ValueError: a word that names no job, or several.
    """
    found: list[str] = []
    for word in words:
        if word == "all":
            found += [job for job, each in state.jobs.items() if what != "cancel" or each.state not in FINAL]
        elif word == "failed":
            found += [job for job, each in state.jobs.items() if each.state == "failed"]
        else:
            found.append(one(state, word))
    return list(dict.fromkeys(found))


def one(state: State, word: str) -> str:
    """The id of the one job that a word names. Raises ValueError."""
    if not word:
        raise ValueError("job: expected an id or a name, got an empty word")
    exact = [job for job, each in state.jobs.items() if word in (job, each.job.name, each.job.output.rstrip("/"))]
    close = exact or [job for job in state.jobs if job.startswith(word)]
    close = close or [job for job, each in state.jobs.items() if word in each.job.name]
    if len(close) == 1:
        return close[0]
    if not close:
        raise ValueError(f"job {word}: there is no such job in this list; `status` shows all")
    shown = ", ".join(f"{job} ({state.jobs[job].job.name})" for job in close[:5])
    raise ValueError(f"job {word}: names {len(close)} jobs; give the id of one: {shown}")


def judge(end: Mapping[str, Any], cancelled: bool) -> tuple[str, str]:
    """(failure, reason) of an attempt that has ended; both empty for success.

    end: what host.Attempt.end() found.
    """
    code, cause, message = end.get("code"), end.get("cause", ""), end.get("message", "")
    if code == 0 and not cause and not (cancelled and end.get("asked")):
        return "", ""
    if cancelled:
        return "cancelled", "cancelled on request"
    if cause:
        failure, said = CAUSES.get(cause, ("stopped", ""))
        return failure, said or message.replace("--timeout", "_timeout") or cause
    return _failure(code, end.get("lines") or [])


# What a supervisor wrote down about the end that it made, or a server found.
CAUSES = {
    "rebooted": ("server restarted", "the server was restarted while the job ran"),
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
    memory = next((line[:300] for line in lines if any(word in line for word in OUT_OF_MEMORY)), "")
    if memory:
        return "out of memory", memory
    if name := signal_name(code):
        more = "; the kernel does that when memory is short (dmesg shows it)" if name == "SIGKILL" else ""
        return "signal", f"ended by {name}{more}"
    return "exit code", f"exit code {code}" + (f": {last}" if last else "")


def signal_name(code: int | None) -> str:
    """SIGKILL for 137; empty for what is no signal."""
    try:
        return signal.Signals(code - 128).name if code and code > 128 else ""
    except ValueError:
        return ""
