"""Call the command of --notify with the facts of an event, as a JSON object on its standard input."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable

from distributed.files import to_json
from distributed.trust import LAYOUT, printable

LIMIT = 10.0  # seconds after which the command is killed
TAIL = 1000  # bytes at the end of its output, whose last line is shown


class Notifier:
    """Notifies of events of a run or job list. Each call runs in a thread, so that it delays nothing."""

    def __init__(self, command: str, log: Callable[[str], None], subject: str, **facts: object) -> None:
        """command: run by sh; an empty command disables notifications. log: prints a failure, and is called in threads.

        subject: the start of each message. facts: entries of each JSON object.
        """
        self._command, self._log, self._subject, self._facts = command, log, subject, facts
        self._calls: list[threading.Thread] = []

    def send(self, event: str, message: str, **facts: object) -> None:
        if self._command:
            about = {"event": event, "message": f"{self._subject}: {message}", "time": time.time()}
            known = {**about, **self._facts, **facts}
            texts = {name: printable(value, LAYOUT) for name, value in known.items() if isinstance(value, str)}
            content = to_json(known | texts)
            call = threading.Thread(target=self._call, args=(event, content), daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads can be started
                call.start()
                self._calls.append(call)

    def wait(self) -> None:
        """Wait until all calls have ended."""
        for call in self._calls:
            call.join()

    def _call(self, event: str, content: bytes) -> None:
        output = os.memfd_create("output")
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", 'eval "$MUSTER_NOTIFY"'],  # all users can read arguments
                env={**os.environ, "MUSTER_NOTIFY": self._command},
                stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
            process.communicate(content, timeout=LIMIT)
            problem = f"exit code {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            problem = f"killed after {LIMIT:.0f} s"
        except OSError as error:
            problem = str(error)
        os.lseek(output, max(0, os.fstat(output).st_size - TAIL), os.SEEK_SET)
        with open(output, errors="replace") as file:
            last = "".join(f": {line.strip()}" for line in file.read().strip().splitlines()[-1:])
        if problem:
            self._log(f"notify: {event}: the command failed: {problem}{last}")
