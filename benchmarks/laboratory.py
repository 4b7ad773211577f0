"""Nodes for benchmarks, raised on this one machine for the time of a measurement (tests/lab/lab.sh). Needs root."""

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
    """The names of so many nodes, and a folder that they share. options: more of the laboratory's."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # by way of `finally`
    with tempfile.TemporaryDirectory() as name:
        env = os.environ | {"MUSTER_LAB": f"{name}/lab"}
        words = [str(LAB), "up", str(count), "--prefix", prefix, *options]
        subprocess.run(words, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield [f"{prefix}{number}" for number in range(1, count + 1)], Path(name)
        finally:
            subprocess.run([LAB, "down"], env=env, check=True, stderr=subprocess.DEVNULL)


@contextmanager
def slurm(count: int, gpus: int) -> Iterator[tuple[dict[str, str], Path]]:
    """The environment in which sbatch reaches a SLURM on so many nodes with so many GPUs each, and a shared folder."""
    with nodes(count, "--slurm", "--gpus", str(gpus)) as (_, folder):
        yield os.environ | {"SLURM_CONF": f"{folder}/lab/slurm.conf", "OMP_NUM_THREADS": "1"}, folder


def submit(words: list[str], folder: Path, env: Mapping[str, str]) -> str:
    """Call sbatch in the folder. Returns the number of the job."""
    answer = subprocess.run(["sbatch", "--parsable", *words], cwd=folder, env=env, check=True, stdout=subprocess.PIPE)
    return answer.stdout.decode().strip()


def wait_for(job: str, env: Mapping[str, str]) -> None:
    """To the end of a job (`sbatch --wait` looks after 10 s, and then half a minute later)."""
    while subprocess.run(["squeue", "--noheader", "--jobs", job], env=env, stdout=subprocess.PIPE, check=True).stdout:
        time.sleep(0.2)
