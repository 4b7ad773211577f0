"""Finding a run, judging the replies of its nodes, and rendering its status.

A launcher is identified by its pid and start time; a node that did not reply is never reported as free of processes;
the table fits the terminal.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distributed import files, index
from distributed.host import identity, process_scan
from distributed.host.collectives import Collectives
from distributed.host.replies import MARKER, Reply
from distributed.host.stacks import Frame
from distributed.launch.hang_decision import seconds_without_output
from distributed.metrics import FROM_OUTPUT, FROM_TENSORBOARD
from distributed.records import read_object
from distributed.runs import lookup, query, run_directory, status
from distributed.runs.lookup import (
    EXITED,
    IN_JOB,
    REMOTE,
    RUNNING,
    Launcher,
    Run,
    RunLookupError,
    RunNode,
    state_of_launcher,
)
from distributed.runs.node_status import GpuUsage, NodeStatus, RankStatus, RunProcess, RunProgress, read_progress
from distributed.runs.query import NodeReply
from distributed.runs.status import judge
from distributed.terminal import columns, plain
from distributed.verdict.hang_analysis import Diagnosis

GPU = GpuUsage(0, "NVIDIA H100", 97, 412.4, 0, 0)
LAUNCHER = Launcher("head", 4711, 1, RUNNING, 8)
RUN = Run(Path("/x/logs/train-1"), "/x/logs/train-1", "python3", "ada", "2025-01-02T03:04:05+00:00", (), LAUNCHER, ())
START = 1735787045.0
RANK = RankStatus(0, 0, 100, "R", 0.993, 1_290_000_000, (GPU,), 1.4, "step 120/1200  loss 2.31 ⏱")
PROCESS = RunProcess(100, 1, "R", "/usr/bin/python my script.py", 0, 0, 1, 0)


def reply(node: str, *ranks: RankStatus, processes: int | None = None) -> NodeReply:
    count = len([rank for rank in ranks if rank.pid]) if processes is None else processes
    return NodeReply(RunNode(node, node, len(ranks), 0), NodeStatus(node, 1.0, ranks, (PROCESS,) * count))


def no_reply(node: str) -> NodeReply:
    return NodeReply(RunNode(node, f"ada@{node}", 2, 2), None, "cannot be reached (timed out); try: ssh n2 true")


def run_with_launcher(state: str) -> Run:
    return replace(RUN, launcher=replace(LAUNCHER, state=state))


def test_a_run_that_continues_without_its_launcher_is_shown_with_a_command_that_attaches_to_it(tmp_path: Path) -> None:
    run = replace(run_with_launcher(EXITED), directory=tmp_path / "my run", lease=0)
    state = judge(run, [reply("n1", RANK)], FAILED, RunProgress(), START).state
    assert (state.name, state.wrong) == ("left", False)
    assert state.more == "the launcher has exited, and the run continues on n1; to follow it again:"
    assert shlex.split(state.remedy) == [f"{files.KIT}/scripts/attach.sh", f"{tmp_path}/my run"]
    (tmp_path / "my run").mkdir()
    (tmp_path / "my run/verdict.json").touch()
    assert "processes remain on n1" in judge(run, [reply("n1", RANK)], FAILED, RunProgress(), START).state.more


ENDED = replace(RANK, pid=None, state="", gpus=())
NOT_STARTED = replace(ENDED, silent=None, line="")
OK, STOPPED = {"outcome": "ok", "cause": "all"}, {"outcome": "stopped", "cause": "asked"}
FAILED = {"outcome": "failed", "cause": "rank 1 raised ValueError: boom"}


@pytest.mark.parametrize(
    ("state", "replies", "verdict", "name", "code", "more"),
    [
        (RUNNING, [reply("n1", RANK)], {}, "running", 0, ""),
        (RUNNING, [reply("n1", RANK, replace(ENDED, rank=1))], {}, "running", 0, "not running: rank 1 on n1"),
        (RUNNING, [reply("n1", RANK), no_reply("n2")], {}, "running", 69, ""),
        (RUNNING, [reply("n1", replace(RANK, state="T")), no_reply("n2")], {}, "running", 1, ""),
        (RUNNING, [reply("n1", NOT_STARTED)], {}, "starting", 0, ""),
        (RUNNING, [reply("n1", ENDED)], {}, "ending", 0, "all ranks have exited"),
        (RUNNING, [reply("n1", ENDED)], FAILED, "ending", 0, "boom"),
        (EXITED, [reply("n1", ENDED)], OK, "ended", 0, "verdict: ok: all"),
        (EXITED, [reply("n1", ENDED)], STOPPED, "ended", 0, "verdict: stopped: asked"),
        (EXITED, [reply("n1", ENDED)], FAILED, "ended", 1, "verdict: failed: rank 1 raised ValueError: boom"),
        (EXITED, [reply("n1", ENDED), no_reply("n2")], OK, "ended", 69, "verdict: ok: all"),
        (EXITED, [reply("n1", ENDED), reply("n2", RANK)], OK, "left", 1, "processes remain on n2"),
        (EXITED, [reply("n2", ENDED, processes=1)], {}, "left", 1, "processes remain on n2"),
        (REMOTE, [reply("n1", RANK)], {}, "running", 0, ""),
        (REMOTE, [reply("n1", ENDED)], OK, "ended", 0, "verdict: ok"),
        (REMOTE, [reply("n1", ENDED)], {}, "unknown", 1, "no process of the run was found, and it has no verdict"),
    ],
)
def test_the_state_of_a_run_follows_from_launcher_replies_and_verdict(
    state: str, replies: list[NodeReply], verdict: dict[str, Any], name: str, code: int, more: str
) -> None:
    found = judge(run_with_launcher(state), replies, verdict, RunProgress(), START + 60)
    assert (found.state.name, found.exit_code) == (name, code)
    assert more in found.state.more and bool(more) == bool(found.state.more)


@pytest.mark.parametrize(
    ("state", "job_state", "name", "code"),
    [
        (IN_JOB, "RUNNING None", "running", 0),
        (EXITED, "PENDING BeginTime", "waiting", 0),
        (EXITED, "", "ended", 0),
    ],
)
def test_the_state_of_a_run_in_slurm_follows_from_its_job(state: str, job_state: str, name: str, code: int) -> None:
    run = replace(run_with_launcher(state), job="17")
    verdict = {} if state == IN_JOB else STOPPED
    found = judge(run, [reply("n1", RANK if state == IN_JOB else ENDED)], verdict, RunProgress(), START + 60, job_state)
    assert (found.state.name, found.exit_code) == (name, code)
    assert ("job 17 is requeued and pending (BeginTime)" in plain(status.render(found, 80))) == (name == "waiting")


def test_json_has_each_node() -> None:
    [one, two] = json.loads(status.as_json(judge(RUN, [reply("n1", RANK), no_reply("n2")], {}, RunProgress(), START)))[
        "nodes"
    ]
    assert (one["node"], one["status"]["ranks"][0]["pid"], two["status"], two["address"]) == ("n1", 100, None, "ada@n2")


def test_an_ended_run_lasted_until_its_verdict_and_does_not_look_hung() -> None:
    found = judge(
        run_with_launcher(EXITED), [reply("n1", ENDED)], OK | {"written": START + 720}, RunProgress(), START + 90_000
    )
    assert (found.seconds, found.diagnosis) == (720.0, Diagnosis(False))


def test_running_exited_and_unstarted_ranks_are_distinguished() -> None:
    found = status.observe_ranks(
        [reply("n1", RANK, replace(ENDED, rank=1)), reply("n2", replace(NOT_STARTED, rank=2))], RunProgress(), 60.0
    )
    assert ([rank.rank for rank in found.ranks], found.exited, found.not_started) == ([0], ("rank 1 on n1",), 1)


@pytest.mark.parametrize("rank", [ENDED, NOT_STARTED])
def test_a_stopped_agent_is_shown_before_its_ranks_start_and_after_they_have_ended(rank: RankStatus) -> None:
    node = reply("n1", rank, processes=1)
    assert node.status
    found = judge(RUN, [replace(node, status=replace(node.status, stopped=(12,)))], {}, RunProgress(), START + 5)
    assert found.diagnosis == Diagnosis(
        True, "looks hung: process 12 on n1 is stopped (state T); to continue, run there:", "kill -CONT 12"
    )


def test_a_run_without_output_looks_hung_and_needs_stacks_unless_it_logs_metrics_or_has_ended() -> None:
    idle = reply("n1", replace(RANK, cpu=0.0, gpus=(), silent=500.0))
    for silent, hung in ((None, True), (3.0, False)):
        found = judge(RUN, [idle], {}, RunProgress(silent=silent), START + 600)
        assert (found.diagnosis.hung, found.needs_stacks) == (hung, hung)
    assert not judge(run_with_launcher(EXITED), [reply("n1", ENDED)], OK, RunProgress(), START + 600).needs_stacks


LONG = replace(RANK, rank=1, local_rank=1, line="火" * 200, state="T", silent=312.0)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_table_fits_and_is_aligned(width: int) -> None:
    found = judge(
        RUN, [reply("node1", RANK, LONG), no_reply("n2")], {}, RunProgress(120, 1200, 2.3125, 1.0), START + 720
    )
    lines = plain(status.render(found, width)).splitlines()
    assert all(columns(line) <= width for line in lines)
    assert lines[0] == "train-1: running for 12 min 0 s, step 120 of 1,200, loss 2.3125"
    assert lines[1] == "looks hung: rank 1 on node1 is stopped (state T); to continue, run there:"
    assert lines[2] == "  $ kill -CONT 100"
    head = lines[4]
    assert ("  pid  " in head) == (width >= 100)
    assert re.fullmatch(r"node +rank +(pid +)?state +cpu +memory +gpu +quiet +last line", head)
    start = head.index("last line")
    assert lines[5][start:].startswith("step 120") and lines[6][start:].startswith("火") and lines[6].endswith("…")
    assert "99%    1.2G  0: 97% 412W         1 s  step 120" in lines[5]
    assert lines[7].split() == ["n2", "2-3", "no", "reply"]
    assert " ".join(" ".join(lines[8:]).split()) == "n2: cannot be reached (timed out); try: ssh n2 true"


def test_a_loss_that_is_not_finite_is_shown() -> None:
    found = judge(RUN, [reply("node1", RANK)], {}, RunProgress(120, 1200, "NaN", 1.0), START + 720)
    assert (
        plain(status.render(found, 80)).splitlines()[0]
        == "train-1: running for 12 min 0 s, step 120 of 1,200, loss nan"
    )
    assert json.loads(status.as_json(found))["progress"]["loss"] == "NaN"


def test_empty_columns_are_left_out() -> None:
    found = judge(run_with_launcher(EXITED), [reply("n1", ENDED)], OK, RunProgress(), START)
    assert "node  rank  state  last line" in plain(status.render(found, 80))


def test_progress_is_the_newest_values_in_metrics_jsonl(tmp_path: Path) -> None:
    assert read_progress(tmp_path) == RunProgress()
    lines = [{"step": 1, "steps": 9, "loss": 3.0}, {"step": 2, "loss": None}, {"step": 2, "held_out_loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 3, "lo')
    found = read_progress(tmp_path)
    assert (found.step, found.steps, found.loss) == (2, 9, "NaN")
    assert found.silent == pytest.approx(0.0, abs=5.0)


def test_a_loss_that_is_text_is_no_number() -> None:
    found = judge(RUN, [reply("node1", RANK)], {}, RunProgress(120, 1200, "abc", 1.0), START + 720)
    assert plain(status.render(found, 80)).splitlines()[0].endswith("step 120 of 1,200, loss nan")


def test_silence_is_measured_on_the_clock_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "node_n1.log").write_text("a line\n")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 300)
    found = [read_progress(tmp_path).silent, seconds_without_output(tmp_path)]
    assert all(silent is not None and silent < 60 for silent in found)


def test_metrics_jsonl_takes_precedence_over_metrics_from_the_output_or_from_tensorboard(tmp_path: Path) -> None:
    (tmp_path / FROM_OUTPUT).write_text('{"time": 1, "step": 7, "steps": 90, "loss": 2.5, "epoch": 0.5}\n')
    guessed = RunProgress(7, 90, 2.5, None, 0.5, "from the output")
    assert read_progress(tmp_path) == guessed
    (tmp_path / FROM_TENSORBOARD).write_text('{"step": 8}\n')
    os.utime(tmp_path / FROM_TENSORBOARD, (1, 1))
    assert read_progress(tmp_path) == guessed
    os.utime(tmp_path / FROM_OUTPUT, (0, 0))
    assert read_progress(tmp_path).origin == "from TensorBoard"
    (tmp_path / "metrics.jsonl").write_text('{"step": 5}\n')
    assert replace(read_progress(tmp_path), silent=0.0) == RunProgress(5, silent=0.0)


@pytest.mark.parametrize(
    ("progress", "shown"),
    [
        (RunProgress(7, 90, 2.5, None, 0.5, "from the output"), ", step 7 of 90, loss 2.5000 (from the output)"),
        (RunProgress(None, None, 2.5, None, 0.5, "from the output"), ", epoch 0.5, loss 2.5000 (from the output)"),
    ],
)
def test_the_origin_of_progress_is_shown(progress: RunProgress, shown: str) -> None:
    text = plain(status.render(judge(RUN, [reply("node1", RANK)], {}, progress, START + 720), 80))
    assert text.splitlines()[0] == f"train-1: running for 12 min 0 s{shown}"


def test_progress_comes_from_the_reply_of_a_node_if_the_run_directory_here_has_no_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(RUN, directory=tmp_path)
    node = reply("n1", RANK)
    assert node.status
    node = replace(node, status=replace(node.status, progress=RunProgress(7, silent=3.0, origin="from the output")))

    class QueryStub:
        job_state = ""

        def update(self) -> None:
            self.run = run

        def query(self, options: list[str], timeout: float) -> list[NodeReply]:
            return [no_reply("n2"), node]

    viewer = status.Viewer(Namespace(stacks=False, watch=True), QueryStub())  # type: ignore[arg-type]
    assert viewer.status().progress == RunProgress(7, origin="from the output")


# ---------------------------------------------------------------- replies


def test_remaining_processes_are_reported_for_each_node() -> None:
    run = run_with_launcher(EXITED)
    assert query.report_remaining(run, [reply("n1", ENDED)]) == (["n1: no process of this run remains"], 0)
    lines, code = query.report_remaining(run, [reply("n1", ENDED), no_reply("n2")])
    assert code == 69 and "n2: cannot be reached" in lines[1]
    assert lines[1].endswith("heartbeats time out; then check again")
    lines, code = query.report_remaining(run, [reply("n1", RANK, processes=4), no_reply("n2")])
    assert code == 1
    assert lines[0].startswith("n1: still has 4 processes of this run: 100 python my script.py, 100 ")


@pytest.mark.parametrize(
    ("code", "err", "why"),
    [
        (255, "ssh: connect to host n1 port 22: timed out", "cannot be reached (ssh: connect to host n1 port 22:"),
        (137, "", "did not reply in time"),
        (127, "bash: line 1: exec: /x/python: not found", "Python cannot be started"),
        (2, "python: can't open file '/k/scripts/lib/module.py'", "Muster not found"),
    ],
)
def test_the_error_of_a_node_without_a_reply_states_the_reason(code: int, err: str, why: str) -> None:
    found = query.node_reply(RunNode("n1", "n1", 1, 0), Reply("n1", code, "Welcome!\n", err))
    assert found.status is None and why in found.error


def test_a_node_has_a_status_of_its_own_ranks_only() -> None:
    def status_of(ranks: int) -> NodeReply:
        found = [{"rank": rank, "local_rank": rank, "pid": None} for rank in (*range(ranks), 2)]
        printed = f"{MARKER}{json.dumps({'host': 'n2', 'seconds': 1.0, 'ranks': found})}\n"
        return query.node_reply(RunNode("n2", "n2", 2, 2), Reply("n2", 0, printed, ""))

    assert (found := status_of(5).status) and [one.rank for one in found.ranks] == [2, 3]
    began = time.process_time()
    assert status_of(300_000).error.startswith("invalid reply (more than 150000 values)")
    assert time.process_time() - began < 5


# ---------------------------------------------------------------- finding a run


def create_run(logs: Path, **changes: Any) -> Path:
    facts: dict[str, Any] = {"nodes": [RunNode("n1", "ada@n1", 1, 0), RunNode("n2", "n2", 2, 1)]}
    facts["launcher"] = os.getpid()
    fixed: dict[str, Any] = {"script": "t.py", "config": None, "cwd": "/", "python": "/p/python", "command": ["t"]}
    return Path(run_directory.create(str(logs), "train", **fixed, **facts | changes))


def test_a_run_is_found_with_its_nodes_and_its_launcher(tmp_path: Path) -> None:
    directory = create_run(tmp_path / "my logs")
    run_directory.link_to(str(directory), [])
    for argument in (str(directory), directory.name, "latest", "my logs/latest"):
        found = lookup.read(lookup.find(argument, tmp_path, tmp_path / "my logs"))
        assert (found.directory, found.directory_at_launch) == (directory, str(directory))
    assert found.nodes == (RunNode("n1", "ada@n1", 1, 0), RunNode("n2", "n2", 2, 1))
    assert (found.launcher.state, found.launcher.pid) == (RUNNING, os.getpid())


def test_a_moved_run_directory_still_has_the_path_at_launch_which_identifies_its_processes(tmp_path: Path) -> None:
    directory = create_run(tmp_path / "logs")
    moved = (tmp_path / "logs").rename(tmp_path / "old")
    found = lookup.read(moved / directory.name)
    assert (found.directory, found.directory_at_launch) == (moved / directory.name, str(directory))


def test_on_another_machine_a_node_without_an_address_is_the_host_of_the_launcher(tmp_path: Path) -> None:
    directory = create_run(tmp_path, nodes=[RunNode("n1", "", 3, 0)])
    assert lookup.read(directory).nodes == (RunNode("n1", "", 3, 0),)
    facts = json.loads((directory / "run.json").read_text())
    facts["launcher"] |= {"machine": "another", "host": "far"}
    (directory / "run.json").write_text(json.dumps(facts))
    found = lookup.read(directory)
    assert (found.launcher.state, found.nodes) == (REMOTE, (RunNode("n1", "far", 3, 0),))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"directory": ' + "9" * 5000 + "}"])
def test_a_damaged_run_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunLookupError, match=r"run.json: cannot be read"):
        lookup.read(tmp_path)
    assert read_object(tmp_path / "run.json", []) == {}


def test_a_launcher_is_identified_by_pid_and_start_time() -> None:
    host, machine, since = os.uname().nodename, identity.machine(), process_scan.start_time(os.getpid())
    assert since is not None
    assert state_of_launcher(host, machine, os.getpid(), since) == RUNNING
    assert state_of_launcher(host, machine, os.getpid(), since - 1) == EXITED, "another process has its pid now"
    assert state_of_launcher(host, machine, 2**22 + 1, since) == EXITED
    assert state_of_launcher(host, machine, os.getpid(), None) == EXITED
    assert state_of_launcher(host, "an-earlier-boot" + "net:[1]", os.getpid(), since) == EXITED
    assert state_of_launcher("far", "another-boot" + "net:[1]", os.getpid(), since) == REMOTE
    assert state_of_launcher(host, machine.partition("net:")[0] + "net:[1]", os.getpid(), since) == REMOTE, (
        "another network namespace"
    )


# ---------------------------------------------------------------- the forms of RUN


def test_a_unique_beginning_is_a_run_and_an_ambiguous_one_is_refused_with_the_candidates(tmp_path: Path) -> None:
    one, two = create_run(tmp_path / "logs"), create_run(tmp_path / "logs")
    (tmp_path / "train").mkdir()
    assert lookup.find(one.name[:-1], tmp_path, tmp_path / "logs") in (one, two)
    (tmp_path / "logs/eval-1").mkdir()
    assert one.name[:6] == "train-"
    with pytest.raises(RunLookupError) as ambiguous:
        lookup.find("train", tmp_path, tmp_path / "logs")
    assert "RUN 'train': several runs match, give more of the name: " in str(ambiguous.value)
    assert str(one) in str(ambiguous.value) and str(two) in str(ambiguous.value)
    for argument in ("eval", ""):
        with pytest.raises(RunLookupError, match=r"no such run|not a run directory"):
            lookup.find(argument, tmp_path, tmp_path / "logs")


def test_a_run_is_found_from_another_directory(tmp_path: Path) -> None:
    run = create_run(tmp_path / "one/logs")
    run_directory.link_to(str(run), [], ["17"])
    (tmp_path / "empty").mkdir()
    for argument in (run.name, "train", "17"):
        assert lookup.find(argument, tmp_path / "empty", tmp_path / "empty/logs") == run
    here = create_run(tmp_path / "here")
    assert lookup.find("train", tmp_path, tmp_path / "here") == here, "runs of this directory come first"
    with pytest.raises(RunLookupError) as missing:
        lookup.find("latest", tmp_path / "empty", tmp_path / "empty/logs")
    where = f"your runs are in {tmp_path}/here {tmp_path}/one/logs; name one of these with --log-dir"
    assert str(missing.value) == f"RUN 'latest': no such run, and no runs in {tmp_path}/empty/logs; {where}"
    shutil.rmtree(tmp_path / "one")
    with pytest.raises(RunLookupError, match="RUN '17': no such run"):
        lookup.find("17", tmp_path / "empty", tmp_path / "empty/logs")


def test_a_number_is_no_beginning_of_a_name(tmp_path: Path) -> None:
    run = create_run(tmp_path)
    run.rename(tmp_path / "2025-train")
    with pytest.raises(RunLookupError, match="no such run"):
        lookup.find("2025", tmp_path, tmp_path)
    assert lookup.find("2025-", tmp_path, tmp_path).name == "2025-train"


def test_the_run_of_a_directory_that_is_requeued_or_of_a_job_is_not_indexed(tmp_path: Path) -> None:
    create_run(tmp_path / "logs", existing=str(tmp_path / "output"))
    assert index.directories() == []


def collective(function: str) -> tuple[Frame, ...]:
    return (Frame("/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 9, function),)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cpu": 0.99}, "busy"),
        ({"state": "S", "cpu": 0.01, "gpus": (replace(GPU, use=90),)}, "busy"),
        ({"state": "S", "cpu": 0.01}, "waiting"),
        ({"state": "R", "cpu": 0.2}, "running"),
        ({"state": "S", "cpu": 0.01, "frames": collective("all_reduce")}, "waiting in all_reduce"),
        ({"state": "R", "cpu": 0.99, "frames": collective("barrier")}, "waiting in barrier"),
        ({"collectives": (Collectives("0", 7, 0), Collectives("1", 7, 7, "broadcast"))}, "waiting in broadcast"),
        ({"collectives": (Collectives("0", 7, 0),), "frames": (Frame("/home/ada/train.py", 9, "all_reduce"),)}, "busy"),
        ({"state": "T", "cpu": 0.0, "frames": collective("all_reduce")}, "STOPPED"),
        ({"state": "D"}, "disk"),
        ({"state": "Z"}, "Z"),
    ],
)
def test_the_state_of_a_rank_says_what_it_does_as_far_as_known(changes: dict[str, Any], text: str) -> None:
    rank = replace(RANK, **{"cpu": 0.99, "gpus": (), **changes})
    assert status.doing(rank) == text
    table = plain(status.render(judge(RUN, [reply("n1", rank)], {}, RunProgress(), START), 200))
    assert re.search(rf"^n1 +0 +100 +{re.escape(text)}  ", table, re.MULTILINE)
