"""Follow a run that continues without its launcher (--lease 0), as if this launcher had started it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from distributed import attempts
from distributed.exit_codes import UNFIT, WRONG_CALL
from distributed.files import read_json, try_lock
from distributed.launch.run import Launch, execute, masked
from distributed.runs import lookup
from distributed.transport.commands import LIB, PLAIN_PYTHON, Calls, TransportError, quote
from distributed.trust import checked, lock_file, parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distributed.launch.watch import Watch
    from distributed.transport.commands import LocalCommands


class AttachedLaunch(Launch):
    """Takes over a run instead of creating one, and follows its nodes instead of starting them."""

    def check_nodes(self, commands: LocalCommands) -> tuple[str, str]:
        """Check that this call may take over the run. Returns the master address and port. Exits if it may not."""
        try:
            found = lookup.find(self.options.attach, Path(self.options.cwd), Path(self.logs))
            lookup.read(found)
            self._lock = lock_file(found / "attach.lock", os.O_RDWR | os.O_CREAT, found)  # keeps the lock until exit
            has_lock = try_lock(self._lock)
            run, facts = lookup.read(found), read_json(found / "run.json")
        except lookup.RunLookupError as error:
            self._refuse(str(error))
        if facts.get("lease") != 0:
            self._refuse("the run has a lease, so its processes end with its launcher; start it again")
        if (found / "verdict.json").exists():
            self._refuse(f"the run has ended with a verdict; see {found}/verdict.json")
        if not attempts.numbers(found):
            self._refuse("a launcher of an older version of Muster has started it; watch it with status.sh")
        if run.launcher.state == lookup.REMOTE:
            self._refuse(f"its launcher is process {run.launcher.pid} on {run.launcher.host}; attach there")
        if run.launcher.state == lookup.RUNNING:
            self._refuse(f"its launcher, process {run.launcher.pid}, still runs")
        if not has_lock:  # the launcher that holds it has not recorded its process id yet
            self._refuse("another launcher has just attached to it")
        arguments = lookup.constant_arguments(masked(self.call))
        options = arguments[: arguments.index("--")] if "--" in arguments else arguments
        self._require_same("the arguments", quote(lookup.constant_arguments(run.command)), quote(arguments))
        names = (" ".join(node.address or node.node for node in nodes) for nodes in (run.nodes, self.targets))
        self._require_same("the nodes", *names)  # a file of --hostfile may have changed
        self._require_same("the working directory", run.cwd, self.options.cwd)
        self._require_same("the Python", run.python, self.options.python)
        if self.options.max_restarts and any(argument.startswith("--env") for argument in options):
            self._refuse("values of --env are not recorded, so a restart may lose them; watch it with status.sh")
        self._found = Path(run.directory_at_launch)  # not resolved: must equal MUSTER_RUN_DIR of its processes
        self._sizes = self._read_sizes(commands)
        return str(facts["address"]), str(facts["port"])

    def _require_same(self, subject: str, recorded: str, current: str) -> None:
        if recorded != current:
            self._refuse(f"the run was started with {subject} {recorded}; got {current}")

    def _refuse(self, reason: str) -> NoReturn:
        self.console.print(f"--attach '{self.options.attach}': {reason}", always=True)
        sys.exit(WRONG_CALL)

    def create_run(self) -> Path:
        return self._found

    def run_attempts(self, restarts: int = 0, start: Callable[[Watch], None] | None = None) -> None:
        """Follow the attempt that runs, then continue as for any run."""

        def follow(watch: Watch) -> None:
            for node in watch.run.nodes:
                watch.follow(node, "--offset", str(self._sizes[node.node]))

        self.console.record("attached to the run")
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
