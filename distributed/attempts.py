"""The directories of the attempts of a run.

    logs/train-20250102-030405-9f3a/
        attempts/<n>/     errors/  ranks/  node_<name>.log  verdict.json  ... of each attempt
        newest            -> attempts/2
        node_<name>.log   -> newest/node_<name>.log  ...

Other files in the run directory belong to the whole run, or to supervisors, which may stay for several attempts. Users,
agents and ranks go through the links; other programs use attempts/<n>/. The launcher and each supervisor call make(),
because a node may have a run directory of its own. A directory without attempts/ is that of a job of a list, or of a
run of version 0.1.0: its only or newest attempt has its files in the directory itself. Standard library only.
"""

from __future__ import annotations

import os

from distributed.trust import PRIVATE_DIRECTORY, make_directories

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

NAME, NEWEST = "attempts", "newest"
PARTS = ("errors", "ranks")  # directories
LAST = 10**9 - 1  # largest number of an attempt


def path_of(run: str | Path, number: str) -> str:
    return os.path.join(run, NAME, number)


def numbers(run: str | Path) -> list[int]:
    """The numbers of the attempts of a run, the newest last; empty without attempts/."""
    try:
        names = os.listdir(os.path.join(run, NAME))
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal() and len(name) <= len(str(LAST)))


def newest(run: str | Path) -> str:
    """The directory with the files of the newest attempt."""
    found = numbers(run)
    return path_of(run, str(found[-1])) if found else os.fspath(run)


def directories(run: Path) -> list[Path]:
    """The directories of all attempts of a run, those of the newest attempt last."""
    earlier = sorted(run.glob("attempt_*"), key=lambda path: (len(path.name), path.name))
    return [run / NAME / str(number) for number in numbers(run)] or [*earlier, run]


def make(run: str | Path, number: str, names: Iterable[str] = ()) -> str:
    """Make the directory of an attempt, if it does not exist. If it is the newest, point the links to it.

    names: further files of the attempt to which the run directory has links. Returns the path. Raises OSError.
    """
    directory = path_of(run, number)
    for name in PARTS:
        make_directories(os.path.join(directory, name), PRIVATE_DIRECTORY)
    if directory == newest(run):  # a late supervisor of an earlier attempt must not lead ranks of this one astray
        point(os.path.join(run, NEWEST), os.path.join(NAME, number))
    for name in (*PARTS, *names):
        point(os.path.join(run, name), os.path.join(NEWEST, name))
    return directory


def point(link: str, target: str) -> None:
    """Make a symbolic link, or point an existing one to another target. Raises OSError."""
    if os.path.islink(link) and os.readlink(link) == target:
        return
    temporary = f"{link}.{os.urandom(4).hex()}"
    os.symlink(target, temporary)
    try:
        os.replace(temporary, link)
    except OSError:
        os.unlink(temporary)
        raise
