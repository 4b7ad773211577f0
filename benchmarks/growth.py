"""How do costs grow with the size of a run or a list?

Each cost is measured at several sizes. The result is the value at the largest size divided by that at the smallest.

    python -m benchmarks.growth [line|runs|checkpoints|jobs ...]

line: peak memory of agent and supervisor when a rank writes a line of that many MB (1 MB: 10^6 bytes).
runs: time of `ls.sh` for that many SLURM runs without a verdict, with 50 rows and with all rows, if each call
of `squeue` takes 0.1 s.
checkpoints: time to find the newest of that many checkpoints, and to remove old ones after a save, if reading a
manifest takes 4 ms.
jobs: CPU time and peak memory of `why` and `status` for a list of that many jobs, all done.

Exits with 1 when a result is above its limit. The module also has the table of the other programs about growth.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KIT = Path(__file__).resolve().parents[1]
READING, ASKING = 0.004, 0.1  # seconds that a manifest and squeue take
LINE = """
import os, sys
for _ in range(int(sys.argv[1])):
    os.write(1, b"x" * 1_000_000)
print()
"""
USAGE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6)
"""


def exponent(sizes: Sequence[int], values: Sequence[float | None]) -> str:
    """The exponent e if values grow as size ** e, from the two largest sizes that have a value; 1.0: linear growth."""
    known = [(size, value) for size, value in zip(sizes, values, strict=True) if value]
    if len(known) < 2:
        return "–"
    (small, low), (large, high) = known[-2:]
    return f"{math.log(high / low) / math.log(large / small):.1f}"


def table(head: str, sizes: Sequence[int], rows: Mapping[str, Sequence[float | None]]) -> str:
    """The rows as text: a value for each size ("–" if it is missing), then the exponent of growth."""
    width = max(map(len, (head, *rows)))
    lines = [f"{head:{width}}" + "".join(f"{size:>10,}" for size in sizes) + "  exponent"]
    for name, values in rows.items():
        cells = ("–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values)
        lines.append(f"{name:{width}}" + "".join(f"{cell:>10}" for cell in cells) + f"{exponent(sizes, values):>10}")
    return "\n".join(lines)


# ---------------------------------------------------------------- costs


def long_line(size: int, directory: Path) -> dict[str, float]:
    """Peak memory in MB."""
    import psutil

    (directory / "line.py").write_text(LINE)
    launcher = [str(KIT / "scripts/ssh/launch_singlenode.sh"), "--quiet", "--python", sys.executable]
    command = [*launcher, "--script", "line.py", "-", "1", "--", str(size)]
    peak = {"agent": 0.0, "supervisor": 0.0}
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                try:
                    words = " ".join(child.cmdline())
                    status = Path(f"/proc/{child.pid}/status").read_text()
                except (psutil.Error, OSError):
                    continue
                name = "supervisor" if "launch.supervisor" in words else "agent" if "lib/agent.py" in words else ""
                if name and "VmHWM:" in status:
                    peak[name] = max(peak[name], int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6)
            time.sleep(0.01)
    return {f"{name}, MB": value for name, value in peak.items()}


def many_runs(size: int, directory: Path) -> dict[str, float]:
    """Seconds."""
    squeue = directory / "squeue"
    squeue.write_text(f"#!/bin/sh\nexec sleep {ASKING}\n")
    squeue.chmod(0o755)
    logs = directory / "logs"
    launcher = {"host": "other", "pid": 1, "since": 1, "machine": "other", "grace": 8}
    node = {"node": "node1", "address": None, "processes": 1, "first_rank": 0}
    for number in range(size):
        run = logs / f"train-20260101-{number:06}-0000"
        run.mkdir(parents=True, mode=0o700)
        facts = {
            "directory": str(run), "python": sys.executable, "user": "me", "started": "2026-01-01T00:00:00+00:00",
            "command": ["train"], "layout": [node], "launcher": launcher, "slurm_job": f"{number + 1}",
        }  # fmt: skip
        (run / "run.json").write_text(json.dumps(facts))
    environment = os.environ | {"PATH": f"{directory}:{os.environ['PATH']}"}
    status = [str(KIT / "scripts/ls.sh"), "--python", sys.executable, "--log-dir", str(logs)]

    def seconds(*options: str) -> float:
        return timed(
            lambda: subprocess.run([*status, *options], check=True, env=environment, stdout=subprocess.DEVNULL)
        )

    return {"50 rows, s": seconds(), "all rows, s": seconds("--rows", str(size))}


def many_checkpoints(size: int, directory: Path) -> dict[str, float]:
    """Seconds."""
    from distributed.checkpoint.directory import CheckpointInfo, newest, open_hashed, take_over

    manifest = {"score": None, "ranks": 1, "sharded": False, "written": "2026-01-01T00:00:00+00:00", "facts": {}}
    real = CheckpointInfo.read

    def read(path: Path) -> CheckpointInfo:
        time.sleep(READING)
        return real(path)

    with take_over(directory / "checkpoints") as owner:

        def save(step: int) -> None:
            entries: dict[str, dict[str, Any]] = {}
            unpublished = owner.new_directory(step)
            with open_hashed(unpublished / "state.pt", entries) as file:
                file.write(b"state")
            owner.publish(unpublished, {**manifest, "step": step, "files": entries})

        for step in range(size):
            save(step)
        CheckpointInfo.read = read  # type: ignore[method-assign]
        try:
            found = timed(lambda: newest(owner.directory))
            owner.prune(size - 1, keep=size)
            removed = []
            for step in (size, size + 1):  # the first time, all manifests are read
                save(step)
                removed.append(timed(lambda: owner.prune(step, keep=size)))  # noqa: B023 (called at once)
        finally:
            CheckpointInfo.read = real  # type: ignore[method-assign]
    return {"newest, s": found, "first removal, s": removed[0], "later removals, s": removed[1]}


def many_jobs(size: int, directory: Path) -> dict[str, float]:
    """Seconds of CPU time, and MB."""
    from benchmarks.jobs_scale import job_list
    from distributed.jobs.journal.journal import Journal
    from distributed.jobs.journal.state import job_records
    from distributed.jobs.lists.config import read_jobs

    (directory / "jobs.json").write_text(json.dumps(job_list(size, 10)))
    jobs, end = read_jobs(directory / "jobs.json"), {"started": 1.0, "ended": 2.0, "failure": "", "reason": ""}
    process = {"pid": 4711, "start_time": 815, "boot_id": "2f6e4d4e-4c2f-4c3e-9a51-2b1c6d7e8f90"}
    with Journal.open(directory / "results.journal") as journal:
        journal.add("list", list="0123456789", cwd=str(directory), script="train.py", call={}, jobs=job_records(jobs))
        for number, job in enumerate(jobs):
            attempt, slots = f"{job.id}.1", [number % 8]
            journal.add("start", attempt=attempt, server=f"gpu{number % 100}", slots=slots, gpus=slots)
            journal.add("running", attempt=attempt, process=process)
            journal.add("ended", attempt=attempt, code=0, lines=["done"], metrics={"step": 1, "loss": 2.7183}, **end)
            journal.add("settle", job=job.id, state="done", reason="")
        journal.commit()
    costs = {}
    for name, arguments in {"why": [jobs[size // 2].id], "status": []}.items():
        program = str(KIT / "scripts/jobs/run_distributed_training.py")
        command = [sys.executable, program, name, "--log-file", str(directory / "results.json"), *arguments]
        seconds, memory = subprocess.check_output([sys.executable, "-c", USAGE, *command], text=True).split()
        costs |= {f"{name}, s": float(seconds), f"{name}, MB": float(memory)}
    return costs


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Cost:
    """What is measured, and the highest ratio of a value at the largest size to that at the smallest."""

    measure: Callable[[int, Path], dict[str, float]]  # size, empty directory -> values by name
    sizes: tuple[int, ...]
    limits: Mapping[str, float]


COSTS = {
    "line": Cost(long_line, (1, 100, 1000), {"agent, MB": 1.1, "supervisor, MB": 1.1}),
    "runs": Cost(many_runs, (10, 50, 200), {"50 rows, s": 2, "all rows, s": 4}),
    "checkpoints": Cost(many_checkpoints, (10, 100, 1000), {"newest, s": 4, "later removals, s": 8}),
    "jobs": Cost(many_jobs, (1000, 10_000, 50_000), {"why, s": 8, "why, MB": 6, "status, s": 12, "status, MB": 7}),
}


def main() -> int:
    """Print a table and the ratios for each cost. Returns 1 if a ratio is above its limit."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("costs", nargs="*", choices=[[], *COSTS], help="what to measure (default: all)")
    met = True
    for name in options.parse_args().costs or COSTS:
        cost, rows = COSTS[name], dict[str, list[float | None]]()
        for size in cost.sizes:
            with tempfile.TemporaryDirectory() as directory:
                for row, value in cost.measure(size, Path(directory)).items():
                    rows.setdefault(row, []).append(value)
        print(table(name, cost.sizes, rows))
        for row, limit in cost.limits.items():
            ratio = (rows[row][-1] or math.inf) / (rows[row][0] or math.inf)
            met &= ratio <= limit
            print(f"{row}: {ratio:.2f} (limit {limit:g})")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
