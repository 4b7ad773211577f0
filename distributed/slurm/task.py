"""One task of a job step, guarded on its node: a rank, or the agent that starts all ranks of a node.

srun starts this process. It forks: the child becomes the rank, and the parent, which knows nothing of PyTorch, keeps
what the rank says where a run keeps it, passes on what the console shows, and reports how it ended. It speaks to
distributed/slurm/srun.py, on the other side, through its standard output and input:

    up     lines of the console, and between them reports: REPORT, one JSON object, a line break
    down   stop (TERM, and KILL after the grace), kill, or an empty line: the launcher is there

When its input ends or falls silent, or SLURM's own daemon has died, the launcher is gone: that means stop. SLURM
signals every process of a task: so the parent leaves signals to the child. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO, NoReturn

from distributed.host.process_scan import family
from distributed.launch import usage

REPORT = b"\x1e"  # ASCII's record separator, which nobody prints
BEAT = 3.0  # seconds between two signs of life, each way
PATIENCE = 4 * BEAT  # seconds without one after which the other side is given up
SECOND_TRY = 0.5  # seconds between two tries to tell a signal to somebody
POLL = 0.05  # seconds between two looks for more output
NOT_RANK_0 = re.compile(rb"\[[^\]: ]*:(?!0\])\d*\] ")


@dataclass(frozen=True)
class Task:
    """Which task of the step this is, and where the run keeps what it says."""

    run: Path
    node: str
    node_rank: int
    local_rank: int
    rank: int | None  # None: it is an agent
    task: str  # its number in the step
    step: str  # as scancel calls it
    beside: int  # tasks of the step on this node

    @classmethod
    def from_env(cls, run: Path, env: Mapping[str, str], agent: bool) -> Task:
        """As SLURM says it to the task."""
        rank = None if agent else int(env["SLURM_PROCID"])
        step = f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"
        return cls(
            run=run,
            node=env["SLURMD_NODENAME"],
            node_rank=int(env["SLURM_NODEID"]),
            local_rank=int(env["SLURM_LOCALID"]),
            rank=rank,
            task=env["SLURM_PROCID"],
            step=step,
            beside=len(env["SLURM_GTIDS"].split(",")),
        )

    @property
    def log(self) -> Path:
        """Of its node, with the lines of all its ranks."""
        return self.run / f"node_{self.node}.log"

    @property
    def mark(self) -> bytes:
        """What stands before each of its lines in the log; an agent marks its ranks' lines itself."""
        return b"" if self.rank is None else f"[{self.node}:{self.rank}] ".encode()

    @property
    def environment_mark(self) -> frozenset[bytes]:
        """What the environments of its processes have, and no other task's."""
        job, _, step = self.step.partition(".")
        words = {"MUSTER_RUN_DIR": str(self.run), "SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "SLURM_PROCID": self.task}
        return frozenset(f"{name}={value}".encode(errors="surrogateescape") for name, value in words.items())

    def outputs(self) -> list[Path]:
        """The files that its standard output and standard error go to."""
        if self.rank is None:
            return [self.log, self.log]
        folder = self.run / "ranks" / self.node / "slurm" / "attempt_0" / str(self.local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        return [folder / "stdout.log", folder / "stderr.log"]


# ---------------------------------------------------------------- what it says


class Output:
    """A file that grows, read by whole lines."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file: BinaryIO = path.open("rb")
        self._file.seek(0, os.SEEK_END)  # of an earlier try, the console has shown what is there
        self._begun = b""

    def close(self) -> None:
        self._file.close()

    def lines(self, last: bool = False) -> list[bytes]:
        """Those that have come since, with their line breaks. last: also the one that has none."""
        *whole, self._begun = (self._begun + self._file.read()).split(b"\n")
        if last and self._begun:
            whole.append(self._begun)
        return [line + b"\n" for line in whole]


class Voice:
    """What goes to the log of the node and to the console, and the reports."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._log = None if task.rank is None else task.log.open("ab", buffering=0)
        self._outputs = [Output(path) for path in dict.fromkeys(task.outputs())]

    def close(self) -> None:
        for file in (self._log, *self._outputs):
            if file:
                file.close()

    def pass_on(self, last: bool = False) -> None:
        lines = [self._task.mark + line for output in self._outputs for line in output.lines(last)]
        if not lines:
            return
        self._keep(b"".join(lines))
        self.say(b"".join(line for line in lines if not NOT_RANK_0.match(line)))

    def _keep(self, words: bytes) -> None:
        try:
            if self._log:
                self._log.write(words)
        except OSError as error:
            self._log = None  # said once
            self.say(f"{self._task.log}: {error.strerror}: what rank {self._task.rank} says is not kept\n".encode())

    def report(self, **facts: object) -> None:
        told = {"node": self._task.node, "local_rank": self._task.local_rank} | facts
        self.say(REPORT + json.dumps(told).encode() + b"\n")

    def say(self, words: bytes) -> None:
        """Whoever does not listen any more is no reason to end: the order to stop comes another way."""
        with suppress(OSError):
            while words:
                words = words[os.write(1, words) :]


# ---------------------------------------------------------------- who is guarded


class Child:
    """The rank or agent, with a process group of its own."""

    def __init__(self, pid: int, grace: float, mark: frozenset[bytes]) -> None:
        self.pid, self.grace = pid, grace
        self.mark = mark  # in the environment of all that it has started, wherever they have gone
        self.asked_to_end = False
        self._missed: set[int] = set()  # signals for which it was not ready
        self._lock = threading.Lock()
        self._ended = False

    def signal(self, number: int, group: bool = False) -> None:
        """Not once it has ended: its number may be somebody else's."""
        with self._lock, suppress(ProcessLookupError):
            if not self._ended:
                (os.killpg if group else os.kill)(self.pid, number)

    def stop(self) -> None:
        """TERM, and KILL when the grace is over."""
        if not self.asked_to_end:
            self.asked_to_end = True
            self.signal(signal.SIGTERM)
            timer = threading.Timer(self.grace, self.kill)
            timer.daemon = True
            timer.start()

    def kill(self) -> None:
        self.asked_to_end = True
        self.signal(signal.SIGKILL, group=True)

    def may_have_missed(self, number: int, frame: FrameType | None) -> None:
        """Handler of a signal that SLURM has sent to all of us."""
        if not self._who_catch(number):
            self._missed.add(number)

    def repeat_missed_signals(self) -> None:
        """When somebody has become ready for them: while PyTorch is imported, nobody handles anything."""
        for number in list(self._missed):
            for pid in self._who_catch(number):
                self._missed.discard(number)
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _who_catch(self, number: int) -> list[int]:
        return [pid for pid in family(self.mark) if catches(pid, number)]

    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def sweep(self) -> None:
        """End what it has left: in its group, while nobody can have got its number, and elsewhere."""
        self.signal(signal.SIGKILL, group=True)
        for pid in family(self.mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def reap(self) -> int:
        """Its exit code; -9 when signal 9 has killed it."""
        with self._lock:
            self._ended = True
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for this signal."""
    with suppress(OSError, StopIteration):  # it has ended
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    return False


def obey(child: Child, gone: threading.Event, orders: int = 0) -> None:
    """Do what the launcher says, to the end of its words."""
    said = b""
    while select.select([orders], [], [], PATIENCE)[0]:
        words = os.read(orders, 4096)
        if not words:
            break
        *lines, said = (said + words).split(b"\n")
        for line in lines:
            if line == b"stop":
                child.stop()
            elif line == b"kill":
                child.kill()
    gone.set()
    child.stop()


def speak_for_node(voice: Voice, gone: threading.Event) -> None:
    """Say now and then that the node is there, also when a rank has ended before others, or a disk lets us wait."""
    while not gone.wait(BEAT):
        voice.report()


def guard(task: Task, child: Child, voice: Voice) -> int:
    """Pass on what it says until it ends, report that, and return its exit code when the launcher has heard it."""
    gone = threading.Event()
    signal.signal(signal.SIGUSR2, child.may_have_missed)
    threading.Thread(target=obey, args=(child, gone), daemon=True).start()
    voice.report(step=task.step, tasks=task.beside)
    again = 0.0
    if task.local_rank == 0:
        threading.Thread(target=speak_for_node, args=(voice, gone), daemon=True).start()
    while not child.has_ended():
        voice.pass_on()
        if time.monotonic() > again:
            child.repeat_missed_signals()
            again = time.monotonic() + SECOND_TRY
        time.sleep(POLL)
    now = time.time()
    child.sweep()
    code = child.reap()
    voice.pass_on(last=True)
    voice.report(
        end={
            "rank": task.rank,
            "local_rank": task.local_rank,
            "pid": child.pid,
            "time": now,
            "exit_code": code,
            "ended_by_agent": child.asked_to_end and code in (0, -signal.SIGTERM, -signal.SIGKILL),
        }
    )
    gone.wait()  # srun would kill the others when a task of it fails
    return code if code >= 0 else 128 - code


# ---------------------------------------------------------------- the whole


def run(task: Task, grace: float, become: Callable[[], NoReturn]) -> int:
    """Fork, let the child become what it is to be, and guard it. Returns its exit code, 128+n for a signal."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with closing(Voice(task)) as voice:
        pid = os.fork()
        if pid == 0:
            enter(task)
            become()
        with suppress(PermissionError):  # it was quicker, and has begun
            os.setpgid(pid, pid)
        if task.local_rank == 0:
            usage.start(str(task.run), task.node)  # for all tasks of the node; it ends with this one's child
        return guard(task, Child(pid, grace, task.environment_mark), voice)


def enter(task: Task) -> None:
    """In the child: a group of its own, its files, and the signals as a fresh process finds them.

    But for SIGUSR2, with which SLURM announces that the time is up: who does not wait for it must not die of it.
    """
    os.setpgid(0, 0)
    die_with_parent(signal.SIGTERM if task.rank is None else signal.SIGKILL)  # an agent ends its ranks before
    for number, path in enumerate(task.outputs(), start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for signal_number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def die_with_parent(number: int) -> None:
    """Ask the kernel for this signal when the guard is gone (prctl(2), PR_SET_PDEATHSIG)."""
    import ctypes  # takes milliseconds, which the guard need not wait for

    ctypes.CDLL(None).prctl(1, number)


def agent_options(task: Task, counts: Sequence[int], env: Mapping[str, str]) -> list[str]:
    """torchrun's options on this node. counts: of each node, how many ranks."""
    return [
        *("--rdzv-id", task.run.name, "--nnodes", str(len(counts)), "--node-rank", str(task.node_rank)),
        *("--nproc-per-node", str(counts[task.node_rank])),
        *("--master-addr", env["MASTER_ADDR"], "--master-port", env["MASTER_PORT"]),
        *("--log-dir", str(task.run / "ranks" / task.node)),
    ]


def start_agent(task: Task, words: Sequence[str], options: Sequence[str]) -> NoReturn:
    """Become the agent: words with the options of this node before the first --."""
    begin = words.index("--")
    os.environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = f"[{task.node}:${{rank}}] "
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    os.execvp(words[0], [*words[:begin], *options, *words[begin + 1 :]])
