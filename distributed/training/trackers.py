"""Find which trackers the settings enable, and check that they are installed.

The checks of the launchers use this module, so it does not import PyTorch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any


class TrackerMissing(RuntimeError):
    """The settings enable a tracker whose package is not installed."""


def enabled(settings: Mapping[str, Any]) -> dict[str, str]:
    """The package of each enabled tracker, and the setting that enables it."""
    logging = settings["logging"]
    found = {"tensorboard": "logging.tensorboard=true"} if logging["tensorboard"] else {}
    return found | ({"wandb": f"logging.wandb={logging['wandb']}"} if logging["wandb"] != "disabled" else {})


def check(settings: Mapping[str, Any]) -> None:
    """Check that the enabled trackers are installed. Raises TrackerMissing."""
    for package, setting in enabled(settings).items():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:  # without an origin, it is a directory of this name, not the package
            raise TrackerMissing(
                f"{setting}, but the package {package} is not installed: "
                "python -m pip install -r requirements-trackers.txt"
            )
