"""Check an attempt for a hang, repeatedly until the attempt ends.

A check reads the files of the run on this machine, and queries the nodes only if these files show no recent output.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from distributed.host.replies import Reply
from distributed.launch.watch import Watch

if TYPE_CHECKING:
    from distributed.launch.hang_decision import Decision, HangWatch, Query
    from distributed.runs.lookup import RunNode

FIRST_CHECK = 60.0  # seconds; equal to IDLE_TIMEOUT of distributed/verdict/hang_analysis.py
DEFAULT_HANG_TIMEOUT = 600.0  # seconds; used if --hang-timeout is not given and the run logs steps
MAX_DELAY = 5.0  # seconds; if a timer is later than this, the machine or this program was suspended
QUERY_TIMEOUT, STACKS_TIMEOUT = 15.0, 60.0  # seconds


def schedule_hang_check(watch: Watch) -> None:
    """Check the next attempt of a run for a hang, unless --hang-timeout is 0."""
    timeout, permanent_only = hang_limits(watch.options.hang_timeout, watch.options.all_ranks_here)
    started, attempt = time.monotonic(), watch.attempts

    def start() -> None:
        if attempt == watch.attempts:
            # Not at the top: most runs end before the first check.
            from distributed.launch.hang_decision import HangWatch

            HangCheck(watch, HangWatch(watch.run, timeout, permanent_only), started).check(started + delay)

    delay = min(timeout, FIRST_CHECK)
    if timeout:
        watch.loop.call_later(delay, start)


def hang_limits(option: float | None, all_ranks_here: bool) -> tuple[float, bool]:
    """Return the timeout of HangWatch in seconds (0: no check), and whether only a permanent stall stops the run.

    option: the value of --hang-timeout. Without it, a run is stopped only if it logs steps and no rank can make
    progress; any other run that looks hung is only reported. A run whose ranks may wait for ranks of other launchers is
    never stopped without the option.
    """
    if option is not None:
        return option, False
    return (DEFAULT_HANG_TIMEOUT, True) if all_ranks_here else (math.inf, False)


class HangCheck:
    """Checks an attempt until it ends."""

    def __init__(self, watch: Watch, hang_watch: HangWatch, since: float) -> None:
        """since: start of the attempt, as time.monotonic().

        Time without output counts only from then on, and after a suspension only from the end of the suspension.
        """
        self._watch, self._hang_watch, self._since = watch, hang_watch, since
        self._attempt = watch.attempts

    def check(self, due: float) -> None:
        """due: when the timer of this check was due, as time.monotonic()."""
        watched = self._seconds_watched(due)
        if self._attempt == self._watch.attempts:
            self._decide(lambda: self._hang_watch.check_files(watched))

    def _seconds_watched(self, due: float) -> float:
        """Seconds since the start or the end of the last suspension. due: when this call was due at the latest."""
        now = time.monotonic()
        if now > due + MAX_DELAY:  # the machine or this program was suspended
            self._since = now
        return now - self._since

    def _decide(self, check: Callable[[], tuple[Decision, str]]) -> None:
        """Handle the result of a check. A failure of the check must not end the run."""
        try:
            decision = check()
        except Exception as error:  # noqa: BLE001
            self._watch.console.record(f"the check for a hang failed, and no other check follows: {error!r}")
        else:
            self.handle(*decision)

    def handle(self, decision: Decision, notice: str) -> None:
        from distributed.launch.hang_decision import RECOVERED, Hung, Wait

        if self._watch.stopping.is_ending or self._attempt != self._watch.attempts:
            return
        if notice:
            self._watch.console.record(notice, always=True)
            self._watch.notifier.send("recovery" if notice == RECOVERED else "hang", notice)
        if isinstance(decision, Hung):
            self._watch.stopping.stop_hung_run(decision.record)
        elif isinstance(decision, Wait):
            due = time.monotonic() + decision.seconds
            self._watch.loop.call_later(decision.seconds, partial(self.check, due))
        else:
            self._query(decision)

    def _query(self, query: Query) -> None:
        from distributed.runs.query import node_reply, status_command

        run = self._watch.run
        replies: dict[RunNode, Reply] = {}
        self._watch.lost_nodes.queries.clear()

        def check() -> tuple[Decision, str]:
            found = [node_reply(node, replies[node]) for node in run.nodes]
            return self._hang_watch.check_replies(found, self._seconds_watched(due), query)

        def replied(node: RunNode, reply: Reply) -> None:
            replies[node] = reply
            if len(replies) == len(run.nodes):
                self._decide(check)

        timeout = STACKS_TIMEOUT if query.stacks else QUERY_TIMEOUT
        due = time.monotonic() + timeout
        for node in run.nodes:
            command = self._watch.transport.commands.command(node, status_command(run, node, query.arguments), "/")
            self._watch.lost_nodes.queries.add(
                self._watch.calls.call(node.node, command, partial(replied, node), timeout=timeout)
            )
