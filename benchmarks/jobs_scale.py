"""Measure the cost of the dispatcher for 100 servers of 8 slots and 10,000 jobs.

The servers are simulated in this process, without ssh and without processes of jobs. A simulated job reports progress,
as jobs.host.service does, and ends after its run time. The journal is real: it is synced to disk in --directory
(choose one on a real disk). results.json and results.html are written as usual. The CPU time is that of this process,
including the simulation, from the first connection to the last result; it excludes results.html, which another process
writes.

    python -m benchmarks.jobs_scale [--servers 100] [--slots 8] [--jobs 10000] [--seconds 1.5] [--directory .]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distributed.jobs import list_plan, list_start
from distributed.jobs.call import ListOptions
from distributed.jobs.dispatch.dispatcher import Dispatcher
from distributed.jobs.host.service import PROGRESS_INTERVAL
from distributed.jobs.journal.journal import Journal
from distributed.jobs.journal.state import Attempt, ListState, job_records
from distributed.jobs.lists.config import read_jobs
from distributed.jobs.lists.job import Job
from distributed.jobs.schedule.backend import Event, JobServer
from distributed.jobs.schedule.base_cache import Cache
from distributed.jobs.schedule.placement import Slot, SlotPool

PROBE_INTERVAL = 0.05  # seconds between probes of the event loop


class SimulatedServer(JobServer):
    """A simulated server; see backend.JobServer."""

    watches_gpus = queues_dependents = False

    def __init__(self, name: str, slots: int) -> None:
        self.name = name
        self.pool = SlotPool(name, tuple(Slot(number, number) for number in range(slots)))
        self._post: Callable[[Event], None] = lambda _: None

    async def connect(self, post: Callable[[Event], None]) -> str:
        self._post = post
        return ""

    async def wait_until_lost(self) -> str:
        return await asyncio.get_running_loop().create_future()

    async def query(self, attempts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        return {name: {"state": "absent"} for name in attempts}

    async def start(self, attempt: Attempt, job: Job, needs: Sequence[str]) -> dict[str, Any]:
        await asyncio.sleep(0.01)  # a fork and a round trip
        self._continue(attempt.name, time.time(), float(job.settings["seconds"]))
        return {"state": "running", "pid": 4711, "start_time": 815, "boot_id": "2f6e4d4e-4c2f-4c3e-9a51-2b1c6d7e8f90"}

    def _continue(self, attempt: str, started: float, left: float) -> None:
        loop = asyncio.get_running_loop()
        if left <= PROGRESS_INTERVAL:
            loop.call_later(left, self._end, attempt, started)
            return
        self._post(Event("progress", self.name, {"attempt": attempt, "metrics": {"step": left, "loss": 2.7183}}))
        loop.call_later(PROGRESS_INTERVAL, self._continue, attempt, started, left - PROGRESS_INTERVAL)

    def _end(self, attempt: str, started: float) -> None:
        end = {
            "attempt": attempt, "code": 0, "started": started, "ended": time.time(), "peak_memory": 1 << 30,
            "cause": "", "message": "", "lines": [], "metrics": {"step": 0, "steps": 100, "loss": 2.7183},
        }  # fmt: skip
        self._post(Event("ended", self.name, end))

    async def stop(self, attempt: str, kill: bool) -> None:
        """No job is cancelled."""

    async def ensure_base(self, digest: str) -> int:
        """No job starts from a base model."""
        return 0

    async def remove_output(self, output: str) -> None:
        """No base model is evicted."""

    async def fetch_results(self, attempt: Attempt, job: Job) -> None:
        await asyncio.sleep(0.01)

    async def send_results(self, jobs: Sequence[Job]) -> None:
        """No job is retried."""

    async def query_gpus(self) -> list[dict[str, Any]]:
        return []

    async def close(self) -> None:
        """There is no connection."""


class LoopMonitor:
    """Measures the longest time, in seconds, for which the event loop was blocked."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def measure(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(PROBE_INTERVAL)
            self.longest = max(self.longest, time.monotonic() - before - PROBE_INTERVAL)


@contextmanager
def monitored(monitor: LoopMonitor) -> Iterator[None]:
    """Measure the event loop while a dispatcher runs."""
    real = Dispatcher.run

    async def run(self: Dispatcher) -> None:
        measuring = asyncio.ensure_future(monitor.measure())
        try:
            await real(self)
        finally:
            measuring.cancel()

    Dispatcher.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        Dispatcher.run = real  # type: ignore[method-assign]


def cpu_seconds() -> float:
    return time.process_time()


def peak_memory() -> float:
    """Peak memory of this process, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def job_list(count: int, seconds: float) -> list[dict[str, Any]]:
    """A typical jobs.json; the lengths are uniformly distributed around the mean."""
    lengths = random.Random(1)
    return [
        {"fold": number, "prefix": "scale", "batch_size": 64, "lr": 3e-4, "model": "medium", "_retries": 1,
         "seconds": round(lengths.uniform(0.5, 1.5) * seconds, 3)}
        for number in range(count)
    ]  # fmt: skip


def dispatch(jobs: list[Job], servers: list[SimulatedServer], monitor: LoopMonitor) -> float:
    """Run the list; return its CPU seconds."""
    with Journal.open(Path("results.journal")) as journal:
        state = ListState()
        fields = {"list": "0123456789", "cwd": str(Path.cwd()), "script": "train.py", "backend": "ssh"}
        state.apply(journal.add("list", **fields, jobs=job_records(jobs)))
        journal.commit()
        config = list_plan.ListConfig(ListOptions(), None, "train.py", jobs, Cache(Path.cwd()), state.id)
        start = cpu_seconds()
        with monitored(monitor):
            code = list_start.dispatch(journal, state, config, servers)
        spent = cpu_seconds() - start
    if code or state.counts["done"] != len(jobs):
        sys.exit(f"exit code {code}: {state.counts}")
    return spent


def main() -> int:
    """Print CPU time per job, memory, and how long the event loop was blocked."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--servers", type=int, default=100)
    options.add_argument("--slots", type=int, default=8)
    options.add_argument("--jobs", type=int, default=10_000)
    options.add_argument("--seconds", type=float, default=1.5, help="mean length of a job")
    options.add_argument("--directory", type=Path, default=Path(), help="where the journal is written, on a real disk")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory(dir=os.path.abspath(arguments.directory)) as directory:
        os.chdir(directory)
        Path("jobs.json").write_text(json.dumps(job_list(arguments.jobs, arguments.seconds)))
        before, start = peak_memory(), cpu_seconds()
        jobs = read_jobs(Path("jobs.json"))
        reading = cpu_seconds() - start
        servers = [SimulatedServer(f"gpu{number}", arguments.slots) for number in range(arguments.servers)]
        monitor, wall = LoopMonitor(), time.monotonic()
        spent = dispatch(jobs, servers, monitor)
        wall = time.monotonic() - wall
        used, size = peak_memory(), Path("results.journal").stat().st_size
        gc.collect()
        start = cpu_seconds()
        with Journal.open(Path("results.journal")) as journal:
            ListState.of(journal.records)
        replay = cpu_seconds() - start
        os.chdir("/")
    slots = arguments.servers * arguments.slots
    least = sum(job.settings["seconds"] for job in jobs) / slots
    print(f"{arguments.jobs:,} jobs on {arguments.servers} servers, {slots} slots; journal in {arguments.directory}:")
    print(f"  dispatcher: {1000 * spent / arguments.jobs:.2f} ms of CPU per job (target: at most 1)")
    print(f"  peak memory: {used:.0f} MB, of which {used - before:.0f} MB since before the list was read")
    print(f"  wall: {wall:.1f} s, of which the jobs need {least:.1f} s")
    print(f"  event loop blocked for at most {monitor.longest:.2f} s")
    print(f"  list read in {reading:.2f} s of CPU; journal of {size / 1e6:.1f} MB replayed in {replay:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
