"""Does a run that is there also move? Judged from what its nodes saw; nothing is asked here.

"looks hung" is said of facts that are given with it, never of a guess: a rank that is stopped; ranks that wait in a
collective, and others that do not; nobody who used CPU or GPU. Who waits in a collective is told by the stacks; without
them it cannot be told, and both possibilities are named. Standard library only.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from distributed.files import KIT
from distributed.host.stacks import Frame

# Seconds without any output. A training that logs every ten steps, evaluates or writes a checkpoint is quiet, too.
IDLE_SILENCE = 60.0  # when nobody uses anything
ODD_SILENCE = 120.0  # when some work, and others wait for them
BUSY_SILENCE = 600.0  # when all work: as long as PyTorch waits for a collective, unless told otherwise
ASLEEP, AT_WORK = 0.02, 0.5  # cores
GPU_ASLEEP = 5  # per cent of the time
SHOWN = 4  # ranks of which is said where they are

# Where PyTorch waits for other ranks; what is in directories below, such as checkpoint and tensor, works by itself.
COLLECTIVE = re.compile(r".*/torch/(distributed/[^/]+|nn/parallel/distributed)\.py")
BACKWARD = "_engine_run_backward"  # where DDP waits for other ranks, in C++
NOT_OF_THE_USER = re.compile(rf"<|.*/(site-packages|dist-packages|lib/python3[.\d]*)/|{re.escape(KIT)}/distributed/")


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
    frames: tuple[Frame, ...] = ()  # of its main thread, the innermost first; none: not asked for, or not known

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.node}"

    @property
    def asleep(self) -> bool:
        return self.cpu < ASLEEP and not self.gpu_at_work

    @property
    def gpu_at_work(self) -> bool:
        return (self.gpu or 0) >= GPU_ASLEEP

    @property
    def at_work(self) -> bool:
        return self.cpu >= AT_WORK

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def in_collective(self) -> bool:
        return bool(self.frames and COLLECTIVE.fullmatch(self.frames[0].file))

    @property
    def may_wait(self) -> bool:
        """In a place where PyTorch waits for other ranks or computes by itself, and nothing shows which."""
        return bool(self.frames) and (self.gpu_at_work or (self.frames[0].function == BACKWARD and self.asleep))

    @property
    def place(self) -> str:
        """The innermost frame of the user's code; empty when it is not known."""
        theirs = [frame for frame in self.frames if not NOT_OF_THE_USER.match(frame.file)]
        return shown([*theirs, *self.frames][0]) if self.frames else ""


@dataclass(frozen=True)
class Finding:
    """What keeps a run from moving, if it does not move: that depends on how long it has been silent."""

    words: str
    suspects: tuple[Beat, ...] = ()
    after: float = math.inf  # seconds of silence after which it looks hung
    stuck: bool = False  # no rank does anything that could end it: the suspects are idle, or all wait for each other


@dataclass(frozen=True)
class Pulse:
    hung: bool  # false: it moves, as far as we can tell
    words: str = ""  # the facts, for a person; empty when there is nothing to say
    remedy: str = ""  # a command, to be given on that node


def feel(beats: Sequence[Beat], seconds: float, silent: float, ended: Sequence[str] = ()) -> Pulse:
    """Judge the ranks that are there. seconds: for how long they were watched; silent: since the run's last output;
    ended: the ranks that are not there any more."""
    if not beats:
        return Pulse(False)
    finding, quiet = find(beats, seconds, ended), f"no output for {silent:.0f} s"
    if finding.after == 0:
        go_on = f"kill -CONT {' '.join(str(beat.pid) for beat in finding.suspects)}"
        return Pulse(True, f"looks hung: {finding.words}; to go on, there:", go_on)
    if silent >= finding.after:
        return Pulse(True, f"looks hung: {quiet}; {finding.words}")
    if silent >= BUSY_SILENCE:
        return Pulse(False, f"{quiet}, but ranks are at work: a long task, or a wait for each other that never ends")
    return Pulse(False)


def needs_stacks(beats: Sequence[Beat], silent: float) -> bool:
    """Whether it has been quiet for so long that the stacks should be asked for."""
    return silent >= (IDLE_SILENCE if beats and all(beat.asleep for beat in beats) else ODD_SILENCE)


def find(beats: Sequence[Beat], seconds: float, ended: Sequence[str] = ()) -> Finding:
    """What keeps these ranks from moving. Takes at least one."""
    stopped = [beat for beat in beats if beat.stopped]
    if stopped:
        return Finding(f"{everybody(stopped)} stopped (state T)", tuple(stopped), after=0.0)
    idle = all(beat.asleep for beat in beats)
    after = IDLE_SILENCE if idle else ODD_SILENCE
    if told := by_stacks(beats, ended):
        return replace(told, words=told.words + disks(beats), after=after)
    if idle:
        words = f"no rank used {what(beats)} in {seconds:.1f} s{disks(beats)}{places(beats, beats[0].who)}"
        words += f"; {have_ended(ended)}" if ended else ""
        return Finding(words, tuple(beats) if len(beats) == 1 else (), after, stuck=True)
    if odd := odd_ones(beats):
        return Finding(odd + disks(beats) + places(beats), after=after)
    if len(beats) == 1:
        return Finding(f"{beats[0].who}, the only one here, is at work{places(beats)}", tuple(beats))
    if all(beat.frames for beat in beats):
        return Finding(f"no rank is in a collective{places(beats)}")
    used = ", ".join(f"{beat.who} used {beat.cpu:.0%} CPU" for beat in beats[:SHOWN]) + ", ..." * (len(beats) > SHOWN)
    return Finding(f"without stacks it cannot be told which rank waits for which: {used}{places(beats)}")


def by_stacks(beats: Sequence[Beat], ended: Sequence[str]) -> Finding | None:
    """Those that wait in a collective wait for those that do not. None: the stacks do not tell."""
    waiting = [beat for beat in beats if beat.in_collective]
    others = [beat for beat in beats if not beat.in_collective]
    if not waiting:
        return None
    certain = [beat for beat in others if beat.frames and not beat.may_wait]
    on_gpu = [beat for beat in others if beat.may_wait and beat.gpu_at_work]
    unknown = [beat for beat in others if not beat.frames]
    suspects = certain or unknown or on_gpu  # what is left is in the backward pass, idle: it waits too
    if not suspects:
        return all_wait(beats, ended)
    if certain:
        words = f"{everybody(suspects)} not in a collective"
    elif unknown:
        words = f"{everybody(suspects)} not known to be in a collective (no stack)"
    else:
        words = f"{everybody(suspects)} busy with the GPU, in a computation or in a collective"
    wait = "others wait" if len(waiting) + len(suspects) < len(beats) else "the others wait"
    wait = "the other waits" if len(waiting) == len(beats) - len(suspects) == 1 else wait
    words += f", {wait} for {'it' if len(suspects) == 1 else 'them'}{places(suspects)}"
    return Finding(words, tuple(suspects), stuck=all(beat.asleep for beat in suspects))


def all_wait(beats: Sequence[Beat], ended: Sequence[str]) -> Finding:
    """All ranks that are there are in a collective."""
    every = "both" if len(beats) == 2 else f"all {len(beats)}"
    who = f"{beats[0].who} waits" if len(beats) == 1 else f"{every} ranks wait"
    if ended:
        rest = f" at {beats[0].place}" if len(beats) == 1 else places(beats)
        words = f"{have_ended(ended)} while {who if len(beats) == 1 else 'the others wait'} in a collective{rest}"
    elif len({beat.frames for beat in beats}) == 1:
        words = (
            f"{who} in {'a' if len(beats) == 1 else 'the same'} collective, at {beats[0].place}: a connection is lost, "
            "or a rank is in another iteration or not shown here"
        )
    else:
        calls = [f"{beat.who} at {beat.place}, {beat.frames[0].function}()" for beat in beats[:SHOWN]]
        words = f"{who} in a collective, not at the same place; {'; '.join(calls)}{'; ...' * (len(beats) > SHOWN)}"
    return Finding(words, stuck=True)


def odd_ones(beats: Sequence[Beat]) -> str:
    """Some use nothing and the others are at work: without stacks, who waits for whom cannot be told."""
    sleeping = [beat for beat in beats if beat.asleep]
    working = [beat for beat in beats if beat.at_work]
    if min(len(sleeping), len(working)) != 1 or len(sleeping) + len(working) != len(beats):
        return ""
    idle = f"{sleeping[0].who} uses" if len(sleeping) == 1 else f"the {len(sleeping)} others use"
    busy = f"{working[0].who} is" if len(working) == 1 else f"the {len(working)} others are"
    wait, them = ("it waits", "the other") if len(sleeping) == len(working) == 1 else ("it waits", "the others")
    if len(sleeping) > 1:
        wait, them = "they wait", "the one"
    return (
        f"{idle} no {what(sleeping)}, and {busy} at work: either {wait} for {them} in a collective, or for something "
        "else, such as a disk, a lock or a download"
    )


def have_ended(ended: Sequence[str]) -> str:
    """With 0: a rank that fails ends the run."""
    return f"{', '.join(ended[:SHOWN])}{', ...' * (len(ended) > SHOWN)} ended with exit code 0"


def places(beats: Sequence[Beat], only: str = "it") -> str:
    """Where they are, behind other words. only: what one rank alone is called."""
    known = [beat for beat in beats if beat.frames]
    if len(beats) == 1 and known:
        return f"; {only} is at {known[0].place}"
    told = [f"{beat.who} at {beat.place}" for beat in known[:SHOWN]]
    return f"; {', '.join(told)}{', ...' * (len(known) > SHOWN)}" if told else ""


def shown(frame: Frame) -> str:
    function = "" if frame.function.startswith("<") else f" in {frame.function}()"
    return f"{os.path.basename(frame.file)}:{frame.line}{function}"


def everybody(beats: Sequence[Beat]) -> str:
    return ", ".join(beat.who for beat in beats) + (" is" if len(beats) == 1 else " are")


def what(beats: Sequence[Beat]) -> str:
    return "CPU or GPU" if any(beat.gpu is not None for beat in beats) else "CPU"


def disks(beats: Sequence[Beat]) -> str:
    """Who waits for a disk or a network file system cannot even be killed."""
    waiting = [beat for beat in beats if beat.state == "D"]
    return f"; {everybody(waiting)} waiting for a disk or a network file system (state D)" if waiting else ""
