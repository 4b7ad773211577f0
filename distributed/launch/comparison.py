"""Compare nodes: which ones differ from the majority, and which rendezvous address all of them can use.

Before a launch, launch.preflight compares the traits that must be equal for a run. The doctor (health.differences) also
compares traits whose difference makes a run slow.
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
    """A property that must or should be equal on all nodes."""

    level: str  # fault: must be equal; warning: should be equal
    topic: str
    value: Callable[[Any], str]  # from the facts of a node; "": do not compare
    fix: str
    label: str = ""  # prefix of the value in messages


# Node, its value, the most common value, the nodes that have it.
Difference = tuple[str, str, str, list[str]]


def differences(values: Mapping[str, str]) -> Iterator[Difference]:
    """The nodes whose value differs from the most common one. values: node -> value; "" is not compared."""
    known = {node: value for node, value in values.items() if value}
    usual = Counter(known.values()).most_common(1)[0][0] if known else ""
    others = [node for node, value in known.items() if value == usual]
    return ((node, value, usual, others) for node, value in known.items() if value != usual)


def differences_in(trait: Trait, nodes: Mapping[str, NodeFacts]) -> Iterator[Difference]:
    return differences({name: trait.value(node) for name, node in nodes.items()})


def minor_version(node: NodeFacts) -> str:
    """The Python version without the patch version, which may differ: 3.11 for 3.11.7."""
    return ".".join(node.python.split(".")[:2])


def any_gpu(node: NodeFacts) -> str:
    return "" if node.gpu_error else "GPUs" if node.gpus else "no GPU"


MUST_BE_SAME = (
    Trait("fault", "python", minor_version, "use the same version on all nodes", label="Python "),
    Trait("fault", "torch", lambda node: node.torch or "", "install the same version on all nodes", label="PyTorch "),
    Trait("fault", "GPUs", any_gpu, "leave out the nodes that differ"),
)


def same_machines(nodes: Mapping[str, NodeFacts]) -> Iterator[tuple[str, str]]:
    """Pairs of names of the same machine: a node and an earlier one."""
    first: dict[str, str] = {}
    for name, node in nodes.items():
        if (other := first.setdefault(node.machine, name)) != name:
            yield name, other


def rendezvous_address(nodes: Mapping[str, NodeFacts]) -> str:
    """The address at which all nodes reach the first node.

    It is the first of these candidates that exists and is an address of the first node:

    1. the address to which all other nodes resolve the name of the first node
    2. the address at which the first node accepted the ssh connection

    If there is none, returns "" for several nodes, and 127.0.0.1 for a single node, whose name may be an ssh alias of
    this machine.
    """
    first, *others = nodes.values()
    found = {node.master for node in others or [first]}
    if len(found) == 1 and found <= set(first.addresses):
        return found.pop()
    if first.ssh_address in first.addresses:
        return first.ssh_address
    return "" if others else "127.0.0.1"


def no_rendezvous_address(nodes: Mapping[str, NodeFacts]) -> tuple[str, str]:
    """Why there is no rendezvous address, and the fix."""
    master, *others = nodes
    found = ", ".join(f"{nodes[name].master or 'nothing'} on {name}" for name in others)
    addresses = ", ".join(nodes[master].addresses) or "only loopback"
    fact = f"no address that all nodes can use ('{master}' resolves to {found}; its own addresses: {addresses})"
    return fact, "correct the name in /etc/hosts or DNS"
