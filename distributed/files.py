"""Files that appear completely or not at all, their locks, and the directory of the kit.

Standard library only. The supervisor imports this before every command, so it imports little, and that late.
"""

from __future__ import annotations

import contextlib
import errno
import os

KIT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file completely or not at all: a reader sees the old one or the new one. Raises OSError."""
    beside = f"{os.fspath(path)}.{os.urandom(4).hex()}"
    try:
        with open(beside, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def write_json(path: str | os.PathLike[str], value: object) -> None:
    """Bytes that are not UTF-8 are kept as escapes (os.fsencode gives them back). Raises OSError."""
    write_file(path, to_json(value))


def to_json(value: object) -> bytes:
    import json

    try:
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2, sort_keys=True).encode()
    return text + b"\n"


def read_json(path: str | os.PathLike[str]) -> dict[str, object]:
    """The object in a file; empty when there is none that can be read."""
    import json

    try:
        with open(path, "rb") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def try_lock(file: int, exclusive: bool = True) -> bool:
    """Lock a file until every process that has this descriptor has closed it. False: another one holds the lock."""
    import fcntl

    try:
        fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):  # a file system without locks
            raise
    return True
