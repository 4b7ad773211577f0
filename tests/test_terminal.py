"""Tables are aligned with wide and combining characters, fit the terminal, and have colours only on a terminal."""

from __future__ import annotations

import math
import sys

import pytest

from distributed import terminal
from distributed.terminal import GREEN, RED, columns, cut, paint, plain, show, table


def test_columns_are_aligned() -> None:
    assert table([("id", "名前", "x"), ("1", "a", ""), ("22", "長い名前", "y")], right=[0]) == [
        "id  名前      x",
        " 1  a",
        "22  長い名前  y",
    ]
    assert table([]) == []


def test_colours_do_not_change_the_alignment() -> None:
    rows = [("a", "b"), (paint("long", RED), "c")]
    assert [plain(line) for line in table(rows)] == ["a     b", "long  c"]


@pytest.mark.parametrize("letters", ["ab", "火", "e\u0301"])
def test_the_last_cell_is_cut_to_the_remaining_width(letters: str) -> None:
    head, line = table([("node", "last line"), ("node1", letters * 200)], most=40)
    assert columns(line) in (39, 40) and line.endswith("…") and head.index("last") == line.index(letters)


def test_text_is_cut_only_if_it_does_not_fit() -> None:
    assert [cut("火火", width) for width in (4, 3, 1)] == ["火火", "火…", "…"]


class FakeOutput:
    """Records what was printed."""

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
def test_colours_are_printed_only_on_a_terminal_that_supports_them(
    terminal: bool, environment: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    output = FakeOutput(terminal)
    monkeypatch.setattr(sys, "stdout", output)
    show(paint("ok", GREEN))
    assert output.text == ("\x1b[32mok\x1b[0m" if coloured else "ok")


def test_only_the_colours_and_cursor_moves_of_muster_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", output := FakeOutput(True))
    show("\x1b[8mhidden\x1b[2J\n" + paint("ok", GREEN), in_place=True)
    assert output.text == "\x1b[Hhidden\x1b[K\n\x1b[32mok\x1b[0m\x1b[J"


def test_a_pipe_has_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", FakeOutput(False))
    assert terminal.width() is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (2.3134, "2.313"), (12345.6, "12,346"), (3e-4, "0.0003"), (3e-5, "3e-5"), (1e30, "1e30"), (-5.0, "-5"),
     (math.nan, "not finite")],
)  # fmt: skip
def test_numbers_are_rounded(value: float, text: str) -> None:
    assert terminal.number_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.0812, "81.2 ms"), (4.21, "4.21 s"), (59.99, "60 s"), (200, "3 min 20 s"), (18120, "5 h 2 min"),
     (273600, "3 d 4 h")],
)  # fmt: skip
def test_durations_have_a_fitting_unit(seconds: float, text: str) -> None:
    assert terminal.duration(seconds) == text
