"""Decide for a launcher whether its run hangs, from its files on this machine and replies of its nodes.

With --hang-timeout, a run hangs if it has had no output and no metric for that time. Without that option this is not
enough, because a long evaluation has no output either: in addition, the rank that the others wait for must use neither
CPU nor GPU, or all ranks must be idle or wait in a collective.

A run that only looks hung, by the criteria of scripts/status.sh, continues. The launcher prints the text of status.sh
once, and again when other ranks are suspected. If the run then has new output, the launcher prints RECOVERED. After
that, the launcher reports the run only when it has had no output for twice as long as in its longest pause so far,
because long pauses may be usual for this run.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distributed.attempts import newest
from distributed.files import file_time
from distributed.host.stacks import format_traceback
from distributed.runs.lookup import Run
from distributed.runs.node_status import read_progress
from distributed.runs.query import NodeReply
from distributed.runs.status import Observation, observe_ranks
from distributed.verdict.hang_analysis import (
    BUSY_TIMEOUT,
    IDLE_TIMEOUT,
    Activity,
    Stall,
    diagnose,
    find_stall,
    needs_stacks,
)

CLOCK_TOLERANCE = 10.0  # seconds; covers clock differences and the duration of a query
RECOVERED = "the run no longer looks hung: it has had output or metrics"
RECHECK = 60.0  # seconds until the next check of a run that has no output, but may make progress


@dataclass(frozen=True)
class Wait:
    """Check again after this time."""

    seconds: float


@dataclass(frozen=True)
class Query:
    """Query all nodes, with these options of runs.node_status."""

    seconds: int  # duration of the CPU sample
    stacks: bool = False

    @property
    def arguments(self) -> list[str]:
        return ["--seconds", str(self.seconds), *["--stacks"] * self.stacks]


@dataclass(frozen=True)
class Hung:
    """Stop the run."""

    record: dict[str, Any]  # the content of hang.json


Decision = Wait | Query | Hung
HUNG = Hung({})


def decide(
    observed: Observation,
    timeout: float,
    silent: float,
    stall: Stall | None,
    permanent_only: bool,
    sampled: bool = True,
) -> Decision:
    """What the launcher does next: stop the run, query the nodes again with more options, or wait.

    silent: seconds without output. stall: None if stacks have not been requested yet. permanent_only: stop only if the
    stall is permanent. sampled: the replies have the CPU use of the ranks.
    """
    idle_timeout = min(timeout, IDLE_TIMEOUT)
    if not observed.ranks or observed.not_started:  # the run is starting or ending
        return HUNG if observed.stopped and not permanent_only and silent >= timeout else wait(idle_timeout)
    if silent < idle_timeout:
        return wait(idle_timeout - silent)
    if stall is None:
        if silent >= timeout:
            return Query(5 if permanent_only else 1, stacks=True)
        if not sampled:
            return Query(1)
        if needs_stacks(observed.ranks, silent):
            return Query(1, stacks=True)
    if silent < timeout:
        # The wait grows with the time without output, because requests for stacks disturb ranks.
        return wait(min(timeout - silent, silent, BUSY_TIMEOUT))
    if stall and (stall.permanent or not permanent_only):
        return HUNG
    return wait(min(timeout, RECHECK))


def wait(seconds: float) -> Wait:
    return Wait(max(1, math.ceil(seconds)))


def seconds_without_output(directory: Path) -> float:
    """Seconds since the last output or metric in files that this machine sees; infinite without such files.

    If the nodes share the run directory, as under SLURM, these files include all logs, and reading them saves queries.
    Under SLURM, each query is a job step, and the number of steps of a job is limited.
    """
    times = [path.stat().st_mtime for path in Path(newest(directory)).glob("node_*.log")]
    times += [path.stat().st_mtime for path in directory.glob("metrics.jsonl")]
    return max(0.0, file_time(directory) - max(times)) if times else math.inf


@dataclass(frozen=True)
class Notified:
    """The last notice about the run that was printed."""

    subject: str = ""  # the suspected ranks and their state, as JSON; empty: the run does not look hung
    last_output: float = math.inf  # Unix time of the last output before that notice
    longest_pause: float = 0.0  # seconds; the longest pause after which a run that looked hung had new output


def notice_on(observed: Observation, silent: float, last_notice: Notified, now: float) -> tuple[str, Notified]:
    """Return the text of a new notice, empty for none, and the value of last_notice for the next call.

    silent: seconds without output, at most the time since the start of the watch.
    """
    pause = now - observed.silent - last_notice.last_output
    if last_notice.subject and pause > CLOCK_TOLERANCE:
        return RECOVERED, Notified(longest_pause=max(last_notice.longest_pause, pause))
    diagnosis = diagnose(observed.active, observed.seconds, silent, observed.exited)
    if not (diagnosis.hung or observed.gpu_errors) or silent < max(IDLE_TIMEOUT, 2 * last_notice.longest_pause):
        return "", last_notice
    stall = find_stall(observed.active, observed.seconds, observed.exited)
    # Subjects are compared, not texts: durations, CPU use and lines of code in a text differ at each check.
    facts = observed.exited, stall.permanent, bool(observed.gpu_errors)
    subject = json.dumps([[rank.rank for rank in stall.suspects], *facts])
    if subject == last_notice.subject:
        return "", last_notice
    remedy = f" {diagnosis.remedy}" if diagnosis.remedy else "; it is not stopped automatically"
    text = (diagnosis.text if diagnosis.hung else f"has had no output for {silent:.0f} s") + observed.gpu_errors
    return f"the run {text}{remedy}", replace(last_notice, subject=subject, last_output=now - observed.silent)


def hang_record(observed: Observation, silent: float, stall: Stall, option: str) -> dict[str, Any]:
    """The content of hang.json: the suspect with its stack, and all other ranks.

    option: text to put after the duration: " (--hang-timeout SECONDS)", or empty without that option.
    """

    def where(rank: Activity) -> str:
        if not rank.frames:
            return f"used {rank.cpu:.0%} CPU"
        how = "waited in a collective" if rank.in_collective else "waited for its GPU" if rank.waits_for_gpu else "was"
        return f"{how} at {rank.line}"

    suspect = stall.suspects[0] if stall.suspects else None
    return {
        "cause": f"hung: no output for {silent:.0f} s{option}; {stall.text}{observed.gpu_errors}",
        "node": suspect.node if suspect else None,
        "rank": suspect.rank if suspect else None,
        "time": time.time(),
        "traceback": format_traceback(suspect.frames) if suspect else "",
        "others": [
            {"node": rank.node, "rank": rank.rank, "message": where(rank), "traceback": format_traceback(rank.frames)}
            for rank in observed.ranks
            if rank != suspect
        ],
    }


class HangWatch:
    """Checks repeatedly whether a run hangs."""

    def __init__(self, run: Run, timeout: float, permanent_only: bool) -> None:
        """timeout: seconds without output; infinite: the run is never stopped. permanent_only: see decide()."""
        self.run, self.timeout, self.permanent_only = run, timeout, permanent_only
        self._notified = Notified()

    def check_files(self, watched: float) -> tuple[Decision, str]:
        """Return the decision before a query, and a notice, empty for none.

        The decision is Wait if files on this machine show recent output, otherwise Query. watched: seconds since the
        watch started; earlier time is not counted.
        """
        silent, idle_timeout = seconds_without_output(self.run.directory), min(self.timeout, IDLE_TIMEOUT)
        if min(silent, watched) >= idle_timeout:
            return Query(0), ""
        return wait(idle_timeout - min(silent, watched)), self._notice_on(Observation((), (), 0, 0.0, silent), silent)

    def check_replies(self, replies: Sequence[NodeReply], watched: float, query: Query) -> tuple[Decision, str]:
        """Return the decision after a query, and a notice, empty for none."""
        statuses = [reply.status for reply in replies if reply.status]
        progress = read_progress(self.run.directory)
        observed = observe_ranks(replies, progress, watched, self.run.launched)
        silent = min(observed.silent, watched)
        if len(statuses) < len(replies):  # the missing node may make progress
            return wait(min(self.timeout, RECHECK)), ""
        logs_metrics = progress.silent is not None or any(status.progress.silent is not None for status in statuses)
        timeout = math.inf if self.permanent_only and not logs_metrics else self.timeout
        stall = None
        if query.stacks and observed.ranks:
            stall = find_stall(observed.ranks, observed.seconds, observed.exited)
        decision = decide(observed, timeout, silent, stall, self.permanent_only, query.seconds > 0)
        if decision == HUNG:
            stall = stall or find_stall(observed.stopped, observed.seconds)
            option = "" if self.permanent_only else f" (--hang-timeout {self.timeout:.0f})"
            return Hung(hang_record(observed, silent, stall, option)), ""
        if isinstance(decision, Wait) and (observed.stopped or (observed.ranks and not observed.not_started)):
            return decision, self._notice_on(observed, silent)
        return decision, ""

    def _notice_on(self, observed: Observation, silent: float) -> str:
        notice, self._notified = notice_on(observed, silent, self._notified, time.time())
        return notice
