"""May a run with these settings go on from that checkpoint?

Its manifest tells, so it is known before anything is loaded, or even started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from distributed.checkpoint.directory import CheckpointInfo
from distributed.config import BASE_ONLY, FROM_SCRATCH, FULL_FINE_TUNING, TWO_PHASES, ConfigError, Settings

# What may differ between a checkpoint and the run that goes on from it, and what follows.
SCHEDULE = "the learning rate follows it from here on"
ROUNDING = "sums are rounded differently from here on"
CHANGEABLE = {
    "world": "the same data in the same order, sums rounded differently; dropout draws other numbers",
    "batch": "going on at the same place in the data",
    "corpus": "going on at that place in other data",
    "seed": "the data comes in another order from here on",
    "steps": "the learning rate follows the new length from here on",
    "learning_rate": SCHEDULE, "min_learning_rate": SCHEDULE, "warmup_steps": SCHEDULE,
    "weight_decay": "it holds from here on", "beta1": "it holds from here on", "beta2": "it holds from here on",
    "grad_clip": "it holds from here on",
    "accumulation": ROUNDING, "precision": ROUNDING,
    "evaluate_windows": "held-out losses are not comparable with those before",
}  # fmt: skip


def check_resumable(found: CheckpointInfo, settings: Settings, vocab_size: int | None) -> None:
    """Refuse a checkpoint of another model or fold, or of another strategy; any, where settings exclude resuming.

    Args:
        vocab_size: None when it follows from the data, which have not been read yet.

    Raises:
        ConfigError, CheckpointError: names the checkpoint, the setting, both values, and what to do.
    """
    if settings.checkpoint.resume == "never":
        raise ConfigError(f"checkpoint.resume=never, but {found.path} is there: name another checkpoint.dir")
    found.check_sharding(sharded=settings.distributed.strategy == "fsdp")
    data, theirs = experiment_of(settings), found.facts  # what is held out now may have been trained on there
    differ = [f"data.{key}={data[key]} (there {theirs.get(key)})" for key in data if data[key] != theirs.get(key)]
    if differ:
        raise ConfigError(
            f"{found.path} is of another fold: {', '.join(differ)}; name another prefix, or another checkpoint.dir"
        )
    model, theirs = {**settings.model.model_dump(), "vocab_size": vocab_size}, found.facts.get("model", {})
    if vocab_size is None:
        del model["vocab_size"]
    differ = [f"model.{key}={model[key]} (there {theirs.get(key)})" for key in model if model[key] != theirs.get(key)]
    if differ:
        raise ConfigError(
            f"{found.path} is of another model: {', '.join(differ)}; "
            "give these keys its values, or name another checkpoint.dir"
        )


def experiment_of(settings: Settings) -> dict[str, Any]:
    """Settings of the data that must be those of the checkpoint from which a run resumes; null: no effect."""
    data = settings.data
    found: dict[str, Any] = {
        "participant": data.participant,
        "mode": data.mode if data.participant or data.mode == BASE_ONLY else None,
        "base_participants": None, "target_data_pct": None, "target_batch_pct": None,
    }  # fmt: skip
    if data.mode in TWO_PHASES and data.base_participants:
        found["base_participants"] = sorted(data.base_participants)
    if data.mode in (FULL_FINE_TUNING, FROM_SCRATCH):
        found |= {"target_data_pct": data.target_data_pct, "target_batch_pct": data.target_batch_pct}
    return found


def check_base_model(found: CheckpointInfo, ours: str | None) -> None:
    """Refuse a checkpoint of a run that started from another base model. ours: the digest; null is random weights.

    Raises:
        ConfigError: names the checkpoint, both digests, and what to do.
    """
    theirs = found.facts.get("base_model")
    if ours != theirs:
        raise ConfigError(
            f"{found.path} was trained from another base model: {ours} now, {theirs} there; name another prefix, or "
            "another checkpoint.dir, or give the base model of before"
        )


def changeable(settings: Settings) -> dict[str, Any]:
    """The settings of train that may change between a checkpoint and the run that goes on from it."""
    return {name: value for name, value in settings.train.model_dump().items() if name in CHANGEABLE}


def changes(found: CheckpointInfo, ours: Mapping[str, Any]) -> Iterator[str]:
    """One line for each fact that was another one in the checkpoint, and what follows of it."""
    for name, meaning in CHANGEABLE.items():
        if name in found.facts and found.facts[name] != ours[name]:
            yield f"{name} was {found.facts[name]} in {found.path}, now it is {ours[name]}: {meaning}"


def complete(found: CheckpointInfo, steps: int, settings: Settings) -> str:
    """The line for a run that has nothing left to do; empty for any other."""
    if found.step < steps:
        return ""
    length = "steps" if settings.train.steps else "epochs"
    return (
        f"nothing left to do: {found.path} has {found.step:,} of {steps:,} steps; raise train.{length} to go on, or "
        "name another checkpoint.dir to start anew"
    )
