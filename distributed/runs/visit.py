"""What the nodes of a run replied, and whether processes of it are left.

scripts/lib/visit.bash asks all nodes at once, and keeps their replies in files. Standard library only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed.exit_codes import KILLED, UNFIT
from distributed.host import replies
from distributed.runs import node_status
from distributed.runs.lookup import HERE, NoRun, Place, Run, read

SHOWN = 3  # processes of a node
SHOWN_LETTERS = 40  # of a command


@dataclass(frozen=True)
class Visit:
    """What a node replied, or why it did not."""

    place: Place
    look: node_status.NodeStatus | None
    why: str = ""


def visits(run: Run, answers: Path) -> list[Visit]:
    return [visit(place, answers) for place in run.places]


def visit(place: Place, answers: Path) -> Visit:
    answer = replies.read(answers, place.node)
    found = answer.value()
    if found is not None:
        return Visit(place, node_status.from_json(found))
    return Visit(place, None, "has not answered in time" if answer.code == KILLED else answer.failure_message())


def left_on(found: node_status.NodeStatus) -> str:
    """The processes that are left on a node, for a person; commands without the directories of their programs."""
    count, shown = len(found.processes), []
    for one in found.processes[:SHOWN]:
        program, blank, arguments = one.command.partition(" ")
        text = f"{program.rpartition('/')[2]}{blank}{arguments}".strip()
        shown.append(f"{one.pid} {text if len(text) <= SHOWN_LETTERS else f'{text[: SHOWN_LETTERS - 1]}…'}")
    shown += ["..."] * (count > SHOWN)
    return f"{count} {'process' if count == 1 else 'processes'} of this run: {', '.join(shown)}"


def prove(run: Run, found: Sequence[Visit]) -> tuple[list[str], int]:
    """A line for each node, and 0 when nothing is left on any, 1 when something is, 69 when one did not reply."""
    lines = []
    for one in found:
        if one.look is None:
            ends = "" if run.launcher.where == HERE else "; what runs there ends when it is alone: ask again"
            lines.append(f"{one.place.node}: {one.why}{ends}")
        elif one.look.processes:
            lines.append(f"{one.place.node}: still has {left_on(one.look)}")
        else:
            lines.append(f"{one.place.node}: nothing of this run is left")
    if any(one.look and one.look.processes for one in found):
        return lines, 1
    return lines, UNFIT if any(one.look is None for one in found) else 0


def main(words: Sequence[str] | None = None) -> int:
    """Print the lines of prove(). Returns its exit code."""
    parser = argparse.ArgumentParser(prog="visit", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN_DIRECTORY")
    parser.add_argument("answers", type=Path, metavar="DIRECTORY", help="holds NODE.out, NODE.err and NODE.code")
    options = parser.parse_args(words)
    try:
        run = read(options.run)
    except NoRun as error:
        parser.error(str(error))
    lines, code = prove(run, visits(run, options.answers))
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
