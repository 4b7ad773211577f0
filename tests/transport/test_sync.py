"""--sync: the directories that are copied. sync.bats copies them to nodes."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed.files import KIT
from distributed.host.replies import MARKER
from distributed.transport.commands import SshCommands
from distributed.transport.owners import owners_above
from distributed.transport.sync import MAKE_DIRECTORIES, REPLY_TIME


@pytest.mark.parametrize("cwd", [KIT, f"{KIT}/config", str(Path(KIT).parent), "/tmp"])
def test_the_working_directory_and_muster_are_copied_also_if_one_contains_the_other(cwd: str) -> None:
    assert SshCommands(print, cwd).synced == ([cwd, KIT] if cwd != KIT else [KIT])


def test_another_user_of_a_node_cannot_make_a_directory_look_shared(tmp_path: Path) -> None:
    """The name of the launcher's file is visible in the arguments on the node, its content is not."""
    marker = tmp_path / ".muster-1"

    def check() -> tuple[int, str]:
        digest = hashlib.sha256(b"content").hexdigest()
        arguments = [str(tmp_path), marker.name, digest, owners_above(str(tmp_path))]
        command = ["bash", "-pc", REPLY_TIME, "bash", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, re.sub(rf"{MARKER}[1-9]\d+\n", "", done.stdout) + done.stderr

    assert check() == (0, "")
    marker.write_bytes(b"content")
    assert check() == (0, f"{MARKER}0\n")
    marker.write_bytes(b"other content")
    assert check() == (0, "")
    marker.unlink()
    os.mkfifo(marker)
    assert check() == (0, "")
    if os.geteuid() == 0:
        os.chown(tmp_path, 65534, 65534)
        assert check() == (69, f"{tmp_path}: belongs to another user\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_in_a_container_without_root_the_directories_of_root_may_be_above_the_target() -> None:
    """User ids that the container does not map are 65534 there."""
    with tempfile.TemporaryDirectory() as directory:
        os.chown(directory, 1234, 1234)
        command = [
            "unshare",
            "--user",
            "--map-user=1000",
            "bash",
            "-pc",
            REPLY_TIME,
            "bash",
            directory,
            "none",
            "",
            "0",
        ]
        done = subprocess.run(
            command, user=1234, group=1234, extra_groups=[], capture_output=True, text=True, check=False, timeout=60
        )
    if done.stderr.startswith("unshare"):
        pytest.skip(f"no user namespaces here: {done.stderr}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links of other users")
@pytest.mark.parametrize("position", ["above", "target"])
def test_a_link_of_another_user_is_not_followed_to_the_target(tmp_path: Path, position: str) -> None:
    """He could lead it elsewhere after the check."""
    (tmp_path / "own/below").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "own")
    target = link if position == "target" else link / "below"
    command = ["bash", "-pc", REPLY_TIME, "bash", str(target), "none", "", "0"]
    assert subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0
    os.lchown(link, 65534, 65534)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, f"{link}: other users own it" in done.stderr) == (69, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make directories of other users")
@pytest.mark.parametrize(
    ("uid", "mode", "owners", "refused"),
    [
        (0, 0o755, "0", False),
        (0, 0o1777, "0", False),
        (0, 0o775, "0", False),  # a project's directory
        (0, 0o777, "0", True),
        (65534, 0o755, "0", True),
        (65534, 0o755, "1000 0 65534", True),  # there, this user has another id, and 65534 may be another person
        (65534, 0o755, "0 65534", False),  # it belongs to the same user on the launching machine
    ],
)
def test_a_directory_that_another_user_could_replace_is_no_target(
    tmp_path: Path, uid: int, mode: int, owners: str, refused: bool
) -> None:
    (above := tmp_path / "a b").mkdir()
    os.chown(above, uid, uid)
    above.chmod(mode)
    for target in (above / "new", above / "new" / "newer"):
        command = ["bash", "-pc", REPLY_TIME, "bash", str(target), "none", "", owners]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        problem = f"{above}: other users own it or can write to it, and could replace {target}\n"
        assert (done.returncode, done.stderr) == ((69, problem) if refused else (0, ""))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("kind", ["link", "directory", "link behind an own link"])
def test_no_files_go_into_what_another_user_has_made_in_the_working_directory(kind: str, scratch: Path) -> None:
    """In a directory in which all users can create files, he could lead them to files of this user."""
    (scratch / "home").mkdir(mode=0o700)
    (scratch / "wd").mkdir()
    open_directory = scratch / "wd/data"
    if kind == "link behind an own link":
        open_directory.symlink_to(scratch / "disk")
        open_directory = scratch / "disk"
    open_directory.mkdir()
    open_directory.chmod(0o1777)
    as_user(["mkdir", "own"] if kind == "directory" else ["ln", "-s", scratch / "home", "own"], open_directory, 12345)
    code, text = make_below(scratch / "wd", ["data", "data/new", "data/own", "data/own/new", "other", "other/new"])
    assert (code, f"/own: belongs to user id 12345, who made it in {open_directory}, " in text) == (69, True), text
    assert not [*(scratch / "home").iterdir()] and not (scratch / "wd/other").exists()
    (open_directory / "own").rename(scratch / "other user's")
    assert make_below(scratch / "wd", ["data", "data/new", "data/own", "data/own/new", "other/new"]) == (0, "")
    assert (open_directory / "own/new").is_dir() and (scratch / "wd/other/new").is_dir()
    open_directory.chmod(0o777)
    assert make_below(scratch / "wd", ["data", "data/new", "data/own"]) == (0, "")
    too_long = f"data/{'x' * 256}"  # cannot be made, as if another user had prevented that
    assert make_below(scratch / "wd", ["data", too_long])[0] == 69
    assert make_below(scratch / "wd", ["other", too_long.replace("data", "other")])[0] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_nothing_is_made_through_a_link_of_another_user_above_the_target(scratch: Path) -> None:
    (scratch / "home").mkdir(mode=0o700)
    (scratch / "open").mkdir()
    (scratch / "open").chmod(0o1777)
    as_user(["ln", "-s", scratch / "home", "link"], scratch / "open", 12345)
    command = ["bash", "-pc", REPLY_TIME, "bash", str(scratch / "open/link/new/work"), "none", "", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, f"{scratch}/open/link: other users own it" in done.stderr) == (69, True), done
    assert not [*(scratch / "home").iterdir()]


def as_user(command: list[str | Path], directory: Path, user: int) -> None:
    subprocess.run(
        ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command], cwd=directory, check=True
    )


def make_below(directory: Path, below: list[str]) -> tuple[int, str]:
    sent = b".\0" + b"".join(b"./%s\0" % os.fsencode(name) for name in below)
    command = ["bash", "-pc", MAKE_DIRECTORIES, "bash", str(directory), "0"]
    done = subprocess.run(command, input=sent, capture_output=True, check=False, timeout=60)
    return done.returncode, (done.stdout + done.stderr).decode()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory in which other users can reach files."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)
