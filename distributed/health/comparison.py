"""In what do nodes differ, so far as it matters to a training on all of them?

Values in, values out: each check takes the nodes' facts and tells who differs from most of the others, with both
values and the remedy.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from distributed.health.checks import Line, describe, size
from distributed.health.node import Member
from distributed.launch.preflight import meeting_point, minor, no_meeting_point
from distributed.nodelist import fold

APART = 2.0  # seconds between clocks; verdicts of several nodes are put in order by them
MORE_OR_LESS = 0.1  # of the memory
SHOWN = 3  # names of files in a line

Found = Iterator[tuple[str, Line]]  # who, and what of him


# ---------------------------------------------------------------- the same or not


@dataclass(frozen=True)
class Trait:
    """Something that should be the same on all nodes."""

    level: str
    topic: str
    value: Callable[[Member], str]  # in words; empty where there is nothing to compare
    fix: str


def version_of_torch(member: Member) -> str:
    return member.facts.torch.version  # one that is missing, the node's own doctor says


def version_of_nccl(member: Member) -> str:
    return member.facts.torch.nccl and f"NCCL {member.facts.torch.nccl}"


def any_gpu(member: Member) -> str:
    return "GPUs" if member.facts.gpus.devices else "no GPU"


def gpus(member: Member) -> str:
    seen = member.facts.gpus.devices
    return describe(seen, "").removesuffix(", driver ") if seen else ""


def driver(member: Member) -> str:
    return member.facts.gpus.driver and f"driver {member.facts.gpus.driver}"


def cores(member: Member) -> str:
    return f"{member.facts.cores.usable:g} cores"


def infiniband(member: Member) -> str:
    return "InfiniBand" if member.facts.limits.infiniband else "no InfiniBand"


def mtu(member: Member) -> str:
    return f"{member.route.mtu} bytes" if member.route.mtu else ""


def link(member: Member) -> str:
    return f"{member.route.speed} Mbit/s ({member.route.interface})" if member.route.speed else ""


def locked_memory(member: Member) -> str:
    allowed = member.facts.limits.locked_memory
    return f"{'any' if allowed is None else size(allowed)} locked memory" if member.facts.limits.infiniband else ""


def network_settings(member: Member) -> str:
    """NCCL's and gloo's; interfaces and cards may be called differently on each node."""
    own = r"(NCCL|TORCH_NCCL|GLOO)_(?!SOCKET_IFNAME|IB_HCA)\w+"
    found = [f"{name}={value}" for name, value in member.facts.environment.items() if re.fullmatch(own, name)]
    return f"{' '.join(found) or 'nothing'} is set"


TRAITS = (
    Trait("fault", "python", lambda member: minor(member.facts.interpreter.version), "use the same on all"),
    Trait("fault", "torch", version_of_torch, "install the same on all"),
    Trait("fault", "NCCL", version_of_nccl, "install the same build of torch on all"),
    Trait("fault", "GPUs", any_gpu, "leave out what differs"),
    Trait("warning", "GPUs", gpus, "the slowest sets the pace of every step: leave it out, or give it fewer processes"),
    Trait("warning", "driver", driver, "install the same on all"),
    Trait("warning", "cores", cores, "the slowest sets the pace of every step"),
    Trait("warning", "network", infiniband, "NCCL speaks to it over TCP, slowly: see ibstat"),
    Trait("warning", "MTU", mtu, "large messages may vanish on the way: give all the same"),
    Trait("warning", "network", link, "the slowest sets the pace of every step: look at cable and switch"),
    Trait("warning", "limits", locked_memory, "set memlock alike in /etc/security/limits.conf"),
    Trait("warning", "NCCL", network_settings, "set them alike, in config/node_env.sh or with --env"),
)


def unlike(trait: Trait, members: Mapping[str, Member]) -> Found:
    """Who has another value than most of those that have one."""
    values = {name: value for name, member in members.items() if (value := trait.value(member))}
    for name, value, usual, others in odd_ones(values):
        yield name, Line(trait.level, trait.topic, f"{value}, but {usual} on {fold(others)}", trait.fix)


def odd_ones(values: Mapping[str, str]) -> Iterator[tuple[str, str, str, list[str]]]:
    """Each that differs: its name, its value, what most have, and who has that."""
    if not values:
        return
    usual = Counter(values.values()).most_common(1)[0][0]
    others = [name for name, value in values.items() if value == usual]
    for name, value in values.items():
        if value != usual:
            yield name, value, usual, others


# ---------------------------------------------------------------- more or less


def compare_memory(members: Mapping[str, Member]) -> Found:
    total = {
        name: min(member.facts.memory.total, member.facts.memory.limit or 2**63) for name, member in members.items()
    }
    for name, own in total.items():
        others = median([other for other_name, other in total.items() if other_name != name])
        if own < (1 - MORE_OR_LESS) * others:
            fact = f"{size(own)} in all, but {size(int(others))} elsewhere"
            yield name, Line("warning", "memory", fact, "what fits there must fit here")


def compare_clocks(members: Mapping[str, Member], ahead: Mapping[str, float]) -> Found:
    """ahead: seconds by which each node's clock goes before the launching side's."""
    usual = median(ahead.values())
    for name in members:
        apart = ahead[name] - usual
        if abs(apart) > APART:
            fact = f"{abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} the others"
            fix = "verdicts may blame the wrong node: synchronise it"
            yield name, Line("warning", "clock", fact, fix, "sudo timedatectl set-ntp true")


# ---------------------------------------------------------------- together


def compare_kits(members: Mapping[str, Member]) -> Found:
    """Whose files of the kit are others."""
    differing: dict[str, list[str]] = {}
    for file in sorted({file for member in members.values() for file in member.kit}):
        for name, *_ in odd_ones({name: member.kit.get(file) or "none" for name, member in members.items()}):
            differing.setdefault(name, []).append(file)
    for name, files in differing.items():
        more = f" and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
        fact = f"another kit than elsewhere: {', '.join(files[:SHOWN])}{more} in {members[name].facts.kit}"
        yield name, Line("fault", "kit", fact, "make them the same: one folder for all nodes, or rsync")


def compare_machines(members: Mapping[str, Member]) -> Found:
    first: dict[str, str] = {}
    for name, member in members.items():
        if (other := first.setdefault(member.machine, name)) != name:
            yield name, Line("fault", "names", f"is the same machine as {other}", "name it once")


def compare_names(members: Mapping[str, Member]) -> Found:
    """Whether the ranks find a place to meet."""
    master = next(iter(members))
    if not meeting_point(master, members):
        fact, _, fix = no_meeting_point(master, members).removeprefix(f"{master}: ").rpartition(": ")
        yield master, Line("fault", "names", fact, fix)


def differences(members: Mapping[str, Member], ahead: Mapping[str, float]) -> list[tuple[str, Line]]:
    """All of them, in the order of what they mean.

    Args:
        members: name -> what that node found, at least two, by node rank.
        ahead: name -> seconds by which its clock goes before the launching side's.
    """
    found = [each for trait in TRAITS for each in unlike(trait, members)]
    for compare in (compare_memory, compare_kits, compare_machines, compare_names):
        found += compare(members)
    return [*found, *compare_clocks(members, ahead)]
