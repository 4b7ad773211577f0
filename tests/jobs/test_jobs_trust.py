"""For a job list, what other users, servers and jobs can write is data: nothing is executed, followed or awaited."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from distributed.files import KIT, user_file
from distributed.jobs import commands, list_plan
from distributed.jobs.host import checks, host_attempt, outputs, panes, service
from distributed.jobs.journal import journal
from distributed.jobs.journal.journal import Journal, JournalError
from distributed.jobs.journal.state import Attempt, ListState, job_records
from distributed.jobs.lists import config
from distributed.jobs.lists.job import Job, Options, job_of
from distributed.jobs.schedule.backend import Event, ServerUnusable, Unreachable
from distributed.jobs.schedule.base_cache import Cache
from distributed.jobs.servers import host_server, programs, sockets, ssh_server
from distributed.jobs.servers.channel import EVENTS, Channel
from distributed.jobs.servers.host_server import ListContext
from distributed.jobs.show import console, page
from distributed.training.base_model import CACHE, FILES, TRAINING, WEIGHTS, BaseModelError, hash_of, stage

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory that other users can read."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o755)
    monkeypatch.chdir(made)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def as_nobody(work: Callable[[], Any]) -> str:
    """Call a function as another user. Returns its result, or the name of its exception, as text."""
    source, target = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            text = str(work())
        except BaseException as error:  # noqa: BLE001 - the parent process gets its name
            text = type(error).__name__
        os.write(target, text.encode())
        os._exit(0)
    os.close(target)
    with open(source) as file:
        found = file.read()
    os.waitpid(child, 0)
    return found


def mode_of(path: Path | str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


# ---------------------------------------------------------------- the journal


def write_journal(path: Path, **call: Any) -> None:
    """A journal with one job. Its commands would run a program: the recorded interpreter."""
    jobs = [job_of({"n": 1}, Options())]
    with Journal.open(path) as book:
        book.add("list", list="abc", cwd=str(path.parent), call=call, backend="local", script="job.py",
                 jobs=job_records(jobs))  # fmt: skip
        book.commit()


@as_root
def test_a_file_that_no_call_names_is_not_used_if_another_user_has_planted_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (shared := directory / "shared").mkdir()
    shared.chmod(0o1777)
    monkeypatch.chdir(shared)
    for name, content in (("jobs.json", '[{"a": 1}]'), ("servers.json", '{"servers": [{"host": "a"}]}')):
        Path(name).write_text(content)
    call = ["--jobs-config", "jobs.json", "--backend", "local", "--plan"]
    Path("train.py").touch()
    assert commands.main(call) == 0
    os.chown("train.py", NOBODY, NOBODY)
    for more in ([], ["--cluster-config", "servers.json"]):  # a cluster config without script_path
        assert commands.main([*call, *more]) == 2
        assert f"{shared}/train.py: belongs to nobody, who made it where all users can" in capsys.readouterr().err
    assert commands.main([*call, "--script", "./train.py"]) == 0
    (shared / "mine").mkdir()
    recorded = {"cluster_config": str(shared / "servers.json"), "jobs_config": str(shared / "jobs.json")}
    jobs = [job_of({"n": 1}, Options())]
    with Journal.open(directory / "results.journal") as book:
        book.add("list", list="abc", cwd=str(shared / "mine"), call=recorded, backend="local", script="../train.py",
                 jobs=job_records(jobs))  # fmt: skip
        book.commit()
    state = ListState.of(journal.records(directory / "results.journal"))
    for name in ("mine", "servers.json", "jobs.json", "train.py"):
        for path in map(shared.joinpath, ("mine", "servers.json", "jobs.json", "train.py")):
            os.chown(path, *([NOBODY if path.name == name else 0] * 2))
        monkeypatch.chdir(directory)
        with pytest.raises(config.ConfigError, match=f"{shared / name}: belongs to nobody"):
            list_plan.stored_config(state, directory / "results.journal")
    os.chown(shared / "train.py", 0, 0)
    monkeypatch.chdir(directory)
    assert list_plan.stored_config(state, directory / "results.journal").script == "../train.py"


COMMANDS = [["status"], ["why", "experiments"], ["logs", "experiments"], ["cancel", "all"], ["retry", "failed"],
            ["add", "jobs.json"], ["resume"], ["close"]]  # fmt: skip


@as_root
@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_the_journal_of_another_user_is_refused_with_the_name_of_its_owner(
    arguments: list[str], directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_journal(directory / "results.journal")
    os.chown(directory / "results.journal", NOBODY, NOBODY)
    before = (directory / "results.journal").read_bytes()
    assert commands.main(arguments) == 2
    assert "results.journal: belongs to nobody, and you are root" in capsys.readouterr().err
    assert (directory / "results.journal").read_bytes() == before


@as_root
def test_another_user_who_calls_status_gets_the_name_of_the_owner(directory: Path) -> None:
    write_journal(directory / "results.journal")
    command = [sys.executable, f"{KIT}/scripts/jobs/run_distributed_training.py", "status"]
    if as_nobody(lambda: os.access(sys.executable, os.X_OK)) != "True":
        assert as_nobody(lambda: journal.read(directory / "results.journal")) == "JournalError"
        return
    done = subprocess.run(command, user=NOBODY, capture_output=True, text=True, check=False)
    assert (done.returncode, "belongs to root, and you are nobody" in done.stderr) == (2, True)


def test_a_journal_that_others_can_write_is_refused(directory: Path) -> None:
    write_journal(directory / "results.journal")
    (directory / "results.journal").chmod(0o666)
    with pytest.raises(JournalError, match="other users can write to it"):
        journal.read(directory / "results.journal")


@pytest.mark.usefixtures("open_umask")
def test_a_journal_is_private_also_if_an_earlier_version_has_created_it(directory: Path) -> None:
    path = directory / "results.journal"
    write_journal(path)
    assert mode_of(path) == 0o600
    path.chmod(0o644)
    write_journal(path)
    assert mode_of(path) == 0o600


def lock(path: Path) -> None:
    fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)


@as_root
def test_another_user_cannot_lock_the_files_of_a_list(directory: Path) -> None:
    write_journal(directory / "results.journal")
    os.close(outputs.claim_output(".", "experiments/a", "a", "job.py"))
    for path in (directory / "results.journal", directory / "experiments/a/.muster_job"):
        assert as_nobody(partial(lock, path)) == "PermissionError"


@as_root
def test_a_link_of_another_user_is_not_followed_to_the_file_of_this_user(directory: Path) -> None:
    mine, planted, own = directory / "mine", directory / "planted.json", directory / "own.json"
    mine.write_text("mine")
    for link in (planted, own):
        link.symlink_to(mine)
    os.lchown(planted, NOBODY, NOBODY)
    assert [user_file(planted), user_file(own)] == [str(planted), str(mine)]
    planted.rename(directory / "planted.journal")
    with pytest.raises(OSError, match="symbolic link"):
        write_journal(directory / "planted.journal")
    assert mine.read_text() == "mine"


# ---------------------------------------------------------------- files of jobs


@pytest.mark.usefixtures("open_umask")
def test_files_of_a_list_are_private_and_results_are_written_by_their_owner_only(directory: Path) -> None:
    private = checks.list_directory(str(directory), "abc")
    attempt = host_attempt.HostAttempt(f"{private}/job.1", "gpu1", str(directory / "experiments/a/b"), 0)
    os.close(attempt.create("job", "job.py"))
    assert {mode_of(each) for each in ("logs/jobs", private, attempt.directory)} == {0o700}
    assert {mode_of(each) for each in ("logs", "experiments", "experiments/a", "experiments/a/b")} == {0o755}
    assert mode_of("experiments/a/b/.muster_job") == 0o600


def test_files_of_an_earlier_version_become_private(directory: Path) -> None:
    (directory / "logs/jobs/abc").mkdir(parents=True)
    (directory / "experiments").mkdir()
    (directory / "experiments/.muster_job").touch(0o644)
    checks.list_directory(str(directory), "abc")
    os.close(outputs.claim_output(".", "experiments", "job", "job.py"))
    assert (mode_of("logs/jobs/abc"), mode_of("experiments/.muster_job")) == (0o700, 0o600)


@as_root
def test_the_directory_of_a_list_that_another_user_has_created_is_refused(directory: Path) -> None:
    (directory / "logs/jobs/abc").mkdir(parents=True)
    os.chown(directory / "logs/jobs/abc", NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="belongs to nobody"):
        checks.list_directory(str(directory), "abc")


@as_root
@pytest.mark.parametrize("above", ["logs", "logs/jobs"])
def test_a_directory_whose_owner_could_replace_that_of_a_list_is_refused(directory: Path, above: str) -> None:
    (directory / "logs/jobs").mkdir(parents=True)
    os.chown(directory / above, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="belongs to nobody, who could replace what is in it"):
        checks.list_directory(str(directory), "abc")
    os.chown(directory, NOBODY, NOBODY)
    checks.list_directory(str(directory), "abc")
    (directory / above).chmod(0o777)
    with pytest.raises(PermissionError, match="all users can replace it; call chmod o-w "):
        checks.list_directory(str(directory), "abc")
    (directory / above).chmod(0o1777)
    checks.list_directory(str(directory), "abc")


@as_root
def test_a_link_of_another_user_on_the_way_to_a_list_is_refused(directory: Path) -> None:
    """All users can create files in the working directory."""
    directory.chmod(0o1777)
    (directory / "logs").symlink_to(".")
    checks.list_directory(str(directory), "abc")
    os.lchown(directory / "logs", NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="belongs to nobody, who made it where all users can create files"):
        checks.list_directory(str(directory), "abc")


@as_root
@pytest.mark.parametrize("planted", ["directory", "link", "link to a directory of this user"])
def test_the_results_of_a_job_are_not_written_to_a_directory_that_another_user_has_made(
    directory: Path, planted: str
) -> None:
    output, private = directory / "experiments/a", directory / "private"
    private.mkdir()
    (directory / "experiments").mkdir(mode=0o777)
    if planted == "directory":
        output.mkdir(mode=0o777)
        (output / ".muster_job").write_text("a of job.py")
    else:
        target = private if planted.endswith("user") else directory / "theirs"
        target.mkdir(exist_ok=True)
        os.chown(directory / "theirs", NOBODY, NOBODY) if target != private else None
        output.symlink_to(target)
    os.lchown(output, NOBODY, NOBODY)
    with pytest.raises(outputs.JobRefused, match=f"{output}: belongs to nobody, .* or give this job another prefix"):
        outputs.claim_output(str(directory), str(output), "a", "job.py")
    assert not list(private.iterdir())


@pytest.fixture
def shared(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in which all users can create files."""
    (shared := directory / "shared").mkdir()
    shared.chmod(0o1777)
    monkeypatch.chdir(shared)
    return shared


def as_nobody_made(path: Path, link: Path | None = None) -> Path:
    """A directory to which all users can write, or a link, made by another user."""

    def make() -> None:
        os.umask(0)
        path.symlink_to(link) if link else path.mkdir()

    as_nobody(make)
    assert os.lstat(path).st_uid == NOBODY
    return path


@as_root
@pytest.mark.parametrize("planted", ["experiments", "experiments/p", "experiments/p/j"])
@pytest.mark.parametrize("is_link", [False, True])
def test_no_job_writes_below_a_directory_or_link_of_another_user(
    planted: str, is_link: bool, shared: Path, directory: Path
) -> None:
    (private := directory / "private").mkdir()
    for above in list(Path(planted).parents)[::-1]:
        (shared / above).mkdir(exist_ok=True)
        (shared / above).chmod(0o1777)
    as_nobody_made(shared / planted, private if is_link else None)
    with pytest.raises(
        outputs.JobRefused, match=f"^{shared / planted}: belongs to nobody, .*; use another working direc"
    ):
        outputs.claim_output(str(shared), str(shared / "experiments/p/j"), "j", "job.py")
    assert not [*private.iterdir()]
    assert is_link or not [*(shared / planted).iterdir()]


@as_root
@pytest.mark.parametrize("planted", ["experiments", "experiments/base_training"])
def test_no_file_of_this_user_gets_into_the_cache_through_a_directory_of_another_user(
    planted: str, shared: Path, directory: Path
) -> None:
    (secret := directory / "secret.key").write_text("secret")
    secret.chmod(0o600)
    if planted != "experiments":
        (shared / "experiments").mkdir()
        (shared / "experiments").chmod(0o1777)
    output = shared / TRAINING / hash_of("a" * 64)

    def plant() -> None:
        os.umask(0)
        output.mkdir(parents=True)
        for name in FILES:
            (output / name).symlink_to(secret) if name == WEIGHTS else (output / name).write_text("{}")

    as_nobody(plant)
    with pytest.raises((OSError, BaseModelError)):
        Cache(shared).publish("a" * 64, str(output))
    with pytest.raises(PermissionError, match=f"belongs to nobody.*'{shared / planted}'"):
        stage(str(shared / CACHE), str(output), {"digest": "a" * 64})
    if planted == "experiments":
        with pytest.raises(PermissionError, match=f"belongs to nobody.*'{shared / planted}'"):
            Cache(shared).claim("a" * 64)
    assert not [path for path in shared.rglob("*") if path.name == WEIGHTS and not path.is_symlink()]


@as_root
def test_a_default_working_directory_or_venv_of_another_user_is_not_used_on_a_server(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(directory))
    (venv := directory / "work/.venv/bin").mkdir(parents=True)
    (venv / "python").symlink_to(sys.executable)
    os.chown(directory / "work", NOBODY, NOBODY)
    work = str(directory / "work")
    with pytest.raises(outputs.HostError, match=r"work: belongs to nobody; if you trust its files, set workdir to it"):
        checks.find_workdir("", work, 0)
    assert [checks.find_workdir(work, "", 0), checks.find_workdir("", work, NOBODY)] == [work, work]
    assert [checks.owner_here({"owner": NOBODY, "user": user}) for user in (0, 1000)] == [NOBODY, 0]
    os.chown(directory / "work", 0, 0)
    (link := directory / "link").symlink_to("work")
    assert checks.find_workdir("", str(link), 0) == work
    os.lchown(link, NOBODY, NOBODY)
    with pytest.raises(outputs.HostError, match=r"link: belongs to nobody; if you trust its files, set workdir to it"):
        checks.find_workdir("", str(link), 0)
    (directory / "work").chmod(0o1777)  # as /tmp, which is root's
    with pytest.raises(outputs.HostError, match=r"work: other users can write to it; if you trust its files, set"):
        checks.find_workdir("", work, 0)
    (directory / "work").chmod(0o755)
    os.chown(venv.parent, NOBODY, NOBODY)
    with pytest.raises(outputs.HostError, match=r"work/\.venv: belongs to nobody; set python"):
        checks.find_python("", work)
    assert checks.find_python(".venv/bin/python", work) == [str(venv / "python")]
    os.chown(venv.parent, 0, 0)
    venv.parent.rename(directory / "work/theirs")
    venv.parent.symlink_to("theirs")
    assert checks.find_python("", work) == [str(venv / "python")]
    os.lchown(venv.parent, NOBODY, NOBODY)
    with pytest.raises(outputs.HostError, match=r"work/\.venv: belongs to nobody; set python"):
        checks.find_python("", work)


@as_root
@pytest.mark.parametrize("copied", [False, True])
def test_a_venv_with_a_program_of_another_user_or_to_which_a_group_can_write_is_not_used_on_a_server(
    directory: Path, copied: bool
) -> None:
    venv, work = directory / "work/.venv", str(directory / "work")
    (packages := venv / "lib/python3/site-packages").mkdir(parents=True)
    (python := venv / "bin/python").parent.mkdir()
    if copied:
        python.write_text("#!/bin/sh\n")
        python.chmod(0o755)
    else:
        (theirs := directory / "software").write_text("#!/bin/sh\n")
        theirs.chmod(0o755)
        os.chown(theirs, NOBODY, NOBODY)
        python.symlink_to(theirs)
    assert checks.find_python("", work) == [str(python)]  # also if this user has made a link to another user's Python
    os.lchown(python, NOBODY, NOBODY)
    with pytest.raises(outputs.HostError, match=r"\.venv/bin/python: belongs to nobody; set python"):
        checks.find_python("", work)
    os.lchown(python, 0, 0)
    for path in (venv, python.parent, packages):
        os.chown(path, 0, NOBODY)
        for mode in (0o775, 0o1777):
            path.chmod(mode)
            with pytest.raises(outputs.HostError, match=rf"{path}: other users can write to it; set python"):
                checks.find_python("", work)
        path.chmod(0o755)


def test_a_directory_of_a_venv_to_which_others_can_write_is_found_behind_links_on_a_server(directory: Path) -> None:
    venv, libs, settings = directory / "work/.venv", directory / "libs", directory / "settings"
    (libs / "real/packages").mkdir(parents=True)
    (python := venv / "bin/python").parent.mkdir(parents=True)
    (software := directory / "software").write_text("#!/bin/sh\n")
    software.chmod(0o757)
    settings.touch()
    links: dict[Path, Path | str] = {
        python: software,
        venv / "lib": libs,
        venv / "lib64": "lib",
        libs / "python3": libs / "real",
        libs / "real/site-packages": "packages",
        venv / "pyvenv.cfg": settings,
        venv / "dangling": "nowhere",
    }
    for link, target in links.items():
        link.symlink_to(target)
    assert checks.find_python("", str(directory / "work")) == [str(python)]
    for path in (libs, libs / "real", libs / "real/packages", settings):
        path.chmod(path.stat().st_mode | 0o2)
        with pytest.raises(outputs.HostError, match=r"/\.venv/.*: other users can write to it; set python"):
            checks.find_python("", str(directory / "work"))
        path.chmod(path.stat().st_mode & ~0o2)


@as_root
def test_the_program_of_a_server_uses_no_python_and_no_muster_that_another_user_has_made(
    server: ServerHere, directory: Path
) -> None:
    cache = directory / f".cache/muster/jobs-{server._archive_name}"
    (cache / "complete").mkdir(parents=True)
    venv = server.context.cwd / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").write_text(f"#!/bin/sh\ntouch {directory}/RAN\n")
    (venv / "bin/python").chmod(0o755)

    def run() -> subprocess.CompletedProcess[str]:
        command = ["bash", "-c", server._host_program("serve")]
        environment = {"PATH": os.environ["PATH"], "HOME": str(directory)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)

    for change, undo in (
        (lambda: os.chown(venv, NOBODY, NOBODY), lambda: os.chown(venv, 0, 0)),
        (lambda: (venv / "bin").chmod(0o777), lambda: (venv / "bin").chmod(0o755)),
        (lambda: replace_by_own_link(venv), lambda: os.lchown(venv, 0, 0)),
    ):
        change()
        run()
        assert not (directory / "RAN").exists()
        undo()
        run()
        (directory / "RAN").unlink()
    python = venv / "bin/python"  # a link into a directory in which all users can create files
    shared = directory / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "conda").symlink_to(venv / "bin")
    python.rename(venv / "bin/python3")
    python.symlink_to(shared / "conda/python3")
    for setting in ("", ".venv/bin/python"):
        server.settings = server.settings.model_copy(update={"python": setting})
        run()
        (directory / "RAN").unlink()
        os.lchown(shared / "conda", NOBODY, NOBODY)
        run()
        assert not (directory / "RAN").exists()
        os.lchown(shared / "conda", 0, 0)
    os.chown(cache, NOBODY, NOBODY)
    done = run()
    assert (done.returncode, done.stderr) == (69, f"{cache} belongs to another user\n")
    assert not (directory / "RAN").exists()


@as_root
@pytest.mark.parametrize("is_setting", ["python", "script"])
def test_no_python_or_script_that_another_user_has_planted_on_a_server_runs(
    server: ServerHere, directory: Path, is_setting: str
) -> None:
    (shared := directory / "shared").mkdir()
    shared.chmod(0o1777)
    (planted := shared / "theirs").mkdir()
    (program := planted / "program").write_text(f"#!/bin/sh\ntouch {directory}/RAN\n")
    program.chmod(0o755)
    (directory / f".cache/muster/jobs-{server._archive_name}/complete").mkdir(parents=True)
    server.settings = server.settings.model_copy(update={"python": str(program)})
    line = server._host_program("serve")  # before the other user makes it
    serve = service.Service()
    request = {"do": "open", "server": "one", "list": "abc", "workdir": str(directory), "default_workdir": "",
               "owner": 0, "user": 0, "owners": [], "remote": False, "slots": ["one:0"], "panes": False,
               "script": "mine.sh", "python": "python3"} | {is_setting: str(program)}  # fmt: skip
    (directory / "mine.sh").touch()
    os.chown(planted, NOBODY, NOBODY)
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory)}
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, f"{planted}: belongs to user id {NOBODY}, who made it in {shared}" in done.stderr) == (
        69,
        True,
    )
    with pytest.raises(outputs.HostError, match=f"{planted}: belongs to nobody, who made it .*; it is not used"):
        serve.open(request)
    assert not (directory / "RAN").exists()
    assert NOBODY not in server._owners_here  # nor when the list reconnects
    del server._owners_here
    assert server._owners_here == {0, NOBODY}  # now it exists here, as the user has named it
    subprocess.run(["bash", "-c", server._host_program("serve")], env=environment, check=False, timeout=60)
    assert (directory / "RAN").exists()


@pytest.mark.parametrize("python", ["python3", ".venv/bin/python"])
def test_the_python_of_a_server_may_be_a_program_on_the_path_or_relative(
    server: ServerHere, directory: Path, python: str
) -> None:
    """A relative path starts at the home directory, or at a working directory."""
    (directory / f".cache/muster/jobs-{server._archive_name}/complete").mkdir(parents=True)
    (directory / ".venv/bin").mkdir(parents=True)
    (directory / ".venv/bin/python").symlink_to(sys.executable)
    server.settings = server.settings.model_copy(update={"python": python})
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory)}
    command = ["bash", "-c", server._host_program("serve")]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60)
    assert "module.py" in done.stderr and "No such file" in done.stderr  # Python has started


@as_root
def test_a_cache_below_a_directory_of_another_user_is_not_used_on_a_server(server: ServerHere, directory: Path) -> None:
    base = directory / "theirs"
    cache = base / f"mine/muster/jobs-{server._archive_name}"
    (cache / "complete").mkdir(parents=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory), "XDG_CACHE_HOME": str(base / "mine")}

    def run(line: str) -> subprocess.CompletedProcess[bytes]:
        command = ["bash", "-c", line]
        return subprocess.run(command, env=environment, input=server._archive, capture_output=True, timeout=60)

    assert (
        b"No such file" in run(server._host_program("serve")).stderr
    )  # it starts Python with the file that is missing
    os.chown(base, NOBODY, NOBODY)
    done = run(server._host_program("serve"))
    assert (done.returncode, done.stderr.startswith(f"{base}: other users own it".encode())) == (69, True)
    shutil.rmtree(cache)
    done = run(server._upload_line())
    assert (done.returncode, f"{base}: other users own it".encode() in done.stderr) == (5, True)
    assert not cache.exists()
    os.chown(base, 0, 0)
    assert run(server._upload_line()).returncode == 0 and (cache / "complete").exists()


@as_root
def test_a_copy_of_muster_in_a_directory_that_another_user_has_made_is_not_used_on_a_server(
    server: ServerHere, directory: Path
) -> None:
    """~/.cache leads to a directory in which all users can create files."""
    (directory / "scratch").mkdir()
    (directory / "scratch").chmod(0o1777)
    (directory / ".cache").symlink_to("scratch")
    copy = directory / f"scratch/muster/jobs-{server._archive_name}"
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory)}

    def run(line: str) -> subprocess.CompletedProcess[bytes]:
        command = ["bash", "-c", line]
        return subprocess.run(command, env=environment, input=server._archive, capture_output=True, timeout=60)

    assert run(server._upload_line()).returncode == 0 and (copy / "complete").exists()
    assert b"belongs to" not in run(server._host_program("serve")).stderr
    os.chown(copy.parent, NOBODY, NOBODY)
    for line, code in ((server._upload_line(), 5), (server._host_program("serve"), 69)):
        done = run(line)
        assert (done.returncode, b"belongs to" in done.stderr) == (code, True), done.stderr


def replace_by_own_link(path: Path) -> None:
    """As another user who can write to the directory of a link."""
    path.rename(target := path.with_name("target"))
    path.symlink_to(target)
    os.lchown(path, NOBODY, NOBODY)


def replace_by_fifo(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def replace_by_link(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize("replace", [replace_by_fifo, replace_by_link])
def test_files_that_a_job_replaces_are_neither_awaited_nor_followed(
    replace: Callable[[Path], None], directory: Path
) -> None:
    private = Path(checks.list_directory(str(directory), "abc"))
    attempt = host_attempt.HostAttempt(str(private / "job.1"), "gpu1", str(directory / "experiments/a"), 0)
    os.close(attempt.create("job", "job.py"))
    Path(attempt.files.exit).write_text("1")
    names = [attempt.files.log, attempt.files.pids, attempt.files.usage, attempt.files.record]
    for path in [*map(Path, names), directory / "experiments/a/metrics.jsonl", directory / "experiments/a/.muster_job"]:
        replace(path)
    end = attempt.end()
    assert (end["code"], end["metrics"], end["lines"], end["message"]) == (1, {}, [], "")
    replace(Path(attempt.files.exit))
    assert attempt.end()["code"] is None
    with pytest.raises(outputs.JobRefused, match=r"\.muster_job: .*; remove it"):
        outputs.claim_output(".", "experiments/a", "job", "job.py")
    with pytest.raises(outputs.JobRefused, match=r"\.muster_job: .*; remove it"):
        outputs.refuse_other_owner("experiments/a", "job", "job.py")
    replace(Path(attempt.lock))
    assert not attempt.locked()


@pytest.mark.parametrize("text", ["[1]", '{"title": 5}', "[" * 100_000, '{"title": "", "log": "/etc/passwd"}'])
def test_a_damaged_job_specification_is_refused(text: str, directory: Path) -> None:
    from distributed.jobs.host import specification

    (directory / "order").write_text(text)
    with pytest.raises(ValueError, match=r"order|levels"):
        specification.read_spec("order")


# ---------------------------------------------------------------- results from a server


class ServerHere(ssh_server.SshServer):
    """A server whose commands run on this machine, and whose working directory is `remote`. Its results: `job`."""

    job = Job("j", {}, Options(), "experiments/p/j")

    def __init__(self, cwd: Path, remote: Path) -> None:
        super().__init__("gpu1", config.Server(host="gpu1"), ListContext("abc", cwd, "job.py"))
        self.workdir, self.results, self.attempts = str(remote), remote / self.job.output, 0
        self.log = remote / "logs/jobs/abc"

    def _ssh_to_server(self) -> list[str]:
        return ["bash", "-c", 'eval "$2"', "--", "gpu1"]

    def end_attempt(self) -> list[str]:
        """Fetch the results of a new attempt."""
        self.attempts += 1
        attempt = Attempt("j", self.attempts, "gpu1", [], [], 0.0)
        (self.log / attempt.name).mkdir(parents=True)
        (self.log / attempt.name / "node_gpu1.log").write_text("line")
        self.results.mkdir(parents=True, exist_ok=True)
        return list(asyncio.run(self.fetch_results(attempt, self.job)))


@pytest.fixture
def server(directory: Path) -> ServerHere:
    (directory / "here").mkdir()
    (directory / "remote").mkdir()
    (directory / "outside").mkdir()
    return ServerHere(directory / "here", directory / "remote")


@pytest.fixture
def results(server: ServerHere) -> Path:
    """The directory here that gets the results."""
    return server.context.cwd / server.job.output


def make_link(path: Path, target: Path | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("inside", [False, True])
def test_a_link_of_one_attempt_is_not_followed_by_the_files_of_the_next(
    inside: bool, server: ServerHere, results: Path, directory: Path
) -> None:
    (server.results / "other").mkdir(parents=True)
    make_link(server.results / "sub", "other" if inside else directory / "outside")
    assert server.end_attempt() == ([] if inside else ["sub"])
    assert (results / "sub").is_symlink() == inside
    (server.results / "sub").unlink()
    (server.results / "sub").mkdir()
    (server.results / "sub/file").write_text("x")
    assert server.end_attempt() == []
    assert (results / "sub/file").read_text() == "x"
    assert not list((directory / "outside").iterdir()) + list((results / "other").iterdir())


def test_a_link_here_below_the_directory_of_a_job_is_replaced(
    server: ServerHere, results: Path, directory: Path
) -> None:
    make_link(results / "sub", directory / "outside")
    make_link(results / "file", directory / "outside/file")
    make_link(results / outputs.OWNER, results / "owner")
    (results / outputs.OWNER).unlink()
    (results / outputs.OWNER).touch()
    (server.results / "sub").mkdir(parents=True)
    (server.results / "sub/file").write_text("x")
    (server.results / "file").write_text("y")
    assert server.end_attempt() == []
    assert ((results / "sub/file").read_text(), (results / "file").read_text()) == ("x", "y")
    assert not list((directory / "outside").iterdir())


def test_no_repository_of_git_arrives_with_the_results_of_a_job(server: ServerHere, results: Path) -> None:
    for name in (".git/config", "out/HEAD", "out/config"):
        (server.results / name).parent.mkdir(parents=True, exist_ok=True)
        (server.results / name).write_text("x")
    assert server.end_attempt() == [".git", "out/HEAD"]
    assert not (results / ".git").exists() and [*(results / "out").iterdir()] == [results / "out/config"]


@as_root
def test_special_files_do_not_arrive_and_permissions_are_cut(server: ServerHere, results: Path) -> None:
    (server.results / "tools").mkdir(parents=True)
    os.mkfifo(server.results / "fifo")
    os.mknod(server.results / "device", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    bind(server.results / "socket")
    for name, mode in (("setuid", 0o6777), ("unreadable", 0o0), ("tools", 0o1577)):
        (server.results / name).touch()
        (server.results / name).chmod(mode)
    server.end_attempt()
    assert sorted(path.name for path in results.iterdir()) == [".muster_job", "setuid", "tools", "unreadable"]
    assert [mode_of(results / name) for name in ("setuid", "tools", "unreadable")] == [0o755, 0o755, 0o600]
    log = server.context.cwd / "logs/jobs/abc/j.1"
    assert (mode_of(log), mode_of(log / "node_gpu1.log")) == (0o700, 0o600)


@pytest.mark.parametrize("linked", ["experiments", "experiments/p", "experiments/p/j", "logs"])
def test_links_of_the_user_to_another_disk_are_followed(
    linked: str, server: ServerHere, mount: Callable[[Path, str], None], tmp_path: Path
) -> None:
    mount(tmp_path / "disk", "4m")
    (tmp_path / "disk").chmod(0o755)
    make_link(server.context.cwd / linked, tmp_path / "disk")
    (server.results / "sub").mkdir(parents=True)
    (server.results / "sub/file").write_text("x")
    make_link(server.results / "newest", "sub/file")
    assert server.end_attempt() == []
    assert (server.context.cwd / linked).is_symlink()
    assert (server.context.cwd / server.job.output / "newest").read_text() == "x"
    assert (server.context.cwd / "logs/jobs/abc/j.1/node_gpu1.log").read_text() == "line"
    assert not list(tmp_path.rglob(".muster-abc*")) + list(server.context.cwd.rglob(".muster-abc*"))


def test_unchanged_files_are_not_copied_again_and_a_file_that_is_older_there_arrives(
    server: ServerHere, results: Path
) -> None:
    server.results.mkdir(parents=True)
    for name in ("same", "changed"):
        (server.results / name).write_text("x" * 1000)
    server.end_attempt()
    before = (results / "same").stat().st_ino
    (server.results / "changed").write_text("y")
    os.utime(server.results / "changed", (10**9, 10**9))  # the clock of the next server is late
    server.end_attempt()
    assert (results / "same").stat().st_ino == before
    assert (results / "changed").read_text() == "y"


def test_a_file_whose_place_has_a_directory_is_an_error(server: ServerHere, results: Path) -> None:
    server.results.mkdir(parents=True)
    (server.results / "file").write_text("x")
    (results / "file").mkdir(parents=True)
    (results / outputs.OWNER).touch()
    with pytest.raises(IsADirectoryError):
        server.end_attempt()


def test_an_interrupted_copy_continues_with_the_files_that_are_complete(
    server: ServerHere, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.results.mkdir(parents=True)
    (server.results / "file").write_text("x")

    def cut(*arguments: object) -> list[list[str]]:
        raise OSError("interrupted")

    with monkeypatch.context() as patched:
        patched.setattr(server, "_place", cut)
        with pytest.raises(OSError, match="interrupted"):
            server.end_attempt()
    (staging,) = (server.context.cwd / "experiments").glob(".muster-*")
    assert mode_of(staging) == 0o700
    received = (staging / server.job.output / "file").stat().st_ino
    server.end_attempt()
    assert ((results / "file").stat().st_ino, staging.exists()) == (received, False)


def test_a_server_that_sends_a_link_in_place_of_a_directory_gets_nothing_moved(
    server: ServerHere, results: Path, directory: Path
) -> None:
    (directory / "outside/p/j").mkdir(parents=True)
    (directory / "outside/p/j/file").write_text("mine")
    staging = Path(server._staging())
    make_link(staging / "experiments", directory / "outside")
    with pytest.raises(OSError, match="replaced it by a link"):
        server._place(str(staging), [[server.job.output, "logs/jobs/abc/j.1"]])
    assert (directory / "outside/p/j/file").exists()
    assert not (results / "file").exists()


def test_what_a_server_sends_without_a_request_is_removed(server: ServerHere, monkeypatch: pytest.MonkeyPatch) -> None:
    received = server._receive

    async def receive(directories: Sequence[str], staging: str) -> None:
        await received(directories, staging)
        Path(staging, "more/of").mkdir(parents=True)
        Path(staging, "run.json").touch()

    monkeypatch.setattr(server, "_receive", receive)
    server.end_attempt()
    assert sorted(path.name for path in server.context.cwd.iterdir()) == ["experiments", "logs"]
    assert [path.name for path in (server.context.cwd / "experiments").iterdir()] == ["p"]


@as_root
def test_results_are_not_received_in_a_directory_of_another_user(server: ServerHere) -> None:
    planted = Path(server._staging())
    os.chown(planted, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="belongs to nobody"):
        server.end_attempt()
    planted.rmdir()
    make_link(planted, "/tmp")
    with pytest.raises(PermissionError, match="not a directory"):
        server.end_attempt()


@as_root
@pytest.mark.parametrize("planted", ["experiments", "experiments/p"])
def test_results_do_not_arrive_in_a_directory_of_this_user_to_which_another_user_leads_them(
    planted: str, shared: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He replaces the directory of the job, which is in his directory, while the results are copied."""
    (directory / "remote").mkdir()
    (mine := directory / "mine").mkdir()
    (mine / "config.json").write_text("mine")
    server = ServerHere(shared, directory / "remote")
    if planted != "experiments":
        (shared / "experiments").mkdir()
        (shared / "experiments").chmod(0o1777)
    as_nobody_made(shared / planted)
    if planted == "experiments":
        as_nobody_made(shared / "experiments/p")
    output, received = shared / server.job.output, server._receive

    def swap() -> None:
        output.rename(output.with_name("moved"))
        output.symlink_to(mine)

    async def receive(directories: Sequence[str], staging: str) -> None:
        await received(directories, staging)
        as_nobody(swap)

    monkeypatch.setattr(server, "_receive", receive)
    server.results.mkdir(parents=True)
    (server.results / "config.json").write_text("theirs")
    with pytest.raises(OSError, match=f"^{shared / planted}: belongs to nobody, "):
        server.end_attempt()
    assert (mine / "config.json").read_text() == "mine"
    output.unlink(missing_ok=True)
    output.mkdir()
    server.shared = False
    with pytest.raises(PermissionError, match="belongs to nobody"):  # nor are files of others sent as results
        asyncio.run(server.send_results([server.job]))


# ---------------------------------------------------------------- the directory of ssh's sockets


def test_the_directory_of_sockets_has_a_random_name_and_is_found_again_and_removed(directory: Path) -> None:
    made = sockets.sockets_directory(directory, "abc")
    try:
        assert (mode_of(made), sockets.sockets_directory(directory, "abc")) == (0o700, made)
        assert sockets.sockets_directory(directory, "other") != made
        (made / "gpu1.conf").touch()
        bind(made / "socket")
    finally:
        sockets.remove_sockets(directory, "abc")
        sockets.remove_sockets(directory, "other")
    assert not made.exists()
    assert not list(directory.rglob("sockets.*"))


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def test_a_sockets_directory_that_was_removed_is_created_again(directory: Path) -> None:
    sockets.sockets_directory(directory, "abc").rmdir()
    assert sockets.sockets_directory(directory, "abc").is_dir()
    sockets.remove_sockets(directory, "abc")


def link_to_home(recorded: Path, record: Path, home: Path) -> None:
    recorded.rmdir()
    recorded.symlink_to(home)


def owner_is_another_user(recorded: Path, record: Path, home: Path) -> None:
    os.chown(recorded, NOBODY, NOBODY)


def record_of_another_user(recorded: Path, record: Path, home: Path) -> None:
    record.write_text(str(home))
    os.chown(record, NOBODY, NOBODY)


def record_names_home(recorded: Path, record: Path, home: Path) -> None:
    record.write_text(str(home))


@as_root
@pytest.mark.parametrize("plant", [link_to_home, owner_is_another_user, record_of_another_user, record_names_home])
def test_clean_up_removes_nothing_from_a_planted_directory(
    plant: Callable[[Path, Path, Path], None], directory: Path
) -> None:
    home = directory / "home"
    home.mkdir(0o700)
    recorded, record = sockets.sockets_directory(directory, "abc"), sockets.sockets_record(directory, "abc")
    for place in (home, recorded):
        (place / "gpu1.conf").touch()
    if plant is link_to_home:
        (recorded / "gpu1.conf").unlink()
    try:
        plant(recorded, record, home)
        sockets.remove_sockets(directory, "abc")
        assert (home / "gpu1.conf").exists()
        assert plant is record_names_home or plant is record_of_another_user or (recorded / "gpu1.conf").exists()
        assert sockets.sockets_directory(directory, "abc") not in (home, recorded)
        sockets.remove_sockets(directory, "abc")
        assert (home / "gpu1.conf").exists()
    finally:
        recorded.unlink() if recorded.is_symlink() else shutil.rmtree(recorded)


# ---------------------------------------------------------------- messages of a server

# A server that prints its first argument, then replies to each request with the next one. {id} is that of the request.
LYING = """
import json, sys
write = lambda text: print(text, flush=True)
write(sys.argv[1])
replies = iter(sys.argv[2:])
for line in sys.stdin:
    if line.strip():
        write(next(replies).replace("{id}", str(json.loads(line)["id"])))
"""
HELLO = json.dumps({"event": "hello", "protocol": service.HELLO, "host": "h", "boot_id": "b"})
OPENED = '{"reply": {id}, "workdir": "/w", "rsync": true, "session": "", "note": "", "bases": []}'
END: dict[str, Any] = {
    "code": 1, "stop_requested": False, "started": 1.0, "ended": 2.0, "peak_memory": 1, "cause": "", "message": "",
    "lines": ["line"], "metrics": {"loss": 1e30}, "note": "",
}  # fmt: skip


class LyingServer(host_server.LocalServer):
    """A server that sends these texts."""

    def __init__(self, *texts: str) -> None:
        context = ListContext("abc", Path.cwd(), "job.py", panes=False)
        super().__init__("gpu1", config.Server(host="gpu1", gpus=0), context)
        self.command = [sys.executable, "-I", "-S", "-c", LYING, *texts]

    async def _open_channel(self, post: Callable[[Event], None]) -> Channel:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*self.command, stdin=pipe, stdout=pipe, limit=1 << 24)
        channel = Channel(process, self.name, post)
        try:
            await channel.hello()
        except BaseException:
            await channel.close()
            raise
        return channel


def talk(*texts: str, query: Sequence[str] = ()) -> tuple[str, list[Event], dict[str, Any]]:
    """Connect to a server that sends these texts, and query attempts. Returns why it failed, its events, the states."""
    events: list[Event] = []
    server = LyingServer(*texts)

    async def connect() -> tuple[str, list[Event], dict[str, Any]]:
        states: dict[str, Any] = {}
        try:
            await server.connect(events.append)
            states = await server.query(dict.fromkeys(query, "o")) if query else {}
            reason = await asyncio.wait_for(server.wait_until_lost(), 5) if not query else ""
        except (ServerUnusable, Unreachable) as error:
            reason = str(error)
        finally:
            await server.close()
        return reason, events, states

    return asyncio.run(connect())


DEEP = "[" * 100_000
STRANGE = ['{"a":1}', "[1]", "5", '"x"', DEEP, "x", '{"reply": [1]}', '{"reply": "1"}', '{"reply": {id}}',
           '{"event": 5}',
           '{"event": "task_failed", "error": "x"}', '{"event": "connected", "note": "", "attempts": {}}',
           '{"reply": {id}, "error": 5}', '{"reply": {id}, "error": "x", "kind": "base"}',
           OPENED.replace('"/w"', "5"), OPENED.replace("[]", "[5]"),
           OPENED.replace("true", '"yes"'), OPENED.replace('"note": "",', "")]  # fmt: skip


@pytest.mark.parametrize("text", STRANGE, ids=range(len(STRANGE)))
def test_an_invalid_reply_is_reported_and_ends_the_connection(text: str, directory: Path) -> None:
    assert talk(HELLO, text)[0].startswith("invalid reply (")


WRONG = [("code", "0"), ("code", 1.5), ("code", True), ("stop_requested", 1), ("started", "x"), ("started", 1e18),
         ("ended", -1), ("ended", []), ("peak_memory", "1"), ("cause", 5), ("message", {}), ("lines", "line"),
         ("lines", [5]), ("metrics", [1]), ("note", None), ("attempt", 5), ("more", 1)]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_an_invalid_fact_in_the_end_of_an_attempt_is_reported(name: str, value: Any, directory: Path) -> None:
    event = {"event": "ended", "attempt": "a.1", **END, name: value}
    reason, events, _ = talk(HELLO, f"{OPENED}\n{json.dumps(event)}")
    assert reason.startswith("invalid reply (")
    assert name in reason
    assert events == []


@pytest.mark.parametrize(
    "states",
    [
        {}, {"b.1": {"state": "absent"}}, {"a.1": {"state": "absent"}, "b.1": {"state": "absent"}}, {"a.1": 5},
        {"a.1": {"state": 5}}, {"a.1": {"state": "running", "pid": "x"}}, {"a.1": {"state": "ended"}},
    ],
)  # fmt: skip
def test_a_reply_to_a_query_that_does_not_describe_the_attempts_is_invalid(
    states: dict[str, Any], directory: Path
) -> None:
    reply = json.dumps({"reply": 2, "attempts": states})
    assert talk(HELLO, OPENED, reply, query=["a.1"])[0].startswith("invalid reply (")


def test_a_valid_reply_is_used_with_limited_texts_and_numbers_as_metrics(directory: Path) -> None:
    strange = {"loss": 1e30, "a": "NaN", "b": "x", "c": [1], "d": True, "e": 10**400, "f": float("nan")}
    end = {**END, "metrics": strange, "lines": ["x" * 999] * 30, "message": "x" * 20_000}
    reply = json.dumps({"reply": 2, "attempts": {"a.1": {"state": "ended", **end}}})
    reason, _, states = talk(HELLO, OPENED, reply, query=["a.1"])
    found = states["a.1"]
    assert (reason, found["metrics"]) == ("", {"loss": 1e30, "a": "NaN"})
    assert (len(found["lines"]), len(found["lines"][0]), len(found["message"])) == (20, 500, 10_000)


GPUS = [5, {}, {"index": {}}, {"index": 0, "memory": 1, "used": "x", "processes": 0}, {"index": 0, "lost": 5},
        {"index": 0, "memory": 1, "used": 1, "processes": 0, "instances": ["MIG-" + "A" * 101]},
        {"index": "MIG-" + "A" * 101, "memory": 1, "used": 1, "processes": 0}, {"index": "0", "lost": "x"}]  # fmt: skip


@pytest.mark.parametrize("gpu", GPUS)
def test_an_invalid_gpu_is_reported(gpu: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = LyingServer.__init__

    def with_gpu(self: LyingServer, *texts: str) -> None:
        before(self, *texts)
        self.watches_gpus = True

    monkeypatch.setattr(LyingServer, "__init__", with_gpu)
    reply = json.dumps({"reply": 2, "gpus": [gpu], "problem": ""})
    assert talk(HELLO, OPENED, reply)[0].startswith("invalid reply (")


def test_steps_are_numbers_and_metrics_are_limited() -> None:
    sent = {"step": "NaN", "steps": "NaN", "loss": "NaN", "k" * 501: 1, **{f"k{n}": n for n in range(2000)}}
    found = host_attempt.checked_facts(EVENTS["progress"], {"attempt": "a.1", "metrics": sent})["metrics"]
    assert len(found) <= 1000
    assert found.keys().isdisjoint({"step", "steps", "k" * 501})
    assert found["loss"] == "NaN"


@pytest.mark.parametrize("path", ["/a\0b", "/a\ud800b"])
def test_a_path_that_no_command_can_have_is_an_error(path: str) -> None:
    with pytest.raises(OSError, match="true: "):
        asyncio.run(programs.run_program(["true", path]))


def test_a_long_line_is_read_in_linear_time_and_an_endless_one_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = time.process_time()
    assert talk(HELLO, f"{OPENED}\n".replace("{id}", "1") + '"' + "x" * 100)[0] != ""
    monkeypatch.setattr("distributed.jobs.servers.channel.MAX_TEXT", 1 << 20)
    endless = LYING.replace("write(sys.argv[1])", "write(sys.argv[1])\nsys.stdout.write('x' * (20 << 20))")
    monkeypatch.setattr(sys.modules[__name__], "LYING", endless)
    assert talk(HELLO, OPENED)[0] == "invalid reply (more than 1 MiB without a line break)"
    assert time.process_time() - start < 10


@pytest.mark.parametrize("line", ["'x' * 100 + chr(10)", "'x' * 100_000_000"])
def test_a_server_that_prints_without_end_before_its_first_message_is_unusable(
    line: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flood = f"import sys\nwhile True: sys.stdout.write({line})"
    monkeypatch.setattr(sys.modules[__name__], "LYING", flood)
    assert talk()[0] == "prints more than 1 MiB before Muster starts; correct its login shell"


def test_a_server_that_sends_heartbeats_but_no_reply_is_treated_as_lost(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = LYING.replace("next(replies)", 'next(replies, \'{"event": "heartbeat"}\')')
    monkeypatch.setattr(sys.modules[__name__], "LYING", silent)
    monkeypatch.setattr("distributed.jobs.servers.channel.REPLY_TIMEOUT", 1.0)
    assert talk(HELLO, OPENED, query=["a.1"])[0] == "no reply to query within 1 s"


@pytest.mark.parametrize("hello", [HELLO.replace('"h"', "[]"), HELLO.replace('"b"', "5")])
def test_an_invalid_first_message_is_reported(hello: str, directory: Path) -> None:
    assert talk(hello)[0].startswith("invalid reply (")


def test_a_job_cannot_end_the_connection_by_what_it_writes_to_its_files(directory: Path) -> None:
    private = checks.list_directory(str(directory), "abc")
    attempt = host_attempt.HostAttempt(f"{private}/job.1", "gpu1", str(directory / "experiments/a"), 0)
    os.close(attempt.create("job", "job.py"))
    Path(attempt.files.record).parent.mkdir(exist_ok=True)
    for name, facts in {
        "usage": {"started": "x", "ended": 1e300, "peak_memory": [1]}, "record": {"cause": 5, "message": {}},
        "pids": {"boot_id": 5, "command": {"pid": "x", "start_time": {}, "more": 1}},
    }.items():  # fmt: skip
        Path(getattr(attempt.files, name)).write_text(json.dumps(facts))
    Path(attempt.files.exit).write_text("9" * 1000)
    Path("experiments/a/metrics.jsonl").write_text('{"loss": 1e30, "x": [1], "step": 1e99}\n[1]\n' + DEEP)
    host_attempt.checked_facts(host_attempt.END, attempt.end())
    host_attempt.checked_facts(host_attempt.PROCESS, attempt.facts())


# ---------------------------------------------------------------- terminal and page

ESCAPES = "\x1b]0;title\x07\x1b[2Jcause\r\n12:00:00  done: forged"


def test_texts_of_jobs_are_printed_without_control_characters(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_journal(directory / "results.journal")
    job = job_of({"n": 1}, Options()).id
    with Journal.open(directory / "results.journal") as book:
        book.add("start", attempt=f"{job}.1", server="gpu1", slots=[0], gpus=[])
        book.add("ended", attempt=f"{job}.1", failure="exit code", reason=ESCAPES, lines=[ESCAPES], code=1)
        book.add("settle", job=job, state="failed", reason=ESCAPES)
        book.add("pause", reason=ESCAPES)
        book.commit()
    for arguments in (["status"], ["why", job]):
        commands.main(arguments)
    printed = capsys.readouterr().out
    assert "cause" in printed
    assert not [letter for letter in printed if not letter.isprintable() and letter != "\n"]
    assert not [line for line in printed.splitlines() if line.startswith("12:00:00")]


def test_the_log_of_a_dispatcher_has_one_line_for_each_message(capfd: pytest.CaptureFixture[str]) -> None:
    screen = console.ListConsole(ListState(), {})
    screen.log(ESCAPES)
    screen.write_line(ESCAPES)
    screen.flush()
    lines = capfd.readouterr().out.splitlines()
    assert [line.partition("cause")[2] for line in lines] == ["  12:00:00  done: forged"] * 2


@pytest.mark.parametrize(
    ("key", "value"),
    [("jobs", [5]), ("state", "<script>"), ("totals", {"jobs": "x"}), ("created", []), ("servers", {"a": 5}),
     ("jobs", json.loads(DEEP[:500] + "]" * 500))],
)  # fmt: skip
def test_a_page_is_not_written_from_invalid_results(key: str, value: Any, directory: Path) -> None:
    totals = dict.fromkeys(("jobs", "done", "failed", "cancelled", "waiting", "running", "attempts"), 0)
    facts = {
        "list": "abc", "created": 1.0, "updated": 2.0, "state": "finished", "reason": "", "script": "job.py",
        "backend": "ssh", "totals": totals | {"seconds": 1.0, "slot_seconds": 1.0}, "servers": {}, "jobs": [],
    }  # fmt: skip
    (directory / "results.json").write_text(json.dumps(facts))
    page.write(directory / "results.json")
    (directory / "results.json").write_text(json.dumps({**facts, key: value}))
    with pytest.raises(ValueError, match=r"not the results of a job list|levels"):
        page.write(directory / "results.json")


@pytest.mark.parametrize("replace", [replace_by_fifo, replace_by_link])
def test_following_a_log_that_a_job_has_replaced_ends_with_an_error(
    replace: Callable[[Path], None], directory: Path
) -> None:
    replace(directory / "node_gpu1.log")
    command = panes.host_command("follow", str(directory / "node_gpu1.log"), "/")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"{directory}/node_gpu1.log: ")
    assert done.stderr.count("\n") == 1


def test_the_printed_command_contains_no_session_name_that_a_server_has_invented(directory: Path) -> None:
    server = LyingServer(HELLO, OPENED.replace('"session": ""', '"session": "x; rm -rf ~"'))

    async def connect() -> str:
        try:
            return await server.connect(lambda _: None)
        finally:
            await server.close()

    assert asyncio.run(connect()) == ""
