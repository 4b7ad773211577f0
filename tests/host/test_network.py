"""Ports in use, addresses, interfaces and slow resolvers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
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
from distributed.host.system import KIT


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


INTERFACES = """
import os, sys
from distributed.host.network import nccl_interfaces, use_interface_to
use_interface_to(sys.argv[1])
print(",".join(nccl_interfaces()), os.environ["GLOO_SOCKET_IFNAME"], os.environ.get("NCCL_SOCKET_IFNAME"))
"""


@pytest.mark.parametrize(
    ("links", "setting", "printed"),
    [
        ([("eth0", "veth")], None, "eth0 eth0 None"),
        ([("eth0", "veth"), ("eth1", "veth")], None, "eth0,eth1 eth0 None"),
        ([("wifi0", "veth"), ("eth0", "veth")], None, "wifi0,eth0 eth0 =eth0"),
        ([("wifi0", "veth"), ("eth0", "veth")], "eth", "wifi0,eth0 eth0 eth"),
        ([("wifi0", "veth"), ("eth0", "veth")], "file", "wifi0,eth0 eth0 None"),
        ([("eth0", "veth"), ("cni0", "bridge")], None, "eth0,cni0 eth0 =eth0"),
        ([("docker0", "bridge"), ("virbr0", "bridge"), ("eth0", "veth")], None, "eth0 eth0 None"),
        ([("eth0", "veth"), ("ib0", "veth")], None, "ib0 eth0 =eth0"),
        ([("eth0", "veth")], None, "eth0 lo None"),  # the name of the first node may be that of loopback there
    ],
)
def test_nccl_uses_the_interface_to_another_node_if_it_would_choose_another_or_a_bridge(
    links: list[tuple[str, str]], setting: str | None, printed: str, tmp_path: Path
) -> None:
    """The interfaces are in a network namespace; 10.77.1.9 is reached through eth0."""
    if os.geteuid():
        pytest.skip("a network namespace needs root")
    add = "ip link set lo up; "
    for number, (name, kind) in enumerate(links, start=2):
        network = 1 if name == "eth0" else number
        peer = f" peer name peer{number}" if kind == "veth" else ""
        add += f"ip link add {name} type {kind}{peer}; ip addr add 10.77.{network}.1/24 dev {name}; "
        add += f"ip link set {name} up; "
    command = ["unshare", "--net", "--mount", "sh", "-ec", f'mount -t sysfs none /sys; {add} exec "$@"', "sh"]
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    if setting == "file":
        (tmp_path / ".nccl.conf").write_text("NCCL_SOCKET_IFNAME=wifi\n")
    elif setting:
        env["NCCL_SOCKET_IFNAME"] = setting
    node = "127.0.1.1" if " lo " in printed else "10.77.1.9"
    found = subprocess.run(
        [*command, sys.executable, "-c", INTERFACES, node], cwd=KIT, env=env, capture_output=True, text=True, check=True
    )
    assert found.stdout == f"{printed}\n"


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
