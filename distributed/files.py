"""Atomic writes, file locks, and Muster's own directory.

Standard library only. The supervisor imports this module before every command, so json and fcntl are imported on use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Collection

from distributed.trust import PRIVATE, foreign, parse_json, read_bytes, regular_file

KIT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PUBLIC = os.path.join(KIT, "src")  # has the package `muster`; the last entry of sys.path of ranks


def version() -> str:
    """The version of Muster."""
    with open(os.path.join(KIT, "VERSION")) as file:
        return file.read().strip()


def command_of(verb: str, program: str = "") -> list[str]:
    """The start of a command line that calls a program of Muster: by verb if `muster` is on the PATH, else by path.

    program: the name of the running program in messages; if `muster` has called it, the verb is used too.
    """
    import shutil

    found = shutil.which("muster")
    is_this = found and os.path.realpath(found) == os.path.realpath(f"{KIT}/scripts/muster")
    return ["muster", verb] if is_this or program.startswith("muster ") else [f"{KIT}/scripts/{verb}.sh"]


def removed(words: Collection[str]) -> str:
    """The message that refuses the first of these options, keys or subcommands that was removed; "" if none was."""
    with open(os.path.join(KIT, "scripts/lib/removed_words.list")) as file:
        return next((line.strip() for line in file if line.partition(": ")[0] in words), "")


def write_file(path: str | os.PathLike[str], content: str | bytes, mode: int = PRIVATE) -> None:
    """Write a temporary file and rename it to `path`: readers see the old or the new content. Raises OSError.

    A symbolic link at `path` is replaced: resolve a path that the user has given. mode: restricted by the umask.
    """
    temporary = f"{os.fspath(path)}.{os.urandom(4).hex()}"
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException:  # also that of a signal handler
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def file_time(directory: str | os.PathLike[str]) -> float:
    """The Unix time on the clock that stamps the files of a directory: that of a file server may be another."""
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def user_file(path: str | os.PathLike[str]) -> str:
    """The path of a file that a user names: where a symbolic link leads, unless another user has made the link."""
    follows = not os.path.islink(path) or os.lstat(path).st_uid == os.geteuid()
    return os.path.realpath(path) if follows else os.fspath(path)


def foreign_directory(path: str | os.PathLike[str]) -> str:
    """Why this user must not use a directory, or a link of another user to one; "" if it may, or if there is none."""
    path = user_file(path)
    return foreign(path, os.lstat(path)) if os.path.lexists(path) else ""


def write_json(path: str | os.PathLike[str], value: object, mode: int = PRIVATE) -> None:
    """Write indented, sorted JSON with write_file(). Raises OSError."""
    write_file(path, to_json(value), mode)


def to_json(value: object) -> bytes:
    """Return indented, sorted JSON.

    A string from os.fsdecode() may stand for bytes that are not UTF-8. They are written as escapes, and os.fsencode()
    restores them from the string that is read back.
    """
    import json

    try:
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2, sort_keys=True).encode()
    return text + b"\n"


def read_json(path: str | os.PathLike[str]) -> dict[str, object]:
    """Return the JSON object in a file; {} if the file is missing, unreadable or not a JSON object."""
    try:
        value = parse_json(read_bytes(path))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def try_lock(file: int, exclusive: bool = True, seconds: float = 0.0, required: bool = False) -> bool:
    """Lock a file. Returns False if another process still has the lock after `seconds`.

    The lock lasts until all copies of this descriptor are closed. On a file system without locks, OSError is
    raised if the lock is required; otherwise nothing is locked, and the result is True.
    """
    import fcntl

    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)
            continue
        except OSError as error:
            if required or error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):
                raise
        return True


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Whether a process holds an exclusive lock on a file; False without a file. Raises OSError if that is unknown."""
    try:
        with open(path, "rb", opener=regular_file) as file:
            return not try_lock(file.fileno(), exclusive=False, required=True)
    except FileNotFoundError:
        return False
