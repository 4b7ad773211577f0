"""In what do nodes differ, so far as it matters to training on all of them?

Values in, values out: each check takes the nodes' facts and yields the nodes that differ from most of the others, with
both values and the fix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from statistics import median

from distributed.health.checks import Finding, describe, size
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
from distributed.nodelist import fold

CLOCK_TOLERANCE = 2.0  # seconds; verdicts of several nodes are put in order by their clocks
MEMORY_TOLERANCE = 0.1  # of the memory
SHOWN = 3  # names of files in a line

Nodes = Mapping[str, FullNodeFacts]  # by name, in the order of node ranks
Found = Iterator[tuple[str, Finding]]  # the node, and what was found


# ---------------------------------------------------------------- the same or not


def nccl(node: FullNodeFacts) -> str:
    return node.facts.torch.nccl and f"NCCL {node.facts.torch.nccl}"


def gpus(node: FullNodeFacts) -> str:
    return describe(node.facts.gpus.devices) if node.facts.gpus.devices else ""


def driver(node: FullNodeFacts) -> str:
    return node.facts.gpus.driver and f"driver {node.facts.gpus.driver}"


def cores(node: FullNodeFacts) -> str:
    return f"{node.facts.cores.usable:g} cores"


def infiniband(node: FullNodeFacts) -> str:
    return "InfiniBand" if node.facts.limits.infiniband else "no InfiniBand"


def mtu(node: FullNodeFacts) -> str:
    return f"{node.route.mtu} bytes" if node.route.mtu else ""


def link(node: FullNodeFacts) -> str:
    return f"{node.route.speed} Mbit/s ({node.route.interface})" if node.route.speed else ""


def network_settings(node: FullNodeFacts) -> str:
    """NCCL's and gloo's; interfaces and cards may have other names on each node."""
    own = r"(NCCL|TORCH_NCCL|GLOO)_(?!SOCKET_IFNAME|IB_HCA)\w+"
    found = [f"{name}={value}" for name, value in node.facts.environment.items() if re.fullmatch(own, name)]
    return f"{' '.join(found) or 'nothing'} is set"


TRAITS = (
    *MUST_BE_SAME,
    Trait("fault", "NCCL", nccl, "install the same build of torch on all"),
    Trait("warning", "GPUs", gpus, "the slowest sets the pace of every step: leave it out, or give it fewer processes"),
    Trait("warning", "driver", driver, "install the same on all"),
    Trait("warning", "cores", cores, "the slowest sets the pace of every step"),
    Trait("warning", "network", infiniband, "NCCL speaks to it over TCP, slowly: see ibstat"),
    Trait("warning", "MTU", mtu, "large messages may vanish on the way: give all the same"),
    Trait("warning", "network", link, "the slowest sets the pace of every step: look at cable and switch"),
    Trait("warning", "NCCL", network_settings, "set them alike, in config/node_env.sh or with --env"),
)


def compare_traits(nodes: Nodes) -> Found:
    for trait in TRAITS:
        for name, value, usual, others in differences_in(trait, nodes):
            yield name, Finding(trait.level, trait.topic, f"{value}, but {usual} on {fold(others)}", trait.fix)


# ---------------------------------------------------------------- more or less


def compare_memory(nodes: Nodes) -> Found:
    total = {name: min(node.facts.memory.total, node.facts.memory.limit or 2**63) for name, node in nodes.items()}
    for name, own in total.items():
        others = median(other for other_name, other in total.items() if other_name != name)
        if own < (1 - MEMORY_TOLERANCE) * others:
            fact = f"{size(own)} in all, but {size(int(others))} elsewhere"
            yield name, Finding("warning", "memory", fact, "what fits there must fit here")


def compare_clocks(ahead: Mapping[str, float]) -> Found:
    """ahead: seconds by which each node's clock is ahead of the launching side's."""
    usual = median(ahead.values())
    for name, seconds in ahead.items():
        apart = seconds - usual
        if abs(apart) > CLOCK_TOLERANCE:
            fact = f"{abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} the others"
            fix = "verdicts may blame the wrong node: synchronise it"
            yield name, Finding("warning", "clock", fact, fix, "sudo timedatectl set-ntp true")


# ---------------------------------------------------------------- together


def compare_kits(nodes: Nodes) -> Found:
    """Nodes on which files of the kit are different."""
    differing: dict[str, list[str]] = {}
    for file in sorted({file for node in nodes.values() for file in node.kit}):
        for name, *_ in differences({name: node.kit.get(file) or "none" for name, node in nodes.items()}):
            differing.setdefault(name, []).append(file)
    for name, files in differing.items():
        more = f" and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
        fact = f"another kit than elsewhere: {', '.join(files[:SHOWN])}{more} in {nodes[name].facts.kit}"
        yield name, Finding("fault", "kit", fact, "make them the same: one folder for all nodes, or rsync")


def compare_names(nodes: Nodes) -> Found:
    """Whether each name is another machine, and ranks find the first one."""
    for name, other in same_machines(nodes):
        yield name, Finding("fault", "names", f"is the same machine as {other}", "name it once")
    if not rendezvous_address(nodes):
        yield next(iter(nodes)), Finding("fault", "names", *no_rendezvous_address(nodes))


def compare(nodes: Nodes, ahead: Mapping[str, float]) -> list[tuple[str, Finding]]:
    """All differences of at least two nodes, in the order of what they mean."""
    return [
        *compare_traits(nodes),
        *compare_memory(nodes),
        *compare_kits(nodes),
        *compare_names(nodes),
        *compare_clocks(ahead),
    ]
