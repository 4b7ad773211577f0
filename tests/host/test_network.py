"""Ports in use, addresses, interfaces and slow resolvers."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed.host.dns import look_up
from distributed.host.network import (
    address_of,
    ephemeral_range,
    free_port,
    interface_to,
    listener,
    own_addresses,
    port_is_free,
)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def test_the_process_that_listens_on_a_port_is_found(server: socket.socket) -> None:
    port = server.getsockname()[1]
    assert not port_is_free(port)
    assert f"pid {os.getpid()} (" in listener(port)
    server.close()
    assert port_is_free(port)
    assert listener(port) == ""


def test_lookups_time_out() -> None:
    never = threading.Event()

    def refuse() -> tuple[str, ...]:
        raise OSError(-2, "Name or service not known")

    def hang() -> tuple[str, ...]:
        never.wait()
        return ()

    found, refused, timed_out = look_up({"a": lambda: ("10.0.0.1",), "b": refuse, "c": hang}, limit=0.2)
    never.set()
    assert found.answers == ("10.0.0.1",)
    assert refused.error == "Name or service not known"
    assert (timed_out.seconds, timed_out.error) == (0.2, "no reply within 0.2 s")


def test_the_interface_of_the_route_to_a_host_is_found() -> None:
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("no-such-name.invalid") == ""


def test_own_addresses_do_not_include_loopback() -> None:
    assert not [address for address in own_addresses() if address.startswith("127.") or address == "::1"]


def test_an_unknown_name_has_no_address() -> None:
    assert address_of("localhost") in ("127.0.0.1", "::1")
    assert address_of("no-such-name.invalid") == ""


def test_a_free_port_is_below_the_ephemeral_range() -> None:
    assert 20_000 <= free_port() < 30_000


def test_missing_files_in_proc_are_not_an_error(tmp_path: Path) -> None:
    assert ephemeral_range(tmp_path) == (32768, 60999)
    assert listener(29500, tmp_path) == ""
