"""Show a run as its launcher does, until it ends. scripts/attach.sh executes this program.

It reads files of the run directory. If the launcher has exited and the run continues (--lease 0), a new launcher takes
over, see launch.takeover.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from distributed import attempts
from distributed.exit_codes import INTERRUPTED, WRONG_CALL
from distributed.files import KIT, read_json
from distributed.launch.output_lines import OUTPUT, Console, Lines
from distributed.launch.shown_ranks import ShownRanks, choice
from distributed.runs.call import typed
from distributed.runs.lookup import REMOTE, RUNNING, Run, RunLookupError, RunNode, read
from distributed.runs.query import JobWithoutRun, find_run, parser_of
from distributed.transport.commands import Messages, TransportError, exit_on_signals
from distributed.trust import LAYOUT, printable, regular_file
from distributed.verdict.verdict import Verdict, render

INTERVAL = 0.2  # seconds between two reads of files without new lines
BEFORE = 4096  # bytes of earlier output that are shown, for each file
BLOCK = 1 << 20  # bytes
ABSENT = ("--detach", "--quiet", "--notify")  # options of the start that do not apply to an attached launcher


class Tail:
    """The lines that are appended to a file, which another one may replace."""

    def __init__(self) -> None:
        self._path, self._file, self._lines = "", -1, Lines()

    def read(self, path: str | Path) -> bytes:
        """Returns new complete lines. When the path changes, the rest of the earlier file is read first."""
        block = os.read(self._file, BLOCK) if self._file >= 0 else b""
        if block or self._path == os.fspath(path) or not self._open(path):
            return self._lines.feed(block)
        last = self._lines.feed(b"", last=True)  # of the file before
        return last + self._lines.feed(os.read(self._file, BLOCK))

    def _open(self, path: str | Path) -> bool:
        try:
            new = regular_file(path)
        except FileNotFoundError:
            return False
        if self._file >= 0:
            os.close(self._file)
        elif (size := os.fstat(new).st_size) > BEFORE:
            earlier = os.pread(new, BEFORE, size - BEFORE)
            os.lseek(new, size - len(earlier.partition(b"\n")[2]), os.SEEK_SET)
        self._path, self._file = os.fspath(path), new
        return True


class Attached:
    """Shows one run."""

    def __init__(self, run: Run, program: str) -> None:
        self._run, self._program, self._messages = run, program, Messages(program)
        self._log, self._nodes = Tail(), dict[str, tuple[Tail, ShownRanks, Console]]()
        self._interrupted = False

    def show(self) -> int:
        """Returns the exit code of the run. Raises TransportError and RunLookupError."""
        while self._run.launcher.state == RUNNING:
            self._follow()
            self._run = read(self._run.directory)  # another launcher may have attached
        run, name = self._run, self._run.directory.name
        path = Path(attempts.newest(run.directory), "verdict.json")
        if path.exists():
            try:
                verdict = Verdict(**read_json(path))  # type: ignore[arg-type]
            except TypeError:
                raise TransportError(1, f"{path}: cannot be read, or is damaged") from None
            sys.stderr.write(printable(render(verdict, run.directory), LAYOUT))
            return verdict.exit_code
        if run.launcher.state == REMOTE or run.job:
            where = f"its launcher is process {run.launcher.pid} on {run.launcher.host}; attach there"
            follow = typed(self._program, "logs", "-f", name)
            raise TransportError(1, f"run {name}: {where}, or follow its output here: {follow}")
        if run.lease != 0:
            again = typed(self._program, "rerun", name)
            raise TransportError(1, f"run {name}: its launcher has exited without a verdict; start it again: {again}")
        return self._take_over()

    def _take_over(self) -> NoReturn:
        run = self._run
        if not run.call:
            raise TransportError(WRONG_CALL, "an older version of Muster has started the run; watch it with status.sh")
        verb = {"MUSTER_VERB": "attach"} if self._program.startswith("muster ") else {}
        call = run.call.with_options(["--python", run.python], ABSENT)
        call.repeat(run.cwd, {"MUSTER_ATTACH": str(run.directory), **verb})

    def _follow(self) -> None:
        """Show output until the launcher has exited. Ctrl-C asks what to do."""
        signal.signal(signal.SIGINT, self._interrupt)
        while True:
            runs = self._run.launcher.state == RUNNING  # precedes the reads, or the last lines could be missed
            news = self._show_lines()
            if self._interrupted:
                self._ask()
            if not (runs or news):
                return
            if not news:
                time.sleep(INTERVAL)
            self._run = read(self._run.directory)  # spare nodes may have replaced others

    def _show_lines(self) -> bool:
        """Show new lines of the launcher and of the shown ranks. Returns whether there were any."""
        run = self._run
        news = self._log.read(run.directory / "launcher.log")
        _write(b"", news)
        for node in run.nodes:
            tail, shown, console = self._nodes.get(node.node) or self._add(node)
            lines = tail.read(f"{attempts.newest(run.directory)}/node_{node.node}.log")
            shown.look(lines)
            output, errors = console.feed(lines, OUTPUT)
            _write(output, errors)
            news += lines
        return bool(news)

    def _add(self, node: RunNode) -> tuple[Tail, ShownRanks, Console]:
        chosen = self._run.call.value("--console-rank", "auto") if self._run.call else "auto"
        shown = ShownRanks(choice(chosen, self._run.nodes[-1]))
        self._nodes[node.node] = Tail(), shown, Console(ranks=shown.ranks)
        return self._nodes[node.node]

    def _interrupt(self, number: int, frame: object) -> None:
        self._interrupted = True

    def _ask(self) -> None:
        """Ask whether to stop the run. Otherwise, and when Ctrl-C is pressed again, end this program."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        answer = ""
        with contextlib.suppress(KeyboardInterrupt):
            if os.isatty(0):
                self._messages.print("the run goes on; s and Enter stops it, Enter or Ctrl-C leaves it running")
                answer = sys.stdin.readline()
        if answer.strip().lower() not in ("s", "stop"):
            name = self._run.directory.name
            self._messages.print(f"left; the run goes on; to stop it: {typed(self._program, 'stop', name)}")
            sys.exit(INTERRUPTED)
        self._interrupted = False
        signal.signal(signal.SIGINT, self._interrupt)
        subprocess.run([f"{KIT}/scripts/stop.sh", str(self._run.directory)], check=False)


def _write(output: bytes, errors: bytes) -> None:
    for stream, text in ((sys.stdout, output), (sys.stderr, errors)):
        stream.buffer.write(text)
        stream.flush()


def main(arguments: Sequence[str]) -> int:
    """Return the exit code of the run, 2 if there is no such run, 130 if Ctrl-C has left it running, 1 otherwise."""
    options = parser_of("attach", str(__doc__)).parse_args(arguments)
    messages = Messages(options.program)
    exit_on_signals()
    try:
        return Attached(find_run(options.run, options.log_dir, options.program), options.program).show()
    except (JobWithoutRun, RunLookupError) as error:  # the directory was removed or changed
        return messages.print_error(TransportError(1, str(error)))
    except TransportError as error:
        return messages.print_error(error)
