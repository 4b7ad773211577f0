"""How long from sbatch to the first all-reduce on 2 nodes of 2 ranks: the kit's batch script against a bare srun?

The peer is what one writes in a minute: a batch script of one srun line, and a script that takes its place from
SLURM's variables. The kit's slurm_train.sh also checks the call, makes the folder of the run, guards every rank and
judges the run; with LAUNCHER=srun and with LAUNCHER=torchrun. Time is taken up to the moment at which rank 0 has the
result of its first all-reduce: from before sbatch, and from the first line of the batch script, for when SLURM starts
a job is no doing of ours, and changes from job to job. Needs root.

    python -m benchmarks.startup_slurm [--turns 9]
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
# Bash reads it before the first line of the batch script.
STAMP = """echo "$EPOCHREALTIME" >"$BEGUN"
unset BASH_ENV
"""


@dataclass(frozen=True)
class StartupSeconds:
    """Seconds to the first all-reduce."""

    from_sbatch: float
    from_batch_script: float


class StartupJobs:
    """What is compared, in a folder that all nodes share."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder = folder
        self.result, self.started = folder / "result", folder / "started"
        self.env = {**env, "BASH_ENV": f"{folder}/stamp.bash", "BEGUN": str(self.started)}
        (folder / "logs").mkdir()
        (folder / "stamp.bash").write_text(STAMP)
        (folder / "first.py").write_text(SCRIPT)
        (folder / "bare.py").write_text(BARE_SCRIPT)
        (folder / "bare.sh").write_text(BARE_JOB)

    def bare(self) -> StartupSeconds:
        """A batch script of one line."""
        return self._submit("bare.sh", sys.executable, "bare.py", str(self.result))

    def srun(self) -> StartupSeconds:
        """The kit's, with a task a rank."""
        return self._kit(LAUNCHER="srun")

    def torchrun(self) -> StartupSeconds:
        """The kit's, with an agent a node."""
        return self._kit(LAUNCHER="torchrun")

    def _kit(self, **env: str) -> StartupSeconds:
        script = str(KIT / "scripts/slurm/slurm_train.sh")
        words = ["--quiet", "--python", sys.executable, "--script", "first.py", "-", "--", str(self.result)]
        return self._submit(script, *words, **env)

    def _submit(self, *job: str, **env: str) -> StartupSeconds:
        files = ["--output=logs/slurm-%j.out", "--error=logs/slurm-%j.out"]
        self.result.unlink(missing_ok=True)
        started = time.time()
        number = submit([*ALLOCATION, *files, *job], self.folder, {**self.env, **env})
        wait_for(number, self.env)
        end = float(self.result.read_text())
        return StartupSeconds(end - started, end - float(self.started.read_text()))


def report(turns: list[dict[str, StartupSeconds]]) -> None:
    """The kit's two launchers against the bare srun, pair by pair."""
    for what in ("from_batch_script", "from_sbatch"):
        seconds = {side: [vars(turn[side])[what] for turn in turns] for side in turns[0]}
        for side in ("srun", "torchrun"):
            print(f"{what:18} {side:9} {ratio_of(seconds[side], seconds['bare'])}")
    print("wanted: with srun at most 1.1")


def main() -> int:
    """Print the seconds of every turn, and the ratios."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--turns", type=int, default=9)
    count = options.parse_args().turns
    os.environ.pop("PYTHONUNBUFFERED", None)
    turns = []
    with slurm(2, gpus=2) as (env, folder):
        sides = StartupJobs(folder, env)
        order = [sides.bare, sides.srun, sides.torchrun]
        for turn in range(count + 1):
            order = order[1:] + order[:1]
            starts = {side.__name__: side() for side in order}
            if turn:  # the first one warms the page cache
                turns.append({side: starts[side] for side in ("bare", "srun", "torchrun")})
                seconds = [f"{side} {start.from_batch_script:.2f} s" for side, start in turns[-1].items()]
                print(*seconds, sep="   ", flush=True)
    report(turns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
