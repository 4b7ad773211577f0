"""Check whether a run with these settings may resume from a checkpoint.

The manifest of the checkpoint is enough: the check takes place before ranks start or anything is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from distributed.checkpoint.directory import CheckpointInfo
from distributed.training.settings import BASE_ONLY, FROM_SCRATCH, FULL_FINE_TUNING, TWO_PHASES, ConfigError, Settings

# What may differ between a checkpoint and the run that resumes from it, and the consequence.
SCHEDULE = "the learning rate follows the new value from here on"
NEW_VALUE = "the new value applies from here on"
ROUNDING = "sums are rounded differently from here on"
CHANGEABLE = {
    "world": "the same data in the same order; sums are rounded differently, dropout draws other numbers",
    "batch": "resuming at the same position in the data; to keep the global batch, restore train.batch_size",
    "corpus": "resuming at the same position of different data",
    "seed": "the data is in another order from here on",
    "steps": "the learning rate follows the new length from here on",
    "learning_rate": SCHEDULE, "min_learning_rate": SCHEDULE, "warmup_steps": SCHEDULE,
    "weight_decay": NEW_VALUE, "beta1": NEW_VALUE, "beta2": NEW_VALUE, "grad_clip": NEW_VALUE,
    "accumulation": ROUNDING, "precision": ROUNDING, "compile": ROUNDING,
    "deterministic": ROUNDING,
    "evaluate_windows": "held-out losses are not comparable with earlier ones",
}  # fmt: skip


def check_resumable(checkpoint: CheckpointInfo, settings: Settings, vocab_size: int | None) -> None:
    """Check that a run with these settings can resume from the checkpoint.

    Args:
        vocab_size: None when it follows from the data, which has not been read yet.

    Raises:
        ConfigError: the checkpoint has another model or other data settings, or checkpoint.resume is never.
        CheckpointError: the checkpoint is sharded (fsdp) and this run is not, or the reverse.
    """
    if settings.checkpoint.resume == "never":
        raise ConfigError(f"checkpoint.resume=never, but {checkpoint.path} exists; set another checkpoint.dir")
    checkpoint.check_sharding(sharded=settings.distributed.strategy == "fsdp")
    # With another participant or mode, the checkpoint may have trained on text that this run holds out.
    if differ := _differences("data", experiment_of(settings), checkpoint.facts):
        raise ConfigError(
            f"{checkpoint.path} was written with other data settings: {differ}; "
            "set another prefix, or another checkpoint.dir"
        )
    model: dict[str, Any] = settings.model.model_dump()
    if vocab_size is None:
        del model["vocab_size"]
    else:
        model["vocab_size"] = vocab_size
    if differ := _differences("model", model, checkpoint.facts.get("model", {})):
        raise ConfigError(
            f"{checkpoint.path} is of another model: {differ}; "
            "use the checkpoint's values, or set another checkpoint.dir"
        )


def _differences(section: str, settings: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{section}.{key}={value} (checkpoint: {saved.get(key)})"
        for key, value in settings.items()
        if value != saved.get(key)
    )


def experiment_of(settings: Settings) -> dict[str, Any]:
    """The data settings that must not change when a run resumes; None for a setting that has no effect in the mode."""
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


def check_base_model(checkpoint: CheckpointInfo, digest: str | None) -> None:
    """Raise ConfigError when the run of the checkpoint started from another base model.

    digest: of this run's base model; None: random weights.
    """
    saved = checkpoint.facts.get("base_model")
    if digest != saved:
        raise ConfigError(
            f"{checkpoint.path} was trained from another base model: now {digest}, checkpoint: {saved}; "
            "set another prefix, or another checkpoint.dir, or pass the base model of the checkpoint"
        )


def changeable(settings: Settings) -> dict[str, Any]:
    """The settings in section train that may change when a run resumes."""
    return {name: value for name, value in settings.train.model_dump().items() if name in CHANGEABLE}


def changes(checkpoint: CheckpointInfo, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield one warning for each fact that differs from the checkpoint's, with the consequence."""
    for name, meaning in CHANGEABLE.items():
        if name in checkpoint.facts and checkpoint.facts[name] != facts[name]:
            yield f"{name} was {checkpoint.facts[name]} in {checkpoint.path}, now it is {facts[name]}: {meaning}"


def already_complete(checkpoint: CheckpointInfo, steps: int, settings: Settings) -> str:
    """The message for a run whose last step is done; empty for any other."""
    if checkpoint.step < steps:
        return ""
    length = "steps" if settings.train.steps else "epochs"
    return (
        f"nothing left to do: {checkpoint.path} has {checkpoint.step:,} of {steps:,} steps; "
        f"raise train.{length} to continue, or set another checkpoint.dir to start over"
    )
