"""Run a script as one task of srun: as `python SCRIPT`, in the environment that torchrun would give it.

SLURM says in words of its own which task this is; here they become RANK, WORLD_SIZE, MASTER_ADDR and so on, so that
a script written for torchrun runs unchanged. An error is kept for the verdict.

Usage: python task.py SCRIPT|-m MODULE [WORDS...]
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    is_module = sys.argv[1:2] == ["-m"]
    name, *words = sys.argv[2:] if is_module else sys.argv[1:]

    from distributed.torch import World, WorldError, as_env
    from distributed.worker import Script, work

    try:
        os.environ.update(as_env(World.from_env()))
    except WorldError as error:
        sys.stderr.write(f"task.py: {error}\n")
        sys.exit(2)
    os.environ.pop("MUSTER_NODE", None)  # the launcher's; this task may run on another node
    work(Script(name, tuple(words), is_module, tuple(sys.path[1:])))
