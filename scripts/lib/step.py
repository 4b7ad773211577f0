"""Run srun and watch its tasks; see distributed/slurm/srun.py.

Usage: python -I -S step.py RUN TERMINALS NODE:TASKS,... SRUN [ARGUMENT...]

srun is started first: while SLURM starts its tasks, the module that watches them is imported.
"""

import os
import signal
import subprocess
import sys

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))

from distributed.host import signals


def main(run: str, terminals: str, nodes: str, *srun: str) -> int:
    signals.ignore((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *signals.PASSED_ON))  # see run_step
    started = subprocess.Popen(
        srun,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        env={**os.environ, "MUSTER_RUN_DIR": run, "MUSTER_METRICS": os.path.join(run, "metrics.jsonl")},
    )

    from distributed.slurm.srun import watch

    return watch(run, terminals, nodes, started)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
