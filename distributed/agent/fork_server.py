"""A server that forks processes from a warm one, and the processes that it has forked.

The agent imports PyTorch, which takes seconds, and forks the server while it has a single thread: a fork of a process
with threads can inherit a lock that is never released. The server forks a starter, the starter forks the processes and
exits. They become children of the agent, which is their subreaper: as under torchrun, it reaps them itself, and they
do not depend on the server. Standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn

from distributed.host.process_scan import adopt_orphans, die_with_parent

ALL_SIGNALS = signal.valid_signals()


class ForkServerError(Exception):
    """The fork server cannot start processes."""


class Signals:
    """Handlers that are called between the steps of the main thread, not within them.

    To block the signals would not do: where there are other threads, the kernel gives the signal to one of them, and
    Python calls the handler in the main thread all the same.
    """

    def __init__(self) -> None:
        self._holds = 0
        self._waiting: Callable[[], object] | None = None

    def defer(self, numbers: Iterable[int]) -> None:
        """Let the handlers of these signals wait while one is held(). SIG_DFL and SIG_IGN stay."""
        for number in numbers:
            handler = signal.getsignal(number)
            if callable(handler) and not (isinstance(handler, partial) and handler.func == self._call):
                signal.signal(number, partial(self._call, handler))

    def _call(self, handler: Callable[[int, FrameType | None], object], number: int, frame: FrameType | None) -> None:
        if self._holds:
            self._waiting = partial(handler, number, None)
        else:
            handler(number, frame)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Handlers wait until the block is left."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            if not self._holds:
                self.handle()

    def handle(self) -> None:
        """Call the handler of the newest signal that came while handlers were held."""
        waiting, self._waiting = self._waiting, None
        if waiting:
            waiting()


signals = Signals()  # of this process


class ForkedProcess:
    """A child of this process, with the methods of subprocess.Popen that torchrun calls."""

    def __init__(self, pid: int, wakeup: Wakeup) -> None:
        self.pid = pid
        self.returncode: int | None = None  # -n for signal n
        self._wakeup = wakeup

    def poll(self) -> int | None:
        """The exit code, if reap() has seen the end: torchrun learns of no end before the agent."""
        return self.returncode

    def reap(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.returncode is None:
            with signals.held():  # a handler that raises between these two lines would lose the exit code
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit code, once it has ended. Raises subprocess.TimeoutExpired after so many seconds."""
        end = time.monotonic() + timeout
        while (code := self.reap()) is None:
            if (left := end - time.monotonic()) <= 0:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self._wakeup.wait(left)
        return code

    def signal(self, number: int) -> None:
        """Send a signal to its process group, or to the process while it does not lead one yet."""
        if self.reap() is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                os.kill(self.pid, number)


class Wakeup:
    """Wakes this process when one of its children ends. For the main thread."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        for end in (self._read, write):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.siginterrupt(signal.SIGCHLD, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def wait(self, seconds: float) -> None:
        """Until a child has ended since the last call, but no longer than that. Another signal may end it, too."""
        if select.select([self._read], [], [], seconds)[0]:
            os.read(self._read, 4096)


class ForkServer:
    """Forks this process as it is now, later and as often as it is asked to. `run` is called in each new process.

    To be made before this process has threads of its own.
    """

    def __init__(self, run: Callable[[Any], None]) -> None:
        self._channel, child_end = Pipe()
        self._returncode: int | None = None
        agent = os.getpid()
        gc.freeze()  # no later collection visits what is here already, nor copies the memory that it lies in
        with signals_blocked() as mask:
            self.pid = os.fork()
            if self.pid == 0:
                self._channel.close()
                _serve(child_end, run, agent, mask)
        child_end.close()
        self.wakeup = Wakeup()

    def fork(self, tasks: Sequence[Any]) -> list[ForkedProcess]:
        """Start one process for each task, all or none. Raises ForkServerError."""
        adopt_orphans()
        try:
            self._channel.send(tasks)
            pids, error = self._channel.recv()
        except (OSError, EOFError):
            raise ForkServerError(self._end()) from None
        finally:
            adopt_orphans(False)
        processes = [ForkedProcess(pid, self.wakeup) for pid in pids]
        if error:
            for process in processes:
                process.signal(signal.SIGKILL)
            wanted = f"{len(tasks)} process{'es' * (len(tasks) != 1)}"
            raise ForkServerError(f"its fork server (pid {self.pid}) cannot start {wanted}: {error}")
        return processes

    def close(self) -> None:
        """End the server. Processes that it has started run on."""
        self._channel.close()
        self._end()

    def _end(self) -> str:
        """Wait for the server's end. Returns how it ended."""
        if self._returncode is None:
            self._returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self._returncode < 0:
            return f"its fork server (pid {self.pid}) was killed by signal {-self._returncode}"
        return f"its fork server (pid {self.pid}) ended with exit code {self._returncode}"


@contextlib.contextmanager
def signals_blocked() -> Iterator[set[int]]:
    """Signals wait until the block is left. Yields those that were blocked before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)  # calls the handlers of what came before: one may raise
        yield {int(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---------------------------------------------------------------- in the server


def _serve(channel: Connection, run: Callable[[Any], None], agent: int, mask: set[int]) -> NoReturn:
    """Answer each list of tasks with (process ids, error), until the agent has closed the channel."""
    die_with_parent(agent, signal.SIGKILL)
    _close_inherited(channel.fileno())
    with contextlib.suppress(OSError, EOFError):
        while True:
            channel.send(_start(channel.recv(), channel, run, agent, mask))
    os._exit(0)


def _close_inherited(kept: int) -> None:
    """Close files that the agent inherited: for the ranks of torchrun, subprocess does it."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one with which the directory was read
            if number > 2 and number != kept and os.get_inheritable(number):
                os.close(number)


def _start(
    tasks: Sequence[Any], channel: Connection, run: Callable[[Any], None], agent: int, mask: set[int]
) -> tuple[list[int], str]:
    """Fork the starter, which forks the processes. When it has exited they are the agent's children."""
    near_end, child_end = Pipe(duplex=False)
    try:
        starter = os.fork()
    except OSError as error:
        return [], str(error)
    if starter == 0:
        pids: list[int] = []
        refused = ""
        try:
            for task in tasks:
                pid = os.fork()
                if pid == 0:
                    for end in (channel, near_end, child_end):
                        end.close()
                    _run_task(task, run, agent, mask)
                pids.append(pid)
        except OSError as error:
            refused = str(error)
        child_end.send((pids, refused))
        os._exit(0)
    child_end.close()
    with near_end:
        try:
            answer: tuple[list[int], str] = near_end.recv()
        except EOFError:
            answer = [], "the process that was to start them was killed"
    os.waitpid(starter, 0)
    return answer


def _run_task(task: Any, run: Callable[[Any], None], agent: int, mask: set[int]) -> NoReturn:
    """In a new process: a session of its own; the agent's end becomes a request to stop; then `run`."""
    try:
        starter = os.getppid()
        os.setsid()
        while starter != agent and os.getppid() == starter:
            time.sleep(0.001)
        die_with_parent(agent, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        run(task)
    except BaseException:  # noqa: BLE001 (nothing may unwind into the server's frames)
        traceback.print_exc()
    finally:
        os._exit(1)
