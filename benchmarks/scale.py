"""Measure the costs that could limit the size of a run, for 10 to 10,000 nodes that are simulated.

Agents: rendezvous, heartbeats, the stop after the first failure, and the exchange of failure records
(scale_agents.py). With 10,000 nodes, two processes simulate all nodes but the first, so only the CPU time of the first
node is realistic. Run directories: verdict and report of a run in which a rank of each node failed, and the status of a
running one. Launcher: parsing lists of nodes, and reading the output of all nodes. scale_nodes.py measures real
launches.

    python -m benchmarks.scale [--limit 120] [10 100 1000 10000]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import scale_agents
from benchmarks.growth import table
from benchmarks.scale_agents import RANKS, failure_records, name_of
from distributed import nodelist
from distributed.launch.node_reports import ReportParser
from distributed.report import report
from distributed.runs import lookup, status
from distributed.runs.node_status import NodeStatus, RankStatus
from distributed.runs.query import NodeReply
from distributed.transport.commands import Calls
from distributed.verdict import verdict

LINES = 500_000  # from all nodes together, through the launcher
LOG_LINES = 1000  # of each node
MOST_CLIENTS = 1000  # client processes, one for each node; lines per second are not measured for more nodes

AGENTS = {
    "rendezvous": "rendezvous, s",
    "rendezvous_cpu": "  CPU of the first node, s",
    "operations": "store operations per second, all nodes except the first",
    "cpu": "  cores used on the first node",
    "stop": "first failure until all nodes know it, s",
    "records": "  then failure records exchanged, s",
}


def cpu_seconds(call: Callable[[], object]) -> float:
    """The CPU seconds of a call."""
    before = time.process_time()
    call()
    return time.process_time() - before


def write_run(run: Path, size: int) -> None:
    """Write the run directory of a run in which one rank of each node failed, and the agents stopped the others."""
    (run / "errors").mkdir(parents=True)
    layout = [
        {"node": name_of(node), "address": name_of(node), "first_rank": node * RANKS, "processes": RANKS}
        for node in range(size)
    ]
    started = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    facts = {"run": run.name, "nodes": [one["node"] for one in layout], "layout": layout, "nproc": size * RANKS}
    (run / "run.json").write_text(json.dumps(facts | {"started": started}))
    for node in range(size):
        for name, record in failure_records(node).items():
            (run / "errors" / name).write_text(json.dumps(record))
        (run / f"node_{name_of(node)}.exit").write_text("1\n")
        prefixes = [f"[{name_of(node)}:{node * RANKS + local}]" for local in range(RANKS)]
        lines = (f"{prefixes[line % RANKS]} step {line} loss 2.7183\n" for line in range(LOG_LINES))
        (run / f"node_{name_of(node)}.log").write_text("".join(lines))


def render_status(size: int) -> None:
    """Judge and show the replies of all nodes."""
    nodes = [lookup.RunNode(name_of(node), name_of(node), RANKS, node * RANKS) for node in range(size)]
    launcher = lookup.Launcher("here", 1, 1, lookup.RUNNING, 30)
    run = lookup.Run(Path("run"), "run", "python", "ada", "2026-11-21T12:29:42+00:00", (), launcher, tuple(nodes))

    def reply(node: lookup.RunNode) -> NodeReply:
        ranks = [
            RankStatus(node.first_rank + local, local, 4711, "S", cpu=0.01, silent=300.0, line="step 120 loss 2.31")
            for local in range(RANKS)
        ]
        return NodeReply(node, NodeStatus(node.node, 1.0, tuple(ranks)))

    now = time.time()
    status.render(status.judge(run, [reply(node) for node in nodes], {}, status.RunProgress(), now), 120)


def lines_per_second(size: int, directory: Path) -> float | None:
    """The lines per second that the launcher can read from `size` clients and split into reports and other output."""
    if size > MOST_CLIENTS:
        return None
    file = directory / "lines"
    file.write_text("step 120 loss 2.7183, 123456 tokens per second\n" * (LINES // size))
    calls, received = Calls(), [0]

    def count(parser: ReportParser, block: bytes) -> None:
        received[0] += sum(item.count(b"\n") for item in parser.feed(block) if isinstance(item, bytes))

    source, target = os.pipe()
    command = ["sh", "-c", 'cat; exec cat -- "$0"', str(file)]  # prints the file when the pipe is closed
    for node in range(size):
        calls.call(name_of(node), command, source=source, on_output=partial(count, ReportParser()))
    os.close(source)
    began = time.monotonic()
    os.close(target)
    calls.wait()
    if received[0] != LINES // size * size:
        sys.exit(f"{received[0]} lines received")
    return received[0] / (time.monotonic() - began)


def measure_files(size: int) -> dict[str, float | None]:
    """All values for one size, except those of the agents."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name, "run")
        write_run(run, size)
        values: dict[str, float | None] = {
            "verdict, s of CPU": cpu_seconds(lambda: verdict.conclude(run)),
            "report, s of CPU": cpu_seconds(lambda: report.write(run)),
            "status of the replies, s of CPU": cpu_seconds(lambda: render_status(size)),
            "host file of all nodes, s of CPU": cpu_seconds(
                lambda: nodelist.parse_hostfile("".join(f"{name_of(node)} slots=8\n" for node in range(size)))
            ),
            "list such as gpu[00001-10000], s of CPU": cpu_seconds(
                lambda: nodelist.compact(nodelist.parse(f"gpu[00001-{size:05d}]"))
            ),
            "lines per second through the launcher": lines_per_second(size, Path(name)),
        }
        return values


def measure(size: int, limit: float) -> Mapping[str, Any]:
    """All values for one size."""
    costs = scale_agents.measure(size, limit)
    agents = {AGENTS[field.name]: getattr(costs, field.name) for field in fields(costs)}
    return agents | measure_files(size)


def main() -> int:
    """Print the table."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("sizes", type=int, nargs="*", default=[10, 100, 1000, 10_000], help="numbers of nodes")
    options.add_argument("--limit", type=float, default=120.0, help="seconds for each phase of the agents")
    arguments = options.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    columns = []
    for size in arguments.sizes:
        columns.append(measure(size, arguments.limit))
        print(f"{size} nodes: load {os.getloadavg()[0]:.1f}, {columns[-1]}", file=sys.stderr)
    rows = {row: [column[row] for column in columns] for row in columns[0]}
    print(table("nodes", arguments.sizes, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
