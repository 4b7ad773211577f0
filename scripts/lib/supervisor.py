"""Run one command on this node and leave nothing behind; see distributed/launch/supervisor.py, or --help.

Called with `python -I -S`: neither site packages nor the environment can then slow or change its start.
"""

import os
import sys

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))

from distributed.launch.supervisor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
