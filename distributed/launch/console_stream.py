"""Output to a console that must not affect a run, however slow the console is."""

from __future__ import annotations

import os
import select

CHUNK = 4096  # bytes that a writable pipe accepts without blocking
BACKLOG = 4 << 20  # bytes buffered for a slow console; while there are more, the command's output is not read


class ConsoleStream:
    """Standard output or standard error. A slow, full or closed console must not affect the command."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pending = bytearray()
        self._ready = select.poll()
        self._ready.register(number, select.POLLOUT)
        self._is_closed = False

    def put(self, data: bytes) -> None:
        if not self._is_closed:
            self.pending += data
            self.flush()

    def flush(self) -> None:
        """Write without blocking. Each write ends with a line break, so that other writers do not split lines."""
        try:
            while self.pending and self._ready.poll(0):
                end = self.pending.rfind(b"\n", 0, CHUNK) + 1
                del self.pending[: os.write(self.number, self.pending[: end or CHUNK])]
        except BlockingIOError:
            pass
        except OSError:  # closed, or full
            self.close()

    def close(self) -> None:
        self._is_closed = True
        self.pending.clear()
