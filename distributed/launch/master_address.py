"""One node of several, each started by hand: is MASTER_ADDR an address that all of them can use?

The other nodes are not asked: only what this one knows is checked.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence


def check_master(master: str, node_rank: int, found: str, own: Sequence[str]) -> tuple[str, str]:
    """MASTER_ADDR as this node is to use it, and the fault; one of the two is empty.

    Args:
        found: the address that this node finds for it, empty for none.
        own: this node's addresses, without loopback.
    """
    said = f"MASTER_ADDR '{master}'"
    if not found:
        return "", f"{said}: this node finds no address for it: mend the name, or give the address of node rank 0"
    here = found in own or ipaddress.ip_address(found).is_loopback
    if node_rank and here:
        return "", f"{said} is {found}, this node itself, but node rank 0 is what it has to name"
    if not node_rank and not here:
        return (
            "",
            f"{said} is {found}, no address of this node ({', '.join(own)}), but node rank 0 is what it has to name",
        )
    if node_rank or found in own:
        return master, ""
    reachable = [address for address in own if ipaddress.ip_address(address).version == 4]
    if len(reachable) == 1:
        return reachable[0], ""  # its own name is 127.0.1.1, as Debian has it
    return "", f"{said} is {found}, where no other node finds it: give an address of this node ({', '.join(own)})"
