"""The lock files agree with the requirements files, and give the hashes of all packages except PyTorch and CUDA."""

from __future__ import annotations

import re
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

KIT = Path(__file__).resolve().parents[1]
FILES = {
    "requirements.lock": ("requirements.txt",),
    "requirements-test.lock": ("requirements.txt", "requirements-test.txt", "requirements-trackers.txt"),
}
PYTHONS = ("3.10", "3.11", "3.12", "3.13")

pytestmark = pytest.mark.parametrize("lock", FILES)


def entries(lock: str) -> list[str]:
    """The entries of a lock file, each as one line. An entry is continued with a backslash."""
    text = (KIT / lock).read_text().replace("\\\n", "")
    return [line for line in text.splitlines() if not line.startswith("#")]


def locked(lock: str, python: str) -> dict[str, Version]:
    """Name -> version, of the packages that are installed on Linux with this version of Python."""
    machine = {"python_version": python, "python_full_version": f"{python}.1", "sys_platform": "linux"}
    found: dict[str, Version] = {}
    for entry in entries(lock):
        required = Requirement(entry.partition(" --hash=")[0])
        if required.marker is None or required.marker.evaluate(machine):
            assert required.name not in found, f"{required.name} has two versions for Python {python}"
            (version,) = required.specifier
            found[required.name] = Version(version.version)
    return found


def required_by(files: tuple[str, ...]) -> list[Requirement]:
    """What the requirements files and the installed PyTorch need."""
    lines = [line for file in files for line in (KIT / file).read_text().splitlines() if re.match(r"\w", line)]
    lines += [line for line in requires("torch") or () if not re.match("(nvidia|cuda|triton)", line)]
    return [Requirement(line) for line in lines if "extra ==" not in line and not line.startswith("torch==")]


@pytest.mark.parametrize("python", PYTHONS)
def test_a_lock_file_has_a_fitting_version_of_every_requirement(lock: str, python: str) -> None:
    versions = locked(lock, python)
    for required in required_by(FILES[lock]):
        version = versions[canonicalize_name(required.name)]
        assert required.specifier.contains(version, prereleases=True), (
            f"{lock}: {required}: has {version}; call tests/lock.sh"
        )


def test_every_entry_has_one_version_and_hashes_and_names_no_index(lock: str) -> None:
    for entry in entries(lock):
        assert re.fullmatch(r"[a-z0-9-]+==[\w.]+( +; [\w .*='<>!()]+?)?( +--hash=sha256:[0-9a-f]{64})+", entry), entry


def test_the_builds_of_pytorch_are_not_locked(lock: str) -> None:
    names = {entry.partition("==")[0] for entry in entries(lock)}
    assert not [name for name in names if re.match("torch$|triton$|nvidia-|cuda-", name)]


@pytest.mark.parametrize("python", PYTHONS)
def test_the_tests_use_the_versions_of_the_quickstart(lock: str, python: str) -> None:
    assert locked("requirements.lock", python).items() <= locked(lock, python).items()


def test_the_advice_for_builds_of_pytorch_has_the_required_version(lock: str) -> None:
    text = (KIT / FILES[lock][0]).read_text()
    (required,) = re.findall("^torch==.*", text, re.MULTILINE)
    assert f"-m pip install {required}\n" in (KIT / "TROUBLESHOOTING.md").read_text()
    assert re.search(rf"^#   \S+ -m pip install --no-deps --index-url https://\S+ {re.escape(required)}$", text, re.M)
