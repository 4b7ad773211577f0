"""Ranks stop together or not at all: one that leaves alone lets the others wait for ever.

Held here: a signal sets a flag, does nothing else, and gives back what was there before; all ranks read the same of
one step, whoever was asked to stop, got NaN or failed; and each of them raises what is its own to raise.
"""

from __future__ import annotations

import math
import signal
from dataclasses import asdict

import forked
import pytest
import torch

from distributed.training.preemption import (
    STOP_SIGNALS,
    NonFiniteLoss,
    PeerFailed,
    StatusExchange,
    StepStatus,
    stop_signals,
)

HOSTS = ["n1", "n1", "n2"]


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_a_signal_only_sets_the_flag(number: signal.Signals) -> None:
    with stop_signals() as requested:
        assert not requested.is_set()
        signal.raise_signal(number)
        assert requested.is_set()
        signal.raise_signal(number)  # a second one is no more than the first
    assert requested.is_set()


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_afterwards_signals_mean_what_they_meant_before(error: type[BaseException] | None) -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    try:
        with stop_signals():
            assert signal.SIG_IGN not in [signal.getsignal(number) for number in STOP_SIGNALS]
            if error:
                raise error
    except (ValueError, KeyboardInterrupt):
        assert error
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers
    signal.signal(signal.SIGUSR2, before)


def test_the_launchers_stop_signals_are_all_caught() -> None:
    """USR2 before the time of a SLURM job is over, TERM from SLURM and from launchers, INT from a terminal."""
    assert set(STOP_SIGNALS) == {signal.SIGUSR2, signal.SIGTERM, signal.SIGINT}


# ---------------------------------------------------------------- what three ranks read of one another

NAN, INF = math.nan, math.inf
# Of each step: the loss on each rank, who is asked to stop, who has failed; and what all are to read.
STEPS = [
    ((1.0, 2.0, 6.0), (), (), StepStatus(0, 3.0, stop=False, not_finite=(), failed=())),
    ((1.0, 2.0, 6.0), (1,), (), StepStatus(1, 3.0, stop=True, not_finite=(), failed=())),
    ((1.0, 2.0, 6.0), (0, 1, 2), (), StepStatus(2, 3.0, stop=True, not_finite=(), failed=())),
    ((1.0, NAN, 6.0), (), (), StepStatus(3, NAN, stop=False, not_finite=(1,), failed=())),
    ((INF, 2.0, -INF), (), (), StepStatus(4, NAN, stop=False, not_finite=(0, 2), failed=())),
    ((1.0, 2.0, INF), (0,), (1,), StepStatus(5, INF, stop=True, not_finite=(2,), failed=(1,))),
    ((1.0, 2.0, NAN), (), (2,), StepStatus(6, NAN, stop=False, not_finite=(2,), failed=(2,))),
    ((0.0, 0.0, 0.0), (), (), StepStatus(7, 0.0, stop=False, not_finite=(), failed=())),
]


def exchanged(rank: int, size: int, late: int, dtype: torch.dtype) -> list[list[StepStatus]]:
    """What this rank reads after each of the steps, and at last."""
    exchange = StatusExchange(rank, size, torch.device("cpu"))
    exchange.delay = late
    read = []
    for step, (losses, stopping, failing, _) in enumerate(STEPS):
        loss = torch.tensor(losses[rank], dtype=dtype)
        exchange.send(step, loss, stop=rank in stopping, failed=rank in failing)
        read.append(exchange.receive())
    return [*read, exchange.receive(now=True), exchange.receive(now=True)]


@pytest.mark.parametrize(("late", "dtype"), [(0, torch.bfloat16), (1, torch.float32)], ids=["at once", "a step late"])
def test_all_ranks_read_the_same_of_every_step(late: int, dtype: torch.dtype) -> None:
    """A step late is how a GPU is read without making it wait; here the CPU is."""
    expected: list[list[StepStatus]] = [[outcome] for *_, outcome in STEPS]
    expected = [*([[]] * late), *expected, *([[]] * (2 - late))]
    for read in forked.ranks(3, exchanged, late, dtype):
        assert [list(map(readable, outcomes)) for outcomes in read] == [
            list(map(readable, outcomes)) for outcomes in expected
        ]


def readable(outcome: StepStatus) -> str:
    """As text: NaN is equal to nothing, not even to itself."""
    return str(asdict(outcome))


def test_only_a_gpu_is_read_late() -> None:
    assert StatusExchange(0, 1, torch.device("cpu")).delay == 0
    assert StatusExchange(0, 1, torch.device("cuda")).delay == 1


# ---------------------------------------------------------------- who raises what

DISK = OSError("no space left")


@pytest.mark.parametrize(
    ("not_finite", "failed", "rank", "cause", "error", "message"),
    [
        ((1,), (), 1, None, NonFiniteLoss, "the loss of rank 1 on n1 is not finite (NaN or inf) at step 7; no check"),
        ((1,), (), 0, None, PeerFailed, "the loss of rank 1 on n1 is not finite (NaN or inf) at step 7; no checkpoint"),
        ((0, 2), (), 2, None, NonFiniteLoss, "the loss of rank 0 on n1, rank 2 on n2 is not finite"),
        ((), (2,), 2, DISK, OSError, "no space left"),
        ((), (2,), 0, None, PeerFailed, "rank 2 on n2 failed at step 7; stopping this rank"),
        ((), (0, 2), 1, None, PeerFailed, "rank 0 on n1, rank 2 on n2 failed at step 7; stopping this rank"),
        ((1,), (2,), 2, DISK, OSError, "no space left"),
        ((1,), (2,), 1, None, PeerFailed, "rank 2 on n2 failed at step 7"),
    ],
)
def test_the_culprit_raises_its_cause_and_the_others_name_it(
    not_finite: tuple[int, ...], failed: tuple[int, ...], rank: int, cause: OSError | None, error: type[Exception],
    message: str,
) -> None:  # fmt: skip
    with pytest.raises(error) as raised:
        StepStatus(7, 1.0, False, not_finite, failed).raise_for(rank, cause, HOSTS)
    assert str(raised.value).startswith(message)
    assert raised.type is error
    if cause:
        assert raised.value is cause


@pytest.mark.parametrize("stop", [False, True])
def test_nobody_raises_when_all_is_well_or_a_stop_was_asked_for(stop: bool) -> None:
    StepStatus(7, 1.0, stop, (), ()).raise_for(0, None, HOSTS)
