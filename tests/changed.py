"""Print the test files that depend on changed files, for tests/run.sh --changed. Uses only the standard library.

A file depends on the files that it names, and on their dependencies. A Python file names its imports, and the files and
modules in its strings. Any other file names the files that occur outside its comments. Prints one line per test file,
with the changed files that it depends on:

  tests/ssh.bats: scripts/lib/ssh_config

If all tests use a changed file, prints only one line: "everything: " and the names of these changed files.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

KIT = Path(__file__).resolve().parents[1]
USED_BY_ALL_TESTS = re.compile(r"requirements.*\.(txt|lock)|pyproject\.toml|tests/(conftest\.py|lab/lab\.sh)")
USE_ALL_FILES = ("tests/test_docs.py", "tests/test_house.py")
TEST_FILE = re.compile(r"tests/([^/]+/)?test_[^/]+\.py|tests/[^/]+\.bats")
# Matches launcher.bash, ssh_config, runs.verdict, and muster in scripts/muster.
FILE_NAME = re.compile(r"\w[\w-]*[._][\w.-]*\w|(?<=scripts/)\w+\b(?!/)")
MODULE_NAME = re.compile(r"\bdistributed\.[\w.]*\w")


def affected(changed: Collection[str], files: Collection[str], root: Path) -> dict[str, list[str]]:
    """Return the test files in `files`, each with the files in `changed` that it depends on.

    Paths are relative to `root`.
    """
    by_name: dict[str, set[str]] = {}
    for file in {*files, *changed}:
        for name in names_of(Path(file)):
            by_name.setdefault(name, set()).add(file)
    uses: dict[str, set[str]] = {}
    for file in files:
        named = {other for name in names_in(root / file) for other in by_name.get(name, ())}
        # Launchers name guides and train.py only in messages. Such a name is a dependency only if a test contains it.
        uses[file] = {n for n in named if file.startswith("tests/") or n.startswith(("distributed/", "scripts/"))}
        uses[file] |= {init for package in Path(file).parents if (init := f"{package}/__init__.py") in files}
    found = {}
    for test in sorted(filter(TEST_FILE.fullmatch, files)):
        dependencies, unvisited = {test}, [test]
        while unvisited:
            new = uses.get(unvisited.pop(), set()) - dependencies
            dependencies |= new
            unvisited += new
        if causes := sorted(changed if test in USE_ALL_FILES else dependencies & set(changed)):
            found[test] = causes
    return found


def names_of(file: Path) -> list[str]:
    """Return the names by which other files refer to this one."""
    if file.suffix != ".py":
        return [file.name]
    if file.parts[0] != "distributed":  # tests import each other by stem, and do not run each other
        return [file.stem] if TEST_FILE.fullmatch(str(file)) else [file.stem, file.name]
    parts = [part for part in file.with_suffix("").parts if part not in ("__init__", "__main__")]
    return [".".join(parts), ".".join(parts[1:])]  # scripts/lib/module.py accepts runs.verdict


def names_in(path: Path) -> Iterator[str]:
    """Yield the names of files and modules in a file."""
    text = path.read_text(errors="replace")
    if path.suffix == ".py":
        nodes = list(ast.walk(ast.parse(text, str(path))))
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):  # imports a module, or a name from a module
                yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                # A string with white space may be a message or a command. A file that a message names is no dependency,
                # but a module that a command names is one.
                yield from (MODULE_NAME if re.search(r"\s", node.value) else FILE_NAME).findall(node.value)
    elif path.suffix != ".md":
        yield from FILE_NAME.findall(re.sub(r"(?<!\S)#.*", "", text))


def git(*arguments: str) -> list[str]:
    """Return the lines of git's output; none when git fails."""
    done = subprocess.run(["git", "-C", KIT, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def main() -> int:
    files = [file for file in git("ls-files", "--cached", "--others", "--exclude-standard") if (KIT / file).is_file()]
    if not files:
        sys.stderr.write(f"changed.py: {KIT}: not a git work tree; give the test files instead\n")
        return 69
    on_main = git("branch", "--show-current") == ["main"]
    bases = [git("merge-base", "HEAD", name) for name in (("origin/main",) if on_main else ("main", "origin/main"))]
    base = next((commit for commits in bases for commit in commits), "HEAD")
    changed = git("diff", "--name-only", "--no-renames", base) + git("ls-files", "--others", "--exclude-standard")
    if used := [file for file in changed if USED_BY_ALL_TESTS.fullmatch(file)]:
        print(f"everything: {', '.join(used)}")
        return 0
    for test, causes in affected(changed, files, KIT).items():
        print(f"{test}: {', '.join(causes[:3])}{f' and {len(causes) - 3} more' if len(causes) > 3 else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
