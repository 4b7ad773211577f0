"""Membership of a run on several nodes: join it, send heartbeats, learn of its end, exchange failure records.

torchrun's agents exchange nothing after the rendezvous: when a rank fails on one node, the others wait until their
collectives time out, for 10 to 30 minutes. Here each agent sends heartbeats through the store of the first node, and
the first agent that cannot go on ends the run. The others read that within a second; a node without heartbeats is lost
after HEARTBEAT_TIMEOUT. At the end the agents exchange their failure records, so that each finds the first failure.

All keys of a run are below its id. A node that is refused writes none that the members act upon: it exits, and the run
goes on.
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

HEARTBEAT_INTERVAL = 0.5  # seconds between two heartbeats
JOIN_INTERVAL = 0.05  # the same, while the nodes join and finish
HEARTBEAT_TIMEOUT = 12.0  # seconds
RETRY_INTERVAL = 0.2  # seconds between two attempts to find the first node
REPORT_INTERVAL = 5.0  # seconds between two lines about missing nodes
UNJOINED_REPORT_INTERVAL = 15.0  # seconds between two lines of a node that has not joined
RECORDS_TIMEOUT = 4.0  # seconds in which all nodes send their failure records
CLOSE_TIMEOUT = 1.0  # seconds for the thread to end
LEAVE_TIMEOUT = 2.0  # seconds that the first node waits for the others to leave
RUN_KEY = "muster/run"  # key: whose store it is

MemberFacts = Mapping[str, str]  # a node's name under "node", and what must be the same on all nodes


@dataclass(frozen=True)
class PublishedRun:
    """A run, as its first node publishes it at the store."""

    id: str  # another one after each start
    name: str
    started: float  # unix seconds
    facts: MemberFacts  # of the first node

    def __str__(self) -> str:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"run {self.name} (first node {self.facts['node']}, started {started})"


@dataclass(frozen=True)
class RunEnd:
    """The run cannot go on."""

    node: str  # where, or which is lost
    exit_code: int
    reason: str
    lost: bool = False  # no heartbeat of the node: it sends no failure records either


class RendezvousFailed(Exception):
    """The nodes did not gather, or this node was refused. The exit code of it."""

    def __init__(self, reason: str, exit_code: int = UNFIT) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


class Membership:
    """The agents of a run, seen from one of them.

    Only a thread of its own uses the store: a store that does not answer must not keep the agent from stopping its
    ranks.
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
        """rank: of this node, among size nodes. facts: its name under "node", and what must be the same on all.

        address: of the store, as HOST:PORT. connect: one attempt to connect to it; raises OSError or RuntimeError.
        run_name: required on the first node; on the others "" joins any run with the same facts.
        names: of all nodes, where they are known beforehand.
        """
        self.rank, self.size = rank, size
        self.run: PublishedRun | None = None  # once it is known
        self.members: dict[int, MemberFacts] = {}  # nodes that have joined, as far as known
        self.records: dict[int, Records] = {}  # of the other nodes, once the run has failed
        self._facts = {**facts, "process": uuid.uuid4().hex}
        self._address, self._connect, self._run_name = address, connect, run_name
        self._names = dict(enumerate(names))
        self._missing_ranks = list(range(size))  # node ranks
        self._store: Store | None = None  # below the run's name, once this node has joined
        self._coordinator: Coordinator | None = None
        self._waiting_for = f"waiting for the first node at {address}"  # until this node has joined
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
        """Return when all nodes have joined. Raises RendezvousFailed after `timeout` seconds, or when refused."""
        reported = begun = time.monotonic()
        refused = ""
        while not self._complete:
            now = time.monotonic()
            if self._refusal:
                self.close()
                raise self._refusal
            if now - begun > timeout:
                if not self._store:
                    self.close()
                    raise RendezvousFailed(f"{self._waiting_for}; gave up after {timeout:.0f} s", TIMED_OUT)
                self.report_end(
                    RunEnd(self._facts["node"], TIMED_OUT, f"{self._missing()}: gave up after {timeout:.0f} s")
                )
            if end := self.end():
                self.leave()
                raise RendezvousFailed(f"{end.node}: {end.reason}", end.exit_code)
            if self._coordinator and self._coordinator.refused != refused:
                refused, reported = self._coordinator.refused, now
                log(f"refused {refused}; {self._missing()}")
            elif line := self._progress(now - reported):
                reported = now
                log(f"{line}, {now - begun:.0f} s")
            time.sleep(JOIN_INTERVAL)
        assert self.run
        return self.run

    def end(self) -> RunEnd | None:
        """Why the run cannot go on, if it cannot."""
        if self._end is None and self._store and time.monotonic() - self._last_contact > HEARTBEAT_TIMEOUT:
            self._end = lost_node(self.members, 0)
        return self._end

    def report_end(self, end: RunEnd) -> None:
        """End the run on all nodes, if this node has joined it. The first report counts."""
        self._end = self._end or end
        self._send("end", asdict(end))

    def finish(self, timeout: float = math.inf) -> RunEnd | None:
        """The ranks of this node ended well: wait until those of all nodes have, or the run has failed.

        Raises TimeoutError after so many seconds; this node has not left then.
        """
        self._send(f"done/{self.rank}", True)
        self._leaving = True
        until = time.monotonic() + timeout
        while not self._all_done and self.end() is None:
            if time.monotonic() >= until:
                raise TimeoutError
            time.sleep(JOIN_INTERVAL)
        self.leave()
        return self._end

    def leave(self, records: Records | None = None, collect: bool = False) -> None:
        """Send this node's failure records and leave. Takes LEAVE_TIMEOUT seconds at most.

        collect: before that, wait for the records of the others, for at most RECORDS_TIMEOUT.
        """
        self._leaving = True
        self._send(f"records/{self.rank}", records or {})
        if collect:
            self._wait(lambda: self._live_ranks() <= {self.rank, *self.records}, RECORDS_TIMEOUT)
        # The first node, which has the store, leaves last.
        self._send(f"left/{self.rank}", True)
        self._wait(lambda: self._has_left or not self._store, LEAVE_TIMEOUT)
        if self._coordinator and not self._has_left:
            self._send("closing", True)
            self._wait(lambda: False, 2 * HEARTBEAT_INTERVAL)
        self.close()

    def close(self) -> None:
        """Stop the heartbeats. A thread that is in the store's code when Python ends would abort the process."""
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
        except RuntimeError:  # from the store: the first node is gone
            self._end = self._end or lost_node(self.members, 0)

    def _try_to_join(self) -> None:
        try:
            root = self._connect()
            if self.rank == 0:
                self.run = publish(root, self._run_name, self._facts)
            else:
                self.run = self._find_run(root)
            store = membership_store(root, self.run)
            if self._may_join(store, self.run):
                self._last_contact = time.monotonic()
                self.members = {0: self.run.facts, self.rank: self._facts}
                self._coordinator = Coordinator(store, self.size) if self.rank == 0 else None
                self._store = store
                return
        except (OSError, RuntimeError):  # nobody listens there, or the store has just gone
            self._waiting_for = f"waiting for the first node at {self._address}"
        self._wake.wait(RETRY_INTERVAL)

    def _find_run(self, root: Store) -> PublishedRun:
        until = time.monotonic() + HEARTBEAT_TIMEOUT
        while not (run := read_run(root)):
            if time.monotonic() > until:
                raise RendezvousFailed(f"{self._address}: in use by another program; choose another --master-port")
            time.sleep(JOIN_INTERVAL)
        return run

    def _may_join(self, store: Store, run: PublishedRun) -> bool:
        """Claim this node's rank in the run. False when the run is over. Raises RendezvousFailed when refused."""
        if is_over(store):
            self._waiting_for = f"waiting for the first node at {self._address}, where {run} is ending"
            return False
        if self._run_name and run.name != self._run_name:
            raise RendezvousFailed(
                f"{self._address}: in use by {run}, not by {self._run_name}; choose another --master-port"
            )
        if odd := differences(self._facts, run.facts):
            store.set("refused", f"{self._facts['node']}: {odd}")
            raise RendezvousFailed(
                f"{self._address}: in use by {run}: {odd}; make them equal, or choose another --master-port"
            )
        return self._claim(store, run)

    def _claim(self, store: Store, run: PublishedRun) -> bool:
        """The rank of a node that was killed is taken until it is lost, which ends its run. A living node keeps it."""
        before = read_value(store, f"heartbeat/{self.rank}")
        while not (self._closed or is_over(store)):
            holder = json.loads(store.compare_set(f"member/{self.rank}", "", json.dumps(self._facts)))
            if holder == self._facts:
                return True
            if read_value(store, f"heartbeat/{self.rank}") != before:
                raise RendezvousFailed(
                    f"{self._address}: in use by {run}: NODE_RANK {self.rank} is taken by {holder['node']}; "
                    "choose another --master-port for another run, another NODE_RANK for this one"
                )
            self._waiting_for = f"waiting for the end of {run}: {holder['node']} sends no heartbeat"
            time.sleep(JOIN_INTERVAL)
        return False

    # ---------------------------------------------------------------- the thread: as a member

    def _update(self) -> None:
        """Send what is in the outbox, and a heartbeat; then read what the others have sent."""
        assert self._store
        while not self._outbox.empty():
            key, value = self._outbox.get()
            if key == "end":  # the first report counts
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
            left = [f"left/{rank}" for rank in self._live_ranks() - {0}]
            self._has_left = self._leaving and (not left or self._store.check(left))
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

    # ---------------------------------------------------------------- used by both

    def _send(self, key: str, value: object) -> None:
        self._outbox.put((key, value))
        self._wake.set()

    def _progress(self, seconds: float) -> str:
        """The line to log when none was logged for so long."""
        if not self._store:
            return self._waiting_for if seconds >= UNJOINED_REPORT_INTERVAL else ""
        reports = (
            self._coordinator or not self._names
        )  # a launcher that knows the names shows the lines of all nodes at once
        return self._missing() if self._missing_ranks and reports and seconds >= REPORT_INTERVAL else ""

    def _missing(self) -> str:
        missing = [self._names.get(rank, f"node rank {rank}") for rank in self._missing_ranks]
        return f"{self.size - len(missing)} of {self.size} nodes joined, waiting for {', '.join(missing)}"

    def _live_ranks(self) -> set[int]:
        gone = self._end.node if self._end and self._end.lost else None
        return {rank for rank, facts in self.members.items() if facts["node"] != gone}

    def _wait(self, condition: Callable[[], bool], timeout: float) -> None:
        until = time.monotonic() + timeout
        while not (condition() or self._closed) and time.monotonic() < until:
            if self._store and time.monotonic() - self._last_contact >= HEARTBEAT_TIMEOUT:
                return
            time.sleep(JOIN_INTERVAL)


class Coordinator:
    """What the first node does for all, as it has the store: check which nodes join, send heartbeats, and are done."""

    def __init__(self, store: Store, size: int) -> None:
        self.members: dict[int, MemberFacts] = {}
        self.refused = ""  # the node that was refused last, and why
        self._store, self._size = store, size
        self._heartbeats: dict[int, tuple[bytes, float]] = {}  # of each node: the last one, and when it was new

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
        """The nodes whose heartbeat has not changed for so long."""
        ranks = sorted(set(self.members) - {0})
        keys = [f"heartbeat/{rank}" for rank in ranks]
        heartbeats = [self._store.get(key) if self._store.check([key]) else b"" for key in keys]
        now = time.monotonic()
        for rank, heartbeat in zip(ranks, heartbeats, strict=True):
            if self._heartbeats.get(rank, (None, now))[0] != heartbeat:
                self._heartbeats[rank] = (heartbeat, now)
        return [r for r in ranks if now - self._heartbeats[r][1] > seconds and not self._store.check([f"left/{r}"])]


# ---------------------------------------------------------------- the content of the store


def publish(root: Store, name: str, facts: MemberFacts) -> PublishedRun:
    """Publish the run at the root of the first node's store."""
    run = PublishedRun(uuid.uuid4().hex, name, time.time(), facts)
    root.set(RUN_KEY, json.dumps(asdict(run)))
    return run


def read_run(root: Store) -> PublishedRun | None:
    """The run that is published there, None when there is none."""
    published = read_value(root, RUN_KEY)
    return PublishedRun(**published) if published else None


def membership_store(root: Store, run: PublishedRun) -> Store:
    """The part of the store that belongs to the membership of this run."""
    return PrefixStore(f"muster/{run.id}", root.clone())  # type: ignore[attr-defined]


def is_over(store: Store) -> bool:
    """Whether the run is ending, so that no node can join it."""
    return store.check(["end"]) or store.check(["all done"])


def differences(facts: MemberFacts, first: MemberFacts) -> str:
    """What differs between this node and the first one; empty when nothing does."""
    odd = [what for what in first if what not in ("node", "process") and facts.get(what) != first[what]]
    return ", ".join(f"{what} {facts.get(what)}, but {first[what]} on {first['node']}" for what in odd)


def lost_node(members: Mapping[int, MemberFacts], rank: int) -> RunEnd:
    """The end of a run because this node sends no heartbeats any more."""
    return RunEnd(
        members[rank]["node"] if rank in members else f"node rank {rank}", UNFIT, "connection lost", lost=True
    )


def read_end(store: Store) -> RunEnd | None:
    """The end of the run, once it is reported."""
    end = read_value(store, "end")
    return RunEnd(**end) if end else None


def read_value(store: Store, key: str) -> Any:
    """The value of a key, None when there is none."""
    return json.loads(store.get(key)) if store.check([key]) else None
