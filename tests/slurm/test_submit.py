"""The options of sbatch that submit.sh chooses from the output of sinfo, and the batch script of --template."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from distributed import files, trust
from distributed.slurm import submit
from distributed.slurm.submit import BATCH_SCRIPT, SubmitError, choose_nodes, template

BIG = "--partition=big --gres=gpu:a100"
LAB = "cpu|100|64|(null)|infinite\nsmall*|4|16+|gpu:2|1-00:00:00\nbig|8|96|gpu:a100:8(S:0-1),nvme:1|12:00:00"
WITHOUT_GPUS = "main*|4|16|(null)|2:00:00"
TWO_KINDS = "sinfo: warning: old\na|b*|4|16|gpu:8|infinite\nmixed*|4|16|gpu:a100:4,gpu:v100:2|infinite"


@pytest.mark.parametrize(
    ("sinfo", "nproc", "nnodes", "user_options", "expected"),
    [
        (LAB, 2, 4, [], "--nodes=4 --ntasks-per-node=2 --gres=gpu:2 --cpus-per-task=8"),
        (LAB, 1, 1, [], "--nodes=1 --ntasks-per-node=1 --gres=gpu:1 --cpus-per-task=8"),  # a share of the node
        (LAB, 2, 5, [], f"--nodes=5 --ntasks-per-node=2 {BIG}:2 --cpus-per-task=12 --time=12:00:00"),
        (LAB, 8, 1, ["--time=1"], f"--nodes=1 --ntasks-per-node=8 {BIG}:8 --cpus-per-task=12"),
        (LAB, 16, 4, ["--gres=none"], "--nodes=4 --ntasks-per-node=16 --cpus-per-task=1"),
        (LAB, 2, 4, ["--gpus-per-task=1"], "--nodes=4 --ntasks-per-node=2 --gres=none --cpus-per-task=8"),
        (LAB, 2, 4, ["--cpus-per-task=1", "--exclusive"], "--nodes=4 --ntasks-per-node=2 --gres=gpu:2"),
        (WITHOUT_GPUS, 4, 2, [], "--nodes=2 --ntasks-per-node=4 --gres=none --cpus-per-task=4 --time=2:00:00"),
        ("lab*|2|8|gpu:0|infinite\n", 4, 2, [], "--nodes=2 --ntasks-per-node=4 --gres=none --cpus-per-task=2"),
        (TWO_KINDS, 4, 1, [], "--nodes=1 --ntasks-per-node=4 --gres=gpu:a100:4 --cpus-per-task=4"),
        (TWO_KINDS, 2, 1, [], "--nodes=1 --ntasks-per-node=2 --gres=gpu:a100:2 --cpus-per-task=4"),
        (TWO_KINDS.replace("a100:4", "a100:1"), 2, 1, [],
         "--nodes=1 --ntasks-per-node=2 --gres=gpu:v100:2 --cpus-per-task=8"),
    ],
)  # fmt: skip
def test_the_options_request_the_first_nodes_that_fit(
    sinfo: str, nproc: int, nnodes: int, user_options: list[str], expected: str
) -> None:
    assert choose_nodes(sinfo, nproc, nnodes, user_options) == expected.split()


@pytest.mark.parametrize(
    ("sinfo", "nproc", "nnodes", "remedy"),
    [
        (LAB, 16, 1, "big|8|96|gpu:a100:8(S:0-1),nvme:1); request fewer, or another partition, or give --gres=none"),
        (LAB, 8, 9, "big|8|96|gpu:a100:8(S:0-1),nvme:1); request fewer, or another partition, or give --gres=none"),
        (WITHOUT_GPUS, 17, 1, "(main*|4|16|(null)); request fewer, or another partition"),
        ("", 1, 1, "sinfo lists (none); request fewer, or another partition"),
    ],
)
def test_nodes_that_no_partition_has_are_refused(sinfo: str, nproc: int, nnodes: int, remedy: str) -> None:
    with pytest.raises(SubmitError) as refused:
        choose_nodes(sinfo, nproc, nnodes, [])
    assert str(refused.value).startswith(f"NPROC {nproc}, NNODES {nnodes}: ")
    assert remedy in str(refused.value)


def test_a_template_has_each_option_once_and_the_other_lines_of_the_batch_script(tmp_path: Path) -> None:
    options = ["--nodes=4", "--time=5", "--qos=high", "--comment=a b"]
    text = template(options, "2", ["/bin/python", "my train.py", "it's"])
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    names = [line.partition("=")[0] for line in lines]
    assert {"#SBATCH --nodes=4", "#SBATCH --time=5", "#SBATCH --qos=high", "#SBATCH --signal=USR2@120"} <= set(lines)
    assert "#SBATCH '--comment=a b'" in lines
    assert len(set(names)) == len(names)
    assert len(text.splitlines()) <= 30
    assert "slurm_train" in BATCH_SCRIPT.name and "muster" not in text.lower()
    (tmp_path / "job.sh").write_text(text)
    subprocess.run(["shellcheck", "--exclude=SC2016", tmp_path / "job.sh"], check=True)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on PATH for programs that replace those of SLURM."""
    monkeypatch.setattr(submit, "INTERVAL", 0)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_failing_sinfo_is_reported(programs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_program(programs / "sinfo", "echo 'main*|4|16|(null)|1:00'; echo 'sinfo: error: no controller' >&2; exit 1")
    assert submit.main(["submit.sh", "logs", "submit", "1", "1"]) == 2
    assert capfd.readouterr().err == (
        "sinfo: error: no controller\n"
        "submit.sh: sinfo failed, see its message above; call this on a login node of a running cluster\n"
    )


def test_a_failing_scontrol_is_reported_once_and_the_job_is_followed_further(
    programs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_program(
        programs / "scontrol",
        """echo >>calls
case $(wc -l <calls) in
1 | 4) echo "JobId=17 JobState=RUNNING ExitCode=0:0" ;;
2 | 3) echo "error: no controller ($(wc -l <calls))" >&2; exit 1 ;;
*) echo "JobId=17 JobState=FAILED Reason=None ExitCode=3:0 SubmitLine=sbatch job.sh JobState=RUNNING ExitCode=0:0" ;;
esac""",
    )
    assert submit.follow("17", ["out", "err"], "submit.sh") == 3
    assert capfd.readouterr().err.splitlines() == [
        "submit.sh: job 17: RUNNING",
        "submit.sh: job 17: state unknown: scontrol failed, retrying every 0 s: error: no controller (2)",
        "submit.sh: job 17: RUNNING",
        "submit.sh: job 17: FAILED",
    ]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("of nobody", "belongs to nobody"), ("FIFO", "not a regular file"), ("link", "is a symbolic link")],
)
def test_a_planted_output_file_is_not_printed(
    programs: Path, kind: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_program(programs / "scontrol", 'echo "JobId=17 JobState=COMPLETED ExitCode=0:0"')
    (programs / "precious").write_text("secret")
    if kind == "FIFO":
        os.mkfifo(programs / "out")
    elif kind == "link":
        (programs / "out").symlink_to("precious")
    elif os.geteuid():
        pytest.skip("only root can give a file to another user")
    else:
        (programs / "out").write_text("planted")
        shutil.chown(programs / "out", "nobody")
    with pytest.raises(SubmitError, match=f"out: {reason}.*; the job continues"):
        submit.follow("17", ["out", "err"], "submit.sh")
    assert capfd.readouterr().out == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")
@pytest.mark.parametrize(
    ("log_dir", "reason"),
    [
        ("shared", "{cwd}/shared: belongs to nobody, who made it where all users can create files"),
        ("shared/mine", "{cwd}/shared: belongs to nobody, who made it where all users can create files"),
        ("link", "{cwd}/link: belongs to nobody, who made it where all users can create files"),
        ("open", "open: other users can create files there, and lead the output of the job to other files"),
    ],
)
def test_the_output_of_a_job_does_not_go_to_a_directory_in_which_another_user_can_plant_links(
    programs: Path, log_dir: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(programs / "sbatch", f"touch {programs}/SUBMITTED; echo 17")
    with tempfile.TemporaryDirectory() as made, monkeypatch.context() as patched:
        cwd = Path(made)
        cwd.chmod(0o1777)
        patched.chdir(cwd)
        (cwd / "mine").mkdir()
        (cwd / "open").mkdir()
        (cwd / "open").chmod(0o1777)
        plant = ["bash", "-c", "mkdir -m 777 shared; ln -s mine link"]
        subprocess.run(plant, user="nobody", extra_groups=[], check=True)
        with pytest.raises(SubmitError) as refused:
            submit.submit(["sbatch"], log_dir, "submit.sh", following=False)
        assert str(refused.value) == f"{reason.format(cwd=cwd)}; choose another directory with --log-dir"
        assert not [*(cwd / "mine").iterdir()] and not (programs / "SUBMITTED").exists()
        assert submit.submit(["sbatch"], "mine/more", "submit.sh", following=False) == 0


def test_a_directory_of_logs_that_a_group_can_write_is_refused(programs: Path) -> None:
    write_program(programs / "sbatch", f"touch {programs}/SUBMITTED; echo 17")
    (programs / "open").mkdir()
    (programs / "open").chmod(0o775)
    if not os.geteuid():
        os.chown(programs / "open", -1, 12345)
    elif not trust.writable_by_others(programs / "open", (programs / "open").stat()):
        pytest.skip("the group is this user's own")
    with pytest.raises(SubmitError, match="open: other users can create files there"):
        submit.submit(["sbatch"], "open", "submit.sh", following=False)
    assert not (programs / "SUBMITTED").exists()


def test_the_directory_of_logs_is_not_writable_by_others_whatever_the_umask_is(programs: Path) -> None:
    before = os.umask(0)
    try:
        assert submit.submit(["true"], "new/logs", "submit.sh", following=False) == 0
    finally:
        os.umask(before)
    assert [stat.S_IMODE((programs / name).stat().st_mode) for name in ("new", "new/logs")] == [0o755, 0o755]


def test_printed_commands_can_be_pasted(
    programs: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "KIT", "/my kit")
    monkeypatch.setattr(submit, "follow", interrupt)
    assert submit.submit(["echo", "17"], "my logs", "submit.sh", following=True) == 130
    printed, errors = capfd.readouterr()
    assert [shlex.split(line) for line in printed.splitlines()[1:]] == [
        ["output:", "my logs/slurm-17.out", "my logs/slurm-17.err"],
        ["status:", "/my kit/scripts/status.sh", "--log-dir", "my logs", "17"],
    ]
    assert shlex.split(errors.partition("to stop it: ")[2]) == ["/my kit/scripts/stop.sh", "--log-dir", "my logs", "17"]


@pytest.mark.parametrize(("umask", "expected"), [("000", "0022"), ("077", "0077")])
def test_a_job_has_a_umask_with_which_others_cannot_write_to_its_output(
    programs: Path, umask: str, expected: str
) -> None:
    write_program(programs / "sinfo", "echo 'main*|4|16|(null)|1:00'")
    write_program(programs / "sbatch", "umask >umask; echo 17")
    before = os.umask(int(umask, 8))
    try:
        submit.main(["submit.sh", "logs", "submit", "1", "1"])
    finally:
        os.umask(before)
    assert (programs / "umask").read_text() == f"{expected}\n"
