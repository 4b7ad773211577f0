"""The index of the directories in which a user has started runs and job lists."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from distributed import index

KIT = Path(__file__).resolve().parents[1]


def test_a_directory_is_added_once_and_the_newest_comes_first(tmp_path: Path, state_home: Path) -> None:
    for name in ("one logs", "two", "one logs"):
        (tmp_path / name).mkdir(exist_ok=True)
        index.add(tmp_path / name)
    assert index.directories() == [str(tmp_path / "two"), str(tmp_path / "one logs")]
    assert stat.S_IMODE((state_home / "muster").stat().st_mode) == 0o700
    assert stat.S_IMODE((state_home / "muster/directories").stat().st_mode) == 0o600
    (tmp_path / "two").rmdir()
    assert index.directories() == [str(tmp_path / "one logs")], "another machine may have the other one"


def test_a_path_that_would_be_no_line_is_left_out(tmp_path: Path) -> None:
    for name in ("two\nlines", os.fsdecode(b"\xff")):
        (tmp_path / name).mkdir()
        index.add(tmp_path / name)
    assert index.directories() == []


def test_the_older_half_of_a_full_index_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MOST", 4)
    for number in range(5):
        (tmp_path / str(number)).mkdir()
        index.add(tmp_path / str(number))
    assert [Path(one).name for one in index.directories()] == ["4", "3", "2"]


@pytest.mark.parametrize("base", ["relative", ""])
def test_without_an_absolute_xdg_state_home_the_index_is_in_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", base)
    assert index.path() == f"{tmp_path}/.local/state/muster/directories"


@pytest.mark.parametrize("kind", ["full", "file", "link", "fifo"])
def test_an_index_that_cannot_be_written_is_no_error(tmp_path: Path, state_home: Path, kind: str) -> None:
    (state_home / "muster").mkdir(parents=True)
    if kind == "full":
        (state_home / "muster").rmdir()
        (state_home / "muster").write_text("")
    elif kind == "file":
        (state_home / "muster/directories").mkdir()
    elif kind == "link":
        (state_home / "muster/directories").symlink_to(tmp_path / "other")
    else:
        os.mkfifo(state_home / "muster/directories")
    index.add(tmp_path)
    assert index.directories() == [] and not (tmp_path / "other").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("name", [".", "muster", "muster/directories"])
def test_an_index_that_another_user_could_have_written_is_not_used(tmp_path: Path, state_home: Path, name: str) -> None:
    index.add(tmp_path)
    assert index.directories() == [str(tmp_path)]
    os.chown(state_home / name, 65534, 65534)
    assert index.directories() == []
    before = (state_home / "muster/directories").read_text()
    index.add(KIT)
    assert (state_home / "muster/directories").read_text() == before
