"""Mark slow tests, and assign tests that must not run concurrently to one worker.

Tests that fork ranks, start an agent or start a laboratory are marked slow, and tests/run.sh --quick skips them. A
laboratory is a cluster of nodes on this machine; tests/lab/lab.sh starts it. The mark is derived from the source of the
test, its helpers and its fixtures. A test that is slow for another reason has the mark in its source.
"""

from __future__ import annotations

import ast
import atexit
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from distributed.launch.launcher_console import LauncherConsole
from distributed.launch.watch import Local, Watch
from distributed.launch.watched_run import AgentCommand, Options
from distributed.runs.lookup import read

TESTS = Path(__file__).resolve().parent
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp()  # of fixtures of a module or session; see state_home()
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
SLOW_MODULE = "forked"  # forks ranks
GUIDE = "tests/test_guide_"  # these files start laboratories whose nodes have the same names
# These files take longest, so they run first: at the end of a run, no worker waits for the other.
LONGEST = (GUIDE, "tests/agent/test_agent.py", "tests/training/test_train.py")
SLOW_COMMANDS = ("lab.sh", "lib/agent.py", "agent_without_torch.py", "torch.distributed.run")


def tracked(*patterns: str, root: Path = TESTS.parent) -> list[Path]:
    """Return the files of the project that match one of these patterns, such as "scripts/**/*.sh", sorted.

    Files that git does not track belong to the user and are left out. In a copy without git, no file is left out.
    """
    if not (root / ".git").exists():
        return sorted(path for pattern in patterns for path in root.glob(pattern) if path.is_file())
    command = ["git", "-C", str(root), "ls-files", "-z", "--", *(f":(glob){pattern}" for pattern in patterns)]
    names = subprocess.check_output(command, text=True).split("\0")[:-1]
    return sorted(path for name in names if (path := root / name).is_file())


@pytest.fixture(autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory of the user, which has the index of runs: one for each test, made when it is used."""
    path = tmp_path_factory.getbasetemp() / f"state-{os.urandom(8).hex()}"
    monkeypatch.setenv("XDG_STATE_HOME", str(path))
    return path


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in which all users can create files, as in /tmp."""
    made = Path(tempfile.mkdtemp(dir="/tmp"))
    made.chmod(0o1777)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def nest() -> Iterator[Callable[[Path, str], None]]:
    """A function that makes a directory, and in it 1100 levels of directories of this name; removed after the test."""
    made: list[Path] = []

    def nest_here(directory: Path, name: str) -> None:
        made.append(directory.parent)
        directory.mkdir(parents=True)
        parent = os.open(directory, os.O_DIRECTORY)
        for _ in range(1100):
            os.mkdir(name, dir_fd=parent)
            above, parent = parent, os.open(name, os.O_DIRECTORY, dir_fd=parent)
            os.close(above)
        os.close(parent)

    yield nest_here
    subprocess.run(["rm", "-rf", *made], check=True)  # shutil.rmtree() calls itself for each level


@pytest.fixture
def mount() -> Iterator[Callable[[Path, str], None]]:
    """A function that creates a directory and mounts a tmpfs of this size there, until the test has ended."""
    mounted: list[Path] = []

    def mount_here(directory: Path, size: str) -> None:
        directory.mkdir()
        call = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
        if (done := subprocess.run(call, capture_output=True)).returncode and "CI" not in os.environ:
            pytest.skip("a disk cannot be mounted here")
        assert done.returncode == 0, done.stderr
        mounted.append(directory)

    yield mount_here
    for directory in mounted:
        subprocess.run(["umount", "--lazy", directory], check=True)


@pytest.fixture
def signal_handlers() -> Iterator[None]:
    """Signal handlers that a test replaces are restored at its end."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


@pytest.fixture
def new_watch(signal_handlers: None) -> Callable[..., Watch]:
    """A function that returns the launcher's Watch, which starts and watches the nodes, for a run directory."""

    def new_watch(run: Path, transport: Local, quiet: bool = False) -> Watch:
        options = Options(
            agent=AgentCommand((), ()), python="python3", node_env="/dev/null", cwd="/", grace=1, inherited=(),
            environment=(), hang_timeout=0.0, all_ranks_here=True,
        )  # fmt: skip
        watch = Watch(transport, options, LauncherConsole("launch.sh", quiet), "")
        watch.open(read(run))
        return watch

    return new_watch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
    for item in items:
        if getattr(item, "originalname", "") in slow_names(item.path):
            item.add_marker("slow")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers, run the tests of each file in one worker, and all GUIDE files in one worker."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return GUIDE if nodeid.startswith(GUIDE) else str(super()._split_scope(nodeid))

    return Scheduling(config, log)


@cache
def slow_names(path: Path) -> frozenset[str]:
    """Return which functions, classes and constants of a module use SLOW_MODULE or SLOW_COMMANDS, even indirectly."""
    slow, uses = {SLOW_MODULE}, {}
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                uses[name] = set(used(node))
            case ast.ImportFrom(module=str(module), names=names):
                for other in TESTS.glob(f"**/{module}.py"):
                    slow |= {alias.name for alias in names} & slow_names(other)
    while more := {name for name in uses.keys() - slow if uses[name] & slow}:
        slow |= more
    return frozenset(slow)


def used(node: ast.AST) -> Iterator[str]:
    """Yield the names and fixtures that a syntax node uses, and SLOW_MODULE for each string with a slow command."""
    for inner in ast.walk(node):
        match inner:
            case ast.Name(id=name) | ast.arg(arg=name):
                yield name
            case ast.Constant(value=str(text)) if any(command in text for command in SLOW_COMMANDS):
                yield SLOW_MODULE
