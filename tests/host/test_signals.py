"""Muster's processes survive the signals that SLURM or a user may send, and ranks can install handlers for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.host import signals

KIT = Path(__file__).resolve().parents[2]
RANK = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from distributed.host import signals

signals.ignore((*signals.PASSED_ON, *signals.PROTECTED))  # as an agent
signals.use_defaults()
assert {signal.getsignal(number) for number in signals.PROTECTED} == {signal.SIG_DFL}  # Lightning checks this
os.kill(os.getpid(), int(sys.argv[2]))
got = []
signal.signal(int(sys.argv[2]), lambda number, frame: got.append(number))
os.kill(os.getpid(), int(sys.argv[2]))
signal.signal(int(sys.argv[2]), signal.SIG_DFL)
signals.protect()
os.kill(os.getpid(), int(sys.argv[2]))
print(*got)
"""


def test_bash_and_python_pass_on_the_same_signals() -> None:
    script = 'source scripts/lib/common.bash; for name in "${PASSED_ON[@]}"; do kill -l "$name"; done'
    names = subprocess.run(["bash", "-c", script], cwd=KIT, check=True, capture_output=True, text=True).stdout.split()
    script = 'for name; do [[ $name == [0-9]* ]] && echo "$name" || kill -l "$name"; done'
    done = subprocess.run(["bash", "-c", script, "bash", *names], check=True, capture_output=True, text=True)
    assert sorted(map(int, done.stdout.split())) == list(signals.PASSED_ON)


@pytest.mark.parametrize("number", [int(number) for number in signals.PROTECTED])
@pytest.mark.parametrize("job", ["7", ""])
def test_a_rank_in_a_slurm_job_ignores_a_protected_signal_without_a_handler(number: int, job: str) -> None:
    environment = os.environ | {"SLURM_JOB_ID": job}
    if not job:
        del environment["SLURM_JOB_ID"]
    rank = [sys.executable, "-c", RANK, str(KIT), str(number)]
    done = subprocess.run(rank, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == ((0, f"{number}\n") if job else (-number, "")), done.stderr


@pytest.mark.parametrize(
    ("number", "name"), [(10, "SIGUSR1"), (34, "SIGRTMIN"), (36, "SIGRTMIN+2"), (16, "SIGSTKFLT"), (32, "signal 32")]
)
def test_every_signal_has_a_name(number: int, name: str) -> None:
    assert signals.name(number) == name


def test_only_an_exit_code_of_128_plus_a_signal_number_names_a_signal() -> None:
    codes = (137, 138, None, 0, 1, 128, 255, -9)
    assert [signals.signal_name(code) for code in codes] == ["SIGKILL", "SIGUSR1", *[""] * 6]
