"""The number of processes for NPROC auto, gpu or cpu, as for torchrun's --nproc-per-node, or default.

    scripts/lib/module.py host.processes auto|gpu|cpu|default

Prints the number for this machine; 0 for gpu if no GPU is visible.
"""

from __future__ import annotations

from collections.abc import Sequence

from distributed.host.gpus import count_visible
from distributed.host.resources import read_cores


def count(kind: str, gpus: int, cores: float) -> int:
    """One process per GPU or per usable core. Without GPUs, auto: one per core; default: one."""
    if kind == "default":
        return max(1, gpus)
    return max(1, int(cores)) if kind == "cpu" or (kind == "auto" and not gpus) else gpus


def main(arguments: Sequence[str]) -> None:
    kind = arguments[0]
    print(count(kind, 0 if kind == "cpu" else count_visible(), read_cores().usable))
