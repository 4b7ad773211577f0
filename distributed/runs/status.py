"""Show the status of a run: a summary, then the state, resource usage and last output of each rank.

    train-20261121-122942-0a81: running for 12 min, step 120 of 1,200, loss 2.3125
    looks hung: rank 1 on node2 is stopped (state T); to continue, run there:
      $ kill -CONT 4711

    node   rank  state     cpu  memory  quiet  last line
    node1     0  waiting    1%    1.2G   40 s  step  120/1200  loss 2.3125 ...
    node2     1  STOPPED    0%    1.2G   41 s

scripts/status.sh executes this program, which queries the nodes, judges their replies and renders them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from distributed import terminal
from distributed.attempts import newest
from distributed.exit_codes import UNFIT
from distributed.files import KIT, command_of
from distributed.records import node_changes, read_object
from distributed.runs.lookup import EXITED, IN_JOB, REMOTE, RUNNING, Run
from distributed.runs.node_status import GpuUsage, RankStatus, RunProgress, read_progress
from distributed.runs.query import (
    JobWithoutRun,
    NodeReply,
    RunQuery,
    find_run,
    parser_of,
    remaining_processes,
)
from distributed.terminal import BOLD, DIM, GREEN, RED, YELLOW, duration, paint
from distributed.transport.commands import Messages, TransportError, exit_on_signals
from distributed.verdict.hang_analysis import BUSY, COLLECTIVE, GPU_IDLE, Activity, Diagnosis, diagnose, needs_stacks
from distributed.verdict.verdict import decide

FALLBACK = (120, 40)  # columns and lines without a terminal
STATES = {"R": "running", "D": "disk", "T": "STOPPED", "t": "STOPPED"} | dict.fromkeys("SIW", "waiting")
COLUMNS = ("node", "rank", "pid", "state", "cpu", "memory", "gpu", "quiet", "last line")
RIGHT_ALIGNED = ("rank", "pid", "cpu", "memory", "quiet")
WIDE = 100  # columns; on narrower terminals the pid is left out, to make room for the last line
REFRESH_INTERVAL = 2.0  # seconds
SAMPLE_SECONDS = 1  # duration of the measurement of CPU use
TIMEOUT, WATCH_TIMEOUT, STACKS_TIMEOUT = 20.0, 5.0, 60.0  # seconds for a reply


@dataclass(frozen=True)
class RunState:
    """The state of a run as a whole."""

    name: str  # starting, running, ending, ended, left (without a launcher), waiting (in SLURM's queue), unknown
    more: str = ""  # the details
    wrong: bool = False
    remedy: str = ""  # a command


@dataclass(frozen=True)
class Status:
    run: Run
    state: RunState
    diagnosis: Diagnosis
    progress: RunProgress
    seconds: float  # from the start until now, or until the end
    replies: tuple[NodeReply, ...]
    needs_stacks: bool = False  # the diagnosis needs stacks

    @property
    def exit_code(self) -> int:
        """1 for a failure or a hang; otherwise UNFIT if a node did not reply; otherwise 0."""
        if self.state.wrong or self.diagnosis.hung:
            return 1
        return UNFIT if any(reply.status is None for reply in self.replies) else 0


def judge(
    run: Run,
    replies: Sequence[NodeReply],
    verdict: Mapping[str, Any],
    progress: RunProgress,
    now: float,
    job_state: str = "",
) -> Status:
    """Return the status of a run at the time `now`.

    verdict: verdict.json with its modification time as "written", or empty. job_state: state and reason from squeue.
    """
    job, _, reason = job_state.partition(" ")
    if job == "PENDING":
        state = RunState("waiting", f"job {run.job} is requeued and pending ({reason})")
    else:
        state = state_of(run, replies, verdict)
    end = verdict.get("written", now) if state.name == "ended" else now
    seconds = max(0.0, end - datetime.fromisoformat(run.started).timestamp())
    status = Status(run, state, Diagnosis(False), progress, seconds, tuple(replies))
    if state.name in ("ended", "waiting"):
        return status
    observed = observe_ranks(replies, progress, seconds, run.launched)
    diagnosis = diagnose(observed.active, observed.seconds, observed.silent, observed.exited)
    stacks = needs_stacks(observed.ranks, observed.silent) and not any(rank.stopped for rank in observed.ranks)
    return replace(status, diagnosis=diagnosis, needs_stacks=stacks)


def state_of(run: Run, replies: Sequence[NodeReply], verdict: Mapping[str, Any]) -> RunState:
    active = [reply.name for reply in replies if reply.status and reply.status.processes]
    text = f"verdict: {verdict.get('outcome')}: {verdict.get('cause')}"
    if run.launcher.state in (RUNNING, IN_JOB) or (run.launcher.state == REMOTE and active):
        if verdict:
            return RunState("ending", text)
        ranks = ranks_of(replies)
        missing = [f"rank {rank.rank} on {node}" for rank, node in ranks if rank.pid is None]
        if ranks and len(missing) == len(ranks):
            started = any(rank.silent is not None for rank, _ in ranks)
            return RunState("ending", "all ranks have exited") if started else RunState("starting")
        names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        return RunState("running", f"not running: {names}" if missing else "")
    if active and run.lease == 0 and not (run.directory / "verdict.json").exists():
        text = f"the launcher has exited, and the run continues on {', '.join(active)}; to follow it again:"
        return RunState("left", text, remedy=shlex.join([*command_of("attach"), str(run.directory)]))
    if active:
        stop = shlex.join([*command_of("stop"), str(run.directory)])
        return RunState("left", f"the launcher has exited, but processes remain on {', '.join(active)}", True, stop)
    if verdict:
        return RunState("ended", text, verdict.get("outcome") == "failed")
    command = f"cd {shlex.quote(KIT)} && python -m distributed.verdict.verdict {shlex.quote(str(run.directory))}"
    return RunState("unknown", "no process of the run was found, and it has no verdict; to get one:", True, command)


def ranks_of(replies: Sequence[NodeReply]) -> list[tuple[RankStatus, str]]:
    """The ranks of all nodes that replied, each with the name of its node."""
    return [(rank, reply.name) for reply in replies if reply.status for rank in reply.status.ranks]


@dataclass(frozen=True)
class Observation:
    """The ranks of all nodes that replied."""

    ranks: tuple[Activity, ...]  # the running ranks
    exited: tuple[str, ...]  # names of the ranks that have exited
    not_started: int  # number of ranks that have not started
    seconds: float  # duration of the sample
    silent: float  # seconds since the last metric or the last output of a running rank, whichever was later
    stopped: tuple[Activity, ...] = ()  # supervisors, agents and fork servers that are stopped (SIGSTOP)
    gpu_errors: str = ""  # such as "; node2: nvidia-smi: no reply within 5 s"; appended to the reasons of a hang

    @property
    def active(self) -> tuple[Activity, ...]:
        """The processes that show whether the run hangs: the running ranks or, if there are none, `stopped`."""
        return self.ranks or self.stopped


def observe_ranks(
    replies: Sequence[NodeReply], progress: RunProgress, elapsed: float, launched: str = ""
) -> Observation:
    """Summarise the ranks of all nodes that replied.

    elapsed: seconds since the run started, or since the caller began to watch it; a rank or run without any output was
    silent for this time. launched: the installed package that the run has launched, see Run.launched.
    """
    ranks = ranks_of(replies)
    with_gpus = {reply.name for reply in replies if reply.status and reply.status.gpus}
    # If nvidia-smi shows no GPU for any rank of a node, it may not see the processes in their container.
    named = {node for rank, node in ranks if rank.gpus}
    activities = tuple(
        Activity(
            rank=rank.rank,
            node=node,
            pid=rank.pid,
            state=rank.state,
            cpu=rank.cpu,
            gpu=max((gpu.use for gpu in rank.gpus if gpu.use is not None), default=None),
            gpu_unknown=any(gpu.use is None for gpu in rank.gpus) or node in with_gpus - named,
            frames=rank.frames,
            collectives=rank.collectives,
            launched=launched,
        )
        for rank, node in ranks
        if rank.pid is not None
    )
    statuses = [reply.status for reply in replies if reply.status]
    silences = [elapsed if rank.silent is None else rank.silent for rank, _ in ranks if rank.pid is not None]
    ages = [progress.silent, *(status.progress.silent for status in statuses), *silences]
    errors = [f"; {one.name}: {one.status.gpu_error}" for one in replies if one.status and one.status.gpu_error]
    not_running = [(f"rank {rank.rank} on {node}", rank.silent) for rank, node in ranks if rank.pid is None]
    return Observation(
        ranks=activities,
        exited=tuple(name for name, silent in not_running if silent is not None),
        not_started=sum(silent is None for _, silent in not_running),
        seconds=max((status.seconds for status in statuses), default=0.0),
        silent=min((age for age in ages if age is not None), default=elapsed),
        stopped=tuple(
            Activity(None, reply.name, pid, "T", 0.0, None)
            for reply in replies
            if reply.status
            for pid in reply.status.stopped
        ),
        gpu_errors="".join(errors),
    )


# ---------------------------------------------------------------- text


def render(status: Status, width: int, with_stacks: bool = True) -> str:
    """The status as text. Text and table fit the width; commands and stacks are not wrapped."""
    state, diagnosis = status.state, status.diagnosis

    def paragraph(text: str, colour: str, command: str = "") -> list[str]:
        lines = [paint(line, colour) for line in terminal.wrap(text, width, indent="  ")]
        return [*lines, f"  $ {command}"] if command else lines

    lines = [headline(status)]
    lines += paragraph(state.more, RED if state.wrong else GREEN if state.name == "ended" else YELLOW, state.remedy)
    lines += paragraph(diagnosis.text, RED if diagnosis.hung else YELLOW, diagnosis.remedy)
    lines += ["", *table(status, width)]
    notes = [line for note in notes_on(status) for line in paragraph(note, YELLOW)]
    lines += [""] * bool(notes) + notes
    lines += stacks(status) if with_stacks else []
    return "".join(f"{line}\n" for line in lines)


HEADLINES = {
    "starting": "starting for",
    "running": "running for",
    "ending": "ending, after",
    "ended": "ended after",
    "left": "without a launcher, after",
    "unknown": "state unknown, after",
    "waiting": "pending in the queue, started",
}


def headline(status: Status) -> str:
    state = status.state
    healthy = state.name in ("running", "ended") and not status.diagnosis.hung
    how = paint(HEADLINES[state.name], RED if state.wrong else GREEN if healthy else YELLOW)
    text = f"{paint(status.run.directory.name, BOLD)}: {how} {duration(round(status.seconds))}"
    text += " ago" if state.name == "waiting" else ""
    progress = status.progress
    if progress.step is not None:
        text += f", step {progress.step:,}" + (f" of {progress.steps:,}" if progress.steps else "")
    elif progress.epoch is not None:
        text += f", epoch {progress.epoch:g}"
    if progress.loss is not None and (progress.step is not None or progress.origin):
        text += f", loss {'nan' if isinstance(progress.loss, str) else format(progress.loss, '.4f')}"
    is_known = progress.step is not None or progress.epoch is not None or progress.loss is not None
    return text + f" ({progress.origin})" * bool(progress.origin and is_known)


def table(status: Status, width: int) -> list[str]:
    """A row for each rank. Empty columns are left out, and the last column is cut to fit the width."""
    rows = [dict.fromkeys(COLUMNS, "") | row for reply in status.replies for row in rows_of(reply, status.state)]
    heads = [head for head in COLUMNS if any(row[head] for row in rows) and (width >= WIDE or head != "pid")]
    right = [column for column, head in enumerate(heads) if head in RIGHT_ALIGNED]
    cells = [[row[head] for head in heads] for row in rows]
    if cells:
        cells.insert(0, [paint(head, DIM) for head in heads])
    return terminal.table(cells, right, width)


def rows_of(reply: NodeReply, state: RunState) -> Iterator[dict[str, str]]:
    name = reply.name
    if reply.status is None:
        first, last = reply.node.first_rank, reply.node.first_rank + reply.node.processes - 1
        ranks = f"{first}-{last}" if first < last else f"{first}"
        yield {"node": name, "rank": ranks, "state": paint("no reply", YELLOW)}
        return
    for rank in reply.status.ranks:
        row = {"node": name, "rank": str(rank.rank), "last line": rank.line}
        row["gpu"] = " ".join(map(gpu_text, rank.gpus))
        if rank.pid is not None:
            text = doing(rank)
            row["state"] = paint(text, RED) if text.isupper() else text
            row |= {"pid": str(rank.pid), "cpu": f"{rank.cpu:.0%}", "memory": size(rank.memory)}
        elif state.name in ("ended", "ending", "waiting"):
            row["state"] = paint("ended", DIM)
        else:
            row["state"] = paint("exited", RED) if rank.silent is not None else paint("not started", YELLOW)
        if rank.silent is not None and state.name != "ended":
            row["quiet"] = duration(round(rank.silent))
        yield row
        name = ""


def doing(rank: RankStatus) -> str:
    """What a running rank does, as far as its stack, PyTorch's flight recorder, or the use of CPU and GPU show."""
    if rank.state not in STATES or STATES[rank.state] not in ("running", "waiting"):
        return STATES.get(rank.state, rank.state)
    pending = next((one.name for one in rank.collectives if one.pending and one.name), "")
    if rank.frames and COLLECTIVE.fullmatch(rank.frames[0].file):
        pending = pending or rank.frames[0].function
    if pending:
        return f"waiting in {pending}"
    uses_gpu = any((gpu.use or 0) >= GPU_IDLE for gpu in rank.gpus)
    return "busy" if rank.cpu >= BUSY or uses_gpu else STATES[rank.state]


def gpu_text(gpu: GpuUsage) -> str:
    use = "?" if gpu.use is None else f"{gpu.use}%"
    return f"{gpu.index}: {use}" + (f" {gpu.watts:.0f}W" if gpu.watts else "")


def notes_on(status: Status) -> Iterator[str]:
    for reply in status.replies:
        node = reply.status
        if node is None:
            yield f"{reply.name}: {reply.error}"
            continue
        if status.state.name == "left" and node.processes:
            yield f"{reply.name}: {remaining_processes(node)}"
        if node.gpu_error:
            yield f"{reply.name}: {node.gpu_error}"
        if node.gpus and not any(rank.gpus for rank in node.ranks):
            yield f"{reply.name}: GPU use by all processes: {', '.join(map(gpu_text, node.gpus))}"
        if node.line and all(rank.silent is None for rank in node.ranks):
            yield f"{reply.name}: last line of its log: {node.line}"
    yield from node_changes({"changes": list(status.run.changes)})
    if status.run.spares and status.state.name == "running":
        yield "spare nodes: " + ", ".join(node.node for node in status.run.spares)
    launcher = status.run.launcher
    if launcher.state == REMOTE:
        yield f"the launcher is process {launcher.pid} on {launcher.host}; this machine cannot check whether it runs"


def stacks(status: Status) -> Iterator[str]:
    for rank, node in ranks_of(status.replies):
        if rank.stack_text:
            yield ""
            yield paint(f"rank {rank.rank} on {node}, process {rank.pid}", BOLD)
            yield from (f"  {line}".rstrip() for line in rank.stack_text.splitlines())


def size(amount: int) -> str:
    gib = amount / 2**30
    return f"{gib:.0f}G" if gib >= 10 else f"{gib:.1f}G" if gib >= 1 else f"{amount >> 20}M"


class Viewer:
    """Queries a run and shows its status."""

    def __init__(self, options: argparse.Namespace, query: RunQuery) -> None:
        self._options, self._query = options, query
        self._timeout = STACKS_TIMEOUT if options.stacks else WATCH_TIMEOUT if options.watch else TIMEOUT

    def status(self) -> Status:
        """Query the run. If it has no recent output, query it again with stacks.

        The stacks show the rank that the other ranks wait for.
        """
        status = self._status(["--stacks"] * self._options.stacks)
        return self._status(["--stacks"]) if status.needs_stacks and not self._options.stacks else status

    def _status(self, options: Sequence[str]) -> Status:
        self._query.update()
        replies = self._query.query(["--seconds", str(SAMPLE_SECONDS), *options], self._timeout)
        run, now = self._query.run, time.time()
        path = Path(newest(run.directory), "verdict.json")
        if verdict := read_object(path, []):
            verdict["written"] = path.stat().st_mtime
        elif run.launcher.state == EXITED:
            decided = decide(run.directory)  # the launcher was killed before it wrote verdict.json
            verdict = asdict(decided) | {"written": decided.time or now}
        progress = read_progress(run.directory)
        if progress == RunProgress():
            known = (reply.status.progress for reply in replies if reply.status)
            progress = replace(next((one for one in known if one.step is not None), progress), silent=None)
        return judge(run, replies, verdict, progress, now, self._query.job_state)

    def show(self, status: Status, in_place: bool = False) -> None:
        """in_place: overwrite the screen of the terminal."""
        if self._options.json:
            sys.stdout.write(as_json(status))
            return
        width, height = shutil.get_terminal_size(FALLBACK)
        text = render(status, width, self._options.stacks)
        if in_place:
            text = "".join(f"{line}\n" for line in text.splitlines()[: height - 1])
        terminal.show(text, in_place)

    def watch(self) -> int:
        """Refresh the table until the run has ended; on a terminal, on its alternate screen. Returns the exit code."""
        status, on_screen = None, sys.stdout.isatty()
        if on_screen:
            sys.stdout.write("\x1b[?1049h\x1b[2J")
        try:
            while True:
                status = self.status()
                self.show(status, on_screen)
                if status.state.name == "ended":
                    return status.exit_code
                time.sleep(REFRESH_INTERVAL - SAMPLE_SECONDS)
        finally:
            if on_screen:  # print the last table again on the normal screen
                sys.stdout.write("\x1b[?1049l")
                sys.stdout.flush()
                if status:
                    self.show(status)


def main(arguments: Sequence[str]) -> int:
    """Print the status. Returns Status.exit_code, or 2 if there is no such run."""
    parser = parser_of("status", str(__doc__))
    parser.add_argument("--watch", action="store_true", help="refresh until the run has ended")
    parser.add_argument("--stacks", action="store_true", help="also print the stacks")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    messages = Messages(options.program, quiet=options.watch)
    exit_on_signals()
    try:
        viewer = Viewer(options, RunQuery(find_run(options.run, options.log_dir, options.program), messages))
        if options.watch:
            return viewer.watch()
        status = viewer.status()
        viewer.show(status)
        return status.exit_code
    except JobWithoutRun as job:
        state, _, reason = job.state.partition(" ")
        messages.print(f"job {job.job} has not started a run; its state is {state} ({reason})")
        return 0
    except TransportError as error:
        return messages.print_error(error)


def as_json(status: Status) -> str:
    facts = asdict(status) | {"exit_code": status.exit_code}
    del facts["run"]["call"]  # `command` has the same words
    facts["run"]["launcher"]["where"] = facts["run"]["launcher"].pop("state")  # its name in the output of --json
    replies = facts.pop("replies")
    facts["nodes"] = [reply["node"] | {"status": reply["status"], "error": reply["error"]} for reply in replies]
    return json.dumps(facts, indent=2, sort_keys=True, default=str) + "\n"
