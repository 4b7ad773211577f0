"""Measure the time saved by sharing base models, and whether base models are copied more often than needed.

Experiments run on three servers that share no files and have two slots each. Each list runs three times:

  two phases   each base model is trained once; an experiment starts when its base model is copied
  barrier      the same, but an earlier list trains all base models; the experiments start when it has ended
  alone        each experiment trains its base model itself

The lists are 15 experiments on 1 base model, and 12 experiments on 4 base models of different training times. Training
is `sleep`, and writes a file of --mb MiB. "predicted" is the number of avoided base trainings times their seconds, as
in the report of --plan; "measured" is the difference of used slot seconds. "copied" is the traffic of all network
interfaces of the servers, divided by the needed traffic: one copy of each base model for each server that ran
experiments on this base model. The server that trained a base model receives no copy, but sends the base model once,
which is the same traffic. Needs root.

    python -m benchmarks.two_phase [--mb 20] [--base 8] [--experiment 2]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.laboratory import KIT, nodes
from distributed.training.base_model import CACHE

JOBS = KIT / "scripts/jobs"
SLOTS = 2  # of each server
SCRIPT = """#!/bin/sh
while [ $# -gt 0 ]; do
  case $1 in --mode) mode=$2 ;; --base_seconds) base=$2 ;; --seconds) seconds=$2 ;; --mb) mb=$2 ;; esac
  shift
done
case $mode in
  base_only)
    sleep "$base"
    cd "$MUSTER_OUTPUT_DIR"
    head -c "${mb}M" /dev/urandom >best_base_model.pt
    for name in metrics losses config; do echo '{}' >"base_$name.json"; done ;;
  full_fine_tuning) sleep "$seconds" ;;
  alone) sleep "$base" && sleep "$seconds" ;;
esac
"""


@dataclass(frozen=True)
class Measurement:
    """The figures of one run of a list."""

    seconds: float  # wall time of the command
    results: dict[str, Any]
    traffic: int  # bytes that the servers sent and received

    @property
    def slot_seconds(self) -> float:
        return float(self.results["totals"]["slot_seconds"])


def jobs_of(lengths: list[float], count: int, seconds: float, mb: int, mode: str) -> list[dict[str, Any]]:
    """Experiments that use the base models in turn. lengths: training seconds of each base model."""
    return [
        {"n": number, "mode": mode, "base_seconds": lengths[number % len(lengths)], "seconds": seconds, "mb": mb,
         "base_participants": ["a"], "prefix": f"{mode}{number}"}
        for number in range(count)
    ]  # fmt: skip


def traffic(names: list[str]) -> int:
    """Bytes that the interfaces of these nodes have sent and received since boot."""
    found = 0
    for name in names:
        shown = subprocess.run(["ssh", name, "cat /proc/net/dev"], check=True, capture_output=True, text=True).stdout
        for line in shown.splitlines()[2:]:
            interface, _, counters = line.partition(":")
            if interface.strip() != "lo":
                found += int(counters.split()[0]) + int(counters.split()[8])
    return found


def run(names: list[str], directory: Path, jobs: list[dict[str, Any]], results_file: str) -> Measurement:
    servers = [{"host": name, "gpus": 0, "slots_per_gpu": SLOTS, "workdir": str(directory)} for name in names]
    base_models = {"base": ["base_seconds", "mb"], "experiment": ["n", "seconds"]}
    cluster = {"servers": servers, "script_path": "job.sh", "base_models": base_models}
    (directory / "cluster.json").write_text(json.dumps(cluster))
    (directory / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, str(JOBS / "run_two_phase_training.py"), "--cluster-config", "cluster.json"]
    command += ["--jobs-config", "jobs.json", "--no-tmux", "--log-file", results_file]
    before, start = traffic(names), time.monotonic()
    subprocess.run(command, cwd=directory, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - start
    results = json.loads((directory / results_file).read_text())
    if results["totals"]["done"] != results["totals"]["jobs"]:
        sys.exit(f"{results['totals']['done']} of {results['totals']['jobs']} jobs are done")
    return Measurement(seconds, results, traffic(names) - before)


def copied(measurement: Measurement, mb: int) -> str:
    """The copied bytes and their ratio to the needed bytes, as text."""
    experiments = [job for job in measurement.results["jobs"] if "base_model_hash" in job["options"]]
    needed = {(job["options"]["base_model_hash"], job["attempts"][-1]["server"]) for job in experiments}
    mib, needed_mib = measurement.traffic / 2**20, len(needed) * mb
    return f"{mib:.0f} MiB of {needed_mib} MiB, ratio {mib / needed_mib:.2f}"


@contextmanager
def servers() -> Iterator[tuple[list[str], Path]]:
    """The names of three servers, and the path of their private working directories."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name, "work")
        directory.mkdir()
        with nodes(3, "--private", str(directory), prefix="jbench") as (names, laboratory):
            (directory / "job.sh").write_text(SCRIPT)
            (directory / "job.sh").chmod(0o755)
            for server in names:
                shutil.copy(directory / "job.sh", laboratory / f"lab/{server}/private{directory}")
            yield names, directory


def measure(title: str, lengths: list[float], count: int, arguments: argparse.Namespace) -> None:
    """Print the figures of one list. Each run has new servers without base models."""
    runs: dict[str, Measurement] = {}
    for name, mode in (("two phases", "full_fine_tuning"), ("barrier", "full_fine_tuning"), ("alone", "alone")):
        with servers() as (names, directory):
            earlier = 0.0
            if name == "barrier":
                first = jobs_of(lengths, len(lengths), 0, arguments.mb, mode)
                first = [job | {"prefix": f"first{job['n']}"} for job in first]
                earlier = run(names, directory, first, "first.json").seconds
            jobs = jobs_of(lengths, count, arguments.experiment, arguments.mb, mode)
            found = run(names, directory, jobs, "results.json")
            runs[name] = replace(found, seconds=earlier + found.seconds)
            assert (directory / CACHE).is_dir() == (mode != "alone")
    two, barrier, alone = runs.values()
    predicted = sum(lengths[number % len(lengths)] for number in range(count)) - sum(lengths)
    print(f"{title}: {two.seconds:.1f} s; with a barrier {barrier.seconds:.1f} s; alone {alone.seconds:.1f} s")
    print(f"  ratio to alone {two.seconds / alone.seconds:.2f}, to a barrier {two.seconds / barrier.seconds:.2f}")
    print(f"  saved: predicted {predicted:.0f} s of slots, measured {alone.slot_seconds - two.slot_seconds:.0f} s")
    print(f"  copied: {copied(two, arguments.mb)} (expected: 1.00)", flush=True)


def main() -> int:
    """Print the figures of both lists."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--mb", type=int, default=20, help="MiB of a base model")
    options.add_argument("--base", type=float, default=8.0, help="seconds of a base training")
    options.add_argument("--experiment", type=float, default=2.0, help="seconds of an experiment")
    arguments = options.parse_args()
    measure("15 experiments on 1 base model", [arguments.base], 15, arguments)
    lengths = [arguments.base * share for share in (0.5, 1.0, 1.5, 2.0)]
    measure("12 experiments on 4 base models", lengths, 12, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
