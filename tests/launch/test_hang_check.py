"""What a launcher does when its run hangs or looks hung; runs/test_hang_decision.py tests how this is decided."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed.exit_codes import TIMED_OUT
from distributed.files import read_json
from distributed.launch.hang_check import HangCheck, hang_limits
from distributed.launch.hang_decision import Hung, Wait
from distributed.launch.watch import Local, Watch
from distributed.runs.lookup import RunNode
from distributed.runs.run_directory import create
from distributed.transport.commands import LocalCommands


@pytest.fixture
def watch(tmp_path: Path, new_watch: Callable[..., Watch]) -> Watch:
    """The Watch of a launcher with --quiet, for a run with one node."""
    run = create(
        str(tmp_path), "train", nodes=[RunNode("n1", "", 1, 0)], script="train.py", config=None, cwd="/",
        python="python3", command=["x"], launcher=os.getpid(),
    )  # fmt: skip
    return new_watch(Path(run), Local(LocalCommands()), quiet=True)


def test_a_check_that_fails_does_not_end_the_run(watch: Watch) -> None:
    HangCheck(watch, None, time.monotonic()).check(time.monotonic())  # type: ignore[arg-type]
    assert "the check for a hang failed" in (watch.directory / "launcher.log").read_text()
    assert not watch.stopping.is_ending


def test_a_run_that_looks_hung_is_reported_also_with_quiet_but_not_when_it_is_ending(
    watch: Watch, capfd: pytest.CaptureFixture[str]
) -> None:
    check = HangCheck(watch, None, time.monotonic())  # type: ignore[arg-type]
    check.handle(Wait(1000), "the run looks hung")
    watch.stopping.status = 1
    check.handle(Wait(1000), "the run looks hung")
    assert capfd.readouterr().err == "launch.sh: the run looks hung\n"


def test_a_hang_ends_the_run_with_124_unless_it_is_ending_or_the_attempt_has_ended(watch: Watch) -> None:
    hung = Hung({"cause": "hung"})
    check = HangCheck(watch, None, time.monotonic())  # type: ignore[arg-type]
    watch.stopping.status = 1
    check.handle(hung, "")
    assert watch.stopping.status == 1
    watch.stopping.status = 0
    watch.attempts += 1
    check.handle(hung, "")
    assert (watch.stopping.status, (watch.attempt_directory / "hang.json").exists()) == (0, False)
    HangCheck(watch, None, time.monotonic()).handle(hung, "")  # type: ignore[arg-type]
    assert (watch.stopping.status, read_json(watch.attempt_directory / "hang.json")) == (TIMED_OUT, {"cause": "hung"})


@pytest.mark.parametrize(
    ("option", "all_ranks_here", "limits"),
    [
        (None, True, (600.0, True)),
        (None, False, (math.inf, False)),  # other launchers start the other ranks: a hang is only reported
        (30.0, False, (30.0, False)),
        (0.0, True, (0.0, False)),  # not checked
    ],
)
def test_a_run_whose_ranks_may_wait_for_ranks_of_other_launchers_is_stopped_only_with_hang_timeout(
    option: float | None, all_ranks_here: bool, limits: tuple[float, bool]
) -> None:
    assert hang_limits(option, all_ranks_here) == limits


def test_time_before_a_suspension_does_not_count_as_silence(watch: Watch) -> None:
    watched = []

    class FakeHangWatch:
        def check_files(self, seconds: float) -> tuple[Wait, str]:
            watched.append(seconds)
            return Wait(1000), ""

    now = time.monotonic()
    HangCheck(watch, FakeHangWatch(), now - 60).check(now)  # type: ignore[arg-type]
    HangCheck(watch, FakeHangWatch(), now - 3660).check(now - 3600)  # type: ignore[arg-type]
    assert watched[0] >= 60 and watched[1] < 5
