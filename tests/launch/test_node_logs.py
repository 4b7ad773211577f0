"""A node with its own run directory sends its files to the launcher and archives them; other nodes do neither."""

from __future__ import annotations

import os
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from distributed.launch.node_logs import ARCHIVE, PACK, PRINT_LOG


def on_node(program: str, directory: Path, *arguments: str) -> bytes:
    return subprocess.run(["sh", "-c", program, "sh", str(directory), *arguments], check=True, stdout=-1).stdout


def names_in(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=BytesIO(archive)) as opened:
        return sorted(opened.getnames())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The run directory of a node, after an attempt."""
    for name in ("errors", "ranks", "checkpoints"):
        (tmp_path / name).mkdir()
    (tmp_path / "ranks/b").mkdir()
    (tmp_path / "ranks/b/collectives_1").write_text("")
    os.mkfifo(tmp_path / "ranks/b/collectives_1.pipe")  # as PyTorch makes it under NCCL
    (tmp_path / "node_b.log").write_text("one\ntwo\n")
    (tmp_path / "node_b.pid").write_text("{}")
    return tmp_path


def test_a_node_with_its_own_run_directory_sends_all_but_checkpoints_and_archives_its_files(directory: Path) -> None:
    assert on_node(PRINT_LOG, directory, "node_b.log", "5") == b"two\n"
    files = ["./errors", "./node_b.log", "./node_b.pid", "./ranks", "./ranks/b", "./ranks/b/collectives_1"]
    assert names_in(on_node(PACK, directory)) == [".", *files]
    on_node(ARCHIVE, directory, "attempt_1", "node_b.pid")
    assert sorted(path.name for path in directory.iterdir()) == ["attempt_1", "checkpoints", "node_b.pid"]
    assert len([*(directory / "attempt_1").iterdir()]) == 4


def test_a_node_that_shares_the_run_directory_sends_and_archives_nothing(directory: Path) -> None:
    (directory / "run.json").write_text("{}")
    before = sorted(directory.iterdir())
    assert on_node(PRINT_LOG, directory, "node_b.log", "1") == b""
    assert names_in(on_node(PACK, directory)) == []
    on_node(ARCHIVE, directory, "attempt_1", "node_b.pid")
    assert sorted(directory.iterdir()) == before
