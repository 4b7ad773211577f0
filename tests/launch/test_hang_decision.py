"""A launcher stops its run as hung after --hang-timeout without output, or by default only if no rank can continue.

Any other run that looks hung is reported once, and again when its state changes. A run that is starting or ending, or
has a node that does not reply, is not treated as hung. status.bats and faults.bats test real runs.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_hang_analysis import IDLES, LOOPS, SLEEPS, STOPPED, WAITS, WORKS, ranks

from distributed.attempts import newest
from distributed.host.replies import Reply, format_reply
from distributed.launch import hang_decision
from distributed.launch.hang_decision import (
    HUNG,
    Decision,
    HangWatch,
    Hung,
    Notified,
    Query,
    Wait,
    decide,
    hang_record,
    notice_on,
)
from distributed.metrics import FROM_OUTPUT
from distributed.runs.lookup import RunNode, read
from distributed.runs.query import node_reply
from distributed.runs.run_directory import create
from distributed.runs.status import Observation
from distributed.verdict.hang_analysis import Activity, find_stall


def decision_on(
    activities: Sequence[Activity],
    silent: float,
    *,
    timeout: float = 100.0,
    sampled: bool = True,
    stacks: bool = True,
    permanent_only: bool = False,
    not_started: int = 0,
    stopped: tuple[Activity, ...] = (),
) -> Decision:
    """Call decide(), which explains silent, permanent_only and sampled. stacks: whether stacks have been requested."""
    observed = Observation(tuple(ranks(*activities)), (), not_started, 1.0, silent, stopped)
    stall = find_stall(observed.ranks, 1.0) if stacks and observed.ranks else None
    return decide(observed, timeout, silent, stall, permanent_only, sampled)


@pytest.mark.parametrize(
    ("activities", "silent", "sampled", "decision"),
    [
        ([WORKS, WORKS], 0.0, False, Wait(60)),
        ([WORKS, WORKS], 59.5, False, Wait(1)),
        ([WORKS, WORKS], 60.0, False, Query(1)),
        ([WORKS, WORKS], 60.0, True, Wait(60)),  # stacks are not requested: a request would disturb ranks
        ([SLEEPS, SLEEPS], 60.0, True, Query(1, stacks=True)),
        ([WORKS, SLEEPS], 120.0, True, Query(1, stacks=True)),
        ([WORKS, WORKS], 300.0, False, Query(1, stacks=True)),
        ([], 1e6, False, Wait(60)),
    ],
)
def test_nodes_are_queried_for_cpu_use_and_for_stacks_only_after_a_time_without_output(
    activities: list[Activity], silent: float, sampled: bool, decision: Decision
) -> None:
    assert decision_on(activities, silent, timeout=300.0, sampled=sampled, stacks=False) == decision


@pytest.mark.parametrize(
    ("silent", "timeout", "decision"),
    [(60.0, 1e9, Wait(60)), (130.0, 1e9, Wait(130)), (1e6, 1e9, Wait(600)), (130.0, 200.0, Wait(70))],
)
def test_a_run_that_stays_without_output_is_queried_less_and_less_often(
    silent: float, timeout: float, decision: Decision
) -> None:
    assert decision_on([SLEEPS, SLEEPS], silent, timeout=timeout) == decision


@pytest.mark.parametrize(
    ("activities", "with_timeout", "by_default"),
    [
        ([WAITS, LOOPS], HUNG, Wait(60)),  # rank 1 may be in an evaluation
        ([WAITS, IDLES], HUNG, HUNG),
        ([WAITS, WAITS], HUNG, HUNG),
        ([WORKS, WORKS], HUNG, Wait(60)),
        ([WORKS, SLEEPS], HUNG, Wait(60)),
        ([SLEEPS, SLEEPS], HUNG, HUNG),
        ([WAITS, STOPPED], HUNG, Wait(60)),  # a user stopped it on purpose
        ([LOOPS], HUNG, Wait(60)),
    ],
)
def test_by_default_a_run_is_treated_as_hung_only_if_it_cannot_continue(
    activities: list[Activity], with_timeout: Decision, by_default: Decision
) -> None:
    assert decision_on(activities, 100.0) == with_timeout
    assert decision_on(activities, 100.0, permanent_only=True) == by_default


def test_a_run_is_treated_as_hung_only_after_all_its_ranks_have_started() -> None:
    assert decision_on([SLEEPS], 200.0, not_started=1) == Wait(60)


AGENT = Activity(None, "n1", 12, "T", 0.0, None)


@pytest.mark.parametrize(
    ("silent", "permanent_only", "decision"), [(99.0, False, Wait(60)), (100.0, False, HUNG), (100.0, True, Wait(60))]
)
def test_with_hang_timeout_a_stopped_agent_means_a_hung_run_while_ranks_start_or_have_ended(
    silent: float, permanent_only: bool, decision: Decision
) -> None:
    for activities, not_started in (((), 0), ((), 2), ((SLEEPS,), 1)):
        found = decision_on(
            activities, silent, permanent_only=permanent_only, not_started=not_started, stopped=(AGENT,)
        )
        assert found == decision


def test_the_record_of_a_stopped_agent_names_its_process_and_node(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"ranks": [RANK_STATUS | {"pid": None}], "stopped": [12]}
    found, _ = check(hang_watch(tmp_path, 600), 700, Query(0), **facts)
    assert isinstance(found, Hung)
    cause = "hung: no output for 700 s (--hang-timeout 600); process 12 on n1 is stopped (state T)"
    assert (found.record["cause"], found.record["node"], found.record["rank"]) == (cause, "n1", None)
    found, notice = check(hang_watch(tmp_path), 700, Query(0), **facts)
    assert (found, notice) == (
        Wait(60), "the run looks hung: process 12 on n1 is stopped (state T); to continue, run there: kill -CONT 12"
    )  # fmt: skip


def test_the_record_has_the_stack_of_the_suspect_and_what_each_other_rank_did() -> None:
    observed = Observation(tuple(ranks(WAITS, LOOPS, SLEEPS)), (), 0, 1.0, 0.0)
    record = hang_record(observed, 100.4, find_stall(observed.ranks, 1.0), " (--hang-timeout 90)")
    assert record["cause"].startswith("hung: no output for 100 s (--hang-timeout 90); rank 1 on n2 is not in a coll")
    assert (record["node"], record["rank"]) == ("n2", 1)
    assert record["traceback"].endswith('  File "/home/ada/hang.py", line 12, in main\n')
    assert [(one["rank"], one["message"]) for one in record["others"]] == [
        (0, "waited in a collective at hang.py:9"),
        (2, "used 0% CPU"),
    ]


def hang_watch(logs: Path, timeout: float = math.inf, permanent_only: bool = False) -> HangWatch:
    """The watch of a run with up to two ranks on the node n1."""
    directory = create(
        str(logs), "train", nodes=[RunNode("n1", "", 2, 0)], script="train.py", config=None, cwd="/", python="python3",
        command=["x"], launcher=os.getpid(),
    )  # fmt: skip
    return HangWatch(read(Path(directory)), timeout, permanent_only)


RANK_STATUS = {
    "rank": 0, "local_rank": 0, "pid": 7, "state": "S", "cpu": 0.0, "memory": 0, "gpus": [], "silent": 900.0,
    "line": "", "stack_text": "", "frames": [],
}  # fmt: skip
NODE_STATUS = {
    "host": "n1", "seconds": 1.0, "ranks": [RANK_STATUS], "processes": [], "line": "", "gpus": [], "gpu_error": "",
    "progress": {},
}  # fmt: skip


def check(watch: HangWatch, watched: float, query: Query, code: int = 0, **facts: Any) -> tuple[Decision, str]:
    """Return the decision and the notice after n1 has replied.

    watched: seconds since the watch started. facts: changed fields of NODE_STATUS.
    """
    output = format_reply(NODE_STATUS | facts) if code == 0 else ""
    return watch.check_replies([node_reply(watch.run.nodes[0], Reply("n1", code, output, ""))], watched, query)


@pytest.mark.parametrize(
    ("watched", "permanent_only", "code", "facts", "decision"),
    [
        (700, False, 0, {}, HUNG),
        (599, False, 0, {}, Wait(1)),  # the time before the watch started is ignored
        (700, False, 255, {}, Wait(60)),  # the node does not reply
        (700, True, 0, {}, Wait(600)),  # the run logs no steps
        (700, True, 0, {"progress": {"step": 9, "origin": "from the output"}}, Wait(600)),  # the run prints steps
        (700, True, 0, {"progress": {"silent": 650.0}}, HUNG),
        (700, True, 0, {"progress": {"silent": 100.0}}, Wait(100)),
    ],
)
def test_a_run_is_treated_as_hung_after_its_timeout_and_the_cause_is_recorded(
    tmp_path: Path, watched: float, permanent_only: bool, code: int, facts: dict[str, Any], decision: Decision
) -> None:
    found, _ = check(hang_watch(tmp_path, 600, permanent_only), watched, Query(1, stacks=True), code, **facts)
    if decision != HUNG:
        assert found == decision
        return
    assert isinstance(found, Hung)
    option = "" if permanent_only else " (--hang-timeout 600)"
    assert found.record["cause"] == (
        f"hung: no output for {facts.get('progress', {}).get('silent', 700.0):.0f} s{option}; no rank used CPU in 1.0 s"
    )


def test_old_metrics_of_an_earlier_attempt_are_ignored(tmp_path: Path) -> None:
    watch = hang_watch(tmp_path, 600)
    (watch.run.directory / "metrics.jsonl").touch()
    os.utime(watch.run.directory / "metrics.jsonl", (time.time() - 5000,) * 2)
    assert check(watch, 700, Query(0), ranks=[RANK_STATUS | {"silent": 3.0}]) == (Wait(57), "")


def test_by_default_a_run_whose_steps_were_only_found_in_its_output_is_not_stopped(tmp_path: Path) -> None:
    watch = hang_watch(tmp_path, 600, permanent_only=True)
    (watch.run.directory / FROM_OUTPUT).write_text('{"step": 9}\n')
    assert check(watch, 700, Query(1, stacks=True))[0] == Wait(600)


@pytest.mark.parametrize(
    ("files", "watched", "decision"),
    [
        ({}, 60, Query(0)),  # this machine does not see the output
        ({"node_n1.log": 900.0, "node_n2.log": 20.0}, 700, Wait(40)),
        ({"node_n1.log": 900.0, "metrics.jsonl": 20.0}, 700, Wait(40)),
        ({"node_n1.log": 61.0}, 700, Query(0)),
        ({"node_n1.log": 900.0}, 20, Wait(40)),  # the machine was suspended: only 20 s were watched
    ],
)
def test_nodes_are_not_queried_while_files_on_this_machine_have_recent_output(
    tmp_path: Path, files: dict[str, float], watched: int, decision: Decision
) -> None:
    watch = hang_watch(tmp_path)
    for name, age in files.items():
        directory = Path(newest(watch.run.directory)) if name.startswith("node_") else watch.run.directory
        (directory / name).touch()
        os.utime(directory / name, (time.time() - age - 0.5,) * 2)
    assert watch.check_files(watched) == (decision, "")


def test_a_run_that_looks_hung_is_reported_once_and_again_when_its_state_changes(tmp_path: Path) -> None:
    """The run has no metrics. Rank 0 has exited with 0, and rank 1 sleeps."""
    watch = hang_watch(tmp_path, 600, permanent_only=True)

    def notice_after(silent: float, **facts: Any) -> str:
        exited = RANK_STATUS | {"pid": None, "silent": 5000.0}
        rank = RANK_STATUS | {"rank": 1, "local_rank": 1, "silent": silent}
        return check(watch, 700, Query(1, stacks=True), ranks=[exited, rank | facts])[1]

    assert notice_after(59.0) == ""
    assert notice_after(61.0) == (
        "the run looks hung: no output for 61 s; no rank used CPU in 1.0 s; rank 0 on n1 ended with exit code 0; "
        "it is not stopped automatically"
    )
    assert notice_after(125.0) == ""
    assert notice_after(130.0, cpu=0.9) == ""
    assert notice_after(130.0, state="T") == (
        "the run looks hung: rank 1 on n1 is stopped (state T); to continue, run there: kill -CONT 7"
    )
    assert notice_after(3.0) == hang_decision.RECOVERED
    assert notice_after(3.0) == ""


def test_a_node_whose_nvidia_smi_does_not_reply_is_named_in_the_notice_and_in_the_cause(tmp_path: Path) -> None:
    """A GPU that has failed can keep the ranks busy in the driver."""
    facts: dict[str, Any] = {"gpu_error": "nvidia-smi: no reply within 5 s"}
    busy = [RANK_STATUS | {"cpu": 1.0, "state": "R", "silent": 63.0}]
    watch = hang_watch(tmp_path, 700)
    assert check(watch, 700, Query(1), ranks=busy)[1] == ""
    for notice in (
        "the run has had no output for 63 s; n1: nvidia-smi: no reply within 5 s; it is not stopped automatically",
        "",
    ):
        assert check(watch, 700, Query(1), ranks=busy, **facts)[1] == notice
    idle = [RANK_STATUS | {"silent": 65.0}]
    assert check(watch, 700, Query(1, stacks=True), ranks=idle, **facts)[1] == (
        "the run looks hung: no output for 65 s; no rank used CPU in 1.0 s; n1: nvidia-smi: no reply within 5 s; "
        "it is not stopped automatically"
    )
    found, _ = check(watch, 700, Query(1, stacks=True), **facts)
    assert isinstance(found, Hung)
    assert str(found.record["cause"]).endswith("; no rank used CPU in 1.0 s; n1: nvidia-smi: no reply within 5 s")


def test_a_run_with_long_pauses_is_reported_again_only_after_a_longer_pause() -> None:
    def notice_at(time: float, silent: float, notified: Notified) -> tuple[str, Notified]:
        return notice_on(Observation(tuple(ranks(SLEEPS)), (), 0, 1.0, silent), silent, notified, time)

    notice, known = notice_at(1000.0, 60.0, Notified())
    assert notice.startswith("the run looks hung: no output for 60 s")
    notice, known = notice_at(1100.0, 90.0, known)  # the output came after 70 s
    assert (notice, known) == (hang_decision.RECOVERED, Notified(longest_pause=70.0))
    assert notice_at(1140.0, 130.0, known) == ("", known)
    assert notice_at(1150.0, 140.0, known)[0].startswith("the run looks hung: no output for 140 s")


def test_new_output_in_files_on_this_machine_is_reported_after_a_notice(tmp_path: Path) -> None:
    watch = hang_watch(tmp_path)
    assert check(watch, 700, Query(1, stacks=True))[1].startswith("the run looks hung: no output for 700 s")
    (watch.run.directory / "node_n1.log").touch()
    assert watch.check_files(700)[1] == hang_decision.RECOVERED


@pytest.mark.parametrize(
    "facts",
    [
        [{"cpu": 0.99}, {"cpu": 0.99}],
        [{"silent": 3.0}, {}],
        [{}, {"pid": None, "silent": None}],  # not started yet
        [{"pid": None}, {"pid": None}],
    ],
)
def test_a_long_computation_and_a_run_that_starts_or_ends_are_not_reported(
    tmp_path: Path, facts: list[dict[str, Any]]
) -> None:
    ranks = [RANK_STATUS | {"rank": number} | one for number, one in enumerate(facts)]
    assert check(hang_watch(tmp_path), 9000, Query(1, stacks=True), ranks=ranks)[1] == ""


def test_a_rank_that_uses_its_gpu_is_not_idle() -> None:
    on_gpu = [replace(SLEEPS, gpu=100), SLEEPS]
    assert decision_on(on_gpu, 100.0, permanent_only=True) == Wait(60)
