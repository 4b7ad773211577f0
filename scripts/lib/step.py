"""Run srun and watch over its tasks; see distributed/slurm/srun.py.

Usage: python step.py RUN NODE:TASKS,... SRUN [WORD...]

srun is started first of all: while it asks SLURM for its tasks, what watches over them is imported.
"""

import os
import signal
import subprocess
import sys

KIT = os.path.abspath(f"{__file__}/../../..")


def start(run: str, srun: tuple[str, ...]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        srun,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        env={**os.environ, "MUSTER_RUN_DIR": run, "MUSTER_METRICS": os.path.join(run, "metrics.jsonl")},
    )


def main(run: str, nodes: str, *srun: str) -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # orders come through standard input
    started = start(run, srun)

    from distributed.slurm.srun import watch

    return watch(run, nodes, started)


if __name__ == "__main__":
    sys.path[0] = KIT
    sys.exit(main(*sys.argv[1:]))
