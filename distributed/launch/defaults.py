"""Read muster.toml: defaults of `muster run` and `muster train`, of a user and of a project.

usage: module.py launch.defaults FILE...

Prints, for each default, an option, its value and the file, each ended by a NUL byte; then `ok`. Values of later files
replace those of earlier ones. If a file is wrong, prints `usage` and a message instead.

Standard library only.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence

from distributed.trust import one_line, read_text

OPTIONS = {"on": "--on", "nproc": "--nproc", "python": "--python", "notify": "--notify"}
TABLES = {
    "env": None,  # any name of a variable
    "slurm": (
        "time", "partition", "account", "qos", "mem", "gpus-per-node", "constraint", "reservation", "job-name",
    ),
}  # fmt: skip


class WrongFile(Exception):
    """A muster.toml is wrong. The message names the file and the key."""


def defaults_of(path: str) -> dict[str, str]:
    """The defaults in a file, by option; those of variables by `--env NAME`. Raises WrongFile."""
    found = {}
    for key, value in _parse(path).items():
        _check_key(path, key, [*OPTIONS, *TABLES])
        if key in OPTIONS:
            found[OPTIONS[key]] = os.path.expanduser(_text(path, key, value))
            continue
        if not isinstance(value, dict):
            raise WrongFile(f"{path}: {key}: expected a table, as in [{key}]")
        for name, entry in value.items():
            if known := TABLES[key]:
                _check_key(path, name, known, f"{key}.")
            option = f"--{name}" if known else f"--env {name}"
            found[option] = _text(path, f"{key}.{name}", entry)
    return found


def _parse(path: str) -> Mapping[str, object]:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        raise WrongFile(f"{path}: only Python 3.11 or newer can read it; choose one with --python") from None
    try:
        return tomllib.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise WrongFile(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _check_key(path: str, key: str, known: Iterable[str], prefix: str = "") -> None:
    if key not in known:
        [nearest] = difflib.get_close_matches(key, known, 1, 0)
        raise WrongFile(f"{path}: {prefix}{key}: unknown key; the nearest known one is {prefix}{nearest}")


def _text(path: str, key: str, value: object) -> str:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not (is_number or isinstance(value, str)) or "\0" in str(value) or (value == "" and not key.startswith("env.")):
        raise WrongFile(f"{path}: {key}: expected text or a whole number")
    return str(value)


def main(arguments: Sequence[str]) -> None:
    """Print the defaults in these files."""
    found: dict[str, tuple[str, str]] = {}
    try:
        for path in arguments:
            found |= {option: (value, path) for option, value in defaults_of(path).items()}
    except WrongFile as error:
        sys.stdout.write(f"usage\0{one_line(str(error))}\0")
        return
    for option, (value, path) in found.items():
        sys.stdout.write(f"{option}\0{value}\0{path}\0")
    sys.stdout.write("ok\0")
