"""Identify this machine, user and software, so that another node or a later command can recognise them.

This runs before every launch. It imports few modules, most of them only when needed.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing TYPE_CHECKING from typing would take milliseconds
    from collections.abc import Sequence


def machine() -> str:
    """An identifier of the boot and the network namespace, so that containers count as separate machines."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip() + os.readlink("/proc/self/ns/net")


def user() -> str:
    """The name of the user of this process; the user id if it has no name, as in some containers."""
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def versions(path: Sequence[str] | None = None) -> dict[str, str | None]:
    """Versions of this interpreter, and of PyTorch and NCCL as it would import them from `path` (default: sys.path)."""
    directories = sys.path if path is None else path
    found = {name: _version(directories, name) for name in ("torch", "nvidia_nccl")}
    return {"python": sys.version.split()[0], "torch": found["torch"], "nccl": found["nvidia_nccl"]}


def packages() -> list[str]:
    """Names and versions of the packages that this interpreter would import, such as numpy-2.3.1."""
    found = set()
    for directory in sys.path:
        try:
            found |= {name.removesuffix(".dist-info") for name in os.listdir(directory) if name.endswith(".dist-info")}
        except OSError:
            continue
    return sorted(found)


def _version(path: Sequence[str], package: str) -> str | None:
    for directory in path:
        try:
            with open(f"{directory or '.'}/{package}/version.py") as file:  # a copy without metadata may come first
                version = file.read(1 << 16).partition("__version__ = ")[2]
            if version.startswith(("'", '"')):
                return version.split(version[0])[1]
        except (OSError, ValueError):
            pass
        try:
            names = sorted(os.listdir(directory or "."))
        except OSError:
            continue  # an entry of sys.path need not exist
        for name in reversed(names):  # an older one may be left from another version of CUDA
            base, dot, _ = name.partition(".dist-info")
            if dot and base.startswith((f"{package}-", f"{package}_cu")):
                return base.rpartition("-")[2]
    return None


if __name__ == "__main__":  # runs.run_directory runs this with another Python
    import json

    print(json.dumps({**versions(), "packages": packages()}))
