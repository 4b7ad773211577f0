"""What rank 0 writes down while it trains: metrics.jsonl always, TensorBoard and Weights & Biases when asked.

metrics.jsonl is written as distributed/metrics.py does it for every script.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from distributed import metrics

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


def write_settings(run: Path, settings: Mapping[str, Any], **facts: Mapping[str, Any]) -> None:
    """Write settings.json: every setting, and the facts (world, model, machine) that figures depend on."""
    text = json.dumps({"settings": settings, **facts}, indent=2, sort_keys=True, default=str)
    beside = run / f"settings.json.{os.getpid()}"
    beside.write_text(text + "\n", encoding="utf-8")
    beside.replace(run / "settings.json")


def describe_machine() -> dict[str, Any]:
    """What this machine is, as far as figures depend on it; memory in bytes."""
    return {
        "host": socket.gethostname(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
