"""Sample the resource usage of a node's ranks: CPU, memory, output and GPUs.

A child process of the supervisor appends one JSON object per sample to node_<name>.samples.jsonl of the attempt.
With srun, each task has a supervisor, and only the supervisor of the node's first task has this child process. One
sample:

    {"time": 1764000000.5, "ranks": {"0": {"cpu": 41.2, "memory": 1288490188, "output": 5120}},
     "gpus": {"3": {"use": 97, "memory": 17179869184, "ranks": [0]}}, "log": 20480}

The keys of "ranks" are local ranks; the values include child processes. cpu: CPU seconds since the start; memory:
resident bytes; output: bytes since the start. The keys of "gpus" are GPU indices on the node. use: percentage of time
in which a kernel ran; memory: bytes in use; ranks: local ranks with processes on it. "gpus" is in few samples, because
nvidia-smi is queried at most every 10 seconds. log: bytes of the node's log. At MAX_SAMPLES samples, pairs are merged
and the interval doubles.

Each supervisor imports this module when it starts, so modules that take milliseconds to import are imported on use.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from distributed.files import write_file
from distributed.trust import regular_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any

INTERVAL = 1.0  # seconds; doubled at MAX_SAMPLES
MAX_SAMPLES = 500
GPU_INTERVAL = 10.0  # minimum seconds between calls of nvidia-smi

Sample = dict[str, "Any"]


def stop(pid: int) -> None:
    """Send SIGKILL to a process that runs record(), and to its children."""
    for kill in (os.kill, os.killpg):  # it may not lead a group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def record(run: str, node: str, path: str) -> None:
    """Append samples to a file until killed. The calling process must lead a session; nvidia-smi runs in its session.

    Imports nothing before the first sample is due, so that it does not delay the start of the ranks.
    """
    time.sleep(INTERVAL)
    import json

    samples, interval = list[Sample](), INTERVAL
    query_gpus_at = 0.0
    while True:
        due = time.monotonic() + interval
        gpus = due >= query_gpus_at
        if (sample := take_sample(run, node, gpus=gpus))["ranks"]:  # empty: the ranks have not started yet
            sample["log"] = size(f"{path.removesuffix('samples.jsonl')}log")
            samples.append(sample)
            with contextlib.suppress(OSError):  # usually a full disk
                if len(samples) < MAX_SAMPLES:
                    with open(path, "a", opener=regular_file) as file:
                        file.write(json.dumps(sample) + "\n")
                else:
                    samples, interval = merge_pairs(samples), 2 * interval
                    write_file(path, "".join(json.dumps(sample) + "\n" for sample in samples))
            query_gpus_at = due + GPU_INTERVAL if gpus else query_gpus_at
        time.sleep(max(0.0, due - time.monotonic()))


def merge_pairs(samples: Sequence[Sample]) -> list[Sample]:
    """Return the later sample of each pair. A sample without GPUs gets those of the earlier sample."""
    return [{**one, **other} for one, other in zip(samples[::2], samples[1::2], strict=False)]


def take_sample(run: str, node: str, *, gpus: bool, proc: Path | None = None) -> Sample:
    """Take one sample. gpus: also query nvidia-smi, which may take seconds."""
    from pathlib import Path

    from distributed.host.system import PROC
    from distributed.runs import node_status

    families = node_status.processes_by_rank(node_status.processes_of(run, node, proc or PROC))
    written = node_status.output_files(Path(run), node)
    ranks = {
        str(rank): {
            "cpu": round(sum(one.ticks + one.ticks_of_ended for one in family) / node_status.TICK, 2),
            "memory": sum(one.memory for one in family),
            "output": sum(map(size, written.get(rank, ()))),
        }
        for rank, family in sorted(families.items())
    }
    sample: Sample = {"time": round(time.time(), 2), "ranks": ranks}
    if gpus and ranks:
        found, users, _ = node_status.query_gpus()
        by_gpu = {
            gpu.index: [rank for rank, family in families.items() if gpu in node_status.gpus_of(family, found, users)]
            for gpu in found.values()
        }
        if found:
            sample["gpus"] = {
                str(gpu.index): {"use": gpu.use, "memory": gpu.memory_used, "ranks": sorted(by_gpu[gpu.index])}
                for gpu in found.values()
            }
    return sample


def size(path: str | os.PathLike[str]) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
