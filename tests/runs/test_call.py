"""The recorded call of a launcher: values that are not recorded, options that replace others, and what differs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distributed.runs.call import Call, typed
from distributed.runs.lookup import Launcher, Run
from distributed.runs.rerun import differences, rerun
from distributed.transport.commands import TransportError

CALL = Call(
    ("/k/scripts/run.sh",),
    (("-n", "2"), ("--env", "A=1"), ("--env", "B=x=y"), ("--notify", "curl secret"), ("--sync",), ("-m", "mod")),
    ("--env", "C=3", "--notify", "x"),
)


def test_values_of_env_and_notify_are_masked_but_arguments_of_the_script_are_not() -> None:
    shown = ["-n", "2", "--env", "A=...", "--env", "B=...", "--notify", "...", "--sync", "-m", "mod"]
    assert CALL.masked().words == ["/k/scripts/run.sh", *shown, "--env", "C=3", "--notify", "x"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([], "-n 2 --env A=1 --env B=x=y --notify curl secret --sync  -m mod"),
        (["-n", "4"], "--env A=1 --env B=x=y --notify curl secret --sync GIVEN -m mod"),
        (["--nproc_per_node=4"], "--env A=1 --env B=x=y --notify curl secret --sync GIVEN -m mod"),
        (["--env", "B=2", "--sync"], "-n 2 --env A=1 --notify curl secret GIVEN -m mod"),
        (["--env=A=2", "--notify=true"], "-n 2 --env B=x=y --sync GIVEN -m mod"),
        (["--sbatch", "--array=0-3"], "-n 2 --env A=1 --env B=x=y --notify curl secret --sync GIVEN -m mod"),
        (["--module", "other"], "-n 2 --env A=1 --env B=x=y --notify curl secret --sync GIVEN"),
    ],
)
def test_options_replace_those_of_the_same_name_or_variable_and_stand_before_a_module(
    given: list[str], kept: str
) -> None:
    expected = " ".join(kept.replace("GIVEN", " ".join(given)).split())
    assert " ".join(CALL.with_options(given).words[1 : -len(CALL.rest)]) == expected


def test_an_option_of_the_start_can_be_left_out() -> None:
    assert CALL.with_options([], ("--sync", "--env", "--notify")).words[1:5] == ["-n", "2", "-m", "mod"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")
def test_a_directory_or_python_that_another_user_has_made_since_is_refused(tmp_path: Path) -> None:
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o1777)
    (theirs := shared / "theirs").mkdir()
    os.chown(theirs, 1, 1)
    script = Call(CALL.program, (), (f"{theirs}/train.py", "--lr", "1"))
    for cwd, call in (
        (theirs, CALL), (tmp_path, CALL.with_options(["--python", f"{theirs}/python"])),
        (tmp_path, Call(CALL.program, (("--env-file", f"{theirs}/env"),), ("-",))), (tmp_path, script),
    ):  # fmt: skip
        with pytest.raises(
            TransportError, match=r"theirs: belongs to .*, who made it where all users can create files"
        ):
            call.repeat(str(cwd), {})
    with pytest.raises(TransportError, match="gone: No such file or directory"):
        CALL.repeat(str(tmp_path / "gone"), {})


@pytest.mark.parametrize("program", ["/k/scripts/../../bin/bash", "/bin/sh", "/k/scripts/stop.sh"])
def test_only_a_launcher_is_called_again(program: str, tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="not a launcher of Muster"):
        Call((program,), (), ("-",)).repeat(str(tmp_path), {})


def test_what_a_user_types_is_a_verb_only_if_muster_was_called() -> None:
    assert typed("muster run", "stop", "a b") == "muster stop a\\ b"
    assert typed("run.sh", "stop", "x").endswith("/scripts/stop.sh x")


EARLIER = {
    "git": {"commit": "a" * 40, "dirty": False}, "python": "/v/bin/python",
    "versions": {"python": "3.11.7", "torch": "2.4.0", "muster": "1", "nccl": None},
    "packages": ["numpy-2.3.1", "scikit_learn-1.5", "torch-2.4.0"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, []),
        ({"git": {"commit": "b" * 40, "dirty": False}}, ["commit bbbbbbbbbbbb, was aaaaaaaaaaaa"]),
        ({"git": None}, ["commit unknown, was aaaaaaaaaaaa"]),
        (
            {"git": {"commit": "a" * 40, "dirty": True}},
            ["uncommitted changes: yes, were: no; only the fact is recorded"],
        ),
        ({"python": "/w/python"}, ["Python /w/python, was /v/bin/python"]),
        (
            {"packages": ["numpy-2.4.0", "torch-2.4.0", "rich-13"]},
            ["packages: numpy 2.4.0, was 2.3.1; rich 13, was none; scikit_learn none, was 1.5"],
        ),
        ({"versions": {"python": "3.12.1", "torch": "2.4.0", "muster": "1"}}, ["packages: python 3.12.1, was 3.11.7"]),
        ({"packages": [*EARLIER["packages"], *(f"p{n}-1" for n in range(7))]}, None),
    ],
)
def test_the_lines_say_what_differs_from_the_earlier_run(changes: dict[str, object], lines: list[str] | None) -> None:
    found = list(differences(EARLIER, EARLIER | changes))
    if lines is None:
        assert found[0].endswith("p4 1, was none; 2 more")
    else:
        assert found == lines


def test_a_batch_job_is_not_repeated_without_its_options_of_sbatch() -> None:
    call = Call(("sbatch", "/k/scripts/slurm/slurm_train.sh"), (), ("-",))
    launcher = Launcher("head", 1, 1, "exited", 8)
    run = Run(Path("/x/train-1"), "/x/train-1", "python3", "ada", "", tuple(call.words), launcher, (), call=call)
    with pytest.raises(TransportError, match="options of sbatch are not recorded; submit it again"):
        rerun(run, [], "muster rerun")
