"""Read the replies of a run's nodes, and report which processes of the run remain.

scripts/lib/query.bash queries all nodes at once and writes their replies to files; a launcher queries them itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed.exit_codes import KILLED, UNFIT
from distributed.host import replies
from distributed.runs import node_status
from distributed.runs.lookup import RUNNING, Run, RunLookupError, RunNode, read
from distributed.terminal import cut

SHOWN = 3  # processes of a node
SHOWN_CHARACTERS = 40  # of a command


@dataclass(frozen=True)
class NodeReply:
    """The status that a node replied with, or why it did not reply."""

    node: RunNode
    status: node_status.NodeStatus | None
    error: str = ""

    @property
    def name(self) -> str:
        return self.node.node


def read_replies(run: Run, directory: Path) -> list[NodeReply]:
    return [read_reply(node, directory) for node in run.nodes]


def read_reply(node: RunNode, directory: Path) -> NodeReply:
    return node_reply(node, replies.read(directory, node.node))


def node_reply(node: RunNode, reply: replies.Reply) -> NodeReply:
    if (value := reply.value()) is not None:
        return NodeReply(node, node_status.from_json(value))
    return NodeReply(node, None, "did not reply in time" if reply.code == KILLED else reply.failure_message())


def remaining_processes(status: node_status.NodeStatus) -> str:
    """The processes on a node as text; programs are shown without their directories."""
    count, shown = len(status.processes), []
    for process in status.processes[:SHOWN]:
        program, blank, arguments = process.command.partition(" ")
        command = cut(f"{os.path.basename(program)}{blank}{arguments}".strip(), SHOWN_CHARACTERS)
        shown.append(f"{process.pid} {command}")
    shown += ["..."] * (count > SHOWN)
    return f"{count} {'process' if count == 1 else 'processes'} of this run: {', '.join(shown)}"


def report_remaining(run: Run, node_replies: Sequence[NodeReply]) -> tuple[list[str], int]:
    """A line for each node, and the exit code: 1 if processes remain, else UNFIT if a node did not reply, else 0."""
    lines = []
    for reply in node_replies:
        if reply.status is None:
            later = "; its processes exit when heartbeats time out; then check again"
            text = reply.error + (later if run.launcher.state != RUNNING else "")
        elif reply.status.processes:
            text = f"still has {remaining_processes(reply.status)}"
        else:
            text = "no process of this run remains"
        lines.append(f"{reply.name}: {text}")
    if any(reply.status and reply.status.processes for reply in node_replies):
        return lines, 1
    return lines, UNFIT if any(reply.status is None for reply in node_replies) else 0


def main(arguments: Sequence[str]) -> int:
    """Print the lines of report_remaining(). Returns its exit code."""
    parser = argparse.ArgumentParser(prog="query", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN_DIRECTORY")
    parser.add_argument("replies", type=Path, metavar="DIRECTORY", help="has NODE.out, NODE.err and NODE.code")
    options = parser.parse_args(arguments)
    try:
        run = read(options.run)
    except RunLookupError as error:
        parser.error(str(error))
    lines, code = report_remaining(run, read_replies(run, options.replies))
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return code
