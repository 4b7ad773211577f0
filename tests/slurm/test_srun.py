"""What comes through srun is parted into words and reports, however it is cut; and an srun that fails has a verdict.

The rest of a step is shown on a real SLURM: tests/slurm_train.bats, tests/slurm_faults.bats.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.exit_codes import UNFIT
from distributed.runs import verdict
from distributed.slurm import srun, task
from distributed.slurm.srun import Node, Stream
from distributed.slurm.task import REPORT, Task

SAID = b"step 1\nstep 2 is cut amid " + REPORT + b'{"node": "n2", "end": {"exit_code": 0}}\n' + b"its line\n"
SAID += REPORT + b'{"node": "n1"}\n' + REPORT + b"no report\n" + REPORT + b"[1]\n" + b"the end\n"


@given(st.lists(st.integers(1, len(SAID)), max_size=12))
def test_reports_are_found_wherever_the_stream_is_cut(cuts: list[int]) -> None:
    stream, found = Stream(), []
    places = sorted({0, *cuts, len(SAID)})
    for begin, end in itertools.pairwise(places):
        found += list(stream.feed(SAID[begin:end]))
    assert b"".join(word for word in found if isinstance(word, bytes)) == (
        b"step 1\nstep 2 is cut amid its line\n" + REPORT + b"no report\n" + REPORT + b"[1]\nthe end\n"
    )
    assert [word["node"] for word in found if isinstance(word, dict)] == ["n2", "n1"]


def test_a_node_ends_with_the_code_of_its_first_task_that_ended_badly() -> None:
    node = Node("n1", tasks=3)
    for code in (0, -9, 1):
        assert not node.ended
        node.ends.append({"exit_code": code})
    assert node.ended
    assert node.exit_code == 137


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "errors").mkdir()
    places = [{"node": "n1", "address": "n1", "processes": 1, "first_rank": 0}]
    (tmp_path / "run.json").write_text(json.dumps({"places": places}))
    reading, writing = os.pipe()  # nobody gives orders
    monkeypatch.setattr("distributed.slurm.srun.ORDERS", reading)
    yield tmp_path
    os.close(reading)
    os.close(writing)


def started(*words: str) -> subprocess.Popen[bytes]:
    """What stands in for srun."""
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)


def step_of(run: Path, *words: str) -> int:
    """The exit code of a step of one task."""
    return srun.watch(str(run), "n1:1", started(*words))


def test_an_srun_that_starts_nothing_is_named_with_what_it_says(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert step_of(run, "sh", "-c", "echo srun: error: no such node >&2; exit 3") == 3
    assert "srun: error: no such node" in capfd.readouterr().err
    judged = verdict.decide(run, 3)
    assert (judged.outcome, judged.exit_code) == ("failed", 3)
    assert "srun ended with: srun: error: no such node" in judged.cause


def test_an_srun_that_ends_well_without_its_tasks_is_no_success(run: Path) -> None:
    """As when the allocation is revoked."""
    assert step_of(run, "true") == UNFIT
    assert verdict.decide(run, UNFIT).outcome == "failed"


def test_of_a_task_that_never_told_its_end_the_node_is_lost(run: Path) -> None:
    report = (REPORT + b'{"node": "n1", "tasks": 1}\n').decode()
    assert step_of(run, "printf", "%s", report) == UNFIT
    assert (run / "node_n1.lost").read_text() == "srun has ended before its tasks\n"


def test_a_task_that_ended_with_0_while_others_waited_for_it_is_named(run: Path) -> None:
    (run / "errors/rank_0.json").write_text(
        json.dumps(
            {"node": "n1", "rank": 0, "pid": 1, "exception": "RuntimeError", "message": "Connection reset by peer"}
        )
    )
    ends = [{"rank": 1, "exit_code": 0}, {"rank": 0, "exit_code": 1}]
    reports = [
        {"node": f"n{2 - k}", "tasks": 1, "end": {"pid": 1, "time": 1.0 + k, **end}} for k, end in enumerate(ends)
    ]
    said = "".join(f"{REPORT.decode()}{json.dumps(report)}\n" for report in reports)
    assert srun.watch(str(run), "n1:1,n2:1", started("printf", "%s", said)) == 1
    assert verdict.decide(run, 1).cause == "rank 1 on n2 ended with exit code 0 while rank 0 on n1 was in a collective"


def test_what_slurm_says_of_a_failed_node_may_come_in_pieces(run: Path) -> None:
    said = "printf 'srun: error: Node fail' >&2; sleep 0.2; echo 'ure on n1' >&2"
    assert step_of(run, "sh", "-c", said) == UNFIT
    assert (run / "node_n1.lost").read_text() == "SLURM says that this node has failed\n"


@pytest.mark.parametrize(("away", "lost"), [(60.0, False), (0.0, True)])
def test_a_node_is_not_blamed_for_what_we_could_not_hear(run: Path, away: float, lost: bool) -> None:
    """When a disk or a terminal has let us wait, words of the nodes may wait for us."""
    node = Node("n1", tasks=1, heard=time.monotonic() - 60)
    watched = srun.Step(run, [node], started("true"))
    with watched._srun, watched._said_of_srun:
        watched._looked = time.monotonic() - away
        watched.look_at_the_clock()
    assert node.lost == lost


ENV = {
    "SLURM_PROCID": "3",
    "SLURMD_NODENAME": "n2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_GTIDS": "2,3",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "20017",
}


def test_the_console_has_rank_0_and_the_log_has_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for rank in ("0", "3"):
        here = Task.from_env(tmp_path, ENV | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}, agent=False)
        with closing(task.Voice(here)) as voice:
            here.outputs()[0].write_bytes(b"begun, " + rank.encode())
            voice.pass_on()
            with here.outputs()[0].open("ab") as more:
                more.write(b" and ended\nlast")
            voice.pass_on(last=True)
    assert capfd.readouterr().out == "[n2:0] begun, 0 and ended\n[n2:0] last\n"
    assert (tmp_path / "node_n2.log").read_bytes().splitlines() == [
        *(b"[n2:0] begun, 0 and ended", b"[n2:0] last"),
        *(b"[n2:3] begun, 3 and ended", b"[n2:3] last"),
    ]


def test_an_agent_gets_the_options_of_its_node() -> None:
    here = Task.from_env(Path("/logs/train-1"), ENV, agent=True)
    words = task.agent_options(here, [2, 4], ENV)
    options: dict[str, Any] = dict(zip(words[::2], words[1::2], strict=True))
    assert options == {
        "--rdzv-id": "train-1",
        "--nnodes": "2",
        "--node-rank": "1",
        "--nproc-per-node": "4",
        "--master-addr": "n1",
        "--master-port": "20017",
        "--log-dir": "/logs/train-1/ranks/n2",
    }
