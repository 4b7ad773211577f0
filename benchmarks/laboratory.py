"""Simulated nodes on this machine for benchmarks (tests/lab/lab.sh). Needs root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

KIT = Path(__file__).resolve().parents[1]
LAB = KIT / "tests/lab/lab.sh"


@contextmanager
def nodes(count: int, *options: str, prefix: str = "bench") -> Iterator[tuple[list[str], Path]]:
    """Start nodes; yield their names and a directory that they share. options: options of `lab.sh up`."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that `finally` is executed
    with tempfile.TemporaryDirectory() as name:
        env = os.environ | {"MUSTER_LAB": f"{name}/lab"}
        command = [str(LAB), "up", str(count), "--prefix", prefix, *options]
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield [f"{prefix}{number}" for number in range(1, count + 1)], Path(name)
        finally:
            subprocess.run([LAB, "down"], env=env, check=True, stderr=subprocess.DEVNULL)


@contextmanager
def slurm(count: int, gpus: int) -> Iterator[tuple[dict[str, str], Path]]:
    """Start SLURM on nodes with `gpus` GPUs each; yield the environment for sbatch and a shared directory."""
    with nodes(count, "--slurm", "--gpus", str(gpus)) as (_, directory):
        yield os.environ | {"SLURM_CONF": f"{directory}/lab/slurm.conf", "OMP_NUM_THREADS": "1"}, directory


def submit(arguments: list[str], directory: Path, env: Mapping[str, str]) -> str:
    """Call sbatch in the directory. Returns the job ID."""
    result = subprocess.run(
        ["sbatch", "--parsable", *arguments], cwd=directory, env=env, check=True, stdout=subprocess.PIPE
    )
    return result.stdout.decode().strip()


def wait_for(job: str, env: Mapping[str, str]) -> None:
    """Wait until a job has ended. `sbatch --wait` would be slower: it checks after 10 s, and again 30 s later."""
    while subprocess.run(["squeue", "--noheader", "--jobs", job], env=env, stdout=subprocess.PIPE, check=True).stdout:
        time.sleep(0.2)
