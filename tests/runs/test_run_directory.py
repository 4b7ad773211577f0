"""Creating a run directory, at the start of every launch.

Two launches never share a directory, run.json has the exact command, logs/latest is replaced atomically and never
replaces a file of the user, and a directory that cannot be created leaves nothing behind.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from distributed import attempts
from distributed.files import version
from distributed.host.identity import versions
from distributed.runs import run_directory
from distributed.runs.lookup import RunNode

KIT = Path(__file__).resolve().parents[2]
ODD_ARGUMENTS = ["a b", "it's", 'say "x"', "two\nlines", "$HOME `id`", "grün 火", "", "--", "-n", "*", "\\"]


def facts(**changes: Any) -> dict[str, Any]:
    """Default arguments of create()."""
    return {
        "name": "train",
        "nodes": [RunNode("n1", "", 2, 0)],
        "script": "train.py",
        "config": None,
        "cwd": "/",
        "python": sys.executable,
        "command": ["train.py"],
    } | changes


def create(logs: Path, **changes: Any) -> Path:
    return Path(run_directory.create(str(logs), **facts(**changes)))


def run_json(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "run.json").read_text(encoding="utf-8"))
    return found


# ---------------------------------------------------------------- the directory and run.json


def test_the_directory_has_the_exact_command(tmp_path: Path) -> None:
    directory = create(tmp_path / "my logs", command=ODD_ARGUMENTS)
    assert directory.is_absolute() and directory.parent == tmp_path / "my logs"
    assert re.fullmatch(r"train-\d{8}-\d{6}-[0-9a-f]{4}", directory.name)
    links = {path.name: os.readlink(path) for path in directory.iterdir() if path.is_symlink()}
    names = ("errors", "ranks", "verdict.json", "node_n1.log", "node_n1.exit")
    assert links == {"newest": "attempts/1", **{name: f"newest/{name}" for name in names}}
    assert sorted({*os.listdir(directory)} - links.keys()) == ["attempts", "run.json"]
    assert sorted(os.listdir(directory / "attempts/1")) == ["errors", "ranks", "run.json"]
    assert run_json(directory)["command"] == ODD_ARGUMENTS


def test_run_json_describes_the_launch(tmp_path: Path) -> None:
    nodes = [RunNode("n2", "", 1, 0), RunNode("n1", "ada@n1", 1, 1)]
    directory = create(tmp_path, nodes=nodes, config="a.yaml", cwd="/")
    found = run_json(directory)
    assert found["run"] == directory.name
    assert (found["nodes"], found["nproc"]) == (["n2", "n1"], 2)
    assert (found["config"], found["script"]) == ("a.yaml", "train.py")
    assert found["git"] is None and found["cwd"] == "/"
    started = datetime.datetime.fromisoformat(found["started"])
    assert abs(started - datetime.datetime.now(datetime.timezone.utc)) < datetime.timedelta(hours=1)


def test_an_argument_that_is_not_utf8_is_kept(tmp_path: Path) -> None:
    argument = os.fsdecode(b"caf\xe9")
    assert run_json(create(tmp_path, command=[argument]))["command"] == [argument]


def test_run_json_is_indented_and_sorted(tmp_path: Path) -> None:
    text = (create(tmp_path, command=["grün"]) / "run.json").read_text(encoding="utf-8")
    assert "grün" in text
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


@pytest.mark.parametrize(
    ("name", "becomes"),
    [
        ("my train", "my-train"),
        ("a/b", "a-b"),
        ("..", "run"),
        ("-n", "n"),
        ("", "run"),
        ("x\ny", "x-y"),
        ("grün", "grün"),
    ],
)
def test_the_name_of_a_run_needs_no_quotes(tmp_path: Path, name: str, becomes: str) -> None:
    assert re.fullmatch(rf"{becomes}-\d+-\d+-[0-9a-f]+", create(tmp_path, name=name).name)


def test_a_long_name_is_cut(tmp_path: Path) -> None:
    assert create(tmp_path, name="火" * 300).is_dir()


def test_an_existing_directory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter([b"\0\1", b"\0\1", b"\0\2"])
    monkeypatch.setattr(time, "strftime", lambda *_: "20250102-030405")
    monkeypatch.setattr(os, "urandom", lambda size: next(draws) if size == 2 else bytes(size))
    assert [create(tmp_path).name[-4:], create(tmp_path).name[-4:]] == ["0001", "0002"]


def test_concurrent_launches_get_different_directories(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        directories = list(pool.map(lambda _: create(tmp_path), range(64)))
    assert len(set(directories)) == 64 and all(map(run_json, directories))


# ---------------------------------------------------------------- links


def test_links_point_to_the_newest_run(tmp_path: Path) -> None:
    for _ in range(2):
        directory = create(tmp_path)
        assert run_directory.link_to(str(directory), ["n1", "n2"]) == []
        (directory / "node_n2.log").write_text(directory.name)
        assert os.readlink(tmp_path / "latest") == directory.name
        assert (tmp_path / "node_n2.log").read_text() == directory.name
    unexpected = [name for name in os.listdir(tmp_path) if not name.startswith(("train-", "latest", "node_n"))]
    assert unexpected == []


@pytest.mark.parametrize("name", ["latest", "node_n1.log"])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_file_or_directory_is_not_replaced_by_a_link(tmp_path: Path, name: str, kind: str) -> None:
    if kind == "file":
        (tmp_path / name).write_text("mine")
    else:
        (tmp_path / name / "mine").mkdir(parents=True)
    (message,) = run_directory.link_to(str(create(tmp_path)), ["n1", "n2"])
    assert message.startswith(f"{tmp_path / name}: not a symbolic link")
    assert (tmp_path / name).read_text() == "mine" if kind == "file" else (tmp_path / name / "mine").is_dir()
    others = {"latest", "node_n1.log", "node_n2.log"} - {name}
    assert all((tmp_path / other).is_symlink() for other in others)


# ---------------------------------------------------------------- errors


def test_a_full_disk_leaves_no_incomplete_directory(tmp_path: Path) -> None:
    program = (
        "from distributed.runs import run_directory; from distributed.runs.lookup import RunNode;"
        f"run_directory.create({str(tmp_path / 'logs')!r}, **{facts()!r})"
    )
    # A file size limit of 0 makes writing run.json fail, like a full disk.
    call = ["bash", "-c", 'ulimit -f 0 && exec "$@"', "bash", sys.executable, "-c", program]
    done = subprocess.run(call, cwd=KIT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "File too large" in done.stderr
    assert os.listdir(tmp_path / "logs") == []


def test_an_attempt_begins_although_a_full_disk_takes_no_data(tmp_path: Path) -> None:
    directory = run_directory.create(str(tmp_path / "logs"), **facts())
    program = f"from distributed.runs import run_directory; print(run_directory.begin_attempt({str(directory)!r}))"
    call = ["bash", "-c", 'ulimit -f 0 && exec "$@" | cat', "bash", sys.executable, "-c", program]
    done = subprocess.run(call, cwd=KIT, capture_output=True, text=True, check=False)
    assert done.stdout == f"{directory}/attempts/2\n", done.stderr
    before = Path(directory, "attempts/2/run.json").read_text()
    assert before == Path(directory, "run.json").read_text()


# ---------------------------------------------------------------- versions


def site(directory: Path, *names: str) -> str:
    for name in names:
        (directory / name).mkdir(parents=True)
    return str(directory)


def test_the_version_of_torch_is_read_without_importing_it(tmp_path: Path) -> None:
    plain = site(tmp_path / "a", "torch", "torchvision-0.1.dist-info", "pytorch_lightning-2.0.dist-info")
    torch = site(tmp_path / "b", "torch-2.13.0+cu130.dist-info")
    older = site(tmp_path / "c", "torch-2.10.0.dist-info")
    path = [str(tmp_path / "missing.zip"), plain, torch, older]
    assert versions(path) == {"python": sys.version.split()[0], "torch": "2.13.0+cu130", "nccl": None}
    assert versions([plain])["torch"] is None
    copied = site(tmp_path / "d", "torch", "nvidia_nccl_cu12-2.21.5.dist-info", "nvidia_nccl_cu13-2.28.9.dist-info")
    Path(copied, "torch", "version.py").write_text(
        "__all__ = ['__version__']\n__version__ = '2.12.0+cu130'\ncuda = '13.0'\n"
    )
    found = versions([copied, torch])
    assert (found["torch"], found["nccl"]) == ("2.12.0+cu130", "2.28.9"), (
        "the one that Python imports, without metadata"
    )


def test_the_versions_are_read_from_the_ranks_interpreter(tmp_path: Path) -> None:
    """A virtual environment without torch, linked to the interpreter of this test."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    found = run_json(create(tmp_path, python=str(tmp_path / "env" / "bin" / "python")))
    assert found["versions"] == {"muster": version(), "python": sys.version.split()[0], "torch": None, "nccl": None}


def test_a_missing_python_has_no_versions(tmp_path: Path) -> None:
    found = run_json(create(tmp_path, python=str(tmp_path / "python")))
    assert found["versions"] == {"muster": version(), "python": None, "torch": None, "nccl": None}


def test_no_slow_module_is_imported() -> None:
    """Importing pathlib, dataclasses, importlib.metadata or PyTorch takes longer than the work itself."""
    program = "import sys; from distributed.runs import run_directory; run_directory.versions(); print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-S", "-c", program], cwd=KIT, text=True).split()
    assert not {"pathlib", "dataclasses", "typing", "importlib.metadata", "torch", "subprocess"} & set(loaded)


# ---------------------------------------------------------------- git


def git(directory: Path, *arguments: str) -> str:
    quiet = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "PATH": os.environ["PATH"]}
    author = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    return subprocess.check_output(["git", "-C", directory, *author, *arguments], env=quiet, text=True).strip()


def test_the_commit_of_the_working_directory_and_whether_it_has_changes_are_recorded(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "deep").mkdir(parents=True)
    git(work, "init", "-q")
    assert run_json(create(tmp_path, cwd=str(work)))["git"] is None, "no commit yet"
    (work / "a").write_text("1")
    git(work, "add", "a")
    git(work, "commit", "-q", "-m", "one")
    commit = git(work, "rev-parse", "HEAD")
    (work / "logs").mkdir()
    (work / "untracked").write_text("")
    assert run_json(create(tmp_path, cwd=str(work / "deep")))["git"] == {"commit": commit, "dirty": False}
    (work / "a").write_text("2")
    assert run_json(create(tmp_path, cwd=str(work)))["git"] == {"commit": commit, "dirty": True}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("kind", ["own", "linked worktree", "submodule"])
def test_git_runs_no_filter_that_another_user_could_configure(tmp_path: Path, kind: str) -> None:
    work, proof = tmp_path / "work", tmp_path / "proof"
    for path in (work, tmp_path / "sub"):
        path.mkdir()
        git(path, "init", "-q")
        (path / "a").write_text("1")
        git(path, "add", "a")
        git(path, "commit", "-q", "-m", "one")
    repository = work / ".git"
    if kind == "linked worktree":
        git(work, "worktree", "add", "-q", str(tmp_path / "linked"))
        work = tmp_path / "linked"
    elif kind == "submodule":
        git(work, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(tmp_path / "sub"), "sub")
        git(work, "commit", "-q", "-m", "sub")
        repository /= "modules/sub"

    def recorded() -> object:
        proof.unlink(missing_ok=True)
        for file in (work / "a", work / "sub" / "a"):
            if file.exists():
                os.utime(file, (1, 1))  # git must compare the content, and therefore runs filters
        return run_json(create(tmp_path, cwd=str(work)))["git"]

    clean = {"commit": git(work, "rev-parse", "HEAD"), "dirty": False}
    git(tmp_path, "config", "--file", str(repository / "config"), "filter.x.clean", f"touch {proof}; cat")
    (repository / "info/attributes").write_text("* filter=x\n")
    if kind == "submodule":  # git status would run it with the submodule's configuration
        assert recorded() == clean and not proof.exists()
        return
    assert recorded() == clean and proof.exists(), "the user's own filter"
    for path in (repository, repository / "config", repository / "info", repository / "info/attributes"):
        mode = path.stat().st_mode
        os.chown(path, 0, 12345)
        path.chmod(mode | 0o020)
        assert recorded() is None and not proof.exists(), path
        work.chmod(0o775)
        os.chown(work, 0, 12345)  # who can replace .git anyway
        if kind == "own":
            assert recorded() == clean, path
        os.chown(work, 0, 0)
        path.chmod(mode)
        os.chown(path, 12345, 0)
        assert recorded() is None and not proof.exists(), path
        os.chown(path, 0, 0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_git_enters_no_repository_of_another_user_above_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "safe.directory")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "*")
    shared, mine, proof = tmp_path / "shared", tmp_path / "shared/mine", tmp_path / "proof"
    mine.mkdir(parents=True)
    git(shared, "init", "-q")
    (mine / "a").write_text("1")
    git(shared, "add", "mine/a")
    git(shared, "commit", "-q", "-m", "one")
    git(shared, "config", "filter.x.clean", f"touch {proof}; cat")
    (shared / ".git/info/attributes").write_text("* filter=x\n")
    subprocess.run(["chown", "-R", "12345", str(shared / ".git")], check=True)
    shared.chmod(0o1777)
    os.utime(mine / "a", (1, 1))
    for name in ("", ".git"):  # git would not stop at a `.git` that is no repository
        (mine / name).mkdir(exist_ok=True)
        assert run_json(create(tmp_path, cwd=str(mine)))["git"] is None
        assert not proof.exists()


def test_a_slow_git_is_killed_after_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(run_directory, "GIT_TIMEOUT", 0.1)
    assert run_json(create(tmp_path, cwd=str(tmp_path)))["git"] is None


def test_git_variables_of_a_hook_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("hooked", "work"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "-q")
        git(tmp_path / name, "commit", "-q", "--allow-empty", "-m", name)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "hooked" / ".git"))
    found = run_json(create(tmp_path, cwd=str(tmp_path / "work")))["git"]
    assert found == {"commit": git(tmp_path / "work", "rev-parse", "HEAD"), "dirty": False}


# ---------------------------------------------------------------- attempts


def test_the_links_lead_to_the_newest_attempt_whichever_node_is_late(tmp_path: Path) -> None:
    made = create(tmp_path)
    (made / "errors/first").touch()
    assert run_directory.begin_attempt(str(made)) == str(made / "attempts/2") == attempts.newest(made)
    (made / "attempts" / str(attempts.LAST)).mkdir()
    with pytest.raises(OSError, match="no further attempt can be numbered"):
        run_directory.begin_attempt(str(made))
    assert attempts.make(made, "1") == str(made / "attempts/1"), "as a late supervisor of the first attempt does"
    (made / "errors/second").touch()
    assert [os.listdir(made / f"attempts/{number}/errors") for number in (1, 2)] == [["first"], ["second"]]
    assert run_json(made / "attempts/2") == run_json(made)


def test_attempts_are_ordered_by_number_and_other_names_do_not_count(tmp_path: Path) -> None:
    for name in ("2", "10", "x", "1.5", "\u0663", "9" * 30):
        (tmp_path / "attempts" / name).mkdir(parents=True)
    assert attempts.numbers(tmp_path) == [2, 10]
    assert attempts.newest(tmp_path) == str(tmp_path / "attempts/10")
    assert attempts.newest(tmp_path / "x") == str(tmp_path / "x"), "the directory of a job has no attempts/"


# ---------------------------------------------------------------- runs of earlier versions


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A failed run as version 0.1.0 made it: the first attempt in attempt_1/, the newest in the run directory."""
    made = create(tmp_path / "logs", nodes=[RunNode("n1", "", 1, 0)])
    for path in made.iterdir():
        if path.is_symlink():
            path.unlink()
    attempt = (made / "attempts/1").rename(made / "attempt_1")
    (made / "attempts").rmdir()
    for directory, code in ((attempt, 4), (made, 3)):
        record = {"rank": 0, "node": "n1", "pid": 1, "time": 1.0, "exit_code": code, "exception": "ValueError"}
        for name in ("errors", "ranks"):
            (directory / name).mkdir(exist_ok=True)
        (directory / "errors/rank_0.json").write_text(json.dumps(record | {"message": f"code {code}"}))
        (directory / "node_n1.exit").write_text(f"{code}\n")
        (directory / "node_n1.log").write_text(f"[n1:0] last line of {code}\n")
        sample = {"time": 1.7e9 - code, "ranks": {"0": {"cpu": 1, "memory": 1, "output": 1}}}
        (directory / "node_n1.samples.jsonl").write_text(f"{json.dumps(sample)}\n")
    facts = {name: value for name, value in run_json(made).items() if name not in ("options", "rest")}
    facts["launcher"]["pid"], facts["launcher"]["since"], facts["lease"] = 1, 1, 0
    (made / "run.json").write_text(json.dumps(facts))
    return made


def test_status_verdict_report_and_stop_read_a_run_of_version_0_1_0(earlier: Path) -> None:
    def output_of(*call: str) -> str:
        done = subprocess.run(call, cwd=earlier.parents[1], capture_output=True, text=True, timeout=60)
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    assert "ValueError: code 3" in output_of(str(KIT / "scripts/status.sh"), earlier.name)
    verdict = [sys.executable, str(KIT / "scripts/lib/module.py"), "verdict.verdict", str(earlier)]
    assert "verdict: failed: rank 0 on n1 raised ValueError: code 3" in output_of(*verdict)
    assert "failed: ValueError" in output_of(str(KIT / "scripts/ls.sh"))
    output_of(str(KIT / "scripts/report.sh"), earlier.name)
    page = (earlier / "report.html").read_text()
    assert "code 3" in page and "attempt 2" in page
    assert "no process of this run remains" in output_of(str(KIT / "scripts/stop.sh"), earlier.name)


def test_a_run_of_version_0_1_0_is_not_continued(earlier: Path) -> None:
    with pytest.raises(OSError, match="a run of an older version of Muster, which cannot be continued"):
        create(earlier.parent, existing=str(earlier))
    for verb in ("attach", "rerun"):
        program = [str(KIT / f"scripts/{verb}.sh"), str(earlier)]
        done = subprocess.run(program, capture_output=True, text=True, timeout=60)
        assert done.returncode in (1, 2) and "older version of Muster" in done.stderr, done.stderr
