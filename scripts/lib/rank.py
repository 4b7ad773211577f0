"""Run a script as one rank of a job step, in the environment that torchrun would set.

Usage: python rank.py OUTPUT SCRIPT|-m MODULE [ARGUMENT...]

Derives RANK, WORLD_SIZE, MASTER_ADDR and so on from SLURM's variables, so that a script written for torchrun runs
unchanged. OUTPUT is the directory of the rank's output files.
"""

# ruff: noqa: E402
import sys

sys.path.insert(0, __file__.rpartition("/")[0])
import recorded_imports  # first: it has INITIAL_MODULES

del sys.path[0]

import os
from collections.abc import Sequence
from typing import NoReturn

KIT = os.path.abspath(f"{__file__}/../../..")


def become_rank(output: str, command: Sequence[str]) -> NoReturn:
    is_module = command[0] == "-m"
    name, *arguments = command[1:] if is_module else command

    from distributed.agent.attempt import Attempt
    from distributed.agent.worker import ERROR_HANDLING
    from distributed.files import PUBLIC
    from distributed.host.network import use_interface_to
    from distributed.launch.threads import share_cores
    from distributed.nodelist import expand
    from distributed.world import World, WorldError, as_env

    try:
        world = World.from_env()
    except WorldError as error:
        sys.stderr.write(f"rank.py: {error}\n")
        sys.exit(2)
    variables = as_env(world, os.path.basename(os.environ["MUSTER_RUN_DIR"]))
    os.environ.update(variables | Attempt.from_env().variables(variables))
    os.environ.setdefault(*ERROR_HANDLING)
    if world.nodes > 1:
        this_node, nodes = os.environ["SLURMD_NODENAME"], expand(os.environ["SLURM_STEP_NODELIST"])
        use_interface_to(next((node for node in (world.master_addr, *nodes) if node and node != this_node), ""))
    line = share_cores(world.local_size, tasks=world.local_size)
    if world.rank == 0:
        sys.stderr.write(line)

    from distributed.agent.preloaded import Preload
    from distributed.agent.worker import Script, run_script

    recorded_imports.stop()
    preload = Preload(recorded_imports.INITIAL_MODULES, recorded_imports.IMPORTS)
    run_script(Script(name, tuple(arguments), is_module, (*sys.path[1:], PUBLIC)), preload, output)


if __name__ == "__main__":
    if getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, KIT)
    else:
        sys.path[0] = KIT
    become_rank(sys.argv[1], sys.argv[2:])
