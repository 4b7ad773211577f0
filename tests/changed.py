"""Which test files depend on what has changed: for tests/run.sh --changed. Standard library only.

A test depends on the files that it names, and on those that these name: a Python file names what it imports, and the
files and modules in its strings; any other file, those outside its comments. Prints a line for each test file, with the
changed files that it depends on:

  tests/ssh.bats: scripts/lib/ssh.bash

or "everything: " and the files on which all tests depend.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

KIT = Path(__file__).resolve().parents[1]
ALL_TESTS_USE = re.compile(r"requirements.*\.txt|pyproject\.toml|tests/(conftest\.py|lab/lab\.sh)")
USE_ALL_FILES = ("tests/test_docs.py", "tests/test_house.py")
TEST = re.compile(r"tests/([^/]+/)?test_[^/]+\.py|tests/[^/]+\.bats")
NAME = re.compile(r"\w[\w-]*[._][\w.-]*\w")  # launcher.bash, ssh_config, runs.verdict
MODULE = re.compile(r"\bdistributed\.[\w.]*\w")


def affected(changed: Collection[str], files: Collection[str], root: Path) -> dict[str, list[str]]:
    """Each test file among files, and the changed files that it depends on. Paths are relative to root."""
    by_name: dict[str, set[str]] = {}
    for file in {*files, *changed}:
        for name in names_of(Path(file)):
            by_name.setdefault(name, set()).add(file)
    uses: dict[str, set[str]] = {}
    for file in files:
        named = {other for name in names_in(root / file) for other in by_name.get(name, ())}
        # Messages name guides, and launchers run any script: only tests really read the one and run the other.
        uses[file] = {n for n in named if file.startswith("tests/") or n.startswith(("distributed/", "scripts/"))}
        uses[file] |= {init for package in Path(file).parents if (init := f"{package}/__init__.py") in files}
    found = {}
    for test in sorted(filter(TEST.fullmatch, files)):
        reached, left = {test}, [test]
        while left:
            new = uses.get(left.pop(), set()) - reached
            reached |= new
            left += new
        if causes := sorted(changed if test in USE_ALL_FILES else reached & set(changed)):
            found[test] = causes
    return found


def names_of(file: Path) -> list[str]:
    if file.suffix != ".py":
        return [file.name]
    if file.parts[0] != "distributed":  # a test is imported, and never run by another one
        return [file.stem] if TEST.fullmatch(str(file)) else [file.stem, file.name]
    parts = [part for part in file.with_suffix("").parts if part not in ("__init__", "__main__")]
    return [".".join(parts), ".".join(parts[1:])]  # scripts/lib/module.py takes it without the first


def names_in(path: Path) -> Iterator[str]:
    text = path.read_text(errors="replace")
    if path.suffix == ".py":
        nodes = list(ast.walk(ast.parse(text, str(path))))
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):  # of a module, or of a name in it
                yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                # With blanks it is a message, which may name any file, or a program.
                yield from (MODULE if re.search(r"\s", node.value) else NAME).findall(node.value)
    elif path.suffix != ".md":
        yield from NAME.findall(re.sub(r"(?<!\S)#.*", "", text))


def git(*words: str) -> list[str]:
    done = subprocess.run(["git", "-C", KIT, *words], capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def main() -> int:
    files = [file for file in git("ls-files", "--cached", "--others", "--exclude-standard") if (KIT / file).is_file()]
    if not files:
        sys.stderr.write(f"changed.py: {KIT}: not a git work tree; name the test files instead\n")
        return 69
    on_main = git("branch", "--show-current") == ["main"]
    bases = [git("merge-base", "HEAD", name) for name in (("origin/main",) if on_main else ("main", "origin/main"))]
    base = next((commit for commits in bases for commit in commits), "HEAD")
    changed = git("diff", "--name-only", "--no-renames", base) + git("ls-files", "--others", "--exclude-standard")
    if used := [file for file in changed if ALL_TESTS_USE.fullmatch(file)]:
        print(f"everything: {', '.join(used)}")
        return 0
    for test, causes in affected(changed, files, KIT).items():
        print(f"{test}: {', '.join(causes[:3])}{f' and {len(causes) - 3} more' if len(causes) > 3 else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
