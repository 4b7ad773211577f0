"""How much memory, disk and computing time a process gets here, and the limits on what it may open."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed.host.system import PROC, SYS, read


@dataclass(frozen=True)
class Memory:
    total: int  # bytes, as all of these
    available: int
    limit: int | None = None  # of the container or job


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
    affinity: int  # that this process may run on
    quota: float | None = None  # of the container or job, in cores
    load: float = 0.0  # mean number of running processes in the last minute

    @property
    def usable(self) -> float:
        """In cores; with a quota perhaps less than one."""
        return min(self.affinity, self.quota or self.affinity)


@dataclass(frozen=True)
class Limits:
    """None: no limit."""

    open_files: int | None
    locked_memory: int | None  # bytes
    processes: int | None
    infiniband: bool = False


def read_memory(proc: Path = PROC, sys_directory: Path = SYS) -> Memory:
    table = {name: int(number) * 1024 for name, number in re.findall(r"(\w+):\s+(\d+) kB", read(proc / "meminfo"))}
    total = table.get("MemTotal", 0)
    limit = cgroup_limit("memory", ("memory.max", "memory.limit_in_bytes"), proc, sys_directory)
    return Memory(
        total=total,
        available=table.get("MemAvailable", 0),
        limit=limit if limit is not None and limit < total else None,
    )


def cgroup_directories(controller: str, proc: Path, sys_directory: Path) -> Iterator[Path]:
    """The control groups that bind this process: its own and those above it.

    In /proc/self/cgroup a line is `0::/path` for version 2, `4:memory:/path` for version 1.
    """
    for line in read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = sys_directory / "fs/cgroup" / (controller if controllers else "")
        own = root / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def cgroup_limit(controller: str, files: Sequence[str], proc: Path, sys_directory: Path) -> int | None:
    """The smallest number in these files; None when all say max or -1, or are not there."""
    texts = [read(folder / name) for folder in cgroup_directories(controller, proc, sys_directory) for name in files]
    return min((int(text) for text in texts if text.isdigit()), default=None)


def cpu_quota(proc: Path, sys_directory: Path) -> float | None:
    """In cores: quota / period, both in microseconds."""
    quotas = []
    for folder in cgroup_directories("cpu", proc, sys_directory):
        text = read(folder / "cpu.max") or f"{read(folder / 'cpu.cfs_quota_us')} {read(folder / 'cpu.cfs_period_us')}"
        if share := re.fullmatch(r"(\d+) (\d+)", text):
            quotas.append(int(share[1]) / int(share[2]))
    return min(quotas, default=None)


def read_space(purpose: str, path: Path) -> Space:
    """Room in a folder, or where it would be made."""
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    room = os.statvfs(there)
    return Space(
        purpose=purpose,
        path=str(path),
        total=room.f_blocks * room.f_frsize,
        free=room.f_bavail * room.f_frsize,
        inodes_free=room.f_files == 0 or room.f_favail > 0,
        writable=os.access(there, os.W_OK | os.X_OK),
    )


def read_cores(proc: Path = PROC, sys_directory: Path = SYS) -> Cores:
    return Cores(
        present=os.cpu_count() or 1,
        affinity=len(os.sched_getaffinity(0)),
        quota=cpu_quota(proc, sys_directory),
        load=os.getloadavg()[0],
    )


def read_limits(proc: Path = PROC, sys_directory: Path = SYS) -> Limits:
    of_user = bounded(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    of_group = cgroup_limit("pids", ("pids.max",), proc, sys_directory)
    return Limits(
        open_files=bounded(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        locked_memory=bounded(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        processes=min((limit for limit in (of_user, of_group) if limit is not None), default=None),
        infiniband=any(sys_directory.glob("class/infiniband/*")),
    )


def bounded(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit
