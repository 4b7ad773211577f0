"""How long from the command to the first all-reduce: the kit's agent and launcher against plain torchrun?

The same ten-line script is started in turns by torchrun, by the kit's agent alone, and by launch_singlenode.sh, which
also checks the call, makes the folder of the run and judges it. Time is taken from before the command to the moment
at which rank 0 has the result of its first all-reduce.

    python benchmarks/startup.py [--turns 5] [--ranks 2 8]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KIT = Path(__file__).resolve().parents[1]
SCRIPT = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        file.write(str(time.time()))
dist.destroy_process_group()
"""


def commands(script: Path, ranks: int) -> dict[str, list[str]]:
    """What is compared: name -> the words that start it."""
    torchrun = ["--standalone", "--nproc-per-node", str(ranks), "--", str(script)]
    launcher = [str(KIT / "scripts/ssh/launch_singlenode.sh"), "--quiet", "--python", sys.executable]
    return {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", *torchrun],
        "agent": [sys.executable, str(KIT / "scripts/lib/agent.py"), *torchrun],
        "launcher": [*launcher, "--script", str(script), "-", str(ranks), "--"],
    }


def seconds_to_first(command: list[str], folder: Path) -> float:
    """Seconds from the command to the first all-reduce."""
    told = folder / "told"
    begun = time.time()
    subprocess.run([*command, str(told)], cwd=folder, check=True, capture_output=True)
    return float(told.read_text()) - begun


def main() -> int:
    """Print a table, the ratio to torchrun pair by pair."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    given = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{'ranks':>5}  {'started by':10} {'median s':>9}  {'ratio to torchrun':>17}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "first.py").write_text(SCRIPT)
        for ranks in given.ranks:
            sides = commands(folder / "first.py", ranks)
            for command in sides.values():
                seconds_to_first(command, folder)  # warm the page cache
            turns = [
                {side: seconds_to_first(words, folder) for side, words in sides.items()} for _ in range(given.turns)
            ]
            for side in sides:
                ratios = [turn[side] / turn["torchrun"] for turn in turns]
                seconds = statistics.median(turn[side] for turn in turns)
                print(f"{ranks:5}  {side:10} {seconds:9.2f}  {statistics.median(ratios):17.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
