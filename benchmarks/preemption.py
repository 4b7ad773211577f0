"""Cost of a preemption on SLURM: the time to publish the checkpoint, to end all processes, and to resume the job.

Two nodes of 2 ranks train alternately as a job of Muster's slurm_train.sh and as a baseline job, whose batch script is
the line `srun python -u train.py`. Both run the same train.py: the differences are how the signal reaches it and what
happens after it exits. After some steps, both get `scancel --signal=USR2`. Times are measured from before scancel until
the checkpoint has its final name, until the last task exits, and until the last process of the job exits.

Then Muster's job requeues itself and resumes. Repeated steps are counted; the target is at most one. The time
from the first line of the batch script to the first new step is compared with that of the first start. Needs root.

    python -m benchmarks.preemption [--repetitions 7]
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
TIMEOUT = 120.0  # seconds for each event
CONFIG = str(KIT / "config/quickstart.yaml")
ARGUMENTS = [
    "train.steps=100000",
    "train.evaluate_every=0",
    "checkpoint.every=0",
    "logging.every=1",
    "logging.sample=0",
]
BARE_JOB = """#!/usr/bin/env bash
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" "$@"
"""


@dataclass(frozen=True)
class PreemptionSeconds:
    """Durations in seconds."""

    first_step: float  # from the start of the batch script
    checkpoint: float  # from the signal to the published checkpoint
    tasks: float  # from the signal to the exit of the last task
    job: float  # from the signal to the exit of the last process of the job


@dataclass(frozen=True)
class Resumption:
    """Measurements of a resumed job."""

    first_step: float  # seconds from the start of the batch script to the first new step
    repeated: int  # steps that were done twice


def wait_until(condition: Callable[[], bool], event: str) -> None:
    """Check the condition ten times per second; exit after TIMEOUT."""
    end = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"{event}: not within {TIMEOUT:.0f} s")
        time.sleep(0.1)


# ---------------------------------------------------------------- metrics of a job


def records(run: Path) -> list[dict[str, Any]]:
    """The metrics that rank 0 has written so far."""
    with suppress(OSError):
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    return []


def steps(run: Path) -> list[dict[str, Any]]:
    """One record per step."""
    return [record for record in records(run) if "loss" in record]


def steps_after_resume(run: Path) -> list[dict[str, Any]]:
    """The steps since the run was resumed."""
    found = records(run)
    start = next((index for index, record in enumerate(found) if record.get("event") == "resume"), len(found))
    return [record for record in found[start:] if "loss" in record]


# ---------------------------------------------------------------- processes


def processes(job: str) -> tuple[list[int], list[int]]:
    """Open a file descriptor, see pidfd_open(2), for each process of a job. Returns those of tasks, and the others."""
    tasks: list[int] = []
    others: list[int] = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            entries = environ.read_bytes().split(b"\0")
            if f"SLURM_JOB_ID={job}".encode() in entries:
                file = os.pidfd_open(int(environ.parent.name))
                (tasks if any(entry.startswith(b"SLURM_STEP_ID=") for entry in entries) else others).append(file)
    return tasks, others


def wait_for_exit(files: list[int]) -> float:
    """Wait until all processes have exited. Returns the time in Unix seconds."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    running = set(files)
    while running:
        exited = [file for file, _ in poll.poll(TIMEOUT * 1000)]
        if not exited:
            sys.exit(f"{len(running)} processes of the job have not exited within {TIMEOUT:.0f} s")
        for file in exited:
            poll.unregister(file)
            os.close(file)
            running.remove(file)
    return time.time()


# ---------------------------------------------------------------- jobs


class PreemptionJobs:
    """The jobs to compare, in a directory that all nodes share."""

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        self.directory, self.started = directory, directory / "started"
        self.env = {**env, "BASH_ENV": f"{directory}/stamp.bash", "BEGUN": str(self.started)}
        self.number = 0
        (directory / "logs").mkdir()
        (directory / "stamp.bash").write_text(STAMP)
        (directory / "bare.sh").write_text(BARE_JOB)

    def bare(self) -> PreemptionSeconds:
        """Preempt the baseline job, whose batch script is one srun line."""
        python = [sys.executable, "-u", str(KIT / "train.py"), "--config", CONFIG]
        job = self._submit("bare.sh", *python, *ARGUMENTS)
        before = set(self._runs())
        wait_until(lambda: bool(set(self._runs()) - before), "run directory")
        seconds = self._signal(job, (set(self._runs()) - before).pop())
        wait_for(job, self.env)
        return seconds

    def muster(self) -> tuple[PreemptionSeconds, Resumption]:
        """Preempt slurm_train.sh, and wait until the requeued job has resumed."""
        job = self._submit(
            str(KIT / "scripts/slurm/slurm_train.sh"), "--quiet", "--python", sys.executable, CONFIG, "--", *ARGUMENTS
        )
        run = self.directory / f"logs/slurm-{job}"
        seconds = self._signal(job, run)
        before = steps(run)
        wait_until(lambda: bool(steps_after_resume(run)), "first step after the requeue")
        new = steps_after_resume(run)[0]
        resumption = Resumption(new["time"] - float(self.started.read_text()), before[-1]["step"] + 1 - new["step"])
        subprocess.run(["scancel", job], env=self.env, check=True)
        wait_for(job, self.env)
        return seconds, resumption

    def _submit(self, *job: str) -> str:
        self.number += 1
        files = ["--output=logs/slurm-%j.out", "--error=logs/slurm-%j.err", "--open-mode=append"]
        return submit([*ALLOCATION, *files, *job, f"checkpoint.dir={self._checkpoints()}"], self.directory, self.env)

    def _checkpoints(self) -> Path:
        return self.directory / f"checkpoints-{self.number}"

    def _runs(self) -> list[Path]:
        return list(self.directory.glob("logs/train-*"))

    def _signal(self, job: str, run: Path) -> PreemptionSeconds:
        """Send SIGUSR2 to the job after STEPS steps and measure the durations."""
        wait_until(lambda: len(steps(run)) >= STEPS, f"step {STEPS}")
        first = steps(run)[0]["time"] - float(self.started.read_text())
        tasks, others = processes(job)
        signalled = time.time()
        subprocess.run(["scancel", "--signal=USR2", job], env=self.env, check=True)
        tasks_end, others_end = wait_for_exit(tasks), wait_for_exit(others)
        published = next(self._checkpoints().glob("step_*[0-9]")).stat().st_ctime  # changed by the rename
        job_end = max(tasks_end, others_end)
        return PreemptionSeconds(first, published - signalled, tasks_end - signalled, job_end - signalled)


# ---------------------------------------------------------------- main


def report(pairs: list[tuple[PreemptionSeconds, PreemptionSeconds]], resumptions: list[Resumption]) -> None:
    """Print medians and ratios."""
    names = {
        "checkpoint": "from the signal to the published checkpoint",
        "tasks": "from the signal to the end of the last task",
        "job": "from the signal to the end of the job",
        "first_step": "from the batch script to the first step",
    }
    for name, text in names.items():
        own, peers = ([vars(seconds)[name] for seconds in side] for side in zip(*pairs, strict=True))
        print(f"{text:46} {ratio_of(own, peers)}")
    fresh, resumed = [own.first_step for own, _ in pairs], [one.first_step for one in resumptions]
    print(f"{'first step after a requeue, against a new job':46} {ratio_of(resumed, fresh)}")
    print(f"repeated steps: {' '.join(str(one.repeated) for one in resumptions)} (target: 0 or 1)")


def main() -> int:
    """Print all measurements, then medians and ratios."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--repetitions", type=int, default=7, help="number of measured repetitions")
    count = options.parse_args().repetitions
    os.environ.pop("PYTHONUNBUFFERED", None)
    pairs, resumptions = [], []
    with slurm(2, gpus=2) as (env, directory):
        jobs = PreemptionJobs(directory, env)
        jobs.bare()  # warms the page cache
        for repetition in range(count):
            peer = jobs.bare() if repetition % 2 else None
            own, resumption = jobs.muster()
            peer = peer or jobs.bare()
            pairs.append((own, peer))
            resumptions.append(resumption)
            print(f"muster {own}\nsrun {peer}\n{resumption}", flush=True)
    report(pairs, resumptions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
