"""Free ports of this machine, and the interface and address that it uses to reach other machines."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import itertools
import os
import random
import re
import socket
import struct
from contextlib import suppress
from pathlib import Path

from distributed.host.system import PROC, SYS, read

PORTS = range(20_000, 30_000)  # candidates, below the usual ephemeral range
MAX_COMMAND_LENGTH = 100  # characters of a command line in a message
SIOCGIFADDR, SIOCGIFMTU = 0x8915, 0x8921  # linux/sockios.h: address and MTU of an interface


# ---------------------------------------------------------------- ports


def port_is_free(port: int) -> bool:
    """Whether PyTorch's store could listen on the port, on all addresses."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as listening:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.bind((address, port))
                listening.listen()
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
    return True


def free_port() -> int:
    """A free port from PORTS outside the ephemeral range."""
    low, high = ephemeral_range()
    start = random.randrange(len(PORTS))
    ports = itertools.chain(PORTS[start:], PORTS[:start])
    return next(port for port in ports if not low <= port <= high and port_is_free(port))


def listener(port: int, proc: Path = PROC) -> str:
    """The process that listens on the port, as "pid 12 (python train.py) of run NAME"; "" if none is visible."""
    sockets = {
        f"socket:[{columns[9]}]"
        for table in ("net/tcp", "net/tcp6")
        for columns in map(str.split, read(proc / table).splitlines()[1:])
        if columns[3] == "0A" and int(columns[1].rpartition(":")[2], 16) == port
    }
    for link in proc.glob("[0-9]*/fd/*") if sockets else ():
        with suppress(OSError):
            if os.readlink(link) in sockets:
                process = link.parents[1]
                command = read(process / "cmdline").replace("\0", " ").strip()
                if len(command) > MAX_COMMAND_LENGTH:
                    command = f"{command[:MAX_COMMAND_LENGTH]}..."
                run = re.search(r"(?:^|\0)MUSTER_RUN_DIR=[^\0]*?([^/\0]+)/*(?:\0|$)", read(process / "environ"))
                return f"pid {process.name} ({command})" + (f" of run {run[1]}" if run else "")
    return ""


def ephemeral_range(proc: Path = PROC) -> tuple[int, int]:
    low, high = read(proc / "sys/net/ipv4/ip_local_port_range").split() or (32768, 60999)
    return int(low), int(high)


# ---------------------------------------------------------------- interfaces and addresses


def address_of(name: str) -> str:
    """The first address that the name resolves to; "" if there is none."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def own_addresses() -> tuple[str, ...]:
    """IPv4 and IPv6 addresses of this machine, without loopback."""
    found = set(re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", read(Path("/proc/net/fib_trie"))))
    for line in read(Path("/proc/net/if_inet6")).splitlines():  # missing in a kernel without IPv6
        found.add(str(ipaddress.IPv6Address(int(line.split()[0], 16))))
    return tuple(sorted(address for address in found if not ipaddress.ip_address(address).is_loopback))


def address_towards(host: str) -> str:
    """The source IPv4 address of this machine on the route to a host; "" for an unknown name or without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def interface_to(host: str) -> str:
    """The network interface on the IPv4 route to a host; "" if unknown."""
    source = address_towards(host)
    return next((name for _, name in socket.if_nameindex() if source and address_of_interface(name) == source), "")


def use_interface_to(node: str) -> None:
    """Let gloo use the interface to another node. By default it uses the address of the host name, often 127.0.1.1.

    So does NCCL without InfiniBand, if it would set up its connections through another interface, or also use a bridge.
    """
    if node and (interface := interface_to(node)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        chosen = nccl_interfaces()
        bridged = any((SYS / "class/net" / name / "bridge").exists() for name in chosen if name != interface)
        files = read(Path("/etc/nccl.conf")) + read(Path(os.path.expanduser("~/.nccl.conf")))
        decided = "NCCL_SOCKET_IFNAME" in files or any(SYS.glob("class/infiniband/*"))
        if not decided and interface != "lo" and (bridged or interface != chosen[0]):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def nccl_interfaces() -> list[str]:
    """The interfaces that NCCL takes by itself: it sets up connections through the first, and uses all of them."""
    names = [name for _, name in socket.if_nameindex() if address_of_interface(name)]
    others = [name for name in names if not name.startswith(("docker", "lo", "virbr"))]
    return [name for name in names if name.startswith("ib")] or others or names


def address_of_interface(name: str) -> str:
    """The IPv4 address of an interface; "" if it has none."""
    ifreq = interface_ioctl(name, SIOCGIFADDR)
    return socket.inet_ntoa(ifreq[20:24]) if ifreq else ""


def mtu_of_interface(name: str) -> int:
    """The MTU of an interface in bytes; 0 if unknown."""
    ifreq = interface_ioctl(name, SIOCGIFMTU)
    return int(struct.unpack_from("i", ifreq, 16)[0]) if ifreq else 0


def interface_ioctl(name: str, request: int) -> bytes:
    """The struct ifreq that the kernel returns; empty on error."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
    return b""
