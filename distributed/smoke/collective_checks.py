"""Check the collectives of this launch, measure their bandwidth, and find slow ranks and links.

Every rank runs this program. It joins the process group and checks the result of each collective that training uses; a
contribution that is missing, swapped or of a narrower type changes the result. Then it times messages of growing size
and its own compute work. The ranks exchange their findings through the store, not through the collectives under test,
so that a broken or frozen rank does not prevent the report. The lowest rank that replies prints the report.

    torchrun --nproc-per-node 2 -m distributed.smoke
    srun python -m distributed.smoke --json

Exit code: 0 all checks passed, 1 a check failed, 2 wrong call or environment.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from distributed import terminal
from distributed.files import user_file, write_json
from distributed.smoke import summary
from distributed.smoke.bandwidth import Link, find_bottlenecks, rank_rounds
from distributed.smoke.summary import Fault, Findings, Measurements, Pace, Speed
from distributed.torch import device, process_group
from distributed.trust import SHARED
from distributed.world import World, WorldError

# torch 2.13 introduced these names; since then the old names warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

COUNTS = (1, 1009, 65_537)  # elements; the last two are primes, so they do not divide evenly among ranks
# A value is a small number times this factor. A narrower type loses the last bit of the value.
FACTOR = {torch.float32: 2**16 + 1, torch.bfloat16: 1, torch.int64: 2**53 + 1}
LARGEST_NUMBER = 23  # the small numbers are 1 to 23
MAX_SUMMANDS = 8  # the sum of 8 small numbers (184) is exact in every type and order

GROWTH = 4  # from one message size to the next
SMALLEST = 1024  # bytes
LARGEST = {"cpu": 64 * 2**20, "cuda": 2**30}  # bytes; links between GPUs need larger messages for full bandwidth
MAX_ITERATIONS = 1024

SMALLEST_LINK = 64 * 1024  # bytes of the first message that measures a link, if --max-bytes allows this size
LINK_SECONDS = 0.25  # for the messages of one pair of ranks
LINK_REPEATS = 10  # of the largest message, within LINK_SECONDS
LINK_ATTEMPTS = 3  # a measurement of all links is repeated while a link seems slow

PACE_ROUNDS = 40
PACE_ROUND_SECONDS = 0.025
SLOW_FACTOR = {"cpu": 2.0, "cuda": 1.5}  # times the median of the others; a CPU is shared with the system

REPLY_GRACE = 5.0  # ranks that wait for the same operation time out at most this many seconds apart
EXIT_TIMEOUT = 4 * REPLY_GRACE  # seconds to exchange findings, report and exit
SOURCE_LINE = r"^\[[^\]]*:[0-9]+\] "  # in errors: "[/pytorch/third_party/gloo/.../pair.cc:553] "
BEFORE_WATCHDOG = 0.9  # a wait ends at this share of the process group's timeout; at the timeout NCCL ends the process


class Watchdog:
    """Calls a function when a step takes too long. The store's own timeouts do not work when its host is frozen."""

    def __init__(self, on_timeout: Callable[[str, float], None]) -> None:
        self.on_timeout = on_timeout  # called in another thread, with the step and its timeout in seconds
        self.timer = threading.Timer(0, on_timeout)

    def restart(self, step: str, seconds: float) -> None:
        self.timer.cancel()
        self.timer = threading.Timer(seconds, self.on_timeout, (step, seconds))
        self.timer.daemon = True
        self.timer.start()


@dataclass
class RankContext:
    """This rank, its process group, and the current step."""

    world: World
    device: torch.device
    host: str
    store: Store
    timeout: float  # seconds
    watchdog: Watchdog
    step: str = "join"
    since: float = field(default_factory=time.monotonic)  # start of the step

    def begin(self, step: str, expected: float = 0.0) -> None:
        """Set the current step and publish it in the store. expected: duration of the step in seconds."""
        self.step, self.since = step, time.monotonic()
        self.watchdog.restart(step, expected + self.timeout + EXIT_TIMEOUT)
        self.store.set(f"at/{self.world.rank}", step)

    def synchronize(self) -> None:
        """Wait until the device is idle. Raises RuntimeError before NCCL's watchdog ends the process."""
        if self.device.type == "cuda":
            self.poll(torch.cuda.current_stream(self.device).query)

    def barrier(self) -> None:
        """Wait for all ranks. Raises RuntimeError before NCCL's watchdog ends the process."""
        work = dist.barrier(async_op=True)
        if self.device.type == "cuda":
            self.poll(work.is_completed)
        work.wait()

    def poll(self, done: Callable[[], bool]) -> None:
        limit = BEFORE_WATCHDOG * self.timeout
        deadline = time.monotonic() + limit
        while not done():
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out after {limit:g} s")


# ---------------------------------------------------------------- correct results


def signature(rank: int, count: int) -> Tensor:
    """Return `count` numbers from 1 to LARGEST_NUMBER, which differ between ranks and between elements.

    Each number is the sum of a digit of the rank in base LARGEST_NUMBER and the index of the element, modulo
    LARGEST_NUMBER, plus 1.
    """
    index = torch.arange(count)
    return 1 + (rank // LARGEST_NUMBER ** (index % 4) % LARGEST_NUMBER + index) % LARGEST_NUMBER


def summand(rank: int, size: int, count: int) -> Tensor:
    """Return what a rank adds to a sum.

    For each element, at most MAX_SUMMANDS ranks add the element of their signature. The other ranks add 0.
    """
    selected = (rank + torch.arange(count)) % math.ceil(size / MAX_SUMMANDS) == 0
    return signature(rank, count) * selected


@dataclass(frozen=True)
class Case:
    """The arguments of a check on one rank."""

    rank: int
    size: int
    count: int  # elements
    dtype: torch.dtype
    device: torch.device
    store: Store

    def to_tensor(self, numbers: Tensor) -> Tensor:
        return (numbers * FACTOR[self.dtype]).to(self.device, self.dtype)

    def contribution(self) -> Tensor:
        return self.to_tensor(signature(self.rank, self.count))

    def signatures(self) -> list[Tensor]:
        return [signature(rank, self.count) for rank in range(self.size)]

    def total(self, count: int) -> Tensor:
        return self.to_tensor(torch.stack([summand(rank, self.size, count) for rank in range(self.size)]).sum(0))

    def zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=self.dtype, device=self.device)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}, {self.count} elements"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Each check runs one collective. It returns this rank's result and the expected result.


def check_all_reduce(case: Case) -> tuple[Tensor, Tensor]:
    got = case.to_tensor(summand(case.rank, case.size, case.count))
    dist.all_reduce(got)
    return got, case.total(case.count)


def check_all_reduce_max(case: Case) -> tuple[Tensor, Tensor]:
    got = case.contribution()
    dist.all_reduce(got, op=dist.ReduceOp.MAX)
    return got, case.to_tensor(torch.stack(case.signatures()).amax(0))


def check_broadcast(case: Case) -> tuple[Tensor, Tensor]:
    roots = (0, case.size - 1)
    got = [case.contribution() for _ in roots]
    for root, tensor in zip(roots, got, strict=True):
        dist.broadcast(tensor, root)
    return torch.cat(got), case.to_tensor(torch.cat([signature(root, case.count) for root in roots]))


def check_all_gather(case: Case) -> tuple[Tensor, Tensor]:
    got = case.zeros(case.size * case.count)
    all_gather_single(got, case.contribution())
    return got, case.to_tensor(torch.cat(case.signatures()))


def check_reduce_scatter(case: Case) -> tuple[Tensor, Tensor]:
    count, got = case.size * case.count, case.zeros(case.count)
    reduce_scatter_single(got, case.to_tensor(summand(case.rank, case.size, count)))
    return got, case.total(count)[case.rank * case.count :][: case.count]


def check_all_to_all(case: Case) -> tuple[Tensor, Tensor]:
    """Each pair of ranks exchanges different messages; lengths differ between pairs."""
    lengths = [case.count + (case.rank + other) % 3 for other in range(case.size)]
    sent = [signature(case.rank * case.size + other, length) for other, length in enumerate(lengths)]
    expected = [signature(other * case.size + case.rank, length) for other, length in enumerate(lengths)]
    got = case.zeros(sum(lengths))
    dist.all_to_all_single(got, case.to_tensor(torch.cat(sent)), lengths, lengths)
    return got, case.to_tensor(torch.cat(expected))


def check_point_to_point(case: Case) -> tuple[Tensor, Tensor]:
    """Each rank sends to the next one, in a ring."""
    before, after = (case.rank - 1) % case.size, (case.rank + 1) % case.size
    got = case.zeros(case.count)
    both = [dist.P2POp(dist.isend, case.contribution(), after), dist.P2POp(dist.irecv, got, before)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return got, case.to_tensor(signature(before, case.count))


def check_barrier(case: Case) -> tuple[Tensor, Tensor]:
    """One rank is late: the others must not pass the barrier before it arrives."""
    if case.rank == COUNTS.index(case.count) % case.size:
        time.sleep(0.02)
    case.store.add(f"arrived/{case}", 1)
    dist.barrier()
    return torch.tensor([case.store.add(f"arrived/{case}", 0)]), torch.tensor([case.size])


CHECKS: dict[str, Callable[[Case], tuple[Tensor, Tensor]]] = {
    "all_reduce": check_all_reduce,
    "all_reduce_max": check_all_reduce_max,
    "broadcast": check_broadcast,
    "all_gather": check_all_gather,
    "reduce_scatter": check_reduce_scatter,
    "all_to_all": check_all_to_all,
    "point_to_point": check_point_to_point,
    "barrier": check_barrier,
}


def difference(got: Tensor, expected: Tensor) -> tuple[int, str, str] | None:
    """Return the index of the first wrong element, its expected value and its actual value; None if all are equal."""
    wrong = torch.nonzero(got != expected).flatten()
    if not len(wrong):
        return None
    first = int(wrong[0])
    return first, str(expected[first].item()), f"{got[first].item()} ({len(wrong)} of {len(got)} elements are wrong)"


def first_fault(name: str, context: RankContext) -> Fault | None:
    """Run one collective with every type and size. Returns the first wrong result of this rank."""
    found = None
    store = PrefixStore(context.step, context.store)
    for dtype, count in itertools.product(FACTOR, COUNTS):
        case = Case(context.world.rank, context.world.size, count, dtype, context.device, store)
        got, expected = CHECKS[name](case)
        context.synchronize()
        wrong = difference(got, expected)
        if wrong and not found:
            index, expected_value, actual = wrong
            found = Fault(name, context.world.rank, context.host, expected_value, actual, f"{case}, element {index}")
    return found


# ---------------------------------------------------------------- bandwidth of collectives


@dataclass(frozen=True)
class Message:
    whole: Tensor
    other: Tensor  # as large as whole
    part: Tensor  # its length is that of whole divided by the number of ranks

    @classmethod
    def of(cls, size: int, context: RankContext) -> Message:
        """Return a message of about `size` bytes, divisible by the number of ranks. zero_() allocates its memory."""
        part = max(1, size // (torch.float32.itemsize * context.world.size))
        lengths = (part * context.world.size, part * context.world.size, part)
        return cls(*(torch.empty(length, device=context.device).zero_() for length in lengths))


COLLECTIVES: dict[str, Callable[[Message], Any]] = {
    "all_reduce": lambda message: dist.all_reduce(message.whole),
    "all_gather": lambda message: all_gather_single(message.whole, message.part),
    "reduce_scatter": lambda message: reduce_scatter_single(message.part, message.whole),
    "all_to_all": lambda message: dist.all_to_all_single(message.other, message.whole),
    "broadcast": lambda message: dist.broadcast(message.whole, 0),
}


def message_sizes(largest: int) -> list[int]:
    """Return sizes in bytes from SMALLEST; each is GROWTH times the previous one."""
    sizes = [SMALLEST]
    while sizes[-1] * GROWTH <= largest:
        sizes.append(sizes[-1] * GROWTH)
    return sizes


def measure_bandwidth(context: RankContext, sizes: Sequence[int], seconds: float) -> list[Speed]:
    """Measure all collectives at all sizes, in about `seconds`. Skips larger sizes of a collective that is too slow."""
    budget = seconds / len(sizes) / len(COLLECTIVES)
    speeds: list[Speed] = []
    for name in COLLECTIVES:
        for size in sizes:
            context.begin(f"bandwidth of {name}, {summary.size_label(size)}", expected=2 * budget)
            speeds.append(measure_collective(name, Message.of(size, context), context, budget))
            if speeds[-1].seconds > budget:
                break
    return speeds


def measure_collective(name: str, message: Message, context: RankContext, seconds: float) -> Speed:
    """Warm up, then double the iterations until they take half of `seconds` on the slowest rank."""
    collective = partial(COLLECTIVES[name], message)
    elapsed(collective, 1, context)
    iterations, took = 1, reduce_seconds(elapsed(collective, 1, context), dist.ReduceOp.MAX, context)
    while took < seconds / 2 and iterations < MAX_ITERATIONS:
        iterations *= 2
        took = reduce_seconds(elapsed(collective, iterations, context), dist.ReduceOp.MAX, context)
    return summary.speed_of(name, context.world.size, message.whole.nbytes, iterations, took / iterations)


def elapsed(work: Callable[[], Any], count: int, context: RankContext) -> float:
    """Return the seconds that this rank takes to do the work `count` times after a barrier."""
    context.barrier()
    start = time.perf_counter()
    for _ in range(count):
        work()
    context.synchronize()
    return time.perf_counter() - start


def reduce_seconds(seconds: float, op: Any, context: RankContext) -> float:
    """Return the MAX or MIN of the seconds of all ranks."""
    result = torch.tensor([seconds], dtype=torch.float64, device=context.device)
    dist.all_reduce(result, op=op)
    context.synchronize()
    return result.item()


# ---------------------------------------------------------------- bandwidth between nodes


def check_links(context: RankContext, largest: int) -> list[Fault]:
    """Measure the links of all ranks to other nodes. Repeats the measurement while a link seems slow.

    A rank returns its own faults, and the first rank of a node also those of the node.
    """
    rank, ranks = context.world.rank, range(context.world.size)
    place = torch.tensor([context.world.node_rank, context.world.local_rank], device=context.device)
    places = all_gather_rows(place, context).tolist()
    nodes = itertools.groupby(sorted(ranks, key=places.__getitem__), key=lambda one: places[one][0])
    rounds = rank_rounds([list(own) for _, own in nodes])
    stored = [context.store.multi_get([f"{key}/{one}" for one in ranks]) for key in ("name", "host")]
    node_of = {name.decode(): host.decode() for name, host in zip(*stored, strict=True)}
    names = list(node_of)
    index = {pair: number for number, pair in enumerate(dict.fromkeys(itertools.chain(*rounds)))}
    speeds = torch.zeros(len(index), dtype=torch.float64, device=context.device)
    for _ in range(LINK_ATTEMPTS):
        for pairs in rounds:
            context.begin("links")
            context.barrier()
            for one, other in pairs:
                if rank in (one, other):
                    partner = other if rank == one else one
                    context.begin(f"link to {names[partner]}")
                    speed = measure_link(partner, largest, context)
                    speeds[index[one, other]] = max(speeds[index[one, other]].item(), speed)
        context.begin("links")
        dist.all_reduce(speeds, op=dist.ReduceOp.MAX)
        context.synchronize()
        links = [Link(names[one], names[other], gb) for (one, other), gb in zip(index, speeds.tolist(), strict=True)]
        bottlenecks = find_bottlenecks(links, node_of)
        if not bottlenecks:
            break
    own_names = (names[rank], context.host if context.world.local_rank == 0 else "")
    found = [one for one in bottlenecks if one.end in own_names]
    return [Fault("links", rank, context.host, one.expected, one.got, text=one.text) for one in found]


def measure_link(partner: int, largest: int, context: RankContext) -> float:
    """Return the best GB/s, per direction, of growing messages and of repetitions of the largest one."""
    size, best, seconds_left, repeats = min(SMALLEST_LINK, largest), 0.0, LINK_SECONDS, LINK_REPEATS
    exchange(partner, torch.zeros(1, device=context.device), context)  # some backends connect at the first message
    while True:
        message = torch.zeros(max(1, size // torch.float32.itemsize), device=context.device)
        start = time.perf_counter()
        exchange(partner, message, context)
        seconds = exchange(partner, torch.tensor([time.perf_counter() - start], device=context.device), context)
        best = max(best, message.nbytes / seconds / 1e9)
        seconds_left -= seconds
        if seconds <= LINK_SECONDS / GROWTH and size * GROWTH <= largest:
            size *= GROWTH
        elif repeats and seconds_left > seconds:  # repeat: another process may have used the core during the exchange
            repeats -= 1
        else:
            return best


def exchange(partner: int, sent: Tensor, context: RankContext) -> float:
    """Send and receive at the same time. Returns the larger one of sent[0] and received[0]."""
    received = torch.empty_like(sent)
    both = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    context.synchronize()
    return max(sent[0].item(), received[0].item())


def all_gather_rows(row: Tensor, context: RankContext) -> Tensor:
    """Return the tensors of all ranks as rows: ranks x elements."""
    rows = row.new_zeros(context.world.size * row.numel())
    all_gather_single(rows, row)
    context.synchronize()
    return rows.view(context.world.size, -1)


# ---------------------------------------------------------------- compute time


def measure_pace(context: RankContext) -> list[Pace]:
    """Time the same work on every rank, between barriers."""
    cuda = context.device.type == "cuda"
    side, dtype = (4096, torch.bfloat16) if cuda else (256, torch.float32)
    matrix = torch.full((side, side), 1e-3, dtype=dtype, device=context.device)
    product = partial(torch.mm, matrix, matrix)
    per_product = min(elapsed(product, 2, context) for _ in range(20)) / 2
    # A round takes PACE_ROUND_SECONDS on the fastest rank.
    products = max(1, round(PACE_ROUND_SECONDS / reduce_seconds(per_product, dist.ReduceOp.MIN, context)))
    rounds = [elapsed(product, products, context) for _ in range(PACE_ROUNDS)]
    by_rank = all_gather_rows(torch.tensor(rounds, dtype=torch.float64, device=context.device), context)
    seconds = [summary.lower_quartile(row) for row in by_rank.tolist()]
    factors, limit = summary.slow_factors(seconds), SLOW_FACTOR[context.device.type]
    return [Pace(rank, seconds[rank], factor, factor > limit) for rank, factor in enumerate(factors)]


# ---------------------------------------------------------------- all checks

NEED_TWO_RANKS = ("point_to_point", "links", "bandwidth", "pace")
# All checks in order -> the summary if there is no fault.
SUMMARIES = {
    "reply": "all ranks joined, finished and reported",
    **dict.fromkeys(CHECKS, f"{', '.join(map(dtype_name, FACTOR))}; {COUNTS[0]} to {COUNTS[-1]:,} elements"),
    "barrier": "no rank passed it early",
    "links": "no slow node and no slow link between nodes",
    "bandwidth": "see the table",
    "pace": "no slow rank",
}


def run_checks(context: RankContext, sizes: Sequence[int], seconds: float) -> tuple[Findings, Measurements]:
    """Run the checks and measurements. Stops if a collective raises an error: the process group is then unusable."""
    findings = Findings(context.world.rank, context.host, device_label(context.device), done=["reply"])
    measured = Measurements()
    try:
        for name in CHECKS:
            if begin_check(name, context, findings) and (fault := first_fault(name, context)):
                findings.faults.append(fault)
        if all_correct(context, findings):
            if begin_check("links", context, findings):
                findings.faults += check_links(context, sizes[-1])
            if begin_check("bandwidth", context, findings):
                measured.bandwidth = measure_bandwidth(context, sizes, seconds)
            if begin_check("pace", context, findings):
                measured.pace = measure_pace(context)
        context.begin("report")
    except RuntimeError as error:
        findings.broken = True
        name = context.step if context.step in SUMMARIES else findings.done[-1]
        case = context.step if context.step != name else ""
        findings.faults.append(Fault(name, context.world.rank, context.host, "a result", brief(error), case))
    return findings, measured


def all_correct(context: RankContext, findings: Findings) -> bool:
    """Return whether no rank has found a fault. The measurements rely on correct collectives."""
    context.begin("reply")
    keys = [f"correct/{rank}" for rank in range(context.world.size)]
    context.store.set(keys[findings.rank], str(not findings.faults))
    context.store.wait(keys, timedelta(seconds=context.timeout))
    return all(context.store.get(key) == b"True" for key in keys)


def begin_check(name: str, context: RankContext, findings: Findings) -> bool:
    """Begin a check. Returns False if it needs a second rank or node and this launch has only one."""
    if context.world.size == 1 and name in NEED_TWO_RANKS:
        findings.skipped[name] = "needs two ranks"
        return False
    if context.world.nodes == 1 and name == "links":
        findings.skipped[name] = "needs two nodes"
        return False
    context.begin(name)
    findings.done.append(name)
    return True


def rank_name(context: RankContext) -> str:
    """Name a rank with its GPU or, with gloo, its network interface if that is set: rank 5 on node1 (cuda:5)."""
    cuda = context.device.type == "cuda"
    hardware = str(context.device) if cuda else os.environ.get("GLOO_SOCKET_IFNAME")
    return f"rank {context.world.rank} on {context.host}" + (f" ({hardware})" if hardware else "")


def device_label(device: torch.device) -> str:
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def brief(error: BaseException) -> str:
    """Return the type and first sentence of an error, without source line, advice and stack."""
    first = next(iter(str(error).splitlines()), "").split(". ")[0]
    return f"{type(error).__name__}: {re.sub(SOURCE_LINE, '', first)}"


# ---------------------------------------------------------------- findings of all ranks


def exchange_findings(findings: Findings, context: RankContext) -> dict[int, Findings]:
    """Publish the findings of this rank. Returns the findings of all ranks that publish them in time.

    The timeout counts from the start of this rank's last step: a rank whose collective has timed out does not wait for
    the missing rank again.
    """
    keys = {rank: f"findings/{rank}" for rank in range(context.world.size)}
    context.store.set(keys[findings.rank], findings.to_json())
    in_step = time.monotonic() - context.since
    wait_for(context.store, list(keys.values()), max(0.0, context.timeout - in_step) + REPLY_GRACE)
    published = {rank: key for rank, key in keys.items() if context.store.check([key])}
    return {rank: read_findings(rank, context.store.get(key)) for rank, key in published.items()}


def read_findings(rank: int, content: bytes) -> Findings:
    """Return the findings that a rank has published; a fault of this rank if they are invalid."""
    try:
        found = Findings.from_json(content)
        if {found.rank, *(fault.rank for fault in found.faults)} != {rank}:
            raise ValueError("another rank")
        return found
    except ValueError as error:
        return Findings(rank, "?", "?", faults=[Fault("reply", rank, "?", "findings", f"invalid data ({error})")])


def wait_for(store: Store, keys: list[str], seconds: float) -> None:
    """Wait until all keys are set, or for `seconds`."""
    with suppress(dist.DistStoreError):
        store.wait(keys, timedelta(seconds=seconds))


def missing_replies(context: RankContext, replies: Mapping[int, Findings]) -> list[Fault]:
    """Return a fault for each rank that did not reply, with the rank's last step."""

    def stored(key: str) -> str:
        return context.store.get(key).decode(errors="replace") if context.store.check([key]) else "unknown"

    return [
        Fault(
            "reply", rank, stored(f"host/{rank}"), "a reply",
            f"none in {context.timeout:g} s; last step: {stored(f'at/{rank}')}",
        )
        for rank in range(context.world.size)
        if rank not in replies
    ]  # fmt: skip


def report_and_wait(context: RankContext, replies: Mapping[int, Findings], report: Callable[[], None]) -> None:
    """Let the lowest rank that replied print the report. Then all ranks exit.

    Rank 0, which may host the store, exits last.
    """
    if context.world.rank == min(replies):
        report()
        context.store.set("reported", "")
    wait_for(context.store, ["reported"], REPLY_GRACE)
    context.store.set(f"exits/{context.world.rank}", "")
    if context.world.rank == 0:
        wait_for(context.store, [f"exits/{rank}" for rank in replies], REPLY_GRACE)


# ---------------------------------------------------------------- the program


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a rank; test_distributed.sh has checked their values."""
    parser = argparse.ArgumentParser("distributed.smoke", description=__doc__.splitlines()[0], allow_abbrev=False)
    option = parser.add_argument
    option("--json", action="store_true", help="print JSON")
    option("--json-file", type=Path, metavar="PATH", help="write JSON to the run directory; print only the verdict")
    option("--backend", choices=("auto", "nccl", "gloo"), default="auto", help="default: nccl on GPUs, else gloo")
    option("--max-bytes", type=int, help="largest message, 1024 or more; default: 64 MiB, on GPUs 1 GiB")
    option("--seconds", type=float, default=10.0, help="time for the bandwidth table; default: 10")
    option("--timeout", type=float, default=60.0, help="seconds a rank waits for another; default: 60")
    options = parser.parse_args(arguments)
    if options.backend == "nccl" and not torch.cuda.is_available():
        parser.error("--backend nccl: this machine has no GPU; use gloo")
    return options


@dataclass(frozen=True)
class Reporter:
    """Prints or writes the report: of all ranks, or only of this rank if it cannot reach the others."""

    world: World
    device: torch.device
    host: str
    options: argparse.Namespace

    @property
    def launch(self) -> dict[str, Any]:
        return {
            "size": self.world.size,
            "nodes": self.world.nodes,
            "launcher": self.world.launcher,
            "backend": "nccl" if self.device.type == "cuda" else "gloo",
            "torch": torch.__version__,
        }

    @property
    def rendezvous(self) -> str:
        return f"the store at {self.world.master_addr}:{self.world.master_port}"

    def report(self, report: Mapping[str, Any]) -> None:
        if self.options.json_file:
            write_json(user_file(Path(os.environ.get("MUSTER_RUN_DIR", ""), self.options.json_file)), report, SHARED)
            sys.stderr.write(f"distributed.smoke: {terminal.plain(summary.verdict_line(report))}\n")
        else:
            summary.show(report, self.options.json)

    def fail(self, check: str, expected: str, got: str) -> NoReturn:
        """Report a fault of this rank, and exit at once."""
        fault = Fault(check, self.world.rank, self.host, expected, got)
        if self.world.rank == 0 or self.options.json_file:
            self.report(summary.summarise(self.launch, {check: ""}, {}, Measurements(), [fault]))
        if self.world.rank > 0:
            sys.stderr.write(f"distributed.smoke: {fault}\n")
            sys.stderr.flush()
            time.sleep(1)  # the launcher stops all ranks after the first exit; rank 0 must report first
        os._exit(1)

    def time_out(self, step: str, seconds: float) -> NoReturn:
        got = f"no result in {seconds:g} s: {self.rendezvous} or its host is frozen or disconnected"
        self.fail("reply", f"{step} to finish", got)


def run_in_group(context: RankContext, reporter: Reporter) -> int:
    """Run the checks and report. Returns the exit code."""
    context.store.set(f"host/{context.world.rank}", context.host)
    context.store.set(f"name/{context.world.rank}", rank_name(context))
    options = reporter.options
    sizes = message_sizes(options.max_bytes or LARGEST[context.device.type])
    findings, measured = run_checks(context, sizes, options.seconds)
    replies = exchange_findings(findings, context)
    missing = missing_replies(context, replies)
    report = summary.summarise(reporter.launch, SUMMARIES, replies, measured, missing)
    report_and_wait(context, replies, lambda: reporter.report(report))
    if missing or any(one.broken for one in replies.values()):
        os._exit(1)  # destroying the process group would wait for missing ranks
    return 0 if report["verdict"] == "ok" else 1


def main(arguments: Sequence[str]) -> int:
    """Run one rank of the smoke test. Returns the exit code."""
    options = parse(arguments)
    try:
        world = World.from_env()
        own_device = device(world, options.backend)
    except WorldError as error:
        sys.stderr.write(f"distributed.smoke: {error}\n")
        return 2
    torch.set_num_threads(1)  # with more threads the ranks of a node would slow each other
    host = os.environ.get("MUSTER_NODE") or socket.gethostname()
    reporter = Reporter(world, own_device, host, options)
    watchdog = Watchdog(reporter.time_out)
    watchdog.restart("join", options.timeout + EXIT_TIMEOUT)
    with ExitStack() as group:
        try:
            group.enter_context(process_group(world, options.backend, options.timeout))
        except RuntimeError as error:
            reporter.fail("join", f"{world.size} ranks", brief(error))
        store = PrefixStore("smoke", _get_default_store())
        try:
            return run_in_group(RankContext(world, own_device, host, store, options.timeout, watchdog), reporter)
        except dist.DistError as error:
            reporter.fail("reply", f"a connection to {reporter.rendezvous}", brief(error))
