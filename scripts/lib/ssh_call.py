"""Run ssh, and send standard input only after Muster's command has started; see distributed/host/ssh_call.py.

Run with `python -I -S`, so that site packages and the environment neither slow down nor change its start.
"""

import os
import sys

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))

from distributed.host.ssh_call import main

if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # a thread may still read standard input
