"""A clock that stands still while its process cannot run.

A process that is suspended (SIGSTOP, `scontrol suspend`, a paused virtual machine) or blocked by a disk does not
receive what it waits for. A deadline that passes meanwhile shows nothing. So deadlines are times on this clock.

Standard library only. The supervisor imports this module before every command.
"""

from __future__ import annotations

import _thread
import time

LONGEST_STEP = 3.0  # seconds that count between two readings; a process that can run reads the clock at least as often


class RunningClock:
    """Seconds in which this process could run. Threads may share a clock."""

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._read_at = time.monotonic()
        self._lost = 0.0  # seconds that do not count

    def now(self) -> float:
        """The time on this clock. Of a longer time since the last reading, only LONGEST_STEP counts."""
        with self._lock:
            now = time.monotonic()
            self._lost += max(0.0, now - self._read_at - LONGEST_STEP)
            self._read_at = now
            return now - self._lost

    def until(self, end: float) -> float:
        """Seconds until a time on this clock, or a part of them: how long to wait before reading the clock again."""
        return max(0.0, min(end - self.now(), LONGEST_STEP / 2))
