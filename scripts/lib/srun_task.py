"""Run one task of srun under the supervisor; see distributed/slurm/task.py.

Run with `python -I -S`, so that site packages and the environment neither slow down nor change its start.
"""

import os
import sys

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))

from distributed.slurm.task import main

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
