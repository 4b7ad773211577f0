"""Which processes belong to a run, or to one task of it: what its launcher has put into their environment tells.

Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path


def marked(mark: Set[bytes], proc: Path) -> Iterator[Path]:
    """The folders of all processes whose environment has each of these NAME=VALUE."""
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if mark <= set((folder / "environ").read_bytes().split(b"\0")):
                yield folder


def family(mark: Set[bytes], proc: Path = Path("/proc")) -> list[int]:
    """Processes whose environment has this mark, but for this one and those that it comes from."""
    ours = set(ancestors(os.getpid(), proc))
    return [pid for folder in marked(mark, proc) if (pid := int(folder.name)) not in ours]


def ancestors(pid: int, proc: Path) -> Iterator[int]:
    while pid:
        yield pid
        pid = int((proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1])
