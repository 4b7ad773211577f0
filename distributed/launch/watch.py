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
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.attempts import newest
from distributed.exit_codes import STOPPED, TERMINATED, TIMED_OUT, UNFIT
from distributed.files import write_file, write_json
from distributed.host import signals
from distributed.host.replies import Reply
from distributed.host.ssh_call import LOGIN_SHELL, UNREACHABLE
from distributed.launch.console_stream import BACKLOG, ConsoleStream
from distributed.launch.node_files import read_code
from distributed.launch.node_reports import REPORT_TOKEN, ReportParser
from distributed.launch.node_requests import START_TIMEOUT
from distributed.launch.node_states import NodeState, State
from distributed.launch.notify import Notifier
from distributed.transport.commands import LIB, PLAIN_PYTHON, Calls, LocalCommands, environment_block
from distributed.transport.loop import INHERITED, Client, Command, Loop
from distributed.trust import LAYOUT, printable, read_text, regular_file, shown

if TYPE_CHECKING:
    from distributed.runs.lookup import Run, RunNode

STOP_TIMEOUT = 10.0  # seconds between stop request and SIGKILL when a node has failed
CHECKPOINT_GRACE = 30.0  # seconds that the other nodes have to write a checkpoint after one node exited with STOPPED
REPEATED = 1.0  # seconds after a stop signal in which SIGHUP or SIGQUIT is ignored as a copy; see _handle_signal()
NOT_STARTED = (126, 127)  # exit codes of a shell that cannot start an interpreter
REPLY_TIMEOUT = 1.5  # seconds for a reply of a node that may be lost, if another node can replace it
CONNECTION_LOST = "connection lost"
RETURN_INTERVAL = 15.0  # seconds between calls to a lost node that was replaced, and time limit of a call
MAX_INVALID = 20  # invalid reports of a client that are recorded
RECONNECT_INTERVAL = 5.0  # seconds between attempts to follow a node again
STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class AgentCommand:
    """The command line of the agent on each node."""

    before: tuple[str, ...]  # the part before the options that on() adds
    after: tuple[str, ...]  # the part after these options
    run_id: bool = False  # add the option --rdzv-id with the name of the run
    nodes: int = 0  # number of nodes, if on() adds the options for nodes and address; 0: `before` has these options
    address: str = ""  # of the first node
    port: str = ""

    def on(self, run: str, node: str, rank: str, processes: str) -> list[str]:
        """The command of a node. run: the run directory."""
        options = ["--rdzv-id", os.path.basename(run)] * self.run_id
        if self.nodes:
            options += ["--nnodes", str(self.nodes), "--node-rank", rank, "--nproc-per-node", processes]
            options += ["--master-addr", self.address, "--master-port", self.port]
        return [*self.before, *options, "--log-dir", f"{run}/ranks/{node}", *self.after]


@dataclass(frozen=True)
class Options:
    """The options of a launch that do not change between attempts."""

    agent: AgentCommand
    python: str  # the interpreter of the nodes
    node_env: str  # config/node_env.sh
    cwd: str
    grace: int  # seconds
    inherited: tuple[bytes, ...]  # NAME=VALUE of variables for the nodes, which config/node_env.sh may change
    environment: tuple[bytes, ...]  # NAME=VALUE of --env, which override `inherited`
    hang_timeout: float | None  # seconds; 0: never; None: the default
    all_ranks_here: bool  # False: other launchers start the other nodes of the run
    lease: int | None = None  # see Watch.lease; None: that of the transport
    console_rank: str = "auto"  # --console-rank: a number, last or auto
    progress: str = ""  # --progress: a regular expression, off, or "" to guess


class Local:
    """Starts the nodes of a run on this machine. Its subclasses in transport.py and srun.py start them elsewhere."""

    lease: int | None = None  # see Watch.lease
    reports = False  # True: the supervisor reports its exit code, because ssh or pdsh may exit with another code
    clients_are_nodes = True  # each node has a client of its own
    starts_agents = True  # False: it starts ranks

    def __init__(self, commands: LocalCommands) -> None:
        """commands: run other programs on the nodes, such as status queries."""
        self.commands = commands

    def environment(self, inherited: dict[bytes, bytes]) -> dict[bytes, bytes]:
        """The environment of clients, from that of the launcher."""
        return inherited

    def start(self, watch: Watch) -> None:
        """Start the nodes of an attempt, and the spare nodes."""
        for rank, node in enumerate([*watch.run.nodes, *watch.spares]):
            if node.node not in watch.running:
                self.start_node(watch, node, rank)
            elif node not in watch.spares:
                watch.running[node.node].send(watch.next_attempt())

    def start_node(self, watch: Watch, node: RunNode, rank: int = 0) -> None:
        """Start the agent of a node, or of a spare node, whose rank does not matter."""
        run = str(watch.directory)
        agent = watch.options.agent.on(run, node.node, str(rank), str(node.processes))
        arguments = [*watch.supervisor_command(), "--name", node.node, "--environment", "-", "--", *agent]
        command = self.commands.command(node, arguments, watch.options.cwd, str(watch.file_of(node.node, "log")))
        watch.start_client(node.node, command, sent=watch.environment_block())

    def request(self, watch: Watch, request: str) -> None:
        """Send a request to all supervisors (stop, end), or to those of the attempt (fail, kill, signal N)."""
        for name in watch.running.keys() if watch.is_for_all(request) else watch.clients_of_attempt():
            watch.running[name].send(f"{request}\n".encode())

    def abandon(self, watch: Watch) -> None:
        """End the nodes that have not ended after all requests: their supervisors may be stopped (SIGSTOP)."""
        watch.kill_clients()
        for node in sorted(watch.unended):
            watch.console.record(f"{node}: still running after the stop request; killing its processes")
            watch.node_ended(node, UNFIT)
            watch.sweep(node, grace=0)


class Console:
    """Standard output and standard error of the launcher, and launcher.log. A slow console must not block the watch."""

    def __init__(self, program: str, quiet: bool) -> None:
        self._program, self._quiet = program, quiet
        self.streams = {1: ConsoleStream(1), 2: ConsoleStream(2)}
        self.log: Path | None = None

    def show(self, data: bytes, stream: int) -> None:
        self.streams[stream].put(data)

    def print(self, message: str, always: bool = False) -> None:
        """Print a message, unless --quiet was given."""
        if always or not self._quiet:
            self.show(f"{self._program}: {printable(message, LAYOUT)}\n".encode(), 2)

    def record(self, message: str, always: bool = False) -> None:
        """Print a message and append it to launcher.log."""
        self.print(message, always)
        self.append(message)

    def append(self, message: str) -> None:
        """Append a message to launcher.log."""
        if self.log:
            with contextlib.suppress(OSError), open(self.log, "ab", opener=regular_file) as log:
                log.write(f"{time.strftime('%F %T')} {printable(message, LAYOUT)}\n".encode())

    def leave_terminal(self) -> None:
        """The terminal was closed: write to launcher.log, unless standard error is a file."""
        if self.log and not os.path.isfile("/dev/fd/2"):
            with contextlib.suppress(OSError):
                log = regular_file(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.close(log)

    @property
    def is_slow(self) -> bool:
        return any(len(stream.pending) > BACKLOG for stream in self.streams.values())

    @property
    def pending(self) -> list[ConsoleStream]:
        return [stream for stream in self.streams.values() if stream.pending]


class Watch:
    """Runs the attempts of a run, one at a time."""

    def __init__(self, transport: Local, options: Options, console: Console, terminals: str) -> None:
        """terminals: the streams that are terminals: "", "1", "2" or, if both are the same, "12"."""
        self.transport, self.options, self.console, self.terminals = transport, options, console, terminals
        self.loop = Loop(self._handle_signal, (*STOPPING_SIGNALS, *signals.PASSED_ON))
        self.calls = Calls(self.loop)
        self.notifier = Notifier("", console.append, "")
        self.restart_count, self.max_restarts = 0, 0
        self.signal = 0  # the signal that requested a stop
        self._signal_time = 0.0
        self.stopped_at: float | None = None  # Unix time of that signal, if no node had failed before
        self._stops_for_node = False  # the signal was sent to a supervisor, and none to this process
        self.passed_signal = ""  # the signal that was passed on to the ranks
        self.running: dict[str, Client] = {}  # by node, or by the name of the client of all nodes
        self.nodes: dict[str, NodeState] = {}  # of the run, spare nodes, and lost nodes
        self.continues = False  # the agents of the last attempt start the next one
        self.queries: set[Client] = set()  # calls whose replies are needed only while the attempt runs
        self.replaces = False  # whether the run can continue after losing nodes: with spare nodes or with fewer nodes
        self.spares: list[RunNode] = []
        self._returning: set[Client] = set()  # calls to lost nodes
        self._escalation = 0  # identifies the newest scheduled request; older ones are not sent
        self.attempts = 0  # number of attempts that have ended
        self._heartbeats: threading.Thread | None = None
        self.status = 0  # exit code of the first node that failed
        self._requested = False  # a stop is in progress

    def open(self, run: Run) -> None:
        """Set the run that is watched."""
        self.run, self.directory, self.spares = run, run.directory, list(run.spares)
        self.attempt_directory = Path(newest(run.directory))
        self.console.log = run.directory / "launcher.log"
        for node in (*run.nodes, *run.spares):
            self.nodes.setdefault(node.node, NodeState())

    def file_of(self, node: str, kind: str) -> Path:
        """The path of a node's file of the attempt. kind: its suffix."""
        return self.attempt_directory / f"node_{node}.{kind}"

    def _begin_attempt(self) -> None:
        self._escalation += 1
        self.status, self._requested = 0, False
        self.continues = bool(self.waiting)
        names = {node.node for node in self.run.nodes}
        for name, known in self.nodes.items():
            known.begin_attempt(name in names)

    # ---- what is known of the nodes

    @property
    def unended(self) -> set[str]:
        """Nodes of the attempt whose end is not known."""
        return {name for name, known in self.nodes.items() if known.is_unended}

    @property
    def waiting(self) -> set[str]:
        """Nodes whose agent waits for the next attempt."""
        return {name for name, known in self.nodes.items() if known.state is State.WAITING}

    @property
    def lost(self) -> dict[str, str]:
        """Lost nodes of the last attempt, and the reasons."""
        return {name: known.lost for name, known in self.nodes.items() if known.lost}

    @property
    def clocks(self) -> dict[str, float]:
        """Nodes that have reported, and the seconds that their clocks are ahead of the one here."""
        return {name: known.clock for name, known in self.nodes.items() if known.clock is not None}

    @property
    def signals(self) -> dict[str, float]:
        """Nodes that report a signal for which they stop, and the Unix times of these reports."""
        return {name: known.signaled for name, known in self.nodes.items() if known.signaled is not None}

    # ---- commands and environment

    @property
    def supervisor(self) -> list[str]:
        return [self.options.python, *PLAIN_PYTHON, f"{LIB}/module.py", "launch.supervisor"]

    @property
    def lease(self) -> int | None:
        """Seconds without a heartbeat after which a node stops its command.

        0: the command continues without this launcher. None: no heartbeats are sent; the node stops its command when
        the control channel is closed.
        """
        return self.transport.lease if self.options.lease is None else self.options.lease

    def supervisor_command(self) -> list[str]:
        """The supervisor's command line for an attempt, without the node's name and without the agent's command."""
        program = [*self.supervisor[:-1], "launch.follow"] if self.lease == 0 else [*self.supervisor, "run"]
        command = [*program, "--dir", str(self.directory), "--attempt", str(self.restart_count + 1)]
        command += ["--grace", str(self.options.grace)]
        command += ["--console-rank", self.console_rank]
        if self.terminals:
            command += ["--terminals", self.terminals]
        if self.transport.reports or self.agents_stay:
            command.append("--report")
        if self.agents_stay:
            command.append("--restarts")
        if self.lease:
            command += ["--lease", str(self.lease)]
        return [*command, "--source", self.options.node_env, "--sample-usage"]

    @property
    def agents_stay(self) -> bool:
        """Whether agents may stay for the next attempt."""
        return self.max_restarts > 0 and self.lease != 0 and self.transport.starts_agents

    @property
    def _counts(self) -> dict[str, str]:
        # distributed/agent/attempt.py passes these to the ranks.
        counts = {"TORCHELASTIC_MAX_RESTARTS": self.max_restarts, "TORCHELASTIC_RESTART_COUNT": self.restart_count}
        return {name: str(value) for name, value in counts.items()}

    @property
    def console_rank(self) -> str:
        """Whose output is shown in the attempt; see class ShownRanks."""
        chosen, node = self.options.console_rank, self.run.nodes[-1]
        last = node.first_rank + node.processes - 1
        if chosen == "auto":
            return f"auto:{last}" if node.processes > 1 else "0"
        return str(last) if chosen == "last" else chosen

    @property
    def _names_nodes(self) -> bool:
        """Whether the agents get the names of the nodes from this launcher."""
        return bool(self.options.agent.nodes) or self.replaces

    def entries(self) -> list[bytes]:
        """NAME=VALUE of --env and of the launcher for the ranks."""
        variables = self._counts | {"MUSTER_PROGRESS": self.options.progress}
        if self._names_nodes:
            variables["MUSTER_NODES"] = " ".join(node.node for node in self.run.nodes)
        if len(self.terminals) == 2 and os.environ.get("TERM") != "dumb":  # for rich and tqdm; see agent.worker
            rank = "0" if self.console_rank.startswith("auto") else self.console_rank
            size = "COLUMNS={0} LINES={1} TQDM_NCOLS={0}".format(*shutil.get_terminal_size())
            variables["MUSTER_TERMINAL"] = f"{rank} {size} TTY_COMPATIBLE=1 TTY_INTERACTIVE=1"
        return [*self.options.environment, *(f"{name}={value}".encode() for name, value in variables.items())]

    def next_attempt(self) -> bytes:
        """The request that makes a waiting agent start the next attempt."""
        agent = self.options.agent
        facts = {
            "attempt": str(self.restart_count + 1),
            "environment": self._counts,
            "processes": {node.node: node.processes for node in self.run.nodes} if self._names_nodes else {},
            "console_rank": self.console_rank,
            "address": agent.address,
            "port": int(agent.port or 0),
        }
        return f"attempt {json.dumps(facts)}\n".encode()

    def environment_block(self, node: str = "") -> bytes:
        """The environment of a node's command, for its supervisor. node: needed if the nodes have tokens."""
        token = self.nodes[node].token if node else ""
        tokens = [f"{REPORT_TOKEN}={token}".encode()] if token else []
        return environment_block([*self.options.inherited, *tokens], self.entries())

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
                        self.stop_after_signal(number, item["node"])
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
            self.node_failed(code)
            self._give_up_missed()
        elif not self.transport.clients_are_nodes:
            self.node_ended(node, code)

    def _handle_report_of_spare(self, report: dict[str, Any]) -> None:
        node = report["node"]
        if report.get("waiting"):
            self.spare_is_ready(node)
        elif "exit_code" in report and node in self.running:
            self.running[node].kill()  # the spare node is lost when its client has exited
        elif "exit_code" in report:
            self.spare_is_lost(node)

    def is_spare(self, node: str) -> bool:
        return any(spare.node == node for spare in self.spares)

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
        self._await_return(spare)

    def _give_up_missed(self) -> None:
        """Give up the running nodes that do not reply, if other nodes have reported all of them as lost.

        Reports alone are no reason: the node that sent them may be wrong.
        """
        attempt, asked = self.attempts, self.loop.clock.now()

        def replied(reply: Reply) -> None:
            if not reply.code:
                self.nodes[reply.node].heard = self.loop.clock.now()

        def give_up() -> None:
            for node in nodes if attempt == self.attempts else ():
                if self.nodes[node].is_unended and self.nodes[node].heard < asked:
                    self.mark_lost(node, self.nodes[node].missed)
                    self.node_ended(node, UNFIT)
                    if node in self.running:
                        self.running[node].kill()

        nodes = sorted(self.unended)
        if self.replaces and all(self.nodes[node].missed for node in nodes):
            for node in nodes:
                if node in self.running:  # the control channel is faster than a login shell
                    self.running[node].send(b"report\n")
                self.queries.add(self._call_supervisor(self._node(node), "status", replied, REPLY_TIMEOUT))
            self.loop.call_later(REPLY_TIMEOUT, give_up)

    def client_ended(self, name: str, client: Client) -> None:
        for node in [name] if self.transport.clients_are_nodes else self.waiting:
            if self.nodes[node].state is State.WAITING:
                self.nodes[node].become(State.ENDED)
        if not self.transport.clients_are_nodes:
            self._client_of_all_ended(client)
        elif self.is_spare(name):
            self.spare_is_lost(name)
        elif (known := self.nodes[name]).lost:
            return
        elif known.reported is not None:
            self.node_ended(name, known.reported)
        elif known.is_unended:
            self._unreported(name, client)

    def _client_of_all_ended(self, client: Client) -> None:
        """Handle the end of the client of all nodes. Its code may be that of a node lost in an earlier attempt."""
        unended = sorted(self.unended)
        if len(unended) == len(self.run.nodes):
            self.node_failed(UNFIT if client.code == UNREACHABLE else client.code)
        for node in unended:
            if client.code and len(unended) < len(self.run.nodes):
                if (code := read_code(str(self.file_of(node, "exit")))) is None:
                    self.node_lost(node)
                else:  # output of the login shell may have damaged its report
                    self.node_ended(node, code)
            self.nodes[node].become(State.ENDED)

    def _unreported(self, node: str, client: Client) -> None:
        """Handle the end of a client that has not passed on the exit code of its supervisor."""
        code = client.code
        recorded = read_code(str(self.file_of(node, "exit")))
        exited = recorded is not None
        lost = code == UNREACHABLE or (code > 128 and not self._requested)
        runs_on = self.nodes[node].runs_on or (self.lease == 0 and self.file_of(node, "reserved").exists())
        if not exited and (lost or (self.transport.reports and runs_on)):
            if self.transport.reports and client.process.returncode < 0:
                self.console.record(f"{node}: the launcher's client (process {client.process.pid}) was killed")
            if runs_on and not self.signal and not self.is_ending:
                self._reconnect(node)
            else:
                if self.transport.reports and not self.signal and not self.is_ending:
                    self._record_connection(node, client)
                self.node_lost(node, UNFIT if code == UNREACHABLE else code)
            return
        if not exited and (code in NOT_STARTED or (code == UNFIT and self._login_shell_failed(node))):
            self.nodes[node].unstarted = code
        self.node_ended(node, code if recorded is None else recorded)

    def _record_connection(self, node: str, client: Client) -> None:
        """Record for the verdict how the connection was lost, because the node's own record may only say "stopped"."""
        code = client.process.returncode
        if code < 0:
            name = signals.name(-code)
            message = f"its ssh client on the launching side (process {client.process.pid}) was killed by {name}"
        else:
            message = f"ssh on the launching side exited with code {code}"
        path = self.attempt_directory / "errors" / f"connection_{node}.json"
        with contextlib.suppress(OSError):
            write_json(path, {"message": message, "time": time.time()})

    def _reconnect(self, node: str) -> None:
        """Follow a node again whose command continues without a connection. If the run ends first, the node is lost."""
        known, attempt = self.nodes[node], self.attempts
        if known.state is not State.DISCONNECTED:
            self.console.record(f"{node}: connection to its supervisor lost; it runs on, connecting again")
        known.become(State.DISCONNECTED)

        def connect() -> None:
            if attempt != self.attempts or known.state is not State.DISCONNECTED:
                return
            if self.signal or self.is_ending:
                self.node_lost(node)
            else:
                self.follow(self._node(node))

        self.loop.call_later(RECONNECT_INTERVAL, connect)

    def follow(self, node: RunNode, *options: str) -> None:
        """Start the client of a node whose command runs already. options: of follow.py."""
        self.nodes[node.node].runs_on = True
        command = [*self.supervisor_command(), "--name", node.node, *options]
        self.start_client(node.node, self.transport.commands.command(node, command, self.options.cwd), sent=b"")

    def _login_shell_failed(self, node: str) -> bool:
        with contextlib.suppress(OSError):
            return f"{node}: {LOGIN_SHELL}" in read_text(self.file_of(node, "log"))
        return False

    def node_ended(self, node: str, code: int) -> None:
        self.nodes[node].become(State.ENDED)
        self.node_failed(code)

    def node_failed(self, code: int) -> None:
        """Stop the other nodes at the first failure, and keep its code as the status.

        If that code is TERMINATED, a later code replaces it, because the later failure may have caused the SIGTERM.
        """
        if code and self.status in (0, TERMINATED):
            self.status = code
            if not self._requested:
                stays = self.agents_stay and code != STOPPED
                self._schedule(CHECKPOINT_GRACE if code == STOPPED else 0.0, "fail" if stays else "stop")

    def node_lost(self, node: str, code: int = UNFIT) -> None:
        """Count the node as failed with this code, and run `sweep` there, which waits until its command has stopped.

        If that fails, mark the node as lost.
        """
        if not self.nodes[node].is_unended:
            return
        self.node_ended(node, code)
        if self.is_lost(node):
            return
        self.console.record(f"{node}: connection to its supervisor lost; stopping the run")
        grace = self.options.grace

        def replied(reply: Reply) -> None:
            if reply.code:
                self.mark_lost(node)
            else:
                self.sweep(node, grace)

        if self.replaces:  # if it does not reply, another node can replace it at once
            self._call_supervisor(self._node(node), "status", replied, REPLY_TIMEOUT)
        else:
            self.sweep(node, grace)

    def sweep(self, node: str, grace: int) -> None:
        """End all processes of the run on a node. If that fails, mark the node as lost."""

        def swept(reply: Reply) -> None:
            if not reply.code:
                return
            end = f"may run on; scripts/stop.sh {self.directory.name} stops them"
            if self.lease:
                end = f"exit after {self.lease} s without heartbeats"
            self.console.record(f"{node}: does not reply; its processes {end}")
            self.mark_lost(node)

        self._call_supervisor(self._node(node), "sweep", swept, grace + STOP_TIMEOUT, "--grace", str(grace))

    def _node(self, name: str) -> RunNode:
        return next(node for node in self.run.nodes if node.node == name)

    def _call_supervisor(
        self, node: RunNode, verb: str, then: Callable[[Reply], None], timeout: float, *options: str
    ) -> Client:
        call = [*self.supervisor, verb, "--dir", str(self.directory), "--name", node.node, *options]
        command = self.transport.commands.command(node, call, self.options.cwd)
        return self.calls.call(node.node, command, then, timeout=timeout)

    def _await_return(self, node: RunNode) -> None:
        """When a lost node replies again, end its processes, and start it as a spare node."""
        if not self.transport.clients_are_nodes:  # the client of all nodes cannot start another one
            return

        def ended(reply: Reply) -> None:
            self._returning &= self.calls.running
            if is_used():
                return
            if reply.code or not self.unended or self.is_ending or node.node in self.running:
                self._await_return(node)
            elif not self.signal:
                self.spares.append(node)
                self.nodes[node.node] = NodeState()
                self.transport.start_node(self, node)

        def is_used() -> bool:
            """Whether the node is a spare node already, or was kept because no other node was available."""
            return node.node in {one.node for one in [*self.run.nodes, *self.spares]} & self.running.keys()

        def call() -> None:
            if is_used():
                return
            self._returning.add(self._call_supervisor(node, "sweep", ended, RETURN_INTERVAL))

        self.loop.call_later(RETURN_INTERVAL, call)

    def is_lost(self, node: str) -> bool:
        return self.file_of(node, "lost").exists()

    def mark_lost(self, node: str, reason: str = CONNECTION_LOST) -> None:
        """Record for the verdict that a node does not reply."""
        self.notify_lost(node, reason)
        if self.replaces:
            self._await_return(self._node(node))
        path, text = self.file_of(node, "lost"), reason.removeprefix(CONNECTION_LOST)
        with contextlib.suppress(OSError), open(path, "w", opener=regular_file) as file:
            file.write(text)

    def notify_lost(self, node: str, reason: str) -> None:
        self.nodes[node].become(State.LOST)
        self.nodes[node].lost = reason
        self.notifier.send("lost node", f"{node} is lost: {reason}", host=node)

    # ---- one attempt

    def attempt(self, start: Callable[[Watch], None] | None = None) -> int:
        """Start the nodes, and wait until all have ended. Returns the exit code of the first node that failed.

        start: called instead of transport.start(), for nodes that run already.
        """
        keeps_clients = self.transport.clients_are_nodes or self.waiting >= {node.node for node in self.run.nodes}
        if self.running and not keeps_clients:
            spares = list(self.spares)
            self.end_agents()
            self.spares = spares
        for client in self._returning & self.calls.running:  # the call could stop a node that is started now
            client.kill()
        self._begin_attempt()
        (start or self.transport.start)(self)
        if self.signal:  # received before a node was started
            self._request("stop")
        if self.lease and not self._heartbeats:
            self._heartbeats = threading.Thread(target=self._send_heartbeats, args=(self.lease / 4,), daemon=True)
            self._heartbeats.start()
        self._wait_for_clients()
        self.attempts += 1
        self._escalation += 1
        self._record_unstarted()
        return self.status

    def wait_for_spares(self) -> None:
        """Wait until all spare nodes are ready, START_TIMEOUT has passed, or a stop is requested."""
        limit = self.loop.clock.now() + START_TIMEOUT
        while {node.node for node in self.spares} - self.waiting and self.loop.clock.now() < limit and not self.signal:
            self.loop.wait(self.loop.clock.until(limit))

    def end_agents(self) -> None:
        """Let agents that wait for another attempt exit, and wait until the clients of all nodes have exited."""
        if self.waiting or self.spares:
            self._request("end")
            self._schedule(STOP_TIMEOUT, "kill")
            for node in self.waiting:
                self.nodes[node].become(State.ENDED)
            self.spares.clear()
            self._wait_for_clients()

    def _wait_for_clients(self) -> None:
        """Wait until the clients of all nodes have exited, or their agents wait for the next attempt."""
        paused = False
        while self.clients_of_attempt() or self.calls.running or self._disconnected() or self.console.pending:
            for stream in self.console.pending:
                self.loop.on_writable(stream.number, partial(self._flush, stream))
            if self.console.is_slow != paused:
                paused = not paused
                for client in self.running.values():
                    client.pause_output(paused)
            self.loop.wait()
            if not self.clients_of_attempt():  # the replies to a query are not needed any more
                for client in (self.queries | self._returning) & self.calls.running:
                    client.kill()

    def _disconnected(self) -> list[NodeState]:
        return [known for known in self.nodes.values() if known.state is State.DISCONNECTED]

    def is_for_all(self, request: str) -> bool:
        """Whether a request is also for spare nodes, and nodes that wait for the next attempt."""
        return request in ("stop", "end") or bool(self.signal)

    def clients_of_attempt(self) -> set[str]:
        """The clients of nodes whose attempt has not ended."""
        if self.transport.clients_are_nodes or self.unended or not self.waiting:
            return self.running.keys() - self.waiting - {node.node for node in self.spares}
        return set()

    def _flush(self, stream: ConsoleStream) -> None:
        stream.flush()
        if not stream.pending:
            self.loop.forget(stream.number)

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

    # ---- requests

    def _request(self, request: str) -> None:
        self.transport.request(self, request)

    def _schedule(self, seconds: float, request: str) -> None:
        """Send a request later: fail, stop, kill or abandon. It replaces the request that was scheduled before."""
        self._escalation += 1
        self._requested = True
        self.loop.call_later(seconds, partial(self._escalate, self._escalation, request))

    def _escalate(self, number: int, request: str) -> None:
        if number != self._escalation:
            return
        if request == "abandon":
            self.transport.abandon(self)
            return
        self._request(request)
        self._schedule(STOP_TIMEOUT, "abandon" if request == "kill" else "kill")

    def kill_clients(self) -> None:
        """Kill the clients of the attempt or, after a stop request, all clients. Do not wait for a blocked console."""
        for known in self._disconnected():
            known.become(State.RUNNING)
        names = self.running.keys() if self.signal else self.clients_of_attempt()
        for client in [*(self.running[name] for name in names), *self.calls.running]:
            client.kill()
        for stream in self.console.pending:
            stream.close()

    # ---- signals

    def _handle_signal(self, number: int) -> None:
        name = signals.name(number)
        if number == signal.SIGHUP and self.lease == 0 and not self.signal:
            self.console.record("HUP: exiting; the run continues without a launcher")
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if number not in STOPPING_SIGNALS:
            self.passed_signal = name
            message = f"{name}: sending it to the ranks, or stopping them if they have no handler for it"
            self.console.record(message)
            self._record_signal(name)
            self._request(f"signal {number}")
            return
        hangup = number in (signal.SIGHUP, signal.SIGQUIT)
        if self._stops_for_node:  # this is the first signal to this process
            self._stops_for_node = False
            self.signal, self._signal_time = number, time.monotonic()
            self.console.record(f"{name}: the run is stopping already; send the signal again to kill it at once")
            return
        if self.signal:
            # A terminal sends SIGHUP and SIGQUIT to its whole process group. A script in that group may forward the
            # signal, so this process receives it twice: the second one is no request to kill the run.
            if not hangup or time.monotonic() > self._signal_time + REPEATED:
                self._request("kill")
                self._schedule(STOP_TIMEOUT, "abandon")
            return
        if number == signal.SIGHUP:
            self.console.leave_terminal()
        if hangup:
            self._record_signal(name)
        short, grace = name.removeprefix("SIG"), self.options.grace
        self._stop(number)
        self.console.record(f"{short}: stopping; up to {grace} s to write a checkpoint, {short} again to kill at once")

    def stop_after_signal(self, number: int, node: str) -> None:
        """Stop all nodes, because the supervisor or agent of a node has received a signal, and stops its ranks.

        While an attempt ends, the signal may be that of a request for which a full disk had no space.
        """
        known = self.nodes.get(node, NodeState())
        known.signaled = known.signaled or time.time()
        if not self.signal and not self.is_ending and any(one.node == node for one in self.run.nodes):
            self._stops_for_node = True
            self._stop(number)
            limit = f"up to {self.options.grace} s to write a checkpoint"
            self.console.record(f"{node}: received {signals.name(number)}; stopping the run; {limit}")

    def _stop(self, number: int) -> None:
        """Stop the run because of a signal."""
        self.signal, self._signal_time = number, time.monotonic()
        if not self.status:
            self.stopped_at = time.time()
        self._request("stop")
        self._schedule(self.options.grace + STOP_TIMEOUT, "abandon")  # supervisors send SIGKILL after the grace period

    def _record_signal(self, name: str) -> None:
        """Record a signal for the verdict."""
        facts = {"signal": name, "sender": "to the launcher", "time": time.time()}
        with contextlib.suppress(OSError):
            write_json(self.attempt_directory / "errors" / f"signal_launcher_{name}.json", facts)

    @property
    def is_ending(self) -> bool:
        return bool(self.status or self._requested)

    def stop_hung_run(self, record: dict[str, Any]) -> None:
        """Stop a run that hangs. record: the content of hang.json."""
        with contextlib.suppress(OSError):
            write_json(self.attempt_directory / "hang.json", record)
        self.status = TIMED_OUT
        self.console.record("the run hangs; stopping it")
        self._schedule(0.0, "fail" if self.agents_stay else "stop")
