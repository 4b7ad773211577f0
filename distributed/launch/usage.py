"""What the ranks of one node use over time: CPU, memory, output and GPUs, whatever the script logs itself.

A child process of the supervisor, with srun of the node's first task, appends one JSON object a sample to
node_<name>.samples.jsonl in the run directory:

    {"time": 1764000000.5, "ranks": {"0": {"cpu": 41.2, "memory": 1288490188, "output": 5120}},
     "gpus": {"3": {"use": 97, "memory": 17179869184, "ranks": [0]}}}

The ranks are local ranks, each with its children. cpu: seconds of CPU since its start; memory: bytes, resident; output:
bytes since its start. Of a GPU (the key is its index on the node): per cent of the time in which a kernel ran, bytes in
use, and the ranks that compute on it. "gpus" is in few samples, as nvidia-smi is not asked more often than every
10 seconds. A file never has more than MAX_SAMPLES samples: then each two become one, and the interval doubles.

The supervisor imports this before every command, so it imports nothing at once that costs milliseconds. Standard
library alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from distributed.files import write_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any

INTERVAL = 1.0  # seconds between the first samples
MAX_SAMPLES = 500  # samples in a file
GPU_INTERVAL = 10.0  # seconds between two calls of nvidia-smi

Sample = dict[str, "Any"]


def stop(pid: int) -> None:
    """SIGKILL for a process that runs record(), and for what it runs."""
    for kill in (os.kill, os.killpg):  # it may not yet lead a group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def record(run: str, node: str) -> None:
    """Append samples, for ever. To be called in a process that leads a session, in which nvidia-smi then runs.

    Nothing is imported before the first sample is due: the start of the ranks comes first.
    """
    time.sleep(INTERVAL)
    path, samples, interval = os.path.join(run, f"node_{node}.samples.jsonl"), list[Sample](), INTERVAL
    query_gpus_at = 0.0
    while True:
        due = time.monotonic() + interval
        gpus = due >= query_gpus_at
        if (sample := take_sample(run, node, gpus=gpus))["ranks"]:  # else they have not been started
            samples.append(sample)
            with contextlib.suppress(OSError):  # a full disk, most often
                if len(samples) < MAX_SAMPLES:
                    append(path, sample)
                else:
                    samples, interval = merge_pairs(samples), 2 * interval
                    rewrite(path, samples)
            query_gpus_at = due + GPU_INTERVAL if gpus else query_gpus_at
        time.sleep(max(0.0, due - time.monotonic()))


def merge_pairs(samples: Sequence[Sample]) -> list[Sample]:
    """Each two as one: the later one, with the GPUs of the earlier one where only that has some."""
    return [{**one, **other} for one, other in zip(samples[::2], samples[1::2], strict=False)]


def append(path: str, sample: Sample) -> None:
    import json

    with open(path, "a") as file:
        file.write(json.dumps(sample) + "\n")


def rewrite(path: str, samples: Sequence[Sample]) -> None:
    import json

    write_file(path, "".join(json.dumps(sample) + "\n" for sample in samples))


def take_sample(run: str, node: str, *, gpus: bool, proc: Path | None = None) -> Sample:
    """One sample. gpus: also ask nvidia-smi, which may take seconds."""
    from pathlib import Path

    from distributed.host.system import PROC
    from distributed.runs import node_status

    families = node_status.families(node_status.processes_of(run, node, proc or PROC))
    written = node_status.outputs(Path(run), node)
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
        found, users, _ = node_status.look_at_gpus()
        by_gpu = {
            gpu.index: [rank for rank, family in families.items() if gpu in node_status.used_by(family, found, users)]
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
