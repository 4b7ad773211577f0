"""Follow a command that needs no launcher (--lease 0): show its output, pass requests on, report its exit code.

usage: module.py launch.follow --dir DIR --name NAME [option of the supervisor...] [--offset BYTES] [-- COMMAND...]

If COMMAND is given, it is first started by a supervisor that needs no launcher. Otherwise the command that was started
before is followed. Its output is read from node_NAME.log, from byte BYTES on, by default only new output. Standard
input is the control channel: `stop`, `kill` and `signal N` are passed on to the supervisor. End of file means that the
launcher is lost: this program exits with 0, and the command continues. If the supervisor was killed, the processes of
the command are ended. This program reports and exits like a supervisor that has a control channel. Standard library
only.
"""

from __future__ import annotations

import os
import select

from distributed.exit_codes import UNFIT
from distributed.launch import node_environment, node_files, node_requests, supervisor
from distributed.launch.console_stream import BACKLOG, ConsoleStream
from distributed.launch.node_environment import BLOCK
from distributed.launch.node_files import SupervisorError
from distributed.launch.node_reports import format_report
from distributed.launch.output_lines import OUTPUT, Console, Lines
from distributed.launch.shown_ranks import ShownRanks
from distributed.launch.supervisor_options import SupervisorOptions
from distributed.trust import regular_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO

INTERVAL = 0.2  # seconds between two reads of a log without new output


class Follower:
    """Follows one command until its supervisor has ended, or the launcher is lost."""

    def __init__(self, options: SupervisorOptions, received: bytes = b"") -> None:
        """received: bytes of standard input that were read before."""
        self._options, self._files, self._received = options, options.files, received
        self._streams = [ConsoleStream(1), ConsoleStream(2)]
        self._shown = ShownRanks(options.console_rank)
        self._console, self._lines = Console(options.terminals, self._shown.ranks), Lines()
        self._behind = False  # the log may have more output
        self._signal = 0  # for which the supervisor stops the command, and which was reported

    def run(self) -> int:
        """Returns the exit code of the command, UNFIT if none was started, or 0 at the end of standard input."""
        files = self._files
        try:
            log = open(files.log, "rb", buffering=0, opener=regular_file)  # noqa: SIM115
        except FileNotFoundError:  # the command was not started
            log = open(os.devnull, "rb", buffering=0)  # noqa: SIM115
        log.seek(int(self._options.offset or 0), os.SEEK_SET if self._options.offset else os.SEEK_END)
        if self._options.report:
            self._streams[0].put(format_report(node=files.name, following=True))
        while self._show_more(log):
            if not self._pass_requests():
                return 0
        if not os.path.exists(files.exit):  # the supervisor was killed, or this machine restarted
            node_requests.sweep(files, self._options.grace)
        code = node_files.read_code(files.exit)
        if code is None:
            code = UNFIT
            self._streams[1].put(os.fsencode(f"{files.name}: {files.directory}: no command was started\n"))
        if self._options.report:
            self._streams[0].put(format_report(node=files.name, exit_code=code))
            while self._streams[0].pending and self._pass_requests():
                self._streams[0].flush()
        return code

    def _show_more(self, log: BinaryIO) -> bool:
        """Show new output. Returns whether there may be more: the supervisor runs, or the console is slow."""
        pid = node_files.supervisor_of(self._files)  # must precede log.read(), or the last output could be missed
        number = node_files.read_code(self._files.heartbeat) if pid and self._options.report else None
        if number and not self._signal:
            self._signal = number
            self._streams[0].put(format_report(node=self._files.name, signal=number))
        slow = any(len(stream.pending) > BACKLOG for stream in self._streams)
        block = b"" if slow else log.read(BLOCK)
        self._behind = bool(block)
        self._shown.look(lines := self._lines.feed(block, last=not pid and not block))
        texts = self._console.feed(lines, OUTPUT)
        for stream, text in zip(self._streams, texts, strict=True):
            stream.put(text)
        return bool(pid or block or any(stream.pending for stream in self._streams))

    def _pass_requests(self) -> bool:
        """Pass requests on. If all output was read, wait up to INTERVAL for requests. Returns False at end of file."""
        if select.select([0], [], [], 0.0 if self._behind else INTERVAL)[0]:
            if not (received := os.read(0, BLOCK)):
                return False
            self._received += received
        *requests, self._received = self._received.split(b"\n")
        for request in map(os.fsdecode, requests):
            if request in ("stop", "kill"):
                node_requests.request(self._files, request)
            elif request.startswith("signal "):
                node_requests.signal_supervisor(self._files, int(request.split()[1]))
        return True


def main(arguments: Sequence[str]) -> int:
    return supervisor.report_errors(_main, arguments)


def _main(arguments: Sequence[str]) -> int:
    options, received = SupervisorOptions(arguments), b""
    node_files.refuse_foreign(options.files)
    if options.command:
        options.lease, options.offset = 0.0, "0"
        inherited, block, received = node_environment.read_environment(options.environment)
        if reason := supervisor.supervise_detached(options, inherited, block):
            raise SupervisorError(UNFIT, f"the command was not started: {reason}")
    return Follower(options, received).run()
