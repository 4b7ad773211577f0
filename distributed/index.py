"""The directories in which this user has started runs and job lists, so that they are found from any directory.

The index is a file in the user's state directory with one absolute path per line. Launchers append the directory of a
new run if the index lacks it; programs of job lists, the directory of the list. A directory that does not exist here is
skipped: another machine with the same home may have it. Standard library only.
"""

from __future__ import annotations

import contextlib
import os

from distributed.files import write_file
from distributed.trust import PRIVATE_DIRECTORY, foreign_ancestor, make_directories, read_bytes, regular_file

MOST = 1000  # directories in the file; above this number, the newer half is kept


def path() -> str:
    base = os.environ.get("XDG_STATE_HOME", "")
    base = base if base.startswith("/") else os.path.expanduser("~/.local/state")
    return os.path.join(base, "muster", "directories")


def add(directory: str | os.PathLike[str]) -> None:
    """Append a directory. Does nothing if the index cannot be written, or if another user could have written it."""
    line, index = os.path.realpath(directory), path()
    with contextlib.suppress(OSError):
        make_directories(os.path.dirname(index), PRIVATE_DIRECTORY)
        known = _lines(index)
        if line in known or not line.isprintable():
            return
        if len(known) >= MOST:
            write_file(index, "".join(f"{one}\n" for one in [*known[-MOST // 2 :], line]))
            return
        with open(index, "ab", opener=regular_file) as file:
            file.write(f"{line}\n".encode())


def directories() -> list[str]:
    """The directories that exist here, the newest first; empty if another user could have written the index."""
    with contextlib.suppress(OSError):
        return [one for one in dict.fromkeys(reversed(_lines(path()))) if one.startswith("/") and os.path.isdir(one)]
    return []


def _lines(index: str) -> list[str]:
    """Raises OSError if another user could have written the index."""
    if problem := foreign_ancestor(os.path.dirname(index)):
        raise PermissionError(problem)
    try:
        return read_bytes(index, own=True).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
