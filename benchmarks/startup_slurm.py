"""Time from sbatch to the first all-reduce on 2 nodes of 2 ranks: Muster's batch script against a plain srun.

The baseline is a batch script with one srun line and a script that reads its rank from SLURM's variables. Muster's
slurm_train.sh also checks its arguments, creates the run directory, supervises every rank and writes a report. It is
measured with LAUNCHER=srun and with LAUNCHER=torchrun. Times are measured from before sbatch and, because the time
until SLURM starts a job varies, from the first line of the batch script. They end when rank 0 has the result of its
first all-reduce. Needs root.

    python -m benchmarks.startup_slurm [--repetitions 9]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.laboratory import KIT, slurm, submit, wait_for
from benchmarks.pairs import ratio_of
from benchmarks.startup import SCRIPT

ALLOCATION = ["--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=2", "--gres=gpu:2", "--mem=8G"]
BARE_SCRIPT = f"""import os
os.environ |= {{"RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": os.environ["SLURM_NTASKS"]}}
{SCRIPT}"""
BARE_JOB = """#!/usr/bin/env bash
export MASTER_ADDR=$SLURMD_NODENAME MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" "$@"
"""
# BASH_ENV names a file with these commands. Bash runs them before the first line of the batch script.
STAMP = """echo "$EPOCHREALTIME" >"$BEGUN"
unset BASH_ENV
"""


@dataclass(frozen=True)
class StartupSeconds:
    """Seconds to the first all-reduce."""

    from_sbatch: float
    from_batch_script: float


class StartupJobs:
    """The jobs to compare, in a directory that all nodes share."""

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        self.directory = directory
        self.result, self.started = directory / "result", directory / "started"
        self.env = {**env, "BASH_ENV": f"{directory}/stamp.bash", "BEGUN": str(self.started)}
        (directory / "logs").mkdir()
        (directory / "stamp.bash").write_text(STAMP)
        (directory / "first.py").write_text(SCRIPT)
        (directory / "bare.py").write_text(BARE_SCRIPT)
        (directory / "bare.sh").write_text(BARE_JOB)

    def bare(self) -> StartupSeconds:
        """A batch script with one srun line."""
        return self._submit("bare.sh", sys.executable, "bare.py", str(self.result))

    def srun(self) -> StartupSeconds:
        """slurm_train.sh with one task per rank."""
        return self._muster(LAUNCHER="srun")

    def torchrun(self) -> StartupSeconds:
        """slurm_train.sh with one agent per node."""
        return self._muster(LAUNCHER="torchrun")

    def _muster(self, **env: str) -> StartupSeconds:
        script = str(KIT / "scripts/slurm/slurm_train.sh")
        arguments = ["--quiet", "--python", sys.executable, "--script", "first.py", "-", "--", str(self.result)]
        return self._submit(script, *arguments, **env)

    def _submit(self, *job: str, **env: str) -> StartupSeconds:
        files = ["--output=logs/slurm-%j.out", "--error=logs/slurm-%j.out"]
        self.result.unlink(missing_ok=True)
        started = time.time()
        number = submit([*ALLOCATION, *files, *job], self.directory, {**self.env, **env})
        wait_for(number, self.env)
        end = float(self.result.read_text())
        return StartupSeconds(end - started, end - float(self.started.read_text()))


def report(repetitions: list[dict[str, StartupSeconds]]) -> None:
    """Print the ratios of Muster's two launchers to the plain srun."""
    for name in ("from_batch_script", "from_sbatch"):
        seconds = {side: [vars(repetition[side])[name] for repetition in repetitions] for side in repetitions[0]}
        for side in ("srun", "torchrun"):
            print(f"{name:18} {side:9} {ratio_of(seconds[side], seconds['bare'])}")
    print("target: with srun at most 1.1")


def main() -> int:
    """Print the seconds of every repetition, and the ratios."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--repetitions", type=int, default=9, help="number of measured repetitions")
    count = options.parse_args().repetitions
    os.environ.pop("PYTHONUNBUFFERED", None)
    repetitions = []
    with slurm(2, gpus=2) as (env, directory):
        jobs = StartupJobs(directory, env)
        order = [jobs.bare, jobs.srun, jobs.torchrun]
        for repetition in range(count + 1):
            order = order[1:] + order[:1]
            starts = {job.__name__: job() for job in order}
            if repetition:  # the first one warms the page cache
                repetitions.append({name: starts[name] for name in ("bare", "srun", "torchrun")})
                seconds = [f"{side} {start.from_batch_script:.2f} s" for side, start in repetitions[-1].items()]
                print(*seconds, sep="   ", flush=True)
    report(repetitions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
