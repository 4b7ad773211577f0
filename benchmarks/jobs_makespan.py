"""How close does a job list come to the shortest time that its slots allow, also when a server is lost half way?

200 jobs of mixed length on three servers of 2, 4 and 8 slots, one list after the other:

  - each job says how long it takes (_expected_seconds), so the longest start first; and the same without that;
  - with a server (the largest, by default) that the laboratory powers off when half of the shortest time has passed.

No schedule is shorter than max(total / slots, longest). With a server lost at second t, none is shorter than
t + rest / (slots that are left), where rest = total - slots * t + thrown away: until t every slot of a perfect schedule
is busy; what the lost server ran at t is thrown away, and done again. That a server is lost, and not only unreachable
for a while, is known --lost-after seconds after the connection is; this is not part of the bound, and neither is the
time that connecting takes. Times are taken from the command to its end. Needs root.

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
    """Seconds of each job: from a fifth of the mean to nine times as much, as evenly as a computer's dice fall."""
    dice = random.Random(11)
    return [round(dice.uniform(0.2, 1.8) * mean, 2) for _ in range(count)]


def run(
    names: list[str], directory: Path, seconds: list[float], told: bool, options: list[str]
) -> tuple[float, dict[str, Any]]:
    """(seconds from the command to its end, results.json)."""
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
        {"seconds": each, "n": number} | ({"_expected_seconds": each} if told else {})
        for number, each in enumerate(seconds)
    ]
    (directory / "jobs.json").write_text(json.dumps(jobs))
    words = [sys.executable, str(RUN), "--cluster-config", "cluster.json", "--jobs-config", "jobs.json", "--no-tmux"]
    begun = time.monotonic()
    subprocess.run([*words, *options], cwd=directory, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    taken = time.monotonic() - begun
    results = json.loads((directory / "results.json").read_text())
    if results["totals"]["done"] != len(jobs):
        sys.exit(f"{results['totals']['done']} of {len(jobs)} jobs are done")
    return taken, results


def whole(names: list[str], directory: Path, seconds: list[float], told: bool) -> None:
    """A list that nothing disturbs."""
    taken, _ = run(names, directory, seconds, told, [])
    shortest = max(sum(seconds) / sum(SLOTS), max(seconds))
    says = "jobs say how long they take" if told else "jobs say nothing"
    print(
        f"{says}: {taken:.1f} s, bound {shortest:.1f} s, ratio {taken / shortest:.3f} (wanted: at most 1.05)",
        flush=True,
    )


class PowerOff:
    """Powers a server off after so many seconds, and remembers when it was done."""

    def __init__(self, name: str, lab: Path, after: float) -> None:
        self.words, self.env = [str(LAB), "kill", name], os.environ | {"MUSTER_LAB": str(lab)}
        self.done = 0.0  # Unix seconds
        self._timer = threading.Timer(after, self._run)
        self._timer.start()

    def _run(self) -> None:
        subprocess.run(self.words, env=self.env, check=True)
        self.done = time.time()


def with_loss(names: list[str], directory: Path, seconds: list[float], lost: int, lab: Path, after: int) -> None:
    """A server is powered off half way. lost: its index."""
    slots, left = sum(SLOTS), sum(SLOTS) - SLOTS[lost]
    begun = time.time()
    power_off = PowerOff(names[lost], lab, sum(seconds) / slots / 2)
    taken, results = run(names, directory, seconds, True, ["--lost-after", str(after)])
    attempts = [attempt for job in results["jobs"] for attempt in job["attempts"]]
    in_vain = [max(0.0, power_off.done - each["start"]) for each in attempts if each["failure"] == "server lost"]
    if not power_off.done or not in_vain:
        sys.exit("no attempt was lost")
    moment = power_off.done - begun
    shortest = moment + (sum(seconds) - slots * moment + sum(in_vain)) / left
    print(
        f"{names[lost]} ({SLOTS[lost]} slots, {len(in_vain)} jobs on it) lost after {moment:.1f} s: {taken:.1f} s, "
        f"bound {shortest:.1f} s, ratio {taken / shortest:.3f} (wanted: at most 1.05)"
    )


def main() -> int:
    """Print the time of each list, its bound and the ratio."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--jobs", type=int, default=200)
    options.add_argument("--mean", type=float, default=5.0, help="seconds of a job")
    options.add_argument("--lose", type=int, choices=(1, 2, 3), default=3, help="which server is lost (default: 3)")
    options.add_argument("--lost-after", type=int, default=10, help="see run_distributed_training.py (default: 10)")
    options.add_argument("--only", choices=("told", "untold", "lost"), help="one of the three lists")
    given = options.parse_args()
    seconds = lengths(given.jobs, given.mean)
    with tempfile.TemporaryDirectory() as name, nodes(3, prefix="jbench") as (names, folder):
        for kind in [given.only] if given.only else ["told", "untold"]:
            if kind != "lost":
                whole(names, Path(name, kind), seconds, told=kind == "told")
        if given.only in (None, "lost"):
            with_loss(names, Path(name, "lost"), seconds, given.lose - 1, folder / "lab", given.lost_after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
