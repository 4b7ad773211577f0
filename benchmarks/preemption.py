"""What does SLURM's word that the time is up cost: until the checkpoint is whole, until all has ended, and to go on?

Two nodes of 2 ranks train in turns as a job of the kit's slurm_train.sh and as the peer's, whose batch script is the
line `srun python -u train.py`: the same train.py, so that what differs is how the signal comes to it and what follows
its end. At a step SLURM signals both with `scancel --signal=USR2`. Seconds are taken from before scancel to the moment
at which the checkpoint has its final name, at which the last task has ended, and the last process of the job.

Then the kit's job requeues itself and goes on. Compared are the steps before and after, of which none should have been
done twice, and the seconds from the first line of the batch script to the first new step with those to the first step
of the fresh start. Needs root.

    python -m benchmarks.preemption [--turns 7]
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.laboratory import KIT, slurm, submit, wait_for
from benchmarks.pairs import ratio_of
from benchmarks.startup_slurm import ALLOCATION, STAMP

STEPS = 20  # before the signal
TIMEOUT = 120.0  # seconds for whatever is waited for
CONFIG = str(KIT / "config/quickstart.yaml")
WORDS = ["train.steps=100000", "train.evaluate_every=0", "checkpoint.every=0", "logging.every=1", "logging.sample=0"]
BARE_JOB = """#!/usr/bin/env bash
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" "$@"
"""


@dataclass(frozen=True)
class PreemptionSeconds:
    """Seconds."""

    first_step: float  # from the start of the batch script
    checkpoint: float  # these from the signal
    tasks: float
    job: float


@dataclass(frozen=True)
class Resumption:
    """What it was to go on."""

    first_step: float  # seconds from the start of the batch script to the first new step
    twice: int  # steps that were done twice


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Look for it ten times a second."""
    end = time.monotonic() + TIMEOUT
    while not holds():
        if time.monotonic() > end:
            sys.exit(f"{what}: not within {TIMEOUT:.0f} s")
        time.sleep(0.1)


# ---------------------------------------------------------------- what a job leaves


def records(run: Path) -> list[dict[str, Any]]:
    """What rank 0 has written down so far."""
    with suppress(OSError):
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    return []


def steps(run: Path) -> list[dict[str, Any]]:
    """One record for each step done."""
    return [record for record in records(run) if "loss" in record]


def steps_after_resume(run: Path) -> list[dict[str, Any]]:
    """The steps since the run was taken up again."""
    said = records(run)
    begin = next((place for place, record in enumerate(said) if record.get("event") == "resume"), len(said))
    return [record for record in said[begin:] if "loss" in record]


# ---------------------------------------------------------------- processes


def processes(job: str) -> tuple[list[int], list[int]]:
    """Those of a job, as files that can be read when they have ended: its tasks, and all others."""
    tasks: list[int] = []
    others: list[int] = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            words = environ.read_bytes().split(b"\0")
            if f"SLURM_JOB_ID={job}".encode() in words:
                file = os.pidfd_open(int(environ.parent.name))
                (tasks if any(word.startswith(b"SLURM_STEP_ID=") for word in words) else others).append(file)
    return tasks, others


def end_of(files: list[int]) -> float:
    """When the last of these processes has ended."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    left = set(files)
    while left:
        ended = [file for file, _ in poll.poll(TIMEOUT * 1000)]
        if not ended:
            sys.exit(f"{len(left)} processes of the job have not ended within {TIMEOUT:.0f} s")
        for file in ended:
            poll.unregister(file)
            os.close(file)
            left.remove(file)
    return time.time()


# ---------------------------------------------------------------- the two sides


class PreemptionJobs:
    """What is compared, in a folder that all nodes share."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder, self.begun = folder, folder / "begun"
        self.env = {**env, "BASH_ENV": f"{folder}/stamp.bash", "BEGUN": str(self.begun)}
        self.number = 0
        (folder / "logs").mkdir()
        (folder / "stamp.bash").write_text(STAMP)
        (folder / "bare.sh").write_text(BARE_JOB)

    def bare(self) -> PreemptionSeconds:
        """srun and no more."""
        python = [sys.executable, "-u", str(KIT / "train.py"), "--config", CONFIG]
        job = self._submit("bare.sh", *python, *WORDS)
        before = set(self._runs())
        wait_until(lambda: bool(set(self._runs()) - before), "the folder of the run")
        turn = self._signal(job, (set(self._runs()) - before).pop())
        wait_for(job, self.env)
        return turn

    def kit(self) -> tuple[PreemptionSeconds, Resumption]:
        """slurm_train.sh, and its next turn."""
        job = self._submit(
            str(KIT / "scripts/slurm/slurm_train.sh"), "--quiet", "--python", sys.executable, CONFIG, "--", *WORDS
        )
        run = self.folder / f"logs/slurm-{job}"
        turn = self._signal(job, run)
        before = steps(run)
        wait_until(lambda: bool(steps_after_resume(run)), "the next turn")
        new = steps_after_resume(run)[0]
        after = Resumption(new["time"] - float(self.begun.read_text()), before[-1]["step"] + 1 - new["step"])
        subprocess.run(["scancel", job], env=self.env, check=True)
        wait_for(job, self.env)
        return turn, after

    def _submit(self, *job: str) -> str:
        self.number += 1
        files = ["--output=logs/slurm-%j.out", "--error=logs/slurm-%j.err", "--open-mode=append"]
        return submit([*ALLOCATION, *files, *job, f"checkpoint.dir={self._checkpoints()}"], self.folder, self.env)

    def _checkpoints(self) -> Path:
        return self.folder / f"checkpoints-{self.number}"

    def _runs(self) -> list[Path]:
        return list(self.folder.glob("logs/train-*"))

    def _signal(self, job: str, run: Path) -> PreemptionSeconds:
        """Once it has done some steps."""
        wait_until(lambda: len(steps(run)) >= STEPS, f"step {STEPS}")
        first = steps(run)[0]["time"] - float(self.begun.read_text())
        tasks, others = processes(job)
        begun = time.time()
        subprocess.run(["scancel", "--signal=USR2", job], env=self.env, check=True)
        tasks_end, others_end = end_of(tasks), end_of(others)
        written = next(self._checkpoints().glob("step_*[0-9]")).stat().st_ctime  # a new name changes it
        return PreemptionSeconds(first, written - begun, tasks_end - begun, max(tasks_end, others_end) - begun)


# ---------------------------------------------------------------- the whole


def report(pairs: list[tuple[PreemptionSeconds, PreemptionSeconds]], turns: list[Resumption]) -> None:
    """Medians and ratios."""
    names = {
        "checkpoint": "from the signal until the checkpoint is whole",
        "tasks": "from the signal until the last task has ended",
        "job": "from the signal until the job has ended",
        "first_step": "from the batch script to the first step",
    }
    for name, what in names.items():
        ours, peers = ([vars(turn)[name] for turn in side] for side in zip(*pairs, strict=True))
        print(f"{what:46} {ratio_of(ours, peers)}")
    fresh, again = [ours.first_step for ours, _ in pairs], [turn.first_step for turn in turns]
    print(f"{'the same of the next turn, against the first':46} {ratio_of(again, fresh)}")
    print(f"steps done twice: {' '.join(str(turn.twice) for turn in turns)} (wanted: 0 or 1)")


def main() -> int:
    """Print every turn, then medians and ratios."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--turns", type=int, default=7)
    count = options.parse_args().turns
    os.environ.pop("PYTHONUNBUFFERED", None)
    pairs, turns = [], []
    with slurm(2, gpus=2) as (env, folder):
        sides = PreemptionJobs(folder, env)
        sides.bare()  # warms the page cache
        for turn in range(count):
            peer = sides.bare() if turn % 2 else None
            ours, after = sides.kit()
            peer = peer or sides.bare()
            pairs.append((ours, peer))
            turns.append(after)
            print(f"kit {ours}\nsrun {peer}\n{after}", flush=True)
    report(pairs, turns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
