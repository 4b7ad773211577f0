"""Decide whether a run hangs, from what its nodes replied to scripts/lib/hang_watch.sh.

A run hangs when there has been no output and no metric for the timeout. By default that is not enough: a rank that
evaluates for long is silent, too, so the rank that the others wait for must use neither CPU nor GPU, or all ranks must
wait in a collective. The finding goes to .hang.json in the run directory, for the verdict. Standard library only.
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
from distributed.runs.hang_analysis import Activity, Finding, find
from distributed.runs.lookup import NoRun, read
from distributed.runs.status import Seen, read_progress, seen
from distributed.runs.visit import visits

FOUND = ".hang.json"  # in the run directory; the launcher accepts it by renaming it to hang.json
DOUBT = 60.0  # seconds after which a silent run that does not hang for certain is asked again
HUNG, STACKS = "hung", "stacks"


def decide(ranks: Seen, timeout: float, silent: float, finding: Finding | None, certain: bool) -> str:
    """What hang_watch.sh does next: it reports the hang, asks again with the stacks, or waits.

    silent: seconds. finding: by the stacks; None when they have not been asked for yet. certain: whether the silence
    alone is not enough.
    """
    if not ranks.beats or ranks.to_come:
        return wait(timeout)  # it starts, or it ends
    if silent < timeout:
        return wait(timeout - silent)
    if finding is None:
        return STACKS
    return wait(min(timeout, DOUBT)) if certain and not finding.stuck else HUNG


def wait(seconds: float) -> str:
    return f"wait {max(1, math.ceil(seconds))}"


def record(ranks: Seen, silent: float, finding: Finding, asked: str) -> dict[str, Any]:
    """For the verdict: the suspect, with its stack, and where all others are. asked: the option, in brackets."""

    def where(rank: Activity) -> str:
        if not rank.frames:
            return f"used {rank.cpu:.0%} CPU"
        return f"{'waited in a collective' if rank.in_collective else 'was'} at {rank.line}"

    suspect = finding.suspects[0] if finding.suspects else None
    return {
        "cause": f"hung: no output for {silent:.0f} s{asked}; {finding.words}",
        "node": suspect.node if suspect else None,
        "rank": suspect.rank if suspect else None,
        "time": time.time(),
        "traceback": format_traceback(suspect.frames) if suspect else "",
        "others": [
            {"node": rank.node, "rank": rank.rank, "message": where(rank), "traceback": format_traceback(rank.frames)}
            for rank in ranks.beats
            if rank != suspect
        ],
    }


def main(words: Sequence[str] | None = None) -> int:
    """Print the decision. Returns 2 when there is no such run."""
    options = parse(words)
    try:
        run = read(options.run)
    except NoRun as error:
        sys.stderr.write(f"{error}\n")
        return 2
    found = visits(run, options.answers)
    progress = read_progress(run.folder, time.time())
    ranks = seen(found, progress, options.watched)
    silent = min(ranks.silent, options.watched)
    logs = progress.silent is not None or any(one.look and one.look.metrics is not None for one in found)
    if any(one.look is None for one in found):  # that a node cannot be asked does not mean that it hangs
        decision = wait(min(options.timeout, DOUBT))
    elif options.certain and not logs:
        decision = wait(options.timeout)
    else:
        finding = find(ranks.beats, ranks.seconds, ranks.ended) if options.stacks and ranks.beats else None
        decision = decide(ranks, options.timeout, silent, finding, options.certain)
        if finding and decision == HUNG:
            asked = "" if options.certain else f" (--hang-timeout {options.timeout:.0f})"
            write_json(str(run.folder / FOUND), record(ranks, silent, finding, asked))
    sys.stdout.write(f"{decision}\n")
    return 0


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hang_decision", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("answers", type=Path, metavar="DIRECTORY", help="holds NODE.out, NODE.err and NODE.code")
    parser.add_argument("--timeout", type=float, required=True, metavar="SECONDS", help="without output or metric")
    parser.add_argument("--watched", type=float, required=True, metavar="SECONDS", help="no silence is longer")
    parser.add_argument("--certain", action="store_true", help="of a run that logs steps, when nothing can end it")
    parser.add_argument("--stacks", action="store_true", help="the nodes were asked for them")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
