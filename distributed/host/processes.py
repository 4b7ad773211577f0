"""The number of processes for NPROC auto, gpu or cpu, which torchrun's --nproc-per-node knows too.

    scripts/lib/module.py host.processes auto|gpu|cpu

Prints the number for this machine. 0: gpu, but no GPU is visible.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from distributed.host.gpus import query_gpus, visible
from distributed.host.resources import read_cores


def count(kind: str, gpus: int, cores: float) -> int:
    """One process per GPU or per usable core; auto: per core if there is no GPU."""
    return max(1, int(cores)) if kind == "cpu" or (kind == "auto" and not gpus) else gpus


def main(arguments: Sequence[str]) -> None:
    found = query_gpus()
    if found.error and arguments[0] != "cpu":
        sys.stderr.write(f"{found.error}\n")
    gpus = visible(os.environ.get("CUDA_VISIBLE_DEVICES"), found.devices)
    print(count(arguments[0], len(gpus), read_cores().usable))
