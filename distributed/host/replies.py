"""Replies of nodes to a query over ssh, or why a reply is missing, with the remedy.

A node prints one line of JSON after a marker, because a login shell may print other lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distributed.exit_codes import UNFIT
from distributed.host.ssh_call import LOGIN_SHELL, login_failure
from distributed.host.ssh_call import UNREACHABLE as SSH_FAILED
from distributed.host.system import KIT
from distributed.trust import checked, parse_json, shown

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself would cost every launch milliseconds
    from typing import Any

MARKER = "muster-reply "  # before the JSON
NODE_ENV = "config/node_env.sh: "  # prefix of messages about config/node_env.sh

ADDRESS = re.compile(r"([\w:][\w.:%-]{0,252})?")  # that a node sends; a part of commands
MAX_DEVICES = 1 << 16  # GPUs or cores of a node
MAX_NAMES = 100  # packages or files in a reply; a launch asks for a few
UNREACHABLE = "cannot be reached ({printed}); try: ssh {name} true"
# Output of ssh -> message, for failures that a retry does not cure; the first match is used.
SSH_FAILURES = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": (
        "host key has changed, possibly an attack; if the change is expected, remove the old key: ssh-keygen -R {name}"
    ),
    "Host key verification failed": "host key unknown; log in once and check its fingerprint: ssh {name}",
    "Permission denied (": "login without a password refused ({printed}); install your key: ssh-copy-id {name}",
    "Too many authentication failures": "no key accepted ({printed}); set IdentityFile in ~/.ssh/config",
    "Could not resolve hostname": UNREACHABLE,
}
NO_PYTHON = "Python cannot be started ({printed}); install it there, or choose another: --python PATH"
NO_MUSTER = "Muster not found ({printed}); share its directory between the nodes, or launch with --sync"
# Output of bash or Python on the node -> message; the first match is used.
START_FAILURES = {
    ": cd: ": "working directory not found ({printed}); share it between the nodes, or launch with --sync",
    "environment.bash: line": NO_PYTHON,  # bash found the script, but the script did not find Python
    "in_node_env.sh": NO_MUSTER,
    "can't open file": NO_MUSTER,
    ": exec: ": NO_PYTHON,
    "bash: line 1: /": NO_PYTHON,
}


@dataclass(frozen=True)
class NodeFacts:
    """The facts of a node that a launch needs."""

    python: str
    torch: str | None
    nccl: str | None
    muster: str  # checksum of its files
    gpus: int  # visible to its ranks
    gpu_error: str
    cores: float  # usable by its ranks
    missing: Sequence[str]  # packages that the ranks need and this Python does not have
    files: Mapping[str, str | None]  # file that the ranks will read -> SHA-256; None: unreadable
    machine: str  # identifier, which does not depend on the name by which the machine is reached
    addresses: tuple[str, ...]
    ssh_address: str  # its address in the ssh connection; "": not over ssh
    master: str  # the address that the first node's name resolves to; "": none
    seconds: float  # duration of that lookup
    port: int  # the requested port, or a free one
    holder: str | None  # the process that listens on the port; "": unknown; None: the port is free
    directory_error: str  # why the working directory there must not be used; "": none, or not tested
    log_error: str  # why no run directory can be written there; "": not tested, or it can be written
    log_warning: str  # why other users could replace run directories there; "": not tested, or none could

    def __post_init__(self) -> None:
        for address in (*self.addresses, self.ssh_address, self.master):
            if not ADDRESS.fullmatch(address):
                raise ValueError(f"reply: {shown(address)} is no address")
        if self.port not in range(1 << 16):
            raise ValueError(f"reply: {self.port} is no port")
        if max(len(self.missing), len(self.files)) > MAX_NAMES:
            raise ValueError(f"reply: more than {MAX_NAMES} packages or files")
        if self.gpus not in range(MAX_DEVICES) or not 0 <= self.cores < MAX_DEVICES:
            raise ValueError(f"reply: {self.gpus} is no number of GPUs, or {self.cores:g} no number of cores")


@dataclass(frozen=True)
class Reply:
    """Output and exit code of a query to a node."""

    node: str
    code: int
    out: str
    err: str
    arrived: float = 0.0  # Unix seconds at which its last line arrived, by the clock of the launcher's host
    most: int = 0  # values of its JSON; 0: trust.MAX_VALUES

    def value(self, kind: Any = object) -> Any:
        """The JSON value, see trust.checked(); None without a valid one, see failure_message()."""
        return self._read(kind)[0]

    def _read(self, kind: Any) -> tuple[Any, str]:
        """The JSON value, and why it is invalid. The reply may be incomplete."""
        marked = [line for line in self.out.splitlines() if line.startswith(MARKER)]
        try:
            if not marked:
                return None, ""
            return checked(kind, parse_json(marked[-1].removeprefix(MARKER), self.most), "reply"), ""
        except ValueError as error:
            return None, f"invalid reply ({error}); use the same version of Muster on all nodes"

    def failure_message(self, kind: Any = object) -> str:
        """Why there is no value of this kind, and the remedy."""
        if self.code == 0 and (problem := self._read(kind)[1]):
            return problem
        if self.code == UNFIT and (fault := [line for line in self.err.splitlines() if NODE_ENV in line]):
            return fault[-1]  # in_node_env.sh has added the remedy
        if self.code == UNFIT and LOGIN_SHELL in self.err:  # ssh_call has added the remedy, and the name of the node
            return login_failure(self.err)
        printed = " ".join(self.err.split()) or f"exit code {self.code}"
        if self.code == SSH_FAILED:
            return ssh_failure(printed, self.node) or UNREACHABLE.format(name=self.node, printed=printed)
        message = next((message for pattern, message in START_FAILURES.items() if pattern in printed), "{printed}")
        return message.format(
            printed=re.sub(rf"(?:{re.escape(str(KIT))}/scripts/lib/[a-z_.]+|bash): line \d+: ", "", printed)
        )


def ssh_failure(printed: str, name: str) -> str:
    """The message for output of ssh, if it shows that a retry is useless; otherwise empty. name: [user@]host."""
    message = next((message for pattern, message in SSH_FAILURES.items() if pattern in printed), "")
    return message.format(name=name, printed=printed)


def format_reply(value: Any) -> str:
    """A reply as a node prints it."""
    return MARKER + json.dumps(value) + "\n"
