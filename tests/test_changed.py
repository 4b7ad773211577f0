"""tests/run.sh --changed selects the tests that depend on a changed file, directly or indirectly."""

from __future__ import annotations

import subprocess
from pathlib import Path

import changed
import pytest

REPOSITORY = {
    "distributed/__init__.py": "",
    "distributed/nodes.py": "",
    "distributed/runs/__init__.py": "",
    "distributed/runs/verdict.py": "from distributed import nodes\n",
    "distributed/jobs/__init__.py": "",
    "distributed/jobs/page.py": '"""See distributed.runs.verdict."""\nREMEDY = "see scripts/status.sh --help"\n',
    "scripts/launch.sh": 'source "$(dirname "$0")/lib/common.bash"\nrun "$KIT/train.py" # not lib/pdsh.bash\n',
    "scripts/lib/common.bash": '"$PYTHON" "$KIT/scripts/lib/module.py" runs.verdict -F "$KIT/scripts/lib/ssh_config"\n',
    "scripts/lib/module.py": "import sys\n",
    "scripts/lib/pdsh.bash": "",
    "scripts/lib/ssh_config": "",
    "scripts/muster": "",
    "scripts/status.sh": "echo 'see GUIDE.md'\n",
    "train.py": "import distributed.jobs.page\n",
    "GUIDE.md": "scripts/status.sh\n",
    "tests/lab/nodes.bash": "",
    "tests/forked.py": "",
    "tests/launch.bats": "load lab/nodes.bash\nscripts/launch.sh\nscripts/muster\n",
    "tests/jobs/test_page.py": "def test_page():\n    import distributed.jobs.page\n",
    "tests/test_status.py": 'import forked\nKIT / "scripts/status.sh"\n',
    "tests/test_train.py": 'from test_status import KIT\nKIT / "train.py"\n',
    "tests/test_runner.py": 'RUNS = "tests/test_status.py"\n',
    "tests/test_docs.py": "",
    "tests/test_house.py": "",
}


@pytest.mark.parametrize(
    ("file", "tests"),
    {
        "distributed/nodes.py": ["launch.bats"],  # common.bash runs a module that imports it
        "distributed/runs/__init__.py": ["launch.bats"],
        "distributed/jobs/page.py": ["jobs/test_page.py", "test_train.py"],  # train.py is no dependency of launch.sh
        "scripts/lib/common.bash": ["launch.bats"],
        "scripts/lib/ssh_config": ["launch.bats"],
        "scripts/lib/pdsh.bash": [],  # only a comment names it
        "scripts/muster": ["launch.bats"],
        "scripts/status.sh": ["test_status.py", "test_train.py"],
        "train.py": ["test_train.py"],
        "GUIDE.md": [],  # only a message names it
        "tests/lab/nodes.bash": ["launch.bats"],
        "tests/forked.py": ["test_status.py", "test_train.py"],
        "tests/launch.bats": ["launch.bats"],
        "tests/test_status.py": ["test_status.py", "test_train.py"],  # test_runner.py only names it
        "scripts/lib/removed.bash": [],
    }.items(),
)
def test_tests_that_name_a_changed_file_directly_or_indirectly_are_selected(
    file: str, tests: list[str], tmp_path: Path
) -> None:
    for name, text in REPOSITORY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = changed.affected([file], list(REPOSITORY), tmp_path)
    assert found == {f"tests/{name}": [file] for name in sorted([*tests, "test_docs.py", "test_house.py"])}


def test_every_file_of_the_product_is_a_dependency_of_a_test() -> None:
    files = [file for file in changed.git("ls-files") if (changed.KIT / file).is_file()]
    product = {file for file in files if file.startswith(("distributed/", "scripts/")) or file == "train.py"}
    found = changed.affected(product, files, changed.KIT)
    tested = {cause for test, causes in found.items() if test not in changed.USE_ALL_FILES for cause in causes}
    assert tested == product


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a branch main, and its first commit on origin/main."""
    monkeypatch.setattr(changed, "KIT", tmp_path)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    commit(tmp_path, "tests/test_a.py")
    git(tmp_path, "update-ref", "refs/remotes/origin/main", "main")
    return tmp_path


def git(repository: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=me", "-c", "user.email=me@here", *arguments], cwd=repository, check=True)


def commit(repository: Path, name: str) -> None:
    (repository / name).parent.mkdir(exist_ok=True)
    (repository / name).write_text("a = 1\n")
    git(repository, "add", name)
    git(repository, "commit", "--quiet", "--message", name)


def selected(capfd: pytest.CaptureFixture[str]) -> list[str]:
    assert changed.main() == 0
    return capfd.readouterr().out.splitlines()


def test_a_file_counts_as_changed_if_it_differs_from_main_or_is_not_committed(
    repository: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert selected(capfd) == []
    commit(repository, "tests/b.bats")
    assert selected(capfd) == ["tests/b.bats: tests/b.bats"]  # on main: ahead of origin/main
    git(repository, "switch", "--quiet", "--create", "mine")
    commit(repository, "tests/c.bats")
    git(repository, "rm", "--quiet", "tests/test_a.py")
    (repository / "tests/test_d.py").write_text("")
    assert selected(capfd) == ["tests/c.bats: tests/c.bats", "tests/test_d.py: tests/test_d.py"]


@pytest.mark.parametrize(
    "file", ["requirements-test.txt", "requirements.lock", "pyproject.toml", "tests/conftest.py", "tests/lab/lab.sh"]
)
def test_a_changed_file_that_all_tests_use_selects_everything(
    file: str, repository: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (repository / "tests/lab").mkdir()
    (repository / file).write_text("")
    assert selected(capfd) == [f"everything: {file}"]


def test_outside_a_git_work_tree_the_exit_code_is_69(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(changed, "KIT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert changed.main() == 69
    assert "not a git work tree" in capfd.readouterr().err
