"""Does a run that is there also move? Judged from what its nodes saw; nothing is asked here.

"looks hung" is said of facts that are given with it, never of a guess: a rank that is stopped; nobody who used CPU or
GPU, or one who does the opposite of all others, while nobody said anything. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Seconds without any output. A training that logs every ten steps, evaluates or writes a checkpoint is quiet, too.
IDLE_SILENCE = 60.0  # when nobody uses anything
ODD_SILENCE = 120.0  # when one rank alone works, or alone does not
BUSY_SILENCE = 600.0  # when all work: as long as PyTorch waits for a collective, unless told otherwise
ASLEEP, AT_WORK = 0.02, 0.5  # cores
GPU_ASLEEP = 5  # per cent of the time


@dataclass(frozen=True)
class Beat:
    """What was seen of one rank."""

    rank: int
    node: str
    pid: int
    state: str  # as /proc has it
    cpu: float  # cores used
    gpu: int | None  # per cent of the time; None: it uses none
    silent: float  # seconds since its last output

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.node}"

    @property
    def asleep(self) -> bool:
        return self.cpu < ASLEEP and (self.gpu or 0) < GPU_ASLEEP

    @property
    def at_work(self) -> bool:
        return self.cpu >= AT_WORK


@dataclass(frozen=True)
class Pulse:
    hung: bool  # false: it moves, as far as we can tell
    words: str = ""  # the facts, for a person; empty when there is nothing to say
    remedy: str = ""  # a command, to be given on that node


def feel(beats: Sequence[Beat], seconds: float, silent: float) -> Pulse:
    """Judge the ranks that are there. seconds: for how long they were watched; silent: since the run's last output."""
    stopped = [beat for beat in beats if beat.state in ("T", "t")]
    if stopped:
        go_on = f"kill -CONT {' '.join(str(beat.pid) for beat in stopped)}"
        return Pulse(True, f"looks hung: {everybody(stopped)} stopped (state T); to go on, there:", go_on)
    if not beats:
        return Pulse(False)
    quiet = f"no output for {silent:.0f} s"
    if silent >= IDLE_SILENCE and all(beat.asleep for beat in beats):
        return Pulse(True, f"looks hung: {quiet}, and no rank used {what(beats)} in {seconds:.1f} s{disks(beats)}")
    if silent >= ODD_SILENCE and (odd := odd_one(beats)):
        return Pulse(True, f"looks hung: {quiet}; {odd}")
    if silent >= BUSY_SILENCE:
        return Pulse(False, f"{quiet}, but ranks are at work: a long task, or a wait for each other that never ends")
    return Pulse(False)


def odd_one(beats: Sequence[Beat]) -> str:
    """The one that does what no other does: that one keeps them waiting, or is kept."""
    sleeping = [beat for beat in beats if beat.asleep]
    working = [beat for beat in beats if beat.at_work]
    others = len(beats) - 1
    if others == 0:
        return ""
    if len(sleeping) == 1 and len(working) == others:
        return f"{sleeping[0].who} uses {what(sleeping)} no more, and {all_others(others)} at work{disks(sleeping)}"
    if len(working) == 1 and len(sleeping) == others:
        return f"{working[0].who} alone is at work, and {all_others(others)} waiting"
    return ""


def all_others(number: int) -> str:
    return "the other is" if number == 1 else f"the {number} others are"


def everybody(beats: Sequence[Beat]) -> str:
    return ", ".join(beat.who for beat in beats) + (" is" if len(beats) == 1 else " are")


def what(beats: Sequence[Beat]) -> str:
    return "CPU or GPU" if any(beat.gpu is not None for beat in beats) else "CPU"


def disks(beats: Sequence[Beat]) -> str:
    """Who waits for a disk or a network file system cannot even be killed."""
    waiting = [beat for beat in beats if beat.state == "D"]
    return f"; {everybody(waiting)} waiting for a disk or a network file system (state D)" if waiting else ""
