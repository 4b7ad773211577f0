"""Run commands on nodes: on this machine, over ssh, or as a step of a SLURM job.

`LocalCommands`, `SshCommands` and `JobCommands` give the local command that runs a command on a node. `Calls` runs
short commands on many nodes at the same time, and collects their replies.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shlex
import signal
import sys
import time
from functools import partial

from distributed.exit_codes import UNFIT, WRONG_CALL
from distributed.files import KIT
from distributed.host.replies import Reply
from distributed.host.ssh_call import STARTED, for_any_shell
from distributed.transport.loop import NULL, Client, Command, Loop, SshCommand, inherited_environment
from distributed.transport.owners import exit_if_planted
from distributed.trust import LAYOUT, foreign_ancestor, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Any, Protocol, TypeVar

    class Target(Protocol):
        """A node on which commands run. address: [user@]host for ssh; empty: this machine."""

        @property
        def node(self) -> str: ...
        @property
        def address(self) -> str: ...

    AnyTarget = TypeVar("AnyTarget", bound=Target)

LIB = os.path.join(KIT, "scripts", "lib")
PLAIN_PYTHON = ("-I", "-S")  # starts faster, and ignores the user's environment
PROGRESS_INTERVAL = 5.0  # seconds between two messages about nodes that have not replied
MAX_REPLY = 64 << 20  # bytes of the output of a command in Calls; a command that writes more is killed
VANISHED = 24  # exit code of rsync: files were removed while it copied their directory
# This process raises its limit of open files to at most this number, as it opens several files for each node. A higher
# limit makes pdsh slow, because pdsh tries to close every file descriptor below the limit.
MAX_FILES = 1 << 16
# The maximum length, in bytes, of a path in which temporary_directory() creates a directory. With this length,
# ssh's control sockets in the directory have the longest path that ssh allows, 90 bytes.
MAX_PATH = 31


class TransportError(Exception):
    """Nodes cannot be used. code: the exit code of the program."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


# ---------------------------------------------------------------- one command on one node


class LocalCommands:
    """Runs commands on this machine."""

    files: Sequence[str] = ()  # absolute paths of files that the commands run: nodes check their owners
    recorded = ""  # path of a program that a run has recorded: only this user and root may own it

    def command(
        self, node: Target, arguments: Sequence[str], cwd: str = "", log: str = "", timeout: float = 0.0
    ) -> Command:
        """The local command that runs a command on a node.

        cwd: working directory of the command; empty: any. log: file to which the reason is written if the command is
        not started. timeout: seconds after which the caller kills the command; 0: never.
        """
        return list(arguments)


class JobCommands(LocalCommands):
    """Runs commands on a node of a running SLURM job, as a step that shares the resources of the running tasks."""

    def __init__(self, job: str) -> None:
        """job: number of the SLURM job."""
        # Unset variables of another job, which this process may be in, and variables that act like options of srun.
        names = [name for name in os.environ if name.startswith(("SLURM_", "SRUN_")) and name != "SLURM_CONF"]
        srun = ["srun", "--overlap", "--jobid", job, "--nodes", "1", "--ntasks", "1", "--input", "none", "--quiet"]
        self._srun = ["env", *(f"--unset={name}" for name in names), *srun]

    def command(
        self, node: Target, arguments: Sequence[str], cwd: str = "", log: str = "", timeout: float = 0.0
    ) -> Command:
        return [*self._srun, "--nodelist", node.node, *arguments]


class SshCommands(LocalCommands):
    """Runs commands over ssh, with the user's configuration and one connection per node that all calls share."""

    def __init__(self, warn: Callable[[str], None], cwd: str = "") -> None:
        """warn: prints a message, also with --quiet. cwd: the working directory, if it is to be copied; see sync.py.

        The control sockets are in a directory that is removed when this process has ended, however it ends. Raises
        TransportError.
        """
        value = os.environ.get("MUSTER_LOGIN_TIMEOUT") or "60"
        if not re.fullmatch(r"[0-9]{1,8}", value) or int(value) < 1:
            problem = "expected a whole number of seconds, 1 or more"
            raise TransportError(WRONG_CALL, f"MUSTER_LOGIN_TIMEOUT: {problem}, got '{value}'")
        self._login_timeout = int(value)
        directory = temporary_directory(warn)
        self.synced = list(dict.fromkeys((cwd, KIT))) if cwd else []
        # sync.py creates a file of this name in each directory of `synced`, to find the nodes that share the directory.
        self.marker = f".{os.path.basename(directory)}"
        remove_at_exit([directory, *(os.path.join(one, self.marker) for one in self.synced)])
        os.symlink(f"{LIB}/ssh_config", f"{directory}/config")  # the path of Muster may have blanks
        self.options = ["-F", f"{directory}/config", "-o", f"ControlPath={directory}/%C"]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MAX_FILES)), hard))

    def ssh(self, node: Target) -> list[str]:
        """The command line of ssh up to the address. Raises TransportError if there is no ssh."""
        import shutil

        if not shutil.which("ssh"):
            raise TransportError(UNFIT, "ssh: not found on this machine; install the OpenSSH client")
        return ["ssh", *self.options, "--", node.address]

    def command(
        self, node: Target, arguments: Sequence[str], cwd: str = "", log: str = "", timeout: float = 0.0
    ) -> Command:
        if not node.address:
            return list(arguments)
        start_timeout = self._login_timeout
        if timeout:
            start_timeout = min(start_timeout, max(1, int(timeout) - 1))
        change = f"cd -- {shlex.quote(cwd)} || exit {UNFIT}; " if cwd else ""
        line = (
            f"{change}{exit_if_planted(arguments, cwd, UNFIT, self.files, self.recorded)}exec {shlex.join(arguments)}"
        )
        return SshCommand(over_ssh(self.ssh(node), line), node.address.rpartition("@")[2], start_timeout, log)


def over_ssh(ssh: Sequence[str], line: str) -> list[str]:
    """The command line of ssh that runs a line of bash on a node. See host/ssh_call.py for the standard input.

    ssh: the command line of ssh up to the address.
    """
    return [*ssh, for_any_shell(f"{STARTED}; {line}")]


def call_ssh(ssh: Sequence[str], name: str, line: str, start_timeout: float) -> list[str]:
    """The local command that runs a line of bash on a node, for a program without class Loop.

    ssh: see over_ssh(). name: name of the node in messages. start_timeout: seconds for the login shell to start the
    line.
    """
    call = [sys.executable, *PLAIN_PYTHON, f"{LIB}/module.py", "host.ssh_call", "--within", f"{start_timeout:g}"]
    return [*call, name, *over_ssh(ssh, line)]


def rsync_shell(ssh: Sequence[str]) -> str:
    """The value of rsync's option -e. ssh: the command line of ssh up to the address."""
    shell = [sys.executable, *PLAIN_PYTHON, f"{LIB}/module.py", "transport.rsync_shell", *ssh]
    return " ".join("'" + each.replace("'", "''") + "'" for each in shell)  # rsync's own quoting


def in_node_env(node_env: str, python: str, module: str, *arguments: str) -> list[str]:
    """The command that runs a module of the package on a node in the environment of the ranks.

    It first reads environment_block() from its standard input.
    """
    return [f"{LIB}/in_node_env.sh", node_env, python, f"{LIB}/module.py", module, *arguments]


def environment_block(inherited: Sequence[bytes], environment: Sequence[bytes]) -> bytes:
    """NAME=VALUE entries for in_node_env.sh: variables that config/node_env.sh may change, and those that override it.

    They are sent through a pipe, because all users can read command-line arguments.
    """
    return b"".join(b"".join(entry + b"\0" for entry in block) + b"\0" for block in (inherited, environment))


# ---------------------------------------------------------------- short commands on many nodes


class Calls:
    """Runs short commands at the same time, on one event loop."""

    def __init__(self, loop: Loop | None = None) -> None:
        """loop: the event loop; default: a new one, and signals end this program as in exit_on_signals()."""
        self.loop = loop or Loop(lambda number: None, ())
        if not loop:
            exit_on_signals(self.loop.clients)
        self.environment = inherited_environment()  # of the commands
        self.running: set[Client] = set()

    def call(
        self,
        name: str,
        command: Command,
        on_reply: Callable[[Reply], None] = lambda reply: None,
        *,
        timeout: float = 0.0,
        sent: bytes | None = None,
        keep_input: bool = False,
        source: int | None = NULL,
        output: int | None = NULL,
        errors: int | None = NULL,
        on_output: Callable[[bytes], None] | None = None,
        most: int = MAX_REPLY,
    ) -> Client:
        """Start a command. When it has exited, the loop calls on_reply() with its exit code and what it has written.

        timeout: seconds after which the command is killed; 0: never. sent, source: its standard input, as bytes or as a
        file. keep_input: leave standard input open after `sent`. output, errors: files for its standard output and
        standard error; NULL: they are in the reply. on_output: called with blocks of its standard output, which then
        are not in the reply. most: bytes of a stream after which the command is killed.
        """
        texts, sizes = (bytearray(), bytearray()), [0, 0]  # of standard output and standard error

        def receive(stream: int, block: bytes) -> None:
            sizes[stream] += len(block)
            if sizes[stream] > most:
                client.kill()
            elif on_output and stream == 0:
                on_output(block)
            else:
                texts[stream].extend(block)

        def ended(client: Client) -> None:
            self.running.discard(client)
            code, (out, err) = client.code, (text.decode(errors="replace") for text in texts)
            if max(sizes) > most:
                code, out, err = UNFIT, "", f"its reply has more than {most / 2**20:g} MiB"
            on_reply(Reply(name, code, out, err, time.time()))

        client = Client(
            self.loop,
            command,
            self.environment,
            on_exit=ended,
            on_output=partial(receive, 0) if output == NULL else None,
            on_errors=partial(receive, 1) if errors == NULL else None,
            sent=sent,
            source=source,
            output=output,
            errors=errors,
            timeout=timeout,
        )
        self.running.add(client)
        if sent is not None and not keep_input:
            client.end_input()
        return client

    def call_all(
        self, commands: Mapping[AnyTarget, Command], log: Callable[[str], None] | None = None, **options: Any
    ) -> dict[str, Reply]:
        """Run commands at the same time, and wait until all have ended. Returns the reply of each node, by name.

        log: see log_waiting(). options: of call().
        """
        replies: dict[str, Reply] = {}
        names = [node.node for node in commands]

        def ended(reply: Reply) -> None:
            replies[reply.node] = reply

        calls = {self.call(node.node, command, ended, **options) for node, command in commands.items()}
        self.log_waiting(names, lambda: [name for name in names if name not in replies], log)
        self.wait(calls)
        return {name: replies[name] for name in names}

    def log_waiting(
        self, names: Sequence[str], missing: Callable[[], Sequence[str]], log: Callable[[str], None] | None
    ) -> None:
        """Print every 5 seconds which of these nodes have not replied yet. missing: returns their names."""
        started = time.monotonic()

        def report() -> None:
            if log and (waiting := missing()):
                ratio = f"{len(names) - len(waiting)} of {len(names)} nodes replied"
                log(f"{ratio}, waiting for {' '.join(waiting)}, {time.monotonic() - started:.0f} s")
                self.loop.call_later(PROGRESS_INTERVAL, report)

        if log:
            self.loop.call_later(PROGRESS_INTERVAL, report)

    def wait(self, calls: Collection[Client] | None = None) -> None:
        """Wait until these commands have ended; default: all."""
        waited = self.running if calls is None else set(calls)
        while not waited.isdisjoint(self.running):
            self.loop.wait()


# ---------------------------------------------------------------- this process


def exit_on_signals(clients: Collection[Client] = ()) -> None:
    """Let SIGINT, SIGTERM, SIGHUP and SIGQUIT kill these clients and end this program with 128+n, by SystemExit."""

    def end(number: int, frame: object) -> None:
        for client in clients:
            client.kill()
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # SIGHUP stays ignored under nohup
            signal.signal(number, end)


def read_lists() -> dict[str, list[bytes]]:
    """Read the lists of strings that a script of Muster sends to standard input, which is then empty.

    They are not arguments, because all users can read arguments. For each list: its name, the number of its entries,
    and the entries, all terminated by NUL bytes.
    """
    fields = sys.stdin.buffer.read().split(b"\0")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    lists = {}
    while len(fields) > 1:
        name, number = fields[0].decode(), int(fields[1])
        lists[name], fields = fields[2 : 2 + number], fields[2 + number :]
    return lists


def quote(command: Sequence[str]) -> str:
    """A command line for bash, quoted with backslashes as the scripts do."""

    def quoted(argument: str) -> str:
        if not argument or not argument.isprintable():
            return shlex.quote(argument)
        return re.sub(r"(^#|[^\w@%+=:,./#-])", r"\\\1", argument)

    return " ".join(map(quoted, command))


class Messages:
    """Prints messages of a program on standard error, which may be closed."""

    def __init__(self, program: str, quiet: bool = False) -> None:
        self._program, self._quiet = program, quiet

    def log(self, message: str) -> None:
        """Print a message, unless --quiet was given."""
        if not self._quiet:
            self.print(message)

    def print(self, message: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"{self._program}: {printable(message, LAYOUT)}\n".encode())

    def print_error(self, error: TransportError) -> int:
        """Print an error. Returns the exit code of the program."""
        self.print(message_of(error, self._program))
        return error.code


def message_of(error: TransportError, program: str) -> str:
    return f"{error}\nTry: {program} --help" if error.code == WRONG_CALL else str(error)


def temporary_directory(warn: Callable[[str], None]) -> str:
    """Create a private directory. Its path has no blanks, and is short enough for sockets of ssh.

    /tmp precedes TMPDIR, which may be on a file system without sockets. warn: prints a message if a preferred directory
    cannot be written. Raises TransportError if no directory can be written.
    """
    candidates = {"XDG_RUNTIME_DIR": os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp": "/tmp"}
    candidates["TMPDIR"] = os.environ.get("TMPDIR", "")
    faults = []
    for name, base in candidates.items():
        if not base.startswith("/") or re.search(r"\s", base) or len(os.fsencode(base)) > MAX_PATH:
            continue
        subject = name if name == base else f"{name}='{base}'"
        try:
            if problem := foreign_ancestor(base):  # who can replace the configuration of ssh can run commands
                faults.append(f"{subject}: not safe ({problem})")
                continue
            made = try_temporary_directory(base)
        except OSError as error:
            faults.append(f"{subject}: cannot create files there ({error.strerror})")
            continue
        if faults:
            remedy = "unset the variable, or create a directory that you can write"
            warn(f"warning: {'; '.join(faults)}; using {base}; {remedy}")
        return made
    remedy = "export TMPDIR=DIRECTORY, with a directory that you can write"
    raise TransportError(UNFIT, f"{'; '.join(faults)}; {remedy}")


def try_temporary_directory(base: str) -> str:
    """Create a directory. Raises OSError if a file in it cannot be written, as on a full disk, or cannot be removed."""
    while True:
        made = os.path.join(base, f"muster-{os.urandom(4).hex()}")
        try:
            os.mkdir(made, 0o700)
            break
        except FileExistsError:
            continue
    path = os.path.join(made, "file")
    try:
        with open(path, "wb") as file:
            file.write(bytes(8192))
        os.unlink(path)
    except OSError:
        import shutil

        shutil.rmtree(made, ignore_errors=True)
        raise
    return made


def remove_at_exit(paths: Sequence[str]) -> None:
    """Remove files and directories when this process has ended, even if SIGKILL ended it."""
    source, target = os.pipe()  # forks of this process hold the writing end, but programs that it starts do not
    null = os.devnull
    files = [(os.POSIX_SPAWN_DUP2, source, 0), *((os.POSIX_SPAWN_OPEN, one, null, os.O_WRONLY, 0) for one in (1, 2))]
    script = 'cd / && read -r _; rm -rf -- "$@"'
    os.posix_spawn("/bin/sh", ["sh", "-c", script, "sh", *paths], os.environ, file_actions=files, setsid=True)
    os.close(source)
    _KEPT.append(target)


_KEPT: list[int] = []  # open until this process ends
