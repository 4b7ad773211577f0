"""Forward and reverse lookups of this host's name and addresses, with their duration."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from distributed.host.network import address_towards

LOOKUP_LIMIT = 6.0  # seconds; a resolver repeats a lost query after 5


@dataclass(frozen=True)
class Lookup:
    query: str
    answers: tuple[str, ...] = ()
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class NameLookups:
    host: str
    outward: str  # the address that other machines see; "": no route to them
    forward: Lookup
    reverse: tuple[Lookup, ...]


def look_up_names() -> NameLookups:
    """Look up the host's name and its addresses, all at the same time."""
    host, outward = socket.gethostname(), address_towards("192.0.2.1")  # reserved for documentation (RFC 5737)
    addresses = dict.fromkeys(address for address in ("127.0.0.1", outward) if address)
    forward, *reverse = look_up(
        {host: lambda: forward_lookup(host)}
        | {address: lambda address=address: reverse_lookup(address) for address in addresses}
    )
    return NameLookups(host, outward, forward, tuple(reverse))


def forward_lookup(host: str) -> tuple[str, ...]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def reverse_lookup(address: str) -> tuple[str, ...]:
    return (socket.getnameinfo((address, 0), 0)[0],)


def look_up(queries: Mapping[str, Callable[[], tuple[str, ...]]], limit: float = LOOKUP_LIMIT) -> list[Lookup]:
    """Run all queries at the same time, in threads that are abandoned after `limit` seconds."""
    done: dict[str, Lookup] = {}

    def run(query: str, function: Callable[[], tuple[str, ...]]) -> None:
        start = time.monotonic()
        try:
            answers, error = function(), ""
        except OSError as problem:
            answers, error = (), problem.strerror or str(problem)
        done[query] = Lookup(query, answers, time.monotonic() - start, error)

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in queries.items()]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    no_reply = f"no reply within {limit:g} s"
    return [done.get(query, Lookup(query, (), limit, no_reply)) for query in queries]
