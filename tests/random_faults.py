#!/usr/bin/env python3
"""Run trainings with random faults, and check how each run ends and what it leaves. Needs root.

    python tests/random_faults.py --seed 7 --count 200 --topology machine    one machine, 3 ranks
    python tests/random_faults.py --seed 7 --count 200 --topology nodes      3 laboratory nodes, 2 ranks each
    python tests/random_faults.py --seed 7 --count 200 --topology pdsh       the same nodes, started by pdsh
    python tests/random_faults.py --seed 7 --only 12 --topology nodes        repeat the fault 12 of this seed

Each fault is drawn from its seed and number: what fails (a process is killed or stopped, a node is disconnected or
powered off, a disk is full, a rank raises, the run is stopped, ...; sometimes two of them), and when (during the start,
at a step, during a save, during a restart, at the end). The training is faulty_train.py with --max-restarts. These
conditions are checked afterwards:

- The launcher has ended. Its exit code is the one in the verdict, and one that the fault may cause.
- The verdict of each attempt that failed names a cause, node and rank that the fault explains.
- The weights are those of an undisturbed run, bit for bit. If the fault ended the run, the same command resumes it.
- 15 seconds later no process, listening port, temporary file or lock of the run remains.
- A process and files that do not belong to the run are unchanged.

A fault that fails a check is printed with seed, number, what was expected and what was found; its directory is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

KIT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(KIT))

from distributed.checkpoint.directory import newest  # noqa: E402 - found through sys.path
from distributed.host import process_scan  # noqa: E402

STEPS, SAVE_EVERY = 30, 4
SETTINGS = f"""
model: {{n_layer: 1, n_head: 2, n_embd: 16, block_size: 16, dropout: 0.1}}
train: {{steps: {STEPS}, batch_size: 12, learning_rate: 1e-2, warmup_steps: 4, evaluate_every: 15}}
data: {{path: text.txt}}
checkpoint: {{every: {SAVE_EVERY}, keep: 3}}
logging: {{every: 1, sample: 0}}
"""
RESTARTS = 3
LIMIT = 150.0  # seconds for one run
LEASE = 20.0  # seconds without heartbeats after which a node is lost, at the latest
# Seconds after which nothing of a run remains. If the launcher was killed and a rank is stopped: the grace period, 8 s,
# then ControlPersist of ssh, 5 s.
CLEAN_AFTER = 15.0
UNDO_AFTER = 30.0  # seconds after which a disk is repaired although no attempt has failed
POLL = 0.01  # seconds
DISK = 4 << 20  # bytes of the disk with the checkpoints
MOMENTS = ("start", "step", "save", "restart", "end")

SIGNALS = ("SIGKILL", "SIGSEGV", "SIGSTOP")
PROCESSES = ("rank", "agent", "fork server", "supervisor", "guard", "launcher")
SCRIPT_FAULTS = ("exits with 0", "hangs", "loops", "raises", "allocates", "writes NaN")
REQUESTS = ("stop.sh", "SIGINT", "SIGHUP", "SIGTERM of supervisor")
DISK_FAULTS = ("full disk", "full log disk", "read-only disk", "EIO")
LOG_DISK = 64 << 20  # bytes of the disk with the run directories
HANGS = ("hangs", "loops", "SIGSTOP of rank")


# ---------------------------------------------------------------- what fails, and when


@dataclass(frozen=True)
class Fault:
    """One thing that fails."""

    what: str  # such as "SIGKILL of rank", "cut" (lab.sh cut: the node is disconnected), "raises"
    rank: int  # the rank that fails, or a rank on the node that fails
    pause: float  # seconds until a node is healed, or stopped processes get SIGCONT (a single rank gets none)


@dataclass(frozen=True)
class Case:
    """One or two faults at a moment of a run, drawn for this number."""

    number: int
    faults: tuple[Fault, ...]
    moment: str  # one of MOMENTS
    fraction: float  # 0 to 1: delay of the fault, as a part of Place.first_step (start, restart) or in seconds (end)
    step: int  # for the moments step, save and restart
    victim: int  # rank that is killed to cause the restart, for the moment restart

    def __str__(self) -> str:
        faults = " and ".join(f"{one.what} (rank {one.rank}, pause {one.pause:g} s)" for one in self.faults)
        return f"{faults}; moment {self.moment}, step {self.step}, fraction {self.fraction:.2f}, victim {self.victim}"

    @property
    def hangs(self) -> bool:
        return any(one.what in HANGS for one in self.faults)


def kinds(topology: str) -> list[list[str]]:
    """The groups of faults; each group is drawn equally often."""
    processes = [*PROCESSES, *(("ssh", "ssh master") if topology == "nodes" else ())]  # pdsh starts ssh on its own
    groups = [[f"{name} of {process}" for name in SIGNALS] for process in processes]
    groups += [list(SCRIPT_FAULTS), list(SCRIPT_FAULTS), list(REQUESTS), list(DISK_FAULTS), ["damaged checkpoint"]]
    groups += [["suspension"]]  # of all processes of the run, as when the machine sleeps
    return groups if topology == "machine" else [*groups, ["cut"], ["power off"]]


def draw(seed: int, number: int, topology: str) -> Case:
    rng = random.Random(f"{seed} {topology} {number}")
    ranks = 3 if topology == "machine" else 6
    faults = tuple(
        Fault(rng.choice(rng.choice(kinds(topology))), rng.randrange(ranks), rng.choice((2.0, 16.0, 40.0)))
        for _ in range(1 + (rng.random() < 0.15))
    )
    moment, step = rng.choice(MOMENTS), rng.randrange(2, STEPS - 2)
    if any(one.what == "damaged checkpoint" for one in faults):  # the run must resume from an older checkpoint
        moment, step = rng.choice(("step", "save")), rng.randrange(2 * SAVE_EVERY + 2, STEPS - 2)
    return Case(number, faults, moment, rng.random(), step, rng.randrange(ranks))


# ---------------------------------------------------------------- what is expected


@dataclass(frozen=True)
class Cause:
    """What the verdict on a failed attempt may be."""

    pattern: str  # a regular expression for the cause in the verdict
    codes: tuple[int, ...]  # the exit code in the verdict is one of these
    node: str | None = None  # None: any node
    rank: int | None = None  # None: any rank

    def explains(self, verdict: dict[str, Any]) -> bool:
        """Whether the verdict agrees with this cause."""
        return (
            re.search(self.pattern, verdict["cause"]) is not None
            and verdict["exit_code"] in self.codes
            and self.node in (None, verdict["node"])
            and self.rank in (None, verdict["rank"])
        )


@dataclass(frozen=True)
class Expected:
    """What a fault may lead to."""

    causes: tuple[Cause, ...]  # empty: the fault has no effect
    final: tuple[int, ...] = (0,)  # exit codes of the launcher, besides 0
    required: bool = True  # an attempt must fail if the fault hits it at a step or during a save


def killed(rank: int, node: str, name: str = "SIGKILL") -> Cause:
    return Cause(f"^rank {rank} on {node} died of {name}", (128 + signal.Signals[name],), node, rank)


def expected(fault: Fault, node: str, topology: str, moment: str) -> Expected:  # noqa: C901 - a table
    """Return what a fault may lead to. node: the node of its rank."""
    what, rank = fault.what, fault.rank
    name, _, process = what.partition(" of ")
    several, times_out = topology != "machine", fault.pause > LEASE
    lost = Cause(f"^{node}: connection lost", (69, 137, 139), node)
    any_lost = Cause(": connection lost", (69, 137, 139))
    hung = Cause("^hung: ", (124,), *((node, rank) if moment in ("step", "save") else ()))
    code = 128 + signal.Signals[name] if process else 0
    if what in REQUESTS:
        codes = {"SIGINT": (75, 130), "SIGHUP": (75, 143, 129)}.get(what, (75, 143))
        return Expected((Cause("^stopped|^interrupted", (0, *codes)),), codes, required=False)
    if process == "rank":
        return Expected((hung,) if name == "SIGSTOP" else (killed(rank, node, name),))
    if process == "agent" and name == "SIGSTOP":
        unresponsive = Cause(f"^the agent on {node} died of SIGKILL", (137,), node)  # killed by its supervisor
        return Expected((lost, unresponsive) if several else (), required=times_out)
    if process == "agent":
        return Expected((Cause(f"^the agent on {node} died of {name}", (code,), node),))
    if process == "fork server":
        return Expected((Cause(f"^the agent on {node} failed: .*fork server", (1,), node),), required=False)
    if process == "supervisor" and name != "SIGSTOP":
        return Expected((Cause(f"^the supervisor on {node} died of SIG", (137, 139), node),))
    if process == "launcher" and name != "SIGSTOP":
        return Expected((), (-signal.Signals[name],))
    if process == "launcher":
        return Expected((any_lost,) if several and times_out else (), required=False)  # the run may end first
    refused_here = (69,) if moment == "start" else ()  # before the run exists, the launch says which node it lost
    if process == "ssh" and name != "SIGSTOP":
        lost_client = Cause(f"{lost.pattern}: its ssh client on the launching side", lost.codes, node)
        return Expected((lost_client,), refused_here)
    if process == "ssh":
        return Expected((lost,) if times_out else ())
    if process == "ssh master":
        return Expected((any_lost,) if times_out or name != "SIGSTOP" else (), refused_here)
    if process:  # the guard, or a stopped supervisor
        return Expected(())
    if what in ("cut", "power off"):
        poweroff = (Cause(f"^the supervisor on {node} died of SIGKILL", (137,), node),) if what == "power off" else ()
        return Expected((lost, *poweroff), (69,), required=what == "power off" or times_out)
    if what == "suspension":
        return Expected(())
    if what == "full log disk":  # no training needs it, but no run starts on it
        return Expected((), (1, 69) if moment == "start" else ())
    if what == "damaged checkpoint":
        return Expected((killed(rank, node),))
    if what in DISK_FAULTS:
        reason = {"full disk": "No space left", "read-only disk": "Read-only", "EIO": "Input/output error"}[what]
        refused = (2,) if moment in ("start", "restart") else ()
        return Expected((Cause(f"{reason}|cannot be written|exited with code 2", (1, *refused)),), refused)
    return {
        "exits with 0": Expected((Cause(f"^rank {rank} on {node} ended with exit code 0 while", (1,), node, rank),)),
        "hangs": Expected((hung,)),
        "loops": Expected((hung,)),
        "raises": Expected((Cause(f"^rank {rank} on {node} raised ValueError: injected", (1,), node, rank),)),
        "allocates": Expected((Cause(f"^rank {rank} on {node} raised MemoryError", (1,), node, rank),)),
        "writes NaN": Expected((Cause(f"rank {rank} on {node} is not finite", (1,), node, rank),)),
    }[what]


# ---------------------------------------------------------------- the machines


@dataclass
class Place:
    """The machine, or the laboratory nodes, on which the trainings run."""

    topology: str
    base: Path  # directory of all files of this program
    nodes: list[str] = field(default_factory=list)
    first_step: float = 0.0  # seconds from the start of an undisturbed run to its first step
    weights: dict[str, str] = field(default_factory=dict)  # checksums of the files of the last checkpoint of that run

    def node_of(self, rank: int) -> str:
        return self.nodes[rank // 2] if self.has_nodes else self.nodes[0]

    @property
    def has_nodes(self) -> bool:
        return self.topology != "machine"

    def lab(self, *arguments: str) -> None:
        environment = {**os.environ, "MUSTER_LAB": str(self.base / "lab")}
        command = [str(KIT / "tests/lab/lab.sh"), *arguments]
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120)

    @property
    def start_nodes(self) -> list[str]:
        """The arguments of lab.sh that start all nodes, restart nodes that were powered off, and heal the others."""
        return ["up", "3", "--prefix", self.nodes[0][:-1]]

    def listening(self) -> set[tuple[str, str]]:
        """The listening ports of each node."""
        found = set()
        for node in self.nodes if self.has_nodes else []:
            pid = (self.base / "lab" / node / "sshd.pid").read_text().strip()
            for table in ("tcp", "tcp6"):
                lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
                found |= {(node, line.split()[1]) for line in lines if line.split()[3] == "0A"}
        return found

    def command(self, directory: Path, hang_timeout: float) -> list[str]:
        several, names = self.has_nodes, {"nodes": "launch_torchrun_auto.sh", "pdsh": "launch_pdsh_multinode.sh"}
        launcher = names.get(self.topology, "launch_singlenode.sh")
        return [
            str(KIT / "scripts/ssh" / launcher),
            "--max-restarts", str(RESTARTS), "--hang-timeout", f"{hang_timeout:.0f}",
            "--env", f"TMPDIR={directory}/tmp", "--env", "OMP_NUM_THREADS=1",
            "--script", str(KIT / "tests/lab/faulty_train.py"), "tiny.yaml", "2" if several else "3",
            *(self.nodes if several else ()), "--", f"checkpoint.dir={self.checkpoints(directory)}",
        ]  # fmt: skip

    def checkpoints(self, directory: Path) -> Path:
        return self.base / "disk" / directory.name

    def logs(self, directory: Path) -> Path:
        return self.base / "log disk" / directory.name

    def make_directories(self, directory: Path) -> None:
        """Make the directories of a run that do not exist."""
        for path in (directory / "tmp", directory / "x", self.checkpoints(directory), self.logs(directory)):
            path.mkdir(parents=True, exist_ok=True)
        if not (directory / "logs").exists():
            (directory / "logs").symlink_to(self.logs(directory))


@contextlib.contextmanager
def opened(topology: str, base: Path) -> Iterator[Place]:
    """Mount the disks for checkpoints and for run directories, which laboratory nodes share, and start the nodes."""
    place = Place(topology, base, [os.uname().nodename])
    disks = {base / "disk": DISK, base / "log disk": LOG_DISK}
    for disk, size in disks.items():
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=True)
    try:
        if place.has_nodes:
            prefix = "f" + "".join("abcdefghij"[int(digit)] for digit in str(os.getpid()))
            place.nodes = [f"{prefix}{number}" for number in (1, 2, 3)]
            place.lab(*place.start_nodes)
        yield place
    finally:
        if place.has_nodes:
            place.lab("down")
        for disk in disks:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)
            disk.rmdir()


# ---------------------------------------------------------------- processes of a run


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    command: str
    environment: frozenset[str]


def processes(directory: Path) -> dict[int, Process]:
    """All live processes whose command line or environment names this directory or a file in it."""
    found, mark = {}, f"{directory}".encode()
    for pid in process_scan.pids():
        with contextlib.suppress(OSError):
            command, environment = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
            stat = process_scan.process(pid)
            if stat and stat.alive and re.search(re.escape(mark) + rb"(/|\0|\s|$)", command + b"\0" + environment):
                entries = environment.decode(errors="replace").split("\0")
                command_line = command.decode(errors="replace").replace("\0", " ").strip()
                found[pid] = Process(pid, stat.parent, command_line, frozenset(entries))
    return found


class Run:
    """One run of the training in a directory, observed from outside."""

    def __init__(self, place: Place, directory: Path, hang_timeout: float = 0.0) -> None:
        self.place, self.directory = place, directory
        place.make_directories(directory)
        (directory / "tiny.yaml").write_text(SETTINGS)
        (directory / "text.txt").write_bytes(bytes(range(32, 127)) * 40)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANDOM_FAULTS": str(directory)}
        environment |= {"TMPDIR": f"{directory}/tmp", "XDG_RUNTIME_DIR": f"{directory}/x"}
        self.started = time.monotonic()
        with (directory / "out").open("ab") as out:
            self.launcher = subprocess.Popen(
                place.command(directory, hang_timeout), cwd=directory, env=environment, stdin=DEVNULL,
                stdout=out, stderr=out, start_new_session=True, preexec_fn=default_signals,
            )  # fmt: skip

    @property
    def code(self) -> int | None:
        """The exit code of the launcher; -n for signal n; None while it runs."""
        return self.launcher.poll()

    @property
    def run_directory(self) -> Path:
        return self.directory / "logs/latest"

    def text(self, name: str) -> str:
        try:
            return (self.run_directory / name).read_text(errors="replace")
        except OSError:
            return ""

    def step(self) -> int:
        """The last step in metrics.jsonl."""
        return max(map(int, re.findall(r'"step": (\d+)', self.text("metrics.jsonl"))), default=0)

    def attempts_failed(self) -> int:
        return len(list(self.run_directory.glob("attempts/*"))) - 1

    def restarts(self) -> int:
        return self.text("launcher.log").count(": restart ")

    def is_saving(self) -> bool:
        return any(self.place.checkpoints(self.directory).glob("*.writing-*"))

    def wait_for(self, condition: Callable[[], object], limit: float = 90.0) -> bool:
        """Wait until the condition holds. Returns False if the run ends, or the limit (seconds) passes, before that."""
        end = time.monotonic() + limit
        while not condition():
            if self.code is not None or time.monotonic() > end:
                return False
            time.sleep(POLL)
        return True

    def find(self, process: str, rank: int) -> list[int]:
        """The ids of the processes with this role on the node of the rank."""
        node, known = self.place.node_of(rank), processes(self.directory)
        try:
            pids = json.loads(self.text(f"node_{node}.pid") or "{}")
        except ValueError:
            pids = {}
        recorded = {name: value["pid"] for name, value in pids.items() if isinstance(value, dict)}
        if process == "launcher":
            return [self.launcher.pid]
        if process in ("supervisor", "guard", "agent"):
            return [pid for pid in [recorded.get("command" if process == "agent" else process)] if pid in known]
        children = [one for one in known.values() if one.parent == recorded.get("command")]
        is_rank = [any(entry.startswith("TORCHELASTIC_RUN_ID=") for entry in one.environment) for one in children]
        if process == "rank":
            ranks = [one for one, found in zip(children, is_rank, strict=True) if found]
            return [one.pid for one in ranks if f"RANK={rank}" in one.environment]
        if process == "fork server":
            return [one.pid for one, found in zip(children, is_rank, strict=True) if not found][:1]
        if process == "ssh":
            clients = [one for one in known.values() if one.command.startswith("ssh ")]
            return [one.pid for one in clients if re.search(f"launch.supervisor.* --name {node} ", one.command)]
        return [one.pid for one in known.values() if one.command.startswith("ssh: ")][:1]  # a shared connection

    def wait_to_find(self, process: str, rank: int) -> list[int]:
        """Like find(), but wait until there is such a process. Returns an empty list if there is none within 30 s."""
        found: list[int] = []

        def is_found() -> bool:
            found[:] = self.find(process, rank)
            return bool(found)

        self.wait_for(is_found, 30.0)
        return found

    def signal(self, process: str, rank: int, number: int) -> list[int]:
        """Send a signal to the process with this role. Returns the ids of the processes."""
        found = self.wait_to_find(process, rank)
        send(found, number)
        return found

    def verdicts(self) -> list[dict[str, Any]]:
        """The verdicts of all attempts, in their order. An attempt whose launcher was killed has none."""
        names = [f"attempts/{one}/verdict.json" for one in range(1, self.attempts_failed() + 2)]
        return [json.loads(text) for text in map(self.text, names) if text]


def send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


# ---------------------------------------------------------------- the faults


class Injector:
    """Injects the faults of a case into a run."""

    def __init__(self, case: Case, run: Run) -> None:
        self.case, self.run, self.place = case, run, run.place
        self.undo: list[tuple[Callable[[], object], Callable[[], object]]] = []  # condition, action
        self.hit = True  # False: the moment did not come, or a fault found no process

    def inject(self) -> None:
        """Wait for the moment, inject the faults, and undo them while the run continues."""
        for fault in self.case.faults:
            if fault.what in SCRIPT_FAULTS and self.case.moment != "restart":
                self._arm(fault)
        if self._wait_for_moment():
            for fault in self.case.faults:
                self._apply(fault)
        else:
            self.hit = False
        end = time.monotonic() + LIMIT
        while self.run.code is None and time.monotonic() < end:
            self._undo_due()
            time.sleep(POLL)
        self.undo_all()

    def _undo_due(self) -> None:
        for entry in [entry for entry in self.undo if entry[0]()]:
            self.undo.remove(entry)
            entry[1]()

    def undo_all(self) -> None:
        while self.undo:
            self.undo.pop()[1]()

    def _wait_for_moment(self) -> bool:
        case, run = self.case, self.run
        if case.moment == "start":
            due = run.started + case.fraction * self.place.first_step
            return run.wait_for(lambda: time.monotonic() >= due)
        if case.moment == "end":
            reached = run.wait_for(lambda: run.step() >= STEPS)
            time.sleep(case.fraction)
            return reached
        if not run.wait_for(lambda: run.step() >= case.step):
            return False
        if case.moment == "save":
            run.wait_for(run.is_saving)
            return run.code is None
        if case.moment == "restart":
            if not run.signal("rank", case.victim, signal.SIGKILL) or not run.wait_for(run.restarts):
                return False
            due = time.monotonic() + case.fraction * self.place.first_step
            return run.wait_for(lambda: time.monotonic() >= due)
        return True

    def _arm(self, fault: Fault) -> None:
        steps = {"start": 1, "end": STEPS, "save": (self.case.step // SAVE_EVERY + 1) * SAVE_EVERY}
        step = steps.get(self.case.moment, self.case.step)
        text = json.dumps({"how": fault.what, "rank": fault.rank, "step": step})
        with contextlib.suppress(FileExistsError), (self.run.directory / "fault.json").open("x") as file:
            file.write(text)

    def _apply(self, fault: Fault) -> None:
        what, run = fault.what, self.run
        name, _, process = what.partition(" of ")
        since = time.monotonic()
        if process:
            pids = run.signal(process, fault.rank, signal.Signals[name])
            self.hit &= bool(pids)
            if name == "SIGSTOP" and process != "rank":
                self._undo_after(fault.pause, since, partial(send, pids, signal.SIGCONT))
        elif what in SCRIPT_FAULTS:
            if self.case.moment == "restart":
                self._arm(fault)
        elif what == "suspension":
            pids = [pid for pid in processes(run.directory) if pid != os.getpid()]
            send(pids, signal.SIGSTOP)
            self._undo_after(fault.pause, since, partial(send, pids, signal.SIGCONT))
        elif what in ("cut", "power off"):
            self.place.lab("cut" if what == "cut" else "kill", self.place.node_of(fault.rank))
            self._undo_after(fault.pause, since, partial(self.place.lab, *self.place.start_nodes))
        elif what in DISK_FAULTS:
            self._break_disk(what)
        elif what == "damaged checkpoint":
            self._damage(fault)
        elif what == "stop.sh":
            run.wait_for(lambda: run.run_directory.exists())
            subprocess.run([KIT / "scripts/stop.sh", "latest"], cwd=run.directory, capture_output=True, timeout=LIMIT)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.launcher.pid, signal.Signals[what])

    def _undo_after(self, seconds: float, since: float, action: Callable[[], object]) -> None:
        self.undo.append((lambda: time.monotonic() > since + seconds, action))

    def _break_disk(self, what: str) -> None:
        failed, due = self.run.attempts_failed(), time.monotonic() + UNDO_AFTER
        if what.startswith("full "):
            filler = fill(self.place.base / what.removeprefix("full "))
            action: Callable[[], object] = partial(filler.unlink, missing_ok=True)
        else:  # strace makes writes fail; a disk with files open for writing cannot be mounted read-only
            pids = self.run.wait_to_find("rank", 0)
            self.hit &= bool(pids)
            calls, error = ("fsync", "EIO") if what == "EIO" else ("mkdir,mkdirat,rename,renameat,renameat2", "EROFS")
            options = ["-f", "-o", "/dev/null", "-e", f"trace={calls}", "-e", f"inject={calls}:error={error}"]
            tracer = subprocess.Popen(["strace", *options, *(f"--attach={pid}" for pid in pids)], stderr=DEVNULL)
            action = partial(terminate, tracer)
        self.undo.append((lambda: self.run.attempts_failed() > failed or time.monotonic() > due, action))

    def _damage(self, fault: Fault) -> None:
        """Overwrite bytes of the newest checkpoint, then kill a rank before the next checkpoint is published."""
        found = sorted(self.place.checkpoints(self.run.directory).glob("step_????????"))
        with contextlib.suppress(OSError), (found[-1] / "state.pt").open("r+b") as file:
            file.seek(1000)
            file.write(b"damaged!")
        self.hit &= bool(self.run.signal("rank", fault.rank, signal.SIGKILL))


def fill(disk: Path) -> Path:
    """Fill a disk with a file, and return that file."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


def terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


# ---------------------------------------------------------------- the checks


class Bystander:
    """A process and files that do not belong to the run, but look as if they did."""

    TEXT = "not of this run\n"

    def __init__(self, place: Place, directory: Path) -> None:
        self.files = [directory / name / "bystander" for name in (".", "logs", "tmp", "x")]
        self.files.append(place.checkpoints(directory) / "bystander")
        for file in self.files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.TEXT)
        other = {"MUSTER_RUN_DIR": f"{directory}/logs/train-20250102-030405-9f3a", "MUSTER_NODE": place.nodes[0]}
        self.process = subprocess.Popen(["sleep", "10000"], env={**os.environ, **other, "RANK": "0"})

    def problems(self) -> Iterator[str]:
        if self.process.poll() is not None:
            yield f"a process that does not belong to the run ended with {self.process.returncode}"
        for file in self.files:
            if not file.exists() or file.read_text() != self.TEXT:
                yield f"a file that does not belong to the run was changed: {file}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def verdict_problems(case: Case, run: Run, hit: bool) -> Iterator[str]:
    """Compare exit code and verdicts with what the faults may lead to."""
    place, verdicts = run.place, run.verdicts()
    expectations = [expected(one, place.node_of(one.rank), place.topology, case.moment) for one in case.faults]
    causes = [cause for one in expectations for cause in one.causes]
    if case.moment == "restart":
        causes.append(killed(case.victim, place.node_of(case.victim)))
    final = {0, *(code for one in expectations for code in one.final)}
    if any(one.what in REQUESTS for one in case.faults):  # after a stop request no attempt follows
        final |= {code for cause in causes for code in cause.codes}
    if run.code not in final:
        yield f"exit code {run.code} instead of {sorted(final)}"
    has_final = bool(run.text("verdict.json"))  # a full disk may not take the verdict on the last attempt
    if run.code is not None and run.code >= 0 and has_final and verdicts[-1]["exit_code"] != run.code:
        yield f"exit code {run.code}, but {verdicts[-1]['exit_code']} in verdict.json"
    failed = [one for one in verdicts if one["outcome"] != "ok"]
    nodes = {place.node_of(one.rank) for one in case.faults if len(case.faults) > 1}
    for verdict in failed:
        # With two faults, any cause on their nodes is accepted: the first fault may prevent the failure record of the
        # second, because a stopped agent writes none.
        if verdict["node"] not in nodes and not any(cause.explains(verdict) for cause in causes):
            facts = {name: verdict[name] for name in ("cause", "exit_code", "node", "rank")}
            yield f"verdict {facts} instead of one of {causes}"
    required = [one.required and bool(one.causes) for one in expectations]
    if hit and not failed and all(required) and case.moment in ("step", "save"):
        yield f"no attempt failed; expected {causes}"


def weight_problems(run: Run) -> Iterator[str]:
    found = newest(run.place.checkpoints(run.directory))
    if found is None or found.step != STEPS:
        yield f"the newest checkpoint is {found and found.path}"
    elif checksums(run) != run.place.weights:
        yield f"the weights in {found.path} are not those of the undisturbed run"


def checksums(run: Run) -> dict[str, str]:
    found = newest(run.place.checkpoints(run.directory))
    return {name: entry["sha256"] for name, entry in found.files.items()} if found else {}


def leftovers(run: Run, bystander: Bystander, listening: set[tuple[str, str]]) -> list[str]:
    excluded = {bystander.process.pid, os.getpid()}
    left = [f"process {pid}: {one.command}" for pid, one in processes(run.directory).items() if pid not in excluded]
    left += [f"listening: {node} {port}" for node, port in run.place.listening() - listening]
    files = [path for name in ("tmp", "x") for path in (run.directory / name).iterdir()]
    files = [path for path in files if not path.name.startswith("torchinductor_")]  # PyTorch's cache
    for pattern in ("*.reserved*", "*.environment", "*.json.????????", "*.exit.????????", "*.html.????????"):
        files += run.directory.glob(f"logs/**/{pattern}")
    checkpoints = run.place.checkpoints(run.directory)
    files += [path for path in checkpoints.iterdir() if not re.fullmatch(r"step_\d{8}|\.lock", path.name)]
    left += [f"file {file}" for file in files if file not in bystander.files]
    lock = checkpoints / ".lock"
    if lock.exists():
        with lock.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                left.append(f"lock {lock}")
    return left


def leftover_problems(run: Run, bystander: Bystander, listening: set[tuple[str, str]]) -> Iterator[str]:
    end = time.monotonic() + CLEAN_AFTER
    while left := leftovers(run, bystander, listening):
        if time.monotonic() > end:
            yield from (f"remains: {one}" for one in left)
            return
        time.sleep(0.2)


# ---------------------------------------------------------------- the driver


def run_case(case: Case, place: Place, causes: list[str]) -> list[str]:
    """Run the training with these faults. Returns the problems, as sentences. Adds the verdicts' causes to `causes`."""
    directory = place.base / f"f{case.number}"
    place.make_directories(directory)
    bystander, listening = Bystander(place, directory), place.listening()
    run = Run(place, directory, max(8.0, 2 * place.first_step) if case.hangs else 0.0)
    injector = Injector(case, run)
    try:
        injector.inject()
        if run.code is None:
            return [f"the launcher has not ended within {LIMIT:g} s; its processes:", *describe(run)]
        causes += [one["cause"] for one in run.verdicts()]
        problems = list(verdict_problems(case, run, injector.hit))
        if run.code != 0:
            problems += leftover_after_failure(run, bystander, listening)
            (directory / "fault.json").unlink(missing_ok=True)  # the first run may have ended before this fault
            run = Run(place, directory)
            run.wait_for(lambda: False, LIMIT)
            if run.code != 0:
                problems.append(f"the same command does not resume: exit code {run.code}; {directory}/out")
        problems += weight_problems(run)
        problems += leftover_problems(run, bystander, listening)
        return problems + list(bystander.problems())
    finally:
        injector.undo_all()
        bystander.close()
        send(list(processes(directory)), signal.SIGKILL)


def leftover_after_failure(run: Run, bystander: Bystander, listening: set[tuple[str, str]]) -> list[str]:
    """Like leftover_problems(), without files on the disk for checkpoints, such as unfinished checkpoints.

    The next run may remove these files.
    """
    found = leftover_problems(run, bystander, listening)
    return [one for one in found if not one.startswith(f"remains: file {run.place.base / 'disk'}")]


def describe(run: Run) -> list[str]:
    return [f"  {pid} {one.command[:150]}" for pid, one in processes(run.directory).items()]


def undisturbed(place: Place) -> None:
    """Run the training without a fault, to learn its weights and how long it takes to start. Raises SystemExit."""
    directory = place.base / "undisturbed"
    run = Run(place, directory)
    run.wait_for(lambda: run.step() > 0)
    place.first_step = time.monotonic() - run.started
    run.wait_for(lambda: False, LIMIT)
    if run.code != 0:
        sys.exit(f"the undisturbed run failed: exit code {run.code}; {directory}/out")
    place.weights = checksums(run)
    shutil.rmtree(place.checkpoints(directory))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=20, help="number of faults (default: 20)")
    parser.add_argument("--first", type=int, default=0, help="number of the first one (default: 0)")
    parser.add_argument("--only", type=int, help="run only the fault with this number")
    parser.add_argument("--topology", choices=["machine", "nodes", "pdsh"], required=True)
    parser.add_argument("--list", action="store_true", help="print the faults, run nothing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if a check failed."""
    options = parse(arguments)
    numbers = range(options.first, options.first + options.count) if options.only is None else [options.only]
    cases = [draw(options.seed, number, options.topology) for number in numbers]
    if options.list:
        print(*(f"{case.number}: {case}" for case in cases), sep="\n")
        return 0
    if os.geteuid() != 0 or not shutil.which("strace"):
        sys.exit("random_faults.py: needs root, to mount a disk and start nodes, and strace")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that opened() removes the nodes
    base, counts, failed = Path(tempfile.mkdtemp(prefix="rf.", dir="/tmp")), Counter[tuple[str, str]](), 0
    with opened(options.topology, base) as place:
        undisturbed(place)
        print(f"undisturbed: first step after {place.first_step:.1f} s; files in {base}", flush=True)
        for case in cases:
            started = time.monotonic()
            causes: list[str] = []
            problems = run_case(case, place, causes)
            result = "FAILED" if problems else "ok"
            print(f"{case.number}: {result} in {time.monotonic() - started:.0f} s: {case}", flush=True)
            print(*(f"    {cause}" for cause in causes), sep="\n", flush=True)
            for problem in problems:
                print(f"    seed {options.seed}, fault {case.number}, {options.topology}: {problem}", flush=True)
            counts.update((one.what, result) for one in case.faults)
            failed += bool(problems)
            directory = base / f"f{case.number}"
            (directory / "logs").unlink()
            if problems:
                shutil.copytree(place.checkpoints(directory), directory / "checkpoints", dirs_exist_ok=True)
                shutil.copytree(place.logs(directory), directory / "logs", symlinks=True)
                print(f"    kept: {directory}", flush=True)
            else:
                shutil.rmtree(directory)
            shutil.rmtree(place.checkpoints(directory))
            shutil.rmtree(place.logs(directory))
            if place.has_nodes:
                place.lab(*place.start_nodes)
    for what in sorted({what for what, _ in counts}):
        print(f"{what:28} {counts[what, 'ok']:3} ok {counts[what, 'FAILED']:3} failed")
    print(f"random_faults: {len(cases) - failed} of {len(cases)} ok, {failed} failed")
    if not failed:
        shutil.rmtree(base)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
