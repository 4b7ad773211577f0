"""What a person sees is aligned whatever the letters are, fits the terminal, and has colours only on one."""

from __future__ import annotations

import sys

import pytest

from distributed import terminal
from distributed.terminal import GREEN, RED, columns, cut, paint, plain, show, table


def test_columns_stand_one_below_the_other() -> None:
    assert table([("id", "名前", "x"), ("1", "a", ""), ("22", "長い名前", "y")], right=[0]) == [
        "id  名前      x",
        " 1  a",
        "22  長い名前  y",
    ]
    assert table([]) == []


def test_colours_do_not_move_a_column() -> None:
    rows = [("a", "b"), (paint("long", RED), "c")]
    assert [plain(line) for line in table(rows)] == ["a     b", "long  c"]


@pytest.mark.parametrize("letters", ["ab", "火", "e\u0301"])
def test_the_last_cell_takes_what_is_left(letters: str) -> None:
    head, line = table([("node", "last line"), ("node1", letters * 200)], most=40)
    assert columns(line) in (39, 40) and line.endswith("…") and head.index("last") == line.index(letters)


def test_what_fits_is_not_cut() -> None:
    assert [cut("火火", width) for width in (4, 3, 1)] == ["火火", "火…", "…"]


class Screen:
    """A terminal that keeps what was printed."""

    def __init__(self, terminal: bool) -> None:
        self.text, self.isatty = "", lambda: terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ("terminal", "environment", "coloured"),
    [
        (True, {"TERM": "xterm"}, True),
        (False, {"TERM": "xterm"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_colours_are_printed_only_where_they_are_wanted(
    terminal: bool, environment: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    screen = Screen(terminal)
    monkeypatch.setattr(sys, "stdout", screen)
    show(paint("ok", GREEN))
    assert screen.text == ("\x1b[32mok\x1b[0m" if coloured else "ok")


def test_a_pipe_has_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Screen(False))
    assert terminal.width() is None
