"""What a launch needs to know of a node, as the node probe (host.probe) reports it; the doctor needs host.facts too.

Standard library only: nothing else need be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class NodeFacts:
    """What a launch needs to know of a node."""

    python: str
    torch: str | None
    gpus: int  # that its ranks see
    gpu_error: str
    files: Mapping[str, str | None]  # of each file the ranks will read: SHA-256, None when it cannot be read
    machine: str  # the same for two names of one machine
    addresses: tuple[str, ...]  # its own
    ssh_address: str  # the one at which it was reached; empty when not through ssh
    master: str  # the address it finds for the first node's name; empty when it finds none
    seconds: float  # that this took
    port: int  # the one that was asked for, else a free one
    holder: str | None  # who has it; None when it is free
