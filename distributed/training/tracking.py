"""The run directory of a training, and what rank 0 writes there: settings.json, metrics.jsonl, trackers when asked.

metrics.jsonl is written as distributed/metrics.py does it for every script.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from distributed import metrics
from distributed.config import ConfigError
from distributed.files import write_json
from distributed.fold import DEFAULT_PARTICIPANTS, output_directory
from distributed.runs.run_directory import create
from distributed.training.collectives import Ranks
from distributed.world import World

Scalars = Mapping[str, float]


class TrackerMissing(RuntimeError):
    """A tracker was asked for whose package is not installed."""


def check(settings: Mapping[str, Any]) -> None:
    """Refuse, on every rank alike, a tracker that is not installed.

    Raises:
        TrackerMissing: names the setting, the package and how to install it.
    """
    asked = settings["logging"]
    wanted = {
        "tensorboard": asked["tensorboard"] and "logging.tensorboard=true",
        "wandb": asked["wandb"] != "disabled" and f"logging.wandb={asked['wandb']}",
    }
    for package, setting in wanted.items():
        if setting and importlib.util.find_spec(package) is None:
            raise TrackerMissing(
                f"{setting}, but the package {package} is not installed: "
                "python -m pip install -r requirements-trackers.txt"
            )


class Tracker:
    """Writes the values of a step to every place that was asked for."""

    def __init__(self, run: Path, settings: Mapping[str, Any]) -> None:
        """Open the places: files in the folder `run`; `settings["logging"]` says which trackers."""
        self._file = run / "metrics.jsonl"
        self._ends: list[Callable[[], object]] = []
        self._scalars: list[Callable[[Scalars, int], object]] = []
        if settings["logging"]["tensorboard"]:
            self._open_tensorboard(run)
        if settings["logging"]["wandb"] != "disabled":
            self._open_wandb(run, settings)

    def log(self, step: int, **values: Any) -> None:
        """Write values of one step; finite numbers go to the trackers too. What is NaN or infinite becomes null."""
        written = metrics.append(self._file, step, values)
        scalars = {name: value for name, value in written.items() if isinstance(value, float)}
        for write in self._scalars:
            write(scalars, step)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for end in reversed(self._ends):
            end()

    def _open_tensorboard(self, run: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(run / "tensorboard"))

        def write(values: Scalars, step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        self._scalars.append(write)
        self._ends.append(writer.close)

    def _open_wandb(self, run: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        asked = settings["logging"]
        started = wandb.init(
            project=asked["project"], name=run.name, dir=str(run), mode=asked["wandb"], config=dict(settings)
        )
        self._scalars.append(lambda values, step: started.log(dict(values), step=step))
        self._ends.append(started.finish)


def run_directory(job: Mapping[str, Any], world: World, ranks: Ranks, script: str) -> Path:
    """$MUSTER_OUTPUT_DIR, else the launcher's directory of this run; without a launcher, rank 0 makes one. Collective.

    Raises:
        ConfigError: it cannot be made. The same on every rank.
    """

    def made() -> Path:
        given = os.environ.get("MUSTER_OUTPUT_DIR") or os.environ.get("MUSTER_RUN_DIR")
        try:
            path = given or _own_run_directory(job, world, script)
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: cannot make the run directory: {error.strerror}; "
                "give another prefix, or start in another directory"
            ) from None
        return Path(path)

    return ranks.call_on_rank_0(made)


def _own_run_directory(job: Mapping[str, Any], world: World, script: str) -> str:
    """A new one in logs or, with a prefix, in experiments/PREFIX. With a fold too it is always the same: it resumes."""
    output = os.path.abspath(output_directory(job, "job", DEFAULT_PARTICIPANTS))
    return create(
        os.path.dirname(output) if "prefix" in job else "logs", "train", nodes=[socket.gethostname()],
        nproc=world.local_size, script=script, config=None, cwd=os.getcwd(), python=sys.executable,
        command=sys.argv, again=output if {"prefix", "fold"} <= job.keys() else None,
    )  # fmt: skip


def write_settings(run: Path, settings: Mapping[str, Any], **facts: Mapping[str, Any]) -> None:
    """Write settings.json: every setting, and the facts (world, model, machine) that figures depend on."""
    write_json(run / "settings.json", {"settings": settings, **facts})


def describe_machine() -> dict[str, Any]:
    """What this machine is, as far as figures depend on it; memory in bytes."""
    return {
        "host": socket.gethostname(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
