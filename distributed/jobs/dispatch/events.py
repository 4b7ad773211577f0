"""The events of a dispatcher, and the tasks that post them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from distributed.jobs.schedule.backend import Event

POLL_INTERVAL = 0.5  # seconds between checks of timeouts and of the journal


class EventQueue:
    """The queue of events, and the running tasks."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    def post(self, event: Event) -> None:
        """Add an event to the queue."""
        self._events.put_nowait(event)

    async def wait(self) -> list[Event]:
        """The events of the queue, as soon as there is one; none after POLL_INTERVAL."""
        events = []
        with contextlib.suppress(asyncio.TimeoutError):
            events.append(await asyncio.wait_for(self._events.get(), POLL_INTERVAL))
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task. The event `task_failed` follows if it raises an exception."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.post(Event("task_failed", facts={"error": error}))

    async def close(self) -> None:
        """Cancel the tasks, and wait until they have ended."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
