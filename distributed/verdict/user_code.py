"""Distinguish the user's code from libraries. A launched package is the user's code, although it is installed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from distributed.records import text

_INSTALLED = re.compile(r".*/(?:site-packages|dist-packages|lib(?:64)?/python3[.\d]*)/([^/]+)(?:/.*)?", re.DOTALL)


def is_library(file: str, launched: str) -> bool:
    """Whether a file in a stack belongs to a library. launched: see launched_package()."""
    return file.startswith("<") or _package_of(file) not in ("", launched)


def launched_package(run_json: Mapping[str, object]) -> str:
    """The installed package or module that a run has launched; empty if it is a script outside of packages."""
    script = text(run_json.get("script"))  # a path, or the name of a module
    if "/" not in script and not script.endswith(".py"):
        return script.partition(".")[0]
    path = os.path.normpath(os.path.join(text(run_json.get("cwd")), script))
    if os.path.basename(os.path.dirname(path)) == "bin":  # a console script usually has the name of its package
        return os.path.basename(path).replace("-", "_")
    return _package_of(path)


def _package_of(file: str) -> str:
    """The package or module of an installed file: torch for .../site-packages/torch/nn/init.py; empty for others."""
    found = _INSTALLED.fullmatch(file)
    return found[1].removesuffix(".py") if found else ""
