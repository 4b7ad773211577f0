"""What others can write is data: owners, modes, links, FIFOs, JSON, control characters, and archives of nodes."""

from __future__ import annotations

import errno
import grp
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from struct import pack
from typing import Any

import pytest

from distributed import trust
from distributed.trust import checked, foreign, foreign_ancestor, parse_json, place, printable, regular_file, unpack

NOBODY = 65534

# ---------------------------------------------------------------- owners and modes


@pytest.mark.parametrize(("mode", "refused"), [(0o700, False), (0o755, False), (0o757, True), (0o702, True)])
def test_a_directory_that_all_users_can_write_to_is_foreign(tmp_path: Path, mode: int, refused: bool) -> None:
    tmp_path.chmod(mode)
    assert bool(foreign(tmp_path, tmp_path.stat())) == refused


def test_a_group_counts_as_others_unless_it_is_the_private_group_of_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o775)
    facts = tmp_path.stat()

    class User:
        pw_name, pw_gid = "ada", facts.st_gid

    class Group:
        gr_name, gr_mem = "ada", ["ada"]

    monkeypatch.setattr("pwd.getpwuid", lambda uid: User)
    monkeypatch.setattr("grp.getgrgid", lambda gid: Group)
    assert foreign(tmp_path, facts) == ""
    for name, members in (("users", []), ("ada", ["ada", "bob"])):
        Group.gr_name, Group.gr_mem = name, members
        assert "other users can write to it (mode 775)" in foreign(tmp_path, facts)


def test_a_group_that_is_the_primary_group_of_another_account_is_not_private(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can mount another /etc/passwd")
    passwd, group, directory = tmp_path / "passwd", tmp_path / "group", tmp_path / "directory"
    group.write_text("root:x:0:\nada:x:23456:\n")
    directory.mkdir()
    directory.chmod(0o775)
    mounts = 'mount --bind "$1" /etc/passwd && mount --bind "$2" /etc/group && exec "${@:3}"'
    program = (
        f"import os; from distributed.trust import *; print(writable_by_others(d := {str(directory)!r}, os.stat(d)))"
    )
    cases = (
        (23456, "", False),
        (23456, "bob:x:34567:23456::/:", True),
        (23456, "bob:x:34567:23456::/:/sbin/nologin", True),
        (0, "", False),
        (0, "sync:x:5:0::/sbin:/bin/sync", False),  # as on some systems
        (0, "operator:x:11:0::/root:/sbin/nologin", False),
        (0, "bob:x:34567:0::/:/bin/bash", True),
        (0, "bob:x:34567:0::/:", True),
    )
    for owner, accounts, expected in cases:
        os.chown(directory, owner, owner)
        passwd.write_text(f"root:x:0:0::/:\nada:x:23456:23456::/:\n{accounts}")
        call = [
            "unshare",
            "--mount",
            "bash",
            "-c",
            mounts,
            "bash",
            str(passwd),
            str(group),
            sys.executable,
            "-c",
            program,
        ]
        done = subprocess.run(call, capture_output=True, text=True, cwd=trust.__file__.rpartition("/distributed/")[0])
        assert done.stdout == f"{expected}\n", (accounts, done.stderr)


def test_the_group_of_all_unmapped_users_is_no_private_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose image has a user and a group `nobody`."""
    if os.geteuid():
        pytest.skip("only root can give a file to another user")
    tmp_path.chmod(0o775)
    os.chown(tmp_path, NOBODY, NOBODY)
    monkeypatch.setattr("grp.getgrgid", lambda gid: grp.struct_group(("nobody", "x", gid, [])))
    assert trust.writable_by_others(tmp_path, tmp_path.stat())


def test_a_private_group_counts_as_others_if_an_access_control_list_names_more(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("only root has a private group on each machine")
    tmp_path.chmod(0o775)
    assert foreign(tmp_path, tmp_path.stat()) == ""
    # user::rwx, group::r-x, group:12345:rwx, mask::rwx, other::r-x
    entries = ((1, 7, -1), (4, 5, -1), (8, 7, 12345), (16, 7, -1), (32, 5, -1))
    content = pack("<I", 2) + b"".join(pack("<HHi", *one) for one in entries)
    try:
        os.setxattr(tmp_path, "system.posix_acl_access", content)
    except OSError as error:
        pytest.skip(f"no access control lists here: {error.strerror}")
    command = ["setpriv", "--reuid", "23456", "--regid", "12345", "--clear-groups", "touch", "theirs"]
    assert subprocess.run(command, cwd=tmp_path).returncode == 0
    assert "other users can write to it (mode 775)" in foreign(tmp_path, tmp_path.stat())
    tmp_path.chmod(0o755)  # the remedy of the message: it restricts the list
    (tmp_path / "theirs").unlink()
    assert subprocess.run(command, cwd=tmp_path).returncode == 1
    assert foreign(tmp_path, tmp_path.stat()) == ""


def test_the_owner_comes_from_the_file_system_and_the_message_names_it(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file to another user")
    os.chown(tmp_path, NOBODY, -1)
    message = foreign(tmp_path, tmp_path.stat())
    assert message.startswith(f"{tmp_path}: belongs to nobody, and you are root; ")
    assert message.endswith("runuser -u nobody -- PROGRAM ...")
    assert foreign(tmp_path, tmp_path.stat(), owners=(NOBODY,)) == ""


def test_a_directory_is_foreign_if_another_user_owns_one_above_it_unless_that_is_sticky(tmp_path: Path) -> None:
    (below := tmp_path / "a" / "b").mkdir(parents=True)
    assert foreign_ancestor(str(below)) == ""  # also /tmp, which is sticky
    (tmp_path / "a").chmod(0o777)
    assert foreign_ancestor(str(below)) == f"{tmp_path}/a: other users can write to it (mode 777)"
    (tmp_path / "a").chmod(0o1777)
    assert foreign_ancestor(str(below)) == ""
    (tmp_path / "link").symlink_to(below)
    assert foreign_ancestor(str(tmp_path / "link")) == ""
    if os.geteuid() == 0:
        os.chown(tmp_path / "a", NOBODY, -1)
        assert foreign_ancestor(str(tmp_path / "link")).startswith(f"{tmp_path}/a: belongs to nobody")


# ---------------------------------------------------------------- files


def test_only_a_regular_file_is_opened_without_waiting_and_without_following_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("new")
    os.mkfifo(tmp_path / "fifo")
    started = time.monotonic()
    for name in ("link", "dangling", "fifo", ".", "missing"):
        for flags in (os.O_RDONLY, os.O_WRONLY | os.O_APPEND):
            with pytest.raises(OSError, match=r"symbolic link|not a regular file|No such file|Is a directory"):
                os.close(regular_file(tmp_path / name, flags))
    with pytest.raises(OSError, match="symbolic link"):
        regular_file(tmp_path / "dangling", os.O_WRONLY | os.O_CREAT)
    assert time.monotonic() - started < 5
    assert not (tmp_path / "new").exists()
    assert trust.read_text(tmp_path / "file") == "content"


def test_a_new_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        os.close(regular_file(tmp_path / "file", os.O_WRONLY | os.O_CREAT))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_the_lock_of_another_user_is_opened_where_others_files_must_not_be_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory with a sticky bit, Linux refuses O_CREAT for a file of another user (fs.protected_regular)."""
    system_open = os.open

    def protected(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT and not flags & os.O_EXCL:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return system_open(path, flags, *mode)

    (lock := tmp_path / ".lock").touch(0o600)
    monkeypatch.setattr(os, "open", protected)
    os.close(trust.lock_file(lock, os.O_RDWR | os.O_CREAT, tmp_path))


def test_a_file_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "MAX_TEXT", 10)
    (tmp_path / "file").write_bytes(bytes(11))
    with pytest.raises(OSError, match="has more than"):
        trust.read_bytes(tmp_path / "file")


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("text", ["[" * 200_000, "[" * 100 + "]" * 100, '{"a":' * 50 + "1" + "}" * 50, "{", "9" * 5000])
def test_json_that_is_too_deep_or_invalid_raises_value_error_alone(text: str) -> None:
    for one in (text, text.encode(), b"\xff" + text.encode()):
        with pytest.raises(ValueError, match=r"nested|Expecting|Exceeds|codec"):
            parse_json(one)


def test_json_with_many_brackets_on_few_levels_is_read() -> None:
    value = [[n, {"a": [n]}] for n in range(1000)]
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize("part", ["1", "[]", '{"a": {}}', '"text"'])
def test_json_with_too_many_values_is_refused_before_they_exist(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr(trust, "MAX_VALUES", 100)
    text = f"[{', '.join([part] * 101)}]"
    for one in (text, text.encode(), bytearray(text.encode())):
        with pytest.raises(ValueError, match="more than 100 values"):
            parse_json(one)
    assert len(parse_json(f"[{', '.join([part] * 30)}]")) == 30


@dataclass(frozen=True)
class Part:
    name: str
    size: int = 0


@dataclass(frozen=True)
class Whole(Part):
    parts: tuple[Part, ...] = ()
    ratio: float | None = None


KINDS: list[tuple[Any, list[Any], list[Any]]] = [  # kind, values that it accepts, values that it refuses
    (int, [0, -5], [True, 1.0, "1", None, 1 << 63, [1]]),
    (float, [0.5, 3], [True, "1", float("nan"), float("inf"), 1e300]),
    (str, ["", "a"], [1, None, ["a"], {}]),
    (bool, [True], [1, 0, "true"]),
    (range(256), [0, 255], [256, -1, True, 1.0, "1"]),
    (int | None, [1, None], ["1", 1.5]),
    (object, [1, None, [{}]], []),
    (list[int], [[], [1, 2]], [{}, "12", [1, "2"], 5]),
    ([{"a": int}], [[], [{"a": 1}]], [{"a": 1}, [{"a": "1"}], [1]]),
    (dict[str, int], [{}, {"a": 1}], [[], {"a": "1"}, 5]),
    (
        {"a": int, "b?": str},
        [{"a": 1}, {"a": 1, "b": "x"}],
        [{}, {"b": "x"}, {"a": 1, "c": 2}, {"a": 1, "b": 2}, [1], 5],
    ),
]


@pytest.mark.parametrize(("kind", "accepted", "refused"), KINDS)
def test_a_value_has_the_declared_kind(kind: Any, accepted: list[Any], refused: list[Any]) -> None:
    for value in accepted:
        assert checked(kind, value) == value
    for value in refused:
        with pytest.raises(ValueError, match=r"expected|unknown key|no '"):
            checked(kind, value, "reply")


def test_a_dataclass_is_made_from_an_object_with_its_fields_and_those_of_its_bases() -> None:
    value = {"name": "a", "parts": [{"name": "b", "size": 2}], "ratio": 1}
    assert checked(Whole, value) == Whole("a", 0, (Part("b", 2),), 1.0)
    wrong: Any
    for wrong in ({"parts": []}, value | {"other": 1}, value | {"parts": {}}, value | {"size": "2"}, [], None):
        with pytest.raises(ValueError, match=r"expected|unknown key|no '"):
            checked(Whole, wrong)


def test_a_message_about_a_value_is_short_and_has_no_control_characters() -> None:
    with pytest.raises(ValueError, match=r"^size: expected int, got") as error:
        checked(Part, {"name": "a", "size": "\x1b[31m" * 10_000})
    assert len(str(error.value)) < 100 and str(error.value).isprintable()


# ---------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("a\x1b[31mred\x1b[0m", "ared"),
        ("title\x1b]0;owned\x07!", "title!"),
        ("line\x1b]8;;http://x\x1b\\link", "linelink"),
        ("back\x08\rstart", "back  start"),
        ("\x9b31m", " 31m"),
        ("right\u202eto left", "right to left"),
        ("half \ud800", "half  "),
        ("\x1b", " "),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
    ],
)
def test_printable_text_has_no_control_sequences(text: str, shown: str) -> None:
    assert printable(text, trust.LAYOUT) == shown
    assert printable(text).isprintable()


# ---------------------------------------------------------------- archives


def member(name: str, content: bytes = b"", **facts: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o6777
    for key, value in facts.items():
        setattr(info, key, value)
    return info, content


def archive_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


Unpack = Callable[..., list[str]]


@pytest.fixture
def unpacked(tmp_path: Path) -> Unpack:
    """A function that unpacks an archive into tmp_path/new, and returns the names of what was left out."""
    (tmp_path / "new").mkdir()

    def call(data: bytes, expects: Callable[[str], bool] = lambda name: True, end: bool = True) -> list[str]:
        source, target = os.pipe()
        opened = [target]

        def send() -> None:
            with os.fdopen(opened.pop(), "wb") as pipe:
                try:
                    pipe.write(data)
                except BrokenPipeError:
                    opened.append(os.open(os.devnull, os.O_RDONLY))

        sender = threading.Thread(target=send)
        sender.start()
        try:
            return unpack(source, str(tmp_path / "new"), expects)
        finally:
            os.close(source)
            sender.join()

    return call


def tree(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_regular_files_and_directories_are_unpacked_with_private_modes(tmp_path: Path, unpacked: Unpack) -> None:
    (outside := tmp_path / "outside").mkdir()
    left_out = unpacked(
        archive_of(
            member(".", type=tarfile.DIRTYPE),
            member("a/b/file", b"content", mtime=5),
            member("later", mtime=2**40),
            member("empty", type=tarfile.DIRTYPE),
            member("../up", b"x"),
            member("a/../../up", b"x"),
            member(str(outside / "absolute"), b"x"),
            member("link", type=tarfile.SYMTYPE, linkname=str(outside)),
            member("link/through", b"x"),
            member("hard", type=tarfile.LNKTYPE, linkname="a/b/file"),
            member("device", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
            member("fifo", type=tarfile.FIFOTYPE),
            member("unwanted", b"x"),
            member("/".join("d" * 100), type=tarfile.DIRTYPE),
        ),
        lambda name: name != "unwanted",
    )
    found = [*tree(tmp_path / "new")]
    assert found == ["a", "a/b", "a/b/file", "empty", "later", "link", "link/through"]
    assert len(left_out) == 9 and not tree(outside)
    [long] = unpacked(archive_of(member("n" * 5000, type=tarfile.FIFOTYPE)))
    assert long == "n" * trust.LONGEST_LINE
    for name in found:
        mode = (tmp_path / "new" / name).lstat().st_mode
        assert stat.S_ISDIR(mode) or stat.S_IMODE(mode) == 0o600
    assert (tmp_path / "new/a/b/file").stat().st_mtime == 5
    assert (tmp_path / "new/later").stat().st_mtime <= time.time()


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [("MAX_FILES", 1, "more than the limits"), ("MAX_BYTES", 10, "more than the limits"), ("MAX_NAME", 50, "too long")],
)
def test_an_archive_beyond_a_limit_is_refused_and_complete_files_stay(
    tmp_path: Path, unpacked: Unpack, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, message: str
) -> None:
    monkeypatch.setattr(trust, limit, value)
    with pytest.raises(trust.Refused, match=message):
        unpacked(archive_of(member("first", b"12345"), member("n" * 150, bytes(20))))
    assert tree(tmp_path / "new") == ["first"]


def test_a_file_larger_than_the_free_space_is_refused_before_it_is_written(tmp_path: Path, unpacked: Unpack) -> None:
    info, _ = member("huge")
    info.size = 1 << 50
    with pytest.raises(trust.Refused, match="more than the limits or the disk allow"):
        unpacked(info.tobuf(tarfile.GNU_FORMAT))
    assert tree(tmp_path / "new") == []


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "header", "nested headers"])
def test_a_damaged_archive_is_refused_without_another_exception(tmp_path: Path, unpacked: Unpack, damage: str) -> None:
    data = archive_of(member("first", b"1"), member("second", bytes(5000)))
    pax = tarfile.TarInfo("x")
    pax.type, pax.size = tarfile.XHDTYPE, 0
    data = {
        "truncated": data[:3000],
        "garbage": os.urandom(4096),
        "empty": b"",
        "header": data[:1024] + os.urandom(4096),
        "nested headers": pax.tobuf(tarfile.USTAR_FORMAT) * 3000 + data,
    }[damage]
    with suppress(trust.Refused):  # tarfile takes some damage for the end of the archive
        unpacked(data)
    assert set(tree(tmp_path / "new")) <= {"first"}


@pytest.mark.parametrize(
    ("type_", "headers"), [(b"S", {}), (b"g", {}), (b"0", {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})]
)
def test_headers_without_a_limit_are_refused(
    tmp_path: Path, unpacked: Unpack, type_: bytes, headers: dict[str, str]
) -> None:
    info, _ = member("first")
    info.type, info.pax_headers = type_, headers
    with pytest.raises(trust.Refused, match=r"too long|sparse"):
        unpacked(info.tobuf(tarfile.PAX_FORMAT if headers else tarfile.USTAR_FORMAT) + bytes(2048))
    assert tree(tmp_path / "new") == []


def test_an_archive_that_stalls_is_refused(tmp_path: Path, unpacked: Unpack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "STALLED", 0.1)
    source, target = os.pipe()
    os.write(target, archive_of(member("first", b"1"))[:600])
    with pytest.raises(trust.Refused, match="no data for"):
        unpack(source, str(tmp_path / "new"), lambda name: True)
    os.close(source)
    os.close(target)


# ---------------------------------------------------------------- placing


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path, Path]:
    """The directory of a node's files, their place, and a directory of somebody else."""
    for name in ("new", "run", "outside"):
        (tmp_path / name).mkdir()
    return tmp_path / "new", tmp_path / "run", tmp_path / "outside"


def test_no_link_below_the_place_is_followed(places: tuple[Path, Path, Path]) -> None:
    new, run, outside = places
    (run / "directory").symlink_to(outside)  # as a rank of an earlier attempt may have left it
    (run / "file").symlink_to(outside / "file")
    (new / "directory").mkdir()
    (new / "directory" / "inside").write_text("1")
    (new / "file").write_text("2")
    assert place(str(new), str(run), 0o755) == []
    assert tree(outside) == []
    assert (run / "directory" / "inside").read_text() == "1" and not (run / "directory").is_symlink()
    assert (run / "file").read_text() == "2" and not (run / "file").is_symlink()


@pytest.mark.parametrize(
    ("name", "link", "kept"),
    [
        ("link", "file", True),
        ("a/link", "../file", True),
        ("a/link", "b/c", True),
        ("link", ".", True),
        ("link", "/etc", False),
        ("link", "..", False),
        ("a/link", "../..", False),
        ("link", "a/../..", False),
        ("a/link", "b/../../file", False),
        ("link", "./../x", False),
    ],
)
def test_a_link_is_kept_if_it_leads_inside(places: tuple[Path, Path, Path], name: str, link: str, kept: bool) -> None:
    new, run, _ = places
    (new / name).parent.mkdir(exist_ok=True)
    (new / name).symlink_to(link)
    assert place(str(new), str(run), 0o755) == ([] if kept else [name])
    assert (run / name).is_symlink() == kept


GIT_FILES = {
    "HEAD": "ref: refs/heads/main\n", "objects/x": "", "refs/x": "",
    "config": "[core]\nbare = false\nworktree = ..\nfsmonitor = touch ../ran; false\n",
}  # fmt: skip
REPOSITORIES = {f"{top}/{name}": text for top in ("bare", "with/.git") for name, text in GIT_FILES.items()}
REPOSITORIES |= {"linked/HEAD": GIT_FILES["HEAD"], "linked/commondir": "../bare", "own/.git": "gitdir: ../bare"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")
def test_no_file_is_placed_in_a_directory_that_another_user_has_made_where_all_users_can(
    places: tuple[Path, Path, Path],
) -> None:
    new, run, _ = places
    run.chmod(0o1777)
    for path in (new / "mine/file", new / "theirs/sub/file"):
        path.parent.mkdir(parents=True)
        path.write_text("new")
    (run / "mine").mkdir()
    subprocess.run(["mkdir", "-m", "777", "theirs"], cwd=run, user=NOBODY, extra_groups=[], check=True)
    with pytest.raises(PermissionError, match=f"belongs to nobody, who made it where .*{run}/theirs"):
        place(str(new), str(run), 0o755)
    assert (run / "mine/file").read_text() == "new"
    assert not list((run / "theirs").iterdir())


def test_no_repository_of_git_arrives(places: tuple[Path, Path, Path]) -> None:
    new, run, _ = places
    for name, text in REPOSITORIES.items():
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        (new / name).write_text(text)
    (new / "link").mkdir()
    (new / "link/.git").symlink_to("../bare")
    left_out = place(str(new), str(run), 0o755)
    for directory in run.iterdir():
        subprocess.run(["git", "status"], cwd=directory, capture_output=True)
    assert not [*run.parent.rglob("ran")], "git has run a program that a node has named"
    assert left_out == ["bare/HEAD", "link/.git", "linked/HEAD", "own/.git", "with/.git"]


def test_no_repository_of_git_is_unpacked(tmp_path: Path, unpacked: Unpack) -> None:
    left_out = unpacked(archive_of(*(member(name, text.encode()) for name, text in REPOSITORIES.items())))
    found = {name for name in REPOSITORIES if (tmp_path / "new" / name).exists()}
    assert found == {name for name in REPOSITORIES if not {".git", "HEAD"} & {*name.split("/")}}
    assert found | {*left_out} == REPOSITORIES.keys()


def test_special_files_are_left_out_and_modes_are_cut(places: tuple[Path, Path, Path]) -> None:
    new, run, _ = places
    os.mkfifo(new / "fifo")
    (new / "setuid").write_text("")
    (new / "setuid").chmod(0o6777)
    assert place(str(new), str(run), 0o755) == ["fifo"]
    assert stat.S_IMODE((run / "setuid").stat().st_mode) == 0o755
    assert tree(run) == ["setuid"]


def test_a_newer_file_stays_and_a_directory_is_not_replaced_by_a_file(places: tuple[Path, Path, Path]) -> None:
    new, run, _ = places
    for directory, text in ((new, "of the node"), (run, "newer")):
        (directory / "file").write_text(text)
    os.utime(new / "file", (0, 1))
    (run / "directory").mkdir()
    (new / "directory").write_text("")
    assert place(str(new), str(run), 0o755) == ["directory"]
    assert (run / "file").read_text() == "newer" and (run / "directory").is_dir()


def test_files_move_to_another_file_system(places: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    new, run, _ = places
    (new / "file").write_text("content")
    (new / "link").symlink_to("file")
    rename = os.rename

    def of_one_file_system(source: str, target: str) -> None:
        if str(source).startswith(str(new)):
            raise OSError(18, "Invalid cross-device link")
        rename(source, target)

    monkeypatch.setattr(os, "rename", of_one_file_system)
    assert place(str(new), str(run), 0o755) == []
    assert (run / "file").read_text() == "content" and os.readlink(run / "link") == "file"


def test_directories_nest_to_a_limit(places: tuple[Path, Path, Path]) -> None:
    new, run, _ = places
    (new / "/".join("d" * 60)).mkdir(parents=True)
    [left_out] = place(str(new), str(run), 0o755)
    assert left_out.count("/") == trust.MAX_DEPTH


def test_texts_of_a_reply_are_one_line_or_have_a_limited_length() -> None:
    @dataclass(frozen=True)
    class Rank:
        state: str
        stack: str

    found = trust.one_line([Rank("a\nb", "line\n" * 100_000)], texts=("stack",))[0]
    assert found.state == "a b" and len(found.stack) == trust.MAX_RECORDED
    assert found.stack.startswith("line\nline") and found.stack.endswith("line\n")
