"""Run a script as one task of srun: as `python SCRIPT`, and an error is kept for the verdict.

Usage: python task.py SCRIPT|-m MODULE [WORDS...]
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    first = sys.path[0]
    sys.path[0] = str(Path(__file__).resolve().parents[2])

    from distributed.worker import Script, work

    is_module = sys.argv[1] == "-m"
    name, *words = sys.argv[2:] if is_module else sys.argv[1:]
    os.environ.pop("MUSTER_NODE", None)  # the launcher's; this task may run on another node
    work(Script(name, tuple(words), is_module, tuple(sys.path[1:])))
