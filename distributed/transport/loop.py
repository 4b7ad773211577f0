"""The event loop of a program that runs commands on nodes: files, timers, signals, and clients.

A client is a local process, for example ssh, that runs a command on a node. asyncio, in which the dispatcher of a job
list runs, is not used here: its import takes nearly as long as all imports of a launch.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count

from distributed.host import process_scan, signals
from distributed.host.clock import RunningClock
from distributed.host.ssh_call import GO, Login, NotStarted, killed_by
from distributed.trust import regular_file

BLOCK = 1 << 16  # bytes per read
NULL = subprocess.DEVNULL
INHERITED = None  # value of `output` or `errors` of a client that writes to the same stream as the launcher
# Variable with which test_distributed.sh asks the launcher for a test of the connections between nodes, and names the
# file to which the launcher writes the path of the run directory.
FOR_SMOKE_TEST = "MUSTER_SMOKE_TEST"
# Variables that clients do not get: this one, the run that the launcher follows, and the run whose call it repeats.
FOR_LAUNCHER = (FOR_SMOKE_TEST.encode(), b"MUSTER_ATTACH", b"MUSTER_RERUN_OF")
# Clients start with these signals blocked: the launcher handles the signals, and sends requests to the nodes.
BLOCKED_IN_CLIENTS = {
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, *signals.PASSED_ON,
}  # fmt: skip


def inherited_environment() -> dict[bytes, bytes]:
    """Return the environment with which this process was started, without FOR_LAUNCHER. Clients get it.

    It is read from /proc, because os.environ may contain changes by Python.
    """
    with open("/proc/self/environ", "rb") as file:
        entries = (entry.partition(b"=") for entry in file.read().split(b"\0") if entry)
        return {name: value for name, _, value in entries if name not in FOR_LAUNCHER}


class Loop:
    """Calls functions when a file is ready, a timer is due, a signal arrives, or a client exits."""

    def __init__(self, handle_signal: Callable[[int], None], numbers: Iterable[int]) -> None:
        """numbers: the signals for which handle_signal is called."""
        self._files: dict[int, Callable[[], object]] = {}
        self._poll = select.poll()
        self.clock = RunningClock()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._handle_signal = handle_signal
        self.clients: dict[Client, None] = {}  # those that have not ended, in the order of their start
        nohup = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
        self._signals, _ = signals.catch({*numbers, signal.SIGCHLD} - nohup)
        self.on_readable(self._signals, self._read_signals)

    def on_readable(self, file: int, function: Callable[[], object]) -> None:
        self._files[file] = function
        self._poll.register(file, select.POLLIN)

    def on_writable(self, file: int, function: Callable[[], None]) -> None:
        self._files[file] = function
        self._poll.register(file, select.POLLOUT)

    def forget(self, file: int) -> None:
        if self._files.pop(file, None):
            self._poll.unregister(file)

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.clock.now() + seconds, next(self._order), function))

    def wait(self, limit: float | None = None) -> None:
        """Wait for the next events, at most `limit` seconds, and call their functions."""
        if self._timers:
            due = self.clock.until(self._timers[0][0])
            limit = due if limit is None else min(limit, due)
        for file, _ in self._poll.poll(None if limit is None else max(0.0, 1000 * limit)):
            if file in self._files:  # a function called in this loop may have forgotten it
                self._files[file]()
        while self._timers and self._timers[0][0] <= self.clock.now():
            heapq.heappop(self._timers)[2]()

    def _read_signals(self) -> None:
        numbers = os.read(self._signals, 4096)
        for number in numbers:
            if number != signal.SIGCHLD:
                self._handle_signal(number)
        if signal.SIGCHLD in numbers:
            for client in list(self.clients):
                client.check()


@dataclass(frozen=True)
class SshCommand:
    """A command on a node over ssh. See host/ssh_call.py for what happens until the login shell has started it."""

    arguments: list[str]  # the command line of ssh
    node: str  # its name in messages
    start_timeout: float  # seconds for the login shell to start the command
    log: str = ""  # file to which is appended why the command has not started


Command = list[str] | SshCommand


class SshLogin:
    """Holds the input of a client over ssh back until the command has started, and drops the output before."""

    def __init__(
        self, client: Client, command: SshCommand, show: Callable[[bytes], None], show_error: Callable[[bytes], object]
    ) -> None:
        self._client, self._command, self._show, self._show_error = client, command, show, show_error
        self._login = Login()
        self.failure: NotStarted | None = None
        client.loop.call_later(command.start_timeout, self._time_out)

    @property
    def is_over(self) -> bool:
        return self._login.is_over

    def receive(self, block: bytes) -> None:
        was_over, output = self.is_over, self._login.feed(block)
        if self.is_over and not was_over:
            self._client.send(b"")  # what was held back
        if output or not block:
            self._show(output)

    def _time_out(self) -> None:
        if not self.is_over and self._client.is_running:
            self.failure = self._login.timed_out(self._command.start_timeout)
            self._client.kill()

    def handle_exit(self, pid: int, code: int, was_killed: bool) -> None:
        """Report why the command has not started, or that ssh was killed. code: negative for a signal."""
        if code < 0 and not was_killed:
            self._show_error(killed_by(pid, -code))
        elif code >= 0 and not self.is_over:
            self.failure = self._login.ended(code)
        if not self.failure or not self.failure.reason:
            return
        line = os.fsencode(f"{self._command.node}: {self.failure.reason}\n")
        self._show_error(line)
        with contextlib.suppress(OSError):
            if self._command.log:
                with open(self._command.log, "ab", opener=regular_file) as log:
                    log.write(line)


def _write(file: int, data: bytes) -> None:
    """Write to a file, if that is possible."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(file, data) :]


class Client:
    """A local process that runs a command on a node, in a session of its own: Ctrl-C does not reach it."""

    def __init__(
        self,
        loop: Loop,
        command: Command,
        environment: dict[bytes, bytes],
        *,
        on_exit: Callable[[Client], None],
        on_output: Callable[[bytes], None] | None = None,
        on_errors: Callable[[bytes], None] | None = None,
        sent: bytes | None = None,
        source: int | None = NULL,
        output: int | None = NULL,
        errors: int | None = NULL,
        timeout: float = 0.0,
        dies_with_launcher: bool = False,
    ) -> None:
        """Start the command.

        sent: what is written to its standard input, which then stays open; None: `source` is its standard input.
        on_output, on_errors: called with blocks of standard output and standard error, which otherwise go to the files
        `output` and `errors`. timeout: seconds after which it is killed; 0: never. dies_with_launcher: let the
        kernel kill it when the launcher dies, for a command that would not notice the end of its standard input.
        A command over ssh has no `source`.
        """
        self.loop, self._on_exit = loop, on_exit
        self._lock = threading.Lock()  # heartbeats are sent by a thread
        self._ends_input = False
        self.input = self._output = -1
        self._was_killed = False
        self._login: SshLogin | None = None
        if isinstance(command, SshCommand):
            if not on_output and output != NULL:
                self._output = os.dup(1 if output is INHERITED else output)  # the caller may close it
            show = on_output or partial(_write, self._output)
            self._login = SshLogin(self, command, show, on_errors or partial(_write, 2 if errors is None else errors))
            command, on_output = command.arguments, self._login.receive
            self._ends_input, sent = sent is None, GO + (sent or b"")
        self._pending = bytearray(sent or b"")
        opened = []  # files of the process, which are closed here after its start
        if sent is not None:
            source, self.input = os.pipe()
            os.set_blocking(self.input, False)
            opened.append(source)
        self._readers: dict[int, Callable[[bytes], None]] = {}
        if on_output:
            opened.append(output := self._pipe(on_output))
        if on_errors:
            opened.append(errors := self._pipe(on_errors))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_IN_CLIENTS)
        try:
            self.process = subprocess.Popen(
                command, stdin=source, stdout=output, stderr=errors, env=environment, start_new_session=True,
                preexec_fn=partial(process_scan.die_with_parent, os.getpid()) if dies_with_launcher else None,
            )  # fmt: skip
            loop.clients[self] = None  # before a signal handler can run
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for file in opened:
                os.close(file)
        self._flush()
        if timeout:
            loop.call_later(timeout, self.kill)

    def _pipe(self, function: Callable[[bytes], None]) -> int:
        source, target = os.pipe()
        os.set_blocking(source, False)
        self._readers[source] = function
        self.loop.on_readable(source, partial(self._read, source))
        return target

    def _read(self, file: int) -> bool:
        """Read a block. Returns whether there may be more."""
        try:
            block = os.read(file, BLOCK)
        except BlockingIOError:
            return False
        self._readers[file](block)
        if not block:
            self._close_reader(file)
        return bool(block)

    def _close_reader(self, file: int) -> None:
        self.loop.forget(file)
        del self._readers[file]
        os.close(file)

    def pause_output(self, paused: bool) -> None:
        """Stop or continue to read the output, so that a slow console makes the command wait."""
        for file in self._readers:
            if paused:
                self.loop.forget(file)
            else:
                self.loop.on_readable(file, partial(self._read, file))

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def code(self) -> int:
        """The exit code of the process; 128 + n for signal n."""
        if self._login and self._login.failure:
            return self._login.failure.code
        code = self.process.returncode
        return 128 - code if code < 0 else code

    def send(self, data: bytes) -> None:
        """Write to the standard input of the command, without waiting."""
        with self._lock:
            self._pending += data
        self._flush()

    def send_heartbeat(self) -> None:
        """Send an empty line, unless something else still has to be sent. Called by another thread."""
        with self._lock, contextlib.suppress(OSError):
            if not self._pending and self.input >= 0:
                os.write(self.input, b"\n")

    def _flush(self) -> None:
        if self._login and not self._login.is_over:
            return
        with self._lock:
            try:
                while self._pending and self.input >= 0:
                    del self._pending[: os.write(self.input, self._pending)]
            except BlockingIOError:
                self.loop.on_writable(self.input, self._flush)
                return
            except OSError:  # the process has exited
                self._pending.clear()
            self.loop.forget(self.input)
            if self._ends_input:
                self._close_input()

    def end_input(self) -> None:
        """Close the standard input of the command when everything is sent."""
        self._ends_input = True
        self._flush()

    def _close_input(self) -> None:
        if self.input >= 0:
            file, self.input = self.input, -1
            self.loop.forget(file)
            os.close(file)

    def kill(self) -> None:
        """Kill the process and those that it has started. pdsh starts each ssh in a session of its own.

        Not to be called by another thread: its look at the process could keep check() from seeing the exit.
        """
        if self.is_running:
            self._was_killed = True
            others = process_scan.descendants(self.process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            for pid in others:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def check(self) -> None:
        """If the process has exited, read the rest of its output, and call on_exit.

        This does not wait for the end of the output, because a descendant of the process may keep the pipes open.
        """
        if self not in self.loop.clients or self.is_running:
            return
        del self.loop.clients[self]
        for file in list(self._readers):
            while self._read(file):
                pass
            if file in self._readers:
                self._close_reader(file)
        with self._lock:
            self._close_input()
        if self._login:
            self._login.handle_exit(self.process.pid, self.process.returncode, self._was_killed)
        if self._output >= 0:
            os.close(self._output)
        self._on_exit(self)
