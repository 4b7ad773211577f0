"""Which processes belong to a run, or to one command of it: the environment that their launcher gave them shows it.

Also what ties a process to its parent. The supervisor starts with this, so it imports nothing that costs milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Set

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
DEAD = b"ZX"  # states of a process that has ended; one that process 1 never reaps stays a zombie


def of_run(run: str, node: str) -> frozenset[bytes]:
    """The entries that every process of this run on this node has in its environment."""
    return frozenset((b"MUSTER_RUN_DIR=" + os.fsencode(run), b"MUSTER_NODE=" + os.fsencode(node)))


def marked(mark: Set[bytes], pids: Iterable[int], proc: str = "/proc") -> Iterator[int]:
    """Those of these processes whose environment has each of these NAME=VALUE."""
    for pid in pids:
        try:
            with open(f"{proc}/{pid}/environ", "rb", buffering=0) as file:
                if mark <= set(file.readall().split(b"\0")):
                    yield pid
        except OSError:  # it has ended, or belongs to another user
            pass


def pids(proc: str = "/proc") -> list[int]:
    """Of all processes."""
    return [int(name) for name in os.listdir(proc) if name.isdecimal()]


class Process:
    """One line of the table of processes."""

    __slots__ = ("parent", "session", "start", "state")

    def __init__(self, stat: bytes) -> None:
        """stat: the content of /proc/PID/stat."""
        fields = stat.rpartition(b")")[2].split()
        self.state, self.parent, self.session = fields[0], int(fields[1]), int(fields[3])
        self.start = int(fields[19])  # clock ticks since the machine was started

    @property
    def alive(self) -> bool:
        return self.state not in DEAD


def process(pid: int, proc: str = "/proc") -> Process | None:
    """None when there is no such process."""
    try:
        with open(f"{proc}/{pid}/stat", "rb", buffering=0) as file:
            return Process(file.readall())
    except OSError:
        return None


def since(pid: int) -> int | None:
    """When this process was started, in clock ticks since the machine was; None when there is none that is alive."""
    found = process(pid)
    return found.start if found and found.alive else None


def table(proc: str = "/proc") -> dict[int, Process]:
    """All processes, by their id."""
    return {pid: found for pid in pids(proc) if (found := process(pid, proc))}


def ancestors(pid: int, processes: dict[int, Process]) -> Iterator[int]:
    """The process, its parent, and so on."""
    while pid in processes:
        yield pid
        pid = processes[pid].parent


def descendants(pid: int, processes: dict[int, Process]) -> set[int]:
    """The children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for child, found in processes.items():
        children.setdefault(found.parent, []).append(child)
    found_all: set[int] = set()
    left = [pid]
    while left:
        new = [child for child in children.get(left.pop(), []) if child not in found_all]
        found_all.update(new)
        left += new
    return found_all


def living(
    mark: Set[bytes], sessions: Collection[int] = (), root: int = 0, but: Collection[int] = (), proc: str = "/proc"
) -> list[int]:
    """The processes that carry this mark, are in one of these sessions, or descend from root; without those in `but`,
    this process, its ancestors and zombies."""
    processes = table(proc)
    kept_out = {*but, *ancestors(os.getpid(), processes)}
    below = descendants(root, processes) if root else set()
    candidates = [pid for pid, found in processes.items() if found.alive and pid not in kept_out]
    certain = {pid for pid in candidates if pid in below or processes[pid].session in sessions}
    return sorted(certain.union(marked(mark, (pid for pid in candidates if pid not in certain), proc)))


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """This signal for this process when its parent has died; when that was a moment ago, end at once."""
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(128 + number)


def adopt_orphans(adopt: bool = True) -> bool:
    """Whether descendants whose parents end become children of this process, which can then find and reap them."""
    return prctl(PR_SET_CHILD_SUBREAPER, adopt)


def prctl(option: int, value: int) -> bool:
    """See prctl(2). False where there is no libc to be called: the environment mark is left."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        return ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0
    return False
