"""With --sync: name the files that a run wrote on a node only, and copy those that match a pattern of --fetch.

A file is new if it is younger than the copy of the working directory, by the clock of its node. Nothing replaces links,
and files that --sync would copy to the nodes. Other files are replaced only if a pattern names them, or a directory
above them, without wildcards: a pattern such as *.json could match the user's own files that git ignores. No file
arrives in directories of runs and git, and where a Python is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from fnmatch import fnmatchcase
from functools import cache
from importlib.machinery import all_suffixes
from pathlib import Path

from distributed import trust
from distributed.files import KIT
from distributed.host import sync_list
from distributed.transport.loop import INHERITED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from distributed.launch.watch import Watch
    from distributed.transport.commands import AnyTarget
    from distributed.transport.loop import Command

LIST_TIMEOUT = 30.0  # seconds
MAX_NAMES = 1 << 20  # bytes of the names of one node
WILDCARD = re.compile(r"[*?[]")
SHOWN = 3  # names in a message
PROGRAMS = ("distributed", "scripts")  # the programs in Muster's directory; it may also be the working directory
ENVIRONMENT = ("pyvenv.cfg", "conda-meta")  # a virtual environment, or one of conda, has one of these
# A node does not send files of these names, or of directories of these names: git, Python and Muster obey them.
NOT_SENT = {
    *trust.OF_GIT, ".gitignore", ".gitattributes", ".gitmodules", ".venv", ".muster_job", "__pycache__", "node_env.sh",
    "muster.toml", "run.json", "cluster_config.json", "site-packages", "dist-packages", *ENVIRONMENT,
}  # fmt: skip
# Programs for sh on a node. $1: the working directory, $2: Unix seconds, $3: the directory of all runs.
LIST = """cd -- "$1" && find . -name .git -prune -o -path "./$3" -prune -o -type f -newermt "@$2" ! -name '*.pyc' \
-printf '%T@ %p\\0'"""
PACK = 'cd -- "$1" && TAR_OPTIONS= exec tar -cf - --no-recursion --null --verbatim-files-from -T -'


class NewFiles:
    """The files of a run that has ended."""

    def __init__(self, watch: Watch, started: Mapping[str, str], log_dir: str, patterns: Sequence[str]) -> None:
        """started: node -> Unix seconds there before the start. log_dir: relative to the working directory."""
        self._watch, self._started, self._patterns = watch, started, patterns
        self._cwd = watch.options.cwd
        self._log_dir = os.path.relpath(os.path.realpath(os.path.join(self._cwd, log_dir)), os.path.realpath(self._cwd))
        self._own: Set[str] | None = None  # see _own_files()

    def report(self, nodes: Sequence[AnyTarget]) -> None:
        """Print which files are on which of these nodes only, and copy those that match."""
        calls = {
            node: self._command(node, LIST, self._started[node.node], self._log_dir)
            for node in nodes
            if node.node in self._started and not self._watch.lost_nodes.is_lost(node.node)
        }
        replies = self._watch.calls.call_all(calls, timeout=LIST_TIMEOUT, most=MAX_NAMES)
        for node in calls:
            reply = replies[node.node]
            if reply.code:
                reason = trust.printable(reply.err.strip()[-trust.LONGEST_LINE :]) or f"exit code {reply.code}"
                self._print(node, f"new files in {self._cwd} could not be listed: {reason}")
            newer = self._newer(reply.out)
            wanted = [] if self._watch.stopping.signal else list(filter(self._matches, newer))
            if wanted and (own := self._own_files(node)) is not None:
                copied = self._copy(node, wanted, own)
                newer = [name for name in newer if name not in copied]
            if newer:
                what = f"{len(newer)} new or changed file{'s' * (len(newer) > 1)} in {self._cwd} on this node only"
                hint = "--fetch PATTERN copies such files at the end of a run"
                if not set(wanted).isdisjoint(newer):
                    hint = "--fetch replaces files only in a directory that a pattern names (out/*), and none of --sync"
                self._print(node, f"{what}: {shown(newer)}; {hint}")

    def _newer(self, listed: str) -> list[str]:
        """The names in the output of LIST of files that this machine lacks, or of which it has older versions."""
        found = []
        for line in listed.split("\0"):
            seconds, _, name = line.partition(" ")
            name = os.path.normpath(name)
            parts = name.split("/")
            if parts[0] in ("", "..", "logs", self._log_dir.split("/")[0]) or self._is_obeyed(name, parts):
                continue
            try:
                is_newer = int(seconds.partition(".")[0]) > int(os.lstat(os.path.join(self._cwd, name)).st_mtime)
            except FileNotFoundError:
                is_newer = True
            except (OSError, ValueError):  # not from LIST
                continue
            if is_newer:
                found.append(name)
        return sorted(found)

    def _is_obeyed(self, name: str, parts: Sequence[str]) -> bool:
        """Whether programs obey a file of this name: git, Python, Muster, and shells in a home directory."""
        cwd, kit = Path(os.path.realpath(self._cwd)), Path(os.path.realpath(KIT))
        path = cwd / name
        below = path.relative_to(kit).parts if path.is_relative_to(kit) else ()
        if below and (not cwd.is_relative_to(kit) or below[0] in PROGRAMS or name.endswith(tuple(all_suffixes()))):
            return True
        if name.startswith(".") or name.endswith(".journal") or not NOT_SENT.isdisjoint(parts):
            return True
        return any(map(is_environment, list(path.parents)[: len(parts)]))

    def _matches(self, name: str, exists: bool = False) -> bool:
        """Whether a name, or a directory above it, matches a pattern. exists: a file of this name is to be replaced."""
        return any(
            (fnmatchcase(name, one) or fnmatchcase(name, f"{one.rstrip('/')}/*"))
            and not (exists and WILDCARD.search(one.partition("/")[0]))
            for one in self._patterns
        )

    def _own_files(self, node: AnyTarget) -> Set[str] | None:
        """The names of the files that --sync copies, which are the user's. Read before the first file arrives."""
        if self._own is None:
            try:
                self._own = set(map(os.fsdecode, sync_list.names_of(self._cwd)))
            except (sync_list.SyncError, OSError) as error:
                self._print(node, trust.printable(f"no file was copied, as {self._cwd} cannot be listed: {error}"))
        return self._own

    def _copy(self, node: AnyTarget, names: Sequence[str], own: Set[str]) -> Sequence[str]:
        """Copy these files; none replaces one of `own`. Returns the names of those that have arrived."""
        copied: list[str] = []

        def accepts(name: str, exists: bool) -> bool:
            is_own = name in own or name.partition("/")[0] in own  # without git, names of directories
            is_link = os.path.islink(os.path.join(self._cwd, name))
            if exists and (is_own or is_link or not self._matches(name, exists)):
                return False
            copied.append(name)
            return True

        try:
            directory = tempfile.mkdtemp(prefix=".muster-", dir=self._cwd)
        except OSError as error:
            self._print(node, f"no file was copied: {error.filename}: {error.strerror}")
            return ()
        source, target = os.pipe()
        problems: list[str] = []

        def unpack() -> None:
            try:
                trust.unpack(source, directory, set(names).__contains__)
            except trust.Refused as error:
                problems.append(str(error))
            finally:
                os.close(source)

        thread = threading.Thread(target=unpack, daemon=True)
        thread.start()
        sent = b"\0".join(map(os.fsencode, names))
        client = self._watch.calls.call(
            node.node, self._command(node, PACK), sent=sent, output=target, errors=INHERITED
        )
        os.close(target)
        while client in self._watch.calls.running and thread.is_alive() and not self._watch.stopping.signal:
            self._watch.loop.wait(1.0)
        client.kill()
        self._watch.calls.wait([client])
        thread.join()
        try:
            trust.place(directory, self._cwd, 0o755, accepts=accepts)
        except OSError as error:
            problems.append(trust.printable(f"{error.filename}: {error.strerror}"))
        shutil.rmtree(directory, ignore_errors=True)
        if copied:
            self._print(node, f"copied {len(copied)} file{'s' * (len(copied) > 1)} from it: {shown(copied)}")
        for problem in problems:
            self._print(node, f"the copy of its new files is incomplete: {problem}")
        return copied

    def _command(self, node: AnyTarget, script: str, *arguments: str) -> Command:
        return self._watch.transport.commands.command(node, ["sh", "-c", script, "sh", self._cwd, *arguments])

    def _print(self, node: AnyTarget, message: str) -> None:
        self._watch.console.print(f"{node.node}: {message}")


@cache
def is_environment(directory: Path) -> bool:
    """Whether a directory, which may not exist, is an environment of Python."""
    return any(os.path.lexists(directory / name) for name in ENVIRONMENT)


def shown(names: Sequence[str]) -> str:
    """The first names for a message."""
    texts = [trust.printable(name[: trust.LONGEST_LINE]) for name in names[:SHOWN]]
    return ", ".join(texts + ["..."] * (len(names) > SHOWN))
