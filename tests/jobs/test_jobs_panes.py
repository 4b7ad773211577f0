"""The tmux session of a server: its panes are in slot order, and remove() ends no session of another job list."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.jobs import panes


@pytest.mark.parametrize("slots", [2, 3, 8, 16])
def test_panes_are_in_slot_order_row_by_row(slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    name, note = panes.ensure(str(tmp_path / "gpu1"), [f"gpu1:{slot}" for slot in range(slots)])
    try:
        assert (name, note) == ("ml_training", "")
        lines = panes.tmux("list-panes", "-t", f"={name}:", "-F", "#{pane_top} #{pane_left} #{pane_start_command}")
        found = [line.replace('"', "").split() for line in lines.splitlines()]
    finally:
        panes.tmux("kill-server")
    by_position = sorted(found, key=lambda pane: (int(pane[0]), int(pane[1])))
    assert [int(pane[-1]) for pane in by_position] == list(range(slots))
    assert found == by_position, "the order of Ctrl-b o"


def test_remove_ends_only_the_session_of_the_given_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    first, second = (str(tmp_path / name / "servers" / "gpu1") for name in ("first", "second"))
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
