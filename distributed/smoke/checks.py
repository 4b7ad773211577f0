"""Do the ranks of this launch compute together, how fast, and is one of them slow?

Every rank runs this. It joins the process group, runs each collective that training uses on values that
betray a missing, swapped or narrowed contribution, and checks its own result; it times messages of growing
size, and its own computing. What the ranks found goes through the store, not through the collectives under
test: a rank that is broken or frozen does not silence the others, and the lowest that answers reports for all.

    torchrun --nproc-per-node 2 -m distributed.smoke
    srun python -m distributed.smoke --json

Exit code: 0 all is well, 1 a check failed, 2 wrong call.
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
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from distributed import terminal
from distributed.files import write_json
from distributed.smoke.bandwidth import Link, rounds, slow
from distributed.smoke.report import (
    Fault,
    Findings,
    Measured,
    Pace,
    Speed,
    good_round,
    show,
    size_label,
    slowness,
    speed,
    summarise,
    verdict_line,
)
from distributed.torch import device, process_group
from distributed.world import World, WorldError

# From torch 2.13 on the old names warn; before it the new ones are not there.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

COUNTS = (1, 1009, 65_537)  # elements; primes, so that no number of ranks divides them
# A value is a small number times this unit, whose last bit is lost when the type is narrowed on the way.
UNIT = {torch.float32: 2**16 + 1, torch.bfloat16: 1, torch.int64: 2**53 + 1}
DIGITS = 23  # small numbers are 1 to 23,
MIXED = 8  # and the sum of 8 of them (184) is exact in every type, added in any order

GROWTH = 4  # from one message size to the next
LARGEST = {"cpu": 64 * 2**20, "cuda": 2**30}  # bytes; GPUs' links need larger messages to fill
MAX_ITERATIONS = 1024

SMALLEST_LINK = 64 * 1024  # bytes
LINK_SECONDS = 0.25  # for two nodes to exchange messages
LINK_REPEATS = 10  # exchanges of the largest message beyond the first, within LINK_SECONDS
LINK_PASSES = 3  # while a link seems slow
MOST_ROUNDS = 32  # in which nodes meet: more nodes do not meet all others

ROUNDS = 40
ROUND_SECONDS = 0.025
SLOW = {"cpu": 2.0, "cuda": 1.5}  # times the others' time; a CPU is shared with the system, a GPU is not

GRACE = 5.0  # seconds between the first and the last rank that give up waiting for the same thing
LEAVING = 4 * GRACE  # seconds for handing in, reading, reporting and leaving
SOURCE_LINE = r"^\[[^\]]*:[0-9]+\] "  # "[/pytorch/third_party/gloo/.../pair.cc:553] "
BEFORE_WATCHDOG = 0.9  # NCCL's watchdog ends the process at the group's timeout: report before it does


class Watch:
    """Gives up when a step takes too long: a store whose host is frozen ignores every timeout it was given."""

    def __init__(self, give_up: Callable[[str, float], None]) -> None:
        self.give_up = give_up  # with the step and its limit in seconds; on a thread of its own
        self.timer = threading.Timer(0, give_up)

    def restart(self, step: str, seconds: float) -> None:
        self.timer.cancel()
        self.timer = threading.Timer(seconds, self.give_up, (step, seconds))
        self.timer.daemon = True
        self.timer.start()


@dataclass
class Here:
    """This rank, the group it is in, and what it is doing."""

    world: World
    device: torch.device
    host: str
    store: Store
    timeout: float  # seconds
    watch: Watch
    step: str = "join"
    since: float = field(default_factory=time.monotonic)

    def begin(self, step: str, lasting: float = 0.0) -> None:
        """Note what this rank does now, for about so many seconds: the others can say where it was last seen."""
        self.step, self.since = step, time.monotonic()
        self.watch.restart(step, lasting + self.timeout + LEAVING)
        self.store.set(f"at/{self.world.rank}", step)

    def settle(self) -> None:
        """Wait until the device has done what it was asked to.

        Raises:
            RuntimeError: it has not, within the timeout.
        """
        if self.device.type == "cuda":
            self.poll(torch.cuda.current_stream(self.device).query)

    def barrier(self) -> None:
        """Wait until every rank is here; unlike a plain barrier of NCCL it gives up in time to say so."""
        work = dist.barrier(async_op=True)
        if self.device.type == "cuda":
            self.poll(work.is_completed)
        work.wait()

    def poll(self, done: Callable[[], bool]) -> None:
        limit = BEFORE_WATCHDOG * self.timeout
        deadline = time.monotonic() + limit
        while not done():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no answer in {limit:g} s")


# ---------------------------------------------------------------- is it right?


def signature(rank: int, count: int) -> Tensor:
    """Numbers 1 to 23 that tell rank and position: the rank's digits in turn, moved on by one each time."""
    index = torch.arange(count)
    return 1 + (rank // DIGITS ** (index % 4) % DIGITS + index) % DIGITS


def share(rank: int, size: int, count: int) -> Tensor:
    """What a rank adds to a sum: in each element at most MIXED ranks have their signature, the others 0."""
    turn = (rank + torch.arange(count)) % math.ceil(size / MIXED) == 0
    return signature(rank, count) * turn


@dataclass(frozen=True)
class Case:
    """One run of a collective, as one rank sees it."""

    rank: int
    size: int
    count: int  # elements
    dtype: torch.dtype
    device: torch.device
    store: Store

    def exact(self, numbers: Tensor) -> Tensor:
        return (numbers * UNIT[self.dtype]).to(self.device, self.dtype)

    def mine(self) -> Tensor:
        return self.exact(signature(self.rank, self.count))

    def everyones(self) -> list[Tensor]:
        return [signature(rank, self.count) for rank in range(self.size)]

    def total(self, count: int) -> Tensor:
        return self.exact(torch.stack([share(rank, self.size, count) for rank in range(self.size)]).sum(0))

    def empty(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=self.dtype, device=self.device)

    def __str__(self) -> str:
        return f"{short(self.dtype)}, {self.count} elements"


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Each check runs one collective, and returns what this rank got and what it should have got.


def check_all_reduce(case: Case) -> tuple[Tensor, Tensor]:
    mine = case.exact(share(case.rank, case.size, case.count))
    dist.all_reduce(mine)
    return mine, case.total(case.count)


def check_all_reduce_max(case: Case) -> tuple[Tensor, Tensor]:
    mine = case.mine()
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return mine, case.exact(torch.stack(case.everyones()).amax(0))


def check_broadcast(case: Case) -> tuple[Tensor, Tensor]:
    roots = (0, case.size - 1)
    got = [case.mine() for _ in roots]
    for root, tensor in zip(roots, got, strict=True):
        dist.broadcast(tensor, root)
    return torch.cat(got), case.exact(torch.cat([signature(root, case.count) for root in roots]))


def check_all_gather(case: Case) -> tuple[Tensor, Tensor]:
    got = case.empty(case.size * case.count)
    all_gather_single(got, case.mine())
    return got, case.exact(torch.cat(case.everyones()))


def check_reduce_scatter(case: Case) -> tuple[Tensor, Tensor]:
    whole, got = case.size * case.count, case.empty(case.count)
    reduce_scatter_single(got, case.exact(share(case.rank, case.size, whole)))
    return got, case.total(whole)[case.rank * case.count :][: case.count]


def check_all_to_all(case: Case) -> tuple[Tensor, Tensor]:
    """Any two ranks exchange messages of their own, of a length of their own."""
    lengths = [case.count + (case.rank + other) % 3 for other in range(case.size)]
    sent = [signature(case.rank * case.size + other, length) for other, length in enumerate(lengths)]
    expected = [signature(other * case.size + case.rank, length) for other, length in enumerate(lengths)]
    got = case.empty(sum(lengths))
    dist.all_to_all_single(got, case.exact(torch.cat(sent)), lengths, lengths)
    return got, case.exact(torch.cat(expected))


def check_point_to_point(case: Case) -> tuple[Tensor, Tensor]:
    """Once around the ring."""
    before, after = (case.rank - 1) % case.size, (case.rank + 1) % case.size
    got = case.empty(case.count)
    both = [dist.P2POp(dist.isend, case.mine(), after), dist.P2POp(dist.irecv, got, before)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return got, case.exact(signature(before, case.count))


def check_barrier(case: Case) -> tuple[Tensor, Tensor]:
    """One rank comes late: no other may leave the barrier before it has arrived."""
    if case.rank == COUNTS.index(case.count) % case.size:
        time.sleep(0.02)
    case.store.add(f"book/{case}", 1)
    dist.barrier()
    return torch.tensor([case.store.add(f"book/{case}", 0)]), torch.tensor([case.size])


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
    """The first element that differs: its index, what it should be, what it is; None when all are equal."""
    wrong = torch.nonzero(got != expected).flatten()
    if not len(wrong):
        return None
    first = int(wrong[0])
    extent = f"{len(wrong)} of {len(got)} elements are wrong"
    return first, str(expected[first].item()), f"{got[first].item()} ({extent})"


def first_fault(name: str, here: Here) -> Fault | None:
    """Run one collective in every type and size; the first wrong result of this rank, if there is one."""
    found = None
    for dtype, count in itertools.product(UNIT, COUNTS):
        store = PrefixStore(here.step, here.store)
        case = Case(here.world.rank, here.world.size, count, dtype, here.device, store)
        got, expected = CHECKS[name](case)
        here.settle()
        wrong = difference(got, expected)
        if wrong and not found:
            index, should_be, is_now = wrong
            found = Fault(name, here.world.rank, here.host, should_be, is_now, f"{case}, element {index}")
    return found


# ---------------------------------------------------------------- how fast?


@dataclass(frozen=True)
class Message:
    whole: Tensor
    other: Tensor  # as large as the whole
    part: Tensor  # one rank's part of it

    @classmethod
    def of(cls, size: int, here: Here) -> Message:
        """About `size` bytes, a multiple of the ranks; written to, so that the memory is really there."""
        part = max(1, size // (torch.float32.itemsize * here.world.size))
        lengths = (part * here.world.size, part * here.world.size, part)
        return cls(*(torch.empty(length, device=here.device).zero_() for length in lengths))


MOVES: dict[str, Callable[[Message], Any]] = {
    "all_reduce": lambda message: dist.all_reduce(message.whole),
    "all_gather": lambda message: all_gather_single(message.whole, message.part),
    "reduce_scatter": lambda message: reduce_scatter_single(message.part, message.whole),
    "all_to_all": lambda message: dist.all_to_all_single(message.other, message.whole),
    "broadcast": lambda message: dist.broadcast(message.whole, 0),
}


def message_sizes(smallest: int, largest: int) -> list[int]:
    """Bytes, each GROWTH times the one before."""
    sizes = [smallest]
    while sizes[-1] * GROWTH <= largest:
        sizes.append(sizes[-1] * GROWTH)
    return sizes


def measure_bandwidth(here: Here, sizes: Sequence[int], seconds: float) -> list[Speed]:
    """Time every collective on every size, in about `seconds`; one that gets too slow grows no further."""
    budget = seconds / len(sizes) / len(MOVES)
    speeds: list[Speed] = []
    for name in MOVES:
        for size in sizes:
            here.begin(f"bandwidth of {name}, {size_label(size)}", lasting=2 * budget)
            speeds.append(measure(name, Message.of(size, here), here, budget))
            if speeds[-1].seconds > budget:
                break
    return speeds


def measure(name: str, message: Message, here: Here, seconds: float) -> Speed:
    """Warm up, then send it once, twice, four times ... until the ranks agree that it lasted long enough."""
    elapsed(name, message, here, 1)
    iterations, took = 1, agreed(elapsed(name, message, here, 1), dist.ReduceOp.MAX, here)
    while took < seconds / 2 and iterations < MAX_ITERATIONS:
        iterations *= 2
        took = agreed(elapsed(name, message, here, iterations), dist.ReduceOp.MAX, here)
    return speed(name, here.world.size, message.whole.nbytes, iterations, took / iterations)


def elapsed(name: str, message: Message, here: Here, iterations: int) -> float:
    here.barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        MOVES[name](message)
    here.settle()
    return time.perf_counter() - start


def agreed(seconds: float, op: Any, here: Here) -> float:
    """The MAX (the slowest) or MIN (the fastest) of all ranks' seconds."""
    everyones = torch.tensor([seconds], dtype=torch.float64, device=here.device)
    dist.all_reduce(everyones, op=op)
    here.settle()
    return everyones.item()


# ---------------------------------------------------------------- how fast between nodes?


def measure_links(here: Here, largest: int) -> list[Link]:
    """Let the first ranks of the nodes exchange messages, two by two. When a link seems slow, all do so again."""
    leads = torch.tensor([float(here.world.local_rank == 0)], device=here.device)
    leaders = gathered(leads, here).flatten().nonzero().flatten().tolist()
    hosts = [here.store.get(f"host/{rank}").decode() for rank in leaders]
    speeds = torch.zeros(len(leaders), len(leaders), dtype=torch.float64, device=here.device)
    for attempt in range(LINK_PASSES):
        here.begin(f"links, pass {attempt + 1}", lasting=MOST_ROUNDS * LINK_SECONDS)
        for pairs in rounds(len(leaders))[:MOST_ROUNDS]:
            here.barrier()
            for one, other in pairs:
                partner = {leaders[one]: leaders[other], leaders[other]: leaders[one]}.get(here.world.rank)
                if partner is not None:
                    speeds[one, other] = max(speeds[one, other].item(), speed_to(partner, largest, here))
        dist.all_reduce(speeds, op=dist.ReduceOp.MAX)
        here.settle()
        links = [Link(hosts[one], hosts[other], speeds[one, other].item()) for one, other in speeds.nonzero().tolist()]
        if not slow(links):
            break
    return links


def speed_to(partner: int, largest: int, here: Here) -> float:
    """GB/s each way: the best of several exchanges, of growing messages and then of the largest one."""
    size, best, left, repeats = min(SMALLEST_LINK, largest), 0.0, LINK_SECONDS, LINK_REPEATS
    swap(partner, torch.zeros(1, device=here.device), here)  # the connection, where it is made at first use
    while True:
        message = torch.zeros(max(1, size // torch.float32.itemsize), device=here.device)
        start = time.perf_counter()
        swap(partner, message, here)
        seconds = swap(partner, torch.tensor([time.perf_counter() - start], device=here.device), here)
        best = max(best, message.nbytes / seconds / 1e9)
        left -= seconds
        if seconds <= LINK_SECONDS / GROWTH and size * GROWTH <= largest:
            size *= GROWTH
        elif repeats and left > seconds:  # one exchange says little where another process may have the core
            repeats -= 1
        else:
            return best


def swap(partner: int, mine: Tensor, here: Here) -> float:
    """Send and receive at once. Returns the larger of both first numbers, so that both ranks decide alike."""
    theirs = torch.empty_like(mine)
    both = [dist.P2POp(dist.isend, mine, partner), dist.P2POp(dist.irecv, theirs, partner)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    here.settle()
    return max(mine[0].item(), theirs[0].item())


def gathered(mine: Tensor, here: Here) -> Tensor:
    """Every rank's row of numbers: ranks x numbers."""
    everyones = mine.new_zeros(here.world.size * mine.numel())
    all_gather_single(everyones, mine)
    here.settle()
    return everyones.view(here.world.size, -1)


# ---------------------------------------------------------------- who is slow?


def measure_pace(here: Here) -> list[Pace]:
    """Let every rank do the same work by itself between barriers."""
    cuda = here.device.type == "cuda"
    side, dtype = (4096, torch.bfloat16) if cuda else (256, torch.float32)
    matrix = torch.full((side, side), 1e-3, dtype=dtype, device=here.device)
    one = min(seconds_of_products(2, matrix, here) for _ in range(20)) / 2
    products = max(1, round(ROUND_SECONDS / agreed(one, dist.ReduceOp.MIN, here)))  # keep the fastest rank busy so long
    rounds = []
    for _ in range(ROUNDS):
        here.barrier()
        rounds.append(seconds_of_products(products, matrix, here))
    everyones = gathered(torch.tensor(rounds, dtype=torch.float64, device=here.device), here)
    good = [good_round(own) for own in everyones.tolist()]
    limit = SLOW[here.device.type]
    return [Pace(rank, good[rank], factor, factor > limit) for rank, factor in enumerate(slowness(good))]


def seconds_of_products(count: int, matrix: Tensor, here: Here) -> float:
    start = time.perf_counter()
    for _ in range(count):
        torch.mm(matrix, matrix)
    here.settle()
    return time.perf_counter() - start


# ---------------------------------------------------------------- one rank's way through it

NEED_TWO = ("point_to_point", "links", "bandwidth", "pace")
# Every check in its order, and what is known when it found no fault.
PROVED = {
    "answer": "every rank joined, finished and reported",
    **dict.fromkeys(CHECKS, f"{', '.join(map(short, UNIT))}; {COUNTS[0]} to {COUNTS[-1]:,} elements"),
    "barrier": "nobody came through early",
    "links": "no node, and no link between two, is clearly slower than the others",
    "bandwidth": "see the table",
    "pace": "no rank is clearly slower than the others",
}


def examine(here: Here, sizes: Sequence[int], seconds: float) -> tuple[Findings, Measured]:
    """Check and measure. A collective that raises ends it: the group is of no more use."""
    findings = Findings(here.world.rank, here.host, device_label(here.device), done=["answer"])
    measured = Measured()
    try:
        for name in CHECKS:
            if begin_check(name, here, findings) and (fault := first_fault(name, here)):
                findings.faults.append(fault)
        if all_sound(here, findings):
            if begin_check("links", here, findings):
                measured.links = measure_links(here, sizes[-1])
            if begin_check("bandwidth", here, findings):
                measured.bandwidth = measure_bandwidth(here, sizes, seconds)
            if begin_check("pace", here, findings):
                measured.pace = measure_pace(here)
        here.begin("report")
    except RuntimeError as error:
        findings.broken = True
        name = here.step if here.step in PROVED else findings.done[-1]
        case = here.step if here.step != name else ""
        findings.faults.append(Fault(name, here.world.rank, here.host, "an answer", brief(error), case))
    return findings, measured


def all_sound(here: Here, findings: Findings) -> bool:
    """Whether no rank has found a fault: to measure, ranks must agree by collectives that can be trusted."""
    here.begin("answer")
    keys = [f"sound/{rank}" for rank in range(here.world.size)]
    here.store.set(keys[findings.rank], str(not findings.faults))
    here.store.wait(keys, timedelta(seconds=here.timeout))
    return all(here.store.get(key) == b"True" for key in keys)


def begin_check(name: str, here: Here, findings: Findings) -> bool:
    """Begin a step, unless it needs a second rank or node."""
    if here.world.size == 1 and name in NEED_TWO:
        findings.skipped[name] = "needs two ranks"
        return False
    if here.world.nodes == 1 and name == "links":
        findings.skipped[name] = "needs two nodes"
        return False
    here.begin(name)
    findings.done.append(name)
    return True


def device_label(where: torch.device) -> str:
    return f"{where} {torch.cuda.get_device_name(where)}" if where.type == "cuda" else str(where)


def brief(error: BaseException) -> str:
    """The first sentence of an error; what follows is advice, or the library's own stack."""
    first = next(iter(str(error).splitlines()), "").split(". ")[0]
    return f"{type(error).__name__}: {re.sub(SOURCE_LINE, '', first)}"


# ---------------------------------------------------------------- what they found together


def exchange(findings: Findings, here: Here) -> dict[int, Findings]:
    """Hand in this rank's findings and read everyone's; who has not answered in time is not among them.

    Who waits in vain in a collective gives up after the timeout, and so do the others: the time that this
    rank has spent in its last step counts.
    """
    keys = {rank: f"findings/{rank}" for rank in range(here.world.size)}
    here.store.set(keys[findings.rank], findings.to_json())
    in_step = time.monotonic() - here.since
    wait_for(here.store, list(keys.values()), max(0.0, here.timeout - in_step) + GRACE)
    answered = {rank: key for rank, key in keys.items() if here.store.check([key])}
    return {rank: Findings.from_json(here.store.get(key)) for rank, key in answered.items()}


def wait_for(store: Store, keys: list[str], seconds: float) -> None:
    with suppress(dist.DistStoreError):  # not all came in time
        store.wait(keys, timedelta(seconds=seconds))


def absences(here: Here, answered: Mapping[int, Findings]) -> list[Fault]:
    """A fault for each rank that has not answered, with the step in which it was last seen."""

    def stored(key: str) -> str:
        return here.store.get(key).decode() if here.store.check([key]) else "unknown"

    return [
        Fault(
            "answer", rank, stored(f"host/{rank}"), "an answer",
            f"none in {here.timeout:g} s; last seen in {stored(f'at/{rank}')}",
        )
        for rank in range(here.world.size)
        if rank not in answered
    ]  # fmt: skip


def report_in_turn(here: Here, answered: Mapping[int, Findings], report: Callable[[], None]) -> None:
    """The lowest rank reports, the others leave after it, and rank 0, where the store may be, leaves last."""
    if here.world.rank == min(answered):
        report()
        here.store.set("said", "")
    wait_for(here.store, ["said"], GRACE)
    here.store.set(f"left/{here.world.rank}", "")
    if here.world.rank == 0:
        wait_for(here.store, [f"left/{rank}" for rank in answered], GRACE)


# ---------------------------------------------------------------- report and leave


def byte_size(text: str) -> int:
    """8, 64K, 16M, 1G; K is 1024."""
    unit = "KMG".find(text[-1:].upper() or "-")
    number = text if unit < 0 else text[:-1]
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size in bytes, such as 1024, 64K, 16M or 1G")
    return int(number) * 1024 ** (unit + 1)


def duration(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds above 0")
    return seconds


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("distributed.smoke", description=__doc__.splitlines()[0], allow_abbrev=False)
    option = parser.add_argument
    option("--json", action="store_true", help="print one JSON object instead of the report for people")
    option("--json-file", type=Path, metavar="PATH", help="write it here, relative to the run's folder; print nothing")
    option("--backend", choices=("auto", "nccl", "gloo"), default="auto", help="default: nccl on GPUs, else gloo")
    option("--min-bytes", type=byte_size, default=1024, metavar="SIZE", help="smallest message; default: 1K")
    option("--max-bytes", type=byte_size, metavar="SIZE", help="largest message; default: 64M, on GPUs 1G")
    option("--seconds", type=duration, default=10.0, help="time for the bandwidth table; default: 10")
    option("--timeout", type=duration, default=60.0, help="seconds a rank waits for another; default: 60")
    options = parser.parse_args(words)
    if options.max_bytes is not None and options.max_bytes < options.min_bytes:
        parser.error(f"--max-bytes {options.max_bytes} is less than --min-bytes {options.min_bytes}")
    if options.backend == "nccl" and not torch.cuda.is_available():
        parser.error("--backend nccl: there is no GPU here; use gloo")
    return options


@dataclass(frozen=True)
class Reporter:
    """Prints or writes the report: of all ranks, or of this one when there is no way to agree with the others."""

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
            write_json(Path(os.environ.get("MUSTER_RUN_DIR", ""), self.options.json_file), report)
            sys.stderr.write(f"distributed.smoke: {terminal.plain(verdict_line(report))}\n")
        else:
            show(report, self.options.json)

    def fail_alone(self, check: str, expected: str, got: str) -> NoReturn:
        """Report what is wrong, and exit at once."""
        fault = Fault(check, self.world.rank, self.host, expected, got)
        if self.world.rank == 0 or self.options.json_file:
            self.report(summarise(self.launch, {check: ""}, {}, Measured(), [fault]))
        if self.world.rank > 0:
            sys.stderr.write(f"distributed.smoke: {fault}\n")
            sys.stderr.flush()
            time.sleep(1)  # the first rank to leave ends the others: let rank 0 report
        os._exit(1)

    def out_of_time(self, step: str, seconds: float) -> NoReturn:
        got = f"no end in {seconds:g} s: {self.rendezvous} or its host is frozen or cut off"
        self.fail_alone("answer", f"{step} to end", got)


def together(here: Here, reporter: Reporter) -> int:
    """Examine, hand in, and let one rank report for all. Returns the exit code."""
    here.store.set(f"host/{here.world.rank}", here.host)
    options = reporter.options
    largest = options.max_bytes or max(options.min_bytes, LARGEST[here.device.type])
    findings, measured = examine(here, message_sizes(options.min_bytes, largest), options.seconds)
    answered = exchange(findings, here)
    absent = absences(here, answered)
    report = summarise(reporter.launch, PROVED, answered, measured, absent)
    report_in_turn(here, answered, lambda: reporter.report(report))
    if absent or any(one.broken for one in answered.values()):
        os._exit(1)  # leaving the group would wait for ranks that are gone
    return 0 if report["verdict"] == "ok" else 1


def main(words: Sequence[str] | None = None) -> int:
    """What one rank does, from start to end. Returns the exit code."""
    options = parse(words)
    try:
        world = World.from_env()
    except WorldError as error:
        sys.stderr.write(f"distributed.smoke: {error}\n")
        return 2
    torch.set_num_threads(1)  # ranks that take all cores each would measure one another
    where = device(world, options.backend)
    host = os.environ.get("MUSTER_NODE") or socket.gethostname()
    reporter = Reporter(world, where, host, options)
    watch = Watch(reporter.out_of_time)
    watch.restart("join", options.timeout + LEAVING)
    with ExitStack() as group:
        try:
            group.enter_context(process_group(world, options.backend, options.timeout))
        except RuntimeError as error:
            reporter.fail_alone("join", f"{world.size} ranks that meet", brief(error))
        store = PrefixStore("smoke", _get_default_store())
        try:
            return together(Here(world, where, host, store, options.timeout, watch), reporter)
        except dist.DistError as error:
            reporter.fail_alone("answer", reporter.rendezvous, brief(error))
