"""How a launcher starts the nodes of a run over ssh or with pdsh. watch.py and srun.py contain the other transports.

A transport starts all nodes of a run. Its `commands` (distributed/transport) run other programs on the nodes. With
every transport, a supervisor runs the command of a node and reports its exit code; the watch relies on this alone.
"""

from __future__ import annotations

import os
import re
import shlex

from distributed.exit_codes import UNFIT
from distributed.files import write_file
from distributed.host.ssh_call import UNREACHABLE, for_any_shell
from distributed.launch.output_lines import Lines
from distributed.launch.watch import Local, Watch
from distributed.transport.loop import INHERITED
from distributed.transport.owners import exit_if_planted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from distributed.host.replies import Reply
    from distributed.runs.lookup import RunNode
    from distributed.transport.commands import SshCommands
    from distributed.transport.loop import Client

REQUEST_TIMEOUT, SIGNAL_TIMEOUT = 5.0, 30.0  # seconds; a stop request is repeated, a signal is not
PDSH = "pdsh"
# Write a file $2 into a directory $1 on a node. Another user may have made a directory or link of this name, and change
# it meanwhile. A default access control list there replaces the umask: modes are explicit.
STORE = """umask 077 && mkdir -p -m 700 -- "${1%/*}/" "$1" && [ ! -L "$1" ] && cd -- "$1" && [ -O . ] &&
case $(LC_ALL=C ls -ld .) in d????-??-*) ;; *) exit 1 ;; esac && rm -f -- "./$2" && set -C && exec 3>"./$2" &&
[ -f /dev/fd/3 ] && [ -O /dev/fd/3 ] && chmod 600 /dev/fd/3 && cat >&3"""
_PDSH_CODE = re.compile(r"^pdsh@[^:]*: ([^:]+): ssh exited with exit code ([1-9]\d*)$")
_PDSH_INTERRUPT = re.compile(r"^pdsh@.*(interrupt|\^Z|command in progress)")  # about Ctrl-C, which the launcher handles


class Ssh(Local):
    """Starts every node over ssh, with the connections that the launcher has opened."""

    lease: int | None = 20  # seconds; class Local describes these attributes
    reports = True

    def __init__(self, commands: SshCommands) -> None:
        super().__init__(commands)
        self.ssh_options = commands.options


class Pdsh(Ssh):
    """Starts all nodes with one pdsh. Requests and the environment are sent over ssh.

    pdsh runs the same command on all nodes, and replaces %n by the position of the node. bash on the node uses this
    position to choose the name, the rank and the number of processes of the node. pdsh keeps the standard input of the
    nodes open without writing to it; when pdsh exits, their control channels close.
    """

    lease = None
    clients_are_nodes = False  # the only client is pdsh

    def start(self, watch: Watch) -> None:
        """Write the environment to a file on each node, then start pdsh.

        The file has mode 0600. The supervisor removes it. If no supervisor starts, bash on the node removes it, or an
        ssh call after pdsh has exited.
        """
        if watch.continues:
            self.request(watch, watch.node_start.next_attempt().decode().rstrip())
            return
        run = str(watch.directory)
        codes: dict[str, int] = {}
        nodes, calls = [*watch.run.nodes, *watch.spares], []
        for node in nodes:
            watch.nodes[node.node].token, watch.nodes[node.node].clock = os.urandom(16).hex(), None

        def stored(reply: Reply) -> None:
            codes[reply.node] = reply.code

        def remove(nodes: Sequence[RunNode]) -> None:
            for node in nodes:
                call = ["rm", "-f", "--", f"{run}/node_{node.node}.environment"]
                watch.calls.call(node.node, self.commands.command(node, call, "/"), timeout=SIGNAL_TIMEOUT)

        def ended(client: Client) -> None:
            remove([node for node in nodes if watch.nodes[node.node].clock is None])  # pdsh may have failed
            watch.client_ended(PDSH, client)

        for node in nodes:
            store = ["sh", "-c", STORE, "sh", run, f"node_{node.node}.environment"]
            command = self.commands.command(node, store, watch.options.cwd, str(watch.file_of(node.node, "log")))
            sent = watch.node_start.environment_block(node.node)
            calls.append(watch.calls.call(node.node, command, stored, sent=sent, errors=INHERITED))
        watch.calls.wait(calls)
        # On these nodes, the login shell or `cd` failed before this command, and would fail before the supervisor too.
        unfit = [name for name, code in codes.items() if code == UNFIT]
        if not unfit and not watch.stopping.signal:
            feed = _PdshErrors(watch).feed
            watch.start_client(PDSH, self._command(watch, nodes), on_errors=feed, on_exit=ended)
            return
        for name in unfit:
            write_file(watch.file_of(name, "exit"), f"{UNFIT}\n")
        remove([node for node in nodes if node.node not in unfit])
        watch.stopping.node_failed(UNFIT)

    def _command(self, watch: Watch, nodes: Sequence[RunNode]) -> list[str]:
        run = str(watch.directory)
        name, rank, processes = (f"<{os.urandom(8).hex()}>" for _ in range(3))  # placeholders, replaced below
        agent = watch.options.agent.on(run, name, rank, processes)
        environment = ["--environment", f"{run}/node_{name}.environment"]
        command = [*watch.node_start.supervisor_command(), "--name", name, *environment, "--", *agent]
        check, line = exit_if_planted(command, watch.options.cwd, UNFIT, self.commands.files), shlex.join(command)
        for mark, expansion in ((name, '"${names[$3]}"'), (processes, '"${processes[$3]}"'), (rank, '"$3"')):
            line = line.replace(mark, f"'{expansion}'")
        names, counts = shlex.join(node.node for node in nodes), " ".join(str(node.processes) for node in nodes)
        remove = f'rm -f -- {shlex.quote(f"{run}/node_")}"${{names[$3]}}".environment'  # if no supervisor starts
        first = f"names=({names}) processes=({counts}); trap {shlex.quote(remove)} EXIT; "
        first += f"cd -- {shlex.quote(watch.options.cwd)} || exit {UNFIT}"
        addresses = ",".join(node.address for node in nodes)
        call = [PDSH, "-S", "-N", "-f", str(len(nodes)), "-w", addresses]
        return [*call, f"{for_any_shell(f'{first}; {check}shopt -s execfail; exec {line}; exit')} %n"]

    def environment(self, inherited: dict[bytes, bytes]) -> dict[bytes, bytes]:
        options = os.fsencode(" ".join(self.ssh_options))
        return {b"PDSH_RCMD_TYPE": b"ssh", **inherited, b"PDSH_SSH_ARGS_APPEND": options}

    def request(self, watch: Watch, request: str) -> None:
        seconds = SIGNAL_TIMEOUT if request.startswith("signal") else REQUEST_TIMEOUT
        supervisor = watch.node_start.supervisor
        nodes = [node for node in watch.run.nodes if watch.nodes[node.node].is_unended]
        if watch.is_for_all(request):
            nodes += [node for node in watch.run.nodes if node.node in watch.nodes.waiting]
            nodes += watch.spares

        def replied(reply: Reply) -> None:
            if reply.code and request.startswith("attempt"):
                watch.lost_nodes.lose(reply.node)

        for node in nodes:
            if not watch.lost_nodes.is_lost(node.node):
                call = [*supervisor, *request.split(" ", 1), "--dir", str(watch.directory), "--name", node.node]
                command = self.commands.command(node, call, watch.options.cwd)
                watch.calls.call(node.node, command, replied, timeout=seconds)


class _PdshErrors:
    """The standard error of pdsh, which also carries that of the nodes. Lines of pdsh about Ctrl-C are dropped.

    A rank can imitate a line of pdsh. An exit code in such a line therefore counts only for a node whose supervisor has
    not reported its start. That the connection was lost counts later too: a rank can stop its run anyway.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch, self._lines = watch, Lines()
        self._names: dict[str, str] = {}
        for node in [*watch.run.nodes, *watch.spares]:  # pdsh prints a host without its domain
            host = node.address.rpartition("@")[2]
            self._names |= dict.fromkeys((node.address, host, host.partition(".")[0]), node.node)

    def feed(self, received: bytes) -> None:
        shown = []
        for line in self._lines.feed(received, last=not received).splitlines(keepends=True):
            if line.startswith(b"pdsh@"):
                text = os.fsdecode(line.strip())
                if _PDSH_INTERRUPT.match(text):
                    continue
                found = _PDSH_CODE.match(text)
                if found and (name := self._names.get(found[1])):
                    if self._watch.is_spare(name):
                        self._watch.spare_is_lost(name)
                    elif int(found[2]) == UNREACHABLE:
                        self._watch.lost_nodes.lose(name)
                    elif (known := self._watch.nodes[name]).is_unended and known.clock is None:
                        self._watch.stopping.node_ended(name, int(found[2]))
            shown.append(line)
        self._watch.console.show(b"".join(shown), 2)
