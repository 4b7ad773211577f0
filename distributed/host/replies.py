"""What a node said when it was asked over ssh, or why it said nothing, and what to do about it.

A node answers with one line of JSON behind a mark, because a login shell may print things of its own. The launching
side keeps what came back in files: NODE.out, NODE.err and NODE.code.

Standard library only: nothing else need be there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed.exit_codes import UNFIT

MARK = "muster-answer "  # before the answer
NODE_ENV = "config/node_env.sh: "  # before what is wrong with that file


@dataclass(frozen=True)
class Answer:
    """What came back from a node."""

    node: str
    code: int
    out: str
    err: str
    arrived: float = 0.0  # unix seconds on the launching side, when its last word came

    def value(self) -> Any:
        """What it answered; None when it did not."""
        marked = [line for line in self.out.splitlines() if line.startswith(MARK)]
        return json.loads(marked[-1].removeprefix(MARK)) if marked else None

    def why_none(self) -> str:
        """Why there is no answer, and what to do."""
        if self.code == UNFIT and (fault := [line for line in self.err.splitlines() if NODE_ENV in line]):
            return fault[-1]  # in_node_env.sh says what is to be done
        said = " ".join(self.err.split()) or f"exit code {self.code}"
        signs, otherwise = (UNREACHED, NOT_REACHED) if self.code == 255 else (UNFIT_SIGNS, "{said}")
        words = next((what for sign, what in signs.items() if sign in said), otherwise)
        return words.format(name=self.node, said=said)


NOT_REACHED = "cannot be reached ({said}); try: ssh {name} true"
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
UNFIT_SIGNS = {  # what bash and Python say
    ": cd: ": "has no such folder as here ({said}): share it between the nodes, or launch with --sync",
    "in_node_env.sh: line": NO_PYTHON,
    "in_node_env.sh": NO_KIT,
    "can't open file": NO_KIT,
    ": exec: ": NO_PYTHON,
    "bash: line 1: /": NO_PYTHON,
}


def framed(value: Any) -> str:
    """An answer as a node prints it."""
    return MARK + json.dumps(value) + "\n"


def read(folder: Path, node: str) -> Answer:
    """The answer of a node, as the launching side keeps it. Its code comes last: until then it is taken for 0."""
    out, err, code = (_text(folder / f"{node}.{kind}") for kind in ("out", "err", "code"))
    return Answer(node, int(code or 0), out, err, (folder / f"{node}.out").stat().st_mtime)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
