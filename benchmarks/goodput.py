"""Measure the share of a training's time whose results are kept, with about one random fault per minute.

The training runs on three laboratory nodes with 2 ranks each. A fault is SIGKILL of a random rank, or of the agent of a
random node; the times between faults are exponentially distributed. If ranks are missing when a fault is due, the fault
is delayed until all ranks run. train.py saves a checkpoint after the interval that checkpoint.every=auto chooses;
checkpoint.mtbf is the mean time between faults. If a launcher gives up, because three restarts have made no progress,
the remaining time counts as `other`.

The measured time begins after the first step. The shares of this time are printed:

    kept        duration of all steps whose result is part of the final weights: each step once, its last execution
    repeated    duration of executions of steps that a later attempt has executed again
    restarts    from the last complete step of an attempt to the start of the first step of the next one
    other       saves, and the time after a launcher has given up

metrics.jsonl has a line with a time for each step. The duration of a step is the difference between its time and that
of the previous step; for a step after a save or a restart, the median duration is used. With --torchrun, torchrun is
measured too, started on each node over ssh with a c10d rendezvous. In this case, only ranks are killed in both runs,
because nothing restarts an agent of torchrun. Needs root.

    python -m benchmarks.goodput [--minutes 10] [--period 60] [--seed 1] [--torchrun]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.laboratory import KIT, nodes
from distributed.checkpoint.interval import best_interval

AIM = 0.95  # target for the share `kept`
RANKS = 2  # of each node
START_LIMIT = 60.0  # seconds until the first step
STOP_LIMIT = 30.0  # seconds for the last checkpoint
ARGUMENTS = [
    "train.steps=1000000", "train.batch_size=24", "train.evaluate_every=0", "logging.every=1", "checkpoint.every=auto",
]  # fmt: skip
CHOICE = re.compile(r"checkpoint every ([\d,]+) steps?: a save takes (\S+) s, a step (\S+) s")
AGENTS = (b"agent.py", b"torch.distributed.run")  # in command lines


# ---------------------------------------------------------------- processes


@dataclass(frozen=True)
class Processes:
    """Finds the processes of one training on all nodes: /proc of this machine shows the processes of every node."""

    mark: str  # an argument of train.py that only the processes of this training have on their command line

    def ranks(self) -> list[int]:
        return [pid for pid in self._all() if any(entry.startswith(b"RANK=") for entry in _entries(pid, "environ"))]

    def agents(self) -> list[int]:
        """The agents, without their fork servers, which have the same command line."""
        found = {pid for pid in self._all() if self._is_agent(pid)} - set(self.ranks())
        return sorted(pid for pid in found if _parent(pid) not in found)

    def kill(self) -> None:
        for pid in self._all():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _is_agent(self, pid: int) -> bool:
        words = _entries(pid, "cmdline")
        return b"python" in words[0] and any(word.endswith(AGENTS) for word in words[:3])

    def _all(self) -> list[int]:
        pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        return sorted(pid for pid in pids if self.mark.encode() in _entries(pid, "cmdline"))


def _entries(pid: int, name: str) -> list[bytes]:
    """The strings of a file of /proc; [b""] if the process has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")
    return [b""]


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


# ---------------------------------------------------------------- trainings with Muster and with torchrun


@dataclass
class Training:
    """A running training."""

    processes: Processes
    launchers: list[subprocess.Popen[bytes]]  # Muster: one launcher; torchrun: an ssh client for each node
    output: Path
    metrics: Callable[[], Path]

    def records(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl so far, of all attempts."""
        with suppress(OSError):
            lines = self.metrics().read_text().splitlines()
            return [json.loads(line) for line in lines if line.endswith("}")]
        return []

    def stop(self) -> None:
        """Stop the training, and kill its remaining processes."""
        for pid in self.processes.agents() if len(self.launchers) > 1 else [self.launchers[0].pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + STOP_LIMIT
        for launcher in self.launchers:
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(max(0.0, end - time.monotonic()))
            launcher.kill()
            launcher.wait()
        self.processes.kill()


def start_muster(names: Sequence[str], directory: Path, period: float) -> Training:
    """Start Muster's launcher, with restarts."""
    mark = f"checkpoint.dir={directory}/checkpoints"
    call = [str(KIT / "scripts/ssh/launch_torchrun_auto.sh"), "--python", sys.executable, "--max-restarts", "1000000"]
    call += ["--env", "OMP_NUM_THREADS=1", str(KIT / "config/quickstart.yaml"), str(RANKS), *names, "--", *ARGUMENTS]
    output = directory / "output"
    with output.open("wb") as file:
        launcher = subprocess.Popen(
            [*call, mark, f"checkpoint.mtbf={period}"], cwd=directory, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    return Training(Processes(mark), [launcher], output, lambda: directory / "logs/latest/metrics.jsonl")


def start_torchrun(names: Sequence[str], directory: Path, period: float) -> Training:
    """Start torchrun on each node, with restarts."""
    mark, endpoint = f"checkpoint.dir={directory}/checkpoints", f"{names[0]}:{random.randint(20_000, 29_999)}"
    call = ["env", "OMP_NUM_THREADS=1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", f"MUSTER_OUTPUT_DIR={directory}"]
    call += [sys.executable, "-m", "torch.distributed.run"]
    call += ["--nnodes", str(len(names)), "--nproc-per-node", str(RANKS), "--max-restarts", "1000000"]
    call += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, str(KIT / "train.py")]
    call += ["--config", str(KIT / "config/quickstart.yaml"), *ARGUMENTS, mark, f"checkpoint.mtbf={period}"]
    output = directory / "output"
    with output.open("wb") as file:
        launchers = [
            subprocess.Popen(["ssh", "-n", name, shlex.join(call)], stdout=file, stderr=subprocess.STDOUT)
            for name in names
        ]
    return Training(Processes(mark), launchers, output, lambda: directory / "metrics.jsonl")


# ---------------------------------------------------------------- faults


@dataclass(frozen=True)
class Faults:
    """Random faults. Their delays and the choices of processes are the same for Muster and torchrun."""

    kinds: tuple[str, ...]
    period: float  # mean seconds between two faults
    seed: int

    def inflict(self, training: Training, ranks: int, end: float) -> dict[str, int]:
        """Kill processes until the time `end` (time.monotonic()). Returns the number of faults of each kind."""
        dice, counts = random.Random(self.seed), dict.fromkeys(self.kinds, 0)
        due = time.monotonic() + dice.expovariate(1 / self.period)
        while time.monotonic() < end:
            time.sleep(0.1)
            if time.monotonic() < due or len(running := training.processes.ranks()) < ranks:
                continue
            kind, fraction = dice.choice(self.kinds), dice.random()
            pids = running if kind == "rank" else training.processes.agents()
            os.kill(pids[int(fraction * len(pids))], signal.SIGKILL)
            counts[kind] += 1
            due = time.monotonic() + dice.expovariate(1 / self.period)
        return counts


# ---------------------------------------------------------------- the result


@dataclass
class Shares:
    """Seconds of a training, by what they were spent on."""

    kept: float = 0.0
    repeated: float = 0.0
    restarts: list[float] = field(default_factory=list)
    steps: int = 0  # number of kept steps


def shares_of(records: Sequence[dict[str, Any]]) -> Shares:
    """Compute the shares over all attempts. records: all lines of metrics.jsonl."""
    found = Shares()
    pairs = list(pairwise(records))
    usual = statistics.median(new["time"] - old["time"] for old, new in pairs if "loss" in old and "loss" in new)
    last: dict[int, float] = {}  # step -> duration of its last execution
    previous, restarted = 0.0, False  # time of the previous step, if any; whether an attempt has begun since
    for old, new in pairs:
        restarted = restarted or new.get("event") in ("start", "resume")
        if "loss" not in new:
            continue
        found.repeated += last.get(new["step"], 0.0)
        last[new["step"]] = new["time"] - old["time"] if "loss" in old else usual
        if restarted and previous:
            found.restarts.append(new["time"] - usual - previous)
        previous, restarted = new["time"], False
    found.kept, found.steps = sum(last.values()), len(last)
    return found


def report(name: str, training: Training, faults: dict[str, int], wall: float, end: float) -> None:
    """Print the shares. wall: duration in seconds. end: Unix seconds."""
    shares = shares_of([record for record in training.records() if record["time"] <= end])
    counted = ", ".join(f"{count} {kind}{'s' * (count != 1)}" for kind, count in faults.items())
    print(f"{name}: {shares.steps:,} steps and {sum(faults.values())} faults ({counted}) in {wall:.0f} s")
    restarts = sum(shares.restarts)
    other = wall - shares.kept - shares.repeated - restarts
    print(f"  kept {shares.kept / wall:.3f} (aim: {AIM})", end="   ")
    print(f"repeated {shares.repeated / wall:.3f}   restarts {restarts / wall:.3f}   other {other / wall:.3f}")
    if shares.restarts:
        low, middle, high = (value(shares.restarts) for value in (min, statistics.median, max))
        print(f"  {len(shares.restarts)} restarts of {middle:.2f} s ({low:.2f} to {high:.2f})")
    choices = [tuple(float(value.replace(",", "")) for value in found) for found in CHOICE.findall(_text(training))]
    if choices:
        used, cost, step = (statistics.median(values) for values in zip(*choices, strict=True))
        period = wall / max(sum(faults.values()), 1)
        best = best_interval(cost, period) / step
        print(
            f"  checkpoint every {used:.0f} steps ({used * step:.2f} s); for one fault per {period:.0f} s, saves of "
            f"{cost:.3f} s and steps of {step:.3f} s, the formula gives {best:.0f}"
        )
    sys.stdout.flush()


def _text(training: Training) -> str:
    return training.output.read_text(errors="replace")


def main() -> int:
    """Print the shares of each side."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--period", type=float, default=60.0, metavar="SECONDS", help="mean time between faults")
    options.add_argument("--seed", type=int, default=1, help="of the faults")
    options.add_argument("--torchrun", action="store_true", help="also torchrun; faults of ranks only")
    arguments = options.parse_args()
    os.environ.pop("PYTHONUNBUFFERED", None)
    faults = Faults(("rank",) if arguments.torchrun else ("rank", "agent"), arguments.period, arguments.seed)
    sides = {"Muster": start_muster} | ({"torchrun": start_torchrun} if arguments.torchrun else {})
    with nodes(3, prefix="goodput") as (names, directory):
        for name, start in sides.items():
            (directory / name).mkdir()
            training = start(names, directory / name, arguments.period)
            try:
                limit = time.monotonic() + START_LIMIT
                while not any("loss" in record for record in training.records()):
                    if time.monotonic() > limit:
                        sys.exit(f"{name}: no step within {START_LIMIT:.0f} s\n{_text(training)}")
                    time.sleep(0.1)
                started, seconds = time.time(), arguments.minutes * 60
                counts = faults.inflict(training, len(names) * RANKS, time.monotonic() + seconds)
                ended = time.time()
            finally:
                training.stop()
            report(name, training, counts, ended - started, ended)
    return 0


if __name__ == "__main__":
    sys.exit(main())
