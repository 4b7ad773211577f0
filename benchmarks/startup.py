"""Time until the first all-reduce and until the exit of a command: Muster's agent and launcher against torchrun.

The same short script is started alternately by torchrun, by Muster's agent alone, and by launch_singlenode.sh, which
also checks the call, creates the run directory and writes a report. Times are measured from before the command until
rank 0 has the result of its first all-reduce, and until the command exits. For comparison, `import torch` alone is
measured too. One repetition runs every command once; --repetitions is the number of repetitions.

    python benchmarks/startup.py [--repetitions 5] [--ranks 2 8]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

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
IMPORT = "import sys, time, torch; open(sys.argv[1], 'w').write(str(time.time()))"


class Seconds(NamedTuple):
    """Two durations of one command, both measured from just before its start."""

    to_all_reduce: float  # to the first all-reduce; for `import torch`: to the end of the import
    to_exit: float


def commands(script: Path, ranks: int) -> dict[str, list[str]]:
    """Returns name -> command line."""
    torchrun = ["--standalone", "--nproc-per-node", str(ranks), "--", str(script)]
    launcher = [str(KIT / "scripts/ssh/launch_singlenode.sh"), "--quiet", "--python", sys.executable]
    return {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", *torchrun],
        "agent": [sys.executable, str(KIT / "scripts/lib/agent.py"), *torchrun],
        "launcher": [*launcher, "--script", str(script), "-", str(ranks), "--"],
        "import torch": [sys.executable, "-c", IMPORT],
    }


def measure(command: list[str], directory: Path) -> Seconds:
    """Run the command once."""
    result = directory / "result"
    started_at = time.time()
    subprocess.run([*command, str(result)], cwd=directory, check=True, capture_output=True)
    return Seconds(float(result.read_text()) - started_at, time.time() - started_at)


def row(side: str, repetitions: Sequence[dict[str, Seconds]]) -> str:
    """A row of medians over all repetitions: seconds of a command, and their ratios to those of torchrun and import."""

    def median(value: Callable[[dict[str, Seconds]], float]) -> str:
        return f"{statistics.median(map(value, repetitions)):8.2f}"

    return "  ".join(
        [
            f"{side:12}",
            median(lambda repetition: repetition[side].to_all_reduce),
            median(lambda repetition: repetition[side].to_all_reduce / repetition["torchrun"].to_all_reduce),
            median(lambda repetition: repetition[side].to_all_reduce / repetition["import torch"].to_all_reduce),
            median(lambda repetition: repetition[side].to_exit),
            median(lambda repetition: repetition[side].to_exit / repetition["torchrun"].to_exit),
        ]
    )


def main() -> int:
    """Print a table of medians."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--repetitions", type=int, default=5, help="number of measured repetitions")
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    arguments = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print("              seconds to the first all-reduce       seconds to the exit")
    print("ranks started by        s  /torchrun   /import         s  /torchrun")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "first.py").write_text(SCRIPT)
        for ranks in arguments.ranks:
            sides = commands(directory / "first.py", ranks)
            for command in sides.values():
                measure(command, directory)  # warm the page cache
            repetitions = [
                {side: measure(command, directory) for side, command in sides.items()}
                for _ in range(arguments.repetitions)
            ]
            for side in sides:
                print(f"{ranks:5} {row(side, repetitions)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
