"""Entry to distributed/jobs/host.py on a server of a job list. Called with `python -I -S`, as supervisor.py is."""

import os
import sys

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))

from distributed.jobs.host import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
