"""End an attempt or a run: because a node has failed, the run hangs, or a signal has arrived.

A request goes to the supervisors of the nodes: fail ends the attempt, stop ends the run. If they do not obey within
the grace period, kill follows, and at last the launcher abandons the nodes.
"""

from __future__ import annotations

import contextlib
import signal
import time
from functools import partial

from distributed.exit_codes import STOPPED, TERMINATED, TIMED_OUT
from distributed.files import write_json
from distributed.host import signals
from distributed.launch.node_states import NodeState, State
from distributed.launch.watched_run import STOPPING_SIGNALS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from distributed.launch.watched_run import WatchedRun

STOP_TIMEOUT = 10.0  # seconds between stop request and SIGKILL when a node has failed
CHECKPOINT_GRACE = 30.0  # seconds that the other nodes have to write a checkpoint after one node exited with STOPPED
REPEATED = 1.0  # seconds after a stop signal in which SIGHUP or SIGQUIT is ignored as a copy; see handle_signal()


class Stopping:
    """Whether and why the attempt or the run ends."""

    def __init__(self, run: WatchedRun, request: Callable[[str], None], abandon: Callable[[], None]) -> None:
        """request: send a request to the nodes. abandon: end the nodes that have not obeyed any request."""
        self._run, self.request, self._abandon = run, request, abandon
        self.status = 0  # exit code of the first node that failed
        self.requested = False  # a request was sent, or is scheduled
        self._escalation = 0  # identifies the newest scheduled request; older ones are not sent
        self.signal = 0  # the signal that requested a stop
        self._signal_time = 0.0
        self.stopped_at: float | None = None  # Unix time of that signal, if no node had failed before
        self._stops_for_node = False  # the signal was sent to a supervisor, and none to this process
        self.passed_signal = ""  # the signal that was passed on to the ranks

    def begin_attempt(self) -> None:
        self.forget_request()
        self.status, self.requested = 0, False

    def forget_request(self) -> None:
        """Do not send the request that is scheduled."""
        self._escalation += 1

    def node_ended(self, node: str, code: int) -> None:
        self._run.nodes[node].become(State.ENDED)
        self.node_failed(code)

    def node_failed(self, code: int) -> None:
        """Stop the other nodes at the first failure, and keep its code as the status.

        If that code is TERMINATED, a later code replaces it, because the later failure may have caused the SIGTERM.
        """
        if code and self.status in (0, TERMINATED):
            self.status = code
            if not self.requested:
                stays = self._run.agents_stay and code != STOPPED
                self.schedule(CHECKPOINT_GRACE if code == STOPPED else 0.0, "fail" if stays else "stop")

    def schedule(self, seconds: float, request: str) -> None:
        """Send a request later: fail, stop, kill or abandon. It replaces the request that was scheduled before."""
        self._escalation += 1
        self.requested = True
        self._run.loop.call_later(seconds, partial(self._escalate, self._escalation, request))

    def _escalate(self, number: int, request: str) -> None:
        if number != self._escalation:
            return
        if request == "abandon":
            self._abandon()
            return
        self.request(request)
        self.schedule(STOP_TIMEOUT, "abandon" if request == "kill" else "kill")

    def handle_signal(self, number: int) -> None:
        run = self._run
        name = signals.name(number)
        if number == signal.SIGHUP and run.lease == 0 and not self.signal:
            run.console.record("HUP: exiting; the run continues without a launcher")
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if number not in STOPPING_SIGNALS:
            self.passed_signal = name
            message = f"{name}: sending it to the ranks, or stopping them if they have no handler for it"
            run.console.record(message)
            self._record_signal(name)
            self.request(f"signal {number}")
            return
        hangup = number in (signal.SIGHUP, signal.SIGQUIT)
        if self._stops_for_node:  # this is the first signal to this process
            self._stops_for_node = False
            self.signal, self._signal_time = number, time.monotonic()
            run.console.record(f"{name}: the run is stopping already; send the signal again to kill it at once")
            return
        if self.signal:
            # A terminal sends SIGHUP and SIGQUIT to its whole process group. A script in that group may forward the
            # signal, so this process receives it twice: the second one is no request to kill the run.
            if not hangup or time.monotonic() > self._signal_time + REPEATED:
                self.request("kill")
                self.schedule(STOP_TIMEOUT, "abandon")
            return
        if number == signal.SIGHUP:
            run.console.leave_terminal()
        if hangup:
            self._record_signal(name)
        short, grace = name.removeprefix("SIG"), run.options.grace
        self._stop(number)
        run.console.record(f"{short}: stopping; up to {grace} s to write a checkpoint, {short} again to kill at once")

    def stop_after_signal(self, number: int, node: str) -> None:
        """Stop all nodes, because the supervisor or agent of a node has received a signal, and stops its ranks.

        While an attempt ends, the signal may be that of a request for which a full disk had no space.
        """
        run = self._run
        known = run.nodes.get(node, NodeState())
        known.signaled = known.signaled or time.time()
        if not self.signal and not self.is_ending and any(one.node == node for one in run.run.nodes):
            self._stops_for_node = True
            self._stop(number)
            limit = f"up to {run.options.grace} s to write a checkpoint"
            run.console.record(f"{node}: received {signals.name(number)}; stopping the run; {limit}")

    def _stop(self, number: int) -> None:
        """Stop the run because of a signal."""
        self.signal, self._signal_time = number, time.monotonic()
        if not self.status:
            self.stopped_at = time.time()
        self.request("stop")
        # Supervisors send SIGKILL after the grace period.
        self.schedule(self._run.options.grace + STOP_TIMEOUT, "abandon")

    def _record_signal(self, name: str) -> None:
        """Record a signal for the verdict."""
        facts = {"signal": name, "sender": "to the launcher", "time": time.time()}
        with contextlib.suppress(OSError):
            write_json(self._run.attempt_directory / "errors" / f"signal_launcher_{name}.json", facts)

    @property
    def is_ending(self) -> bool:
        return bool(self.status or self.requested)

    def stop_hung_run(self, record: dict[str, Any]) -> None:
        """Stop a run that hangs. record: the content of hang.json."""
        run = self._run
        with contextlib.suppress(OSError):
            write_json(run.attempt_directory / "hang.json", record)
        self.status = TIMED_OUT
        run.console.record("the run hangs; stopping it")
        self.schedule(0.0, "fail" if run.agents_stay else "stop")
