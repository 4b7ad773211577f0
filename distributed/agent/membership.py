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

INTERVAL = 0.5  # seconds between two heartbeats
FAST = 0.05  # the same, while the nodes join and finish
HEARTBEAT_TIMEOUT = 12.0  # seconds
RETRY = 0.2  # seconds between two attempts to find the first node
REPORT = 5.0  # seconds between two lines about missing nodes
REPORT_UNJOINED = 15.0  # seconds between two lines of a node that has not joined
RECORDS_TIMEOUT = 4.0  # seconds in which all nodes send their failure records
CLOSING = 1.0  # seconds for the thread to end
LEAVING = 2.0  # seconds that the first node waits for the others to leave
RUN = "muster/run"  # key: whose store it is

Facts = Mapping[str, str]  # a node's name under "node", and what must be the same on all nodes


@dataclass(frozen=True)
class Run:
    """A run, as its first node publishes it at the store."""

    id: str  # another one after each start
    name: str
    started: float  # unix seconds
    facts: Facts  # of the first node

    def __str__(self) -> str:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"run {self.name} (first node {self.facts['node']}, started {started})"


@dataclass(frozen=True)
class End:
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
        facts: Facts,
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
        self.run: Run | None = None  # once it is known
        self.members: dict[int, Facts] = {}  # nodes that have joined, as far as known
        self.records: dict[int, Records] = {}  # of the other nodes, once the run has failed
        self._facts = {**facts, "process": uuid.uuid4().hex}
        self._address, self._connect, self._run_name = address, connect, run_name
        self._names = dict(enumerate(names))
        self._absent = list(range(size))  # node ranks
        self._store: Store | None = None  # below the run's name, once this node has joined
        self._host: Host | None = None
        self._obstacle = f"waiting for the first node at {address}"  # until this node has joined
        self._refusal: RendezvousFailed | None = None
        self._end: End | None = None
        self._complete = self._all_done = self._leaving = self._gone = self._closed = False
        self._last_contact = time.monotonic()
        self._outbox: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="membership")
        self._thread.start()

    # ---------------------------------------------------------------- called by the agent

    def gather(self, timeout: float, log: Callable[[str], None]) -> Run:
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
                    raise RendezvousFailed(f"{self._obstacle}; gave up after {timeout:.0f} s", TIMED_OUT)
                self.report_end(
                    End(self._facts["node"], TIMED_OUT, f"{self._missing()}: gave up after {timeout:.0f} s")
                )
            if end := self.end():
                self.leave()
                raise RendezvousFailed(f"{end.node}: {end.reason}", end.exit_code)
            if self._host and self._host.refused != refused:
                refused, reported = self._host.refused, now
                log(f"refused {refused}; {self._missing()}")
            elif line := self._progress(now - reported):
                reported = now
                log(f"{line}, {now - begun:.0f} s")
            time.sleep(FAST)
        assert self.run
        return self.run

    def end(self) -> End | None:
        """Why the run cannot go on, if it cannot."""
        if self._end is None and self._store and time.monotonic() - self._last_contact > HEARTBEAT_TIMEOUT:
            self._end = lost(self.members, 0)
        return self._end

    def report_end(self, end: End) -> None:
        """End the run on all nodes, if this node has joined it. The first report counts."""
        self._end = self._end or end
        self._send("end", asdict(end))

    def finish(self, timeout: float = math.inf) -> End | None:
        """The ranks of this node ended well: wait until those of all nodes have, or the run has failed.

        Raises TimeoutError after so many seconds; this node has not left then.
        """
        self._send(f"done/{self.rank}", True)
        self._leaving = True
        until = time.monotonic() + timeout
        while not self._all_done and self.end() is None:
            if time.monotonic() >= until:
                raise TimeoutError
            time.sleep(FAST)
        self.leave()
        return self._end

    def leave(self, records: Records | None = None, collect: bool = False) -> None:
        """Send this node's failure records and leave. Takes LEAVING seconds at most.

        collect: before that, wait for the records of the others, for at most RECORDS_TIMEOUT.
        """
        self._leaving = True
        self._send(f"records/{self.rank}", records or {})
        if collect:
            self._wait(lambda: self._living() <= {self.rank, *self.records}, RECORDS_TIMEOUT)
        # The first node, which has the store, leaves last.
        self._send(f"left/{self.rank}", True)
        self._wait(lambda: self._gone or not self._store, LEAVING)
        if self._host and not self._gone:
            self._send("closing", True)
            self._wait(lambda: False, 2 * INTERVAL)
        self.close()

    def close(self) -> None:
        """Stop the heartbeats. A thread that is in the store's code when Python ends would abort the process."""
        self._closed = True
        self._wake.set()
        self._thread.join(CLOSING)

    # ---------------------------------------------------------------- the thread: joining

    def _work(self) -> None:
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
                self._wake.wait(INTERVAL if self._complete and not self._leaving else FAST)
                self._wake.clear()
        except RuntimeError:  # from the store: the first node is gone
            self._end = self._end or lost(self.members, 0)

    def _try_to_join(self) -> None:
        try:
            root = self._connect()
            if self.rank == 0:
                self.run = publish(root, self._run_name, self._facts)
            else:
                self.run = self._find_run(root)
            store = keys_of(root, self.run)
            if self._fits(store, self.run):
                self._last_contact = time.monotonic()
                self.members = {0: self.run.facts, self.rank: self._facts}
                self._host = Host(store, self.size) if self.rank == 0 else None
                self._store = store
                return
        except (OSError, RuntimeError):  # nobody listens there, or the store has just gone
            self._obstacle = f"waiting for the first node at {self._address}"
        self._wake.wait(RETRY)

    def _find_run(self, root: Store) -> Run:
        until = time.monotonic() + HEARTBEAT_TIMEOUT
        while not (run := read_run(root)):
            if time.monotonic() > until:
                raise RendezvousFailed(f"{self._address}: in use by another program; choose another --master-port")
            time.sleep(FAST)
        return run

    def _fits(self, store: Store, run: Run) -> bool:
        """Claim this node's rank in the run. False when the run is over. Raises RendezvousFailed when refused."""
        if is_over(store):
            self._obstacle = f"waiting for the first node at {self._address}, where {run} is ending"
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

    def _claim(self, store: Store, run: Run) -> bool:
        """The rank of a node that was killed is taken until it is lost, which ends its run. A living node keeps it."""
        before = ask(store, f"heartbeat/{self.rank}")
        while not (self._closed or is_over(store)):
            holder = json.loads(store.compare_set(f"member/{self.rank}", "", json.dumps(self._facts)))
            if holder == self._facts:
                return True
            if ask(store, f"heartbeat/{self.rank}") != before:
                raise RendezvousFailed(
                    f"{self._address}: in use by {run}: NODE_RANK {self.rank} is taken by {holder['node']}; "
                    "choose another --master-port for another run, another NODE_RANK for this one"
                )
            self._obstacle = f"waiting for the end of {run}: {holder['node']} sends no heartbeat"
            time.sleep(FAST)
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
            self._gone = self._gone or (key == f"left/{self.rank}" and not self._host)
        if self._gone and not self._host:  # the first node closes the store when all others have left
            self._closed = True
            return
        self._store.set(f"heartbeat/{self.rank}", json.dumps(time.monotonic()))
        if self._host:
            self._host.update()
            self.members = self._host.members
            left = [f"left/{rank}" for rank in self._living() - {0}]
            self._gone = self._leaving and (not left or self._store.check(left))
        if not self._complete:
            self._absent = ask(self._store, "absent") or []
        if not self._complete and (members := ask(self._store, "members")):
            self.members = {int(rank): facts for rank, facts in members.items()}
            self._complete = True
        self._end = self._end or read_end(self._store)
        self._all_done = self._all_done or bool(ask(self._store, "all done"))
        if self._end and self._leaving:
            for rank in set(self.members) - {self.rank, *self.records}:
                if (records := ask(self._store, f"records/{rank}")) is not None:
                    self.records[rank] = records
        self._closed = self._closed or (not self._host and bool(ask(self._store, "closing")))

    # ---------------------------------------------------------------- used by both

    def _send(self, key: str, value: object) -> None:
        self._outbox.put((key, value))
        self._wake.set()

    def _progress(self, seconds: float) -> str:
        """The line to log when none was logged for so long."""
        if not self._store:
            return self._obstacle if seconds >= REPORT_UNJOINED else ""
        reports = self._host or not self._names  # a launcher that knows the names shows the lines of all nodes at once
        return self._missing() if self._absent and reports and seconds >= REPORT else ""

    def _missing(self) -> str:
        missing = [self._names.get(rank, f"node rank {rank}") for rank in self._absent]
        return f"{self.size - len(missing)} of {self.size} nodes joined, waiting for {', '.join(missing)}"

    def _living(self) -> set[int]:
        gone = self._end.node if self._end and self._end.lost else None
        return {rank for rank, facts in self.members.items() if facts["node"] != gone}

    def _wait(self, condition: Callable[[], bool], timeout: float) -> None:
        until = time.monotonic() + timeout
        while not (condition() or self._closed) and time.monotonic() < until:
            if self._store and time.monotonic() - self._last_contact >= HEARTBEAT_TIMEOUT:
                return
            time.sleep(FAST)


class Host:
    """What the first node does for all, as it has the store: check which nodes join, send heartbeats, and are done."""

    def __init__(self, store: Store, size: int) -> None:
        self.members: dict[int, Facts] = {}
        self.refused = ""  # the node that was refused last, and why
        self._store, self._size = store, size
        self._heartbeats: dict[int, tuple[bytes, float]] = {}  # of each node: the last one, and when it was new

    def update(self) -> None:
        if len(self.members) < self._size:
            self._admit()
        for rank in self._without_heartbeat(HEARTBEAT_TIMEOUT):
            self._store.compare_set("end", "", json.dumps(asdict(lost(self.members, rank))))
        if self._store.check([f"done/{rank}" for rank in range(self._size)]):
            self._store.set("all done", "true")

    def _admit(self) -> None:
        for rank in set(range(self._size)) - set(self.members):
            if facts := ask(self._store, f"member/{rank}"):
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


def publish(root: Store, name: str, facts: Facts) -> Run:
    """Publish the run at the root of the first node's store."""
    run = Run(uuid.uuid4().hex, name, time.time(), facts)
    root.set(RUN, json.dumps(asdict(run)))
    return run


def read_run(root: Store) -> Run | None:
    """The run that is published there, None when there is none."""
    published = ask(root, RUN)
    return Run(**published) if published else None


def keys_of(root: Store, run: Run) -> Store:
    """The part of the store that belongs to the membership of this run."""
    return PrefixStore(f"muster/{run.id}", root.clone())  # type: ignore[attr-defined]


def is_over(store: Store) -> bool:
    """Whether the run is ending, so that no node can join it."""
    return store.check(["end"]) or store.check(["all done"])


def differences(facts: Facts, first: Facts) -> str:
    """What differs between this node and the first one; empty when nothing does."""
    odd = [what for what in first if what not in ("node", "process") and facts.get(what) != first[what]]
    return ", ".join(f"{what} {facts.get(what)}, but {first[what]} on {first['node']}" for what in odd)


def lost(members: Mapping[int, Facts], rank: int) -> End:
    """The end of a run because this node sends no heartbeats any more."""
    return End(members[rank]["node"] if rank in members else f"node rank {rank}", UNFIT, "connection lost", lost=True)


def read_end(store: Store) -> End | None:
    """The end of the run, once it is reported."""
    end = ask(store, "end")
    return End(**end) if end else None


def ask(store: Store, key: str) -> Any:
    """The value of a key, None when there is none."""
    return json.loads(store.get(key)) if store.check([key]) else None
