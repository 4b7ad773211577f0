"""Memory, disk space and CPU cores of this machine, and the part of them that this process may use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distributed.host.system import PROC, SYS, read


@dataclass(frozen=True)
class Memory:
    total: int  # bytes, like the other fields
    available: int
    limit: int | None = None  # of the container or job, less than total; None: no limit


@dataclass(frozen=True)
class Space:
    purpose: str
    path: str
    total: int  # bytes
    free: int  # bytes
    inodes_free: bool = True
    writable: bool = True


@dataclass(frozen=True)
class Cores:
    present: int
    affinity: int  # number of cores on which this process may run
    quota: float | None = None  # of the container or job, in cores

    @property
    def usable(self) -> float:
        """Number of cores; with a quota, it may be less than 1."""
        return min(self.affinity, self.quota or self.affinity)


def read_memory(proc: Path = PROC, sys_directory: Path = SYS) -> Memory:
    table = {name: int(number) * 1024 for name, number in re.findall(r"(\w+):\s+(\d+) kB", read(proc / "meminfo"))}
    total = table.get("MemTotal", 0)
    files = ("memory.max", "memory.limit_in_bytes")  # of cgroup version 2 and 1; `max` or -1: no limit
    texts = [read(group / name) for group in cgroup_directories("memory", proc, sys_directory) for name in files]
    limit = min((int(text) for text in texts if text.isdigit() and int(text) < total), default=None)
    return Memory(total, table.get("MemAvailable", 0), limit)


def cgroup_directories(controller: str, proc: Path, sys_directory: Path) -> Iterator[Path]:
    """The control groups that limit this process: its own groups and their parents.

    A line of /proc/self/cgroup is `0::/path` for version 2, `4:memory:/path` for version 1.
    """
    for line in read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = sys_directory / "fs/cgroup" / (controller if controllers else "")
        group = root / path.lstrip("/")
        yield from (directory for directory in (group, *group.parents) if directory.is_relative_to(root))


def cpu_quota(proc: Path, sys_directory: Path) -> float | None:
    """Number of cores: quota / period, both in microseconds; None: no quota."""
    quotas = []
    for group in cgroup_directories("cpu", proc, sys_directory):
        text = read(group / "cpu.max") or f"{read(group / 'cpu.cfs_quota_us')} {read(group / 'cpu.cfs_period_us')}"
        if share := re.fullmatch(r"(\d+) (\d+)", text):
            quotas.append(int(share[1]) / int(share[2]))
    return min(quotas, default=None)


def read_space(purpose: str, path: Path) -> Space:
    """Space in a directory, or in the nearest existing parent."""
    existing = next(directory for directory in (path, *path.parents) if directory.exists())
    space = os.statvfs(existing)
    return Space(
        purpose=purpose,
        path=str(path),
        total=space.f_blocks * space.f_frsize,
        free=space.f_bavail * space.f_frsize,
        inodes_free=space.f_files == 0 or space.f_favail > 0,
        writable=os.access(existing, os.W_OK | os.X_OK),
    )


def write_error(directory: str | os.PathLike[str], size: int = 1 << 16) -> str:
    """Why a directory, or the nearest one above it that exists, cannot take a file of this size; "" if it can."""
    import tempfile

    path = os.path.abspath(directory)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def read_cores(proc: Path = PROC, sys_directory: Path = SYS) -> Cores:
    return Cores(os.cpu_count() or 1, len(os.sched_getaffinity(0)), cpu_quota(proc, sys_directory))
