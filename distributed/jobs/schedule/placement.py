"""Decide which job starts next, and on which server. Pure functions.

Order of waiting jobs: higher priority, then trainings of base models, then longer expected time, then list order. The
first job that fits is placed. A job of several GPUs that does not fit yet reserves a server: no later job in this
order gets its slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from distributed.jobs.lists.job import ALL_GPUS, GpuId, Job


@dataclass(frozen=True)
class Slot:
    """A slot runs one job at a time."""

    index: int  # on its server
    gpu: GpuId | None  # None on a server without GPUs


@dataclass
class SlotPool:
    """The slots of one server."""

    name: str
    slots: tuple[Slot, ...]
    labels: frozenset[str] = frozenset()
    free: set[int] = field(default_factory=set)  # indices of slots without a job of this list
    blocked: frozenset[GpuId] = frozenset()  # GPUs in use by other processes
    freed: set[GpuId] = field(default_factory=set)  # GPUs of jobs that ended after the last query of GPUs began
    lost: frozenset[GpuId] = frozenset()  # GPUs that no longer reply
    all_gpus: int = 0  # number of GPUs of a job whose _gpus is "all"; 0: capacity()
    open: bool = False  # whether jobs may be placed here now
    bases: set[str] = field(default_factory=set)  # digests of base models in the server's cache

    def __post_init__(self) -> None:
        self.free = {slot.index for slot in self.slots}
        self.gpus: dict[GpuId | None, list[Slot]] = {}
        for slot in self.slots:
            self.gpus.setdefault(slot.gpu, []).append(slot)

    def grow(self, slots: Sequence[Slot]) -> None:
        """Add the slots that the pool does not have yet. slots: all slots of the server."""
        for slot in slots[len(self.slots) :]:
            self.slots += (slot,)
            self.free.add(slot.index)
            self.gpus.setdefault(slot.gpu, []).append(slot)

    def capacity(self) -> int:
        """The largest number of GPUs for one job, or the number of slots if the server has no GPUs.

        A job can use only one MIG instance.
        """
        if None in self.gpus:
            return len(self.slots)
        working = self.gpus.keys() - self.lost
        return len([gpu for gpu in working if isinstance(gpu, int)]) or min(1, len(working))

    def count(self, gpus: int) -> int:
        """The number of GPUs that a job occupies on this server. gpus: see Options.gpus."""
        return (self.all_gpus or max(1, self.capacity())) if gpus == ALL_GPUS else gpus

    def fits(self, gpus: int, labels: frozenset[str]) -> bool:
        """Whether the server has the GPUs and labels that a job requires."""
        return labels <= self.labels and self.count(gpus) <= self.capacity()

    def slots_of(self, slots: Collection[int], gpus: Collection[GpuId]) -> set[int]:
        """The slots of an attempt; all slots of its GPUs if a newer cluster config has renumbered the slots."""
        known = {slot.index: slot.gpu for slot in self.slots if slot.index in slots}
        if set(known.values()) == set(gpus) or None in self.gpus:
            return set(known)
        return {slot.index for slot in self.slots if slot.gpu in gpus}

    def available(self, count: int) -> list[Slot]:
        """At most `count` free slots, each on a different GPU; GPUs with the fewest jobs come first."""
        if None in self.gpus:
            return [slot for slot in self.slots if slot.index in self.free][:count]
        best = []
        for gpu, slots in self.gpus.items():
            unused = [slot for slot in slots if slot.index in self.free]
            usable = gpu not in self.blocked | self.lost and (count == 1 or isinstance(gpu, int))
            if unused and usable:
                best.append((len(slots) - len(unused), slots[0].index, unused[0]))
        return [slot for _, _, slot in sorted(best, key=lambda each: each[:2])[:count]]


@dataclass(frozen=True)
class Requirements:
    """What a job requires of a server. Jobs with equal requirements share one heap."""

    gpus: int
    labels: frozenset[str]
    avoid: frozenset[str]  # servers on which the job failed
    base: str = ""  # digest of the base model that the job starts from

    def allow(self, pool: SlotPool) -> bool:
        return pool.name not in self.avoid and pool.fits(self.gpus, self.labels)


SortKey = tuple[float, bool, float, int]


def sort_key(job: Job, mean: float, number: int) -> SortKey:
    """The sort key of a waiting job; the smallest starts first. mean, number: see JobQueue.put()."""
    return -job.options.priority, not job.trains, -job.options.seconds(mean), number


def mean_seconds(jobs: Iterable[Job]) -> float:
    """The mean of the _expected_seconds of jobs (1 if no job has any), used for jobs without _expected_seconds."""
    known = [job.options.expected_seconds for job in jobs if job.options.expected_seconds is not None]
    return sum(known) / len(known) if known else 1.0


class JobQueue:
    """The jobs that wait for slots."""

    def __init__(self) -> None:
        self._heaps: dict[Requirements, list[tuple[SortKey, str]]] = {}
        self._required: dict[str, Requirements] = {}

    def __contains__(self, job: str) -> bool:
        return job in self._required

    def put(self, job: Job, number: int, mean: float, avoid: Iterable[str] = ()) -> None:
        """Add a job. number: its position in the list. mean: see mean_seconds(). avoid: servers it must not run on."""
        required = Requirements(job.options.gpus, frozenset(job.options.labels), frozenset(avoid), job.base)
        self._required[job.id] = required
        heapq.heappush(self._heaps.setdefault(required, []), (sort_key(job, mean, number), job.id))

    def remove(self, job: str) -> None:
        """Remove a job, if it is queued."""
        self._required.pop(job, None)

    def _first(self, required: Requirements) -> tuple[SortKey, str] | None:
        heap = self._heaps[required]
        while heap and self._required.get(heap[0][1]) != required:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def place(self, pools: Mapping[str, SlotPool]) -> list[tuple[str, str, list[Slot]]]:
        """Remove the jobs that can start now, and occupy slots for them. Returns (job, server, slots) of each."""
        placed: list[tuple[str, str, list[Slot]]] = []
        reserved: set[str] = set()  # servers reserved for jobs of several GPUs
        candidates = {name: pool for name, pool in pools.items() if pool.open and pool.free}
        firsts = {each: first for each in list(self._heaps) if (first := self._first(each))}
        while candidates and firsts:
            required = min(firsts, key=firsts.__getitem__)
            target = best_pool(required, [pool for name, pool in candidates.items() if name not in reserved])
            if target is None:
                if required.gpus != 1 and (server := pool_to_reserve(required, pools.values(), reserved)):
                    reserved.add(server)
                del firsts[required]
                continue
            job, slots = firsts[required][1], target.available(target.count(required.gpus))
            target.free -= {slot.index for slot in slots}
            if not target.free:
                del candidates[target.name]
            placed.append((job, target.name, slots))
            self.remove(job)
            if first := self._first(required):
                firsts[required] = first
            else:
                del firsts[required]
        self._heaps = {required: heap for required, heap in self._heaps.items() if heap}
        return placed


def best_pool(required: Requirements, pools: Iterable[SlotPool]) -> SlotPool | None:
    """The best pool with enough free slots.

    Pools with the job's base model in their cache are preferred, then pools with a larger share of free slots. The
    first of equal pools is returned.
    """
    fitting = [pool for pool in pools if required.allow(pool) and missing(required, pool) == 0]
    return max(fitting, key=lambda pool: (required.base in pool.bases, len(pool.free) / len(pool.slots)), default=None)


def pool_to_reserve(required: Requirements, pools: Iterable[SlotPool], reserved: set[str]) -> str | None:
    """The server with the fewest missing GPUs for a job that does not fit on any server yet."""
    candidates = [pool for pool in pools if pool.open and required.allow(pool) and pool.name not in reserved]
    best = min(candidates, key=lambda pool: missing(required, pool), default=None)
    return best.name if best else None


def missing(required: Requirements, pool: SlotPool) -> int:
    """The number of GPUs that a job still needs on this server."""
    count = pool.count(required.gpus)
    return count - len(pool.available(count))


def plan(
    jobs: Iterable[Job], pools: Mapping[str, SlotPool], expected: Callable[[Job], float]
) -> list[tuple[float, str, str, list[Slot]]]:
    """Simulate the list: (start in seconds, job, server, slots) of each job, if every job takes its expected time.

    A job starts after the jobs of its _after and after the training of its base model, if these are in `jobs`.
    """
    queue, listed = JobQueue(), {job.id: (number, job) for number, job in enumerate(jobs)}
    seconds = {name: expected(job) for name, (_, job) in listed.items()}
    trainers = {job.trains: name for name, (_, job) in listed.items() if job.trains}
    needed: dict[str, set[str]] = {}
    dependents: dict[str, list[str]] = {name: [] for name in listed}
    for name, (_, job) in listed.items():
        needed[name] = {*job.options.after, trainers.get(job.base, "")} & listed.keys()
        for each in needed[name]:
            dependents[each].append(name)
    ready = [name for name in listed if not needed[name]]
    running: list[tuple[float, int, str, str, list[Slot]]] = []
    starts: list[tuple[float, str, str, list[Slot]]] = []
    now = 0.0
    while True:
        for name in ready:
            number, job = listed[name]
            queue.put(job, number, seconds[name])
        for name, server, slots in queue.place(pools):
            starts.append((now, name, server, slots))
            heapq.heappush(running, (now + seconds[name], len(starts), name, server, slots))
        if not running:
            return starts
        now, ready = running[0][0], []
        while running and running[0][0] == now:
            _, _, name, server, slots = heapq.heappop(running)
            pools[server].free |= {slot.index for slot in slots}
            pools[server].bases.add(listed[name][1].trains)
            for each in dependents[name]:
                needed[each].remove(name)
                ready += [] if needed[each] else [each]
