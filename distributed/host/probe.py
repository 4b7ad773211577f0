"""The node probe: print facts of a node before a launch, or for doctor.sh.

It runs on every node over ssh and prints a reply (host.replies). For a launch, it collects only the required facts,
within tenths of a second. For the doctor (with --directory), the reply has all facts of the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from distributed.host.gpus import count_gpus
from distributed.host.identity import machine, versions
from distributed.host.network import address_of, free_port, listener, own_addresses, port_is_free
from distributed.host.replies import NodeFacts, format_reply
from distributed.host.resources import read_cores, write_error
from distributed.host.system import KIT
from distributed.trust import foreign_ancestor, user_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distributed.host.facts import FullNodeFacts

# Files of Muster; they must be equal on all nodes.
RUN_BY_RANKS = ("train.py", "distributed/**/*.py", "scripts/lib/*", "src/**/*.py")


def probe(
    nodes: Sequence[str],
    port: int | None,
    files: Sequence[str],
    packages: Sequence[str] = (),
    logs: Path | None = None,
    owner: str = "",
    env: Mapping[str, str] = os.environ,
) -> NodeFacts:
    """The facts that a launch needs.

    Args:
        nodes: names of all nodes, by node rank.
        port: rendezvous port on the first node; None or 0: any free port.
        files: files that the ranks will read.
        packages: names of packages that the ranks will import.
        logs: parent of run directories, which must be writable.
        owner: the user ids of the launching user and of the owner of the working directory there: "1000:1000".
    """
    gpus, gpu_error = count_gpus(env.get("CUDA_VISIBLE_DEVICES"))
    start = time.monotonic()
    master = address_of(nodes[0])
    seconds = time.monotonic() - start
    found = versions()
    return NodeFacts(
        python=str(found["python"]),
        torch=found["torch"],
        nccl=found["nccl"],
        muster=kit_checksum() if len(nodes) > 1 else "",
        gpus=gpus,
        gpu_error=gpu_error,
        cores=read_cores().usable,
        missing=[package for package in packages if not _is_installed(package)],
        files={file: checksum(Path(file)) for file in files},
        machine=machine(),
        addresses=own_addresses(),
        ssh_address=(env.get("SSH_CONNECTION", "").split() + [""] * 3)[2],
        master=master,
        seconds=seconds,
        port=port or free_port(),
        holder=None if port is None or port_is_free(port) else listener(port),
        directory_error=foreign_owner(owner) if owner else "",
        log_error=write_error(logs) if logs else "",
        log_warning=foreign_ancestor(str(logs)) if logs else "",
    )


def foreign_owner(owner: str) -> str:
    """That another user owns the working directory; "" if this user, root or the same user as at the launcher does.

    owner: see probe(). If the launching user has another id here, the owner there does not count.
    """
    user, found = os.geteuid(), os.stat(".").st_uid
    is_expected = owner == f"{user}:{found}" or found in (user, 0)
    return "" if is_expected else f"belongs to {user_name(found)}"


def _is_installed(package: str) -> bool:
    """Whether a package is installed.

    Python can also import a directory without __init__.py, such as `wandb`, to which wandb writes its files. This
    function returns False for it.
    """
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def full_probe(nodes: Sequence[str], port: int, directory: Path, logs: Path) -> FullNodeFacts:
    """The facts that the doctor needs, for a launch from `directory` with run directories in `logs`."""
    from distributed.host import facts  # not at the top: this import takes a third of the time of a launch's probe

    machine_facts = facts.gather(directory, logs, port)
    return facts.FullNodeFacts(
        **vars(probe(nodes, port, [])),
        facts=machine_facts,
        kit={str(path.relative_to(KIT)): checksum(path) for path in kit_files()},
        route=facts.route_to(nodes),
        now=time.time(),
    )


def kit_files() -> list[Path]:
    return sorted(path for pattern in RUN_BY_RANKS for path in KIT.glob(pattern) if path.is_file())


def kit_checksum() -> str:
    """A checksum of all files of Muster that ranks run."""
    found = hashlib.sha256()
    for path in kit_files():
        found.update(os.fsencode(path.relative_to(KIT)) + b"\0" + path.read_bytes())
    return found.hexdigest()[:8]


def checksum(file: Path) -> str | None:
    """SHA-256 of a file; None if unreadable."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def main(arguments: Sequence[str]) -> int:
    """Print the facts of this node as a reply."""
    parser = argparse.ArgumentParser(prog="probe", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("--port", type=int, default=0, help="rendezvous port; 0: any free port")
    parser.add_argument("--file", action="append", default=[], help="a file that the ranks will read; repeatable")
    parser.add_argument("--package", action="append", default=[], help="a package that the ranks import; repeatable")
    parser.add_argument("--directory", type=Path, help="report all facts, for a launch from this directory")
    parser.add_argument("--log-dir", type=Path, help="parent of run directories")
    parser.add_argument("--owner", default="", help="USER:OWNER, ids of the launching user and its working directory's")
    parser.add_argument("nodes", nargs="+", help="names of all nodes, by node rank")
    options = parser.parse_args(arguments)
    found = (
        full_probe(options.nodes, options.port, options.directory, options.log_dir)
        if options.directory
        else probe(options.nodes, options.port or None, options.file, options.package, options.log_dir, options.owner)
    )
    sys.stdout.write(format_reply(asdict(found)))
    return 0
