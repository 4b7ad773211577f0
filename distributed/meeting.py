"""The nodes of a run come together: torchrun's static rendezvous, with what it keeps from people.

It waits for up to ten minutes without a word, and then raises what a store raises. Here a person sees who is missing,
nodes that do not fit together are told so, and from then on the agents know of each other (`distributed.peers`).
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from distributed.accounts import node_name
from distributed.peers import GAVE_UP, NotMet, Peers
from distributed.worker import Script

PATIENT = 15.0  # seconds between two words of a node that does not find the first one


class Meeting(StaticTCPRendezvous):
    """A static rendezvous of several nodes; afterwards `peers` knows them."""

    def __init__(self, plain: StaticTCPRendezvous, script: Script) -> None:
        seconds = int(plain.timeout.total_seconds())
        super().__init__(plain.master_addr, plain.master_port, plain.rank, plain.world_size, plain.run_id, seconds)
        self.script = script
        self.peers: Peers | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes. Raises NotMet when they do not come, or do not fit together."""
        store = PrefixStore(self.run_id, self._connected())
        names = os.environ.get("MUSTER_NODES", "").split()
        self.peers = Peers(store, self.rank, self.world_size, card(self.script, self.world_size), names)
        self.peers.meet(self.timeout.total_seconds(), say)
        return RendezvousInfo(
            store, self.rank, self.world_size, RendezvousStoreInfo(self.master_addr, self.master_port)
        )

    def _connected(self) -> TCPStore:
        place, begun = f"{self.master_addr}:{self.master_port}", time.monotonic()
        try:
            with _telling(f"waiting for the first node at {place}"):
                self._store = TCPStore(
                    self.master_addr,
                    self.master_port,
                    self.world_size,
                    is_master=self.rank == 0,
                    timeout=self.timeout,
                    wait_for_workers=False,  # we do that ourselves, and say for whom
                    multi_tenant=True,
                )
        except DistError as error:
            if self.rank == 0:
                raise
            waited = f"{time.monotonic() - begun:.0f} s"
            raise NotMet(f"no answer from the first node at {place} within {waited} ({error})", GAVE_UP) from error
        return self._store


def card(script: Script, nodes: int) -> dict[str, str]:
    """What a node shows the others of itself: its name, and what must be the same on all."""
    shown = {"node": node_name(), "NNODES": str(nodes), "PyTorch": torch.__version__}
    if not script.is_module:
        shown["the script"] = checksum(script.name)
    if list(script.words[:1]) == ["--config"]:  # as the launchers pass CONFIG on
        shown["CONFIG"] = checksum(script.words[1])
    return shown


def checksum(file: str) -> str:
    try:
        return f"sha256 {hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]}"
    except OSError as error:
        return f"not to be read ({error.strerror})"


def say(line: str) -> None:
    """One line of the agent's own, for people."""
    sys.stderr.write(f"agent: {line}\n")


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """While this takes long, say so."""
    over = threading.Event()
    threading.Thread(target=_tell, args=(what, over), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _tell(what: str, over: threading.Event) -> None:
    begun = time.monotonic()
    while not over.wait(PATIENT):
        say(f"{what}, {time.monotonic() - begun:.0f} s")
