"""Which job starts next, and where: priority, expected time, and list order; no job starves; no slot is used twice.

The duration of a planned list is compared with the shortest possible one, by Graham's bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from distributed.jobs.lists.job import ALL_GPUS, Job, Options
from distributed.jobs.schedule.placement import JobQueue, Slot, SlotPool, plan


def pool(name: str, gpus: int = 0, slots: int = 1, labels: Iterable[str] = (), taken: Iterable[int] = ()) -> SlotPool:
    """A pool with this number of slots on each GPU or, without GPUs, with this number of slots in all."""
    devices: list[int | None] = [gpu for gpu in range(gpus) for _ in range(slots)]
    devices = devices or [None] * slots
    made = SlotPool(name, tuple(Slot(index, gpu) for index, gpu in enumerate(devices)), frozenset(labels))
    made.open = True
    made.free -= set(taken)
    return made


def pools(*made: SlotPool) -> dict[str, SlotPool]:
    return {each.name: each for each in made}


def job(name: str, gpus: int = 1, priority: int = 0, labels: Iterable[str] = ()) -> Job:
    return Job(name, {}, Options(gpus=gpus, priority=priority, labels=tuple(labels)), f"experiments/{name}")


def queue(*jobs: tuple[Job, float] | Job, avoid: Iterable[str] = ()) -> JobQueue:
    """A queue of jobs, or of pairs of a job and its expected seconds."""
    made = JobQueue()
    for number, each in enumerate(jobs):
        one, seconds = each if isinstance(each, tuple) else (each, 1.0)
        made.put(one, number, seconds, avoid)
    return made


def names(placed: list[tuple[str, str, list[Slot]]]) -> list[str]:
    return [f"{name}@{server}:{','.join(str(slot.index) for slot in slots)}" for name, server, slots in placed]


# ---------------------------------------------------------------- which job


def test_the_longest_job_starts_first_then_list_order() -> None:
    waiting = queue((job("a"), 1), (job("b"), 3), (job("c"), 2), (job("d"), 3))
    assert [name for name, _, _ in waiting.place(pools(pool("s", slots=4)))] == ["b", "d", "c", "a"]


def test_priority_precedes_expected_time() -> None:
    waiting = queue((job("a"), 9), (job("b", priority=1), 1), (job("c", priority=-1), 99))
    assert [name for name, _, _ in waiting.place(pools(pool("s", slots=4)))] == ["b", "a", "c"]


def test_each_job_goes_to_the_server_with_the_largest_share_of_free_slots() -> None:
    placed = queue(*map(job, "abcde")).place(pools(pool("big", slots=4), pool("small", slots=2)))
    assert names(placed) == ["a@big:0", "b@small:0", "c@big:1", "d@big:2", "e@small:1"]


def test_a_job_that_does_not_fit_does_not_block_later_jobs() -> None:
    waiting = queue((job("a", labels=["x"]), 9), job("b"))
    assert names(waiting.place(pools(pool("s")))) == ["b@s:0"]
    assert "a" in waiting and "b" not in waiting


def test_a_removed_job_is_not_placed_and_can_be_added_again() -> None:
    waiting = queue(job("a"), job("b"))
    waiting.remove("a")
    waiting.remove("unknown")
    assert names(waiting.place(pools(pool("s", slots=3)))) == ["b@s:0"]
    waiting.put(job("a"), 0, 1.0)
    waiting.put(job("a"), 0, 5.0)  # repeated, with another expected time
    assert names(waiting.place(pools(pool("s", slots=3)))) == ["a@s:0"]
    assert not waiting.place(pools(pool("s", slots=3)))


# ---------------------------------------------------------------- which server


def test_a_job_with_labels_runs_only_on_servers_with_them() -> None:
    waiting = queue(job("a", labels=["x", "y"]), job("b", labels=["x"]), job("c"))
    placed = waiting.place(pools(pool("x", slots=3, labels=["x"]), pool("xy", labels=["x", "y", "z"])))
    assert names(placed) == ["a@xy:0", "b@x:0", "c@x:1"]


def test_an_avoided_server_is_not_used() -> None:
    waiting = queue(job("a"), avoid=["s"])
    assert not waiting.place(pools(pool("s")))
    assert names(waiting.place(pools(pool("s"), pool("t")))) == ["a@t:0"]


def test_a_closed_server_gets_no_jobs() -> None:
    closed = pool("s")
    closed.open = False
    assert not queue(job("a")).place(pools(closed))


def test_a_blocked_gpu_gets_no_jobs() -> None:
    shared = pool("s", gpus=2, slots=2)
    shared.blocked = frozenset({0})
    waiting = queue(job("a"), job("b"), job("c"))
    assert names(waiting.place(pools(shared))) == ["a@s:2", "b@s:3"]
    shared.blocked = frozenset()
    assert names(waiting.place(pools(shared))) == ["c@s:0"]


def test_further_slots_of_a_gpu_are_used_when_every_gpu_has_a_job() -> None:
    placed = queue(*map(job, "abcdef")).place(pools(pool("s", gpus=2, slots=2)))
    assert names(placed) == ["a@s:0", "b@s:2", "c@s:1", "d@s:3"]


def test_a_job_of_several_gpus_gets_the_least_used_ones() -> None:
    server = pool("s", gpus=3, slots=2, taken=[0])
    assert names(queue(job("a", gpus=2)).place(pools(server))) == ["a@s:2,4"]
    assert server.free == {1, 3, 5}
    assert not queue(job("a", gpus=4)).place(pools(pool("s", gpus=3, slots=2)))


def test_a_job_of_all_gpus_gets_those_of_the_server_that_has_room() -> None:
    large, small = pool("large", gpus=3, taken=[1]), pool("small", gpus=2)
    waiting = queue(job("a", gpus=ALL_GPUS), job("b", gpus=ALL_GPUS))
    assert names(waiting.place(pools(large, small))) == ["a@small:0,1"]
    assert not waiting.place(pools(large, small))
    large.free = {0, 1, 2}
    assert names(waiting.place(pools(large, small))) == ["b@large:0,1,2"]


def test_a_job_of_all_gpus_gets_all_slots_of_a_server_without_gpus() -> None:
    assert names(queue(job("a", gpus=ALL_GPUS)).place(pools(pool("s", slots=3)))) == ["a@s:0,1,2"]


def test_a_lost_gpu_gets_no_jobs_and_a_job_of_all_gpus_runs_without_it() -> None:
    server = pool("s", gpus=3)
    server.lost = frozenset({1})
    assert names(queue(job("a", gpus=ALL_GPUS)).place(pools(server))) == ["a@s:0,2"]
    assert not server.fits(3, frozenset())
    server.lost = frozenset({0, 1, 2})
    assert not server.fits(ALL_GPUS, frozenset())


def test_a_job_gets_one_mig_instance() -> None:
    server = SlotPool("s", (Slot(0, "MIG-a"), Slot(1, 3), Slot(2, "MIG-b")))
    server.open = True
    waiting = queue(job("a"), job("b"), job("c"))
    assert names(waiting.place(pools(server))) == ["a@s:0", "b@s:1", "c@s:2"]
    assert (server.capacity(), server.fits(2, frozenset())) == (1, False)
    assert server.slots_of([9], ["MIG-b"]) == {2}


def test_a_job_of_several_gpus_gets_several_slots_of_a_server_without_gpus() -> None:
    assert names(queue(job("a", gpus=3)).place(pools(pool("s", slots=4)))) == ["a@s:0,1,2"]


# ---------------------------------------------------------------- jobs of several GPUs


def test_a_job_of_several_gpus_is_not_starved() -> None:
    """Two GPUs, many short jobs, and one job that needs both GPUs."""
    server = pool("s", gpus=2, taken=[1])
    waiting = queue((job("wide", gpus=2), 9), *((job(f"n{number}"), 1) for number in range(50)))
    assert not waiting.place(pools(server))  # GPU 0 is reserved for the wide job
    server.free = {0, 1}
    assert names(waiting.place(pools(server))) == ["wide@s:0,1"]


def test_one_server_is_reserved_for_a_job_of_several_gpus_and_the_others_are_used() -> None:
    waiting = queue((job("wide", gpus=2), 9), *map(job, "abc"))
    most = pool("most", gpus=3, taken=[0, 1])
    placed = waiting.place(pools(pool("full", gpus=2, taken=[0, 1]), most, pool("none")))
    assert names(placed) == ["a@none:0"]
    assert most.free == {2}


def test_a_job_of_several_gpus_does_not_delay_jobs_before_it() -> None:
    waiting = queue((job("wide", gpus=2), 1), (job("long"), 9))
    assert names(waiting.place(pools(pool("s", gpus=2, taken=[0])))) == ["long@s:1"]


def test_only_a_server_that_the_job_can_use_is_reserved() -> None:
    waiting = queue((job("wide", gpus=2, labels=["x"]), 9), job("a"), avoid=())
    placed = waiting.place(pools(pool("y", gpus=2), pool("x", gpus=2, labels=["x"], taken=[1])))
    assert names(placed) == ["a@y:0"]


SIZES = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(-1, 1)), min_size=1, max_size=30)
SERVERS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2)), min_size=1, max_size=3)


@given(SIZES, SERVERS)
def test_every_job_that_fits_somewhere_runs_once_and_no_slot_is_given_twice(
    sizes: list[tuple[int, int, int]], servers: list[tuple[int, int]]
) -> None:
    made = pools(*(pool(f"s{number}", gpus, slots) for number, (gpus, slots) in enumerate(servers)))
    capacity = max(each.capacity() for each in made.values())
    jobs = [job(f"j{number}", gpus, priority) for number, (gpus, _, priority) in enumerate(sizes) if gpus <= capacity]
    seconds = {f"j{number}": float(length) for number, (_, length, _) in enumerate(sizes)}
    steps = plan(jobs, made, lambda each: seconds[each.id])
    assert sorted(name for _, name, _, _ in steps) == sorted(each.id for each in jobs)
    expected = {each.id: each.options.gpus for each in jobs}
    assert all(len(slots) == expected[name] for _, name, _, slots in steps)
    uses: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for start, name, server, slots in steps:
        assert len({slot.gpu for slot in slots}) in (1, len(slots))  # different GPUs, or none
        for slot in slots:
            uses.setdefault((server, slot.index), []).append((start, start + seconds[name]))
    for spans in uses.values():
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(sorted(spans)))
    repeated = pools(*(pool(f"s{number}", gpus, slots) for number, (gpus, slots) in enumerate(servers)))
    assert steps == plan(jobs, repeated, lambda each: seconds[each.id])


# ---------------------------------------------------------------- duration of a planned list


def makespan(lengths: list[int], slots: int) -> float:
    """Seconds of the planned list; its slots are on servers of different size."""
    made = pools(pool("a", slots=1), *([pool("b", slots=slots - 1)] if slots > 1 else []))
    jobs = [job(f"j{number}") for number in range(len(lengths))]
    seconds = {f"j{number}": float(length) for number, length in enumerate(lengths)}
    return max(start + seconds[name] for start, name, _, _ in plan(jobs, made, lambda each: seconds[each.id]))


def optimum(lengths: list[int], slots: int) -> int:
    """The shortest time, by trying every assignment."""
    best = sum(lengths)
    for assignment in itertools.product(range(slots), repeat=len(lengths)):
        loads = [0] * slots
        for slot, length in zip(assignment, lengths, strict=True):
            loads[slot] += length
        best = min(best, max(loads))
    return best


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_a_planned_list_takes_at_most_four_thirds_of_the_optimum(lengths: list[int], slots: int) -> None:
    """Longest first takes at most 4/3 - 1/(3m) times the optimum on m machines.

    R. L. Graham, Bounds on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17 (1969), theorem 2.
    """
    assert makespan(lengths, slots) <= (4 / 3 - 1 / (3 * slots)) * optimum(lengths, slots) + 1e-9


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200), st.integers(1, 24))
def test_a_planned_list_takes_at_most_its_lower_bound_plus_the_longest_job_that_has_to_wait(
    lengths: list[int], slots: int
) -> None:
    """The `slots` longest jobs start at 0, and no slot is idle while one of the other jobs waits.

    The job that ends last is either one of the `slots` longest jobs, or a job that had to wait.
    """
    bound = max(sum(lengths) / slots, max(lengths))
    waiting = sorted(lengths, reverse=True)[slots:] or [0]
    assert makespan(lengths, slots) <= bound + max(waiting) * (1 - 1 / slots) + 1e-9


def test_grahams_worst_case_is_reproduced() -> None:
    """Jobs of 2m-1, 2m-1, 2m-2, 2m-2, ..., m+1, m+1, m, m, m take 4m-1 instead of 3m."""
    m = 4
    lengths = [length for length in range(2 * m - 1, m, -1) for _ in range(2)] + [m] * 3
    assert makespan(lengths, m) == 4 * m - 1


def test_a_planned_job_starts_after_all_jobs_that_it_needs() -> None:
    def make_job(name: str, *needed: str, base: str = "", trains: str = "") -> Job:
        return Job(name, {}, Options(after=needed), name, base, trains)

    jobs = [
        make_job("c", "a", "b", "done", base="x"),
        make_job("a"),
        make_job("b", "a"),
        make_job("t", trains="x"),
        make_job("d", "c"),
    ]
    lengths = {"a": 1.0, "b": 2.0, "t": 5.0}
    planned = plan(jobs, pools(pool("s", slots=9)), lambda each: lengths.get(each.id, 1.0))
    assert {name: start for start, name, _, _ in planned} == {"a": 0.0, "t": 0.0, "b": 1.0, "c": 5.0, "d": 6.0}
