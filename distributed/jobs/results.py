"""results.json: what has come of a job list, complete at every moment, and results.html beside it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed.jobs import page
from distributed.jobs.dispatcher import Link
from distributed.jobs.state import Attempt, JobState, State, signal_name
from distributed.launch import supervisor

EVERY = 1.0  # seconds between two writes of results.json, and 20 times as long as one takes
PAGE_EVERY = 30.0  # the same of results.html


def document(state: State, links: Mapping[str, Link], outcome: str, reason: str = "") -> dict[str, Any]:
    """The whole of results.json. outcome: running, paused, finished, interrupted or cancelled."""
    now = time.time()
    attempts = [attempt for job in state.jobs.values() for attempt in job.attempts]
    used = sum((attempt.end or now) - attempt.start for attempt in attempts for _ in attempt.slots)
    counts = state.counts
    totals = {
        "jobs": len(state.jobs), "waiting": counts["waiting"], "running": counts["running"] + counts["ending"],
        "done": counts["done"], "failed": counts["failed"], "cancelled": counts["cancelled"],
        "attempts": len(attempts), "seconds": round(now - state.created, 3), "slot_seconds": round(used, 3),
    }  # fmt: skip
    return {
        "list": state.id, "created": state.created, "updated": now, "state": outcome, "reason": reason or state.paused,
        "script": state.about.get("script", ""), "backend": state.about.get("backend", ""), "totals": totals,
        "servers": {name: server(link) for name, link in links.items()},
        "jobs": [entry(job) for job in state.jobs.values()],
    }  # fmt: skip


def server(link: Link) -> dict[str, Any]:
    slots = [{"name": f"{link.server.name}:{slot.index}", "gpu": slot.gpu} for slot in link.server.room.slots]
    return {"slots": slots, "state": link.state, "reason": link.reason}


def entry(job: JobState) -> dict[str, Any]:
    return {
        "id": job.job.id, "name": job.job.name, "settings": dict(job.job.settings), "options": job.job.options.public(),
        "state": "running" if job.state == "ending" else job.state, "reason": job.reason, "output": job.job.output,
        "metrics": job.metrics, "attempts": [attempt_entry(attempt) for attempt in job.attempts],
    }  # fmt: skip


def attempt_entry(attempt: Attempt) -> dict[str, Any]:
    return {
        "number": attempt.number, "server": attempt.server, "slots": attempt.slots, "gpus": attempt.gpus,
        "start": attempt.start, "end": attempt.end, "seconds": attempt.seconds, "exit_code": attempt.code,
        "signal": signal_name(attempt.code) or None, "peak_memory": attempt.peak_memory, "failure": attempt.failure,
        "reason": attempt.reason, "last_lines": attempt.lines,
    }  # fmt: skip


class Results:
    """Writes both files, now and then."""

    def __init__(self, path: Path, state: State, links: Mapping[str, Link]) -> None:
        self.path, self.state, self.links = path, state, links
        self.changed = True
        self.trouble = ""  # why they could not be written
        self._next = self._next_page = 0.0

    def write(self, outcome: str = "running", reason: str = "", last: bool = False) -> None:
        """When something has changed and it is time; last: in any case."""
        start = time.monotonic()
        if not last and not (self.changed and start >= self._next):
            return
        try:
            text = json.dumps(document(self.state, self.links, outcome, reason), indent=2, sort_keys=True)
            supervisor.write(str(self.path), text + "\n")
            self.changed, self.trouble = False, ""
        except OSError as error:
            self.trouble = f"{self.path}: {error.strerror}"
        took = time.monotonic() - start
        self._next = start + max(EVERY, 20 * took)
        if last or start >= self._next_page:
            begun = time.monotonic()
            with contextlib.suppress(OSError):
                page.write(self.path)
            self._next_page = begun + max(PAGE_EVERY, 50 * (time.monotonic() - begun))
