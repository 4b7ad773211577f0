"""One node of several, each started by hand: is MASTER_ADDR what all of them can use?

Nobody asks the other nodes, so only what this one knows can be told.

Standard library only: nothing else need be there.
"""

from __future__ import annotations

import argparse
import ipaddress
import sys
from collections.abc import Sequence

from distributed.exit_codes import UNFIT
from distributed.host.network import address_of, own_addresses


def place(master: str, node_rank: int, found: str, own: Sequence[str]) -> tuple[str, str]:
    """MASTER_ADDR as this node is to use it, and what speaks against it; one of the two is empty.

    found: the address this node has for it, empty for none. own: this node's addresses, without loopback.
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


def main(words: Sequence[str] | None = None) -> int:
    """Print the address at which to meet, or what speaks against it. Returns 0, or UNFIT."""
    summary = str(__doc__).splitlines()[0]
    parser = argparse.ArgumentParser(prog="master_address", description=summary, allow_abbrev=False)
    parser.add_argument("master", help="MASTER_ADDR")
    parser.add_argument("--node-rank", type=int, required=True)
    options = parser.parse_args(words)
    address, fault = place(options.master, options.node_rank, address_of(options.master), own_addresses())
    print(address) if address else sys.stderr.write(f"preflight: {fault}\n")
    return 0 if address else UNFIT


if __name__ == "__main__":
    sys.exit(main())
