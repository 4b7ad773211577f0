"""One task of srun: a rank, or the agent of its node, guarded by this process.

Usage: python task.py rank RUN GRACE SCRIPT|-m MODULE [WORD...]
       python task.py agent RUN GRACE COUNTS AGENT-WORD... -- SCRIPT-WORD...

SLURM says in words of its own which task this is; for a rank they become RANK, WORLD_SIZE, MASTER_ADDR and so on, so
that a script written for torchrun runs unchanged. COUNTS are the ranks of each node, as in 2,2,1.
"""

# ruff: noqa: E402
import sys

FRESH = frozenset(sys.modules)  # what the interpreter itself has imported

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

KIT = str(Path(__file__).resolve().parents[2])


def become_rank(run: str, output: str, words: Sequence[str]) -> NoReturn:
    """Be `python SCRIPT`, in the environment that torchrun would give it. output: the directory of its output."""
    is_module = words[0] == "-m"
    name, *rest = words[1:] if is_module else words

    from distributed.launch.threads import share_cores
    from distributed.world import World, WorldError, as_env

    try:
        world = World.from_env()
    except WorldError as error:
        sys.stderr.write(f"task.py: {error}\n")
        sys.exit(2)
    os.environ.update(as_env(world, run))
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun sets it
    choose_interface(world.nodes, world.master_addr)
    line = share_cores(world.local_size, tasks=world.local_size)
    if world.rank == 0:
        sys.stderr.write(line)

    from distributed.agent.preloaded import Preload
    from distributed.agent.worker import Script, work

    work(Script(name, tuple(rest), is_module, tuple(sys.path[1:])), Preload(FRESH), output)


def choose_interface(nodes: int, master: str | None) -> None:
    """Gloo listens at the address of the node's own name, often 127.0.1.1: name the interface that others reach."""
    from distributed.host.network import interface_to
    from distributed.nodelist import expand

    hosts = expand(os.environ["SLURM_STEP_NODELIST"])
    other = next((host for host in (master, *hosts) if host and host != os.environ["SLURMD_NODENAME"]), None)
    if nodes > 1 and other and (interface := interface_to(other)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def main(kind: str, run: str, grace: str, *words: str) -> int:
    from distributed.slurm import task

    here = task.Task.from_env(Path(run), os.environ, agent=kind == "agent")
    if kind == "rank":
        output = str(here.outputs()[0].parent)
        return task.run(here, float(grace), lambda: become_rank(here.run.name, output, words))
    counts = [int(count) for count in words[0].split(",")]
    options = task.agent_options(here, counts, os.environ)
    return task.run(here, float(grace), lambda: task.start_agent(here, words[1:], options))


if __name__ == "__main__":
    sys.path[0] = KIT
    sys.exit(main(*sys.argv[1:]))
