"""Nodes that cannot connect to each other, in a report as of the smoke test that would hang on them.

Standard library only: nothing else need be there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from distributed.exit_codes import UNFIT
from distributed.files import write_json
from distributed.host.identity import versions
from distributed.host.replies import read
from distributed.launch.connectivity import Gap, read_gaps
from distributed.nodelist import fold
from distributed.smoke.report import Fault, Measured, summarise


def report(gaps: Sequence[Gap], ranks: Mapping[str, int]) -> dict[str, object]:
    """ranks: node -> how many it was to have, by node rank."""
    first = {node: sum(list(ranks.values())[:place]) for place, node in enumerate(ranks)}
    launch = {
        "size": sum(ranks.values()),
        "nodes": len(ranks),
        "launcher": "none",
        "backend": "nothing started",
        "torch": versions()["torch"],
    }
    faults = [
        Fault("reach", first[gap.nodes[0]], fold(gap.nodes), f"a connection to {gap.to}", gap.trouble, said=str(gap))
        for gap in gaps
    ]
    return summarise(launch, {"reach": "every node can connect to every other"}, {}, Measured(), faults)


def main(words: Sequence[str] | None = None) -> int:
    """Write the report if there is a gap. Returns 0 when there is none, 1, or UNFIT: a node has not replied."""
    parser = argparse.ArgumentParser(prog="connections", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("--report", type=Path, required=True, help="the file to write")
    parser.add_argument("folder", type=Path, help="holds the replies: listening/ and trying/")
    parser.add_argument("nodes", nargs="+", help="NAME:PROCESSES, by node rank")
    options = parser.parse_args(words)
    ranks = {name: int(count) for name, _, count in (word.rpartition(":") for word in options.nodes)}
    replies = [read(options.folder / question, node) for node in ranks for question in ("listening", "trying")]
    if silent := {reply.node: reply.why_none() for reply in reversed(replies) if reply.value() is None}:
        sys.stderr.write("".join(f"reach: {node}: {silent[node]}\n" for node in ranks if node in silent))
        return UNFIT
    found = read_gaps(options.folder, tuple(ranks))
    if found:
        write_json(options.report, report(found, ranks))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
