"""muster.toml: defaults of a user and of a project."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.files import KIT
from distributed.launch.defaults import WrongFile, defaults_of

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no tomllib")


def run(project: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (project / "my_train.py").touch()
    env = {"PATH": os.environ["PATH"], "HOME": str(project / "home")} | variables
    command = [f"{KIT}/scripts/run.sh", "--dry-run", *arguments, "my_train.py"]
    return subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, check=False)


def write(project: Path, text: str, user: bool = False) -> Path:
    file = project / "home/.config/muster/muster.toml" if user else project / "muster.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def ranks(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.split("--nproc-per-node ")[1].split()[0]


def test_the_project_counts_before_the_user_and_the_command_line_before_both(tmp_path: Path) -> None:
    user = write(tmp_path, f'nproc = 2\npython = "{sys.executable}"', user=True)
    done = run(tmp_path)
    assert ranks(done) == "2"
    assert f"--nproc 2: default of {user}" in done.stderr
    project = write(tmp_path, "nproc = 3")
    done = run(tmp_path)
    assert ranks(done) == "3"
    assert f"--nproc 3: default of {project}" in done.stderr
    assert f"--python {sys.executable}: default of {user}" in done.stderr
    done = run(tmp_path, "-n", "4")
    assert ranks(done) == "4"
    assert "--nproc" not in done.stderr


def test_the_file_of_the_user_may_be_in_another_configuration_directory(tmp_path: Path) -> None:
    (tmp_path / "xdg/muster").mkdir(parents=True)
    (tmp_path / "xdg/muster/muster.toml").write_text("nproc = 5")
    assert ranks(run(tmp_path, XDG_CONFIG_HOME=str(tmp_path / "xdg"))) == "5"


@pytest.mark.slow
def test_variables_reach_the_ranks_and_are_shown_without_their_values(tmp_path: Path) -> None:
    write(tmp_path, '[env]\nTOKEN = "s e\\ncret"\nOTHER = "file"')
    done = run(tmp_path, "-n", "1", "--env", "OTHER=given")
    assert "--env TOKEN: default of" in done.stderr
    assert "cret" not in done.stderr + done.stdout
    (tmp_path / "show.py").write_text("import os; print([os.environ[name] for name in ('TOKEN', 'OTHER')])")
    command = [f"{KIT}/scripts/run.sh", "--python", sys.executable, "-n", "1", "--env", "OTHER=given", "show.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "['s e\\ncret', 'given']" in done.stdout + done.stderr


def test_nodes_and_options_of_slurm_apply_only_where_the_run_can_use_them(tmp_path: Path) -> None:
    write(tmp_path, 'on = "node1,node2"\n[slurm]\npartition = "long"')
    done = run(tmp_path, "-n", "2")
    assert "--on node1,node2: default of" in done.stderr
    assert "partition" not in done.stderr
    assert "node2" in done.stdout
    assert "node2" not in run(tmp_path, "--standalone", "-n", "2").stdout
    done = run(tmp_path, "--slurm", "1", "-n", "2")
    assert "--partition long: default of" in done.stderr
    assert "--on" not in done.stderr
    assert "--time" not in done.stderr
    assert "--partition long" not in run(tmp_path, "--slurm", "1", "-n", "2", "--partition=short").stderr


def test_a_command_to_notify_counts_after_that_of_the_environment(tmp_path: Path) -> None:
    write(tmp_path, 'notify = "mail me"')
    assert "--notify: default of" in run(tmp_path, "-n", "1").stderr
    assert "--notify" not in run(tmp_path, "-n", "1", MUSTER_NOTIFY="cat").stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nprocs = 2", "nprocs: unknown key; the nearest known one is nproc"),
        ("[slurm]\npartitoin = 2", "slurm.partitoin: unknown key; the nearest known one is slurm.partition"),
        ("nproc = true", "nproc: expected text or a whole number"),
        ("env = 3", r"env: expected a table, as in \[env\]"),
        ("on = ''", "on: expected text or a whole number"),
        ("on = ", "Invalid value"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(WrongFile, match=message):
        defaults_of(str(file))
    done = run(tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 2), done.stderr
    assert f"run.sh: {file}: " in done.stderr


@pytest.mark.parametrize("changed", ["muster.toml", "."])
def test_a_file_that_others_can_change_is_refused(tmp_path: Path, changed: str) -> None:
    write(tmp_path, "nproc = 2")
    (tmp_path / changed).chmod(0o777)
    done = run(tmp_path)
    assert (done.returncode, "other users can write it" in done.stderr) == (69, True), done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(write(tmp_path, "nproc = 2"), 12345, 12345)
    done = run(tmp_path)
    assert (done.returncode, "belongs to" in done.stderr) == (69, True), done.stderr


def test_a_link_to_a_file_of_another_user_is_refused(tmp_path: Path, shared: Path) -> None:
    (target := shared / "theirs.toml").write_text("nproc = 2")
    target.chmod(0o666)
    (tmp_path / "muster.toml").symlink_to(target)
    assert run(tmp_path).returncode == 69
