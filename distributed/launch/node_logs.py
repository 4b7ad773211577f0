"""Copy logs and run directories to this machine, from nodes that do not share the run directory with it."""

from __future__ import annotations

import contextlib
import os
from functools import partial

from distributed.host.replies import Reply
from distributed.transport.loop import INHERITED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distributed.launch.watch import Watch
    from distributed.runs.lookup import RunNode

FOLLOW_INTERVAL = 2.0  # seconds between two copies of new log lines
FOLLOW_TIMEOUT = 3.0  # seconds
# Programs for sh on a node. $1: the run directory. If it contains run.json, the node shares it with the launcher, and
# there is nothing to copy or to move.
PRINT_LOG = 'cd -- "$1" && { [ -e run.json ] || tail -c +"$3" -- "$2"; }'  # $2: log, $3: first byte
PACK = """cd -- "$1" && if [ -e run.json ]; then set -- --files-from=/dev/null; else set -- .; fi &&
TAR_OPTIONS= tar -cf - --exclude=./checkpoints "$@\""""
# This command runs on this machine, once for each node, at the same time. Without --keep-directory-symlink, one tar
# would remove and recreate an empty directory while another tar unpacks files into it.
UNPACK = ["env", "--unset=TAR_OPTIONS", "tar", "-xf", "-", "--keep-newer-files", "--keep-directory-symlink",
    "--no-same-owner"]  # fmt: skip
# $2: directory to which the files of the attempt are moved. $3: pid file of a supervisor that stays for the next
# attempt; a copy of this file remains in the run directory. If no supervisor stays, $3 is empty.
ARCHIVE = """cd -- "$1" && { [ -e run.json ] || { mkdir -p -- "$2" && mv errors ranks node_* "$2/" &&
{ [ ! "$3" ] || cp -p -- "$2/$3" .; }; }; }"""


class NodeLogs:
    """The files of the nodes. sync: follow the logs while the nodes run."""

    def __init__(self, watch: Watch, sync: bool) -> None:
        self._watch, self._sync = watch, sync
        self._fetched: list[RunNode] = []  # nodes whose run directory was copied back

    def _on_node(self, node: RunNode, script: str, *arguments: str) -> list[str]:
        line = ["sh", "-c", script, "sh", str(self._watch.directory), *arguments]
        return self._watch.transport.commands.command(node, line, self._watch.options.cwd)

    # ---- while the nodes run

    def follow(self) -> None:
        """Copy new lines of the logs repeatedly, until the attempt has ended."""
        if self._sync:
            self._watch.loop.call_later(FOLLOW_INTERVAL, partial(self._append, self._watch.attempts))

    def _append(self, attempt: int) -> None:
        if attempt != self._watch.attempts:
            return
        missing = set(self._watch.run.nodes)

        def appended(node: RunNode, _: Reply) -> None:
            missing.discard(node)
            if not missing:
                self._watch.loop.call_later(FOLLOW_INTERVAL, partial(self._append, attempt))

        for node in self._watch.run.nodes:
            self._append_log(node, partial(appended, node), FOLLOW_TIMEOUT)

    def _append_log(self, node: RunNode, then: partial[None], timeout: float = 0.0) -> None:
        """Append the bytes that the log on the node has and the local copy lacks."""
        log = self._watch.directory / f"node_{node.node}.log"
        try:
            file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError:  # such as a full disk
            then(Reply(node.node, 1, "", ""))
            return
        command = self._on_node(node, PRINT_LOG, log.name, str(os.fstat(file).st_size + 1))
        self._watch.calls.call(node.node, command, then, timeout=timeout, output=file)
        os.close(file)

    # ---- after an attempt

    def collect(self) -> None:
        """Copy the run directory of each node back, without checkpoints.

        Skip a node if node_NAME.exit exists on this machine: the node shares the directory, or did not start. Skip
        lost nodes, too.
        """
        run = self._watch.directory
        self._fetched = [
            node
            for node in self._watch.run.nodes
            if not (run / f"node_{node.node}.exit").exists() and not self._watch.is_lost(node.node)
        ]
        for node in self._fetched:
            if self._sync:
                self._append_log(node, partial(self._fetch_after, node))
            else:
                self._fetch(node)
        self._watch.calls.wait()

    def _fetch_after(self, node: RunNode, reply: Reply) -> None:
        if reply.code:
            with contextlib.suppress(OSError):  # tar then copies the whole log
                (self._watch.directory / f"node_{node.node}.log").unlink()
        self._fetch(node)

    def _fetch(self, node: RunNode) -> None:
        codes: list[int] = []

        def ended(reply: Reply) -> None:
            codes.append(reply.code)
            if len(codes) == 2 and any(codes):
                self._warn(node, f"{self._watch.directory} could not be copied back; look for it on the node")

        source, target = os.pipe()
        self._watch.calls.call(node.node, [*UNPACK, "-C", str(self._watch.directory)], ended, source=source)
        self._watch.calls.call(node.node, self._on_node(node, PACK), ended, output=target, errors=INHERITED)
        os.close(source)
        os.close(target)

    def archive(self, directory: str) -> None:
        """Archive the last attempt on the nodes too, so that its files are not copied back again."""
        pid_files = {node: f"node_{node.node}.pid" for node in self._fetched if node.node in self._watch.waiting}
        commands = {node: self._on_node(node, ARCHIVE, directory, pid_files.get(node, "")) for node in self._fetched}
        for node, reply in zip(self._fetched, self._watch.calls.call_all(commands).values(), strict=True):
            if reply.code:
                self._warn(node, f"files of the last attempt in {self._watch.directory} could not be moved")

    def _warn(self, node: RunNode, problem: str) -> None:
        self._watch.console.print(f"warning: {node.node}: {problem}", always=True)
