"""Copy logs and run directories to this machine, from nodes that do not share the run directory with it.

The files of each node first go into a new directory of their own, see trust.unpack(). A node speaks only for itself:
the files of other nodes, of their ranks and of the launcher are left out.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
import threading
from functools import partial
from pathlib import Path

from distributed import attempts, metrics, trust
from distributed.files import write_json
from distributed.host import signals
from distributed.host.replies import Reply
from distributed.records import integer, listed, mapping, most_bytes, read_record
from distributed.transport.loop import INHERITED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distributed.launch.watch import Watch
    from distributed.runs.lookup import RunNode
    from distributed.transport.loop import Client, Command

FOLLOW_INTERVAL = 2.0  # seconds between two copies of new log lines
FOLLOW_TIMEOUT = 3.0  # seconds
# Programs for sh on a node. $1: the run directory. If it contains run.json, the node shares it with the launcher, and
# there is nothing to copy.
PRINT_LOG = 'cd -- "$1" && { [ -e run.json ] || tail -c +"$3" -- "$2"; }'  # $2: log, $3: first byte
# $2: the directory of the attempt, relative to $1. The exclusions are links, and other attempts.
PACK = """cd -- "$1" && if [ -e run.json ]; then set -- --files-from=/dev/null; else set -- -- . "$2"; fi &&
TAR_OPTIONS= tar -cf - --exclude=./checkpoints --exclude=./attempts --exclude=./newest --exclude=./errors \
--exclude=./ranks --exclude='ranks/*/collectives_*.pipe' "$@\""""
OF_LAUNCHER = (
    "run.json", "launcher.log", "verdict.json", "report.html", "hang.json", "stalled_attempts", "stop.lock",
    "attach.lock", attempts.NAME, attempts.NEWEST,
)  # fmt: skip
# The files node_NAME.* of a supervisor, except node_NAME.environment, which has secrets.
OF_NODE = ("log", "exit", "pid", "stop", "samples.jsonl", "heartbeat", "usage", "reserved", "reserved_record")
OF_RUN = (*metrics.ORIGINS, "settings.json")  # rank 0 writes them
OF_AGENTS = re.compile("/(node|rank)_")  # records that agents exchange
SMOKE_TEST = "smoke.json"  # rank 0 of the smoke test writes it
SIGNALS = frozenset(map(signals.name, signal.valid_signals()))  # in names of records
LEFT_OUT = "not copied back, as links, special files, files of git or TensorBoard, or files that exist here: "
SHOWN = 3  # names in a warning


class NodeLogs:
    """The files of the nodes. sync: follow the logs while the nodes run."""

    def __init__(self, watch: Watch, sync: bool) -> None:
        self._watch, self._sync = watch, sync
        self._threads: dict[threading.Thread, Client] = {}  # they unpack what a client prints: the files of a node
        self._heard: dict[Client, float] = {}  # clients that print a log -> time of the last byte, on the loop's clock
        # By node: the new directory with its files, the names of what was left out, and why files are missing.
        self._received: dict[RunNode, tuple[str, list[str], str]] = {}
        self._placed: dict[RunNode, set[str]] = {}  # names of the files that each node has sent

    @property
    def _attempt(self) -> str:
        return str(self._watch.attempt_directory.relative_to(self._watch.directory))

    def _on_node(self, node: RunNode, script: str, *arguments: str) -> Command:
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
        log = self._watch.file_of(node.node, "log")
        try:
            file = trust.regular_file(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        except OSError:  # such as a full disk
            then(Reply(node.node, 1, "", ""))
            return

        def append(block: bytes) -> None:
            self._heard[client] = self._watch.loop.clock.now()
            disk = os.fstatvfs(file)
            with contextlib.suppress(OSError):
                while block and disk.f_bavail * disk.f_frsize > trust.MIN_FREE:
                    block = block[os.write(file, block) :]
            if block:
                client.kill()

        def ended(reply: Reply) -> None:
            del self._heard[client]
            os.close(file)
            then(reply)

        command = self._on_node(node, PRINT_LOG, f"{self._attempt}/{log.name}", str(os.fstat(file).st_size + 1))
        client = self._watch.calls.call(
            node.node, command, ended, timeout=timeout, on_output=append, most=trust.MAX_BYTES
        )
        self._heard[client] = self._watch.loop.clock.now()

    # ---- after an attempt

    def collect(self) -> None:
        """Copy the run directory of each node back, without checkpoints and earlier attempts.

        Skip a node if node_NAME.exit exists on this machine: the node shares the directory, or did not start. Skip
        lost nodes, too.
        """
        nodes = [
            node
            for node in self._watch.run.nodes
            if not self._watch.file_of(node.node, "exit").exists() and not self._watch.lost_nodes.is_lost(node.node)
        ]
        for node in nodes:
            if self._sync:
                self._append_log(node, partial(self._fetch_after, node))
            else:
                self._fetch(node)
        while {*self._heard, *self._threads.values()} & self._watch.calls.running:
            self._watch.loop.wait(1.0)
            for client, heard in self._heard.items():
                if self._watch.loop.clock.now() > heard + trust.STALLED:
                    client.kill()
            for thread, client in self._threads.items():
                if not thread.is_alive():
                    client.kill()  # the node may send nothing, or more without end
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        for node in sorted(self._received, key=lambda node: node.first_rank):
            self._place(node, *self._received.pop(node))

    def _fetch_after(self, node: RunNode, reply: Reply) -> None:
        if reply.code:
            with contextlib.suppress(OSError):  # tar then copies the whole log
                self._watch.file_of(node.node, "log").unlink()
        self._fetch(node)

    def _fetch(self, node: RunNode) -> None:
        try:
            directory = tempfile.mkdtemp(prefix=f".from_{node.node}-", dir=self._watch.directory)
        except OSError as error:
            self._warn(node, f"its files could not be copied back ({error}); look for them on the node")
            return
        source, target = os.pipe()
        command = self._on_node(node, PACK, self._attempt)
        client = self._watch.calls.call(node.node, command, output=target, errors=INHERITED)
        os.close(target)
        thread = threading.Thread(target=self._unpack, args=(node, source, directory), daemon=True)
        self._threads[thread] = client
        thread.start()

    def _unpack(self, node: RunNode, source: int, directory: str) -> None:
        """Unpack the files of a node. Runs in a thread."""

        def expects(name: str) -> bool:  # agents also keep failure records of other nodes, see _place()
            if name.startswith(tuple(f"{self._attempt}/{one}" for one in OF_RUN)):
                return False
            name = name.removeprefix(f"{self._attempt}/")
            nodes = self._watch.run.nodes if name.startswith("errors/") else (node,)
            return any(is_expected(one, name) for one in nodes)

        try:
            self._received[node] = directory, trust.unpack(source, directory, expects), ""
        except trust.Refused as error:
            self._received[node] = directory, [], str(error)
        finally:
            os.close(source)

    def _place(self, node: RunNode, received: str, left_out: list[str], problem: str) -> None:
        """Move the files of a node to their place.

        Files of the whole run are those of the node of rank 0, if it has any. Records of other nodes are kept only for
        lost nodes, whose own records are missing. The key "reported_by" then has the name of this node.
        """
        run, errors = self._watch.directory, f"{self._attempt}/errors"
        try:
            records = [f"{errors}/{name}" for name in os.listdir(os.path.join(received, errors))]
        except FileNotFoundError:
            records = []
        lost = [one for one in self._watch.run.nodes if self._watch.lost_nodes.is_lost(one.node)]
        exists = {name: (run / name).exists() for name in OF_RUN} if node.first_rank else {}
        has_metrics = any(exists.get(name) for name in metrics.ORIGINS)
        dropped = [name for name in exists if exists[name] or (has_metrics and name in metrics.ORIGINS)]
        try:
            for name in records:
                base = name.removeprefix(errors)
                subject = next((one for one in (node, *lost) if is_expected(one, f"errors{base}")), None)
                if not subject or (subject != node and ((run / name).exists() or not OF_AGENTS.match(base))):
                    dropped.append(name)
                elif not is_about(subject, path := os.path.join(received, name)):
                    dropped.append(name)
                    left_out = [*left_out, name]
                elif subject != node:
                    write_json(path, read_record(Path(path), []) | {"reported_by": node.node})
            for name in dropped:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(received, name))
            left_out = left_out + trust.place(received, str(run), 0o700, accepts=partial(self._accepts, node))
        except OSError as error:
            problem = trust.printable(f"{error.filename}: {error.strerror}")
        shutil.rmtree(received, ignore_errors=True)
        if left_out:
            names = ", ".join(map(trust.printable, sorted(left_out)[:SHOWN])) + ", ..." * (len(left_out) > SHOWN)
            self._warn(node, f"{LEFT_OUT}{names}")
        if problem:
            self._warn(node, f"the copy of its files in {run} is incomplete: {problem}; look for them on the node")

    def _accepts(self, node: RunNode, name: str, exists: bool) -> bool:
        """Whether a file of a node may be placed: it replaces only files of this node."""
        placed, of_attempt = self._placed.setdefault(node, set()), name.removeprefix(f"{self._attempt}/")
        own = of_attempt != name and of_attempt.startswith((f"node_{node.node}.", "errors/", f"ranks/{node.node}/"))
        if exists and name not in placed and not own and name not in OF_RUN:
            return False
        placed.add(name)
        return True

    def _warn(self, node: RunNode, problem: str) -> None:
        self._watch.console.print(f"warning: {node.node}: {problem}", always=True)


def is_about(node: RunNode, path: str) -> bool:
    """Whether a failure record is about this node and its ranks alone, or is no record, and is not too large."""
    if os.path.getsize(path) > most_bytes(os.path.basename(path)):
        return False
    record = read_record(Path(path), [])
    entries = [record, *map(mapping, listed(record.get("failures")))]
    ranks = [*listed(record.get("succeeded")), *(entry["rank"] for entry in entries if "rank" in entry)]
    own = range(node.first_rank, node.first_rank + node.processes)
    is_own = "reported_by" not in record and all(entry.get("node", node.node) == node.node for entry in entries)
    return is_own and all(integer(rank) in own for rank in ranks)


def is_expected(node: RunNode, name: str) -> bool:
    """Whether a node may send a file or directory. name: relative; that of a directory ends with a slash."""
    top, slash, below = name.partition("/")
    if top == "errors" and slash:
        rank = re.fullmatch(r"rank_(0|[1-9][0-9]{0,8})\.json", below)
        is_own = rank is not None and node.first_rank <= int(rank[1]) < node.first_rank + node.processes
        of_node = [f"{kind}_{node.node}.json" for kind in ("node", "supervisor")]
        kind = below.removeprefix(f"signal_{node.node}_").removesuffix(".json")
        is_signal = kind in SIGNALS and below == f"signal_{node.node}_{kind}.json"
        return is_own or is_signal or below in ("", *of_node)
    if top == SMOKE_TEST:  # see scripts/test_distributed.sh
        return name == top and node.first_rank == 0
    if node.first_rank and os.path.basename(name).startswith(metrics.EVENT_FILE):
        return False  # the report reads them
    if top == "ranks" and slash:
        return below.partition("/")[0] in ("", node.node)
    if top.startswith("node_") or top in OF_RUN:
        return name in (*OF_RUN, *(f"node_{node.node}.{kind}" for kind in OF_NODE))
    is_run = "run.json" in below.split("/")  # status.sh would take the directory for a run
    others = (*OF_LAUNCHER, *attempts.PARTS, "checkpoints")
    return top not in others and not top.startswith(".") and not is_run
