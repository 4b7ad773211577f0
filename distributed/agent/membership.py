"""Membership of a run on several nodes: joining, heartbeats, the end of the run, exchange of failure records.

torchrun's agents exchange nothing after the rendezvous: when a rank fails on one node, the others wait until their
collectives time out, for 10 to 30 minutes. Here each agent sends heartbeats through the store of the first node. The
first agent that has to stop writes the reason to the store, and the other agents read it within a second. A node is
lost after HEARTBEAT_TIMEOUT without heartbeats. At the end the first node publishes failure records, so that each node
has the record of the first failure.

In each round a node writes its heartbeat and reads one number, the key NEWS. If the number has changed, the node reads
the keys that are for all nodes. The first node reads the heartbeats of all nodes with few operations. The work of the
store therefore grows with the number of nodes, and not with its square.

The keys of a run have its id as a prefix. A node that may not join the run (see _may_join) exits, and writes at most
the key "refused". The first node logs the value of this key, and the run continues.
Any program that reaches the store can write to it. A value of an unexpected type ends the run, with a message that
names the key.
"""

from __future__ import annotations

import itertools
import json
import math
import queue
import re
import resource
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from errno import EHOSTUNREACH, ENETUNREACH
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore

from distributed.agent.failure_records import EXIT_CODES, NAME, Records, first_failure, records_of
from distributed.exit_codes import TIMED_OUT, UNFIT
from distributed.host.clock import RunningClock
from distributed.trust import bounded, checked, parse_json

HEARTBEAT_INTERVAL = 0.5  # seconds
JOIN_INTERVAL = 0.05  # seconds between heartbeats while nodes join or finish
HEARTBEAT_TIMEOUT = 12.0  # seconds
RETRY_INTERVAL = 0.2  # seconds between attempts to connect to the first node
REPORT_INTERVAL = 5.0  # seconds between messages about missing nodes
UNJOINED_REPORT_INTERVAL = 15.0  # seconds between messages of a node that has not joined
UNREACHABLE_TIMEOUT = 10.0  # seconds after which a node gives up if the first node does not answer at all
RECORDS_TIMEOUT = 4.0  # seconds to wait for the failure records of all nodes
CLOSE_TIMEOUT = 1.0  # seconds to wait for the thread
# Seconds to wait until the thread has written that this node left; on the first node, until all other nodes have left.
LEAVE_TIMEOUT = 2.0
MAX_HEARTBEATS = 10_000  # per second, of all nodes together; a large run extends both heartbeat intervals
MISSING_ROUNDS = 10  # until all nodes have joined, a node reads once in this many rounds which nodes are missing
SHOWN_MISSING = 16  # names in a message about missing nodes
SHARED_RECORDS = 16  # the first node sends the failure records of at most this many nodes to all nodes
KEYS_PER_CALL = 400  # at most; a large request arrives in parts, and the store parses it again after each part
MAX_FILES = 1 << 16  # open files of the first node, to which each agent and each rank of the run connects
LOOPBACK = "127.0.0.1"
RUN_KEY = "muster/run"  # the PublishedRun that owns the store
NEWS = "news"  # key of a counter: how often the keys for all nodes have changed

T = TypeVar("T")
MemberFacts = Mapping[str, str]  # values must be equal on all nodes, except those of OWN_FACTS
OWN_FACTS = ("node", "attempt", "process", "ranks")
# Kinds for trust.checked().
FACTS: Any = {
    "node": NAME,
    "ranks?": re.compile(r"[0-9]{1,6}"),
    **dict.fromkeys(("attempt?", "process?", "NNODES?", "PyTorch?", "the script?", "CONFIG?"), str),
}
RUN_NAME = re.compile(r"[^\0\ud800-\udfff]{,4096}")  # ranks get it in a variable
RUN: Any = {"id": NAME, "name": RUN_NAME, "started": range(1 << 32), "facts": FACTS}
END: Any = {"node": NAME, "exit_code": EXIT_CODES, "reason": str, "lost?": bool}


@dataclass(frozen=True)
class PublishedRun:
    """A run as its first node publishes it in the store."""

    id: str  # new after each restart
    name: str
    started: int  # Unix seconds
    facts: MemberFacts  # of the first node

    def __str__(self) -> str:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"run {self.name} (first node {self.facts['node']}, started {started})"


@dataclass(frozen=True)
class RunEnd:
    """Why a run has to stop."""

    node: str  # the node that failed or is lost
    exit_code: int
    reason: str
    lost: bool = False  # heartbeats timed out: the node will send no failure records


@dataclass(frozen=True)
class Missing:
    """The nodes that have not joined."""

    count: int
    ranks: Sequence[int]  # node ranks of the first SHOWN_MISSING


@dataclass(frozen=True)
class Ranks:
    """The ranks of a node."""

    first: int
    total: int  # number of ranks of all nodes


class RendezvousFailed(Exception):
    """A node is missing, this node was refused, another node ended the run, or the port is in use."""

    def __init__(self, reason: str, exit_code: int = UNFIT) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


class Membership:
    """The membership of one agent in a run.

    Only a separate thread uses the store: an unresponsive store must not prevent the agent from stopping its ranks.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        facts: MemberFacts,
        address: str,
        connect: Callable[[], Store],
        run_name: str = "",
        names: Sequence[str] = (),
    ) -> None:
        """Start the thread that joins the run.

        Args:
            rank: node rank of this node.
            size: number of nodes.
            address: HOST:PORT of the store, for messages.
            connect: makes one attempt to connect to the store; raises OSError or RuntimeError.
            run_name: required on the first node; on the others "" joins any run with the same facts.
            names: names of all nodes, by node rank, if known.
        """
        self.rank, self.size = rank, size
        self.run: PublishedRun | None = None  # None until the thread has found it
        self.members: dict[int, MemberFacts] = {}  # known members, by node rank
        self.ranks: Ranks | None = None  # of this node; set when all nodes have joined
        self.records: dict[int, Records] = {}  # of the other nodes, after a failure
        self._facts = {**facts, "process": uuid.uuid4().hex}
        self._address, self._connect, self._run_name = address, connect, run_name
        self._names = dict(enumerate(names))
        self._missing = Missing(size, range(size)[:SHOWN_MISSING])
        self._store: Store | None = None  # with the prefix of the run; set when this node has joined
        self._coordinator: Coordinator | None = None
        self._status = f"waiting for the first node at {address}"  # while this node has not joined
        self._unreachable_since: float | None = None  # since when the first node does not answer; None: it does
        self._refusal: RendezvousFailed | None = None
        self._end: RunEnd | None = None
        self.first_end: RunEnd | None = None  # the first report of all nodes, in the order of their arrival
        self._complete = self._all_done = self._leaving = self._has_left = self._closed = False
        self._has_records = False  # whether all nodes that are not lost have sent their records
        self._rounds = self._news = 0
        self._clock = RunningClock()
        self._last_contact = self._clock.now()
        self._outbox: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, daemon=True, name="membership")
        self._thread.start()

    # ---------------------------------------------------------------- called by the agent

    def wait_for_all(self, timeout: float, log: Callable[[str], None]) -> PublishedRun:
        """Wait until all nodes have joined.

        Raises RendezvousFailed after `timeout` seconds, when this node is refused, or when another node ends the run.
        """
        reported = started = self._clock.now()
        refused = ""
        while not self._complete:
            now = self._clock.now()
            if self._refusal:
                self.close()
                raise self._refusal
            if now - started > timeout:
                if not self._store:
                    self.close()
                    raise RendezvousFailed(f"{self._status}; gave up after {timeout:.0f} s", TIMED_OUT)
                self.report_end(
                    RunEnd(self._facts["node"], TIMED_OUT, f"{self._missing_nodes()}; gave up after {timeout:.0f} s")
                )
            if end := self.end():
                self.leave()
                raise RendezvousFailed(f"{end.node}: {end.reason}", end.exit_code)
            if self._coordinator and self._coordinator.refused != refused:
                refused, reported = self._coordinator.refused, now
                log(f"refused {refused}; {self._missing_nodes()}")
            elif line := self._progress(now - reported):
                reported = now
                log(f"{line}, {now - started:.0f} s")
            time.sleep(JOIN_INTERVAL)
        assert self.run
        return self.run

    def end(self) -> RunEnd | None:
        """Why the run has to stop; None while it may continue."""
        if self._end is None and self._store and self._clock.now() - self._last_contact > HEARTBEAT_TIMEOUT:
            self._end = lost_node(self.members, 0)
        return self._end

    def report_end(self, end: RunEnd) -> None:
        """End the run on all nodes, if this node has joined it. Only the first report takes effect."""
        self._end = self._end or end
        self._send("end", asdict(end))

    def finish(self, timeout: float = math.inf, wait: Callable[[float], object] = time.sleep) -> RunEnd | None:
        """Report that the ranks of this node succeeded. Wait for all nodes, or for the end of the run, then leave.

        Returns why the run has to stop; None if all nodes succeeded. Raises TimeoutError after `timeout` seconds,
        without leaving. wait: waits for so many seconds, or raises an exception.
        """
        self._send(f"done/{self.rank}", True)
        self._leaving = True
        deadline = self._clock.now() + timeout
        while not self._all_done and self.end() is None:
            if self._clock.now() >= deadline:
                raise TimeoutError
            wait(JOIN_INTERVAL)
        self.leave()
        return self._end

    def leave(self, records: Records | None = None, collect: bool = False) -> None:
        """Send this node's failure records and leave.

        Takes up to LEAVE_TIMEOUT + CLOSE_TIMEOUT; on the first node, a few rounds longer if a node has not left.
        collect: before leaving, wait up to RECORDS_TIMEOUT for the records of the other nodes.
        """
        self._leaving = True
        self._send(f"records/{self.rank}", records or {})
        if collect:
            self._wait(lambda: self._has_records, RECORDS_TIMEOUT)
        # The first node hosts the store, so it leaves last.
        self._send(f"left/{self.rank}", True)
        rounds = 2 * self._interval() if self._coordinator else 0.0
        self._wait(lambda: self._has_left or not self._store, LEAVE_TIMEOUT + rounds)
        if self._coordinator and not self._has_left:
            self._send("closing", True)
            self._wait(lambda: False, max(2 * HEARTBEAT_INTERVAL, rounds))
        self.close()

    def close(self) -> None:
        """Stop the thread: if it were in the store's C++ code when Python exits, it would abort the process."""
        self._closed = True
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT)

    # ---------------------------------------------------------------- the thread: joining

    def _run_thread(self) -> None:
        try:
            while not (self._store or self._closed):
                self._try_to_join()
        except RendezvousFailed as refusal:
            self._refusal = refusal
            return
        except ValueError as error:
            self._refusal = RendezvousFailed(f"{self._address}: {error}; choose another --master-port")
            return
        try:
            while not self._closed:
                try:
                    self._update()
                except ValueError as error:
                    self.report_end(self._end or RunEnd(self._facts["node"], UNFIT, str(error)))
                self._last_contact = self._clock.now()
                self._wake.wait(self._interval())
                self._wake.clear()
        except RuntimeError:  # from the store: the first node is lost
            self._end = self._end or lost_node(self.members, 0)

    def _interval(self) -> float:
        """Seconds between two rounds."""
        usual = HEARTBEAT_INTERVAL if self._complete and not self._leaving else JOIN_INTERVAL
        return max(usual, self.size / MAX_HEARTBEATS)

    def _try_to_join(self) -> None:
        try:
            root = self._connect()
            self._unreachable_since = None
            # Clone before reading the run: otherwise the clone might connect to the store of the next run. If that
            # store replaces this one after the clone, reading from `root` fails, and this node tries to join again.
            clone = root.clone()  # type: ignore[attr-defined]
            if self.rank == 0:
                self.run = publish(root, self._run_name, self._facts, self.size)
            else:
                self.run = self._find_run(root)
            store = membership_store(clone, self.run)
            if self._may_join(store, self.run):
                self._last_contact = self._clock.now()
                self.members = {0: self.run.facts, self.rank: self._facts}
                self._coordinator = Coordinator(store, self.size, self._clock) if self.rank == 0 else None
                self._store = store
                return
        except (OSError, RuntimeError) as error:  # no store there, or it has just closed
            self._status = f"waiting for the first node at {self._address}"
            self._check_connection(error)
        self._wake.wait(RETRY_INTERVAL)

    def _check_connection(self, error: Exception) -> None:
        """Add to the status why this node cannot connect. Raises RendezvousFailed if waiting longer is useless.

        After a refused connection, this node waits on: the agent of the first node may not listen yet. It also waits on
        if nodes are started by hand: the first node may not be up yet.
        """
        reason = "no answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None)
        if isinstance(error, ConnectionRefusedError):
            reason = "connection refused"
        if reason:
            self._status += f" ({reason})"
        is_blocked = isinstance(error, TimeoutError) or getattr(error, "errno", 0) in (EHOSTUNREACH, ENETUNREACH)
        if not is_blocked or not self._names:
            self._unreachable_since = None
            return
        now = self._clock.now()
        self._unreachable_since = self._unreachable_since or now
        if now - self._unreachable_since >= UNREACHABLE_TIMEOUT:
            raise RendezvousFailed(
                f"{self._facts['node']} cannot connect to the first node at {self._address} ({reason}): a firewall "
                "between them? Open that port there, or choose an open one with --master-port"
            )

    def _find_run(self, root: Store) -> PublishedRun:
        deadline = self._clock.now() + HEARTBEAT_TIMEOUT
        while not (run := read_run(root)):
            if self._clock.now() > deadline:
                raise RendezvousFailed(f"{self._address}: in use by another program; choose another --master-port")
            time.sleep(JOIN_INTERVAL)
        return run

    def _may_join(self, store: Store, run: PublishedRun) -> bool:
        """Claim this node's rank. Returns False if the run is over. Raises RendezvousFailed if this node is refused."""
        if is_over(store):
            self._status = f"waiting for {run} at {self._address} to end"
            return False
        if self._run_name and run.name != self._run_name:
            raise RendezvousFailed(
                f"{self._address}: in use by {run}, not by {self._run_name}; choose another --master-port"
            )
        if difference := differences(self._facts, run.facts):
            store.set("refused", f"{self._facts['node']}: {difference}")
            raise RendezvousFailed(
                f"{self._address}: in use by {run}: {difference}; make them equal, or choose another --master-port"
            )
        return self._claim(store, run)

    def _claim(self, store: Store, run: PublishedRun) -> bool:
        """Claim the node rank. Returns False if the run is over.

        If another node has claimed the rank, wait for a heartbeat of that node, then raise RendezvousFailed. If that
        node sends none, its heartbeat timeout ends the run.
        """
        before = read_value(store, f"heartbeat/{self.rank}")
        while not (self._closed or is_over(store)):
            key = f"member/{self.rank}"
            holder = decoded(key, store.compare_set(key, "", json.dumps(self._facts)), FACTS)
            if holder == self._facts:
                return True
            if read_value(store, f"heartbeat/{self.rank}") != before:
                raise RendezvousFailed(
                    f"{self._address}: in use by {run}: NODE_RANK {self.rank} is taken by {holder['node']}; "
                    "choose another NODE_RANK to join this run, or another --master-port to start a separate one"
                )
            self._status = f"waiting for {run} to end: {holder['node']} sends no heartbeats"
            time.sleep(JOIN_INTERVAL)
        return False

    # ---------------------------------------------------------------- the thread: as a member

    def _update(self) -> None:
        """One round: send the outbox and a heartbeat, then read what the other nodes have sent."""
        assert self._store
        while not self._outbox.empty():
            key, value = self._outbox.get()
            if key == "end":  # only the first report takes effect
                publish_end(self._store, value)
            elif key == "closing" and self._coordinator:
                self._coordinator.close(self._end)
            else:
                self._store.set(key, json.dumps(value))
            self._has_left = self._has_left or (key == f"left/{self.rank}" and not self._coordinator)
        if self._has_left and not self._coordinator:  # the first node continues: the other nodes need its store
            self._closed = True
            return
        self._store.set(f"heartbeat/{self.rank}", json.dumps(time.monotonic()))
        if self._coordinator:
            self._coordinator.update(self._end)
            self.members, self._missing = self._coordinator.members, self._coordinator.missing
            keys = [f"left/{rank}" for rank in self._live_ranks() - {0}]
            self._has_left = self._leaving and has_keys(self._store, keys)
        elif not self._complete and self._rounds % MISSING_ROUNDS == 0:
            self._missing = read_value(self._store, "missing", Missing) or self._missing
        self._rounds += 1
        if (news := self._store.add(NEWS, 0)) != self._news:
            self._news = news
            self._read_news(self._store)

    def _read_news(self, store: Store) -> None:
        """Read the keys that all nodes read."""
        if not self._complete and store.check(["members"]):
            self.members = self._coordinator.members if self._coordinator else self._read_members(store)
            self.ranks = read_value(store, f"ranks/{self.rank}", Ranks)
            self._complete = True
        self.first_end = self.first_end or read_end(store)
        if self.first_end and not self._end:  # never write None: the agent may report the end at the same time
            self._end = self.first_end
        self._all_done = self._all_done or bool(read_value(store, "all done"))
        if self._end and (shared := read_value(store, "records", {"complete": bool, "records": Mapping[str, object]})):
            self.records = {
                rank: records_of(member["node"], self._ranks_of(rank), shared["records"].get(str(rank), {}))
                for rank, member in self.members.items()
                if rank != self.rank
            }
            self._has_records = shared["complete"]
        if not self._coordinator and read_value(store, "closing"):
            self._closed = True

    def _ranks_of(self, rank: int) -> range:
        """The ranks that another node can have. Only the first node knows how many each node has."""
        if self._coordinator:
            return self._coordinator.ranks.get(rank, range(0))
        if not self.ranks:
            return range(0)
        end = self.ranks.first + int(self._facts.get("ranks", "1"))
        return range(self.ranks.first) if rank < self.rank else range(end, self.ranks.total)

    def _read_members(self, store: Store) -> dict[int, MemberFacts]:
        """All members, with their names only. Names are read from the store only if the launcher passed none."""
        names = list(self._names.values()) if len(self._names) == self.size else read_value(store, "members", [NAME])
        if len(names) != self.size:
            raise ValueError(f"members: {len(names)} names, expected {self.size}")
        return {rank: {"node": name} for rank, name in enumerate(names)}

    # ---------------------------------------------------------------- used by the agent and the thread

    def _send(self, key: str, value: object) -> None:
        self._outbox.put((key, value))
        self._wake.set()

    def _progress(self, seconds: float) -> str:
        """The message that is due `seconds` after the last one; "" for none."""
        if not self._store:
            return self._status if seconds >= UNJOINED_REPORT_INTERVAL else ""
        # A launcher that has passed the names shows the output of all nodes, so only the first node reports.
        reports = self._coordinator or not self._names
        return self._missing_nodes() if self._missing.count and reports and seconds >= REPORT_INTERVAL else ""

    def _missing_nodes(self) -> str:
        missing = self._missing
        shown = [self._names.get(rank, f"node rank {rank}") for rank in missing.ranks[:SHOWN_MISSING]]
        more = f" and {missing.count - len(shown):,} more" if missing.count > len(shown) else ""
        return f"{self.size - missing.count} of {self.size} nodes joined, waiting for {', '.join(shown)}{more}"

    def _live_ranks(self) -> set[int]:
        return live_ranks(self.members, self._end)

    def _wait(self, condition: Callable[[], bool], timeout: float) -> None:
        deadline = self._clock.now() + timeout
        while not (condition() or self._closed) and self._clock.now() < deadline:
            if self._store and self._clock.now() - self._last_contact >= HEARTBEAT_TIMEOUT:
                return
            time.sleep(JOIN_INTERVAL)


class Coordinator:
    """The first node's additional work as host of the store: it tracks which nodes join, send heartbeats and finish."""

    def __init__(self, store: Store, size: int, clock: RunningClock) -> None:
        self.members: dict[int, MemberFacts] = {}
        self.ranks: dict[int, range] = {}  # of each node, by node rank; empty until all have joined
        self.missing = Missing(size, range(size)[:SHOWN_MISSING])
        self.refused = ""  # the last refused node, and why
        self._store, self._size, self._clock = store, size, clock
        self._heartbeats: dict[int, tuple[bytes, float]] = {}  # node rank -> last heartbeat, and when it changed
        self._records: dict[int, Records] = {}  # by node rank
        self._share_at = math.inf  # when records are shared even if some are missing
        self._lost = self._all_done = self._shared = False
        allow_open_files()

    def update(self, end: RunEnd | None) -> None:
        """Do one round. end: why the run has to stop; None if it may continue."""
        if len(self.members) < self._size:
            self._admit()
        if not self._lost and (lost := self._without_heartbeat(HEARTBEAT_TIMEOUT)):
            self._lost = True
            publish_end(self._store, asdict(lost_node(self.members, lost[0])))
        if not self._all_done and has_keys(self._store, [f"done/{rank}" for rank in range(self._size)]):
            self._all_done = True
            publish_news(self._store, "all done", True)
        if end and not self._shared:
            self._collect_records(end)

    def close(self, end: RunEnd | None) -> None:
        """Publish that the store closes, and the records that have arrived."""
        if end and not self._shared:
            self._share_at = 0.0
            self._collect_records(end)
        publish_news(self._store, "closing", True)

    def _admit(self) -> None:
        absent = [rank for rank in range(self._size) if rank not in self.members]
        for rank, facts in read_all(self._store, "member", absent):
            self.members[rank] = decoded(f"member/{rank}", facts, FACTS)
        absent = [rank for rank in absent if rank not in self.members]
        self.missing = Missing(len(absent), absent[:SHOWN_MISSING])
        self._store.set("missing", json.dumps(asdict(self.missing)))
        if self._store.check(["refused"]):
            self.refused = bounded(self._store.get("refused").decode(errors="replace"))
        if not absent and not read_end(self._store):
            sizes = [int(self.members[rank].get("ranks", "1")) for rank in range(self._size)]
            firsts = list(itertools.accumulate(sizes, initial=0))
            self.ranks = {rank: range(*firsts[rank : rank + 2]) for rank in range(self._size)}
            ranks = [json.dumps({"first": first, "total": sum(sizes)}) for first in firsts]
            for some in blocks(range(self._size)):
                keys = [f"ranks/{rank}" for rank in some]
                self._store.multi_set(keys, [ranks[rank] for rank in some])  # type: ignore[attr-defined]
            publish_news(self._store, "members", [self.members[rank]["node"] for rank in range(self._size)])

    def _without_heartbeat(self, seconds: float) -> list[int]:
        """Node ranks whose heartbeat has not changed for this long."""
        ranks = sorted(set(self.members) - {0})
        heartbeats = dict(read_all(self._store, "heartbeat", ranks))
        now = self._clock.now()
        for rank in ranks:
            heartbeat = heartbeats.get(rank, b"")
            if self._heartbeats.get(rank, (None, now))[0] != heartbeat:
                self._heartbeats[rank] = (heartbeat, now)
        return [r for r in ranks if now - self._heartbeats[r][1] > seconds and not self._store.check([f"left/{r}"])]

    def _collect_records(self, end: RunEnd) -> None:
        """Share all failure records or, shortly before the nodes stop waiting, those that have arrived."""
        live, now = live_ranks(self.members, end), self._clock.now()
        for rank, records in read_all(self._store, "records", sorted(live - self._records.keys())):
            self._records[rank] = records_of(self.members[rank]["node"], self.ranks.get(rank, range(0)), records)
            self._share_at = min(self._share_at, now + RECORDS_TIMEOUT - 2 * HEARTBEAT_INTERVAL)
        self._shared = live <= self._records.keys()
        if self._shared or now >= self._share_at:
            self._share_at = math.inf
            ranks = sorted(self._records, key=lambda rank: (self.members[rank]["node"] != end.node, self._failed(rank)))
            shared = {rank: self._records[rank] for rank in ranks[:SHARED_RECORDS]}
            publish_news(self._store, "records", {"complete": self._shared, "records": shared})

    def _failed(self, rank: int) -> float:
        """Unix seconds of the first failure of this node; infinite if none of its ranks failed by itself."""
        return first_failure(self._records[rank]).get("time", math.inf)


def allow_open_files() -> None:
    """Raise the limit of open files, often 1,024: 100 nodes with 8 ranks need more. Ranks do not inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MAX_FILES)), hard))


# ---------------------------------------------------------------- contents of the store


def tcp_store(address: str, port: int, nodes: int, is_master: bool, timeout: timedelta) -> TCPStore:
    """Serve a store, or connect to it, without waiting for others. port: 0 for any free one.

    Stores have no passwords, and listen on all interfaces. That of a single node listens on LOOPBACK only.
    """
    listening = None
    if nodes == 1 and is_master:
        server = socket.create_server((LOOPBACK, port))
        port, listening = server.getsockname()[1], server.detach()
    address = LOOPBACK if nodes == 1 else address
    return TCPStore(
        address, port, is_master=is_master, timeout=timeout, wait_for_workers=False, master_listen_fd=listening
    )


def publish(root: Store, name: str, facts: MemberFacts, size: int = 1) -> PublishedRun:
    """Publish a run of `size` nodes at the root of the first node's store."""
    run = PublishedRun(uuid.uuid4().hex, name, int(time.time()), facts)
    if size > 1:
        store = PrefixStore(f"muster/{run.id}", root)
        for kind in ("member", "heartbeat", "records"):  # Store.multi_get() waits until all keys exist
            for keys in blocks([f"{kind}/{rank}" for rank in range(size)]):
                store.multi_set(keys, [""] * len(keys))  # type: ignore[attr-defined]
    root.set(RUN_KEY, json.dumps(asdict(run)))
    return run


def read_run(root: Store) -> PublishedRun | None:
    """The published run, or None."""
    run = read_value(root, RUN_KEY, RUN)
    return PublishedRun(**run) if run else None


def membership_store(root: Store, run: PublishedRun) -> Store:
    """The part of the store with the keys of this run's membership."""
    return PrefixStore(f"muster/{run.id}", root)


def is_over(store: Store) -> bool:
    """Whether the run is ending: no node can join it."""
    return store.check(["end"]) or store.check(["all done"])


def differences(facts: MemberFacts, first: MemberFacts) -> str:
    """The differences between this node and the first one as text; "" when there are none."""
    names = [name for name in first if name not in OWN_FACTS and facts.get(name) != first[name]]
    return ", ".join(f"{name} {facts.get(name)}, but {first[name]} on {first['node']}" for name in names)


def lost_node(members: Mapping[int, MemberFacts], rank: int) -> RunEnd:
    """The end of a run because the heartbeats of this node timed out."""
    name = members[rank]["node"] if rank in members else f"node rank {rank}"
    return RunEnd(name, UNFIT, "connection lost", lost=True)


def live_ranks(members: Mapping[int, MemberFacts], end: RunEnd | None) -> set[int]:
    """The node ranks of the members that are not lost."""
    lost = end.node if end and end.lost else None
    return {rank for rank, facts in members.items() if facts["node"] != lost}


def read_end(store: Store) -> RunEnd | None:
    """The reported end of the run, or None."""
    end = read_value(store, "end", END)
    return RunEnd(**end | {"reason": bounded(end["reason"])}) if end else None


def read_value(store: Store, key: str, kind: Any = object) -> Any:
    """The value of a key, or None. kind: see trust.checked(). Raises ValueError, which names the key."""
    value = store.get(key) if store.check([key]) else b""
    return decoded(key, value, kind) if value else None


def decoded(key: str, value: bytes, kind: Any) -> Any:
    try:
        return checked(kind, parse_json(value))
    except ValueError as error:
        raise ValueError(f"invalid data in the store ({key}: {error})") from None


def read_all(store: Store, kind: str, ranks: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Yield node ranks and values of the keys KIND/RANK that have a value. publish() has created the keys."""
    for some in blocks(ranks):
        values = store.multi_get([f"{kind}/{rank}" for rank in some])
        yield from ((rank, value) for rank, value in zip(some, values, strict=True) if value)


def has_keys(store: Store, keys: Sequence[str]) -> bool:
    """Whether all these keys exist."""
    return all(store.check(some) for some in blocks(keys))


def blocks(values: Sequence[T]) -> Iterator[list[T]]:
    return (list(values[start : start + KEYS_PER_CALL]) for start in range(0, len(values), KEYS_PER_CALL))


def publish_news(store: Store, key: str, value: object) -> None:
    """Set a key that all nodes read."""
    store.set(key, json.dumps(value))
    store.add(NEWS, 1)


def publish_end(store: Store, end: object) -> None:
    """Publish why the run ends, unless a node has done so already. end: a RunEnd as a dictionary."""
    store.compare_set("end", "", json.dumps(end))
    store.add(NEWS, 1)
