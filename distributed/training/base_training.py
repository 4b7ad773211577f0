"""Write a base model (mode base_only), or load the one to fine-tune (mode full_fine_tuning).

Weights are loaded with weights_only=True, after all bytes were verified against the manifest (base_model.py).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distributed import metrics
from distributed.files import read_json, user_file, write_json
from distributed.report import history
from distributed.training import base_model
from distributed.training.base_model import BaseModelError
from distributed.training.collectives import Ranks
from distributed.training.settings import FULL_FINE_TUNING, ConfigError, Settings
from distributed.trust import SHARED, opened, regular_file

DIRECTORY, DIGEST = "MUSTER_BASE_MODEL", "MUSTER_BASE_MODEL_DIGEST"  # environment variables
REMEDY = "give --base_model DIR, or run a job list with scripts/jobs/run_two_phase_training.py"
WEIGHTS, METRICS, LOSSES, CONFIG = base_model.FILES


# ---------------------------------------------------------------- loading


@dataclass(frozen=True)
class Base:
    """A verified base model."""

    directory: Path
    digest: str
    metrics: Mapping[str, Any]  # base_metrics.json

    def __str__(self) -> str:
        here = Path.cwd()
        path = self.directory.relative_to(here) if self.directory.is_relative_to(here) else self.directory
        loss, step = self.metrics.get("held_out_loss"), self.metrics.get("step")
        score = f", held-out loss {loss:.3f} at step {step}" if isinstance(loss, float) else ""
        return f"{path} (digest {base_model.hash_of(self.digest)}...{score})"

    def trained_on(self, participant: str | None) -> bool:
        """Return whether its training data included text of that participant."""
        known = self.metrics.get("participants")
        return isinstance(known, list) and participant in known

    def load_into(self, model: nn.Module, settings: Mapping[str, Any], ranks: Ranks) -> None:
        """Load the weights into a model. Collective. settings: the model's settings, with vocab_size.

        Raises:
            ConfigError: the weights cannot be loaded, or do not fit the model. Every rank raises the same error.
        """
        file = self.directory / WEIGHTS
        try:
            content = ranks.load(file)
            saved, weights = dict(content["model_settings"]), dict(content["model"])
        except (pickle.UnpicklingError, OSError) as error:
            raise ConfigError(f"{file}: cannot be loaded: {error}; {REMEDY}") from None
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{file}: not the weights of a base model of train.py; {REMEDY}") from None
        differ = [
            f"model.{key}={value} (base model: {saved.get(key)})"
            for key, value in settings.items()
            if value != saved.get(key)
        ]
        if differ:
            raise ConfigError(
                f"{self.directory}: the base model has other settings: {', '.join(differ)}; use the base model's "
                "values, or another base model: --base_model DIR"
            )
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise ConfigError(f"{file}: does not fit the model: {' '.join(str(error).split())}; {REMEDY}") from None


def find(settings: Settings, ranks: Ranks) -> Base | None:
    """Return the base model of train.base_model or $MUSTER_BASE_MODEL, verified by rank 0.

    Returns None unless the mode is full_fine_tuning. Collective.

    Raises:
        ConfigError: no base model is named, or it is missing, incomplete, damaged or has another digest. Every rank
            raises the same error.
    """
    if settings.data.mode != FULL_FINE_TUNING:
        return None
    named = settings.train.base_model  # may be a link of this user; what Muster has named, in a cache, may not
    return ranks.call_on_rank_0(lambda: _verified(user_file(named) if named else os.environ.get(DIRECTORY)))


def _verified(named: str | Path | None) -> Base:
    if not named:
        raise ConfigError(f"data.mode={FULL_FINE_TUNING}: no base model; {REMEDY}")
    directory = Path(named).absolute()
    try:
        found = base_model.verify(str(directory), os.environ.get(DIGEST) or None)["digest"]
    except BaseModelError as error:
        raise ConfigError(f"{error}; {REMEDY}") from None
    # Only log messages use the metrics, so {} is accepted: read_json() returns it if the file holds no JSON object.
    with opened(directory) as here:
        return Base(directory, str(found), read_json(f"/proc/self/fd/{here}/{METRICS}"))


# ---------------------------------------------------------------- writing


def write(
    run: Path,
    weights: Mapping[str, Tensor],
    model: Mapping[str, Any],
    facts: Mapping[str, Any],
    settings: Settings,
    job: Mapping[str, Any],
) -> None:
    """Write the files of a base model to the run directory, each atomically. Raises OSError.

    The weights of an earlier run are removed first, and the new ones written last: a set without weights is incomplete.

    model: the model's settings, with vocab_size. facts: content of base_metrics.json. job: arguments of the job.
    """
    (run / WEIGHTS).unlink(missing_ok=True)
    curve = history.read_metrics(run / "metrics.jsonl", [], 300_000)
    losses = {
        name: [{"step": int(step), name: metrics.finite_or_none(loss)} for step, loss in series]
        for name, series in (("loss", curve.series("loss")), ("held_out_loss", curve.held_out_losses()))
    }
    config = {
        "settings": settings.model_dump(mode="json"), "arguments": dict(job), "digest": os.environ.get(DIGEST) or None,
    }  # fmt: skip
    for name, value in ((METRICS, facts), (LOSSES, losses), (CONFIG, config)):
        write_json(str(run / name), value, SHARED)
    content = {"model": dict(weights), "model_settings": dict(model), "corpus": facts["corpus"]}
    incomplete = run / f".{WEIGHTS}.incomplete"
    incomplete.unlink(missing_ok=True)
    # Given a path, torch.save would write its name into the file.
    with open(incomplete, "xb", opener=partial(regular_file, mode=SHARED)) as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    incomplete.replace(run / WEIGHTS)
