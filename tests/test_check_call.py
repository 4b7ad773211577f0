"""A launcher refuses a program that Python cannot run, and accepts a program that Python can run."""

from __future__ import annotations

import py_compile
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

KIT = Path(__file__).resolve().parent.parent
NOT_PYTHON = "not a Python script ({}); ranks run Python: start this program from a Python script, such as with"


def check(option: str, file: Path | str) -> str:
    """The last line that check_call.py prints."""
    command = [sys.executable, str(KIT / "scripts/lib/check_call.py"), option, str(file), "--"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "content", "expected", "expected_if_foreign"),
    [
        ("a.sh", b"#!/bin/bash\nfor i in 1; do echo; done\n", NOT_PYTHON.format("it begins with #!/bin/bash"), ""),
        ("run", b"#!/bin/sh\nexec python x.py\n", NOT_PYTHON.format("it begins with #!/bin/sh"), ""),
        ("a.py", b"#!/usr/bin/env bash\nexec x y\n", NOT_PYTHON.format("it begins with #!/usr/bin/env bash"), ""),
        ("a.out", b"\x7fELF\x02\x01\0\0", NOT_PYTHON.format("an executable"), ""),
        ("notes.txt", b"buy some milk\n", NOT_PYTHON.format("line 1: invalid syntax"), "ok"),
        ("a.py", b"x = 1\nif x\n    pass\n", "line 2: expected ':'; correct it", "ok"),
        ("a.py", b"\tx\n  y\n", "unexpected indent; correct it", "ok"),
        ("a.py", "x = 'ö'\n".encode("latin-1"), "; save it as UTF-8", "ok"),
        ("a.py", "x = 1\n".encode("utf-16"), "UTF-16; save it as UTF-8", ""),
        ("a.py", "x = 1\n".encode("utf-16-be"), "UTF-16; save it as UTF-8", ""),
        ("train", "x = 1\n".encode("utf-16-le"), "UTF-16; save it as UTF-8", ""),
        ("a.ipynb", b'{"cells": []}\n', "a notebook, not a Python script; convert it with `jupyter nbconvert --to", ""),
        ("a.JSON", b'{"steps": 3}\n', "not a Python script (its name ends in .json); name a Python script", ""),
        ("a.yaml", b"train: 3\n", "not a Python script (its name ends in .yaml); name a Python script", ""),
        ("a.toml", b"steps = 3\n", "not a Python script (its name ends in .toml); name a Python script", ""),
        ("b.sh", b"ls\n", "not a Python script (its name ends in .sh); name a Python script", ""),
        ("a.py", b"x = 1\0\n", "null bytes; correct it", "ok"),
    ],
)
def test_a_program_that_python_cannot_run_is_refused(
    name: str, content: bytes, expected: str, expected_if_foreign: str, tmp_path: Path
) -> None:
    """--foreign-script accepts syntax errors, because the Python of a container may accept another syntax.

    If expected_if_foreign is empty, --foreign-script must give the message that --script gives.
    """
    file = tmp_path / name
    file.write_bytes(content)
    found = check("--script", file)
    assert found.startswith(f"usage script '{file}': ")
    assert expected in found
    assert (expected_if_foreign or expected) in check("--foreign-script", file)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train", b"print('no suffix')\n"),
        ("a.py", b""),
        ("a.txt", b"print('any other suffix')\n"),
        ("train.v2", b"print('a version')\n"),
        ("a.sh", b"#!/usr/bin/env python3\nprint('the shebang counts')\n"),
        ("a.sh", b"#!/bin/sh\n'''':'\nexec python3 \"$0\"\n'''\nprint('both')\n"),
        ("a.py", b"\xef\xbb\xbfprint('BOM')\r\n"),
        ("a.py", "# -*- coding: latin-1 -*-\nx = 'ö'\n".encode("latin-1")),
        ("a.py", b"#!/bin/sh\n'''':'\nexec python3 \"$0\"\n'''\nprint('both')\n"),
        ("a.py", b"from __future__ import annotations\nassert (1, 'warns')\n'\\d'\n"),
        ("a.py", b"x = " + b"-" * 5000 + b"1\n"),
    ],
)
def test_a_program_that_python_can_run_is_accepted(name: str, content: bytes, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    assert check("--script", file) == "ok"


def test_bytecode_a_zip_file_and_a_huge_file_are_accepted(tmp_path: Path) -> None:
    source = tmp_path / "a.py"
    source.write_text("print(1)\n")
    for name in ("a.pyc", "bytecode"):
        py_compile.compile(str(source), str(tmp_path / name))
    with (tmp_path / "program").open("wb") as file:
        file.write(b"#!/bin/sh\n")
        with zipfile.ZipFile(file, "w") as archive:
            archive.write(source, "__main__.py")
    (tmp_path / "huge.py").write_bytes(b"if\n" * 4_000_000)
    for name in ("a.pyc", "bytecode", "program", "huge.py"):
        assert check("--script", tmp_path / name) == "ok"


EDITABLE = """import sys
from importlib.machinery import ModuleSpec, PathFinder
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, ["elsewhere"]) if name == "editable" else None
sys.meta_path.append(Finder)
"""


@pytest.mark.parametrize(
    "name",
    [
        "plain", "package", "package.inner", "package.missing", "no_main", "no_main.inner", "missing", "missing.inner",
        "src", "src.a", "src.a.train", "src.a.missing", "src.package.train", "zipped", "zipped.inner.train",
        "editable", "editable.deep.train", "plain.inner", "__main__", "", ".", "a..b", ".plain", "os.path", "json.tool",
        "split.train", "split.inner.train",
    ],
)  # fmt: skip
def test_a_module_is_accepted_if_python_runs_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(EDITABLE)
    for file in (
        "plain.py", "package/__init__.py", "package/__main__.py", "package/inner.py", "no_main/__init__.py",
        "no_main/inner.py", "src/a/train.py", "src/package/__init__.py", "src/package/train.py",
        "elsewhere/editable/__init__.py", "elsewhere/editable/deep/train.py",
    ):  # fmt: skip
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    for directory in ("split", "site/split"):  # one package in two directories
        (tmp_path / directory / "inner").mkdir(parents=True)
        (tmp_path / directory / "__init__.py").write_text(
            "__path__ = __import__('pkgutil').extend_path(__path__, __name__)"
        )
    for file in ("train.py", "inner/train.py"):
        (tmp_path / "site/split" / file).touch()
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("zipped/__main__.py", "")
        archive.writestr("zipped/inner/train.py", "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/site:{tmp_path}/archive.zip")
    done = subprocess.run([sys.executable, "-m", name], input="{}", capture_output=True, text=True)
    assert (check("--module", name) == "ok") == (done.returncode == 0), done.stderr
