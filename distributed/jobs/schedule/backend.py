"""The interface between the dispatcher and a server: requests, events, errors, and the state of the connection."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from distributed.jobs.journal.state import Attempt
from distributed.jobs.lists.job import Job
from distributed.jobs.schedule.placement import SlotPool

MAX_FAILED_STARTS = 3  # consecutive failed starts after which a server gets no new jobs until it reconnects


class Unreachable(Exception):
    """The connection to a server failed or was lost; the state of its jobs is unknown."""


class ServerUnusable(Exception):
    """A server failed a check and needs manual repair. The message states problem and remedy."""


class NotStarted(Exception):
    """A server did not start an attempt.

    kind: server (a fault of this server, possibly temporary), unusable (this server cannot start any job), job (no
    server can start this job), busy (retry later: another attempt writes to the output directory, or the job that
    trains the base model must enter SLURM's queue first), or base (the base model of the job is missing or damaged in
    the dispatcher's cache).
    """

    def __init__(self, reason: str, kind: str = "server") -> None:
        super().__init__(reason)
        self.kind = kind

    def facts(self, attempt: str) -> dict[str, Any]:
        """The facts of the event `not_started`."""
        return {"attempt": attempt, "reason": str(self), "kind": self.kind}


class JobServer(Protocol):
    """A server that runs jobs. Requests raise Unreachable when the connection is lost.

    The methods that copy or remove results do nothing by default. A server that shares the files of this machine may
    inherit these methods.
    """

    name: str
    pool: SlotPool
    watches_gpus: bool = False
    queues_dependents: bool = False  # whether it accepts an attempt whose base model is still being trained

    def make_room(self, slots: int) -> None:
        """Have at least this number of slots, if the number depends on the jobs."""
        return

    async def connect(self, post: Callable[[Event], None]) -> str:
        """Connect; call post() for each later event. Returns a note for the log. Raises ServerUnusable."""

    async def wait_until_lost(self) -> str:
        """Wait until the connection is lost, and return the reason."""

    async def query(self, attempts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """Return the state of each attempt, and monitor those that run. attempts: name -> output directory."""

    async def start(self, attempt: Attempt, job: Job, needs: Sequence[str]) -> dict[str, Any]:
        """Start an attempt; return its state. Raises NotStarted.

        needs: output directories of the jobs that the option _after of `job` names.
        """

    async def stop(self, attempt: str, kill: bool) -> None:
        """Ask an attempt to stop; the event `ended` follows. kill: without a grace period."""

    async def ensure_base(self, digest: str) -> int:
        """Copy a base model to the server's cache, unless a valid one is there. Returns the number of bytes copied.

        Raises NotStarted and OSError.
        """

    async def remove_output(self, output: str) -> None:
        """Remove the server's copy of an output directory."""
        return

    async def fetch_results(self, attempt: Attempt, job: Job) -> Sequence[str]:
        """Copy the results of an attempt to this machine. Returns the names of files left out. Raises OSError."""
        return ()

    async def send_results(self, jobs: Sequence[Job]) -> None:
        """Copy the output directories of jobs that ran elsewhere to the server. Raises NotStarted and OSError."""
        return

    async def query_gpus(self) -> list[dict[str, Any]]:
        """Return memory (MiB) and number of processes of each GPU and MIG instance; see host.Service.gpus()."""
        return []

    async def close(self) -> None:
        """Disconnect."""


@dataclass(frozen=True)
class Event:
    """An event; Dispatcher has a table of the handlers, by kind."""

    kind: str
    server: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class ServerLink:
    """The connection to a server, and its state in the dispatcher."""

    server: JobServer
    state: str = "connecting"  # connecting, ready, unreachable, or unusable (it failed a check)
    reason: str = ""
    disconnected_at: float = field(default_factory=time.monotonic)  # monotonic time; initially the creation time
    failed_starts: int = 0  # consecutive failed starts
    paused_until: float = 0.0  # monotonic time before which it gets no new jobs
    gpus_known: bool = False  # whether its GPUs have been queried since it connected

    @property
    def usable(self) -> bool:
        """Whether it may get jobs, now or after it connects."""
        return self.state != "unusable" and self.failed_starts < MAX_FAILED_STARTS
