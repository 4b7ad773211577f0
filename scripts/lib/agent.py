"""Start Muster's agent from any directory, with torchrun's options. --plain runs MODULE (of PyTorch) instead.

Usage: python agent.py [--plain MODULE] --nproc-per-node N [torchrun's other options] SCRIPT|-m MODULE [ARGUMENT...]
"""

# ruff: noqa: E402
import sys

sys.path.insert(0, __file__.rpartition("/")[0])
import recorded_imports  # first: it has INITIAL_MODULES

del sys.path[0]

import gc
import itertools
import os
import signal
from functools import partial
from pathlib import Path
from typing import NoReturn

TRAINER = str(Path(__file__).resolve().parents[2] / "train.py")


def options_of(arguments: list[str]) -> dict[str, str]:
    """Return the options written as `--name value`, as launchers write them; for a repeated option, the first value."""
    end = arguments.index("--") if "--" in arguments else len(arguments)  # the script and its arguments follow
    return dict(reversed(list(itertools.pairwise(arguments[:end]))))


def choose_threads(options: dict[str, str]) -> None:
    """Set OMP_NUM_THREADS before PyTorch is imported. The first node prints the value."""
    from distributed.launch.threads import share_cores

    ranks = options.get("--nproc-per-node", "")
    line = share_cores(int(ranks)) if ranks.isdigit() and int(ranks) else ""
    if options.get("--node-rank", "0") == "0":
        sys.stderr.write(line)


def check_gpus(options: dict[str, str]) -> None:
    """Warn if PyTorch cannot use the GPUs. train.py itself refuses them."""
    from distributed.agent.gpu_check import warn_of_unusable_gpus

    ranks = options.get("--nproc-per-node", "")
    if TRAINER not in sys.argv and ranks.isdigit():
        warn_of_unusable_gpus(int(ranks))


def main() -> int:
    """Run Muster's agent. Returns its exit code."""
    from distributed.host import network, signals

    launcher_options = options_of(sys.argv[1:])
    if launcher_options.get("--nnodes", "1") != "1":
        network.use_interface_to(launcher_options.get("--master-addr", ""))
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
            import torch.distributed.fsdp
    gc.enable()

    from distributed.agent.fork_server import ForkServer
    from distributed.agent.worker import run_rank

    recorded_imports.stop()
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
    check_gpus(launcher_options)
    os.umask(0o077)  # of directories for the ranks' output; the ranks, which the server starts, have the user's umask
    return agent.main(options, server, pipes)


def become(module: str, arguments: list[str]) -> NoReturn:
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
    if sys.argv[1:2] == ["--patched"]:
        recorded_imports.stop()
        from distributed.agent.attempt import run_torchrun

        check_gpus(options_of(sys.argv[3:]))
        run_torchrun(sys.argv[2], sys.argv[3:])
        sys.exit()
    choose_threads(options_of(sys.argv[1:]))
    if sys.argv[1:2] == ["--plain"]:
        become(sys.argv[2], sys.argv[3:])
    code = main()
    os._exit(code)  # normal interpreter shutdown with PyTorch takes a second
