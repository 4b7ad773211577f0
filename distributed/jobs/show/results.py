"""Write results.json and results.html of a job list.

Both files are replaced atomically. A list may have many thousand jobs, few of which change between two writes, so the
JSON text of each job is cached. The page of such a list takes seconds; a child process writes it while the list runs.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from distributed.files import KIT, user_file, write_file
from distributed.jobs.journal.state import JobState, ListState
from distributed.jobs.schedule.backend import ServerLink
from distributed.jobs.show import page
from distributed.training.base_model import CACHE, hash_of
from distributed.trust import SHARED

WRITE_INTERVAL = 1.0  # minimum seconds between writes of results.json, or 20 times the duration of a write if longer
PAGE_INTERVAL = 30.0  # minimum seconds between writes of results.html, or 50 times the duration of a write if longer
RUN_MODULE = Path(KIT, "scripts", "lib", "module.py")
NO_JOBS = '\n  "jobs": []'  # occurs once in the JSON of document(), as deeper objects are indented further


def document(state: ListState, links: Mapping[str, ServerLink], outcome: str, reason: str = "") -> dict[str, Any]:
    """results.json without its jobs. outcome: running, paused, finished, interrupted or cancelled.

    totals.seconds: from the creation of the list until now, or until the end of the last attempt once neither the
    dispatcher nor a job runs.
    """
    now = time.time()
    attempts = [attempt for job in state.jobs.values() for attempt in job.attempts]
    slot_seconds = sum((attempt.end or now) - attempt.start for attempt in attempts for _ in attempt.slots)
    active = outcome == "running" or state.open
    end = now if active else max([state.created, *(attempt.end for attempt in attempts if attempt.end)])
    counts = state.counts
    totals = {
        "jobs": len(state.jobs), "waiting": counts["waiting"], "running": counts["running"] + counts["ending"],
        "done": counts["done"], "failed": counts["failed"], "cancelled": counts["cancelled"],
        "attempts": len(attempts), "seconds": round(end - state.created, 3), "slot_seconds": round(slot_seconds, 3),
    }  # fmt: skip
    record = state.list_record
    return {
        "list": state.id, "created": state.created, "updated": now, "state": outcome, "reason": reason or state.paused,
        "script": record.get("script", ""), "backend": record.get("backend", ""), "totals": totals,
        "servers": {name: server(link) for name, link in links.items()},
        "jobs": [],
    }  # fmt: skip


def encoded(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True)


def server(link: ServerLink) -> dict[str, Any]:
    slots = [{"name": f"{link.server.name}:{slot.index}", "gpu": slot.gpu} for slot in link.server.pool.slots]
    return {"slots": slots, "state": link.state, "reason": link.reason}


def entry(job: JobState, reason: str) -> dict[str, Any]:
    marks = {"trains_base_model": hash_of(job.job.trains)} if job.job.trains else {}
    marks |= {"leak": job.job.leak} if job.job.leak else {}
    return marks | {
        "id": job.job.id, "name": job.job.name, "settings": dict(job.job.settings), "options": job.job.options.public(),
        "state": "running" if job.state == "ending" else job.state, "reason": reason, "output": job.job.output,
        "metrics": job.metrics, "attempts": [attempt.public() for attempt in job.attempts],
    }  # fmt: skip


def base_entry(digest: str, trainer: JobState | None, jobs: list[str]) -> dict[str, Any]:
    """One base model. trainer: the job that trains it; None if it was in the cache. jobs: ids of its experiments."""
    name = hash_of(digest)
    found = {"hash": name, "digest": digest, "path": f"{CACHE}/{name}", "experiments": jobs}
    return found | (entry(trainer, trainer.reason) if trainer else {"state": "done", "reason": "in the cache"})


def phase_files(results: Path) -> tuple[Path, Path]:
    """The files of base models and of experiments; their names differ for each list in a directory."""
    start = "" if results.stem == "results" else f"{results.stem}."
    return results.with_name(f"{start}phase1_base_models.json"), results.with_name(f"{start}phase2_experiments.json")


def with_jobs(facts: Mapping[str, Any], jobs: Iterable[str]) -> str:
    """The JSON text of `facts`. Its empty list `jobs` is filled with the JSON texts of the jobs."""
    lines = ",\n".join(jobs)
    return encoded(facts).replace(NO_JOBS, f'\n  "jobs": [\n{lines}\n  ]', 1) + "\n"


class Results:
    """Writes the results of a list, and the page."""

    def __init__(self, path: Path, state: ListState, links: Mapping[str, ServerLink]) -> None:
        self.path, self.state, self.links = path, state, links
        self.changed = True
        self.error = ""  # why results.json could not be written
        self._texts: dict[str, tuple[tuple[str, str, int], str]] = {}  # job id -> (cache key, text)
        self._next = self._next_page = 0.0  # monotonic times before which nothing is written
        self._page: subprocess.Popen[bytes] | None = None  # writes results.html
        self._page_start = 0.0

    def note_change(self) -> None:
        """Let write() write the results when they are due."""
        self.changed = True

    def write(self, outcome: str = "running", reason: str = "", last: bool = False) -> None:
        """Write the results if they changed and WRITE_INTERVAL has passed. last: write always, with the page."""
        start = time.monotonic()
        if last or (self.changed and start >= self._next):
            try:
                facts = document(self.state, self.links, outcome, reason)
                text = with_jobs(facts, map(self._job, self.state.jobs.values()))
                write_file(user_file(self.path), text, SHARED)
                if any(job.job.base for job in self.state.jobs.values()):
                    self._write_phases(outcome)
                self.changed, self.error = False, ""
            except OSError as error:
                self.error = f"{self.path}: {error.strerror}"
            self._next = start + max(WRITE_INTERVAL, 20 * (time.monotonic() - start))
        if last:
            if self._page:
                self._page.wait()
            with contextlib.suppress(OSError, ValueError):
                page.write(self.path)
        else:
            self._write_page()

    def _write_phases(self, outcome: str) -> None:
        """Write the files of base models and of experiments."""
        dependents: dict[str, list[str]] = {}  # ids of jobs, by base model
        for job in self.state.jobs.values():
            if job.job.base:
                dependents.setdefault(job.job.base, []).append(job.job.id)
        models = [base_entry(digest, self.state.trainers.get(digest), jobs) for digest, jobs in dependents.items()]
        experiments = [self._job(job) for job in self.state.jobs.values() if not job.job.trains]
        facts = {"list": self.state.id, "state": outcome, "updated": time.time()}
        first = encoded({**facts, "base_models": models}) + "\n"
        second = with_jobs({**facts, "jobs": []}, experiments)
        for path, text in zip(phase_files(self.path), (first, second), strict=True):
            write_file(user_file(path), text, SHARED)

    def _job(self, job: JobState) -> str:
        """The JSON text of one job. The text of a job that is not running is cached."""
        reason = self.state.reason_of(job)
        key = (job.state, reason, len(job.attempts))
        cached_key, text = self._texts.get(job.job.id, (None, ""))
        if cached_key != key or job.state in ("running", "ending"):
            text = textwrap.indent(encoded(entry(job, reason)), "    ")
            self._texts[job.job.id] = key, text
        return text

    def _write_page(self) -> None:
        """Start a process that writes the page, if none is running and PAGE_INTERVAL has passed."""
        now = time.monotonic()
        if self._page and self._page.poll() is not None:
            self._page = None
            self._next_page = now + max(PAGE_INTERVAL, 50 * (now - self._page_start))
        if not self._page and now >= self._next_page:
            with contextlib.suppress(OSError):
                self._page_start = now
                self._page = subprocess.Popen(
                    [sys.executable, str(RUN_MODULE), "jobs.show.page", str(self.path)], stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
