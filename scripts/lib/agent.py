"""Start the kit's agent from any folder: the same words as torchrun's.

Usage: python agent.py --nproc-per-node N [torchrun's other options] SCRIPT|-m MODULE [WORDS...]
"""

import itertools
import os
import signal
import sys
from pathlib import Path


def said(words: list[str]) -> dict[str, str]:
    """torchrun's options with their values, as the launchers write them; of an option said twice, the first."""
    end = words.index("--") if "--" in words else len(words)  # behind it stands the script, with words of its own
    return dict(reversed(list(itertools.pairwise(words[:end]))))


def share_cores(options: dict[str, str]) -> None:
    """Give each rank its share of the cores, before PyTorch reads OMP_NUM_THREADS (torchrun: 1 for each)."""
    ranks = options.get("--nproc-per-node", "")
    if ranks.isdigit():
        cores = len(os.sched_getaffinity(0))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // max(1, int(ranks)))))


def choose_interface(options: dict[str, str]) -> None:
    """Gloo listens at the address of the node's own name, often 127.0.1.1: on several nodes, name the interface."""
    from distributed.network import interface_to

    master = options.get("--master-addr")
    if master and options.get("--nnodes", "1") != "1" and (interface := interface_to(master)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


if __name__ == "__main__":  # a worker imports this file too, under another name
    kit = str(Path(__file__).resolve().parents[2])
    if getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, kit)
    else:
        sys.path[0] = kit
    share_cores(said(sys.argv[1:]))
    choose_interface(said(sys.argv[1:]))
    # Into a pipe Python would keep back what ranks say until there is much of it.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background jobs with it ignored
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # meant for the workers

    from distributed.worker import warm_up

    warm_up()

    from distributed.agent import main

    sys.exit(main(sys.argv[1:]))
