"""When a launcher ends its run as hung: after the silence that was asked for, and never by default while a rank may
still come to an end by itself.

A run that starts, ends, or cannot be asked does not hang. status.bats and faults.bats let real runs hang.
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
from distributed.runs.hang_analysis import Activity, find
from distributed.runs.hang_decision import decide, record
from distributed.runs.run_directory import create
from distributed.runs.status import Seen


def seen(beats: Sequence[Activity], silent: float = 0.0, to_come: int = 0, ended: Sequence[str] = ()) -> Seen:
    return Seen(tuple(ranks(*beats)), tuple(ended), to_come, 1.0, silent)


def decided(
    beats: Sequence[Activity], silent: float, *, stacks: bool = True, certain: bool = False, to_come: int = 0
) -> str:
    found = seen(beats, silent, to_come)
    finding = find(found.beats, 1.0) if stacks and found.beats else None
    return decide(found, 100.0, silent, finding, certain)


@pytest.mark.parametrize(
    ("beats", "silent", "words"),
    [
        ([WORKS, WORKS], 0.0, "wait 100"),
        ([WORKS, WORKS], 99.5, "wait 1"),
        ([WORKS, WORKS], 60.0, "wait 40"),
        ([WORKS, WORKS], 100.0, "stacks"),
        ([], 1e6, "wait 100"),
    ],
)
def test_the_nodes_are_asked_about_once_per_timeout_and_for_stacks_when_it_is_over(
    beats: list[Activity], silent: float, words: str
) -> None:
    assert decided(beats, silent, stacks=False) == words


@pytest.mark.parametrize(
    ("beats", "asked", "by_default"),
    [
        ([WAITS, LOOPS], "hung", "wait 60"),  # it may evaluate
        ([WAITS, IDLES], "hung", "hung"),
        ([WAITS, WAITS], "hung", "hung"),
        ([WORKS, WORKS], "hung", "wait 60"),
        ([WORKS, SLEEPS], "hung", "wait 60"),
        ([SLEEPS, SLEEPS], "hung", "hung"),
        ([WAITS, STOPPED], "hung", "wait 60"),  # somebody has stopped it on purpose
        ([LOOPS], "hung", "wait 60"),
    ],
)
def test_by_default_only_what_cannot_end_by_itself_hangs(beats: list[Activity], asked: str, by_default: str) -> None:
    assert decided(beats, 100.0) == asked
    assert decided(beats, 100.0, certain=True) == by_default


def test_a_run_hangs_only_when_all_its_ranks_have_begun() -> None:
    assert decided([SLEEPS], 200.0, to_come=1) == "wait 100"


def test_what_is_recorded_names_the_suspect_with_its_stack_and_where_the_others_are() -> None:
    found = seen([WAITS, LOOPS, SLEEPS])
    told = record(found, 100.4, find(found.beats, 1.0), " (--hang-timeout 90)")
    assert told["cause"].startswith("hung: no output for 100 s (--hang-timeout 90); rank 1 on n2 is not in a coll")
    assert (told["node"], told["rank"]) == ("n2", 1)
    assert told["traceback"].endswith('  File "/home/ada/hang.py", line 12, in main\n')
    assert [(one["rank"], one["message"]) for one in told["others"]] == [
        (0, "waited in a collective at hang.py:9"),
        (2, "used 0% CPU"),
    ]


def run_directory(folder: Path) -> Path:
    return Path(
        create(
            str(folder), "train", nodes=["n1"], nproc=1, script="train.py", config=None, cwd="/", python="python3",
            command=["x"], launcher=os.getpid(),
        )
    )  # fmt: skip


RANK = {
    "rank": 0, "local_rank": 0, "pid": 7, "state": "S", "cpu": 0.0, "memory": 0, "gpus": [], "silent": 900.0,
    "line": "", "stands": "", "frames": [],
}  # fmt: skip
LOOK = {
    "host": "n1", "seconds": 1.0, "ranks": [RANK], "processes": [], "line": "", "gpus": [], "gpu_error": "",
    "metrics": None,
}  # fmt: skip


def answer(folder: Path, code: int, **facts: Any) -> None:
    (folder / "n1.out").write_text(format_reply(LOOK | facts) if code == 0 else "")
    (folder / "n1.err").write_text("")
    (folder / "n1.code").write_text(f"{code}\n")


@pytest.mark.parametrize(
    ("words", "code", "facts", "said"),
    [
        (["--watched", "700", "--stacks"], 0, {}, "hung"),
        (["--watched", "599", "--stacks"], 0, {}, "wait 1"),  # what was before we began to watch does not count
        (["--watched", "700", "--stacks"], 255, {}, "wait 60"),  # a node that cannot be asked
        (["--watched", "700", "--stacks", "--certain"], 0, {}, "wait 600"),  # it logs no steps
        (["--watched", "700", "--stacks", "--certain"], 0, {"metrics": 650.0}, "hung"),
        (["--watched", "700", "--stacks", "--certain"], 0, {"metrics": 100.0}, "wait 500"),
    ],
)
def test_the_launcher_learns_what_is_to_be_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, facts: dict[str, Any], said: str
) -> None:
    run = run_directory(tmp_path)
    answer(tmp_path, code, **facts)
    assert hang_decision.main([str(run), str(tmp_path), "--timeout", "600", *words]) == 0
    assert capsys.readouterr().out == f"{said}\n"
    assert (run / hang_decision.FOUND).exists() == (said == "hung")
    if said == "hung":
        asked = "" if "--certain" in words else " (--hang-timeout 600)"
        assert json.loads((run / hang_decision.FOUND).read_text())["cause"] == (
            f"hung: no output for {facts.get('metrics', 700.0):.0f} s{asked}; no rank used CPU in 1.0 s"
        )


def test_metrics_of_an_earlier_attempt_do_not_count_as_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_directory(tmp_path)
    answer(tmp_path, 0, ranks=[RANK | {"silent": 3.0}])
    (run / "metrics.jsonl").touch()
    os.utime(run / "metrics.jsonl", (time.time() - 5000,) * 2)
    assert hang_decision.main([str(run), str(tmp_path), "--timeout", "600", "--watched", "700"]) == 0
    assert capsys.readouterr().out == "wait 597\n"


def test_idle_is_what_uses_no_gpu_either() -> None:
    on_gpu = [replace(SLEEPS, gpu=100), SLEEPS]
    assert decided(on_gpu, 100.0, certain=True) == "wait 60"
