"""Time from SIGKILL of the highest rank to the next step of the script, with --max-restarts 3.

The ranks of a small script all-reduce in a loop; rank 0 writes the time of each step. One measurement starts a launch,
waits for 20 steps, kills the highest rank, and waits until the ranks of the next attempt have done a step. A recovery
that takes longer than 30 s counts as failed. The launchers that are compared (the sides) are measured in turn:

- On this machine, launch_singlenode.sh against torchrun. torchrun is measured with its defaults, where the ranks of all
  attempts use the store of the agent, and with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, where rank 0 of each attempt has
  a store.
- On laboratory nodes of 2 ranks, launch_torchrun_auto.sh. Without --before, it has no baseline.

With --lines, launch_singlenode.sh is compared with itself: ranks that have logged 1,000 lines of metrics, and ranks
that have logged more. With --before, the launchers of another checkout of Muster are measured too, for example of an
earlier commit in a git worktree. For each launcher of Muster, the events of one recovery, that of median duration, are
printed too. Only the laboratory nodes need root.

    python -m benchmarks.recovery [--pairs 7] [--ranks 2 4] [--nodes 3] [--before DIR] [--lines 1000000]
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TextIO

from benchmarks.laboratory import KIT, nodes
from benchmarks.pairs import ratio_of

SCRIPT = """
import os, sys, time

if os.environ["RANK"] == os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ.get("LINES"):
    with open(os.environ["MUSTER_METRICS"], "w") as metrics:
        for step in range(int(os.environ["LINES"])):
            metrics.write('{"step": %d, "time": %d, "loss": 2.31, "lr": 0.001}\\n' % (step, 1700000000 + step))

def write(event):
    file.write(f"{event} {os.environ['RANK']} {os.getpid()} {time.time()}\\n")

with open(sys.argv[1], "a", buffering=1) as file:
    write("started")
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    write("joined")
    while True:
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 0:
            write("step")
        time.sleep(0.01)
"""
STEPS = 20  # before the kill
LIMIT = 30.0  # seconds for a recovery
START_LIMIT = 60.0  # seconds until the first steps
STOP_LIMIT = 20.0  # seconds for the launch to stop after SIGTERM
INTERVAL = 0.005  # seconds between two reads of the files
NODE_RANKS = 2
RESTARTS = ["--max-restarts", "3"]


class Event(NamedTuple):
    """A line that a rank of the script has written."""

    name: str  # started, joined or step
    rank: int
    pid: int
    time: float  # Unix seconds


@dataclass
class Recovery:
    """Seconds from SIGKILL to each event, in the order in which they are printed."""

    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return self.seconds["first step"]


@dataclass(frozen=True)
class Side:
    """One way to start the script."""

    command: list[str]  # without the arguments of the script
    environment: Mapping[str, str] = field(default_factory=dict)
    is_muster: bool = True


# ---------------------------------------------------------------- one measurement


def read(file: TextIO) -> Iterator[Event]:
    """Yield the events that were written since the last call."""
    for line in file:
        name, rank, pid, at = line.split()
        yield Event(name, int(rank), int(pid), float(at))


def is_rank(pid: int, script: Path) -> bool:
    """Whether the process runs the script."""
    with suppress(OSError):
        return os.fsencode(script) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False


@contextmanager
def launched(side: Side, script: Path, events: Path, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the script, and stop it at the end of the block; then kill the ranks that remain."""
    events.write_text("")
    with output.open("wb") as console:
        process = subprocess.Popen(
            [*side.command, str(events)], cwd=script.parent, env=os.environ | side.environment,
            stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with events.open() as file:
            left = {event.pid for event in read(file) if is_rank(event.pid, script)}
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def recover(side: Side, script: Path, ranks: int) -> Recovery | None:
    """Kill the highest rank of a new launch. Returns None when no step follows."""
    events, output = script.with_name("events"), script.with_name("output")
    pids: dict[int, int] = {}  # rank -> process id
    with launched(side, script, events, output) as process, events.open() as file, output.open() as console:
        steps, end = 0, time.monotonic() + START_LIMIT
        while steps < STEPS or len(pids) < ranks:
            if time.monotonic() > end or process.poll() is not None:
                sys.exit(f"{' '.join(side.command)}: no {STEPS} steps\n{output.read_text()}")
            time.sleep(INTERVAL)
            for event in read(file):
                pids[event.rank] = event.pid
                steps += event.name == "step"
        return kill_last(process, pids, file, console)


def kill_last(
    process: subprocess.Popen[bytes], pids: Mapping[int, int], file: TextIO, console: TextIO
) -> Recovery | None:
    """Kill the highest rank, and record what follows until the first step of the next attempt."""
    with ExitStack() as stack:
        exits = select.poll()
        for pid in pids.values():
            exits.register(stack.enter_context(pidfd(pid)), select.POLLIN)
        killed, running = time.time(), len(pids)
        os.kill(pids[max(pids)], signal.SIGKILL)
        reported = ended = started = joined = 0.0
        while time.time() < killed + LIMIT and process.poll() is None:
            time.sleep(INTERVAL)
            for exited, _ in exits.poll(0):
                exits.unregister(exited)
                running, ended = running - 1, time.time()
            if not reported and "agent: rank " in console.read():
                reported = time.time()
            for event in read(file):
                if event.pid in pids.values():
                    continue
                if event.name == "step":
                    times = {
                        "agent's first line about a failed rank": reported,
                        "last rank of the old attempt ended": 0.0 if running else ended,
                        "script started on all ranks": started,
                        "init_process_group done on all ranks": joined,
                        "first step": event.time,
                    }
                    return Recovery({name: at - killed for name, at in times.items() if at})
                started = event.time if event.name == "started" else started
                joined = event.time if event.name == "joined" else joined
    return None


@contextmanager
def pidfd(pid: int) -> Iterator[int]:
    """A process file descriptor, see pidfd_open(2)."""
    file = os.pidfd_open(pid)
    try:
        yield file
    finally:
        os.close(file)


# ---------------------------------------------------------------- the sides


def on_this_machine(script: Path, ranks: int, checkouts: Mapping[str, Path]) -> dict[str, Side]:
    """The launcher of each checkout, and torchrun with both kinds of store."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *RESTARTS]
    torchrun += ["--nproc-per-node", str(ranks), "--", str(script)]
    sides = {
        name: Side([*launcher(checkout, "launch_singlenode.sh", script), "-", str(ranks), "--"])
        for name, checkout in checkouts.items()
    }
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return sides | {
        "torchrun": Side(torchrun, is_muster=False),
        "torchrun, store of rank 0": Side(torchrun, own_store, is_muster=False),
    }


def with_lines(sides: Mapping[str, Side], lines: int) -> dict[str, Side]:
    """The sides of Muster, each with many and with few lines of metrics."""
    return {
        f"{name}, {count:,} lines": replace(side, environment={"LINES": str(count)})
        for name, side in sides.items()
        for count in (lines, 1000)
        if side.is_muster
    }


def on_nodes(script: Path, names: Sequence[str], checkouts: Mapping[str, Path]) -> dict[str, Side]:
    """The launcher of each checkout."""
    arguments = ["--env", "OMP_NUM_THREADS=1", "-", str(NODE_RANKS), *names, "--"]
    return {
        name: Side([*launcher(checkout, "launch_torchrun_auto.sh", script), *arguments])
        for name, checkout in checkouts.items()
    }


def launcher(checkout: Path, name: str, script: Path) -> list[str]:
    return [str(checkout / "scripts/ssh" / name), *RESTARTS, "--python", sys.executable, "--script", str(script)]


# ---------------------------------------------------------------- the report


def measure(label: str, sides: Mapping[str, Side], script: Path, ranks: int, pairs: int) -> None:
    """Print the results of all measurements of these sides."""
    results: dict[str, list[Recovery | None]] = {name: [] for name in sides}
    for pair in range(pairs):
        for name in sorted(sides, reverse=bool(pair % 2)):
            results[name].append(recover(sides[name], script, ranks))
    print(label)
    first, *others = sides
    for name, found in results.items():
        print(f"  {name:26} {summary(found)}")
    for name in others:
        paired = zip(results[first], results[name], strict=True)
        both = [(own.total, peer.total) for own, peer in paired if own and peer]
        if len(both) > 1:
            print(f"  {first} and {name}: {ratio_of(*zip(*both, strict=True))}")
    for name, side in sides.items():
        if side.is_muster and (recoveries := [recovery for recovery in results[name] if recovery]):
            print(f"  {name}, the median recovery, seconds after SIGKILL:")
            median = sorted(recoveries, key=lambda recovery: recovery.total)[(len(recoveries) - 1) // 2]
            for event, seconds in median.seconds.items():
                print(f"    {seconds:6.3f}  {event}")
    sys.stdout.flush()


def summary(found: Sequence[Recovery | None]) -> str:
    """The number of recoveries, and their median and range."""
    totals = [recovery.total for recovery in found if recovery]
    counted = f"recovered {len(totals)} of {len(found)}"
    if not totals:
        return counted
    return f"{counted}: {statistics.median(totals):5.2f} s ({min(totals):.2f} to {max(totals):.2f})"


def main() -> int:
    """Print the results on this machine and on the nodes."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--pairs", type=int, default=7, help="measurements of each side")
    options.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="on this machine")
    options.add_argument("--nodes", type=int, default=3, help="laboratory nodes of 2 ranks; 0: none")
    options.add_argument("--lines", type=int, metavar="N", help="lines of metrics, against 1,000, on this machine")
    options.add_argument("--before", type=Path, metavar="DIR", help="another checkout of Muster")
    arguments = options.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("PYTHONUNBUFFERED", None)
    checkouts = {"Muster": KIT} | ({"Muster before": arguments.before.resolve()} if arguments.before else {})
    with tempfile.TemporaryDirectory() as name:
        script = Path(name, "ranks.py")
        script.write_text(SCRIPT)
        for ranks in arguments.ranks:
            sides = on_this_machine(script, ranks, checkouts)
            sides = with_lines(sides, arguments.lines) if arguments.lines else sides
            measure(f"{ranks} ranks on this machine", sides, script, ranks, arguments.pairs)
    if arguments.nodes:
        with nodes(arguments.nodes, prefix="recovery") as (names, directory):
            script = directory / "ranks.py"
            script.write_text(SCRIPT)
            sides, ranks = on_nodes(script, names, checkouts), arguments.nodes * NODE_RANKS
            measure(f"{arguments.nodes} nodes of {NODE_RANKS} ranks", sides, script, ranks, arguments.pairs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
