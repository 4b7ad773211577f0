"""What nodes need to start an attempt: a command line and an environment, or a request if their agents wait."""

from __future__ import annotations

import json
import os
import shutil

from distributed.launch.node_reports import REPORT_TOKEN
from distributed.launch.shown_ranks import choice
from distributed.transport.commands import LIB, PLAIN_PYTHON, environment_block

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distributed.launch.watched_run import WatchedRun


class NodeStart:
    """What the nodes get for the present attempt of a run."""

    def __init__(self, run: WatchedRun) -> None:
        self._run = run

    @property
    def supervisor(self) -> list[str]:
        return [self._run.options.python, *PLAIN_PYTHON, f"{LIB}/module.py", "launch.supervisor"]

    def supervisor_command(self) -> list[str]:
        """The supervisor's command line for an attempt, without the node's name and without the agent's command."""
        run = self._run
        program = [*self.supervisor[:-1], "launch.follow"] if run.lease == 0 else [*self.supervisor, "run"]
        command = [*program, "--dir", str(run.directory), "--attempt", str(run.restart_count + 1)]
        command += ["--grace", str(run.options.grace)]
        command += ["--console-rank", self.console_rank]
        if run.terminals:
            command += ["--terminals", run.terminals]
        if run.transport.reports or run.agents_stay:
            command.append("--report")
        if run.agents_stay:
            command.append("--restarts")
        if run.lease:
            command += ["--lease", str(run.lease)]
        return [*command, "--source", run.options.node_env, "--sample-usage"]

    @property
    def _counts(self) -> dict[str, str]:
        # distributed/agent/attempt.py passes these to the ranks.
        counts = {
            "TORCHELASTIC_MAX_RESTARTS": self._run.max_restarts,
            "TORCHELASTIC_RESTART_COUNT": self._run.restart_count,
        }
        return {name: str(value) for name, value in counts.items()}

    @property
    def console_rank(self) -> str:
        """Whose output is shown in the attempt; see class ShownRanks."""
        return choice(self._run.options.console_rank, self._run.run.nodes[-1])

    @property
    def _names_nodes(self) -> bool:
        """Whether the agents get the names of the nodes from this launcher."""
        return bool(self._run.options.agent.nodes) or self._run.replaces

    def entries(self) -> list[bytes]:
        """NAME=VALUE of --env and of the launcher for the ranks."""
        run = self._run
        variables = self._counts | {"MUSTER_PROGRESS": run.options.progress}
        if self._names_nodes:
            variables["MUSTER_NODES"] = " ".join(node.node for node in run.run.nodes)
        if len(run.terminals) == 2 and os.environ.get("TERM") != "dumb":  # for rich and tqdm; see agent.worker
            rank = "0" if self.console_rank.startswith("auto") else self.console_rank
            size = "COLUMNS={0} LINES={1} TQDM_NCOLS={0}".format(*shutil.get_terminal_size())
            variables["MUSTER_TERMINAL"] = f"{rank} {size} TTY_COMPATIBLE=1 TTY_INTERACTIVE=1"
        return [*run.options.environment, *(f"{name}={value}".encode() for name, value in variables.items())]

    def next_attempt(self) -> bytes:
        """The request that makes a waiting agent start the next attempt."""
        agent = self._run.options.agent
        facts = {
            "attempt": str(self._run.restart_count + 1),
            "environment": self._counts,
            "processes": {node.node: node.processes for node in self._run.run.nodes} if self._names_nodes else {},
            "console_rank": self.console_rank,
            "address": agent.address,
            "port": int(agent.port or 0),
        }
        return f"attempt {json.dumps(facts)}\n".encode()

    def environment_block(self, node: str = "") -> bytes:
        """The environment of a node's command, for its supervisor. node: needed if the nodes have tokens."""
        token = self._run.nodes[node].token if node else ""
        tokens = [f"{REPORT_TOKEN}={token}".encode()] if token else []
        return environment_block([*self._run.options.inherited, *tokens], self.entries())
