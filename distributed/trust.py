"""What others can write is data: the checks of everything that Muster reads and has not just written itself.

Others are other users of the machine, nodes, ranks and jobs. Their files, replies, archives and messages go through the
functions of this module:

    foreign()           nothing is used that another user owns or can write
    planted()           no code runs that another user has made where all users can create files
    make_own_directory()  no files are written below a directory or link of another user
    lock_file()         only users who can write to a directory can lock it
    regular_file()      a file is opened without following a link and without waiting, with a private mode
    opened(), file_in() the same for directories, and for files in them, that others can exchange
    remove_made()       nothing else is removed that others have put in place of files of Muster
    parse_json()        JSON with bounded size and depth; ValueError is its only exception
    checked()           a value has the declared types and ranges, or ValueError names the part that has not
    printable()         text without control sequences
    one_line()          the same for all texts in a value, without line breaks
    unpack(), place()   files of a node go into a new directory, and from there, without links, to their place

Standard library only. Supervisors import this module before every command, so most imports are inside functions.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re
    import tarfile
    from collections.abc import Callable, Collection, Iterator
    from typing import Any

PRIVATE, SHARED = 0o600, 0o644  # modes of new files; the umask restricts them further
PRIVATE_DIRECTORY = 0o700
MANIFEST = "manifest.json"  # marks a checkpoint or base model
LAYOUT = "\n\t"  # characters that printable() may keep
MAX_TEXT = 64 << 20  # bytes of a JSON value or of a file that is read whole
MAX_VALUES = 2_000_000  # of a JSON value
MAX_LINKS = 40  # of a path, as in Linux
MAX_DEPTH = 40  # of nested JSON, and of directories
LARGEST = 1 << 63  # numbers are smaller
MAX_LINES, LONGEST_LINE = 30, 1000  # of a message
MAX_RECORDED = 1 << 16  # characters of a message or traceback in a failure record
MAX_FILES = 200_000  # of one archive
MAX_BYTES = 64 << 30  # of one archive, or of one log of a node
MIN_FREE = 64 << 20  # bytes that files of a node leave free on the disk
MAX_NAME = 64 << 10  # bytes of a name in an archive
NO_LOGIN = ("nologin", "false", "sync", "halt", "shutdown")  # shells of accounts without a login
OF_GIT = frozenset((".git", "HEAD"))  # git runs programs that the configuration beside a HEAD names
STALLED = 60.0  # seconds without a byte of an archive
# git, which enters no repository without `.git`. With git_environment(), it runs no program that the configuration of a
# repository names, except that `git status` runs filters, see git_obeys_others().
GIT_SETTINGS = ("GIT_CONFIG_", "GIT_EXEC_PATH")  # prefixes of the GIT_ variables that git inherits
GIT = ("git", "-c", "core.fsmonitor=false", "-c", "safe.bareRepository=explicit")


# ---------------------------------------------------------------- owners and modes


def user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user id {uid}"


def writable_by_others(path: str | os.PathLike[str], facts: os.stat_result) -> bool:
    """Whether users other than the owner can write, according to the mode. A group that only has its owner is none.

    It counts as others if an access control list names more users or groups: what the mode allows the group is then
    the most that the list allows them.
    """
    if not facts.st_mode & stat.S_IWGRP or facts.st_mode & stat.S_IWOTH:
        return bool(facts.st_mode & stat.S_IWOTH)
    if not _is_private_group(facts.st_uid, facts.st_gid):
        return True
    try:
        return bool(os.getxattr(path, "system.posix_acl_access"))
    except OSError as error:
        return error.errno not in (errno.ENODATA, errno.ENOTSUP, errno.ENOSYS)


def _is_private_group(uid: int, gid: int) -> bool:
    """Whether the group has the user's name and no other member, as systems create it that set umask 002.

    Accounts of /etc/passwd are members of their primary groups, except those without a login in root's, as on some
    systems. Never the id 65534, which stands for many users and groups in a container.
    """
    import grp
    import pwd

    if 65534 in (uid, gid):
        return False
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
        accounts = [line.split(":") for line in read_text("/etc/passwd").split("\n")]
    except (KeyError, OSError):
        return False
    for account in accounts:
        has_login = account[-1].rpartition("/")[2] not in NO_LOGIN
        if account[3:4] == [str(gid)] and account[2] != str(uid) and (gid or has_login):
            return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def foreign(path: str | os.PathLike[str], facts: os.stat_result, owners: tuple[int, ...] = ()) -> str:
    """Why this user must not use a file or directory; "" if only this user and `owners` can write to it."""
    name, user = os.fspath(path), os.geteuid()
    if facts.st_uid not in (user, *owners):
        owner = user_name(facts.st_uid)
        call = f"; call this program as its owner: runuser -u {owner} -- PROGRAM ..." if user == 0 else ""
        return f"{name}: belongs to {owner}, and you are {user_name(user)}{call}"
    if writable_by_others(path, facts):
        mode = stat.S_IMODE(facts.st_mode)
        return f"{name}: other users can write to it (mode {mode:o}); if you trust its content: chmod go-w {name}"
    return ""


def foreign_ancestor(directory: str) -> str:
    """Why another user can replace a directory, or one above it; "" if only this user and root can.

    Other users may create files in a directory if it has the sticky bit, as /tmp has. It may be missing.
    """
    with open("/proc/self/uid_map") as file:  # in a container, one user id stands for all users outside of it
        others = () if file.read().split()[-1] == "4294967295" else (65534,)
    for path in filter(os.path.lexists, ["/", *parts_of(directory)][::-1]):
        facts, above = os.lstat(path), os.lstat(os.path.dirname(path))
        owners = (0,) if above.st_mode & stat.S_IWOTH else (0, *others)
        is_sticky = facts.st_mode & stat.S_ISVTX and facts.st_uid in (*owners, os.geteuid())
        is_own_link = stat.S_ISLNK(facts.st_mode) and facts.st_uid in (*owners, os.geteuid())
        if not (is_sticky or is_own_link) and (problem := foreign(path, facts, owners)):
            return problem.partition("; ")[0]
    return ""


def parts_of(path: str) -> Iterator[str]:
    """A path and the directories above it, without /; for each part that is a link, also the parts where it leads."""
    at, links, rest = "", 0, os.path.join(os.getcwd(), path).split("/")[::-1]
    while rest and links <= MAX_LINKS:
        part = rest.pop()
        if part == "..":
            at = at.rpartition("/")[0]
        elif part not in ("", "."):
            yield f"{at}/{part}"
            try:
                link = os.readlink(f"{at}/{part}")
            except OSError:  # no link
                at += f"/{part}"
                continue
            at, links = "" if link.startswith("/") else at, links + 1
            rest += link.split("/")[::-1]


def planted(path: str, owners: Collection[int]) -> str:
    """Why code at a path must not run: another user has made a part of it where all users can create files; or ""."""
    for part in parts_of(path):
        above = os.path.dirname(part)
        mode = os.lstat(above).st_mode
        if mode & stat.S_IWOTH and not os.path.lexists(part):
            return f"{part}: not found, and all users could create it"
        facts = os.lstat(part)
        if mode & stat.S_IWOTH and facts.st_uid not in owners:
            return f"{part}: belongs to {user_name(facts.st_uid)}, who made it where all users can create files"
        if mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            return f"{part}: all users can replace it; call chmod o-w {above}"
    return ""


def without_links(path: str) -> str:
    """The path without links. Raises OSError if another user has made one where all users can create files."""
    for part in filter(os.path.islink, parts_of(path)):
        if os.stat(os.path.dirname(part)).st_mode & stat.S_IWOTH and os.lstat(part).st_uid not in (0, os.geteuid()):
            raise OSError(errno.ELOOP, "is a symbolic link of another user, which is not followed", part)
    return os.path.realpath(path)


# ---------------------------------------------------------------- git


def git_directory(directory: bytes) -> bytes:
    """The path of `.git` in this directory or in its closest parent on the same file system; empty if none has it.

    Empty also if another user has made it in a directory in which all users can create files, such as /tmp.
    """
    directory = os.path.realpath(directory)
    device = os.stat(directory).st_dev
    while os.stat(directory).st_dev == device:
        if os.path.lexists(found := os.path.join(directory, b".git")):
            is_open = os.stat(directory).st_mode & stat.S_IWOTH
            return b"" if is_open and os.lstat(found).st_uid not in (0, os.geteuid()) else found
        if directory == (directory := os.path.dirname(directory)):
            break
    return b""


def git_obeys_others(git: str) -> bool:
    """Whether the configuration or attributes of a `.git` are of others, who could let `git status` run their programs.

    Whoever owns the directory of `.git`, or belongs to a group that can replace `.git` there, is trusted.
    """
    above = os.stat(os.path.dirname(git))
    owners = (0, os.geteuid(), above.st_uid)
    is_shared = not above.st_mode & stat.S_ISVTX and writable_by_others(os.path.dirname(git), above)
    try:
        at = git
        if os.path.isfile(git):  # of a linked worktree or a submodule
            at = os.path.join(os.path.dirname(git), read_text(git).partition("gitdir: ")[2].rstrip("\n"))
        common = os.path.join(at, "commondir")
        common = os.path.join(at, read_text(common).rstrip("\n")) if os.path.lexists(common) else at
        names = ("", "commondir", "config", "config.worktree", "info", "info/attributes")
        for path in {git, *(os.path.join(directory, name) for directory in (at, common) for name in names)}:
            for facts in (os.lstat(path), os.stat(path)) if os.path.lexists(path) else ():
                is_open = not stat.S_ISLNK(facts.st_mode) and writable_by_others(path, facts)
                is_trusted = is_shared and facts.st_gid == above.st_gid and not facts.st_mode & stat.S_IWOTH
                if facts.st_uid not in owners or (is_open and not is_trusted):
                    return True
    except OSError:
        return True
    return False


def git_environment(**more: str) -> dict[str, str]:
    """The environment for git, without GIT_DIR and similar variables of git hooks.

    In a partial clone, git may not fetch what is missing there: the configuration can name any program for that.
    """
    kept = {name: os.environ[name] for name in os.environ if name.startswith(GIT_SETTINGS) or name[:4] != "GIT_"}
    return kept | more | {"GIT_ALLOW_PROTOCOL": ""}


# ---------------------------------------------------------------- files


def make_directories(path: str | os.PathLike[str], mode: int = 0o755) -> None:
    """Make a directory, and those above it, which only this user can write to whatever the umask is. Raises OSError."""
    if not os.path.isdir(path):
        if parent := os.path.dirname(path):
            make_directories(parent, mode)
        try:
            os.mkdir(path, mode)
        except FileExistsError:
            if not os.path.isdir(path):
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", os.fspath(path)) from None


def make_own_directory(path: str, workdir: str, mode: int = 0o755) -> None:
    """Make a directory as make_directories() does. Raises PermissionError with EPERM if another user could replace it.

    It, and those above it in the working directory, must belong to this user, root or the owner of the working
    directory, and planted() must accept their paths. They may be links.
    """
    path, workdir = os.path.abspath(path), os.path.abspath(workdir)
    if (above := os.path.dirname(path)).startswith(f"{workdir}/"):
        make_own_directory(above, workdir, mode)
    make_directories(path, mode)
    owners = (0, os.geteuid(), os.stat(workdir).st_uid)
    problem = planted(path, owners)
    if not problem and (owner := os.stat(path).st_uid) not in owners:
        problem = f"{path}: belongs to {user_name(owner)}, who could replace what is in it"
    if problem:
        part, _, reason = problem.partition(": ")
        raise PermissionError(errno.EPERM, reason, part)


def allowed_mode(directory: str | os.PathLike[str]) -> int:
    """Permissions that the umask may leave on new entries of a directory: others can write if they can write there."""
    return 0o777 if writable_by_others(directory, os.stat(directory)) else 0o755


def regular_file(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = PRIVATE) -> int:
    """Open a regular file without following a link and without waiting. mode: of a new file. Raises OSError.

    It is the `opener` of open(): open(path, "rb", opener=regular_file).
    """
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a symbolic link, which is not followed", os.fspath(path)) from None
        if error.errno == errno.ENXIO:  # a FIFO without a reader, or a socket
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return file


@contextlib.contextmanager
def opened(directory: str | os.PathLike[str], parent: int | None = None) -> Iterator[int]:
    """A descriptor of a directory, used instead of its path, which others may exchange. Raises OSError for a link.

    parent: a descriptor of a directory above it. Then no part of the path may be a link, otherwise only the last.
    """
    flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.ExitStack() as stack:
        for name in [directory] if parent is None else os.fspath(directory).split("/"):
            try:
                parent = os.open(name, flags, dir_fd=parent)
            except NotADirectoryError as error:
                if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                    error.strerror = "is a symbolic link, which is not followed"
                raise
            stack.callback(os.close, parent)
        yield parent  # type: ignore[misc]


def file_in(path: str | os.PathLike[str], flags: int = os.O_RDONLY, opens: Any = opened) -> int:
    """Open a file as regular_file() does. Its directory must not be a link either. opens: the function for that."""
    above, name = os.path.split(path)
    with opens(above or ".") as directory:
        try:
            return regular_file(f"/proc/self/fd/{directory}/{name}", flags)
        except OSError as error:
            error.filename = os.fspath(path)
            raise


def not_too_deep(walk: Iterator[Any]) -> Iterator[Any]:
    """What os.walk() or os.fwalk() yields, down to MAX_DEPTH levels: before Python 3.13, they call themselves."""
    limit = 0
    for found in walk:
        limit = limit or found[0].count("/") + MAX_DEPTH
        if found[0].count("/") >= limit:
            found[1].clear()
        yield found


def remove_made(name: str, parent: int, made: re.Pattern[str], depth: int = MAX_DEPTH) -> None:
    """Remove a file, link or directory of Muster in an open directory. Raises OSError.

    A directory in which a name does not match `made` is kept, because it may be one of this user that another one has
    put there; one with a manifest may have any files. Below it, the same is true, to this depth.
    """
    if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=parent)
        return
    with opened(name, parent) as directory:
        entries = sorted(os.listdir(directory), key=MANIFEST.__eq__)  # that one last
        unknown = next((entry for entry in entries if not depth or not made.fullmatch(entry)), "")
        if unknown and (not depth or MANIFEST not in entries):
            reason = f"not removed, because it holds {shown(unknown)}, which Muster has not made"
            raise OSError(errno.EPERM, reason, name)
        for entry in entries:
            remove_made(entry, directory, made, depth - 1)
    os.rmdir(name, dir_fd=parent)


def lock_file(path: str | os.PathLike[str], flags: int, directory: str | os.PathLike[str]) -> int:
    """Open a lock file for a directory as regular_file() does, and return its descriptor. Raises OSError.

    Users who cannot write to the directory cannot open it, whatever the umask is: with any lock they could block it.
    Where others can write, an existing file is left as it is: they may have moved it there.
    """
    mode, group = _of_locks(directory)
    try:
        file, is_own = regular_file(path, flags | os.O_CREAT | os.O_EXCL, mode), True
    except FileExistsError:
        file = regular_file(path, flags & ~os.O_CREAT)  # which fs.protected_regular refuses for a file of another user
        is_own = mode == PRIVATE and os.fstat(file).st_uid == os.stat(directory).st_uid == os.geteuid()
    if is_own and mode & 0o070 and os.fstat(file).st_gid != group:  # the group that can write there, not the user's own
        try:
            os.fchown(file, -1, group)
        except OSError:  # no member
            mode &= ~0o070
    if is_own and stat.S_IMODE(os.fstat(file).st_mode) != mode:  # of an earlier version, or of the umask
        os.fchmod(file, mode)
    return file


def is_lock_file(file: int, directory: str | os.PathLike[str]) -> bool:
    """Whether an open file has the mode and group of a new lock file of the directory, and no second name."""
    (mode, group), facts = _of_locks(directory), os.fstat(file)
    is_of_group = not mode & 0o070 or facts.st_gid == group
    return is_of_group and stat.S_IMODE(facts.st_mode) == mode and facts.st_nlink == 1


def _of_locks(directory: str | os.PathLike[str]) -> tuple[int, int]:
    above = os.stat(directory)
    if not writable_by_others(directory, above):
        return PRIVATE, above.st_gid
    return PRIVATE | (0o066 if above.st_mode & stat.S_IWOTH else 0o060), above.st_gid


def read_bytes(path: str | os.PathLike[str], own: bool = False, most: int = 0) -> bytes:
    """The content of a regular file. own: it must not be foreign(). Raises OSError, also above `most` bytes.

    most: default: MAX_TEXT.
    """
    most = most or MAX_TEXT
    with open(path, "rb", opener=regular_file) as file:
        if own and (problem := foreign(path, os.fstat(file.fileno()))):
            raise OSError(errno.EPERM, problem)
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"has more than {most >> 10} KiB", os.fspath(path))
    return content


def read_text(path: str | os.PathLike[str]) -> str:
    """The content of a regular file as text. Raises OSError."""
    return read_bytes(path).decode(errors="replace")


# ---------------------------------------------------------------- values


def parse_json(text: str | bytes | bytearray, most: int = 0) -> Any:
    """The value of a JSON text. Raises ValueError, also if the text is too long, too large or too deeply nested."""
    import json

    if len(text) > MAX_TEXT:
        raise ValueError(f"more than {MAX_TEXT >> 20} MiB")
    starts: Any = ",[{" if isinstance(text, str) else (b",", b"[", b"{")  # every value but the first follows one
    if sum(map(text.count, starts)) > (most := most or MAX_VALUES):
        raise ValueError(f"more than {most} values")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (list, dict))]
        if not (level := [part for parts in level for part in parts]):
            return value
    raise ValueError(f"nested more than {MAX_DEPTH} levels deep")


def checked(kind: Any, value: Any, name: str = "value") -> Any:
    """The value, converted to the declared kind. Raises ValueError, which names the part that has another type.

    kind: bool, int (below 2**63), float (finite), str, a compiled regular expression, None, object (anything), a range
    of integers; unions, lists, tuples, sequences and mappings of kinds; [kind] for a list; a dictionary from key to
    kind, in which a key with a final "?" may be missing; a dataclass. Unknown keys and fields are refused. Text may
    have any characters.
    """
    import types

    origin: Any = getattr(kind, "__origin__", None)
    parts: Any = getattr(kind, "__args__", kind if isinstance(kind, list) else ())
    if isinstance(kind, types.UnionType):
        for part in parts:
            with contextlib.suppress(ValueError):
                return checked(part, value, name)
    elif isinstance(value, dict) and (isinstance(kind, dict) or hasattr(kind, "__dataclass_fields__")):
        return _checked_fields(kind, value, name)
    elif isinstance(value, dict) and len(parts) == 2 and parts[1] is not ...:
        return {checked(parts[0], key, name): checked(parts[1], one, f"{name}.{key}") for key, one in value.items()}
    elif isinstance(value, (list, tuple)) and parts and (len(parts) == 1 or parts[1] is ...):
        found = [checked(parts[0], one, f"{name}[{number}]") for number, one in enumerate(value)]
        return tuple(found) if origin is tuple else found
    elif _is_a(value, kind):
        return float(value) if kind is float else value
    expected = "an object" if isinstance(kind, dict) else getattr(kind, "__name__", kind)
    raise ValueError(f"{printable(name)}: expected {expected}, got {shown(value)}")


def _is_a(value: object, kind: Any) -> bool:
    if hasattr(kind, "fullmatch"):
        return isinstance(value, str) and bool(kind.fullmatch(value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value is kind or (isinstance(kind, type) and isinstance(value, kind) and kind not in (int, float))
    if isinstance(kind, range):
        return isinstance(value, int) and value in kind
    return kind in (object, float, type(value)) and abs(value) < LARGEST


def _checked_fields(kind: Any, value: dict[str, Any], name: str) -> Any:
    if isinstance(kind, dict):
        kinds = {key.rstrip("?"): one for key, one in kind.items()}
        needed = {key for key in kind if not key.endswith("?")}
    else:
        from dataclasses import MISSING
        from typing import get_type_hints

        kinds = _kinds[kind] = _kinds.get(kind) or get_type_hints(kind)
        fields = kind.__dataclass_fields__.values()
        needed = {one.name for one in fields if one.default is MISSING and one.default_factory is MISSING}
    if wrong := (needed - value.keys()) or (value.keys() - kinds.keys()):
        raise ValueError(f"{name}: {'no' if wrong <= needed else 'unknown key'} {shown(min(wrong))}")
    found = {key: checked(kinds[key], one, key) for key, one in value.items()}
    return found if isinstance(kind, dict) else kind(**found)


_kinds: dict[Any, dict[str, Any]] = {}  # dataclass -> the kinds of its fields


def shown(value: object, length: int = 60) -> str:
    """A representation of a value for messages, of at most `length` characters."""
    import reprlib

    brief = reprlib.Repr()
    brief.maxlevel, brief.maxstring, brief.maxother, brief.maxlong = 3, length, length, length
    text = printable(brief.repr(value))
    return text if len(text) <= length else f"{text[: length - 3]}..."


def bounded(message: str) -> str:
    """A message with at most MAX_LINES lines, with at most LONGEST_LINE characters each, and no control characters."""
    lines = message.split("\n")
    if len(lines) > MAX_LINES:
        lines[MAX_LINES - 1 :] = ["and more"]
    return "\n".join(printable(line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}...") for line in lines)


# ---------------------------------------------------------------- text


def head_and_tail(text: str) -> str:
    """The text, without its middle if it has more than MAX_RECORDED characters."""
    half = MAX_RECORDED // 2
    return text if len(text) <= MAX_RECORDED else f"{text[: half - 5]}\n...\n{text[-half:]}"


def printable(text: str, kept: str = "") -> str:
    """The text without control sequences; other control characters, except `kept`, become blanks."""
    if text.rstrip(kept).isprintable():
        return text
    import re

    text = re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|.)", "", text)
    return "".join(letter if letter.isprintable() or letter in kept else " " for letter in text)


def one_line(value: Any, texts: Collection[str] = ()) -> Any:
    """The value, in which each text is one line of at most LONGEST_LINE characters without control sequences.

    So no text of a node can imitate another line. texts: names of fields of dataclasses that keep their lines; see
    head_and_tail().
    """
    import dataclasses

    if isinstance(value, str):
        return printable(value[:LONGEST_LINE])
    if isinstance(value, dict):
        return {one_line(key): one_line(one, texts) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(one_line(one, texts) for one in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    changed = {name: head_and_tail(one) if name in texts else one_line(one, texts) for name, one in fields.items()}
    return dataclasses.replace(value, **changed)


# ---------------------------------------------------------------- files of a node


class Refused(Exception):
    """An archive is damaged, stalls, or is larger than allowed. The message says which."""


class _Stream:
    """The bytes of an archive. Raises Refused if none arrive for STALLED seconds."""

    def __init__(self, file: int) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        import select

        poll = select.poll()
        poll.register(self._file, select.POLLIN)
        if not poll.poll(1000 * STALLED):
            raise Refused(f"no data for {STALLED:.0f} s")
        return os.read(self._file, size)


def unpack(source: int, directory: str, expects: Callable[[str], bool]) -> list[str]:
    """Unpack a tar archive from a pipe into a new directory. Returns the names of what was left out. Raises Refused.

    Only regular files and directories that expects() accepts are unpacked, with private modes; the name of a directory
    ends with a slash. No name leads outside, or is one of OF_GIT. After Refused, the directory has the complete files
    that were received.
    """
    import tarfile

    class Member(tarfile.TarInfo):
        @classmethod
        def frombuf(cls, buf: Any, encoding: str, errors: str) -> Any:
            member = super().frombuf(buf, encoding, errors)
            is_name = member.type in (b"L", b"K", b"x", b"X")  # tarfile reads it whole
            if (is_name and member.size > MAX_NAME) or member.type in (b"S", b"g"):  # S, g: headers without a limit
                raise Refused("a header in it is too long")
            return member

        def _proc_gnusparse_10(self, *_: Any) -> None:
            raise Refused("a sparse file")

        _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10

    left_out, count, size = [], 0, 0
    try:
        stream: Any = _Stream(source)
        with tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 18, tarinfo=Member) as archive:
            while member := archive.next():
                archive.members = []  # type: ignore[attr-defined]  # do not keep all of them
                disk, name = os.statvfs(directory), os.path.normpath(member.name)
                count, size = count + 1, size + max(0, member.size)
                if count > MAX_FILES or size > MAX_BYTES or member.size > disk.f_bavail * disk.f_frsize - MIN_FREE:
                    raise Refused(f"{count} files with {size >> 20} MiB are more than the limits or the disk allow")
                is_regular = (member.isdir() or member.isreg()) and OF_GIT.isdisjoint(name.split("/"))
                if is_regular and _is_inside(name) and expects(name + "/" * member.isdir()):
                    _extract(archive, member, os.path.join(directory, name))
                elif name != ".":
                    left_out.append(name[:LONGEST_LINE])
    except Refused:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a damaged archive causes in tarfile
        raise Refused(f"cannot be unpacked ({type(error).__name__}: {error})") from None
    return left_out


def _is_inside(name: str) -> bool:
    return name != ".." and not name.startswith(("/", "../")) and name.count("/") < MAX_DEPTH


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    import shutil
    import time

    content = archive.extractfile(member)
    os.makedirs(os.path.dirname(path) if content else path, PRIVATE_DIRECTORY, exist_ok=True)
    if content:
        try:
            with open(path, "wb", opener=regular_file) as file:
                shutil.copyfileobj(content, file, 1 << 18)
            os.utime(path, (0, min(max(0, member.mtime), time.time())))
        except BaseException:
            os.unlink(path)
            raise


def place(
    source: str,
    target: str,
    mask: int,
    name: str = "",
    keeps_newer: bool = True,
    accepts: Callable[[str, bool], bool] = lambda name, exists: True,
) -> list[str]:
    """Move files and directories from a directory of a node's files to their place. Returns the names left out.

    No link below `target` is followed. Raises OSError, also for a directory that another user has made where all users
    can create files. Left out are special files, links that lead outside of it, and names of OF_GIT.
    mask: permissions that are kept. name: of the directory, in the result. keeps_newer: a newer file there stays.
    accepts: whether to place a file of this name, which exists there already or not.
    """
    left_out = []
    os.makedirs(target, mask & 0o777, exist_ok=True)
    facts = os.stat(target)
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        goal, below = os.path.join(target, entry.name), name + entry.name
        exists, is_in_place = os.path.lexists(goal), os.path.isdir(goal) and not os.path.islink(goal)
        is_directory = entry.is_dir(follow_symlinks=False) and below.count("/") < MAX_DEPTH
        is_refused = (exists or not is_directory) and not is_in_place and not accepts(below, exists)
        if is_refused or entry.name in OF_GIT:
            left_out.append(below)
        elif is_directory:
            if exists and not is_in_place:
                os.unlink(goal)
            make_directories(goal, mask & 0o777)
            owner = os.lstat(goal).st_uid
            if facts.st_mode & stat.S_IWOTH and owner not in (0, os.geteuid(), facts.st_uid):
                reason = f"belongs to {user_name(owner)}, who made it where all users can create files"
                raise PermissionError(errno.EPERM, reason, goal)
            left_out += place(entry.path, goal, mask, f"{below}/", keeps_newer, accepts)
        elif is_in_place or not _place_file(entry, goal, below, mask, keeps_newer and exists):
            left_out.append(below)
    return left_out


def _place_file(entry: os.DirEntry[str], goal: str, name: str, mask: int, keeps_newer: bool) -> bool:
    """Move a file to its place, unless the file there is newer. Returns False if it has a kind that is not allowed."""
    facts = entry.stat(follow_symlinks=False)
    if stat.S_ISREG(facts.st_mode):
        if keeps_newer and os.lstat(goal).st_mtime > facts.st_mtime:
            return True
        if facts.st_mode & 0o7777 & ~mask:
            os.chmod(entry.path, facts.st_mode & mask)
    elif not (stat.S_ISLNK(facts.st_mode) and _leads_inside(os.readlink(entry.path), name)):
        return False
    _move(entry.path, goal)
    return True


def _move(path: str, goal: str) -> None:
    try:
        os.rename(path, goal)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        import shutil

        temporary = f"{goal}.{os.urandom(4).hex()}"
        shutil.copy2(path, temporary, follow_symlinks=False)
        os.rename(temporary, goal)


def _leads_inside(link: str, name: str) -> bool:
    """Whether the link `name` leads to a place below the directory to which the name is relative.

    Only names may follow the first ones that are "..": behind another link, ".." would lead elsewhere.
    """
    parts = [part for part in link.split("/") if part not in ("", ".")]
    up = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    return not link.startswith("/") and ".." not in parts[up:] and up <= name.count("/")
