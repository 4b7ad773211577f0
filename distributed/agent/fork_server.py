"""A server that forks processes with PyTorch already imported, and ForkedProcess, the agent's handle of each.

The agent imports PyTorch, which takes seconds, and forks the server while the agent has a single thread: a fork of a
process with threads can inherit a lock that is never released. For each request the server forks a starter, which forks
the processes and exits. The processes become children of the agent, which is their subreaper: the agent reaps them, as
under torchrun, and they do not depend on the server. Standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from distributed.host.process_scan import adopt_orphans, die_with_parent

ALL_SIGNALS = signal.valid_signals()


class ForkServerError(Exception):
    """The fork server cannot start processes."""


class ForkedProcess:
    """A child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None  # -n for signal n; found by reap()

    def reap(self) -> int | None:
        """The exit code, or None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def signal(self, number: int) -> None:
        """Send a signal to the process group, or to the process alone if it does not lead its own group yet."""
        if self.reap() is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                os.kill(self.pid, number)


class Wakeup:
    """Wakes the main thread when a child exits or has recorded its failure, or a signal with a handler arrives."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        for end in (self._read, write):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.siginterrupt(signal.SIGCHLD, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def wait(self, seconds: float) -> bool:
        """Wait at most this long for a wakeup; return whether there was one. A wakeup since the last call counts."""
        return bool(select.select([self._read], [], [], seconds)[0] and os.read(self._read, 4096))


class ForkServer:
    """Forks, on request, copies of this process as it was when ForkServer was created, and calls `run` in each.

    Must be created while this process has a single thread.
    """

    def __init__(self, run: Callable[[Any], None]) -> None:
        self._channel, child_end = Pipe()
        self._returncode: int | None = None
        agent = os.getpid()
        gc.freeze()  # later collections skip existing objects, whose pages then stay shared
        with signals_blocked() as mask:
            self.pid = os.fork()
            if self.pid == 0:
                self._channel.close()
                _serve(child_end, run, agent, mask)
        child_end.close()
        self.wakeup = Wakeup()

    def fork(self, tasks: Sequence[Any]) -> list[ForkedProcess]:
        """Start one process for each task. If one cannot be started, kill the others and raise ForkServerError."""
        adopt_orphans()
        try:
            self._channel.send(tasks)
            pids, error = self._channel.recv()
        except (OSError, EOFError):
            raise ForkServerError(self._wait_for_exit()) from None
        finally:
            adopt_orphans(False)
        processes = [ForkedProcess(pid) for pid in pids]
        if error:
            for process in processes:
                process.signal(signal.SIGKILL)
            count = f"{len(tasks)} process{'es' * (len(tasks) != 1)}"
            raise ForkServerError(f"fork server (pid {self.pid}): cannot fork {count}: {error}")
        return processes

    def is_running(self) -> bool:
        """Whether the server can fork."""
        if self._returncode is None and (status := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._returncode = os.waitstatus_to_exitcode(status[1])
        return self._returncode is None

    def close(self) -> None:
        """Kill the server, which would not exit by itself if it is stopped (SIGSTOP). Forked processes continue."""
        self._channel.close()
        if self._returncode is None:
            os.kill(self.pid, signal.SIGKILL)
            self._wait_for_exit()

    def _wait_for_exit(self) -> str:
        """Wait until the server has exited. Returns how it ended."""
        if self._returncode is None:
            self._returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self._returncode < 0:
            return f"fork server (pid {self.pid}) was killed by signal {-self._returncode}"
        return f"fork server (pid {self.pid}) ended with exit code {self._returncode}"


@contextlib.contextmanager
def signals_blocked() -> Iterator[set[int]]:
    """Block all signals until the end of the block. Yields the previously blocked signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        # This call is inside `try`, because it runs the Python handlers of pending signals, and a handler may raise.
        signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)
        yield {int(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---------------------------------------------------------------- in the server


def _serve(channel: Connection, run: Callable[[Any], None], agent: int, mask: set[int]) -> NoReturn:
    """Reply to each list of tasks with (process ids, error) until the agent closes the channel."""
    die_with_parent(agent, signal.SIGKILL)
    # Close files that the agent inherited, as subprocess does for the ranks of torchrun.
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # listdir has closed its own descriptor
            if number > 2 and number != channel.fileno() and os.get_inheritable(number):
                os.close(number)
    with contextlib.suppress(OSError, EOFError):
        while True:
            channel.send(_start(channel.recv(), channel, run, agent, mask))
    os._exit(0)


def _start(
    tasks: Sequence[Any], channel: Connection, run: Callable[[Any], None], agent: int, mask: set[int]
) -> tuple[list[int], str]:
    """Fork the starter, which forks the processes. When the starter has exited, they are children of the agent."""
    reader, writer = Pipe(duplex=False)
    try:
        starter = os.fork()
    except OSError as error:
        return [], str(error)
    if starter == 0:
        pids: list[int] = []
        failure = ""
        try:
            for task in tasks:
                pid = os.fork()
                if pid == 0:
                    for end in (channel, reader, writer):
                        end.close()
                    _run_task(task, run, agent, mask)
                pids.append(pid)
        except OSError as error:
            failure = str(error)
        writer.send((pids, failure))
        os._exit(0)
    writer.close()
    with reader:
        try:
            reply: tuple[list[int], str] = reader.recv()
        except EOFError:
            reply = [], "its starter process was killed"
    os.waitpid(starter, 0)
    return reply


def _run_task(task: Any, run: Callable[[Any], None], agent: int, mask: set[int]) -> NoReturn:
    """In a forked process: start a session, arrange for SIGTERM when the agent dies, then call `run`."""
    try:
        starter = os.getppid()
        os.setsid()
        while starter != agent and os.getppid() == starter:
            time.sleep(0.001)
        die_with_parent(agent, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        run(task)
    except BaseException:  # noqa: BLE001 (an exception must not unwind into the server's frames)
        traceback.print_exc()
    finally:
        os._exit(1)
