"""The status of a run on this node: its processes and ranks, their resource usage, and their last output.

Processes of a run have its directory and the name of their node in their environment. The rank of a process is in the
path of its output file, ranks/<node>/.../attempt_<n>/<local rank>/stdout.log. Its environment may lack the rank: ranks
of Muster's agent are forks, and /proc shows their environment from before the fork.

Reads /proc, the run directory and nvidia-smi.
"""

from __future__ import annotations

import argparse
import glob
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

from distributed import metrics
from distributed.attempts import newest
from distributed.files import file_time, foreign_directory, read_json
from distributed.host import process_scan
from distributed.host.collectives import Collectives, directory_of
from distributed.host.collectives import query as query_collectives
from distributed.host.gpus import count, mebibytes, query, query_rows, table
from distributed.host.replies import format_reply
from distributed.host.stacks import Frame, script_frames, stack_of, with_code
from distributed.host.system import PROC, ProgramOutput, read, run_program
from distributed.trust import parse_json, printable, regular_file

TAIL = 8192  # bytes at the end of a rank's output in which to find the last line
MAIN = "MainThread"  # name of the main thread in py-spy
GPU_TIMEOUT = 5.0  # seconds for all calls of nvidia-smi, so that it delays no notice of a hang
STACK_TIMEOUT = 15.0  # seconds for py-spy, which stops a process while it reads its stacks
TICK = os.sysconf("SC_CLK_TCK")
GPU_FIELDS = "index,uuid,utilization.gpu,power.draw,memory.used,memory.total,name"
LOCAL_RANK = re.compile(rb"(?:^|\0)LOCAL_RANK=(\d{1,9})(?:\0|$)")
NUMBER = "[0-9]{1,9}"
OUTPUT = r"/ranks/{node}/[^/]+/attempt_\d+/(\d+)/std(?:out|err)\.log$"


@dataclass(frozen=True)
class RunProcess:
    """A process of the run at one moment."""

    pid: int
    parent: int
    state: str  # in /proc: R running, S sleeping, D waiting for a disk, T stopped
    command: str
    ticks: int  # clock ticks of CPU used since its start
    memory: int  # resident bytes
    threads: int
    local_rank: int | None  # of this process, or of the rank that started it; None: belongs to no known rank
    ticks_of_ended: int = 0  # clock ticks of CPU used by children that have exited


@dataclass(frozen=True)
class GpuUsage:
    index: int
    name: str
    use: int | None  # percentage of time in which a kernel ran; None: not known, such as under MIG
    watts: float
    memory_used: int  # bytes
    memory: int  # total bytes


@dataclass(frozen=True)
class RankStatus:
    rank: int
    local_rank: int
    pid: int | None  # None: has not started, or has exited
    state: str = ""
    cpu: float = 0.0  # cores used during the sample, including child processes
    memory: int = 0  # bytes, including child processes
    gpus: tuple[GpuUsage, ...] = ()
    silent: float | None = None  # seconds since its last output; None: not started
    line: str = ""  # last line of its output
    stack_text: str = ""  # its stacks as text, if requested
    frames: tuple[Frame, ...] = ()  # stack of its main thread, innermost frame first, if requested
    collectives: tuple[Collectives, ...] = ()  # if requested, and if PyTorch records them (NCCL)


@dataclass(frozen=True)
class RunProgress:
    """The newest values that the run has logged; if it has logged none, values found in its output."""

    step: int | None = None
    steps: int | None = None  # planned
    loss: float | str | None = None  # "NaN" for NaN and infinity
    silent: float | None = None  # seconds since the last write to metrics.jsonl; None: no such file
    epoch: float | None = None
    origin: str = ""  # see metrics.ORIGINS; "": logged by the run


def read_progress(directory: Path) -> RunProgress:
    """The progress of a run according to the files in its directory."""
    if not (path := metrics.find(directory)):
        return RunProgress()
    found, origin = metrics.newest(path), metrics.ORIGINS[os.path.basename(path)]
    silent = None
    with suppress(OSError):
        silent = None if origin else max(0.0, file_time(directory) - os.stat(path).st_mtime)
    step, steps = (int(found[key]) if key in found else None for key in ("step", "steps"))
    return RunProgress(step, steps, found.get("loss"), silent, found.get("epoch") if origin else None, origin)


@dataclass(frozen=True)
class NodeStatus:
    """The status of the run on one node."""

    host: str
    seconds: float  # duration of the CPU sample
    ranks: tuple[RankStatus, ...] = ()
    processes: tuple[RunProcess, ...] = ()
    line: str = ""  # last line of the node's log
    gpus: tuple[GpuUsage, ...] = ()
    gpu_error: str = ""
    progress: RunProgress = RunProgress()  # according to the run directory on this node
    stopped: tuple[int, ...] = ()  # ids of stopped processes (SIGSTOP) that are no ranks


def processes_of(run: str, node: str, proc: Path = PROC) -> list[RunProcess]:
    """All processes that have this run and node in their environment."""
    output = re.compile(OUTPUT.format(node=re.escape(node)))
    found, entries = [], process_scan.run_environment(run, node)
    for pid in process_scan.with_environment(entries, process_scan.pids(str(proc)), str(proc)):
        with suppress(OSError):  # it has exited
            if (proc / str(pid)).stat().st_uid == os.geteuid():  # root sees the environment of all users
                found.append(_process(proc / str(pid), output))
    return sorted(found, key=lambda one: one.pid)


def _process(directory: Path, output: re.Pattern[str]) -> RunProcess:
    """Raises OSError if the process has exited."""
    state, *fields = (directory / "stat").read_bytes().rpartition(b")")[2].decode().split()
    command = (directory / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    rank: re.Match[Any] | None = None
    # The environment is used if the script has redirected stdout and stderr to other files.
    with suppress(OSError):
        rank = LOCAL_RANK.search((directory / "environ").read_bytes())
    for stream in ("2", "1"):
        with suppress(OSError):
            rank = output.search(os.readlink(directory / "fd" / stream)) or rank
    return RunProcess(
        pid=int(directory.name),
        parent=int(fields[0]),
        state=state,
        command=command,
        ticks=int(fields[10]) + int(fields[11]),
        memory=int(fields[20]) * os.sysconf("SC_PAGE_SIZE"),
        threads=int(fields[16]),
        local_rank=int(rank[1]) if rank else None,
        ticks_of_ended=int(fields[12]) + int(fields[13]),
    )


def processes_by_rank(processes: Sequence[RunProcess]) -> dict[int, list[RunProcess]]:
    """The processes of each local rank. The rank itself is first: its parent is not among them."""
    found: dict[int, list[RunProcess]] = {}
    for process in processes:
        if process.local_rank is not None:
            found.setdefault(process.local_rank, []).append(process)
    for group in found.values():
        pids = {process.pid for process in group}
        group.sort(key=lambda process: (process.parent in pids, process.pid))
    return found


def cores_used(before: Sequence[RunProcess], after: Sequence[RunProcess], seconds: float) -> float:
    """CPU cores used by the processes that are in both samples; 1.0 is one core."""
    ticks = {process.pid: process.ticks for process in before}
    used = sum(process.ticks - ticks[process.pid] for process in after if process.pid in ticks)
    return used / TICK / max(seconds, 1 / TICK)


def output_files(run: Path, node: str) -> dict[int, list[Path]]:
    """The output files of each local rank in the newest attempt."""
    attempts = [
        path
        for path in run.glob(f"ranks/{glob.escape(node)}/*/attempt_*")
        if re.fullmatch(NUMBER, path.name[8:]) and path.is_dir()
    ]
    directories = max(attempts, key=lambda path: int(path.name[8:])).iterdir() if attempts else ()
    return {
        int(directory.name): sorted(directory.glob("std*.log"))
        for directory in directories
        if re.fullmatch(NUMBER, directory.name)
    }


def last_output(files: Sequence[Path], now: float) -> tuple[float | None, str]:
    """Return the seconds since the last write to any of these files (None if there is no file), and the last line."""
    written = []
    for file in files:
        with suppress(OSError):
            written.append((file.stat().st_mtime, file))
    written.sort(reverse=True)
    line = next(filter(None, (last_line(file) for _, file in written)), "")
    return (max(0.0, now - written[0][0]) if written else None), line


def last_line(file: Path) -> str:
    """The last line that is not empty, or the last state of a progress bar, without control sequences."""
    try:
        with open(file, "rb", opener=regular_file) as content:
            content.seek(-min(TAIL, os.fstat(content.fileno()).st_size), os.SEEK_END)
            text = content.read().decode(errors="replace")
    except OSError:
        return ""
    for line in reversed(re.split(r"[\r\n]", text)):
        if shown := printable(line).strip():
            return shown
    return ""


def query_gpus() -> tuple[dict[str, GpuUsage], list[tuple[str, int]], str]:
    """Return GPUs by UUID, (UUID, pid) of each process that uses one, and an error; all empty without nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return {}, [], ""
    end = time.monotonic() + GPU_TIMEOUT
    rows, lost, error = query_rows(GPU_FIELDS, end)
    apps = query("compute-apps", "gpu_uuid,pid", end) if rows else ProgramOutput(0)
    error = error or "; ".join(f"GPU {gpu.index}: {gpu.reason}" for gpu in lost)
    error = error or f"nvidia-smi: {apps.error}" * (apps.code is None)
    gpus = {}
    for row in rows:
        watts = row["power.draw"]
        gpus[row["uuid"]] = GpuUsage(
            index=count(row["index"]),
            name=row["name"],
            use=count(row["utilization.gpu"]) if row["utilization.gpu"].isdecimal() else None,
            watts=float(watts) if re.fullmatch(r"\d+(\.\d+)?", watts) else 0.0,  # may be [N/A]
            memory_used=mebibytes(row["memory.used"]),
            memory=mebibytes(row["memory.total"]),
        )
    return gpus, [(row["gpu_uuid"], count(row["pid"])) for row in table(apps.out, "gpu_uuid,pid")], error


def gpus_of(
    processes: Sequence[RunProcess], gpus: Mapping[str, GpuUsage], users: Sequence[tuple[str, int]]
) -> tuple[GpuUsage, ...]:
    """The GPUs used by these processes; none in a container in which nvidia-smi shows the pids of the host."""
    pids = {process.pid for process in processes}
    found = {uuid for uuid, pid in users if pid in pids}
    return tuple(gpu for uuid, gpu in gpus.items() if uuid in found)


def read_stacks(process: RunProcess, output: str) -> tuple[str, tuple[Frame, ...]]:
    """Return the stacks as text, and the frames of the main thread, innermost first.

    py-spy reads the stacks of all threads. If it fails or is not installed, the rank itself writes the stack of its
    main thread. If the rank is stopped or does not reply, the text has the kernel function in which each thread waits.
    output: directory of the rank's output.
    """
    stopped = process.state in ("T", "t")
    if py_spy := path_of_py_spy():
        command = [py_spy, "dump", "--json", "--full-filenames", "--pid", str(process.pid)]
        command += ["--nonblocking"] * stopped  # py-spy must not stop a stopped process again
        reply = run_program(command, STACK_TIMEOUT)
        if reply.code == 0 and (found := parse_py_spy(process.pid, reply.out)):
            return found[0], with_code(found[1])
        note = f"py-spy: {' '.join((reply.error or reply.out).split())}"
    else:
        note = f"for the stacks of all threads: '{sys.executable}' -m pip install py-spy"
    frames = () if stopped else stack_of(process.pid, output)
    text = "\n".join(["main thread", *map(_render_frame, frames)]) if frames else _kernel_threads(process)
    return f"{text}\n{note}", with_code(frames)


def parse_py_spy(pid: int, dump: str) -> tuple[str, tuple[Frame, ...]] | None:
    """Return the result of read_stacks() from the JSON of py-spy; None if it cannot be parsed."""
    lines, stacks = [], []
    try:
        # The name identifies the main thread where os_thread_id is unknown, as in some containers.
        main_first = sorted(parse_json(dump), key=lambda one: (one["os_thread_id"] != pid, one["thread_name"] != MAIN))
        for thread in main_first:
            frames = script_frames([Frame(one["filename"], one["line"], one["name"]) for one in thread["frames"]])
            state = "active" if thread["active"] else "idle"
            lines.append(f'Thread {thread["os_thread_id"]} ({state}): "{thread["thread_name"]}"')
            lines += map(_render_frame, frames)
            stacks.append(frames)
    except (ValueError, KeyError, TypeError):
        return None
    return ("\n".join(lines), stacks[0]) if stacks else None


def _render_frame(frame: Frame) -> str:
    return f"    {frame.function} ({os.path.join(*Path(os.path.normpath(frame.file)).parts[-2:])}:{frame.line})"


def path_of_py_spy() -> str | None:
    installed = Path(sys.executable).parent / "py-spy"
    return str(installed) if os.access(installed, os.X_OK) else shutil.which("py-spy")


def _kernel_threads(process: RunProcess) -> str:
    """A line for each thread: its state, and the kernel function in which it waits."""
    lines = []
    for directory in sorted(PROC.glob(f"{process.pid}/task/[0-9]*"), key=lambda path: int(path.name)):
        state = read(directory / "stat").rpartition(")")[2][1:2]
        waits = read(directory / "wchan").strip("0")
        main = "main thread" if directory.name == str(process.pid) else "thread"
        text = f"{main} {directory.name} {read(directory / 'comm')}: {state}"
        lines.append(text + (f", waits in {waits}" if waits else ""))
    return "\n".join(lines)


def observe(run: str, node: str, *, count: int, first_rank: int, seconds: float, stacks: bool) -> NodeStatus:
    """The status of a run on this node. count: expected ranks. seconds: duration of the CPU sample."""
    before, start = processes_of(run, node), time.monotonic()
    gpus, users, error = query_gpus() if seconds else ({}, [], "")
    time.sleep(max(0.0, seconds - (time.monotonic() - start)))
    after, elapsed = processes_of(run, node), time.monotonic() - start
    by_rank, written, now = processes_by_rank(after), output_files(Path(run), node), file_time(run)

    def status_of(local_rank: int) -> RankStatus:
        processes, files = by_rank.get(local_rank, []), written.get(local_rank, [])
        silent, line = last_output(files, now)
        if not processes:
            return RankStatus(first_rank + local_rank, local_rank, None, silent=silent, line=line)
        text, frames = read_stacks(processes[0], str(files[0].parent)) if stacks and files else ("", ())
        rank = first_rank + local_rank
        return RankStatus(
            rank=rank,
            local_rank=local_rank,
            pid=processes[0].pid,
            state=processes[0].state,
            cpu=cores_used(before, processes, elapsed),
            memory=sum(process.memory for process in processes),
            gpus=gpus_of(processes, gpus, users),
            silent=silent,
            line=line,
            stack_text=text,
            frames=frames,
            collectives=query_collectives(directory_of(run, node), rank) if stacks else (),
        )

    with ThreadPoolExecutor(8) as pool:  # py-spy takes a moment for each rank
        ranks = tuple(pool.map(status_of, sorted(set(range(count)) | set(by_rank))))
    line = last_line(Path(newest(run), f"node_{node}.log"))
    progress = read_progress(Path(run))
    host, stopped = os.uname().nodename, stopped_processes(run, node, after)
    return NodeStatus(host, elapsed, ranks, tuple(after), line, tuple(gpus.values()), error, progress, stopped)


def stopped_processes(run: str, node: str, processes: Sequence[RunProcess]) -> tuple[int, ...]:
    """Return the ids of stopped (SIGSTOP) processes: the supervisor, and `processes` that belong to no rank."""
    others = [one.pid for one in processes if one.local_rank is None]
    supervisor = process_scan.live_pid(read_json(Path(run, f"node_{node}.pid")).get("supervisor"))
    found = {pid: process_scan.process(pid) for pid in (supervisor, *others)}
    return tuple(pid for pid, stat in found.items() if stat and stat.state in (b"T", b"t"))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="node_status", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("--run", required=True, help="MUSTER_RUN_DIR of its processes")
    parser.add_argument("--node", required=True, help="MUSTER_NODE of its processes")
    parser.add_argument("--count", type=int, default=0, help="expected number of ranks")
    parser.add_argument("--first-rank", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0, help="duration of the CPU sample")
    parser.add_argument("--stacks", action="store_true", help="also read the stacks of each rank")
    options = parser.parse_args(arguments)
    if problem := foreign_directory(options.run):
        parser.error(problem)
    sys.stdout.write(format_reply(asdict(observe(**vars(options)))))
    return 0
