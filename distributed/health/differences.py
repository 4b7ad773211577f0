"""Differences between nodes that matter when they train together.

Each comparison yields the names of nodes that differ from the others, each with a finding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from statistics import median

from distributed.health.checks import Finding, describe, fault, size, warning
from distributed.host.facts import FullNodeFacts
from distributed.launch.comparison import (
    MUST_BE_SAME,
    Trait,
    differences,
    differences_in,
    no_rendezvous_address,
    rendezvous_address,
    same_machines,
)
from distributed.nodelist import compact

CLOCK_TOLERANCE = 2.0  # seconds
MEMORY_TOLERANCE = 0.1  # fraction of the other nodes' median
SHOWN = 3  # file names in a finding

Nodes = Mapping[str, FullNodeFacts]  # by name, in the order of node ranks
NodeFindings = Iterator[tuple[str, Finding]]  # node name, finding


# ---------------------------------------------------------------- equal or not


def link(node: FullNodeFacts) -> str:
    return f"{node.route.speed} Mbit/s ({node.route.interface})" if node.route.speed else ""


def network_settings(node: FullNodeFacts) -> str:
    """Variables of NCCL and gloo. Names of interfaces and cards may differ between nodes, so they are left out."""
    compared = r"(NCCL|TORCH_NCCL|GLOO)_(?!SOCKET_IFNAME|IB_HCA)\w+"
    found = [f"{name}={value}" for name, value in node.facts.environment.items() if re.fullmatch(compared, name)]
    return f"{' '.join(found) or 'nothing'} is set"


TRAITS = (
    *MUST_BE_SAME,
    Trait("fault", "NCCL", lambda node: node.facts.torch.nccl and f"NCCL {node.facts.torch.nccl}",
          "install the same build of torch on all nodes"),
    Trait("warning", "GPUs", lambda node: describe(node.facts.gpus.devices),
          "leave this node out, or give it fewer processes: every step waits for the slowest"),
    Trait("warning", "driver", lambda node: node.facts.gpus.driver and f"driver {node.facts.gpus.driver}",
          "install the same driver on all nodes"),
    Trait("warning", "cores", lambda node: f"{node.facts.cores.usable:g} cores",
          "leave this node out, or give it fewer processes: every step waits for the slowest"),
    Trait("warning", "network", lambda node: "InfiniBand" if node.facts.infiniband else "no InfiniBand",
          "check ibstat: NCCL falls back to TCP, which is slow"),
    Trait("warning", "MTU", lambda node: f"{node.route.mtu} bytes" if node.route.mtu else "",
          "set the same MTU on all nodes: large packets may be dropped"),
    Trait("warning", "network", link, "check cable and switch: every step waits for the slowest"),
    Trait("warning", "NCCL", network_settings, "set the same values on all nodes, in config/node_env.sh or with --env"),
)  # fmt: skip


def compare_traits(nodes: Nodes) -> NodeFindings:
    for trait in TRAITS:
        for name, value, usual, others in differences_in(trait, nodes):
            yield name, Finding(trait.level, f"{value}, but {usual} on {compact(others)}", trait.fix, topic=trait.topic)


# ---------------------------------------------------------------- nearly equal


def compare_memory(nodes: Nodes) -> NodeFindings:
    total = {name: node.facts.memory.limit or node.facts.memory.total for name, node in nodes.items()}
    for name, own in total.items():
        others = median(other for other_name, other in total.items() if other_name != name)
        if own < (1 - MEMORY_TOLERANCE) * others:
            fact = f"{size(own)}, but {size(int(others))} (median) on the others"
            yield name, warning(fact, "the ranks of each node must fit into the smallest memory", topic="memory")


def compare_clocks(ahead: Mapping[str, float]) -> NodeFindings:
    """ahead: seconds by which each node's clock is ahead of this machine's."""
    usual = median(ahead.values())
    for name, seconds in ahead.items():
        difference = seconds - usual
        if abs(difference) > CLOCK_TOLERANCE:
            fact = f"{abs(difference):.0f} s {'ahead of' if difference > 0 else 'behind'} the others"
            fix = "times in the logs of nodes cannot be compared; synchronise the clock:"
            yield name, warning(fact, fix, "sudo timedatectl set-ntp true", "clock")


# ---------------------------------------------------------------- installation and names


def compare_installations(nodes: Nodes) -> NodeFindings:
    """Nodes on which files of Muster differ."""
    differing: dict[str, list[str]] = {}
    for file in sorted({file for node in nodes.values() for file in node.kit}):
        for name, *_ in differences({name: node.kit.get(file) or "none" for name, node in nodes.items()}):
            differing.setdefault(name, []).append(file)
    for name, files in differing.items():
        more = f" and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
        fact = f"differs from the other nodes: {', '.join(files[:SHOWN])}{more} in {nodes[name].facts.kit}"
        yield name, fault(fact, "use the same files: a shared directory, or rsync", topic="Muster")


def compare_names(nodes: Nodes) -> NodeFindings:
    """Each name must refer to a different machine, and the first node must have an address that the others can use."""
    for name, other in same_machines(nodes):
        yield name, fault(f"is the same machine as {other}", "list it once", topic="names")
    if not rendezvous_address(nodes):
        yield next(iter(nodes)), fault(*no_rendezvous_address(nodes), topic="names")


def compare(nodes: Nodes, ahead: Mapping[str, float]) -> list[tuple[str, Finding]]:
    """All differences between two or more nodes."""
    return [
        *compare_traits(nodes),
        *compare_memory(nodes),
        *compare_installations(nodes),
        *compare_names(nodes),
        *compare_clocks(ahead),
    ]
