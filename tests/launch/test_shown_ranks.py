"""The ranks whose output is shown. launch_singlenode.bats starts such runs."""

from __future__ import annotations

from itertools import count

import pytest

from distributed.launch.shown_ranks import ShownRanks


def of(rank: int, *steps: int) -> bytes:
    return b"".join(b"[n1:%d] step %d loss 2.5\n" % (rank, step) for step in steps)


@pytest.mark.parametrize(
    ("chosen", "lines", "shown"),
    [
        ("0", of(3, 1, 2, 3), {0}),
        ("2", of(3, 1, 2, 3), {2}),
        ("auto:3", of(3, 1, 2), {0}),
        ("auto:3", of(3, 1, 1, 1), {0}),
        ("auto:3", of(3, 1, 2, 3), {0, 3}),
        ("auto:3", of(3, 1) + of(0, 1) + of(3, 2, 3, 4), {0}),
        ("auto:3", of(3, 1) + of(2, 1) + of(3, 2, 3, 4), {0}),
        ("auto:3", of(3, 1, 2, 3) + of(0, 1) + of(3, 4, 5, 6), {0}),
        ("auto:3", b"step 1 loss 2.5\n[n1:0] epoch 1\n[n1:0] training starts\n" + of(3, 1, 2, 3), {0, 3}),
    ],
)
def test_the_last_rank_is_shown_if_it_alone_prints_steps(
    chosen: str, lines: bytes, shown: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = count(100.0, 2.0)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    ranks = ShownRanks(chosen)
    for line in lines.splitlines(keepends=True):
        ranks.look(line)
    assert ranks.ranks == shown


def test_the_last_rank_is_not_shown_at_once_because_lines_of_other_ranks_may_arrive_later() -> None:
    ranks = ShownRanks("auto:3")
    ranks.look(of(3, 1, 2, 3, 4, 5))
    assert ranks.ranks == {0}


def test_steps_are_searched_in_a_limited_number_of_lines() -> None:
    """A program without steps must not be read for ever."""
    ranks = ShownRanks("auto:3")
    ranks.look(b"[n1:0] training starts\n" * 5001)
    ranks.look(of(3, 1, 2, 3))
    assert ranks.ranks == {0}
