"""Ranks stop at the same step: one that exits alone makes the others wait for ever.

A signal only sets a flag, and the previous handlers are restored. All ranks receive the same status of a step when any
rank gets a stop request, has a non-finite loss or fails. The failed rank raises its cause, the others PeerFailed.
"""

from __future__ import annotations

import math
import signal
from dataclasses import asdict

import forked
import pytest
import torch

from distributed.host import signals
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
        signal.raise_signal(number)  # a second signal has no further effect
    assert requested.is_set()


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_the_previous_signal_handlers_are_restored(error: type[BaseException] | None) -> None:
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


def test_a_rank_that_was_asked_to_stop_keeps_its_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor may receive the same signal later, and would stop a rank that has no handlers."""
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    monkeypatch.setenv("MUSTER_RUN_DIR", "run")
    try:
        with stop_signals():
            signal.raise_signal(signal.SIGXCPU)
            inside = [signal.getsignal(number) for number in STOP_SIGNALS]
        assert [signal.getsignal(number) for number in STOP_SIGNALS] == inside
    finally:
        for number, handler in zip(STOP_SIGNALS, before, strict=True):
            signal.signal(number, handler)


def test_all_stop_signals_of_the_launchers_are_handled() -> None:
    """The signals that SLURM sends before a time limit, SIGTERM of SLURM and launchers, and SIGINT of a terminal."""
    assert set(STOP_SIGNALS) == {*signals.PROTECTED, signal.SIGTERM, signal.SIGINT}


# ---------------------------------------------------------------- status exchange of three ranks

NAN, INF = math.nan, math.inf
# For each step: the loss of each rank, ranks with a stop request, failed ranks, and the expected status.
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


def received_statuses(rank: int, size: int, delay: int, dtype: torch.dtype) -> list[list[StepStatus]]:
    """Return the statuses received after each step and at the end."""
    exchange = StatusExchange(rank, size, torch.device("cpu"))
    exchange.delay = delay
    received = []
    for step, (losses, stopping, failing, _) in enumerate(STEPS):
        loss = torch.tensor(losses[rank], dtype=dtype)
        exchange.send(step, loss, stop=rank in stopping, failed=rank in failing)
        received.append(exchange.receive())
    return [*received, exchange.receive(include_latest=True), exchange.receive(include_latest=True)]


@pytest.mark.parametrize(
    ("delay", "dtype"), [(0, torch.bfloat16), (1, torch.float32)], ids=["no delay", "one step delay"]
)
def test_all_ranks_receive_the_same_status_of_every_step(delay: int, dtype: torch.dtype) -> None:
    """On a GPU the status is received one step later to avoid a synchronization; here this delay is simulated."""
    expected: list[list[StepStatus]] = [[outcome] for *_, outcome in STEPS]
    expected = [*([[]] * delay), *expected, *([[]] * (2 - delay))]
    for received in forked.ranks(3, received_statuses, delay, dtype):
        assert [list(map(as_text, outcomes)) for outcomes in received] == [
            list(map(as_text, outcomes)) for outcomes in expected
        ]


def as_text(outcome: StepStatus) -> str:
    """Convert to text for comparison, because NaN != NaN."""
    return str(asdict(outcome))


def test_only_on_a_gpu_the_status_is_delayed() -> None:
    assert StatusExchange(0, 1, torch.device("cpu")).delay == 0
    assert StatusExchange(0, 1, torch.device("cuda")).delay == 1


# ---------------------------------------------------------------- errors of each rank

DISK_FULL = OSError("no space left")


@pytest.mark.parametrize(
    ("not_finite", "failed", "rank", "cause", "error", "message"),
    [
        ((1,), (), 1, None, NonFiniteLoss, "the loss of rank 1 on n1 is not finite (NaN or inf) at step 7; no check"),
        ((1,), (), 0, None, PeerFailed, "the loss of rank 1 on n1 is not finite (NaN or inf) at step 7; no checkpoint"),
        ((0, 2), (), 2, None, NonFiniteLoss, "the loss of rank 0 on n1, rank 2 on n2 is not finite"),
        ((), (2,), 2, DISK_FULL, OSError, "no space left"),
        ((), (2,), 0, None, PeerFailed, "rank 2 on n2 failed at step 7; stopping this rank"),
        ((), (0, 2), 1, None, PeerFailed, "rank 0 on n1, rank 2 on n2 failed at step 7; stopping this rank"),
        ((1,), (2,), 2, DISK_FULL, OSError, "no space left"),
        ((1,), (2,), 1, None, PeerFailed, "rank 2 on n2 failed at step 7"),
    ],
)
def test_the_failed_rank_raises_its_cause_and_the_other_ranks_name_the_failed_rank(
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
def test_without_a_failure_no_rank_raises_even_on_a_stop_request(stop: bool) -> None:
    StepStatus(7, 1.0, stop, (), ()).raise_for(0, None, HOSTS)
