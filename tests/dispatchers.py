"""Calls of run_distributed_training.py and run_two_phase_training.py, each in a process of its own, and killed where a
test wants.

They are forked from a process that has imported it once. Only here, and not in the product, is known how a dispatcher
can be killed at a certain record of its journal.
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
MOMENTS = ("before", "during", "after")  # the commit of a record


@dataclass(frozen=True)
class Call:
    """One call. kill: the moment and the number of the record, from 1, at which it is killed."""

    directory: Path
    words: tuple[str, ...]
    kill: tuple[str, int] | None = None
    env: dict[str, str] = field(default_factory=dict)
    two_phase: bool = False  # the program

    @property
    def printed(self) -> str:
        """On standard output and standard error, by all calls in this directory."""
        path = self.directory / "printed"
        return path.read_text() if path.exists() else ""


class Dispatchers:
    """The process from which they are forked."""

    def __init__(self) -> None:
        words = [sys.executable, str(Path(__file__).resolve())]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, call: Call) -> int:
        """Its exit code; -9 when it was killed."""
        return self.run_all([[call]])[0][0]

    def run_all(self, chains: Sequence[Sequence[Call]]) -> list[list[int]]:
        """The exit codes of calls: those of a chain one after the other, all chains at once."""
        assert self._process.stdin and self._process.stdout
        said = [[asdict(call) | {"directory": str(call.directory)} for call in chain] for chain in chains]
        self._process.stdin.write(json.dumps(said) + "\n")
        self._process.stdin.flush()
        return list(json.loads(self._process.stdout.readline()))

    def end(self) -> None:
        """Every call has ended."""
        self._process.communicate()


@contextlib.contextmanager
def dispatchers() -> Iterator[Dispatchers]:
    """For a fixture."""
    server = Dispatchers()
    try:
        yield server
    finally:
        server.end()


# ---------------------------------------------------------------- in the process


def main() -> None:
    sys.path[0] = str(KIT)
    from distributed.jobs import commands, two_phase

    for line in sys.stdin:
        running = [fork_chain([commands.main, two_phase.main], chain) for chain in json.loads(line)]
        codes = [[int(word) for word in file.read().split()] for file in running]
        sys.stdout.write(json.dumps(codes) + "\n")
        sys.stdout.flush()
        with contextlib.suppress(ChildProcessError):
            while os.wait():
                pass


def fork_chain(programs: Sequence[Any], chain: list[dict[str, Any]]) -> IO[str]:
    """What it prints are exit codes."""
    source, target = os.pipe()
    if os.fork() == 0:
        for call in chain:
            status = os.waitpid(fork(programs[call["two_phase"]], call), 0)[1]
            os.write(target, f"{os.waitstatus_to_exitcode(status)} ".encode())
        os._exit(0)
    os.close(target)
    return open(source)


def fork(program: Any, call: dict[str, Any]) -> int:
    """The id of a process that makes this call."""
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
        code = program(call["words"])
        sys.stdout.flush()
    finally:
        os._exit(code)


def kill_at(moment: str, number: int) -> None:
    """Let the dispatcher of this process kill itself at a record."""
    from distributed.jobs import journal

    commit, committed = journal.Journal.commit, 0

    def commit_and_die(book: journal.Journal) -> None:
        nonlocal committed
        pending = list(book._pending)
        now = committed < number <= committed + len(pending)
        if now and moment == "during":
            before = [journal.line(record) for record in pending[: number - committed]]
            os.write(book._file, b"".join(before)[: -len(before[-1]) // 2])
        if now and moment != "after":
            os.kill(os.getpid(), signal.SIGKILL)
        commit(book)
        committed += len(pending)
        if now:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(journal.Journal, "commit", commit_and_die)  # noqa: B010 (mypy takes it for no method)


if __name__ == "__main__":
    main()
