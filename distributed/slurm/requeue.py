"""Requeue a SLURM batch job: at the time limit, after preemption, or when a node was lost.

All attempts share one run directory. The job is not requeued if the user stopped it or a rank failed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress

from distributed.exit_codes import STOPPED, TERMINATED, UNFIT
from distributed.files import write_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distributed.launch.run import Launch

STALLED_FILE = "stalled_attempts"  # in the run directory: how many attempts in a row made no progress
SUBMIT = "submit the same job to resume"


def requeue_if_stopped(launch: Launch, max_stalled: int) -> None:
    """Requeue the job of a run that has ended, if SLURM stopped it or a node was lost."""
    job, limit = launch.options.slurm_job[-1], launch.options.max_requeues
    record = launch.console.record
    if not is_batch_script() or not (stopped_by_slurm(launch, job) or lost_a_node(launch)):
        if launch.code == STOPPED:
            record(SUBMIT)
        return
    count = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    if count >= limit:
        times = f"{count} time{'s' * (count != 1)}"
        record(f"requeued {times}, and --max-requeues is {limit}; not requeueing: {SUBMIT}")
        return
    if stalled_attempts(launch) >= max_stalled:
        past = "" if launch.last_step is None else f" past step {launch.last_step}"
        record(f"no progress{past} in {max_stalled} attempts; not requeueing: {SUBMIT}")
        return
    at = "" if launch.last_step is None else f" at step {launch.last_step}"
    record(f"requeueing job {os.environ['SLURM_JOB_ID']}{at}, to resume from the newest checkpoint")
    if subprocess.run(["scontrol", "requeue", job], stdin=subprocess.DEVNULL).returncode:
        record(f"scontrol requeue failed: {SUBMIT}")


def is_batch_script() -> bool:
    """In the shell of salloc, SLURM_TASK_PID is another process."""
    return os.environ.get("SLURM_TASK_PID") == str(os.getpid())


def stopped_by_slurm(launch: Launch, job: str) -> bool:
    """Whether SLURM announced the time limit with a signal to the ranks or (B:) to this process, or preempted the job.

    Preemption signals both: ranks without a handler are killed by SIGTERM, and ranks that exit with 0 may not have
    finished. A job that scancel ends is not running any more, and stop.sh sends SIGINT.
    """
    stop, code = launch.watch.signal, launch.code
    if not stop and code == STOPPED:
        return True
    if code not in (STOPPED, TERMINATED) and not (stop and code == 0):
        return False
    shown = subprocess.run(["scontrol", "show", "job", "--oneliner", job], capture_output=True, text=True).stdout
    if re.search(r" PreemptTime=\d", shown):
        return True
    return " JobState=RUNNING " in shown and stop != signal.SIGINT and code == STOPPED


def lost_a_node(launch: Launch) -> bool:
    return not launch.watch.signal and launch.code == UNFIT and any(launch.directory.glob("node_*.lost"))


def stalled_attempts(launch: Launch) -> int:
    """How many attempts in a row made no progress, including the last one."""
    file, stalled = launch.directory / STALLED_FILE, 0
    if not launch.made_progress():
        with suppress(OSError, ValueError):
            stalled = int(file.read_text())
        stalled += 1
    with suppress(OSError):
        write_file(file, f"{stalled}\n")
    return stalled
