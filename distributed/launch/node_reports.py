"""Reports that a program on a node prints for the launcher, between its lines for the console.

A report is one line: REPORT, a JSON object, a line break. The object has the time on the clock of the node. A
supervisor reports its start, and the exit code of its command, because the exit code of ssh or pdsh may be that of a
lost connection. In a report, the key "waiting" means that the agent waits for the next attempt, the key "lost" names a
node that sent no heartbeats to the agent, and the key "signal" is the number of a signal for which the supervisor now
stops its command. The key "unlogged" has lines that a full disk did not take. A follower (launch/follow.py) also
reports that it follows the command. A task of srun also sends reports as heartbeats.
"""

from __future__ import annotations

from distributed.trust import checked, parse_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

REPORT = b"\x1e"  # ASCII record separator; supervisors remove it from the output of their command
MAX_REPORT = 1 << 20  # bytes
ERROR = b"\x1f"  # ASCII unit separator: a task of srun prints it before a line of standard error
# Heartbeats between a launcher and a task of srun, and between a dispatcher and a server, in both directions.
HEARTBEAT_INTERVAL = 3.0  # seconds; a supervisor with --lease 0 touches its heartbeat file at the same interval
HEARTBEAT_TIMEOUT = 4 * HEARTBEAT_INTERVAL  # seconds
# Environment variable that names two pipes between a supervisor and its agent, each as "descriptor:inode", and what
# they are for. "restarts": when an attempt has failed and all its ranks have exited, the agent writes a line: its exit
# code, and the name of the lost node if there is one. The agent of a spare node writes an empty line. Then the agent
# reads a line with the next attempt, in JSON. At end of file, the agent exits.
# "signals": before the supervisor sends SIGTERM to the agent, it writes an empty line or closes its end. Without
# either, the signal came from elsewhere: the agent writes "signal N" and does not handle it, so that the supervisor
# reports the signal before it stops the ranks.
ATTEMPT_PIPES = "MUSTER_ATTEMPT_PIPES"
REPORT_TOKEN = "MUSTER_REPORT_TOKEN"  # variable of a supervisor, which its command does not get


def format_report(**facts: object) -> bytes:
    import json  # not at the top: a supervisor starts before every command
    import time

    return REPORT + json.dumps({"time": time.time()} | facts).encode() + b"\n"


def parse_report(line: bytes) -> dict[str, Any]:
    """Raises ValueError."""
    code = range(256)
    end = {"rank": int | None, "local_rank?": int, "pid?": int, "time?": float, "exit_code": code}
    end |= {"ended_by_agent?": bool}
    of_task = {"step?": str, "tasks?": range(1, 1 << 16), "failed?": code, "end?": end}
    report = {"node": str, "exit_code?": code, "waiting?": bool, "lost?": str, "following?": bool, "token?": str}
    report |= {"signal?": range(1, 65), "time?": float, "unlogged?": str}
    return checked(report | of_task, parse_json(line), "report")


class ReportParser:
    """Splits what nodes print into reports and other output. A report may be in the middle of a line.

    REPORT ends an unfinished report: pdsh prints the end of what a node has sent, which may lack a line break.
    """

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, received: bytes) -> Iterator[bytes | dict[str, Any] | ValueError]:
        """Yields reports, output, and why a report is invalid."""
        output, *reports = (self._partial + received).split(REPORT)
        self._partial = b""
        if output:
            yield output
        for number, report in enumerate(reports, 1):
            line, newline, output = report.partition(b"\n")
            if number == len(reports) and not newline and len(line) < MAX_REPORT:
                self._partial = REPORT + line
                return
            try:
                yield parse_report(line)
            except ValueError as error:
                yield error
            if output:
                yield output
