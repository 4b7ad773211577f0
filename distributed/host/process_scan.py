"""Find the processes on this node that belong to a run, or to one task of a run, by their environment variables.

The module also has prctl(2) calls that tie a process to its parent. Every supervisor imports this module before
starting a command, so the module imports nothing that takes milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Set

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
# States in /proc/PID/stat of a process that has exited. A zombie counts as dead, because an orphan stays a zombie if
# process 1 does not reap it.
DEAD = b"ZX"


def run_environment(run: str, node: str) -> frozenset[bytes]:
    """The NAME=VALUE entries that every process of this run on this node has in its environment."""
    return frozenset((b"MUSTER_RUN_DIR=" + os.fsencode(run), b"MUSTER_NODE=" + os.fsencode(node)))


def environment_of(pid: int, proc: str = "/proc") -> list[bytes]:
    """The NAME=VALUE entries of a process; [] if it has exited, or belongs to another user."""
    with contextlib.suppress(OSError), open(f"{proc}/{pid}/environ", "rb", buffering=0) as file:
        return file.readall().split(b"\0")
    return []


def with_environment(entries: Set[bytes], pids: Iterable[int], proc: str = "/proc") -> Iterator[int]:
    """Yield the ids of this user's processes that have all these NAME=VALUE entries in their environment."""
    return (pid for pid in pids if entries <= set(environment_of(pid, proc)) and _is_own(pid, proc))


def _is_own(pid: int, proc: str) -> bool:
    """Whether a process has the user id of this one: root can read the environments of all users.

    All its user ids count: a set-user-ID program keeps that of the user who has started it.
    """
    with contextlib.suppress(OSError), open(f"{proc}/{pid}/status", "rb") as file:
        ids = next((line for line in file if line.startswith(b"Uid:")), b"").split()[1:]
        return set(ids) == {b"%d" % os.geteuid()}
    return False


def pids(proc: str = "/proc") -> list[int]:
    return [int(name) for name in os.listdir(proc) if name.isdecimal()]


class ProcessStat:
    """Fields of /proc/PID/stat."""

    __slots__ = ("parent", "session", "start", "state")

    def __init__(self, stat: bytes) -> None:
        """stat: the content of /proc/PID/stat."""
        fields = stat.rpartition(b")")[2].split()
        self.state, self.parent, self.session = fields[0], int(fields[1]), int(fields[3])
        self.start = int(fields[19])  # clock ticks since boot

    @property
    def alive(self) -> bool:
        return self.state not in DEAD


def process(pid: int) -> ProcessStat | None:
    """Read /proc/PID/stat; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return ProcessStat(file.readall())
    except OSError:
        return None


def start_time(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None if there is no such process."""
    found = process(pid)
    return found.start if found and found.alive else None


def identity(pid: int) -> dict[str, int]:
    """Process id and start time, which together identify a process although ids are reused."""
    return {"pid": pid, "start_time": start_time(pid) or 0}


def live_pid(facts: object) -> int:
    """The id of the process for which identity() returned `facts`; 0 if it has exited, or `facts` is no identity."""
    pid = facts.get("pid") if isinstance(facts, dict) else None
    if not isinstance(pid, int):
        return 0
    started = start_time(pid)
    return pid if started and facts == {"pid": pid, "start_time": started} else 0


def table() -> dict[int, ProcessStat]:
    """All processes, by process id."""
    return {pid: stat for pid in pids() if (stat := process(pid))}


def ancestors(pid: int, processes: dict[int, ProcessStat]) -> Iterator[int]:
    """The process, its parent, and so on."""
    while pid in processes:
        yield pid
        pid = processes[pid].parent


def descendants(pid: int) -> list[int]:
    """The children of a process, their children, and so on; empty if the kernel does not list them."""
    found = [pid]
    for parent in found:  # grows in this loop
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    found += map(int, file.read().split())
    return found[1:]


def live_processes(
    entries: Set[bytes], sessions: Collection[int] = (), root: int = 0, exclude: Collection[int] = ()
) -> list[int]:
    """Processes that have these environment entries, are in one of these sessions, or descend from process `root`.

    Zombies, this process, its ancestors and the processes in `exclude` are left out. If none is found, the processes
    are scanned again: one that is forked during a scan, or that is calling execve(2), may be missing in it.
    """
    return _scan(entries, sessions, root, exclude) or _scan(entries, sessions, root, exclude)


def _scan(entries: Set[bytes], sessions: Collection[int], root: int, exclude: Collection[int]) -> list[int]:
    processes = table()
    excluded = {*exclude, *ancestors(os.getpid(), processes)}
    candidates = [pid for pid, stat in processes.items() if stat.alive and pid not in excluded]
    known = {pid for pid in candidates if root in ancestors(pid, processes) or processes[pid].session in sessions}
    return sorted(known.union(with_environment(entries, (pid for pid in candidates if pid not in known))))


def ranks(pids: Iterable[int], session: int) -> list[int]:
    """The processes among `pids` that an agent in this session started as ranks.

    Their environment has TORCHELASTIC_RUN_ID, which an agent sets only for ranks; the processes that a rank starts
    inherit it. A forked rank calls worker._set_command_line(), which also sets the environment that /proc shows. If the
    kernel refuses that call, /proc shows the environment of the agent, and the rank is not found.
    """
    processes = table()
    mark = b"TORCHELASTIC_RUN_ID="
    started = {pid for pid in pids if pid in processes and any(one.startswith(mark) for one in environment_of(pid))}
    parents = {pid for pid, stat in processes.items() if stat.session == session and pid not in started}
    return sorted(pid for pid in started if processes[pid].parent in parents)


def topmost(pids: Collection[int]) -> list[int]:
    """The processes among `pids` that descend from no other of them."""
    processes = table()
    return [pid for pid in pids if not any(other in pids for other in ancestors(pid, processes) if other != pid)]


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; False if there is no such process."""
    with contextlib.suppress(OSError, StopIteration), open(f"/proc/{pid}/status") as status:
        caught = next(line for line in status if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    return False


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent dies; exit at once if the parent is already dead."""
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(128 + number)


def adopt_orphans(adopt: bool = True) -> bool:
    """Make this process the parent of its orphaned descendants; adopt=False ends that. Returns whether it succeeded."""
    return prctl(PR_SET_CHILD_SUBREAPER, adopt)


def prctl(option: int, value: int) -> bool:
    """See prctl(2). Returns False if the call fails, or libc cannot be called."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        return ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0
    return False
