"""Check MASTER_ADDR on a node that was started by hand: can all nodes use this address?

Only facts of this node are used; other nodes are not contacted.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence


def check_master(master: str, node_rank: int, found: str, own: Sequence[str]) -> tuple[str, str]:
    """The address to use and the fault; one of the two is "".

    Args:
        master: MASTER_ADDR, a name or an address.
        found: the address that it resolves to on this node; "" for none.
        own: this node's addresses, without loopback.
    """
    name, addresses = f"MASTER_ADDR '{master}'", ", ".join(own)
    if not found:
        return "", f"{name}: cannot be resolved on this node; correct the name, or give the address of node rank 0"
    here = found in own or ipaddress.ip_address(found).is_loopback
    if node_rank and here:
        return "", f"{name}: {found} is this node (node rank {node_rank}); give the address of node rank 0"
    if not node_rank and not here:
        return "", f"{name}: {found} is not an address of this node (node rank 0); give one of {addresses}"
    if node_rank or found in own:
        return master, ""
    reachable = [address for address in own if ipaddress.ip_address(address).version == 4]
    if len(reachable) == 1:
        return reachable[0], ""  # Debian resolves a machine's own name to 127.0.1.1
    return "", f"{name}: {found} cannot be reached from other nodes; give an address of this node ({addresses})"
