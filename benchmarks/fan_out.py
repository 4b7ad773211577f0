"""Compare Muster with pdsh for a command on many nodes, and Muster's preflight check with a single ssh.

The first measurement runs `true` on 16 laboratory nodes with Muster's ssh layer and with pdsh. The second compares the
preflight check of 3 nodes with the slowest of three single `ssh NODE true`. In each measurement, runs of Muster and of
the baseline alternate. Needs root.

    python -m benchmarks.fan_out [--repetitions 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from benchmarks.laboratory import KIT, nodes

ASK_NODES = (sys.executable, "-S", "-m", "benchmarks.ask_nodes")


def run(*command: str) -> float:
    """Run a command. Returns its duration in seconds."""
    env = os.environ | {"PDSH_RCMD_TYPE": "ssh", "VIRTUAL_ENV": sys.prefix}
    started_at = time.monotonic()
    subprocess.run(command, env=env, cwd=KIT, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return time.monotonic() - started_at


def slowest_ssh(names: list[str]) -> float:
    """Run one ssh after another. Returns the seconds of the slowest."""
    return max(run("ssh", name, "true") for name in names)


def alternate(
    repetitions: int, muster: Callable[[], float], baseline: Callable[[], float]
) -> list[tuple[float, float]]:
    """Returns pairs of seconds (muster, baseline), without the first, which warms caches."""
    pairs = []
    for repetition in range(repetitions + 1):
        pair = (muster(), baseline()) if repetition % 2 else tuple(reversed((baseline(), muster())))
        pairs.append((pair[0], pair[1]))
    return pairs[1:]


def main() -> int:
    """Print the medians, and the median ratio or difference of the pairs."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--repetitions", type=int, default=7, help="number of measured repetitions")
    repetitions = options.parse_args().repetitions
    with nodes(16) as (names, _):
        muster = partial(run, *ASK_NODES, "true", *names)
        pdsh = partial(run, "pdsh", "-S", "-f", "16", "-w", ",".join(names), "true")
        pairs = alternate(repetitions, muster, pdsh)
        ratio = statistics.median(own / peer for own, peer in pairs)
        own, peer = (statistics.median(side) for side in zip(*pairs, strict=True))
        print(f"true on 16 nodes: Muster {own:.2f} s, pdsh {peer:.2f} s, ratio {ratio:.2f} (target: at most 1.0)")
        preflight = partial(run, *ASK_NODES, "preflight", *names[:3])
        pairs = alternate(repetitions, preflight, partial(slowest_ssh, names[:3]))
        excess = statistics.median(own - peer for own, peer in pairs)
        own, peer = (statistics.median(side) for side in zip(*pairs, strict=True))
        print(
            f"preflight of 3 nodes: {own:.2f} s, slowest ssh {peer:.2f} s, excess {excess:.2f} s (target: at most 0.3)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
