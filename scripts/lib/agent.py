"""Start Muster's agent from any directory, with torchrun's options. --plain runs MODULE (of PyTorch) instead.

Usage: python agent.py [--plain MODULE] --nproc-per-node N [torchrun's other options] SCRIPT|-m MODULE [ARGUMENT...]
"""

# ruff: noqa: E402
import sys

sys.path.insert(0, __file__.rpartition("/")[0])
import recorded_imports  # first: it has INITIAL_MODULES

del sys.path[0]

import contextlib
import gc
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from distributed.agent.options import Options

TRAINER = str(Path(__file__).resolve().parents[2] / "train.py")


def choose_threads(options: "Options") -> None:
    """Set OMP_NUM_THREADS before PyTorch is imported. The first node prints the value."""
    from distributed.launch.threads import share_cores

    line = share_cores(options.nproc_per_node)
    if options.node_rank == 0:
        sys.stderr.write(line)


def check_gpus(options: "Options") -> None:
    """Warn if PyTorch cannot use the GPUs. train.py itself refuses them."""
    from distributed.agent.gpu_check import warn_of_unusable_gpus

    if TRAINER not in sys.argv:
        warn_of_unusable_gpus(options.nproc_per_node)


def main(options: "Options") -> int:
    """Run Muster's agent. Returns its exit code."""
    from distributed.host import network, signals

    if options.nnodes > 1:
        network.use_interface_to(options.master_addr)
    # By default Python buffers output to a pipe in large blocks.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signals.ignore()  # only ranks handle the signals in PASSED_ON

    from distributed.agent.attempt import AttemptPipes

    pipes = AttemptPipes.take()

    from distributed import compiler_cache
    from distributed.agent.preloaded import Preload

    preload = Preload(recorded_imports.INITIAL_MODULES, recorded_imports.IMPORTS)
    gc.disable()  # makes the import of PyTorch 5 % faster
    with preload.record_environment_reads():
        import torch

        # Other scripts may set variables that these modules read.
        if TRAINER in sys.argv and not compiler_cache.choose():
            import torch._dynamo
            import torch.distributed.checkpoint
            import torch.distributed.fsdp  # noqa: F401
    gc.enable()

    from distributed.agent.fork_server import ForkServer
    from distributed.agent.worker import run_rank

    recorded_imports.stop()
    server = ForkServer(partial(run_rank, preload))

    from distributed.agent import agent

    check_gpus(options)
    os.umask(0o077)  # of directories for the ranks' output; the ranks, which the server starts, have the user's umask
    return agent.main(options, server, pipes)


def run_plain(kind: str, module: str, *arguments: str) -> NoReturn:
    """Run this module of PyTorch. kind: --plain or, in the process that runs it, --patched, see become()."""
    from distributed.agent.attempt import run_torchrun
    from distributed.agent.options import Unsupported, parse

    prepare = choose_threads if kind == "--plain" else check_gpus
    with contextlib.suppress(Unsupported):  # only torchrun knows the number of ranks
        prepare(parse(arguments, {}))
    if kind == "--plain":
        become(module, arguments)
    recorded_imports.stop()
    run_torchrun(module, list(arguments))
    sys.exit()


def become_torchrun(reason: str) -> NoReturn:
    """Leave this command line to torchrun's agent, which does not stay for the next attempt."""
    from distributed.agent.attempt import AttemptPipes

    AttemptPipes.take()
    print(f"agent: {reason}; using --agent torchrun", file=sys.stderr)
    arguments = sys.argv[1:]
    if "--pass-local-rank" not in arguments[: arguments.index("--") if "--" in arguments else None]:
        become("torch.distributed.run", arguments)
    arguments.remove("--pass-local-rank")
    become("torch.distributed.launch", arguments)


def become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by `python -m module arguments...`, with default signal handlers.

    It runs through this file: ranks get the launcher's attempt number, no other program can write to the rendezvous of
    a single node, and no torch.py in the working directory is imported, as `python -m` would.
    """
    from distributed.host import signals

    signals.use_defaults()
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    os.execv(sys.executable, [sys.executable, __file__, "--patched", module, *arguments])


if __name__ == "__main__":
    kit = str(Path(__file__).resolve().parents[2])
    if getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, kit)
    else:
        sys.path[0] = kit
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell starts background jobs with SIGINT ignored
    if sys.argv[1:2] in (["--plain"], ["--patched"]):
        run_plain(*sys.argv[1:])
    from distributed.agent.options import Unsupported, parse

    try:
        options = parse(sys.argv[1:])
    except Unsupported as reason:
        become_torchrun(str(reason))
    choose_threads(options)
    code = main(options)
    os._exit(code)  # normal interpreter shutdown with PyTorch takes a second
