"""The tmux session of a server: its panes are in slot order, and remove() ends no session of another job list."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from distributed.jobs.host import panes


def list_directory(path: Path) -> str:
    directory = path / "servers" / "gpu1"
    directory.mkdir(parents=True)
    return str(directory)


@pytest.mark.parametrize("slots", [2, 3, 8, 16])
def test_panes_are_in_slot_order_row_by_row(slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    name, note = panes.ensure(list_directory(tmp_path), [f"gpu1:{slot}" for slot in range(slots)])
    try:
        assert (name, note) == ("ml_training", "")
        lines = panes.tmux("list-panes", "-t", f"={name}:", "-F", "#{pane_top} #{pane_left} #{pane_start_command}")
        found = [line.replace('"', "").split() for line in lines.splitlines()]
    finally:
        panes.tmux("kill-server")
    by_position = sorted(found, key=lambda pane: (int(pane[0]), int(pane[1])))
    assert [int(pane[-1]) for pane in by_position] == list(range(slots))
    assert found == by_position, "the order of Ctrl-b o"


@pytest.fixture
def tmux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tmux server of the test."""
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    panes.tmux("new-session", "-d", "-s", "other")
    yield
    panes.tmux("kill-server")


def sessions() -> set[str]:
    return set(panes.tmux("list-sessions", "-F", "#{session_name}").split()) - {"other"}


@pytest.mark.usefixtures("tmux")
def test_the_next_list_ends_the_sessions_of_all_ended_lists_and_keeps_its_own(tmp_path: Path) -> None:
    first, second, third = (list_directory(tmp_path / name) for name in ("first", "second", "third"))
    with open(f"{first}/serve", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert panes.ensure(first, ["gpu1:0"])[0] == "ml_training"
        assert panes.ensure(second, ["gpu1:0"])[0] == "ml_training_2"
    assert panes.ensure(second, ["gpu1:0"]) == ("ml_training_2", ""), "a list that is resumed has one session"
    assert sessions() == {"ml_training_2"}
    assert panes.ensure(third, ["gpu1:0"])[0] == "ml_training"
    assert sessions() == {"ml_training"}


@pytest.mark.usefixtures("tmux")
def test_views_end_with_their_session_and_with_the_directory_of_their_list(tmp_path: Path) -> None:
    directory = list_directory(tmp_path / "list")
    for end in (panes.remove, shutil.rmtree):
        panes.ensure(directory, ["gpu1:0", "gpu1:1"])
        views = [int(pid) for pid in panes.tmux("list-panes", "-s", "-t", "=ml_training", "-F", "#{pane_pid}").split()]
        assert all(map(is_running, views))
        end(directory)
        deadline = time.monotonic() + 60
        while any(map(is_running, views)) or sessions():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether a process runs. tmux may wait for an ended one much later."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_remove_ends_only_the_session_of_the_given_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    first, second = (list_directory(tmp_path / name) for name in ("first", "second"))
    try:
        panes.tmux("new-session", "-d", "-s", "ml_training")
        assert panes.ensure(first, ["gpu1:0"])[0] == "ml_training_2"
        assert panes.remove(second) == ""
        assert panes.ensure(second, ["gpu1:0"])[0] == "ml_training_2", "replaces the session of an ended list"
        assert panes.remove(first) == ""
        assert panes.remove(second) == "ml_training_2"
        assert panes.tmux("list-sessions", "-F", "#{session_name}") == "ml_training\n"
    finally:
        panes.tmux("kill-server")
