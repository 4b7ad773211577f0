"""Run one task of srun under the supervisor; see distributed/slurm/task.py.

Called with `python -I -S`: neither site packages nor the environment can then slow or change its start.
"""

import os
import sys

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))

from distributed.slurm.task import main

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
