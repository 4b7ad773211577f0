"""A launcher stops its run as hung after --hang-timeout without output, or by default only if no rank can continue.

A run that is starting or ending, or with a node that does not reply, does not hang; status.bats and faults.bats test
real runs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_hang_analysis import IDLES, LOOPS, SLEEPS, STOPPED, WAITS, WORKS, ranks

from distributed.host.replies import format_reply
from distributed.runs import hang_decision
from distributed.runs.hang_analysis import Activity, find_stall
from distributed.runs.hang_decision import decide, hang_record
from distributed.runs.run_directory import create
from distributed.runs.status import Observation


def decision_on(
    activities: Sequence[Activity], silent: float, *, stacks: bool = True, certain: bool = False, not_started: int = 0
) -> str:
    observed = Observation(tuple(ranks(*activities)), (), not_started, 1.0, silent)
    stall = find_stall(observed.ranks, 1.0) if stacks and observed.ranks else None
    return decide(observed, 100.0, silent, stall, certain)


@pytest.mark.parametrize(
    ("activities", "silent", "decision"),
    [
        ([WORKS, WORKS], 0.0, "wait 100"),
        ([WORKS, WORKS], 99.5, "wait 1"),
        ([WORKS, WORKS], 60.0, "wait 40"),
        ([WORKS, WORKS], 100.0, "stacks"),
        ([], 1e6, "wait 100"),
    ],
)
def test_nodes_are_queried_about_once_per_timeout_and_then_for_stacks(
    activities: list[Activity], silent: float, decision: str
) -> None:
    assert decision_on(activities, silent, stacks=False) == decision


@pytest.mark.parametrize(
    ("activities", "with_timeout", "by_default"),
    [
        ([WAITS, LOOPS], "hung", "wait 60"),  # it may evaluate
        ([WAITS, IDLES], "hung", "hung"),
        ([WAITS, WAITS], "hung", "hung"),
        ([WORKS, WORKS], "hung", "wait 60"),
        ([WORKS, SLEEPS], "hung", "wait 60"),
        ([SLEEPS, SLEEPS], "hung", "hung"),
        ([WAITS, STOPPED], "hung", "wait 60"),  # a user stopped it on purpose
        ([LOOPS], "hung", "wait 60"),
    ],
)
def test_by_default_only_a_run_that_cannot_continue_hangs(
    activities: list[Activity], with_timeout: str, by_default: str
) -> None:
    assert decision_on(activities, 100.0) == with_timeout
    assert decision_on(activities, 100.0, certain=True) == by_default


def test_a_run_hangs_only_when_all_its_ranks_have_started() -> None:
    assert decision_on([SLEEPS], 200.0, not_started=1) == "wait 100"


def test_the_record_has_the_suspect_with_its_stack_and_the_lines_of_the_others() -> None:
    observed = Observation(tuple(ranks(WAITS, LOOPS, SLEEPS)), (), 0, 1.0, 0.0)
    record = hang_record(observed, 100.4, find_stall(observed.ranks, 1.0), " (--hang-timeout 90)")
    assert record["cause"].startswith("hung: no output for 100 s (--hang-timeout 90); rank 1 on n2 is not in a coll")
    assert (record["node"], record["rank"]) == ("n2", 1)
    assert record["traceback"].endswith('  File "/home/ada/hang.py", line 12, in main\n')
    assert [(one["rank"], one["message"]) for one in record["others"]] == [
        (0, "waited in a collective at hang.py:9"),
        (2, "used 0% CPU"),
    ]


def run_directory(logs: Path) -> Path:
    return Path(
        create(
            str(logs), "train", nodes=["n1"], nproc=1, script="train.py", config=None, cwd="/", python="python3",
            command=["x"], launcher=os.getpid(),
        )
    )  # fmt: skip


RANK_STATUS = {
    "rank": 0, "local_rank": 0, "pid": 7, "state": "S", "cpu": 0.0, "memory": 0, "gpus": [], "silent": 900.0,
    "line": "", "stack_text": "", "frames": [],
}  # fmt: skip
NODE_STATUS = {
    "host": "n1", "seconds": 1.0, "ranks": [RANK_STATUS], "processes": [], "line": "", "gpus": [], "gpu_error": "",
    "metrics": None,
}  # fmt: skip


def write_reply(directory: Path, code: int, **facts: Any) -> None:
    (directory / "n1.out").write_text(format_reply(NODE_STATUS | facts) if code == 0 else "")
    (directory / "n1.err").write_text("")
    (directory / "n1.code").write_text(f"{code}\n")


@pytest.mark.parametrize(
    ("options", "code", "facts", "decision"),
    [
        (["--watched", "700", "--stacks"], 0, {}, "hung"),
        (["--watched", "599", "--stacks"], 0, {}, "wait 1"),  # the time before the watch started is ignored
        (["--watched", "700", "--stacks"], 255, {}, "wait 60"),  # the node does not reply
        (["--watched", "700", "--stacks", "--certain"], 0, {}, "wait 600"),  # it logs no steps
        (["--watched", "700", "--stacks", "--certain"], 0, {"metrics": 650.0}, "hung"),
        (["--watched", "700", "--stacks", "--certain"], 0, {"metrics": 100.0}, "wait 500"),
    ],
)
def test_the_decision_is_printed_and_a_hang_is_recorded(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    code: int,
    facts: dict[str, Any],
    decision: str,
) -> None:
    run = run_directory(tmp_path)
    write_reply(tmp_path, code, **facts)
    assert hang_decision.main([str(run), str(tmp_path), "--timeout", "600", *options]) == 0
    assert capsys.readouterr().out == f"{decision}\n"
    assert (run / hang_decision.HANG_FILE).exists() == (decision == "hung")
    if decision == "hung":
        option = "" if "--certain" in options else " (--hang-timeout 600)"
        assert json.loads((run / hang_decision.HANG_FILE).read_text())["cause"] == (
            f"hung: no output for {facts.get('metrics', 700.0):.0f} s{option}; no rank used CPU in 1.0 s"
        )


def test_old_metrics_of_an_earlier_attempt_are_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_directory(tmp_path)
    write_reply(tmp_path, 0, ranks=[RANK_STATUS | {"silent": 3.0}])
    (run / "metrics.jsonl").touch()
    os.utime(run / "metrics.jsonl", (time.time() - 5000,) * 2)
    assert hang_decision.main([str(run), str(tmp_path), "--timeout", "600", "--watched", "700"]) == 0
    assert capsys.readouterr().out == "wait 597\n"


def test_a_rank_that_uses_its_gpu_is_not_idle() -> None:
    on_gpu = [replace(SLEEPS, gpu=100), SLEEPS]
    assert decision_on(on_gpu, 100.0, certain=True) == "wait 60"
