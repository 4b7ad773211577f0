"""Compare the time of a job list with the shortest possible time on its slots, with and without a lost server.

Three lists of 200 jobs of different lengths run one after the other, on three servers of 2, 4 and 8 slots:

  - with _expected_seconds in each job, so that the longest jobs start first
  - without _expected_seconds
  - with _expected_seconds and a server (by default the largest) that is powered off after half of the shortest time

No schedule is shorter than max(total / slots, longest), where total and longest are the durations of all jobs together
and of the longest job. If a server is lost at second t, none is shorter than t + rest / remaining slots. Here rest is
total - slots * t + lost work, because slots of a perfect schedule are always busy, and lost work is repeated. The bound
includes neither the time to connect nor the --lost-after seconds after which a server is treated as lost. Times include
the whole command. Needs root.

    python -m benchmarks.jobs_makespan [--jobs 200] [--mean 5] [--lost-after 10]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.laboratory import KIT, LAB, nodes

RUN = KIT / "scripts/jobs/run_distributed_training.py"
SLOTS = (2, 4, 8)  # of each server
SCRIPT = """#!/bin/sh
exec sleep "$2"
"""


def lengths(count: int, mean: float) -> list[float]:
    """Seconds of each job, uniformly distributed from 0.2 to 1.8 times the mean."""
    generator = random.Random(11)
    return [round(generator.uniform(0.2, 1.8) * mean, 2) for _ in range(count)]


def run(
    names: list[str], directory: Path, seconds: list[float], with_expected: bool, options: list[str]
) -> tuple[float, dict[str, Any]]:
    """Run a list; return (seconds of the command, results.json)."""
    directory.mkdir()
    script = directory / "job.sh"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    servers = [
        {"host": name, "gpus": 0, "slots_per_gpu": slots, "workdir": str(directory)}
        for name, slots in zip(names, SLOTS, strict=True)
    ]
    (directory / "cluster.json").write_text(json.dumps({"servers": servers, "script_path": script.name}))
    jobs = [
        {"seconds": each, "n": number} | ({"_expected_seconds": each} if with_expected else {})
        for number, each in enumerate(seconds)
    ]
    (directory / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, str(RUN), "--cluster-config", "cluster.json", "--jobs-config", "jobs.json", "--no-tmux"]
    start = time.monotonic()
    subprocess.run([*command, *options], cwd=directory, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    elapsed = time.monotonic() - start
    results = json.loads((directory / "results.json").read_text())
    if results["totals"]["done"] != len(jobs):
        sys.exit(f"{results['totals']['done']} of {len(jobs)} jobs are done")
    return elapsed, results


def undisturbed(names: list[str], directory: Path, seconds: list[float], with_expected: bool) -> None:
    """Run a list without the loss of a server."""
    elapsed, _ = run(names, directory, seconds, with_expected, [])
    shortest = max(sum(seconds) / sum(SLOTS), max(seconds))
    kind = "with _expected_seconds" if with_expected else "without _expected_seconds"
    print(
        f"{kind}: {elapsed:.1f} s, bound {shortest:.1f} s, ratio {elapsed / shortest:.3f} (target: at most 1.05)",
        flush=True,
    )


class PowerOff:
    """Powers off a server after a number of seconds, and records the time."""

    def __init__(self, name: str, lab: Path, after: float) -> None:
        self.command, self.env = [str(LAB), "kill", name], os.environ | {"MUSTER_LAB": str(lab)}
        self.done_at = 0.0  # Unix seconds; 0 before the server is powered off
        self._timer = threading.Timer(after, self._run)
        self._timer.start()

    def _run(self) -> None:
        subprocess.run(self.command, env=self.env, check=True)
        self.done_at = time.time()


def with_loss(names: list[str], directory: Path, seconds: list[float], lost: int, lab: Path, lost_after: int) -> None:
    """Run a list during which a server is powered off. lost: index of the server. lost_after: see --lost-after."""
    slots, left = sum(SLOTS), sum(SLOTS) - SLOTS[lost]
    start = time.time()
    power_off = PowerOff(names[lost], lab, sum(seconds) / slots / 2)
    elapsed, results = run(names, directory, seconds, True, ["--lost-after", str(lost_after)])
    attempts = [attempt for job in results["jobs"] for attempt in job["attempts"]]
    lost_work = [max(0.0, power_off.done_at - each["start"]) for each in attempts if each["failure"] == "server lost"]
    if not power_off.done_at or not lost_work:
        sys.exit("no attempt was lost")
    t = power_off.done_at - start  # see the docstring of this module
    shortest = t + (sum(seconds) - slots * t + sum(lost_work)) / left
    print(
        f"{names[lost]} ({SLOTS[lost]} slots, {len(lost_work)} jobs on it) lost after {t:.1f} s: {elapsed:.1f} s, "
        f"bound {shortest:.1f} s, ratio {elapsed / shortest:.3f} (target: at most 1.05)"
    )


def main() -> int:
    """Print the time of each list, its bound and the ratio."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--jobs", type=int, default=200)
    options.add_argument("--mean", type=float, default=5.0, help="seconds of a job")
    options.add_argument("--lose", type=int, choices=(1, 2, 3), default=3, help="which server is lost (default: 3)")
    options.add_argument("--lost-after", type=int, default=10, help="see run_distributed_training.py (default: 10)")
    options.add_argument(
        "--only",
        choices=("estimated", "unestimated", "lost"),
        help="run one list: with or without _expected_seconds, or with a lost server",
    )
    arguments = options.parse_args()
    seconds = lengths(arguments.jobs, arguments.mean)
    with tempfile.TemporaryDirectory() as name, nodes(3, prefix="jbench") as (names, directory):
        for kind in [arguments.only] if arguments.only else ["estimated", "unestimated"]:
            if kind != "lost":
                undisturbed(names, Path(name, kind), seconds, with_expected=kind == "estimated")
        if arguments.only in (None, "lost"):
            with_loss(names, Path(name, "lost"), seconds, arguments.lose - 1, directory / "lab", arguments.lost_after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
