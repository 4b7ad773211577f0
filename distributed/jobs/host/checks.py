"""Checks of a server before jobs run there: its working directory, its Python, and who owns them."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import pwd
import stat
import subprocess
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

from distributed.jobs.host.outputs import HostError
from distributed.trust import (
    PRIVATE_DIRECTORY,
    foreign,
    make_directories,
    make_own_directory,
    parts_of,
    planted,
    user_name,
    writable_by_others,
)

REMEDIES = {  # errors of files and programs on a server; {} is a setting that avoids the error
    "No space left on device": "free space there, or set {}",
    "Disk quota exceeded": "free space there, or set {}",
    "Read-only file system": "make it writable, or set {}",
    "Permission denied": "change its permissions, or set {}",
    "Not a directory": "remove the file there, or set {}",
    "File exists": "remove the file there, or set {}",
    "cd: ": "create the home directory, or set {}",
    "command not found": "install it there",
    "": "correct this on the server",
}


def with_remedy(errors: str, setting: str) -> str:
    """A line of `errors` and its remedy, by the first match in REMEDIES. setting: replaces {} in the remedy."""
    lines = errors.splitlines()
    found = ((line, remedy) for sign, remedy in REMEDIES.items() for line in lines if sign in line)
    return next((f"{line.strip()}; {remedy.format(setting)}" for line, remedy in found), "")


def list_directory(workdir: str, list_id: str) -> str:
    """Create the private directory of a list, and return its path. Raises OSError if others own it or can replace it.

    The user may have replaced `logs` by a link.
    """
    path = os.path.join(workdir, "logs", "jobs", list_id)
    make_own_directory(os.path.join(workdir, "logs"), workdir)
    make_own_directory(path, workdir, PRIVATE_DIRECTORY)
    make_private(path)
    return path


def make_private(path: str) -> None:
    """Create a private directory, and those above it. Raises OSError if others own it or can write to it."""
    make_directories(path, PRIVATE_DIRECTORY)
    facts = os.lstat(path)
    if problem := foreign(path, facts) if stat.S_ISDIR(facts.st_mode) else "not a directory":
        raise PermissionError(errno.EACCES, problem.removeprefix(f"{path}: "), path)
    os.chmod(path, PRIVATE_DIRECTORY)  # earlier versions created it with the umask of the user


def ends_at_logout(etc: str = "/etc/systemd", linger: str = "/var/lib/systemd/linger") -> bool:
    """Whether systemd-logind kills a user's processes at logout; see logind.conf(5)."""
    paths = sorted(glob.glob(os.path.join(etc, "logind.conf.d", "*.conf")), key=os.path.basename)
    kills = False
    for path in (os.path.join(etc, "logind.conf"), *paths):  # a later file overrides earlier ones
        with contextlib.suppress(OSError), open(path) as file:
            for line in file:
                name, _, value = (word.strip() for word in line.partition("="))
                kills = value.lower() in ("yes", "true", "on", "1") if name == "KillUserProcesses" else kills
    user = pwd.getpwuid(os.getuid()).pw_name
    return kills and user != "root" and not os.path.exists(os.path.join(linger, user))  # root is exempt


def home() -> str:
    return os.path.expanduser("~")


def owner_here(request: Mapping[str, Any]) -> int:
    """The user id of the owner of the dispatcher's working directory; 0 if ids mean other people on that machine."""
    owner: int = request["owner"] if request["user"] == os.geteuid() else 0
    return owner


def find_workdir(requested: str, default: str, owner: int) -> str:
    """The absolute path of the requested working directory.

    If none is requested, uses ~/ml-customization or, if that does not exist, the default. Another user may have made
    that: it and the links to it must belong to this user, root or `owner`, as on the dispatcher's machine, and others
    must not be able to write to it. Raises HostError.
    """
    is_default = not requested
    if not requested:
        conventional = os.path.join(home(), "ml-customization")
        requested = conventional if os.path.isdir(conventional) else default
    found = os.path.join(home(), os.path.expanduser(requested))
    if not os.path.isdir(found):
        raise HostError(f"workdir {requested}: no such directory on {os.uname().nodename}; set workdir, or use --sync")
    if not os.access(found, os.W_OK | os.X_OK):
        raise HostError(f"workdir {requested}: not writable by this user; set another workdir")
    if is_default and (problem := foreign_workdir(found, (os.geteuid(), 0, owner))):
        raise HostError(f"workdir {requested}: {problem}; if you trust its files, set workdir to it")
    return os.path.realpath(found)


def foreign_workdir(path: str, owners: Collection[int]) -> str:
    """That others own a directory or a link to it, or can write to it; "" if only these owners do and can."""
    directory = os.stat(path)
    links = [facts for part in parts_of(path) if stat.S_ISLNK((facts := os.lstat(part)).st_mode)]
    for one in (directory, *links):
        if one.st_uid not in owners:
            return f"belongs to {user_name(one.st_uid)}"
    return "other users can write to it" if directory.st_mode & stat.S_IWOTH else ""


def find_python(requested: str, workdir: str) -> list[str]:
    """The command of the Python interpreter for scripts. Raises HostError."""
    venv = os.path.join(workdir, ".venv", "bin", "python")
    path = os.path.join(workdir, os.path.expanduser(requested)) if "/" in requested else requested
    path = path or (venv if os.path.exists(venv) else "python3")
    if path == venv and not requested:
        refuse_foreign_venv(workdir)
    try:
        version = subprocess.run([path, "--version"], capture_output=True, timeout=30, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise HostError(f"python {path}: {error.strerror}; set python for this server") from None
    except subprocess.TimeoutExpired:
        raise HostError(f"python {path}: no reply within 30 s; set python for this server") from None
    if version.returncode:
        raise HostError(f"python {path}: exits with code {version.returncode}; set python for this server")
    return [path]


def refuse_foreign_venv(workdir: str) -> None:
    """Raise HostError if another user than the owner of the working directory has made .venv, or can write to it.

    The same is true of its directories of programs and packages, and of the programs; only a link to a program may lead
    to what others own or can write to.
    """
    directory, owners = os.path.join(workdir, ".venv"), (os.geteuid(), 0, os.stat(workdir).st_uid)
    problem = planted(os.path.join(directory, "bin", "python"), owners)
    if not problem and (problem := foreign_workdir(directory, owners)):
        problem = f"{directory}: {problem}"
    inside = (glob.glob(glob.escape(directory) + names) for names in ("/bin/", "", "/*", "/*/*", "/*/*/*-packages"))
    for path in () if problem else chain.from_iterable(inside):
        is_program = path.startswith(os.path.join(directory, "bin", ""))
        for look in (os.lstat,) if is_program or not os.path.exists(path) else (os.lstat, os.stat):
            facts = look(path)
            if facts.st_uid not in owners:
                problem = f"{path}: belongs to {user_name(facts.st_uid)}"
            elif not stat.S_ISLNK(facts.st_mode) and writable_by_others(path, facts):
                problem = f"{path}: other users can write to it"
    if problem:
        raise HostError(f"{problem}; set python for this server")


def program(python: list[str], script: str, workdir: str) -> list[str]:
    """The command that runs a script: with the interpreter for .py, otherwise directly."""
    return [*python, script] if script.endswith(".py") else [os.path.join(workdir, script)]
