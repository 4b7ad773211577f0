"""Rules for all modules and scripts.

Packages import only the packages listed for them. Modules for bare nodes need the standard library alone. Every script
has a help text and refuses unknown options. New modules and scripts are found automatically.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest
import yaml
from conftest import slow_names, tracked

from distributed.files import version
from distributed.jobs.servers.ssh_server import KIT_FILES

KIT = Path(__file__).resolve().parent.parent

# The packages and top-level modules that each package or module may import. One that is not a key may import none.
ALLOWED_IMPORTS: dict[str, set[str]] = {
    "agent": {"exit_codes", "files", "host", "launch", "trust", "world"},
    "attempts": {"trust"},
    "checkpoint": {"exit_codes", "files", "torch", "training", "trust"},
    "compiler_cache": {"trust"},
    "files": {"trust"},
    "health": {"exit_codes", "host", "launch", "nodelist", "terminal", "training", "transport", "trust"},
    "host": {"exit_codes", "trust"},
    "index": {"files", "trust"},
    "jobs": {
        "exit_codes", "files", "host", "index", "jobs.dispatch", "jobs.host", "jobs.journal", "jobs.lists",
        "jobs.schedule", "jobs.servers", "jobs.show", "launch", "records", "terminal", "training", "trust",
    },
    "jobs.dispatch": {"jobs.journal", "jobs.lists", "jobs.schedule", "training", "trust"},
    "jobs.host": {"exit_codes", "files", "host", "launch", "metrics", "training", "trust"},
    "jobs.journal": {"files", "host", "jobs.lists", "metrics", "training", "trust"},
    "jobs.lists": {"files", "jobs.host", "terminal", "training", "transport", "trust"},
    "jobs.schedule": {"files", "jobs.journal", "jobs.lists", "training"},
    "jobs.servers": {
        "exit_codes", "files", "host", "jobs.host", "jobs.journal", "jobs.lists", "jobs.schedule", "launch", "terminal",
        "training", "transport", "trust",
    },
    "jobs.show": {
        "files", "jobs.journal", "jobs.schedule", "metrics", "records", "report", "terminal", "training", "trust",
    },
    "launch": {
        "attempts", "exit_codes", "files", "host", "metrics", "nodelist", "records", "report", "runs", "terminal",
        "transport", "trust", "verdict", "world",
    },
    "metrics": {"trust"},
    "records": {"metrics", "trust"},
    "report": {"attempts", "files", "metrics", "nodelist", "records", "runs", "terminal", "trust", "verdict"},
    "runs": {
        "attempts", "exit_codes", "files", "host", "index", "metrics", "records", "terminal", "transport", "trust",
        "verdict",
    },
    "slurm": {"exit_codes", "files", "host", "launch", "nodelist", "trust"},
    "smoke": {"files", "terminal", "torch", "trust", "world"},
    "terminal": {"trust"},
    "torch": {"agent", "exit_codes", "world"},
    "transport": {"exit_codes", "files", "host", "trust"},
    "training": {"attempts", "files", "host", "metrics", "report", "runs", "trust", "world"},
    "verdict": {"attempts", "exit_codes", "files", "host", "records", "trust"},
    "world": {"nodelist"},
}  # fmt: skip
MAY_IMPORT_PYTORCH = {"agent", "checkpoint", "compiler_cache", "smoke", "torch", "training"}
# These modules run where nothing is installed yet, so they may import only each other and the standard library.
STANDARD_LIBRARY_ALONE = {
    "agent.failure_records", "agent.fork_server", "agent.options", "agent.preloaded", "attempts",
    "checkpoint.directory", "exit_codes", "files", "health", "host", "index", "jobs.array_task", "jobs.host",
    "jobs.journal", "jobs.lists.job", "jobs.schedule.placement", "jobs.show.entries", "jobs.show.job_table",
    "jobs.show.page", "jobs.show.timeline", "launch", "metrics", "nodelist", "records", "report", "runs", "slurm",
    "smoke.bandwidth", "smoke.summary", "terminal", "training.base_model", "training.fold", "training.topics",
    "transport", "trust", "verdict", "world",
}  # fmt: skip

SCRIPTS = [
    path
    for path in tracked("scripts/**/*.sh", "scripts/**/*.py", "tests/run.sh")
    if "lib" not in path.relative_to(KIT).parts
]


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
    def module(self) -> str | None:
        """The module of our package: "torch" for distributed.torch, None for another package."""
        if self.top != "distributed":
            return None
        path, found = KIT / "distributed", []
        for name in [*self.name.split(".")[1:], "__init__"]:
            if path.is_dir():  # the rest is a name in the module
                found.append(name)
                path /= name
        return ".".join(found)


def imports(path: Path) -> list[Import]:
    """Return all imports of a file, also those inside functions."""
    return list(_imports(ast.parse(path.read_text()), in_try=False))


def _imports(node: ast.AST, in_try: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, False, in_try)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            # `from distributed import torch` imports a module, `from distributed.torch import World` a name.
            package = node.module and (KIT / node.module.replace(".", "/") / "__init__.py").is_file()
            name = f"{node.module}.{alias.name}" if package else node.module or alias.name
            yield Import(name, node.lineno, node.level > 0, in_try)
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, in_try or isinstance(node, ast.Try))


def modules() -> list[Path]:
    return tracked("distributed/**/*.py")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(KIT / "distributed").with_suffix("").parts)


every_module = pytest.mark.parametrize("path", modules(), ids=name_of)
every_script = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(KIT)))


def describe(path: Path, found: Import) -> str:
    return f"{path.relative_to(KIT)}:{found.line}: import of {found.name}"


def package_of(module: str) -> str:
    """Return the package of a module; a top-level module is its own package."""
    return module.rpartition(".")[0] or module


def test_imports_have_no_cycle() -> None:
    TopologicalSorter(ALLOWED_IMPORTS).prepare()  # raises CycleError
    TopologicalSorter(
        {name_of(path): {one.module for one in imports(path) if one.module} for path in modules()}
    ).prepare()


@every_module
def test_a_module_imports_only_allowed_packages(path: Path) -> None:
    package = package_of(name_of(path))
    allowed = ALLOWED_IMPORTS.get(package, set()) | {package}
    for found in imports(path):
        assert not found.relative, f"{describe(path, found)} is relative; write distributed.{found.name}"
        assert found.module is None or package_of(found.module) in allowed, (
            f"{describe(path, found)} is not in ALLOWED_IMPORTS"
        )


def test_every_allowed_import_is_used() -> None:
    found: dict[str, set[str]] = {}
    for path in modules():
        package = package_of(name_of(path))
        packages = {package_of(one.module) for one in imports(path) if one.module} - {package}
        found[package] = found.get(package, set()) | packages
    assert {name: packages for name, packages in found.items() if packages} == ALLOWED_IMPORTS


@every_module
def test_only_some_packages_import_pytorch(path: Path) -> None:
    if package_of(name_of(path)) not in MAY_IMPORT_PYTORCH:
        assert not [describe(path, found) for found in imports(path) if found.top == "torch"]


def is_standard_library_alone(module: str) -> bool:
    return not {module, package_of(module)}.isdisjoint(STANDARD_LIBRARY_ALONE)


@every_module
def test_modules_for_bare_nodes_need_the_standard_library_alone(path: Path) -> None:
    if not is_standard_library_alone(name_of(path)):
        return
    for found in imports(path):
        standard = found.top in sys.stdlib_module_names or found.top == "__future__"
        allowed = found.module is not None and is_standard_library_alone(found.module)
        assert standard or allowed, f"{describe(path, found)} is not available on a bare node"


def test_servers_of_a_job_list_get_exactly_the_files_that_they_import() -> None:
    found, unvisited = {"scripts/lib/module.py"}, {"distributed/jobs/host/service.py"}
    while unvisited:
        found.add(file := unvisited.pop())
        for one in imports(KIT / file):
            # launch.usage_sampler imports `runs` only for samples, which servers of a job list do not take.
            if one.module and package_of(one.module) != "runs":
                module = Path("distributed", *one.module.split(".")).with_suffix(".py")
                unvisited |= {str(module), *(f"{package}/__init__.py" for package in module.parents[:-1])} - found
    names = ("in_node_env.sh", "environment.bash", "common.bash", "node_env.bash")
    used_by_the_supervisor = {f"scripts/lib/{name}" for name in names}
    assert set(KIT_FILES) == found | used_by_the_supervisor
    assert len(KIT_FILES) == len(set(KIT_FILES))


def test_every_requirement_is_imported() -> None:
    """numpy is an exception: torch needs it. requirements-test.txt has what only tests import."""
    lines = (KIT / "requirements.txt").read_text().splitlines()
    names = {re.split("[=<>]", line)[0] for line in lines if not line.startswith("#")} - {"numpy"}
    found = {one.top for path in [*modules(), KIT / "train.py"] for one in imports(path)}
    assert {{"PyYAML": "yaml"}.get(name, name) for name in names} <= found


@every_module
def test_a_module_is_never_run_as_a_file(path: Path) -> None:
    """Otherwise its directory is first on sys.path, and `import torch` finds our torch.py."""
    text = path.read_text()
    assert not text.startswith("#!")
    assert not path.stat().st_mode & stat.S_IXUSR
    assert "sys.path.insert" not in text


def test_each_package_has_one_directory_of_tests_with_the_same_name() -> None:
    """The directories have no __init__.py: tests/distributed/__init__.py would replace the package `distributed`."""
    packages = {name.partition(".")[0] for name in map(name_of, modules()) if "." in name}
    tests = [path.relative_to(KIT / "tests") for path in tracked("tests/**/test_*.py")]
    assert {path.parts[0] for path in tests if len(path.parts) > 1} == packages
    assert max(len(path.parts) for path in tests) == 2
    assert len({path.name for path in tests}) == len(tests), "two test files of one name: pytest imports only one"
    assert not tracked("tests/**/__init__.py")
    settings = (KIT / "pyproject.toml").read_text()
    assert all(settings.count(f'"tests/{name}"') == 2 for name in packages), (
        "add each directory to pyproject.toml for mypy and for pytest"
    )


def test_a_test_is_marked_slow_if_it_forks_ranks_or_starts_an_agent_or_a_laboratory(tmp_path: Path) -> None:
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


def test_a_bats_file_that_starts_a_laboratory_has_the_tag_laboratory() -> None:
    for path in bash_files(".bats"):
        text = path.read_text()
        uses_laboratory = re.search(r"lab/(nodes\.bash|lab\.sh)", text) is not None
        assert uses_laboratory == ("\n# bats file_tags=laboratory\n" in text), path.name


def bash_files(suffix: str) -> list[Path]:
    return tracked(*(f"{directory}/**/*{suffix}" for directory in ("scripts", "tests", "benchmarks")))


def test_programs_have_the_suffix_sh_and_are_executable() -> None:
    for path in bash_files(".sh"):
        name, text = path.relative_to(KIT), path.read_text()
        assert os.access(path, os.X_OK), f"chmod +x {name}"
        assert re.match(r"#!(/usr/bin/env bash|/bin/sh)\n#\n# ", text), (
            f"{name}: must begin with a shebang, then a description"
        )
        assert text.startswith("#!/bin/sh") or "\nset -euo pipefail\n" in text, f"{name}: strict mode is missing"


def test_sourced_files_have_the_suffix_bash_and_are_not_executable() -> None:
    for path in bash_files(".bash"):
        assert not os.access(path, os.X_OK), f"chmod -x {path.relative_to(KIT)}"
        assert path.read_text().startswith("# shellcheck shell=bash\n#\n# "), f"{path}: must begin with a description"


SOURCED = {path.stem: path for path in tracked("scripts/lib/*.bash")}


def sourced_by(program: Path) -> list[str]:
    """Return the files of scripts/lib that a program sources, in its order, without suffix."""
    return re.findall(r"^ *source .*/(\w+)\.bash\"$", program.read_text(), re.MULTILINE)


PROGRAMS = [path for path in tracked("scripts/**/*.sh") if sourced_by(path)]


def functions_of(path: Path) -> set[str]:
    return set(re.findall(r"^(\w+)\(\) ", path.read_text(), re.MULTILINE))


def variables_of(path: Path) -> list[str]:
    """Return the variables that a file assigns outside of functions."""
    lines = [line for line in path.read_text().splitlines() if re.match(r"( {2})?(declare -A )?[A-Z_]+=", line)]
    top = [line for line in lines if not line.startswith(" ") or line.startswith("  EXIT_")]
    return [name for line in top for name in re.findall(r"(?:^|(?<= ))([A-Z_]+)=", line.partition(" #")[0])]


def test_each_function_and_variable_is_defined_in_one_sourced_file() -> None:
    functions = Counter(name for path in SOURCED.values() for name in functions_of(path))
    variables = Counter(name for path in SOURCED.values() for name in set(variables_of(path)))
    assert functions["run_nodes"] == variables["NODES"] == variables["LOG_DIR"] == 1
    assert [name for name, files in (functions + variables).items() if files > 1] == []


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_a_program_redefines_nothing_of_the_files_it_sources(program: Path) -> None:
    sourced = [SOURCED[name] for name in sourced_by(program)]
    assert sourced
    assert not functions_of(program) & set().union(*map(functions_of, sourced))
    assert not set(variables_of(program)) & {name for path in sourced for name in variables_of(path)}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_the_order_in_which_files_are_sourced_does_not_matter(program: Path) -> None:
    """common.bash is always first, because it sets the directory of the other files."""
    common, *rest = sourced_by(program)
    assert common in ("common", "launcher")
    if common == "launcher":
        rest = [*sourced_by(KIT / "scripts/lib/launcher.bash")[1:], *rest]
    show = (
        'set -u; KIT=$1; for part in common "${@:2}"; do . "$KIT/scripts/lib/$part.bash"; done; declare -f; declare -p'
    )
    state = [
        subprocess.check_output(["bash", "-c", show, "sh", KIT, *names], text=True, env={"PATH": os.environ["PATH"]})
        for names in (rest, rest[::-1])
    ]
    differs = re.compile(r"^declare \S+ (_|BASH\w*|EPOCH\w+|RANDOM|SRANDOM|SECONDS|PIPESTATUS|FUNCNAME|part|PPID)\b")
    forward, backward = ([line for line in text.splitlines() if not differs.match(line)] for text in state)
    assert forward == backward


def test_no_script_tests_whether_a_function_exists() -> None:
    found = [path.name for path in [*SOURCED.values(), *PROGRAMS] if re.search(r"declare -F|type -t", path.read_text())]
    assert found == []


def call(path: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, path] if path.suffix == ".py" else [path]
    return subprocess.run([*command, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def opening_comment(path: Path) -> str:
    """Return the lines between the shebang and the first line that is no comment."""
    lines = path.read_text().splitlines()[2:]
    end = next(number for number, line in enumerate(lines) if line != "#" and not line.startswith("# "))
    comment = "".join(line[2:] + "\n" for line in lines[:end])
    # Replace `(as SCRIPT except NAMES)` by the arguments and options of SCRIPT, except NAMES and those listed above.
    while found := re.search(r"^  \(as (\S+?)(?: except (.+))?\)$", comment, re.MULTILINE):
        [file] = [*tracked(f"scripts/{found[1]}"), *tracked(f"scripts/*/{found[1]}")]
        shown = re.search(r"^  \S.*?^  --help.*?$", opening_comment(file), re.DOTALL | re.MULTILINE)
        assert shown
        text = shown[0]
        listed = re.findall(r"^  (\S+)", comment[: found.start()], re.MULTILINE)
        for name in [*listed, *(found[2] or "").split()]:
            entry = rf"^  {re.escape(name)}(?= |$).*\n(?:(?: {{3,}}.*)?\n)*"
            text, changes = re.subn(entry, "", text, flags=re.MULTILINE)
            assert changes == 1 or name in listed, f"{path.name}: {found[1]} has no {name}"
        comment = comment.replace(found[0], text)
    return comment


@every_script
def test_the_help_of_a_script_is_its_opening_comment(path: Path, tmp_path: Path) -> None:
    done = call(path, "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    if path.suffix == ".sh":
        short, more, _ = opening_comment(path).partition("More options:\n")
        assert done.stdout == short
        if more:
            assert call(path, "--help-all", cwd=tmp_path).stdout == opening_comment(path)
    assert f"{path.name} " in done.stdout, "the usage line names the script"


@every_script
def test_a_script_refuses_an_unknown_option(path: Path, tmp_path: Path) -> None:
    done = call(path, "--no-such-option", cwd=tmp_path)
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr
    assert "--help" in done.stderr or "usage:" in done.stderr
    assert not done.stdout
    assert not list(tmp_path.iterdir())


def test_no_file_contains_the_home_directory_of_a_person() -> None:
    """Examples in the guides and tests are in the home directories of the users ada and me."""
    private = re.compile(r"(?<![\w$}])/(?:root|Users/\w+|home/(?!(?:ada|me)\b)\w+)/")
    named = [
        f"{path.relative_to(KIT)}:{number}: {line.strip()}"
        for path in tracked("**/*")
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if private.search(line) and path != Path(__file__).resolve()
    ]
    assert not named, "\n".join(named)


def test_only_files_that_git_tracks_are_read(tmp_path: Path) -> None:
    """Output redirected into the checkout, or a script of the user's there, must not fail a test."""
    for name in ("a.txt", "scripts/b.sh", "scripts/lib/c.sh", "scripts/deleted.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for arguments in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    (tmp_path / "scripts/deleted.sh").unlink()
    for name in ("out.txt", "scripts/mine.sh"):
        (tmp_path / name).touch()
    found = [str(path.relative_to(tmp_path)) for path in tracked("*.txt", "scripts/**/*.sh", root=tmp_path)]
    assert found == ["a.txt", "scripts/b.sh", "scripts/lib/c.sh"]
    shutil.rmtree(tmp_path / ".git")
    assert len(tracked("*.txt", "scripts/**/*.sh", root=tmp_path)) == 5


def test_the_newest_release_of_the_changelog_is_the_version() -> None:
    releases = re.findall(r"^## \[(\S+)\] - \d{4}-\d\d-\d\d$", (KIT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == version()


def test_the_github_workflow_runs_all_tests_and_the_quick_tests_also_on_other_versions_of_python() -> None:
    jobs = yaml.safe_load((KIT / ".github/workflows/ci.yml").read_text())["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert {name: ["bash .ci/run" in one for one in found] for name, found in commands.items()} == {
        "all": [True],
        "quick": [True],
        "versions": [True],  # see tests/agent/test_torch_versions.py
    }
    assert "--quick" in commands["quick"][0]
    assert "--quick" not in commands["all"][0]
    assert jobs["quick"]["strategy"]["matrix"] == {"python": ["3.10", "3.13"]}
    for command in chain(*commands.values()):
        subprocess.run(["bash", "-n", "-c", command], check=True)


def test_every_action_of_the_github_workflow_is_pinned_by_its_commit() -> None:
    """The owner of an action can move a tag to another commit. The comment says which version the commit is."""
    uses = re.findall(r"\buses:(.*)", (KIT / ".github/workflows/ci.yml").read_text())
    assert uses
    for action in uses:
        assert re.fullmatch(r" [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action
