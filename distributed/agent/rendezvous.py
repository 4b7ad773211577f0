"""The rendezvous of the agents of a run, and the environment variables of ranks that follow from it.

It reports missing nodes, refuses incompatible nodes, names the run that uses the port, and starts the heartbeats of
`distributed.agent.membership`. Like torchrun's static rendezvous, it numbers ranks in the order of node ranks.
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
from torch.distributed import DistNetworkError, Store, TCPStore

from distributed.agent.attempt import Attempt
from distributed.agent.failure_records import node_name
from distributed.agent.membership import (
    LOOPBACK,
    RUN_KEY,
    MemberFacts,
    Membership,
    PublishedRun,
    Ranks,
    RendezvousFailed,
    publish,
    read_run,
    tcp_store,
)
from distributed.agent.options import NO_RUN_ID, Options
from distributed.agent.worker import Script
from distributed.trust import printable
from distributed.world import DEFAULT_PORT, World, as_env

CONNECT_TIMEOUT = 5.0  # seconds to wait for a connection
OWNER_TIMEOUT = 5.0  # seconds to find out which run uses a port


class Rendezvous:
    """The rendezvous of one attempt. join() sets `membership` if there are several nodes."""

    def __init__(self, options: Options, script: Script) -> None:
        self.membership: Membership | None = None
        self.total = 0  # number of ranks of the run
        self._nodes, self._processes, self._script = options.nnodes, options.nproc_per_node, script
        self._timeout = options.join_timeout
        self._name = "" if options.rdzv_id == NO_RUN_ID else options.rdzv_id
        self._rank, self._address, self._port = options.node_rank, options.master_addr, options.master_port
        if self._nodes == 1:
            self._rank, self._address = 0, LOOPBACK
        else:
            self._port = self._port or DEFAULT_PORT
        self._store: TCPStore | None = None  # ranks connect to it; it closes with this object

    def join(self) -> list[dict[str, str]]:
        """Wait for all nodes. Returns the variables of each rank of this node. Raises RendezvousFailed."""
        facts = member_facts(self._script, self._nodes, self._processes)
        if self._rank == 0:
            self._name = self._name or Path(os.environ.get("MUSTER_RUN_DIR", "")).name or uuid.uuid4().hex
            self._store = self._serve()
            self._port = self._store.port
        if self._nodes == 1:
            run, ranks = publish(self._connect(), self._name, facts), Ranks(0, self._processes)
        else:
            run, ranks = self._join(facts)
        self.total = ranks.total
        attempt, shared = Attempt.parse(run.facts.get("attempt", "")), {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        worlds = [
            World(
                ranks.first + local, ranks.total, local, self._processes, self._rank, self._nodes, self._address,
                self._port,
            )
            for local in range(self._processes)
        ]  # fmt: skip
        variables = [as_env(world, run.name) for world in worlds]
        return [one | attempt.variables(one) | shared for one in variables]

    def is_store_unused(self) -> bool:
        """Whether only agents have written to the store, which this node serves. False if that cannot be known."""
        if self._rank == 0 and self._store and hasattr(self._store, "list_keys"):  # not in all versions of PyTorch
            with suppress(RuntimeError):
                return all(key.startswith("muster/") for key in self._store.list_keys())
        return False

    def _join(self, facts: MemberFacts) -> tuple[PublishedRun, Ranks]:
        address, names = f"{self._address}:{self._port}", os.environ.get("MUSTER_NODES", "").split()
        self.membership = Membership(self._rank, self._nodes, facts, address, self._connect, self._name, names)
        run = self.membership.wait_for_all(self._timeout, log)
        if not names:  # nodes started by hand: each has its own launcher and run directory
            members = ", ".join(self.membership.members[rank]["node"] for rank in range(self._nodes))
            log(f"all {self._nodes} nodes joined: {members}; the first node's run is {run.name}")
        ranks = self.membership.ranks
        if not ranks or not 0 <= ranks.first <= ranks.total - self._processes:
            raise RendezvousFailed(f"{address}: invalid data in the store (ranks/{self._rank}: {ranks})")
        return run, ranks

    def _serve(self) -> TCPStore:
        try:
            return self._tcp_store(is_master=True)
        except (DistNetworkError, OSError) as error:
            if "address already in use" not in str(error).lower():
                raise
            owner = self._owner() or "another program"
            raise RendezvousFailed(f"port {self._port}: in use by {owner}; choose another --master-port") from error

    def _connect(self) -> Store:
        if self._rank == 0 and self._store:
            return self._store
        # TCPStore cannot be interrupted while it connects, and prints a long stack trace when it fails.
        socket.create_connection((self._address, self._port), CONNECT_TIMEOUT).close()
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
        timeout = timedelta(seconds=self._timeout)
        return tcp_store(self._address, self._port, self._nodes, is_master, timeout)


def member_facts(script: Script, nodes: int, ranks: int) -> dict[str, str]:
    """The name of this node ("node"), its attempt and number of ranks, and what must be equal on all nodes of a run."""
    facts = {
        "node": node_name(),
        "attempt": str(Attempt.from_env()),
        "ranks": str(ranks),
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
