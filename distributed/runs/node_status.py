"""What this node has of one run: its processes and ranks, what they use, and their last output.

The processes of a run have its directory and the name of their node in their environment. Which of them is which rank
follows from the file that its output goes to, ranks/<node>/.../attempt_<n>/<local rank>/stdout.log: that is so under
torchrun's agent and under ours, whose workers are forks and show an environment from before they had a rank.

Everything is read from /proc, the run directory and nvidia-smi. Standard library only.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distributed.host import process_scan
from distributed.host.gpus import count, mebibytes, query, table
from distributed.host.replies import format_reply
from distributed.host.stacks import Frame, script_frames, stack_of
from distributed.host.system import PROC, read, run_program

TAIL = 8192  # bytes at the end of a rank's output in which its last line is looked for
MAIN = "MainThread"  # as py-spy calls it
STACK_SECONDS = 15.0  # for py-spy, which stops a process while it reads its stacks
TICK = os.sysconf("SC_CLK_TCK")
GPU_FIELDS = "index,uuid,utilization.gpu,power.draw,memory.used,memory.total,name"
LOCAL_RANK = re.compile(rb"(?:^|\0)LOCAL_RANK=(?P<local_rank>\d+)(?:\0|$)")
OUTPUT = r"/ranks/{node}/[^/]+/attempt_(?P<attempt>\d+)/(?P<local_rank>\d+)/std(?:out|err)\.log$"


@dataclass(frozen=True)
class Process:
    """One process of the run, at one moment."""

    pid: int
    parent: int
    state: str  # as /proc has it: R runs, S sleeps, D waits for a disk, T is stopped
    command: str
    ticks: int  # of CPU used since its start
    memory: int  # bytes, resident
    threads: int
    local_rank: int | None  # of the rank that it is, or a child of
    ticks_of_ended: int = 0  # of CPU used by children that have ended


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    use: int  # per cent of the time in which a kernel ran
    watts: float
    memory_used: int  # bytes
    memory: int


@dataclass(frozen=True)
class Rank:
    rank: int
    local_rank: int
    pid: int | None  # None: there is no such process, not yet or no more
    state: str = ""
    cpu: float = 0.0  # cores used while it was watched, with its children
    memory: int = 0  # bytes, with its children
    gpus: tuple[Gpu, ...] = ()
    silent: float | None = None  # seconds since its last output; None: it has not begun
    line: str = ""  # the last of its output
    stands: str = ""  # its stacks for a person, when they were asked for
    frames: tuple[Frame, ...] = ()  # of its main thread then, the innermost first


@dataclass(frozen=True)
class NodeStatus:
    """What a node has of the run."""

    host: str
    seconds: float  # for which the CPU was watched
    ranks: tuple[Rank, ...] = ()
    processes: tuple[Process, ...] = ()
    line: str = ""  # the last of the node's log
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = ""
    metrics: float | None = None  # seconds since metrics.jsonl was written to; None: there is none


# ---------------------------------------------------------------- processes


def processes_of(run: str, node: str, proc: Path = PROC) -> list[Process]:
    """All processes on this node that have the mark of this run in their environment."""
    output = re.compile(OUTPUT.format(node=re.escape(node)))
    found = []
    for pid in process_scan.with_mark(
        process_scan.environment_mark(run, node), process_scan.pids(str(proc)), str(proc)
    ):
        with suppress(OSError):  # it has ended
            found.append(_process(proc / str(pid), output))
    return sorted(found, key=lambda one: one.pid)


def _process(folder: Path, output: re.Pattern[str]) -> Process:
    """Raises OSError when it has ended."""
    state, *fields = (folder / "stat").read_bytes().rpartition(b")")[2].decode().split()
    command = (folder / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    return Process(
        pid=int(folder.name),
        parent=int(fields[0]),
        state=state,
        command=command,
        ticks=int(fields[10]) + int(fields[11]),
        memory=int(fields[20]) * os.sysconf("SC_PAGE_SIZE"),
        threads=int(fields[16]),
        local_rank=_local_rank(folder, output),
        ticks_of_ended=int(fields[12]) + int(fields[13]),
    )


def _local_rank(folder: Path, output: re.Pattern[str]) -> int | None:
    for stream in ("1", "2"):  # a script may have redirected one of them
        with suppress(OSError):
            if found := output.search(os.readlink(folder / "fd" / stream)):
                return int(found["local_rank"])
    with suppress(OSError):  # or both
        if in_environment := LOCAL_RANK.search((folder / "environ").read_bytes()):
            return int(in_environment["local_rank"])
    return None


def families(processes: Sequence[Process]) -> dict[int, list[Process]]:
    """Of each local rank its processes, the rank itself first: the one whose parent is none of them."""
    found: dict[int, list[Process]] = {}
    for one in processes:
        if one.local_rank is not None:
            found.setdefault(one.local_rank, []).append(one)
    for family in found.values():
        pids = {one.pid for one in family}
        family.sort(key=lambda one: (one.parent in pids, one.pid))
    return found


def cores_used(before: Sequence[Process], after: Sequence[Process], seconds: float) -> float:
    """1.0 is one core. Of processes that are there both times."""
    then = {one.pid: one.ticks for one in before}
    return sum(one.ticks - then[one.pid] for one in after if one.pid in then) / TICK / max(seconds, 1 / TICK)


# ---------------------------------------------------------------- their output


def outputs(run: Path, node: str) -> dict[int, list[Path]]:
    """Of each local rank the files of its newest attempt."""
    attempts = sorted(run.glob(f"ranks/{glob.escape(node)}/*/attempt_*"), key=lambda path: int(path.name[8:]))
    folders = attempts[-1].iterdir() if attempts else ()
    return {int(folder.name): sorted(folder.glob("std*.log")) for folder in folders if folder.name.isdigit()}


def last_output(files: Sequence[Path], now: float) -> tuple[float | None, str]:
    """Seconds since the newest of these files was written to, and its last line."""
    times = {}
    for file in files:
        with suppress(OSError):
            times[file] = file.stat().st_mtime
    newest = sorted(times, key=lambda file: times[file], reverse=True)
    line = next(filter(None, map(last_line, newest)), "")
    return (max(0.0, now - times[newest[0]]) if newest else None), line


def last_line(file: Path) -> str:
    """The last line that is not empty; of a progress bar, its current state. Without what would move a cursor."""
    try:
        with file.open("rb") as content:
            content.seek(-min(TAIL, os.fstat(content.fileno()).st_size), os.SEEK_END)
            text = content.read().decode(errors="replace")
    except OSError:
        return ""
    for line in reversed(re.split(r"[\r\n]", text)):
        line = re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|.)", "", line)
        if shown := "".join(letter if letter.isprintable() else " " for letter in line).strip():
            return shown
    return ""


# ---------------------------------------------------------------- GPUs


def look_at_gpus() -> tuple[dict[str, Gpu], list[tuple[str, int]], str]:
    """GPUs by uuid, which process uses which, and what went wrong. Without a driver there are none."""
    if not shutil.which("nvidia-smi"):
        return {}, [], ""
    reply = query("gpu", GPU_FIELDS)
    if reply.code != 0:
        return {}, [], "nvidia-smi: " + " ".join((reply.out + reply.error).split())
    users = table(query("compute-apps", "gpu_uuid,pid").out, "gpu_uuid,pid")
    gpus = {}
    for row in table(reply.out, GPU_FIELDS):
        watts = row["power.draw"]
        gpus[row["uuid"]] = Gpu(
            index=count(row["index"]),
            name=row["name"],
            use=count(row["utilization.gpu"]),
            watts=float(watts) if re.fullmatch(r"\d+(\.\d+)?", watts) else 0.0,  # [N/A] and its like
            memory_used=mebibytes(row["memory.used"]),
            memory=mebibytes(row["memory.total"]),
        )
    return gpus, [(row["gpu_uuid"], count(row["pid"])) for row in users], ""


def used_by(family: Sequence[Process], gpus: Mapping[str, Gpu], users: Sequence[tuple[str, int]]) -> tuple[Gpu, ...]:
    """The GPUs on which one of these processes computes. In a container, the driver may know them by other numbers."""
    pids = {one.pid for one in family}
    found = {uuid for uuid, pid in users if pid in pids}
    return tuple(gpu for uuid, gpu in gpus.items() if uuid in found)


# ---------------------------------------------------------------- their stacks


def stands(one: Process, output: str) -> tuple[str, tuple[Frame, ...]]:
    """The stacks for a person, and the frames of the main thread, the innermost first.

    Of all threads, as py-spy reads them; else of the main thread, as the rank itself writes it; else what the kernel
    knows. output: the directory of the rank's output.
    """
    if py_spy := find_py_spy():
        # One that is stopped need not, and must not, be stopped once more.
        calm = ["--nonblocking"] if one.state in "Tt" else []
        dump = [py_spy, "dump", "--json", "--full-filenames", "--pid", str(one.pid), *calm]
        reply = run_program(dump, STACK_SECONDS)
        if reply.code == 0 and (found := in_py_spy(one.pid, reply.out)):
            return found
        why = f"py-spy: {' '.join((reply.error or reply.out).split())}"
    else:
        why = f"for all threads: '{sys.executable}' -m pip install py-spy"
    frames = () if one.state in "Tt" else stack_of(one.pid, output)
    known = "\n".join(["main thread", *map(_shown, frames)]) if frames else _threads(one)
    return f"{known}\n{why}", frames


def in_py_spy(pid: int, dump: str) -> tuple[str, tuple[Frame, ...]] | None:
    """The same from py-spy's JSON; None when that is no such thing."""
    try:
        # In a container the system's number of a thread may not be known.
        main_first = sorted(json.loads(dump), key=lambda one: (one["os_thread_id"] != pid, one["thread_name"] != MAIN))
        stacks = [
            script_frames([Frame(one["filename"], one["line"], one["name"]) for one in thread["frames"]])
            for thread in main_first
        ]
        heads = [
            f'Thread {one["os_thread_id"]} ({"active" if one["active"] else "idle"}): "{one["thread_name"]}"'
            for one in main_first
        ]
    except (ValueError, KeyError, TypeError):
        return None
    lines = [line for head, frames in zip(heads, stacks, strict=True) for line in (head, *map(_shown, frames))]
    return ("\n".join(lines), stacks[0]) if stacks else None


def _shown(frame: Frame) -> str:
    return f"    {frame.function} ({os.path.join(*Path(os.path.normpath(frame.file)).parts[-2:])}:{frame.line})"


def find_py_spy() -> str | None:
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def _threads(one: Process, proc: Path = PROC) -> str:
    """A line for each thread: its state, and the function of the kernel in which it waits."""
    lines = []
    for folder in sorted(proc.glob(f"{one.pid}/task/[0-9]*"), key=lambda path: int(path.name)):
        state = read(folder / "stat").rpartition(")")[2][1:2]
        waits = read(folder / "wchan").strip("0")
        main = "main thread" if folder.name == str(one.pid) else "thread"
        lines.append(f"{main} {folder.name} {read(folder / 'comm')}: {state}{f', waits in {waits}' if waits else ''}")
    return "\n".join(lines)


# ---------------------------------------------------------------- the whole


def observe(run: str, node: str, *, count: int, first_rank: int, seconds: float, stacks: bool) -> NodeStatus:
    """Watch this node's part of a run for some seconds. count: how many ranks it is to have."""
    before, begun = processes_of(run, node), time.monotonic()
    gpus, users, error = look_at_gpus() if seconds else ({}, [], "")
    time.sleep(max(0.0, seconds - (time.monotonic() - begun)))
    after, watched = processes_of(run, node), time.monotonic() - begun
    by_rank, written = families(after), outputs(Path(run), node)

    def status_of(local_rank: int) -> Rank:
        family, files = by_rank.get(local_rank, []), written.get(local_rank, [])
        silent, line = last_output(files, time.time())
        if not family:
            return Rank(first_rank + local_rank, local_rank, None, silent=silent, line=line)
        text, frames = stands(family[0], str(files[0].parent)) if stacks and files else ("", ())
        return Rank(
            rank=first_rank + local_rank,
            local_rank=local_rank,
            pid=family[0].pid,
            state=family[0].state,
            cpu=cores_used(before, family, watched),
            memory=sum(one.memory for one in family),
            gpus=used_by(family, gpus, users),
            silent=silent,
            line=line,
            stands=text,
            frames=frames,
        )

    with ThreadPoolExecutor(8) as several:  # each py-spy takes a moment
        ranks = tuple(several.map(status_of, sorted(set(range(count)) | set(by_rank))))
    line = last_line(Path(run, f"node_{node}.log"))
    metrics, _ = last_output([Path(run, "metrics.jsonl")], time.time())
    return NodeStatus(os.uname().nodename, watched, ranks, tuple(after), line, tuple(gpus.values()), error, metrics)


def from_json(facts: dict[str, Any]) -> NodeStatus:
    """What a node replied, as it was there."""
    ranks = []
    for rank in facts["ranks"]:
        gpus, frames = [Gpu(**gpu) for gpu in rank["gpus"]], [Frame(**frame) for frame in rank["frames"]]
        ranks.append(Rank(**rank | {"gpus": tuple(gpus), "frames": tuple(frames)}))
    processes, gpus = [Process(**one) for one in facts["processes"]], [Gpu(**gpu) for gpu in facts["gpus"]]
    return NodeStatus(**facts | {"ranks": tuple(ranks), "processes": tuple(processes), "gpus": tuple(gpus)})


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="node_status", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("--run", required=True, help="as the processes have it in MUSTER_RUN_DIR")
    parser.add_argument("--node", required=True, help="as the processes have it in MUSTER_NODE")
    parser.add_argument("--count", type=int, default=0, help="how many ranks it is to have")
    parser.add_argument("--first-rank", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0, help="to watch the CPU for")
    parser.add_argument("--stacks", action="store_true", help="also the stacks of each rank")
    sys.stdout.write(format_reply(asdict(observe(**vars(parser.parse_args(words))))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
