"""The agent replaces functions and classes of torchrun, so its tests run with the oldest supported and a newer PyTorch.

Each version has a separate environment, in which the agent's tests must pass.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

KIT = Path(__file__).resolve().parents[2]
OLDEST = "2.10.0"
NEWER = "2.15.0"
TESTS = ("tests/agent/test_agent.py", "tests/agent/test_preloaded.py")


def requirements(version: str) -> list[str]:
    """Packages for the agent and its tests, with this version of PyTorch."""
    lines = [line for name in ("", "-test") for line in (KIT / f"requirements{name}.txt").read_text().splitlines()]
    needed = [
        line for line in lines if re.match("(numpy|psutil|PyYAML|pydantic|pytest|pytest-timeout|hypothesis)[><=]", line)
    ]
    return [f"torch=={version}", *needed]


def environment(version: str) -> Path:
    """Return the Python of an environment with this PyTorch, which is installed once: it has some gigabytes."""
    directory = Path(sys.prefix, f"torch-{version}")
    python, stamp = directory / "bin/python", directory / "installed"
    expected = "\n".join(requirements(version))
    if not stamp.exists() or stamp.read_text() != expected:
        shutil.rmtree(directory, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements(version)], check=True)
        stamp.write_text(expected)
    return python


def test_the_oldest_version_is_the_one_in_the_readme() -> None:
    assert f"**PyTorch {OLDEST.removesuffix('.0')} or newer.**" in (KIT / "README.md").read_text()


@pytest.mark.soak
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("version", [OLDEST, NEWER])
def test_the_agent_works_with_this_pytorch(version: str) -> None:
    command = [str(environment(version)), "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, cwd=KIT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-10_000:]
