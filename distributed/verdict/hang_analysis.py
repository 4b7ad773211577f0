"""Find out from the status of a run's ranks whether the run hangs, and which rank the others wait for.

"looks hung" is printed with the evidence: a stopped rank; a rank that is not in a collective while others are; or idle
ranks. Only stacks show which ranks are in a collective; without stacks, the text names all possibilities. Under NCCL,
a stack shows that a rank waits for its GPU, but not whether the GPU computes or is in a collective; PyTorch's flight
recorder shows which rank has not called a collective. A GPU whose use is not known accuses no rank.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from distributed.files import KIT
from distributed.host.collectives import Collectives, find_mismatch
from distributed.host.stacks import Frame
from distributed.verdict.user_code import is_library

# Seconds without output. Healthy runs are also quiet during evaluations and checkpoints.
IDLE_TIMEOUT = 60.0  # a run whose ranks are all idle looks hung
MIXED_TIMEOUT = 120.0  # a run in which some ranks are busy and others wait looks hung
BUSY_TIMEOUT = 600.0  # any other run is reported as busy; equal to PyTorch's default timeout of NCCL collectives
IDLE, BUSY = 0.02, 0.5  # cores: a rank that uses less is idle, one that uses more is busy
GPU_IDLE = 5  # percentage of time: a GPU that is used less is idle
SHOWN = 4  # ranks listed in a text

# Modules that wait for other ranks. Modules of subpackages of torch.distributed, such as checkpoint, do not wait.
COLLECTIVE = re.compile(r".*/(torch/(distributed/[^/]+|nn/parallel/distributed)|distributed/training/collectives)\.py")
# With CUDA, a collective only enqueues a kernel. The rank waits later, in a C++ function that needs the result. A stack
# has no frame of this function, so the innermost frame is the line that calls it.
SYNCHRONIZES = re.compile(r"\.(item|cpu|tolist|numpy)\(|synchronize\(")
MAY_SYNCHRONIZE = re.compile(r"\.(to|nonzero|equal|copy_)\(|\b(float|int|bool)\(")
BACKWARD = "_engine_run_backward"  # in this function, DDP waits for other ranks, in C++


@dataclass(frozen=True)
class Activity:
    """What a running rank, or another process of the run, does."""

    rank: int | None  # None: the process is no rank
    node: str
    pid: int
    state: str  # in /proc
    cpu: float  # cores used
    gpu: int | None  # percentage of time; None: no GPU is used, or not known
    frames: tuple[Frame, ...] = ()  # stack of its main thread, innermost frame first; empty: not known
    launched: str = ""  # the package of the user's code if it is installed, see user_code.launched_package()
    gpu_unknown: bool = False  # its node has GPUs, but nvidia-smi does not show which one the rank uses, or how much
    collectives: tuple[Collectives, ...] = ()  # () also if not known

    @property
    def name(self) -> str:
        return f"{f'process {self.pid}' if self.rank is None else f'rank {self.rank}'} on {self.node}"

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
    def waits_for_gpu(self) -> bool:
        """Whether the rank waits until its GPU has finished: a computation, or a collective of NCCL."""
        if not self.frames or self.in_collective:
            return False
        innermost = self.frames[0]
        if SYNCHRONIZES.search(innermost.code) or (innermost.function == "synchronize" and "/torch/" in innermost.file):
            return self.gpu_busy or self.gpu_unknown or (self.gpu is None and self.idle)
        return (self.gpu_busy or self.gpu_unknown) and bool(MAY_SYNCHRONIZE.search(innermost.code))

    @property
    def waits(self) -> bool:
        return self.in_collective or self.waits_for_gpu

    @property
    def user_frame(self) -> Frame:
        """The innermost frame of the user's code, or of any code if there is none. The stack must be known."""
        own = (frame for frame in self.frames if not is_library(frame.file, self.launched))
        return next((frame for frame in own if not frame.file.startswith(f"{KIT}/distributed/")), self.frames[0])

    @property
    def line(self) -> str:
        """user_frame as text; empty if the stack is not known."""
        if not self.frames:
            return ""
        frame = self.user_frame
        function = "" if frame.function.startswith("<") else f" in {frame.function}()"
        return f"{os.path.basename(frame.file)}:{frame.line}{function}"

    @property
    def call(self) -> str:
        """The line, and the library function in which the rank is, if any."""
        library = f", {self.frames[0].function}()" if self.frames and self.user_frame != self.frames[0] else ""
        return self.line + library


@dataclass(frozen=True)
class Stall:
    """The reason why a run makes no progress; valid if the run has had no output for `timeout` seconds."""

    text: str
    suspects: tuple[Activity, ...] = ()  # the ranks that the others wait for
    timeout: float = math.inf  # seconds without output after which the run looks hung
    permanent: bool = False  # does not end by itself: the suspects or all ranks are idle, or all ranks wait


@dataclass(frozen=True)
class Diagnosis:
    hung: bool  # False: the run makes progress, as far as known
    text: str = ""  # the evidence; empty if there is nothing to report
    remedy: str = ""  # a command to run on the nodes of the stopped ranks


def diagnose(ranks: Sequence[Activity], seconds: float, silent: float, exited: Sequence[str] = ()) -> Diagnosis:
    """Find out whether the run hangs.

    seconds: duration of the sample of CPU and GPU use. silent: seconds since the last output of the run. exited: names
    of ranks that have exited.
    """
    if not ranks:
        return Diagnosis(False)
    stall, no_output = find_stall(ranks, seconds, exited), f"no output for {silent:.0f} s"
    if stall.timeout == 0:
        command = f"kill -CONT {' '.join(str(rank.pid) for rank in stall.suspects)}"
        return Diagnosis(True, f"looks hung: {stall.text}; to continue, run there:", command)
    if silent >= stall.timeout:
        return Diagnosis(True, f"looks hung: {no_output}; {stall.text}")
    if silent >= BUSY_TIMEOUT:
        return Diagnosis(False, f"{no_output}, but ranks are busy: a long computation, or a deadlock that uses CPU")
    return Diagnosis(False)


def needs_stacks(ranks: Sequence[Activity], silent: float) -> bool:
    """Whether the run has had no output for so long that a diagnosis needs stacks."""
    return bool(ranks) and silent >= (IDLE_TIMEOUT if all(rank.idle for rank in ranks) else MIXED_TIMEOUT)


def find_stall(ranks: Sequence[Activity], seconds: float, exited: Sequence[str] = ()) -> Stall:
    """Find out what these ranks wait for; there must be at least one. seconds, exited: see diagnose()."""
    if stopped := [rank for rank in ranks if rank.stopped]:
        return Stall(f"{_names(stopped)} stopped (state T)", tuple(stopped), timeout=0.0)
    all_idle = all(rank.idle for rank in ranks)
    timeout = IDLE_TIMEOUT if all_idle else MIXED_TIMEOUT
    used = "CPU or GPU" if any(rank.gpu is not None for rank in ranks) else "CPU"
    on_disk = [rank for rank in ranks if rank.state == "D"]  # cannot even be killed
    disk = f"; {_names(on_disk)} waiting for a disk or a network file system (state D)" if on_disk else ""
    if stall := _find_by_recorder(ranks, timeout):
        return replace(stall, text=stall.text + disk)
    if stall := _find_by_gpus(ranks, timeout, exited):
        return replace(stall, text=stall.text + disk)
    if stall := _find_by_stacks(ranks, exited):
        return replace(stall, text=stall.text + disk, timeout=timeout)
    if all_idle:
        text = f"no rank used {used} in {seconds:.1f} s{disk}{_locations(ranks, ranks[0].name)}"
        text += f"; {_exited(exited)}" if exited else ""
        permanent = all(map(_is_certainly_idle, ranks))
        return Stall(text, tuple(ranks) if len(ranks) == 1 else (), timeout, permanent)
    if text := _one_differs(ranks, used):
        return Stall(text + disk + _locations(ranks), timeout=timeout)
    if len(ranks) == 1:
        return Stall(f"{ranks[0].name}, the only rank, is busy{_locations(ranks)}", tuple(ranks))
    if all(rank.frames for rank in ranks):
        return Stall(f"no rank is in a collective{_locations(ranks)}")
    cpu = _list(ranks, lambda rank: f"{rank.name} used {rank.cpu:.0%} CPU")
    return Stall(f"without stacks it is not known which rank waits for which: {cpu}{_locations(ranks)}")


def _find_by_recorder(ranks: Sequence[Activity], timeout: float) -> Stall | None:
    """The stall if PyTorch's flight recorder shows why a collective does not complete; otherwise None."""
    found = find_mismatch({rank.rank: rank.collectives for rank in ranks if rank.rank is not None})
    if not found:
        return None
    suspects = tuple(rank for rank in ranks if rank.rank in found.missing)
    text = f"{found.text} (PyTorch's flight recorder){_locations(suspects or ranks)}"
    return Stall(text, suspects, timeout, permanent=all(map(_is_certainly_idle, suspects)))


def _is_certainly_idle(rank: Activity) -> bool:
    return rank.idle and not rank.gpu_unknown


def _find_by_gpus(ranks: Sequence[Activity], timeout: float, exited: Sequence[str]) -> Stall | None:
    """The stall if ranks use or wait for GPUs, and no rank is in a function of torch.distributed; otherwise None.

    The GPUs may be in a collective or in a long computation. Only a rank whose GPU is idle is suspected. A rank whose
    stack is elsewhere may also wait for its GPU: calls block as long as the GPU's queue is full.
    """
    waiting = [rank for rank in ranks if rank.waits or rank.gpu_busy]
    if len(ranks) == 1 or any(rank.in_collective for rank in ranks) or not waiting:
        return None
    others = [rank for rank in ranks if rank.frames and rank not in waiting]
    if suspects := [rank for rank in others if rank.idle or not rank.gpu_unknown]:
        use, them = ("uses", "that rank") if len(suspects) == 1 else ("use", "those ranks")
        use_no_gpu = "" if any(rank.gpu_unknown for rank in suspects) else f" and {use} no GPU"
        gpus = f"wait for their GPUs, which may be computing, or waiting in a collective for {them}"
        text = f"{_names(suspects)} not in a collective{use_no_gpu}, others {gpus}"
        permanent = any(rank.gpu_busy for rank in ranks) and all(map(_is_certainly_idle, suspects))
        return Stall(text + _locations(suspects), tuple(suspects), timeout, permanent)
    if all(rank.idle for rank in ranks) or len(waiting) < len(ranks):
        return None
    text = "all ranks use their GPUs or wait for them; the GPUs may be in a computation or in a collective"
    if exited:
        return Stall(f"{_exited(exited)}; {text}{_locations(ranks)}", timeout=timeout)
    return Stall(text + _locations(ranks), timeout=BUSY_TIMEOUT)


def _find_by_stacks(ranks: Sequence[Activity], exited: Sequence[str]) -> Stall | None:
    """The stall if the stack of a rank shows that it is in a collective; otherwise None."""
    waiting = [rank for rank in ranks if rank.waits]
    others = [rank for rank in ranks if not rank.waits]
    if not any(rank.in_collective for rank in ranks):
        return None
    # In the backward pass, or if the GPU is busy, the stack does not show whether a rank waits or computes.
    running = [rank for rank in others if not (rank.frames and rank.frames[0].function == BACKWARD and rank.idle)]
    if suspects := [rank for rank in running if rank.frames and not rank.gpu_busy]:
        text = f"{_names(suspects)} not in a collective"
    elif suspects := [rank for rank in others if not rank.frames]:
        text = f"{_names(suspects)} not known to be in a collective (no stack)"
    elif suspects := [rank for rank in others if rank.gpu_busy]:
        text = f"{_names(suspects)} using the GPU, in a computation or in a collective"
    elif any(rank.waits_for_gpu for rank in ranks):
        text = "all ranks wait: some in a collective, others for their GPUs, which may be in a computation"
        return Stall(text + _locations(ranks))
    else:  # all others are idle in the backward pass, so they also wait
        return Stall(_all_wait(ranks, exited), permanent=True)
    if len(waiting) + len(suspects) < len(ranks):
        wait = "others wait"
    else:
        wait = "the other waits" if len(waiting) == 1 else "the others wait"
    text += f", {wait} for {'it' if len(suspects) == 1 else 'them'}{_locations(suspects)}"
    return Stall(text, tuple(suspects), permanent=all(map(_is_certainly_idle, suspects)))


def _all_wait(ranks: Sequence[Activity], exited: Sequence[str]) -> str:
    """The text if all ranks wait in a collective."""
    first, alone = ranks[0], len(ranks) == 1
    if exited:
        wait = f"{first.name} waits in a collective at {first.line}" if alone else "the others wait in a collective"
        return f"{_exited(exited)} while {wait}{'' if alone else _locations(ranks)}"
    wait = f"{first.name} waits" if alone else f"{'both' if len(ranks) == 2 else f'all {len(ranks)}'} ranks wait"
    if len({rank.frames for rank in ranks}) == 1:
        return (
            f"{wait} in {'a' if alone else 'the same'} collective, at {first.line}: a connection is lost, "
            "or a rank is in another iteration or not shown here"
        )
    calls = _list(ranks, lambda rank: f"{rank.name} at {rank.call}", "; ")
    return f"{wait} in collectives, but not at the same line; {calls}"


def _one_differs(ranks: Sequence[Activity], used: str) -> str:
    """The text if one rank is idle and the others are busy, or the reverse; otherwise empty."""
    idle = [rank for rank in ranks if rank.idle]
    busy = [rank for rank in ranks if rank.cpu >= BUSY]
    if min(len(idle), len(busy)) != 1 or len(idle) + len(busy) != len(ranks):
        return ""
    idle_text = f"{idle[0].name} uses" if len(idle) == 1 else f"the {len(idle)} others use"
    busy_text = f"{busy[0].name} is" if len(busy) == 1 else f"the {len(busy)} others are"
    others = f"the other{'s' * (len(busy) > 1)}"
    waits, for_whom = ("it waits", others) if len(idle) == 1 else ("they wait", "that rank")
    return (
        f"{idle_text} no {used}, and {busy_text} busy: {waits} either for {for_whom} in a collective, or for "
        "something else, such as a disk, a lock or a download"
    )


def _list(ranks: Sequence[Activity], text: Callable[[Activity], str], separator: str = ", ") -> str:
    """The texts of the first ranks; "..." stands for the remaining ranks."""
    return separator.join([*map(text, ranks[:SHOWN]), *["..."] * (len(ranks) > SHOWN)])


def _names(ranks: Sequence[Activity]) -> str:
    return ", ".join(rank.name for rank in ranks) + (" is" if len(ranks) == 1 else " are")


def _exited(exited: Sequence[str]) -> str:
    """The text for ranks that have exited. Their exit code is 0, because a failed rank ends the run."""
    return f"{', '.join(exited[:SHOWN])}{', ...' * (len(exited) > SHOWN)} ended with exit code 0"


def _locations(ranks: Sequence[Activity], subject: str = "it") -> str:
    """The current line of each rank, to be appended to a text. subject: how the text refers to a single rank."""
    known = [rank for rank in ranks if rank.frames]
    if not known:
        return ""
    if len(ranks) == 1:
        return f"; {subject} is at {known[0].line}"
    return "; " + _list(known, lambda rank: f"{rank.name} at {rank.line}")
