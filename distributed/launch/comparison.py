"""Which nodes differ from most of the others, and at which address can they meet?

Before a launch (launch.preflight) what keeps nodes from working together is compared, by the doctor
(health.differences) also what makes them slow. Values in, values out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from distributed.host.replies import NodeFacts

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself would cost every launch milliseconds
    from typing import Any


@dataclass(frozen=True)
class Trait:
    """Something that must, or should, be the same on all nodes."""

    level: str  # fault: must; warning: should
    topic: str
    value: Callable[[Any], str]  # from the facts of a node; empty where there is nothing to compare
    fix: str
    label: str = ""  # before the value, where it does not say itself what it is


# A node, its value, the value that most others have, and which these are.
Difference = tuple[str, str, str, list[str]]


def differences(values: Mapping[str, str]) -> Iterator[Difference]:
    """Each node that has another value than most. values: of each node; an empty one is not compared."""
    known = {node: value for node, value in values.items() if value}
    usual = Counter(known.values()).most_common(1)[0][0] if known else ""
    others = [node for node, value in known.items() if value == usual]
    return ((node, value, usual, others) for node, value in known.items() if value != usual)


def differences_in(trait: Trait, nodes: Mapping[str, NodeFacts]) -> Iterator[Difference]:
    return differences({name: trait.value(node) for name, node in nodes.items()})


def minor_version(node: NodeFacts) -> str:
    """3.11 of 3.11.7: the last number may differ."""
    return ".".join(node.python.split(".")[:2])


def any_gpu(node: NodeFacts) -> str:
    return "" if node.gpu_error else "GPUs" if node.gpus else "no GPU"


MUST_BE_SAME = (
    Trait("fault", "python", minor_version, "use the same on all", label="Python "),
    Trait("fault", "torch", lambda node: node.torch or "", "install the same on all", label="PyTorch "),
    Trait("fault", "GPUs", any_gpu, "leave out what differs"),
)


def same_machines(nodes: Mapping[str, NodeFacts]) -> Iterator[tuple[str, str]]:
    """Each node that is the same machine as one before it, with the name of that one."""
    first: dict[str, str] = {}
    for name, node in nodes.items():
        if (other := first.setdefault(node.machine, name)) != name:
            yield name, other


def rendezvous_address(nodes: Mapping[str, NodeFacts]) -> str:
    """An address of the first node that all others find for it; else the one at which ssh reached it; or none: empty.

    A node that is alone, such as an alias of ssh for this machine, needs none.
    """
    first, *others = nodes.values()
    found = {node.master for node in others or [first]}
    if len(found) == 1 and found <= set(first.addresses):
        return found.pop()
    if first.ssh_address in first.addresses:
        return first.ssh_address
    return "" if others else "127.0.0.1"


def no_rendezvous_address(nodes: Mapping[str, NodeFacts]) -> tuple[str, str]:
    """Why there is no address, and the fix."""
    master, *others = nodes
    found = ", ".join(f"{name} finds {nodes[name].master or 'nothing'}" for name in others)
    own = ", ".join(nodes[master].addresses) or "none but loopback"
    fact = f"no address at which the others could meet it (for '{master}' {found}; its own are {own})"
    return fact, "correct the names in /etc/hosts or DNS"
