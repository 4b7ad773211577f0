"""What does this node find that matters to a launch? Asked of every node before one, and judged at home (preflight).

Standard library only: nothing else need be there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from distributed.host.gpus import look_at_gpus, visible
from distributed.host.identity import machine, versions
from distributed.host.network import address_of, free_port, listener, own_addresses, port_is_free
from distributed.host.replies import framed
from distributed.launch.preflight import Look


def look(files: Sequence[str], master: str, port: int | None, env: Mapping[str, str] = os.environ) -> Look:
    """Look around on this node. port: the one to meet at, or None for any."""
    gpus = look_at_gpus()
    begun = time.monotonic()
    address = address_of(master)
    seconds = time.monotonic() - begun
    found = versions()
    return Look(
        python=str(found["python"]),
        torch=found["torch"],
        files={file: checksum(Path(file)) for file in files},
        gpus=len(visible(env.get("CUDA_VISIBLE_DEVICES"), gpus.devices)),
        gpu_error=gpus.error,
        machine=machine(),
        addresses=own_addresses(),
        ssh_address=(env.get("SSH_CONNECTION", "").split() + [""] * 3)[2],
        master=address,
        seconds=seconds,
        port=port or free_port(),
        holder=None if port is None or port_is_free(port) else listener(port),
    )


def checksum(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def main(words: Sequence[str] | None = None) -> int:
    """Print what this node finds, as an answer."""
    parser = argparse.ArgumentParser(prog="survey", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("--master", required=True, help="name of the first node")
    parser.add_argument("--port", type=int, default=0, help="the one to meet at; 0: any")
    parser.add_argument("files", nargs="*", help="what the ranks will read")
    options = parser.parse_args(words)
    sys.stdout.write(framed(asdict(look(options.files, options.master, options.port or None))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
