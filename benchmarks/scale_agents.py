"""Simulate the membership of a run of many agents: part of benchmarks/scale.py.

The first node is a process with the real store, Membership and Coordinator. The other members are real Membership
objects in a few processes. They have no threads: the process calls step() of each member when it is due. SHARED (50)
members use one connection together. Each process counts the store operations of its members.
"""

from __future__ import annotations

import collections
import heapq
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from distributed.agent import membership
from distributed.agent.membership import Membership, RunEnd

SHARED = 50  # members on one connection
PROCESSES = 2  # that simulate members
TRAINING = 6.0  # seconds for which heartbeats are measured
RANKS = 8  # of each node, in the failure records
ROUNDS_PER_JOIN = 20  # while steps of joined members are due, only every 20th _step() lets another member join
TICK = os.sysconf("SC_CLK_TCK")
TRACEBACK = "Traceback (most recent call last):\n" + '  File "/home/ada/train.py", line 42, in train\n' * 20


@dataclass(frozen=True)
class Costs:
    """What a run of a given size costs, in seconds unless noted. None: the phase did not end within its time limit."""

    rendezvous: float | None
    rendezvous_cpu: float | None  # of the first node
    operations: float | None  # store operations per second of all nodes except the first, while the run trains
    cpu: float | None  # cores used by the first node, while the run trains
    stop: float | None  # from the first report that the run has ended until all agents know it
    records: float | None  # until all agents have the failure records and have left


class Counting:
    """A store that counts the operations on it."""

    operations = 0

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        Counting.operations += 1
        return getattr(self._store, name)


class Member(Membership):
    """A member without a thread: Simulation calls step()."""

    left_at = 0.0
    all_members: dict[int, membership.MemberFacts]
    _records_due = 0.0

    def _run_thread(self) -> None:
        """Start no thread."""

    def _read_members(self, store: Store) -> dict[int, membership.MemberFacts]:
        """Return the dictionary that all members of this process share."""
        return self.all_members

    def step(self) -> float:
        """Do what the thread of a Membership does and, after the end of the run, what the agent does.

        Returns the seconds until the next step.
        """
        if not self._store:
            self._try_to_join()
            return 0.0 if self._store else membership.JOIN_INTERVAL
        if not self._closed:
            self._update()
        now = time.monotonic()
        if self._end and not self._leaving:
            self._leaving, self._records_due = True, now + membership.RECORDS_TIMEOUT
            self._send(f"records/{self.rank}", failure_records(self.rank))
            return 0.0
        if self._records_due and (self._has_records or now > self._records_due):
            self._records_due = 0.0
            self._send(f"left/{self.rank}", True)
            return 0.0
        self.left_at = self.left_at or (now if self._has_left else 0.0)
        return self._interval()


def failure_records(rank: int) -> dict[str, Any]:
    """The records of a node on which one rank failed with a traceback, and the agent stopped the others."""
    failures = [
        {"rank": rank * RANKS + local, "local_rank": local, "pid": 4711, "time": 1.8e9 + rank, "exit_code": 1,
         "ended_by_agent": bool(local)} for local in range(RANKS)
    ]  # fmt: skip
    raised = {"rank": rank * RANKS, "node": name_of(rank), "pid": 4711, "time": 1.8e9 + rank, "exit_code": 1,
              "exception": "ValueError", "message": "bad sample", "traceback": TRACEBACK}  # fmt: skip
    return {
        f"node_{name_of(rank)}.json": {"node": name_of(rank), "failures": failures},
        f"rank_{rank * RANKS}.json": raised,
    }


def name_of(rank: int) -> str:
    return f"gpu{rank + 1:05d}"


def facts_of(rank: int, size: int) -> dict[str, str]:
    return {"node": name_of(rank), "attempt": "0 of 0", "NNODES": str(size), "PyTorch": "2.13.0+cpu",
            "the script": "sha256 0123456789ab", "CONFIG": "sha256 0123456789ab"}  # fmt: skip


def connect(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=300))


def first_node(pipe: Connection, size: int) -> None:
    """Serve the store, and take part until killed."""
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))
    names = [name_of(rank) for rank in range(size)]
    first = Membership(0, size, facts_of(0, size), "", lambda: store, "scale", names)
    pipe.send(store.port)
    pipe.recv()
    first._leaving = True
    first._send("records/0", failure_records(0))
    signal.pause()


class Simulation:
    """Some of the members, in this process."""

    def __init__(self, port: int, ranks: range, size: int) -> None:
        self._connections = {group: connect(port) for group in {rank // SHARED for rank in ranks}}
        self._counted: dict[int, Counting] = {}
        self._joining = 0  # node rank of the member that joins
        membership.membership_store = self._shared_store
        names = {rank: name_of(rank) for rank in range(size)}
        all_members: dict[int, membership.MemberFacts] = {rank: {"node": name} for rank, name in names.items()}
        self._members = [
            Member(rank, size, facts_of(rank, size), "", partial(self._connections.__getitem__, rank // SHARED))
            for rank in ranks
        ]
        for member in self._members:
            member._names, member.all_members = names, all_members
        self._unjoined = collections.deque(range(len(ranks)))  # indices of members
        self._due: list[tuple[float, int]] = []  # a heap: time of the next step, index of a member
        self._steps = 0

    def _shared_store(self, root: Store, run: membership.PublishedRun) -> Any:
        """Replaces membership_store(), which opens a connection."""
        group = self._joining // SHARED
        if group not in self._counted:
            self._counted[group] = Counting(PrefixStore(f"muster/{run.id}", self._connections[group]))
        return self._counted[group]

    def handle(self, request: str, limit: float) -> tuple[bool, float, int]:
        """Run the members until all have done what is requested, or for `limit` seconds.

        request: "join"; "train" for `limit` seconds; "fail" makes the first member report a failure, and waits until
        all know it; "know" only waits until all know it; "leave". Returns whether the request succeeded, the monotonic
        time at its end, and the count of store operations.
        """
        deadline, Counting.operations = time.monotonic() + limit, 0
        if request == "fail":
            self._members[0].report_end(RunEnd(name_of(1), 1, "rank 8 failed with exit code 1"))
            self._due.sort(key=lambda due: (due[1] != 0, due[0]))
            self._due[0] = (0.0, 0)
            heapq.heapify(self._due)
        done: Callable[[Member], object] = {
            "join": lambda member: member._complete,
            "train": lambda member: False,
            "leave": lambda member: member.left_at,
        }.get(request, lambda member: member._end)
        pending = collections.deque(self._members)
        while time.monotonic() < deadline:
            while pending and done(pending[0]):
                pending.popleft()
            if not pending:
                return True, time.monotonic(), Counting.operations
            self._step()
        healthy = request == "train" and not any(member._end for member in self._members)
        return healthy, time.monotonic(), Counting.operations

    def _step(self) -> None:
        """Run the step of the next member, or let a member join. A join takes the time of many steps."""
        self._steps += 1
        wait = self._due[0][0] - time.monotonic() if self._due else 0.0
        if self._unjoined and (wait > 0 or self._steps % ROUNDS_PER_JOIN == 0 or not self._due):
            n = self._unjoined.popleft()
            self._joining = self._members[n].rank
            heapq.heappush(self._due, (time.monotonic() + self._members[n].step(), n))
        elif wait > 0:
            time.sleep(min(wait, 0.05))
        else:
            n = self._due[0][1]
            self._joining = self._members[n].rank
            heapq.heapreplace(self._due, (time.monotonic() + self._members[n].step(), n))


def simulate(pipe: Connection, port: int, ranks: range, size: int) -> None:
    """Receive requests (name, seconds) through the pipe, handle them, and send the results back."""
    simulation = Simulation(port, ranks, size)
    while True:
        pipe.send(simulation.handle(*pipe.recv()))


def fork(target: Callable[..., None], *arguments: object) -> tuple[BaseProcess, Connection]:
    """Call target(pipe, *arguments) in a forked process."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=target, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    return process, here


def cpu_of(process: BaseProcess) -> float:
    """CPU seconds of a process."""
    with open(f"/proc/{process.pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def measure(size: int, limit: float) -> Costs:
    """Run `size` members. limit: seconds for each phase."""
    first, pipe = fork(first_node, size)
    port = pipe.recv()
    count = min(PROCESSES, size - 1)
    bounds = [1 + (size - 1) * n // count for n in range(count + 1)]
    simulated = [fork(simulate, port, range(*bounds[n : n + 2]), size) for n in range(count)]
    pipes = [one for _, one in simulated]

    def phase(name: str, seconds: float, others: str = "") -> tuple[float | None, int, float]:
        """Send the request `name` to all processes. If `others` is given, all but the first get that request instead.

        Returns the duration in seconds (None: not done), the store operations, and the CPU seconds of the first node.
        """
        started, before = time.monotonic(), cpu_of(first)
        for number, one in enumerate(pipes):
            one.send((others if others and number else name, seconds))
        replies = [one.recv() for one in pipes]
        ended = max(reply[1] for reply in replies)
        done = all(reply[0] for reply in replies)
        return ended - started if done else None, sum(reply[2] for reply in replies), cpu_of(first) - before

    values: list[float | None] = [None] * 6
    try:
        values[0], _, cpu = phase("join", limit)
        if values[0] is not None:
            values[1] = cpu
            seconds, operations, cpu = phase("train", TRAINING)
            if not seconds:
                sys.exit(f"{size} nodes: a node was lost: this machine is too slow to simulate them")
            values[2:4] = operations / seconds, cpu / seconds
            values[4], *_ = phase("fail", limit, "know")
        if values[4] is not None:
            pipe.send("leave")
            values[5], *_ = phase("leave", limit)
    finally:
        for process, _ in [*simulated, (first, pipe)]:
            process.kill()
            process.join()
    return Costs(*values)
