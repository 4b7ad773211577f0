"""Run ssh, and send standard input to the node only after Muster's command has started there.

usage: module.py host.ssh_call [--within SECONDS] NODE SSH [ARGUMENT...]

The login shell on a node runs its start-up file before the command. This file may read standard input, or start another
shell, which would read and print the values of --env-file. Therefore the command prints READY, and waits for a line:

  printf '\\nmuster-ready\\n'; TMOUT=0 read -r _ || exit 69; ...

Standard input is held back until READY arrives, and the output before READY is dropped (class Login). The launchers do
so in their event loop (transport/loop.py). This program does so for rsync and for job lists. If the command has not
started within SECONDS, ssh is killed, so that the command never starts. In that case, or if the login shell ends before
READY, a message is printed, and the exit code is UNFIT. Otherwise this program ends as ssh does: with the same exit
code, or by the same signal.

Standard library only. It runs for every command on a node, so it imports few modules.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import signal

from distributed.exit_codes import UNFIT
from distributed.host.clock import RunningClock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

READY = b"\nmuster-ready\n"
STARTED = f"printf '\\nmuster-ready\\n'; TMOUT=0 read -r _ || exit {UNFIT}"  # the first command on a node
GO = b"\n"  # the line that the command waits for
TIMEOUT = 60.0  # seconds
UNREACHABLE = 255  # exit code of ssh without a connection
# Characters that for_any_shell() does not encode.
PLAIN = frozenset(b'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./:,+@{}()[];$&|<>"*?~#^ -')
BLOCK = 1 << 16  # bytes per read
KEPT = 1 << 12  # bytes kept of the output before READY
SHOWN = 300  # characters of standard error in a message
LOGIN_SHELL = "the login shell "  # prefix of messages
START_UP_FILES = "bash: ~/.bashrc, zsh: ~/.zshenv, fish: ~/.config/fish/config.fish, tcsh: ~/.tcshrc, ~/.cshrc"


def for_any_shell(line: str) -> str:
    """A command that runs this line in bash, for any login shell: special characters are encoded as =XX.

    ssh joins its arguments with blanks, and the login shell of the user parses them again.
    """
    encoded = "".join(chr(byte) if byte in PLAIN else f"={byte:02X}" for byte in os.fsencode(line))
    return f"exec bash -pc 'eval \"$(printf %b \"${{1//=/$2}}\")\"' bash '{encoded}' '\\x'"


class NotStarted(Exception):
    """The command has not started. reason: empty if ssh has printed it."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class Login:
    """The output of ssh until the login shell on the node has started the command."""

    def __init__(self) -> None:
        self.is_over = False  # whether the command has started
        self._printed = b""  # end of the output of the login shell

    def feed(self, received: bytes) -> bytes:
        """Returns the output of the command."""
        if self.is_over:
            return received
        printed, separator, output = (self._printed + received).partition(READY)
        self.is_over, self._printed = bool(separator), printed[-KEPT:]
        return output

    def ended(self, code: int) -> NotStarted:
        """Why the command has not started. code: the exit code of ssh."""
        if code == UNREACHABLE:
            return NotStarted(code, "")
        reason = f"ended with exit code {code} before it started Muster's command"
        return NotStarted(UNFIT, explain(reason, self._printed, ended=True))

    def timed_out(self, timeout: float) -> NotStarted:
        """Why the command has not started, if ssh is killed after `timeout` seconds."""
        reason = f"has not started Muster's command within {timeout:g} s"
        return NotStarted(UNFIT, explain(reason, self._printed, ended=False))


class SshCall:
    """A running ssh with pipes to its standard input and from its standard output."""

    def __init__(self, command: list[str], go: bytes = GO) -> None:
        """go: what the command reads before the standard input of this process."""
        source, self._to_node = os.pipe()
        self._from_node, target = os.pipe()
        files = [(os.POSIX_SPAWN_DUP2, source, 0), (os.POSIX_SPAWN_DUP2, target, 1)]
        self.pid = os.posix_spawnp(command[0], command, os.environ, file_actions=files, setsigdef=[signal.SIGPIPE])
        os.close(source)
        os.close(target)
        self._held, self._ended = go, False  # bytes for the node; whether standard input has ended

    def run(self, timeout: float) -> int:
        """Returns the exit code of ssh. Raises NotStarted."""
        output = self._wait_until_ready(timeout)
        _thread.start_new_thread(self._forward_input, ())
        with contextlib.suppress(OSError):  # the console is closed
            os.set_blocking(1, True)  # rsync's pipes are non-blocking
            while output or (output := os.read(self._from_node, BLOCK)):
                output = output[os.write(1, output) :]
        while os.read(self._from_node, BLOCK):
            pass
        return self._exit_code()

    def _wait_until_ready(self, timeout: float) -> bytes:
        """Returns the output after READY. Buffers standard input, so that its writer does not block."""
        login = Login()
        clock = RunningClock()
        end = clock.now() + timeout
        poll = select.poll()
        poll.register(self._from_node, select.POLLIN)
        poll.register(0, select.POLLIN)
        while True:
            ready = [file for file, _ in poll.poll(1000 * clock.until(end))]
            if 0 in ready:
                more = os.read(0, BLOCK)
                self._held += more
                if not more:
                    self._ended = True
                    poll.unregister(0)
            if self._from_node in ready:
                more = os.read(self._from_node, BLOCK)
                output = login.feed(more)
                if login.is_over:
                    return output
                if not more:
                    raise login.ended(self._exit_code())
            if clock.now() >= end:
                os.kill(self.pid, signal.SIGKILL)  # it may ignore other signals
                raise login.timed_out(timeout)

    def _forward_input(self) -> None:
        with contextlib.suppress(OSError):  # ssh has exited
            data = self._held
            while data or (not self._ended and (data := os.read(0, BLOCK))):
                data = data[os.write(self._to_node, data) :]
        os.close(self._to_node)

    def _exit_code(self) -> int:
        """Wait for ssh, and return its exit code. If a signal killed ssh, die of the same signal.

        An exit code of 128+n would not show this, because the command on the node may exit with that code too.
        """
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if code < 0:
            with contextlib.suppress(OSError):
                os.write(2, killed_by(self.pid, -code))
            if -code not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        return code if code >= 0 else 128 - code


def killed_by(pid: int, number: int) -> bytes:
    return b"ssh (process %d) was killed by signal %d\n" % (pid, number)


def explain(reason: str, printed: bytes, ended: bool) -> str:
    """The message of NotStarted. ended: whether the login shell has ended; otherwise, it was still running.

    printed: the last output of the login shell. It contains no value of --env-file: these are sent only after READY.
    """
    lines = [line for line in printed.decode(errors="replace").splitlines() if line.strip()]
    last = "".join(filter(str.isprintable, lines[-1].strip()))[:200] if lines else ""
    printed_last = f" (it printed: {last})" if last else ""
    actions, alternative = "read standard input, wait or start another shell", ""
    if ended:
        actions, alternative = "exit or start another shell", ", or the account may run no commands"
    return (
        f"{LOGIN_SHELL}{reason}{printed_last}; its start-up file there ({START_UP_FILES}) may {actions} "
        f"(let it do so only in interactive shells){alternative}"
    )


def login_failure(errors: str) -> str:
    """The message of NotStarted in the standard error of this program, with what the node wrote there before."""
    before, _, message = errors.rpartition(LOGIN_SHELL)
    reason, separator, remedy = message.partition("\n")[0].partition("; its start-up file")
    *said_before, last = before.split("\n")  # "NODE: ", or a message without a line break
    said = " ".join(" ".join([*said_before, last if " " in last.strip() else ""]).split())[-SHOWN:]
    return f"{LOGIN_SHELL}{reason}{said and f' (standard error: {said})'}{separator}{remedy}"


def main(arguments: Sequence[str]) -> int:
    timeout = TIMEOUT
    if arguments[0] == "--within":
        timeout, arguments = float(arguments[1]), arguments[2:]
    node, *command = arguments
    while (file := os.open(os.devnull, os.O_RDWR)) < 3:  # otherwise a pipe may get the number of a standard stream
        pass
    os.close(file)
    try:
        return SshCall(command).run(timeout)
    except NotStarted as error:
        if error.reason:
            with contextlib.suppress(OSError):
                os.write(2, os.fsencode(f"{node}: {error.reason}\n"))
        return error.code
