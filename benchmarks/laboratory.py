"""Nodes for benchmarks, raised on this one machine for the time of a measurement (tests/lab/lab.sh). Needs root."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KIT = Path(__file__).resolve().parents[1]
LAB = KIT / "tests/lab/lab.sh"


@contextmanager
def nodes(count: int, prefix: str = "bench") -> Iterator[tuple[list[str], Path]]:
    """The names of so many nodes, and a folder that they share."""
    with tempfile.TemporaryDirectory() as name:
        env = os.environ | {"MUSTER_LAB": f"{name}/lab"}
        subprocess.run([LAB, "up", str(count), "--prefix", prefix], env=env, check=True, stderr=subprocess.DEVNULL)
        try:
            yield [f"{prefix}{number}" for number in range(1, count + 1)], Path(name)
        finally:
            subprocess.run([LAB, "down"], env=env, check=True, stderr=subprocess.DEVNULL)
