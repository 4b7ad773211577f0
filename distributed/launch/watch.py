"""Watch the nodes of a run: start them, stop the others at the first failure, pass signals on.

One event loop (loop.py) serves all nodes. A client is a local process that runs the supervisor of a node, over ssh if
the node is another machine; pdsh and srun have one client for all nodes. The standard input of a client is the control
channel of the supervisor. The launcher writes the requests stop, kill, signal N and report to it, and an empty line as
a heartbeat. End of file means that the launcher has exited. With restarts, agents wait for the next attempt after a
failed one, and their supervisors and clients stay. There are then three more requests: fail (end the attempt), attempt
(start the next attempt) and end (no attempt follows).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from distributed.exit_codes import UNFIT
from distributed.files import write_file
from distributed.host.ssh_call import LOGIN_SHELL, UNREACHABLE
from distributed.launch.lost_nodes import LostNodes
from distributed.launch.node_files import read_code
from distributed.launch.node_reports import ReportParser
from distributed.launch.node_requests import START_TIMEOUT
from distributed.launch.node_start import NodeStart
from distributed.launch.node_states import State
from distributed.launch.stopping import STOP_TIMEOUT, Stopping
from distributed.launch.watched_run import Transport, WatchedRun
from distributed.transport.loop import INHERITED, Client, Command
from distributed.trust import read_text, regular_file, shown

if TYPE_CHECKING:
    from distributed.launch.launcher_console import LauncherConsole
    from distributed.launch.watched_run import Options
    from distributed.runs.lookup import RunNode

NOT_STARTED = (126, 127)  # exit codes of a shell that cannot start an interpreter
MAX_INVALID = 20  # invalid reports of a client that are recorded


class Local(Transport):
    """Starts the nodes of a run on this machine. Its subclasses in transport.py and srun.py start them elsewhere."""

    def start(self, watch: Watch) -> None:
        """Start the nodes of an attempt, and the spare nodes."""
        for rank, node in enumerate([*watch.run.nodes, *watch.spares]):
            if node.node not in watch.running:
                self.start_node(watch, node, rank)
            elif node not in watch.spares:
                watch.running[node.node].send(watch.node_start.next_attempt())

    def start_node(self, watch: Watch, node: RunNode, rank: int = 0) -> None:
        """Start the agent of a node, or of a spare node, whose rank does not matter."""
        run = str(watch.directory)
        agent = watch.options.agent.on(run, node.node, str(rank), str(node.processes))
        arguments = [*watch.node_start.supervisor_command(), "--name", node.node, "--environment", "-", "--", *agent]
        command = self.commands.command(node, arguments, watch.options.cwd, str(watch.file_of(node.node, "log")))
        watch.start_client(node.node, command, sent=watch.node_start.environment_block())

    def request(self, watch: Watch, request: str) -> None:
        """Send a request to all supervisors (stop, end), or to those of the attempt (fail, kill, signal N)."""
        for name in watch.running.keys() if watch.is_for_all(request) else watch.clients_of_attempt():
            watch.running[name].send(f"{request}\n".encode())

    def abandon(self, watch: Watch) -> None:
        """End the nodes that have not ended after all requests: their supervisors may be stopped (SIGSTOP)."""
        watch.kill_clients()
        for node in sorted(watch.nodes.unended):
            watch.console.record(f"{node}: still running after the stop request; killing its processes")
            watch.stopping.node_ended(node, UNFIT)
            watch.lost_nodes.sweep(node, grace=0)


class Watch(WatchedRun):
    """Runs the attempts of a run, one at a time."""

    transport: Local

    def __init__(self, transport: Local, options: Options, console: LauncherConsole, terminals: str) -> None:
        """terminals: the streams that are terminals: "", "1", "2" or, if both are the same, "12"."""
        super().__init__(transport, options, console, terminals, lambda number: self.stopping.handle_signal(number))
        self.node_start = NodeStart(self)
        self.stopping = Stopping(self, partial(transport.request, self), partial(transport.abandon, self))
        self.lost_nodes = LostNodes(
            self, self.stopping, self.node_start, self.follow, partial(transport.start_node, self)
        )
        self._heartbeats: threading.Thread | None = None

    def _begin_attempt(self) -> None:
        self.stopping.begin_attempt()
        self.continues = bool(self.nodes.waiting)
        names = {node.node for node in self.run.nodes}
        for name, known in self.nodes.items():
            known.begin_attempt(name in names)

    # ---- clients

    def start_client(
        self,
        name: str,
        command: Command,
        *,
        sent: bytes | None = None,
        on_text: Callable[[bytes], None] | None = None,
        on_report: Callable[[dict[str, Any]], None] | None = None,
        on_errors: Callable[[bytes], None] | None = None,
        on_exit: Callable[[Client], None] | None = None,
        environment: Mapping[bytes, bytes] | None = None,
    ) -> Client:
        """Start the client of a node, or of all nodes. By default its output is shown, and reports are handled."""
        parser, show = ReportParser(), on_text or partial(self.console.show, stream=1)
        handle_report = on_report or self._handle_report
        invalid = count(1)

        def handle_output(received: bytes) -> None:
            for item in parser.feed(received):
                if isinstance(item, bytes):
                    show(item)
                elif isinstance(item, ValueError) or not self._may_report(name, item):
                    reason = item if isinstance(item, ValueError) else f"about {shown(item['node'])}"
                    if (found := next(invalid)) <= MAX_INVALID:
                        more = "; further ones are not recorded" * (found == MAX_INVALID)
                        self.console.record(f"{name}: invalid report, ignored ({reason}){more}")
                else:
                    if sent := item.get("time"):
                        self.nodes[item["node"]].clock = sent - time.time()
                    if number := item.get("signal"):
                        self.stopping.stop_after_signal(number, item["node"])
                    handle_report(item)

        def handle_exit(client: Client) -> None:
            del self.running[name]
            (on_exit or partial(self.client_ended, name))(client)

        self.running[name] = client = Client(
            self.loop,
            command,
            {**self.transport.environment(self.calls.environment), **(environment or {})},
            on_exit=handle_exit,
            on_output=handle_output if self.transport.reports or self.agents_stay or on_report else None,
            on_errors=on_errors,
            sent=sent,
            output=INHERITED,
            errors=INHERITED,
            dies_with_launcher=sent is None,
        )
        return client

    def _may_report(self, client: str, report: dict[str, Any]) -> bool:
        """Whether a client has the right to report about the node: a node speaks for itself only.

        With pdsh, each node has a token of its own. The nodes of srun share their files, as parts of one job.
        """
        known = self.nodes.get(report["node"])
        if known is None or (known.token and known.token != report.get("token")):
            return False
        return bool(known.token) or report["node"] == client or not self.transport.clients_are_nodes

    def _handle_report(self, report: dict[str, Any]) -> None:
        """Handle a report of a supervisor, whose client may still run."""
        node, code = report["node"], report.get("exit_code")
        known, was_unended = self.nodes[node], self.nodes[node].is_unended
        known.heard = self.loop.clock.now()
        if report.get("following") and self.lease == 0:
            known.runs_on = True
            if known.state is State.DISCONNECTED:
                known.become(State.RUNNING)
                self.console.record(f"{node}: connected again")
        if self.is_spare(node):
            self._handle_report_of_spare(report)
        elif report.get("waiting"):
            known.become(State.WAITING)
        if not was_unended or not isinstance(code, int):
            return
        known.reported, known.unlogged = code, report.get("unlogged", "")
        if report.get("waiting"):
            if missed := self.nodes.get(report.get("lost", "")):
                missed.missed = f"{node} received no heartbeat from it"
            self.stopping.node_failed(code)
            self.lost_nodes.give_up_missed()
        elif not self.transport.clients_are_nodes:
            self.stopping.node_ended(node, code)

    def _handle_report_of_spare(self, report: dict[str, Any]) -> None:
        node = report["node"]
        if report.get("waiting"):
            self.spare_is_ready(node)
        elif "exit_code" in report and node in self.running:
            self.running[node].kill()  # the spare node is lost when its client has exited
        elif "exit_code" in report:
            self.spare_is_lost(node)

    def spare_is_ready(self, node: str) -> None:
        """Note that the agent of a spare node waits."""
        if self.nodes[node].state is not State.WAITING:
            self.nodes[node].become(State.WAITING)
            self.console.record(f"{node}: ready as a spare node")

    def spare_is_lost(self, name: str) -> None:
        spare = next(node for node in self.spares if node.node == name)
        self.spares.remove(spare)
        self.nodes[name].become(State.ENDED)
        self.console.record(f"{name}: connection to this spare node lost")
        self.lost_nodes.await_return(spare)

    def client_ended(self, name: str, client: Client) -> None:
        for node in [name] if self.transport.clients_are_nodes else self.nodes.waiting:
            if self.nodes[node].state is State.WAITING:
                self.nodes[node].become(State.ENDED)
        if not self.transport.clients_are_nodes:
            self._client_of_all_ended(client)
        elif self.is_spare(name):
            self.spare_is_lost(name)
        elif (known := self.nodes[name]).lost:
            return
        elif known.reported is not None:
            self.stopping.node_ended(name, known.reported)
        elif known.is_unended:
            self._unreported(name, client)

    def _client_of_all_ended(self, client: Client) -> None:
        """Handle the end of the client of all nodes. Its code may be that of a node lost in an earlier attempt."""
        unended = sorted(self.nodes.unended)
        if len(unended) == len(self.run.nodes):
            self.stopping.node_failed(UNFIT if client.code == UNREACHABLE else client.code)
        for node in unended:
            if client.code and len(unended) < len(self.run.nodes):
                if (code := read_code(str(self.file_of(node, "exit")))) is None:
                    self.lost_nodes.lose(node)
                else:  # output of the login shell may have damaged its report
                    self.stopping.node_ended(node, code)
            self.nodes[node].become(State.ENDED)

    def _unreported(self, node: str, client: Client) -> None:
        """Handle the end of a client that has not passed on the exit code of its supervisor."""
        code = client.code
        recorded = read_code(str(self.file_of(node, "exit")))
        exited = recorded is not None
        lost = code == UNREACHABLE or (code > 128 and not self.stopping.requested)
        runs_on = self.nodes[node].runs_on or (self.lease == 0 and self.file_of(node, "reserved").exists())
        if not exited and (lost or (self.transport.reports and runs_on)):
            if self.transport.reports and client.process.returncode < 0:
                self.console.record(f"{node}: the launcher's client (process {client.process.pid}) was killed")
            if runs_on and not self.stopping.signal and not self.stopping.is_ending:
                self.lost_nodes.reconnect(node)
            else:
                if self.transport.reports and not self.stopping.signal and not self.stopping.is_ending:
                    self.lost_nodes.record_connection(node, client)
                self.lost_nodes.lose(node, UNFIT if code == UNREACHABLE else code)
            return
        if not exited and (code in NOT_STARTED or (code == UNFIT and self._login_shell_failed(node))):
            self.nodes[node].unstarted = code
        self.stopping.node_ended(node, code if recorded is None else recorded)

    def follow(self, node: RunNode, *options: str) -> None:
        """Start the client of a node whose command runs already. options: of follow.py."""
        self.nodes[node.node].runs_on = True
        command = [*self.node_start.supervisor_command(), "--name", node.node, *options]
        self.start_client(node.node, self.transport.commands.command(node, command, self.options.cwd), sent=b"")

    def _login_shell_failed(self, node: str) -> bool:
        with contextlib.suppress(OSError):
            return f"{node}: {LOGIN_SHELL}" in read_text(self.file_of(node, "log"))
        return False

    # ---- one attempt

    def attempt(self, start: Callable[[Watch], None] | None = None) -> int:
        """Start the nodes, and wait until all have ended. Returns the exit code of the first node that failed.

        start: called instead of transport.start(), for nodes that run already.
        """
        keeps_clients = self.transport.clients_are_nodes or self.nodes.waiting >= {node.node for node in self.run.nodes}
        if self.running and not keeps_clients:
            spares = list(self.spares)
            self.end_agents()
            self.spares = spares
        for client in self.lost_nodes.returning & self.calls.running:  # the call could stop a node that is started now
            client.kill()
        self._begin_attempt()
        (start or self.transport.start)(self)
        if self.stopping.signal:  # received before a node was started
            self.stopping.request("stop")
        if self.lease and not self._heartbeats:
            self._heartbeats = threading.Thread(target=self._send_heartbeats, args=(self.lease / 4,), daemon=True)
            self._heartbeats.start()
        self._wait_for_clients()
        self.attempts += 1
        self.stopping.forget_request()
        self._record_unstarted()
        return self.stopping.status

    def wait_for_spares(self) -> None:
        """Wait until all spare nodes are ready, START_TIMEOUT has passed, or a stop is requested."""
        limit = self.loop.clock.now() + START_TIMEOUT
        while (
            {node.node for node in self.spares} - self.nodes.waiting
            and self.loop.clock.now() < limit
            and not self.stopping.signal
        ):
            self.loop.wait(self.loop.clock.until(limit))

    def end_agents(self) -> None:
        """Let agents that wait for another attempt exit, and wait until the clients of all nodes have exited."""
        if self.nodes.waiting or self.spares:
            self.stopping.request("end")
            self.stopping.schedule(STOP_TIMEOUT, "kill")
            for node in self.nodes.waiting:
                self.nodes[node].become(State.ENDED)
            self.spares.clear()
            self._wait_for_clients()

    def _wait_for_clients(self) -> None:
        """Wait until the clients of all nodes have exited, or their agents wait for the next attempt."""
        paused = False
        while self.clients_of_attempt() or self.calls.running or self.nodes.disconnected or self.console.pending:
            self.console.flush_with(self.loop)
            if self.console.is_slow != paused:
                paused = not paused
                for client in self.running.values():
                    client.pause_output(paused)
            self.loop.wait()
            if not self.clients_of_attempt():  # the replies to a query are not needed any more
                for client in (self.lost_nodes.queries | self.lost_nodes.returning) & self.calls.running:
                    client.kill()

    def is_for_all(self, request: str) -> bool:
        """Whether a request is also for spare nodes, and nodes that wait for the next attempt."""
        return request in ("stop", "end") or bool(self.stopping.signal)

    def clients_of_attempt(self) -> set[str]:
        """The clients of nodes whose attempt has not ended."""
        if self.transport.clients_are_nodes or self.nodes.unended or not self.nodes.waiting:
            return self.running.keys() - self.nodes.waiting - {node.node for node in self.spares}
        return set()

    def _send_heartbeats(self, interval: float) -> None:
        """Send heartbeats. Runs in a thread of its own, because a disk may block the main thread.

        A node that misses heartbeats stops its command.
        """
        while True:
            time.sleep(interval)
            for client in list(self.running.values()):
                client.send_heartbeat()

    def _record_unstarted(self) -> None:
        """For nodes whose supervisor was not started, write the exit code for the verdict.

        If the interpreter was the cause, write that to the log; if it was the login shell, the loop has done so.
        """
        for node, known in self.nodes.items():
            remedy = f"cannot be started on {node}; name an interpreter of that node with --python"
            if (code := known.unstarted) is not None:
                self._record_end(node, code, f"{self.options.python}: {remedy}\n" if code != UNFIT else "")

    def record_reported(self) -> None:
        """Write for the verdict what nodes have reported, but could not write to their disks."""
        for node, known in self.nodes.items():
            if known.reported is not None and not self.file_of(node, "exit").exists():
                self._record_end(node, known.reported, known.unlogged)

    def _record_end(self, node: str, code: int, lines: str) -> None:
        with contextlib.suppress(OSError):
            with open(self.file_of(node, "log"), "ab", opener=regular_file) as log:
                log.write(lines.encode(errors="replace"))
            write_file(self.file_of(node, "exit"), f"{code}\n")

    def kill_clients(self) -> None:
        """Kill the clients of the attempt or, after a stop request, all clients. Do not wait for a blocked console."""
        for known in self.nodes.disconnected:
            known.become(State.RUNNING)
        names = self.running.keys() if self.stopping.signal else self.clients_of_attempt()
        for client in [*(self.running[name] for name in names), *self.calls.running]:
            client.kill()
        for stream in self.console.pending:
            stream.close()
