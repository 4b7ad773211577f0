"""Time from the command to the first all-reduce on 3 nodes of 2 ranks: Muster's launcher against torchrun by hand.

By hand means that the torchrun commands of all nodes are started over ssh at the same time, faster than a user types.
The launcher is one command, which also checks the nodes and writes a report. Times are measured from before the command
until rank 0 has the result of its first all-reduce. Needs root.

    python -m benchmarks.startup_nodes [--repetitions 5]
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.laboratory import KIT, nodes
from benchmarks.startup import SCRIPT

RANKS = 2  # of each node


def by_hand(names: list[str], script: Path, result: Path) -> float:
    """Return the seconds to the first all-reduce, with torchrun started on each node over ssh."""
    port = str(random.randint(20_000, 29_999))
    started_at = time.time()
    started = []
    for rank, name in enumerate(names):
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        torchrun += ["--nnodes", str(len(names)), "--node-rank", str(rank)]
        torchrun += ["--nproc-per-node", str(RANKS), "--master-addr", names[0], "--master-port", port]
        line = shlex.join(["env", "OMP_NUM_THREADS=1", *torchrun, str(script), str(result)])
        started.append(subprocess.Popen(["ssh", name, line], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    if any(process.wait() for process in started):
        sys.exit("a torchrun failed")
    return float(result.read_text()) - started_at


def by_launcher(names: list[str], script: Path, result: Path) -> float:
    """Return the seconds to the first all-reduce, with one command of Muster."""
    launch = [str(KIT / "scripts/ssh/launch_torchrun_auto.sh"), "--quiet", "--python", sys.executable]
    launch += ["--env", "OMP_NUM_THREADS=1", "--script", str(script), "-", str(RANKS), *names, "--", str(result)]
    started_at = time.time()
    subprocess.run(launch, cwd=script.parent, check=True, capture_output=True)
    return float(result.read_text()) - started_at


def main() -> int:
    """Print the seconds and the ratio of each pair (one launch by hand, one by the launcher), then the medians."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--repetitions", type=int, default=5, help="number of measured repetitions")
    repetitions = options.parse_args().repetitions
    os.environ.pop("PYTHONUNBUFFERED", None)
    with nodes(3) as (names, directory):
        script, result = directory / "first.py", directory / "result"
        script.write_text(SCRIPT)
        by_launcher(names, script, result)  # warm the page cache
        pairs = []
        for repetition in range(repetitions):
            sides = [by_hand, by_launcher] if repetition % 2 else [by_launcher, by_hand]
            seconds = {side.__name__: side(names, script, result) for side in sides}
            pairs.append((seconds["by_hand"], seconds["by_launcher"]))
            print(
                "by hand {:5.2f} s   launcher {:5.2f} s   ratio {:.2f}".format(*pairs[-1], pairs[-1][1] / pairs[-1][0])
            )
    hand, launcher = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(launcher / hand for hand, launcher in pairs)
    print(f"median: by hand {hand:.2f} s, launcher {launcher:.2f} s, ratio {ratio:.2f} (target: at most 0.7)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
