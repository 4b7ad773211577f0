"""The smoke test finds wrong results, slow ranks and links, and ranks that freeze, die or do not start.

The values that ranks exchange show every error of a collective, and bandwidth is defined as in nccl-tests. When a rank
has a fault, the report names that rank and is printed in time, and the exit code is not 0. Ranks are processes with
gloo, and their faults are real unless a test says otherwise.
"""

from __future__ import annotations

import json
import os
import re
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
from distributed.smoke import collective_checks, summary
from distributed.smoke.summary import Fault, Findings, Measurements, Pace
from distributed.terminal import plain
from distributed.torch import check_no_shared_devices
from distributed.world import World

CPU = torch.device("cpu")

QUICK = ("--max-bytes", "4096", "--seconds", "0.1", "--timeout", "120")
NAMES = ["reply", *collective_checks.CHECKS, "links", "bandwidth", "pace"]


# ---------------------------------------------------------------- ranks


Trouble = Callable[[int], None]  # prepares a fault on a rank before the smoke test starts


def run_rank(rank: int, arguments: tuple[str, ...], trouble: Trouble) -> None:
    trouble(rank)
    sys.exit(collective_checks.main(arguments))


def no_trouble(rank: int) -> None:
    pass


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., ForkedRun]]:
    """start(size, *arguments, trouble=..., only=...) starts a launch, which is killed after the tests.

    only: start only these ranks.
    """
    with ExitStack() as stack:

        def start(size: int, *arguments: str, trouble: Trouble = no_trouble, only: tuple[int, ...] = ()) -> ForkedRun:
            return stack.enter_context(forked.launched(size, run_rank, arguments, trouble, only=only))

        yield start


def report_of(results: RankResult) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(results.out)
    return found


def check_of(results: RankResult, name: str) -> dict[str, Any]:
    return next(check for check in report_of(results)["checks"] if check["name"] == name)


def at(step: str, act: Callable[[], None]) -> None:
    """Call act() when this rank begins this step."""
    begin = collective_checks.RankContext.begin

    def begin_and_act(context: collective_checks.RankContext, current: str, expected: float = 0.0) -> None:
        begin(context, current, expected)
        if current == step:
            act()

    collective_checks.RankContext.begin = begin_and_act  # type: ignore[method-assign, assignment]


def no_pace(rank: int = 0) -> None:
    """Make the pace check short and always successful, for tests of other checks."""
    collective_checks.PACE_ROUNDS, collective_checks.SLOW_FACTOR = 2, {"cpu": 1e9}


# ---------------------------------------------------------------- no faults


def test_two_ranks_pass(start: Callable[..., ForkedRun]) -> None:
    results = start(2, "--json", *QUICK).results()
    assert [one.code for one in results.values()] == [0, 0], results
    assert results[1].out == "", "one rank prints the report"
    report = report_of(results[0])
    assert set(report) == {"verdict", "world", "checks", "bandwidth", "ranks"}
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


def test_bandwidths_follow_from_the_times(start: Callable[..., ForkedRun]) -> None:
    results = start(3, "--json", *QUICK, trouble=no_pace).results()
    speeds = report_of(results[0])["bandwidth"]
    assert {one["collective"] for one in speeds} == set(collective_checks.COLLECTIVES)
    assert {one["bytes"] for one in speeds} == {1020, 4092}, "float32, divisible by three ranks"
    for one in speeds:
        assert one["algorithm_gb_per_second"] == pytest.approx(one["bytes"] / one["seconds"] / 1e9)
        factor = {"all_reduce": 4 / 3, "broadcast": 1}.get(one["collective"], 2 / 3)
        assert one["bus_gb_per_second"] == pytest.approx(factor * one["algorithm_gb_per_second"])


def test_a_single_rank_skips_what_needs_two(start: Callable[..., ForkedRun]) -> None:
    results = start(1, *QUICK).results()[0]
    assert results.code == 0
    assert "skipped point_to_point  needs two ranks" in results.out
    assert "ok      all_reduce " in results.out
    assert results.out.splitlines()[-1] == "verdict: ok, 1 rank passed all checks"


# ---------------------------------------------------------------- wrong results


def adds_one(rank: int) -> None:
    if rank == 1:
        original = dist.all_reduce
        dist.all_reduce = lambda tensor, *a, **k: (original(tensor, *a, **k), tensor[-1:].add_(1))


def leaves_one_out(rank: int) -> None:
    """All ranks get the sum without rank 1."""
    original = dist.all_reduce
    dist.all_reduce = lambda tensor, *a, **k: original(tensor.zero_() if rank == 1 else tensor, *a, **k)


def narrows(rank: int) -> None:
    original = collective_checks.reduce_scatter_single

    def narrow(out: torch.Tensor, mine: torch.Tensor) -> None:
        short = out.bfloat16()
        original(short, mine.bfloat16())
        out.copy_(short)

    collective_checks.reduce_scatter_single = narrow


def swaps(rank: int) -> None:
    original = collective_checks.all_gather_single

    def swapped(out: torch.Tensor, mine: torch.Tensor) -> None:
        original(out, mine)
        out.copy_(out.view(-1, len(mine)).flip(0).flatten())

    collective_checks.all_gather_single = swapped


@pytest.mark.parametrize(
    ("trouble", "check", "wrong", "case"),
    [
        (adds_one, "all_reduce", [1], "float32, 1 elements, element 0"),
        (leaves_one_out, "all_reduce", [0, 1], "float32, 1 elements, element 0"),
        (narrows, "reduce_scatter", [0, 1], "float32, 1 elements, element 0"),
        (swaps, "all_gather", [0, 1], "float32, 1 elements, element 0"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_result_is_reported(
    start: Callable[..., ForkedRun], trouble: Trouble, check: str, wrong: list[int], case: str
) -> None:
    results = start(2, "--json", *QUICK, trouble=trouble).results()
    assert [one.code for one in results.values()] == [1, 1]
    found = check_of(results[0], check)
    assert [(fault["rank"], fault["host"]) for fault in found["faults"]] == [(rank, f"host{rank}") for rank in wrong]
    fault = found["faults"][0]
    assert fault["case"] == case
    assert fault["expected"] != fault["got"].split()[0]
    assert check_of(results[0], "broadcast")["status"] == "ok", "other collectives are still checked"
    assert check_of(results[0], "bandwidth")["status"] == "skipped", "measuring relies on correct collectives"


def skips_barriers(rank: int) -> None:
    dist.barrier = lambda: None  # type: ignore[assignment, misc]


def test_a_barrier_that_does_not_wait_is_reported(start: Callable[..., ForkedRun]) -> None:
    """The check delays rank 0 at the first barrier, so rank 1 passes before rank 0 arrives."""
    results = start(2, "--json", *QUICK, trouble=skips_barriers).results()
    assert [one.code for one in results.values()] == [1, 1]
    fault = next(fault for fault in check_of(results[0], "barrier")["faults"] if fault["rank"] == 1)
    assert (fault["expected"], fault["got"]) == ("2", "1 (1 of 1 elements are wrong)")


# ---------------------------------------------------------------- slow, frozen, dead or missing ranks


def is_slowed(rank: int) -> None:
    """Rank 1 is stopped four fifths of the time, as on an overloaded machine."""
    collective_checks.PACE_ROUNDS = 8
    if rank == 1:
        at("pace", lambda: slow_down(os.getpid()))


def slow_down(pid: int) -> None:
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


def test_a_slow_rank_is_reported(start: Callable[..., ForkedRun]) -> None:
    results = start(2, "--json", *QUICK, trouble=is_slowed).results()
    assert [one.code for one in results.values()] == [1, 1], results
    found = check_of(results[0], "pace")
    assert [(fault["rank"], fault["host"]) for fault in found["faults"]] == [(1, "host1")]
    ranks = report_of(results[0])["ranks"]
    assert [one["slow"] for one in ranks] == [False, True]
    assert ranks[1]["factor"] > 2


SHORT_TIMEOUT = ("--json", "--max-bytes", "4096", "--seconds", "0.1", "--timeout", "10")


def freezes(rank: int) -> None:
    no_pace()
    collective_checks.REPLY_GRACE = 3.0
    if rank == 1:
        at("broadcast", lambda: os.kill(os.getpid(), signal.SIGSTOP))


def rank_0_freezes(rank: int) -> None:
    """Rank 0 runs the store, whose timeouts do not work while rank 0 is frozen."""
    no_pace()
    collective_checks.REPLY_GRACE, collective_checks.EXIT_TIMEOUT = 3.0, 4.0
    if rank == 0:
        at("broadcast", lambda: os.kill(os.getpid(), signal.SIGSTOP))


def dies(rank: int) -> None:
    no_pace()
    collective_checks.REPLY_GRACE = 3.0
    if rank == 1:
        at("all_gather", lambda: os.kill(os.getpid(), signal.SIGKILL))


@dataclass
class WaitingLaunches:
    """Concurrent launches whose ranks wait until the timeout."""

    frozen: ForkedRun
    rank_0_frozen: ForkedRun
    dead: ForkedRun
    missing: ForkedRun


@pytest.fixture(scope="module", autouse=True)  # other tests run while these launches wait
def waiting(start: Callable[..., ForkedRun]) -> WaitingLaunches:
    return WaitingLaunches(
        frozen=start(3, *SHORT_TIMEOUT, trouble=freezes),
        rank_0_frozen=start(2, *SHORT_TIMEOUT, trouble=rank_0_freezes),
        dead=start(2, *SHORT_TIMEOUT, trouble=dies),
        missing=start(2, *SHORT_TIMEOUT, only=(0,)),
    )


def test_a_frozen_rank_is_reported_with_its_last_step(waiting: WaitingLaunches) -> None:
    results = waiting.frozen.results(1)
    assert [results[0].code, results[2].code] == [1, 1]
    (fault,) = check_of(results[0], "reply")["faults"]
    assert (fault["rank"], fault["host"]) == (1, "host1")
    assert fault["got"] == "none in 10 s; last step: broadcast"
    assert check_of(results[0], "pace") == {
        "name": "pace", "status": "skipped", "summary": "an earlier check failed",
        "remedy": None, "faults": [],
    }  # fmt: skip


def test_a_rank_that_dies_is_reported(waiting: WaitingLaunches) -> None:
    results = waiting.dead.results()
    assert [results[0].code, results[1].code] == [1, -signal.SIGKILL]
    (fault,) = check_of(results[0], "reply")["faults"]
    assert (fault["rank"], fault["host"]) == (1, "host1")
    assert fault["got"].endswith("last step: all_gather")


def test_a_frozen_store_is_reported_by_other_ranks(waiting: WaitingLaunches) -> None:
    result = waiting.rank_0_frozen.results(0)[1]
    assert result.code == 1
    assert "rank 1 on host1: expected broadcast to finish, got no result in 14 s: the store at 127.0.0.1:" in result.err


def test_a_rank_that_does_not_start_is_reported(waiting: WaitingLaunches) -> None:
    results = waiting.missing.results()[0]
    assert results.code == 1
    (fault,) = check_of(results, "join")["faults"]
    assert fault["expected"] == "2 ranks"
    assert "rank 1 of 2 did not join" in fault["got"]


def shares_its_gpu(rank: int) -> None:
    """Simulates two ranks on one GPU."""

    def process_group(*_: Any) -> NoReturn:
        check_no_shared_devices({0: ("host0", "GPU-5f1c"), 1: ("host0", "GPU-5f1c")})
        raise AssertionError("not refused")

    collective_checks.process_group = process_group  # type: ignore[attr-defined, assignment]


def test_two_ranks_on_one_gpu_are_refused(start: Callable[..., ForkedRun], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    results = start(2, "--json-file", str(file), *QUICK, trouble=shares_its_gpu).results()
    assert [one.code for one in results.values()] == [1, 1]
    assert results[0].out == ""
    report = json.loads(file.read_text())
    assert report["verdict"] == "fault"
    (fault,) = report["checks"][0]["faults"]
    assert "rank 0 and rank 1 share one GPU on host0" in fault["got"]
    assert list(tmp_path.iterdir()) == [file], "no temporary file remains"


# ---------------------------------------------------------------- links between nodes


def on_own_node(rank: int) -> None:
    no_pace()
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": str(rank), "NNODES": "3"}


def on_a_slow_node(rank: int) -> None:
    """Rank 2 delays its messages of SMALLEST_LINK bytes or more by 0.1 s."""
    on_own_node(rank)
    if rank == 2:
        original = dist.batch_isend_irecv

        def delayed(operations: list[dist.P2POp]) -> list[dist.Work]:
            time.sleep(0.1 if operations[0].tensor.numel() >= collective_checks.SMALLEST_LINK // 4 else 0)
            return original(operations)

        dist.batch_isend_irecv = delayed  # type: ignore[assignment]


def test_links_between_nodes_are_measured_and_a_slow_node_is_reported(start: Callable[..., ForkedRun]) -> None:
    results = start(3, "--json", "--max-bytes", "65536", "--seconds", "0.1", trouble=on_a_slow_node).results()
    assert [one.code for one in results.values()] == [1, 1, 1], results
    (fault,) = check_of(results[0], "links")["faults"]
    assert (fault["rank"], fault["host"]) == (2, "host2")
    assert re.match(r"host2: .* to host[01], .* to host[01]; the others have ", fault["text"])
    assert check_of(results[0], "bandwidth")["status"] == "ok", "bandwidth is still measured"


def test_the_json_file_is_in_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = collective_checks.Reporter(World(), CPU, "host0", collective_checks.parse(["--json-file", "smoke.json"]))
    monkeypatch.setenv("MUSTER_RUN_DIR", str(tmp_path))
    reporter.report(summary.summarise(LAUNCH, SUMMARIES, {0: finding(0)}, Measurements()))
    assert [path.name for path in tmp_path.iterdir()] == ["smoke.json"]


# ---------------------------------------------------------------- wrong calls


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "mpi"], "'mpi'"),
        (["--jso"], "--jso"),
        (["3"], "3"),
    ],
)
def test_a_wrong_call_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        collective_checks.main(arguments)
    printed = capsys.readouterr()
    assert (refused.value.code, printed.out) == (2, "")
    assert message in printed.err


def test_nccl_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        collective_checks.main(["--backend", "nccl"])
    assert "this machine has no GPU; use gloo" in capsys.readouterr().err


def test_an_incomplete_environment_is_a_wrong_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    assert collective_checks.main([]) == 2
    assert "RANK" in capsys.readouterr().err


# ---------------------------------------------------------------- values of the checks

SIZES = st.integers(min_value=1, max_value=600)


@settings(deadline=None)
@given(size=SIZES, data=st.data())
def test_values_of_two_ranks_differ(size: int, data: st.DataObject) -> None:
    one, other = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    same = torch.equal(collective_checks.signature(one, 1009), collective_checks.signature(other, 1009))
    assert same == (one == other)


@settings(deadline=None)
@given(rank=SIZES, offset=st.integers(1, 22))
def test_shifted_values_differ(rank: int, offset: int) -> None:
    values = collective_checks.signature(rank, 1009)
    assert not torch.equal(values[offset:], values[:-offset])


@settings(deadline=None, max_examples=20)
@given(size=SIZES, seed=st.integers(0, 100))
@example(size=600, seed=0)
def test_sums_are_exact_in_every_type_and_order(size: int, seed: int) -> None:
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
    for dtype in collective_checks.FACTOR:
        case = collective_checks.Case(0, size, 11, dtype, CPU, dist.HashStore())
        total = case.zeros(11)
        for rank in order:
            total += case.to_tensor(collective_checks.summand(rank, size, 11))
        assert torch.equal(total, case.total(11))


@settings(deadline=None)
@given(size=SIZES, data=st.data())
def test_a_sum_without_a_rank_differs(size: int, data: st.DataObject) -> None:
    missing = data.draw(st.integers(0, size - 1))
    assert collective_checks.summand(missing, size, 1009).any()


@pytest.mark.parametrize(
    ("dtype", "narrower"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.int64, torch.float64),
        (torch.int64, torch.int32),
    ],
)
def test_values_change_in_a_narrower_type(dtype: torch.dtype, narrower: torch.dtype) -> None:
    values = collective_checks.Case(0, 2, 1, dtype, CPU, dist.HashStore()).contribution()
    assert not torch.equal(values.to(narrower).to(dtype), values)


@pytest.mark.parametrize(
    ("got", "expected", "first"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([1.0, 3.0, 4.0], [1.0, 2.0, 3.0], (1, "2.0", "3.0 (2 of 3 elements are wrong)")),
        ([float("nan")], [1.0], (0, "1.0", "nan (1 of 1 elements are wrong)")),
    ],
)
def test_differences_are_found(got: list[float], expected: list[float], first: tuple[int, str, str] | None) -> None:
    assert collective_checks.difference(torch.tensor(got), torch.tensor(expected)) == first


# ---------------------------------------------------------------- measurements


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
def test_bus_bandwidth_is_defined_as_in_nccl_tests(collective: str, ranks: int, bus: float) -> None:
    """A message of 2 * 10^9 bytes takes two seconds. The factors are from doc/PERFORMANCE.md of nccl-tests."""
    speed = summary.speed_of(collective, ranks, 2_000_000_000, 5, 2.0)
    assert speed.algorithm_gb_per_second == pytest.approx(1.0)
    assert speed.bus_gb_per_second == pytest.approx(bus)


@pytest.mark.parametrize(("largest", "sizes"), [(1024, [1024]), (16383, [1024, 4096]), (16384, [1024, 4096, 16384])])
def test_message_sizes_grow_by_a_factor_of_4(largest: int, sizes: list[int]) -> None:
    assert collective_checks.message_sizes(largest) == sizes


@pytest.mark.parametrize(
    ("size", "label"), [(8, "8"), (1020, "1020"), (1024, "1K"), (65532, "64K"), (2**26, "64M"), (2**31, "2G")]
)
def test_sizes_are_printed_as_in_nccl_tests(size: int, label: str) -> None:
    assert summary.size_label(size) == label


@pytest.mark.parametrize(
    ("seconds", "factors"),
    [
        ([0.5], [1.0]),
        ([0.1, 0.5], [0.2, 5.0]),
        ([0.1, 0.1, 0.3], [0.5, 0.5, 3.0]),
        ([0.1, 0.2, 0.1, 0.1], [1.0, 2.0, 1.0, 1.0]),
    ],
)
def test_a_slow_factor_compares_a_rank_with_the_others(seconds: list[float], factors: list[float]) -> None:
    assert summary.slow_factors(seconds) == pytest.approx(factors)


def test_a_rank_that_shares_its_core_half_of_the_time_is_not_slow() -> None:
    assert summary.lower_quartile([0.1, 0.9] * 10) == pytest.approx(0.1)
    assert summary.lower_quartile([0.9] * 20) == pytest.approx(0.9)


# ---------------------------------------------------------------- the report

LAUNCH = {"size": 2, "nodes": 1, "launcher": "torchrun", "backend": "gloo", "torch": "2.13.0"}
SUMMARIES = {"all_reduce": "right", "pace": "even"}
WRONG = Fault("all_reduce", 1, "node2", "5.0", "4.0 (1 of 7 elements are wrong)", "float32, 7 elements, element 3")


def finding(rank: int, *faults: Fault, done: tuple[str, ...] = ("all_reduce", "pace")) -> Findings:
    return Findings(rank, f"node{rank + 1}", "cpu", done=list(done), faults=list(faults))


def pace(rank: int, slow: bool) -> Pace:
    return Pace(rank, 0.1 if slow else 0.025, 4.0 if slow else 0.25, slow)


def test_findings_survive_json() -> None:
    findings = replace(finding(1, WRONG), broken=True, skipped={"pace": "needs two ranks"})
    assert Findings.from_json(findings.to_json()) == findings


def test_a_wrong_result_is_printed_in_one_line_with_a_remedy() -> None:
    report = summary.summarise(LAUNCH, SUMMARIES, {0: finding(0), 1: finding(1, WRONG)}, Measurements())
    lines = plain(summary.render(report)).splitlines()
    assert (
        "  FAULT   all_reduce      rank 1 on node2 (float32, 7 elements, element 3): "
        "expected 5.0, got 4.0 (1 of 7 elements are wrong)"
    ) in lines
    assert any(line.strip().startswith("-> run with --backend gloo") for line in lines)
    assert "  ok      pace            even" in lines
    assert lines[-1] == "verdict: FAULT in all_reduce"


def test_a_slow_rank_is_printed_with_its_factor() -> None:
    measured = Measurements(pace=[pace(0, False), pace(1, True)])
    report = summary.summarise(LAUNCH, SUMMARIES, {0: finding(0), 1: finding(1)}, measured)
    text = plain(summary.render(report))
    assert (
        "rank 1 on node2: expected 25.0 ms per round of computing, as on the others, got 100.0 ms (4.0 times as long)"
    ) in text
    table = text[text.index("compute time") :].splitlines()
    assert [line.split()[0] for line in table[2:4]] == ["1", "0"], "the slowest is first"


def test_the_summary_of_a_check_has_three_faults_and_the_number_of_the_others() -> None:
    replies = {rank: finding(rank, replace(WRONG, rank=rank)) for rank in range(9)}
    (check, _) = summary.summarise(LAUNCH, SUMMARIES, replies, Measurements())["checks"]
    assert re.findall(r"rank (\d) on", check["summary"]) == ["0", "1", "2"]
    assert check["summary"].endswith("; and 6 more")
    assert len(check["faults"]) == 9


def test_a_check_that_did_not_run_is_skipped() -> None:
    replies = {0: finding(0, done=("all_reduce",)), 1: finding(1, done=("all_reduce",))}
    (_, check) = summary.summarise(LAUNCH, SUMMARIES, replies, Measurements())["checks"]
    assert (check["status"], check["summary"]) == ("skipped", "an earlier check failed")


def test_a_bandwidth_that_was_not_measured_is_printed_as_a_dash() -> None:
    speeds = [
        summary.speed_of(name, 2, size, 1, 0.001)
        for name, size in (("all_reduce", 1024), ("broadcast", 1024), ("broadcast", 4096))
    ]
    report = summary.summarise(LAUNCH, SUMMARIES, {0: finding(0), 1: finding(1)}, Measurements(bandwidth=speeds))
    rows = [
        line.split() for line in plain(summary.render(report)).splitlines() if line.strip().startswith(("1K", "4K"))
    ]
    assert rows == [["1K", "1.000", "0.001", "0.001"], ["4K", "-", "-", "0.004"]]


@pytest.mark.parametrize(("faults", "code"), [((), 0), ((WRONG,), 1)])
def test_a_report_is_printed_from_its_file(
    faults: tuple[Fault, ...], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = summary.summarise(LAUNCH, SUMMARIES, {0: finding(0), 1: finding(1, *faults)}, Measurements())
    file = tmp_path / "it's a report.json"
    write_json(file, report)
    assert summary.main([str(file)]) == code
    assert capsys.readouterr().out == plain(summary.render(report))
    assert summary.main(["--json", str(file)]) == code
    assert json.loads(capsys.readouterr().out) == report


INVALID = {
    "number": "5", "list": "[]", "deep": "[" * 100_000, "bytes": "\udcff", "empty": "{}", "more": '{"x": 1}',
}  # fmt: skip


@pytest.mark.parametrize("text", INVALID.values(), ids=INVALID)
def test_invalid_findings_of_a_rank_are_a_fault_of_this_rank(text: str) -> None:
    found = collective_checks.read_findings(3, text.encode(errors="surrogateescape"))
    assert (found.rank, [fault.rank for fault in found.faults]) == (3, [3])
    assert str(found.faults[0]).startswith("rank 3 on ?: expected findings, got invalid data (")
    assert len(str(found.faults[0])) < 400
    assert collective_checks.read_findings(3, finding(2).to_json().encode()).faults[0].rank == 3


@pytest.mark.parametrize("text", [None, "{", *INVALID.values()])
def test_an_unreadable_report_is_refused(text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    if text is not None:
        file.write_text(text, errors="surrogateescape")
    with pytest.raises(SystemExit, match="2"):
        summary.main([str(file)])
    assert f"'{file}': cannot read the report" in capsys.readouterr().err


def test_a_report_with_an_unknown_status_and_a_fifo_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = summary.summarise(LAUNCH, SUMMARIES, {0: finding(0)}, Measurements())
    report["checks"][0]["status"] = "\x1b[31m"
    write_json(tmp_path / "report.json", report)
    os.mkfifo(tmp_path / "fifo")
    for name in ("report.json", "fifo"):
        with pytest.raises(SystemExit, match="2"):
            summary.main([str(tmp_path / name)])
    printed = capsys.readouterr().err
    assert r"KeyError('\x1b[31m')" in printed and "not a regular file" in printed and "\x1b" not in printed
