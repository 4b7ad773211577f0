"""The file with the environment that the launcher writes on a node before it starts pdsh."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from struct import pack

import pytest

from distributed.launch.transport import STORE

# user::rwx, group::r-x, group:12345:rwx, mask::rwx, other::r-x
LIST = pack("<I", 2) + b"".join(
    pack("<HHi", *entry) for entry in ((1, 7, -1), (4, 5, -1), (8, 7, 12345), (16, 7, -1), (32, 5, -1))
)


def store(run: Path, sent: str) -> int:
    call = ["sh", "-c", STORE, "sh", str(run), "node_a.environment"]
    return subprocess.run(call, input=sent.encode(), check=False).returncode


def test_only_the_owner_can_read_the_environment_and_enter_the_run_directory(tmp_path: Path) -> None:
    """Also with a default access control list, which replaces the umask."""
    try:
        os.setxattr(tmp_path, "system.posix_acl_default", LIST)
    except OSError as error:
        pytest.skip(f"no access control lists here: {error.strerror}")
    (tmp_path / "control").touch()
    assert stat.S_IMODE((tmp_path / "control").stat().st_mode) == 0o664
    run = tmp_path / "logs" / "train"
    assert store(run, "SECRET=1") == 0
    assert (run / "node_a.environment").read_text() == "SECRET=1"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (run.parent, run, run / "node_a.environment")]
    assert modes == [0o700, 0o700, 0o600]
    run.chmod(0o755)  # to share it
    os.setxattr(run, "system.posix_acl_default", LIST)
    assert store(run, "SECRET=2") == 0
    assert (run / "node_a.environment").read_text() == "SECRET=2"
    assert stat.S_IMODE((run / "node_a.environment").stat().st_mode) == 0o600


def test_the_environment_is_not_written_through_links(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "node_a.environment").symlink_to("../precious")
    assert store(tmp_path / "run", "SECRET=1") == 0
    assert (tmp_path / "precious").read_text() == "kept"
    (tmp_path / "link").symlink_to("run")
    assert store(tmp_path / "link", "SECRET=2") != 0
    assert (tmp_path / "run" / "node_a.environment").read_text() == "SECRET=1"


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_the_environment_is_not_written_where_others_can_exchange_the_file(tmp_path: Path, mode: int) -> None:
    """Another user could have moved such a directory of this user there."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)
    assert store(tmp_path / "run", "SECRET=1") != 0
    assert not [*(tmp_path / "run").iterdir()]
