"""The table of runs and job lists: the newest first, from their files, with limits on what is read and shown."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from distributed import index
from distributed.host import identity
from distributed.metrics import FROM_OUTPUT
from distributed.runs import run_directory
from distributed.runs.listing import ROWS, Listing
from distributed.runs.lookup import RunNode
from distributed.terminal import columns, plain

LS = str(Path(__file__).resolve().parents[2] / "scripts/ls.sh")
START = 1735787045.0  # of the run of day 2


def lines_of(directory: Path, width: int | None = None, most: int = ROWS) -> list[str]:
    return [plain(line) for line in Listing([directory], most).lines(width)]


def finished_run(logs: Path, number: int, verdict: dict[str, Any] | None, **changes: Any) -> Path:
    """Create a run that was started on day `number` of January 2025. changes: changed fields of run.json."""
    nodes = [RunNode("node1", "", 1, 0), RunNode("node2", "", 1, 1)]
    made = run_directory.create(
        str(logs), "train", nodes=nodes, script="train.py", config=None, cwd="/", python="python3", command=["x"],
        launcher=os.getpid(),
    )  # fmt: skip
    directory = logs / f"train-202501{number:02}-030405-9f3a"
    os.rename(made, directory)
    facts = json.loads((directory / "run.json").read_text())
    facts |= {"started": f"2025-01-{number:02}T03:04:05+00:00"} | changes
    (directory / "run.json").write_text(json.dumps(facts))
    if verdict:
        path = directory / "verdict.json"
        path.write_text(json.dumps(verdict))
        end = START + 86400 * (number - 2) + 90
        os.utime(path, (end, end))
    return directory


def test_the_table_has_the_newest_first_and_a_short_form_of_each_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exited = {"launcher": {"host": "h", "machine": identity.machine(), "pid": 1, "since": 0, "grace": 8}}
    remote = {"launcher": {"host": "h", "machine": "another", "pid": 1, "since": 1, "grace": 8}}
    verdicts = {
        "ok": {"outcome": "ok", "exit_code": 0},
        "stopped: with checkpoint": {"outcome": "stopped", "exit_code": 75},
        "failed: OutOfMemoryError": {"outcome": "failed", "exit_code": 1, "exception": "torch.OutOfMemoryError"},
        "failed: SIGKILL": {"outcome": "failed", "exit_code": 137},
        "failed: hung": {"outcome": "failed", "exit_code": 124},
        "failed: code 3": {"outcome": "failed", "exit_code": 3},
    }
    for number, verdict in enumerate(verdicts.values(), 2):
        newest = finished_run(tmp_path, number, verdict)
    finished_run(tmp_path, 9, None, **exited)
    finished_run(tmp_path, 10, None, **remote)
    finished_run(tmp_path, 11, None)
    lines = [json.dumps({"step": step, "steps": 2000, "loss": 3 - step / 1000}) for step in range(0, 1501, 5)]
    (newest / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "latest").symlink_to(newest.name)
    for name, content in (("damaged", "{"), ("older", "{}"), ("other", '{"directory": 1, "launcher": {}}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(content)
    monkeypatch.setattr(time, "time", lambda: START + 86400 * 20)
    head, *rows, other, older, damaged = lines_of(tmp_path)
    assert other.startswith(f"not shown: {tmp_path}/other/run.json: incomplete, or written by an older version")
    assert older.startswith(f"not shown: {tmp_path}/older/run.json: incomplete")
    assert damaged.startswith(f"not shown: {tmp_path}/damaged/run.json: cannot be read (")
    assert head.split() == ["name", "state", "age", "step", "loss", "where"]
    assert [row[12:14] for row in rows] == ["11", "10", "09", *(f"{number:02}" for number in range(7, 1, -1))]
    assert [re.split("  +", row)[1] for row in rows] == ["running", "remote", "unknown", *reversed(verdicts)]
    ages = [re.split("  +", row)[2] for row in rows]
    assert ages == [f"{22 - day} d 0 h" for day in (11, 10, 9, *range(7, 1, -1))]
    assert all(row.endswith("  node1 node2") for row in rows)
    assert "  failed: code 3" in rows[3] and "  1,500  1.5000  " in rows[3]
    (newest / "metrics.jsonl").rename(newest / FROM_OUTPUT)
    assert "  ~1,500  1.5000  " in lines_of(tmp_path)[4]
    for width in (80, 112):
        for row in lines_of(tmp_path, width)[:-3]:
            assert columns(row) <= width


def test_the_table_asks_slurm_once_for_the_states_of_all_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = {"host": "h", "machine": "another", "pid": 1, "since": 1, "grace": 8}
    for number in range(2, 6):
        verdict = {"outcome": "ok", "exit_code": 0} if number == 5 else None
        finished_run(tmp_path / "logs", number, verdict, launcher=launcher, slurm_job=f"1{max(number, 3)}")
    (tmp_path / "squeue").write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\necho 13 RUNNING\n')
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    rows = [plain(line).split()[1] for line in lines_of(tmp_path / "logs")[1:]]
    assert rows == ["ok", "unknown", "running", "running"]
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert "--jobs 14,13,13 " in call


def test_the_table_shows_and_reads_only_the_newest(tmp_path: Path) -> None:
    for number in range(2, 8):
        older = finished_run(tmp_path, number, {"outcome": "ok", "exit_code": 0})
        if number < 6:
            (older / "run.json").write_text("{")
    (tmp_path / "latest").symlink_to(older.name)
    (tmp_path / "jobs").mkdir()
    _, *rows, more = lines_of(tmp_path, None, 2)
    assert [row[12:14] for row in rows] == ["07", "06"]
    assert more == "4 older runs are not shown; to show all: --rows 6"
    assert len(lines_of(tmp_path, None, 3)) == 5, "a fault counts as a row"
    assert lines_of(tmp_path, None, 5)[-1] == "1 older run is not shown; to show all: --rows 6"
    assert "--rows" not in "".join(lines_of(tmp_path, None, 6))


def test_the_table_fits_and_is_readable_for_odd_names(tmp_path: Path) -> None:
    assert lines_of(tmp_path, 80) == []
    finished = finished_run(tmp_path, 2, {"outcome": "failed", "exit_code": 1, "exception": "Odd\nName"})
    (finished / FROM_OUTPUT).write_text('{"epoch": 0.5, "loss": 2.5, "time": 1.0}\n')
    finished.rename(tmp_path / f"{'long_' * 15}\n-20250102-030405-9f3a")
    lines = lines_of(tmp_path, 80)
    assert len(lines) == 2 and all(columns(line) <= 80 for line in lines)
    assert lines[1].startswith("long_long_long_long…20250102-030405-9f3a  failed: Odd Name  ")


@pytest.mark.parametrize(
    ("verdict", "shown"),
    [
        ({"outcome": "ok", "exit_code": float("inf")}, "not shown: "),
        ({"outcome": "ok", "exit_code": []}, "not shown: "),
        ({"outcome": "a\nb", "exit_code": 0}, " a b "),
    ],
)
def test_the_table_survives_any_verdict(tmp_path: Path, verdict: dict[str, Any], shown: str) -> None:
    finished_run(tmp_path, 2, verdict)
    assert shown in lines_of(tmp_path)[-1]


def new_list(directory: Path, state: str = "finished", **totals: int) -> Path:
    """Write a list's journal and results."""
    facts = {"jobs": 10, "done": 3, "failed": 0, "seconds": 60.0} | totals
    results = {"created": START, "state": state, "totals": facts, "servers": {"gpu1": {}, "gpu2": {}}, "jobs": []}
    directory.mkdir(exist_ok=True)
    (directory / "results.json").write_text(json.dumps(results))
    (directory / "results.journal").touch(0o600)
    return directory


def test_the_table_has_job_lists(tmp_path: Path) -> None:
    new_list(tmp_path / "one", failed=2)
    (row,) = lines_of(tmp_path / "one")[1:]
    assert re.split("  +", row)[:2] == ["results.json", "finished: 3 of 10 done, 2 failed"] and row.endswith(
        "gpu1 gpu2"
    )
    new_list(tmp_path / "two", "running")
    assert re.split("  +", lines_of(tmp_path / "two")[1])[1] == "interrupted: 3 of 10 done", "no dispatcher runs"
    with open(tmp_path / "two/results.journal") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        assert re.split("  +", lines_of(tmp_path / "two")[1])[1] == "running: 3 of 10 done"
    for damaged in ("{", "{}", '{"created": "x", "totals": []}'):
        (tmp_path / "two/results.json").write_text(damaged)
        assert lines_of(tmp_path / "two")[0].startswith(f"not shown: {tmp_path}/two/results.json: ")


def ls(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [LS, "--python", sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_ls_shows_this_directory_and_with_all_those_in_which_the_user_has_started_something(tmp_path: Path) -> None:
    finished_run(tmp_path / "one/logs", 2, {"outcome": "ok", "exit_code": 0})
    index.add(new_list(tmp_path / "two"))
    done = ls(tmp_path / "one")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].startswith("train-20250102-030405-9f3a  ok ")
    assert len(done.stdout.splitlines()) == 2
    everywhere = ls(tmp_path, "--all").stdout.splitlines()
    assert [row.split()[0] for row in everywhere[1:]] == ["results.json", "train-20250102-030405-9f3a"]
    assert everywhere[1].endswith(f"{tmp_path}/two: gpu1 gpu2")
    assert everywhere[2].endswith(f"{tmp_path}/one/logs: node1 node2")
    assert ls(tmp_path).stdout == f"no runs in {tmp_path}/logs; --all shows those of other directories\n"
    facts = json.loads(ls(tmp_path, "--all", "--json", "--rows", "1").stdout)
    assert (facts["older"], facts["faults"], facts["rows"][0]["kind"]) == (1, [], "list")


def test_ls_refuses_a_wrong_call(tmp_path: Path) -> None:
    for wrong, message in ((["--rows", "0"], "--rows: expected 1 or more"), (["latest"], "expected no argument")):
        done = ls(tmp_path, *wrong)
        assert (done.returncode, message in done.stderr) == (2, True)


def test_status_all_is_refused_with_its_successor(tmp_path: Path) -> None:
    for option in ("--all", "--rows"):
        done = subprocess.run([Path(LS).with_name("status.sh"), option], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and f"status.sh {option}: replaced by scripts/ls.sh" in done.stderr
