"""The house stands as it was drawn.

Modules know only those below them, what must run on a bare node needs nothing installed, every script
explains itself and refuses what it does not know. Modules and scripts are found here by looking, so that
the next one is held to the same.
"""

from __future__ import annotations

import ast
import os
import re
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from conftest import slow_names

from distributed.jobs.servers import KIT_FILES

KIT = Path(__file__).resolve().parent.parent

# Which packages, and modules beside them, each may import; one without a line here none.
BELOW: dict[str, set[str]] = {
    "agent": {"exit_codes", "files", "host"},
    "checkpoint": {"config", "exit_codes", "torch", "training"},
    "config": {"fold"},
    "fold": {"topics"},
    "health": {"exit_codes", "host", "launch", "nodelist", "terminal"},
    "host": {"exit_codes"},
    "jobs": {"config", "exit_codes", "files", "fold", "host", "launch", "metrics", "runs", "terminal", "training"},
    "launch": {"exit_codes", "files", "host", "nodelist", "runs", "world"},
    "runs": {"exit_codes", "files", "host", "metrics", "terminal"},
    "slurm": {"exit_codes", "files", "host", "launch", "nodelist"},
    "smoke": {"files", "terminal", "torch", "world"},
    "torch": {"agent", "exit_codes", "world"},
    "training": {"config", "files", "fold", "metrics", "runs", "topics", "world"},
    "world": {"nodelist"},
}
KNOW_PYTORCH = {"agent", "checkpoint", "smoke", "torch", "training"}
# They run where nothing is installed yet. Whatever they import of ours is held to the same.
STANDARD_LIBRARY_ALONE = {
    "agent.failure_records", "agent.fork_server", "agent.preloaded", "checkpoint.directory", "exit_codes", "files",
    "fold",
    "health", "host", "jobs.array_task", "jobs.host", "jobs.page", "jobs.panes", "jobs.timeline", "launch", "metrics",
    "nodelist", "runs", "slurm", "smoke.bandwidth", "smoke.report", "terminal", "topics",
    "training.base_model", "world",
}  # fmt: skip

SCRIPTS = sorted(
    path
    for path in [*KIT.glob("scripts/**/*.sh"), *KIT.glob("scripts/**/*.py"), KIT / "tests/run.sh"]
    if "lib" not in path.relative_to(KIT).parts
)


@dataclass(frozen=True)
class Import:
    """One import statement of a file."""

    name: str  # distributed.torch
    line: int
    relative: bool
    in_try: bool

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    @property
    def ours(self) -> str | None:
        """Our module that it brings: "torch" of distributed.torch, "launch.console" of distributed.launch.console."""
        if self.top != "distributed":
            return None
        package, *rest = [*self.name.split(".")[1:], "__init__"]
        return f"{package}.{rest[0]}" if (KIT / "distributed" / package).is_dir() else package


def imports(path: Path) -> list[Import]:
    """Every import of a file, also those inside functions."""
    return list(_imports(ast.parse(path.read_text()), in_try=False))


def _imports(node: ast.AST, in_try: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, False, in_try)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            # `from distributed import torch` brings a module, `from distributed.torch import World` a name.
            package = node.module and (KIT / node.module.replace(".", "/") / "__init__.py").is_file()
            name = f"{node.module}.{alias.name}" if package else node.module or alias.name
            yield Import(name, node.lineno, node.level > 0, in_try)
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, in_try or isinstance(node, ast.Try))


def modules() -> list[Path]:
    return sorted((KIT / "distributed").glob("**/*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(KIT / "distributed").with_suffix("").parts)


def every_module(argument: str = "path") -> pytest.MarkDecorator:
    return pytest.mark.parametrize(argument, [pytest.param(path, id=name_of(path)) for path in modules()])


def every_script() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", [pytest.param(p, id=str(p.relative_to(KIT))) for p in SCRIPTS])


def said(path: Path, found: Import) -> str:
    return f"{path.relative_to(KIT)}:{found.line}: import of {found.name}"


def package_of(module: str) -> str:
    """Of a module beside the packages: itself."""
    return module.partition(".")[0]


def test_imports_go_only_downward() -> None:
    TopologicalSorter(BELOW).prepare()  # raises CycleError, which names the circle
    TopologicalSorter({name_of(path): {one.ours for one in imports(path) if one.ours} for path in modules()}).prepare()


@every_module()
def test_a_module_imports_only_from_packages_below_its_own(path: Path) -> None:
    own = package_of(name_of(path))
    below = BELOW.get(own, set()) | {own}
    for found in imports(path):
        assert not found.relative, f"{said(path, found)} is relative: write distributed.{found.name}"
        assert found.ours is None or package_of(found.ours) in below, f"{said(path, found)} is not below it"


def test_no_line_of_the_table_is_left_over() -> None:
    found: dict[str, set[str]] = {}
    for path in modules():
        own = package_of(name_of(path))
        packages = {package_of(one.ours) for one in imports(path) if one.ours} - {own}
        found[own] = found.get(own, set()) | packages
    assert {name: below for name, below in found.items() if below} == BELOW


@every_module()
def test_only_some_know_pytorch(path: Path) -> None:
    if package_of(name_of(path)) not in KNOW_PYTORCH:
        assert not [said(path, found) for found in imports(path) if found.top == "torch"]


def is_standard_library_alone(module: str) -> bool:
    return not {module, package_of(module)}.isdisjoint(STANDARD_LIBRARY_ALONE)


@every_module()
def test_what_runs_on_a_bare_node_needs_the_standard_library_alone(path: Path) -> None:
    if not is_standard_library_alone(name_of(path)):
        return
    for found in imports(path):
        standard = found.top in sys.stdlib_module_names or found.top == "__future__"
        ours = found.ours is not None and is_standard_library_alone(found.ours)
        assert standard or ours, f"{said(path, found)} is not there on a bare node"


def test_the_server_of_a_job_list_gets_the_files_that_it_imports_and_no_others() -> None:
    entry = "scripts/lib/jobs_host.py"
    found, left = set(), {entry}
    while left:
        found.add(file := left.pop())
        for one in imports(KIT / file):
            # launch.usage imports `runs` when it takes samples: for a job list it takes none.
            if one.ours and package_of(one.ours) != "runs":
                module = Path("distributed", *one.ours.split(".")).with_suffix(".py")
                left |= {str(module), *(f"{package}/__init__.py" for package in module.parents[:-1])} - found
    by_the_supervisor = {f"scripts/lib/{name}" for name in ("in_node_env.sh", "common.bash", "node_env.bash")}
    assert set(KIT_FILES) == found | by_the_supervisor
    assert len(KIT_FILES) == len(set(KIT_FILES))


def test_every_requirement_is_imported() -> None:
    """But for numpy, which torch wants. What tests alone import is in requirements-test.txt."""
    lines = (KIT / "requirements.txt").read_text().splitlines()
    names = {re.split("[=<>]", line)[0] for line in lines if not line.startswith("#")} - {"numpy"}
    sources = [*(KIT / "distributed").rglob("*.py"), KIT / "train.py"]
    found = {one.top for path in sources for one in imports(path)}
    assert {{"PyYAML": "yaml"}.get(name, name) for name in names} <= found


@every_module()
def test_a_module_is_never_run_as_a_file(path: Path) -> None:
    """As a file, its folder comes first on sys.path and `import torch` finds our torch.py."""
    text = path.read_text()
    assert not text.startswith("#!")
    assert not path.stat().st_mode & stat.S_IXUSR
    assert "sys.path.insert" not in text


def test_nothing_is_installable() -> None:
    """An installed `distributed` would shadow, or be shadowed by, another one of that name."""
    assert "[project]" not in (KIT / "pyproject.toml").read_text()
    assert "[build-system]" not in (KIT / "pyproject.toml").read_text()
    assert not (KIT / "setup.py").exists()


def test_tests_lie_in_directories_like_the_package() -> None:
    """None of which is a package: tests/distributed/__init__.py would be found in place of ours."""
    packages = {path.parent.name for path in modules() if path.name == "__init__.py"} - {"distributed"}
    tests = [path.relative_to(KIT / "tests") for path in KIT.glob("tests/**/test_*.py")]
    assert {path.parts[0] for path in tests if len(path.parts) > 1} == packages
    assert max(len(path.parts) for path in tests) == 2
    assert len({path.name for path in tests}) == len(tests), "two files of one name: pytest imports only one of them"
    assert not list(KIT.glob("tests/**/__init__.py"))
    settings = (KIT / "pyproject.toml").read_text()
    assert all(settings.count(f'"tests/{name}"') == 2 for name in packages), "mypy and pytest find the files there"


def test_what_forks_ranks_starts_an_agent_or_raises_a_laboratory_is_slow(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("""
import forked
from test_guide_on_nodes import KIT, LAB
AGENT = ["python", "scripts/lib/agent.py"]
def fixture(): forked.launched(2)
def helper(): run(AGENT)
def test_of_a_fixture(fixture): pass
def test_by_a_helper(): helper()
def test_of_an_imported_name(): run(LAB)
class Ranks: forked = forked
def test_by_a_class(): Ranks()
def test_of_values(): assert KIT
""")
    found = {name for name in slow_names(tmp_path / "test_a.py") if name.startswith("test_")}
    assert found == {f"test_{how}" for how in ("of_a_fixture", "by_a_helper", "of_an_imported_name", "by_a_class")}


def test_a_bats_file_that_raises_a_laboratory_is_tagged() -> None:
    for path in shell(".bats"):
        text = path.read_text()
        raises = re.search(r"lab/(nodes\.bash|lab\.sh)", text) is not None
        assert raises == ("\n# bats file_tags=laboratory\n" in text), path.name


def shell(ending: str) -> list[Path]:
    folders = ("scripts", "tests", "benchmarks")
    return sorted(path for folder in folders for path in KIT.glob(f"{folder}/**/*{ending}"))


def test_programs_end_in_sh_and_can_be_run() -> None:
    for path in shell(".sh"):
        name, text = path.relative_to(KIT), path.read_text()
        assert os.access(path, os.X_OK), f"chmod +x {name}"
        assert re.match(r"#!(/usr/bin/env bash|/bin/sh)\n#\n# ", text), f"{name}: a shebang, then what it is"
        assert text.startswith("#!/bin/sh") or "\nset -euo pipefail\n" in text, f"{name}: not strict"


def test_what_is_sourced_ends_in_bash_and_cannot_be_run() -> None:
    for path in shell(".bash"):
        assert not os.access(path, os.X_OK), f"chmod -x {path.relative_to(KIT)}"
        assert path.read_text().startswith("# shellcheck shell=bash\n#\n# "), f"{path}: what it is"


SOURCED = {path.stem: path for path in KIT.glob("scripts/lib/*.bash")}
PROGRAMS = [path for path in KIT.glob("scripts/**/*.sh") if "source" in path.read_text()]


def sourced_by(program: Path) -> list[str]:
    """The files of scripts/lib that a program sources, in its order."""
    return re.findall(r"^ *source .*/(\w+)\.bash\"$", program.read_text(), re.MULTILINE)


def functions_of(path: Path) -> set[str]:
    return set(re.findall(r"^(\w+)\(\) ", path.read_text(), re.MULTILINE))


def variables_of(path: Path) -> list[str]:
    """What a file gives a value outside of its functions."""
    lines = [line for line in path.read_text().splitlines() if re.match(r"( {2})?(declare -A )?[A-Z_]+=", line)]
    top = [line for line in lines if not line.startswith(" ") or line.startswith("  EXIT_")]
    return [name for line in top for name in re.findall(r"(?:^|(?<= ))([A-Z_]+)=", line.partition(" #")[0])]


def test_no_function_and_no_variable_stands_in_two_sourced_files() -> None:
    functions = Counter(name for path in SOURCED.values() for name in functions_of(path))
    variables = Counter(name for path in SOURCED.values() for name in set(variables_of(path)))
    assert functions["open_run"] == variables["NODES"] == variables["LOG_DIR"] == 1
    assert [name for name, files in (functions + variables).items() if files > 1] == []


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_a_program_replaces_nothing_that_it_sources(program: Path) -> None:
    sourced = [SOURCED[name] for name in sourced_by(program)]
    assert sourced
    assert not functions_of(program) & set().union(*map(functions_of, sourced))
    assert not set(variables_of(program)) & {name for path in sourced for name in variables_of(path)}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_the_order_in_which_files_are_sourced_does_not_matter(program: Path) -> None:
    """But for common.bash, which says where they are."""
    common, *rest = sourced_by(program)
    assert common == "common"
    show = (
        'set -u; KIT=$1; for part in common "${@:2}"; do . "$KIT/scripts/lib/$part.bash"; done; declare -f; declare -p'
    )
    state = [
        subprocess.check_output(["bash", "-c", show, "sh", KIT, *names], text=True, env={"PATH": os.environ["PATH"]})
        for names in (rest, rest[::-1])
    ]
    changing = re.compile(r"^declare \S+ (_|BASH\w*|EPOCH\w+|RANDOM|SRANDOM|SECONDS|PIPESTATUS|FUNCNAME|part|PPID)\b")
    forward, backward = ([line for line in text.splitlines() if not changing.match(line)] for text in state)
    assert forward == backward


def test_nothing_asks_whether_a_function_is_there() -> None:
    asking = [
        path.name for path in [*SOURCED.values(), *PROGRAMS] if re.search(r"declare -F|type -t", path.read_text())
    ]
    assert asking == []


def call(path: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, path] if path.suffix == ".py" else [path]
    return subprocess.run([*words, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def opening_comment(path: Path) -> str:
    """What stands between the shebang and the first line that is no comment."""
    lines = path.read_text().splitlines()[2:]
    end = next(number for number, line in enumerate(lines) if line != "#" and not line.startswith("# "))
    return "".join(line[2:] + "\n" for line in lines[:end])


@every_script()
def test_a_script_explains_itself_by_its_opening_comment(path: Path, tmp_path: Path) -> None:
    answer = call(path, "--help", cwd=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    if path.suffix == ".sh":
        assert answer.stdout == opening_comment(path)
    assert f"{path.name} " in answer.stdout, "its usage line names it"


@every_script()
def test_a_script_refuses_an_option_it_does_not_know(path: Path, tmp_path: Path) -> None:
    answer = call(path, "--no-such-option", cwd=tmp_path)
    assert answer.returncode == 2
    assert "--no-such-option" in answer.stderr
    assert "--help" in answer.stderr or "usage:" in answer.stderr
    assert not answer.stdout
    assert not list(tmp_path.iterdir())


def sources() -> Iterator[Path]:
    yield from (path for path in KIT.iterdir() if path.suffix in {".md", ".py", ".toml", ".txt"})
    for folder in (".ci", "benchmarks", "config", "distributed", "scripts", "tests"):
        yield from (path for path in (KIT / folder).glob("**/*") if path.is_file() and path.suffix != ".pyc")


def test_nothing_names_the_machine_it_was_written_on() -> None:
    private = re.compile(rf"/(?:work|root|Users)/|{re.escape(str(KIT))}")
    named = [
        f"{path.relative_to(KIT)}:{number}: {line.strip()}"
        for path in sources()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if private.search(line) and path != Path(__file__).resolve()
    ]
    assert not named, "\n".join(named)
