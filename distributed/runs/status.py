"""How is that run? Each rank alive or not, what it uses and last said; and in one line above, what all that means.

    train-20261121-122942-0a81: running for 12 min, step 120 of 1,200, loss 2.3125
    looks hung: rank 1 on node2 is stopped (state T); to go on, there:
      $ kill -CONT 4711

    node   rank  state     cpu  memory  quiet  last line
    node1     0  sleeps     1%    1.2G   40 s  step  120/1200  loss 2.3125 ...
    node2     1  STOPPED    0%    1.2G   41 s

scripts/status.sh has asked the nodes; here the answers are judged and drawn. Standard library only.
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

from distributed import metrics, terminal
from distributed.exit_codes import UNFIT
from distributed.files import KIT
from distributed.runs.hang_analysis import Activity, Diagnosis, diagnose, needs_stacks
from distributed.runs.lookup import ELSEWHERE, GONE, HERE, IN_JOB, NoRun, Run, read
from distributed.runs.node_status import Gpu, Rank
from distributed.runs.records import read_object
from distributed.runs.verdict import decide
from distributed.runs.visit import Visit, left_on, visits
from distributed.terminal import BOLD, DIM, GREEN, RED, YELLOW, paint

FALLBACK = (120, 40)  # columns and lines where there is no terminal
STATES = {"R": "runs", "S": "sleeps", "D": "disk", "T": "STOPPED", "t": "STOPPED", "I": "sleeps", "W": "sleeps"}
COLUMNS = ("node", "rank", "pid", "state", "cpu", "memory", "gpu", "quiet", "last line")
AT_THE_RIGHT = ("rank", "pid", "cpu", "memory", "quiet")
WIDE = 100  # columns; on less, the last line is worth more than the process id
NEEDS_STACKS = "needs-stacks"  # in place of a state


@dataclass(frozen=True)
class State:
    """How the whole run stands."""

    name: str  # starting, running, ending, ended, left (behind), waiting (for SLURM), unknown
    more: str = ""  # why, or what of it
    wrong: bool = False
    remedy: str = ""  # a command


@dataclass(frozen=True)
class Progress:
    step: int | None = None
    steps: int | None = None  # in all
    loss: float | None = None
    silent: float | None = None  # seconds since it was written


@dataclass(frozen=True)
class Status:
    run: Run
    state: State
    pulse: Diagnosis
    progress: Progress
    seconds: float  # since the start, or from the start to the end
    visits: tuple[Visit, ...]
    needs_stacks: bool = False  # it has been quiet for so long that they should be asked for

    @property
    def exit_code(self) -> int:
        """What is known to be wrong is worth more than what is not known."""
        if self.state.wrong or self.pulse.hung:
            return 1
        return UNFIT if any(one.look is None for one in self.visits) else 0


# ---------------------------------------------------------------- judging


def judge(
    run: Run, found: Sequence[Visit], verdict: Mapping[str, Any], progress: Progress, now: float, job_state: str = ""
) -> Status:
    """verdict: what verdict.json says, empty when there is none. job_state: of its SLURM job, as squeue has it."""
    state = waiting(run, job_state) or state_of(run, found, verdict)
    end = verdict.get("written", now) if state.name == "ended" else now
    seconds = max(0.0, end - datetime.fromisoformat(run.started).timestamp())
    moving = state.name in ("running", "left", "unknown")
    if not moving:
        return Status(run, state, Diagnosis(False), progress, seconds, tuple(found))
    ranks = seen(found, progress, seconds)
    pulse = diagnose(ranks.beats, ranks.seconds, ranks.silent, ranks.ended)
    doubt = needs_stacks(ranks.beats, ranks.silent) and not any(beat.stopped for beat in ranks.beats)
    return Status(run, state, pulse, progress, seconds, tuple(found), doubt)


def waiting(run: Run, job_state: str) -> State | None:
    """For the job's next turn."""
    word, _, reason = job_state.partition(" ")
    return State("waiting", f"job {run.job} waits for its next turn ({reason})") if word == "PENDING" else None


def state_of(run: Run, found: Sequence[Visit], verdict: Mapping[str, Any]) -> State:
    on = [one.place.node for one in found if one.look and one.look.processes]
    if run.launcher.where in (HERE, IN_JOB) or (run.launcher.where == ELSEWHERE and on):
        return going_on(found, verdict)
    if on:
        stop = f"{KIT}/scripts/stop.sh {shlex.quote(str(run.folder))}"
        return State("left", f"the launcher is gone, but processes are left on {', '.join(on)}", True, stop)
    if verdict:
        return State("ended", said(verdict), verdict.get("outcome") == "failed")
    ask = f"cd {shlex.quote(KIT)} && python -m distributed.runs.verdict {shlex.quote(str(run.folder))}"
    return State("unknown", "nothing of it runs, and there is no verdict; what is known:", True, ask)


def going_on(found: Sequence[Visit], verdict: Mapping[str, Any]) -> State:
    ranks = [(rank, one.place.node) for one in found if one.look for rank in one.look.ranks]
    missing = [f"rank {rank.rank} on {node}" for rank, node in ranks if rank.pid is None]
    if verdict:
        return State("ending", said(verdict))
    if ranks and len(missing) == len(ranks):
        began = any(rank.silent is not None for rank, _ in ranks)
        return State("ending", "no rank is there any more") if began else State("starting")
    who = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
    return State("running", f"not there: {who}" if missing else "")


def said(verdict: Mapping[str, Any]) -> str:
    return f"verdict: {verdict.get('outcome')}: {verdict.get('cause')}"


@dataclass(frozen=True)
class Seen:
    """What the nodes saw of all ranks."""

    beats: tuple[Activity, ...]  # of the ranks that are there
    ended: tuple[str, ...]  # the ranks that were there, and are no more
    to_come: int  # ranks that have not begun
    seconds: float  # for which they were watched
    silent: float  # since the last output or metric of any of them


def seen(found: Sequence[Visit], progress: Progress, running: float) -> Seen:
    """running: seconds since the start; a rank cannot have been silent for longer."""
    ranks = [(rank, one.place.node) for one in found if one.look for rank in one.look.ranks]
    beats = tuple(
        Activity(
            rank=rank.rank,
            node=node,
            pid=rank.pid,
            state=rank.state,
            cpu=rank.cpu,
            gpu=max(gpu.use for gpu in rank.gpus) if rank.gpus else None,
            silent=running if rank.silent is None else rank.silent,
            frames=rank.frames,
        )
        for rank, node in ranks
        if rank.pid is not None
    )
    looks = [one.look for one in found if one.look]
    silences = [beat.silent for beat in beats]
    silences += [silent for silent in (progress.silent, *(look.metrics for look in looks)) if silent is not None]
    return Seen(
        beats=beats,
        ended=tuple(
            f"rank {rank.rank} on {node}" for rank, node in ranks if rank.pid is None and rank.silent is not None
        ),
        to_come=len([rank for rank, _ in ranks if rank.pid is None and rank.silent is None]),
        seconds=max((look.seconds for look in looks), default=0.0),
        silent=min(silences, default=0.0),
    )


# ---------------------------------------------------------------- what the folder of the run tells


def read_progress(folder: Path, now: float) -> Progress:
    """How far the script is, by the newest values in metrics.jsonl."""
    path = folder / "metrics.jsonl"
    try:
        silent = max(0.0, now - path.stat().st_mtime)
    except OSError:
        return Progress()
    found = metrics.newest(path)
    step, steps = (None if value is None else int(value) for value in (found.get("step"), found.get("steps")))
    return Progress(step, steps, found.get("loss"), silent)


# ---------------------------------------------------------------- drawing


def draw(status: Status, width: int, with_stacks: bool = True) -> str:
    """The whole for a person. No row of the table is longer than width; commands and stacks are shown whole."""
    state, pulse = status.state, status.pulse
    colour = RED if state.wrong else GREEN if state.name == "ended" else YELLOW
    lines = [headline(status), *wrapped(state.more, width, colour)]
    lines += [f"  $ {state.remedy}"] * bool(state.remedy)
    lines += wrapped(pulse.words, width, RED if pulse.hung else YELLOW)
    lines += [f"  $ {pulse.remedy}"] * bool(pulse.remedy)
    lines += ["", *table(status, width)]
    notes = [line for note in notes_on(status) for line in wrapped(note, width, YELLOW)]
    lines += [""] * bool(notes) + notes
    lines += stacks(status) if with_stacks else []
    return "".join(f"{line}\n" for line in lines)


def wrapped(text: str, width: int, colour: str) -> list[str]:
    return [paint(line, colour) for line in terminal.wrap(text, width, indent="  ")]


HEADS = {
    "starting": "starting for",
    "running": "running for",
    "ending": "ending, after",
    "ended": "ended after",
    "left": "left behind, after",
    "unknown": "not known, after",
    "waiting": "waiting in the queue, begun",
}


def headline(status: Status) -> str:
    state = status.state
    calm = state.name in ("running", "ended") and not status.pulse.hung
    how = paint(HEADS[state.name], RED if state.wrong else GREEN if calm else YELLOW)
    ago = " ago" * (state.name == "waiting")
    facts = [f"{how} {duration(status.seconds)}{ago}", *progress_words(status.progress)]
    return f"{paint(status.run.folder.name, BOLD)}: {', '.join(facts)}"


def progress_words(progress: Progress) -> Iterator[str]:
    if progress.step is not None:
        yield f"step {progress.step:,}" + (f" of {progress.steps:,}" if progress.steps else "")
        if progress.loss is not None:
            yield f"loss {progress.loss:.4f}"


def table(status: Status, width: int) -> list[str]:
    """Columns in which nobody has anything are left out; the last one takes what room is left."""
    rows = [dict.fromkeys(COLUMNS, "") | row for one in status.visits for row in rows_of(one, status.state)]
    heads = [head for head in COLUMNS if any(row[head] for row in rows) and (width >= WIDE or head != "pid")]
    right = [column for column, head in enumerate(heads) if head in AT_THE_RIGHT]
    cells = [[row[head] for head in heads] for row in rows]
    if cells:
        cells.insert(0, [paint(head, DIM) for head in heads])
    return terminal.table(cells, right, width)


def rows_of(one: Visit, state: State) -> Iterator[dict[str, str]]:
    name = one.place.node
    if one.look is None:
        first, last = one.place.first_rank, one.place.first_rank + one.place.processes - 1
        yield {
            "node": name,
            "rank": f"{first}-{last}" if first < last else f"{first}",
            "state": paint("not seen", YELLOW),
        }
        return
    for rank in one.look.ranks:
        yield {"node": name, **row_of(rank, state)}
        name = ""


def row_of(rank: Rank, state: State) -> dict[str, str]:
    row = {"rank": str(rank.rank), "state": state_words(rank, state), "last line": rank.line}
    row["gpu"] = " ".join(map(gpu_words, rank.gpus))
    if rank.pid is not None:
        row |= {"pid": str(rank.pid), "cpu": f"{rank.cpu:.0%}", "memory": size(rank.memory)}
    if rank.silent is not None and state.name != "ended":
        row["quiet"] = duration(rank.silent)
    return row


def state_words(rank: Rank, state: State) -> str:
    if rank.pid is not None:
        word = STATES.get(rank.state, rank.state)
        return paint(word, RED) if word.isupper() else word
    if state.name in ("ended", "ending", "waiting"):
        return paint("ended", DIM)
    return paint("gone", RED) if rank.silent is not None else paint("not yet", YELLOW)


def gpu_words(gpu: Gpu) -> str:
    return f"{gpu.index}: {gpu.use}%" + (f" {gpu.watts:.0f}W" if gpu.watts else "")


def notes_on(status: Status) -> Iterator[str]:
    for one in status.visits:
        node = one.place.node
        if one.look is None:
            yield f"{node}: {one.why}"
            continue
        if status.state.name == "left" and one.look.processes:
            yield f"{node}: {left_on(one.look)}"
        if one.look.gpu_error:
            yield f"{node}: {one.look.gpu_error}"
        if one.look.gpus and not any(rank.gpus for rank in one.look.ranks):
            yield f"{node}: all GPUs, whoever uses them: {', '.join(map(gpu_words, one.look.gpus))}"
        if one.look.line and all(rank.silent is None for rank in one.look.ranks):
            yield f"{node}: last line of its log: {one.look.line}"
    launcher = status.run.launcher
    if launcher.where == ELSEWHERE:
        yield f"the launcher is process {launcher.pid} on {launcher.host}, and cannot be seen from here"


def stacks(status: Status) -> Iterator[str]:
    for one in status.visits:
        for rank in one.look.ranks if one.look else ():
            if rank.stands:
                yield ""
                yield paint(f"rank {rank.rank} on {one.place.node}, process {rank.pid}", BOLD)
                yield from (f"  {line}".rstrip() for line in rank.stands.splitlines())


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours = round(seconds / 3600)
    return f"{hours} h" if hours < 72 else f"{round(seconds / 86400)} days"


def size(amount: int) -> str:
    gib = amount / 2**30
    return f"{gib:.0f}G" if gib >= 10 else f"{gib:.1f}G" if gib >= 1 else f"{amount >> 20}M"


# ---------------------------------------------------------------- the program


def main(words: Sequence[str] | None = None) -> int:
    """Draw, once. Returns 0 when all is well, 1 when something is wrong, UNFIT when not all could be asked.

    With --first nothing is drawn when the stacks should be asked for: the state is then NEEDS_STACKS.
    """
    options = parse(words)
    now = time.time()
    try:
        run = read(options.run)
        run = replace(run, launcher=replace(run.launcher, where=options.launcher or run.launcher.where))
    except NoRun as error:
        sys.stderr.write(f"{error}\n")
        return 2
    found = visits(run, options.answers)
    written = run.folder / "verdict.json"
    if verdict := read_object(written, []):
        verdict["written"] = written.stat().st_mtime
    elif run.launcher.where == GONE:
        decided = decide(run.folder)  # the launcher was killed before it could write it
        verdict = asdict(decided) | {"written": decided.time or now}
    status = judge(run, found, verdict, read_progress(run.folder, now), now, options.job_state)
    if options.first and status.needs_stacks:
        options.state.write_text(NEEDS_STACKS + "\n")
        return 0
    if options.state:
        options.state.write_text(status.state.name + "\n")
    if options.json:
        sys.stdout.write(as_json(status))
    else:
        show(status, options.in_place, options.stacks)
    return status.exit_code


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="status", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("answers", type=Path, metavar="FOLDER", help="holds NODE.out, NODE.err and NODE.code")
    places = (HERE, GONE, ELSEWHERE, IN_JOB)
    parser.add_argument("--launcher", choices=places, help="where it was before the nodes were asked")
    parser.add_argument("--job-state", default="", help="of its SLURM job, as squeue has it")
    parser.add_argument("--first", action="store_true", help="nothing is drawn when the stacks are needed to judge")
    parser.add_argument("--stacks", action="store_true", help="show the stacks too")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--in-place", action="store_true", help="over what the terminal shows, and no more lines")
    parser.add_argument("--state", type=Path, metavar="FILE", help="gets the one word for how the run stands")
    return parser.parse_args(words)


def as_json(status: Status) -> str:
    facts = asdict(status) | {"exit_code": status.exit_code}
    facts["nodes"] = [one | one.pop("place") for one in facts.pop("visits")]
    return json.dumps(facts, indent=2, sort_keys=True, default=str) + "\n"


def show(status: Status, in_place: bool, with_stacks: bool) -> None:
    width, height = shutil.get_terminal_size(FALLBACK)
    text = draw(status, width, with_stacks)
    if in_place:
        lines = text.splitlines()[: height - 1]
        text = "\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J"
    terminal.show(text)


if __name__ == "__main__":
    sys.exit(main())
