"""The jobs in results.json and their metrics files, as the page of a list reads them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed.jobs.journal.state import Attempt
from distributed.metrics import MAX_READ
from distributed.records import number
from distributed.report.history import History, read_metrics
from distributed.report.page_parts import ranges

MAX_LINES = 100_000  # lines read from all metrics files together, see history.read_metrics()
MIN_LINES = 200  # lines read from each metrics file, even if MAX_LINES is then exceeded
MAX_BYTES, MIN_BYTES = 1 << 30, 1 << 20  # the same in bytes


@dataclass(frozen=True)
class JobEntry:
    """A job in results.json; `position` counts from 1."""

    position: int
    id: str
    name: str
    state: str
    reason: str
    output: str
    settings: Mapping[str, Any]
    metrics: Mapping[str, Any]
    attempts: tuple[Attempt, ...]
    base: str  # the base model that it starts from; empty for none
    trains: str  # the base model that it trains; empty for none
    leak: str  # how the base model was trained on the job's held-out data; empty if it was not

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None


def jobs_of(results: Mapping[str, Any]) -> list[JobEntry]:
    """The jobs of results.json in their order."""
    return [
        JobEntry(
            position, job["id"], job["name"], job["state"], job["reason"], job["output"], job["settings"],
            job["metrics"], tuple(Attempt.of_public(job["id"], each) for each in job["attempts"]),
            str(job["options"].get("base_model_hash", "")), job.get("trains_base_model", ""),
            job.get("leak", ""),
        )
        for position, job in enumerate(results["jobs"], 1)
    ]  # fmt: skip


def outcome_of(attempt: Attempt, job: JobEntry) -> str:
    """The key of LEGEND for an attempt of a job."""
    if attempt.failure in ("cancelled", "server lost"):
        return attempt.failure.removeprefix("server ")
    if attempt.failure:
        return "failed"
    if attempt.end is not None:
        return "done"
    return "running" if job.state == "running" else "cancelled"


def location_of(attempt: Attempt) -> str:
    """Server and GPUs of an attempt, such as gpu1:0-3. MIG instances are named by UUID."""
    indices = ranges(sorted(gpu for gpu in attempt.gpus if isinstance(gpu, int)))
    gpus = ", ".join(filter(None, [indices, *(gpu for gpu in attempt.gpus if isinstance(gpu, str))]))
    return ":".join(filter(None, [attempt.server, gpus]))


def read_curves(root: Path, jobs: Sequence[JobEntry], notes: list[str]) -> dict[str, History]:
    """Read the metrics files that exist. Returns metrics by job id, and appends read errors to `notes`."""
    curves = {}
    limit = max(MIN_LINES, MAX_LINES // max(1, len(jobs)))
    size = min(MAX_READ, max(MIN_BYTES, MAX_BYTES // max(1, len(jobs))))
    for job in jobs:
        path = os.path.join(root, job.output, "metrics.jsonl")
        if os.path.isfile(path):
            found: list[str] = []
            curves[job.id] = read_metrics(Path(path), found, limit, size)
            notes += [f"{job.output}/{note}" for note in found]
    return curves


def working_directory(results: Path, jobs: Iterable[JobEntry]) -> Path:
    """The working directory of the list: the closest parent of results.json that contains an output directory.

    If there is none, the current directory.
    """
    outputs = [job.output for job in jobs]
    parents = results.absolute().parents
    return next((path for path in parents if any(os.path.isdir(path / output) for output in outputs)), Path.cwd())


def held_out_losses(job: JobEntry, curves: Mapping[str, History]) -> list[float]:
    history = curves.get(job.id)
    curve = [loss for _, loss in history.held_out_losses()] if history else []
    return [*curve, number(job.metrics.get("held_out_loss"))]


def final(job: JobEntry, curves: Mapping[str, History]) -> dict[str, Any]:
    """The last metrics of a job, from the results. Losses and step that are missing there come from its curve."""
    known: dict[str, Any] = {}
    if history := curves.get(job.id):
        for lines, key in ((history.steps, "loss"), (history.held_out, "held_out_loss")):
            if lines and key in lines[-1]:
                step = lines[-1]["step"]
                known |= {key: number(lines[-1][key]), "step": max(step, known.get("step", step))}
    return known | {key: value for key, value in job.metrics.items() if value is not None}


def has_losses(history: History) -> bool:
    return bool(history.held_out) or any("loss" in line for line in history.steps)
