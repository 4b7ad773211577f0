"""The console shows whole lines of rank 0, each on the stream where the rank printed it, and a progress bar live.

An update is a line that the next line of the rank overwrites, as in a progress bar.
"""

from __future__ import annotations

import io
import re
import time
import tracemalloc

import pytest
import rich.console
import rich.progress
from hypothesis import given
from hypothesis import strategies as st

from distributed.launch import output_lines
from distributed.launch.output_lines import (
    ERRORS,
    OUTPUT,
    Console,
    Lines,
    RankLines,
    rank_of,
    with_prefix,
    without_updates,
)

# ---------------------------------------------------------------- lines


def fed(lines: Lines, output: bytes, size: int) -> bytes:
    """The lines of output that arrives in parts of `size` bytes."""
    parts = [lines.feed(output[start : start + size]) for start in range(0, len(output), size)]
    assert all(part.endswith(b"\n") for part in parts if part)
    return b"".join([*parts, lines.feed(b"", last=True)])


PIECES = st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\r\n", b"\0", b"\xff", b"\b", b"\x1b[A", b"\x0b\x0c\x1c\x85"]))


@given(PIECES, st.integers(1, 9))
def test_lines_are_complete_and_lose_nothing_however_the_output_is_split(pieces: list[bytes], size: int) -> None:
    output = b"".join(pieces)
    assert fed(Lines(), output, size) == output + (b"\n" if output and not output.endswith(b"\n") else b"")
    assert fed(RankLines(), output, size) == RankLines().feed(output, last=True)


@given(PIECES, st.integers(1, 9))
def test_lines_that_are_no_updates_do_not_depend_on_pauses_of_the_rank(pieces: list[bytes], size: int) -> None:
    output, lines, shown = b"".join(pieces), RankLines(), b""
    for start in range(0, len(output), size):
        shown += lines.feed(output[start : start + size]) + lines.feed(b"")
    shown += lines.feed(b"", last=True)
    texts = [with_prefix(b"[n1:0] ", text) for text in (shown, RankLines().feed(output, last=True))]
    assert without_updates(texts[0]) == without_updates(texts[1])


ERASE, END = b"\r\x1b[2K", b"\x1b[?25h"
DISPLAYS = [
    b"\x1b[?25l",
    b"\n" + END,
    ERASE,
    ERASE + b"\x1b[1A\x1b[2K",
    b"\n" + END + b"\r\x1b[1A\x1b[2K",
    END + b"a\r",
]


@given(st.lists(st.sampled_from([b"a", b"\n", b"\r", *DISPLAYS])))
def test_no_text_is_lost_however_a_live_display_continues(pieces: list[bytes]) -> None:
    lines = RankLines()
    shown = b"".join([*map(lines.feed, filter(None, pieces)), lines.feed(b"", last=True)])
    assert shown.count(b"a") == b"".join(pieces).count(b"a")
    assert shown.count(b"a") == RankLines().feed(b"".join(pieces), last=True).count(b"a")


def test_carriage_returns_in_a_live_display_take_linear_time() -> None:
    lines = RankLines()
    lines.feed(b"\x1b[?25l")
    began = time.process_time()
    lines.feed(b"\r" * (1 << 16) + b"x")
    assert time.process_time() - began < 2


def test_a_carriage_return_after_a_live_display_ends_an_update() -> None:
    lines = RankLines()
    assert lines.feed(b"\x1b[?25l" + ERASE + b"100%\n" + END + b"10%\r") + lines.feed(b"20%\n") == b"100%\n10%\r\n20%\n"


def test_lines_are_not_held_back_if_a_display_is_not_drawn_until_its_end() -> None:
    """As with TTY_INTERACTIVE=0."""
    lines = RankLines()
    assert lines.feed(b"\x1b[?25l") + lines.feed(b"printed\n") == b"printed\n"


@pytest.mark.parametrize(
    ("output", "lines"),
    [
        (b"", b""),
        (b"\n\n", b"\n\n"),
        (b"one\r\ntwo", b"one\ntwo\n"),
        (b"\r 10%\r 20%\ndone\r", b" 10%\r\n 20%\ndone\n"),
        (b"10%\r20%\r\nnext", b"10%\r\n20%\nnext\n"),
        (b"\r\r\r", b""),
        (b"\0\x1e\xff\0", b"\0\x1e\xff\0\n"),
        (b"form\x0cfeed \xe2\x80\xa8", b"form\x0cfeed \xe2\x80\xa8\n"),
        (b"bar 1\n\rbar 2\x1b[A\r", b"bar 1\nbar 2\x1b[A\n"),
    ],
)
def test_an_update_ends_with_cr_lf_and_any_other_line_with_lf(output: bytes, lines: bytes) -> None:
    assert RankLines().feed(output, last=True) == lines


@pytest.mark.parametrize("bar", [b"\r10%|\r20%|\r30%|\n", b"10%\r|20%\r|30%\r|\n"], ids=["CR first", "CR last"])
def test_an_update_is_shown_before_the_next_one_is_written(bar: bytes) -> None:
    """A bar may have a minute between its updates."""
    lines = RankLines()
    shown = []
    for written in bar.split(b"|"):
        shown += [lines.feed(written), lines.feed(b""), lines.feed(b"")]
    assert [text for text in shown if text] == [b"10%\r\n", b"20%\r\n", b"30%\r\n", b"30%\n"]
    assert lines.feed(b"", last=True) == b""


def test_the_last_update_of_a_rank_that_was_killed_becomes_a_line() -> None:
    lines = RankLines()
    assert lines.feed(b"\r10%") + lines.feed(b"") + lines.feed(b"", last=True) == b"10%\r\n10%\n"
    assert without_updates(b"[n1:0] 10%\r\n[n1:0] 10%\n") == b"[n1:0] 10%\n"


def test_an_incomplete_line_that_is_no_update_is_held_back() -> None:
    """It may be part of a result that another program reads."""
    lines = RankLines()
    assert lines.feed(b'10%\r20%\n{"loss": ') == b"10%\r\n20%\n"
    assert lines.feed(b"") == b""
    assert lines.feed(b"2.5}\n") == b'{"loss": 2.5}\n'


@given(st.lists(st.sampled_from([b"a", b"bb" * 9, b"\n", b"\r", b"\r\n"]), max_size=40), st.integers(1, 60))
def test_a_long_line_is_cut_and_marked_however_the_output_is_split(pieces: list[bytes], size: int) -> None:
    output = b"".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_lines, "LONGEST", 10)
        patch.setattr(output_lines, "MARGIN", 5)
        assert fed(RankLines(), output, size) == RankLines().feed(output, last=True)
        output = output.replace(b"\r", b"")
        cut = fed(Lines(), output, size)
    expected = [
        line if len(line) <= 15 else line[:10] + b" [%d bytes of this line are left out]" % (len(line) - 10)
        for line in output.split(b"\n")
    ]
    assert cut == b"\n".join(expected) + (b"\n" if expected[-1] else b"")


def test_a_long_update_is_cut_and_stays_an_update() -> None:
    update, line = RankLines().feed(b"x" * (2 << 20) + b"\ry\n", last=True).splitlines(keepends=True)
    assert (update[1 << 20 :], line) == (b" [1048576 bytes of this line are left out]\r\n", b"y\n")


def test_a_long_line_that_arrives_with_its_end_is_cut() -> None:
    lines = Lines().feed(b"a\n" + b"x" * (3 << 20) + b"\nb\n" + b"y" * (1 << 20) + b"\nc")
    assert (
        lines
        == b"a\n" + b"x" * (1 << 20) + b" [2097152 bytes of this line are left out]\nb\n" + b"y" * (1 << 20) + b"\n"
    )


def test_a_line_that_the_agent_has_cut_is_not_cut_again_by_the_supervisor() -> None:
    agent, supervisor = RankLines(), Lines()
    line = with_prefix(b"[" + b"n" * 255 + b":1234567] ", agent.feed(b"x" * (2 << 20) + b"\n"))
    assert line.endswith(b"x [1048576 bytes of this line are left out]\n")
    assert supervisor.feed(line) == line


@pytest.mark.parametrize("kind", [Lines, RankLines])
def test_a_line_without_an_end_takes_little_memory_and_linear_time(kind: type[Lines]) -> None:
    lines, block = kind(), b"x" * 4096
    tracemalloc.start()
    try:
        for _ in range(16384):
            assert lines.feed(block) == b""
        assert lines.feed(b"\n").endswith(b"x [%d bytes of this line are left out]\n" % (63 << 20))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_every_line_gets_the_prefix() -> None:
    assert with_prefix(b"[n1:0] ", b"") == b""
    assert with_prefix(b"[n1:0] ", b"\na\r\nb\n") == b"[n1:0] \n[n1:0] a\r\n[n1:0] b\n"


# ---------------------------------------------------------------- console


@pytest.mark.parametrize(
    ("line", "rank", "output", "errors"),
    [
        (b"[n1:0] a] b\n", 0, b"a] b\n", b""),
        (b"[n1:0] \n", 0, b"\n", b""),
        (b"[n1:12] a\n", 12, b"", b""),
        (b"[n1:0]\n", None, b"", b"[n1:0]\n"),
        (b"[n1:x] a\n", None, b"", b"[n1:x] a\n"),
        (b"a [n1:0] b\n", None, b"", b"a [n1:0] b\n"),
        (b"[n1:" + b"9" * 5000 + b"] b\n", None, b"", b"[n1:" + b"9" * 5000 + b"] b\n"),
    ],
)
def test_the_console_recognises_whether_a_line_is_from_rank_0_another_rank_or_no_rank(
    line: bytes, rank: int | None, output: bytes, errors: bytes
) -> None:
    assert rank_of(line) == rank
    assert Console().feed(line, OUTPUT) == (output, errors)
    assert Console().feed(b"[n1:0] \n[n1:12] \n" + line, OUTPUT) == (b"\n" + output, errors)


def test_lines_of_rank_0_stay_on_their_stream_and_lines_of_no_rank_go_to_standard_error() -> None:
    lines = b"[n1:0] a\nnode\n[n1:1] b\n[n1:0] c\n"
    assert Console().feed(lines, OUTPUT) == (b"a\nc\n", b"node\n")
    assert Console().feed(lines, ERRORS) == (b"", b"a\nnode\nc\n")


def test_the_console_shows_the_lines_of_the_rank_that_is_chosen() -> None:
    assert Console("", {1}).feed(b"[n1:0] a\nnode\n[n1:1] b\n[n1:11] c\n", OUTPUT) == (b"b\n", b"node\n")


BAR = (
    b"[n1:0]  10%\r\n[n1:1] other\n[n1:0]  20%\r\n[n1:0] 100%\n[n1:0] loss 2\n[n1:0]  30%\r\nnode line\n[n1:0] 40%\r\n"
)


def screen_of(text: bytes) -> list[str]:
    """The lines on a terminal after this text."""
    screen, row, column = [""], 0, 0
    for part in re.findall(r"\r|\n|\x1b\[[?0-9;]*[a-zA-Z]|[^\r\n\x1b]+", text.decode(errors="replace")):
        if part == "\n":
            row, column = row + 1, 0
            screen += [""] * (row == len(screen))
        elif part == "\r":
            column = 0
        elif part.endswith("A"):
            row -= int(part[2:-1])
        elif part == "\x1b[2K":
            screen[row] = ""
        elif part == "\x1b[J":
            screen[row:] = [screen[row][:column]]
        elif not part.startswith("\x1b"):
            screen[row] = screen[row][:column].ljust(column) + part + screen[row][column + len(part) :]
            column += len(part)
    return screen


@pytest.mark.parametrize(
    ("terminals", "stream", "screen", "other"),
    [
        ("12", OUTPUT, ["100%", "loss 2", "node line", "40%", ""], b""),
        ("12", ERRORS, ["100%", "loss 2", "node line", "40%", ""], b""),
        ("1", OUTPUT, ["100%", "loss 2", "40%", ""], b"node line\n"),
        ("2", ERRORS, ["100%", "loss 2", "node line", "40%", ""], b""),
        ("2", OUTPUT, ["node line", ""], b" 10%\n 20%\n100%\nloss 2\n 30%\n40%\n"),
        ("1", ERRORS, [""], b" 10%\n 20%\n100%\nloss 2\n 30%\nnode line\n40%\n"),
    ],
)
def test_a_progress_bar_of_rank_0_stays_on_one_line_of_a_terminal(
    terminals: str, stream: int, screen: list[str], other: bytes
) -> None:
    console = Console(terminals)
    texts = [console.feed(line, stream) for line in BAR.splitlines(keepends=True)] + [console.end()]
    output, errors = (b"".join(parts) for parts in zip(*texts, strict=True))
    on_terminal, elsewhere = (output, errors) if terminals == "1" else (errors, output)
    assert (screen_of(on_terminal), elsewhere) == (screen, other)


def test_a_line_of_standard_output_replaces_a_progress_bar_of_standard_error_on_the_same_terminal() -> None:
    console = Console("12")
    texts = [console.feed(b"[n1:0] 10%\r\n", ERRORS), console.feed(b"[n1:0] loss 2\n", OUTPUT)]
    texts += [console.feed(b"[n1:0] 20%\r\n", ERRORS), console.end()]
    assert screen_of(b"".join(text for pair in texts for text in pair)) == ["loss 2", "20%", ""]


def test_a_message_of_the_supervisor_replaces_a_progress_bar() -> None:
    console = Console("12")
    assert console.message(b"stopping\n") == b"stopping\n"
    console.feed(b"[n1:0]  10%\r\n", OUTPUT)
    assert console.message(b"stopping\n") == b"\r\x1b[Jstopping\n"
    assert console.feed(b"[n1:0] 20%\n", OUTPUT)[1] == b"20%\n", "the bar was cleared"


def visible(text: bytes) -> str:
    return "\n".join(line.rstrip() for line in screen_of(text)).rstrip()


def of_rich() -> list[bytes]:
    """What rich writes, each time: displays of one to three lines, between printed lines."""
    written: list[bytes] = []

    class Terminal(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text.encode())
            return len(text)

    console = rich.console.Console(file=Terminal(), force_terminal=True, width=60, height=20)
    console.print("before [bold]0.5[/]")
    with rich.progress.Progress(console=console, auto_refresh=False) as progress:
        outer = progress.add_task("epochs", total=2)
        for epoch in range(2):
            inner, longest = progress.add_task("batches", total=2), progress.add_task("with\nlines")
            for batch in range(2):
                progress.update(inner, advance=1, refresh=True)
                if batch:
                    progress.console.print(f"loss {epoch}\nat [red]step[/] 1")
            progress.remove_task(longest)
            progress.remove_task(inner)
            progress.update(outer, advance=1, refresh=True)
    for item in rich.progress.track([1, 2], console=console, auto_refresh=False):
        console.print(f"item {item}")
    console.print("after")
    return written


@pytest.mark.parametrize("pauses", [False, True])
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_live_display_of_rich_looks_as_if_its_rank_wrote_to_the_terminal(size: int, pauses: bool) -> None:
    lines, console, shown, log, written = RankLines(), Console("12"), b"", b"", of_rich()
    for number, text in enumerate(written, start=1):
        step = len(text) if text == b"\x1b[?25l" else size
        fed = b"".join([lines.feed(text[start : start + step]) for start in range(0, len(text), step)])
        fed += lines.feed(b"") if pauses or number == len(written) else b""
        log += without_updates(with_prefix(b"[n1:0] ", fed), colours=False)
        shown += console.feed(with_prefix(b"[n1:0] ", fed), OUTPUT)[1]
        if pauses:
            assert visible(shown) == visible(b"".join(written[:number])), number
    assert lines.feed(b"", last=True) == b""
    assert visible(shown) == visible(b"".join(written)) == visible(log.replace(b"[n1:0] ", b""))
    assert b"\x1b" not in log


def test_another_program_that_writes_after_a_live_display_loses_no_line() -> None:
    console = Console("12")
    text = console.feed(b"[n1:0] a\v10%\v20%\r\n", OUTPUT)[1] + b"stopping the run\n"
    text += console.feed(b"[n1:0] b\v30%\v40%\r\n", OUTPUT)[1]
    assert screen_of(text) == ["stopping the run", "b", "30%", "40%"]
    assert screen_of(text + console.end()[1]) == ["stopping the run", "b", ""]


def test_a_display_that_ends_transient_is_not_in_the_log_and_the_next_line_replaces_it() -> None:
    lines, console = RankLines(), Console("12")
    texts = [lines.feed(b"\x1b[?25l"), lines.feed(b"loaded\n* loading\r\x1b[2K* loading\n\x1b[?25h\r\x1b[1A\x1b[2K")]
    fed = with_prefix(b"[n1:0] ", b"".join([*texts, lines.feed(b"next\n", last=True)]))
    assert without_updates(fed) == b"[n1:0] loaded\n[n1:0] next\n"
    assert screen_of(console.feed(fed, OUTPUT)[1]) == ["loaded", "next", ""]


def test_what_a_live_display_has_printed_is_not_lost_when_its_rank_is_killed() -> None:
    lines = RankLines()
    assert lines.feed(b"\x1b[?25l\r\x1b[2Kprinted\n10%\n20%\r\x1b[2K\x1b[1A\x1b[2K30%\n40%") == b"printed\n10%\v20%\r\n"
    assert lines.feed(b"") == b"30%\v40%\r\n"
    assert lines.feed(b"") == b"", "it was returned"
    assert lines.feed(b"", last=True) == b"30%\n40%\n"


def test_without_a_terminal_each_update_of_a_progress_bar_is_a_line() -> None:
    assert Console().feed(BAR, OUTPUT) == (b" 10%\n 20%\n100%\nloss 2\n 30%\n40%\n", b"node line\n")
    assert Console().end() == (b"", b"")


@pytest.mark.parametrize(
    "bar",
    [b"\r10%|\r20%|\n|20%\n", b"10%\r|20%\r|\n|20%\n", b"\r10%|\r20%|\r20%|\r20%\n|20%\n"],
    ids=["CR first", "CR last", "drawn again at the end"],
)
@pytest.mark.parametrize("stream", [OUTPUT, ERRORS])
def test_without_a_terminal_the_last_update_is_shown_once_however_the_rank_pauses(bar: bytes, stream: int) -> None:
    for parts in (bar.split(b"|"), [bar.replace(b"|", b"")]):
        lines, console, shown = RankLines(), Console({OUTPUT: "2", ERRORS: "1"}[stream]), b""
        for part in parts:
            for fed_lines in (lines.feed(part), lines.feed(b"")):
                shown += console.feed(with_prefix(b"[n1:0] ", fed_lines), stream)[stream - 1]
                console.feed(b"[n1:1] other\n", stream)
        assert shown == b"10%\n20%\n20%\n", "the last line was printed after the bar"


def test_without_a_terminal_the_last_update_of_a_rank_that_was_killed_is_shown_once() -> None:
    console = Console()
    assert console.feed(b"[n1:0] 10%\r\n", ERRORS) == (b"", b"10%\n")
    assert console.feed(b"node line\n[n1:0] 10%\n", ERRORS) == (b"", b"node line\n")
    assert console.feed(b"[n1:0] 10%\n", ERRORS) == (b"", b"10%\n"), "this line is no update"
