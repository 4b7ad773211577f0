"""Configurations and control sockets of ssh, for the servers of a list."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import subprocess
from pathlib import Path

from distributed.files import KIT, write_file
from distributed.jobs.host import checks
from distributed.jobs.lists import config
from distributed.transport.commands import TransportError, temporary_directory
from distributed.trust import read_bytes


def write_ssh_config(path: Path, server: config.Server) -> None:
    """Write the server's settings, then those of scripts/lib/ssh_config: ssh uses the first value of an option."""
    options = {
        "Port": server.port, "User": server.user, "ControlPath": f"{path.parent}/%C",
        "IdentityFile": server.ssh_key and f'"{server.ssh_key}"', "IdentitiesOnly": "yes" if server.ssh_key else None,
    }  # fmt: skip
    lines = [f"  {name} {value}" for name, value in options.items() if value is not None]
    common = Path(KIT, "scripts/lib/ssh_config").read_text()  # Include could not name each path of Muster
    write_file(path, "\n".join(["Host *", *lines, common]))


def sockets_record(cwd: Path, list_id: str) -> Path:
    """The file with the path of sockets_directory(). Machines that share the working directory have one each."""
    return Path(cwd, "logs", "jobs", list_id, f"sockets.{os.uname().nodename}")


def recorded_sockets(cwd: Path, list_id: str) -> Path | None:
    """The sockets_directory() of a list if it exists, and only this user can write to it and to its record."""
    try:
        found = Path(os.fsdecode(read_bytes(sockets_record(cwd, list_id), own=True)))
        facts = found.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077
    return found if private and re.fullmatch("muster-[0-9a-f]{8}", found.name) else None


def sockets_directory(cwd: Path, list_id: str) -> Path:
    """The directory of ssh's control sockets and configurations for a list. Creates it unless it exists.

    Its name is random, as another user could create a directory of a known name first. Raises OSError.
    """
    checks.list_directory(str(cwd), list_id)
    if found := recorded_sockets(cwd, list_id):
        return found
    try:
        made = temporary_directory(lambda _: None)
    except TransportError as error:
        raise OSError(str(error)) from None
    write_file(sockets_record(cwd, list_id), made)
    return Path(made)


def remove_sockets(cwd: Path, list_id: str) -> None:
    """Close the SSH connections of a list, each when its last session has ended, and remove their sockets."""
    if not (directory := recorded_sockets(cwd, list_id)):
        return
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            is_socket = stat.S_ISSOCK(path.lstat().st_mode)
            if is_socket:
                stop = ["ssh", "-F", "none", "-O", "stop", "-S", str(path), "--", "any"]
                with contextlib.suppress(subprocess.TimeoutExpired):
                    subprocess.run(stop, stdin=subprocess.DEVNULL, capture_output=True, timeout=5)
            if is_socket or ".conf" in path.name:
                path.unlink(missing_ok=True)
        directory.rmdir()
        sockets_record(cwd, list_id).unlink()
