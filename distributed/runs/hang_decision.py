"""Decide for scripts/lib/hang_watch.sh whether a run hangs, from its files on this machine and replies of its nodes.

With --timeout, a run hangs if it has had no output and no metric for that time. With --certain this is not enough,
because a long evaluation has no output either: in addition, the rank that the others wait for must use neither CPU nor
GPU, or all ranks must be idle or wait in a collective. The cause is written to .hang.json in the run directory.

A run that only looks hung, by the criteria of scripts/status.sh, continues. The text of status.sh is written to
.hang_notice in the run directory once, and again when other ranks are suspected. New output is reported too; the run
is then reported again only after a pause that is twice as long, as it may have long pauses.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from distributed.files import write_file, write_json
from distributed.host.stacks import format_traceback
from distributed.runs.hang_analysis import (
    BUSY_TIMEOUT,
    IDLE_TIMEOUT,
    Activity,
    Stall,
    diagnose,
    find_stall,
    needs_stacks,
)
from distributed.runs.lookup import Run, RunLookupError, read
from distributed.runs.query import read_replies
from distributed.runs.status import Observation, observe_ranks, read_progress

HANG_FILE = ".hang.json"  # in the run directory; the launcher accepts it by renaming it to hang.json
NOTICE_FILE = ".hang_notice"  # in the run directory; the launcher prints and removes it
KNOWN_FILE = "notified.json"  # in the directory of the replies
CLOCK_TOLERANCE = 10.0  # seconds; also the duration of a query
RECOVERED = "the run no longer looks hung: it has had output or metrics"
RECHECK = 60.0  # seconds until the next check of a run that has no output, but may make progress
HUNG = "hung"


def decide(
    observed: Observation, timeout: float, silent: float, stall: Stall | None, certain: bool, sampled: bool = True
) -> str:
    """What hang_watch.sh does next: report the hang, query the nodes again with more options, or wait.

    silent: seconds without output. stall: None if stacks have not been requested yet. certain: report only a stall that
    is permanent. sampled: the replies have the CPU use of the ranks.
    """
    first = min(timeout, IDLE_TIMEOUT)
    if not observed.ranks or observed.not_started:
        return wait(first)  # the run is starting or ending
    if silent < first:
        return wait(first - silent)
    if stall is None:
        if silent >= timeout:
            return query(5 if certain else 1, stacks=True)
        if not sampled:
            return query(1)
        if needs_stacks(observed.ranks, silent):
            return query(1, stacks=True)
    if silent < timeout:
        return wait(min(timeout - silent, silent, BUSY_TIMEOUT))  # twice as late each time: stacks disturb the ranks
    if stall and (stall.permanent or not certain):
        return HUNG
    return wait(min(timeout, RECHECK))


def wait(seconds: float) -> str:
    return f"wait {max(1, math.ceil(seconds))}"


def query(seconds: int, stacks: bool = False) -> str:
    """The options with which runs.node_status is to be called."""
    return f"query --seconds {seconds}" + (" --stacks" if stacks else "")


def silence_here(directory: Path, now: float) -> float:
    """Seconds since the last output or metric in files that this machine sees; infinite without such files.

    All logs are here if the nodes share the run directory, as under SLURM. There, each query is a job step, and a job
    can only have a limited number of steps.
    """
    times = [path.stat().st_mtime for path in directory.glob("node_*.log")]
    times += [path.stat().st_mtime for path in directory.glob("metrics.jsonl")]
    return max(0.0, now - max(times)) if times else math.inf


@dataclass(frozen=True)
class Notified:
    """The last notice about the run that was printed; kept in KNOWN_FILE between two checks."""

    subject: str = ""  # of the last notice; empty: the run does not look hung
    last_output: float = math.inf  # Unix seconds, at the last notice
    longest_pause: float = 0.0  # seconds without output after which the run had new output, although it had looked hung


def notice_on(observed: Observation, silent: float, before: Notified, now: float) -> tuple[str, Notified]:
    """The text of a notice, empty for none, and the notice that is then the last one printed.

    silent: seconds without output, at most the time since the start of the watch.
    """
    pause = now - observed.silent - before.last_output
    if before.subject and pause > CLOCK_TOLERANCE:
        return RECOVERED, Notified(longest_pause=max(before.longest_pause, pause))
    diagnosis = diagnose(observed.ranks, observed.seconds, silent, observed.exited)
    if not diagnosis.hung or silent < max(IDLE_TIMEOUT, 2 * before.longest_pause):
        return "", before
    stall = find_stall(observed.ranks, observed.seconds, observed.exited)
    # The text is no subject, because durations, CPU use and lines of code differ at each check.
    subject = json.dumps([[rank.rank for rank in stall.suspects], observed.exited, stall.permanent])
    if subject == before.subject:
        return "", before
    remedy = f" {diagnosis.remedy}" if diagnosis.remedy else "; it is not stopped automatically"
    return f"the run {diagnosis.text}{remedy}", replace(before, subject=subject, last_output=now - observed.silent)


def notify(run: Path, replies: Path, observed: Observation, silent: float) -> None:
    """Write NOTICE_FILE if there is something new to report."""
    before = (
        Notified(**json.loads((replies / KNOWN_FILE).read_text())) if (replies / KNOWN_FILE).exists() else Notified()
    )
    notice, known = notice_on(observed, silent, before, time.time())
    if notice:
        write_json(replies / KNOWN_FILE, asdict(known))
        write_file(run / NOTICE_FILE, notice)


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
        "cause": f"hung: no output for {silent:.0f} s{option}; {stall.text}",
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


def decide_by_files(run: Run, options: argparse.Namespace) -> str:
    """The decision before a query: wait if files on this machine show recent output."""
    silent, first = silence_here(run.directory, time.time()), min(options.timeout, IDLE_TIMEOUT)
    if min(silent, options.watched) >= first:
        return query(0)
    notify(run.directory, options.replies, Observation((), (), 0, 0.0, silent), silent)
    return wait(first - min(silent, options.watched))


def decide_by_replies(run: Run, options: argparse.Namespace) -> str:
    """The decision after a query. Writes HANG_FILE if the run hangs."""
    replies = read_replies(run, options.replies)
    statuses = [reply.status for reply in replies if reply.status]
    progress = read_progress(run.directory, time.time())
    observed = observe_ranks(replies, progress, options.watched, run.launched)
    silent = min(observed.silent, options.watched)
    if len(statuses) < len(replies):  # the missing node may make progress
        return wait(min(options.timeout, RECHECK))
    logs_metrics = progress.silent is not None or any(status.metrics is not None for status in statuses)
    timeout = math.inf if options.certain and not logs_metrics else options.timeout
    stall = None
    if options.stacks and observed.ranks:
        stall = find_stall(observed.ranks, observed.seconds, observed.exited)
    decision = decide(observed, timeout, silent, stall, options.certain, options.seconds > 0)
    if stall and decision == HUNG:
        option = "" if options.certain else f" (--hang-timeout {options.timeout:.0f})"
        write_json(run.directory / HANG_FILE, hang_record(observed, silent, stall, option))
    elif decision.startswith("wait") and observed.ranks and not observed.not_started:
        notify(run.directory, options.replies, observed, silent)
    return decision


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the decision. Returns 2 if there is no such run."""
    parser = argparse.ArgumentParser(prog="hang_decision", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("replies", type=Path, metavar="DIRECTORY", help="has NODE.out, NODE.err and NODE.code")
    parser.add_argument("--timeout", type=float, default=math.inf, metavar="SECONDS", help="default: never hangs")
    parser.add_argument("--watched", type=float, required=True, metavar="SECONDS", help="time since the watch started")
    parser.add_argument("--certain", action="store_true", help="only a run that logs metrics and cannot continue")
    parser.add_argument("--seconds", type=float, metavar="SECONDS", help="of the CPU sample; default: no replies yet")
    parser.add_argument("--stacks", action="store_true", help="the replies have stacks")
    options = parser.parse_args(arguments)
    try:
        run = read(options.run)
    except RunLookupError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    decision = decide_by_files(run, options) if options.seconds is None else decide_by_replies(run, options)
    sys.stdout.write(f"{decision}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
