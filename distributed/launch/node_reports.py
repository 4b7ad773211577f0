"""Reports that a program on a node prints for the launcher, between its lines for the console.

A report is one line: REPORT, a JSON object, a line break. A supervisor reports the exit code of its command, because
the exit code of ssh or pdsh may be that of a lost connection. In a report, the key "waiting" means that the agent waits
for the next attempt, and the key "lost" names a node that sent no heartbeats to the agent. A follower
(launch/follow.py) also reports that it follows the command. A task of srun also reports its start, and sends reports as
heartbeats.
"""

from __future__ import annotations

import contextlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

REPORT = b"\x1e"  # ASCII record separator, which programs hardly ever print
ERROR = b"\x1f"  # ASCII unit separator: a task of srun prints it before a line of standard error
# Heartbeats between a launcher and a task of srun, and between a dispatcher and a server, in both directions.
HEARTBEAT_INTERVAL = 3.0  # seconds; a supervisor with --lease 0 touches its heartbeat file at the same interval
HEARTBEAT_TIMEOUT = 4 * HEARTBEAT_INTERVAL  # seconds
# Environment variable that names two pipes between a supervisor and its agent, each as "descriptor:inode". When an
# attempt has failed and all its ranks have exited, the agent writes a line: its exit code, and the name of the lost
# node if there is one. The agent of a spare node writes an empty line. Then the agent reads a line with the next
# attempt, in JSON. At end of file, the agent exits.
ATTEMPT_PIPES = "MUSTER_ATTEMPT_PIPES"


def format_report(**facts: object) -> bytes:
    import json  # not at the top: a supervisor starts before every command

    return REPORT + json.dumps(facts).encode() + b"\n"


def parse_report(line: bytes) -> dict[str, Any]:
    """Return the report; {} if the line is not a report: a rank may print the REPORT character."""
    import json

    with contextlib.suppress(ValueError):
        report = json.loads(line)
        if isinstance(report, dict) and isinstance(report.get("node"), str):
            return report
    return {}


class ReportParser:
    """Splits what nodes print into reports and other output. A report may be in the middle of a line."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, received: bytes) -> Iterator[bytes | dict[str, Any]]:
        self._partial += received
        while self._partial:
            output, separator, rest = self._partial.partition(REPORT)
            if output:
                yield output
            line, newline, rest = rest.partition(b"\n")
            if separator and not newline:
                self._partial = separator + line
                return
            self._partial = rest
            if separator:
                yield parse_report(line) or separator + line + newline
