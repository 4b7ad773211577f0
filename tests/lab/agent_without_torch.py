"""Run scripts/lib/agent.py with a small store in place of PyTorch, for tests whose scripts do not use PyTorch.

All else is the agent itself: its rendezvous, fork server, restarts, records and exit codes. It starts in a tenth of the
CPU time. A script that imports torch finds this module's stand-in, and fails. See tests/lab/without_torch.bash.
"""

from __future__ import annotations

import contextlib
import runpy
import socket
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

AGENT = Path(__file__).resolve().parents[2] / "scripts/lib/agent.py"


class DistNetworkError(RuntimeError):
    """The store does not reply."""


class Server:
    """The values of a store. Each connection is served by a thread of its own."""

    def __init__(self, listening: socket.socket) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._sockets = [listening]
        threading.Thread(target=self._accept, args=(listening,), daemon=True).start()

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._sockets.append(listening.accept()[0])
                threading.Thread(target=self._serve, args=(self._sockets[-1],), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), Connection(accepted.detach()) as connection:
            self._sockets.append(socket.socket(fileno=socket.dup(connection.fileno())))
            while True:
                name, *arguments = connection.recv()
                with self._changed:
                    reply = getattr(self, name)(*arguments)
                    self._changed.notify_all()
                connection.send(reply)

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        return self._changed.wait_for(lambda: self.check(keys), seconds)

    def check(self, keys: Sequence[str]) -> bool:
        return self._values.keys() >= set(keys)

    def read(self, keys: Sequence[str], seconds: float) -> list[bytes] | None:
        return [self._values[key] for key in keys] if self.wait(keys, seconds) else None

    def write(self, values: dict[str, bytes]) -> None:
        self._values |= values

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        if self._values.get(key, b"") == expected:
            self._values[key] = desired
        return self._values.get(key, expected)

    def add(self, key: str, number: int) -> int:
        self._values[key] = b"%d" % (int(self._values.get(key, b"0")) + number)
        return int(self._values[key])


class Store:
    """The methods of PyTorch's stores that the agent uses."""

    def call(self, name: str, *arguments: Any) -> Any:
        raise NotImplementedError

    def key(self, name: str) -> str:
        return name

    def wait(self, keys: Sequence[str], timeout: timedelta = timedelta(minutes=5)) -> None:
        self._read(keys, timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self.call("check", [self.key(one) for one in keys]))

    def get(self, key: str) -> bytes:
        return self._read([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._read(keys)

    def _read(self, keys: Sequence[str], timeout: timedelta = timedelta(minutes=5)) -> list[bytes]:
        values: list[bytes] | None = self.call("read", [self.key(one) for one in keys], timeout.total_seconds())
        if values is None:
            raise DistNetworkError("wait timeout")
        return values

    def set(self, key: str, value: str) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        self.call("write", {self.key(key): value.encode() for key, value in zip(keys, values, strict=True)})

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return bytes(self.call("compare_set", self.key(key), expected.encode(), desired.encode()))

    def add(self, key: str, number: int) -> int:
        return int(self.call("add", self.key(key), number))


class TCPStore(Store):
    """A connection to a store and, with is_master, the store itself until this object is deleted."""

    def __init__(
        self, address: str, port: int, is_master: bool = False, master_listen_fd: int | None = None, **_: object
    ) -> None:
        self._server, self._address, self._lock = None, address, threading.Lock()
        if is_master:
            fd = master_listen_fd
            listening = socket.create_server(("", port)) if fd is None else socket.socket(fileno=fd)
            port, self._server = listening.getsockname()[1], Server(listening)
        self.port = port
        self._connection = Connection(socket.create_connection((address, port)).detach())

    def __del__(self) -> None:
        if server := getattr(self, "_server", None):
            server.close()

    def clone(self) -> TCPStore:
        return TCPStore(self._address, self.port)

    def call(self, name: str, *arguments: Any) -> Any:
        try:
            with self._lock:
                self._connection.send((name, *arguments))
                return self._connection.recv()
        except (OSError, EOFError) as error:
            raise DistNetworkError("Connection reset by peer") from error


class PrefixStore(Store):
    """The keys of a store with this prefix."""

    def __init__(self, prefix: str, store: Store) -> None:
        self._prefix, self._store = prefix, store

    def key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def call(self, name: str, *arguments: Any) -> Any:
        return self._store.call(name, *arguments)


def replace_torch() -> None:
    """Let imports of torch find this stand-in."""
    torch, distributed = ModuleType("torch"), ModuleType("torch.distributed")
    vars(torch).update(__version__="none", distributed=distributed, default_generator=SimpleNamespace(seed=int))
    stores = (Store, TCPStore, PrefixStore, DistNetworkError)
    vars(distributed).update({one.__name__: one for one in stores})
    sys.modules |= {"torch": torch, "torch.distributed": distributed}


replace_torch()
if __name__ == "__main__":
    sys.argv[0] = str(AGENT)
    runpy.run_path(sys.argv[0], run_name="__main__")
