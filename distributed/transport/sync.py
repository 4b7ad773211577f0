"""Implement --sync: copy the working directory and Muster to the nodes that do not share them.

distributed/host/sync_list.py lists the files to copy. Nothing is deleted on the nodes. distributed/launch/node_logs.py
copies the run directory back.
"""

from __future__ import annotations

import hashlib
import os
import shutil

from distributed.exit_codes import UNFIT
from distributed.host import sync_list
from distributed.host.replies import MARKER
from distributed.transport.commands import VANISHED, TransportError, rsync_shell
from distributed.transport.loop import INHERITED
from distributed.transport.owners import EXIT_IF_FOREIGN, FOREIGN, MAKE_BELOW, MAKE_TARGET, owners_above
from distributed.trust import regular_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from distributed.transport.commands import AnyTarget, Calls, SshCommands

# For bash on a node: reply with its time in Unix seconds, or with 0 if it shares the directory. $1: the directory. $2:
# the name of a file that the launcher has just created in that directory. $3: the SHA-256 of its content: other users
# of the node can see these arguments, but cannot make such a file. $4: owners.
REPLY_TIME = f"""{FOREIGN}; {MAKE_TARGET}; owners=$4; umask 022; make_target "$1"
if [ -f "$2" ] && [ "$(sha256sum <"$2")" = "$3  -" ]; then echo "{MARKER}0"; exit; fi
{EXIT_IF_FOREIGN}
echo "{MARKER}$(date +%s)\""""
# For bash on a node. $1: the directory. $2: owners. Standard input: see MAKE_BELOW.
MAKE_DIRECTORIES = f"""{FOREIGN}; {MAKE_BELOW}; owners=$2; umask 022; cd -- "$1" || exit; make_below"""


def sync_nodes(
    calls: Calls, commands: SshCommands, nodes: Sequence[AnyTarget], log: Callable[[str], None]
) -> dict[str, str]:
    """Copy the working directory and Muster to every node that does not share them. Raises TransportError.

    Returns the names of the nodes that do not share the working directory, with the time there, in Unix seconds.
    """
    times: dict[str, str] = {}
    if not shutil.which("rsync"):
        raise TransportError(UNFIT, "--sync: rsync: not found on this machine; install it")
    for directory in commands.synced:
        targets, failed = _nodes_without(calls, commands, nodes, directory)
        if directory == commands.synced[0]:
            times = {node.node: time for node, time in targets.items()}
        if targets and not failed:
            failed = _copy(calls, commands, targets, directory, log)
        if failed:
            names = " ".join(failed)
            raise TransportError(UNFIT, f"--sync: {directory} could not be copied to {names}; see the messages above")
    return times


def _nodes_without(
    calls: Calls, commands: SshCommands, nodes: Sequence[AnyTarget], directory: str
) -> tuple[dict[AnyTarget, str], list[str]]:
    """The nodes that do not share the directory, with the time there, and the names of those that failed to reply."""
    marker = os.path.join(directory, commands.marker)
    content = os.urandom(32)
    try:
        with open(marker, "xb", opener=regular_file) as file:
            file.write(content)
    except OSError as error:
        raise TransportError(UNFIT, f"--sync: cannot write to {directory}: {error.strerror}") from None
    check = ["bash", "-pc", REPLY_TIME, "bash", directory, commands.marker]
    check += [hashlib.sha256(content).hexdigest(), owners_above(directory)]
    replies = calls.call_all({node: commands.command(node, check) for node in nodes}, errors=INHERITED)
    os.unlink(marker)
    times = {node: replies[node.node].value(range(10**12)) for node in nodes}
    unshared = {node: str(time or 0) for node, time in times.items() if time != 0}
    return unshared, [name for name, reply in replies.items() if reply.code]


def _copy(
    calls: Calls, commands: SshCommands, nodes: Iterable[AnyTarget], directory: str, log: Callable[[str], None]
) -> list[str]:
    """Copy the files of a directory. Returns the names of the nodes for which that failed."""
    try:
        names = sync_list.names_of(directory)
        warning = sync_list.secrets_warning(directory, names)
        below = sync_list.directory_list(directory, names)
    except sync_list.SyncError as error:
        raise TransportError(UNFIT, f"--sync: {error}") from None
    except OSError as error:
        raise TransportError(UNFIT, f"--sync: {error.filename}: {error.strerror}") from None
    if warning:
        log(f"--sync: warning: {warning}")
    options = ["--archive", "--compress", "--sparse", "--keep-dirlinks", "--protect-args", "--recursive", "--from0"]
    options += ["--files-from=-", "--ignore-missing-args", "--exclude=.git"]
    make = ["bash", "-pc", MAKE_DIRECTORIES, "bash", directory, owners_above(directory)]
    replies = calls.call_all({node: commands.command(node, make) for node in nodes}, sent=below, errors=INHERITED)
    if refused := [name for name, reply in replies.items() if reply.code]:
        return refused
    calls_of = {}
    for node in nodes:
        log(f"--sync: copying {directory} to {node.node}")
        shell = rsync_shell(commands.ssh(node))
        calls_of[node] = ["rsync", *options, "-e", shell, "--", f"{directory}/", f"node:{directory}/"]
    replies = calls.call_all(calls_of, sent=sync_list.file_list(names), output=INHERITED, errors=INHERITED)
    return [name for name, reply in replies.items() if reply.code not in (0, VANISHED)]
