"""Decide whether a run hangs, from the replies of its nodes to scripts/lib/hang_watch.sh.

With --hang-timeout, a run hangs if it has had no output and no metric for that time. By default this is not enough,
because a long evaluation has no output either: in addition, the rank that the others wait for must use neither CPU nor
GPU, or all ranks must be idle or wait in a collective. The cause is written to .hang.json in the run directory.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distributed.files import write_json
from distributed.host.stacks import format_traceback
from distributed.runs.hang_analysis import Activity, Stall, find_stall
from distributed.runs.lookup import RunLookupError, read
from distributed.runs.query import read_replies
from distributed.runs.status import Observation, observe_ranks, read_progress

HANG_FILE = ".hang.json"  # in the run directory; the launcher accepts it by renaming it to hang.json
RECHECK = 60.0  # seconds until the next check of a run that has no output, but may make progress
HUNG, STACKS = "hung", "stacks"


def decide(observed: Observation, timeout: float, silent: float, stall: Stall | None, certain: bool) -> str:
    """What hang_watch.sh does next: report the hang, query the nodes again with stacks, or wait.

    silent: seconds without output. stall: None if stacks have not been requested yet. certain: report only a stall that
    is permanent.
    """
    if not observed.ranks or observed.not_started:
        return wait(timeout)  # the run is starting or ending
    if silent < timeout:
        return wait(timeout - silent)
    if stall is None:
        return STACKS
    return wait(min(timeout, RECHECK)) if certain and not stall.permanent else HUNG


def wait(seconds: float) -> str:
    return f"wait {max(1, math.ceil(seconds))}"


def hang_record(observed: Observation, silent: float, stall: Stall, option: str) -> dict[str, Any]:
    """The content of hang.json: the suspect with its stack, and all other ranks.

    option: text to put after the duration: " (--hang-timeout SECONDS)", or empty without that option.
    """

    def where(rank: Activity) -> str:
        if not rank.frames:
            return f"used {rank.cpu:.0%} CPU"
        return f"{'waited in a collective' if rank.in_collective else 'was'} at {rank.line}"

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the decision. Returns 2 if there is no such run."""
    parser = argparse.ArgumentParser(prog="hang_decision", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("replies", type=Path, metavar="DIRECTORY", help="has NODE.out, NODE.err and NODE.code")
    parser.add_argument("--timeout", type=float, required=True, metavar="SECONDS", help="without output or metric")
    parser.add_argument("--watched", type=float, required=True, metavar="SECONDS", help="time since the watch started")
    parser.add_argument("--certain", action="store_true", help="only a run that logs metrics and cannot continue")
    parser.add_argument("--stacks", action="store_true", help="the replies have stacks")
    options = parser.parse_args(arguments)
    try:
        run = read(options.run)
    except RunLookupError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    replies = read_replies(run, options.replies)
    statuses = [reply.status for reply in replies if reply.status]
    progress = read_progress(run.directory, time.time())
    observed = observe_ranks(replies, progress, options.watched)
    silent = min(observed.silent, options.watched)
    logs_metrics = progress.silent is not None or any(status.metrics is not None for status in statuses)
    if len(statuses) < len(replies):  # the missing node may make progress
        decision = wait(min(options.timeout, RECHECK))
    elif options.certain and not logs_metrics:
        decision = wait(options.timeout)
    else:
        stall = None
        if options.stacks and observed.ranks:
            stall = find_stall(observed.ranks, observed.seconds, observed.exited)
        decision = decide(observed, options.timeout, silent, stall, options.certain)
        if stall and decision == HUNG:
            option = "" if options.certain else f" (--hang-timeout {options.timeout:.0f})"
            write_json(run.directory / HANG_FILE, hang_record(observed, silent, stall, option))
    sys.stdout.write(f"{decision}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
