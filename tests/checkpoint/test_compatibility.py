"""The manifest alone shows whether a checkpoint fits the settings of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distributed.checkpoint.compatibility import (
    CHANGEABLE,
    already_complete,
    changeable,
    changes,
    check_base_model,
    check_resumable,
)
from distributed.checkpoint.directory import CheckpointError, CheckpointInfo
from distributed.training.settings import ConfigError, Settings

MODEL = {"n_layer": 2, "n_head": 1, "n_embd": 8, "block_size": 16}
FOLD: dict[str, Any] = {"participant": "a", "mode": "heldout"}
TARGET: dict[str, Any] = {"participant": "a", "mode": "full_fine_tuning", "target_data_pct": 0.5, "target_batch_pct": 1}
SAVED_MODEL = {**Settings(model=MODEL, train={"steps": 1, "batch_size": 1}).model.model_dump(), "vocab_size": 256}


def settings(**sections: dict[str, Any]) -> Settings:
    return Settings.model_validate({"model": MODEL, "train": {"steps": 1, "batch_size": 1}, **sections})


def info(sharded: bool = False, **facts: Any) -> CheckpointInfo:
    return CheckpointInfo(Path("c/step_00000007"), 7, None, 1, sharded, "", {"model": SAVED_MODEL, **facts}, {})


@pytest.mark.parametrize("vocab_size", [None, 256])
def test_a_compatible_checkpoint_is_accepted(vocab_size: int | None) -> None:
    check_resumable(info(), settings(), vocab_size)
    check_resumable(info(**FOLD), settings(data=FOLD), vocab_size)
    check_resumable(info(participant=None, mode=None), settings(), vocab_size)
    check_resumable(info(**TARGET), settings(data=TARGET), vocab_size)
    check_resumable(info(mode="base_only"), settings(data={"mode": "base_only"}), vocab_size)
    check_resumable(info(sharded=True), settings(distributed={"strategy": "fsdp"}), vocab_size)


@pytest.mark.parametrize(
    ("checkpoint", "sections", "vocab_size", "message"),
    [
        (info(), {"checkpoint": {"resume": "never"}}, None, "checkpoint.resume=never, but c/step_00000007 exists"),
        (info(), {"model": {**MODEL, "n_layer": 3}}, None, "of another model: model.n_layer=3 (checkpoint: 2); use"),
        (info(), {}, 300, "of another model: model.vocab_size=300 (checkpoint: 256); use"),
        (info(model={}), {}, None, "model.n_layer=2 (checkpoint: None)"),
        (info(), {"data": FOLD}, None, "data.participant=a (checkpoint: None), data.mode=heldout (checkpoint: N"),
        (info(**FOLD), {}, None, "with other data settings: data.participant=None (checkpoint: a)"),
        (info(**FOLD | {"mode": "single"}), {"data": FOLD}, None, "settings: data.mode=heldout (checkpoint: single)"),
        (
            info(**TARGET),
            {"data": TARGET | {"mode": "from_scratch"}},
            None,
            "data.mode=from_scratch (checkpoint: full_fine_tu",
        ),
        (
            info(**TARGET),
            {"data": TARGET | {"target_data_pct": 1}},
            None,
            "data.target_data_pct=1.0 (checkpoint: 0.5); set a",
        ),
        (info(**TARGET), {"data": TARGET | {"target_batch_pct": 0.5}}, None, "target_batch_pct=0.5 (checkpoint: 1)"),
        (
            info(**TARGET | {"base_participants": ["b", "c"]}),
            {"data": TARGET | {"base_participants": ["b"]}},
            None,
            "data.base_participants=['b'] (checkpoint: ['b', 'c'])",
        ),
        (info(), {"data": {"mode": "base_only"}}, None, "data settings: data.mode=base_only (checkpoint: None)"),
        (info(mode="base_only"), {}, None, "with other data settings: data.mode=None (checkpoint: base_only)"),
        (info(sharded=True), {}, None, "is sharded, but this run uses unsharded checkpoints"),
        (info(), {"distributed": {"strategy": "fsdp"}}, None, "is unsharded, but this run uses sharded"),
    ],
)
def test_an_incompatible_checkpoint_is_refused(
    checkpoint: CheckpointInfo, sections: dict[str, Any], vocab_size: int | None, message: str
) -> None:
    with pytest.raises((ConfigError, CheckpointError)) as refused:
        check_resumable(checkpoint, settings(**sections), vocab_size)
    assert message in str(refused.value)


@pytest.mark.parametrize(("saved", "now"), [("3f" * 32, "4e" * 32), (None, "4e" * 32), ("3f" * 32, None)])
def test_a_checkpoint_of_another_base_model_is_refused(saved: str | None, now: str | None) -> None:
    check_base_model(info(base_model=saved), saved)
    with pytest.raises(ConfigError, match=f"another base model: now {now}, checkpoint: {saved}"):
        check_base_model(info(base_model=saved), now)


def test_every_changed_setting_is_reported_with_its_effect() -> None:
    before = {
        **changeable(settings()),
        "precision": "float32",
        "world": 2,
        "batch": 1,
        "corpus": "c",
        "seed": 1337,
        "steps": 9,
    }
    assert before.keys() == CHANGEABLE.keys()
    assert list(changes(info(**before), before)) == []
    assert list(changes(info(), before)) == [], "a checkpoint of an earlier version"
    new = settings(train={"steps": 1, "batch_size": 1, "learning_rate": 0.01, "warmup_steps": 5})
    assert list(changes(info(**before), {**before, **changeable(new), "precision": "float32"})) == [
        "steps was 9 in c/step_00000007, now it is 1: the learning rate follows the new length from here on",
        "learning_rate was 0.0003 in c/step_00000007, now it is 0.01: the learning rate follows the new value "
        "from here on",
        "warmup_steps was 0 in c/step_00000007, now it is 5: the learning rate follows the new value from here on",
    ]


def test_every_training_setting_is_reported_or_has_no_effect_on_the_result() -> None:
    no_effect = {"base_steps", "base_model", "epochs", "gradient_checkpointing", "evaluate_every"}
    reported_as_batch = {"batch_size", "batch_size_per_device"}
    assert type(settings().train).model_fields.keys() - no_effect - reported_as_batch <= CHANGEABLE.keys()


@pytest.mark.parametrize(("steps", "length"), [(7, {"steps": 7}), (5, {"epochs": 1})])
def test_a_complete_run_gets_a_message_with_the_remedy(steps: int, length: dict[str, int]) -> None:
    now = settings(train={**length, "batch_size": 1})
    assert already_complete(info(), 8, now) == ""
    assert already_complete(info(), steps, now) == (
        f"nothing left to do: c/step_00000007 has 7 of {steps} steps; raise train.{next(iter(length))} to continue, or "
        "set another checkpoint.dir to start over"
    )


def test_a_checkpoint_without_a_base_model_entry_has_no_base_model() -> None:
    check_base_model(info(), None)
