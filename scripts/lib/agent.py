"""Start an agent from any directory, with torchrun's options: the kit's own, or with --plain the MODULE of PyTorch.

Usage: python agent.py [--plain MODULE] --nproc-per-node N [torchrun's other options] SCRIPT|-m MODULE [ARGUMENT...]
"""

# ruff: noqa: E402
import sys

FRESH = frozenset(sys.modules)  # what the interpreter itself has imported

import gc
import itertools
import os
import signal
from functools import partial
from pathlib import Path
from typing import NoReturn


def options_of(arguments: list[str]) -> dict[str, str]:
    """torchrun's options with their values, as the launchers write them; of an option given twice, the first."""
    end = arguments.index("--") if "--" in arguments else len(arguments)  # the script follows, with its own arguments
    return dict(reversed(list(itertools.pairwise(arguments[:end]))))


def choose_threads(options: dict[str, str]) -> None:
    """Before PyTorch is imported. The first node prints what it has chosen."""
    from distributed.launch.threads import share_cores

    ranks = options.get("--nproc-per-node", "")
    line = share_cores(int(ranks)) if ranks.isdigit() and int(ranks) else ""
    if options.get("--node-rank", "0") == "0":
        sys.stderr.write(line)


def choose_interface(options: dict[str, str]) -> None:
    """Gloo listens at the address of the node's own name, often 127.0.1.1: on several nodes, name the interface."""
    from distributed.host.network import interface_to

    master = options.get("--master-addr")
    if master and options.get("--nnodes", "1") != "1" and (interface := interface_to(master)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def main() -> int:
    """Run the kit's own agent. Returns its exit code."""
    choose_interface(options_of(sys.argv[1:]))
    # Into a pipe, Python would write the output of ranks in large blocks only.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell starts its background jobs with it ignored
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # meant for the ranks

    from distributed.agent.preloaded import Preload

    preload = Preload(FRESH)
    gc.disable()  # the import of PyTorch is 5 % faster, and leaves nothing to collect
    with preload.record_environment_reads():
        import torch
    gc.enable()

    from distributed.agent.fork_server import ForkServer
    from distributed.agent.worker import run_rank

    server = ForkServer(partial(run_rank, preload))

    try:
        from distributed.agent import agent

        options = agent.parse(sys.argv[1:])
        reason = agent.unsupported(options)
    except (ImportError, AttributeError) as error:
        reason = f"PyTorch {torch.__version__}: {error}"
    if reason:
        server.close()
        print(f"agent: {reason}; using --agent torchrun", file=sys.stderr)
        arguments = sys.argv[1:]
        if "--pass-local-rank" not in arguments[: arguments.index("--") if "--" in arguments else None]:
            become("torch.distributed.run", arguments)
        arguments.remove("--pass-local-rank")
        become("torch.distributed.launch", arguments)
    return agent.main(options, server)


def become(module: str, arguments: list[str]) -> NoReturn:
    """Be `python -m module arguments...`, with the signals of a fresh process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell starts its background jobs with it ignored
    if "SLURM_JOB_ID" not in os.environ:  # in a job, a script that does not handle this warning must not die
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


if __name__ == "__main__":
    kit = str(Path(__file__).resolve().parents[2])
    if getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, kit)
    else:
        sys.path[0] = kit
    choose_threads(options_of(sys.argv[1:]))
    if sys.argv[1:2] == ["--plain"]:
        become(sys.argv[2], sys.argv[3:])
    code = main()
    os._exit(code)  # the interpreter's teardown of PyTorch would take a second
