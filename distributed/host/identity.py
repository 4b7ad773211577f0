"""Which machine, process, user and software is this, so that another node or a later command knows it again?

This runs before every launch, so it imports little, and that late.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself would cost milliseconds
    from collections.abc import Sequence


def machine() -> str:
    """The boot, and the network within it: containers and network namespaces are machines of their own."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip() + os.readlink("/proc/self/ns/net")


def user() -> str:
    """The name of who runs this; the number where a container knows no names."""
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def versions(path: Sequence[str] | None = None) -> dict[str, str | None]:
    """Of this interpreter, and of the PyTorch it would import: the name of its dist-info folder says it."""
    return {"python": sys.version.split()[0], "torch": _torch_version(sys.path if path is None else path)}


def _torch_version(path: Sequence[str]) -> str | None:
    for folder in path:
        try:
            names = sorted(os.listdir(folder or "."))
        except OSError:
            continue  # an entry of sys.path need not exist
        for name in names:
            base, dot, _ = name.partition(".dist-info")
            if dot and base.startswith("torch-"):
                return base.removeprefix("torch-")
    return None


if __name__ == "__main__":  # runs.run_directory asks another Python
    import json

    print(json.dumps(versions()))
