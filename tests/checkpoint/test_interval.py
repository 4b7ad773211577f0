"""The checkpoint interval of checkpoint.every=auto is near Daly's optimum, the same on all ranks, and bounded."""

from __future__ import annotations

import logging
import math

import forked
import pytest

from distributed.checkpoint.interval import FIRST, LONGEST, SaveInterval, best_interval
from distributed.training.collectives import Ranks


def expected_time(seconds: float, cost: float, mtbf: float) -> float:
    """Return the expected seconds that a run takes for each second of training, with a save every `seconds`.

    Daly's equation 13, with failures at random times and restarts that take no time.
    """
    return mtbf * (math.exp((seconds + cost) / mtbf) - 1) / seconds


@pytest.mark.parametrize(("cost", "mtbf"), [(0.01, 86_400), (1, 86_400), (30, 3600), (0.1, 60), (10, 60)])
def test_the_interval_is_near_the_optimum(cost: float, mtbf: float) -> None:
    best = expected_time(best_interval(cost, mtbf), cost, mtbf)
    others = [expected_time(mtbf * 1.01**power, cost, mtbf) for power in range(-1500, 200)]
    assert best == pytest.approx(min(others), rel=1e-4)


def test_the_interval_of_a_very_slow_save_is_the_mtbf() -> None:
    assert best_interval(cost=200, mtbf=100) == 100


def saves(interval: SaveInterval, steps: int, step_seconds: float, costs: list[float]) -> list[int]:
    """Return the steps after which a save is due. costs: seconds of each save; the last value is repeated."""
    found: list[int] = []
    for step in range(1, steps + 1):
        blocked = [costs[min(number, len(costs) - 1)] for number in range(len(found))]
        if interval.is_due(step, step_seconds, blocked):
            found.append(step)
    return found


def test_after_two_saves_the_cost_of_the_second_determines_the_interval(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    # The square root of 2 * 0.5 s * 900 s is 30 s; the first save, of 50 s, does not count.
    assert saves(SaveInterval("auto", 900, Ranks(), step=0), 150, 1.0, [50, 0.5]) == [10, 20, 50, 80, 110, 140]
    assert [record.message for record in caplog.records] == [
        "checkpoint every 30 steps: a save takes 0.5 s, a step 1 s, a failure is expected every 900 s (checkpoint.mtbf)"
    ]


def test_the_interval_changes_with_the_cost_of_a_save(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found = saves(SaveInterval("auto", 900, Ranks(), step=0), 2000, 1.0, [0.5] * 4 + [8.0])
    assert found[:4] == [10, 20, 50, 80]
    assert found[-1] - found[-2] == round(best_interval(8, 900))
    assert len(caplog.records) == 2


@pytest.mark.parametrize(("cost", "step_seconds", "steps"), [(0.0, 1.0, 1), (1e6, 100.0, round(LONGEST / 100))])
def test_the_interval_is_bounded(cost: float, step_seconds: float, steps: int) -> None:
    *_, before, last = saves(SaveInterval("auto", 1e9, Ranks(), step=0), 200, step_seconds, [cost])
    assert last - before == steps


def test_a_computed_interval_that_equals_the_initial_one_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cost = next(cost / 1000 for cost in range(1, 1000) if round(best_interval(cost / 1000, 900)) == FIRST)
    assert saves(SaveInterval("auto", 900, Ranks(), step=0), 100, 1.0, [cost]) == [*range(FIRST, 101, FIRST)]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("every", "expected"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4])])
def test_an_interval_given_in_steps_is_used_as_it_is(every: int, expected: list[int]) -> None:
    assert saves(SaveInterval(every, 1.0, Ranks(), step=0), 5, 1.0, [1.0]) == expected


def test_the_first_save_of_a_resumed_run_is_due_after_the_initial_interval() -> None:
    interval = SaveInterval("auto", 900, Ranks(), step=7)
    assert not interval.is_due(7 + FIRST - 1, 1.0, [])
    assert interval.is_due(7 + FIRST, 1.0, [])


def on_rank(rank: int, size: int) -> list[int]:
    """Each rank measures different times."""
    return saves(SaveInterval("auto", 900, Ranks(rank, size), step=0), 100, 1.0 + rank, [0.5 + 20 * rank])


def test_all_ranks_save_after_the_same_steps() -> None:
    assert forked.ranks(2, on_rank) == [[10, 20, 50, 80]] * 2
