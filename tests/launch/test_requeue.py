"""The exit code of a run, the signal to its launcher and the output of scontrol show whether SLURM stopped the run."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from distributed.exit_codes import STOPPED
from distributed.launch import requeue

NONE, BEFORE, AFTER = "None", "2026-11-27T09:00:00", "2026-11-27T10:00:05"  # PreemptTime; StartTime is 10:00:00


@pytest.mark.parametrize(
    ("code", "number", "preempted", "state", "stopped"),
    [
        (STOPPED, 0, NONE, "RUNNING", True),  # by a signal to the ranks
        (STOPPED, signal.SIGUSR2, NONE, "RUNNING", True),
        (STOPPED, signal.SIGINT, NONE, "RUNNING", False),  # by stop.sh
        (STOPPED, signal.SIGTERM, NONE, "CANCELLED", False),
        (143, 0, AFTER, "RUNNING", True),
        (1, 0, AFTER, "RUNNING", True),  # a rank lost its connection to a rank that SIGTERM had killed
        (0, signal.SIGTERM, AFTER, "RUNNING", True),
        (0, 0, AFTER, "RUNNING", False),  # finished before the signal
        (1, 0, BEFORE, "RUNNING", False),  # an earlier attempt was preempted
        (1, 0, NONE, "RUNNING", False),
        (143, signal.SIGTERM, NONE, "RUNNING", False),
    ],
)
def test_a_stop_by_slurm_is_distinguished_from_other_ends(
    code: int, number: int, preempted: str, state: str, stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = f"JobId=7 JobState={state} StartTime=2026-11-27T10:00:00 PreemptTime={preempted}"
    done = subprocess.CompletedProcess[bytes]((), 0, shown.encode())
    monkeypatch.setattr(requeue, "scontrol", lambda *arguments: done)
    run = requeue.EndedRun(Path(), code, number, progress=True, last_step=None)
    assert requeue.stopped_by_slurm(run, "7") is stopped
