"""Printing and following the logs of a run: of all attempts, of chosen ranks, and of nodes with private directories."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from distributed.launch import logs
from distributed.launch.logs import LogReader, parse_since
from distributed.runs import run_directory
from distributed.runs.lookup import RunNode, read
from distributed.runs.query import RunQuery
from distributed.transport.commands import Messages, SshCommands, TransportError

MODULE = str(Path(__file__).resolve().parents[2] / "scripts/lib/module.py")
NODES = [RunNode("n1", "", 2, 0), RunNode("n2", "", 2, 2)]


def new_run(directory: Path, nodes: Sequence[RunNode] = NODES, **changes: Any) -> Path:
    facts: dict[str, Any] = {"script": "t.py", "config": None, "cwd": "/", "python": sys.executable, "command": ["t"]}
    return Path(run_directory.create(str(directory / "logs"), "train", nodes=nodes, **facts | changes))


def write(run: Path, node: str, text: str, attempt: int = 1) -> Path:
    path = run / f"attempts/{attempt}/node_{node}.log"
    path.write_text(text)
    return path


def command(run: Path, *arguments: str) -> list[str]:
    options = ["--program", "logs.sh", "--log-dir", str(run.parent), *arguments]
    return [sys.executable, "-I", MODULE, "launch.logs", *options, "--", run.name]


def printed(run: Path, *arguments: str) -> str:
    done = subprocess.run(command(run, *arguments), capture_output=True, text=True, check=True, cwd="/")
    assert done.stderr == ""
    return done.stdout


def refused(run: Path, *arguments: str) -> str:
    done = subprocess.run(command(run, *arguments), capture_output=True, text=True, check=False, cwd="/")
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = new_run(tmp_path)
    write(made, "n1", "agent: ready\n[n1:0] zero\n[n1:1] one\n[n1:0] \x1b[2Jzero\tagain\r\n")
    write(made, "n2", "[n2:2] two\n[n2:3] three\n[n1:0] forged\n[n2:2] two again")
    return made


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ((), "agent: ready\nzero\nzero\tagain \n"),
        (("--rank", "0"), "zero\nzero\tagain \n"),
        (("--rank", "3"), "three\n"),
        (("--rank", "2", "-n", "1"), "two again\n"),
        (("--node", "n1"), "[n1] agent: ready\n[n1:0] zero\n[n1:1] one\n[n1:0] zero\tagain \n"),
        (("--rank", "all", "-n", "2"), "[n1:1] one\n[n1:0] zero\tagain \n[n2] [n1:0] forged\n[n2:2] two again\n"),
        (("-n", "0"), ""),
    ],
)
def test_the_chosen_lines_are_printed(run: Path, arguments: tuple[str, ...], output: str) -> None:
    assert printed(run, *arguments) == output


def test_a_wrong_choice_is_refused(run: Path) -> None:
    assert "it has n1 (2 ranks from 0), n2 (2 ranks from 2)" in refused(run, "--rank", "4")
    assert "no such node or rank" in refused(run, "--node", "n1", "--rank", "2")
    assert "--rank: expected the number of a rank or all, got 'first'" in refused(run, "--rank", "first")
    assert "--since: expected a duration such as 10m, HH:MM or attempt, got 'soon'" in refused(run, "--since", "soon")


@pytest.mark.parametrize("option", [["--console-rank", "3"], ["--console-rank", "last"]])
def test_the_rank_of_the_console_is_the_default(tmp_path: Path, option: list[str]) -> None:
    rest = ["t.py", "--", "--console-rank", "1"]
    made = new_run(tmp_path, command=["launch.sh", *option, *rest], options=[option], rest=rest)
    write(made, "n2", "[n2:2] two\n[n2:3] three\n")
    assert printed(made) == "three\n"


def test_a_last_rank_that_alone_prints_steps_is_shown_too(tmp_path: Path) -> None:
    made = new_run(tmp_path, NODES[:1])
    steps = "".join(f"[n1:1] step {step} loss 2.5\n" for step in range(4))
    write(made, "n1", f"[n1:0] loading\n{steps}")
    assert printed(made, "-n", "2") == "step 2 loss 2.5\nstep 3 loss 2.5\n"


def test_all_attempts_are_printed_and_since_attempt_the_newest(run: Path) -> None:
    run_directory.begin_attempt(str(run))
    write(run, "n1", "[n1:0] second\n", 2)
    assert printed(run, "--rank", "0") == "zero\nzero\tagain \nsecond\n"
    assert printed(run, "--rank", "0", "--since", "attempt") == "second\n"


def test_the_last_lines_are_read_from_the_end_of_the_log(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], signal_handlers: None
) -> None:
    monkeypatch.setattr(logs, "BLOCK", 64)
    lines = [f"[n1:{number % 2}] line {number}\n" for number in range(100)]
    path = write(run, "n1", "".join(lines))
    for count in (1, 3, 49, 50, 51):
        reader = LogReader(RunQuery(read(run), Messages("")), options(rank="0"), Messages(""))
        reader.print_new(count)
        assert capsys.readouterr().out.splitlines() == [f"line {number}" for number in range(0, 100, 2)][-count:]
    with open(path, "a") as file:
        file.write("[n1:0] more\n")
    reader.print_new()
    assert capsys.readouterr().out == "more\n"


def options(rank: str = "", node: str = "", since: str = "", follow: bool = False) -> Namespace:
    return Namespace(rank=rank, node=node, since=since, follow=follow)


def test_since_finds_the_place_in_the_log_by_the_samples(run: Path) -> None:
    now = time.time()
    text = "[n1:0] old\n[n1:0] new\n"
    path = write(run, "n1", text)
    samples = [{"time": now - 600, "log": 11, "ranks": {}}, {"time": now - 60, "log": len(text), "ranks": {}}]
    damaged = ["{", "[]", '{"time": 1, "log": "x"}', '{"time": 1, "log": -5}']
    path.with_suffix(".samples.jsonl").write_text("\n".join([*damaged, *map(json.dumps, samples)]))
    assert printed(run, "--rank", "0", "--since", "5m") == "new\n"
    assert printed(run, "--rank", "0", "--since", "1h") == "old\nnew\n"
    os.utime(path, (now - 7200, now - 7200))
    assert printed(run, "--rank", "0", "--since", "1h") == ""


def test_the_time_of_since() -> None:
    now = time.mktime((2026, 12, 1, 12, 30, 0, 0, 0, -1))
    for text, seconds in {"90s": 90, "10m": 600, "1h30m": 5400, "12:29": 60, "12:29:59": 1, "12:31": 86340}.items():
        assert parse_since(text, now) == now - seconds, text
    assert (parse_since("", now), parse_since("attempt", now)) == (None, None)
    for text in ("10", "m", "10 min", "25:00", "-1m", "1.5h"):
        with pytest.raises(TransportError, match="--since: expected"):
            parse_since(text, now)


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal_handlers: None) -> Path:
    """The run directory on a node n2 that does not share it: commands for the node run here with this directory."""
    made = tmp_path / "on n2"

    def on_node(self: SshCommands, node: RunNode, arguments: Sequence[str], *_: Any, **__: Any) -> list[str]:
        return [str(made) if one.startswith(str(tmp_path / "logs")) else one for one in arguments]

    monkeypatch.setattr(SshCommands, "command", on_node)
    return made


def test_the_log_of_a_node_that_does_not_share_the_run_directory_is_read_there(
    tmp_path: Path, private: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = new_run(tmp_path, [NODES[0], RunNode("n2", "ada@n2", 2, 2)])
    write(made, "n1", "[n1:0] zero\n")
    (private / "attempts/1").mkdir(parents=True)
    path = write(private, "n2", "[n2:2] two\n[n2:3] three\n[n2:2] t\x1b[2Jwo\n")
    reader = LogReader(RunQuery(read(made), Messages("")), options(rank="2"), Messages(""))
    reader.print_new()
    assert capsys.readouterr() == ("two\ntwo\n", "")
    with open(path, "a") as file:
        file.write("[n2:2] more\n")
    reader.print_new()
    assert capsys.readouterr() == ("more\n", "")
    write(made, "n2", path.read_text() + "[n2:2] copied\n")
    reader.print_new()
    assert capsys.readouterr().out == "copied\n", "the launcher has copied the log"
    write(made, "n2", "").unlink()
    (private / "attempts/1/node_n2.samples.jsonl").write_text(json.dumps({"time": 1.0, "log": 11, "ranks": {}}))
    reader = LogReader(RunQuery(read(made), Messages("")), options(rank="all", since="1d"), Messages(""))
    reader.print_new()
    assert capsys.readouterr().out == "[n1:0] zero\n[n2:3] three\n[n2:2] two\n[n2:2] more\n"


def test_a_log_that_cannot_be_read_is_named_with_the_reason(
    tmp_path: Path, private: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = new_run(tmp_path, [NODES[0], RunNode("n2", "ada@n2", 2, 2)])
    write(made, "n1", "").unlink()
    os.mkfifo(made / "attempts/1/node_n1.log")
    reader = LogReader(RunQuery(read(made), Messages("")), options(rank="all"), Messages("logs.sh"))
    reader.print_new()
    reader.print_new(last=True)
    first, second = capfd.readouterr().err.splitlines()
    assert first == "logs.sh: n1: its log cannot be read: not a regular file"
    assert second == "logs.sh: n2: no log of attempt 1: it has not started, or it is lost"
    failing = ["sh", "-c", "echo 'ssh: connect to host n2: timed out' >&2; exit 255"]
    monkeypatch.setattr(SshCommands, "command", lambda *_, **__: failing)
    reader = LogReader(RunQuery(read(made), Messages("")), options(rank="2"), Messages("logs.sh"))
    reader.print_new()
    assert "logs.sh: n2: its log cannot be read: " in (shown := capfd.readouterr().err) and "timed out" in shown
    assert [bool(log.problem) for log in reader.logs] == [True]
    write(made, "n2", "[n2:2] two\n")
    reader.print_new()
    assert [bool(log.problem) for log in reader.logs] == [False]


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout
    for printed_line in process.stdout:
        if printed_line == f"{line}\n":
            return
    raise AssertionError(f"{line} was not printed")


def test_a_run_is_followed_through_its_restarts_until_it_ends(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as launcher:
        made = new_run(tmp_path, NODES[:1], launcher=launcher.pid)
        path = write(made, "n1", "[n1:0] old\n[n1:0] begun\n")
        with subprocess.Popen(command(made, "-f", "-n", "1"), stdout=subprocess.PIPE, text=True, cwd="/") as follower:
            wait_for(follower, "begun")
            with open(path, "a") as file:
                file.write("[n1:0] first attempt\n")
            wait_for(follower, "first attempt")
            run_directory.begin_attempt(str(made))
            write(made, "n1", "[n1:0] second attempt\n", 2)
            wait_for(follower, "second attempt")
            with open(made / "attempts/2/node_n1.log", "a") as file:
                file.write("[n1:0] the end")
            (made / "verdict.json").write_text('{"outcome": "ok"}')
            launcher.kill()
            launcher.wait()
            wait_for(follower, "the end")
            assert follower.wait(60) == 0


def test_ctrl_c_ends_the_following_only(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as launcher:
        made = new_run(tmp_path, NODES[:1], launcher=launcher.pid)
        write(made, "n1", "[n1:0] begun\n")
        with subprocess.Popen(command(made, "-f"), stdout=subprocess.PIPE, text=True, cwd="/") as follower:
            wait_for(follower, "begun")
            follower.send_signal(signal.SIGINT)
            assert follower.wait(60) == 130
        assert launcher.poll() is None
        launcher.kill()


def test_logs_end_quietly_when_their_reader_has_enough(run: Path) -> None:
    write(run, "n1", "[n1:0] a line\n" * 100_000)
    script = 'set -o pipefail; "$@" | head -n 1; echo "${PIPESTATUS[*]}"'
    done = subprocess.run(["bash", "-c", script, "", *command(run)], capture_output=True, text=True, cwd="/")
    assert (done.stdout, done.stderr) == ("a line\n141 0\n", "")
