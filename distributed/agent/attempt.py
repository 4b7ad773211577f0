"""Pass the number of the launcher's attempt to the ranks.

torchrun numbers attempts in TORCHELASTIC_RESTART_COUNT. Scripts name caches and files after this number and
TORCHELASTIC_RUN_ID. A launcher that restarts a run sets TORCHELASTIC_RESTART_COUNT and TORCHELASTIC_MAX_RESTARTS for
the agents, which pass them to the ranks; torchrun's agent, which may restart ranks itself, adds its own numbers. For
each attempt, the launcher starts new agents, or sends the facts of the attempt to waiting agents.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from distributed.files import PUBLIC
from distributed.launch.node_reports import ATTEMPT_PIPES

COUNT, MAXIMUM, RUN_ID = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True)
class Attempt:
    """An attempt of a launcher."""

    restarts: int = 0  # of the launcher, before this attempt
    maximum: int = 0  # of restarts

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Attempt:
        """Read the variables that the launcher has set. Without a launcher: no restarts."""
        return cls.parse(f"{env.get(COUNT, '')}/{env.get(MAXIMUM, '')}")

    @classmethod
    def parse(cls, text: str) -> Attempt:
        """Read what str() returns. Anything that is not a number counts as 0."""
        restarts, _, maximum = text.partition("/")
        return cls(*(int(number[:9]) if number.isdecimal() else 0 for number in (restarts, maximum)))

    def __str__(self) -> str:
        return f"{self.restarts}/{self.maximum}"

    def variables(self, env: Mapping[str, str], run_id: str = "") -> dict[str, str]:
        """Return the variables to replace in a rank's environment.

        env: variables set by torchrun, which may restart ranks itself. run_id: replaces torchrun's run ID; "": keep it.
        """
        replaced = {COUNT: str(self.restarts + int(env[COUNT])), MAXIMUM: str(self.maximum + int(env[MAXIMUM]))}
        return replaced | ({RUN_ID: run_id} if run_id else {})


class AttemptPipes:
    """The pipes between an agent and its supervisor; see node_reports.ATTEMPT_PIPES."""

    def __init__(self, requests: int, replies: int, uses: Sequence[str]) -> None:
        """requests, replies: file descriptors for writing and for reading. uses: "restarts", "signals"."""
        self._requests, self._replies, self._uses = requests, replies, uses

    @property
    def restarts(self) -> bool:
        """Whether the agent waits for the next attempt."""
        return "restarts" in self._uses

    @classmethod
    def take(cls) -> AttemptPipes | None:
        """Return the pipes that the environment variable ATTEMPT_PIPES names, or None. Removes the variable.

        The fork server, which starts the ranks, also inherits the pipes, but closes its copies of them.
        """
        first, second, *uses = f"{os.environ.pop(ATTEMPT_PIPES, '')}  ".split(" ")
        ends = [end.split(":") for end in (first, second)]
        with contextlib.suppress(OSError, ValueError):
            requests, replies = (int(number) for number, _ in ends)
            # A program between supervisor and agent may have closed the pipes and reused their numbers for other files.
            if [str(os.fstat(number).st_ino) for number in (requests, replies)] == [inode for _, inode in ends]:
                return cls(requests, replies, uses)
        return None

    def next_attempt(self, outcome: str) -> dict[str, Any] | None:
        """Report how the attempt has ended, and wait. Returns the facts of the next attempt; None to exit.

        outcome: "CODE NODE", the exit code and the lost node, if any; "" from a spare node, which has run no attempt.
        """
        line = b""
        with contextlib.suppress(OSError):  # the supervisor was killed
            os.write(self._requests, f"{outcome}\n".encode())
            while not line.endswith(b"\n") and (more := os.read(self._replies, 1 << 16)):
                line = (line + more).lstrip(b"\n")
        return json.loads(line) if line.endswith(b"\n") else None

    def is_stopped(self) -> bool:
        """Whether the supervisor has closed its end of the pipe, or sends SIGTERM."""
        return bool(select.select([self._replies], [], [], 0)[0])

    def pass_on(self, number: int) -> bool:
        """Pass a signal to the supervisor, unless it sent the signal itself. Returns whether it was passed on."""
        with contextlib.suppress(OSError):  # the supervisor was killed
            if "signals" in self._uses and not self.is_stopped():
                return os.write(self._requests, f"signal {number}\n".encode()) > 0
        return False


def stable_run_id(standalone: bool) -> str:
    """A run ID for --standalone, where torchrun makes a new one in each attempt. "": keep torchrun's."""
    return os.path.basename(os.environ.get("MUSTER_RUN_DIR", "")) if standalone else ""


def run_torchrun(module: str, arguments: list[str]) -> None:
    """Run torchrun or torch.distributed.launch in this process. Its ranks get the number of the launcher's attempt."""
    import runpy
    import sys

    from torch.distributed import HashStore
    from torch.distributed.elastic.agent.server import local_elastic_agent
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

    if "--standalone" in arguments:
        # torchrun would keep the state of the rendezvous in a TCP store, and unpickle it every few seconds: who can
        # connect could run code as this user.
        c10d_rendezvous_backend._create_tcp_store = lambda *_: HashStore()  # type: ignore[assignment]
    attempt, run_id = Attempt.from_env(), stable_run_id("--standalone" in arguments)
    start: Any = local_elastic_agent.start_processes

    def start_processes(*positional: Any, envs: dict[int, dict[str, str]], **options: Any) -> Any:
        for env in envs.values():
            env.update(attempt.variables(env, run_id))
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), PUBLIC)))
        return start(*positional, envs=envs, **options)

    local_elastic_agent.start_processes = cast(Any, start_processes)
    # The directories and files for the ranks' output are private; the ranks have the user's umask.
    subprocess_handler.Popen = partial(subprocess_handler.Popen, umask=os.umask(0o077))  # type: ignore[misc,assignment]
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
