"""Run one command on this node and leave no process behind; see distributed/launch/supervisor.py, or --help.

Run with `python -I -S`, so that site packages and the environment neither slow down nor change its start.
"""

import os
import sys

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))

from distributed.launch.supervisor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
