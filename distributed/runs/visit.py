"""What the nodes of a run answered when they were asked, and the proof that nothing of it is left.

scripts/lib/visit.bash asks them all at once, and keeps what came back.
Standard library only.
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


@dataclass(frozen=True)
class Visit:
    """What a node saw, or why it did not say."""

    place: Place
    look: node_status.NodeStatus | None
    why: str = ""


def visits(run: Run, folder: Path) -> list[Visit]:
    return [visit(place, folder) for place in run.places]


def visit(place: Place, folder: Path) -> Visit:
    answer = replies.read(folder, place.node)
    found = answer.value()
    if found is not None:
        return Visit(place, node_status.from_json(found))
    return Visit(place, None, "has not answered in time" if answer.code == KILLED else answer.why_none())


def number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def left_on(found: node_status.NodeStatus) -> str:
    """Which processes there are, for a person."""
    told = [f"{one.pid} {short(one.command)}" for one in found.processes[:SHOWN]]
    more = ["..."] if len(found.processes) > SHOWN else []
    return f"{number(len(found.processes), 'process')} of this run: {', '.join([*told, *more])}"


def short(command: str) -> str:
    """A command without the folders of its program."""
    program, _, words = command.partition(" ")
    text = f"{program.rpartition('/')[2]} {words}".strip()
    return text if len(text) <= 40 else f"{text[:39]}…"


def prove(run: Run, found: Sequence[Visit]) -> tuple[list[str], int]:
    """A line for each node, and 0 when all say that nothing is left, 1 when something is, 69 when one did not say."""
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
    """Print the proof. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="visit", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("answers", type=Path, metavar="FOLDER", help="holds NODE.out, NODE.err and NODE.code")
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
