"""What is recorded, and what is shown: a decision is a record, which is committed before the decision is executed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributed.jobs.journal.journal import Journal, Record
from distributed.jobs.journal.state import ListState

Action = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Shown:
    """The functions with which a dispatcher shows what happens."""

    log: Callable[[str], None] = lambda _: None  # prints a line
    changed: Callable[[], None] = lambda: None  # called after each change of state
    notify: Callable[..., None] = lambda *_, **__: None  # see launch.notify: Notifier.send()


class Recorder:
    """Applies records to the state of a list, and commits them to its journal."""

    def __init__(self, journal: Journal, state: ListState, shown: Shown) -> None:
        self.state, self.log, self.changed, self.notify = state, shown.log, shown.changed, shown.notify
        self.error = ""  # why the journal cannot be written
        self._journal = journal
        self._actions: list[Action] = []

    @property
    def pending(self) -> bool:
        """Whether a record is not committed, or an action is not started."""
        return bool(self._journal.pending or self._actions)

    def record(self, event: str, **facts: Any) -> None:
        """Apply a record to the state. commit() writes it."""
        self.state.apply(self._journal.add(event, **facts))
        self.changed()

    def execute(self, action: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Let the next commit() that succeeds return this action."""
        self._actions.append(partial(action, *arguments))

    def commit(self) -> list[Action]:
        """Write the records to the journal. Returns the actions to start; none while the journal cannot be written."""
        try:
            self._journal.commit()
        except OSError as error:
            if not self.error:
                self.log(f"{self._journal.path}: {error.strerror}; no new jobs start until it is writable")
            self.error = f"{self._journal.path}: {error.strerror}"
            return []
        if self.error:
            self.log(f"{self._journal.path}: writable again")
            self.error = ""
        actions, self._actions = self._actions, []
        return actions

    def close(self) -> None:
        """Commit the last records, if the journal is writable."""
        with contextlib.suppress(OSError):
            self._journal.commit()

    def requests(self) -> list[Record]:
        """The requests of other processes that are not handled yet."""
        self._journal.records = []  # the state has their requests
        for request in self._journal.requests():
            self.state.apply(request)
        return self.state.unhandled_requests()
