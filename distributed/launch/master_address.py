"""Check MASTER_ADDR on a node that was started by hand: can all nodes use this address?

Only facts of this node are used; other nodes are not contacted.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence


def check_master(master: str, node_rank: int, resolved: str, own_addresses: Sequence[str]) -> tuple[str, str]:
    """The address to use and the fault; one of the two is "".

    Args:
        master: MASTER_ADDR, a name or an address.
        resolved: the address to which MASTER_ADDR resolves on this node; "" for none.
        own_addresses: those of this node, without loopback.
    """
    name, addresses = f"MASTER_ADDR '{master}'", ", ".join(own_addresses)
    if not resolved:
        return "", f"{name}: cannot be resolved on this node; correct the name, or give the address of node rank 0"
    is_here = resolved in own_addresses or ipaddress.ip_address(resolved).is_loopback
    if node_rank and is_here:
        return "", f"{name}: {resolved} is this node (node rank {node_rank}); give the address of node rank 0"
    if not node_rank and not is_here:
        return "", f"{name}: {resolved} is not an address of this node (node rank 0); give one of {addresses}"
    if node_rank or resolved in own_addresses:
        return master, ""
    reachable = [address for address in own_addresses if ipaddress.ip_address(address).version == 4]
    if len(reachable) == 1:
        return reachable[0], ""  # Debian resolves a machine's own name to 127.0.1.1
    return "", f"{name}: {resolved} cannot be reached from other nodes; give an address of this node ({addresses})"
