"""Requeue a SLURM batch job: at the time limit, after preemption, or when a node was lost.

All attempts share one run directory. The job is not requeued if the user stopped it or a rank failed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from distributed.attempts import newest
from distributed.exit_codes import STOPPED, UNFIT
from distributed.files import write_file
from distributed.trust import read_bytes

MAX_STALLED = 3  # consecutive attempts without progress before giving up
STALLED_FILE = "stalled_attempts"  # in the run directory: how many attempts in a row made no progress
SUBMIT = "submit the same job to resume"


@dataclass(frozen=True)
class EndedRun:
    """A run whose last attempt has ended."""

    directory: Path
    code: int  # exit code
    signal: int  # the signal that requested a stop; 0 if there was none
    progress: bool  # whether the last attempt made progress
    last_step: int | None  # the last step that the run has logged; None if there is none


def requeue_if_stopped(run: EndedRun, job: str, limit: int, record: Callable[[str], None]) -> None:
    """Requeue the job if SLURM stopped its run, or if a node was lost.

    limit: maximum number of requeues. record: function that prints a line.
    """
    if not is_batch_script() or not (stopped_by_slurm(run, job) or lost_a_node(run)):
        if run.code == STOPPED:
            record(SUBMIT)
        return
    count = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    if count >= limit:
        times = f"{count} time{'s' * (count != 1)}"
        record(f"requeued {times}, and --max-requeues is {limit}; not requeueing: {SUBMIT}")
    elif count_stalled_attempts(run) >= MAX_STALLED:
        past = "" if run.last_step is None else f" past step {run.last_step}"
        record(f"no progress{past} in {MAX_STALLED} attempts; not requeueing: {SUBMIT}")
    else:
        at = "" if run.last_step is None else f" at step {run.last_step}"
        record(f"requeueing job {os.environ['SLURM_JOB_ID']}{at}, to resume from the newest checkpoint")
        if scontrol("requeue", job).returncode:
            record(f"scontrol requeue failed: {SUBMIT}")


def is_batch_script() -> bool:
    """Whether this is the process of a batch script; in the shell of salloc, SLURM_TASK_PID is another process."""
    return os.environ.get("SLURM_TASK_PID") == str(os.getpid())


def stopped_by_slurm(run: EndedRun, job: str) -> bool:
    """Whether SLURM announced the time limit with a signal, or preempted the job.

    The signal at the time limit goes to the ranks or, with sbatch --signal=B:..., to this process. Preemption sends
    SIGTERM to the ranks and to this process, and the exit code then does not show the cause: SIGTERM kills ranks
    without a handler, other ranks fail because they lose a connection, and ranks that exit with 0 may not have
    finished. If the user stopped the job, its state is not RUNNING (scancel), or the signal is SIGINT (stop.sh).
    """
    if not run.signal and run.code in (0, STOPPED):
        return run.code == STOPPED
    shown = scontrol("show", "job", "--oneliner", job).stdout.decode(errors="replace")
    times = dict(re.findall(r" (StartTime|PreemptTime)=(\d\S*)", shown))
    if times.get("PreemptTime", "") >= times.get("StartTime", "-"):  # otherwise an earlier attempt was preempted
        return True
    return " JobState=RUNNING " in shown and run.signal != signal.SIGINT and run.code == STOPPED


def scontrol(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["scontrol", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    except OSError:
        return subprocess.CompletedProcess(arguments, 127, b"")


def lost_a_node(run: EndedRun) -> bool:
    return not run.signal and run.code == UNFIT and any(Path(newest(run.directory)).glob("node_*.lost"))


def count_stalled_attempts(run: EndedRun) -> int:
    """How many attempts in a row made no progress, including the last one."""
    file, stalled = run.directory / STALLED_FILE, 0
    if not run.progress:
        with suppress(OSError, ValueError):
            stalled = int(read_bytes(file))
        stalled += 1
    with suppress(OSError):
        write_file(file, f"{stalled}\n")
    return stalled
