"""The number of processes for NPROC auto, gpu or cpu, which torchrun's --nproc-per-node knows too.

    scripts/lib/module.py host.processes auto|gpu|cpu [REPLIES NODE...]

Prints the number for this machine; with REPLIES, the directory of the preflight's replies, a line `NODE NUMBER` for
each node. 0: gpu, but no GPU is visible. A node without a valid reply gets 1: the preflight reports its fault.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from distributed.host.gpus import query_gpus, visible
from distributed.host.replies import NodeFacts, read
from distributed.host.resources import read_cores


def count(kind: str, gpus: int, cores: float) -> int:
    """One process per GPU or per usable core; auto: per core if there is no GPU."""
    return max(1, int(cores)) if kind == "cpu" or (kind == "auto" and not gpus) else gpus


def main(arguments: Sequence[str]) -> None:
    kind, *of_nodes = arguments
    if not of_nodes:
        found = query_gpus()
        if found.error and kind != "cpu":
            sys.stderr.write(f"{found.error}\n")
        gpus = visible(os.environ.get("CUDA_VISIBLE_DEVICES"), found.devices)
        print(count(kind, len(gpus), read_cores().usable))
    for node in of_nodes[1:]:
        value = read(Path(of_nodes[0]), node).value()
        facts = None if value is None else NodeFacts(**value)
        print(node, 1 if facts is None or facts.gpu_error else count(kind, facts.gpus, facts.cores))
