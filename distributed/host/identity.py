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
    """Versions of this interpreter and of PyTorch, whose dist-info directory is in `path` (default: sys.path)."""
    return {"python": sys.version.split()[0], "torch": _torch_version(sys.path if path is None else path)}


def _torch_version(path: Sequence[str]) -> str | None:
    for directory in path:
        try:
            names = sorted(os.listdir(directory or "."))
        except OSError:
            continue  # an entry of sys.path need not exist
        for name in names:
            base, dot, _ = name.partition(".dist-info")
            if dot and base.startswith("torch-"):
                return base.removeprefix("torch-")
    return None


if __name__ == "__main__":  # runs.run_directory runs this with another Python
    import json

    print(json.dumps(versions()))
