"""The agent hides modules of PyTorch from the import system of Python.

So its tests and those of checkpoints run with the oldest and a newer PyTorch, and with other versions of Python than
the usual tests. Each pair has a separate environment of several gigabytes, which is removed at the end.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

KIT = Path(__file__).resolve().parents[2]
OLDEST = "2.10.0"
NEWER = "2.15.0"  # for Python 3.11 or newer
PAIRS = [(OLDEST, "3.10"), (OLDEST, "3.13"), (NEWER, "3.12"), (NEWER, "3.13")]
AGENT = ("tests/agent/test_agent.py", "tests/agent/test_preloaded.py")
TEST = "test_the_agent_works_with_this_pytorch_and_python"
TESTS = (*AGENT, "tests/checkpoint", "tests/test_compiler_cache.py", "tests/training/test_train.py")


def interpreter(version: str) -> Path | None:
    """Return a Python of this version that can make environments, from PATH or pyenv; None if there is none."""
    found = shutil.which(f"python{version}")
    for path in (*([Path(found)] if found else []), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")):
        # A shim of pyenv exists although its version may not be selected.
        if subprocess.run([path, "-m", "ensurepip", "--version"], capture_output=True, check=False).returncode == 0:
            return path
    return None


@pytest.fixture
def environment(torch: str, python: str) -> Iterator[Path]:
    """The Python of an environment with this version of PyTorch."""
    base = interpreter(python)
    if not base:
        pytest.skip(f"no Python {python} with ensurepip, on PATH or in ~/.pyenv/versions")
    directory = Path(sys.prefix, "torch-versions")
    install = (str(directory / "bin/python"), "-m", "pip", "install", "--quiet", "--no-cache-dir")
    shutil.rmtree(directory, ignore_errors=True)  # of an interrupted test
    try:
        subprocess.run([base, "-m", "venv", directory], check=True)
        subprocess.run([*install, "--require-hashes", f"--requirement={KIT}/requirements-test.lock"], check=True)
        subprocess.run([*install, f"torch=={torch}"], check=True)
        yield directory / "bin/python"
    finally:
        shutil.rmtree(directory)


def test_the_oldest_version_is_the_one_in_the_readme() -> None:
    assert f"**PyTorch {OLDEST.removesuffix('.0')} or newer.**" in (KIT / "README.md").read_text()


def test_continuous_integration_has_a_job_for_each_pair() -> None:
    jobs = yaml.safe_load((KIT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert jobs["versions"]["strategy"]["matrix"]["pair"] == ["-".join(pair) for pair in PAIRS]
    assert jobs["versions"]["env"]["TEST"].split("::") == [f"tests/agent/{Path(__file__).name}", TEST]


@pytest.mark.soak
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(("torch", "python"), PAIRS)
def test_the_agent_works_with_this_pytorch_and_python(environment: Path) -> None:
    command = [str(environment), "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, cwd=KIT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-10_000:]
