"""Wrong calls of run_distributed_training.py are refused with a message and have no effect; --help works everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_jobs_dispatcher import SimulatedServer

from distributed.files import KIT
from distributed.jobs import commands, two_phase
from distributed.jobs.call import PROGRAM, PROGRAMS, TWO_PHASE
from distributed.jobs.host import outputs
from distributed.jobs.list_plan import refuse_unplaceable_jobs
from distributed.jobs.lists.config import ConfigError
from distributed.jobs.lists.generator import write
from distributed.jobs.lists.job import Options, job_of
from distributed.jobs.subcommands import SUBCOMMANDS

LOCAL = {"--backend": "local", "--slots": "2", "--jobs-config": "jobs.json"}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.json").write_text(json.dumps([{"a": 1}, {"a": 2, "_labels": ["x"]}, {"a": 3, "_gpus": 1000}]))
    (tmp_path / "train.py").touch()
    (tmp_path / "one.json").write_text(json.dumps([{"a": 1}]))
    (tmp_path / "by_hand.json").write_text(json.dumps([{"prefix": "hand", "fold": 0, "participants": ["a"]}]))
    (tmp_path / "experiments" / "hand" / "fold0_a" / "checkpoints").mkdir(parents=True)
    (tmp_path / "experiments" / "hand" / "fold0_a" / "checkpoints" / "1").touch()
    (tmp_path / "foreign.json").write_text(json.dumps([{"prefix": "p", "fold": 0, "participants": ["a"]}]))
    (tmp_path / "below_file.json").write_text(json.dumps([{"prefix": "file", "fold": 0}]))
    (tmp_path / "experiments" / "file").touch()
    (tmp_path / "link.json").symlink_to("no/results.json")
    (tmp_path / "page.html").touch()
    (tmp_path / "no_servers.json").write_text("{}")
    (tmp_path / ".git").mkdir()
    foreign = tmp_path / "experiments" / "p" / "fold0_a"
    foreign.mkdir(parents=True)
    (foreign / outputs.OWNER).write_text(outputs.owner_name("abc", "train.py"))
    (foreign / "result").touch()
    (tmp_path / "servers.json").write_text(json.dumps({"servers": [{"host": "a", "ssh_key": "no_such_key"}]}))
    return tmp_path


def arguments(**changes: Any) -> list[str]:
    """The arguments of a call with --backend local. changes: new values of options; None removes an option."""
    options = {**LOCAL, **{f"--{name.replace('_', '-')}": value for name, value in changes.items()}}
    return [part for name, value in options.items() if value is not None for part in (name, value)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ([], "--jobs-config: missing; give the JSON file with the jobs"),
        (["--no-such"], "unrecognized arguments: --no-such"),
        ([*arguments(), "--script-path", "x.py"], "training.py: --script-path: replaced by --script PATH\nTry: "),
        ([*arguments(), "--script-path=x.py"], "training.py: --script-path: replaced by --script PATH\nTry: "),
        (["run"], "run: unknown command; known commands: status, logs, why, cancel, retry, add, resume, close"),
        ([*arguments(), "--no-such"], "unrecognized arguments: --no-such"),
        (arguments(backend="ssh", slots=None), "--cluster-config: missing; give the JSON file with the servers, or"),
        (arguments(backend="ssh", slots=None, cluster_config=""), "--cluster-config: missing; give the JSON file with"),
        (arguments(backend="pbs"), "argument --backend: invalid choice: 'pbs' (choose from "),
        (arguments(slots="0"), "argument --slots: expected a positive integer, got '0'"),
        (arguments(slots="300"), "--slots 300: expected at most 256"),
        (arguments(retries="-1"), "argument --retries: expected a non-negative integer, got '-1'"),
        (arguments(lost_after="1.5"), "argument --lost-after: expected a non-negative integer, got '1.5'"),
        (arguments(jobs_config="none.json"), "none.json: cannot read it (No such file or directory); the working "),
        (arguments(jobs_config="one.json", log_file="page.json"),
         "--log-file page.json: page.html exists, but not its journal (page.journal); move it away, or give another"),
        (arguments(log_file="lr0.1"), "--log-file: expected a file name that ends with .json, got 'lr0.1'"),
        ([*arguments(), "--sync"], "--sync: only for --backend ssh; with --backend local nothing is copied"),
        ([*arguments(backend="ssh", cluster_config="servers.json", slots=None), "--sync"],
         "--sync: {directory}/.git: fatal: not a git repository (or any of the parent directories): .git; repair or "),
        (arguments(jobs_config="foreign.json"), "experiments/p/fold0_a holds the results of job abc of train.py"),
        (arguments(jobs_config="by_hand.json"),
         "experiments/hand/fold0_a contains files that no job wrote; move it away, give this job another prefix, or "
         "let the job use these files: touch experiments/hand/fold0_a/.muster_job"),
        ([*arguments(jobs_config="by_hand.json"), "--plan"], "experiments/hand/fold0_a contains files that no job"),
        ([*arguments(jobs_config="foreign.json"), "--plan"], "experiments/p/fold0_a holds the results of job abc of"),
        (arguments(jobs_config="below_file.json"), "experiments/file: not a directory; move it away, or give this job"),
        (arguments(jobs_config="one.json", log_file="link.json"),
         "--log-file link.json: no such directory: {directory}/no; create it"),
        (arguments(log_file="no/results.json"), "--log-file no/results.json: no such directory: no; create it"),
        (arguments(backend="ssh", cluster_config="servers.json"), "--slots: only for --backend local; set slots_per_"),
        (arguments(backend="ssh", cluster_config="servers.json", slots=None, jobs_config="one.json"),
         "servers.json: a: ssh_key=no_such_key: no such file"),
        (arguments(backend="slurm", cluster_config="no_servers.json", slots=None),
         "no_servers.json: servers: missing; add it"),
        (arguments(), "no server has the labels x"),
        (arguments(jobs_config="one.json", log_file="one.json"),
         "--log-file one.json: one.json exists, but not its journal (one.journal); move it away, or give another"),
        (["status"], "results.json: no job list (results.journal is missing); give its results with"),
        (["resume", "--log-file", "x.json"], "x.json: no job list (x.journal is missing)"),
        (["cancel"], "the following arguments are required: JOB"),
        (["logs", "a", "--attempt", "0"], "argument --attempt: expected a positive integer, got '0'"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_refused_and_has_no_effect(
    call: list[str], message: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(directory.rglob("*"))
    assert commands.main(call) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message.replace("{directory}", str(directory)) in printed.err
    assert all(line.startswith(("run_distributed_training.py: ", "Try: ")) for line in printed.err.splitlines())
    assert sorted(directory.rglob("*")) == before


def test_sync_warns_of_untracked_files_that_look_like_secrets(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / ".git").rmdir()
    (directory / ".env").touch()
    call = arguments(backend="ssh", slots=None, cluster_config="servers.json", jobs_config="one.json")
    commands.main([*call, "--sync", "--plan"])
    found = "warning: --sync: .env: may be secret and will be copied; move such files to another directory\n"
    assert capsys.readouterr().err.count(found) == 1


@pytest.mark.parametrize(
    ("program", "name"),
    list(zip((commands.main, two_phase.main, two_phase.helper), PROGRAMS, strict=True)),
)
@pytest.mark.parametrize("command", ["", "status", "logs a", "cache", "cache list", "cache prune"])
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_is_printed_after_any_subcommand(
    option: str, command: str, program: Callable[[list[str]], int], name: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """After a subcommand of the program, --help prints the help of the subcommand, otherwise that of the program."""
    monkeypatch.setattr(sys, "argv", [name])
    assert program([*command.split(), option]) == 0
    printed = capsys.readouterr()
    assert (printed.out.count(f"usage: {name} "), printed.err) == (1, "")
    subcommand, _, _ = command.partition(" ")
    subcommands = {PROGRAM: ["status", "logs"], TWO_PHASE: ["status", "logs", "cache"]}
    assert printed.out.startswith(f"usage: {name} {subcommand} [-h]") == (subcommand in subcommands.get(name, ()))


@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_the_help_of_a_subcommand_explains_its_options(subcommand: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main([subcommand, "--help"]) == 0
    printed = capsys.readouterr().out
    assert str(SUBCOMMANDS[subcommand].__doc__) in " ".join(printed.split())
    assert "--log-file FILE" in printed
    assert ("--attempt N" in printed) == (subcommand == "logs")
    assert (" JOB" in printed) == (subcommand in ("logs", "why", "cancel", "retry"))
    assert "--backend" not in printed


def test_every_job_without_a_matching_server_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(arguments()) == 2
    assert "_gpus=1000: no matching server has more than " in capsys.readouterr().err


def test_a_job_is_accepted_for_gpus_that_are_lost_now() -> None:
    """A running dispatcher checks the jobs that `add` names against its own servers."""
    server = SimulatedServer("one", slots=2, gpus=True)
    server.pool.lost = frozenset({1})
    refuse_unplaceable_jobs([job_of({"n": 1}, Options(gpus=2))], [server])
    with pytest.raises(ConfigError, match="no matching server has more than 2"):
        refuse_unplaceable_jobs([job_of({"n": 1}, Options(gpus=3))], [server])


def test_a_plan_starts_no_job_and_writes_no_file(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(directory.rglob("*"))
    assert commands.main([*arguments(jobs_config="one.json"), "--plan"]) == 0
    assert capsys.readouterr().out.endswith("nothing was started\n")
    assert sorted(directory.rglob("*")) == before


TRAIN = Path(KIT, "train.py")


@pytest.mark.parametrize(
    ("make", "script", "directory_of_fold"),
    [
        (lambda path: None, "train.py", "fold0"),  # a train.py of the user
        (lambda path: None, "./train.py", "fold0"),
        (lambda path: (path / "sub").mkdir() or (path / "sub/train.py").touch(), "sub/train.py", "fold0"),
        (lambda path: None, str(TRAIN), "fold0_special-methods"),
        (lambda path: (path / "main.py").symlink_to(TRAIN), "main.py", "fold0_special-methods"),
        (lambda path: (path / "muster").symlink_to(KIT), "muster/train.py", "fold0_special-methods"),
    ],
)
def test_the_trainer_of_muster_is_recognised_by_its_path_never_by_its_name(
    make: Callable[[Path], Any], script: str, directory_of_fold: str, directory: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A script of the user that is also named train.py does not get the participants and other defaults of Muster."""
    make(directory)
    job = {"prefix": "p", "fold": 0, "mode": "full_fine_tuning"}
    Path("jobs.json").write_text(json.dumps([job]))
    call = ["--backend", "local", "--slots", "1", "--jobs-config", "jobs.json", "--plan", "--script", script]
    assert commands.main(call) == 0
    assert f"experiments/p/{directory_of_fold}\n" in capsys.readouterr().out
    is_trainer = directory_of_fold != "fold0"
    assert two_phase.main([*call, "--refuse-leaks"]) == 2
    assert ("participants are unknown" in capsys.readouterr().err) == (not is_trainer)
    assert two_phase.helper(["jobs.json", "--script", script]) == 0
    assert ("base_steps=300" in capsys.readouterr().out) == is_trainer
    write([job | {"fold": 10}], "ten.json", "train.py")  # accepted, as this train.py is not the trainer of Muster


def test_without_a_named_script_and_a_train_py_here_a_list_runs_that_of_muster(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "train.py").unlink()
    Path("jobs.json").write_text(json.dumps([{"prefix": "p", "fold": 0, "mode": "full_fine_tuning"}]))
    plan = ["--jobs-config", "jobs.json", "--plan"]
    assert commands.main(["--backend", "local", *plan]) == 0
    assert "experiments/p/fold0_special-methods\n" in capsys.readouterr().out
    assert two_phase.helper(["jobs.json"]) == 0
    assert f"{TRAIN}; " in capsys.readouterr().out
    Path("servers.json").write_text(json.dumps({"servers": [{"host": "a"}]}))  # its train.py may be on servers only
    assert commands.main(["--cluster-config", "servers.json", *plan]) == 0
    assert "experiments/p/fold0\n" in capsys.readouterr().out


def test_a_program_exits_although_pythoninspect_is_set() -> None:
    """PYTHONINSPECT would make Python show a prompt after the program and wait for standard input."""
    program = Path(KIT, "scripts", "jobs", "run_distributed_training.py")
    env, null = os.environ | {"PYTHONINSPECT": "1"}, subprocess.DEVNULL
    with subprocess.Popen([sys.executable, program, "--help"], env=env, stdin=subprocess.PIPE, stdout=null) as started:
        assert started.wait(60) == 0
