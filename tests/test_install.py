"""Muster installed from its wheel and its sdist, and the package `muster`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import tracked

import muster
from distributed.files import KIT, version
from distributed.host.sync_list import names_of

RANK = """
import sys

class Dask:
    __file__ = "/dask/distributed/__init__.py"

sys.modules["distributed"] = Dask
import muster

muster.log(3, loss=1.5)
assert sys.modules["distributed"] is Dask
assert "torch" not in sys.modules
try:
    muster.checkpointer("checkpoints", None, None)
except ImportError as error:
    assert "/dask/distributed/__init__.py" in str(error), error
else:
    raise SystemExit("it must refuse Dask's package")
del sys.modules["distributed"]
import torch

with muster.checkpointer("checkpoints", model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters())) as made:
    assert made.restore() == 0
    made.save(5)
with muster.checkpointer("checkpoints", model, torch.optim.SGD(model.parameters())) as made:
    assert made.restore() == 5
print("imported from", muster.__file__)
"""


def build(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", *arguments], check=True, cwd=KIT, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The wheel that is built from the repository, and the one from its sdist."""
    made = tmp_path_factory.mktemp("wheels")
    build("hatchling", "build", "--target", "sdist", "--directory", made)
    [sdist] = made.iterdir()
    for source in (KIT, sdist):
        target = made / Path(source).name
        options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--no-cache-dir")
        build("pip", "wheel", *options, "--wheel-dir", target.with_suffix(".wheels"), source)
    return sorted(made.glob("*/*.whl"))


@pytest.fixture(scope="module")
def environment(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment in which nothing but Muster is installed. Tests undo their changes in it."""
    made = tmp_path_factory.mktemp("home") / "an environment"
    build("venv", "--without-pip", made)
    build("pip", "--python", made / "bin/python", "install", "--quiet", "--no-compile", "--no-index", wheels[0])
    return made


def kit_of(environment: Path) -> Path:
    [found] = environment.glob("lib/python*/site-packages/muster/_kit")
    return found


def call(environment: Path, project: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Call the installed `muster` in a directory."""
    env = {name: os.environ[name] for name in ("PATH", "HOME", "XDG_STATE_HOME") if name in os.environ} | variables
    command: list[str | Path] = [environment / "bin/muster", *arguments]
    return subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, check=False)


def test_the_wheels_of_the_repository_and_of_its_sdist_have_all_files_with_their_modes(wheels: list[Path]) -> None:
    found = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            found.append({one.filename: one.external_attr >> 16 & 0o111 for one in archive.infolist()})
    assert len(found) == 2
    assert found[0] == found[1]
    for path in tracked("config/*", "distributed/**/*", "scripts/**/*", "src/**/*", "train.py", "VERSION"):
        executable = 0o111 if os.access(path, os.X_OK) else 0
        assert found[0][f"muster/_kit/{path.relative_to(KIT)}"] == executable, path
    names = {name.partition("/")[0] for name in found[0]}
    assert names == {"muster", f"muster-{version()}.dist-info"}, "only `muster` may be importable"


def test_the_installed_command_is_muster(environment: Path, tmp_path: Path) -> None:
    assert call(environment, tmp_path, "--version").stdout == f"Muster {version()}\n"
    assert "muster run" in call(environment, tmp_path, "help", "run").stdout
    command: list[str | Path] = [environment / "bin/python", "-I", "-c", "import muster, distributed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.endswith("No module named 'distributed'\n")


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["fast", "torchrun"])
def test_ranks_of_an_installed_muster_import_muster_and_write_only_into_the_project(
    environment: Path, tmp_path: Path, agent: str
) -> None:
    kit = kit_of(environment)
    before = {path for path in kit.parent.rglob("*") if "__pycache__" not in path.parts}
    script = tmp_path / "my_train.py"
    script.write_text(RANK)
    done = call(environment, tmp_path, "run", "--python", sys.executable, "--agent", agent, "-n", "1", "my_train.py")
    assert done.returncode == 0, done.stderr
    assert f"imported from {kit}/src/muster/__init__.py" in done.stdout + done.stderr
    [line] = (script.parent / "logs/latest/metrics.jsonl").read_text().splitlines()
    assert (json.loads(line)["step"], json.loads(line)["loss"]) == (3, 1.5)
    assert {path.name for path in script.parent.iterdir()} == {"logs", "checkpoints", "my_train.py"}
    assert {path for path in kit.parent.rglob("*") if "__pycache__" not in path.parts} == before


@pytest.mark.parametrize("path", ["_kit/scripts/lib/module.py", "_kit/distributed", "__init__.py", "__pycache__", "."])
def test_an_installed_muster_that_others_can_write_is_refused(environment: Path, tmp_path: Path, path: str) -> None:
    changed = kit_of(environment).parent / path
    mode = changed.stat().st_mode
    changed.chmod(mode | 0o002)
    done = call(environment, tmp_path, "run", "--dry-run", "x.py")
    changed.chmod(mode)
    assert (done.returncode, "other users can write it" in done.stderr) == (69, True), done.stderr


def test_the_python_of_ranks_is_that_of_the_environment_of_muster_only_if_it_has_pytorch(
    environment: Path, tmp_path: Path
) -> None:
    (tmp_path / "x.py").touch()
    python = str(environment / "bin/python").replace(" ", "\\ ")
    assert python not in call(environment, tmp_path, "run", "--dry-run", "x.py").stdout
    (torch := kit_of(environment).parents[1] / "torch").mkdir()
    assert python in call(environment, tmp_path, "run", "--dry-run", "x.py").stdout
    other = Path(sys.executable).parents[1]
    assert python not in call(environment, tmp_path, "run", "--dry-run", "x.py", VIRTUAL_ENV=str(other)).stdout
    torch.rmdir()


def test_the_quickstart_of_an_installed_muster_installs_nothing(environment: Path) -> None:
    program = kit_of(environment) / "scripts/quickstart.sh"
    done = subprocess.run([program, "--dry-run"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "only in a clone of Muster's repository" in done.stderr


def test_sync_copies_an_installed_muster_that_git_ignores(environment: Path) -> None:
    subprocess.run(["git", "init", "--quiet", environment.parent], check=True)
    (environment.parent / ".gitignore").write_text("*\n")
    found = names_of(str(kit_of(environment)))
    assert {b"VERSION", b"distributed", b"scripts", b"src"} <= found.keys()


@pytest.mark.slow
def test_ranks_of_a_clone_import_muster(tmp_path: Path) -> None:
    (tmp_path / "my_train.py").write_text(RANK)
    command = [f"{KIT}/scripts/run.sh", "--python", sys.executable, "-n", "1", "my_train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"imported from {KIT}/src/muster/__init__.py" in done.stdout + done.stderr


def test_a_value_that_is_no_number_is_refused_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUSTER_METRICS", raising=False)
    muster.log(1, loss=1.0)
    with pytest.raises(ValueError, match="loss: expected a number"):
        muster.log(1, loss="low")
