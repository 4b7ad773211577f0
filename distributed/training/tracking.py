"""The run directory, and the files that rank 0 writes there: metrics.jsonl and the files of trackers.

The format of metrics.jsonl is that of distributed/metrics.py.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from distributed import metrics
from distributed.runs.lookup import RunNode
from distributed.runs.run_directory import create
from distributed.training.collectives import Ranks
from distributed.training.fold import DEFAULT_PARTICIPANTS, output_directory
from distributed.training.settings import ConfigError
from distributed.trust import make_own_directory
from distributed.world import World

Scalars = Mapping[str, float]


class Tracker:
    """Writes the values of a step to metrics.jsonl and, if enabled, to TensorBoard and wandb."""

    def __init__(self, run: Path, settings: Mapping[str, Any]) -> None:
        """Open the trackers that `settings["logging"]` enables; they write to the directory `run`."""
        self._file = run / "metrics.jsonl"
        self._closers: list[Callable[[], object]] = []
        self._scalars: list[Callable[[Scalars, int], object]] = []
        if settings["logging"]["tensorboard"]:
            self._open_tensorboard(run)
        if settings["logging"]["wandb"] != "disabled":
            self._open_wandb(run, settings)

    def log(self, step: int, **values: Any) -> None:
        """Write the values of one step to metrics.jsonl, with null for NaN and infinity.

        Also send the finite floats among them to the trackers.
        """
        written = metrics.append(self._file, step, values)
        scalars = {name: value for name, value in written.items() if isinstance(value, float)}
        for write in self._scalars:
            write(scalars, step)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *error: object) -> None:
        for close in reversed(self._closers):
            close()

    def _open_tensorboard(self, run: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(run / "tensorboard"))

        def write(values: Scalars, step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        self._scalars.append(write)
        self._closers.append(writer.close)

    def _open_wandb(self, run: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        logging = settings["logging"]
        wandb_run = wandb.init(
            project=logging["project"], name=run.name, dir=str(run), mode=logging["wandb"], config=dict(settings)
        )
        self._scalars.append(lambda values, step: wandb_run.log(dict(values), step=step))
        self._closers.append(wandb_run.finish)


def run_directory(job: Mapping[str, Any], world: World, ranks: Ranks, script: str) -> Path:
    """Return $MUSTER_OUTPUT_DIR, else $MUSTER_RUN_DIR, else a directory that rank 0 makes. Collective.

    job: the arguments of the job, see settings.job_of().

    Every rank raises the same ConfigError when the directory cannot be made.
    """

    def make() -> Path:
        configured = os.environ.get("MUSTER_OUTPUT_DIR") or os.environ.get("MUSTER_RUN_DIR")
        try:
            path = configured or _own_run_directory(job, world, script)
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: cannot make the run directory: {error.strerror}; "
                "give another prefix, or start in another directory"
            ) from None
        return Path(path)

    return ranks.call_on_rank_0(make)


def _own_run_directory(job: Mapping[str, Any], world: World, script: str) -> str:
    """Make a directory in logs or, with a prefix, in experiments/PREFIX.

    With --prefix and --fold (training/fold.py), it is the same directory each time, so that the job resumes.
    """
    output = os.path.abspath(output_directory(job, "job", DEFAULT_PARTICIPANTS))
    resumes = {"prefix", "fold"} <= job.keys()
    if "prefix" in job:
        make_own_directory(output if resumes else os.path.dirname(output), os.getcwd())
    return create(
        os.path.dirname(output) if "prefix" in job else "logs", "train",
        nodes=[RunNode(socket.gethostname(), "", world.local_size, 0)], script=script, config=None, cwd=os.getcwd(),
        python=sys.executable, command=sys.argv, existing=output if resumes else None,
    )  # fmt: skip


def describe_machine() -> dict[str, Any]:
    """Return the hardware and software of this machine, for settings.json. Memory is in bytes."""
    return {
        "host": socket.gethostname(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        # A name would initialize CUDA, which takes memory of a GPU, in a run on the CPU.
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count() * torch.cuda.is_initialized())],
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
