"""Read the resource usage of ranks over time, in the attempts of a run, from node_<name>.samples.jsonl.

distributed/launch/usage_sampler.py writes the samples. Samples that cannot be read are ignored.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from distributed import attempts
from distributed.records import integer, is_time, listed, mapping, number, read_object
from distributed.report.history import Point
from distributed.trust import parse_json, read_text

SAMPLES = 200  # per rank, enough for a chart
MAX_ATTEMPTS = 50  # the last ones
MAX_VALUES = 10_000  # of a sample: enough for 1000 ranks


@dataclass
class Usage:
    """Resource usage of each rank over time."""

    attempts: dict[int, float] = field(default_factory=dict)  # number -> Unix seconds of the first sample
    last: float = math.nan  # Unix seconds of the last sample
    # series[quantity][name]: points (Unix seconds, value). The name is a rank, such as "rank 3", or a GPU whose rank is
    # not known, such as "node1 GPU 0".
    # Quantities: cpu (cores), memory (bytes), output (bytes per second), gpu (share of time), gpu_memory (bytes).
    series: dict[str, dict[str, list[Point]]] = field(default_factory=dict)

    def of(self, kind: str) -> dict[str, list[Point]]:
        return self.series.get(kind, {})

    def add(self, kind: str, name: str, points: Sequence[Point]) -> None:
        """Append the points of an attempt, separated by a gap."""
        line = self.series.setdefault(kind, {}).setdefault(name, [])
        line += [(points[0][0], math.nan)] * bool(line and points) + [*points]


def read_usage(run: Path) -> Usage:
    """The usage in the last MAX_ATTEMPTS attempts of a run, the oldest first."""
    usage = Usage()
    directories = attempts.directories(run)
    most = SAMPLES // min(len(directories), MAX_ATTEMPTS)
    for number_of_attempt, attempt in list(enumerate(directories, 1))[-MAX_ATTEMPTS:]:
        layout = [*map(mapping, listed(read_object(attempt / "run.json", []).get("layout")))]
        first_ranks = {str(one.get("node")): number(one.get("first_rank")) for one in layout}
        local_ranks = {str(one.get("node")): range(integer(one.get("processes")) or 1000) for one in layout}
        times = []
        for path in sorted(attempt.glob("node_*.samples.jsonl")):
            node = path.name.removeprefix("node_").removesuffix(".samples.jsonl")
            samples = _samples(path, most)
            times += [sample["time"] for sample in samples]
            place = first_ranks.get(node, math.nan), local_ranks.get(node, range(1000))
            _add_ranks(usage, node, *place, samples)
            _add_gpus(usage, node, *place, samples)
        if times:
            usage.attempts[number_of_attempt] = min(times)
            usage.last = max(times)
    return usage


def _samples(path: Path, most: int) -> list[Mapping[str, Any]]:
    """The samples with rising times, at most this many, evenly spaced."""
    found: list[Mapping[str, Any]] = []
    with contextlib.suppress(OSError):
        lines = read_text(path).splitlines()
        for line in lines[:: math.ceil(len(lines) / most) or 1]:
            with contextlib.suppress(ValueError):
                sample = mapping(parse_json(line, MAX_VALUES))
                if is_time(number(sample.get("time"))) and not (found and sample["time"] <= found[-1]["time"]):
                    found.append(sample)
    return found


def _name(node: str, first_rank: float, local_rank: str | int) -> str:
    return f"rank {int(first_rank) + int(local_rank)}" if math.isfinite(first_rank) else f"{node} rank {local_rank}"


def _is_numbered(item: tuple[str, Any]) -> bool:
    """Whether the key of an entry of a sample is the number of a rank or GPU of a node."""
    return re.fullmatch("[0-9]{1,3}", item[0], re.ASCII) is not None


def _add_ranks(
    usage: Usage, node: str, first_rank: float, local_ranks: range, samples: Sequence[Mapping[str, Any]]
) -> None:
    by_rank: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
    for sample in samples:
        for rank, values in filter(_is_numbered, mapping(sample.get("ranks")).items()):
            if int(rank) in local_ranks:  # a node has no samples of the ranks of others
                by_rank.setdefault(rank, []).append((sample["time"], mapping(values)))
    for rank, values in sorted(by_rank.items(), key=lambda item: (len(item[0]), item[0])):
        name = _name(node, first_rank, rank)
        usage.add("memory", name, [(time, number(one.get("memory"))) for time, one in values])
        for kind in ("cpu", "output"):
            counts = [(time, number(one.get(kind))) for time, one in values]
            # The count of a rank falls when a child process exits.
            rates = [(b, 0.0 if y < x else (y - x) / (b - a)) for (a, x), (b, y) in pairwise(counts)]
            if rates:
                usage.add(kind, name, rates)


def _add_gpus(
    usage: Usage, node: str, first_rank: float, local_ranks: range, samples: Sequence[Mapping[str, Any]]
) -> None:
    """Add each GPU to the ranks that use it. If no rank of any GPU of the node is known, GPUs have their own names."""
    gpus = [
        (sample["time"], index, mapping(gpu), listed(mapping(gpu).get("ranks")))
        for sample in samples
        for index, gpu in filter(_is_numbered, mapping(sample.get("gpus")).items())
    ]
    known = any(ranks for *_, ranks in gpus)
    lines: dict[tuple[str, str], dict[float, list[float]]] = {}
    for time, index, gpu, ranks in gpus:
        numbers = sorted({rank for rank in ranks if isinstance(rank, int) and rank in local_ranks})
        for name in [_name(node, first_rank, rank) for rank in numbers] if known else [f"{node} GPU {index}"]:
            if gpu.get("use") is not None:
                lines.setdefault(("gpu", name), {}).setdefault(time, []).append(number(gpu.get("use")) / 100)
            lines.setdefault(("gpu_memory", name), {}).setdefault(time, []).append(number(gpu.get("memory")))
    for (kind, name), values in lines.items():
        combine = math.fsum if kind == "gpu_memory" else statistics.fmean
        usage.add(kind, name, [(time, combine(of_gpus)) for time, of_gpus in values.items()])
