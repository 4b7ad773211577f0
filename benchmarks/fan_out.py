"""What does it cost to ask many nodes at once, against pdsh, and to ask whether they are fit, against a single ssh?

Two questions on the laboratory, in turns in one run: `true` on 16 nodes, by the kit's own door to nodes and by pdsh;
and the preflight of 3 nodes, against the slowest of three single `ssh NODE true`. Needs root.

    python -m benchmarks.fan_out [--turns 7]
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

ASK = KIT / "benchmarks/ask_nodes.sh"


def run(*words: str) -> float:
    """Seconds that a command takes."""
    env = os.environ | {"PDSH_RCMD_TYPE": "ssh", "VIRTUAL_ENV": sys.prefix}
    started_at = time.monotonic()
    subprocess.run(words, env=env, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return time.monotonic() - started_at


def slowest_ssh(names: list[str]) -> float:
    """Seconds of the slowest of single ssh calls, one after the other."""
    return max(run("ssh", name, "true") for name in names)


def in_turns(turns: int, ours: Callable[[], float], peers: Callable[[], float]) -> list[tuple[float, float]]:
    """Pairs of seconds, after one turn that does not count."""
    pairs = []
    for turn in range(turns + 1):
        pair = (ours(), peers()) if turn % 2 else tuple(reversed((peers(), ours())))
        pairs.append((pair[0], pair[1]))
    return pairs[1:]


def main() -> int:
    """Print the medians and the ratio or difference of the pairs."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--turns", type=int, default=7)
    turns = options.parse_args().turns
    with nodes(16) as (names, _):
        all_at_once = partial(run, str(ASK), "true", *names)
        pdsh = partial(run, "pdsh", "-S", "-f", "16", "-w", ",".join(names), "true")
        pairs = in_turns(turns, all_at_once, pdsh)
        ratio = statistics.median(ours / peer for ours, peer in pairs)
        ours, peer = (statistics.median(side) for side in zip(*pairs, strict=True))
        print(f"true on 16 nodes: kit {ours:.2f} s, pdsh {peer:.2f} s, ratio {ratio:.2f} (wanted: at most 1.0)")
        preflight = partial(run, str(ASK), "preflight", *names[:3])
        pairs = in_turns(turns, preflight, partial(slowest_ssh, names[:3]))
        over = statistics.median(ours - peer for ours, peer in pairs)
        ours, peer = (statistics.median(side) for side in zip(*pairs, strict=True))
        print(
            f"preflight of 3 nodes: {ours:.2f} s, slowest ssh {peer:.2f} s, over it {over:.2f} s (wanted: at most 0.3)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
