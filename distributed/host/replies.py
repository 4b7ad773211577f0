"""The reply of a node that was asked over ssh, or why there is none, and the remedy; what a launch asks it for.

A node prints one line of JSON behind a mark, because a login shell may print lines of its own. The launching side
keeps what came back in files: NODE.out, NODE.err and NODE.code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from distributed.exit_codes import UNFIT

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself would cost every launch milliseconds
    from collections.abc import Mapping
    from typing import Any

MARK = "muster-answer "  # before the JSON
NODE_ENV = "config/node_env.sh: "  # before what is wrong with that file

NOT_REACHED = "cannot be reached ({said}); try: ssh {name} true"
# What ssh, bash and Python print -> the message.
UNREACHED = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": (
        "its host key has changed: somebody may be in between. If you know why it has, forget the old one: "
        "ssh-keygen -R {name}"
    ),
    "Host key verification failed": "its host key is not known: log in by hand once, and compare it: ssh {name}",
    "Permission denied": "does not let you in without a password ({said}); give it your key: ssh-copy-id {name}",
}
NO_PYTHON = "has no such Python ({said}): name one that all nodes have with --python"
NO_KIT = "does not have the kit ({said}): share its folder between the nodes, or launch with --sync"
NOT_STARTED = {
    ": cd: ": "has no such folder as here ({said}): share it between the nodes, or launch with --sync",
    "in_node_env.sh: line": NO_PYTHON,
    "in_node_env.sh": NO_KIT,
    "can't open file": NO_KIT,
    ": exec: ": NO_PYTHON,
    "bash: line 1: /": NO_PYTHON,
}


@dataclass(frozen=True)
class NodeFacts:
    """What a launch needs to know of a node."""

    python: str
    torch: str | None
    gpus: int  # that its ranks see
    gpu_error: str
    files: Mapping[str, str | None]  # of each file the ranks will read: SHA-256, None when it cannot be read
    machine: str  # the same for two names of one machine
    addresses: tuple[str, ...]  # its own
    ssh_address: str  # the one at which it was reached; empty when not through ssh
    master: str  # the address it finds for the first node's name; empty when it finds none
    seconds: float  # that this took
    port: int  # the one that was asked for, else a free one
    holder: str | None  # who has it; None when it is free


@dataclass(frozen=True)
class Reply:
    """What came back from a node."""

    node: str
    code: int
    out: str
    err: str
    arrived: float = 0.0  # unix seconds on the launching side, when its last line came

    def value(self) -> Any:
        """The JSON value; None when there is none."""
        marked = [line for line in self.out.splitlines() if line.startswith(MARK)]
        return json.loads(marked[-1].removeprefix(MARK)) if marked else None

    def failure_message(self) -> str:
        """Why there is no value, and the remedy."""
        if self.code == UNFIT and (fault := [line for line in self.err.splitlines() if NODE_ENV in line]):
            return fault[-1]  # in_node_env.sh has added the remedy
        said = " ".join(self.err.split()) or f"exit code {self.code}"
        signs, otherwise = (UNREACHED, NOT_REACHED) if self.code == 255 else (NOT_STARTED, "{said}")
        message = next((what for sign, what in signs.items() if sign in said), otherwise)
        return message.format(name=self.node, said=said)


def format_reply(value: Any) -> str:
    """A reply as a node prints it."""
    return MARK + json.dumps(value) + "\n"


def read(folder: Path, node: str) -> Reply:
    """The reply of a node, as the launching side keeps it. NODE.code is written last: until then the code is 0."""

    def text(kind: str) -> str:
        path = folder / f"{node}.{kind}"
        return path.read_text(errors="replace") if path.exists() else ""

    arrived = (folder / f"{node}.out").stat().st_mtime
    return Reply(node, int(text("code") or 0), text("out"), text("err"), arrived)
