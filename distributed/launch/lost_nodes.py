"""Nodes without a connection: whether they reply, whether they are lost, and when they return."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from distributed.exit_codes import UNFIT
from distributed.files import command_of, write_json
from distributed.host import signals
from distributed.launch.node_states import NodeState, State
from distributed.launch.stopping import STOP_TIMEOUT, Stopping
from distributed.transport.commands import quote
from distributed.trust import regular_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distributed.host.replies import Reply
    from distributed.launch.node_start import NodeStart
    from distributed.launch.watched_run import WatchedRun
    from distributed.runs.lookup import RunNode
    from distributed.transport.loop import Client

REPLY_TIMEOUT = 1.5  # seconds for a reply of a node that may be lost, if another node can replace it
CONNECTION_LOST = "connection lost"
RETURN_INTERVAL = 15.0  # seconds between calls to a lost node that was replaced, and time limit of a call
RECONNECT_INTERVAL = 5.0  # seconds between attempts to follow a node again


class LostNodes:
    """Finds out whether nodes of a run are lost, and records it."""

    def __init__(
        self,
        run: WatchedRun,
        stopping: Stopping,
        node_start: NodeStart,
        follow: Callable[[RunNode], object],
        start_spare: Callable[[RunNode], object],
    ) -> None:
        """follow: start the client of a node whose command runs. start_spare: start the agent of a spare node."""
        self._run, self._stopping, self._node_start = run, stopping, node_start
        self._follow, self._start_spare = follow, start_spare
        self.queries: set[Client] = set()  # calls whose replies are needed only while the attempt runs
        self.returning: set[Client] = set()  # calls to lost nodes

    def lose(self, node: str, code: int = UNFIT) -> None:
        """Count the node as failed with this code, and run `sweep` there, which waits until its command has stopped.

        If that fails, mark the node as lost.
        """
        run = self._run
        if not run.nodes[node].is_unended:
            return
        self._stopping.node_ended(node, code)
        if self.is_lost(node):
            return
        run.console.record(f"{node}: connection to its supervisor lost; stopping the run")
        grace = run.options.grace

        def replied(reply: Reply) -> None:
            if reply.code:
                self.mark_lost(node)
            else:
                self.sweep(node, grace)

        if run.replaces:  # if it does not reply, another node can replace it at once
            self._call_supervisor(run.node(node), "status", replied, REPLY_TIMEOUT)
        else:
            self.sweep(node, grace)

    def sweep(self, node: str, grace: int) -> None:
        """End all processes of the run on a node. If that fails, mark the node as lost."""
        run = self._run

        def swept(reply: Reply) -> None:
            if not reply.code:
                return
            end = f"may run on; {quote([*command_of('stop'), run.directory.name])} stops them"
            if run.lease:
                end = f"exit after {run.lease} s without heartbeats"
            run.console.record(f"{node}: does not reply; its processes {end}")
            self.mark_lost(node)

        self._call_supervisor(run.node(node), "sweep", swept, grace + STOP_TIMEOUT, "--grace", str(grace))

    def _call_supervisor(
        self, node: RunNode, verb: str, then: Callable[[Reply], None], timeout: float, *options: str
    ) -> Client:
        run = self._run
        call = [*self._node_start.supervisor, verb, "--dir", str(run.directory), "--name", node.node, *options]
        command = run.transport.commands.command(node, call, run.options.cwd)
        return run.calls.call(node.node, command, then, timeout=timeout)

    def await_return(self, node: RunNode) -> None:
        """When a lost node replies again, end its processes, and start it as a spare node."""
        run = self._run
        if not run.transport.clients_are_nodes:  # the client of all nodes cannot start another one
            return

        def ended(reply: Reply) -> None:
            self.returning &= run.calls.running
            if is_used():
                return
            if reply.code or not run.nodes.unended or self._stopping.is_ending or node.node in run.running:
                self.await_return(node)
            elif not self._stopping.signal:
                run.spares.append(node)
                run.nodes[node.node] = NodeState()
                self._start_spare(node)

        def is_used() -> bool:
            """Whether the node is a spare node already, or was kept because no other node was available."""
            return node.node in {one.node for one in [*run.run.nodes, *run.spares]} & run.running.keys()

        def call() -> None:
            if is_used():
                return
            self.returning.add(self._call_supervisor(node, "sweep", ended, RETURN_INTERVAL))

        run.loop.call_later(RETURN_INTERVAL, call)

    def is_lost(self, node: str) -> bool:
        return self._run.file_of(node, "lost").exists()

    def mark_lost(self, node: str, reason: str = CONNECTION_LOST) -> None:
        """Record for the verdict that a node does not reply."""
        run = self._run
        self.notify_lost(node, reason)
        if run.replaces:
            self.await_return(run.node(node))
        path, text = run.file_of(node, "lost"), reason.removeprefix(CONNECTION_LOST)
        with contextlib.suppress(OSError), open(path, "w", opener=regular_file) as file:
            file.write(text)

    def notify_lost(self, node: str, reason: str) -> None:
        run = self._run
        run.nodes[node].become(State.LOST)
        run.nodes[node].lost = reason
        run.notifier.send("lost node", f"{node} is lost: {reason}", host=node)

    def give_up_missed(self) -> None:
        """Give up the running nodes that do not reply, if other nodes have reported all of them as lost.

        Reports alone are no reason: the node that sent them may be wrong.
        """
        run = self._run
        attempt, asked = run.attempts, run.loop.clock.now()

        def replied(reply: Reply) -> None:
            if not reply.code:
                run.nodes[reply.node].heard = run.loop.clock.now()

        def give_up() -> None:
            for node in nodes if attempt == run.attempts else ():
                if run.nodes[node].is_unended and run.nodes[node].heard < asked:
                    self.mark_lost(node, run.nodes[node].missed)
                    self._stopping.node_ended(node, UNFIT)
                    if node in run.running:
                        run.running[node].kill()

        nodes = sorted(run.nodes.unended)
        if run.replaces and all(run.nodes[node].missed for node in nodes):
            for node in nodes:
                if node in run.running:  # the control channel is faster than a login shell
                    run.running[node].send(b"report\n")
                self.queries.add(self._call_supervisor(run.node(node), "status", replied, REPLY_TIMEOUT))
            run.loop.call_later(REPLY_TIMEOUT, give_up)

    def reconnect(self, node: str) -> None:
        """Follow a node again whose command continues without a connection. If the run ends first, the node is lost."""
        run = self._run
        known, attempt = run.nodes[node], run.attempts
        if known.state is not State.DISCONNECTED:
            run.console.record(f"{node}: connection to its supervisor lost; it runs on, connecting again")
        known.become(State.DISCONNECTED)

        def connect() -> None:
            if attempt != run.attempts or known.state is not State.DISCONNECTED:
                return
            if self._stopping.signal or self._stopping.is_ending:
                self.lose(node)
            else:
                self._follow(run.node(node))

        run.loop.call_later(RECONNECT_INTERVAL, connect)

    def record_connection(self, node: str, client: Client) -> None:
        """Record for the verdict how the connection was lost, because the node's own record may only say "stopped"."""
        code = client.process.returncode
        if code < 0:
            name = signals.name(-code)
            message = f"its ssh client on the launching side (process {client.process.pid}) was killed by {name}"
        else:
            message = f"ssh on the launching side exited with code {code}"
        path = self._run.attempt_directory / "errors" / f"connection_{node}.json"
        with contextlib.suppress(OSError):
            write_json(path, {"message": message, "time": time.time()})
