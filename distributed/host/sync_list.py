"""The files that --sync copies: print their names as input of `rsync --from0 --files-from=-`.

usage: module.py host.sync_list DIRECTORY

In a git checkout, these are the tracked files, and the untracked files that git does not ignore and that are not below
RESULTS. Submodules and nested checkouts are included. In a directory outside of git checkouts, these are all entries
except RESULTS and VENV: rsync copies directories with their contents, and gets --exclude=.git. The same holds for an
installed Muster, because git may ignore the environment that contains it.

secrets_warning() says which untracked files look like secrets. They are copied nevertheless.

Standard library only.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from distributed.trust import GIT, git_directory, git_environment, printable

RESULTS = (b"logs", b"checkpoints", b"experiments")
VENV = b".venv"
MARKER = b".muster-"  # prefix of the names of files that Muster creates to find out whether a directory is shared
# Names of files that look like secrets; the files of the second expression only if their mode is 0600 or 0400.
SECRET = re.compile(
    rb"\.env(?!\.(example|sample|template|dist)$)(\..*|rc)?|id_(rsa|dsa|ecdsa|ed25519)(_sk)?|.*\.(key|p12|pfx)"
    rb"|[._]netrc|\.?credentials(\.(json|ya?ml|ini|toml|txt))?|\.git-credentials|\.npmrc|\.pypirc|\.pgpass|kubeconfig",
    re.IGNORECASE,
)
SECRET_IF_PRIVATE = re.compile(rb".*[_.-]env|.*\.pem|.*(secret|token|password).*", re.IGNORECASE)


class SyncError(Exception):
    """git cannot list the files of a checkout. The message states problem and remedy."""


def names_of(directory: str) -> dict[bytes, bool]:
    """The names of the files to copy, relative to the directory, each with whether git tracks the file.

    Raises SyncError and OSError.
    """
    path = os.fsencode(directory)
    if git_directory(path) and not path.endswith(b"/muster/_kit"):
        return dict(names_in_checkout(path))
    return {name: False for name in os.listdir(path) if name != VENV and not is_result(name)}


def secrets_warning(directory: str, names: Mapping[bytes, bool]) -> str:
    """A warning about the untracked files among names_of(directory) that look like secrets; "" if none does.

    Raises SyncError.
    """
    path = os.fsencode(directory)
    untracked = [os.path.join(path, name) for name, is_tracked in names.items() if not is_tracked]
    found = sorted(os.path.relpath(file, path) for one in untracked for file in _files_in(one) if _looks_secret(file))
    if not found:
        return ""
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    remedy = "list such files in .gitignore" if git_directory(path) else "move such files to another directory"
    return f"{printable(os.fsdecode(b', '.join(found[:3])))}{more}: may be secret and will be copied; {remedy}"


def _walk(top: bytes) -> Iterator[tuple[bytes, list[bytes], list[bytes]]]:
    """Like os.walk(). Raises SyncError if it calls itself too often, as it does before Python 3.12."""
    try:
        yield from os.walk(top)
    except RecursionError:
        problem = "directories are nested too deeply below it; move them, or list them in .gitignore of a git checkout"
        raise SyncError(f"{printable(os.fsdecode(top))}: {problem}") from None


def _files_in(path: bytes) -> Iterator[bytes]:
    """A file itself, or all files below a directory, as rsync copies it."""
    yield path
    if not os.path.islink(path):
        for directory, _, files in _walk(path):
            yield from (os.path.join(directory, file) for file in files)


def _looks_secret(path: bytes) -> bool:
    name = os.path.basename(path)
    if SECRET.fullmatch(name):
        return os.path.isfile(path)
    return bool(SECRET_IF_PRIVATE.fullmatch(name)) and os.path.isfile(path) and not os.stat(path).st_mode & 0o177


def file_list(names: Iterable[bytes]) -> bytes:
    """The input of `rsync --from0 --files-from=-`.

    Each name starts with ./, because rsync ignores a name that starts with # or ;.
    """
    return b"".join(b"./" + name + b"\0" for name in names)


def directory_list(directory: str, names: Mapping[bytes, bool]) -> bytes:
    """The directories of names_of(directory), each after those above it, as owners.MAKE_BELOW reads them.

    Raises SyncError.
    """
    path, found = os.path.join(os.fsencode(directory), b""), set()
    for name, is_tracked in names.items():
        if not is_tracked and not os.path.islink(path + name) and name != b".git":  # git tracks no directory
            for at, below, _ in _walk(path + name):
                below[:] = set(below) - {b".git"}
                found.add(at[len(path) :])
        while (name := os.path.dirname(name)) and name not in found:
            found.add(name)
    return b".\0" + file_list(sorted(found))


def is_result(name: bytes) -> bool:
    return name.startswith(MARKER) or name.partition(b"/")[0] in RESULTS


def names_in_checkout(root: bytes, prefix: bytes = b"") -> Iterator[tuple[bytes, bool]]:
    """The names of the files to copy from root/prefix, which is in a checkout, and whether git tracks them.

    Some occur twice.
    """
    directory = os.path.join(root, prefix)

    @functools.cache
    def is_behind_link(parent: bytes) -> bool:  # git treats files below a symbolic link as deleted
        return os.path.realpath(os.path.join(directory, parent)) != os.path.join(os.path.realpath(directory), parent)

    for option in ("--cached", "--others"):
        for name in list_files(directory, option):
            path = os.path.join(directory, name)
            if (option == "--others" and not prefix and is_result(name)) or not os.path.lexists(path):
                continue
            if (parent := os.path.dirname(name.rstrip(b"/"))) and is_behind_link(parent):
                continue
            if os.path.islink(path) or not os.path.isdir(path):
                yield prefix + name, option == "--cached"
            elif os.path.lexists(os.path.join(path, b".git")):  # a submodule or a nested checkout
                yield from names_in_checkout(root, prefix + name.rstrip(b"/") + b"/")


def list_files(directory: bytes, option: str) -> list[bytes]:
    """The output of `git ls-files`, run without GIT_DIR and similar variables of git hooks. Raises SyncError."""
    where, subject = os.fsdecode(directory), os.fsdecode(git_directory(directory))
    call = [*GIT, "-c", "submodule.recurse=false", "ls-files", "-z", option, "--exclude-standard"]
    try:
        done = subprocess.run(
            call, cwd=directory, env=git_environment(LC_ALL="C"), stdin=subprocess.DEVNULL, capture_output=True
        )
    except FileNotFoundError as error:
        if error.filename != call[0]:
            raise
        raise SyncError(f"{subject}: this is a git checkout, but git is not installed; install it") from None
    if done.returncode:
        text = "; ".join(line.strip() for line in os.fsdecode(done.stderr).splitlines() if line.strip())
        remedy = "" if "safe.directory" in text else f"; repair or remove it: git status must work in {where}"
        raise SyncError(f"{subject}: {text}{remedy}")
    return done.stdout.split(b"\0")[:-1]


def main(arguments: Sequence[str]) -> None:
    """Run the program."""
    try:
        names = names_of(arguments[0])
    except SyncError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"{os.fsdecode(error.filename)}: {error.strerror}")
    sys.stdout.buffer.write(file_list(names))
