"""Check before a launch that the nodes can train together.

All nodes run the node probe (host.probe) at the same time. The probe takes tenths of a second. In the launcher,
`judge` compares the replies, reports each fault with its remedy, and chooses the rendezvous address:

    node1: 2 processes, but 1 GPU; start fewer there (node1:1)
    node3: PyTorch 2.12.0, but PyTorch 2.13.0 elsewhere; install the same version on all nodes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from distributed.host.replies import NodeFacts, Reply
from distributed.launch.comparison import (
    MUST_BE_SAME,
    Trait,
    differences,
    differences_in,
    no_rendezvous_address,
    rendezvous_address,
    same_machines,
)
from distributed.trust import one_line

TRAITS = (
    *MUST_BE_SAME,
    Trait("warning", "NCCL", lambda node: (node.gpus and node.nccl) or "", "install the same version", label="NCCL "),
    Trait("warning", "Muster", lambda node: node.muster, "use the same files, or launch with --sync", label="Muster "),
)
SLOW_LOOKUP = 1.0  # seconds
SYNC = "--sync (which copies tracked files, and others that git does not ignore)"


def judge(
    replies: Mapping[str, Reply], processes: Mapping[str, int], port: int | None
) -> tuple[list[str], list[str], str]:
    """Faults, warnings, and the rendezvous as "ADDRESS PORT"; "" if there is a fault.

    Args:
        replies: node -> its reply, in the order of the node ranks.
        processes: node -> number of its ranks.
    """
    nodes = {name: facts for name, reply in replies.items() if (facts := reply.value(NodeFacts))}
    master = next(iter(replies))
    warnings = [
        f"{name}: looking up '{master}' took {node.seconds:.1f} s, which delays every connection; repair its DNS "
        f"resolver, or add {master} to /etc/hosts"
        for name, node in nodes.items()
        if node.seconds > SLOW_LOOKUP
    ]
    replaceable = {node.log_warning: name for name, node in nodes.items() if node.log_warning}  # one of several nodes
    effect = "other users could replace the run directory; choose another --log-dir"
    warnings += [f"{name}: {problem}; {effect}" for problem, name in replaceable.items()]
    warnings += [f"{name}: {difference}" for name, difference in _different(nodes, "warning")]
    warnings = one_line(warnings)  # a line break of a node would begin a line about another one
    failed = [f"{name}: {reply.failure_message(NodeFacts)}" for name, reply in replies.items() if name not in nodes]
    if failed:
        return one_line(failed), warnings, ""
    faults = [f"{name}: {fault}" for name, fault in incompatible_nodes(nodes, processes)]
    address = rendezvous_address(nodes)
    if not faults and not address:
        faults.append(f"{master}: {'; '.join(no_rendezvous_address(nodes))}")
    if not faults and (holder := nodes[master].holder) is not None:
        faults.append(
            f"{master}: port {port}: in use{holder and f' by {holder}'}; choose another --master-port, or leave it out"
        )
    return one_line(faults), warnings, "" if faults else f"{address} {nodes[master].port}"


def incompatible_nodes(nodes: Mapping[str, NodeFacts], processes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Each node that cannot train with the others, and the fault."""
    yield from _different(nodes, "fault")
    yield from differing_files(nodes)
    for name, node in nodes.items():
        if node.torch is None:
            yield name, "PyTorch is not installed; install it for that Python, or choose another with --python"
        for package in node.missing:
            remedy = "install it for that Python: python -m pip install -r requirements-trackers.txt"
            yield name, f"the package {package} is not installed, and the settings enable this tracker; {remedy}"
        if node.directory_error:
            remedy = "move it away, or if you trust it: --no-preflight"
            yield name, f"the working directory {node.directory_error} there; {remedy}"
        if node.log_error:
            yield name, f"no run directory can be written there: {node.log_error}; choose another --log-dir"
        if node.gpu_error:
            yield name, f"cannot count its GPUs ({node.gpu_error}); try: ssh {name} nvidia-smi"
        elif 0 < node.gpus < processes[name]:
            gpus = f"{node.gpus} GPU{'s' * (node.gpus != 1)}"
            yield name, f"{processes[name]} processes, but {gpus}; start fewer there ({name}:{node.gpus})"
    for name, other in same_machines(nodes):
        yield name, f"is the same machine as {other}; list it once"


def _different(nodes: Mapping[str, NodeFacts], level: str) -> Iterator[tuple[str, str]]:
    for trait in TRAITS:
        for name, value, usual, _ in differences_in(trait, nodes) if trait.level == level else ():
            yield name, f"{trait.label}{value}, but {trait.label}{usual} elsewhere; {trait.fix}"


def differing_files(nodes: Mapping[str, NodeFacts]) -> Iterator[tuple[str, str]]:
    """Each node on which a file that the ranks will read is missing or different."""
    for file in next(iter(nodes.values())).files:
        checksums = {name: node.files.get(file) or "" for name, node in nodes.items()}
        for name in (name for name, checksum in checksums.items() if not checksum):
            yield name, f"cannot read file '{file}'; share its directory between the nodes, or launch with {SYNC}"
        for name, *_ in differences(checksums):
            yield name, f"'{file}' differs from that on the other nodes; make them equal, or launch with {SYNC}"


def count_processes(kind: str, reply: Reply) -> int:
    """The number of processes for NPROC auto, gpu or cpu. 0: no GPU is visible. 1 if judge() will report a fault."""
    from distributed.host.processes import count  # rarely needed

    facts = reply.value(NodeFacts)
    return 1 if facts is None or facts.gpu_error else count(kind, facts.gpus, facts.cores)
