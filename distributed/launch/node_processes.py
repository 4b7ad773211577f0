"""The processes of a supervisor: how it forks and kills them, and the guard, which does so if it was killed itself."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time

from distributed.exit_codes import KILLED
from distributed.host import process_scan, signals
from distributed.launch.node_files import Files, write_code, write_record
from distributed.trust import regular_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from distributed.launch.node_environment import Environment

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
HANDLED_SIGNALS = (*STOP_SIGNALS, *signals.PASSED_ON)  # by a supervisor
KILL_INTERVAL = 0.01  # seconds between checks of killed processes
UNKILLABLE_TIMEOUT = 5.0  # seconds to wait for a process after SIGKILL


def children() -> list[int] | None:
    """The children of this process, including zombies; None if the kernel does not list them."""
    try:
        with open("/proc/thread-self/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return None


def default_signals(ignored: Sequence[int] = ()) -> None:
    """Unblock all signals and reset their handlers to the default. `ignored` signals are ignored."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # the C library reserves some
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def exec_command(command: list[str], env: Environment) -> NoReturn:
    """Replace this process with the command. Exits with 127 or 126 as a shell does."""
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        os.write(2, os.fsencode(f"supervisor: {command[0]}: {error.strerror}\n"))
        os._exit(127 if error.errno == errno.ENOENT else 126)


def kill_all(find: Callable[[], list[int]]) -> None:
    """Send SIGKILL to the processes that find() returns. Repeat until it finds none, for at most UNKILLABLE_TIMEOUT."""
    end = time.monotonic() + UNKILLABLE_TIMEOUT
    while (pids := find()) and time.monotonic() < end:
        send_signal(signal.SIGKILL, pids)
        time.sleep(KILL_INTERVAL)


def fork() -> int:
    """os.fork(); the child blocks all signals until isolate() or default_signals().

    Otherwise a signal to the child would be written to the pipe from which the supervisor reads its own signals.
    """
    before, pid = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()), -1
    try:
        pid = os.fork()
    finally:
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def isolate(kept: int = -1) -> None:
    """In a helper process: ignore the signals that the supervisor handles, and close the supervisor's files.

    kept: a file descriptor that stays open, with the number 3.
    """
    signals.ignore(HANDLED_SIGNALS)
    signal.set_wakeup_fd(-1)
    null = os.open(os.devnull, os.O_RDWR)
    for file in range(3):
        os.dup2(null, file)
    if kept >= 0:
        os.dup2(kept, 3)
    os.closerange(4 if kept >= 0 else 3, 1 << 16)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def send_signal(number: int, pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


class Guard:
    """A process in a separate process group that kills the command if the supervisor is killed.

    It reads lines from a pipe to which only the supervisor can write. Each line `sessions PID...` replaces the list of
    sessions to kill. The supervisor writes `end` before it exits: end of file without `end` means that it was killed.
    """

    def __init__(self, files: Files) -> None:
        source, self._lifeline = os.pipe()
        supervisor = os.getpid()
        self.pid = fork()
        if self.pid == 0:
            try:
                os.close(self._lifeline)
                _guard_main(files, source, supervisor)
            finally:
                os._exit(0)
        os.setpgid(self.pid, self.pid)  # at once: SIGKILL to the supervisor's group must not reach the guard
        os.close(source)

    def send(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the guard was killed; the supervisor starts another one
            os.write(self._lifeline, line.encode() + b"\n")

    def stop(self) -> None:
        """Kill the guard: a stopped one (SIGSTOP) would not exit by itself."""
        self.send("end")
        os.close(self._lifeline)
        with contextlib.suppress(ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)  # until waitpid(), no other process can have this pid
            os.waitpid(self.pid, 0)

    def close(self) -> None:
        """Close the pipe to a guard that was killed."""
        os.close(self._lifeline)


def _guard_main(files: Files, lifeline: int, supervisor: int) -> None:
    isolate(lifeline)
    received = b""
    while more := os.read(3, 4096):
        received += more
    if b"end\n" in received:
        return
    sessions = [int(pid) for pid in received.rpartition(b"sessions ")[2].split()]
    message = f"process {supervisor} was killed"
    write_record(files, "killed", message)
    kill_all(lambda: process_scan.live_processes(files.environment, sessions))
    with contextlib.suppress(OSError), open(files.log, "a", opener=regular_file) as log:
        print(f"supervisor: {message}; its guard has killed the command", file=log)
    with contextlib.suppress(OSError):
        write_code(files, KILLED)
