"""The command line of a supervisor; supervisor.py documents the options."""

from __future__ import annotations

import os

from distributed.exit_codes import WRONG_CALL
from distributed.launch.node_files import Files, SupervisorError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# Each of these options sets the field of SupervisorOptions that has its name.
FLAGS = ("--report", "--sample-usage", "--restarts")
# --offset: of follow.py
TEXTS = ("--dir", "--name", "--attempt", "--source", "--environment", "--terminals", "--console-rank", "--offset")
DURATIONS = ("--grace", "--lease", "--timeout")


class SupervisorOptions:
    """The parsed command line. Raises SupervisorError."""

    def __init__(self, arguments: Sequence[str], grace: float = 8.0) -> None:
        """grace: the default of --grace."""
        self.dir = self.name = self.attempt = self.source = self.environment = self.terminals = ""
        self.grace, self.lease, self.timeout = grace, float("inf"), float("inf")
        self.report = self.sample_usage = self.restarts = False
        self.offset, self.console_rank = "", "0"
        self.command: list[str] = []
        remaining = list(arguments)
        while remaining:
            option = remaining.pop(0)
            if option == "--":
                self.command = remaining
                break
            field = option.removeprefix("--").replace("-", "_")
            if option in FLAGS:
                setattr(self, field, True)
            elif option in TEXTS + DURATIONS:
                if not remaining or not remaining[0]:
                    raise SupervisorError(WRONG_CALL, f"{option}: needs a value")
                value = remaining.pop(0)
                setattr(self, field, seconds(option, value) if option in DURATIONS else value)
            else:
                raise SupervisorError(WRONG_CALL, f"{option}: unknown option")
        if not self.dir or not self.name:
            raise SupervisorError(WRONG_CALL, "--dir and --name are required")
        if "/" in self.name:
            raise SupervisorError(WRONG_CALL, f"--name: expected a name without a slash, got '{self.name}'")
        if self.offset and not self.offset.isdecimal():
            raise SupervisorError(WRONG_CALL, f"--offset: expected a number of bytes, got '{self.offset}'")
        if self.source and not os.access(self.source, os.R_OK):
            raise SupervisorError(WRONG_CALL, f"--source '{self.source}': cannot read file")

    @property
    def files(self) -> Files:
        return Files(self.dir, self.name, attempt=self.attempt)


def seconds(option: str, value: str) -> float:
    if not value.isascii() or not value.isdecimal():
        raise SupervisorError(WRONG_CALL, f"{option}: expected a whole number of seconds, got '{value}'")
    return float(value)
