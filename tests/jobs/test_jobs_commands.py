"""The calls of run_distributed_training.py: a wrong one is refused in one line, and has changed nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distributed.jobs import commands, config, host, servers

HERE = {"--backend": "local", "--slots": "2", "--jobs-config": "jobs.json"}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.json").write_text(json.dumps([{"a": 1}, {"a": 2, "_labels": ["x"]}, {"a": 3, "_gpus": 1000}]))
    (tmp_path / "train.py").touch()
    (tmp_path / "one.json").write_text(json.dumps([{"a": 1}]))
    (tmp_path / "taken.json").write_text(json.dumps([{"prefix": "p", "fold": 0, "participants": ["a"]}]))
    (tmp_path / "page.html").touch()
    taken = tmp_path / "experiments" / "p" / "fold0_a"
    taken.mkdir(parents=True)
    (taken / host.OWNER).write_text(host.owner_mark("abc", "train.py"))
    (taken / "result").touch()
    (tmp_path / "servers.json").write_text(json.dumps({"servers": [{"host": "a", "ssh_key": "no_such_key"}]}))
    return tmp_path


def words(**said: Any) -> list[str]:
    """A call on this machine with some of its options changed."""
    options = {**HERE, **{f"--{name.replace('_', '-')}": value for name, value in said.items()}}
    return [word for name, value in options.items() if value is not None for word in (name, value)]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ([], "--jobs-config: missing; name the file with the jobs"),
        (["--no-such"], "unrecognized arguments: --no-such"),
        (["run"], "run: unknown command; known are status, logs, why, cancel, retry, resume"),
        ([*words(), "--no-such"], "unrecognized arguments: --no-such"),
        (words(backend="ssh", slots=None), "--cluster-config: missing; name the file with the servers, or"),
        (words(backend="pbs"), "argument --backend: invalid choice: 'pbs' (choose from "),
        (words(slots="0"), "argument --slots: expected a whole number of at least 1, got '0'"),
        (words(retries="-1"), "argument --retries: expected a whole number of at least 0, got '-1'"),
        (words(lost_after="1.5"), "argument --lost-after: expected a whole number of at least 0, got '1.5'"),
        (words(jobs_config="none.json"), "none.json: cannot read it (No such file or directory); looked in "),
        (words(jobs_config="one.json", log_file="page.json"),
         "--log-file page.json: page.html is there already, and its journal (page.journal) is not: move it away, or"),
        (words(log_file="lr0.1"), "--log-file: expected the name of a file such as results.json, got 'lr0.1'"),
        ([*words(), "--sync"], "--sync: only for --backend ssh; with --backend local nothing is copied"),
        (words(jobs_config="taken.json"), "experiments/p/fold0_a holds the results of job abc of train.py; move it"),
        ([*words(jobs_config="taken.json"), "--plan"], "experiments/p/fold0_a holds the results of job abc of"),
        (words(log_file="no/results.json"), "--log-file no/results.json: there is no directory no"),
        (words(backend="ssh", cluster_config="servers.json"), "--slots: only for --backend local; servers have slots"),
        (words(backend="ssh", cluster_config="servers.json", slots=None, jobs_config="one.json"),
         "servers.json: a: ssh_key=no_such_key: there is no such file"),
        (words(), "no server has the labels x"),
        (words(jobs_config="one.json", log_file="one.json"),
         "--log-file one.json: one.json is there already, and its journal (one.journal) is not: move it away, or"),
        (["status"], "results.json: there is no list of jobs (results.journal is missing); name its results"),
        (["resume", "--log-file", "x.json"], "x.json: there is no list of jobs (x.journal is missing)"),
        (["cancel"], "the following arguments are required: jobs"),
        (["logs", "a", "--attempt", "0"], "argument --attempt: expected a whole number of at least 1, got '0'"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_refused_and_changes_nothing(
    call: list[str], said: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(directory.rglob("*"))
    assert commands.main(call) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert all(line.startswith(("run_distributed_training.py: ", "Try: ")) for line in printed.err.splitlines())
    assert sorted(directory.rglob("*")) == before


def test_all_jobs_that_no_server_could_take_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(words()) == 2
    assert "_gpus=1000, but no server that fits has more than " in capsys.readouterr().err


def test_a_plan_starts_nothing_and_leaves_nothing(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(directory.rglob("*"))
    assert commands.main([*words(jobs_config="one.json"), "--plan"]) == 0
    assert capsys.readouterr().out.endswith("nothing was started\n")
    assert sorted(directory.rglob("*")) == before


def test_sockets_are_put_only_where_no_other_user_can_write(directory: Path) -> None:
    path = directory / "sockets" / "a.conf"
    servers.write_ssh_config(path, config.Server(host="a"))
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.unlink()
    path.parent.chmod(0o777)
    with pytest.raises(PermissionError, match="writable by other users; remove it"):
        servers.write_ssh_config(path, config.Server(host="a"))
    assert not list(path.parent.iterdir())
