"""The tmux session of a server: who goes from pane to pane meets the slots in their order."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.jobs import panes


@pytest.mark.parametrize("slots", [2, 3, 8, 16])
def test_panes_stand_in_the_order_of_their_slots_row_by_row(
    slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    name, note = panes.ensure(str(tmp_path / "gpu1"), [f"gpu1:{slot}" for slot in range(slots)])
    try:
        assert (name, note) == ("ml_training", "")
        lines = panes.tmux("list-panes", "-t", f"={name}:", "-F", "#{pane_top} #{pane_left} #{pane_start_command}")
        found = [line.replace('"', "").split() for line in lines.splitlines()]
    finally:
        panes.tmux("kill-server")
    by_place = sorted(found, key=lambda words: (int(words[0]), int(words[1])))
    assert [int(words[-1]) for words in by_place] == list(range(slots))
    assert found == by_place, "Ctrl-b o goes the same way"
