"""How a run is told of: found by its name, judged from what its nodes saw, drawn so that it fits.

The launcher is known by more than its number; what a node did not say is never taken for good news; no line of the
table is longer than the terminal is wide.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distributed.host import identity, process_scan
from distributed.runs import lookup, run_directory, status, visit
from distributed.runs.hang_analysis import Diagnosis
from distributed.runs.lookup import ELSEWHERE, GONE, HERE, IN_JOB, Launcher, NoRun, Place, Run, seen
from distributed.runs.node_status import Gpu, NodeStatus, Process, Rank
from distributed.runs.records import read_object
from distributed.runs.status import Progress, judge
from distributed.runs.visit import Visit
from distributed.terminal import columns, plain

GPU = Gpu(0, "NVIDIA H100", 97, 412.4, 0, 0)
LAUNCHER = Launcher("head", 4711, 1, HERE, 8)
RUN = Run(Path("/x/logs/train-1"), "/x/logs/train-1", "python3", "ada", "2025-01-02T03:04:05+00:00", (), LAUNCHER, ())
START = 1735787045.0
RANK = Rank(0, 0, 100, "R", 0.993, 1_290_000_000, (GPU,), 1.4, "step 120/1200  loss 2.31 ⏱")
PROCESS = Process(100, 1, "R", "/usr/bin/python my script.py", 0, 0, 1, 0)


def here(node: str, *ranks: Rank, processes: int | None = None) -> Visit:
    count = len([rank for rank in ranks if rank.pid]) if processes is None else processes
    return Visit(Place(node, node, len(ranks), 0), NodeStatus(node, 1.0, ranks, (PROCESS,) * count))


def lost(node: str) -> Visit:
    return Visit(Place(node, f"ada@{node}", 2, 2), None, "cannot be reached (timed out); try: ssh n2 true")


def launched(where: str) -> Run:
    return replace(RUN, launcher=replace(LAUNCHER, where=where))


DEAD = replace(RANK, pid=None, state="", gpus=())
NEVER = replace(DEAD, silent=None, line="")
OK, STOPPED = {"outcome": "ok", "cause": "all"}, {"outcome": "stopped", "cause": "asked"}
FAILED = {"outcome": "failed", "cause": "rank 1 raised ValueError: boom"}


@pytest.mark.parametrize(
    ("where", "answers", "verdict", "name", "code", "more"),
    [
        (HERE, [here("n1", RANK)], {}, "running", 0, ""),
        (HERE, [here("n1", RANK, replace(DEAD, rank=1))], {}, "running", 0, "not there: rank 1 on n1"),
        (HERE, [here("n1", RANK), lost("n2")], {}, "running", 69, ""),
        (HERE, [here("n1", replace(RANK, state="T")), lost("n2")], {}, "running", 1, ""),
        (HERE, [here("n1", NEVER)], {}, "starting", 0, ""),
        (HERE, [here("n1", DEAD)], {}, "ending", 0, "no rank is there any more"),
        (HERE, [here("n1", DEAD)], FAILED, "ending", 0, "boom"),
        (GONE, [here("n1", DEAD)], OK, "ended", 0, "verdict: ok: all"),
        (GONE, [here("n1", DEAD)], STOPPED, "ended", 0, "verdict: stopped: asked"),
        (GONE, [here("n1", DEAD)], FAILED, "ended", 1, "verdict: failed: rank 1 raised ValueError: boom"),
        (GONE, [here("n1", DEAD), lost("n2")], OK, "ended", 69, "verdict: ok: all"),
        (GONE, [here("n1", DEAD), here("n2", RANK)], OK, "left", 1, "processes are left on n2"),
        (GONE, [here("n2", DEAD, processes=1)], {}, "left", 1, "processes are left on n2"),
        (ELSEWHERE, [here("n1", RANK)], {}, "running", 0, ""),
        (ELSEWHERE, [here("n1", DEAD)], OK, "ended", 0, "verdict: ok"),
        (ELSEWHERE, [here("n1", DEAD)], {}, "unknown", 1, "nothing of it runs, and there is no verdict"),
    ],
)
def test_how_a_run_stands(
    where: str, answers: list[Visit], verdict: dict[str, Any], name: str, code: int, more: str
) -> None:
    found = judge(launched(where), answers, verdict, Progress(), START + 60)
    assert (found.state.name, found.exit_code) == (name, code)
    assert more in found.state.more and bool(more) == bool(found.state.more)


@pytest.mark.parametrize(
    ("where", "job_state", "name", "code"),
    [
        (IN_JOB, "RUNNING None", "running", 0),
        (GONE, "PENDING BeginTime", "waiting", 0),
        (GONE, "", "ended", 0),
    ],
)
def test_a_job_of_slurm_stands_as_the_queue_says(where: str, job_state: str, name: str, code: int) -> None:
    run = replace(launched(where), job="17")
    verdict = {} if where == IN_JOB else STOPPED
    found = judge(run, [here("n1", RANK if where == IN_JOB else DEAD)], verdict, Progress(), START + 60, job_state)
    assert (found.state.name, found.exit_code) == (name, code)
    assert ("job 17 waits for its next turn (BeginTime)" in plain(status.draw(found, 80))) == (name == "waiting")


def test_the_json_names_each_node() -> None:
    [one, two] = json.loads(status.as_json(judge(RUN, [here("n1", RANK), lost("n2")], {}, Progress(), START)))["nodes"]
    assert (one["node"], one["look"]["ranks"][0]["pid"], two["look"], two["address"]) == ("n1", 100, None, "ada@n2")


def test_a_run_that_has_ended_took_the_time_to_its_verdict_and_cannot_hang() -> None:
    found = judge(launched(GONE), [here("n1", DEAD)], OK | {"written": START + 720}, Progress(), START + 90_000)
    assert (found.seconds, found.pulse) == (720.0, Diagnosis(False))


def test_silence_is_broken_by_metrics_too() -> None:
    asleep = here("n1", replace(RANK, cpu=0.0, gpus=(), silent=500.0))
    assert judge(RUN, [asleep], {}, Progress(), START + 600).pulse.hung
    assert not judge(RUN, [asleep], {}, Progress(silent=3.0), START + 600).pulse.hung


def test_the_ranks_are_seen_with_those_that_have_ended_or_are_still_to_come() -> None:
    found = status.seen([here("n1", RANK, replace(DEAD, rank=1)), here("n2", replace(NEVER, rank=2))], Progress(), 60.0)
    assert ([beat.rank for beat in found.beats], found.ended, found.to_come) == ([0], ("rank 1 on n1",), 1)


def test_stacks_are_asked_for_when_it_is_quiet_and_only_then() -> None:
    asleep = here("n1", replace(RANK, cpu=0.0, gpus=(), silent=500.0))
    assert judge(RUN, [asleep], {}, Progress(), START + 600).needs_stacks
    assert not judge(RUN, [asleep], {}, Progress(silent=3.0), START + 600).needs_stacks
    assert not judge(launched(GONE), [here("n1", DEAD)], OK, Progress(), START + 600).needs_stacks


LONG = replace(RANK, rank=1, local_rank=1, line="火" * 200, state="T", silent=312.0)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_what_is_drawn_fits_and_is_aligned(width: int) -> None:
    found = judge(RUN, [here("node1", RANK, LONG), lost("n2")], {}, Progress(120, 1200, 2.3125, 1.0), START + 720)
    lines = plain(status.draw(found, width)).splitlines()
    assert all(columns(line) <= width for line in lines)
    assert lines[0] == "train-1: running for 12 min, step 120 of 1,200, loss 2.3125"
    assert lines[1:3] == ["looks hung: rank 1 on node1 is stopped (state T); to go on, there:", "  $ kill -CONT 100"]
    head = lines[4]
    assert ("  pid  " in head) == (width >= 100)
    assert re.fullmatch(r"node +rank +(pid +)?state +cpu +memory +gpu +quiet +last line", head)
    start = head.index("last line")
    assert lines[5][start:].startswith("step 120") and lines[6][start:].startswith("火") and lines[6].endswith("…")
    assert "99%    1.2G  0: 97% 412W    1 s  step 120" in lines[5]
    assert lines[7].split() == ["n2", "2-3", "not", "seen"]
    assert " ".join(" ".join(lines[8:]).split()) == "n2: cannot be reached (timed out); try: ssh n2 true"


def test_columns_in_which_nobody_has_anything_are_left_out() -> None:
    found = judge(launched(GONE), [here("n1", DEAD)], OK, Progress(), START)
    assert "node  rank  state  last line" in plain(status.draw(found, 80))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (99.4, "99 s"), (100, "2 min"), (5900, "98 min"), (6000, "2 h"), (1e6, "12 days")],
)
def test_a_duration_is_short(seconds: float, words: str) -> None:
    assert status.duration(seconds) == words


def test_progress_is_the_newest_of_what_metrics_jsonl_holds(tmp_path: Path) -> None:
    assert status.read_progress(tmp_path, 0.0) == Progress()
    lines = [{"step": 1, "steps": 9, "loss": 3.0}, {"step": 2, "loss": None}, {"step": 2, "held_out_loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 3, "lo')
    found = status.read_progress(tmp_path, 0.0)
    assert (found.step, found.steps, found.loss, found.silent) == (2, 9, None, 0.0)


# ---------------------------------------------------------------- the proof


def test_the_proof_has_a_line_for_each_node_and_never_takes_silence_for_good_news() -> None:
    gone = launched(GONE)
    assert visit.prove(gone, [here("n1", DEAD)]) == (["n1: nothing of this run is left"], 0)
    lines, code = visit.prove(gone, [here("n1", DEAD), lost("n2")])
    assert code == 69 and "n2: cannot be reached" in lines[1] and lines[1].endswith("ends when it is alone: ask again")
    lines, code = visit.prove(gone, [here("n1", RANK, processes=4), lost("n2")])
    assert code == 1
    assert lines[0].startswith("n1: still has 4 processes of this run: 100 python my script.py, 100 ")


@pytest.mark.parametrize(
    ("code", "err", "why"),
    [
        (
            "255",
            "ssh: connect to host n1 port 22: timed out",
            "cannot be reached (ssh: connect to host n1 port 22: tim",
        ),
        ("137", "", "has not answered in time"),
        ("127", "bash: line 1: exec: /x/python: not found", "Python not found"),
        ("2", "python: can't open file '/k/scripts/lib/module.py'", "Muster not found"),
    ],
)
def test_a_node_that_did_not_answer_is_told_of_with_the_reason(tmp_path: Path, code: str, err: str, why: str) -> None:
    (tmp_path / "n1.out").write_text("Welcome!\n")
    (tmp_path / "n1.err").write_text(err)
    (tmp_path / "n1.code").write_text(f"{code}\n")
    found = visit.visit(Place("n1", "n1", 1, 0), tmp_path)
    assert found.look is None and why in found.why


# ---------------------------------------------------------------- where a run is


def made(logs: Path, **changes: Any) -> Path:
    facts: dict[str, Any] = {"nodes": ["n1", "n2"], "nproc": 3, "places": ["ada@n1:1", "n2:2"], "launcher": os.getpid()}
    fixed: dict[str, Any] = {"script": "t.py", "config": None, "cwd": "/", "python": "/p/python", "command": ["t"]}
    return Path(run_directory.create(str(logs), "train", **fixed, **facts | changes))


def test_a_run_is_found_again_with_its_nodes_and_its_launcher(tmp_path: Path) -> None:
    folder = made(tmp_path / "my logs")
    run_directory.point_to(str(folder), [])
    for word in (str(folder), folder.name, "latest", "my logs/latest"):
        found = lookup.read(lookup.find(word, tmp_path, tmp_path / "my logs"))
        assert (found.folder, found.mark) == (folder, str(folder))
    assert found.places == (Place("n1", "ada@n1", 1, 0), Place("n2", "n2", 2, 1))
    assert (found.launcher.where, found.launcher.pid) == (HERE, os.getpid())


def test_a_folder_that_was_moved_keeps_the_mark_of_its_processes(tmp_path: Path) -> None:
    folder = made(tmp_path / "logs")
    moved = (tmp_path / "logs").rename(tmp_path / "old")
    found = lookup.read(moved / folder.name)
    assert (found.folder, found.mark) == (moved / folder.name, str(folder))


def test_a_node_of_one_machine_is_reached_at_its_launcher_from_elsewhere(tmp_path: Path) -> None:
    folder = made(tmp_path, nodes=["n1"], places=[])
    assert lookup.read(folder).places == (Place("n1", "", 3, 0),)
    facts = json.loads((folder / "run.json").read_text())
    facts["launcher"] |= {"machine": "another", "host": "far"}
    (folder / "run.json").write_text(json.dumps(facts))
    found = lookup.read(folder)
    assert (found.launcher.where, found.places) == (ELSEWHERE, (Place("n1", "far", 3, 0),))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"folder": ' + "9" * 5000 + "}"])
def test_a_damaged_run_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(NoRun, match=r"run.json: cannot be read"):
        lookup.read(tmp_path)
    assert read_object(tmp_path / "run.json", []) == {}


def test_a_launcher_is_known_by_more_than_its_number() -> None:
    host, machine, since = os.uname().nodename, identity.machine(), process_scan.start_time(os.getpid())
    assert since is not None
    assert seen(host, machine, os.getpid(), since) == HERE
    assert seen(host, machine, os.getpid(), since - 1) == GONE, "another process has its number now"
    assert seen(host, machine, 2**22 + 1, since) == GONE
    assert seen(host, machine, os.getpid(), None) == GONE
    assert seen(host, "an-earlier-boot" + "net:[1]", os.getpid(), since) == GONE
    assert seen("far", "another-boot" + "net:[1]", os.getpid(), since) == ELSEWHERE
    assert seen(host, lookup.boot(machine) + "net:[1]", os.getpid(), since) == ELSEWHERE, "a network of its own"


def test_what_another_has_started_is_refused(tmp_path: Path) -> None:
    run = lookup.read(made(tmp_path))
    lookup.refuse_others(run, "bob", 0)
    lookup.refuse_others(run, run.user, 1000)
    with pytest.raises(NoRun, match=f"{run.user} has started it, and you are bob"):
        lookup.refuse_others(run, "bob", 1000)
