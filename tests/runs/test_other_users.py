"""A run directory of another user, or one that others can write to, is refused by every program that uses it.

The other users are real: root starts the programs as `nobody`, and gives files to `daemon`.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest

from distributed.launch.takeover import AttachedLaunch
from distributed.runs import run_directory
from distributed.runs.lookup import RunNode
from distributed.transport.commands import LocalCommands

KIT = Path(__file__).resolve().parents[2]
VICTIM, ATTACKER = "nobody", "daemon"
PROGRAMS = ("status.sh", "stop.sh", "report.sh", "attach.sh", "rerun.sh")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")


def uid(user: str) -> int:
    return pwd.getpwnam(user).pw_uid


def give(path: Path, user: str) -> None:
    for one in (path, *path.rglob("*")):
        os.chown(one, uid(user), pwd.getpwnam(user).pw_gid, follow_symlinks=False)


def ids_of(user: str) -> dict[str, Any]:
    """Arguments of subprocess.run() for a program that runs as this user."""
    return {"user": uid(user), "group": pwd.getpwnam(user).pw_gid, "extra_groups": []} if user != "root" else {}


@cache
def python_of(user: str) -> str:
    """A Python that the user can run, and that can read Muster. Skips the test if there is none."""
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        call = [python, "-c", f"import sys; open({str(KIT / 'VERSION')!r}); assert sys.version_info >= (3, 10)"]
        with suppress(OSError):
            if subprocess.run(call, **ids_of(user), capture_output=True, cwd="/").returncode == 0:
                return python
    pytest.skip(f"{user} cannot run a Python or read Muster's directory")


def run_as(user: str, program: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Call a script as a user."""
    env = os.environ | {"HOME": str(cwd), "TMPDIR": str(cwd), "XDG_RUNTIME_DIR": ""}
    command = [str(KIT / "scripts" / program), "--python", python_of(user), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, **ids_of(user))


def planted_run(logs: Path, owner: str) -> tuple[Path, Path]:
    """A run directory whose run.json names a program as Python. Returns it, and the file that this program writes."""
    proof = logs / "called"
    program = logs / "python"
    program.write_text(f"#!/bin/sh\nid >{proof}\n")
    program.chmod(0o755)
    directory = Path(
        run_directory.create(
            str(logs), "train", nodes=[RunNode("n1", "", 1, 0)], script="train.py", config=None, cwd="/",
            python=str(program), command=["train.py"], launcher=os.getpid(),
        )
    )  # fmt: skip
    facts = json.loads((directory / "run.json").read_text())
    proof.unlink()  # written when create() asked this Python for its version
    facts["user"] = VICTIM  # what the file says about its owner must not matter
    (directory / "run.json").write_text(json.dumps(facts))
    for path in (directory, *directory.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    give(directory, owner)
    return directory, proof


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("user", [VICTIM, "root"])
def test_the_run_of_another_user_is_refused_and_its_python_is_not_called(shared: Path, program: str, user: str) -> None:
    directory, proof = planted_run(shared, ATTACKER)
    done = run_as(user, program, directory, cwd=shared)
    assert done.returncode == 2
    assert f"{directory}: belongs to {ATTACKER}, and you are {user}" in done.stderr
    assert (f"runuser -u {ATTACKER} -- " in done.stderr) == (user == "root")
    assert not proof.exists() and not (directory / "report.html").exists()


@pytest.mark.parametrize(  # a report executes nothing, so it may read a run.json that others can write to
    ("program", "name"), [*((program, ".") for program in PROGRAMS), *((one, "run.json") for one in PROGRAMS[:2])]
)
def test_a_run_that_others_can_write_to_is_refused(shared: Path, program: str, name: str) -> None:
    directory, proof = planted_run(shared, VICTIM)
    (directory / name).chmod(0o777)
    done = run_as(VICTIM, program, directory, cwd=shared)
    assert done.returncode == 2, done.stderr
    assert "other users can write to it (mode 777); if you trust its content: chmod go-w" in done.stderr
    assert not proof.exists()


@pytest.mark.parametrize("program", sorted({*PROGRAMS} - {"attach.sh"}))  # would show the run until it ends
def test_a_planted_link_to_another_run_is_not_followed(shared: Path, program: str) -> None:
    (shared / "runs").mkdir(mode=0o755)
    directory, _ = planted_run(shared / "runs", VICTIM)
    (shared / "logs").mkdir()
    (shared / "logs").chmod(0o1777)
    (link := shared / "logs" / "latest").symlink_to(directory)
    for user in (ATTACKER, VICTIM, "root"):
        os.chown(link, uid(user), -1, follow_symlinks=False)
        done = run_as(VICTIM, program, "latest", cwd=shared)
        assert ("this symbolic link belongs to daemon" in done.stderr) == (user == ATTACKER), done.stderr
        assert (done.returncode == 2) == (user == ATTACKER), done.stderr


def test_a_run_json_of_another_user_in_an_own_directory_is_refused(shared: Path) -> None:
    directory, proof = planted_run(shared, VICTIM)
    os.chown(directory / "run.json", uid(ATTACKER), -1)
    done = run_as(VICTIM, "status.sh", directory, cwd=shared)
    assert done.returncode == 2 and f"belongs to {ATTACKER}" in done.stderr
    assert not proof.exists()


def test_the_table_of_all_runs_names_what_it_does_not_show(shared: Path) -> None:
    (shared / "logs").mkdir(mode=0o755)
    directory, _ = planted_run(shared / "logs", ATTACKER)
    done = run_as(VICTIM, "ls.sh", cwd=shared)
    assert f"not shown: {shared}/logs/{directory.name}: belongs to {ATTACKER}, and you are {VICTIM}" in done.stdout


def test_a_private_run_of_another_user_does_not_hide_the_others(shared: Path) -> None:
    (shared / "logs").mkdir(mode=0o755)
    own = []
    for owner in (VICTIM, ATTACKER):
        directory, _ = planted_run(shared / "logs", owner)
        if owner == ATTACKER:
            directory.chmod(0o700)
        else:
            own.append(directory.name)
    done = run_as(VICTIM, "ls.sh", cwd=shared)
    assert done.returncode == 0 and done.stderr == ""
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == own


def test_directories_of_others_do_not_use_up_the_rows_of_the_table_of_all_runs(shared: Path) -> None:
    (shared / "logs").mkdir()
    (shared / "logs").chmod(0o1777)
    own, _ = planted_run(shared / "logs", VICTIM)
    theirs, _ = planted_run(shared / "logs", ATTACKER)
    for number in range(3):
        copy = Path(shutil.copytree(theirs, shared / f"logs/train-20990102-030405-000{number}", symlinks=True))
        give(copy, ATTACKER)
    done = run_as(VICTIM, "ls.sh", "--rows", "2", cwd=shared)
    assert own.name in done.stdout.partition("not shown")[0], done.stdout
    assert done.stdout.count(f"belongs to {ATTACKER}") == 4


@pytest.mark.parametrize("call", [("status.sh", "train"), ("stop.sh", "none"), ("report.sh", "train"), ("ls.sh",)])
def test_the_name_of_another_users_directory_is_no_line_of_its_own(shared: Path, call: tuple[str, ...]) -> None:
    (shared / "logs").mkdir()
    directory, _ = planted_run(shared / "logs", ATTACKER)
    directory.rename(directory.with_name("train\nstop.sh: forged\x1b[2J"))
    (shared / "logs").chmod(0o1777)
    done = run_as(VICTIM, *call, cwd=shared)
    printed = done.stdout + done.stderr
    assert ("train stop.sh: forged" in printed) == (call[0] == "ls.sh"), "a name of another user is no candidate"
    assert "\nstop.sh: forged" not in printed and "\x1b" not in printed


def test_an_own_run_is_reported_and_a_planted_link_is_replaced(shared: Path) -> None:
    directory, _ = planted_run(shared, VICTIM)
    (precious := shared / "precious").write_text("keep")
    give(precious, VICTIM)
    (directory / "report.html").symlink_to(precious)
    give(directory, VICTIM)
    done = run_as(VICTIM, "report.sh", directory, cwd=shared)
    assert done.returncode == 0, done.stderr
    assert precious.read_text() == "keep"
    assert not (directory / "report.html").is_symlink() and (directory / "report.html").stat().st_size > 1000


def test_others_can_read_a_run_after_the_documented_chmod_and_its_owner_can_still_use_it(shared: Path) -> None:
    for document in ("SECURITY.md", "LAUNCH_GUIDE.md"):
        assert "chmod -R go+rX" in " ".join((KIT / document).read_text().split())
    directory, _ = planted_run(shared, VICTIM)
    (directory / "run.json").chmod(0o600)
    directory.chmod(0o700)
    reader = ["cat", str(directory / "run.json")]
    assert subprocess.run(reader, **ids_of(ATTACKER), capture_output=True).returncode == 1
    subprocess.run(["chmod", "-R", "go+rX", str(directory)], **ids_of(VICTIM), check=True)
    assert subprocess.run(reader, **ids_of(ATTACKER), capture_output=True, check=True).stdout
    done = run_as(VICTIM, "report.sh", directory, cwd=shared)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", ["status.sh", "stop.sh"])
def test_the_recorded_python_is_not_called_on_this_machine(shared: Path, program: str) -> None:
    """It may have been removed, and another user may have made one of its name."""
    directory, proof = planted_run(shared, VICTIM)
    run_as(VICTIM, program, directory, cwd=shared)
    assert not proof.exists()


def test_a_private_directory_of_another_user_hides_no_message(shared: Path) -> None:
    (shared / "logs").mkdir(mode=0o755)
    (shared / "logs/theirs").mkdir(mode=0o700)
    give(shared / "logs/theirs", ATTACKER)
    for script, names in (("status.sh", ["theirs"]), ("report.sh", ["theirs", "theirs*"]), ("report.sh", ["*"])):
        done = run_as(VICTIM, script, *names, cwd=shared)
        assert done.returncode == 2 and "Traceback" not in done.stderr and "no such run" in done.stderr, done.stderr


def test_a_lock_of_another_user_who_can_read_a_run_delays_neither_stop_nor_attach(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = planted_run(shared, VICTIM)
    facts = json.loads((directory / "run.json").read_text())
    facts["launcher"] |= {"pid": 1, "since": 0, "grace": 0}
    (directory / "run.json").write_text(json.dumps(facts))
    (directory / "launcher.log").touch()
    with ExitStack() as opened:
        for path in directory.iterdir():
            if path.is_file():
                fcntl.flock(opened.enter_context(path.open()), fcntl.LOCK_EX)
        command = [python_of(VICTIM), "-c", STOP_SOON, str(directory)]
        env = os.environ | {"TMPDIR": str(shared)}
        done = subprocess.run(command, cwd=KIT, env=env, capture_output=True, text=True, timeout=60, **ids_of(VICTIM))
        assert "another stop.sh is stopping" not in done.stderr and "Traceback" not in done.stderr
        assert stat.S_IMODE((directory / "stop.lock").stat().st_mode) == 0o600
        (directory / "run.json").write_text(json.dumps(facts | {"lease": 0}))
        give(directory, "root")
        monkeypatch.setenv("MUSTER_ATTACH", str(directory))
        with pytest.raises(RuntimeError) as refused:
            Attach().check_nodes(LocalCommands())
        assert "was started with the nodes" in str(refused.value)  # the check after that of the lock


class Attach(AttachedLaunch):
    """A launcher without nodes that attaches to a run; its refusal is an exception."""

    def __init__(self) -> None:
        self.targets = []

    def _refuse(self, reason: str) -> NoReturn:
        raise RuntimeError(reason)


STOP_SOON = f"""
import sys
sys.path.insert(0, {str(KIT)!r})
from distributed.runs import stop
stop.END_TIMEOUT = stop.KILL_TIMEOUT = stop.CHECK_TIMEOUT = 0.5
sys.exit(stop.main(["--program", "stop.sh", "--log-dir", "logs", sys.argv[1]]))
"""


@pytest.fixture
def slurm(shared: Path) -> Callable[..., dict[str, str]]:
    """A function that makes stubs of SLURM's programs, with a job of a user. Returns the environment with them."""

    def stubs(owner: str, workdir: Path) -> dict[str, str]:
        (programs := shared / "bin").mkdir()
        for name, script in {
            "squeue": f'case "$*" in *%U*) echo {uid(owner)} ;; *) echo "RUNNING None" ;; esac',
            "scontrol": f'echo "JobId=17 JobName=x JobState=RUNNING ExitCode=0:0 WorkDir={workdir} StdErr=/e StdIn=/i"',
            "scancel": f'echo "$*" >>{shared}/cancelled',
        }.items():
            (programs / name).write_text(f"#!/bin/sh\n{script}\n")
            (programs / name).chmod(0o755)
        return {"PATH": f"{programs}:{os.environ['PATH']}"}

    return stubs


@pytest.mark.parametrize("program", ["status.sh", "stop.sh"])
def test_the_slurm_job_of_another_user_is_refused_and_its_directory_is_not_read(
    shared: Path, slurm: Callable[..., dict[str, str]], program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir := shared / "theirs" / "logs").mkdir(parents=True)
    directory, proof = planted_run(workdir, ATTACKER)
    (workdir / "slurm-17").symlink_to(directory.name)
    monkeypatch.setenv("PATH", slurm(ATTACKER, workdir.parent)["PATH"])
    done = run_as("root", program, "17", cwd=shared)
    assert done.returncode == 2 and f"job 17: belongs to {ATTACKER}" in done.stderr
    assert not proof.exists() and not (shared / "cancelled").exists()


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_a_run_directory_is_private_whatever_the_umask(shared: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        made = run_directory.create(
            str(shared / "new" / "logs"), "train", nodes=[RunNode("n1", "", 1, 0)], script="train.py", config=None,
            cwd="/", python=sys.executable, command=["train.py"],
        )  # fmt: skip
    finally:
        os.umask(before)
    for path in (Path(made), *Path(made).rglob("*"), Path(made).parent):
        assert path.is_symlink() or stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_an_existing_run_directory_of_another_user_is_not_used_again(shared: Path) -> None:
    directory, _ = planted_run(shared, ATTACKER)
    with pytest.raises(PermissionError, match=f"belongs to {ATTACKER}"):
        run_directory.create(
            str(shared), "train", nodes=[RunNode("n1", "", 1, 0)], script="train.py", config=None, cwd="/",
            python=sys.executable, command=["train.py"], existing=str(directory),
        )  # fmt: skip
