"""Entry to distributed/jobs/array_task.py on a compute node. Called with `python -I -S`."""

import os
import sys

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))

from distributed.jobs.array_task import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
