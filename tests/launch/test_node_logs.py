"""A node with its own run directory sends the files of an attempt to the launcher; other nodes do not."""

from __future__ import annotations

import os
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from distributed import attempts
from distributed.launch.node_logs import PACK, PRINT_LOG


def on_node(program: str, directory: Path, *arguments: str) -> bytes:
    return subprocess.run(["sh", "-c", program, "sh", str(directory), *arguments], check=True, stdout=-1).stdout


def names_in(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=BytesIO(archive)) as opened:
        return sorted(opened.getnames())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The run directory of a node, after two attempts."""
    for number in ("1", "2"):
        attempt = Path(attempts.make(tmp_path, number))
        (attempt / "ranks/b").mkdir()
        (attempt / "ranks/b/collectives_1").write_text("")
        os.mkfifo(attempt / "ranks/b/collectives_1.pipe")  # as PyTorch makes it under NCCL
        (attempt / "node_b.log").write_text("one\ntwo\n")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "node_b.pid").write_text("{}")
    return tmp_path


def test_a_node_with_its_own_run_directory_sends_all_but_links_checkpoints_and_earlier_attempts(
    directory: Path,
) -> None:
    assert on_node(PRINT_LOG, directory, "attempts/2/node_b.log", "5") == b"two\n"
    files = ["", "/errors", "/node_b.log", "/ranks", "/ranks/b", "/ranks/b/collectives_1"]
    packed = [".", "./node_b.pid", *(f"attempts/2{name}" for name in files)]
    assert names_in(on_node(PACK, directory, "attempts/2")) == packed


def test_a_node_that_shares_the_run_directory_sends_nothing(directory: Path) -> None:
    (directory / "run.json").write_text("{}")
    assert on_node(PRINT_LOG, directory, "attempts/2/node_b.log", "1") == b""
    assert names_in(on_node(PACK, directory, "attempts/2")) == []
