"""A run that is watched: how its nodes are reached, and what is known of them."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from distributed.attempts import newest
from distributed.host import signals
from distributed.launch.node_states import Nodes, NodeState
from distributed.launch.notify import Notifier
from distributed.transport.commands import Calls
from distributed.transport.loop import Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed.launch.launcher_console import LauncherConsole
    from distributed.runs.lookup import Run, RunNode
    from distributed.transport.commands import LocalCommands
    from distributed.transport.loop import Client

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
    lease: int | None = None  # see WatchedRun.lease; None: that of the transport
    console_rank: str = "auto"  # --console-rank: a number, last or auto
    progress: str = ""  # --progress: a regular expression, off, or "" to guess


class Transport:
    """How the nodes of a run are reached. class Local in watch.py and its subclasses start them."""

    lease: int | None = None  # see WatchedRun.lease
    reports = False  # True: the supervisor reports its exit code, because ssh or pdsh may exit with another code
    clients_are_nodes = True  # each node has a client of its own
    starts_agents = True  # False: it starts ranks

    def __init__(self, commands: LocalCommands) -> None:
        """commands: run other programs on the nodes, such as status queries."""
        self.commands = commands

    def environment(self, inherited: dict[bytes, bytes]) -> dict[bytes, bytes]:
        """The environment of clients, from that of the launcher."""
        return inherited


class WatchedRun:
    """The state of a run that is watched. class Watch changes it."""

    def __init__(
        self,
        transport: Transport,
        options: Options,
        console: LauncherConsole,
        terminals: str,
        handle_signal: Callable[[int], None],
    ) -> None:
        """terminals: the streams that are terminals: "", "1", "2" or, if both are the same, "12"."""
        self.transport, self.options, self.console, self.terminals = transport, options, console, terminals
        self.loop = Loop(handle_signal, (*STOPPING_SIGNALS, *signals.PASSED_ON))
        self.calls = Calls(self.loop)
        self.notifier = Notifier("", console.append, "")
        self.restart_count, self.max_restarts = 0, 0
        self.running: dict[str, Client] = {}  # by node, or by the name of the client of all nodes
        self.nodes = Nodes()  # of the run, spare nodes, and lost nodes
        self.continues = False  # the agents of the last attempt start the next one
        self.replaces = False  # whether the run can continue after losing nodes: with spare nodes or with fewer nodes
        self.spares: list[RunNode] = []
        self.attempts = 0  # number of attempts that have ended

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

    @property
    def lease(self) -> int | None:
        """Seconds without a heartbeat after which a node stops its command.

        0: the command continues without this launcher. None: no heartbeats are sent; the node stops its command when
        the control channel is closed.
        """
        return self.transport.lease if self.options.lease is None else self.options.lease

    @property
    def agents_stay(self) -> bool:
        """Whether agents may stay for the next attempt."""
        return self.max_restarts > 0 and self.lease != 0 and self.transport.starts_agents

    def node(self, name: str) -> RunNode:
        return next(node for node in self.run.nodes if node.node == name)

    def is_spare(self, node: str) -> bool:
        return any(spare.node == node for spare in self.spares)
