"""Print the report of a smoke test.

`summarise` merges the Findings of all ranks into one JSON object, and `render` formats that object as text. This module
does not use PyTorch, so that a launcher can print the report of ranks on other machines:

    python -m distributed.smoke.summary [--json] REPORT.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from distributed import terminal
from distributed.trust import checked, parse_json, read_bytes

REMEDIES = {
    "join": "check that every rank was started and can reach the master address and port",
    "reply": "read the output of that rank, which may be dead, stopped, or waiting for its GPU or a disk",
    "bandwidth": "read the output of the ranks, and check the network between the nodes",
    "links": "check cable, switch port and MTU of that node or, for a rank, of the network adapter near its GPU "
    "(nvidia-smi topo -m), and which interface NCCL uses (NCCL_DEBUG=INFO)",
    "pace": "check other processes on that node (top, nvidia-smi), clocks and temperature, or leave that node out",
}
WRONG_RESULT_REMEDY = (
    "run with --backend gloo to rule out the links between GPUs; with NCCL, try NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1 "
    "and NCCL_DEBUG=INFO, one at a time"
)
FAULTS_SHOWN = 3  # of each check
RANKS_SHOWN = 8  # in the table of compute times


@dataclass(frozen=True)
class Fault:
    """A check that failed on one rank."""

    check: str
    rank: int
    host: str
    expected: str
    got: str
    case: str = ""  # "float32, 1009 elements, element 3"
    text: str = ""  # replaces the text that __str__ builds

    def __str__(self) -> str:
        if self.text:
            return self.text
        case = f" ({self.case})" if self.case else ""
        return f"rank {self.rank} on {self.host}{case}: expected {self.expected}, got {self.got}"


@dataclass(frozen=True)
class Speed:
    """The bandwidth of one collective at one message size. GB is 10^9 bytes."""

    collective: str
    bytes: int  # message size as defined by nccl-tests
    iterations: int
    seconds: float  # per message, on the slowest rank
    algorithm_gb_per_second: float
    bus_gb_per_second: float


@dataclass(frozen=True)
class Pace:
    """The compute speed of one rank."""

    rank: int
    compute_seconds: float  # per round, lower quartile; a round is the same work on every rank
    factor: float  # compute_seconds divided by the median of the other ranks
    slow: bool


@dataclass
class Findings:
    """The results of one rank."""

    rank: int
    host: str
    device: str
    done: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # check -> reason
    faults: list[Fault] = field(default_factory=list)
    broken: bool = False  # a collective raised an error, so the process group is unusable

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Findings:
        found: Findings = checked(cls, parse_json(text), "findings")
        return found


@dataclass
class Measurements:
    """Results of the measurements, equal on all ranks."""

    bandwidth: list[Speed] = field(default_factory=list)
    pace: list[Pace] = field(default_factory=list)


# ---------------------------------------------------------------- measurements


def speed_of(collective: str, ranks: int, size: int, iterations: int, seconds: float) -> Speed:
    """Return the Speed of messages of `size` bytes that take `seconds` each.

    Bus bandwidth is comparable with the hardware's: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    algorithm = size / seconds / 1e9
    share = (ranks - 1) / ranks  # the part of each message that goes to other ranks
    bus = algorithm * {"all_reduce": 2 * share, "broadcast": 1.0}.get(collective, share)
    return Speed(collective, size, iterations, seconds, algorithm, bus)


def slow_factors(seconds: Sequence[float]) -> list[float]:
    """Return the time of each rank divided by the median time of the others."""
    if len(seconds) == 1:
        return [1.0]
    return [own / median([*seconds[:rank], *seconds[rank + 1 :]]) for rank, own in enumerate(seconds)]


def lower_quartile(seconds: Sequence[float]) -> float:
    """Return the time of a fast round. A rank that sometimes shares its core has fast rounds, a slow rank has none."""
    return quantiles(seconds, n=4)[0]


# ---------------------------------------------------------------- the report


def summarise(
    launch: Mapping[str, Any],
    checks: Mapping[str, str],
    replies: Mapping[int, Findings],
    measured: Measurements,
    missing: Sequence[Fault] = (),
) -> dict[str, Any]:
    """Return the report as a JSON object.

    Args:
        launch: size, nodes, launcher, backend, torch.
        checks: name of each check -> its summary if it finds no fault.
        replies: rank -> its findings.
        missing: a fault for each rank that did not reply.
    """
    findings = [replies[rank] for rank in sorted(replies)]
    faults = [*missing, *(fault for one in findings for fault in one.faults)]
    faults += slow_ranks(measured, replies)
    paces = {one.rank: asdict(one) for one in measured.pace}
    return {
        "verdict": "fault" if faults else "ok",
        "world": dict(launch),
        "checks": [
            check_report(name, summary, findings, [fault for fault in faults if fault.check == name])
            for name, summary in checks.items()
        ],
        "bandwidth": [asdict(one) for one in measured.bandwidth],
        "ranks": [
            {"rank": one.rank, "host": one.host, "device": one.device, **paces.get(one.rank, {})} for one in findings
        ],
    }


def slow_ranks(measured: Measurements, replies: Mapping[int, Findings]) -> list[Fault]:
    found = []
    for one in measured.pace:
        if one.slow and one.rank in replies:
            expected = f"{one.compute_seconds / one.factor * 1e3:.1f} ms per round of computing, as on the others"
            got = f"{one.compute_seconds * 1e3:.1f} ms ({one.factor:.1f} times as long)"
            found.append(Fault("pace", one.rank, replies[one.rank].host, expected, got))
    return found


def check_report(name: str, summary: str, findings: Sequence[Findings], faults: Sequence[Fault]) -> dict[str, Any]:
    """Return the report of one check. summary: for a check without faults."""
    skipped = [one.skipped.get(name, "an earlier check failed") for one in findings if name not in one.done]
    status, summary = ("skipped", skipped[0]) if skipped else ("ok", summary)
    if faults:
        faults = sorted(faults, key=lambda fault: not fault.case)  # first those that say where
        status, summary = "fault", "; ".join(fault_texts(faults))
    return {
        "name": name,
        "status": status,
        "summary": summary,
        "remedy": REMEDIES.get(name, WRONG_RESULT_REMEDY) if faults else None,
        "faults": [asdict(fault) for fault in faults],
    }


def fault_texts(faults: Sequence[Fault]) -> list[str]:
    more = [f"and {len(faults) - FAULTS_SHOWN} more"] if len(faults) > FAULTS_SHOWN else []
    return [*map(str, faults[:FAULTS_SHOWN]), *more]


# ---------------------------------------------------------------- text


def render(report: Mapping[str, Any]) -> str:
    """Format the report as text."""
    world = report["world"]
    where = f"{terminal.plural(world['size'], 'rank')} on {terminal.plural(world['nodes'], 'node')}"
    blocks = [
        [f"smoke test: {where}, {world['backend']}, torch {world['torch']}"],
        [line for check in report["checks"] for line in check_lines(check)],
        bandwidth_lines(report["bandwidth"]),
        pace_lines([one for one in report["ranks"] if "factor" in one]),
        [verdict_line(report)],
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"


STATUS = {"ok": ("ok", terminal.GREEN), "skipped": ("skipped", terminal.YELLOW), "fault": ("FAULT", terminal.RED)}


def check_lines(check: Mapping[str, Any]) -> Iterator[str]:
    """Yield the summary or the first faults, then the remedy."""
    label, colour = STATUS[check["status"]]
    first, *rest = fault_texts([Fault(**fault) for fault in check["faults"]]) or [check["summary"]]
    yield f"  {terminal.paint(f'{label:<8}', colour)}{check['name']:<16}{first}"
    yield from (f"{'':<26}{more}" for more in rest)
    if check["remedy"]:
        yield f"{'':<10}-> {check['remedy']}"


def bandwidth_lines(speeds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format a row for each message size: the time of an all-reduce, then the bus bandwidth of each collective."""
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


def pace_lines(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    slowest = sorted(ranks, key=lambda one: -one["factor"])[:RANKS_SHOWN]
    rows = [
        [
            str(one["rank"]),
            f"{one['compute_seconds'] * 1e3:.1f}",
            f"{one['factor']:.2f}",
            f"{one['host']}, {one['device']}",
        ]
        for one in slowest
    ]
    heading = ["rank", "ms per round", "ratio to others", "host, device"]
    return titled(f"compute time, slowest {len(slowest)} of {len(ranks)} ranks", [heading, *rows], right=range(3))


def titled(title: str, rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Format a table with a title. Returns no lines if there are no rows below the heading."""
    return [f"  {line}" for line in (title, *terminal.table(rows, right))] if len(rows) > 1 else []


def size_label(size: float) -> str:
    """Format bytes as nccl-tests does: 64K for 65536."""
    for unit in ("", "K", "M"):
        if size < 1023.5:
            return f"{size:.4g}{unit}"
        size /= 1024
    return f"{size:.4g}G"


def verdict_line(report: Mapping[str, Any]) -> str:
    bad = [check["name"] for check in report["checks"] if check["status"] == "fault"]
    if bad:
        return f"verdict: {terminal.paint('FAULT', terminal.RED)} in {', '.join(bad)}"
    ok = terminal.paint("verdict: ok", terminal.GREEN)
    return f"{ok}, {terminal.plural(report['world']['size'], 'rank')} passed all checks"


def show(report: Mapping[str, Any], as_json: bool = False) -> None:
    """Print the report as text or as JSON."""
    terminal.show(json.dumps(report, indent=2, sort_keys=True) + "\n" if as_json else render(report))


def main(arguments: Sequence[str]) -> int:
    """Print a report from a file. Returns 0 when all checks passed, 1 when one failed."""
    summary = str(__doc__).splitlines()[0]
    parser = argparse.ArgumentParser("distributed.smoke.summary", description=summary, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("report", type=Path, metavar="REPORT.json", help="written by distributed.smoke --json-file")
    options = parser.parse_args(arguments)
    try:
        report = parse_json(read_bytes(options.report))
        render(report)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        parser.error(f"'{options.report}': cannot read the report: {error!r}")
    show(report, options.json)
    return 0 if report["verdict"] == "ok" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
