"""torchrun's static rendezvous with messages and checks.

torchrun's rendezvous waits silently, by default for ten minutes, and then raises an error of its store. This one
reports missing nodes, refuses incompatible nodes, names the run that uses the port, and starts the heartbeats of
`distributed.agent.membership`.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import threading
import uuid
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from distributed.agent.attempt import Attempt
from distributed.agent.failure_records import node_name
from distributed.agent.membership import (
    LOOPBACK,
    RUN_KEY,
    MemberFacts,
    Membership,
    PublishedRun,
    RendezvousFailed,
    publish,
    read_run,
    tcp_store,
)
from distributed.agent.worker import Script
from distributed.trust import printable

NO_RUN_ID = "none"  # torchrun's default for --rdzv-id
CONNECT_TIMEOUT = 5.0  # seconds to wait for a connection
OWNER_TIMEOUT = 5.0  # seconds to find out which run uses a port


class Rendezvous(StaticTCPRendezvous):
    """A static rendezvous. next_rendezvous() sets `attempt`, and `membership` when there are several nodes."""

    def __init__(self, base: StaticTCPRendezvous, script: Script) -> None:
        seconds = int(base.timeout.total_seconds())
        super().__init__(base.master_addr, base.master_port, base.rank, base.world_size, base.run_id, seconds)
        if self.world_size == 1:
            self.master_addr = LOOPBACK
        self.script = script
        self.membership: Membership | None = None
        self.attempt = Attempt.from_env()  # next_rendezvous() replaces it by that of the first node

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes. Raises RendezvousFailed."""
        facts = member_facts(self.script, self.world_size)
        run_name = "" if self.run_id == NO_RUN_ID else self.run_id
        if self.rank == 0:
            run_name = run_name or Path(os.environ.get("MUSTER_RUN_DIR", "")).name or uuid.uuid4().hex
            self._store = self._store or self._serve()
        run = self._join(run_name, facts) if self.world_size > 1 else publish(self._connect(), run_name, facts)
        assert self._store
        self.attempt = Attempt.parse(run.facts.get("attempt", ""))
        self.run_id = run.name
        return RendezvousInfo(
            PrefixStore(run.id, self._store),
            self.rank,
            self.world_size,
            RendezvousStoreInfo(self.master_addr, self.master_port),
        )

    def _join(self, run_name: str, facts: MemberFacts) -> PublishedRun:
        if self.membership:  # of the previous attempt
            self.membership.close()
        address, names = f"{self.master_addr}:{self.master_port}", os.environ.get("MUSTER_NODES", "").split()
        self.membership = Membership(self.rank, self.world_size, facts, address, self._connect, run_name, names)
        run = self.membership.wait_for_all(self.timeout.total_seconds(), log)
        if not names:  # nodes started by hand: each has its own launcher and run directory
            members = ", ".join(self.membership.members[rank]["node"] for rank in range(self.world_size))
            log(f"all {self.world_size} nodes joined: {members}; the first node's run is {run.name}")
        return run

    def _serve(self) -> TCPStore:
        try:
            return self._tcp_store(is_master=True)
        except (DistNetworkError, OSError) as error:
            if "address already in use" not in str(error).lower():
                raise
            owner = self._owner() or "another program"
            raise RendezvousFailed(
                f"port {self.master_port}: in use by {owner}; choose another --master-port"
            ) from error

    def _connect(self) -> Store:
        if self.rank == 0 and self._store:
            return self._store
        # TCPStore cannot be interrupted while it connects, and prints a long stack trace when it fails.
        socket.create_connection((self.master_addr, self.master_port), CONNECT_TIMEOUT).close()
        self._store = self._tcp_store(is_master=False)
        return self._store

    def _owner(self) -> PublishedRun | None:
        """The run that listens on this port, if any.

        The query runs in a thread, because a program that is not a store may never reply.
        """
        found: list[PublishedRun | None] = []

        def query() -> None:
            # No store, a store that was just closed, one without a run, or the store of another program.
            with suppress(RuntimeError, ValueError):
                store = self._tcp_store(is_master=False)
                store.wait([RUN_KEY], timedelta(seconds=OWNER_TIMEOUT))  # the run may not be published yet
                found.append(read_run(store))

        thread = threading.Thread(target=query, daemon=True)
        thread.start()
        thread.join(OWNER_TIMEOUT)
        return found[0] if found else None

    def _tcp_store(self, is_master: bool) -> TCPStore:
        return tcp_store(self.master_addr, self.master_port, self.world_size, is_master, self.timeout)


def member_facts(script: Script, nodes: int) -> dict[str, str]:
    """The name of this node ("node"), its attempt, and the facts that must be equal on all nodes of a run."""
    facts = {
        "node": node_name(),
        "attempt": str(Attempt.from_env()),
        "NNODES": str(nodes),
        "PyTorch": torch.__version__,
    }
    if not script.is_module:
        facts["the script"] = checksum(script.file)
    if list(script.arguments[:1]) == ["--config"]:  # as the launchers pass CONFIG
        facts["CONFIG"] = checksum(script.arguments[1])
    return facts


def checksum(file: str) -> str:
    try:
        return f"sha256 {hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]}"
    except OSError as error:
        return f"unreadable ({error.strerror})"


def log(line: str) -> None:
    sys.stderr.write(f"agent: {printable(line)}\n")  # other nodes have sent parts of it
