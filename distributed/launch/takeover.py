"""Follow a run that continues without its launcher (--lease 0), as if this launcher had started it.

The environment variable MUSTER_ATTACH is its run directory. launch.attach calls the program that has started the run,
which replaces itself by this program instead of launch.run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from distributed.exit_codes import UNFIT, WRONG_CALL
from distributed.files import read_json, try_lock
from distributed.launch.run import Launch, execute
from distributed.runs import lookup
from distributed.transport.commands import LIB, PLAIN_PYTHON, Calls, TransportError
from distributed.trust import checked, lock_file, parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distributed.launch.watch import Watch
    from distributed.transport.commands import LocalCommands


class AttachedLaunch(Launch):
    """Takes over a run instead of creating one, and follows its nodes instead of starting them."""

    def check_nodes(self, commands: LocalCommands) -> tuple[str, str]:
        """Check that this launcher may take over the run. Returns the master address and port. Exits if it may not."""
        found = Path(os.environ["MUSTER_ATTACH"])
        try:
            lookup.read(found)
            self._lock = lock_file(found / "attach.lock", os.O_RDWR | os.O_CREAT, found)  # keeps the lock until exit
            has_lock = try_lock(self._lock)
            run, facts = lookup.read(found), read_json(found / "run.json")
        except lookup.RunLookupError as error:
            self._refuse(str(error))
        # One that has the lock may not be recorded yet; one that has ended may have attached since the caller looked.
        if run.launcher.state == lookup.RUNNING or not has_lock or (found / "verdict.json").exists():
            self._refuse("another launcher has just attached to it")
        nodes, targets = (" ".join(node.address or node.node for node in some) for some in (run.nodes, self.targets))
        if nodes != targets:  # a file of --hostfile may have changed
            self._refuse(f"the run was started with the nodes {nodes}; got {targets}")
        if self.options.max_restarts and any(name.startswith("--env") for name, *_ in self.call.options):
            self._refuse("values of --env are not recorded, so a restart may lose them; watch it with status.sh")
        self._found = Path(run.directory_at_launch)  # not resolved: must equal MUSTER_RUN_DIR of its processes
        self._sizes = self._read_sizes(commands)
        return str(facts["address"]), str(facts["port"])

    def _refuse(self, reason: str) -> NoReturn:
        self.console.print(f"RUN '{os.environ['MUSTER_ATTACH']}': {reason}", always=True)
        sys.exit(WRONG_CALL)

    def create_run(self) -> Path:
        return self._found

    def run_attempts(self, restarts: int = 0, start: Callable[[Watch], None] | None = None) -> None:
        """Follow the attempt that runs, then continue as for any run."""

        def follow(watch: Watch) -> None:
            for node in watch.run.nodes:
                watch.follow(node, "--offset", str(self._sizes[node.node]))

        self.console.record("attached to the run; Ctrl-C stops it")
        super().run_attempts(self.watch.restart_count, start or follow)

    def _read_sizes(self, commands: LocalCommands) -> dict[str, int]:
        """The size of each node's log, in bytes. Raises TransportError if a node is unreachable; the run continues."""
        module = [self.options.python, *PLAIN_PYTHON, f"{LIB}/module.py", "launch.supervisor", "status"]
        calls = {}
        for node in self.targets:
            status = [*module, "--dir", str(self._found), "--name", node.node]
            calls[node] = commands.command(node, status, self.options.cwd)
        sizes = {}
        for name, reply in Calls().call_all(calls, self.console.print).items():
            if reply.code:
                raise TransportError(UNFIT, f"{name}: cannot attach: {reply.failure_message()}")
            try:
                status = checked(dict[str, object], parse_json((reply.out.splitlines() or [""])[-1]))
                sizes[name] = checked(range(1 << 60), status.get("log_bytes", 0))
            except ValueError as error:
                raise TransportError(UNFIT, f"{name}: cannot attach: invalid reply ({error})") from None
        return sizes


def main(arguments: Sequence[str]) -> int:
    """See run.main()."""
    return execute(AttachedLaunch, arguments)
