"""What the smoke test found, for people and for programs.

Each rank hands in its Findings; `summarise` puts them together into one JSON object, `render` makes text of it. Nothing
here knows PyTorch, so that a launcher can print the report of ranks that ran elsewhere:

    python -m distributed.smoke.report [--json] REPORT.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from distributed import terminal
from distributed.smoke.bandwidth import Link, slow
from distributed.smoke.bandwidth import speed as speed_label

REMEDY = {
    "join": "see that every rank was started, and reaches the master's address and port",
    "answer": "look at that rank's own output: it may have died, be stopped, or wait for its GPU or a disk",
    "bandwidth": "look at the ranks' own output, and at the network between the nodes",
    "links": "look at cable, switch port and MTU there, and at which interface NCCL takes (NCCL_DEBUG=INFO)",
    "pace": "look at what else runs there (top, nvidia-smi), at its clocks and heat, or leave that node out",
}
MANGLED = (
    "--backend gloo tells the GPUs' links from the rest; with NCCL try NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1 "
    "and NCCL_DEBUG=INFO one at a time"
)


@dataclass(frozen=True)
class Fault:
    """Something that is not as it should be, at one rank."""

    check: str
    rank: int
    host: str
    expected: str
    got: str
    case: str = ""  # "float32, 1009 elements, element 3"
    said: str = ""  # all of it, where it reads better in other words

    def __str__(self) -> str:
        if self.said:
            return self.said
        case = f" ({self.case})" if self.case else ""
        return f"rank {self.rank} on {self.host}{case}: expected {self.expected}, got {self.got}"


@dataclass(frozen=True)
class Speed:
    """How fast one collective moves one size of message. GB is 10^9 bytes."""

    collective: str
    bytes: int  # of the whole message, as nccl-tests counts it
    iterations: int
    seconds: float  # of one message, on the slowest rank
    algorithm_gb_per_second: float
    bus_gb_per_second: float


@dataclass(frozen=True)
class Pace:
    """How fast one rank computes by itself."""

    rank: int
    compute_seconds: float  # of a good round; a round is the same work on every rank
    factor: float  # times what the others need
    slow: bool


@dataclass
class Findings:
    """What one rank found."""

    rank: int
    host: str
    device: str
    done: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # check -> why
    faults: list[Fault] = field(default_factory=list)
    broken: bool = False  # a collective raised: the group is of no more use

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Findings:
        told = json.loads(text)
        return cls(**{**told, "faults": [Fault(**fault) for fault in told["faults"]]})


@dataclass
class Measured:
    """What the ranks measured together; every rank knows all of it."""

    bandwidth: list[Speed] = field(default_factory=list)
    pace: list[Pace] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)


# ---------------------------------------------------------------- figures from seconds


# How often a message crosses the links, so that the figure can be held against the hardware's whatever the
# number of ranks is: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
BUS_FACTOR: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
}


def speed(collective: str, ranks: int, size: int, iterations: int, seconds: float) -> Speed:
    """Bandwidths, from the seconds that one message of `size` bytes takes."""
    algorithm = size / seconds / 1e9
    bus = algorithm * BUS_FACTOR[collective](ranks)
    return Speed(collective, size, iterations, seconds, algorithm, bus)


def slowness(good: Sequence[float]) -> list[float]:
    """How many times as long as the others each rank computes, from the seconds of a good round of each."""
    if len(good) == 1:
        return [1.0]
    return [own / median([*good[:rank], *good[rank + 1 :]]) for rank, own in enumerate(good)]


def good_round(seconds: Sequence[float]) -> float:
    """The lower quartile: a rank that shares its core now and then has good rounds too, a slow one has none."""
    return quantiles(seconds, n=4)[0]


# ---------------------------------------------------------------- put together


def summarise(
    launch: Mapping[str, Any],
    proved: Mapping[str, str],
    answered: Mapping[int, Findings],
    measured: Measured,
    absent: Sequence[Fault] = (),
) -> dict[str, Any]:
    """The whole report, ready for JSON.

    Args:
        launch: what was started: size, nodes, launcher, backend, torch.
        proved: each check, and what is known when it found no fault.
        answered: rank -> what it found.
        absent: a fault for each rank that has not answered.
    """
    findings = [answered[rank] for rank in sorted(answered)]
    faults = [*absent, *(fault for one in findings for fault in one.faults)]
    faults += [*slow_links(measured, answered), *slow_ranks(measured, answered)]
    paces = {one.rank: asdict(one) for one in measured.pace}
    return {
        "verdict": "fault" if faults else "ok",
        "world": dict(launch),
        "checks": [
            check_report(name, known, findings, [fault for fault in faults if fault.check == name])
            for name, known in proved.items()
        ],
        "bandwidth": [asdict(one) for one in measured.bandwidth],
        "links": [asdict(one) for one in measured.links],
        "ranks": [
            {"rank": one.rank, "host": one.host, "device": one.device, **paces.get(one.rank, {})} for one in findings
        ],
    }


def slow_links(measured: Measured, answered: Mapping[int, Findings]) -> list[Fault]:
    first = {one.host: rank for rank, one in sorted(answered.items(), reverse=True)}
    return [
        Fault("links", first[one.node], one.node, speed_label(one.expected), speed_label(one.got), said=one.said)
        for one in slow(measured.links)
        if one.node in first
    ]


def slow_ranks(measured: Measured, answered: Mapping[int, Findings]) -> list[Fault]:
    found = []
    for one in measured.pace:
        if one.slow and one.rank in answered:
            expected = f"{one.compute_seconds / one.factor * 1e3:.1f} ms of computing a round, as the others"
            got = f"{one.compute_seconds * 1e3:.1f} ms: {one.factor:.1f} times as long"
            found.append(Fault("pace", one.rank, answered[one.rank].host, expected, got))
    return found


def check_report(name: str, known: str, findings: Sequence[Findings], faults: Sequence[Fault]) -> dict[str, Any]:
    """known: what is known when no rank found a fault."""
    skipped = [one.skipped.get(name, "a check before it failed") for one in findings if name not in one.done]
    status, summary = ("skipped", skipped[0]) if skipped else ("ok", known)
    if faults:
        status, summary = "fault", "; ".join(shortened(faults))
    return {
        "name": name,
        "status": status,
        "summary": summary,
        "remedy": REMEDY.get(name, MANGLED) if faults else None,
        "faults": [asdict(fault) for fault in faults],
    }


def shortened(faults: Sequence[Fault], at_most: int = 3) -> list[str]:
    more = [f"and {len(faults) - at_most} more"] if len(faults) > at_most else []
    return [*map(str, faults[:at_most]), *more]


# ---------------------------------------------------------------- text


def render(report: Mapping[str, Any]) -> str:
    """The report for people."""
    world = report["world"]
    where = f"{terminal.plural(world['size'], 'rank')} on {terminal.plural(world['nodes'], 'node')}"
    blocks = [
        [f"smoke test: {where}, {world['backend']}, torch {world['torch']}"],
        [line for check in report["checks"] for line in check_lines(check)],
        bandwidth_lines(report["bandwidth"]),
        link_lines(report["links"]),
        pace_lines([one for one in report["ranks"] if "factor" in one]),
        [verdict_line(report)],
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"


STATUS = {"ok": ("ok", terminal.GREEN), "skipped": ("skipped", terminal.YELLOW), "fault": ("FAULT", terminal.RED)}


def check_lines(check: Mapping[str, Any]) -> Iterator[str]:
    """What is known, or a line a fault, and the remedy."""
    word, colour = STATUS[check["status"]]
    first, *rest = shortened([Fault(**fault) for fault in check["faults"]]) or [check["summary"]]
    yield f"  {terminal.paint(f'{word:<8}', colour)}{check['name']:<16}{first}"
    yield from (f"{'':<26}{more}" for more in rest)
    if check["remedy"]:
        yield f"{'':<10}-> {check['remedy']}"


def bandwidth_lines(speeds: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row a message size: the time of an all-reduce, then the bus bandwidth of each collective."""
    cells = {(one["bytes"], one["collective"]): one for one in speeds}
    names = list(dict.fromkeys(one["collective"] for one in speeds))

    def row(size: int) -> list[str]:
        found = [cells.get((size, name)) for name in names]
        bus = [f"{one['bus_gb_per_second']:.3f}" if one else "-" for one in found]
        all_reduce = cells.get((size, "all_reduce"))
        return [size_label(size), f"{all_reduce['seconds'] * 1e3:.3f}" if all_reduce else "-", *bus]

    rows = [row(size) for size in sorted({one["bytes"] for one in speeds})]
    title = "time of an all_reduce, ms; bus bandwidth, GB/s"
    return titled(title, [["message", "ms", *names], *rows], right=range(2 + len(names)))


def link_lines(links: Sequence[Mapping[str, Any]], at_most: int = 8) -> list[str]:
    slowest = sorted(links, key=lambda one: one["gb_per_second"])[:at_most]
    rows = [[f"{one['gb_per_second']:.3f}", f"{one['one']} - {one['other']}"] for one in slowest]
    return titled(f"between nodes, the slowest {len(slowest)} of {len(links)}", [["GB/s", "where"], *rows], right=[0])


def pace_lines(ranks: Sequence[Mapping[str, Any]], at_most: int = 8) -> list[str]:
    slowest = sorted(ranks, key=lambda one: -one["factor"])[:at_most]
    rows = [
        [
            str(one["rank"]),
            f"{one['compute_seconds'] * 1e3:.1f}",
            f"{one['factor']:.2f}",
            f"{one['host']}, {one['device']}",
        ]
        for one in slowest
    ]
    heading = ["rank", "ms a round", "times the others", "where"]
    return titled(f"computing alone, the slowest {len(slowest)} of {len(ranks)}", [heading, *rows], right=range(3))


def titled(title: str, rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """A table; nothing when it has only a heading."""
    return [f"  {line}" for line in (title, *terminal.table(rows, right))] if len(rows) > 1 else []


def size_label(size: float) -> str:
    """Bytes as nccl-tests write them: 65536 is 64K."""
    for unit in ("", "K", "M"):
        if size < 1023.5:
            return f"{size:.4g}{unit}"
        size /= 1024
    return f"{size:.4g}G"


def verdict_line(report: Mapping[str, Any]) -> str:
    bad = [check["name"] for check in report["checks"] if check["status"] == "fault"]
    if bad:
        return f"verdict: {terminal.paint('FAULT', terminal.RED)} in {', '.join(bad)}"
    size = report["world"]["size"]
    ok = terminal.paint("verdict: ok", terminal.GREEN)
    works = "works together as it should" if size == 1 else "work together as they should"
    return f"{ok}, {terminal.plural(size, 'rank')} {works}"


def show(report: Mapping[str, Any], as_json: bool = False) -> None:
    """Print the report: for people, or as JSON."""
    terminal.show(json.dumps(report, indent=2, sort_keys=True) + "\n" if as_json else render(report))


def main(words: Sequence[str] | None = None) -> int:
    """Print a report that was written to a file. Returns 0 when all was well, 1 when a check failed."""
    summary = str(__doc__).splitlines()[0]
    parser = argparse.ArgumentParser("distributed.smoke.report", description=summary, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="as the one JSON object")
    parser.add_argument("report", type=Path, metavar="REPORT.json", help="what distributed.smoke wrote")
    options = parser.parse_args(words)
    try:
        report = json.loads(options.report.read_text())
    except (OSError, ValueError, RecursionError) as error:
        parser.error(f"'{options.report}' cannot be read as a report: {error}")
    show(report, options.json)
    return 0 if report["verdict"] == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
