"""Which job goes where next. Pure: no clock, no connection.

Jobs wait in an order: higher priority, then those that train base models, then longer expected time, then earlier in
the list. The first that fits somewhere is placed; one that needs several GPUs and does not fit yet keeps a server free
of others until it does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from distributed.jobs.job import Job


@dataclass(frozen=True)
class Slot:
    """A place for one job at a time."""

    index: int  # on its server
    gpu: int | None  # nvidia-smi's index; None without GPUs


@dataclass
class Room:
    """The slots of one server, as far as placement needs to know."""

    name: str
    slots: tuple[Slot, ...]
    labels: frozenset[str] = frozenset()
    free: set[int] = field(default_factory=set)  # indices of slots that no job of ours has
    blocked: frozenset[int] = frozenset()  # GPUs that other people use
    open: bool = False  # whether jobs may be placed here now
    bases: set[str] = field(default_factory=set)  # digests of base models that are there

    def __post_init__(self) -> None:
        self.free = {slot.index for slot in self.slots}
        self.gpus: dict[int | None, list[Slot]] = {}
        for slot in self.slots:
            self.gpus.setdefault(slot.gpu, []).append(slot)

    def capacity(self) -> int:
        """GPUs, or CPU slots, that one job could have."""
        return len(self.slots) if None in self.gpus else len(self.gpus)

    def taken_by(self, slots: Collection[int], gpus: Collection[int]) -> set[int]:
        """The slots of an attempt; all slots of its GPUs where the cluster config has numbered them anew since."""
        known = {slot.index: slot.gpu for slot in self.slots if slot.index in slots}
        if set(known.values()) == set(gpus) or None in self.gpus:
            return set(known)
        return {slot.index for slot in self.slots if slot.gpu in gpus}

    def available(self, count: int) -> list[Slot]:
        """Free slots on so many different GPUs, those with the fewest jobs first; fewer where there are fewer."""
        if None in self.gpus:
            return [slot for slot in self.slots if slot.index in self.free][:count]
        best = []
        for gpu, slots in self.gpus.items():
            unused = [slot for slot in slots if slot.index in self.free]
            if unused and gpu not in self.blocked:
                best.append((len(slots) - len(unused), slots[0].index, unused[0]))
        return [slot for _, _, slot in sorted(best, key=lambda each: each[:2])[:count]]


@dataclass(frozen=True)
class Need:
    """Jobs with the same needs wait in one queue."""

    gpus: int
    labels: frozenset[str]
    avoid: frozenset[str]  # servers on which the job has failed
    base: str = ""  # digest of the base model that the job starts from

    def met_by(self, room: Room) -> bool:
        return self.labels <= room.labels and self.gpus <= room.capacity()


Order = tuple[float, bool, float, int]


def order(job: Job, usual: float, number: int) -> Order:
    """Of a job that waits; the smallest starts first. See Queue.put()."""
    return -job.options.priority, not job.trains, -job.options.seconds(usual), number


def usual_seconds(jobs: Iterable[Job]) -> float:
    """How long a job takes that does not say it: the mean of those that do."""
    said = [job.options.expected_seconds for job in jobs if job.options.expected_seconds is not None]
    return sum(said) / len(said) if said else 1.0


class Queue:
    """The jobs that wait."""

    def __init__(self) -> None:
        self._heaps: dict[Need, list[tuple[Order, str]]] = {}
        self._needs: dict[str, Need] = {}

    def __len__(self) -> int:
        return len(self._needs)

    def __contains__(self, job: str) -> bool:
        return job in self._needs

    def put(self, job: Job, number: int, usual: float, avoid: Iterable[str] = ()) -> None:
        """number: its place in the list. usual: see usual_seconds()."""
        need = Need(job.options.gpus, frozenset(job.options.labels), frozenset(avoid), job.base)
        self._needs[job.id] = need
        heapq.heappush(self._heaps.setdefault(need, []), (order(job, usual, number), job.id))

    def remove(self, job: str) -> None:
        """The job does not wait any more."""
        self._needs.pop(job, None)

    def _first(self, need: Need) -> tuple[Order, str] | None:
        heap = self._heaps[need]
        while heap and self._needs.get(heap[0][1]) != need:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def place(self, rooms: Mapping[str, Room]) -> list[tuple[str, str, list[Slot]]]:
        """Take what can start now out of the queue: (job, server, slots). The slots are no longer free then."""
        placed: list[tuple[str, str, list[Slot]]] = []
        kept: set[str] = set()  # servers that wait for a job of several GPUs
        able = {name: room for name, room in rooms.items() if room.open and room.free}
        needs = {need: first for need in list(self._heaps) if (first := self._first(need))}
        while able and needs:
            need = min(needs, key=lambda each: needs[each])
            target = best_room(need, [room for name, room in able.items() if name not in kept])
            if target is None:
                if need.gpus > 1 and (waiting := room_to_keep(need, rooms.values(), kept)):
                    kept.add(waiting)
                del needs[need]
                continue
            job, slots = needs[need][1], target.available(need.gpus)
            target.free -= {slot.index for slot in slots}
            if not target.free:
                del able[target.name]
            placed.append((job, target.name, slots))
            self.remove(job)
            if first := self._first(need):
                needs[need] = first
            else:
                del needs[need]
        for need in [need for need, heap in self._heaps.items() if not heap]:
            del self._heaps[need]
        return placed


def best_room(need: Need, rooms: Iterable[Room]) -> Room | None:
    """Where its base model is, then where most is free.

    A server on which the job has failed only where no other could ever take it.
    """
    fitting = [room for room in rooms if need.met_by(room) and room.name not in need.avoid]
    fitting = [room for room in fitting if len(room.available(need.gpus)) == need.gpus]
    return max(
        fitting,
        key=lambda room: (need.base in room.bases, len(room.free) / len(room.slots), -len(room.name)),
        default=None,
    )


def room_to_keep(need: Need, rooms: Iterable[Room], kept: set[str]) -> str | None:
    """The server on which a job of several GPUs fits soonest."""
    able = [room for room in rooms if room.open and need.met_by(room) and room.name not in need.avoid | kept]
    best = max(able, key=lambda room: len(room.available(need.gpus)), default=None)
    return best.name if best else None


def plan(
    jobs: Iterable[Job], rooms: Mapping[str, Room], expected: Callable[[Job], float]
) -> list[tuple[float, str, str, list[Slot]]]:
    """(start in seconds, job, server, slots) of each job, if every job took the time that is expected of it.

    A job whose base model is trained by another one of them starts when that has ended.
    """
    queue, listed = Queue(), {job.id: (number, job) for number, job in enumerate(jobs)}
    seconds = {name: expected(job) for name, (_, job) in listed.items()}
    held: dict[str, list[str]] = {job.trains: [] for _, job in listed.values() if job.trains}
    for name, (_, job) in listed.items():
        if job.base in held:
            held[job.base].append(name)
    ready = [name for name, (_, job) in listed.items() if job.base not in held]
    running: list[tuple[float, int, str, str, list[Slot]]] = []
    found: list[tuple[float, str, str, list[Slot]]] = []
    now = 0.0
    while True:
        for name in ready:
            number, job = listed[name]
            queue.put(job, number, seconds[name])
        for name, server, slots in queue.place(rooms):
            found.append((now, name, server, slots))
            heapq.heappush(running, (now + seconds[name], len(found), name, server, slots))
        if not running:
            return found
        now, ready = running[0][0], []
        while running and running[0][0] == now:
            _, _, name, server, slots = heapq.heappop(running)
            rooms[server].free |= {slot.index for slot in slots}
            rooms[server].bases.add(listed[name][1].trains)
            ready += held.pop(listed[name][1].trains, ())
