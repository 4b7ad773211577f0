"""The verdict names the rank that failed first.

Ranks that lose their connection to this rank report an error too, often before its agent records the failure. Causes
win over consequences in any order and from any file, damaged files are ignored, and the exit code is that of the first
failure.

Messages were recorded with torch 2.13 and gloo, from ranks that raise, exit, hang and die of signals; messages of NCCL
have the formats of PyTorch's source. The last test provokes some of these messages again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_collectives import dumped

from distributed.trust import LAYOUT, MAX_RECORDED, printable
from distributed.verdict import node_log, verdict
from distributed.verdict.failures import Evidence, Failure, SentSignal, gather
from distributed.verdict.node_log import LogLine, read_log
from distributed.verdict.verdict import Kind, kind_of

KIT = Path(__file__).resolve().parents[2]
TIME = 1_700_000_000.25  # of the failures, Unix seconds

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
CLOSED = (
    GLOO + "pair.cc:553] Connection closed by peer [127.0.0.1]:2955. This is typically caused by a remote worker "
    "crashing. Check the logs of the remote worker before reporting an error. GLHF! 🏖️"
)
RESET = (
    GLOO + "pair.cc:537] Read error [127.0.0.1]:61582: Connection reset by peer. This is typically caused by a "
    "remote worker hanging or bugs in the application. Check the logs of the remote worker before reporting an "
    "error. GLHF! 🏖️"
)
WAITED = GLOO + "unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"
WATCHDOG = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=96, OpType=ALLREDUCE, NumelIn=4, "
    "NumelOut=4, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
)
REMOTE = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote process exited or there was a network "
    "error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or a remote process "
    "exiting prematurely.\nLast error:\nsocketProgressOpt: Call to recv from 10.0.0.2<33759> failed : Connection "
    "reset by peer"
)

CONSEQUENCES = [
    ("RuntimeError", CLOSED),
    ("RuntimeError", RESET),
    ("RuntimeError", WAITED),
    ("RuntimeError", GLOO + "unbound_buffer.cc:129] Timed out waiting 5000ms for send operation to complete"),
    ("RuntimeError", GLOO + "pair.cc:81] Socket closed [10.0.0.2]:1234"),
    ("RuntimeError", "Gloo connectFullMesh failed with " + GLOO + "pair.cc:144] no error"),
    (
        "RuntimeError",
        "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. "
        f"Please check rank 0 logs for faulty rank.\n Original exception: \n{CLOSED}",
    ),
    ("DistStoreError", "wait timeout after 2000ms, keys: /nokey"),
    ("DistStoreError", "Timed out after 3 seconds waiting for clients. 1/2 clients joined."),
    (
        "DistNetworkError",
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    ),
    ("DistNetworkError", "Broken pipe"),
    (
        "DistNetworkError",
        "The client socket has timed out after 2000ms while trying to connect to (127.0.0.1, 29871).",
    ),
    (
        "DistNetworkError",
        "The client socket has failed to connect to any network address of (node1, 29500). The client socket has "
        "failed to connect to 10.0.0.1:29500 (errno: 111 - Connection refused).",
    ),
    (
        "DistNetworkError",
        "recvValue failed on SocketImpl(fd=4, addr=[::ffff:127.0.0.1]:38558, remote=[::ffff:127.0.0.1]:29871): "
        "failed to recv, got 0 bytes",
    ),
    ("DistBackendError", REMOTE),
    ("DistBackendError", WATCHDOG),
    ("DistBackendError", f"NCCL communicator was aborted on rank 0.  Original reason for failure was: {WATCHDOG}"),
    ("RendezvousConnectionError", "The connection to the C10d store has failed. See inner exception for details."),
    ("DistBackendError", "NCCL communicator was aborted on rank 1. "),
    ("DistBackendError", "NCCL timeout in communicator initialization."),
    ("RuntimeError", "Socket Timeout"),
    ("RuntimeError", "wait timeout after 5000ms, keys: /default_pg/0//cpu//0/1"),
    ("RuntimeError", GLOO + "socket.cc:80] connect [127.0.0.1]:1: Connection refused"),
    ("RuntimeError", "Timed out after 3 seconds waiting for clients. 1/2 clients joined."),
    ("PeerFailed", "rank 1 on n2 failed at step 7; stopping this rank"),
    ("RuntimeError", "DataLoader worker (pid 4711) is killed by signal: Terminated. "),
]
CAUSES = [
    ("ValueError", "the data is bad\nsecond line"),
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.6 GiB"),
    ("RuntimeError", "DataLoader worker (pid 4711) is killed by signal: Killed. "),
    ("AcceleratorError", "CUDA error: an illegal memory access was encountered"),
    ("DistNetworkError", "The server socket has failed to listen on any local network address. port: 29873, "
     "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"),
    ("NonFiniteLoss", "the loss of rank 1 on n2 is not finite (NaN or inf) at step 7"),
    ("FileNotFoundError", "[Errno 2] No such file or directory: 'cfg.yaml'"),
    ("MyError", ""),
]  # fmt: skip


def raised(exception: str | None, message: str = "", **more: Any) -> Failure:
    """An exception recorded by rank 1 on node n1."""
    facts: dict[str, Any] = {"node": "n1", "rank": 1, "time": TIME, "exit_code": 1} | more
    return Failure(exception=exception, message=message, **facts)


TWO_NODES = {"n1": range(2), "n2": range(2, 4)}


def died(code: int, **more: Any) -> Failure:
    facts: dict[str, Any] = {"node": "n1", "rank": 1, "time": TIME, "exit_code": code} | more
    return Failure(**facts)


# ---------------------------------------------------------------- causes and consequences


@pytest.mark.parametrize(("exception", "message"), CONSEQUENCES)
def test_a_lost_connection_or_timeout_is_a_consequence(exception: str, message: str) -> None:
    assert kind_of(raised(exception, message)) is Kind.COLLATERAL


@pytest.mark.parametrize(("exception", "message"), CAUSES)
def test_any_other_error_of_a_rank_is_a_cause(exception: str, message: str) -> None:
    assert kind_of(raised(exception, message)) is Kind.OWN_ERROR


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (died(137), Kind.OWN_ERROR),
        (died(139), Kind.OWN_ERROR),
        (died(42), Kind.OWN_ERROR),
        (died(2), Kind.OWN_ERROR),
        (died(1), Kind.UNCLEAR),  # the code of every Python exception, also of a consequence
        (died(143), Kind.TERMINATED),
        (died(129), Kind.TERMINATED),
        (died(137, ended_by_agent=True), Kind.TERMINATED),
        (died(1, ended_by_agent=True), Kind.TERMINATED),
        (died(75), Kind.STOPPED),
        (died(75, ended_by_agent=True), Kind.STOPPED),
        (raised("KeyboardInterrupt", exit_code=130), Kind.TERMINATED),
        (raised("ValueError", "own", ended_by_agent=True), Kind.UNCLEAR),  # may be a consequence of SIGTERM
        (raised("ConnectionResetError", "[Errno 104] Connection reset by peer"), Kind.UNCLEAR),  # may be any connection
        (raised("BrokenPipeError", "[Errno 32] Broken pipe"), Kind.UNCLEAR),
        (raised("DistNetworkError", "EADDRINUSE", rank=None), Kind.AGENT),
        (died(1, rank=None), Kind.UNCLEAR),
        (died(137, rank=None), Kind.UNCLEAR),
        (died(143, rank=None), Kind.TERMINATED),
        (Failure("n1"), Kind.LOST_NODE),
    ],
)
def test_a_failure_is_classified(failure: Failure, expected: Kind) -> None:
    assert kind_of(failure) is expected


def trace(
    *errors: tuple[str, str], joint: str = "During handling of the above exception, another exception occurred"
) -> str:
    """A chained traceback, as Python prints it."""
    frame = 'Traceback (most recent call last):\n  File "train.py", line 3, in step\n    work()\n    ^^^^^^\n'
    return f"\n{joint}:\n\n".join(f"{frame}{name}: {text}\n" for name, text in errors)


OWN, LOST = ("ValueError", "own"), ("RuntimeError", CLOSED)
DIRECT = "The above exception was the direct cause of the following exception"


@pytest.mark.parametrize(
    ("errors", "joint", "expected", "shown"),
    [
        ([LOST, OWN], DIRECT, Kind.COLLATERAL, OWN),  # raise ValueError("own") from lost
        ([LOST, OWN], "During handling of the above exception, another exception occurred", Kind.COLLATERAL, OWN),
        # Two cases look the same: a rank fails, and then its dist.barrier() in `finally` fails too; or a healthy rank
        # loses its connection while it handles a harmless exception, such as StopIteration.
        ([OWN, LOST], "During handling of the above exception, another exception occurred", Kind.UNCLEAR, OWN),
        ([("KeyError", "'x'"), OWN], DIRECT, Kind.OWN_ERROR, OWN),
    ],
)
def test_the_first_exception_of_a_chain_decides(
    errors: list[tuple[str, str]], joint: str, expected: Kind, shown: tuple[str, str]
) -> None:
    failure = raised(*errors[-1], traceback=trace(*errors, joint=joint))
    assert kind_of(failure) is expected
    assert verdict.decisive_exception(failure)[:2] == shown


# ---------------------------------------------------------------- which was first

_consequences = st.builds(
    lambda error, rank, offset: raised(*error, rank=rank, node=f"n{rank % 3}", time=TIME + offset),
    st.sampled_from(CONSEQUENCES),
    st.integers(0, 63),
    st.floats(-600, 600),
)
_terminated = st.builds(
    lambda code, rank, offset: died(code, rank=rank, time=TIME + offset, ended_by_agent=True),
    st.sampled_from([143, 137, 1]),
    st.integers(0, 63),
    st.floats(-600, 600),
)
_causes = st.one_of(
    st.builds(lambda error: raised(*error, rank=99, node="n9"), st.sampled_from(CAUSES)),
    st.builds(lambda code: died(code, rank=99, node="n9"), st.sampled_from([2, 3, 42, 134, 135, 137, 139, 255])),
)


@settings(deadline=None)
@given(st.lists(st.one_of(_consequences, _terminated), max_size=12), _causes, st.randoms())
def test_a_cause_wins_over_earlier_consequences(others: list[Failure], cause: Failure, random: Any) -> None:
    failures = [*others, cause]
    random.shuffle(failures)
    assert verdict.first_failure(failures) == cause
    found = verdict.judge(Evidence(tuple(failures)))
    assert (found.outcome, found.node, found.rank, found.exit_code) == ("failed", "n9", 99, cause.exit_code)
    assert len(found.collateral) == len(others)


@settings(deadline=None)
@given(st.lists(_causes, min_size=2, max_size=6), st.randoms())
def test_the_earliest_of_several_causes_wins(causes: list[Failure], random: Any) -> None:
    timed = [replace(cause, rank=rank, time=TIME + rank) for rank, cause in enumerate(causes)]
    random.shuffle(timed)
    assert verdict.first_failure(timed).rank == 0


def test_a_failure_without_a_time_is_not_the_earliest() -> None:
    assert verdict.first_failure([died(139, rank=0, time=None), died(137, rank=1)]).rank == 1


def test_without_a_cause_the_first_consequence_is_named() -> None:
    found = verdict.judge(
        Evidence((raised("RuntimeError", RESET, rank=0, time=TIME + 1), raised("RuntimeError", CLOSED)))
    )
    assert (found.rank, found.exit_code) == (1, 1)
    assert found.cause == (
        "the cause was not recorded; rank 1 on n1 was affected first: "
        "RuntimeError: Connection closed by peer [127.0.0.1]:2955."
    )


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (135, "rank 0 on n1 died of SIGBUS"),
        (1, "rank 0 on n1 exited with code 1; no clearer cause was recorded"),
    ],
)
def test_a_rank_with_only_an_exit_code_is_named_with_its_signal_or_code(code: int, cause: str) -> None:
    assert verdict.judge(Evidence((died(code, rank=0),), ranks={"n1": range(1)})).cause == cause


def test_the_only_rank_without_a_record_is_named_as_missing_if_all_other_ranks_waited() -> None:
    waited = [raised("RuntimeError", WAITED, rank=rank, node="n1") for rank in (0, 1, 3)]
    hung = died(143, rank=2, node="n2", ended_by_agent=True)
    found = verdict.judge(Evidence((*waited, hung), ranks=TWO_NODES))
    assert (found.node, found.rank, found.exit_code) == ("n2", 2, 1)
    assert found.cause.startswith(
        "rank 2 on n2 was missing from a collective: only this rank reported nothing; rank 0 on n1 reports: "
    )
    without_end = verdict.judge(Evidence(tuple(waited), ranks={"n1": range(1), "n2": range(1, 4)}))
    assert (without_end.node, without_end.rank) == ("n2", 2), "run.json shows which rank has no record"
    two_missing = verdict.judge(Evidence((*waited[:2], hung), ranks=TWO_NODES))
    assert "only this rank" not in two_missing.cause
    unknown_rank = verdict.judge(Evidence((replace(waited[0], rank=5),), ranks={"n1": range(2)}))
    assert "only this rank" not in unknown_rank.cause


def test_a_rank_that_exited_with_0_while_others_waited_for_it_is_named(run: RunDirectory) -> None:
    run.start("n1", "n2")
    run.rank(0, "RuntimeError", "[Rank 0]: Ranks 3, 5 failed to pass monitoredBarrier in 2000 ms")
    run.rank(1, "RuntimeError", CLOSED, time=TIME + 1)
    run.rank(2, "RuntimeError", RESET, node="n2", time=TIME + 1)
    run.ranks_ended("n1", r0=(1, False), r1=(1, False))
    run.ranks_ended("n2", r2=(1, False), succeeded=[3])
    found = run.decide()
    waits = "rank 0 on n1 was in a collective at train.py:3 in step()"
    assert (found.node, found.rank, found.exit_code) == ("n2", 3, 1)
    assert found.cause == f"rank 3 on n2 ended with exit code 0 while {waits}"
    run.rank(1, "ValueError", "own", time=TIME + 1)
    assert run.decide().rank == 1, "an error of a rank wins over the early exit of another"
    (run.path / "errors/rank_1.json").unlink()
    run.ranks_ended("n1", r0=(1, False), succeeded=[1])
    assert run.decide().cause == f"rank 1 on n1 and 1 more rank ended with exit code 0 while {waits}"
    (run.path / "errors/rank_0.json").unlink()
    run.ranks_ended("n1", r0=(75, False), succeeded=[1])
    (run.path / "errors/rank_2.json").unlink()
    run.ranks_ended("n2", r2=(75, False), succeeded=[3])
    assert run.decide().outcome == "stopped", "no rank waited"


def test_an_agent_whose_ranks_exited_with_0_is_not_the_cause(run: RunDirectory) -> None:
    """Such an agent exits with the code of the run."""
    run.start("n1", "n2", nproc=1)
    run.rank(0, "RuntimeError", RESET)
    run.ranks_ended("n1", r0=(1, False))
    run.ranks_ended("n2", succeeded=[1])
    for node in ("n1", "n2"):
        run.file(f"node_{node}.exit", "1\n")
    assert (run.decide().node, run.decide().rank) == ("n2", 1)


@pytest.mark.parametrize(
    ("exception", "message"),
    [
        ("RuntimeError", f"[Rank 0]: Rank 3 failed to pass monitoredBarrier in 2000 ms\n Original exception: {WAITED}"),
        ("RuntimeError", "[Rank 0]: Ranks 3, 5 failed to pass monitoredBarrier in 2000 ms"),
        ("DistBackendError", f"{WATCHDOG}\n\t - To our best knowledge, ranks [3, 5] are the lagging ranks that "
         "caused this timeout. They never joined any collectives"),
        ("DistBackendError", f"{WATCHDOG}\n\t - To our best knowledge, the lagging/dead/mismatched ranks that caused "
         "the desync are:\n\t   - [0, 1] joined but didn't finish collective #5 (count from 1)\n\t     [3] finished "
         "collective #4, but didn't join collective #5 (count from 1)"),
        ("PeerFailed", "rank 3 on n2 failed at step 7; stopping this rank"),
        ("PeerFailed", "the loss of rank 3 on n2, rank 5 on n3 is not finite (NaN or inf) at step 7"),
    ],
)  # fmt: skip
def test_a_rank_that_another_one_names_as_missing_is_the_cause(exception: str, message: str) -> None:
    report, other = raised(exception, message, rank=0), raised("RuntimeError", CLOSED, rank=1, time=TIME - 1)
    found = verdict.judge(Evidence((report, other), ranks=TWO_NODES))
    assert (found.node, found.rank, found.exit_code) == ("n2", 3, 1)
    assert found.cause.startswith("rank 3 on n2 was missing from a collective; rank 0 on n1 reports: ")
    with_own_error = verdict.judge(Evidence((report, other, died(139, rank=1, node="n1"))))
    assert with_own_error.rank == 1, "an error of a rank wins"


def test_two_causes_are_both_named_if_the_clocks_do_not_show_which_was_first() -> None:
    one, other = raised("ValueError", "x", rank=0, node="n1"), died(137, rank=1, node="n2", time=TIME + 0.6)
    both = "rank 0 on n1 raised ValueError: x; too close in time to tell which was first: rank 1 on n2 died of SIGKILL"
    known = Evidence((one, other), clocks={"n1", "n2"})
    assert verdict.judge(known).cause == both
    assert "too close" not in verdict.judge(replace(known, failures=(one, replace(other, time=TIME + 1.1)))).cause
    assert "too close" not in verdict.judge(Evidence((one, replace(other, node="n1")))).cause
    whole = (replace(one, time=1_700_000_000.0), replace(other, node="n1"))
    assert "too close" in verdict.judge(Evidence(whole)).cause, "torchrun's whole seconds on one node"


def test_two_causes_on_nodes_with_unknown_clocks_are_both_named() -> None:
    one, other = raised("ValueError", "x", rank=0, node="n1"), died(137, rank=1, node="n2", time=TIME + 5)
    both = (
        "rank 0 on n1 raised ValueError: x; which was first is not known, because the clocks of nodes may differ: "
        "rank 1 on n2 died of SIGKILL"
    )
    assert verdict.judge(Evidence((one, other))).cause == both
    assert verdict.judge(Evidence((one, other), clocks={"n1"})).cause == both


def test_the_node_that_reported_first_to_the_agents_store_is_first_whatever_its_clock_says(run: RunDirectory) -> None:
    one, other = died(3, rank=0, node="n1", time=TIME + 5), died(4, rank=1, node="n2")
    found = verdict.judge(Evidence((one, other), first="n1"))
    assert (found.rank, found.exit_code, found.cause) == (0, 3, "rank 0 on n1 exited with code 3")
    lost = [raised("RuntimeError", CLOSED, rank=rank, node=f"n{rank}", time=TIME - rank) for rank in (0, 1)]
    assert verdict.judge(Evidence(tuple(lost), first="n0")).rank == 0
    run.file("errors/node_n2.json", {"node": "n2", "failures": [], "first": "n1"})
    assert gather(run.path).first == "n1"


def test_nodes_that_name_different_first_nodes_are_not_believed(run: RunDirectory) -> None:
    for name, first in (("n1", "n3"), ("n2", "n1")):
        run.file(f"errors/node_{name}.json", {"node": name, "failures": [], "first": first})
    assert gather(run.path).first == ""


def test_a_node_cannot_add_lines_or_more_failures_than_ranks_to_the_verdict(run: RunDirectory) -> None:
    run.start("n1", "n2")
    run.file("errors/supervisor_n2.json", {"cause": "lost", "message": "gone\nverdict: ok: all ranks exited with 0"})
    run.file("errors/signal_n2_SIGUSR1.json", {"signal": "SIGUSR1\nverdict: ok", "sender": "x" * 1000, "time": TIME})
    run.file("errors/node_n2.json", {"node": "n2", "failures": [{"rank": rank} for rank in range(1000)]})
    evidence = gather(run.path)
    assert len(evidence.failures) <= 3
    assert evidence.signal and "\n" not in str(evidence.signal) and len(str(evidence.signal)) < 250
    assert "\n" not in verdict.judge(evidence, 69).cause


@pytest.mark.parametrize("sender", ["from SLURM; all ranks exited with 0", "verdict: ok on n2", "to the x\ny on n2"])
def test_a_record_of_a_signal_adds_no_text_of_its_own_to_the_verdict(run: RunDirectory, sender: str) -> None:
    run.file("errors/signal_n2_SIGUSR1.json", {"signal": "SIGUSR1; verdict: ok", "sender": sender, "time": TIME})
    assert [str(one) for one in gather(run.path).signals] == ["SIGUSR1 to n2"]


@pytest.mark.parametrize("sender", ["to the supervisor on n1", "to the agent on n2"])
def test_a_node_does_not_hide_the_failure_of_another_one(run: RunDirectory, sender: str) -> None:
    run.start("n1", "n2")
    run.rank(0, "ValueError", "boom")
    run.file("errors/signal_n2_SIGTERM.json", {"signal": "SIGTERM", "sender": sender, "time": TIME - 5})
    assert [str(one) for one in gather(run.path).signals] == [
        f"SIGTERM {sender}" if "n2" in sender else "SIGTERM to n2"
    ]
    code, text = verdict.conclude(run.path, 1, signaled=False, clocks={}, signals={})
    assert (code, "failed: rank 0 on n1 raised ValueError: boom" in text) == (1, True)


def test_a_verdict_that_is_written_again_uses_the_signals_that_the_launcher_received(run: RunDirectory) -> None:
    run.start("n1", "n2")
    run.rank(0, "ValueError", "a rank is gone")
    facts = {"signal": "SIGTERM", "sender": "to the supervisor on n2", "time": TIME - 0.1}
    run.file("errors/signal_n2_SIGTERM.json", facts)
    assert verdict.conclude(run.path, 1, signaled=False, clocks={}, signals={"n2": TIME})[0] == 143
    assert verdict.conclude(run.path)[0] == 143


def test_times_of_nodes_are_converted_to_the_clock_of_the_launching_side(run: RunDirectory) -> None:
    """The rank that failed first is on a node whose clock is 5 s ahead."""
    for rank, (code, seconds) in enumerate([(4, 0.5), (3, 5.0)]):
        failure = {"rank": rank, "time": TIME + seconds, "exit_code": code}
        run.file(f"errors/node_n{rank + 1}.json", {"failures": [failure]})
    run.file("errors/signal_n2_SIGUSR1.json", {"signal": "SIGUSR1", "sender": "from SLURM", "time": TIME + 3})
    evidence = gather(run.path, {"n1": 0.0, "n2": 5.0})
    assert {failure.rank: failure.time for failure in evidence.failures} == {0: TIME + 0.5, 1: TIME}
    assert evidence.signal and evidence.signal.time == TIME - 2
    found = verdict.judge(evidence)
    assert (found.rank, found.exit_code) == (1, 3)
    assert "too close in time to tell which was first: rank 0 on n1 exited with code 4" in found.cause


def test_whole_seconds_of_torchrun_stay_inexact_on_another_clock(run: RunDirectory) -> None:
    run.file("errors/node_n1.json", {"failures": [{"rank": 0, "time": 1_700_000_000, "exit_code": 3}]})
    run.file("errors/node_n2.json", {"failures": [{"rank": 1, "time": 1_700_000_000.6, "exit_code": 4}]})
    [one, _] = gather(run.path, {"n1": -0.0001, "n2": 0.0}).failures
    assert one.time is not None and one.time.is_integer()


def test_a_verdict_that_is_written_again_uses_the_measured_clocks(run: RunDirectory) -> None:
    for rank, (code, seconds) in enumerate([(4, 0.5), (3, 5.0)]):
        failure = {"rank": rank, "time": TIME + seconds, "exit_code": code}
        run.file(f"errors/node_n{rank + 1}.json", {"failures": [failure]})
    assert verdict.conclude(run.path, 3, clocks={"n1": 0.0, "n2": 5.0}, signals={})[0] == 3
    assert verdict.conclude(run.path)[0] == 3


def test_the_same_error_on_every_rank_is_counted() -> None:
    same = [raised("ValueError", "no such layer", rank=rank, time=TIME + rank) for rank in range(4)]
    assert verdict.judge(Evidence(tuple(same))).cause == (
        "rank 0 on n1 raised ValueError: no such layer; the same on 3 more ranks"
    )


# ---------------------------------------------------------------- outcome and exit code

STOP = (died(75, rank=0), died(75, rank=1))
BY_AGENT = died(143, rank=1, ended_by_agent=True)
CRASH = (died(139, rank=0), BY_AGENT)


@pytest.mark.parametrize(
    ("failures", "exits", "launcher", "expected"),
    [
        ((), {"n1": 0}, None, ("ok", 0)),
        ((), {}, 0, ("ok", 0)),
        ((), {}, None, ("failed", 1)),
        ((), {"n1": 0}, 124, ("failed", 124)),
        ((), {}, 130, ("stopped", 130)),
        ((), {"n1": 0}, 130, ("stopped", 0)),  # all ranks exited with 0 before or after the request
        (CRASH, {"n1": 0}, 143, ("stopped", 0)),  # the same, in an attempt after one that failed
        (CRASH, {"n1": 0}, None, ("ok", 0)),  # the restart succeeded
        (CRASH, {"n1": 1}, None, ("failed", 139)),
        (CRASH, {"n1": 139}, 130, ("failed", 139)),  # it failed before Ctrl-C
        (STOP, {"n1": 75}, None, ("stopped", 75)),
        ((died(75, rank=0, ended_by_agent=True), BY_AGENT), {"n1": 75}, None, ("stopped", 75)),
        (STOP, {"n1": 75}, 143, ("stopped", 75)),  # a checkpoint was written
        ((*STOP, died(137, rank=2)), {"n1": 75}, None, ("failed", 137)),
        ((died(75, rank=0), raised("RuntimeError", CLOSED)), {"n1": 75}, None, ("failed", 1)),
        ((BY_AGENT,), {"n1": 143}, None, ("stopped", 143)),
        ((BY_AGENT,), {"n1": 143}, 130, ("stopped", 130)),
        ((raised("RuntimeError", CLOSED, rank=0), BY_AGENT), {"n1": 1}, 143, ("stopped", 143)),
        ((raised("KeyboardInterrupt", exit_code=130),), {"n1": 130}, 130, ("stopped", 130)),
        ((raised("RuntimeError", CLOSED, exit_code=3), Failure("n2")), {"n1": 3}, None, ("failed", 69)),
        ((BY_AGENT, Failure("n2")), {"n1": 143}, 69, ("failed", 69)),
    ],
)
def test_outcome_and_exit_code_follow_from_failures_and_exit_codes(
    failures: tuple[Failure, ...], exits: dict[str, int], launcher: int | None, expected: tuple[str, int]
) -> None:
    found = verdict.judge(Evidence(failures, exits, ranks={"n1": range(2)}), launcher)
    assert (found.outcome, found.exit_code) == expected


# ---------------------------------------------------------------- the files of a run


@dataclass(frozen=True)
class RunDirectory:
    """A run directory with files as agents and workers write them."""

    path: Path

    def file(self, name: str, content: object) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    def start(self, *nodes: str, nproc: int = 2) -> None:
        layout = [{"node": n, "first_rank": k * nproc, "processes": nproc} for k, n in enumerate(nodes)]
        self.file("run.json", {"layout": layout})

    def rank(self, rank: int, exception: str, message: str, node: str = "n1", **more: Any) -> None:
        facts = {"rank": rank, "local_rank": rank, "node": node, "pid": 100 + rank, "time": TIME, "exit_code": 1}
        error = {"exception": exception, "message": message, "traceback": trace((exception, message))}
        self.file(f"errors/rank_{rank}.json", facts | error | more)

    def ranks_ended(self, node: str, succeeded: Sequence[int] = (), **codes: tuple[int, bool]) -> None:
        """r0=(137, False): rank 0 died of SIGKILL, not sent by the agent. succeeded: ranks that exited with 0."""
        failures = [
            {"rank": int(rank[1:]), "local_rank": int(rank[1:]), "pid": 100 + int(rank[1:]), "time": TIME + 0.1}
            | {"exit_code": code, "ended_by_agent": by_agent}
            for rank, (code, by_agent) in codes.items()
        ]
        self.file(f"errors/node_{node}.json", {"node": node, "failures": failures, "succeeded": list(succeeded)})

    def decide(self, launcher: int | None = None) -> verdict.Verdict:
        return verdict.decide(self.path, launcher)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def test_a_killed_agent_is_the_cause_although_its_ranks_have_recorded_that_they_lost_their_store(
    run: RunDirectory,
) -> None:
    run.start("n1")
    run.file("node_n1.exit", "137\n")
    for rank in (0, 1):
        run.rank(rank, "DistNetworkError", "Connection reset by peer")
    found = run.decide(137)
    assert (found.cause, found.exit_code, found.rank) == (
        "the agent on n1 died of SIGKILL; no clearer cause was recorded", 137, None,
    )  # fmt: skip
    run.rank(1, "ValueError", "boom")
    assert run.decide(137).cause.startswith("rank 1 on n1 raised ValueError: boom")
    run.ranks_ended("n1", r0=(137, False))
    run.rank(1, "DistNetworkError", "Connection reset by peer")
    assert run.decide(137).rank == 0


def test_a_rank_that_succeeded_is_not_the_cause_whatever_records_of_others_say(run: RunDirectory) -> None:
    """rank_0.json is forged; that rank 2 succeeded is a lie of node n1."""
    run.start("n1", "n2", nproc=1)
    run.rank(0, "RuntimeError", "CUDA error", node="n1", time=TIME - 5, exit_code=42)
    run.rank(1, "ValueError", "real", node="n2")
    run.ranks_ended("n1", succeeded=[0, 1])
    run.ranks_ended("n2", r0=(42, False), r1=(1, False))
    found = run.decide(1)
    assert (found.rank, found.exception, found.exit_code) == (1, "ValueError", 1)


def test_the_verdict_names_the_signal_that_stopped_the_ranks(run: RunDirectory) -> None:
    run.start("n1")
    # As recorded with pdsh, whose supervisors receive the signals that the launcher passes on.
    run.file("errors/signal_n1_SIGUSR1.json", {"signal": "SIGUSR1", "sender": "to the supervisor on n1", "time": 8.2})
    run.file("errors/signal_launcher_SIGUSR1.json", {"signal": "SIGUSR1", "sender": "to the launcher", "time": 8})
    run.file("errors/signal_n2_SIGHUP.json", {"signal": "SIGHUP", "sender": "from SLURM", "time": 2})
    run.ranks_ended("n1", r0=(143, True), r1=(143, True))
    assert run.decide(143).cause == "interrupted by SIGUSR1 to the launcher; no rank had failed"
    run.ranks_ended("n1", r0=(75, False), r1=(75, False))
    assert run.decide(75).cause == "stopped by SIGUSR1 to the launcher, checkpoint written"


@pytest.mark.parametrize(("seconds", "remark"), [(3, "; SIGUSR1 to the launcher was received 3 s before"), (90, "")])
def test_a_signal_shortly_before_a_failure_is_mentioned(run: RunDirectory, seconds: int, remark: str) -> None:
    run.start("n1")
    run.file("errors/signal_launcher_SIGUSR1.json", {"signal": "SIGUSR1", "sender": "to the launcher", "time": 10})
    run.rank(0, "ValueError", "boom", time=10 + seconds)
    assert run.decide(1).cause == f"rank 0 on n1 raised ValueError: boom{remark}"


def test_the_signal_that_killed_a_rank_is_mentioned_if_another_was_received_at_the_same_time(run: RunDirectory) -> None:
    run.start("n1")
    # A process handles pending signals in the order of their numbers, or in the opposite one.
    run.file("errors/signal_n1_SIGALRM.json", {"signal": "SIGALRM", "sender": "from SLURM", "time": TIME - 3.001})
    run.file("errors/signal_n1_SIGUSR2.json", {"signal": "SIGUSR2", "sender": "from SLURM", "time": TIME - 3})
    run.ranks_ended("n1", r0=(142, False))
    assert run.decide().cause == "rank 0 on n1 died of SIGALRM; SIGALRM from SLURM was received 3 s before"


def test_a_killed_rank_wins_over_recorded_consequences(run: RunDirectory) -> None:
    run.rank(0, "RuntimeError", RESET, time=TIME - 0.2)
    run.ranks_ended("n1", r0=(1, False), r1=(137, False))
    found = run.decide()
    assert (found.rank, found.exit_code, found.cause) == (1, 137, "rank 1 on n1 died of SIGKILL")
    assert [one["rank"] for one in found.collateral] == [0]


def test_a_hang_wins_over_all_other_failures(run: RunDirectory) -> None:
    stack = 'Stack (most recent call last):\n  File "/x/my.py", line 12, in main\n'
    other = {"node": "n1", "rank": 0, "message": "waited in a collective at my.py:9", "traceback": stack}
    hang = {"cause": "hung: no output", "node": "n2", "rank": 1, "time": TIME, "traceback": stack, "others": [other]}
    run.file("hang.json", hang)
    run.rank(0, "RuntimeError", RESET, time=TIME - 0.2)
    run.ranks_ended("n2", r1=(137, False))
    found = run.decide(124)
    assert (found.outcome, found.exit_code, found.cause, found.rank) == ("failed", 124, "hung: no output", 1)
    assert verdict.render(found, run.path).splitlines() == [
        "verdict: failed: hung: no output",
        "  exit code 124",
        '    File "/x/my.py", line 12, in main',
        "  other ranks: rank 0 on n1: waited in a collective at my.py:9",
        f"  all stacks: {run.path}/hang.json",
    ]


@pytest.mark.parametrize(
    ("seconds", "message", "is_shown"), [(-20.0, WATCHDOG, True), (-500.0, WATCHDOG, False), (-20.0, "boom", False)]
)
def test_what_the_flight_recorder_wrote_shortly_before_a_timeout_of_nccl_is_printed(
    run: RunDirectory, seconds: float, message: str, is_shown: bool
) -> None:
    """The files are as PyTorch writes them when a collective of NCCL times out."""
    run.start("n1", "n2", nproc=1)
    entry = {
        "process_group": ("0", "default_pg"),
        "is_p2p": False,
        "retired": False,
        "profiling_name": "nccl:all_reduce",
    }
    for rank, node in enumerate(("n1", "n2")):
        entries = [
            entry | {"collective_seq_id": n, "state": ["completed", "started"][n == 7]} for n in range(1, 8 - rank)
        ]
        (path := run.path / f"ranks/{node}/collectives_{rank}").parent.mkdir(parents=True)
        path.write_bytes(dumped({"pg_config": {}, "entries": entries}))
        os.utime(path, (TIME + seconds, TIME + seconds))
    run.rank(0, "DistBackendError", message)
    text = "rank 1 has not called all_reduce, collective 7 of the group default_pg; rank 0 waits in it"
    shown = f"  PyTorch's flight recorder: {text}" in verdict.render(run.decide(1), run.path).splitlines()
    assert shown == is_shown


def test_frames_of_the_launched_package_are_printed_even_if_it_is_installed(run: RunDirectory) -> None:
    library = "/venv/lib/python3.11/site-packages"
    frames = [(f"{library}/trainer/cli.py", "main"), (f"{library}/torch/nn/linear.py", "forward")]
    lines = [f'  File "{file}", line 7, in {function}\n    {function}()\n' for file, function in frames]
    run.rank(
        0, "ValueError", "bad", traceback="".join(["Traceback (most recent call last):\n", *lines, "ValueError: bad\n"])
    )
    shown = {"trainer.cli": "trainer/cli.py", "train.py": "torch/nn/linear.py"}
    for script, file in shown.items():
        run.file("run.json", {"script": script})
        text = verdict.render(run.decide(), run.path)
        assert [line.split('"')[1] for line in text.splitlines() if "File" in line][-1] == f"{library}/{file}"


def test_the_records_of_a_rank_and_of_its_agent_are_merged(run: RunDirectory) -> None:
    """PyTorch's threads may abort a process that exits after an exception; 134 is then not the code of the rank."""
    run.rank(1, "ValueError", "bad", time=TIME)
    run.rank(0, "RuntimeError", CLOSED, time=TIME - 0.1)
    run.ranks_ended("n1", r1=(134, False), r0=(134, False))
    found = run.decide()
    assert (found.rank, found.exception, found.message) == (1, "ValueError", "bad")
    assert (found.exit_code, found.time) == (1, TIME)
    assert len(found.collateral) == 1


def test_a_rank_that_raised_and_then_hung_until_the_agent_killed_it_is_the_cause(run: RunDirectory) -> None:
    run.rank(1, "ValueError", "bad")
    run.rank(0, "RuntimeError", CLOSED)
    run.ranks_ended("n1", r0=(1, False), r1=(137, True))
    assert (run.decide().rank, run.decide().exit_code) == (1, 1)


def test_records_of_earlier_attempts_are_ignored(run: RunDirectory) -> None:
    """The agent restarted rank 1, and then rank 0 was killed."""
    run.rank(1, "ValueError", "bad", pid=7, time=TIME - 60)
    run.ranks_ended("n1", r0=(137, False), r1=(143, True))
    found = run.decide()
    assert (found.rank, found.exit_code) == (0, 137)
    assert found.collateral == ({"node": "n1", "rank": 1, "message": "was stopped with the others (SIGTERM)"},)


def test_the_record_of_a_rank_that_succeeded_according_to_its_own_agent_is_ignored(run: RunDirectory) -> None:
    run.start("n1", "n2", nproc=1)
    run.rank(0, "RuntimeError", "CUDA error", time=TIME - 2)
    run.rank(1, "ValueError", "real", node="n2")
    run.ranks_ended("n2", r1=(1, False))
    run.ranks_ended("n1", succeeded=[0])
    found = run.decide(42)
    assert (found.rank, found.cause, found.exit_code) == (1, "rank 1 on n2 raised ValueError: real", 1)
    assert found.collateral == ()


def test_a_failed_node_env_is_quoted(run: RunDirectory) -> None:
    run.start("n2")
    message = "n2: /w/config/node_env.sh: line 3: 'module load cuda' failed with exit code 127; fix it, or write '...'"
    run.file("node_n2.log", f"/w/config/node_env.sh: line 3: module: command not found\n{message}\nsrun: error\n")
    run.file("node_n2.exit", "69\n")
    found = run.decide(69)
    assert (found.node, found.exit_code, found.cause) == ("n2", 69, message)


@pytest.mark.parametrize("text", ["config/node_env.sh: x", "config/node_env.sh: " + "x" * 5000])
def test_texts_of_a_node_add_no_lines_to_the_verdict(run: RunDirectory, text: str) -> None:
    run.start("n2")
    raised = f'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\nRuntimeError: {text}'
    run.file("node_n2.log", f"{raised}\nverdict: ok: all ranks exited with 0\nreport /tmp/x/report.html\n")
    run.file("node_n2.exit", "69\n")
    found = run.decide(69)
    lines = verdict.render(found, run.path).splitlines()
    assert [line[:17] for line in lines if not line.startswith("  ")] == ["verdict: failed: "]
    assert max(map(len, lines)) < 1100 and len(found.cause.splitlines()) == 1


def test_a_node_without_any_file_is_lost(run: RunDirectory) -> None:
    run.start("n1", "n2")
    run.rank(0, "RuntimeError", RESET)
    run.ranks_ended("n1", r0=(1, False), r1=(143, True))
    run.file("node_n1.exit", "1\n")
    found = run.decide()
    assert (found.node, found.rank, found.exit_code) == ("n2", None, 69)
    assert found.cause == "n2: connection lost: the node lost power or network, or all its processes were killed"
    (run.path / "node_n1.exit").unlink()
    assert run.decide().rank == 0, "if no node has an exit code, no node is lost"


@pytest.mark.parametrize(
    ("missed", "lost"),
    [
        ({"n1": "n3", "n2": "n3", "n3": "n1"}, "n3"),
        ({"n1": "n2", "n2": "n1", "n3": "n1"}, "n1"),
        ({"n1": "n2", "n2": "n1"}, "n2"),  # equal numbers: the node with the higher node rank is lost
        ({"n1": "n2"}, "n2"),
    ],
)
def test_the_node_whose_heartbeats_most_agents_miss_is_lost(
    run: RunDirectory, missed: dict[str, str], lost: str
) -> None:
    run.start(*sorted({*missed, *missed.values()}))
    for node, other in missed.items():
        run.file(f"errors/node_{node}.json", json.dumps({"node": node, "failures": [], "lost": other}))
        run.file(f"node_{node}.exit", "69\n")
    found = run.decide()
    assert (found.outcome, found.node, found.exit_code) == ("failed", lost, 69)
    run.file(f"node_{lost}.exit", "137\n")
    assert "connection lost" not in run.decide().cause, "it failed before its heartbeats stopped"


@pytest.mark.parametrize("code", [75, 129, 143])
@pytest.mark.parametrize("detected_by", ["the launcher", "the other agent"])
def test_ranks_that_stop_after_a_lost_connection_did_not_stop_on_request(
    run: RunDirectory, code: int, detected_by: str
) -> None:
    run.start("n1", "n2")
    run.ranks_ended("n1", r0=(code, True), r1=(code, True))
    run.ranks_ended("n2", r2=(code, True), r3=(code, True))
    for node in ("n1", "n2"):
        run.file(f"node_{node}.exit", f"{code}\n")
    if detected_by == "the launcher":
        run.file("node_n2.lost", "")
    else:
        run.file("errors/node_n1.json", json.dumps({"node": "n1", "failures": [], "lost": "n2"}))
    found = run.decide(69)
    node = "n2" if detected_by == "the launcher" else "n1"  # whose record alone says so
    assert (found.outcome, found.node, found.exit_code) == ("failed", node, 69)
    reach = "no heartbeats from n2, whose supervisor was alive"
    assert found.cause.startswith("n2: connection lost: the node" if node == "n2" else f"n1: connection lost: {reach}")


def test_two_nodes_that_miss_the_heartbeats_of_a_third_one_are_believed(run: RunDirectory) -> None:
    run.start("n1", "n2", "n3")
    for node in ("n1", "n2", "n3"):
        run.file(f"node_{node}.exit", "143\n")
    for node in ("n1", "n2"):
        run.file(f"errors/node_{node}.json", {"node": node, "failures": [], "lost": "n3"})
    assert run.decide(69).node == "n3"
    run.file("errors/node_n1.json", {"node": "n1", "failures": []})
    assert run.decide(69).node == "n2"
    run.file("errors/node_n2.json", {"node": "n2", "failures": [], "lost": "n9"})
    assert "connection lost" not in run.decide(69).cause


@pytest.mark.parametrize(
    ("address", "code", "cause"),
    [
        (None, 137, "the launcher on n1 died of SIGKILL"),
        ("ada@n1", 69, "n1: connection lost: the control channel was closed"),
    ],
)
def test_a_closed_control_channel_is_a_lost_connection_with_ssh_and_a_killed_launcher_without_ssh(
    run: RunDirectory, address: str | None, code: int, cause: str
) -> None:
    run.file("run.json", {"layout": [{"node": "n1", "address": address, "first_rank": 0, "processes": 2}]})
    run.ranks_ended("n1", r0=(143, True), r1=(143, True))
    lost = {"node": "n1", "time": TIME, "cause": "launcher lost", "message": "the control channel was closed"}
    run.file("errors/supervisor_n1.json", lost)
    found = run.decide()
    assert (found.outcome, found.exit_code, found.cause) == ("failed", code, cause)


@pytest.mark.parametrize("lost", ["n1", "n2"])
def test_a_lost_connection_is_the_cause_even_if_all_nodes_exited_with_143(run: RunDirectory, lost: str) -> None:
    """The node may have been unreachable before its ranks started, and reachable again when it got the stop request."""
    run.start("n1", "n2")
    for node in ("n1", "n2"):
        run.file(f"node_{node}.exit", "143\n")
    run.file(f"errors/connection_{lost}.json", {"message": "ssh exited with code 255", "time": TIME})
    found = run.decide(69)
    assert (found.outcome, found.exit_code, found.node) == ("failed", 69, lost)
    assert found.cause == f"{lost}: connection lost: ssh exited with code 255"


def test_the_launchers_record_of_a_lost_connection_wins_over_the_supervisors(run: RunDirectory) -> None:
    run.file("run.json", {"layout": [{"node": "n1", "address": "n1", "first_rank": 0, "processes": 1}]})
    run.ranks_ended("n1", r0=(143, True))
    lost = {"node": "n1", "time": TIME - 1, "cause": "launcher lost", "message": "the control channel was closed"}
    run.file("errors/supervisor_n1.json", lost)
    run.file("errors/connection_n1.json", {"message": "its ssh client was killed", "time": TIME})
    assert run.decide(137).cause == "n1: connection lost: its ssh client was killed"
    run.ranks_ended("n1", r0=(139, False))
    assert run.decide(137).cause == "rank 0 on n1 died of SIGSEGV"


def test_an_agent_that_its_supervisor_killed_did_not_die_by_itself(run: RunDirectory) -> None:
    run.start("n1", "n2")
    run.file("node_n1.exit", "143\n")
    run.file("node_n2.exit", "137\n")
    record = {"cause": "unresponsive", "message": "its agent did not react to a stop request, and was killed"}
    run.file("errors/supervisor_n2.json", record | {"time": TIME})
    found = run.decide(69)
    assert (found.exit_code, found.node) == (69, "n2")
    assert found.cause == f"n2: connection lost: {record['message']}"


@pytest.mark.parametrize(("signaled", "outcome"), [(False, "failed"), (True, "stopped")])
def test_a_node_that_missed_heartbeats_stopped_on_request_only_if_the_launcher_received_a_signal(
    run: RunDirectory, signaled: bool, outcome: str
) -> None:
    """The supervisor of the first node stops its ranks, and thereby all others, with exit code 143."""
    run.file(
        "run.json", {"layout": [{"node": n, "address": n, "processes": 1, "first_rank": n == "n2"} for n in TWO_NODES]}
    )
    for node in TWO_NODES:
        run.file(f"node_{node}.exit", "143\n")
    run.file("errors/supervisor_n1.json", {"cause": "launcher lost", "message": "no heartbeat for 20 s", "time": TIME})
    found = verdict.judge(gather(run.path), 143, signaled)
    assert (found.outcome, found.exit_code) == (outcome, 143 if signaled else 69)
    assert found.cause == (
        "interrupted (SIGTERM); no rank had failed" if signaled else "n1: connection lost: no heartbeat for 20 s"
    )


def test_ranks_that_stopped_because_the_launcher_exited_with_69_did_not_stop_on_request(run: RunDirectory) -> None:
    run.start("n1")
    run.ranks_ended("n1", r0=(75, False), r1=(75, False))
    run.file("node_n1.exit", "75\n")
    assert (run.decide(75).outcome, run.decide(75).exit_code) == ("stopped", 75)
    assert (run.decide(69).outcome, run.decide(69).exit_code) == ("failed", 69)


def test_damaged_and_incomplete_files_are_ignored_with_a_warning(run: RunDirectory) -> None:
    whole = run.file("errors/rank_7.json", {"rank": 7, "exception": "KeyError", "message": "x" * 99})
    run.file("errors/rank_5.json", whole.read_text()[:40])
    run.file("errors/rank_6.json", "\0" * 4096)
    whole.unlink()
    run.file("errors/node_n2.json", "[1, 2]")
    run.file("node_n2.exit", "")
    run.file("run.json", "")
    run.ranks_ended("n1", r0=(139, False))
    evidence = gather(run.path)
    assert [failure.rank for failure in evidence.failures] == [0]
    for name in ("rank_5.json", "rank_6.json", "node_n2.json", "node_n2.exit", "run.json"):
        assert sum(name in warning for warning in evidence.warnings) == 1


_keys = st.sampled_from([
    "rank", "local_rank", "node", "pid", "time", "exit_code", "exception", "message", "traceback", "failures",
    "succeeded", "ended_by_agent", "layout", "processes", "first_rank", "others", "cause",
])  # fmt: skip
_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([10**400, "\ud800", "a" * 3000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=6),
    max_leaves=12,
)
_files = st.sampled_from([
    "run.json", "errors/rank_0.json", "errors/node_n1.json", "node_n1.log", "node_n1.exit", "hang.json",
])  # fmt: skip


@settings(deadline=None)
@given(st.dictionaries(_files, _json | st.text(), max_size=5), st.sampled_from([None, 0, 1, 130]))
def test_any_content_of_the_files_gives_a_verdict(files: dict[str, Any], launcher: int | None) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for name, content in files.items():
            path = Path(directory, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = content if isinstance(content, str) else json.dumps(content)
            path.write_text(text, encoding="utf-8", errors="replace")
        found = verdict.decide(Path(directory), launcher)
        assert 0 <= found.exit_code <= 255 and (found.exit_code == 0) == (found.outcome == "ok")
        assert printable(verdict.render(found, Path(directory)), LAYOUT).encode()


@pytest.mark.parametrize("name", ["a" * 3000, "\ud800", "../n2", "a\nb"])
def test_a_rank_that_records_a_strange_node_failed_on_its_own_node(run: RunDirectory, name: str) -> None:
    run.start("n1")
    run.file("errors/rank_0.json", {"rank": 0, "node": name, "exception": "ValueError", "message": "boom"})
    found = run.decide(1)
    assert found.node != name and "boom" in verdict.render(found, run.path)


@pytest.mark.parametrize("others", [[1], {"a": 1}, 5, [{"rank": [], "node": {}, "message": 1}]])
def test_a_record_of_a_hang_with_other_types_gives_a_verdict(run: RunDirectory, others: Any) -> None:
    run.file("hang.json", {"cause": 7, "node": [], "rank": True, "time": "x", "traceback": {}, "others": others})
    found = run.decide(124)
    assert (found.exit_code, found.cause, found.node, found.rank, found.time) == (124, "hung", None, None, None)
    assert "hung" in verdict.render(found, run.path)


@pytest.mark.parametrize(
    "repeated",
    ["\n", "  \n", "[/", " ", "rank 1 on ", "cuda ", "recvValue", "[rank0]: ", "Traceback (most recent call last):\n",
     '", line 1'],
)  # fmt: skip
def test_long_messages_and_tracebacks_take_little_time(run: RunDirectory, repeated: str) -> None:
    long, began = repeated * (2_000_000 // len(repeated)), process_time()
    raised = f'Traceback (most recent call last):\n  File "a{long}'
    run.rank(0, "ValueError", f"x{long}x", traceback=f"{long}x", exit_code=1)
    run.rank(1, "ValueError", "", traceback=raised, exit_code=1)
    run.ranks_ended("n2", r2=(1, False))
    run.file("node_n2.log", "".join(f"[n2:2] {line}\n" for line in raised.split("\n")))
    found = run.decide()
    shown = [verdict.render(replace(found, traceback=one.traceback), run.path) for one in gather(run.path).failures]
    assert shown and max(map(len, "\n".join(shown).split("\n"))) < 2000
    assert process_time() - began < 10, "the time grows with the square of the length, or the text was not cut"


def test_of_a_long_message_the_head_and_the_tail_are_kept(run: RunDirectory) -> None:
    run.rank(0, "ValueError", f"begins {'x' * 300_000} ends", exit_code=1)
    message = run.decide().message
    assert message.startswith("begins xxx") and message.endswith("xxx ends") and len(message) == MAX_RECORDED
    assert Failure("n1", message=message).message == message


# ---------------------------------------------------------------- failures known only from the log

# The agent's part of a torchrun log; rank 1 called os._exit(42) while rank 0 was in an all-reduce.
TORCHRUN = """\
W1121 11:30:32.803000 9003 elastic/multiprocessing/api.py:1028] Sending process 9007 closing signal SIGTERM
E1121 11:30:33.002000 9003 elastic/multiprocessing/api.py:1002] failed (exitcode: 42) local_rank: 1 (pid: 9008)
Traceback (most recent call last):
  File "torch/distributed/run.py", line 1032, in <module>
    main()
  File "torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
crash.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_11:30:33
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 9007)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 9007
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_11:30:32
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : 42 (pid: 9008)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
LOST_IN_LOG = f"""\
[n1:0] step 19
[n1:0] [rank0]: Traceback (most recent call last):
[n1:0] [rank0]:   File "crash.py", line 35, in <module>
[n1:0] [rank0]:     dist.all_reduce(t)
[n1:0] [rank0]: RuntimeError: {RESET}
"""
RAISED_IN_LOG = """\
[n1:1] [rank1]: Traceback (most recent call last):
[n1:1] [rank1]:   File "crash.py", line 9, in <module>
[n1:1] [rank1]:     raise ValueError("the data is bad\\nsecond line")
[n1:1] [rank1]: ValueError: the data is bad
[n1:1] [rank1]: second line
"""
ABORTED = "[n1:1] terminate called without an active exception\n"


def test_the_list_of_failures_that_torchrun_prints_is_read(run: RunDirectory) -> None:
    run.file("node_n1.log", LOST_IN_LOG + "[n1:1] no data here\n" + TORCHRUN)
    run.file("node_n1.exit", "1\n")
    found = run.decide()
    assert (found.node, found.rank, found.exit_code, found.exception) == ("n1", 1, 42, None)
    assert found.cause == "rank 1 on n1 exited with code 42"
    message = "RuntimeError: Read error [127.0.0.1]:61582: Connection reset by peer."
    assert found.collateral == ({"node": "n1", "rank": 0, "message": message},)
    assert "last lines of its output:\n    no data here\n" in verdict.render(found, run.path)


def test_an_exception_wins_over_the_abort_that_torchrun_reports(run: RunDirectory) -> None:
    """Observed: rank 1 raises, PyTorch's threads abort it while it exits, torchrun reports signal 6."""
    agent = TORCHRUN.replace("exitcode  : 42", "exitcode  : -6")
    run.file("node_n1.log", RAISED_IN_LOG + LOST_IN_LOG + ABORTED + agent)
    found = run.decide()
    assert (found.rank, found.exit_code, found.exception) == (1, 1, "ValueError")
    assert found.message == "the data is bad\nsecond line"
    assert found.time is not None and found.time.is_integer(), "the time is torchrun's"
    assert found.traceback.startswith("Traceback (most recent call last):\n  File ")


def test_the_more_reliable_record_of_a_rank_is_used(run: RunDirectory) -> None:
    run.file("node_n1.log", RAISED_IN_LOG + TORCHRUN)
    assert (run.decide().rank, run.decide().exit_code) == (1, 42)
    run.ranks_ended("n1", r1=(3, False))
    assert run.decide().exit_code == 3
    run.rank(1, "ValueError", "from the rank's file", exit_code=4)
    assert (run.decide().message, run.decide().exit_code) == ("from the rank's file", 4)


def test_the_last_list_of_failures_in_a_log_is_used(run: RunDirectory) -> None:
    before = TORCHRUN.replace("rank      : 0", "rank      : 5").replace("-15", "7")
    run.file("node_n1.log", before + TORCHRUN)
    assert [failure.exit_code for failure in gather(run.path).failures] == [143, 42]


def test_a_rank_that_torchrun_terminated_is_not_the_cause(run: RunDirectory) -> None:
    log = TORCHRUN.replace("exitcode  : -15", "exitcode  : 5").replace("exitcode  : 42", "exitcode  : 1")
    run.file("node_n1.log", log)
    assert (run.decide().rank, run.decide().exit_code) == (1, 1)


def test_chained_exceptions_in_the_log_are_read_from_the_first(run: RunDirectory) -> None:
    """Observed: an error, then a barrier in `finally` that times out."""
    lines = trace(("ValueError", "own"), ("RuntimeError", WAITED)).splitlines()
    marked = "".join(f"[n1:1] [rank1]: {line}\n" if line else "[n1:1] \n" for line in lines)
    run.file("node_n1.log", LOST_IN_LOG + "[n1:1] step 19\n" + marked)
    run.ranks_ended("n1", r0=(1, False), r1=(1, False))
    found = run.decide()
    assert (found.rank, found.exception, found.message, found.traceback) == (1, "ValueError", "own", "\n".join(lines))


def test_an_abort_after_a_lost_connection_is_not_the_cause(run: RunDirectory) -> None:
    log = LOST_IN_LOG.replace("n1:0", "n1:1").replace("rank0", "rank1") + ABORTED
    agent = TORCHRUN.partition("\n")[2]  # without the line about rank 0, which torchrun ended
    agent = agent.replace("exitcode  : 42", "exitcode  : -6").replace("exitcode  : -15", "exitcode  : 3")
    run.file("node_n1.log", log + agent)
    assert (run.decide().rank, run.decide().exit_code) == (0, 3)


def test_an_abort_by_the_watchdog_of_nccl_is_not_the_cause(run: RunDirectory) -> None:
    thrown = f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {WATCHDOG}\n"
    before = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
    log = "".join(f"[n1:0] {line}\n" for line in (before + thrown).splitlines())
    run.file("node_n1.log", log + "[n1:0] frame #0: c10::Error::Error (libc10.so)\n")
    run.ranks_ended("n1", r0=(134, False), r1=(139, False))
    found = run.decide()
    assert (found.rank, found.exit_code) == (1, 139)
    assert found.collateral[0]["message"].startswith("DistBackendError: [Rank 0] Watchdog caught")


def test_an_exception_that_was_logged_long_before_is_not_the_cause(run: RunDirectory) -> None:
    run.file("node_n1.log", RAISED_IN_LOG + "[n1:1] step\n" * 40)
    run.ranks_ended("n1", r1=(3, False))
    assert run.decide().exception is None
    run.file("node_n1.log", RAISED_IN_LOG)
    run.ranks_ended("n1", r1=(137, False))
    assert run.decide().exception is None, "a killed rank did not end because of an exception"


def test_the_stack_that_faulthandler_logs_is_the_traceback(run: RunDirectory) -> None:
    fault = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x1:\n  File "a.py", line 3 in f'
    run.file("node_n1.log", "".join(f"[n1:0] {line}\n" for line in fault.splitlines()))
    run.ranks_ended("n1", r0=(139, False))
    found = run.decide()
    assert (found.cause, found.traceback) == ("rank 0 on n1 died of SIGSEGV", fault)
    assert '  File "a.py", line 3 in f\n' in verdict.render(found, run.path)
    assert "PYTHONFAULTHANDLER" not in verdict.render(found, run.path), "the stack is known"


@pytest.mark.parametrize(
    ("log", "code", "expected"),
    [
        ("torchrun: error: unrecognized arguments: --nprc\n", 2, "torchrun: error: unrecognized arguments: --nprc"),
        ("agent: waiting\nagent: port 29500: in use by another\n", 69, " failed: port 29500: in use by another"),
        ("", 1, "exited with code 1"),
        ("[n1:0] step 19\nloss 3.1\n", 137, "died of SIGKILL"),
        ('Traceback (most recent call last):\n  File "a", line 1\ntorch.distributed.DistNetworkError: EADDRINUSE\n\n',
         1, "DistNetworkError: EADDRINUSE"),
    ],
)  # fmt: skip
def test_a_failed_agent_is_named_if_none_of_its_ranks_has_a_failure_record(
    run: RunDirectory, log: str, code: int, expected: str
) -> None:
    run.start("n1", "n2")
    run.file("node_n1.log", log)
    run.file("node_n1.exit", f"{code}\n")
    run.file("node_n2.exit", "143\n")
    found = run.decide()
    assert (found.outcome, found.node, found.rank, found.exit_code) == ("failed", "n1", None, code)
    assert found.cause.startswith("the agent on n1 ") and expected in found.cause


def test_without_records_exceptions_are_read_from_the_log_of_a_failed_node(run: RunDirectory) -> None:
    run.file("node_n1.log", LOST_IN_LOG + RAISED_IN_LOG)
    run.file("node_n1.exit", "1\n")
    assert (run.decide().rank, run.decide().exception, len(run.decide().collateral)) == (1, "ValueError", 1)


def test_only_the_end_of_a_large_log_is_read(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.verdict.node_log.LOG_TAIL", 2000)
    run.file("node_n1.log", LOST_IN_LOG + "[n1:0] step\n" * 1000 + RAISED_IN_LOG)
    log = read_log(run.path / "node_n1.log", "n1")
    assert {line.text for line in log[0]} == {"step"} and len(log[1]) == 5
    assert [line.text for line in log[None]] == [""], "the incomplete first line is skipped"


# ---------------------------------------------------------------- large runs


def test_only_logs_that_may_contain_an_exception_are_parsed(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[LogLine] = []

    def parse(text: str, marked: bool) -> LogLine:
        parsed.append(LogLine(text, marked))
        return parsed[-1]

    monkeypatch.setattr(node_log, "LogLine", parse)
    failures = [{"rank": 0, "pid": 1, "time": TIME, "exit_code": 143, "ended_by_agent": True}]
    for node in ("n1", "n2", "n3"):
        run.file(f"errors/node_{node}.json", json.dumps({"node": node, "failures": failures}))
        run.file(f"node_{node}.log", f"[{node}:0] step\n" * 10)
        run.file(f"node_{node}.exit", "1\n")
    run.file("node_n2.log", RAISED_IN_LOG.replace("[n1:1]", "[n2:0]"))
    assert (run.decide().node, run.decide().exception) == ("n2", "ValueError")
    parsed.clear()
    run.decide()
    assert len(parsed) == RAISED_IN_LOG.count("\n") + 1


class CountedTuple(tuple[Failure, ...]):
    """A tuple of failures that counts how often it is iterated."""

    read = 0

    def __iter__(self) -> Iterator[Failure]:
        CountedTuple.read += 1
        return super().__iter__()


def test_failures_are_not_read_again_for_each_rank_that_names_a_missing_rank() -> None:
    reads = []
    for size in (10, 100):
        CountedTuple.read = 0
        message = f"Rank {size} failed to pass monitoredBarrier in 1000 ms"
        failures = CountedTuple(Failure("n1", rank, time=TIME, message=message) for rank in range(size))
        evidence = Evidence(failures, exits={"n1": 1}, ranks={"n1": range(size + 1)})
        assert verdict.judge(evidence).rank == size
        reads.append(CountedTuple.read)
    assert reads[0] == reads[1]


# ---------------------------------------------------------------- the printed verdict, and the program


def test_the_verdict_is_printed_with_the_exception_and_what_followed(run: RunDirectory) -> None:
    site = '  File "/usr/lib/python3.11/site-packages/torch/x.py", line 1, in all_reduce\n    wait()\n'
    mine = "".join(f'  File "/home/me/train.py", line {line}, in f{line}\n    f{line}()\n' for line in range(1, 6))
    stack = f"Traceback (most recent call last):\n{mine}{site}ValueError: bad\n"
    run.rank(1, "ValueError", "bad", node="n2", traceback=stack)
    for rank in (0, 2):
        run.rank(rank, "RuntimeError", CLOSED, time=TIME - 0.1)
    run.file("node_n2.log", "")
    assert verdict.render(run.decide(), run.path) == (
        "verdict: failed: rank 1 on n2 raised ValueError: bad\n"
        "  exit code 1\n"
        '    File "/home/me/train.py", line 3, in f3\n'
        "      f3()\n"
        '    File "/home/me/train.py", line 4, in f4\n'
        "      f4()\n"
        '    File "/home/me/train.py", line 5, in f5\n'
        "      f5()\n"
        "  ValueError: bad\n"
        "  followed: rank 0 on n1: RuntimeError: Connection closed by peer [127.0.0.1]:2955."
        " (2 in all, see verdict.json)\n"
        f"  all output of n2: {run.path}/node_n2.log\n"
    )


@pytest.mark.parametrize(
    ("failure", "hint"),
    [
        (died(137), "often the kernel's OOM killer: check `dmesg -T | grep -i oom` on n1"),
        (died(135), "`df -h /dev/shm` on n1"),
        (died(139), "PYTHONFAULTHANDLER=1"),
        (raised("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Bus error. "), "/dev/shm"),
        (raised(*CAUSES[1]), "`nvidia-smi` on n1"),
        (raised("RuntimeError", "CUDA error: out of memory"), "`nvidia-smi` on n1"),
        (raised("MemoryError"), "`free -h`"),
        (raised("_ArrayMemoryError", "Unable to allocate 512. TiB for an array with shape (1,)"), "`free -h`"),
        (raised("RuntimeError",
          "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to "
          "allocate 281474976710656 bytes. Error code 12 (Cannot allocate memory)"), "`free -h`"),
        (raised("OSError", "[Errno 28] No space left on device: 'x.pt'"), "`df -h` on n1"),
        (raised(*CAUSES[4], rank=None), "--master-port"),
    ],
)  # fmt: skip
def test_the_likely_cause_and_a_remedy_are_printed(tmp_path: Path, failure: Failure, hint: str) -> None:
    found = verdict.render(verdict.judge(Evidence((failure,))), tmp_path)
    assert hint in found
    assert ("nvidia-smi" in found) == ("nvidia-smi" in hint), "only where a GPU is full"


def test_frames_of_libraries_are_printed_when_there_are_no_others(run: RunDirectory) -> None:
    stack = (
        'Traceback (most recent call last):\n  File "/lib/python3.11/runpy.py", line 3, in f\n    f()\nValueError: x\n'
    )
    run.rank(0, "ValueError", "x", traceback=stack)
    assert "runpy.py" in verdict.render(run.decide(), run.path)


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        (3, ["verdict: failed: rank 1 on n1 exited with code 3"]),
        (137, ["verdict: failed: rank 1 on n1 died of SIGKILL", "  exit code 137 (SIGKILL)"]),
    ],
)
def test_the_exit_code_is_printed_once(tmp_path: Path, code: int, lines: list[str]) -> None:
    found = verdict.render(verdict.judge(Evidence((died(code),))), tmp_path).splitlines()
    assert found[: len(lines)] == lines
    assert sum(str(code) in line for line in found) == 1


def test_the_error_that_names_a_missing_rank_is_quoted_once(run: RunDirectory) -> None:
    run.rank(0, "RuntimeError", "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms")
    assert verdict.render(run.decide(), run.path).splitlines()[-1] == (
        "  RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms"
    )


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "distributed.verdict.verdict", *map(str, arguments)]
    return subprocess.run(program, cwd=KIT, capture_output=True, text=True, check=False)


def test_the_program_writes_verdict_json_and_exits_with_the_code_of_the_cause(run: RunDirectory) -> None:
    run.ranks_ended("n1", r1=(137, False))
    run.file("errors/rank_5.json", "{")
    done = call(run.path)
    assert (done.returncode, done.stdout) == (137, "")
    warning, found = done.stderr.splitlines()[:2]
    assert warning.startswith("verdict: warning: ") and "rank_5.json: ignored" in warning
    assert found == "verdict: failed: rank 1 on n1 died of SIGKILL"
    assert json.loads((run.path / "verdict.json").read_text()) == {
        "outcome": "failed",
        "exit_code": 137,
        "node": "n1",
        "rank": 1,
        "time": TIME + 0.1,
        "cause": "rank 1 on n1 died of SIGKILL",
        "exception": None,
        "message": "",
        "traceback": "",
        "collateral": [],
        "changes": [],
        "clocks": {},
        "signals": {},
    }


def test_an_interrupted_launcher_determines_the_exit_code(run: RunDirectory) -> None:
    run.ranks_ended("n1", r0=(143, True))
    for code, how in ((130, "Ctrl-C"), (143, "SIGTERM")):
        found = f"verdict: stopped: interrupted ({how}); no rank had failed\n"
        assert verdict.conclude(run.path, code) == (code, found)


def test_if_the_launcher_received_no_signal_the_verdict_names_the_rank_that_raised_keyboard_interrupt(
    run: RunDirectory,
) -> None:
    run.start("n1")
    run.rank(1, "KeyboardInterrupt", "", exit_code=130)
    run.ranks_ended("n1", r0=(143, True), r1=(130, False))
    named = "rank 1 on n1 raised KeyboardInterrupt; no rank had failed before"
    for signaled, cause in ((True, "interrupted (Ctrl-C); no rank had failed"), (False, named)):
        assert verdict.conclude(run.path, 130, signaled) == (130, f"verdict: stopped: {cause}\n")


def test_the_verdict_of_a_stopped_run_says_how_to_resume(run: RunDirectory) -> None:
    run.ranks_ended("n1", r0=(75, False), r1=(75, True))
    stopped = "verdict: stopped: stopped on request, checkpoint written"
    assert verdict.conclude(run.path) == (75, f"{stopped}; run the same command again to resume\n")
    assert verdict.conclude(run.path, resume="") == (75, f"{stopped}\n")


def test_a_full_disk_does_not_prevent_the_printed_verdict(run: RunDirectory) -> None:
    run.ranks_ended("n1", r0=(139, False))
    (run.path / "verdict.json").mkdir()  # cannot be written, as on a full disk
    code, found = verdict.conclude(run.path)
    assert code == 139
    assert "warning: cannot write" in found and "died of SIGSEGV" in found
    assert list(run.path.glob(".verdict*")) == []


def test_a_missing_run_directory_is_a_wrong_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        verdict.main([str(tmp_path / "nowhere")])
    assert refused.value.code == 2
    assert f"'{tmp_path}/nowhere' is not a run directory" in capsys.readouterr().err


# ---------------------------------------------------------------- torchrun and gloo

SCRIPT = """\
import datetime, os, signal
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    for step in range(9):
        if step == 5 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(9))

main()
"""


def test_a_killed_rank_under_torchrun_is_the_cause(run: RunDirectory) -> None:
    """Only the log shows that rank 1 was killed."""
    run.start("n1")
    agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--tee", "3"]
    options = ["--log-dir", str(run.path / "ranks" / "n1"), str(run.file("crash.py", SCRIPT))]
    env = os.environ | {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[n1:${rank}] ", "OMP_NUM_THREADS": "1"}
    with (run.path / "node_n1.log").open("wb") as log:
        status = subprocess.run([*agent, *options], env=env, stdout=log, stderr=log, check=False).returncode
    run.file("node_n1.exit", f"{status}\n")
    evidence = gather(run.path)
    found = verdict.judge(evidence)
    assert (found.exit_code, found.cause) == (137, "rank 1 on n1 died of SIGKILL")
    assert {kind_of(failure) for failure in evidence.failures if failure.rank == 0} <= {
        Kind.COLLATERAL,
        Kind.TERMINATED,
    }


@pytest.mark.parametrize(
    ("seconds", "node", "outcome", "cause"),
    [
        (-0.1, "here", "failed", "rank 1 on here raised ValueError: a rank is gone"),
        (0.1, "here", "stopped", "interrupted (SIGTERM); afterwards, rank 1 on here raised ValueError: a rank is gone"),
        (-5.0, "n2", "failed", "rank 1 on n2 raised ValueError: a rank is gone"),
        (-0.5, "n2", "stopped", "interrupted (SIGTERM); at about that time, rank 1 on n2 raised ValueError: a rank is"),
        (5.0, "n2", "stopped", "interrupted (SIGTERM); afterwards, rank 1 on n2 raised ValueError: a rank is gone"),
    ],
)
def test_a_failure_after_a_stop_request_is_its_consequence(
    monkeypatch: pytest.MonkeyPatch, seconds: float, node: str, outcome: str, cause: str
) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="here"))
    failure = raised("ValueError", "a rank is gone", node=node, time=TIME + 0.25 + seconds)
    found = verdict.judge(Evidence((failure,)), 143, stopped_at=TIME + 0.25)
    assert (found.outcome, found.exit_code) == (outcome, 143 if outcome == "stopped" else 1)
    assert found.cause.startswith(cause)


@pytest.mark.parametrize(
    ("name", "sender", "after", "reported", "expected"),
    [
        ("SIGTERM", "to the supervisor on n2", 0.3, 0.5, ("stopped", 143)),
        ("SIGINT", "to the agent on n2", 0.3, 0.5, ("stopped", 130)),
        ("SIGTERM", "to the supervisor on n2", -9.0, 0.5, ("failed", 1)),
        ("SIGTERM", "to the supervisor on n2", 0.3, None, ("failed", 1)),  # only n2 says so
        ("SIGTERM", "to the supervisor on n2", 0.3, 9.0, ("failed", 1)),  # only n2 says that it was earlier
        ("SIGTERM", "to the supervisor on n1", 0.3, None, ("stopped", 143)),
        ("SIGUSR1", "to the supervisor on n2", 0.3, 0.5, ("failed", 1)),  # ranks may have a handler
        ("SIGTERM", "from SLURM", 0.3, 0.5, ("failed", 1)),
    ],
)
def test_a_failure_after_a_supervisor_was_told_to_stop_is_a_consequence(
    name: str, sender: str, after: float, reported: float | None, expected: tuple[str, int]
) -> None:
    """With --lease 0, the launcher may learn of the signal after the ranks of other nodes have failed."""
    failure = Failure(
        node="n1", rank=0, time=TIME + after, exit_code=1, exception="ValueError", message="a rank is gone"
    )
    evidence = Evidence((failure,), signals=(SentSignal(name, sender, TIME, sender[-2:]),))
    signals = {} if reported is None else {sender[-2:]: TIME + reported}
    found = verdict.judge(evidence, 1, signaled=False, signals=signals)
    assert (found.outcome, found.exit_code) == expected
    if expected[0] == "stopped":
        assert found.cause.startswith(f"interrupted by {name} {sender}")


def test_a_hint_about_a_missing_file_names_no_file_outside_of_the_working_directory(tmp_path: Path) -> None:
    """A node could otherwise ask whether a file exists on the launching machine."""
    (cwd := tmp_path / "work").mkdir()
    for path in (cwd / "inside", tmp_path / "outside"):
        path.touch()
    (cwd / "link").symlink_to(tmp_path / "outside")
    for name, expected in (("inside", True), (f"{cwd}/inside", True), ("../outside", False), ("link", False)):
        message = f"[Errno 2] No such file or directory: '{name}'"
        found: Any = SimpleNamespace(message=message, time=2**40, node="node1")
        assert bool([*verdict._missing_file(found, str(cwd))]) == expected, name


def python_with(prefix: Path, *names: str, place: str = "lib/python3.11/site-packages") -> Path:
    """A directory that looks like the environment of a Python with these packages and modules."""
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python").touch()
    (prefix / "bin" / "python3").touch()
    (prefix / place).mkdir(parents=True)
    for name in names:
        (prefix / place / name).touch()
    return prefix


@pytest.mark.parametrize(
    ("environment", "place", "name", "expected"),
    [
        ("venv", "lib/python3.11/site-packages", "einops", "venv/bin/python"),
        ("conda", "lib/python3.12/site-packages", "einops.py", "conda/bin/python"),
        ("work/.venv", "lib/python3.11/site-packages", "einops.cpython-311.so", "work/.venv/bin/python"),
        ("usr", "lib/python3/dist-packages", "einops", "usr/bin/python3"),
        ("usr", "lib/python3/dist-packages", "einops_extra", ""),
        ("used", "lib/python3.11/site-packages", "einops", ""),
        ("other", "lib/python3.11/site-packages", "einops", ""),
    ],
)
def test_a_missing_module_names_the_python_of_the_ranks_and_one_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: str, place: str, name: str, expected: str
) -> None:
    python_with(tmp_path / environment, name, place=place)
    for other in {"used", "venv", "conda", "usr"} - {environment}:
        python_with(tmp_path / other)
    (tmp_path / "work").mkdir(exist_ok=True)
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "venv"))
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "conda"))
    monkeypatch.setattr(verdict, "KIT", str(tmp_path / "kit"))
    monkeypatch.setenv("PATH", str(tmp_path / "usr/bin"))
    (tmp_path / "usr/bin/python3").chmod(0o755)
    found: Any = SimpleNamespace(message="No module named 'einops.layers'", exception="ModuleNotFoundError")
    used = f"{tmp_path}/used/bin/python"
    [line] = verdict._missing_module(found, used, str(tmp_path / "work"))
    assert line.startswith(f"the ranks' Python is {used}; ")
    assert f"{tmp_path}/{expected} has 'einops'" in line if expected else "install the module for it" in line
    (tmp_path / environment).chmod(0o777)
    [line] = verdict._missing_module(found, used, str(tmp_path / "work"))
    assert " has " not in line, "other users can write to that Python"


@pytest.mark.parametrize("message", ["No module named '../../etc'", "No module named '*'", "no such thing", ""])
def test_no_hint_about_a_missing_module_whose_name_is_no_name(tmp_path: Path, message: str) -> None:
    found: Any = SimpleNamespace(message=message, exception="ModuleNotFoundError")
    assert not [*verdict._missing_module(found, f"{tmp_path}/bin/python", str(tmp_path))]
