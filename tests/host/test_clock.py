from __future__ import annotations

import time

import pytest

from distributed.host.clock import LONGEST_STEP, RunningClock


def test_the_clock_stands_still_while_its_process_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    clock = RunningClock()
    start = clock.now()
    for _ in range(10):
        seconds += LONGEST_STEP
        clock.now()
    assert clock.now() - start == 10 * LONGEST_STEP
    seconds += 3600  # suspended
    assert clock.now() - start == 11 * LONGEST_STEP
    seconds += 1
    assert clock.now() - start == 11 * LONGEST_STEP + 1


def test_a_wait_ends_early_enough_for_the_next_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    clock = RunningClock()
    end = clock.now() + 60
    waits = 0
    while wait := clock.until(end):
        assert wait < LONGEST_STEP
        seconds += wait
        waits += 1
    assert seconds == 160 and waits > 20
    assert clock.until(end - 1) == 0
