"""Membership of a run on several nodes: joining, heartbeats, the end of the run, exchange of failure records.

torchrun's agents exchange nothing after the rendezvous: when a rank fails on one node, the others wait until their
collectives time out, for 10 to 30 minutes. Here each agent sends heartbeats through the store of the first node, and
the first agent that must stop writes the end of the run. The other agents read it within a second. A node is lost
after HEARTBEAT_TIMEOUT without heartbeats. At the end the agents exchange failure records, so that each node has the
record of the first failure.

The keys of a run have its id as a prefix. A refused node exits and writes at most the key "refused", whose value the
first node logs; the run continues.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import PrefixStore, Store

from distributed.agent.failure_records import Records
from distributed.exit_codes import TIMED_OUT, UNFIT

HEARTBEAT_INTERVAL = 0.5  # seconds
JOIN_INTERVAL = 0.05  # seconds between heartbeats while nodes join or finish
HEARTBEAT_TIMEOUT = 12.0  # seconds
RETRY_INTERVAL = 0.2  # seconds between attempts to connect to the first node
REPORT_INTERVAL = 5.0  # seconds between messages about missing nodes
UNJOINED_REPORT_INTERVAL = 15.0  # seconds between messages of a node that has not joined
RECORDS_TIMEOUT = 4.0  # seconds to wait for the failure records of all nodes
CLOSE_TIMEOUT = 1.0  # seconds to wait for the thread
LEAVE_TIMEOUT = 2.0  # seconds to wait until the thread has written that this node left; first node: until all left
RUN_KEY = "muster/run"  # the PublishedRun that owns the store

MemberFacts = Mapping[str, str]  # those in OWN_FACTS are of this node; the other values must be equal on all nodes
OWN_FACTS = ("node", "attempt", "process")


@dataclass(frozen=True)
class PublishedRun:
    """A run as its first node publishes it in the store."""

    id: str  # new after each restart
    name: str
    started: float  # Unix seconds
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
        self.run: PublishedRun | None = None  # set when found
        self.members: dict[int, MemberFacts] = {}  # known members, by node rank
        self.records: dict[int, Records] = {}  # of the other nodes, after a failure
        self._facts = {**facts, "process": uuid.uuid4().hex}
        self._address, self._connect, self._run_name = address, connect, run_name
        self._names = dict(enumerate(names))
        self._missing_ranks = list(range(size))  # node ranks
        self._store: Store | None = None  # with the prefix of the run; set when this node has joined
        self._coordinator: Coordinator | None = None
        self._status = f"waiting for the first node at {address}"  # while this node has not joined
        self._refusal: RendezvousFailed | None = None
        self._end: RunEnd | None = None
        self._complete = self._all_done = self._leaving = self._has_left = self._closed = False
        self._last_contact = time.monotonic()
        self._outbox: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, daemon=True, name="membership")
        self._thread.start()

    # ---------------------------------------------------------------- called by the agent

    def wait_for_all(self, timeout: float, log: Callable[[str], None]) -> PublishedRun:
        """Wait until all nodes have joined.

        Raises RendezvousFailed after `timeout` seconds, when this node is refused, or when another node ends the run.
        """
        reported = started = time.monotonic()
        refused = ""
        while not self._complete:
            now = time.monotonic()
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
        if self._end is None and self._store and time.monotonic() - self._last_contact > HEARTBEAT_TIMEOUT:
            self._end = lost_node(self.members, 0)
        return self._end

    def report_end(self, end: RunEnd) -> None:
        """End the run on all nodes, if this node has joined it. Only the first report takes effect."""
        self._end = self._end or end
        self._send("end", asdict(end))

    def finish(self, timeout: float = math.inf) -> RunEnd | None:
        """Report that the ranks of this node succeeded. Wait for all nodes, or for the end of the run, then leave.

        Returns why the run has to stop; None if all nodes succeeded. Raises TimeoutError after `timeout` seconds,
        without leaving.
        """
        self._send(f"done/{self.rank}", True)
        self._leaving = True
        deadline = time.monotonic() + timeout
        while not self._all_done and self.end() is None:
            if time.monotonic() >= deadline:
                raise TimeoutError
            time.sleep(JOIN_INTERVAL)
        self.leave()
        return self._end

    def leave(self, records: Records | None = None, collect: bool = False) -> None:
        """Send this node's failure records and leave.

        Takes up to LEAVE_TIMEOUT + CLOSE_TIMEOUT; on the first node 2 * HEARTBEAT_INTERVAL more if a node has not left.
        collect: first wait up to RECORDS_TIMEOUT for the records of the others.
        """
        self._leaving = True
        self._send(f"records/{self.rank}", records or {})
        if collect:
            self._wait(lambda: self._live_ranks() <= {self.rank, *self.records}, RECORDS_TIMEOUT)
        # The first node hosts the store, so it leaves last.
        self._send(f"left/{self.rank}", True)
        self._wait(lambda: self._has_left or not self._store, LEAVE_TIMEOUT)
        if self._coordinator and not self._has_left:
            self._send("closing", True)
            self._wait(lambda: False, 2 * HEARTBEAT_INTERVAL)
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
        try:
            while not self._closed:
                self._update()
                self._last_contact = time.monotonic()
                self._wake.wait(HEARTBEAT_INTERVAL if self._complete and not self._leaving else JOIN_INTERVAL)
                self._wake.clear()
        except RuntimeError:  # from the store: the first node is lost
            self._end = self._end or lost_node(self.members, 0)

    def _try_to_join(self) -> None:
        try:
            root = self._connect()
            # A clone first: if the next store takes the place of this one meanwhile, reading from `root` fails.
            own = root.clone()  # type: ignore[attr-defined]
            if self.rank == 0:
                self.run = publish(root, self._run_name, self._facts)
            else:
                self.run = self._find_run(root)
            store = membership_store(own, self.run)
            if self._may_join(store, self.run):
                self._last_contact = time.monotonic()
                self.members = {0: self.run.facts, self.rank: self._facts}
                self._coordinator = Coordinator(store, self.size) if self.rank == 0 else None
                self._store = store
                return
        except (OSError, RuntimeError):  # no store there, or it has just closed
            self._status = f"waiting for the first node at {self._address}"
        self._wake.wait(RETRY_INTERVAL)

    def _find_run(self, root: Store) -> PublishedRun:
        deadline = time.monotonic() + HEARTBEAT_TIMEOUT
        while not (run := read_run(root)):
            if time.monotonic() > deadline:
                raise RendezvousFailed(f"{self._address}: in use by another program; choose another --master-port")
            time.sleep(JOIN_INTERVAL)
        return run

    def _may_join(self, store: Store, run: PublishedRun) -> bool:
        """Claim this node's rank in the run. False: the run is over. Raises RendezvousFailed when refused."""
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
        """Claim the node rank. False: the run is over.

        If another node has claimed it and sends no heartbeats, wait: the loss of that node will end the run. Raises
        RendezvousFailed when that node sends a heartbeat.
        """
        before = read_value(store, f"heartbeat/{self.rank}")
        while not (self._closed or is_over(store)):
            holder = json.loads(store.compare_set(f"member/{self.rank}", "", json.dumps(self._facts)))
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
        """Send the outbox and a heartbeat, then read what the other nodes have sent."""
        assert self._store
        while not self._outbox.empty():
            key, value = self._outbox.get()
            if key == "end":  # only the first report takes effect
                self._store.compare_set(key, "", json.dumps(value))
            else:
                self._store.set(key, json.dumps(value))
            self._has_left = self._has_left or (key == f"left/{self.rank}" and not self._coordinator)
        if self._has_left and not self._coordinator:  # the first node closes the store when all others have left
            self._closed = True
            return
        self._store.set(f"heartbeat/{self.rank}", json.dumps(time.monotonic()))
        if self._coordinator:
            self._coordinator.update()
            self.members = self._coordinator.members
            keys = [f"left/{rank}" for rank in self._live_ranks() - {0}]
            self._has_left = self._leaving and (not keys or self._store.check(keys))
        if not self._complete:
            self._missing_ranks = read_value(self._store, "absent") or []
        if not self._complete and (members := read_value(self._store, "members")):
            self.members = {int(rank): facts for rank, facts in members.items()}
            self._complete = True
        self._end = self._end or read_end(self._store)
        self._all_done = self._all_done or bool(read_value(self._store, "all done"))
        if self._end and self._leaving:
            for rank in set(self.members) - {self.rank, *self.records}:
                if (records := read_value(self._store, f"records/{rank}")) is not None:
                    self.records[rank] = records
        self._closed = self._closed or (not self._coordinator and bool(read_value(self._store, "closing")))

    # ---------------------------------------------------------------- used by the agent and the thread

    def _send(self, key: str, value: object) -> None:
        self._outbox.put((key, value))
        self._wake.set()

    def _progress(self, seconds: float) -> str:
        """The message that is due `seconds` after the last one; "" for none."""
        if not self._store:
            return self._status if seconds >= UNJOINED_REPORT_INTERVAL else ""
        # A launcher that passes the names shows the output of all nodes: one report is enough.
        reports = self._coordinator or not self._names
        return self._missing_nodes() if self._missing_ranks and reports and seconds >= REPORT_INTERVAL else ""

    def _missing_nodes(self) -> str:
        missing = [self._names.get(rank, f"node rank {rank}") for rank in self._missing_ranks]
        return f"{self.size - len(missing)} of {self.size} nodes joined, waiting for {', '.join(missing)}"

    def _live_ranks(self) -> set[int]:
        lost = self._end.node if self._end and self._end.lost else None
        return {rank for rank, facts in self.members.items() if facts["node"] != lost}

    def _wait(self, condition: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not (condition() or self._closed) and time.monotonic() < deadline:
            if self._store and time.monotonic() - self._last_contact >= HEARTBEAT_TIMEOUT:
                return
            time.sleep(JOIN_INTERVAL)


class Coordinator:
    """The first node's additional work as host of the store: it tracks which nodes join, send heartbeats and finish."""

    def __init__(self, store: Store, size: int) -> None:
        self.members: dict[int, MemberFacts] = {}
        self.refused = ""  # the last refused node, and why
        self._store, self._size = store, size
        self._heartbeats: dict[int, tuple[bytes, float]] = {}  # node rank -> last heartbeat, time of the change

    def update(self) -> None:
        if len(self.members) < self._size:
            self._admit()
        for rank in self._without_heartbeat(HEARTBEAT_TIMEOUT):
            self._store.compare_set("end", "", json.dumps(asdict(lost_node(self.members, rank))))
        if self._store.check([f"done/{rank}" for rank in range(self._size)]):
            self._store.set("all done", "true")

    def _admit(self) -> None:
        for rank in set(range(self._size)) - set(self.members):
            if facts := read_value(self._store, f"member/{rank}"):
                self.members[rank] = facts
        self._store.set("absent", json.dumps(sorted(set(range(self._size)) - set(self.members))))
        if self._store.check(["refused"]):
            self.refused = self._store.get("refused").decode()
        if len(self.members) == self._size and not read_end(self._store):
            self._store.set("members", json.dumps(self.members))

    def _without_heartbeat(self, seconds: float) -> list[int]:
        """Node ranks whose heartbeat has not changed for this long."""
        ranks = sorted(set(self.members) - {0})
        keys = [f"heartbeat/{rank}" for rank in ranks]
        heartbeats = [self._store.get(key) if self._store.check([key]) else b"" for key in keys]
        now = time.monotonic()
        for rank, heartbeat in zip(ranks, heartbeats, strict=True):
            if self._heartbeats.get(rank, (None, now))[0] != heartbeat:
                self._heartbeats[rank] = (heartbeat, now)
        return [r for r in ranks if now - self._heartbeats[r][1] > seconds and not self._store.check([f"left/{r}"])]


# ---------------------------------------------------------------- contents of the store


def publish(root: Store, name: str, facts: MemberFacts) -> PublishedRun:
    """Publish a run at the root of the first node's store."""
    run = PublishedRun(uuid.uuid4().hex, name, time.time(), facts)
    root.set(RUN_KEY, json.dumps(asdict(run)))
    return run


def read_run(root: Store) -> PublishedRun | None:
    """The published run, or None."""
    published = read_value(root, RUN_KEY)
    return PublishedRun(**published) if published else None


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


def read_end(store: Store) -> RunEnd | None:
    """The reported end of the run, or None."""
    end = read_value(store, "end")
    return RunEnd(**end) if end else None


def read_value(store: Store, key: str) -> Any:
    """The value of a key, or None."""
    return json.loads(store.get(key)) if store.check([key]) else None
