"""Marks as slow each test that forks ranks, starts an agent or raises a laboratory: tests/run.sh --quick leaves it out.

The mark is derived from the source, through helpers and fixtures, so that no test has to be marked by hand. A test that
is slow for another reason carries the mark itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
RANKS = "forked"  # the module that forks ranks
COMMANDS = ("lab.sh", "lib/agent.py", "torch.distributed.run")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(item, "originalname", "") in slow_names(item.path):
            item.add_marker("slow")


@cache
def slow_names(path: Path) -> frozenset[str]:
    """The functions and constants of a module that use, directly or through others, what is slow."""
    slow, uses = {RANKS}, {}
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                uses[name] = set(used(node))
            case ast.ImportFrom(module=str(module), names=names) if (other := TESTS / f"{module}.py").exists():
                slow |= {alias.name for alias in names} & slow_names(other)
    while more := {name for name in uses.keys() - slow if uses[name] & slow}:
        slow |= more
    return frozenset(slow)


def used(node: ast.AST) -> Iterator[str]:
    """Names, fixtures among them; a command that is slow counts as RANKS."""
    for inner in ast.walk(node):
        match inner:
            case ast.Name(id=name) | ast.arg(arg=name):
                yield name
            case ast.Constant(value=str(text)) if any(command in text for command in COMMANDS):
                yield RANKS
