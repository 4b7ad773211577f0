"""When a run that is there is said to hang: never on a guess, always with the facts.

A long step, an evaluation or a checkpoint is quiet too; a training on GPUs that hangs in NCCL shows busy GPUs. What the
facts do not tell is not said.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from distributed.pulse import Beat, feel

WORKS = Beat(rank=0, node="n1", pid=100, state="R", cpu=1.0, gpu=None, silent=0.0)
SLEEPS = replace(WORKS, state="S", cpu=0.0)
STOPPED = replace(SLEEPS, state="T")
ON_GPU = replace(SLEEPS, gpu=97)
IDLE_GPU = replace(SLEEPS, gpu=0)
DISK = replace(SLEEPS, state="D")


def ranks(*beats: Beat) -> list[Beat]:
    """As ranks 0, 1, ... on n1, n2, ..."""
    return [replace(beat, rank=rank, node=f"n{rank + 1}", pid=100 + rank) for rank, beat in enumerate(beats)]


@pytest.mark.parametrize(
    ("beats", "silent", "words"),
    [
        ([], 1e6, ""),
        ([WORKS, WORKS], 599.0, ""),
        ([WORKS, WORKS], 600.0, "no output for 600 s, but ranks are at work"),
        ([SLEEPS, SLEEPS], 59.0, ""),
        ([SLEEPS, SLEEPS], 60.0, "looks hung: no output for 60 s, and no rank used CPU in 1.0 s"),
        ([IDLE_GPU, IDLE_GPU], 61.0, "looks hung: no output for 61 s, and no rank used CPU or GPU in 1.0 s"),
        ([ON_GPU, ON_GPU], 300.0, ""),  # waits for its GPU, which is at work
        ([SLEEPS, DISK], 312.0, "no rank used CPU in 1.0 s; rank 1 on n2 is waiting for a disk or a network file s"),
        ([WORKS, STOPPED], 0.0, "looks hung: rank 1 on n2 is stopped (state T)"),
        ([STOPPED, STOPPED], 0.0, "looks hung: rank 0 on n1, rank 1 on n2 are stopped"),
        ([WORKS, WORKS, SLEEPS], 119.0, ""),
        (
            [WORKS, WORKS, SLEEPS],
            120.0,
            "looks hung: no output for 120 s; rank 2 on n3 uses CPU no more, and the 2 oth",
        ),
        ([WORKS, SLEEPS], 130.0, "rank 1 on n2 uses CPU no more, and the other is at work"),
        ([SLEEPS, WORKS, SLEEPS], 130.0, "rank 1 on n2 alone is at work, and the 2 others are waiting"),
        ([WORKS, WORKS, SLEEPS, SLEEPS], 130.0, ""),  # half of them is no odd one
        ([WORKS], 130.0, ""),
        ([SLEEPS], 130.0, "looks hung: no output for 130 s"),
        ([replace(WORKS, cpu=0.1), SLEEPS, SLEEPS], 130.0, ""),  # neither asleep nor at work
    ],
)
def test_what_is_said_of_a_run(beats: list[Beat], silent: float, words: str) -> None:
    pulse = feel(ranks(*beats), 1.0, silent)
    assert words in pulse.words and bool(words) == bool(pulse.words)
    assert pulse.hung == words.startswith(("looks hung", "no rank", "rank")), "the only other words are no verdict"


def test_a_stopped_rank_comes_with_the_command_that_lets_it_go_on() -> None:
    assert feel(ranks(STOPPED, WORKS, STOPPED), 1.0, 0.0).remedy == "kill -CONT 100 102"
