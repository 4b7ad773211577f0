"""What keeps a run from making progress, judged from what its nodes reported of each rank.

"looks hung" always comes with the facts: a rank that is stopped; ranks that wait in a collective, and others that do
not; no rank that used CPU or GPU. Stacks show which ranks wait in a collective; without them both possibilities are
named. Standard library only.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from distributed.files import KIT
from distributed.host.stacks import Frame

# Seconds without any output. A training that logs every ten steps, evaluates or writes a checkpoint is quiet, too.
IDLE_SILENCE = 60.0  # when all ranks are idle
ODD_SILENCE = 120.0  # when some work, and others wait for them
BUSY_SILENCE = 600.0  # when all work: as long as PyTorch waits for a collective, unless told otherwise
IDLE, BUSY = 0.02, 0.5  # cores
GPU_IDLE = 5  # per cent of the time
SHOWN = 4  # ranks in a list of them

# Where PyTorch waits for other ranks; what is in directories below, such as checkpoint and tensor, works by itself.
COLLECTIVE = re.compile(r".*/torch/(distributed/[^/]+|nn/parallel/distributed)\.py")
BACKWARD = "_engine_run_backward"  # where DDP waits for other ranks, in C++
LIBRARY = re.compile(rf"<|.*/(site-packages|dist-packages|lib/python3[.\d]*)/|{re.escape(KIT)}/distributed/")


@dataclass(frozen=True)
class Activity:
    """What one rank was seen to do."""

    rank: int
    node: str
    pid: int
    state: str  # as /proc has it
    cpu: float  # cores used
    gpu: int | None  # per cent of the time; None: it uses none
    silent: float  # seconds since its last output
    frames: tuple[Frame, ...] = ()  # of its main thread, the innermost first; none: not asked for, or not known

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.node}"

    @property
    def gpu_busy(self) -> bool:
        return (self.gpu or 0) >= GPU_IDLE

    @property
    def idle(self) -> bool:
        return self.cpu < IDLE and not self.gpu_busy

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def in_collective(self) -> bool:
        return bool(self.frames and COLLECTIVE.fullmatch(self.frames[0].file))

    @property
    def may_wait(self) -> bool:
        """In a place where PyTorch waits for other ranks or computes by itself, and nothing shows which."""
        return bool(self.frames) and (self.gpu_busy or (self.frames[0].function == BACKWARD and self.idle))

    @property
    def line(self) -> str:
        """The innermost frame of the user's code; empty when it is not known."""
        if not self.frames:
            return ""
        frame = next((frame for frame in self.frames if not LIBRARY.match(frame.file)), self.frames[0])
        function = "" if frame.function.startswith("<") else f" in {frame.function}()"
        return f"{os.path.basename(frame.file)}:{frame.line}{function}"


@dataclass(frozen=True)
class Finding:
    """What keeps a run from making progress, if it makes none: that depends on how long it has been silent."""

    words: str
    suspects: tuple[Activity, ...] = ()
    after: float = math.inf  # seconds of silence after which it looks hung
    stuck: bool = False  # no rank does anything that could end it: the suspects are idle, or all wait for each other


@dataclass(frozen=True)
class Diagnosis:
    hung: bool  # false: it makes progress, as far as can be known
    words: str = ""  # the facts, for a person; empty when there is nothing to report
    remedy: str = ""  # a command, to be given on that node


def diagnose(ranks: Sequence[Activity], seconds: float, silent: float, ended: Sequence[str] = ()) -> Diagnosis:
    """seconds: for how long the ranks were watched; silent: seconds since the run's last output; ended: the ranks that
    have ended."""
    if not ranks:
        return Diagnosis(False)
    finding, quiet = find(ranks, seconds, ended), f"no output for {silent:.0f} s"
    if finding.after == 0:
        go_on = f"kill -CONT {' '.join(str(rank.pid) for rank in finding.suspects)}"
        return Diagnosis(True, f"looks hung: {finding.words}; to go on, there:", go_on)
    if silent >= finding.after:
        return Diagnosis(True, f"looks hung: {quiet}; {finding.words}")
    if silent >= BUSY_SILENCE:
        words = f"{quiet}, but ranks are at work: a long task, or a wait for each other that never ends"
        return Diagnosis(False, words)
    return Diagnosis(False)


def needs_stacks(ranks: Sequence[Activity], silent: float) -> bool:
    """Whether it has been quiet for so long that the stacks should be asked for."""
    return silent >= (IDLE_SILENCE if ranks and all(rank.idle for rank in ranks) else ODD_SILENCE)


def find(ranks: Sequence[Activity], seconds: float, ended: Sequence[str] = ()) -> Finding:
    """What keeps these ranks from making progress. Takes at least one."""
    if stopped := [rank for rank in ranks if rank.stopped]:
        return Finding(f"{_names(stopped)} stopped (state T)", tuple(stopped), after=0.0)
    all_idle = all(rank.idle for rank in ranks)
    after = IDLE_SILENCE if all_idle else ODD_SILENCE
    used = "CPU or GPU" if any(rank.gpu is not None for rank in ranks) else "CPU"
    on_disk = [rank for rank in ranks if rank.state == "D"]  # such a rank cannot even be killed
    disk = f"; {_names(on_disk)} waiting for a disk or a network file system (state D)" if on_disk else ""
    if finding := _by_stacks(ranks, ended):
        return replace(finding, words=finding.words + disk, after=after)
    if all_idle:
        words = f"no rank used {used} in {seconds:.1f} s{disk}{_lines(ranks, ranks[0].name)}"
        words += f"; {_ended(ended)}" if ended else ""
        return Finding(words, tuple(ranks) if len(ranks) == 1 else (), after, stuck=True)
    if odd := _odd_one(ranks, used):
        return Finding(odd + disk + _lines(ranks), after=after)
    if len(ranks) == 1:
        return Finding(f"{ranks[0].name}, the only one here, is at work{_lines(ranks)}", tuple(ranks))
    if all(rank.frames for rank in ranks):
        return Finding(f"no rank is in a collective{_lines(ranks)}")
    cpu = _shown(ranks, lambda rank: f"{rank.name} used {rank.cpu:.0%} CPU")
    return Finding(f"without stacks it cannot be told which rank waits for which: {cpu}{_lines(ranks)}")


def _by_stacks(ranks: Sequence[Activity], ended: Sequence[str]) -> Finding | None:
    """Those that wait in a collective wait for those that do not. None: the stacks do not show it."""
    waiting = [rank for rank in ranks if rank.in_collective]
    others = [rank for rank in ranks if not rank.in_collective]
    if not waiting:
        return None
    if suspects := [rank for rank in others if rank.frames and not rank.may_wait]:
        words = f"{_names(suspects)} not in a collective"
    elif suspects := [rank for rank in others if not rank.frames]:
        words = f"{_names(suspects)} not known to be in a collective (no stack)"
    elif suspects := [rank for rank in others if rank.gpu_busy]:
        words = f"{_names(suspects)} busy with the GPU, in a computation or in a collective"
    else:  # what is left is in the backward pass, idle: it waits too
        return Finding(_all_wait(ranks, ended), stuck=True)
    if len(waiting) + len(suspects) < len(ranks):
        wait = "others wait"
    else:
        wait = "the other waits" if len(waiting) == 1 else "the others wait"
    words += f", {wait} for {'it' if len(suspects) == 1 else 'them'}{_lines(suspects)}"
    return Finding(words, tuple(suspects), stuck=all(rank.idle for rank in suspects))


def _all_wait(ranks: Sequence[Activity], ended: Sequence[str]) -> str:
    """All ranks that are there are in a collective."""
    one, alone = ranks[0], len(ranks) == 1
    if ended:
        wait = f"{one.name} waits in a collective at {one.line}" if alone else "the others wait in a collective"
        return f"{_ended(ended)} while {wait}{'' if alone else _lines(ranks)}"
    wait = f"{one.name} waits" if alone else f"{'both' if len(ranks) == 2 else f'all {len(ranks)}'} ranks wait"
    if len({rank.frames for rank in ranks}) == 1:
        return (
            f"{wait} in {'a' if alone else 'the same'} collective, at {one.line}: a connection is lost, "
            "or a rank is in another iteration or not shown here"
        )
    calls = _shown(ranks, lambda rank: f"{rank.name} at {rank.line}, {rank.frames[0].function}()", "; ")
    return f"{wait} in a collective, not at the same place; {calls}"


def _odd_one(ranks: Sequence[Activity], used: str) -> str:
    """One is idle and the others are busy, or the reverse: without stacks, which waits for which cannot be told."""
    idle = [rank for rank in ranks if rank.idle]
    busy = [rank for rank in ranks if rank.cpu >= BUSY]
    if min(len(idle), len(busy)) != 1 or len(idle) + len(busy) != len(ranks):
        return ""
    idle_words = f"{idle[0].name} uses" if len(idle) == 1 else f"the {len(idle)} others use"
    busy_words = f"{busy[0].name} is" if len(busy) == 1 else f"the {len(busy)} others are"
    if len(idle) > 1:
        wait = "they wait for the one"
    else:
        wait = "it waits for the other" if len(busy) == 1 else "it waits for the others"
    return (
        f"{idle_words} no {used}, and {busy_words} at work: either {wait} in a collective, or for something "
        "else, such as a disk, a lock or a download"
    )


# ---------------------------------------------------------------- parts of a sentence


def _shown(ranks: Sequence[Activity], text: Callable[[Activity], str], comma: str = ", ") -> str:
    """The first ranks, and ... for more."""
    return comma.join([*map(text, ranks[:SHOWN]), *["..."] * (len(ranks) > SHOWN)])


def _names(ranks: Sequence[Activity]) -> str:
    return ", ".join(rank.name for rank in ranks) + (" is" if len(ranks) == 1 else " are")


def _ended(ended: Sequence[str]) -> str:
    """With 0: a rank that fails ends the run."""
    return f"{', '.join(ended[:SHOWN])}{', ...' * (len(ended) > SHOWN)} ended with exit code 0"


def _lines(ranks: Sequence[Activity], only: str = "it") -> str:
    """Where they are, behind other words. only: what one rank alone is called."""
    known = [rank for rank in ranks if rank.frames]
    if not known:
        return ""
    if len(ranks) == 1:
        return f"; {only} is at {known[0].line}"
    return "; " + _shown(known, lambda rank: f"{rank.name} at {rank.line}")
