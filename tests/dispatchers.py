"""Run the dispatchers run_distributed_training.py and run_two_phase_training.py, and kill them at a given record.

Each call runs in a process that is forked from one that has imported both programs. The code that kills a dispatcher
when it commits a given record of its journal is only here, not in the product.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

KIT = Path(__file__).resolve().parent.parent
MOMENTS = ("before", "during", "after")  # when a dispatcher is killed, relative to the commit of a record


@dataclass(frozen=True)
class DispatcherCall:
    """One call of a dispatcher. kill: one of MOMENTS, and the number (from 1) of the record at which it is killed."""

    directory: Path
    arguments: tuple[str, ...]
    kill: tuple[str, int] | None = None
    env: dict[str, str] = field(default_factory=dict)
    two_phase: bool = False  # calls run_two_phase_training.py instead of run_distributed_training.py

    @property
    def printed(self) -> str:
        """Standard output and standard error of all calls in this directory."""
        path = self.directory / "printed"
        return path.read_text() if path.exists() else ""


class Dispatchers:
    """The process from which dispatchers are forked."""

    def __init__(self) -> None:
        arguments = [sys.executable, str(Path(__file__).resolve())]
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, call: DispatcherCall) -> int:
        """Return the exit code of a call; -9 if it was killed."""
        return self.run_all([[call]])[0][0]

    def run_all(self, chains: Sequence[Sequence[DispatcherCall]]) -> list[list[int]]:
        """Return the exit codes of calls. Chains run concurrently, the calls of a chain one after the other."""
        assert self._process.stdin and self._process.stdout
        message = [[asdict(call) | {"directory": str(call.directory)} for call in chain] for chain in chains]
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return list(json.loads(self._process.stdout.readline()))

    def end(self) -> None:
        """Wait for all calls, and end the process."""
        self._process.communicate()


@contextlib.contextmanager
def dispatchers() -> Iterator[Dispatchers]:
    """Start the process from which dispatchers are forked; end it on exit."""
    server = Dispatchers()
    try:
        yield server
    finally:
        server.end()


# ---------------------------------------------------------------- the forking process


def main() -> None:
    sys.path[0] = str(KIT)
    from distributed.jobs import commands, two_phase

    for line in sys.stdin:
        running = [fork_chain([commands.main, two_phase.main], chain) for chain in json.loads(line)]
        codes = [[int(code) for code in file.read().split()] for file in running]
        sys.stdout.write(json.dumps(codes) + "\n")
        sys.stdout.flush()
        with contextlib.suppress(ChildProcessError):
            while os.wait():
                pass


def fork_chain(programs: Sequence[Any], chain: list[dict[str, Any]]) -> IO[str]:
    """Run a chain of calls in a forked process. Returns a file that contains their exit codes, in this order."""
    source, target = os.pipe()
    if os.fork() == 0:
        for call in chain:
            status = os.waitpid(fork(programs[call["two_phase"]], call), 0)[1]
            os.write(target, f"{os.waitstatus_to_exitcode(status)} ".encode())
        os._exit(0)
    os.close(target)
    return open(source)


def fork(program: Any, call: dict[str, Any]) -> int:
    """Make a call in a forked process. Returns the id of the forked process."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.chdir(call["directory"])
        os.environ.update(call["env"])
        for number, (path, flags) in enumerate([("/dev/null", os.O_RDONLY), ("printed", os.O_WRONLY | os.O_CREAT)]):
            os.dup2(os.open(path, flags | os.O_APPEND), number)
        os.dup2(1, 2)
        if call["kill"]:
            kill_at(*call["kill"])
        code = program(call["arguments"])
        sys.stdout.flush()
    finally:
        os._exit(code)


def kill_at(moment: str, number: int) -> None:
    """Make the dispatcher in this process kill itself before, during or after the commit of the record `number`."""
    from distributed.jobs.journal import journal

    commit, committed = journal.Journal.commit, 0

    def commit_and_kill(book: journal.Journal) -> None:
        nonlocal committed
        pending = list(book._pending)
        kill = committed < number <= committed + len(pending)
        if kill and moment == "during":
            encoded = [journal.encode(record) for record in pending[: number - committed]]
            os.write(book._file, b"".join(encoded)[: -len(encoded[-1]) // 2])
        if kill and moment != "after":
            os.kill(os.getpid(), signal.SIGKILL)
        commit(book)
        committed += len(pending)
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(journal.Journal, "commit", commit_and_kill)  # noqa: B010 (mypy rejects an assignment)


if __name__ == "__main__":
    main()
