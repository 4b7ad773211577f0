"""A cluster that computes wrongly, slowly or not at all must not pass for a good one.

The smoke test's values must betray every way in which a collective can go wrong, its figures must be those
of nccl-tests, and whatever happens to a rank (a wrong sum, a freeze, a crash, no start at all), the report
comes in time, names that rank, and ends in a code other than 0. Its ranks are real processes over gloo; what
is broken in them is broken for real, and stand-ins are called so.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import forked
import pytest
import torch
import torch.distributed as dist
from forked import ForkedRun, RankResult
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distributed.files import write_json
from distributed.smoke import checks
from distributed.smoke import report as smoke_report
from distributed.smoke.bandwidth import Link
from distributed.smoke.report import Fault, Findings, Measured, Pace
from distributed.terminal import plain
from distributed.torch import refuse_shared_devices
from distributed.world import World

CPU = torch.device("cpu")

QUICK = ("--max-bytes", "4K", "--seconds", "0.1", "--timeout", "120")
NAMES = ["answer", *checks.CHECKS, "links", "bandwidth", "pace"]


# ---------------------------------------------------------------- real ranks


Trouble = Callable[[int], None]  # arranges what is to go wrong on a rank, before it begins


def as_rank(rank: int, words: tuple[str, ...], trouble: Trouble) -> None:
    """The work of one process of a launch."""
    trouble(rank)
    sys.exit(checks.main(words))


def well(rank: int) -> None:
    pass


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., ForkedRun]]:
    """start(size, *words, trouble=..., only=ranks): ranks of one launch, ended when the tests are."""
    with ExitStack() as stack:

        def start(size: int, *words: str, trouble: Trouble = well, only: tuple[int, ...] = ()) -> ForkedRun:
            return stack.enter_context(forked.launched(size, as_rank, words, trouble, only=only))

        yield start


def report_of(told: RankResult) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(told.out)
    return found


def check_of(told: RankResult, name: str) -> dict[str, Any]:
    return next(check for check in report_of(told)["checks"] if check["name"] == name)


def at(step: str, act: Callable[[], None]) -> None:
    """Act when this rank begins a step."""
    begin = checks.Here.begin

    def begin_and_act(here: checks.Here, now: str, lasting: float = 0.0) -> None:
        begin(here, now, lasting)
        if now == step:
            act()

    checks.Here.begin = begin_and_act  # type: ignore[method-assign, assignment]


def no_pace() -> None:
    """Where it is not what is tested: two rounds, and whatever they take is no fault."""
    checks.ROUNDS, checks.SLOW = 2, {"cpu": 1e9}


# ---------------------------------------------------------------- all is well


def test_two_ranks_that_are_well(start: Callable[..., ForkedRun]) -> None:
    told = start(2, "--json", *QUICK).results()
    assert [one.code for one in told.values()] == [0, 0], told
    assert told[1].out == "", "one rank speaks"
    report = report_of(told[0])
    assert set(report) == {"verdict", "world", "checks", "bandwidth", "links", "ranks"}
    assert report["verdict"] == "ok"
    assert report["world"] == {
        "size": 2, "nodes": 1, "launcher": "environment", "backend": "gloo", "torch": torch.__version__,
    }  # fmt: skip
    statuses = [(name, "skipped" if name == "links" else "ok") for name in NAMES]
    assert [(check["name"], check["status"]) for check in report["checks"]] == statuses
    assert [(one["rank"], one["host"], one["device"]) for one in report["ranks"]] == [
        (0, "host0", "cpu"),
        (1, "host1", "cpu"),
    ]


def test_the_bandwidths_are_those_of_the_times(start: Callable[..., ForkedRun]) -> None:
    told = start(3, "--json", *QUICK, trouble=paceless).results()
    speeds = report_of(told[0])["bandwidth"]
    assert {one["collective"] for one in speeds} == set(checks.MOVES)
    assert {one["bytes"] for one in speeds} == {1020, 4092}, "divided among three ranks, in fours"
    for one in speeds:
        assert one["algorithm_gb_per_second"] == pytest.approx(one["bytes"] / one["seconds"] / 1e9)
        factor = smoke_report.BUS_FACTOR[one["collective"]](3)
        assert one["bus_gb_per_second"] == pytest.approx(factor * one["algorithm_gb_per_second"])


def paceless(rank: int) -> None:
    no_pace()


def test_one_process_alone_says_what_it_could_not_try(start: Callable[..., ForkedRun]) -> None:
    told = start(1, *QUICK).results()[0]
    assert told.code == 0
    assert "skipped point_to_point  needs two ranks" in told.out
    assert "ok      all_reduce " in told.out
    assert told.out.splitlines()[-1] == "verdict: ok, 1 rank works together as it should"


# ---------------------------------------------------------------- wrong results


def adds_one_too_many(rank: int) -> None:
    if rank == 1:
        right = dist.all_reduce
        dist.all_reduce = lambda tensor, *a, **k: (right(tensor, *a, **k), tensor[-1:].add_(1))


def leaves_one_out(rank: int) -> None:
    """Every rank gets the sum without rank 1's share."""
    right = dist.all_reduce
    dist.all_reduce = lambda tensor, *a, **k: right(tensor.zero_() if rank == 1 else tensor, *a, **k)


def narrows(rank: int) -> None:
    right = checks.reduce_scatter_single

    def narrow(out: torch.Tensor, mine: torch.Tensor) -> None:
        short = out.bfloat16()
        right(short, mine.bfloat16())
        out.copy_(short)

    checks.reduce_scatter_single = narrow


def swaps(rank: int) -> None:
    right = checks.all_gather_single

    def swapped(out: torch.Tensor, mine: torch.Tensor) -> None:
        right(out, mine)
        out.copy_(out.view(-1, len(mine)).flip(0).flatten())

    checks.all_gather_single = swapped


@pytest.mark.parametrize(
    ("trouble", "check", "wrong", "case"),
    [
        (adds_one_too_many, "all_reduce", [1], "float32, 1 elements, element 0"),
        (leaves_one_out, "all_reduce", [0, 1], "float32, 1 elements, element 0"),
        (narrows, "reduce_scatter", [0, 1], "float32, 1 elements, element 0"),
        (swaps, "all_gather", [0, 1], "float32, 1 elements, element 0"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_result_is_named(
    start: Callable[..., ForkedRun], trouble: Trouble, check: str, wrong: list[int], case: str
) -> None:
    told = start(2, "--json", *QUICK, trouble=trouble).results()
    assert [one.code for one in told.values()] == [1, 1]
    found = check_of(told[0], check)
    assert [(fault["rank"], fault["host"]) for fault in found["faults"]] == [(rank, f"host{rank}") for rank in wrong]
    fault = found["faults"][0]
    assert fault["case"] == case
    assert fault["expected"] != fault["got"].split()[0]
    assert check_of(told[0], "broadcast")["status"] == "ok", "the others are still checked"
    assert check_of(told[0], "bandwidth")["status"] == "skipped", "ranks that add wrongly cannot agree on a time"


def walks_through(rank: int) -> None:
    dist.barrier = lambda: None  # type: ignore[assignment, misc]


def test_a_barrier_that_holds_nobody_is_named(start: Callable[..., ForkedRun]) -> None:
    """Rank 0 is the first to come late, so rank 1 finds the book without its name."""
    told = start(2, "--json", *QUICK, trouble=walks_through).results()
    assert [one.code for one in told.values()] == [1, 1]
    fault = next(fault for fault in check_of(told[0], "barrier")["faults"] if fault["rank"] == 1)
    assert (fault["expected"], fault["got"]) == ("2", "1 (1 of 1 elements are wrong)")


# ---------------------------------------------------------------- slow, frozen, gone


def is_slowed(rank: int) -> None:
    """Rank 1 is stopped four fifths of the time, as on a machine that is far too busy."""
    checks.ROUNDS = 8
    if rank == 1:
        at("pace", lambda: brake(os.getpid()))


def brake(pid: int) -> None:
    program = (
        "import os, signal, sys, time\n"
        "pid = int(sys.argv[1])\n"
        "while os.getppid() == pid:\n"
        "    os.kill(pid, signal.SIGSTOP); time.sleep(0.04)\n"
        "    os.kill(pid, signal.SIGCONT); time.sleep(0.01)\n"
        "    print(flush=True)\n"
    )
    started = subprocess.Popen([sys.executable, "-S", "-c", program, str(pid)], stdout=subprocess.PIPE)
    assert started.stdout and started.stdout.readline()


def test_a_slow_rank_is_named(start: Callable[..., ForkedRun]) -> None:
    told = start(2, "--json", *QUICK, trouble=is_slowed).results()
    assert [one.code for one in told.values()] == [1, 1], told
    found = check_of(told[0], "pace")
    assert [(fault["rank"], fault["host"]) for fault in found["faults"]] == [(1, "host1")]
    ranks = report_of(told[0])["ranks"]
    assert [one["slow"] for one in ranks] == [False, True]
    assert ranks[1]["factor"] > 2


IMPATIENT = ("--json", "--max-bytes", "4K", "--seconds", "0.1", "--timeout", "10")


def freezes(rank: int) -> None:
    no_pace()
    checks.GRACE = 3.0
    if rank == 1:
        at("broadcast", lambda: os.kill(os.getpid(), signal.SIGSTOP))


def host_freezes(rank: int) -> None:
    """Rank 0 holds the store at which the ranks meet: whoever asks it waits for ever."""
    no_pace()
    checks.GRACE, checks.LEAVING = 3.0, 4.0
    if rank == 0:
        at("broadcast", lambda: os.kill(os.getpid(), signal.SIGSTOP))


def dies(rank: int) -> None:
    no_pace()
    checks.GRACE = 3.0
    if rank == 1:
        at("all_gather", lambda: os.kill(os.getpid(), signal.SIGKILL))


@dataclass
class Waits:
    """Runs that wait for somebody in vain, all at the same time."""

    frozen: ForkedRun
    host_frozen: ForkedRun
    dead: ForkedRun
    missing: ForkedRun


@pytest.fixture(scope="module", autouse=True)  # while they wait, other tests work
def waits(start: Callable[..., ForkedRun]) -> Waits:
    return Waits(
        frozen=start(3, *IMPATIENT, trouble=freezes),
        host_frozen=start(2, *IMPATIENT, trouble=host_freezes),
        dead=start(2, *IMPATIENT, trouble=dies),
        missing=start(2, *IMPATIENT, only=(0,)),
    )


def test_a_frozen_rank_is_named_with_the_place_where_it_was_last_seen(waits: Waits) -> None:
    told = waits.frozen.results(1)
    assert [told[0].code, told[2].code] == [1, 1]
    (fault,) = check_of(told[0], "answer")["faults"]
    assert (fault["rank"], fault["host"]) == (1, "host1")
    assert fault["got"] == "none in 10 s; last seen in broadcast"
    assert check_of(told[0], "pace") == {
        "name": "pace", "status": "skipped", "summary": "a check before it failed",
        "remedy": None, "faults": [],
    }  # fmt: skip


def test_a_rank_that_dies_is_named(waits: Waits) -> None:
    told = waits.dead.results()
    assert [told[0].code, told[1].code] == [1, -signal.SIGKILL]
    (fault,) = check_of(told[0], "answer")["faults"]
    assert (fault["rank"], fault["host"]) == (1, "host1")
    assert fault["got"].endswith("last seen in all_gather")


def test_a_frozen_store_ends_the_others_too(waits: Waits) -> None:
    told = waits.host_frozen.results(0)[1]
    assert told.code == 1
    assert "rank 1 on host1: expected broadcast to end, got no end in 14 s: the store at 127.0.0.1:" in told.err


def test_a_rank_that_never_comes_ends_the_others(waits: Waits) -> None:
    told = waits.missing.results()[0]
    assert told.code == 1
    (fault,) = check_of(told, "join")["faults"]
    assert fault["expected"] == "2 ranks that meet"
    assert "rank 1 of 2 did not come" in fault["got"]


def shares_its_gpu(rank: int) -> None:
    """A stand-in for two ranks that find themselves on one GPU: no such machine is needed to see the answer."""

    def process_group(*_: Any) -> NoReturn:
        refuse_shared_devices({0: ("host0", "GPU-5f1c"), 1: ("host0", "GPU-5f1c")})
        raise AssertionError("not refused")

    checks.process_group = process_group  # type: ignore[attr-defined, assignment]


def test_two_ranks_on_one_gpu_are_refused(start: Callable[..., ForkedRun], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    told = start(2, "--json-file", str(file), *QUICK, trouble=shares_its_gpu).results()
    assert [one.code for one in told.values()] == [1, 1]
    assert told[0].out == ""
    report = json.loads(file.read_text())
    assert report["verdict"] == "fault"
    (fault,) = report["checks"][0]["faults"]
    assert "rank 0 and rank 1 share one GPU on host0" in fault["got"]
    assert list(tmp_path.iterdir()) == [file], "written beside and renamed"


# ---------------------------------------------------------------- between nodes


def on_a_node_of_its_own(rank: int) -> None:
    no_pace()
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": str(rank), "NNODES": "3"}


def on_a_slow_node(rank: int) -> None:
    """Whatever rank 2 sends comes late."""
    on_a_node_of_its_own(rank)
    if rank == 2:
        right = dist.batch_isend_irecv

        def late(both: list[dist.P2POp]) -> list[dist.Work]:
            time.sleep(0.1 if both[0].tensor.numel() >= checks.SMALLEST_LINK // 4 else 0)
            return right(both)

        dist.batch_isend_irecv = late  # type: ignore[assignment]


def test_each_link_between_nodes_is_measured_and_a_slow_node_named(start: Callable[..., ForkedRun]) -> None:
    told = start(3, "--json", "--max-bytes", "64K", "--seconds", "0.1", trouble=on_a_slow_node).results()
    assert [one.code for one in told.values()] == [1, 1, 1], told
    report = report_of(told[0])
    assert [(one["one"], one["other"]) for one in report["links"]] == [
        ("host0", "host1"), ("host0", "host2"), ("host1", "host2"),
    ]  # fmt: skip
    (fault,) = check_of(told[0], "links")["faults"]
    assert (fault["rank"], fault["host"]) == (2, "host2")
    assert check_of(told[0], "bandwidth")["status"] == "ok", "it is measured all the same"


def test_on_several_nodes_the_report_goes_into_the_folder_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = checks.Reporter(World(), CPU, "host0", checks.parse(["--json-file", "smoke.json"]))
    monkeypatch.setenv("MUSTER_RUN_DIR", str(tmp_path))
    reporter.report(smoke_report.summarise(LAUNCH, PROVED, {0: finding(0)}, Measured()))
    assert [path.name for path in tmp_path.iterdir()] == ["smoke.json"]


# ---------------------------------------------------------------- wrong calls


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--min-bytes", "3Q"], "'3Q' is not a size"),
        (["--min-bytes", "0"], "'0' is not a size"),
        (["--max-bytes", ""], "'' is not a size"),
        (["--max-bytes", "512"], "--max-bytes 512 is less than --min-bytes 1024"),
        (["--seconds", "-1"], "'-1' is not a number of seconds above 0"),
        (["--timeout", "nan"], "'nan' is not a number of seconds above 0"),
        (["--timeout", "inf"], "'inf' is not a number of seconds above 0"),
        (["--backend", "mpi"], "'mpi'"),
        (["--jso"], "--jso"),
        (["3"], "3"),
    ],
)
def test_a_wrong_call_is_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        checks.main(words)
    said = capsys.readouterr()
    assert (refused.value.code, said.out) == (2, "")
    assert says in said.err


def test_nccl_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        checks.main(["--backend", "nccl"])
    assert "no GPU here; use gloo" in capsys.readouterr().err


def test_half_an_environment_is_a_wrong_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    assert checks.main([]) == 2
    assert "RANK" in capsys.readouterr().err


# ---------------------------------------------------------------- values that betray

SIZES = st.integers(min_value=1, max_value=600)


@settings(deadline=None)
@given(size=SIZES, data=st.data())
def test_no_two_ranks_send_the_same(size: int, data: st.DataObject) -> None:
    one, other = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    same = torch.equal(checks.signature(one, 1009), checks.signature(other, 1009))
    assert same == (one == other)


@settings(deadline=None)
@given(rank=SIZES, offset=st.integers(1, 22))
def test_a_message_that_is_moved_on_is_another(rank: int, offset: int) -> None:
    values = checks.signature(rank, 1009)
    assert not torch.equal(values[offset:], values[:-offset])


@settings(deadline=None, max_examples=20)
@given(size=SIZES, seed=st.integers(0, 100))
@example(size=600, seed=0)
def test_a_sum_is_exact_in_every_type_and_any_order(size: int, seed: int) -> None:
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
    for dtype in checks.UNIT:
        case = checks.Case(0, size, 11, dtype, CPU, dist.HashStore())
        total = case.empty(11)
        for rank in order:
            total += case.exact(checks.share(rank, size, 11))
        assert torch.equal(total, case.total(11))


@settings(deadline=None)
@given(size=SIZES, data=st.data())
def test_a_sum_misses_every_rank_that_is_left_out(size: int, data: st.DataObject) -> None:
    missing = data.draw(st.integers(0, size - 1))
    assert checks.share(missing, size, 1009).any()


@pytest.mark.parametrize(
    ("dtype", "narrower"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.int64, torch.float64),
        (torch.int64, torch.int32),
    ],
)
def test_a_value_does_not_survive_a_narrower_type(dtype: torch.dtype, narrower: torch.dtype) -> None:
    values = checks.Case(0, 2, 1, dtype, CPU, dist.HashStore()).mine()
    assert not torch.equal(values.to(narrower).to(dtype), values)


@pytest.mark.parametrize(
    ("got", "expected", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([1.0, 3.0, 4.0], [1.0, 2.0, 3.0], (1, "2.0", "3.0 (2 of 3 elements are wrong)")),
        ([float("nan")], [1.0], (0, "1.0", "nan (1 of 1 elements are wrong)")),
    ],
)
def test_the_first_difference_is_told(
    got: list[float], expected: list[float], difference: tuple[int, str, str] | None
) -> None:
    assert checks.difference(torch.tensor(got), torch.tensor(expected)) == difference


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize(
    ("collective", "ranks", "bus"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 8, 0.875),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 2, 0.5),
        ("broadcast", 8, 1.0),
    ],
)
def test_bus_bandwidth_is_what_nccl_tests_say(collective: str, ranks: int, bus: float) -> None:
    """A message of 2 * 10^9 bytes in two seconds; doc/PERFORMANCE.md of nccl-tests."""
    speed = smoke_report.speed(collective, ranks, 2_000_000_000, 5, 2.0)
    assert speed.algorithm_gb_per_second == pytest.approx(1.0)
    assert speed.bus_gb_per_second == pytest.approx(bus)


def test_every_collective_that_is_timed_has_its_factor() -> None:
    assert set(checks.MOVES) == set(smoke_report.BUS_FACTOR)


@pytest.mark.parametrize(
    ("smallest", "largest", "sizes"),
    [(1024, 1024, [1024]), (1024, 16384, [1024, 4096, 16384]), (5, 79, [5, 20]), (5, 80, [5, 20, 80])],
)
def test_messages_grow_up_to_the_largest(smallest: int, largest: int, sizes: list[int]) -> None:
    assert checks.message_sizes(smallest, largest) == sizes


@pytest.mark.parametrize(("text", "size"), [("8", 8), ("1K", 1024), ("64k", 65536), ("16M", 2**24), ("1G", 2**30)])
def test_sizes_are_read_as_nccl_tests_write_them(text: str, size: int) -> None:
    assert checks.byte_size(text) == size


@pytest.mark.parametrize(
    ("size", "label"), [(8, "8"), (1020, "1020"), (1024, "1K"), (65532, "64K"), (2**26, "64M"), (2**31, "2G")]
)
def test_sizes_are_told_as_nccl_tests_write_them(size: int, label: str) -> None:
    assert smoke_report.size_label(size) == label


@pytest.mark.parametrize(
    ("good", "factors"),
    [
        ([0.5], [1.0]),
        ([0.1, 0.5], [0.2, 5.0]),
        ([0.1, 0.1, 0.3], [0.5, 0.5, 3.0]),
        ([0.1, 0.2, 0.1, 0.1], [1.0, 2.0, 1.0, 1.0]),
    ],
)
def test_a_rank_is_as_slow_as_the_others_are_fast(good: list[float], factors: list[float]) -> None:
    assert smoke_report.slowness(good) == pytest.approx(factors)


def test_a_rank_that_shares_its_core_half_of_the_time_has_good_rounds() -> None:
    assert smoke_report.good_round([0.1, 0.9] * 10) == pytest.approx(0.1)
    assert smoke_report.good_round([0.9] * 20) == pytest.approx(0.9)


# ---------------------------------------------------------------- the report

LAUNCH = {"size": 2, "nodes": 1, "launcher": "torchrun", "backend": "gloo", "torch": "2.13.0"}
PROVED = {"all_reduce": "right", "pace": "even"}
WRONG = Fault("all_reduce", 1, "node2", "5.0", "4.0 (1 of 7 elements are wrong)", "float32, 7 elements, element 3")


def finding(rank: int, *faults: Fault, done: tuple[str, ...] = ("all_reduce", "pace")) -> Findings:
    return Findings(rank, f"node{rank + 1}", "cpu", done=list(done), faults=list(faults))


def pace(rank: int, slow: bool) -> Pace:
    return Pace(rank, 0.1 if slow else 0.025, 4.0 if slow else 0.25, slow)


def test_findings_come_back_from_json_as_they_were() -> None:
    findings = replace(finding(1, WRONG), broken=True, skipped={"pace": "needs two ranks"})
    assert Findings.from_json(findings.to_json()) == findings


def test_a_wrong_result_is_told_in_one_line_with_its_remedy() -> None:
    report = smoke_report.summarise(LAUNCH, PROVED, {0: finding(0), 1: finding(1, WRONG)}, Measured())
    lines = plain(smoke_report.render(report)).splitlines()
    assert (
        "  FAULT   all_reduce      rank 1 on node2 (float32, 7 elements, element 3): "
        "expected 5.0, got 4.0 (1 of 7 elements are wrong)"
    ) in lines
    assert any(line.strip().startswith("-> --backend gloo tells") for line in lines)
    assert "  ok      pace            even" in lines
    assert lines[-1] == "verdict: FAULT in all_reduce"


def test_a_slow_rank_is_told_with_its_factor() -> None:
    measured = Measured(pace=[pace(0, False), pace(1, True)])
    report = smoke_report.summarise(LAUNCH, PROVED, {0: finding(0), 1: finding(1)}, measured)
    text = plain(smoke_report.render(report))
    assert (
        "rank 1 on node2: expected 25.0 ms of computing a round, as the others, got 100.0 ms: 4.0 times as long"
    ) in text
    table = text[text.index("computing alone") :].splitlines()
    assert [line.split()[0] for line in table[2:4]] == ["1", "0"], "the slowest comes first"


def test_links_are_told_the_slowest_first() -> None:
    links = [Link("node1", "node2", 9.8), Link("node1", "node3", 0.9), Link("node2", "node3", 1.1)]
    answered = {rank: finding(rank) for rank in range(3)}
    report = smoke_report.summarise(LAUNCH, {"links": "alike"}, answered, Measured(links=links))
    lines = plain(smoke_report.render(report)).splitlines()
    said = "node3: 0.9 GB/s to node1, 1.1 GB/s to node2; the others have 9.8 GB/s among themselves"
    assert f"  FAULT   links           {said}" in lines
    start = lines.index("  between nodes, the slowest 3 of 3")
    assert lines[start + 2 : start + 4] == ["  0.900  node1 - node3", "  1.100  node2 - node3"]


def test_many_faults_are_told_shortly_and_kept_wholly() -> None:
    answered = {rank: finding(rank, replace(WRONG, rank=rank)) for rank in range(9)}
    (check, _) = smoke_report.summarise(LAUNCH, PROVED, answered, Measured())["checks"]
    assert check["summary"].endswith("; and 6 more")
    assert len(check["faults"]) == 9


def test_a_check_that_was_not_reached_is_not_called_ok() -> None:
    answered = {0: finding(0, done=("all_reduce",)), 1: finding(1, done=("all_reduce",))}
    (_, check) = smoke_report.summarise(LAUNCH, PROVED, answered, Measured())["checks"]
    assert (check["status"], check["summary"]) == ("skipped", "a check before it failed")


def test_a_collective_that_grew_too_slow_leaves_a_gap_in_the_table() -> None:
    speeds = [
        smoke_report.speed(name, 2, size, 1, 0.001)
        for name, size in (("all_reduce", 1024), ("broadcast", 1024), ("broadcast", 4096))
    ]
    report = smoke_report.summarise(LAUNCH, PROVED, {0: finding(0), 1: finding(1)}, Measured(bandwidth=speeds))
    rows = [
        line.split()
        for line in plain(smoke_report.render(report)).splitlines()
        if line.strip().startswith(("1K", "4K"))
    ]
    assert rows == [["1K", "1.000", "0.001", "0.001"], ["4K", "-", "-", "0.004"]]


@pytest.mark.parametrize(("faults", "code"), [((), 0), ((WRONG,), 1)])
def test_a_written_report_is_told_again(
    faults: tuple[Fault, ...], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = smoke_report.summarise(LAUNCH, PROVED, {0: finding(0), 1: finding(1, *faults)}, Measured())
    file = tmp_path / "it's a report.json"
    write_json(file, report)
    assert smoke_report.main([str(file)]) == code
    assert capsys.readouterr().out == plain(smoke_report.render(report))
    assert smoke_report.main(["--json", str(file)]) == code
    assert json.loads(capsys.readouterr().out) == report


@pytest.mark.parametrize("text", [None, "{"])
def test_what_is_no_report_is_refused(text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        smoke_report.main([str(file)])
    assert f"'{file}' cannot be read as a report" in capsys.readouterr().err
